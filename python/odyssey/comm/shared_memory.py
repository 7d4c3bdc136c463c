"""Memory that several ranks of one machine share: windows of MPI, and files without a name."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from ..base.hooks import has_ended, process_space
from ..base.limits import shared_memory
from ..errors import ConfigError
from .base import Communicator

LINE = 64  # bytes of a cache line
PAGE = 4096


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


class _Files:
    """Files without a name, with the interface of a window of MPI.

    No file is left, in whatever way a rank ends.
    """

    def __init__(self, over: Communicator, processes: np.ndarray, size: int) -> None:
        arrays = share_nameless_files(over, processes, size)
        if arrays is None:
            raise ConfigError(
                f"[comm] the processes of the {over.size} ranks cannot share memory: each must see "
                "the others in /proc; use backend 'gloo'"
            )
        self.addresses = [array.ctypes.data for array in arrays]
        self._arrays = arrays

    def free(self) -> None:
        self._arrays.clear()


def allocate_window(over: Communicator, processes: np.ndarray, size: int) -> tuple[Any, list[int]]:
    """Allocates shared memory of `size` bytes per rank. All ranks call it.

    Returns the window, which the caller frees, and the address of the memory of each rank in this
    process. The addresses are multiples of a cache line.

    over: the communicator underneath, with the same ranks.
    processes: (pid, `process_space()`) of each rank.

    Raises:
        ConfigError: there is too little shared memory.
    """
    size = round_up(size + LINE, PAGE)
    room = shared_memory()
    free = int(over.all_reduce(np.array([2**62 if room is None else room[1]]), "min")[0])
    if size * over.size > free:
        raise ConfigError(
            f"[comm] {over.size} ranks need {size * over.size >> 20} MiB of shared memory, but "
            "/dev/shm has "
            f"{free >> 20} MiB left; make it larger (docker run --shm-size), or use backend 'mpi'"
        )
    memory = over.window(size) if over._exits is not None else _Files(over, processes, size)
    return memory, [round_up(address, LINE) for address in memory.addresses]


def share_nameless_files(
    comm: Communicator, processes: np.ndarray, size: int
) -> list[np.ndarray] | None:
    """Returns uint8 arrays of `size` bytes, one per rank, that all ranks see. All ranks call it.

    Each is a file without a name, so no file is left, in whatever way a rank ends. The other ranks
    open it by /proc/PID/fd/N. So all must be in the same space of process numbers.

    processes: (pid, `process_space()`) of each rank.

    Returns None on all ranks if it does not work on one of them.
    """
    file_size = round_up(max(size, 1), PAGE)
    descriptor = -1
    place = [os.getpid(), -1, 0]  # process, descriptor, inode; -1 if this rank has no file
    try:
        descriptor = os.memfd_create("odyssey")
        os.ftruncate(descriptor, file_size)
        place[1:] = descriptor, os.fstat(descriptor).st_ino
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
            peer_descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
            try:
                # another inode: the number is that of another file by now
                if os.fstat(peer_descriptor).st_ino == inode:
                    maps.append(mmap.mmap(peer_descriptor, file_size))
            finally:
                os.close(peer_descriptor)
    except (OSError, OverflowError, ValueError):
        pass
    # This is also the barrier after which no rank needs the descriptors any more.
    works_on_all = comm.all_reduce(np.array([len(maps) == comm.size], np.int8), "min")[0]
    if descriptor >= 0:
        os.close(descriptor)
    return [np.frombuffer(memory, np.uint8)[:size] for memory in maps] if works_on_all else None


def process_ended(process: int, space: int) -> bool:
    """Returns True if a process of this machine is known to have ended.

    space: its `process_space()`; in another space its number means nothing here.
    """
    return space != 0 and space == process_space() and has_ended(process)
