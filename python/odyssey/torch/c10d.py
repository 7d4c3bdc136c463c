"""The backend "odyssey" of torch.distributed: a process group over a communicator of `odyssey.comm`.

So DDP, FSDP2, ZeroRedundancyOptimizer and whatever else calls torch.distributed get its matching of calls, its errors
that name ranks and source lines, and sums in a fixed order. A collective is complete when it returns; its Work is for
programs that wait for one. Messages (isend, irecv) are under way until they are waited for.

What it is not: the same bits on any number of ranks. DDP over it adds one sum per rank; ddp.py adds fixed shards.
"""

from __future__ import annotations

import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.futures import Future

from .. import comm as communication
from ..comm import Communicator, Request, base, bfloat16, calls
from ..errors import ConfigError, ShapeError
from ..train.resume import spread
from ..watch import launcher

_OPS = {"SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min", "PRODUCT": "prod"}
_KINDS = [(name, getattr(dist.ReduceOp, name)) for name in dist.ReduceOp.RedOpType.__members__]
_OF_BOOL = {"sum": "max", "max": "max", "prod": "min", "min": "min"}  # or, and
_NUMBERS = {getattr(torch, name) for name in calls.DTYPES} | {torch.bool}


def operation(opts: Any, dtype: torch.dtype) -> str:
    """The name that `comm` has for the ReduceOp of torch's options of a call; without them, the sum. Raises
    ConfigError: it has none (bitwise operations, PREMUL_SUM), or the dtype cannot be added."""
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    kind = next((name for name, known in _KINDS if op == known), op)
    found = _OPS.get(kind)
    if dtype is torch.bool:
        found = _OF_BOOL.get(found or "")
    if found is None or dtype not in _NUMBERS:
        raise ConfigError(
            f"[torch] backend odyssey cannot combine {dtype} by {kind}; use SUM, AVG (of floats), MAX, MIN or PRODUCT "
            "of integers, booleans, float16, bfloat16, float32 or float64"
        )
    return found


def host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor on the CPU with the values of `tensor`: itself where it is one."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        raise ShapeError("[torch] backend odyssey takes dense tensors, and this one is sparse; use tensor.to_dense()")
    return tensor if tensor.is_contiguous() and not tensor.is_cuda else tensor.cpu().contiguous()


def put(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copies what was received into a `host(tensor)` to the tensor itself, where they are two; returns it."""
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values)
    return tensor


def array(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a `host` tensor as an array that `comm` takes; of other dtypes than its own, the bytes."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(bfloat16)
    if tensor.dtype in _NUMBERS and tensor.dtype is not torch.bool:
        return tensor.numpy()
    return (tensor if tensor.dtype is torch.bool or tensor.dim() else tensor.reshape(1)).view(torch.uint8).numpy()


def tensor_of(a: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `array`: a tensor of the dtype of `like` with the memory of a contiguous array."""
    return torch.from_numpy(a.view(np.uint16) if a.dtype == bfloat16 else a).view(like.dtype)


def exchange(
    comm: Communicator, output: torch.Tensor, tensor: torch.Tensor, receive: Sequence[int], send: Sequence[int]
) -> Request:
    """Starts sending rows of a `host` tensor to ranks 0, 1, ..., and receiving theirs: as many each, or equal parts."""
    sides: list[Any] = []
    for t, rows in ((tensor, send), (output, receive)):
        flat = array(t).reshape(-1)
        each = flat.size // max(len(t), 1)
        sides += [flat, [int(n) * each for n in rows] if len(rows) else [flat.size // comm.size] * comm.size]
    return comm.all_to_all_v(*sides, wait=False)


class _Message(dist.Work):
    """A message under way; what was received goes to the user's tensor when it is waited for."""

    def __init__(self, request: Request, values: torch.Tensor, target: torch.Tensor | None = None) -> None:
        super().__init__()
        self._request, self._values, self._target = request, values, target

    def wait(self, timeout: Any = None) -> bool:
        self._request.wait()
        if self._target is not None:
            put(self._values, self._target)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._request.test()

    is_success = is_completed

    def get_future(self) -> Future:
        self.wait()
        return _future([self._values])


def _future(value: Any) -> Future:
    future = Future()
    future.set_result(value)
    return future


def _done(value: Any, options: Any = None) -> Any:
    """The Work of a call that is over; None where the caller said that it wants none."""
    if options is not None and not getattr(options, "asyncOp", True):
        return None
    return torch._C._distributed_c10d._create_work_from_future(_future(value))


def _coalesced(single: Callable[..., Any]) -> Callable[..., Any]:
    """The form of a call that takes several pairs of tensors."""

    def coalesced(self: Any, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        for out, t in zip(outputs, tensors, strict=True):
            single(self, out, t, opts)
        return _done(outputs, opts)

    return coalesced


class OdysseyProcessGroup(dist.ProcessGroup):
    """A process group whose calls a communicator carries out. Methods are torch's; it calls them, not users."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self._name = self._desc = ""
        self._messages: list[_Message] = []  # sent and not waited for: their buffers must stay

    # --- names, as torch asks for them ---

    def getBackendName(self) -> str:
        return "odyssey"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._desc = text

    def getGroupDesc(self) -> str:
        return self._desc

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names.get(self, self._name)

    pg_name = group_name

    def shutdown(self) -> None:
        for message in self._messages:
            message.wait()
        self._messages.clear()

    # --- one tensor of each rank ---

    def _into(self, outputs: Sequence[torch.Tensor], opts: Any, call: Callable[[np.ndarray], Any]) -> Any:
        """Carries out a call for each of the tensors, which is given its memory to write to."""
        for t in outputs:
            values = host(t)
            call(array(values))
            put(values, t)
        return _done(outputs, opts)

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        op = operation(opts, tensors[0].dtype)
        return self._into(tensors, opts, lambda a: self.comm.all_reduce(a, op, a))

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        return self._into(tensors, opts, lambda a: self.comm.broadcast(a, opts.rootRank))

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        op, root = operation(opts, tensors[0].dtype), opts.rootRank
        return self._into(tensors, opts, lambda a: self.comm.reduce(a, op, root, a if self.comm.rank == root else None))

    # --- one tensor that holds those of all ranks ---

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        given = array(host(tensor))
        return self._into(
            [output], opts, lambda a: self.comm.all_gather(given, a.reshape(self.comm.size, *given.shape))
        )

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        op, given = operation(opts, tensor.dtype), array(host(tensor)).reshape(-1)
        return self._into([output], opts, lambda a: self.comm.reduce_scatter(given, op, a.reshape(-1)))

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, receive: list[int], send: list[int], opts: Any = None
    ) -> Any:
        values = host(output)
        exchange(self.comm, values, host(tensor), receive, send).wait()
        return _done([put(values, output)], opts)

    # --- lists of tensors, one per rank ---

    def allgather(self, outputs: Sequence[list[torch.Tensor]], tensors: Sequence[torch.Tensor], opts: Any = None):
        for out, t in zip(outputs, tensors, strict=True):
            _copy(out, self.comm.all_gather(array(host(t))), t)
        return _done(outputs, opts)

    def reduce_scatter(self, outputs: Sequence[torch.Tensor], lists: Sequence[list[torch.Tensor]], opts: Any) -> Any:
        for out, given in zip(outputs, lists, strict=True):
            self.reduce_scatter_single(out, torch.stack(list(given)), opts)
        return _done(outputs, opts)

    def gather(self, outputs: Sequence[list[torch.Tensor]], tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        rows = self.comm.gather(array(host(tensors[0])), opts.rootRank)
        if rows is not None:
            _copy(outputs[0], rows, tensors[0])
        return _done(outputs, opts)

    def scatter(self, outputs: Sequence[torch.Tensor], lists: Sequence[list[torch.Tensor]], opts: Any) -> Any:
        rows = None
        if self.comm.rank == opts.rootRank:
            rows = array(host(torch.stack(list(lists[0])))).reshape(self.comm.size, -1)
        return self._into(outputs, opts, lambda a: self.comm.scatter(rows, opts.rootRank, a.reshape(-1)))

    def alltoall(self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        sizes = [[t.numel() for t in each] for each in (outputs, tensors)]
        values = torch.empty(sum(sizes[0]), dtype=tensors[0].dtype)
        self.all_to_all_single(values, torch.cat([t.detach().reshape(-1) for t in tensors]), *sizes)
        for out, part in zip(outputs, values.split(sizes[0]), strict=True):
            out.detach().copy_(part.view(out.shape))
        return _done(outputs, opts)

    # --- several calls in one: nothing is gained by keeping some back, each is carried out as it comes ---

    def allgather_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        return self.allgather(list(zip(*outputs, strict=True)), tensors, opts)

    all_gather_single_coalesced = _coalesced(all_gather_single)
    reduce_scatter_single_coalesced = _coalesced(reduce_scatter_single)

    def _start_coalescing(self, device: Any = None) -> None:
        pass

    def _end_coalescing(self, device: Any = None) -> Any:
        return _done(None)

    # --- one to one ---

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int = 0) -> Any:
        values = host(tensors[0])
        message = _Message(self.comm.send(array(values), rank, tag, wait=False), values)
        self._messages = [m for m in self._messages if not m.is_completed()] + [message]
        return message

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int = 0) -> Any:
        values = host(tensors[0])
        return _Message(self.comm.recv(array(values), rank, tag, wait=False), values, tensors[0])

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Any:
        raise ConfigError("[torch] backend odyssey receives from a rank that is named; give recv(tensor, src=RANK)")

    def barrier(self, opts: Any = None) -> Any:
        self.comm.barrier()
        return _done(None, opts)

    # The names before torch 2.13, which calls either.
    allreduce_coalesced = allreduce
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _copy(outputs: Sequence[torch.Tensor], rows: np.ndarray, like: torch.Tensor) -> None:
    """Rows that were received, of one tensor per rank, into the user's tensors."""
    for out, row in zip(outputs, rows, strict=True):
        out.detach().copy_(tensor_of(np.asarray(row), like).view(like.shape))


_made: weakref.WeakKeyDictionary[Communicator, dict[tuple[int, ...], Communicator]] = weakref.WeakKeyDictionary()


def create(options: Any, backend_options: Any = None) -> OdysseyProcessGroup:
    """The process group that torch.distributed asks for, in each of its members; all of them ask in the same order.
    Raises ConfigError: torch.distributed and odyssey do not agree on who this process is."""
    world = communication.world()
    asked = (options.group_rank, options.group_size)
    if not dist.is_initialized():
        if asked != (world.rank, world.size):
            raise ConfigError(
                f"[torch] init_process_group is told rank {asked[0]} of {asked[1]}, but this process is rank "
                f"{world.rank} of {world.size} ({world.why}); leave out rank= and world_size=, and start all ranks "
                "with mpirun, odyssey launch or torchrun"
            )
        if launcher.rank() is not None:
            _show_errors()
        return OdysseyProcessGroup(world)
    ranks = tuple(options.global_ranks_in_group) or tuple(range(world.size))
    of = _made.setdefault(world, {tuple(range(world.size)): world})
    if ranks not in of:
        of[ranks] = world._part(ranks)  # only its members are here
        return OdysseyProcessGroup(of[ranks])
    again = of[ranks].group(range(len(ranks)))  # another group of the same ranks: apart from the first
    assert again is not None
    return OdysseyProcessGroup(again)


def _show_errors() -> None:
    """Torch has an uncaught exception printed into a buffer, which it shows afterwards; but odyssey's hook, which tells
    the other ranks, ends the process. It is given standard error back."""
    hook, stderr = sys.excepthook, sys.stderr

    def shown(*error: Any) -> None:
        sys.stderr = stderr
        hook(*error)

    sys.excepthook = shown


def set_environment() -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT where mpirun or srun started
    this process and they are not set: what env:// and other programs look for. All ranks call it, as importing
    `odyssey.torch` does: they agree on a port."""
    found = launcher.launched()
    if found is None or getattr(base.here, "world", None) is not None:
        return
    if not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        world = communication.world()
        first, port = spread(world, [socket.gethostname(), launcher.free_port()])
        os.environ["MASTER_ADDR"] = "127.0.0.1" if world.local_size == world.size else first
        os.environ["MASTER_PORT"] = str(port)
    numbers = (found.rank, found.size, found.local_rank, found.local_size)
    for name, value in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), numbers, strict=True):
        os.environ.setdefault(name, str(value))


def _env(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """What env:// finds: as torch has it, but a process that nobody has started as one of several is a world of one."""
    if launcher.launched() is not None or "?" in url or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & os.environ.keys():
        yield from _torchs(url, **options)
        return
    print("odyssey: [torch] a world of one: nobody started ranks; odyssey launch -n 4 script.py does", file=sys.stderr)
    yield dist.HashStore(), 0, 1


_handlers = getattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers", {})  # dist has its function
_torchs = _handlers.get("env")
_handlers["env"] = _env if _torchs is not None else None
_SITE = os.path.dirname(os.path.dirname(torch.__file__))
calls.libraries += [  # a call is its user's, not theirs
    os.path.join(_SITE, name, "")
    for name in ("torch", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")
]
set_environment()
if "odyssey" not in dist.Backend.backend_list:  # else `import torch` has: python/odyssey_c10d.py
    dist.Backend.register_backend("odyssey", create, extended_api=True, devices=["cpu", "cuda"])
