"""The one matrix product behind the linear layers of a GPU: tiles, their memory, their order of adding.

linear.mojo launches it. Three products have one kernel, `product[op, precision, size]`:

    FORWARD  y  = W x     rows: outputs O, columns: samples, sum over inputs I
    INPUT    dx = W^T dy  rows: inputs I,  columns: samples, sum over outputs O
    WEIGHT   dW = dy x^T  rows: outputs O, columns: inputs I, sum over the samples of a shard, shard by shard

The order of adding depends on the layer's sizes alone, not on the tile. The sum is walked in chunks of CHUNK terms, the
last filled up with zeros. FORWARD and INPUT cut the chunks in `parts_of` runs; each run is one chain of multiply-adds
that starts at 0, and the runs are added one after the other: ((0 + 1) + 2) + ... WEIGHT has one chain per shard, and the
shards of a buffer are added along the fixed tree (docs/determinism.md).

Tiles. A *team* of threads computes one tile of outputs for some of the runs (or one of the shards); what the teams of a
block have is added in shared memory, in that order.

    SMALL   8 x 16, of tensor cores 16 x 16; a team is a warp   short layers: the run is split over up to 8 warps, and a
                                                                 warp has 64 terms of the sum in flight
    MEDIUM  32 x 64; a team is a warp                            8 x 8 sums per thread, split as above
    LARGE   128 x 128; one team of 8 warps, 32 x 64 each         walks all runs; shared memory double-buffered

A chunk goes from memory to registers while the one before is multiplied, and is rounded on the way into shared memory:
each number is rounded once per tile. There, row k holds the k-th term of all rows (or columns) of the tile; 16-bit
operands hold terms 2k and 2k + 1 in one word, so that the fragments of all tensor core instructions are read alike. A
row is 8 words longer than the tile is wide, and after every fourth row come 8 more: then neither reading nor writing,
transposed or not, meets a bank twice.

Tensor cores are used on NVIDIA for all but FP32; elsewhere the rounded operands are multiplied in float32.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import is_defined
from std.sys.info import _accelerator_arch
from std.utils import StaticTuple

from max.gpu import AddressSpace, barrier, block_idx, thread_idx
from max.gpu.compute.mma import mma
from max.gpu.globals import MAX_THREADS_PER_BLOCK_METADATA
from max.gpu.memory import external_memory
from max.gpu.primitives import warp
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
    227 * 1024 if ARCH.find("sm_9") >= 0
    or ARCH.find("sm_10") >= 0 else 99 * 1024
) if NVIDIA_ARCH else (64 * 1024 if ARCH.find("gfx") >= 0 else 32 * 1024)

comptime U = UInt32  # indices: 64-bit arithmetic is slow, and no tensor of a shard has 2^32 floats
comptime Quad = SIMD[F32, 4]
comptime Shared = Pointer[
    Float32, MutUntrackedOrigin, address_space=AddressSpace.SHARED
]


def parts_of(terms: Int, rows: Int) -> Int:
    """In how many runs the sum over `terms` is cut for a result of `rows` rows.

    Layers with few rows are short of work for a whole GPU, so there a run may be as short as two chunks; with many, it
    is long enough for the additions of the runs not to show.
    """
    return max(
        1, min(TEAMS, ceildiv(terms, CHUNK) // (2 if rows < 1024 else 12))
    )


struct Tile[op: Int, precision: Int, size: Int]:
    """The sizes of a kernel, all known when it is compiled. Lengths in floats or words of 4 bytes.
    """

    comptime TENSOR = NVIDIA and Self.precision != FP32
    comptime PAIRS = Self.TENSOR and Self.precision != TF32  # two terms a word
    comptime BY_ROW = Self.size == SMALL and not Self.TENSOR  # a in shared memory: row by row
    comptime WARP_ROWS = 32 if Self.size != SMALL else (
        16 if Self.TENSOR else 8
    )
    comptime WARP_COLUMNS = 64 if Self.size != SMALL else 16
    comptime WARPS_DOWN = 4 if Self.size == LARGE else 1
    comptime WARPS_ACROSS = 2 if Self.size == LARGE else 1
    comptime ROWS = Self.WARP_ROWS * Self.WARPS_DOWN
    comptime COLUMNS = Self.WARP_COLUMNS * Self.WARPS_ACROSS
    comptime TEAM = THREADS * Self.WARPS_DOWN * Self.WARPS_ACROSS
    comptime QUADS = Self.WARP_ROWS * Self.WARP_COLUMNS // (
        4 * THREADS
    )  # sums of a thread, in fours
    comptime ACROSS = Self.WARP_COLUMNS // 8 if Self.TENSOR else (
        2 if Self.size != SMALL else 1
    )  # of these in a row
    comptime CHUNKS = 4 if Self.size == SMALL and NVIDIA else (
        2 if Self.size == LARGE
        and Self.TENSOR
        and (Self.PAIRS or Self.op != WEIGHT) else 1  # eight shards must fit
    )  # in shared memory at a time
    comptime WORDS = CHUNK // 2 if Self.PAIRS else CHUNK  # of a chunk
    comptime A_BY_TERM = Self.op != INPUT  # in memory, terms of the sum are neighbours
    comptime B_BY_TERM = Self.op == WEIGHT
    comptime A_ROW = Self.CHUNKS * CHUNK + 4 if Self.BY_ROW else Self.ROWS + 8
    comptime B_ROW = Self.COLUMNS + 8
    comptime A_CHUNK = CHUNK if Self.BY_ROW else Self.WORDS * (Self.A_ROW + 2)
    comptime B_CHUNK = Self.WORDS * (Self.B_ROW + 2)
    comptime A_WORDS = Self.ROWS * Self.A_ROW if Self.BY_ROW else (
        Self.CHUNKS * Self.A_CHUNK
    )
    comptime STAGE = Self.A_WORDS + Self.CHUNKS * Self.B_CHUNK
    comptime STAGES = 2 if Self.size == LARGE else 1
    comptime SAVED = 4 * Self.QUADS * Self.TEAM  # a tile of partial sums
    comptime REGION = Self.STAGES * Self.STAGE if Self.size == LARGE else max(
        Self.STAGE, Self.SAVED
    )
    comptime A_QUADS = max(
        1 if Self.A_BY_TERM else 2,
        Self.ROWS * Self.CHUNKS * CHUNK // (4 * Self.TEAM),
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
    """The nearest numbers of the precision's format, ties to even, as float32.
    """
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
def _four[checked: Bool](p: Ptr, at: U, n: U, aligned: Bool) -> Quad:
    """Four floats from `at` on, of which the first n are in bounds; the others are 0. Unless `checked`, or if `aligned`, all
    four are or none is.
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
    """Where row (or column) m of the tile is in the given row of shared memory.
    """
    return word * row + word // 4 * 8 + m


@always_inline
def _put_by_term[
    precision: Int, pairs: Bool, row: Int
](s: Shared, m: Int, term: Int, v: Quad):
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
def _put_by_row[
    precision: Int, pairs: Bool, row: Int
](s: Shared, m: Int, term: Int, v0: Quad, v1: Quad):
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
def _meet[size: Int]():
    """What the threads of a team have written to shared memory is there for all of them. Only on NVIDIA does a barrier of
    a warp say that.
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
def _pair_of[op: Int, precision: Int, size: Int](unit: U) -> U:
    """Which two terms of b (by row) a thread loads in its unit-th turn. Eight neighbouring threads store at once, in rows
    that share no bank: SMALL has two of their terms, two rows apart; larger tiles have two groups.
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
def _a_pair_of[op: Int, precision: Int, size: Int](unit: U) -> U:
    """Likewise for a."""
    comptime T = Tile[op, precision, size]
    comptime if T.ROWS == LANES:
        return _pair_of[op, precision, size](unit)
    else:
        return unit // U(T.ROWS // 4)


@always_inline
def _group_of[op: Int, precision: Int, size: Int](unit: U) -> U:
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
def _multiply[
    op: Int, precision: Int, size: Int, quads: Int
](mut acc: Array[Quad, quads], a: Shared, b: Shared, lane: Int, chunks: Int,):
    """Adds the products of the chunks in shared memory to the sums; a and b begin at the warp's rows and columns.
    """
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
                            comptime at = position[T.A_ROW](
                                step * 8 + 4 * h, i * 16 + r * 8
                            )
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
                            mma(
                                acc[q],
                                bitcast[DType.bfloat16, 8](fa[i]),
                                bitcast[DType.bfloat16, 4](fb),
                                acc[q],
                            )
                        else:
                            mma(
                                acc[q],
                                bitcast[DType.float16, 8](fa[i]),
                                bitcast[DType.float16, 4](fb),
                                acc[q],
                            )
    else:
        var pa = a.unsafe_offset(
            row_of[op, precision, size](0, lane) * (T.A_ROW if T.BY_ROW else 1)
        )
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
    """The row, in the warp's tile, of a thread's q-th four sums. They are neighbours in that row; of tensor cores two
    are, and the other two eight rows below.

    The lowest bit of a thread's number chooses the column, the next one the row: then each 16-byte read of a multiply-add
    has the same address in threads 1 or 2 apart, and the reads of sixteen threads can be served at once.
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
def tree_of[
    w: SIMDLength, //
](v: Array[SIMD[F32, w], TEAMS], n: U) -> SIMD[F32, w]:
    """The sum of the first n: a node over n splits after the largest power of two smaller than n.
    """
    var s = Array[SIMD[F32, w], TEAMS](fill=0)
    comptime for i in range(TEAMS):
        s[i] = v[i]
    comptime for level in range(3):
        comptime half = 1 << level
        comptime for i in range(0, TEAMS, 2 * half):
            if U(i + half) < n:
                s[i] = s[i] + s[i + half]
    return s[0]


# --- writing results -----------------------------------------------------------------


@always_inline
def _column_at[op: Int](column: U, rows: U, columns: U, G: U, step: Int) -> Int:
    """Where a column begins in the results; -1 if there is none."""
    comptime if op == WEIGHT:
        return Int(column) if column < columns else -1
    else:
        if column >= columns * 16:
            return -1
        return group_at(column // 16, G, rows, step) + Int(column % 16)


@always_inline
def _write[
    op: Int, width: Int
](
    y: Ptr,
    bias: Ptr,
    v: SIMD[F32, width],
    row: U,
    at: Int,  # _column_at
    rows: U,
    columns: U,
    first: Bool,
    last: Bool,
    flags: U,
):
    """Writes `width` neighbouring results of a row."""
    if row >= rows or at < 0:
        return
    comptime if op == WEIGHT:
        var p = y.unsafe_offset(Int(row * columns) + at)
        if flags & U(ALIGNED) != 0:
            var s = v
            if flags & U(ACCUMULATE) != 0:
                s += p.unsafe_load[width=width, alignment=4 * width]()
            p.unsafe_store[alignment=4 * width](0, s)
        else:
            comptime for j in range(width):
                if U(at + j) < columns:
                    var s = v[j]
                    if flags & U(ACCUMULATE) != 0:
                        s += p[unsafe_offset=j]
                    p[unsafe_offset=j] = s
    else:
        var p = y.unsafe_offset(at + Int(row * 16))
        var s = v
        if not first:
            s = p.unsafe_load[width=width, alignment=4 * width]() + v
        if last:
            comptime if op == FORWARD:
                s += bias[unsafe_offset=Int(row)]
                if flags & U(RELU) != 0:
                    s = s.lt(0).select(SIMD[F32, width](0), s)
        p.unsafe_store[alignment=4 * width](0, s)


@always_inline
def _write_quad[
    op: Int, precision: Int, size: Int
](
    y: Ptr,  # FORWARD, INPUT: y of the first shard; WEIGHT: dw of the buffer
    bias: Ptr,
    v: Quad,
    row: U,
    at: Int,
    rows: U,
    columns: U,
    first: Bool,  # there is no sum to go on from
    last: Bool,  # the sum is complete
    flags: U,
):
    """Writes four sums of a thread, which begin at `row` and at the column that is `at`.
    """
    comptime if Tile[op, precision, size].TENSOR:
        comptime for h in range(2):
            _write[op, 2](
                y,
                bias,
                SIMD[F32, 2](v[2 * h], v[2 * h + 1]),
                row + U(8 * h),
                at,
                rows,
                columns,
                first,
                last,
                flags,
            )
    else:
        _write[op, 4](y, bias, v, row, at, rows, columns, first, last, flags)


@always_inline
def _write_all[
    op: Int, precision: Int, size: Int, quads: Int
](
    y: Ptr,
    bias: Ptr,
    acc: Array[Quad, quads],
    lane: Int,
    row0: U,  # the warp's first
    column0: U,
    rows: U,
    columns: U,
    G: U,
    step: Int,
    first: Bool,
    last: Bool,
    flags: U,
):
    """Writes all sums of a thread."""
    comptime T = Tile[op, precision, size]
    var at = Array[Int, T.ACROSS](fill=0)
    comptime for j in range(T.ACROSS):
        at[j] = _column_at[op](
            column0 + U(column_of[op, precision, size](j, lane)),
            rows,
            columns,
            G,
            step,
        )
    comptime for q in range(quads):
        _write_quad[op, precision, size](
            y,
            bias,
            acc[q],
            row0 + U(row_of[op, precision, size](q, lane)),
            at[q % T.ACROSS],
            rows,
            columns,
            first,
            last,
            flags,
        )


@always_inline
def _bias_gradient(
    db: Ptr,  # of the buffer
    dy: Ptr,  # of the buffer's first shard
    step: Int,
    output: U,
    lane: U,  # of sixteen
    n: U,  # shards
    G: U,
    O: U,
    flags: U,
):
    """The sum of dy over the samples of n shards, by sixteen neighbouring threads: over the groups one after the
    other, then over the lanes in pairs 8, 4, 2 and 1 apart, then along the tree.
    """
    var o = min(output, O - 1)
    var sums = Array[Float32, TEAMS](fill=0)
    comptime for i in range(TEAMS):
        if U(i) < n:
            var p = dy.unsafe_offset(i * step + Int(o * 16 + lane))
            var s: Float32 = 0
            for g in range(G):
                s += p[unsafe_offset=Int(g * O * 16)]
            comptime for k in range(4):
                s += warp.shuffle_xor(s, UInt32(8 >> k))
            sums[i] = s
    var s = tree_of(sums, n)
    if lane == 0 and output < O:
        if flags & U(ACCUMULATE) != 0:
            s += db[unsafe_offset=Int(o)]
        db[unsafe_offset=Int(o)] = s


# --- the kernel ------------------------------------------------------------------------


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(512 if size == LARGE and NVIDIA and precision == FP32 else 256)
    )
)
def product[
    op: Int, precision: Int, size: Int
](
    y: Ptr,
    y_step64: Int64,
    a: Ptr,  # FORWARD, INPUT: w; WEIGHT: dy
    a_step64: Int64,
    b: Ptr,  # FORWARD, WEIGHT: x; INPUT: dy
    b_step64: Int64,
    bias: Ptr,  # FORWARD: b; WEIGHT: db
    bias_step64: Int64,
    rows32: Int32,
    columns32: Int32,  # FORWARD, INPUT: groups of samples of all shards; WEIGHT: I
    terms32: Int32,  # of the sum; WEIGHT: not used
    G32: Int32,
    shards32: Int32,
    teams32: Int32,  # FORWARD, INPUT: parts_of the sum; WEIGHT: fold
    flags32: Int32,
):
    """One tile of a product; blocks along x, rows of tiles first, and for WEIGHT the buffers along y. There the blocks
    after the last tile compute db.
    """
    comptime T = Tile[op, precision, size]
    comptime ROWS = U(T.ROWS)
    comptime COLUMNS = U(T.COLUMNS)
    comptime TEAM = U(T.TEAM)
    var y_step, a_step, b_step = Int(y_step64), Int(a_step64), Int(b_step64)
    var rows, columns, terms = U(rows32), U(columns32), U(terms32)
    var G, teams, flags = U(G32), U(teams32), U(flags32)
    var aligned = flags & U(ALIGNED) != 0
    var shared = external_memory[
        Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()

    # the block's tile, and the thread's place in it
    var down = (rows + ROWS - 1) // ROWS
    var across = (
        columns * U(1 if op == WEIGHT else LANES) + COLUMNS - 1
    ) // COLUMNS
    var block = U(block_idx.x)
    var tile_column = block // down
    var row0 = (block - tile_column * down) * ROWS
    var column0 = tile_column * COLUMNS
    var thread = U(thread_idx.x)
    var team = thread // TEAM
    var t = thread % TEAM
    var lane = Int(t % U(THREADS))
    var warp_row = t // U(THREADS * T.WARPS_ACROSS) * U(T.WARP_ROWS)
    var warp_column = t // U(THREADS) % U(T.WARPS_ACROSS) * U(T.WARP_COLUMNS)

    # WEIGHT: the buffer
    var out = y
    var pa = a
    var pb = b
    var n = teams  # what is added: runs, or shards
    comptime if op == WEIGHT:
        var buffer = U(block_idx.y)
        n = min(teams, U(shards32) - buffer * teams)
        out = y.unsafe_offset(Int(buffer) * y_step)
        pa = a.unsafe_offset(Int(buffer * teams) * a_step)
        pb = b.unsafe_offset(Int(buffer * teams) * b_step)
        if block >= down * across:
            comptime per_team = U(T.TEAM // LANES)
            var each = per_team if size == LARGE else teams * per_team
            _bias_gradient(
                bias.unsafe_offset(Int(buffer) * Int(bias_step64)),
                pa,
                a_step,
                (block - down * across) * each + thread // 16,
                thread % 16,
                n,
                G,
                rows,
                flags,
            )
            return

    # which chunks this team walks
    var chunks = G if op == WEIGHT else (terms + 15) // 16
    var begin = U(0)
    var end = chunks
    var runs_end = chunks
    comptime if size == LARGE:
        comptime if op == WEIGHT:
            end = n * G
            runs_end = G
        else:
            runs_end = chunks // n
    else:
        comptime if op == WEIGHT:
            pa = pa.unsafe_offset(Int(team) * a_step)
            pb = pb.unsafe_offset(Int(team) * b_step)
            if team >= n:
                end = 0
        else:
            begin = chunks * team // n
            end = chunks * (team + 1) // n

    # What this thread loads of each chunk, in floats from the tile's first. Operands whose terms are neighbours come in
    # fours of terms of one row, others in fours of rows of two terms. What is beyond the last row is loaded from the
    # last: no result that is written depends on it.
    var a_at = Array[U, T.A_QUADS](fill=0)
    var b_at = Array[U, T.B_QUADS](fill=0)
    var a_row = U(LANES) if op == WEIGHT else terms
    var a_chunk = rows * 16 if op != FORWARD else U(CHUNK)
    var b_chunk = columns * 16 if op == WEIGHT else U(CHUNK * LANES)
    comptime if T.A_BY_TERM:
        pa = pa.unsafe_offset(Int(row0) * Int(a_row))
        comptime for u in range(T.A_QUADS):
            var unit = t + U(u) * TEAM
            var m = unit // 4 % ROWS
            comptime if op == FORWARD:
                m = min(m, rows - 1 - row0)
            a_at[u] = m * a_row + unit // (4 * ROWS) * a_chunk + unit % 4 * 4
    else:
        pa = pa.unsafe_offset(Int(row0))
        comptime for u in range(T.A_QUADS // 2):
            var unit = t + U(u) * TEAM
            var m = unit % (ROWS // 4) * 4
            if aligned:
                m = min(m, rows - 4 - row0)
            a_at[u] = _a_pair_of[op, precision, size](unit) * 2 * rows + m
    comptime if T.B_BY_TERM:
        pb = pb.unsafe_offset(Int(column0) * LANES)
        comptime for u in range(T.B_QUADS):
            var unit = t + U(u) * TEAM
            var m = unit // 4 % COLUMNS
            b_at[u] = m * 16 + unit // (4 * COLUMNS) * b_chunk + unit % 4 * 4
    else:
        var origin = group_at(column0 // 16, G, terms, b_step)
        pb = pb.unsafe_offset(origin)
        comptime for u in range(T.B_QUADS // 2):
            var unit = t + U(u) * TEAM
            b_at[u] = _pair_of[op, precision, size](unit) * 32 + unit % 4 * 4
            comptime if size != SMALL:  # several groups
                var group = min(
                    column0 // 16 + _group_of[op, precision, size](unit),
                    columns - 1,
                )
                b_at[u] += U(group_at(group, G, terms, b_step) - origin)
    pa = pa.unsafe_offset(Int(begin * a_chunk))
    pb = pb.unsafe_offset(Int(begin * b_chunk))

    var va = Array[Quad, T.A_QUADS](fill=Quad(0))
    var vb = Array[Quad, T.B_QUADS](fill=Quad(0))

    @always_inline
    def fetch(chunk: U, until: U) {mut va, mut vb, mut pa, mut pb, imm}:
        """Loads chunks, as many as fit, into registers. Terms beyond the last are 0.
        """
        var stop = terms
        comptime if T.CHUNKS > 1:
            stop = until * 16
            comptime if op != WEIGHT:
                stop = min(stop, terms)
        comptime if T.A_BY_TERM:
            comptime for u in range(T.A_QUADS):
                var unit = t + U(u) * TEAM
                var term = chunk * 16 + unit // (4 * ROWS) * 16 + unit % 4 * 4
                var left = U(4)
                comptime if op == FORWARD or T.CHUNKS > 1:
                    left = stop - term if term < stop else 0
                comptime if op == WEIGHT:
                    if row0 + unit // 4 % ROWS >= rows:
                        left = 0
                va[u] = _four[size == SMALL and op == FORWARD](
                    pa, a_at[u], left, aligned
                )
        else:
            comptime for u in range(T.A_QUADS // 2):
                var unit = t + U(u) * TEAM
                var term = (
                    chunk * 16 + _a_pair_of[op, precision, size](unit) * 2
                )
                comptime for h in range(2):
                    var left = U(4) if term + U(h) < stop else U(0)
                    comptime if size == SMALL:
                        if not aligned:
                            var m = row0 + unit % (ROWS // 4) * 4
                            left = min(left, rows - m if m < rows else 0)
                        comptime if T.SPARE:
                            left = left if unit < ROWS * 2 else 0
                    va[2 * u + h] = _four[size == SMALL](
                        pa.unsafe_offset(h * Int(rows)), a_at[u], left, aligned
                    )
        comptime if T.B_BY_TERM:
            comptime for u in range(T.B_QUADS):
                var unit = t + U(u) * TEAM
                var left = U(4)
                comptime if T.CHUNKS > 1:
                    left = 4 if chunk + unit // (4 * COLUMNS) < until else 0
                if column0 + unit // 4 % COLUMNS >= columns:
                    left = 0
                vb[u] = _four[False](pb, b_at[u], left, True)
        else:
            comptime for u in range(T.B_QUADS // 2):
                var unit = t + U(u) * TEAM
                var term = chunk * 16 + _pair_of[op, precision, size](unit) * 2
                comptime for h in range(2):
                    vb[2 * u + h] = _four[False](
                        pb.unsafe_offset(h * LANES),
                        b_at[u],
                        U(4) if term + U(h) < stop else U(0),
                        True,
                    )
        pa = pa.unsafe_offset(Int((until - chunk) * a_chunk))
        pb = pb.unsafe_offset(Int((until - chunk) * b_chunk))

    @always_inline
    def put(sa: Shared, sb: Shared) {imm}:
        """Stores what `fetch` loaded in shared memory."""
        comptime if T.A_BY_TERM:
            comptime for u in range(T.A_QUADS):
                var unit = Int(t + U(u) * TEAM)
                var m = unit // 4 % T.ROWS
                var term = unit // (4 * T.ROWS) * CHUNK + unit % 4 * 4
                comptime if T.BY_ROW:
                    sa.unsafe_store[alignment=16](
                        m * T.A_ROW + term, rounded[precision](va[u])
                    )
                else:
                    _put_by_term[precision, T.PAIRS, T.A_ROW](
                        sa, m, term, va[u]
                    )
        else:
            comptime for u in range(T.A_QUADS // 2):
                var unit = t + U(u) * TEAM
                var m = Int(unit % (ROWS // 4) * 4)
                var term = Int(_a_pair_of[op, precision, size](unit) * 2)
                comptime if T.BY_ROW:
                    comptime for h in range(2):
                        var r = rounded[precision](va[2 * u + h])
                        if not T.SPARE or unit < ROWS * 2:
                            comptime for j in range(4):
                                sa[
                                    unsafe_offset=(m + j) * T.A_ROW + term + h
                                ] = r[j]
                else:
                    _put_by_row[precision, T.PAIRS, T.A_ROW](
                        sa, m, term, va[2 * u], va[2 * u + 1]
                    )
        comptime if T.B_BY_TERM:
            comptime for u in range(T.B_QUADS):
                var unit = Int(t + U(u) * TEAM)
                _put_by_term[precision, T.PAIRS, T.B_ROW](
                    sb,
                    unit // 4 % T.COLUMNS,
                    unit // (4 * T.COLUMNS) * CHUNK + unit % 4 * 4,
                    vb[u],
                )
        else:
            comptime for u in range(T.B_QUADS // 2):
                var unit = t + U(u) * TEAM
                _put_by_row[precision, T.PAIRS, T.B_ROW](
                    sb,
                    Int(
                        _group_of[op, precision, size](unit) * 16 + unit % 4 * 4
                    ),
                    Int(_pair_of[op, precision, size](unit) * 2),
                    vb[2 * u],
                    vb[2 * u + 1],
                )

    var acc = Array[Quad, T.QUADS](fill=Quad(0))
    var region = shared.unsafe_offset(
        0 if size == LARGE else Int(team) * T.REGION
    )
    var stage = 0
    var run = U(0)
    var chunk = begin
    comptime if size != LARGE:
        runs_end = end
    if begin < end:
        fetch(begin, min(begin + U(T.CHUNKS), runs_end))
    var loop_end = end
    comptime if not NVIDIA and size != LARGE:
        # all teams go round as often, since they meet at barriers of the block
        loop_end = begin + (G if op == WEIGHT else (chunks + n - 1) // n)
    while chunk < loop_end:
        var sa = region.unsafe_offset(stage * T.STAGE)
        var sb = sa.unsafe_offset(T.A_WORDS)
        put(sa, sb)
        _meet[size]()
        var next = chunk + 1
        comptime if T.CHUNKS > 1:
            next = min(chunk + U(T.CHUNKS), runs_end)
        var next_end = runs_end
        comptime if size == LARGE:
            if next == runs_end:
                next_end = (
                    runs_end + G if op == WEIGHT else chunks * (run + 2) // n
                )
        if next < end:
            comptime if op == WEIGHT and size == LARGE:
                if next == runs_end:  # the next shard's first
                    pa = pa.unsafe_offset(a_step - Int(G * a_chunk))
                    pb = pb.unsafe_offset(b_step - Int(G * b_chunk))
            var until = next + 1
            comptime if T.CHUNKS > 1:
                until = min(next + U(T.CHUNKS), next_end)
            fetch(next, until)
        _multiply[op, precision, size](
            acc,
            sa.unsafe_offset(Int(warp_row) * (T.A_ROW if T.BY_ROW else 1)),
            sb.unsafe_offset(Int(warp_column)),
            lane,
            Int(next - chunk) if chunk < end else 0,
        )
        comptime if size == LARGE:
            stage = 1 - stage
            if next == runs_end:
                comptime if op == WEIGHT:
                    _finish_shard[op, precision, size](
                        acc,
                        shared.unsafe_offset(T.REGION + 4 * Int(t)),
                        run,
                        run + 1 == n,
                    )
                else:
                    _write_all[op, precision, size](
                        out,
                        bias,
                        acc,
                        lane,
                        row0 + warp_row,
                        column0 + warp_column,
                        rows,
                        columns,
                        G,
                        y_step,
                        run == 0,
                        run + 1 == n,
                        flags,
                    )
                    comptime for q in range(T.QUADS):
                        acc[q] = Quad(0)
                runs_end = next_end
                run += 1
        else:
            _meet[size]()
        chunk = next

    comptime if size == LARGE:
        comptime if op == WEIGHT:
            _write_all[op, precision, size](
                out,
                bias,
                acc,
                lane,
                row0 + warp_row,
                column0 + warp_column,
                rows,
                columns,
                G,
                y_step,
                True,
                True,
                flags,
            )
    else:
        # each team's sums to its own part of shared memory, then every thread adds some of them over the teams
        comptime for q in range(T.QUADS):
            region.unsafe_store[alignment=16](4 * (q * THREADS + lane), acc[q])
        barrier()
        var q = Int(team)
        while q < T.QUADS:
            var p = shared.unsafe_offset(4 * (q * THREADS + lane))
            var v = Array[Quad, TEAMS](fill=Quad(0))
            comptime for i in range(TEAMS):
                if U(i) < n:
                    v[i] = p.unsafe_offset(i * T.REGION).unsafe_load[
                        width=4, alignment=16
                    ]()
            var s = v[0]
            comptime if op == WEIGHT:
                s = tree_of(v, n)
            else:
                comptime for i in range(1, TEAMS):
                    if U(i) < n:
                        s += v[i]
            _write_quad[op, precision, size](
                out,
                bias,
                s,
                row0 + U(row_of[op, precision, size](q, lane)),
                _column_at[op](
                    column0 + U(column_of[op, precision, size](q, lane)),
                    rows,
                    columns,
                    G,
                    y_step,
                ),
                rows,
                columns,
                True,
                True,
                flags,
            )
            q += Int(teams)


@always_inline
def _finish_shard[
    op: Int, precision: Int, size: Int, quads: Int
](mut acc: Array[Quad, quads], saved: Shared, shard: U, last: Bool):
    """Adds a finished shard into the tree, as one adds 1 to a binary number: `saved` has a tile for each node that waits
    for its right neighbour. After the last shard acc is the sum of all.
    """
    comptime T = Tile[op, precision, size]
    var level = 0
    var left = shard
    while left > 0 and (last or left & 1 == 1):
        if left & 1 == 1:
            comptime for q in range(quads):
                acc[q] = (
                    saved.unsafe_offset(
                        level * T.SAVED + q * 4 * T.TEAM
                    ).unsafe_load[width=4, alignment=16]()
                    + acc[q]
                )
        left >>= 1
        level += 1
    if not last:
        comptime for q in range(quads):
            saved.unsafe_store[alignment=16](
                level * T.SAVED + q * 4 * T.TEAM, acc[q]
            )
            acc[q] = Quad(0)
