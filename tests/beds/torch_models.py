"""Models that people use, trained on one process, on two to four, killed, and gone on with on
others: the same bits?

    scripts/verify-torch [--models cnn gpt resnet18 vit] [--only fp32]

A row of the table for each model and precision: `odyssey verify` on three layouts, a rank killed
under `odyssey launch`, a training stopped on two ranks that goes on on three, and a fault planted
on rank 1, which verify must find.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PYTORCH = Path(__file__).resolve().parents[1] / "pytorch"
PROGRAM = [str(PYTORCH / "run_example.py"), str(PYTORCH / "zoo.py")]
MODELS = ("cnn", "gpt", "resnet18", "vit")
LAYOUTS = ("dp=2", "dp=3,zero=1", "dp=4")


def run(*words: object, ranks: int = 0, fails: bool = False) -> str:
    """What a command prints, on standard output and error; it must succeed, or fail."""
    beside = Path(sys.executable).parent / "mpirun"
    before = [str(beside) if beside.exists() else "mpirun", "-n", str(ranks)] if ranks else []
    done = subprocess.run(
        [*before, sys.executable, *map(str, words)], capture_output=True, text=True, timeout=1200
    )
    assert bool(done.returncode) == fails, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def sha(text: str) -> str:
    """The hash that a training printed."""
    return re.search(r"sha256 (\w{64})", text).group(1)


def verify(*training: str, layouts: tuple[str, ...], fails: bool = False) -> str:
    """`odyssey verify` of three steps."""
    words = [
        "-m",
        "odyssey",
        "verify",
        "--steps",
        "3",
        "--layouts",
        *layouts,
        "--script",
        PROGRAM[0],
        PROGRAM[1],
    ]
    return run(*words, *training, fails=fails)


def row(model: str, precision: str, folder: Path) -> list[str]:
    """What became of a model in a precision; AssertionError where bits differ."""
    training = ["--model", model, *["--bf16"] * (precision == "bf16")]
    alone = sha(run(*PROGRAM, *training))
    found = verify(*training, layouts=LAYOUTS)
    assert found.count("same bits") == len(LAYOUTS), found
    values = re.search(r"([\d,]+) values in 3 steps", found).group(1)

    job = folder / "run"
    words = [
        "-m",
        "odyssey",
        "launch",
        "-n",
        "2",
        "--run-dir",
        job,
        *PROGRAM,
        *training,
        "--every",
        "2",
        "--die",
        "4",
    ]
    said = run(*words)
    done = json.loads((job / "DONE.json").read_text())
    assert done["attempt"] == 2 and done["weights_sha256"] == alone, said

    run(*PROGRAM, *training, "--folder", folder / "saved", "--until", "3", ranks=2)
    assert sha(run(*PROGRAM, *training, "--folder", folder / "saved", ranks=3)) == alone

    found = verify(*training, "--bug", layouts=("dp=2",), fails=True)
    fault = re.search(r"DIFFERS +(step \d+: \S+ \S+)", found)
    assert fault, found
    return [model, precision, values, "0", "0", "0", fault.group(1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--only", choices=["fp32", "bf16"], help="one precision")
    given = parser.parse_args()
    print(
        "| model | precision | values compared on each of 2, 3, 4 ranks | of these differ | "
        "differ after a kill",
        end="",
    )
    print(
        " | differ after going on on 3 ranks | planted fault, found at |\n" + "|---" * 7 + "|",
        flush=True,
    )
    for model in given.models:
        for precision in [given.only] if given.only else ["fp32", "bf16"]:
            with tempfile.TemporaryDirectory(prefix="odyssey-models-") as folder:
                print(f"| {' | '.join(row(model, precision, Path(folder)))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
