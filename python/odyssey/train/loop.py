"""The loop of fit(): epochs over batches, with evaluation, history and checkpoints.

A step, and the state of a training, are the trainer's; what happens between two steps is
session.py's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import data as datasets
from ..base import registry, slot
from ..callbacks import Callback, Context, LearningRateMonitor
from ..callbacks.base import check_events
from ..checkpoints.trainable import SENT, History, Saving, Tally
from ..comm import calls
from ..core import random_scopes
from ..core.offload import offload
from ..errors import ConfigError, NumericsError, check_integer
from .progress import Shown, make
from .session import Session

if TYPE_CHECKING:
    from .trainer_base import Trainer


class Rollback(Exception):
    """Within fit(): training goes back to its last checkpoint, on all ranks."""


@dataclasses.dataclass
class FitOptions:
    """The checked arguments of a fit(), beside its data.

    Raises ConfigError: one is not allowed.
    """

    epochs: int
    steps: int | None
    saving: Saving
    callbacks: Sequence[Callback]
    trace: Path | None
    profile: bool
    verbose: bool
    state: str

    def __post_init__(self) -> None:
        epochs: Any = self.epochs
        epochs = int(epochs) if isinstance(epochs, float) and epochs.is_integer() else epochs
        self.epochs = check_integer("[train] epochs", epochs, 1)
        if self.steps is not None:
            self.steps = check_integer("[train] steps", self.steps, 1)
        if self.state not in ("report", "strict"):
            raise ConfigError(f"[train] state is {self.state!r}; use 'report' or 'strict'")
        self.recordings = registry.provided("recordings")
        if self.records and not self.recordings:
            raise ConfigError(
                "[train] trace and profile need odyssey.view, which is not part of this "
                "installation"
            )
        self.callbacks = sorted(check_callbacks(self.callbacks), key=lambda one: one.after)

    @property
    def records(self) -> bool:
        """True if a timeline or profile is wanted."""
        return self.trace is not None or self.profile


class Loop:
    """Runs the fit()s of a trainer.

    Attributes:
        session: of the fit() that is under way; None between two.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.session: Session | None = None
        self._transforms_reported = False
        self._samples_checked = False  # of the fit() that is under way

    def run(self, train_loader: Any, val_loader: Any, options: FitOptions) -> History:
        """Trains until epochs or steps are done; see Trainer.fit."""
        started = time.perf_counter()
        trainer = self.trainer
        if self.session is not None:
            raise ConfigError(
                "[train] fit() is called while a fit() of this trainer runs; call it after that "
                "one, or create a second trainer for a copy of the model"
            )
        context = self._plan(train_loader, options)
        if not context.validate:
            val_loader = None
        compared_data = trainer.feed.compare(train_loader, val_loader, context)
        trainer.begin_fit(context, compared_data)
        context.figures = self._figures(context, val_loader is not None)
        trainer.whole_set.reset()
        self._samples_checked = False
        session = Session(trainer, train_loader, context)
        self.session = session
        # Epochs seed the generators of the process. The program continues with its own numbers.
        generator_states = random_scopes.states()
        try:
            trainer.capture.begin()
            # a checkpoint is read into files as well
            with offload(trainer.layout.offload):
                session.begin()
            context.callbacks = [*trainer.callbacks, *self.listeners(session, options.verbose)]
            context.callbacks += self._recorders(session, options)
            with self._hearing(context):
                context.emit("on_fit_start")
                trainer.capture.expect()
                if session.saves or options.state == "strict":
                    trainer.capture.announce_opaque(strict=options.state == "strict")
                session.put_back()
                trainer.checks.compare_captured()
                self._run_epochs(train_loader, val_loader, session, started)
                session.end()
            calls.note_exception(None)
        except Exception as error:
            if trainer.comm.size > 1 and not getattr(error, "raised_on_all_ranks", False):
                calls.note_exception(error)
            raise
        finally:
            self.session = None
            context.callbacks = trainer.callbacks
            session.close()
            trainer.reporter.fit_progress = None
            if not trainer.comm.in_threads:
                random_scopes.restore(generator_states)
        if trainer.mode.own_loop:
            trainer.say(trainer.mode.summary(context.history.records[-1]))
        return context.history

    def _plan(self, train_loader: Any, options: FitOptions) -> Context:
        """Returns the plan of a fit(), which callbacks of the environment may have changed."""
        trainer = self.trainer
        context = Context(
            trainer,
            History(),
            options.epochs,
            options.steps,
            saving=options.saving,
            callbacks=trainer.callbacks,
            given=options.callbacks,
            loader=train_loader,
        )
        trainer.context = context
        context.emit("on_fit_plan")
        if context.saving.off:
            context.given = [callback for callback in options.callbacks if not callback.writes]
        return context

    @contextlib.contextmanager
    def _hearing(self, context: Context) -> Iterator[None]:
        """Has callbacks hear of an exception and of the end."""
        try:
            yield
        except Exception as error:
            context.error = error
            context.emit("on_exception")
            raise
        finally:
            context.emit("on_fit_end")

    def _recorders(self, session: Session, options: FitOptions) -> list[Callback]:
        """Returns what records a timeline or a profile, if that is wanted."""
        if not options.records:
            return []
        arguments = (options.trace, session.run, options.profile)
        return [registry.load("recordings", name)(*arguments) for name in options.recordings]

    def listeners(self, session: Session, verbose: bool) -> list[Callback]:
        """Returns who hears of a fit(), in this order."""
        trainer = self.trainer
        user_callbacks = session.context.given
        quiet = trainer.comm.rank > 0 or not verbose
        progress = trainer.reporter.progress or make(quiet, sys.stderr)
        trainer.reporter.fit_progress = progress
        listeners: list[Callback] = [] if progress is None else [Shown(progress)]
        # where ranks step apart there is no step of all
        if session.run is not None and trainer.mode.together:
            from ..audit.step_recorder import Records

            listeners.append(Records(trainer, session.log, session.run.attempt))
        if session.run is not None:
            factories = (
                registry.load("listeners", name) for name in registry.provided("listeners")
            )
            listeners += [listener(session.run, session.part) for listener in factories]
        listeners += user_callbacks
        if session.saves or user_callbacks:
            from .stop_requests import Requests

            listeners.append(
                Requests(
                    trainer.comm,
                    session.run,
                    [*trainer.callbacks, *user_callbacks],
                    signals=session.saves,
                )
            )
        return listeners

    def _figures(self, context: Context, evaluates: bool) -> list[str] | None:
        """Returns what an epoch's record will have.

        None: not known, as ranks step apart, or a callback may add.
        """
        if context.own_code or not (context.validate and self.trainer.mode.together):
            return None
        parts = ("train", "test") if evaluates else ("train",)
        figures = [
            f"{part}_{name}"
            for name in ("loss", *(self.trainer.metrics or ("accuracy",)))
            for part in parts
        ]
        figures += ["lr"] * any(isinstance(c, LearningRateMonitor) for c in context.given)
        return [*figures, "samples_per_second", "seconds", *SENT]

    # --- epochs ---

    def _run_epochs(
        self, train_loader: Any, val_loader: Any, session: Session, started: float
    ) -> None:
        """Takes epoch after epoch until the session has no more to do."""
        context = session.context
        history = context.history
        if context.batch_size:
            form = getattr(getattr(train_loader, "dataset", None), "form", None)
            self.trainer.sharing.share_out(context.batch_size, context.batch_size, form)
        previous_time = history.total_time
        while not session.finished:
            try:
                self._run_epoch(train_loader, val_loader, session)
            except Rollback:
                session.roll_back()
                session.put_back()
            history.total_time = previous_time + time.perf_counter() - started

    def _run_epoch(self, train_loader: Any, val_loader: Any, session: Session) -> None:
        """Takes the steps that are left of an epoch, evaluates and makes the epoch's record."""
        trainer = self.trainer
        context = session.context
        history = context.history
        # what was done before a checkpoint
        steps_before = context.tally.steps
        sent_before = trainer.traffic()
        now = time.perf_counter()
        context.emit("on_epoch_start")
        session.put_back(in_epoch=True)
        trainer.capture.finish_restore()
        trainer.capture.note_start()
        trainer.checks.begin_epoch()
        self._check_samples(train_loader, val_loader, context)
        session.leave_out(time.perf_counter() - now)  # loggers open their files there
        batches = trainer.feed.of_epoch(train_loader, context, session.first_batch)
        trainer.feed.is_reading = True
        try:
            tally = trainer.mode.epoch(batches, session.steps_left)
        finally:
            trainer.feed.is_reading = False
        trainer.checks.end_epoch()
        self._report_changed_transforms(train_loader)
        seconds = session.seconds()
        if not (tally.samples or tally.steps):  # steps without samples were left out
            raise _no_batch(train_loader, context)
        session.end_steps(tally)
        history.seconds += seconds
        history.samples += tally.samples
        history.steps += tally.steps
        steps = max(tally.steps - steps_before, 1)
        sent = [
            (after - before) / steps
            for after, before in zip(trainer.traffic(), sent_before, strict=True)
        ]
        means = {**tally.means(), **trainer.whole_set.results(tally.counted)}
        record = _record_of(context.cursor.epoch + 1, tally, means, seconds, sent)
        context.record = record
        if val_loader is not None:
            evaluation = trainer.evaluate(val_loader)
            record.update((f"test_{name}", value) for name, value in evaluation.metrics.items())
            context.emit("on_validation_end")
        history.records.append(record)
        session.epoch_ended()

    def _check_samples(self, train_loader: Any, val_loader: Any, context: Context) -> None:
        """Checks the first samples of all data, before the first step of a fit()."""
        if self._samples_checked:
            return
        self._samples_checked = True
        feed = self.trainer.feed
        feed.check_samples(train_loader, "training", context, begins=True)
        if val_loader is not None and val_loader is not train_loader:
            feed.check_samples(val_loader, "validation", context, begins=True)

    def _report_changed_transforms(self, loader: Any) -> None:
        """Reports, once, a transform that was changed while the loader reads ahead."""
        if self._transforms_reported or not getattr(loader, "reads_ahead", False):
            return
        changed = self.trainer.capture.changed_transforms()
        if changed:
            self._transforms_reported = True
            self.trainer.say(
                f"[data] {changed[0]} changed within the epoch, and the loader reads ahead: which "
                "samples it applies to depends on time. Change it in on_epoch_start, or use "
                "prefetch=0 and num_workers=0"
            )

    def take_steps(self, batches: Iterable[datasets.Batch], limit: int | None) -> None:
        """Takes a step for each of the batches, at most `limit`."""
        trainer = self.trainer
        session = self.session
        cursor = trainer.context.cursor
        source = iter(batches)
        batches = trainer.feed.ahead(itertools.islice(source, limit))
        while True:
            slot.phase("data")
            batch = next(batches, None)
            slot.phase("compute")
            if batch is None:
                break
            if session is not None:
                session.before_step(batch)
            if session is not None and trainer.numerics.leaves_out(cursor.epoch, cursor.step):
                trainer.steps = trainer.steps + 1
                trainer.last = None
                trainer.context.tally.steps += 1
                session.stepped(batch, 0)
                continue
            trainer.train_step(batch)
            n = len(batch.indices)
            slot.step(trainer.steps, n // trainer.replicas)
            if session is not None:
                session.stepped(batch, n)
                if trainer.context.finished is not None:
                    break
        if session is not None and limit is not None and session.is_at_epoch_end:
            next(source, None)  # samplers of PyTorch draw once more after the last sample

    def handle_nonfinite(self, batch: datasets.Batch, quantity: str, rate: float) -> None:
        """Ends the training, has the step skipped (by returning), or has fit() go back to a
        checkpoint, by the trainer's policy.

        Args:
            quantity: "loss" or "gradient", which is NaN or infinite.
        """
        trainer = self.trainer
        session = self.session
        cursor = trainer.context.cursor
        epoch, index = (
            (batch.epoch, batch.index) if session is None else (cursor.epoch, cursor.step)
        )
        try:
            saved = None if session is None or not trainer.mode.together else session.saved()
            message = trainer.numerics.handle_nonfinite(
                trainer.steps + 1, epoch, index, saved, quantity, rate
            )
        except NumericsError as error:
            error.raised_on_all_ranks = trainer.mode.together  # all ranks know the same
            raise
        trainer.say(message)
        if trainer.numerics.policy == "rollback":
            raise Rollback


def _record_of(
    epoch: int, tally: Tally, means: dict[str, float], seconds: float, sent: Sequence[float]
) -> dict[str, Any]:
    """Returns an epoch's record, before its evaluation.

    means: of the epoch, and its metrics of the whole set. sent: bytes per step, as SENT names.
    """
    return {
        "epoch": epoch,
        **{f"train_{name}": value for name, value in means.items()},
        "samples_per_second": tally.samples / seconds,
        "seconds": seconds,
        **dict(zip(SENT, sent, strict=True)),
        **tally.extra,
        **{f"test_{name}": None for name in means},
    }


def _no_batch(train_loader: Any, context: Context) -> ConfigError:
    """Returns the error of an epoch without a batch."""
    if context.cursor.epoch and isinstance(train_loader, Iterator):
        return ConfigError(
            f"[train] epoch {context.cursor.epoch + 1} has no batch, as a "
            f"{type(train_loader).__name__} gives its batches only once; give a list of batches, "
            "or an object whose __iter__ begins anew"
        )
    return ConfigError("[train] the loader gave no batch; give it data, or a smaller batch size")


def check_callbacks(callbacks: Any) -> list[Callback]:
    """Returns the callbacks that fit() was given, as a list.

    Raises ConfigError: something else is among them.
    """
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        callbacks = [callbacks]
    callbacks = list(callbacks or ())
    wrong = next((one for one in callbacks if not isinstance(one, Callback)), None)
    if wrong is not None:
        label = (
            f"the class {wrong.__name__}"
            if isinstance(wrong, type)
            else f"a {type(wrong).__name__}"
        )
        raise ConfigError(
            f"[train] callbacks has {label}; give objects of subclasses of callbacks.Callback"
        )
    if len({id(one) for one in callbacks}) < len(callbacks):
        raise ConfigError("[train] callbacks has one object twice; give each once")
    for one in callbacks:
        check_events(one)
    return callbacks
