"""Losses. Each is a sum over samples and a count; `reduction="mean"` divides by the count, in a trainer by that of the
whole global batch."""

from __future__ import annotations

from typing import Any

from ..core import functional as F
from ..core.tensor import Tensor
from ..errors import ConfigError
from .module import Module


class _Loss(Module):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in ("mean", "sum"):
            raise ConfigError(f"[{type(self).__name__}] reduction is {reduction!r}; it must be 'mean' or 'sum'")
        self.reduction = reduction


class CrossEntropyLoss(_Loss):
    """Cross-entropy of logits (N, classes) and class indices (N); see functional.cross_entropy."""

    def forward(self, x: Tensor, target: Any) -> Tensor:
        return F.cross_entropy(x, target, self.reduction)


class NLLLoss(_Loss):
    """Negative log-likelihood of log-probabilities (N, classes) and class indices (N); see functional.nll_loss."""

    def forward(self, x: Tensor, target: Any) -> Tensor:
        return F.nll_loss(x, target, self.reduction)
