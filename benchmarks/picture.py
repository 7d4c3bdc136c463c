"""Draws docs/images/step.png from the JSON files of step.py and time_to_accuracy.py; measures
nothing.

Left: training samples per second on one core over the batch size. Right: test accuracy on MNIST
over seconds of training with two processes. Made to be read at a width of 800 pixels, on any
background.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

OURS, TORCH, GREY = "#d9480f", "#495057", "#868e96"
OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "step.png"


def speed(axes: Any, content: dict[str, Any]) -> None:
    """Bars of samples per second: ours, PyTorch, the ratio above."""
    rows = content["rows"]
    width = 0.38
    for offset, kind, colour, label in (
        (-0.5, "ours", OURS, "odyssey"),
        (0.5, "torch", TORCH, "PyTorch"),
    ):
        heights = [row[kind]["samples_per_second"] / 1e3 for row in rows]
        places = [i + offset * width for i in range(len(rows))]
        axes.bar(places, heights, width, color=colour, label=label)
        for x, height in zip(places, heights, strict=True):
            text = f"{height:.0f}" if height >= 10 else f"{height:.1f}"
            axes.annotate(
                text,
                (x, height),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=colour,
            )
    names = [f"{row['batch']}\n{row['torch']['ratio']['median']:.1f} x" for row in rows]
    axes.set_xticks(range(len(rows)), names)
    axes.set_xlabel("batch size, and odyssey / PyTorch")
    axes.set_ylim(0, 1.25 * max(row["ours"]["samples_per_second"] for row in rows) / 1e3)
    axes.set_title("Thousand training samples per second, one core", fontsize=11, loc="left")
    axes.legend(frameon=False, loc="upper left", ncols=2)


def accuracy(axes: Any, content: dict[str, Any]) -> None:
    """Test accuracy after each epoch over training seconds, a line per seed."""
    for kind, colour, label in (
        ("ours", OURS, "odyssey, 2 ranks"),
        ("torch", TORCH, "PyTorch DDP, 2 processes"),
    ):
        runs = [run for run in content["runs"] if run["kind"] == kind]
        for i, run in enumerate(runs):
            seconds, at = [], 0.0
            for record in run["history"]:
                at += record["seconds"]
                seconds.append(at)
            values = [100 * record["test_accuracy"] for record in run["history"]]
            axes.plot(
                seconds, values, color=colour, lw=1.8, alpha=0.85, label=label if i == 0 else None
            )
            axes.plot(seconds, values, ".", color=colour, ms=5)
    axes.set_xlim(0, None)
    axes.set_ylim(97.5, 99.5)
    axes.set_yticks((97.5, 98, 98.5, 99, 99.5))
    axes.axhline(99, color=GREY, lw=0.8, ls=(0, (4, 4)), zorder=0)
    axes.set_xlabel("seconds of training; each point is an epoch, each line a seed")
    axes.set_title("Test accuracy on MNIST in %, two processes", fontsize=11, loc="left")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.02))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("step", type=Path, metavar="STEP.json", help="written by step.py --json")
    parser.add_argument(
        "accuracy", type=Path, metavar="ACCURACY.json", help="written by time_to_accuracy.py --json"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the picture")
    options = parser.parse_args()
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed; pip install -e '.[bench]'", file=sys.stderr)
        return 1
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 4.1), dpi=160, facecolor="white", layout="constrained"
    )
    steps, trainings = (
        json.loads(file.read_text(encoding="utf-8")) for file in (options.step, options.accuracy)
    )
    if "torch" not in steps["rows"][0] or all(run["kind"] == "ours" for run in trainings["runs"]):
        print(
            "the files have no rows of PyTorch; measure again where it is installed",
            file=sys.stderr,
        )
        return 1
    speed(left, steps)
    accuracy(right, trainings)
    facts = steps["machine"]
    where = f"{facts['cpu']}, {facts['cores']} cores, shared"
    note = f"LeNet-5. {where}; PyTorch {facts['torch']} eager, float32; {facts['date'][:10]}"
    figure.supxlabel(note, fontsize=8, color=GREY, x=0.01, ha="left")
    figure.savefig(options.output, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
