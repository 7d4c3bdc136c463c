"""The Euclidean norm of gradients, an exact sum that has no order (python/odyssey/norm.py, to the bit)."""

from std.ffi import external_call
from std.math import sqrt

from kernels.lanes import Ptr
from kernels.layout import LongPtr
from kernels.reduce import fixed_squares, largest


def global_norm(grads: Ptr, floats: Int) -> Float64:
    """The norm of an arena's gradients; infinite or NaN if a number is.

    Args:
        grads: The numbers.
        floats: How many.

    Returns:
        The norm.
    """
    var found = List[Float32](
        length=2, fill=0
    )  # on the heap: filled through an address
    largest(Ptr(unsafe_from_address=Int(found.unsafe_ptr())), grads, floats)
    var top = Float64(found[0])
    if top == 0 or not (top - top == 0):
        return top
    var exponent = _exponent(top)
    var unit = _power_of_two(-exponent)
    if exponent < -126:  # squares of what is below 2^-126 would be lost
        return 0
    var sums = List[Int64](length=2, fill=0)
    fixed_squares(
        LongPtr(unsafe_from_address=Int(sums.unsafe_ptr())),
        grads,
        floats,
        Float32(unit),
    )
    var whole = Int128(sums[0]) * (Int128(1) << 31) + Int128(sums[1])
    _ = found^
    _ = sums^
    var square = whole.cast[DType.float64]() / _power_of_two(62)
    return sqrt(square) * _power_of_two(exponent)


def _exponent(x: Float64) -> Int:
    """The e of x = m 2^e with 0.5 <= m < 1, for x above 0."""
    var e = List[Int32](length=1, fill=0)
    _ = external_call["frexp", Float64](x, Int(e.unsafe_ptr()))
    return Int(e[0])


def _power_of_two(e: Int) -> Float64:
    return external_call["ldexp", Float64](Float64(1), Int32(e))
