"""Strict reader for IDX files, the format of MNIST: a magic number, big-endian sizes, then the values.

It reads unsigned bytes only (type 0x08), plain or gzip, and gives the whole array or an error, as
python/odyssey/data/idx.py does. It does not know any particular data set, and does not download.
"""

from std.memory import unsafe_memmove

from .bytes import untracked
from .files import File, is_there, private_directory, remove, rename, write_new
from .files import process_id, read_file
from .inflate import MAX_INFLATION, gunzip
from .sha256 import Sha256, sha256

comptime _MAX_NDIM = 8
comptime _LIMIT = 1 << 40  # bytes of a file


@fieldwise_init
struct Idx(Copyable, Movable):
    """An array of unsigned bytes."""

    var shape: List[Int]
    """Its sizes."""
    var data: List[UInt8]
    """Its bytes, in C order."""


def read_idx(path: String, ndim: Int = 0, digest: String = "") raises -> Idx:
    """Reads one IDX file of unsigned bytes.

    Args:
        path: The file, plain or gzip (told apart by its first bytes, not by its name).
        ndim: How many dimensions it must have; 0 accepts 1 to 8.
        digest: SHA-256 in hex that the unpacked file (header included) must have; "" skips the check.

    Returns:
        The array.

    Raises:
        Error: the file is missing, a damaged gzip, of another type or number of dimensions, not exactly as long as
            its header says, or altered.
    """
    var packed: List[UInt8]
    try:
        packed = read_file(path, _LIMIT)
    except e:
        raise Error(
            "[data] ",
            path,
            " cannot be read (",
            e,
            "); give the path of an IDX file, plain or .gz",
        )
    if len(packed) < 2 or packed[0] != 0x1F or packed[1] != 0x8B:
        return _parsed(packed^, path, ndim, digest)
    var data: List[UInt8]
    try:
        data = gunzip(packed, len(packed) * MAX_INFLATION)
    except e:
        raise Error(
            "[data] ",
            path,
            " is a damaged gzip file (",
            e,
            "); get the file",
            " again",
        )
    return _parsed(data^, path, ndim, digest)


def read_unpacked(
    path: String, cache: String, ndim: Int, digest: String
) raises -> Idx:
    """As `read_idx` with a digest; what was unpacked is kept and read from there next time.

    Python and Mojo programs share the copies. One that has another digest is replaced; where none can be kept it works
    without.

    Args:
        path: The file, plain or gzip.
        cache: The directory of the copies; made where it is not there.
        ndim: How many dimensions it must have.
        digest: SHA-256 in hex that the unpacked file must have.

    Returns:
        The array.

    Raises:
        Error: as `read_idx`.
    """
    var kept = String(cache, "/", digest, ".idx")
    if is_there(kept):
        try:
            return read_idx(kept, ndim, digest)
        except:
            pass
    var found = read_idx(path, ndim, digest)
    var aside = String(cache, "/.", digest, ".", process_id(), ".tmp")
    try:
        private_directory(cache)
        remove(aside)
        var data = _header(found.shape)
        data.extend(Span(found.data))
        write_new(aside, Span(data))
        rename(aside, kept)
    except:
        remove(aside)
    return found^


def _parsed(
    var data: List[UInt8], path: String, ndim: Int, digest: String
) raises -> Idx:
    if len(data) < 4:
        raise Error(
            "[data] ",
            path,
            " holds ",
            len(data),
            " bytes; an IDX file starts with a magic number of 4; get the file",
            " again",
        )
    if data[0] != 0 or data[1] != 0 or data[2] != 8:
        raise Error(
            "[data] ",
            path,
            " does not begin with the bytes 0 0 8; only IDX files of unsigned",
            " bytes are read; check that it is the right file",
        )
    var n = Int(data[3])
    if not 1 <= n <= _MAX_NDIM or (ndim and n != ndim):
        raise Error(
            "[data] ",
            path,
            " has ",
            n,
            " dimensions; ",
            ndim if ndim else _MAX_NDIM,
            "" if ndim else " or fewer",
            " expected; check that images and labels are not swapped",
        )
    if len(data) < 4 + 4 * n:
        raise Error(
            "[data] ", path, " ends inside its header; get the file again"
        )
    var shape = List[Int]()
    var count = 1
    for i in range(n):
        var size = 0
        for j in range(4):
            size = 256 * size + Int(data[4 + 4 * i + j])
        shape.append(size)
        count = min(count * size, _LIMIT) if size else 0
    if 0 in shape:
        raise Error(
            "[data] ",
            path,
            " has the size ",
            _by(shape),
            "; every dimension must be at least 1; get the file again",
        )
    if len(data) != 4 + 4 * n + count:
        raise Error(
            "[data] ",
            path,
            " is not as long as its header says (",
            _by(shape),
            "): ",
            len(data),
            " bytes found; get the file again",
        )
    if digest != "":
        var found = sha256(Span(data))
        if found != digest.lower():
            raise Error(
                "[data] ",
                path,
                " was altered: its SHA-256 starts with ",
                found[byte=0:12],
                ", expected ",
                digest[byte = 0 : min(12, digest.byte_length())],
                "; get the file again",
            )
    # in place: new pages for a copy of 47 MB take longer than all else here
    unsafe_memmove(
        dest=data.unsafe_ptr(),
        src=untracked(Span(data)).unsafe_ptr().unsafe_offset(4 + 4 * n),
        count=count,
    )
    data.shrink(count)
    return Idx(shape^, data^)


def _header(shape: List[Int]) -> List[UInt8]:
    var out: List[UInt8] = [0, 0, 8, UInt8(len(shape))]
    for size in shape:
        for j in range(4):
            out.append(UInt8((size >> (24 - 8 * j)) & 255))
    return out^


def _by(shape: List[Int]) -> String:
    var out = String()
    for size in shape:
        out += String("" if out == "" else " x ", size)
    return out
