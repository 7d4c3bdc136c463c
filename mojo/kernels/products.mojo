"""Which kernel computes a record of a convolution or a linear layer, in lanes and in rows, in float32 and in 16 bits.

The families of both (families/convolutions.mojo, linear.mojo) decide by what is here.

The processor's own bf16 products are taken where it has them, of tiles before those of pairs, and the batch is in lanes
(a forward pass: in rows too); else float32 copies of the rounded operands, in scratch memory, for the float32 kernels.
"""

from .lanes import LANES, Ptr
from .lowp import HAS_AMX, HAS_BF16, bias_gradient, rounded
from .record import BF16, FP32, Record


@always_inline
def in_pairs(r: Record) -> Bool:
    """True if pairs of bf16 are multiplied."""
    return HAS_BF16 and r.dtype() == BF16 and not r.rows()


@always_inline
def in_tiles(r: Record) -> Bool:
    """True if tiles of bf16 are multiplied: in lanes, and in rows in the forward pass."""
    return HAS_AMX and r.dtype() == BF16


@always_inline
def rounded_operand(r: Record, x: Ptr, scratch: Ptr, n: Int) -> Tuple[Ptr, Ptr]:
    """The n floats of x rounded to the record's type, which are in scratch memory unless that is float32; and what
    is left of the scratch memory.
    """
    if r.dtype() == FP32:
        return x, scratch
    if r.dtype() == BF16:
        rounded[DType.bfloat16](scratch, x, n)
    else:
        rounded[DType.float16](scratch, x, n)
    return scratch, scratch.unsafe_offset(n)


def bias_of_operand(r: Record, db: Ptr, dy: Ptr, G: Int, O: Int, n: Int):
    if r.rows():
        bias_gradient[1](db, dy, G, O, n)
    else:
        bias_gradient[LANES](db, dy, G, O, n)


def half(n: Int) -> Int:
    """Pairs of n numbers; a last odd one is a pair with 0."""
    return (n + 1) // 2
