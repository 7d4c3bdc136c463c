"""Softmax, log-softmax and the losses on them, over lanes: each lane walks the F classes of its own sample.

A loss is a sum and a count, never a mean: means are taken once, over the whole global batch. A label of -1 marks a lane
without a sample; it counts nowhere and its gradient is 0.
"""

from std.math import exp, log

from .lanes import F32, LANES, IntPtr, Ptr, Vec, load, store


@always_inline
def _max(x: Ptr, F: Int) -> Vec:
    var m = load(x, 0)
    for f in range(1, F):
        m = max(m, load(x, f * LANES))
    return m


def softmax_forward(y: Ptr, x: Ptr, G: Int, F: Int):
    """Computes y = exp(x - max x) / sum exp(x - max x), x and y (G, F, L)."""
    for g in range(G):
        _ = _softmax(y.unsafe_offset(g * F * LANES), x.unsafe_offset(g * F * LANES), F)


@always_inline
def _softmax(y: Ptr, x: Ptr, F: Int) -> Vec:
    """Writes the softmax and returns log sum exp(x)."""
    var m = _max(x, F)
    var s = Vec(0)
    for f in range(F):
        var e = exp(load(x, f * LANES) - m)
        store(y, f * LANES, e)
        s += e
    var inverse = 1 / s
    for f in range(F):
        store(y, f * LANES, load(y, f * LANES) * inverse)
    return m + log(s)


def softmax_backward(dx: Ptr, dy: Ptr, y: Ptr, G: Int, F: Int):
    """Computes dx = y (dy - sum dy y)."""
    for g in range(G):
        var at = g * F * LANES
        var s = Vec(0)
        for f in range(F):
            s = load(dy, at + f * LANES).fma(load(y, at + f * LANES), s)
        for f in range(F):
            var i = at + f * LANES
            store(dx, i, load(y, i) * (load(dy, i) - s))


def log_softmax_forward(y: Ptr, x: Ptr, G: Int, F: Int):
    """Computes y = x - log sum exp(x)."""
    for g in range(G):
        var at = g * F * LANES
        var m = _max(x.unsafe_offset(at), F)
        var s = Vec(0)
        for f in range(F):
            s += exp(load(x, at + f * LANES) - m)
        m += log(s)
        for f in range(F):
            store(y, at + f * LANES, load(x, at + f * LANES) - m)


def log_softmax_backward(dx: Ptr, dy: Ptr, y: Ptr, G: Int, F: Int):
    """Computes dx = dy - exp(y) sum dy."""
    for g in range(G):
        var at = g * F * LANES
        var s = Vec(0)
        for f in range(F):
            s += load(dy, at + f * LANES)
        for f in range(F):
            var i = at + f * LANES
            store(dx, i, load(dy, i) - exp(load(y, i)) * s)


# --- losses --------------------------------------------------------------------------
# `stats` is (sum of losses, samples, correct predictions); each is exact up to 2^24 samples but for the rounding of
# the sum itself.


@always_inline
def _count(
    x: Ptr, labels: IntPtr, F: Int, mut stats: SIMD[F32, 4]
) -> SIMD[DType.int32, LANES]:
    """Counts samples and correct predictions (the first largest of x) of one group; returns its labels.
    """
    var label = labels.unsafe_load[width=LANES]()
    var m = load(x, 0)
    var at = SIMD[DType.int32, LANES](0)
    for f in range(1, F):
        var v = load(x, f * LANES)
        var better = v.gt(m)
        m = better.select(v, m)
        at = better.select(SIMD[DType.int32, LANES](Int32(f)), at)
    stats[1] += label.ge(0).cast[F32]().reduce_add()
    stats[2] += label.eq(at).cast[F32]().reduce_add()
    return label


@always_inline
def _at_label(x: Ptr, label: SIMD[DType.int32, LANES], F: Int) -> Vec:
    """x[label] of each lane, 0 for lanes without a sample."""
    var v = Vec(0)
    for f in range(F):
        v = label.eq(Int32(f)).select(load(x, f * LANES), v)
    return v


def cross_entropy_forward(
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
        var at = g * F * LANES
        var xg = x.unsafe_offset(at)
        var label = _count(xg, labels.unsafe_offset(g * LANES), F, s)
        var lse = _softmax(p.unsafe_offset(at), xg, F)
        s[0] += label.ge(0).select(lse - _at_label(xg, label, F), Vec(0)).reduce_add()
    stats.unsafe_store(0, s)


def cross_entropy_backward(dx: Ptr, dloss: Ptr, p: Ptr, labels: IntPtr, G: Int, F: Int):
    """Computes dx = (p - onehot(label)) dloss, 0 in lanes without a sample."""
    var d = Vec(dloss[])
    for g in range(G):
        var label = labels.unsafe_offset(g * LANES).unsafe_load[width=LANES]()
        for f in range(F):
            var i = (g * F + f) * LANES
            var v = load(p, i) - label.eq(Int32(f)).cast[F32]()
            store(dx, i, label.ge(0).select(v * d, Vec(0)))


def nll_forward(stats: Ptr, x: Ptr, labels: IntPtr, G: Int, F: Int):
    """Writes stats; the loss of a sample is -x[label], x being log-probabilities (G, F, L)."""
    var s = SIMD[F32, 4](0)
    for g in range(G):
        var xg = x.unsafe_offset(g * F * LANES)
        var label = _count(xg, labels.unsafe_offset(g * LANES), F, s)
        s[0] -= _at_label(xg, label, F).reduce_add()
    stats.unsafe_store(0, s)


def nll_backward(dx: Ptr, dloss: Ptr, labels: IntPtr, G: Int, F: Int):
    """Computes dx = -onehot(label) dloss."""
    var d = Vec(-dloss[])
    for g in range(G):
        var label = labels.unsafe_offset(g * LANES).unsafe_load[width=LANES]()
        for f in range(F):
            store(dx, (g * F + f) * LANES, label.eq(Int32(f)).select(d, Vec(0)))
