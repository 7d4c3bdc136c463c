"""NVIDIA's NCCL, loaded when it is asked for: ranks that it connects, and what they move between
their GPUs.

NCCL is found at run time: the file that ODYSSEY_NCCL_LIBRARY names, the wheel nvidia-nccl-cu12 or
-cu13, or the one of the system. Only this file knows NCCL's interfaces. Backend "nccl" is the
ranks' ordinary one, with this between GPUs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import time
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import launcher, slot
from ..base.hooks import machine
from ..base.paths import expand_path
from ..core.cuda import driver
from ..core.native import declared
from ..errors import CollectiveError, ConfigError, DeviceError, OdysseyError
from .base import Communicator
from .device import DeviceTransport, Message

if TYPE_CHECKING:
    from ..core.gpu_native import Gpu

LIBRARY = "ODYSSEY_NCCL_LIBRARY"
OLDEST = 21300  # 2.13: the first that says in words what went wrong (ncclGetLastError)
LOOK_S = 0.05  # between two questions whether something went wrong elsewhere

_BYTE = 1  # ncclUint8
_REMOTE = 6  # ncclRemoteError


class _Id(ctypes.Structure):
    """A ncclUniqueId, passed by value."""

    _fields_ = [("bytes", ctypes.c_uint8 * 128)]


class Nccl:
    """The loaded library. A function that fails raises with NCCL's words."""

    def __init__(self, path: str) -> None:
        lib = self._lib = ctypes.CDLL(path)
        lib.ncclGetErrorString.restype = lib.ncclGetLastError.restype = ctypes.c_char_p
        lib.ncclGetLastError.argtypes = [ctypes.c_void_p]
        pointer = ctypes.c_void_p
        size = ctypes.c_size_t
        number = ctypes.c_int
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
        }.items():
            declared(lib, f"nccl{name}", arguments, number)
        version = ctypes.c_int()
        self.call("GetVersion", ctypes.addressof(version))
        self.version = version.value

    def call(self, name: str, *args: Any, error: type[OdysseyError] = CollectiveError) -> None:
        """Calls nccl`name`."""
        result = getattr(self._lib, f"nccl{name}")(*args)
        if result:
            raise self.error(result, f"nccl{name}", error)

    def error(
        self, result: int, action: str = "", kind: type[OdysseyError] = CollectiveError
    ) -> OdysseyError:
        """The error of a result."""
        if result == _REMOTE or not action:
            return CollectiveError(
                f"[comm] a rank has ended, or cannot be reached: NCCL says {self.words(result)}"
            )
        return kind(f"[comm] {action}: {self.words(result)}")

    def words(self, result: int) -> str:
        """Returns what NCCL says about a result, in one line."""
        messages = [self._lib.ncclGetErrorString(result), self._lib.ncclGetLastError(None)]
        return " ".join(
            "; ".join(text.decode(errors="replace") for text in messages if text).split()
        )


@functools.cache
def library() -> Nccl:
    """NCCL. Raises ConfigError if there is none that can be used."""
    tried = []
    for path in _candidates():
        try:
            nccl = Nccl(path)
        except (OSError, AttributeError) as error:
            tried.append(" ".join(str(error).split()))
            continue
        if nccl.version < OLDEST:
            raise ConfigError(
                f"[comm] backend nccl: {path} is NCCL {spelled(nccl.version)}, and "
                f"{spelled(OLDEST)} is the oldest "
                "that will do; pip install -U nvidia-nccl-cu12, or use backend mpi"
            )
        return nccl
    raise ConfigError(
        f"[comm] backend nccl finds no NCCL ({'; '.join(tried)}); pip install nvidia-nccl-cu12 (or "
        f"-cu13), set {LIBRARY}=FILE, or use backend mpi"
    )


def _candidates() -> list[str]:
    library_path = os.environ.get(LIBRARY)
    if library_path:
        return [str(expand_path(library_path))]
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    files = [f / part / "lib" / "libnccl.so.2" for f in folders for part in ("nccl", "cu13")]
    return [*(str(f) for f in files if f.exists()), "libnccl.so.2"]


def spelled(version: int) -> str:
    """NCCL's number of a version as people write it: 22105 is 2.21.5."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class NcclTransport(DeviceTransport):
    """Messages between GPUs that training uses, in their COMPUTE queues.

    Made by all ranks at the same time.

    comm: over which rank 0 tells the others NCCL's id. gpu: of this rank; no two ranks may have the
    same.

    Raises ConfigError: two ranks have the same GPU. DeviceError: NCCL cannot connect them.
    """

    def __init__(self, comm: Communicator, gpu: Gpu) -> None:
        check_apart(comm, gpu.number)
        self._gpu = gpu
        self._driver = driver()
        self._lib = library()
        self._stream = gpu.stream()
        unique = _Id()
        handle = ctypes.c_void_p()
        if comm.rank == 0:
            self._lib.call("GetUniqueId", ctypes.addressof(unique), error=DeviceError)
        comm.broadcast(np.frombuffer(unique, np.uint8), 0)
        slot.begin_wait(
            comm._sequence, f"connecting ranks {slot.format_ranks(comm.ranks)} by NCCL", comm._mark
        )
        try:
            handle_address = ctypes.addressof(handle)
            self._lib.call(
                "CommInitRank", handle_address, comm.size, unique, comm.rank, error=DeviceError
            )
        finally:
            slot.end_wait()
        self._handle: int | None = handle.value
        self._looked = 0.0
        self._end = weakref.finalize(self, self._lib._lib.ncclCommDestroy, handle.value)
        self._event = self._driver.get(ctypes.c_void_p, "cuEventCreate", 2)  # without times

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        if not sends and not receives:
            return
        if self._handle is None:
            raise CollectiveError(
                "[comm] exchange after an error of NCCL; the ranks are not connected any more"
            )
        self._gpu.stream()  # makes the device the current one
        self._lib.call("GroupStart")
        try:
            for peer, address, size in receives:
                self._lib.call("Recv", address, size, _BYTE, peer, self._handle, self._stream)
            for peer, address, size in sends:
                self._lib.call("Send", address, size, _BYTE, peer, self._handle, self._stream)
        finally:
            self._lib.call("GroupEnd")

    def mark(self) -> None:
        self._driver.call("cuEventRecord", self._event, self._stream)

    def is_complete(self) -> bool:
        if self._driver.ready(self._event):
            return True
        checked_at = time.monotonic()
        if self._handle is not None and checked_at >= self._looked + LOOK_S:
            self._looked = checked_at
            result = ctypes.c_int()
            self._lib.call("CommGetAsyncError", self._handle, ctypes.addressof(result))
            if result.value:  # what was started cannot end
                raise self._lib.error(result.value)
        return False

    def abort(self) -> None:
        if self._end.detach() is not None:
            handle = self._handle
            self._handle = None
            self._lib._lib.ncclCommAbort(handle)  # whatever it says: there is nothing left to do


def check_apart(comm: Communicator, number: int) -> None:
    """Raises ConfigError, on all ranks, if two of them use the same GPU, which NCCL refuses; a
    collective call.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    local_gpu = np.array([machine(), zlib.crc32(visible.encode()), number], np.int64)
    rank_by_gpu: dict[tuple[int, ...], int] = {}
    for p, place in enumerate(comm.all_gather(local_gpu).tolist()):
        first_rank = rank_by_gpu.setdefault(tuple(place), p)
        if first_rank != p:
            raise ConfigError(
                f"[comm] backend nccl: ranks {comm.ranks[first_rank]} and {comm.ranks[p]} share "
                f"GPU {place[2]} of one machine, which NCCL does not allow; start at most one rank "
                "per GPU, or use backend mpi"
            ).on_all_ranks()


def gpus() -> int:
    """GPUs that this process sees. Raises DeviceError if there is none that can be used."""
    try:
        driver().call("cuInit", 0)
        count = driver().get(ctypes.c_int, "cuDeviceGetCount")
    except DeviceError:
        count = 0
    if count < 1:
        raise DeviceError(
            "[comm] backend nccl: no GPU on this machine that can be used; use backend mpi"
        )
    return count


def connect() -> Communicator:
    """All processes that MPI knows: a group of backend "shm" or "mpi" that says "nccl", so that
    GPUs exchange by NCCL. Raises ConfigError: one process alone, no NCCL, different ones, two
    ranks with the same GPU. DeviceError: no GPU.
    """
    from . import nearer, world

    launch = launcher.launched()
    if launch is None or launch.size == 1:
        raise ConfigError(
            "[comm] backend nccl connects several ranks, and this one is alone; use backend "
            "local (or auto)"
        )
    mpi = world("mpi")
    try:
        version = library().version
        count = gpus()
        problem = None
    except OdysseyError as error:
        version = 0
        count = 0
        problem = error
    versions = mpi.all_gather(np.array([version])).reshape(-1).tolist()
    if problem is not None:
        problem.raised_on_all_ranks = not any(versions)
        raise problem
    if not all(versions):
        raise ConfigError(
            f"[comm] backend nccl: rank {versions.index(0)} cannot use it; see what it says"
        )
    for rank, rank_version in enumerate(versions):
        if rank_version != versions[0]:
            raise ConfigError(
                f"[comm] backend nccl: rank {rank} has NCCL {spelled(rank_version)}, rank 0 "
                f"{spelled(versions[0])}; install the same on all machines"
            )
    check_apart(mpi, mpi.local_rank % count)
    ordinary = world(nearer(mpi, "")[0])
    comm = ordinary._make_group(tuple(range(ordinary.size)))
    comm.name = "nccl"
    comm._mark = ordinary._mark
    comm.why = (
        f"nccl: {comm.size} ranks, NCCL {spelled(version)} between their GPUs; else {ordinary.why}"
    )
    return comm
