"""The journal of a run, RUN/journal.jsonl: what happened to it when.

Rank 0 writes a line for each start, checkpoint, epoch, failure and end, and one a second that says
how far it is; `odyssey report` and `odyssey trace` read it.

A line is {"time": seconds since 1970, "attempt", "part": of this process's fit()s, "event", ...};
of "start" what it runs on and how, of others what they are of.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..base import Run, finite, parse_json
from ..callbacks import Callback, Context, EarlyStopping, ModelCheckpoint, Monitor
from ..errors import DataError

MAX_BYTES = 256 << 20  # bytes that are read
PROGRESS_INTERVAL_S = 1.0  # from one line of progress to the next
RSS_UNIT = 1024 if sys.platform != "darwin" else 1  # bytes that ru_maxrss counts in


class Journal(Callback):
    """Writes the journal of a run; all ranks call it.

    `part`: number of the fit() of this process.
    """

    exact = False

    def __init__(self, run: Run, part: int) -> None:
        self._path = run.journal
        self._attempt = run.attempt
        self._part = part
        self._progress_time = 0.0
        self._rank = 0
        self._saved = -1

    def _write(self, event: str, **fields: Any) -> None:
        if self._rank:
            return
        row = {
            "time": time.time(),
            "attempt": self._attempt,
            "part": self._part,
            "event": event,
            **fields,
        }
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(self._path, flags, 0o664), "a") as file:
                file.write(json.dumps(finite(row), allow_nan=False, default=str) + "\n")
        except OSError:  # a disk that is full costs the journal, not the training
            self._rank = -1

    def on_fit_start(self, context: Context) -> None:
        trainer = context.trainer
        comm = context.trainer.comm
        self._rank = comm.rank
        names = comm.all_gather_each(np.frombuffer(os.uname().nodename.encode()[:64], np.uint8))
        hosts = [name.tobytes().decode(errors="replace") for name in names]
        mesh = getattr(trainer, "mesh", None)
        parts = (
            {axis: getattr(mesh, axis) for axis in ("dp", "pp", "tp")}
            if mesh is not None
            else {"dp": comm.size}
        )
        about = {
            "ranks": comm.size,
            "hosts": hosts,
            "mesh": parts,
            "backend": comm.name,
            "step": context.steps,
        }
        about["configuration"] = trainer.configuration()
        about["model"] = repr(getattr(trainer, "model", None) or getattr(trainer, "module", None))[
            :20_000
        ]
        about["parameters"] = _count_parameters(trainer)
        about["environment"] = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "system": " ".join(os.uname()[:3:2]),
            "processor": os.uname().machine,
            "cores": os.cpu_count(),
            "threads": getattr(trainer, "threads", None),
            "device": getattr(trainer, "device", "cpu"),
            "launcher": comm.why,
        }
        about["arithmetic"] = trainer.arithmetic.state()
        self._write("start", **about, epochs=context.epochs, batch_size=context.batch_size)

    def on_sync(self, context: Context) -> None:
        if time.monotonic() - self._progress_time > PROGRESS_INTERVAL_S:
            self._progress_time = time.monotonic()
            self._progress(context)

    def _progress(self, context: Context) -> None:
        trainer = context.trainer
        about = {}
        if shards := trainer.shards_moved(context.batch_size):
            about["shards"] = shards
        mesh = getattr(trainer, "mesh", None)
        if mesh is not None and mesh.pp > 1 and trainer.shard_size:
            shards = -(-context.batch_size // trainer.shard_size)
            schedule = trainer.settings.pipeline_schedule
            about["pipeline"] = {"schedule": schedule, "micro_batches": -(-shards // mesh.dp)}
        self._write("progress", step=context.steps, loss=context.loss, **about)

    def on_checkpoint(self, context: Context) -> None:
        if context.steps != self._saved:  # else it is there already
            self._saved = context.steps
            self._write("checkpoint", step=context.steps)

    def on_epoch_end(self, context: Context) -> None:
        peak = np.array([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT], np.int64)
        memory = context.trainer.comm.all_gather(peak)[:, 0].tolist()
        about = {"record": context.record, "memory": memory}
        if context.step is not None:
            about["rate"] = context.step.rate
        if (monitor := _find_monitor(context)) is not None:
            best = monitor.best_record(context.history.records)
            if best is not None:
                about["best"] = {"epoch": best["epoch"], "figure": monitor.monitor}
        self._write("epoch", step=context.steps, **about)

    def on_exception(self, context: Context) -> None:
        event = "stopped" if type(context.error).__name__ == "Stopped" else "failed"
        self._write(event, step=context.steps, why=f"{context.error}"[:500])

    def on_fit_end(self, context: Context) -> None:
        self._progress(context)
        self._write(
            "end", step=context.steps, finished=context.finished, complete=context.error is None
        )


def _count_parameters(trainer: Any) -> int:
    """Returns how many numbers a model learns; of a model that ranks share, all of them."""
    model = getattr(trainer, "model", None) or getattr(trainer, "module", None)
    parameters = getattr(model, "named_parameters", tuple)()
    return sum(math.prod(parameter.shape) for _, parameter in parameters)


def _find_monitor(context: Context) -> Monitor | None:
    """Returns the callback that decides which epoch is the best one, or None."""
    kinds = (ModelCheckpoint, EarlyStopping)
    return next(
        (callback for kind in kinds for callback in context.given if isinstance(callback, kind)),
        None,
    )


def read(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's journal, none if it has none; lines that are torn are left out.

    Raises DataError.
    """
    path = Run(run).journal
    if not path.is_file():
        return []
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"[report] {path} is longer than {MAX_BYTES} bytes; a journal is not")
    rows = []
    for line in path.read_bytes().split(b"\n"):
        try:
            row = parse_json(line, path.name)
        except DataError:
            continue
        if (
            isinstance(row, dict)
            and isinstance(row.get("time"), (int, float))
            and isinstance(row.get("event"), str)
        ):
            rows.append(row)
    return rows


def parts(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The lines of a journal by fit()s: from each start to before the next."""
    fits: list[list[dict[str, Any]]] = []
    for row in rows:
        if row["event"] == "start" or not fits:
            fits.append([])
        fits[-1].append(row)
    return fits
