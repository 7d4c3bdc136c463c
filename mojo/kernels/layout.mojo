"""Into lanes and out of them: samples in rows, as Python holds them, against samples in lanes (lanes.mojo).

Also padding, which is a copy here so that convolution never meets a border.
"""

from std.math import ceildiv, iota
from std.sys import masked_load, masked_store

from .lanes import F32, LANES, BytePtr, IntPtr, LongPtr, Ptr, Vec, in_tiles_and_ones, load, store
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


def input[L: Int](y: Ptr, G: Int, F: Int, C: Int, r: Record):
    """Lane n of y (G, F, L) becomes row rows[n] of the data set, times scale plus shift, per channel (F / C features
    each); lanes without a sample become 0.
    """
    comptime if L == 1:
        if r.context[].bytes:
            _input_in_rows[DType.uint8](y, G, F, C, r.context[])
        else:
            _input_in_rows[F32](y, G, F, C, r.context[])
    else:
        if r.context[].bytes:
            _input_in_lanes[DType.uint8](y, G, F, C, r.context[])
        else:
            _input_in_lanes[F32](y, G, F, C, r.context[])


def _input_in_lanes[dtype: DType](y: Ptr, G: Int, F: Int, C: Int, ctx: Context):
    var x = ctx.images.unsafe_bitcast[Scalar[dtype]]()
    var plane = F // C
    for g in range(G):
        var valid = min(max(Int(ctx.valid) - g * LANES, 0), LANES)
        var live = iota[F32, LANES]().lt(Float32(valid))
        var f = 0
        while f < F:
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
            f += LANES


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


def pack_rows(y: Ptr, x: Ptr, N: Int, F: Int):
    """Writes rows x (N, F) into lanes y (G, F, L); lanes from N on become 0."""
    for g in range(ceildiv(N, LANES)):
        var valid = min(N - g * LANES, LANES)
        var f = 0
        while f < F:
            var n = min(LANES, F - f)
            var a = Array[Vec, LANES](fill=0)
            comptime for l in range(LANES):
                if l < valid:
                    a[l] = _load_part(x, (g * LANES + l) * F + f, n)
            transpose(a)
            for i in range(n):
                store(y, (g * F + f + i) * LANES, a[i])
            f += LANES


def unpack_rows(y: Ptr, x: Ptr, N: Int, F: Int):
    """Writes the first N lanes of x (G, F, L) into rows y (N, F)."""
    for g in range(ceildiv(N, LANES)):
        var valid = min(N - g * LANES, LANES)
        var f = 0
        while f < F:
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
                        masked_store[LANES](a[l], y.unsafe_offset(at), iota[F32, LANES]().lt(Float32(n)))
            f += LANES


@always_inline
def _load_part(x: Ptr, at: Int, n: Int) -> Vec:
    if n == LANES:
        return load(x, at)
    return masked_load[LANES](x.unsafe_offset(at), iota[F32, LANES]().lt(Float32(n)), Vec(0))


def take_features(
    y: Ptr,  # (G, n, L)
    x: Ptr,  # (G, F, L)
    G: Int,
    F: Int,
    first: Int,
    n: Int,
):
    """Copies features first .. first + n - 1 of every sample."""
    for g in range(G):
        for i in range(n):
            store(y, (g * n + i) * LANES, load(x, (g * F + first + i) * LANES))


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
    for plane in range(planes):
        for _ in range(ph * wide):
            store[L](y, at, SIMD[F32, L](0))
            at += L
        for h in range(H):
            for _ in range(pw):
                store[L](y, at, SIMD[F32, L](0))
                at += L
            for i in range(W):
                store[L](y, at, load[L](x, ((plane * H + h) * W + i) * L))
                at += L
            for _ in range(pw):
                store[L](y, at, SIMD[F32, L](0))
                at += L
        for _ in range(ph * wide):
            store[L](y, at, SIMD[F32, L](0))
            at += L


def pad_backward[L: Int](dx: Ptr, dy: Ptr, planes: Int, H: Int, W: Int, ph: Int, pw: Int):
    """Copies the inside of the frame dy (G, C, H + 2 ph, W + 2 pw, L) to dx (G, C, H, W, L)."""
    var wide = W + 2 * pw
    for plane in range(planes):
        for h in range(H):
            for i in range(W):
                store[L](
                    dx,
                    ((plane * H + h) * W + i) * L,
                    load[L](dy, ((plane * (H + 2 * ph) + h + ph) * wide + i + pw) * L),
                )


def ops() -> List[Op]:
    """The ops of this file."""
    return [
        Op("input", "y; ; G, F, C", by_layout[call[input[LANES]], call[input[1]]]),
        Op("array", "y; ; G, F, T, k, rest", by_layout[call[array[LANES]], call[array[1]]]),
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
