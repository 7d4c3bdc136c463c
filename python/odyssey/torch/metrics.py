"""Metrics that are summed over samples beside the loss: engine/metrics.py's names and meaning,
for tensors of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ..engine import metrics as ours
from ..errors import ConfigError
from . import huggingface

Metric = Callable[[Any, Any], Any]


def top_k(out: Any, y: Any, k: int = 1) -> torch.Tensor:
    """1 for each target, a class number, that is among the k largest of its outputs, else 0; of
    y's shape. Classes are dimension 1 of outputs, as for torch's losses, or the last where
    targets have all others' shape. Of equal entries the first counts as larger.
    """
    out, y = huggingface.compared(out, y)
    if not _of_classes(out, y):
        raise ConfigError(
            "[torch] accuracy and top5 are of targets that are class numbers; give metrics of "
            "your own"
        )
    out = out.movedim(-1 if out.shape[:-1] == y.shape else 1, -1)
    first = (
        out.argmax(-1, keepdim=True)
        if k == 1
        else out.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    )
    return (first == y.unsqueeze(-1)).any(-1).float()


def accuracy(out: Any, y: Any) -> Any:
    """Returns what is counted where no metrics are given: below 0 where targets are no classes,
    so that nobody shows it. Of a dict batch only where samples have one label each: models
    shift or mask those of tokens in their way.
    """
    if isinstance(y, dict):
        out = huggingface.field(out, "logits")
        y = y.get("labels")
        if not isinstance(y, torch.Tensor) or y.dim() != 1:
            return torch.tensor(-1.0)
    return top_k(out, y) if _of_classes(out, y) else torch.tensor(-1.0)


NAMED: dict[str, Metric] = {
    "accuracy": top_k,
    "mae": lambda out, y: F.l1_loss(*huggingface.compared(out, y)),
    "mse": lambda out, y: F.mse_loss(*huggingface.compared(out, y)),
}


def chosen(metrics: Any) -> dict[str, Metric]:
    """Metrics by name, of what a trainer is given; None: accuracy."""
    return {"accuracy": accuracy} if metrics is None else ours.chosen(metrics, NAMED, top_k)


def sums(metrics: dict[str, Metric], out: Any, y: Any, samples: int) -> list[float]:
    """Sums each metric over the samples of a shard."""
    totals = []
    with torch.no_grad():
        for name, metric in metrics.items():
            value = torch.as_tensor(metric(out, y)).float()
            if value.dim() and len(value) != samples:
                raise ConfigError(
                    f"[train] the metric {name} gave {tuple(value.shape)}; it must give a value of "
                    f"each sample ({samples}, ...) or one number"
                )
            totals.append(float(value.flatten(1).mean(1).sum() if value.dim() > 1 else value.sum()))
            totals[-1] *= 1 if value.dim() else samples
    return totals


def _of_classes(out: Any, y: Any) -> bool:
    tensors = isinstance(out, torch.Tensor) and isinstance(y, torch.Tensor)
    return tensors and not y.is_floating_point() and out.dim() == y.dim() + 1
