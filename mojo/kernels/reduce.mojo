"""Reductions in a fixed order, or without one: sum of n buffers along a tree, exact squared norm, finite check, sums
over samples.

The tree over buffers 0..n-1 (docs/determinism.md): a node over n leaves splits after the largest power of two smaller
than n. It is the tree of recursive halving when n is a power of two, and a worker that owns an aligned block of leaves
owns a subtree.
"""

from std.utils.numerics import inf

from .lanes import F32, LANES, LongPtr, Ptr, Vec, first, in_tiles_and_ones, load, load_first, store
from .op import Op, by_layout, call
from .record import Record


def split(n: Int) -> Int:
    """The leaves of the left child of a node over n > 1 leaves."""
    var left = 1
    while 2 * left < n:
        left *= 2
    return left


@always_inline
def _tree[w: Int](buffers: LongPtr, lo: Int, n: Int, i: Int) -> SIMD[F32, w]:
    if n == 1:
        return load[w](Ptr(unsafe_from_address=Int(buffers[unsafe_offset=lo])), i)
    return _tree_node[w](buffers, lo, n, i)


def _tree_node[w: Int](buffers: LongPtr, lo: Int, n: Int, i: Int) -> SIMD[F32, w]:
    var left = split(n)
    return _tree[w](buffers, lo, left, i) + _tree[w](buffers, lo + left, n - left, i)


def tree_sum(y: Ptr, buffers: LongPtr, n: Int, size: Int):
    """Sums n buffers of `size` floats, at these addresses, along the tree. y may be any of them."""

    @always_inline
    def some[w: Int](i: Int) {imm}:
        store[w](y, i, _tree[w](buffers, 0, n, i))

    in_tiles_and_ones[LANES](size, some)


def largest(y: Ptr, x: Ptr, n: Int):
    """Writes the largest magnitude of n floats; infinity if one of them is NaN or infinite."""
    var acc = Vec(0)
    var bad = Vec(0)
    var i = 0
    while i + LANES <= n:
        var v = load(x, i)
        bad += v - v
        acc = max(acc, abs(v))
        i += LANES
    var tail = load_first(x, i, n - i)
    bad += tail - tail
    acc = max(acc, abs(tail))
    y[] = acc.reduce_max() if bad.reduce_add() == 0 else inf[F32]()


comptime Wide = SIMD[DType.float64, LANES]
comptime Whole = SIMD[DType.int64, LANES]


def fixed_squares(y: LongPtr, x: Ptr, n: Int, unit: Float32):
    """Writes the sum of (unit x)^2 over n floats as y[0] 2^-31 + y[1] 2^-62.

    |unit x| must be below 1 and unit a power of two, so that a square is exact in a float64. It is cut after 62 binary
    places; sums of integers have no order, so pieces may be added up by anyone in any way.
    """
    var high = Whole(0)
    var low = Whole(0)
    comptime SHIFT = Float64(2147483648.0)  # 2^31

    for i in range(0, n, LANES):
        var v = load(x, i) if i + LANES <= n else load_first(x, i, n - i)
        var t = (v * unit).cast[DType.float64]()
        var s = t * t * SHIFT
        var h = s.cast[DType.int64]()  # towards zero
        high += h
        low += ((s - h.cast[DType.float64]()) * SHIFT).cast[DType.int64]()
    y[unsafe_offset=0] = high.reduce_add()
    y[unsafe_offset=1] = low.reduce_add()


def is_finite(x: Ptr, n: Int) -> Bool:
    """True if none of n floats is NaN or infinite (x - x is 0 for finite x, NaN for the others)."""
    var acc = Vec(0)
    var i = 0
    while i + LANES <= n:
        var v = load(x, i)
        acc += v - v
        i += LANES
    var tail = load_first(x, i, n - i)
    return (acc + (tail - tail)).reduce_add() == 0


@always_inline
def _samples(N: Int, r: Record) -> Int:
    return N if N >= 0 else Int(r.context[].valid)


def sum_lanes[L: Int](y: Ptr, x: Ptr, N: Int, G: Int, F: Int, r: Record):
    """Writes the sum over all features of the first N lanes of x (G, F, L); of the shard's samples if N is -1."""
    var s = SIMD[F32, L](0)
    for g in range(G):
        var live = first[L](_samples(N, r) - g * L)
        var t = SIMD[F32, L](0)
        for f in range(F):
            t += load[L](x, (g * F + f) * L)
        s += live.select(t, SIMD[F32, L](0))
    y[] = s.reduce_add()


def sum_lanes_backward[L: Int](dx: Ptr, dy: Ptr, N: Int, G: Int, F: Int, r: Record):
    """Writes dy into the first N lanes of dx (G, F, L), 0 into the rest."""
    for g in range(G):
        var live = first[L](_samples(N, r) - g * L)
        var d = live.select(SIMD[F32, L](dy[]), SIMD[F32, L](0))
        for f in range(F):
            store[L](dx, (g * F + f) * L, d)


def _finite(x: Ptr, n: Int, r: Record):
    if not is_finite(x, n):
        r.context[].stopped = 1


def _stats(total: Ptr, loss: Ptr, stats: Ptr, at: Int, r: Record):
    if at:  # of a metric
        total[unsafe_offset=at] += loss[]
        return
    total[unsafe_offset=0] += loss[]
    total[unsafe_offset=1] += Float32(r.context[].valid)
    total[unsafe_offset=2] += stats[unsafe_offset=2]


def ops() -> List[Op]:
    """The ops of this file.

    `finite` ends the program if a number is not; N is -1 for the samples of the shard. `stats` adds loss, samples and
    correct predictions to totals 0, 1, 2; or the loss alone, to total `at`, if that is not 0.
    """
    return [
        Op("tree_sum", "y; addresses; n, size", call[tree_sum]),
        Op("largest", "y; x; n", call[largest]),
        Op("fixed_squares", "y; x; n, unit", call[fixed_squares]),
        Op("finite", "; x; n", call[_finite]),
        Op("stats", "+totals; loss, stats; at", call[_stats], "sums"),
        Op("sum_lanes", "y; x; N, G, F", by_layout[call[sum_lanes[LANES]], call[sum_lanes[1]]]),
        Op(
            "sum_lanes_backward",
            "dx; dy; N, G, F",
            by_layout[call[sum_lanes_backward[LANES]], call[sum_lanes_backward[1]]],
        ),
    ]
