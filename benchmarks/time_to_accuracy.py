"""Seconds of training until LeNet-5 has a test accuracy on MNIST: `odyssey train` against
PyTorch DDP over Gloo.

Both with the same recipe (odyssey.settings.recipes), the same initial weights and order of samples,
two processes of one thread each, an evaluation after each epoch, in turns, several seeds. "Seconds"
are those of training steps up to and including the epoch after which the accuracy was first
reached; evaluation and start-up are not in them. The wall time of the whole command has both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import common

TARGETS = (0.985, 0.989, 0.990)


def reached(history: list[dict[str, Any]], accuracy: float) -> float | None:
    """Training seconds up to the first epoch with this test accuracy, or None."""
    seconds = 0.0
    for record in history:
        seconds += record["seconds"]
        if record["test_accuracy"] >= accuracy:
            return seconds
    return None


def run(kind: str, seed: int, options: Any, file: Path) -> dict[str, Any]:
    """One training: ours, torch or tuned."""
    common_options = ["--epochs", str(options.epochs), "--seed", str(seed)]
    common_options += ["--global-batch-size", str(options.global_batch_size)]
    if kind == "ours":
        command = common.train_command(
            *common_options, "--threads", "1", ranks=options.processes, json_file=file
        )
    else:
        command = [
            sys.executable,
            str(common.HERE / "torch_ddp.py"),
            *common_options,
            "--json",
            str(file),
        ]
        command += ["--processes", str(options.processes), *["--tuned"] * (kind == "tuned")]
    used = common.child(command)
    history = json.loads(file.read_text())["history"]
    kept = [
        {key: record[key] for key in ("epoch", "seconds", "test_accuracy")} for record in history
    ]
    return {
        "kind": kind,
        "seed": seed,
        "wall_seconds": used["seconds"],
        "epoch_seconds": common.median([record["seconds"] for record in kept]),
        "reached": {f"{target:g}": reached(kept, target) for target in TARGETS},
        "final_accuracy": kept[-1]["test_accuracy"],
        "history": kept,
    }


def show(runs: list[dict[str, Any]]) -> str:
    """One line per training."""
    names = [f"{100 * target:g} %" for target in TARGETS]
    headers = ["", "seed", "epoch s", *(f"s to {name}" for name in names), "final %", "wall s"]
    lines = []
    for one in runs:
        line = [one["kind"], one["seed"], common.number(one["epoch_seconds"], 2)]
        line += [common.number(seconds, 1) for seconds in one["reached"].values()]
        lines.append(
            [
                *line,
                common.number(100 * one["final_accuracy"], 2),
                common.number(one["wall_seconds"], 1),
            ]
        )
    return common.table(headers, lines)


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per kind: medians over the seeds, and how many reached each accuracy."""
    rows = []
    for kind in dict.fromkeys(one["kind"] for one in runs):
        own = [one for one in runs if one["kind"] == kind]
        row: dict[str, Any] = {"kind": kind, "runs": len(own)}
        row["epoch_seconds"] = common.median([one["epoch_seconds"] for one in own])
        row["wall_seconds"] = common.median([one["wall_seconds"] for one in own])
        row["final_accuracy"] = common.median([one["final_accuracy"] for one in own])
        row["reached"] = {}
        for target in (f"{target:g}" for target in TARGETS):
            times = [one["reached"][target] for one in own if one["reached"][target] is not None]
            row["reached"][target] = {
                "runs": len(times),
                "median": common.median(times) if times else None,
            }
        rows.append(row)
    return rows


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="a training for each"
    )
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training set")
    parser.add_argument("--global-batch-size", type=int, default=128, help="samples of a step")
    parser.add_argument("--processes", type=int, default=2, help="of both sides, one thread each")
    options = parser.parse_args()
    facts = common.print_machine()
    kinds = ["ours", *["torch", "tuned"] * common.have_torch()]
    runs = []
    with common.scratch() as folder:
        for seed in options.seeds:
            for kind in kinds:
                runs.append(run(kind, seed, options, folder / f"{kind}-{seed}.json"))
                last = runs[-1]
                accuracy, wall = 100 * last["final_accuracy"], last["wall_seconds"]
                print(
                    f"{kind}, seed {seed}: {accuracy:.2f} % after {wall:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
    print(
        f"\nLeNet-5, MNIST, batch {options.global_batch_size}, {options.processes} processes of "
        "one thread"
    )
    print(show(runs))
    rows = summary(runs)
    print("\nmedians over the seeds")
    names = [f"s to {100 * target:g} % (runs)" for target in TARGETS]
    lines = []
    for row in rows:
        line = [row["kind"], common.number(row["epoch_seconds"], 2)]
        for one in row["reached"].values():
            line.append(
                f"{common.number(one['median'], 1) or '-'} ({one['runs']} of {row['runs']})"
            )
        lines.append(
            [
                *line,
                common.number(100 * row["final_accuracy"], 2),
                common.number(row["wall_seconds"], 1),
            ]
        )
    print(common.table(["", "epoch s", *names, "final %", "wall s"], lines))
    for row in rows[1:]:
        ratio, wall = (
            row["epoch_seconds"] / rows[0]["epoch_seconds"],
            row["wall_seconds"] / rows[0]["wall_seconds"],
        )
        print(f"{row['kind']} / ours: epoch {ratio:.2f}, whole command {wall:.2f}")
    settings = {
        k: getattr(options, k) for k in ("seeds", "epochs", "global_batch_size", "processes")
    }
    common.write_json(
        options.json, "time_to_accuracy", facts, options=settings, summary=rows, runs=runs
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
