"""What metrics of the whole set have in common.

For each shard a trainer calls `values`. It joins the results of all shards in the order of the
samples, on every rank, and calls `update` with them once per batch. So every rank has the same
numbers in the same order, and `compute` has the same bits on any number of ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ConfigError, ShapeError


class Metric:
    """Base of metrics that are no mean over samples, such as `F1`.

    Subclass it for a metric of your own. A trainer copies the object when it is built, once for the
    epochs and once for each evaluation. Attributes that `update` changes are in checkpoints.

        class Largest(metrics.Metric):
            def reset(self):
                self.largest = 0.0

            def update(self, output, target):
                self.largest = max(self.largest, float(abs(output - target).max()))

            def compute(self):
                return self.largest
    """

    def __init__(self) -> None:
        self.reset()

    def values(self, output: Any, target: Any) -> tuple[Any, ...]:
        """Returns what `update` gets of a shard: arrays, or trees of arrays, with rows in front.

        The rows of all shards are joined. They can be counts of the shard in one row, for example.
        The default is the output and the target.

        Args:
            output: of the model for the samples of a shard, (N, ...). An array in
                `odyssey.DistributedTrainer`, a tensor in `odyssey.torch`.
            target: of the same samples.
        """
        return output, target

    def update(self, *values: Any) -> None:
        """Adds what `values` returned for all shards of a batch, joined along the first axis."""
        raise lacks(self, "update")

    def compute(self) -> float:
        """Returns the metric of everything that was added."""
        raise lacks(self, "compute")

    def reset(self) -> None:
        """Forgets everything that was added."""
        raise lacks(self, "reset")


class KeptValues(Metric):
    """A metric that keeps the values of all samples: the arrays of each batch, in `batches`."""

    def reset(self) -> None:
        self.batches: list[list[np.ndarray]] = []

    def update(self, *values: Any) -> None:
        self.batches.append([as_array(value) for value in values])

    def columns(self) -> list[np.ndarray]:
        """Returns the parts of all samples, joined; no parts if nothing was added."""
        return [np.concatenate(parts) for parts in zip(*self.batches, strict=True)]


_METHODS = {
    "update": "update(self, output, target), which adds the samples of a batch",
    "compute": "compute(self), which returns one number",
    "reset": "reset(self), which forgets all samples",
}


def lacks(metric: Metric, method: str) -> ConfigError:
    """Returns the error of a metric whose class lacks a method."""
    return ConfigError(
        f"[metrics] {type(metric).__name__} has no {method}(); write {_METHODS[method]}"
    )


def check_methods(metric: Any) -> None:
    """Raises ConfigError: a subclass of `Metric` lacks a method that a trainer calls."""
    for method in _METHODS if isinstance(metric, Metric) else ():
        if getattr(getattr(metric, method), "__func__", None) is getattr(Metric, method):
            raise lacks(metric, method)


def is_of_whole_set(metric: Any) -> bool:
    """Returns whether an object adds up samples and computes a metric at the end.

    Objects of torchmetrics do, and subclasses of `Metric`.
    """
    methods = ("update", "compute", "reset")
    return not isinstance(metric, type) and all(
        callable(getattr(metric, name, None)) for name in methods
    )


def as_array(value: Any) -> np.ndarray:
    """Returns an array or a tensor as an array."""
    return np.asarray(value)


def class_scores(
    name: str, output: Any, target: Any, ignore_index: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns outputs as (n, classes), or (n,) if there is one per target, and targets (n,).

    Args:
        name: of the metric, for errors.
        output: (N, ...) one number for each target, or (N, classes, ...) or (N, ..., classes).
        target: class numbers, (N, ...).
        ignore_index: the targets with this number are skipped; None: none are.

    Raises ShapeError: the shapes don't fit together, or a target is not one of the classes.
    """
    scores = as_array(output)
    targets = as_array(target)
    if scores.size == targets.size and scores.shape[:1] == targets.shape[:1]:
        scores = scores.reshape(-1)
        classes = 2
    elif scores.ndim > 1 and scores.shape[:-1] == targets.shape:
        classes = scores.shape[-1]
        scores = scores.reshape(-1, classes)
    elif scores.ndim > 1 and (scores.shape[0], *scores.shape[2:]) == targets.shape:
        classes = scores.shape[1]
        scores = np.moveaxis(scores, 1, -1).reshape(-1, classes)
    else:
        raise ShapeError(
            f"[metrics] {name} got outputs {scores.shape} for targets {targets.shape}; use targets "
            "(N, ...) that are class numbers, and outputs (N, classes, ...), or one per target"
        )
    targets = targets.reshape(-1)
    if ignore_index is not None:
        counted = targets != ignore_index
        scores = scores[counted]
        targets = targets[counted]
    numbers = targets.astype(np.int64)
    wrong = targets[(numbers != targets) | (numbers < 0) | (numbers >= classes)]
    if len(wrong):
        raise ShapeError(
            f"[metrics] {name} got the target {wrong[0]}; expected class numbers from 0 to "
            f"{classes - 1}"
        )
    return scores, numbers
