"""PyTorch's own tests over backend "odyssey": what of them fails, and why. torchs_suite.py runs them."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "torchs_suite.py"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed (extra [torch])"),
]

#: Reasons for which tests fail, by their names. All others that Gloo passes are passed.
FAIL = {
    "test_monitored_barrier_gloo": "torch refuses monitored_barrier for all back ends but Gloo's",
    "test_monitored_barrier_gloo_subgroup": "the same",
    "test_monitored_barrier_gloo_rank_0_timeout": "the same",
}


def outcomes(launch, how: str, *names: str) -> dict[str, tuple[str, str]]:
    done = launch.python("-W", "ignore", PROGRAM, how, *names, timeout=1800)
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("test_")]
    return {name: (outcome, why) for name, outcome, why in lines}


def test_torchs_tests_of_collectives_and_ddp(launch):
    found = outcomes(launch, "odyssey")
    assert len(found) > 250
    assert not {name: why for name, (outcome, why) in found.items() if outcome == "failed"}
    for_gloo = [name for name, (outcome, why) in found.items() if outcome == "skipped" and "gloo" in why.lower()]
    by_name = outcomes(launch, "alias", *for_gloo)
    failed = {name: why for name, (outcome, why) in by_name.items() if outcome == "failed"}
    assert failed.keys() == FAIL.keys(), failed
    passed = Counter(outcome for outcome, _ in (*found.values(), *by_name.values()))["passed"]
    print(f"{passed} passed, {len(failed)} failed, as expected")
    assert passed + len(failed) >= 90
