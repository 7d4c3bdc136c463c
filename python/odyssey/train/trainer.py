"""DistributedTrainer: a step that all ranks take or none, and evaluation, with the engine.

Where shards are computed is engine.py's to decide, how sums travel parallel/'s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import callbacks
from .. import comm as communication
from .. import data as datasets
from ..base import launcher, registry, slot
from ..base.outputs import write_weights
from ..build import gpus
from ..checkpoints.trainable import Evaluation, History, Step
from ..comm.cores import default_threads
from ..core import native, setting_versions
from ..core import precision as precisions
from ..core.arena import Arena
from ..core.offload import maker, offload
from ..core.tensor import layout_of
from ..data.nested import Form
from ..engine.engine import Engine
from ..engine.layout import Layout
from ..engine.metrics import chosen
from ..engine.sums import Sums
from ..errors import ConfigError, DeviceError, NumericsError, OdysseyError, check_kind
from ..nn import CrossEntropyLoss, Module, PipelineParallel
from ..optim import Optimizer, Schedule, lr_factor
from ..parallel.mesh import PARTS, Groups, Mesh
from ..parallel.strategy import MODES, Strategy
from ..settings import declarations as declaration
from ..settings.declarations import Training
from . import agreement, resume, trained_models
from .agreement import hash_of
from .fit import evaluated, in_batches
from .state import EngineState

__all__ = ["DistributedTrainer", "Evaluation", "History", "write_weights"]


class DistributedTrainer(EngineState):
    """Trains a model on all workers of all ranks, with the same bits whatever their number.

    Args:
        model: any Module.
        optimizer: SGD(lr=0.01), Adam(...), ...; bound to the model here unless it already is.
        loss: any function of (output, target) that gives a mean or sum over samples, such as
            nn.MSELoss(); default the model's own `loss`, else CrossEntropyLoss.
        metrics: a dict of names with functions of (output, target), or one of "accuracy", "top5",
            "mae", "mse"; or a list of such names (engine/metrics.py); default accuracy, where
            targets are classes.
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

    @callbacks.joined
    @declaration.keywords(Training)
    def __init__(  # noqa: PLR0915
        self,
        model: Module,
        optimizer: Optimizer,
        num_gpus: int | None = None,
        backend: str = "auto",
        *,
        loss: Any = None,
        metrics: Any = None,
        schedule: Schedule | None = None,
        mesh: Mesh | None = None,
        progress: Any = None,
        comm: communication.Communicator | None = None,
        **settings: Any,
    ) -> None:
        if settings.get("precision") != "fp16":  # the same call may serve every precision
            settings = {
                k: v
                for k, v in settings.items()
                if k not in ("scaler_init_scale", "scaler_growth_interval")
            }
        training = declaration.make_settings(
            Training, {"num_gpus": num_gpus, "backend": backend, **settings}
        )
        for label, value, kind in (("model", model, Module), ("optimizer", optimizer, Optimizer)):
            check_kind("train", label, value, kind, "a subclass of ")
        if schedule is not None and not callable(schedule):
            raise ConfigError(
                f"[train] schedule is {schedule!r}; give a function, such as "
                "optim.cosine(total_steps)"
            )
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ConfigError(f"[train] mesh is {mesh!r}; give Mesh(dp=, pp=, tp=)")
        comm = comm or connect(training.backend, training.device, training.num_gpus)
        devices, self.notice = choose_devices(
            training.device, training.num_gpus, comm, training.oversubscribe
        )
        training = dataclasses.replace(
            training,
            num_gpus=training.num_gpus or 1,
            device="gpu" if devices else "cpu",
            threads=training.threads or default_threads(comm.local_size),
            shard_size=shard_size_of(model, training.shard_size),
            pipeline_schedule=training.pipeline_schedule
            or getattr(model, "schedule", None)
            or "1f1b",
        )
        declaration.check(Training, {"pipeline_schedule": training.pipeline_schedule})
        self._set(training, comm, progress)
        self.device = training.device
        self.threads = training.threads
        self.base_batch_size = training.base_batch_size
        self.mesh = (mesh or Mesh()).fit(self.comm.size, places(model))
        strategy = declaration.part(Strategy, training)
        strategy.check(self.mesh, training.zero, training.precision)
        if strategy.reduction in MODES and training.nonfinite != "stop":
            raise ConfigError(
                f"[train] nonfinite is {training.nonfinite!r}, but with "
                f"reduction={training.reduction!r} "
                "a rank's step is its "
                "own; use 'stop'"
            )
        ranks = {
            "comm": self.comm,
            "mesh": self.mesh,
            "reduction": strategy,
            "schedule": training.pipeline_schedule,
        }
        self.layout = declaration.part(
            Layout, training, workers=training.num_gpus, gpus=devices, **ranks
        )
        self._sums: Sums | None = None  # of the last step
        # that share out a batch
        self.workers = training.num_gpus * self.mesh.dp
        self.replicas = self.mesh.dp
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule or (lambda step: 1.0)
        check_shared(self.mesh, training.precision)
        scaling = {
            "growth_interval": training.scaler_growth_interval,
            "enabled": training.precision == "fp16",
        }
        self.scaler = precisions.GradScaler(training.scaler_init_scale, **scaling)
        self.lr_scaling = training.lr_scaling
        self._lr_factor = 1.0
        self._lr_scaled = False
        with offload(training.offload):
            self.arena = Arena.of(model.named_parameters(), model.named_buffers())
            self.arena.move_to(maker())
        strategy.check_buffers([name for name, b in self.arena.buffers if b.requires_grad])
        optimizer.bind(self.arena)
        optimizer.check_whole()
        self._same_everywhere()
        team = None
        if devices:
            from ..engine.gpu.group import DeviceGroup

            if training.conv_algorithm == "winograd":
                raise ConfigError(
                    "[train] conv_algorithm is 'winograd', which CPUs have; use 'auto' or "
                    "'direct', or --device cpu"
                )
            team = DeviceGroup(devices, self.arena)
            team.keep(
                optimizer,
                training.offload,
                max(self.layout.bucket_floats(self.arena.size), 1 << 14),
            )
            self.notice = team.describe()
        elif training.precision == "tf32":
            raise ConfigError(
                "[train] precision is 'tf32', which only GPUs have; use 'bf16', or --device gpu"
            )
        loss = self.loss = loss or getattr(model, "loss", None) or CrossEntropyLoss()
        if not callable(loss) or isinstance(loss, type):
            name = f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss)
            raise ConfigError(
                f"[train] loss is {name}; give a function of (output, target), such as nn.MSELoss()"
            )
        if (loss_reduction := getattr(loss, "reduction", "mean")) != "mean":
            raise ConfigError(
                f"[train] the loss has reduction={loss_reduction!r}, but trainers divide by the "
                "global "
                "batch; use 'mean'"
            )
        groups = Groups(self.comm, self.mesh)
        self.metrics = None if metrics is None else chosen(metrics)
        common: dict[str, Any] = {
            key: getattr(training, key) for key in ("seed", "precision", "conv_algorithm")
        }
        common.update(metrics=self.metrics, team=team)
        layout = self.layout
        its_groups = groups
        train_options = {}
        if strategy.reduction in MODES and self.comm.size > 1:
            asynchronous = registry.load("modes", strategy.reduction)
            self.mode = asynchronous.mode(self, strategy)
            layout, its_groups = asynchronous.alone(self.layout, self.comm)
            # other masks for other samples
            train_options = {"seed": (training.seed + 0x9E3779B97F4A7C15 * self.comm.rank) % 2**63}
        of = (model, loss, self.arena)
        self._train = Engine(
            *of,
            layout,
            its_groups,
            train=True,
            scaled=self.scaler.enabled,
            **{**common, **train_options},
        )
        self._eval = Engine(*of, self.layout, groups, train=False, like=self._train, **common)
        self._train.agreed_state = self.standing
        self._warned = False
        self._prints = {}
        self.remember()

    def _same_everywhere(self) -> None:
        """Compares the settings of all ranks, then gives all of them rank 0's parameters."""
        if self.comm.size == 1:
            return
        extra_settings = {
            "kind of GPUs": [gpus.found()[i].accelerator for i in self.layout.gpus],
            "mesh": str(self.mesh),
            "offload is given": self.layout.offload is not None,
            "optimizer": (type(self.optimizer).__name__, sorted(self.optimizer.settings.items())),
            "parameters without weight decay (undecayed)": self.optimizer.undecayed_names,
            "schedule": resume.probed(self.schedule),
        }
        self._compare_settings(extra_settings)
        agreement.parameters(self.comm, self.arena)
        self.comm.broadcast(self.arena.params)

    def take_step(self, batch: datasets.Batch) -> Step:
        if self.mode.own_loop:
            raise ConfigError("[async] ranks do not take steps together; call fit()")
        self._scale_rate(len(batch.indices))
        self._share_out(len(batch.indices), batch.dataset.form)
        self._move_shards(len(batch.indices))
        self.compare(batch)
        if self._expected is not None:
            self._check_expected(batch)
        if self._expected_cut[0] is not None:
            self.check_cut(batch)
        part = self.mode.part(batch)
        if part is None:  # the others take this step; this rank's state counts it too
            self.steps = self.steps + 1
            self.optimizer.steps = self.optimizer.steps + 1
            self.mode.stepped()
            return Step(0.0, 0.0, self.rate(self.steps - 1), True, None, {})
        if not self._warned:
            self._look_at_loss(part)
        self._train.loss_scale = self.scaler.value
        sums = self._train.run(part, self.steps)
        self._begin(sums)
        self._look_at_route(self._train.runners[-1].reductions, len(batch.indices))
        lr = self.rate(self.steps)
        applied = self._train.alike and self._train.commit_step(
            self.optimizer, sums, self._divisor(sums), lr
        )
        if not self._train.alike:
            self._raise_divergence(self._train, part)
        if self.scaler.enabled:
            self._scale(applied, part, lr)
        elif not applied:
            self._not_finite(part, "gradient" if math.isfinite(sums.loss) else "loss", lr)
        if applied:
            self._train.updated()
            self.numerics.fine()
        self.steps += 1
        self.last = Step(
            sums.loss, sums.correct, lr, applied, sums.updates, self._train.measured(sums)
        )
        self.mode.stepped()
        if self._train.team is not None:
            while self._train.team.notes:
                self.say(self._train.team.notes.pop())
        return self.last

    def rehearse(self, batch: datasets.Batch, *, prepare: bool = False) -> tuple[int, int]:
        """Takes a step of this rank alone, in a world whose others are absent
        (comm/stand_in.py): nothing is compared, and their samples count as if they were
        there. prepare: only makes what a step needs, and computes nothing. Returns how many
        shards this rank has, and how many bytes others have read from memory that it shares
        so far.
        """
        samples = len(batch.indices)
        form = batch.dataset.form
        self._share_out(samples, form)
        if prepare:
            self._train.prepare(samples, form)
            self._begin(Sums([], 0, []))
        else:
            sums = self._train.run(batch, self.steps)
            self._train.alike = True
            sums.values[1] = float(samples)
            native.memory(sums.samples_address, 4).view(np.float32)[0] = samples
            self._train.commit_step(
                self.optimizer, sums, self._divisor(sums), self.rate(self.steps)
            )
            self._train.updated()
        lo, hi = self._train.part(samples)
        shared_reductions = {
            id(r): r
            for runner in self._train.runners
            for r in runner.reductions
            if hasattr(r.comm, "shared")
        }
        return -(-(hi - lo) // self._train.shard_size_of(samples)), sum(
            r.bytes_sent for r in shared_reductions.values()
        )

    def _rows(self, form: Form | None) -> int | None:
        if form is None:
            return None
        try:
            rows = self._train.programs.rows(form)
        # all ranks are told what is wrong with the model when they compare programs
        except Exception:
            rows = 1
        return (
            int(self.comm.broadcast(np.array([rows], np.int64))[0]) if self.mode.together else rows
        )

    def compare(self, batch: datasets.Batch, engine: Engine | None = None) -> None:
        """Compares what the ranks are given and what their models do with it, where that is due
        (agreement.py).
        """
        if engine is None:
            engine = self._train
            self._watch.batch(batch, self.steps, self.rate)
        kind = (engine.train, engine.shard_size_of(len(batch.indices)), *batch.dataset.form)
        if self.comm.size > 1 and kind not in self._watch.programs:
            agreement.programs(self.comm, engine, batch, self.steps)
            # not where that raises: a program that catches it may go on
            self._watch.programs.add(kind)

    def _raise_divergence(self, engine: Engine, batch: datasets.Batch) -> None:
        """Raises ConfigError, on all ranks: what they computed in a step, which was not taken,
        differs.
        """
        step = f"step {self.steps + 1}"
        agreement.standing(self.comm, step, self.standing(), engine.programs.values())
        agreement.programs(self.comm, engine, batch, self.steps)
        self.check_replicas()
        raise ConfigError(
            f"[train] ranks do not compute the same at {step}, which was not taken; change "
            "settings on all ranks alike"
        ).on_all_ranks()

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0.

        Raises NumericsError if the schedule makes it no rate.
        """
        factor = self.schedule(step)
        rate = (
            self.optimizer.lr * self._lr_factor * factor
            if isinstance(factor, (int, float, np.number))
            else math.nan
        )
        if not 0 <= rate < math.inf:
            error = NumericsError(
                f"[train] the schedule gives {factor!r} for step {step + 1}; it must give a "
                "finite number of at least 0"
            )
            error.raised_on_all_ranks = self.mode.together
            raise error
        return rate

    @property
    def base_rate(self) -> float:
        return self.optimizer.lr * self._lr_factor

    def scale_rate(self, factor: float) -> None:
        """Multiplies the learning rate of all steps from here on; checkpoints keep it."""
        self._lr_factor *= factor
        setting_versions.updates.rise()

    def _scale_rate(self, batch: int) -> None:
        """Once the batch size is known: sets, and says, what `lr_scaling` makes of the rate."""
        if self.lr_scaling == "none" or self._lr_scaled:
            return
        self._lr_scaled = True
        lr = self.optimizer.lr
        self._lr_factor = lr_factor(self.lr_scaling, batch, self.base_batch_size)
        ratio = f"{batch} / {self.base_batch_size}"
        ratio = f"sqrt({ratio})" if self.lr_scaling == "sqrt" else ratio
        self.say(f"learning rate {lr:g} x {ratio} = {lr * self._lr_factor:g}")

    def gradients(self, batch: datasets.Batch, step: int) -> tuple[Sums, np.ndarray, float]:
        """For a mode: sums over a batch computed by this rank alone, its gradients, and what
        they are divided by.
        """
        sums = self._train.run(batch, step)
        self._divisor(sums)
        divisor = sums.samples if self.clip_norm is None else float(self._divide[0])
        return sums, self._train.runners[-1].result[: self.arena.size], divisor

    def measured(self, sums: Sums) -> dict[str, float]:
        """For a mode: the metrics of such sums."""
        return self._train.measured(sums)

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics that are summed, once a step was recorded."""
        return sorted(self._train.programs.metric_at)

    def count_bytes(self, sent: int) -> None:
        """For a mode: adds to what this rank has sent."""
        self._train.bytes_sent += sent
        self._train.bytes_plain += sent

    def _look_at_loss(self, batch: datasets.Batch) -> None:
        """Says if the loss is no mean over samples, by that of the first batch in eval mode, in
        its shards and in larger ones: shards change its meaning. Not of our own models and
        losses.
        """
        n = len(batch.indices)
        size = self._eval.shard_size_of(n)
        larger = min(2 * size, n)
        parts = [*map(type, self.model.modules()), self.loss]
        has_user_code = any(
            not getattr(one, "__module__", "").startswith("odyssey.") for one in parts
        )
        if size == n or not has_user_code or not self.mode.together:
            return
        try:
            shard_loss, larger_loss = (self._eval.loss_in_shards(batch, k) for k in (size, larger))
        except OdysseyError:  # it is said where it is trained
            return
        if abs(shard_loss - larger_loss) > 1e-4 * max(abs(shard_loss), abs(larger_loss)) + 1e-6:
            values = f"{shard_loss:.5g} in shards of {size}, {larger_loss:.5g} of {larger}"
            self.say(
                f"[train] the loss is no mean over samples ({values}): computed in shards it is "
                "another one than that "
                f"of the batch of {n}. Give shard_size={n}, where one rank has the batch; of a "
                "root or other function "
                "of a mean, give the mean itself (docs/losses.md)"
            )

    def _begin(self, sums: Sums) -> None:
        """At the first step: what is known only once the model has been recorded."""
        if self._warned:
            return
        self._warned = True
        come = self.optimizer.coming
        self.optimizer.coming = None
        self.optimizer.keep(
            {name: self._train.ownership.own_state(a) for name, a in self.optimizer.state.items()}
        )
        if come is not None:
            come()
        self.optimizer.locked = self.in_parts
        self.arena.locked = self.comm.size > 1 and self._train.layout.split
        if not self.model.training:
            self.say(
                f"[train] {type(self.model).__name__} is in eval mode: dropout is off and batch "
                "norm uses running "
                "statistics; call model.train() if that is not meant"
            )
        for line in self._train.ownership.warnings:
            self.say(line)
        if self.progress is not None:
            for plan in self._train.ownership.plans:
                self.say(plan)

    def _divisor(self, sums: Sums) -> int:
        """Address of the number that gradients are divided by: samples, loss scale, and more if
        they are clipped.
        """
        self.grad_norm = None
        self._sums = sums
        if self.clip_norm is None and not self.scaler.enabled:
            return sums.samples_address
        divisor = sums.samples * self.scaler.value
        if self.clip_norm is not None:
            norm = self.grad_norm = self._train.ownership.norm(sums) / divisor
            if math.isfinite(norm) and norm > self.clip_norm:
                divisor *= norm / self.clip_norm
        self._divide = np.array([divisor], np.float32)
        return self._divide.ctypes.data

    def gradient_norm(self) -> float | None:
        if self.grad_norm is not None or self._sums is None or not self.mode.together:
            return self.grad_norm
        if self.layout.split or self.layout.zero:
            return None  # ranks would have to add up theirs
        divisor = float(self._divide[0]) if self.scaler.enabled else self._sums.samples
        return self._train.ownership.norm(self._sums) / divisor

    def _scale(self, applied: bool, batch: datasets.Batch, lr: float) -> None:
        """Sets the loss scale for the next step; all ranks hold the same sums, so all set the
        same.
        """
        previous_scale = self.scaler.value
        try:
            self.scaler.update(applied)
        except NumericsError as error:
            # no smaller scale is left: it is not the scale that overflows
            if self.numerics.policy != "stop":
                return self._not_finite(batch, "gradient", lr)
            error.raised_on_all_ranks = True
            raise
        if not applied:
            self.say(
                f"[precision] step {self.steps + 1} skipped: gradients overflowed at loss scale "
                f"{precisions.scale_text(previous_scale)}; scale is now "
                f"{precisions.scale_text(self.scaler.value)}"
            )

    def traffic(self) -> tuple[int, int, int]:
        return self._train.bytes_sent, self._train.bytes_plain, self._train.bytes_wire

    def _check_loader(self, loader: datasets.DataLoader, size: int, steps: int | None) -> None:
        self._scale_rate(size)
        check_last_step(self.mesh, loader, size, steps)

    def _begin_fit(
        self, context: callbacks.Context, compared_data: datasets.ArrayDataset | None
    ) -> None:
        self._watch.begin(compared_data, self.say if context.saving.nondeterministic else None)
        self.shard_size = self.layout.shard_size
        self.remember()

    def _ahead(self, batches: Iterator[datasets.Batch]) -> Iterator[datasets.Batch]:
        return self._train.ahead(batches)

    def _part(self, training: bool) -> Callable[[int], tuple[int, int]] | None:
        if not self.mode.together:  # each rank has samples of its own, and evaluates them all
            return None
        return self._train.part if training else self._eval.part

    def evaluate(self, loader: Any) -> Evaluation:
        """Mean loss and metrics over a data set or loader, dropout off."""
        self.mode.settle()
        slot.phase("evaluate")
        self._eval.programs.refresh()
        loader = in_batches(loader)
        data = loader.dataset if isinstance(loader, datasets.DataLoader) else loader
        compared_data = data if isinstance(data, datasets.ArrayDataset) else None
        if compared_data is not None:
            agreement.data_set(self.comm, compared_data, "validation")

        def sums(
            batch: datasets.Batch, number: int
        ) -> tuple[float, float, dict[str, float], float]:
            self.compare(batch, self._eval)
            batch_sums = self._eval.run(batch, 0)
            if not self._eval.alike:
                self._raise_divergence(self._eval, batch)
            return (
                batch_sums.loss,
                batch_sums.correct,
                self._eval.measured(batch_sums),
                batch_sums.samples,
            )

        evaluation = self._evaluation(
            self._eval.ahead(iter(evaluated(loader, self._part(training=False)))),
            sums,
            compared_data,
        )
        slot.phase("compute")
        return evaluation

    def predict(self, loader: Any) -> Any:
        """Returns what the model gives for all samples of a data set or loader, in order,
        dropout off: (N, ...) float32, or a tuple or dict of such, whole on every rank. All
        ranks call it.
        """
        self.mode.settle()
        with self.arena.lent(self._train.ownership.parameters()):
            batches = evaluated(in_batches(loader), None)
            algorithm = self.settings.conv_algorithm
            return trained_models.predicted(
                self.model, batches, self.comm, self.shard_size, algorithm
            )


DistributedTrainer.__doc__ = (DistributedTrainer.__doc__ or "").format(
    settings=declaration.documentation(Training)
)


def shard_size_of(model: Module, shard_size: int | None) -> int | None:
    """The shard size of a training: as given, or as the model's micro-batches are; None: by its
    global batch. Raises ConfigError: two different numbers are given.
    """
    micro = getattr(model, "micro_batch_size", None)
    if micro is not None and shard_size is not None and micro != shard_size:
        raise ConfigError(
            f"[train] shard_size is {shard_size} and the model's micro_batch_size {micro}; "
            "a micro-batch is a shard: give one of them"
        )
    return shard_size if micro is None else micro


def places(model: Module) -> int:
    """On how many devices a model is placed; 1 also for one without parameters, which the arena
    refuses.
    """
    if isinstance(model, PipelineParallel):
        return len(set(model.places))
    return len({d.slot for p in model.parameters() for d in p.places.values() or [p.device]}) or 1


def check_shared(mesh: Mesh, precision: str) -> None:
    """ConfigError, before anything is recorded, for what tensor parallelism cannot share."""
    if mesh.tp > PARTS:
        raise ConfigError(
            f"[mesh] tp is {mesh.tp}; sums are cut in {PARTS} parts, so 1 to {PARTS} is allowed; "
            "raise --dp or --pp instead"
        )
    if mesh.tp > 1 and precision != "fp32":
        raise ConfigError(
            f"[mesh] {mesh} with precision {precision}: only float32 products are shared; "
            "use --precision fp32, or --tp 1"
        )


def check_last_step(mesh: Mesh, loader: datasets.DataLoader, step: int, limit: int | None) -> None:
    """ConfigError, before the first step, if an epoch's last one has too few samples for layers
    that ranks share. step: samples of the others. limit: steps that will be taken; None: all
    of the epoch.
    """
    samples = len(loader.dataset if loader.sampler is None else loader.sampler)
    full, last = divmod(len(loader) * loader.batch_size if loader.drop_last else samples, step)
    if mesh.tp > 1 and last and layout_of(last) == "rows" and (limit is None or limit > full):
        raise ConfigError(
            f"[tp] {samples:,} samples in steps of {step} leave {last} for an epoch's last step, "
            "and so few are "
            "computed in rows, which are not split; use another batch size, drop_last=True, or "
            "--tp 1"
        )


def connect(backend: str, device: str, num_gpus: int | None) -> communication.Communicator:
    """The ranks that a backend connects; "nccl" in a single process is its GPUs.

    Raises DeviceError: a single process asks for them, and this machine has none.
    """
    launch = launcher.launched()
    if (
        backend != "nccl"
        or num_gpus is None
        or device == "cpu"
        or (launch is not None and launch.size > 1)
    ):
        return communication.world(backend)
    if not gpus.count():
        raise DeviceError(
            f"[train] backend='nccl' with num_gpus={num_gpus} in one process needs GPUs, and no "
            "GPU was found on this "
            "machine; use backend='auto', which takes CPU workers then"
        )
    return communication.world("local")


def choose_devices(
    device: str, num_gpus: int | None, comm: communication.Communicator, oversubscribe: bool
) -> tuple[tuple[int, ...], str | None]:
    """The GPU of each worker of this process, none for CPU workers; and what the user should
    know, in one line. Raises DeviceError: GPUs were asked for that are not there.
    """
    if device == "cpu" or (device == "auto" and num_gpus is None):
        return (), None
    gpu_count = gpus.count()
    has_own_gpus = False
    if comm.size > 1:  # what each rank sees: the same GPUs as its neighbours, or GPUs of its own
        uuids_hash = hash_of([gpu.uuid for gpu in gpus.found()])
        everyone = comm.all_gather(np.array([gpu_count, uuids_hash], np.int64))
        if (everyone[:, 0] > 0).any() and (everyone[:, 0] == 0).any():
            gpuless_rank, gpu_rank = (
                int(np.flatnonzero((everyone[:, 0] > 0) == s)[0]) for s in (False, True)
            )
            raise DeviceError(
                f"[gpu] rank {gpuless_rank} sees no GPU and rank {gpu_rank} has some; start all "
                "ranks alike, "
                "or use --device cpu"
            ).on_all_ranks()
        has_own_gpus = (
            gpu_count > 0 and comm.local_size > 1 and len(set(everyone[:, 1].tolist())) == comm.size
        )
    if not gpu_count:
        if device == "gpu":
            raise DeviceError(
                "[train] device is 'gpu' but this machine has none; use --device cpu or auto"
            )
        return (), f"no GPU found: {num_gpus} CPU workers are used"
    from ..engine.gpu.group import devices

    return tuple(
        devices(
            gpu_count, num_gpus or 1, comm.local_rank, comm.local_size, oversubscribe, has_own_gpus
        )
    ), None
