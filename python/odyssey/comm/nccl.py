"""NVIDIA's NCCL, loaded when it is asked for: ranks that it connects, and what they move between their GPUs.

NCCL is found at run time: the file that ODYSSEY_NCCL_LIBRARY names, the wheel nvidia-nccl-cu12 or -cu13, or the one of
the system. The only file that knows the interfaces of NCCL and, as far as streams and events for another library
need it, of CUDA's driver. What it is not: the communicator of backend "nccl" (nccl_world.py).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CollectiveError, ConfigError, DeviceError, OdysseyError
from ..watch import slot
from .base import Communicator
from .calls import ReduceOp
from .device import DeviceTransport, Message

if TYPE_CHECKING:
    from ..gpu.native import Gpu

LIBRARY = "ODYSSEY_NCCL_LIBRARY"
OLDEST = 21300  # 2.13: the first that says in words what went wrong (ncclGetLastError)
LOOK_S = 0.05  # between two questions whether something went wrong elsewhere

BYTE = 1
TYPES = {
    np.dtype(name): code
    for name, code in {
        "int8": 0,
        "uint8": BYTE,
        "int32": 2,
        "uint32": 3,
        "int64": 4,
        "uint64": 5,
        "float32": 7,
        "float64": 8,
    }.items()
}
OPS = {ReduceOp.SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
_REMOTE = 6  # ncclRemoteError
_NOT_READY = 600  # CUDA: what an event waits for is not done


class _Id(ctypes.Structure):
    """A ncclUniqueId, passed by value."""

    _fields_ = [("bytes", ctypes.c_uint8 * 128)]


# --- the libraries ---------------------------------------------------------------------------------------------------


class Nccl:
    """The loaded library. A function that fails raises with NCCL's words."""

    def __init__(self, path: str) -> None:
        lib = self._lib = ctypes.CDLL(path)
        lib.ncclGetErrorString.restype = lib.ncclGetLastError.restype = ctypes.c_char_p
        lib.ncclGetLastError.argtypes = [ctypes.c_void_p]
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for name, arguments in {
            "GetVersion": [pointer],
            "GetUniqueId": [pointer],
            "CommInitRank": [pointer, number, _Id, number],
            "CommDestroy": [pointer],
            "CommAbort": [pointer],
            "CommGetAsyncError": [pointer, pointer],
            "GroupStart": [],
            "GroupEnd": [],
            "Send": [pointer, size, number, number, pointer, pointer],
            "Recv": [pointer, size, number, number, pointer, pointer],
            "Broadcast": [pointer, pointer, size, number, number, pointer, pointer],
            "AllGather": [pointer, pointer, size, number, pointer, pointer],
            "AllReduce": [pointer, pointer, size, number, number, pointer, pointer],
            "ReduceScatter": [pointer, pointer, size, number, number, pointer, pointer],
            "Reduce": [pointer, pointer, size, number, number, number, pointer, pointer],
        }.items():
            function = getattr(lib, f"nccl{name}")
            function.argtypes, function.restype = arguments, number
        version = ctypes.c_int()
        self.call("GetVersion", ctypes.addressof(version))
        self.version = version.value

    def call(self, name: str, *args: Any, error: type[OdysseyError] = CollectiveError) -> None:
        """Calls nccl`name`."""
        result = getattr(self._lib, f"nccl{name}")(*args)
        if result:
            raise self.error(result, f"nccl{name}", error)

    def error(self, result: int, what: str = "", kind: type[OdysseyError] = CollectiveError) -> OdysseyError:
        """The error of a result."""
        if result == _REMOTE or not what:
            return CollectiveError(f"[comm] a rank has ended, or cannot be reached: NCCL says {self.words(result)}")
        return kind(f"[comm] {what}: {self.words(result)}")

    def words(self, result: int) -> str:
        """What NCCL says about a result, in one line."""
        said = [self._lib.ncclGetErrorString(result), self._lib.ncclGetLastError(None)]
        return " ".join("; ".join(text.decode(errors="replace") for text in said if text).split())


@functools.cache
def library() -> Nccl:
    """NCCL. Raises ConfigError if there is none that can be used."""
    tried = []
    for path in _candidates():
        try:
            found = Nccl(path)
        except (OSError, AttributeError) as error:
            tried.append(" ".join(str(error).split()))
            continue
        if found.version < OLDEST:
            raise ConfigError(
                f"[comm] backend nccl: {path} is NCCL {spelled(found.version)}, and {spelled(OLDEST)} is the oldest "
                "that will do; pip install -U nvidia-nccl-cu12, or use backend mpi"
            )
        return found
    raise ConfigError(
        f"[comm] backend nccl finds no NCCL ({'; '.join(tried)}); pip install nvidia-nccl-cu12 (or -cu13), set "
        f"{LIBRARY}=FILE, or use backend mpi"
    )


def _candidates() -> list[str]:
    named = os.environ.get(LIBRARY)
    if named:
        return [named]
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    files = [f / part / "lib" / "libnccl.so.2" for f in folders for part in ("nccl", "cu13")]
    return [*(str(f) for f in files if f.exists()), "libnccl.so.2"]


def spelled(version: int) -> str:
    """NCCL's number of a version as people write it: 22105 is 2.21.5."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class Cuda:
    """Of CUDA's driver what is needed to work in a stream without the kernel library."""

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceError("[comm] backend nccl: no GPU driver on this machine; use backend mpi") from error
        self._lib.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.c_void_p]
        if self._lib.cuInit(0) or self.count() < 1:
            raise DeviceError("[comm] backend nccl: no GPU on this machine that can be used; use backend mpi")

    def count(self) -> int:
        """GPUs that this process sees."""
        return self.get(ctypes.c_int, "cuDeviceGetCount")

    def call(self, name: str, *args: Any) -> None:
        """Calls a function; integers are addresses or sizes, 8 bytes."""
        self._check(name, getattr(self._lib, name)(*[ctypes.c_uint64(a) if isinstance(a, int) else a for a in args]))

    def _check(self, name: str, result: int) -> None:
        if result:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(result, ctypes.byref(text))
            raise DeviceError(f"[comm] {name}: {(text.value or b'?').decode(errors='replace')} ({result})")

    def get(self, kind: Any, name: str, *args: Any) -> int:
        """What a function writes through its first argument."""
        out = kind()
        self.call(name, ctypes.byref(out), *args)
        return out.value or 0

    def ready(self, event: int) -> bool:
        """Whether an event has happened."""
        result = self._lib.cuEventQuery(ctypes.c_uint64(event))
        if result not in (0, _NOT_READY):
            self._check("cuEventQuery", result)
        return result == 0

    def event(self) -> int:
        """A new event on the current device."""
        return self.get(ctypes.c_void_p, "cuEventCreate", 2)  # without times


@functools.cache
def cuda() -> Cuda:
    """The driver. Raises DeviceError if there is none, or no GPU."""
    return Cuda()


# --- ranks that are connected ----------------------------------------------------------------------------------------


class Link:
    """The ranks of a communicator, each with the thread's current device. Made by all of them at the same time.

    Args:
        comm: over which rank 0 tells the others NCCL's id.
    """

    def __init__(self, comm: Communicator) -> None:
        self._lib = lib = library()
        self._handle: int | None = None
        unique, handle = _Id(), ctypes.c_void_p()
        memory = np.frombuffer(unique, np.uint8)
        if comm.rank == 0:
            lib.call("GetUniqueId", ctypes.addressof(unique), error=DeviceError)
        comm.broadcast(memory, 0)
        slot.enter(comm._sequence, f"connecting ranks {slot.ranges(comm.ranks)} by NCCL", comm._mark)
        try:
            lib.call("CommInitRank", ctypes.addressof(handle), comm.size, unique, comm.rank, error=DeviceError)
        finally:
            slot.leave()
        self._handle = handle.value
        self._looked = 0.0
        self._end = weakref.finalize(self, _destroy, lib, handle.value)

    def call(self, name: str, *args: Any) -> None:
        """Calls nccl`name` with this communicator; the stream is the last argument."""
        if self._handle is None:
            raise CollectiveError(f"[comm] nccl{name} after an error of NCCL; the ranks are not connected any more")
        self._lib.call(name, *args[:-1], self._handle, args[-1])

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> None:
        """Messages, all at once."""
        if not sends and not receives:
            return
        self._lib.call("GroupStart")
        try:
            for peer, address, size in receives:
                self.call("Recv", address, size, BYTE, peer, stream)
            for peer, address, size in sends:
                self.call("Send", address, size, BYTE, peer, stream)
        finally:
            self._lib.call("GroupEnd")

    def check(self) -> None:
        """Raises CollectiveError if NCCL knows that what was started cannot end; asks it now and then."""
        now = time.monotonic()
        if self._handle is None or now < self._looked + LOOK_S:
            return
        self._looked = now
        result = ctypes.c_int()
        self._lib.call("CommGetAsyncError", self._handle, ctypes.addressof(result))
        if result.value:
            raise self._lib.error(result.value)

    def abort(self) -> None:
        """Ends what is under way; nobody need take part."""
        if self._end.detach() is not None:
            handle, self._handle = self._handle, None
            self._lib._lib.ncclCommAbort(handle)  # whatever it says: there is nothing left to do

    def close(self) -> None:
        """Gives it back when all is done."""
        self._end()
        self._handle = None


def _destroy(lib: Nccl, handle: int) -> None:
    lib._lib.ncclCommDestroy(handle)


class NcclTransport(DeviceTransport):
    """Messages between GPUs that training uses, in their COMPUTE queues.

    Args:
        gpu: of this rank; no two ranks may have the same.

    Raises:
        ConfigError: two ranks have the same GPU. DeviceError: NCCL cannot connect them.
    """

    name = "nccl"

    def __init__(self, comm: Communicator, gpu: Gpu) -> None:
        check_apart(comm, gpu.number)
        self._gpu, self._cuda = gpu, cuda()
        self._stream = gpu.stream()
        self._link = Link(comm)
        self._event = self._cuda.event()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._gpu.stream()  # makes the device the current one
        self._link.exchange(sends, receives, self._stream)

    def mark(self) -> None:
        self._cuda.call("cuEventRecord", self._event, self._stream)

    def done(self) -> bool:
        if self._cuda.ready(self._event):
            return True
        self._link.check()
        return False

    def abort(self) -> None:
        self._link.abort()


def check_apart(comm: Communicator, number: int) -> None:
    """Raises ConfigError, on all ranks, if two of them use the same GPU, which NCCL refuses; a collective call."""
    node = os.uname().nodename
    try:
        node += Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        pass
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    mine = np.array([zlib.crc32(node.encode()), zlib.crc32(visible.encode()), number], np.int64)
    seen: dict[tuple[int, ...], int] = {}
    for p, place in enumerate(comm.all_gather(mine).tolist()):
        other = seen.setdefault(tuple(place), p)
        if other != p:
            error = ConfigError(
                f"[comm] backend nccl: ranks {comm.ranks[other]} and {comm.ranks[p]} share GPU {place[2]} of one "
                "machine, which NCCL does not allow; start at most one rank per GPU, or use backend mpi"
            )
            error.everywhere = True  # type: ignore[attr-defined]
            raise error


# --- host arrays that go through a GPU -------------------------------------------------------------------------------


class Block:
    """Device memory, and as much pinned host memory."""

    def __init__(self, driver: Cuda, size: int) -> None:
        self.size = size
        self.device = driver.get(ctypes.c_uint64, "cuMemAlloc_v2", size)
        self.pinned = driver.get(ctypes.c_void_p, "cuMemAllocHost_v2", size)
        self.host = np.frombuffer((ctypes.c_uint8 * size).from_address(self.pinned), np.uint8)
        self.event = driver.event()


class Stage:
    """The GPU of a communicator of host arrays: a stream of its own, and blocks that are used again and again.

    A stream of its own, because ranks may post calls of different groups in different orders: in one stream they would
    wait for each other.
    """

    def __init__(self, number: int) -> None:
        self.cuda = driver = cuda()
        self.number = number
        device = driver.get(ctypes.c_int, "cuDeviceGet", number)
        self._context = driver.get(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", device)
        self.use()
        self.stream = driver.get(ctypes.c_void_p, "cuStreamCreate", 1)  # does not wait for the default stream
        self._free: dict[int, list[Block]] = {}

    def use(self) -> None:
        """Makes the device the thread's current one."""
        self.cuda.call("cuCtxSetCurrent", self._context)

    def take(self, size: int) -> Block:
        """A block of at least so many bytes."""
        size = max(4096, 1 << (size - 1).bit_length())
        free = self._free.get(size)
        return free.pop() if free else Block(self.cuda, size)

    def give(self, block: Block) -> None:
        """Nothing uses it any more."""
        self._free.setdefault(block.size, []).append(block)

    def close(self) -> None:
        """Frees all blocks that were given back."""
        self.use()
        for block in (b for blocks in self._free.values() for b in blocks):
            self.cuda.call("cuMemFree_v2", block.device)
            self.cuda.call("cuMemFreeHost", block.pinned)
        self._free.clear()


class Transfer:
    """A call under way: arrays went to the device, were exchanged, and come back."""

    def __init__(
        self,
        stage: Stage,
        link: Link,
        give: Sequence[np.ndarray],
        take: Sequence[np.ndarray],
        enqueue: Callable[[list[int], list[int]], None],
    ) -> None:
        self._stage, self._link, at = stage, link, [0]
        for array in (*give, *take):
            at.append(at[-1] + -(-array.nbytes // 256) * 256)
        self._block = block = stage.take(max(at[-1], 1))
        self._take = [(array, start) for array, start in zip(take, at[len(give) :], strict=False)]
        driver, stream = stage.cuda, stage.stream
        stage.use()
        for array, start in zip(give, at, strict=False):
            block.host[start : start + array.nbytes] = array
            driver.call("cuMemcpyHtoDAsync_v2", block.device + start, block.pinned + start, array.nbytes, stream)
        where = [block.device + start for start in at]
        enqueue(where[: len(give)], where[len(give) : -1])
        for array, start in self._take:
            driver.call("cuMemcpyDtoHAsync_v2", block.pinned + start, block.device + start, array.nbytes, stream)
        driver.call("cuEventRecord", block.event, stream)

    def done(self) -> bool:
        """Whether the arrays are there."""
        block = self._block
        if not self._stage.cuda.ready(block.event):
            self._link.check()
            return False
        for array, start in self._take:
            array[:] = block.host[start : start + array.nbytes]
        self._stage.give(block)
        return True
