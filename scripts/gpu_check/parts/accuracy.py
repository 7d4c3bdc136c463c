"""The part accuracy: LeNet-5 on MNIST."""

from __future__ import annotations

import json
from typing import Any

from ..check import Check

ENOUGH = 0.989


def run(c: Check) -> dict[str, Any]:
    """Trains and evaluates; on the emulated GPU, two steps."""
    file = c.scratch / "training.json"
    short: list[object] = ["--no-eval", "--steps", 2] if c.options.emulated else []
    c.train("--num-gpus", 1, "--json", file, *short)
    report = json.loads(file.read_text())
    result = {
        name: report[name]
        for name in ("test_accuracy", "seconds", "samples_per_second", "weights_sha256")
    }
    if not c.options.emulated and report["test_accuracy"] < ENOUGH:
        raise RuntimeError(f"test accuracy {report['test_accuracy']:.4f}, below {ENOUGH}: {result}")
    return result
