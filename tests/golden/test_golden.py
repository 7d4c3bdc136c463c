"""Trainings give the weights that they gave when their hashes were recorded (runs.py), on the
same CPU target.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("golden_runs", Path(__file__).with_name("runs.py"))
runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runs)

RECORDED = json.loads(runs.path().read_text()) if runs.path().exists() else None


@pytest.mark.skipif(RECORDED is None, reason=f"nothing is recorded for {runs.path().stem}")
def test_weights_are_those_that_were_recorded():
    if RECORDED["compiler"] != runs.compiler_version():
        pytest.skip(f"recorded with {RECORDED['compiler']}, this is {runs.compiler_version()}")
    found, known = runs.measured(), RECORDED["weights_sha256"]
    assert {name: h for name, h in found.items() if known.get(name) != h} == {}
    assert found.keys() == known.keys()
