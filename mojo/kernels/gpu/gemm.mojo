"""The one matrix product behind the linear layers of a GPU: tiles, their memory, their order of adding.

linear.mojo launches it; gemm_tiles.mojo and gemm_results.mojo are its parts. Three products have one kernel,
`product[op, precision, size]`:

    FORWARD  y  = W x     rows: outputs O, columns: samples, sum over inputs I
    INPUT    dx = W^T dy  rows: inputs I,  columns: samples, sum over outputs O
    WEIGHT   dW = dy x^T  rows: outputs O, columns: inputs I, sum over the samples of a shard, shard by shard

The order of adding depends on the layer's sizes alone, not on the tile. The sum is walked in chunks of CHUNK terms, the
last filled up with zeros. FORWARD and INPUT cut the chunks in `parts_of` runs; each run is one chain of multiply-adds
that starts at 0, and the runs are added one after the other: ((0 + 1) + 2) + ... WEIGHT has one chain per shard, and
the shards of a buffer are added along the fixed tree (docs/determinism.md).

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

from std.utils import StaticTuple

from max.gpu import AddressSpace, barrier, block_idx, thread_idx
from max.gpu.globals import MAX_THREADS_PER_BLOCK_METADATA
from max.gpu.memory import external_memory

from ..lanes import LANES, Ptr
from .gemm_results import Results, bias_gradient, write_all, write_quad
from .gemm_tiles import (
    ALIGNED,
    CHUNK,
    FORWARD,
    INPUT,
    LARGE,
    NVIDIA,
    Quad,
    SMALL,
    Shared,
    TEAMS,
    THREADS,
    Tile,
    U,
    WEIGHT,
    a_pair_of,
    column_of,
    four_of,
    group_at,
    group_of,
    meet,
    multiply,
    pair_of,
    parts_of,
    put_by_row,
    put_by_term,
    rounded,
    row_of,
    tree_of,
)
from .launch import FP32


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
    """One tile of a product; blocks along x, rows of tiles first, and for WEIGHT the buffers along y.

    There the blocks after the last tile compute db.
    """
    comptime T = Tile[op, precision, size]
    comptime ROWS = U(T.ROWS)
    comptime COLUMNS = U(T.COLUMNS)
    comptime TEAM = U(T.TEAM)
    var y_step, a_step, b_step = Int(y_step64), Int(a_step64), Int(b_step64)
    var rows, columns, terms = U(rows32), U(columns32), U(terms32)
    var G, teams, flags = U(G32), U(teams32), U(flags32)
    var aligned = flags & U(ALIGNED) != 0
    var shared = external_memory[Float32, address_space=AddressSpace.SHARED, alignment=16]()

    # the block's tile, and the thread's place in it
    var down = (rows + ROWS - 1) // ROWS
    var across = (columns * U(1 if op == WEIGHT else LANES) + COLUMNS - 1) // COLUMNS
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
            bias_gradient(
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

    var to = Results(out, bias, rows, columns, G, y_step, flags)

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
            a_at[u] = a_pair_of[op, precision, size](unit) * 2 * rows + m
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
            b_at[u] = pair_of[op, precision, size](unit) * 32 + unit % 4 * 4
            comptime if size != SMALL:  # several groups
                var group = min(column0 // 16 + group_of[op, precision, size](unit), columns - 1)
                b_at[u] += U(group_at(group, G, terms, b_step) - origin)
    pa = pa.unsafe_offset(Int(begin * a_chunk))
    pb = pb.unsafe_offset(Int(begin * b_chunk))

    var va = Array[Quad, T.A_QUADS](fill=Quad(0))
    var vb = Array[Quad, T.B_QUADS](fill=Quad(0))

    @always_inline
    def fetch(chunk: U, until: U) {mut va, mut vb, mut pa, mut pb, imm}:
        """Loads chunks, as many as fit, into registers. Terms beyond the last are 0."""
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
                va[u] = four_of[size == SMALL and op == FORWARD](pa, a_at[u], left, aligned)
        else:
            comptime for u in range(T.A_QUADS // 2):
                var unit = t + U(u) * TEAM
                var term = chunk * 16 + a_pair_of[op, precision, size](unit) * 2
                comptime for h in range(2):
                    var left = U(4) if term + U(h) < stop else U(0)
                    comptime if size == SMALL:
                        if not aligned:
                            var m = row0 + unit % (ROWS // 4) * 4
                            left = min(left, rows - m if m < rows else 0)
                        comptime if T.SPARE:
                            left = left if unit < ROWS * 2 else 0
                    va[2 * u + h] = four_of[size == SMALL](pa.unsafe_offset(h * Int(rows)), a_at[u], left, aligned)
        comptime if T.B_BY_TERM:
            comptime for u in range(T.B_QUADS):
                var unit = t + U(u) * TEAM
                var left = U(4)
                comptime if T.CHUNKS > 1:
                    left = 4 if chunk + unit // (4 * COLUMNS) < until else 0
                if column0 + unit // 4 % COLUMNS >= columns:
                    left = 0
                vb[u] = four_of[False](pb, b_at[u], left, True)
        else:
            comptime for u in range(T.B_QUADS // 2):
                var unit = t + U(u) * TEAM
                var term = chunk * 16 + pair_of[op, precision, size](unit) * 2
                comptime for h in range(2):
                    vb[2 * u + h] = four_of[False](
                        pb.unsafe_offset(h * LANES), b_at[u], U(4) if term + U(h) < stop else U(0), True
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
                    sa.unsafe_store[alignment=16](m * T.A_ROW + term, rounded[precision](va[u]))
                else:
                    put_by_term[precision, T.PAIRS, T.A_ROW](sa, m, term, va[u])
        else:
            comptime for u in range(T.A_QUADS // 2):
                var unit = t + U(u) * TEAM
                var m = Int(unit % (ROWS // 4) * 4)
                var term = Int(a_pair_of[op, precision, size](unit) * 2)
                comptime if T.BY_ROW:
                    comptime for h in range(2):
                        var r = rounded[precision](va[2 * u + h])
                        if not T.SPARE or unit < ROWS * 2:
                            comptime for j in range(4):
                                sa[unsafe_offset=(m + j) * T.A_ROW + term + h] = r[j]
                else:
                    put_by_row[precision, T.PAIRS, T.A_ROW](sa, m, term, va[2 * u], va[2 * u + 1])
        comptime if T.B_BY_TERM:
            comptime for u in range(T.B_QUADS):
                var unit = Int(t + U(u) * TEAM)
                put_by_term[precision, T.PAIRS, T.B_ROW](
                    sb, unit // 4 % T.COLUMNS, unit // (4 * T.COLUMNS) * CHUNK + unit % 4 * 4, vb[u]
                )
        else:
            comptime for u in range(T.B_QUADS // 2):
                var unit = t + U(u) * TEAM
                put_by_row[precision, T.PAIRS, T.B_ROW](
                    sb,
                    Int(group_of[op, precision, size](unit) * 16 + unit % 4 * 4),
                    Int(pair_of[op, precision, size](unit) * 2),
                    vb[2 * u],
                    vb[2 * u + 1],
                )

    var acc = Array[Quad, T.QUADS](fill=Quad(0))
    var region = shared.unsafe_offset(0 if size == LARGE else Int(team) * T.REGION)
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
        meet[size]()
        var next = chunk + 1
        comptime if T.CHUNKS > 1:
            next = min(chunk + U(T.CHUNKS), runs_end)
        var next_end = runs_end
        comptime if size == LARGE:
            if next == runs_end:
                next_end = runs_end + G if op == WEIGHT else chunks * (run + 2) // n
        if next < end:
            comptime if op == WEIGHT and size == LARGE:
                if next == runs_end:  # the next shard's first
                    pa = pa.unsafe_offset(a_step - Int(G * a_chunk))
                    pb = pb.unsafe_offset(b_step - Int(G * b_chunk))
            var until = next + 1
            comptime if T.CHUNKS > 1:
                until = min(next + U(T.CHUNKS), next_end)
            fetch(next, until)
        multiply[op, precision, size](
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
                        acc, shared.unsafe_offset(T.REGION + 4 * Int(t)), run, run + 1 == n
                    )
                else:
                    write_all[op, precision, size](
                        to, acc, lane, row0 + warp_row, column0 + warp_column, run == 0, run + 1 == n
                    )
                    comptime for q in range(T.QUADS):
                        acc[q] = Quad(0)
                runs_end = next_end
                run += 1
        else:
            meet[size]()
        chunk = next

    comptime if size == LARGE:
        comptime if op == WEIGHT:
            write_all[op, precision, size](to, acc, lane, row0 + warp_row, column0 + warp_column, True, True)
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
                    v[i] = p.unsafe_offset(i * T.REGION).unsafe_load[width=4, alignment=16]()
            var s = v[0]
            comptime if op == WEIGHT:
                s = tree_of(v, n)
            else:
                comptime for i in range(1, TEAMS):
                    if U(i) < n:
                        s += v[i]
            var at = to.at[op](column0 + U(column_of[op, precision, size](q, lane)))
            write_quad[op, precision, size](to, s, row0 + U(row_of[op, precision, size](q, lane)), at, True, True)
            q += Int(teams)


@always_inline
def _finish_shard[
    op: Int, precision: Int, size: Int, quads: Int
](mut acc: Array[Quad, quads], saved: Shared, shard: U, last: Bool):
    """Adds a finished shard into the tree, as one adds 1 to a binary number: `saved` has a tile for each node that
    waits for its right neighbour. After the last shard acc is the sum of all.
    """
    comptime T = Tile[op, precision, size]
    var level = 0
    var left = shard
    while left > 0 and (last or left & 1 == 1):
        if left & 1 == 1:
            comptime for q in range(quads):
                acc[q] = (
                    saved.unsafe_offset(level * T.SAVED + q * 4 * T.TEAM).unsafe_load[width=4, alignment=16]() + acc[q]
                )
        left >>= 1
        level += 1
    if not last:
        comptime for q in range(quads):
            saved.unsafe_store[alignment=16](level * T.SAVED + q * 4 * T.TEAM, acc[q])
            acc[q] = Quad(0)
