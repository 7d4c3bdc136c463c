"""Metrics of numbers: R2 and the correlation of outputs and targets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import ShapeError
from .base import KeptValues, as_array


class _Pairs(KeptValues):
    """A metric of outputs and targets of one shape, computed for each column in float64."""

    def values(self, output: Any, target: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns outputs and targets, (N, columns) both."""
        outputs = as_array(output)
        targets = as_array(target)
        if outputs.size != targets.size or not targets.ndim:
            raise ShapeError(
                f"[metrics] {type(self).__name__} got outputs {outputs.shape} for targets "
                f"{targets.shape}; use one output for each target"
            )
        return outputs.reshape(len(targets), -1), targets.reshape(len(targets), -1)

    def compute(self) -> float:
        """Returns the mean over the columns; NaN if there was no sample."""
        if not self.batches:
            return math.nan
        outputs, targets = (column.astype(np.float64) for column in self.columns())
        columns = range(targets.shape[1])
        return float(np.mean([self.of_column(outputs[:, k], targets[:, k]) for k in columns]))

    def of_column(self, outputs: np.ndarray, targets: np.ndarray) -> float:
        """Returns the metric of outputs and targets (n,) float64."""
        raise NotImplementedError


class R2(_Pairs):
    """The coefficient of determination, 1 - sum (y - x)^2 / sum (y - mean y)^2, of all samples.

    It is computed in float64 from the values of all samples, which it keeps: 8 bytes for each
    pair. With several outputs per sample it is the mean over them. If all targets are equal, it is
    1 if all outputs equal them, else 0, as in scikit-learn.

    Outputs and targets have one shape (N, ...), or (N, 1) and (N,). Raises ShapeError: they don't.

        trainer = DistributedTrainer(net, optimizer, nn.MSELoss(), metrics={"r2": metrics.R2()})
    """

    def of_column(self, outputs: np.ndarray, targets: np.ndarray) -> float:
        error = float(((targets - outputs) ** 2).sum())
        spread = float(((targets - targets.mean()) ** 2).sum())
        if not spread:
            return 0.0 if error else 1.0
        return 1 - error / spread


class Correlation(_Pairs):
    """Pearson's correlation of outputs and targets, of all samples.

    It is computed in float64 from the values of all samples, which it keeps: 8 bytes for each
    pair. With several outputs per sample it is the mean over them. It is NaN if all outputs or all
    targets are equal.

    Outputs and targets have one shape (N, ...), or (N, 1) and (N,). Raises ShapeError: they don't.

        trainer = DistributedTrainer(net, optimizer, metrics={"r": metrics.Correlation()})
    """

    def of_column(self, outputs: np.ndarray, targets: np.ndarray) -> float:
        x = outputs - outputs.mean()
        y = targets - targets.mean()
        scale = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
        return max(-1.0, min(1.0, float((x * y).sum()) / scale)) if scale else math.nan
