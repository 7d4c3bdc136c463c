"""The record that a run is complete, written at the end of the program."""

from __future__ import annotations

import atexit
import sys
from typing import Any

from ..base import exits
from ..base.files import read_json, write_json
from ..base.runs import Run
from ..errors import DataError, OdysseyError

_complete: dict[str, Any] = {}


def check_attempt(run: Run) -> None:
    """Raises DataError if a later attempt of the run has started."""
    number = read_json(run.attempt_file)["attempt"] if run.attempt_file.exists() else 0
    if number > run.attempt:
        raise DataError(
            f"[run] attempt {run.attempt} of {run.path} is over, attempt {number} writes now"
            if run.attempt
            else f"[run] {run.path} is a run of odyssey launch; go on with the command that "
            "began it"
        )


def complete(run: Run, record: dict[str, Any]) -> None:
    """Registers the record of a complete training run; a normal exit of the program writes it."""
    atexit.unregister(_write_complete)
    atexit.register(_write_complete)
    _complete["record"] = (run, record)


def incomplete() -> None:
    """Drops the record of a complete training run, because there is more to do, or an error."""
    _complete.clear()


def _write_complete() -> None:
    """Writes the record of a complete training run when the program exits normally.

    It is not written at the end of a fit(), because a program may have several. After an exception,
    or if a later attempt of the run has started, no record is written.
    """
    completed = _complete.pop("record", None)
    if completed is None or getattr(sys, "last_type", None) is not None or exits.leaving()[0]:
        return
    run, record = completed
    try:
        check_attempt(run)
        write_json(run.done, record)
    except (OSError, OdysseyError, AttributeError, TypeError) as problem:
        print(f"odyssey: [run] {run.done} is not written: {problem}", file=sys.stderr, flush=True)
