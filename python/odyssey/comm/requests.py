"""Operations under way: what a program holds of a call that it does not wait for, and how a rank
waits for others.

A backend makes subclasses of `Waiting` (or `Message`), which say what to test and whom they wait
for; the back-off, the deadline and the end of a wait for a rank that is gone are here, once.
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
    """Seconds that an operation waits for others: ODYSSEY_TIMEOUT, default 600."""
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
        """The result, when it is there; again the same if called again.

        Raises CollectiveError: the ranks' calls differ, or one did not come before the deadline.
        """
        if not self._complete and not self.test():
            self._block()
        if self._error is not None:
            raise self._error
        return self._result

    def _block(self) -> None:
        raise NotImplementedError

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._complete = True

    def _follow(self, other: Request) -> bool:
        """Ends as another request, if that has ended; whether it has."""
        if other.test():
            self._result = other._result
            self._error = other._error
            self._complete = True
        return self._complete

    def describe(self) -> str:
        """Returns what it is, for messages."""
        return "operation"


class Waiting(Request):
    """A request that is not complete when made: waits by testing, with a back-off and a
    deadline. text: what it is.
    """

    __slots__ = ("_comm", "_text", "_suspect")
    _spins = 500  # tests before anything else
    # at a rank that has ended, before it is given up: what it sent before would have come by then
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
        """Tests until complete: some spins, then giving the core away, then sleeping.

        Spinning is for short waits on a core of one's own: with more ranks than cores a spinning
        rank keeps those away that it waits for (4 ranks on 2 cores: a barrier takes 4 ms spinning,
        17 us yielding; docs/log.md). So short a wait is counted in the status slot, but not shown
        there.
        """
        if self._spins and not self._comm._crowded:
            test = self.test
            spin_start = time.monotonic_ns()
            for _ in range(self._spins):
                if test():
                    break
            slot.waited(time.monotonic_ns() - spin_start)
            if self._complete:
                return
        slot.enter(self._number(), self._text, self._waited_for())
        try:
            self._test_on()
        finally:
            slot.leave()

    def _number(self) -> int:
        """Returns the number of the collective call in its group; -1: it is a message."""
        return -1

    def _waited_for(self) -> tuple[int, str]:
        """Whom it can wait for, for the status slot: a group's mark, or a message's other end."""
        return self._comm._mark

    def _test_on(self) -> None:
        """Tests until complete, giving the core away and then sleeping in between."""
        test = self.test
        start = patience_start = time.monotonic()
        timeout = self._comm.timeout or deadline()
        patience = 0.0
        look = start + _LOOK_S
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
            if tested_at - start > (allowed := self._allowed(timeout, start)):
                self._give_up(self._timed_out(allowed))
                return
            if tested_at > look:
                look = tested_at + (_AGAIN_S if self._look() else 0.25)
            time.sleep(nap)
            nap = min(1.5 * nap, 200e-6 if tested_at - start < 0.1 else 1e-3)

    def _allowed(self, timeout: float, start: float) -> float:
        """Seconds that the wait since `start` may take, as far as anybody has said by now."""
        until = self._comm.until
        return timeout if until is None else min(timeout, max(round(until - start, 1), 0.0))

    def _patience(self) -> float:
        """Seconds of giving the core away before sleeping; they start anew when the number
        changes.
        """
        return YIELD_S

    def _late(self) -> Sequence[int]:
        """Ranks of the group that may have to come before it can complete."""
        return ()

    def _absent(self) -> str:
        """Who did not come, and what to do."""
        late = [str(self._comm.ranks[p]) for p in self._late()]
        if not late:
            return "all ranks came, but the data did not"
        problem = f"rank{'s' * (len(late) > 1)} {', '.join(late)} did not come"
        return (
            f"{problem}; see what they do instead, or set a longer timeout "
            "(ODYSSEY_TIMEOUT=SECONDS)"
        )

    def _look(self) -> bool:
        """Called while waiting long: gives up when a rank that is waited for has ended.

        Whether to look again soon.
        """
        late = self._late()
        ended_ranks = self._comm._gone(late) if late else ()
        self._suspect += bool(ended_ranks)
        if self._suspect > self._looks:
            self._give_up(self._ended([self._comm.ranks[p] for p in ended_ranks]))
        return bool(ended_ranks)

    def _timed_out(self, seconds: float) -> str:
        return f"[comm] waited {seconds:g} s in {self._text}: {self._absent()}"

    def _ended(self, ranks: Sequence[int]) -> str:
        return (
            f"[comm] rank {', '.join(map(str, ranks))} has ended; {self._text} waits for it "
            "for ever"
        )

    def _give_up(self, text: str) -> None:
        """The wait ends without what it was for: the ranks are no longer in step."""
        self._fail(CollectiveError(text))
        self._comm._broke(self._error)


class Collective(Waiting):
    """A collective call; `_late` is right at any time, and the status slot is told.
    sequence: its number in its group.
    """

    __slots__ = ("call", "_sequence")

    def __init__(self, comm: Communicator, call: Call | None, text: str, sequence: int) -> None:
        super().__init__(comm, text)
        self.call = call
        self._sequence = sequence

    def _number(self) -> int:
        return self._sequence

    def _look(self) -> bool:
        slot.missing([self._comm.ranks[p] for p in self._late()])
        return super()._look()


class Message(Waiting):
    """A message to or from another rank of the group. envelope: what the receiver sees of it, or
    is to see. source: the other rank; None as long as it may be any.
    """

    __slots__ = ("source", "_kind")

    def __init__(self, comm: Communicator, envelope: Header, peer: int | None) -> None:
        super().__init__(comm, envelope.text)
        self.source = peer
        self._kind = envelope.kind

    def _waited_for(self) -> tuple[int, str]:
        return 0, slot.ranges(self._comm.ranks) if self.source is None else str(
            self._comm.ranks[self.source]
        )

    def _absent(self) -> str:
        if self.source is None:
            return "no rank sent it; see what they do instead"
        did_not = "receive" if self._kind == "send" else "send"
        return (
            f"rank {self._comm.ranks[self.source]} did not {did_not} it; see what it does instead"
        )


# --- messages within this process -----------------------------------------------------------------


class MessageQueue:
    """Messages and receives of one pair of ranks and one tag, in this process: the first meets
    the first.
    """

    def __init__(self) -> None:
        self.messages: deque[tuple[np.ndarray, Header]] = deque()
        self.receives: deque[Received] = deque()

    def serve(self) -> None:
        """Brings together what is there."""
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
        """Ends the receive with a message."""
        wrong = check_envelope(
            envelope.tail, envelope.text, self._out, self._envelope, self._source, self._rank
        )
        if wrong:
            self._fail(CollectiveError(wrong))
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
