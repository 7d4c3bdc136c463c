"""Convolutions and linear layers by AMX (amx.mojo): the forward pass and the gradient of the input.

Both sum over taps and channels for each pixel that is written; the gradient takes the taps that used the pixel. Of a
large image as many rows are packed at once as stay in the second-level cache.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation

from .amx import (
    BLOCK,
    Cut,
    KB,
    SUMS,
    TILE,
    begin,
    cut_to_fit,
    end,
    load_tile,
    multiply,
    pack_pixels,
    pack_weights,
    store_tile,
    tiles_of,
    vectors_of,
)
from .conv2d import Conv
from .lanes import F32, LANES, Ptr, Vec, load, store
from .lowp import HalfPtr


@fieldwise_init
struct _Sum(TrivialRegisterPassable):
    """Which tiles a sum takes: `rows` times `columns` taps of `tiles` channels, from tile a of the weights and b of the
    pixels on; how far apart taps are in both.
    """

    var rows: Int
    var columns: Int
    var tiles: Int
    var a: Int
    var a_row: Int
    var a_column: Int
    var b: Int
    var b_row: Int
    var b_column: Int


@no_inline
def _block[
    mb: Int, nb: Int
](y: Ptr, y_vector: Int, y_group: Int, w: HalfPtr, w_vector: Int, x: HalfPtr, x_group: Int, start: Ptr, s: _Sum):
    """Writes a pixel of mb vectors of channels of nb groups; sums start from `start` (mb, 16, 16)."""
    comptime for m in range(mb):
        comptime for n in range(nb):
            load_tile[m * nb + n](start.unsafe_offset(m * SUMS))
    for r in range(s.rows):
        for t in range(s.columns):
            var a = w.unsafe_offset((s.a + r * s.a_row + t * s.a_column) * TILE)
            var b = x.unsafe_offset((s.b + r * s.b_row + t * s.b_column) * TILE)
            for _ in range(s.tiles):
                comptime for n in range(nb):
                    load_tile[4 + n](b.unsafe_offset(n * x_group))
                comptime for m in range(mb):
                    comptime A = 4 + nb + m % (4 - nb)
                    load_tile[A](a.unsafe_offset(m * w_vector))
                    comptime for n in range(nb):
                        multiply[m * nb + n, A, 4 + n]()
                a = a.unsafe_offset(TILE)
                b = b.unsafe_offset(TILE)
    comptime for m in range(mb):
        comptime for n in range(nb):
            store_tile[m * nb + n](y.unsafe_offset(m * y_vector + n * y_group))


@fieldwise_init
struct _Pass[forward: Bool](Cut, TrivialRegisterPassable):
    """The forward pass, or the gradient of the input: what is read and what is written."""

    var size: Conv
    var samples: Int  # in rows; 0: lanes

    @always_inline
    def groups(self) -> Int:
        return ceildiv(self.samples, LANES) if self.samples else self.size.G

    @always_inline
    def channels(self) -> Int:
        """Written."""
        return self.size.K if Self.forward else self.size.C

    @always_inline
    def height(self) -> Int:
        return self.size.P() if Self.forward else self.size.H

    @always_inline
    def width(self) -> Int:
        return self.size.Q() if Self.forward else self.size.W

    @always_inline
    def inputs(self) -> Int:
        """Channels read."""
        return self.size.C if Self.forward else self.size.K

    @always_inline
    def line(self) -> Int:
        """Pixels of a row that is read."""
        return self.size.W if Self.forward else self.size.Q()

    @always_inline
    def plane(self) -> Int:
        """Pixels of a channel that is read."""
        return self.line() * (self.size.H if Self.forward else self.size.P())

    @always_inline
    def reads(self, h0: Int, h1: Int) -> Tuple[Int, Int]:
        """The rows that rows h0 to h1 - 1 are computed from."""
        comptime if Self.forward:
            return h0 * self.size.S, (h1 - 1) * self.size.S + self.size.R
        else:
            var least = max(0, ceildiv(h0 - self.size.R + 1, self.size.S))
            return least, min(self.size.P(), (h1 - 1) // self.size.S + 1)

    def packed(self, rows: Int) -> Int:
        """Tiles of one group that so many rows are computed from, at most."""
        var n = (rows - 1) * self.size.S + self.size.R
        comptime if not Self.forward:
            n = min(self.size.P(), (rows + self.size.R - 2) // self.size.S + 1)
        return n * self.line() * tiles_of(self.inputs())

    def cut(self) -> Tuple[Int, Int]:
        """Groups, and rows of them, that are computed from what is packed at once."""
        return cut_to_fit(self, self.groups(), self.height(), 2)

    def weights(self) -> Int:
        """Tiles of all weights."""
        var taps = self.size.R * self.size.T
        return vectors_of(self.channels()) * taps * tiles_of(self.inputs())

    def scratch(self) -> Int:
        """Bytes of scratch memory."""
        var part = self.cut()
        return KB * (self.weights() + part[0] * self.packed(part[1]))

    @always_inline
    def sum(self, h: Int, i: Int, first: Int) -> _Sum:
        """Of pixel (h, i); row `first` is the first that is packed."""
        var size = self.size
        var tiles = tiles_of(self.inputs())
        var line = self.line() * tiles
        comptime if Self.forward:
            var b = (h * size.S - first) * line + i * size.S * tiles
            var row = size.T * tiles
            return _Sum(size.R, size.T, tiles, 0, row, tiles, b, line, tiles)
        else:
            # Taps r, t of pixel (p, q) of dy with p S + r = h, q S + t = i: from the last p and q to the first.
            var p = min(size.P() - 1, h // size.S)
            var q = min(size.Q() - 1, i // size.S)
            var r = h - p * size.S
            var t = i - q * size.S
            return _Sum(
                min(p + 1, max(0, ceildiv(size.R - r, size.S))),
                min(q + 1, max(0, ceildiv(size.T - t, size.S))),
                tiles,
                (r * size.T + t) * tiles,
                size.S * size.T * tiles,
                size.S * tiles,
                (p - first) * line + q * tiles,
                -line,
                -tiles,
            )

    def run[relu: Bool](self, y: Ptr, x: Ptr, w: Ptr, bias: Optional[Ptr], scratch: Ptr):
        """Computes y from x."""
        var size = self.size
        var taps = size.R * size.T
        var wp = scratch.unsafe_bitcast[BFloat16]()
        var xp = wp.unsafe_offset(self.weights() * TILE)
        comptime if Self.forward:
            pack_weights(wp, w, size.K, size.C, taps, size.C * taps, taps)
        else:
            pack_weights(wp, w, size.C, size.K, taps, taps, size.C * taps)
        var part = self.cut()
        begin()
        for g0 in range(0, self.groups(), part[0]):
            var groups = min(part[0], self.groups() - g0)
            for h0 in range(0, self.height(), part[1]):
                var h1 = min(self.height(), h0 + part[1])
                var rows = self.reads(h0, h1)
                var n = max(0, rows[1] - rows[0]) * self.line()
                var room = n * tiles_of(self.inputs()) * TILE
                for g in range(groups):
                    var to = xp.unsafe_offset(g * room)
                    var n0 = rows[0] * self.line()
                    if self.samples:
                        var sample = (g0 + g) * LANES
                        pack_pixels[True](
                            to,
                            x.unsafe_offset(sample * self.inputs() * self.plane() + n0),
                            self.inputs(),
                            self.plane(),
                            n,
                            min(LANES, self.samples - sample),
                        )
                    else:
                        var from_ = (g0 + g) * self.inputs() * self.plane() + n0
                        pack_pixels[False](to, x.unsafe_offset(from_ * LANES), self.inputs(), self.plane(), n, 0)
                self._groups[relu](y, xp, wp, bias, g0, groups, room, h0, h1, rows[0])
        end()

    def _groups[
        relu: Bool
    ](
        self,
        y: Ptr,
        xp: HalfPtr,
        wp: HalfPtr,
        bias: Optional[Ptr],
        g0: Int,
        groups: Int,
        room: Int,
        h0: Int,
        h1: Int,
        first: Int,
    ):
        """Rows h0 to h1 - 1 of some groups, which are packed, `room` numbers each."""
        var M = self.channels()
        var plane = self.height() * self.width()
        var per_vector = self.size.R * self.size.T * tiles_of(self.inputs())
        var start = unsafe_stack_allocation[4 * SUMS, F32, alignment=64]()
        var sums = unsafe_stack_allocation[BLOCK * 4 * SUMS, F32, alignment=64]()

        @always_inline
        def block[mb: Int, nb: Int](v: Int, from_: Int, to: Int) {imm}:
            """Vectors v to v + mb - 1 of channels, groups from_ to to - 1."""
            var valid = min(M - v * LANES, mb * LANES)
            for m in range(mb * LANES):
                var value: Float32 = 0
                if bias and m < valid:
                    value = bias.value()[unsafe_offset=v * LANES + m]
                store(start, m * LANES, Vec(value))
            # Pixels of a channel are neighbours, its channels are not: a run of pixels is written at once.
            var direct = plane == 1 and not relu and self.samples == 0 and valid == mb * LANES
            for g in range(from_, to, nb):
                for h in range(h0, h1):
                    for i0 in range(0, self.width(), BLOCK):
                        var n = min(BLOCK, self.width() - i0)
                        for i in range(n):
                            var to_ = sums.unsafe_offset(i * 4 * SUMS)
                            var group = SUMS
                            if direct:
                                group = M * LANES
                                to_ = y.unsafe_offset(((g0 + g) * M + v * LANES) * LANES)
                            _block[mb, nb](
                                to_,
                                SUMS if direct else nb * SUMS,
                                group,
                                wp.unsafe_offset(v * per_vector * TILE),
                                per_vector * TILE,
                                xp.unsafe_offset(g * room),
                                room,
                                start,
                                self.sum(h, i0 + i, first),
                            )
                        if direct:
                            continue
                        for m in range(valid):
                            for j in range(nb):
                                self._write[relu](
                                    y,
                                    g0 + g + j,
                                    v * LANES + m,
                                    h * self.width() + i0,
                                    n,
                                    sums.unsafe_offset((m // LANES * nb + j) * SUMS + m % LANES * LANES),
                                )

        var vectors = vectors_of(M)
        var two = groups // 2 * 2
        if two:
            for v in range(0, vectors - 1, 2):
                block[2, 2](v, 0, two)
            if vectors % 2:
                block[1, 2](vectors - 1, 0, two)
        if groups % 2:
            for v in range(0, vectors - 3, 4):
                block[4, 1](v, two, groups)
            comptime for rest in range(1, 4):
                if vectors % 4 == rest:
                    block[rest, 1](vectors - rest, two, groups)

    @always_inline
    def _write[relu: Bool](self, y: Ptr, g: Int, m: Int, pixel: Int, n: Int, sums: Ptr):
        """Writes channel m of n pixels of group g, which are 4 SUMS apart."""
        var M = self.channels()
        var plane = self.height() * self.width()
        for i in range(n):
            var s = load(sums, i * 4 * SUMS)
            comptime if relu:
                s = s.lt(0).select(Vec(0), s)
            if not self.samples:
                store(y, ((g * M + m) * plane + pixel + i) * LANES, s)
                continue
            for l in range(min(LANES, self.samples - g * LANES)):
                var at = ((g * LANES + l) * M + m) * plane + pixel + i
                y[unsafe_offset=at] = s[l]


def conv2d_forward_amx[
    relu: Bool
](
    y: Ptr,  # (G, K, P, Q, L)
    x: Ptr,  # (G, C, H, W, L)
    w: Ptr,  # (K, C, R, T)
    b: Ptr,  # (K)
    scratch: Ptr,  # forward_scratch bytes
    size: Conv,
    rows: Bool,
):
    """Computes y = x * w + b (cross-correlation), then max(y, 0) if `relu`; in rows L is 1, with the bits of lanes."""
    _Pass[True](size, size.G if rows else 0).run[relu](y, x, w, b, scratch)


def conv2d_backward_input_amx(
    dx: Ptr,  # (G, C, H, W, L)
    dy: Ptr,  # (G, K, P, Q, L)
    w: Ptr,  # (K, C, R, T)
    scratch: Ptr,  # input_scratch bytes
    size: Conv,
):
    """Writes the gradient of the (padded) input."""
    _Pass[False](size, 0).run[False](dx, dy, w, None, scratch)


def forward_scratch(size: Conv, rows: Bool) -> Int:
    """Bytes of scratch memory that conv2d_forward_amx wants."""
    return _Pass[True](size, size.G if rows else 0).scratch()


def input_scratch(size: Conv) -> Int:
    """Bytes of scratch memory that conv2d_backward_input_amx wants."""
    return _Pass[False](size, 0).scratch()
