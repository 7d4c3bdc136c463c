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

from ..core import functional as F
from ..core.program import Recorder, ShardEager
from ..core.tensor import Tensor, no_grad
from ..data.nested import Form
from ..errors import ConfigError, OdysseyError
from ..metrics import AUC, F1, R2, Correlation, Precision, Recall, is_of_whole_set

Metric = Callable[[Any, Any], Tensor]
# places among the statistics: of correct predictions, of weights, of metrics, behind these
CORRECT = 2
WEIGHT = 3
FIRST_METRIC = 4
END_METRIC = 16

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


def own_functions(metrics: dict[str, Metric] | None) -> list[str]:
    """Returns the names of the metrics that are functions of the user's, not odyssey's."""
    ours = METRICS_BY_NAME.values()
    return [
        name
        for name, metric in (metrics or {}).items()
        if metric not in ours and getattr(metric, "func", None) is not F.top_k
    ]


def record(
    executor: Recorder | ShardEager,
    metrics: dict[str, Metric] | None,
    form: Form,
    y: Any,
    target: Any,
) -> dict[str, int]:
    """Records the sums of the metrics and returns their places among the statistics.

    metrics: None: accuracy, where targets are classes.
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
            _record_sum(executor, f"the metric {name}", metric, places[name], y, target)
    return places


def record_weight(executor: Recorder | ShardEager, weight: Metric, y: Any, target: Any) -> None:
    """Records the sum of the weights of a shard's samples, by which a trainer divides."""
    with no_grad():
        _record_sum(executor, "weight=", weight, WEIGHT, y, target)


def _record_sum(
    executor: Recorder | ShardEager, name: str, metric: Metric, place: int, y: Any, target: Any
) -> None:
    """Records the sum of a metric over the samples, at a place among the statistics.

    name: for messages. Raises ConfigError: its values are not those of samples.
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
    value = F.mean(value) if value.shape else value
    executor.emit("stats", executor.stats, value.memory, value.memory, place)
