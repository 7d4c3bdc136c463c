"""Random faults of all kinds against `odyssey launch`, again and again; each run must end with a
clean one's bytes.

    chaos.py [--minutes 5 | --runs N] [--every 20] [--faults N] [--ranks 4] [--steps 300] [--step-ms
             100] [--seed 0] [--hosts] [--only KIND ...]

About every `--every` seconds something happens to the run: a process of it is killed, stopped, told
to end or to loop for ever, a checkpoint is damaged; with --hosts ranks are on four hosts of
netns.py, which die or are cut off. When the launcher was ended the same command goes on, as
somebody would. Prints a line per fault and a table at the end; ends with 1 if a run did not come to
its end, or with other bytes, or left a process or a file. What it is not: a proof.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from beds import faults, netns, outside

SETTINGS = "--watchdog 4 --grace 10 --max-restarts 6 --backoff 0.2 --elastic 1:4".split()
PATIENCE = 120.0  # seconds without a step that count as a hang
AGAIN = 40  # starts of the launcher, after which a run has failed


class Event(NamedTuple):
    """A fault: what, when (time.monotonic()), after which step, and seconds until the run was
    two steps farther.

    Two: the next one may have been under way and come to its end.
    """

    kind: str
    at: float
    step: int
    seconds: float | None = None


class Run:
    """One training under faults."""

    def __init__(
        self, folder: Path, o: argparse.Namespace, chance: random.Random, hosts: netns.Hosts | None
    ) -> None:
        self.folder, self.o, self.chance, self.hosts = folder, o, chance, hosts
        self.directory = folder / "run"
        self.trigger = folder / "trigger.json"
        self.jobs: list[faults.Job] = []
        self.events: list[Event] = []
        self.wrong: list[str] = []
        self.expected = (0,)  # exit codes of the launcher after which the same command goes on
        self.broken: set[int] = set()

    # --- the run ---

    def start(self) -> None:
        """The command, for the first time or again."""
        settings = [
            *SETTINGS,
            *(
                ["--hosts", ",".join(f"{name}:1" for name in self.hosts.names)]
                if self.hosts
                else []
            ),
        ]
        options = ["--steps", self.o.steps, "--step-ms", self.o.step_ms, "--checkpoint-every", 10]
        command = outside.launch_command(self.o.ranks, self.directory, *options, settings=settings)
        environment = {faults.TRIGGER: str(self.trigger)}
        if self.hosts:
            self.jobs.append(self.hosts.job(command, environment=environment))
        else:
            same = self.jobs[0] if self.jobs else True
            self.jobs.append(
                faults.Job(command, self.folder, environment=environment, own_folders=same)
            )
        self.expected = (0,)

    def __call__(self, kinds: dict[str, Callable[[Run], None]], weights: str) -> None:
        """Until it is complete, or has failed; what was wrong is in `wrong`."""
        self.start()
        due = time.monotonic() + self.o.every * self.chance.uniform(0.4, 1.2)
        moved, known = time.monotonic(), 0
        while not self.wrong:
            job = self.jobs[-1]
            steps = len(job.steps())
            if steps != known:
                moved, known = time.monotonic(), steps
            if job.popen.poll() is not None:
                if not self._ended(job):
                    break
                moved = time.monotonic()
            elif time.monotonic() - moved > PATIENCE:
                self.wrong.append(f"no step for {PATIENCE:.0f} s")
            elif time.monotonic() > due and known and len(self.events) < self.o.faults:
                self._disturb(kinds)
                due = time.monotonic() + self.o.every * self.chance.uniform(0.5, 1.5)
            time.sleep(0.05)
        self._check(weights)
        for job in self.jobs:
            job.end()
        if self.hosts:
            self.hosts.restore()

    def _ended(self, job: faults.Job) -> bool:
        """The launcher has ended: whether it was started again."""
        code = job.wait(10)
        if (self.directory / "DONE.json").exists() and code in (0, *self.expected):
            return False
        if code not in self.expected or code == 0:
            self.wrong.append(f"the launcher ended with {code}, not with {self.expected}")
            return False
        orphans = [line for line in job.left(5) if line.startswith("process")]
        if orphans:
            self.wrong.append(f"left 5 s after its launcher: {orphans}")
        if len(self.jobs) > AGAIN:
            self.wrong.append("it does not come to its end")
        self._mend()
        self.start()
        return not self.wrong

    def _disturb(self, kinds: dict[str, Callable[[Run], None]]) -> None:
        self._mend()
        at, step = time.monotonic(), max(step for job in self.jobs for step, *_ in job.steps())
        farther = not self.events or step > max(e.step for e in self.events) + 2
        allowed = sorted(kind for kind in kinds if farther or kind not in FINAL)
        if not allowed:
            return
        kind = self.chance.choice(allowed)
        try:
            kinds[kind](self)
        except (LookupError, OSError):
            return  # it was between two attempts
        self.events.append(Event(kind, at, step))
        print(f"{time.strftime('%H:%M:%S')}  {kind}", flush=True)

    def _mend(self) -> None:
        """Hosts that were broken before come back, so that there is always something left to
        break.
        """
        for k in sorted(self.broken):
            if self.hosts and k not in self.hosts.alive:
                self.hosts.start_host(k)
            elif self.hosts:
                self.hosts.heal(k)
        self.broken.clear()

    def _check(self, weights: str) -> None:
        if not self.wrong:
            done = json.loads((self.directory / "DONE.json").read_text())["weights_sha256"]
            if done != weights:
                self.wrong.append(f"ended with weights {done[:16]}, not {weights[:16]}")
            left = [
                line
                for line in self.jobs[-1].left(10)
                if self.hosts is None or line.startswith("process")
            ]
            self.wrong += [f"left: {line[:300]}" for line in left]
        steps = sorted((at, step) for job in self.jobs for step, _, at in job.steps())
        for n, e in enumerate(self.events):
            seconds = next(
                (at - e.at for at, step in steps if at > e.at and step >= e.step + 2), None
            )
            self.events[n] = e._replace(seconds=seconds)

    # --- what can be done to it ---

    @property
    def outside(self) -> faults.Outside:
        return self.jobs[-1].outside

    def rank(self) -> int:
        """Any rank that lives."""
        return self.chance.choice(sorted(self.outside.ranks()))

    def ends(self, *codes: int) -> None:
        """The launcher may end with these now."""
        self.expected = codes


def _within(what: str, **more: Any) -> Callable[[Run], None]:
    """A fault of faults.py in any rank, before its next step."""

    def act(run: Run) -> None:
        faults.trigger(run.trigger, getattr(faults, what)(rank=run.rank(), **more))

    return act


def _both(run: Run) -> None:
    first = run.rank()
    run.outside.kill(rank=first)
    time.sleep(run.chance.uniform(0, 1.5))
    with contextlib.suppress(LookupError):
        run.outside.kill(rank=run.rank())


def _damage(run: Run) -> None:
    """A flipped bit in the newest checkpoint, which the next attempt reads."""
    newest = max((run.directory / "checkpoints").glob("step_*/*.safetensors"), default=None)
    if newest is None:
        raise LookupError("no checkpoint yet")
    with open(newest, "r+b") as file:
        at = run.chance.randrange(newest.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0] ^ 1 << run.chance.randrange(8)
        file.seek(at)
        file.write(bytes([byte]))
    run.outside.kill(rank=run.rank())


def _stop(run: Run, number: int) -> None:
    run.outside.signal(number, role="launcher")
    run.ends(75, 128 + number)


def _kill_launcher(run: Run) -> None:
    run.outside.kill(role="launcher")
    run.ends(-9, 137)


def _scale(run: Run) -> None:
    ranks = run.chance.randint(1, run.o.ranks)
    words = [sys.executable, "-m", "odyssey", "scale", run.directory, ranks]
    words = run.hosts.on(0, *words) if run.hosts else [str(word) for word in words]
    done = subprocess.run(
        words, env=run.jobs[-1].environment, capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise LookupError(done.stderr)


def _host(run: Run, act: str) -> None:
    assert run.hosts is not None
    k = run.chance.choice(sorted(run.hosts.alive - {1}))
    run.broken.add(k)
    getattr(run.hosts, act)(k)


KINDS: dict[str, Callable[[Run], None]] = {
    "rank: SIGKILL": lambda run: run.outside.kill(rank=run.rank()),
    "rank: SIGSEGV": lambda run: run.outside.signal(signal.SIGSEGV, rank=run.rank()),
    "rank: SIGSTOP": lambda run: run.outside.stop(rank=run.rank()),
    "rank: SIGTERM": lambda run: (
        run.outside.signal(signal.SIGTERM, rank=run.rank()),
        run.ends(75),
    ),
    "rank: exception": _within("raises"),
    "rank: sys.exit(3)": _within("exits"),
    "rank: os._exit(0)": _within("_exit"),
    "rank: leaves early": _within("returns_early"),
    "rank: endless loop": _within("loop"),
    "rank: loop with the GIL": _within("loop", holding_gil=True),
    "rank: one late step": _within("slow", ms=2000, until=None),
    "two ranks: SIGKILL": _both,
    "wrapper: SIGKILL": lambda run: run.outside.kill(role="wrapper"),
    "watcher: SIGKILL": lambda run: run.outside.kill(role="watcher"),
    "MPI daemon: SIGKILL": lambda run: run.outside.kill(role="proxy"),
    "mpirun: SIGKILL": lambda run: run.outside.kill(role="mpirun"),
    "launcher: SIGKILL": _kill_launcher,
    "launcher: SIGTERM": lambda run: _stop(run, signal.SIGTERM),
    "launcher: SIGINT": lambda run: _stop(run, signal.SIGINT),
    "checkpoint damaged": _damage,
    "odyssey scale": _scale,
}
# twice without progress in between means to give up
FINAL = ("rank: exception", "rank: sys.exit(3)")
HOSTS: dict[str, Callable[[Run], None]] = {
    "host dies": lambda run: _host(run, "kill_host"),
    "host cut off": lambda run: _host(run, "partition"),
}


def options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=5, help="no run begins after so many")
    parser.add_argument("--runs", type=int, help="so many runs, however long they take")
    parser.add_argument(
        "--every", type=float, default=20, help="seconds from fault to fault, on average"
    )
    parser.add_argument("--faults", type=int, default=1 << 30, help="at most so many in a run")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", action="store_true", help="four hosts of netns.py; needs root")
    parser.add_argument(
        "--only", nargs="+", metavar="KIND", help=f"of: {', '.join([*KINDS, *HOSTS])}"
    )
    return parser.parse_args(words)


def soak(words: list[str] | None = None) -> int:
    """See the top of the file; the exit code."""
    o = options(words)
    kinds = {**KINDS, **(HOSTS if o.hosts else {})}
    if o.only:
        kinds = {name: kinds[name] for name in o.only}
    if o.hosts and (why := netns.why_not()):
        raise SystemExit(why)
    chance = random.Random(o.seed)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    events: list[Event] = []
    failed = number = 0
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        hosts = stack.enter_context(netns.Hosts(4, folder)) if o.hosts else None
        clean = stack.enter_context(
            faults.Job([sys.executable, outside.JOB, "--steps", o.steps, "--quiet"], folder)
        )
        assert clean.wait(120) == 0, clean.output
        until = time.monotonic() + 60 * o.minutes
        while number < o.runs if o.runs is not None else time.monotonic() < until:
            number += 1
            place = folder / str(number)
            place.mkdir()
            run = Run(place, o, chance, hosts)
            run(kinds, str(clean.weights))
            events += run.events
            failed += bool(run.wrong)
            starts = f"{len(run.jobs)} start{'s' * (len(run.jobs) > 1)} of the launcher"
            how = "; ".join(run.wrong) or "same weights"
            print(f"run {number}: {how} ({len(run.events)} faults, {starts})", flush=True)
            if run.wrong:
                print(
                    "\n".join(line for job in run.jobs for _, line in job.lines[-80:]), flush=True
                )
    _table(events, number, failed)
    return int(failed > 0)


def _table(events: list[Event], runs: int, failed: int) -> None:
    print(
        f"\n{runs - failed} of {runs} runs ended with the weights of a clean run, after "
        f"{len(events)} faults"
    )
    print(
        f"{'fault':28}{'times':>6}{'median':>9}{'longest':>9}   seconds until it was two steps "
        "farther"
    )
    for kind in sorted({e.kind for e in events}):
        mine = [e for e in events if e.kind == kind]
        seconds = [e.seconds for e in mine if e.seconds is not None]
        figures = (
            f"{statistics.median(seconds):9.1f}{max(seconds):9.1f}"
            if seconds
            else f"{'-':>9}{'-':>9}"
        )
        print(f"{kind:28}{len(mine):6}{figures}")


if __name__ == "__main__":
    sys.exit(soak())
