"""Runner: a way of taking a step for one batch size, prepared once, run once per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core import native
from ..core.arena import Arena
from ..core.program import Record
from ..data import ArrayDataset, Batch
from ..data.nested import Form
from ..parallel import buckets as bucketing
from ..parallel import plan as planning
from ..parallel import strategy
from ..parallel.mesh import Groups
from ..parallel.reduction import Reduction
from ..parallel.strategy import Content
from .layout import Layout
from .ownership import Ownership
from .programs import Programs
from .sums import Sums

if TYPE_CHECKING:
    from .gpu.group import DeviceGroup

#: Statistics that compare what ranks must have alike (`Runner.mark`), behind those of losses and
#: metrics.
MARKS = slice(16, 32)
EXACT = 1 << 24  # up to which float32 has all integers


def digits(code: int, ranks: int) -> np.ndarray:
    """The bits of a code as float32 (16,) that tell by their sums over so many ranks whether all
    have the same code.

    Each number holds as many bits as fit, as digits of base ranks + 1, so that sums carry nothing:
    then all ranks have the same bit if a digit of the sum is 0 or the number of ranks that were
    added.
    """
    base = ranks + 1
    places = MARKS.stop - MARKS.start
    bits_per_number = max(k for k in range(1, 25) if base**k <= EXACT or k == 1)
    values = [
        sum((code >> (i * bits_per_number + j) & 1) * base**j for j in range(bits_per_number))
        for i in range(places)
    ]
    return np.array(values, np.float32)


class Storage:
    """Memory (bytes,) uint8 by name that all runners of an engine use for the same thing, as one
    runs at a time.

    Where one needs more than the others, on any rank, they are made anew when they are needed again
    (`grown`). While it is `fixed` one that needs more has memory of its own.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.grown = self.fixed = False

    def __call__(
        self, name: str, nbytes: int, make: Callable[..., np.ndarray] = native.aligned
    ) -> np.ndarray:
        if name not in self.arrays or len(self.arrays[name]) < nbytes:
            if self.fixed:
                return make(nbytes, np.uint8, zero=False)
            self.grown = True
            self.arrays[name] = make(nbytes, np.uint8, zero=False)
        return self.arrays[name][:nbytes]


class Program(NamedTuple):
    """Program that a rank runs for a shard of so many samples."""

    samples: int
    # the runner's own, to be changed; none where shards are computed op by op
    records: list[Record]
    place_of: Callable[[Record], int]  # position in the pipeline of a record
    lanes: bool  # however few samples, they are in lanes


@dataclasses.dataclass(frozen=True)
class RunnerInputs:
    """What an engine passes to a runner: its own parts, and the batches that the runner is for."""

    layout: Layout
    arena: Arena
    groups: Groups
    ownership: Ownership
    recordings: Programs  # records shards that are computed op by op
    storage: Storage
    #: What a strategy keeps from step to step, by bucket.
    memories: dict[int, dict[str, Any]]
    team: DeviceGroup | None  # the GPUs of this process
    train: bool
    seed: int
    precision: str
    #: The program of a shard as this rank runs it. If the last shard has fewer samples and is not
    #: filled up, its program follows: the same records with other sizes.
    programs: list[Program]
    samples: int  # of a batch
    form: Form  # of a sample
    #: Reductions of batches of this size, by name. Programs of one size share them.
    known_reductions: dict[Any, Any]


class Runner:
    """Base of DirectRunner, BucketedRunner, PipelineRunner and gpu.runner.GpuRunner.

    `parts`: which parameters this rank computes with and updates (zero.Parts); None: shards are
    computed op by op.
    """

    plan: planning.Plan  # of the shards of this process
    work_bytes = 0  # activations and scratch memory
    shares_work = True  # with other runners (Storage)
    reductions: Sequence[Reduction] = ()  # that it uses, between processes
    bytes_moved = 0  # by this rank so far, beside those of its reductions
    grad_bytes = 0  # of gradients and of what their reduction works in, without what runners share
    looks_ahead = False  # it can bring the next batch to its device while this one is computed
    fingerprint = 0  # of its program: what ranks must have alike
    # the reduction whose statistics compare that, in its last floats
    marked: Reduction | None = None
    expected: list[float] | None = None  # what these sums are where all ranks have the same
    _digits: np.ndarray | None = None
    _code: int | None = None

    def __init__(self, inputs: RunnerInputs) -> None:
        self.layout = inputs.layout
        self.arena = inputs.arena
        self.groups = inputs.groups
        self.train = inputs.train
        self.precision = inputs.precision
        self.programs = inputs.programs
        self.recordings = inputs.recordings
        self.samples = inputs.samples
        self.form = inputs.form
        self.storage = inputs.storage
        self.ownership = inputs.ownership
        self._memories = inputs.memories
        self._known_reductions = inputs.known_reductions
        self.parts: Any = inputs.ownership.parts if self.layout.execution == "replay" else None
        self.shard_size = inputs.programs[0].samples
        self.shards = planning.shard_count(inputs.samples, self.shard_size)
        self.context = native.Context(seed=inputs.seed)
        self.batch: Batch | None = None  # that is being run
        self.upcoming: Batch | None = None  # the one after it, where known
        self.data: ArrayDataset | None = None

    def _get_or_make(self, name: Any, make: Callable[[], Any]) -> Any:
        """The reduction of this name, made when it is first asked for: a collective call."""
        if name not in self._known_reductions:
            self._known_reductions[name] = make()
        return self._known_reductions[name]

    def _reduction(self, floats: int, **options: Any) -> Reduction:
        """A reduction of so many floats for the plan of this runner; a collective call."""
        lay = self.layout
        return strategy.make(
            lay.reduction, self.groups.dp, self.plan, floats, lay.workers, **options
        )

    def content(self, b: int = 0, whole_arena: bool = False) -> Content | None:
        """Returns what a reduction holds: bucket b, or the whole arena; None if no gradients."""
        if not self.train:
            return None
        arena = self.arena
        bucket = (
            bucketing.of_ranges([(0, arena.size)], ()) if whole_arena else self.parts.buckets[b]
        )
        shapes = [
            (piece.at + arena.offsets[name] - piece.lo, tuple(p.shape))
            for name, p in arena.named
            for piece in bucket.pieces
            if piece.lo <= arena.offsets[name]
            and arena.offsets[name] + p.size <= piece.lo + piece.n
        ]
        return Content(bucket.floats, tuple(shapes), self.samples, self._memories.setdefault(b, {}))

    def traffic(self) -> tuple[int, int, int]:
        """Bytes that this rank has sent so far, those that the tree would have sent
        uncompressed, and those of the sent ones that went to other machines in sums along the
        tree.
        """
        reductions = self.reductions
        moved = self.bytes_moved + getattr(self.parts, "bytes_sent", 0)
        sent = sum(r.bytes_sent for r in reductions)
        plain = sum(r.bytes_plain for r in reductions)
        return moved + sent, moved + plain, sum(getattr(r, "bytes_wire", 0) for r in reductions)

    def mark(self, code: int) -> None:
        """Sets what this rank must have in common with the others in the next steps."""
        if self.marked is None or code == self._code:
            return
        senders = sum(bool(nodes) for nodes in self.marked.exchange.nodes)
        self._digits = digits(code, senders)
        self._code = code
        self.expected = (self._digits * senders).tolist()

    def _add_mark(self) -> None:
        """Once the sums of shards are there: adds the mark to one of this rank's, if it has
        some.
        """
        if self._digits is not None and self.marked.plan.partial:
            stats_start = self.marked.floats - native.library().stats
            _, buffer = self.marked.plan.partial[0]
            self.marked.buffers[buffer, stats_start + MARKS.start : stats_start + MARKS.stop] += (
                self._digits
            )

    def _locate(self, space: int, offset: int) -> int:
        """Where an offset of the arena, in floats, is; without gradients the statistics are all
        that buffers hold.
        """
        return offset if self.train or space != native.GRADS else offset - self.arena.size

    def use(self, data: ArrayDataset) -> None:
        """Points at the arrays of a data set."""
        c = self.context
        if data.normalised:
            c.images = data.images.ctypes.data
            c.bytes = int(data.images.dtype.itemsize == 1)
        self._arrays = np.array([a.ctypes.data for a in data.gathered], np.int64)
        c.arrays = self._arrays.ctypes.data
        c.scale = data.scale.ctypes.data
        c.shift = data.shift.ctypes.data
        self.data = data

    def run(self) -> Sums:
        """Computes the shards of this rank and completes the sums; `context.rows` and
        `context.step` are set.
        """
        raise NotImplementedError
