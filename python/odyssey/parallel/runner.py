"""What a way of taking a step looks like to the engine: one batch size, prepared once, run once per step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from .. import native
from ..optim import Update
from . import plan as planning

if TYPE_CHECKING:
    from ..data import ArrayDataset
    from ..engine import Engine


@dataclasses.dataclass(frozen=True)
class Sums:
    """What a step gives: sums over the samples of the global batch, and what this rank has to update.

    samples_address is that of the number of samples as float32. counted: runs of gradients (address, floats) that are
    this rank's share of the global norm; None: those of the updates.
    """

    loss: float
    samples: float
    correct: float
    samples_address: int
    updates: list[Update]
    counted: list[tuple[int, int]] | None = None


class Runner:
    """Base of engine.Direct, layerwise.Layerwise and waves.Waves."""

    work_bytes = 0  # activations and scratch memory
    shares_work = True  # with other runners (Engine.storage)
    bytes_sent = 0  # by this rank, so far
    bytes_plain = 0  # the same if gradients were summed along the tree, uncompressed
    grad_bytes = 0
    looks_ahead = False  # it can bring the next batch to its device while this one is computed

    def __init__(self, engine: Engine, samples: int) -> None:
        self.samples = samples
        self.shard_size = engine.shard_size_of(samples)
        self.shards = planning.shard_count(samples, self.shard_size)
        self.context = native.Context(seed=engine.seed)
        self.arena_size = engine.arena.size
        self.overlap = engine.layout.overlap
        self.data: ArrayDataset | None = None

    def use(self, data: ArrayDataset) -> None:
        """Points at the arrays of a data set."""
        c = self.context
        c.images, c.bytes = data.images.ctypes.data, int(data.images.dtype.itemsize == 1)
        c.labels, c.scale, c.shift = data.labels.ctypes.data, data.scale.ctypes.data, data.shift.ctypes.data
        self.data = data

    def run(self) -> Sums:
        """Computes the shards of this rank and completes the sums; `context.rows` and `context.step` are set."""
        raise NotImplementedError
