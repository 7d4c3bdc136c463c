"""One writer per directory of checkpoints: the process that holds the file `.lock`
(docs/checkpoints.md) and is recorded in it.

On file systems without flock the record alone decides.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from ..base.files import LockFile
from ..base.hooks import has_ended
from ..errors import OutputError, printable
from .writer import host_name

NAME = ".lock"
PATIENCE = 2.0  # seconds: a killed process may still be ending


class Holder(NamedTuple):
    """The process that holds a directory."""

    host: str
    pid: int
    attempt: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {printable(self.host)}" + (
            f" (attempt {self.attempt})" if self.attempt else ""
        )

    @property
    def dead(self) -> bool:
        """True if it was a process of this machine, and has certainly ended."""
        return self.host == host_name() and has_ended(self.pid)


class DirectoryLock:
    """The lock of a directory, held from the constructor until `release`."""

    def __init__(self, folder: Path, attempt: int) -> None:
        """Waits up to PATIENCE for the lock.

        Raises:
            OutputError: another process holds it.
            OSError: the file cannot be made.
        """
        self._place = printable(str(folder))
        self.path = folder / NAME
        self.own_record = Holder(host_name(), os.getpid(), attempt)
        self._file: LockFile | None = self._acquire_lock()

    def check(self) -> None:
        """Raises OutputError if another process has taken the directory meanwhile."""
        assert self._file is not None
        try:
            if self._file.in_place() and _read_holder(self._file) == self.own_record:
                return
            current_file = LockFile(self.path, os.O_RDONLY)
            holder = str(_read_holder(current_file) or "another process")
            current_file.release(empty=False)
        except OSError as problem:
            holder = f"nobody ({self.path.name}: {problem.strerror})"
        raise OutputError(
            f"{self._place} is held by {holder} now, not by {self.own_record}: nothing is written"
        )

    def release(self) -> None:
        """Releases the lock. Does nothing if it is released already."""
        if self._file is not None:
            self._file.release(empty=_read_holder(self._file) == self.own_record)
            self._file = None

    def _acquire_lock(self) -> LockFile:
        """Returns the lock file once this process holds it.

        An earlier attempt that still holds it loses it, because only the latest attempt of a run
        may write. Raises as the constructor.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            file = LockFile(self.path)
            try:
                if self._try_acquire(file):
                    return file
                holder = _read_holder(file)
                if holder is not None and holder.attempt < self.own_record.attempt:
                    new_file = self._replace_lock_file()
                    file.release(empty=False)
                    return new_file
                if time.monotonic() > deadline:
                    holder_name = holder or "another process"
                    raise OutputError(
                        f"[checkpoint] {self._place} is in use by {holder_name}; wait, or give "
                        "another directory"
                    )
            except BaseException:
                file.release(empty=False)
                raise
            file.release(empty=False)
            time.sleep(0.05)

    def _try_acquire(self, file: LockFile) -> bool:
        """Returns True if this process now holds the lock file, and is recorded in it."""
        acquired = file.take()
        if acquired is None:  # no flock on this file system
            holder = _read_holder(file)
            acquired = (
                holder is None
                or holder.dead
                or holder == self.own_record
                or holder.attempt < self.own_record.attempt
            )
        if not acquired or not file.in_place():  # it was replaced meanwhile
            return False
        file.write(self.own_record._asdict(), durable=True)
        return True

    def _replace_lock_file(self) -> LockFile:
        """Replaces the lock file, which an earlier attempt still holds, with a new one; returns it.

        The record is written before the new file gets the name, so nobody reads an empty one.
        """
        new_file = LockFile(
            self.path.with_name(
                f"{NAME}.{self.own_record.attempt}.{self.own_record.host}.{self.own_record.pid}"
            )
        )
        try:
            with contextlib.suppress(OSError):
                new_file.take()
            new_file.write(self.own_record._asdict(), durable=True)
            os.rename(new_file.path, self.path)
        except BaseException:
            new_file.release()
            with contextlib.suppress(OSError):
                os.unlink(new_file.path)
            raise
        new_file.path = self.path
        return new_file


def _read_holder(file: LockFile) -> Holder | None:
    """Returns the process that is recorded in a lock file; None if the record is empty or torn."""
    try:
        holder = Holder(**file.read())
    except TypeError:
        return None
    has_types = type(holder.host) is str and type(holder.pid) is int and type(holder.attempt) is int
    return holder if has_types and holder.pid > 0 and holder.attempt >= 0 else None
