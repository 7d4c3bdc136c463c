"""How a thread finds its work: four neighbouring floats each, index arithmetic without divisions (division.mojo),
sums over a block.

Most ops only walk over memory. Their threads take four floats each, one access of 16 bytes where the address allows it:
of a tensor in lanes, four samples of one feature. Device code, but for `quads` and `in_lanes`.
"""

from std.bit import log2_floor
from std.memory import unsafe_stack_allocation

from max.gpu import AddressSpace, barrier, block_idx, thread_idx
from max.gpu.primitives.warp import shuffle_xor

from ..division import MOST, divide, divisor
from ..lanes import F32, LANES, Ptr
from .launch import Operand

comptime THREADS = 256  # of a block
comptime WARP = 32  # threads that exchange by shuffles, on every GPU
comptime Four = SIMD[F32, 4]
comptime QUADS = LANES // 4  # per vector of lanes


# --- four floats ------------------------------------------------------------------------


@always_inline
def load4(p: Ptr, i: Int) -> Four:
    """Four floats at element offset i, in one access: p + i must be a multiple of 16 bytes."""
    return p.unsafe_offset(i).unsafe_load[width=4, alignment=16]()


@always_inline
def store4(p: Ptr, i: Int, v: Four):
    """Stores four floats at element offset i, as load4."""
    p.unsafe_offset(i).unsafe_store[alignment=16](0, v)


@always_inline
def aligned(p: Ptr) -> Bool:
    """Whether load4 may be used at multiples of 4.

    Where not, a thread loops over single floats: LLVM makes one slow load of a load4 and four single loads that are
    written out.
    """
    return Int(p) & 15 == 0


def in_lanes(*tensors: Operand) raises:
    """Refuses tensors in lanes that load4 cannot be used on; those of a plan begin at multiples of 64 bytes."""
    for x in tensors:
        if (x.address | 4 * x.stride) & 15 != 0:
            raise Error(
                t"[gpu] a tensor in lanes lies at {x.address}, stride"
                t" {x.stride} floats; both must be multiples of 16 bytes"
            )


@always_inline
def of_shard(x: Operand) -> Ptr:
    """The operand of the shard of this block: shards lie along y."""
    return x.at(block_idx.y)


@always_inline
def index() -> Int:
    """Number of this thread along x."""
    return block_idx.x * THREADS + thread_idx.x


@always_inline
def small_index() -> UInt32:
    """The same for up to 2^32 threads, with the arithmetic of 32 bits."""
    return UInt32(block_idx.x) * THREADS + UInt32(thread_idx.x)


def small(n: Int, each: Int = 1) raises -> UInt32:
    """Threads that have `each` floats, as small_index counts them."""
    if n >= MOST:
        raise Error(
            t"[gpu] a tensor of {n * each} floats per shard is too large for one launch; make shard_size smaller"
        )
    return UInt32(n)


def quads(vectors: Int) raises -> Int:
    """Threads for so many vectors of lanes, four floats each."""
    return Int(small(vectors * QUADS, 4))


# --- sums over a block ----------------------------------------------------------------------


@always_inline
def warp_sum[dtype: DType, w: SIMDLength, //, low: Int = 0, high: Int = 5](value: SIMD[dtype, w]) -> SIMD[dtype, w]:
    """The sum over the threads of 32 whose numbers differ in bits `low` to `high` - 1, the largest distance first,
    for all of them.
    """
    var s = value
    comptime for level in range(high - low):
        comptime for i in range(Int(w)):
            s[i] += shuffle_xor(s[i], UInt32(1 << (high - 1 - level)))
    return s


@always_inline
def block_sum[dtype: DType, w: SIMDLength, //, threads: Int](value: SIMD[dtype, w]) -> SIMD[dtype, w]:
    """The sum over the threads of a block, a power of two from 32 on, for all of them. All threads must call it."""
    comptime WARPS = threads // WARP
    var shared = unsafe_stack_allocation[WARPS, SIMD[dtype, w], address_space=AddressSpace.SHARED]()
    var s = warp_sum(value)
    barrier()  # what an earlier call left there has been read
    if thread_idx.x % WARP == 0:
        shared[unsafe_offset=thread_idx.x // WARP] = s
    barrier()
    return warp_sum[high=log2_floor(WARPS)](shared[unsafe_offset=thread_idx.x % WARPS])


@always_inline
def block_max[dtype: DType, //, threads: Int](value: Scalar[dtype]) -> Scalar[dtype]:
    """The largest value of a block, in thread 0: halves are compared."""
    var shared = unsafe_stack_allocation[threads, Scalar[dtype], address_space=AddressSpace.SHARED]()
    var t = thread_idx.x
    shared[unsafe_offset=t] = value
    barrier()
    var half = threads // 2
    while half > 0:
        if t < half:
            shared[unsafe_offset=t] = max(shared[unsafe_offset=t], shared[unsafe_offset=t + half])
        barrier()
        half //= 2
    return shared[unsafe_offset=0]
