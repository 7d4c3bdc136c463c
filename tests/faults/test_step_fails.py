"""An error in one rank's part of a step ends that step on all ranks, which may then go on
(step_fails.py).
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("step_fails.py")
KINDS = ["eager"] + ["torch"] * (importlib.util.find_spec("torch") is not None)


def ends(done) -> tuple[dict[int, str], set[str]]:
    """What each rank caught, and how all of them ended."""
    assert done.returncode == 0, done.stdout + done.stderr
    caught = {int(rank): text for rank, text in re.findall(r"rank (\d) caught (.*)", done.stdout)}
    found = re.findall(r"rank \d has taken (\d steps, weights \w{12})", done.stdout)
    return caught, set(found)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_without_a_shard_hear_of_an_error_at_once(launch, kind):
    """Three ranks, two shards: without word of it the others would wait for ODYSSEY_TIMEOUT,
    then find calls apart.
    """
    alone = ends(launch(sys.executable, PROGRAM, kind, 0, ranks=1))
    assert alone[0] == {0: "ValueError: no such sample"} and len(alone[1]) == 1
    caught, found = ends(launch(sys.executable, PROGRAM, kind, 1, ranks=3, timeout=100))
    told = "CollectiveError: [train] rank 1 failed in its part: ValueError: no such sample"
    assert caught == {0: told, 1: "ValueError: no such sample", 2: told}
    assert found == alone[1]  # the step that failed changed nothing, on no rank


def test_an_error_of_odyssey_keeps_its_class(launch):
    caught, _ = ends(
        launch(sys.executable, PROGRAM, "eager", 1, "ShapeError", ranks=3, timeout=100)
    )
    told = "ShapeError: [train] rank 1 failed in its part: [ops] too wide"
    assert caught == {0: told, 1: "ShapeError: [ops] too wide", 2: told}
