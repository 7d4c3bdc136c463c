"""Horovod's PyTorch interface over `odyssey.comm`: `import odyssey.torch.horovod as hvd`.

What differs from Horovod: calls are matched by their order, not by name, so all ranks make the same calls in the same
order (one that does not is an error that names both). `DistributedOptimizer` reduces in `step()` or `synchronize()`,
all gradients of a dtype in one piece, in a fixed order. Objects travel as JSON and tensors; nothing is unpickled unless
the caller writes allow_pickle=True. Elastic means restart: `odyssey launch` starts the ranks anew, `elastic.run` begins
from the last commit. Adasum is refused. docs/migration.md has the table.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from .. import comm as communication
from ..comm import Communicator, ReduceOp
from ..errors import CollectiveError, ConfigError, ShapeError
from ..train.resume import spread
from . import objects
from .c10d import array, host, put

HorovodInternalError = CollectiveError
Average, Sum, Min, Max, Product = ReduceOp.MEAN, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD
Adasum = "adasum"
_OPS = (*ReduceOp,)
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
_DTYPES += (torch.int8, torch.uint8)


class ProcessSet:
    """Some of the ranks, for `process_set=`; usable once `init(process_sets=)` or `add_process_set` has made it."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = sorted({int(r) for r in ranks})
        self.comm: Communicator | None = None
        self.process_set_id: int | None = None

    def included(self) -> bool:
        """Whether this process is one of them."""
        return rank() in self.ranks

    def rank(self) -> int:
        """This process's place among them."""
        return _comm(self).rank

    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)


global_process_set = ProcessSet(())
_number = itertools.count(1)


def init(comm: Any = None, process_sets: Iterable[ProcessSet | list[int]] | None = None) -> None:
    """Meets the other ranks. comm: None, or the list of all ranks; other subsets are process sets."""
    world = communication.world()
    if comm is not None and list(comm) != list(range(world.size)):
        raise ConfigError("[horovod] init(comm=...) takes all ranks or None; use process_sets= for some of them")
    global_process_set.comm, global_process_set.ranks = world, list(range(world.size))
    global_process_set.process_set_id = 0
    for given in process_sets or ():
        add_process_set(given)


def shutdown() -> None:
    """Ends the use of Horovod's names; the ranks stay connected until they end."""
    global_process_set.comm = None


def is_initialized() -> bool:
    """Whether init() was called."""
    return global_process_set.comm is not None


def _comm(process_set: ProcessSet | None = None) -> Communicator:
    found = (process_set or global_process_set).comm
    if found is None:
        why = "this process is not of it, or add_process_set was not called" if process_set else "call hvd.init() first"
        raise ConfigError(f"[horovod] {'the process set' if process_set else 'Horovod'} cannot be used: {why}")
    return found


def add_process_set(process_set: ProcessSet | list[int]) -> ProcessSet:
    """Makes a group of ranks; all ranks call it."""
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    made.comm, made.process_set_id = _comm().group(made.ranks), next(_number)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Gives a group of ranks back; all its ranks call it."""
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    if process_set.comm is not None:
        process_set.comm.close()
    process_set.comm = process_set.process_set_id = None
    return True


def _made(name: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__name__, function.__doc__ = name, text
        return function

    return named


def _asked(name: str, text: str, of: Callable[[Communicator], int]) -> Callable[[], int]:
    return _made(name, text)(lambda: of(_comm()))


rank = _asked("rank", "This process's number, from 0.", lambda c: c.rank)
size = _asked("size", "Number of processes.", lambda c: c.size)
local_rank = _asked("local_rank", "This process's number on its machine.", lambda c: c.local_rank)
local_size = _asked("local_size", "Processes on this machine.", lambda c: c.local_size)
# where all machines have as many ranks:
cross_rank = _asked("cross_rank", "This machine's number.", lambda c: c.rank // c.local_size)
cross_size = _asked("cross_size", "Number of machines.", lambda c: -(-c.size // c.local_size))


def is_homogeneous() -> bool:
    """Whether all machines have as many ranks; asks them."""
    return len(set(_comm().all_gather(np.array([local_size()]))[:, 0].tolist())) == 1


mpi_built = mpi_enabled = mpi_threads_supported = _made("mpi_built", "True: ranks meet by MPI.")(lambda: True)
gloo_built = gloo_enabled = nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = _made(
    "gloo_built", "False: no other way of Horovod's is here."
)(lambda: False)


class Compression:
    """What gradients are sent as: itself, or rounded to 16 bits."""

    class none:
        """As they are."""

        dtype: torch.dtype | None = None

        @classmethod
        def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
            """(what is sent, what `decompress` needs)."""
            narrow = cls.dtype is not None and tensor.is_floating_point()
            return (tensor.to(cls.dtype), tensor.dtype) if narrow else (tensor, None)

        @classmethod
        def decompress(cls, tensor: torch.Tensor, context: torch.dtype | None) -> torch.Tensor:
            """What was received, in the dtype of before."""
            return tensor if context is None else tensor.to(context)

    class fp16(none):
        """float16."""

        dtype = torch.float16

    class bf16(none):
        """bfloat16; not in Horovod."""

        dtype = torch.bfloat16


# --- collectives -----------------------------------------------------------------------------------------------------


def _reduction(op: Any, average: bool | None) -> ReduceOp:
    if op == Adasum:
        raise ConfigError("[horovod] op=Adasum is not there; use op=hvd.Average")
    if average is not None:
        return Average if average else Sum
    return Average if op is None else ReduceOp.of(op)


class Handle:
    """A call under way; `synchronize(handle)` gives its result."""

    def __init__(self, request: Any, finish: Callable[[], Any]) -> None:
        self._request, self._finish = request, finish
        self._result: Any = None

    def wait(self) -> Any:
        """The result; again the same."""
        if self._finish is not None:
            self._request.wait()
            self._result, self._finish = self._finish(), None
        return self._result


def synchronize(handle: Handle) -> Any:
    """Waits for an `_async` call and gives its result."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once."""
    return handle._request.test()


def _waited(started: Callable[..., Handle]) -> Callable[..., Any]:
    name = started.__name__.replace("_async", "")
    return _made(name, f"`{started.__name__}`, waited for.")(lambda *given, **named: started(*given, **named).wait())


def _of_a_copy(inplace: Callable[..., Handle]) -> Callable[..., Handle]:
    def started(tensor: torch.Tensor, *given: Any, **named: Any) -> Handle:
        return inplace(tensor.detach().clone(), *given, **named)

    return _made(inplace.__name__.rstrip("_"), f"`{inplace.__name__}` of a copy.")(started)


def _later(function: Callable[..., Any]) -> Callable[..., Handle]:
    def started(*given: Any, **named: Any) -> Handle:
        result = function(*given, **named)
        return Handle(communication.Request(), lambda: result)

    return _made(f"{function.__name__}_async", f"`{function.__name__}`, complete on return.")(started)


def _each(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    def grouped(tensors: list[torch.Tensor], *given: Any, **named: Any) -> list[Any]:
        return [function(t, *given, **named) for t in tensors]

    return _made(f"grouped_{function.__name__}", f"`{function.__name__}` of each.")(grouped)


def _announce(comm: Communicator, tensor: torch.Tensor | None, op: ReduceOp = Sum) -> np.ndarray:
    """(ranks, 4): what each contributes: whether it does, dtype, elements, operation. For ranks that have joined."""
    mine = (0, 0, 0, 0) if tensor is None else (1, _DTYPES.index(tensor.dtype), tensor.numel(), _OPS.index(op))
    return comm.all_gather(np.array(mine, np.int64))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Starts the combination of all ranks' tensors, in place. name: taken and not used; the order of calls counts.

    Raises:
        ConfigError: Adasum, a mean of integers, or a dtype that cannot be added.
    """
    kind, comm = _reduction(op, average), _comm(process_set)
    values = host(tensor)
    if values.dtype not in _DTYPES:
        raise ConfigError(f"[horovod] allreduce of {values.dtype}; convert it to a number of 8 to 64 bits")
    if prescale_factor != 1.0:
        values.mul_(prescale_factor)
    if comm.size > 1:
        _announce(comm, values, kind)
    flat = array(values).reshape(-1)
    request = comm.all_reduce(flat, kind, flat, wait=False)

    def finish() -> torch.Tensor:
        if postscale_factor != 1.0:
            values.mul_(postscale_factor)
        put(values, tensor)
        return tensor

    return Handle(request, finish)


allreduce_async, allreduce_ = _of_a_copy(allreduce_async_), _waited(allreduce_async_)


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


grouped_allreduce_async_, grouped_allreduce_, grouped_allreduce = map(_each, (allreduce_async_, allreduce_, allreduce))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Starts overwriting `tensor` with that of `root_rank` (of all ranks)."""
    comm, values = _comm(process_set), host(tensor)
    root = comm.ranks.index(root_rank) if root_rank in comm.ranks else root_rank
    flat = array(values).reshape(-1)

    def finish() -> torch.Tensor:
        put(values, tensor)
        return tensor

    return Handle(comm.broadcast(flat, root, wait=False), finish)


broadcast_async, broadcast_ = _of_a_copy(broadcast_async_), _waited(broadcast_async_)
broadcast = _waited(broadcast_async)


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> torch.Tensor:
    """All ranks' tensors one after the other; they may differ in their first dimension."""
    comm, values = _comm(process_set), host(tensor)
    rows = comm.all_gather(np.array([len(values)], np.int64))[:, 0].cumsum().tolist()
    out = torch.empty((rows[-1], *values.shape[1:]), dtype=values.dtype)
    starts = [0, *rows]
    out[starts[comm.rank] : starts[comm.rank + 1]] = values
    flat = array(out).reshape(-1)
    width = flat.size // max(len(out), 1)
    comm.all_gather_v(flat, [(a * width, b * width) for a, b in zip(starts, rows, strict=False)])
    return out.to(tensor.device)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Rows of `tensor` to ranks 0, 1, ...: splits[p] rows to rank p, or equal parts.

    Returns what came, rank by rank; with `splits`, (that, rows from each rank).
    """
    comm, values = _comm(process_set), host(tensor)
    if splits is None and len(values) % comm.size:
        raise ShapeError(f"[horovod] alltoall of {len(values)} rows on {comm.size} ranks; give splits=")
    send = [len(values) // comm.size] * comm.size if splits is None else [int(n) for n in splits]
    receive = comm.all_to_all(np.array(send, np.int64).reshape(-1, 1))[:, 0].tolist()
    out = torch.empty((sum(receive), *values.shape[1:]), dtype=values.dtype)
    width = values.shape[1:].numel() * (1 if values.dtype in _DTYPES else values.element_size())
    counts = [[n * width for n in counts] for counts in (send, receive)]
    comm.all_to_all_v(array(values).reshape(-1), counts[0], array(out).reshape(-1), counts[1])
    out = out.to(tensor.device)
    return out if splits is None else (out, torch.tensor(receive))


def reducescatter(
    tensor: torch.Tensor, op: Any = Average, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """This rank's rows of the combination; where they do not divide by the ranks, the first ranks have one more."""
    comm, kind = _comm(process_set), _reduction(op, None)
    rows, more = divmod(len(tensor), comm.size)
    lo = comm.rank * rows + min(comm.rank, more)
    total = host(tensor).clone()
    comm.all_reduce(array(total), kind, array(total))
    return total[lo : lo + rows + (comm.rank < more)].clone().to(tensor.device)


allgather_async, alltoall_async, reducescatter_async = map(_later, (allgather, alltoall, reducescatter))
grouped_allgather, grouped_reducescatter = _each(allgather), _each(reducescatter)
grouped_allreduce_async = _later(grouped_allreduce)


def barrier(process_set: ProcessSet | None = None) -> None:
    """Waits for all ranks."""
    _comm(process_set).barrier()


def join(device: int = -1) -> int:
    """Takes part in the others' allreduce calls, with zeros, until all ranks have joined; the last rank that did.

    Means are over all ranks, those that have joined included. What the others may call meanwhile is allreduce and the
    steps of a DistributedOptimizer; another call is an error.
    """
    comm, rounds = _comm(), 0
    while comm.size > 1:
        everyone = _announce(comm, None)
        active = np.flatnonzero(everyone[:, 0])
        if not len(active):
            break
        _, dtype, elements, op = everyone[active[0]]
        zeros = array(torch.zeros(int(elements), dtype=_DTYPES[dtype]))
        comm.all_reduce(zeros, _OPS[op], zeros)
        rounds += 1
    waited = comm.all_gather(np.array([rounds]))[:, 0]
    return int(np.flatnonzero(waited == waited.min())[-1])


# --- models, optimizers, objects -------------------------------------------------------------------------------------


def broadcast_parameters(
    params: Any, root_rank: int = 0, prefix: str | None = None, process_set: ProcessSet | None = None
) -> None:
    """Overwrites a state_dict's, or named_parameters', tensors with those of `root_rank`."""
    for _, p in params.items() if isinstance(params, dict) else list(params):
        if isinstance(p, torch.Tensor):
            broadcast_(p, root_rank, process_set=process_set)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    allow_pickle: bool = False,
) -> Any:
    """The object of `root_rank`: numbers, texts, None, lists, tuples, dictionaries and tensors.

    allow_pickle: send anything else by pickle, which runs what the sender says; Horovod always does.

    Raises:
        ConfigError: something else is in it, and allow_pickle is False.
    """
    comm = _comm(process_set)
    root = comm.ranks.index(root_rank)
    data = objects.encode(obj, allow_pickle) if comm.rank == root else b""
    sent = spread(comm, np.frombuffer(data, np.uint8), root)
    return obj if comm.rank == root else objects.decode(sent.tobytes(), allow_pickle)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet | None = None, *, allow_pickle: bool = False
) -> list[Any]:
    """The objects of all ranks, as `broadcast_object` sends them."""
    ranks = _comm(process_set).ranks
    return [broadcast_object(obj, r, process_set=process_set, allow_pickle=allow_pickle) for r in ranks]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None, process_set: ProcessSet | None = None
) -> None:
    """Gives all ranks the optimizer state of `root_rank`."""
    state = broadcast_object(optimizer.state_dict(), root_rank, process_set=process_set)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


class _Distributed:
    """Methods that `DistributedOptimizer` adds to the class of the user's optimizer, as Horovod does."""

    def _begin(self, compression: Any, passes: int, op: Any, predivide: float, dense: bool, comm: Communicator) -> None:
        self._parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._compression, self._op, self._predivide, self._dense = compression, op, predivide, dense
        self.backward_passes_per_step, self._comm = passes, comm
        self._passes = [0]
        self._synchronized, self._skip = False, False
        for p in self._parameters[:1]:
            p.register_post_accumulate_grad_hook(self._passed)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Backward passes before a step, from now on."""
        self.backward_passes_per_step = passes

    def _passed(self, parameter: torch.Tensor) -> None:
        self._passes[0] += 1
        if self._passes[0] > self.backward_passes_per_step and self._comm.size > 1:
            raise ConfigError(
                f"[horovod] {self._passes[0]} backward passes before step(), and backward_passes_per_step is "
                f"{self.backward_passes_per_step}; give the number of passes"
            )

    def synchronize(self) -> None:
        """Replaces the gradients by those of all ranks, combined; a rank without one contributes zeros."""
        for p in self._parameters:
            if p.grad is not None and p.grad.is_sparse:
                if not self._dense:
                    raise ConfigError(
                        "[horovod] a gradient is sparse; use sparse_as_dense=True, or Embedding(sparse=False)"
                    )
                p.grad = p.grad.to_dense()
            elif p.grad is None and self._comm.size > 1:
                p.grad = torch.zeros_like(p)
        for dtype in dict.fromkeys(p.dtype for p in self._parameters) if self._comm.size > 1 else ():
            grads = [p.grad for p in self._parameters if p.dtype is dtype]
            flat = torch.cat([g.reshape(-1) for g in grads])
            sent, context = self._compression.compress(flat.div_(self._predivide) if self._predivide != 1.0 else flat)
            sent = host(sent)
            kind = Sum if self._predivide != 1.0 else self._op
            _announce(self._comm, sent, kind)
            self._comm.all_reduce(array(sent), kind, array(sent))
            flat = self._compression.decompress(sent, context)
            if self._predivide != 1.0:
                flat = flat * (self._predivide / self._comm.size)
            for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                g.copy_(part.view(g.shape))
        self._synchronized = True
        self._passes[0] = 0

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
        self._passes[0] = 0
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
    process_set: ProcessSet | None = None,
) -> Any:
    """The optimizer, of a class that is a subclass of its own, whose steps are taken with all ranks' gradients.

    num_groups, groups: taken and not used; gradients go in one piece. Other arguments are Horovod's.

    Raises:
        ConfigError: Adasum, parameters without a name or named twice, or a predivide factor without Average.
    """
    kind = _reduction(op, None)
    if gradient_predivide_factor != 1.0 and kind is not Average:
        raise ConfigError("[horovod] gradient_predivide_factor goes with op=hvd.Average")
    named = list(named_parameters or ())
    if len({name for name, _ in named}) < len(named):
        raise ConfigError("[horovod] named_parameters has a name twice; names must be unique")
    known = {id(p) for _, p in named}
    lost = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if named and lost:
        raise ConfigError(
            f"[horovod] {len(lost)} parameters of the optimizer are not in named_parameters; name them all"
        )
    own = {name: value for name, value in vars(_Distributed).items() if not name.startswith("__")}
    optimizer.__class__ = type(type(optimizer).__name__, (type(optimizer),), own)
    optimizer._begin(  # type: ignore[attr-defined]
        compression,
        backward_passes_per_step,
        kind,
        gradient_predivide_factor,
        sparse_as_dense,
        _comm(process_set),
    )
    return optimizer


def __getattr__(name: str) -> Any:
    if name == "elastic":
        from . import elastic

        return elastic
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
