"""Metrics of class predictions: F1, precision and recall from counts, the area under the ROC curve
from scores.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import ConfigError, ShapeError
from .base import KeptValues, Metric, class_scores

AVERAGES = (None, "binary", "macro", "micro", "weighted")


class _Counts(Metric):
    """A metric of three counts per class: predicted right, predicted, and in the targets."""

    def __init__(
        self,
        average: str | None = None,
        *,
        threshold: float = 0.0,
        ignore_index: int | None = -100,
    ) -> None:
        if average not in AVERAGES:
            raise ConfigError(
                f"[metrics] average is {average!r}; use one of binary, macro, micro, weighted"
            )
        self.average = average
        self.threshold = threshold
        self.ignore_index = ignore_index
        super().__init__()

    def reset(self) -> None:
        self.counts = np.zeros((3, 0), np.int64)

    def values(self, output: Any, target: Any) -> tuple[np.ndarray]:
        """Returns the counts of a shard, (1, 3, classes) int64."""
        name = type(self).__name__
        scores, targets = class_scores(name, output, target, self.ignore_index)
        if scores.ndim == 1:
            classes = 2
            predictions = (scores > self.threshold).astype(np.int64)
        else:
            classes = scores.shape[1]
            predictions = scores.argmax(1)
        right = predictions[predictions == targets]
        counts = [np.bincount(one, minlength=classes) for one in (right, predictions, targets)]
        return (np.array([counts], np.int64),)

    def update(self, *values: Any) -> None:
        total = np.asarray(values[0]).sum(0)
        if self.counts.size and self.counts.shape != total.shape:
            raise ShapeError(
                f"[metrics] {type(self).__name__} got outputs of {total.shape[1]} classes after "
                f"{self.counts.shape[1]}; use outputs of one number of classes"
            )
        self.counts = self.counts + total if self.counts.size else total

    def compute(self) -> float:
        """Returns the average over the classes; NaN if there was no sample."""
        right, predicted, present = self.counts.astype(np.float64)
        classes = len(right)
        if not present.sum():
            return math.nan
        average = self.average or ("binary" if classes == 2 else "macro")
        if average == "micro":
            return float(self.of_counts(*self.counts.sum(1, keepdims=True).astype(np.float64))[0])
        scores = self.of_counts(right, predicted, present)
        if average == "binary":
            if classes != 2:
                raise ConfigError(
                    f"[metrics] {type(self).__name__}(average='binary') got {classes} classes; use "
                    "average='macro', 'micro' or 'weighted'"
                )
            return float(scores[1])
        if average == "weighted":
            return float((scores * present).sum() / present.sum())
        return float(scores[predicted + present > 0].mean())

    def of_counts(
        self, right: np.ndarray, predicted: np.ndarray, present: np.ndarray
    ) -> np.ndarray:
        """Returns the metric of each class, (classes,) float64."""
        raise NotImplementedError


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Returns the quotients, 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


class F1(_Counts):
    """The F1 score, 2 TP / (2 TP + FP + FN), of all samples.

    A prediction is the class with the largest output (N, classes, ...). If there is one output for
    each target, class 1 is predicted where the output is above `threshold`. Counts are int64, so
    their sums are exact. A ratio without a denominator is 0, as in scikit-learn.

    Args:
        average: "binary", of class 1; "macro", the mean over the classes that occur in targets or
            predictions; "weighted", the mean over classes by their number of targets; "micro", of
            all classes together. None: "binary" of two classes, "macro" of more.
        threshold: for one output per target. 0.0 is for logits; use 0.5 for probabilities.
        ignore_index: targets with this number are skipped; None: no target is.

    Raises ConfigError: `average` is unknown, or is "binary" for more than two classes. ShapeError:
    shapes don't fit together, or a target isn't a class number.

        trainer = DistributedTrainer(net, optimizer, metrics={"f1": metrics.F1("macro")})
    """

    def of_counts(
        self, right: np.ndarray, predicted: np.ndarray, present: np.ndarray
    ) -> np.ndarray:
        return _ratio(2 * right, predicted + present)


class Precision(_Counts):
    """The share of the predictions of a class that are right, TP / (TP + FP), of all samples.

    Arguments, shapes and errors are those of `F1`.

        metrics = {"precision": metrics.Precision(threshold=0.5)}
    """

    def of_counts(
        self, right: np.ndarray, predicted: np.ndarray, present: np.ndarray
    ) -> np.ndarray:
        return _ratio(right, predicted)


class Recall(_Counts):
    """The share of the samples of a class that are predicted, TP / (TP + FN), of all samples.

    Arguments, shapes and errors are those of `F1`.

        metrics = {"recall": metrics.Recall("weighted")}
    """

    def of_counts(
        self, right: np.ndarray, predicted: np.ndarray, present: np.ndarray
    ) -> np.ndarray:
        return _ratio(right, present)


class AUC(KeptValues):
    """The area under the ROC curve, of all samples: the share of the pairs of a sample of class 1
    and one of class 0 in which the first has the higher score. A tie counts half.

    Of more than two classes it is the mean over the classes of one class against the rest, with
    the softmax of the outputs as scores. Classes that all samples have, or none, are skipped.

    It keeps the scores of all samples: 4 bytes for each output and 8 for each target.

    Args:
        logits: False if outputs (N, classes) of more than two classes are probabilities already.
        ignore_index: targets with this number are skipped; None: no target is.

    The result is NaN if all samples have one class, or a score is NaN. Raises ShapeError: shapes
    don't fit together, or a target isn't a class number.

        trainer = DistributedTrainer(net, optimizer, metrics={"auc": metrics.AUC()})
    """

    def __init__(self, *, logits: bool = True, ignore_index: int | None = -100) -> None:
        self.logits = logits
        self.ignore_index = ignore_index
        super().__init__()

    def values(self, output: Any, target: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the scores (n,) or (n, classes), and the targets (n,) int64."""
        return class_scores("AUC", output, target, self.ignore_index)

    def compute(self) -> float:
        if not self.batches:
            return math.nan
        scores, targets = self.columns()
        scores = scores.astype(np.float64)
        if scores.ndim == 2 and scores.shape[1] == 2:
            scores = scores[:, 1] - scores[:, 0]
        if scores.ndim == 1:
            return area(scores, targets == 1)
        if self.logits:
            scores = np.exp(scores - scores.max(1, keepdims=True))
            scores /= scores.sum(1, keepdims=True)
        areas = [area(scores[:, one], targets == one) for one in np.unique(targets)]
        return float(np.mean(areas)) if len(areas) > 1 else math.nan


def area(scores: np.ndarray, positive: np.ndarray) -> float:
    """Returns the area under the ROC curve, from integers, so it is rounded once.

    Args:
        scores: (n,) float64.
        positive: (n,) bool, True for the samples that should have high scores.

    The result is NaN if all samples are positive or none is, or a score is NaN.
    """
    positives = int(positive.sum())
    pairs = positives * (len(positive) - positives)
    if not pairs or np.isnan(scores).any():
        return math.nan
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # twice the mean rank of each distinct score, counted from 1
    ranks = 2 * np.cumsum(counts) - counts + 1
    rank_sum = int(ranks[places.reshape(-1)][positive].sum())
    return (rank_sum - positives * (positives + 1)) / (2 * pairs)
