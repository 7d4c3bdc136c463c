"""Max- and average-pooling over lanes (see lanes.mojo for the layout and the letters). No padding.

R x T is the window, S the stride; P = (H - R) / S + 1 as for a convolution.
"""

from std.memory import unsafe_memset_zero
from std.utils.numerics import isnan

from .lanes import F32, LANES, BytePtr, Ptr, load, store
from .op import Op, by_layout
from .record import Record


def maxpool_forward[
    L: Int
](
    y: Ptr,  # (planes, P, Q, L)
    argmax: BytePtr,  # (planes, P, Q, L): which place of the window, r * T + t
    x: Ptr,  # (planes, H, W, L)
    planes: Int,  # G * C
    H: Int,
    W: Int,
    R: Int,
    T: Int,
    S: Int,
):
    """Largest value of each window; the first one of equals; NaN wins, so that it is not hidden.

    R * T must be at most 256.
    """
    if R == 2 and T == 2 and S == 2:
        _maxpool_forward[L, 2](y, argmax, x, planes, H, W, R, T, S)
    else:
        _maxpool_forward[L, 0](y, argmax, x, planes, H, W, R, T, S)


@always_inline
def _maxpool_forward[
    L: Int,
    known: Int,  # window and stride if they are equal and known at compile time, else 0
](
    y: Ptr,
    argmax: BytePtr,
    x: Ptr,
    planes: Int,
    H: Int,
    W: Int,
    R_: Int,
    T_: Int,
    S_: Int,
):
    var R = known if known else R_
    var T = known if known else T_
    var S = known if known else S_
    var P = (H - R) // S + 1
    var Q = (W - T) // S + 1
    var out = 0
    for plane in range(planes):
        for p in range(P):
            var row = x.unsafe_offset((plane * H + p * S) * W * L)
            for _ in range(Q):
                var best = load[L](row, 0)
                var at = SIMD[DType.int32, L](0)

                @always_inline
                def look(r: Int, t: Int) {mut best, mut at, imm}:
                    var v = load[L](row, (r * W + t) * L)
                    var better = v.gt(best) | isnan(v)
                    best = better.select(v, best)
                    at = better.select(
                        SIMD[DType.int32, L](Int32(r * T + t)), at
                    )

                comptime if known:
                    comptime for j in range(1, known * known):
                        look(j // known, j % known)
                else:
                    for j in range(1, R * T):
                        look(j // T, j % T)
                store[L](y, out, best)
                argmax.unsafe_store(out, at.cast[DType.uint8]())
                out += L
                row = row.unsafe_offset(S * L)


def maxpool_backward[
    L: Int, relu: Bool
](
    dx: Ptr,  # (planes, H, W, L)
    dy: Ptr,  # (planes, P, Q, L)
    argmax: BytePtr,  # (planes, P, Q, L), saved by forward
    y: Ptr,  # (planes, P, Q, L), read only if `relu`
    planes: Int,
    H: Int,
    W: Int,
    R: Int,
    T: Int,
    S: Int,
):
    """Hands each gradient to the place that won. With `relu`, x is the output of a ReLU and its backward is done in the
    same pass: where the winner is 0 nothing passes.
    """
    if R == 2 and T == 2 and S == 2 and H % 2 == 0 and W % 2 == 0:
        _maxpool_backward_2x2[L, relu](dx, dy, argmax, y, planes, H, W)
        return
    var P = (H - R) // S + 1
    var Q = (W - T) // S + 1
    unsafe_memset_zero(dx, planes * H * W * L)
    var out = 0
    for plane in range(planes):
        for p in range(P):
            for q in range(Q):
                var d = _passing[L, relu](dy, y, out)
                var at = argmax.unsafe_offset(out).unsafe_load[width=L]()
                for r in range(R):
                    for t in range(T):
                        var i = ((plane * H + p * S + r) * W + q * S + t) * L
                        var won = at.eq(UInt8(r * T + t))
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
def _maxpool_backward_2x2[
    L: Int, relu: Bool
](dx: Ptr, dy: Ptr, argmax: BytePtr, y: Ptr, planes: Int, H: Int, W: Int):
    """Windows that tile the plane: every element is written once, none is read.
    """
    var out = 0
    for row in range(planes * H // 2):
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


def avgpool_forward[
    L: Int
](y: Ptr, x: Ptr, planes: Int, H: Int, W: Int, R: Int, T: Int, S: Int):
    """Mean of each window. Shapes as for maxpool_forward."""
    var P = (H - R) // S + 1
    var Q = (W - T) // S + 1
    var scale = Float32(1) / Float32(R * T)
    var out = 0
    for plane in range(planes):
        for p in range(P):
            for q in range(Q):
                var s = SIMD[F32, L](0)
                for r in range(R):
                    for t in range(T):
                        s += load[L](
                            x, ((plane * H + p * S + r) * W + q * S + t) * L
                        )
                store[L](y, out, s * scale)
                out += L


def avgpool_backward[
    L: Int
](dx: Ptr, dy: Ptr, planes: Int, H: Int, W: Int, R: Int, T: Int, S: Int):
    """Spreads each gradient evenly over its window. Shapes as for maxpool_backward.
    """
    var P = (H - R) // S + 1
    var Q = (W - T) // S + 1
    var scale = Float32(1) / Float32(R * T)
    unsafe_memset_zero(dx, planes * H * W * L)
    var out = 0
    for plane in range(planes):
        for p in range(P):
            for q in range(Q):
                var d = load[L](dy, out) * scale
                for r in range(R):
                    for t in range(T):
                        var i = ((plane * H + p * S + r) * W + q * S + t) * L
                        store[L](dx, i, load[L](dx, i) + d)
                out += L


# --- ops ------------------------------------------------------------------------------------------------------------------


def _max_forward[L: Int](r: Record):
    maxpool_forward[L](
        r.ptr(1),
        r.bytes(2),
        r.ptr(3),
        r.int(4),
        r.int(5),
        r.int(6),
        r.int(7),
        r.int(8),
        r.int(9),
    )


def _max_backward[L: Int, relu: Bool](r: Record):
    maxpool_backward[L, relu](
        r.ptr(1),
        r.ptr(2),
        r.bytes(3),
        r.ptr(4),
        r.int(5),
        r.int(6),
        r.int(7),
        r.int(8),
        r.int(9),
        r.int(10),
    )


def _max_backward_op[L: Int](r: Record):
    if r.int(11):
        _max_backward[L, True](r)
    else:
        _max_backward[L, False](r)


def _average[f: def(Ptr, Ptr, Int, Int, Int, Int, Int, Int) thin](r: Record):
    f(
        r.ptr(1),
        r.ptr(2),
        r.int(3),
        r.int(4),
        r.int(5),
        r.int(6),
        r.int(7),
        r.int(8),
    )


def ops() -> List[Op]:
    """The ops of this file. relu: the gradient of a ReLU before the pool is taken with it.
    """
    return [
        Op(
            "maxpool_forward",
            "y, argmax; x; planes, H, W, R, T, S",
            by_layout[_max_forward[LANES], _max_forward[1]],
        ),
        Op(
            "maxpool_backward",
            "dx; dy, argmax, y; planes, H, W, R, T, S, relu",
            by_layout[_max_backward_op[LANES], _max_backward_op[1]],
        ),
        Op(
            "avgpool_forward",
            "y; x; planes, H, W, R, T, S",
            by_layout[
                _average[avgpool_forward[LANES]], _average[avgpool_forward[1]]
            ],
        ),
        Op(
            "avgpool_backward",
            "dx; dy; planes, H, W, R, T, S",
            by_layout[
                _average[avgpool_backward[LANES]],
                _average[avgpool_backward[1]],
            ],
        ),
    ]
