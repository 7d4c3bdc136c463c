"""Records of the steps of a training on all its ranks, for the step log (steplog.py): who has which part of what.

Each rank takes the fingerprints of the parameters and gradients that it counts (Engine.counted_updates). Where ranks
have parts (ZeRO, pipeline and tensor parallelism) these are added up over ranks, of many steps at once: `flush`. Rank 0
writes. What it is not: the format of the log, or the fingerprint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import fingerprint
from .errors import OutputError
from .optim import Update
from .steplog import Record, StepLog, shown
from .steplog import difference as differs

Fingerprints = Callable[[], list[int]]  # of gradients and weights

if TYPE_CHECKING:
    from .resume import Cursor
    from .trainer import DistributedTrainer


class Records:
    """Takes the record of each step; all ranks call all methods at the same steps.

    Args:
        path: of the log; rank 0 opens it.
        attempt: of the run.
    """

    def __init__(self, trainer: DistributedTrainer, path: Path, attempt: int) -> None:
        self._trainer = trainer
        self._log = StepLog(path, attempt) if trainer.comm.rank == 0 else None
        if self._log is not None and self._log.notice:
            trainer._show(self._log.notice)
        lay = trainer.layout
        self._shared = lay.comm.size > 1 and (lay.split or lay.zero > 0)  # ranks count parts
        self._waiting: list[Record] = []
        self._runs: dict[int, tuple[list[Update], Fingerprints]] = {}
        self._told = self._failed = False

    def step(self, cursor: Cursor, samples: int, loss: float, rate: float, taken: bool, updates: list[Update]) -> None:
        """The step that was just taken, or skipped, over the batch at `cursor`."""
        gradients = weights = 0
        if self._shared or self._log is not None:
            own = self._runs.get(id(updates))
            if own is None:
                own = self._runs[id(updates)] = self._prepare(updates)
            gradients, weights = own[1]()
        steps, attempt = self._trainer.steps, 0 if self._log is None else self._log.attempt
        record = Record(
            steps, cursor.loader_epoch, cursor.step, samples, loss, gradients, weights, rate, taken, attempt
        )
        if self._shared:
            self._waiting.append(record)
        else:
            self._write(record)

    def _prepare(self, updates: list[Update]) -> tuple[list[Update], Fingerprints]:
        counted = self._trainer._train.counted_updates(updates)
        return (
            updates,  # kept, so that its id stays its own
            self._trainer._train.fingerprints(
                [(u.grads, u.n, u.at) for u in counted], [(u.params, u.n, u.at) for u in counted], after=updates
            ),
        )

    def flush(self, to_disk: bool = False) -> None:
        """Completes and writes what is waiting."""
        if self._waiting:
            parts = [(fingerprint.signed(r.gradients), fingerprint.signed(r.weights)) for r in self._waiting]
            with np.errstate(over="ignore"):
                whole = self._trainer.comm.all_reduce(np.array(parts, np.int64), "sum")
            for record, (g, w) in zip(self._waiting, whole.tolist(), strict=True):
                self._write(record._replace(gradients=fingerprint.unsigned(g), weights=fingerprint.unsigned(w)))
            self._waiting.clear()
        if to_disk and self._log is not None:
            with contextlib.suppress(OutputError):  # the next record says so
                self._log.flush()

    def _write(self, record: Record) -> None:
        if self._log is None:
            return
        try:
            before = self._log.append(record)
        except OutputError as problem:  # it keeps them, and tries again
            if not self._failed:
                self._failed = True
                self._trainer._show(f"{problem}; training goes on, the records of these steps may be missing")
            return
        if before is not None and not self._told:
            self._told = True
            what = differs(before, record) or "?"
            self._trainer._show(
                f"[steps] step {record.step} came out otherwise than in attempt {before.attempt}: {what} "
                f"{shown(before, what)} then, {shown(record, what)} now; training should be the same to the last bit"
            )

    def close(self) -> None:
        """Writes what is complete; no collective call."""
        if self._log is not None:
            with contextlib.suppress(OutputError):  # said before
                self._log.close()
            self._log = None
