"""Where the time of a training step goes, on one core: a column for each network and precision.

    python benchmarks/where.py [--cases gpt:8 mlp:256] [--precisions fp32 bf16] [--rounds 3]
    python benchmarks/where.py --checkouts OLD . [--no-torch]

A cell is milliseconds, and for products the GFLOP/s and the share of the FMA peak in brackets. The
time of a record is its minimum over all steps, and a row adds up the minima of its records over all
shards, so interruptions by other programs don't count. "step" is the least processor time of a
whole step, and "host" is what is left of it: Python, the next batch, and clearing. Rows add up to
a little less than "step", because no step has all minima. "PyTorch" is the least processor time of
the fastest of its forms (models.py), in the same process after ours.

With several checkouts, processes of each take turns, and each has a table. A checkout may be a
commit from before this file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

CASES = ("gpt:8", "mlp:256", "resnet18:32", "lenet5:64")
PRODUCTS = ("forward", "dX", "dW", "attention")
ROWS = (*PRODUCTS, "sums of shards", "activations", "norms", "other ops", "optimizer", "host")
RECORDS = 1 << 24  # mojo/runtime/executor.mojo: the number of a record is below it
KINDS = ("eager", "channels-last", "compiled")  # of PyTorch


def row_of(op: str) -> str:
    """The row that an op belongs to."""
    if op.startswith("attention_"):
        return "attention"
    for ending, row in (
        ("_forward", "forward"),
        ("_backward_input", "dX"),
        ("_backward_weight", "dW"),
    ):
        if op.startswith(("linear", "conv2d", "winograd")) and op.endswith(ending):
            return row
    if op.startswith(("relu", "gelu", "tanh")):
        return "activations"
    return "norms" if "norm" in op else "other ops"


def least(step: Callable[[], object], steps: int) -> float:
    """The least nanoseconds of processor time of a step."""
    times = []
    for _ in range(steps):
        begun = time.process_time_ns()
        step()
        times.append(time.process_time_ns() - begun)
    return min(times)


def measure(options: Any) -> dict[str, Any]:
    """Nanoseconds and operations by row, of one case in this process."""
    checkout = options.checkouts[0]
    sys.path.insert(0, str(checkout / "benchmarks"))
    import models
    import numpy as np

    from odyssey.core import native
    from odyssey.engine.recompute import recompute

    common.pin()
    name, batch = options.case.split(":")[0], int(options.case.split(":")[1])
    precision = options.precisions[0]
    step, trainer, dataset = models.ours(name, batch, 1, precision, None)
    for _ in range(2):
        step()
    # Older checkouts call it `_train`.
    engine = trainer._train if hasattr(trainer, "_train") else trainer.stepper.engine
    runner, size = engine.runners[0], engine.shard_size_of(batch)
    records = recompute(engine.record(size, dataset.form))
    sizes = native.library().ops
    rows_of_shard = size * (models.CONTEXT if name == "gpt" else 1)
    lanes = rows_of_shard / -(-rows_of_shard // 16)
    times, spent = timed(runner, step, options.steps, np)
    found: dict[str, list[float]] = {row: [0.0, 0.0] for row in ROWS}
    for key, nanoseconds in times.items():
        number = key % RECORDS
        cell = found["sums of shards"]
        if number < len(records):
            record = records[number]
            cell = found[row_of(record.op)]
            cell[1] += models.operations(record, sizes[record.op].sizes, lanes)
        cell[0] += nanoseconds
    found["optimizer"][0] = spent["optimizer"]
    found["host"][0] = max(spent["step"] - spent["shards"] - spent["optimizer"], 0)
    peak = common.peak_of_products([common.peak(1)], precision)
    return {"rows": found, "step": spent["step"], "peak": peak, "torch": torch_times(options)}


def timed(
    runner: Any, step: Callable[[], object], steps: int, np: Any
) -> tuple[dict[int, float], dict[str, float]]:
    """The least nanoseconds of each record of each shard, and of a step and its parts."""
    from odyssey.core import native

    lib = native.library()
    most = runner.shards * (runner.step.records + 1) + 8
    room = np.zeros(2 + 3 * most, np.int64)
    room[1] = most
    times: dict[int, float] = {}
    parts: dict[str, list[float]] = defaultdict(list)
    now = {"shards": 0, "optimizer": 0}
    run_shards, run_optimizer = lib.step, lib.run

    def timed_shards(native_step: Any) -> None:
        room[0], native_step.context.times = 0, room.ctypes.data
        begun = time.process_time_ns()
        run_shards(native_step)
        now["shards"] += time.process_time_ns() - begun
        native_step.context.times = 0

    def timed_optimizer(*arguments: Any) -> Any:
        begun = time.process_time_ns()
        result = run_optimizer(*arguments)
        now["optimizer"] += time.process_time_ns() - begun
        return result

    lib.step, lib.run = timed_shards, timed_optimizer
    try:
        for _ in range(steps):
            now.update(shards=0, optimizer=0)
            begun = time.process_time_ns()
            step()
            parts["step"].append(time.process_time_ns() - begun)
            for part, nanoseconds in now.items():
                parts[part].append(nanoseconds)
            of_step: dict[int, int] = defaultdict(int)
            for key, begin, end in room[2 : 2 + 3 * int(room[0])].reshape(-1, 3).tolist():
                of_step[key] += end - begin
            for key, nanoseconds in of_step.items():
                times[key] = min(times.get(key, nanoseconds), nanoseconds)
    finally:
        del lib.step, lib.run
    return times, {part: min(values) for part, values in parts.items()}


def torch_times(options: Any) -> dict[str, float]:
    """The least nanoseconds of a step of PyTorch, by form."""
    if options.no_torch or not common.have_torch():
        return {}
    import models
    import torch

    torch.set_num_threads(1)
    name, batch = options.case.split(":")[0], int(options.case.split(":")[1])
    found = {}
    for kind in KINDS:
        if kind == "channels-last" and name not in ("resnet18", "lenet5"):
            continue
        if kind == "compiled" and not shutil.which("g++"):
            continue
        step, _ = models.torch_side(name, batch, options.precisions[0], kind)
        try:
            for _ in range(2):
                step()
        except Exception as problem:  # a compiler that cannot
            print(f"{kind}: {type(problem).__name__}", file=sys.stderr)
            continue
        found[kind] = least(step, max(3, options.steps // 2))
    return found


def run(options: Any, checkout: Path, case: str, precision: str) -> dict[str, Any]:
    """A case in a process of its own, with the package of a checkout."""
    from models import TUNED

    words = ["--case", case, "--precisions", precision, "--checkouts", str(checkout)]
    words += ["--steps", str(options.steps), *["--no-torch"] * options.no_torch]
    done = subprocess.run(
        [sys.executable, __file__, *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**TUNED, **os.environ, "PYTHONPATH": str(checkout / "python")},
    )
    if done.returncode:
        raise SystemExit(f"{case}, {precision}, {checkout}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def least_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The least of each time of several rounds."""
    first = rounds[0]
    rows = {row: min(one["rows"][row] for one in rounds) for row in ROWS}
    kinds = {kind: min(one["torch"][kind] for one in rounds) for kind in first["torch"]}
    peak = max(one["peak"] for one in rounds)
    return {"rows": rows, "step": min(o["step"] for o in rounds), "peak": peak, "torch": kinds}


def show(columns: dict[str, dict[str, Any]]) -> str:
    """The table of a checkout."""
    lines: list[list[Any]] = []
    for row in ROWS:
        line = [row]
        for column in columns.values():
            nanoseconds, operations = column["rows"][row]
            text = f"{1e-6 * nanoseconds:.2f}"
            if operations and nanoseconds:
                speed = operations / nanoseconds
                text += f" ({speed:.0f}, {100 * speed / column['peak']:.0f} %)"
            line.append(text if nanoseconds else None)
        lines.append(line)
    lines.append(["step", *(f"{1e-6 * column['step']:.2f}" for column in columns.values())])
    if all(column["torch"] for column in columns.values()):
        fastest = {name: min(column["torch"].values()) for name, column in columns.items()}
        lines.append(["PyTorch", *(f"{1e-6 * value:.2f}" for value in fastest.values())])
        ratios = (value / columns[name]["step"] for name, value in fastest.items())
        lines.append(["PyTorch / ours", *(f"{ratio:.2f}" for ratio in ratios)])
    return common.table(["ms (GFLOP/s, of peak)", *columns], lines)


def main() -> int:
    parser = common.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="MODEL:BATCH", help="networks")
    parser.add_argument(
        "--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"]
    )
    parser.add_argument("--steps", type=int, default=20, help="of each process")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each cell")
    parser.add_argument(
        "--checkouts", nargs="+", type=Path, default=[common.HERE.parent], metavar="DIRECTORY"
    )
    parser.add_argument("--no-torch", action="store_true", help="only ours")
    parser.add_argument("--case", help=common.INTERNAL)
    options = parser.parse_args()
    options.checkouts = [path.resolve() for path in options.checkouts]
    if options.case:
        print(json.dumps(measure(options)))
        return 0
    facts = common.print_machine()
    tables: dict[Path, dict[str, dict[str, Any]]] = {path: {} for path in options.checkouts}
    for case in options.cases:
        for precision in options.precisions:
            rounds: dict[Path, list[dict[str, Any]]] = {path: [] for path in options.checkouts}
            for _ in range(options.rounds):
                for path in options.checkouts:
                    rounds[path].append(run(options, path, case, precision))
            for path in options.checkouts:
                tables[path][f"{case} {precision}"] = least_of(rounds[path])
    for path, columns in tables.items():
        print(f"\n{path}, load {os.getloadavg()[0]:.1f}\n{show(columns)}")
    asked = {key: getattr(options, key) for key in ("steps", "rounds")}
    content = {str(path): columns for path, columns in tables.items()}
    common.write_json(options.json, "where", facts, options=asked, tables=content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
