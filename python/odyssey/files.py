"""Small files that must be there whole or not at all, and JSON from files that nobody has vouched for.

Written aside in the same directory, flushed to the disk, renamed, and the directory flushed: after a crash at any
moment the old file is there or the new one. What it is not: a format; what the files say is their owners' business.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from .errors import DataError, OutputError, printable

JSON_LIMIT = 16 << 20  # bytes; a longer one is refused before it is read
DEPTH = 32  # of nested lists and objects
DIGITS = 20  # of an integer, its sign included: 64 bits


def write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Lets `write` fill a file aside, then puts it in place of `path`.

    Raises:
        OSError: it could not be written; `path` is as it was and nothing is left aside.
    """
    aside = path.with_name(f".{path.name[:100]}.{os.getpid()}.tmp")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flushes the entries of a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_directory(path: Path) -> Path:
    """A directory for what a run leaves, made (mode 0700, also those above it) where it is not there yet.

    One that is there is used as it is, unless everybody may write to it and it is another user's: whoever can put
    files there decides what a run resumes from.

    Raises:
        OutputError: it cannot be made, is no directory, cannot be written to, or is such a one.
    """
    path = Path(path)
    try:
        missing = []
        for place in (path, *path.parents):
            if os.path.lexists(place):
                break
            missing.append(place)
        for place in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process makes the same
                os.mkdir(place, 0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise OutputError(f"[files] {path} cannot be used as a directory: {reason}; name another") from problem
    if found.st_mode & stat.S_IWOTH and found.st_uid != os.geteuid():
        raise OutputError(
            f"[files] {path} belongs to user {found.st_uid} and everybody may write to it; "
            "name a directory of your own, or one in it"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise OutputError(f"[files] {path} cannot be written to; name another, or change its permissions")
    return path


def write_json(path: Path, value: Any) -> None:
    """Writes one JSON value, whole or not at all; NaN and infinities are refused (ValueError)."""
    data = (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
    write_whole(path, lambda file: file.write(data))


def read_json(path: Path, limit: int = JSON_LIMIT) -> Any:
    """The JSON value in a file, which must be a regular file of at most `limit` bytes.

    Raises:
        DataError: it is not there, too long, no JSON, nested deeper than DEPTH, or names a key twice.
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
    """The value of JSON text; `name` says in messages what it is. Errors as `read_json`.

    What comes out can be written again: integers have at most DIGITS digits, other numbers are finite, and no text has
    half of a character (a lone surrogate), which no file and no terminal takes.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise DataError(f"{name} names a key twice")
        return found

    def refuse(word: str) -> Any:
        raise DataError(f"{name} has the number {word}, which JSON does not")

    def integer(text: str) -> int:
        if len(text) > DIGITS:
            raise DataError(f"{name} is not JSON that is read here: it has an integer of {len(text)} digits")
        return int(text)

    def real(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise DataError(f"{name} has the number {text[:40]}, which is out of range")
        return number

    _check_depth(data, name)
    hooks = {"object_pairs_hook": once, "parse_constant": refuse, "parse_int": integer, "parse_float": real}
    try:
        found = json.loads(data.decode("utf-8"), **hooks)
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(found, ensure_ascii=False).encode()
    except (UnicodeError, ValueError, RecursionError) as problem:
        raise DataError(f"{name} is not JSON: {printable(str(problem), limit=100)}") from problem
    return found


def _check_depth(data: bytes, name: str) -> None:
    """Refuses deep nesting before the parser meets it. Brackets inside texts count too: they are rare and few."""
    depth = 0
    if data.count(b"[") + data.count(b"{") <= DEPTH:
        return
    for byte in data:
        if byte in b"[{":
            depth += 1
            if depth > DEPTH:
                raise DataError(f"{name} is nested deeper than {DEPTH}")
        elif byte in b"]}":
            depth -= 1
