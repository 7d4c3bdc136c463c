"""Process groups and collectives for hand-written loops, in the names that PyTorch's users know.

    from odyssey import distributed as dist

    dist.init_process_group()                      # mpirun -n 4 python script.py; alone it is a world of one
    total = dist.all_reduce(np.ones(3))            # a new array; out= for in place
    mean = dist.metric_average(loss.item(), weight=len(batch))

Values are odyssey.Tensor, NumPy arrays or Python numbers; what comes back is of the same kind, and not on the tape.
`DistributedDataParallel` (ddp.py) keeps a model's gradients in step.

What it is not: a transport (comm/), or a plan of who sends what when (parallel/). A DistributedTrainer needs none of
it.
"""

from __future__ import annotations

import datetime
import enum
import hashlib
import importlib
import importlib.util
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from . import comm as communication
from . import launcher
from .comm import Communicator, ReduceOp
from .comm import base as _base
from .errors import CollectiveError, ConfigError, ShapeError
from .program import Block
from .tensor import Tensor, make

if TYPE_CHECKING:
    from .config import DistributedConfig
    from .data import DistributedSampler
    from .ddp import DDP, DistributedDataParallel
    from .launch import DistributedLauncher, LaunchConfig, launch_distributed_training
    from .profiling import PerformanceMonitor, profile_communication

_HOME = {
    "DDP": "ddp",
    "DistributedConfig": "config",
    "DistributedDataParallel": "ddp",
    "DistributedLauncher": "launch",
    "DistributedSampler": "data",
    "LaunchConfig": "launch",
    "PerformanceMonitor": "profiling",
    "launch_distributed_training": "launch",
    "profile_communication": "profiling",
}

__all__ = [
    "DDP",
    "Backend",
    "DistributedConfig",
    "DistributedDataParallel",
    "DistributedLauncher",
    "DistributedSampler",
    "LaunchConfig",
    "PerformanceMonitor",
    "ProcessGroup",
    "ReduceOp",
    "Work",
    "World",
    "all_gather",
    "all_reduce",
    "all_reduce_mean",
    "all_reduce_sum",
    "all_reduce_sum_group",
    "all_to_all",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "gather",
    "get_backend",
    "get_distributed_info",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "launch_distributed_training",
    "metric_average",
    "new_group",
    "no_sync",
    "profile_communication",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Backend(str, enum.Enum):
    """Transports. A string of the same spelling does as well.

    MOCK is for threads that `comm.mock.run` started; NCCL for ranks under an MPI launcher with a GPU each.
    """

    AUTO = "auto"
    MPI = "mpi"
    SHM = "shm"
    GLOO = "gloo"
    LOCAL = "local"
    MOCK = "mock"
    NCCL = "nccl"

    def __str__(self) -> str:
        return self.value


# --- groups ----------------------------------------------------------------------------------------------------------


class _State:
    """What init_process_group() made: one per process, and one per thread of a mock world."""

    def __init__(self) -> None:
        self.world: World | None = None
        # In the order in which they were made, the same on all ranks: closing one is a collective call.
        self.groups: dict[ProcessGroup, None] = {}
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()  # DistributedDataParallel, for no_sync()
        self.environment: dict[str, str | None] = {}  # variables that were set here, as they were before


_process = _State()
_threads = threading.local()


def _state() -> _State:
    if getattr(_base.here, "world", None) is None:
        return _process
    if getattr(_threads, "of", None) is not _base.here.world:
        _threads.of, _threads.state = _base.here.world, _State()
    return _threads.state


class ProcessGroup:
    """Some of the ranks, in an order. All ranks of the world make it, at the same place of the program.

    Args:
        ranks: world ranks of the members, each once.

    Attributes:
        ranks: the same as a tuple. comm: the communicator; None on a rank that is not a member.

    Raises:
        ConfigError: no process group was initialized, or a rank is not in the world.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._open(tuple(int(r) for r in ranks), _world().comm.group(ranks))

    def _open(self, ranks: tuple[int, ...], comm: Communicator | None) -> None:
        self.ranks, self.comm = ranks, comm
        _state().groups[self] = None

    @property
    def is_member(self) -> bool:
        """Whether this rank is in the group."""
        return self.comm is not None

    def rank(self) -> int:
        """This rank's place in the group, -1 if it is not a member."""
        return -1 if self.comm is None else self.comm.rank

    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def world_size(self) -> int:
        """Same as size()."""
        return self.size()

    def backend(self) -> str:
        """Name of the transport."""
        return _world().comm.name if self.comm is None else self.comm.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of ranks {', '.join(map(str, self.ranks))}, this one at {self.rank()}>"

    def _member(self, what: str) -> Communicator:
        if self.comm is None:
            raise ConfigError(
                f"[dist] {what} in the group of ranks {list(self.ranks)}, but rank {_world().rank()} is not in it; "
                "ask group.is_member first"
            )
        return self.comm

    def _place(self, what: str, rank: int) -> int:
        """A world rank's place in the group."""
        if rank not in self.ranks:
            raise ConfigError(f"[dist] {what} {rank}; it must be one of the group's ranks {list(self.ranks)}")
        return self.ranks.index(rank)


class World(ProcessGroup):
    """All ranks. `World()` is the initialized world; it initializes it, with the default settings, if none is."""

    def __new__(cls) -> World:
        if _state().world is None:
            init_process_group()
        return _state().world

    def __init__(self) -> None:
        """Made by init_process_group()."""


def _world() -> World:
    world = _state().world
    if world is None:
        raise ConfigError("[dist] there is no process group; call dist.init_process_group() first")
    return world


def _group(group: ProcessGroup | None) -> ProcessGroup:
    if group is None:
        return _world()
    if not isinstance(group, ProcessGroup):
        raise ConfigError(f"[dist] group is a {type(group).__name__}; give what new_group() returned, or nothing")
    return group


def init_process_group(
    backend: Backend | str = "auto",
    init_method: str | None = "env://",
    world_size: int | None = None,
    rank: int | None = None,
    timeout: float | datetime.timedelta | None = None,
) -> World:
    """Connects this process with the others that the launcher started; every process calls it once, first of all.

    Args:
        backend: "auto", "mpi", "shm", "gloo", "nccl" or "local" (`Backend`); what "auto" picked is in `get_backend()`.
        init_method: how processes meet without MPI: "env://" (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE) or
            "tcp://HOST:PORT", which needs world_size and rank. Under an MPI launcher there is nothing to say.
        world_size, rank: what is expected; for "gloo" they stand in for variables that are not set. A world of one
            that nobody launched needs no transport: its backend is "local" whatever was asked for.
        timeout: seconds, or a timedelta, that an operation waits for other ranks; default ODYSSEY_TIMEOUT, else 600.

    Returns:
        The world.

    Raises:
        ConfigError: the world has another size or this process another rank than expected, the backend cannot be used,
            or there is a process group already.
    """
    state = _state()
    if state.world is not None:
        raise ConfigError("[dist] there is a process group already; call dist.destroy_process_group() before another")
    name = str(backend)
    if name not in tuple(b.value for b in Backend):
        raise ConfigError(f"[dist] backend {name!r} is unknown; choose from auto, mpi, shm, gloo, nccl, local")
    mocked = getattr(_base.here, "world", None)
    if name == "mock" and mocked is None:
        raise ConfigError("[dist] backend 'mock' is for threads that comm.mock.run started; use 'auto'")
    for what, value in (("world_size", world_size), ("rank", rank)):
        if value is not None and (not isinstance(value, int) or value < (what == "world_size")):
            raise ConfigError(f"[dist] {what} is {value!r}; it must be an integer of at least {what == 'world_size':d}")
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if seconds is not None and not 0 < seconds < math.inf:
        raise ConfigError(f"[dist] timeout is {timeout!r}; it must be a number of seconds above 0")
    if mocked is not None:
        if name not in ("auto", "mock"):
            raise ConfigError(f"[dist] backend {name!r} in a thread of a mock world; use 'auto'")
        comm = mocked
        _check(comm, world_size, rank)
    else:
        alone = world_size == 1 and name in ("auto", "gloo") and _expected() in (None, 1)
        given = _rendezvous(name, init_method, world_size, rank)
        if not alone:
            _set(state, given)
        try:
            comm = communication.world("local" if alone else name)
            _check(comm, world_size, rank)
        except BaseException:
            _unset(state)
            raise
    if seconds is not None:
        _set(state, {"ODYSSEY_TIMEOUT": str(seconds)})
    world = object.__new__(World)
    world._open(tuple(range(comm.size)), comm)
    state.world = world
    return world


def _expected() -> int | None:
    """The number of processes that the environment speaks of, if it does."""
    found = launcher.launched() or launcher.rendezvous()
    return None if found is None else found.size


def _rendezvous(backend: str, init_method: str | None, world_size: int | None, rank: int | None) -> dict[str, str]:
    """The variables of env:// that the arguments of init_process_group() stand for, for Gloo."""
    method = init_method or "env://"
    if method != "env://" and not method.startswith("tcp://"):
        raise ConfigError(f"[dist] init_method {method!r}; it must be 'env://' or 'tcp://HOST:PORT'")
    given: dict[str, Any] = {}
    if method.startswith("tcp://"):
        host, _, port = method[6:].rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"[dist] init_method {method!r}; it must be 'tcp://HOST:PORT', as tcp://node1:29500")
        if backend != "gloo" or world_size is None or rank is None:
            raise ConfigError("[dist] init_method 'tcp://...' goes with backend='gloo', world_size= and rank=")
        given = {"MASTER_ADDR": host, "MASTER_PORT": port}
    if backend != "gloo" or launcher.launched() is not None:
        return {}
    if world_size is not None and rank is not None:
        given |= {"WORLD_SIZE": world_size, "RANK": rank}
    for name, value in given.items():
        there = os.environ.get(name, str(value))
        if there != str(value):
            raise ConfigError(f"[dist] {name} is {there} in the environment, but {value} was given; say one of them")
    return {name: str(value) for name, value in given.items()}


def _set(state: _State, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        state.environment.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def _unset(state: _State) -> None:
    """Puts the variables back that _set() has set."""
    for name, value in state.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    state.environment = {}


def _check(comm: Communicator, world_size: int | None, rank: int | None) -> None:
    """Raises ConfigError unless the world is the expected one: a wrong world gives wrong means, without an error."""
    running = f"{comm.size} rank{' is' if comm.size == 1 else 's are'} running"
    if world_size is not None and world_size != comm.size:
        raise ConfigError(
            f"[dist] world_size={world_size} was given, but {running} ({comm.why}); start {world_size} with "
            f"mpirun -n {world_size}, or leave world_size out"
        )
    if rank is not None and rank != comm.rank:
        raise ConfigError(
            f"[dist] rank={rank} was given, but this process is rank {comm.rank} of {comm.size}; leave rank out, the "
            "launcher knows it"
        )
    text = os.environ.get("WORLD_SIZE", "")
    if comm.name != "mock" and text.isdigit() and int(text) != comm.size:
        raise ConfigError(
            f"[dist] WORLD_SIZE={text} in the environment, but {running} ({comm.why}); unset it, or start {text} "
            f"with mpirun -n {text}, or give all of RANK, MASTER_ADDR and MASTER_PORT for backend='gloo'"
        )


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Ends a group, or all groups and the world. All its ranks call it. Nothing happens if there is none."""
    state = _state()
    if state.world is None:
        return
    if group is not None and group is not state.world:
        _close(group)
        return
    for other in list(state.groups):
        if other is not state.world:
            _close(other)
    _unset(state)
    state.world = None
    state.groups.clear()


def _close(group: ProcessGroup) -> None:
    _state().groups.pop(group, None)
    if group.comm is not None:
        group.comm.close()
    group.comm = None


def new_group(ranks: Sequence[int] | None = None) -> ProcessGroup:
    """A group of these world ranks (default all), in this order. All ranks of the world call it, members or not."""
    return ProcessGroup(range(_world().size()) if ranks is None else ranks)


def is_available() -> bool:
    """Whether processes can be connected here: MPI or PyTorch's Gloo is installed."""
    return any(importlib.util.find_spec(name) is not None for name in ("mpi4py", "torch"))


def is_initialized() -> bool:
    """Whether init_process_group() was called."""
    return _state().world is not None


def get_rank(group: ProcessGroup | None = None) -> int:
    """This rank's place in a group, -1 if it is not a member; in the world by default."""
    return _group(group).rank()


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks of a group; of the world by default."""
    return _group(group).size()


def get_backend(group: ProcessGroup | None = None) -> str:
    """Name of the transport: "mpi", "shm", "gloo", "local" or "mock"."""
    return _group(group).backend()


def get_distributed_info() -> dict[str, Any]:
    """What is there, as a dict; before init_process_group() what is about the world is None.

    Keys: available, initialized, world_size, rank, local_rank and local_world_size (those on this machine), backend,
    why (one line: why this backend), timeout (seconds), launcher (who started the processes, or None).
    """
    world = _state().world
    comm = None if world is None else world.comm
    found = launcher.launched() or launcher.rendezvous()
    return {
        "available": is_available(),
        "initialized": comm is not None,
        "world_size": comm and comm.size,
        "rank": None if comm is None else comm.rank,
        "local_rank": None if comm is None else comm.local_rank,
        "local_world_size": comm and comm.local_size,
        "backend": comm and comm.name,
        "why": comm and comm.why,
        "timeout": _base.deadline(),
        "launcher": found and found.launcher,
    }


# --- values ----------------------------------------------------------------------------------------------------------


def _array(value: Any, what: str) -> np.ndarray:
    """A tensor, array or number as an array."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if isinstance(value, (bool, int)):
        return np.asarray(int(value), np.int64)
    if isinstance(value, float):
        return np.asarray(value, np.float64)
    raise ShapeError(f"[dist] {what} of a {type(value).__name__}; give a Tensor, a NumPy array or a number")


def _into(out: Any, what: str) -> np.ndarray | None:
    """The memory of an `out` argument."""
    if out is None or isinstance(out, np.ndarray):
        return out
    if not isinstance(out, Tensor):
        raise ShapeError(f"[dist] {what}: out is a {type(out).__name__}; give a Tensor or a NumPy array")
    if out.layout != "rows":
        raise ShapeError(f"[dist] {what}: out is the result of an op, whose memory is not in rows; give a Tensor(...)")
    return out.data


def _like(value: Any, array: np.ndarray) -> Any:
    """An array as what `value` is: a tensor, an array or a number."""
    if isinstance(value, Tensor):
        return make(Block(array), array.shape, "rows", array.dtype)
    if isinstance(value, np.ndarray) or array.ndim:
        return array
    return array[()] if isinstance(value, np.generic) else array.item()


class Work:
    """A collective or message under way (async_op=True); `wait()` gives what the blocking form returns.

    The arguments must stay as they are until then.
    """

    def __init__(self, wait: Callable[[], Any], test: Callable[[], bool]) -> None:
        self._wait, self._test = wait, test
        self._done = False
        self._result: Any = None

    def wait(self) -> Any:
        """Waits and returns the result; the same again if called again.

        Raises:
            CollectiveError: the ranks' calls differ, or one did not come before the deadline.
        """
        if not self._done:
            self._result = self._wait()
            self._done = True
        return self._result

    def is_completed(self) -> bool:
        """Whether wait() would return, or raise, at once; calling it moves the operation on."""
        return self._done or self._test()


def _go(request: Any, finish: Callable[[Any], Any], async_op: bool) -> Any:
    work = Work(lambda: finish(request.wait()), request.test)
    return work if async_op else work.wait()


# --- collectives -----------------------------------------------------------------------------------------------------


def all_reduce(
    tensor: Any,
    op: ReduceOp | str = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    out: Any = None,
) -> Any:
    """The values of all ranks combined, on all of them.

    Args:
        tensor: of the same shape and dtype on all ranks. It is left as it is, unless it is `out` too.
        op: ReduceOp.SUM, MEAN (= AVERAGE), MAX, MIN or PROD, or its name. The mean of integers is refused.
        group: a group of ranks; the world by default.
        async_op: return a `Work` at once.
        out: Tensor or array that takes the result.

    Returns:
        A new tensor, array or number like `tensor`; or `out`; or a Work.

    Raises:
        CollectiveError: a rank calls something else. ShapeError, ConfigError: an argument is not allowed.
    """
    comm = _group(group)._member("all_reduce")
    a, into = _array(tensor, "all_reduce"), _into(out, "all_reduce")
    request = comm.all_reduce_start(a, op, into)
    return _go(request, lambda r: _like(tensor, r) if out is None else out, async_op)


def all_reduce_sum(tensor: Any, group: ProcessGroup | None = None) -> Any:
    """The sum over the ranks."""
    return all_reduce(tensor, ReduceOp.SUM, group)


def all_reduce_mean(tensor: Any, group: ProcessGroup | None = None) -> Any:
    """The mean over the ranks, each counting the same; `metric_average` weights them."""
    return all_reduce(tensor, ReduceOp.MEAN, group)


def all_reduce_sum_group(tensor: Any, group: ProcessGroup) -> Any:
    """The sum over the ranks of a group."""
    return all_reduce(tensor, ReduceOp.SUM, group)


def reduce(
    tensor: Any,
    dst: int = 0,
    op: ReduceOp | str = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """The values of all ranks combined, on world rank `dst`; None elsewhere."""
    g = _group(group)
    comm = g._member("reduce")
    request = comm.reduce_start(_array(tensor, "reduce"), op, g._place("reduce to rank", dst))
    return _go(request, lambda r: None if r is None else _like(tensor, r), async_op)


def broadcast(
    tensor: Any, src: int = 0, group: ProcessGroup | None = None, async_op: bool = False, *, out: Any = None
) -> Any:
    """The value of world rank `src`, on all ranks. All give the same shape and dtype; `out=tensor` overwrites it."""
    g = _group(group)
    comm = g._member("broadcast")
    a, into = _array(tensor, "broadcast"), _into(out, "broadcast")
    if into is None:
        into = np.array(a, order="C")
    elif out is not tensor:
        if into.shape != a.shape or into.dtype != a.dtype:
            raise ShapeError(
                f"[dist] broadcast: out is {into.dtype} {into.shape}, the value {a.dtype} {a.shape}; make them alike"
            )
        into[...] = a
    request = comm.broadcast_start(into, g._place("broadcast from rank", src))
    return _go(request, lambda r: _like(tensor, r) if out is None else out, async_op)


def all_gather(tensor: Any, group: ProcessGroup | None = None, async_op: bool = False, *, out: Any = None) -> Any:
    """The values of all ranks, in their order, on all of them.

    Args:
        tensor: of the same shape and dtype on all ranks.
        out: a list of one Tensor or array per rank, or an array (ranks, ...), that takes them.

    Returns:
        A list of one per rank, or `out`, or a Work.
    """
    if isinstance(tensor, (list, tuple)):
        raise ShapeError("[dist] all_gather returns the list: write values = dist.all_gather(tensor), or out=list")
    comm = _group(group)._member("all_gather")
    a = _array(tensor, "all_gather")
    if isinstance(out, (list, tuple)):
        places = [_into(o, "all_gather") for o in out]
        if len(places) != comm.size or any(p.shape != a.shape or p.dtype != a.dtype for p in places):
            raise ShapeError(f"[dist] all_gather: out must be {comm.size} tensors of {a.dtype} {a.shape}, one per rank")
        into = None
    else:
        places, into = [], _into(out, "all_gather")

    def finish(rows: np.ndarray) -> Any:
        for place, row in zip(places, rows, strict=False):
            place[...] = row
        return [_like(tensor, row) for row in rows] if out is None else out

    return _go(comm.all_gather_start(a, into), finish, async_op)


def gather(tensor: Any, dst: int = 0, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """The values of all ranks as a list, on world rank `dst`; None elsewhere."""
    g = _group(group)
    comm = g._member("gather")
    request = comm.gather_start(_array(tensor, "gather"), g._place("gather to rank", dst))
    return _go(request, lambda r: None if r is None else [_like(tensor, row) for row in r], async_op)


def scatter(
    tensors: Any = None, src: int = 0, group: ProcessGroup | None = None, async_op: bool = False, *, out: Any = None
) -> Any:
    """Piece r of what world rank `src` gives, on rank r.

    Args:
        tensors: on `src` a list of one tensor or array per rank, or one with as many rows; None on the others.
        out: Tensor or array that takes the piece.

    Returns:
        A tensor if `src` gave tensors, else an array (a piece of a list of numbers is an array of no axes).
    """
    g = _group(group)
    comm = g._member("scatter")
    root = g._place("scatter from rank", src)
    kind = np.zeros(1, np.uint8)
    rows = None
    if comm.rank == root:
        if tensors is None:
            raise ShapeError(f"[dist] scatter: rank {src} gives None; give it a list of {comm.size}, one per rank")
        kind[0] = isinstance(tensors, Tensor) or any(isinstance(t, Tensor) for t in _listed(tensors))
        rows = _stacked(tensors, comm.size, "scatter")
    told = comm.broadcast_start(kind, root)  # whether it is tensors, which the others cannot know
    request = comm.scatter_start(rows, root, _into(out, "scatter"))

    def finish(piece: np.ndarray) -> Any:
        told.wait()
        if out is not None:
            return out
        return make(Block(piece), piece.shape, "rows", piece.dtype) if kind[0] else piece

    return _go(request, finish, async_op)


def reduce_scatter(
    tensor: Any,
    op: ReduceOp | str = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    out: Any = None,
) -> Any:
    """Rows r * n to (r + 1) * n of the combined (size * n, ...) values of all ranks, on rank r.

    A list of one tensor per rank is combined as well; rank r gets the r-th.
    """
    comm = _group(group)._member("reduce_scatter")
    if isinstance(tensor, (list, tuple)):
        first, a = tensor[0] if tensor else None, _stacked(tensor, comm.size, "reduce_scatter")
        request = comm.reduce_scatter_start(a, op)
        return _go(request, lambda r: _given(out, _like(first, r[0]), "reduce_scatter"), async_op)
    request = comm.reduce_scatter_start(_array(tensor, "reduce_scatter"), op, _into(out, "reduce_scatter"))
    return _go(request, lambda r: _like(tensor, r) if out is None else out, async_op)


def all_to_all(tensors: Any, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Item p of a list of one per rank goes to rank p; item p of the result came from rank p.

    An array or tensor of as many rows as ranks does as well; then the result is one too.
    """
    comm = _group(group)._member("all_to_all")
    a = _stacked(tensors, comm.size, "all_to_all")

    def finish(rows: np.ndarray) -> Any:
        if isinstance(tensors, (list, tuple)):
            return [_like(tensors[0], row) for row in rows]
        return _like(tensors, rows)

    return _go(comm.all_to_all_start(a), finish, async_op)


def barrier(group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Waits until all ranks of the group are here."""
    comm = _group(group)._member("barrier")
    return _go(comm.barrier_start(), lambda r: None, async_op)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _stacked(values: Any, size: int, what: str) -> np.ndarray:
    """One value per rank as an array of as many rows."""
    if not isinstance(values, (list, tuple)):
        return _array(values, what)
    arrays = [_array(v, what) for v in values]
    if len(arrays) != size or any(a.shape != arrays[0].shape or a.dtype != arrays[0].dtype for a in arrays):
        raise ShapeError(
            f"[dist] {what} of {len(arrays)} values for {size} ranks; give one each, of one shape and dtype"
        )
    return np.stack(arrays)


def _given(out: Any, value: Any, what: str) -> Any:
    """A result, or `out` with it."""
    if out is None:
        return value
    into, a = _into(out, what), _array(value, what)
    if into.shape != a.shape or into.dtype != a.dtype:
        raise ShapeError(f"[dist] {what}: out is {into.dtype} {into.shape}; it must be {a.dtype} {a.shape}")
    into[...] = a
    return out


# --- one to one ------------------------------------------------------------------------------------------------------


def send(tensor: Any, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Sends to world rank `dst`. May wait until it is received: in a ring, use isend or irecv."""
    isend(tensor, dst, group, tag).wait()


def isend(tensor: Any, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Work:
    """`send`, not waited for; the tensor must stay as it is until the Work is complete."""
    g = _group(group)
    a = _array(tensor, "send")
    return _go(g._member("send").send_start(a, g._place("send to rank", dst), tag), lambda r: None, True)


def recv(tensor: Any, src: int, group: ProcessGroup | None = None, tag: int = 0) -> Any:
    """Receives what world rank `src` sent with this tag into a Tensor or array, and returns it.

    Raises:
        CollectiveError: what was sent has another dtype or number of elements.
    """
    return irecv(tensor, src, group, tag).wait()


def irecv(tensor: Any, src: int, group: ProcessGroup | None = None, tag: int = 0) -> Work:
    """`recv`, not waited for."""
    g = _group(group)
    into = _into(tensor, "recv")
    if into is None:
        raise ShapeError("[dist] recv into nothing; give a Tensor or NumPy array of what is sent")
    return _go(g._member("recv").recv_start(into, g._place("recv from rank", src), tag), lambda r: tensor, True)


# --- metrics, and DDP ------------------------------------------------------------------------------------------------


def metric_average(value: Any, name: str = "metric", weight: float = 1.0, group: ProcessGroup | None = None) -> float:
    """The mean of a number over the ranks, weighted: sum of value * weight / sum of weight, the same on all ranks.

    Args:
        value: a number, or a tensor or array of one element.
        name: of the metric; must be the same on all ranks, so that a loss is not averaged with an accuracy.
        weight: of this rank, at least 0: its number of samples, say. A rank without samples gives 0, and its value is
            not looked at.

    Returns:
        The mean; NaN if all weights are 0. Added up exactly, so it does not depend on the order of ranks.

    Raises:
        CollectiveError: another rank averages another metric.
    """
    comm = _group(group)._member("metric_average")
    if not 0 <= weight < math.inf:
        raise ConfigError(f"[dist] metric_average: weight is {weight!r}; it must be at least 0 and finite")
    a = _array(value, "metric_average")
    if a.size != 1:
        raise ShapeError(f"[dist] metric_average of shape {a.shape}; give one number")
    number = float(a.reshape(-1)[0]) if weight else 0.0
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")  # exact in float64
    rows = comm.all_gather(np.array([number, weight, digest], np.float64))
    other = np.flatnonzero(rows[:, 2] != rows[0, 2])
    if len(other):
        members = _group(group).ranks
        raise CollectiveError(
            f"[dist] rank {members[comm.rank]} averages {name!r}, but ranks {members[0]} and {members[other[0]]} name "
            "different metrics; all ranks average the same ones in the same order"
        )
    total = math.fsum(rows[:, 1])
    if not total:
        return math.nan
    products = rows[:, 0] * rows[:, 1]
    return math.fsum(products) / total if np.isfinite(products).all() else float(products.sum() / total)


@contextmanager
def no_sync(model: Any = None) -> Iterator[None]:
    """Backward passes inside do not communicate: `model.no_sync()` of a DDP model, or of all there are."""
    with ExitStack() as stack:
        for m in [model] if model is not None else list(_state().models):
            if not hasattr(m, "no_sync"):
                raise ConfigError(f"[dist] no_sync of a {type(m).__name__}; give a DistributedDataParallel")
            stack.enter_context(m.no_sync())
        yield
