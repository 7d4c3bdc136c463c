"""Opens one checkpoint, verifies every byte of it, and reads it. Never writes; never follows a link inside.

Sizes are compared with the files before anything is allocated; what is hashed is what is given back.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from . import manifest
from .header import DTYPES, Tensor, encode_header
from .manifest import File, Manifest, parse_manifest
from .snapshot import SUFFIX, Snapshot, step_name, step_of

PIECE = 1 << 20  # bytes hashed at a time when nothing is kept
THREADS_FROM = 4 << 20  # bytes from which on threads are worth starting: hashing runs at about 1 GB/s


def load(path: Path, key: bytes | None = None, follow: bool = False) -> tuple[Snapshot, Manifest]:
    """The checkpoint in a directory; `follow` allows the directory itself to be a symbolic link. CheckpointError says
    what is wrong with which file and tensor."""
    from ..core.offload import maker

    make = maker(np.empty)  # on this thread
    arrays: dict[str, dict[str, np.ndarray]] = {}

    def keep(descriptor: int, start: int, file: File, tensor: Tensor) -> str:
        array = make(tensor.shape, DTYPES[tensor.dtype])
        flat = bytes_of(array)
        _read_into(descriptor, flat, start + tensor.begin)
        arrays[file.name.removesuffix(SUFFIX)][tensor.name] = array
        return hashlib.sha256(flat).hexdigest()

    with _opened(path, follow) as directory:
        found = _manifest(directory, path, key)
        for file in found.files:
            arrays[file.name.removesuffix(SUFFIX)] = dict.fromkeys(tensor.name for tensor in file.tensors)  # its order
        _check_files(directory, found, keep)
    return Snapshot(found.step, arrays, found.values), found


def verify(path: Path, key: bytes | None = None, follow: bool = False) -> Manifest:
    """As `load`, in constant memory: reads and checks every byte, keeps none."""

    def look(descriptor: int, start: int, file: File, tensor: Tensor) -> str:
        digest, at = hashlib.sha256(), tensor.begin
        piece = memoryview(bytearray(min(PIECE, tensor.nbytes)))
        while at < tensor.end:
            part = piece[: tensor.end - at]
            _read_into(descriptor, part, start + at)
            digest.update(part)
            at += len(part)
        return digest.hexdigest()

    with _opened(path, follow) as directory:
        found = _manifest(directory, path, key)
        _check_files(directory, found, look)
    return found


def bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of an array in C order; of any shape, also an empty one."""
    return array.reshape(-1).view(np.uint8).data


def check_owner(status: os.stat_result) -> None:
    """Raises CheckpointError for a directory in which anybody could have put a file, or another one in its place."""
    if status.st_mode & stat.S_IWOTH and status.st_uid != os.geteuid():
        raise CheckpointError(f"it belongs to user {status.st_uid} and everybody may write to it")


def in_threads(work: Callable[[Any], Any], items: Sequence[Any], nbytes: int) -> list[Any]:
    """What `work` gives for each item; on as many threads as there are cores, at most 4, if there is much to hash."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if nbytes >= THREADS_FROM and cores > 1:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(4, cores)) as pool:
            try:
                running = [pool.submit(work, item) for item in items]
            except RuntimeError:  # a save that goes on while the interpreter ends: no new threads any more
                pass
            else:
                return [one.result() for one in running]
    return [work(item) for item in items]


def _manifest(directory: int, path: Path, key: bytes | None) -> Manifest:
    with _file(directory, manifest.NAME) as (descriptor, size):
        if size > manifest.LIMIT:
            raise CheckpointError(f"{manifest.NAME} is longer than {manifest.LIMIT} bytes")
        data = bytearray(size)
        with _naming(manifest.NAME):
            _read_into(descriptor, memoryview(data), 0)
    found = parse_manifest(bytes(data), key)
    named = step_of(path.name)
    if named is not None and named != found.step:
        raise CheckpointError(f"{manifest.NAME} is that of {step_name(found.step)}")
    return found


def _check_files(directory: int, found: Manifest, digest: Callable[[int, int, File, Tensor], str]) -> None:
    """Compares every file with the manifest; `digest` reads one tensor's bytes and says their SHA-256."""

    def check(descriptor: int, start: int, file: File, tensor: Tensor, expected: str) -> None:
        with _naming(file.name):
            if not hmac.compare_digest(digest(descriptor, start, file, tensor), expected):
                raise CheckpointError(f"{tensor.name} does not match its SHA-256")

    with contextlib.ExitStack() as stack:
        work = []
        for file in found.files:
            descriptor, size = stack.enter_context(_file(directory, file.name))
            with _naming(file.name):
                if size != file.size:
                    raise CheckpointError(f"it has {size} bytes, not {file.size}")
                start = _check_header(descriptor, file)
            work += [(descriptor, start, file, *one) for one in zip(file.tensors, file.digests, strict=True)]
        try:
            in_threads(lambda one: check(*one), work, found.nbytes)
        except MemoryError:
            raise CheckpointError(f"its {found.nbytes} bytes do not fit into memory") from None


def _check_header(descriptor: int, file: File) -> int:
    """Compares a file's header with that of the manifest's tensors; says where its data begins."""
    header = encode_header(file.tensors)
    size = len(header) + sum(tensor.nbytes for tensor in file.tensors)
    if size != file.size:
        raise CheckpointError(f"header and tensors fill {size} bytes, the file has {file.size}")
    found = bytearray(len(header))
    _read_into(descriptor, memoryview(found), 0)
    if found != header or hashlib.sha256(header).hexdigest() != file.header_sha256:
        raise CheckpointError("its header does not match its SHA-256")
    return len(header)


@contextlib.contextmanager
def _open(what: str, path: Path | str, flags: int, within: int | None = None) -> Iterator[int]:
    """A file or directory, open; `what` is its name in messages."""
    try:
        descriptor = os.open(path, flags | os.O_RDONLY | os.O_CLOEXEC, dir_fd=within)
    except FileNotFoundError as problem:
        raise CheckpointError(f"{what} is missing") from problem
    except OSError as problem:
        raise CheckpointError(f"{what} cannot be opened: {problem.strerror}") from problem
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _opened(path: Path, follow: bool) -> Iterator[int]:
    with _open("the directory", path, os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW)) as descriptor:
        check_owner(os.fstat(descriptor))
        yield descriptor


@contextlib.contextmanager
def _file(directory: int, name: str) -> Iterator[tuple[int, int]]:
    """A regular file of a directory, open, and its size."""
    with _open(name, name, os.O_NOFOLLOW | os.O_NONBLOCK, directory) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{name} is no regular file")
        yield descriptor, status.st_size


def _read_into(descriptor: int, target: memoryview, at: int) -> None:
    """Fills `target` from the bytes at `at`."""
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], at + done)
        except OSError as problem:
            raise CheckpointError(f"it cannot be read: {problem.strerror}") from problem
        if count == 0:
            raise CheckpointError(f"it ends {len(target) - done} bytes early")
        done += count


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Puts a file's name before what is wrong with it."""
    try:
        yield
    except CheckpointError as problem:
        raise CheckpointError(f"{name}: {problem}") from problem.__cause__
