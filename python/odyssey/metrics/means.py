"""Checks whether a metric is a mean over samples. Only then may shards compute it separately.

The mean over a shard is the mean of the means over its parts, weighted by their samples. F1, AUC or
the root of a mean isn't.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import ConfigError

# The value of a shard may differ by this from the mean of its halves, and still be a mean.
RELATIVE_TOLERANCE = 1e-4
ABSOLUTE_TOLERANCE = 1e-6


def check_mean(name: str, value: float, parts: Sequence[tuple[float, int]]) -> None:
    """Raises ConfigError if a metric of some samples is no mean over them.

    Args:
        name: of the metric.
        value: of the metric for all of the samples.
        parts: (value, samples) of the parts that they were split into.

    Values that are not finite are not compared.
    """
    values = [value, *(part for part, _ in parts)]
    if not all(map(math.isfinite, values)):
        return
    samples = sum(count for _, count in parts)
    mean = sum(part * count for part, count in parts) / samples
    scale = max(map(abs, values))
    if abs(value - mean) <= RELATIVE_TOLERANCE * scale + ABSOLUTE_TOLERANCE:
        return
    raise ConfigError(
        f"[train] the metric {name} is no mean over samples: {value:.5g} of {samples} samples, "
        f"{mean:.5g} as the mean over their parts; use one of odyssey.metrics (F1, AUC, R2, ...), "
        f"or metrics.Gathered(function), which gets all outputs and targets"
    )
