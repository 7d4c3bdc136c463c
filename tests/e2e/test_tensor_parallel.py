"""Whole runs whose layers are shared by ranks end with the weights, and the evaluation, of one
process.
"""

from __future__ import annotations

import pytest

STEPS = ("--steps", 3, "--no-progress")


def outcome(run: dict) -> tuple:
    return run["weights_sha256"], run["train_loss"], run["test_loss"], run["test_accuracy"]


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("lenet5", [("--tp", 2), ("--tp", 2, "--pp", 2)]),
        pytest.param("lenet5", [("--tp", 3), ("--tp", 2, "--dp", 2)], marks=pytest.mark.long),
        # Its evaluation has no dropout, so fc1 could be split by its inputs there, by its outputs
        # in training.
        pytest.param("convnet", [("--tp", 2)], marks=pytest.mark.long),
    ],
)
def test_evaluation_and_weights(launch, model, layouts):
    wanted = outcome(launch.result("--model", model, *STEPS))
    for layout in layouts:
        ranks = 1
        for n in layout[1::2]:
            ranks *= n
        assert outcome(launch.result("--model", model, *layout, *STEPS, ranks=ranks)) == wanted, (
            layout
        )


def test_more_ranks_than_parts_are_refused(launch):
    done = launch.train("--tp", 5, *STEPS, ranks=5)
    assert done.returncode == 64
    assert "sums are cut in 4 parts" in done.stderr
