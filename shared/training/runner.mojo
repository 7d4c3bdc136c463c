"""What one batch size needs: where its shards are computed, its plan, program, buffers and reduction. Made once each.
"""

from std.math import ceildiv

from kernels.lanes import LANES, Ptr

from .arena import aligned_zeros
from .record import STATS
from .plan import Plan
from .program import Program
from .reduction import TreeReduction
from .stages import Pass
from .tape import SMALL_BATCH


@fieldwise_init
struct Sums(ImplicitlyCopyable, Movable):
    """Sums over the samples of a global batch. Gradients are valid until the next run.
    """

    var loss: Float64
    """Of the losses."""
    var samples: Float64
    """How many."""
    var correct: Float64
    """How many of them the model names right."""
    var grads: Ptr
    """Sums of gradients, in the layout of the arena."""


@fieldwise_init
struct Layout(ImplicitlyCopyable, Movable):
    """Where the shards of a step are computed: everything that changes no bit, and the shard size, which does.
    """

    var rank: Int
    """This process."""
    var ranks: Int
    """All processes."""
    var workers: Int
    """Of each process."""
    var threads: Int
    """Of this process."""
    var shard_size: Int
    """Samples."""


def effective_shard_size(samples: Int, shard_size: Int) -> Int:
    """The shard size of a batch; one smaller than a shard gets no more groups of lanes than it fills.

    Args:
        samples: Of the batch.
        shard_size: As given.

    Returns:
        Samples.
    """
    if samples >= shard_size:
        return shard_size
    if samples <= SMALL_BATCH:
        return samples
    return min(shard_size, ceildiv(samples, LANES) * LANES)


struct Runner(Movable):
    """What one batch size needs; made when it is first met."""

    var samples: Int
    """Of the global batch."""
    var channels: Int
    """Of a sample; 1 if it is features."""
    var training: Bool
    """Whether it trains."""
    var shard_size: Int
    """Samples of a shard."""
    var program: Int
    """Which of the engine's programs."""
    var floats: Int
    """Floats of a gradient buffer, statistics included."""
    var plan: Plan
    """What the process computes, and in which order it adds."""
    var reduction: Optional[TreeReduction]
    """How the ranks complete the sum; none if there is one rank."""
    var buffers: Ptr
    """Gradient buffers, one after the other."""
    var starts: List[Int64]
    """Addresses of the threads' actions, then of the final ones."""
    var counts: List[Int64]
    """Their numbers."""

    def __init__(
        out self,
        samples: Int,
        channels: Int,
        training: Bool,
        program: Int,
        grads: Int,
        lay: Layout,
    ):
        """Plans and allocates.

        Args:
            samples: Of the global batch.
            channels: Of a sample; 1 if it is features.
            training: Whether it trains.
            program: Which of the engine's programs.
            grads: Floats of a gradient buffer before the statistics.
            lay: Where shards are computed.
        """
        self.samples = samples
        self.channels = channels
        self.training = training
        self.program = program
        self.shard_size = effective_shard_size(samples, lay.shard_size)
        self.floats = grads + STATS
        self.plan = Plan(
            ceildiv(samples, self.shard_size),
            lay.rank,
            lay.ranks,
            lay.workers,
            lay.threads,
        )
        self.buffers = aligned_zeros(self.plan.buffers * self.floats)
        self.reduction = None
        if lay.ranks > 1:
            self.reduction = TreeReduction(
                self.plan, lay.rank, lay.ranks, lay.workers, self.floats
            )
        self.starts = List[Int64]()
        self.counts = List[Int64]()
        for i in range(len(self.plan.threads)):
            self.starts.append(Int64(self.plan.threads[i].address()))
            self.counts.append(Int64(len(self.plan.threads[i])))
        self.starts.append(Int64(self.plan.final.address()))
        self.counts.append(Int64(len(self.plan.final)))

    def __deinit__(deinit self):
        """Frees its memory."""
        self.buffers.unsafe_free()

    def result(self) -> Ptr:
        """Where the sum is.

        Returns:
            The buffer.
        """
        var first = self.plan.places[0] if len(self.plan.places) else 0
        return self.buffers.unsafe_offset(first * self.floats)


@fieldwise_init
struct Traced(Movable):
    """The program of one shard of `samples` samples, and how many classes its loss saw.
    """

    var samples: Int
    """Of the shard."""
    var channels: Int
    """Of a sample; 1 if it is features."""
    var training: Bool
    """Whether it has a backward pass."""
    var outputs: Int
    """Classes that its loss saw."""
    var program: Program
    """The records."""


@fieldwise_init
struct Staged(Movable):
    """What a rank does for one batch size where each has a place of the model.
    """

    var samples: Int
    """Of the global batch."""
    var channels: Int
    """Of a sample; 1 if it is features."""
    var training: Bool
    """Whether it trains."""
    var outputs: Int
    """Classes that its loss saw."""
    var pass_: Pass
    """What this rank does."""
