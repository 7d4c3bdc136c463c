"""A batch, or the last shard of one, with fewer samples than a shard is computed at its own
size: with the bits that it has when it is filled up with zeros, on all layouts.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from odyssey import data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.engine.engine import Engine
from odyssey.engine.programs import Programs
from odyssey.parallel.mesh import Mesh
from odyssey.train.trainer import DistributedTrainer

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 29, (80, 12)).astype(np.int32)
TEXTS = data.arrays(IDS[:, :-1].copy(), IDS[:, 1:].copy())
IMAGES = data.arrays(RNG.standard_normal((80, 2, 9, 8)).astype(np.float32), RNG.integers(0, 6, 80))


def texts() -> nn.Module:
    return nn.models.build(
        "gpt", seed=3, dropout=0.2, vocab_size=29, context=11, layers=2, heads=4, width=16
    )


def images() -> nn.Module:
    nn.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(8 * 3 * 3, 16), nn.ReLU(), nn.Linear(16, 6),
    )  # fmt: skip


#: Ways to share the work: (ranks that they need, settings).
LAYOUTS = (
    (1, {}),
    (1, {"execution": "eager"}),
    (1, {"bucket_size_mb": 1e-3}),
    (1, {"offload": "a folder", "bucket_size_mb": 1e-3}),
    *((2, {"zero": stage, "bucket_size_mb": 1e-3}) for stage in (0, 1, 2, 3)),
    (2, {"reduction": "parameter_server", "servers": 1}),
    (2, {"mesh": Mesh(pp=2)}),
    (2, {"mesh": Mesh(tp=2)}),
    (2, {"mesh": Mesh(pp=2), "pipeline_schedule": "gpipe"}),
    (4, {"mesh": Mesh(pp=2, tp=2)}),
)


def train(comm, model, batch, settings, sizes=None):
    """Weights and losses after two steps and an evaluation; `sizes`: gets those of the programs
    of a step.
    """
    trainer = DistributedTrainer(
        model(), optim.AdamW(lr=1e-2), comm=comm, device="cpu", seed=5, **{"threads": 1, **settings}
    )
    loader = data.DataLoader(TEXTS if model is texts else IMAGES, batch_size=batch, shuffle=True)
    losses = [trainer.train_step(each)[0] for each, _ in zip(loader, range(2), strict=False)]
    if sizes is not None:
        sizes.append([program.samples for program in trainer.stepper.engine.runners[-1].programs])
    return losses, trainer.evaluate(loader.dataset.take(37)).loss, trainer.weights_sha256()


def filled_up(monkeypatch):
    """As it was when all shards had one program, and a small batch whole groups of 16 samples."""
    size_of = Engine.shard_size_of

    def whole(self, samples):
        size = self.shard_size or 32
        small = samples if samples <= 4 else min(-(-samples // 16) * 16, size)
        return small if samples < size else size_of(self, samples)

    monkeypatch.setattr(Engine, "shard_size_of", whole)
    monkeypatch.setattr(Programs, "tail", lambda self, n, rest, form: n)


@pytest.mark.parametrize("seed", range(6))
def test_the_same_bits_as_filled_up(seed, monkeypatch, tmp_path):
    rng = random.Random(seed)
    drawn = []
    for _ in range(4):
        model, batch = (
            rng.choice((texts, texts, images)),
            rng.choice((5, 8, 9, 12, 13, 20, 31, 33, rng.randint(5, 40))),
        )
        least, layout = rng.choice(LAYOUTS)
        split = layout.get("mesh", Mesh()).tp  # which goes with products in fp32
        common = {
            "shard_size": rng.choice((5, 7, 16, 32)),
            "precision": rng.choice(("fp32", split and "fp32" or "bf16")),
        }
        settings = {**common, **layout, **({"offload": tmp_path} if "offload" in layout else {})}
        ranks = least * rng.randint(1, 2)
        drawn.append(
            (model, batch, common, settings, ranks, mock.run(ranks, train, model, batch, settings))
        )
    filled_up(monkeypatch)
    for model, batch, common, settings, ranks, found in drawn:
        one = mock.run(1, train, model, batch, common)[0]
        assert found == [one] * ranks, (
            f"{model.__name__}, batches of {batch}, {settings} on {ranks} ranks"
        )


@pytest.mark.parametrize(
    ("model", "batch", "size", "programs"),
    [
        (texts, 33, 16, [16, 1]),  # in lanes, as the other shards of its batch
        (texts, 8, 16, [8]),
        (texts, 20, 16, [16, 4]),
        (texts, 32, 16, [16]),
        (texts, 7, 3, [3, 1]),  # all in rows
        (images, 20, 16, [16]),  # four images take as many lanes as 16
        (images, 40, 32, [32, 8]),
        (images, 8, 32, [8]),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
@pytest.mark.parametrize(
    "layout", [{}, {"execution": "eager"}, {"bucket_size_mb": 1e-3, "zero": 3}], ids=str
)
def test_what_is_computed(model, batch, size, programs, layout):
    found, ranks = [], 1 + ("zero" in layout)
    mock.run(ranks, train, model, batch, {"shard_size": size, **layout}, found)
    assert found == [programs] * ranks


class Counting(nn.Module):
    """Its forward pass has a number of samples in it, or does something else with few of them."""

    def __init__(self, number):
        super().__init__()
        self.embed, self.number, self.fc = nn.Embedding(29, 8), number, nn.Linear(8, 29)

    def forward(self, ids):
        x = self.embed(ids)
        if not self.number:
            return F.tanh(self.fc(x)) if ids.shape[0] < 8 else self.fc(x)
        return self.fc(x.reshape(self.number * 11, 8)).reshape(self.number, 11, 29)


@pytest.mark.parametrize("number", [0, 8])
def test_a_model_that_counts_on_the_size_of_a_shard_gets_it(number):
    found = []
    settings = {"shard_size": 8, "threads": 2}

    def model():
        nn.manual_seed(3)
        return Counting(number)

    def run(comm, **more):
        trainer = DistributedTrainer(
            model(), optim.SGD(), comm=comm, device="cpu", **settings, **more
        )
        for batch in data.DataLoader(TEXTS.take(70), batch_size=35):
            trainer.train_step(batch)
        found.append([program.samples for program in trainer.stepper.engine.runners[-1].programs])
        return trainer.weights_sha256()

    one = mock.run(1, run)
    assert (
        mock.run(2, run) == one * 2
        and mock.run(1, lambda comm: run(comm, execution="eager")) == one
    )
    assert found == [[8]] * 4
