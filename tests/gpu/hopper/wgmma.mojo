"""Products of linear layers on Hopper's tensor cores (wgmma, TMA), for bf16 operands in lanes.

A prototype that runs on the emulated GPU (test_gpu_hopper.py). No model uses it yet. One kernel has three products, as
mojo/kernels/gpu/gemm.mojo has:

    FORWARD  y  = W x + b   rows: outputs O, columns: tokens, sum over inputs I
    INPUT    dx = W^T dy    rows: inputs I,  columns: tokens, sum over outputs O
    WEIGHT   dW = dy x^T    rows: outputs O, columns: inputs I, sum over the tokens of one shard

Nothing is transposed or repacked, because lanes of 16 bits, (G, F, L), have the layout that wgmma reads. The L = 16
tokens of a feature are 32 bytes, which is the atom of the 32-byte swizzle. (With L = 64 it is the atom of the 128-byte
swizzle.) In FORWARD and INPUT the sum is over features, so a group of tokens is an atom of B, "MN-major". In WEIGHT the
sum is over tokens, so a group is L / 16 steps of 16 terms, "K-major", of A and of B. Weights (O, I) are A, K-major in
FORWARD and MN-major in INPUT, in atoms of 128 bytes.

Each number is one chain of additions: terms in steps of 16, from the first to the last. The tile, the shards of a launch
and the grid don't change the order. WEIGHT writes the sum of each shard, and another kernel adds the shards along the
tree (reduce.mojo).

Two warpgroups of a block multiply 64 rows each, and one more warp fetches. Chunks of 64 terms come by TMA into a ring of
STAGES places. The barrier full[s] is complete when the bytes of place s have come, empty[s] when the eight warps have
read them.

Layouts, descriptors and instructions: the PTX ISA, sections "Asynchronous Warpgroup Level Matrix Instructions", "Tensors"
and "mbarrier".
"""

from std.math import ceildiv
from std.sys import inlined_assembly
from std.utils import StaticTuple
from std.utils.index import Index

from max.gpu import AddressSpace, barrier, block_idx, thread_idx
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.globals import MAX_THREADS_PER_BLOCK_METADATA
from max.gpu.host import DeviceBuffer, DeviceContext, FuncAttribute
from max.gpu.host.nvidia.tma import TMADescriptor, TensorMapSwizzle, create_tma_descriptor
from max.gpu.memory import external_memory

comptime BF16 = DType.bfloat16
comptime F32 = DType.float32
comptime FORWARD = 0
comptime INPUT = 1
comptime WEIGHT = 2

comptime ROWS = 128  # of a tile: two warpgroups of 64
comptime CHUNK = 64  # terms that come at a time
comptime STEP = 16  # terms of one wgmma
comptime CONSUMERS = 256  # threads
comptime THREADS = CONSUMERS + 32


@always_inline
def stages_of(columns: Int) -> Int:
    """Places of the ring. Two blocks fit into a multiprocessor, or one block with the widest tile."""
    return 3 if columns <= 128 else 4


@always_inline
def stage_bytes(columns: Int) -> Int:
    """Bytes of one place: a chunk of A and a chunk of B."""
    return 2 * CHUNK * (ROWS + columns)


@always_inline
def shared_bytes(columns: Int) -> Int:
    """Bytes of the ring, with 1,024 for its alignment and 1,024 for the barriers."""
    return stages_of(columns) * stage_bytes(columns) + 1024 + 1024


# --- instructions -----------------------------------------------------------------------


@always_inline
def _barrier_init(at: UInt32, count: UInt32):
    inlined_assembly["mbarrier.init.shared.b64 [$0], $1;", NoneType, constraints="r,r"](at, count)


@always_inline
def _barrier_arrive(at: UInt32):
    inlined_assembly["mbarrier.arrive.shared.b64 _, [$0];", NoneType, constraints="r"](at)


@always_inline
def _barrier_expect(at: UInt32, bytes: UInt32):
    inlined_assembly["mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", NoneType, constraints="r,r"](at, bytes)


@always_inline
def _barrier_wait(at: UInt32, parity: UInt32):
    """Waits until the phase of this parity is complete."""
    inlined_assembly[
        """{
        .reg .pred P1;
        LAB_WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 P1, [$0], $1;
        @P1 bra DONE;
        bra LAB_WAIT;
        DONE:
        }""",
        NoneType,
        constraints="r,r",
    ](at, parity)


@always_inline
def _fence_barriers():
    """Lets TMA see the barriers that were initialised."""
    inlined_assembly["fence.mbarrier_init.release.cluster;", NoneType, constraints=""]()
    inlined_assembly["fence.proxy.async.shared::cta;", NoneType, constraints=""]()


@always_inline
def _fetch2(to: UInt32, map: Pointer[TMADescriptor, _], full: UInt32, c0: Int32, c1: Int32):
    inlined_assembly[
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$3, $4}], [$2];",
        NoneType,
        constraints="r,l,r,r,r",
    ](to, Int64(Int(map)), full, c0, c1)


@always_inline
def _fetch4(to: UInt32, map: Pointer[TMADescriptor, _], full: UInt32, c0: Int32, c1: Int32, c2: Int32, c3: Int32):
    inlined_assembly[
        (
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$3, $4, $5,"
            " $6}], [$2];"
        ),
        NoneType,
        constraints="r,l,r,r,r,r,r",
    ](to, Int64(Int(map)), full, c0, c1, c2, c3)


comptime NARROW = 3  # code of the 32-byte swizzle in a descriptor
comptime WIDE = 1  # code of the 128-byte swizzle


@always_inline
def _operand[swizzle: Int, leading: Int, stride: Int](at: UInt32) -> WGMMADescriptor[BF16]:
    """The descriptor of an operand in shared memory.

    leading: bytes between atoms along rows or columns. stride: bytes between eight rows of an atom and the next eight.
    """
    comptime fixed = Int64(leading // 16) << 16 | Int64(stride // 16) << 32 | Int64(swizzle) << 62
    return WGMMADescriptor[BF16](Int64(at >> 4) | fixed)


# --- the kernel -------------------------------------------------------------------------


comptime RELU = 1


@always_inline
def step_at[L: Int](k: Int, rows: Int) -> Int:
    """The byte at which step k of a chunk of tokens starts, in a place of (groups, rows, L) numbers."""
    return (k * STEP // L * rows * L + k * STEP % L) * 2


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(2 if columns <= 128 else 1),
)
@__llvm_arg_metadata(a_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(b_map, `nvvm.grid_constant`)
def product[
    op: Int, columns: Int, out_type: DType, L: Int
](
    a_map: TMADescriptor,
    b_map: TMADescriptor,
    y: Pointer[Scalar[out_type], MutUntrackedOrigin],
    y_step: Int64,
    bias: Pointer[Float32, MutUntrackedOrigin],
    rows_: Int32,
    columns_: Int32,  # FORWARD, INPUT: groups of a shard; WEIGHT: inputs
    chunks_: Int32,
    flags: Int32,
):
    """Computes one tile. The grid has rows along x, columns along y and shards along z."""
    comptime STAGES = stages_of(columns)
    comptime STAGE = UInt32(stage_bytes(columns))
    comptime A_BYTES = UInt32(2 * CHUNK * ROWS)
    comptime SUMS = columns // 2  # of a thread
    comptime GROUPS = columns // L
    comptime ATOM = UInt32(2 * L)  # bytes of the tokens of a feature
    comptime SWIZZLE = NARROW if L == 16 else WIDE
    var chunks = UInt32(chunks_)
    var dynamic = external_memory[UInt8, address_space=AddressSpace.SHARED, alignment=1024]()
    var base = (UInt32(Int(dynamic)) + 1023) & ~UInt32(1023)
    var full = base + UInt32(STAGES) * STAGE
    var empty = full + UInt32(8 * STAGES)
    var thread = UInt32(thread_idx.x)
    var shard = Int32(block_idx.z)
    if thread == 0:
        comptime for s in range(STAGES):
            _barrier_init(full + UInt32(8 * s), 1)
            _barrier_init(empty + UInt32(8 * s), UInt32(CONSUMERS // 32))
        _fence_barriers()
    barrier()

    if thread >= UInt32(CONSUMERS):  # the warp that fetches
        if thread > UInt32(CONSUMERS):
            return
        var row = Int32(block_idx.x) * ROWS
        var a_map_at = Pointer(to=a_map)
        var b_map_at = Pointer(to=b_map)
        var stage = UInt32(0)
        var parity = UInt32(1)  # places are empty at first
        for chunk in range(Int32(chunks)):
            var at = base + stage * STAGE
            var here = full + 8 * stage
            _barrier_wait(empty + 8 * stage, parity)
            _barrier_expect(here, STAGE)
            var term = chunk * CHUNK
            comptime if op == FORWARD:
                _fetch2(at, a_map_at, here, term, row)
            elif op == INPUT:
                comptime for half in range(2):  # atoms of 64 rows
                    _fetch2(at + UInt32(half * 64 * CHUNK * 2), a_map_at, here, row + Int32(64 * half), term)
            else:
                _fetch4(at, a_map_at, here, 0, row, chunk * Int32(CHUNK // L), shard)
            comptime if op == WEIGHT:
                var column = Int32(block_idx.y) * Int32(columns)
                _fetch4(at + A_BYTES, b_map_at, here, 0, column, chunk * Int32(CHUNK // L), shard)
            else:
                _fetch4(at + A_BYTES, b_map_at, here, 0, term, Int32(block_idx.y) * Int32(GROUPS), shard)
            stage += 1
            if stage == UInt32(STAGES):
                stage = 0
                parity ^= 1
        return

    var team = thread // 128
    var sums = SIMD[F32, SUMS](0)
    var stage = UInt32(0)
    var parity = UInt32(0)
    var before = UInt32(0)
    wgmma_fence_aligned()
    for chunk in range(Int32(chunks)):
        _barrier_wait(full + 8 * stage, parity)
        var a = base + stage * STAGE
        var b = a + A_BYTES
        wgmma_fence_aligned()
        comptime for k in range(CHUNK // STEP):
            comptime if op == FORWARD:
                sums = wgmma_async[64, columns, STEP, a_type=BF16, b_type=BF16, layout_a="row", layout_b="row"](
                    _operand[WIDE, 16, 1024](a + team * (64 * 128) + UInt32(k * STEP * 2)),
                    _operand[SWIZZLE, CHUNK * 2 * L, 16 * L](b + UInt32(k * STEP) * ATOM),
                    sums,
                )
            elif op == INPUT:
                sums = wgmma_async[64, columns, STEP, a_type=BF16, b_type=BF16, layout_a="col", layout_b="row"](
                    _operand[WIDE, CHUNK * 128, 1024](a + team * (CHUNK * 128) + UInt32(k * STEP * 128)),
                    _operand[SWIZZLE, CHUNK * 2 * L, 16 * L](b + UInt32(k * STEP) * ATOM),
                    sums,
                )
            else:
                sums = wgmma_async[64, columns, STEP, a_type=BF16, b_type=BF16, layout_a="row", layout_b="col"](
                    _operand[SWIZZLE, 16, 16 * L](a + team * (64 * ATOM) + UInt32(step_at[L](k, ROWS))),
                    _operand[SWIZZLE, 16, 16 * L](b + UInt32(step_at[L](k, columns))),
                    sums,
                )
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()  # of the chunk before
        if chunk > 0 and thread % 32 == 0:
            _barrier_arrive(empty + 8 * before)
        before = stage
        stage += 1
        if stage == UInt32(STAGES):
            stage = 0
            parity ^= 1
    wgmma_wait_group_sync[0]()

    # of eight columns a thread has two that lie side by side, in two rows
    var lane = thread % 32
    var first = Int32(block_idx.x) * ROWS + Int32(thread // 32) * 16 + Int32(lane // 4)
    var out = y.unsafe_offset(Int(Int64(shard) * y_step))
    comptime for half in range(2):
        var row = first + Int32(8 * half)
        if row < rows_:
            var start = Float32(0)
            comptime if op == FORWARD:
                start = bias[unsafe_offset=Int(row)]
            comptime for j in range(columns // 8):
                var v = SIMD[F32, 2](sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]) + start
                comptime if op == FORWARD:
                    if flags & RELU != 0:
                        v = max(v, 0)
                comptime if op == WEIGHT:
                    var column = Int32(block_idx.y) * Int32(columns) + Int32(8 * j) + Int32(lane % 4) * 2
                    if column < columns_:
                        out.unsafe_store[alignment=4](Int(row) * Int(columns_) + Int(column), v.cast[out_type]())
                else:
                    var group = Int32(block_idx.y) * Int32(GROUPS) + Int32(8 * j // L)
                    if group < columns_:
                        var at = (Int(group) * Int(rows_) + Int(row)) * L + 8 * j % L + Int(lane % 4) * 2
                        out.unsafe_store[alignment=4](at, v.cast[out_type]())


# --- launching --------------------------------------------------------------------------


def _lanes_map[
    L: Int
](
    ctx: DeviceContext, at: Int, shards: Int, step: Int, G: Int, F: Int, features: Int, groups: Int
) raises -> TMADescriptor:
    """The map of a tensor (shards, G, F, L), fetched in boxes of `groups` and `features`.

    step: numbers from a shard to the next.
    """
    var whole = DeviceBuffer[BF16](
        ctx,
        Pointer[BFloat16, MutUntrackedOrigin](unsafe_from_address=at),
        (shards - 1) * step + G * F * L,
        owning=False,
    )
    comptime swizzle = TensorMapSwizzle.SWIZZLE_32B if L == 16 else TensorMapSwizzle.SWIZZLE_128B
    return create_tma_descriptor[BF16, 4, swizzle](
        whole, Index(shards, G, F, L), Index(step, F * L, L, 1), Index(1, groups, features, L)
    )


def _weights_map(ctx: DeviceContext, at: Int, O: Int, I: Int, rows: Int) raises -> TMADescriptor:
    """The map of weights (O, I), fetched in boxes of so many rows and 64 columns."""
    var whole = DeviceBuffer[BF16](
        ctx, Pointer[BFloat16, MutUntrackedOrigin](unsafe_from_address=at), O * I, owning=False
    )
    return create_tma_descriptor[BF16, 2, TensorMapSwizzle.SWIZZLE_128B](
        whole, Index(O, I), Index(I, 1), Index(rows, 64)
    )


@fieldwise_init
struct Lanes(TrivialRegisterPassable):
    """The address of the first shard's tensor (G, F, L), and the numbers from one shard's tensor to the next."""

    var address: Int
    var step: Int


def enqueue[
    op: Int, columns: Int, out_type: DType, L: Int
](
    ctx: DeviceContext,
    shards: Int,
    y: Lanes,  # FORWARD: (G, O, L); INPUT: dx (G, I, L); WEIGHT: dW (O, I)
    a: Lanes,  # FORWARD, INPUT: W (O, I); WEIGHT: dy (G, O, L)
    b: Lanes,  # FORWARD, WEIGHT: x (G, I, L); INPUT: dy (G, O, L)
    bias: Int,
    G: Int,
    I: Int,
    O: Int,
    flags: Int32,
) raises:
    """Enqueues the product of all shards. flags: RELU, of FORWARD."""
    comptime GROUPS = columns // L
    var rows = O
    var across = ceildiv(G, GROUPS)
    var terms = I
    var count = G
    var a_map: TMADescriptor
    var b_map: TMADescriptor
    comptime if op == FORWARD:
        a_map = _weights_map(ctx, a.address, O, I, ROWS)
        b_map = _lanes_map[L](ctx, b.address, shards, b.step, G, I, CHUNK, GROUPS)
    elif op == INPUT:
        rows = I
        terms = O
        a_map = _weights_map(ctx, a.address, O, I, CHUNK)
        b_map = _lanes_map[L](ctx, b.address, shards, b.step, G, O, CHUNK, GROUPS)
    else:
        across = ceildiv(I, columns)
        terms = G * L
        count = I
        a_map = _lanes_map[L](ctx, a.address, shards, a.step, G, O, ROWS, CHUNK // L)
        b_map = _lanes_map[L](ctx, b.address, shards, b.step, G, I, columns, CHUNK // L)
    ctx.enqueue_function[product[op, columns, out_type, L]](
        a_map,
        b_map,
        Pointer[Scalar[out_type], MutUntrackedOrigin](unsafe_from_address=y.address),
        Int64(y.step),
        Pointer[Float32, MutUntrackedOrigin](unsafe_from_address=bias),
        Int32(rows),
        Int32(count),
        Int32(ceildiv(terms, CHUNK)),
        flags,
        grid_dim=(ceildiv(rows, ROWS), across, shards),
        block_dim=THREADS,
        shared_mem_bytes=shared_bytes(columns),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(shared_bytes(columns))),
    )
