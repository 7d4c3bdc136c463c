"""The check of `odyssey verify --inference` with this package's trainer and predictions.

The comparison itself is in `audit/inference.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .. import nn, optim
from ..audit import inference
from ..audit.inference import Way as Way
from . import trained_models
from .trainer import DistributedTrainer


def ways(
    load: Callable[[], nn.Module],
    data: Any,
    loss: Any = None,
    max_samples: int = 48,
    seed: int = 0,
    algorithm: str = "auto",
) -> Iterator[Way]:
    """Compares the ways to compute outputs, one by one; `odyssey.audit.inference.ways` describes
    the arguments.
    """
    return inference.ways(
        load,
        data,
        loss,
        max_samples,
        seed,
        algorithm,
        predict=trained_models.predicted,
        build_trainer=_build_trainer,
    )


def _build_trainer(model: nn.Module, **options: Any) -> DistributedTrainer:
    return DistributedTrainer(model, optim.SGD(lr=1e-3), **options)
