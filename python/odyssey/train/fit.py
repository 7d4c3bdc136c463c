"""fit(): epochs over batches, with evaluation, history and checkpoints, for any trainer that can
take a step.

A step, and the state of a training, are the subclass's (trainer.py); what happens between two steps
is session.py's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import data as datasets
from ..base import registry, slot
from ..base.uncopied import Uncopied
from ..callbacks import Callback, Context, LearningRateMonitor
from ..callbacks.base import check_events
from ..checkpoints.trainable import KEEP, SENT, History, Saving, Step, Trainable
from ..core.offload import offload
from ..data.nested import Form, mapped
from ..errors import ConfigError, NumericsError, check_integer
from ..loggers import asked
from . import agreement, checkpoint_parts, resume
from .progress import Shown, make, tell
from .session import Session


class Rollback(Exception):
    """Within fit(): training goes back to its last checkpoint, on all ranks."""


class Trainer(Uncopied, Trainable):
    """fit() and steps of a trainer; a subclass has the rest."""

    layout: Any = None  # engine.layout.Layout
    metrics: Any = None  # by name; None: accuracy, where targets are classes
    progress: Any
    callbacks: list[Callback]  # those that the environment asks for
    context: Context  # of the fit() that is under way, or the last one
    replicas: int  # that share out a batch
    data_source: dict[str, Any] = {}  # what checkpoints say of where the data are
    data_configuration: dict[str, Any]  # of the data of fit(), to compare with a checkpoint's
    in_parts = False
    steps = 0
    last: Step | None = None
    _session: Session | None = None  # of the fit() that is under way
    _fit_progress: Any = None  # the progress of a fit() whose trainer was given none
    _silent = False
    copy_instead = (
        "copy its model and its optimizer in one call, copy.deepcopy((model, "
        "optimizer)), and create a trainer"
    )

    def __repr__(self) -> str:
        parts = ((name, vars(self).get(name)) for name in ("model", "module", "optimizer"))
        of = "".join(f"{name}={type(part).__name__}, " for name, part in parts if part is not None)
        return (
            f"{type(self).__name__}({of}rank {self.comm.rank} of {self.comm.size}, "
            f"{self.steps} steps)"
        )

    # --- what a subclass may do, beside what Trainable asks of it ---

    def traffic(self) -> tuple[int, int, int]:
        """Bytes that this rank has sent so far to sum gradients, what it would have sent without
        compression, and what has gone to other machines, where that is counted.
        """
        return 0, 0, 0

    def _check_loader(self, loader: datasets.DataLoader, size: int, steps: int | None) -> None:
        """Raises ConfigError for data that cannot be shared out; `size`: samples of a step."""

    def _begin_fit(self, context: Context, compared_data: datasets.ArrayDataset | None) -> None:
        """All ranks have the same data; `compared_data`: the data set, if it was compared."""

    def _share_out(self, samples: int, form: Form | None = None) -> None:
        """The samples of a step are known, and by now perhaps the form of one."""

    def _ahead(self, batches: Iterator[datasets.Batch]) -> Iterator[datasets.Batch]:
        return batches

    def _part(self, training: bool) -> Callable[[int], tuple[int, int]] | None:
        """Which samples of a batch this rank needs, as DataLoader.steps() asks for it; None:
        all.
        """
        return None

    def _repeats(self, sampler: Any) -> bool:
        """Returns whether a loader's sampler gives the same order whenever an epoch is begun
        again.
        """
        return hasattr(sampler, "set_epoch")

    def _end_epoch(self) -> None:
        """The last step of an epoch was taken."""

    def epoch_begins(self) -> None:
        """Callbacks of an epoch's start have been called: what the program computes may have
        changed.
        """

    def _batches(self, loader: Any, epoch: int) -> Iterable[datasets.Batch]:
        """The batches of an epoch, from its first or from where the loader was told to start."""
        return batches_of(loader)

    def train_step(self, batch: datasets.Batch) -> tuple[float, float]:
        """One optimizer step over a global batch; returns (sum of losses, correct predictions)
        over its samples.

        Every rank is given the same batch and computes its own shards of it. With precision="fp16"
        a step whose gradients overflowed changes nothing, on no rank, and counts as a step. Raises
        NumericsError: the loss or a gradient is NaN or infinite (with "fp16": at a loss scale that
        cannot be lowered any more); nothing was changed, on no rank.
        """
        step = self.take_step(batch)
        context = self.context
        n = len(batch.indices)
        tally = context.tally
        tally.samples = tally.samples + n
        tally.steps = tally.steps + 1
        if math.isfinite(step.loss):  # a step that was skipped may have no loss
            tally.add(step.loss, step.correct, step.metrics, n)
        context.batch = batch
        context.step = step
        # that of the samples it is of
        context.loss = step.loss / (n if self.mode.together else n / self.comm.size)
        context.emit("on_step_end")
        return step.loss, step.correct

    def take_steps(self, batches: Iterable[datasets.Batch], limit: int | None) -> None:
        """A step for each of the batches, at most `limit`."""
        session = self._session
        cursor = self.context.cursor
        batches = self._ahead(itertools.islice(batches, limit))
        while True:
            slot.phase("data")
            batch = next(batches, None)
            slot.phase("compute")
            if batch is None:
                break
            if session is not None and self.numerics.leaves_out(cursor.epoch, cursor.step):
                self.steps = self.steps + 1
                self.last = None
                self.context.tally.steps += 1
                session.stepped(batch, 0)
                continue
            self.train_step(batch)
            n = len(batch.indices)
            slot.step(self.steps, n // self.replicas)
            if session is not None:
                session.stepped(batch, n)
                if self.context.finished is not None:
                    break

    def read_again(self, loader: Any, epoch: int, step: int, begun: bool) -> datasets.Batch | None:
        """The batch that step `step` of an epoch took, read once more; None where a loader would
        have to give an epoch. epoch: as the loader counts. begun: a loader that only counts
        up has this epoch before it.
        """
        k = self.accumulation_steps
        if isinstance(loader, datasets.DataLoader):
            return loader.read_again(epoch, step * k, k) if step * k < len(loader) else None
        if isinstance(loader, Sequence):
            batches: Iterable[datasets.Batch] = self._batches(
                loader[step * k : (step + 1) * k], epoch
            )
        # it gives them once
        elif begun and not hasattr(loader, "start_at") and not isinstance(loader, Iterator):
            batches = itertools.islice(self._batches(loader, epoch), step * k, (step + 1) * k)
        else:
            return None
        return next(iter(joined(batches, k)), None)

    def _not_finite(self, batch: datasets.Batch, quantity: str, lr: float) -> None:
        """Ends the training, has the step skipped (by returning), or has fit() go back to a
        checkpoint.
        """
        session = self._session
        cursor = self.context.cursor
        epoch, index = (
            (batch.epoch, batch.index) if session is None else (cursor.epoch, cursor.step)
        )
        try:
            saved = None if session is None or not self.mode.together else session.saved()
            message = self.numerics.handle_nonfinite(
                self.steps + 1, epoch, index, saved, quantity, lr
            )
        except NumericsError as error:
            error.raised_on_all_ranks = self.mode.together  # all ranks know the same
            raise
        self.say(message)
        if self.numerics.policy == "rollback":
            raise Rollback

    def say(self, line: str) -> None:
        """See Trainable; to Python's logger "odyssey" where the program has made use of that
        (progress.LOGGER).
        """
        if self.comm.rank == 0 and not self._silent:
            tell(getattr(self._fit_progress or self.progress, "say", None), line)

    def fit(  # noqa: C901, PLR0915
        self,
        train_loader: Any,
        val_loader: Any = None,
        epochs: int = 1,
        steps: int | None = None,
        *,
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int | None = None,
        checkpoint_epochs: int = 1,
        keep: int = KEEP,
        resume: str | Path = "auto",
        allow_nondeterministic_data: bool = False,
        callbacks: Sequence[Callback] = (),
        trace: str | Path | None = None,
        profile: bool = False,
        verbose: bool = True,
        max_steps: int | None = None,
        mlflow_experiment: str | None = None,
    ) -> History:
        """Trains for `epochs` epochs, or until `steps` optimizer steps have been taken.

        With checkpoints it goes on where the newest valid one is, whatever the layout that made it,
        with the bits of a training that was never stopped (docs/fault-tolerance.md). SIGTERM,
        SIGINT and SIGUSR1 then stop it after a step that all ranks agree on, with a checkpoint of
        that step.

        Args:
            train_loader: a data.DataLoader (its batch_size is the global batch), or any iterable of
                (x, y) arrays that is the same on all ranks, and the same whenever it is iterated if
                training is to be resumed.
            val_loader: a loader, batches or a data set that is evaluated after each epoch, if
                given.
            checkpoint_dir: where checkpoints go; default: none, or those of the run that this
                process belongs to.
            checkpoint_every: steps from one to the next; default: at the ends of epochs.
            checkpoint_epochs: epochs from one to the next, without checkpoint_every.
            keep: number of most recent checkpoints to keep, at least 2.
            resume: "auto": from the newest valid one, if there is one; "never": refuse a directory
                that has some; or the path of a checkpoint.
            allow_nondeterministic_data: go on, with a line about it, where samples that a data set
                makes differ between ranks, or from what they were before a checkpoint; the bits are
                then those of no other training.
            callbacks: who hears of the training as well: callbacks.Callback, loggers; the same on
                all ranks.
            trace: a file for a timeline of all ranks and threads, for Perfetto and Chrome
                (docs/timeline.md).
            profile: say in the end which ops took how long on rank 0.
            verbose: show progress, where the trainer was given no `progress`: a live line on a
                terminal, a line per epoch elsewhere.
            max_steps: other platforms' name of `steps`. mlflow_experiment: adds
                loggers.MLflowLogger(experiment).

        Returns a History, of all epochs since the training began.

        Raises:
            ConfigError: a setting is not allowed, a checkpoint is of another training, or ranks
                differ.
            DataError: ranks are given other samples, or a data set does not repeat itself.
            CheckpointError: the checkpoint that was asked for is not valid.
            OutputError: the last checkpoint could not be written.
            Stopped: the training was asked to stop; it can go on from its last checkpoint.
        """
        folder = None if checkpoint_dir is None else Path(checkpoint_dir)
        saving = Saving(
            folder, checkpoint_every, keep, resume, checkpoint_epochs, allow_nondeterministic_data
        )
        if None not in (steps, max_steps):
            raise ConfigError(
                f"[train] steps is {steps} and max_steps {max_steps}, which mean one; give one "
                "of them"
            )
        steps = max_steps if steps is None else steps
        if mlflow_experiment is not None:
            callbacks = [*_check_callbacks(callbacks), *asked(mlflow_experiment=mlflow_experiment)]
        epochs = int(epochs) if isinstance(epochs, float) and epochs.is_integer() else epochs
        epochs = check_integer("[train] epochs", epochs, 1)
        if steps is not None:
            steps = check_integer("[train] steps", steps, 1)
        recordings = registry.provided("recordings")
        if (trace is not None or profile) and not recordings:
            raise ConfigError(
                "[train] trace and profile need odyssey.view, which is not part of this "
                "installation"
            )
        started = time.perf_counter()
        user_callbacks = sorted(_check_callbacks(callbacks), key=lambda callback: callback.after)
        context_fields = {
            "callbacks": self.callbacks,
            "given": user_callbacks,
            "loader": train_loader,
        }
        context = Context(self, History(), epochs, steps, saving=saving, **context_fields)
        self.context = context
        context.emit("on_fit_plan")
        if context.saving.off:
            context.given = [callback for callback in user_callbacks if not callback.writes]
        if not context.validate:
            val_loader = None
        self._compare_data(train_loader, val_loader, context)
        context.figures = self._figures(context, val_loader is not None)
        history = context.history
        session = Session(self, train_loader, context)
        self._session = session
        try:
            # a checkpoint is read into files as well
            with offload(self.layout and self.layout.offload):
                session.begin()
            context.callbacks = [*self.callbacks, *self._listeners(session, verbose)]
            if trace is not None or profile:
                arguments = (None if trace is None else Path(trace), session.run, profile)
                context.callbacks += [
                    registry.load("recordings", name)(*arguments) for name in recordings
                ]
            try:
                context.emit("on_fit_start")
                session.put_back()
                if context.batch_size:
                    self._share_out(
                        context.batch_size,
                        getattr(getattr(train_loader, "dataset", None), "form", None),
                    )
                previous_time = history.total_time
                while not session.finished:
                    try:
                        self._epoch(train_loader, val_loader, session)
                    except Rollback:
                        session.roll_back()
                        session.put_back()
                    history.total_time = previous_time + time.perf_counter() - started
                session.end()
            except Exception as error:
                context.error = error
                context.emit("on_exception")
                raise
            finally:
                context.emit("on_fit_end")
        finally:
            self._session = None
            context.callbacks = self.callbacks
            session.close()
            self._fit_progress = None
        if self.mode.own_loop:
            self.say(self.mode.summary(history.records[-1]))
        return history

    train = fit

    def _listeners(self, session: Session, verbose: bool) -> list[Callback]:
        """Who hears of a fit(), in this order."""
        user_callbacks = self.context.given
        self._fit_progress = progress = self.progress or make(
            self.comm.rank > 0 or not verbose, sys.stderr
        )
        listeners: list[Callback] = [] if progress is None else [Shown(progress)]
        # where ranks step apart there is no step of all
        if session.run is not None and self.mode.together:
            from ..audit.step_recorder import Records

            listeners.append(Records(self, session.log, session.run.attempt))
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
                    self.comm,
                    session.run,
                    [*self.callbacks, *user_callbacks],
                    signals=session.saves,
                )
            )
        return listeners

    def _figures(self, context: Context, evaluates: bool) -> list[str] | None:
        """Returns what an epoch's record will have.

        None: not known, as ranks step apart, or a callback may add.
        """
        if context.own_code or not (context.validate and self.mode.together):
            return None
        parts = ("train", "test") if evaluates else ("train",)
        figures = [
            f"{part}_{name}"
            for name in ("loss", *(self.metrics or ("accuracy",)))
            for part in parts
        ]
        figures += ["lr"] * any(isinstance(c, LearningRateMonitor) for c in context.given)
        return [*figures, "samples_per_second", "seconds", *SENT]

    def _compare_data(self, loader: Any, val_loader: Any, context: Context) -> None:
        """Sees to it that all ranks have the same data. Raises ConfigError or DataError."""
        size = getattr(loader, "batch_size", 0)
        compared_data = None
        if isinstance(loader, datasets.DataLoader):
            check_sampler(loader)
            size *= self.accumulation_steps // context.pieces
            self._check_loader(loader, size, context.limit)
            in_arrays = isinstance(loader.dataset, datasets.ArrayDataset)
            loader_settings = {
                "kind of data set": (in_arrays, loader.in_memory),
                "number of samples": len(loader.dataset),
                "batch size": size,
                "data order": (loader.seed, loader.shuffle, len(loader)),
            }
            agreement.compare(self.comm, loader_settings)
            if in_arrays:
                agreement.data_set(self.comm, loader.dataset)
                compared_data = loader.dataset if loader.in_memory else None
            self.data_configuration = resume.data_configuration(loader, size)
        check_batches(loader, "training data")
        if val_loader is not None:
            check_batches(in_batches(val_loader), "validation data")
        validation = None if val_loader is None else type(val_loader).__name__
        length = (context.epochs, context.limit)
        names = list(context.named())
        agreement.compare(
            self.comm, {"length": length, "validation set": validation, "callbacks": names}
        )
        context.batch_size = size
        try:
            context.steps_per_epoch = -(-len(loader) // self.accumulation_steps)
        except TypeError:  # a generator, or torch's loader of an IterableDataset
            context.steps_per_epoch = 0
        self._begin_fit(context, compared_data)

    def _epoch(self, train_loader: Any, val_loader: Any, session: Session) -> None:
        """Takes what is left of an epoch, evaluates and makes its record."""
        context = self.context
        # what was done before a checkpoint
        history = context.history
        before = dataclasses.replace(context.tally)
        before_sent = self.traffic()
        now = time.perf_counter()
        context.emit("on_epoch_start")
        session.put_back(in_epoch=True)
        self.epoch_begins()
        session.leave_out(time.perf_counter() - now)  # loggers open their files there
        if own_steps(train_loader):
            part = self._part(training=True)
            batches = train_loader.steps(
                pieces=context.pieces, join=self.accumulation_steps, part=part
            )
        else:
            batches = self._batches(train_loader, context.cursor.loader_epoch)
            batches = itertools.islice(batches, session.first_batch, None)
            batches = joined(cut(batches, context.pieces), self.accumulation_steps)
        tally = self.mode.epoch(batches, session.steps_left)
        self._end_epoch()
        seconds = session.seconds()
        if not (tally.samples or tally.steps):  # steps without samples were left out
            if context.cursor.epoch and isinstance(train_loader, Iterator):
                raise ConfigError(
                    f"[train] epoch {context.cursor.epoch + 1} has no batch, as a "
                    f"{type(train_loader).__name__} gives "
                    "its batches only once; give a list of batches, or an object whose __iter__ "
                    "begins anew"
                )
            raise ConfigError(
                "[train] the loader gave no batch; give it data, or a smaller batch size"
            )
        session.end_steps(tally)
        steps = max(tally.steps - before.steps, 1)
        history.seconds += seconds
        history.samples += tally.samples
        history.steps += tally.steps
        sent = zip(SENT, self.traffic(), before_sent, strict=True)
        record: dict[str, Any] = {
            "epoch": context.cursor.epoch + 1,
            **{f"train_{name}": value for name, value in tally.means().items()},
            "samples_per_second": tally.samples / seconds,
            "seconds": seconds,
            **{name: (now - before) / steps for name, now, before in sent},
            **tally.extra,
            **{f"test_{name}": None for name in tally.means()},
        }
        context.record = record
        if val_loader is not None:
            record.update(
                (f"test_{name}", value) for name, value in self.evaluate(val_loader).metrics.items()
            )
            context.emit("on_validation_end")
        history.records.append(record)
        session.epoch_ended()

    def save_checkpoint(self, folder: str | Path) -> None:
        """Writes everything that training goes on from as the next step of a directory of
        checkpoints; all ranks call. For a custom training loop; fit() makes its own, and says
        in them where it is in its data. Raises OutputError: it could not be written; those
        that are there stay.
        """
        from ..checkpoints import Store, environment_key

        self.mode.settle()
        if self.mode.together:
            self.stays()
            self.check_alike()
        with contextlib.ExitStack() as stack:
            store = None
            with resume.on_all_ranks(self.comm):
                if self.comm.rank == 0:
                    store = stack.enter_context(Store(Path(folder), key=environment_key()))
            if not (
                self.in_parts and checkpoint_parts.save(self.comm, store, self.state({}, True))
            ):
                snapshot = self.state({})
                resume.by_first(self.comm, lambda: str(store.save(snapshot)))

    def load_checkpoint(self, path: str | Path) -> int:
        """Takes back a checkpoint, made on any layout; returns its step.

        All ranks call. path: a checkpoint, or a directory of them: then the newest that is valid.
        Raises CheckpointError: there is none. ConfigError: it is of another training.
        """
        with offload(self.layout and self.layout.offload):
            checkpoint = resume.shared(
                self.comm,
                lambda in_memory: resume.find(Path(path), self.say, in_memory),
                self.in_parts,
            )
        snapshot, name = checkpoint
        self.load(snapshot, name)
        return snapshot.step


def _check_callbacks(callbacks: Any) -> list[Callback]:
    """The callbacks that fit() was given. Raises ConfigError: something else is among them."""
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


def check_sampler(loader: Any) -> None:
    """ConfigError for a loader that gives each rank a part of the data."""
    if getattr(getattr(loader, "sampler", None), "num_replicas", 1) > 1:
        raise ConfigError(
            "[train] the loader's DistributedSampler gives each rank other samples, but the "
            "trainer shares every "
            "global batch out itself; leave the sampler out, and give shuffle=True and the "
            "batch_size of all ranks"
        )


def own_steps(loader: Any) -> bool:
    """Returns whether a loader can give each rank its samples of a step: a DataLoader with its
    own iteration.
    """
    return (
        isinstance(loader, datasets.DataLoader)
        and type(loader).__iter__ is datasets.DataLoader.__iter__
    )


def check_batches(loader: Any, label: str = "data") -> None:
    """Raises ConfigError for what gives no batches."""
    arrays = isinstance(loader, (tuple, np.ndarray))
    if arrays or not isinstance(loader, Iterable):
        name = type(loader).__name__
        argument = "data.arrays(x, y)" if arrays else f"your {name}"
        advice = (
            f"; give data.DataLoader({argument}, batch_size=...)"
            if arrays or is_data_set(loader)
            else ""
        )
        raise ConfigError(
            f"[train] expected a data.DataLoader or list of (x, y) batches as {label}, got "
            f"{name}{advice}"
        )


def is_data_set(data: Any) -> bool:
    """Returns whether `data` has samples by their numbers, and is not to be iterated over for
    batches.
    """
    by_number = hasattr(data, "gather") or (
        hasattr(data, "__getitem__") and not isinstance(data, Iterable)
    )
    return by_number and hasattr(data, "__len__")


def batches_of(loader: Any) -> Iterable[datasets.Batch]:
    """The loader's batches; pairs of arrays become batches of their own."""
    check_batches(loader)
    for item in loader:
        if isinstance(item, datasets.Batch):
            yield item
        else:
            try:
                x, y = item
            except (TypeError, ValueError):
                raise ConfigError(
                    f"[train] the loader gave a {type(item).__name__}; give batches of (x, y), "
                    "samples and labels"
                ) from None
            # a copy: a loader may fill the same memory again
            data = datasets.arrays(mapped(np.array, x), y)
            yield datasets.Batch(data, np.arange(len(data)), 0, 0)


def joined(batches: Iterable[datasets.Batch], k: int) -> Iterable[datasets.Batch]:
    """Every k batches as one; the last may be of fewer.

    A step then divides once, by all their samples.
    """
    if k == 1:
        yield from batches
        return
    batches = iter(batches)
    while group := list(itertools.islice(batches, k)):
        data = group[0].dataset
        numbers = None
        if all(b.dataset is data for b in group):
            indices = np.concatenate([b.indices for b in group])
        else:
            scaling = [{"scale": b.dataset.scale, "shift": b.dataset.shift} for b in group]
            # then bytes stay bytes
            alike = all(np.array_equal(s[k], scaling[0][k]) for s in scaling for k in s)
            parts = [
                b.dataset.rows(b.indices) if alike else b.dataset.gather(b.indices) for b in group
            ]
            x, y = mapped(lambda *arrays: np.concatenate(arrays), *parts)
            about = {"classes": max(b.dataset.classes for b in group), "name": data.name}
            data = datasets.arrays(x, y, **about, **(scaling[0] if alike else {}))
            indices = np.arange(len(data))
            if all(b.numbers is not None for b in group):
                numbers = np.concatenate([b.numbers for b in group])
        yield datasets.Batch(data, indices, group[0].epoch, group[0].index // k, numbers)


def in_batches(data: Any) -> Any:
    """Returns what is evaluated: a data set gets a DataLoader, larger batches if it is in
    memory; a loader stays.
    """
    if not is_data_set(data):
        return data
    return datasets.DataLoader(
        data, batch_size=8192 if isinstance(data, datasets.ArrayDataset) else 1024
    )


def evaluated(
    loader: Any, part: Callable[[int], tuple[int, int]] | None
) -> Iterable[datasets.Batch]:
    """A loader's batches for evaluation; `part`: of which samples this rank needs so many."""
    return loader.steps(part=part) if own_steps(loader) else batches_of(loader)


def cut(batches: Iterable[datasets.Batch], k: int) -> Iterator[datasets.Batch]:
    """Each batch in k pieces."""
    if k == 1:
        yield from batches
        return
    for b in batches:
        n = len(b.indices)
        for i in range(k):
            yield datasets.Batch(
                b.dataset, b.indices[n * i // k : n * (i + 1) // k], b.epoch, b.index * k + i
            )
