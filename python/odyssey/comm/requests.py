"""Operations under way: the requests that a program holds for calls that it does not wait for, and
the way in which a rank waits for others.

A backend makes subclasses of `Waiting` (or `Message`). They define what to test and which ranks
they wait for. The back-off, the deadline and the end of a wait for a rank that is gone are the same
for all backends, and are here.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import limits, slot
from ..errors import CollectiveError
from .calls import Call, Header, check_envelope

if TYPE_CHECKING:
    from .base import Communicator

# 4 ranks on 2 cores: 61,706 floats take 0.36 ms, but 10 ms with sleeps from 0.3 ms on
YIELD_S = 2e-3
_LOOK_S = 0.5
# from the first sign that a rank has ended to the next look: what it sent before is on its way
_AGAIN_S = 0.1


def deadline() -> float:
    """Returns the seconds that an operation waits for others: ODYSSEY_TIMEOUT, default 600."""
    return limits.seconds("comm", "ODYSSEY_TIMEOUT", 600.0)


class Request:
    """An operation under way.

    It holds its buffers until it is complete; do not touch them before. This class itself is an
    operation that is complete.
    """

    __slots__ = ("_result", "_error", "_complete", "__weakref__")

    def __init__(self, result: Any = None) -> None:
        self._result = result
        self._error = None
        self._complete = True

    def test(self) -> bool:
        """Returns True if `wait` would not block; also makes progress."""
        return self._complete

    def wait(self) -> Any:
        """Waits for the result and returns it. A second call returns the same result.

        Raises:
            CollectiveError: the ranks' calls differ, or one did not come before the deadline.
        """
        if not self._complete and not self.test():
            self._block()
        if self._error is not None:
            raise self._error
        return self._result

    def _block(self) -> None:
        """Waits until the request is complete; called if it is not."""
        raise NotImplementedError

    def _fail(self, error: BaseException) -> None:
        """Ends the request with an error. `wait` raises it."""
        self._error = error
        self._complete = True

    def _follow(self, request: Request) -> bool:
        """Completes with the result of another request if that one is complete.

        Returns True if it is.
        """
        if request.test():
            self._result = request._result
            self._error = request._error
            self._complete = True
        return self._complete

    def describe(self) -> str:
        """Returns the name of the operation, for messages."""
        return "operation"


class Waiting(Request):
    """A request that waits by testing, with a back-off and a deadline.

    text: the name of the operation, for messages.
    """

    __slots__ = ("_comm", "_text", "_suspect")
    _spins = 500  # tests before anything else
    # Times that a rank must have been seen to be gone before the wait ends: until then, data that
    # it sent before its end would have come.
    _looks = 3

    def __init__(self, comm: Communicator, text: str) -> None:
        self._result = None
        self._error = None
        self._complete = False
        self._comm = comm
        self._text = text
        self._suspect = 0

    def describe(self) -> str:
        return self._text

    def _block(self) -> None:
        """Tests until complete: some spins, then yielding the core, then sleeping.

        Spinning is for short waits of a rank that has a core for itself. With more ranks than
        cores, a spinning rank takes the core of the ranks that it waits for. For example, with 4
        ranks on 2 cores a barrier takes 4 ms spinning and 17 us yielding (docs/log.md). The status
        slot counts the time of spinning, but does not show it as a wait.
        """
        if self._spins and not self._comm._crowded:
            test = self.test
            spin_start = time.monotonic_ns()
            for _ in range(self._spins):
                if test():
                    break
            slot.count_wait(time.monotonic_ns() - spin_start)
            if self._complete:
                return
        slot.begin_wait(self._get_call_number(), self._text, self._describe_awaited())
        try:
            self._test_until_complete()
        finally:
            slot.end_wait()

    def _get_call_number(self) -> int:
        """Returns the number of the collective call in its group; -1 for a message."""
        return -1

    def _describe_awaited(self) -> tuple[int, str]:
        """Returns the ranks that it may wait for, as the `group` of `slot.begin_wait`."""
        return self._comm._mark

    def _test_until_complete(self) -> None:
        """Tests until complete; between tests it yields the core at first, and sleeps later.

        It sleeps once the patience is over. Naps grow from 20 us to 1 ms. A new patience, for
        example when data start to come, begins again with yields.
        """
        test = self.test
        start = patience_start = time.monotonic()
        timeout = self._comm.timeout or deadline()
        patience = 0.0
        next_check = start + _LOOK_S  # of the ranks that it waits for
        nap = 20e-6
        while not test():
            self._comm._progress()
            tested_at = time.monotonic()
            if patience != self._patience():
                patience_start = tested_at
                patience = self._patience()
                nap = 20e-6
            if tested_at - patience_start < patience:
                os.sched_yield()
                continue
            if tested_at - start > (allowed := self._allowed_seconds(timeout, start)):
                self._give_up(self._describe_timeout(allowed))
                return
            if tested_at > next_check:
                next_check = tested_at + (_AGAIN_S if self._check_awaited() else 0.25)
            time.sleep(nap)
            nap = min(1.5 * nap, 200e-6 if tested_at - start < 0.1 else 1e-3)

    def _allowed_seconds(self, timeout: float, start: float) -> float:
        """Returns the seconds that a wait from `start` on may take.

        Another thread may shorten the wait at any time by setting `until` of the communicator.
        """
        until = self._comm.until
        return timeout if until is None else min(timeout, max(round(until - start, 1), 0.0))

    def _patience(self) -> float:
        """Returns the seconds of yields before sleeping; they start again if the number changes."""
        return YIELD_S

    def _find_late(self) -> Sequence[int]:
        """Returns the ranks of the group that may have to come before it can complete."""
        return ()

    def _explain_absence(self) -> str:
        """Returns the ranks that did not come, and what to do, as a part of a message."""
        late = [str(self._comm.ranks[p]) for p in self._find_late()]
        if not late:
            return "all ranks came, but the data did not"
        problem = f"rank{'s' * (len(late) > 1)} {', '.join(late)} did not come"
        return (
            f"{problem}; see what they do instead, or set a longer timeout "
            "(ODYSSEY_TIMEOUT=SECONDS)"
        )

    def _check_awaited(self) -> bool:
        """Ends the wait if a rank that is waited for has ended; called now and then.

        Returns True if a rank has ended, so that the next check should come soon.
        """
        late = self._find_late()
        ended_ranks = self._comm._find_ended(late) if late else ()
        self._suspect += bool(ended_ranks)
        if self._suspect > self._looks:
            self._give_up(self._describe_end([self._comm.ranks[p] for p in ended_ranks]))
        return bool(ended_ranks)

    def _describe_timeout(self, seconds: float) -> str:
        """Returns the message for a wait that has reached its deadline."""
        return f"[comm] waited {seconds:g} s in {self._text}: {self._explain_absence()}"

    def _describe_end(self, ranks: Sequence[int]) -> str:
        """Returns the message for a wait for world ranks that have ended."""
        return (
            f"[comm] rank {', '.join(map(str, ranks))} has ended; {self._text} waits for it "
            "for ever"
        )

    def _give_up(self, text: str) -> None:
        """Fails, and marks the group as broken, because the ranks are no longer in step."""
        self._fail(CollectiveError(text))
        self._comm._mark_broken(self._error)


class Collective(Waiting):
    """A collective call; the status slot shows which ranks it waits for.

    `_find_late` is right at any time, also before the deadline.
    sequence: the number of the call in its group.
    """

    __slots__ = ("call", "_sequence")

    def __init__(self, comm: Communicator, call: Call | None, text: str, sequence: int) -> None:
        super().__init__(comm, text)
        self.call = call
        self._sequence = sequence

    def _get_call_number(self) -> int:
        return self._sequence

    def _check_awaited(self) -> bool:
        slot.note_missing_ranks([self._comm.ranks[p] for p in self._find_late()])
        return super()._check_awaited()


class Message(Waiting):
    """A message to or from another rank of the group.

    envelope: the header that the receiver sees, or should see.
    source: the other rank; None as long as it may be any rank.
    """

    __slots__ = ("source", "_kind")

    def __init__(self, comm: Communicator, envelope: Header, peer: int | None) -> None:
        super().__init__(comm, envelope.text)
        self.source = peer
        self._kind = envelope.kind

    def _describe_awaited(self) -> tuple[int, str]:
        if self.source is None:
            return 0, slot.format_ranks(self._comm.ranks)
        return 0, str(self._comm.ranks[self.source])

    def _explain_absence(self) -> str:
        if self.source is None:
            return "no rank sent it; see what they do instead"
        did_not = "receive" if self._kind == "send" else "send"
        return (
            f"rank {self._comm.ranks[self.source]} did not {did_not} it; see what it does instead"
        )


# --- messages within this process -----------------------------------------------------------------


class MessageQueue:
    """The messages and receives of one pair of ranks and one tag, within this process.

    The first message is for the first receive, and so on.
    """

    def __init__(self) -> None:
        self.messages: deque[tuple[np.ndarray, Header]] = deque()
        self.receives: deque[Received] = deque()

    def serve(self) -> None:
        """Completes receives while there are messages for them."""
        while self.messages and self.receives:
            self.receives.popleft().take(*self.messages.popleft())


class Received(Request):
    """A receive in this process: from another thread, or from this rank itself."""

    __slots__ = ("_line", "_out", "_envelope", "_source", "_rank")

    def __init__(
        self, line: MessageQueue, out: np.ndarray, envelope: Header, source: int, rank: int
    ) -> None:
        self._result = None
        self._error = None
        self._complete = False
        self._line = line
        self._out = out
        self._envelope = envelope
        self._source = source
        self._rank = rank
        line.receives.append(self)

    def take(self, array: np.ndarray, envelope: Header) -> None:
        """Completes the receive with a message, or fails if the message does not fit."""
        problem = check_envelope(
            envelope.tail, envelope.text, self._out, self._envelope, self._source, self._rank
        )
        if problem:
            self._fail(CollectiveError(problem))
        else:
            self._out.reshape(-1)[...] = array.reshape(-1)
            self._result = self._out
            self._complete = True

    def test(self) -> bool:
        if not self._complete:
            self._line.serve()
        return self._complete

    def _block(self) -> None:
        self._line.receives.remove(self)
        problem = f"rank {self._rank} waits for itself in {self._envelope.text}"
        self._fail(CollectiveError(f"[comm] {problem}: nothing was sent before; send first"))

    def describe(self) -> str:
        return self._envelope.text
