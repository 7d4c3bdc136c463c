"""Pipeline schedules: which device computes which stage of which micro-batch, in which order.

A plan, not a run.

A model is cut into S stages on p devices, a batch into M micro-batches. F(s, m) needs F(s - 1, m);
B(s, m) needs F(s, m) and B(s + 1, m). A schedule lists actions per device that keep to this
(docs/pipeline.md). Pure functions.

What computations hand on between devices is sent right after it is made and received right before
it is needed (stages.py has what that is). Sends are buffered: a device starts one and goes on;
receives block. `simulate` shows that nobody waits for ever under this rule.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..core.placement import check_places
from ..errors import ConfigError
from ..settings.recipes import PIPELINES

Edge = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Compute:
    """One computation of a device."""

    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{type(self).__name__[0]}{self.stage}.{self.micro}"


class Forward(Compute):
    """Compute stage `stage` of micro-batch `micro`."""


class Backward(Compute):
    """Take the gradient of micro-batch `micro` back through stage `stage`."""


class Schedule(NamedTuple):
    """Ordered computations of each device.

    `place[s]` is the device of stage s; `edges` are the pairs (r, s), r < s, where stage r hands
    something to stage s.
    """

    kind: str
    micro_batches: int
    place: tuple[int, ...]
    edges: tuple[Edge, ...]
    compute: tuple[tuple[Compute, ...], ...]

    @property
    def stages(self) -> int:
        """S, the number of stages."""
        return len(self.place)

    @property
    def devices(self) -> int:
        """p, the number of devices."""
        return len(self.compute)


class Slice(NamedTuple):
    """One computation of a simulated run: on `device`, from `start` to `end`."""

    device: int
    action: Compute
    start: float
    end: float


def make(
    kind: str,
    stages: int,
    micro_batches: int,
    devices: int | Sequence[int] | None = None,
    *,
    edges: Iterable[Edge] | None = None,
    backward: bool = True,
) -> Schedule:
    """The schedule of a batch.

    Args:
        kind: "gpipe", "1f1b" or "interleaved".
        stages: S, at least 1.
        micro_batches: M, any number from 0: the last batch of an epoch may have few.
        devices: their number p, or the device of each stage. Default: one for each stage. "gpipe"
            takes any places, also a device that is visited twice; "1f1b" one stage per device;
            "interleaved" stage s on device s mod p.
        edges: which stage hands something to which later one; default each to the next. Every stage
            but the first must get something.
        backward: False for an evaluation: forward only.

    Raises ConfigError: the numbers do not fit, with the equation.
    """
    if kind not in PIPELINES:
        raise ConfigError(f"[pipeline] schedule is {kind!r}; choose from {', '.join(PIPELINES)}")
    if stages < 1 or micro_batches < 0:
        raise ConfigError(
            f"[pipeline] {stages} stages and {micro_batches} micro-batches; give at least 1 "
            "stage, and 0 or more"
        )
    place = _places(kind, stages, devices)
    p = max(place) + 1
    links = (
        tuple((s, s + 1) for s in range(stages - 1)) if edges is None else tuple(sorted(set(edges)))
    )
    for r, s in links:
        if not 0 <= r < s < stages:
            raise ConfigError(
                f"[pipeline] stage {r} cannot hand on to stage {s} of {stages}; it must be a "
                "later one"
            )
    fed = {s for _, s in links}
    if fed != set(range(1, stages)):
        lost = min(set(range(1, stages)) - fed)
        raise ConfigError(
            f"[pipeline] stage {lost} gets nothing from an earlier stage; join it to its neighbour"
        )
    orders: list[list[Compute]] = [[] for _ in range(p)]
    for d in range(p):
        device_stages = [s for s, device in enumerate(place) if device == d]
        if kind == "gpipe" or not backward:
            orders[d] = _gpipe(device_stages, stages, micro_batches)
        elif kind == "1f1b":
            orders[d] = _one_by_one(device_stages[0], p - d, micro_batches)
        else:
            orders[d] = _interleaved(device_stages, d, p, micro_batches)
    if not backward:
        orders = [[a for a in order if isinstance(a, Forward)] for order in orders]
    return Schedule(kind, micro_batches, place, links, tuple(map(tuple, orders)))


def _places(kind: str, stages: int, devices: int | Sequence[int] | None) -> tuple[int, ...]:
    """The device of each stage."""
    p = stages if devices is None else devices
    place = tuple(s % p if p > 0 else -1 for s in range(stages)) if isinstance(p, int) else tuple(p)
    count = len(set(place))
    if len(place) != stages or set(place) != set(range(count)):
        raise ConfigError(
            f"[pipeline] {stages} stages on devices {list(place)}; give the device of each "
            "stage, and use all from 0"
        )
    if isinstance(p, int) and p > stages:
        raise ConfigError(f"[pipeline] {stages} stages for {p} devices; give each device a stage")
    if kind != "gpipe":
        check_places(kind, place)
    return place


def _gpipe(device_stages: list[int], stages: int, m: int) -> list[Compute]:
    """All forward, then all backward (Huang et al. 2019); of several stages, first what can be
    ready first.
    """
    pairs = [(s, i) for s in device_stages for i in range(m)]
    forward = sorted(pairs, key=lambda a: (a[0] + a[1], -a[0]))
    backward = sorted(pairs, key=lambda a: (stages - 1 - a[0] + a[1], a[0]))
    return [*(Forward(s, i) for s, i in forward), *(Backward(s, i) for s, i in backward)]


def _one_by_one(stage: int, depth: int, m: int) -> list[Compute]:
    """At most `depth` micro-batches under way: depth - 1 forwards, then turns (PipeDream-Flush,
    Narayanan 2021).
    """
    ahead = min(depth - 1, m)
    return _turns(
        [Forward(stage, i) for i in range(m)], [Backward(stage, i) for i in range(m)], ahead
    )


def _turns(forward: Sequence[Compute], backward: Sequence[Compute], ahead: int) -> list[Compute]:
    order: list[Compute] = list(forward[:ahead])
    for i, f in enumerate(forward[ahead:]):
        order += [f, backward[i]]
    return order + list(backward[len(forward) - ahead :])


def _interleaved(device_stages: list[int], d: int, p: int, m: int) -> list[Compute]:
    """Groups of p micro-batches go through the device's stages in their order (Narayanan et al.
    2021, section 2.2).

    The order is made for M rounded up to a multiple of p, and what does not exist left out:
    micro-batches do not depend on each other, so what remains is still an order.
    """
    v = len(device_stages)
    rounds = -(-m // p)
    if v == 1:
        return _one_by_one(device_stages[0], p - d, m)

    def pairs(chunks: list[int]) -> list[tuple[int, int]]:
        return [(s, p * r + i) for r in range(rounds) for s in chunks for i in range(p)]

    total = v * p * rounds
    ahead = min(2 * (p - d - 1) + (v - 1) * p, total)
    order = _turns(
        [Forward(*a) for a in pairs(device_stages)],
        [Backward(*a) for a in pairs(device_stages[::-1])],
        ahead,
    )
    return [a for a in order if a.micro < m]


def _needs(schedule: Schedule, a: Compute) -> list[Compute]:
    """Returns what must be done before a."""
    if isinstance(a, Forward):
        return [Forward(r, a.micro) for r, s in schedule.edges if s == a.stage]
    return [
        Forward(a.stage, a.micro),
        *(Backward(s, a.micro) for r, s in schedule.edges if r == a.stage),
    ]


Cost = float | Sequence[float]


def simulate(
    schedule: Schedule, forward: Cost = 1, backward: Cost = 2, transfer: float = 0
) -> list[Slice]:
    """When everything is computed, each device starting as early as its order allows.

    forward, backward: time of one forward and one backward, in any unit: for all stages, or one
    number per stage. transfer: time of a message between devices.

    Raises ConfigError: devices wait for each other, or for what nobody computes.
    """
    costs = {
        Forward: _per_stage(forward, schedule.stages),
        Backward: _per_stage(backward, schedule.stages),
    }
    end: dict[Compute, float] = {}
    free = [0.0] * schedule.devices
    positions = [0] * schedule.devices
    out: list[Slice] = []
    while len(out) < sum(map(len, schedule.compute)):
        count_before = len(out)
        for d, order in enumerate(schedule.compute):
            while positions[d] < len(order):
                a = order[positions[d]]
                needs = _needs(schedule, a)
                if not all(n in end for n in needs):
                    break
                ready = (end[n] + (transfer if schedule.place[n.stage] != d else 0) for n in needs)
                start = max(free[d], *ready) if needs else free[d]
                end[a] = free[d] = start + costs[type(a)][a.stage]
                out.append(Slice(d, a, start, end[a]))
                positions[d] += 1
        if len(out) == count_before:
            stuck = [
                (d, order[positions[d]])
                for d, order in enumerate(schedule.compute)
                if positions[d] < len(order)
            ]
            raise ConfigError(
                "[pipeline] devices wait for each other: "
                + "; ".join(
                    f"device {d} at {a} for {next(n for n in _needs(schedule, a) if n not in end)}"
                    for d, a in stuck
                )
            )
    return sorted(out, key=lambda s: (s.start, s.device))


def _per_stage(cost: Cost, stages: int) -> Sequence[float]:
    if isinstance(cost, (int, float)):
        return [cost] * stages
    if len(cost) != stages:
        raise ConfigError(
            f"[pipeline] {len(cost)} costs for {stages} stages; give one, or one for each stage"
        )
    return cost


def bubble(schedule: Schedule, forward: Cost = 1, backward: Cost = 2, transfer: float = 0) -> float:
    """The share of all devices' time, from the first computation to the last, in which they wait.

    With p equal stages and M micro-batches it is (p - 1) / (M + p - 1) for gpipe and 1f1b, whatever
    a forward and a backward cost, and (p - 1) / (v M + p - 1) for interleaved with v stages per
    device if p divides M.
    """
    run = simulate(schedule, forward, backward, transfer)
    span = max((s.end for s in run), default=0)
    return 1 - sum(s.end - s.start for s in run) / (span * schedule.devices) if span else 0.0


def peak(schedule: Schedule) -> tuple[int, ...]:
    """For each device the most (stage, micro-batch) pairs that are between their forward and
    backward at one time: as many sets of activations it must keep. 0 without a backward pass.
    """

    def device_peak(order: Sequence[Compute]) -> int:
        live_pairs = itertools.accumulate(1 if isinstance(a, Forward) else -1 for a in order)
        return max(live_pairs) if any(isinstance(a, Backward) for a in order) else 0

    return tuple(map(device_peak, schedule.compute))


def text(schedule: Schedule, forward: Cost = 1, backward: Cost = 2) -> str:
    """A picture: a row per device, a column per unit of time, F and B with the number of the
    micro-batch.

    Costs are whole numbers here. A device with several stages marks them a, b, c, ... in the order
    of the model.
    """
    run = simulate(schedule, forward, backward)
    letters = [_letter(schedule, s) for s in range(schedule.stages)]
    names = {s.action: f"{str(s.action)[0]}{s.action.micro}{letters[s.action.stage]}" for s in run}
    if any(s.start != int(s.start) or s.end != int(s.end) for s in run):
        raise ConfigError("[pipeline] a picture needs costs that are whole numbers")
    width = max((len(n) for n in names.values()), default=2) + 1
    span = int(max((s.end for s in run), default=0))
    lines = []
    for d in range(schedule.devices):
        row = ("." + " " * (width - 1)) * span
        for s in (s for s in run if s.device == d and s.end > s.start):
            a = width * int(s.start)
            b = width * int(s.end)
            row = (
                row[:a]
                + names[s.action].ljust(b - a - 1, "-" if b - a > width else " ")
                + " "
                + row[b:]
            )
        lines.append(f"device {d}  {row}".rstrip())
    return "\n".join(lines)


def _letter(schedule: Schedule, stage: int) -> str:
    device_stages = [s for s, d in enumerate(schedule.place) if d == schedule.place[stage]]
    if len(device_stages) == 1:
        return ""
    i = device_stages.index(stage)
    return chr(ord("a") + i) if len(device_stages) <= 26 else f"/{i}"
