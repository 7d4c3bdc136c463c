"""Plans: whoever computes the shards, the additions are those of one fixed tree.

Simulated with nested pairs of shard numbers in place of gradients, so that an addition out of order
is another value.
"""

from __future__ import annotations

import functools
import itertools
import random

import pytest

from odyssey.parallel import plan as planning

SHARDS = range(1, 41)
RANKS = range(1, 6)


@functools.cache
def tree(lo: int, n: int):
    """The definition: a node over n shards splits after the largest power of two smaller than n."""
    if n == 1:
        return lo
    left = max(2**i for i in range(10) if 2**i < n)
    return (tree(lo, left), tree(lo + left, n - left))


def run(plan: planning.Plan) -> tuple[dict, list[int]]:
    """What is in the buffers at the end, and which shards were computed."""
    buffers: dict[int, object] = {}
    computed = []
    for action in itertools.chain(*plan.threads, plan.final):
        if action.kind == "run":
            buffers[action.b] = tree(action.a, action.n)
            computed += range(action.a, action.a + action.n)
        else:
            buffers[action.a] = (buffers[action.a], buffers.pop(action.b))
    return buffers, computed


@pytest.mark.parametrize("shards", SHARDS)
def test_every_plan_computes_the_tree(shards):
    for ranks, workers, threads in itertools.product(RANKS, (1, 2, 3), (1, 2, 3, 4)):
        everywhere, parts = [], {}
        for rank in range(ranks):
            plan = planning.make(shards, rank, ranks, workers, threads)
            buffers, computed = run(plan)
            assert sorted(computed) == list(range(*plan.run))
            everywhere += computed
            assert [node for node, _ in plan.partial] == planning.nodes(plan.run, shards)
            for (lo, n), buffer in plan.partial:
                assert buffers[buffer] == tree(lo, n)
                parts[lo, n] = buffers[buffer]
            assert max(buffers, default=0) < plan.buffers
        assert sorted(everywhere) == list(range(shards)), "every shard once, over all ranks"

        exchange = planning.exchange(shards, ranks, workers, 1000)
        assert [n for ns in exchange.nodes for n in ns] == list(parts), (
            "what is sent is what is expected"
        )
        received = list(parts.values())
        for action in exchange.adds:
            assert action.kind == "add"
            received[action.a] = (received[action.a], received[action.b])
        assert received[0] == tree(0, shards)


@pytest.mark.parametrize("shards", SHARDS)
def test_threads_share_no_buffer_and_there_are_no_more_than_asked_for(shards):
    for ranks, workers, threads in itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 3, 4)):
        for rank in range(ranks):
            plan = planning.make(shards, rank, ranks, workers, threads)
            used = [
                {b for a in actions for b in ((a.b,) if a.kind == "run" else (a.a, a.b))}
                for actions in plan.threads
            ]
            assert 1 <= len(used) <= threads
            for one, other in itertools.combinations(used, 2):
                assert not one & other
            assert set().union(*used) <= set(range(plan.buffers))


def taken_by_whoever_is_free(plan: planning.Plan, rng: random.Random) -> dict:
    """What is in the buffers after threads of any speed have taken the leaves as the executor
    does, by its tables.
    """
    count, nodes, threads, pooled = (int(n) for n in plan.tables()[:4])
    rest = iter(plan.tables()[planning.LINE :])
    parent, left, right = ([next(rest) for _ in range(nodes)] for _ in range(3))
    fixed, first, shards = ([next(rest) for _ in range(count)] for _ in range(3))
    begins, ends = ([next(rest) for _ in range(threads)] for _ in range(2))
    pool, place, complete = {next(rest) for _ in range(pooled)}, {}, dict.fromkeys(range(nodes), 0)
    free, buffers, under_way = set(pool), {}, []
    while under_way or any(a < b for a, b in zip(begins, ends, strict=True)):
        able = [
            t for t in range(threads) if begins[t] < ends[t] and (free or fixed[begins[t]] >= 0)
        ] if len(under_way) < threads else []  # fmt: skip
        assert able or under_way, "all wait for a buffer"
        if able and (not under_way or rng.random() < 0.5):
            t = rng.choice(able)
            leaf, begins[t] = begins[t], begins[t] + 1
            b = fixed[leaf] if fixed[leaf] >= 0 else free.pop()
            assert b not in place.values()
            under_way.append((leaf, b))
            continue
        node, b = under_way.pop(rng.randrange(len(under_way)))
        place[node], buffers[b] = b, tree(first[node], shards[node])
        while parent[node] >= 0:
            node = parent[node]
            complete[node] += 1
            if complete[node] < 2:
                break
            a, b = place.pop(left[node]), place.pop(right[node])
            buffers[a], place[node] = (buffers[a], buffers.pop(b)), a
            assert b in pool
            free.add(b)
    return buffers


@pytest.mark.parametrize("shards", SHARDS)
def test_shards_taken_by_whoever_is_free_give_the_same_tree(shards):
    rng = random.Random(shards)
    for ranks, threads in itertools.product((1, 2, 3), (1, 2, 3, 5)):
        for rank in range(ranks):
            plan = planning.make(shards, rank, ranks, 1, threads)
            for _ in range(3):
                buffers = taken_by_whoever_is_free(plan, rng)
                assert {b: tree(lo, n) for (lo, n), b in plan.partial} == buffers


@pytest.mark.parametrize("length", [1, 2, 3, 4, 8, 16])
def test_runs_of_shards_give_the_same_tree(length):
    rng = random.Random(length)
    for shards, ranks, workers, threads in itertools.product(
        (1, 2, 5, 7, 8, 13, 23, 40), (1, 2, 3), (1, 2), (1, 2, 3)
    ):
        one_by_one = planning.make(shards, 0, ranks, workers, threads)
        for lone in (None, shards - 1):
            plan = planning.make(shards, 0, ranks, workers, threads, length=length, lone=lone)
            assert [node for node, _ in plan.partial] == [node for node, _ in one_by_one.partial]
            assert [x for a, n in plan.leaves for x in range(a, a + n)] == list(range(*plan.run))
            assert all(n <= length for _, n in plan.leaves)
            assert all(
                n == 1 for a, n in plan.leaves if lone is not None and lone in (a, a + n - 1)
            )
            buffers, computed = run(plan)
            assert sorted(computed) == list(range(*plan.run))
            for found in (buffers, taken_by_whoever_is_free(plan, rng)):
                for (lo, n), buffer in plan.partial:
                    assert found[buffer] == tree(lo, n)


def test_long_runs_need_few_buffers():
    needed = [planning.make(8, 0, 1, 1, 1, length=n).buffers for n in (1, 2, 4, 8)]
    assert needed == [4, 3, 2, 1]
    plan = planning.make(8, 0, 1, 1, 1, length=8, lone=7)
    assert plan.leaves == ((0, 4), (4, 2), (6, 1), (7, 1))


@pytest.mark.parametrize("shards", [1, 8, 13, 40, 512])
def test_one_thread_needs_a_buffer_per_level_of_the_tree(shards):
    assert planning.make(shards, 0, 1, 1, 1).buffers <= shards.bit_length() + 1


@pytest.mark.parametrize("shards", [7, 8, 31, 40])
def test_threads_have_their_part(shards):
    """Workers or not, no thread has more than its share of the shards and one."""
    for workers, threads in ((1, 4), (2, 4), (4, 4), (3, 2), (5, 3)):
        plan = planning.make(shards, 0, 1, workers, threads)
        runs = [sum(a.kind == "run" for a in actions) for actions in plan.threads]
        assert max(runs) <= -(-shards // workers) * -(-workers // threads)
        assert len(runs) == threads


@pytest.mark.parametrize(("n", "parts"), [(0, 3), (1, 1), (7, 3), (8, 4), (3, 5), (61706, 7)])
def test_share_cuts_into_equal_runs(n, parts):
    runs = [planning.share(n, parts, i) for i in range(parts)]
    assert [x for lo, hi in runs for x in range(lo, hi)] == list(range(n))
    lengths = [hi - lo for lo, hi in runs]
    assert max(lengths) - min(lengths) <= 1


def test_split():
    assert [planning.split(n) for n in range(2, 18)] == [
        1,
        2,
        2,
        4,
        4,
        4,
        4,
        8,
        8,
        8,
        8,
        8,
        8,
        8,
        8,
        16,
    ]


@pytest.mark.parametrize("shards", [1, 2, 5, 8, 13, 32])
def test_nodes_are_the_largest_inside_a_run(shards):
    every = set()

    def collect(lo, n):
        every.add((lo, n))
        if n > 1:
            left = planning.split(n)
            collect(lo, left)
            collect(lo + left, n - left)

    collect(0, shards)
    for lo, hi in itertools.combinations(range(shards + 1), 2):
        inside = {(a, n) for a, n in every if lo <= a and a + n <= hi}
        largest = [
            (a, n)
            for a, n in inside
            if not any((b, m) != (a, n) and b <= a and a + n <= b + m for b, m in inside)
        ]
        assert planning.nodes((lo, hi), shards) == sorted(largest)
    assert planning.nodes((0, 0), shards) == []


@pytest.mark.parametrize("floats", [16, 61_744 + 16, 1000, 15, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_exchange_ranges_partition_the_floats(floats, ranks):
    ranges = planning.exchange(8, ranks, 1, floats).ranges
    assert len(ranges) == ranks
    assert [i for a, b in ranges for i in range(a, b)] == list(range(floats))
    assert all(a % 16 == 0 or a == floats for a, _ in ranges)


def test_shard_count():
    assert [planning.shard_count(n, 32) for n in (1, 31, 32, 33, 250, 256)] == [1, 1, 1, 2, 8, 8]


def test_a_plan_can_be_read():
    plan = planning.make(3, 0, 1, 1, 1)
    assert [str(a) for a in plan.threads[0]] == [
        "b0 = shard 0",
        "b1 = shard 1",
        "b0 += b1",
        "b1 = shard 2",
        "b0 += b1",
    ]
    plan = planning.make(7, 0, 1, 1, 1, length=4)
    assert [str(a) for a in plan.threads[0]] == [
        "b0 = shards 0 to 3",
        "b1 = shards 4 to 6",
        "b0 += b1",
    ]
