"""scripts/gpu-check on an emulated GPU. tests/packaging/test_gpu_check.py has what needs no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import emulated

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "scripts" / "gpu-check"

pytestmark = pytest.mark.skipif(
    emulated.compiler() is None, reason="no C compiler for the emulated GPU"
)


def test_the_parts_run_on_the_emulated_gpu_and_are_skipped_then(tmp_path: Path) -> None:
    only = ["--only", "machine", "accuracy", "sanitizer", "benchmarks"]
    command = [sys.executable, PROGRAM, "--emulated", "--output", tmp_path, *only]
    first = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    records = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [name for name, r in records.items() if r.get("passed")] == [
        "machine",
        "benchmarks",
        "accuracy",
    ], first
    assert "checks by itself" in records["sanitizer"]["not run"]
    assert (
        "Emulated GPU" in records["machine"]["opened"][0]
        and ["8.5", "sm_90a"] in records["machine"]["ptx"]
    )
    assert records["machine"]["for"]["gpu"] == "Emulated GPU"
    assert records["benchmarks"]["tables"]["lenet5-fp32"]["rows"][0]["host_seconds"] > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpu-check.json", "gpu-check.log"]
    again = subprocess.run(
        [*command, "--resume"], capture_output=True, text=True, timeout=300, check=False
    )
    assert again.returncode == 0 and again.stdout.count("skipped (passed at") == 6, (
        again.stdout + again.stderr
    )
    after = json.loads((tmp_path / "gpu-check.json").read_text())
    assert {name: after[name] for name in ("machine", "benchmarks", "accuracy")} == {
        name: records[name] for name in ("machine", "benchmarks", "accuracy")
    }


def test_every_launch_of_a_step_has_a_time(tmp_path: Path) -> None:
    file = tmp_path / "launches.json"
    command = [
        ROOT / "benchmarks" / "gpu_launches.py",
        "--model",
        "lenet5",
        "--precision",
        "fp32",
        "--batch",
        128,
    ]
    words = [sys.executable, *command, "--replays", 2, "--json", file]
    done = subprocess.run(
        list(map(str, words)),
        env=emulated.environment(1),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads(file.read_text())
    labels = [label for label, _ in table["in_order"]]
    assert len(labels) == table["launches"] == sum(row["launches"] for row in table["rows"])
    forward = next(i for i, label in enumerate(labels) if label.startswith("conv2d_relu_maxpool"))
    backward = next(i for i, label in enumerate(labels) if "backward" in label)
    check = labels.index("finite")
    update = next(i for i, label in enumerate(labels) if label.startswith("sgd"))
    assert forward < backward < check < update == len(labels) - 1, labels
    assert all(us > 0 for _, us in table["in_order"])
    assert table["sum_us"] == pytest.approx(sum(us for _, us in table["in_order"]), rel=0.01)
    assert sum(row["share"] for row in table["rows"]) == pytest.approx(1)
