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

#: Statistics that compare a code between ranks (`Runner.mark`). They follow the statistics of
#: losses and metrics.
MARKS = slice(16, 32)
EXACT = 1 << 24  # up to which float32 has all integers
INDEX_BYTES = 8  # of one number in `context.rows`, which are the indices of a batch's samples


def digits(code: int, ranks: int) -> np.ndarray:
    """Encodes a code so that the sum over the ranks shows whether all of them have the same code.

    Returns float32 (16,). Each number holds as many bits of the code as fit. A bit is one digit of
    base ranks + 1, so digits don't carry when the numbers of all ranks are added. All ranks have
    the same bit if its digit in the sum is 0 or `ranks`.
    """
    base = ranks + 1
    numbers = MARKS.stop - MARKS.start
    bits_per_number = max(k for k in range(1, 25) if base**k <= EXACT or k == 1)

    def encode_bits(first_bit: int) -> int:
        return sum((code >> (first_bit + j) & 1) * base**j for j in range(bits_per_number))

    return np.array([encode_bits(i * bits_per_number) for i in range(numbers)], np.float32)


class Storage:
    """Memory that all runners of an engine share, as arrays (bytes,) uint8 by name.

    Only one runner runs at a time, so they can use the same memory for the same purpose. If a
    runner needs a larger array, on any rank, the engine prepares the other runners again when it
    needs them.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        #: True if an array was replaced by a larger one. The engine sets it back to False.
        self.grown = False
        #: If True, a runner that needs a larger array gets memory that isn't shared.
        self.fixed = False

    def __call__(
        self, name: str, nbytes: int, make: Callable[..., np.ndarray] = native.aligned
    ) -> np.ndarray:
        """Returns `nbytes` bytes of the array `name`, which `make` allocates if necessary."""
        if name not in self.arrays or len(self.arrays[name]) < nbytes:
            if self.fixed:
                return make(nbytes, np.uint8, zero=False)
            self.grown = True
            self.arrays[name] = make(nbytes, np.uint8, zero=False)
        return self.arrays[name][:nbytes]


class Program(NamedTuple):
    """Program that a rank runs for one shard of `samples` samples."""

    samples: int
    # The runner may change them. Empty if shards are computed op by op.
    records: list[Record]
    place_of: Callable[[Record], int]  # returns the pipeline position of a record
    lanes: bool  # True: the samples are stored in lanes, even if there are few


@dataclasses.dataclass(frozen=True)
class RunnerInputs:
    """Arguments of a runner: parts of its engine, and the kind of batch that it runs."""

    layout: Layout
    arena: Arena
    groups: Groups
    ownership: Ownership
    recordings: Programs  # records shards that are computed op by op
    storage: Storage
    #: Values that a reduction strategy keeps from step to step, by bucket.
    memories: dict[int, dict[str, Any]]
    team: DeviceGroup | None  # the GPUs of this process
    train: bool
    seed: int
    precision: str
    #: The program of a shard as this rank runs it. If the last shard has fewer samples and isn't
    #: filled up, its program comes second. It has the same records with smaller sizes.
    programs: list[Program]
    samples: int  # of a batch
    form: Form  # of a sample
    #: Reductions of batches of this size, by name. Programs of one size share them.
    known_reductions: dict[Any, Any]


def set_arrays(context: native.Context, data: ArrayDataset) -> np.ndarray:
    """Makes what runs with a context read the arrays of a data set.

    Returns the addresses of the arrays, which must live as long as the context.
    """
    if data.normalised:
        context.images = data.images.ctypes.data
        context.bytes = int(data.images.dtype.itemsize == 1)
    addresses = np.array([a.ctypes.data for a in data.gathered], np.int64)
    context.arrays = addresses.ctypes.data
    context.scale = data.scale.ctypes.data
    context.shift = data.shift.ctypes.data
    return addresses


class Runner:
    """Base of DirectRunner, BucketedRunner, PipelineRunner and gpu.runner.GpuRunner.

    `parts`: the parameters that this rank computes with and updates (zero.Parts). None if shards
    are computed op by op.
    """

    plan: planning.Plan  # of the shards of this process
    work_bytes = 0  # of activations and scratch memory
    shares_work = True  # True: activations are in memory shared with other runners (Storage)
    reductions: Sequence[Reduction] = ()  # between processes
    bytes_moved = 0  # bytes that this rank has sent so far outside of its reductions
    grad_bytes = 0  # of gradients and of their reduction's memory that isn't shared
    plan_lines: Sequence[str] = ()  # about how shards are computed, for the user
    looks_ahead = False  # True: copies the next batch to the device during a step
    fingerprint = 0  # of the program, which must be the same on all ranks
    # The reduction whose last floats, the statistics, compare codes between ranks (`mark`).
    marked: Reduction | None = None
    expected: list[float] | None = None  # sums of the digits if all ranks have the same code
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
        self.batch: Batch | None = None  # the one that is being run
        self.upcoming: Batch | None = None  # the next one, if it is known
        self.data: ArrayDataset | None = None

    def _get_or_make(self, name: Any, make: Callable[[], Any]) -> Any:
        """Returns the reduction called `name`, or calls `make` and keeps its result.

        Creating a reduction is a collective call, so runners for batches of one size share them.
        """
        if name not in self._known_reductions:
            self._known_reductions[name] = make()
        return self._known_reductions[name]

    def _reduction(self, floats: int, **options: Any) -> Reduction:
        """Creates a reduction of `floats` floats for the plan of this runner. Collective."""
        layout = self.layout
        return strategy.make(
            layout.reduction, self.groups.dp, self.plan, floats, layout.workers, **options
        )

    def content(self, b: int = 0, whole_arena: bool = False) -> Content | None:
        """Describes the gradients in a reduction: those of bucket b, or of the whole arena.

        Returns None if this runner computes no gradients. Compressing strategies need the shapes of
        the parameters, and memory that lasts from step to step.
        """
        if not self.train:
            return None
        arena = self.arena
        if whole_arena:
            bucket = bucketing.of_ranges([(0, arena.size)], ())
        else:
            bucket = self.parts.buckets[b]
        shapes = []  # of the parameters that are in the bucket as a whole, with their places in it
        for name, parameter in arena.named:
            offset = arena.offsets[name]
            shapes += [
                (piece.at + offset - piece.lo, tuple(parameter.shape))
                for piece in bucket.pieces
                if piece.lo <= offset and offset + parameter.size <= piece.lo + piece.n
            ]
        return Content(bucket.floats, tuple(shapes), self.samples, self._memories.setdefault(b, {}))

    def traffic(self) -> tuple[int, int, int]:
        """Returns three numbers of bytes of this rank so far (sent, plain, wire).

        `sent` is what it has sent. `plain` is what it would have sent without compression, with
        the reduction "tree". `wire` is the part of `sent` that reductions along the tree sent to
        other machines.
        """
        reductions = self.reductions
        outside = self.bytes_moved + getattr(self.parts, "bytes_sent", 0)
        sent = sum(r.bytes_sent for r in reductions)
        plain = sum(r.bytes_plain for r in reductions)
        wire = sum(getattr(r, "bytes_wire", 0) for r in reductions)
        return outside + sent, outside + plain, wire

    def mark(self, code: int) -> None:
        """Sets the code that must be the same on all ranks in the next steps.

        The sums of the next step compare it (`digits`), so that no extra message is necessary.
        """
        if self.marked is None or code == self._code:
            return
        senders = sum(bool(nodes) for nodes in self.marked.exchange.nodes)
        self._digits = digits(code, senders)
        self._code = code
        self.expected = (self._digits * senders).tolist()

    def _add_mark(self) -> None:
        """Adds the digits of the code to the statistics of this rank's first partial sum.

        Call it when the shards are computed and before the reduction starts. A rank without a
        shard has no partial sum and adds nothing.
        """
        if self._digits is not None and self.marked.plan.partial:
            stats_start = self.marked.floats - native.library().stats
            _, buffer = self.marked.plan.partial[0]
            self.marked.buffers[buffer, stats_start + MARKS.start : stats_start + MARKS.stop] += (
                self._digits
            )

    def _locate_floats(self, space: int, offset: int) -> int:
        """Returns where an offset of the arena (in floats) is within its space.

        A buffer has the arena's layout, with the statistics after the gradients. In an evaluation
        it holds only the statistics, so they start at 0.
        """
        return offset if self.train or space != native.GRADS else offset - self.arena.size

    def use(self, data: ArrayDataset) -> None:
        """Makes the next steps read the arrays of a data set."""
        self._array_addresses = set_arrays(self.context, data)
        self.data = data

    def run(self) -> Sums:
        """Computes the shards of this rank and returns the sums over all ranks. Collective.

        The engine sets `context.rows` and `context.step` before.
        """
        raise NotImplementedError
