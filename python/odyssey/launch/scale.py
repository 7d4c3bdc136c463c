"""Asks a running run to go on with another number of ranks: an agreed checkpoint, then the next
attempt.

The request is a file in the run's directory (control.json): the ranks read "stop", the launcher the
number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..base import runs
from ..base.files import read_json, write_json
from ..base.paths import expand_path
from ..errors import ConfigError, DataError, LaunchError, OutputError, counted, printable
from . import lock, rank_ends
from .config import allowed


def scale(  # noqa: C901
    path: Path, ranks: int, wait: float = 60.0, say: Callable[[str], None] = lambda line: None
) -> int:  # noqa: C901
    """Asks, waits until the next attempt has started, and returns its number. path: the run's
    directory. wait: seconds for the next attempt to come. say: is given lines about what
    happens. Raises ConfigError: no such run, or a number of ranks that it cannot have.
    LaunchError: no launcher is at work on it, or the next attempt did not come in time.
    OutputError: the request cannot be written.
    """
    run = runs.Run(expand_path(path))
    name = printable(str(path))
    if not run.description.exists():
        raise ConfigError(
            f"[scale] {name} is no run; give the directory that `odyssey launch --run-dir` names"
        )
    if run.done.exists():
        raise ConfigError(f"[scale] {name} is complete")
    if lock.holder(run.lock) is None:
        advice = f"start it with `odyssey launch -n {ranks} --run-dir {name} ...`"
        raise LaunchError(f"[scale] {name} is not running; {advice}")
    old = _attempt(run)
    elastic = old.get("elastic")
    room = old.get("room")
    valid_elastic = (
        isinstance(elastic, list) and len(elastic) == 2 and all(type(n) is int for n in elastic)
    )
    if wrong := allowed(
        ranks, elastic if valid_elastic else None, room if type(room) is int else None
    ):
        raise ConfigError(f"[scale] {counted(ranks)} for {name}; {wrong}")
    number = old["attempt"]
    if old.get("ranks") == ranks:
        raise ConfigError(f"[scale] {name} runs on {counted(ranks)} already (attempt {number})")
    if not rank_ends.started(run.ranks, number):
        raise LaunchError(
            f"[scale] attempt {number} of {name} is only being started; try again in a moment"
        )
    try:
        write_json(run.control, {"stop": "scale", "ranks": ranks, "attempt": number})
    except OSError as problem:
        raise OutputError(f"[scale] {name} cannot be written: {problem.strerror}") from problem
    say(
        f"attempt {number} on {counted(old.get('ranks'))} is asked to stop after its step and to "
        f"go on with {ranks}"
    )
    until = time.monotonic() + wait
    while time.monotonic() < until:
        time.sleep(0.05)
        if run.done.exists():
            say(f"{name} was complete before that")
            return number
        latest = _attempt(run)
        if latest["attempt"] > number and len(
            rank_ends.started(run.ranks, latest["attempt"])
        ) == latest.get("ranks"):
            if latest.get("ranks") != ranks:
                raise LaunchError(
                    f"[scale] attempt {latest['attempt']} runs on "
                    f"{counted(latest.get('ranks'))}, not {ranks}"
                )
            say(f"attempt {latest['attempt']} runs on {counted(ranks)}")
            return latest["attempt"]
        if lock.holder(run.lock, sure=False) is None:
            raise LaunchError(f"[scale] the launcher of {name} has ended; its output says why")
    advice = "it does after a step, if the script uses a DistributedTrainer"
    raise LaunchError(
        f"[scale] attempt {number} of {name} did not stop within {wait:g} s; {advice}"
    )


def _attempt(run: runs.Run) -> dict[str, Any]:
    try:
        record = read_json(run.attempt_file)
    except DataError as problem:
        raise LaunchError(f"[scale] {problem}") from problem
    if not isinstance(record, dict) or type(record.get("attempt")) is not int:
        raise LaunchError(f"[scale] {printable(str(run.attempt_file))} names no attempt")
    return record
