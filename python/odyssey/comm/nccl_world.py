"""Backend "nccl": a communicator of MPI whose collective calls move and add host arrays on the ranks' GPUs.

Ranks are started by an MPI launcher. Headers, barriers, messages with tags, and sums of 16-bit integers go over MPI,
the data of all other collective calls through pinned memory to the GPU and over NCCL. Gradients that are on GPUs
already do not come here: comm/device.py. What it is not: the interface of NCCL (nccl.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import launcher
from ..errors import CollectiveError, ConfigError, OdysseyError
from .base import Communicator
from .calls import Call
from .mpi import MPICommunicator
from .nccl import BYTE, OPS, TYPES, Link, Stage, Transfer, check_apart, cuda, library, spelled


class NcclCommunicator(MPICommunicator):
    """A communicator whose collective calls move and add host arrays on the ranks' GPUs. Sums: in the order of NCCL.

    Args:
        comm: an mpi4py communicator that nothing else uses.
        of: the communicator it is a part of; the world of backend "mpi" for the world of this one.
        number: this rank's GPU.
    """

    name = "nccl"

    def __init__(self, comm: Any, of: MPICommunicator, number: int) -> None:
        super().__init__(comm, of)
        self._is_world = not isinstance(of, NcclCommunicator)
        self.why = f"nccl: {self.size} ranks, NCCL {spelled(library().version)}"
        self._link: Link | None = None  # until it is there, calls go over MPI
        self._stage = Stage(number)
        self._link = Link(self)

    _repeated = Communicator._repeated  # NCCL has no such calls

    def _post(self, call: Call, blocking: bool) -> Any:
        kind, send, out, n = call.kind, call.send, call.out, self.size
        link = self._link
        if link is None or kind in ("barrier", "group") or (call.op is not None and send.dtype not in TYPES):
            return super()._post(call, blocking)
        try:
            if call.op is not None or kind in ("broadcast", "all_gather"):
                return self._library(link, call) if (send if send is not None else out).size else None
            give: list[tuple[int, np.ndarray]] = []
            take: list[tuple[int, np.ndarray]] = []
            if kind in ("scatter", "all_to_all", "all_to_all_v") and send is not None:
                give = self._cut(send, call.send_counts)
            if kind == "scatter":
                take = [(call.root, as_bytes(out))]
            elif kind in ("gather", "all_to_all", "all_to_all_v") and out is not None:
                take = self._cut(out, call.receive_counts)
            if kind == "gather":
                give = [(call.root, as_bytes(send))]
            if kind == "all_gather_v":
                pieces = [as_bytes(out[a:b]) for a, b in call.ranges]
                give = [(p, pieces[self.rank]) for p in range(n) if p != self.rank]
                take = [(p, piece) for p, piece in enumerate(pieces) if p != self.rank]
            own = [next((a for p, a in side if p == self.rank), None) for side in (give, take)]
            if own[0] is not None and own[1] is not None and own[0].size:
                own[1][:] = own[0]
            give, take = ([(p, a) for p, a in side if p != self.rank and a.size] for side in (give, take))
            if not give and not take:
                return None

            def messages(sent: list[int], received: list[int]) -> None:
                sends = [(p, at, a.nbytes) for (p, a), at in zip(give, sent, strict=True)]
                receives = [(p, at, a.nbytes) for (p, a), at in zip(take, received, strict=True)]
                link.exchange(sends, receives, self._stage.stream)

            return Transfer(self._stage, link, [a for _, a in give], [a for _, a in take], messages)
        except CollectiveError as error:
            self._broke(error)
            raise

    def _cut(self, array: np.ndarray, counts: Sequence[int]) -> list[tuple[int, np.ndarray]]:
        """The piece of each rank: so many elements, or a row."""
        data, item = as_bytes(array), array.itemsize
        sizes = [item * c for c in counts] if counts else [data.size // self.size] * self.size
        ends = np.cumsum([0, *sizes]).tolist()
        return [(p, data[a:b]) for p, (a, b) in enumerate(zip(ends, ends[1:], strict=False))]

    def _library(self, link: Link, call: Call) -> Transfer:
        """What NCCL has an operation for."""
        kind, send, out, stream = call.kind, call.send, call.out, self._stage.stream
        if kind == "broadcast":
            data = as_bytes(out)

            def spread(sent: list[int], received: list[int]) -> None:
                (at,) = sent or received
                link.call("Broadcast", at, at, data.size, BYTE, call.root, stream)

            root = self.rank == call.root
            return Transfer(self._stage, link, [data] if root else [], [] if root else [data], spread)
        give, take = [as_bytes(send)], [] if out is None else [as_bytes(out)]

        def combine(sent: list[int], received: list[int]) -> None:
            x, y = sent[0], received[0] if received else sent[0]
            if kind == "all_gather":
                link.call("AllGather", x, y, send.nbytes, BYTE, stream)
                return
            how = (TYPES[send.dtype], OPS[call.op])
            if kind == "all_reduce":
                link.call("AllReduce", x, y, send.size, *how, stream)
            elif kind == "reduce":
                link.call("Reduce", x, y, send.size, *how, call.root, stream)
            else:
                link.call("ReduceScatter", x, y, out.size, *how, stream)

        return Transfer(self._stage, link, give, take, combine)

    def _posted(self, request: Any) -> bool:
        if not isinstance(request, Transfer):
            return super()._posted(request)
        try:
            return request.done()
        except CollectiveError as error:
            self._broke(error)
            raise

    def _broke(self, error: BaseException) -> None:
        super()._broke(error)
        if self._link is not None:
            self._link.abort()

    def _sub(self, members: tuple[int, ...]) -> NcclCommunicator:
        group = self._data.Get_group()
        part = group.Incl(members)
        comm = self._data.Create_group(part)
        part.Free()
        group.Free()
        return NcclCommunicator(comm, self, self._stage.number)

    def close(self) -> None:
        if self._is_world or self not in self._exits.communicators:
            return
        assert self._link is not None
        self._link.close()
        self._stage.close()
        super().close()


def as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def connect() -> NcclCommunicator:
    """All processes that MPI knows, over the world of backend "mpi"; called once per process.

    Raises:
        ConfigError: one process alone, no NCCL, different ones, or two ranks with the same GPU. DeviceError: no GPU.
    """
    from . import world

    found = launcher.launched()
    if found is None or found.size == 1:
        raise ConfigError(
            "[comm] backend nccl connects several ranks, and this one is alone; use backend local (or auto)"
        )
    mpi: Any = world("mpi")
    try:
        version, count, problem = library().version, cuda().count(), None
    except OdysseyError as error:
        version, count, problem = 0, 0, error
    versions = mpi.all_gather(np.array([version])).reshape(-1).tolist()
    if problem is not None:
        problem.everywhere = not any(versions)  # type: ignore[attr-defined]
        raise problem
    if not all(versions):
        raise ConfigError(f"[comm] backend nccl: rank {versions.index(0)} cannot use it; see what it says")
    for rank, other in enumerate(versions):
        if other != versions[0]:
            raise ConfigError(
                f"[comm] backend nccl: rank {rank} has NCCL {spelled(other)}, rank 0 {spelled(versions[0])}; "
                "install the same on all machines"
            )
    number = mpi.local_rank % count
    check_apart(mpi, number)
    return NcclCommunicator(mpi._data.Dup(), mpi, number)
