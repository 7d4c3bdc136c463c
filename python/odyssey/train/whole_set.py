"""Metrics of the whole set (`odyssey.metrics`), while their samples are added.

Each rank collects what the metrics need of its shards. `exchange` sends that to all ranks, in the
order of the samples, so all ranks add the same values in the same order and compute the same.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import registry
from ..core import random_scopes
from ..data.nested import mapped
from ..errors import ConfigError
from ..metrics import Metric, is_of_whole_set
from .resume import gather_trees

if TYPE_CHECKING:
    from ..comm import Communicator


@dataclasses.dataclass(eq=False)
class Running:
    """A metric that samples are being added to, and how many were added."""

    metric: Any
    counted: int = 0


class WholeSet:
    """The metrics of the whole set of one epoch, or of one evaluation.

    Args:
        metrics: by name; the objects are copied.
        comm: all ranks.

    Attributes:
        running: the copies by name.
    """

    _shards: list[list[Any]]  # [first sample, values by metric] of this rank, in the open batch

    def __init__(self, metrics: dict[str, Any], comm: Communicator) -> None:
        self.running = {name: Running(self._copied(metric)) for name, metric in metrics.items()}
        self.comm = comm
        self.begin()
        self.reset()

    def __bool__(self) -> bool:
        return bool(self.running)

    @staticmethod
    def _copied(metric: Any) -> Any:
        """Returns a copy of a metric that doesn't communicate, as those of torchmetrics would."""
        one = copy.deepcopy(metric)
        if hasattr(one, "sync_on_compute"):
            one.sync_on_compute = False
            one.dist_sync_on_step = False
        return one

    def fresh(self) -> WholeSet:
        """Returns the same metrics without samples, for an evaluation."""
        return type(self)({name: one.metric for name, one in self.running.items()}, self.comm)

    def reset(self) -> None:
        """Forgets all samples."""
        for one in self.running.values():
            one.counted = 0
            one.metric.reset()

    def roots(self) -> dict[str, Running]:
        """Returns the objects whose state is in checkpoints, as roots of the walk by name."""
        return {f"metrics.{name}": one for name, one in self.running.items()}

    # --- a batch ---

    def begin(self) -> None:
        """Starts a batch."""
        self._shards = []

    def collect(self, first: int, output: Any, target: Any) -> None:
        """Takes what the metrics need of a shard, or several, of this rank.

        first: the number of its first sample in the batch.
        """
        values = {}
        for name, one in self.running.items():
            kept: tuple[Any, ...] = output, target
            if isinstance(one.metric, Metric):
                is_own = type(one.metric).__module__.startswith("odyssey.metrics")
                with contextlib.nullcontext() if is_own else self._drawing(name, "values", first):
                    kept = tuple(one.metric.values(output, target))
            values[name] = mapped(self.to_array, kept)
        self._shards.append([first, values])

    def exchange(self) -> dict[str, tuple[Any, ...]]:
        """Returns the values of all shards by metric, joined in order; a collective call.

        It also ends the batch.
        """
        if not self.running:
            return {}
        rank_shards = gather_trees(self.comm, self._shards)
        self._shards = []
        shards = sorted(itertools.chain(*rank_shards), key=lambda shard: shard[0])
        # a tree of one form for each shard, joined leaf by leaf
        joined = _joined([list(values.values()) for _, values in shards])
        return dict(zip(self.running, map(tuple, joined), strict=True))

    def update(self, values: dict[str, tuple[Any, ...]], samples: int) -> None:
        """Adds the values of a batch, as `exchange` returned them."""
        for name, parts in values.items():
            one = self.running[name]
            classes = type(one.metric).__mro__
            convert = self.from_array
            if any(kind.__module__.startswith("torchmetrics.") for kind in classes):
                convert = registry.load("tensors", "torch")
            with self._drawing(name, "update"):
                one.metric.update(*mapped(convert, parts))
            one.counted += samples

    def results(self, counted: float) -> dict[str, float]:
        """Returns the metrics by name, without those that lack samples. A metric that is new after
        a resume in the middle of an epoch does.

        counted: the samples of the epoch or evaluation.

        Raises ConfigError: a metric returns no single number.
        """
        numbers = {}
        for name, one in self.running.items():
            if one.counted == counted:
                with self._drawing(name, "compute"):
                    numbers[name] = _as_number(name, one.metric.compute())
        return numbers

    def _drawing(
        self, name: str, call: str, first: int = 0
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a scope of random numbers, for a metric such as a bootstrap.

        Numbers depend on the metric, on the samples that it has counted, and on `first`.
        """
        if self.comm.in_threads:
            return contextlib.nullcontext()
        return random_scopes.scope(0, "metric", name, call, self.running[name].counted, first)

    # --- what a front end has instead of arrays ---

    def to_array(self, value: Any) -> np.ndarray:
        """Returns a value that a metric keeps of a shard as an array."""
        return np.asarray(value)

    def from_array(self, array: np.ndarray) -> Any:
        """Returns an array as what metrics get."""
        return array


def split_metrics(metrics: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the metrics that are summed over samples, and those of the whole set."""
    of_set = {name: metric for name, metric in metrics.items() if is_of_whole_set(metric)}
    return {name: metric for name, metric in metrics.items() if name not in of_set}, of_set


def _joined(parts: Sequence[Any]) -> Any:
    """Returns one tree of arrays, of trees of one form, joined along the first axis."""
    first = parts[0]
    if isinstance(first, dict):
        columns = zip(*(part.values() for part in parts), strict=True)
        return dict(zip(first, map(_joined, columns), strict=True))
    if isinstance(first, (list, tuple)):
        return tuple(map(_joined, zip(*parts, strict=True)))
    return np.concatenate(parts)


def _as_number(name: str, value: Any) -> float:
    """Returns the result of a metric as a float. Raises ConfigError: it is no single number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise ConfigError(
            f"[train] the metric {name} computed {str(value)[:60]!r}; expected one number, so use "
            "an average over classes, or one metric for each number"
        ).on_all_ranks() from problem
