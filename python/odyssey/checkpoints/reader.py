"""Opens one checkpoint, verifies every byte of it, and reads it.

It never writes, and never follows a link inside the directory. It compares sizes with the files
before it allocates anything. The bytes that it hashes are the bytes that it returns: a file is
never read a second time after its check.
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
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError
from . import manifest
from .header import DTYPES, ElementRun, Entry, encode_header
from .manifest import File, Manifest, parse_manifest
from .snapshot import SUFFIX, Snapshot, step_name, step_of

PIECE = 1 << 20  # bytes read and hashed at a time
# bytes from which on threads are worth starting: hashing runs at about 1 GB/s
THREADS_FROM_BYTES = 4 << 20


class PlacedPart(NamedTuple):
    """A part of a tensor, or a whole one, and its place in a file.

    data_start: the offset in the file at which the data of its tensors start.
    digest: the SHA-256 of the part, in hex.
    """

    data_start: int
    file: File
    entry: Entry
    digest: str


class Stored:
    """A tensor of a checkpoint that is read when it is asked for, whole or in part.

    Whatever is read is hashed and compared with the manifest.
    """

    def __init__(self, folder: Folder, parts: list[PlacedPart], make: Any) -> None:
        """make: allocates an array of a shape and a dtype."""
        entry = parts[0].entry
        self.dtype = np.dtype(DTYPES[entry.dtype])
        self.shape = entry.shape if entry.whole is None else entry.whole
        self.size = math.prod(self.shape)
        self._folder = folder
        self._parts = parts
        self._make = make

    def read(self, lo: int, out: np.ndarray) -> None:
        """Fills `out`, of shape (n,), with the elements lo to lo + n, counted in C order.

        With an empty `out` nothing is copied, but every part is read and checked.

        Raises:
            CheckpointError: a file cannot be read, or differs from its SHA-256.
        """
        hi = lo + out.size
        for part in self._parts:
            run = part.entry.run or ElementRun(start=0, length=self.size, step=self.size, count=1)
            if out.size == 0 or (run.start < hi and run.stop > lo):
                self._read_part(part, run, lo, out)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self._make(self.shape, self.dtype)
        self.read(0, array.reshape(-1))
        return array if dtype is None else array.astype(dtype, copy=False)

    def _read_part(self, part: PlacedPart, run: ElementRun, lo: int, out: np.ndarray) -> None:
        """Reads one part, checks its SHA-256, and fills the elements of `out` that it holds.

        The part is read from its first to its last byte, because its hash covers all of it, in
        pieces of PIECE bytes, so memory does not depend on its size.

        run: the elements of the tensor that the part holds.
        lo: the number, in the tensor, of the first element of `out`.

        Raises:
            CheckpointError: the file cannot be read, or the part differs from its SHA-256.
        """
        hasher = hashlib.sha256()
        hi = lo + len(out)
        itemsize = self.dtype.itemsize
        elements_per_piece = PIECE // itemsize
        file_offset = part.data_start + part.entry.begin
        buffer = np.empty(min(elements_per_piece, run.size), self.dtype)
        file_name = part.file.name
        with (
            _open_file(self._folder.descriptor, file_name) as (descriptor, _),
            _prefix_errors(file_name),
        ):
            for piece_start in range(0, run.size, elements_per_piece):
                piece_stop = min(piece_start + elements_per_piece, run.size)
                piece = buffer[: piece_stop - piece_start]
                spans = list(run.spans(piece_start, piece_stop)) if len(out) else []
                if len(spans) == 1:
                    _, element, count = spans[0]
                    if lo <= element and element + count <= hi:
                        # All of the piece is one stretch of `out`: read it there without a copy.
                        piece = out[element - lo :][:count]
                        spans = []
                _read_into(descriptor, bytes_of(piece), file_offset + piece_start * itemsize)
                hasher.update(piece)
                for run_index, element, count in spans:
                    first = max(element, lo)
                    last = min(element + count, hi)
                    if first < last:
                        # the place of element 0 of the tensor, counted from the piece's start
                        shift = run_index - piece_start - element
                        out[first - lo : last - lo] = piece[first + shift : last + shift]
            if not hmac.compare_digest(hasher.hexdigest(), part.digest):
                raise CheckpointError(f"{part.entry.name} does not match its SHA-256")


class Folder:
    """The directory of a checkpoint, open as long as a tensor may be read from it.

    The tensors hold it. Its descriptor is closed with the last of them.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)


def open_snapshot(
    path: Path, key: bytes | None = None, follow: bool = False
) -> tuple[Snapshot, Manifest]:
    """Opens the checkpoint in a directory, and returns its snapshot and its manifest.

    The tensors of the snapshot are Stored: they are read, and checked, when they are asked for.

    key: the key with which the manifest must be signed; None accepts any.
    follow: the directory itself may be a symbolic link.

    Raises:
        CheckpointError: the manifest, the size of a file or a header is wrong.
    """
    from ..core.offload import maker

    make = maker(np.empty)  # on this thread
    with _open_path(
        "the directory", path, os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW)
    ) as directory:
        check_owner(os.fstat(directory))
        parsed_manifest, manifest_digest = _read_manifest(directory, path, key)
        data_starts = {}
        for file in parsed_manifest.files:
            with _open_file(directory, file.name) as (descriptor, size), _prefix_errors(file.name):
                if size != file.size:
                    raise CheckpointError(f"it has {size} bytes, not {file.size}")
                data_starts[file.name] = _check_header(descriptor, file)
        folder = Folder(directory)
    arrays: dict[str, dict[str, Any]] = {}
    if parsed_manifest.version in (manifest.WHOLE, manifest.CAPTURED_WHOLE):
        # also the files without tensors; a file of parts has no stem of its own in a snapshot
        arrays = {file.name.removesuffix(SUFFIX): {} for file in parsed_manifest.files}
    for (stem, name), parts in parsed_manifest.tensors.items():
        placed_parts = [
            PlacedPart(data_starts[file.name], file, entry, digest) for file, entry, digest in parts
        ]
        arrays.setdefault(stem, {})[name] = Stored(folder, placed_parts, make)
    source = (os.path.abspath(path), manifest_digest)
    snapshot = Snapshot(parsed_manifest.step, arrays, parsed_manifest.values, source=source)
    return snapshot, parsed_manifest


def load(
    path: Path, key: bytes | None = None, follow: bool = False, whole: bool = True
) -> tuple[Snapshot, Manifest]:
    """Opens a checkpoint as `open_snapshot` does, and checks every byte of it.

    whole: the arrays of the snapshot are in memory; otherwise they are Stored.

    Raises:
        CheckpointError: as `open_snapshot`; or a tensor is damaged, or memory is too small.
    """
    snapshot, parsed_manifest = open_snapshot(path, key, follow)
    tensor_keys = list(parsed_manifest.tensors)

    def read_tensor(tensor_key: tuple[str, str]) -> np.ndarray | None:
        stem, name = tensor_key
        tensor = snapshot.arrays[stem][name]
        if whole:
            return np.asarray(tensor)
        tensor.read(0, np.empty(0, tensor.dtype))  # checks it, and keeps nothing
        return None

    try:
        arrays = map_in_threads(read_tensor, tensor_keys, parsed_manifest.nbytes)
    except MemoryError:
        raise CheckpointError(
            f"its {parsed_manifest.nbytes} bytes do not fit into memory"
        ) from None
    if whole:
        for (stem, name), array in zip(tensor_keys, arrays, strict=True):
            snapshot.arrays[stem][name] = array
        snapshot.source = None  # nothing is read from the directory any more
    return snapshot, parsed_manifest


def verify(path: Path, key: bytes | None = None, follow: bool = False) -> Manifest:
    """Checks every byte of a checkpoint as `load` does, in constant memory; returns its manifest.

    Raises:
        CheckpointError: as `load`.
    """
    return load(path, key, follow, whole=False)[1]


def bytes_of(array: np.ndarray) -> memoryview:
    """Returns the bytes of an array in C order.

    Any shape and strides will do, also an empty array. A contiguous array is not copied, so bytes
    that are written to the result are written to the array.
    """
    return np.ascontiguousarray(array.reshape(-1)).view(np.uint8).data


def check_owner(status: os.stat_result) -> None:
    """Raises CheckpointError for a directory of another user that everybody may write to.

    Anybody could have put a file into it, or replaced one.
    """
    if status.st_mode & stat.S_IWOTH and status.st_uid != os.geteuid():
        raise CheckpointError(f"it belongs to user {status.st_uid} and everybody may write to it")


def map_in_threads(work: Callable[[Any], Any], items: Sequence[Any], nbytes: int) -> list[Any]:
    """Returns the results of `work` for each item, in order.

    From THREADS_FROM_BYTES on it uses one thread per core, at most 4. nbytes: bytes of all items.
    """
    core_count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if nbytes >= THREADS_FROM_BYTES and core_count > 1:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(4, core_count)) as pool:
            try:
                futures = [pool.submit(work, item) for item in items]
            except RuntimeError:
                # The interpreter is ending and starts no threads any more. A save that is still
                # under way continues below, on this thread.
                pass
            else:
                return [future.result() for future in futures]
    return [work(item) for item in items]


def _read_manifest(directory: int, path: Path, key: bytes | None) -> tuple[Manifest, str]:
    """Returns the manifest of a directory, and the SHA-256 of its text in hex.

    Raises:
        CheckpointError: it is missing, too long or damaged, or of another step than the name of
            the directory.
    """
    with _open_file(directory, manifest.NAME) as (descriptor, size):
        if size > manifest.MAX_BYTES:
            raise CheckpointError(f"{manifest.NAME} is longer than {manifest.MAX_BYTES} bytes")
        data = bytearray(size)
        with _prefix_errors(manifest.NAME):
            _read_into(descriptor, memoryview(data), 0)
    parsed_manifest = parse_manifest(bytes(data), key)
    name_step = step_of(path.name)
    if name_step is not None and name_step != parsed_manifest.step:
        raise CheckpointError(f"{manifest.NAME} is that of {step_name(parsed_manifest.step)}")
    return parsed_manifest, hashlib.sha256(data).hexdigest()


def _check_header(descriptor: int, file: File) -> int:
    """Checks that a file starts with the header of its tensors in the manifest.

    Returns the length of the header, which is the offset of the data.

    Raises:
        CheckpointError: the header is another one, or sizes differ.
    """
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
def _open_path(
    label: str, path: Path | str, flags: int, within: int | None = None
) -> Iterator[int]:
    """Opens a file or directory for the block; its value is the descriptor.

    label: the name in messages.
    within: the descriptor of the directory in which `path` is looked up.

    Raises:
        CheckpointError: it is missing, or cannot be opened.
    """
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
def _open_file(directory: int, name: str) -> Iterator[tuple[int, int]]:
    """Opens a regular file of a directory for the block; its value is (descriptor, size).

    Raises:
        CheckpointError: it is missing, no regular file, or cannot be opened.
    """
    # O_NONBLOCK: opening a named pipe must not wait for a writer
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    with _open_path(name, name, flags, within=directory) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{name} is no regular file")
        yield descriptor, status.st_size


def _read_into(descriptor: int, target: memoryview, offset: int) -> None:
    """Fills all of `target` with the bytes of a file from `offset` on.

    Raises:
        CheckpointError: the file cannot be read, or ends too early.
    """
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
def _prefix_errors(name: str) -> Iterator[None]:
    """Puts the name of a file before the text of a CheckpointError that the block raises."""
    try:
        yield
    except CheckpointError as problem:
        raise CheckpointError(f"{name}: {problem}") from problem.__cause__
