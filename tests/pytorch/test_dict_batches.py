"""Batches that are dicts, as Hugging Face's loaders give them, in
odyssey.torch.DistributedTrainer.
"""

from __future__ import annotations

import collections
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed (extra [torch])", allow_module_level=True)

import torch
from torch import nn
from torch.nn import functional as F

from odyssey.errors import ConfigError
from odyssey.torch import DataLoader, DistributedTrainer

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3


class Classifier(nn.Module):
    """Takes and gives what Hugging Face's models do; `kind` makes the output."""

    def __init__(self, kind: Any = SimpleNamespace) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.line, self.kind = nn.Linear(6, 3), kind

    def forward(self, values: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.line(values)
        if self.kind is None:
            return logits
        loss = {} if labels is None else {"loss": F.cross_entropy(logits, labels)}
        return self.kind(logits=logits, **loss)


SAMPLES = [{"values": X[i], "labels": Y[i]} for i in range(40)]
WHOLE = [{"values": X[a : a + 20], "labels": Y[a : a + 20]} for a in (0, 20)]


def made(module: nn.Module, **settings: Any) -> DistributedTrainer:
    return DistributedTrainer(module, torch.optim.SGD(module.parameters(), lr=0.1), **settings)


@pytest.mark.parametrize("kind", [SimpleNamespace, dict])
@pytest.mark.parametrize(
    "loader",
    [
        WHOLE,
        [collections.UserDict(batch) for batch in WHOLE],  # as a tokenizer gives them
        torch.utils.data.DataLoader(SAMPLES, 20),
        DataLoader(SAMPLES, 20),
    ],
    ids=["dicts", "mappings", "torch's", "ours"],
)
def test_the_loss_is_the_outputs_and_bits_are_those_of_pairs(kind, loader):
    pairs = made(Classifier(None), shard_size=8)
    halves = [(X[:20], Y[:20]), (X[20:], Y[20:])]
    expected = pairs.fit(halves)
    trainer = made(Classifier(kind), shard_size=8)
    history = trainer.fit(loader)
    assert history.records[0]["train_loss"] == expected.records[0]["train_loss"]
    assert history.records[0]["train_accuracy"] == expected.records[0]["train_accuracy"]
    assert trainer.weights_sha256() == pairs.weights_sha256()
    assert trainer.evaluate(loader) == pairs.evaluate(halves)
    assert torch.equal(trainer.predict(loader), pairs.predict(X))


def test_a_loss_and_metrics_of_ones_own():
    def halved(out: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(out.logits, batch["labels"]) / 2

    trainer = made(
        Classifier(), shard_size=8, metrics={"top5": "top5", "own": lambda out, batch: out.loss}
    )
    twice = made(
        Classifier(),
        loss=halved,
        shard_size=8,
        metrics={"first": lambda out, batch: batch["values"][:, 0]},
    )
    found, half = trainer.evaluate(WHOLE), twice.evaluate(WHOLE)
    assert half.loss == pytest.approx(found.loss / 2)
    assert half.metrics["first"] == pytest.approx(float(X[:, 0].mean()), rel=1e-5)
    assert found.metrics["own"] == pytest.approx(found.loss) and found.metrics["top5"] == 1.0


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 1)

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.line(values)
        return {"loss": F.mse_loss(logits.squeeze(-1), labels), "logits": logits}


def test_one_number_per_sample_is_compared_with_labels_of_the_same_shape():
    trainer = made(Regression(), shard_size=8, metrics=["mse"])
    found = trainer.evaluate([{"values": X, "labels": X[:, 0].contiguous()}])
    assert found.metrics["mse"] == pytest.approx(found.loss) and found.accuracy is None


@pytest.mark.parametrize(
    ("module", "settings", "says"),
    [
        (
            Classifier(None),
            {},
            "the output, a Tensor, has no loss; give batches with the labels .* or the trainer "
            "loss",
        ),
        (Classifier(), {}, "the output, a SimpleNamespace, has no loss"),
        (Classifier(dict), {}, "the output, a dict, has no loss"),
        (
            Classifier(),
            {"metrics": ["mae"], "loss": lambda out, batch: out.logits.mean()},
            "batch.'labels'., and these are not there; give metrics=",
        ),
    ],
    ids=["tensor", "object", "dict", "metric"],
)
def test_what_is_not_there_is_said_in_a_line(module, settings, says):
    with pytest.raises(ConfigError, match=says) as caught:
        made(module, **settings).fit([{"values": X}])
    assert "\n" not in str(caught.value)


def test_predictions_of_several_lengths_are_refused():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, values: torch.Tensor) -> Any:
            return SimpleNamespace(logits=values * self.scale)

    trainer = made(Tokens())
    with pytest.raises(
        ConfigError,
        match=r"outputs have the shapes \[\(3,\), \(6,\)\]; pad all batches to one length",
    ):
        trainer.predict([{"values": X}, {"values": X[:, :3]}])


# --- the shard size of loader and trainer ---


@pytest.mark.parametrize(
    ("trainers", "loaders", "validations", "size"),
    [
        (8, None, None, 8),
        (None, 5, None, 5),
        (None, None, None, 32),
        (None, None, 4, 4),
        (8, 8, None, 8),
    ],
)
def test_the_shard_size_that_was_given_is_that_of_both(trainers, loaders, validations, size):
    trainer = made(Classifier(), shard_size=trainers)
    loader = DataLoader(SAMPLES, 20, shard_size=loaders)
    validation = DataLoader(SAMPLES, 40, shard_size=validations)
    history = trainer.fit(loader, validation)
    assert (trainer.shard_size, loader.shard_size, validation.shard_size) == (size, size, size)
    same = made(Classifier(), shard_size=size)
    assert same.fit(WHOLE, WHOLE).test_loss == pytest.approx(history.test_loss)
    assert same.weights_sha256() == trainer.weights_sha256()


def test_a_training_that_goes_on_with_the_checkpoints_shard_size(tmp_path):
    hashes = set()
    for steps in (1, 2):
        trainer = made(Classifier(), shard_size=5 if steps == 1 else None)
        trainer.fit(DataLoader(SAMPLES, 20), steps=steps, checkpoint_dir=tmp_path)
    hashes.add(trainer.weights_sha256())
    trainer = made(Classifier(), shard_size=5)
    trainer.fit(DataLoader(SAMPLES, 20))
    assert hashes == {trainer.weights_sha256()}


def test_two_shard_sizes_that_were_given_are_refused():
    says = "the DataLoader's shard_size is 5, and .* is 8; set both the same, or only one"
    for fit in (
        lambda t, loader: t.fit(loader),
        lambda t, loader: t.evaluate(loader),
        lambda t, loader: t.predict(loader),
    ):
        with pytest.raises(ConfigError, match=says):
            fit(made(Classifier(), shard_size=8), DataLoader(SAMPLES, 20, shard_size=5))
    with pytest.raises(ConfigError, match="the DataLoader's shard_size is 4, and .* is 5"):
        made(Classifier()).fit(
            DataLoader(SAMPLES, 20, shard_size=5), DataLoader(SAMPLES, 20, shard_size=4)
        )


def test_float64_stays_float64():
    """As in PyTorch alone, which adds no float64 to float32 weights."""
    seen = set()

    class Looking(Classifier):
        def forward(self, values: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            seen.add(values.dtype)
            return super().forward(values.float(), labels)

    double = [{"values": X.double(), "labels": Y}]
    trainer = made(Looking())
    trainer.fit(double)
    trainer.predict([X.double().numpy()])
    assert seen == {torch.float64}
    with pytest.raises(RuntimeError, match="Double and Float"):
        made(Classifier()).fit(double)
