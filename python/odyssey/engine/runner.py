"""What a way of taking a step looks like to the engine: one batch size, prepared once, run once per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core import native
from ..core.arena import Arena
from ..core.program import Record
from ..data import ArrayDataset, Batch
from ..data.trees import Form
from ..optim import Update
from ..parallel import buckets as bucketing
from ..parallel import plan as planning
from ..parallel.mesh import Groups
from ..parallel.reduction import Reduction
from ..parallel.strategy import Content
from ..parallel.zero import Parts
from .layout import Layout


class Storage:
    """Memory (bytes,) uint8 by name that all runners of an engine use for the same thing, as one runs at a time.

    Where one needs more than the others, on any rank, they are made anew when they are needed again (`grown`).
    """

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.grown = False

    def __call__(self, name: str, nbytes: int, make: Callable[..., np.ndarray] = native.aligned) -> np.ndarray:
        if name not in self.arrays or len(self.arrays[name]) < nbytes:
            self.grown = True
            self.arrays[name] = make(nbytes, np.uint8, zero=False)
        return self.arrays[name][:nbytes]


class Recorded(NamedTuple):
    """What a runner is made from: the program of one shard as this rank runs it, and where shards are computed.

    records: the runner's own, to be changed; none where shards are computed op by op. trace: runs the model once with
    an executor. parts: which parameters this rank computes with and updates. place_of: position in the pipeline of a
    record. counted: runs of the arena whose gradients are this rank's share of the global norm. memories: what a
    strategy keeps from step to step, by bucket, for batches of all sizes. warnings: for the user, in the first step.
    """

    records: list[Record]
    trace: Callable[[Any], None]
    arena: Arena
    layout: Layout
    groups: Groups
    train: bool
    seed: int
    precision: str
    samples: int
    shard_size: int
    form: Form
    parts: Parts | None
    place_of: Callable[[Record], int]
    cut_automatically: bool
    counted: list[tuple[int, int]]
    storage: Storage
    memories: dict[int, dict[str, Any]]
    warnings: list[str]

    def content(self, b: int = 0, whole: bool = False) -> Content | None:
        """What a reduction holds: bucket b, or the `whole` arena; None if no gradients."""
        if not self.train:
            return None
        arena = self.arena
        bucket = bucketing.of_ranges([(0, arena.size)], ()) if whole else self.parts.buckets[b]
        shapes = [
            (piece.at + arena.offsets[name] - piece.lo, tuple(p.shape))
            for name, p in arena.named
            for piece in bucket.pieces
            if piece.lo <= arena.offsets[name] and arena.offsets[name] + p.size <= piece.lo + piece.n
        ]
        return Content(bucket.floats, tuple(shapes), self.samples, self.memories.setdefault(b, {}))


@dataclasses.dataclass(eq=False)
class Sums:
    """What a step gives: sums over the samples of the global batch, and what this rank has to update.

    values: losses, samples, correct predictions, -, metrics. samples_address: of the number of samples as float32.
    counted: runs of gradients (address, floats) that are this rank's share of the global norm; None: those of the
    updates.
    """

    values: list[float]
    samples_address: int
    updates: list[Update]
    counted: list[tuple[int, int]] | None = None

    @property
    def loss(self) -> float:
        """Sum over the samples of the global batch."""
        return self.values[0]

    @property
    def samples(self) -> float:
        """How many there are."""
        return self.values[1]

    @property
    def correct(self) -> float:
        """Of them, predicted right, as the loss counts."""
        return self.values[2]


class Runner:
    """Base of DirectRunner, BucketedRunner, PipelineRunner and gpu.runner.GpuRunner."""

    work_bytes = 0  # activations and scratch memory
    shares_work = True  # with other runners (Storage)
    reductions: Sequence[Reduction] = ()  # that it uses, between processes
    bytes_moved = 0  # by this rank so far, beside those of its reductions
    grad_bytes = 0
    looks_ahead = False  # it can bring the next batch to its device while this one is computed

    def __init__(self, recorded: Recorded) -> None:
        self.recorded, self.samples, self.shard_size = recorded, recorded.samples, recorded.shard_size
        self.shards = planning.shard_count(self.samples, self.shard_size)
        self.context = native.Context(seed=recorded.seed)
        self.batch: Batch | None = None  # that is being run
        self.upcoming: Batch | None = None  # the one after it, where known
        self.data: ArrayDataset | None = None

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far."""
        return self.bytes_moved + sum(r.bytes_sent for r in self.reductions)

    @property
    def bytes_plain(self) -> int:
        """The same if gradients were summed along the tree, uncompressed."""
        return self.bytes_moved + sum(r.bytes_plain for r in self.reductions)

    def use(self, data: ArrayDataset) -> None:
        """Points at the arrays of a data set."""
        c = self.context
        if data.normalised:
            c.images, c.bytes = data.images.ctypes.data, int(data.images.dtype.itemsize == 1)
        self._arrays = np.array([a.ctypes.data for a in data.gathered], np.int64)
        c.arrays, c.scale, c.shift = self._arrays.ctypes.data, data.scale.ctypes.data, data.shift.ctypes.data
        self.data = data

    def run(self) -> Sums:
        """Computes the shards of this rank and completes the sums; `context.rows` and `context.step` are set."""
        raise NotImplementedError
