"""Reductions in a fixed order: the sum of n buffers along a tree, squared norm, finite check, sums over samples.

The tree over buffers 0..n-1 (docs/determinism.md): a node over n leaves splits after the largest power of two smaller
than n. It is the tree of recursive halving when n is a power of two, and a worker that owns an aligned block of leaves
owns a subtree.
"""

from .lanes import F32, LANES, Ptr, Vec, first, load, store, madd

# Blocks of the squared norm: 4096 floats are summed in lanes of float64, the block sums one after the other.
comptime BLOCK = 4096


def split(n: Int) -> Int:
    """The leaves of the left child of a node over n > 1 leaves."""
    var left = 1
    while 2 * left < n:
        left *= 2
    return left


@always_inline
def _tree(
    buffers: Pointer[Int64, MutUntrackedOrigin], lo: Int, n: Int, i: Int
) -> Vec:
    if n == 1:
        return load(Ptr(unsafe_from_address=Int(buffers[unsafe_offset=lo])), i)
    return _tree_node(buffers, lo, n, i)


def _tree_node(
    buffers: Pointer[Int64, MutUntrackedOrigin], lo: Int, n: Int, i: Int
) -> Vec:
    var left = split(n)
    return _tree(buffers, lo, left, i) + _tree(buffers, lo + left, n - left, i)


def tree_sum(
    y: Ptr,
    buffers: Pointer[
        Int64, MutUntrackedOrigin
    ],  # addresses of n buffers of `size` floats
    n: Int,
    size: Int,  # a multiple of LANES
):
    """Sums n buffers along the tree. y may be any of them."""
    for i in range(0, size, LANES):
        store(y, i, _tree(buffers, 0, n, i))


def squared_norm(y: Ptr, x: Ptr, n: Int):
    """Writes the sum of squares of n floats, in an order that depends on n only.
    """
    var total: Float64 = 0
    for start in range(0, n, BLOCK):
        var end = min(start + BLOCK, n)
        var acc = SIMD[DType.float64, LANES](0)
        var i = start
        while i + LANES <= end:
            var v = load(x, i).cast[DType.float64]()
            acc = madd(v, v, acc)
            i += LANES
        var s = acc.reduce_add()
        while i < end:
            var v = x[unsafe_offset=i].cast[DType.float64]()
            s += v * v
            i += 1
        total += s
    y[] = total.cast[F32]()


def is_finite(x: Ptr, n: Int) -> Bool:
    """True if none of n floats is NaN or infinite (x - x is 0 for finite x, NaN for the others).
    """
    var acc = Vec(0)
    var i = 0
    while i + LANES <= n:
        var v = load(x, i)
        acc += v - v
        i += LANES
    var s = acc.reduce_add()
    while i < n:
        s += x[unsafe_offset=i] - x[unsafe_offset=i]
        i += 1
    return s == 0


def sum_lanes[L: Int](y: Ptr, x: Ptr, N: Int, G: Int, F: Int):
    """Writes the sum over all features of the first N lanes of x (G, F, L)."""
    var s = SIMD[F32, L](0)
    for g in range(G):
        var live = first[L](N - g * L)
        var t = SIMD[F32, L](0)
        for f in range(F):
            t += load[L](x, (g * F + f) * L)
        s += live.select(t, SIMD[F32, L](0))
    y[] = s.reduce_add()


def sum_lanes_backward[L: Int](dx: Ptr, dy: Ptr, N: Int, G: Int, F: Int):
    """Writes dy into the first N lanes of dx (G, F, L), 0 into the rest."""
    for g in range(G):
        var live = first[L](N - g * L)
        var d = live.select(SIMD[F32, L](dy[]), SIMD[F32, L](0))
        for f in range(F):
            store[L](dx, (g * F + f) * L, d)
