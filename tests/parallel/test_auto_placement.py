"""Automatic placement against trying every cut."""

from __future__ import annotations

import itertools
import random

import pytest

from odyssey.errors import ConfigError
from odyssey.parallel import auto_placement
from odyssey.parallel.auto_placement import OpCost


def random_ops(rng, n):
    """Whole numbers, so that sums are exact; often zero or equal, so that there are ties."""
    pick = rng.randrange
    return [OpCost(f"op{i}", pick(6), 4 * pick(50), 8 * pick(9), 4 * pick(2)) for i in range(n)]


def every_cut(ops, k):
    for cuts in itertools.combinations(range(1, len(ops)), k - 1):
        ends = (0, *cuts, len(ops))
        yield cuts, list(zip(ends[:-1], ends[1:], strict=True))


def memory(ops, i, j, copies, samples):
    return copies * sum(op.parameter_bytes for op in ops[i:j]) + samples * sum(
        op.activation_bytes for op in ops[i:j]
    )


def test_no_cut_is_better():
    rng = random.Random(1)
    limited = impossible = ties = 0
    for _ in range(400):
        n = rng.randrange(1, 10)
        ops, k, copies = random_ops(rng, n), rng.randrange(1, n + 1), rng.choice((1, 3, 4))
        samples = rng.choice((8, [8 * (k - s) for s in range(k)]))
        per = samples if isinstance(samples, list) else [samples] * k
        limit = rng.choice((None, None, 600, 1500, 4000))
        scores = {}
        for cuts, spans in every_cut(ops, k):
            if limit is None or all(
                memory(ops, i, j, copies, per[s]) <= limit for s, (i, j) in enumerate(spans)
            ):
                slowest = max(sum(op.seconds for op in ops[i:j]) for i, j in spans)
                scores[cuts] = (slowest, sum(ops[i - 1].crossing_bytes for i in cuts))
        limited += limit is not None and bool(scores)
        if not scores:
            impossible += 1
            needs = min(
                max(memory(ops, i, j, copies, per[s]) for s, (i, j) in enumerate(spans))
                for _, spans in every_cut(ops, k)
            )
            with pytest.raises(ConfigError) as caught:
                auto_placement.cut(ops, k, memory_limit=limit, copies=copies, samples=samples)
            assert f"it takes {needs:,}:" in str(caught.value)
            continue
        plan = auto_placement.cut(ops, k, memory_limit=limit, copies=copies, samples=samples)
        assert scores[plan.cuts] == min(scores.values())
        assert plan.cuts == min(
            cuts for cuts, score in scores.items() if score == min(scores.values())
        )
        ties += list(scores.values()).count(min(scores.values())) > 1
        assert plan.slowest == scores[plan.cuts][0]
        for s, p in enumerate(plan.parts):
            assert (
                p.memory_bytes == memory(ops, p.first, p.last, copies, per[s]) and p.last > p.first
            )
            assert p.names == tuple(op.name for op in ops[p.first : p.last])
    assert limited > 20 and impossible > 20 and ties > 20


def test_floating_point_costs():
    """Sums of floats differ with their order; the second pass must still allow what the first
    one found.
    """
    rng = random.Random(2)
    for _ in range(200):
        ops = [
            OpCost(str(i), rng.random() * 10 ** rng.randrange(-9, 3))
            for i in range(rng.randrange(2, 12))
        ]
        k = rng.randrange(1, len(ops) + 1)
        best = min(
            max(sum(op.seconds for op in ops[i:j]) for i, j in spans)
            for _, spans in every_cut(ops, k)
        )
        assert auto_placement.cut(ops, k).slowest == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_two_hundred_ops_are_quick():
    rng = random.Random(3)
    ops = [
        OpCost(str(i), rng.random(), rng.randrange(10**6), 100, rng.randrange(10**4))
        for i in range(200)
    ]
    plan = auto_placement.cut(ops, 8, memory_limit=10**9)
    assert len(plan.parts) == 8 and sum(p.seconds for p in plan.parts) > 0.9 * 8 * plan.slowest


def test_the_table():
    ops = [
        OpCost("conv1", 4, 624, 0, 18_816),
        OpCost("pool1", 1, 0, 0, 4704),
        OpCost("conv2", 4, 9664, 0, 6400),
        OpCost("fc", 1, 192_400, 0, 480),
    ]
    plan = auto_placement.cut(ops, 2)
    assert plan.cuts == (2,) and {p.seconds for p in plan.parts} == {5}
    assert str(plan) == (
        "stage 0: conv1, pool1  50 % of the time, 624 B parameters, sends 4.7 KB per sample\n"
        "stage 1: conv2, fc  50 % of the time, 202 KB parameters"
    )
    long = auto_placement.cut([OpCost(f"op{i}", 1) for i in range(9)], 1)
    assert (
        str(long) == "stage 0: op0, op1, op2, 4 more, op7, op8  100 % of the time, 0 B parameters"
    )
    assert [
        auto_placement.size(n) for n in (0, 999, 1000, 99_949, 99_950, 999_600, 2.5e9, 3e13)
    ] == (["0 B", "999 B", "1.0 KB", "99.9 KB", "100 KB", "1.0 MB", "2.5 GB", "30000 GB"])


@pytest.mark.parametrize(
    ("ops", "stages", "settings", "says"),
    [
        ([OpCost("a", 1)], 2, {}, "1 ops cannot be cut into 2 stages; give 1 to 1"),
        ([OpCost("a", 1)], 0, {}, "into 0 stages"),
        ([OpCost("a", float("nan"))], 1, {}, "a takes nan s"),
        ([OpCost("a", -1)], 1, {}, "a takes -1 s"),
        ([OpCost("a", 1)], 1, {"samples": [1, 2]}, "2 numbers of samples for 1 stages"),
        (
            [OpCost("a", 1, 1000)],
            1,
            {"memory_limit": 2999},
            "within 2,999 bytes per device; it takes 3,000:",
        ),
    ],
)
def test_what_is_refused(ops, stages, settings, says):
    with pytest.raises(ConfigError, match=says):
        auto_placement.cut(ops, stages, **settings)
