"""Records of the steps of a training on all its ranks, for the step log (steplog.py): a callback.

Where ranks have parts of the weights (Trainable.partial) `flush` adds up the fingerprints of many
steps. Rank 0 writes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from ..callbacks import Callback, Context
from ..checkpoints.trainable import Trainable
from ..core import fingerprint
from ..errors import OutputError
from .steplog import StepLog, StepRecord, shown
from .steplog import difference as differs


class Records(Callback):
    """Takes the record of each step; all ranks call all methods at the same steps.

    `path`: of the log, for rank 0.
    """

    def __init__(self, trainer: Trainable, path: Path, attempt: int) -> None:
        self._trainer = trainer
        self._log = StepLog(path, attempt) if trainer.comm.rank == 0 else None
        if self._log is not None and self._log.notice:
            trainer.say(self._log.notice)
        self._waiting: list[StepRecord] = []
        self._warned = self._failed = False

    def on_step_end(self, context: Context) -> None:
        gradients = weights = 0
        trainer = self._trainer
        cursor = context.cursor
        step = context.step
        log = self._log
        if trainer.partial or log is not None:
            gradients, weights = trainer.fingerprints()
        place = trainer.steps, cursor.loader_epoch, cursor.step, len(context.batch.indices)
        attempt = 0 if log is None else log.attempt
        record = StepRecord(*place, step.loss, gradients, weights, step.rate, step.taken, attempt)
        if trainer.partial:
            self._waiting.append(record)
        else:
            self._write(record)

    def on_sync(self, context: Context) -> None:
        self.flush()

    def on_checkpoint(self, context: Context) -> None:
        """The records of all steps before a checkpoint are on disk before it."""
        self.flush(to_disk=True)

    def on_fit_end(self, context: Context) -> None:
        self.close()

    def flush(self, to_disk: bool = False) -> None:
        """Completes and writes what is waiting."""
        if self._waiting:
            parts = [
                (fingerprint.signed(r.gradients), fingerprint.signed(r.weights))
                for r in self._waiting
            ]
            with np.errstate(over="ignore"):
                sums = self._trainer.comm.all_reduce(np.array(parts, np.int64), "sum")
            for record, (g, w) in zip(self._waiting, sums.tolist(), strict=True):
                self._write(
                    record._replace(
                        gradients=fingerprint.unsigned(g), weights=fingerprint.unsigned(w)
                    )
                )
            self._waiting.clear()
        if to_disk and self._log is not None:
            with contextlib.suppress(OutputError):  # the next record says so
                self._log.flush()

    def _write(self, record: StepRecord) -> None:
        if self._log is None:
            return
        try:
            previous = self._log.append(record)
        except OutputError as problem:  # it keeps them, and tries again
            if not self._failed:
                self._failed = True
                self._trainer.say(
                    f"{problem}; training goes on, the records of these steps may be missing"
                )
            return
        if previous is not None and not self._warned:
            self._warned = True
            kind = differs(previous, record) or "?"
            self._trainer.say(
                f"[steps] step {record.step} came out otherwise than in attempt "
                f"{previous.attempt}: {kind} {shown(previous, kind)} then, {shown(record, kind)} "
                "now; training should be the same to the last bit"
            )

    def close(self) -> None:
        """Writes what is complete; no collective call."""
        if self._log is not None:
            with contextlib.suppress(OutputError):  # said before
                self._log.close()
            self._log = None
