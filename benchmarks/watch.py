"""What is always on costs, per LeNet-5 step: status slots, the watcher, the comparison of calls;
and in a run the step log with its fingerprints, requests to stop and the comparison of
replicas.

One job; its turns of some steps alternate between everything on and parts off, so that a busy
machine weighs on all alike. What is shown is the median, over the rounds, of a turn's time against
that of everything off in the same round; and beside it, as further witnesses, the processor time
that ranks and watcher used, some of it waiting in turns, and a quiet step: the first quartile of
the times of single steps on rank 0, which leaves out what comes now and then. Parts are switched
off here only: there is no option for it. Without the comparison of calls, places in the source are
not looked up and texts not made; the words by which ranks compare go with the data over MPI, and
with the barrier that the call needs anyway over shared memory, so they stay.

On a busy machine the figures are of its other work. With --realtime (root) the ranks and the
watcher go before that for the turns, some ten seconds in which nothing else gets a core.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import common
import numpy as np

from odyssey.callbacks import Callback

TURNS = {  # name -> what is on
    "off": (),
    "slots": ("slots",),
    "slots, watcher": ("slots", "watcher"),
    "slots, watcher, comparison": ("slots", "watcher", "comparison"),
    "all of it, in a run": ("slots", "watcher", "comparison", "session"),
}
SLOT = (
    "phase",
    "step",
    "note_call",
    "begin_wait",
    "end_wait",
    "note_short_call",
    "count_wait",
    "note_missing_ranks",
)


class Switch:
    """Puts parts off and on, in this process."""

    def __init__(self) -> None:
        from odyssey.base import slot
        from odyssey.comm import base, mpi, shm

        self.watcher = watcher()
        self.slot, self.on = slot, {name: getattr(slot, name) for name in SLOT}
        self.places = [
            (m, n, getattr(m, n))
            for m in (base, mpi, shm)
            for n in ("caller_location", "describe_call")
        ]

    def realtime(self) -> None:
        """Puts this process, and the watcher that it has started, before all others."""
        for process in (0, self.watcher):
            if process is not None:
                os.sched_setscheduler(process, os.SCHED_RR, os.sched_param(1))

    def used(self) -> float:
        """Seconds of processor time of this process, and of the watcher that it has started."""
        seconds = time.process_time()
        if self.watcher is not None:
            seconds += int(Path(f"/proc/{self.watcher}/schedstat").read_text().split()[0]) / 1e9
        return seconds

    def __call__(self, parts: tuple[str, ...]) -> None:
        for name, function in self.on.items():
            setattr(self.slot, name, function if "slots" in parts else (lambda *_: "compute"))
        if self.watcher is not None:
            os.kill(self.watcher, signal.SIGCONT if "watcher" in parts else signal.SIGSTOP)
        compared = "comparison" in parts
        for module, name, function in self.places:
            off: Any = (
                (lambda depth: ("off", 0))
                if name == "caller_location"
                else (lambda *_: (1, "off at off:0"))
            )
            setattr(module, name, function if compared else off)


def watcher() -> int | None:
    """The pid of the watcher that this process has started, which is no child of it; None of the
    other ranks.
    """
    from odyssey.base.exits import MARK

    mine = f"{MARK}={os.getpid()}".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"watcher.py" in path.read_bytes() and mine in path.with_name(
                "environ"
            ).read_bytes().split(b"\0"):
                return int(path.parent.name)
        except OSError:  # it has just ended, or is another user's
            continue
    return None


class Ends(Callback):
    """When steps ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, context: Any) -> None:
        self.times.append(time.perf_counter())


def rank(options: Any) -> None:
    """One rank of the job."""
    from odyssey import DistributedTrainer, comm, data, nn, optim
    from odyssey.callbacks import Context
    from odyssey.checkpoints.trainable import Saving
    from odyssey.train.session import Session

    world = comm.world(options.backend)
    nn.manual_seed(0)
    loader = data.DataLoader(
        data.load("mnist", train=True), batch_size=options.batch * world.size, shuffle=True
    )
    trainer = DistributedTrainer(nn.LeNet5(), optim.SGD(lr=0.01), comm=world, threads=1)
    batch = next(iter(loader))
    trainer.context = context = Context(trainer, epochs=1, saving=Saving(every=10**9))
    session = Session(trainer, loader, context)
    session.begin()
    listeners = trainer.loop.listeners(session, verbose=False)
    context.callbacks = listeners
    context.emit("on_fit_start")
    time.sleep(1)  # the watcher has found its place
    switch = Switch()
    if world.rank == 0 and switch.watcher is None:
        raise RuntimeError("no watcher was found that could be switched off")
    if options.realtime:
        switch.realtime()
    seconds: dict[str, list[float]] = {name: [] for name in TURNS}
    used: dict[str, list[float]] = {name: [] for name in TURNS}
    single: dict[str, list[float]] = {name: [] for name in TURNS}
    ends = Ends()

    def turn() -> tuple[float, float]:
        """Seconds of a step, and of processor time of all."""
        world.barrier()
        ends.times.clear()
        start, before = time.perf_counter(), switch.used()
        trainer.take_steps(iter([batch] * options.steps), options.steps)
        took, busy = time.perf_counter() - start, switch.used() - before
        most, total = (
            world.all_reduce(np.array([took]), "max")[0],
            world.all_reduce(np.array([busy]))[0],
        )
        return float(most) / options.steps, float(total) / options.steps

    for round_ in range(options.rounds + 2):  # the first two are not counted
        names = list(TURNS)
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            world.barrier()
            switch(TURNS[name])
            trainer.loop.session = session if "session" in TURNS[name] else None
            context.callbacks = [*(listeners if trainer.loop.session else ()), ends]
            took, busy = turn()
            if round_ >= 2:
                seconds[name].append(took)
                used[name].append(busy)
                single[name] += np.diff(ends.times).tolist()
    switch(("slots", "watcher", "comparison"))
    context.callbacks = listeners
    context.emit("on_fit_end")
    session.close()
    if world.rank == 0:
        options.rank.write_text(
            json.dumps({"seconds": seconds, "used": used, "single": single, "backend": world.name})
        )


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="of one thread each")
    parser.add_argument("--batch", type=int, default=64, help="samples of a rank in a step")
    parser.add_argument(
        "--backend", default="auto", choices=("auto", "mpi", "shm"), help="transport"
    )
    parser.add_argument("--rounds", type=int, default=60, help="turns of each")
    parser.add_argument("--steps", type=int, default=100, help="of each turn")
    parser.add_argument(
        "--realtime", action="store_true", help="go before all other work of the machine"
    )
    parser.add_argument("--rank", type=Path, help=common.INTERNAL)
    options = parser.parse_args()
    if options.rank:
        rank(options)
        return 0
    facts = common.print_machine()
    with common.scratch() as folder:
        out = folder / "result.json"
        settings: list[Any] = ["--rank", out, "--backend", options.backend]
        for key in ("batch", "rounds", "steps"):
            settings += [f"--{key}", getattr(options, key)]
        settings += ["--realtime"] * options.realtime
        os.environ["ODYSSEY_RUN_DIR"] = str(folder / "run")
        common.child([*common.mpirun(options.ranks), sys.executable, __file__, *map(str, settings)])
        found = json.loads(out.read_text())
    rows, lines = [], []
    for name in TURNS:
        row: dict[str, Any] = {"on": name}
        cells = [name]
        for key, cost in (("seconds", "cost"), ("used", "cost_used")):
            times, off = found[key][name], found[key]["off"]
            row |= {
                key: common.spread(times),
                cost: common.median([a / b - 1 for a, b in zip(times, off, strict=True)]),
            }
            shown = "" if name == "off" else f"{100 * row[cost]:+.1f} %"
            cells += [common.number(1e6 * common.median(times), 0) or "", shown]
        row["quiet"] = common.quantile(found["single"][name], 0.25)
        cells.append(f"{1e6 * row['quiet']:,.1f}")
        cells.append(
            "" if name == "off" else f"{100 * (row['quiet'] / rows[0]['quiet'] - 1):+.1f} %"
        )
        rows.append(row)
        lines.append(cells)
    print(
        f"\nLeNet-5, {options.ranks} ranks over {found['backend']}, {options.batch} samples "
        "each; us per step"
    )
    print(
        common.table(
            [
                "on",
                "median",
                "against off",
                "processor time of all",
                "against off",
                "quiet step",
                "against off",
            ],
            lines,
        )
    )
    common.write_json(
        options.json, "watch", facts, ranks=options.ranks, batch=options.batch, rows=rows
    )
    return 0


if __name__ == "__main__":
    os.environ.setdefault("ODYSSEY_WATCHDOG", "0")  # a stopped watcher misses nothing
    sys.exit(main())
