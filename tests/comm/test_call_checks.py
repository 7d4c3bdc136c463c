"""Ranks that learn in rounds whether all make the same call: whatever their number, and whoever
differs.
"""

from __future__ import annotations

import random
import re
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from odyssey.comm import mock
from odyssey.comm.call_checks import WORD, Agreement, distances
from odyssey.comm.calls import Header, balance_counts, find_mismatch
from odyssey.errors import CollectiveError

HERE = Path(__file__).parent
SIZES = [*range(2, 70), 127, 255, 256, 257, 1000, 1024]


def agree(headers: list[Header]) -> list[Agreement]:
    """What each rank knows in the end; every word is carried as bytes."""
    size = len(headers)
    known = [Agreement(header, header.sequence, size) for header in headers]
    for k, far in enumerate(distances(size)):
        words = [one.word() for one in known]
        for p, one in enumerate(known):
            one.take(k, [words[(p - d) % size] for d in far])
    return known


def counts(size: int, rng: random.Random) -> list[Header]:
    """Calls of an all_to_all_v in which each rank expects what the others give."""
    salt = rng.randrange(1, 1000)
    rows = [tuple((p * salt + q * 7) % 5 for q in range(size)) for p in range(size)]
    columns = list(zip(*rows, strict=True))
    return [
        Header(3, 5, "", (), "all_to_all_v", balance=balance_counts(p, rows[p], columns[p]))
        for p in range(size)
    ]


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_know_alike_whether_calls_differ(size):
    rng = random.Random(size)
    same = [Header(7, -11, "", (), "barrier", blocking=True)] * size
    assert not any(one.different or not one.blocking for one in agree(same))
    for other in (
        same[0]._replace(sequence=8),
        same[0]._replace(signature=12),
        same[0]._replace(blocking=False),
    ):
        calls = list(same)
        calls[rng.randrange(size)] = other
        known = agree(calls)
        assert {one.different for one in known} == {other.blocking}
        assert {one.blocking for one in known} == {False} or other.blocking


@pytest.mark.parametrize("size", SIZES)
def test_counts_of_each_with_each_are_compared_by_one_sum(size):
    rng = random.Random(size)
    headers = counts(size, rng)
    assert sum(header.balance for header in headers) % 2**64 == 0
    assert not any(one.different for one in agree(headers))
    odd = rng.randrange(size)
    given = [0] * size
    given[rng.randrange(size)] = 1
    headers[odd] = headers[odd]._replace(
        balance=headers[odd].balance ^ balance_counts(odd, tuple(given), (0,) * size)
    )
    assert all(one.different for one in agree(headers))


@pytest.mark.parametrize("size", SIZES)
def test_the_piece_of_a_scatter_comes_to_all(size):
    rng = random.Random(size)
    root, piece, unknown = rng.randrange(size), (0, 2, 3, 4, *[0] * 6), (-1, *[0] * 9)
    headers = [
        Header(1, 1, "", piece if p in (root, 0) else unknown, "scatter", root) for p in range(size)
    ]
    known = agree(headers)
    assert not any(one.different for one in known) and {one.piece for one in known} == {piece}
    odd = (root + 1 + rng.randrange(size - 1)) % size
    headers[odd] = headers[odd]._replace(tail=(0, 1, 3, *[0] * 7))
    assert all(one.different for one in agree(headers))


def test_a_call_costs_the_logarithm_of_the_ranks():
    messages = {size: sum(map(len, distances(size))) for size in SIZES}
    assert [messages[size] for size in (2, 4, 16, 64, 256, 1024)] == [1, 3, 6, 9, 12, 15]
    assert all(n <= 3 * np.ceil(np.log(size) / np.log(4)) for size, n in messages.items())
    assert WORD == 32


def steps(function) -> int:
    """Lines of Python that a call runs."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return count


def test_no_check_of_a_call_does_more_than_twice_for_twice_the_ranks():
    def checks(size: int) -> dict[str, int]:
        headers = counts(size, random.Random(1))
        given = tuple(range(size))
        agreement = Agreement(headers[0], 3, size)
        word = agreement.word()
        return {
            "mismatch": steps(lambda: find_mismatch(headers, range(size))),
            "balance": steps(lambda: balance_counts.__wrapped__(0, given, given)),
            "rounds": steps(
                lambda: [
                    agreement.take(k, [word] * len(far)) for k, far in enumerate(distances(size))
                ]
            ),
        }

    few, many = checks(256), checks(1024)
    assert all(many[name] <= 4.1 * few[name] for name in few), (few, many)
    assert many["rounds"] <= 1.5 * few["rounds"] < 200


def test_what_a_call_leaves_in_memory_does_not_grow_with_the_ranks():
    def used(size: int) -> int:
        tracemalloc.start()
        kept = Agreement(counts(4, random.Random(1))[0], 3, size)
        kept.take(0, [kept.word()] * 3)
        size_of = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size_of

    assert used(1024) <= used(8) + 256


def test_a_thousand_threads_whose_calls_differ():
    """The same guarantee as between processes: the same error on all ranks, and the group goes
    on.
    """
    size, odd = 1024, 700

    def rank(world) -> str:
        total = world.all_reduce(np.ones(1, np.int64))[0]
        assert total == size
        try:
            world.barrier() if world.rank == odd else world.all_reduce(np.ones(2))
        except CollectiveError as error:
            assert world.all_reduce(np.ones(1, np.int64))[0] == size
            return str(error)
        raise AssertionError

    said = set(mock.run(size, rank))
    assert len(said) == 1
    assert re.search(
        r"rank 0 calls all_reduce float64 \(2,\) sum at .* but rank 700 calls barrier at",
        said.pop(),
    )


WORDS = (
    r"rank 0 calls all_reduce float64 \(2,\) sum at \S+, but rank {odd} calls barrier at",
    r"rank {odd} sends \d elements to rank 0 in all_to_all_v float64 at \S+, but that expects \d "
    r"in",
    r"rank 0 scatters pieces of float64 \(2,\) in .*, but rank {odd} expects float64 \(3,\)",
    r"rank 0 calls all_to_all_v float32 (again 1 )?at \S+, but rank {odd} calls barrier at",
)


@pytest.mark.parametrize(
    "ranks", [6, pytest.param(17, marks=pytest.mark.long), pytest.param(48, marks=pytest.mark.long)]
)
def test_calls_of_many_processes(launch, ranks):
    done = launch.python(HERE / "many.py", "and ends", ranks=ranks, timeout=500)
    odd = ranks * 2 // 3
    for words in WORDS:
        found = {m[0] for m in re.finditer(f"{words.format(odd=odd)}.*", done.stdout)}
        assert len(found) == 1, (words, done.stdout, done.stderr)
        # the first, the odd and the last rank print theirs
        assert done.stdout.count(found.pop()) == 3


@pytest.mark.parametrize("which", ["late", "leaves"])
def test_who_is_missing_is_known_beyond_the_first_round(launch, which):
    """Of six ranks each hears from three directly."""
    done = launch.python(
        HERE / "ends.py", which, "mpi", 2 if which == "late" else 60, ranks=6, timeout=90
    )
    assert done.returncode
    if which == "late":
        missing = re.findall(
            r"rank (\d) after .* waited 2 s in all_reduce .*: rank 5 did not come", done.stdout
        )
        assert sorted(missing) == list("01234"), done.stdout + done.stderr
    else:
        assert "[comm] rank 5 has ended; all_reduce" in done.stdout, done.stdout + done.stderr
