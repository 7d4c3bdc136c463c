"""Pipeline schedules by counting: every micro-batch once through every stage, in an order that
ends, with the idle time and the memory that the papers promise.
"""

from __future__ import annotations

import itertools
import random

import pytest
from each_case import each

from odyssey.errors import ConfigError
from odyssey.parallel import schedule
from odyssey.parallel.schedule import Backward, Forward

PLAIN = [
    (k, s, m, s) for k in ("gpipe", "1f1b") for s in range(1, 7) for m in (0, 1, 2, 3, 5, 8, 13)
]
INTERLEAVED = [
    ("interleaved", p * v, m, p)
    for p in range(1, 5)
    for v in (1, 2, 3)
    for m in (0, 1, 2, 3, 4, 6, 7, 12)
]
ANYWHERE = [
    ("gpipe", len(d), m, d)
    for d in ((0, 1, 0), (1, 0, 2, 1), (0, 0, 1), (2, 1, 0))
    for m in (0, 1, 4, 9)
]
ALL = PLAIN + INTERLEAVED + ANYWHERE


@each("kind, stages, micro, devices", ALL)
def test_everything_is_done_once_and_in_order(kind, stages, micro, devices):
    s = schedule.make(kind, stages, micro, devices)
    done = list(itertools.chain(*s.compute))
    assert len(done) == len(set(done)) == 2 * stages * micro
    for d, order in enumerate(s.compute):
        assert all(s.place[a.stage] == d for a in order)
        at = {a: i for i, a in enumerate(order)}
        assert all(at[Forward(a.stage, a.micro)] < at[a] for a in order if isinstance(a, Backward))
        for kind_of, stage in itertools.product((Forward, Backward), range(stages)):
            micros = [a.micro for a in order if isinstance(a, kind_of) and a.stage == stage]
            assert micros == sorted(micros), "micro-batches of a stage come in order"
    end = {x.action: x for x in schedule.simulate(s)}
    for a, x in end.items():
        for r, t in s.edges:
            if isinstance(a, Forward) and a.stage == t:
                assert end[Forward(r, a.micro)].end <= x.start
            if isinstance(a, Backward) and a.stage == r:
                assert end[Backward(t, a.micro)].end <= x.start
    for x, y in itertools.combinations(end.values(), 2):
        assert x.device != y.device or x.end <= y.start or y.end <= x.start


@each("kind, stages, micro, devices", ALL)
def test_an_evaluation_goes_forward_only(kind, stages, micro, devices):
    forward = schedule.make(kind, stages, micro, devices, backward=False)
    assert len(schedule.simulate(forward)) == stages * micro
    assert all(isinstance(a, Forward) for order in forward.compute for a in order)
    assert schedule.peak(forward) == (0,) * forward.devices


# --- what it costs ---


@each(
    "kind, stages, micro, devices, costs",
    [(*x, c) for x in PLAIN if x[2] for c in ((1, 2), (1, 1), (3.0, 0.5))],
)
def test_idle_time_of_gpipe_and_1f1b(kind, p, m, _, costs):
    expected = (p - 1) / (m + p - 1)
    got = schedule.bubble(schedule.make(kind, p, m), *costs)
    assert got == pytest.approx(expected) if kind == "gpipe" or m >= p else got <= expected + 1e-9


@each(
    "devices, stages per device, rounds", itertools.product((1, 2, 3, 4, 8), (2, 3, 4), (1, 2, 5))
)
def test_idle_time_of_interleaved(p, v, rounds):
    m = p * rounds
    s = schedule.make("interleaved", p * v, m, p)
    assert schedule.bubble(s) == pytest.approx((p - 1) / (v * m + p - 1))
    if p > 1:
        assert schedule.bubble(s) < schedule.bubble(schedule.make("1f1b", p, m))


@each("kind, stages, micro, devices", PLAIN)
def test_micro_batches_under_way(kind, p, m, _):
    peak = schedule.peak(schedule.make(kind, p, m))
    assert peak == tuple(m if kind == "gpipe" else min(p - d, m) for d in range(p))


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (4, 3)])
def test_interleaved_keeps_no_more_with_more_micro_batches(p, v):
    peaks = [schedule.peak(schedule.make("interleaved", p * v, m, p)) for m in (4 * p, 40 * p)]
    assert peaks[0] == peaks[1] == tuple(2 * (p - d - 1) + (v - 1) * p + 1 for d in range(p))


def test_costs_per_stage_and_transfers():
    s = schedule.make("gpipe", 2, 2)
    run = {
        str(x.action): (x.start, x.end) for x in schedule.simulate(s, [1, 3], [2, 4], transfer=0.5)
    }
    assert run == {
        "F0.0": (0, 1),
        "F0.1": (1, 2),
        "F1.0": (1.5, 4.5),
        "F1.1": (4.5, 7.5),
        "B1.0": (7.5, 11.5),
        "B1.1": (11.5, 15.5),
        "B0.0": (12, 14),
        "B0.1": (16, 18),
    }
    assert schedule.bubble(s, [1, 3], [2, 4], 0.5) == pytest.approx(1 - 20 / 36)
    with pytest.raises(ConfigError, match="3 costs for 2 stages"):
        schedule.simulate(s, [1, 2, 3])


# --- it ends, or says why not ---


def test_devices_that_wait_for_each_other_are_named():
    s = schedule.make("1f1b", 2, 2)
    late = s._replace(compute=(s.compute[0][::-1], s.compute[1]))
    with pytest.raises(ConfigError, match="device 0 at B0.1 for F0.1; device 1 at F1.0 for F0.0"):
        schedule.simulate(late)


def test_random_orders_end_or_are_refused():
    """Against the order that Kahn's way finds, or does not, among all that comes before
    something.
    """
    rng = random.Random(0)
    ended = refused = 0
    for _ in range(300):
        s = schedule.make(rng.choice(("gpipe", "1f1b")), 3, 3)
        orders = [list(o) for o in s.compute]
        for order in orders:
            for _ in range(rng.randrange(3)):
                i = rng.randrange(len(order) - 1)
                order[i], order[i + 1] = order[i + 1], order[i]
        before = {a: set(order[:i]) for order in orders for i, a in enumerate(order)}
        for a in before:
            before[a] |= {
                type(a)(a.stage + (-1 if isinstance(a, Forward) else 1), a.micro)
            } & before.keys()
            before[a] |= {Forward(a.stage, a.micro)} if isinstance(a, Backward) else set()
        left = dict(before)
        while free := [a for a, needs in left.items() if not needs & left.keys()]:
            del left[free[0]]
        mixed = s._replace(compute=tuple(map(tuple, orders)))
        if left:
            refused += 1
            with pytest.raises(ConfigError, match="wait for each other"):
                schedule.simulate(mixed)
        else:
            ended += 1
            assert len(schedule.simulate(mixed)) == len(before)
    assert ended > 20 and refused > 20


# --- what is refused, what is shown ---


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("zigzag", 2, 2), "schedule is 'zigzag'; choose from gpipe, 1f1b, interleaved"),
        (("gpipe", 0, 2), "0 stages and 2 micro-batches"),
        (("gpipe", 2, -1), "-1 micro-batches"),
        (("gpipe", 2, 2, 3), "2 stages"),
        (
            ("gpipe", 2, 2, (0, 2)),
            r"2 stages on devices \[0, 2\]; give the device of each stage, and use all from 0",
        ),
        (("gpipe", 3, 2, (0, 1)), "3 stages on devices"),
        (("1f1b", 2, 2, (1, 0)), "'1f1b' needs stage s on device s"),
        (("1f1b", 4, 2, 2), "use 'interleaved' for several stages per device"),
        (("interleaved", 3, 2, 2), "needs stages = v x devices"),
        (("interleaved", 4, 2, (0, 0, 1, 1)), "needs stages = v x devices"),
    ],
)
def test_numbers_that_do_not_fit(arguments, says):
    with pytest.raises(ConfigError, match=says):
        schedule.make(*arguments)


@pytest.mark.parametrize("edges", [[(1, 0), (0, 1), (1, 2)], [(0, 3)], [(0, 1)]])
def test_edges_that_do_not_fit(edges):
    with pytest.raises(ConfigError, match="later one|gets nothing"):
        schedule.make("gpipe", 3, 2, edges=edges)


def test_a_value_that_skips_a_stage():
    s = schedule.make("1f1b", 3, 2, edges=[(0, 1), (0, 2), (1, 2)])
    end = {x.action: x.end for x in schedule.simulate(s, transfer=9)}
    assert end[Forward(2, 0)] == end[Forward(0, 0)] + 9 + 1 + 9 + 1
    assert schedule.make("gpipe", 2, 1, edges=[(0, 1), (0, 1)]).edges == ((0, 1),)


def test_pictures():
    assert schedule.text(schedule.make("gpipe", 2, 2)) == (
        "device 0  F0 F1 .  .  .  B0--- B1---\n"  #
        "device 1  .  F0 F1 B0--- B1--- .  ."
    )
    assert schedule.text(schedule.make("1f1b", 2, 3), 1, 1) == (
        "device 0  F0 F1 .  B0 F2 B1 .  B2\n"  #
        "device 1  .  F0 B0 F1 B1 F2 B2 ."
    )
    assert schedule.text(schedule.make("interleaved", 4, 2, 2), 1, 1) == (
        "device 0  F0a F1a F0b F1b .   B0b .   B1b B0a B1a\n"  #
        "device 1  .   F0a F1a F0b B0b F1b B1b B0a B1a ."
    )
    with pytest.raises(ConfigError, match="whole numbers"):
        schedule.text(schedule.make("gpipe", 2, 2), 0.5)
