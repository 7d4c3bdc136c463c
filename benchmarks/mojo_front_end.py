"""A Mojo program against the Python command: samples per second of the same training, and start-up.

LeNet-5 on MNIST, the same settings, in turns; medians. Both run the same kernels, so what differs
is what is around them. The weights must be the same bits. The kernels and the program are compiled
before anything is measured.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common

from odyssey import data
from odyssey.compile import library as build

EXAMPLE = Path(__file__).parents[1] / "examples" / "mojo" / "lenet.mojo"


def program() -> Path:
    """lenet.mojo, compiled for this machine into the cache of the kernels.

    Raises SystemExit if it does not compile.
    """
    root = build.source_root()
    digest = hashlib.sha256(build.plan(root).key.encode() + EXAMPLE.read_bytes()).hexdigest()[:16]
    made = build.cache_dir() / "tests" / f"lenet-{digest}"
    if not made.is_file():
        made.parent.mkdir(parents=True, exist_ok=True)
        include = ["-I", str(root / "mojo"), "-I", str(root)]
        options = [*include, *build.target_options(build.host_cpu()), "-o", str(made)]
        done = build.run_mojo(["build", str(EXAMPLE), *options])
        if done.returncode:
            raise SystemExit(done.stderr)
    return made


def mojo_run(command: list[str]) -> tuple[float, str]:
    """Samples per second and weights of a run of the Mojo program."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rate = re.search(r"([0-9]+) samples/s", done.stdout)
    weights = re.search(r"weights ([0-9a-f]{64})", done.stdout)
    assert rate and weights, done.stdout
    return float(rate[1]), weights[1]


def python_run(options: list[str], ranks: int) -> tuple[float, str]:
    """The same of the Python command."""
    with common.scratch() as folder:
        path = folder / "result.json"
        command = common.train_command(*options, ranks=ranks, json_file=path)
        subprocess.run(command, capture_output=True, text=True, check=True)
        result = json.loads(path.read_text())
    return result["history"][0]["samples_per_second"], result["weights_sha256"]


def startup(command: list[str]) -> float:
    """Seconds until a program that is given a folder that is not there has said so."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    assert "[data]" in done.stderr, done.stderr
    return seconds


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each")
    parser.add_argument("--steps", type=int, default=469, help="of 128 samples")
    parser.add_argument(
        "--ranks", type=int, nargs="*", default=[0, 2], help="0: without a launcher"
    )
    options = parser.parse_args()
    facts = common.print_machine()
    made = str(program())
    folder = ["--data-dir", str(Path(data.__file__).parent / "mnist")]
    settings = ["--steps", str(options.steps), "--threads", "1", "--no-eval"]
    content: list[dict[str, Any]] = []
    for ranks in options.ranks:
        launcher = common.mpirun(ranks) if ranks else []
        rates: dict[str, list[float]] = {"Mojo": [], "Python": []}
        for _ in range(options.rounds):
            mojo, mine = mojo_run([*launcher, made, *settings, *folder])
            python, theirs = python_run(settings, ranks)
            assert mine == theirs, f"weights {mine} and {theirs}"
            rates["Mojo"].append(mojo)
            rates["Python"].append(python)
        for name, values in rates.items():
            content.append(
                {
                    "what": f"{name}, {ranks or 1} process{'es' * (ranks > 1)}",
                    "rate": common.spread(values),
                }
            )
    started = [startup([made, "--data-dir", "nowhere-at-all"]) for _ in range(options.rounds)]
    print(
        f"\nsamples per second of all ranks, one thread each, median of {options.rounds}; the "
        "weights are the same bits"
    )
    lines = [[row["what"], common.number(row["rate"]["median"])] for row in content]
    print(common.table(["", "samples/s"], lines))
    seconds = common.spread(started)
    print(
        "\nfrom the start of the Mojo program to its own first line: "
        f"{1e3 * seconds['median']:.0f} ms"
    )
    common.write_json(options.json, "mojo_front_end", facts, rows=content, start=seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
