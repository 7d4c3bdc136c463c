"""Memory that several ranks of one machine see: windows of MPI, and files without a name."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from ..base.hooks import gone, process_space
from ..base.limits import shared_memory
from ..errors import ConfigError
from .base import Communicator

LINE = 64  # bytes of a cache line
PAGE = 4096


def up(n: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-n // to) * to


class _Files:
    """Files without a name, as a window: no end of a rank leaves any behind."""

    def __init__(self, over: Communicator, processes: np.ndarray, size: int) -> None:
        arrays = files(over, processes, size)
        if arrays is None:
            raise ConfigError(
                f"[comm] the processes of the {over.size} ranks cannot share memory: each must "
                "see the others in "
                "/proc; use backend 'gloo'"
            )
        self.addresses = [array.ctypes.data for array in arrays]
        self._arrays = arrays

    def free(self) -> None:
        self._arrays.clear()


def window(over: Communicator, processes: np.ndarray, size: int) -> tuple[Any, list[int]]:
    """Shared memory of `size` bytes on each rank, and where it begins, on whole cache lines; all
    ranks call it. Raises ConfigError: there is not so much.
    """
    size = up(size + LINE, PAGE)
    room = shared_memory()
    free = int(over.all_reduce(np.array([2**62 if room is None else room[1]]), "min")[0])
    if size * over.size > free:
        raise ConfigError(
            f"[comm] {over.size} ranks need {size * over.size >> 20} MiB of shared memory, but "
            "/dev/shm has "
            f"{free >> 20} MiB left; make it larger (docker run --shm-size), or use backend 'mpi'"
        )
    memory = over.window(size) if over._exits is not None else _Files(over, processes, size)
    return memory, [up(address, LINE) for address in memory.addresses]


def files(comm: Communicator, processes: np.ndarray, size: int) -> list[np.ndarray] | None:
    """uint8 arrays of `size` bytes, one per rank: files without a name, so no rank that ends in
    whatever way leaves one behind. None where that does not work; all ranks call it.

    The others open them through the number of the process, so all must agree on what these numbers
    mean. processes: (pid, `process_space()`) of each rank.
    """
    handle = -1
    place = [os.getpid(), -1, 0]
    try:
        handle = os.memfd_create("odyssey")
        os.ftruncate(handle, up(max(size, 1), PAGE))
        place[1:] = handle, os.fstat(handle).st_ino
    except (AttributeError, OSError, OverflowError):
        pass
    places = comm.all_gather(np.array(place))
    maps: list[mmap.mmap] = []
    try:
        for (process, number, inode), (_, space) in zip(
            places.tolist(), processes.tolist(), strict=True
        ):
            if number < 0 or not space or space != process_space():
                break
            theirs = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
            try:
                if os.fstat(theirs).st_ino == inode:
                    maps.append(mmap.mmap(theirs, up(max(size, 1), PAGE)))
            finally:
                os.close(theirs)
    except (OSError, OverflowError, ValueError):
        pass
    complete = comm.all_reduce(np.array([len(maps) == comm.size], np.int8), "min")[0]
    if handle >= 0:
        os.close(handle)  # all have opened it
    return [np.frombuffer(m, np.uint8)[:size] for m in maps] if complete else None


def process_ended(process: int, space: int) -> bool:
    """Returns whether a process of this machine is known to be gone."""
    return space != 0 and space == process_space() and gone(process)
