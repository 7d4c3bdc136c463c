"""Calls of collective operations: dtypes, operations, buffers, and the header of a call, which is
the part that the other ranks see.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import itertools
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core import native
from ..errors import ConfigError, ShapeError, printable

#: bfloat16 as a NumPy dtype: 16 bits with a name. `a.view(bfloat16)` of a uint16 array costs
#: nothing.
bfloat16 = np.dtype([("bfloat16", "<u2")])

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(name)
    for name in "float32 float64 float16 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
} | {"bfloat16": bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CODES = {dtype: code for code, dtype in enumerate(DTYPES.values())}


class ReduceOp(str, enum.Enum):
    """How the numbers of the ranks become one.

    Wherever one is wanted, its value as a string will do.
    """

    SUM = "sum"
    MEAN = "mean"
    AVERAGE = "mean"
    AVG = "mean"
    MAX = "max"
    MIN = "min"
    PROD = "prod"
    PRODUCT = "prod"
    Sum = "sum"
    Mean = "mean"
    Max = "max"
    Min = "min"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """Returns the operation of a name; "average" and "avg" are "mean".

        Raises:
            ConfigError: there is no operation of this name.
        """
        if isinstance(op, ReduceOp):
            return op
        operation = _OPERATIONS.get(op) if isinstance(op, str) else None
        if operation is None:
            raise ConfigError(f"[comm] operation {op!r}; it must be sum, mean, max, min or prod")
        return operation


_OPERATIONS: dict[Any, ReduceOp] = {op.value: op for op in ReduceOp}
_OPERATIONS |= {"average": ReduceOp.MEAN, "avg": ReduceOp.MEAN}
UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.PROD: np.multiply,
}


def widen(array: np.ndarray) -> np.ndarray:
    """Returns a float16 or bfloat16 array as float32, which is exact."""
    if array.dtype == bfloat16:
        wide = np.empty(array.shape, np.float32)
        array = np.ascontiguousarray(array)
        native.library().widen_bf16(wide.ctypes.data, array.ctypes.data, wide.size)
        return wide
    return array.astype(np.float32)


def narrow(array: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Rounds float32 numbers to float16 or bfloat16 in `out`, and returns `out`.

    Rounding is to the nearest number, ties to even. `out` is contiguous and has the same size.
    """
    if out.dtype == bfloat16:
        array = np.ascontiguousarray(array, np.float32)
        native.library().narrow_bf16(out.ctypes.data, array.ctypes.data, out.size)
    else:
        with np.errstate(over="ignore"):
            out[...] = array
    return out


def tree_reduce(arrays: Sequence[np.ndarray], op: ReduceOp) -> np.ndarray:
    """Combines arrays along the fixed tree of parallel/plan.py into a new array.

    Integers wrap around.
    """
    if len(arrays) == 1:
        return arrays[0].copy()
    # the left half has the largest power of two that is less than the number of arrays
    left_count = 1 << (len(arrays) - 1).bit_length() - 1
    left_total = tree_reduce(arrays[:left_count], op)
    right_total = tree_reduce(arrays[left_count:], op)
    with np.errstate(over="ignore"):
        combined = UFUNCS[op](left_total, right_total, out=left_total if left_total.ndim else None)
    # without dimensions the result is a NumPy scalar
    return np.asarray(combined, left_total.dtype)


Run = tuple[int, int]


def consecutive_runs(sizes: Iterable[int]) -> list[Run]:
    """Returns [start, end) of consecutive pieces of these sizes; the first starts at 0."""
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


# --- a call, and what the other ranks see of it ---------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Call:
    """One collective operation with its buffers, checked; what a backend carries out.

    Attributes:
        kind: "barrier", "broadcast", "reduce", "all_reduce", "scatter", "gather", "all_gather",
            "reduce_scatter", "all_to_all", "all_to_all_v", "all_gather_v" or "group" (a barrier
            that agrees on members).
        send: what this rank gives, contiguous; None if nothing. For "broadcast" and "all_gather_v"
            it is `out`.
        out: where the result goes, contiguous; None where this rank gets none, and in a scatter
            whose receiver does not know the shape before `place`. `send is out` means in place.
        op: SUM, MAX, MIN or PROD where numbers are combined. MEAN is the sum here; 16-bit floats
            are float32 here.
        root: rank in the group, -1 without one.
        described: what must be the same on all ranks, beside the kind: (dtype, shape, root, op,
            ranges or members).
        send_counts, receive_counts: elements per rank ("all_to_all_v").
        ranges: elements [a, b) of each rank ("all_gather_v").
        finish: gives the result when `out` is filled.
        blocking: the caller waits at once.
    """

    kind: str
    send: np.ndarray | None = None
    out: np.ndarray | None = None
    op: ReduceOp | None = None
    root: int = -1
    described: tuple = ()
    send_counts: tuple[int, ...] = ()
    receive_counts: tuple[int, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()
    finish: Callable[[], Any] | None = None
    blocking: bool = False
    header: Header | None = None

    def place(self, tail: Sequence[int]) -> None:
        """Allocates the array into which a scatter receives, if the caller passed none.

        tail: that of the root's header, with the dtype code, the number of dimensions, the shape.
        """
        if self.out is None:
            dtype_code, dimensions, *shape = tail
            self.out = np.empty(shape[:dimensions], list(CODES)[dtype_code])

    def result(self) -> Any:
        """Returns the result for the caller; to be called once, when `out` is filled."""
        return self.out if self.finish is None else self.finish()

    def tail(self, rank: int) -> tuple[tuple[int, ...], int]:
        """Returns the tail and the balance of the call's header; see Header.

        Raises:
            ShapeError: the piece of a scatter has more than DIMENSIONS dimensions.
        """
        if self.kind == "all_to_all_v":
            send_counts = self.send_counts
            receive_counts = self.receive_counts
            tail = (max(send_counts), *send_counts, *receive_counts)
            return tail, balance_counts(rank, send_counts, receive_counts)
        if self.kind != "scatter":
            return (), 0
        piece = self.out if self.send is None else self.send[0]
        if piece is None:  # a receiver that does not know the shape
            return (-1, *(0,) * (1 + DIMENSIONS)), 0
        if piece.ndim > DIMENSIONS:
            raise ShapeError(
                f"[comm] scatter of {piece.ndim} dimensions; it takes at most {DIMENSIONS}"
            )
        padding = (0,) * (DIMENSIONS - piece.ndim)
        return (CODES[piece.dtype], piece.ndim, *piece.shape, *padding), 0

    def routes(self, rank: int, size: int, unit: int = 1) -> tuple[Sequence[Run], Sequence[Run]]:
        """Returns which elements move between `rank` and each of the `size` ranks.

        For all kinds of calls that move numbers and do not combine them.

        Returns:
            (sends, receives): sends[p] is the run [start, end) of the flat `send` that goes to
            rank p, and receives[p] the run of the flat `out` that comes from rank p. Both are
            multiplied by `unit`, for example by the bytes of an element.
        """
        send_size, out_size = (
            None if array is None else array.size * unit for array in (self.send, self.out)
        )
        if self.kind == "all_to_all_v":
            sends = consecutive_runs(count * unit for count in self.send_counts)
            receives = consecutive_runs(count * unit for count in self.receive_counts)
            return sends, receives
        if self.kind == "all_gather_v":
            ranges = [(start * unit, end * unit) for start, end in self.ranges]
            return [ranges[rank]] * size, ranges
        return _find_routes(self.kind, send_size, out_size, self.root, rank, size)


@functools.lru_cache(1024)
def _find_routes(
    kind: str, send_size: int | None, out_size: int | None, root: int, rank: int, size: int
) -> tuple[Sequence[Run], Sequence[Run]]:
    """Returns what `Call.routes` does, for the kinds whose ranks all move equally much.

    send_size, out_size: the sizes of the two arrays; None if this rank has none.
    """
    comes_from_root = kind in ("broadcast", "scatter")
    sends = receives = [(0, 0)] * size
    if send_size is not None and not (comes_from_root and rank != root):
        if kind in ("scatter", "all_to_all"):
            sends = consecutive_runs([send_size // size] * size)
        elif kind == "gather":
            sends = [(0, send_size if p == root else 0) for p in range(size)]
        else:
            sends = [(0, send_size)] * size
    if out_size is not None:
        if comes_from_root:
            receives = [(0, out_size if p == root else 0) for p in range(size)]
        else:
            receives = consecutive_runs([out_size // size] * size)
    return sends, receives


class Header(NamedTuple):
    """The header of a call, which is the part of it that the other ranks see.

    signature: a hash of everything that must be equal on all ranks.
    text: the same for people, with the source line.
    tail: numbers that may differ between ranks. Of an all_to_all_v: the largest send count, the
        send counts, the receive counts. Of a scatter: the dtype code of a piece (-1 if this rank
        does not know it), its number of dimensions, its shape.
    repeated: the data are already on their way (base.Repeated).
    balance: the result of `balance_counts`; 0 for calls without counts.
    """

    sequence: int
    signature: int
    text: str
    tail: tuple[int, ...]
    kind: str = ""
    root: int = -1
    blocking: bool = False
    repeated: bool = False
    balance: int = 0


TEXT = 144  # bytes of a header's text
_HEAD = struct.Struct(f"<qqQ??6x{TEXT}s")
DIMENSIONS = 8


@functools.lru_cache(256)
def balance_counts(rank: int, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]) -> int:
    """Returns a number of 64 bits whose sum over all ranks is 0 if all counts match.

    Counts match if each rank expects from each other rank as much as that one sends. A sum
    compares them in time proportional to the ranks, not to the pairs of ranks. It works because
    tuples of integers have the same hash in all processes.
    """
    send_hash = sum(hash((rank, p, count)) for p, count in enumerate(send_counts))
    receive_hash = sum(hash((p, rank, count)) for p, count in enumerate(receive_counts))
    return (send_hash - receive_hash) % 2**64


def header_bytes(size: int) -> int:
    """Returns the bytes of a packed header in a group of `size` ranks, with the longest tail."""
    all_to_all_tail = 1 + 2 * size
    scatter_tail = 2 + DIMENSIONS
    return _HEAD.size + 8 * max(all_to_all_tail, scatter_tail)


def pack(header: Header, into: np.ndarray) -> None:
    """Writes a header into uint8 memory of `header_bytes(size)`."""
    text = _encode_text(header.text)
    numbers = header.sequence, header.signature, header.balance
    _HEAD.pack_into(into, 0, *numbers, header.blocking, header.repeated, text)
    if header.tail:
        struct.pack_into(f"<{len(header.tail)}q", into, _HEAD.size, *header.tail)


@functools.lru_cache(1024)
def _encode_text(text: str) -> bytes:
    """Returns a text in at most TEXT bytes, cut with "..." at its end."""
    data = text.encode()
    return data if len(data) <= TEXT else data[: TEXT - 3].decode(errors="ignore").encode() + b"..."


def unpack(packed: Sequence[np.ndarray], like: Header) -> list[Header]:
    """Returns the headers of all ranks from the bytes that `pack` wrote.

    Kind and root are not packed: they are those of `like`, this rank's header, which is right for
    calls that agree. The counts of an all_to_all_v are only needed to explain a mismatch, so they
    are unpacked only if they differ.
    """
    has_counts = like.kind == "all_to_all_v"
    tail_length = 1 if has_counts else len(like.tail)
    headers = [_unpack_header(data, like, tail_length) for data in packed]
    if has_counts and _counts_differ(headers):
        headers = [_unpack_header(data, like, len(like.tail)) for data in packed]
    return headers


def _unpack_header(data: np.ndarray, like: Header, tail_length: int) -> Header:
    """Returns one header, with the first `tail_length` numbers of its tail."""
    sequence, signature, balance, blocking, repeated, text = _HEAD.unpack_from(data, 0)
    tail = struct.unpack_from(f"<{tail_length}q", data, _HEAD.size) if tail_length else ()
    text = text.rstrip(b"\0").decode(errors="replace")
    return Header(
        sequence, signature, text, tail, like.kind, like.root, blocking, repeated, balance
    )


def _counts_differ(headers: Sequence[Header]) -> bool:
    """Returns True if a rank expects another count than the one that is sent to it."""
    return bool(sum(header.balance for header in headers) % 2**64)


def find_mismatch(headers: Sequence[Header], ranks: Sequence[int]) -> str | None:
    """Returns a message if the calls of the ranks of a group differ, or None.

    The result is the same on all ranks, because all of them call it with the same headers.

    headers: those of ranks 0, 1, ... of the group.
    ranks: their world ranks, for the message.
    """
    first = headers[0]
    for p, header in enumerate(headers):
        if (header.sequence, header.signature) != (first.sequence, first.signature):
            return (
                f"[comm] rank {ranks[0]} calls {first.text}, but rank {ranks[p]} calls "
                f"{header.text}; all ranks of a group must make the same calls in the same order "
                f"(this was call {first.sequence})"
            )
    size = len(headers)
    if first.kind == "all_to_all_v" and _counts_differ(headers):
        for p, sender in enumerate(headers):
            for q, receiver in enumerate(headers):
                # a tail is: the largest send count, `size` send counts, `size` receive counts
                sent_count = sender.tail[1 + q]
                expected_count = receiver.tail[1 + size + p]
                if sent_count != expected_count:
                    return (
                        f"[comm] rank {ranks[p]} sends {sent_count} elements to rank {ranks[q]} in "
                        f"{sender.text}, but that "
                        f"expects {expected_count} in {receiver.text}; both must give the same "
                        "count"
                    )
    if first.kind == "scatter":
        root_header = headers[first.root]
        for p, header in enumerate(headers):
            if header.tail[0] >= 0 and header.tail != root_header.tail:
                sent_piece = _describe_piece(root_header.tail)
                expected_piece = _describe_piece(header.tail)
                return (
                    f"[comm] rank {ranks[first.root]} scatters pieces of {sent_piece} in "
                    f"{root_header.text}, but rank {ranks[p]} expects {expected_piece} in "
                    f"{header.text}; give the same shape and dtype"
                )
    return None


def _describe_piece(tail: Sequence[int]) -> str:
    """Returns dtype and shape of a scatter's piece, from the tail of a header."""
    dtype_code, dimensions, *shape = tail
    return f"{NAMES[list(CODES)[dtype_code]]} {tuple(shape[:dimensions])}"


class _Made(threading.local):
    # file and line that made the call that this thread carries out
    at: Site | None = None
    after: str = ""  # the exception with which the last fit() of this thread ended


#: File, line, and the exception that the program has caught before.
Site = tuple[str, int, str]
made = _Made()


def note_exception(error: BaseException | None) -> None:
    """Notes that an exception left fit() on this rank, for messages about the calls that follow.

    A program may catch it on one rank and continue with calls that no other rank makes. None: a
    fit() has ended in order since.
    """
    if error is None:
        made.after = ""
    else:
        text = printable(f"{type(error).__name__}: {error}", limit=40)
        made.after = f" (after {text}, which left fit())"


def caller_location(depth: int) -> Site:
    """Returns the file and the line of the program that called odyssey, and `made.after`.

    That is the nearest frame outside of the package. `odyssey train`, and threads of the package,
    have no such frame: the result is then the nearest frame outside of `comm`. In a thread that
    makes calls on behalf of another one it is `made.at`.

    depth: the number of frames to skip, as in `sys._getframe`.
    """
    if made.at is not None:
        return made.at
    frame: Any = sys._getframe(depth)
    fallback = None  # the nearest frame outside of comm
    while frame is not None:
        file = frame.f_code.co_filename
        owner = _owners.get(file) or _find_owner(file)
        if owner == _USER:
            return file, frame.f_lineno, made.after
        if owner != _COMM and fallback is None:
            fallback = frame
        if owner == _PROGRAM:
            break
        frame = frame.f_back
    fallback = fallback or sys._getframe(depth)
    return fallback.f_code.co_filename, fallback.f_lineno, made.after


#: The owner of a file of code: a user; comm; the rest of the package and the standard library,
#: which are between the two in context managers, decorators and threads; the commands of the
#: package, which no program has called.
_USER, _COMM, _BETWEEN, _PROGRAM = range(1, 5)
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep
#: Folders of libraries that call on behalf of a user, such as torch. They are between, too.
libraries: list[str] = []
# by file: a string is looked up in 30 ns, the name of a frame's module in 150
_owners: dict[str, int] = {}


def _find_owner(file: str) -> int:
    """Returns the owner of a file, and keeps it in `_owners`."""
    packages = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
    if file.startswith(_PACKAGE):
        folder = file.removeprefix(_PACKAGE).split(os.sep)[0]
        owner = {"comm": _COMM, "cli": _PROGRAM}.get(folder, _BETWEEN)
    else:
        library = file.startswith(_LIBRARY) and not any(name in file for name in packages)
        owner = _BETWEEN if library or file.startswith(("<frozen ", *libraries)) else _USER
    return _owners.setdefault(file, owner)


@functools.lru_cache(4096)
def describe_call(
    kind: str, described: tuple, path: str, line: int, after: str = ""
) -> tuple[int, str]:
    """Returns (signature, text) of a call that a line of a file makes; see Header.

    The signature does not depend on the line: ranks may make a call at different places.
    `after` is that of `made`.

    described: that of Call.
    """
    digest = hashlib.blake2b(repr((kind, described)).encode(), digest_size=8).digest()
    words = [kind]
    if described:
        dtype, shape, root, op, details = described
        if dtype:
            words.append(str(dtype))
        if shape is not None:
            words.append(str(shape).replace(" ", ""))
        if op:
            words.append(str(op))
        if root >= 0:
            words.append(f"root {root}")
        if details:
            is_text = isinstance(details, str)
            words.append(details if is_text else str(details).replace(" ", ""))
    call = " ".join(words)
    file = "/".join(path.split(os.sep)[-2:])
    site = f" at {file[-60:]}:{line}{after}"
    room = TEXT - len(site.encode())
    call = call if len(call.encode()) <= room else call[: room - 3] + "..."
    return int.from_bytes(digest, "little", signed=True), call + site


_ENVELOPE = struct.Struct(f"<qq{TEXT}s")


def envelope_bytes() -> int:
    """Returns the bytes of a packed envelope, the header of a message between two ranks."""
    return _ENVELOPE.size


def pack_envelope(envelope: Header) -> np.ndarray:
    """Returns an envelope as uint8: its tail, (dtype code, elements), and its text."""
    packed = _ENVELOPE.pack(*envelope.tail, _encode_text(envelope.text))
    return np.frombuffer(bytearray(packed), np.uint8)  # a bytearray, so that it is writable


def unpack_envelope(data: np.ndarray) -> tuple[tuple[int, int], str]:
    """Returns ((dtype code, elements), text) of a packed envelope."""
    dtype_code, count, text = _ENVELOPE.unpack(data)
    return (dtype_code, count), text.rstrip(b"\0").decode(errors="replace")


def check_envelope(
    sent: Sequence[int], text: str, out: np.ndarray, header: Header, source: int, rank: int
) -> str | None:
    """Returns a message if a receive does not fit the message that was sent, or None.

    sent, text: (dtype code, elements) and the text of the sender's envelope.
    out, header: the array that receives the message, and the receiver's envelope.
    source, rank: the world ranks of sender and receiver, for the message.
    """
    if tuple(sent) == header.tail:
        return None
    dtype_code, count = sent
    dtype = NAMES[list(CODES)[dtype_code]]
    return (
        f"[comm] rank {source} sends {count} elements of {dtype} in {text}, but rank {rank} "
        f"receives {out.size} of "
        f"{NAMES[out.dtype]} in {header.text}; give both the same number and dtype"
    )
