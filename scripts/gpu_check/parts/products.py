"""The part products: the programs of tests/gpu/hopper, which multiply with Hopper's own
instruction (wgmma).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from .. import prepare
from ..check import Check, Skip

FOLDER = "tests/gpu/hopper"
TARGET = "sm_90"
CAPABILITY = "9.0"  # later and earlier GPUs do not have wgmma
BATCHES = (8, 64)  # of GPT
TIME = r"^(\w+) (\d+) x (\d+) x (\d+) in lanes of (\d+) columns (\d+) us (\S+) TFLOP/s (\S+)$"


def run(c: Check) -> dict[str, Any]:
    """Exact sums are right, other sums have the same bits for all tiles, and the time of each
    product.
    """
    if CAPABILITY not in c.facts["capabilities"]:
        raise Skip(
            f"wgmma wants compute capability {CAPABILITY}, this machine has "
            f"{c.facts['capabilities']}"
        )
    if not list(prepare.HOPPER.glob("*.mojo")):
        raise Skip(f"{FOLDER} is not in this checkout")
    right = c.once("check", lambda: checked(c))
    same = c.once("bits", lambda: compared(c))
    times = c.once("bench", lambda: timed(c))
    return {"check": right, "bits": same, "bench": times}


def checked(c: Check) -> dict[str, Any]:
    """The result of check: the number of cases. Every sum in them is exact."""
    output = run_program(c, "check")
    wrong = re.search(r"wrong in all: (\d+)", output)
    cases = re.findall(r"^.* wrong \d+ of \d+", output, re.MULTILINE)
    if wrong is None or int(wrong[1]) or not cases:
        raise RuntimeError(f"wrong products: {output[-900:]}")
    return {"cases": len(cases), "wrong": 0}


def compared(c: Check) -> dict[str, Any]:
    """The result of bits: the number of results whose bits are those of the first one."""
    output = run_program(c, "bits")
    others = [line for line in output.splitlines() if "OTHER BITS" in line]
    same = re.findall(r"^.* same 0x", output, re.MULTILINE)
    if others or not same:
        raise RuntimeError(
            f"{len(others)} of {len(others) + len(same)} have other bits:\n"
            + "\n".join(others[:40])
        )
    return {"same": len(same)}


def timed(c: Check) -> list[dict[str, Any]]:
    """The result of bench: microseconds and TFLOP/s of each product."""
    output = run_program(c, "bench", *([1, "--turns", 1] if c.options.emulated else BATCHES))
    rows = []
    for product, batch, inputs, outputs, lanes, columns, time, speed in re.findall(
        TIME, output, re.MULTILINE
    ):
        numbers = {
            "batch": int(batch),
            "inputs": int(inputs),
            "outputs": int(outputs),
            "lanes": int(lanes),
        }
        row = {
            "product": product,
            **numbers,
            "columns": int(columns),
            "us": float(time),
            "tflops": float(speed),
        }
        rows.append(row)
    if not rows:
        raise RuntimeError(f"bench printed no times: {output[-600:]}")
    return rows


def run_program(c: Check, name: str, *arguments: object) -> str:
    """The output of a program: the prepared one, or one that is compiled now."""
    folder = c.options.programs
    more = {}
    if folder is not None:
        note = prepare.note_of(c.options.prepared)
        if note.get("programs") != prepare.programs_hash():
            raise RuntimeError(f"{folder} is from other sources than {FOLDER}; run --prepare again")
        libraries = [
            str((c.options.kernels / "lib").resolve()),
            c.environment.get("LD_LIBRARY_PATH", ""),
        ]
        more["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in libraries if path)
        program = (folder / name).resolve()
    else:
        program = compiled(c, name)
    return c.run(program, *arguments, **more)


def compiled(c: Check, name: str) -> Path:
    """A program from the cache, or compiled now."""
    from odyssey.compile import library

    if prepare.compiler() is None:
        raise Skip(
            "no compiled programs and no compiler; run --prepare where it is, then use --prepared"
        )
    program = library.cache_dir() / "gpu-check" / prepare.programs_hash() / name
    if not program.exists():
        c.write_log(f"\ncompiling {program}\n")
        prepare.compile_program(name, TARGET, program)
    return program
