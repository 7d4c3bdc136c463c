"""Rows that threads share (views.Team), for softmax and losses: sums and maxima over the threads of a lane, in a fixed order.

A lane's F classes are divided among K threads, which take every K-th; K depends on F alone. What the K threads have summed is
added as a tree over them, so sums are not in the CPU's order, and exp and log differ in a last bit. Counts are the same.

Thread t of a block has lane t % L, part t // L % K of its classes, and group t // (L K) of the block. Each function has
shared memory of its own and one barrier. Two of them that take turns may stand in a loop: before a thread writes again,
all have passed the barrier of the other.
"""

from std.memory import unsafe_stack_allocation

from max.gpu import AddressSpace, barrier, block_dim, block_idx, thread_idx

from ..lanes import F32, LANES, Ptr
from ..views import OfLoss, OfShared, Row, Team
from .launch import Launch, Operand, Queue, Sent, StepContextPtr, blocks
from .quads import THREADS, of_shard

comptime MOST_THREADS = 512  # of a block
comptime FEW = 32  # classes: up to here 4 threads per lane, beyond 16
comptime Stats = SIMD[F32, 4]  # sum of losses, samples, right predictions, 0; counts are exact up to 2^24


@always_inline
def first_part[K: Int]() -> Int:
    """The thread that has part 0 of this thread's lane."""
    var t = thread_idx.x
    return t // (LANES * K) * (LANES * K) + t % LANES


@always_inline
def _tree[K: Int](mut v: Array[Float32, K]) -> Float32:
    comptime half = K // 2
    comptime for i in range(half):
        v[i] += v[i + half]
    comptime if half > 1:
        var rest = Array[Float32, half](fill=0)
        comptime for i in range(half):
            rest[i] = v[i]
        return _tree[half](rest)
    else:
        return v[0]


@always_inline
def sum_parts[K: Int](value: Float32) -> Float32:
    """The sum over the parts of a lane, in all its threads."""
    var shared = unsafe_stack_allocation[MOST_THREADS, Float32, address_space=AddressSpace.SHARED]()
    shared[unsafe_offset=thread_idx.x] = value
    barrier()
    var v = Array[Float32, K](fill=0)
    comptime for k in range(K):
        v[k] = shared[unsafe_offset=first_part[K]() + k * LANES]
    return _tree[K](v)


@always_inline
def best_part[K: Int](value: Float32, place: Int32) -> Tuple[Float32, Int32]:
    """The largest value over the parts of a lane and its place, the smallest of equals."""
    var values = unsafe_stack_allocation[MOST_THREADS, Float32, address_space=AddressSpace.SHARED]()
    var places = unsafe_stack_allocation[MOST_THREADS, Int32, address_space=AddressSpace.SHARED]()
    values[unsafe_offset=thread_idx.x] = value
    places[unsafe_offset=thread_idx.x] = place
    barrier()
    var best = values[unsafe_offset=first_part[K]()]
    var at = places[unsafe_offset=first_part[K]()]
    comptime for k in range(1, K):
        var v = values[unsafe_offset=first_part[K]() + k * LANES]
        var p = places[unsafe_offset=first_part[K]() + k * LANES]
        if v > best or (v == best and p < at):
            best = v
            at = p
    return (best, at)


@fieldwise_init
struct Threads[threads: Int](Team):
    """Threads of a lane."""

    comptime K = Self.threads
    comptime L = 1

    @always_inline
    def part(self) -> Int:
        return thread_idx.x // LANES % Self.K

    @always_inline
    def sum(self, v: SIMD[F32, Self.L]) -> SIMD[F32, Self.L]:
        return sum_parts[Self.K](v[0])

    @always_inline
    def best(
        self, v: SIMD[F32, Self.L], place: SIMD[DType.int32, Self.L]
    ) -> Tuple[SIMD[F32, Self.L], SIMD[DType.int32, Self.L]]:
        var top = best_part[Self.K](v[0], place[0])
        return (SIMD[F32, Self.L](top[0]), SIMD[DType.int32, Self.L](top[1]))


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
    def row(self, shard: Int, g: Int, lane: Int) -> Row[1]:
        """A sample of group g; beyond the groups, a row without features."""
        var there = g < self.G
        return Row[1](
            self.a.at(shard),
            self.b.at(shard),
            self.c.at(shard),
            self.d.at(shard),
            self.e.at(shard),
            self.F if there else 0,
            self.number,
            g if there else 0,
            lane,
            LANES,
        )


def _shared_rows[f: OfShared, K: Int](sent: Sent[Rows]):
    comptime GROUPS = THREADS // (LANES * K)
    var g = block_idx.x * GROUPS + thread_idx.x // (LANES * K)
    f(Threads[K](), sent.sizes.row(block_idx.y, g, thread_idx.x % LANES))


def enqueue_shared_rows[f: OfShared, operands: Int](q: Queue, r: Launch) raises:
    """Computes f of every row."""
    var rows = Rows.read[operands](r)

    @always_inline
    def launch[K: Int]() raises {imm}:
        q.enqueue_function[_shared_rows[f, K]](
            Sent(rows), grid_dim=(blocks(rows.G, THREADS // (LANES * K)), r.shards), block_dim=THREADS
        )

    if rows.F <= FEW:
        launch[4]()
    else:
        launch[16]()


# --- losses ----------------------------------------------------------------------------------
# One block has one shard. It takes as many groups at a time as MOST_THREADS allow; a thread adds what it meets, then
# lanes are added by halves and groups one after the other.


def _losses[f: OfLoss, K: Int](sent: Sent[Rows], scaled: Int32, ctx: StepContextPtr):
    var rows = sent.sizes
    var team = Threads[K]()
    rows.number = ctx[].loss_scale if scaled == 1 else 1
    var sums = Stats(0)
    for first in range(0, rows.G, block_dim.x // (LANES * K)):
        if first > 0:
            barrier()  # before shared memory is written again
        var g = first + thread_idx.x // (LANES * K)
        var one = f(team, rows.row(block_idx.y, g, thread_idx.x % LANES))
        if team.part() == 0 and g < rows.G:
            sums += Stats(one.loss[0], Float32(Int32(one.counts[0])), Float32(Int32(one.right[0])), 0)
    _write_stats[K](of_shard(rows.a), sums)


@always_inline
def _write_stats[K: Int](stats: Ptr, mine: Stats):
    """Adds the lanes and groups of the threads with part 0."""
    var all = unsafe_stack_allocation[MOST_THREADS // K, Stats, address_space=AddressSpace.SHARED]()
    var t = thread_idx.x
    var lane = t % LANES
    var part = t // LANES % K
    var i = t // (LANES * K) * LANES + lane
    if part == 0:
        all[unsafe_offset=i] = mine
    barrier()
    comptime for round in range(4):
        comptime half = LANES >> (round + 1)
        if part == 0 and lane < half:
            all[unsafe_offset=i] += all[unsafe_offset=i + half]
        barrier()
    if t == 0:
        var sums = all[unsafe_offset=0]
        for g in range(1, block_dim.x // (LANES * K)):
            sums += all[unsafe_offset=g * LANES]
        comptime for j in range(4):
            stats[unsafe_offset=j] = sums[j]


def enqueue_losses[f: OfLoss, operands: Int](q: Queue, r: Launch) raises:
    """Computes f of every row and sums what it returns, of each shard."""
    var rows = Rows.read[operands](r)

    @always_inline
    def launch[K: Int]() raises {imm}:
        q.enqueue_function[_losses[f, K]](
            Sent(rows),
            Int32(r.int(operands + 3)),
            r.context,
            grid_dim=(1, r.shards),
            block_dim=min(MOST_THREADS, rows.G * LANES * K),
        )

    if rows.F <= FEW:
        launch[4]()
    else:
        launch[16]()
