"""Dropout over lanes with random numbers that depend on the sample, never on where it is computed (random.mojo).

The mask is not stored: backward draws the same numbers again.
"""

from std.math import iota

from .lanes import F32, LANES, Ptr, load, store
from .random import U32, philox, unit
from .op import Op, by_layout, call
from .record import Record


def dropout[
    L: Int
](
    y: Ptr,  # (G, F, L)
    x: Ptr,  # (G, F, L)
    G: Int,
    F: Int,
    p: Float32,
    layer: Int,
    T: Int,
    r: Record,
):
    """Computes y = x / (1 - p) where a number in [0, 1) is at least p, else 0. Its own backward: dx = dropout(dy).

    The number of element f of a sample is word f % 4 of the counter (f / 4, sample, step, layer), sample = first +
    position in this tensor = position in the global batch; where lanes are the T tokens of samples, first T + position.
    p must be in [0, 1).
    """
    ref ctx = r.context[]
    var keep = Float32(1) / (1 - p)
    for g in range(G):
        var sample = iota[U32, L](UInt32(ctx.first) * UInt32(T) + UInt32(g * L))
        for block in range((F + 3) // 4):
            var words = philox[L](
                SIMD[U32, L](UInt32(block)),
                sample,
                SIMD[U32, L](UInt32(ctx.step)),
                SIMD[U32, L](UInt32(layer)),
                ctx.seed,
            )
            for j in range(min(4, F - 4 * block)):
                var i = (g * F + 4 * block + j) * L
                var kept = unit[L](words[j]).ge(p)
                store[L](
                    y, i, kept.select(load[L](x, i) * keep, SIMD[F32, L](0))
                )


def ops() -> List[Op]:
    """The op of this file."""
    comptime kernel = by_layout[call[dropout[LANES]], call[dropout[1]]]
    return [Op("dropout", "y; x; G, F, p, layer, T", kernel)]
