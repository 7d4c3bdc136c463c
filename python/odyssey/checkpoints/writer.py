"""Writes one checkpoint: aside, flushed, manifest last, then in place of nothing or of the one
with its name.

A checkpoint's directory is complete from the moment its name exists. store.py decides who may
write, and what is kept.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..base.files import exchange, sync_directory
from ..errors import OutputError, printable
from . import manifest
from .header import make_header
from .manifest import File
from .reader import PIECE, bytes_of
from .snapshot import SUFFIX, TensorSlice, check_finite, is_file_name, step_name

_ASIDE = re.compile(
    r"\.step_([0-9]{8,18})\.(tmp|old)\.([0-9]{1,18})\.([A-Za-z0-9_.-]{1,64})\.([0-9]{1,10})"
)


class Aside(NamedTuple):
    """A directory that is no checkpoint: one that is being written (`tmp`) or removed (`old`),
    and by whom.
    """

    step: int
    kind: str
    attempt: int
    host: str
    pid: int

    @property
    def name(self) -> str:
        return f".{step_name(self.step)}.{self.kind}.{self.attempt}.{self.host}.{self.pid}"

    @classmethod
    def parse(cls, name: str) -> Aside | None:
        match = _ASIDE.fullmatch(name)
        return (
            cls(int(match[1]), match[2], int(match[3]), match[4], int(match[5])) if match else None
        )


def host_name() -> str:
    """This machine's name as it stands in the names of files."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", os.uname().nodename)[:64] or "unknown"


@contextlib.contextmanager
def saying(name: str, place: str) -> Iterator[None]:
    """Raises OutputError, naming the checkpoint and its directory, for what goes wrong while it
    is written.
    """
    try:
        yield
    except OutputError as problem:
        raise OutputError(f"[checkpoint] {name} is not saved: {problem}") from None
    except MemoryError:
        reason = "out of memory; those before it are as they were"
        raise OutputError(f"[checkpoint] {name} is not saved: {reason}") from None
    except OSError as problem:
        file_prefix = (
            printable(os.path.basename(str(problem.filename))) + ": " if problem.filename else ""
        )
        raise OutputError(
            f"[checkpoint] {name} cannot be saved in {place}: {file_prefix}{problem.strerror}; "
            "those before it are as they were"
        ) from problem


def begin(folder: Path, aside: Aside) -> Path:
    """Makes the directory that a checkpoint is written into."""
    temporary = folder / aside.name
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(temporary)  # our own, from a save that could not clean up
    os.mkdir(temporary, 0o700)
    return temporary


def place(folder: Path, aside: Aside, encoded: bytes, allowed: Callable[[], None]) -> None:
    """Writes the manifest of a checkpoint whose files are there, then gives it its name;
    `allowed` raises if somebody else has taken over, and is asked last. What had its name
    before lies aside afterwards: see `settle`.
    """
    temporary = folder / aside.name
    final = folder / step_name(aside.step)
    _write_file(temporary / manifest.NAME, [memoryview(encoded)])
    sync_directory(temporary)
    allowed()
    if os.path.lexists(final):
        exchange(temporary, final, folder / aside._replace(kind="old").name)
    else:
        os.rename(temporary, final)


def write_file(
    folder: Path, stem: str, step: int, pieces: Sequence[TensorSlice], parts: bool
) -> File:
    """Writes a file of whole tensors, or of parts, and flushes it; copies none.

    Raises NumericsError, OutputError.
    """
    pieces_by_name = {piece.key if parts else piece.name: piece for piece in pieces}
    digests: list[str] = []

    def content() -> Iterator[memoryview]:
        yield memoryview(header)
        for place in places:
            piece = pieces_by_name[place.name]
            digest = hashlib.sha256()
            for part in piece.parts(PIECE // piece.source.dtype.itemsize):
                check_finite(step, piece.stem, piece.name, part)
                digest.update(bytes_of(part))
                yield bytes_of(part)
            digests.append(digest.hexdigest())

    with saying(step_name(step), printable(str(folder.parent))):
        name = f"{stem}{SUFFIX}"
        if not is_file_name(name):
            raise OutputError(f"a file of a checkpoint is not called {ascii(stem)[:80]}")
        try:
            forms = {
                key: (one.source.dtype, (one.run.size,) if parts else one.whole)
                for key, one in pieces_by_name.items()
            }
            header, places = make_header(forms)
        except OutputError as problem:
            raise OutputError(f"{name}: {problem}") from None
        _write_file(folder / name, content())
    if parts:
        places = [
            one._replace(whole=pieces_by_name[one.name].whole, run=pieces_by_name[one.name].run)
            for one in places
        ]
    size = len(header) + sum(one.nbytes for one in places)
    return File(name, size, hashlib.sha256(header).hexdigest(), tuple(places), tuple(digests))


def settle(folder: Path, aside: Aside) -> None:
    """After `write`: flushes the new name to the disk, then removes what had it before."""
    sync_directory(folder)
    if os.path.lexists(folder / aside.name):
        _discard(folder / aside.name)


def remove(path: Path, aside: Aside) -> None:
    """Removes a checkpoint: its name first, so that it is never seen in part."""
    aside_path = path.with_name(aside.name)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(aside_path)
    os.rename(path, aside_path)
    _discard(aside_path)


def _discard(path: Path) -> None:
    """Removes what had a checkpoint's name; that may have been a link or a file.

    What cannot be removed, such as a file that another machine reads over NFS, stays until the next
    start.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _write_file(path: Path, parts: Iterable[memoryview]) -> None:
    """Writes a new file and flushes it to the disk; errors name it."""
    try:
        descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        with open(descriptor, "wb", buffering=0) as file:
            for part in parts:
                while part:  # a disk may take less than it was given
                    count = file.write(part)
                    if not count:
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
                    part = part[count:]
            os.fsync(descriptor)
    except OSError as problem:
        problem.filename = path.name
        raise
