"""How ranks of an attempt began and ended, from the files in the run's directory; which end came
first, in words.

The rank wrappers write these files (rank_wrapper.py). What is read here may be torn, old or
garbage: then it is not there.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import Any, NamedTuple

from ..base.files import read_json
from ..errors import DataError, printable
from ..watch.diagnosis import signal_name

_KILLED = (signal.SIGKILL, signal.SIGTERM)
RECORD_LIMIT = 1 << 17  # bytes
AFTERMATH = 3.0  # seconds in which ends that follow from the first one come
HANG = 77  # ended by the watchdog
CONTRACT = 76  # a collective that cannot go on: often because another rank ended


class Started(NamedTuple):
    """Where a rank runs."""

    rank: int
    host: str
    pid: int
    slurm: str | None = None  # job and step, as scancel names them


class End(NamedTuple):
    """How a rank ended: exit code or signal, never both (None, None: neither is known)."""

    rank: int
    host: str
    code: int | None
    signal: int | None
    time: float
    reason: str | None = None
    step: int | None = None
    # the kernel ended it for lack of memory; bytes of the limit, 0 if unknown
    oom: int | None = None
    memory: int | None = None  # bytes it had at most
    following: bool = False  # by its own word the consequence of another rank's end

    @property
    def good(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        subject = f"rank {self.rank} on host {self.host}"
        if self.oom is not None:
            limit = f", the limit is {self.oom >> 20} MiB" if self.oom else ""
            had = f": it had {self.memory >> 20} MiB" if self.memory else ""
            ending = f"was ended by the kernel for lack of memory (OOM){had}{limit}"
        elif self.code == HANG:
            ending = "hung"
        elif self.signal is not None:
            ending = f"was killed by {signal_name(self.signal)}"
        elif self.code is not None:
            ending = f"ended with exit code {self.code}"
        else:
            ending = "ended"
        step_text = (
            ""
            if self.step is None
            else f" at step {self.step}"
            if self.step
            else " before its first step"
        )
        reason = f" ({printable(self.reason, limit=200)})" if self.reason else ""
        return f"{subject} {ending}{step_text}{reason}"


def started(folder: Path, attempt: int) -> dict[int, Started]:
    """The ranks that a wrapper has started."""
    ranks = {}
    for rank, record in _records(folder, attempt).items():
        if type(record.get("host")) is str and type(record.get("pid")) is int:
            slurm = record.get("slurm")
            valid = type(slurm) is str and re.fullmatch(
                r"[0-9]{1,18}\.[0-9]{1,18}", slurm, re.ASCII
            )
            ranks[rank] = Started(rank, _host(record), record["pid"], slurm if valid else None)
    return ranks


def ended(folder: Path, attempt: int) -> dict[int, End]:
    """The ranks whose end is known, from their wrapper or, where that was killed as well, from
    themselves.
    """
    ends = {}
    for rank, record in _records(folder, attempt).items():
        code = record.get("code")
        number = record.get("signal")
        end_time = record.get("time")
        own_code = record.get("own")  # an MPI library may kill the rank that has called MPI_Abort
        if type(own_code) is int and 0 < own_code < 128 and number in _KILLED:
            code = own_code
            number = None
        if type(number) is int:
            code = None  # 128 + the signal, as a shell says it, is no code that a rank chose
        code, number = (value if type(value) is int else None for value in (code, number))
        end_time = float(end_time) if type(end_time) in (int, float) else 0.0
        kinds = {"reason": str, "step": int, "oom": int, "memory": int}
        details = {
            name: record[name] for name, kind in kinds.items() if type(record.get(name)) is kind
        }
        ends[rank] = End(
            rank,
            _host(record),
            code,
            number,
            end_time,
            **details,
            following=record.get("following") is True,
        )
    return ends


def _host(record: dict[str, Any]) -> str:
    host = record.get("host")
    return printable(host)[:256] if type(host) is str else "?"


def _records(folder: Path, attempt: int) -> dict[int, dict[str, Any]]:
    """Returns what the files N.json hold, of this attempt; N.reason.json where there is no N.json.

    The folder is emptied before an attempt, so that a record without an attempt's number is of this
    one.
    """
    records: dict[int, dict[str, Any]] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return records
    for name in sorted(names, key=lambda n: n.endswith(".reason.json")):
        match = re.fullmatch(r"([0-9]{1,7})(\.reason)?\.json", name, re.ASCII)
        wrapper_record = records.get(int(match[1])) if match else None
        if not match or (wrapper_record is not None and "step" in wrapper_record):
            continue
        try:
            record = read_json(folder / name, RECORD_LIMIT)
        except DataError:
            continue
        if isinstance(record, dict) and record.get("attempt", attempt) == attempt:
            with contextlib.suppress(OSError):
                record.setdefault("time", os.stat(folder / name).st_mtime)
            if wrapper_record is not None:  # the watcher's word came after the wrapper's
                wrapper_record.update(
                    (key, record[key]) for key in ("step", "following") if key in record
                )
                continue
            records[int(match[1])] = record
    return records


def first(ends: dict[int, End]) -> End | None:
    """The end that the others follow from: the first that is no success, nor a request to stop
    (75). A collective that could not go on is a consequence if another rank fails in another
    way within seconds.
    """
    bad = sorted(
        (e for e in ends.values() if not e.good and e.code != 75),
        key=lambda e: (e.following, e.time, e.rank),
    )
    first = bad[0] if bad else None
    if first is not None and first.code == CONTRACT:
        other_ends = [e for e in bad if e.code != CONTRACT and e.time - first.time <= AFTERMATH]
        # so launchers end the rest
        return next((e for e in other_ends if e.signal != signal.SIGTERM), first)
    return first
