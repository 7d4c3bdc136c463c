"""The tiles of gemm.mojo: their sizes, the way of their operands into shared memory, and their multiplication.

gemm.mojo explains them; nothing here is a kernel, and nothing writes to global memory.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import is_defined
from std.sys.info import _accelerator_arch

from max.gpu import AddressSpace, barrier
from max.gpu.compute.mma import mma
from max.gpu.sync import syncwarp

from ..lanes import F32, LANES, Ptr
from .conv2d_tiles import rounded_tf32
from .launch import BF16, FP16, FP32, TF32

comptime FORWARD = 0
comptime INPUT = 1
comptime WEIGHT = 2

comptime SMALL = 0
comptime MEDIUM = 1
comptime LARGE = 2

comptime RELU = 1  # FORWARD: max(y, 0)
comptime ALIGNED = 2  # the rows of w begin at multiples of four floats
comptime ACCUMULATE = 4  # WEIGHT: add to what is there

comptime CHUNK = 16  # terms of the sum; a group of samples of WEIGHT
comptime TEAMS = 8  # at most, in a block: runs of a sum, or shards of a buffer
comptime THREADS = 32  # of a warp, as this file counts them; AMD's hold two
comptime ARCH = String(_accelerator_arch())
comptime NVIDIA_ARCH = ARCH.find("sm_") >= 0
# -D PORTABLE: what other GPUs get, also on NVIDIA, so that it can be tested
comptime NVIDIA = NVIDIA_ARCH and not is_defined["PORTABLE"]()
# Shared memory that a block may have, in bytes.
comptime SHARED_LIMIT = (
    227 * 1024 if ARCH.find("sm_9") >= 0 or ARCH.find("sm_10") >= 0 else 99 * 1024
) if NVIDIA_ARCH else (64 * 1024 if ARCH.find("gfx") >= 0 else 32 * 1024)

comptime U = UInt32  # indices: 64-bit arithmetic is slow, and no tensor of a shard has 2^32 floats
comptime Quad = SIMD[F32, 4]
comptime Shared = Pointer[Float32, MutUntrackedOrigin, address_space=AddressSpace.SHARED]


def parts_of(terms: Int, rows: Int) -> Int:
    """In how many runs the sum over `terms` is cut for a result of `rows` rows.

    Layers with few rows are short of work for a whole GPU, so there a run may be as short as two chunks; with many, it
    is long enough for the additions of the runs not to show.
    """
    return max(1, min(TEAMS, ceildiv(terms, CHUNK) // (2 if rows < 1024 else 12)))


struct Tile[op: Int, precision: Int, size: Int]:
    """The sizes of a kernel, all known when it is compiled. Lengths in floats or words of 4 bytes."""

    comptime TENSOR = NVIDIA and Self.precision != FP32
    comptime PAIRS = Self.TENSOR and Self.precision != TF32  # two terms a word
    comptime BY_ROW = Self.size == SMALL and not Self.TENSOR  # a in shared memory: row by row
    comptime WARP_ROWS = 32 if Self.size != SMALL else (16 if Self.TENSOR else 8)
    comptime WARP_COLUMNS = 64 if Self.size != SMALL else 16
    comptime WARPS_DOWN = 4 if Self.size == LARGE else 1
    comptime WARPS_ACROSS = 2 if Self.size == LARGE else 1
    comptime ROWS = Self.WARP_ROWS * Self.WARPS_DOWN
    comptime COLUMNS = Self.WARP_COLUMNS * Self.WARPS_ACROSS
    comptime TEAM = THREADS * Self.WARPS_DOWN * Self.WARPS_ACROSS
    comptime QUADS = Self.WARP_ROWS * Self.WARP_COLUMNS // (4 * THREADS)  # sums of a thread, in fours
    comptime ACROSS = Self.WARP_COLUMNS // 8 if Self.TENSOR else (2 if Self.size != SMALL else 1)  # of these in a row
    comptime CHUNKS = 4 if Self.size == SMALL and NVIDIA else (
        2 if Self.size == LARGE and Self.TENSOR and (Self.PAIRS or Self.op != WEIGHT) else 1  # eight shards must fit
    )  # in shared memory at a time
    comptime WORDS = CHUNK // 2 if Self.PAIRS else CHUNK  # of a chunk
    comptime A_BY_TERM = Self.op != INPUT  # in memory, terms of the sum are neighbours
    comptime B_BY_TERM = Self.op == WEIGHT
    comptime A_ROW = Self.CHUNKS * CHUNK + 4 if Self.BY_ROW else Self.ROWS + 8
    comptime B_ROW = Self.COLUMNS + 8
    comptime A_CHUNK = CHUNK if Self.BY_ROW else Self.WORDS * (Self.A_ROW + 2)
    comptime B_CHUNK = Self.WORDS * (Self.B_ROW + 2)
    comptime A_WORDS = Self.ROWS * Self.A_ROW if Self.BY_ROW else (Self.CHUNKS * Self.A_CHUNK)
    comptime STAGE = Self.A_WORDS + Self.CHUNKS * Self.B_CHUNK
    comptime STAGES = 2 if Self.size == LARGE else 1
    comptime SAVED = 4 * Self.QUADS * Self.TEAM  # a tile of partial sums
    comptime REGION = Self.STAGES * Self.STAGE if Self.size == LARGE else max(Self.STAGE, Self.SAVED)
    comptime A_QUADS = max(
        1 if Self.A_BY_TERM else 2, Self.ROWS * Self.CHUNKS * CHUNK // (4 * Self.TEAM)
    )  # loads of a thread
    # half a team is enough for a chunk of a
    comptime SPARE = Self.ROWS * Self.CHUNKS * CHUNK < 8 * Self.TEAM
    comptime B_QUADS = Self.COLUMNS * Self.CHUNKS * CHUNK // (4 * Self.TEAM)

    @staticmethod
    def shared_bytes(teams: Int) -> Int:
        """Shared memory of a block; `teams` as in `product`."""
        comptime if Self.size == LARGE:
            comptime if Self.op == WEIGHT:
                var levels = 0
                while (1 << levels) < teams:
                    levels += 1
                return 4 * (Self.REGION + levels * Self.SAVED)
            return 4 * Self.REGION
        return 4 * Self.REGION * teams


# --- rounding ------------------------------------------------------------------


@always_inline
def rounded[precision: Int, n: SIMDLength](v: SIMD[F32, n]) -> SIMD[F32, n]:
    """The nearest numbers of the precision's format, ties to even, as float32."""
    comptime if precision == TF32:
        var r = v
        comptime for i in range(Int(n)):
            r[i] = rounded_tf32(v[i])
        return r
    elif precision == BF16:
        return v.cast[DType.bfloat16]().cast[F32]()
    elif precision == FP16:
        return v.cast[DType.float16]().cast[F32]()
    else:
        return v


@always_inline
def paired[precision: Int](low: Float32, high: Float32) -> Float32:
    """Two numbers rounded to 16 bits in one word."""
    comptime if precision == BF16:
        return bitcast[F32, 1](SIMD[F32, 2](low, high).cast[DType.bfloat16]())
    else:
        return bitcast[F32, 1](SIMD[F32, 2](low, high).cast[DType.float16]())


# --- from memory to registers to shared memory ------------------------------------


@always_inline
def four_of[checked: Bool](p: Ptr, at: U, n: U, aligned: Bool) -> Quad:
    """Four floats from `at` on, of which the first n are in bounds; the others are 0.

    Unless `checked`, or if `aligned`, all four are or none is.
    """
    var i = Int(at)
    comptime if checked:
        if not aligned:
            var v = Quad(0)
            comptime for j in range(4):
                if U(j) < n:
                    v[j] = p[unsafe_offset=i + j]
            return v
    if n > 0:
        return p.unsafe_offset(i).unsafe_load[width=4, alignment=16]()
    return Quad(0)


@always_inline
def position[row: Int](word: Int, m: Int) -> Int:
    """Where row (or column) m of the tile is in the given row of shared memory."""
    return word * row + word // 4 * 8 + m


@always_inline
def put_by_term[precision: Int, pairs: Bool, row: Int](s: Shared, m: Int, term: Int, v: Quad):
    """Four neighbouring terms of row m of the tile."""
    comptime if pairs:
        var at = position[row](term // 2, m)
        s[unsafe_offset=at] = paired[precision](v[0], v[1])
        s[unsafe_offset=at + row] = paired[precision](v[2], v[3])
    else:
        var r = rounded[precision](v)
        var at = position[row](term, m)
        comptime for j in range(4):
            s[unsafe_offset=at + j * row] = r[j]


@always_inline
def put_by_row[precision: Int, pairs: Bool, row: Int](s: Shared, m: Int, term: Int, v0: Quad, v1: Quad):
    """Terms `term` (even) and the next of rows m to m + 3 of the tile."""
    comptime if pairs:
        var word = Quad()
        comptime for j in range(4):
            word[j] = paired[precision](v0[j], v1[j])
        s.unsafe_store[alignment=16](position[row](term // 2, m), word)
    else:
        var at = position[row](term, m)
        s.unsafe_store[alignment=16](at, rounded[precision](v0))
        s.unsafe_store[alignment=16](at + row, rounded[precision](v1))


@always_inline
def meet[size: Int]():
    """What the threads of a team have written to shared memory is there for all of them.

    Only on NVIDIA does a barrier of a warp say that.
    """
    comptime if size == LARGE or not NVIDIA:
        barrier()
    else:
        syncwarp()


@always_inline
def group_at(group: U, G: U, F: U, step: Int) -> Int:
    """Where a group of samples begins, counted over all shards."""
    var shard = group // G
    return Int(shard) * step + Int((group - shard * G) * F * U(LANES))


@always_inline
def pair_of[op: Int, precision: Int, size: Int](unit: U) -> U:
    """Which two terms of b (by row) a thread loads in its unit-th turn.

    Eight neighbouring threads store at once, in rows that share no bank: SMALL has two of their terms, two rows apart;
    larger tiles have two groups.
    """
    comptime T = Tile[op, precision, size]
    comptime if size == SMALL:
        var pair = unit // 4
        comptime if T.PAIRS:
            return (pair & ~U(3)) | (pair & 1) << 1 | (pair >> 1 & 1)
        return pair
    else:
        return unit // 8 % U(T.CHUNKS * CHUNK // 2)


@always_inline
def a_pair_of[op: Int, precision: Int, size: Int](unit: U) -> U:
    """Likewise for a."""
    comptime T = Tile[op, precision, size]
    comptime if T.ROWS == LANES:
        return pair_of[op, precision, size](unit)
    else:
        return unit // U(T.ROWS // 4)


@always_inline
def group_of[op: Int, precision: Int, size: Int](unit: U) -> U:
    """And of which group of samples of the tile."""
    comptime if size == SMALL:
        return 0
    else:
        comptime T = Tile[op, precision, size]
        return unit // 4 % 2 + unit // U(4 * T.CHUNKS * CHUNK) * 2


# --- multiplying what is in shared memory -------------------------------------------


@always_inline
def _quad_at(p: Shared, i: Int) -> Quad:
    return p.unsafe_offset(i).unsafe_load[width=4, alignment=16]()


@always_inline
def multiply[
    op: Int, precision: Int, size: Int, quads: Int
](mut acc: Array[Quad, quads], a: Shared, b: Shared, lane: Int, chunks: Int):
    """Adds the products of the chunks in shared memory to the sums; a and b begin at the warp's rows and columns."""
    comptime T = Tile[op, precision, size]
    comptime if T.TENSOR:
        var g = lane // 4
        var t = lane % 4
        var pa = a.unsafe_offset(t * T.A_ROW + g)
        var pb = b.unsafe_offset(t * T.B_ROW + g)
        comptime DOWN = T.WARP_ROWS // 16
        for chunk in range(chunks):
            var ca = pa.unsafe_offset(chunk * T.A_CHUNK)
            var cb = pb.unsafe_offset(chunk * T.B_CHUNK)
            comptime for step in range(T.WORDS // 8):
                var fa = Array[Quad, DOWN](fill=Quad(0))
                comptime for i in range(DOWN):
                    comptime for h in range(2):
                        comptime for r in range(2):
                            comptime at = position[T.A_ROW](step * 8 + 4 * h, i * 16 + r * 8)
                            fa[i][2 * h + r] = ca[unsafe_offset=at]
                comptime for j in range(T.ACROSS):
                    var fb = SIMD[F32, 2](0)
                    comptime for h in range(2):
                        comptime at = position[T.B_ROW](step * 8 + 4 * h, j * 8)
                        fb[h] = cb[unsafe_offset=at]
                    comptime for i in range(DOWN):
                        comptime q = i * T.ACROSS + j
                        comptime if precision == TF32:
                            mma(acc[q], fa[i], fb, acc[q])
                        elif precision == BF16:
                            mma(acc[q], bitcast[DType.bfloat16, 8](fa[i]), bitcast[DType.bfloat16, 4](fb), acc[q])
                        else:
                            mma(acc[q], bitcast[DType.float16, 8](fa[i]), bitcast[DType.float16, 4](fb), acc[q])
    else:
        var pa = a.unsafe_offset(row_of[op, precision, size](0, lane) * (T.A_ROW if T.BY_ROW else 1))
        var pb = b.unsafe_offset(column_of[op, precision, size](0, lane))
        for chunk in range(chunks):
            var ca = pa.unsafe_offset(chunk * T.A_CHUNK)
            var cb = pb.unsafe_offset(chunk * T.B_CHUNK)
            comptime if T.BY_ROW:  # a row, four columns
                comptime for k4 in range(0, CHUNK, 4):
                    var va = _quad_at(ca, k4)
                    comptime for j in range(4):
                        comptime at = position[T.B_ROW](k4 + j, 0)
                        acc[0] = _quad_at(cb, at).fma(Quad(va[j]), acc[0])
            else:  # two fours of rows, two fours of columns
                comptime for k in range(CHUNK):
                    comptime at_a = position[T.A_ROW](k, 0)
                    comptime at_b = position[T.B_ROW](k, 0)
                    var vb = Array[Quad, 2](fill=Quad(0))
                    comptime for j in range(2):
                        vb[j] = _quad_at(cb, at_b + 32 * j)
                    comptime for i in range(2):
                        var va = _quad_at(ca, at_a + 16 * i)
                        comptime for e in range(4):
                            comptime for j in range(2):
                                comptime q = (i * 4 + e) * 2 + j
                                acc[q] = vb[j].fma(Quad(va[e]), acc[q])


@always_inline
def row_of[op: Int, precision: Int, size: Int](q: Int, lane: Int) -> Int:
    """The row, in the warp's tile, of a thread's q-th four sums.

    They are neighbours in that row; of tensor cores two are, and the other two eight rows below.

    The lowest bit of a thread's number chooses the column, the next one the row: then each 16-byte read of a
    multiply-add has the same address in threads 1 or 2 apart, and the reads of sixteen threads can be served at once.
    """
    comptime T = Tile[op, precision, size]
    comptime if T.TENSOR:
        return q // T.ACROSS * 16 + lane // 4
    elif size == SMALL:
        return lane // 8 * 2 + lane // 2 % 2
    else:
        var i = q // T.ACROSS
        return i // 4 * 16 + i % 4 + (lane // 16 * 2 + lane // 2 % 2) * 4


@always_inline
def column_of[op: Int, precision: Int, size: Int](q: Int, lane: Int) -> Int:
    """Likewise the first column; it depends on q % Tile.ACROSS."""
    comptime T = Tile[op, precision, size]
    comptime if T.TENSOR:
        return q % T.ACROSS * 8 + lane % 4 * 2
    elif size == SMALL:
        return (lane // 4 % 2 * 2 + lane % 2) * 4
    else:
        return q % T.ACROSS * 32 + (lane // 4 % 4 * 2 + lane % 2) * 4


@always_inline
def tree_of[w: SIMDLength, //](v: Array[SIMD[F32, w], TEAMS], n: U) -> SIMD[F32, w]:
    """The sum of the first n: a node over n splits after the largest power of two smaller than n."""
    var s = Array[SIMD[F32, w], TEAMS](fill=0)
    comptime for i in range(TEAMS):
        s[i] = v[i]
    comptime for level in range(3):
        comptime half = 1 << level
        comptime for i in range(0, TEAMS, 2 * half):
            if U(i + half) < n:
                s[i] = s[i] + s[i + half]
    return s[0]
