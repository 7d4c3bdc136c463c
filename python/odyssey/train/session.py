"""One fit(): where it is in its data, and what happens between two of its steps.

All methods are called by all ranks at the same steps; only rank 0 reads and writes files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import slot
from ..base.outputs import finite
from ..base.runs import Run
from ..callbacks import Context
from ..checkpoints.trainable import Cursor, Tally, Trainable
from ..comm.base import Communicator
from ..data import Batch
from ..errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NumericsError,
    OdysseyError,
    OutputError,
    Stopped,
)
from . import agreement, checkpoint_parts, completion, preflight, resume, trained_models

if TYPE_CHECKING:
    from ..checkpoints import Snapshot, Store

RESUME = ("auto", "never")

_fits = 0  # calls of fit() of this process that belonged to a run: each has checkpoints of its own


class Session:
    """A fit() of a trainer. loader: a DataLoader, or an iterable of batches that is the same
    whenever it is iterated. context: the plan of the fit(), and where it is: kept up to date
    here.
    """

    def __init__(self, trainer: Trainable, loader: Any, context: Context) -> None:
        global _fits
        self.trainer = trainer
        self.loader = loader
        self.context = context
        self.comm: Communicator = trainer.comm
        self.saving = saving = context.saving
        context.cursor = Cursor(loader_epoch=int(getattr(loader, "next_epoch", 0)))
        # seconds of the epoch before it was resumed
        self._seconds_before = 0.0
        self._since = time.perf_counter()
        self._complete = False  # the limit was reached within an epoch
        self._checked = -1  # the step at which ranks were compared last
        self._due = False  # a checkpoint, as soon as all ranks have the same weights
        # the checkpoint that was put back, until its epoch has begun
        self._restored_checkpoint: tuple[Snapshot, str] | None = None
        self.run = None if saving.off else Run.current()
        self._store: Store | None = None
        self._saved: int | None = None  # the step of the newest checkpoint
        # epoch as the loader counts, step of it, and its batch
        self._last: tuple[int, int, Batch] | None = None
        # the checkpoint of another directory that this training came from
        self._origin: str | None = None
        if not isinstance(saving.resume, (str, os.PathLike)):
            raise ConfigError(
                f"[checkpoint] resume is {saving.resume!r}; give 'auto', 'never', 'weights' or "
                "the path of a checkpoint"
            )
        folder = saving.folder
        if self.run is not None:
            _fits += 1
            if folder is None:
                folder = self.run.checkpoints
                if _fits > 1:
                    folder = folder.with_name(f"{folder.name}-{_fits}")
        self.folder = context.folder = folder
        if (
            folder is None
            and not saving.off
            and (
                saving.every is not None
                or not (saving.resume in RESUME or resume.wants_weights(saving.resume))
            )
        ):
            raise ConfigError(
                "[checkpoint] checkpoint_every or resume without a checkpoint_dir; give one, or "
                "neither"
            )
        if saving.every is not None and trainer.mode.own_loop:
            raise ConfigError(
                "[checkpoint] checkpoint_every counts steps that all ranks take together, and "
                "async_parameter_server "
                "has none; leave it out: checkpoints are made at the ends of epochs"
            )

    @property
    def part(self) -> int:
        """Which fit() of this process it is, of those that belong to a run."""
        return _fits

    @property
    def log(self) -> Path:
        """Where the step log of this fit() goes, if it belongs to a run."""
        from ..audit.steplog import NAME

        return self.run.steps / (NAME if _fits == 1 else f"{_fits}-{NAME}")

    @property
    def saves(self) -> bool:
        """Returns whether it makes checkpoints."""
        return self.folder is not None

    def begin(self) -> None:
        """Goes to where the newest valid checkpoint is, or starts at the first step.

        Raises ConfigError: it is of another training. CheckpointError: the one that was asked for
        is not valid. OutputError: the directory cannot be used.
        """
        if resume.wants_weights(self.saving.resume):
            if self.run is None or self.run.attempt < 2:
                return self._take_weights()
            # a restart goes on with what was begun
            self.saving = dataclasses.replace(self.saving, resume="auto")
        if self.folder is None:
            if self.saving.resume not in RESUME:
                self._go_to(
                    *self._shared(
                        lambda in_memory: resume.find(
                            Path(self.saving.resume), self.trainer.say, in_memory
                        )
                    )
                )
            return
        self._begin_directory()
        snapshot, name = self._shared(self._find)
        if snapshot is not None:
            self._go_to(snapshot, name)
            self._check_data(snapshot, name)
            self.trainer.say(
                f"resumed from {name}: step {snapshot.step}, epoch "
                f"{self.context.cursor.epoch + 1}, "
                f"{self.context.cursor.samples:,} samples done"
            )
        if self.comm.rank == 0:
            sampler = getattr(self.loader, "sampler", None)
            if sampler is not None and not self.trainer._repeats(sampler):
                self.trainer.say(
                    f"[checkpoint] the loader's {type(sampler).__name__} has no set_epoch(): a "
                    "training that goes on "
                    "has the same bits only if it gives the same order whenever an epoch is "
                    "begun again"
                )
            free_bytes = preflight.free(self.folder)
            checkpoint_bytes = self.trainer.state_bytes
            for warning in preflight.check_space(free_bytes, checkpoint_bytes, str(self.folder)):
                self.trainer.say(warning)

    def _take_weights(self) -> None:
        """A new training begins with the weights of a checkpoint."""
        if self.folder is not None:
            self._begin_directory()

        def source(in_memory: bool) -> tuple[Snapshot, str]:
            self._store = None if self.folder is None else self._opened()
            return resume.weights(str(self.saving.resume), self.folder, self.trainer.say, in_memory)

        snapshot, name = self._shared(source)
        self.trainer.load_weights(snapshot, name)
        resume.by_first(self.comm, self._put_aside)
        self.trainer.say(
            f"the weights of {name} are taken; optimizer, schedule and epochs begin anew"
        )

    def _put_aside(self) -> None:
        """Moves checkpoints and step log of an earlier training of this directory beside it."""
        if self._store is not None and (aside := self._store.put_aside()) is not None:
            if self.run is not None and self.log.exists():
                os.replace(self.log, aside / self.log.name)
            self.trainer.say(f"[checkpoint] the checkpoints of before are in {aside}")

    def _shared(
        self, read: Callable[[bool], tuple[Snapshot | None, str]]
    ) -> tuple[Snapshot | None, str]:
        return resume.shared(self.comm, read, self.trainer.in_parts)

    def _opened(self) -> Store:
        from ..checkpoints import Store, environment_key

        attempt = self.run.attempt if self.run else 0
        return Store(
            self.folder,
            keep=self.saving.keep,
            attempt=attempt,
            key=environment_key(),
            tell=self.trainer.say,
        )

    def _begin_directory(self) -> None:
        """Marks the run as not complete, as there is more to do.

        ConfigError where an earlier fit() of this trainer saved here: it would only find its own
        end again.
        """
        place = os.path.realpath(self.folder)
        if place in self.trainer.saved_in:
            raise ConfigError(
                "[checkpoint] an earlier fit() of this trainer has its checkpoints in "
                f"{self.folder}; name another "
                "checkpoint_dir for this one"
            )
        self.trainer.saved_in.add(place)
        completion.incomplete()

        def unmark() -> None:
            if self.run is not None:
                completion.check_attempt(self.run)
                self.run.done.unlink(missing_ok=True)

        resume.by_first(self.comm, unmark)

    def _find(self, in_memory: bool) -> tuple[Snapshot | None, str]:
        """The start checkpoint and its name; opens the store. in_memory: see resume.find."""
        saving = self.saving
        folder = self.folder
        self._store = self._opened()
        # a restart of a run is no start
        if saving.resume == "never" and (self.run is None or self.run.attempt < 2):
            if self._store.names():
                raise ConfigError(
                    f"[checkpoint] {folder} has checkpoints "
                    f"({', '.join(self._store.names()[-2:])}) and resume is "
                    "'never'; name another directory, or resume"
                )
            return None, ""
        snapshot, refused = self._store.newest(in_memory)
        if snapshot is not None:
            self._origin = snapshot.values.get("origin")
        if saving.resume in RESUME or (snapshot is not None and self._origin == self._start_path):
            for one in refused:
                self.trainer.say(one.message(snapshot))
            return snapshot, "" if snapshot is None else self._store.path_of(snapshot.step).name
        origin_snapshot, name = resume.find(Path(saving.resume), self.trainer.say, in_memory)
        if snapshot is not None and snapshot.step != origin_snapshot.step:
            raise ConfigError(
                f"[checkpoint] resume is {saving.resume} (step {origin_snapshot.step}), but "
                f"{folder} has "
                "checkpoints that do not "
                f"come from it, up to step {snapshot.step}; use another directory for the new ones"
            )
        self._origin = self._start_path
        return origin_snapshot, name

    @property
    def _start_path(self) -> str | None:
        """The path that training is to start from, as its checkpoints remember it."""
        return None if self.saving.resume in RESUME else os.path.realpath(self.saving.resume)

    def _go_to(self, snapshot: Snapshot, name: str) -> None:
        """Puts a snapshot back: into the trainer, and this session's own part of it."""
        values = snapshot.values
        try:
            cursor = Cursor(**values["cursor"])
            tally = Tally(**values["tally"])
            seconds = float(values["seconds"])
            history = type(self.context.history)(**values["history"])
            numerics = dict(values["numerics"])
            history.records = resume.earlier(snapshot) + history.records
            cursor.check()
            if not all(isinstance(record, dict) for record in history.records):
                raise TypeError("its history is no list of records")
        except (DataError, KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(
                f"[resume] {name} does not say where the training is: {problem}"
            ) from problem
        for record in history.records:
            if record.get("train_loss") is None:
                record["train_loss"] = math.nan  # which JSON has not
        self.trainer.load(snapshot, name)
        self.trainer.numerics.load_state_dict(numerics)
        if not self.trainer.mode.together and self.comm.rank:
            tally.put(0.0, 0.0, dict.fromkeys(tally.named, 0.0))  # rank 0 has those of all ranks
        self.context.cursor = cursor
        self.context.tally = tally
        self._restored_checkpoint = snapshot, name
        self._seconds_before = seconds
        self._since = time.perf_counter()
        vars(self.context.history).update(vars(history))
        self._saved = snapshot.step
        if hasattr(self.loader, "start_at"):
            # the last group may be short
            batch = min(cursor.step * self.trainer.accumulation_steps, len(self.loader))
            self.loader.start_at(cursor.loader_epoch, batch)

    def put_back(self, in_epoch: bool = False) -> None:
        """Gives callbacks their states of the checkpoint that training goes on from, after
        on_fit_start; a training that one of them had finished is left so, unless that one has
        changed its mind. Callbacks hear of what was before the checkpoint once more: of the
        start of the training, and in the middle of an epoch of its start (`in_epoch`). What
        they did to weights and settings then is in the checkpoint, so it is put back after
        them.
        """
        if self._restored_checkpoint is None:
            return
        context = self.context
        (snapshot, name) = self._restored_checkpoint
        inside = context.cursor.step > 0
        if context.own_code and (inside or not in_epoch):
            self.trainer.put_back(snapshot, name)
        if inside or not in_epoch:
            self._restore_callbacks(snapshot.values, in_epoch=in_epoch)
        if in_epoch:
            self._restored_checkpoint = None
            self.trainer.expect(snapshot, name, inside or not context.own_code)

    def _restore_callbacks(self, values: dict[str, Any], in_epoch: bool) -> None:
        """in_epoch: for those of the user's own code, which have heard that the epoch begins."""
        context = self.context
        logged = {
            name: (int(n), math.nan if v is None else v)
            for name, (n, v) in (values.get("logged") or {}).items()
        }
        context.log_calls = max((n for n, _ in logged.values()), default=0)
        context.logged = logged
        callbacks = context.named()
        for name, state in (values.get("callbacks") or {}).items():
            if name in callbacks and (callbacks[name].own_code or not in_epoch):
                try:
                    callbacks[name].load_state_dict(state)
                except (KeyError, TypeError, ValueError, IndexError) as problem:
                    raise CheckpointError(
                        f"[resume] the checkpoint's state of {name} is not taken back: "
                        f"{type(problem).__name__}: "
                        f"{problem}; leave the callback out, or start anew"
                    ) from problem
        finished = values.get("finished") or {}
        finisher = callbacks.get(finished.get("by"))
        if not in_epoch and finisher is not None and finisher.still_finished(context):
            context.finished = str(finished.get("why"))
            context.finisher = finisher
            self._finish()

    def _finish(self) -> None:
        """Makes the current step the last one."""
        context = self.context
        context.limit = context.history.steps + context.tally.steps
        self.trainer.say(f"[train] finished by {context.finished} after step {self.trainer.steps}")

    def _check_data(self, snapshot: Snapshot, name: str) -> None:
        """Reads the last batch before a checkpoint again: it must be what it was, or the bits
        would be others. Nothing is read where the checkpoint does not name it, or it would
        take an epoch. Raises DataError: on all ranks: it is another.
        """
        last = snapshot.values.get("last batch")
        if last is None:
            return
        try:
            epoch = int(last["epoch"])
            step = int(last["step"])
            expected = int(last["fingerprint"], 16)
        except (KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(
                f"[resume] {name} does not say what its last batch was: {problem}"
            ) from problem
        matches = True
        # what draws from a generator gives its first batch again once, in a new process
        for _ in range(2):
            batch = self.trainer.read_again(self.loader, epoch, step, self.context.cursor.step > 0)
            if batch is None:
                return
            matches = matches and agreement.of_batch(batch) == expected
        self._last = epoch, step, batch
        rank_matches = self.comm.all_gather(np.array([matches], np.int32))[:, 0]
        if rank_matches.all():
            return
        place = "" if not rank_matches.any() else f" on rank {int(np.argmin(rank_matches))}"
        text = (
            f"[resume] the last batch before {name} (epoch {epoch + 1}, step {step + 1} of it), "
            "read again, is another"
            f"{place}: files changed, or the data set does not repeat itself"
        )
        if self.saving.nondeterministic:
            self.trainer.say(f"{text}; training goes on, and its bits will not come again")
            return
        raise DataError(
            f"{text}, so training would go on with other bits; {agreement.CURE}, or use "
            "--allow-nondeterministic-data "
            "(allow_nondeterministic_data=True)"
        ).on_all_ranks()

    def seconds(self) -> float:
        """Seconds that training has taken in this epoch so far."""
        return self._seconds_before + time.perf_counter() - self._since

    def leave_out(self, seconds: float) -> None:
        """These were no training."""
        self._since += seconds

    @property
    def finished(self) -> bool:
        """Returns whether there is nothing left to do."""
        c = self.context
        return (
            c.cursor.epoch >= c.epochs
            or self._complete
            or (self.steps_left == 0 and not c.tally.samples)
        )

    @property
    def first_batch(self) -> int:
        """How many batches of this epoch a loader that cannot be told where to start must leave
        out.
        """
        return (
            0
            if hasattr(self.loader, "start_at")
            else self.context.cursor.step * self.trainer.accumulation_steps
        )

    @property
    def steps_left(self) -> int | None:
        """Steps until the limit, None without one."""
        c = self.context
        return None if c.limit is None else max(c.limit - c.history.steps - c.tally.steps, 0)

    def saved(self) -> int | None:
        """The step of the newest checkpoint of this training; a collective call."""

        def newest() -> int | None:
            self._settle_store()
            return max((int(name.split("_")[1]) for name in self._store.names()), default=None)

        return resume.by_first(self.comm, newest) if self.saves else None

    def _settle_store(self) -> None:
        """Waits for the save in the background, and tells what went wrong with it; on rank 0."""
        try:
            self._store.wait()
        except (OutputError, NumericsError) as problem:
            self.trainer.say(_describe_failure(problem))

    def roll_back(self) -> None:
        """Goes back to the newest checkpoint."""

        def newest(in_memory: bool) -> tuple[Snapshot | None, str]:
            self._settle_store()
            return resume.find(self.folder, self.trainer.say, in_memory)

        snapshot, name = self._shared(newest)
        numerics = self.trainer.numerics.state_dict()
        self._go_to(snapshot, name)
        self.trainer.numerics.load_state_dict(numerics)  # it knows which batch to leave out now

    def stepped(self, batch: Batch, samples: int) -> None:
        """After a step on a batch, over so many samples (none, if it was left out): a checkpoint
        if one is due. Raises Stopped: somebody asked for it; a checkpoint of this step is
        there.
        """
        cursor = self.context.cursor
        self._last = cursor.loader_epoch, cursor.step, batch
        cursor.step += 1
        cursor.samples += samples
        every = self.trainer.check_every
        if (
            every
            and self.trainer.steps % every == 0
            and self.comm.size > 1
            and self.trainer.mode.together
        ):
            self.trainer.check_alike()
            self._checked = self.trainer.steps
        if (
            self.saves
            and self.saving.every is not None
            and self.trainer.steps % self.saving.every == 0
        ):
            self._due = True
        if not self.trainer.mode.settled:
            return  # each rank has weights of its own
        if self.context.finished is not None:
            self._finish()
        elif self.context.stop is not None:
            self._stop(self.context.stop)
        elif self._due:
            self._save()

    def end_steps(self, tally: Tally) -> None:
        """After the last step of an epoch, before its record is made.

        Where the limit cuts an epoch short, the last checkpoint is made here: with a higher limit
        training goes on within this epoch.
        """
        self.context.tally = tally
        if not self.trainer.mode.together and self.comm.rank:
            local_tally = dataclasses.replace(tally)  # rank 0 has the sums of all ranks
            self.context.tally = local_tally.put(0.0, 0.0, dict.fromkeys(tally.named, 0.0))
        limit = self.context.limit
        if (
            limit is None
            or self.context.history.steps + tally.steps < limit
            or self.trainer.mode.own_loop
        ):
            return
        try:
            length = -(-len(self.loader) // self.trainer.accumulation_steps)
        except TypeError:
            length = 0
        if self.context.cursor.step != length:
            self._complete = True
            if self.saves:
                self._save(wait=True)
            # as it is where all steps were taken in this process
            if hasattr(self.loader, "start_at"):
                self.loader.start_at(self.context.cursor.loader_epoch + 1, 0)

    def epoch_ended(self) -> None:
        """After an epoch and its evaluation: a checkpoint or a stop, likewise."""
        context = self.context
        context.emit("on_epoch_end")
        if self._complete:
            return
        if context.finished is not None and (
            context.limit is None or context.limit > context.history.steps
        ):
            context.tally = Tally()
            self._finish()
        context.tally = Tally()
        self._seconds_before = 0.0
        self._since = time.perf_counter()
        old_cursor = context.cursor
        context.cursor = Cursor(
            old_cursor.epoch + 1, 0, old_cursor.loader_epoch + 1, old_cursor.samples
        )
        regular = self.saving.every is None and context.cursor.epoch % self.saving.epochs == 0
        due = context.due or regular
        context.due = False
        if (
            context.finished is None
            and context.stop is not None
            and context.cursor.epoch < context.epochs
        ):
            self._stop(context.stop)
        elif self.saves and due:
            self._save()
        if (
            context.own_code
            and context.cursor.epoch < context.epochs
            and self.trainer.mode.together
        ):
            self.trainer.stays()  # only what hears of the next start may set a value outside

    def _stop(self, reason: str) -> None:
        text = f"[train] stopped by {reason} after step {self.trainer.steps}"
        if self.saves:
            from ..checkpoints.snapshot import step_name

            self._save(wait=True)
            text += (
                f"; checkpoint {step_name(self.trainer.steps)} is written, "
                "the same command goes on from it"
            )
        raise Stopped(text).on_all_ranks()

    def _save(self, wait: bool = False) -> None:
        """Writes a checkpoint of this moment, in the background unless `wait`, if there is none
        of it. A failure is told and training goes on; with `wait` it is an error.
        """
        previous_phase = slot.phase("checkpoint")
        self._due = False
        self.context.kept = set()
        self.context.marks = set()
        self.context.emit("on_checkpoint")
        if self._store is not None:
            self._store.kept = frozenset(self.context.kept)
        marks = tuple(sorted(self.context.marks))
        if self._saved != self.trainer.steps or (wait and not self._is_written()):
            self._check()
            self._write(self._values(), marks, wait)
            self._saved = self.trainer.steps
        else:
            if self._store is not None and marks:
                self._settle_store()
                self._store.mark(self.trainer.steps, marks)
            if wait:
                self.comm.barrier()
        slot.phase(previous_phase)

    def _write(self, values: dict[str, Any], marks: Sequence[str], wait: bool) -> None:
        def state(in_parts: bool) -> Snapshot | None:
            snapshot = self.trainer.state(values, in_parts)
            if self.comm.rank == 0 and (earlier := self.context.history.records[:-1]):
                text = json.dumps(finite(earlier), allow_nan=False).encode()
                snapshot.arrays[resume.EARLIER[0]] = {
                    resume.EARLIER[1]: np.frombuffer(text, np.uint8)
                }
            return snapshot

        if self.comm.rank == 0:
            self._settle_store()
        try:
            if self.trainer.in_parts and checkpoint_parts.save(
                self.comm, self._store, state(True), marks
            ):
                return
            snapshot = state(False)
            if wait:  # nobody ends before it is there; all end if it cannot be written
                resume.by_first(self.comm, lambda: str(self._store.save(snapshot, marks)))
            elif snapshot is not None:
                self._store.save_later(snapshot, marks)
        except (OutputError, NumericsError) as problem:
            if wait:
                raise
            # if an update has overflowed, the next step finds it, on all ranks
            self.trainer.say(_describe_failure(problem))

    def _check(self) -> None:
        """Before a checkpoint, and at the end: ranks must have the same, and a resumed training
        would compute it.
        """
        trainer = self.trainer
        if not trainer.mode.together:
            return
        if self.saves:
            trainer.stays()
        if trainer.check_every and self.comm.size > 1 and self._checked != trainer.steps:
            trainer.check_alike()
            self._checked = trainer.steps
            if self._last is not None and not self.saving.nondeterministic:
                agreement.last_batch(self.comm, self._last[2], trainer.steps)

    def _is_written(self) -> bool:
        """Returns whether the checkpoint of this step, begun in the background, has been
        written; a collective call.
        """

        def exists() -> bool:
            self._settle_store()
            return self._store.path_of(self.trainer.steps).exists()

        return resume.by_first(self.comm, exists)

    def _values(self) -> dict[str, Any]:
        """This session's part of a checkpoint; a collective call where ranks have tallies of
        their own.
        """
        tally = self.trainer.mode.whole_tally(self.context.tally)
        optional_values: dict[str, Any] = {}
        if self._last is not None and self.comm.rank == 0:
            epoch, step, batch = self._last
            mark = f"{agreement.of_batch(batch.whole()):016x}"
            optional_values["last batch"] = {"epoch": epoch, "step": step, "fingerprint": mark}
        if self.saving.nondeterministic:
            optional_values["nondeterministic data"] = True
        callbacks = self.context.named()
        if callbacks:
            optional_values["logged"] = finite(self.context.logged)
            optional_values["callbacks"] = {
                name: resume.state_of_callback(name, callback)
                for name, callback in callbacks.items()
            }
        if self.context.finished is not None:
            by = next(
                (name for name, callback in callbacks.items() if callback is self.context.finisher),
                None,
            )
            optional_values["finished"] = {"by": by, "why": self.context.finished}
        return {
            **optional_values,
            "cursor": dataclasses.asdict(self.context.cursor),
            "seconds": self.seconds(),
            "tally": finite({k: v for k, v in dataclasses.asdict(tally).items() if v is not None}),
            "history": finite(
                {**vars(self.context.history), "records": self.context.history.records[-1:]}
            ),
            "numerics": self.trainer.numerics.state_dict(),
            "epochs": self.context.epochs,
            "origin": self._origin,
            "recipe": trained_models.recipe(self.trainer, self.loader),
        }

    def end(self) -> None:
        """The training is complete: its last checkpoint, and in a run the record that says so."""
        self._check()
        if not self.saves:
            return
        self._save(wait=True)
        if self.run is not None:
            sha = self.trainer.weights_sha256()
            if self.comm.rank == 0:
                record = {
                    "attempt": self.run.attempt,
                    "steps": self.trainer.steps,
                    "weights_sha256": sha,
                }
                completion.complete(self.run, record)

    def close(self) -> None:
        """Gives back threads and the directory, whatever happened."""
        if self._store is not None:
            try:
                self._store.close()
            # where the training failed, that is the error
            except (OutputError, NumericsError) as problem:
                self.trainer.say(str(problem))
            self._store = None


def _describe_failure(problem: OdysseyError) -> str:
    """Returns what the user is told of a checkpoint that was not written."""
    return f"{problem}; training goes on, the one before stays"
