"""Buckets and segments, by counting over many programs: shared, frozen and unused parameters, any size of bucket."""

from __future__ import annotations

import random

import pytest

from odyssey import data, nn, optim
from odyssey import functional as F
from odyssey.core import native
from odyssey.core.arena import Arena
from odyssey.core.program import Range, Record
from odyssey.core.tensor import Parameter
from odyssey.data.trees import Form
from odyssey.parallel import buckets
from odyssey.train.trainer import DistributedTrainer


def programs(seed: int) -> tuple[list[Record], Arena, set[int]]:
    """A random network as records: layers with a weight and a bias, some shared with an earlier layer, some without a
    gradient; the offsets of parameters that get one."""
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
    frozen = {o for pair, trained in layers for o, yes in zip(pair, trained, strict=True) if not yes}

    def use(space: int, offsets) -> list[Range]:
        return [Range(arena, space, 4 * o) for o in offsets]

    records = [Record("forward", use(native.PARAMS, pair)) for pair, _ in layers]
    records.append(Record("stats", use(native.GRADS, [arena.size])))
    for pair, _ in reversed(layers):
        grads = [o for o in pair if o not in frozen]
        if grads:
            records.append(Record("backward_weight", use(native.GRADS, grads)))
        if rng.random() < 0.9:
            records.append(Record("backward_input", use(native.PARAMS, pair[:1])))
        records.append(Record("other", []))
    return records, arena, {o for pair, _ in layers for o in pair} - frozen


@pytest.mark.parametrize("by_params", [False, True])
def test_every_program_can_be_cut(by_params):
    several = shared = 0
    for seed in range(120):
        records, arena, trained = programs(seed)
        limit = random.Random(-seed).choice([1, 40, 100, 300, 10**6])
        made = buckets.cut(records, arena, limit, by_params=by_params)
        # every float of the arena is in one bucket, once
        runs = sorted((p.lo, p.n) for b in made for p in b.pieces)
        assert [lo for lo, _ in runs] == [sum(n for _, n in runs[:i]) for i in range(len(runs))]
        assert sum(n for _, n in runs) == arena.size == sum(b.floats for b in made)
        assert sorted(name for b in made for name in b.names) == sorted(arena.offsets)
        assert all(b.floats >= limit for b in made[:-1])
        # places in a bucket and in the arena belong to each other
        for b in made:
            assert [b.locate(p.lo + i) for p in b.pieces for i in range(p.n)] == list(range(b.floats))
            assert [p for i in range(b.floats) for p in b.covers(i, i + 1)] == [
                buckets.Piece(p.lo + i, 1, p.at + i) for p in b.pieces for i in range(p.n)
            ]
        cut = buckets.segments(records, arena, made, by_params=by_params)
        assert [s.start for s in cut] == [0, *(s.stop for s in cut[:-1])] and cut[-1].stop == len(records)
        writers = [s.grads for s in cut if s.grads not in (None, buckets.STATS)]
        assert writers == sorted(set(writers))  # each bucket once, in the order of the buckets
        owner = {arena.offsets[name]: i for i, b in enumerate(made) for name in b.names}
        for s in cut:
            for r in records[s.start : s.stop]:
                for o in buckets.touched(r, arena, native.GRADS):
                    assert s.grads == owner.get(o, buckets.STATS)
                if by_params:
                    assert {owner[o] for o in buckets.touched(r, arena, native.PARAMS)} <= {s.params}
        written = {o for r in records for o in buckets.touched(r, arena, native.GRADS)} - {arena.size}
        assert {owner[o] for o in written} == set(writers)
        assert buckets.unused(records, arena) == [n for n, o in arena.offsets.items() if o not in written]
        several += len(made) > 2
        shared += len(writers) < len(made)
    assert several > 30 and shared > 5


def test_a_layer_is_a_bucket_and_layers_that_share_are_one():
    def names(model, limit):
        trainer = DistributedTrainer(model, optim.SGD())
        records = trainer._train.record(8, Form.of_classes(1, 28, 28))
        return [b.names for b in buckets.cut(records, trainer.arena, limit)]

    chain = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 10))
    layers = [(f"{i}.weight", f"{i}.bias") for i in (5, 4, 3, 2, 1)]
    assert names(chain, 1) == layers  # in the order in which the backward pass is done with them
    chain = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 10))
    assert names(chain, 4000) == [layers[1] + layers[0], layers[2], layers[3], layers[4]]

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = nn.Linear(784, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 10)
            self.unused = nn.Linear(3, 3)

        def forward(self, x):
            x = F.relu(self.b(F.relu(self.a(F.flatten(x)))))
            return self.d(F.relu(self.b(F.relu(self.c(x)))))

    both = ("b.weight", "b.bias", "c.weight", "c.bias")
    rest = [("a.weight", "a.bias"), ("unused.weight",), ("unused.bias",)]
    assert names(Tied(), 1) == [("d.weight", "d.bias"), both, *rest]


def test_a_frozen_layer_between_two_of_a_bucket():
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 10))
    for p in model[2].parameters():
        p.requires_grad = False
    trainer = DistributedTrainer(model, optim.SGD())
    records = trainer._train.record(8, Form.of_classes(1, 28, 28))
    for limit in (1, 100, 10**6):
        made = buckets.cut(records, trainer.arena, limit, by_params=True)
        cut = buckets.segments(records, trainer.arena, made, by_params=True)
        assert cut[-1].stop == len(records)
    history = trainer.fit(data.DataLoader(data.load("mnist", train=True).take(32), batch_size=32))
    assert history.steps == 1
