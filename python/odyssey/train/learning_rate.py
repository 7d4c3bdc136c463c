"""The learning rate of each step of a training with odyssey's optimizers."""

from __future__ import annotations

import math

import numpy as np

from ..core import setting_versions
from ..errors import NumericsError
from ..optim import Optimizer, Schedule, lr_factor


class LearningRate:
    """The rate of a step: optimizer.lr x factor x schedule(step).

    Args:
        optimizer: has the rate that the user gave.
        schedule: a function of the step, counted from 0.
        scaling: how the rate follows the batch size: "none", "linear" or "sqrt".
        base_batch_size: the batch size that the optimizer's rate is for.

    Attributes:
        factor: what batch size and callbacks make of the optimizer's rate; checkpoints keep it.
        is_scaled: True once the batch size is in the factor.
        same_on_all_ranks: False where ranks step apart: an error is then one rank's alone.
    """

    def __init__(
        self, optimizer: Optimizer, schedule: Schedule, scaling: str, base_batch_size: int | None
    ) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.scaling = scaling
        self.base_batch_size = base_batch_size
        self.factor = 1.0
        self.is_scaled = False
        self.same_on_all_ranks = True

    @property
    def base(self) -> float:
        """The rate without the schedule's factor."""
        return self.optimizer.lr * self.factor

    def of_step(self, step: int) -> float:
        """Returns the rate of a step, counted from 0.

        Raises NumericsError if the schedule makes it no rate.
        """
        factor = self.schedule(step)
        is_number = isinstance(factor, (int, float, np.number))
        rate = self.optimizer.lr * self.factor * factor if is_number else math.nan
        if not 0 <= rate < math.inf:
            error = NumericsError(
                f"[train] the schedule gives {factor!r} for step {step + 1}; it must give a "
                "finite number of at least 0"
            )
            error.raised_on_all_ranks = self.same_on_all_ranks
            raise error
        return rate

    def multiply(self, factor: float) -> None:
        """Multiplies the rate of all steps from here on."""
        self.factor *= factor
        setting_versions.updates.rise()

    def scale_to_batch(self, batch_size: int) -> str | None:
        """Scales the rate to a batch size, once; returns a line for the user if it changes it."""
        if self.scaling == "none" or self.is_scaled:
            return None
        self.is_scaled = True
        lr = self.optimizer.lr
        self.factor = lr_factor(self.scaling, batch_size, self.base_batch_size)
        ratio = f"{batch_size} / {self.base_batch_size}"
        ratio = f"sqrt({ratio})" if self.scaling == "sqrt" else ratio
        return f"learning rate {lr:g} x {ratio} = {lr * self.factor:g}"
