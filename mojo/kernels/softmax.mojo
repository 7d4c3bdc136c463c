"""Softmax, log-softmax and the losses on them, over lanes: each lane walks the F classes of its own sample.

A loss is a sum and a count, never a mean: means are taken once, over the whole global batch. A label of -1 marks a lane
without a sample; it counts nowhere and its gradient is 0.
"""

from std.utils.numerics import nan

from .functions import exp, log
from .lanes import F32, IntPtr, LANES, Ptr, load, store, madd
from .op import Op, by_layout, call


@always_inline
def _max[L: Int](x: Ptr, F: Int) -> SIMD[F32, L]:
    var m = load[L](x, 0)
    for f in range(1, F):
        m = max(m, load[L](x, f * L))
    return m


def softmax_forward[L: Int](y: Ptr, x: Ptr, G: Int, F: Int):
    """Computes y = exp(x - max x) / sum exp(x - max x), x and y (G, F, L)."""
    for g in range(G):
        _ = _softmax[L](y.unsafe_offset(g * F * L), x.unsafe_offset(g * F * L), F)


@always_inline
def _softmax[L: Int](y: Ptr, x: Ptr, F: Int) -> SIMD[F32, L]:
    """Writes the softmax and returns log sum exp(x)."""
    var m = _max[L](x, F)
    var s = SIMD[F32, L](0)
    for f in range(F):
        var e = exp(load[L](x, f * L) - m)
        store[L](y, f * L, e)
        s += e
    var inverse = 1 / s
    for f in range(F):
        store[L](y, f * L, load[L](y, f * L) * inverse)
    return m + log(s)


def softmax_backward[L: Int](dx: Ptr, dy: Ptr, y: Ptr, G: Int, F: Int):
    """Computes dx = y (dy - sum dy y)."""
    for g in range(G):
        var at = g * F * L
        var s = SIMD[F32, L](0)
        for f in range(F):
            s = madd(load[L](dy, at + f * L), load[L](y, at + f * L), s)
        for f in range(F):
            var i = at + f * L
            store[L](dx, i, load[L](y, i) * (load[L](dy, i) - s))


def log_softmax_forward[L: Int](y: Ptr, x: Ptr, G: Int, F: Int):
    """Computes y = x - log sum exp(x)."""
    for g in range(G):
        var at = g * F * L
        var m = _max[L](x.unsafe_offset(at), F)
        var s = SIMD[F32, L](0)
        for f in range(F):
            s += exp(load[L](x, at + f * L) - m)
        m += log(s)
        for f in range(F):
            store[L](y, at + f * L, load[L](x, at + f * L) - m)


def log_softmax_backward[L: Int](dx: Ptr, dy: Ptr, y: Ptr, G: Int, F: Int):
    """Computes dx = dy - exp(y) sum dy."""
    for g in range(G):
        var at = g * F * L
        var s = SIMD[F32, L](0)
        for f in range(F):
            s += load[L](dy, at + f * L)
        for f in range(F):
            var i = at + f * L
            store[L](dx, i, load[L](dy, i) - exp(load[L](y, i)) * s)


# --- losses --------------------------------------------------------------------------
# `stats` is (sum of losses, samples, correct predictions); each is exact up to 2^24 samples but for the rounding of
# the sum itself.


@always_inline
def _count[L: Int](x: Ptr, labels: IntPtr, F: Int, mut stats: SIMD[F32, 4]) -> SIMD[DType.int32, L]:
    """Counts samples and correct predictions (the first largest of x) of one group; returns its labels."""
    var label = labels.unsafe_load[width=L]()
    var m = load[L](x, 0)
    var at = SIMD[DType.int32, L](0)
    for f in range(1, F):
        var v = load[L](x, f * L)
        var better = v.gt(m)
        m = better.select(v, m)
        at = better.select(SIMD[DType.int32, L](Int32(f)), at)
    stats[1] += label.ge(0).cast[F32]().reduce_add()
    stats[2] += label.eq(at).cast[F32]().reduce_add()
    return label


@always_inline
def _at_label[L: Int](x: Ptr, label: SIMD[DType.int32, L], F: Int) -> SIMD[F32, L]:
    """x[label] of each lane, 0 for lanes without a sample. NaN, which the check of a step finds, where there is no such
    class."""
    var v = label.ge(Int32(F)).select(SIMD[F32, L](nan[F32]()), 0)
    for f in range(F):
        v = label.eq(Int32(f)).select(load[L](x, f * L), v)
    return v


def cross_entropy_forward[
    L: Int
](
    stats: Ptr,  # (4)
    p: Ptr,  # (G, F, L): softmax(x), saved for backward
    x: Ptr,  # (G, F, L)
    labels: IntPtr,  # (G * L)
    G: Int,
    F: Int,
):
    """Writes stats; the loss of a sample is log sum exp(x) - x[label]."""
    var s = SIMD[F32, 4](0)
    for g in range(G):
        var at = g * F * L
        var xg = x.unsafe_offset(at)
        var label = _count[L](xg, labels.unsafe_offset(g * L), F, s)
        var lse = _softmax[L](p.unsafe_offset(at), xg, F)
        s[0] += label.ge(0).select(lse - _at_label[L](xg, label, F), SIMD[F32, L](0)).reduce_add()
    stats.unsafe_store(0, s)


def cross_entropy_backward[L: Int](dx: Ptr, dloss: Ptr, p: Ptr, labels: IntPtr, G: Int, F: Int):
    """Computes dx = (p - onehot(label)) dloss, 0 in lanes without a sample."""
    var d = SIMD[F32, L](dloss[])
    for g in range(G):
        var label = labels.unsafe_offset(g * L).unsafe_load[width=L]()
        for f in range(F):
            var i = (g * F + f) * L
            var v = load[L](p, i) - label.eq(Int32(f)).cast[F32]()
            store[L](dx, i, label.ge(0).select(v * d, SIMD[F32, L](0)))


def nll_forward[L: Int](stats: Ptr, x: Ptr, labels: IntPtr, G: Int, F: Int):
    """Writes stats; the loss of a sample is -x[label], x being log-probabilities (G, F, L)."""
    var s = SIMD[F32, 4](0)
    for g in range(G):
        var xg = x.unsafe_offset(g * F * L)
        var label = _count[L](xg, labels.unsafe_offset(g * L), F, s)
        s[0] -= _at_label[L](xg, label, F).reduce_add()
    stats.unsafe_store(0, s)


def nll_backward[L: Int](dx: Ptr, dloss: Ptr, labels: IntPtr, G: Int, F: Int):
    """Computes dx = -onehot(label) dloss."""
    var d = SIMD[F32, L](-dloss[])
    for g in range(G):
        var label = labels.unsafe_offset(g * L).unsafe_load[width=L]()
        for f in range(F):
            store[L](
                dx,
                (g * F + f) * L,
                label.eq(Int32(f)).select(d, SIMD[F32, L](0)),
            )


def ops() -> List[Op]:
    """The ops of this file."""
    return [
        Op(
            "softmax_forward",
            "y; x; G, F",
            by_layout[call[softmax_forward[LANES]], call[softmax_forward[1]]],
        ),
        Op(
            "softmax_backward",
            "dx; dy, y; G, F",
            by_layout[call[softmax_backward[LANES]], call[softmax_backward[1]]],
        ),
        Op(
            "log_softmax_forward",
            "y; x; G, F",
            by_layout[call[log_softmax_forward[LANES]], call[log_softmax_forward[1]]],
        ),
        Op(
            "log_softmax_backward",
            "dx; dy, y; G, F",
            by_layout[call[log_softmax_backward[LANES]], call[log_softmax_backward[1]]],
        ),
        Op(
            "cross_entropy_forward",
            "stats, p; x, labels; G, F",
            by_layout[
                call[cross_entropy_forward[LANES]],
                call[cross_entropy_forward[1]],
            ],
        ),
        Op(
            "cross_entropy_backward",
            "dx; dloss, p, labels; G, F",
            by_layout[
                call[cross_entropy_backward[LANES]],
                call[cross_entropy_backward[1]],
            ],
        ),
        Op(
            "nll_forward",
            "stats; x, labels; G, F",
            by_layout[call[nll_forward[LANES]], call[nll_forward[1]]],
        ),
        Op(
            "nll_backward",
            "dx; dloss, labels; G, F",
            by_layout[call[nll_backward[LANES]], call[nll_backward[1]]],
        ),
    ]
