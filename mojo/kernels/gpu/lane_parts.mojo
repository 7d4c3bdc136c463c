"""Rows that threads share (views.Team), for softmax, layer norm and losses, and sums over rows: in a fixed order.

A thread has four samples side by side, 16 bytes of each feature, and K threads share them: they take every K-th of the
F features; K depends on F alone. What the K threads have summed is added as a tree over them, so sums are not in the
CPU's order, and exp and log differ in a last bit. Counts are the same.

Thread t of a block has samples 4 (t % 4) .. + 3, part t // 4 % K of the features, and group t // (4 K) of the block, so
32 threads read eight features at once. They exchange what they found by shuffles, the eighths of a team through shared
memory.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation

from max.gpu import AddressSpace, barrier, block_idx, thread_idx
from max.gpu.primitives.warp import shuffle_xor

from ..lanes import F32, LANES
from ..record import Record
from ..views import OfLoss, OfRow, OfTerm, Row, Team
from .launch import Launch, Operand, Queue, Sent, StepContextPtr, blocks
from .quads import QUADS, THREADS, WARP, Four, in_lanes, index, of_shard, warp_sum
from .reduce import tree

comptime QUAD = LANES // QUADS  # samples of a thread
comptime FEW = 128  # features: up to here 16 threads share a row, beyond 64


@always_inline
def _across[dtype: DType, //](v: SIMD[dtype, QUAD], distance: Int) -> SIMD[dtype, QUAD]:
    """What the thread so far away has; distances are powers of two below 32."""
    var other = v
    comptime for i in range(QUAD):
        other[i] = shuffle_xor(v[i], UInt32(distance))
    return other


@fieldwise_init
struct Threads[threads: Int](Team):
    """Threads with the same four samples, eight of them in each warp that has a part of the team."""

    comptime K = Self.threads
    comptime L = QUAD
    comptime WARPS = Self.K * QUADS // WARP

    @always_inline
    def part(self) -> Int:
        return thread_idx.x // QUADS % Self.K

    @always_inline
    def exchanged[dtype: DType, //](self, v: SIMD[dtype, QUAD]) -> Array[SIMD[dtype, QUAD], Self.WARPS]:
        """What the warps of the team have found, each the same in its eight threads."""
        var shared = unsafe_stack_allocation[
            THREADS // WARP * QUADS, SIMD[dtype, QUAD], address_space=AddressSpace.SHARED
        ]()
        var warp = thread_idx.x // WARP
        var quad = thread_idx.x % QUADS
        barrier()  # what an earlier call left there has been read
        if thread_idx.x % WARP < QUADS:
            shared[unsafe_offset=warp * QUADS + quad] = v
        barrier()
        var all = Array[SIMD[dtype, QUAD], Self.WARPS](fill=0)
        comptime for k in range(Self.WARPS):
            all[k] = shared[unsafe_offset=(warp // Self.WARPS * Self.WARPS + k) * QUADS + quad]
        return all^

    @always_inline
    def sum(self, v: SIMD[F32, Self.L]) -> SIMD[F32, Self.L]:
        var all = self.exchanged(warp_sum[low=2](v))
        var s = all[0]
        comptime for k in range(1, Self.WARPS):
            s += all[k]
        return s

    @always_inline
    def best(
        self, v: SIMD[F32, Self.L], place: SIMD[DType.int32, Self.L]
    ) -> Tuple[SIMD[F32, Self.L], SIMD[DType.int32, Self.L]]:
        var best = v
        var at = place

        @always_inline
        def take(other: SIMD[F32, Self.L], there: SIMD[DType.int32, Self.L]) {mut best, mut at}:
            var better = other.gt(best) | (other.eq(best) & there.lt(at))
            best = better.select(other, best)
            at = better.select(there, at)

        comptime for level in range(3):
            take(_across(best, QUADS << level), _across(at, QUADS << level))
        var values = self.exchanged(best)
        var places = self.exchanged(at)
        comptime for k in range(Self.WARPS):
            take(values[k], places[k])
        return (best, at)


@fieldwise_init
struct Rows(TrivialRegisterPassable):
    """The operands of an op whose function is given rows, and how many there are."""

    var a: Operand
    var b: Operand
    var c: Operand
    var d: Operand
    var e: Operand
    var G: Int
    var F: Int
    var number: Float32

    @staticmethod
    def read[operands: Int](r: Launch) -> Self:
        """So many operands, then G, F and a number."""
        return Self(
            r.op(1),
            r.op(min(2, operands)),
            r.op(min(3, operands)),
            r.op(min(4, operands)),
            r.op(min(5, operands)),
            r.int(operands + 1),
            r.int(operands + 2),
            r.float(operands + 3),
        )

    @always_inline
    def row(self, shard: Int, g: Int) -> Row[QUAD]:
        """This thread's four samples of group g; beyond the groups, rows without features."""
        var there = g < self.G
        return Row[QUAD](
            self.a.at(shard),
            self.b.at(shard),
            self.c.at(shard),
            self.d.at(shard),
            self.e.at(shard),
            self.F if there else 0,
            self.number,
            g if there else 0,
            thread_idx.x % QUADS * QUAD,
            LANES,
        )


def _rows[f: OfRow, K: Int](sent: Sent[Rows]):
    comptime GROUPS = THREADS // (QUADS * K)
    f(Threads[K](), sent.sizes.row(block_idx.y, block_idx.x * GROUPS + thread_idx.x // (QUADS * K)))


def enqueue_rows[f: OfRow, operands: Int](q: Queue, r: Launch) raises:
    """Computes f of every row."""
    var rows = Rows.read[operands](r)
    in_lanes(rows.a, rows.b)

    @always_inline
    def launch[K: Int]() raises {imm}:
        q.enqueue_function[_rows[f, K]](
            Sent(rows), grid_dim=(blocks(rows.G, THREADS // (QUADS * K)), r.shards), block_dim=THREADS
        )

    if rows.F <= FEW:
        launch[16]()
    else:
        launch[64]()


# --- sums over rows ---------------------------------------------------------------------------------------------------
# Eight features of a block: a warp reads them of a group at once, the warps take turns with the groups. Each shard is
# summed by itself: four samples of a thread, its neighbours', then the warps'.

comptime FEATURES = WARP // QUADS
comptime STRANDS = THREADS // WARP
comptime MOST_FOLD = 8  # shards that share a gradient buffer (launch.Launch)


def _columns[f: OfTerm](sent: Sent[Rows], shards: Int32, fold: Int32, accumulate: Int32):
    var rows = sent.sizes
    var strand = thread_idx.x // WARP
    var feature = thread_idx.x // QUADS % FEATURES
    var i = block_idx.x * FEATURES + feature
    var first = block_idx.y * Int(fold)
    var n = min(Int(fold), Int(shards) - first)
    var found = unsafe_stack_allocation[MOST_FOLD * STRANDS * FEATURES, Float32, address_space=AddressSpace.SHARED]()
    for j in range(n):
        var s = Four(0)
        if i < rows.F:
            for g in range(strand, rows.G, STRANDS):
                s += f(rows.row(first + j, g), i)
        var all = warp_sum[high=2](SIMD[F32, 1]((s[0] + s[1]) + (s[2] + s[3])))
        if thread_idx.x % QUADS == 0:
            found[unsafe_offset=(j * STRANDS + strand) * FEATURES + feature] = all[0]
    barrier()
    if strand > 0 or thread_idx.x % QUADS > 0 or i >= rows.F:
        return

    @always_inline
    def of_shard_(j: Int) {imm} -> SIMD[F32, 1]:
        var s = found[unsafe_offset=j * STRANDS * FEATURES + feature]
        for k in range(1, STRANDS):
            s += found[unsafe_offset=(j * STRANDS + k) * FEATURES + feature]
        return s

    var s = tree[1](of_shard_, n)
    var y = of_shard(rows.a)
    if accumulate != 0:
        s += y[unsafe_offset=i]
    y[unsafe_offset=i] = s[0]


def enqueue_columns[f: OfTerm, operands: Int](q: Queue, r: Launch) raises:
    """Adds f of all rows, of every shard of a gradient buffer."""
    var rows = Rows.read[operands](r)
    in_lanes(rows.b)
    q.enqueue_function[_columns[f]](
        Sent(rows),
        Int32(r.shards),
        Int32(r.fold),
        Int32(r.accumulate),
        grid_dim=(blocks(rows.F, FEATURES), ceildiv(r.shards, r.fold)),
        block_dim=THREADS,
    )


# --- losses ----------------------------------------------------------------------------------
# A thread adds what it meets, then lanes are added by halves and groups one after the other. A shard that is more than
# one block's work has a number of blocks that its size gives; what they found meets in a second launch.


def _losses[f: OfLoss, K: Int](sent: Sent[Rows], found: Operand, scaled: Int32, ctx: StepContextPtr):
    comptime GROUPS = THREADS // (QUADS * K)
    var rows = sent.sizes
    rows.number = ctx[].loss_scale if scaled == 1 else 1
    var group = thread_idx.x // (QUADS * K)
    var one = f(Threads[K](), rows.row(block_idx.y, block_idx.x * GROUPS + group))
    # counts are exact up to 2^24
    var sums = [one.loss, one.counts.cast[F32](), one.right.cast[F32]()]
    var all = unsafe_stack_allocation[GROUPS * 3, Float32, address_space=AddressSpace.SHARED]()
    comptime for i in range(3):
        sums[i] = warp_sum[high=2](sums[i])
        if thread_idx.x % (QUADS * K) == 0:
            all[unsafe_offset=3 * group + i] = (sums[i][0] + sums[i][2]) + (sums[i][1] + sums[i][3])
    barrier()
    if thread_idx.x < QUAD:
        var s = Float32(0)
        if thread_idx.x < 3:
            for j in range(min(GROUPS, rows.G - block_idx.x * GROUPS)):
                s += all[unsafe_offset=3 * j + thread_idx.x]
        of_shard(found)[unsafe_offset=block_idx.x * QUAD + thread_idx.x] = s


def _sum_losses(stats: Operand, found: Operand, count: Int32, shards: Int32):
    var shard = index() // QUAD
    var i = index() % QUAD
    if shard < Int(shards):
        var s = Float32(0)
        for j in range(Int(count)):
            s += found.at(shard)[unsafe_offset=j * QUAD + i]
        stats.at(shard)[unsafe_offset=i] = s


def losses_scratch[operands: Int](r: Record, shards: Int, fold: Int) -> Int:
    """What the blocks of all shards find; of a group, at most a block."""
    return 4 * QUAD * shards * r.int(operands + 1)


def enqueue_losses[f: OfLoss, operands: Int](q: Queue, r: Launch) raises:
    """Computes f of every row and sums what it returns, of each shard."""
    var rows = Rows.read[operands](r)
    in_lanes(rows.b)

    @always_inline
    def launch[K: Int]() raises {imm}:
        var count = blocks(rows.G, THREADS // (QUADS * K))
        var found = rows.a if count == 1 else Operand(Int(r.scratch), count * QUAD)
        q.enqueue_function[_losses[f, K]](
            Sent(rows),
            found,
            Int32(r.int(operands + 3)),
            r.context,
            grid_dim=(count, r.shards),
            block_dim=THREADS,
        )
        if count > 1:
            q.enqueue_function[_sum_losses](
                rows.a,
                found,
                Int32(count),
                Int32(r.shards),
                grid_dim=blocks(r.shards * QUAD, THREADS),
                block_dim=THREADS,
            )

    if rows.F <= FEW:
        launch[16]()
    else:
        launch[64]()
