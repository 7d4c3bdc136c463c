"""Files that must be there whole or not at all, and JSON from untrusted input.

Written aside in the same directory, flushed to the disk, renamed, and the directory flushed: after
a crash at any moment the old file is there or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import math
import os
import stat
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import DataError, OutputError, printable

JSON_LIMIT = 16 << 20  # bytes; a longer one is refused before it is read
DEPTH = 32  # of nested lists and objects
NO_DIRECTORY = "the current directory has been removed; change to one that is there (cd)"
DIGITS = 20  # of an integer, its sign included: 64 bits
# Permissions of what a run leaves, less the umask: a group may share it, and never everybody
# writes to it. Files that hold secrets have another mode.
FILE_MODE = 0o664
DIRECTORY_MODE = 0o775
_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
# of renameat2, Linux
_AT_FDCWD = -100
_EXCHANGE = 2


def current_directory() -> str:
    """The working directory; "" where it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def write_whole(
    path: Path, write: Callable[[BinaryIO], Any], mode: int = FILE_MODE, durable: bool = True
) -> None:
    """Lets `write` fill a file aside, then puts it in place of `path`.

    mode: permissions, less the umask.
    durable: flush file and directory to the disk; else a machine's crash may leave the file empty.

    Raises OSError: it could not be written; `path` is as it was and nothing is left aside.
    """
    aside = path.with_name(f".{path.name[:100]}.{os.getpid()}.tmp")
    descriptor = os.open(
        aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode
    )
    try:
        with open(descriptor, "wb") as file:
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    if durable:
        # of a directory that may be written to and not read
        with contextlib.suppress(PermissionError):
            sync_directory(path.parent)


def exchange(new: Path, old: Path, aside: Path) -> None:
    """Lets two directories change names, in one step where the system can (Linux), else in three
    by way of `aside`.

    In three, a crash in between can lose `old`, never tear it.
    """
    import ctypes  # takes milliseconds, and most processes exchange nothing

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        if rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # not on this file system
            raise OSError(number, os.strerror(number), old.name)
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


def sync_directory(path: Path) -> None:
    """Flushes the entries of a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LockFile:
    """A file that one process holds, and in which the holder says who it is (a JSON object).

    The lock is flock's: it ends with the process, however that ends. The file is never removed: who
    unlinked it could unlink another one's. A child (fork) closes the files of its parent, because
    a lock lasts as long as any process has its file open: workers of a data loader may live longer
    than the training run. In a child `release` does nothing.
    """

    def __init__(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        """Opens the file. Raises OSError: it cannot be, or is a symbolic link."""
        self.path = path
        self._pid = os.getpid()
        self.descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        _open_lock_files.add(self)

    def take(self, kind: int = fcntl.LOCK_EX) -> bool | None:
        """Takes the lock if it is free, and says whether it was; None: the file system has no
        locks.
        """
        try:
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno in _NO_FLOCK:
                return None
            if problem.errno not in _HELD:
                raise
            return False
        return True

    def in_place(self) -> bool:
        """Returns whether the path still refers to this open file.

        Raises OSError: nothing has the name.
        """
        return os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))

    def read(self) -> dict[str, Any]:
        """Returns what the file says; {} where it says nothing, or is torn."""
        with contextlib.suppress(OSError, DataError):
            content = parse_json(os.pread(self.descriptor, 1 << 16, 0), self.path.name)
            return content if isinstance(content, dict) else {}
        return {}

    def write(self, value: dict[str, Any], durable: bool = False) -> None:
        """Says who holds it. Raises OSError."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, (json.dumps(value) + "\n").encode(), 0)
        if durable:
            os.fsync(self.descriptor)

    def release(self, empty: bool = True) -> None:
        """Gives the lock back, and empties the file unless it says now who else holds it."""
        if self._pid != os.getpid():
            return  # it was closed when this process was forked
        _open_lock_files.discard(self)
        if empty:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, 0)
        with contextlib.suppress(OSError):
            # for a child that was just forked, and has not closed the file yet
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)


_open_lock_files: weakref.WeakSet[LockFile] = weakref.WeakSet()


def _close_after_fork() -> None:
    """Closes the lock files of the parent process in a child that was just forked."""
    for file in list(_open_lock_files):
        with contextlib.suppress(OSError):
            os.close(file.descriptor)
    _open_lock_files.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_after_fork)


def nearest(path: str | os.PathLike[str]) -> Path:
    """Returns the path, or the nearest directory above it that exists. A link counts as existing
    even if its target is missing.
    """
    place = Path(os.path.abspath(path))
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return place


def make_directories(path: Path) -> None:
    """Makes a directory and those above it where they are missing, each with DIRECTORY_MODE less
    the umask. Raises OSError.
    """
    missing = itertools.takewhile(lambda place: not os.path.lexists(place), (path, *path.parents))
    for place in reversed([*missing]):
        with contextlib.suppress(FileExistsError):  # another process makes the same
            os.mkdir(place, DIRECTORY_MODE)


def private_directory(path: Path) -> Path:
    """A directory for what a run leaves, made where it is not there yet, also those above it.
    Its mode is DIRECTORY_MODE less the umask.

    One that is there is used as it is, unless everybody may write to it and it is another user's:
    whoever can put files there decides what a run resumes from. Raises OutputError: it cannot be
    made, is no directory, cannot be written to, or is such a one.
    """
    path = Path(path)
    try:
        make_directories(path)
        os.scandir(path).close()  # that it is a directory, and can be read
        status = os.stat(path)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise OutputError(
            f"[files] {path} cannot be used as a directory: {reason}; name another"
        ) from problem
    if status.st_mode & stat.S_IWOTH and status.st_uid != os.geteuid():
        raise OutputError(
            f"[files] {path} belongs to user {status.st_uid} and everybody may write to it; "
            "name a directory of your own, or one in it"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise OutputError(
            f"[files] {path} cannot be written to; name another, or change its permissions"
        )
    return path


def foreign(status: os.stat_result) -> str | None:
    """Why a file or directory may be somebody else's doing: another user than this one or root
    owns it, or others may write to it. None: it may not. A directory such as /tmp, where all
    may make files and nobody may rename those of others, is no such one, and neither is what
    the user's own group, which is nobody else's, may write to.
    """
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}"
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & stat.S_IWOTH:
        return "everybody may write to it"
    if status.st_mode & stat.S_IWGRP and not _own_group(status.st_gid):
        return f"group {status.st_gid} may write to it"
    return None


def _own_group(number: int) -> bool:
    """Returns whether a group has this user alone in it: it has the user's name (as many systems
    make them).
    """
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def encode_json(value: Any) -> bytes:
    """The text of a JSON file; NaN and infinities are refused (ValueError)."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Writes one JSON value, whole or not at all; NaN and infinities are refused (ValueError)."""
    data = encode_json(value)
    write_whole(path, lambda file: file.write(data))


def read_json(path: Path, limit: int = JSON_LIMIT) -> Any:
    """The JSON value in a file, which must be a regular file of at most `limit` bytes.

    Raises DataError: it is not there, too long, no JSON, nested deeper than DEPTH, or names a key
    twice.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise DataError(f"{path} is no regular file")
            data = file.read(limit + 1)
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror}") from problem
    if len(data) > limit:
        raise DataError(f"{path} is longer than {limit} bytes; a file of this kind is not")
    return parse_json(data, str(path))


def parse_json(data: bytes, name: str) -> Any:
    """The value of JSON text; `name` says in messages what it is.

    Errors as `read_json`.

    What comes out can be written again: integers have at most DIGITS digits, other numbers are
    finite, and no text has half of a character (a lone surrogate), which no file and no terminal
    takes.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            raise DataError(f"{name} names a key twice")
        return mapping

    def refuse(word: str) -> Any:
        raise DataError(f"{name} has the number {word}, which JSON does not")

    def integer(text: str) -> int:
        if len(text) > DIGITS:
            raise DataError(
                f"{name} is not JSON that is read here: it has an integer of {len(text)} digits"
            )
        return int(text)

    def real(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise DataError(f"{name} has the number {text[:40]}, which is out of range")
        return number

    _check_depth(data, name)
    hooks = {
        "object_pairs_hook": once,
        "parse_constant": refuse,
        "parse_int": integer,
        "parse_float": real,
    }
    try:
        value = json.loads(data.decode("utf-8"), **hooks)
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeError, ValueError, RecursionError) as problem:
        raise DataError(f"{name} is not JSON: {printable(str(problem), limit=100)}") from problem
    return value


def _check_depth(data: bytes, name: str) -> None:
    """Refuses deep nesting before the parser meets it.

    Brackets inside texts count too: they are rare and few.
    """
    if data.count(b"[") + data.count(b"{") <= DEPTH:
        return
    depth = 0
    for byte in data:
        depth += (byte in b"[{") - (byte in b"]}")
        if depth > DEPTH:
            raise DataError(f"{name} is nested deeper than {DEPTH}")


def wait_until_read(descriptor: int, seconds: float = 0.5) -> None:
    """Waits until the reader of a pipe has taken what was written, but not for long: who ends a
    job at once may end the launcher's process that was to read the reason.
    """
    import termios

    until = time.monotonic() + seconds
    with contextlib.suppress(OSError, ValueError):
        while time.monotonic() < until:
            answer = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0")
            if not int.from_bytes(answer, "little"):
                break
            time.sleep(0.005)
    time.sleep(0.05)
