"""Models that do not fit, within a limit of memory that the system keeps; a disk that is full."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_four_times_the_memory_has_the_same_bits(launch, tmp_path):
    """Parameters and momentum of four times what a control group, or RLIMIT_DATA, lets the
    process have.
    """
    limit = 96
    program, found = ROOT / "benchmarks" / "offload.py", tmp_path / "found.json"
    done = launch.python(
        program,
        "--limit-mb",
        limit,
        "--steps",
        3,
        "--folder",
        tmp_path,
        "--json",
        found,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    whole, files = json.loads(found.read_text())["runs"].values()
    assert whole["weights"] == files["weights"] and files["kept"] >= 4 * limit << 20
    assert files["group"] is None or files["group"] <= limit << 20


def test_a_rank_of_zero_3_has_no_larger_peak_than_its_plan(launch, tmp_path):
    """29 million parameters: from the initial values on, which are drawn and moved without a
    copy of all of them.
    """
    program, found = ROOT / "benchmarks" / "zero_peak.py", tmp_path / "found.json"
    done = launch.python(
        program, "--layers", 8, "--width", 512, "--share", 0.62, "--json", found, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["ranks"] for row in json.loads(found.read_text())["rows"]] == [1, 4]


def test_a_full_disk_is_one_line(launch, tmp_path):
    mount = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=1m none "$0" && exec "$@"',
        str(tmp_path),
    ]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*mount, "true"], capture_output=True).returncode
    ):
        pytest.skip("this user cannot mount a small disk")
    train = [
        sys.executable,
        "-m",
        "odyssey.train",
        "--model",
        "mlp",
        "--steps",
        "1",
        "--no-eval",
        "--offload",
    ]
    done = launch(*mount, *train, tmp_path)
    assert done.returncode == 73, done.stderr
    said = [line for line in done.stderr.splitlines() if "[offload]" in line]
    assert len(said) == 1 and "has no room for" in said[0] and "Traceback" not in done.stderr
