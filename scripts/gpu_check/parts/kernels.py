"""The part kernels: every op on the GPU against the CPU's kernels."""

from __future__ import annotations

import json
import sys
from typing import Any

from ..check import Check

GPU_IS_LOST = 3  # the exit code of records.py after an error from which a process cannot recover


def run(c: Check) -> dict[str, Any]:
    """Compares all records; after an error of the GPU, in a new process from the next record on."""
    file = c.scratch / "records.json"
    shards = "1,3" if c.options.emulated else "1,3,8,40"
    command = [sys.executable, "tests/gpu/records.py", "--json", file, "--shards", shards]
    failed: list[str] = []
    code, output = c.attempt(*command)
    while True:
        failed += [line for line in output.splitlines() if line.startswith("FAILED")]
        if code != GPU_IS_LOST or not failed:
            break
        name = failed[-1].removeprefix("FAILED ").split(" shards:")[0]
        code, output = c.attempt(*command, "--after", f"{name} shards")
    last = output.strip().splitlines()[-3:]
    if code or failed:
        raise RuntimeError(
            f"exit code {code}; {len(failed)} failed; " + "\n".join([*failed[:20], *last])
        )
    errors = json.loads(file.read_text())
    worst = sorted(
        ((max(of_one.values(), default=0.0), name) for name, of_one in errors.items()), reverse=True
    )
    return {"summary": last[-1], "worst": worst[:8]}
