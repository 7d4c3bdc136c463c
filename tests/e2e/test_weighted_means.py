"""weight= of odyssey's own models: loss and gradient are divided by the sum of the weights, so a
mean over tokens, or with class weights, is that of the whole batch on any layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.errors import ConfigError
from odyssey.parallel.mesh import Mesh

WORDS = 11
TOKENS = 7
SAMPLES = 22
CLASS_WEIGHTS = np.linspace(0.2, 3, WORDS).astype(np.float32)


def texts(empty: bool = False) -> data.ArrayDataset:
    """Returns texts of random lengths, with labels of -100 after their end.

    empty: True if no label counts.
    """
    rng = np.random.default_rng(1)
    ids = rng.integers(0, WORDS, (SAMPLES, TOKENS)).astype(np.int32)
    lengths = np.zeros(SAMPLES, int) if empty else rng.integers(0, TOKENS + 1, SAMPLES)
    labels = np.where(np.arange(TOKENS) < lengths[:, None], ids[:, ::-1], -100)
    return data.arrays(ids, labels.astype(np.int32), classes=0)


def rows() -> data.ArrayDataset:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(SAMPLES, 6)).astype(np.float32)
    return data.arrays(x, rng.integers(0, WORDS, SAMPLES).astype(np.int32), classes=WORDS)


class TextNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.first = nn.Linear(16, 24)
        self.last = nn.Linear(24, WORDS)

    def forward(self, x: Any) -> Any:
        return self.last(F.tanh(self.first(self.words(x))))


def row_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, WORDS))


def has_label(output: Any, target: Any) -> Any:
    return target >= 0


def class_weight(output: Any, target: Any) -> Any:
    """Returns the weights of the classes of the targets; -1, of no sample, has none."""
    total = (target == 0) * float(CLASS_WEIGHTS[0])
    for number in range(1, WORDS):
        total = total + (target == number) * float(CLASS_WEIGHTS[number])
    return total


CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "tokens": (texts, TextNet, nn.CrossEntropyLoss(), has_label),
    "classes": (rows, row_net, nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), class_weight),
}


def make_trainer(kind: str, comm: Any = None, **settings: Any) -> DistributedTrainer:
    _, model, loss, weight = CASES[kind]
    nn.manual_seed(3)
    where = {"comm": comm} if comm is not None else {"backend": "local"}
    options = {"shard_size": 8, "threads": 1, "device": "cpu", **where, **settings}
    options.setdefault("weight", weight)
    return DistributedTrainer(model(), optim.SGD(lr=0.3, momentum=0.9), loss=loss, **options)


def train(kind: str, comm: Any = None, **settings: Any) -> tuple[str, float, float]:
    samples = CASES[kind][0]()
    trainer = make_trainer(kind, comm, **settings)
    loader = data.DataLoader(samples, batch_size=13, shuffle=True, seed=3)
    history = trainer.fit(loader, epochs=3, verbose=False)
    return trainer.weights_sha256(), history.train_loss, trainer.evaluate(samples).loss


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("shard_size", [3, 4, 16, 22])
@pytest.mark.parametrize("kind", CASES)
def test_the_loss_is_the_weighted_mean_of_the_batch(kind, shard_size):
    samples = CASES[kind][0]()
    trainer = make_trainer(kind, shard_size=shard_size)
    x = np.asarray(samples.images)
    y = np.asarray(samples.labels)
    p = log_softmax(np.asarray(trainer.predict(samples), np.float64))
    weights = (y >= 0).astype(float) if kind == "tokens" else CLASS_WEIGHTS[y].astype(float)
    of_targets = np.take_along_axis(p, np.maximum(y, 0)[..., None], -1)[..., 0]
    expected = -(weights * of_targets).sum() / weights.sum()
    assert trainer.evaluate(samples).loss == pytest.approx(expected, rel=2e-6)
    trainer.fit(data.DataLoader(samples, batch_size=len(x)), epochs=1, verbose=False)
    assert trainer.last.loss / len(x) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("kind", CASES)
def test_a_step_is_that_of_one_shard(kind, clip_norm):
    """Up to rounding; without a weight it is another step."""
    samples = CASES[kind][0]()
    trained = []
    for options in (
        {"shard_size": SAMPLES},
        {"shard_size": 4},
        {"shard_size": 4, "weight": None},
    ):
        trainer = make_trainer(kind, clip_norm=clip_norm, **options)
        loader = data.DataLoader(samples, batch_size=SAMPLES)
        trainer.fit(loader, epochs=1, verbose=False)
        trained.append(np.concatenate([a.ravel() for a in trainer.state_dict().values()]))
    whole, weighted, unweighted = trained
    assert np.abs(weighted - whole).max() < 1e-6
    if clip_norm is None:
        assert np.abs(unweighted - whole).max() > 1e-3


LAYOUTS = {
    "eager": (1, {"execution": "eager"}),
    "two workers": (1, {"num_gpus": 2, "threads": 2}),
    "three ranks": (3, {}),
    "buckets": (2, {"bucket_size_mb": 1e-4}),
    "ZeRO 1": (2, {"zero": 1}),
    "ZeRO 2": (3, {"zero": 2}),
    "ZeRO 3": (3, {"zero": 3}),
    "pipeline": (2, {"mesh": Mesh(pp=2)}),
    "layers shared": (2, {"mesh": Mesh(tp=2)}),
}


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[str, float, float]]:
    return {kind: train(kind) for kind in CASES}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", CASES)
def test_it_has_the_same_bits_on_any_layout(alone, kind, layout):
    ranks, settings = LAYOUTS[layout]
    if ranks == 1:
        results = [train(kind, **settings)]
    else:
        results = mock.run(ranks, lambda comm: train(kind, comm, **settings))
    assert set(results) == {alone[kind]}


def test_a_batch_without_a_weight_changes_nothing(capsys):
    trainer = make_trainer("tokens", nonfinite="skip")
    before = trainer.weights_sha256()
    loader = data.DataLoader(texts(empty=True), batch_size=SAMPLES)
    trainer.fit(loader, epochs=1, verbose=False)
    assert trainer.weights_sha256() == before
    assert "no mean over samples" not in capsys.readouterr().err
    trainer.fit(data.DataLoader(texts(), batch_size=SAMPLES), epochs=1, verbose=False)
    assert trainer.weights_sha256() != before


def test_errors():
    with pytest.raises(ConfigError, match="weight is 2; use a function of"):
        make_trainer("tokens", weight=2)
    with pytest.raises(ConfigError, match="isn't supported with reduction='local_sgd'"):
        make_trainer("tokens", reduction="local_sgd")
    trainer = make_trainer("tokens", weight=lambda output, target: 3)
    with pytest.raises(ConfigError, match="weight= gave a int; it must give a Tensor"):
        trainer.fit(data.DataLoader(texts(), batch_size=SAMPLES), epochs=1, verbose=False)


def test_a_loss_that_divides_itself_is_told(capsys):
    """A shard's sum over tokens / its tokens: a line says how it is written with weight=."""

    def masked(output: Any, target: Any) -> Any:
        mask = target >= 0
        p = F.log_softmax(output)
        return F.sum(p * p) / (F.sum(mask) + 1.0)

    nn.manual_seed(3)
    trainer = DistributedTrainer(
        TextNet(), optim.SGD(lr=0.1), loss=masked, shard_size=4, backend="local", device="cpu"
    )
    trainer.fit(data.DataLoader(texts(), batch_size=16), epochs=1, verbose=False)
    line = capsys.readouterr().err
    assert "the loss is no mean over samples" in line
    assert "what it is divided by as weight=" in line


def test_a_run_resumes_with_its_weight_only(tmp_path):
    samples = texts()
    loader = data.DataLoader(samples, batch_size=SAMPLES)
    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "verbose": False}
    make_trainer("tokens").fit(loader, epochs=1, **saving)
    resumed = make_trainer("tokens")
    resumed.fit(loader, epochs=2, **saving)
    whole = make_trainer("tokens")
    whole.fit(loader, epochs=2, verbose=False)
    assert resumed.weights_sha256() == whole.weights_sha256()
    with pytest.raises(ConfigError, match='made with loss "CrossEntropyLoss, weighted"'):
        make_trainer("tokens", weight=None).fit(loader, epochs=3, **saving)
