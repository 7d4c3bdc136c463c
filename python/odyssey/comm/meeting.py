"""A line about a rank that waits long for the others to meet.

Until the ranks have met, nothing else watches them. A rank may be stopped, may not have been
started, or a shell may hold the variables of a job that is over. MPI and PyTorch then wait without
a word.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..base import launcher
from ..base.proc import environment_of, loaded_file, mpi_file, stat
from ..base.slot import format_ranks

AFTER_S = 10.0  # of a process, after which a rank that waits prints its line
_STOPPED = (b"T", b"t")
_TORCH = ("libtorch_cpu.",)


class Process(NamedTuple):
    """A rank of this machine: its process, whether that is stopped, and whether it meets."""

    pid: int
    stopped: bool
    meets: bool


@contextlib.contextmanager
def announced(job: launcher.Launched | None, doing: str) -> Iterator[None]:
    """Has a line printed if the block has not ended AFTER_S after the start of the process.

    job: the ranks that meet in the block, or None for none. doing: what this rank does meanwhile,
    such as "in MPI_Init".
    """
    if job is None or job.size == 1:
        yield
        return
    # Importing libraries may take long on a busy machine, and counts too.
    delay_s = max(AFTER_S / 5, AFTER_S - _age_s())
    timer = threading.Timer(delay_s, _speak, [job, doing])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _speak(job: launcher.Launched, doing: str) -> None:
    line = describe(job, doing, local_ranks(job))
    if line:
        with contextlib.suppress(OSError, ValueError):
            print(f"odyssey: [comm] {line}", file=sys.stderr, flush=True)


def describe(
    job: launcher.Launched,
    doing: str,
    local: Mapping[int, Process],
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Returns the line of this rank; "" if another rank of this machine prints one.

    local: the ranks on this machine.
    """
    speakers = [rank for rank, p in local.items() if p.meets and not p.stopped]
    if min([job.rank, *speakers]) < job.rank:
        return ""
    expected = [rank for rank in range(job.size) if rank != job.rank]
    parts = [
        f"rank {rank} (pid {p.pid}) is stopped (SIGSTOP, or a debugger)"
        for rank, p in sorted(local.items())
        if p.stopped
    ]
    late = [rank for rank in expected if rank in local and not (p := local[rank]).stopped | p.meets]
    absent = [rank for rank in expected if rank not in local]
    parts += [f"{_name(late)} on this machine {_verb(late)} not come yet"] if late else []
    parts += [f"{_name(absent)} {_verb(absent)} no process on this machine"] if absent else []
    reason = "; ".join(parts[:4]) or "all ranks of this machine do the same"
    advice = "; if no launcher set these, unset them" if absent else ""
    return (
        f"rank {job.rank} of {job.size} waits {doing} for the other ranks to meet: "
        f"{reason} ({launcher.variables_of(job, environment)}){advice}"
    )


def local_ranks(job: launcher.Launched) -> dict[int, Process]:
    """Returns the other ranks of this machine as /proc shows them: those of the same job."""
    job_here = launcher.job_of(os.environ)
    processes: dict[int, Process] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            with contextlib.suppress(OSError, IndexError):
                environment = environment_of(int(name))
                rank = launcher.rank(environment)
                if rank is None or rank == job.rank or launcher.job_of(environment) != job_here:
                    continue
                meets = bool(mpi_file(name) if job.mpi else loaded_file(_TORCH, name))
                process = Process(int(name), stat(int(name))[0] in _STOPPED, meets)
                earlier = processes.get(rank)
                # A wrapper has the variables of its rank, too, and never meets anybody.
                if earlier is None or process.meets >= earlier.meets:
                    processes[rank] = process
    return processes


def _age_s() -> float:
    """Returns the seconds since this process was started; 0 where that is unknown."""
    with contextlib.suppress(OSError, IndexError, ValueError, AttributeError):
        started_s = int(stat(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    return 0.0


def _name(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"


def _verb(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
