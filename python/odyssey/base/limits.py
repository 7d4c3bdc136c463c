"""Limits of this process and its shared memory, checked before MPI and the kernels' runtime meet
them.

These end by a bus error or the like where it is too little, which says nothing. Nothing heavy is
imported: it comes before NumPy.
"""

from __future__ import annotations

import contextlib
import math
import os

from ..errors import ConfigError, printable
from .launcher import Launched

MIB = 1 << 20
# of a process alone (the kernels' runtime reserves 2 GiB), of one of several ranks
ADDRESSES = 2400 * MIB, 2816 * MIB
# open at once by a rank: MPI, its sockets, the kernels; measured: 48 are enough for two ranks, 40
# are not
FILES = 64
SHARED_FILE = 2 * MIB  # the largest file in shared memory has so much for each rank, and twice more
# what MPICH needs in /dev/shm; measured, docs/doctor.md
SHARED_BASE = 12 * MIB
SHARED_RANK = 21 * MIB // 4
# what a rank of backend shm needs there in addition: two slots and two results (comm/shm.py)
WINDOW_RANK = 4 * MIB


def seconds(
    room: str, name: str, default: float, least: float | None = None, most: float = math.inf
) -> float:
    """A number of seconds out of the environment, from `least` (None: above 0) to `most`.

    Raises ConfigError, in the name of `room`: it is none.
    """
    text = os.environ.get(name, "")
    if not text:
        return default
    with contextlib.suppress(ValueError):
        if (0 if least is None else least) <= float(text) <= most and (
            least is not None or float(text)
        ):
            return float(text)
    allowed = (
        "above 0" if least is None else f"from {least:g}" + f" to {most:g}" * math.isfinite(most)
    )
    raise ConfigError(
        f"[{room}] {name}={printable(text, limit=40)}; it must be a number of seconds {allowed}"
    )


def shared_memory(place: str = "/dev/shm") -> tuple[int, int] | None:
    """(size, free) in bytes of where shared memory comes from; None where there is no such
    place.
    """
    try:
        stats = os.statvfs(place)
    except OSError:
        return None
    return stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize


def shared_need(ranks: int) -> int:
    """Bytes that MPICH needs in /dev/shm for so many ranks of one machine."""
    return SHARED_BASE + SHARED_RANK * ranks


def limit(name: str) -> float:
    """A limit of this process, such as "AS" (bytes) for `ulimit -v`; infinite without one."""
    import resource

    soft_limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
    return math.inf if soft_limit == resource.RLIM_INFINITY else soft_limit


def check_addresses(ranks: int = 1) -> None:
    """Raises ConfigError where the kernels' runtime or MPI would crash for want of address
    space.
    """
    space = limit("AS")
    need = ADDRESSES[ranks > 1]
    if space < need:
        raise ConfigError(
            f"[preflight] address space is limited to {space / MIB:.0f} MiB (ulimit -v), but a "
            f"{'rank' if ranks > 1 else 'process'} needs {need / MIB:.0f} MiB and would crash; "
            "raise it (ulimit -v unlimited), or limit memory by a cgroup instead"
        )


def before_mpi(job: Launched | None) -> None:
    """Raises ConfigError if MPI, or the kernels of a process alone, would end by a bus error,
    which says little.
    """
    if job is None or not job.mpi:
        check_addresses()
        return
    try:
        check_addresses(job.size)
        if limit("NOFILE") < FILES:
            raise ConfigError(
                f"[preflight] a process may have {limit('NOFILE'):.0f} files open (ulimit -n), but "
                f"a rank needs {FILES}; raise it (ulimit -n 1024)"
            )
        if job.launcher == "PMI" and job.local_size > 1:
            # Where the launcher does not say how many ranks are on this machine (srun), there may
            # be two.
            _check_shared(job.local_size if "MPI_LOCALNRANKS" in os.environ else 2)
    except ConfigError as error:
        error.raised_on_all_ranks = job.local_size == job.size  # one rank says it
        raise


def _check_shared(ranks: int) -> None:
    """Checks, for `before_mpi`, what MPICH keeps in /dev/shm for so many ranks of this machine.

    Of the room, the size must be enough for all; but free must be what this rank takes: others may
    be a moment ahead and have taken theirs.
    """
    need = (
        f"MPICH needs {shared_need(ranks) / MIB:.0f} MiB for {ranks} ranks on a machine and "
        "would crash"
    )
    room = shared_memory()
    if room is not None and room[0]:
        larger = "make it larger (docker run --shm-size=256m, mount -o remount,size=256m /dev/shm)"
        if room[0] < shared_need(ranks):
            raise ConfigError(
                f"[preflight] /dev/shm has {room[0] / MIB:.0f} MiB, but {need}; {larger}, or "
                "start fewer ranks"
            )
        if room[1] < SHARED_RANK:
            raise ConfigError(
                f"[preflight] /dev/shm has {room[1] / MIB:.1f} MiB left, but {need}; stop other "
                f"programs that use it, or {larger}"
            )
    if limit("FSIZE") < SHARED_FILE * (ranks + 2):
        raise ConfigError(
            f"[preflight] files are limited to {limit('FSIZE') / MIB:.1f} MiB (ulimit -f), but "
            f"{ranks} ranks share one of {SHARED_FILE * (ranks + 2) / MIB:.0f} MiB in /dev/shm; "
            "raise it (ulimit -f unlimited)"
        )
    if room is not None:
        import tempfile

        try:
            tempfile.TemporaryFile(dir="/dev/shm").close()
        except OSError as problem:
            raise ConfigError(
                f"[preflight] no file can be made in /dev/shm ({problem.strerror}), which ranks "
                "on a machine share "
                "memory by; mount it anew (mount -t tmpfs -o size=256m tmpfs /dev/shm)"
            ) from problem
