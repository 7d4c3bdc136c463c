"""Mixed precision as a user starts it: the same bits on any number of ranks, an fp16 overflow
skipped by all together, and the accuracy of float32.
"""

from __future__ import annotations

import functools
import json

import pytest

SHORT = ("--steps", 12, "--global-batch-size", 250, "--no-eval", "--no-progress")
LAYOUTS = [
    ((), 0),
    ((), 2),
    ((), 4),
    (("--threads", 2), 0),
    (("--num-gpus", 2), 2),
    (("--execution", "eager"), 0),
    (("--zero", 3), 2),
    (("--pp", 2), 2),
]


@pytest.fixture(scope="module")
def exact(launch_once):
    """Runs in float32, each once."""
    return functools.cache(launch_once.result)


@pytest.mark.parametrize(
    ("precision", "model"),
    [
        ("bf16", "lenet5"),
        pytest.param("fp16", "mlp", marks=pytest.mark.long),
        pytest.param("bf16", "mlp", marks=pytest.mark.long),
        pytest.param("fp16", "lenet5", marks=pytest.mark.long),
    ],
)
def test_the_same_bits_on_any_layout(launch, exact, precision, model):
    options = (*SHORT, "--precision", precision, "--model", model)
    results = [launch.result(*options, *more, ranks=ranks) for more, ranks in LAYOUTS]
    assert len({r["weights_sha256"] for r in results}) == 1
    assert len({r["train_loss"] for r in results}) == 1
    assert results[0]["precision"] == precision and results[0]["skipped_steps"] == 0
    assert results[0]["weights_sha256"] != exact(*SHORT, "--model", model)["weights_sha256"]


def test_convnet_with_dropout(launch):
    options = (
        "--model",
        "convnet",
        "--steps",
        2,
        "--global-batch-size",
        96,
        "--no-eval",
        "--no-progress",
    )
    hashes = {
        launch.result(*options, "--precision", "bf16", ranks=n)["weights_sha256"] for n in (0, 2, 3)
    }
    assert len(hashes) == 1


@pytest.mark.long
def test_small_shards_in_rows(launch):
    options = (
        "--steps",
        6,
        "--global-batch-size",
        20,
        "--shard-size",
        3,
        "--no-eval",
        "--no-progress",
    )
    for precision in ("bf16", "fp16"):
        hashes = {
            launch.result(*options, "--precision", precision, ranks=n)["weights_sha256"]
            for n in (0, 2)
        }
        assert len(hashes) == 1


def test_an_fp16_overflow_is_skipped_by_all_ranks_and_shown_once(launch):
    """2^26 is too much for the first gradients: all ranks skip together, and go on at the same
    scale.
    """
    options = (
        *SHORT,
        "--precision",
        "fp16",
        "--scaler-init-scale",
        2.0**26,
        "--json",
        launch.folder / "out.json",
    )
    done = launch.train(*options, ranks=2)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "skipped" in line]
    assert lines[0] == (
        "odyssey: [precision] step 1 skipped: gradients overflowed at loss scale 67108864; scale "
        "is now 33554432"
    )
    result = json.loads((launch.folder / "out.json").read_text())
    assert len(lines) == len(set(lines)) == result["skipped_steps"]
    assert result["loss_scale"] == 2.0 ** (26 - len(lines))
    assert result["steps"] == 12
    alone = launch.result(*options[:-2])
    for key in ("weights_sha256", "skipped_steps", "loss_scale", "train_loss"):
        assert alone[key] == result[key], key


@pytest.mark.parametrize(
    "layout", [("--zero", 2), pytest.param(("--pp", 2), marks=pytest.mark.long)]
)
def test_an_overflow_is_skipped_by_pipelines_and_zero_too(launch, layout):
    options = (*SHORT, "--precision", "fp16", "--scaler-init-scale", 2.0**26)
    alone, split = launch.result(*options), launch.result(*options, *layout, ranks=2)
    for key in ("weights_sha256", "skipped_steps", "loss_scale", "train_loss"):
        assert alone[key] == split[key], key
    assert split["skipped_steps"] > 3


def test_ranks_of_different_precision_are_refused(launch):
    script = launch.folder / "different.py"
    script.write_text(
        "from odyssey import DistributedTrainer, comm, nn, optim\n"
        "precision = ['fp32', 'bf16'][comm.world('auto').rank]\n"
        "DistributedTrainer(nn.models.build('mlp'), optim.SGD(), precision=precision)\n"
    )
    done = launch.python(script, ranks=2)
    assert done.returncode
    assert "the precision of rank 1 differs from that of rank 0" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lenet5_learns_as_well_as_in_float32(launch, exact, precision):
    """Two epochs; the whole recipe with three seeds is in docs/log.md."""
    options = ("--epochs", 2, "--no-progress")
    narrow = launch.result(*options, "--precision", precision)
    assert narrow["test_accuracy"] > 0.97
    assert abs(narrow["test_accuracy"] - exact(*options)["test_accuracy"]) < 0.006
    assert narrow["skipped_steps"] < 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--precision", "fp8"), "'fp8' is not one of 'fp32', 'tf32', 'bf16', 'fp16'"),
        (
            ("--scaler-init-scale", 4),
            "--scaler-init-scale applies only to --precision fp16, not fp32; remove it",
        ),
        (
            ("--precision", "bf16", "--scaler-growth-interval", 4),
            "applies only to --precision fp16, not bf16",
        ),
        (
            ("--precision", "fp16", "--scaler-init-scale", 1000),
            "init_scale is 1000; a power of two",
        ),
    ],
)
def test_refused(launch, options, words):
    done = launch.train(*options, "--steps", 1)
    assert done.returncode == 64
    assert words in done.stderr
