"""The fingerprint of kernels/fingerprint.mojo on a GPU: the same 64-bit number for the same floats, cut into runs
anyhow.

Sums of integers have no order, so a block takes any words. A thread has one column; the keys of a chunk's rows are made
by as many threads, once, and read by all from shared memory.
"""

from std.memory import unsafe_stack_allocation

from max.gpu import AddressSpace, barrier, block_dim, block_idx, grid_dim, thread_idx

from ..fingerprint import COLUMNS_SEED, ROW, ROWS_SEED, odd_key
from .launch import LongPtr, Queue, blocks
from .quads import THREADS, block_sum

comptime CHUNK = 64  # rows
comptime AT_ONCE = THREADS // ROW  # rows under way
comptime MOST_BLOCKS = 264  # per run
comptime Word = Pointer[UInt32, MutUntrackedOrigin]


def _shares(sums: LongPtr, runs: LongPtr):
    """Block (b, r) takes every grid-th chunk of run r from chunk b on."""
    var keys = unsafe_stack_allocation[CHUNK, UInt64, address_space=AddressSpace.SHARED]()
    var run = runs.unsafe_offset(3 * block_idx.y)
    var words = Word(unsafe_from_address=Int(run[]))
    var start = Int(run[unsafe_offset=2])
    var end = start + Int(run[unsafe_offset=1])
    var t = thread_idx.x
    var column = t % ROW
    var sum = UInt64(0)
    # Rows are counted from 0 of the whole, so a chunk may begin before the run.
    var row = start // ROW + block_idx.x * CHUNK
    while row * ROW < end:
        if t < CHUNK:
            keys[unsafe_offset=t] = odd_key[1](ROWS_SEED, UInt64(row + t))
        barrier()
        comptime for j in range(CHUNK // AT_ONCE):
            var r = t // ROW + j * AT_ONCE
            var i = (row + r) * ROW + column
            if i >= start and i < end:
                sum += keys[unsafe_offset=r] * UInt64(words[unsafe_offset=i - start])
        barrier()
        row += grid_dim.x * CHUNK
    sum = block_sum[THREADS](sum * odd_key[1](COLUMNS_SEED, UInt64(column)))
    if t == 0:
        sums[unsafe_offset=block_idx.y * grid_dim.x + block_idx.x] = Int64(sum)


def _total(y: LongPtr, sums: LongPtr, n: Int32):
    var sum = Int64(0)
    for i in range(thread_idx.x, Int(n), THREADS):
        sum += sums[unsafe_offset=i]
    sum = block_sum[THREADS](sum)
    if thread_idx.x == 0:
        y[] = sum


@always_inline
def _blocks(longest: Int) -> Int:
    """Blocks for a run; one chunk more than fits may be begun."""
    return min(MOST_BLOCKS, blocks(longest, CHUNK * ROW) + 1)


def fingerprint_scratch(count: Int, longest: Int) -> Int:
    """Int64 numbers of scratch for `fingerprint`."""
    return count * _blocks(longest)


def fingerprint(
    q: Queue,
    y: LongPtr,  # (1): the fingerprint
    scratch: LongPtr,  # (fingerprint_scratch(count, longest))
    runs: LongPtr,  # in device memory, (count, 3): address, floats, number of the first
    count: Int,
    longest: Int,  # floats of the longest run; says how many blocks there are, not what is read
) raises:
    """The sum over runs, modulo 2^64; two launches. count is at most 65535."""
    var n = _blocks(longest)
    q.enqueue_function[_shares](scratch, runs, grid_dim=(n, count), block_dim=THREADS)
    q.enqueue_function[_total](y, scratch, Int32(count * n), grid_dim=1, block_dim=THREADS)
