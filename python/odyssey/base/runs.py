"""A run: one training from its start to its end, over all attempts, and the directory that holds
what it leaves.

A process that is part of a run finds it by two environment variables. A training without a run
directory works as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import OutputError
from .files import private_directory, write_json

RUN_DIR = "ODYSSEY_RUN_DIR"
ATTEMPT = "ODYSSEY_ATTEMPT"
EXPECTED_RANKS = "ODYSSEY_RANKS"  # how many the launcher of a run started


def begin(run: Run, command: list[str]) -> None:
    """Makes the directory of a run, or goes on in it, and says in it what is run: the first
    command stays.

    Whether a command goes on with the same training is not compared here, but where its checkpoint
    is read: it may be another layout. Raises OutputError: it cannot be written, or belongs to
    another user.
    """
    private_directory(run.path)
    if run.description.exists():
        return
    about = {
        "command": command,
        "directory": os.getcwd(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    try:
        write_json(run.description, about)
    except OSError as problem:
        raise OutputError(
            f"[run] {run.description} cannot be written: {problem.strerror}"
        ) from problem


def _file(name: str) -> Any:
    """The file or directory of a run that has this name."""
    return property(lambda run: run.path / name)


class Run(NamedTuple):
    """A run's directory, and the number of the attempt that this process belongs to (from 1; 0:
    none).
    """

    path: Path
    attempt: int = 0

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> Run | None:
        """The run that this process is part of."""
        directory = environment.get(RUN_DIR)
        if not directory:
            return None
        number = environment.get(ATTEMPT, "")
        return cls(Path(directory), int(number) if number.isascii() and number.isdigit() else 0)

    description = _file("run.json")  # what is run: command, configuration, version; written once
    # the attempt that may write: its number, launcher (host, pid), ranks
    attempt_file = _file("attempt.json")
    # what somebody asks of the running job: to stop, to go on with other ranks
    control = _file("control.json")
    checkpoints = _file("checkpoints")  # step_00000120/ ... (odyssey.checkpoints)
    steps = _file("steps")  # what each step did: cursor, loss, fingerprints (odyssey.audit.steplog)
    journal = _file("journal.jsonl")  # what happened when (odyssey.view.journal)
    timeline = _file("timeline")  # recordings of --trace, one directory each (odyssey.view.trace)
    heartbeat = _file("heartbeat.json")  # where the ranks are, written each second while they run
    ranks = _file("ranks")  # where ranks of the latest attempt run: 3.json = rank 3
    ends = _file("ends")  # how they ended: 3.json; 3.reason.json is what rank 3 itself had to say
    lock = _file("launch.lock")  # held by the launcher that is at work: its host and process
    done = _file("DONE.json")  # the run is complete; nothing else says so

    @property
    def logs(self) -> Path:
        """Output and stacks."""
        return self.path / "logs" / f"attempt-{self.attempt}"


def end_record(
    rank: int,
    host: str,
    code: int | None,
    signal: int | None,
    step: int,
    reason: str,
    attempt: int,
    following: bool = False,
) -> dict[str, Any]:
    """RUN/ends/RANK.reason.json; `following`: it is the consequence of another rank's end."""
    value = {
        "rank": rank,
        "host": host,
        "code": code,
        "signal": signal,
        "step": step,
        "reason": reason[:500],
    }
    return {**value, "attempt": attempt, "following": following}
