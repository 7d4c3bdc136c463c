"""Writes one checkpoint so that its directory is complete from the moment its name exists.

The files are written into a temporary directory and flushed, the manifest last. Then the directory
gets its name. A checkpoint that had this name is exchanged for it in one step, and removed after
that. store.py decides who may write and which checkpoints are kept.
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

from ..base.files import DIRECTORY_MODE, FILE_MODE, exchange, sync_directory
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
    """A directory that is not a checkpoint: it is being written (`tmp`) or removed (`old`).

    attempt, host, pid: the process that does so.
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
        """Returns the Aside with this name; None for any other name."""
        match = _ASIDE.fullmatch(name)
        if not match:
            return None
        step, kind, attempt, host, pid = match.groups()
        return cls(int(step), kind, int(attempt), host, int(pid))


def host_name() -> str:
    """Returns this machine's name, with "_" for characters that may not be in names of files."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", os.uname().nodename)[:64] or "unknown"


@contextlib.contextmanager
def name_checkpoint_in_errors(name: str, folder_name: str) -> Iterator[None]:
    """Turns errors of the block into an OutputError that names the checkpoint and its directory.

    It does so for OutputError, MemoryError and OSError.
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
            f"[checkpoint] {name} cannot be saved in {folder_name}: "
            f"{file_prefix}{problem.strerror}; those before it are as they were"
        ) from problem


def make_temporary_directory(folder: Path, aside: Aside) -> Path:
    """Makes the directory that a checkpoint is written into, and returns its path."""
    temporary = folder / aside.name
    # The name has our attempt, host and PID: it is left of a save of ours that could not clean up.
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(temporary)
    os.mkdir(temporary, DIRECTORY_MODE)
    return temporary


def place_checkpoint(
    folder: Path, aside: Aside, encoded: bytes, check_allowed: Callable[[], None]
) -> None:
    """Writes the manifest of a checkpoint whose files are complete, then gives it its name.

    If a checkpoint had this name, it is in the directory `aside` afterwards. `finish_replacement`
    removes it.

    encoded: the text of the manifest.
    check_allowed: raises if another process has taken over. It is called just before the name
        changes, so that the time in which both could write is as short as possible.
    """
    temporary = folder / aside.name
    final = folder / step_name(aside.step)
    _write_pieces(temporary / manifest.NAME, [memoryview(encoded)])
    sync_directory(temporary)
    check_allowed()
    if os.path.lexists(final):
        exchange(temporary, final, folder / aside._replace(kind="old").name)
    else:
        os.rename(temporary, final)


def write_file(
    folder: Path, stem: str, step: int, pieces: Sequence[TensorSlice], parts: bool
) -> File:
    """Writes a file of tensors, flushes it, and returns its entry for the manifest.

    parts: True for a file of parts of tensors, False for whole ones.

    Raises:
        NumericsError: a tensor that must be finite holds NaN or infinity.
        OutputError: the file cannot be written, or the format does not allow a tensor.
    """
    pieces_by_name = {piece.key if parts else piece.file_name: piece for piece in pieces}
    digests: list[str] = []

    def content() -> Iterator[memoryview]:
        """Yields header and data piece by piece, so that no tensor is copied as a whole."""
        yield memoryview(header)
        for entry in entries:
            piece = pieces_by_name[entry.name]
            digest = hashlib.sha256()
            for part in piece.parts(PIECE // piece.source.dtype.itemsize):
                check_finite(step, piece.stem, piece.name, part)
                digest.update(bytes_of(part))
                yield bytes_of(part)
            digests.append(digest.hexdigest())

    with name_checkpoint_in_errors(step_name(step), printable(str(folder.parent))):
        file_name = f"{stem}{SUFFIX}"
        if not is_file_name(file_name):
            raise OutputError(f"a file of a checkpoint is not called {ascii(stem)[:80]}")
        try:
            forms = {
                name: (piece.source.dtype, (piece.run.size,) if parts else piece.whole)
                for name, piece in pieces_by_name.items()
            }
            header, entries = make_header(forms)
        except OutputError as problem:
            raise OutputError(f"{file_name}: {problem}") from None
        _write_pieces(folder / file_name, content())
    if parts:
        entries = [
            entry._replace(
                whole=pieces_by_name[entry.name].whole, run=pieces_by_name[entry.name].run
            )
            for entry in entries
        ]
    size = len(header) + sum(entry.nbytes for entry in entries)
    return File(file_name, size, hashlib.sha256(header).hexdigest(), tuple(entries), tuple(digests))


def finish_replacement(folder: Path, aside: Aside) -> None:
    """Flushes the new name to the disk, then removes the checkpoint that had the name before.

    To be called after `place_checkpoint`. In this order a power failure leaves one of the two.
    """
    sync_directory(folder)
    if os.path.lexists(folder / aside.name):
        _remove_entry(folder / aside.name)


def remove_checkpoint(path: Path, aside: Aside) -> None:
    """Removes a checkpoint: its name first, so that no reader finds half of it."""
    aside_path = path.with_name(aside.name)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(aside_path)
    os.rename(path, aside_path)
    _remove_entry(aside_path)


def _remove_entry(path: Path) -> None:
    """Removes a directory, a link or a file that had the name of a checkpoint.

    Files that cannot be removed stay until the next start, for example a file that another machine
    reads over NFS.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _write_pieces(path: Path, parts: Iterable[memoryview]) -> None:
    """Writes a new file from parts, and flushes it to the disk.

    Raises:
        OSError: it cannot be written; `filename` of the error is its name.
    """
    try:
        descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE
        )
        with open(descriptor, "wb", buffering=0) as file:
            for part in parts:
                while part:  # a write may take less than it was passed
                    count = file.write(part)
                    if not count:
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
                    part = part[count:]
            os.fsync(descriptor)
    except OSError as problem:
        problem.filename = path.name
        raise
