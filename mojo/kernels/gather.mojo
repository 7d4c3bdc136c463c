"""Rows of a table by their numbers, and the gradient of the table: rows added in the order in which they were taken.

A number that the table does not have gives a row of NaN, which the check of a step finds; it has no gradient.
"""

from std.memory import bitcast, unsafe_memcpy
from std.utils.numerics import nan

from .buffers import add, fill
from .lanes import F32, IntPtr, Ptr
from .op import Device, Op, OpOf
from .record import Record


@always_inline
def _to_int32[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """The bits of the whole number that x is, as the data's floats are."""
    return bitcast[F32, w](x.cast[DType.int32]())


def _take(r: Record):
    """Arguments y; x, index; n, V, F: row i of y (n, F) is row index[i] of x (V, F)."""
    var index = IntPtr(unsafe_from_address=r.address(3))
    var F = r.int(6)
    for i in range(r.int(4)):
        var y = r.ptr(1).unsafe_offset(i * F)
        var row = Int(index[unsafe_offset=i])
        if 0 <= row < r.int(5):
            unsafe_memcpy(dest=y, src=r.ptr(2).unsafe_offset(row * F), count=F)
        else:
            fill(y, nan[F32](), F)


def _take_backward(r: Record):
    """Arguments dx; dy, index; n, V, F: dx (V, F) is the sum of the rows of dy that were taken from it."""
    var index = IntPtr(unsafe_from_address=r.address(3))
    var F = r.int(6)
    fill(r.ptr(1), 0, r.int(5) * F)
    for i in range(r.int(4)):
        var row = Int(index[unsafe_offset=i])
        if 0 <= row < r.int(5):
            var dx = r.ptr(1).unsafe_offset(row * F)
            add(dx, dx, r.ptr(2).unsafe_offset(i * F), F)


def maps[D: Device]() -> List[OpOf[D.Run]]:
    """The ops that are one function of vectors."""
    return [OpOf("to_int32", "y; x; n", D.map[_to_int32]())]


def ops() -> List[Op]:
    """The ops of this file."""
    return [Op("take", "y; x, index; n, V, F", _take), Op("take_backward", "dx; dy, index; n, V, F", _take_backward)]
