"""The part transport: NCCL with one rank, and between ranks if there are two GPUs."""

from __future__ import annotations

import re
import sys
from typing import Any

from ..check import Check, Skip, last_json

PROGRAM = "tests/gpu/transports.py"


def run(c: Check) -> dict[str, Any]:
    """A group of one; with two GPUs also training runs, with the bits of one process."""
    more = emulated(c) if c.options.emulated else {}
    program = "from odyssey.core.gpu_native import library; print('count', library().count())"
    count = int(re.findall(r"count (\d+)", c.python("-c", program, **more))[-1])
    loads = [sys.executable, "-c", "from odyssey.comm import nccl; nccl.library()"]
    code, output = c.attempt(*loads, limit=60, **more)
    if code:
        raise Skip(f"no NCCL: {(output.strip().splitlines() or ['?'])[-1]}")
    results = {"alone": last_json(c.python("tests/gpu/nccl_alone.py", limit=90, **more))}
    if count < 2:
        results["not run"] = f"between ranks: {count} GPU, and NCCL wants one per rank"
        return results
    try:
        two = [c.mpirun(), "-n", 2, sys.executable]
    except Skip as why:
        return {**results, "not run": f"between ranks: {why}"}
    one = last_json(c.python(PROGRAM, 1, "alone", **more))["alone"]
    results.update(last_json(c.run(*two, PROGRAM, 1, "staged", "nccl", **more)))
    if {hash_ for ways in (results["staged"], results["nccl"]) for hash_ in ways.values()} != {one}:
        raise RuntimeError(f"different bits: {one} alone, {results}")
    return results


def emulated(c: Check) -> dict[str, str]:
    """The environment of two emulated GPUs with the emulated NCCL of the tests."""
    from gpu import emulated_nccl

    return emulated_nccl.environment(2, base=c.environment)
