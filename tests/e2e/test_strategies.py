"""Strategies as a user starts them, on processes."""

from __future__ import annotations

import json

import pytest

SHORT = ("--steps", 30, "--no-eval", "--no-progress", "--threads", 1)


@pytest.fixture(scope="module")
def alone(launch_once):
    return launch_once.result(*SHORT)


def test_the_bits_of_the_tree(launch, alone):
    for options in (
        ("--reduction", "hierarchical", "--ranks-per-node", 2),
        ("--reduction", "hierarchical"),
        ("--reduction", "parameter_server", "--servers", 2),
    ):
        assert launch.result(*SHORT, *options, ranks=4)["weights_sha256"] == alone["weights_sha256"]


def test_a_ring_over_buckets(launch, alone):
    ring = [
        launch.result(*SHORT, "--reduction", "ring", "--bucket-size-mb", 0.05, ranks=3)
        for _ in range(2)
    ]
    assert ring[0]["weights_sha256"] == ring[1]["weights_sha256"]
    assert ring[0]["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-3)


def test_top_k_says_what_it_sends(launch):
    done = launch.train(
        *SHORT, "--compression", "topk", "--json", launch.folder / "out.json", ranks=2
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((launch.folder / "out.json").read_text())
    assert result["bytes_per_step"] < 0.03 * result["bytes_per_step_uncompressed"]
    assert " KB/step sent (uncompressed 247" in done.stdout


def test_an_asynchronous_server_on_processes(launch):
    result = launch.result(
        *SHORT,
        "--reduction",
        "async_parameter_server",
        "--momentum",
        0.5,
        "--staleness",
        2,
        ranks=4,
    )
    record = result["history"][-1]
    assert result["steps"] == sum(record["steps_of_worker"].values()) == 30
    assert record["lead_largest"] <= 3


def test_local_sgd_on_processes(launch):
    results = [
        launch.result(*SHORT, "--reduction", "local_sgd", "--local-steps", 4, ranks=3)
        for _ in range(2)
    ]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]


def test_a_scaled_rate_is_printed(launch):
    done = launch.train(*SHORT, "--lr-scaling", "linear", "--base-batch-size", 256)
    assert "odyssey: learning rate 0.05 x 128 / 256 = 0.025\n" in done.stderr


def test_what_does_not_combine_is_one_line(launch):
    done = launch.train(*SHORT, "--reduction", "local_sgd", "--zero", 1, ranks=2)
    assert done.returncode == 64
    assert done.stderr.count("error") == 1
    assert "each rank needs a whole model; use zero=0" in done.stderr
