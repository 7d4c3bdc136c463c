"""Every op of ops_samples.py on an emulated GPU: trained with, it gives the weights of the CPU,
on one worker and on three; and trainings there give the weights that were recorded (golden).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpu import emulated

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    emulated.compiler() is None, reason="no C compiler for the emulated GPU"
)


def run(*command: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=emulated.environment(1),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_op():
    assert ", 0 failed" in run(HERE / "samples.py")


def test_golden():
    runs = HERE.parent / "golden" / "runs.py"
    known = run(
        "-c",
        f"import sys; sys.path.insert(0, {str(runs.parent)!r}); import runs; "
        "print(runs.path(True).exists())",
    )
    if "True" not in known:
        pytest.skip("nothing is recorded for this CPU target")
    assert "all equal" in run(runs, "--gpu")
