"""Random numbers without a state: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1,
2, 3", SC 2011). A number is a function of a key (the seed) and a counter (what it is for), so no generator knows
a rank.
"""

from std.math import iota

from .lanes import F32, LANES, Ptr, load, store
from .op import Op
from .record import Record

comptime U32 = DType.uint32
comptime U64 = DType.uint64


@always_inline
def philox[
    w: Int
](c0: SIMD[U32, w], c1: SIMD[U32, w], c2: SIMD[U32, w], c3: SIMD[U32, w], seed: UInt64) -> Array[SIMD[U32, w], 4]:
    """Four random words for each of w counters (c0, c1, c2, c3) under the key `seed`."""
    # Words stay in 64 bits, of which the upper half means nothing but in a product: half of the instructions
    comptime LOW = SIMD[U64, w](0xFFFFFFFF)
    var a = c0.cast[U64]()
    var b = c1.cast[U64]()
    var c = c2.cast[U64]()
    var d = c3.cast[U64]()
    var k0 = UInt32(seed & 0xFFFFFFFF)
    var k1 = UInt32(seed >> 32)
    comptime for _ in range(10):
        var m0 = (a & LOW) * 0xD2511F53
        var m1 = (c & LOW) * 0xCD9E8D57
        a = (m1 >> 32) ^ b ^ SIMD[U64, w](UInt64(k0))
        c = (m0 >> 32) ^ d ^ SIMD[U64, w](UInt64(k1))
        b = m1
        d = m0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return [a.cast[U32](), b.cast[U32](), c.cast[U32](), d.cast[U32]()]


@always_inline
def unit[w: Int](bits: SIMD[U32, w]) -> SIMD[F32, w]:
    """A float in [0, 1) from the upper 24 bits."""
    comptime STEP = Float32(2.0**-24)
    return (bits >> 8).cast[F32]() * STEP


def uniform[
    add: Bool = False
](y: Ptr, n: Int, seed: UInt64, stream: UInt32, low: Float32, high: Float32, start: Int = 0):
    """Fills y with n numbers from [low, high), from element `start` of the stream on, or adds them to y: element i is
    word i % 4 of counter (i / 4, 0, stream, "init").

    start + n must be below 2^34.
    """
    var span = high - low
    var end = start + n
    var block = start // 4
    while 4 * block < end:
        var at = 4 * block - start
        if at >= 0 and at + 4 * LANES <= n:
            var r = philox[LANES](UInt32(block) + iota[U32, LANES](), 0, stream, 0x74696E69, seed)
            var x = unit[4 * LANES](r[0].interleave(r[2]).interleave(r[1].interleave(r[3]))) * span + low
            comptime if add:
                x += load[4 * LANES](y, at)
            store[4 * LANES](y, at, x)
            block += LANES
            continue
        var r = philox[1](UInt32(block), 0, stream, 0x74696E69, seed)
        for j in range(max(0, -at), min(4, n - at)):
            var x = unit[1](r[j]) * span + low
            y[unsafe_offset=at + j] = y[unsafe_offset=at + j] + x if add else x
        block += 1


def _uniform(r: Record):
    uniform(r.ptr(1), r.int(2), UInt64(r.int(3)), UInt32(r.int(4)), r.float(5), r.float(6))


def _normal(r: Record):
    """Element i is the sum of the elements i, n + i, .., 11 n + i of the stream, from [-0.5, 0.5), in this order."""
    var n = r.int(2)
    uniform(r.ptr(1), n, UInt64(r.int(3)), UInt32(r.int(4)), -0.5, 0.5)
    for k in range(1, 12):
        uniform[add=True](r.ptr(1), n, UInt64(r.int(3)), UInt32(r.int(4)), -0.5, 0.5, k * n)


def ops() -> List[Op]:
    """The ops of this file."""
    return [Op("uniform", "y; ; n, seed, stream, low, high", _uniform), Op("normal", "y; ; n, seed, stream", _normal)]
