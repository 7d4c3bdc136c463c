"""Placed and staged models over ranks: the bits of one process, whatever the schedule, with
dropout, a last batch of fewer micro-batches, values that skip a place or return to one, and
checkpoints inside stages.
"""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "placed.py"


@pytest.fixture(scope="module")
def alone():
    """What one process computes, by model."""
    return {}


@pytest.mark.parametrize(
    ("model", "schedule", "pp", "ranks"),
    [
        pytest.param("staged", "gpipe", 3, 3, marks=pytest.mark.long),
        ("staged", "1f1b", 3, 3),
        pytest.param("staged", "interleaved", 2, 2, marks=pytest.mark.long),
        ("staged", "interleaved", 2, 4),
        ("checkpointed", "1f1b", 3, 3),
        ("checkpointed", "interleaved", 2, 2),
        ("placed", "gpipe", 3, 3),
        ("returning", "gpipe", 2, 2),
    ],
)
def test_the_bits_of_one_process(model, schedule, pp, ranks, launch, alone):
    kind = "placed" if model == "placed" else "returning" if model == "returning" else "staged"
    if kind not in alone:
        done = launch.python(SCRIPT, kind, "gpipe", 1)
        assert done.returncode == 0, done.stderr
        alone[kind] = done.stdout
    done = launch.python(SCRIPT, model, schedule, pp, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone[kind]


def test_places_that_do_not_fit_the_schedule_are_refused(launch):
    done = launch.python(SCRIPT, "returning", "1f1b", 2, ranks=2)
    assert done.returncode != 0 and "schedule '1f1b' needs stage s on device s" in done.stderr
