"""Targets with units: standardised in the loss, in their units everywhere else; from the command
line, on several ranks, resumed, and in the commands that use the model.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from odyssey import data, nn
from odyssey import functional as F
from odyssey.core.tensor import Tensor
from odyssey.errors import ConfigError

WORDS = ["--model", "mlp", "--dataset", "csv:t.csv", "--normalize", "--metrics", "mae"]
WORDS += ["--global-batch-size", "32", "--shard-size", "4", "-q", "--json", "out.json"]


def write_prices(folder, rows: int = 300, tail: float = 0.0) -> None:
    """Writes a table whose target is of the size of prices.

    tail: what the largest targets are multiplied by, if it is not 0.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3))
    price = 60_000 * np.exp(0.8 * x[:, 0] + 0.3 * x[:, 1]) + 10_000
    if tail:
        price[:: rows // 3] *= tail
    lines = [f"{a:.4f},{b:.4f},{c:.4f},{y:.2f}" for (a, b, c), y in zip(x, price, strict=True)]
    (folder / "t.csv").write_text("a,b,c,price\n" + "\n".join(lines) + "\n")


def run(launch, *more, ranks: int = 0) -> dict:
    done = launch.python("-m", "odyssey", "train", *WORDS, *more, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return json.loads((launch.folder / "out.json").read_text())


def targets_of_test_part(launch) -> np.ndarray:
    """Returns the targets of the test part of t.csv."""
    return data.opened("csv", launch.folder / "t.csv", train=False).labels[:, 0]


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--log-target", "--loss", "smooth_l1"),
        pytest.param(("--loss", "l1"), marks=pytest.mark.long),
    ],
)
def test_same_bits_on_ranks_and_resumed_in_units(launch, more):
    write_prices(launch.folder)
    more = (*more, "--schedule", "constant", "--warmup-steps", "0", "--epochs", "4")
    alone = run(launch, *more)
    for ranks in (2, 3):
        shared = run(launch, *more, ranks=ranks)
        assert shared["weights_sha256"] == alone["weights_sha256"]
        assert shared["history"][-1]["test_mae"] == alone["history"][-1]["test_mae"]
    run(launch, *more, "--steps", 13, "--run-dir", "run", ranks=2)
    resumed = run(launch, *more, "--run-dir", "run", ranks=3)
    assert resumed["weights_sha256"] == alone["weights_sha256"]
    test = targets_of_test_part(launch)
    said = launch.python("-m", "odyssey", "predict", "run", "t.csv", "--json")
    assert said.returncode == 0, said.stderr
    outputs = np.array([json.loads(line)["output"][0] for line in said.stdout.splitlines()])
    targets = data.csv(launch.folder / "t.csv").labels[:, 0]
    part = np.isin(targets, test)
    mae = np.abs(outputs[part] - targets[part]).mean()
    assert mae == pytest.approx(resumed["history"][-1]["test_mae"], rel=1e-3)
    said = launch.python("-m", "odyssey", "evaluate", "run", "--json", ranks=2)
    found = json.loads(said.stdout)
    assert found["loss"] == pytest.approx(resumed["test_loss"], rel=1e-5)
    assert found["mae"] == pytest.approx(resumed["history"][-1]["test_mae"], rel=1e-5)
    assert resumed["test_loss"] < 2  # of standardised numbers


def test_a_heavy_tail_trains(launch):
    write_prices(launch.folder, 600, tail=1e5)
    test = targets_of_test_part(launch)
    train = data.opened("csv", launch.folder / "t.csv", train=True).labels[:, 0]
    constant = np.abs(test - np.median(train)).mean()
    assert train.max() / train.mean() > 100
    done = launch.python("-m", "odyssey", "train", *WORDS[:-3], "--epochs", 2)
    assert done.returncode == 0 and "standard deviations from the mean" in done.stderr
    for more in (("--log-target",), ("--log-target", "--loss", "smooth_l1")):
        figures = run(launch, *more, "--epochs", 15, "--lr", "0.003")
        assert np.isfinite(figures["train_loss"])
        assert figures["history"][-1]["test_mae"] < 0.6 * constant


@pytest.mark.parametrize("optimizer", ["sgd --lr 0.005", "adam", "rmsprop"])
def test_rates_do_not_depend_on_the_size_of_targets(launch, optimizer):
    write_prices(launch.folder)
    figures = run(launch, "--optimizer", *optimizer.split(), "--epochs", 3)
    assert figures["test_loss"] < 1.0


def test_classes_can_be_weighted(launch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    kinds = np.where(x[:, 0] > 1.6, "rare", "often")
    lines = [f"{a:.3f},{b:.3f},{kind}" for (a, b), kind in zip(x, kinds, strict=True)]
    (launch.folder / "t.csv").write_text("a,b,kind\n" + "\n".join(lines))
    words = [*WORDS[:4], *WORDS[7:], "--metrics", "recall,accuracy", "--steps", "24"]
    figures = {}
    for more in ((), ("--class-weights", "balanced")):
        bits = set()
        for ranks in (0, 2, 3):
            done = launch.python("-m", "odyssey", "train", *words, *more, ranks=ranks)
            assert done.returncode == 0, done.stderr
            out = json.loads((launch.folder / "out.json").read_text())
            bits.add(out["weights_sha256"])
        assert len(bits) == 1
        figures[bool(more)] = out["history"][-1]
    assert figures[True]["train_recall"] > figures[False]["train_recall"] + 0.2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--class-weights", "balanced"], "--class-weights balanced is for classes"),
        (["--loss", "cross_entropy"], "'cross_entropy' is not one of 'mse', 'l1', 'smooth_l1'"),
        (["--skip-unreadable"], "--skip-unreadable applies only to --dataset image-folder"),
    ],
)
def test_what_does_not_fit_numbers_is_named(launch, words, message):
    write_prices(launch.folder, 40)
    done = launch.python("-m", "odyssey", "train", *WORDS, *words)
    assert done.returncode == 64 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


def test_a_log_needs_targets_of_at_least_0(launch):
    (launch.folder / "t.csv").write_text("a,y\n" + "".join(f"{i},{i - 3}.5\n" for i in range(30)))
    done = launch.python("-m", "odyssey", "train", *WORDS, "--log-target", "--steps", 2)
    assert done.returncode == 64 and "--log-target needs targets of at least 0" in done.stderr


def test_whole_numbers_are_numbers_if_a_loss_says_so(launch):
    lines = [f"{i % 7},{1000 + 3 * (i % 7)}" for i in range(60)]
    (launch.folder / "t.csv").write_text("a,y\n" + "\n".join(lines))
    figures = run(launch, "--loss", "mse", "--epochs", 3, "--run-dir", "run")
    assert figures["history"][-1]["test_mae"] < 20
    said = launch.python("-m", "odyssey", "evaluate", "run")
    assert said.returncode == 0 and "mae" in said.stdout, said.stderr


# --- the layer and the loss ---------------------------------------------------------------------


@pytest.mark.parametrize("log", [False, True])
def test_the_loss_is_that_of_standardised_numbers(log):
    rng = np.random.default_rng(0)
    targets = rng.gamma(1.0, 5000.0, (32, 2)).astype(np.float32)
    z = rng.normal(size=(32, 2)).astype(np.float32)
    measured = np.log1p(targets.astype(np.float64)) if log else targets.astype(np.float64)
    scale = (measured.mean(0).tolist(), measured.std(0).tolist(), log)
    outputs = nn.TargetScale(*scale)(Tensor(z))
    loss = nn.ScaledLoss("smooth_l1", *scale)(outputs, targets)
    standardised = ((measured - measured.mean(0)) / measured.std(0)).astype(np.float32)
    expected = F.smooth_l1_loss(Tensor(z), standardised)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("huber",), "loss is 'huber'; choose from mse, l1, smooth_l1"),
        (("mse", [0.0], [0.0]), "a deviation above 0"),
        (("mse", [0.0, 1.0], [1.0]), "give a finite mean, and a deviation above 0"),
        (("mse", [np.nan], [1.0]), "give a finite mean"),
    ],
)
def test_what_is_wrong_with_a_scale_is_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        nn.ScaledLoss(*arguments)
