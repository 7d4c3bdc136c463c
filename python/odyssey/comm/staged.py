"""A communicator that exchanges headers first and data second, over a transport that checks
nothing itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..base import slot
from ..errors import CollectiveError
from .base import Communicator
from .calls import Call, Header, find_mismatch
from .requests import YIELD_S, Collective, Request

# Bytes per second: a slower transfer is waited for with naps between tests. One test moves about
# 16 KB, so naps slow a transfer down: with naps of up to 1 ms an all-to-all of 36 MB between two
# ranks took MPICH 2,300 ms, without them 8 ms.
_SLOWEST = 1e8

_active: set[Staged] = set()  # those with calls whose headers have not come


class Met(NamedTuple):
    """The result of comparing the headers of all ranks.

    headers: those of all ranks if they may differ; empty if they are known to agree.
    piece: the tail of the root's header in a scatter.
    blocking: True if all ranks wait for the call at once.
    """

    headers: Sequence[Header] = ()
    piece: Sequence[int] | None = None
    blocking: bool = False


class Staged(Communicator):
    """A communicator that exchanges headers first, and data once the headers agree.

    So a wrong call never reaches the buffers of another one, on transports that check nothing.
    Headers of later calls may be under way together with data of earlier calls. Data are posted
    in the order of the calls, which is the same on all ranks.
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
            _active.add(self)
        return pending

    def _advance(self, pending: _Staged) -> None:
        """Posts the data that can be posted, and completes `pending` if its data have arrived."""
        with self._lock:
            self._post_all(pending)
            if pending.posted and not pending._complete and self._data_arrived(pending.handle):
                pending._result = pending.call.result()
                pending._complete = True
                pending.handle = pending.call = None

    def _progress(self) -> None:
        """Posts data of calls in other groups.

        A rank that this one waits for may itself be waiting for such a call.
        """
        for comm in tuple(_active):
            # if the lock is taken, another thread does the same
            if comm is not self and comm._lock.acquire(blocking=False):
                try:
                    comm._post_all()
                finally:
                    comm._lock.release()

    def _post_all(self, awaited: _Staged | None = None) -> None:
        """Posts the data of the calls whose headers have come, in the order of the calls.

        A blocking call may wait inside the library, so only the thread that waits for it may post
        it. If each of two threads posted the blocking call of the other, each would hold up data
        that other ranks wait for.

        awaited: the call that this thread waits for.
        """
        with self._lock:
            while self._queue:
                head = self._queue[0]
                if head.call.header.blocking and head is not awaited:
                    return
                outcome = self._poll_headers(head.handle, head.call.header)
                if outcome is None:
                    return
                self._queue.popleft()
                problem = outcome.headers and find_mismatch(outcome.headers, self.ranks)
                if problem:
                    head._fail(self._make_mismatch_error(problem, outcome.headers))
                    continue
                call = head.call
                if call.kind == "scatter":
                    call.place(outcome.piece)
                blocking = self._crowded and outcome.blocking
                if blocking:
                    slot.begin_wait(call.header.sequence, call.header.text, self._mark)
                try:
                    head.handle = self._post(call, blocking)
                    head.posted = True
                finally:
                    if blocking:
                        slot.end_wait()
            _active.discard(self)

    def _make_mismatch_error(self, problem: str, headers: Sequence[Header]) -> CollectiveError:
        """Returns the error that all ranks raise for calls that differ.

        If data were already on their way, no rank can use the group any more, and all calls in
        the queue fail.
        """
        error = CollectiveError(problem)
        error.raised_on_all_ranks = self.size == self._world_size
        if any(header.repeated for header in headers):
            self._mark_broken(error)
            while self._queue:
                self._queue.popleft()._fail(error)
        return error

    def _send_header(self, header: Header) -> Any:
        """Starts the exchange of headers, and returns a handle for it."""
        raise NotImplementedError

    def _poll_headers(self, handle: Any, local_header: Header) -> Met | None:
        """Returns the result of the exchange of headers, or None if some have not come.

        It is called again until it returns a result, and not after that.
        """
        raise NotImplementedError

    def _find_missing(self, handle: Any) -> list[int]:
        """Returns the ranks of this group whose headers have not come."""
        raise NotImplementedError

    def _post(self, call: Call, blocking: bool) -> Any:
        """Starts moving the data, and returns a handle.

        blocking: the library may wait inside this call. That is faster if all ranks wait for the
            call at once and there are more ranks than cores.
        """
        raise NotImplementedError

    def _data_arrived(self, handle: Any) -> bool:
        """Returns True if the data have arrived."""
        raise NotImplementedError


class Headed(Collective):
    """A call that waits for the headers of all ranks, and then for data.

    posted: True if the headers have come and agree.
    """

    __slots__ = ("posted",)

    def __init__(self, comm: Staged, call: Call, text: str, sequence: int) -> None:
        super().__init__(comm, call, text, sequence)
        self.posted = False

    def _patience(self) -> float:
        """Returns more seconds while data move, because each test moves a piece of a message."""
        call = self.call
        if not self.posted or call is None:
            return YIELD_S
        nbytes = sum(0 if array is None else array.nbytes for array in (call.send, call.out))
        return YIELD_S + nbytes / _SLOWEST


class _Staged(Headed):
    __slots__ = ("handle",)

    def __init__(self, comm: Staged, call: Call, handle: Any) -> None:
        super().__init__(comm, call, call.header.text, call.header.sequence)
        self.handle = handle

    def test(self) -> bool:
        if not self._complete:
            self._comm._advance(self)
            if not self._complete:
                self._comm._progress()
        return self._complete

    def _find_late(self) -> list[int]:
        """Returns the ranks whose headers are missing.

        They may be missing in an earlier call, because calls are posted in order.
        """
        comm = self._comm
        if self.posted or not comm._queue:
            return []
        return comm._find_missing(comm._queue[0].handle)
