"""Dropout, once for all devices, with random numbers that depend on the sample, never on where it is computed
(random.mojo).

What stays is kept for the backward pass, a bit per element: bit f % 8 of byte (g, f / 8, lane). Attention
(attention.mojo) has more weights than there is memory for, and draws the same numbers again.
"""

from std.math import ceil, ceildiv, iota

from .lanes import F32, Ptr
from .op import Device, OpOf
from .random import U32, philox
from .record import Source
from .views import Cell, Cells

comptime U8 = DType.uint8


@always_inline
def stays[
    w: Int
](block: Int, sample: SIMD[U32, w], layer: Int, p: Float32, step: Int64, seed: UInt64) -> Array[SIMD[DType.bool, w], 4]:
    """Whether elements 4 block .. 4 block + 3 of w samples stay: where a number in [0, 1) is at least p.

    The number of element f of a sample is that of the upper 24 bits (random.unit) of word f % 4 of the counter (f / 4,
    sample, step, layer), sample = first + position in this tensor = position in the global batch; where lanes are the T
    tokens of samples, first T + position. p must be in [0, 1).
    """
    var words = philox[w](
        SIMD[U32, w](UInt32(block)), sample, SIMD[U32, w](UInt32(step)), SIMD[U32, w](UInt32(layer)), seed
    )
    # the same as unit(word) >= p, in integers
    var least = SIMD[U32, w](UInt32(ceil(p * 16777216)) << 8)
    return [words[0].ge(least), words[1].ge(least), words[2].ge(least), words[3].ge(least)]


@fieldwise_init
struct Bits(Cells):
    """What is computed: a byte of what stays, eight features of a sample."""

    var G: Int
    var F: Int
    var keep: Float32  # 1 / (1 - p)
    var p: Float32
    var layer: Int  # this and T: forward alone
    var T: Int

    @staticmethod
    @always_inline
    def read[S: Source](r: S, mut i: Int) -> Self:
        i += 5
        var p = r.float(i - 3)
        return Self(r.int(i - 5), r.int(i - 4), Float32(1) / (1 - p), p, r.int(i - 2), r.int(i - 1))

    @always_inline
    def shape(self) -> Tuple[Int, Int, Int]:
        return self.G, 1, ceildiv(self.F, 8)

    @always_inline
    def apply[L: Int](self, c: Cell[L], y: Ptr, x: Ptr, mask: SIMD[U8, L]):
        """Writes x / (1 - p) where the bits of a byte are 1, else 0."""
        comptime for j in range(8):
            if 8 * c.column + j < self.F:
                var i = c.plane * self.F + 8 * c.column + j
                var stay = (mask & SIMD[U8, L](1 << j)).ne(0)
                c.put(y, i, stay.select(c.get(x, i) * self.keep, SIMD[F32, L](0)))


@always_inline
def _dropout[L: Int](c: Cell[L], z: Bits):
    """Arguments y, bits (G, F / 8, L); x: y = x / (1 - p) where it `stays`, else 0."""
    var sample = iota[U32, L](UInt32(c.run.first) * UInt32(z.T) + UInt32(c.plane * c.stride + c.lane))
    var mask = SIMD[U8, L](0)
    comptime for half in range(2):
        if 8 * c.column + 4 * half < z.F:
            var stay = stays[L](2 * c.column + half, sample, z.layer, z.p, c.run.step, c.run.seed)
            comptime for j in range(4):
                comptime bit = 4 * half + j
                if 8 * c.column + bit < z.F:
                    mask |= stay[j].select(SIMD[U8, L](1 << bit), SIMD[U8, L](0))
    c.put_bytes(c.b, c.at, mask)
    z.apply(c, c.a, c.c, mask)


@always_inline
def _dropout_backward[L: Int](c: Cell[L], z: Bits):
    """Arguments dx; dy, bits: dx = dy / (1 - p) where x stayed, else 0."""
    z.apply(c, c.a, c.b, c.get_bytes(c.c, c.at))


def ops[D: Device]() -> List[OpOf[D.Run]]:
    """The ops of this file."""
    return [
        OpOf("dropout_forward", "y, bits; x; G, F, p, layer, T", D.cells[Bits, _dropout, 3, 1]()),
        OpOf("dropout_backward", "dx; dy, bits; G, F, p", D.cells[Bits, _dropout_backward, 3, 1]()),
    ]
