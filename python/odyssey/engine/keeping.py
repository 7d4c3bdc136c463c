"""Outputs and targets of samples, kept for metrics of the whole set.

A recorded program copies them out of its workspace with the op `keep`. It writes to arrays with a
row for each sample of the batch, whose addresses are in the context of a run.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from ..core import native
from ..core.program import Recorder, ShardEager
from ..core.tensor import Tensor, no_grad
from ..data.nested import Form, leaves, mapped
from ..errors import ConfigError


@dataclasses.dataclass(frozen=True)
class KeptLeaf:
    """An array of an output or target: how many rows a sample has, shape and dtype of a row.

    A sample has several rows if the model has joined samples and tokens.
    """

    rows: int
    shape: tuple[int, ...]
    dtype: str  # "float32" or "int32"


class Keeper:
    """Keeps the outputs and targets of the batches of an engine.

    Attributes:
        forms: the kept leaves of (output, target), by the form of a sample; set by a recording.
    """

    def __init__(self) -> None:
        self.forms: dict[Form, Any] = {}
        self._arrays: list[np.ndarray] = []  # (samples, rows, ...) of the open batch
        self._addresses = np.zeros(0, np.int64)
        self._eager: list[tuple[int, list[np.ndarray]]] = []  # (first sample, arrays) of shards

    def record(self, executor: Recorder | ShardEager, form: Form, y: Any, target: Any) -> None:
        """Records what keeps the outputs and targets of a shard, or keeps them if it is computed
        op by op.

        Raises ConfigError: an output has no row for each sample.
        """
        samples = executor.samples
        numbers = itertools.count()
        arrays: list[np.ndarray] = []

        def keep(tensor: Any) -> KeptLeaf:
            if not isinstance(tensor, Tensor) or not tensor.shape or tensor.shape[0] % samples:
                description = tensor.shape if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ConfigError(
                    f"[train] metrics of the whole set got {description} for {samples} samples; "
                    "forward() must return tensors (N, ...)"
                )
            rows = tensor.shape[0] // samples
            if isinstance(executor, ShardEager):
                valid = executor.context.valid * rows
                arrays.append(tensor.data[:valid].copy())
            else:
                lanes_per_sample = tensor.lanes // samples
                sizes = tensor.groups, tensor.features, lanes_per_sample, next(numbers)
                executor.emit("keep", tensor.memory, *sizes, layout=tensor.layout)
            return KeptLeaf(rows, tensor.shape[1:], np.dtype(tensor.dtype).name)

        with no_grad():
            self.forms[form] = mapped(keep, (y, target))
        if isinstance(executor, ShardEager):
            self._eager.append((executor.context.first, arrays))

    def open(self, samples: int, form: Form) -> int:
        """Makes arrays for a batch; returns the address of their addresses."""
        self._eager = []
        kept_leaves = leaves(self.forms.get(form, ()))
        shapes = [(samples * leaf.rows, *leaf.shape) for leaf in kept_leaves]
        dtypes = [np.dtype(leaf.dtype) for leaf in kept_leaves]
        if [(array.shape, array.dtype) for array in self._arrays] != [
            *zip(shapes, dtypes, strict=True)
        ]:
            self._arrays = [
                native.aligned(shape, dtype.type, zero=False)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            addresses = [array.ctypes.data for array in self._arrays]
            self._addresses = np.array(addresses, np.int64)
        return self._addresses.ctypes.data if kept_leaves else 0

    def take(self, form: Form, first: int, end: int) -> Any:
        """Returns (output, target) of samples first to end of the batch, as trees of arrays."""
        arrays = self._arrays
        start = 0
        if self._eager:
            shards = sorted(self._eager, key=lambda shard: shard[0])
            start = shards[0][0]
            columns = zip(*(shard for _, shard in shards), strict=True)
            arrays = [np.concatenate(column) for column in columns]
        remaining = iter(arrays)

        def part(leaf: KeptLeaf) -> np.ndarray:
            return next(remaining)[(first - start) * leaf.rows : (end - start) * leaf.rows].copy()

        return mapped(part, self.forms[form])
