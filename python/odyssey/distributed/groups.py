"""Process groups: how processes meet, who is in a group, and what the world is."""

from __future__ import annotations

import datetime
import enum
import importlib.util
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from .. import comm as communication
from ..base import launcher
from ..comm import Communicator
from ..comm import base as _base
from ..comm.requests import deadline
from ..errors import ConfigError, check_integer, check_number

__all__ = [
    "Backend",
    "ProcessGroup",
    "World",
    "destroy_process_group",
    "get_backend",
    "get_distributed_info",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_available",
    "is_initialized",
    "new_group",
    "no_sync",
]


class Backend(str, enum.Enum):
    """Transports; a string of the same spelling does as well.

    MOCK is for threads that `comm.mock.run` started, NCCL for ranks under an MPI launcher with a
    GPU each.
    """

    AUTO = "auto"
    MPI = "mpi"
    SHM = "shm"
    GLOO = "gloo"
    LOCAL = "local"
    MOCK = "mock"
    NCCL = "nccl"
    Mpi = "mpi"
    Gloo = "gloo"
    Nccl = "nccl"
    Mock = "mock"

    def __str__(self) -> str:
        return self.value


class _State:
    """Result of init_process_group(): one per process, and one per thread of a mock world."""

    def __init__(self) -> None:
        self.world: World | None = None
        # In the order in which they were made, the same on all ranks: closing one is a collective
        # call.
        self.groups: dict[ProcessGroup, None] = {}
        # DistributedDataParallel, for no_sync()
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        # variables that were set here, as they were before
        self.environment: dict[str, str | None] = {}


_process = _State()
_threads = threading.local()


def state_here() -> _State:
    """Returns the state of this process, or of this thread of a mock world."""
    if getattr(_base.here, "world", None) is None:
        return _process
    if getattr(_threads, "of", None) is not _base.here.world:
        _threads.state = _State()
        _threads.of = _base.here.world
    return _threads.state


class ProcessGroup:
    """Some of the ranks, in an order.

    All ranks of the world make it, at the same place of the program.

    Args:
        ranks: world ranks of the members, each once; none make a group without members.

    Attributes:
        ranks: the same as a tuple. comm: the communicator; None on a rank that is not a member.

    Raises ConfigError: no process group was initialized, or a rank is not in the world.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        ranks = tuple(int(r) for r in ranks)
        world = _world()
        self._open(ranks, world.comm.group(ranks) if ranks else None)

    def _open(self, ranks: tuple[int, ...], comm: Communicator | None) -> None:
        self.ranks = ranks
        self.comm = comm
        state_here().groups[self] = None

    @property
    def is_member(self) -> bool:
        """Returns whether this rank is in the group."""
        return self.comm is not None

    def rank(self) -> int:
        """This rank's place in the group, -1 if it is not a member."""
        return -1 if self.comm is None else self.comm.rank

    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    world_size = size

    def backend(self) -> str:
        """Name of the transport."""
        return _world().comm.name if self.comm is None else self.comm.name

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of ranks {', '.join(map(str, self.ranks))}, this one at "
            f"{self.rank()}>"
        )

    def _member(self, what: str) -> Communicator:
        """Returns the communicator.

        what: the name of the call, for the message.

        Raises:
            ConfigError: this rank is not a member.
        """
        if self.comm is None:
            raise ConfigError(
                f"[dist] {what} in the group of ranks {list(self.ranks)}, but rank "
                f"{_world().rank()} is not in it; ask group.is_member first"
            )
        return self.comm

    def _place(self, label: str, rank: int) -> int:
        """Returns the place of a world rank in the group.

        label: the words before the rank in the message.

        Raises:
            ConfigError: the rank is not a member.
        """
        if rank not in self.ranks:
            raise ConfigError(
                f"[dist] {label} {rank}; it must be one of the group's ranks {list(self.ranks)}"
            )
        return self.ranks.index(rank)


class World(ProcessGroup):
    """All ranks.

    `World()` is the initialized world; it initializes it, with the default settings, if none is.
    """

    def __new__(cls) -> World:
        if state_here().world is None:
            init_process_group()
        return state_here().world

    def __init__(self) -> None:
        """Made by init_process_group()."""

    def clone(self) -> World:
        """Returns the world itself: it is one per process, and nobody owns it."""
        return self


def _world() -> World:
    world = state_here().world
    if world is None:
        raise ConfigError("[dist] there is no process group; call dist.init_process_group() first")
    return world


def joined(group: ProcessGroup | None) -> ProcessGroup:
    """The group that was given, or the world.

    Raises ConfigError: it is no group, or none is initialized.
    """
    if group is None:
        return _world()
    if not isinstance(group, ProcessGroup):
        raise ConfigError(
            f"[dist] group is a {type(group).__name__}; give what new_group() returned, or nothing"
        )
    return group


def init_process_group(
    backend: Backend | str = "auto",
    init_method: str | None = "env://",
    world_size: int | None = None,
    rank: int | None = None,
    timeout: float | datetime.timedelta | None = None,
) -> World:
    """Connects this process with the others that the launcher started; every process calls it
    once, first of all.

    Args:
        backend: "auto", "mpi", "shm", "gloo", "nccl" or "local" (`Backend`); what "auto" picked is
            in `get_backend()`.
        init_method: how processes meet without MPI: "env://" (MASTER_ADDR, MASTER_PORT, RANK,
            WORLD_SIZE) or "tcp://HOST:PORT", which needs world_size and rank. Under an MPI launcher
            there is nothing to say.
        world_size, rank: what is expected; for "gloo" they stand in for variables that are not set.
            A world of one that nobody launched needs no transport: its backend is "local" whatever
            was asked for.
        timeout: seconds, or a timedelta, that an operation waits for other ranks; default
            ODYSSEY_TIMEOUT, else 600.

    Returns the world.

    Raises ConfigError: the world has another size or this process another rank than expected, the
    backend cannot be used, or there is a process group already.
    """
    state = state_here()
    if state.world is not None:
        raise ConfigError(
            "[dist] there is a process group already; call dist.destroy_process_group() before "
            "another"
        )
    name = str(backend)
    if name not in tuple(b.value for b in Backend):
        raise ConfigError(
            f"[dist] backend {name!r} is unknown; choose from auto, mpi, shm, gloo, nccl, local"
        )
    mocked = getattr(_base.here, "world", None)
    if name == "mock" and mocked is None:
        raise ConfigError(
            "[dist] backend 'mock' is for threads that comm.mock.run started; use 'auto'"
        )
    if mocked is not None and name not in ("auto", "mock"):
        raise ConfigError(f"[dist] backend {name!r} in a thread of a mock world; use 'auto'")
    for argument, value in (("world_size", world_size), ("rank", rank)):
        if value is not None:
            check_integer(f"[dist] {argument}", value, int(argument == "world_size"))
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if seconds is not None:
        check_number("[dist] timeout in seconds", seconds, 0, open_low=True)
    launch = launcher.launched() or launcher.rendezvous()
    is_local = world_size == 1 and name in ("auto", "gloo") and (launch is None or launch.size == 1)
    variables = _rendezvous_variables(name, init_method, world_size, rank)
    if not is_local:
        _set_variables(state, variables)
    try:
        comm = mocked or communication.world("local" if is_local else name)
        _check_world(comm, world_size, rank)
    except BaseException:
        _restore_variables(state)
        raise
    if seconds is not None:
        _set_variables(state, {"ODYSSEY_TIMEOUT": str(seconds)})
    world = object.__new__(World)
    world._open(tuple(range(comm.size)), comm)
    state.world = world
    return world


def _rendezvous_variables(
    backend: str, init_method: str | None, world_size: int | None, rank: int | None
) -> dict[str, str]:
    """Returns the variables of "env://" that replace the arguments of init_process_group().

    They are for Gloo only, and empty for other backends and under an MPI launcher.

    Raises:
        ConfigError: `init_method` is wrong, or the environment has other values.
    """
    method = init_method or "env://"
    variables = dict[str, Any]()
    if method != "env://":
        host, _, port = method.removeprefix("tcp://").rpartition(":")
        if not method.startswith("tcp://") or not host or not port.isdigit():
            raise ConfigError(
                f"[dist] init_method {method!r}; it must be 'env://' or 'tcp://HOST:PORT', as "
                "tcp://node1:29500"
            )
        if backend != "gloo" or world_size is None or rank is None:
            raise ConfigError(
                "[dist] init_method 'tcp://...' goes with backend='gloo', world_size= and rank="
            )
        variables = {"MASTER_ADDR": host, "MASTER_PORT": port}
    if backend != "gloo" or launcher.launched() is not None:
        return {}
    if world_size is not None and rank is not None:
        variables |= {"WORLD_SIZE": world_size, "RANK": rank}
    for name, value in variables.items():
        present_text = os.environ.get(name, str(value))
        if present_text != str(value):
            raise ConfigError(
                f"[dist] {name} is {present_text} in the environment, but {value} was given; say "
                "one of them"
            )
    return {name: str(value) for name, value in variables.items()}


def _set_variables(state: _State, variables: dict[str, str]) -> None:
    """Sets environment variables, and keeps their values before for `_restore_variables`."""
    for name, value in variables.items():
        state.environment.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def _restore_variables(state: _State) -> None:
    """Restores the variables that `_set_variables` has set."""
    for name, value in state.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    state.environment = {}


def _check_world(comm: Communicator, world_size: int | None, rank: int | None) -> None:
    """Raises ConfigError unless the world has the expected size and rank.

    In a wrong world, means would be wrong without an error.
    """
    running = f"{comm.size} rank{' is' if comm.size == 1 else 's are'} running"
    if world_size is not None and world_size != comm.size:
        raise ConfigError(
            f"[dist] world_size={world_size} was given, but {running} ({comm.why}); start "
            f"{world_size} with mpirun -n {world_size}, or leave world_size out"
        )
    if rank is not None and rank != comm.rank:
        raise ConfigError(
            f"[dist] rank={rank} was given, but this process is rank {comm.rank} of {comm.size}; "
            "leave rank out, the launcher knows it"
        )
    text = os.environ.get("WORLD_SIZE", "")
    # WORLD_SIZE may be that of the launcher, although "local" uses one process of several
    launched_size = getattr(launcher.launched(), "size", None)
    if comm.name != "mock" and text.isdigit() and int(text) not in (comm.size, launched_size):
        raise ConfigError(
            f"[dist] WORLD_SIZE={text} in the environment, but {running} ({comm.why}); unset it, "
            f"or start {text} with mpirun -n {text}, or give all of RANK, MASTER_ADDR and "
            "MASTER_PORT for backend='gloo'"
        )


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Ends a group, or all groups and the world.

    All its ranks call it. Nothing happens if there is none.
    """
    state = state_here()
    if state.world is None:
        return
    if group is not None and group is not state.world:
        _close_group(group)
        return
    for open_group in list(state.groups):
        if open_group is not state.world:
            _close_group(open_group)
    _restore_variables(state)
    state.world = None
    state.groups.clear()


def _close_group(group: ProcessGroup) -> None:
    """Frees the communicator of a group, and removes the group from the state."""
    state_here().groups.pop(group, None)
    if group.comm is not None:
        group.comm.close()
    group.comm = None


def new_group(ranks: Sequence[int] | None = None) -> ProcessGroup:
    """A group of these world ranks (default all), in this order.

    All ranks of the world call it, members or not.
    """
    return ProcessGroup(range(_world().size()) if ranks is None else ranks)


def is_available() -> bool:
    """Returns whether processes can be connected here: MPI or PyTorch's Gloo is installed."""
    return any(importlib.util.find_spec(name) is not None for name in ("mpi4py", "torch"))


def is_initialized() -> bool:
    """Returns whether init_process_group() was called."""
    return state_here().world is not None


def get_rank(group: ProcessGroup | None = None) -> int:
    """This rank's place in a group, -1 if it is not a member; in the world by default."""
    return joined(group).rank()


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks of a group; of the world by default."""
    return joined(group).size()


def get_backend(group: ProcessGroup | None = None) -> str:
    """Name of the transport: "mpi", "shm", "gloo", "local" or "mock"."""
    return joined(group).backend()


def get_distributed_info() -> dict[str, Any]:
    """Returns what is there as a dict; before init_process_group() what is about the world is None.

    Keys: available, initialized, world_size, rank, local_rank and local_world_size (those on this
    machine), backend, why (one line: why this backend), timeout in seconds, launcher (who started
    the processes, or None).
    """
    comm = getattr(state_here().world, "comm", None)
    launch = launcher.launched() or launcher.rendezvous()
    return {
        "available": is_available(),
        "initialized": comm is not None,
        "world_size": comm and comm.size,
        "rank": comm and comm.rank,
        "local_rank": comm and comm.local_rank,
        "local_world_size": comm and comm.local_size,
        "backend": comm and comm.name,
        "why": comm and comm.why,
        "timeout": deadline(),
        "launcher": launch and launch.launcher,
    }


@contextmanager
def no_sync(model: Any = None) -> Iterator[None]:
    """Backward passes inside do not communicate: `model.no_sync()` of a DDP model, or of all
    there are.
    """
    with ExitStack() as stack:
        for m in [model] if model is not None else list(state_here().models):
            if not hasattr(m, "no_sync"):
                raise ConfigError(
                    f"[dist] no_sync of a {type(m).__name__}; give a DistributedDataParallel"
                )
            stack.enter_context(m.no_sync())
        yield
