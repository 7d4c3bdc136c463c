"""Bytes from the memory of one rank's GPU to another's, without the host: who can, and whether
it really works.

    NcclTransport (nccl.py)   backend "nccl": messages of NCCL in the GPU's queue; nothing waits
    MpiTransport              ODYSSEY_GPU_MPI=1: an MPI that reads and writes device memory; the
                              host waits for it

`connect` picks one for a communicator. What MPI claims is not believed: a pattern goes around all
ranks first, and unless every bit arrives on every rank, sums go through the host.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import slot
from ..errors import CollectiveError, ConfigError, DeviceError
from .base import Communicator
from .requests import Waiting

if TYPE_CHECKING:
    from ..core.gpu_native import Gpu

Message = tuple[int, int, int]  # rank of the group, address in device memory, bytes

GPU_MPI = "ODYSSEY_GPU_MPI"
PROBE = (64, 1 << 20)  # bytes: libraries send short and long messages in different ways


class DeviceTransport:
    """Messages between the GPUs of the ranks of a communicator, one GPU per rank.

    All ranks call `exchange` alike. Messages between two ranks are matched in the order given.
    """

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Sends and receives behind what is in the COMPUTE queue of the GPU, before what is put
        there afterwards. Raises CollectiveError: a rank is gone, or the library refuses.
        """
        raise NotImplementedError

    def mark(self) -> None:
        """Remembers what has been exchanged until now."""

    def is_complete(self) -> bool:
        """Returns whether all of that is complete. Raises CollectiveError if it never will be."""
        return True

    def abort(self) -> None:
        """Lets what is in the queue end, with wrong numbers; nothing can be exchanged
        afterwards.
        """


class MpiTransport(DeviceTransport):
    """Over an MPI library that takes device memory (backend "mpi" or "shm").

    The host waits for GPU and messages.
    """

    def __init__(self, comm: Communicator, gpu: Gpu) -> None:
        self._gpu = gpu
        self._mpi: Any = getattr(comm, "_over", comm)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._gpu.synchronize()
        self._mpi.exchange_memory(sends, receives).wait()


class Exchanged(Waiting):
    """Exchange of a step between GPUs over `links`, as an operation of a communicator: counted,
    with a deadline.
    """

    __slots__ = ("_links", "_sequence")

    def __init__(self, comm: Communicator, links: Sequence[DeviceTransport], text: str) -> None:
        super().__init__(comm, text)
        if comm._broken is not None:
            raise comm._broken
        self._links = links
        # one of the calls of its group, so a watcher sees who has not come so far
        self._sequence = comm._sequence
        comm._sequence += 1
        slot.note_call(self._sequence, text, comm._mark)

    def mark(self) -> None:
        """All of it is enqueued."""
        for link in self._links:
            link.mark()

    def test(self) -> bool:
        if not self._complete:
            try:
                self._complete = all([link.is_complete() for link in self._links])
            except CollectiveError as error:
                self.broke(error)
        return self._complete

    def broke(self, error: CollectiveError) -> None:
        """It cannot be completed: the ranks are no longer in step."""
        self._fail(error)
        self._comm._mark_broken(error)

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        for link in self._links:  # or the queue would never become empty
            link.abort()

    def _get_call_number(self) -> int:
        return self._sequence

    def _find_late(self) -> list[int]:
        return [p for p in range(self._comm.size) if p != self._comm.rank]


def is_requested(comm: Communicator) -> bool:
    """Returns whether somebody asked for transfers between GPUs; a group of one needs none.

    Raises ConfigError: ODYSSEY_GPU_MPI has a value that is not allowed.
    """
    return comm.size > 1 and (comm.name == "nccl" or gpu_mpi())


def gpu_mpi() -> bool:
    """Returns what ODYSSEY_GPU_MPI says: 1 to try an MPI that takes device memory; else no."""
    text = os.environ.get(GPU_MPI, "auto")
    if text not in ("", "0", "1", "auto"):
        raise ConfigError(
            f"[comm] {GPU_MPI}={text}; it must be 1 (use it if a probe succeeds), 0 or auto (do "
            "not)"
        )
    return text == "1"


def connect(comm: Communicator, gpus: Sequence[Gpu]) -> tuple[list[DeviceTransport], str]:
    """A transport per GPU of this process to those of the same number in the other ranks, and
    why; a collective call. No transport, and a line that says why, if sums go through the
    host. Raises ConfigError, DeviceError: NCCL's.
    """
    if comm.name == "nccl":
        from .nccl import NcclTransport

        return [NcclTransport(comm, gpu) for gpu in gpus], ""
    if not hasattr(getattr(comm, "_over", comm), "exchange_memory"):
        return (
            [],
            f"{GPU_MPI}=1 has no effect with backend {comm.name}: gradients go through the host",
        )
    links: list[DeviceTransport] = [MpiTransport(comm, gpu) for gpu in gpus]
    wrong = probe(comm, links, gpus)
    if wrong:
        return [], f"{GPU_MPI}=1, but {wrong}: gradients go through the host"
    return links, ""


def probe(comm: Communicator, links: Sequence[DeviceTransport], gpus: Sequence[Gpu]) -> str:
    """Sends patterns from each GPU to that of the next rank; "" if every bit came on all ranks,
    else what did not. A library that takes device memory for the host's ends the process
    instead; this rank's status then says at what.
    """
    failed = ""
    slot.note("probe of MPI with device memory")
    next_rank = (comm.rank + 1) % comm.size
    previous_rank = (comm.rank - 1) % comm.size
    for link, gpu in zip(links, gpus, strict=True):
        for size in PROBE:
            failed = failed or _probe(link, gpu, size, comm.rank, previous_rank, next_rank)
            failures = comm.all_gather(np.array([bool(failed)]).view(np.uint8)).reshape(-1)
            if failures.any():
                rank = comm.ranks[int(failures.argmax())]
                return f"the probe failed on rank {rank}" + (f" ({failed})" if failed else "")
    return ""


def _probe(
    link: DeviceTransport, gpu: Gpu, size: int, rank: int, previous_rank: int, next_rank: int
) -> str:
    def pattern(rank: int) -> np.ndarray:
        return np.random.default_rng(rank + 1).integers(0, 256, size, np.uint8)

    buffers = [gpu.allocate(size) for _ in range(2)]
    sent = pattern(rank)
    received = np.zeros(size, np.uint8)
    try:
        gpu.upload(buffers[0], sent)
        gpu.clear(buffers[1], size)
        link.exchange([(next_rank, buffers[0], size)], [(previous_rank, buffers[1], size)])
        gpu.download(received, buffers[1])
        gpu.synchronize()
    # mpi4py's errors are RuntimeErrors
    except (CollectiveError, DeviceError, RuntimeError) as error:
        return " ".join(str(error).split())
    finally:
        for buffer in buffers:
            gpu.free(buffer)
    wrong = int((received != pattern(previous_rank)).sum())
    return f"{wrong} of {size} bytes are wrong" if wrong else ""
