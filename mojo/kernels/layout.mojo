"""Into lanes and out of them: samples in rows, as Python holds them, against samples in lanes (lanes.mojo).

Also padding, which is a copy here so that convolution never meets a border.
"""

from std.math import ceildiv

from .lanes import F32, LANES, IntPtr, LongPtr, Ptr, Vec, first, in_tiles_and_ones, load, load_first, store, store_first
from .op import Op, by_layout, call
from .record import Context, Record


@always_inline
def transpose[dtype: DType](mut a: Array[SIMD[dtype, LANES], LANES]):
    """Transposes 16 x 16: four rounds of a perfect shuffle (one permutation per vector and round)."""
    comptime for _ in range(4):
        var b = a.copy()
        comptime for i in range(LANES // 2):
            var z = b[i].interleave(b[i + LANES // 2])
            a[2 * i] = z.slice[LANES, offset=0]()
            a[2 * i + 1] = z.slice[LANES, offset=LANES]()


def input[of: def[dtype: DType](Ptr, Int, Int, Int, Context) thin](y: Ptr, G: Int, F: Int, C: Int, r: Record):
    """Lane n of y (G, F, L) becomes row rows[n] of the data set, times scale plus shift, per channel (F / C features
    each); lanes without a sample become 0.
    """
    if r.context[].bytes:
        of[DType.uint8](y, G, F, C, r.context[])
    else:
        of[F32](y, G, F, C, r.context[])


def _input_in_lanes[dtype: DType](y: Ptr, G: Int, F: Int, C: Int, ctx: Context):
    var x = ctx.images.unsafe_bitcast[Scalar[dtype]]()
    var plane = F // C
    for g in range(G):
        var valid = min(max(Int(ctx.valid) - g * LANES, 0), LANES)
        var live = first(valid)
        for f in range(0, F, LANES):
            var n = min(LANES, F - f)
            var a = Array[SIMD[dtype, LANES], LANES](fill=0)
            comptime for l in range(LANES):
                if l < valid:
                    var row = x.unsafe_offset(Int(ctx.rows[unsafe_offset=g * LANES + l]) * F + f)
                    if n == LANES:
                        a[l] = row.unsafe_load[width=LANES]()
                    else:
                        for i in range(n):
                            a[l][i] = row[unsafe_offset=i]
            transpose(a)
            for i in range(n):
                var c = (f + i) // plane
                var v = a[i].cast[F32]() * ctx.scale[unsafe_offset=c]
                v += ctx.shift[unsafe_offset=c]
                store(y, (g * F + f + i) * LANES, live.select(v, Vec(0)))


def _input_in_rows[dtype: DType](y: Ptr, G: Int, F: Int, C: Int, ctx: Context):
    var x = ctx.images.unsafe_bitcast[Scalar[dtype]]()
    var N = Int(ctx.valid)
    var plane = F // C
    for n in range(G):
        for c in range(C):
            var a = ctx.scale[unsafe_offset=c] if n < N else 0
            var b = ctx.shift[unsafe_offset=c] if n < N else 0
            var at = c * plane
            var from_ = Int(ctx.rows[unsafe_offset=n]) * F + at if n < N else 0

            @always_inline
            def some[w: Int](i: Int) {imm}:
                var v = x.unsafe_offset(from_ + i).unsafe_load[width=w]().cast[F32]()
                store[w](y, n * F + at + i, v * a + b)

            in_tiles_and_ones[LANES](plane, some)


def array[L: Int](y: IntPtr, G: Int, F: Int, T: Int, k: Int, rest: Int, r: Record):  # (G, F, L), numbers of 32 bits
    """Lane n T + t of y becomes place t of row rows[n] of array k, (samples, T, F), bit by bit; lanes without a sample
    become `rest` (labels: -1, which every loss ignores). T is 1 unless lanes are tokens.
    """
    ref ctx = r.context[]
    var x = IntPtr(unsafe_from_address=Int(ctx.arrays[unsafe_offset=k]))
    for n in range(G * L):
        var to = y.unsafe_offset(n // L * F * L + n % L)
        var there = n < Int(ctx.valid) * T
        var at = 0
        if there:
            at = (Int(ctx.rows[unsafe_offset=n // T]) * T + n % T) * F
        for f in range(F):
            to[unsafe_offset=f * L] = x[unsafe_offset=at + f] if there else Int32(rest)


def keep[L: Int](x: IntPtr, G: Int, F: Int, T: Int, k: Int, r: Record):  # (G, F, L), numbers of 32 bits
    """Row `first` + n of kept array k, (samples, T, F), becomes what x has of sample n, bit by bit: lanes n T .. n T + T
    - 1. T is 1 unless lanes are tokens. Does nothing in a run that keeps nothing.
    """
    ref ctx = r.context[]
    if not Int(ctx.outputs):
        return
    var y = IntPtr(unsafe_from_address=Int(ctx.outputs[unsafe_offset=k])).unsafe_offset(Int(ctx.first) * T * F)
    for n in range(min(G * L, Int(ctx.valid) * T)):
        var lane = x.unsafe_offset(n // L * F * L + n % L)
        for f in range(F):
            y[unsafe_offset=n * F + f] = lane[unsafe_offset=f * L]


def pack_rows(y: Ptr, x: Ptr, N: Int, F: Int):
    """Writes rows x (N, F) into lanes y (G, F, L); lanes from N on become 0."""
    for g in range(ceildiv(N, LANES)):
        var valid = min(N - g * LANES, LANES)
        for f in range(0, F, LANES):
            var n = min(LANES, F - f)
            var a = Array[Vec, LANES](fill=0)
            comptime for l in range(LANES):
                if l < valid:
                    var at = (g * LANES + l) * F + f
                    a[l] = load(x, at) if n == LANES else load_first(x, at, n)
            transpose(a)
            for i in range(n):
                store(y, (g * F + f + i) * LANES, a[i])


def unpack_rows(y: Ptr, x: Ptr, N: Int, F: Int):
    """Writes the first N lanes of x (G, F, L) into rows y (N, F)."""
    for g in range(ceildiv(N, LANES)):
        var valid = min(N - g * LANES, LANES)
        for f in range(0, F, LANES):
            var n = min(LANES, F - f)
            var a = Array[Vec, LANES](fill=0)
            comptime for i in range(LANES):
                if i < n:
                    a[i] = load(x, (g * F + f + i) * LANES)
            transpose(a)
            comptime for l in range(LANES):
                if l < valid:
                    var at = (g * LANES + l) * F + f
                    if n == LANES:
                        store(y, at, a[l])
                    else:
                        store_first(y, at, a[l], n)


def take_features(y: Ptr, x: Ptr, G: Int, F: Int, start: Int, n: Int):
    """Copies features start .. start + n - 1 of every sample of x (G, F, L) to y (G, n, L)."""
    for g in range(G):
        for i in range(n):
            store(y, (g * n + i) * LANES, load(x, (g * F + start + i) * LANES))


def pad_forward[
    L: Int
](
    y: Ptr,  # (G, C, H + 2 ph, W + 2 pw, L)
    x: Ptr,  # (G, C, H, W, L)
    planes: Int,  # G * C
    H: Int,
    W: Int,
    ph: Int,
    pw: Int,
):
    """Copies x into a frame of zeros."""
    var wide = W + 2 * pw
    var at = 0

    @always_inline
    def zeros(n: Int) {mut at, imm y}:
        for _ in range(n):
            store[L](y, at, SIMD[F32, L](0))
            at += L

    for plane in range(planes):
        zeros(ph * wide)
        for h in range(H):
            zeros(pw)
            for i in range(W):
                store[L](y, at, load[L](x, ((plane * H + h) * W + i) * L))
                at += L
            zeros(pw)
        zeros(ph * wide)


def pad_backward[L: Int](dx: Ptr, dy: Ptr, planes: Int, H: Int, W: Int, ph: Int, pw: Int):
    """Copies the inside of the frame dy (G, C, H + 2 ph, W + 2 pw, L) to dx (G, C, H, W, L)."""
    var wide = W + 2 * pw
    for plane in range(planes):
        for h in range(H):
            for i in range(W):
                var from_ = ((plane * (H + 2 * ph) + h + ph) * wide + i + pw) * L
                store[L](dx, ((plane * H + h) * W + i) * L, load[L](dy, from_))


def ops() -> List[Op]:
    """The ops of this file."""
    return [
        Op("input", "y; ; G, F, C", by_layout[call[input[_input_in_lanes]], call[input[_input_in_rows]]]),
        Op("array", "y; ; G, F, T, k, rest", by_layout[call[array[LANES]], call[array[1]]]),
        Op("keep", "; x; G, F, T, k", by_layout[call[keep[LANES]], call[keep[1]]]),
        Op("pack_rows", "y; x; N, F", call[pack_rows]),
        Op("unpack_rows", "y; x; N, F", call[unpack_rows]),
        Op("take_features", "y; x; G, F, first, n", call[take_features], "lanes"),
        Op(
            "pad_forward",
            "y; x; planes, H, W, ph, pw",
            by_layout[call[pad_forward[LANES]], call[pad_forward[1]]],
            "again",
        ),
        Op("pad_backward", "dx; dy; planes, H, W, ph, pw", by_layout[call[pad_backward[LANES]], call[pad_backward[1]]]),
    ]
