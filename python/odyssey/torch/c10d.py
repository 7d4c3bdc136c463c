"""The backend "odyssey" of torch.distributed: a process group over a communicator of
`odyssey.comm`.

So DDP, FSDP2, ZeroRedundancyOptimizer and whatever else calls torch.distributed get its matching of
calls, its errors that name ranks and source lines, and sums in a fixed order. Works are pending:
pending.py. What it is not: the same bits on any number of ranks. DDP over it adds one sum per rank;
ddp.py adds fixed shards.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlparse

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.futures import Future

from .. import comm as communication
from .. import distributed
from ..base import exits, launcher
from ..comm import Communicator, ReduceOp, base, calls
from ..distributed import ProcessGroup, Work
from ..errors import ConfigError
from ..train import spread
from .gloo import meet
from .pending import Pending, PendingCalls, device_of, failed, future_of, within
from .streams import Handover, has_streams

_REDUCE_OPS = dict(ReduceOp.__members__)
_BITWISE = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}


def operation(opts: Any, tensor: torch.Tensor) -> ReduceOp | str | np.ufunc:
    """The operation of torch's options of a call, a bitwise one as NumPy's; without them, the sum.

    Raises ConfigError: odyssey has none such (PREMUL_SUM), or the dtype cannot be combined.
    """
    name = "SUM" if opts is None else opts.reduceOp.op.name
    if name in _BITWISE and not (tensor.is_floating_point() or tensor.is_complex()):
        return _BITWISE[name]
    return distributed.operation(_REDUCE_OPS.get(name, name), tensor, "backend odyssey")


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


class _Message(Pending):
    """A message under way; what was received is in the user's tensor when it is waited for."""

    def __init__(self, comm: Communicator, work: Work, tensors: Sequence[torch.Tensor]) -> None:
        dist.Work.__init__(self)
        self._comm = comm
        self._message = work
        self._value = tensors
        self._error = None

    def wait(self, timeout: Any = None) -> bool:
        with within(self._comm, timeout):
            self._message.wait()
        return True

    def is_completed(self) -> bool:
        return self._message.is_completed()

    is_success = is_completed

    def get_future(self) -> Future:
        self.wait()
        future = future_of(self._value)
        future.set_result(self._value)
        return future

    def _source_rank(self) -> int:
        return self._message.source

    source_rank = _source_rank


def _coalesced(single: Callable[..., Any]) -> Callable[..., Any]:
    """The form of a call that takes several pairs of tensors."""

    def coalesced(self: Any, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        works = [single(self, out, t, opts) for out, t in zip(outputs, tensors, strict=True)]
        return self._after(works, outputs, opts)

    return coalesced


def _continued(work: Callable[[], Any], handover: Handover) -> Callable[[], Any]:
    """Returns a call that another thread continues in the order of the caller's stream."""

    def carry_out() -> Any:
        with handover.resumed():
            return work()

    return carry_out


def _check_dense(tensor: torch.Tensor) -> None:
    """Raises ShapeError at the call, not in the Work: a sparse tensor isn't supported."""
    if tensor.layout is not torch.strided:
        distributed.array_of(tensor, "backend odyssey")


class _Members(ProcessGroup):
    """The ranks of a communicator, for the functions of odyssey.distributed; roots are places
    among them.
    """

    def __init__(self, comm: Communicator) -> None:
        self.ranks = tuple(range(comm.size))
        self.comm = comm


class OdysseyProcessGroup(dist.ProcessGroup):
    """A process group whose calls a communicator carries out.

    Methods are torch's; it calls them, not users.
    """

    def __init__(self, comm: Communicator, timeout: float | None = None) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self._members = _Members(comm)
        self._line = PendingCalls(comm, timeout)
        self._name = self._desc = ""
        self._messages: list[_Message] = []  # sent and not waited for: their buffers must stay
        self._together: list[Any] | None = None  # the Works since _start_coalescing

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

    # --- what torch asks of a group's back end for a kind of device: it is one for all ---

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> OdysseyProcessGroup:
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def shutdown(self) -> None:
        for message in self._messages:
            message.wait()
        self._messages.clear()
        self._line.finish()

    # --- the line of calls ---

    def _run(
        self,
        work: Callable[[], Any],
        value: Any,
        opts: Any = None,
        tensors: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Returns the Work of a call, or None if the caller waits for it.

        The call reads tensors of a GPU after everything that the caller's stream has now, and
        writes its results before the Work is over.

        Args:
            work: carries out the call. It reads and writes all tensors.
            value: the result of the Work: tensors that the call writes.
            tensors: tensors that the call reads; they matter if `value` is empty on this rank.
        """
        later = getattr(opts, "asyncOp", True)
        limit = getattr(opts, "timeout", None)
        limit = None if limit is None or limit.total_seconds() <= 0 else limit.total_seconds()
        device = device_of(value) or device_of(tensors)
        if device is not None and has_streams(device):
            work = _continued(work, Handover(device))
        pending = self._line.run(work, value, later, limit)
        if pending is None:
            return None
        if self._together is not None:
            self._together.append(pending)
        return pending

    def _after(self, works: Sequence[Any], value: Any, opts: Any = None) -> Any:
        """One Work for several that were made before it; it raises what one of them has."""
        works = [work for work in works if work is not None]
        return self._run(lambda: [work.wait() for work in works], value, opts)

    # --- one tensor of each rank, or one that holds those of all: over the communicator,
    #     which is faster

    def _into(
        self,
        outputs: Sequence[torch.Tensor],
        opts: Any,
        call: Callable[[np.ndarray], Any],
        read: bool = True,
    ) -> Any:
        """Carries out a call for each of the tensors, which is given its memory to write to.

        read: False if the call doesn't read the tensors.
        """
        for tensor in outputs:
            _check_dense(tensor)

        def work() -> None:
            for place in [distributed.Place(t, "backend odyssey", read=read) for t in outputs]:
                call(place.memory)
                place.filled()

        return self._run(work, outputs, opts)

    def _bitwise(self, a: np.ndarray, op: np.ufunc) -> np.ndarray:
        return op.reduce(self.comm.all_gather(a), axis=0)

    def _split_mean(
        self, op: ReduceOp | str, tensor: torch.Tensor
    ) -> tuple[ReduceOp | str, Callable[[np.ndarray], Any]]:
        """Returns the operation of the communicator, and a function that completes its result.

        The mean of integers is their sum, divided by the ranks and rounded towards zero, as NCCL
        rounds it.
        """
        if op is ReduceOp.MEAN and _is_integer(tensor):
            return ReduceOp.SUM, self._divide
        return op, lambda total: None

    def _divide(self, total: np.ndarray) -> None:
        """Divides integers by the ranks, in place and towards zero."""
        if self.comm.size > np.iinfo(total.dtype).max:  # no number of this dtype is that large
            total[...] = 0
            return
        total -= np.fmod(total, self.comm.size)
        total //= self.comm.size

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        if tensors[0].is_sparse:
            return self._run(lambda: [self._add_sparse(t, opts) for t in tensors], tensors, opts)
        op = operation(opts, tensors[0])
        if isinstance(op, np.ufunc):
            return self._into(tensors, opts, lambda a: np.copyto(a, self._bitwise(a, op)))
        sent_op, complete = self._split_mean(op, tensors[0])
        return self._into(tensors, opts, lambda a: complete(self.comm.all_reduce(a, sent_op, a)))

    def _add_sparse(self, tensor: torch.Tensor, opts: Any) -> None:
        """The sum of sparse tensors: the entries of all ranks, one after the other, of which
        torch adds the equal.
        """
        coalesced = tensor.coalesce()
        if operation(opts, coalesced.values()) is not ReduceOp.SUM:
            raise ConfigError(
                "[torch] backend odyssey adds sparse tensors, and combines them in no other way"
            )
        indices = self.comm.all_gather_each(distributed.array_of(coalesced.indices().t()))
        values = self.comm.all_gather_each(distributed.array_of(coalesced.values()))
        entries = (
            torch.from_numpy(np.concatenate(indices)).t().to(tensor.device),
            distributed.like(coalesced.values(), np.concatenate(values)),
        )
        tensor.copy_(
            torch.sparse_coo_tensor(*entries, tensor.shape, check_invariants=False).coalesce()
        )

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        root = opts.rootRank
        return self._into(
            tensors, opts, lambda a: self.comm.broadcast(a, root), read=self.comm.rank == root
        )

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        op = operation(opts, tensors[0])
        root = opts.rootRank
        me = self.comm.rank
        if isinstance(op, np.ufunc):
            return self._into(
                tensors, opts, lambda a: np.copyto(a, self._bitwise(a, op), where=me == root)
            )
        sent_op, complete = self._split_mean(op, tensors[0])

        def combine(a: np.ndarray) -> None:
            if self.comm.reduce(a, sent_op, root, a if me == root else None) is not None:
                complete(a)

        return self._into(tensors, opts, combine)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        _check_dense(tensor)

        def gather(out: np.ndarray) -> None:
            a = distributed.array_of(tensor)
            self.comm.all_gather(a, out.reshape(self.comm.size, *a.shape))

        return self._into([output], opts, gather, read=False)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        op = operation(opts, tensor)
        _check_dense(tensor)
        sent_op, complete = self._split_mean(op, tensor)

        def combine(out: np.ndarray) -> None:
            a = distributed.array_of(tensor).reshape(-1)
            if isinstance(op, np.ufunc):
                pieces = self._bitwise(a, op).reshape(self.comm.size, *out.shape)
                out[...] = pieces[self.comm.rank]
            else:
                complete(self.comm.reduce_scatter(a, sent_op, out.reshape(-1)))

        return self._into([output], opts, combine, read=False)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        receive: list[int],
        send: list[int],
        opts: Any = None,
    ) -> Any:
        call = distributed.all_to_all_single
        return self._run(lambda: call(output, tensor, receive, send, self._members), [output], opts)

    # --- lists of tensors, one per rank ---

    def allgather(
        self,
        outputs: Sequence[list[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        opts: Any = None,
    ):
        pairs = list(zip(outputs, tensors, strict=True))
        return self._run(
            lambda: [distributed.all_gather(*pair, self._members) for pair in pairs], outputs, opts
        )

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], lists: Sequence[list[torch.Tensor]], opts: Any
    ) -> Any:
        single = self.reduce_scatter_single
        works = [
            single(out, torch.stack(list(t)), opts) for out, t in zip(outputs, lists, strict=True)
        ]
        return self._after(works, outputs, opts)

    def gather(
        self, outputs: Sequence[list[torch.Tensor]], tensors: Sequence[torch.Tensor], opts: Any
    ) -> Any:
        output_list = outputs[0] if outputs else None
        root = opts.rootRank
        return self._run(
            lambda: distributed.gather(tensors[0], output_list, root, self._members),
            outputs,
            opts,
            tensors,
        )

    def scatter(
        self, outputs: Sequence[torch.Tensor], lists: Sequence[list[torch.Tensor]], opts: Any
    ) -> Any:
        input_list = lists[0] if lists else None
        root = opts.rootRank
        return self._run(
            lambda: distributed.scatter(outputs[0], input_list, root, self._members), outputs, opts
        )

    def alltoall(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        return self._run(
            lambda: distributed.all_to_all(outputs, tensors, self._members), outputs, opts
        )

    # --- several calls in one: nothing is gained by keeping some back, each is carried out as
    #     it comes

    def allgather_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        return self.allgather(list(zip(*outputs, strict=True)), tensors, opts)

    all_gather_single_coalesced = _coalesced(all_gather_single)
    reduce_scatter_single_coalesced = _coalesced(reduce_scatter_single)

    def _start_coalescing(self, device: Any = None) -> None:
        self._together = []

    def _end_coalescing(self, device: Any = None) -> Any:
        works = self._together or []
        self._together = None
        return self._after(works, None)

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int = 0) -> Any:
        message = _Message(
            self.comm, distributed.isend(tensors[0], rank, self._members, tag), tensors
        )
        self._messages = [m for m in self._messages if not m.is_completed()] + [message]
        return message

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int = 0) -> Any:
        return _Message(self.comm, distributed.irecv(tensors[0], rank, self._members, tag), tensors)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Any:
        place = distributed.Place(tensors[0], "backend odyssey", read=False)
        return _Message(
            self.comm,
            Work(self.comm.recv(place.memory, None, tag, wait=False), place.filled),
            tensors,
        )

    def barrier(self, opts: Any = None) -> Any:
        return self._run(self.comm.barrier, None, opts)

    # The names before torch 2.13, which calls either.
    allreduce_coalesced = allreduce
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


_default_world: list[Communicator] = []  # all processes, as the default group has them
_first_groups: dict[tuple[int, ...], OdysseyProcessGroup] = {}  # by ranks, the first group of each


def create(options: Any, backend_options: Any = None) -> OdysseyProcessGroup:
    """The process group that torch.distributed asks for, in each of its members; all of them ask
    in the same order. Raises CollectiveError: a rank did not come; ConfigError: a first group
    of some ranks beside another backend.
    """
    if not dist.is_initialized() or not _default_world:  # the default group, or beside another's
        place = (options.group_rank, options.group_size)
        exits.install(launcher.Launched("torch.distributed", *place, *place, mpi=False))
        _name_errors()
        if dist.is_initialized() and options.group_size != dist.get_world_size():
            raise ConfigError(
                "[c10d] the first group of backend odyssey must have all ranks where the default "
                "group is of another "
                "backend; call new_group(backend='odyssey') without ranks before"
            )
        world = _world(options)
        _first_groups.clear()
        _default_world[:] = [world]
    ranks = tuple(options.global_ranks_in_group) or _default_world[0].ranks
    first = _first_groups.get(ranks)
    comms = []
    if first is None:
        comms.append(_default_world[0]._make_group(ranks))  # only its members are here
    else:  # another group of the same ranks: made by the first, whose calls they match
        first._line.run(lambda: comms.append(first.comm.group(range(len(ranks)))), later=False)
    group = OdysseyProcessGroup(comms[0], _seconds(options.timeout))
    _first_groups.setdefault(ranks, group)
    return group


def _world(options: Any) -> Communicator:
    """All processes: MPI's where its launcher has started them; those of before, if they met
    without this group; else those that meet in the store that init_process_group was given,
    or has made of its address.
    """
    rank_and_size = (options.group_rank, options.group_size)
    launched = _launched()
    existing = communication.met()
    if launched is not None and (launched.rank, launched.size) == rank_and_size:
        return communication.world()
    if (
        existing is not None
        and existing not in _default_world
        and (existing.rank, existing.size) == rank_and_size
    ):
        return existing
    return (
        meet(options.store, *rank_and_size, _seconds(options.timeout))
        if rank_and_size[1] > 1
        else communication.world("local")
    )


def _launched() -> launcher.Launched | None:
    """Returns what a launcher says of this process; None where it started another, whose
    variables this one has.
    """
    return (
        launcher.launched()
        if os.environ.get(exits.MARK, str(os.getpid())) == str(os.getpid())
        else None
    )


def _seconds(timeout: Any) -> float | None:
    """Returns the seconds of a `timeout=` that was given; None for torch's default:
    ODYSSEY_TIMEOUT.
    """
    return None if timeout is None or timeout == default_pg_timeout else timeout.total_seconds()


def _name_errors() -> None:
    """Has the hook of uncaught errors receive the error of a call itself. By way of a Future it
    reaches the hook as text.
    """
    hook = sys.excepthook

    def name(kind: Any, error: Any, trace: Any) -> None:
        if failed and error is not failed[0] and str(failed[0]) in str(error):
            kind = type(failed[0])
            error = failed[0]
            trace = failed[0].__traceback__
        hook(kind, error, trace)

    sys.excepthook = name


# ports at which env:// has met; that were chosen here
_used_ports = set[str]()
_chosen_ports = set[str]()


def set_environment() -> None:
    """Sets MASTER_ADDR and MASTER_PORT where mpirun or srun started this process and they are
    not set: with RANK and WORLD_SIZE, which `import odyssey` sets, what env:// and other
    programs look for. All ranks call it, as importing `odyssey.torch` does: they agree on a
    port.
    """
    is_set = os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")
    if not is_set and launcher.launched() is not None and getattr(base.here, "world", None) is None:
        _choose_port()


def _choose_port(timeout: Any = None, use: bool = True) -> None:
    """Waits for rank 0, which proposes a port of its machine, and has torch use it."""
    world = communication.world()
    with within(world, timeout):
        first, port = spread(world, [socket.gethostname(), launcher.free_port()])
    if use:
        os.environ["MASTER_ADDR"] = "127.0.0.1" if world.local_size == world.size else first
        os.environ["MASTER_PORT"] = str(port)
        _chosen_ports.add(str(port))


def _meet_apart(url: str, timeout: Any) -> None:
    """Has ranks of MPI that met at MASTER_PORT before meet at another port, or, where a user
    gave that one, not before rank 0 has left. It may still serve those of before: who met
    there would be waited for at its next store.
    """
    port = os.environ.get("MASTER_PORT", "")
    world = communication.met()
    size = dict(parse_qsl(urlparse(url).query)).get("world_size") or os.environ.get("WORLD_SIZE")
    if (
        port in _used_ports
        and _launched() is not None
        and world is not None
        and size == str(world.size)
    ):
        _choose_port(timeout, port in _chosen_ports)
    _used_ports.add(os.environ.get("MASTER_PORT", ""))


def _env(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Returns what env:// finds: as torch has it, but a process that nobody started as one of
    several is alone.
    """
    if (
        launcher.launched() is not None
        or "?" in url
        or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & os.environ.keys()
    ):
        _meet_apart(url, options.get("timeout"))
        yield from _torchs(url, **options)
        return
    print(
        "odyssey: [torch] a world of one: nobody started ranks; odyssey launch -n 4 script.py does",
        file=sys.stderr,
    )
    yield dist.HashStore(), 0, 1


# dist has its function
_handlers = getattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers", {})
_torchs = _handlers.get("env")
_handlers["env"] = _env if _torchs is not None else None
_SITE = os.path.dirname(os.path.dirname(torch.__file__))
calls.libraries += [  # a call is its user's, not theirs
    os.path.join(_SITE, name, "")
    for name in (
        "torch",
        "accelerate",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "transformers",
    )
] + [os.path.dirname(os.path.dirname(communication.__file__)) + "_c10d.py"]
set_environment()
if "odyssey" not in dist.Backend.backend_list:  # else `import torch` has: python/odyssey_c10d.py
    dist.Backend.register_backend("odyssey", create, extended_api=True, devices=["cpu", "cuda"])
