"""kernels/gather.mojo on a GPU: a thread has one number of the result; gradients are added in the CPU's order."""

from std.bit import count_trailing_zeros, pop_count
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.utils.numerics import nan

from max.gpu import AddressSpace, barrier, block_idx, thread_idx
from max.gpu.primitives.warp import shuffle_xor

from ..lanes import F32
from .launch import GpuOp, Launch, Operand, Queue, blocks
from .quads import THREADS, WARP, divide, divisor, of_shard, small, small_index


def _take(y: Operand, x: Operand, rows: Operand, n: UInt32, V: Int32, F: UInt32, by_F: UInt64):
    var i = small_index()
    if i >= n:
        return
    var place = divide(i, by_F)
    var row = rows.ints_at(block_idx.y)[unsafe_offset=Int(place)]
    var v = nan[F32]()
    if row >= 0 and row < V:
        v = of_shard(x)[unsafe_offset=Int(row) * Int(F) + Int(i - place * F)]
    of_shard(y)[unsafe_offset=Int(i)] = v


def _enqueue_take(q: Queue, r: Launch) raises:
    var n = r.int(4) * r.int(6)
    q.enqueue_function[_take](
        r.op(1),
        r.op(2),
        r.op(3),
        small(n),
        Int32(r.int(5)),
        UInt32(r.int(6)),
        divisor(r.int(6)),
        grid_dim=(blocks(n, THREADS), r.shards),
        block_dim=THREADS,
    )


# --- the gradient of a table ------------------------------------------------------------------------------------------
# A block has one row of the table, up to THREADS features of it. It looks through the numbers of the rows that were
# taken, EACH of a thread, and lists those that are its own in their order; then the threads add these rows, DEEP loads
# under way at a time.

comptime EACH = 4
comptime WORDS = THREADS * EACH // WARP  # of the map of what was found, of 32 bits, which 32 / EACH threads share
comptime DEEP = 16


def _gradient(dx: Operand, dy_: Operand, rows_: Operand, n_: Int32, F_: Int32):
    var n, F = Int(n_), Int(F_)
    var row = Int32(block_idx.x)
    var f = block_idx.z * THREADS + thread_idx.x
    var rows = rows_.ints_at(block_idx.y)
    var dy = of_shard(dy_).unsafe_offset(min(f, F - 1))
    var map = unsafe_stack_allocation[WORDS, UInt32, address_space=AddressSpace.SHARED]()
    var found = unsafe_stack_allocation[THREADS * EACH, Int32, address_space=AddressSpace.SHARED]()
    var s = Float32(0)
    for first in range(0, n, THREADS * EACH):
        var own = thread_idx.x * EACH // WARP  # which word has this thread's bits, and from where on
        var at = UInt32(thread_idx.x * EACH % WARP)
        var word = UInt32(0)
        comptime for k in range(EACH):
            var j = first + thread_idx.x * EACH + k
            if j < n and rows[unsafe_offset=j] == row:
                word |= UInt32(1 << k) << at
        var mine = word
        comptime for level in range(3):
            word |= shuffle_xor(word, UInt32(1 << level))
        if at == 0:
            map[unsafe_offset=own] = word
        barrier()
        var all = 0
        var before = Int(pop_count(word & ((UInt32(1) << at) - 1)))  # found by threads before this one
        for i in range(WORDS):
            var many = Int(pop_count(map[unsafe_offset=i]))
            all += many
            before += many if i < own else 0
        while mine != 0:
            found[unsafe_offset=before] = Int32(first + own * WARP + Int(count_trailing_zeros(mine)))
            before += 1
            mine &= mine - 1
        barrier()
        for i in range(0, all, DEEP):
            var v = Array[Float32, DEEP](fill=0)
            comptime for k in range(DEEP):
                if i + k < all:
                    v[k] = dy[unsafe_offset=Int(found[unsafe_offset=i + k]) * F]
            comptime for k in range(DEEP):
                if i + k < all:
                    s += v[k]
    if f < F:
        of_shard(dx)[unsafe_offset=block_idx.x * F + f] = s


def _enqueue_gradient(q: Queue, r: Launch) raises:
    var F = r.int(6)
    q.enqueue_function[_gradient](
        r.op(1),
        r.op(2),
        r.op(3),
        Int32(r.int(4)),
        Int32(F),
        grid_dim=(r.int(5), r.shards, ceildiv(F, THREADS)),
        block_dim=THREADS,
    )


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [GpuOp("take", _enqueue_take), GpuOp("take_backward", _enqueue_gradient)]
