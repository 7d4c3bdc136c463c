"""Convolution on the tensor cores of NVIDIA GPUs, for tf32, bf16 and fp16: implicit GEMM with mma.sync.

The product's sums run over taps here (forward, gradient of the input) and over samples and pixels in
conv2d_mma_weight.mojo.
The layout gives the fragments without a transpose: the 16 samples of a pixel are the columns of two tiles, or the 16
terms of one step. Activations go from global memory to registers and are rounded there, to the nearest, ties to even;
what neighbouring taps and the warps of a block load twice comes from the L1 cache. Which element of a fragment has
which term of the sum is free as long as both factors agree, and it is chosen so that loads are vectors.

Fragments of m16n8k16 (bf16, fp16; PTX ISA, "Matrix fragments for mma.m16n8k16"), lane = 4 g + t:
    A  element 4 h + 2 r + e is row g + 8 r, term 2 t + e + 8 h
    B  element 2 h + e is column g, term 2 t + e + 8 h
    C  element 2 r + e is row g + 8 r, column 2 t + e
and of m16n8k8 (tf32):
    A  element 2 h + r is row g + 8 r, term t + 4 h;   B  element h is column g, term t + 4 h
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation

from max.gpu import AddressSpace, WARP_SIZE, barrier, block_dim, block_idx, thread_idx
from max.gpu.compute.mma import mma
from max.gpu.memory import external_memory

from ..lanes import F32, LANES, Ptr
from .conv2d_tiles import ENOUGH_BLOCKS, Shape, Sizes, WARPS, rounded_tf32, split
from .launch import BF16, FP16, Operand, Queue, TF32, blocks

comptime TERMS = 16  # of a sum, in one step: one mma, or two of tf32
comptime ROWS = 2  # tiles of 16 output channels of a warp
comptime PIXELS = 4  # of a warp: 8 tiles of 8 columns
comptime SHARED_BYTES = 40960
comptime MOST_STEPS = 64  # of a chunk
comptime SharedInts = Pointer[Int32, MutUntrackedOrigin, address_space=AddressSpace.SHARED]


# --- fragments -------------------------------------------------------------------------


@always_inline
def kind(precision: Int) -> DType:
    """What a register holds of a factor."""
    if precision == BF16:
        return DType.bfloat16
    return DType.float16 if precision == FP16 else F32


@always_inline
def factors[precision: Int, n: Int](v: SIMD[F32, n]) -> SIMD[kind(precision), n]:
    """Rounded to the nearest, ties to even."""
    var u = v
    comptime if precision == TF32:
        comptime for i in range(n):
            u[i] = rounded_tf32(v[i])
    return u.cast[kind(precision)]()


@always_inline
def multiply[precision: Int](a: SIMD[kind(precision), 8], b: SIMD[kind(precision), 4], c: SIMD[F32, 4]) -> SIMD[F32, 4]:
    """One step of a 16 x 8 tile: adds 16 terms. Elements are those of m16n8k16."""
    var d = c
    comptime if precision == TF32:
        # Two products of 8 terms: h is which of them, e the half of its terms.
        comptime for h in range(2):
            var ah = SIMD[F32, 4](
                a[4 * h].cast[F32](), a[4 * h + 2].cast[F32](), a[4 * h + 1].cast[F32](), a[4 * h + 3].cast[F32]()
            )
            var bh = SIMD[F32, 2](b[2 * h].cast[F32](), b[2 * h + 1].cast[F32]())
            mma(d, ah, bh, d)
    else:
        mma(d, a, b, d)
    return d


# --- forward and gradient of the input ----------------------------------------------------


@always_inline
def bytes_of_a_step(precision: Int) -> Int:
    """Shared memory for 16 taps of one warp's channels."""
    return ROWS * WARP_SIZE * (32 if precision == TF32 else 16)


@always_inline
def _share_factors[
    precision: Int, padded: Bool
](
    weights: Pointer[Scalar[kind(precision)], MutUntrackedOrigin, address_space=AddressSpace.SHARED],
    offsets: SharedInts,
    places: SharedInts,
    w: Ptr,
    s: Shape,
    k_block: Int,
    first: Int,
    held: Int,
):
    """Copies the block's weights of `held` steps as fragments, and where the pixels of their taps are."""
    comptime STEP = ROWS * WARP_SIZE * 8
    var taps = s.C * s.R * s.T
    # `while`: a range whose step is not known checks its sign each time.
    var i = thread_idx.x
    while i < held * TERMS:
        var c = min(first * TERMS + i, taps - 1)
        var column = split(c, s.T)
        var row = split(c, s.R)
        offsets[unsafe_offset=i] = Int32(((c * s.H + row) * s.W + column) * LANES)
        comptime if padded:
            places[unsafe_offset=i] = Int32(row << 16 | column)
        i += block_dim.x
    i = thread_idx.x
    while i < held * s.k_warps * ROWS * WARP_SIZE:
        # lane, tile, step, warp: the order in memory
        var a_warp = i
        var a_lane = split(a_warp, WARP_SIZE)
        var m = split(a_warp, ROWS)
        var step = split(a_warp, held)
        var a = SIMD[F32, 8](0)
        comptime for h in range(2):
            comptime for r in range(2):
                comptime for e in range(2):
                    var k = k_block + (a_warp * ROWS + m) * 16 + 8 * r + a_lane // 4
                    var tap = (first + step) * TERMS + a_lane % 4 * 2 + e + 8 * h
                    if k < s.K and tap < taps:
                        comptime if padded:
                            var c = tap
                            var column = split(c, s.T)
                            var row = split(c, s.R)
                            a[4 * h + 2 * r + e] = w[unsafe_offset=(c * s.K + k) * s.WR * s.WT + s.turned(row, column)]
                        else:
                            a[4 * h + 2 * r + e] = w[unsafe_offset=k * taps + tap]
        var f = factors[precision, 8](a)
        var at = (a_warp * s.chunk + step) * STEP + m * WARP_SIZE * 8
        comptime if precision == TF32:
            # two vectors of 16 bytes, each next to those of the other lanes
            comptime for h in range(2):
                weights.unsafe_offset(at + (h * WARP_SIZE + a_lane) * 4).unsafe_store[alignment=16](
                    0, f.slice[4, offset=4 * h]()
                )
        else:
            weights.unsafe_offset(at + a_lane * 8).unsafe_store[alignment=16](0, f)
        i += block_dim.x


def _correlate[
    precision: Int, padded: Bool
](y: Ptr, y_step: Int64, x: Ptr, x_step: Int64, w: Ptr, b: Ptr, sizes: Sizes):
    """As _direct of conv2d_direct.mojo. A warp has ROWS x 16 output channels and PIXELS neighbours of one row.

    `chunk` is how many steps of 16 taps have their weights in shared memory at a time, as fragments.
    """
    comptime D = kind(precision)
    comptime STEP = ROWS * WARP_SIZE * 8  # elements
    var s = Shape(sizes)
    var weights = external_memory[Scalar[D], address_space=AddressSpace.SHARED, alignment=16]()
    # where a tap's pixel is, and its row and column as two halves of a number
    var offsets = unsafe_stack_allocation[MOST_STEPS * TERMS, DType.int32, address_space=AddressSpace.SHARED]()
    var places = unsafe_stack_allocation[
        MOST_STEPS * TERMS if padded else 1, DType.int32, address_space=AddressSpace.SHARED
    ]()
    var taps = s.C * s.R * s.T
    var shard = block_idx.z
    var lane = thread_idx.x % WARP_SIZE
    var t = lane % 4
    var row_of_tile = lane // 4
    var pixel_warp = thread_idx.x // WARP_SIZE
    var k_warp = split(pixel_warp, s.k_warps)
    var k_block = block_idx.y * s.k_warps * ROWS * 16
    var k_first = k_block + k_warp * ROWS * 16
    var steps = ceildiv(taps, TERMS)

    for tile in range(s.tiles):
        # Tiles of pixels, the last of a row moved back so that it ends with the row.
        var n = (block_idx.x * s.tiles + tile) * s.pixel_warps + pixel_warp
        var q_first = min(split(n, ceildiv(s.Q, PIXELS)) * PIXELS, s.Q - PIXELS)
        var p = split(n, s.P)
        var there = n < s.G
        var g = min(n, s.G - 1)
        var row = p * s.S - s.pad_rows
        var column = q_first * s.S - s.pad_columns
        # samples 2 row_of_tile and 2 row_of_tile + 1: the column of this thread in two tiles
        var xp = x.unsafe_offset(
            shard * Int(x_step) + (g * s.C * s.H * s.W + row * s.W + column) * LANES + 2 * row_of_tile
        )

        var acc = Array[SIMD[F32, 4], ROWS * PIXELS * 2](fill=SIMD[F32, 4](0))
        comptime if not padded:
            comptime for m in range(ROWS):
                comptime for r in range(2):
                    var k = k_first + 16 * m + 8 * r + row_of_tile
                    var bias = Float32(0)
                    if k < s.K:
                        bias = b[unsafe_offset=k]
                    comptime for i in range(PIXELS * 2):
                        acc[m * PIXELS * 2 + i][2 * r] = bias
                        acc[m * PIXELS * 2 + i][2 * r + 1] = bias

        var first = 0
        while first < steps:
            var held = min(s.chunk, steps - first)
            if tile == 0 or s.chunk < steps:
                if tile > 0 or first > 0:
                    barrier()
                _share_factors[precision, padded](weights, offsets, places, w, s, k_block, first, held)
                barrier()

            for step in range(held):
                var values = Array[SIMD[F32, 4], PIXELS * 2](fill=SIMD[F32, 4](0))
                comptime for h in range(2):
                    comptime for e in range(2):
                        var tap = step * TERMS + 2 * t + e + 8 * h
                        var from_ = xp.unsafe_offset(Int(offsets[unsafe_offset=tap]))
                        var place = 0
                        comptime if padded:
                            place = Int(places[unsafe_offset=tap])
                        var row_there = not padded or UInt32(row + (place >> 16)) < UInt32(s.H)
                        comptime for j in range(PIXELS):
                            var two = SIMD[F32, 2](0)
                            comptime if padded:
                                if row_there and UInt32(column + (place & 0xFFFF) + j) < UInt32(s.W):
                                    two = from_.unsafe_offset(j * LANES).unsafe_load[width=2, alignment=8]()
                            else:
                                two = from_.unsafe_offset(j * s.S * LANES).unsafe_load[width=2, alignment=8]()
                            values[2 * j][2 * h + e] = two[0]
                            values[2 * j + 1][2 * h + e] = two[1]
                var a = Array[SIMD[D, 8], ROWS](fill=SIMD[D, 8](0))
                var at = (k_warp * s.chunk + step) * STEP
                comptime for m in range(ROWS):
                    comptime if precision == TF32:
                        comptime for h in range(2):
                            var four = weights.unsafe_offset(at + (m * 2 + h) * WARP_SIZE * 4 + lane * 4).unsafe_load[
                                width=4, alignment=16
                            ]()
                            comptime for e in range(4):
                                a[m][4 * h + e] = four[e]
                    else:
                        a[m] = weights.unsafe_offset(at + (m * WARP_SIZE + lane) * 8).unsafe_load[
                            width=8, alignment=16
                        ]()
                comptime for j in range(PIXELS * 2):
                    var f = factors[precision, 4](values[j])
                    comptime for m in range(ROWS):
                        comptime i = m * PIXELS * 2 + j
                        acc[i] = multiply[precision](a[m], f, acc[i])
            first += s.chunk

        comptime for m in range(ROWS):
            comptime for r in range(2):
                var k = k_first + 16 * m + 8 * r + row_of_tile
                if there and k < s.K:
                    comptime for j in range(PIXELS):
                        comptime i = (m * PIXELS + j) * 2
                        # columns 2 t and 2 t + 1 of two tiles: samples 4 t to 4 t + 3
                        var v = SIMD[F32, 4](acc[i][2 * r], acc[i + 1][2 * r], acc[i][2 * r + 1], acc[i + 1][2 * r + 1])
                        if s.relu != 0:
                            v = v.lt(0).select(SIMD[F32, 4](0), v)
                        y.unsafe_offset(
                            shard * Int(y_step)
                            + ((g * s.K + k) * s.YP * s.YQ + s.pixel(p, q_first + j)) * LANES
                            + 4 * t
                        ).unsafe_store[alignment=16](0, v)


@always_inline
def worth_it(s: Shape) -> Bool:
    """Whether a correlation is large enough for tensor cores; depends on the layer alone."""
    return s.K >= 16 and s.C * s.R * s.T >= 2 * TERMS and s.Q >= PIXELS and s.R < 1 << 15 and s.T < 1 << 15


def correlate_mma[
    precision: Int, padded: Bool
](q: Queue, shards: Int, y: Operand, x: Operand, w: Operand, b: Operand, shape: Shape) raises:
    """Launches _correlate."""
    var s = shape
    s.k_warps = min(ceildiv(s.K, ROWS * 16), 4)
    s.chunk = min(ceildiv(s.C * s.R * s.T, TERMS), SHARED_BYTES // (s.k_warps * bytes_of_a_step(precision)), MOST_STEPS)
    s.pixel_warps = WARPS // s.k_warps
    var n = blocks(s.G * s.P * ceildiv(s.Q, PIXELS), s.pixel_warps)
    var across_k = ceildiv(s.K, s.k_warps * ROWS * 16)
    if s.chunk == ceildiv(s.C * s.R * s.T, TERMS):
        # Fewer blocks that load the weights, as long as there are enough.
        s.tiles = max(1, min(8, n * across_k * shards // ENOUGH_BLOCKS))
    q.enqueue_function[_correlate[precision, padded]](
        y.ptr(),
        y.step(),
        x.ptr(),
        x.step(),
        w.ptr(),
        b.ptr(),
        s.pack(),
        grid_dim=(ceildiv(n, s.tiles), across_k, shards),
        block_dim=s.pixel_warps * s.k_warps * WARP_SIZE,
        shared_mem_bytes=s.chunk * s.k_warps * bytes_of_a_step(precision),
    )
