"""Gradient of a convolution's weights on the tensor cores of NVIDIA GPUs; conv2d_mma.mojo says how the fragments lie.

One pixel is one step of a product: its 16 samples are the terms. As in conv2d_weight.mojo a shard's pixels are cut into
pieces by the layer's sizes, and a second launch adds them.
"""

from std.math import ceildiv

from max.gpu import WARP_SIZE, block_idx, thread_idx
from max.gpu.primitives.warp import shuffle_xor

from ..lanes import F32, LANES, Ptr
from .conv2d_mma import ROWS, TERMS, factors, kind, multiply
from .conv2d_tiles import Shape, Sizes, split
from .conv2d_weight import Gradients, launch_sums, tiles_and_piece
from .launch import Queue

comptime TAP_TILES = 4  # tiles of 8 taps of a warp


def _weights[
    precision: Int
](scratch: Ptr, dy: Ptr, dy_step: Int64, x: Ptr, x_step: Int64, sizes: Sizes):  # (shards, pieces, weights + biases)
    """A warp has ROWS x 16 output channels x TAP_TILES x 8 taps and one piece of the pixels, `units` rows of them.

    One pixel is one step: its 16 samples are the terms.
    """
    var s = Shape(sizes)
    var shard = block_idx.z
    var lane = thread_idx.x % WARP_SIZE
    var t = lane % 4
    var row = lane // 4
    var k_tile, tap_tile, piece = tiles_and_piece(s, ceildiv(s.K, ROWS * 16))
    var k_first = k_tile * ROWS * 16
    var tap_first = tap_tile * TAP_TILES * 8
    var taps = s.C * s.R * s.T
    if k_first >= s.K or tap_first >= taps or piece >= s.pieces:
        return
    var plane = s.P * s.Q * LANES

    # Rows and columns that do not exist: the last one again, not stored.
    var x_at = Array[Int, TAP_TILES](fill=0)
    comptime for j in range(TAP_TILES):
        var c = min(tap_first + 8 * j + row, taps - 1)
        var column = split(c, s.T)
        var r = split(c, s.R)
        x_at[j] = ((c * s.H + r) * s.W + column) * LANES + 4 * t
    var dy_at = Array[Int, ROWS * 2](fill=0)
    comptime for i in range(ROWS * 2):
        dy_at[i] = min(k_first + 8 * i + row, s.K - 1) * plane + 4 * t

    var acc = Array[SIMD[F32, 4], ROWS * TAP_TILES](fill=SIMD[F32, 4](0))
    var bias = Array[Float32, ROWS * 2](fill=0)
    for unit in range(piece * s.units, min(s.G * s.P, (piece + 1) * s.units)):
        var g = unit
        var p = split(g, s.P)
        var dp = dy.unsafe_offset(shard * Int(dy_step) + g * s.K * plane + p * s.Q * LANES)
        var xp = x.unsafe_offset(shard * Int(x_step) + (g * s.C * s.H + p * s.S) * s.W * LANES)
        for _ in range(s.Q):
            var b = Array[SIMD[kind(precision), 4], TAP_TILES](fill=SIMD[kind(precision), 4](0))
            comptime for j in range(TAP_TILES):
                b[j] = factors[precision, 4](xp.unsafe_offset(x_at[j]).unsafe_load[width=4, alignment=16]())
            comptime for m in range(ROWS):
                # samples 4 t + 2 h + e are the terms 2 t + e + 8 h, here as in b
                var a = SIMD[F32, 8](0)
                comptime for r in range(2):
                    var four = dp.unsafe_offset(dy_at[2 * m + r]).unsafe_load[width=4, alignment=16]()
                    if tap_first == 0:
                        bias[2 * m + r] += (four[0] + four[1]) + (four[2] + four[3])
                    comptime for h in range(2):
                        comptime for e in range(2):
                            a[4 * h + 2 * r + e] = four[2 * h + e]
                var f = factors[precision, 8](a)
                comptime for j in range(TAP_TILES):
                    acc[m * TAP_TILES + j] = multiply[precision](f, b[j], acc[m * TAP_TILES + j])
            dp = dp.unsafe_offset(LANES)
            xp = xp.unsafe_offset(s.S * LANES)

    var to = scratch.unsafe_offset((shard * s.pieces + piece) * s.K * (taps + 1))
    comptime for m in range(ROWS):
        comptime for r in range(2):
            var k = k_first + 16 * m + 8 * r + row
            var sum = bias[2 * m + r]
            sum += shuffle_xor(sum, 1)
            sum += shuffle_xor(sum, 2)
            if k < s.K:
                comptime for j in range(TAP_TILES):
                    comptime for e in range(2):
                        var tap = tap_first + 8 * j + 2 * t + e
                        if tap < taps:
                            to[unsafe_offset=k * taps + tap] = acc[m * TAP_TILES + j][2 * r + e]
                if tap_first == 0 and t == 0:
                    to[unsafe_offset=s.K * taps + k] = sum


def worth_it_for_weights(s: Shape) -> Bool:
    """Whether the gradient of the weights is large enough for tensor cores."""
    return s.K >= 16 and s.C * s.R * s.T >= 2 * TERMS


def rows_of_a_piece(s: Shape) -> Int:
    """Rows of pixels that a warp adds up: as many as leave 96 warps for each shard."""
    var tiles = ceildiv(s.K, ROWS * 16) * ceildiv(s.C * s.R * s.T, TAP_TILES * 8)
    return max(1, s.G * s.P * tiles // 96)


def pieces_mma(s: Shape) -> Int:
    """Pieces of a shard's sum."""
    return ceildiv(s.G * s.P, rows_of_a_piece(s))


def weight_gradient_mma[precision: Int](q: Queue, of: Gradients, shape: Shape) raises:
    """Two launches, as weight_gradient of conv2d_weight.mojo."""
    var s = shape
    s.pieces = pieces_mma(s)
    s.units = rows_of_a_piece(s)
    var tiles_k = ceildiv(s.K, ROWS * 16)
    var tiles_tap = ceildiv(s.C * s.R * s.T, TAP_TILES * 8)
    launch_sums[_weights[precision]](q, of, s, tiles_k, tiles_tap)
