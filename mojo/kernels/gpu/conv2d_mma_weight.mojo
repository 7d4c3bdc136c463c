"""Gradient of a large convolution's weights on NVIDIA GPUs: tensor cores for tf32, bf16 and fp16, else float32
multiply-adds; conv2d_mma.mojo says how the fragments lie.

Here words are neighbouring samples: the 16 samples of a pixel are the terms of one step (two of tf32), dy has the rows
and x the columns. A block has 64 output channels and the taps of some input channels, and a piece of a shard's pixels,
one block of 16 after the other: both are rounded into shared memory once, from where all taps multiply them. A thread
of the form for float32, lane = 4 g + t, has output channels g + 8 i and in each tile of columns input channel t.
How many pieces there are follows from the layer's sizes. Where it is one, and a buffer has one shard, that is the
result; else a second launch adds the pieces in order, and the shards of a buffer along their tree.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation

from max.gpu import AddressSpace, WARP_SIZE, barrier, block_idx, global_idx, thread_idx
from max.gpu.memory import external_memory
from max.gpu.primitives.warp import shuffle_xor

from ..lanes import F32, LANES, Ptr
from .conv2d_mma import TILE, columns_around, find_pixels, multiply, pixels_around, plane_of, terms, tiled, words
from .conv2d_tiles import Shape, Sizes, THREADS, WARPS, split
from .conv2d_weight import Gradients
from .gemm_tiles import Quad, SHARED_LIMIT, tree_of
from .launch import FP32, Operand, Queue, TF32, blocks

comptime M = 4  # tiles of 16 output channels of a warp, and of a block
comptime BLOCK_WARPS = 4  # that differ in their columns
comptime BLOCK_THREADS = BLOCK_WARPS * WARP_SIZE
comptime MOST = 9  # tiles of columns of a warp: 8 input channels (4 of float32) in one tap each
comptime AT_ONCE = 4  # loads of a thread on their way
comptime ENOUGH = 32  # blocks of a shard that pieces are made for; twice as many of float32


@always_inline
def _tile(precision: Int) -> Int:
    """Input channels of a tile of columns."""
    return 4 if precision == FP32 else 8


@always_inline
def _tiles_of_a_warp(s: Shape) -> Int:
    """Tiles of columns of a warp: with few taps, few, since each tile then has its own channels in shared memory."""
    return MOST if s.R * s.T > 3 else 2


@always_inline
def _channels(s: Shape, tile: Int) -> Int:
    """Input channels of a block, at most."""
    var taps = s.R * s.T
    var n = BLOCK_WARPS * _tiles_of_a_warp(s)
    return tile * min(ceildiv(s.C, tile), n // taps if n % taps == 0 else (n - 1) // taps + 2)


@always_inline
def _plane(pixels: Int, precision: Int) -> Int:
    """Words from one channel to the next; of float32, whose threads read four, 12 more than a multiple of 32."""
    return plane_of(pixels, 16) + 4 if precision == FP32 else plane_of(pixels, 16 if precision == TF32 else 8)


def _weights[
    precision: Int, N: Int
](to: Operand, dy: Operand, x: Operand, accumulate: Int32, sizes: Sizes):  # to (pieces, K, C, R, T)
    """A warp has M x 16 output channels and N tiles of columns: of all pairs (8 input channels, tap) in order."""
    comptime STEPS = 2 // terms(precision)  # of a pixel
    comptime EACH = 16 // terms(precision)  # words of a pixel
    comptime DY_PLANE = _plane(TILE, precision)
    comptime CHANNELS = _tile(precision)
    var s = Shape(sizes)
    var shard = block_idx.z
    var thread = thread_idx.x
    var warp = thread // WARP_SIZE
    var lane = thread % WARP_SIZE
    var t = lane % 4
    var g = lane // 4
    var taps = s.R * s.T
    var width = columns_around(s)
    var pixels = pixels_around(s)
    var x_plane = _plane(pixels, precision)
    var column_block = block_idx.y
    var k_first = split(column_block, ceildiv(s.K, M * 16)) * M * 16
    var n_first = column_block * BLOCK_WARPS * N
    var c_first = n_first // taps * CHANNELS
    var most = _channels(s, CHANNELS)
    var piece = block_idx.x

    var dy_shared = external_memory[Float32, address_space=AddressSpace.SHARED, alignment=16]()
    var x_shared = dy_shared.unsafe_offset(M * 16 * DY_PLANE)
    var dy_offsets = unsafe_stack_allocation[TILE, DType.int32, address_space=AddressSpace.SHARED]()
    var x_offsets = x_shared.unsafe_offset(most * x_plane).unsafe_bitcast[Int32]()

    # where the columns of this thread are; those after the last: some that are there, not stored
    var column_at = Array[Int32, N](fill=0)
    comptime for j in range(N):
        var c = min(n_first + warp * N + j, ceildiv(s.C, CHANNELS) * taps - 1)
        var tap = split(c, taps)
        var row = tap
        var column = split(row, s.T)
        comptime if precision == FP32:
            column_at[j] = Int32((c * CHANNELS - c_first + t) * x_plane + (row * width + column) * EACH)
        else:
            column_at[j] = Int32((c * CHANNELS - c_first + g) * x_plane + (row * width + column) * EACH + 2 * t)

    var place = Int32(thread % 4 * (EACH // 4))

    @always_inline
    def bring(
        shared: type_of(dy_shared),
        offsets: type_of(dy_offsets),
        from_: Ptr,
        plane: Int,
        n: Int,
        held: Int,
        all: Int,
        row: Int,
    ) {imm}:
        """Rounds n pixels of channels into shared memory: `held` of `all`, for the others zeros."""
        var pixel = Int32(thread // 4)
        var c = Int32(0)
        while pixel >= Int32(n):
            pixel -= Int32(n)
            c += 1
        while c < Int32(all):
            var v = Array[Quad, AT_ONCE](fill=Quad(0))
            var at = Array[Int32, AT_ONCE](fill=-1)
            comptime for e in range(AT_ONCE):
                if c < Int32(all):
                    var offset = offsets[unsafe_offset=Int(pixel)]
                    at[e] = c * Int32(row) + pixel * Int32(EACH) + place
                    if offset >= 0 and c < Int32(held):
                        v[e] = from_.unsafe_offset(Int(c * Int32(plane) + offset)).unsafe_load[width=4, alignment=16]()
                pixel += Int32(BLOCK_THREADS // 4)
                while pixel >= Int32(n):
                    pixel -= Int32(n)
                    c += 1
            comptime for e in range(AT_ONCE):
                if at[e] >= 0:
                    comptime if terms(precision) == 1:
                        shared.unsafe_store[alignment=16](Int(at[e]), words[precision](v[e], v[e]))
                    else:
                        var two = words[precision](Quad(v[e][0], v[e][2], 0, 0), Quad(v[e][1], v[e][3], 0, 0))
                        shared.unsafe_store[alignment=8](Int(at[e]), two.slice[2]())

    # sums in fours, those of float32 with its output channels as columns
    comptime QUADS = 2 * N if precision == FP32 else M * N
    var acc = Array[Quad, QUADS](uninitialized=True)
    comptime for i in range(QUADS):  # a fill of so many would be a loop, for which they would have to be in memory
        acc[i] = Quad(0)
    for unit in range(piece * s.chunk, min(s.G * s.tiles, (piece + 1) * s.chunk)):
        var group = unit
        var p_first = split(group, s.tiles)
        var q_first = split(p_first, ceildiv(s.Q, s.across)) * s.across
        p_first *= TILE // s.across
        barrier()
        find_pixels(dy_offsets, TILE, s.across, p_first, q_first, s.P, s.Q)
        find_pixels(x_offsets, pixels, width, p_first * s.S, q_first * s.S, s.H, s.W)
        barrier()
        bring(
            dy_shared,
            dy_offsets,
            dy.at(shard).unsafe_offset((group * s.K + k_first) * s.P * s.Q * LANES + thread % 4 * 4),
            s.P * s.Q * LANES,
            TILE,
            min(M * 16, s.K - k_first),
            M * 16,
            DY_PLANE,
        )
        bring(
            x_shared,
            x_offsets,
            x.at(shard).unsafe_offset((group * s.C + c_first) * s.H * s.W * LANES + thread % 4 * 4),
            s.H * s.W * LANES,
            pixels,
            s.C - c_first,
            most,
            x_plane,
        )
        barrier()
        var pa = dy_shared.unsafe_offset(g * DY_PLANE + (0 if precision == FP32 else 2 * t))
        for row in range(TILE // s.across):
            var pb = x_shared.unsafe_offset(row * s.S * width * EACH)
            for _ in range(s.across):
                comptime if precision == FP32:
                    for four in range(0, LANES, 4):
                        var fa = Array[Quad, 8](fill=Quad(0))
                        comptime for i in range(8):
                            fa[i] = pa.unsafe_offset(8 * i * DY_PLANE + four).unsafe_load[width=4, alignment=16]()
                        comptime for j in range(N):
                            var fb = pb.unsafe_offset(Int(column_at[j]) + four).unsafe_load[width=4, alignment=16]()
                            comptime for i in range(8):
                                comptime for e in range(4):
                                    acc[2 * j + i // 4][i % 4] = fa[i][e].fma(fb[e], acc[2 * j + i // 4][i % 4])
                else:
                    comptime for step in range(STEPS):
                        var fa = Array[Quad, M](fill=Quad(0))
                        comptime for m in range(M):
                            comptime for r in range(2):
                                var two = pa.unsafe_offset((16 * m + 8 * r) * DY_PLANE + 8 * step).unsafe_load[
                                    width=2, alignment=8
                                ]()
                                fa[m][r] = two[0]
                                fa[m][2 + r] = two[1]
                        comptime for j in range(N):
                            var fb = pb.unsafe_offset(Int(column_at[j]) + 8 * step).unsafe_load[width=2, alignment=8]()
                            comptime for m in range(M):
                                multiply[precision](acc[m * N + j], fa[m], fb)
                pa = pa.unsafe_offset(EACH)
                pb = pb.unsafe_offset(s.S * EACH)

    var all = s.C * taps  # weights of an output channel
    var out = to.at(shard).unsafe_offset((piece * s.K + k_first) * all)

    @always_inline
    def put(k: Int, i: Int, v: Float32) {imm}:
        """Writes weight i of output channel k of the block."""
        if k < s.K - k_first and i < all:
            var p = out.unsafe_offset(k * all + i)
            p[] = p[] + v if accumulate != 0 else v

    comptime RUN = CHANNELS * N  # neighbours of an output channel, where a warp has all taps of its input channels
    if N == MOST and taps == N:
        # Through shared memory, so that neighbouring threads write neighbours. RUN keeps the threads of a warp in
        # different banks, two in one on tensor cores.
        barrier()
        var mine = dy_shared.unsafe_offset(warp * M * 16 * RUN)
        comptime for q in range(QUADS):
            comptime for e in range(4):
                comptime if precision == FP32:
                    mine[unsafe_offset=(g + q % 2 * 32 + e * 8) * RUN + t * N + q // 2] = acc[q][e]
                else:
                    comptime row = q // N * 16 + e // 2 * 8
                    mine[unsafe_offset=(row + g) * RUN + (2 * t + e % 2) * N + q % N] = acc[q][e]
        barrier()
        for k in range(warp, M * 16, BLOCK_WARPS):
            var i = lane
            while i < BLOCK_WARPS * RUN:
                var column = i
                var run = dy_shared.unsafe_offset(k * RUN + split(column, RUN))
                put(k, c_first * taps + i, run[unsafe_offset=column * M * 16 * RUN])
                i += WARP_SIZE
    else:
        comptime for j in range(N):
            var c = n_first + warp * N + j
            var tap = split(c, taps)
            c *= CHANNELS
            comptime if precision == FP32:
                if c + t < s.C:
                    comptime for i in range(8):
                        put(g + 8 * i, (c + t) * taps + tap, acc[2 * j + i // 4][i % 4])
            else:
                comptime for e in range(2):
                    if c + 2 * t + e < s.C:
                        comptime for m in range(M):
                            comptime for r in range(2):
                                put(16 * m + 8 * r + g, (c + 2 * t + e) * taps + tap, acc[m * N + j][2 * r + e])


def _add(dw: Operand, pieces_of: Ptr, pieces: Int32, n_: Int32, fold: Int32, shards: Int32, accumulate: Int32):
    """Adds each shard's pieces in order, then the shards of a buffer; a thread has one number."""
    var n = Int(n_)
    var i = global_idx.x
    if i >= n:
        return
    var first = block_idx.y * Int(fold)
    var held = min(Int(fold), Int(shards) - first)
    var sums = Array[SIMD[F32, 1], 8](fill=0)
    comptime for j in range(8):
        if j < held:
            var p = pieces_of.unsafe_offset((first + j) * Int(pieces) * n + i)
            var sum = p[]
            for _ in range(1, Int(pieces)):
                p = p.unsafe_offset(n)
                sum += p[]
            sums[j] = sum
    var to = dw.at(block_idx.y).unsafe_offset(i)
    var v = tree_of(sums, UInt32(held))[0]
    to[] = to[] + v if accumulate != 0 else v


def _bias(db: Operand, dy: Operand, fold: Int32, shards: Int32, accumulate: Int32, sizes: Sizes):
    """A block has one channel of a buffer; a thread adds every THREADS-th four samples, a shard after the other."""
    var s = Shape(sizes)
    var partial = unsafe_stack_allocation[WARPS, F32, address_space=AddressSpace.SHARED]()
    var k = block_idx.x
    var first = block_idx.y * Int(fold)
    var held = min(Int(fold), Int(shards) - first)
    var plane = s.P * s.Q * LANES
    var sums = Array[SIMD[F32, 1], 8](fill=0)
    comptime for j in range(8):
        if j < held:
            var four = Quad(0)
            for g in range(s.G):
                var p = dy.at(first + j).unsafe_offset((g * s.K + k) * plane)
                var i = 4 * thread_idx.x
                while i < plane:
                    four += p.unsafe_load[width=4, alignment=16](i)
                    i += 4 * THREADS
            var sum = (four[0] + four[1]) + (four[2] + four[3])
            comptime for level in range(5):
                sum += shuffle_xor(sum, UInt32(1 << level))
            barrier()
            if thread_idx.x % WARP_SIZE == 0:
                partial[unsafe_offset=thread_idx.x // WARP_SIZE] = sum
            barrier()
            sum = partial[unsafe_offset=0]
            comptime for i in range(1, WARPS):
                sum += partial[unsafe_offset=i]
            sums[j] = sum
    if thread_idx.x == 0:
        var to = db.at(block_idx.y).unsafe_offset(k)
        var v = tree_of(sums, UInt32(held))[0]
        to[] = to[] + v if accumulate != 0 else v


# --- how it is cut --------------------------------------------------------------------------------


def _cut(shape: Shape) -> Shape:
    """With its pieces: `chunk` times 16 pixels of `tiles` of a group each; depends on the layer's sizes alone."""
    var s = tiled(shape)
    s.tiles = ceildiv(s.P, TILE // s.across) * ceildiv(s.Q, s.across)
    s.chunk = ceildiv(s.G * s.tiles, max(1, (2 * ENOUGH if s.precision == FP32 else ENOUGH) // _tiles(s)))
    s.pieces = ceildiv(s.G * s.tiles, s.chunk)
    return s


def _tiles(s: Shape) -> Int:
    """Blocks that the weights are cut into."""
    var columns = ceildiv(s.C, _tile(s.precision)) * s.R * s.T
    return ceildiv(s.K, M * 16) * ceildiv(columns, BLOCK_WARPS * _tiles_of_a_warp(s))


def _shared_bytes(s: Shape) -> Int:
    var pixels = pixels_around(s)
    var tile = _tile(s.precision)
    var product = M * 16 * _plane(TILE, s.precision) + _channels(s, tile) * _plane(pixels, s.precision) + pixels
    return 4 * max(product, BLOCK_WARPS * M * 16 * tile * MOST if _tiles_of_a_warp(s) == MOST else 0)


def worth_it_for_weights(shape: Shape) -> Bool:
    """Whether the gradient of the weights is large enough for these kernels, and small enough for shared memory."""
    var s = tiled(shape)
    var small = s.C * s.R * s.T < 32 or s.K < 16 or s.C < 5
    if s.precision == FP32:
        small = s.R * s.T < 4 or s.K < 32 or s.C < 16
    return not small and _shared_bytes(s) <= SHARED_LIMIT


def scratch_mma(shards: Int, fold: Int, shape: Shape) -> Int:
    """Floats of scratch memory for the pieces."""
    var s = _cut(shape)
    return 0 if s.pieces * fold == 1 else shards * s.pieces * s.K * s.taps()


def _launch[precision: Int, N: Int](q: Queue, of: Gradients, shape: Shape, direct: Bool) raises:
    var s = shape
    q.enqueue_function[_weights[precision, N]](
        of.dw if direct else Operand(Int(of.scratch), s.pieces * s.K * s.taps()),
        of.dy,
        of.x,
        Int32(direct and of.accumulate),
        s.pack(),
        grid_dim=(s.pieces, _tiles(s), of.shards),
        block_dim=BLOCK_THREADS,
        shared_mem_bytes=_shared_bytes(s),
    )


def weight_gradient_mma[precision: Int](q: Queue, of: Gradients, shape: Shape) raises:
    """Launches _weights, _add unless it would add nothing, and _bias."""
    var s = _cut(shape)
    var direct = s.pieces * of.fold == 1
    if _tiles_of_a_warp(s) == MOST:
        _launch[precision, MOST](q, of, s, direct)
    else:
        comptime if precision != FP32:
            _launch[precision, 2](q, of, s, direct)
    var n = s.K * s.taps()
    var buffers = ceildiv(of.shards, of.fold)
    var fold = Int32(of.fold)
    var shards = Int32(of.shards)
    var accumulate = Int32(of.accumulate)
    if not direct:
        var grid = (blocks(n, THREADS), buffers)
        q.enqueue_function[_add](
            of.dw, of.scratch, Int32(s.pieces), Int32(n), fold, shards, accumulate, grid_dim=grid, block_dim=THREADS
        )
    q.enqueue_function[_bias](
        of.db, of.dy, fold, shards, accumulate, s.pack(), grid_dim=(s.K, buffers), block_dim=THREADS
    )
