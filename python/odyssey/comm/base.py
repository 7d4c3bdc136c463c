"""The contract of communication: what a communicator can do, what its arguments must be, and a
world of one.

A backend is a subclass of `Communicator` that carries out a `Call` (`_begin`), sends, receives and
makes sub-groups; what is the same for all is here or in calls.py: checks of arguments, deadlines,
what a call looks like to other ranks.

Arrays are C-contiguous NumPy arrays. An array that is only read is copied where it is not
contiguous; one that is written (in place, `out=`) is refused.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from ..base import slot
from ..base.uncopied import refuse
from ..errors import CollectiveError, ConfigError, ShapeError, check_integer
from .calls import (
    CODES,
    DTYPES,
    NAMES,
    Call,
    Header,
    ReduceOp,
    caller_location,
    describe,
    mismatch,
    narrow,
    widen,
)
from .requests import MessageQueue, Received, Request

#: `here.world` is the communicator of a thread that is a rank of a mock world.
here = threading.local()
MAX_TAG = 16382  # MPI promises tags to 32767; a message takes two
# for the others to come and hear of a refused call; they may not, where only this rank made it
_REFUSED_S = 1.0


class Communicator:
    """A group of ranks, and this process's place in it.

    This class itself is a group of one, and does it all alone.

    All ranks of a group make the same calls in the same order, with the same dtype, shape, op and
    root; a rank that does not gets a CollectiveError, as do all others (docs/communication.md).
    dtypes: float32, float64, float16, `bfloat16` (a view of uint16), int8 to int64, uint8 to
    uint64.

    Sums, maxima, ... of 16-bit floats are computed in float32 and rounded once, at the end. Means
    of integers are refused. The order of additions is the backend's: "local" has none, "mock" and
    "shm" add along the fixed tree, "mpi" and "gloo" in the order of their library.

    Attributes:
        rank, size: place in the group, ranks of the group.
        local_rank, local_size: the same among those of the group that run on this machine.
        ranks: world ranks of the members.
        name: of the backend.
        why: one line: which backend, and why this one.
        timeout: seconds that its calls wait for other ranks; None: ODYSSEY_TIMEOUT.
        moved_by_calls: True if data move on only while a rank is in one of its calls, which any
            thread may make.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    ranks: tuple[int, ...] = (0,)
    name: str = "local"
    why: str = "local: one process"
    timeout: float | None = None
    moved_by_calls: bool = False
    # time.monotonic() at which a wait gives up; another thread may set it
    until: float | None = None
    _crowded: bool = False
    _world_size: int = 1
    _queue: Collection[Request] = ()  # calls under way
    _broken: BaseException | None = None
    # names the group in the status slot: the same number on all members, who
    _mark: tuple[int, str] = (0, "all")
    _is_world: bool = False  # of its backend: ends with the process only
    _exits: Any = None  # of MPI: what tells the other ranks that this one ends

    def __init__(self, parent: Communicator | None = None) -> None:
        """parent: the communicator of which this rank is split off alone."""
        self._parent = parent
        self._sequence = 0
        self._mailbox: dict[int, MessageQueue] = {}
        if parent is not None:
            self.ranks = (parent.ranks[parent.rank],)
            self.name = parent.name
            self.why = parent.why

    def __repr__(self) -> str:
        return f"<{self.name} communicator, rank {self.rank} of {self.size}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is Communicator:  # it is a group of one, which has nothing but attributes
            return super().__reduce_ex__(protocol)
        refuse(self, "use the communicator itself")

    # --- collectives: the result, or, with wait=False, a Request whose `wait` gives it ---

    def barrier(self, *, wait: bool = True) -> Any:
        """Waits until all ranks are here."""
        return self._run(Call("barrier"), wait)

    def broadcast(self, array: np.ndarray, root: int = 0, *, wait: bool = True) -> Any:
        """Overwrites `array` on all ranks with that of `root`; returns it.

        All give the same shape and dtype.
        """
        root = self._check_root("broadcast", root)
        if self.rank != root or not isinstance(array, np.ndarray):
            self._check_writable("broadcast", array)
        elif not array.flags.c_contiguous:
            raise ShapeError(
                "[comm] broadcast of an array that is not C-contiguous; give a contiguous one"
            )
        self._read("broadcast", array)
        described = (NAMES[array.dtype], array.shape, root, None, None)
        return self._run(Call("broadcast", array, array, None, root, described), wait)

    def reduce(
        self,
        array: np.ndarray,
        op: ReduceOp | str = "sum",
        root: int = 0,
        out: np.ndarray | None = None,
        *,
        wait: bool = True,
    ) -> Any:
        """The arrays of all ranks combined, on `root`; None elsewhere. `out` may be `array`."""
        return self._run(
            self._reduce("reduce", array, op, out, self._check_root("reduce", root)), wait
        )

    def all_reduce(
        self,
        array: np.ndarray,
        op: ReduceOp | str = "sum",
        out: np.ndarray | None = None,
        *,
        wait: bool = True,
    ) -> Any:
        """The arrays of all ranks combined, on all: a new array, or `out`, which may be `array`."""
        return self._run(self._reduce("all_reduce", array, op, out), wait)

    def scatter(
        self,
        array: np.ndarray | None,
        root: int = 0,
        out: np.ndarray | None = None,
        *,
        wait: bool = True,
    ) -> Any:
        """Row r of the (size, ...) array of `root`, on rank r. The others give None."""
        root = self._check_root("scatter", root)
        if out is not None:
            self._check_writable("scatter", out)
        send = None
        if self.rank == root:
            if array is None:
                raise ShapeError(
                    f"[comm] scatter: root {root} gives None; give an array of {self.size} rows"
                )
            send = self._rows("scatter", array)
            send, out = self._out("scatter", out, send, send.shape[1:])
        return self._run(Call("scatter", send, out, None, root, ("", None, root, None, None)), wait)

    def gather(self, array: np.ndarray, root: int = 0, *, wait: bool = True) -> Any:
        """The arrays of all ranks as (size, ...), on `root`; None elsewhere."""
        root = self._check_root("gather", root)
        send = self._read("gather", array)
        out = np.empty((self.size, *send.shape), send.dtype) if self.rank == root else None
        described = (NAMES[send.dtype], send.shape, root, None, None)
        return self._run(Call("gather", send, out, None, root, described), wait)

    def all_gather(
        self, array: np.ndarray, out: np.ndarray | None = None, *, wait: bool = True
    ) -> Any:
        """The arrays of all ranks as (size, ...), on all."""
        send = self._read("all_gather", array)
        send, out = self._out("all_gather", out, send, (self.size, *send.shape))
        described = (NAMES[send.dtype], send.shape, -1, None, None)
        return self._run(Call("all_gather", send, out, described=described), wait)

    def all_gather_each(self, array: np.ndarray) -> list[np.ndarray]:
        """The arrays (n, ...) of all ranks, whose n may differ, on all."""
        lengths = self.all_gather(np.array([len(array)], np.int64)).ravel().tolist()
        ends = list(itertools.accumulate(lengths))
        row = math.prod(array.shape[1:])
        gathered = np.empty((ends[-1], *array.shape[1:]), array.dtype)
        gathered[ends[self.rank] - len(array) : ends[self.rank]] = array
        ranges = [((end - n) * row, end * row) for n, end in zip(lengths, ends, strict=True)]
        self.all_gather_v(gathered.reshape(-1), ranges)
        return np.split(gathered, ends[:-1])

    def reduce_scatter(
        self,
        array: np.ndarray,
        op: ReduceOp | str = "sum",
        out: np.ndarray | None = None,
        *,
        wait: bool = True,
    ) -> Any:
        """Combines the (size * n, ...) arrays of all ranks; rank r gets rows r * n to (r + 1) *
        n.
        """
        return self._run(self._reduce("reduce_scatter", array, op, out), wait)

    def all_to_all(
        self, array: np.ndarray, out: np.ndarray | None = None, *, wait: bool = True
    ) -> Any:
        """Row p of the (size, ...) array goes to rank p; row p of the result came from rank p."""
        send = self._rows("all_to_all", array)
        if out is send:
            send = send.copy()
        send, out = self._out("all_to_all", out, send, send.shape)
        described = (NAMES[send.dtype], send.shape, -1, None, None)
        return self._run(Call("all_to_all", send, out, described=described), wait)

    def all_to_all_v(
        self,
        send: np.ndarray,
        send_counts: Sequence[int],
        receive: np.ndarray,
        receive_counts: Sequence[int],
        *,
        wait: bool = True,
    ) -> Any:
        """Sends consecutive pieces of `send` to ranks 0, 1, ... and receives theirs, in order,
        into `receive`. Counts in elements, one per rank; what a rank sends to another must be
        what that one expects.
        """
        return self._run(self._all_to_all_v(send, send_counts, receive, receive_counts), wait)

    def all_gather_v(
        self, array: np.ndarray, ranges: Sequence[tuple[int, int]], *, wait: bool = True
    ) -> Any:
        """Fills, in place, elements ranges[p] = [a, b) of the flat `array` on all ranks with
        those of rank p. The ranges are the same on all ranks, do not overlap and may be
        empty.
        """
        return self._run(self._all_gather_v(array, ranges), wait)

    # --- again and again ---

    def all_to_all_v_init(
        self,
        send: np.ndarray,
        send_counts: Sequence[int],
        receive: np.ndarray,
        receive_counts: Sequence[int],
    ) -> Repeated:
        """`all_to_all_v` that is started again and again with the same arrays (MPI's
        MPI_Alltoallv_init). What it may cost if the ranks' calls differ, says Repeated. All
        ranks make theirs in the same order. Raises ShapeError: as `all_to_all_v`; or `send`
        would have to be copied, and later values would not be sent.
        """
        is_contiguous = isinstance(send, np.ndarray) and send.flags.c_contiguous
        if not is_contiguous or (
            send.size and isinstance(receive, np.ndarray) and np.may_share_memory(send, receive)
        ):
            raise ShapeError(
                "[comm] all_to_all_v_init: send must be a C-contiguous array, apart from receive"
            )
        return self._repeated(
            lambda: self._all_to_all_v(send, send_counts, receive, receive_counts)
        )

    def all_gather_v_init(self, array: np.ndarray, ranges: Sequence[tuple[int, int]]) -> Repeated:
        """`all_gather_v` that is started again and again with the same array; otherwise as
        `all_to_all_v_init`.
        """
        return self._repeated(lambda: self._all_gather_v(array, ranges))

    # --- one to one ---

    def send(self, array: np.ndarray, dest: int, tag: int = 0, *, wait: bool = True) -> Any:
        """Sends to rank `dest`.

        May return before it is received, and may wait until it is. With wait=False `array` must
        stay as it is until the request is complete.
        """
        self._check_peer("send", "dest", dest, tag)
        array = self._read("send", array)
        envelope = self._envelope("send", array, dest, tag)
        if dest == self.rank:
            self._mailbox.setdefault(tag, MessageQueue()).messages.append((array.copy(), envelope))
            return None if wait else Request()
        request = self._send(array, dest, tag, envelope)
        return request.wait() if wait else request

    def recv(self, out: np.ndarray, source: int | None, tag: int = 0, *, wait: bool = True) -> Any:
        """Receives from rank `source` what it sent with this tag, in the order sent, into `out`;
        returns it. source: None for whichever other rank has sent; `source` of the complete
        request says who (not of "mock"). Raises CollectiveError: what was sent has another
        dtype or number of elements; it is lost.
        """
        self._check_peer("recv", "source", self.rank if source is None else source, tag)
        self._check_writable("recv", out)
        envelope = self._envelope("recv", out, source, tag)
        if source == self.rank:
            me = self.ranks[self.rank]
            request = Received(self._mailbox.setdefault(tag, MessageQueue()), out, envelope, me, me)
        else:
            request = self._recv(out, source, tag, envelope)
        return request.wait() if wait else request

    # --- groups ---

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Groups of the ranks with one color, ordered by (key, rank); None for color None.

        All ranks call it.
        """
        for name, value in (("color", color), ("key", key)):
            if value is not None and (
                not isinstance(value, (int, np.integer)) or (name == "color" and value < 0)
            ):
                allowed = "an integer from 0, or None" if name == "color" else "an integer"
                raise ConfigError(f"[comm] {name} is {value!r}; it must be {allowed}")
        color_and_key = np.array([-1 if color is None else color, key], np.int64)
        everyone = self.all_gather(color_and_key)
        if color is None:
            return None
        members = [(int(k), p) for p, (c, k) in enumerate(everyone) if c == color]
        return self._part(tuple(p for _, p in sorted(members)))

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """The group of these ranks of this one, in this order; None for the others.

        All ranks of this group call it.
        """
        members = tuple(int(p) for p in ranks)
        if (
            not members
            or len(set(members)) < len(members)
            or not all(0 <= p < self.size for p in members)
        ):
            raise ConfigError(
                f"[comm] group of ranks {list(members)}; give different ranks from 0 to "
                f"{self.size - 1}, at least one"
            )
        self._run(Call("group", described=("", None, -1, None, members)), True)
        return self._part(members) if self.rank in members else None

    def subgroup(self, members: Sequence[int]) -> Communicator | None:
        """This rank's group, of `members` in their order, where all ranks of this group make
        theirs at once; None for those that give no members. All ranks of this group call it.
        """
        return self.split(members[0], members.index(self.rank)) if members else self.split(None)

    def _part(self, members: tuple[int, ...]) -> Communicator:
        if len(members) == 1:
            return Communicator(parent=self)
        ranks = tuple(self.ranks[p] for p in members)
        mark = zlib.crc32(repr((self._mark[0], self._sequence, ranks)).encode()), slot.ranges(ranks)
        slot.enter(self._sequence, f"making the group of ranks {mark[1]}", mark)
        try:
            part = self._sub(members)
        finally:
            slot.leave()
        part.name = self.name
        part._mark = mark
        return part

    def close(self) -> None:
        """Gives back what a sub-group holds in the library (MPI has about 2,000 of them); all
        its ranks call it.
        """

    def abort(self, code: int) -> None:
        """Ends all ranks of the world at once with an exit code."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self._parent is not None:
            self._parent.abort(code)
        os._exit(code)

    def meet_start(self) -> Request:
        """A barrier of ranks that all come to the same end; it works where the group is over,
        too.
        """
        return self.barrier(wait=False)

    # --- what a backend does ---

    def _begin(self, call: Call) -> Request:
        """Starts a call whose header is made. Here: of one rank, so it is all copying."""
        if call.kind == "all_to_all_v":
            n = call.send_counts[0]
            if n != call.receive_counts[0]:
                raise CollectiveError(mismatch([call.header], self.ranks))
            call.out[:n] = call.send[:n]
        elif call.out is not None and call.out is not call.send:
            call.out.reshape(-1)[...] = call.send.reshape(-1)
        return Request(call.result())

    def unfinished(self) -> list[Request]:
        """Calls under way."""
        return list(self._queue)

    def _repeated(self, make: Callable[[], Call]) -> Repeated:
        """A call that will be made again and again; `make` checks its arguments."""
        make()
        return Repeated(self, make)

    def _send(self, array: np.ndarray, dest: int, tag: int, envelope: Header) -> Request:
        """Starts sending to another rank."""
        raise NotImplementedError

    def _recv(self, out: np.ndarray, source: int | None, tag: int, envelope: Header) -> Request:
        """Starts receiving from another rank, or from any."""
        raise NotImplementedError

    def _sub(self, members: tuple[int, ...]) -> Communicator:
        """A communicator of at least two members, this rank among them; only they call it, at
        the same time.
        """
        raise NotImplementedError

    def _gone(self, ranks: Sequence[int]) -> list[int]:
        """Returns the given ranks that are known to have ended."""
        return []

    def _progress(self) -> None:
        """Called while this rank waits for something: moves on what others may be waiting for."""

    def _broke(self, error: BaseException) -> None:
        """A wait ended at its deadline: the ranks are no longer in step, and later calls raise
        the same error.
        """
        self._broken = error

    def _closed(self) -> None:
        """Marks it as closed, as what the library held is gone: later calls raise instead of
        reaching for it.
        """
        self._broken = CollectiveError(
            f"[comm] the group of ranks {list(self.ranks)} was closed; make a new one"
        )

    # --- checks and preparation, for all backends ---

    def refuse(self, kind: str, why: str) -> None:
        """Tells the other ranks, which may be waiting in it, that a call is refused here for its
        arguments. Their calls end with a CollectiveError, and the group can go on, as after
        calls that differ.
        """
        if self.size == 1 or self._broken is not None:
            return
        request = self._start(Call("barrier"), f"{kind} (refused: {why.partition('] ')[2] or why})")
        until = time.monotonic() + _REFUSED_S
        while not request.test() and time.monotonic() < until:
            time.sleep(1e-3)

    def _run(self, call: Call, wait: bool) -> Any:
        """Starts a call; its result, or its request."""
        call.blocking = wait
        request = self._start(call)
        return request.wait() if wait else request

    def _start(self, call: Call, name: str = "") -> Request:
        if self._broken is not None:
            raise self._broken
        signature, text = describe(name or call.kind, call.described, *caller_location(3))
        tail, balanced = call.tail(self.rank)
        call.header = Header(
            self._sequence,
            signature,
            text,
            tail,
            call.kind,
            call.root,
            call.blocking,
            balance=balanced,
        )
        slot.call(self._sequence, text, self._mark)
        self._sequence += 1
        return self._begin(call)

    def _envelope(self, kind: str, array: np.ndarray, peer: int | None, tag: int) -> Header:
        """Returns what a receiver sees of a message: (dtype code, elements) in its tail."""
        peer_name = "any rank" if peer is None else f"rank {self.ranks[peer]}"
        way = f"{'to' if kind == 'send' else 'from'} {peer_name} tag {tag}"
        _, text = describe(
            kind, (NAMES[array.dtype], array.shape, -1, None, way), *caller_location(3)
        )
        return Header(0, 0, text, (CODES[array.dtype], array.size), kind)

    def _read(self, kind: str, array: Any) -> np.ndarray:
        """An array that is only read: contiguous, copied if need be."""
        array = np.asarray(array, order="C")
        if array.dtype not in CODES:
            raise ShapeError(
                f"[comm] {kind} of dtype {array.dtype}; it must be one of {', '.join(DTYPES)}"
            )
        return array

    def _check_writable(
        self,
        kind: str,
        array: Any,
        dtype: np.dtype | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Refuses an array that cannot be written."""
        if not isinstance(array, np.ndarray):
            raise ShapeError(
                f"[comm] {kind} writes into a {type(array).__name__}; give a NumPy array"
            )
        if array.dtype not in CODES:
            raise ShapeError(
                f"[comm] {kind} of dtype {array.dtype}; it must be one of {', '.join(DTYPES)}"
            )
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ShapeError(
                f"[comm] {kind} writes into an array that is not C-contiguous and writable; give "
                "a contiguous one"
            )
        if (dtype is not None and array.dtype != dtype) or (
            shape is not None and array.shape != shape
        ):
            raise ShapeError(
                f"[comm] {kind}: out is {NAMES[array.dtype]} {array.shape}; it must be "
                f"{NAMES[dtype]} {shape}"
            )

    def _out(
        self, kind: str, out: np.ndarray | None, send: np.ndarray, shape: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(send, out): out made or checked, and the two the same or apart."""
        if out is None:
            return send, np.empty(shape, send.dtype)
        self._check_writable(kind, out, send.dtype, shape)
        if out is not send and np.may_share_memory(out, send):
            if (
                out.size == send.size
                and out.ctypes.data == send.ctypes.data
                and kind in ("all_reduce", "reduce")
            ):
                return out, out
            send = send.copy()
        return send, out

    def _check_root(self, kind: str, root: int) -> int:
        return check_integer(f"[comm] {kind}: root", root, 0, self.size - 1)

    def _check_peer(self, kind: str, name: str, peer: int, tag: int) -> None:
        check_integer(f"[comm] {kind}: {name}", peer, 0, self.size - 1)
        check_integer(f"[comm] {kind}: tag", tag, 0, MAX_TAG)
        if self._broken is not None:
            raise self._broken

    def _rows(self, kind: str, array: Any) -> np.ndarray:
        array = self._read(kind, array)
        if not array.ndim or array.shape[0] != self.size:
            raise ShapeError(
                f"[comm] {kind} of shape {array.shape}; it must have {self.size} rows, one per rank"
            )
        return array

    def _reduce(
        self,
        kind: str,
        array: np.ndarray,
        op: ReduceOp | str,
        out: np.ndarray | None,
        root: int = -1,
    ) -> Call:
        op = ReduceOp.of(op)
        send = self._read(kind, array)
        dtype = send.dtype
        shape = send.shape
        if op is ReduceOp.MEAN and dtype.kind in "iu":
            raise ConfigError(
                f"[comm] {kind} with mean of {dtype} is not an integer; sum them, or convert to "
                "float"
            )
        described = (NAMES[dtype], shape, root, op.value, None)
        if kind == "reduce_scatter":
            if not shape or shape[0] % self.size:
                raise ShapeError(
                    f"[comm] reduce_scatter of shape {shape}: its rows do not divide by "
                    f"{self.size} ranks; pad it"
                )
            shape = (shape[0] // self.size, *shape[1:])
        half = dtype.itemsize == 2 and dtype.kind in "fV"
        wire = ReduceOp.SUM if op is ReduceOp.MEAN else op
        if kind == "reduce" and self.rank != root:
            return Call(kind, widen(send) if half else send, None, wire, root, described)
        send, out = self._out(kind, out, send, shape)
        total = out
        if half:
            send = widen(send)
            total = np.empty(shape, np.float32)

        def finish() -> np.ndarray:
            if op is ReduceOp.MEAN:
                np.divide(total, self.size, out=total)
            return narrow(total, out) if half else out

        finish_ = finish if half or op is ReduceOp.MEAN else None
        return Call(kind, send, total, wire, root, described, finish=finish_)

    def _all_to_all_v(
        self,
        send: np.ndarray,
        send_counts: Sequence[int],
        receive: np.ndarray,
        receive_counts: Sequence[int],
    ) -> Call:
        kind = "all_to_all_v"
        send = self._read(kind, send)
        self._check_writable(kind, receive, send.dtype, receive.shape)
        if send.size and np.may_share_memory(send, receive):
            send = send.copy()
        counts = []
        for name, array, rank_counts in (
            ("send", send, send_counts),
            ("receive", receive, receive_counts),
        ):
            numbers = tuple(int(n) for n in rank_counts)
            if len(numbers) != self.size or min(numbers) < 0 or sum(numbers) > array.size:
                raise ShapeError(
                    f"[comm] {kind}: {name}_counts are {list(numbers)} for {array.size} "
                    f"elements, {self.size} ranks; "
                    "give one count per rank, in sum at most the elements"
                )
            counts.append(numbers)
        described = (NAMES[send.dtype], None, -1, None, None)
        flat = send.reshape(-1), receive.reshape(-1)
        return Call(kind, *flat, None, -1, described, *counts, finish=lambda: None)

    def _all_gather_v(self, array: np.ndarray, ranges: Sequence[tuple[int, int]]) -> Call:
        self._check_writable("all_gather_v", array)
        pieces = tuple((int(a), int(b)) for a, b in ranges)
        ends = sorted(pieces)
        if (
            len(pieces) != self.size
            or any(not 0 <= a <= b <= array.size for a, b in pieces)
            or any(b > c for (_, b), (c, d) in zip(ends, ends[1:], strict=False) if d > c)
        ):
            raise ShapeError(
                f"[comm] all_gather_v: ranges are {list(pieces)} for {array.size} elements and "
                f"{self.size} ranks; "
                "give one [start, end) per rank, without overlap"
            )
        flat = array.reshape(-1)
        described = (NAMES[array.dtype], array.shape, -1, None, pieces)
        return Call(
            "all_gather_v", flat, flat, described=described, ranges=pieces, finish=lambda: None
        )


class Repeated:
    """A collective call that is made again and again with the same arrays.

    This class makes an ordinary call each time.

    A backend may check and set up things once, and send the data before it knows that all ranks
    make the same call. If they do not, all get the CollectiveError as ever, but the receiving array
    may have been written and the group cannot go on: later calls raise the same error.
    """

    def __init__(self, comm: Communicator, make: Callable[[], Call]) -> None:
        self._group = comm
        self._make = make

    def start(self) -> Request:
        """Starts it; the request of the time before must be complete, and is of no use any more."""
        return self._group._run(self._make(), False)
