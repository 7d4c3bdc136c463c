"""Two ranks, one of which is stopped half of the time: steps with `rebalance`, and without it.

A process beside rank 1 stops it and lets it go on (SIGSTOP, SIGCONT) every few milliseconds, much
shorter than a step, as another program on its core would. With `--cpu` both ranks have a share of a
core instead, rank 1 half of the other's, by control groups (v1 or v2): for a machine whose cores
are busy. Runs of both kinds take turns; a step's time is that of rank 0, and the first steps, in
which shards move, are not counted. The weights must be the same in the end: exit code 1 if not.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

PERIOD = 20_000  # microseconds over which a control group's share of a core is kept
DUTY = 0.004  # seconds in which the rank runs, then does not


def slow_down(pid: int) -> None:
    """Stops a process half of the time, until it ends."""
    try:
        # its parent: this process would have another one if it were gone
        while os.getppid() == pid:
            for sign in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(pid, sign)
                time.sleep(DUTY)
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def capped(percent: float) -> Iterator[None]:
    """Within it this process, in a control group, has so much of a core."""
    v1 = Path("/sys/fs/cgroup/cpu")
    home = v1 if v1.is_dir() else Path("/sys/fs/cgroup")
    group, quota = home / f"odyssey-rebalance-{os.getpid()}", int(PERIOD * percent / 100)
    group.mkdir()
    try:
        if v1.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def rank(options: Any) -> None:
    """One rank of a run; rank 0 writes what was measured."""
    from odyssey import DistributedTrainer, comm, data, nn, optim

    world = comm.world()
    loader = data.DataLoader(data.load("mnist", train=True), batch_size=options.batch, shuffle=True)
    batches = [batch for batch in loader if len(batch) == options.batch]
    nn.manual_seed(0)
    settings = {
        "threads": 1,
        "shard_size": options.batch // options.shards,
        "rebalance": options.rebalance,
    }
    trainer = DistributedTrainer(nn.LeNet5(), optim.SGD(lr=0.01), comm=world, **settings)
    seconds, stack = [], contextlib.ExitStack()
    for step in range(options.warmup + options.steps):
        if step == 1 and options.cpu:
            stack.enter_context(capped(options.cpu / (1 + world.rank)))
        elif step == 1 and world.rank == 1:
            subprocess.Popen([sys.executable, __file__, "--slow-down", str(os.getpid())])
        start = time.perf_counter()
        trainer.train_step(batches[step % len(batches)])
        if step >= options.warmup:
            seconds.append(time.perf_counter() - start)
    stack.close()
    weights = trainer.weights_sha256()
    if world.rank == 0:
        found = {
            "seconds": seconds,
            "weights": weights,
            "shards": trainer.layout.counts(options.shards),
        }
        print(json.dumps(found), flush=True)


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    parser.add_argument("--warmup", type=int, default=30, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run that are")
    parser.add_argument("--batch", type=int, default=8192, help="samples of a step")
    parser.add_argument("--shards", type=int, default=32, help="shards of a step")
    parser.add_argument(
        "--cpu",
        type=float,
        default=0,
        metavar="PERCENT",
        help="of a core for rank 0, half for rank 1",
    )
    parser.add_argument("--rank", action="store_true", help="this is a rank")
    parser.add_argument("--rebalance", action="store_true", help="of this rank's training")
    parser.add_argument(
        "--slow-down", type=int, metavar="PID", help="stop this process half of the time"
    )
    options = parser.parse_args()
    if options.slow_down:
        slow_down(options.slow_down)
        return 0
    if options.rank:
        rank(options)
        return 0
    facts = common.print_machine()
    given = [
        f"--{name}={getattr(options, name)}"
        for name in ("warmup", "steps", "batch", "shards", "cpu")
    ]
    command = [*common.mpirun(2), sys.executable, __file__, "--rank", *given]
    runs: dict[str, list[dict[str, Any]]] = {"equal shares": [], "--rebalance": []}
    for _ in range(options.rounds):
        for name, made in runs.items():
            more = [name] if name.startswith("--") else []
            done = subprocess.run([*command, *more], stdout=subprocess.PIPE, text=True, check=True)
            made.append(json.loads(done.stdout.splitlines()[-1]))
    rows, medians = [], []
    for name, made in runs.items():
        each = [common.median(one["seconds"]) for one in made]
        medians.append(each)
        rows.append(
            [
                name,
                *(common.number(1e3 * s, 1) for s in (common.median(each), min(each), max(each))),
            ]
            + [common.number(options.batch / common.median(each)), made[-1]["shards"] or "equal"]
        )
    print(
        common.table(
            ["two ranks, one half as fast", "ms a step", "least", "most", "samples/s", ""], rows
        )
    )
    ratio = common.median([a / b for a, b in zip(*medians, strict=True)])
    same = len({one["weights"] for made in runs.values() for one in made}) == 1
    print(f"{ratio:.2f} x the throughput; weights of all runs {'the same' if same else 'DIFFER'}")
    common.write_json(options.json, "rebalance", facts, runs=runs, ratio=ratio)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
