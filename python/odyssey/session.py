"""One fit(): where it is in its data, and what happens between two of its steps.

    begin     the newest checkpoint is put back, if there is one
    stepped   after each step: a checkpoint if one is due, a stop if somebody asked for it
    epoch     after each epoch: likewise
    end       the last checkpoint; a run's record that it is complete

The trainer takes the steps; resume.py knows what the state of a training is, checkpoints/ how it is kept, requests.py
who may stop it. All methods are called by all ranks at the same steps; only rank 0 reads and writes files.
"""

from __future__ import annotations

import atexit
import dataclasses
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import preflight, resume
from .checkpoints import Snapshot, Store, environment_key
from .comm.base import Communicator
from .data.sampler import check_integer
from .errors import CheckpointError, ConfigError, DataError, NumericsError, OdysseyError, OutputError, Stopped
from .files import read_json, write_json
from .parallel.asynchronous import AsynchronousServer, Tally
from .records import Records
from .replay import Session as Replay
from .requests import Requests
from .resume import Cursor
from .runs import Run
from .steplog import NAME
from .watch import entry, slot

if TYPE_CHECKING:
    from .trainer import DistributedTrainer, History

RESUME = ("auto", "never")
KEEP = 2

_complete: dict[str, Any] = {}  # "record": what DONE.json will say
_fits = 0  # calls of fit() of this process that belonged to a run: each has checkpoints of its own


@dataclasses.dataclass(frozen=True)
class Saving:
    """Where and when checkpoints are made.

    Args:
        folder: the directory; None makes none, unless the process belongs to a run, which has one.
        every: optimizer steps from one to the next; None: at the end of every `epochs`-th epoch.
        keep: the newest so many stay.
        resume: "auto": from the newest that is valid, if there is one; "never": refuses a directory that has some;
            a path: from this checkpoint, or from the newest of this directory, which must be there; once `folder` has
            checkpoints that come from it, from the newest of them.
    """

    folder: Path | None = None
    every: int | None = None
    keep: int = KEEP
    resume: str | Path = "auto"
    epochs: int = 1

    def __post_init__(self) -> None:
        if self.every is not None:
            check_integer("[checkpoint] checkpoint_every", self.every, 1)
        check_integer("[checkpoint] keep", self.keep, 2)
        check_integer("[checkpoint] checkpoint_epochs", self.epochs, 1)


class Session:
    """See the head of this file.

    Args:
        trainer: whose fit() it is.
        loader: a DataLoader, or an iterable of batches that is the same whenever it is iterated.
        epochs, steps: how far it goes.
        history: filled as it goes on.
    """

    def __init__(
        self,
        trainer: DistributedTrainer,
        loader: Any,
        epochs: int,
        steps: int | None,
        saving: Saving,
        history: History,
    ) -> None:
        global _fits
        self.trainer, self.loader, self.epochs, self.limit = trainer, loader, epochs, steps
        self.saving, self.history = saving, history
        self.comm: Communicator = trainer.comm
        self.cursor = Cursor(loader_epoch=int(getattr(loader, "next_epoch", 0)))
        self.tally = Tally()  # of the epoch that is under way
        self._before, self._since = 0.0, time.perf_counter()  # seconds of it before a checkpoint; when it went on
        self._complete = False  # the limit was reached within an epoch
        self._due = False  # a checkpoint, as soon as all ranks have the same weights
        self._again = Replay.current()
        self.run = Run.current() if self._again is None else None
        self._store: Store | None = None
        self._saved: int | None = None  # the step of the newest checkpoint
        self._requests: Requests | None = None
        self._records: Records | None = None
        self._origin: str | None = None  # the checkpoint of another directory that this training came from
        folder = saving.folder
        if self._again is not None:
            folder = None  # it writes nothing but its records
        elif self.run is not None:
            _fits += 1
            if folder is None:
                folder = self.run.checkpoints
                if _fits > 1:
                    folder = folder.with_name(f"{folder.name}-{_fits}")
        self.folder = folder
        if folder is None and self._again is None and (saving.every is not None or saving.resume not in RESUME):
            raise ConfigError(
                "[checkpoint] checkpoint_every or resume is given, but no checkpoint_dir; give one, or leave both out"
            )
        if saving.every is not None and self._apart:
            raise ConfigError(
                "[checkpoint] checkpoint_every counts steps that all ranks take together, and async_parameter_server "
                "has none; leave it out: checkpoints are made at the ends of epochs"
            )

    # --- begin ---

    def begin(self) -> None:
        """Goes to where the newest valid checkpoint is, or starts at the first step.

        Raises:
            ConfigError: the checkpoint is of another training.
            CheckpointError: the checkpoint that was asked for is not valid.
            OutputError: the directory cannot be used.
        """
        if self._again is not None:
            self._begin_again(self._again)
            return
        if self.folder is None:
            return
        self._first_in_its_directory()
        self._complete_no_more()
        snapshot, name = resume.shared(self.comm, self._find)
        if snapshot is not None:
            self._go_to(snapshot, name)
            self.trainer._show(
                f"resumed from {name}: step {snapshot.step}, epoch {self.cursor.epoch + 1}, "
                f"{self.cursor.samples:,} samples done"
            )
        if self.run is not None and self.trainer.mode is None:  # where ranks step apart there is no step of all
            name = NAME if _fits == 1 else f"{_fits}-{NAME}"
            self._records = Records(self.trainer, self.run.steps / name, self.run.attempt)
        if self.comm.rank == 0:
            sampler = getattr(self.loader, "sampler", None)
            if sampler is not None and not hasattr(sampler, "set_epoch"):
                self.trainer._show(
                    f"[checkpoint] the loader's {type(sampler).__name__} has no set_epoch(): a training that goes on "
                    "has the same bits only if it gives the same order whenever an epoch is begun again"
                )
            states = len(self.trainer.optimizer.states)
            for warning in preflight.space(self.folder, 4 * self.trainer.arena.size * (1 + states)):
                self.trainer._show(warning)
        self._requests = Requests(self.comm, self.run)
        self._requests.listen()

    def _complete_no_more(self) -> None:
        """There is more to do: the run is not complete any more, or not yet."""
        incomplete()

        def unmark() -> tuple[None, str]:
            if self.run is not None:
                _check_attempt(self.run)
                self.run.done.unlink(missing_ok=True)
            return None, ""

        resume.shared(self.comm, unmark)

    def _first_in_its_directory(self) -> None:
        """ConfigError where an earlier fit() of this trainer saved here: it would only find its own end again."""
        place = os.path.realpath(self.folder)
        if place in self.trainer.saved_in:
            raise ConfigError(
                f"[checkpoint] an earlier fit() of this trainer has its checkpoints in {self.folder}; name another "
                "checkpoint_dir for this one"
            )
        self.trainer.saved_in.add(place)

    def _begin_again(self, again: Replay) -> None:
        """Goes to the step before the one that is replayed, or as near as there is a checkpoint."""
        if again.checkpoint is not None:
            snapshot, name = resume.shared(self.comm, lambda: resume.find(again.checkpoint, self.trainer._show))
            self._go_to(snapshot, name)
        self._records = Records(self.trainer, again.log, 0)

    def _end_again(self, again: Replay) -> None:
        """The step has been taken again: that is all."""
        self._records.flush()
        self._records.close()
        found: tuple[Any, Any] = (None, None)
        if again.save:
            found = self.trainer.state_dict(), self.trainer.last_gradients()
        again.end(self.comm, *found)

    def _find(self) -> tuple[Snapshot | None, str]:
        """The checkpoint to start from, and its name; opens the store."""
        saving, folder = self.saving, self.folder
        attempt = self.run.attempt if self.run else 0
        self._store = Store(folder, keep=saving.keep, attempt=attempt, key=environment_key())
        if saving.resume == "never" and (self.run is None or self.run.attempt < 2):  # a restart of a run is no start
            if self._store.names():
                raise ConfigError(
                    f"[checkpoint] {folder} has checkpoints ({', '.join(self._store.names()[-2:])}) and resume is "
                    "'never'; name another directory, or resume"
                )
            return None, ""
        snapshot, refused = self._store.newest()
        if snapshot is not None:
            self._origin = snapshot.values.get("origin")
        if saving.resume in RESUME or (snapshot is not None and self._origin == self._asked):
            for one in refused:
                self.trainer._show(one.message(snapshot))
            return snapshot, "" if snapshot is None else self._store.path_of(snapshot.step).name
        found, name = resume.find(Path(saving.resume), self.trainer._show)
        if snapshot is not None and snapshot.step != found.step:
            raise ConfigError(
                f"[checkpoint] resume is {saving.resume} (step {found.step}), but {folder} has checkpoints that do not "
                f"come from it, up to step {snapshot.step}; name another directory for the new ones, or delete those"
            )
        self._origin = self._asked
        return found, name

    @property
    def _asked(self) -> str | None:
        """The path that training is to start from, as its checkpoints remember it."""
        return None if self.saving.resume in RESUME else os.path.realpath(self.saving.resume)

    def _go_to(self, snapshot: Snapshot, name: str) -> None:
        """Puts a snapshot back: into the trainer, and this session's own part of it."""
        values = snapshot.values
        try:
            cursor = Cursor(**values["cursor"])
            tally, seconds = Tally(**values["tally"]), float(values["seconds"])
            history, numerics = type(self.history)(**values["history"]), dict(values["numerics"])
            cursor.check()
            if not all(isinstance(record, dict) for record in history.records):
                raise TypeError("its history is no list of records")
        except (KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(f"[resume] {name} does not say where the training is: {problem}") from problem
        for record in history.records:
            if record.get("train_loss") is None:
                record["train_loss"] = math.nan  # which JSON has not
        resume.restore(self.trainer, snapshot, name)
        self.trainer.numerics.load_state_dict(numerics)
        if self.trainer.mode is not None and self.comm.rank:
            tally.loss = tally.correct = 0.0  # rank 0 has those of all ranks
        self.cursor, self.tally, self._before, self._since = cursor, tally, seconds, time.perf_counter()
        vars(self.history).update(vars(history))
        self._saved = snapshot.step
        if hasattr(self.loader, "start_at"):
            batch = min(cursor.step * self.trainer.accumulation_steps, len(self.loader))  # the last group may be short
            self.loader.start_at(cursor.loader_epoch, batch)

    def seconds(self) -> float:
        """Seconds that training has taken in this epoch so far."""
        return self._before + time.perf_counter() - self._since

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.cursor.epoch >= self.epochs or self._complete or (self.left == 0 and not self.tally.samples)

    @property
    def first_batch(self) -> int:
        """How many batches of this epoch a loader that cannot be told where to start must leave out."""
        return 0 if hasattr(self.loader, "start_at") else self.cursor.step * self.trainer.accumulation_steps

    @property
    def left(self) -> int | None:
        """Steps until the limit, None without one."""
        return None if self.limit is None else max(self.limit - self.history.steps - self.tally.steps, 0)

    def saved(self) -> int | None:
        """The step of the newest checkpoint of this training; a collective call."""
        if self._requests is None:
            return None
        step = -1
        if self.comm.rank == 0:
            self._settle_store()
            step = max((int(name.split("_")[1]) for name in self._store.names()), default=-1)
        step = int(self.comm.broadcast(np.array([step], np.int64))[0])
        return None if step < 0 else step

    def _settle_store(self) -> None:
        """Waits for the save in the background, and tells what went wrong with it; on rank 0."""
        try:
            self._store.wait()
        except (OutputError, NumericsError) as problem:
            self.trainer._show(f"{problem}; training goes on, the one before stays")

    def roll_back(self) -> None:
        """Goes back to the newest checkpoint."""

        def newest() -> tuple[Snapshot | None, str]:
            self._settle_store()
            return resume.find(self.folder, self.trainer._show)

        snapshot, name = resume.shared(self.comm, newest)
        numerics = self.trainer.numerics.state_dict()
        self._go_to(snapshot, name)
        self.trainer.numerics.load_state_dict(numerics)  # it knows which batch to leave out now

    # --- in between ---

    def stepped(self, samples: int) -> None:
        """After a step over so many samples.

        Raises:
            Stopped: somebody asked for it; a checkpoint of this step is there.
        """
        last = self.trainer.last
        if self._records is not None and last is not None:
            self._records.step(self.cursor, samples, *last)
        self.cursor.step += 1
        self.cursor.samples += samples
        if self._again is not None and self.trainer.steps >= self._again.step:
            self._end_again(self._again)
        every = self.trainer.check_every
        if every and self.trainer.steps % every == 0 and self.comm.size > 1 and self.trainer.mode is None:
            self.trainer.check_replicas()
        if self._requests is None:
            return
        if self.saving.every is not None and self.trainer.steps % self.saving.every == 0:
            self._due = True
        mode = self.trainer.mode
        if mode is not None and not mode.settled:
            return  # each rank has weights of its own
        why = self._requests.agreed()
        if self._requests.met and self._records is not None:
            self._records.flush()
        if why is not None:
            self._stop(why)
        elif self._due:
            self._save()

    def taken(self, tally: Tally) -> None:
        """After the last step of an epoch, before its record is made.

        Where the limit cuts an epoch short, the last checkpoint is made here: with a higher limit training goes on
        within this epoch.
        """
        self.tally = tally
        if self.trainer.mode is not None and self.comm.rank:
            self.tally = dataclasses.replace(tally, loss=0.0, correct=0.0)  # rank 0 has those of all ranks
        if self.limit is None or self.history.steps + tally.steps < self.limit or self._apart:
            return
        try:
            length = -(-len(self.loader) // self.trainer.accumulation_steps)
        except TypeError:
            length = 0
        if self.cursor.step != length:
            self._complete = True
            if self._requests is not None:
                self._save(wait=True)
            if hasattr(self.loader, "start_at"):  # as it is where all steps were taken in this process
                self.loader.start_at(self.cursor.loader_epoch + 1, 0)

    def epoch_ended(self) -> None:
        """After an epoch and its evaluation."""
        if self._complete:
            return
        self.tally, self._before, self._since = Tally(), 0.0, time.perf_counter()
        self.cursor = Cursor(self.cursor.epoch + 1, 0, self.cursor.loader_epoch + 1, self.cursor.samples)
        if self._requests is None:
            return
        why = self._requests.agreed(now=True)
        if why is not None and self.cursor.epoch < self.epochs:
            self._stop(why)
        elif self.saving.every is None and self.cursor.epoch % self.saving.epochs == 0:
            self._save()

    @property
    def _apart(self) -> bool:
        """Whether ranks do not take steps together, so that only an epoch has an end."""
        return isinstance(self.trainer.mode, AsynchronousServer)

    def _stop(self, why: str) -> None:
        self._save(wait=True)
        error = Stopped(
            f"[train] stopped by {why} after step {self.trainer.steps}; checkpoint "
            f"{self._name()} is written, the same command goes on from it"
        )
        error.everywhere = True
        raise error

    def _name(self) -> str:
        return f"step_{self.trainer.steps:08d}"

    def _save(self, wait: bool = False) -> None:
        """Writes a checkpoint of this moment, in the background unless `wait`, if there is none of it.

        A failure is told and training goes on; with `wait` it is an error.
        """
        before = slot.phase("checkpoint")
        self._due = False
        if self._records is not None:
            self._records.flush(to_disk=True)
        if self._saved != self.trainer.steps or (wait and not self._there()):
            snapshot = resume.capture(self.trainer, self._values())
            if snapshot is not None:
                self._settle_store()
                self._write(snapshot, wait)
            self._saved = self.trainer.steps
        if wait:
            self.comm.barrier()  # nobody ends before it is there
        slot.phase(before)

    def _there(self) -> bool:
        """Whether the checkpoint of this step, begun in the background, has been written; a collective call."""
        there = False
        if self.comm.rank == 0:
            self._settle_store()
            there = self._store.path_of(self.trainer.steps).exists()
        return bool(self.comm.broadcast(np.array([there], np.int32))[0])

    def _write(self, snapshot: Snapshot, wait: bool) -> None:
        if wait:
            self._store.save(snapshot)
            return
        try:
            self._store.save_later(snapshot)
        except NumericsError as problem:  # an update has overflowed: the next step finds it, on all ranks
            self.trainer._show(f"{problem}")

    def _values(self) -> dict[str, Any]:
        """This session's part of a checkpoint; a collective call where ranks have tallies of their own."""
        tally = self.tally
        if self.trainer.mode is not None:
            tally = self.trainer.mode.whole_tally(tally)
        return {
            "cursor": dataclasses.asdict(self.cursor),
            "seconds": self.seconds(),
            "tally": _finite(dataclasses.asdict(tally)),
            "history": _finite(dataclasses.asdict(self.history)),
            "numerics": self.trainer.numerics.state_dict(),
            "epochs": self.epochs,
            "origin": self._origin,
        }

    # --- end ---

    def end(self) -> None:
        """The training is complete: its last checkpoint, and in a run the record that says so."""
        if self._requests is None:
            return
        self._save(wait=True)
        if self.run is not None:
            sha = self.trainer.weights_sha256()
            if self.comm.rank == 0:
                atexit.unregister(_write_complete)
                atexit.register(_write_complete)
                record = {"attempt": self.run.attempt, "steps": self.trainer.steps, "weights_sha256": sha}
                _complete["record"] = (self.run, record)

    def close(self) -> None:
        """Gives back signals, threads and the directory, whatever happened."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._records is not None:
            self._records.close()
        if self._store is not None:
            try:
                self._store.close()
            except (OutputError, NumericsError) as problem:  # where the training failed, that is the error
                self.trainer._show(str(problem))
            self._store = None


def _check_attempt(run: Run) -> None:
    """DataError where a later attempt of the run has taken over."""
    number = read_json(run.attempt_file)["attempt"] if run.attempt_file.exists() else 0
    if number > run.attempt:
        raise DataError(
            f"[run] attempt {run.attempt} of {run.path} is over, attempt {number} writes now"
            if run.attempt
            else f"[run] {run.path} is a run of odyssey launch; go on with the command that began it"
        )


def incomplete() -> None:
    """The program ends with an error: its run is not complete, whatever its fit()s did."""
    _complete.clear()


def _write_complete() -> None:
    """At the end of the program: the record that says that its run is complete, if it ends in order.

    Not at the end of a fit(): a program may have several. An exception, and an attempt that another has replaced, leave
    no record.
    """
    found = _complete.pop("record", None)
    if found is None or getattr(sys, "last_type", None) is not None or entry.leaving()[0]:
        return
    run, record = found
    try:
        _check_attempt(run)
        write_json(run.done, record)
    except (OSError, OdysseyError, AttributeError, TypeError) as problem:
        print(f"odyssey: [run] {run.done} is not written: {problem}", file=sys.stderr, flush=True)


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON has not."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
