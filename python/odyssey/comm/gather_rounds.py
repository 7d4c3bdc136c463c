"""The plan of an all-gather in log4(ranks) rounds: the messages of each rank and their contents.

In round k a rank sends all that it has to the ranks 1, 2 and 3 times 4^k after it: its own data,
and the data of the ranks just before it. So each message carries the data of several ranks, and
each rank receives the data of each other rank once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .call_checks import RADIX, distances
from .calls import Run

#: Up to this number of ranks with data, each sends its data directly to each other rank, in one
#: step. More ranks use rounds: for example, each of 32 ranks sends 7 messages instead of 31.
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
    """Returns the rounds of a rank. ranges: the elements [start, end) of each rank."""
    size = len(ranges)
    rounds = []
    step = 1
    for far in distances(size):
        sends = []
        receives = []
        for distance in far:
            # the ranks whose data go so far; the receiver has the data of all others already
            count = min(step, size - distance)
            receiver = (rank + distance) % size
            sends.append(Passed(receiver, _join_runs(rank, count, ranges)))
            sender = (rank - distance) % size
            receives.append(Passed(sender, _join_runs(sender, count, ranges)))
        rounds.append(GatherRound(_drop_empty(sends), _drop_empty(receives)))
        step *= RADIX
    return tuple(rounds)


def _drop_empty(messages: list[Passed]) -> tuple[Passed, ...]:
    """Returns the messages that carry elements."""
    return tuple(message for message in messages if message.runs)


def _join_runs(last: int, count: int, ranges: Sequence[Run]) -> tuple[Run, ...]:
    """Returns the elements of the `count` ranks up to rank `last`; adjacent runs are joined."""
    size = len(ranges)
    runs: list[Run] = []
    for begin, end in sorted(ranges[(last - i) % size] for i in range(count)):
        if begin == end:
            continue
        previous_begin, previous_end = runs[-1] if runs else (-1, -1)
        if previous_end == begin:
            runs[-1] = (previous_begin, end)
        else:
            runs.append((begin, end))
    return tuple(runs)


def passes_on(ranges: Sequence[Run]) -> bool:
    """Returns True if a repeated all-gather of these ranges uses rounds; the same on all ranks."""
    return sum(begin < end for begin, end in ranges) > DIRECT
