"""An all-gather in rounds: everybody gets everything once, in few messages, whatever the number
of ranks and ranges.
"""

from __future__ import annotations

import math
import random

import pytest

from odyssey.comm.gather_rounds import DIRECT, gather_rounds, passes_on

SIZES = [*range(1, 70), 100, 127, 128, 255, 256, 257]


def ranges_of(size: int, random: random.Random, empty: float) -> list[tuple[int, int]]:
    """Consecutive ranges of any lengths, in the order of the ranks; a part of them is empty."""
    ranges = []
    at = 0
    for _ in range(size):
        length = 0 if random.random() < empty else random.randrange(1, 9)
        ranges.append((at, at + length))
        at += length
    return ranges


def elements(runs) -> list[int]:
    return [i for begin, end in runs for i in range(begin, end)]


@pytest.mark.parametrize("empty", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_everybody_has_everything_once_and_passes_on_only_what_it_has(size, empty):
    chance = random.Random(size)
    ranges = ranges_of(size, chance, empty)
    if size % 2:
        chance.shuffle(ranges)  # ranks need not have their ranges in order
    everything = sorted(elements(ranges))
    rounds = [gather_rounds(rank, ranges) for rank in range(size)]
    has = [elements([ranges[rank]]) for rank in range(size)]
    for k in range(len(rounds[0])):
        before = [set(own) for own in has]
        sent = {(rank, m.peer): m.runs for rank in range(size) for m in rounds[rank][k].sends}
        received = {
            (m.peer, rank): m.runs for rank in range(size) for m in rounds[rank][k].receives
        }
        assert sent == received
        for (sender, receiver), runs in sent.items():
            assert before[sender].issuperset(elements(runs))
            has[receiver] += elements(runs)
    assert all(sorted(own) == everything for own in has)


@pytest.mark.parametrize("size", SIZES)
def test_messages_grow_with_the_logarithm_and_carry_at_most_two_pieces(size):
    ranges = ranges_of(size, random.Random(size), 0.0)
    most = 3 * math.ceil(math.log(size, 4)) if size > 1 else 0
    for rank in range(size):
        rounds = gather_rounds(rank, ranges)
        assert sum(len(one.sends) for one in rounds) <= most
        assert sum(len(one.receives) for one in rounds) <= most
        assert all(1 <= len(m.runs) <= 2 for one in rounds for m in (*one.sends, *one.receives))


def test_few_ranks_with_data_send_to_each_other_themselves():
    assert not passes_on([(0, 0)] * 1000)
    assert not passes_on([(p, p + 1) for p in range(DIRECT)] + [(DIRECT, DIRECT)] * 1000)
    assert passes_on([(p, p + 1) for p in range(DIRECT + 1)])
