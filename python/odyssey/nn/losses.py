"""Losses.

Each is a sum over samples and a count; `reduction="mean"` divides by the count, in a trainer by
that of the whole global batch. Names, defaults, reductions and the order of arguments are
PyTorch's; what does not come first there is given by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..core import functional as F
from ..core.tensor import Tensor
from ..errors import ConfigError
from ..settings.declarations import explain_keywords
from .module import Module

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss", "NLLLoss", "SmoothL1Loss"]


class _Loss(Module):
    reductions: tuple[str, ...] = ("mean", "sum")
    function: Callable[..., Tensor]

    @explain_keywords
    def __init__(self, *, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in self.reductions:
            allowed = ", ".join(map(repr, self.reductions))
            raise ConfigError(
                f"[{type(self).__name__}] reduction is {reduction!r}; allowed are {allowed}"
            )
        self.reduction = reduction

    def forward(self, x: Tensor, target: Any) -> Tensor:
        return type(self).function(x, target, reduction=self.reduction)


class NLLLoss(_Loss):
    """Negative log-likelihood of log-probabilities (N, classes) and class indices (N); see
    functional.nll_loss.

    weight: what each class counts, (classes,).
    """

    @explain_keywords
    def __init__(
        self, weight: Any = None, *, ignore_index: int = -100, reduction: str = "mean"
    ) -> None:
        super().__init__(reduction=reduction)
        self.ignore_index = ignore_index
        self.weight = _checked_weight(self, weight)

    def forward(self, x: Tensor, target: Any) -> Tensor:
        return F.nll_loss(
            x,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )


class CrossEntropyLoss(NLLLoss):
    """Cross-entropy of logits (N, classes) and class indices (N), or of tokens; see
    functional.cross_entropy.

    weight: what each class counts, (classes,).
    """

    @explain_keywords
    def __init__(
        self,
        weight: Any = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction)
        if not 0 <= label_smoothing <= 1:
            raise ConfigError(
                f"[CrossEntropyLoss] label_smoothing is {label_smoothing}; it must be from 0 to 1"
            )
        self.label_smoothing = label_smoothing

    def forward(self, x: Tensor, target: Any) -> Tensor:
        return F.cross_entropy(
            x,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


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

    @explain_keywords
    def __init__(self, *, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(reduction=reduction)
        if not 0 <= beta < math.inf:
            raise ConfigError(f"[SmoothL1Loss] beta is {beta}; it must be at least 0")
        self.beta = beta

    def forward(self, x: Tensor, target: Any) -> Tensor:
        return F.smooth_l1_loss(x, target, reduction=self.reduction, beta=self.beta)


class BCEWithLogitsLoss(_Elementwise):
    """Binary cross-entropy of logits and targets in [0, 1]; see
    functional.binary_cross_entropy_with_logits.

    weight, pos_weight: arrays or numbers, broadcast to the output; pos_weight counts where the
    target is 1.
    """

    @explain_keywords
    def __init__(
        self, weight: Any = None, *, reduction: str = "mean", pos_weight: Any = None
    ) -> None:
        super().__init__(reduction=reduction)
        self.weight = _checked_weight(self, weight)
        self.pos_weight = _checked_weight(self, pos_weight)

    def forward(self, x: Tensor, target: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            x, target, self.weight, reduction=self.reduction, pos_weight=self.pos_weight
        )


def _checked_weight(loss: _Loss, weight: Any) -> Any:
    """Returns the weight as it was given. Raises ShapeError: it is no array of numbers."""
    if weight is not None:
        F.check_weights(type(loss).__name__, weight)
    return weight
