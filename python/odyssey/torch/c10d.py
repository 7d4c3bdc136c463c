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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.futures import Future

from .. import comm as communication
from .. import distributed
from ..base import entry, launcher
from ..comm import Communicator, ReduceOp, base, calls
from ..distributed import ProcessGroup, Work
from ..errors import ConfigError
from ..train import spread
from .gloo import meet

_OPERATIONS = [(getattr(dist.ReduceOp, name), name) for name in dist.ReduceOp.RedOpType.__members__]
_OURS = dict(ReduceOp.__members__)


def operation(opts: Any, tensor: torch.Tensor) -> ReduceOp | str:
    """The operation of torch's options of a call; without them, the sum. Raises ConfigError: odyssey has none such
    (bitwise operations, PREMUL_SUM), or the dtype cannot be combined."""
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for known, name in _OPERATIONS:
        if op == known:
            return distributed.operation(_OURS.get(name, name), tensor, "backend odyssey")
    return distributed.operation(op, tensor, "backend odyssey")


class _Message(dist.Work):
    """A message under way; what was received is in the user's tensor when it is waited for."""

    def __init__(self, work: Work, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._work, self._tensors = work, tensors

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._work.is_completed()

    is_success = is_completed

    def get_future(self) -> Future:
        self.wait()
        return _future(self._tensors)


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


class _Members(ProcessGroup):
    """The ranks of a communicator, for the functions of odyssey.distributed; roots are places among them."""

    def __init__(self, comm: Communicator) -> None:
        self.ranks, self.comm = tuple(range(comm.size)), comm


class OdysseyProcessGroup(dist.ProcessGroup):
    """A process group whose calls a communicator carries out. Methods are torch's; it calls them, not users."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm, self._members = comm, _Members(comm)
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

    # --- one tensor of each rank, or one that holds those of all: over the communicator, which is faster ---

    def _into(self, outputs: Sequence[torch.Tensor], opts: Any, call: Callable[[np.ndarray], Any]) -> Any:
        """Carries out a call for each of the tensors, which is given its memory to write to."""
        for t in outputs:
            place = distributed.Place(t, "backend odyssey")
            call(place.memory)
            place.filled()
        return _done(outputs, opts)

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        op = operation(opts, tensors[0])
        return self._into(tensors, opts, lambda a: self.comm.all_reduce(a, op, a))

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        return self._into(tensors, opts, lambda a: self.comm.broadcast(a, opts.rootRank))

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        op, root = operation(opts, tensors[0]), opts.rootRank
        return self._into(tensors, opts, lambda a: self.comm.reduce(a, op, root, a if self.comm.rank == root else None))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        a = distributed.array_of(tensor)
        return self._into([output], opts, lambda out: self.comm.all_gather(a, out.reshape(self.comm.size, *a.shape)))

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        op, a = operation(opts, tensor), distributed.array_of(tensor).reshape(-1)
        return self._into([output], opts, lambda out: self.comm.reduce_scatter(a, op, out.reshape(-1)))

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, receive: list[int], send: list[int], opts: Any = None
    ) -> Any:
        distributed.all_to_all_single(output, tensor, receive, send, self._members)
        return _done([output], opts)

    # --- lists of tensors, one per rank ---

    def allgather(self, outputs: Sequence[list[torch.Tensor]], tensors: Sequence[torch.Tensor], opts: Any = None):
        for out, t in zip(outputs, tensors, strict=True):
            distributed.all_gather(out, t, self._members)
        return _done(outputs, opts)

    def reduce_scatter(self, outputs: Sequence[torch.Tensor], lists: Sequence[list[torch.Tensor]], opts: Any) -> Any:
        for out, given in zip(outputs, lists, strict=True):
            distributed.reduce_scatter(out, given, operation(opts, out), self._members)
        return _done(outputs, opts)

    def gather(self, outputs: Sequence[list[torch.Tensor]], tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        distributed.gather(tensors[0], outputs[0] if outputs else None, opts.rootRank, self._members)
        return _done(outputs, opts)

    def scatter(self, outputs: Sequence[torch.Tensor], lists: Sequence[list[torch.Tensor]], opts: Any) -> Any:
        distributed.scatter(outputs[0], lists[0] if lists else None, opts.rootRank, self._members)
        return _done(outputs, opts)

    def alltoall(self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        distributed.all_to_all(outputs, tensors, self._members)
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
        message = _Message(distributed.isend(tensors[0], rank, self._members, tag), tensors)
        self._messages = [m for m in self._messages if not m.is_completed()] + [message]
        return message

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int = 0) -> Any:
        return _Message(distributed.irecv(tensors[0], rank, self._members, tag), tensors)

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


_made: dict[tuple[int, ...], Communicator] = {}  # by their ranks: those of the present default group, which is ()


def create(options: Any, backend_options: Any = None) -> OdysseyProcessGroup:
    """The process group that torch.distributed asks for, in each of its members; all of them ask in the same order.
    Raises CollectiveError: a rank did not come."""
    if not dist.is_initialized():
        world = _world(options)
        _made.clear()
        _made[()] = _made[world.ranks] = world
        if launcher.rank() is not None:
            _show_errors()
        return OdysseyProcessGroup(world)
    ranks = tuple(options.global_ranks_in_group) or _made[()].ranks
    if ranks not in _made:
        _made[ranks] = _made[()]._part(ranks)  # only its members are here
        return OdysseyProcessGroup(_made[ranks])
    again = _made[ranks].group(range(len(ranks)))  # another group of the same ranks: apart from the first
    assert again is not None
    return OdysseyProcessGroup(again)


def _world(options: Any) -> Communicator:
    """All processes: MPI's where its launcher has started them; those of before, if they met without this group; else
    those that meet in the store that init_process_group was given, or has made of its address."""
    asked, found, met = (options.group_rank, options.group_size), launcher.launched(), communication.met()
    a_rank = os.environ.get(entry.MARK, str(os.getpid())) == str(os.getpid())  # not started by one, with its variables
    if found is not None and a_rank and (found.rank, found.size) == asked:
        return communication.world()
    if met is not None and met is not _made.get(()) and (met.rank, met.size) == asked:
        return met
    return meet(options.store, *asked, _seconds(options.timeout)) if asked[1] > 1 else communication.world("local")


def _seconds(timeout: Any) -> float | None:
    """Returns the seconds of a `timeout=` that was given; None for torch's default, in whose place ODYSSEY_TIMEOUT
    is."""
    return None if timeout is None or timeout == default_pg_timeout else timeout.total_seconds()


def _show_errors() -> None:
    """Torch has an uncaught exception printed into a buffer, which it shows afterwards; but odyssey's hook, which tells
    the other ranks, ends the process. It is given standard error back."""
    hook, stderr = sys.excepthook, sys.stderr

    def shown(*error: Any) -> None:
        sys.stderr = stderr
        hook(*error)

    sys.excepthook = shown


def set_environment() -> None:
    """Sets MASTER_ADDR and MASTER_PORT where mpirun or srun started this process and they are not set: with RANK and
    WORLD_SIZE, which `import odyssey` sets, what env:// and other programs look for. All ranks call it, as importing
    `odyssey.torch` does: they agree on a port."""
    if launcher.launched() is None or getattr(base.here, "world", None) is not None:
        return
    if not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        world = communication.world()
        first, port = spread(world, [socket.gethostname(), launcher.free_port()])
        os.environ["MASTER_ADDR"] = "127.0.0.1" if world.local_size == world.size else first
        os.environ["MASTER_PORT"] = str(port)


def _env(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Returns what env:// finds: as torch has it, but a process that nobody has started as one of several is a world of
    one."""
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
