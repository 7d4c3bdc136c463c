"""Large convolutions on NVIDIA GPUs, implicit GEMM: with mma.sync on tensor cores for tf32, bf16 and fp16, and with
float32 multiply-adds.

Forward and gradient of the input; conv2d_mma_weight.mojo has the gradient of the weights. A block has 16 neighbouring
pixels of a group of samples and up to 128 output channels. It goes over the input channels a *chunk* at a time: the
chunk's pixels, with those around that the taps reach, are rounded into shared memory once and all taps multiply them
from there; the next chunk is loaded meanwhile, a part beside each tap. Weights come a row of taps at a time with
cp.async, from scratch memory, where a launch before has put them, rounded, in the order of the fragments.

A *word* has what a register of a fragment has: two channels of a sample in bf16 and fp16, else one. A chunk is 8 words.
Fragments of m16n8k16 (bf16, fp16; PTX ISA, "Matrix fragments for mma.m16n8k16"), and in words those of m16n8k8 (tf32),
lane = 4 g + t:
    A  register 2 h + r is row g + 8 r, word t + 4 h
    B  register h is column g, word t + 4 h
    C  element 2 r + e is row g + 8 r, column 2 t + e
Columns g of two neighbouring tiles are samples 2 g and 2 g + 1 of a pixel: both are one load, and results vectors.
For float32 a thread, lane = 4 g + t, has channels 4 g to 4 g + 3 of each 32 and samples 4 t to 4 t + 3.
Each sum has the chunks in order, of each the rows and columns of taps, of each its channels, as the hardware adds them.
"""

from std.math import ceildiv
from std.memory import bitcast

from max.gpu import AddressSpace, WARP_SIZE, barrier, block_dim, block_idx, global_idx, thread_idx
from max.gpu.compute.mma import mma
from max.gpu.memory import async_copy, async_copy_commit_group, async_copy_wait_group, external_memory

from ..lanes import F32, LANES, Ptr
from .conv2d_tiles import ENOUGH_BLOCKS, Shape, Sizes, THREADS, quotient, split
from .gemm_tiles import Quad, SHARED_LIMIT, Shared, paired, rounded
from .launch import BF16, FP16, FP32, Operand, Queue, TF32, blocks

comptime WORDS = 8  # of a chunk
comptime PIXELS = 4  # of a warp, neighbours in a row
comptime PIXEL_WARPS = 4
comptime TILE = PIXELS * PIXEL_WARPS  # pixels of a block
comptime RING = 3  # rows of taps whose weights are in shared memory or on their way
comptime AHEAD = 2  # units that a thread has on their way beside a tap
comptime SharedInts = Pointer[Int32, MutUntrackedOrigin, address_space=AddressSpace.SHARED]
comptime FRAGMENT = 4 * WARP_SIZE  # words of a tile of A


# --- words --------------------------------------------------------------------------------


@always_inline
def terms(precision: Int) -> Int:
    """What a word has of the terms of a sum."""
    return 1 if precision == TF32 or precision == FP32 else 2


@always_inline
def words[precision: Int](v0: Quad, v1: Quad) -> Quad:
    """Four words of two terms each, or of one, those of v0. Rounded to the nearest, ties to even."""
    comptime if terms(precision) == 1:
        return rounded[precision](v0)
    else:
        var word = Quad()
        comptime for j in range(4):
            word[j] = paired[precision](v0[j], v1[j])
        return word


@always_inline
def multiply[precision: Int](mut c: Quad, a: Quad, b: SIMD[F32, 2]):
    """One step of a 16 x 8 tile: adds the products of 8 words."""
    comptime if precision == TF32:
        mma(c, a, b, c)
    elif precision == BF16:
        mma(c, bitcast[DType.bfloat16, 8](a), bitcast[DType.bfloat16, 4](b), c)
    else:
        mma(c, bitcast[DType.float16, 8](a), bitcast[DType.float16, 4](b), c)


# --- a block's pixels -----------------------------------------------------------------------


@always_inline
def columns_around(s: Shape) -> Int:
    """Columns that the taps of a block's columns reach."""
    return (s.across - 1) * s.S + s.T


@always_inline
def pixels_around(s: Shape) -> Int:
    """Pixels that the taps of a block's pixels reach."""
    return ((TILE // s.across - 1) * s.S + s.R) * columns_around(s)


@always_inline
def plane_of(pixels: Int, each: Int) -> Int:
    """Words from one plane of pixels of `each` words to the next in shared memory: 8 more than a multiple of 32, so
    that four planes are in different banks.
    """
    return ceildiv(pixels * each, 32) * 32 + 8


def tiled(shape: Shape) -> Shape:
    """With the shape of a block's pixels that needs the fewest blocks: `across` columns."""
    var s = shape
    var least = 0
    for columns in [4, 8, 16]:
        var n = ceildiv(s.P, TILE // columns) * ceildiv(s.Q, columns)
        if least == 0 or n < least:
            least = n
            s.across = columns
    return s


@always_inline
def find_pixels(to: SharedInts, n: Int, across: Int, row: Int, column: Int, H: Int, W: Int):
    """Writes where n pixels in rows of `across`, from (row, column) on, are in a plane of H x W; -1: outside."""
    var i = thread_idx.x
    while i < n:
        var h = i
        var w = split(h, across) + column
        h += row
        to[unsafe_offset=i] = Int32((h * W + w) * LANES if 0 <= h < H and 0 <= w < W else -1)
        i += block_dim.x


# --- weights as fragments -------------------------------------------------------------------


def _pack[precision: Int, padded: Bool](to: Ptr, w: Ptr, sizes: Sizes):
    """Writes the weights as (blocks of channels, chunks, rows of taps, columns, tiles of a block, lanes, registers),
    for float32 the tiles of a warp as (words, channels). A thread has all taps of a place.
    """
    var s = Shape(sizes)
    var block = global_idx.x
    var i = split(block, s.tiles * FRAGMENT)
    var out = to.unsafe_offset((global_idx.x - i) * s.R * s.T + i)
    var c = split(block, s.chunk) * WORDS
    if block >= ceildiv(s.K, s.tiles * 16):
        return
    var k = block * s.tiles * 16
    comptime if precision == FP32:
        var rows = quotient(s.tiles, s.k_warps) * 16
        k += split(i, rows)
        c += split(i, WORDS)
        k += i * rows
    else:
        var register = split(i, 4)
        var lane = split(i, WARP_SIZE)
        k += i * 16 + lane // 4 + register % 2 * 8
        c += lane % 4 + register // 2 * 4
    for r in range(s.R):
        for t in range(s.T):
            var v = SIMD[F32, 2](0)
            comptime for e in range(terms(precision)):
                var channel = c * terms(precision) + e
                if k < s.K and channel < s.C:
                    comptime if padded:
                        v[e] = w[unsafe_offset=(channel * s.K + k) * s.WR * s.WT + s.turned(r, t)]
                    else:
                        v[e] = w[unsafe_offset=((k * s.C + channel) * s.R + r) * s.T + t]
            out[unsafe_offset=(r * s.T + t) * s.tiles * FRAGMENT] = words[precision](Quad(v[0]), Quad(v[1]))[0]


def weights_mma(s: Shape) -> Int:
    """Words of scratch memory for the weights of a correlation, at most; those of one term are the most."""
    return ceildiv(s.K, 128) * 128 * ceildiv(s.C, WORDS) * WORDS * s.R * s.T


@always_inline
def row_of[precision: Int](i: Int, g: Int) -> Int:
    """Which of a warp's channels a thread has in its i-th row."""
    return i // 4 * 32 + g * 4 + i % 4 if precision == FP32 else i * 8 + g


# --- the product -----------------------------------------------------------------------------


def _correlate[precision: Int, M: Int, padded: Bool](y: Operand, x: Operand, weights: Ptr, b: Ptr, sizes: Sizes):
    """A warp has M x 16 output channels of PIXELS pixels; `k_warps` of a block differ in their channels."""
    comptime TERMS = terms(precision)
    var s = Shape(sizes)
    var shard = block_idx.z
    var thread = thread_idx.x
    var threads = PIXEL_WARPS * WARP_SIZE * s.k_warps
    var lane = thread % WARP_SIZE
    var t = lane % 4
    var g = lane // 4
    var warp = thread // WARP_SIZE
    var k_warp = warp // PIXEL_WARPS
    var chunks = s.chunk

    # the block's pixels, and the warp's: all in one row
    var group = block_idx.x
    var q_first = split(group, ceildiv(s.Q, s.across)) * s.across
    var p_first = split(group, ceildiv(s.P, TILE // s.across)) * (TILE // s.across)
    var warp_row = warp % PIXEL_WARPS * PIXELS
    var warp_column = split(warp_row, s.across)
    var width = columns_around(s)
    var pixels = pixels_around(s)
    var plane = plane_of(pixels, LANES)

    var ring = external_memory[Float32, address_space=AddressSpace.SHARED, alignment=16]()
    var row_words = s.T * s.k_warps * M * FRAGMENT
    var activations = ring.unsafe_offset(RING * row_words)
    var offsets = activations.unsafe_offset((2 if chunks > 1 else 1) * WORDS * plane).unsafe_bitcast[Int32]()
    var here = x.at(shard).unsafe_offset(group * s.C * s.H * s.W * LANES + thread % 4 * 4)
    var x_plane = s.H * s.W * LANES
    var packed = weights.unsafe_offset(block_idx.y * chunks * s.R * row_words)

    # Units, four words each, that this thread brings into shared memory: of a chunk each threads / 4th pixel. In 32
    # bits, where multiplications are short.
    var pixel = Int32(0)
    var word = Int32(0)
    var chunk = Int32(0)
    var n = Int32(pixels)
    var place = Int32(thread % 4 * 4)

    @always_inline
    def begin(next: Int) {mut pixel, mut word, mut chunk, imm}:
        chunk = Int32(next)
        word = Int32(0 if next < chunks else WORDS)
        pixel = Int32(thread // 4)
        while pixel >= n:
            pixel -= n
            word += 1

    @always_inline
    def load(mut v0: Quad, mut v1: Quad, mut at: Int32) {mut pixel, mut word, imm}:
        """Loads the next unit, and says where in shared memory it goes; nowhere, -1, after the last."""
        v0 = Quad(0)
        v1 = Quad(0)
        at = -1
        if word < Int32(WORDS):
            var offset = offsets[unsafe_offset=Int(pixel)]
            var c = (chunk * Int32(WORDS) + word) * Int32(TERMS)
            at = ((chunk & 1) * Int32(WORDS) + word) * Int32(plane) + pixel * Int32(LANES) + place
            if offset >= 0:
                var from_ = here.unsafe_offset(Int(c * Int32(x_plane) + offset))
                if c < Int32(s.C):
                    v0 = from_.unsafe_load[width=4, alignment=16]()
                comptime if TERMS == 2:
                    if c + 1 < Int32(s.C):
                        v1 = from_.unsafe_offset(x_plane).unsafe_load[width=4, alignment=16]()
            pixel += Int32(threads // 4)
            while pixel >= n:
                pixel -= n
                word += 1

    @always_inline
    def store(v0: Quad, v1: Quad, at: Int32) {imm}:
        if at >= 0:
            activations.unsafe_store[alignment=16](Int(at), words[precision](v0, v1))

    @always_inline
    def copy_row(step: Int, slot: Int) {imm}:
        """Sends for the weights of a row of taps."""
        if step < chunks * s.R:
            var from_ = packed.unsafe_offset(step * row_words)
            var to = ring.unsafe_offset(slot * row_words)
            var i = 4 * thread
            while i < row_words:
                async_copy[16](
                    from_.unsafe_offset(i).unsafe_address_space_cast[AddressSpace.GLOBAL](), to.unsafe_offset(i)
                )
                i += 4 * threads
        async_copy_commit_group()

    find_pixels(offsets, pixels, width, p_first * s.S - s.pad_rows, q_first * s.S - s.pad_columns, s.H, s.W)
    comptime for i in range(RING - 1):
        copy_row(i, i)
    barrier()
    begin(0)
    while word < Int32(WORDS):
        var v = Array[Quad, AHEAD](fill=Quad(0))
        var u = Array[Quad, AHEAD](fill=Quad(0))
        var at = Array[Int32, AHEAD](fill=0)
        comptime for e in range(AHEAD):
            load(v[e], u[e], at[e])
        comptime for e in range(AHEAD):
            store(v[e], u[e], at[e])

    var k_first = (block_idx.y * s.k_warps + k_warp) * M * 16
    var acc = Array[Quad, M * PIXELS * 2](fill=Quad(0))
    comptime if not padded:
        comptime for i in range(2 * M):
            var k = k_first + row_of[precision](i, g)
            var bias = Float32(0)
            if k < s.K:
                bias = b[unsafe_offset=k]
            comptime for j in range(PIXELS):
                comptime if precision == FP32:
                    acc[i * PIXELS + j] = Quad(bias)
                else:
                    comptime for half in range(2):
                        comptime for e in range(2):
                            acc[(i // 2 * PIXELS + j) * 2 + half][i % 2 * 2 + e] = bias

    var each = ceildiv(ceildiv(WORDS * 4 * pixels, threads), s.R * s.T)  # units beside a tap
    var corner = (warp_row * s.S * width + warp_column * s.S) * LANES
    comptime if precision == FP32:
        corner += 4 * t
    else:
        corner += t * plane + 2 * g
    var slot = 0
    var step = 0
    for c in range(chunks):
        begin(c + 1)
        for r in range(s.R):
            async_copy_wait_group(RING - 2)
            barrier()
            copy_row(step + RING - 1, slot + RING - 1 if slot == 0 else slot - 1)
            var pa = ring.unsafe_offset(
                slot * row_words + k_warp * M * FRAGMENT + 4 * (g if precision == FP32 else lane)
            )
            var pb = activations.unsafe_offset(c % 2 * WORDS * plane + corner + r * width * LANES)
            for _ in range(s.T):
                var v = Array[Quad, AHEAD](fill=Quad(0))
                var u = Array[Quad, AHEAD](fill=Quad(0))
                var at = Array[Int32, AHEAD](fill=-1)
                comptime for e in range(AHEAD):
                    if e < each:
                        load(v[e], u[e], at[e])
                comptime if precision == FP32:
                    comptime for c in range(WORDS):
                        var fb = Array[Quad, PIXELS](fill=Quad(0))
                        comptime for j in range(PIXELS):
                            fb[j] = pb.unsafe_offset(c * plane + j * s.S * LANES).unsafe_load[width=4, alignment=16]()
                        comptime for h in range(M // 2):
                            var fa = pa.unsafe_offset(c * 16 * M + 32 * h).unsafe_load[width=4, alignment=16]()
                            comptime for e in range(4):
                                comptime for j in range(PIXELS):
                                    comptime i = (4 * h + e) * PIXELS + j
                                    acc[i] = fb[j].fma(Quad(fa[e]), acc[i])
                else:
                    var fa = Array[Quad, M](fill=Quad(0))
                    comptime for m in range(M):
                        fa[m] = pa.unsafe_offset(m * FRAGMENT).unsafe_load[width=4, alignment=16]()
                    comptime for j in range(PIXELS):
                        var pixel_at = pb.unsafe_offset(j * s.S * LANES)
                        var low = pixel_at.unsafe_load[width=2, alignment=8]()
                        var high = pixel_at.unsafe_offset(4 * plane).unsafe_load[width=2, alignment=8]()
                        comptime for half in range(2):
                            var fb = SIMD[F32, 2](low[half], high[half])
                            comptime for m in range(M):
                                multiply[precision](acc[(m * PIXELS + j) * 2 + half], fa[m], fb)
                comptime for e in range(AHEAD):
                    store(v[e], u[e], at[e])
                for _ in range(AHEAD, each):
                    load(v[0], u[0], at[0])
                    store(v[0], u[0], at[0])
                pa = pa.unsafe_offset(s.k_warps * M * FRAGMENT)
                pb = pb.unsafe_offset(LANES)
            step += 1
            slot = slot + 1 if slot < RING - 1 else 0

    var p = p_first + warp_row
    comptime for i in range(2 * M):
        var k = k_first + row_of[precision](i, g)
        if p < s.P and k < s.K:
            comptime for j in range(PIXELS):
                var q = q_first + warp_column + j
                if q < s.Q:
                    var v = acc[i * PIXELS + j]
                    comptime if precision != FP32:
                        # columns 2 t and 2 t + 1 of two tiles: samples 4 t to 4 t + 3
                        comptime at = (i // 2 * PIXELS + j) * 2
                        comptime r = i % 2 * 2
                        v = Quad(acc[at][r], acc[at + 1][r], acc[at][r + 1], acc[at + 1][r + 1])
                    if s.relu != 0:
                        v = v.lt(0).select(Quad(0), v)
                    y.at(shard).unsafe_offset(
                        ((group * s.K + k) * s.YP * s.YQ + s.pixel(p, q)) * LANES + 4 * t
                    ).unsafe_store[alignment=16](0, v)


# --- which tile ---------------------------------------------------------------------------------


def _shared_bytes(s: Shape, tiles: Int) -> Int:
    """Shared memory of a block; `s` is tiled and its chunks are known."""
    var pixels = pixels_around(s)
    var activations = (2 if s.chunk > 1 else 1) * WORDS * plane_of(pixels, LANES)
    return 4 * (RING * s.T * tiles * FRAGMENT + activations + pixels)


def worth_it(shape: Shape) -> Bool:
    """Whether a correlation is large enough for these kernels and fits shared memory; depends on the layer alone."""
    var s = tiled(shape)
    s.chunk = 2
    var small = s.K < 32 or s.C < 16 if s.precision == FP32 else s.K < 16 or s.C < 5 or s.C * s.R * s.T < 32
    if small or s.P * s.Q < 12 or s.C * s.H * s.W * LANES >= 1 << 31:
        return False
    return _shared_bytes(s, 4) <= SHARED_LIMIT


def _launch[
    precision: Int, M: Int, padded: Bool
](
    q: Queue, shards: Int, y: Operand, x: Operand, w: Operand, b: Operand, scratch: Ptr, shape: Shape, k_warps: Int
) raises:
    var s = shape
    s.k_warps = k_warps
    s.tiles = k_warps * M  # tiles of 16 channels of a block
    var across = ceildiv(s.K, s.tiles * 16)
    var packed = across * s.tiles * s.chunk * FRAGMENT
    q.enqueue_function[_pack[precision, padded]](
        scratch, w.ptr(), s.pack(), grid_dim=blocks(packed, THREADS), block_dim=THREADS
    )
    q.enqueue_function[_correlate[precision, M, padded]](
        y,
        x,
        scratch,
        b.ptr(),
        s.pack(),
        grid_dim=(_blocks(s), across, shards),
        block_dim=PIXEL_WARPS * k_warps * WARP_SIZE,
        shared_mem_bytes=_shared_bytes(s, s.tiles),
    )


def _blocks(s: Shape) -> Int:
    """Blocks of pixels of a shard."""
    return s.G * ceildiv(s.P, TILE // s.across) * ceildiv(s.Q, s.across)


def correlate_mma[
    precision: Int, padded: Bool
](q: Queue, shards: Int, y: Operand, x: Operand, w: Operand, b: Operand, scratch: Ptr, shape: Shape) raises:
    """Launches _pack and _correlate; `scratch` has weights_mma words."""
    var s = tiled(shape)
    s.chunk = ceildiv(s.C, WORDS * terms(precision))
    # The tile with the most products for each load, as long as there are enough blocks.
    var sixty_fours = ceildiv(s.K, 64)
    if s.K <= 32 or _blocks(s) * sixty_fours * shards < ENOUGH_BLOCKS // 8:
        _launch[precision, 2, padded](q, shards, y, x, w, b, scratch, s, 1)
    elif sixty_fours % 2 == 0 and _shared_bytes(s, 8) <= SHARED_LIMIT:
        _launch[precision, 4, padded](q, shards, y, x, w, b, scratch, s, 2)
    else:
        _launch[precision, 4, padded](q, shards, y, x, w, b, scratch, s, 1)
