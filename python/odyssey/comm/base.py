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
import weakref
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
    describe_call,
    find_mismatch,
    narrow,
    widen,
)
from .requests import MessageQueue, Received, Request

#: `here.world` is the communicator of a thread that is a rank of a mock world.
here = threading.local()
MAX_TAG = 16382  # MPI promises tags to 32767; a message takes two
# for the others to come and hear of a refused call; they may not, where only this rank made it
_REFUSED_S = 1.0


_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _break_after_fork() -> None:
    """Keeps a forked process from calls of its parent, which would take the parent's place in
    them.
    """
    for communicator in [*_communicators]:
        if communicator.size > 1:
            communicator._broken = ConfigError(
                "[comm] this process was forked from rank "
                f"{communicator.ranks[communicator.rank]} and is no rank; let the forked process "
                "end with os._exit() before it returns to the training"
            )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_break_after_fork)


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
        in_threads: True if ranks are threads of this process, which share what a process has, such
            as the generators of random numbers.
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
    in_threads: bool = False
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
        _communicators.add(self)
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
        self._check_readable("broadcast", array)
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
            self._make_reduce("reduce", array, op, out, self._check_root("reduce", root)), wait
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
        return self._run(self._make_reduce("all_reduce", array, op, out), wait)

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
            send = self._check_rows("scatter", array)
            send, out = self._prepare_out("scatter", out, send, send.shape[1:])
        return self._run(Call("scatter", send, out, None, root, ("", None, root, None, None)), wait)

    def gather(self, array: np.ndarray, root: int = 0, *, wait: bool = True) -> Any:
        """The arrays of all ranks as (size, ...), on `root`; None elsewhere."""
        root = self._check_root("gather", root)
        send = self._check_readable("gather", array)
        out = np.empty((self.size, *send.shape), send.dtype) if self.rank == root else None
        described = (NAMES[send.dtype], send.shape, root, None, None)
        return self._run(Call("gather", send, out, None, root, described), wait)

    def all_gather(
        self, array: np.ndarray, out: np.ndarray | None = None, *, wait: bool = True
    ) -> Any:
        """The arrays of all ranks as (size, ...), on all."""
        send = self._check_readable("all_gather", array)
        send, out = self._prepare_out("all_gather", out, send, (self.size, *send.shape))
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
        return self._run(self._make_reduce("reduce_scatter", array, op, out), wait)

    def all_to_all(
        self, array: np.ndarray, out: np.ndarray | None = None, *, wait: bool = True
    ) -> Any:
        """Row p of the (size, ...) array goes to rank p; row p of the result came from rank p."""
        send = self._check_rows("all_to_all", array)
        if out is send:
            send = send.copy()
        send, out = self._prepare_out("all_to_all", out, send, send.shape)
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
        return self._run(self._make_all_to_all_v(send, send_counts, receive, receive_counts), wait)

    def all_gather_v(
        self, array: np.ndarray, ranges: Sequence[tuple[int, int]], *, wait: bool = True
    ) -> Any:
        """Fills, in place, elements ranges[p] = [a, b) of the flat `array` on all ranks with
        those of rank p. The ranges are the same on all ranks, do not overlap and may be
        empty.
        """
        return self._run(self._make_all_gather_v(array, ranges), wait)

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
        return self._make_repeated(
            lambda: self._make_all_to_all_v(send, send_counts, receive, receive_counts)
        )

    def all_gather_v_init(self, array: np.ndarray, ranges: Sequence[tuple[int, int]]) -> Repeated:
        """`all_gather_v` that is started again and again with the same array; otherwise as
        `all_to_all_v_init`.
        """
        return self._make_repeated(lambda: self._make_all_gather_v(array, ranges))

    # --- one to one ---

    def send(self, array: np.ndarray, dest: int, tag: int = 0, *, wait: bool = True) -> Any:
        """Sends to rank `dest`.

        May return before it is received, and may wait until it is. With wait=False `array` must
        stay as it is until the request is complete.
        """
        self._check_peer("send", "dest", dest, tag)
        array = self._check_readable("send", array)
        envelope = self._make_envelope("send", array, dest, tag)
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
        envelope = self._make_envelope("recv", out, source, tag)
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
        return self._make_group(tuple(p for _, p in sorted(members)))

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
        return self._make_group(members) if self.rank in members else None

    def subgroup(self, members: Sequence[int]) -> Communicator | None:
        """This rank's group, of `members` in their order, where all ranks of this group make
        theirs at once; None for those that give no members. All ranks of this group call it.
        """
        return self.split(members[0], members.index(self.rank)) if members else self.split(None)

    def _make_group(self, members: tuple[int, ...]) -> Communicator:
        """Returns the group of some ranks of this one, which all of them make at the same time."""
        if len(members) == 1:
            return Communicator(parent=self)
        ranks = tuple(self.ranks[p] for p in members)
        parent_number, _ = self._mark
        # the same number on all members: all have made the same calls in this group
        number = zlib.crc32(repr((parent_number, self._sequence, ranks)).encode())
        rank_text = slot.format_ranks(ranks)
        mark = (number, rank_text)
        slot.begin_wait(self._sequence, f"making the group of ranks {rank_text}", mark)
        try:
            part = self._create_subgroup(members)
        finally:
            slot.end_wait()
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
        """Starts a call whose header is complete, and returns its request.

        This class is a group of one rank, so it copies, and the call is complete at once.

        Raises:
            CollectiveError: the rank expects another number of elements than it sends.
        """
        if call.kind == "all_to_all_v":
            count = call.send_counts[0]
            if count != call.receive_counts[0]:
                raise CollectiveError(find_mismatch([call.header], self.ranks))
            call.out[:count] = call.send[:count]
        elif call.out is not None and call.out is not call.send:
            call.out.reshape(-1)[...] = call.send.reshape(-1)
        return Request(call.result())

    def unfinished(self) -> list[Request]:
        """Calls under way."""
        return list(self._queue)

    def _make_repeated(self, make: Callable[[], Call]) -> Repeated:
        """Returns a call that can be started repeatedly; `make` checks its arguments."""
        make()
        return Repeated(self, make)

    def _send(self, array: np.ndarray, dest: int, tag: int, envelope: Header) -> Request:
        """Starts sending to another rank."""
        raise NotImplementedError

    def _recv(self, out: np.ndarray, source: int | None, tag: int, envelope: Header) -> Request:
        """Starts receiving from another rank, or from any."""
        raise NotImplementedError

    def _create_subgroup(self, members: tuple[int, ...]) -> Communicator:
        """Returns a communicator of at least two members, one of which is this rank.

        Only the members call it, at the same time.
        """
        raise NotImplementedError

    def _find_ended(self, ranks: Sequence[int]) -> list[int]:
        """Returns the given ranks that are known to have ended."""
        return []

    def _progress(self) -> None:
        """Advances calls that other ranks may wait for; called while this rank waits."""

    def _mark_broken(self, error: BaseException) -> None:
        """Makes later calls raise `error`, because the ranks are no longer in step."""
        self._broken = error

    def _mark_closed(self) -> None:
        """Makes later calls raise an error, because the resources of the library are freed."""
        self._broken = CollectiveError(
            f"[comm] the group of ranks {list(self.ranks)} was closed; make a new one"
        )

    # --- checks and preparation, for all backends ---

    def refuse(self, kind: str, reason: str) -> None:
        """Tells the other ranks that a call is refused here because of its arguments.

        They may already wait in that call. Their calls end with a CollectiveError, and the group
        can be used again, as after calls that differ.

        kind: the name of the call.
        reason: the message of the error; a "[room] " at its start is removed.
        """
        if self.size == 1 or self._broken is not None:
            return
        request = self._start(
            Call("barrier"), f"{kind} (refused: {reason.partition('] ')[2] or reason})"
        )
        until = time.monotonic() + _REFUSED_S
        while not request.test() and time.monotonic() < until:
            time.sleep(1e-3)

    def _run(self, call: Call, wait: bool) -> Any:
        """Starts a call, and returns its result, or its request if `wait` is False."""
        call.blocking = wait
        request = self._start(call)
        return request.wait() if wait else request

    def _start(self, call: Call, name: str = "") -> Request:
        """Starts a call with the next number of this group, and returns its request.

        name: the name of the call in its header, if that is not its kind.
        """
        if self._broken is not None:
            raise self._broken
        signature, text = describe_call(name or call.kind, call.described, *caller_location(3))
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
        slot.note_call(self._sequence, text, self._mark)
        self._sequence += 1
        return self._begin(call)

    def _make_envelope(self, kind: str, array: np.ndarray, peer: int | None, tag: int) -> Header:
        """Returns the header of a message; its tail is (dtype code, elements).

        peer: the other rank; None for any.
        """
        peer_name = "any rank" if peer is None else f"rank {self.ranks[peer]}"
        direction = "to" if kind == "send" else "from"
        details = f"{direction} {peer_name} tag {tag}"
        described = (NAMES[array.dtype], array.shape, -1, None, details)
        _, text = describe_call(kind, described, *caller_location(3))
        tail = (CODES[array.dtype], array.size)
        return Header(sequence=0, signature=0, text=text, tail=tail, kind=kind)

    def _check_readable(self, kind: str, array: Any) -> np.ndarray:
        """Returns a contiguous array to read from; it is a copy only if that is necessary.

        Raises:
            ShapeError: the dtype is not supported.
        """
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
        """Raises ShapeError for an array into which a call cannot write.

        dtype, shape: those that the array must have; None allows any.
        """
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

    def _prepare_out(
        self, kind: str, out: np.ndarray | None, send: np.ndarray, shape: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (send, out), which are the same array or do not overlap.

        `out` is allocated or checked. `send` is copied if the two overlap in part, because a
        backend may write before it has read everything. Sums allow `out` to be `send`.
        """
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

    def _check_rows(self, kind: str, array: Any) -> np.ndarray:
        """Returns a contiguous array with one row per rank. Raises ShapeError for others."""
        array = self._check_readable(kind, array)
        if not array.ndim or array.shape[0] != self.size:
            raise ShapeError(
                f"[comm] {kind} of shape {array.shape}; it must have {self.size} rows, one per rank"
            )
        return array

    def _make_reduce(
        self,
        kind: str,
        array: np.ndarray,
        op: ReduceOp | str,
        out: np.ndarray | None,
        root: int = -1,
    ) -> Call:
        """Returns the Call of "reduce", "all_reduce" or "reduce_scatter", with checked arguments.

        Backends never see a mean or 16-bit floats. A mean is sent as a sum, and divided by the
        ranks at the end. 16-bit floats are sent as float32, and rounded once, at the end.

        Raises:
            ShapeError, ConfigError: an argument is not allowed.
        """
        op = ReduceOp.of(op)
        send = self._check_readable(kind, array)
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
        is_half = dtype.itemsize == 2 and dtype.kind in "fV"  # float16, or bfloat16 ("V")
        sent_op = ReduceOp.SUM if op is ReduceOp.MEAN else op
        if kind == "reduce" and self.rank != root:
            return Call(kind, widen(send) if is_half else send, None, sent_op, root, described)
        send, out = self._prepare_out(kind, out, send, shape)
        total = out
        if is_half:
            send = widen(send)
            total = np.empty(shape, np.float32)

        def finish() -> np.ndarray:
            if op is ReduceOp.MEAN:
                np.divide(total, self.size, out=total)
            return narrow(total, out) if is_half else out

        needs_finish = is_half or op is ReduceOp.MEAN
        return Call(
            kind, send, total, sent_op, root, described, finish=finish if needs_finish else None
        )

    def _make_all_to_all_v(
        self,
        send: np.ndarray,
        send_counts: Sequence[int],
        receive: np.ndarray,
        receive_counts: Sequence[int],
    ) -> Call:
        """Returns the Call of an all_to_all_v. Raises ShapeError for wrong arrays or counts."""
        kind = "all_to_all_v"
        send = self._check_readable(kind, send)
        self._check_writable(kind, receive, send.dtype, receive.shape)
        if send.size and np.may_share_memory(send, receive):
            send = send.copy()
        counts = []
        for name, array, rank_counts in (
            ("send", send, send_counts),
            ("receive", receive, receive_counts),
        ):
            elements = tuple(int(count) for count in rank_counts)
            if len(elements) != self.size or min(elements) < 0 or sum(elements) > array.size:
                raise ShapeError(
                    f"[comm] {kind}: {name}_counts are {list(elements)} for {array.size} elements, "
                    f"{self.size} ranks; give one count per rank, in sum at most the elements"
                )
            counts.append(elements)
        checked_send_counts, checked_receive_counts = counts
        return Call(
            kind,
            send.reshape(-1),
            receive.reshape(-1),
            described=(NAMES[send.dtype], None, -1, None, None),
            send_counts=checked_send_counts,
            receive_counts=checked_receive_counts,
            finish=lambda: None,
        )

    def _make_all_gather_v(self, array: np.ndarray, ranges: Sequence[tuple[int, int]]) -> Call:
        """Returns the Call of an all_gather_v. Raises ShapeError for wrong arrays or ranges."""
        self._check_writable("all_gather_v", array)
        pieces = tuple((int(start), int(end)) for start, end in ranges)
        in_order = sorted(pieces)
        overlap = any(
            previous_end > start
            for (_, previous_end), (start, end) in zip(in_order, in_order[1:], strict=False)
            if end > start
        )
        if (
            len(pieces) != self.size
            or any(not 0 <= start <= end <= array.size for start, end in pieces)
            or overlap
        ):
            raise ShapeError(
                f"[comm] all_gather_v: ranges are {list(pieces)} for {array.size} elements and "
                f"{self.size} ranks; give one [start, end) per rank, without overlap"
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
