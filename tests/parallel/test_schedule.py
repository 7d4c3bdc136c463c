"""Pipeline schedules by counting: every micro-batch once through every stage, in an order that ends, with the idle time
and the memory that the papers promise."""

from __future__ import annotations

import itertools
import random

import pytest

from odyssey.errors import ConfigError
from odyssey.parallel import schedule
from odyssey.parallel.schedule import Backward, Forward, Recv, Send

PLAIN = [(k, s, m, s) for k in ("gpipe", "1f1b") for s in range(1, 7) for m in (0, 1, 2, 3, 5, 8, 13)]
INTERLEAVED = [("interleaved", p * v, m, p) for p in range(1, 5) for v in (1, 2, 3) for m in (0, 1, 2, 3, 4, 6, 7, 12)]
ANYWHERE = [("gpipe", len(d), m, d) for d in ((0, 1, 0), (1, 0, 2, 1), (0, 0, 1), (2, 1, 0)) for m in (0, 1, 4, 9)]
ALL = PLAIN + INTERLEAVED + ANYWHERE


@pytest.mark.parametrize(("kind", "stages", "micro", "devices"), ALL)
def test_everything_is_done_once_and_in_order(kind, stages, micro, devices):
    s = schedule.make(kind, stages, micro, devices)
    schedule.check(s)
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


@pytest.mark.parametrize(("kind", "stages", "micro", "devices"), ALL)
def test_what_is_sent_is_received(kind, stages, micro, devices):
    s = schedule.make(kind, stages, micro, devices)
    sent, received = set(), set()
    for d, order in enumerate(s.actions):
        for a in order:
            if isinstance(a, Send):
                assert a.device == s.place[a.to] != d == s.place[a.stage]
                sent.add((a.what, a.stage, a.to, a.micro))
            elif isinstance(a, Recv):
                assert a.device == s.place[a.stage] != d == s.place[a.to]
                received.add((a.what, a.stage, a.to, a.micro))
    crossing = sum(s.place[r] != s.place[t] for r, t in s.edges)
    assert sent == received and len(sent) == 2 * micro * crossing
    forward = schedule.make(kind, stages, micro, devices, backward=False)
    schedule.check(forward)
    assert all(
        isinstance(a, Forward) or a.what == "activation" for o in forward.actions for a in o if not isinstance(a, Recv)
    )
    assert schedule.peak(forward) == (0,) * s.devices


# --- what it costs ---


@pytest.mark.parametrize("costs", [(1, 2), (1, 1), (3.0, 0.5)])
@pytest.mark.parametrize(("kind", "p", "m", "_"), [x for x in PLAIN if x[2]])
def test_idle_time_of_gpipe_and_1f1b(kind, p, m, _, costs):
    expected = (p - 1) / (m + p - 1)
    got = schedule.bubble(schedule.make(kind, p, m), *costs)
    assert got == pytest.approx(expected) if kind == "gpipe" or m >= p else got <= expected + 1e-9


@pytest.mark.parametrize(("p", "v", "rounds"), list(itertools.product((1, 2, 3, 4, 8), (2, 3, 4), (1, 2, 5))))
def test_idle_time_of_interleaved(p, v, rounds):
    m = p * rounds
    s = schedule.make("interleaved", p * v, m, p)
    schedule.check(s)
    assert schedule.bubble(s) == pytest.approx((p - 1) / (v * m + p - 1))
    if p > 1:
        assert schedule.bubble(s) < schedule.bubble(schedule.make("1f1b", p, m))


@pytest.mark.parametrize(("kind", "p", "m", "_"), PLAIN)
def test_micro_batches_under_way(kind, p, m, _):
    peak = schedule.peak(schedule.make(kind, p, m))
    assert peak == tuple(m if kind == "gpipe" else min(p - d, m) for d in range(p))


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (4, 3)])
def test_interleaved_keeps_no_more_with_more_micro_batches(p, v):
    peaks = [schedule.peak(schedule.make("interleaved", p * v, m, p)) for m in (4 * p, 40 * p)]
    assert peaks[0] == peaks[1] == tuple(2 * (p - d - 1) + (v - 1) * p + 1 for d in range(p))


def test_costs_per_stage_and_transfers():
    s = schedule.make("gpipe", 2, 2)
    run = {str(x.action): (x.start, x.end) for x in schedule.simulate(s, [1, 3], [2, 4], transfer=0.5)}
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


def test_a_send_that_waits_would_stop_1f1b_and_the_cycle_is_named():
    s = schedule.make("1f1b", 3, 4)
    with pytest.raises(ConfigError) as caught:
        schedule.check(s, buffered=False)
    assert str(caught.value) == (
        "[pipeline] devices wait for each other: device 1 waits for device 2 at 'send activation 1>2.1 to device 2'; "
        "device 2 waits for device 1 at 'send gradient 2>1.0 to device 1'"
    )
    schedule.check(schedule.make("gpipe", 3, 4), buffered=False)


def with_actions(s, d, change):
    """The schedule with another list of actions on device d."""
    actions = [list(order) for order in s.actions]
    change(actions[d])
    compute = tuple(tuple(a for a in o if isinstance(a, (Forward, Backward))) for o in actions)
    return s._replace(compute=compute, actions=tuple(map(tuple, actions)))


def swap(i, j):
    def change(order):
        order[i], order[j] = order[j], order[i]

    return change


@pytest.mark.parametrize(
    ("d", "change", "says"),
    [
        (0, lambda o: o.pop(0), "F0.0 is missing"),
        (0, lambda o: o.append(Forward(0, 0)), "F0.0 is done twice"),
        (0, lambda o: o.append(Forward(1, 7)), "F1.7 is on device 0, its stage on 1"),
        (0, lambda o: o.append(Forward(0, 7)), "F0.7 is too much"),
        (0, lambda o: o.pop(1), "'recv activation 0>1.0 from device 0' has no send on device 0"),
        (0, swap(0, 1), "device 0 has to 'send activation 0>1.0 to device 1' before it is made"),
        (1, lambda o: o.pop(0), "'send activation 0>1.0 to device 1' has no receive on device 1"),
        (1, swap(0, 1), "device 1 does F1.0 before F0.0, which it needs"),
        (1, swap(1, 2), "device 1 does B1.0 before F1.0, which it needs"),
    ],
)
def test_a_wrong_schedule_is_refused(d, change, says):
    s = schedule.make("1f1b", 2, 2)
    with pytest.raises(ConfigError) as caught:
        schedule.check(with_actions(s, d, change))
    assert says in str(caught.value)


def test_a_cycle_of_receives_is_named():
    """Device 0 wants a gradient of micro-batch 1 before it has sent what that is made of."""
    s = schedule.make("1f1b", 2, 2)
    move = [str(a) for a in s.actions[0]].index("recv gradient 1>0.1 from device 1")
    crossed = with_actions(s, 0, lambda o: o.insert(0, o.pop(move)))
    with pytest.raises(ConfigError, match="device 0 waits for device 1 at .*; device 1 waits for device 0 at"):
        schedule.check(crossed)


def test_random_orders_end_or_are_refused():
    """The check against a simulation that knows nothing of it: whatever order the devices' turns come in."""
    rng = random.Random(0)
    ended = refused = 0
    for _ in range(300):
        s = schedule.make(rng.choice(("gpipe", "1f1b")), 3, 3)
        actions = [list(o) for o in s.actions]
        for order in actions:
            for _ in range(rng.randrange(3)):
                i = rng.randrange(len(order) - 1)
                order[i], order[i + 1] = order[i + 1], order[i]
        compute = tuple(tuple(a for a in o if isinstance(a, (Forward, Backward))) for o in actions)
        mixed = s._replace(compute=compute, actions=tuple(map(tuple, actions)))
        try:
            schedule.check(mixed)
        except ConfigError:
            refused += 1
            continue
        ended += 1
        mail, at = set(), [0] * 3
        while any(at[d] < len(actions[d]) for d in range(3)):
            free = []
            for d in range(3):
                a = actions[d][at[d]] if at[d] < len(actions[d]) else None
                if a is not None and not (isinstance(a, Recv) and (a.what, a.stage, a.to, a.micro) not in mail):
                    free.append((d, a))
            d, a = rng.choice(free)  # raises if nobody can go on
            if isinstance(a, Send):
                mail.add((a.what, a.stage, a.to, a.micro))
            at[d] += 1
    assert ended > 20 and refused > 20


# --- what is refused, what is shown ---


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("zigzag", 2, 2), "schedule is 'zigzag'; choose from gpipe, 1f1b, interleaved"),
        (("gpipe", 0, 2), "0 stages and 2 micro-batches"),
        (("gpipe", 2, -1), "-1 micro-batches"),
        (("gpipe", 2, 2, 3), "2 stages"),
        (("gpipe", 2, 2, (0, 2)), r"2 stages on devices \[0, 2\]; give the device of each stage, and use all from 0"),
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
    schedule.check(s)
    assert "send activation 0>2.1 to device 2" in map(str, s.actions[0])
    assert "recv gradient 2>0.0 from device 2" in map(str, s.actions[0])
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
    assert schedule.listing(schedule.make("gpipe", 2, 1)) == (
        "device 0: F0.0, send activation 0>1.0 to device 1, recv gradient 1>0.0 from device 1, B0.0\n"
        "device 1: recv activation 0>1.0 from device 0, F1.0, B1.0, send gradient 1>0.0 to device 0"
    )
