"""What happens when a process of a training dies, fails or stands still: measured in the same
way for every system.

Each function takes a system and an empty folder and returns plain numbers; nothing here knows what
is expected.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from harness import ENDLESS, EVERY, System, ended

RANKS = 4
STEPS = 40
STEP_MS = 30
PATIENCE = 20.0  # seconds after which something counts as hanging
SHORTEST = 3  # seconds: what each system's timeout is set to


def undisturbed(system: System, folder: Path) -> str:
    """The weights' hash of a run in which nothing happens."""
    with system.job(system.training(RANKS, folder, "--steps", STEPS), folder) as job:
        code = job.wait(120)
        if code or job.weights is None:
            raise SystemExit(
                f"{system.name}: the undisturbed run ended with {code}:\n{job.output[-4000:]}"
            )
        return job.weights


def restart(system: System, folder: Path, expected: str, dice: random.Random) -> dict[str, Any]:
    """SIGKILL to one rank at a random step, one restart allowed: goes it on, after how long,
    with the same bytes?
    """
    rank = dice.randrange(RANKS)
    at = dice.randrange(2 * EVERY, STEPS - 2 * EVERY)
    command = system.training(RANKS, folder, "--steps", STEPS, "--step-ms", STEP_MS, restarts=1)
    with system.job(command, folder) as job:
        job.wait_for_step(at, 120)
        time.sleep(dice.uniform(0, STEP_MS / 1000))
        pid = system.pid(job, rank)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        end = ended(job, 60)
        again = system.second_life(job)
        return {
            "rank": rank,
            "step": at,
            "code": None if end is None else end[1],
            "went_on": end is not None and end[1] == 0 and again is not None,
            "seconds": None if again is None else round(again - killed, 3),
            "same_bytes": job.weights == expected,
            "last_words": job.output[-600:] if end is None or end[1] else "",
        }


def launcher_killed(system: System, folder: Path) -> dict[str, Any]:
    """SIGKILL to the launcher: processes and files that are left three seconds later."""
    with system.job(
        system.training(RANKS, folder, "--steps", ENDLESS, "--step-ms", STEP_MS), folder
    ) as job:
        job.wait_for_step(8, 120)
        os.kill(job.pid, signal.SIGKILL)
        time.sleep(3)
        left = job.outside.processes()
        return {
            "processes": [f"{p.role}: {' '.join(p.words)[:120]}" for p in left],
            "files": _names(job.new_files()),
        }


def fails(system: System, folder: Path, fault: str) -> dict[str, Any]:
    """Rank 1 raises an exception, or calls sys.exit(3), just before step 8; no restart is
    allowed.
    """
    command = system.training(RANKS, folder, "--steps", ENDLESS, "--step-ms", STEP_MS, fault=fault)
    with system.job(command, folder, fault) as job:
        job.wait_for_step(7, 120)
        began = next(stamp for step, _, stamp in job.steps() if step == 7)
        return _end(system, job, began, PATIENCE)


def stopped(system: System, folder: Path) -> dict[str, Any]:
    """SIGSTOP to rank 1, with the shortest timeout that the system is told."""
    command = system.training(
        RANKS, folder, "--steps", ENDLESS, "--step-ms", STEP_MS, timeout=SHORTEST
    )
    with system.job(command, folder) as job:
        job.wait_for_step(8, 120)
        pid = system.pid(job, 1)
        os.kill(pid, signal.SIGSTOP)
        result = _end(system, job, time.monotonic(), 60)
        job.outside.end()
        return result


def flipped_weight(system: System, folder: Path) -> dict[str, Any]:
    """One bit of one weight of rank 1 is flipped before step 8 of 120: does anybody notice?"""
    command = system.training(RANKS, folder, "--steps", 120, fault="flips_weight")
    with system.job(command, folder, "flips_weight") as job:
        return _end(system, job, time.monotonic(), 120)


def resumed(system: System, folder: Path) -> dict[str, Any]:
    """40 steps on 4 ranks; then the same killed on the way and resumed on 3, killed again and
    resumed on 1.
    """
    whole = _hashes(system, folder / "whole", (4,), ())
    parts = _hashes(system, folder / "parts", (4, 3, 1), (EVERY * 2 + 3, EVERY * 5 + 3))
    differ = sorted(step for step, sha in parts["steps"].items() if whole["steps"].get(step) != sha)
    return {
        "same_bytes": whole["weights"] is not None and whole["weights"] == parts["weights"],
        "first_step_that_differs": differ[0] if differ else None,
        "steps_on": parts["on"],
        "weights": [whole["weights"], parts["weights"]],
    }


def _hashes(
    system: System, folder: Path, ranks: tuple[int, ...], kills: tuple[int, ...]
) -> dict[str, Any]:
    """Step -> hash of a training that is killed when it has made step kills[i] on ranks[i]
    ranks.
    """
    steps: dict[int, str] = {}
    on: list[str] = []
    weights = None
    for number, count in enumerate(ranks):
        command = system.training(
            count, folder, "--steps", STEPS, "--step-ms", STEP_MS if kills else 0
        )
        with system.job(command, folder) as job:
            if number < len(kills):
                job.wait_for_step(kills[number], 120)
                job.outside.end()  # all of it at once, as when the power goes
                time.sleep(0.2)
            elif code := job.wait(120):
                raise SystemExit(
                    f"{system.name}: {count} ranks ended with {code}:\n{job.output[-4000:]}"
                )
            made = {step: sha for step, sha, _ in job.steps()}
            if not made:
                raise SystemExit(
                    f"{system.name}: {count} ranks made no step:\n{job.output[-4000:]}"
                )
            steps |= made
            on.append(f"{min(made)}-{max(made)} on {count}")
            weights = job.weights
    return {"steps": steps, "on": on, "weights": weights}


def _end(system: System, job: Any, began: float, within: float) -> dict[str, Any]:
    end = ended(job, within)
    output = job.output
    words = [(at, line) for at, line in job.lines if line.strip() and not line.startswith("step ")]
    told = [at for at, _ in words if at > began]
    return {
        "seconds": None if end is None else round(end[0] - began, 2),
        "told": round(told[0] - began, 2) if told else None,
        "watched": within,
        "code": None if end is None else end[1],
        "named": None if end is None else system.named(output),
        "last_words": "\n".join(line for _, line in words)[-3000:],
    }


def _names(files: list[Path]) -> list[str]:
    return sorted(f"{'/dev/shm' if 'shm' in file.parts else '/tmp'}/{file.name}" for file in files)
