"""Convolutions and linear layers by AMX (amx.mojo): the gradient of the weights.

A product sums over the samples of a group at two places of a plane, one half of its rows apart: A is dy as it lies, B
has x's pairs of samples along its rows. An odd last row meets zeros. A plane of one row, as a linear layer has, has no
halves: there the samples of two groups are summed, and a last group meets zeros. Groups without samples change no bit.
"""

from std.math import ceildiv
from std.memory import bitcast

from .amx import (
    BLOCK,
    Cut,
    KB,
    SUMS,
    TILE,
    begin,
    cut_to_fit,
    end,
    fetch,
    load_tile,
    multiply,
    store_tile,
    vectors_of,
    zero_tile,
)
from .buffers import fill
from .conv2d import Conv
from .lanes import LANES, Ptr, Vec, load, load_first, store, store_first
from .layout import transpose
from .lowp import BF16, HalfPtr, halves


@fieldwise_init
struct _Weights(Cut, TrivialRegisterPassable):
    """Sizes of the gradient of the weights."""

    var size: Conv

    @always_inline
    def of_rows(self) -> Bool:
        """Pairs are of rows, not of groups."""
        return self.size.P() > 1

    @always_inline
    def units(self) -> Int:
        """Groups, or pairs of them."""
        return self.size.G if self.of_rows() else ceildiv(self.size.G, 2)

    @always_inline
    def height(self) -> Int:
        """Rows of dy, or pairs of them."""
        return ceildiv(self.size.P(), 2)

    @always_inline
    def steps(self, rows: Int) -> Int:
        """Tiles of dy of 16 channels of a unit."""
        return rows * self.size.Q()

    @always_inline
    def pixels(self, rows: Int) -> Int:
        """Tiles of x of 16 channels of a unit, for so many rows of dy."""
        return ((rows - 1) * self.size.S + self.size.R) * self.size.W

    def packed(self, rows: Int) -> Int:
        """Tiles of a unit."""
        return self.steps(rows) * vectors_of(self.size.K) + self.pixels(rows) * vectors_of(self.size.C)

    def cut(self) -> Tuple[Int, Int]:
        """Units, and rows of dy, that are packed at once."""
        return cut_to_fit(self, self.units(), self.height(), 1)

    def scratch(self) -> Int:
        """Bytes of scratch memory: what is packed, and four sums of all taps."""
        var part = self.cut()
        var sums = 4 * self.size.R * self.size.T + vectors_of(self.size.K)
        return KB * (sums + part[0] * self.packed(part[1]))


@always_inline
def _two(x: Ptr, at: Int, apart: Int, both: Bool) -> SIMD[BF16, 2 * LANES]:
    """All samples at two places, `apart` floats from each other."""
    var second = load(x, at + apart) if both else Vec(0)
    return halves(load(x, at).join(second))


def _pack_dy(
    y: HalfPtr,  # (vectors of K, vector_step) tiles: n of (16, 32)
    bias: Ptr,  # (K, L), added to
    dy: Ptr,  # (K, P Q, L) of a group
    size: Conv,
    n: Int,
    apart: Int,  # floats to the second of two places
    both: Bool,
    vector_step: Int,
):
    """Packs dy, and adds it up for the gradient of the bias, not rounded."""
    var K = size.K
    var plane = size.P() * size.Q()
    for v in range(vectors_of(K)):
        for i0 in range(0, n, BLOCK):
            for k in range(LANES):
                var channel = v * LANES + k
                var sum = load(bias, channel * LANES) if channel < K else Vec(0)
                for i in range(i0, min(n, i0 + BLOCK)):
                    var a = Vec(0)
                    var b = Vec(0)
                    if channel < K:
                        var at = (channel * plane + i) * LANES
                        a = load(dy, at)
                        if both:
                            b = load(dy, at + apart)
                    sum += a + b
                    var to = (v * vector_step + i) * TILE + k * 2 * LANES
                    y.unsafe_store(to, halves(a.join(b)))
                if channel < K:
                    store(bias, channel * LANES, sum)


def _pack_x(
    y: HalfPtr,  # (vectors of C, vector_step) tiles: n of (16 pairs of samples, 16, 2)
    x: Ptr,  # (C, H W, L) of a group
    size: Conv,
    n: Int,
    apart: Int,  # floats to the second of two places
    both: Bool,
    vector_step: Int,
):
    var C = size.C
    var plane = size.H * size.W
    for v in range(vectors_of(C)):
        for i in range(n):
            var a = Array[SIMD[DType.uint32, LANES], LANES](fill=0)
            comptime for c in range(LANES):
                if v * LANES + c < C:
                    a[c] = bitcast[DType.uint32, LANES](_two(x, ((v * LANES + c) * plane + i) * LANES, apart, both))
            transpose(a)
            var to = y.unsafe_offset((v * vector_step + i) * TILE)
            comptime for p in range(LANES):
                to.unsafe_bitcast[UInt32]().unsafe_store(p * LANES, a[p])


@no_inline
def _weight_block[mb: Int, nb: Int](sums: Ptr, dy: HalfPtr, x: HalfPtr, of: _Weights, pairs: Int, rows: Int):
    """The sums (mb, nb, taps, 16, 16) of one tap, over all packed pixels: `rows` rows of `pairs` units."""
    var size = of.size
    var Q = size.Q()
    var taps = size.R * size.T
    var dy_pair = of.steps(rows)
    var x_pair = of.pixels(rows)
    comptime for c in range(mb * nb):
        zero_tile[c]()
    for j in range(pairs):
        for p in range(rows):
            var a = dy.unsafe_offset((j * dy_pair + p * Q) * TILE)
            var b = x.unsafe_offset((j * x_pair + p * size.S * size.W) * TILE)
            for _ in range(Q):
                comptime for n in range(nb):
                    load_tile[4 + n](b.unsafe_offset(n * pairs * x_pair * TILE))
                comptime for m in range(mb):
                    comptime A = 4 + nb + m % (4 - nb)
                    load_tile[A](a.unsafe_offset(m * pairs * dy_pair * TILE))
                    comptime for n in range(nb):
                        multiply[m * nb + n, A, 4 + n]()
                a = a.unsafe_offset(TILE)
                b = b.unsafe_offset(size.S * TILE)
    comptime for c in range(mb * nb):
        store_tile[c](sums.unsafe_offset(c * taps * SUMS))


def _add_sums(
    dw: Ptr,  # (rows, row) from the first of the channels on
    sums: Ptr,  # (taps, 16, 16)
    outputs: Int,
    inputs: Int,
    taps: Int,
    row: Int,
    begins: Bool,
):
    """Adds tiles of `outputs` x `inputs` sums of a tap to weights (outputs, inputs, taps), `row` numbers an output;
    to zeros if they `begins`.
    """
    for k in range(outputs):
        var to = dw.unsafe_offset(k * row)
        if taps == 1:
            var before = Vec(0) if begins else load_first(to, 0, inputs)
            store_first(to, 0, before + load(sums, k * LANES), inputs)
            continue
        for tap in range(0, taps, LANES):
            var n = min(LANES, taps - tap)
            var a = Array[Vec, LANES](fill=Vec(0))
            comptime for j in range(LANES):
                if j < n:
                    a[j] = load(sums, (tap + j) * SUMS + k * LANES)
            transpose(a)
            comptime for c in range(LANES):
                if c < inputs:
                    var at = c * taps + tap
                    var before = Vec(0) if begins else load_first(to, at, n)
                    store_first(to, at, before + a[c], n)


def conv2d_backward_weight_amx(
    dw: Ptr,  # (K, C, R, T), added to
    db: Ptr,  # (K), added to
    dy: Ptr,  # (G, K, P, Q, L)
    x: Ptr,  # (G, C, H, W, L)
    scratch: Ptr,  # weight_scratch bytes
    size: Conv,
    begins: Bool = False,
):
    """Adds the gradients of weights and bias, summed over samples and pixels; to zeros if it `begins`."""
    var of = _Weights(size)
    var part = of.cut()
    var taps = size.R * size.T
    var P = size.P()
    var Q = size.Q()
    var sums = scratch
    var bias = scratch.unsafe_offset(4 * taps * SUMS)  # (K, L)
    fill(bias, 0, size.K * LANES)
    var dyp = bias.unsafe_offset(vectors_of(size.K) * SUMS).unsafe_bitcast[BFloat16]()
    var xp = dyp.unsafe_offset(part[0] * of.steps(part[1]) * vectors_of(size.K) * TILE)
    begin()
    for j0 in range(0, of.units(), part[0]):
        var pairs = min(part[0], of.units() - j0)
        var p0 = 0
        while p0 < of.height():
            var rows = min(part[1], of.height() - p0)
            if of.of_rows() and P % 2 and p0 + rows == of.height() and rows > 1:
                rows -= 1  # the last row, which has no other, by itself
            var steps = of.steps(rows)
            var pixels = of.pixels(rows)
            for j in range(pairs):
                var g = j0 + j
                var both = p0 + of.height() < P
                var dy_apart = of.height() * Q * LANES
                var x_apart = of.height() * size.S * size.W * LANES
                if not of.of_rows():
                    g *= 2
                    both = g + 1 < size.G
                    dy_apart = size.y() * LANES
                    x_apart = size.x() * LANES
                var dyg = dy.unsafe_offset((g * size.y() + p0 * Q) * LANES)
                _pack_dy(dyp.unsafe_offset(j * steps * TILE), bias, dyg, size, steps, dy_apart, both, pairs * steps)
                var from_ = x.unsafe_offset((g * size.x() + p0 * size.S * size.W) * LANES)
                _pack_x(xp.unsafe_offset(j * pixels * TILE), from_, size, pixels, x_apart, both, pairs * pixels)

            @always_inline
            def block[mb: Int, nb: Int](v: Int, u: Int) {imm}:
                """Vectors v.. of output channels, u.. of input channels."""
                var to = dw.unsafe_offset((v * size.C + u) * LANES * taps)
                for tap in range(taps):
                    for k in range(mb * LANES):
                        fetch(to, k * size.C * taps + tap * nb * LANES, nb)
                    var at = tap // size.T * size.W + tap % size.T
                    _weight_block[mb, nb](
                        sums.unsafe_offset(tap * SUMS),
                        dyp.unsafe_offset(v * pairs * steps * TILE),
                        xp.unsafe_offset((u * pairs * pixels + at) * TILE),
                        of,
                        pairs,
                        rows,
                    )
                comptime for m in range(mb):
                    comptime for n in range(nb):
                        var k = (v + m) * LANES
                        var c = (u + n) * LANES
                        _add_sums(
                            dw.unsafe_offset((k * size.C + c) * taps),
                            sums.unsafe_offset((m * nb + n) * taps * SUMS),
                            min(LANES, size.K - k),
                            min(LANES, size.C - c),
                            taps,
                            size.C * taps,
                            begins and j0 == 0 and p0 == 0,
                        )

            var outputs = vectors_of(size.K)
            var inputs = vectors_of(size.C)
            for v in range(0, outputs, 2):
                for u in range(0, inputs, 2):
                    comptime for mb in range(1, 3):
                        comptime for nb in range(1, 3):
                            if min(outputs - v, 2) == mb and min(inputs - u, 2) == nb:
                                block[mb, nb](v, u)
            p0 += rows
    end()
    if begins:
        fill(db, 0, size.K)
    for k in range(size.K):
        db[unsafe_offset=k] += load(bias, k * LANES).reduce_add()


def weight_scratch(size: Conv) -> Int:
    """Bytes of scratch memory that conv2d_backward_weight_amx wants."""
    return _Weights(size).scratch()
