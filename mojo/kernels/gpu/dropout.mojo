"""Dropout on a GPU: the masks and the bits of kernels/dropout.mojo.

A thread takes one byte of what stays, eight features of one sample; sixteen threads are the lanes of a group.
"""

from max.gpu import block_idx

from ..dropout import stays
from ..lanes import LANES
from .launch import blocks, GpuOp, Operand, Queue, StepContextPtr, call
from .quads import (
    THREADS,
    bytes_of_shard,
    divide,
    divisor,
    of_shard,
    quads,
    small_index,
)


def _dropout[
    forward: Bool
](
    y_: Operand,
    bits_: Operand,
    x_: Operand,
    n: UInt32,
    F: UInt32,
    bytes: UInt32,  # of a sample
    by_bytes: UInt64,
    p: Float32,
    keep: Float32,
    layer: UInt32,
    T: UInt32,
    ctx: StepContextPtr,
):
    var i = small_index()
    if i >= n:
        return
    var y = of_shard(y_)
    var x = of_shard(x_)
    var bits = bytes_of_shard(bits_).unsafe_offset(Int(i))
    var lane = i % UInt32(LANES)
    var byte = i // UInt32(LANES)
    var g = divide(byte, by_bytes)
    byte -= g * bytes
    var mask = UInt8(0)
    comptime if forward:
        var sample = (
            (UInt32(ctx[].first) + UInt32(block_idx.y) * UInt32(ctx[].shard_size)) * T + g * UInt32(LANES) + lane
        )
        comptime for half in range(2):
            var block = 2 * Int(byte) + half
            var stay = stays[1](block, sample, Int(layer), p, ctx[].step, ctx[].seed)
            comptime for j in range(4):
                comptime bit = 4 * half + j
                if stay[j] and 8 * byte + UInt32(bit) < F:
                    mask |= UInt8(1 << bit)
        bits[] = mask
    else:
        mask = bits[]
    var at = (Int(g) * Int(F) + 8 * Int(byte)) * LANES + Int(lane)
    comptime for j in range(8):
        if 8 * byte + UInt32(j) < F:
            var v = x[unsafe_offset=at + j * LANES] * keep
            y[unsafe_offset=at + j * LANES] = v if (mask >> UInt8(j)) & 1 != 0 else 0


def _enqueue[
    forward: Bool
](
    q: Queue,
    shards: Int,
    y: Operand,
    bits: Operand,
    x: Operand,
    G: Int,
    F: Int,
    p: Float32,
    layer: Int,
    T: Int,
    ctx: StepContextPtr,
) raises:
    var bytes = (F + 7) // 8
    _ = quads(G * F)
    var n = G * bytes * LANES
    q.enqueue_function[_dropout[forward]](
        y,
        bits,
        x,
        UInt32(n),
        UInt32(F),
        UInt32(bytes),
        divisor(bytes),
        p,
        Float32(1) / (1 - p),
        UInt32(layer),
        UInt32(T),
        ctx,
        grid_dim=(blocks(n, THREADS), shards),
        block_dim=THREADS,
    )


def dropout_forward(
    q: Queue,
    shards: Int,
    y: Operand,  # (G, F, L)
    bits: Operand,  # (G, F / 8, L) bytes; shard s is 4 s stride bytes further
    x: Operand,  # (G, F, L)
    G: Int,
    F: Int,
    p: Float32,
    layer: Int,
    T: Int,
    ctx: StepContextPtr,
) raises:
    """Computes y = x / (1 - p) where it `stays`, else 0. sample = first + s shard_size + position in the shard."""
    _enqueue[True](q, shards, y, bits, x, G, F, p, layer, T, ctx)


def dropout_backward(
    q: Queue,
    shards: Int,
    dx: Operand,  # (G, F, L)
    dy: Operand,  # (G, F, L)
    bits: Operand,  # (G, F / 8, L) bytes, saved by forward
    G: Int,
    F: Int,
    p: Float32,
    ctx: StepContextPtr,
) raises:
    """Computes dx = dy / (1 - p) where x stayed, else 0."""
    _enqueue[False](q, shards, dx, bits, dy, G, F, p, 0, 0, ctx)


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [
        GpuOp("dropout_forward", call[dropout_forward]),
        GpuOp("dropout_backward", call[dropout_backward]),
    ]
