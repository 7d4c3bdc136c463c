"""ZeRO: bytes of every built-in model, held to a formula; bits on many ranks, also where buckets
have near sizes.
"""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from parallel.test_offload import in_a_file

from odyssey import DistributedTrainer, data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.core import native, offload
from odyssey.parallel import zero as zeros

IMAGES = {
    "lenet5": (1, 28, 28),
    "mlp": (1, 28, 28),
    "convnet": (1, 28, 28),
    "resnet18": (3, 16, 16),
}
GPT = {"vocab_size": 300, "context": 16, "layers": 5, "heads": 2, "width": 32}
TEXTS = {
    "gpt-mini": lambda: nn.models.build("gpt-mini", vocab_size=76),
    "gpt tied": lambda: nn.models.build("gpt", **GPT),
    "gpt untied": lambda: nn.models.build("gpt", **GPT, tied=False),
    "gpt of many words": lambda: nn.models.build("gpt", **{**GPT, "vocab_size": 3000}),
    "transformer": lambda: nn.models.build(
        "gpt", vocab_size=100, context=16, layers=3, heads=3, width=96
    ),
}
ROWS = {
    "rows": lambda: nn.Sequential(
        nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 64), nn.ReLU(), nn.Linear(64, 10)
    )
}


def batch_of(name: str, samples: int) -> data.Batch:
    rng = np.random.default_rng(0)
    if name in TEXTS:
        x = y = rng.integers(0, 70, (samples, 16)).astype(np.int32)
    else:
        shape = IMAGES.get(name, (64,))
        x, y = rng.standard_normal((samples, *shape), np.float32), rng.integers(0, 10, samples)
    return next(iter(data.DataLoader(data.arrays(x, y), batch_size=samples)))


def stepped(comm, name, samples, optimizer=optim.Adam, **settings):
    """A trainer that has taken a step of one sample per shard."""
    nn.manual_seed(0)
    made = {**TEXTS, **ROWS}.get(name, lambda: nn.models.build(name, IMAGES[name]))()
    settings = {"shard_size": 1, "threads": 1, "device": "cpu", "check_every": 0, **settings}
    trainer = DistributedTrainer(made, optimizer(), comm=comm, **settings)
    trainer.train_step(batch_of(name, samples))
    return trainer


# --- bytes ----------------------------------------------------------------------------------------


def pools(needs: list[int]) -> int:
    """Floats of the two that buckets take turns with."""
    return sum(max(needs[turn::2], default=0) for turn in (0, 1))


def slots(floats: list[int]) -> int:
    """Floats of gathered parameters: the largest buckets in memory of their own, and two times
    the next one.
    """
    order = [*sorted(floats, reverse=True), 0]
    return min(sum(order[:n]) + 2 * order[n] for n in range(len(order)))


@pytest.mark.parametrize("name", [*IMAGES, *(name for name in TEXTS if name != "transformer")])
def test_what_a_rank_keeps_is_what_is_documented(name):
    def measured(comm, zero):
        trainer = stepped(comm, name, 4, zero=zero)
        return (
            trainer.memory(),
            trainer.stepper.engine.ownership.parts,
            trainer.arena.size,
            trainer.stepper.engine.ownership.warnings,
        )

    for zero in (1, 2, 3):
        everyone = mock.run(4, measured, zero)
        size = everyone[0][2]
        assert sum(memory["optimizer"] for memory, *_ in everyone) == 2 * 4 * size
        for rank, (memory, parts, _, warnings) in enumerate(everyone):
            floats = [b.floats for b in parts.buckets]
            own = [hi - lo for lo, hi in (ranges[rank] for ranges in parts.ranges)]
            assert sum(floats) == size and all(
                abs(4 * n - all_of) <= 64 for n, all_of in zip(own, floats, strict=True)
            )
            # a sum, and what four ranks sent
            needs = [all_of + 4 * n for n, all_of in zip(own, floats, strict=True)]
            assert memory["optimizer"] == 2 * 4 * sum(own)
            gradients = 4 * (sum(needs) if zero == 1 else sum(own) + pools(needs))
            # in one call with the statistics
            assert 0 <= memory["gradients"] - gradients <= (512 if zero == 1 else 0)
            assert memory["parameters"] == 4 * (sum(own) + slots(floats) if zero == 3 else size)
            large = 2 * max(floats) > size
            said = [
                f"% of the parameters, which zero={zero} has whole" in line for line in warnings
            ]
            assert said == [True] * (large and zero > 1)
            assert zero == 1 or large == (name in ("lenet5", "mlp", "convnet", "gpt of many words"))


def test_a_tied_weight_costs_itself():
    """What it adds to an untied model of the same layers is its own bytes, not those of
    everything between its uses.
    """

    def memory(comm, name, zero):
        trainer = stepped(comm, name, 4, zero=zero)
        return trainer.memory(), 4 * trainer.model.transformer.wte.weight.size

    for zero in (2, 3):
        tied, weight = mock.run(4, memory, "gpt tied", zero)[0]
        untied, _ = mock.run(4, memory, "gpt untied", zero)[0]
        for part in ("parameters", "gradients", "optimizer"):
            assert tied[part] <= untied[part]
        # a shard's sum of the output layer's gradient waits for that of the embedding
        assert tied["activations"] <= untied["activations"] + weight + 4096


def test_which_buckets_are_kept():
    assert zeros.unshared_buckets([5, 5, 5, 5]) == ()
    assert zeros.unshared_buckets([5, 30, 5, 5]) == (1,)
    assert zeros.unshared_buckets([7]) == (0,) and zeros.unshared_buckets([7, 7]) == (0, 1)
    assert zeros.unshared_buckets([100, 1, 40, 2]) == (0, 2, 3, 1)
    rng = random.Random(0)
    for _ in range(200):
        floats = [rng.randint(1, 40) for _ in range(rng.randint(1, 9))]
        kept = zeros.unshared_buckets(floats)
        rest = [n for b, n in enumerate(floats) if b not in kept]
        assert sum(floats[b] for b in kept) + 2 * max(rest, default=0) == slots(floats)


@pytest.mark.parametrize("name", ["gpt tied", "gpt of many words", "convnet"])
def test_what_an_offloaded_training_has_in_memory(name, tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "SMALL", 64)
    (trainer,) = mock.run(1, lambda comm: stepped(comm, name, 4, offload=tmp_path))
    floats = [b.floats for b in trainer.stepper.engine.ownership.parts.buckets]
    arrays = trainer.stepper.engine.storage.arrays
    inside = {n: a.nbytes for n, a in arrays.items() if not in_a_file(a)}
    buffers = trainer.stepper.engine.runners[0].plan.buffers  # of four shards on one thread: three
    assert buffers == 3 and inside.pop("work") == trainer.memory()["activations"]
    assert sum(inside.values()) == 4 * buffers * pools(floats)
    large = 2 * max(floats) > trainer.arena.size
    assert [
        line.partition("which ")[2][:7] for line in trainer.stepper.engine.ownership.warnings
    ] == ["offload"] * large


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("ranks", [5, 6, 7, 8, 12])
def test_buckets_of_near_sizes_on_many_ranks(ranks, zero):
    """A rank's range of a smaller bucket may be longer than that of the largest one."""

    def trained(comm, sizes, samples, zero=0):
        nn.manual_seed(0)
        rng = np.random.default_rng(0)
        layers = [nn.Linear(a, b, bias=False) for a, b in zip(sizes, sizes[1:], strict=False)]
        settings = {
            "zero": zero,
            "bucket_size_mb": 1e-6,
            "shard_size": 1,
            "threads": 1,
            "device": "cpu",
        }
        trainer = DistributedTrainer(
            nn.Sequential(*layers), optim.SGD(lr=0.1), comm=comm, **settings
        )
        x = rng.standard_normal((samples, sizes[0]), np.float32)
        trainer.fit(
            data.DataLoader(data.arrays(x, rng.integers(0, 3, samples)), batch_size=samples),
            verbose=False,
        )
        return trainer.weights_sha256()

    rng = random.Random(ranks)
    drawn = [
        [8 * rng.randint(1, 3), *(rng.randint(6, 16) for _ in range(rng.randint(2, 5)))]
        for _ in range(6)
    ]
    for sizes in ([16, 8, 14], *drawn):
        samples = rng.choice([5, 7, 9, 13, 26])
        (one,) = mock.run(1, trained, sizes, samples)
        found = mock.run(ranks, trained, sizes, samples, zero)
        assert set(found) == {one}, sizes


class Changing(nn.Module):
    """Takes another way when it is told to; has a layer used twice and one with running
    statistics.
    """

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(784, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.norm, self.d = nn.BatchNorm1d(24), nn.Linear(24, 10)
        self.scale = nn.Parameter(np.ones(24, np.float32))
        self.way = 0

    def forward(self, x):
        x = F.relu(self.b(self.a(F.flatten(x))))
        if self.way == 1:
            x = self.norm(self.c(x))
        elif self.way == 2:
            x = self.c(F.relu(self.b(self.norm(x * self.scale))))
        return self.d(F.relu(self.b(x)))


CHANGES = [
    lambda net: None,
    lambda net: net.a.requires_grad_(False) and net.norm.requires_grad_(False),
    lambda net: setattr(net, "way", 1),
    lambda net: net.a.requires_grad_(True) and net.b.requires_grad_(False),
    lambda net: setattr(net, "way", 2),
    lambda net: net.b.requires_grad_(True) and net.norm.requires_grad_(True),
]
LAYOUTS = [
    (3, {"zero": 3, "bucket_size_mb": 1e-6}),
    (2, {"zero": 3}),
    (5, {"zero": 2, "bucket_size_mb": 1e-3}),
    (2, {"zero": 1, "bucket_size_mb": 1e-6, "reduction": "hierarchical"}),
    (2, {"bucket_size_mb": 1e-6, "overlap": False}),
]


@pytest.mark.parametrize(
    ("ranks", "settings"), [*LAYOUTS, (1, {"offload": True}), (2, {"offload": True})], ids=str
)
@pytest.mark.parametrize("first", [0, 3])
def test_buckets_of_the_first_program_fit_the_others(ranks, settings, first, tmp_path):
    """Layers frozen and not any more, and other layers used: the same parts, and the bits of one
    process.
    """

    def trained(comm, settings):
        nn.manual_seed(0)
        net = Changing()
        if first:  # what is frozen or not used at first has a place as well
            net.a.requires_grad_(False)
            net.way = 1
        settings = {"shard_size": 4, "threads": 1, "device": "cpu", **settings}
        trainer = DistributedTrainer(net, optim.Adam(lr=0.01), comm=comm, **settings)
        images = data.load("mnist", train=True).take(22)
        parts = []
        for change in CHANGES[first:] + CHANGES[:first]:
            change(net)
            trainer.fit(data.DataLoader(images, batch_size=22), images, epochs=2, verbose=False)
            parts.append(trainer.stepper.engine.ownership._parts)
        assert all(p is parts[0] for p in parts)
        return trainer.weights_sha256(), trainer.evaluate(images)

    (one,) = mock.run(1, trained, {})
    if "offload" in settings:
        settings = {**settings, "offload": tmp_path}
    assert mock.run(ranks, trained, settings) == [one] * ranks


@pytest.mark.parametrize("name", ["lenet5", "mlp", "rows", "gpt-mini", "transformer"])
def test_built_in_models_on_many_ranks(name):
    def trained(comm, zero):
        return stepped(comm, name, 16, lambda: optim.SGD(lr=0.01), zero=zero).weights_sha256()

    (one,) = mock.run(1, trained, 0)
    for ranks in (5, 12) if name in TEXTS else (5, 6, 8, 10, 12, 16):
        for zero in (2, 3):
            assert set(mock.run(ranks, trained, zero)) == {one}, (ranks, zero)


def test_what_is_given_back_is_whole_pages_of_the_array_alone():
    whole = np.ones(1 << 20, np.float32)
    native.discard(whole[1000:-1000])
    assert whole[:1000].all() and whole[-1000:].all()
    assert not whole[3000:-3000].any() or sys.platform != "linux"
