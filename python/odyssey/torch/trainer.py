"""DistributedTrainer of a PyTorch module: a step is torch's, what is between shards and around
steps is odyssey's.

The state is state.py's, the shards of a batch are shards.py's. docs/pytorch.md says what is held
and what is not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import callbacks
from .. import comm as communication
from .. import data as datasets
from ..base import Run, slot
from ..checkpoints import Evaluation, Step
from ..engine import Layout
from ..errors import ConfigError, check_kind
from ..nn import in_mode
from ..nn.utils import global_norm
from ..parallel import MODES, Mesh, StepOutcome, Strategy
from ..settings import Training
from ..settings import declarations as declaration
from ..train import in_batches, own_steps, spread
from . import huggingface, separable
from . import metrics as metric_sums
from .changing import ModuleSettings
from .data import DataLoader, Shared, batches, part, tree_of
from .generators import Orders, generators
from .shards import BatchSums, Shards, Share
from .state import TrainerState
from .whole_batch_loss import Outputs, WholeBatchLoss
from .zero import Spread

OWN_MODEL_SETTINGS = (
    "num_gpus oversubscribe execution pipeline_schedule bucket_size_mb overlap lr_scaling "
    "conv_algorithm offload"
).split()


class DistributedTrainer(TrainerState):
    """Trains a torch.nn.Module with a torch optimizer on all ranks, with the same bits whatever
    their number.

    Args:
        module: of float32 parameters on the CPU. In training it is used in the modes (train, eval)
            its parts are in.
        optimizer: a torch.optim optimizer over its parameters.
        loss: called as loss(module(x), y) on the samples of a shard; gives their mean, or their sum
            where its `reduction` is "sum". Default nn.CrossEntropyLoss(). Of batches that are
            dicts, as Hugging Face's loaders give them: loss(module(**batch), batch), default the
            output's `loss`.
        scheduler: a torch scheduler of this optimizer; its step() is called here.
        scheduler_interval: "step": after each optimizer step; "epoch": after each epoch.
        metrics: a dict of names with functions of (output, target), or one of "accuracy", "top5",
            "mae", "mse"; or a list of such names (metrics.py); default accuracy, where targets are
            classes. Of batches that are dicts: functions of (output, batch); names compare the
            output's `logits` with batch["labels"].
        shard_size: samples per shard, which torch runs as one batch: part of what is computed.
            Default: 32 from a global batch of 128 on, 16 from 32 on, one shard below.
        threads: of torch, in every rank: part of what is computed, so never the number of cores.
        deterministic: "error": an operation without a deterministic form ends the training, and so
            does a buffer that nothing merges; "warn": it is told, and bits are not promised.
        gather: for a loss that compares samples with each other (contrastive, ranking): it is given
            the outputs and targets of the whole batch, whose shards run twice: for their outputs,
            then for the gradients of these.
        mesh, progress, comm, backend: as for odyssey.DistributedTrainer; replicas only.
        settings: by keyword: seed, precision ("fp32", or "bf16": autocast), clip_norm,
            accumulation_steps, zero (of its parameters alone a rank keeps 1: the optimizer's state,
            2: gradients too, 3: values too), nonfinite, check_every, reduction, servers,
            ranks_per_node, compression, compression_ratio, compression_warmup_steps, powersgd_rank.

    Raises ConfigError: something is not allowed, or cannot be held; the message names it. Or the
    ranks differ.
    """

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
        mesh: Mesh | None = None,
        progress: Any = None,
        comm: communication.Communicator | None = None,
        backend: str = "auto",
        **settings: Any,
    ) -> None:
        values = {"shard_size": shard_size, "threads": threads, "backend": backend, **settings}
        training = declaration.make_settings(Training, values)
        _check_arguments(training, module, optimizer, loss, scheduler, scheduler_interval)
        self._set(training, comm or communication.world(backend), progress)
        self.mesh = (mesh or Mesh()).fit(self.comm.size, 1)
        if self.mesh.pp * self.mesh.tp > 1:
            raise ConfigError(
                f"[torch] the mesh is {self.mesh}; a torch module is trained by replicas: Mesh(dp=)"
            )
        self.strategy = declaration.part(Strategy, training)
        self.module = module
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.per_epoch = scheduler_interval == "epoch"
        self._scheduled = 0  # epochs that a scheduler of epochs has seen
        self._orders = Orders()
        self.gather = gather
        self._looked_at = False
        self.loss = nn.CrossEntropyLoss() if loss is None else loss
        self._own_loss = loss is not None
        self._loss_is_sum = getattr(self.loss, "reduction", "mean") == "sum"
        self.metrics = metric_sums.chosen(metrics)
        self.threads = threads
        self.deterministic = deterministic
        self.zero = training.zero
        self.workers = self.replicas = self.comm.size
        held: dict[str, Any] = {
            "threads": threads,
            "deterministic": deterministic,
            "tell": self.say,
        }
        held.update(shard_size=training.shard_size, seed=training.seed)
        if training.zero > 1 and self.comm.size > 1:
            held.update(zero=training.zero, autocast=training.precision == "bf16")
            self.shards: Shards = Spread(module, self.comm, self.strategy, **held)
        else:
            self.shards = Shards(module, self.comm, self.strategy, **held)
        self._train = self.shards
        self.arena = self.shards.arena
        if not module.training:
            module.train()
        layout_fields = {
            "comm": self.comm,
            "workers": 1,
            "threads": 1,
            "reduction": self.strategy,
            "mesh": self.mesh,
        }
        # a rank runs its shards one after the other
        self.layout = declaration.part(Layout, training, **layout_fields)
        self.shards.counts = self.layout.counts
        self._given = self._description()
        self._built = ModuleSettings(module, self.loss, deterministic == "error")
        self._first = self._trained
        self._compare_settings({"zero": self.zero})
        self.shards.agree(self._given)
        if self.partial:  # some make the state of all parameters at once
            for i, (_, p) in enumerate(self.arena.named[: self.arena.trained]):
                if i not in self.owned:
                    optimizer.state.pop(p, None)

    def take_step(self, batch: datasets.Batch) -> Step:
        self._share_out(len(batch.indices))
        if self.layout.rebalance and isinstance(batch.dataset, Shared):
            raise ConfigError(
                "[torch] rebalance=True with odyssey.torch.DataLoader, which reads equal shares "
                "of the shards on all "
                "ranks; use odyssey.data.DataLoader, or leave it out"
            )
        self._move_shards(len(batch.indices))
        while (
            self.scheduler is not None
            and self.per_epoch
            and self._scheduled < self.context.cursor.epoch
        ):
            self.scheduler.step()  # to the epoch that this step is of
            self._scheduled += 1
        self._built.check_structure()
        self._unfreeze()
        rate = self.rate
        self._watch.batch(batch, self.steps)
        sums = self._run(batch, self.steps)
        if not self.partial:
            self._look_at_route(
                [self.shards.prepared(len(batch.indices)).reduction], len(batch.indices)
            )
        with slot.span("optimizer"):
            step_taken = self._commit(sums)
        if step_taken:
            self.numerics.fine()
            if self.scheduler is not None and not self.per_epoch:
                self.scheduler.step()
        else:
            self._not_finite(batch, "gradient" if math.isfinite(sums.loss) else "loss", rate)
        self.steps += 1
        metrics = self._measured(sums)
        self.last = Step(sums.loss, metrics.get("accuracy", 0.0), rate, step_taken, None, metrics)
        return self.last

    def _measured(self, sums: BatchSums) -> dict[str, float]:
        pairs = zip(self.metrics.items(), sums.metrics, strict=False)
        return {
            name: v for (name, metric), v in pairs if metric is not metric_sums.accuracy or v >= 0
        }

    @property
    def rate(self) -> float:
        """The learning rate of the next step, of the optimizer's first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    base_rate = rate

    def scale_rate(self, factor: float) -> None:
        """Multiplies the learning rates of all groups.

        Raises ConfigError: a scheduler sets them.
        """
        if self.scheduler is not None:
            message = "a scheduler sets the learning rate; use either it or ReduceLROnPlateau"
            raise ConfigError(f"[torch] {message}").on_all_ranks()
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def _run(self, batch: datasets.Batch, step: int, train: bool = True) -> BatchSums:
        """Runs this rank's shards of a batch; the sums over all."""
        n = len(batch.indices)
        outcome = self.shards.begin(n, train)
        joined: WholeBatchLoss | None = None
        is_split = n > (self.shards.shard_size or n)
        with self.shards.phase(), outcome.tried():
            batch = batch.covering(*self.shards.share(n, train))
            if is_split and train and not self._looked_at:
                self._look_at_loss(batch, n)
        if is_split and self.gather:
            joined = self._joined(outcome, batch, step, train)
        with (
            self.shards.phase(train),
            outcome.tried(),
            contextlib.closing(self.shards.run(n, step)) as run,
        ):
            for lo, hi in run if outcome.error is None else ():
                with self._built.looking(), one_line_errors():
                    if joined is None:
                        self._run_shard(*part(batch, lo, hi), hi - lo, train)
                    else:
                        self._run_joined(joined, *part(batch, lo, hi), lo, hi, n, train)
        return self.shards.sums()

    def _run_shard(self, x: Any, y: Any, samples: int, train: bool) -> None:
        weight = 1 if self._loss_is_sum else samples
        with self._autocast():
            out, y = self._output(x, y)
            loss = self._loss_of(out, y)
        if train:
            with slot.span("backward"):
                (loss if weight == 1 else loss * weight).backward()
        self.shards.count(
            float(loss.detach()) * weight, *metric_sums.sums(self.metrics, out, y, samples)
        )

    def _output(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Returns what forward() makes of a shard, and what the loss compares it with."""
        with slot.span("forward"), self._autocast():
            return self._forward(x), x if huggingface.is_whole(x, y) else y

    def _loss_of(self, out: Any, y: Any) -> torch.Tensor:
        loss = (
            self.loss(out, y)
            if self._own_loss or not isinstance(y, dict)
            else huggingface.loss(out)
        )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            kind = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(
                f"[torch] the loss of a shard is {kind}; one number is needed: reduction='mean'"
            )
        return loss

    def _joined(
        self, outcome: StepOutcome, batch: datasets.Batch, step: int, train: bool
    ) -> WholeBatchLoss | None:
        """The loss of all outputs of a batch, on ranks that have a shard; a collective call.

        Raises what a rank's part failed with: on all ranks; nothing was changed.
        """
        outputs = Outputs()
        n = len(batch.indices)
        with (
            self.shards.phase(),
            outcome.tried(),
            contextlib.closing(self.shards.preview(n, step)) as run,
        ):
            for lo, hi in run if outcome.error is None else ():
                with self._built.looking(), one_line_errors():
                    outputs.add(lo, hi, *self._output(*part(batch, lo, hi)))
        everyone = outputs.exchanged(self.comm, outcome.error is not None)
        if everyone is None:
            if train:
                self.shards.settle(False)
            outcome.end(math.nan)
        joined: WholeBatchLoss | None = None
        with (
            self.shards.phase(),
            outcome.tried(),
            self.shards.drawing(step, train),
            self._autocast(),
        ):
            if outputs.shards:
                scale = (1 if self._loss_is_sum else n) if train else None
                joined = WholeBatchLoss(outputs, everyone or [], self._loss_of, scale)
        return joined

    def _run_joined(
        self, joined: WholeBatchLoss, x: Any, y: Any, lo: int, hi: int, samples: int, train: bool
    ) -> None:
        """The second pass of a shard."""
        out, y = self._output(x, y)
        if train:
            with slot.span("backward"):
                joined.backward(lo, hi, out)
        part_of = (hi - lo) / samples if self._loss_is_sum else hi - lo
        self.shards.count(joined.loss * part_of, *metric_sums.sums(self.metrics, out, y, hi - lo))

    def _look_at_loss(self, batch: datasets.Batch, n: int) -> None:
        """Says on rank 0 if the loss is no mean over samples, by its first shard; shards would
        change its meaning.
        """
        size = self.shards.shard_size or n
        local_range = self.shards.share(n, True)
        # shards may be anywhere: this rank may not have read the first one
        if local_range[0] or local_range[1] < size:
            return
        self._looked_at = True
        if self.comm.rank or self.gather or size < 2:
            return
        owners = [m for m in (self.module, self.loss) if isinstance(m, nn.Module)]
        both = tree_of(part(batch, 0, size))
        loss = lambda both: self._loss_of(*self._output(*both))  # noqa: E731
        kind, values = separable.looked_at(owners, loss, both, not self.partial)
        if kind not in ("neither", "sum") or (kind == "sum" and self._loss_is_sum):
            return
        full, *halves = (f"{value:.5g}" for value in values)
        line = f"({full} of the {size} samples of a shard, {' and '.join(halves)} of their halves"
        if kind == "sum":
            line = (
                f"a sum over samples {line}) and is taken as their mean: divide it by them, "
                "or set its `reduction`"
            )
        else:
            line = (
                f"no mean over samples {line}, and no weights make one of the other). In shards "
                f"of {size} it is "
                f"another loss than that of the batch of {n}: give shard_size={n}, where one "
                "rank has the batch, or "
                "gather=True, where all have its outputs (docs/pytorch.md, losses that look "
                "across the batch)"
            )
        self.say(f"[torch] the loss is {line}")

    def _forward(self, x: Any) -> Any:
        if isinstance(x, dict):
            return self.module(**x)
        return self.module(*x) if isinstance(x, tuple) else self.module(x)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return (
            torch.autocast("cpu", dtype=torch.bfloat16)
            if self.precision == "bf16"
            else contextlib.nullcontext()
        )

    def _commit(self, sums: BatchSums) -> bool:
        """Updates the parameters from the mean gradient, unless it is not finite: then nothing
        is changed.
        """
        gradient = self.shards.gradient
        finite = math.isfinite(sums.loss) and self._finite(gradient)
        if finite:
            if self.clip_norm is not None:
                self.grad_norm = norm = self._norm()
                if math.isfinite(norm) and norm > self.clip_norm:
                    gradient.mul_(self.clip_norm / norm)
            held = dict(zip(self.arena.held, self.arena.gradients, strict=True))
            for i, (_, p) in enumerate(self.arena.named[: self.arena.trained]):
                p.grad = held[i] if sums.reached[i] and i in self.owned else None
            with self.shards.holding():
                self.optimizer.step()
            if self.zero in (1, 2) and self.comm.size > 1:
                self.comm.all_gather_v(self.arena.params, self.ranges)
        self.shards.settle(finite)
        return finite

    def _finite(self, gradient: torch.Tensor) -> bool:
        """Says whether all gradients are finite, whoever has which; a collective call with zero
        2 and 3.
        """
        local_finite = not gradient.numel() or all(
            math.isfinite(float(v)) for v in torch.aminmax(gradient)
        )
        return (
            bool(self.comm.all_reduce(np.array([local_finite], np.int32), "min")[0])
            if self.partial
            else local_finite
        )

    def _norm(self) -> float:
        """The norm of the mean gradient, the same bits whoever has which part; a collective call
        with zero 2 and 3.
        """
        gradient = self.shards.gradient

        def over(op: str) -> Callable[[np.ndarray], np.ndarray]:
            return lambda a: self.comm.all_reduce(a, op) if self.partial else a

        local_runs = [(gradient.data_ptr(), gradient.numel())] if gradient.numel() else []
        return global_norm(local_runs, over("max"), over("sum"))

    def gradient_norm(self) -> float | None:
        return self.grad_norm if self.clip_norm is not None else self._norm()

    def traffic(self) -> tuple[int, int, int]:
        return self.shards.traffic()

    def _begin_fit(
        self, context: callbacks.Context, compared_data: datasets.ArrayDataset | None
    ) -> None:
        if torch.is_autocast_enabled("cpu"):
            raise ConfigError(
                "[torch] fit() within torch.autocast would keep old weights; use precision='bf16'"
            )
        if torch.get_num_threads() != self.threads:
            raise ConfigError(
                f"[torch] torch has {torch.get_num_threads()} threads now, the trainer was made "
                f"with {self.threads}; "
                "give it threads=, and leave torch.set_num_threads() out"
            )
        if self.strategy.compression in ("topk", "powersgd") and (
            context.saving.folder or Run.current()
        ):
            raise ConfigError(
                f"[torch] compression={self.strategy.compression!r} keeps on each rank what it "
                "has not sent, which "
                "checkpoints of torch modules do not hold; use compression='bf16', or no "
                "checkpoints"
            )
        self._built.remember()
        self._watch.begin(compared_data, self.say if context.saving.nondeterministic else None)

    def _take_size(self, loader: Any) -> None:
        """The shard size of a loader that was given one is the trainer's, unless that has another.

        ConfigError.
        """
        if isinstance(loader, DataLoader) and loader.fixed_size:
            loader.follow(self.shard_size or loader.shard_size)
            self.shard_size = loader.shard_size

    def _compare_data(self, loader: Any, val_loader: Any, context: callbacks.Context) -> None:
        self._take_size(loader)
        self._take_size(val_loader)
        super()._compare_data(loader, val_loader, context)
        self._orders = Orders(*(None if own_steps(one) else one for one in (loader, val_loader)))

    def _batches(self, loader: Any, epoch: int) -> Iterator[datasets.Batch]:
        self._orders.begin(epoch)
        return batches(loader, epoch, self.seed, self.accumulation_steps)

    def _part(self, training: bool) -> Callable[[int], tuple[int, int]] | None:
        return Share(self.shards, training)

    def _repeats(self, sampler: Any) -> bool:
        """Torch's own draw from its generator, which each epoch is seeded anew, or from theirs,
        which is put back.
        """
        repeatable = type(sampler).__module__ == "torch.utils.data.sampler" or any(
            generators(sampler)
        )
        return repeatable or super()._repeats(sampler)

    def _evaluated(self, loader: Any, targets: bool = True) -> Iterator[datasets.Batch]:
        """A data set or loader as batches whose shards are known; of our own loaders this rank
        reads its samples.
        """
        if isinstance(loader, torch.utils.data.Dataset):
            loader = DataLoader(loader, batch_size=256, comm=self.comm)
        loader = in_batches(loader)
        self._take_size(loader)
        if own_steps(loader) and len(loader.dataset):
            self._share_out(min(loader.batch_size, len(loader.dataset)))
            if isinstance(loader, DataLoader):
                # samples that are drawn are the same each time, also after a resume
                loader.set_epoch(0)
            yield from loader.steps(part=self._part(training=False))
            return
        for batch in batches(loader, 0, self.seed, 1, targets):
            self._share_out(len(batch.indices))
            yield batch

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Everything in eval mode, without gradients; the modes are what they were afterwards."""
        previous_phase = slot.phase("evaluate")
        try:
            with in_mode(self.module, False), torch.no_grad():
                yield
        finally:
            slot.phase(previous_phase)

    def evaluate(self, loader: Any) -> Evaluation:
        """Mean loss and metrics over a data set or loader, in eval mode."""

        def sums(
            batch: datasets.Batch, number: int
        ) -> tuple[float, float, dict[str, float], float]:
            batch_sums = self._run(batch, number, train=False)
            metrics = self._measured(batch_sums)
            return batch_sums.loss, metrics.get("accuracy", 0.0), metrics, batch_sums.samples

        with self._evaluating():
            return self._evaluation(self._evaluated(loader), sums)

    def predict(self, loader: Any) -> torch.Tensor:
        """Returns what the module gives in eval mode for all samples, in order, whole on every
        rank.

        loader: of batches (x, y), (x,), x or dicts; or a data set; or one tensor of samples (N,
        ...). Returns a tensor (N, ...) of the outputs' dtype, float32 for "bf16": the outputs, or
        their `logits`. Raises ConfigError: they are no tensors, or have several shapes.
        """
        if isinstance(loader, torch.Tensor):
            loader = torch.utils.data.TensorDataset(loader)
        rows: dict[str, np.ndarray] = {}  # by the number of the first
        count = 0
        with self._evaluating():
            for number, batch in enumerate(self._evaluated(loader, targets=False)):
                shards = self.shards(n := len(batch.indices), number, train=False)
                with self.shards.phase(), contextlib.closing(shards):
                    for lo, hi in shards:
                        rows[f"{count + lo}"] = self._predicted(
                            part(batch, lo, hi, targets=False)[0], hi - lo
                        )
                count += n
        if not count:
            raise ConfigError("[predict] the loader gave no batch; give it data")
        all_rows = {
            k: v for rank in range(self.comm.size) for k, v in spread(self.comm, rows, rank).items()
        }
        if len(shapes := sorted({a.shape[1:] for a in all_rows.values()})) > 1:
            raise ConfigError(
                f"[predict] outputs have the shapes {shapes}; pad all batches to one length"
            )
        return torch.from_numpy(np.concatenate([all_rows[k] for k in sorted(all_rows, key=int)]))

    def _predicted(self, x: Any, samples: int) -> np.ndarray:
        with self._autocast():
            out = huggingface.predictions(self._forward(x))
        if not isinstance(out, torch.Tensor) or out.shape[:1] != (samples,):
            kind = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
            raise ConfigError(
                f"[torch] forward() of {samples} samples gives {kind}; give a tensor "
                f"({samples}, ...)"
            )
        return (out.float() if out.dtype == torch.bfloat16 else out).numpy()


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """An operation without a deterministic form, and BatchNorm of a shard of one sample, are
    errors of one line.
    """
    try:
        yield
    except ValueError as problem:
        if "Expected more than 1 value per channel" not in str(problem):
            raise
        raise ConfigError(
            "[torch] BatchNorm has one sample, as the last shard of a batch has one; use another "
            "batch size or "
            "shard_size, or drop_last=True in the loader"
        ) from problem
    except RuntimeError as problem:
        if "use_deterministic_algorithms" not in str(problem):
            raise
        message = str(problem).partition(", but you set")[0]
        raise ConfigError(
            f"[torch] {message}; use another operation, or deterministic='warn'"
        ) from problem


def _check_arguments(
    training: Training, module: Any, optimizer: Any, loss: Any, scheduler: Any, interval: str
) -> None:
    """ConfigError for what cannot be trained with, by name."""
    for label, argument, kind in (
        ("module", module, nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
    ):
        check_kind("torch", label, argument, kind, "torch's ")
    name = type(optimizer).__name__
    module_ids = {id(p) for p in module.parameters()}
    defaults = {f.name: f.default for f in dataclasses.fields(Training)}
    key = next((n for n in OWN_MODEL_SETTINGS if getattr(training, n) != defaults[n]), "")
    optim = torch.optim
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    groups = optimizer.param_groups
    foreign_scheduler = (
        scheduler is not None and getattr(scheduler, "optimizer", None) is not optimizer
    )
    foreign_parameters = any(id(p) not in module_ids for group in groups for p in group["params"])
    for wrong, says in (
        (
            isinstance(optimizer, optim.LBFGS),
            "LBFGS runs the model several times in a step; use SGD or AdamW",
        ),
        (
            isinstance(optimizer, optim.SparseAdam),
            "SparseAdam needs sparse gradients, which no tree adds; use Adam",
        ),
        (
            foreign_parameters,
            f"{name} has parameters that are not the module's; make it of module.parameters()",
        ),
        (
            any(isinstance(group["lr"], torch.Tensor) for group in groups),
            f"{name}'s lr is a tensor; give a number",
        ),
        (
            isinstance(scheduler, plateau),
            "ReduceLROnPlateau needs a figure at each step(); use another scheduler",
        ),
        (
            foreign_scheduler,
            f"scheduler is {type(scheduler).__name__}; give a torch scheduler of this optimizer",
        ),
        (
            loss is not None and (isinstance(loss, type) or not callable(loss)),
            f"loss is {loss!r}; give a function of (output, target) or an object such as "
            "nn.CrossEntropyLoss()",
        ),
        (
            interval not in ("step", "epoch"),
            f"scheduler_interval is {interval!r}; choose from step, epoch",
        ),
        (
            key,
            f"{key}={getattr(training, key, None)!r} is a setting of our own models; leave it out",
        ),
        (
            training.precision not in ("fp32", "bf16"),
            f"precision is {training.precision!r}; use 'fp32', or 'bf16': autocast",
        ),
        (
            training.device == "gpu",
            "device is 'gpu', and torch modules are trained on CPUs; use device='cpu'",
        ),
        (
            training.zero > 1 and (training.reduction != "tree" or training.compression),
            f"zero={training.zero} has sums of its own along the tree; leave reduction and "
            "compression out, or use zero=1",
        ),
        (
            training.zero > 1 and training.rebalance,
            f"zero={training.zero} takes shards in rounds of all ranks; rebalance=False",
        ),
        (
            training.zero == 3
            and any(
                type(m).__name__ == "OptimizedModule" or m._compiled_call_impl
                for m in module.modules()
            ),
            "zero=3 looks at each operation, which torch.compile joins; use zero=2, or the "
            "module as it is",
        ),
        (
            training.zero and not type(optimizer).__module__.startswith("torch.optim"),
            f"zero={training.zero} with {name}: only torch.optim's optimizers are known to go by "
            "parameter; use zero=0",
        ),
        (
            training.reduction in MODES,
            f"reduction={training.reduction!r}: ranks take every step together here; use 'tree'",
        ),
    ):
        if wrong:
            raise ConfigError(f"[torch] {says}")
