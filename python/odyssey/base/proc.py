"""Processes of this machine as /proc shows them. The standard library only."""

from __future__ import annotations

import contextlib
import os

SHARED = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.")


def stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on: 0 state, 1 parent, 11 and 12 ticks used,
    19 start, 21 memory.

    Raises OSError: there is no such process, or no /proc.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def mapped(pid: int | str = "self") -> dict[str, int]:
    """The files that a process has mapped, name -> inode; none where that cannot be seen."""
    inodes = {}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="surrogateescape") as maps:
        for line in maps:
            words = line.rstrip("\n").split(maxsplit=5)
            if (
                len(words) == 6
                and words[5][0] == "/"
                and words[4].isdigit()
                and not words[5].endswith(" (deleted)")
            ):
                inodes[words[5]] = int(words[4])
    return inodes


def attach(pid: int, descriptor: int) -> tuple[int, int]:
    """(a handle of a process, its slot opened for reading): they show how it ended also when it
    is long gone.

    Each is -1 where it is not to be had: an old Python, a filter of system calls, a process that
    has ended.
    """
    handle = opened = -1
    with contextlib.suppress(OSError, AttributeError, OverflowError):
        handle = os.pidfd_open(pid)
    with contextlib.suppress(OSError, OverflowError):
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    return handle, opened


def environment_of(pid: int) -> dict[str, str]:
    """Returns the variables that a process was started with. Raises OSError: it can't be seen."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        pairs = [os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0") if entry]
    return {name: value for name, _, value in pairs}


def mpi_file(pid: int | str = "self") -> str:
    """Returns the file of the MPI library that a process has loaded, "" if there is none."""
    return loaded_file(("libmpi.", "libmpich.", "libmpi_abi."), pid)


def loaded_file(names: tuple[str, ...], pid: int | str = "self") -> str:
    """Returns a file that a process has mapped and whose name starts so, "" if there is none."""
    return next((path for path in mapped(pid) if os.path.basename(path).startswith(names)), "")
