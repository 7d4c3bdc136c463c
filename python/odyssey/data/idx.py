"""Strict reader for IDX files, the format of MNIST: a magic number, big-endian sizes, then the
values.

It reads unsigned bytes only (type 0x08), plain or gzip, and gives the whole array or an error.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import math
import mmap
import os
import stat
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from odyssey.errors import DataError, OdysseyError

from ..base.files import private_directory, write_whole

_UINT8 = 0x08
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_NDIM = 8
# Deflate cannot do better than 1032:1, so a header that claims more than this is wrong whatever
# follows it.
_MAX_INFLATION = 1032


def read_idx(path: Path, *, ndim: int | None = None, sha256: str | None = None) -> np.ndarray:
    """Read one IDX file of unsigned bytes.

    path: the file, plain or gzip (told apart by its first bytes, not by its name). ndim: how many
    dimensions it must have; None accepts 1 to 8. sha256: hex digest the uncompressed file (header
    included) must have; None skips the check. Returns a read-only, C-contiguous uint8 array of the
    header's shape. Raises DataError if the file is missing, unreadable, a damaged gzip, of another
    type or number of dimensions, not exactly as long as its header says, or altered. Nothing is
    allocated for sizes that the file cannot hold.
    """
    path = Path(path)
    try:
        # A pipe without a writer would keep the reader waiting.
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
                return _read(stream, path, packed, status.st_size, ndim, sha256)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist; give the path of an IDX file, plain or .gz"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is a damaged gzip file ({_one_line(error)}); get the file again"
        ) from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or _one_line(error)}); check the path"
        ) from None


def read_unpacked(path: Path, cache: Path, *, ndim: int, sha256: str) -> np.ndarray:
    """Reads as `read_idx` with a digest; what was unpacked is kept in `cache` under it and used
    from there next time. Unpacking takes four times as long as hashing, and every rank does
    it at every start. The copy is mapped: all ranks of a machine share its pages. One without
    the digest is replaced; where none can be kept it works without.
    """
    cached_path = cache / f"{sha256}.idx"
    with contextlib.suppress(DataError, OSError, ValueError):
        return _mapped(cached_path, ndim, sha256)
    values = read_idx(path, ndim=ndim, sha256=sha256)
    # another rank has kept it meanwhile: it stays
    with contextlib.suppress(DataError, OSError, ValueError):
        return _mapped(cached_path, ndim, sha256)
    with contextlib.suppress(OSError, OdysseyError):
        private_directory(cache)
        header = bytes((0, 0, _UINT8, values.ndim)) + b"".join(
            n.to_bytes(4, "big") for n in values.shape
        )
        write_whole(cached_path, lambda file: (file.write(header), file.write(values)))
    return values


def _mapped(path: Path, ndim: int, sha256: str) -> np.ndarray:
    """Maps a plain file as `read_idx` reads it.

    It must not be written to while the array is used; a new one may take its name. One that other
    users may write to is read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        header, shape = _read_header(file, path, ndim)
        file_size = status.st_size
        _check_length(path, header, shape, file_size)
        if status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o022:
            data = mmap.mmap(file.fileno(), file_size, access=mmap.ACCESS_READ)
        else:  # other users could change or shorten it after its digest was looked at
            data = header + file.read(file_size)
        values = np.frombuffer(data, np.uint8, offset=len(header))
    _check_digest(path, header, values, sha256)
    return values.reshape(shape)


def _read(
    stream: BinaryIO | gzip.GzipFile,
    path: Path,
    packed: bool,
    file_size: int,
    ndim: int | None,
    sha256: str | None,
) -> np.ndarray:
    header, shape = _read_header(stream, path, ndim)
    expected = len(header) + math.prod(shape)
    if not packed:
        _check_length(path, header, shape, file_size)
    elif expected > file_size * _MAX_INFLATION:
        raise DataError(
            f"{path}: the header claims {_by(shape)} = {expected} bytes, more than {file_size} "
            "bytes "
            "of gzip can hold; "
            "get the file again"
        )
    try:
        content = stream.read(math.prod(shape))
    except MemoryError:
        raise DataError(
            f"{path} ({_by(shape)}) does not fit into memory; use a machine with more"
        ) from None
    # Reading on to the end makes gzip verify its checksum. Not further than one byte: a few bytes
    # can unpack to many.
    _check_length(path, header, shape, "more" if stream.read(1) else len(header) + len(content))
    values = np.frombuffer(content, np.uint8)
    if sha256 is not None:
        _check_digest(path, header, values, sha256)
    return values.reshape(shape)


def _read_header(
    stream: BinaryIO | gzip.GzipFile, path: Path, ndim: int | None
) -> tuple[bytes, tuple[int, ...]]:
    magic = stream.read(4)
    if len(magic) < 4:
        raise DataError(
            f"{path} holds {len(magic)} bytes; IDX files have a magic number of 4; get the file "
            "again"
        )
    if magic[:2] != b"\x00\x00" or magic[2] != _UINT8:
        raise DataError(
            f"{path} has the magic number 0x{magic.hex()}; only 0x000008NN (IDX of unsigned "
            "bytes) is read; "
            "check that it is the right file"
        )
    allowed = range(1, _MAX_NDIM + 1) if ndim is None else (ndim,)
    if magic[3] not in allowed:
        expected = f"1 to {_MAX_NDIM}" if ndim is None else str(ndim)
        raise DataError(
            f"{path} has {magic[3]} dimensions; {expected} expected; check that images and labels "
            "are not swapped"
        )
    sizes = stream.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise DataError(
            f"{path} ends inside its header; {4 + 4 * magic[3]} bytes expected, {4 + len(sizes)} "
            "found; "
            "get the file again"
        )
    shape = tuple(
        int.from_bytes(sizes[start : start + 4], "big") for start in range(0, len(sizes), 4)
    )
    if 0 in shape:
        raise DataError(
            f"{path} has the size {_by(shape)}; every dimension must be at least 1; get the file "
            "again"
        )
    return magic + sizes, shape


def _check_digest(path: Path, header: bytes, values: np.ndarray, sha256: str) -> None:
    digest = hashlib.sha256(header)
    digest.update(values)
    if digest.hexdigest() != sha256.lower():
        raise DataError(
            f"{path} was altered: its SHA-256 starts with {digest.hexdigest()[:12]}, expected "
            f"{sha256.lower()[:12]}; "
            "get the file again"
        )


def _check_length(path: Path, header: bytes, shape: tuple[int, ...], actual: int | str) -> None:
    expected = len(header) + math.prod(shape)
    if actual != expected:
        raise DataError(
            f"{path} is not as long as its header says ({_by(shape)}): {expected} bytes "
            f"expected, {actual} found; "
            "get the file again"
        )


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
