"""Calls of collective operations: dtypes, operations, buffers, and what the other ranks see of a
call.
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
from ..errors import ConfigError, ShapeError

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
        """The operation of a name; "average" and "avg" are "mean".

        Raises ConfigError: there is none of this name.
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
    """float16 or bfloat16 as float32, exactly."""
    if array.dtype == bfloat16:
        wide = np.empty(array.shape, np.float32)
        array = np.ascontiguousarray(array)
        native.library().widen_bf16(wide.ctypes.data, array.ctypes.data, wide.size)
        return wide
    return array.astype(np.float32)


def narrow(array: np.ndarray, out: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest float16 or bfloat16 (ties to even), into `out` (contiguous,
    as large).
    """
    if out.dtype == bfloat16:
        array = np.ascontiguousarray(array, np.float32)
        native.library().narrow_bf16(out.ctypes.data, array.ctypes.data, out.size)
    else:
        with np.errstate(over="ignore"):
            out[...] = array
    return out


def tree_reduce(arrays: Sequence[np.ndarray], op: ReduceOp) -> np.ndarray:
    """A new array of several along the tree of parallel/plan.py. Integers wrap around."""
    if len(arrays) == 1:
        return arrays[0].copy()
    half = 1 << (len(arrays) - 1).bit_length() - 1
    a = tree_reduce(arrays[:half], op)
    b = tree_reduce(arrays[half:], op)
    with np.errstate(over="ignore"):
        return np.asarray(UFUNCS[op](a, b, out=a if a.ndim else None), a.dtype)


Run = tuple[int, int]


def runs(counts: Iterable[int]) -> list[Run]:
    """[start, end) of consecutive pieces of so many."""
    return list(itertools.pairwise(itertools.accumulate(counts, initial=0)))


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
        """Makes what a scatter receives into, where the caller gave nothing. tail: of the root's
        header.
        """
        if self.out is None:
            self.out = np.empty(tail[2 : 2 + tail[1]], list(CODES)[tail[0]])

    def result(self) -> Any:
        """Returns what the caller gets; called once, when `out` is filled."""
        return self.out if self.finish is None else self.finish()

    def tail(self, rank: int) -> tuple[tuple[int, ...], int]:
        """The tail of its header, and its balance."""
        if self.kind == "all_to_all_v":
            gives = self.send_counts
            takes = self.receive_counts
            return (max(gives), *gives, *takes), balance(rank, gives, takes)
        if self.kind != "scatter":
            return (), 0
        piece = self.out if self.send is None else self.send[0]
        if piece is None:
            return (-1, *(0,) * (1 + DIMENSIONS)), 0
        if piece.ndim > DIMENSIONS:
            raise ShapeError(
                f"[comm] scatter of {piece.ndim} dimensions; it takes at most {DIMENSIONS}"
            )
        return (CODES[piece.dtype], piece.ndim, *piece.shape, *(0,) * (DIMENSIONS - piece.ndim)), 0

    def routes(self, rank: int, size: int, unit: int = 1) -> tuple[Sequence[Run], Sequence[Run]]:
        """Elements [a, b) of the flat `send` that go to each of `size` ranks from `rank`, and of
        the flat `out` that come from each, times `unit`; for all kinds that move numbers and
        do not combine them.
        """
        send_size, out_size = (
            None if array is None else array.size * unit for array in (self.send, self.out)
        )
        if self.kind == "all_to_all_v":
            return runs(n * unit for n in self.send_counts), runs(
                n * unit for n in self.receive_counts
            )
        if self.kind == "all_gather_v":
            ranges = [(a * unit, b * unit) for a, b in self.ranges]
            return [ranges[rank]] * size, ranges
        return _routes(self.kind, send_size, out_size, self.root, rank, size)


@functools.lru_cache(1024)
def _routes(
    kind: str, send_size: int | None, out_size: int | None, root: int, rank: int, size: int
) -> tuple[Sequence[Run], Sequence[Run]]:
    of_root = kind in ("broadcast", "scatter")
    gives = takes = [(0, 0)] * size
    if send_size is not None and not (of_root and rank != root):
        gives = (
            runs([send_size // size] * size)
            if kind in ("scatter", "all_to_all")
            else [(0, send_size)] * size
        )
        if kind == "gather":
            gives = [(0, send_size * (p == root)) for p in range(size)]
    if out_size is not None:
        takes = (
            [(0, out_size * (p == root)) for p in range(size)]
            if of_root
            else runs([out_size // size] * size)
        )
    return gives, takes


class Header(NamedTuple):
    """Header of a call: what the other ranks see of it.

    `signature` is a hash of what must be equal; `text` says it to people, with the source line;
    `tail` has numbers that each rank may have of its own: largest send count, send and receive
    counts of an all_to_all_v; dtype code (-1: not known here), dimensions and shape of a piece in a
    scatter. `repeated`: the data are already on their way (base.Repeated). `balance` is that of the
    counts.
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
def balance(rank: int, gives: tuple[int, ...], takes: tuple[int, ...]) -> int:
    """A number of 64 bits whose sum over all ranks is 0 where each expects from each what that
    gives: so counts are compared in time proportional to the ranks, not to the pairs. Tuples
    of integers have the same hash everywhere.
    """
    send_hash = sum(hash((rank, p, n)) for p, n in enumerate(gives))
    return (send_hash - sum(hash((p, rank, n)) for p, n in enumerate(takes))) % 2**64


def header_bytes(size: int) -> int:
    """Length of a packed header in a group of `size`, with the longest tail."""
    return _HEAD.size + 8 * max(1 + 2 * size, 2 + DIMENSIONS)


def pack(header: Header, into: np.ndarray) -> None:
    """Writes a header into uint8 memory of `header_bytes(size)`."""
    text = _encoded(header.text)
    numbers = header.sequence, header.signature, header.balance
    _HEAD.pack_into(into, 0, *numbers, header.blocking, header.repeated, text)
    if header.tail:
        struct.pack_into(f"<{len(header.tail)}q", into, _HEAD.size, *header.tail)


@functools.lru_cache(1024)
def _encoded(text: str) -> bytes:
    data = text.encode()
    return data if len(data) <= TEXT else data[: TEXT - 3].decode(errors="ignore").encode() + b"..."


def unpack(packed: Sequence[np.ndarray], like: Header) -> list[Header]:
    """The headers of all ranks out of the bytes that `pack` wrote; their kind is that of `like`,
    which matters if they are equal. Of an all_to_all_v without the counts, unless these do
    not fit.
    """
    counts = like.kind == "all_to_all_v"
    headers = [_unpacked(data, like, 1 if counts else len(like.tail)) for data in packed]
    if counts and _unbalanced(headers):
        headers = [_unpacked(data, like, len(like.tail)) for data in packed]
    return headers


def _unpacked(data: np.ndarray, like: Header, numbers: int) -> Header:
    sequence, signature, balance, blocking, repeated, text = _HEAD.unpack_from(data, 0)
    tail = struct.unpack_from(f"<{numbers}q", data, _HEAD.size) if numbers else ()
    text = text.rstrip(b"\0").decode(errors="replace")
    return Header(
        sequence, signature, text, tail, like.kind, like.root, blocking, repeated, balance
    )


def _unbalanced(headers: Sequence[Header]) -> bool:
    return bool(sum(header.balance for header in headers) % 2**64)


def mismatch(headers: Sequence[Header], ranks: Sequence[int]) -> str | None:
    """Returns what is wrong with the calls of all ranks of a group, or None.

    The same answer on all of them. headers: of ranks 0, 1, ... of the group. ranks: their world
    ranks, for the message.
    """
    first = headers[0]
    for p, header in enumerate(headers):
        if (header.sequence, header.signature) != (first.sequence, first.signature):
            return (
                f"[comm] rank {ranks[0]} calls {first.text}, but rank {ranks[p]} calls "
                f"{header.text}; "
                "all ranks of a group must make the same calls in the same order (this was call "
                f"{first.sequence})"
            )
    n = len(headers)
    if first.kind == "all_to_all_v" and _unbalanced(headers):
        for a, sender in enumerate(headers):
            for b, receiver in enumerate(headers):
                gives = sender.tail[1 + b]
                wants = receiver.tail[1 + n + a]
                if gives != wants:
                    return (
                        f"[comm] rank {ranks[a]} sends {gives} elements to rank {ranks[b]} in "
                        f"{sender.text}, but that "
                        f"expects {wants} in {receiver.text}; both must give the same count"
                    )
    if first.kind == "scatter":
        root_header = headers[first.root]
        for p, header in enumerate(headers):
            if header.tail[0] >= 0 and header.tail != root_header.tail:
                return (
                    f"[comm] rank {ranks[first.root]} scatters pieces of "
                    f"{_piece(root_header.tail)} in "
                    f"{root_header.text}, but "
                    f"rank {ranks[p]} expects {_piece(header.tail)} in {header.text}; give the "
                    "same shape and dtype"
                )
    return None


def _piece(tail: Sequence[int]) -> str:
    return f"{NAMES[list(CODES)[tail[0]]]} {tuple(tail[2 : 2 + tail[1]])}"


class _Made(threading.local):
    # file and line that made the call that this thread carries out
    at: tuple[str, int] | None = None


made = _Made()


def caller_location(depth: int) -> tuple[str, int]:
    """File and line of the program that called odyssey: those of the nearest frame outside of
    the package. Where nobody outside called it, in `odyssey train` and in threads of its own,
    the nearest outside of `comm`; in a thread that makes calls of another, `made.at`.
    """
    if made.at is not None:
        return made.at
    frame: Any = sys._getframe(depth)
    fallback = None
    while frame is not None:
        file = frame.f_code.co_filename
        owner = _owners.get(file) or _owner_of(file)
        if owner == _USER:
            return file, frame.f_lineno
        if owner != _COMM and fallback is None:
            fallback = frame
        if owner == _PROGRAM:
            break
        frame = frame.f_back
    fallback = fallback or sys._getframe(depth)
    return fallback.f_code.co_filename, fallback.f_lineno


#: Whose code a file is: a user's; that of comm; the rest of the package and the standard library,
#: which stands between them in context managers, decorators and threads; that of the package's own
#: commands, which no program has called.
_USER, _COMM, _BETWEEN, _PROGRAM = range(1, 5)
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep
#: Folders of libraries that call on behalf of a user, such as torch: neither are they who called.
libraries: list[str] = []
# by file: a string is looked up in 30 ns, the name of a frame's module in 150
_owners: dict[str, int] = {}


def _owner_of(file: str) -> int:
    packages = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
    if file.startswith(_PACKAGE):
        folder = file.removeprefix(_PACKAGE).split(os.sep)[0]
        owner = {"comm": _COMM, "cli": _PROGRAM}.get(folder, _BETWEEN)
    else:
        library = file.startswith(_LIBRARY) and not any(name in file for name in packages)
        owner = _BETWEEN if library or file.startswith(("<frozen ", *libraries)) else _USER
    return _owners.setdefault(file, owner)


@functools.lru_cache(4096)
def describe(kind: str, described: tuple, path: str, line: int) -> tuple[int, str]:
    """(signature, text) of a call that a line of a file makes."""
    digest = hashlib.blake2b(repr((kind, described)).encode(), digest_size=8).digest()
    words = [kind]
    if described:
        dtype, shape, root, op, details = described
        words += [str(dtype)] if dtype else []
        words += [str(shape).replace(" ", "")] if shape is not None else []
        words += [str(op)] if op else []
        words += [f"root {root}"] if root >= 0 else []
        words += (
            [details if isinstance(details, str) else str(details).replace(" ", "")]
            if details
            else []
        )
    call = " ".join(words)
    file = "/".join(path.split(os.sep)[-2:])
    site = f" at {file[-60:]}:{line}"
    room = TEXT - len(site.encode())
    call = call if len(call.encode()) <= room else call[: room - 3] + "..."
    return int.from_bytes(digest, "little", signed=True), call + site


_ENVELOPE = struct.Struct(f"<qq{TEXT}s")


def envelope_bytes() -> int:
    """Length of a packed envelope, the header of a message from one rank to another."""
    return _ENVELOPE.size


def pack_envelope(envelope: Header) -> np.ndarray:
    """An envelope, (dtype code, elements) and text, as uint8."""
    return np.frombuffer(
        bytearray(_ENVELOPE.pack(*envelope.tail, _encoded(envelope.text))), np.uint8
    )


def unpack_envelope(data: np.ndarray) -> tuple[tuple[int, int], str]:
    """((dtype code, elements), text)."""
    dtype, count, text = _ENVELOPE.unpack(data)
    return (dtype, count), text.rstrip(b"\0").decode(errors="replace")


def check_envelope(
    sent: Sequence[int], text: str, out: np.ndarray, mine: Header, source: int, rank: int
) -> str | None:
    """Returns what is wrong between a message of (dtype code, elements) and the array that
    receives it, or None.
    """
    if tuple(sent) == mine.tail:
        return None
    dtype = NAMES[list(CODES)[sent[0]]]
    return (
        f"[comm] rank {source} sends {sent[1]} elements of {dtype} in {text}, but rank {rank} "
        f"receives {out.size} of "
        f"{NAMES[out.dtype]} in {mine.text}; give both the same number and dtype"
    )
