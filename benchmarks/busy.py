"""Training on a machine that others use too: the default number of threads against one, per load.

The load is processes that only count, so many per core; they are started and ended here. LeNet-5 on
MNIST is trained by processes that stay, in turns, each for some seconds of wall time; a ratio is of
two neighbours in one turn, and what is shown is its median over the turns. With --against, the
default of another checkout is a third side.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common


def work(threads: int | None, batch: int) -> None:
    """A side: for each line of seconds on standard input trains so long, and says samples/s and
    its threads.
    """
    from odyssey import DistributedTrainer, data, nn, optim

    trainer = DistributedTrainer(
        nn.models.LeNet5(), optim.SGD(lr=0.001), backend="local", threads=threads
    )
    loader = data.DataLoader(
        data.load("mnist", train=True), batch_size=batch, shuffle=True, drop_last=True
    )
    batches = iter(loader)
    trainer.train_step(next(batches))
    print("ready", flush=True)
    for line in sys.stdin:
        start, steps = time.perf_counter(), 0
        while (now := time.perf_counter()) - start < float(line):
            batch_ = next(batches, None)
            if batch_ is None:
                batches = iter(loader)
                continue
            trainer.train_step(batch_)
            steps += 1
        print(steps * batch / (now - start), trainer.threads, flush=True)


class Side:
    """A process that trains when it is told to."""

    def __init__(
        self, options: Any, threads: int | None = None, package: Path | None = None
    ) -> None:
        environment = dict(os.environ)
        if package is not None:
            environment["PYTHONPATH"] = str(package)
        command = [
            sys.executable,
            __file__,
            "--worker",
            str(threads or 0),
            "--batch",
            str(options.batch),
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, env=environment, **pipes)
        if self.process.stdout.readline().strip() != "ready":
            raise SystemExit("a process of the benchmark did not start; see above")
        self.threads = threads

    def run(self, seconds: float) -> float:
        """Samples per second."""
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        rate, self.threads = self.process.stdout.readline().split()
        return float(rate)


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that use all the time they get."""
    started = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)
    ]
    try:
        time.sleep(0.5 if started else 0)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--batch", type=int, default=128, help="samples of a step")
    parser.add_argument(
        "--loads",
        type=float,
        nargs="+",
        default=[0, 2],
        metavar="N",
        help="counting processes per core",
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns")
    parser.add_argument("--seconds", type=float, default=2, help="of a side in a turn")
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="the folder python of another checkout"
    )
    parser.add_argument("--worker", type=int, help=common.INTERNAL)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker or None, options.batch)
        return 0
    facts = common.print_machine()
    sides = {"one thread": Side(options, 1), "default": Side(options)}
    if options.against is not None:
        sides["against"] = Side(options, package=options.against)
    rows, lines = [], []
    for per_core in options.loads:
        rates: dict[str, list[float]] = {name: [] for name in sides}
        with load(round(per_core * len(common.cores() or [0]))):
            for _ in range(options.rounds):
                for name, side in sides.items():
                    rates[name].append(side.run(options.seconds))
        row: dict[str, Any] = {
            "load_per_core": per_core,
            "rates": {k: common.spread(v) for k, v in rates.items()},
        }
        line: list[Any] = [f"{per_core:g}"]
        for name in sides:
            line.append(common.number(row["rates"][name]["median"]))
            if name != "default":
                pairs = zip(rates["default"], rates[name], strict=True)
                row[f"default / {name}"] = common.spread([a / b for a, b in pairs])
                line.append(common.number(row[f"default / {name}"]["median"], 2))
        rows.append(row)
        lines.append(line)
    headers = [
        "load per core",
        "one thread",
        "default / it",
        f"default ({sides['default'].threads} threads)",
    ]
    headers += ["against", "default / it"] if options.against is not None else []
    print(
        f"\nLeNet-5, batch {options.batch}: samples/s, medians of {options.rounds} turns of "
        f"{options.seconds:g} s"
    )
    print(common.table(headers, lines))
    common.write_json(options.json, "busy", facts, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
