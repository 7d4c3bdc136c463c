"""Programs cut into pipeline stages: nothing is lost, and everybody gets what he needs, once,
before he needs it.
"""

from __future__ import annotations

import itertools

import pytest
from each_case import each

from odyssey import device, nn, optim
from odyssey import functional as F
from odyssey.core.program import Record, Slot
from odyssey.data.nested import Form
from odyssey.errors import ConfigError
from odyssey.parallel import schedule as schedules
from odyssey.parallel.stages import StageWork, edges, partition
from odyssey.train.trainer import DistributedTrainer


class Skipping(nn.Module):
    """Three places; the first is visited again, and its first value is used on all of them."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(784, 12) @ device(0)
        self.b = nn.Linear(12, 12) @ device(1)
        self.c = nn.Linear(12, 12) @ device(2)
        self.d = nn.Linear(12, 10) @ device(0)

    def forward(self, x):
        a = F.relu(self.a(F.flatten(x)))
        b = F.tanh(self.b(a.to(1)))
        c = F.sigmoid(self.c(b.to(2))) * a.to(2)
        return self.d(F.dropout(c.to(0) + a, 0.1, self.training))


def program(model, train=True) -> list[Record]:
    trainer = DistributedTrainer(model, optim.SGD())
    return (trainer.stepper.engine if train else trainer.stepper.evaluation_engine).record(
        8, Form.of_classes(1, 28, 28)
    )


def holds(parts: list[StageWork], records: list[Record]) -> None:
    """What must be true of every cut."""
    assert sorted(id(r) for p in parts for r in p.records) == sorted(map(id, records))
    forward = [p.stage for p in parts if p.phase == "forward"]
    backward = [p.stage for p in parts if p.phase == "backward"]
    assert forward == list(range(len(forward))) and backward in ([], forward[::-1])
    places = {p.stage: p.place for p in parts}
    # neighbours on one place would be one stage
    assert all(places[s] != places[s + 1] for s in forward[:-1])
    position = {id(r): i for i, r in enumerate(records)}
    for p in parts:
        assert all(r.phase == p.phase for r in p.records)
        order = [position[id(r)] for r in p.records if r.op != "array"]
        assert order == sorted(order)
    # play it through: what is on each place
    there: dict[int, set[int]] = {p.place: set() for p in parts}
    mail: dict[int, set[int]] = {}
    makers = {}
    for r in records:  # a slot belongs to the first record that names it
        for a in r.args:
            if isinstance(a, Slot):
                makers.setdefault(id(a), id(r))
    numbers = []
    for p in parts:
        for t in p.receives:
            assert (
                t.target == p.place != t.source
                and t.number in mail
                and id(t.slot) not in there[p.place]
            )
            there[p.place].add(id(t.slot))
        for r in p.records:
            for a in r.args:
                if isinstance(a, Slot) and makers[id(a)] != id(r):
                    assert id(a) in there[p.place], r.op
            there[p.place].update(id(a) for a in r.args if isinstance(a, Slot))
        for t in p.sends:
            assert t.source == p.place and id(t.slot) in there[p.place]
            mail[t.number] = {id(t.slot)}
            numbers.append(t.number)
    assert (
        sorted(numbers)
        == list(range(len(numbers)))
        == sorted(t.number for p in parts for t in p.receives)
    )


@pytest.mark.parametrize("train", [True, False])
def test_a_model_placed_by_hand(train):
    records = program(Skipping(), train)
    parts = partition(records, lambda r: r.device)
    holds(parts, records)
    assert [p.place for p in parts] == [0, 1, 2, 0] + [0, 2, 1, 0] * train
    first = parts[0]
    # one value, to each place once
    assert sorted((t.source, t.target) for t in first.sends) == [(0, 1), (0, 2)]
    assert len({id(t.slot) for t in first.sends}) == 1
    assert edges(parts) == {(0, 1), (1, 2), (2, 3), (0, 2)}
    labels = [p for p in parts for r in p.records if r.op == "array"]
    assert [p.place for p in labels] == [0] and labels[0].stage == 3  # where the loss is, not sent


@each("cut", itertools.combinations(range(1, 11), 2))
def test_any_cut_of_lenet(*cut):
    """Two cuts between any two ops: also between those without parameters, and inside of what
    was one layer.
    """
    records = program(nn.LeNet5())
    tags = sorted(
        {r.tag for r in records if r.phase == "forward" and r.op not in ("array", "stats")}
    )
    firsts = [tags[min(c, len(tags) - 1)] for c in cut]
    place = {t: sum(t >= f for f in firsts) for t in range(max(r.tag for r in records) + 1)}
    parts = partition(records, lambda r: place[r.tag])
    holds(parts, records)
    kinds = ("gpipe", "1f1b") if len({p.place for p in parts}) == 3 else ()
    for kind, micro in itertools.product(kinds, (1, 2, 5)):
        schedules.simulate(schedules.make(kind, 3, micro, edges=edges(parts)))


@each("cuts", itertools.combinations(range(1, 14), 3))
def test_any_interleaved_cut_of_a_norm_made_of_ops(*cuts):
    """Two places, each with two stages; some of the norm's ops have records in the backward pass
    alone.
    """
    records = program(
        nn.Sequential(nn.Flatten(), nn.Linear(784, 6), nn.RMSNorm(6), nn.Tanh(), nn.Linear(6, 10))
    )
    tags = sorted(
        {r.tag for r in records if r.phase == "forward" and r.op not in ("array", "stats")}
    )
    firsts = [tags[min(c, len(tags) - 1)] for c in cuts]
    holds(partition(records, lambda r: sum(r.tag >= f for f in firsts) % 2), records)


def test_a_value_that_is_made_later_is_refused():
    a, b = Slot(4), Slot(4)
    records = [
        Record("one", [a], device=0, tag=0),
        Record("two", [b, a], device=1, tag=1),
        # of the first stage, but needs the second's
        Record("three", [b, a], device=0, tag=0, phase="backward"),
        Record("four", [a, b], device=1, tag=1, phase="backward"),
    ]
    parts = partition(records, lambda r: r.device)
    assert [t.target for p in parts for t in p.sends] == [1, 0]
    late = Slot(4)
    records = [
        Record("one", [a, late], device=0, tag=0),
        Record("two", [b, a], device=1, tag=1),
        Record("three", [late, b], device=1, tag=1, phase="backward"),
        Record("four", [a, late], device=0, tag=0, phase="backward"),
    ]
    # made on the first place, used on the second: sent
    holds(partition(records, lambda r: r.device), records)
    records = [
        Record("one", [a], device=0, tag=0),
        Record("two", [b, a], device=1, tag=1),
        Record("three", [late], device=0, tag=0, phase="backward"),
        Record("four", [a, late], device=1, tag=1, phase="backward"),
    ]
    with pytest.raises(ConfigError, match="needs a value that is made later"):
        partition(records, lambda r: r.device)
