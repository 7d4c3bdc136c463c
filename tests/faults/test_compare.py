"""benchmarks/faults/compare.py: that its measure of damage tells a format that notices from one
that does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

COMPARE = Path(__file__).resolve().parents[2] / "benchmarks" / "faults" / "compare.py"


def test_damage_is_told_from_none(tmp_path):
    written = tmp_path / "faults.json"
    command = [
        sys.executable,
        str(COMPARE),
        "--only",
        "damage",
        "--count",
        "1",
        "--json",
        str(written),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(written.read_text())["results"]["damage"]
    ours, plain = found["odyssey Store"], found["safetensors save_file, same path"]
    assert (ours["flips"]["fell_back"], ours["cuts"]["fell_back"]) == (6, 3)
    assert (
        plain["flips"]["silent"] > 0
        and plain["flips"]["fell_back"] == plain["cuts"]["fell_back"] == 0
    )
    assert "| odyssey Store | 0 of 6 | 0 + 6 + 0 | 0 of 3 | 0 + 3 + 0 |" in done.stdout
