"""How long data of ranks on other machines take to come once all ranks have come to a call: that
tells a link that is slow from a rank that is. Counted are calls that are made again and
again, over MPI.
"""

from __future__ import annotations

from collections.abc import Collection

from ..base import slot

# between judgements; what was counted before a judgement counts half after it
EVERY_NS = 1_000_000_000
# a link is slow that took so long, and so many times as long a byte as all others
SLOW_NS = 100_000_000
TIMES = 3


class Links:
    """Bytes that came to this rank from ranks on other machines, and how long they took. near:
    those on this one.
    """

    def __init__(self, near: Collection[int]) -> None:
        self.near = frozenset(near)
        self.totals: dict[int, tuple[float, float]] = {}  # bytes, ns
        self._next = 0

    def came(self, rank: int, size: int, ns: int) -> None:
        """Counts data of a rank that took so long."""
        bytes_, total_ns = self.totals.get(rank, (0.0, 0.0))
        self.totals[rank] = bytes_ + size, total_ns + ns

    def judge(self, time_ns: int) -> None:
        """A call is complete: tells the status slot of the slowest link, if it is much slower
        than the others.
        """
        if time_ns < self._next:
            return
        self._next = time_ns + EVERY_NS
        worst = max(self.totals, key=lambda p: self.totals[p][1] / self.totals[p][0])
        size, ns = self.totals[worst]
        other_bytes, other_ns = (
            sum(of[i] for p, of in self.totals.items() if p != worst) for i in (0, 1)
        )
        times = ns * other_bytes / (size * max(other_ns, 1.0))
        slow = ns >= SLOW_NS and times >= TIMES
        if slow:
            slot.note_slow_link(worst, int(size), int(ns), int(min(times, 999)))
        else:
            slot.note_slow_link(rank=0, size=0, ns=0, times=0)
        self.totals = {p: (size / 2, ns / 2) for p, (size, ns) in self.totals.items()}
