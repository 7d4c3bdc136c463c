"""DistributedTrainer: trains a model of odyssey's modules with the engine.

Where shards are computed is the engine's to decide, how sums travel parallel/'s. The parts that a
trainer is put together from are listed in trainer_base.py.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import callbacks
from .. import comm as communication
from .. import data as datasets
from ..base import registry, slot
from ..base.outputs import write_weights
from ..capture import Capture
from ..checkpoints.trainable import Evaluation, History, Step
from ..compile import gpus
from ..core import arithmetic as samples
from ..core.arena import Arena
from ..core.offload import maker, offload
from ..engine.engine import Engine
from ..engine.layout import Layout
from ..engine.metrics import chosen
from ..engine.sums import Sums
from ..errors import ConfigError
from ..nn import Module
from ..optim import Optimizer, Schedule
from ..parallel.mesh import Groups, Mesh
from ..parallel.strategy import MODES, Strategy
from ..settings import declarations as declaration
from ..settings.declarations import Training
from . import agreement, construction, rank_checks, resume, trained_models
from .arithmetic import Arithmetic
from .batches import evaluated
from .captured import kept_by_arena, roots_of
from .changing import ChangingSettings
from .feed import EngineFeed
from .learning_rate import LearningRate
from .rank_checks import EngineChecks
from .sharing import BatchSharing
from .state import EngineState
from .stepper import EngineStepper
from .trainer_base import Trainer
from .whole_set import WholeSet, split_metrics

__all__ = ["DistributedTrainer", "Evaluation", "History", "write_weights"]

# Where each rank trains by itself, its seed is this many higher than that of the rank before, so
# that dropout draws other masks on each rank.
SEED_STRIDE = 0x9E3779B97F4A7C15


class DistributedTrainer(Trainer):
    """Trains a model on all workers of all ranks, with the same bits whatever their number.

    Args:
        model: any Module.
        optimizer: SGD(lr=0.01), Adam(...), ...; bound to the model here unless it already is.
        loss: any function of (output, target) that gives a mean or sum over samples, such as
            nn.MSELoss(); default the model's own `loss`, else CrossEntropyLoss.
        metrics: a dict of names with functions of (output, target), objects of odyssey.metrics, or
            one of "accuracy", "top5", "mae", "mse", "f1", "precision", "recall", "auc", "r2",
            "correlation"; or a list of such names (docs/losses.md); default accuracy, where targets
            are classes.
        weight: a function of (output, target) that gives the weights of samples, in the form of a
            metric. The sum of losses and its gradient are divided by the sum of weights instead of
            the number of samples. For example, cross-entropy over the tokens that have a label:

                DistributedTrainer(model, optimizer, weight=lambda output, target: target >= 0)
        schedule: factor on the learning rate as a function of the step (optim.schedule).
        mesh: how many ranks replicate the model (dp), form a pipeline (pp) and share layers (tp);
            default: the model's own placement decides pp, the other ranks are replicas.
        progress: an object with begin, step, epoch and end (progress.py); called on rank 0.
        comm: the communicator, if not comm.world(backend).
        settings: by keyword; those of settings.Training.

    {settings}

    Raises ConfigError: a setting is unknown or not allowed, or the ranks' models differ.
    DeviceError: a GPU was asked for and there is none.
    """

    stepper: EngineStepper
    training_state: EngineState
    checks: EngineChecks
    feed: EngineFeed

    @callbacks.joined
    @declaration.keywords(Training)
    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        num_gpus: int | None = None,
        backend: str = "auto",
        *,
        loss: Any = None,
        metrics: Any = None,
        weight: Callable[[Any, Any], Any] | None = None,
        schedule: Schedule | None = None,
        mesh: Mesh | None = None,
        progress: Any = None,
        comm: communication.Communicator | None = None,
        **settings: Any,
    ) -> None:
        training = construction.make_settings(num_gpus, backend, settings)
        construction.check_arguments(model, optimizer, schedule, mesh)
        construction.check_weight(weight, training.reduction)
        comm = comm or construction.connect(training.backend, training.device, training.num_gpus)
        devices, self.notice = construction.choose_devices(
            training.device, training.num_gpus, comm, training.oversubscribe
        )
        training = construction.completed(training, model, devices, comm)
        super().__init__(training, comm, progress)
        self.device = training.device
        self.threads = training.threads
        self.base_batch_size = training.base_batch_size
        self.mesh = (mesh or Mesh()).fit(comm.size, construction.places(model))
        strategy = construction.make_strategy(training, self.mesh)
        self.layout = declaration.part(
            Layout,
            training,
            workers=training.num_gpus,
            gpus=devices,
            comm=comm,
            mesh=self.mesh,
            reduction=strategy,
            schedule=training.pipeline_schedule,
        )
        self.workers = training.num_gpus * self.mesh.dp
        self.replicas = self.mesh.dp
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule or (lambda step: 1.0)
        construction.check_shared(self.mesh, training.precision)
        self.lr_scaling = training.lr_scaling
        self.arena = self._bind(strategy)
        self.arithmetic = Arithmetic(
            comm,
            dict if devices else samples.sample,  # kernels of GPUs are not sampled
            samples.libraries(),
            allowed=training.other_arithmetic,
            say=self.say,
        )
        self._make_ranks_alike()
        team = self._device_group(devices)
        self.loss = construction.make_loss(loss, model)
        groups = Groups(comm, self.mesh)
        self.metrics = None if metrics is None else chosen(metrics)
        self._summed_metrics, whole_metrics = split_metrics(self.metrics or {})
        self.whole_set = WholeSet(whole_metrics, comm)
        if whole_metrics and devices:
            raise ConfigError(
                f"[train] the metric {next(iter(whole_metrics))} needs the outputs of all samples, "
                "which GPUs don't keep; use device='cpu', or compute it from trainer.predict()"
            )
        self.weight = weight
        self._assemble(*self._engines(strategy, groups, team))

    # --- construction ---

    def _bind(self, strategy: Strategy) -> Arena:
        """Returns the memory of all parameters, to which the optimizer is bound."""
        with offload(self.settings.offload):
            arena = Arena.of(self.model.named_parameters(), self.model.named_buffers())
            arena.move_to(maker())
        strategy.check_buffers([name for name, b in arena.buffers if b.requires_grad])
        self.optimizer.bind(arena)
        self.optimizer.check_whole()
        return arena

    def _make_ranks_alike(self) -> None:
        """Compares the settings of all ranks, then gives all of them rank 0's parameters."""
        if self.comm.size == 1:
            return
        self._check_schedule()  # before its factors are compared, as on one rank
        extra_settings = {
            "kind of GPUs": [gpus.found()[i].accelerator for i in self.layout.gpus],
            "mesh": str(self.mesh),
            "offload is given": self.layout.offload is not None,
            "optimizer": (type(self.optimizer).__name__, sorted(self.optimizer.settings.items())),
            "parameters without weight decay (undecayed)": self.optimizer.undecayed_names,
            "schedule": resume.probed(self.schedule),
        }
        rank_checks.compare_settings(self.comm, self.settings, extra_settings, self.arithmetic)
        agreement.parameters(self.comm, self.arena)
        self.comm.broadcast(self.arena.params)

    def _device_group(self, devices: tuple[int, ...]) -> Any:
        """Returns the GPUs of this process; None: CPU workers.

        Raises ConfigError: a setting is for the other kind.
        """
        settings = self.settings
        if not devices:
            if settings.precision == "tf32":
                raise ConfigError(
                    "[train] precision is 'tf32', which only GPUs have; use 'bf16', or --device gpu"
                )
            return None
        from ..engine.gpu.group import DeviceGroup

        if settings.conv_algorithm == "winograd":
            raise ConfigError(
                "[train] conv_algorithm is 'winograd', which CPUs have; use 'auto' or "
                "'direct', or --device cpu"
            )
        team = DeviceGroup(devices, self.arena)
        floats = max(self.layout.bucket_floats(self.arena.size), 1 << 14)
        team.keep(self.optimizer, settings.offload, floats)
        self.notice = team.describe()
        return team

    def _engines(self, strategy: Strategy, groups: Groups, team: Any) -> tuple[Engine, Engine]:
        """Returns the engines for training and for evaluation; sets the mode."""
        common: dict[str, Any] = {
            "precision": self.settings.precision,
            "conv_algorithm": construction.conv_algorithm_of(
                self.settings, (p for _, p in self.arena.named)
            ),
            "metrics": None if self.metrics is None else self._summed_metrics,
            "weight": self.weight,
            "team": team,
            "keeps": bool(self.whole_set),
        }
        parts = (self.model, self.loss, self.arena)
        layout = self.layout
        training_groups = groups
        seed = self.settings.seed
        if strategy.reduction in MODES and self.comm.size > 1:
            asynchronous = registry.load("modes", strategy.reduction)
            self.mode = asynchronous.mode(self, strategy)
            if self.whole_set:
                raise ConfigError(
                    f"[train] the metric {next(iter(self.whole_set.running))} needs the outputs of "
                    f"all ranks, which take steps apart with reduction={strategy.reduction!r}; use "
                    "reduction='tree', or a metric that is a mean over samples"
                )
            layout, training_groups = asynchronous.alone(self.layout, self.comm)
            seed = (seed + SEED_STRIDE * self.comm.rank) % 2**63
        engine = Engine(
            *parts,
            layout,
            training_groups,
            train=True,
            scaled=self.scaler.enabled,
            seed=seed,
            **common,
        )
        evaluation_engine = Engine(
            *parts,
            self.layout,
            groups,
            train=False,
            like=engine,
            seed=self.settings.seed,
            **common,
        )
        return engine, evaluation_engine

    def _assemble(self, engine: Engine, evaluation_engine: Engine) -> None:
        """Creates the parts of the trainer."""
        settings = self.settings
        self.learning_rate = LearningRate(
            self.optimizer, self.schedule, settings.lr_scaling, settings.base_batch_size
        )
        self.learning_rate.same_on_all_ranks = self.mode.together
        self.stepper = EngineStepper(
            model=self.model,
            loss=self.loss,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            scaler=self.scaler,
            arena=self.arena,
            engine=engine,
            evaluation_engine=evaluation_engine,
            mode=self.mode,
            clip_norm=settings.clip_norm,
            say=self.say,
        )
        self.sharing = BatchSharing(
            engine, self.mode, self.layout, self.stepper.rows_of_sample, self.say
        )
        self.capture = Capture(
            roots=functools.partial(roots_of, self),
            kept=functools.partial(kept_by_arena, self),
            say=self.say,
            set_by_forward=lambda: engine.programs.by_forward,
            compares_built=False,
        )
        self.feed = EngineFeed(
            self.mode,
            settings.accumulation_steps,
            engine=engine,
            evaluation_engine=evaluation_engine,
            mesh=self.mesh,
            learning_rate=self.learning_rate,
            say=self.say,
            seed=settings.seed,
            capture=self.capture,
        )
        self.capture.begin()
        self.capture.ignore_changes_by("schedule", self._check_schedule)
        changing = ChangingSettings(self.stepper)
        engine.agreed_state = changing.of_update
        self.checks = EngineChecks(
            self.stepper,
            changing,
            self.layout,
            settings.check_every,
            self.say,
            self.capture,
            self.arithmetic,
        )
        self.training_state = EngineState(
            stepper=self.stepper,
            changing=changing,
            checks=self.checks,
            capture=self.capture,
            sharing=self.sharing,
            feed=self.feed,
            arithmetic=self.arithmetic,
            layout=self.layout,
            mesh=self.mesh,
            settings=settings,
            say=self.say,
        )

    def _check_schedule(self) -> None:
        """Raises ConfigError: the schedule is no function of the step alone."""
        factors = resume.probed(self.schedule)
        if resume.probed(self.schedule) != factors:
            raise ConfigError(
                "[train] the schedule returns other factors when it is called again, so they would "
                "depend on the number of ranks; compute them from the step alone"
            )

    def begin_fit(
        self, context: callbacks.Context, compared_data: datasets.ArrayDataset | None
    ) -> None:
        super().begin_fit(context, compared_data)
        self.shard_size = self.layout.shard_size  # None: each fit() goes by its own batch size

    # --- a step ---

    def take_step(self, batch: datasets.Batch) -> Step:
        """Takes one step of all ranks over a global batch, or none of them does."""
        if self.mode.own_loop:
            raise ConfigError("[async] ranks do not take steps together; call fit()")
        self._share_out(batch)
        self.checks.before_step(batch)
        part = self.mode.part(batch)
        if part is None:  # the others take this step; this rank's state counts it too
            return self._absent_step()
        if not self.stepper.is_recorded:
            self.stepper.check_loss(part)
        sums = self.stepper.run(part)
        values = self._exchange(part, self._epoch_set, self.stepper.engine)
        self._begin_with(sums, len(batch.indices))
        rate = self.learning_rate.of_step(self.steps)
        applied = self.stepper.commit(sums, rate)
        if not self.stepper.alike:
            self.checks.raise_divergence(self.stepper.engine, part)
        self._judge(sums, applied, part, rate)
        return self._count_step(sums, values, applied, rate)

    def _exchange(
        self, batch: datasets.Batch, whole_set: WholeSet, engine: Engine
    ) -> dict[str, Any]:
        """Returns what metrics of the whole set add of the batch that was just run; collective."""
        if not whole_set:
            return {}
        whole_set.begin()
        with resume.on_all_ranks(self.comm):
            rank_part = engine.local_samples(batch)
            if rank_part is not None:
                whole_set.collect(*rank_part)
        return whole_set.exchange()

    def _share_out(self, batch: datasets.Batch) -> None:
        """Decides what goes by the size of a batch: rate, shards, and which ranks have them."""
        samples = len(batch.indices)
        self.feed.scale_rate(samples)
        self.sharing.share_out(samples, self.context.batch_size, batch.dataset.form)
        self.sharing.move_shards(samples, self.steps + 1)

    def _absent_step(self) -> Step:
        """Counts a step for which this rank has no samples."""
        self.stepper.count_absent_step()
        self.mode.stepped()
        return Step(0.0, 0.0, self.learning_rate.of_step(self.steps - 1), True, None, {})

    def _begin_with(self, sums: Sums, samples: int) -> None:
        """At the first step: takes up what is known only once the model has been recorded."""
        if not self.stepper.is_recorded:
            self._tell_plans(self.stepper.begin())
        self.sharing.check_route(self.stepper.engine.runners[-1].reductions, samples)

    def _tell_plans(self, lines: list[str]) -> None:
        plans = self.stepper.engine.ownership.plans
        for line in [*lines, *(plans if self.reporter.progress is not None else ())]:
            self.say(line)

    def _judge(self, sums: Sums, applied: bool, batch: datasets.Batch, rate: float) -> None:
        """Adapts the loss scale, and handles a step whose loss or gradient is not finite."""
        if self.scaler.enabled:
            self._adapt_scale(applied, batch, rate)
        elif not applied:
            loss = self.stepper.engine.summed_loss(sums)
            quantity = "gradient" if math.isfinite(loss) else "loss"
            self.loop.handle_nonfinite(batch, quantity, rate)
        if applied:
            self.stepper.engine.updated()
            self.numerics.fine()

    def _count_step(self, sums: Sums, values: dict[str, Any], applied: bool, rate: float) -> Step:
        """Counts a step that all ranks have taken or skipped, and returns it."""
        self.stepper.steps += 1
        metrics = self.stepper.measured(sums)
        loss = self.stepper.engine.summed_loss(sums)
        self.last = Step(loss, sums.correct, rate, applied, sums.updates, metrics, values)
        self.mode.stepped()
        team = self.stepper.engine.team
        while team is not None and team.notes:
            self.say(team.notes.pop())
        return self.last

    # --- evaluation ---

    def evaluate(self, loader: Any) -> Evaluation:
        """Mean loss and metrics over a data set or loader, dropout off."""
        self.mode.settle()
        previous_phase = slot.phase("evaluate")
        engine = self.stepper.evaluation_engine
        engine.programs.refresh()
        self.feed.check_samples(loader, "validation", self.context)
        loader = self.feed.loader_of(loader)
        data = loader.dataset if isinstance(loader, datasets.DataLoader) else loader
        compared_data = data if isinstance(data, datasets.ArrayDataset) else None
        whole_set = self.whole_set.fresh()
        if compared_data is not None:
            agreement.data_set(self.comm, compared_data, "validation")

        def sums(
            batch: datasets.Batch, number: int
        ) -> tuple[float, float, dict[str, float], float]:
            self.checks.compare_programs(batch, engine)
            batch_sums = engine.run(batch, 0)
            if not engine.alike:
                self.checks.raise_divergence(engine, batch)
            metrics = engine.measured(batch_sums)
            whole_set.update(self._exchange(batch, whole_set, engine), len(batch.indices))
            loss = engine.summed_loss(batch_sums)
            return loss, batch_sums.correct, metrics, batch_sums.samples

        with self.feed.without_trace(loader, self.context):
            batches = iter(evaluated(loader, self.feed.part(training=False)))
            evaluation = self._evaluation(engine.ahead(batches), sums, whole_set, compared_data)
        slot.phase(previous_phase)
        return evaluation

    def predict(self, loader: Any) -> Any:
        """Returns what the model gives for all samples of a data set or loader, in order,
        dropout off: (N, ...) float32, or a tuple or dict of such, whole on every rank. All
        ranks call it.
        """
        self.mode.settle()
        self.feed.check_samples(loader, "prediction", self.context)
        loader = self.feed.loader_of(loader)
        with (
            self.arena.lent(self.stepper.engine.ownership.parameters()),
            self.feed.without_trace(loader, self.context),
        ):
            batches = evaluated(loader, None)
            return trained_models.predicted(
                self.model, batches, self.comm, self.shard_size, self.conv_algorithm
            )

    # --- the learning rate ---

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0.

        Raises NumericsError if the schedule makes it no rate.
        """
        return self.learning_rate.of_step(step)

    @property
    def base_rate(self) -> float:
        """The learning rate, without what the schedule makes of it."""
        return self.learning_rate.base

    def scale_rate(self, factor: float) -> None:
        """Multiplies the learning rate of all steps from here on; checkpoints keep it."""
        self.learning_rate.multiply(factor)

    # --- state that only odyssey's own modules have ---

    def optimizer_state(self) -> dict[str, Any]:
        """Deprecated; use save_checkpoint(). Step count, rate and state arrays in the arena's
        layout, whole, on every rank; collective likewise.
        """
        _warn("optimizer_state()", "trainer.save_checkpoint(folder)")
        return self.training_state.optimizer_state()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Deprecated; use load_checkpoint(). Takes back what optimizer_state() gave, on this
        layout or another; all ranks call it.

        Raises ConfigError: the state is of another optimizer or model; nothing was changed.
        """
        _warn("load_optimizer_state()", "trainer.load_checkpoint(path)")
        self.training_state.load_optimizer_state(state)

    def writing(self) -> Any:
        """Gives weights (p.data) and the optimizer's state (optimizer.state), whole on every
        rank, to be written alike.

        A collective call: all ranks enter and leave it. On layouts where ranks have parts of them
        (ZeRO, pipelines, tensor parallelism) they can be written nowhere else. Raises
        NumericsError: ranks have written other values; nothing was changed. An exception inside
        changes nothing either.
        """
        return self.training_state.writing()

    def save_weights(self, path: str | Path) -> None:
        """Deprecated; use odyssey.export(). Writes the parameters as safetensors, whole or not at
        all. Rank 0 writes; all ranks call.
        """
        _warn("save_weights()", 'odyssey.export(trainer, "weights.safetensors")')
        self.training_state.save_weights(path)

    @property
    def conv_algorithm(self) -> str:
        """How convolutions are computed: "direct", or "winograd" where it is faster."""
        return self.stepper.engine.programs.conv_algorithm

    @property
    def plan(self) -> str:
        """How odyssey has cut the model over ranks, which shards run together, and how many
        convolutions Winograd's algorithm computes.

        It is known after the first step.
        """
        return self.training_state.plan

    @property
    def bytes_per_step(self) -> float:
        """Bytes that this rank sends per step: gradients, ZeRO's parameters, pp's and tp's."""
        return self.traffic()[0] / max(self.steps, 1)

    @property
    def bytes_per_step_uncompressed(self) -> float:
        """The same along the tree, uncompressed."""
        return self.traffic()[1] / max(self.steps, 1)

    @property
    def wire_bytes_per_step(self) -> float:
        """Bytes of them to other machines, of gradients along the tree."""
        return self.traffic()[2] / max(self.steps, 1)

    # --- for estimates ---

    def rehearse(self, batch: datasets.Batch, *, prepare: bool = False) -> tuple[int, int]:
        """Takes a step of this rank alone; see EngineStepper.rehearse."""
        samples = len(batch.indices)
        self.sharing.share_out(samples, self.context.batch_size, batch.dataset.form)
        counts = self.stepper.rehearse(batch, prepare=prepare)
        if prepare and not self.stepper.is_recorded:
            self._tell_plans(self.stepper.begin())
        return counts


DistributedTrainer.__doc__ = (DistributedTrainer.__doc__ or "").format(
    settings=declaration.documentation(Training)
)


def _warn(old_name: str, instead: str) -> None:
    """Warns the caller of a name that the next release no longer has."""
    warnings.warn(
        f"trainer.{old_name} is deprecated; use {instead}", DeprecationWarning, stacklevel=3
    )
