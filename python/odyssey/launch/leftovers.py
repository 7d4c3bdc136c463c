"""Processes and files that a killed attempt left on this machine: found, proven to be its own,
removed.

MPICH leaves a piece of shared memory and a description of the machine whenever a job is killed,
Open MPI its session directory and segments whenever mpirun is. A process is ours if the launch's
token is in its environment. A file is ours if its name is one that these libraries give, it is this
user's, it was not there before the attempt, it is not newer than the attempt, and no process that
lives has it open or mapped. A description of the machine is never held open: there no other
launcher of this user that sees the same /tmp may have been starting when it was written.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..base.proc import mapped
from ..base.proc import stat as status

MEMORY = Path("/dev/shm")
_SHARED = re.compile(
    r"(mpich_shm_|sm_segment\.|vader_segment\.|osc_sm\.|osc_rdma\.|ucx_shm_posix_|odyssey[-_.])\S*"
)
_TEMPORARY = re.compile(r"(hydra_hwloc_xmlfile_\w{6}|ompi\.\d+)")
_DESCRIPTION = "hydra_hwloc_xmlfile_"
_PROXIES = ("hydra_pmi_proxy", "mpirun", "mpiexec", "mpiexec.hydra")
_PF_KTHREAD = 0x00200000  # a thread of the kernel, which has no environment and no arguments ever
_STARTING = 3.0  # seconds in which a launcher writes its description of the machine


def processes(token: str, seconds: float = 0.2) -> list[int]:
    """Processes of this user on this machine that have `token` (a "NAME=value" text) in their
    environment. A process that has just begun a program shows neither environment nor
    arguments for an instant; while there is one, and for at most `seconds`, all are looked at
    again.
    """
    until = time.monotonic() + seconds
    while True:
        matching_pids, starting = _look(token.encode())
        if not starting or time.monotonic() > until:
            return matching_pids
        time.sleep(0.001)


def kill(token: str, seconds: float = 10.0) -> list[int]:
    """Kills the processes with `token` until two looks in a row find none; those that are there
    after `seconds`.
    """
    until = time.monotonic() + seconds
    nap = 0.002
    previous_pids = None  # what the last look found
    while True:
        remaining_pids = [pid for pid in processes(token) if not _dead(pid)]
        if remaining_pids == previous_pids == [] or time.monotonic() > until:
            return remaining_pids
        for pid in remaining_pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        previous_pids = remaining_pids
        time.sleep(nap)
        nap = min(2 * nap, 0.05)


def _look(token: bytes) -> tuple[list[int], bool]:
    """The processes with the token, and whether there is one that has just begun a program and
    cannot be told yet.
    """
    user_id = os.geteuid()
    own_pid = os.getpid()
    matching_pids = []
    starting = False
    for pid in pids():
        if pid != own_pid:
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}").st_uid != user_id:
                    continue
                environment = _read(f"/proc/{pid}/environ")
                if token in environment.split(b"\0"):
                    matching_pids.append(pid)
                elif not environment and not _read(f"/proc/{pid}/cmdline"):
                    starting = starting or not (_dead(pid) or int(status(pid)[6]) & _PF_KTHREAD)
    return matching_pids, starting


def pids() -> Iterator[int]:
    """The processes of this machine."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                yield int(name)


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def _dead(pid: int) -> bool:
    """Returns whether a process is gone, or waits only for its parent to notice."""
    with contextlib.suppress(OSError):
        return status(pid)[0] in (b"Z", b"X")
    return True


def places(temporary: str | None = None) -> list[tuple[Path, re.Pattern[str]]]:
    """Directories in which the libraries leave something, and the names that it has."""
    folders = [(MEMORY, _SHARED), (Path("/tmp"), _TEMPORARY)]
    if temporary and os.path.realpath(temporary) != "/tmp":
        folders.append((Path(temporary), _TEMPORARY))
    return folders


def _find_paths(folders: Iterable[tuple[Path, re.Pattern[str]]]) -> Iterator[Path]:
    for folder, pattern in folders:
        with contextlib.suppress(OSError):
            yield from (folder / name for name in os.listdir(folder) if pattern.fullmatch(name))


def snapshot(temporary: str | None = None) -> dict[str, Any]:
    """Returns what lies there now, full names and the wall-clock time, as a JSON file can hold
    it.
    """
    return {"names": sorted(map(str, _find_paths(places(temporary)))), "time": time.time()}


def clean(before: Any, ended: float, temporary: str | None = None) -> list[str]:
    """Removes the files that are proven to be those of an attempt; returns their names. before:
    the snapshot when it began; out of a file it may be something else, and then nothing is
    proven. ended: wall-clock time at which the last of its processes was gone.
    """
    names, begin_time = (
        (before.get("names"), before.get("time")) if isinstance(before, dict) else (None, None)
    )
    if not isinstance(names, list) or type(begin_time) is not float:
        return []
    candidates = []
    for path in _find_paths(places(temporary)):
        with contextlib.suppress(OSError):
            stat_result = os.lstat(path)
            folder = stat.S_ISDIR(stat_result.st_mode)
            # a directory changes later too
            earliest_change = (
                min(stat_result.st_mtime, stat_result.st_ctime) if folder else stat_result.st_mtime
            )
            between = begin_time - 0.05 <= stat_result.st_mtime and earliest_change <= ended + 0.05
            is_own = stat_result.st_uid == os.geteuid() and (
                folder or stat.S_ISREG(stat_result.st_mode)
            )
            if is_own and between and str(path) not in names:
                candidates.append((path, stat_result))
    if not candidates:
        return []
    try:
        held, launchers = _held()
    except (OSError, ValueError, IndexError):  # no /proc: nothing can be proven
        return []
    removed = []
    for path, stat_result in candidates:
        name = str(path)
        if name in held or any(held_path.startswith(f"{name}/") for held_path in held):
            continue
        # of those that may have written it
        ages = [stat_result.st_mtime - started for started in launchers]
        if path.name.startswith(_DESCRIPTION) and any(-0.1 <= age <= _STARTING for age in ages):
            continue
        session = re.fullmatch(r"ompi\.(\d+)", path.name)
        if session and not _dead(int(session[1])):
            continue
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(stat_result.st_mode):
                shutil.rmtree(path)
            else:
                os.unlink(path)
            removed.append(name)
    return removed


def _same_temporary(pid: int) -> bool:
    """Returns whether a process sees the same /tmp as this one; in a container or a private one
    it writes elsewhere.
    """
    try:
        return os.path.samefile(f"/proc/{pid}/root/tmp", "/tmp")
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return False
    except OSError:
        return True


def _held() -> tuple[set[str], list[float]]:
    """Names of files that a process has open or mapped, and when the living MPICH launchers of
    this user began.
    """
    held: set[str] = set()
    launchers = []
    booted = time.time() - float(_read("/proc/uptime").split()[0])
    ticks = os.sysconf("SC_CLK_TCK")
    for pid in pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
                continue  # this user's files are closed to others; root's own are looked at as root
            held.update(mapped(pid))
            state, _, fields = _read(f"/proc/{pid}/stat").rpartition(b")")
            if os.fsdecode(state.partition(b"(")[2]) in _PROXIES and _same_temporary(pid):
                launchers.append(booted + int(fields.split()[19]) / ticks)
            folder = f"/proc/{pid}/fd"
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    held.add(os.readlink(f"{folder}/{name}"))
    return held, launchers
