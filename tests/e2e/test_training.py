"""Whole trainings with the real trainer: accuracy, the files they write, and how they end when
something is wrong.
"""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from odyssey import data, nn, optim
from odyssey.train.trainer import DistributedTrainer

SHORT = ("--steps", 3, "--no-eval", "--no-progress")
MNIST = Path(data.__file__).parent / "mnist"


@pytest.mark.long
def test_default_training_reaches_98_9_percent(launch):
    result = launch.result("--num-gpus", 4, "--device", "cpu", timeout=300)
    assert result["test_accuracy"] >= 0.989
    assert result["workers"] == 4
    assert len(result["history"]) == result["epochs"]
    assert result["history"][-1]["train_loss"] < result["history"][0]["train_loss"]


# --- weights ---


def test_saved_weights_are_those_of_the_hash(launch):
    """The arena's bytes, rebuilt from the file: every parameter in order, each filled up to a
    vector.
    """
    path = launch.folder / "weights.safetensors"
    result = launch.result(*SHORT, "--save-weights", path, ranks=2)
    weights = load_file(path)
    model = nn.LeNet5()
    assert set(weights) == {name for name, _ in model.named_parameters()}
    flat = [
        np.pad(weights[name].ravel(), (0, -p.size % 16)) for name, p in model.named_parameters()
    ]
    assert hashlib.sha256(np.concatenate(flat).tobytes()).hexdigest() == result["weights_sha256"]
    model.load_state_dict(weights)
    assert DistributedTrainer(model, optim.SGD()).weights_sha256() == result["weights_sha256"]


def test_python_and_the_command_line_train_the_same(launch):
    result = launch.result(*SHORT, "--lr", 0.02, "--momentum", 0.5, "--weight-decay", 0.01, "--schedule", "constant",
                           "--warmup-steps", 0, "--seed", 3)  # fmt: skip
    model = nn.models.build("lenet5", seed=3)
    optimizer = optim.SGD(lr=0.02, momentum=0.5, weight_decay=0.01)
    trainer = DistributedTrainer(model, optimizer, seed=3)
    history = trainer.fit(
        data.DataLoader(data.load("mnist", train=True), 128, shuffle=True, seed=3), steps=3
    )
    assert trainer.weights_sha256() == result["weights_sha256"]
    assert history.train_loss == result["train_loss"]


def test_a_training_of_ones_own_arrays(launch):
    """Two clouds of points that a line separates, learned by a model of one's own, evaluated on
    other points.
    """
    rng = np.random.default_rng(0)
    points = rng.standard_normal((600, 2)).astype(np.float32)
    labels = (points.sum(1) > 0).astype(int)
    nn.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    trainer = DistributedTrainer(model, optim.Adam(lr=0.05), num_gpus=2, device="cpu", shard_size=8)
    train, test = data.arrays(points[:500], labels[:500]), data.arrays(points[500:], labels[500:])
    history = trainer.fit(
        data.DataLoader(train, 50, shuffle=True), data.DataLoader(test, 30), epochs=6
    )
    assert history.test_accuracy > 0.95
    assert history.best_accuracy == max(r["test_accuracy"] for r in history.records)
    assert (len(history.records), history.steps, history.samples) == (6, 60, 3000)
    result = trainer.evaluate(test)
    assert (result.accuracy, result.samples) == (history.test_accuracy, 100)


# --- what goes wrong ---


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_training_that_diverges_stops_at_the_step_and_writes_nothing(launch, ranks):
    weights, results = launch.folder / "w.safetensors", launch.folder / "r.json"
    done = launch.train(
        "--lr",
        1e6,
        "--no-eval",
        "--no-progress",
        "--save-weights",
        weights,
        "--json",
        results,
        ranks=ranks,
    )
    assert done.returncode == 65
    lines = [line for line in done.stderr.splitlines() if "not finite" in line]
    assert len(lines) == 1, done.stderr
    assert (
        lines[0].startswith("odyssey: error: [train] the ")
        and " is not finite at step " in lines[0]
    )
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(launch.folder.iterdir()) == []


def test_a_step_that_diverges_changes_nothing():
    nn.manual_seed(0)
    trainer = DistributedTrainer(nn.Linear(3, 2), optim.SGD(lr=0.1, momentum=0.9))
    x, y = np.ones((8, 3), np.float32), np.zeros(8, int)
    trainer.fit([(x, y)])
    before = (
        trainer.weights_sha256(),
        trainer.optimizer.state_dict()["momentum"].tobytes(),
        trainer.steps,
    )
    with pytest.raises(Exception, match="the loss is not finite at step 2"):
        trainer.fit([(np.full((8, 3), 3e38, np.float32), y)])
    assert (
        trainer.weights_sha256(),
        trainer.optimizer.state_dict()["momentum"].tobytes(),
        trainer.steps,
    ) == before
    trainer.fit([(x, y)])
    assert trainer.steps == 2, "it goes on with good data"


def broken(folder: Path, how: str) -> Path:
    folder.mkdir()
    for path in MNIST.glob("*.gz"):
        (folder / path.name).write_bytes(path.read_bytes())
    images = folder / "train-images-idx3-ubyte.gz"
    if how == "torn":
        images.write_bytes(images.read_bytes()[:100_000])
    elif how == "altered":
        raw = bytearray(gzip.decompress(images.read_bytes()))
        raw[2] = 0x0D  # floats, it says
        images.write_bytes(gzip.compress(bytes(raw), 1))
    else:
        images.unlink()
    return folder


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ("torn", 0),
        ("altered", 0),
        ("missing", 0),
        ("torn", 2),
        pytest.param("altered", 2, marks=pytest.mark.long),
        pytest.param("missing", 2, marks=pytest.mark.long),
    ],
)
def test_data_that_is_broken(launch, how, ranks):
    done = launch.train(*SHORT, "--data-dir", broken(launch.folder / "data", how), ranks=ranks)
    assert done.returncode == 65, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("odyssey: ")]
    assert 1 <= len(lines) <= max(ranks, 1)
    assert all("error: " in line and "train-images" in line for line in lines)


@pytest.mark.parametrize("ranks", [0, 3])
@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--global-batch-size", 0), 64, "global"),
        (("--model", "resnet"), 64, "resnet"),
        (("--device", "gpu", "--num-gpus", 64, "--global-batch-size", 8192), 69, "--device"),
        (("--save-weights", "nowhere/weights.safetensors"), 73, "nowhere"),
        (("--json", "."), 73, "--json"),
    ],
)
def test_settings_that_cannot_be(launch, options, code, says, ranks):
    done = launch.train(*SHORT, *options, ranks=ranks)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("odyssey: ")]
    assert len(lines) == 1, done.stderr
    assert says in lines[0]
    assert done.stdout == ""


def test_more_ranks_than_shards(launch):
    short = (*SHORT, "--steps", 5, "--global-batch-size", 32)
    alone, idle = (launch.train(*short, ranks=ranks) for ranks in (0, 3))
    assert idle.returncode == 0 and "idle" not in alone.stderr
    assert (
        idle.stderr.count("3 workers but 2 shards (global batch 32, shard size 16): 1 is idle") == 1
    )
    assert idle.stdout.split("weights")[1] == alone.stdout.split("weights")[1]
