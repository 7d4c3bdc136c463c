"""A communicator in two steps, headers and then data, over a transport that itself checks
nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..base import slot
from ..errors import CollectiveError
from .base import Communicator
from .calls import Call, Header, mismatch
from .requests import YIELD_S, Collective, Request

# Bytes per second below which a transfer is waited for asleep. With naps of up to 1 ms between
# tests an all-to-all of 36 MB between two ranks took MPICH 2,300 ms; without them it takes 8: one
# test moves some 16 KB.
_SLOWEST = 1e8

_active: set[Staged] = set()  # those with calls whose headers have not come


class Met(NamedTuple):
    """Result of comparing the headers of all ranks. headers: of all ranks, where they may
    differ; none if they are known to agree. piece: the tail of a scatter's root. blocking:
    all ranks wait for the call at once.
    """

    headers: Sequence[Header] = ()
    piece: Sequence[int] | None = None
    blocking: bool = False


class Staged(Communicator):
    """A communicator that exchanges headers first and data when they agree; for transports that
    check nothing. A wrong call so never meets the buffers of another. Headers of later calls
    may be under way while data of earlier ones are; data are posted in the order of the
    calls, on all ranks alike.
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
        with self._lock:
            self._post_all(pending)
            if pending.posted and not pending._complete and self._posted(pending.handle):
                pending._result = pending.call.result()
                pending._complete = True
                pending.handle = pending.call = None

    def _progress(self) -> None:
        """Data of calls in other groups: a rank that waits there may be one that this one's wait
        is for.
        """
        for comm in tuple(_active):
            # else another thread is at it
            if comm is not self and comm._lock.acquire(blocking=False):
                try:
                    comm._post_all()
                finally:
                    comm._lock.release()

    def _post_all(self, awaited: _Staged | None = None) -> None:
        """Posts the data of the calls whose headers are there; that of a call that a thread
        waits for by that thread (`awaited`): if two threads had one another's in the library,
        each would hold up what other ranks wait for.
        """
        with self._lock:
            while self._queue:
                head = self._queue[0]
                if head.call.header.blocking and head is not awaited:
                    return
                outcome = self._headers(head.handle, head.call.header)
                if outcome is None:
                    return
                self._queue.popleft()
                wrong = outcome.headers and mismatch(outcome.headers, self.ranks)
                if wrong:
                    head._fail(self._different(wrong, outcome.headers))
                    continue
                call = head.call
                if call.kind == "scatter":
                    call.place(outcome.piece)
                blocking = self._crowded and outcome.blocking
                if blocking:
                    slot.enter(call.header.sequence, call.header.text, self._mark)
                try:
                    head.handle = self._post(call, blocking)
                    head.posted = True
                finally:
                    if blocking:
                        slot.leave()
            _active.discard(self)

    def _different(self, wrong: str, headers: Sequence[Header]) -> CollectiveError:
        """Returns what all ranks raise for calls that differ.

        If data were on their way the group is over, on all.
        """
        error = CollectiveError(wrong)
        error.raised_on_all_ranks = self.size == self._world_size
        if any(h.repeated for h in headers):
            self._broke(error)
            while self._queue:
                self._queue.popleft()._fail(error)
        return error

    def _send_header(self, header: Header) -> Any:
        """Starts the exchange of headers; returns a handle."""
        raise NotImplementedError

    def _headers(self, handle: Any, local_header: Header) -> Met | None:
        """Returns what the headers of all ranks came to when they have come, None before; called
        until then.
        """
        raise NotImplementedError

    def _missing(self, handle: Any) -> list[int]:
        """Ranks of this group whose headers have not come."""
        raise NotImplementedError

    def _post(self, call: Call, blocking: bool) -> Any:
        """Starts the data; returns a handle. blocking: all ranks wait for this call at once, and
        outnumber the cores: the library may wait itself.
        """
        raise NotImplementedError

    def _posted(self, handle: Any) -> bool:
        """Returns whether the data are there."""
        raise NotImplementedError


class Headed(Collective):
    """A call that waits for the headers of all ranks, and then for data. posted: the headers are
    there, and agree.
    """

    __slots__ = ("posted",)

    def __init__(self, comm: Staged, call: Call, text: str, sequence: int) -> None:
        super().__init__(comm, call, text, sequence)
        self.posted = False

    def _patience(self) -> float:
        """Longer while data are under way: a long message moves on by a piece per test only."""
        call = self.call
        if not self.posted or call is None:
            return YIELD_S
        return YIELD_S + sum(0 if a is None else a.nbytes for a in (call.send, call.out)) / _SLOWEST


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

    def _late(self) -> list[int]:
        """Whose headers are missing: of this call, or of an earlier one that holds it up."""
        comm = self._comm
        return comm._missing(comm._queue[0].handle) if not self.posted and comm._queue else []
