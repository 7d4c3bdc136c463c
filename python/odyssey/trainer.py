"""DistributedTrainer: epochs over batches, a step that all ranks take or none, evaluation, history.

It decides nothing about where shards are computed (engine.py) or how sums travel (parallel/); a group of one rank and
one worker is the ordinary case.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import numbers
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import comm as communication
from . import data as datasets
from . import gpus, verify
from . import precision as precisions
from . import resume as resumption
from .arena import Arena
from .checkpoints import Store, environment_key
from .comm.base import cores
from .data.sampler import check_integer
from .engine import Engine, Layout
from .errors import ConfigError, DeviceError, NumericsError
from .nn import CrossEntropyLoss, Module
from .numerics import NonFinite, check_replicas
from .optim import Optimizer, Schedule, Update, lr_factor
from .parallel import asynchronous
from .parallel.asynchronous import Show, Tally
from .parallel.mesh import Groups, Mesh
from .parallel.plan import check_workers
from .parallel.runner import Sums
from .parallel.strategy import MODES, Strategy
from .parallel.tensor import PARTS
from .recipes import LR_SCALINGS
from .session import KEEP, Saving, Session
from .watch import slot

CHECK_EVERY = 100  # a comparison takes 4 us of hashing and one small message
DEVICES = ("auto", "cpu", "gpu")


@dataclasses.dataclass
class History:
    """What a training did. `records` has one dict per epoch; the last epoch's figures are attributes too."""

    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0  # in training steps, without evaluation
    total_time: float = 0.0  # with it

    def _last(self, key: str) -> Any:
        return self.records[-1].get(key) if self.records else None

    @property
    def train_loss(self) -> float | None:
        """Mean training loss over the samples of the last epoch."""
        return self._last("train_loss")

    @property
    def test_loss(self) -> float | None:
        """Mean loss on the validation set after the last epoch."""
        return self._last("test_loss")

    @property
    def test_accuracy(self) -> float | None:
        """Share of the validation set that is right after the last epoch."""
        return self._last("test_accuracy")

    @property
    def best_accuracy(self) -> float | None:
        """The best test_accuracy of all epochs."""
        return max((r["test_accuracy"] for r in self.records if r.get("test_accuracy") is not None), default=None)

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes that a rank sent per step of the last epoch to sum gradients."""
        return self._last("bytes_per_step")

    @property
    def bytes_per_step_uncompressed(self) -> float | None:
        """The same if gradients were summed along the tree, uncompressed."""
        return self._last("bytes_per_step_uncompressed")

    @property
    def samples_per_second(self) -> float:
        """Training samples of all ranks per second of training."""
        return self.samples / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Means over a data set."""

    loss: float
    accuracy: float
    samples: int


class Last(NamedTuple):
    """The last step: its sum of losses and rate, whether it was taken, and what it was to update."""

    loss: float
    rate: float
    taken: bool
    updates: list[Update]


class Rollback(Exception):
    """Within fit(): training goes back to its last checkpoint, on all ranks."""


class DistributedTrainer:
    """Trains a model on all workers of all ranks, with the same bits whatever their number.

    Args:
        model: any Module.
        optimizer: SGD(lr=0.01), Adam(...), ...; bound to the model here unless it already is.
        num_gpus: workers of this process (default 1), one per GPU. On a machine without a GPU they are CPU workers.
        backend: transport: "auto", "mpi", "shm", "nccl", "gloo" or "local".
        loss: called as loss(model(x), labels); default the model's own `loss`, else CrossEntropyLoss.
        device: "cpu", "gpu", or "auto": GPUs if num_gpus asks for them and the machine has them.
        oversubscribe: several workers, of one rank or of several, may share a GPU.
        shard_size: samples per shard, default 32, or the micro_batch_size of a PipelineParallel. It is part of what is
            computed; the number of workers is not.
        threads: threads of this process; default its cores divided by the ranks on this machine.
        reduction: how gradients are summed (docs/strategies.md): "tree", "hierarchical" and "parameter_server" give
            the same bits on any number of ranks, "ring" and "mpi" (the library's own order) do not.
            With "async_parameter_server" and "local_sgd" ranks do not take every step together.
        servers: of "parameter_server": so many ranks add; of "async_parameter_server": so many serve.
        ranks_per_node: of "hierarchical": so many neighbouring ranks count as a node; default: those on one machine.
        compression: None, "fp16", "bf16", "topk" or "powersgd": what gradients are sent as; the same bits in every run
            on the same number of ranks. A single process sends nothing and compresses nothing.
        compression_ratio: of "topk": the share of the gradients that is sent.
        compression_warmup_steps: of "topk": steps in which the ratio falls from a quarter to that.
        powersgd_rank: of "powersgd".
        staleness: of "async_parameter_server": steps that a worker may be ahead of the slowest before it waits.
        local_steps: of "local_sgd": steps from one average to the next.
        lr_scaling: "none", "sqrt" or "linear": what the optimizer's rate is multiplied with: 1, or the root of global
            batch size / base_batch_size, or that number itself. The effective rate is printed.
        base_batch_size: the batch size that the optimizer's rate is for.
        execution: "replay" (recorded once, run without Python) or "eager" (op by op). Same bits.
        schedule: factor on the learning rate as a function of the step (optim.schedule).
        seed: seed of dropout.
        precision: "fp32", or "bf16" or "fp16": what the operands of products are rounded to (docs/precision.md).
            "fp16" scales the loss, from `scaler_init_scale`; it doubles after `scaler_growth_interval` steps without
            an overflow and halves at one.
        mesh: how many ranks replicate the model (dp), form a pipeline (pp) and share layers (tp); default: the model's
            own placement decides pp, the other ranks are replicas.
        zero: 1, 2, 3: what replicas keep in parts only (optimizer state; gradients; parameters). Same bits.
        bucket_size_mb: gradients are reduced in buckets of this size, while the backward pass goes on; default 25, and
            with zero=2 or 3 at most a 32nd of the model.
        overlap: False: reduce after the backward pass.
        pipeline_schedule: "gpipe", "1f1b" or "interleaved"; default the model's own (PipelineParallel), else "1f1b".
        accumulation_steps: batches of the loader that make one optimizer step.
        clip_norm: gradients are scaled down to this global norm if theirs is larger.
        nonfinite: what to do when the loss or a gradient is NaN or infinite (the step is not taken): "stop"; "skip" the
            step; "rollback" to the last checkpoint and leave the batch out. "fp16" halves its loss scale before that.
        check_every: steps from one comparison of the replicas' weights to the next; 0: never.
        progress: an object with begin, step, epoch and end (progress.py); called on rank 0.
        comm: the communicator, if not comm.world(backend).

    Raises:
        ConfigError: a setting is not allowed, or the ranks' models differ.
        DeviceError: a GPU was asked for and there is none.
    """

    @verify.on_its_layout
    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        num_gpus: int | None = None,
        backend: str = "auto",
        *,
        loss: Any = None,
        device: str = "auto",
        oversubscribe: bool = False,
        shard_size: int | None = None,
        threads: int | None = None,
        reduction: str = "tree",
        servers: int = 1,
        ranks_per_node: int | None = None,
        compression: str | None = None,
        compression_ratio: float = 0.01,
        compression_warmup_steps: int = 0,
        powersgd_rank: int = 2,
        staleness: int = 4,
        local_steps: int = 8,
        lr_scaling: str = "none",
        base_batch_size: int | None = None,
        execution: str = "replay",
        schedule: Schedule | None = None,
        seed: int = 0,
        precision: str = "fp32",
        scaler_init_scale: float = 2.0**16,
        scaler_growth_interval: int = 2000,
        mesh: Mesh | None = None,
        zero: int = 0,
        bucket_size_mb: float | None = None,
        overlap: bool = True,
        pipeline_schedule: str | None = None,
        accumulation_steps: int = 1,
        clip_norm: float | None = None,
        nonfinite: str = "stop",
        check_every: int = CHECK_EVERY,
        progress: Any = None,
        comm: communication.Communicator | None = None,
    ) -> None:
        if device not in DEVICES:
            raise ConfigError(f"[train] device is {device!r}; choose from {', '.join(DEVICES)}")
        for what, given, kind in (("model", model, Module), ("optimizer", optimizer, Optimizer)):
            if not isinstance(given, kind):
                name = f"the class {given.__name__}" if isinstance(given, type) else f"of type {type(given).__name__}"
                raise ConfigError(f"[train] {what} is {name}; give an object of a subclass of {kind.__name__}")
        if schedule is not None and not callable(schedule):
            raise ConfigError(f"[train] schedule is {schedule!r}; give a function, such as optim.cosine(total_steps)")
        seed = check_integer("[train] seed", seed, 0, 2**63 - 1)
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ConfigError(f"[train] mesh is {mesh!r}; give Mesh(dp=, pp=, tp=)")
        self.comm = comm or communication.world(backend)
        workers = 1 if num_gpus is None else num_gpus
        devices, self.notice = choose_devices(device, num_gpus, self.comm, oversubscribe)
        self.device = "gpu" if devices else "cpu"
        if threads is None:
            threads = max(1, cores() // self.comm.local_size)
        self._trace = verify.Trace.current()
        self.accumulation_steps = check_integer("[train] accumulation_steps", accumulation_steps, 1)
        if clip_norm is not None and not (isinstance(clip_norm, numbers.Real) and 0 < clip_norm < math.inf):
            raise ConfigError(f"[train] clip_norm is {clip_norm!r}; it must be a number above 0 and finite")
        self.clip_norm = clip_norm
        self.numerics = NonFinite(nonfinite)
        self.check_every = check_integer("[train] check_every", check_every, 0)
        self.mesh = (mesh or Mesh()).fit(self.comm.size, places(model))
        strategy = Strategy(
            reduction,
            servers,
            ranks_per_node,
            compression,
            compression_ratio,
            compression_warmup_steps,
            powersgd_rank,
            staleness,
            local_steps,
        )
        strategy.check(self.mesh, zero, precision)
        if strategy.reduction in MODES and nonfinite != "stop":
            raise ConfigError(
                f"[train] nonfinite is {nonfinite!r}, but with reduction={reduction!r} a rank's step is its own; "
                "use 'stop'"
            )
        self.layout = Layout(
            self.comm,
            workers,
            threads,
            shard_size_of(model, shard_size),
            strategy,
            execution,
            self.mesh,
            zero,
            bucket_size_mb,
            overlap,
            pipeline_schedule or getattr(model, "schedule", None) or "1f1b",
            devices,
        )
        self.workers = workers * self.mesh.dp  # that share out a batch
        self.threads = threads
        self.model, self.optimizer = model, optimizer
        self.schedule = schedule or (lambda step: 1.0)
        self.progress = progress if self.comm.rank == 0 else None
        self.seed = seed
        self.precision = precisions.check(precision)
        check_shared(self.mesh, precision)
        self.scaler = precisions.GradScaler(
            scaler_init_scale, growth_interval=scaler_growth_interval, enabled=precision == "fp16"
        )
        if lr_scaling not in LR_SCALINGS:
            raise ConfigError(f"[train] lr_scaling is {lr_scaling!r}; choose from {', '.join(LR_SCALINGS)}")
        if (lr_scaling == "none") != (base_batch_size is None):
            raise ConfigError(
                f"[train] lr_scaling is {lr_scaling!r} and base_batch_size {base_batch_size}; give both, or neither"
            )
        self.lr_scaling, self._lr_factor, self._lr_scaled = lr_scaling, 1.0, False
        if base_batch_size is not None:
            check_integer("[train] base_batch_size", base_batch_size, 1)
        self.base_batch_size = base_batch_size
        self.steps = 0
        self.arena = Arena.of(model.named_parameters())
        optimizer.bind(self.arena)
        optimizer.check_whole()
        self._same_everywhere()
        team = None
        if devices:
            from .gpu.team import Team

            team = Team(devices, self.arena)
            team.keep(optimizer)
            self.notice = team.describe()
        elif precision == "tf32":
            raise ConfigError("[train] precision is 'tf32', which only GPUs have; use 'bf16', or --device gpu")
        loss = self.loss = loss or getattr(model, "loss", None) or CrossEntropyLoss()
        if getattr(loss, "reduction", "mean") != "mean":
            raise ConfigError(
                "[train] the loss has reduction='sum', but a trainer divides by the samples of the global batch; "
                "use 'mean'"
            )
        if strategy.reduction in MODES and self._trace is not None:
            raise ConfigError(
                f"[verify] reduction={reduction!r} gives other bits than one process; verify a synchronous one"
            )
        self.mode = asynchronous.mode(self, strategy)
        groups = Groups(self.comm, self.mesh)
        settings: dict[str, Any] = {"seed": seed, "precision": precision}
        layout, its_groups, own = self.layout, groups, {}
        if self.mode is not None:
            layout, its_groups = asynchronous.alone(self.layout, self.comm)
            own = {"seed": (seed + 0x9E3779B97F4A7C15 * self.comm.rank) % 2**63}  # other masks for other samples
        self._train = Engine(
            model,
            loss,
            self.arena,
            layout,
            its_groups,
            train=True,
            scaled=self.scaler.enabled,
            team=team,
            **{**settings, **own},
        )
        settings["team"] = team
        self._eval = Engine(model, loss, self.arena, self.layout, groups, train=False, like=self._train, **settings)
        self._warned = False
        self._session: Session | None = None  # of the fit() that is under way
        self.last: Last | None = None  # step
        self.saved_in: set[str] = set()  # directories of checkpoints of this trainer's fit()s
        self._replicas: Callable[[], list[int]] | None = None
        self.data_configuration: dict[str, Any] = {}  # of the data of fit(), to compare with a checkpoint's
        self.grad_norm: float | None = None  # of the last step, if clip_norm is given

    def _same_everywhere(self) -> None:
        """Compares the layouts of all ranks, then gives all of them rank 0's parameters."""
        if self.comm.size == 1:
            return
        lay = self.layout
        settings = {k: v for k, v in vars(self.optimizer).items() if isinstance(v, (int, float, tuple))}
        self._compare(
            {
                "device": (self.device, [gpus.found()[i].accelerator for i in lay.gpus]),
                "model": self.arena.layout_hash(),
                "number of workers": lay.workers,
                "shard size": lay.shard_size,
                "mesh": (str(lay.mesh), lay.zero, lay.schedule, lay.bucket_size_mb, lay.overlap),
                "accumulation and clipping": (self.accumulation_steps, self.clip_norm),
                "guard": (self.numerics.policy, self.check_every),
                "reduction": lay.reduction,
                "learning-rate scaling": (self.lr_scaling, self.base_batch_size),
                "seed": self.seed,
                "precision": (self.precision, self.scaler.state_dict(), self.scaler.growth_interval),
                "optimizer": (type(self.optimizer).__name__, sorted(settings.items())),
                "schedule": resumption.probed(self.schedule),
            }
        )
        self.comm.broadcast(self.arena.params)

    def _compare(self, settings: dict[str, Any]) -> None:
        """Raises ConfigError, on all ranks, if one rank's settings are not those of rank 0."""
        if self.comm.size == 1:
            return
        everyone = self.comm.all_gather(np.array([hash_of(v) for v in settings.values()], np.int64))
        for name, column in zip(settings, everyone.T, strict=True):
            different = np.flatnonzero(column != column[0])
            if len(different):
                error = ConfigError(
                    f"[train] the {name} of rank {different[0]} differs from that of rank 0; start all ranks alike"
                )
                error.everywhere = True
                raise error

    # --- steps ---

    def train_step(self, batch: datasets.Batch) -> tuple[float, float]:
        """One optimizer step over a global batch; returns (sum of losses, correct predictions) over its samples.

        Every rank is given the same batch and computes its own shards of it. With precision="fp16" a step whose
        gradients overflowed changes nothing, on no rank, and counts as a step.

        Raises:
            NumericsError: the loss or a gradient is NaN or infinite (with "fp16": at a loss scale that cannot be
                lowered any more); nothing was changed, on no rank.
        """
        if isinstance(self.mode, asynchronous.AsynchronousServer):
            raise ConfigError("[async] ranks do not take steps together; call fit()")
        self._scale_rate(len(batch.indices))
        if self.mode is not None:
            part = self.mode.part(batch)
            if part is None:  # the others take this step; this rank's state counts it too
                self.steps, self.optimizer.steps = self.steps + 1, self.optimizer.steps + 1
                self.mode.stepped()
                return 0.0, 0.0
            batch = part
        self._train.loss_scale = self.scaler.value
        sums = self._train.run(batch, self.steps)
        self._begin(sums)
        lr = self.rate(self.steps)
        taken = self._train.take(self.optimizer, sums, self._divisor(sums), lr)
        if self.scaler.enabled:
            self._scale(taken, batch, lr)
        elif not taken:
            self._not_finite(batch, "gradient" if math.isfinite(sums.loss) else "loss", lr)
        if taken:
            self._train.updated()
            self.numerics.fine()
        self.steps += 1
        self.last = Last(sums.loss, lr, taken, sums.updates)
        if self.mode is not None:
            self.mode.stepped()
        if self._train.team is not None:
            while self._train.team.notes:
                self._show(self._train.team.notes.pop())
        if self._trace is not None:
            self._trace.step(self, sums.loss, sums.correct)
        return sums.loss, sums.correct

    def _not_finite(self, batch: datasets.Batch, what: str, lr: float) -> None:
        """Ends the training, has the step skipped (by returning), or has fit() go back to a checkpoint."""
        session = self._session
        epoch, index = (batch.epoch, batch.index) if session is None else (session.cursor.epoch, session.cursor.step)
        try:
            saved = None if session is None or self.mode is not None else session.saved()
            decision = self.numerics.found(self.steps + 1, epoch, index, saved, what, lr)
        except NumericsError as error:
            error.everywhere = self.mode is None  # all ranks know the same
            raise
        self._show(decision.message)
        if decision.kind == "rollback":
            raise Rollback

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.optimizer.lr * self._lr_factor * self.schedule(step)

    def _scale_rate(self, batch: int) -> None:
        """Once the batch size is known: sets, and says, what `lr_scaling` makes of the rate."""
        if self.lr_scaling == "none" or self._lr_scaled:
            return
        self._lr_scaled, lr = True, self.optimizer.lr
        self._lr_factor = lr_factor(self.lr_scaling, batch, self.base_batch_size)
        ratio = f"{batch} / {self.base_batch_size}"
        ratio = f"sqrt({ratio})" if self.lr_scaling == "sqrt" else ratio
        self._show(f"learning rate {lr:g} x {ratio} = {lr * self._lr_factor:g}")

    def gradients(self, batch: datasets.Batch, step: int) -> tuple[Sums, np.ndarray, float]:
        """For a mode: sums over a batch computed by this rank alone, its gradients, and what they are divided by."""
        sums = self._train.run(batch, step)
        self._divisor(sums)
        divisor = sums.samples if self.clip_norm is None else float(self._divide[0])
        return sums, self._train.runners[-1].result[: self.arena.size], divisor

    def count_bytes(self, sent: int) -> None:
        """For a mode: adds to what this rank has sent."""
        self._train.bytes_sent += sent
        self._train.bytes_plain += sent

    def _begin(self, sums: Sums) -> None:
        """At the first step: what is known only once the model has been recorded."""
        if self._warned:
            return
        self._warned = True
        self.optimizer.keep({name: self._train.own_state(a) for name, a in self.optimizer.state.items()})
        for line in self._train.warnings:
            self._show(line)
        if self.progress is not None:
            for plan in self._train.plans:
                self._show(plan)

    def _divisor(self, sums: Sums) -> int:
        """Address of the number that gradients are divided by: samples, loss scale, and more if they are clipped."""
        if self.clip_norm is None and not self.scaler.enabled:
            return sums.samples_address
        divisor = sums.samples * self.scaler.value
        if self.clip_norm is not None:
            norm = self.grad_norm = self._train.norm(sums) / divisor
            if math.isfinite(norm) and norm > self.clip_norm:
                divisor *= norm / self.clip_norm
        self._divide = np.array([divisor], np.float32)
        return self._divide.ctypes.data

    def _scale(self, taken: bool, batch: datasets.Batch, lr: float) -> None:
        """Sets the loss scale for the next step; all ranks hold the same sums, so all set the same."""
        before = self.scaler.value
        try:
            self.scaler.update(taken)
        except NumericsError as error:
            if self.numerics.policy != "stop":  # no smaller scale is left: it is not the scale that overflows
                return self._not_finite(batch, "gradient", lr)
            error.everywhere = True
            raise
        if not taken:
            self._show(
                f"[precision] step {self.steps + 1} skipped: gradients overflowed at loss scale "
                f"{precisions.scale_text(before)}; scale is now {precisions.scale_text(self.scaler.value)}"
            )

    def _show(self, line: str) -> None:
        """One line to the user, from rank 0, without tearing a progress bar."""
        if self.comm.rank == 0:
            say = getattr(self.progress, "say", None) or (lambda text: print(f"odyssey: {text}", file=sys.stderr))
            say(line)

    def evaluate(self, loader: Any) -> Evaluation:
        """Mean loss and accuracy over a data set or loader, dropout off."""
        self._settle()
        slot.phase("evaluate")
        loss = correct = count = 0.0
        for batch in self._eval.ahead(iter(_whole(loader))):
            sums = self._eval.run(batch, 0)
            loss, count, correct = loss + sums.loss, count + sums.samples, correct + sums.correct
        slot.phase("compute")
        if not count:
            raise ConfigError("[evaluate] the data set is empty; give at least one sample")
        return Evaluation(loss / count, correct / count, int(count))

    # --- epochs ---

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
    ) -> History:
        """Trains for `epochs` epochs, or until `steps` optimizer steps have been taken.

        With checkpoints it goes on where the newest valid one is, whatever the layout that made it, with the bits of a
        training that was never stopped (docs/fault-tolerance.md). SIGTERM, SIGINT and SIGUSR1 then stop it after a step
        that all ranks agree on, with a checkpoint of that step.

        Args:
            train_loader: a data.DataLoader (its batch_size is the global batch), or any iterable of (x, y) arrays
                that is the same on all ranks, and the same whenever it is iterated if training is to be resumed.
            val_loader: evaluated after each epoch, if given.
            checkpoint_dir: where checkpoints go; default: none, or those of the run that this process belongs to.
            checkpoint_every: steps from one to the next; default: at the ends of epochs.
            checkpoint_epochs: epochs from one to the next, without checkpoint_every.
            keep: the newest so many stay, at least 2.
            resume: "auto": from the newest valid one, if there is one; "never": refuse a directory that has some;
                or the path of a checkpoint.

        Returns:
            A History, of all epochs since the training began.

        Raises:
            ConfigError: a setting is not allowed, or a checkpoint is of another training.
            CheckpointError: the checkpoint that was asked for is not valid.
            OutputError: the last checkpoint could not be written.
            Stopped: the training was asked to stop; it can go on from its last checkpoint.
        """
        saving = Saving(
            None if checkpoint_dir is None else Path(checkpoint_dir), checkpoint_every, keep, resume, checkpoint_epochs
        )
        if epochs < 1:
            raise ConfigError(f"[train] epochs is {epochs}; it must be at least 1")
        if steps is not None and steps < 1:
            raise ConfigError(f"[train] steps is {steps}; it must be at least 1")
        history = History()
        if self._trace is not None:
            val_loader, steps = None, self._trace.limit(steps)
        started = time.perf_counter()
        size = getattr(train_loader, "batch_size", 0)
        if isinstance(train_loader, datasets.DataLoader):
            n, sampler = len(train_loader.dataset), train_loader.sampler
            if getattr(sampler, "num_replicas", 1) > 1:
                raise ConfigError(
                    "[train] the loader's DistributedSampler gives each rank other samples, but the trainer shares "
                    "every global batch out itself; leave the sampler out and use shuffle=True"
                )
            size *= self.accumulation_steps
            self._scale_rate(size)
            apart = isinstance(self.mode, asynchronous.AsynchronousServer)  # a batch is one worker's
            workers = self.layout.workers if apart else self.workers
            check_workers(workers, min(size, n), self.layout.shard_size)
            order = (train_loader.seed, train_loader.shuffle, len(train_loader))
            self._compare({"batch size": size, "data set": n, "data order": order, "length": (epochs, steps)})
            self.data_configuration = resumption.data_configuration(train_loader, size)
        session = self._session = Session(self, train_loader, epochs, steps, saving, history)
        if self.progress:
            per_epoch = -(-len(train_loader) // self.accumulation_steps) if hasattr(train_loader, "__len__") else 0
            self.progress.begin(epochs, per_epoch, size)
        try:
            session.begin()
            before = history.total_time
            while not session.finished:
                try:
                    self._epoch(train_loader, val_loader, session)
                except Rollback:
                    session.roll_back()
                history.total_time = before + time.perf_counter() - started
            session.end()
        finally:
            self._session = None
            session.close()
            if self.progress:
                self.progress.end()
        if isinstance(self.mode, asynchronous.AsynchronousServer):
            self._show(self.mode.summary(history.records[-1]))
        return history

    train = fit

    def take_steps(self, batches: Iterable[datasets.Batch], limit: int | None, show: Show) -> Tally:
        """A step for each of the batches, at most `limit`."""
        session = self._session
        tally = Tally() if session is None else session.tally
        batches = self._train.ahead(itertools.islice(batches, limit))
        while True:
            slot.phase("data")
            batch = next(batches, None)
            slot.phase("compute")
            if batch is None:
                break
            if session is not None and self.numerics.leaves_out(session.cursor.epoch, session.cursor.step):
                self.steps, self.last, tally.steps = self.steps + 1, None, tally.steps + 1
                session.stepped(0)
                continue
            a, b = self.train_step(batch)
            n = len(batch.indices)
            slot.step(self.steps, n // self.mesh.dp)
            tally.samples, tally.steps = tally.samples + n, tally.steps + 1
            if math.isfinite(a):  # a step that was skipped may have no loss
                tally.loss, tally.correct, tally.counted = tally.loss + a, tally.correct + b, tally.counted + n
            own = n if self.mode is None else n / self.comm.size  # samples that the loss is of
            show(tally.steps, a / own, tally.samples)
            if session is not None:
                session.stepped(n)
        return tally

    def _epoch(self, train_loader: Any, val_loader: Any, session: Session) -> None:
        """Takes what is left of an epoch, evaluates and makes its record."""
        epoch, history = session.cursor.epoch, session.history
        before = dataclasses.replace(session.tally)  # what was done of it before a checkpoint
        t0 = time.perf_counter()
        shown = t0
        sent, plain = self._train.bytes_sent, self._train.bytes_plain

        def show(step: int, mean_loss: float, samples: int) -> None:
            nonlocal shown
            now = time.perf_counter()
            if self.progress and now - shown > 0.1:
                shown = now
                self.progress.step(epoch, step, mean_loss, (samples - before.samples) / (now - t0))

        take = self.take_steps if self.mode is None else self.mode.epoch
        batches = itertools.islice(_batches(train_loader), session.first_batch, None)
        if self._trace is not None:
            batches = self._trace.cut(batches)
        batches = _joined(batches, self.accumulation_steps)
        tally = take(batches, session.left, show)
        seconds = session.seconds()
        if not tally.samples:
            raise ConfigError("[train] the loader gave no batch; give it data, or a smaller batch size")
        session.taken(tally)
        steps = max(tally.steps - before.steps, 1)
        history.seconds += seconds
        history.samples += tally.samples
        history.steps += tally.steps
        record: dict[str, Any] = {
            "epoch": epoch + 1,
            "train_loss": tally.loss / tally.counted if tally.counted else math.nan,
            "train_accuracy": tally.correct / max(tally.counted, 1),
            "samples_per_second": tally.samples / seconds,
            "seconds": seconds,
            "bytes_per_step": (self._train.bytes_sent - sent) / steps,
            "bytes_per_step_uncompressed": (self._train.bytes_plain - plain) / steps,
            **tally.extra,
            "test_loss": None,
            "test_accuracy": None,
        }
        if val_loader is not None:
            result = self.evaluate(val_loader)
            record.update(test_loss=result.loss, test_accuracy=result.accuracy)
        history.records.append(record)
        if self.progress:
            self.progress.epoch(record)
        session.epoch_ended()

    def check_replicas(self) -> None:
        """Compares what the ranks hold alike; a collective call.

        Raises:
            NumericsError: on all ranks: they differ, as after a flipped bit in one rank's memory.
        """
        if self.layout.zero == 3:
            return
        if self._train.team is not None:
            own = self._train.team.weights()
            wrong = [w for w, value in enumerate(own) if value != own[0]]
            if wrong:
                raise NumericsError(
                    f"[check] step {self.steps}: the weights of worker {wrong[0]} of rank {self.comm.rank} differ from "
                    f"those of its worker 0; a memory or hardware error. Go on from the last checkpoint (--resume auto)"
                )
            mine = own[0]
        else:
            if self._replicas is None:
                at = self._train.parameters_address
                runs = self._train.replicated()  # none on a rank whose stage has no parameters
                self._replicas = self._train.fingerprints([(at + 4 * lo, n, lo) for lo, n in runs])
            (mine,) = self._replicas()
        check_replicas(self.comm, self.steps, {"weights": mine}, self._train.groups.model.rank)

    # --- results ---

    def _settle(self) -> None:
        """Where ranks do not take every step together: makes them the same; a collective call."""
        if self.mode is not None:
            self.mode.settle()

    def weights_sha256(self) -> str:
        """SHA-256 over the bytes of the arena: one value for one training, on any layout. Collective, as below."""
        self._settle()
        return hashlib.sha256(self._train.parameters().tobytes()).hexdigest()

    def state_dict(self) -> dict[str, np.ndarray]:
        """The parameters by name, whole, on every rank; a collective call if ranks keep parts of them."""
        self._settle()
        flat = self._train.parameters()
        return {name: self.arena.view(flat, name).copy() for name, _ in self.arena.named}

    def optimizer_state(self) -> dict[str, Any]:
        """Step count, rate and state arrays in the arena's layout, whole, on every rank; collective likewise."""
        self._settle()
        arrays = {name: whole.copy() for name, whole in self.optimizer_arrays().items()}
        return {"steps": self.optimizer.steps, "lr": self.optimizer.lr, **arrays}

    def optimizer_arrays(self) -> dict[str, np.ndarray]:
        """The optimizer's arrays in the arena's layout, whole, on every rank; training may go on in them."""
        whole = self._train.state if self._warned else lambda state: state  # cut into parts at the first step
        return {name: whole(own) for name, own in self.optimizer.state.items()}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Takes back what optimizer_state() gave, on this layout or another; all ranks call it.

        Raises:
            ConfigError: the state is of another optimizer or model; nothing was changed.
        """
        arrays = {name: np.asarray(state.get(name, ())) for name in self.optimizer.states}
        wrong = next((name for name, a in arrays.items() if a.shape != (self.arena.size,)), None)
        if wrong or "steps" not in state or "lr" not in state:
            raise ConfigError(
                f"[train] the state has no {wrong or 'steps and lr'} of this optimizer and model "
                f"({self.arena.size} numbers); give what optimizer_state() gave"
            )
        for name, whole in arrays.items():
            own = np.ascontiguousarray(whole, np.float32)
            self.optimizer.state[name][...] = self._train.own_state(own) if self._warned else own
        self.optimizer.steps, self.optimizer.lr = int(state["steps"]), float(state["lr"])

    @property
    def plan(self) -> str:
        """How the model is cut over ranks, where odyssey decided it; known after the first step."""
        return "\n".join(self._train.plans)

    def memory(self) -> dict[str, int]:
        """Bytes that training takes on this rank: parameters, gradients and their reduction, optimizer, activations."""
        gradients, activations = self._train.memory()
        return {
            "parameters": self._train.parameter_bytes,
            "gradients": gradients,
            "optimizer": sum(a.nbytes for a in self.optimizer.state.values()),
            "activations": activations,
        }

    @property
    def bytes_per_step(self) -> float:
        """Bytes that this rank has sent per training step to sum gradients (and, with pp or tp, activations)."""
        return self._train.bytes_sent / max(self.steps, 1)

    @property
    def bytes_per_step_uncompressed(self) -> float:
        """The same if gradients were summed along the tree, uncompressed."""
        return self._train.bytes_plain / max(self.steps, 1)

    def last_gradients(self) -> dict[str, np.ndarray]:
        """The summed gradients of the last step by the parameters' names; before division, scaling and clipping.

        Raises:
            ConfigError: ranks have parts of them (zero=, or a mesh).
        """
        updates = self.last.updates if self.last is not None else []
        if len(updates) != 1 or updates[0].n != self.arena.size:
            raise ConfigError("[train] the gradients are spread over ranks; they are whole with one rank, or zero=0")
        flat = self._train.gradients(updates[0])
        return {name: self.arena.view(flat, name).copy() for name, _ in self.arena.named}

    def save_checkpoint(self, folder: str | Path) -> None:
        """Writes everything that training goes on from as the next step of a directory of checkpoints; all ranks call.

        For a loop of one's own; fit() makes its own, and says in them where it is in its data.

        Raises:
            OutputError: it could not be written; those that are there stay.
        """
        self._settle()
        snapshot = resumption.capture(self, {})

        def write() -> tuple[None, str]:
            with Store(Path(folder), key=environment_key()) as store:
                store.save(snapshot)
            return None, ""

        resumption.shared(self.comm, write)

    def load_checkpoint(self, path: str | Path) -> int:
        """Takes back a checkpoint, made on any layout; returns its step. All ranks call.

        Args:
            path: a checkpoint, or a directory of them: then the newest that is valid.

        Raises:
            CheckpointError: there is none that is valid.
            ConfigError: it is of another training.
        """
        snapshot, name = resumption.shared(self.comm, lambda: resumption.find(Path(path), self._show))
        resumption.restore(self, snapshot, name)
        return snapshot.step

    def save_weights(self, path: str | Path) -> None:
        """Writes the parameters as safetensors, whole or not at all. Rank 0 writes; all ranks call."""
        state = self.state_dict()
        if self.comm.rank == 0:
            path = Path(path)
            aside = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                write_weights(aside, state)
                os.replace(aside, path)
            finally:
                aside.unlink(missing_ok=True)


def write_weights(path: Path, state: dict[str, np.ndarray]) -> None:
    """Parameters by name as a safetensors file."""
    from safetensors.numpy import save

    path.write_bytes(save(state))


def shard_size_of(model: Module, shard_size: int | None) -> int:
    """The shard size of a training: as given, as the model's micro-batches are, or 32.

    Raises:
        ConfigError: two different numbers are given.
    """
    micro = getattr(model, "micro_batch_size", None)
    if micro is not None and shard_size is not None and micro != shard_size:
        raise ConfigError(
            f"[train] shard_size is {shard_size} and the model's micro_batch_size {micro}; "
            "a micro-batch is a shard: give one of them"
        )
    given = shard_size if micro is None else micro
    return 32 if given is None else given


def hash_of(value: Any) -> int:
    """63 bits of a hash over a value's repr."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 1


def places(model: Module) -> int:
    """On how many devices a model is placed."""
    return len(set(getattr(model, "places", None) or (p.device.slot for p in model.parameters())))


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


def choose_devices(
    device: str, num_gpus: int | None, comm: communication.Communicator, oversubscribe: bool
) -> tuple[tuple[int, ...], str | None]:
    """The GPU of each worker of this process, none for CPU workers; and what the user should know, in one line.

    Raises:
        ConfigError: num_gpus is not allowed. DeviceError: GPUs were asked for that are not there.
    """
    if num_gpus is not None and (not isinstance(num_gpus, int) or isinstance(num_gpus, bool) or num_gpus < 1):
        raise ConfigError(f"[train] num_gpus is {num_gpus!r}; it must be an integer of at least 1")
    if device == "cpu" or (device == "auto" and num_gpus is None):
        return (), None
    found, own = gpus.count(), False
    if comm.size > 1:  # what each rank sees: the same GPUs as its neighbours, or GPUs of its own
        seen = hash_of([gpu.uuid for gpu in gpus.found()])
        everyone = comm.all_gather(np.array([found, seen], np.int64))
        if (everyone[:, 0] > 0).any() and (everyone[:, 0] == 0).any():
            none, some = (int(np.flatnonzero((everyone[:, 0] > 0) == s)[0]) for s in (False, True))
            error = DeviceError(
                f"[gpu] rank {none} sees no GPU and rank {some} has some; start all ranks alike, or use --device cpu"
            )
            error.everywhere = True
            raise error
        own = found > 0 and comm.local_size > 1 and len(set(everyone[:, 1].tolist())) == comm.size
    if not found:
        if device == "gpu":
            raise DeviceError("[train] device is 'gpu' but this machine has none; use --device cpu or auto")
        return (), f"no GPU found: {num_gpus} CPU workers are used"
    from .gpu.team import devices

    return tuple(devices(found, num_gpus or 1, comm.local_rank, comm.local_size, oversubscribe, own)), None


def _batches(loader: Any) -> Iterable[datasets.Batch]:
    """The loader's batches; pairs of arrays become batches of their own."""
    if not isinstance(loader, Iterable) or isinstance(loader, tuple):
        raise ConfigError(
            f"[train] {type(loader).__name__} is no loader; give a data.DataLoader, or a list of (x, y) batches"
        )
    for item in loader:
        if isinstance(item, datasets.Batch):
            yield item
        else:
            x, y = item
            data = datasets.arrays(np.asarray(x), np.asarray(y))
            yield datasets.Batch(data, np.arange(len(data)), 0, 0)


def _joined(batches: Iterable[datasets.Batch], k: int) -> Iterable[datasets.Batch]:
    """Every k batches as one; the last may be of fewer. A step then divides once, by all their samples."""
    if k == 1:
        yield from batches
        return
    batches = iter(batches)
    while group := list(itertools.islice(batches, k)):
        data = group[0].dataset
        if all(b.dataset is data for b in group):
            indices = np.concatenate([b.indices for b in group])
        else:
            parts = [b.dataset.gather(b.indices) for b in group]
            data = datasets.arrays(*(np.concatenate(p) for p in zip(*parts, strict=True)))
            indices = np.arange(len(data))
        yield datasets.Batch(data, indices, group[0].epoch, group[0].index // k)


def _whole(loader: Any) -> Iterable[datasets.Batch]:
    """A data set or loader as batches for evaluation."""
    if isinstance(loader, datasets.ArrayDataset):
        loader = datasets.DataLoader(loader, batch_size=8192)
    return _batches(loader)
