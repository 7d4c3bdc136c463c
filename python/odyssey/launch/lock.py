"""One launcher per run: a lock file that says who holds it, recovered when that launcher is gone.

The kernel releases the lock with the process that holds it. Where the file lies on a network file
system whose locks are not seen by other hosts, the file's time, renewed every few seconds, tells a
living launcher of another host: it changes while one looks (clocks of hosts are not compared). What
keeps two attempts from writing is not the lock but the attempt's number.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path

from ..base.files import LockFile
from ..errors import LaunchError, OutputError, printable

FRESH = 20.0  # seconds in which a launcher of another host renews its lock, if it lives
RENEWED = 5.0  # seconds


class RunLock:
    """Holds the lock until `close`, or the end of the process.

    Raises LaunchError: another launcher holds it. OutputError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._renewed = time.monotonic()
        try:
            self._file = LockFile(path)
            try:
                self._take()
            except BaseException:
                self._file.release(empty=False)
                raise
        except OSError as e:
            raise OutputError(
                f"[launch] {path} cannot be written: {e.strerror}; name another --run-dir"
            ) from e

    def _take(self) -> None:
        path = self._file.path
        acquired = self._file.take()
        record = self._file.read()
        if not acquired or (_elsewhere(record) and _renewed(path)):
            process = (
                f"process {record.get('pid', '?')} on host "
                f"{printable(str(record.get('host', '?')))[:256]}"
            )
            raise LaunchError(
                f"[launch] {path.parent} is being run by {process}; wait, stop it, or name another "
                "--run-dir"
            )
        self._file.write({"host": socket.gethostname(), "pid": os.getpid(), "held": True})

    def renew(self) -> None:
        """Shows other hosts that the holder lives; cheap, call it often."""
        if time.monotonic() - self._renewed > RENEWED:
            self._renewed = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self._file.descriptor)

    def close(self) -> None:
        """Gives the lock up."""
        self._file.release()


def holder(path: Path, sure: bool = True) -> dict | None:
    """Host and pid of the launcher that holds the lock, None if none does. sure: look for up to
    FRESH seconds whether a launcher of another host renews it; else believe what it says.
    """
    try:
        file = LockFile(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        record = file.read()
        held = not file.take(fcntl.LOCK_SH) or (_elsewhere(record) and (not sure or _renewed(path)))
        return record if held else None
    finally:
        file.release(empty=False)


def _elsewhere(record: dict) -> bool:
    """Returns whether a launcher of another host, whose lock may not be seen here, says that it
    holds it.
    """
    return record.get("host") not in (None, socket.gethostname()) and record.get("held") is True


def _renewed(path: Path) -> bool:
    """Returns whether the file's time changes within FRESH seconds: its holder lives."""
    first = _time(path)
    until = time.monotonic() + FRESH
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
