"""A function of all outputs and targets as a metric."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..data.nested import leaves, mapped
from ..errors import ConfigError
from .base import Metric, as_array


class Gathered(Metric):
    """A function of the outputs and targets of all samples, called once at the end.

    Use it for any metric that is no mean over samples. It keeps the outputs and targets of all
    samples on every rank.

    Args:
        function: called as function(outputs, targets), with all samples of an epoch or an
            evaluation in their order; returns one number. It gets arrays in
            `odyssey.DistributedTrainer`, and tensors in `odyssey.torch`.

    Raises ConfigError: `function` can't be called.

        def rmse(outputs, targets):
            return ((outputs - targets) ** 2).mean() ** 0.5

        trainer = DistributedTrainer(net, optimizer, metrics={"rmse": metrics.Gathered(rmse)})
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        if not callable(function):
            raise ConfigError(
                f"[metrics] Gathered got a {type(function).__name__}; use a function of "
                "(outputs, targets)"
            )
        self.function = function
        super().__init__()

    def reset(self) -> None:
        self.batches: list[list[np.ndarray]] = []  # of each batch, the leaves
        self._form: Any = None  # the form of (output, target), with empty leaves

    def update(self, *values: Any) -> None:
        if self._form is None:
            self._form = mapped(lambda leaf: leaf[:0], values)
        self.batches.append([as_array(leaf) for leaf in leaves(values)])

    def compute(self) -> float:
        if not self.batches:
            return math.nan
        columns = iter([np.concatenate(parts) for parts in zip(*self.batches, strict=True)])
        return self.function(*mapped(lambda empty: _like(empty, next(columns)), self._form))


def _like(empty: Any, array: np.ndarray) -> Any:
    """Returns an array as what `empty` is: an array, or a tensor."""
    return empty.new_tensor(array) if hasattr(empty, "new_tensor") else array
