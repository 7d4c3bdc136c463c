"""Bytes between the GPUs of ranks of one machine by CUDA IPC: each rank reads the memory of the
others, without NCCL.

A rank has an area of device memory that all other ranks map. It copies what it sends into its area,
and the receivers copy it from there. Numbers in shared memory of the host keep the order: streams
write them and wait for them, so the host doesn't wait. No kernel spins. So several ranks may share
a GPU.

    ready[p]      the number of exchanges for which rank p has filled its area
    read[p, q]    the number of exchanges for which rank q has read what rank p sent
    ended_by      0, or 1 + the rank that has ended the exchange after an error

A rank that has ended leaves streams of others waiting. The hosts notice that, and write numbers
that let these streams continue.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..base.hooks import process_space
from ..core.cuda import driver
from ..errors import CollectiveError, DeviceError
from .base import Communicator
from .device import DeviceTransport, Message
from .shared_memory import PAGE, process_ended, round_up, share_nameless_files

ALIGN = 256  # bytes between the messages in an area
LOOK_S = 0.05  # between two checks whether a rank has ended
PROBE_BYTES = (64, 1 << 20)
PROBE_S = 20.0  # after which a probe has failed
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_LAZY = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_WITHOUT_TIMES = 2  # CU_EVENT_DISABLE_TIMING
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_PAST_ALL = 1 << 30  # exchanges; the comparison of numbers is cyclic


class _Handle(ctypes.Structure):
    """A CUipcMemHandle, passed by value."""

    _fields_ = [("bytes", ctypes.c_uint8 * 64)]


class Route(NamedTuple):
    """The places of the messages of an exchange, from `PeerTransport.route`.

    sent_at: the offset of each message that this rank sends, in its area.
    received_at: for each rank, the offsets of its messages to this one, in its area.
    """

    sent_at: list[int]
    received_at: list[list[int]]


class PeerTransport(DeviceTransport):
    """Messages between GPUs of ranks of one machine, which may be one GPU.

    A collective call. It sends a pattern around, so a transport that exists works.

    Args:
        comm: the ranks, processes of one machine.
        stream: returns the CUstream for copies, and makes its device the current one.

    Raises:
        DeviceError: ranks can't read each other's memory. All ranks raise it.
    """

    def __init__(self, comm: Communicator, stream: Callable[[], int]) -> None:
        self._comm = comm
        self._stream = stream
        if comm.in_threads:
            raise DeviceError("[gpu] ranks are threads of one process")
        if comm.local_size != comm.size:
            raise DeviceError("[gpu] ranks are on several machines")
        self._count = 0  # of exchanges
        self._next_look = 0.0
        processes = np.array([os.getpid(), process_space()], np.int64)
        self._processes: list[list[int]] = comm.all_gather(processes).tolist()
        self._share_numbers()
        self._area_bytes = [0] * comm.size
        self._areas = [0] * comm.size  # addresses in this process
        self._event = self._together(self._make_event)
        self._probe()

    def _together(self, step: Callable[[], Any]) -> Any:
        """Returns the result of a step that all ranks take; a collective call.

        Raises DeviceError: the step failed on a rank. All ranks raise it.
        """
        problem = ""
        result = None
        try:
            result = step()
        except DeviceError as error:
            problem = " ".join(str(error).split())
        rows = self._comm.all_gather_each(np.frombuffer(problem.encode()[:500], np.uint8))
        for rank, row in zip(self._comm.ranks, rows, strict=True):
            if row.size:
                text = row.tobytes().decode(errors="ignore").removeprefix("[gpu] ")
                raise DeviceError(f"[gpu] rank {rank}: {text}")
        return result

    # --- memory ---

    def _share_numbers(self) -> None:
        """Creates the numbers that keep the order, in memory of all ranks and their GPUs."""
        n = self._comm.size
        size = round_up(4 * (n + n * n + 1), PAGE)
        files = share_nameless_files(self._comm, np.array(self._processes), size)
        if files is None:
            raise DeviceError("[gpu] ranks can't open memory of each other in /proc")
        self._file = files[0]
        self.numbers = self._file.view(np.uint32)
        self._ended_by = n + n * n
        start = self._file.ctypes.data

        def register() -> int:
            self._stream()
            call = driver().call
            call("cuMemHostRegister_v2", start, size, _PORTABLE)
            return driver().get(ctypes.c_uint64, "cuMemHostGetDevicePointer_v2", start, 0)

        first = self._together(register)
        self._ready = [first + 4 * p for p in range(n)]
        read = [first + 4 * (n + place) for place in range(n * n)]
        self._read = [read[p * n : (p + 1) * n] for p in range(n)]

    def _make_event(self) -> int:
        self._stream()
        return driver().get(ctypes.c_void_p, "cuEventCreate", _WITHOUT_TIMES)

    def _enlarge_areas(self, sizes: Sequence[int]) -> None:
        """Makes areas of at least so many bytes on each rank; a collective call.

        No exchange is under way. An area is freed after all ranks have closed it.
        """
        me = self._comm.rank
        self._together(self._close_areas)
        self._area_bytes = [max(a, b) for a, b in zip(self._area_bytes, sizes, strict=True)]

        def allocate() -> np.ndarray:
            self._stream()
            if self._areas[me]:
                driver().call("cuMemFree_v2", self._areas[me])
                self._areas[me] = 0
            size = max(self._area_bytes[me], ALIGN)
            self._areas[me] = driver().get(ctypes.c_uint64, "cuMemAlloc_v2", size)
            handle = _Handle()
            driver().call("cuIpcGetMemHandle", ctypes.byref(handle), self._areas[me])
            return np.frombuffer(handle, np.uint8).copy()

        handles = self._comm.all_gather(self._together(allocate))

        def open_others() -> None:
            self._stream()
            for p, handle in enumerate(handles):
                if p != me:
                    by_value = _Handle.from_buffer_copy(handle.tobytes())
                    lazy = ctypes.c_uint(_LAZY)
                    get = driver().get
                    self._areas[p] = get(ctypes.c_uint64, "cuIpcOpenMemHandle_v2", by_value, lazy)

        self._together(open_others)

    def _close_areas(self) -> None:
        """Closes the areas of the other ranks."""
        stream = self._stream()
        driver().call("cuStreamSynchronize", stream)
        for p, address in enumerate(self._areas):
            if p != self._comm.rank and address:
                driver().call("cuIpcCloseMemHandle", address)
                self._areas[p] = 0

    def route(self, sends: Sequence[tuple[int, int]]) -> Route:
        """Returns the places of messages, for `exchange`; a collective call.

        sends: (rank, bytes) of each message that this rank sends.
        """
        places = []
        offset = 0
        for rank, size in sends:
            places.append((rank, offset))
            offset += round_up(size, ALIGN)
        sizes = self._comm.all_gather(np.array([offset], np.int64)).reshape(-1).tolist()
        if any(size > area for size, area in zip(sizes, self._area_bytes, strict=True)):
            self._enlarge_areas(sizes)
        table = np.array(places, np.int64).reshape(-1)
        received_at = []
        for row in self._comm.all_gather_each(table):
            pairs = row.reshape(-1, 2).tolist()
            received_at.append([place for rank, place in pairs if rank == self._comm.rank])
        return Route([place for _, place in places], received_at)

    # --- exchanges ---

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], route: Route | None = None
    ) -> None:
        """Adds the copies of an exchange to the stream; all ranks call it alike.

        route: of these messages.
        """
        assert route is not None
        rank = self._comm.rank
        stream = self._stream()
        self._count += 1
        for (_, address, size), place in zip(sends, route.sent_at, strict=True):
            self._copy(self._areas[rank] + place, address, size, stream)
        self._write(self._ready[rank], stream)
        sources = sorted({p for p, _, _ in receives})
        for p in sources:
            self._wait(self._ready[p], stream)
        places = {p: iter(route.received_at[p]) for p in sources}
        for p, address, size in receives:
            self._copy(address, self._areas[p] + next(places[p]), size, stream)
        for p in sources:
            self._write(self._read[p][rank], stream)
        # the next exchange overwrites the area
        for q in sorted({q for q, _, _ in sends}):
            self._wait(self._read[rank][q], stream)

    def _copy(self, target: int, source: int, size: int, stream: int) -> None:
        driver().call("cuMemcpyDtoDAsync_v2", target, source, size, stream)

    def _write(self, address: int, stream: int) -> None:
        driver().call("cuStreamWriteValue32_v2", stream, address, self._count, 0)

    def _wait(self, address: int, stream: int) -> None:
        driver().call("cuStreamWaitValue32_v2", stream, address, self._count, _AT_LEAST)

    def mark(self) -> None:
        driver().call("cuEventRecord", self._event, self._stream())

    def is_complete(self) -> bool:
        self._stream()
        is_over = driver().ready(self._event)
        ended_by = int(self.numbers[self._ended_by])
        if ended_by:
            rank = self._comm.ranks[ended_by - 1]
            raise CollectiveError(
                f"[comm] rank {rank} has ended the exchange between GPUs; its message says why"
            )
        if not is_over and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._check_processes()
        return is_over

    def _check_processes(self) -> None:
        """Raises CollectiveError: a rank has ended, for which streams would wait forever."""
        for p, process in enumerate(self._processes):
            if p != self._comm.rank and process_ended(*process):
                raise CollectiveError(
                    f"[comm] rank {self._comm.ranks[p]} has ended; the exchange between GPUs waits "
                    "for it"
                )

    def abort(self) -> None:
        if not self.numbers[self._ended_by]:
            self.numbers[self._ended_by] = 1 + self._comm.rank
        self.numbers[: self._ended_by] = (self._count + _PAST_ALL) & 0xFFFFFFFF

    # --- probe ---

    def _probe(self) -> None:
        """Sends patterns from each rank to the next.

        Raises DeviceError: one did not arrive. All ranks raise it.
        """
        n = self._comm.size
        me = self._comm.rank
        for size in PROBE_BYTES:
            route = self.route([((me + 1) % n, size)])
            self._together(lambda size=size, route=route: self._send_pattern(size, route))

    def _send_pattern(self, size: int, route: Route) -> None:
        n = self._comm.size
        me = self._comm.rank
        call = driver().call
        self._stream()
        sent = driver().get(ctypes.c_uint64, "cuMemAlloc_v2", size)
        received = driver().get(ctypes.c_uint64, "cuMemAlloc_v2", size)
        pattern = _pattern(me, size)
        result = np.zeros(size, np.uint8)
        call("cuMemcpyHtoD_v2", sent, pattern.ctypes.data, size)
        self.exchange([((me + 1) % n, sent, size)], [((me - 1) % n, received, size)], route)
        self.mark()
        until = time.monotonic() + PROBE_S
        try:
            while not self.is_complete():
                if time.monotonic() > until:
                    raise CollectiveError("a pattern did not arrive")
                time.sleep(1e-4)
        except CollectiveError as error:
            self.abort()
            raise DeviceError(f"[gpu] {error}") from None
        call("cuMemcpyDtoH_v2", result.ctypes.data, received, size)
        for address in (sent, received):
            call("cuMemFree_v2", address)
        wrong = int((result != _pattern((me - 1) % n, size)).sum())
        if wrong:
            raise DeviceError(f"[gpu] {wrong} of {size} bytes of a pattern are wrong")


def _pattern(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng(rank + 1).integers(0, 256, size, np.uint8)
