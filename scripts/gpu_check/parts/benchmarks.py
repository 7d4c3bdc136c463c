"""The part benchmarks: a step beside three forms of PyTorch, or beside those of them that work."""

from __future__ import annotations

import json
import sys
from typing import Any

from ..check import Check, Skip

RUNS = (
    ("lenet5", "fp32"),
    ("gpt", "bf16"),
    ("resnet18", "bf16"),
    ("mlp", "fp32"),
    ("convnet", "fp32"),
    ("convnet", "bf16"),
    ("gpt", "fp32"),
    ("resnet18", "fp32"),
    ("lenet5", "tf32"),
)


def run(c: Check) -> dict[str, Any]:
    """All models; each table is kept as soon as it is whole."""
    tables: dict[str, Any] = {}
    failed = []
    left = []
    for model, precision in RUNS[:1] if c.options.emulated else RUNS:
        name = f"{model}-{precision}"
        tables[name] = c.kept(name)
        if tables[name] is not None:
            continue
        if c.left < 30:
            left.append(name)
            tables[name] = "not run: no time was left"
            continue
        tables[name], problems = one(c, model, precision)
        failed += [f"{name} {problem}" for problem in problems]
        if not problems:
            c.keep(name, tables[name])
    if failed:
        for name, table in tables.items():
            if c.kept(name) is None and isinstance(table, dict):
                c.keep(f"{name}, incomplete", table)
        raise RuntimeError("\n".join(failed))
    if left:
        raise Skip(f"no time was left for {', '.join(left)}")
    return {"tables": tables}


def one(c: Check, model: str, precision: str) -> tuple[Any, list[str]]:
    """The table of a model, and the errors.

    A process that ends takes all sides with it, so fewer are tried then.
    """
    small = (
        ["--batches", "64", "--steps", 1, "--rounds", 1]
        if c.options.emulated
        else ["--seconds", 0.3]
    )
    problems = []
    table = None
    for number, fewer in enumerate(([], ["--kinds", "eager"], ["--no-torch"])):
        file = c.scratch / f"{model}-{precision}-{number}.json"
        command = [
            "benchmarks/gpu.py",
            "--model",
            model,
            "--precision",
            precision,
            "--json",
            file,
            *small,
            *fewer,
        ]
        problem = ""
        output = ""
        try:
            code, output = c.attempt(
                sys.executable, *command, limit=600 if c.options.emulated else 120
            )
            problem = f"exit code {code}: {output[-400:]}" if code else ""
        except (Skip, RuntimeError) as why:
            problem = str(why)
        if file.exists():
            table = json.loads(file.read_text())
        if problem:
            problems.append(f"{' '.join(map(str, fewer))}: {problem}")
        else:
            print("\n".join(output.strip().splitlines()[-8:]), flush=True)
        if table is not None or not problem:
            break
    return table, problems
