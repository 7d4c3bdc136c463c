"""Two-dimensional convolution over lanes with bf16 products (AVX512-BF16): conv2d.mojo with operands packed in pairs.

Pairs are neighbours along an axis that is summed: input channels in forward, output channels in the gradient of the
input, samples of a group in the gradient of the weights. A last odd one meets zeros, so an odd number of channels
wastes half of one pair. Activations are packed a group at a time: what was packed is still in the second-level cache
when it is used.

A layer of one input channel would multiply every second time with zero; it stays in float32 (functional.py).
"""

from std.math import ceildiv
from std.sys import masked_store, prefetch

from .conv2d import Conv, Gather, gather_rows, tap_offsets
from .lanes import LANES, Ptr, Vec, first, in_tiles, load, load_first, splat, store, store_first
from .layout import transpose
from .lowp import (
    HALF,
    HalfPtr,
    Pair,
    bias_gradient,
    dot2,
    load_pair,
    pack_neighbours,
    pack_row,
    pack_samples,
    pair,
    splat_pair,
    words,
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
    var to = y.unsafe_bitcast[UInt32]()
    var pairs = (B + 1) // 2
    var a0 = 0
    if n == 1 and b_stride == 1:
        for a in range(A):
            pack_row(y.unsafe_offset(2 * a * pairs), w.unsafe_offset(a * a_stride), B)
        return
    if n == 1 and a_stride == 1:  # pairs of sixteen a are neighbours
        while a0 + LANES <= A:
            for i in range(0, pairs, LANES):
                var v = Array[SIMD[DType.uint32, LANES], LANES](fill=0)
                for j in range(min(LANES, pairs - i)):
                    var b = 2 * (i + j)
                    var p = w.unsafe_offset(b * b_stride + a0)
                    v[j] = words(pair(load(p, 0), load(p, b_stride) if b + 1 < B else Vec(0)))
                transpose(v)
                for j in range(LANES):
                    masked_store[LANES](v[j], to.unsafe_offset((a0 + j) * pairs + i), first(pairs - i))
            a0 += LANES
        to = to.unsafe_offset(a0 * pairs)
    for a in range(a0, A):
        for b in range(0, B, 2):
            var p = w.unsafe_offset(a * a_stride + b * b_stride)
            for i in range(0, n, LANES):
                var two = pair(load_first(p, i, n - i), load_first(p, b_stride + i, n - i if b + 1 < B else 0))
                masked_store[LANES](words(two), to.unsafe_offset(i), first(n - i))
            to = to.unsafe_offset(n)


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
        pack_neighbours(xp, x.unsafe_offset(g * size.x() * LANES), 1, size.C, size.H * size.W)
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

                in_tiles[KB](size.K, tile)


# --- gradient of the weights -------------------------------------------------------------------
# A tap is one (c, r, t). As in linear_bf16.mojo, pairs are samples that neighbour in a group, and a vector of sums is
# 16 output channels: nothing is added up across lanes but the channels of a last vector. kb vectors of channels x tb
# taps of sums, kb of dy and one of x must fit 32 registers. dy comes from the second level of the cache: blocks of rows
# of KV vectors are packed right before they meet all taps.
comptime KV = 4
comptime TAPS: List[Int] = [12, 12, 9, 6]  # of 1, 2 ... KV vectors
comptime BLOCK = 512 * 1024  # bytes of packed dy


@always_inline
def _rows(size: Conv) -> Int:
    """Rows of dy of a block."""
    return min(size.P(), max(1, BLOCK // (KV * LANES * size.Q() * 2 * LANES)))


def weight_scratch(size: Conv) -> Int:
    """Bytes of scratch memory that conv2d_backward_weight_bf16 wants: one group of x, a block of dy."""
    return 2 * LANES * (size.x() + KV * LANES * _rows(size) * size.Q())


@no_inline
def _weight_tile[
    kb: Int, tb: Int
](dw: Ptr, dy: HalfPtr, x: HalfPtr, tap: Int, channels: Int, taps: Int, rows: Int, size: Conv):
    """Adds to the weights of tb taps and of kb vectors of output channels, so many `channels`."""
    var offset = tap_offsets[tb](tap, size)
    # far apart and in no cache: as far away as the products of a small image are long
    for k in range(channels):
        prefetch(dw.unsafe_offset(k * taps))
        prefetch(dw.unsafe_offset(k * taps + tb - 1))
    var acc = Array[Vec, kb * tb](fill=Vec(0))
    var d = dy
    for p in range(rows):
        var xp = x.unsafe_offset(p * size.S * size.W * LANES)
        for _ in range(size.Q()):
            for l in range(HALF):
                var v = Array[Pair, kb](fill=Pair(0))
                comptime for k in range(kb):
                    v[k] = load_pair(d, k)
                comptime for j in range(tb):
                    var s = splat_pair(xp, offset[j] * HALF + l)
                    comptime for k in range(kb):
                        acc[k * tb + j] = dot2(acc[k * tb + j], v[k], s)
                d = d.unsafe_offset(kb * 2 * LANES)
            xp = xp.unsafe_offset(size.S * LANES)
    comptime for k in range(kb):
        var a = Array[Vec, LANES](fill=Vec(0))
        comptime for j in range(tb):
            a[j] = acc[k * tb + j]
        transpose(a)
        comptime for i in range(LANES):
            if k * LANES + i < channels:
                var at = (k * LANES + i) * taps
                store_first(dw, at, load_first(dw, at, tb) + a[i], tb)


def conv2d_backward_weight_bf16(
    dw: Ptr,  # (K, C, R, T), added to
    db: Ptr,  # (K), added to
    dy: Ptr,  # (G, K, P, Q, L)
    x: Ptr,  # (G, C, H, W, L)
    scratch: Ptr,  # weight_scratch bytes
    size: Conv,
):
    """Adds the gradients of weights and bias, summed over samples and pixels."""
    var pixels = size.P() * size.Q()
    var taps = size.taps()
    var xp = scratch.unsafe_bitcast[BFloat16]()  # (C, H, W, HALF, 2)
    var dyp = xp.unsafe_offset(size.x() * LANES)  # (pixels of a block, HALF, vectors, L, 2)
    var vectors = ceildiv(size.K, LANES)
    var panels = ceildiv(vectors, KV)
    for g in range(size.G):
        pack_row(xp, x.unsafe_offset(g * size.x() * LANES), size.x() * LANES)

        @always_inline
        def panel[kb: Int](v: Int) {imm}:
            comptime most = materialize[TAPS]()[kb - 1]
            var k = v * LANES
            var channels = min(size.K - k, kb * LANES)
            for p in range(0, size.P(), _rows(size)):
                var rows = min(_rows(size), size.P() - p)
                for i in range(rows * size.Q()):
                    var at = (g * size.K + k) * pixels + p * size.Q() + i
                    for j in range(kb):
                        pack_samples(
                            dyp.unsafe_offset((i * HALF * kb + j) * 2 * LANES),
                            dy.unsafe_offset((at + j * LANES * pixels) * LANES),
                            pixels * LANES,
                            kb * LANES,
                            channels - j * LANES,
                        )
                for tap in range(0, taps, most):
                    comptime for tb in range(1, most + 1):
                        if min(most, taps - tap) == tb:
                            _weight_tile[kb, tb](
                                dw.unsafe_offset(k * taps + tap),
                                dyp,
                                xp.unsafe_offset(p * size.S * size.W * LANES),
                                tap,
                                channels,
                                taps,
                                rows,
                                size,
                            )

        for i in range(panels):
            var v = vectors * i // panels
            comptime for kb in range(1, KV + 1):
                if vectors * (i + 1) // panels - v == kb:
                    panel[kb](v)
    bias_gradient[LANES](db, dy, size.G, size.K, pixels)


# --- gradient of the input -----------------------------------------------------------------------
# As in conv2d.mojo, a piece of a row of dy is spread over its neighbours in dx, so nothing is multiplied with a
# border's zeros; two input channels at once, three of short rows, so that a sum is not needed again before it is there.
# cb (qb + T - 1) sums + qb pixels + 1 weight must fit 32 registers: of two channels 8 pixels at T = 3, 7 at T = 5.
comptime CACHED = 640 * 1024  # bytes of packed dy that stay in a second-level cache of 1 MiB


@always_inline
def _longest(T: Int, cb: Int) -> Int:
    return (31 - cb * (T - 1)) // (cb + 1)


@always_inline
def _plane(size: Conv) -> Int:
    """Vectors from one pair of channels of dy to the next: planes a page apart meet in one set of the first cache."""
    var pixels = size.P() * size.Q()
    return pixels + Int(pixels % 64 == 0)


def input_scratch(size: Conv) -> Int:
    """Bytes of scratch memory that conv2d_backward_input_bf16 wants: one group of dy, all weights."""
    return 4 * ((size.K + 1) // 2) * (LANES * _plane(size) + size.taps())


@no_inline
def _spread_piece[
    T: Int, cb: Int, qb: Int
](dx: Ptr, dy: HalfPtr, w: HalfPtr, size: Conv, pairs: Int, plane: Int, Q: Int, r0: Int, r1: Int, goes_on: Bool):
    """Writes qb + T - 1 pixels of dx, to the first T - 1 of which the piece before has given its part if it `goes_on`.

    Takes rows r0..r1 of the kernel; dy (pairs, plane, L, 2) points at the row that meets r = 0.
    """
    comptime n = qb + T - 1
    var dx_channel = size.H * size.W * LANES
    var acc = Array[Vec, cb * n](fill=Vec(0))
    if goes_on:
        comptime for c in range(cb):
            comptime for i in range(T - 1):
                acc[c * n + i] = load(dx, c * dx_channel + i * LANES)
    for k in range(pairs):
        for r in range(r0, r1):
            var d = dy.unsafe_offset((k * plane - r * Q) * 2 * LANES)
            var wr = w.unsafe_offset(2 * (k * size.R + r) * T)
            var v = Array[Pair, qb](fill=Pair(0))
            comptime for q in range(qb):
                v[q] = load_pair(d, q)
            comptime for t in range(T):
                comptime for c in range(cb):
                    var wt = splat_pair(wr, c * pairs * size.R * T + t)
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
    var plane = _plane(size)
    var short = Q <= _longest(T, 3)
    # All rows of dx take the weights of some channels one after the other, if the dy of a group stays in the cache.
    var block = size.H if pairs * plane * 4 * LANES <= CACHED else 1

    @always_inline
    def channels[cb: Int](c: Int, h: Int) {imm}:
        comptime longest = _longest(T, max(cb, 2))
        var pieces = ceildiv(Q, longest)
        for i in range(pieces):
            var q = Q * i // pieces
            comptime for qb in range(1, longest + 1):
                if Q * (i + 1) // pieces - q == qb:
                    _spread_piece[T, cb, qb](
                        dx.unsafe_offset(((c * size.H + h) * size.W + q) * LANES),
                        dy.unsafe_offset((h * Q + q) * 2 * LANES),
                        w.unsafe_offset(2 * c * pairs * size.R * T),
                        size,
                        pairs,
                        plane,
                        Q,
                        max(0, h - P + 1),
                        min(size.R, h + 1),
                        i > 0,
                    )

    for h0 in range(0, size.H, block):
        var c = 0
        while c < size.C:
            var n = min(3 if short else 2, size.C - c)
            for h in range(h0, min(h0 + block, size.H)):
                comptime for cb in range(1, 4):
                    if n == cb:
                        channels[cb](c, h)
            c += n


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
                    d = d.unsafe_offset(_plane(size) * 2 * LANES)
                    w = w.unsafe_offset(2 * taps)
        comptime for m in range(cb):
            comptime for n in range(qb):
                store(self.dx, (((c + m) * size.H + h) * size.W + i + n * size.S) * LANES, acc[m * qb + n])


def conv2d_backward_input_bf16(
    dx: Ptr,  # (G, C, H, W, L)
    dy: Ptr,  # (G, K, P, Q, L)
    w: Ptr,  # (K, C, R, T)
    scratch: Ptr,  # input_scratch bytes
    size: Conv,
):
    """Writes the gradient of the (padded) input."""
    var pixels = size.P() * size.Q()
    var pairs = (size.K + 1) // 2
    var taps = size.R * size.T
    var plane = _plane(size)
    var dyp = scratch.unsafe_bitcast[BFloat16]()  # (pairs, plane, L, 2)
    var wp = dyp.unsafe_offset(pairs * plane * 2 * LANES)  # (C, pairs, R, T, 2)
    _pack_weights(wp, w, size.C, size.K, taps, taps, size.C * taps)
    for g in range(size.G):
        var dyg = dy.unsafe_offset(g * size.y() * LANES)
        var dxg = dx.unsafe_offset(g * size.x() * LANES)
        for k in range(0, size.K, 2):
            var to = dyp.unsafe_offset(k * plane * LANES)
            pack_neighbours(to, dyg.unsafe_offset(k * pixels * LANES), 1, min(2, size.K - k), pixels)
        var spread = False
        comptime for T in range(1, 6, 2):
            if size.S == 1 and size.T == T:
                _spread[T](dxg, dyp, wp, size)
                spread = True
        if not spread:
            var of = _Gather(dxg, dyp, wp, size)
            for c in range(0, size.C, KB):
                gather_rows(of, size, c, 0, size.H)
