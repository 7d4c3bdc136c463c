"""Horovod's PyTorch interface over `odyssey.comm`: `import odyssey.torch.horovod as hvd`.

What differs from Horovod: calls are matched by their order, not by name, so all ranks make the same calls in the same
order (one that does not is an error that names both). `DistributedOptimizer` reduces in `step()` or `synchronize()`,
all gradients of a dtype in one piece, in a fixed order. Objects travel as JSON and tensors; nothing is unpickled unless
the caller writes allow_pickle=True. Elastic means restart: `odyssey launch` starts the ranks anew, `elastic.run` begins
from the last commit. Adasum is refused. docs/migration.md has the table.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from .. import distributed as dist
from ..comm import Communicator, ReduceOp, Request
from ..distributed import ProcessGroup, Work, World, calling, destroy_process_group
from ..errors import CollectiveError, ConfigError, ShapeError
from ..train import spread
from . import objects

HorovodInternalError = CollectiveError
Average, Sum, Min, Max, Product = ReduceOp.MEAN, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD
Adasum = "adasum"
_OPS = (*ReduceOp,)
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
_DTYPES += (torch.int8, torch.uint8)


class ProcessSet(ProcessGroup):
    """Some of the ranks, for `process_set=`; usable once `init(process_sets=)` or `add_process_set` has made it."""

    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks, self.comm = sorted({int(r) for r in ranks}), None  # type: ignore[assignment]

    def included(self) -> bool:
        """Returns whether this process is one of them."""
        return rank() in self.ranks

    def _member(self, what: str) -> Communicator:
        if self.process_set_id is None:
            call = "hvd.init()" if self is global_process_set else "hvd.add_process_set() of the process set"
            raise ConfigError(f"[horovod] {what} before {call}; call it first, on all ranks")
        return super()._member(what)


global_process_set = ProcessSet(())
_number = itertools.count(1)


def init(comm: Any = None, process_sets: Iterable[ProcessSet | list[int]] | None = None) -> None:
    """Meets the other ranks. comm: None, or the list of all ranks; other subsets are process sets."""
    world = World()
    if comm is not None and list(comm) != list(world.ranks):
        raise ConfigError("[horovod] init(comm=...) takes all ranks or None; use process_sets= for some of them")
    every = global_process_set
    every.ranks, every.comm, every.process_set_id = list(world.ranks), world.comm, 0  # type: ignore[assignment]
    for given in process_sets or ():
        add_process_set(given)


def shutdown() -> None:
    """Ends the use of Horovod's names; the ranks stay connected until they end."""
    global_process_set.comm = global_process_set.process_set_id = None


def is_initialized() -> bool:
    """Returns whether init() was called."""
    return global_process_set.comm is not None


def add_process_set(process_set: ProcessSet | list[int]) -> ProcessSet:
    """Makes a group of ranks; all ranks call it."""
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    made._open(made.ranks, _world("add_process_set").group(made.ranks))
    made.process_set_id = next(_number)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Gives a group of ranks back; all its ranks call it."""
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    destroy_process_group(process_set)
    process_set.process_set_id = None
    return True


def _named(name: str, text: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__, function.__doc__ = name, text
    return function


def _asked(name: str, text: str, of: Callable[[Communicator], int]) -> Callable[[], int]:
    return _named(name, text, lambda: of(_world(name)))


_world = global_process_set._member
rank = _asked("rank", "This process's number, from 0.", lambda c: c.rank)
size = _asked("size", "Number of processes.", lambda c: c.size)
local_rank = _asked("local_rank", "This process's number on its machine.", lambda c: c.local_rank)
local_size = _asked("local_size", "Processes on this machine.", lambda c: c.local_size)
# where all machines have as many ranks:
cross_rank = _asked("cross_rank", "This machine's number.", lambda c: c.rank // c.local_size)
cross_size = _asked("cross_size", "Number of machines.", lambda c: -(-c.size // c.local_size))


def is_homogeneous() -> bool:
    """Returns whether all machines have as many ranks; asks them."""
    return len(set(_world("is_homogeneous").all_gather(np.array([local_size()]))[:, 0].tolist())) == 1


mpi_built = mpi_enabled = mpi_threads_supported = _named("mpi_built", "True: ranks meet by MPI.", lambda: True)
gloo_built = gloo_enabled = nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = _named(
    "gloo_built", "False: no other way of Horovod's is here.", lambda: False
)


class Compression:
    """Form in which gradients are sent: as they are, or rounded to 16 bits."""

    class none:
        """Sends them as they are."""

        dtype: torch.dtype | None = None

        @classmethod
        def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
            """(what is sent, what `decompress` needs)."""
            narrow = cls.dtype is not None and tensor.is_floating_point()
            return (tensor.to(cls.dtype), tensor.dtype) if narrow else (tensor, None)

        @classmethod
        def decompress(cls, tensor: torch.Tensor, context: torch.dtype | None) -> torch.Tensor:
            """Returns what was received, in the dtype of before."""
            return tensor if context is None else tensor.to(context)

    class fp16(none):
        """float16."""

        dtype = torch.float16

    class bf16(none):
        """bfloat16; not in Horovod."""

        dtype = torch.bfloat16


# --- collectives: declared once; their other forms are made of that ---------------------------------------------------


def _reduction(op: Any, average: bool | None = None) -> ReduceOp:
    if op == Adasum:
        raise ConfigError("[horovod] op=Adasum is not there; use op=hvd.Average")
    if average is not None:
        return Average if average else Sum
    return Average if op is None else ReduceOp.of(op)


def synchronize(handle: Work | list[Work]) -> Any:
    """Waits for an `_async` call and gives its result."""
    return [one.wait() for one in handle] if isinstance(handle, list) else handle.wait()


def poll(handle: Work | list[Work]) -> bool:
    """Returns whether `synchronize` would return at once."""
    return all([one.is_completed() for one in (handle if isinstance(handle, list) else [handle])])


def _waited(start: Callable[..., Work]) -> Callable[..., Any]:
    """The blocking form of an `_async` call."""

    @functools.wraps(start)
    def call(*given: Any, **named: Any) -> Any:
        return start(*given, **named).wait()

    return _named(start.__name__.replace("_async", ""), start.__doc__ or "", call)


def _of_a_copy(call: Callable[..., Any]) -> Callable[..., Any]:
    def copied(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        return call(tensor.detach().clone(), *given, **named)

    return _named(call.__name__.rstrip("_"), f"`{call.__name__}` of a copy.", copied)


def _grouped(call: Callable[..., Any]) -> Callable[..., list[Any]]:
    def each(tensors: list[torch.Tensor], *given: Any, **named: Any) -> list[Any]:
        return [call(t, *given, **named) for t in tensors]

    return _named(f"grouped_{call.__name__}", f"`{call.__name__}` of each.", each)


def _announce(comm: Communicator, tensor: torch.Tensor | None, op: ReduceOp = Sum) -> np.ndarray:
    """(ranks, 4): what each contributes: whether it does, dtype, elements, operation. For ranks that have joined."""
    mine = (0, 0, 0, 0) if tensor is None else (1, _DTYPES.index(tensor.dtype), tensor.numel(), _OPS.index(op))
    return comm.all_gather(np.array(mine, np.int64))


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiplies a tensor, in place; returns it."""
    if factor != 1.0:
        tensor.detach().mul_(factor)
    return tensor


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Work:
    """Combines all ranks' tensors, in place. name: taken and not used; the order of calls counts. Raises ConfigError:
    Adasum, a mean of integers, or a dtype that cannot be added."""
    with calling(process_set, "allreduce_") as comm:
        kind = _reduction(op, average)
        if tensor.dtype not in _DTYPES:
            raise ConfigError(f"[horovod] allreduce of {tensor.dtype}; convert it to a number of 8 to 64 bits")
        _scaled(tensor, prescale_factor)
        if comm.size > 1:
            _announce(comm, tensor, kind)
        place = dist.Place(tensor, "allreduce_")
        flat = place.memory.reshape(-1)  # as `join` gives it
        work = Work(comm.all_reduce(flat, kind, flat, wait=False), place.filled)
    return work if postscale_factor == 1.0 else work.then(lambda _: _scaled(tensor, postscale_factor))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compression.none] = Compression.none,
    op: Any = None,
    **named: Any,
) -> torch.Tensor:
    """All ranks' tensors combined (the mean by default), as a new tensor; no gradient goes through it."""
    sent, context = compression.compress(tensor.detach().clone())
    return compression.decompress(allreduce_(sent, average, name, op, **named), context)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Work:
    """Overwrites `tensor` with that of `root_rank` (of all ranks)."""
    return dist.broadcast(tensor, root_rank, process_set, async_op=True)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Work:
    """All ranks' tensors one after the other; they may differ in their first dimension."""
    with calling(process_set, "allgather") as comm:
        rows = comm.all_gather_each(dist.array_of(tensor))
    return Work(Request(dist.like(tensor, np.concatenate(rows))))


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Work:
    """Rows of `tensor` to ranks 0, 1, ...: splits[p] rows to rank p, or equal parts.

    Returns what came, rank by rank; with `splits`, (that, rows from each rank).
    """
    with calling(process_set, "alltoall") as comm:
        if splits is None and len(tensor) % comm.size:
            raise ShapeError(f"[horovod] alltoall of {len(tensor)} rows on {comm.size} ranks; give splits=")
        send = [len(tensor) // comm.size] * comm.size if splits is None else splits.tolist()
        receive = comm.all_to_all(np.array(send, np.int64).reshape(-1, 1))[:, 0].tolist()
    out = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    work = dist.all_to_all_single(out, tensor, receive, send, process_set, async_op=True)
    return work if splits is None else work.then(lambda out: (out, torch.tensor(receive)))


def reducescatter_async(
    tensor: torch.Tensor, op: Any = Average, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Work:
    """This rank's rows of the combination; where they do not divide by the ranks, the first ranks have one more."""
    rows, more = divmod(len(tensor), process_set.size())
    lo = process_set.rank() * rows + min(process_set.rank(), more)
    work = dist.all_reduce(tensor, _reduction(op), process_set, async_op=True, out=torch.empty_like(tensor))
    return work.then(lambda total: total[lo : lo + rows + (process_set.rank() < more)])


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits for all ranks."""
    dist.barrier(process_set)


allreduce_, broadcast_, allgather = map(_waited, (allreduce_async_, broadcast_async_, allgather_async))
alltoall, reducescatter = map(_waited, (alltoall_async, reducescatter_async))
allreduce_async, broadcast_async, broadcast = map(_of_a_copy, (allreduce_async_, broadcast_async_, broadcast_))
grouped_allreduce, grouped_allreduce_ = _grouped(allreduce), _grouped(allreduce_)
grouped_allreduce_async, grouped_allreduce_async_ = _grouped(allreduce_async), _grouped(allreduce_async_)
grouped_allgather, grouped_reducescatter = _grouped(allgather), _grouped(reducescatter)


def join(device: int = -1) -> int:
    """Takes part in the others' allreduce calls, with zeros, until all ranks have joined; the last rank that did.

    Means are over all ranks, those that have joined included. What the others may call meanwhile is allreduce and the
    steps of a DistributedOptimizer; another call is an error.
    """
    comm, rounds = _world("join"), 0
    while comm.size > 1:
        everyone = _announce(comm, None)
        active = np.flatnonzero(everyone[:, 0])
        if not len(active):
            break
        _, dtype, elements, op = everyone[active[0]]
        zeros = torch.zeros(int(elements), dtype=_DTYPES[dtype])
        dist.all_reduce(zeros, _OPS[op], global_process_set)
        rounds += 1
    waited = comm.all_gather(np.array([rounds]))[:, 0]
    return int(np.flatnonzero(waited == waited.min())[-1])


def broadcast_parameters(
    params: Any, root_rank: int = 0, prefix: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrites a state_dict's, or named_parameters', tensors with those of `root_rank`."""
    for _, p in params.items() if isinstance(params, dict) else list(params):
        if isinstance(p, torch.Tensor):
            broadcast_(p, root_rank, process_set=process_set)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    allow_pickle: bool = False,
) -> Any:
    """The object of `root_rank`: numbers, texts, None, lists, tuples, dictionaries and tensors.

    allow_pickle: send anything else by pickle, which runs what the sender says; Horovod always does.

    Raises ConfigError: something else is in it, and allow_pickle is False.
    """
    comm, root = process_set._member("broadcast_object"), process_set._place("broadcast_object from rank", root_rank)
    sent = spread(comm, objects.packed(obj, allow_pickle) if comm.rank == root else None, root)
    return obj if comm.rank == root else objects.unpacked(sent, allow_pickle)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set, *, allow_pickle: bool = False
) -> list[Any]:
    """The objects of all ranks, as `broadcast_object` sends them."""
    return [broadcast_object(obj, r, name, process_set, allow_pickle=allow_pickle) for r in process_set.ranks]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives all ranks the optimizer state of `root_rank`."""
    state = broadcast_object(optimizer.state_dict(), root_rank, process_set=process_set)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


class _Distributed:
    """Methods that `DistributedOptimizer` adds to the class of the user's optimizer, as Horovod does."""

    _passes = 0  # backward passes since the last step
    _synchronized = _skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Backward passes before a step, from now on."""
        self.backward_passes_per_step = passes

    def _passed(self, parameter: torch.Tensor) -> None:
        self._passes += 1
        if self._passes > self.backward_passes_per_step and self._process_set.size() > 1:
            raise ConfigError(
                f"[horovod] {self._passes} backward passes before step(), and backward_passes_per_step is "
                f"{self.backward_passes_per_step}; give the number of passes"
            )

    def synchronize(self) -> None:
        """Replaces the gradients by those of all ranks, combined; a rank without one contributes zeros."""
        ranks, predivide = self._process_set.size(), self._predivide
        for p in self._parameters:
            if p.grad is not None and p.grad.is_sparse:
                if not self._dense:
                    raise ConfigError(
                        "[horovod] a gradient is sparse; use sparse_as_dense=True, or Embedding(sparse=False)"
                    )
                p.grad = p.grad.to_dense()
            elif p.grad is None and ranks > 1:
                p.grad = torch.zeros_like(p)
        for dtype in dict.fromkeys(p.dtype for p in self._parameters) if ranks > 1 else ():
            grads = [p.grad for p in self._parameters if p.dtype is dtype]
            flat = torch.cat([g.reshape(-1) for g in grads])
            sent, context = self._compression.compress(flat.div_(predivide) if predivide != 1.0 else flat)
            kind = Sum if predivide != 1.0 else self._op
            flat = self._compression.decompress(allreduce_(sent, op=kind, process_set=self._process_set), context)
            if predivide != 1.0:
                flat = flat * (predivide / ranks)
            for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                g.copy_(part.view(g.shape))
        self._synchronized, self._passes = True, 0

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A step inside does not reduce: `synchronize()` was called before it."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """`synchronize()`, then the optimizer's own step."""
        if not self._skip:
            self.synchronize()
        self._synchronized = False
        return super(self.__class__, self).step(closure)

    def zero_grad(self, *arguments: Any, **named: Any) -> None:
        """The optimizer's own; between synchronize() and step() it would lose the gradients."""
        if self._synchronized:
            raise ConfigError("[horovod] optimizer.zero_grad() between synchronize() and step(); call step() first")
        self._passes = 0
        super(self.__class__, self).zero_grad(*arguments, **named)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compression.none] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The optimizer, of a class that is a subclass of its own, whose steps are taken with all ranks' gradients.

    num_groups, groups: taken and not used; gradients go in one piece. Other arguments are Horovod's.

    Raises ConfigError: Adasum, parameters without a name or named twice, or a predivide factor without Average.
    """
    kind = _reduction(op)
    if gradient_predivide_factor != 1.0 and kind is not Average:
        raise ConfigError("[horovod] gradient_predivide_factor goes with op=hvd.Average")
    named = list(named_parameters or ())
    if len({name for name, _ in named}) < len(named):
        raise ConfigError("[horovod] named_parameters has a name twice; names must be unique")
    known = {id(p) for _, p in named}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    lost = [p for p in parameters if id(p) not in known]
    if named and lost:
        raise ConfigError(
            f"[horovod] {len(lost)} parameters of the optimizer are not in named_parameters; name them all"
        )
    process_set._member("DistributedOptimizer")
    own = {name: value for name, value in vars(_Distributed).items() if not name.startswith("__")}
    made: Any = optimizer
    made.__class__ = type(type(optimizer).__name__, (type(optimizer),), own)
    made._parameters = [p for p in parameters if p.requires_grad]
    made._compression, made._op, made._predivide = compression, kind, gradient_predivide_factor
    made._dense, made._process_set = sparse_as_dense, process_set
    made.backward_passes_per_step = backward_passes_per_step
    for p in made._parameters[:1]:
        p.register_post_accumulate_grad_hook(made._passed)
    return made


_TIMELINE = "fit(trace=FILE) of a trainer, and `odyssey trace RUN` of a run, draw when each rank did what"
_ELSEWHERE = dict.fromkeys(("start_timeline", "stop_timeline"), _TIMELINE)
_ELSEWHERE["SyncBatchNorm"] = "torch.nn.BatchNorm in odyssey.torch.DistributedDataParallel is the same on any ranks"


def __getattr__(name: str) -> Any:
    if name == "elastic":
        from . import elastic

        return elastic
    if name in _ELSEWHERE:
        raise ConfigError(f"[horovod] there is no {name}: {_ELSEWHERE[name]} (docs/migration.md)")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
