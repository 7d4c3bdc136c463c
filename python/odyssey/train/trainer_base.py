"""What a user has of any trainer: the trainer of odyssey's own modules and that of torch's.

A trainer is put together from parts, each in a file of its own:

    loop            fit(), epochs and steps                             loop.py
    feed            batches out of a loader                             feed.py
    sharing         shards of a batch                                   sharing.py
    stepper         sums of a batch, update                             stepper.py, torch/stepper.py
    checks          comparisons between ranks                           rank_checks.py, torch/checks.py
    arithmetic      the results of ranks from the same numbers          arithmetic.py
    training_state  what checkpoints hold, and what a user looks at     state.py, torch/state.py
    capture         state beyond weights: the user's own objects        captured.py, capture/
    reporter        lines to the user                                   reporter.py
"""  # noqa: E501 - a table

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import data as datasets
from ..base.paths import expand_path
from ..base.uncopied import uncopied
from ..callbacks import Callback, Context
from ..capture import Capture, edges_of_host, register_edges, register_walkable
from ..checkpoints import Snapshot
from ..checkpoints.trainable import KEEP, Evaluation, History, Mode, Saving, Step, Tally
from ..comm import Communicator
from ..core import precision as precisions
from ..core.offload import offload
from ..errors import ConfigError, NumericsError, counted
from ..settings.declarations import Training, check, explain_keywords
from . import agreement, checkpoint_parts, resume
from .arithmetic import Arithmetic
from .feed import BatchFeed
from .former_trainers import collect_before
from .loop import FitOptions, Loop, check_callbacks
from .numerics import NonFinite
from .rank_checks import RankChecks
from .reporter import Reporter
from .resume import expand_place
from .sharing import BatchSharing
from .whole_set import WholeSet


@uncopied(
    "copy its model and its optimizer in one call, copy.deepcopy((model, "
    "optimizer)), and create a trainer"
)
class Trainer:
    """A trainer whose workers share out the shards of a batch; a Trainable.

    A subclass creates the parts and has `take_step`, `evaluate` and `predict`.
    """

    loop: Loop
    feed: BatchFeed
    sharing: BatchSharing
    stepper: Any  # stepper.EngineStepper or torch.stepper.ModuleStepper
    checks: RankChecks
    training_state: Any  # state.EngineState or torch.state.ModuleState
    capture: Capture
    arithmetic: Arithmetic
    layout: Any  # engine.layout.Layout
    metrics: Any  # by name; None: accuracy, where targets are classes
    whole_set: WholeSet  # the metrics of the whole set, of the epoch that is under way
    callbacks: list[Callback]  # those that the environment asks for
    context: Context  # of the fit() that is under way, or the last one
    workers: int  # that share out a batch
    replicas: int  # likewise, of the whole model
    data_source: dict[str, Any] = {}  # what checkpoints say of where the data are
    _not_state: tuple[str, ...] = ("state_dict()",)  # its parts are roots of the capture
    # attributes that parts of the trainer were built with: another value would have no effect
    fixed = frozenset(
        """
        accumulation_steps arena check_every comm deterministic device gather layout loss
        lr_scaling base_batch_size mesh metrics mode model module optimizer precision replicas
        scaler schedule scheduler seed settings shards strategy threads workers zero
        """.split()
    )

    def __init__(self, settings: Training, comm: Communicator, progress: Any) -> None:
        """Sets what is alike in every trainer, from its settings."""
        collect_before(self)
        self.settings = settings
        self.comm = comm
        self.mode = Mode(self)
        self.seed = settings.seed
        self.precision = settings.precision
        self.scaler = precisions.GradScaler(
            settings.scaler_init_scale,
            growth_interval=settings.scaler_growth_interval,
            enabled=settings.precision == "fp16",
        )
        self.accumulation_steps = settings.accumulation_steps
        self.check_every = settings.check_every
        self.numerics = NonFinite(settings.nonfinite)
        self.reporter = Reporter(comm, progress)
        self.saved_in: set[str] = set()  # directories of checkpoints of this trainer's fit()s
        self.context = Context(self, callbacks=self.callbacks)
        self.capture = Capture(dict, set, self.reporter.say)
        self.whole_set = WholeSet({}, comm)
        self.loop = Loop(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. Raises ConfigError, once the trainer is built, where that would have
        no effect.
        """
        if name in self.fixed and "training_state" in vars(self):
            raise ConfigError(
                f"[train] the trainer's {name} is fixed when it is created; create another trainer "
                f"with {name}=, from the same model"
            )
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        parts = ((name, vars(self).get(name)) for name in ("model", "module", "optimizer"))
        of = "".join(f"{name}={type(part).__name__}, " for name, part in parts if part is not None)
        return (
            f"{type(self).__name__}({of}rank {self.comm.rank} of {self.comm.size}, "
            f"{counted(self.steps, 'step')})"
        )

    # --- settings that may change in the middle of a training ---

    @property
    def steps(self) -> int:
        """Optimizer steps so far, over all fit()s."""
        return self.stepper.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.stepper.steps = steps

    @property
    def last(self) -> Step | None:
        """The last step; None before the first, and after one that was left out."""
        return self.stepper.last

    @last.setter
    def last(self, step: Step | None) -> None:
        self.stepper.last = step

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of the mean gradient; may be set in the middle of a training.

        None: no limit.
        """
        return self.stepper.clip_norm

    @clip_norm.setter
    def clip_norm(self, norm: float | None) -> None:
        """Raises ConfigError: it is no number above 0."""
        if isinstance(norm, (np.number, np.ndarray)) and norm.ndim == 0:
            norm = norm.item()
        self.stepper.clip_norm = check(Training, {"clip_norm": norm})["clip_norm"]

    @property
    def grad_norm(self) -> float | None:
        """The norm of the last step's mean gradient before clipping, if clip_norm is given."""
        return self.stepper.grad_norm

    @property
    def shard_size(self) -> int | None:
        """Samples per shard of a training step; None as long as neither it nor the global batch
        is known.
        """
        return self.sharing.shard_size

    @shard_size.setter
    def shard_size(self, size: int | None) -> None:
        self.sharing.shard_size = size

    # --- training ---

    @explain_keywords
    def fit(
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
        state: str = "report",
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
            state: what to do about objects that checkpoints can't keep, such as generators of
                Python: "report" prints their names once, "strict" raises ConfigError before the
                first step (docs/state.md).
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
        folder = None if checkpoint_dir is None else expand_path(checkpoint_dir)
        if isinstance(resume, (str, os.PathLike)):  # the session reports anything else
            resume = expand_place(resume)
        saving = Saving(
            folder, checkpoint_every, keep, resume, checkpoint_epochs, allow_nondeterministic_data
        )
        if None not in (steps, max_steps):
            raise ConfigError(
                f"[train] steps is {steps} and max_steps {max_steps}, which mean one; give one "
                "of them"
            )
        if mlflow_experiment is not None:
            from ..callbacks.loggers import asked

            callbacks = [*check_callbacks(callbacks), *asked(mlflow_experiment=mlflow_experiment)]
        options = FitOptions(
            epochs=epochs,
            steps=max_steps if steps is None else steps,
            saving=saving,
            callbacks=callbacks,
            trace=None if trace is None else expand_path(trace),
            profile=profile,
            verbose=verbose,
            state=state,
        )
        return self.loop.run(train_loader, val_loader, options)

    train = fit

    def begin_fit(self, context: Context, compared_data: datasets.ArrayDataset | None) -> None:
        """Begins a fit(), for which all ranks have the same data.

        Args:
            compared_data: the data set, if all its bytes were compared.
        """
        self.checks.begin_fit(context, compared_data)

    def train_step(self, batch: Any) -> tuple[float, float]:
        """One optimizer step over a global batch; returns (sum of losses, correct predictions)
        over its samples.

        batch: of a DataLoader, or a pair (inputs, targets) of arrays or tensors. With
        `odyssey.torch` also a dict of tensors.

        Every rank is given the same batch and computes its own shards of it. With precision="fp16"
        a step whose gradients overflowed changes nothing, on no rank, and counts as a step. Raises
        NumericsError: the loss or a gradient is NaN or infinite (with "fp16": at a loss scale that
        cannot be lowered any more); nothing was changed, on no rank.
        """
        batch = self.feed.as_batch(batch)
        step = self.take_step(batch)
        context = self.context
        n = len(batch.indices)
        tally = context.tally
        tally.samples = tally.samples + n
        tally.steps = tally.steps + 1
        if math.isfinite(step.loss):  # a step that was skipped may have no loss
            tally.add(step.loss, step.correct, step.metrics, n)
            self.whole_set.update(step.values, n)
        context.batch = batch
        context.step = step
        # that of the samples it is of
        context.loss = step.loss / (n if self.mode.together else n / self.comm.size)
        context.emit("on_step_end")
        return step.loss, step.correct

    def take_step(self, batch: datasets.Batch) -> Step:
        """Takes one optimizer step over a global batch. Each kind of trainer has its own."""
        raise NotImplementedError

    def _adapt_scale(self, applied: bool, batch: datasets.Batch, rate: float) -> None:
        """Sets the loss scale for the next step.

        Raises NumericsError: no smaller scale is left, and steps that are not finite end training.
        """
        try:
            self.stepper.update_scale(applied)
        except NumericsError as error:
            # no smaller scale is left: it is not the scale that overflows
            if self.numerics.policy == "stop":
                error.raised_on_all_ranks = True
                raise
            self.loop.handle_nonfinite(batch, "gradient", rate)

    def take_steps(self, batches: Iterable[datasets.Batch], limit: int | None) -> None:
        """Takes a step for each of the batches, at most `limit`."""
        self.loop.take_steps(batches, limit)

    @property
    def _epoch_set(self) -> WholeSet:
        """The metrics of the whole set that steps add to. Outside of fit() there are none, because
        only its epochs have an end.
        """
        in_fit = self.loop.session is not None
        if in_fit or not self.whole_set:
            return self.whole_set
        return type(self.whole_set)({}, self.comm)

    @property
    def base_rate(self) -> float:
        """The learning rate, without what a schedule makes of it."""
        raise NotImplementedError

    def scale_rate(self, factor: float) -> None:
        """Multiplies the learning rate of all steps from here on."""
        raise NotImplementedError

    def evaluate(self, loader: Any) -> Evaluation:
        """Returns means over a data set or loader. Each kind of trainer has its own."""
        raise NotImplementedError

    def predict(self, loader: Any) -> Any:
        """Returns the outputs for all samples. Each kind of trainer has its own."""
        raise NotImplementedError

    def say(self, line: str) -> None:
        """Tells the user one line, from rank 0; see Reporter."""
        self.reporter.say(line)

    def _evaluation(
        self,
        batches: Iterable[datasets.Batch],
        sums: Callable[[datasets.Batch, int], tuple[float, float, dict[str, float], float]],
        whole_set: WholeSet,
        compared_data: datasets.ArrayDataset | None = None,
    ) -> Evaluation:
        """Returns means over some batches, and metrics of all of them.

        Args:
            sums: gives (loss, correct, metrics, samples) of a batch and its number.
            whole_set: the metrics that `sums` adds the batch to.
            compared_data: the data of the batches, if all bytes were compared.
        """
        total = Tally()
        watch = agreement.Watch(self.comm, self.check_every, "validation batch")
        watch.begin(compared_data, None if compared_data is not None else self.checks.watch.tell)
        for number, batch in enumerate(batches):
            watch.batch(batch, number)
            total.add(*sums(batch, number))
        watch.end()
        if not total.counted:
            raise ConfigError("[evaluate] the data set is empty; give at least one sample")
        means = {**total.means(), **whole_set.results(total.counted)}
        return Evaluation(means["loss"], means.get("accuracy"), int(total.counted), means)

    # --- checkpoints ---

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
                    store = stack.enter_context(Store(expand_path(folder), key=environment_key()))
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
        with offload(self.layout.offload):
            checkpoint = resume.shared(
                self.comm,
                lambda in_memory: resume.find(expand_path(path), self.say, in_memory),
                self.in_parts,
            )
        snapshot, name = checkpoint
        self.load(snapshot, name)
        self.restore_captured(snapshot, name)
        self.capture.finish_restore()
        return snapshot.step

    def restore_captured(self, snapshot: Snapshot, name: str) -> None:
        """Restores what the walk has captured, when all objects that callbacks create are there.

        Raises CheckpointError, ConfigError: see `Capture.restore`.
        """
        if "training_state" in vars(self):
            self.training_state.restore_captured(snapshot, name, final=True)

    def put_back(self, snapshot: Snapshot, name: str) -> None:
        """Takes the same snapshot back once more, in silence."""
        self.reporter.silent = True
        try:
            self.load(snapshot, name)
        finally:
            self.reporter.silent = False

    # --- what the parts know: Trainable says what each method does ---

    def state(self, values: dict[str, Any], parts: bool = False) -> Snapshot | None:
        return self.training_state.state(values, parts)

    def load(self, snapshot: Snapshot, name: str) -> None:
        self.training_state.load(snapshot, name)

    def load_weights(self, snapshot: Snapshot, name: str) -> None:
        self.training_state.load_weights(snapshot, name)

    def configuration(self) -> dict[str, Any]:
        return self.training_state.configuration()

    @property
    def in_parts(self) -> bool:
        """True if ranks have parts of weights or of the optimizer's state that no other rank
        has.
        """
        return self.training_state.in_parts

    @property
    def partial(self) -> bool:
        """True if fingerprints() are of this rank's part, to be added up over all ranks."""
        return self.training_state.partial

    @property
    def state_bytes(self) -> int:
        """About how large a checkpoint is, in bytes."""
        return self.training_state.state_bytes

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns copies of the weights by name, whole on every rank. All ranks call it."""
        return self.training_state.state_dict()

    def named_state(self) -> Mapping[str, np.ndarray]:
        """Returns weights ("weight NAME") and the optimizer's arrays ("optimizer STATE of NAME"),
        whole, on every rank. All ranks call it.
        """
        return self.training_state.named_state()

    def last_gradients(self) -> dict[str, np.ndarray]:
        """Returns the gradients of the last step by the parameters' names.

        Of odyssey's modules they are sums before division, scaling and clipping, and ConfigError
        is raised where ranks have parts of them. Of torch's modules they are means, as the
        optimizer saw them; all ranks call it with zero 2 and 3.
        """
        return self.training_state.last_gradients()

    def weights_sha256(self) -> str:
        """Returns the SHA-256 of all weights: one value for one training, on any layout. All
        ranks call it.
        """
        return self.training_state.weights_sha256()

    def memory(self) -> dict[str, int]:
        """Returns the bytes that training takes on this rank: "parameters", "gradients" (and
        their reduction), "optimizer", and "activations" of odyssey's own modules.
        """
        return self.training_state.memory()

    def fingerprints(self) -> tuple[int, int]:
        return self.training_state.fingerprints()

    def gradient_norm(self) -> float | None:
        return self.stepper.gradient_norm()

    def traffic(self) -> tuple[int, int, int]:
        return self.stepper.traffic()

    def shards_moved(self, samples: int) -> tuple[int, ...]:
        return self.sharing.moved(samples)

    def check_alike(self) -> None:
        self.checks.check_alike()

    def check_replicas(self) -> None:
        """Compares the weights that several ranks have; all ranks call it.

        Raises NumericsError: on all ranks: they differ, as after a flipped bit in one rank's
        memory.
        """
        self.checks.check_replicas()

    def stays(self) -> None:
        self.checks.check_program()

    def expect(self, snapshot: Any, name: str, exactly: bool) -> None:
        self.checks.expect(snapshot, name, exactly=exactly)

    def read_again(self, loader: Any, epoch: int, step: int, begun: bool) -> datasets.Batch | None:
        return self.feed.read_again(loader, epoch, step, begun)


register_walkable(Trainer)
register_edges(Trainer, edges_of_host)
