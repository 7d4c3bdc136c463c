"""Targets that are numbers in units of their own, such as prices: a network learns them
standardised, and outputs, metrics and exports have the targets' units.

`TargetScale` is the end of such a network, and `ScaledLoss` its loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import functional as F
from ..core.tensor import Tensor
from ..errors import ConfigError
from .losses import L1Loss, MSELoss, SmoothL1Loss
from .module import Module

__all__ = ["ScaledLoss", "TargetScale"]

#: Losses of targets that are numbers, by the names of `--loss`.
LOSSES = {"mse": MSELoss, "l1": L1Loss, "smooth_l1": SmoothL1Loss}


class _Standardised(Module):
    """Mean and deviation of each number of a target, of its logarithm if `log` is set."""

    def __init__(
        self, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,), log: bool = False
    ) -> None:
        super().__init__()
        self.mean = tuple(map(float, mean))
        self.std = tuple(map(float, std))
        self.log = bool(log)
        finite = all(map(math.isfinite, (*self.mean, *self.std)))
        if len(self.mean) != len(self.std) or not self.mean or not finite or min(self.std) <= 0:
            raise ConfigError(
                f"[{type(self).__name__}] mean is {self.mean} and std {self.std}; give a finite "
                "mean, and a deviation above 0, for each number of a target"
            )

    def operand(self, numbers: Sequence[float]) -> Any:
        """Returns a number for each number of a target as an operand: one number, or (T,)."""
        return numbers[0] if len(numbers) == 1 else np.array(numbers, np.float32)


class TargetScale(_Standardised):
    """Numbers around 0 as targets in their units: x * std + mean; exp(x * std + mean) - 1 if `log`
    is set.

    It is the last layer of a network that learns prices, for example. `ScaledLoss` with the same
    arguments computes the loss of standardised numbers.

        net = nn.Sequential(nn.Linear(8, 1), nn.TargetScale([210.0], [35.0]))
        loss = nn.ScaledLoss("smooth_l1", [210.0], [35.0])

    Args:
        mean: the mean of each number of a target; if `log` is set, of log(1 + target).
        std: its standard deviation.
        log: the network learns the logarithm of 1 + target.

    Raises ConfigError: the lengths differ, a number isn't finite, or a deviation isn't above 0.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.operand(self.std) + self.operand(self.mean)
        return F.exp(y) - 1.0 if self.log else y


class ScaledLoss(_Standardised):
    """A loss of outputs and targets that are standardised first: (x - mean) / std, and
    (log(1 + x) - mean) / std if `log` is set.

    So its size and its gradients don't depend on the units of targets.

    Args:
        loss: "mse", "l1" or "smooth_l1".
        mean: see `TargetScale`.
        std: see `TargetScale`.
        log: see `TargetScale`. Targets must be above -1.

    Raises ConfigError: another loss, or as `TargetScale`.
    """

    def __init__(
        self,
        loss: str = "mse",
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
        log: bool = False,
    ) -> None:
        super().__init__(mean, std, log)
        if loss not in LOSSES:
            raise ConfigError(f"[ScaledLoss] loss is {loss!r}; choose from {', '.join(LOSSES)}")
        self.name = loss
        self._loss = LOSSES[loss]()

    def forward(self, x: Tensor, target: Any) -> Tensor:
        targets = target if isinstance(target, Tensor) else Tensor(target)
        return self._loss(self._standardise(x), self._standardise(targets))

    def _standardise(self, x: Tensor) -> Tensor:
        numbers = F.log(x + 1.0) if self.log else x
        shifted = numbers - self.operand(self.mean)
        return shifted * self.operand([1 / deviation for deviation in self.std])
