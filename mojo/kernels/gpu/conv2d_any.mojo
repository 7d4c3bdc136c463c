"""Correlation on a GPU for sizes that no other kernel takes, groups of channels and dilation among them: one output a
thread, everything from global memory.

Sums have the order of conv2d_direct.mojo. Here too is the gradient of the input for groups and dilation, where each
pixel gathers the taps that used it.
"""

from std.utils.numerics import isnan

from max.gpu import block_idx, global_idx, thread_idx

from ..lanes import BytePtr, LANES, Ptr
from .conv2d_tiles import PADDED, POOLED, Shape, Sizes, THREADS, at_least, quotient, rounded, split
from .launch import Operand, Queue, blocks


@always_inline
def _sum_at[
    padded: Bool, low: Bool
](x: Ptr, w: Ptr, start: Float32, s: Shape, g: Int, k: Int, p: Int, q: Int) -> Float32:
    """One output of one sample; x is at its lane."""
    var taps = s.R * s.T
    var inputs = s.inputs()
    var first = quotient(k, s.outputs()) * inputs
    var sum = start
    for c in range(inputs):
        for r in range(s.R):
            for t in range(s.T):
                var h = p * s.S + r * s.D - s.pad_rows
                var i = q * s.S + t * s.D - s.pad_columns
                var wi = (k * inputs + c) * taps + r * s.T + t
                comptime if padded:  # of one group
                    wi = (c * s.K + k) * s.WR * s.WT + s.turned(r, t)
                    if not (UInt32(h) < UInt32(s.H) and UInt32(i) < UInt32(s.W)):
                        continue
                sum = rounded[low](
                    x[unsafe_offset=(((g * s.C + first + c) * s.H + h) * s.W + i) * LANES], s.precision
                ).fma(rounded[low](w[unsafe_offset=wi], s.precision), sum)
    return sum


def _each[
    form: Int, low: Bool
](y: Ptr, y_step: Int64, argmax: BytePtr, argmax_step: Int64, x: Ptr, x_step: Int64, w: Ptr, b: Ptr, sizes: Sizes):
    var s = Shape(sizes)
    var n = global_idx.x // LANES
    var out = global_idx.x
    var lane = thread_idx.x % LANES
    var shard = block_idx.z
    var q = split(n, s.Q)
    var p = split(n, s.P)
    var k = split(n, s.K)
    if n >= s.G:
        return
    var xp = x.unsafe_offset(shard * Int(x_step) + lane)
    comptime if form == POOLED:
        var best = Float32(0)
        var at = 0
        for r in range(s.PR):
            for t in range(s.PT):
                var v = at_least(_sum_at[False, low](xp, w, b[unsafe_offset=k], s, n, k, p * s.PS + r, q * s.PS + t), 0)
                if r + t == 0 or v > best or isnan(v):
                    best = v
                    at = r * s.PT + t
        y[unsafe_offset=shard * Int(y_step) + out] = best
        argmax[unsafe_offset=shard * Int(argmax_step) + out] = UInt8(at)
    else:
        comptime padded = form == PADDED
        var v = _sum_at[padded, low](xp, w, Float32(0) if padded else b[unsafe_offset=k], s, n, k, p, q)
        out = (((n * s.K + k) * s.YP * s.YQ) + s.pixel(p, q)) * LANES + lane
        y[unsafe_offset=shard * Int(y_step) + out] = at_least(v, 0) if s.relu != 0 else v


def _each_input[low: Bool](dx: Ptr, dx_step: Int64, dy: Ptr, dy_step: Int64, w: Ptr, sizes: Sizes):
    """Gradient of the input of any convolution, whose sizes these are."""
    var s = Shape(sizes)
    var n = global_idx.x // LANES
    var i = split(n, s.W)
    var h = split(n, s.H)
    var group = split(n, s.C)
    if n >= s.G:
        return
    var inputs = s.inputs()
    var outputs = s.outputs()
    var c = split(group, inputs)
    var dyp = dy.unsafe_offset(block_idx.z * Int(dy_step) + n * s.K * s.P * s.Q * LANES + thread_idx.x % LANES)
    var step = s.S if s.D == 1 else 1  # else taps may meet more often
    var sum = Float32(0)
    for k in range(group * outputs, (group + 1) * outputs):
        for r in range(h % step, min(s.R, h + 1), step):
            var p = h - r * s.D
            if p < 0 or split(p, s.S) != 0 or p >= s.P:
                continue
            for t in range(i % step, min(s.T, i + 1), step):
                var q = i - t * s.D
                if q < 0 or split(q, s.S) != 0 or q >= s.Q:
                    continue
                sum = rounded[low](dyp[unsafe_offset=((k * s.P + p) * s.Q + q) * LANES], s.precision).fma(
                    rounded[low](w[unsafe_offset=((k * inputs + c) * s.R + r) * s.T + t], s.precision), sum
                )
    dx[unsafe_offset=block_idx.z * Int(dx_step) + global_idx.x] = sum


def correlate_any[
    form: Int, low: Bool
](q: Queue, shards: Int, y: Operand, argmax: Operand, x: Operand, w: Operand, b: Operand, shape: Shape) raises:
    """Takes any sizes; P and Q of `shape` are the pooled ones if POOLED, with any window."""
    q.enqueue_function[_each[form, low]](
        y.ptr(),
        y.step(),
        BytePtr(unsafe_from_address=argmax.address),
        argmax.step() * 4,
        x.ptr(),
        x.step(),
        w.ptr(),
        b.ptr(),
        shape.pack(),
        grid_dim=(blocks(shape.G * shape.K * shape.P * shape.Q * LANES, THREADS), 1, shards),
        block_dim=THREADS,
    )


def gather_input[low: Bool](q: Queue, shards: Int, dx: Operand, dy: Operand, w: Operand, shape: Shape) raises:
    """The gradient of the input of any convolution, whose shape this is."""
    q.enqueue_function[_each_input[low]](
        dx.ptr(),
        dx.step(),
        dy.ptr(),
        dy.step(),
        w.ptr(),
        shape.pack(),
        grid_dim=(blocks(shape.G * shape.C * shape.H * shape.W * LANES, THREADS), 1, shards),
        block_dim=THREADS,
    )
