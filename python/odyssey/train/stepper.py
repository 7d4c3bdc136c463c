"""The arithmetic of a step with the engine: sums over a batch, the update, the loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import data as datasets
from ..base.quiet import without_prints
from ..checkpoints.trainable import Mode, Step
from ..core import native, setting_versions
from ..core import precision as precisions
from ..data.nested import Form
from ..engine.engine import Engine
from ..engine.sums import Sums
from ..errors import OdysseyError
from ..nn import Module, forward_hooks
from ..optim import Optimizer
from .learning_rate import LearningRate

if TYPE_CHECKING:
    from ..core.arena import Arena

# a loss of two shards may differ by this from that of both together, and still be a mean
RELATIVE_TOLERANCE = 1e-4
ABSOLUTE_TOLERANCE = 1e-6


class Stepper:
    """What the steppers of odyssey's and of torch's modules have in common.

    Args:
        clip_norm: the largest norm of the mean gradient; None: no limit.
        scaler: the loss scale of precision="fp16".
        say: tells the user a line.

    Attributes:
        steps: optimizer steps so far.
        last: the last step; None before the first, and after one that was left out.
        grad_norm: the norm of the last step's mean gradient, where it was needed; else None.
    """

    def __init__(
        self,
        clip_norm: float | None,
        scaler: precisions.GradScaler,
        say: Callable[[str], None],
    ) -> None:
        self.scaler = scaler
        self.say = say
        self.steps = 0
        self.last: Step | None = None
        self.grad_norm: float | None = None
        self._clip_norm: float | None = None
        self.clip_norm = clip_norm

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of the mean gradient; None: no limit."""
        return self._clip_norm

    @clip_norm.setter
    def clip_norm(self, norm: float | None) -> None:
        if norm != self._clip_norm:
            setting_versions.updates.rise()
        self._clip_norm = norm

    def update_scale(self, applied: bool) -> None:
        """Sets the loss scale for the next step; all ranks hold the same sums, so all set the
        same.

        Raises NumericsError: no smaller scale is left, so it is not the scale that overflows.
        """
        previous_scale = self.scaler.value
        self.scaler.update(applied)
        if not applied:
            self.say(
                f"[precision] step {self.steps + 1} skipped: gradients overflowed at loss scale "
                f"{precisions.scale_text(previous_scale)}; scale is now "
                f"{precisions.scale_text(self.scaler.value)}"
            )


class EngineStepper(Stepper):
    """Computes steps: `run` adds up losses and gradients, `commit` updates the parameters.

    Args:
        model, loss: what is trained, and by which loss.
        optimizer: bound to the arena.
        learning_rate: of each step.
        scaler: the loss scale of precision="fp16".
        arena: memory of all parameters.
        engine: runs training steps.
        evaluation_engine: runs evaluations.
        mode: how ranks take steps.
        clip_norm: the largest norm of the mean gradient; None: no limit.
        say: tells the user a line.

    Attributes:
        is_recorded: True once the first step has recorded the model.
    """

    def __init__(
        self,
        *,
        model: Module,
        loss: Any,
        optimizer: Optimizer,
        learning_rate: LearningRate,
        scaler: precisions.GradScaler,
        arena: Arena,
        engine: Engine,
        evaluation_engine: Engine,
        mode: Mode,
        clip_norm: float | None,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(clip_norm, scaler, say)
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.arena = arena
        self.engine = engine
        self.evaluation_engine = evaluation_engine
        self.mode = mode
        self.is_recorded = False
        self._sums: Sums | None = None  # of the last step
        self._divisor = np.ones(1, np.float32)  # of the last step, if it is not its samples

    @property
    def alike(self) -> bool:
        """False if ranks have computed the last step with different settings or programs."""
        return self.engine.alike

    # --- a step ---

    def run(self, batch: datasets.Batch) -> Sums:
        """Computes this rank's shards of a batch; returns the sums over all of its samples."""
        self.engine.loss_scale = self.scaler.value
        return self.engine.run(batch, self.steps)

    def commit(self, sums: Sums, rate: float) -> bool:
        """Updates the parameters from a step's sums; returns False, and changes nothing, if ranks
        differ or a gradient is not finite.
        """
        is_weighted = self.engine.programs.weight is not None
        if not self.engine.alike or (is_weighted and not self.engine.weight(sums) > 0):
            return False
        return self.engine.commit_step(self.optimizer, sums, self._divisor_address(sums), rate)

    def _divisor_address(self, sums: Sums) -> int:
        """Returns the address of the number that gradients are divided by: samples or the sum of
        weights, times the loss scale, and more if they are clipped.
        """
        self.grad_norm = None
        self._sums = sums
        is_weighted = self.engine.programs.weight is not None
        if self.clip_norm is None and not self.scaler.enabled and not is_weighted:
            return sums.samples_address
        divisor = self.engine.weight(sums) * self.scaler.value
        if self.clip_norm is not None:
            norm = self.engine.ownership.norm(sums) / divisor
            self.grad_norm = norm
            if math.isfinite(norm) and norm > self.clip_norm:
                divisor *= norm / self.clip_norm
        self._divisor = np.array([divisor], np.float32)
        return self._divisor.ctypes.data

    def count_absent_step(self) -> None:
        """Counts a step in which this rank has no samples."""
        self.steps = self.steps + 1
        self.optimizer.steps = self.optimizer.steps + 1

    def measured(self, sums: Sums) -> dict[str, float]:
        """Returns the metrics of sums, by name."""
        return self.engine.measured(sums)

    def gradient_norm(self) -> float | None:
        """Returns the norm of the last step's mean gradient before clipping; None: not known."""
        if self.grad_norm is not None or self._sums is None or not self.mode.together:
            return self.grad_norm
        layout = self.engine.layout
        if layout.split or layout.zero:
            return None  # ranks would have to add up theirs
        weight = self.engine.weight(self._sums)
        divisor = float(self._divisor[0]) if self.scaler.enabled else weight
        return self.engine.ownership.norm(self._sums) / divisor

    # --- the first step ---

    @property
    def in_parts(self) -> bool:
        """True if ranks have parts of weights or of the optimizer's state that no other rank
        has.
        """
        layout = self.engine.layout
        return self.mode.comm.size > 1 and (layout.split or layout.zero > 0)

    def begin(self) -> list[str]:
        """Takes up what is known only once the model has been recorded; returns lines about it."""
        self.is_recorded = True
        optimizer = self.optimizer
        engine = self.engine
        fill_states = optimizer.coming
        optimizer.coming = None
        optimizer.keep({name: engine.ownership.own_state(a) for name, a in optimizer.state.items()})
        if fill_states is not None:
            fill_states()
        optimizer.locked = self.in_parts
        self.arena.locked = self.mode.comm.size > 1 and engine.layout.split
        lines = []
        if not self.model.training:
            lines.append(
                f"[train] {type(self.model).__name__} is in eval mode: dropout is off and batch "
                "norm uses running statistics; call model.train() if that is not meant"
            )
        return [*lines, *engine.ownership.warnings]

    def rows_of_sample(self, form: Form | None) -> int | None:
        """Returns the rows that a sample takes in kernels, alike on all ranks; None: the form of
        a sample is not known yet. A collective call.
        """
        if form is None:
            return None
        try:
            rows = self.engine.programs.rows(form)
        # all ranks are told what is wrong with the model when they compare programs
        except Exception:
            rows = 1
        if not self.mode.together:
            return rows
        return int(self.mode.comm.broadcast(np.array([rows], np.int64))[0])

    def check_loss(self, batch: datasets.Batch) -> None:
        """Tells if the loss is no mean over samples, by that of the first batch in eval mode, in
        its shards and in larger ones: shards change its meaning. Models and losses of odyssey's
        own are not looked at.
        """
        n = len(batch.indices)
        size = self.evaluation_engine.shard_size_of(n)
        larger = min(2 * size, n)
        parts = [*map(type, self.model.modules()), self.loss]
        has_user_code = any(
            not getattr(part, "__module__", "").startswith("odyssey.") for part in parts
        )
        if size == n or not has_user_code or not self.mode.together:
            return
        engine = self.evaluation_engine

        def compute_losses() -> tuple[float, float]:
            return engine.loss_in_shards(batch, size), engine.loss_in_shards(batch, larger)

        try:
            with without_prints(lambda error: not isinstance(error, OdysseyError)):
                shard_loss, larger_loss = (
                    forward_hooks.run_check(self.model, compute_losses)
                    if engine.programs.eager
                    else compute_losses()
                )
        except OdysseyError:  # it is said where it is trained
            return
        if not (math.isfinite(shard_loss) and math.isfinite(larger_loss)):
            return
        scale = max(abs(shard_loss), abs(larger_loss))
        if abs(shard_loss - larger_loss) <= RELATIVE_TOLERANCE * scale + ABSOLUTE_TOLERANCE:
            return
        values = f"{shard_loss:.5g} in shards of {size}, {larger_loss:.5g} of {larger}"
        self.say(
            f"[train] the loss is no mean over samples ({values}): computed in shards it is "
            f"another one than that of the batch of {n}. Give shard_size={n}, where one rank has "
            "the batch; of a root or other function of a mean, give the mean itself; of a mean "
            "over tokens give the sum, and what it is divided by as weight= (docs/losses.md)"
        )

    # --- for modes in which ranks step apart ---

    def gradients(self, batch: datasets.Batch, step: int) -> tuple[Sums, np.ndarray, float]:
        """Returns the sums over a batch that this rank alone computes, its gradients, and what
        they are divided by.
        """
        sums = self.engine.run(batch, step)
        self._divisor_address(sums)
        divisor = sums.samples if self.clip_norm is None else float(self._divisor[0])
        return sums, self.engine.runners[-1].result[: self.arena.size], divisor

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics that are summed, once a step was recorded."""
        return sorted(self.engine.programs.metric_at)

    def traffic(self) -> tuple[int, int, int]:
        """Returns bytes that this rank has sent so far, uncompressed, and to other machines."""
        return self.engine.bytes_sent, self.engine.bytes_plain, self.engine.bytes_wire

    def count_bytes(self, sent: int) -> None:
        """Adds bytes that a mode has sent."""
        self.engine.bytes_sent += sent
        self.engine.bytes_plain += sent

    # --- for estimates ---

    def rehearse(self, batch: datasets.Batch, *, prepare: bool = False) -> tuple[int, int]:
        """Takes a step of this rank alone, in a world whose others are absent
        (comm/stand_in.py): nothing is compared, and their samples count as if they were there.

        Args:
            prepare: only prepare a step, and compute nothing.

        Returns how many shards this rank has, and how many bytes others have read from memory
        that it shares so far.
        """
        samples = len(batch.indices)
        engine = self.engine
        if prepare:
            engine.prepare(samples, batch.dataset.form)
        else:
            sums = engine.run(batch, self.steps)
            engine.alike = True
            sums.values[1] = float(samples)
            native.memory(sums.samples_address, 4).view(np.float32)[0] = samples
            rate = self.learning_rate.of_step(self.steps)
            engine.commit_step(self.optimizer, sums, self._divisor_address(sums), rate)
            engine.updated()
        lo, hi = engine.part(samples)
        reductions = {id(r): r for runner in engine.runners for r in runner.reductions}
        shared = [r for r in reductions.values() if hasattr(r.comm, "shared")]
        shards = -(-(hi - lo) // engine.shard_size_of(samples))
        return shards, sum(r.bytes_sent for r in shared)
