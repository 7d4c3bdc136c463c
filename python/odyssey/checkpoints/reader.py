"""Opens one checkpoint, verifies every byte of it, and reads it.

Never writes; never follows a link inside.

Sizes are compared with the files before anything is allocated; what is hashed is what is given
back.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import os
import stat
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from . import manifest
from .header import DTYPES, ElementRun, Entry, encode_header
from .manifest import File, Manifest, parse_manifest
from .snapshot import SUFFIX, Snapshot, step_name, step_of

PIECE = 1 << 20  # bytes read and hashed at a time
# bytes from which on threads are worth starting: hashing runs at about 1 GB/s
THREADS_FROM_BYTES = 4 << 20


class Stored:
    """A tensor of a checkpoint that is read when it is asked for, whole or in part.

    What is read is hashed.
    """

    def __init__(
        self, folder: Folder, parts: list[tuple[int, File, Entry, str]], make: Any
    ) -> None:
        one = parts[0][2]
        self.dtype = np.dtype(DTYPES[one.dtype])
        self.shape = one.shape if one.whole is None else one.whole
        self.size = math.prod(self.shape)
        self._folder = folder
        self._parts = parts
        self._make = make

    def read(self, lo: int, out: np.ndarray) -> None:
        """Fills an array (n,) with elements lo to lo + n; an empty one: checks all.

        Raises CheckpointError.
        """
        for start, file, tensor, digest in self._parts:
            run = tensor.run or ElementRun(0, self.size, self.size, 1)
            if out.size == 0 or (run.start < lo + out.size and run.stop > lo):
                self._take(start, file, tensor, run, digest, lo, out)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self._make(self.shape, self.dtype)
        self.read(0, array.reshape(-1))
        return array if dtype is None else array.astype(dtype, copy=False)

    def _take(
        self,
        data_start: int,
        file: File,
        tensor: Entry,
        run: ElementRun,
        digest: str,
        lo: int,
        out: np.ndarray,
    ) -> None:
        """Reads a part in pieces: into `out`, which begins at element lo, or past it."""
        hasher = hashlib.sha256()
        hi = lo + len(out)
        step = PIECE // self.dtype.itemsize
        buffer = np.empty(min(step, run.size), self.dtype)
        with _file(self._folder.descriptor, file.name) as (descriptor, _), _naming(file.name):
            for a in range(0, run.size, step):
                spans = list(run.spans(a, min(a + step, run.size))) if len(out) else []
                direct = len(spans) == 1 and lo <= spans[0][1] and spans[0][1] + spans[0][2] <= hi
                piece = out[spans[0][1] - lo :][: spans[0][2]] if direct else buffer[: run.size - a]
                _read_into(
                    descriptor, bytes_of(piece), data_start + tensor.begin + a * self.dtype.itemsize
                )
                hasher.update(piece)
                for i, j, n in [] if direct else spans:
                    first = max(j, lo)
                    last = min(j + n, hi)
                    if first < last:
                        out[first - lo : last - lo] = piece[i - a + first - j : i - a + last - j]
            if not hmac.compare_digest(hasher.hexdigest(), digest):
                raise CheckpointError(f"{tensor.name} does not match its SHA-256")


class Folder:
    """The directory of a checkpoint, open as long as there is somebody to read from it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)


def opened(path: Path, key: bytes | None = None, follow: bool = False) -> tuple[Snapshot, Manifest]:
    """The checkpoint in a directory, of tensors that are read when they are asked for (Stored);
    `follow` allows the directory itself to be a symbolic link. CheckpointError says what is
    wrong with manifest, sizes and headers.
    """
    from ..core.offload import maker

    make = maker(np.empty)  # on this thread
    with _open(
        "the directory", path, os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW)
    ) as directory:
        check_owner(os.fstat(directory))
        parsed_manifest, digest = _manifest(directory, path, key)
        starts = {}
        for file in parsed_manifest.files:
            with _file(directory, file.name) as (descriptor, size), _naming(file.name):
                if size != file.size:
                    raise CheckpointError(f"it has {size} bytes, not {file.size}")
                starts[file.name] = _check_header(descriptor, file)
        folder = Folder(directory)
    stems = [
        file.name.removesuffix(SUFFIX)
        for file in parsed_manifest.files
        if parsed_manifest.version == manifest.WHOLE
    ]
    arrays: dict[str, dict[str, Any]] = {stem: {} for stem in stems}
    for (stem, name), parts in parsed_manifest.tensors.items():
        placed = [(starts[file.name], file, *one) for file, *one in parts]
        arrays.setdefault(stem, {})[name] = Stored(folder, placed, make)
    return Snapshot(
        parsed_manifest.step, arrays, parsed_manifest.values, source=(os.path.abspath(path), digest)
    ), parsed_manifest


def load(
    path: Path, key: bytes | None = None, follow: bool = False, whole: bool = True
) -> tuple[Snapshot, Manifest]:
    """Opens as `opened` does, with every byte checked, and, if `whole`, all arrays in memory."""
    snapshot, parsed_manifest = opened(path, key, follow)
    keys = list(parsed_manifest.tensors)

    def read_tensor(key: tuple[str, str]) -> np.ndarray | None:
        tensor = snapshot.arrays[key[0]][key[1]]
        return np.asarray(tensor) if whole else tensor.read(0, np.empty(0, tensor.dtype))

    try:
        arrays = in_threads(read_tensor, keys, parsed_manifest.nbytes)
    except MemoryError:
        raise CheckpointError(
            f"its {parsed_manifest.nbytes} bytes do not fit into memory"
        ) from None
    if whole:
        for (stem, name), array in zip(keys, arrays, strict=True):
            snapshot.arrays[stem][name] = array
        snapshot.source = None
    return snapshot, parsed_manifest


def verify(path: Path, key: bytes | None = None, follow: bool = False) -> Manifest:
    """Reads and checks every byte as `load` does, in constant memory: keeps none."""
    return load(path, key, follow, whole=False)[1]


def bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of an array in C order; of any shape and strides, also an empty one."""
    return np.ascontiguousarray(array.reshape(-1)).view(np.uint8).data


def check_owner(status: os.stat_result) -> None:
    """Raises CheckpointError for a directory in which anybody could have put a file, or another
    one in its place.
    """
    if status.st_mode & stat.S_IWOTH and status.st_uid != os.geteuid():
        raise CheckpointError(f"it belongs to user {status.st_uid} and everybody may write to it")


def in_threads(work: Callable[[Any], Any], items: Sequence[Any], nbytes: int) -> list[Any]:
    """Returns what `work` gives for each item; if there is much to hash, on as many threads as
    cores, at most 4.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if nbytes >= THREADS_FROM_BYTES and cores > 1:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(4, cores)) as pool:
            try:
                running = [pool.submit(work, item) for item in items]
            # a save that goes on while the interpreter ends: no new threads any more
            except RuntimeError:
                pass
            else:
                return [one.result() for one in running]
    return [work(item) for item in items]


def _manifest(directory: int, path: Path, key: bytes | None) -> tuple[Manifest, str]:
    """The manifest, and the SHA-256 of all of its text."""
    with _file(directory, manifest.NAME) as (descriptor, size):
        if size > manifest.MAX_BYTES:
            raise CheckpointError(f"{manifest.NAME} is longer than {manifest.MAX_BYTES} bytes")
        data = bytearray(size)
        with _naming(manifest.NAME):
            _read_into(descriptor, memoryview(data), 0)
    parsed_manifest = parse_manifest(bytes(data), key)
    name_step = step_of(path.name)
    if name_step is not None and name_step != parsed_manifest.step:
        raise CheckpointError(f"{manifest.NAME} is that of {step_name(parsed_manifest.step)}")
    return parsed_manifest, hashlib.sha256(data).hexdigest()


def _check_header(descriptor: int, file: File) -> int:
    """Compares a file's header with that of the manifest's tensors; says where its data begins."""
    header = encode_header(file.tensors)
    size = len(header) + sum(tensor.nbytes for tensor in file.tensors)
    if size != file.size:
        raise CheckpointError(f"header and tensors fill {size} bytes, the file has {file.size}")
    stored_header = bytearray(len(header))
    _read_into(descriptor, memoryview(stored_header), 0)
    if stored_header != header or hashlib.sha256(header).hexdigest() != file.header_sha256:
        raise CheckpointError("its header does not match its SHA-256")
    return len(header)


@contextlib.contextmanager
def _open(label: str, path: Path | str, flags: int, within: int | None = None) -> Iterator[int]:
    """A file or directory, open; `label` is its name in messages."""
    try:
        descriptor = os.open(path, flags | os.O_RDONLY | os.O_CLOEXEC, dir_fd=within)
    except FileNotFoundError as problem:
        raise CheckpointError(f"{label} is missing") from problem
    except OSError as problem:
        raise CheckpointError(f"{label} cannot be opened: {problem.strerror}") from problem
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _file(directory: int, name: str) -> Iterator[tuple[int, int]]:
    """A regular file of a directory, open, and its size."""
    with _open(name, name, os.O_NOFOLLOW | os.O_NONBLOCK, directory) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{name} is no regular file")
        yield descriptor, status.st_size


def _read_into(descriptor: int, target: memoryview, offset: int) -> None:
    """Fills `target` from the bytes at `offset`."""
    filled = 0
    while filled < len(target):
        try:
            count = os.preadv(descriptor, [target[filled:]], offset + filled)
        except OSError as problem:
            raise CheckpointError(f"it cannot be read: {problem.strerror}") from problem
        if count == 0:
            raise CheckpointError(f"it ends {len(target) - filled} bytes early")
        filled += count


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Puts a file's name before what is wrong with it."""
    try:
        yield
    except CheckpointError as problem:
        raise CheckpointError(f"{name}: {problem}") from problem.__cause__
