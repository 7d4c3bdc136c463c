"""Buckets and segments, by counting over many programs: shared, frozen and unused parameters,
any size of bucket.
"""

from __future__ import annotations

import random

import pytest

from odyssey import data, nn, optim
from odyssey import functional as F
from odyssey.core import native
from odyssey.core.arena import Arena
from odyssey.core.program import Range, Record, Slot
from odyssey.core.tensor import Parameter
from odyssey.data.nested import Form
from odyssey.parallel import buckets
from odyssey.parallel.buckets import Bucket
from odyssey.train.trainer import DistributedTrainer


def programs(seed: int) -> tuple[list[Record], Arena, set[int]]:
    """A random network as records: layers with a weight and a bias, some shared with an earlier
    layer, some without a gradient, some whose gradient comes at the end of the backward pass
    or in the forward pass, as well or alone; the offsets of parameters that get one.
    """
    rng = random.Random(seed)
    n = rng.randint(1, 9)
    arena = Arena((f"p{i}", Parameter([0.0] * rng.randint(1, 50))) for i in range(2 * n + 2))
    at = list(arena.offsets.values())
    layers = []
    for i in range(n):
        pair = [at[2 * i], at[2 * i + 1]]
        for j in (0, 1):
            if i and rng.random() < 0.2:
                pair[j] = layers[rng.randrange(i)][0][j]
        layers.append((pair, [rng.random() < 0.8, rng.random() < 0.8]))
    frozen = {
        o for pair, trained in layers for o, yes in zip(pair, trained, strict=True) if not yes
    }

    def use(space: int, offsets) -> list[Range]:
        return [Range(arena, space, 4 * o) for o in offsets]

    def record(op: str, args: list[Range], tag: int, phase: str = "forward") -> Record:
        return Record(op, args, tag=tag, phase=phase)

    records, late = [], []
    for i, (pair, _) in enumerate(layers):
        grads = [o for o in pair if o not in frozen and rng.random() < 0.1]  # of running statistics
        records.append(record("forward", use(native.PARAMS, pair) + use(native.GRADS, grads), i))
    records.append(record("stats", use(native.GRADS, [arena.size]), n))
    for i, (pair, _) in reversed(list(enumerate(layers))):
        grads = [o for o in pair if o not in frozen]
        ends = [o for o in grads if rng.random() < 0.1]  # of ops without a kernel of their own
        if grads:
            records.append(record("backward_weight", use(native.GRADS, grads), i, "backward"))
        if rng.random() < 0.9:
            records.append(record("backward_input", use(native.PARAMS, pair[:1]), i, "backward"))
        records.append(record("other", [], i, "backward"))
        late += [record("late", use(native.GRADS, [o]), i, "backward") for o in ends]
    return records + late, arena, {o for pair, _ in layers for o in pair} - frozen


def additions(records: list[Record], arena: Arena, numbers: dict[int, int]) -> dict[int, list[int]]:
    """What is added to each gradient, in order: the numbers of records, through sums in the
    workspace as well.
    """
    sums: dict[int, list[int]] = {}
    found: dict[int, list[int]] = {}
    for r in records:
        slots = [a for a in r.args if isinstance(a, Slot)]
        if r.op == "fill":
            sums[id(slots[0])] = []
        elif r.op == "accumulate" and id(slots[0]) in sums:
            offset = r.args[0].offset // 4
            assert (
                not found.get(offset)
                and r.args[2] * 4 == slots[0].nbytes == 4 * buckets.padded(arena)[offset]
            )
            found[offset] = sums.pop(id(slots[0]))
        else:
            for slot in (s for s in slots if id(s) in sums):
                sums[id(slot)].append(numbers[id(r.origin)])
            for o in buckets.touched(r, arena, native.GRADS):
                found.setdefault(o, []).append(numbers[id(r.origin)])
    return found


def fits(
    records: list[Record], arena: Arena, made: list[Bucket], by_params: bool
) -> list[buckets.Segment]:
    """The segments of a program, once everything that they promise has been looked at."""
    for r in records:
        r.origin = r  # which copies keep
    run, cut = buckets.segments(records, arena, made, by_params=by_params)
    assert [s.start for s in cut] == [0, *(s.stop for s in cut[:-1])] and cut[-1].stop == len(run)
    writers = [s.grads for s in cut if s.grads not in (None, buckets.STATS)]
    assert len(writers) == len(set(writers))
    owner = {arena.offsets[name]: i for i, b in enumerate(made) for name in b.names}
    for s in cut:
        for r in run[s.start : s.stop]:
            for o in buckets.touched(r, arena, native.GRADS):
                assert s.grads == owner.get(o, buckets.STATS)
            if by_params:
                assert {owner[o] for o in buckets.touched(r, arena, native.PARAMS)} <= set(s.params)
        most = max(
            [
                2,
                *(
                    len({owner[o] for o in buckets.touched(r, arena, native.PARAMS)})
                    for r in records
                ),
            ]
        )
        assert len(s.params) <= (most if by_params else 0)
    written = {o for r in records for o in buckets.touched(r, arena, native.GRADS)} - {arena.size}
    assert {owner[o] for o in written} == set(writers)
    # nothing is left out, twice or in another order, and each gradient is the same sum
    own = [
        r for r in run if hasattr(r, "origin") and not (r.op == "fill" and r.origin.op != "fill")
    ]
    assert [id(r.origin) for r in own] == [id(r) for r in records]
    numbers = {id(r): i for i, r in enumerate(records)}
    plain: dict[int, list[int]] = {}
    for i, r in enumerate(records):
        for o in buckets.touched(r, arena, native.GRADS):
            plain.setdefault(o, []).append(i)
    assert additions(run, arena, numbers) == plain
    return cut


@pytest.mark.parametrize("by_params", [False, True])
def test_every_program_can_be_cut(by_params):
    several = shared = early = 0
    for seed in range(120):
        records, arena, _ = programs(seed)
        rng = random.Random(-seed)
        limit = rng.choice([1, 40, 100, 300, 10**6])
        made = buckets.cut(records, arena, limit)
        # every float of the arena is in one bucket, once
        runs = sorted((p.lo, p.n) for b in made for p in b.pieces)
        assert [lo for lo, _ in runs] == [sum(n for _, n in runs[:i]) for i in range(len(runs))]
        assert sum(n for _, n in runs) == arena.size == sum(b.floats for b in made)
        assert sorted(name for b in made for name in b.names) == sorted(arena.offsets)
        # the last, and the last of those that are used far apart
        assert sum(b.floats < limit for b in made) <= 2
        # places in a bucket and in the arena belong to each other
        for b in made:
            assert [b.locate(p.lo + i) for p in b.pieces for i in range(p.n)] == list(
                range(b.floats)
            )
            assert [p for i in range(b.floats) for p in b.covers(i, i + 1)] == [
                buckets.BucketRange(p.lo + i, 1, p.at + i) for p in b.pieces for i in range(p.n)
            ]
        cut = fits(records, arena, made, by_params)
        written = {o for r in records for o in buckets.touched(r, arena, native.GRADS)} - {
            arena.size
        }
        assert buckets.unused(records, arena) == [
            n for n, o in arena.offsets.items() if o not in written
        ]
        several += len(made) > 2
        shared += len({s.grads for s in cut}) < len(made)
        early += any(
            r.op == "fill" for r in buckets.segments(records, arena, made, by_params=by_params)[0]
        )
        # the same buckets for other programs: layers frozen, others used, no backward pass
        for _ in range(4):
            frozen = {o for o in arena.offsets.values() if rng.random() < 0.4}
            fits([without(r, arena, frozen) for r in records], arena, made, by_params)
        fits([r for r in records if rng.random() < 0.7 or r.op == "stats"], arena, made, by_params)
        mixed = list(records)
        rng.shuffle(mixed)
        fits(mixed, arena, made, by_params)
        fits([r for r in records if r.phase == "forward"], arena, made, by_params)
    assert several > 30 and shared > 5 and early > 20


def without(record: Record, arena: Arena, frozen: set[int]) -> Record:
    """The same record, not writing some gradients."""
    args = [a for a in record.args if a.space != native.GRADS or a.offset // 4 not in frozen]
    return record.changed(args=args)


CHAIN = [
    nn.Flatten,
    lambda: nn.Linear(784, 64),
    *[lambda: nn.Linear(64, 64)] * 3,
    lambda: nn.Linear(64, 10),
]


def names(model, limit):
    trainer = DistributedTrainer(model, optim.SGD())
    records = trainer.stepper.engine.record(8, Form.of_classes(1, 28, 28))
    return [b.names for b in buckets.cut(records, trainer.arena, limit)]


def test_a_layer_is_a_bucket_and_one_that_is_used_again_after_others_too():
    layers = [(f"{i}.weight", f"{i}.bias") for i in (5, 4, 3, 2, 1)]
    # as the backward pass is done with them
    assert names(nn.Sequential(*(make() for make in CHAIN)), 1) == layers
    model = nn.Sequential(*(make() for make in CHAIN))
    assert names(model, 4000) == [layers[1] + layers[0], layers[2], layers[3], layers[4]]

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (
                nn.Linear(784, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 10),
            )
            self.unused = nn.Linear(3, 3)

        def forward(self, x):
            x = F.relu(self.b(F.relu(self.a(F.flatten(x)))))
            return self.d(F.relu(self.b(F.relu(self.c(x)))))

    order = [(f"{name}.weight", f"{name}.bias") for name in "dcba"]
    assert names(Tied(), 1) == [*order, ("unused.weight",), ("unused.bias",)]
    assert len(names(Tied(), 10**6)) == 1
    # less than that is between the two uses of b: nothing to be gained
    assert names(Tied(), 300) == [
        order[1] + order[0],
        order[3] + order[2],
        ("unused.weight", "unused.bias"),
    ]


def test_layers_that_take_turns_are_one_bucket():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.state, self.step = (
                nn.Linear(784, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 16),
            )
            self.last = nn.Linear(16, 10)

        def forward(self, x):
            x = self.first(F.flatten(x))
            for _ in range(3):
                x = F.tanh(self.state(F.tanh(self.step(x))))
            return self.last(x)

    turns = ("state.weight", "state.bias", "step.weight", "step.bias")
    assert names(Recurrent(), 1) == [
        ("last.weight", "last.bias"),
        turns,
        ("first.weight", "first.bias"),
    ]


class Mixed(nn.Module):
    """Norms with running statistics, a branch, a layer used twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Linear(784, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 10),
        )
        self.one, self.two, self.branch = nn.BatchNorm1d(16), nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x):
        x = F.relu(self.b(self.one(self.a(F.flatten(x)))))
        return self.d(self.b(F.relu(self.two(self.c(x)) + self.branch(x))))


@pytest.mark.parametrize("limit", [1, 300, 4000, 10**6])
@pytest.mark.parametrize("seed", range(12))
def test_frozen_layers_are_where_they_would_be_if_they_were_trained(seed, limit):
    rng = random.Random(seed)
    make = rng.choice([Mixed, lambda: nn.Sequential(*(make() for make in CHAIN))])
    model = make()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.BatchNorm1d)]
    for layer in rng.sample(layers, rng.randrange(1, len(layers))):
        layer.requires_grad_(False)
    assert names(model, limit) == names(make(), limit)


def test_a_frozen_layer_between_two_of_a_bucket():
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 10)
    )
    for p in model[2].parameters():
        p.requires_grad = False
    trainer = DistributedTrainer(model, optim.SGD())
    records = trainer.stepper.engine.record(8, Form.of_classes(1, 28, 28))
    for limit in (1, 100, 10**6):
        made = buckets.cut(records, trainer.arena, limit)
        assert fits(records, trainer.arena, made, True)[-1].stop == len(records)
    history = trainer.fit(data.DataLoader(data.load("mnist", train=True).take(32), batch_size=32))
    assert history.steps == 1
