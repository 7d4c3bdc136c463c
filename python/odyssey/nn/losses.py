"""Losses.

Each is a sum over samples and a count; `reduction="mean"` divides by the count, in a trainer by
that of the whole global batch. Names, defaults and reductions are PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..core import functional as F
from ..core.tensor import Tensor
from ..errors import ConfigError
from .module import Module

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss", "NLLLoss", "SmoothL1Loss"]


class _Loss(Module):
    reductions: tuple[str, ...] = ("mean", "sum")
    function: Callable[..., Tensor]

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in self.reductions:
            allowed = ", ".join(map(repr, self.reductions))
            raise ConfigError(
                f"[{type(self).__name__}] reduction is {reduction!r}; allowed are {allowed}"
            )
        self.reduction = reduction

    def forward(self, x: Tensor, target: Any) -> Tensor:
        return type(self).function(x, target, self.reduction)


class CrossEntropyLoss(_Loss):
    """Cross-entropy of logits (N, classes) and class indices (N), or of tokens; see
    functional.cross_entropy.

    weight: what each class counts, (classes,).
    """

    def __init__(
        self,
        reduction: str = "mean",
        ignore_index: int = -100,
        weight: Any = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(reduction)
        if not 0 <= label_smoothing <= 1:
            raise ConfigError(
                f"[CrossEntropyLoss] label_smoothing is {label_smoothing}; it must be from 0 to 1"
            )
        self.ignore_index = ignore_index
        self.weight = weight
        self.label_smoothing = label_smoothing

    def forward(self, x: Tensor, target: Any) -> Tensor:
        return F.cross_entropy(
            x, target, self.reduction, self.ignore_index, self.weight, self.label_smoothing
        )


class NLLLoss(_Loss):
    """Negative log-likelihood of log-probabilities (N, classes) and class indices (N); see
    functional.nll_loss.
    """

    function = staticmethod(F.nll_loss)


class _Elementwise(_Loss):
    """A loss of each number of the output, against a target of its shape."""

    reductions = ("mean", "sum", "none")


class MSELoss(_Elementwise):
    """Squared differences from targets of the output's shape (N, ...); see functional.mse_loss."""

    function = staticmethod(F.mse_loss)


class L1Loss(_Elementwise):
    """Absolute differences from targets of the output's shape (N, ...); see functional.l1_loss."""

    function = staticmethod(F.l1_loss)


class SmoothL1Loss(_Elementwise):
    """Squares of small differences, absolute values of others; see functional.smooth_l1_loss."""

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(reduction)
        if not 0 <= beta < math.inf:
            raise ConfigError(f"[SmoothL1Loss] beta is {beta}; it must be at least 0")
        self.beta = beta

    def forward(self, x: Tensor, target: Any) -> Tensor:
        return F.smooth_l1_loss(x, target, self.reduction, self.beta)


class BCEWithLogitsLoss(_Elementwise):
    """Binary cross-entropy of logits and targets in [0, 1]; see
    functional.binary_cross_entropy_with_logits.

    weight, pos_weight: arrays or numbers, broadcast to the output; pos_weight counts where the
    target is 1.
    """

    def __init__(
        self, reduction: str = "mean", *, weight: Any = None, pos_weight: Any = None
    ) -> None:
        super().__init__(reduction)
        self.weight = weight
        self.pos_weight = pos_weight

    def forward(self, x: Tensor, target: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            x, target, self.reduction, self.weight, self.pos_weight
        )
