"""Max- and average-pooling, once for all devices (see lanes.mojo for the layout and the letters).

No padding.

R x T is the window, S the stride; P = (H - R) / S + 1 as for a convolution. Backwards a pixel gets what the windows
over it hand down: window rows first, then columns.
"""

from std.memory import unsafe_memset_zero
from std.sys import masked_load, masked_store
from std.utils.numerics import isnan

from .division import divide, divisor
from .functions import rounded
from .lanes import BytePtr, F32, LANES, Ptr, Vec, first, load_first, store_first
from .op import Device, OpOf, by_layout, call, each_cell
from .record import Record, Source, sizes_of
from .views import Cell, Cells


@fieldwise_init
struct Windows(TrivialRegisterPassable):
    """The sizes of a pooling."""

    var planes: Int  # G * C
    var H: Int
    var W: Int
    var R: Int
    var T: Int
    var S: Int

    @always_inline
    def P(self) -> Int:
        """Windows from top to bottom."""
        return (self.H - self.R) // self.S + 1

    @always_inline
    def Q(self) -> Int:
        """Windows from left to right."""
        return (self.W - self.T) // self.S + 1

    @always_inline
    def are(self, n: Int) -> Bool:
        """Whether they are n x n and lie side by side."""
        return self.R == n and self.T == n and self.S == n


@fieldwise_init
struct Pool[backward: Bool](Cells):
    """What is computed: a number for each window, or backwards for each pixel."""

    var s: Windows
    var relu: Bool  # maxpool_backward alone
    var P: Int
    var Q: Int
    var by_S: UInt64

    @staticmethod
    @always_inline
    def read[S: Source](r: S, mut i: Int) -> Self:
        var s = sizes_of[Windows](r, i)
        i += 7
        return Self(s, r.int(i - 1) != 0, s.P(), s.Q(), divisor(s.S))

    @always_inline
    def shape(self) -> Tuple[Int, Int, Int]:
        comptime if Self.backward:
            return self.s.planes, self.s.H, self.s.W
        else:
            return self.s.planes, self.P, self.Q

    @always_inline
    def corner[L: Int](self, c: Cell[L]) -> Int:
        """The first pixel of window c."""
        return (c.plane * self.s.H + c.row * self.s.S) * self.s.W + c.column * self.s.S

    @always_inline
    def over(self, h: Int, R: Int, P: Int) -> Tuple[Int, Int]:
        """The first window p of those over pixel h, p S <= h < p S + R, and the one behind the last."""
        var begin = Int(divide(UInt32(h - R), self.by_S)) + 1 if h >= R else 0
        return (begin, min(Int(divide(UInt32(h), self.by_S)), P - 1) + 1)


@always_inline
def _maxpool[L: Int](c: Cell[L], z: Pool[False]):
    """Arguments y, argmax (which place of the window, r * T + t); x.

    The largest value of each window; the first one of equals; NaN wins, so that it is not hidden. R * T must be at most
    256.
    """
    var corner = z.corner(c)
    var best = c.get(c.c, corner)
    var at = SIMD[DType.int32, L](0)

    @always_inline
    def look(r: Int, t: Int, j: Int) {mut best, mut at, imm}:
        var v = c.get(c.c, corner + r * z.s.W + t)
        var better = v.gt(best) | isnan(v)
        best = better.select(v, best)
        at = better.select(SIMD[DType.int32, L](Int32(j)), at)

    if z.s.are(2):
        comptime for j in range(1, 4):
            look(j // 2, j % 2, j)
    else:
        for t in range(1, z.s.T):
            look(0, t, t)
        for r in range(1, z.s.R):
            for t in range(z.s.T):
                look(r, t, r * z.s.T + t)
    c.put(c.a, c.at, best)
    c.put_bytes(c.b, c.at, at.cast[DType.uint8]())


@always_inline
def _avgpool[L: Int](c: Cell[L], z: Pool[False]):
    """Arguments y; x: the mean of each window."""
    var corner = z.corner(c)
    var s = SIMD[F32, L](0)
    for r in range(z.s.R):
        for t in range(z.s.T):
            s += c.get(c.b, corner + r * z.s.W + t)
    c.put(c.a, c.at, s * (Float32(1) / Float32(z.s.R * z.s.T)))


@always_inline
def _passing[L: Int](c: Cell[L], relu: Bool, i: Int) -> SIMD[F32, L]:
    """What window i hands down.

    With `relu`, x is the output of a ReLU and its backward is done in the same pass: where the winner is 0 nothing
    passes; y is read only then.
    """
    var d = c.get(c.b, i)
    if relu:
        d = c.get(c.d, i).gt(0).select(d, SIMD[F32, L](0))
    return d


@always_inline
def _maxpool_backward[L: Int](c: Cell[L], z: Pool[True]):
    """Arguments dx; dy, argmax, y: hands each gradient to the place that won."""
    var d = SIMD[F32, L](0)
    var rows = z.over(c.row, z.s.R, z.P)
    var columns = z.over(c.column, z.s.T, z.Q)
    for p in range(rows[0], rows[1]):
        for q in range(columns[0], columns[1]):
            var i = (c.plane * z.P + p) * z.Q + q
            var place = (c.row - p * z.s.S) * z.s.T + c.column - q * z.s.S
            var won = c.get_bytes(c.c, i).eq(UInt8(place))
            d += won.select(_passing(c, z.relu, i), SIMD[F32, L](0))
    c.put(c.a, c.at, d)


def _tiled(z: Pool[False]) -> Bool:
    """Whether windows of 2 x 2 tile the planes."""
    return z.s.are(2) and z.s.H % 2 == 0 and z.s.W % 2 == 0


@always_inline
def _maxpool_backward_2x2[L: Int](c: Cell[L], z: Pool[False]):
    """The same if they do: a window writes its four pixels."""
    var d = _passing(c, z.relu, c.at)
    var at = c.get_bytes(c.c, c.at)
    var corner = z.corner(c)
    comptime for j in range(4):
        c.put(c.a, corner + (j // 2) * z.s.W + j % 2, at.eq(UInt8(j)).select(d, SIMD[F32, L](0)))


@always_inline
def _avgpool_backward[L: Int](c: Cell[L], z: Pool[True]):
    """Arguments dx; dy: spreads each gradient evenly over its window."""
    var scale = Float32(1) / Float32(z.s.R * z.s.T)
    var d = SIMD[F32, L](0)
    var rows = z.over(c.row, z.s.R, z.P)
    var columns = z.over(c.column, z.s.T, z.Q)
    for p in range(rows[0], rows[1]):
        for q in range(columns[0], columns[1]):
            d += rounded(c.get(c.b, (c.plane * z.P + p) * z.Q + q) * scale)
    c.put(c.a, c.at, d)


# --- on a CPU: windows of 2 x 2 in rows sixteen at a time; gradients by windows, which is quicker there than by pixels


def _maxpool_on_cpu(r: Record):
    if r.rows() and sizes_of[Windows](r, 4).are(2):
        call[_maxpool_2x2_rows](r)
    else:
        by_layout[each_cell[Pool[False], _maxpool, 3, LANES], each_cell[Pool[False], _maxpool, 3, 1]](r)


def _maxpool_2x2_rows(y: Ptr, argmax: BytePtr, x: Ptr, s: Windows):
    """Takes pixels of two rows, the even and the odd ones."""
    var Q = s.Q()
    for row in range(s.planes * s.P()):
        var plane = row // s.P()
        var top = x.unsafe_offset((plane * s.H + row % s.P() * 2) * s.W)
        for q in range(0, Q, LANES):
            var n = min(Q - q, LANES)
            var a = _two(top, 2 * q, 2 * n)
            var b = _two(top, s.W + 2 * q, 2 * n)
            var best = a[0]
            var at = SIMD[DType.uint8, LANES](0)

            @always_inline
            def look(j: Int, v: Vec) {mut best, mut at}:
                var better = v.gt(best) | isnan(v)
                best = better.select(v, best)
                at = better.select(SIMD[DType.uint8, LANES](UInt8(j)), at)

            look(1, a[1])
            look(2, b[0])
            look(3, b[1])
            store_first(y, row * Q + q, best, n)
            masked_store[LANES](at, argmax.unsafe_offset(row * Q + q), first(n))


@always_inline
def _two(p: Ptr, i: Int, n: Int) -> Tuple[Vec, Vec]:
    """The even and the odd ones of the first n of 32 floats."""
    return load_first(p, i, n).join(load_first(p, i + LANES, n - LANES)).deinterleave()


@always_inline
def _spread_max[L: Int](c: Cell[L], z: Pool[False]):
    var d = _passing(c, z.relu, c.at)
    var at = c.get_bytes(c.c, c.at)
    for r in range(z.s.R):
        for t in range(z.s.T):
            var i = z.corner(c) + r * z.s.W + t
            c.put(c.a, i, c.get(c.a, i) + at.eq(UInt8(r * z.s.T + t)).select(d, SIMD[F32, L](0)))


@always_inline
def _spread_mean[L: Int](c: Cell[L], z: Pool[False]):
    var d = rounded(c.get(c.b, c.at) * (Float32(1) / Float32(z.s.R * z.s.T)))
    for r in range(z.s.R):
        for t in range(z.s.T):
            var i = z.corner(c) + r * z.s.W + t
            c.put(c.a, i, c.get(c.a, i) + d)


def _maxpool_backward_on_cpu(r: Record):
    var i = 5
    var z = Pool[False].read(r, i)
    if not _tiled(z):
        unsafe_memset_zero(r.ptr(1), z.s.planes * z.s.H * z.s.W * r.lanes())
        by_layout[each_cell[Pool[False], _spread_max, 4, LANES], each_cell[Pool[False], _spread_max, 4, 1]](r)
    elif r.rows():
        call[_maxpool_backward_2x2_rows](r)
    else:
        each_cell[Pool[False], _maxpool_backward_2x2, 4, LANES](r)


def _avgpool_backward_on_cpu(r: Record):
    var s = sizes_of[Windows](r, 3)
    unsafe_memset_zero(r.ptr(1), s.planes * s.H * s.W * r.lanes())
    by_layout[each_cell[Pool[False], _spread_mean, 2, LANES], each_cell[Pool[False], _spread_mean, 2, 1]](r)


def _maxpool_backward_2x2_rows(dx: Ptr, dy: Ptr, argmax: BytePtr, y: Ptr, s: Windows, relu: Bool):
    var Q = s.W // 2
    for row in range(s.planes * s.H // 2):
        for q in range(0, Q, LANES):
            var n = min(Q - q, LANES)
            var d = load_first(dy, row * Q + q, n)
            if relu:
                d = load_first(y, row * Q + q, n).gt(0).select(d, Vec(0))
            var at = masked_load[LANES](argmax.unsafe_offset(row * Q + q), first(n), SIMD[DType.uint8, LANES](0))
            comptime for r in range(2):
                var even = at.eq(UInt8(2 * r)).select(d, Vec(0))
                var odd = at.eq(UInt8(2 * r + 1)).select(d, Vec(0))
                var both = even.interleave(odd)
                var to = (row * 2 + r) * s.W + 2 * q
                store_first(dx, to, both.slice[LANES, offset=0](), 2 * n)
                store_first(dx, to + LANES, both.slice[LANES, offset=LANES](), 2 * n - LANES)


def ops[D: Device]() -> List[OpOf[D.Run]]:
    """The ops of this file."""
    return [
        OpOf(
            "maxpool_forward",
            "y, argmax; x; planes, H, W, R, T, S",
            D.cells[Pool[False], _maxpool, 3, cpu=_maxpool_on_cpu](),
        ),
        OpOf(
            "maxpool_backward",
            "dx; dy, argmax, y; planes, H, W, R, T, S, relu of x",
            D.either[
                Pool[False], _maxpool_backward_2x2, _tiled, Pool[True], _maxpool_backward, 4, _maxpool_backward_on_cpu
            ](),
        ),
        OpOf("avgpool_forward", "y; x; planes, H, W, R, T, S", D.cells[Pool[False], _avgpool, 2]()),
        OpOf(
            "avgpool_backward",
            "dx; dy; planes, H, W, R, T, S",
            D.cells[Pool[True], _avgpool_backward, 2, cpu=_avgpool_backward_on_cpu](),
        ),
    ]
