"""The part sanitizer: compute-sanitizer on two steps."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from ..check import Check, Skip

PLACES = (
    "usr/local/cuda*/bin",
    "usr/local/cuda*/compute-sanitizer",
    "opt/nvidia/*/bin",
    "opt/cuda*/bin",
)
UNUSABLE = r"not supported|unable to (attach|inject|find)|LibraryNotLoaded"


def run(c: Check) -> dict[str, Any]:
    """Runs each tool of compute-sanitizer. A tool that runs out of time does not fail the part."""
    tool = shutil.which("compute-sanitizer")
    for pattern in PLACES:
        tool = tool or next((str(p) for p in Path("/").glob(f"{pattern}/compute-sanitizer")), None)
    if c.options.emulated:
        raise Skip("the emulated GPU checks by itself")
    if tool is None:
        raise Skip("compute-sanitizer is not installed")
    results: dict[str, Any] = {}
    failed = []
    for kind in ("memcheck", "racecheck", "synccheck"):
        if c.kept(kind) is not None:
            results[kind] = c.kept(kind)
            continue
        # The runtime asks for functions that may be missing: errors of calls are not looked for.
        command = [
            tool,
            "--tool",
            kind,
            "--report-api-errors",
            "no",
            "--error-exitcode",
            9,
            sys.executable,
        ]
        options = [
            "--num-gpus",
            1,
            "--steps",
            2,
            "--global-batch-size",
            112,
            "--no-eval",
            "--no-progress",
        ]
        try:
            code, output = c.attempt(*command, "-m", "odyssey.train", *options, limit=90)
        except Skip as why:
            results[kind] = f"not run: {why}"
            continue
        except RuntimeError as late:
            results[kind] = f"not ended: {late}"
            continue
        if re.search(UNUSABLE, output, re.IGNORECASE):
            raise Skip(f"compute-sanitizer does not work here: {output.strip()[-300:]}")
        results[kind] = [line.strip("= ") for line in output.splitlines() if " SUMMARY" in line]
        if code:
            failed.append(f"{kind}, exit code {code}: {output[:1500]}")
        else:
            c.keep(kind, results[kind])
    if failed:
        raise RuntimeError("\n".join([*failed, str(results)]))
    return results
