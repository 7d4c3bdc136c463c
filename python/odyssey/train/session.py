"""One fit(): its position in the data, its checkpoints, and everything between two of its steps.

All ranks call all methods, at the same steps. Only rank 0 reads and writes files.
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
from ..capture import decode
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
from . import (
    agreement,
    checkpoint_parts,
    completion,
    preflight,
    resume,
    trained_models,
    validation,
)
from .batches import shares_samples
from .feed import SAMPLER_ROOTS
from .resume import RESUME

if TYPE_CHECKING:
    from ..checkpoints import Snapshot, Store


_fits = 0  # calls of fit() of this process that belonged to a run: each has checkpoints of its own


class Session:
    """A fit() of a trainer.

    Args:
        trainer: whose fit() it is.
        loader: a DataLoader, or an iterable that yields the same batches each time.
        context: the plan of the fit() and its position, which the session keeps up to date.

    Raises:
        ConfigError: The settings of checkpoints and `resume` don't fit together.
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
        self._measured_since = time.perf_counter()
        self._limit_reached = False  # the limit was reached within an epoch
        self._checked_step = -1  # the step at which ranks were compared last
        # a checkpoint is written as soon as all ranks have the same weights
        self._save_is_due = False
        # the checkpoint that was restored and its name, until its epoch has started
        self._restored_checkpoint: tuple[Snapshot, str] | None = None
        self.run = None if saving.off else Run.current()
        self._store: Store | None = None
        self._saved_step: int | None = None  # the step of the newest checkpoint
        # the epoch (as the loader counts), the step in it, and its batch
        self._last_batch: tuple[int, int, Batch] | None = None
        # what the loader held when that batch was used; if callbacks have changed it since, the
        # batch would be another one if it was read again
        self._loader_marks: dict[str, str] | None = None
        # the fingerprint of its samples, if they were read before a callback may have changed them
        self._last_print: int | None = None
        # the checkpoint of another directory that this training came from
        self._origin: str | None = None
        self._callback_arrays: dict[str, np.ndarray] = {}  # of what state_dict() of them returns
        # what identifies the validation data, on rank 0
        self._validation: dict[str, Any] | None = None
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
        """The number of this fit() among those of this process that belong to a run."""
        return _fits

    @property
    def log(self) -> Path:
        """Where the step log of this fit() goes, if it belongs to a run."""
        from ..audit.steplog import NAME

        return self.run.steps / (NAME if _fits == 1 else f"{_fits}-{NAME}")

    @property
    def saves(self) -> bool:
        """True if it writes checkpoints."""
        return self.folder is not None

    def begin(self) -> None:
        """Restores the newest valid checkpoint, or starts at the first step.

        Raises ConfigError: it is of another training run. CheckpointError: the one that was
        asked for isn't valid. OutputError: the directory can't be used.
        """
        if resume.wants_weights(self.saving.resume):
            if self.run is None or self.run.attempt < 2:
                return self._take_weights()
            # a restart continues the run, which has the weights already
            self.saving = dataclasses.replace(self.saving, resume="auto")
        loader_state = self.trainer.feed.loader_state
        if loader_state is not None:
            loader_state.active = self.saves
        if self.folder is None:
            if self.saving.resume not in RESUME:
                path = Path(self.saving.resume)
                snapshot, name = self._share_snapshot(
                    lambda in_memory: resume.find(path, self.trainer.say, in_memory)
                )
                self._restore_snapshot(snapshot, name)
            return
        self._claim_directory()
        # before values of a checkpoint are put into a data set that training shares
        self._validation = self.trainer.feed.describe_validation(self.loader)
        snapshot, name = self._share_snapshot(self._find_start)
        if snapshot is not None:
            self._restore_snapshot(snapshot, name)
            self._check_data(snapshot, name)
            self._compare_validation(snapshot, name)
            self.trainer.say(
                f"resumed from {name}: step {snapshot.step}, epoch "
                f"{self.context.cursor.epoch + 1}, {self.context.cursor.samples:,} samples done"
            )
        if self.comm.rank == 0:
            self._warn_before_start()

    def _warn_before_start(self) -> None:
        """Warns if a sampler holds what checkpoints can't keep, or if disk space is short.

        Raises OutputError: not even one checkpoint fits.
        """
        sampler = getattr(self.loader, "sampler", None)
        if self.trainer.feed.loader_state is None and not hasattr(sampler, "set_epoch"):
            for path, kind in self.trainer.capture.opaque_below(SAMPLER_ROOTS).items():
                self.trainer.say(
                    f"[checkpoint] checkpoints can't keep {path} ({kind}): a resumed run has the "
                    "same order of samples only if it is the same when the program starts. Hold "
                    "what the sampler remembers in numbers, lists or generators"
                )
        free_bytes = preflight.free(self.folder)
        checkpoint_bytes = self.trainer.state_bytes
        for warning in preflight.check_space(free_bytes, checkpoint_bytes, str(self.folder)):
            self.trainer.say(warning)

    def _take_weights(self) -> None:
        """Starts a new training run with the weights of a checkpoint; a collective call.

        Raises ConfigError, CheckpointError or OutputError, as `begin`.
        """
        if self.folder is not None:
            self._claim_directory()

        def read_source(in_memory: bool) -> tuple[Snapshot, str]:
            self._store = None if self.folder is None else self._open_store()
            return resume.weights(str(self.saving.resume), self.folder, self.trainer.say, in_memory)

        snapshot, name = self._share_snapshot(read_source)
        self.trainer.load_weights(snapshot, name)
        resume.by_first(self.comm, self._move_old_checkpoints)
        self.trainer.say(
            f"the weights of {name} are taken; optimizer, schedule and epochs begin anew"
        )

    def _move_old_checkpoints(self) -> None:
        """Moves checkpoints and step log of an earlier training run to another folder."""
        if self._store is not None and (aside := self._store.put_aside()) is not None:
            if self.run is not None and self.log.exists():
                os.replace(self.log, aside / self.log.name)
            self.trainer.say(f"[checkpoint] the checkpoints of before are in {aside}")

    def _share_snapshot(
        self, read: Callable[[bool], tuple[Snapshot | None, str]]
    ) -> tuple[Snapshot | None, str]:
        """Returns the snapshot and its name that `read` returns on rank 0, on all ranks."""
        return resume.shared(self.comm, read, self.trainer.in_parts)

    def _open_store(self) -> Store:
        """Opens the directory of checkpoints; on rank 0."""
        from ..checkpoints import Store, environment_key

        attempt = self.run.attempt if self.run else 0
        return Store(
            self.folder,
            keep=self.saving.keep,
            attempt=attempt,
            key=environment_key(),
            tell=self.trainer.say,
        )

    def _claim_directory(self) -> None:
        """Marks the directory as used by this fit(), and its run as not complete.

        Raises ConfigError: an earlier fit() of this trainer saved here. This one would restore the
        end of that one, and have no steps left.
        """
        path = os.path.realpath(self.folder)
        if path in self.trainer.saved_in:
            raise ConfigError(
                "[checkpoint] an earlier fit() of this trainer has its checkpoints in "
                f"{self.folder}; name another checkpoint_dir for this one"
            )
        self.trainer.saved_in.add(path)
        completion.incomplete()

        def unmark() -> None:
            if self.run is not None:
                completion.check_attempt(self.run)
                self.run.done.unlink(missing_ok=True)

        resume.by_first(self.comm, unmark)

    def _find_start(self, in_memory: bool) -> tuple[Snapshot | None, str]:
        """Opens the store, and returns the checkpoint to start from with its name; on rank 0.

        Without a checkpoint it returns (None, ""). in_memory: see resume.find. Raises ConfigError:
        the directory holds checkpoints that don't come from the one to start from.
        """
        saving = self.saving
        folder = self.folder
        self._store = self._open_store()
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
            for checkpoint in refused:
                self.trainer.say(checkpoint.message(snapshot))
            return snapshot, "" if snapshot is None else self._store.path_of(snapshot.step).name
        origin_snapshot, name = resume.find(Path(saving.resume), self.trainer.say, in_memory)
        if snapshot is not None and snapshot.step != origin_snapshot.step:
            raise ConfigError(
                f"[checkpoint] resume is {saving.resume} (step {origin_snapshot.step}), but "
                f"{folder} has checkpoints that do not come from it, up to step {snapshot.step}; "
                "use another directory for the new ones"
            )
        self._origin = self._start_path
        return origin_snapshot, name

    @property
    def _start_path(self) -> str | None:
        """The path of the checkpoint to start from, as checkpoints store it; None without one."""
        return None if self.saving.resume in RESUME else os.path.realpath(self.saving.resume)

    def _restore_snapshot(self, snapshot: Snapshot, name: str) -> None:
        """Restores the trainer and this session from a snapshot; a collective call.

        Raises CheckpointError: its values of the session are missing or damaged.
        """
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
                record["train_loss"] = math.nan  # JSON has no NaN, so it is stored as null
        self.trainer.load(snapshot, name)
        self.trainer.numerics.load_state_dict(numerics)
        if not self.trainer.mode.together and self.comm.rank:
            tally.put(0.0, 0.0, dict.fromkeys(tally.named, 0.0))  # rank 0 has those of all ranks
        self.context.cursor = cursor
        self.context.tally = tally
        self._restored_checkpoint = snapshot, name
        self._seconds_before = seconds
        self._measured_since = time.perf_counter()
        vars(self.context.history).update(vars(history))
        self._saved_step = snapshot.step
        if hasattr(self.loader, "start_at"):
            if hasattr(self.loader, "set_epoch"):
                self.loader.set_epoch(cursor.loader_epoch)  # its length may go by the epoch
            # the last step of an epoch may have fewer batches
            batch = min(cursor.step * self.trainer.accumulation_steps, len(self.loader))
            self.loader.start_at(cursor.loader_epoch, batch)
        self._restore_loader(snapshot, name)

    def _restore_loader(self, snapshot: Snapshot, name: str) -> None:
        """Sets a loader that has a `state_dict()` to its position, and checks the last batch.

        It does nothing for other loaders. A collective call.

        Raises:
            CheckpointError: The loader does not accept its state.
            DataError: It continues with other data, and nondeterministic data aren't allowed.
        """
        result = self.trainer.feed.restore_state(snapshot, name, self.context)
        if result is None:
            return
        epoch, step, batch, rank_matches = result
        if batch is not None:
            self._last_batch = epoch, step, batch
            self._last_print = None
        if not rank_matches.all():
            self._report_other_batch(
                name,
                epoch,
                step,
                rank_matches,
                f"load_state_dict() of the {type(self.loader).__name__} does not continue where "
                "state_dict() was called, files changed, or the data set does not repeat itself",
            )

    def put_back(self, in_epoch: bool = False) -> None:
        """Restores the states of callbacks from the checkpoint that the training run resumes from.

        A resumed run calls on_fit_start of its callbacks again, and if it resumes in the middle of
        an epoch also on_epoch_start. What these calls do to weights and settings is in the
        checkpoint already. So this is called after each of them, and restores weights and settings
        as well. A run that a callback had finished stays finished, unless that callback no longer
        wants it.

        in_epoch: False after on_fit_start, True after on_epoch_start.
        """
        if self._restored_checkpoint is None:
            return
        context = self.context
        snapshot, name = self._restored_checkpoint
        is_mid_epoch = context.cursor.step > 0
        if is_mid_epoch or not in_epoch:
            if context.own_code:
                self.trainer.put_back(snapshot, name)
            self._restore_callbacks(snapshot, in_epoch=in_epoch)
        if is_mid_epoch == in_epoch:
            # no callback is called any more before the next step
            self.trainer.restore_captured(snapshot, name)
            # on_epoch_start may change the data set, so it isn't as in the last epoch before
            if is_mid_epoch or not context.own_code:
                self._check_samples(snapshot, name)
        if in_epoch:
            self._restored_checkpoint = None
            self.trainer.expect(snapshot, name, is_mid_epoch or not context.own_code)

    def _restore_callbacks(self, snapshot: Snapshot, in_epoch: bool) -> None:
        """Restores callbacks, and the values that they logged, from the values of a checkpoint.

        in_epoch: True after on_epoch_start. Then only callbacks of the user's own code are
        restored, because only these may have changed their state in it.

        Raises CheckpointError: a callback doesn't accept its state.
        """
        context = self.context
        values = snapshot.values
        arrays = snapshot.arrays.get(resume.CALLBACK_ARRAYS, {})
        logged = {
            name: (int(call), math.nan if value is None else value)
            for name, (call, value) in (values.get("logged") or {}).items()
        }
        context.log_calls = max((call for call, _ in logged.values()), default=0)
        context.logged = logged
        callbacks = context.named()
        for name, state in (values.get("callbacks") or {}).items():
            if name in callbacks and (callbacks[name].own_code or not in_epoch):
                try:
                    callbacks[name].load_state_dict(decode(state, arrays))
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
            self._finish_training()

    def _finish_training(self) -> None:
        """Makes the current step the last one, because a callback wants it."""
        context = self.context
        context.limit = context.history.steps + context.tally.steps
        self.trainer.say(f"[train] finished by {context.finished} after step {self.trainer.steps}")

    def _check_data(self, snapshot: Snapshot, name: str) -> None:
        """Reads the last batch before a checkpoint again, and compares it with the one used then.

        If the data differ, a resumed run has other results. It reads nothing if the checkpoint
        doesn't name the batch, or if reading it would take an epoch. A collective call.

        Raises DataError: the batch differs on a rank, and nondeterministic data aren't allowed.
        """
        last = snapshot.values.get("last batch")
        loader_state = self.trainer.feed.loader_state
        if last is None or (loader_state is not None and loader_state.restored):
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
        # It is read twice: in a new process, a data set that draws from a generator can repeat its
        # first batch once.
        for _ in range(2):
            batch = self.trainer.read_again(self.loader, epoch, step, self.context.cursor.step > 0)
            if batch is None:
                return
            matches = matches and agreement.of_batch(batch) == expected
        self._last_batch = epoch, step, batch
        self._last_print = None
        rank_matches = self.comm.all_gather(np.array([matches], np.int32))[:, 0]
        if rank_matches.all():
            return
        self._report_other_batch(
            name,
            epoch,
            step,
            rank_matches,
            "files changed, or the data set does not repeat itself",
        )

    def _compare_validation(self, snapshot: Snapshot, name: str) -> None:
        """Reports validation data that aren't those of the checkpoint."""
        if self._validation is None or self.saving.nondeterministic:
            return
        saved = snapshot.values.get("validation")
        if difference := validation.difference(saved, self._validation):
            self.trainer.say(
                f"[resume] the validation data aren't those that {name} was made with "
                f"({difference}); from here on test metrics, and what callbacks do with them, may "
                "differ from those of a run without a stop"
            )

    def _check_samples(self, snapshot: Snapshot, name: str) -> None:
        """Compares the first samples of the last batch before a checkpoint, if it has their hashes.

        A collective call. Raises DataError: a sample has changed, and nondeterministic data aren't
        allowed.
        """
        last = snapshot.values.get("last batch") or {}
        saved = last.get("samples")
        feed = self.trainer.feed
        if not isinstance(saved, dict) or not shares_samples(self.loader):
            return
        changed = feed.find_changed_sample(self.loader, saved, int(last["epoch"]))
        by_rank = self.comm.all_gather(np.array([changed], np.int64))[:, 0]
        ranks = np.flatnonzero(by_rank >= 0)
        if not len(ranks):
            return
        place = "" if len(ranks) == len(by_rank) else f" on rank {ranks[0]}"
        text = (
            f"[resume] the data differ from those of the run: sample {by_rank[ranks[0]]}{place} "
            f"isn't the one that {name} was trained with; its file changed, or the data set was "
            "built or split with another seed"
        )
        if self.saving.nondeterministic:
            self.trainer.say(f"{text}; training continues, but its results can't be repeated")
            return
        raise DataError(
            f"{text}; give the same data, or use --allow-nondeterministic-data "
            "(allow_nondeterministic_data=True)"
        ).on_all_ranks()

    def _report_other_batch(
        self, name: str, epoch: int, step: int, rank_matches: np.ndarray, reasons: str
    ) -> None:
        """Reports that the last batch before a checkpoint is another one when it is read again.

        Args:
            name: of the checkpoint.
            epoch, step: of the batch.
            rank_matches: for each rank whether the batch is the same there.
            reasons: what may have happened.

        Raises:
            DataError: Nondeterministic data aren't allowed.
        """
        place = "" if not rank_matches.any() else f" on rank {int(np.argmin(rank_matches))}"
        text = (
            f"[resume] the last batch before {name} (epoch {epoch + 1}, step {step + 1} of it), "
            f"read again, is another{place}: {reasons}"
        )
        if self.saving.nondeterministic:
            self.trainer.say(f"{text}; training goes on, and its bits will not come again")
            return
        advice = self.trainer.feed.advice(self.loader)
        raise DataError(
            f"{text}, so training would go on with other bits{advice}; {agreement.CURE}, or use "
            "--allow-nondeterministic-data (allow_nondeterministic_data=True)"
        ).on_all_ranks()

    def seconds(self) -> float:
        """Returns the seconds of training in this epoch so far."""
        return self._seconds_before + time.perf_counter() - self._measured_since

    def leave_out(self, seconds: float) -> None:
        """Excludes these seconds from the time of training."""
        self._measured_since += seconds

    @property
    def finished(self) -> bool:
        """True if no step and no evaluation are left."""
        context = self.context
        return (
            context.cursor.epoch >= context.epochs
            or self._limit_reached
            or (self.steps_left == 0 and not context.tally.samples)
        )

    @property
    def first_batch(self) -> int:
        """The number of batches of this epoch to skip; 0 for a loader that has a `start_at`."""
        if hasattr(self.loader, "start_at"):
            return 0
        return self.context.cursor.step * self.trainer.accumulation_steps

    @property
    def steps_left(self) -> int | None:
        """The number of steps until the limit; None without a limit."""
        context = self.context
        if context.limit is None:
            return None
        return max(context.limit - context.history.steps - context.tally.steps, 0)

    def saved(self) -> int | None:
        """Returns the step of the newest checkpoint of this training run; a collective call.

        None if there is no checkpoint.
        """

        def find_newest_step() -> int | None:
            self._settle_store()
            steps = (int(name.split("_")[1]) for name in self._store.names())  # step_NUMBER
            return max(steps, default=None)

        return resume.by_first(self.comm, find_newest_step) if self.saves else None

    def _settle_store(self) -> None:
        """Waits for the save in the background, and reports its error to the user; on rank 0."""
        try:
            self._store.wait()
        except (OutputError, NumericsError) as problem:
            self.trainer.say(_describe_failure(problem))

    def roll_back(self) -> None:
        """Restores the newest checkpoint after a step that was not finite; a collective call."""

        def find_newest(in_memory: bool) -> tuple[Snapshot | None, str]:
            self._settle_store()
            return resume.find(self.folder, self.trainer.say, in_memory)

        snapshot, name = self._share_snapshot(find_newest)
        # the current state of the policy, unlike the checkpoint's, has the batch to skip
        numerics = self.trainer.numerics.state_dict()
        self._restore_snapshot(snapshot, name)
        self.trainer.numerics.load_state_dict(numerics)

    def before_step(self, batch: Batch) -> None:
        """Takes the fingerprint of a batch if a checkpoint is due after its step.

        A callback may change the data set in on_step_end, for example the strength of a transform.
        """
        self._last_print = None
        self._loader_marks = None
        every = self.saving.every
        is_due = self.saves and every is not None and (self.trainer.steps + 1) % every == 0
        if is_due and self.context.own_code and self.trainer.mode.together:
            self._last_print = agreement.of_batch(batch.whole())
            if not getattr(self.loader, "reads_ahead", False):
                self._loader_marks = self.trainer.capture.loader_marks()

    def _fingerprint_last_batch(self) -> int:
        """Returns the fingerprint of the samples of the last batch."""
        if self._last_print is None:
            _, _, batch = self._last_batch
            self._last_print = agreement.of_batch(batch.whole())
        return self._last_print

    def stepped(self, batch: Batch, samples: int) -> None:
        """Moves on by a step, compares ranks if it is time, and writes a checkpoint if one is due.

        Args:
            batch: of the step.
            samples: how many were used; 0 if the batch was skipped.

        Raises:
            Stopped: Somebody asked to stop. The checkpoint of this step is written.
        """
        cursor = self.context.cursor
        self._last_batch = cursor.loader_epoch, cursor.step, batch
        if self.trainer.feed.loader_state is not None:
            self.trainer.feed.loader_state.used(batch)
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
            self._checked_step = self.trainer.steps
        if (
            self.saves
            and self.saving.every is not None
            and self.trainer.steps % self.saving.every == 0
        ):
            self._save_is_due = True
        if not self.trainer.mode.settled:
            return  # each rank has different weights at this step
        if self.context.finished is not None:
            self._finish_training()
        elif self.context.stop is not None:
            self._stop_training(self.context.stop)
        elif self._save_is_due:
            self._save_checkpoint()

    @property
    def is_at_epoch_end(self) -> bool:
        """True if all steps of the epoch were taken, as far as the loader knows its length."""
        try:
            length = -(-len(self.loader) // self.trainer.accumulation_steps)
        except TypeError:
            return False
        return self.context.cursor.step == length

    def end_steps(self, tally: Tally) -> None:
        """Notes the sums of an epoch after its last step, before its record is created.

        If the limit ends an epoch early, the last checkpoint is written here. So a run with a
        higher limit can resume within this epoch.
        """
        self.context.tally = tally
        if self.context.own_code and self.trainer.mode.together and self._last_batch is not None:
            # It is computed here, because callbacks may change the data set in on_epoch_end.
            self._fingerprint_last_batch()
            if self.saves:
                self._loader_marks = self.trainer.capture.loader_marks()
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
        if not self.is_at_epoch_end:
            self._limit_reached = True
            if self.saves:
                self._save_checkpoint(wait=True)
            # as if the epoch had been read to its end
            if hasattr(self.loader, "start_at"):
                self.loader.start_at(self.context.cursor.loader_epoch + 1, 0)

    def epoch_ended(self) -> None:
        """Moves on to the next epoch, after the evaluation; writes a checkpoint if one is due.

        Raises Stopped: somebody asked for it; the checkpoint is written.
        """
        context = self.context
        context.emit("on_epoch_end")
        self.trainer.capture.end_epoch()
        if self._limit_reached:
            return
        if context.finished is not None and (
            context.limit is None or context.limit > context.history.steps
        ):
            self._reset_sums()
            self._finish_training()
        self._reset_sums()
        self._seconds_before = 0.0
        self._measured_since = time.perf_counter()
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
            self._stop_training(context.stop)
        elif self.saves and due:
            self._save_checkpoint()
        if (
            context.own_code
            and context.cursor.epoch < context.epochs
            and self.trainer.mode.together
        ):
            # from here on only on_epoch_start of a callback may change settings
            self.trainer.stays()

    def _stop_training(self, reason: str) -> None:
        """Writes a checkpoint, if this session does, and raises Stopped on all ranks."""
        text = f"[train] stopped by {reason} after step {self.trainer.steps}"
        if self.saves:
            from ..checkpoints.snapshot import step_name

            self._save_checkpoint(wait=True)
            text += (
                f"; checkpoint {step_name(self.trainer.steps)} is written, "
                "the same command goes on from it"
            )
        raise Stopped(text).on_all_ranks()

    def _save_checkpoint(self, wait: bool = False) -> None:
        """Writes a checkpoint of this step, if there is none yet; a collective call.

        wait: False writes it in the background, and reports a failure to the user while training
        continues. True waits for it, and raises OutputError or NumericsError.
        """
        previous_phase = slot.phase("checkpoint")
        self._save_is_due = False
        self.context.kept = set()
        self.context.marks = set()
        self.context.emit("on_checkpoint")
        if self._store is not None:
            self._store.kept = frozenset(self.context.kept)
        marks = tuple(sorted(self.context.marks))
        if self._saved_step != self.trainer.steps or (wait and not self._is_written()):
            self._check_ranks()
            self._write_checkpoint(self._collect_values(), marks, wait)
            self._saved_step = self.trainer.steps
        else:
            if self._store is not None and marks:
                self._settle_store()
                self._store.mark(self.trainer.steps, marks)
            if wait:
                self.comm.barrier()
        slot.phase(previous_phase)

    def _take_snapshot(self, values: dict[str, Any], in_parts: bool) -> Snapshot | None:
        """Returns the trainer's state, with this session's values and the history's records.

        in_parts: True gives each rank the part that it has. Else rank 0 has all, other ranks None.
        """
        snapshot = self.trainer.state(values, in_parts)
        earlier_records = self.context.history.records[:-1]
        if self.comm.rank == 0 and self._callback_arrays:
            snapshot.arrays[resume.CALLBACK_ARRAYS] = self._callback_arrays
        if self.comm.rank == 0 and self.trainer.feed.loader_state is not None:
            self.trainer.feed.loader_state.save(snapshot)
        if self.comm.rank == 0 and earlier_records:
            text = json.dumps(finite(earlier_records), allow_nan=False).encode()
            file, tensor_name = resume.EARLIER
            snapshot.arrays[file] = {tensor_name: np.frombuffer(text, np.uint8)}
        return snapshot

    def _write_checkpoint(self, values: dict[str, Any], marks: Sequence[str], wait: bool) -> None:
        """Writes a checkpoint: each rank its part, if all see the directory, else rank 0.

        Args:
            values: this session's part of it.
            marks: names by which callbacks mark it.
            wait: see `_save_checkpoint`.
        """
        if self.comm.rank == 0:
            self._settle_store()
        try:
            # the part of this rank is not kept in a variable: it is freed before a whole snapshot
            if self.trainer.in_parts and checkpoint_parts.save(
                self.comm, self._store, self._take_snapshot(values, in_parts=True), marks
            ):
                return
            snapshot = self._take_snapshot(values, in_parts=False)
            if wait:  # no rank exits before it is written; all raise if it can't be written
                resume.by_first(self.comm, lambda: str(self._store.save(snapshot, marks)))
            elif snapshot is not None:
                self._store.save_later(snapshot, marks)
        except (OutputError, NumericsError) as problem:
            if wait:
                raise
            # if an update has overflowed, the next step finds it, on all ranks
            self.trainer.say(_describe_failure(problem))

    def _check_ranks(self) -> None:
        """Compares weights and the last batch between ranks, before a checkpoint and at the end.

        It also checks that nothing was changed that a resumed run would not have. A collective
        call. Raises NumericsError, ConfigError or DataError on all ranks.
        """
        trainer = self.trainer
        if not trainer.mode.together:
            return
        if self.saves:
            trainer.stays()
        if trainer.check_every and self.comm.size > 1 and self._checked_step != trainer.steps:
            trainer.check_alike()
            self._checked_step = trainer.steps
            if self._last_batch is not None and not self.saving.nondeterministic:
                agreement.last_batch(self.comm, self._fingerprint_last_batch(), trainer.steps)

    def _is_written(self) -> bool:
        """Returns whether the checkpoint of this step is written, after waiting for the save in the
        background; a collective call.
        """

        def exists() -> bool:
            self._settle_store()
            return self._store.path_of(self.trainer.steps).exists()

        return resume.by_first(self.comm, exists)

    def _has_loader_changed(self) -> bool:
        """Tells whether callbacks have changed what the loader holds since the last batch was used.

        If the step of a checkpoint was not known before, transforms are compared with what they
        were when the epoch started.
        """
        if self._last_batch is None or not self.context.own_code:
            return False
        capture = self.trainer.capture
        if self._loader_marks is None:
            return bool(capture.changed_transforms())
        return self._loader_marks != capture.loader_marks()

    def _collect_values(self) -> dict[str, Any]:
        """Returns this session's part of a checkpoint; collective if each rank has a tally."""
        tally = self.trainer.mode.whole_tally(self.context.tally)
        optional_values: dict[str, Any] = {}
        has_changed = self._has_loader_changed()
        if self._last_batch is not None and self.comm.rank == 0 and not has_changed:
            epoch, step, batch = self._last_batch
            last = {"epoch": epoch, "step": step}
            last["fingerprint"] = f"{self._fingerprint_last_batch():016x}"
            if samples := self.trainer.feed.hash_samples(self.loader, batch, epoch):
                last["samples"] = samples
            optional_values["last batch"] = last
        if self.saving.nondeterministic:
            optional_values["nondeterministic data"] = True
        if self._validation is not None:
            optional_values["validation"] = self._validation
        callbacks = self.context.named()
        self._callback_arrays = {}
        if callbacks:
            optional_values["logged"] = finite(self.context.logged)
            optional_values["callbacks"] = {
                name: resume.state_of_callback(name, callback, self._callback_arrays)
                for name, callback in callbacks.items()
            }
        if self.context.finished is not None:
            finisher_name = next(
                (name for name, callback in callbacks.items() if callback is self.context.finisher),
                None,
            )
            optional_values["finished"] = {"by": finisher_name, "why": self.context.finished}
        known_sums = {
            key: value for key, value in dataclasses.asdict(tally).items() if value is not None
        }
        # earlier records are in a tensor of the checkpoint (resume.EARLIER)
        history = {**vars(self.context.history), "records": self.context.history.records[-1:]}
        return {
            **optional_values,
            "cursor": dataclasses.asdict(self.context.cursor),
            "seconds": self.seconds(),
            "tally": finite(known_sums),
            "history": finite(history),
            "numerics": self.trainer.numerics.state_dict(),
            "epochs": self.context.epochs,
            "origin": self._origin,
            "recipe": trained_models.recipe(self.trainer, self.loader),
        }

    def _reset_sums(self) -> None:
        """Forgets the sums and values of an epoch that has its record."""
        self.context.tally = Tally()
        self.trainer.whole_set.reset()

    def end(self) -> None:
        """Writes the last checkpoint of a complete training run.

        If it belongs to a run of `odyssey launch`, the exit of the program writes a record that the
        run is complete.
        """
        self._check_ranks()
        if not self.saves:
            return
        self._save_checkpoint(wait=True)
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
        """Closes the store: ends its threads, and releases the directory; reports a failed save."""
        if self._store is not None:
            try:
                self._store.close()
            # reported only, because it would hide the error of a training run that failed
            except (OutputError, NumericsError) as problem:
                self.trainer.say(str(problem))
            self._store = None


def _describe_failure(problem: OdysseyError) -> str:
    """Returns the line for the user about a checkpoint that was not written."""
    return f"{problem}; training goes on, the one before stays"
