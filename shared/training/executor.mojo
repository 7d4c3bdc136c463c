"""Replays programs: one thread through a program, several threads through the shards of a step.

The executor decides nothing. Which thread computes which shard into which buffer, and which buffers are added in which
order, comes as lists of actions from a plan (python/odyssey/parallel/plan.py); the result does not depend on how
many threads there are because the plan follows the tree of docs/determinism.md. A check that fails ends the step, and
which one is reported is as independent of the threads.
"""

from max.algorithm import parallelize
from std.memory import unsafe_memset_zero

from kernels.elementwise import add
from kernels.lanes import Ptr
from kernels.layout import LongPtr

from .ops import execute
from .record import (
    ABSOLUTE,
    Context,
    ContextPtr,
    GRADS,
    PARAMS,
    RECORD,
    Record,
    SPACES,
    WORK,
)

comptime RUN = 0
"""Kind of an action (kind, a, b): compute shard a into buffer b."""
comptime ADD = 1
"""Kind of an action: buffer a += buffer b."""


def run_program(
    program: LongPtr, records: Int, bases: LongPtr, ctx: Context
) -> Int:
    """Runs all records in order.

    Args:
        program: Where they are.
        records: How many.
        bases: Base addresses of the SPACES spaces.
        ctx: Of the run.

    Returns:
        -1, or the record at which a check stopped the program.
    """
    for i in range(records):
        if not execute(Record(program.unsafe_offset(i * RECORD), bases), ctx):
            return i
    return -1


@fieldwise_init
struct Step(TrivialRegisterPassable):
    """The forward and backward passes of one process in one step, as both front ends describe them.
    """

    var program: LongPtr
    """Records of one shard."""
    var records: Int64
    """How many."""
    var threads: Int64
    """How many run side by side."""
    var actions: LongPtr
    """Addresses of the threads' action lists, then of the final one."""
    var counts: LongPtr
    """The lengths of those lists."""
    var params: Int64
    """Address of the arena."""
    var work: Int64
    """Address of the workspaces."""
    var work_bytes: Int64
    """Bytes of one workspace."""
    var slots: Int64
    """Workspaces of shards, used in turn; 0: one per thread."""
    var base: Int64
    """The shard that has workspace 0."""
    var zero: Int64
    """1: a shard's buffer is zeroed before it is computed."""
    var buffers: Int64
    """Address of the gradient buffers."""
    var buffer_floats: Int64
    """Floats of one buffer, a multiple of LANES."""
    var shard_size: Int64
    """Samples of a shard."""
    var samples: Int64
    """Samples of the global batch."""
    var rows: LongPtr
    """Samples of the global batch, int64."""
    var context: Context
    """First, valid and rows are set per shard."""


comptime StepPtr = Pointer[Step, MutUntrackedOrigin]
"""A step that the caller keeps alive."""


def run_step(s: Step) -> Int:
    """Runs all shards of this process, on `threads` threads, then the final additions.

    Args:
        s: What to run.

    Returns:
        -1, or the record at which a check stopped the first of the shards that were stopped. Then the sums are not
        made.
    """
    var ends = List[Int](length=Int(s.threads) + 1, fill=_DONE)
    var all = ends.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()

    def work(t: Int) {imm s, imm all}:
        all[unsafe_offset=t] = _run_actions(s, t)

    parallelize(work, Int(s.threads), Int(s.threads))
    var first = _DONE
    for end in ends:
        first = min(first, end)
    if first == _DONE:
        _ = _run_actions(s, Int(s.threads))
        return -1
    return first & (_RECORDS - 1)


# How the actions of a thread ended: shard * _RECORDS + record of what stopped them, or _DONE.
comptime _RECORDS = 1 << 24  # more than a program has
comptime _DONE = Int.MAX


def _run_actions(s: Step, t: Int) -> Int:
    var actions = LongPtr(unsafe_from_address=Int(s.actions[unsafe_offset=t]))
    var n = Int(s.buffer_floats)

    @always_inline
    def buffer(i: Int64) {imm} -> Ptr:
        return Ptr(unsafe_from_address=Int(s.buffers) + Int(i) * n * 4)

    for i in range(Int(s.counts[unsafe_offset=t])):
        var a = actions[unsafe_offset=3 * i + 1]
        var b = actions[unsafe_offset=3 * i + 2]
        if actions[unsafe_offset=3 * i] == RUN:
            if s.zero:
                unsafe_memset_zero(buffer(b), n)
            var stopped = _run_shard(s, t, Int(a), buffer(b))
            if stopped >= 0:
                return Int(a) * _RECORDS + stopped
        else:
            add(buffer(a), buffer(a), buffer(b), n)
    return _DONE


def _run_shard(s: Step, t: Int, shard: Int, grads: Ptr) -> Int:
    var bases = Array[Int64, SPACES](fill=0)
    bases[PARAMS] = s.params
    bases[GRADS] = Int64(Int(grads))
    var slot = Int64(t)
    if s.slots:
        slot = (Int64(shard) - s.base) % s.slots
    bases[WORK] = s.work + slot * s.work_bytes
    var ctx = s.context
    ctx.first = Int64(shard) * s.shard_size
    ctx.valid = min(s.shard_size, s.samples - ctx.first)
    ctx.rows = Int64(Int(s.rows.unsafe_offset(Int(ctx.first))))
    var stopped = run_program(
        s.program,
        Int(s.records),
        bases.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
        ctx,
    )
    _ = bases^
    return stopped
