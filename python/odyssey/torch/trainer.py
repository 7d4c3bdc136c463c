"""DistributedTrainer of a PyTorch module: a step is torch's, what is between shards and around
steps is odyssey's.

The parts that a trainer is put together from are listed in train/trainer_base.py. docs/pytorch.md
says what is held and what is not.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import callbacks
from .. import comm as communication
from .. import data as datasets
from ..base import slot
from ..capture import Capture
from ..checkpoints import Evaluation, Step
from ..engine import Layout
from ..errors import ConfigError
from ..nn import in_mode
from ..parallel import Mesh, Strategy
from ..settings import Training
from ..settings import declarations as declaration
from ..train import BatchSharing, Trainer, compare_settings, roots_of, split_metrics, spread
from . import metrics as metric_sums
from .arguments import check_arguments, check_weight
from .captured import build_on, kept_by_trainer
from .changing import ForwardCheck, ForwardWatch
from .checks import ModuleChecks
from .data import Shared
from .device import default_shard_size
from .feed import ModuleFeed
from .first_shard import FirstShard
from .optimizer_parts import OptimizerParts
from .shards import BatchSums, Shards
from .state import ModuleState
from .stepper import AUTOCAST_DTYPES, ModuleStepper
from .zero import Spread


class DistributedTrainer(Trainer):
    """Trains a torch.nn.Module with a torch optimizer on all ranks, with the same bits whatever
    their number.

    Args:
        module: of float32 parameters on one device: the CPU, or a GPU that the program has moved it
            to. Batches follow it there. In training it is used in the modes (train, eval) its parts
            are in.
        optimizer: a torch.optim optimizer over its parameters.
        loss: called as loss(module(x), y) on the samples of a shard; gives their mean, or their sum
            where its `reduction` is "sum". Default nn.CrossEntropyLoss(). Of batches that are
            dicts, as Hugging Face's loaders give them: loss(module(**batch), batch), default the
            output's `loss`.
        scheduler: a torch scheduler of this optimizer; its step() is called here.
        scheduler_interval: "step": after each optimizer step; "epoch": after each epoch.
        metrics: a dict of names with functions of (output, target), objects of odyssey.metrics or
            torchmetrics, or one of "accuracy", "top5", "mae", "mse", "f1", "precision", "recall",
            "auc", "r2", "correlation"; or a list of such names (docs/losses.md); default accuracy,
            where targets are classes. Of batches that are dicts: functions of (output, batch);
            names and objects compare the output's `logits` with batch["labels"].
        shard_size: samples per shard, which torch runs as one batch: part of what is computed.
            Default: an eighth of the global batch, rounded up, but at least 32 on CPUs, and 2 on
            GPUs.
        threads: of torch, in every rank: part of what is computed, so never the number of cores.
        deterministic: "error": an operation without a deterministic form ends the training, and so
            does a buffer that nothing merges; "warn": it is told, and bits are not promised.
        gather: for a loss that compares samples with each other (contrastive, ranking): it is given
            the outputs and targets of the whole batch, whose shards run twice: for their outputs,
            then for the gradients of these.
        weight: a function of (output, target), or of (output, batch) for dicts, that returns the
            weight of a shard: the number that its loss divides a sum by, such as the number of
            targets that count. Default: its samples; for a Hugging Face model with its own loss,
            the labels that are not -100. For example, for a mean over tokens:

                DistributedTrainer(module, optimizer, loss, weight=lambda out, y: (y != -100).sum())
        mesh, progress, comm, backend: as for odyssey.DistributedTrainer; replicas only.
        settings: by keyword: seed, precision ("fp32", or autocast: "bf16", or "fp16" with a loss
            scale, scaler_init_scale and scaler_growth_interval), clip_norm,
            accumulation_steps, zero (of its parameters alone a rank keeps 1: the optimizer's state,
            2: gradients too, 3: values too), nonfinite, check_every, reduction, servers,
            ranks_per_node, compression, compression_ratio, compression_warmup_steps, powersgd_rank.

    Raises ConfigError: something is not allowed, or cannot be held; the message names it. Or the
    ranks differ.
    """

    stepper: ModuleStepper
    training_state: ModuleState
    checks: ModuleChecks
    feed: ModuleFeed

    @callbacks.joined
    @declaration.keywords(Training)
    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Any = None,
        *,
        scheduler: Any = None,
        scheduler_interval: str = "step",
        metrics: Any = None,
        shard_size: int | None = None,
        threads: int = 1,
        deterministic: str = "error",
        gather: bool = False,
        weight: Callable[[Any, Any], Any] | None = None,
        mesh: Mesh | None = None,
        progress: Any = None,
        comm: communication.Communicator | None = None,
        backend: str = "auto",
        **settings: Any,
    ) -> None:
        values = {"shard_size": shard_size, "threads": threads, "backend": backend, **settings}
        training = declaration.make_settings(Training, values)
        check_arguments(training, module, optimizer, loss, scheduler, scheduler_interval)
        check_weight(weight, loss, gather)
        super().__init__(training, comm or communication.world(backend), progress)
        self.mesh = (mesh or Mesh()).fit(self.comm.size, 1)
        if self.mesh.pp * self.mesh.tp > 1:
            raise ConfigError(
                f"[torch] the mesh is {self.mesh}; a torch module is trained by replicas: Mesh(dp=)"
            )
        self.strategy = declaration.part(Strategy, training)
        if self.scaler.enabled:
            self.strategy.check(self.mesh, training.zero, training.precision)
        self.module = module
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.gather = gather
        self.weight = weight
        self.metrics = metric_sums.chosen(metrics)
        summed_metrics, whole_metrics = split_metrics(self.metrics)
        self.whole_set = metric_sums.ModuleWholeSet(whole_metrics, self.comm)
        self.threads = threads
        self.deterministic = deterministic
        self.zero = training.zero
        self.workers = self.comm.size
        self.replicas = self.comm.size
        self.shards = self._make_shards()
        self.arena = self.shards.arena
        self.arithmetic = self.shards.arithmetic
        build_on(self.arena.device.torch_device)
        if not module.training:
            module.train()
        # a rank runs its shards one after the other
        self.layout = declaration.part(
            Layout,
            training,
            comm=self.comm,
            workers=1,
            threads=1,
            reduction=self.strategy,
            mesh=self.mesh,
        )
        self.shards.counts = self.layout.counts
        self._assemble(loss, summed_metrics, per_epoch=scheduler_interval == "epoch")
        compare_settings(self.comm, training, {"zero": self.zero})
        self.shards.agree(self.training_state.description)
        self.stepper.parts.agree()

    # --- construction ---

    def _make_shards(self) -> Shards:
        """Returns what runs this rank's shards of a batch."""
        settings = self.settings
        options: dict[str, Any] = {
            "threads": self.threads,
            "deterministic": self.deterministic,
            "tell": self.say,
            "shard_size": settings.shard_size,
            "seed": settings.seed,
            "other_arithmetic": settings.other_arithmetic,
        }
        if settings.zero > 1 and self.comm.size > 1:
            autocast = settings.precision in AUTOCAST_DTYPES
            return Spread(
                self.module,
                self.comm,
                self.strategy,
                zero=settings.zero,
                autocast=autocast,
                **options,
            )
        return Shards(self.module, self.comm, self.strategy, **options)

    def _assemble(self, loss: Any, summed_metrics: dict[str, Any], per_epoch: bool) -> None:
        """Creates the parts of the trainer."""
        settings = self.settings
        parts = OptimizerParts(self.optimizer, self.shards, self.arena, self.comm, self.zero)
        self.loss = nn.CrossEntropyLoss() if loss is None else loss
        is_strict = self.deterministic == "error"
        watch = ForwardWatch(self.module, self.loss, is_strict)
        self.capture = Capture(
            roots=functools.partial(roots_of, self),
            kept=functools.partial(kept_by_trainer, self),
            say=self.say,
            set_by_forward=lambda: watch.set_by_forward,
        )
        self.capture.begin()
        self.stepper = ModuleStepper(
            module=self.module,
            optimizer=self.optimizer,
            loss=loss,
            scheduler=self.scheduler,
            per_epoch=per_epoch,
            metrics=summed_metrics,
            gather=self.gather,
            weight=self.weight,
            shards=self.shards,
            parts=parts,
            forward_watch=watch,
            forward_check=ForwardCheck(self.capture, is_strict, self.say),
            settings=settings,
            scaler=self.scaler,
            comm=self.comm,
            say=self.say,
        )
        self.sharing = BatchSharing(
            self.shards,
            self.mode,
            self.layout,
            lambda form: 1,
            self.say,
            lambda samples, rows: default_shard_size(samples, self.arena.device.is_host),
        )
        self.feed = ModuleFeed(
            self.mode,
            settings.accumulation_steps,
            shards=self.shards,
            sharing=self.sharing,
            seed=settings.seed,
            capture=self.capture,
        )
        self.checks = ModuleChecks(
            self.mode,
            self.stepper,
            first_shard=FirstShard(
                self.shards,
                self.stepper.forward_check,
                run=self.stepper.run_alone,
            ),
            strategy=self.strategy,
            check_every=settings.check_every,
            say=self.say,
            capture=self.capture,
        )
        self.training_state = ModuleState(
            stepper=self.stepper,
            capture=self.capture,
            sharing=self.sharing,
            feed=self.feed,
            strategy=self.strategy,
            deterministic=self.deterministic,
            settings=settings,
            say=self.say,
        )

    # --- a step ---

    def take_step(self, batch: datasets.Batch) -> Step:
        """Takes one step of all ranks over a global batch, or none of them does."""
        self._share_out(batch)
        self.stepper.prepare(self.context.cursor.epoch)
        rate = self.rate
        self.checks.before_step(batch)
        sums = self.stepper.run(batch, self.steps, whole_set=self._epoch_set)
        values = self._epoch_set.exchange()
        self._check_route(len(batch.indices))
        with slot.span("optimizer"), self.shards.modes.held():
            applied = self.stepper.commit(sums)
        if self.scaler.enabled:
            self._adapt_scale(applied, batch, rate)
        elif not applied:
            quantity = "gradient" if math.isfinite(sums.loss) else "loss"
            self.loop.handle_nonfinite(batch, quantity, rate)
        if applied:
            self.numerics.fine()
            self.stepper.advance_scheduler()
        return self._count_step(sums, values, applied, rate)

    def _share_out(self, batch: datasets.Batch) -> None:
        """Decides the shards of a batch, and which ranks have them."""
        samples = len(batch.indices)
        if isinstance(batch.dataset, Shared) and self.sharing.shard_size is None:
            self.sharing.shard_size = batch.dataset.shard_size  # the loader has read such shards
        self.sharing.share_out(samples, self.context.batch_size)
        if self.layout.rebalance and isinstance(batch.dataset, Shared):
            raise ConfigError(
                "[torch] rebalance=True with odyssey.torch.DataLoader, which reads equal shares of "
                "the shards on all ranks; use odyssey.data.DataLoader, or leave it out"
            )
        self.sharing.move_shards(samples, self.steps + 1)

    def _check_route(self, samples: int) -> None:
        if not self.stepper.partial:
            self.sharing.check_route([self.shards.prepared(samples).reduction], samples)

    def _count_step(
        self, sums: BatchSums, values: dict[str, Any], applied: bool, rate: float
    ) -> Step:
        """Counts a step that all ranks have taken or skipped, and returns it."""
        self.stepper.steps += 1
        metrics = self.stepper.measured(sums)
        correct = metrics.get("accuracy", 0.0)
        self.last = Step(sums.loss, correct, rate, applied, None, metrics, values)
        return self.last

    # --- the learning rate ---

    @property
    def rate(self) -> float:
        """The learning rate of the next step, of the optimizer's first group."""
        return self.stepper.rate

    @property
    def base_rate(self) -> float:
        return self.stepper.rate

    def scale_rate(self, factor: float) -> None:
        """Multiplies the learning rates of all groups.

        Raises ConfigError: a scheduler sets them.
        """
        self.stepper.scale_rate(factor)

    # --- evaluation ---

    @contextlib.contextmanager
    def _evaluating(self, loader: Any) -> Iterator[None]:
        """Everything in eval mode, without gradients. Afterwards the modes, generators and the
        position of the loader are as before.
        """
        self.feed.take_size(loader)
        previous_phase = slot.phase("evaluate")
        try:
            self.feed.check_samples(loader, "validation", self.context)
            with (
                in_mode(self.module, False),
                torch.no_grad(),
                self.sharing.for_evaluation(),
                self.feed.without_trace(loader, self.context),
            ):
                yield
        finally:
            slot.phase(previous_phase)

    def evaluate(self, loader: Any) -> Evaluation:
        """Mean loss and metrics over a data set or loader, in eval mode."""
        whole_set = self.whole_set.fresh()

        def sums(
            batch: datasets.Batch, number: int
        ) -> tuple[float, float, dict[str, float], float]:
            batch_sums = self.stepper.run(batch, number, train=False, whole_set=whole_set)
            whole_set.update(whole_set.exchange(), len(batch.indices))
            metrics = self.stepper.measured(batch_sums)
            return batch_sums.loss, metrics.get("accuracy", 0.0), metrics, batch_sums.samples

        with self._evaluating(loader):
            batches = self.feed.evaluated(loader, self.context)
            return self._evaluation(batches, sums, whole_set)

    def predict(self, loader: Any) -> torch.Tensor:
        """Returns what the module gives in eval mode for all samples, in order, whole on every
        rank.

        loader: of batches (x, y), (x,), x or dicts; or a data set; or one tensor of samples (N,
        ...). Returns a tensor (N, ...) of the outputs' dtype, float32 for "bf16" and "fp16": the
        outputs, or their `logits`. Raises ConfigError: they are no tensors, or have several shapes.
        """
        if isinstance(loader, torch.Tensor):
            loader = torch.utils.data.TensorDataset(loader)
        rows: dict[str, np.ndarray] = {}  # by the number of the first
        count = 0
        with self._evaluating(loader):
            batches = self.feed.evaluated(loader, self.context, targets=False)
            for number, batch in enumerate(batches):
                for start, outputs in self.stepper.predict_shards(batch, number):
                    rows[f"{count + start}"] = outputs
                count += len(batch.indices)
        if not count:
            raise ConfigError("[predict] the loader gave no batch; give it data")
        all_rows: dict[str, np.ndarray] = {}
        for rank in range(self.comm.size):
            all_rows.update(spread(self.comm, rows, rank))
        if len(shapes := sorted({a.shape[1:] for a in all_rows.values()})) > 1:
            raise ConfigError(
                f"[predict] outputs have the shapes {shapes}; pad all batches to one length"
            )
        return torch.from_numpy(np.concatenate([all_rows[k] for k in sorted(all_rows, key=int)]))

    # --- weights of which ranks have parts ---

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The module with all of its parameters, for what a program or callback does with them;
        a collective call with zero=3, where ranks have them in parts. What it writes into
        them must be the same on all ranks.
        """
        with self.shards.whole():
            yield self.module
