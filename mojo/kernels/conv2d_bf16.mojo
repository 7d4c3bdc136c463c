"""Two-dimensional convolution over lanes with bf16 products (AVX512-BF16): conv2d.mojo with operands packed in pairs.

Pairs are neighbours along an axis that is summed: input channels in forward, output channels in the gradient of the
input, groups of samples in the gradient of the weights. A last odd one meets zeros, so an odd number of channels
wastes half of one pair, and the weight gradient of a single group takes as long as that of two. Activations are packed
a group at a time: what was packed is still in the second-level cache when it is used.

A layer of one input channel would multiply every second time with zero; it stays in float32 (functional.py).
"""

from std.memory import unsafe_stack_allocation
from std.sys import prefetch

from .conv2d import Conv, Gather, gather_rows, tap_offsets
from .lanes import F32, LANES, Ptr, Vec, load, splat, store, totals
from .lowp import (
    HalfPtr,
    Pair,
    bias_gradient,
    dot2,
    load_pair,
    pack_neighbours,
    pack_two,
    splat_pair,
)

# --- register tiles --------------------------------------------------------------------------
# As in conv2d.mojo: 4 x 6 sums + 6 + 1 registers, 24 dot2 (12 cycles) for 10 loads (5 cycles). A row is cut into pieces
# of nearly equal length: dot2 takes six cycles and starts twice a cycle, so a tile of less than 12 sums waits. All
# channels of a piece come before the next piece: its pixels stay in the first-level cache.
comptime KB = 4
comptime QB = 6


def _pack_weights(
    y: HalfPtr,  # (A, ceil(B / 2), n, 2)
    w: Ptr,
    A: Int,
    B: Int,
    n: Int,
    a_stride: Int,
    b_stride: Int,
):
    """Pairs of neighbours along B of the weights at a a_stride + b b_stride + i, i < n."""
    var at = 0
    for a in range(A):
        for b in range(0, B, 2):
            var p = w.unsafe_offset(a * a_stride + b * b_stride)
            for i in range(n):
                y[unsafe_offset=at] = p[unsafe_offset=i].cast[DType.bfloat16]()
                y[unsafe_offset=at + 1] = (p[unsafe_offset=b_stride + i] if b + 1 < B else 0).cast[DType.bfloat16]()
                at += 2


@no_inline
def _forward_tile[kb: Int, qb: Int, relu: Bool](y: Ptr, x: HalfPtr, w: HalfPtr, b: Ptr, pairs: Int, size: Conv):
    """One row piece: kb output channels, qb neighbouring pixels."""
    var plane = size.P() * size.Q()
    var acc = Array[Vec, kb * qb](fill=Vec(0))
    comptime for k in range(kb):
        var bias = splat(b, k)
        comptime for q in range(qb):
            acc[k * qb + q] = bias
    var taps = pairs * size.R * size.T
    var wi = 0
    for c in range(pairs):
        for r in range(size.R):
            var xp = x.unsafe_offset(((c * size.H + r) * size.W) * 2 * LANES)
            for _ in range(size.T):
                var v = Array[Pair, qb](fill=Pair(0))
                comptime for q in range(qb):
                    v[q] = load_pair(xp, q * size.S)
                comptime for k in range(kb):
                    var wk = splat_pair(w, k * taps + wi)
                    comptime for q in range(qb):
                        acc[k * qb + q] = dot2(acc[k * qb + q], v[q], wk)
                wi += 1
                xp = xp.unsafe_offset(2 * LANES)
    comptime for k in range(kb):
        comptime for q in range(qb):
            var s = acc[k * qb + q]
            comptime if relu:
                s = s.lt(0).select(Vec(0), s)
            store(y, (k * plane + q) * LANES, s)


def conv2d_forward_bf16[
    relu: Bool
](
    y: Ptr,  # (G, K, P, Q, L)
    x: Ptr,  # (G, C, H, W, L)
    w: Ptr,  # (K, C, R, T)
    b: Ptr,  # (K)
    scratch: Ptr,  # pairs of one group of x, and of w
    size: Conv,
):
    """Computes y = x * w + b (cross-correlation), then max(y, 0) if `relu`."""
    var P = size.P()
    var Q = size.Q()
    var pairs = (size.C + 1) // 2
    var taps = pairs * size.R * size.T
    var xp = scratch.unsafe_bitcast[BFloat16]()  # (pairs, H, W, L, 2)
    var wp = xp.unsafe_offset(pairs * size.H * size.W * 2 * LANES)  # (K, pairs, R, T, 2)
    _pack_weights(wp, w, size.K, size.C, size.R * size.T, size.taps(), size.R * size.T)
    var pieces = (Q + QB - 1) // QB
    for g in range(size.G):
        pack_neighbours(
            xp,
            x.unsafe_offset(g * size.x() * LANES),
            1,
            size.C,
            size.H * size.W,
        )
        for p in range(P):
            for i in range(pieces):
                var q = Q * i // pieces
                var n = Q * (i + 1) // pieces - q

                @always_inline
                def tile[kb: Int](k: Int) {imm}:
                    comptime for qb in range(1, QB + 1):
                        if n == qb:
                            _forward_tile[kb, qb, relu](
                                y.unsafe_offset((((g * size.K + k) * P + p) * Q + q) * LANES),
                                xp.unsafe_offset((p * size.S * size.W + q * size.S) * 2 * LANES),
                                wp.unsafe_offset(2 * k * taps),
                                b.unsafe_offset(k),
                                pairs,
                                size,
                            )

                var k = 0
                while k + KB <= size.K:
                    tile[KB](k)
                    k += KB
                comptime for kb in range(1, KB):
                    if size.K - k == kb:
                        tile[kb](k)


# --- gradient of the weights -------------------------------------------------------------------
# A tap is one (c, r, t). A tile sums kb x tb weights over all pixels of a pair of groups. Its dy comes from the second
# level of the cache, so a tile wants many taps of the same x: 3 x 9 sums + 3 + 1 registers, 12 loads for 27 dot2, where
# a channel has 9 taps; otherwise 4 x 5, 9 loads for 20.


@no_inline
def _weight_tile[kb: Int, tb: Int](dw: Ptr, dy: HalfPtr, x: HalfPtr, tap: Int, taps: Int, size: Conv):
    var P = size.P()
    var Q = size.Q()
    var offset = tap_offsets[tb](tap, size)
    # far apart and in no cache: as far away as the products of a small image are long
    comptime for k in range(kb):
        prefetch(dw.unsafe_offset(k * taps))
        prefetch(dw.unsafe_offset(k * taps + tb - 1))
    var acc = Array[Vec, kb * tb](fill=Vec(0))
    for p in range(P):
        var dyp = dy.unsafe_offset(p * Q * 2 * LANES)
        var xp = x.unsafe_offset(p * size.S * size.W * 2 * LANES)
        for _ in range(Q):
            var d = Array[Pair, kb](fill=Pair(0))
            comptime for k in range(kb):
                d[k] = load_pair(dyp, k * P * Q)
            comptime for j in range(tb):
                var v = load_pair(xp, offset[j])
                comptime for k in range(kb):
                    acc[k * tb + j] = dot2(acc[k * tb + j], v, d[k])
            dyp = dyp.unsafe_offset(2 * LANES)
            xp = xp.unsafe_offset(size.S * 2 * LANES)
    var sums = unsafe_stack_allocation[kb * tb + LANES, F32, alignment=64]()
    totals(acc, sums)
    comptime for k in range(kb):
        comptime for j in range(tb):
            dw[unsafe_offset=k * taps + j] += sums[unsafe_offset=k * tb + j]


def conv2d_backward_weight_bf16(
    dw: Ptr,  # (K, C, R, T), added to
    db: Ptr,  # (K), added to
    dy: Ptr,  # (G, K, P, Q, L)
    x: Ptr,  # (G, C, H, W, L)
    scratch: Ptr,  # pairs of two groups of x and dy
    size: Conv,
):
    """Adds the gradients of weights and bias, summed over samples and pixels."""
    var P = size.P()
    var Q = size.Q()
    var taps = size.taps()
    var xp = scratch.unsafe_bitcast[BFloat16]()  # (C, H, W, L, 2)
    # Some channels of dy at a time, a multiple of 3 and of 4: half of a second-level cache of 1 MiB. Packed right before
    # they are used, they stay there for all taps.
    var batch = max(1, min(512 * 1024 // (P * Q * 4 * LANES), size.K) // 12) * 12
    var dyp = xp.unsafe_offset(size.C * size.H * size.W * 2 * LANES)  # (batch, P, Q, L, 2)
    for g in range(0, size.G, 2):
        var xg = x.unsafe_offset(g * size.C * size.H * size.W * LANES)
        var dyg = dy.unsafe_offset(g * size.K * P * Q * LANES)
        var xg2 = Optional[Ptr]()
        var dyg2 = Optional[Ptr]()
        if g + 1 < size.G:
            xg2 = xg.unsafe_offset(size.C * size.H * size.W * LANES)
            dyg2 = dyg.unsafe_offset(size.K * P * Q * LANES)
        pack_two(xp, xg, xg2, size.C * size.H * size.W)

        @always_inline
        def channels[kb: Int, longest: Int](k: Int, tap: Int, n: Int) {imm}:
            comptime for tb in range(1, longest + 1):
                if n == tb:
                    _weight_tile[kb, tb](
                        dw.unsafe_offset(k * taps + tap),
                        dyp.unsafe_offset(k % batch * P * Q * 2 * LANES),
                        xp,
                        tap,
                        taps,
                        size,
                    )

        @always_inline
        def all[kb: Int, tb: Int]() {imm}:
            for first in range(0, size.K, batch):
                var end = min(first + batch, size.K)
                var at = first * P * Q * LANES
                var second = Optional[Ptr]()
                if dyg2:
                    second = dyg2.value().unsafe_offset(at)
                pack_two(dyp, dyg.unsafe_offset(at), second, (end - first) * P * Q)
                for tap in range(0, taps, tb):
                    var n = min(tb, taps - tap)
                    var k = first
                    while k + kb <= end:
                        channels[kb, tb](k, tap, n)
                        k += kb
                    comptime for rest in range(1, kb):
                        if end - k == rest:
                            channels[rest, tb](k, tap, n)

        if size.R * size.T == 9:
            all[3, 9]()
        else:
            all[4, 5]()
    bias_gradient[LANES](db, dy, size.G, size.K, P * Q)


# --- gradient of the input -----------------------------------------------------------------------
# As in conv2d.mojo, a piece of a row of dy is spread over its neighbours in dx, so nothing is multiplied with a
# border's zeros; two input channels at once, so that a sum is not needed again before it is there.
# cb (qb + T - 1) sums + qb pixels + 1 weight must fit 32 registers: 8 pixels at T = 3, 7 at T = 5. Pieces are shorter
# where the dy of a piece, all channels and kernel rows, would not stay in the first-level cache for all of dx.


@always_inline
def _longest(T: Int) -> Int:
    return (30 - 2 * (T - 1)) // 3


comptime CACHE = 40 * 1024  # bytes of dy that stay in a first-level cache of 48 KiB


@no_inline
def _spread_piece[
    T: Int, cb: Int, qb: Int
](
    dx: Ptr,
    dy: HalfPtr,
    w: HalfPtr,
    pairs: Int,
    r0: Int,
    r1: Int,
    dx_channel: Int,
    dy_channel: Int,
    dy_row: Int,
    w_channel: Int,
    w_pair: Int,
    goes_on: Bool,
):
    """Writes qb + T - 1 pixels of dx, to the first T - 1 of which the piece before has given its part if it `goes_on`.
    Takes rows r0..r1 of the kernel; dy points at the row that meets r = 0. Strides of dy in vectors.
    """
    comptime n = qb + T - 1
    var acc = Array[Vec, cb * n](fill=Vec(0))
    if goes_on:
        comptime for c in range(cb):
            comptime for i in range(T - 1):
                acc[c * n + i] = load(dx, c * dx_channel + i * LANES)
    for k in range(pairs):
        for r in range(r0, r1):
            var d = dy.unsafe_offset((k * dy_channel - r * dy_row) * 2 * LANES)
            var wr = w.unsafe_offset(2 * (k * w_pair + r * T))
            var v = Array[Pair, qb](fill=Pair(0))
            comptime for q in range(qb):
                v[q] = load_pair(d, q)
            comptime for t in range(T):
                comptime for c in range(cb):
                    var wt = splat_pair(wr, c * w_channel + t)
                    comptime for q in range(qb):
                        acc[c * n + q + t] = dot2(acc[c * n + q + t], v[q], wt)
    comptime for c in range(cb):
        comptime for i in range(n):
            store(dx, c * dx_channel + i * LANES, acc[c * n + i])


@always_inline
def _spread[T: Int](dx: Ptr, dy: HalfPtr, w: HalfPtr, size: Conv):
    """One group at stride 1."""
    var P = size.P()
    var Q = size.Q()
    var pairs = (size.K + 1) // 2
    comptime longest = _longest(T)
    var fitting = min(longest, max(1, CACHE // (pairs * size.R * 4 * LANES)))
    var pieces = (Q + fitting - 1) // fitting
    for h in range(size.H):
        var r0 = max(0, h - P + 1)
        var r1 = min(size.R, h + 1)
        for i in range(pieces):
            var q = Q * i // pieces
            var n = Q * (i + 1) // pieces - q

            @always_inline
            def piece[cb: Int](c: Int) {imm}:
                comptime for qb in range(1, longest + 1):
                    if n == qb:
                        _spread_piece[T, cb, qb](
                            dx.unsafe_offset(((c * size.H + h) * size.W + q) * LANES),
                            dy.unsafe_offset((h * Q + q) * 2 * LANES),
                            w.unsafe_offset(2 * c * pairs * size.R * T),
                            pairs,
                            r0,
                            r1,
                            size.H * size.W * LANES,
                            P * Q,
                            Q,
                            pairs * size.R * T,
                            size.R * T,
                            i > 0,
                        )

            var c = 0
            while c + 2 <= size.C:
                piece[2](c)
                c += 2
            if c < size.C:
                piece[1](c)


# Any other stride or kernel: a pixel gathers the taps that used it, as in conv2d.mojo.


@fieldwise_init
struct _Gather(Gather):
    """One group of pairs."""

    var dx: Ptr
    var dy: HalfPtr
    var w: HalfPtr
    var size: Conv

    @no_inline
    def tile[cb: Int, qb: Int](self, c: Int, h: Int, i: Int):
        var size = self.size
        var P = size.P()
        var Q = size.Q()
        var pairs = (size.K + 1) // 2
        var taps = size.R * size.T
        var acc = Array[Vec, cb * qb](fill=Vec(0))
        for r in range(h % size.S, size.R, size.S):
            var p = (h - r) // size.S
            if h < r or p >= P:
                continue
            for t in range(i % size.S, size.T, size.S):
                var q = (i - t) // size.S
                if i < t or q >= Q:
                    continue
                var d = self.dy.unsafe_offset((p * Q + q) * 2 * LANES)
                var w = self.w.unsafe_offset(2 * (c * pairs * taps + r * size.T + t))
                for _ in range(pairs):
                    var v = Array[Pair, qb](fill=Pair(0))
                    comptime for n in range(qb):
                        v[n] = load_pair(d, n)
                    comptime for m in range(cb):
                        var wm = splat_pair(w, m * pairs * taps)
                        comptime for n in range(qb):
                            acc[m * qb + n] = dot2(acc[m * qb + n], v[n], wm)
                    d = d.unsafe_offset(P * Q * 2 * LANES)
                    w = w.unsafe_offset(2 * taps)
        comptime for m in range(cb):
            comptime for n in range(qb):
                store(
                    self.dx,
                    (((c + m) * size.H + h) * size.W + i + n * size.S) * LANES,
                    acc[m * qb + n],
                )


def conv2d_backward_input_bf16(
    dx: Ptr,  # (G, C, H, W, L)
    dy: Ptr,  # (G, K, P, Q, L)
    w: Ptr,  # (K, C, R, T)
    scratch: Ptr,  # pairs of one group of dy, and of w
    size: Conv,
):
    """Writes the gradient of the (padded) input."""
    var pixels = size.P() * size.Q()
    var pairs = (size.K + 1) // 2
    var taps = size.R * size.T
    var dyp = scratch.unsafe_bitcast[BFloat16]()  # (pairs, P, Q, L, 2)
    var wp = dyp.unsafe_offset(pairs * pixels * 2 * LANES)  # (C, pairs, R, T, 2)
    _pack_weights(wp, w, size.C, size.K, taps, taps, size.C * taps)
    for g in range(size.G):
        var dyg = dy.unsafe_offset(g * size.y() * LANES)
        var dxg = dx.unsafe_offset(g * size.x() * LANES)
        pack_neighbours(dyp, dyg, 1, size.K, pixels)
        var spread = False
        comptime for T in range(1, 6, 2):
            if size.S == 1 and size.T == T:
                _spread[T](dxg, dyp, wp, size)
                spread = True
        if not spread:
            var of = _Gather(dxg, dyp, wp, size)
            for c in range(0, size.C, KB):
                gather_rows(of, size, c, 0, size.H)
