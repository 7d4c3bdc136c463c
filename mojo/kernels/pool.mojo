"""Max- and average-pooling over lanes (see lanes.mojo for the layout and the letters). No padding.

R x T is the window, S the stride; P = (H - R) / S + 1 as for a convolution.
"""

from std.memory import unsafe_memset_zero
from std.sys import masked_load, masked_store
from std.utils.numerics import isnan

from .lanes import (
    F32,
    LANES,
    BytePtr,
    Ptr,
    Vec,
    first,
    load,
    load_first,
    store,
    store_first,
)
from .op import Op, by_layout, call


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


def maxpool_forward[
    L: Int
](
    y: Ptr,  # (planes, P, Q, L)
    argmax: BytePtr,  # (planes, P, Q, L): which place of the window, r * T + t
    x: Ptr,  # (planes, H, W, L)
    s: Windows,
):
    """Largest value of each window; the first one of equals; NaN wins, so that it is not hidden.

    R * T must be at most 256.
    """
    comptime if L == 1:
        if s.are(2):
            return _maxpool_forward_2x2_rows(y, argmax, x, s)
    if s.are(2):
        _maxpool_forward[L, 2](y, argmax, x, s)
    else:
        _maxpool_forward[L, 0](y, argmax, x, s)


@always_inline
def _maxpool_forward[
    L: Int,
    known: Int,  # window and stride if they are equal and known at compile time, else 0
](y: Ptr, argmax: BytePtr, x: Ptr, s: Windows):
    var T = known if known else s.T
    var S = known if known else s.S
    var W = s.W
    var out = 0
    for plane in range(s.planes):
        for p in range(s.P()):
            var row = x.unsafe_offset((plane * s.H + p * S) * W * L)
            for _ in range(s.Q()):
                var best = load[L](row, 0)
                var at = SIMD[DType.int32, L](0)

                @always_inline
                def look(r: Int, t: Int) {mut best, mut at, imm}:
                    var v = load[L](row, (r * W + t) * L)
                    var better = v.gt(best) | isnan(v)
                    best = better.select(v, best)
                    at = better.select(SIMD[DType.int32, L](Int32(r * T + t)), at)

                comptime if known:
                    comptime for j in range(1, known * known):
                        look(j // known, j % known)
                else:
                    for j in range(1, s.R * T):
                        look(j // T, j % T)
                store[L](y, out, best)
                argmax.unsafe_store(out, at.cast[DType.uint8]())
                out += L
                row = row.unsafe_offset(S * L)


def _maxpool_forward_2x2_rows(y: Ptr, argmax: BytePtr, x: Ptr, s: Windows):
    """Sixteen windows of a row at a time: pixels of two rows, the even and the odd ones."""
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


def maxpool_backward[
    L: Int
](
    dx: Ptr,  # (planes, H, W, L)
    dy: Ptr,  # (planes, P, Q, L)
    argmax: BytePtr,  # (planes, P, Q, L), saved by forward
    y: Ptr,  # (planes, P, Q, L), read only if `relu`
    s: Windows,
    relu: Bool,
):
    """Hands each gradient to the place that won. With `relu`, x is the output of a ReLU and its backward is done in the
    same pass: where the winner is 0 nothing passes.
    """
    if relu:
        _maxpool_backward[L, True](dx, dy, argmax, y, s)
    else:
        _maxpool_backward[L, False](dx, dy, argmax, y, s)


def _maxpool_backward[L: Int, relu: Bool](dx: Ptr, dy: Ptr, argmax: BytePtr, y: Ptr, s: Windows):
    if s.are(2) and s.H % 2 == 0 and s.W % 2 == 0:
        comptime if L == 1:
            _maxpool_backward_2x2_rows[relu](dx, dy, argmax, y, s)
        else:
            _maxpool_backward_2x2[L, relu](dx, dy, argmax, y, s)
        return
    unsafe_memset_zero(dx, s.planes * s.H * s.W * L)
    var out = 0
    for plane in range(s.planes):
        for p in range(s.P()):
            for q in range(s.Q()):
                var d = _passing[L, relu](dy, y, out)
                var at = argmax.unsafe_offset(out).unsafe_load[width=L]()
                for r in range(s.R):
                    for t in range(s.T):
                        var row = plane * s.H + p * s.S + r
                        var i = (row * s.W + q * s.S + t) * L
                        var won = at.eq(UInt8(r * s.T + t))
                        store[L](
                            dx,
                            i,
                            load[L](dx, i) + won.select(d, SIMD[F32, L](0)),
                        )
                out += L


@always_inline
def _passing[L: Int, relu: Bool](dy: Ptr, y: Ptr, i: Int) -> SIMD[F32, L]:
    comptime if relu:
        return load[L](y, i).gt(0).select(load[L](dy, i), SIMD[F32, L](0))
    else:
        return load[L](dy, i)


@always_inline
def _maxpool_backward_2x2[L: Int, relu: Bool](dx: Ptr, dy: Ptr, argmax: BytePtr, y: Ptr, s: Windows):
    """Windows that tile the plane: every element is written once, none is read."""
    var out = 0
    var W = s.W
    for row in range(s.planes * s.H // 2):
        var top = dx.unsafe_offset(row * 2 * W * L)
        for q in range(W // 2):
            var d = _passing[L, relu](dy, y, out)
            var at = argmax.unsafe_offset(out).unsafe_load[width=L]()
            comptime for j in range(4):
                store[L](
                    top,
                    ((j // 2) * W + 2 * q + j % 2) * L,
                    at.eq(UInt8(j)).select(d, SIMD[F32, L](0)),
                )
            out += L


def _maxpool_backward_2x2_rows[relu: Bool](dx: Ptr, dy: Ptr, argmax: BytePtr, y: Ptr, s: Windows):
    """The same, sixteen windows of a row at a time."""
    var Q = s.W // 2
    for row in range(s.planes * s.H // 2):
        for q in range(0, Q, LANES):
            var n = min(Q - q, LANES)
            var d = load_first(dy, row * Q + q, n)
            comptime if relu:
                d = load_first(y, row * Q + q, n).gt(0).select(d, Vec(0))
            var at = masked_load[LANES](
                argmax.unsafe_offset(row * Q + q),
                first(n),
                SIMD[DType.uint8, LANES](0),
            )
            comptime for r in range(2):
                var even = at.eq(UInt8(2 * r)).select(d, Vec(0))
                var odd = at.eq(UInt8(2 * r + 1)).select(d, Vec(0))
                var both = even.interleave(odd)
                var to = (row * 2 + r) * s.W + 2 * q
                store_first(dx, to, both.slice[LANES, offset=0](), 2 * n)
                store_first(
                    dx,
                    to + LANES,
                    both.slice[LANES, offset=LANES](),
                    2 * n - LANES,
                )


def avgpool_forward[L: Int](y: Ptr, x: Ptr, s: Windows):
    """Mean of each window. Shapes as for maxpool_forward."""
    var scale = Float32(1) / Float32(s.R * s.T)
    var out = 0
    for plane in range(s.planes):
        for p in range(s.P()):
            for q in range(s.Q()):
                var sum = SIMD[F32, L](0)
                for r in range(s.R):
                    var row = (plane * s.H + p * s.S + r) * s.W + q * s.S
                    for t in range(s.T):
                        sum += load[L](x, (row + t) * L)
                store[L](y, out, sum * scale)
                out += L


def avgpool_backward[L: Int](dx: Ptr, dy: Ptr, s: Windows):
    """Spreads each gradient evenly over its window. Shapes as for maxpool_backward."""
    var scale = Float32(1) / Float32(s.R * s.T)
    unsafe_memset_zero(dx, s.planes * s.H * s.W * L)
    var out = 0
    for plane in range(s.planes):
        for p in range(s.P()):
            for q in range(s.Q()):
                var d = load[L](dy, out) * scale
                for r in range(s.R):
                    var row = (plane * s.H + p * s.S + r) * s.W + q * s.S
                    for t in range(s.T):
                        var i = (row + t) * L
                        store[L](dx, i, load[L](dx, i) + d)
                out += L


def ops() -> List[Op]:
    """The ops of this file. relu: the gradient of a ReLU before the pool is taken with it."""
    return [
        Op(
            "maxpool_forward",
            "y, argmax; x; planes, H, W, R, T, S",
            by_layout[call[maxpool_forward[LANES]], call[maxpool_forward[1]]],
        ),
        Op(
            "maxpool_backward",
            "dx; dy, argmax, y; planes, H, W, R, T, S, relu",
            by_layout[call[maxpool_backward[LANES]], call[maxpool_backward[1]]],
        ),
        Op(
            "avgpool_forward",
            "y; x; planes, H, W, R, T, S",
            by_layout[call[avgpool_forward[LANES]], call[avgpool_forward[1]]],
        ),
        Op(
            "avgpool_backward",
            "dx; dy; planes, H, W, R, T, S",
            by_layout[call[avgpool_backward[LANES]], call[avgpool_backward[1]]],
        ),
    ]
