"""Metrics: what is summed over the samples beside the loss, in the same order, so with the same
bits on any layout.

A metric is a function of (output, target), as a loss is. It gives values of samples, (N, ...), of
which the mean is meant, or one number as a loss does (functional.l1_loss).
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

Metric = Callable[[Any, Any], Tensor]
# places among the statistics: of correct predictions, of metrics, behind these
CORRECT = 2
FIRST = 4
END = 16

NAMED: dict[str, Metric] = {"accuracy": F.top_k, "mae": F.l1_loss, "mse": F.mse_loss}


def chosen(
    given: Any, named: dict[str, Metric] = NAMED, top_k: Metric = F.top_k
) -> dict[str, Metric]:
    """Metrics by their names, from such a dict (its values may be names of `named`) or a list of
    names. Raises ConfigError: a name is unknown, what is given is no function, or there are
    too many.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(
            f"[train] metrics is {given!r}; give a dict of names and functions, or a list of names"
        )
    found = {}
    for name in given:
        metric = given[name] if isinstance(given, dict) else name
        top = re.fullmatch(r"top([1-9]\d*)", metric) if isinstance(metric, str) else None
        found[name] = functools.partial(top_k, k=int(top[1])) if top else named.get(metric, metric)
        if isinstance(found[name], str):
            raise ConfigError(
                f"[train] there is no metric {metric!r}; give one of {', '.join(named)}, top5 "
                "(any number), or in "
                "Python a dict of names and functions of (output, target)"
            )
        if (
            not isinstance(name, str)
            or not name.isidentifier()
            or not callable(found[name])
            or name == "loss"
        ):
            raise ConfigError(
                f"[train] metrics has {name!r}: {metric!r}; allowed are words, with functions of "
                "(output, target) or "
                f"one of {', '.join(named)}, top5 (any number)"
            )
    if len(found) > (most := END - FIRST):
        raise ConfigError(
            f"[train] {len(found)} metrics are given; at most {most} are summed: leave some out"
        )
    return found


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
    found = {}
    if metrics is None:
        two = isinstance(y, Tensor) and y.ndim == 2
        metrics = {"accuracy": F.top_k} if counted or (form.classes and two) else {}
    with no_grad():
        for name, metric in metrics.items():
            if metric is F.top_k and counted:  # the loss has counted them
                found[name] = CORRECT
                continue
            try:
                value = metric(y, target)
            except OdysseyError as problem:
                raise type(problem)(f"[train] the metric {name}: {problem}") from None
            if not isinstance(value, Tensor) or (
                value.shape and value.shape[0] != executor.samples
            ):
                said = (
                    f"of shape {value.shape}"
                    if isinstance(value, Tensor)
                    else f"a {type(value).__name__}"
                )
                raise ConfigError(
                    f"[train] the metric {name} gave {said}; it must give a Tensor, a value of "
                    "each sample "
                    f"({executor.samples}, ...) or one number, made with the ops of "
                    "odyssey.functional"
                )
            value = F.mean(value) if value.shape else value
            found[name] = FIRST + sum(at >= FIRST for at in found.values())
            executor.emit("stats", executor.stats, value.memory, value.memory, found[name])
    return found
