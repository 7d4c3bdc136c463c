"""The end of a world of MPI: ranks that end wait for each other, and tell those who ask that
they have ended.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import exits, slot
from ..errors import CollectiveError
from .call_checks import distances
from .requests import deadline
from .staged import Staged

if TYPE_CHECKING:
    from .base import Communicator
    from .mpi import MPICommunicator

# tags beyond those of rounds
_ASK = 100
_ENDED = 101
LAST_S = 2.0  # what a rank that has ended had sent before has arrived by then
# a rank that ends with an exit code other than 0 waits so long for the others to do the same
ALONE_S = 0.7


class Exits:
    """Ranks that end tell the others, so that nobody waits for them until the deadline; and
    nobody hangs at the end.

    At the end of the interpreter the ranks wait for each other in the rounds of call_checks.py,
    sleeping, before MPI_Finalize, which would wait as well, but on a core; a rank that waits there
    tells those who ask. A rank with an operation that never completed, or that gave up waiting,
    cannot: it ends all, with a CollectiveError's exit code.
    """

    def __init__(
        self, world: MPICommunicator, finalized: Callable[[], bool], abort: Callable[[int], None]
    ) -> None:
        self.owner = weakref.ref(world)
        self._finalized = finalized
        self._abort = abort
        self.size = world.size
        self.rank = world.rank
        self.communicators: weakref.WeakValueDictionary[int, Communicator] = (
            weakref.WeakValueDictionary()
        )
        # of what is probed and then received: one thread at a time
        self._hearing = threading.Lock()
        self._alarm = world._data.Dup()
        self._asked_ranks: set[int] = set()
        self._over: set[int] = set()
        self._notes: list[Any] = []
        if self.size > 1:
            atexit.register(self._leave, os.getpid())

    def open(self) -> list[Communicator]:
        """The communicators that are open now; other threads may make more meanwhile."""
        return [comm for ref in self.communicators.valuerefs() if (comm := ref()) is not None]

    def ended(self, rank: int) -> bool:
        """Returns whether this world rank has said that it ends, in order; it is asked the first
        time.
        """
        with self._hearing:
            if rank != self.rank and rank not in self._asked_ranks:
                self._asked_ranks.add(rank)
                self._tell(rank, _ASK)
            while (message := self._alarm.Improbe(tag=_ENDED)) is not None:
                says = np.zeros(1, np.int64)
                message.Recv(says)
                self._over.add(int(says[0]))
            return rank in self._over

    def barrier(self) -> Any:
        """Starts a barrier of all ranks of the world."""
        return self._alarm.Ibarrier()

    def _leave(self, process: int) -> None:
        if os.getpid() != process or self._finalized():
            return
        code, reason = exits.leaving()
        # Others may be late with a call of this rank, but they come; with one that fails they are
        # not waited for long.
        until = time.monotonic() + (ALONE_S if code else deadline())
        for comm in self.open():
            was_broken = comm._broken is not None
            if not was_broken:
                self._wait_for_last(comm, until)
            if comm._broken is not None or comm.unfinished():
                sys.stdout.flush()
                if not was_broken:
                    first = next((r.describe() for r in comm.unfinished()), "")
                    if code:
                        exits.end(
                            code,
                            f"{reason}, while {first} is unfinished; all are ended",
                            world=self.owner(),
                        )
                    text = str(comm._broken or f"[comm] ends while {first} is unfinished")
                    print(f"odyssey: [rank {self.rank}] {text}", file=sys.stderr)
                    exits.record(CollectiveError.exit_code, text)
                sys.stderr.flush()
                # the others say what they have to say, and the launcher reads it, before all is
                # ended
                time.sleep(0.5)
                self._abort(CollectiveError.exit_code)
        slot.phase("end")
        exits.record(code, reason)
        nap = 1e-5
        patience = time.monotonic() + ALONE_S
        note = np.zeros(1, np.uint8)
        for k, far in enumerate(distances(self.size)):
            requests = [self._alarm.Isend(note, (self.rank + d) % self.size, k) for d in far]
            requests += [
                self._alarm.Irecv(np.zeros(1, np.uint8), (self.rank - d) % self.size, k)
                for d in far
            ]
            while not requests[0].Testall(requests):
                if not code:  # a rank that fails ends all itself, if the others do not do the same
                    self._answer()
                elif time.monotonic() > patience:
                    exits.end(
                        code, f"{reason}, and others go on; all are ended", world=self.owner()
                    )
                time.sleep(nap)
                nap = min(1.5 * nap, 5e-3)

    def _answer(self) -> None:
        """Tells those who ask that this rank has ended; and in groups of which calls it had
        begun before.
        """
        while (message := self._alarm.Improbe(tag=_ASK)) is not None:
            asks = np.zeros(1, np.int64)
            message.Recv(asks)
            self._tell(int(asks[0]), _ENDED)
        for comm in self.open():
            if isinstance(comm, Staged):
                comm.listen()

    def _tell(self, to: int, tag: int) -> None:
        self._notes.append(self._alarm.Isend(np.array([self.rank], np.int64), to, tag))

    def _wait_for_last(self, comm: MPICommunicator, until: float) -> None:
        """Waits for the calls of a group that are under way, as long as others may still come to
        them.
        """
        shown_request = None
        while (pending := [r for r in comm.unfinished() if not r.test()]) and (
            checked_at := time.monotonic()
        ) <= until:
            comm._progress()
            if (
                pending[0] is not shown_request
            ):  # the watcher is to see that this rank waits, and in what
                shown_request = pending[0]
                slot.begin_wait(
                    shown_request._get_call_number(),
                    shown_request.describe(),
                    shown_request._describe_awaited(),
                )
            if until - checked_at > LAST_S and any(map(self.ended, comm.ranks)):
                until = checked_at + LAST_S
            time.sleep(1e-3)
        slot.end_wait()
