"""A strict reader of IDX files, the format of MNIST.

A file is a magic number, big-endian sizes, then the values. The reader supports only unsigned bytes
(type 0x08), plain or gzip. It returns the whole array or raises an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import stat
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from odyssey.errors import DataError, OdysseyError

from ..base.files import private_directory, write_whole
from ..base.paths import expand_path

if TYPE_CHECKING:
    import gzip

_UINT8 = 0x08
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_NDIM = 8
# Deflate cannot compress better than 1032:1, so a header that claims more is wrong.
_MAX_INFLATION = 1032


def read_idx(path: Path, *, ndim: int | None = None, sha256: str | None = None) -> np.ndarray:
    """Reads one IDX file of unsigned bytes.

    It allocates nothing for sizes that the file cannot hold.

    Args:
        path: the file, plain or gzip. Its first bytes decide, not its name.
        ndim: the number of dimensions it must have. None accepts 1 to 8.
        sha256: the hex digest of the uncompressed file, header included. None skips the check.

    Returns:
        A read-only, C-contiguous uint8 array of the header's shape.

    Raises:
        DataError: the file is missing, unreadable, a damaged gzip, of another type or number of
            dimensions, not exactly as long as its header says, or altered.
    """
    import gzip  # few processes read such a file, and all import this module

    path = expand_path(path)
    try:
        # Without O_NONBLOCK, opening a pipe that has no writer would wait forever.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(
                    f"{path} is not a regular file; give the path of an IDX file, plain or .gz"
                )
            packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            file.seek(0)
            with (
                gzip.GzipFile(fileobj=file, mode="rb")
                if packed
                else contextlib.nullcontext(file) as stream
            ):
                return _read_stream(stream, path, packed, status.st_size, ndim, sha256)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist; give the path of an IDX file, plain or .gz"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is a damaged gzip file ({_format_error(error)}); get the file again"
        ) from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or _format_error(error)}); check the path"
        ) from None


def read_unpacked(path: Path, cache: Path, *, ndim: int, sha256: str) -> np.ndarray:
    """Reads as `read_idx` with a digest, and caches the uncompressed file.

    Unpacking takes four times as long as hashing, and every rank would unpack at every start. The
    cached file is mapped into memory, so all ranks of a machine share its pages. A cached file with
    another digest is replaced. If the cache cannot be written, nothing is cached.

    Args:
        path, ndim, sha256: see `read_idx`.
        cache: the folder of cached files. The digest is the name of the file.
    """
    cached_path = cache / f"{sha256}.idx"
    with contextlib.suppress(DataError, OSError, ValueError):
        return _map_file(cached_path, ndim, sha256)
    values = read_idx(path, ndim=ndim, sha256=sha256)
    # If another rank has cached it in the meantime, its file stays.
    with contextlib.suppress(DataError, OSError, ValueError):
        return _map_file(cached_path, ndim, sha256)
    with contextlib.suppress(OSError, OdysseyError):
        private_directory(cache)
        header = bytes((0, 0, _UINT8, values.ndim)) + b"".join(
            n.to_bytes(4, "big") for n in values.shape
        )
        write_whole(cached_path, lambda file: (file.write(header), file.write(values)))
    return values


def _map_file(path: Path, ndim: int, sha256: str) -> np.ndarray:
    """Maps a plain IDX file into memory, and checks it like `read_idx`.

    Nobody may write to the file while the array is used. Replacing it by a new file is safe. A file
    that other users can write to is read instead of mapped.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        header, shape = _read_header(file, path, ndim)
        file_size = status.st_size
        _check_length(path, header, shape, file_size)
        if status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o022:
            data = mmap.mmap(file.fileno(), file_size, access=mmap.ACCESS_READ)
        else:  # other users could change or shorten it after its digest was checked
            data = header + file.read(file_size)
        values = np.frombuffer(data, np.uint8, offset=len(header))
    _check_digest(path, header, values, sha256)
    return values.reshape(shape)


def _read_stream(
    stream: BinaryIO | gzip.GzipFile,
    path: Path,
    packed: bool,
    file_size: int,
    ndim: int | None,
    sha256: str | None,
) -> np.ndarray:
    """Reads the header and the values of an IDX file.

    Args:
        stream: the content, uncompressed.
        path: the path for messages.
        packed: the file is compressed.
        file_size: the size of the file in bytes, before it is uncompressed.
        ndim, sha256: see `read_idx`.

    Raises DataError as `read_idx`.
    """
    header, shape = _read_header(stream, path, ndim)
    expected = len(header) + math.prod(shape)
    if not packed:
        _check_length(path, header, shape, file_size)
    elif expected > file_size * _MAX_INFLATION:
        raise DataError(
            f"{path}: the header claims {_format_shape(shape)} = {expected} bytes, more than "
            f"{file_size} bytes of gzip can hold; get the file again"
        )
    try:
        content = stream.read(math.prod(shape))
    except MemoryError:
        raise DataError(
            f"{path} ({_format_shape(shape)}) does not fit into memory; use a machine with more"
        ) from None
    # Reading to the end makes gzip verify its checksum. One byte more is enough to see that the
    # file is too long, and a few compressed bytes can unpack to many.
    _check_length(path, header, shape, "more" if stream.read(1) else len(header) + len(content))
    values = np.frombuffer(content, np.uint8)
    if sha256 is not None:
        _check_digest(path, header, values, sha256)
    return values.reshape(shape)


def _read_header(
    stream: BinaryIO | gzip.GzipFile, path: Path, ndim: int | None
) -> tuple[bytes, tuple[int, ...]]:
    """Reads the header of an IDX file.

    Its four bytes of magic number are two zeros, the type and the number of dimensions. A size of
    four bytes for each dimension follows.

    Returns:
        The bytes of the header, and the shape.

    Raises:
        DataError: the header is too short, or has another type, number of dimensions or an empty
            dimension.
    """
    magic = stream.read(4)
    if len(magic) < 4:
        raise DataError(
            f"{path} holds {len(magic)} bytes; IDX files have a magic number of 4; get the file "
            "again"
        )
    if magic[:2] != b"\x00\x00" or magic[2] != _UINT8:
        raise DataError(
            f"{path} has the magic number 0x{magic.hex()}; only 0x000008NN (IDX of unsigned bytes) "
            "is read; check that it is the right file"
        )
    file_ndim = magic[3]
    allowed = range(1, _MAX_NDIM + 1) if ndim is None else (ndim,)
    if file_ndim not in allowed:
        expected = f"1 to {_MAX_NDIM}" if ndim is None else str(ndim)
        raise DataError(
            f"{path} has {file_ndim} dimensions; {expected} expected; check that images and labels "
            "are not swapped"
        )
    sizes = stream.read(4 * file_ndim)
    if len(sizes) < 4 * file_ndim:
        raise DataError(
            f"{path} ends inside its header; {4 + 4 * file_ndim} bytes expected, {4 + len(sizes)} "
            "found; get the file again"
        )
    shape = tuple(
        int.from_bytes(sizes[start : start + 4], "big") for start in range(0, len(sizes), 4)
    )
    if 0 in shape:
        raise DataError(
            f"{path} has the size {_format_shape(shape)}; every dimension must be at least 1; "
            "get the file again"
        )
    return magic + sizes, shape


def _check_digest(path: Path, header: bytes, values: np.ndarray, sha256: str) -> None:
    """Raises DataError unless header and values have the hex digest `sha256`."""
    digest = hashlib.sha256(header)
    digest.update(values)
    if digest.hexdigest() != sha256.lower():
        raise DataError(
            f"{path} was altered: its SHA-256 starts with {digest.hexdigest()[:12]}, expected "
            f"{sha256.lower()[:12]}; get the file again"
        )


def _check_length(path: Path, header: bytes, shape: tuple[int, ...], actual: int | str) -> None:
    """Raises DataError unless the file has the length by its header.

    actual: its bytes, or "more" if it is too long by an unknown number.
    """
    expected = len(header) + math.prod(shape)
    if actual != expected:
        raise DataError(
            f"{path} is not as long as its header says ({_format_shape(shape)}): {expected} bytes "
            f"expected, {actual} found; get the file again"
        )


def _format_shape(shape: tuple[int, ...]) -> str:
    """Returns a shape as "28 x 28", for messages."""
    return " x ".join(map(str, shape))


def _format_error(error: BaseException) -> str:
    """Returns the message of an error in one line, or its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
