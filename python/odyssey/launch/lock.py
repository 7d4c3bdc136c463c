"""One launcher per run: a lock file that says who holds it, recovered when that launcher is gone.

The kernel releases the lock with the process that holds it. Where the file lies on a network file system whose locks
are not seen by other hosts, the file's time, renewed every few seconds, tells a living launcher of another host: it
changes while one looks (clocks of hosts are not compared). What it is not: what keeps two attempts from writing; that
is the attempt's number.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from ..errors import LaunchError, OutputError, printable

FRESH = 20.0  # seconds in which a launcher of another host renews its lock, if it lives
RENEWED = 5.0  # seconds


class Lock:
    """Holds the lock until `close`, or the end of the process.

    Raises:
        LaunchError: another launcher holds it. OutputError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._renewed = time.monotonic()
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._take()
        except BaseException as problem:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            if isinstance(problem, OSError):
                raise OutputError(
                    f"[launch] {path} cannot be written: {problem.strerror}; name another --run-dir"
                ) from problem
            raise

    def _take(self) -> None:
        here = socket.gethostname()
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = False
        except OSError:
            held = True
        found = _read(self._descriptor)
        if held or (_elsewhere(found) and _renewed(self.path)):
            who = f"process {found.get('pid', '?')} on host {printable(str(found.get('host', '?')))[:256]}"
            raise LaunchError(
                f"[launch] {self.path.parent} is being run by {who}; wait for it, stop it, or name another --run-dir"
            )
        self._write({"host": here, "pid": os.getpid(), "held": True})

    def _write(self, value: dict) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(value).encode(), 0)

    def renew(self) -> None:
        """Shows other hosts that the holder lives; cheap, call it often."""
        if time.monotonic() - self._renewed > RENEWED:
            self._renewed = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)

    def close(self) -> None:
        """Gives the lock up."""
        with contextlib.suppress(OSError):
            self._write({})
        os.close(self._descriptor)


def holder(path: Path, sure: bool = True) -> dict | None:
    """Host and pid of the launcher that holds the lock, None if none does.

    Args:
        sure: look for up to FRESH seconds whether a launcher of another host renews it; else believe what it says.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        found = _read(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return found
        return found if _elsewhere(found) and (not sure or _renewed(path)) else None
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> dict:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(os.pread(descriptor, 4096, 0))
        if isinstance(found, dict):
            return found
    return {}


def _elsewhere(found: dict) -> bool:
    """Whether a launcher of another host, whose lock may not be seen here, says that it holds it."""
    return found.get("host") not in (None, socket.gethostname()) and found.get("held") is True


def _renewed(path: Path) -> bool:
    """Whether the file's time changes within FRESH seconds: its holder lives."""
    first, until = _time(path), time.monotonic() + FRESH
    while time.monotonic() < until:
        time.sleep(min(0.25, FRESH / 10))
        if _time(path) != first:
            return True
    return False


def _time(path: Path) -> int:
    """In ns; by a file that is opened for it, as network file systems then ask their server."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)
    return 0
