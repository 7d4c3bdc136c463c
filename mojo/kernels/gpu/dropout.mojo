"""Dropout on a GPU: the masks and the bits of kernels/dropout.mojo.

A thread takes one counter, four features of one sample; sixteen threads are the lanes of a group.
"""

from max.gpu import block_idx

from ..lanes import LANES
from ..random import philox, unit
from .launch import blocks, GpuOp, Operand, Queue, StepContextPtr, call
from .quads import THREADS, divide, divisor, of_shard, quads, small_index


def _dropout(
    y_: Operand,
    x_: Operand,
    n: UInt32,
    F: UInt32,
    counters: UInt32,  # of a sample
    by_counters: UInt64,
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
    var lane = i % UInt32(LANES)
    var counter = i // UInt32(LANES)
    var g = divide(counter, by_counters)
    counter -= g * counters
    var sample = (
        (UInt32(ctx[].first) + UInt32(block_idx.y) * UInt32(ctx[].shard_size))
        * T
        + g * UInt32(LANES)
        + lane
    )
    var r = philox[1](counter, sample, UInt32(ctx[].step), layer, ctx[].seed)
    var at = (Int(g) * Int(F) + 4 * Int(counter)) * LANES + Int(lane)
    comptime for j in range(4):
        if 4 * counter + UInt32(j) < F:
            var v = x[unsafe_offset=at + j * LANES] * keep
            y[unsafe_offset=at + j * LANES] = v if unit[1](r[j]) >= p else 0


def dropout(
    q: Queue,
    shards: Int,
    y: Operand,  # (G, F, L)
    x: Operand,  # (G, F, L)
    G: Int,
    F: Int,
    p: Float32,
    layer: Int,
    T: Int,
    ctx: StepContextPtr,
) raises:
    """Computes y = x / (1 - p) where a number in [0, 1) is at least p, else 0. Its own backward: dx = dropout(dy).

    The numbers are those of the CPU; sample = first + s shard_size + position in the shard. p must be in [0, 1).
    """
    var counters = (F + 3) // 4
    _ = quads(G * F)
    var n = G * counters * LANES
    q.enqueue_function[_dropout](
        y,
        x,
        UInt32(n),
        UInt32(F),
        UInt32(counters),
        divisor(counters),
        p,
        Float32(1) / (1 - p),
        UInt32(layer),
        UInt32(T),
        ctx,
        grid_dim=(blocks(n, THREADS), shards),
        block_dim=THREADS,
    )


def ops() -> List[GpuOp]:
    """The op of this file."""
    return [GpuOp("dropout", call[dropout])]
