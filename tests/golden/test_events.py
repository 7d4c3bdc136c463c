"""What happens in a training, and in which order, is what it was when it was recorded
(events.py).
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location(
    "golden_events", Path(__file__).with_name("events.py")
)
events = importlib.util.module_from_spec(spec)
spec.loader.exec_module(events)

RECORDED = json.loads(events.RECORD.read_text())
TRAININGS = events.trainings()


@pytest.mark.parametrize("title", RECORDED)
def test_events_of_a_training_come_in_the_recorded_order(title):
    if title not in TRAININGS:
        pytest.skip("needs PyTorch, which is not installed")
    ranks, program = TRAININGS[title]
    result = events.recorded_form(events.traced(ranks, program))
    assert result["rank 0"] == RECORDED[title]["rank 0"]
    assert result["others"] == RECORDED[title]["others"]


def test_every_training_is_recorded():
    assert set(TRAININGS) <= set(RECORDED)
