"""The contract of communication: what a communicator can do, what its arguments must be, and a world of one.

A backend is a subclass of `Communicator` that carries out a `Call` (`_begin`), sends, receives and makes sub-groups;
what is the same for all of them is here or in calls.py, once: checks of arguments, waiting with a deadline, and what a
call looks like to the other ranks. What it is not: a transport.

Arrays are C-contiguous NumPy arrays. An array that is only read is copied where it is not contiguous; one that is
written (in place, `out=`) is refused.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import CollectiveError, ConfigError, ShapeError
from ..watch import slot
from .calls import (
    CODES,
    DIMENSIONS,
    DTYPES,
    NAMES,
    Call,
    Header,
    ReduceOp,
    check_letter,
    describe,
    narrow,
    piece_tail,
    verdict,
    widen,
)


def site(depth: int) -> tuple[Any, int]:
    """Code and line of the first frame outside of this package."""
    frame = sys._getframe(depth)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


_PACKAGE = __name__.rpartition(".")[0]

#: `here.world` is the communicator of a thread that is a rank of a mock world.
here = threading.local()


# --- requests --------------------------------------------------------------------------------------------------------


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
    _spins = 500  # tests before anything else

    def __init__(self, comm: Communicator) -> None:
        self._result, self._error, self._complete = None, None, False
        self._comm = comm

    def _block(self) -> None:
        """Tests until complete: some spins, then giving the core away, then sleeping.

        Spinning is for short waits on a core of one's own: with more ranks than cores a spinning rank keeps those
        away that it waits for (4 ranks on 2 cores: a barrier takes 4 ms spinning, 17 us yielding; docs/log.md). So
        short a wait is counted in the status slot, but not shown there.
        """
        if self._spins and not self._comm._crowded:
            test, begun = self.test, time.monotonic_ns()
            for _ in range(self._spins):
                if test():
                    break
            slot.waited(time.monotonic_ns() - begun)
            if self._complete:
                return
        slot.enter(self._number(), self.describe(), self._waited_for())
        try:
            self._test_on()
        finally:
            slot.leave()

    def _number(self) -> int:
        """Of the collective call in its group; -1: it is a message."""
        return -1

    def _waited_for(self) -> tuple[int, str]:
        """Whom it can wait for, for the status slot: a group's mark, or a message's other end."""
        return self._comm._mark

    def _test_on(self) -> None:
        """Tests until complete, giving the core away and then sleeping in between."""
        test = self.test
        start = begun = time.monotonic()
        timeout, patience = deadline(), 0.0
        look, nap = start + _LOOK_S, 20e-6
        while not test():
            self._comm._progress()
            now = time.monotonic()
            if patience != self._patience():
                begun, patience, nap = now, self._patience(), 20e-6
            if now - begun < patience:
                os.sched_yield()
                continue
            if now - start > timeout:
                self._fail(CollectiveError(f"[comm] waited {timeout:g} s in {self.describe()}: {self._absent()}"))
                self._comm._broke(self._error)
                return
            if now > look:
                look = now + (_AGAIN_S if self._look() else 0.25)
            time.sleep(nap)
            nap = min(1.5 * nap, 200e-6 if now - start < 0.1 else 1e-3)

    def _patience(self) -> float:
        """Seconds of giving the core away before sleeping; they start anew when the number changes."""
        return _YIELD_S

    def _absent(self) -> str:
        """Who did not come, and what to do."""
        return "it did not end; set ODYSSEY_TIMEOUT=SECONDS to wait longer"

    def _look(self) -> bool:
        """Called while waiting long: may fail the request. Whether it suspects that, and should look again soon."""
        return False


_YIELD_S = 2e-3  # 4 ranks on 2 cores: 61,706 floats take 0.36 ms, but 10 ms with sleeps from 0.3 ms on
_LOOK_S = 0.5
_AGAIN_S = 0.1  # from the first sign that a rank has ended to the next look: what it sent before is on its way


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


# --- communicators ---------------------------------------------------------------------------------------------------


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
    _mark: tuple[int, str] = (
        0,
        "all",
    )  # names the group in the status slot: the same number on all members, their ranks

    def __init__(self, parent: Communicator | None = None) -> None:
        """parent: the communicator of which this rank is split off alone."""
        self._parent = parent
        self._sequence = 0
        self._mailbox: dict[int, Line] = {}
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

    def all_reduce(self, array: np.ndarray, op: ReduceOp | str = "sum", out: np.ndarray | None = None) -> np.ndarray:
        """The arrays of all ranks combined, on all: a new array, or `out`, which may be `array`."""
        return self._now(self._reduce("all_reduce", array, op, out))

    def all_reduce_start(self, array: np.ndarray, op: ReduceOp | str = "sum", out: np.ndarray | None = None) -> Request:
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

    # --- again and again ---

    def all_to_all_v_init(
        self, send: np.ndarray, send_counts: Sequence[int], receive: np.ndarray, receive_counts: Sequence[int]
    ) -> Repeated:
        """`all_to_all_v` that is started again and again with the same arrays (MPI's MPI_Alltoallv_init).

        What it may cost if the ranks' calls differ, says Repeated. All ranks make theirs in the same order.

        Raises:
            ShapeError: as `all_to_all_v`; or `send` would have to be copied, and later values would not be sent.
        """
        apart = isinstance(send, np.ndarray) and send.flags.c_contiguous
        if not apart or (send.size and isinstance(receive, np.ndarray) and np.may_share_memory(send, receive)):
            raise ShapeError("[comm] all_to_all_v_init: send must be a C-contiguous array, apart from receive")
        return self._repeated(lambda: self._all_to_all_v(send, send_counts, receive, receive_counts))

    def all_gather_v_init(self, array: np.ndarray, ranges: Sequence[tuple[int, int]]) -> Repeated:
        """`all_gather_v` that is started again and again with the same array; otherwise as `all_to_all_v_init`."""
        return self._repeated(lambda: self._all_gather_v(array, ranges))

    # --- one to one ---

    def send(self, array: np.ndarray, dest: int, tag: int = 0) -> None:
        """Sends to rank `dest`. May return before it is received, and may wait until it is."""
        self.send_start(array, dest, tag).wait()

    def send_start(self, array: np.ndarray, dest: int, tag: int = 0) -> Request:
        """`send`, not waited for: `array` must stay as it is until the request is complete."""
        self._check_peer("send", "dest", dest, tag)
        array = self._read("send", array)
        letter = self._letter("send", array, dest, tag)
        if dest == self.rank:
            self._mailbox.setdefault(tag, Line()).messages.append((array.copy(), letter))
            return Request()
        return self._send(array, dest, tag, letter)

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
        letter = self._letter("recv", out, source, tag)
        if source != self.rank:
            return self._recv(out, source, tag, letter)
        me = self.ranks[self.rank]
        return Received(self._mailbox.setdefault(tag, Line()), out, letter, me, me)

    # --- groups ---

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Groups of the ranks with the same color, ordered by (key, rank); None for those whose color is None.

        All ranks of this group call it.
        """
        for name, value in (("color", color), ("key", key)):
            if value is not None and (not isinstance(value, (int, np.integer)) or (name == "color" and value < 0)):
                allowed = "an integer from 0, or None" if name == "color" else "an integer"
                raise ConfigError(f"[comm] {name} is {value!r}; it must be {allowed}")
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
        if len(members) == 1:
            return Communicator(parent=self)
        ranks = tuple(self.ranks[p] for p in members)
        mark = zlib.crc32(repr((self._mark[0], self._sequence, ranks)).encode()), slot.ranges(ranks)
        slot.enter(self._sequence, f"making the group of ranks {mark[1]}", mark)
        try:
            part = self._sub(members)
        finally:
            slot.leave()
        part._mark = mark
        return part

    def close(self) -> None:
        """Gives back what a sub-group holds in the library (MPI has about 2,000 of them); all its ranks call it."""

    def abort(self, code: int) -> None:
        """Ends all ranks of the world at once with an exit code."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self._parent is not None:
            self._parent.abort(code)
        os._exit(code)

    def meet_start(self) -> Request:
        """A barrier of ranks that all come to the same end; it works where the group is over, too."""
        return self.barrier_start()

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

    def _repeated(self, make: Callable[[], Call]) -> Repeated:
        """A call that will be made again and again; `make` checks its arguments."""
        make()
        return Repeated(self, make)

    def _send(self, array: np.ndarray, dest: int, tag: int, letter: Header) -> Request:
        """Starts sending to another rank."""
        raise NotImplementedError

    def _recv(self, out: np.ndarray, source: int, tag: int, letter: Header) -> Request:
        """Starts receiving from another rank."""
        raise NotImplementedError

    def _sub(self, members: tuple[int, ...]) -> Communicator:
        """A communicator of at least two members, this rank among them; only they call it, at the same time."""
        raise NotImplementedError

    def _progress(self) -> None:
        """Called while this rank waits for something: moves on what others may be waiting for."""

    def _broke(self, error: BaseException) -> None:
        """A wait ended at its deadline: the ranks are no longer in step, and later calls raise the same error."""
        self._broken = error

    def _closed(self) -> None:
        """What the library held is gone: later calls raise instead of reaching for it."""
        self._broken = CollectiveError(f"[comm] the group of ranks {list(self.ranks)} was closed; make a new one")

    # --- checks and preparation, for all backends ---

    def _now(self, call: Call) -> Any:
        call.blocking = True
        return self._start(call).wait()

    def _later(self, call: Call) -> Request:
        return self._start(call)

    def _start(self, call: Call) -> Request:
        if self._broken is not None:
            raise self._broken
        code, line = site(3)
        signature, text = describe(call.kind, call.described, code, line)
        tail = ()
        if call.kind == "all_to_all_v":
            tail = (*call.send_counts, *call.receive_counts)
        elif call.kind == "scatter":
            known = call.out if call.send is None else call.send
            tail = piece_tail(known, known.shape[0 if call.send is None else 1 :] if known is not None else ())
        call.header = Header(self._sequence, signature, text, tail, call.kind, call.root, call.blocking)
        slot.call(self._sequence, text, self._mark)
        self._sequence += 1
        return self._begin(call)

    def _letter(self, kind: str, array: np.ndarray, peer: int, tag: int) -> Header:
        """What a receiver sees of a message: (dtype code, elements) in its tail."""
        code, line = site(3)
        way = f"{'to' if kind == 'send' else 'from'} rank {self.ranks[peer]} tag {tag}"
        _, text = describe(kind, (NAMES[array.dtype], array.shape, -1, None, way), code, line)
        return Header(0, 0, text, (CODES[array.dtype], array.size), kind)

    def _read(self, kind: str, array: Any) -> np.ndarray:
        """An array that is only read: contiguous, copied if need be."""
        array = np.asarray(array, order="C")
        if array.dtype not in CODES:
            raise ShapeError(f"[comm] {kind} of dtype {array.dtype}; it must be one of {', '.join(DTYPES)}")
        return array

    def _written(
        self, kind: str, array: Any, dtype: np.dtype | None = None, shape: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """An array that is written: as it is, or refused."""
        if not isinstance(array, np.ndarray):
            raise ShapeError(f"[comm] {kind} writes into a {type(array).__name__}; give a NumPy array")
        if array.dtype not in CODES:
            raise ShapeError(f"[comm] {kind} of dtype {array.dtype}; it must be one of {', '.join(DTYPES)}")
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ShapeError(
                f"[comm] {kind} writes into an array that is not C-contiguous and writable; give a contiguous one"
            )
        if (dtype is not None and array.dtype != dtype) or (shape is not None and array.shape != shape):
            raise ShapeError(
                f"[comm] {kind}: out is {NAMES[array.dtype]} {array.shape}; it must be {NAMES[dtype]} {shape}"
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
        return Call("broadcast", array, array, root=root, described=(NAMES[array.dtype], array.shape, root, None, None))

    def _reduce(self, kind: str, array: np.ndarray, op: ReduceOp | str, out: np.ndarray | None, root: int = -1) -> Call:
        op = ReduceOp.of(op)
        if kind == "reduce":
            root = self._check_root(kind, root)
        send = self._read(kind, array)
        dtype = send.dtype
        if op is ReduceOp.MEAN and dtype.kind in "iu":
            raise ConfigError(f"[comm] {kind} with mean of {dtype} is not an integer; sum them, or convert to float")
        described = (NAMES[dtype], send.shape, root, op.value, None)
        shape = send.shape
        if kind == "reduce_scatter":
            if not shape or shape[0] % self.size:
                raise ShapeError(
                    f"[comm] reduce_scatter of shape {shape}: its rows do not divide by {self.size} ranks; pad it"
                )
            shape = (shape[0] // self.size, *shape[1:])
        wire = ReduceOp.SUM if op is ReduceOp.MEAN else op
        if kind == "reduce" and self.rank != root:
            return Call(
                kind,
                widen(send) if dtype.itemsize == 2 and dtype.kind in "fV" else send,
                None,
                op=wire,
                root=root,
                described=described,
            )
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
        if len(shape) > DIMENSIONS:
            raise ShapeError(f"[comm] scatter of {len(shape)} dimensions; it takes at most {DIMENSIONS}")
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
        return Call("gather", send, out, root=root, described=(NAMES[send.dtype], send.shape, root, None, None))

    def _all_gather(self, array: np.ndarray, out: np.ndarray | None) -> Call:
        send = self._read("all_gather", array)
        send, out = self._out("all_gather", out, send, (self.size, *send.shape))
        return Call("all_gather", send, out, described=(NAMES[send.dtype], send.shape, -1, None, None))

    def _all_to_all(self, array: np.ndarray, out: np.ndarray | None) -> Call:
        send = self._rows("all_to_all", array)
        if out is send:
            send = send.copy()
        send, out = self._out("all_to_all", out, send, send.shape)
        return Call("all_to_all", send, out, described=(NAMES[send.dtype], send.shape, -1, None, None))

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
                    f"[comm] {kind}: {name}_counts are {list(numbers)} for {array.size} elements, {self.size} ranks; "
                    "give one count per rank, in sum at most the elements"
                )
            counts.append(numbers)
        return Call(
            kind,
            send.reshape(-1),
            receive.reshape(-1),
            send_counts=counts[0],
            receive_counts=counts[1],
            described=(NAMES[send.dtype], None, -1, None, None),
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
            described=(NAMES[array.dtype], array.shape, -1, None, pieces),
            finish=_nothing,
        )


class Repeated:
    """A collective call that is made again and again with the same arrays. This class makes an ordinary call each time.

    A backend may check and set up things once, and send the data before it knows that all ranks make the same call. If
    they do not, all get the CollectiveError as ever, but the receiving array may have been written and the group cannot
    go on: later calls raise the same error.
    """

    def __init__(self, comm: Communicator, make: Callable[[], Call]) -> None:
        self._group, self._make = comm, make

    def start(self) -> Request:
        """Starts it; the request of the time before must be complete, and is of no use any more."""
        return self._group._later(self._make())


MAX_TAG = 16382  # MPI promises tags to 32767; a message takes two


def _nothing() -> None:
    return None


class Line:
    """Messages and receives of one pair of ranks and one tag, in this process: the first meets the first."""

    def __init__(self) -> None:
        self.messages: deque[tuple[np.ndarray, Header]] = deque()
        self.receives: deque[Received] = deque()

    def serve(self) -> None:
        """Brings together what is there."""
        while self.messages and self.receives:
            self.receives.popleft().take(*self.messages.popleft())


class Received(Request):
    """A receive in this process: from another thread, or from this rank itself."""

    __slots__ = ("_line", "_out", "_letter", "_source", "_rank")

    def __init__(self, line: Line, out: np.ndarray, letter: Header, source: int, rank: int) -> None:
        self._result, self._error, self._complete = None, None, False
        self._line, self._out, self._letter, self._source, self._rank = line, out, letter, source, rank
        line.receives.append(self)

    def take(self, array: np.ndarray, letter: Header) -> None:
        """Ends the receive with a message."""
        wrong = check_letter(letter.tail, letter.text, self._out, self._letter, self._source, self._rank)
        if wrong:
            self._fail(CollectiveError(wrong))
        else:
            self._out.reshape(-1)[...] = array.reshape(-1)
            self._result, self._complete = self._out, True

    def test(self) -> bool:
        if not self._complete:
            self._line.serve()
        return self._complete

    def outcome(self) -> tuple[Any, BaseException | None, bool]:
        """(result, error, whether it is complete)."""
        return self._result, self._error, self._complete

    def _block(self) -> None:
        self._line.receives.remove(self)
        text = f"[comm] rank {self._rank} waits for itself in {self._letter.text}: nothing was sent before; send first"
        self._fail(CollectiveError(text))

    def describe(self) -> str:
        return self._letter.text
