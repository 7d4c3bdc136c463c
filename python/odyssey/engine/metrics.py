"""Metrics: what is summed over the samples beside the loss, in the same order, so with the same
bits on any layout.

A metric is a function of (output, target), as a loss is. It gives values of samples, (N, ...), of
which the mean is meant, or one number as a loss does (functional.l1_loss). Or it is an object of
odyssey.metrics, which computes one number of all samples.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..core import functional as F
from ..core.program import Eager, Recorder, ShardEager, using
from ..core.tensor import Tensor, no_grad
from ..data.nested import Form, leaves, mapped
from ..errors import ConfigError, OdysseyError
from ..metrics import (
    AUC,
    F1,
    R2,
    Correlation,
    Precision,
    Recall,
    check_mean,
    check_methods,
    is_of_whole_set,
)

Metric = Callable[[Any, Any], Tensor]
# places among the statistics: of correct predictions, of weights, of metrics, behind these
CORRECT = 2
WEIGHT = 3
FIRST_METRIC = 4
END_METRIC = 16
# Batches of random samples that show whether a metric is a mean, and how large they are.
RANDOM_TRIALS = 2
RANDOM_SAMPLES = 64
MAX_RANDOM_FLOATS = 1 << 22

METRICS_BY_NAME: dict[str, Metric] = {"accuracy": F.top_k, "mae": F.l1_loss, "mse": F.mse_loss}
#: Metrics of the whole set by name, for odyssey's and PyTorch's modules.
WHOLE_SET_BY_NAME = {
    "auc": AUC(),
    "correlation": Correlation(),
    "f1": F1(),
    "precision": Precision(),
    "r2": R2(),
    "recall": Recall(),
}


def chosen(
    metrics: Any, by_name: dict[str, Metric] = METRICS_BY_NAME, top_k: Metric = F.top_k
) -> dict[str, Metric]:
    """Metrics by their names, from such a dict (its values may be names of `by_name`), a collection
    of torchmetrics, or a list of names. Raises ConfigError: a name is unknown, what is given is no
    function or metric of the whole set, or there are too many.
    """
    if hasattr(metrics, "items"):
        metrics = dict(metrics.items())
    if isinstance(metrics, str) or not isinstance(metrics, Iterable):
        raise ConfigError(
            f"[train] metrics is {metrics!r}; give a dict of names and functions, or a list of "
            "names"
        )
    selected: dict[str, Any] = {}
    names = f"{', '.join(by_name)}, top5 (any number), {', '.join(WHOLE_SET_BY_NAME)}"
    for name in metrics:
        metric = metrics[name] if isinstance(metrics, dict) else name
        top = re.fullmatch(r"top([1-9]\d*)", metric) if isinstance(metric, str) else None
        selected[name] = (
            functools.partial(top_k, k=int(top[1]))
            if top
            else {**WHOLE_SET_BY_NAME, **by_name}.get(metric, metric)
            if isinstance(metric, str)
            else metric
        )
        if isinstance(selected[name], str):
            raise ConfigError(
                f"[train] there is no metric {metric!r}; give one of {names}, or in Python a dict "
                "of names and functions of (output, target) or objects of odyssey.metrics"
            )
        if isinstance(selected[name], type) and hasattr(selected[name], "compute"):
            raise ConfigError(
                f"[train] the metric {name!r} is the class {selected[name].__name__}; use an "
                f"object, {selected[name].__name__}()"
            )
        check_methods(selected[name])
        if (
            not isinstance(name, str)
            or not name.isidentifier()
            or not (callable(selected[name]) or is_of_whole_set(selected[name]))
            or name == "loss"
        ):
            raise ConfigError(
                f"[train] metrics has {name!r}: {metric!r}; allowed are words, with functions of "
                f"(output, target), objects of odyssey.metrics, or one of {names}"
            )
    summed = [metric for metric in selected.values() if not is_of_whole_set(metric)]
    if len(summed) > (max_metrics := END_METRIC - FIRST_METRIC):
        raise ConfigError(
            f"[train] {len(summed)} metrics are given; at most {max_metrics} are summed: leave "
            "some out"
        )
    return selected


def _is_own(metric: Metric) -> bool:
    """Returns whether a metric is a function of the user's, not one of odyssey's."""
    is_named = metric in METRICS_BY_NAME.values()
    return not is_named and getattr(metric, "func", None) is not F.top_k


def check_function(name: str, metric: Metric, samples: int, y: Any, target: Any) -> None:
    """Raises ConfigError if a metric that gives one number is no mean over samples.

    It is called with random samples, and with both halves of them. The model isn't computed,
    because its outputs may depend on the shard too.

    Args:
        samples: of the shard that `y` and `target` were recorded for.
        y, target: trees of tensors, whose shapes and dtypes the random ones have.
    """
    tensors = [leaf for leaf in (*leaves(y), *leaves(target)) if isinstance(leaf, Tensor)]
    if any(not tensor.shape or tensor.shape[0] % samples for tensor in tensors):
        return
    floats = sum(tensor.size for tensor in tensors) / samples
    count = min(RANDOM_SAMPLES, int(MAX_RANDOM_FLOATS / max(floats, 1)) // 2 * 2)
    classes = y.shape[-1] if isinstance(y, Tensor) and y.ndim > 1 and y.shape[-1] > 1 else 2
    half = count // 2
    for seed in range(RANDOM_TRIALS if half else 0):
        generator = np.random.default_rng(seed)

        def draw(tensor: Tensor, generator: np.random.Generator = generator) -> np.ndarray:
            shape = (count * tensor.shape[0] // samples, *tensor.shape[1:])
            if tensor.dtype == np.int32:
                return generator.integers(0, classes, shape).astype(np.int32)
            return generator.random(shape).astype(np.float32)

        outputs = mapped(draw, y)
        targets = mapped(draw, target)

        def value(first: int, end: int, trees: Any = (outputs, targets)) -> float:
            def rows(array: np.ndarray) -> Tensor:
                per_sample = len(array) // count
                return Tensor(array[first * per_sample : end * per_sample], dtype=array.dtype.type)

            return metric(*mapped(rows, trees)).item()

        with using(Eager()):
            try:
                numbers = [value(0, count), value(0, half), value(half, count)]
            # what is wrong with it is reported where it is recorded
            except Exception:
                return
        check_mean(name, numbers[0], [(numbers[1], half), (numbers[2], count - half)])


def record(
    executor: Recorder | ShardEager,
    metrics: dict[str, Metric] | None,
    form: Form,
    y: Any,
    target: Any,
    checked: set[str],
) -> dict[str, int]:
    """Records the sums of the metrics and returns their places among the statistics.

    Args:
        metrics: None: accuracy, where targets are classes.
        checked: the names of the metrics that are means for sure; new ones are added.
    """
    counted = executor.first_stats is not None
    places = {}
    if metrics is None:
        two = isinstance(y, Tensor) and y.ndim == 2
        metrics = {"accuracy": F.top_k} if counted or (form.classes and two) else {}
    with no_grad():
        for name, metric in metrics.items():
            if metric is F.top_k and counted:  # the loss has counted them
                places[name] = CORRECT
                continue
            places[name] = FIRST_METRIC + sum(place >= FIRST_METRIC for place in places.values())
            value = _record_sum(executor, f"the metric {name}", metric, places[name], y, target)
            if not value.shape and name not in checked and _is_own(metric):
                check_function(name, metric, executor.samples, y, target)
            checked.add(name)
    return places


def record_weight(executor: Recorder | ShardEager, weight: Metric, y: Any, target: Any) -> None:
    """Records the sum of the weights of a shard's samples, by which a trainer divides."""
    with no_grad():
        _record_sum(executor, "weight=", weight, WEIGHT, y, target)


def _record_sum(
    executor: Recorder | ShardEager, name: str, metric: Metric, place: int, y: Any, target: Any
) -> Tensor:
    """Records the sum of a metric over the samples, at a place among the statistics.

    Returns what the metric gave. name: for messages. Raises ConfigError: its values are not those
    of samples.
    """
    try:
        value = metric(y, target)
    except OdysseyError as problem:
        raise type(problem)(f"[train] {name}: {problem}") from None
    if not isinstance(value, Tensor) or (value.shape and value.shape[0] != executor.samples):
        description = (
            f"of shape {value.shape}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        )
        raise ConfigError(
            f"[train] {name} gave {description}; it must give a Tensor, a value "
            f"of each sample ({executor.samples}, ...) or one number, made with the ops of "
            "odyssey.functional"
        )
    mean = F.mean(value) if value.shape else value
    executor.emit("stats", executor.stats, mean.memory, mean.memory, place)
    return value
