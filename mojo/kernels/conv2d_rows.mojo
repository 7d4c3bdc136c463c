"""Two-dimensional convolution for a few samples, in rows (N, C, H, W): vectors run along the width.

The same functions as conv2d.mojo with the same letters and arguments; there are no groups: G counts samples. The last
vector of a row is masked. Strides other than 1, which do not fit vectors along a row, are computed as
conv2d_general.mojo has them.
"""

from std.math import iota
from std.memory import unsafe_stack_allocation
from std.sys import masked_load

from .conv2d import Conv, tap_offsets
from .conv2d_general import backward_weight, forward
from .lanes import madd, F32, LANES, REGISTERS, Ptr, Vec, in_tiles, load_first, splat, store_first, totals

# --- register tiles: kb channels x pb rows of one vector each; 6 x 4 sums + 4 + 1 registers ------
comptime CHANNELS: List[Int] = [6, 4, 2, 1]
comptime ROWS: List[Int] = [4, 2, 1]


@always_inline
def _forward_tile[kb: Int, pb: Int, relu: Bool](y: Ptr, x: Ptr, w: Ptr, b: Ptr, size: Conv, n: Int):
    """Kb channels of pb rows, n <= LANES pixels wide."""
    var P = size.P()
    var Q = size.Q()
    var acc = Array[Vec, kb * pb](fill=Vec(0))
    comptime for k in range(kb):
        comptime for p in range(pb):
            acc[k * pb + p] = splat(b, k)
    var taps = size.taps()
    var i = 0
    for c in range(size.C):
        for r in range(size.R):
            for t in range(size.T):
                var v = Array[Vec, pb](fill=Vec(0))
                comptime for p in range(pb):
                    v[p] = load_first(x, (c * size.H + r + p) * size.W + t, n)
                comptime for k in range(kb):
                    var wk = splat(w, k * taps + i)
                    comptime for p in range(pb):
                        acc[k * pb + p] = madd(v[p], wk, acc[k * pb + p])
                i += 1
    comptime for k in range(kb):
        comptime for p in range(pb):
            var s = acc[k * pb + p]
            comptime if relu:
                s = s.lt(0).select(Vec(0), s)
            store_first(y, (k * P + p) * Q, s, n)


def conv2d_forward_rows[relu: Bool](y: Ptr, x: Ptr, w: Ptr, b: Ptr, size: Conv):
    """Computes y = x * w + b, then max(y, 0) if `relu`. Shapes as for conv2d_forward with L = 1."""
    var P = size.P()
    var Q = size.Q()
    if size.S != 1:
        forward[1](y, x, w, b, size)
        comptime if relu:
            for i in range(size.G * size.K * P * Q):
                if y[unsafe_offset=i] < 0:
                    y[unsafe_offset=i] = 0
        return
    for s in range(size.G):
        var k = 0
        comptime for ki in range(len(CHANNELS)):
            comptime kb = materialize[CHANNELS]()[ki] if REGISTERS == 32 else 1
            while k + kb <= size.K:
                var p = 0
                comptime for pi in range(len(ROWS)):
                    comptime pb = materialize[ROWS]()[pi]
                    comptime if kb * pb + pb + 1 < REGISTERS or pb == 1:
                        while p + pb <= P:
                            for q in range(0, Q, LANES):
                                _forward_tile[kb, pb, relu](
                                    y.unsafe_offset(((s * size.K + k) * P + p) * Q + q),
                                    x.unsafe_offset((s * size.C * size.H + p) * size.W + q),
                                    w.unsafe_offset(k * size.taps()),
                                    b.unsafe_offset(k),
                                    size,
                                    min(Q - q, LANES),
                                )
                            p += pb
                k += kb


# --- gradient of the weights ---------------------------------------------------------------
comptime KB = 4 if REGISTERS == 32 else 2
comptime TB = 5 if REGISTERS == 32 else (2 if REGISTERS == 8 else 1)


@always_inline
def _weight_tile[kb: Int, tb: Int](dw: Ptr, dy: Ptr, x: Ptr, tap: Int, size: Conv):
    var P = size.P()
    var Q = size.Q()
    var offset = tap_offsets[tb](tap, size)
    var acc = Array[Vec, kb * tb](fill=Vec(0))
    for s in range(size.G):
        for p in range(P):
            for q in range(0, Q, LANES):
                var n = min(Q - q, LANES)
                var dyp = dy.unsafe_offset((s * size.K * P + p) * Q + q)
                var xp = x.unsafe_offset((s * size.C * size.H + p) * size.W + q)
                var d = Array[Vec, kb](fill=Vec(0))
                comptime for k in range(kb):
                    d[k] = load_first(dyp, k * P * Q, n)
                comptime for j in range(tb):
                    var v = load_first(xp, offset[j], n)
                    comptime for k in range(kb):
                        acc[k * tb + j] = madd(v, d[k], acc[k * tb + j])
    var sums = unsafe_stack_allocation[kb * tb + LANES, F32, alignment=64]()
    totals(acc, sums)
    comptime for k in range(kb):
        comptime for j in range(tb):
            dw[unsafe_offset=k * size.taps() + j] += sums[unsafe_offset=k * tb + j]


def conv2d_backward_weight_rows(dw: Ptr, db: Ptr, dy: Ptr, x: Ptr, size: Conv):
    """Adds the gradients of weights and bias. Shapes as for conv2d_backward_weight with L = 1."""
    var P = size.P()
    var Q = size.Q()
    var taps = size.taps()

    @always_inline
    def channels[kb: Int](k: Int) {imm}:
        @always_inline
        def tile[tb: Int](tap: Int) {imm}:
            _weight_tile[kb, tb](dw.unsafe_offset(k * taps + tap), dy.unsafe_offset(k * P * Q), x, tap, size)

        in_tiles[TB](taps, tile)

    if size.S == 1:
        in_tiles[KB](size.K, channels)
    else:
        backward_weight[1](dw, dy, x, size)
    for k in range(size.K):
        var sum = Vec(0)
        for s in range(size.G):
            var plane = dy.unsafe_offset((s * size.K + k) * P * Q)
            for i in range(0, P * Q, LANES):
                sum += load_first(plane, i, P * Q - i)
        db[unsafe_offset=k] += sum.reduce_add()


# --- gradient of the input -------------------------------------------------------------------


@always_inline
def _input_tile[cb: Int](dx: Ptr, dy: Ptr, w: Ptr, size: Conv, h: Int, i0: Int):
    """Cb channels of one row, one vector from column i0 on; masks stand for the zeros around dy."""
    var P = size.P()
    var Q = size.Q()
    var acc = Array[Vec, cb](fill=Vec(0))
    for k in range(size.K):
        for r in range(max(0, h - P + 1), min(size.R, h + 1)):
            var row = dy.unsafe_offset((k * P + h - r) * Q)
            for t in range(size.T):
                var column = i0 - t
                var live = first_between(-column, Q - column)
                var v = masked_load[LANES](row.unsafe_offset(column), live, Vec(0))
                comptime for c in range(cb):
                    acc[c] = madd(v, splat(w, ((k * size.C + c) * size.R + r) * size.T + t), acc[c])
    comptime for c in range(cb):
        store_first(dx, c * size.H * size.W, acc[c], size.W - i0)


@always_inline
def first_between(lo: Int, hi: Int) -> SIMD[DType.bool, LANES]:
    """True in lanes lo <= l < hi."""
    var l = iota[F32, LANES]()
    return l.ge(Float32(lo)) & l.lt(Float32(hi))


def conv2d_backward_input_rows(dx: Ptr, dy: Ptr, w: Ptr, size: Conv):
    """Writes the gradient of the (padded) input at stride 1. Shapes as for conv2d_backward_input with L = 1."""
    var P = size.P()
    var Q = size.Q()
    for s in range(size.G):
        for h in range(size.H):
            var c = 0
            comptime for i in range(len(CHANNELS)):
                comptime cb = materialize[CHANNELS]()[i]
                comptime if cb + 3 < REGISTERS or cb == 1:
                    while c + cb <= size.C:
                        for i0 in range(0, size.W, LANES):
                            _input_tile[cb](
                                dx.unsafe_offset(((s * size.C + c) * size.H + h) * size.W + i0),
                                dy.unsafe_offset(s * size.K * P * Q),
                                w.unsafe_offset(c * size.R * size.T),
                                size,
                                h,
                                i0,
                            )
                        c += cb
