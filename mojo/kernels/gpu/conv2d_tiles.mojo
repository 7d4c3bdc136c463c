"""What the convolution kernels for GPUs share: sizes as a kernel takes them, rounding of operands, sums over a warp.

A sample is one of 16 lanes, so 16 neighbouring threads work on one pixel of 16 samples: a *team*. A warp is
WARP_SIZE / 16 teams. Inside a team only the sample differs: weights are the same for all its threads, and each access
to an activation is 64 consecutive bytes.
"""

from std.bit import log2_floor
from std.math import ceildiv
from std.memory import bitcast
from std.sys import get_defined_int, is_nvidia_gpu
from std.sys._assembly import inlined_assembly
from std.utils import StaticTuple
from std.utils.numerics import isnan

from max.gpu import WARP_SIZE
from max.gpu.primitives.warp import shuffle_xor

from ..conv2d_general import General
from ..lanes import F32, LANES
from .launch import BF16, FP16

comptime TEAMS = WARP_SIZE // LANES  # teams in a warp
comptime THREADS = 256  # threads of a block, at most
comptime WARPS = THREADS // WARP_SIZE
comptime MULTIPROCESSORS = 132  # of the GPU that tiles are chosen for; they change no result
# Blocks that a launch should have before each of them does the work of two: four for each multiprocessor, four times.
# Tests have a smaller number.
comptime ENOUGH_BLOCKS = get_defined_int["CONV_ENOUGH_BLOCKS", 16 * MULTIPROCESSORS]()
# What a correlation is for.
comptime PLAIN = 0
comptime PADDED = 1  # the gradient of the input: zeros around, the weights turned
comptime POOLED = 2  # ReLU, then the maximum of each window; 2 x 2 in conv2d_direct.mojo

comptime FIELDS = 35  # of Shape
comptime Sizes = StaticTuple[Int32, FIELDS]


@fieldwise_init
struct Shape(TrivialRegisterPassable):
    """The sizes of a correlation: y (G, K, P, Q, 16) from x (G, C, H, W, 16) and w (K, C / groups, R, T).

    `pad_rows` rows and `pad_columns` columns of zeros are around x without being in memory.
    """

    var G: Int
    var C: Int
    var H: Int
    var W: Int
    var K: Int
    var P: Int
    var Q: Int
    var R: Int
    var T: Int
    var S: Int
    var D: Int  # from one tap to the next
    var groups: Int  # of channels (conv2d_general.mojo)
    var pad_rows: Int
    var pad_columns: Int
    var k_warps: Int  # warps of a block that differ in their output channels
    var chunk: Int  # input channels (tiles of taps in conv2d_weight.mojo) a block has at a time
    var precision: Int
    var relu: Int
    var PR: Int  # pooling window and its stride
    var PT: Int
    var PS: Int
    var pieces: Int  # that the sum over pixels is cut into (conv2d_weight.mojo)
    var units: Int  # of a piece for each team
    var pixel_warps: Int  # warps of a block that differ in their pixels (pieces in conv2d_weight.mojo)
    var tiles: Int  # of pixels that each warp computes, one after the other; of weights (conv2d_mma.mojo)
    var across: Int  # columns of a block's pixels (conv2d_mma.mojo)
    # Of every step-th pixel of a gradient with every step-th tap (`phase`):
    var YP: Int  # rows and columns of y in memory
    var YQ: Int
    var WR: Int  # rows and columns of w in memory
    var WT: Int
    var step: Int
    var row: Int  # of the first pixel
    var column: Int
    var tap_row: Int  # of the first tap
    var tap_column: Int

    @staticmethod
    def forward(size: General, precision: Int, relu: Bool) -> Self:
        """A convolution as the launchers have it."""
        var s = Self(Sizes(fill=1))
        s.G = size.G
        s.C = size.C
        s.H = size.H
        s.W = size.W
        s.K = size.K
        s.P = size.P()
        s.Q = size.Q()
        s.R = size.R
        s.T = size.T
        s.S = size.S
        s.D = size.D
        s.groups = size.groups
        s.pad_rows = 0
        s.pad_columns = 0
        s.precision = precision
        s.relu = 1 if relu else 0
        s.YP = s.P
        s.YQ = s.Q
        s.row = 0
        s.column = 0
        return s

    def phase(self, row: Int, column: Int, frame_rows: Int, frame_columns: Int) -> Self:
        """The gradient of the input, without a frame, in the pixels from (row, column) on, `S` apart: a correlation of
        its own with stride 1.

        Dumoulin and Visin, A guide to convolution arithmetic for deep learning (2016), have it as one correlation of a
        dy with zeros between its pixels; pixels at the same place in a step meet the same taps, and no zeros.
        """
        var s = self
        s.C = self.K
        s.H = self.P
        s.W = self.Q
        s.K = self.C
        s.YP = self.H - 2 * frame_rows
        s.YQ = self.W - 2 * frame_columns
        s.P = ceildiv(s.YP - row, self.S)
        s.Q = ceildiv(s.YQ - column, self.S)
        s.tap_row = (row + frame_rows) % self.S
        s.tap_column = (column + frame_columns) % self.S
        s.R = ceildiv(self.R - s.tap_row, self.S)
        s.T = ceildiv(self.T - s.tap_column, self.S)
        if s.R <= 0 or s.T <= 0:  # no tap: zeros
            s.C = 0
            s.R = 1
            s.T = 1
        s.pad_rows = s.R - 1 - (row + frame_rows) // self.S
        s.pad_columns = s.T - 1 - (column + frame_columns) // self.S
        s.S = 1
        s.WR = self.R
        s.WT = self.T
        s.step = self.S
        s.row = row
        s.column = column
        return s

    @always_inline
    def __init__(out self, s: Sizes):
        """What pack() made."""
        var numbers = Array[Int, FIELDS](fill=0)
        comptime for i in range(FIELDS):
            numbers[i] = Int(s[i])
        self = numbers.unsafe_ptr().unsafe_bitcast[Self]()[]

    def pack(self) -> Sizes:
        """As an argument of a kernel: its fields in order."""
        comptime assert FIELDS == reflect[Self].field_count()
        var fields = self
        var numbers = Pointer(to=fields).unsafe_bitcast[Int]()
        var s = Sizes(fill=0)
        for i in range(FIELDS):
            s[i] = Int32(numbers[unsafe_offset=i])
        _ = fields  # it is there until here
        return s

    @always_inline
    def inputs(self) -> Int:
        """Channels of x that a channel of y reads."""
        return quotient(self.C, self.groups)

    @always_inline
    def outputs(self) -> Int:
        """Channels of y that read a channel of x."""
        return quotient(self.K, self.groups)

    @always_inline
    def turned(self, r: Int, t: Int) -> Int:
        """Which weight of a channel tap (r, t) of a gradient of the input has."""
        var row = self.tap_row + (self.R - 1 - r) * self.step
        return row * self.WT + self.tap_column + (self.T - 1 - t) * self.step

    @always_inline
    def pixel(self, p: Int, q: Int) -> Int:
        """Which pixel of y in memory is (p, q)."""
        return (self.row + p * self.step) * self.YQ + self.column + q * self.step

    @always_inline
    def taps(self) -> Int:
        """Weights of one output channel."""
        return self.inputs() * self.R * self.T


@always_inline
def split(mut n: Int, size: Int) -> Int:
    """Takes n % size off n, which becomes n / size. In 32 bits, where a division is short."""
    var a = UInt32(n)
    var quotient = a // UInt32(size)
    n = Int(quotient)
    return Int(a - quotient * UInt32(size))


@always_inline
def quotient(n: Int, size: Int) -> Int:
    """n // size of numbers that are not negative, in 32 bits."""
    return Int(UInt32(n) // UInt32(size))


@always_inline
def at_least(v: Float32, least: Float32) -> Float32:
    """ReLU for 0, nothing for -inf; what is not a number stays."""
    return least if v < least else v


@always_inline
def rounded_tf32(v: Float32) -> Float32:
    """The nearest number with 10 bits of mantissa, ties to even."""
    comptime if is_nvidia_gpu["sm_90a"]():
        return bitcast[F32](
            inlined_assembly["cvt.rn.tf32.f32 $0, $1;", UInt32, constraints="=r,f", has_side_effect=False](v)
        )
    else:
        var bits = bitcast[DType.uint32](v)
        var even = (bits >> 13) & 1
        var nearest = bitcast[F32]((bits + 0xFFF + even) & ~UInt32(0x1FFF))
        return v if isnan(v) else nearest


@always_inline
def rounded[on: Bool](v: Float32, precision: Int) -> Float32:
    """A factor of a product as `precision` has it; as it is if not `on`."""
    comptime if on:
        if precision == BF16:
            return v.cast[DType.bfloat16]().cast[F32]()
        if precision == FP16:
            return v.cast[DType.float16]().cast[F32]()
        return rounded_tf32(v)
    else:
        return v


@always_inline
def sum_warp[n: Int, //, first: Int](v: Array[Float32, n], lane: Int) -> Float32:
    """The sum over the warp's threads of v[first + lane]; 0 where there is no such element.

    WARP_SIZE sums in as many shuffles, where one by one they would take log2(WARP_SIZE) each. Adds in a fixed tree.
    """
    var a = Array[Float32, WARP_SIZE](fill=0)
    comptime for i in range(WARP_SIZE):
        comptime if first + i < n:
            a[i] = v[first + i]
    comptime for level in range(log2_floor(WARP_SIZE)):
        comptime half = WARP_SIZE >> (level + 1)
        var upper = (lane & half) != 0
        comptime for i in range(half):
            var give = a[i] if upper else a[i + half]
            var keep = a[i + half] if upper else a[i]
            a[i] = keep + shuffle_xor(give, UInt32(half))
    return a[0]
