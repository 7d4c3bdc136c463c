"""How long it takes until training begins, and how much memory a rank has.

Whole processes, with the kernels already compiled and the files already read once; medians. For the
imports there is PyTorch beside it, in turns, if it is installed. What compiling the kernels takes
the first time is not measured here.
"""

from __future__ import annotations

import sys
from typing import Any

import common


def rows(torch: bool) -> dict[str, list[str]]:
    """What is run, by name."""
    python = [sys.executable, "-c"]
    found = {"python -c pass": [*python, "pass"], "import odyssey": [*python, "import odyssey"]}
    found["import odyssey, all of it"] = [
        *python,
        "from odyssey import data, nn, optim, trainer, functional, comm",
    ]
    if torch:
        found["import torch"] = [*python, "import torch"]
    one = ["--steps", "1", "--no-eval", "--threads", "1"]
    found["odyssey train --help"] = [sys.executable, "-m", "odyssey", "train", "--help"]
    found["odyssey train --steps 1 --no-eval"] = common.train_command(*one)
    found["the same, 2 ranks"] = common.train_command(*one, ranks=2)
    found["LeNet-5, one epoch and evaluation"] = common.train_command(
        "--epochs", "1", "--threads", "1"
    )
    return found


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each row")
    options = parser.parse_args()
    facts = common.print_machine()
    commands = rows(common.have_torch())
    for command in commands.values():
        common.child(command)  # compiles and reads whatever is not there yet
    used: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            used[name].append(common.child(command))
    content: list[dict[str, Any]] = []
    for name, runs in used.items():
        seconds, mib = (common.spread([one[key] for one in runs]) for key in ("seconds", "mib"))
        content.append({"what": name, "seconds": seconds, "max_rss_mib": mib})
    print(f"\nwall time of the process and its largest resident set, median of {options.rounds}")
    lines = [
        [
            row["what"],
            common.number(1e3 * row["seconds"]["median"]),
            common.number(row["max_rss_mib"]["median"]),
        ]
        for row in content
    ]
    print(common.table(["", "ms", "MiB"], lines))
    common.write_json(
        options.json, "startup", facts, options={"rounds": options.rounds}, rows=content
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
