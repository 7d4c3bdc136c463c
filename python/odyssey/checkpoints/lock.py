"""One writer per directory of checkpoints: who holds the file `.lock` (docs/checkpoints.md), and
is named in it.

Where there is no flock, what the file says decides.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from ..base.files import LockFile
from ..base.hooks import gone
from ..errors import OutputError, printable
from .writer import host_name

NAME = ".lock"
PATIENCE = 2.0  # seconds: a killed process may still be ending


class Holder(NamedTuple):
    """Who holds a directory."""

    host: str
    pid: int
    attempt: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {printable(self.host)}" + (
            f" (attempt {self.attempt})" if self.attempt else ""
        )

    @property
    def dead(self) -> bool:
        """Returns whether it is a process of this machine, and gone for certain."""
        return self.host == host_name() and gone(self.pid)


class DirectoryLock:
    """Holds a directory from when it is made until `release`."""

    def __init__(self, folder: Path, attempt: int) -> None:
        """Raises OutputError: somebody else holds it. OSError: the file cannot be made."""
        self._place = printable(str(folder))
        self.path = folder / NAME
        self.mine = Holder(host_name(), os.getpid(), attempt)
        self._file: LockFile | None = self._take()

    def check(self) -> None:
        """Raises OutputError if another process has taken the directory meanwhile."""
        assert self._file is not None
        try:
            if self._file.in_place() and _holder(self._file) == self.mine:
                return
            current_file = LockFile(self.path, os.O_RDONLY)
            holder = str(_holder(current_file) or "another process")
            current_file.release(empty=False)
        except OSError as problem:
            holder = f"nobody ({self.path.name}: {problem.strerror})"
        raise OutputError(
            f"{self._place} is held by {holder} now, not by {self.mine}: nothing is written"
        )

    def release(self) -> None:
        """Gives it back."""
        if self._file is not None:
            self._file.release(empty=_holder(self._file) == self.mine)
            self._file = None

    def _take(self) -> LockFile:
        deadline = time.monotonic() + PATIENCE
        while True:
            file = LockFile(self.path)
            try:
                if self._try(file):
                    return file
                holder = _holder(file)
                if holder is not None and holder.attempt < self.mine.attempt:
                    new_file = self._take_over()
                    file.release(empty=False)
                    return new_file
                if time.monotonic() > deadline:
                    holder_name = holder or "another process"
                    raise OutputError(
                        f"[checkpoint] {self._place} is in use by {holder_name}; wait, or give "
                        "another "
                        "directory"
                    )
            except BaseException:
                file.release(empty=False)
                raise
            file.release(empty=False)
            time.sleep(0.05)

    def _try(self, file: LockFile) -> bool:
        acquired = file.take()
        if acquired is None:
            holder = _holder(file)
            acquired = (
                holder is None
                or holder.dead
                or holder == self.mine
                or holder.attempt < self.mine.attempt
            )
        if not acquired or not file.in_place():  # it was replaced meanwhile
            return False
        file.write(self.mine._asdict(), durable=True)
        return True

    def _take_over(self) -> LockFile:
        """Puts a new file in the place of one that an earlier attempt still holds."""
        new_file = LockFile(
            self.path.with_name(f"{NAME}.{self.mine.attempt}.{self.mine.host}.{self.mine.pid}")
        )
        try:
            with contextlib.suppress(OSError):
                new_file.take()
            new_file.write(self.mine._asdict(), durable=True)
            os.rename(new_file.path, self.path)
        except BaseException:
            new_file.release()
            with contextlib.suppress(OSError):
                os.unlink(new_file.path)
            raise
        new_file.path = self.path
        return new_file


def _holder(file: LockFile) -> Holder | None:
    """Who a lock file names; None where it names nobody, or is torn."""
    try:
        holder = Holder(**file.read())
    except TypeError:
        return None
    right = type(holder.host) is str and type(holder.pid) is int and type(holder.attempt) is int
    return holder if right and holder.pid > 0 and holder.attempt >= 0 else None
