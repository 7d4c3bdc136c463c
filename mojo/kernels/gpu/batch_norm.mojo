"""kernels/batch_norm.mojo on a GPU: a block computes one channel of a shard, thread t every 256th number; halves are added,
which is not the order of the CPU.
"""

from std.math import ceildiv, sqrt

from max.gpu import barrier, block_idx, thread_idx

from ..batch_norm import Gradient, Norm, Sizes, moved
from ..elementwise import relu_gradient
from ..lanes import F32, LANES, Ptr
from .launch import (
    GpuOp,
    Operand,
    Queue,
    Sent,
    StepContextPtr,
    blocks,
    call,
)
from .quads import THREADS, block_sum, index, of_shard


@always_inline
def _each[B: def(Int) -> None, //](body: B, G: Int, C: Int, P: Int, live: Int):
    """Calls body(at) for the numbers of this block's channel that are this thread's, those that are no sample's included.
    """
    var plane = P * LANES
    for i in range(thread_idx.x, G * plane, THREADS):
        var g = i // plane
        body((g * C + block_idx.x) * plane + i % plane)


@always_inline
def _summed(value: Float32) -> Float32:
    """The sum over the block, for all its threads."""
    var s = block_sum[THREADS](value)
    barrier()
    return s


@always_inline
def _lives(at: Int, C: Int, P: Int, live: Int) -> Bool:
    return (at // (C * P * LANES)) * LANES + at % LANES < live


def _forward(
    y_: Operand,
    stats_: Operand,
    x_: Operand,
    w: Ptr,
    b: Ptr,
    mean: Ptr,
    variance: Ptr,
    sent: Sent[Sizes],
    eps: Float32,
    train: Int32,
    again: Int32,
    relu: Int32,
    ctx: StepContextPtr,
):
    var z = sent.sizes
    var C = z.C
    var P = z.P
    var valid = ctx[].valid(block_idx.y)
    var live = z.samples(valid)
    var count = z.numbers(valid)
    var c = block_idx.x
    var x = of_shard(x_)
    var y = of_shard(y_)
    var m = mean[unsafe_offset=c]
    var v = variance[unsafe_offset=c]
    var all = Float32(0)
    if train != 0 and again == 0:
        var s = Float32(0)

        @always_inline
        def add(at: Int) {mut s, imm}:
            if _lives(at, C, P, live):
                s += x[unsafe_offset=at]

        _each(add, z.G, C, P, live)
        m = _summed(s) / count
        var t = Float32(0)

        @always_inline
        def square(at: Int) {mut t, imm}:
            if _lives(at, C, P, live):
                var d = x[unsafe_offset=at] - m
                t += d * d

        _each(square, z.G, C, P, live)
        all = _summed(t)
        v = all / count
    var inverse = 1 / sqrt(v + eps)
    var stats = of_shard(stats_)
    if again != 0:
        m = stats[unsafe_offset=c]
        inverse = stats[unsafe_offset=C + c]
    elif thread_idx.x == 0:
        stats[unsafe_offset=c] = m
        stats[unsafe_offset=C + c] = inverse
        stats[unsafe_offset=2 * C + c] = all / max(count - 1, 1)
    var norm = Norm(m, inverse, w[unsafe_offset=c], b[unsafe_offset=c], relu != 0)

    @always_inline
    def put(at: Int) {imm}:
        y[unsafe_offset=at] = norm.at[1](x[unsafe_offset=at])[0]

    _each(put, z.G, C, P, live)


def forward(
    q: Queue,
    shards: Int,
    y: Operand,
    stats: Operand,
    x: Operand,
    w: Ptr,
    b: Ptr,
    mean: Ptr,
    variance: Ptr,
    z: Sizes,
    eps: Float32,
    train: Bool,
    again: Bool,
    relu: Bool,
    ctx: StepContextPtr,
) raises:
    """Normalises; see the CPU's."""
    q.enqueue_function[_forward](
        y,
        stats,
        x,
        w,
        b,
        mean,
        variance,
        Sent(z),
        eps,
        Int32(train),
        Int32(again),
        Int32(relu),
        ctx,
        grid_dim=(z.C, shards),
        block_dim=THREADS,
    )


def _backward(
    dx_: Operand,
    dw_: Operand,
    db_: Operand,
    dy_: Operand,
    x_: Operand,
    stats_: Operand,
    w: Ptr,
    b: Ptr,
    sent: Sent[Sizes],
    train: Int32,
    relu: Int32,
    ctx: StepContextPtr,
):
    var z = sent.sizes
    var C = z.C
    var P = z.P
    var valid = ctx[].valid(block_idx.y)
    var live = z.samples(valid)
    var c = block_idx.x
    var x = of_shard(x_)
    var dy = of_shard(dy_)
    var dx = of_shard(dx_)
    var stats = of_shard(stats_)
    var m = stats[unsafe_offset=c]
    var inverse = stats[unsafe_offset=C + c]
    var norm = Norm(m, inverse, w[unsafe_offset=c], b[unsafe_offset=c], False)

    @always_inline
    def passed(at: Int) {imm} -> Float32:
        var d = dy[unsafe_offset=at]
        if relu != 0:
            d = relu_gradient[1](d, norm.at[1](x[unsafe_offset=at]))[0]
        return d

    var s = Float32(0)
    var t = Float32(0)

    @always_inline
    def add(at: Int) {mut s, mut t, imm}:
        if _lives(at, C, P, live):
            var d = passed(at)
            s += d
            t += d * (x[unsafe_offset=at] - m)

    _each(add, z.G, C, P, live)
    s = _summed(s)
    t = _summed(t)
    if thread_idx.x == 0:
        of_shard(db_)[unsafe_offset=c] = s
        of_shard(dw_)[unsafe_offset=c] = t * inverse
    var part = 1 / z.numbers(valid) if train != 0 else Float32(0)
    var by = Gradient(m, inverse, w[unsafe_offset=c], s * part, t * part)

    @always_inline
    def put(at: Int) {imm}:
        var v = by.at[1](passed(at), x[unsafe_offset=at])
        dx[unsafe_offset=at] = v[0] if _lives(at, C, P, live) else 0

    _each(put, z.G, C, P, live)


def backward(
    q: Queue,
    shards: Int,
    dx: Operand,
    dw: Operand,
    db: Operand,
    dy: Operand,
    x: Operand,
    stats: Operand,
    w: Ptr,
    b: Ptr,
    z: Sizes,
    train: Bool,
    relu: Bool,
    ctx: StepContextPtr,
) raises:
    """The gradients, each shard's own."""
    q.enqueue_function[_backward](
        dx,
        dw,
        db,
        dy,
        x,
        stats,
        w,
        b,
        Sent(z),
        Int32(train),
        Int32(relu),
        ctx,
        grid_dim=(z.C, shards),
        block_dim=THREADS,
    )


def _running(
    dmean: Operand,
    dvariance: Operand,
    dsteps: Operand,
    stats_: Operand,
    mean: Ptr,
    variance: Ptr,
    C: Int32,
    N: Int32,
    momentum: Float32,
    ctx: StepContextPtr,
):
    var c = index()
    if c >= Int(C):
        return
    var n = Float32(Int(N) if N >= 0 else ctx[].valid(block_idx.y))
    var stats = of_shard(stats_)
    of_shard(dmean)[unsafe_offset=c] = moved(n, momentum, mean[unsafe_offset=c], stats[unsafe_offset=c])
    of_shard(dvariance)[unsafe_offset=c] = moved(
        n,
        momentum,
        variance[unsafe_offset=c],
        stats[unsafe_offset=2 * Int(C) + c],
    )
    if c == 0:
        of_shard(dsteps)[] = -n


def running(
    q: Queue,
    shards: Int,
    dmean: Operand,
    dvariance: Operand,
    dsteps: Operand,
    stats: Operand,
    mean: Ptr,
    variance: Ptr,
    steps: Ptr,
    C: Int,
    N: Int,
    momentum: Float32,
    ctx: StepContextPtr,
) raises:
    """What each shard takes away from the running statistics."""
    q.enqueue_function[_running](
        dmean,
        dvariance,
        dsteps,
        stats,
        mean,
        variance,
        Int32(C),
        Int32(N),
        momentum,
        ctx,
        grid_dim=(blocks(C, THREADS), shards),
        block_dim=THREADS,
    )


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [
        GpuOp("batch_norm_forward", call[forward]),
        GpuOp("batch_norm_backward", call[backward]),
        GpuOp("batch_norm_running", call[running]),
    ]
