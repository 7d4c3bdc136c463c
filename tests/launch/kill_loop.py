"""Kills ranks of `odyssey launch` at random moments, again and again; every run must end by
itself with the same bytes.

    kill_loop.py [--runs 50] [--double 20] [--ranks 4] [--seed 0] [--whom rank] [OPTIONS OF odyssey
        train ...]
    kill_loop.py [...] --uniform --program SCRIPT [ITS ARGUMENTS ...]

Each run gets one SIGKILL, on a random rank, at a random moment: while its ranks start (a fifth of
the runs), or at a random step; each of the double faults a second one within a second and a half of
the first, while the run recovers. With --uniform each of PHASES is as likely, whatever its share of
the time: the kill comes at the first moment after a random step at which rank 0 shows that phase.
Steps, and the time from the kill to the next one, are read from the ranks' status slots. What it is
not: a benchmark of training.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from odyssey.base import slot
from odyssey.launch.attempt import newest_step

TRAINING = (
    "--steps 600 --global-batch-size 256 --checkpoint-every 20 --no-eval --no-progress".split()
)
PHASES = ("start", "data", "compute", "checkpoint", "evaluate")
HELPERS = ("rank", "wrapper", "daemon", "mpirun")


class Result(NamedTuple):
    """Of one run: exit code, hash of the weights, seconds from each kill to the next step, and
    what was printed.
    """

    code: int
    weights: str
    steps: int
    seconds: list[float]
    printed: str
    total: float
    kills: int
    phases: list[str]  # in which the kills found their ranks


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Run:
    """One run, watched and disturbed; `training`: the words after those of `odyssey launch`."""

    def __init__(self, folder: Path, ranks: int, training: list[str]) -> None:
        self.folder, self.ranks, self.seconds, self.kills, self.phases = folder, ranks, [], 0, []
        words = [
            sys.executable,
            "-m",
            "odyssey",
            "launch",
            "-n",
            str(ranks),
            "--run-dir",
            str(folder),
        ]
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [*words, *training], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._slots: dict[int, int] = {}

    def attempt(self) -> int:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return json.loads((self.folder / "attempt.json").read_text())["attempt"]
        return 0

    def pid(self, rank: int) -> int | None:
        """Of a rank that lives in the newest attempt."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads((self.folder / "ranks" / f"{rank}.json").read_text())
            if record["attempt"] == self.attempt() and Path(f"/proc/{record['pid']}/fd").exists():
                return record["pid"]
        return None

    def step(self) -> tuple[int, int]:
        """(attempt, step) that rank 0 shows; (0, 0) where there is nothing to see."""
        found = self.shown(self.pid(0))
        return (found.attempt, found.step) if found else (0, 0)

    def shown(self, pid: int | None) -> slot.StatusSlot | None:
        """What a process shows of itself."""
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{name}"
                if "odyssey-slot" in os.readlink(path):
                    descriptor = os.open(path, os.O_RDONLY)
                    try:
                        return slot.read(descriptor)
                    finally:
                        os.close(descriptor)
        return None

    def wait(self, step: int) -> None:
        """Waits until a rank has started (step 0), or rank 0 is at a step."""
        while self.process.poll() is None:
            if (
                step < 0
                or (step == 0 and self.pid(0) is not None)
                or (step > 0 and self.step()[1] >= step)
            ):
                return
            time.sleep(0.002)

    def wait_for(self, phase: str) -> None:
        """Waits until rank 0 shows a phase."""
        while self.process.poll() is None:
            found = self.shown(self.pid(0))
            if found is not None and found.phase == phase:
                return
            time.sleep(0.0005)

    def kill(self, rank: int, whom: str) -> bool:
        """Kills a rank, or what stands above it, as soon as there is one; False if the run is
        over.
        """
        while self.process.poll() is None:
            pid = self.pid(rank)
            if pid is not None:
                found = self.shown(self.pid(0))
                with contextlib.suppress(OSError):
                    for _ in range(HELPERS.index(whom)):
                        pid = parent(pid)
                    os.kill(pid, signal.SIGKILL)
                    self.phases.append(found.phase if found else "start")
                    return True
            time.sleep(0.002)
        return False

    def recovered(self, before: int, at: float) -> None:
        """Waits for the first step of a later attempt, notes how long it took."""
        while self.process.poll() is None:
            attempt, step = self.step()
            if attempt > before and step > (newest_step(self.folder / "checkpoints") or 0):
                self.seconds.append(time.monotonic() - at)
                return
            time.sleep(0.002)

    def end(self) -> Result:
        try:
            printed = self.process.communicate(timeout=120)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            printed = "HANG\n" + self.process.communicate()[0]
        done = {}
        with contextlib.suppress(OSError, ValueError):
            done = json.loads((self.folder / "DONE.json").read_text())
        return Result(
            self.process.returncode,
            done.get("weights_sha256", ""),
            done.get("steps", 0),
            self.seconds,
            printed,
            time.monotonic() - self.begun,
            self.kills,
            self.phases,
        )


Kill = tuple[int, float] | tuple[int, float, str]


def one(
    ranks: int, training: list[str], kills: list[Kill], whom: str, dice: random.Random
) -> Result:
    """A run with kills, each at a step (0: once a rank has started; -1: whatever happens), in a
    phase if one is given, and some seconds later.
    """
    with tempfile.TemporaryDirectory(prefix="odyssey-kill-loop-") as folder:
        run = Run(Path(folder) / "run", ranks, training)
        for number, (step, delay, *phase) in enumerate(kills):
            run.wait(step)
            if phase:
                run.wait_for(phase[0])
            time.sleep(delay)
            if not run.kill(dice.randrange(ranks), whom):
                break
            at, before = time.monotonic(), run.attempt()
            run.kills += 1
            if number == len(kills) - 1:
                run.recovered(before, at)
        return run.end()


def loop(
    runs: int,
    double: int,
    ranks: int,
    training: list[str],
    seed: int,
    whom: str = "rank",
    uniform: bool = False,
) -> int:
    """All of it, with a line for each run that went wrong and a summary; how many went wrong."""
    dice = random.Random(seed)
    clean = one(ranks, training, [], whom, dice)
    if clean.code or not clean.weights:
        print(clean.printed)
        raise SystemExit("the undisturbed run failed")
    print(f"undisturbed: {clean.total:.1f} s, weights {clean.weights[:16]}", flush=True)
    seconds: list[float] = []
    wrong = restarts = done = 0
    phases: collections.Counter[str] = collections.Counter()
    for number in range(runs + double):
        early = dice.random() < 0.2
        kills = [(0, dice.uniform(0, 1)) if early else (dice.randint(1, clean.steps - 2), 0.0)]
        if uniform and (phase := dice.choice(PHASES)) != "start":
            kills = [(dice.randint(1, clean.steps - 20), 0.0, phase)]
        elif uniform:
            kills = [(-1, dice.uniform(0, clean.total / 2))]
        kills += [(-1, dice.uniform(0, 1.5))] if number >= runs else []
        result = one(ranks, training, kills, whom, dice)
        done += result.kills
        phases.update(result.phases)
        restarts += len(re.findall(r"; restarting ", result.printed))
        seconds += result.seconds if number < runs else []
        if result.code or result.weights != clean.weights:
            wrong += 1
            print(
                f"run {number + 1}: killed after {kills}: exit code {result.code}, weights "
                f"{result.weights[:16]!r}"
            )
            print(result.printed, flush=True)
    seconds.sort()
    same = runs + double - wrong
    print(
        f"{same} of {runs} + {double} runs ended with the bytes of the undisturbed run; "
        f"{done} kills, {restarts} restarts, seed {seed}; killed in {dict(phases.most_common())}"
    )
    if seconds:
        middle = seconds[len(seconds) // 2]
        print(
            f"from the kill to the next step: median {middle:.2f} s, max {seconds[-1]:.2f} s "
            f"({len(seconds)} kills)"
        )
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=50, help="with one kill each")
    parser.add_argument("--double", type=int, default=20, help="with two kills")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whom", choices=HELPERS, default="rank", help="what is killed")
    parser.add_argument("--uniform", action="store_true", help="kill in every phase of a run alike")
    parser.add_argument("--program", help="instead of odyssey train; what follows is given to it")
    given, rest = parser.parse_known_args()
    words = [given.program, *rest] if given.program else ["train", *(rest or TRAINING)]
    sys.exit(
        min(
            1,
            loop(
                given.runs, given.double, given.ranks, words, given.seed, given.whom, given.uniform
            ),
        )
    )
