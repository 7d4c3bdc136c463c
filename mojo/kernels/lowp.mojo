"""Low precision: how operands are rounded to bf16 or fp16 on their way into a product, and what follows from it.

Tensors stay float32 in memory. A product of a convolution or linear layer rounds both operands, multiplies, and adds in
float32. Where the target multiplies pairs of bf16 (AVX512-BF16, `HAS_BF16`) the operands are packed in pairs, in
linear_bf16.mojo and conv2d_bf16.mojo. Everywhere else, and always for fp16, `rounded` makes float32 copies whose values
are those of the narrow type, and the float32 kernels multiply them: products of two bf16 or two fp16 numbers are exact
in float32, so only the order of the additions differs.

A pair is two numbers that meet two others in one lane: dot2 adds a0 b0 + a1 b1 to the lane's sum.
"""

from std.memory import bitcast
from std.sys import CompilationTarget, llvm_intrinsic, masked_load
from std.math import iota

from .lanes import F32, LANES, Ptr, Vec, in_tiles_and_ones, load, load_first, store

comptime BF16 = DType.bfloat16
comptime F16 = DType.float16
comptime Pair = SIMD[BF16, 2 * LANES]  # element 2 l + j: number j of lane l
comptime HALF = LANES // 2  # pairs of samples in a group
comptime HalfPtr = Pointer[BFloat16, MutUntrackedOrigin]

comptime HAS_BF16 = CompilationTarget.is_x86() and CompilationTarget._has_feature["avx512bf16"]()
comptime HAS_AMX = HAS_BF16 and CompilationTarget._has_feature["amx-bf16"]()


# --- pairs -----------------------------------------------------------------------------


@always_inline
def dot2(acc: Vec, a: Pair, b: Pair) -> Vec:
    """Adds a0 b0 + a1 b1 to each lane of acc. Only for targets with HAS_BF16."""
    return llvm_intrinsic["llvm.x86.avx512bf16.dpbf16ps.512", Vec, has_side_effect=False](acc, a, b)


@always_inline
def pair(a: Vec, b: Vec) -> Pair:
    """Rounds both to the nearest bf16, ties to even; a is number 0 of each lane."""
    return a.cast[BF16]().interleave(b.cast[BF16]())


@always_inline
def load_pair(p: HalfPtr, i: Int) -> Pair:
    """Loads pair i: one vector, 16 lanes of two."""
    return p.unsafe_offset(i * 2 * LANES).unsafe_load[width=2 * LANES]()


@always_inline
def store_pair(p: HalfPtr, i: Int, v: Pair):
    """Stores pair i."""
    p.unsafe_store(i * 2 * LANES, v)


@always_inline
def splat_pair(p: HalfPtr, i: Int) -> Pair:
    """The two numbers at 2 i and 2 i + 1, in every lane."""
    var two = p.unsafe_bitcast[UInt32]()[unsafe_offset=i]
    return bitcast[BF16, 2 * LANES](SIMD[DType.uint32, LANES](two))


@always_inline
def halves(v: SIMD[F32, 2 * LANES]) -> Pair:
    """Rounds 32 neighbours to bf16."""
    return v.cast[BF16]()


@always_inline
def words(v: Pair) -> SIMD[DType.uint32, LANES]:
    """Each pair as one number."""
    return bitcast[DType.uint32, LANES](v)


def pack_neighbours(
    y: HalfPtr,  # (planes, ceil(F / 2), n, L, 2)
    x: Ptr,  # (planes, F, n, L)
    planes: Int,
    F: Int,
    n: Int,
):
    """Makes pairs of neighbouring features 2 f and 2 f + 1, for n vectors each; a last odd one meets zeros."""
    var pairs = (F + 1) // 2
    for plane in range(planes):
        for f in range(pairs):
            var a = x.unsafe_offset((plane * F + 2 * f) * n * LANES)
            var out = y.unsafe_offset((plane * pairs + f) * n * 2 * LANES)
            if 2 * f + 1 < F:
                var b = a.unsafe_offset(n * LANES)
                for i in range(n):
                    store_pair(out, i, pair(load(a, i * LANES), load(b, i * LANES)))
            else:
                for i in range(n):
                    store_pair(out, i, pair(load(a, i * LANES), Vec(0)))


@always_inline
def pack_samples(y: HalfPtr, x: Ptr, apart: Int, row: Int, n: Int):
    """One group, n <= 16 features of x, `apart` floats from one to the next: pairs of samples leave the lanes, to
    y (HALF, row, 2). Sixteen features of a pair are a vector; those from n on are zeros.

    A transposition of 16 x 8 numbers of 32 bits, held in 8 vectors: four rounds of a perfect shuffle.
    """
    var a = Array[SIMD[DType.uint32, LANES], HALF](fill=0)
    comptime for i in range(HALF):
        var first = load(x, 2 * i * apart) if 2 * i < n else Vec(0)
        var second = load(x, (2 * i + 1) * apart) if 2 * i + 1 < n else Vec(0)
        a[i] = words(halves(first.join(second)))
    comptime for _ in range(4):
        var b = a.copy()
        comptime for i in range(HALF // 2):
            var z = b[i].interleave(b[i + HALF // 2])
            a[2 * i] = z.slice[LANES, offset=0]()
            a[2 * i + 1] = z.slice[LANES, offset=LANES]()
    comptime for i in range(HALF):
        y.unsafe_bitcast[UInt32]().unsafe_store(i * row, a[i])


def pack_row(y: HalfPtr, x: Ptr, n: Int):
    """Rounds n floats to bf16; an odd n is followed by one zero."""
    var i = 0
    while i + 2 * LANES <= n:
        var v = x.unsafe_offset(i).unsafe_load[width=2 * LANES]()
        y.unsafe_store(i, halves(v))
        i += 2 * LANES
    if i + LANES <= n:
        y.unsafe_store(i, load(x, i).cast[BF16]())
        i += LANES
    while i < n:
        y[unsafe_offset=i] = x[unsafe_offset=i].cast[BF16]()
        i += 1
    if n % 2:
        y[unsafe_offset=n] = 0


# --- without the instruction -------------------------------------------------------------


def rounded[dtype: DType](y: Ptr, x: Ptr, n: Int):
    """Computes y = x rounded to `dtype`, to nearest, ties to even; what is too large for it becomes infinite."""

    @always_inline
    def some[w: Int](i: Int) {imm}:
        store[w](y, i, load[w](x, i).cast[dtype]().cast[F32]())

    in_tiles_and_ones[LANES](n, some)


def bias_gradient[L: Int](db: Ptr, dy: Ptr, G: Int, O: Int, n: Int):
    """Adds to db (O) the sums of dy (G, O, n, L), which is not rounded: no product is taken."""

    @always_inline
    def outputs[ob: Int](o: Int) {imm}:
        var s = Array[SIMD[F32, L], ob](fill=SIMD[F32, L](0))
        for g in range(G):
            var d = dy.unsafe_offset((g * O + o) * n * L)
            for i in range(n):
                comptime for j in range(ob):
                    s[j] += load[L](d, (j * n + i) * L)
        comptime for j in range(ob):
            db[unsafe_offset=o + j] += s[j].reduce_add()

    # several at once: an addition waits for the one before
    in_tiles_and_ones[4](O, outputs)
