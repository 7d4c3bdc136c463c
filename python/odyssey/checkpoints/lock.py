"""One writer per directory of checkpoints.

The file `.lock` is locked with flock, which ends with the process whatever happens to it, and says who holds it: host,
pid, attempt. A later attempt of the same run takes a directory from an earlier one that hangs or cannot be reached; the
earlier one finds out before it puts the next checkpoint in place. Where there is no flock, what the file says decides.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from ..errors import DataError, OutputError, printable
from ..files import parse_json
from .writer import host_name

NAME = ".lock"
PATIENCE = 2.0  # seconds: a killed process may still be ending
_LIMIT = 4096
_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


class Holder(NamedTuple):
    """Who holds a directory."""

    host: str
    pid: int
    attempt: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {printable(self.host)}" + (f" (attempt {self.attempt})" if self.attempt else "")

    @property
    def here(self) -> bool:
        return self.host == host_name()

    @property
    def dead(self) -> bool:
        """Whether it is a process of this machine, and gone for certain."""
        return self.here and not alive(self.pid)


def alive(pid: int) -> bool:
    """Whether a process of this machine has this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


class Lock:
    """Holds a directory from when it is made until `release`."""

    def __init__(self, folder: Path, attempt: int) -> None:
        """Raises:
        OutputError: somebody else holds it.
        OSError: the file cannot be made.
        """
        self.folder, self.path = folder, folder / NAME
        self.mine = Holder(host_name(), os.getpid(), attempt)
        self._descriptor = self._take()

    def check(self) -> None:
        """Raises OutputError if another process has taken the directory meanwhile."""
        try:
            now, own = os.stat(self.path), os.fstat(self._descriptor)
            if (now.st_dev, now.st_ino) == (own.st_dev, own.st_ino) and _read(self._descriptor) == self.mine:
                return
            with open(self.path, "rb") as file:
                holder = str(_read(file.fileno()) or "another process")
        except OSError as problem:
            holder = f"nobody ({self.path.name}: {problem.strerror})"
        raise OutputError(
            f"{printable(str(self.folder))} is held by {holder} now, not by {self.mine}: nothing is written"
        )

    def release(self) -> None:
        """Gives it back; the file stays, empty: who unlinked it could unlink another one's."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            if _read(self._descriptor) == self.mine:
                os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = -1

    def _take(self) -> int:
        until = time.monotonic() + PATIENCE
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if self._try(descriptor):
                    return descriptor
                holder = _read(descriptor)
                if holder is not None and holder.attempt < self.mine.attempt:
                    return self._take_over(descriptor)
                if time.monotonic() > until:
                    who = holder or "another process"
                    raise OutputError(
                        f"[checkpoint] {printable(str(self.folder))} is in use by {who}; "
                        "wait for its end, or give another directory"
                    )
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            time.sleep(0.05)

    def _try(self, descriptor: int) -> bool:
        """Takes the file if it is free."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno in _HELD:
                return False
            if problem.errno not in _NO_FLOCK:
                raise
            holder = _read(descriptor)
            free = holder is None or holder.dead or holder == self.mine or holder.attempt < self.mine.attempt
            if not free:
                return False
        named = os.stat(self.path)
        own = os.fstat(descriptor)
        if (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino):
            return False  # it was replaced meanwhile
        self._sign(descriptor)
        return True

    def _take_over(self, descriptor: int) -> int:
        """Puts a new file in the place of one that an earlier attempt still holds."""
        aside = self.path.with_name(f"{NAME}.{self.mine.attempt}.{self.mine.host}.{self.mine.pid}")
        made = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with contextlib.suppress(OSError):  # where there is no flock there is none to take
                fcntl.flock(made, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._sign(made)
            os.rename(aside, self.path)
        except BaseException:
            os.close(made)
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
        os.close(descriptor)
        return made

    def _sign(self, descriptor: int) -> None:
        data = (json.dumps(self.mine._asdict()) + "\n").encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        os.fsync(descriptor)


def _read(descriptor: int) -> Holder | None:
    """Who a lock file names; None where it names nobody, or is torn."""
    try:
        content = parse_json(os.pread(descriptor, _LIMIT, 0), NAME)
        holder = Holder(**content)
    except (DataError, TypeError):
        return None
    right = type(holder.host) is str and type(holder.pid) is int and type(holder.attempt) is int
    return holder if right and holder.pid > 0 and holder.attempt >= 0 else None
