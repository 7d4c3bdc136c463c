"""Divisions by a number that is known before a kernel begins, as a multiplication and a shift (Granlund and
Montgomery: "Division by invariant integers using multiplication", PLDI 1994). A division of integers is some
twenty instructions on a GPU, as many as a thread has time for while its data move.
"""

comptime MOST = 1 << 31  # what `divide` takes stays below


def divisor(d: Int) -> UInt64:
    """What `divide` needs to divide by d, 1 <= d <= 2^31: ceil(2^(31 + l) / d) in the upper half, 31 + l in the lower,
    with 2^l the first power of two that is at least d.
    """
    var l = 0
    while (1 << l) < d:
        l += 1
    return UInt64(((1 << (31 + l)) + d - 1) // d) << 32 | UInt64(31 + l)


@always_inline
def divide(n: UInt32, by: UInt64) -> UInt32:
    """Computes n // d for n < 2^31, `by` = divisor(d)."""
    return UInt32((UInt64(n) * (by >> 32)) >> (by & 63))
