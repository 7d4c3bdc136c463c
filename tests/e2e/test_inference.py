"""`odyssey verify --inference`: outputs have the same bits in any batch, in a training, and from
a cache.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from odyssey import DistributedTrainer, Tensor, data, nn, no_grad, optim
from odyssey import functional as F
from odyssey.train.inference import ways

WAYS = [
    "one by one",
    "random batches",
    "forward pass of a training step",
    "texts that go on from a cache",
]


@pytest.mark.parametrize("model", ["gpt-mini", "lenet5"])
def test_a_run(model, launch, tmp_path):
    own = ["--global-batch-size", 6] if model == "gpt-mini" else []
    words = [
        "train",
        "--model",
        model,
        "--steps",
        2,
        "--no-eval",
        "-q",
        "--run-dir",
        tmp_path / "run",
    ]
    assert launch.python("-m", "odyssey", *words, *own).returncode == 0
    words = [
        "verify",
        "--inference",
        tmp_path / "run",
        "--samples",
        20,
        "--json",
        tmp_path / "v.json",
    ]
    done = launch.python("-m", "odyssey", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "v.json").read_text())["results"]
    assert [way["name"] for way in found] == WAYS[: 4 if model == "gpt-mini" else 3]
    assert all(way["same"] and way["values"] > 0 for way in found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--inference", "nowhere"], "no valid checkpoint"),
        (["--inference", "run", "--layouts", "dp=2"], "goes without 'dp=2'"),
        (["--samples", "3", "--layouts", "dp=2"], "--samples is for --inference"),
        ([], "give --layouts, e.g. dp=2 tp=2, or --inference RUN"),
    ],
)
def test_what_is_refused(launch, words, message):
    done = launch.python("-m", "odyssey", "verify", *words)
    assert (
        done.returncode in (64, 65) and message in done.stderr and "Traceback" not in done.stderr
    ), done.stderr


class Net(nn.Module):
    """Of odd sizes, with what a training computes otherwise than an evaluation."""

    def __init__(self, channels: int, width: int, p: float) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.fc1, self.fc2 = nn.Linear(channels * 35, width), nn.Linear(width, 5)
        self.drop, self.loss = nn.Dropout(p), nn.CrossEntropyLoss()

    def forward(self, x):
        return self.fc2(self.drop(F.gelu(self.fc1(F.flatten(F.relu(self.norm(self.conv(x))))))))


def made(kind, *given):
    nn.manual_seed(1)
    return kind(*given)


def pictures(n=37):
    rng = np.random.default_rng(2)
    x = rng.integers(0, 256, (n, 3, 5, 7), np.uint8)
    return data.arrays(
        x, rng.integers(0, 5, n), classes=5, scale=[0.013, 0.017, 0.019], shift=[-0.4, 0.1, 0.3]
    )


@pytest.mark.parametrize("seed", range(3))
def test_pictures_in_random_batches(seed):
    rng = np.random.default_rng(seed)
    given = int(rng.integers(1, 20)), int(rng.integers(1, 40)), 0.3
    found = list(ways(lambda: made(Net, *given), pictures(), max_samples=30, seed=seed))
    assert [str(way.difference) for way in found] == ["None"] * 3
    assert found[2].name == "forward pass of a training's evaluation"


@pytest.mark.parametrize("seed", range(4))
def test_random_gpts_and_prompts(seed):
    rng = np.random.default_rng(seed)
    heads, t = int(rng.integers(1, 5)), int(rng.integers(2, 40))
    sizes = {"vocab_size": int(rng.integers(2, 90)), "context": t, "layers": 2, "heads": heads}
    sizes |= {"width": heads * int(rng.integers(1, 13)), "bias": bool(rng.integers(2))}
    ids = rng.integers(0, sizes["vocab_size"], (23, t + 1)).astype(np.int32)

    def load():
        model = nn.models.build("gpt", seed=seed, **sizes)
        draws = np.random.default_rng(seed)
        for p in model.parameters():
            p.data[...] += draws.standard_normal(p.shape).astype(np.float32) * 0.2
        return model

    found = list(ways(load, data.arrays(ids[:, :-1], ids[:, 1:]), seed=seed))
    assert [way.name for way in found] == WAYS
    assert [str(way.difference) for way in found] == ["None"] * 4, sizes


def test_a_model_that_looks_at_its_batch_is_found():
    class Mean(Net):
        def forward(self, x):
            return super().forward(x - x.mean(0, True))

    found = list(ways(lambda: made(Mean, 2, 3, 0.0), pictures(9)))
    assert not any(way.same for way in found) and "output of sample 0[" in str(found[0])
    with no_grad():
        assert made(Mean, 2, 3, 0.0)(Tensor(np.zeros((2, 3, 5, 7), np.float32))).shape == (2, 5)


class Deep(nn.Module):
    """With convolutions that Winograd's algorithm computes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.fc, self.loss = nn.Linear(32 * 144, 5), nn.CrossEntropyLoss()

    def forward(self, x):
        return self.fc(F.flatten(F.relu(self.conv2(F.relu(self.conv1(x))))))


def test_predictions_are_computed_as_the_training_was():
    """A training by Winograd's algorithm has other last bits than a direct one, and its
    predictions have its own.
    """
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(20, 1, 12, 12)).astype(np.float32), rng.integers(0, 5, 20)
    outputs = {}
    for algorithm in ("direct", "winograd"):
        found = list(
            ways(lambda: made(Deep), data.arrays(x, y), max_samples=20, algorithm=algorithm)
        )
        assert len(found) == 3 and all(way.same for way in found), found
        trainer = DistributedTrainer(made(Deep), optim.SGD(lr=0.1), conv_algorithm=algorithm)
        outputs[algorithm] = trainer.predict(data.arrays(x, y))
    assert not np.array_equal(outputs["direct"], outputs["winograd"])
    np.testing.assert_allclose(outputs["direct"], outputs["winograd"], atol=1e-4)
