"""The contract of communication: what a communicator can do, what its arguments must be, and a world of one.

A backend is a subclass of `Communicator` that carries out a `Call` (`_begin`), sends, receives and makes sub-groups;
everything that is the same for all of them is here, once: the checks of arguments, what a call looks like to the other
ranks (`Header`), what makes two calls different (`verdict`), waiting with a deadline. What it is not: a transport.

Arrays are C-contiguous NumPy arrays. An array that is only read is copied where it is not contiguous; one that is
written (in place, `out=`) is refused.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import math
import os
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import CollectiveError, ConfigError, ShapeError

#: bfloat16 as a NumPy dtype: 16 bits with a name. `a.view(bfloat16)` of a uint16 array costs nothing; so does the way back.
bfloat16 = np.dtype([("bfloat16", "<u2")])

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(name)
    for name in (
        "float32",
        "float64",
        "float16",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
    )
} | {"bfloat16": bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CODES = {dtype: code for code, dtype in enumerate(DTYPES.values())}


class ReduceOp(str, enum.Enum):
    """How the numbers of the ranks become one. Wherever one is wanted, its value as a string will do."""

    SUM = "sum"
    MEAN = "mean"
    AVERAGE = "mean"
    MAX = "max"
    MIN = "min"
    PROD = "prod"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """The operation of a name; "average" and "avg" are "mean".

        Raises:
            ConfigError: there is none of this name.
        """
        found = _OPERATIONS.get(op)
        if found is None:
            raise ConfigError(f"[comm] operation {op!r}; it must be sum, mean, max, min or prod")
        return found


_OPERATIONS: dict[Any, ReduceOp] = {op.value: op for op in ReduceOp}
_OPERATIONS |= {op: op for op in ReduceOp} | {"average": ReduceOp.MEAN, "avg": ReduceOp.MEAN}
_UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.PROD: np.multiply,
}


# --- 16-bit floats -----------------------------------------------------------------------------------------------------


def widen(array: np.ndarray) -> np.ndarray:
    """float16 or bfloat16 as float32, exactly."""
    if array.dtype == bfloat16:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def narrow(array: np.ndarray, out: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest float16 or bfloat16 (ties to even), into `out`."""
    if out.dtype == bfloat16:
        bits = array.view(np.uint32)
        rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        out.view(np.uint16)[...] = np.where(np.isnan(array), 0x7FC0 | (bits >> 16), rounded)
    else:
        with np.errstate(over="ignore"):
            out[...] = array
    return out


def tree_reduce(arrays: Sequence[np.ndarray], op: ReduceOp) -> np.ndarray:
    """One array of several along the fixed tree (a node over n splits after the largest power of two below n).

    Always a new array. Integers wrap around.
    """
    if len(arrays) == 1:
        return arrays[0].copy()
    half = 1 << (len(arrays) - 1).bit_length() - 1
    a, b = tree_reduce(arrays[:half], op), tree_reduce(arrays[half:], op)
    with np.errstate(over="ignore"):
        return np.asarray(_UFUNCS[op](a, b, out=a if a.ndim else None), a.dtype)


# --- a call, and what the other ranks see of it ------------------------------------------------------------------------


class Call:
    """One collective operation with its buffers, checked; what a backend carries out.

    Attributes:
        kind: "barrier", "broadcast", "reduce", "all_reduce", "scatter", "gather", "all_gather", "reduce_scatter",
            "all_to_all", "all_to_all_v", "all_gather_v" or "group" (a barrier that agrees on members).
        send: what this rank gives, contiguous; None if nothing. For "broadcast" and "all_gather_v" it is `out`.
        out: where the result goes, contiguous; None where this rank gets none, and in a scatter whose receiver does
            not know the shape yet (`place` makes it). `send is out` means in place.
        op: SUM, MAX, MIN or PROD where numbers are combined. MEAN is the sum here; 16-bit floats are float32 here.
        root: rank in the group, -1 without one.
        send_counts, receive_counts: elements per rank ("all_to_all_v").
        ranges: elements [a, b) of each rank ("all_gather_v").
        finish: gives the result when `out` is filled.
        blocking: the caller waits at once.
    """

    __slots__ = (
        "kind",
        "send",
        "out",
        "op",
        "root",
        "send_counts",
        "receive_counts",
        "ranges",
        "finish",
        "blocking",
        "described",
        "header",
        "place",
    )

    def __init__(
        self,
        kind: str,
        send: np.ndarray | None = None,
        out: np.ndarray | None = None,
        *,
        op: ReduceOp | None = None,
        root: int = -1,
        send_counts: tuple[int, ...] = (),
        receive_counts: tuple[int, ...] = (),
        ranges: tuple[tuple[int, int], ...] = (),
        described: tuple = (),
        finish: Callable[[], Any] | None = None,
    ) -> None:
        self.kind, self.send, self.out, self.op, self.root = kind, send, out, op, root
        self.send_counts, self.receive_counts, self.ranges = send_counts, receive_counts, ranges
        #: what must be the same on all ranks, beside the kind: (dtype, shape, root, op, ranges or members)
        self.described = described
        self.finish = finish
        self.blocking = False
        self.header: Header | None = None
        self.place: Callable[[np.dtype, tuple[int, ...]], None] | None = None

    def result(self) -> Any:
        """What the caller gets; called once, when `out` is filled."""
        return self.out if self.finish is None else self.finish()


class Header(NamedTuple):
    """What the other ranks see of a call.

    `signature` is a hash of what must be equal; `text` says it to people, with the source line; `tail` has numbers
    that each rank may have of its own: send and receive counts of an all_to_all_v; dtype code (-1: not known here),
    dimensions and shape of a piece in a scatter.
    """

    sequence: int
    signature: int
    text: str
    tail: tuple[int, ...]
    kind: str = ""
    root: int = -1
    blocking: bool = False


TEXT = 144  # bytes of a header's text
_HEAD = struct.Struct(f"<qq?7x{TEXT}s")
_DIMENSIONS = 8


def tail_length(size: int) -> int:
    """Numbers in the tail of a header in a group of `size`."""
    return max(2 * size, 2 + _DIMENSIONS)


def header_bytes(size: int) -> int:
    """Length of a packed header in a group of `size`."""
    return _HEAD.size + 8 * tail_length(size)


def pack(header: Header, into: np.ndarray) -> None:
    """Writes a header into uint8 memory of `header_bytes(size)`."""
    text = _encoded(header.text)
    _HEAD.pack_into(into, 0, header.sequence, header.signature, header.blocking, text)
    if header.tail:
        struct.pack_into(f"<{len(header.tail)}q", into, _HEAD.size, *header.tail)


@functools.lru_cache(1024)
def _encoded(text: str) -> bytes:
    data = text.encode()
    return data if len(data) <= TEXT else data[: TEXT - 3].decode(errors="ignore").encode() + b"..."


def unpack(data: np.ndarray, like: Header) -> Header:
    """A header out of the bytes that `pack` wrote; its kind is that of `like`, which matters if they are equal."""
    sequence, signature, blocking, text = _HEAD.unpack_from(data, 0)
    tail = struct.unpack_from(f"<{len(like.tail)}q", data, _HEAD.size) if like.tail else ()
    return Header(
        sequence, signature, text.rstrip(b"\0").decode(errors="replace"), tail, like.kind, like.root, blocking
    )


#: The first bytes of a packed header hold the sequence, the signature and the blocking flag: equal bytes, equal calls.
PREFIX = 17


def verdict(headers: Sequence[Header], ranks: Sequence[int]) -> str | None:
    """What is wrong with the calls of all ranks of a group, or None. The same answer on all of them.

    Args:
        headers: of ranks 0, 1, ... of the group.
        ranks: their world ranks, for the message.
    """
    first = headers[0]
    for p, other in enumerate(headers):
        if (other.sequence, other.signature) != (first.sequence, first.signature):
            return (
                f"[comm] rank {ranks[0]} calls {first.text}, but rank {ranks[p]} calls {other.text}; "
                f"all ranks of a group must make the same calls in the same order (this was call {first.sequence})"
            )
    n = len(headers)
    if first.kind == "all_to_all_v":
        for a, sender in enumerate(headers):
            for b, receiver in enumerate(headers):
                gives, wants = sender.tail[b], receiver.tail[n + a]
                if gives != wants:
                    return (
                        f"[comm] rank {ranks[a]} sends {gives} elements to rank {ranks[b]} in {sender.text}, but that "
                        f"expects {wants} in {receiver.text}; both must give the same count"
                    )
    if first.kind == "scatter":
        given = headers[first.root]
        for p, other in enumerate(headers):
            if other.tail[0] >= 0 and other.tail != given.tail:
                return (
                    f"[comm] rank {ranks[first.root]} scatters pieces of {_piece(given.tail)} in {given.text}, but "
                    f"rank {ranks[p]} expects {_piece(other.tail)} in {other.text}; give the same shape and dtype"
                )
    return None


def _piece(tail: Sequence[int]) -> str:
    dtype, shape = piece(tail)
    return f"{_NAMES[dtype]} {shape}"


def piece(tail: Sequence[int]) -> tuple[np.dtype, tuple[int, ...]]:
    """(dtype, shape) that the tail of a scatter's header carries."""
    return list(_CODES)[tail[0]], tuple(tail[2 : 2 + tail[1]])


def _piece_tail(array: np.ndarray | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    if array is None:
        return (-1, *(0,) * (1 + _DIMENSIONS))
    return (_CODES[array.dtype], len(shape), *shape, *(0,) * (_DIMENSIONS - len(shape)))


@functools.lru_cache(4096)
def _described(kind: str, described: tuple, code: Any, line: int) -> tuple[int, str]:
    """(signature, text) of a call."""
    digest = hashlib.blake2b(repr((kind, described)).encode(), digest_size=8).digest()
    words = [kind]
    if described:
        dtype, shape, root, op, more = described
        words += [str(dtype)] if dtype else []
        words += [str(shape).replace(" ", "")] if shape is not None else []
        words += [str(op)] if op else []
        words += [f"root {root}"] if root >= 0 else []
        words += [more if isinstance(more, str) else str(more).replace(" ", "")] if more else []
    call = " ".join(words)
    file = "/".join(code.co_filename.split(os.sep)[-2:])
    site = f" at {file[-60:]}:{line}"
    room = TEXT - len(site.encode())
    call = call if len(call.encode()) <= room else call[: room - 3] + "..."
    return int.from_bytes(digest, "little", signed=True), call + site


def _site(depth: int) -> tuple[Any, int]:
    """Code and line of the first frame outside of this package."""
    frame = sys._getframe(depth)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


_PACKAGE = __name__.rpartition(".")[0]

#: `here.world` is the communicator of a thread that is a rank of a mock world.
here = threading.local()


# --- requests ----------------------------------------------------------------------------------------------------------


class Request:
    """An operation under way. It holds its buffers until it is complete; do not touch them before.

    This class itself is an operation that is complete.
    """

    __slots__ = ("_result", "_error", "_complete", "__weakref__")

    def __init__(self, result: Any = None) -> None:
        self._result, self._error, self._complete = result, None, True

    def test(self) -> bool:
        """Whether `wait` would return, or raise, at once. Calling it moves the operation on."""
        return self._complete

    def wait(self) -> Any:
        """The result, when it is there; again the same if called again.

        Raises:
            CollectiveError: the ranks' calls differ, or one did not come before the deadline.
        """
        if not self._complete and not self.test():
            self._block()
        if self._error is not None:
            raise self._error
        return self._result

    def _block(self) -> None:
        raise NotImplementedError

    def _fail(self, error: BaseException) -> None:
        self._error, self._complete = error, True

    def describe(self) -> str:
        """What it is, for messages."""
        return "operation"


class Waiting(Request):
    """A request that is not complete when it is made: waits by testing, with a back-off and a deadline."""

    __slots__ = ("_comm",)

    def __init__(self, comm: Communicator) -> None:
        self._result, self._error, self._complete = None, None, False
        self._comm = comm

    def _block(self) -> None:
        """Tests until complete: some spins, then giving the core away, then sleeping.

        Spinning is for short waits on a core of one's own: with more ranks than cores a spinning rank keeps those
        away that it waits for (docs/log.md: a header exchange of 4 ranks on 2 cores takes 4 ms spinning, 17 us yielding).
        """
        test = self.test
        for _ in range(0 if self._comm._crowded else 500):
            if test():
                return
        start = time.monotonic()
        timeout = deadline()
        look, nap = start + _LOOK_S, 20e-6
        while not test():
            now = time.monotonic()
            if now - start < _YIELD_S:
                os.sched_yield()
                continue
            if now - start > timeout:
                self._fail(CollectiveError(f"[comm] waited {timeout:g} s in {self.describe()}: {self._absent()}"))
                self._comm._broke(self._error)
                return
            if now > look:
                look = now + 0.25
                self._look()
            time.sleep(nap)
            nap = min(1.5 * nap, 1e-3)

    def _absent(self) -> str:
        """Who did not come, and what to do."""
        return "it did not end; set ODYSSEY_TIMEOUT=SECONDS to wait longer"

    def _look(self) -> None:
        """Called while waiting long: may fail the request."""


_YIELD_S = 300e-6
_LOOK_S = 0.5


def did_not_come(ranks: Sequence[int]) -> str:
    """The end of a message about ranks that were waited for."""
    if not ranks:
        return "all ranks came, but the data did not"
    names = ", ".join(map(str, ranks))
    what = f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
    return f"{what} did not come; see what they do instead, or set ODYSSEY_TIMEOUT=SECONDS to wait longer"


def deadline() -> float:
    """Seconds that an operation waits for others: ODYSSEY_TIMEOUT, default 600."""
    text = os.environ.get("ODYSSEY_TIMEOUT", "")
    if not text:
        return 600.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ConfigError(f"[comm] ODYSSEY_TIMEOUT={text}; it must be a number of seconds above 0")
    return value


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- communicators -----------------------------------------------------------------------------------------------------


class Communicator:
    """A group of ranks, and this process's place in it. This class itself is a group of one, and does it all alone.

    All ranks of a group make the same calls in the same order, with the same dtype, shape, op and root; a rank that
    does not gets a CollectiveError, as do all others (docs/communication.md). dtypes: float32, float64, float16,
    `bfloat16` (a view of uint16), int8 to int64, uint8 to uint64.

    Sums, maxima, ... of 16-bit floats are computed in float32 and rounded once, at the end. Means of integers are
    refused. The order of additions is the backend's: "local" has none, "mock" and "shm" add along the fixed tree,
    "mpi" and "gloo" in the order of their library.

    Attributes:
        rank, size: place in the group, ranks of the group.
        local_rank, local_size: the same among those of the group that run on this machine.
        ranks: world ranks of the members.
        name: of the backend.
        why: one line: which backend, and why this one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    ranks: tuple[int, ...] = (0,)
    name: str = "local"
    why: str = "local: one process"
    _crowded: bool = False
    _broken: BaseException | None = None

    def __init__(self, parent: Communicator | None = None) -> None:
        """parent: the communicator of which this rank is split off alone."""
        self._parent = parent
        self._sequence = 0
        self._mailbox: dict[int, deque[np.ndarray]] = {}
        if parent is not None:
            self.ranks, self.name, self.why = (parent.ranks[parent.rank],), parent.name, parent.why

    def __repr__(self) -> str:
        return f"<{self.name} communicator, rank {self.rank} of {self.size}>"

    # --- collectives ---

    def barrier(self) -> None:
        """Waits until all ranks are here."""
        self._now(Call("barrier"))

    def barrier_start(self) -> Request:
        """`barrier`, not waited for."""
        return self._later(Call("barrier"))

    def broadcast(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """Overwrites `array` on all ranks with that of `root`; returns it. All give the same shape and dtype."""
        return self._now(self._broadcast(array, root))

    def broadcast_start(self, array: np.ndarray, root: int = 0) -> Request:
        """`broadcast`, not waited for."""
        return self._later(self._broadcast(array, root))

    def reduce(
        self, array: np.ndarray, op: ReduceOp | str = "sum", root: int = 0, out: np.ndarray | None = None
    ) -> np.ndarray | None:
        """The arrays of all ranks combined, on `root`; None elsewhere. `out` may be `array`."""
        return self._now(self._reduce("reduce", array, op, out, root))

    def reduce_start(
        self, array: np.ndarray, op: ReduceOp | str = "sum", root: int = 0, out: np.ndarray | None = None
    ) -> Request:
        """`reduce`, not waited for."""
        return self._later(self._reduce("reduce", array, op, out, root))

    def all_reduce(
        self, array: np.ndarray, op: ReduceOp | str = "sum", out: np.ndarray | None = None
    ) -> np.ndarray:
        """The arrays of all ranks combined, on all: a new array, or `out`, which may be `array`."""
        return self._now(self._reduce("all_reduce", array, op, out))

    def all_reduce_start(
        self, array: np.ndarray, op: ReduceOp | str = "sum", out: np.ndarray | None = None
    ) -> Request:
        """`all_reduce`, not waited for."""
        return self._later(self._reduce("all_reduce", array, op, out))

    def scatter(self, array: np.ndarray | None, root: int = 0, out: np.ndarray | None = None) -> np.ndarray:
        """Row r of the (size, ...) array of `root`, on rank r. The others give None."""
        return self._now(self._scatter(array, root, out))

    def scatter_start(self, array: np.ndarray | None, root: int = 0, out: np.ndarray | None = None) -> Request:
        """`scatter`, not waited for."""
        return self._later(self._scatter(array, root, out))

    def gather(self, array: np.ndarray, root: int = 0) -> np.ndarray | None:
        """The arrays of all ranks as (size, ...), on `root`; None elsewhere."""
        return self._now(self._gather(array, root))

    def gather_start(self, array: np.ndarray, root: int = 0) -> Request:
        """`gather`, not waited for."""
        return self._later(self._gather(array, root))

    def all_gather(self, array: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """The arrays of all ranks as (size, ...), on all."""
        return self._now(self._all_gather(array, out))

    def all_gather_start(self, array: np.ndarray, out: np.ndarray | None = None) -> Request:
        """`all_gather`, not waited for."""
        return self._later(self._all_gather(array, out))

    def reduce_scatter(
        self, array: np.ndarray, op: ReduceOp | str = "sum", out: np.ndarray | None = None
    ) -> np.ndarray:
        """Of the (size * n, ...) arrays of all ranks, combined, rows r * n to (r + 1) * n on rank r."""
        return self._now(self._reduce("reduce_scatter", array, op, out))

    def reduce_scatter_start(
        self, array: np.ndarray, op: ReduceOp | str = "sum", out: np.ndarray | None = None
    ) -> Request:
        """`reduce_scatter`, not waited for."""
        return self._later(self._reduce("reduce_scatter", array, op, out))

    def all_to_all(self, array: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Row p of the (size, ...) array goes to rank p; row p of the result came from rank p."""
        return self._now(self._all_to_all(array, out))

    def all_to_all_start(self, array: np.ndarray, out: np.ndarray | None = None) -> Request:
        """`all_to_all`, not waited for."""
        return self._later(self._all_to_all(array, out))

    def all_to_all_v(
        self, send: np.ndarray, send_counts: Sequence[int], receive: np.ndarray, receive_counts: Sequence[int]
    ) -> None:
        """Sends consecutive pieces of `send` to ranks 0, 1, ... and receives theirs, in order, into `receive`.

        Counts in elements, one per rank; what a rank sends to another must be what that one expects.
        """
        self._now(self._all_to_all_v(send, send_counts, receive, receive_counts))

    def all_to_all_v_start(
        self, send: np.ndarray, send_counts: Sequence[int], receive: np.ndarray, receive_counts: Sequence[int]
    ) -> Request:
        """`all_to_all_v`, not waited for."""
        return self._later(self._all_to_all_v(send, send_counts, receive, receive_counts))

    def all_gather_v(self, array: np.ndarray, ranges: Sequence[tuple[int, int]]) -> None:
        """Fills, in place, elements ranges[p] = [a, b) of the flat `array` on all ranks with those of rank p.

        The ranges are the same on all ranks, do not overlap and may be empty.
        """
        self._now(self._all_gather_v(array, ranges))

    def all_gather_v_start(self, array: np.ndarray, ranges: Sequence[tuple[int, int]]) -> Request:
        """`all_gather_v`, not waited for."""
        return self._later(self._all_gather_v(array, ranges))

    # --- one to one ---

    def send(self, array: np.ndarray, dest: int, tag: int = 0) -> None:
        """Sends to rank `dest`. May return before it is received, and may wait until it is."""
        self.send_start(array, dest, tag).wait()

    def send_start(self, array: np.ndarray, dest: int, tag: int = 0) -> Request:
        """`send`, not waited for: `array` must stay as it is until the request is complete."""
        self._check_peer("send", "dest", dest, tag)
        array = self._read("send", array)
        if dest == self.rank:
            self._mailbox.setdefault(tag, deque()).append(array.copy())
            return Request()
        return self._send(array, dest, tag, self._letter("send", array, dest, tag))

    def recv(self, out: np.ndarray, source: int, tag: int = 0) -> np.ndarray:
        """Receives from rank `source` what it sent with this tag, in the order sent, into `out`; returns it.

        Raises:
            CollectiveError: what was sent has another dtype or number of elements; it is lost.
        """
        return self.recv_start(out, source, tag).wait()

    def recv_start(self, out: np.ndarray, source: int, tag: int = 0) -> Request:
        """`recv`, not waited for."""
        self._check_peer("recv", "source", source, tag)
        self._written("recv", out)
        mine = self._letter("recv", out, source, tag)
        if source != self.rank:
            return self._recv(out, source, tag, mine)
        return _FromSelf(self._mailbox.setdefault(tag, deque()), out, mine, self.ranks[self.rank])

    # --- groups ---

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Groups of the ranks with the same color, ordered by (key, rank); None for those whose color is None.

        All ranks of this group call it.
        """
        for name, value in (("color", color), ("key", key)):
            if value is not None and (not isinstance(value, (int, np.integer)) or (name == "color" and value < 0)):
                raise ConfigError(f"[comm] {name} is {value!r}; it must be an integer{', at least 0, or None' * (name == 'color')}")
        mine = np.array([-1 if color is None else color, key], np.int64)
        everyone = self.all_gather(mine)
        if color is None:
            return None
        members = [(int(k), p) for p, (c, k) in enumerate(everyone) if c == color]
        return self._part(tuple(p for _, p in sorted(members)))

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """The group of these ranks of this one, in this order; None for the others. All ranks of this group call it."""
        members = tuple(int(p) for p in ranks)
        if not members or len(set(members)) < len(members) or not all(0 <= p < self.size for p in members):
            raise ConfigError(
                f"[comm] group of ranks {list(members)}; give different ranks from 0 to {self.size - 1}, at least one"
            )
        self._now(Call("group", described=("", None, -1, None, members)))
        return self._part(members) if self.rank in members else None

    def _part(self, members: tuple[int, ...]) -> Communicator:
        return Communicator(parent=self) if len(members) == 1 else self._sub(members)

    def close(self) -> None:
        """Gives back what a sub-group holds in the library (MPI has about 2,000 of them); all its ranks call it."""

    def abort(self, code: int) -> None:
        """Ends all ranks of the world at once with an exit code."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self._parent is not None:
            self._parent.abort(code)
        os._exit(code)

    # --- what a backend does ---

    def _begin(self, call: Call) -> Request:
        """Starts a call whose header is made. Here: of one rank, so it is all copying."""
        if call.kind == "all_to_all_v":
            n = call.send_counts[0]
            if n != call.receive_counts[0]:
                raise CollectiveError(verdict([call.header], self.ranks))
            call.out[:n] = call.send[:n]
        elif call.out is not None and call.out is not call.send:
            call.out.reshape(-1)[...] = call.send.reshape(-1)
        return Request(call.result())

    def _send(self, array: np.ndarray, dest: int, tag: int, letter: Header) -> Request:
        """Starts sending to another rank."""
        raise NotImplementedError

    def _recv(self, out: np.ndarray, source: int, tag: int, letter: Header) -> Request:
        """Starts receiving from another rank."""
        raise NotImplementedError

    def _sub(self, members: tuple[int, ...]) -> Communicator:
        """A communicator of at least two members, this rank among them; only they call it, at the same time."""
        raise NotImplementedError

    def _broke(self, error: BaseException) -> None:
        """A wait ended at its deadline: the ranks are no longer in step, and later calls raise the same error."""
        self._broken = error

    # --- checks and preparation, for all backends ---

    def _now(self, call: Call) -> Any:
        call.blocking = True
        return self._start(call).wait()

    def _later(self, call: Call) -> Request:
        return self._start(call)

    def _start(self, call: Call) -> Request:
        if self._broken is not None:
            raise self._broken
        code, line = _site(3)
        signature, text = _described(call.kind, call.described, code, line)
        tail = ()
        if call.kind == "all_to_all_v":
            tail = (*call.send_counts, *call.receive_counts)
        elif call.kind == "scatter":
            known = call.out if call.send is None else call.send
            tail = _piece_tail(known, known.shape[0 if call.send is None else 1 :] if known is not None else ())
        call.header = Header(self._sequence, signature, text, tail, call.kind, call.root, call.blocking)
        self._sequence += 1
        return self._begin(call)

    def _letter(self, kind: str, array: np.ndarray, peer: int, tag: int) -> Header:
        """What a receiver sees of a message: (dtype code, elements) in its tail."""
        code, line = _site(3)
        towards = ("to", "from")[kind == "recv"]
        _, text = _described(kind, (_NAMES[array.dtype], array.shape, -1, None, f"{towards} rank {self.ranks[peer]} tag {tag}"), code, line)
        return Header(0, 0, text, (_CODES[array.dtype], array.size), kind)

    def _read(self, kind: str, array: Any) -> np.ndarray:
        """An array that is only read: contiguous, copied if need be."""
        array = np.asarray(array, order="C")
        if array.dtype not in _CODES:
            raise ShapeError(f"[comm] {kind} of dtype {array.dtype}; it must be one of {', '.join(DTYPES)}")
        return array

    def _written(
        self, kind: str, array: Any, dtype: np.dtype | None = None, shape: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """An array that is written: as it is, or refused."""
        if not isinstance(array, np.ndarray):
            raise ShapeError(f"[comm] {kind} writes into a {type(array).__name__}; give a NumPy array")
        if array.dtype not in _CODES:
            raise ShapeError(f"[comm] {kind} of dtype {array.dtype}; it must be one of {', '.join(DTYPES)}")
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ShapeError(
                f"[comm] {kind} writes into an array that is not C-contiguous and writable; give a contiguous one"
            )
        if (dtype is not None and array.dtype != dtype) or (shape is not None and array.shape != shape):
            raise ShapeError(
                f"[comm] {kind}: out is {_NAMES[array.dtype]} {array.shape}; it must be {_NAMES[dtype]} {shape}"
            )
        return array

    def _out(
        self, kind: str, out: np.ndarray | None, send: np.ndarray, shape: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(send, out): out made or checked, and the two the same or apart."""
        if out is None:
            return send, np.empty(shape, send.dtype)
        self._written(kind, out, send.dtype, shape)
        if out is not send and np.may_share_memory(out, send):
            if out.size == send.size and out.ctypes.data == send.ctypes.data and kind in ("all_reduce", "reduce"):
                return out, out
            send = send.copy()
        return send, out

    def _check_root(self, kind: str, root: int) -> int:
        if not isinstance(root, (int, np.integer)) or not 0 <= root < self.size:
            raise ConfigError(f"[comm] {kind} with root {root}; it must be a rank from 0 to {self.size - 1}")
        return int(root)

    def _check_peer(self, kind: str, name: str, peer: int, tag: int) -> None:
        if not isinstance(peer, (int, np.integer)) or not 0 <= peer < self.size:
            raise ConfigError(f"[comm] {kind} with {name} {peer}; it must be a rank from 0 to {self.size - 1}")
        if not isinstance(tag, (int, np.integer)) or not 0 <= tag <= MAX_TAG:
            raise ConfigError(f"[comm] {kind} with tag {tag}; it must be from 0 to {MAX_TAG}")
        if self._broken is not None:
            raise self._broken

    def _broadcast(self, array: np.ndarray, root: int) -> Call:
        root = self._check_root("broadcast", root)
        if self.rank != root or not isinstance(array, np.ndarray):
            self._written("broadcast", array)
        elif not array.flags.c_contiguous:
            raise ShapeError("[comm] broadcast of an array that is not C-contiguous; give a contiguous one")
        self._read("broadcast", array)
        return Call(
            "broadcast", array, array, root=root, described=(_NAMES[array.dtype], array.shape, root, None, None)
        )

    def _reduce(self, kind: str, array: np.ndarray, op: ReduceOp | str, out: np.ndarray | None, root: int = -1) -> Call:
        op = ReduceOp.of(op)
        if kind == "reduce":
            root = self._check_root(kind, root)
        send = self._read(kind, array)
        dtype = send.dtype
        if op is ReduceOp.MEAN and dtype.kind in "iu":
            raise ConfigError(f"[comm] {kind} with mean of {dtype} is not an integer; sum them, or convert to float")
        described = (_NAMES[dtype], send.shape, root, op.value, None)
        shape = send.shape
        if kind == "reduce_scatter":
            if not shape or shape[0] % self.size:
                raise ShapeError(
                    f"[comm] reduce_scatter of shape {shape}: its rows do not divide by {self.size} ranks; pad it"
                )
            shape = (shape[0] // self.size, *shape[1:])
        wire = ReduceOp.SUM if op is ReduceOp.MEAN else op
        if kind == "reduce" and self.rank != root:
            return Call(kind, widen(send) if dtype.itemsize == 2 and dtype.kind in "fV" else send, None,
                        op=wire, root=root, described=described)
        send, out = self._out(kind, out, send, shape)
        half = dtype.itemsize == 2 and dtype.kind in "fV"
        if half:
            send, total = widen(send), np.empty(shape, np.float32)
        else:
            total = out
        finish = None
        if half or op is ReduceOp.MEAN:

            def finish() -> np.ndarray:
                if op is ReduceOp.MEAN:
                    np.divide(total, self.size, out=total)
                return narrow(total, out) if half else out

        return Call(kind, send, total, op=wire, root=root, described=described, finish=finish)

    def _scatter(self, array: np.ndarray | None, root: int, out: np.ndarray | None) -> Call:
        root = self._check_root("scatter", root)
        if out is not None:
            self._written("scatter", out)
        send = None
        if self.rank == root:
            if array is None:
                raise ShapeError(f"[comm] scatter: root {root} gives None; give an array of {self.size} rows")
            send = self._rows("scatter", array)
            send, out = self._out("scatter", out, send, send.shape[1:])
            shape = out.shape
        else:
            shape = () if out is None else out.shape
        if len(shape) > _DIMENSIONS:
            raise ShapeError(f"[comm] scatter of {len(shape)} dimensions; it takes at most {_DIMENSIONS}")
        call = Call("scatter", send, out, root=root, described=("", None, root, None, None))

        def place(dtype: np.dtype, shape: tuple[int, ...]) -> None:
            if call.out is None:
                call.out = np.empty(shape, dtype)

        call.place = place
        return call

    def _rows(self, kind: str, array: Any) -> np.ndarray:
        array = self._read(kind, array)
        if not array.ndim or array.shape[0] != self.size:
            raise ShapeError(f"[comm] {kind} of shape {array.shape}; it must have {self.size} rows, one per rank")
        return array

    def _gather(self, array: np.ndarray, root: int) -> Call:
        root = self._check_root("gather", root)
        send = self._read("gather", array)
        out = np.empty((self.size, *send.shape), send.dtype) if self.rank == root else None
        return Call("gather", send, out, root=root, described=(_NAMES[send.dtype], send.shape, root, None, None))

    def _all_gather(self, array: np.ndarray, out: np.ndarray | None) -> Call:
        send = self._read("all_gather", array)
        send, out = self._out("all_gather", out, send, (self.size, *send.shape))
        return Call("all_gather", send, out, described=(_NAMES[send.dtype], send.shape, -1, None, None))

    def _all_to_all(self, array: np.ndarray, out: np.ndarray | None) -> Call:
        send = self._rows("all_to_all", array)
        if out is send:
            send = send.copy()
        send, out = self._out("all_to_all", out, send, send.shape)
        return Call("all_to_all", send, out, described=(_NAMES[send.dtype], send.shape, -1, None, None))

    def _all_to_all_v(
        self, send: np.ndarray, send_counts: Sequence[int], receive: np.ndarray, receive_counts: Sequence[int]
    ) -> Call:
        kind = "all_to_all_v"
        send = self._read(kind, send)
        self._written(kind, receive, send.dtype, receive.shape)
        if send.size and np.may_share_memory(send, receive):
            send = send.copy()
        counts = []
        for name, array, given in (("send", send, send_counts), ("receive", receive, receive_counts)):
            numbers = tuple(int(n) for n in given)
            if len(numbers) != self.size or min(numbers) < 0 or sum(numbers) > array.size:
                raise ShapeError(
                    f"[comm] {kind}: {name}_counts are {list(numbers)} for {array.size} elements and {self.size} ranks; "
                    "give one count per rank, in sum at most the elements"
                )
            counts.append(numbers)
        return Call(
            kind,
            send.reshape(-1),
            receive.reshape(-1),
            send_counts=counts[0],
            receive_counts=counts[1],
            described=(_NAMES[send.dtype], None, -1, None, None),
            finish=_nothing,
        )

    def _all_gather_v(self, array: np.ndarray, ranges: Sequence[tuple[int, int]]) -> Call:
        self._written("all_gather_v", array)
        pieces = tuple((int(a), int(b)) for a, b in ranges)
        ends = sorted(pieces)
        if (
            len(pieces) != self.size
            or any(not 0 <= a <= b <= array.size for a, b in pieces)
            or any(b > c for (_, b), (c, d) in zip(ends, ends[1:], strict=False) if d > c)
        ):
            raise ShapeError(
                f"[comm] all_gather_v: ranges are {list(pieces)} for {array.size} elements and {self.size} ranks; "
                "give one [start, end) per rank, without overlap"
            )
        flat = array.reshape(-1)
        return Call(
            "all_gather_v",
            flat,
            flat,
            ranges=pieces,
            described=(_NAMES[array.dtype], array.shape, -1, None, pieces),
            finish=_nothing,
        )


MAX_TAG = 16382  # MPI promises tags to 32767; a message takes two


def _nothing() -> None:
    return None


def check_letter(sent: Sequence[int], text: str, out: np.ndarray, mine: Header, source: int, rank: int) -> str | None:
    """What is wrong between a message of (dtype code, elements) and the array that is to receive it, or None."""
    if tuple(sent) == mine.tail:
        return None
    dtype = _NAMES[list(_CODES)[sent[0]]]
    return (
        f"[comm] rank {source} sends {sent[1]} elements of {dtype} in {text}, but rank {rank} receives {out.size} of "
        f"{_NAMES[out.dtype]} in {mine.text}; give both the same number and dtype"
    )


class _FromSelf(Request):
    """A message of this rank to itself."""

    __slots__ = ("_box", "_out", "_mine", "_rank")

    def __init__(self, box: deque[np.ndarray], out: np.ndarray, mine: Header, rank: int) -> None:
        self._result, self._error, self._complete = None, None, False
        self._box, self._out, self._mine, self._rank = box, out, mine, rank

    def test(self) -> bool:
        if not self._complete and self._box:
            array = self._box.popleft()
            wrong = check_letter((_CODES[array.dtype], array.size), "send", self._out, self._mine, self._rank, self._rank)
            if wrong:
                self._fail(CollectiveError(wrong))
            else:
                self._out.reshape(-1)[...] = array.reshape(-1)
                self._result, self._complete = self._out, True
        return self._complete

    def _block(self) -> None:
        raise CollectiveError(
            f"[comm] rank {self._rank} waits for itself in {self._mine.text}: nothing was sent before; send first"
        )


# --- two steps: headers, then data -------------------------------------------------------------------------------------


class Staged(Communicator):
    """A communicator that exchanges headers first and data when they agree; for transports that check nothing.

    A wrong call so never meets the buffers of another. Headers of later calls may be under way while data of earlier
    ones are; data are posted in the order of the calls, on all ranks alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue: deque[_Staged] = deque()
        self._lock = threading.RLock()

    def _begin(self, call: Call) -> Request:
        if self.size == 1:
            return super()._begin(call)
        with self._lock:
            pending = _Staged(self, call, self._send_header(call.header))
            self._queue.append(pending)
        return pending

    def _advance(self, pending: _Staged) -> None:
        with self._lock:
            while self._queue:
                head = self._queue[0]
                headers = self._headers(head.handle, head.call.header)
                if headers is None:
                    break
                self._queue.popleft()
                wrong = headers and verdict(headers, self.ranks)
                if wrong:
                    error = CollectiveError(wrong)
                    error.everywhere = len(self.ranks) == self._world_size
                    head._fail(error)
                    continue
                call = head.call
                if call.place is not None:
                    call.place(*piece(headers[call.root].tail))
                blocking = all(h.blocking for h in headers) if headers else call.blocking
                head.handle, head.posted = self._post(call, blocking), True
            if pending.posted and not pending._complete and self._posted(pending.handle):
                pending._result, pending._complete = pending.call.result(), True
                pending.handle = pending.call = None

    _world_size = 1

    def _send_header(self, header: Header) -> Any:
        """Starts the exchange of headers; returns a handle."""
        raise NotImplementedError

    def _headers(self, handle: Any, mine: Header) -> list[Header] | None:
        """The headers of all ranks when they have come, None before; called until then.

        An empty list says that all are equal to `mine`, except for their texts; not for kinds that have a tail.
        """
        raise NotImplementedError

    def _missing(self, handle: Any) -> list[int]:
        """Ranks of this group whose headers have not come."""
        raise NotImplementedError

    def _gone(self, ranks: Sequence[int]) -> list[int]:
        """Those of these ranks of which is known that they have ended."""
        return []

    def _post(self, call: Call, blocking: bool) -> Any:
        """Starts the data; returns a handle. blocking: all ranks wait for this call at once."""
        raise NotImplementedError

    def _posted(self, handle: Any) -> bool:
        """Whether the data are there."""
        raise NotImplementedError


class _Staged(Waiting):
    __slots__ = ("call", "handle", "posted", "_text", "_suspect")

    def __init__(self, comm: Staged, call: Call, handle: Any) -> None:
        super().__init__(comm)
        self.call, self.handle, self.posted = call, handle, False
        self._text, self._suspect = call.header.text, 0

    def test(self) -> bool:
        if not self._complete:
            self._comm._advance(self)
        return self._complete

    def describe(self) -> str:
        return self._text

    def _late(self) -> list[int]:
        """Whose headers are missing: of this call, or of an earlier one that holds it up."""
        comm = self._comm
        return comm._missing(comm._queue[0].handle) if not self.posted and comm._queue else []

    def _absent(self) -> str:
        return did_not_come([self._comm.ranks[p] for p in self._late()])

    def _look(self) -> None:
        gone = self._comm._gone(self._late())
        if not gone:
            return
        self._suspect += 1
        if self._suspect > 3:  # a header that was sent before the end would have come by now
            names = ", ".join(str(self._comm.ranks[p]) for p in gone)
            error = CollectiveError(f"[comm] rank {names} has ended; {self._text} waits for it for ever")
            self._fail(error)
            self._comm._broke(error)
