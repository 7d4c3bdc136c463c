"""Sums, largest numbers and their places over some axes of a tensor, in an order of their own: number i of what is
reduced goes to partial result i mod 16, and the 16 are put together by halves. The order depends on the shape
alone, neither on the layout nor on the device.

The kept axes (three) and the reduced ones (three) come with their strides; the result has no gaps.
"""

from std.utils.numerics import inf

from .arithmetic import maximum
from .buffers import plus
from .lanes import F32, IntPtr, LANES, Ptr, load, store
from .op import Op
from .record import Record
from .views import Of2

comptime PARTS = 16  # partial results
comptime LOWEST = -inf[F32]()


@always_inline
def halved[f: Of2, L: Int](mut parts: Array[SIMD[F32, L], PARTS]) -> SIMD[F32, L]:
    """Puts the partial results together."""
    comptime for level in range(4):
        comptime half = PARTS >> (level + 1)
        comptime for j in range(half):
            parts[j] = f[L](parts[j], parts[j + half])
    return parts[0]


@always_inline
def fold[f: Of2, start: Float32, L: Int](x: Ptr, r0: Int, r1: Int, r2: Int, s0: Int, s1: Int, s2: Int) -> SIMD[F32, L]:
    """Puts r0 x r1 x r2 numbers together, L neighbours at once."""
    var parts = Array[SIMD[F32, L], PARTS](fill=start)
    var at = x
    var i1 = 0
    var i2 = 0
    for i in range(0, r0 * r1 * r2, PARTS):
        comptime for j in range(PARTS):  # an index that is not known while compiling would keep the parts in memory
            if i + j < r0 * r1 * r2:
                parts[j] = f[L](parts[j], load[L](at, i1 * s1 + i2 * s2))
                i2 += 1
                if i2 == r2:
                    i2 = 0
                    i1 += 1
                if i1 == r1:
                    i1 = 0
                    at = at.unsafe_offset(s0)
    return halved[f, L](parts)


@always_inline
def _fold_neighbours[f: Of2, start: Float32](x: Ptr, n: Int) -> SIMD[F32, 1]:
    """Same as `fold`, of n neighbours."""
    var v = SIMD[F32, PARTS](start)
    var i = 0
    while i + PARTS <= n:
        v = f[PARTS](v, load[PARTS](x, i))
        i += PARTS
    var parts = Array[SIMD[F32, 1], PARTS](fill=start)
    comptime for j in range(PARTS):
        parts[j] = v[j]
        if i + j < n:
            parts[j] = f[1](parts[j], x[unsafe_offset=i + j])
    return halved[f, 1](parts)


def _reduce[f: Of2, start: Float32](r: Record):
    """Arguments y; x; 3 kept sizes, 3 reduced sizes, 3 strides of the kept, 3 of the reduced."""
    var y = r.ptr(1)
    var n = r.int(5)
    var r0 = r.int(6)
    var r1 = r.int(7)
    var r2 = r.int(8)
    var s0 = r.int(12)
    var s1 = r.int(13)
    var s2 = r.int(14)
    var step = r.int(11)
    for i in range(r.int(3)):
        for j in range(r.int(4)):
            var x = r.ptr(2).unsafe_offset(i * r.int(9) + j * r.int(10))
            var k = 0
            while step == 1 and k + LANES <= n:
                var at = x.unsafe_offset(k)
                store(y, k, fold[f, start, LANES](at, r0, r1, r2, s0, s1, s2))
                k += LANES
            while k < n:
                var at = x.unsafe_offset(k * step)
                if r0 == 1 and r1 == 1 and s2 == 1:
                    y[unsafe_offset=k] = _fold_neighbours[f, start](at, r2)[0]
                else:
                    var v = fold[f, start, 1](at, r0, r1, r2, s0, s1, s2)
                    y[unsafe_offset=k] = v[0]
                k += 1
            y = y.unsafe_offset(n)


@always_inline
def argmax(x: Ptr, n: Int, step: Int) -> Int32:
    """The first place of the largest number; of the first NaN if there is one."""
    var best = 0
    var most = x[]
    for i in range(1, n):
        var v = x[unsafe_offset=i * step]
        if v > most or (not v == v and most == most):
            best = i
            most = v
    return Int32(best)


def _argmax(r: Record):
    """Arguments y; x; kept before, reduced, kept behind; x and y without gaps, y int32."""
    var after = r.int(5)
    for i in range(r.int(3)):
        for k in range(after):
            var x = r.ptr(2).unsafe_offset(i * r.int(4) * after + k)
            IntPtr(unsafe_from_address=r.address(1))[unsafe_offset=i * after + k] = argmax(x, r.int(4), after)


def ops() -> List[Op]:
    """The ops of this file."""
    comptime ROLES = "y; x; k0, k1, k2, r0, r1, r2, sk0, sk1, sk2, sr0, sr1, sr2"
    return [
        Op("reduce_sum", ROLES, _reduce[plus, 0]),
        Op("reduce_max", ROLES, _reduce[maximum, LOWEST]),
        Op("argmax", "y; x; before, n, behind", _argmax),
    ]
