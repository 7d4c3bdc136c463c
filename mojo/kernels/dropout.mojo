"""Dropout over lanes with random numbers that depend on the sample, never on where it is computed (random.mojo).

What stays is kept for the backward pass, a bit per element: bit f % 8 of byte (g, f / 8, lane). Attention (attention.mojo)
has more weights than there is memory for, and draws the same numbers again.
"""

from std.math import ceil, ceildiv, iota

from .lanes import BytePtr, F32, LANES, Ptr, load, store
from .random import U32, philox
from .op import Op, by_layout, call
from .record import ContextPtr

comptime U8 = DType.uint8


@always_inline
def stays[
    w: Int
](
    block: Int,
    sample: SIMD[U32, w],
    layer: Int,
    p: Float32,
    step: Int64,
    seed: UInt64,
) -> Array[
    SIMD[DType.bool, w], 4
]:
    """Whether elements 4 block .. 4 block + 3 of w samples stay: where a number in [0, 1) is at least p.

    The number of element f of a sample is that of the upper 24 bits (random.unit) of word f % 4 of the counter (f / 4,
    sample, step, layer), sample = first + position in this tensor = position in the global batch; where lanes are the T
    tokens of samples, first T + position. p must be in [0, 1).
    """
    var words = philox[w](
        SIMD[U32, w](UInt32(block)),
        sample,
        SIMD[U32, w](UInt32(step)),
        SIMD[U32, w](UInt32(layer)),
        seed,
    )
    # the same as unit(word) >= p, in integers
    var least = SIMD[U32, w](UInt32(ceil(p * 16777216)) << 8)
    return [
        words[0].ge(least),
        words[1].ge(least),
        words[2].ge(least),
        words[3].ge(least),
    ]


def dropout_forward[
    L: Int
](
    y: Ptr,  # (G, F, L)
    bits: BytePtr,  # (G, F / 8, L): what stays
    x: Ptr,  # (G, F, L)
    G: Int,
    F: Int,
    p: Float32,
    layer: Int,
    T: Int,
    context: ContextPtr,
):
    """Computes y = x / (1 - p) where it `stays`, else 0."""
    ref run = context[]
    var keep = Float32(1) / (1 - p)
    var bytes = ceildiv(F, 8)
    for g in range(G):
        var sample = iota[U32, L](UInt32(run.first) * UInt32(T) + UInt32(g * L))
        for byte in range(bytes):
            var mask = SIMD[U32, L](0)
            comptime for half in range(2):
                var block = 2 * byte + half
                if 4 * block < F:
                    var stay = stays[L](block, sample, layer, p, run.step, run.seed)
                    comptime for j in range(4):
                        if 4 * block + j < F:
                            var i = (g * F + 4 * block + j) * L
                            var v = load[L](x, i) * keep
                            store[L](y, i, stay[j].select(v, SIMD[F32, L](0)))
                            mask |= stay[j].select(
                                SIMD[U32, L](1 << (4 * half + j)),
                                SIMD[U32, L](0),
                            )
            bits.unsafe_store((g * bytes + byte) * L, mask.cast[U8]())


def dropout_backward[
    L: Int
](dx: Ptr, dy: Ptr, bits: BytePtr, G: Int, F: Int, p: Float32,):  # (G, F, L)  # (G, F, L)  # (G, F / 8, L): what stayed
    """Computes dx = dy / (1 - p) where x stayed, else 0."""
    var keep = Float32(1) / (1 - p)
    var bytes = ceildiv(F, 8)
    for g in range(G):
        for byte in range(bytes):
            var at = bits.unsafe_offset((g * bytes + byte) * L)
            var mask = at.unsafe_load[width=L]().cast[U32]()
            comptime for j in range(8):
                if 8 * byte + j < F:
                    var i = (g * F + 8 * byte + j) * L
                    var stayed = (mask & SIMD[U32, L](1 << j)).ne(0)
                    var v = load[L](dy, i) * keep
                    store[L](dx, i, stayed.select(v, SIMD[F32, L](0)))


def ops() -> List[Op]:
    """The ops of this file."""
    comptime forward = by_layout[call[dropout_forward[LANES]], call[dropout_forward[1]]]
    comptime backward = by_layout[call[dropout_backward[LANES]], call[dropout_backward[1]]]
    return [
        Op("dropout_forward", "y, bits; x; G, F, p, layer, T", forward),
        Op("dropout_backward", "dx; dy, bits; G, F, p", backward),
    ]
