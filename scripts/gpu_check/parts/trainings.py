"""The part trainings: workers, precisions, pieces, checkpoints, errors."""

from __future__ import annotations

import json
import sys
from typing import Any

from ..check import Check, Skip

PROGRAM = "tests/gpu/trainings.py"


def run(c: Check) -> dict[str, Any]:
    """Runs all checks; after one that ends its process, the rest in a new process."""
    names = c.python(PROGRAM, "--list", limit=120).split()
    results: dict[str, Any] = {name: c.kept(name) for name in names if c.kept(name) is not None}
    names = [name for name in names if name not in results]
    try:
        while names:
            code, output = c.attempt(sys.executable, PROGRAM, *names)
            done = {}
            for line in output.splitlines():
                if line.startswith("check "):
                    _, name, text = line.split(" ", 2)
                    done[name] = json.loads(text)
            for name, result in done.items():
                if result["ok"]:
                    c.keep(name, result)
            results.update(done)
            left = [name for name in names if name not in done]
            if left and code not in (0, 1, 3):
                results[left[0]] = {
                    "ok": False,
                    "error": f"ended its process, exit code {code}: {output[-300:]}",
                }
                left = left[1:]
            if len(left) == len(names):
                raise RuntimeError(f"exit code {code}: {output[-600:]}")
            names = left
    except Skip as why:
        results["not done"] = {"ok": bool(results), "why": f"{why}: {', '.join(names)}"}
    except RuntimeError as problem:
        results["not done"] = {"ok": False, "error": f"{problem}: {', '.join(names)}"}
    failed = {name: result for name, result in results.items() if not result["ok"]}
    if failed:
        raise RuntimeError(f"{', '.join(failed)}: {failed}")
    return {"results": results}
