"""The part times: the time of each launch of a step of GPT and ResNet-18, and ncu's numbers for
the worst three.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from ..check import Check, Skip

PROGRAM = "benchmarks/gpu_launches.py"
RUNS = (("gpt", "bf16", 8), ("resnet18", "bf16", 64), ("gpt", "fp32", 8), ("resnet18", "fp32", 64))
PROFILED = 2  # of these, the first ones
WORST = 3
ENOUGH = 15.0  # seconds that a run may take
PLACES = ("usr/local/cuda*/bin", "opt/nvidia/nsight-compute/*", "opt/cuda*/bin")
METRICS = (
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram__bytes.sum",
    "lts__t_bytes.sum",
    "l1tex__data_bank_conflicts_pipe_lsu.sum",
    "launch__registers_per_thread",
    "launch__waves_per_multiprocessor",
)


def run(c: Check) -> dict[str, Any]:
    """Each model's table is kept as soon as it is there.

    A missing or unusable ncu is no failure.
    """
    tables: dict[str, Any] = {}
    left = []
    for number, (model, precision, batch) in enumerate(
        RUNS[:PROFILED] if c.options.emulated else RUNS
    ):
        name = f"{model}-{precision}"
        options = [
            "--model",
            model,
            "--precision",
            precision,
            "--batch",
            1 if c.options.emulated else batch,
        ]
        if c.kept(name) is None and c.left < ENOUGH:
            left.append(name)
            continue
        table = c.once(name, lambda name=name, options=options: timed(c, name, options))
        tables[name] = table
        if number < PROFILED:
            counted = c.kept(f"{name}, ncu") or profiled(c, table, options)
            if isinstance(counted, dict):
                c.keep(f"{name}, ncu", counted)
            tables[name] = {**table, "ncu": counted}
    if left:
        raise Skip(f"no time was left for {', '.join(left)}")
    return {"tables": tables}


def timed(c: Check, name: str, options: list[object]) -> dict[str, Any]:
    """The table of a model, after a look at whether it can be right."""
    file = c.scratch / f"{name}-launches.json"
    replays = ["--replays", 1] if c.options.emulated else []
    output = c.python(
        PROGRAM, *options, *replays, "--json", file, limit=3600 if c.options.emulated else 90
    )
    print("\n".join(output.strip().splitlines()[:8]), flush=True)
    table = json.loads(file.read_text())
    if not table["rows"] or min(row["us"] for row in table["rows"]) < 0:
        raise RuntimeError(f"{name}: no times, or negative ones: {table['rows'][:3]}")
    # Each launch has an event and a gap. More would mean that the events do not bracket what is
    # timed.
    bound = table["graph_us"] + table["launches"] * max(3 * table["event_us"], 5)
    if not c.options.emulated and not 0.5 * table["graph_us"] <= table["sum_us"] <= 1.5 * bound:
        raise RuntimeError(
            f"{name}: the launches take {table['sum_us']:.0f} us one by one and "
            f"{table['graph_us']:.0f} us as a graph"
        )
    return table


def profiled(c: Check, table: dict[str, Any], options: list[object]) -> Any:
    """The numbers of ncu for the launches that take longest, or why there are none."""
    tool = shutil.which("ncu")
    for pattern in PLACES:
        tool = tool or next((str(p) for p in sorted(Path("/").glob(f"{pattern}/ncu"))), None)
    if c.options.emulated:
        return "not run: ncu has no counters on an emulated GPU"
    if tool is None:
        return "not run: ncu is not installed"
    labels = [row["label"] for row in table["rows"][:WORST]]
    command = [
        tool,
        "--profile-from-start",
        "off",
        "--clock-control",
        "none",
        "--csv",
        "--page",
        "raw",
    ]
    program = [sys.executable, PROGRAM, *options, "--profile", *labels]
    metrics = ["--metrics", ",".join(METRICS)]
    try:
        code, output = c.attempt(*command, *metrics, *program, limit=60, ODYSSEY_GPU_GRAPHS="0")
    except (Skip, RuntimeError) as problem:
        return f"not run: {problem}"
    rows = counters(output)
    return (
        {"launches": labels, "kernels": rows}
        if rows
        else f"not run: exit code {code}: {output.strip()[-300:]}"
    )


def counters(output: str) -> list[dict[str, str]]:
    """The rows of ncu's raw page, one for each kernel, with the metrics that were asked for and
    their units.
    """
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    table = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    header = table[0]
    units = dict(zip(header, table[1], strict=False)) if len(table) > 1 and not table[1][0] else {}
    rows = []
    for values in table[2 if units else 1 :]:
        of_kernel = dict(zip(header, values, strict=False))
        row = {"kernel": of_kernel.get("Kernel Name", "?")}
        row |= {
            name: f"{of_kernel[name]} {units.get(name, '')}".strip()
            for name in METRICS
            if name in of_kernel
        }
        rows.append(row)
    return rows
