"""Intel's AMX: products of whole tiles of bf16 (`HAS_AMX`), and how operands are packed for them.

A tile register is 16 rows of 64 bytes. One instruction adds to C (16 x 16 float32) the product of A (16 x 32 bf16) and
B (32 x 16, as 16 rows of 16 pairs of neighbours): 8,192 multiplications in 16 cycles. In lanes C is 16 outputs of one
group, as they lie in memory, and B is 32 inputs of it as pairs (lowp.mojo). The sum of 32 products is made first and
then added to C, so where the summed axis is cut decides bits: always at multiples of 32 channels, for each tap by
itself. A last tile is filled with zeros, which change nothing.

Each tile is packed into 1 KiB of its own: in a tensor its rows are far apart and fall into a few places of a cache. A
linear layer is a convolution of one pixel and one tap. Four C are summed side by side, 2 x 2, or 4 x 1 for a last
group, so that each A or B that is loaded is used twice.
"""

from std.ffi import external_call
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import llvm_intrinsic, prefetch

from .lanes import LANES, Ptr, Vec, load, load_first
from .layout import transpose
from .lowp import HAS_AMX, HalfPtr, halves, pair, store_pair, words

comptime TILE = 512  # bf16 numbers of a tile
comptime SUMS = LANES * LANES  # float32 of a C
comptime KB = 1024
comptime ROOM = 1792  # KiB, and tiles, that are packed at once: a second-level cache of 2 MiB
comptime AHEAD = 4 * LANES  # numbers of a row of weights, from where it is packed to where it is fetched
comptime BLOCK = 8  # pixels that are packed, and written, together


# --- instructions --------------------------------------------------------------------------------


def permitted() -> Bool:
    """Asks Linux for the tile registers of all threads of this process, where there are any; whether it gives them."""
    comptime if HAS_AMX:
        comptime ARCH_PRCTL = 158
        comptime REQUEST = 0x1023  # ARCH_REQ_XCOMP_PERM
        comptime TILES = 18  # XFEATURE_XTILEDATA
        return external_call["syscall", Int, num_fixed_args=1](ARCH_PRCTL, REQUEST, TILES) == 0
    return True


def begin():
    """Makes this thread's eight tile registers 16 rows of 64 bytes each. The process has asked for them (capi.mojo)."""
    var shape = unsafe_stack_allocation[64, DType.uint8, alignment=64]()
    for i in range(64):
        shape[unsafe_offset=i] = 0
    shape[unsafe_offset=0] = 1  # palette
    for t in range(8):
        shape[unsafe_offset=16 + 2 * t] = 64
        shape[unsafe_offset=48 + t] = LANES
    llvm_intrinsic["llvm.x86.ldtilecfg", NoneType](shape)


def end():
    """Gives them back: until then the system saves them whenever it changes threads."""
    llvm_intrinsic["llvm.x86.tilerelease", NoneType]()


@always_inline
def zero_tile[t: Int]():
    llvm_intrinsic["llvm.x86.tilezero", NoneType](Int8(t))


@always_inline
def load_tile[t: Int](p: Pointer[mut=True, ...], row: Int = 64):
    llvm_intrinsic["llvm.x86.tileloadd64", NoneType](Int8(t), p, Int64(row))


@always_inline
def store_tile[t: Int](p: Ptr, row: Int = 64):
    llvm_intrinsic["llvm.x86.tilestored64", NoneType](Int8(t), p, Int64(row))


@always_inline
def multiply[c: Int, a: Int, b: Int]():
    llvm_intrinsic["llvm.x86.tdpbf16ps", NoneType](Int8(c), Int8(a), Int8(b))


# --- packing ---------------------------------------------------------------------------------------


@always_inline
def tiles_of(n: Int) -> Int:
    """Of an axis that is summed."""
    return ceildiv(n, 2 * LANES)


@always_inline
def vectors_of(n: Int) -> Int:
    """Of an axis that is not."""
    return ceildiv(n, LANES)


@always_inline
def _samples(x: Ptr, at: Int, step: Int, n: Int) -> Vec:
    """A number of n samples in rows, which are `step` apart; zeros in the other lanes."""
    var v = Vec(0)
    for l in range(n):
        v[l] = x[unsafe_offset=at + l * step]
    return v


def pack_pixels[
    rows: Bool
](
    y: HalfPtr,  # (n, tiles of F, 16, L, 2)
    x: Ptr,  # (F, plane, L) of a group, or (samples, F, plane) in rows
    F: Int,
    plane: Int,
    n: Int,
    samples: Int,  # in rows, at most 16
):
    """Tiles of the first n pixels: pairs of neighbouring features."""
    var pairs = tiles_of(F) * LANES

    @always_inline
    def vector(f: Int, i: Int) {imm} -> Vec:
        if f >= F:
            return Vec(0)
        comptime if rows:
            return _samples(x, f * plane + i, F * plane, samples)
        else:
            return load(x, (f * plane + i) * LANES)

    comptime if not rows:
        if n == 1:  # a linear layer
            for p in range(F // 2):
                var at = 2 * p * plane * LANES
                store_pair(y, p, pair(load(x, at), load(x, at + plane * LANES)))
            for p in range(F // 2, pairs):
                store_pair(y, p, pair(vector(2 * p, 0), Vec(0)))
            return
    for i0 in range(0, n, BLOCK):
        for p in range(pairs):
            for i in range(i0, min(n, i0 + BLOCK)):
                var two = pair(vector(2 * p, i), vector(2 * p + 1, i))
                store_pair(y, i * pairs + p, two)


def pack_weights(
    y: HalfPtr,  # (vectors of A, taps, tiles of B, 16, 32)
    w: Ptr,  # weight (a, b, tap) at a a_step + b b_step + tap
    A: Int,
    B: Int,
    taps: Int,
    a_step: Int,
    b_step: Int,
):
    """Tiles of 16 along A by 32 along B, for each tap; first along the axis whose steps are short.

    The weights of the next tiles are fetched on the way: rows of w are shorter than what the hardware needs to see a
    pattern.
    """
    var vectors = vectors_of(A)
    var tiles = tiles_of(B)
    var to = y.unsafe_bitcast[UInt32]()  # pairs of neighbours along B

    @always_inline
    def two(at: Int, n: Int, b: Int) {imm} -> SIMD[DType.uint32, LANES]:
        """The first n numbers at `at`, of row b, and of the row after it."""
        var first = load_first(w, at, n) if b < B else Vec(0)
        return words(pair(first, load_first(w, at + b_step, n) if b + 1 < B else Vec(0)))

    for i in range(vectors * tiles):
        var a0 = (i // tiles if a_step > b_step else i % vectors) * LANES
        var b0 = (i % tiles if a_step > b_step else i // vectors) * 2 * LANES
        var tile = to.unsafe_offset((a0 // LANES * taps * tiles + b0 // (2 * LANES)) * (TILE // 2))
        if taps == 1 and b_step == 1:
            comptime for a in range(LANES):
                var v = SIMD[DType.uint32, LANES](0)
                if a0 + a < A:
                    var at = (a0 + a) * a_step + b0
                    fetch(w, at + AHEAD, 2)
                    v = words(halves(load_first(w, at, B - b0).join(load_first(w, at + LANES, B - b0 - LANES))))
                tile.unsafe_store(a * LANES, v)
            continue
        if taps == 1 and a_step == 1:
            var v = Array[SIMD[DType.uint32, LANES], LANES](fill=0)
            comptime for j in range(LANES):
                var b = b0 + 2 * j
                fetch(w, b * b_step + a0 + AHEAD, 1)
                fetch(w, (b + 1) * b_step + a0 + AHEAD, 1)
                v[j] = two(b * b_step + a0, A - a0, b)
            transpose(v)
            comptime for j in range(LANES):
                tile.unsafe_store(j * LANES, v[j])
            continue
        for a in range(LANES):
            var at = (a0 + a) * a_step + b0 * b_step
            if a_step > b_step:
                fetch(w, at + 2 * LANES * b_step, 2 * taps)
            else:
                var next = (a0 + LANES) * a_step + (b0 + 2 * a) * b_step
                fetch(w, next, taps)
                fetch(w, next + b_step, taps)
            for tap in range(0, taps, LANES):
                var v = Array[SIMD[DType.uint32, LANES], LANES](fill=0)
                comptime for j in range(LANES):
                    if a0 + a < A:
                        v[j] = two(at + 2 * j * b_step + tap, taps - tap, b0 + 2 * j)
                transpose(v)
                comptime for j in range(LANES):
                    if tap + j < taps:
                        tile.unsafe_store((tap + j) * tiles * (TILE // 2) + a * LANES, v[j])


@always_inline
def fetch(w: Ptr, at: Int, lines: Int):
    """Brings so many lines of memory closer."""
    for i in range(lines):
        prefetch(w.unsafe_offset(at + i * LANES))


# --- how much is packed at once ------------------------------------------------------------------


trait Cut:
    def packed(self, rows: Int) -> Int:
        """Tiles that so many rows are computed from."""
        ...


@always_inline
def cut_to_fit[T: Cut & Copyable](of: T, units: Int, rows: Int, least: Int) -> Tuple[Int, Int]:
    """How many units (groups, or pairs of groups), at least `least` if there are, and rows of them fit ROOM."""
    var whole = of.packed(rows)
    if least * whole <= ROOM:
        var parts = ceildiv(units, ROOM // whole // least * least)
        var n = ceildiv(ceildiv(units, parts), least) * least
        return min(units, n), rows
    var n = rows
    while n > 1 and least * of.packed(n) > ROOM:
        n -= 1
    return min(units, least), n
