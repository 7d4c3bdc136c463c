"""Horovod's PyTorch interface over `odyssey.comm`: `import odyssey.torch.horovod as hvd`.

docs/migration.md has what differs from Horovod. Gradients go through the blocking calls that give a
new tensor, as Horovod's do, but for minima, maxima and products, where its are wrong.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from .. import distributed as dist
from ..comm import Communicator, ReduceOp, Request
from ..distributed import Work, calling
from ..errors import CollectiveError, ConfigError, ShapeError
from ..train import spread
from . import objects

# isort: off
from .process_sets import (  # noqa: F401, users take them from here
    ProcessSet,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    name_function,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    world,
)
# isort: on

HorovodInternalError = CollectiveError
Average = ReduceOp.MEAN
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PROD
Adasum = "adasum"
_OPS = (*ReduceOp,)
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
)
_DTYPES += (torch.int8, torch.uint8)


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


# --- collectives: declared once; their other forms are made of that -------------------------------


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


def _make_blocking(start: Callable[..., Work]) -> Callable[..., Any]:
    """The blocking form of an `_async` call."""

    @functools.wraps(start)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return start(*arguments, **keywords).wait()

    return name_function(start.__name__.replace("_async", ""), start.__doc__ or "", call)


class _Taped(torch.autograd.Function):
    """A call on torch's tape. back: makes the gradient of what it was given, of that of what it
    gave, its arguments, and the rows that it was given, or those of each rank that came.
    """

    @staticmethod
    def forward(
        ctx: Any,
        start: Callable[..., Work],
        back: Callable[..., Any],
        options: Any,
        tensor: torch.Tensor,
    ) -> Any:
        result = start(tensor.detach(), **options).wait()
        ctx.back = back
        ctx.options = options
        ctx.rows = tensor.shape[:1]
        if isinstance(result, tuple):
            result, ctx.rows = result
            ctx.mark_non_differentiable(ctx.rows)
        return result if options.get("splits") is None else (result, ctx.rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        return None, None, None, ctx.back(gradient.clone(), ctx.options, ctx.rows)


def _make_differentiable(
    name: str, start: Callable[..., Work], back: Callable[..., Any]
) -> Callable[..., Any]:
    """The blocking form of an `_async` call that gives a new tensor, through which gradients go."""
    signature = inspect.signature(start)

    @functools.wraps(start)
    def call(
        *arguments: Any, compression: type[Compression.none] = Compression.none, **keywords: Any
    ) -> Any:
        bound = signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        sent, context = compression.compress(_check_tensor(bound.arguments.pop("tensor"), name))
        result = _Taped.apply(start, back, bound.arguments, sent)
        return result if isinstance(result, tuple) else compression.decompress(result, context)

    return name_function(name, start.__doc__ or "", call)


def _check_tensor(tensor: Any, name: str, rows: bool = False) -> torch.Tensor:
    """The tensor that a call is given.

    ShapeError: it is none, or has no rows where they are needed.
    """
    if not isinstance(tensor, torch.Tensor) or (rows and not tensor.dim()):
        kind = "a number" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise ShapeError(
            f"[horovod] {name} of {kind}; give a tensor{' with a first dimension' if rows else ''}"
        )
    return tensor


def _make_copying(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def copied(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        return call(_check_tensor(tensor, call.__name__).detach().clone(), *arguments, **keywords)

    return name_function(call.__name__.rstrip("_"), f"`{call.__name__}` of a copy.", copied)


def _make_grouped(call: Callable[..., Any]) -> Callable[..., list[Any]]:
    def call_each(tensors: list[torch.Tensor], *arguments: Any, **keywords: Any) -> list[Any]:
        return [call(t, *arguments, **keywords) for t in tensors]

    return name_function(f"grouped_{call.__name__}", f"`{call.__name__}` of each.", call_each)


def _digest(shape: Iterable[int]) -> int:
    return zlib.crc32(repr(tuple(shape)).encode())


def _announce(comm: Communicator, tensor: torch.Tensor | None, op: ReduceOp = Sum) -> np.ndarray:
    """For `join`, (ranks, 5): does it contribute, dtype, elements, operation, shape.

    CollectiveError: they differ.
    """
    entry = [0] * 5
    if tensor is not None:
        entry = [
            1,
            _DTYPES.index(tensor.dtype),
            tensor.numel(),
            _OPS.index(op),
            _digest(tensor.shape),
        ]
    everyone = comm.all_gather(np.array(entry, np.int64))
    active = np.flatnonzero(everyone[:, 0])
    for peer in active[(everyone[active] != everyone[active[:1]]).any(axis=1)]:
        calls = [
            f"{_OPS[op].name} of {n} {_DTYPES[d]} on rank {r}"
            for r, (_, d, n, op, _) in enumerate(everyone)
        ]
        says = f"{calls[active[0]]}, {calls[peer]}, or other shapes; give the same on all ranks"
        raise CollectiveError(f"[horovod] allreduce differs between ranks: {says}")
    return everyone


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiplies a tensor, in place; returns it. Integers are rounded towards zero."""
    if factor != 1.0:
        values = tensor.detach()
        values.copy_(values * factor if tensor.is_floating_point() else values.double() * factor)
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
    """Combines all ranks' tensors, in place; the mean of integers is rounded towards zero. name:
    taken and not used; the order of calls counts. Raises ConfigError: Adasum, or a dtype that
    cannot be added.
    """
    with calling(process_set, "allreduce_") as comm:
        kind = _reduction(op, average)
        if _check_tensor(tensor, "allreduce").dtype not in _DTYPES:
            raise ConfigError(
                f"[horovod] allreduce of {tensor.dtype}; convert it to a number of 8 to 64 bits"
            )
        divided = kind is Average and not tensor.is_floating_point()
        kind = Sum if divided else kind
        _scaled(tensor, prescale_factor)
        if comm.size > 1:
            _announce(comm, tensor, kind)
        place = dist.Place(tensor, "allreduce_")
        flat = place.memory.reshape(-1)  # as `join` gives it
        work = Work(comm.all_reduce(flat, kind, flat, wait=False), place.filled)

    def finish(total: torch.Tensor) -> torch.Tensor:
        if divided:
            total.copy_(total.div(comm.size, rounding_mode="trunc"))
        return _scaled(total, postscale_factor)

    return work.then(finish)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Work:
    """Overwrites `tensor` with that of `root_rank` (of all ranks)."""
    return dist.broadcast(tensor, root_rank, process_set, async_op=True)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Work:
    """All ranks' tensors one after the other; they may differ in their first dimension."""
    with calling(process_set, "allgather") as comm:
        rows = comm.all_gather_each(dist.array_of(_check_tensor(tensor, "allgather", rows=True)))
    return Work(Request(dist.like(tensor, np.concatenate(rows))))


def _exchange(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Work:
    """Rows of `tensor` to ranks 0, 1, ...: splits[p] rows to rank p, or equal parts.

    Returns what came, rank by rank; with `splits`, (that, rows from each rank).
    """
    with calling(process_set, "alltoall") as comm:
        n = len(_check_tensor(tensor, "alltoall", rows=True))
        row = _digest(tensor.shape[1:])
        if splits is None and n % comm.size:
            raise ShapeError(f"[horovod] alltoall of {n} rows on {comm.size} ranks; give splits=")
        send = [n // comm.size] * comm.size if splits is None else torch.as_tensor(splits).tolist()
        if [type(k) for k in send] != [int] * comm.size or min(send) < 0 or sum(send) != n:
            raise ShapeError(
                f"[horovod] alltoall: splits={send} of {n} rows; give {comm.size} integers that "
                "add up"
            )
        came = comm.all_to_all(np.array([[k, row] for k in send], np.int64))
    for peer in np.flatnonzero(came[:, 1] != row):
        shape = tuple(tensor.shape[1:])
        raise CollectiveError(
            f"[horovod] alltoall of rows of {shape}, others on rank {peer}; give rows of one shape"
        )
    receive = came[:, 0].tolist()
    out = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    work = dist.all_to_all_single(out, tensor, receive, send, process_set, async_op=True)
    return work.then(lambda out: (out, torch.tensor(receive)))


@functools.wraps(_exchange)
def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, *arguments: Any, **keywords: Any
) -> Work:
    work = _exchange(tensor, splits, *arguments, **keywords)
    return work if splits is not None else work.then(lambda came: came[0])


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Work:
    """This rank's rows of the combination; where they do not divide by the ranks, the first
    ranks have one more.
    """
    with calling(process_set, "reducescatter") as comm:
        rows, remainder = divmod(len(_check_tensor(tensor, "reducescatter", rows=True)), comm.size)
    lo = comm.rank * rows + min(comm.rank, remainder)
    work = allreduce_async(tensor, None, name, op, prescale_factor, postscale_factor, process_set)
    return work.then(lambda total: total[lo : lo + rows + (comm.rank < remainder)])


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Adds sparse tensors, or their mean: the entries of all ranks.

    Returns a function that gives them.
    """
    with calling(process_set, "sparse_allreduce"):
        if (kind := _reduction(op)) not in (Sum, Average) or not tensor.is_sparse:
            raise ConfigError(
                "[horovod] sparse_allreduce adds sparse tensors, or their mean; use allreduce"
            )
    coalesced = tensor.detach().coalesce()
    indices, values = (
        allgather_async(t, name, process_set).wait()
        for t in (coalesced.indices().t(), coalesced.values())
    )
    scaled = values / process_set.size() if kind is Average else values
    return lambda: torch.sparse_coo_tensor(
        indices.t(), scaled, tensor.shape, check_invariants=False
    )


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits for all ranks."""
    dist.barrier(process_set)


allreduce_, broadcast_ = map(_make_blocking, (allreduce_async_, broadcast_async_))
allreduce_async, broadcast_async = map(_make_copying, (allreduce_async_, broadcast_async_))


def _check_linear(options: dict[str, Any]) -> ReduceOp:
    if (kind := _reduction(options["op"], options.get("average"))) in (Sum, Average):
        return kind
    raise ConfigError(
        f"[horovod] op={kind.name} has no gradient here; give tensor.detach(), or Sum or Average"
    )


def _mean_gradient(gradient: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    return allreduce_(gradient, process_set=options["process_set"])


def _allreduce_gradient(gradient: torch.Tensor, options: dict[str, Any], _: Any) -> torch.Tensor:
    return allreduce_(gradient, **options | {"op": _check_linear(options), "average": None})


def _allgather_gradient(gradient: torch.Tensor, options: dict[str, Any], rows: Any) -> torch.Tensor:
    everyone = options["process_set"]._member("allgather").all_gather(np.array(rows, np.int64))
    return _mean_gradient(gradient, options).narrow(
        0, int(everyone[: options["process_set"].rank()].sum()), *rows
    )


def _broadcast_gradient(gradient: torch.Tensor, options: dict[str, Any], _: Any) -> torch.Tensor:
    mean = _mean_gradient(gradient, options)
    return mean if rank() == options["root_rank"] else torch.zeros_like(mean)


def _reducescatter_gradient(
    gradient: torch.Tensor, options: dict[str, Any], _: Any
) -> torch.Tensor:
    ranks = options["process_set"].size() if _check_linear(options) is Sum else 1
    factor = options["prescale_factor"] * options["postscale_factor"] * ranks
    return allgather(_scaled(gradient, factor), process_set=options["process_set"])


def _alltoall_gradient(gradient: torch.Tensor, options: dict[str, Any], rows: Any) -> torch.Tensor:
    return _exchange(gradient, rows, None, options["process_set"]).wait()[0]


# Gradients are Horovod's, which takes the mean of the ranks' for some calls, and their sum for
# others.
allreduce = _make_differentiable("allreduce", allreduce_async, _allreduce_gradient)
broadcast = _make_differentiable("broadcast", broadcast_async, _broadcast_gradient)
allgather = _make_differentiable("allgather", allgather_async, _allgather_gradient)
alltoall = _make_differentiable("alltoall", _exchange, _alltoall_gradient)
reducescatter = _make_differentiable("reducescatter", reducescatter_async, _reducescatter_gradient)
grouped_allreduce = _make_grouped(allreduce)
grouped_allreduce_ = _make_grouped(allreduce_)
grouped_allreduce_async = _make_grouped(allreduce_async)
grouped_allreduce_async_ = _make_grouped(allreduce_async_)
grouped_allgather = _make_grouped(allgather)
grouped_reducescatter = _make_grouped(reducescatter)


def join(device: int = -1) -> int:
    """Takes part in the others' allreduce calls, with zeros, until all ranks have joined; the
    last rank that did. Means are over all ranks, those that have joined included. What the
    others may call meanwhile is allreduce and the steps of a DistributedOptimizer; another
    call is an error.
    """
    comm = world("join")
    rounds = 0
    while comm.size > 1:
        everyone = _announce(comm, None)
        active = np.flatnonzero(everyone[:, 0])
        if not len(active):
            break
        _, dtype, elements, op, _ = everyone[active[0]]
        dist.all_reduce(
            torch.zeros(int(elements), dtype=_DTYPES[dtype]), _OPS[op], global_process_set
        )
        rounds += 1
    waited = comm.all_gather(np.array([rounds]))[:, 0]
    return int(np.flatnonzero(waited == waited.min())[-1])


def broadcast_parameters(
    params: Any,
    root_rank: int = 0,
    prefix: str | None = None,
    process_set: ProcessSet = global_process_set,
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

    allow_pickle: send anything else by pickle, which runs what the sender says; Horovod always
    does. Raises ConfigError: something else is in it, and allow_pickle is False.
    """
    comm = process_set._member("broadcast_object")
    root = process_set._place("broadcast_object from rank", root_rank)
    sent = spread(comm, objects.packed(obj, allow_pickle) if comm.rank == root else None, root)
    return obj if comm.rank == root else objects.unpacked(sent, allow_pickle)


def allgather_object(
    obj: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    allow_pickle: bool = False,
) -> list[Any]:
    """The objects of all ranks, as `broadcast_object` sends them."""
    return [
        broadcast_object(obj, r, name, process_set, allow_pickle=allow_pickle)
        for r in process_set.ranks
    ]


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
    """Methods that `DistributedOptimizer` adds to the class of the user's optimizer, as Horovod
    does.
    """

    _passes = 0  # backward passes since the last step
    _synchronized = _skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Backward passes before a step, from now on."""
        self.backward_passes_per_step = passes

    def _passed(self, parameter: torch.Tensor) -> None:
        self._passes += 1
        if self._passes > self.backward_passes_per_step and self._process_set.size() > 1:
            raise ConfigError(
                f"[horovod] {self._passes} backward passes before step(), and "
                "backward_passes_per_step is "
                f"{self.backward_passes_per_step}; give the number of passes"
            )

    def synchronize(self) -> None:
        """Replaces the gradients by those of all ranks, combined; a rank without one contributes
        zeros.
        """
        ranks = self._process_set.size()
        predivide = self._predivide
        for p in self._parameters:
            if p.grad is not None and p.grad.is_sparse:
                sent = p.grad.to_dense() if self._dense else None
                p.grad = (
                    sparse_allreduce_async(p.grad, None, self._op, self._process_set)()
                    if sent is None
                    else sent
                )
            elif p.grad is None and ranks > 1:
                p.grad = torch.zeros_like(p)
        dense = [p.grad for p in self._parameters if ranks > 1 and not p.grad.is_sparse]
        for dtype in dict.fromkeys(g.dtype for g in dense):
            grads = [g for g in dense if g.dtype is dtype]
            flat = torch.cat([g.reshape(-1) for g in grads])
            sent, context = self._compression.compress(
                flat.div_(predivide) if predivide != 1.0 else flat
            )
            kind = Sum if predivide != 1.0 else self._op
            flat = self._compression.decompress(
                allreduce_(sent, op=kind, process_set=self._process_set), context
            )
            if predivide != 1.0:
                flat = flat * (predivide / ranks)
            for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                g.copy_(part.view(g.shape))
        self._synchronized = True
        self._passes = 0

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
            if self._synchronized:
                text = (
                    "optimizer.step() called without optimizer.skip_synchronize() context "
                    "after synchronize()"
                )
                warnings.warn(f"{text}: gradients are combined twice", stacklevel=2)
            self.synchronize()
        self._synchronized = False
        return super(self.__class__, self).step(closure)

    def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
        """The optimizer's own; between synchronize() and step() it would lose the gradients."""
        if self._synchronized:
            raise ConfigError(
                "[horovod] optimizer.zero_grad() between synchronize() and step(); call step() "
                "first"
            )
        self._passes = 0
        super(self.__class__, self).zero_grad(*arguments, **keywords)


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
    """The optimizer, of a class that is a subclass of its own, whose steps are taken with all
    ranks' gradients.

    num_groups, groups: taken and not used; gradients go in one piece. Other arguments are
    Horovod's. Raises ConfigError: Adasum, parameters without a name or named twice, or a predivide
    factor without Average.
    """
    kind = _reduction(op)
    if gradient_predivide_factor != 1.0 and kind is not Average:
        raise ConfigError("[horovod] gradient_predivide_factor goes with op=hvd.Average")
    named_pairs = list(named_parameters or ())
    if len({name for name, _ in named_pairs}) < len(named_pairs):
        raise ConfigError("[horovod] named_parameters has a name twice; names must be unique")
    named_ids = {id(p) for _, p in named_pairs}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    unnamed = [p for p in parameters if id(p) not in named_ids]
    if named_pairs and unnamed:
        raise ConfigError(
            f"[horovod] {len(unnamed)} parameters of the optimizer are not in named_parameters; "
            "name all"
        )
    if not process_set.included():  # these ranks train apart from each other, as Horovod's do
        return optimizer
    process_set._member("DistributedOptimizer")
    methods = {
        name: value for name, value in vars(_Distributed).items() if not name.startswith("__")
    }
    distributed: Any = optimizer
    distributed.__class__ = type(type(optimizer).__name__, (type(optimizer),), methods)
    distributed._parameters = [p for p in parameters if p.requires_grad]
    distributed._compression = compression
    distributed._op = kind
    distributed._predivide = gradient_predivide_factor
    distributed._dense = sparse_as_dense
    distributed._process_set = process_set
    distributed.backward_passes_per_step = backward_passes_per_step
    for p in distributed._parameters[:1]:
        p.register_post_accumulate_grad_hook(distributed._passed)
    return distributed


_TIMELINE = (
    "fit(trace=FILE) of a trainer, and `odyssey trace RUN` of a run, draw when each rank did what"
)
_ELSEWHERE = dict.fromkeys(("start_timeline", "stop_timeline"), _TIMELINE)
_ELSEWHERE["SyncBatchNorm"] = (
    "torch.nn.BatchNorm in odyssey.torch.DistributedDataParallel is the same on any ranks"
)


def __getattr__(name: str) -> Any:
    if name == "elastic":
        from . import elastic

        return elastic
    if name in _ELSEWHERE:
        raise ConfigError(f"[horovod] there is no {name}: {_ELSEWHERE[name]} (docs/migration.md)")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
