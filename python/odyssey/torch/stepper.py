"""The arithmetic of a step of a torch module: shards forward and backward, and the update."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .. import GradScaler
from .. import data as datasets
from ..base import slot
from ..capture import mark
from ..comm import Communicator
from ..core import random_scopes
from ..errors import ConfigError
from ..parallel import StepOutcome
from ..settings import Training
from ..train import Stepper, repeats_itself
from . import huggingface, separable
from . import metrics as metric_sums
from .changing import ForwardCheck, ForwardWatch
from .data import part, tree_of
from .device import host_array
from .first_shard import gathered_prints
from .optimizer_parts import OptimizerParts
from .shards import BatchSums, Shards, is_compiled, weight_of
from .whole_batch_loss import Outputs, WholeBatchLoss

#: What products are rounded to in these precisions.
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NOTHING = contextlib.nullcontext()  # may be entered again and again


class ModuleStepper(Stepper):
    """Computes steps of a torch module: `run` adds up losses and gradients, `commit` updates the
    parameters.

    Args:
        module, optimizer: the module that is trained, and its optimizer.
        loss: called as loss(output, target); None: cross-entropy, or the output's own loss.
        scheduler: a torch scheduler, or None.
        per_epoch: True if its step() is called once an epoch, not once a step.
        metrics: functions of (output, target) by name.
        gather: True if the loss needs the outputs of the whole batch.
        weight: called as weight(output, target) for the weight of a shard; None: its samples, or
            the labels that a Hugging Face model counts.
        shards: runs the shards of a batch.
        parts: which parameters this rank updates.
        forward_watch: notes the attributes that forward() sets.
        forward_check: finds what forward() and the loss change and read.
        settings: of the trainer.
        scaler: the loss scale of precision="fp16".
        comm: all ranks.
        say: reports a line to the user.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Any,
        scheduler: Any,
        per_epoch: bool,
        metrics: dict[str, Any],
        gather: bool,
        weight: Callable[[Any, Any], Any] | None,
        shards: Shards,
        parts: OptimizerParts,
        forward_watch: ForwardWatch,
        forward_check: ForwardCheck,
        settings: Training,
        scaler: GradScaler,
        comm: Communicator,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(settings.clip_norm, scaler, say)
        self.module = module
        self.optimizer = optimizer
        self.loss = nn.CrossEntropyLoss() if loss is None else loss
        self._loss_is_given = loss is not None
        self._loss_is_sum = getattr(self.loss, "reduction", "mean") == "sum"
        self.scheduler = scheduler
        self.per_epoch = per_epoch
        self.scheduled = 0  # epochs for which the scheduler's step() was called
        self.metrics = metrics
        self.gather = gather
        self.weight = weight
        self._count_labels = huggingface.label_counter(module)
        self.shards = shards
        self.arena = shards.arena
        self.parts = parts
        self.forward_watch = forward_watch
        self.forward_check = forward_check
        self.precision = settings.precision
        self.zero = settings.zero
        self.comm = comm
        self._loss_checked = False
        self._evaluation_checked = False
        self._metrics_checked = False
        self._whole_set: metric_sums.ModuleWholeSet | None = None  # of the open batch

    @property
    def partial(self) -> bool:
        """True if each rank has the gradients of its own parameters only."""
        return self.zero > 1 and self.comm.size > 1

    @property
    def _parts_of_update(self) -> bool:
        """True if each rank updates other parameters."""
        return self.zero > 0 and self.comm.size > 1

    # --- the learning rate ---

    @property
    def rate(self) -> float:
        """The learning rate of the next step, of the optimizer's first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def scale_rate(self, factor: float) -> None:
        """Multiplies the learning rates of all groups.

        Raises ConfigError: a scheduler sets them.
        """
        if self.scheduler is not None:
            message = "a scheduler sets the learning rate; use either it or ReduceLROnPlateau"
            raise ConfigError(f"[torch] {message}").on_all_ranks()
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    # --- a step ---

    def prepare(self, epoch: int) -> None:
        """Applies what callbacks have changed, and the scheduler's epochs, before a step."""
        self.parts.normalize_groups()
        while self.scheduler is not None and self.per_epoch and self.scheduled < epoch:
            with self.shards.scope(self.scheduler, "scheduler of epochs", self.scheduled):
                self.scheduler.step()
            self.scheduled += 1
            self.parts.normalize_groups()
        self.forward_watch.check_structure()
        self.parts.unfreeze()

    def advance_scheduler(self) -> None:
        """Steps a scheduler of steps, after an optimizer step."""
        if self.scheduler is not None and not self.per_epoch:
            with self.shards.scope(self.scheduler, "scheduler", self.steps):
                self.scheduler.step()

    def run(
        self,
        batch: datasets.Batch,
        step: int,
        train: bool = True,
        whole_set: metric_sums.ModuleWholeSet | None = None,
    ) -> BatchSums:
        """Runs this rank's shards of a batch, and returns the sums over the shards of all ranks.

        A collective call. If a rank's part fails, all ranks raise its error.

        whole_set: collects what its metrics need of the shards.
        """
        self._whole_set = whole_set
        if whole_set is not None:
            whole_set.begin()
        samples = len(batch.indices)
        outcome = self.shards.begin(samples, train)
        joined: WholeBatchLoss | None = None
        is_split = samples > (self.shards.shard_size or samples)
        looks_at_forward = train and self.forward_check.is_due
        last_shard: tuple[Any, Any, int] | None = None
        if looks_at_forward:
            self.forward_check.begin()
        with self.shards.phase(), outcome.tried():
            batch = batch.covering(*self.shards.share(samples, train))
            if is_split and train and not self._loss_checked:
                with self.shards.modes.held(), self.forward_check.undone():
                    self._check_loss(batch, samples)
        if is_split and self.gather:
            joined = self._join_outputs(outcome, batch, step, train)
        with (
            self.shards.phase(train),
            outcome.tried(),
            contextlib.closing(self.shards.run(samples, step)) as shard_ranges,
        ):
            # After an error this rank runs no shard. `sums` reports the error to all ranks.
            for lo, hi in shard_ranges if outcome.error is None else ():
                with self.forward_watch.looking(), _one_line_errors, self._watch_shard():
                    x, y = self._read_shard(batch, lo, hi)
                    if joined is None:
                        self._run_shard(x, y, lo, hi - lo, train, is_split)
                    else:
                        self._run_second_pass(joined, x, y, lo, hi, train)
                last_shard = x, y, hi - lo
                if looks_at_forward and self.forward_check.is_due and not self.partial:
                    self._check_forward(*last_shard, step)
                if not train:
                    self._check_evaluation(lambda x=x, y=y: self._results_of(x, y), step)
            self._read_device(joined)
        if looks_at_forward and self.partial:
            self._check_forward_apart(outcome, last_shard, step)
        if train:
            self.forward_check.is_due = False  # also on a rank without a shard
            self.shards.coming_sizes = set()
        sums = self.shards.sums()
        if train and self.shards.draws.learn(sums.drawn):
            self.shards.settle(step_taken=False)
            return self.run(batch, step, whole_set=whole_set)
        return sums

    def _read_device(self, joined: WholeBatchLoss | None) -> None:
        """Copies what the shards that were run have left on the device, and checks it."""
        if joined is not None:
            joined.findings.read()
        if self._whole_set is not None:
            self._whole_set.bring()

    def _read_shard(
        self, batch: datasets.Batch, lo: int, hi: int, targets: bool = True
    ) -> tuple[Any, Any]:
        """Returns inputs and targets of samples lo to hi - 1 of a batch, on the device."""
        device = self.arena.device
        return device.bring(part(batch, lo, hi, targets, device))

    def _watch_shard(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that watches what BatchNorm gets in a shard of the first step."""
        coming_sizes = self.shards.coming_sizes  # empty after the first step
        size = self.shards.shard_size
        if not coming_sizes or not size:
            return _NOTHING
        has_shard_of_one = any((samples % size or size) == 1 for samples in coming_sizes)
        # The code of torch.compile doesn't call the hooks of the layers in it.
        if has_shard_of_one and not is_compiled(self.module):
            return _refuse_one_value_per_sample(self.module)
        return _NOTHING

    def _check_forward(self, x: Any, y: Any, samples: int, step: int) -> None:
        """Looks at what the shard that was just run has changed; see `ForwardCheck.end`."""

        fixed = [tensor for _, tensor in (*self.shards.norms.fixed_buffers, *self.arena.named)]
        versions = [tensor._version for tensor in fixed]

        def compute() -> list[Any]:
            # such results say nothing, and the end of the shards raises an error that names it
            if [tensor._version for tensor in fixed] != versions:
                raise ConfigError("[torch] forward() changes a parameter or buffer")
            with self.shards.drawing(step, train=True), self.shards.norms.unchanged():
                with gathered_prints(self.arena) as prints:
                    results = self.run_alone(x, y, samples)
                return [*results, *prints]

        self.forward_check.end(compute)

    def _check_forward_apart(
        self, outcome: StepOutcome, shard: tuple[Any, Any, int] | None, step: int
    ) -> None:
        """Checks a shard as `_check_forward` does, after the shards of a step; a collective call.

        While the shards run, backward() of one rank would wait for the gradients of the others.

        shard: inputs, targets and the number of samples; None on a rank without a shard.
        """
        with self.shards.phase(), self.shards.modes.held(), outcome.tried():
            if shard is not None and outcome.error is None:
                self._check_forward(*shard, step)
        failed = self.comm.all_gather(np.array([outcome.error is not None], np.int32))
        if failed.any():
            self.shards.settle(step_taken=False)
            outcome.end(math.nan)  # raises the error

    def _results_of(self, x: Any, y: Any) -> list[Any]:
        """Returns the loss and the outputs of a shard, without gradients."""
        with torch.no_grad(), self._enter_autocast():
            out, target = self._compute_output(x, y)
            loss = self._compute_loss(out, target)
        return [loss, *_tensors_in(out)]

    def _check_evaluation(self, compute: Callable[[], list[Any]], step: int) -> None:
        """Checks, in the first evaluation or prediction, that a shard has the same results again.

        compute: returns the results of a shard.

        Raises ConfigError: its results depend on how often forward() was called.
        """
        # ranks that are threads would draw at the same time
        if self._evaluation_checked or self.comm.in_threads or not self.forward_check.strict:
            return
        self._evaluation_checked = True

        def compute_marks() -> list[str]:
            with self.shards.drawing(step, train=False):
                return [mark(value) for value in compute()]

        try:
            with self.forward_check.undone():
                repeats = repeats_itself(compute_marks, compute_marks())
        except Exception:  # if it is no accident, the next shard raises it too
            return
        if not repeats:
            raise ConfigError(
                "[torch] forward() or the loss has other results in evaluation when it computes "
                "the same samples again, for example because it draws from a generator that it "
                "holds, or counts its calls. How often a rank calls it depends on the layout; draw "
                "from torch, numpy.random or random, which odyssey seeds (docs/state.md, what is "
                "random), or use deterministic='warn'"
            )

    def run_alone(self, x: Any, y: Any, samples: int) -> list[torch.Tensor]:
        """Runs forward and backward of a shard that counts nowhere.

        Returns the loss and the outputs.
        """
        with self._enter_autocast():
            out, target = self._compute_output(x, y)
            loss = self._compute_loss(out, target)
            if self._loss_is_sum:
                loss = loss / samples
        loss.backward()
        return [one.detach() for one in (loss, *_tensors_in(out))]

    def _run_shard(
        self, x: Any, y: Any, lo: int, samples: int, train: bool, is_split: bool
    ) -> None:
        """Runs forward and, if `train`, backward of a shard, and counts its loss and metrics.

        lo: the first sample of the shard.
        """
        with self._enter_autocast():
            out, y = self._compute_output(x, y)
            loss = self._compute_loss(out, y)
            if self._loss_is_sum:
                loss = loss / samples
        weight = self._compute_weight(out, y, samples) if is_split else float(samples)
        self.shards.weigh(weight, reaches=False)
        if train and (isinstance(weight, torch.Tensor) or weight):
            with slot.span("backward"):
                self._scale(loss).backward()
        self.shards.count(
            self.arena.device.read(loss.detach()), *self._measure(out, y, lo, samples)
        )

    def _scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss times the loss scale of fp16.

        The product is float32, because a loss of 16 bits would overflow.
        """
        return loss.float() * self.scaler.value if self.scaler.enabled else loss

    def _measure(self, out: Any, y: Any, lo: int, samples: int) -> list[float | torch.Tensor]:
        """Returns the sums of the metrics over a shard, and collects what others need of it.

        The first shard of the first batch shows whether each metric is a mean.
        """
        if not lo and not self._metrics_checked:
            self._metrics_checked = True
            repeats = self.forward_check.strict and not self.comm.in_threads
            metric_sums.check(self.metrics, out, y, samples, repeats)
        if self._whole_set:
            with torch.no_grad():
                self._whole_set.collect(lo, *huggingface.compared(out, y))
        return metric_sums.sums(self.metrics, out, y, samples, self.arena.device)

    def _compute_output(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Returns the output of forward() for a shard, and the target for the loss."""
        with slot.span("forward"), self._enter_autocast():
            target = x if huggingface.is_whole(x, y) else y
            return self._call_module(x), target

    def _compute_loss(self, out: Any, y: Any) -> torch.Tensor:
        """Returns the loss of an output and its target.

        Raises ConfigError: it isn't one number.
        """
        loss = (
            self.loss(out, y)
            if self._loss_is_given or not isinstance(y, dict)
            else huggingface.loss(out)
        )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            kind = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(
                f"[torch] the loss of a shard is {kind}; one number is needed: reduction='mean'"
            )
        return loss

    def _find_weight(self, y: Any) -> Callable[[Any, Any], Any] | None:
        """Returns the function that weighs shards with such targets; None: by their samples."""
        is_own_loss = isinstance(y, dict) and not self._loss_is_given
        return self._count_labels if self.weight is None and is_own_loss else self.weight

    def _compute_weight(self, out: Any, y: Any, samples: int) -> float | torch.Tensor:
        """Returns the weight of a shard among those of its batch, as `weight_of` does.

        Raises ConfigError: the user's function returns no number, or one below 0.
        """
        weigh = self._find_weight(y)
        if weigh is None:
            return float(samples)
        with torch.no_grad():
            weight = weigh(out, y)
        return weight_of(weight, self.arena.device)

    def _join_outputs(
        self, outcome: StepOutcome, batch: datasets.Batch, step: int, train: bool
    ) -> WholeBatchLoss | None:
        """Computes the outputs of a batch in a first pass, and their loss; a collective call.

        Returns the loss, or None on a rank without a shard. If a rank's part fails, all ranks raise
        its error, and nothing was changed.
        """
        outputs = Outputs()
        samples = len(batch.indices)
        with (
            self.shards.phase(),
            outcome.tried(),
            contextlib.closing(self.shards.preview(samples, step)) as shard_ranges,
        ):
            for lo, hi in shard_ranges if outcome.error is None else ():
                with self.forward_watch.looking(), _one_line_errors, self._watch_shard():
                    x, y = self._read_shard(batch, lo, hi)
                    outputs.add(lo, hi, *self._compute_output(x, y))
        all_shards = outputs.exchanged(self.comm, failed=outcome.error is not None)
        if all_shards is None:
            if train:
                self.shards.settle(step_taken=False)
            outcome.end(math.nan)  # raises the error
        joined: WholeBatchLoss | None = None
        with (
            self.shards.phase(),
            self.shards.modes.held(),
            outcome.tried(),
            self.shards.drawing(step, train),
            self._enter_autocast(),
        ):
            if outputs.shards:
                joined = WholeBatchLoss(
                    outputs,
                    all_shards or [],
                    self._compute_loss,
                    device=self.arena.device,
                    summands=samples if self._loss_is_sum else 1,
                    train=train,
                    scale=self.scaler.value,
                )
        return joined

    def _run_second_pass(
        self, joined: WholeBatchLoss, x: Any, y: Any, lo: int, hi: int, train: bool
    ) -> None:
        """Runs a shard again, with gradients of the loss of the whole batch, and counts that loss.

        lo, hi: the first sample of the shard, and one past the last.
        """
        out, y = self._compute_output(x, y)
        if train:
            with slot.span("backward"):
                joined.backward(lo, hi, out)
        self.shards.count(joined.loss, *self._measure(out, y, lo, hi - lo))

    def _check_loss(self, batch: datasets.Batch, samples: int) -> None:
        """Reports to the user if the loss is not a mean over samples with the weights of shards:
        then shards change its value.

        Rank 0 checks the first shard that it has read from its start, once.
        """
        size = self.shards.shard_size or samples
        first, stop = self.shards.share(samples, train=True)
        # shards may be anywhere: this rank may not have read the first one
        if first or stop < size:
            return
        self._loss_checked = True
        if self.comm.rank or self.gather or size < 2:
            return
        owners = [m for m in (self.module, self.loss) if isinstance(m, nn.Module)]
        first_shard = tree_of(self._read_shard(batch, 0, size))

        def compute_loss(shard: tuple[Any, Any]) -> torch.Tensor:
            x, y = shard
            return self._compute_loss(*self._compute_output(x, y))

        def compute_weight(shard: tuple[Any, Any]) -> float:
            x, y = shard
            with torch.no_grad():
                out, target = self._compute_output(x, y)
            return float(self._compute_weight(out, target, samples=0))

        x, y = first_shard
        weigh = self._find_weight(x if huggingface.is_whole(x, y) else y)
        weight = None if weigh is None else compute_weight
        copies = not self.partial  # parameters that this rank has only in parts are not restored
        kind, values = separable.looked_at(owners, compute_loss, first_shard, copies, weight)
        if kind not in ("neither", "sum", "weighted") or (kind == "sum" and self._loss_is_sum):
            return
        full, *halves = (f"{value:.5g}" for value in values)
        line = f"({full} of the {size} samples of a shard, {' and '.join(halves)} of their halves"
        if kind == "sum":
            line = (
                f"a sum over samples {line}) and is taken as their mean: divide it by them, "
                "or set its `reduction`"
            )
        elif kind == "weighted":
            counted = "their samples"
            if weigh is not None:
                counted = "their labels" if self.weight is None else "what weight= returns"
            line = (
                f"a weighted mean {line}), as with ignore_index, padding or class weights, and "
                f"shards are weighted by {counted}. In shards of {size} it is another loss than "
                f"that of the batch of {samples}: use weight=lambda output, target: what the loss "
                "divides its sum by, for example (target != -100).sum(), or "
                f"shard_size={samples} (docs/pytorch.md, means over tokens)"
            )
        else:
            line = (
                f"no mean over samples {line}, and no weights make one of the other). In shards of "
                f"{size} it is another loss than that of the batch of {samples}: give "
                f"shard_size={samples}, "
                "where one rank has the batch, or gather=True, where all have its outputs "
                "(docs/pytorch.md, losses that look across the batch)"
            )
        self.say(f"[torch] the loss is {line}")

    def _call_module(self, x: Any) -> Any:
        """Returns forward() of a dict of named inputs, of a tuple of inputs, or of one input."""
        if isinstance(x, dict):
            return self.module(**x)
        return self.module(*x) if isinstance(x, tuple) else self.module(x)

    def _enter_autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = AUTOCAST_DTYPES.get(self.precision)
        if dtype is None:
            return _NOTHING
        return torch.autocast(self.arena.device.type, dtype=dtype)

    def commit(self, sums: BatchSums) -> bool:
        """Updates the parameters from the mean gradient, if loss and gradient are finite.

        Returns whether they are. If not, parameters and buffers stay as they were. A collective
        call with ZeRO.
        """
        gradient = self.shards.gradient
        finite = math.isfinite(sums.loss) and self._has_finite_gradients(gradient)
        if finite:
            if self.scaler.enabled:
                # a power of two, so no digit changes; ranks with parts of it have agreed
                gradient.mul_(1 / self.scaler.value)
            if self.clip_norm is not None:
                self.grad_norm = norm = self._compute_norm()
                if math.isfinite(norm) and norm > self.clip_norm:
                    gradient.mul_(self.clip_norm / norm)
            gradients = dict(zip(self.arena.held, self.arena.gradients, strict=True))
            for i, (_, parameter) in enumerate(self.arena.named[: self.arena.trained]):
                is_updated = sums.reached[i] and i in self.parts.owned
                parameter.grad = gradients[i] if is_updated else None
            with (
                self.shards.holding(),
                self.shards.scope(self.optimizer, "optimizer", self.steps),
            ):
                marks = random_scopes.marks() if self._parts_of_update else None
                self.optimizer.step()
                if marks is not None and random_scopes.marks() != marks:
                    raise ConfigError(
                        f"[torch] the optimizer draws random numbers, and with zero={self.zero} "
                        "each rank updates other parameters; use zero=0"
                    )
            if self.zero in (1, 2) and self.comm.size > 1:
                self.shards.moves.all_gather(self.arena.params, self.parts.ranges)
        self.shards.settle(finite)
        return finite

    def _has_finite_gradients(self, gradient: torch.Tensor) -> bool:
        """Returns whether the gradients on all ranks are finite; collective with zero 2 and 3.

        gradient: the part that this rank has.
        """
        # the extremes of a tensor with a NaN are NaN
        extremes = torch.stack(torch.aminmax(gradient)).tolist() if gradient.numel() else []
        is_finite = all(map(math.isfinite, extremes))
        if not self.partial:
            return is_finite
        return bool(self.comm.all_reduce(np.array([is_finite], np.int32), "min")[0])

    def _compute_norm(self) -> float:
        """Returns the norm of the mean gradient; collective with zero 2 and 3.

        It has the same bits however the gradient is distributed over ranks.
        """

        def combine_by(op: str) -> Callable[[np.ndarray], np.ndarray]:
            return lambda a: self.comm.all_reduce(a, op) if self.partial else a

        return self.arena.device.norm(self.shards.gradient, combine_by)

    def measured(self, sums: BatchSums) -> dict[str, float]:
        """Returns the metrics of a step by name, without an accuracy that counted no sample."""
        pairs = zip(self.metrics.items(), sums.metrics, strict=False)
        return {
            name: value
            for (name, metric), value in pairs
            if metric is not metric_sums.accuracy or value >= 0
        }

    def gradient_norm(self) -> float | None:
        """Returns the norm of the last step's mean gradient; collective with zero 2 and 3."""
        return self.grad_norm if self.clip_norm is not None else self._compute_norm()

    def traffic(self) -> tuple[int, int, int]:
        """Returns bytes that this rank has sent so far, uncompressed, and to other machines."""
        return self.shards.traffic()

    # --- prediction ---

    def predict_shards(
        self, batch: datasets.Batch, number: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (first sample, outputs) of this rank's shards of a batch.

        number: of the batch, for the seeds of its random numbers.
        """
        shard_ranges = self.shards(len(batch.indices), number, train=False)
        with self.shards.phase(), contextlib.closing(shard_ranges):
            for lo, hi in shard_ranges:
                x, _ = self._read_shard(batch, lo, hi, targets=False)
                self._check_evaluation(lambda x=x: self._outputs_of(x), number)
                yield lo, self._predict_shard(x, hi - lo)

    def _outputs_of(self, x: Any) -> list[torch.Tensor]:
        """Returns the tensors that forward() gives."""
        with torch.no_grad(), self._enter_autocast():
            return _tensors_in(self._call_module(x))

    def _predict_shard(self, x: Any, samples: int) -> np.ndarray:
        """Returns the outputs (samples, ...) of a shard; those of 16 bits become float32.

        Raises ConfigError: forward() gives another shape, or no tensor.
        """
        with self._enter_autocast():
            out = huggingface.predictions(self._call_module(x))
        if not isinstance(out, torch.Tensor) or out.shape[:1] != (samples,):
            kind = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
            raise ConfigError(
                f"[torch] forward() of {samples} samples gives {kind}; give a tensor "
                f"({samples}, ...)"
            )
        return host_array(out.float() if out.dtype in AUTOCAST_DTYPES.values() else out)


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


_ONE_SAMPLE = (
    "[torch] BatchNorm has one sample, as the last shard of a batch has one; use another batch "
    "size or shard_size, or drop_last=True in the loader"
)


@contextlib.contextmanager
def _refuse_one_value_per_sample(module: nn.Module) -> Iterator[None]:
    """Raises ConfigError from BatchNorm that gets one value per channel of each sample.

    It would have no variance in a later shard of one sample. Images have many values per channel.
    """

    def check(norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0] if inputs else None
        uses_batch = norm.training or getattr(norm, "running_mean", None) is None
        if uses_batch and isinstance(x, torch.Tensor) and x.dim() > 1 and not x[0, 0].numel() > 1:
            raise ConfigError(_ONE_SAMPLE)

    with contextlib.ExitStack() as hooks:
        for part_of_module in module.modules():
            if isinstance(part_of_module, nn.modules.batchnorm._BatchNorm):
                hooks.callback(part_of_module.register_forward_pre_hook(check).remove)
        yield


class _OneLineErrors:
    """A context that turns two errors of torch into a ConfigError of one line with a remedy.

    These are an operation without a deterministic form, and BatchNorm of a shard of one sample.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        if isinstance(problem, ValueError):
            if "Expected more than 1 value per channel" in str(problem):
                raise ConfigError(_ONE_SAMPLE) from problem
        elif isinstance(problem, RuntimeError) and "use_deterministic_algorithms" in str(problem):
            message = str(problem).partition(", but you set")[0]
            raise ConfigError(
                f"[torch] {message}; use another operation, or deterministic='warn'"
            ) from problem


_one_line_errors = _OneLineErrors()
