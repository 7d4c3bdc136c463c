"""A DeviceTransport over CUDA IPC: ranks of one machine read each other's GPU memory, without NCCL.

A prototype.

test_gpu_transport.py runs it on an emulated GPU, which several ranks may share. Each rank maps the
allocations of the others once and copies from them what it receives. Numbers in a page of shared
host memory keep the order: queues write them and wait for them (cuStreamWriteValue32,
cuStreamWaitValue32). No kernel spins, so ranks may share a GPU, and the host can read how far each
rank is.

    ready[p]      how many exchanges rank p has put its sends into memory for
    read[p, q]    of how many exchanges rank q has read what rank p sent

Before a model can use this, `done` must notice a rank that has ended, and areas that are freed and
allocated again at the same address must get a new handle.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Sequence

import numpy as np

from odyssey.comm.base import Communicator
from odyssey.comm.device import DeviceTransport, Message
from odyssey.core.cuda import driver
from odyssey.core.gpu_native import Gpu

AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
LAZY = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

#: A row per message that a rank sends: the receiver, and where the bytes are in an allocation.
SEND = np.dtype([("to", np.int64), ("offset", np.int64), ("handle", np.uint8, 64)])


class _Handle(ctypes.Structure):
    """A CUipcMemHandle, passed by value."""

    _fields_ = [("bytes", ctypes.c_uint8 * 64)]


class PeerTransport(DeviceTransport):
    """Messages between GPUs of ranks of one machine, which may be one GPU.

    All ranks make it at the same time.
    """

    def __init__(self, comm: Communicator, gpu: Gpu) -> None:
        self._comm = comm
        self._gpu = gpu
        self._driver = driver()
        self._stream = gpu.stream()
        self._count = 0  # of exchanges
        # handle -> where the allocation is mapped in this process
        self._mapped: dict[bytes, int] = {}
        # sends and receives -> the addresses to read from, in the order of the messages of each
        # rank
        self._known: dict[tuple[tuple[Message, ...], tuple[Message, ...]], list[list[int]]] = {}
        n = comm.size
        assert 4 * (n + n * n) <= mmap.PAGESIZE
        self._page = self._shared_page()
        self.numbers = np.frombuffer(self._page, np.uint32)  # ready, then read
        at = self.numbers.ctypes.data
        self._driver.call("cuMemHostRegister_v2", at, mmap.PAGESIZE, 0)
        first = self._driver.get(ctypes.c_uint64, "cuMemHostGetDevicePointer_v2", at, 0)
        self._ready = [first + 4 * p for p in range(n)]
        self._read = [[first + 4 * (n + p * n + q) for q in range(n)] for p in range(n)]

    def _shared_page(self) -> mmap.mmap:
        """A page of host memory that all ranks have; its file has no name once all have opened
        it.
        """
        name = np.frombuffer(secrets.token_bytes(8), np.uint8).copy()
        self._comm.broadcast(name, 0)
        path = f"/dev/shm/odyssey-peers-{name.tobytes().hex()}"
        if self._comm.rank == 0:
            with open(path, "xb") as file:
                file.truncate(mmap.PAGESIZE)
        self._comm.barrier()
        with open(path, "r+b") as file:
            page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._comm.barrier()
        if self._comm.rank == 0:
            os.unlink(path)
        return page

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        rank = self._comm.rank
        remote = self._addresses(sends, receives)
        self._gpu.stream()  # makes the device the current one
        self._count += 1
        self._write(self._ready[rank])
        sources = sorted({p for p, _, _ in receives})
        for p in sources:
            self._wait(self._ready[p])
        addresses = {p: iter(remote[p]) for p in sources}
        for p, address, size in receives:
            self._driver.call(
                "cuMemcpyDtoDAsync_v2", address, next(addresses[p]), size, self._stream
            )
        for p in sources:
            self._write(self._read[p][rank])
        # what is enqueued next may overwrite what was sent
        for q in sorted({q for q, _, _ in sends}):
            self._wait(self._read[rank][q])

    def _write(self, at: int) -> None:
        self._driver.call("cuStreamWriteValue32_v2", self._stream, at, self._count, 0)

    def _wait(self, at: int) -> None:
        self._driver.call("cuStreamWaitValue32_v2", self._stream, at, self._count, AT_LEAST)

    def _addresses(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[list[int]]:
        """The addresses of what each rank sends to this one, in order.

        Messages that are new are a collective call, so all ranks must have new ones at the same
        time.
        """
        key = (tuple(sends), tuple(receives))
        if key in self._known:
            return self._known[key]
        table = np.zeros(len(sends), SEND)
        for row, (q, address, _) in zip(table, sends, strict=True):
            base = ctypes.c_uint64()
            size = ctypes.c_size_t()
            self._driver.call(
                "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address
            )
            handle = _Handle()
            self._driver.call("cuIpcGetMemHandle", ctypes.byref(handle), base.value)
            row["to"] = q
            row["offset"] = address - base.value
            row["handle"] = np.frombuffer(handle, np.uint8)
        addresses: list[list[int]] = []
        for p, sent in enumerate(self._comm.all_gather_each(table.view(np.uint8).reshape(-1))):
            rows = sent.view(SEND) if p != self._comm.rank else table[:0]
            to_me = rows[rows["to"] == self._comm.rank]
            addresses.append(
                [self._map(row["handle"].tobytes()) + int(row["offset"]) for row in to_me]
            )
        self._known[key] = addresses
        return addresses

    def _map(self, handle: bytes) -> int:
        if handle not in self._mapped:
            out = ctypes.c_uint64()
            there = _Handle.from_buffer_copy(handle)
            self._driver.call(
                "cuIpcOpenMemHandle_v2", ctypes.byref(out), there, ctypes.c_uint(LAZY)
            )
            self._mapped[handle] = out.value
        return self._mapped[handle]
