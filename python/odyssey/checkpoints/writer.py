"""Writes one checkpoint: aside, flushed, manifest last, then in place of nothing or of the one with its name.

A checkpoint's directory is complete from the moment its name exists. Who may write, what is kept and what is removed is
decided in store.py.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..base.files import exchange, sync_directory
from ..errors import CheckpointError, OutputError
from . import manifest
from .header import make_header
from .manifest import File, Manifest, parse_manifest
from .reader import bytes_of, in_threads
from .snapshot import SUFFIX, Snapshot, is_file_name, step_name

_ASIDE = re.compile(r"\.step_([0-9]{8,18})\.(tmp|old)\.([0-9]{1,18})\.([A-Za-z0-9_.-]{1,64})\.([0-9]{1,10})")


class Aside(NamedTuple):
    """A directory that is no checkpoint: one that is being written (`tmp`) or removed (`old`), and by whom."""

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
        found = _ASIDE.fullmatch(name)
        return cls(int(found[1]), found[2], int(found[3]), found[4], int(found[5])) if found else None


def host_name() -> str:
    """This machine's name as it stands in the names of files."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", os.uname().nodename)[:64] or "unknown"


class Planned:
    """The files of a checkpoint before they are written: headers and digests of everything."""

    def __init__(self, snapshot: Snapshot, attempt: int, key: bytes | None = None) -> None:
        """Its arrays are contiguous and stay as they are until the checkpoint is written. Raises OutputError for what a
        checkpoint cannot have, and would be refused when it is read."""
        arrays = snapshot.arrays
        self.headers: list[bytes] = []
        self.data: list[list[memoryview]] = []
        tensors = []
        if not 0 < len(arrays) <= manifest.FILES_LIMIT:
            raise OutputError(f"a checkpoint has 1 to {manifest.FILES_LIMIT} files, not {len(arrays)}")
        for stem in arrays:
            if not isinstance(stem, str) or not is_file_name(stem + SUFFIX):
                raise OutputError(f"a file of a checkpoint is not called {ascii(stem)[:80]}")
            try:
                header, places = make_header(arrays[stem])
            except OutputError as problem:
                raise OutputError(f"{stem}{SUFFIX}: {problem}") from None
            self.headers.append(header)
            self.data.append([bytes_of(arrays[stem][one.name]) for one in places])
            tensors.append(tuple(places))
        flat = [part for parts in self.data for part in parts]
        digests = iter(in_threads(_digest, flat, sum(len(part) for part in flat)))
        files = []
        for stem, header, places, parts in zip(arrays, self.headers, tensors, self.data, strict=True):
            size = len(header) + sum(len(part) for part in parts)
            own = tuple(next(digests) for _ in places)
            files.append(File(stem + SUFFIX, size, hashlib.sha256(header).hexdigest(), places, own))
        self.manifest = Manifest(snapshot.step, attempt, snapshot.values, tuple(files), signed=key is not None)
        self.encoded = self.manifest.encoded(key)
        try:
            readable = parse_manifest(self.encoded, key) == self.manifest
        except CheckpointError as problem:
            raise OutputError(f"it could not be read again: {problem}") from None
        if not readable:
            raise OutputError("it would not be read again as it is: its values change in JSON")

    def write(self, folder: Path, aside: Aside, allowed: Callable[[], None]) -> None:
        """Puts the checkpoint into `folder`; `allowed` raises if somebody else has taken over, and is asked last.

        What had its name before lies aside afterwards: see `settle`. Raises OSError: with the file in `filename`; what
        was there before is as it was, and nothing is left aside.
        """
        temporary, final = folder / aside.name, folder / step_name(aside.step)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(temporary)  # our own, from a save that could not clean up
        os.mkdir(temporary, 0o700)
        try:
            for file, header, parts in zip(self.manifest.files, self.headers, self.data, strict=True):
                _write_file(temporary / file.name, [memoryview(header), *parts])
            _write_file(temporary / manifest.NAME, [memoryview(self.encoded)])
            sync_directory(temporary)
            allowed()
            if os.path.lexists(final):
                exchange(temporary, final, folder / aside._replace(kind="old").name)
            else:
                os.rename(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def settle(folder: Path, aside: Aside) -> None:
    """After `write`: flushes the new name to the disk, then removes what had it before."""
    sync_directory(folder)
    if os.path.lexists(folder / aside.name):
        _discard(folder / aside.name)


def remove(path: Path, aside: Aside) -> None:
    """Removes a checkpoint: its name first, so that it is never seen in part."""
    gone = path.with_name(aside.name)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(gone)
    os.rename(path, gone)
    _discard(gone)


def _discard(path: Path) -> None:
    """Removes what had a checkpoint's name; that may have been a link or a file.

    It is no checkpoint any more: what cannot be removed, such as a file that another machine reads over NFS, stays
    until the next start.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _digest(part: memoryview) -> str:
    return hashlib.sha256(part).hexdigest()


def _write_file(path: Path, parts: list[memoryview]) -> None:
    """Writes a new file and flushes it to the disk; errors name it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
