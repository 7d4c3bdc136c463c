"""Reductions on a GPU: sums of buffers along the tree (kernels/reduce.mojo), statistics of losses, sums over
samples, and what has no order: the largest magnitude, exact squares, whether all numbers are finite.

Sums of floats have an order that the sizes fix. Only maxima and sums of integers, which any order gives the same, are
put together by atomics.
"""

from std.atomic import Atomic, Ordering
from std.memory import bitcast
from std.sys import is_apple_gpu

from max.gpu import block_dim, block_idx, grid_dim, thread_idx

from ..lanes import F32, LANES, IntPtr, Ptr
from .launch import blocks, GpuOp, Launch, LongPtr, Operand, Queue, StepContextPtr, call
from .quads import (
    QUADS,
    THREADS,
    Four,
    aligned,
    block_max,
    block_sum,
    divide,
    divisor,
    in_lanes,
    index,
    load4,
    of_shard,
    quads,
    small_index,
    store4,
)

# --- the tree ---------------------------------------------------------------------------
# A node over n leaves splits after the largest power of two smaller than n, so leaves 2^k j .. 2^k (j + 1) - 1 are a
# node for any k, and the tree is a binary counter: eight leaves make a node, which is added to the node of the eight
# before it if there is one waiting, and so on. Eight loads are under way at a time.

comptime RUN = 8
comptime LEVELS = 10  # of the counter
comptime LEAVES = RUN << LEVELS  # below this many


@always_inline
def tree[w: Int, L: def(Int) -> SIMD[F32, w]](leaf: L, n: Int) -> SIMD[F32, w]:
    """The sum of leaf(0) .. leaf(n - 1) along the tree; n < LEAVES, 0 for none."""
    var waiting = Array[SIMD[F32, w], LEVELS](fill=0)
    var runs = n // RUN
    for i in range(runs):
        var v = Array[SIMD[F32, w], RUN](fill=0)
        comptime for j in range(RUN):
            v[j] = leaf(i * RUN + j)
        var node = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))
        var carried = True
        comptime for level in range(LEVELS):
            if carried:
                if (i >> level) & 1 == 1:
                    node = waiting[level] + node
                else:
                    waiting[level] = node
                    carried = False
    var sum = SIMD[F32, w](0)
    var rest = n - runs * RUN
    if rest > 0:
        var v = Array[SIMD[F32, w], RUN](fill=0)
        comptime for j in range(RUN - 1):
            if j < rest:
                v[j] = leaf(runs * RUN + j)
        comptime for level in range(3):
            comptime step = 1 << level
            comptime for j in range(0, RUN, 2 * step):
                if j + step < rest:
                    v[j] += v[j + step]
        sum = v[0]
    var none = rest == 0
    comptime for level in range(LEVELS):
        if (runs >> level) & 1 == 1:
            sum = waiting[level] if none else waiting[level] + sum
            none = False
    return sum


@always_inline
def _check_leaves(n: Int) raises:
    if n < 1 or n >= LEAVES:
        raise Error(t"[gpu] the sum of {n} buffers was asked for; 1 to {LEAVES - 1} are possible")


def _tree_sum_strided(y: Ptr, x: Ptr, stride: Int64, n_: Int32, size_: Int64):
    var n = Int(n_)
    var size = Int(size_)
    var i = 4 * index()
    if i >= size:
        return
    if i + 4 <= size and (Int(y) | Int(x) | 4 * Int(stride)) & 15 == 0:

        @always_inline
        def four(j: Int) {imm} -> Four:
            return load4(x, j * Int(stride) + i)

        store4(y, i, tree[4](four, n))
        return
    var end = min(i + 4, size)
    while i < end:

        @always_inline
        def one(j: Int) {imm} -> SIMD[F32, 1]:
            return x[unsafe_offset=j * Int(stride) + i]

        y[unsafe_offset=i] = tree[1](one, n)
        i += 1


def tree_sum_strided(q: Queue, y: Ptr, x: Ptr, stride: Int, n: Int, size: Int) raises:
    """Sums n buffers of `size` floats that lie `stride` floats apart along the tree. y may be x, or any of them."""
    _check_leaves(n)
    q.enqueue_function[_tree_sum_strided](
        y, x, Int64(stride), Int32(n), Int64(size), grid_dim=blocks(size, 4 * THREADS), block_dim=THREADS
    )


# --- statistics -----------------------------------------------------------------------------


def _stats(
    totals_: Operand,
    loss: Operand,
    stats: Operand,
    at: Int32,
    shards: Int32,
    fold: Int32,
    buffers: Int32,
    accumulate: Int32,
    ctx: StepContextPtr,
):
    var b = index()
    if b >= Int(buffers):
        return
    var first = b * Int(fold)
    var n = min(Int(fold), Int(shards) - first)

    @always_inline
    def losses(j: Int) {imm} -> SIMD[F32, 1]:
        return loss.at(first + j)[]

    @always_inline
    def correct(j: Int) {imm} -> SIMD[F32, 1]:
        return stats.at(first + j)[unsafe_offset=2]

    @always_inline
    def valid(j: Int) {imm} -> SIMD[F32, 1]:
        return Float32(ctx[].valid(first + j))

    var totals = totals_.at(b)
    if at != 0:
        var sum = tree[1](losses, n)[0]
        if accumulate != 0:
            sum += totals[unsafe_offset=Int(at)]
        totals[unsafe_offset=Int(at)] = sum
        return
    var sums = SIMD[F32, 4](tree[1](losses, n), tree[1](valid, n), tree[1](correct, n), 0)
    comptime for i in range(3):
        if accumulate != 0:
            totals[unsafe_offset=i] += sums[i]
        else:
            totals[unsafe_offset=i] = sums[i]


def stats(
    q: Queue,
    shards: Int,
    fold: Int,
    totals: Operand,  # one buffer per `fold` shards
    loss: Operand,  # (1) of each shard
    stats_of_loss: Operand,  # (4) of each shard, of a loss op
    at: Int,
    ctx: StepContextPtr,
    accumulate: Bool,
) raises:
    """Sums (loss, samples, correct predictions) of the shards of a buffer along the tree into its first three floats;
    with `accumulate` adds the sums to what is there. If `at` is not 0, only the losses, into float `at`.
    """
    _check_leaves(fold)
    var buffers = (shards + fold - 1) // fold
    q.enqueue_function[_stats](
        totals,
        loss,
        stats_of_loss,
        Int32(at),
        Int32(shards),
        Int32(fold),
        Int32(buffers),
        Int32(accumulate),
        ctx,
        grid_dim=blocks(buffers, THREADS),
        block_dim=THREADS,
    )


# --- sums over samples --------------------------------------------------------------------------


def _sum_lanes(y: Operand, x_: Operand, N: Int32, vectors: Int32, by_F: UInt64, ctx: StepContextPtr):
    comptime PARTS = THREADS // LANES
    var t = thread_idx.x
    var lane = t % LANES
    var live = Int(N) if N >= 0 else ctx[].valid(block_idx.y)
    var x = of_shard(x_).unsafe_offset(lane)
    var s = Float32(0)
    for i in range(t // LANES, Int(vectors), PARTS):
        if Int(divide(UInt32(i), by_F)) * LANES + lane < live:
            s += x[unsafe_offset=i * LANES]
    s = block_sum[THREADS](s)
    if t == 0:
        of_shard(y)[] = s


def sum_lanes(
    q: Queue,
    shards: Int,
    y: Operand,  # (1)
    x: Operand,  # (G, F, L)
    N: Int,
    G: Int,
    F: Int,
    ctx: StepContextPtr,
) raises:
    """Writes the sum over all features of the first N lanes of x, of the samples that exist if N is -1.

    One block per shard: thread t adds lane t % L of every 16th feature, then halves are added; not the order of the
    CPU.
    """
    _ = quads(G * F)
    q.enqueue_function[_sum_lanes](
        y, x, Int32(N), Int32(G * F), divisor(F), ctx, grid_dim=(1, shards), block_dim=THREADS
    )


def _sum_lanes_backward(dx: Operand, dy: Operand, N: Int32, n: UInt32, by_F: UInt64, ctx: StepContextPtr):
    var i = small_index()
    if i >= n:
        return
    var live = Int(N) if N >= 0 else ctx[].valid(block_idx.y)
    var d = of_shard(dy)[]
    var g = divide(i // UInt32(QUADS), by_F)
    var first = Int(g) * LANES + Int(i % UInt32(QUADS)) * 4
    var v = Four(0)
    comptime for j in range(4):
        v[j] = d if first + j < live else 0
    store4(of_shard(dx), 4 * Int(i), v)


def sum_lanes_backward(
    q: Queue,
    shards: Int,
    dx: Operand,  # (G, F, L)
    dy: Operand,  # (1)
    N: Int,
    G: Int,
    F: Int,
    ctx: StepContextPtr,
) raises:
    """Writes dy into the first N lanes of dx (the samples that exist if N is -1), 0 into the rest."""
    in_lanes(dx)
    var n = quads(G * F)
    q.enqueue_function[_sum_lanes_backward](
        dx, dy, Int32(N), UInt32(n), divisor(F), ctx, grid_dim=(blocks(n, THREADS), shards), block_dim=THREADS
    )


# --- without an order -----------------------------------------------------------------------------
# Up to ALONE floats one block does it in one launch. For more the result is set to 0 first, and blocks add to it. Metal
# has no 64-bit atomics: there one block does it for any n.

comptime MANY = 1024  # threads of a block
comptime ALONE = 1 << 16
comptime MOST_BLOCKS = 264
comptime NOT_FINITE = UInt32(0x7F800000)  # infinity; the bits of larger magnitudes are NaNs


def _clear(y: IntPtr, n: Int32):
    if thread_idx.x < Int(n):
        y[unsafe_offset=thread_idx.x] = 0


@always_inline
def _clear_for(q: Queue, y: IntPtr, words: Int, n: Int) raises -> Int:
    """Clears the result if it takes several blocks; returns how many."""
    if n <= ALONE or q.api() == "metal":
        return 1
    q.enqueue_function[_clear](y, Int32(words), grid_dim=1, block_dim=32)
    return min(MOST_BLOCKS, blocks(n, 16 * MANY))


@always_inline
def _each[F: def(UInt32) -> None, //](visit: F, x: Ptr, n: Int):
    """Calls visit with the bits of the floats of this thread, any block of MANY threads."""
    var step = grid_dim.x * MANY
    var i = block_idx.x * MANY + thread_idx.x
    var words = x.unsafe_bitcast[UInt32]()
    var done = 0
    if aligned(x):
        var fours = n // 4
        while i < fours:
            var v = words.unsafe_offset(4 * i).unsafe_load[width=4, alignment=16]()
            comptime for j in range(4):
                visit(v[j])
            i += step
        done = 4 * fours
        i = block_idx.x * MANY + thread_idx.x
    while done + i < n:
        visit(words[unsafe_offset=done + i])
        i += step


def _largest(y: IntPtr, x: Ptr, n: Int64):
    var most = UInt32(0)

    @always_inline
    def visit(bits: UInt32) {mut most}:
        most = max(most, min(bits & 0x7FFFFFFF, NOT_FINITE))

    _each(visit, x, Int(n))
    var found = block_max[MANY](Int32(most))
    if thread_idx.x == 0:
        if grid_dim.x == 1:
            y[] = found
        else:
            Atomic.max[ordering=Ordering.RELAXED](y, found)


def largest(q: Queue, y: Ptr, x: Ptr, n: Int) raises:
    """Writes the largest magnitude of n floats; infinity if one of them is NaN or infinite.

    The value of the CPU: floats from 0 on are in the order of their bits.
    """
    var result = y.unsafe_bitcast[Int32]()
    var grid = _clear_for(q, result, 1, n)
    q.enqueue_function[_largest](result, x, Int64(n), grid_dim=grid, block_dim=MANY)


@always_inline
def _square(t: Float32) -> UInt64:
    """t^2 2^62, cut; |t| < 1. t = m 2^(e - 150), so this is m^2 2^(2 e - 238)."""
    var bits = bitcast[DType.uint32](t) & 0x7FFFFFFF
    var e = Int32(bits >> 23)
    var m = UInt64(bits & 0x7FFFFF)
    if e == 0:
        e = 1
    else:
        m |= 0x800000
    var shift = 2 * e - 238
    if shift >= 0:
        return (m * m) << UInt64(shift)
    if shift <= -64:
        return 0
    return (m * m) >> UInt64(-shift)


@always_inline
def _unit(largest: Int32) -> Float32:
    """2^-e for a largest magnitude of these bits in [2^(e - 1), 2^e), as norm.py has it; at most 2^126."""
    var e = 253 - (largest >> 23)
    if e >= 1:
        return bitcast[F32](UInt32(e) << 23)
    return bitcast[F32](UInt32(0x400000) >> UInt32(min(-e, 22)))


def _fixed_squares(y: LongPtr, largest: IntPtr, x: Ptr, n: Int64):
    var unit = _unit(largest[])
    var high = Int64(0)
    var low = Int64(0)

    @always_inline
    def visit(bits: UInt32) {mut high, mut low, imm}:
        var s = _square(bitcast[F32](bits) * unit)
        high += Int64(s >> 31)
        low += Int64(s & 0x7FFFFFFF)

    _each(visit, x, Int(n))
    high = block_sum[MANY](high)
    low = block_sum[MANY](low)
    if thread_idx.x == 0:
        if grid_dim.x == 1:
            y[unsafe_offset=0] = high
            y[unsafe_offset=1] = low
        else:
            comptime if not is_apple_gpu():
                _ = Atomic.fetch_add[ordering=Ordering.RELAXED](y, high)
                _ = Atomic.fetch_add[ordering=Ordering.RELAXED](y.unsafe_offset(1), low)


def fixed_squares(q: Queue, y: LongPtr, largest: IntPtr, x: Ptr, n: Int) raises:
    """Writes the sum of (unit x)^2 over n floats as y[0] 2^-31 + y[1] 2^-62: the numbers of the CPU, by integers alone.

    The unit is the power of two that takes the largest magnitude to [1/2, 1); that is read from device memory, so the
    host need not wait for it in between.
    """
    var grid = _clear_for(q, y.unsafe_bitcast[Int32](), 4, n)
    q.enqueue_function[_fixed_squares](y, largest, x, Int64(n), grid_dim=grid, block_dim=MANY)


def _finite(flag: IntPtr, x: Ptr, n: Int64):
    var bad = False

    @always_inline
    def visit(bits: UInt32) {mut bad}:
        if bits & NOT_FINITE == NOT_FINITE:
            bad = True

    _each(visit, x, Int(n))
    if bad:
        flag[] = 0


def finite(q: Queue, flag: IntPtr, x: Ptr, n: Int) raises:
    """Sets the flag to 0 if one of n floats is NaN or infinite, else leaves it alone."""
    q.enqueue_function[_finite](flag, x, Int64(n), grid_dim=min(2 * MOST_BLOCKS, blocks(n, 4 * MANY)), block_dim=MANY)


# --- ops ----------------------------------------------------------------------------------


def _stats_op(q: Queue, r: Launch) raises:
    stats(q, r.shards, r.fold, r.op(1), r.op(2), r.op(3), r.int(4), r.context, r.accumulate)


def _finite_op(q: Queue, r: Launch) raises:
    finite(q, r.ok(), r.ptr(1), r.int(2))


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [
        GpuOp("stats", _stats_op),
        GpuOp("sum_lanes", call[sum_lanes]),
        GpuOp("sum_lanes_backward", call[sum_lanes_backward]),
        GpuOp("finite", _finite_op),
    ]
