"""An all-gather in rounds, log4 of the ranks: who passes which ranks' data on to whom.

In round k a rank sends to the ranks 1, 2 and 3 times 4^k after it what it has: its own data and
those of the ranks just before it. So each message carries data of several ranks, and each rank gets
the data of each other rank once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .call_checks import RADIX, distances
from .calls import Run

#: Up to so many ranks with data, each sends its data to each other rank itself, which takes one
#: step. More ranks take rounds: each of 32 ranks sends 7 messages instead of 31.
DIRECT = 16


class Passed(NamedTuple):
    """One message of a round.

    peer: the rank that gets it, or that it comes from.
    runs: the elements [a, b) that it carries, in their order.
    """

    peer: int
    runs: tuple[Run, ...]


class GatherRound(NamedTuple):
    """The messages of one rank in one round. Those without elements are omitted, on both sides."""

    sends: tuple[Passed, ...]
    receives: tuple[Passed, ...]


def gather_rounds(rank: int, ranges: Sequence[Run]) -> tuple[GatherRound, ...]:
    """Returns the rounds of a rank. ranges: the elements [a, b) of each rank."""
    size = len(ranges)
    rounds = []
    step = 1
    for far in distances(size):
        sends = []
        receives = []
        for distance in far:
            # ranks whose data go this far: all others have theirs already
            count = min(step, size - distance)
            sends.append(Passed((rank + distance) % size, _joined(rank, count, ranges)))
            sender = (rank - distance) % size
            receives.append(Passed(sender, _joined(sender, count, ranges)))
        rounds.append(GatherRound(_with_data(sends), _with_data(receives)))
        step *= RADIX
    return tuple(rounds)


def _with_data(messages: list[Passed]) -> tuple[Passed, ...]:
    return tuple(message for message in messages if message.runs)


def _joined(last: int, count: int, ranges: Sequence[Run]) -> tuple[Run, ...]:
    """The elements of `count` ranks, of which one is the last; neighbouring runs as one."""
    size = len(ranges)
    runs: list[Run] = []
    for begin, end in sorted(ranges[(last - i) % size] for i in range(count)):
        if begin == end:
            continue
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return tuple(runs)


def passes_on(ranges: Sequence[Run]) -> bool:
    """True if an all-gather of these ranges that is made again and again goes in rounds; the
    same on all ranks.
    """
    return sum(begin < end for begin, end in ranges) > DIRECT
