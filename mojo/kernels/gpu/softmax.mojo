"""Softmax, log-softmax and the losses on them on a GPU (kernels/softmax.mojo): one launch each.

A lane's F classes are divided among K threads, which take every K-th; K depends on F alone. What the K threads have
summed is added as a tree over them, so sums are not in the CPU's order, and exp and log differ in a last bit. Counts are
the same.
"""

from std.memory import unsafe_stack_allocation
from std.utils.numerics import inf, isnan, nan

from max.gpu import AddressSpace, barrier, block_dim, block_idx, thread_idx

from ..lanes import F32, LANES, IntPtr, Ptr
from ..functions import exp, log, rounded
from .lane_parts import MOST_THREADS, best_part, sum_parts
from .launch import blocks, call, GpuOp, Operand, Queue, StepContextPtr
from .quads import (
    QUADS,
    THREADS,
    Four,
    divide,
    divisor,
    in_lanes,
    load4,
    of_shard,
    quads,
    small_index,
    store4,
)

comptime FEW = 32  # classes: up to here 4 threads per lane, beyond 16

comptime SOFTMAX = 0
comptime LOG_SOFTMAX = 1

comptime CROSS_ENTROPY = 0  # writes the softmax
comptime GRADIENT = 1  # the same loss, and writes its gradient instead
comptime NLL = 2  # writes nothing


# --- softmax and log-softmax ---------------------------------------------------------------


def _softmax_forward[K: Int, form: Int](y_: Operand, x_: Operand, G: Int32, F_: Int32):
    comptime GROUPS = THREADS // (LANES * K)
    var t = thread_idx.x
    var part = t // LANES % K
    var g = block_idx.x * GROUPS + t // (LANES * K)
    var F = Int(F_) if g < Int(G) else 0
    var at = g * Int(F_) * LANES + t % LANES
    var y = of_shard(y_).unsafe_offset(at)
    var x = of_shard(x_).unsafe_offset(at)
    var best = -inf[F32]()
    for f in range(part, F, K):
        best = max(best, x[unsafe_offset=f * LANES])
    var m = best_part[K](best, 0)[0]
    var s = Float32(0)
    for f in range(part, F, K):
        s += exp(x[unsafe_offset=f * LANES] - m)
    s = sum_parts[K](s)
    comptime if form == SOFTMAX:
        var inverse = 1 / s
        for f in range(part, F, K):
            y[unsafe_offset=f * LANES] = exp(x[unsafe_offset=f * LANES] - m) * inverse
    else:
        m += log(s)
        for f in range(part, F, K):
            y[unsafe_offset=f * LANES] = x[unsafe_offset=f * LANES] - m


def _softmax_backward[
    K: Int, form: Int
](dx_: Operand, dy_: Operand, y_: Operand, G: Int32, F_: Int32,):
    comptime GROUPS = THREADS // (LANES * K)
    var t = thread_idx.x
    var part = t // LANES % K
    var g = block_idx.x * GROUPS + t // (LANES * K)
    var F = Int(F_) if g < Int(G) else 0
    var at = g * Int(F_) * LANES + t % LANES
    var dx = of_shard(dx_).unsafe_offset(at)
    var dy = of_shard(dy_).unsafe_offset(at)
    var y = of_shard(y_).unsafe_offset(at)
    var s = Float32(0)
    for f in range(part, F, K):
        var d = dy[unsafe_offset=f * LANES]
        comptime if form == SOFTMAX:
            s = d.fma(y[unsafe_offset=f * LANES], s)
        else:
            s += d
    s = sum_parts[K](s)
    for f in range(part, F, K):
        var d = dy[unsafe_offset=f * LANES]
        var v = y[unsafe_offset=f * LANES]
        comptime if form == SOFTMAX:
            dx[unsafe_offset=f * LANES] = v * (d - s)
        else:
            dx[unsafe_offset=f * LANES] = d - exp(v) * s


@always_inline
def _forward[K: Int, form: Int](q: Queue, shards: Int, y: Operand, x: Operand, G: Int, F: Int) raises:
    q.enqueue_function[_softmax_forward[K, form]](
        y,
        x,
        Int32(G),
        Int32(F),
        grid_dim=(blocks(G, THREADS // (LANES * K)), shards),
        block_dim=THREADS,
    )


@always_inline
def _backward[
    K: Int, form: Int
](q: Queue, shards: Int, dx: Operand, dy: Operand, y: Operand, G: Int, F: Int,) raises:
    q.enqueue_function[_softmax_backward[K, form]](
        dx,
        dy,
        y,
        Int32(G),
        Int32(F),
        grid_dim=(blocks(G, THREADS // (LANES * K)), shards),
        block_dim=THREADS,
    )


def softmax_forward(q: Queue, shards: Int, y: Operand, x: Operand, G: Int, F: Int) raises:
    """Computes y = exp(x - max x) / sum exp(x - max x), x and y (G, F, L)."""
    if F <= FEW:
        _forward[4, SOFTMAX](q, shards, y, x, G, F)
    else:
        _forward[16, SOFTMAX](q, shards, y, x, G, F)


def softmax_backward(
    q: Queue,
    shards: Int,
    dx: Operand,
    dy: Operand,
    y: Operand,
    G: Int,
    F: Int,
) raises:
    """Computes dx = y (dy - sum dy y)."""
    if F <= FEW:
        _backward[4, SOFTMAX](q, shards, dx, dy, y, G, F)
    else:
        _backward[16, SOFTMAX](q, shards, dx, dy, y, G, F)


def log_softmax_forward(q: Queue, shards: Int, y: Operand, x: Operand, G: Int, F: Int) raises:
    """Computes y = x - log sum exp(x)."""
    if F <= FEW:
        _forward[4, LOG_SOFTMAX](q, shards, y, x, G, F)
    else:
        _forward[16, LOG_SOFTMAX](q, shards, y, x, G, F)


def log_softmax_backward(
    q: Queue,
    shards: Int,
    dx: Operand,
    dy: Operand,
    y: Operand,
    G: Int,
    F: Int,
) raises:
    """Computes dx = dy - exp(y) sum dy."""
    if F <= FEW:
        _backward[4, LOG_SOFTMAX](q, shards, dx, dy, y, G, F)
    else:
        _backward[16, LOG_SOFTMAX](q, shards, dx, dy, y, G, F)


# --- losses ----------------------------------------------------------------------------------
# One block has one shard. It takes as many groups at a time as MOST_THREADS allow; a thread adds what it meets, then
# lanes are added by halves and groups one after the other.


def _loss[
    K: Int, kind: Int
](
    stats: Operand,
    y_: Operand,  # softmax or gradient
    x_: Operand,
    labels_: Operand,
    G: Int32,
    F_: Int32,
    scaled: Int32,
    ctx: StepContextPtr,
):
    var t = thread_idx.x
    var lane = t % LANES
    var part = t // LANES % K
    var group = t // (LANES * K)  # of this block
    var groups = block_dim.x // (LANES * K)
    var labels = labels_.ints_at(block_idx.y)
    var scale = Float32(1)
    comptime if kind == GRADIENT:
        if scaled != 0:
            scale = ctx[].loss_scale
    var loss = Float32(0)
    var count = Int32(0)
    var right = Int32(0)
    for first in range(0, Int(G), groups):
        var g = first + group
        var F = Int(F_) if g < Int(G) else 0
        var at = g * Int(F_) * LANES + lane
        var x = of_shard(x_).unsafe_offset(at)
        var label = labels[unsafe_offset=g * LANES + lane] if F > 0 else -1
        # The first largest of x, as the CPU finds it: a NaN is never larger, and nothing is larger than a NaN in front.
        var best = -inf[F32]()
        var place = F_ if part > 0 else 0
        for f in range(part, F, K):
            var v = x[unsafe_offset=f * LANES]
            if isnan(v):
                v = inf[F32]() if f == 0 else -inf[F32]()
            if v > best:
                best = v
                place = Int32(f)
        var top = best_part[K](best, place)
        var lse = Float32(0)
        comptime if kind != NLL:
            var m = top[0]
            var s = Float32(0)
            for f in range(part, F, K):
                s += exp(x[unsafe_offset=f * LANES] - m)
            s = sum_parts[K](s)
            lse = m + log(s)
            var inverse = 1 / s
            var y = of_shard(y_).unsafe_offset(at)
            for f in range(part, F, K):
                var p = rounded(exp(x[unsafe_offset=f * LANES] - m) * inverse)
                comptime if kind == GRADIENT:
                    if label == Int32(f):
                        p -= 1
                    p = p * scale if label >= 0 else 0
                y[unsafe_offset=f * LANES] = p
        else:
            barrier()  # before places are written again
        if part == 0 and label >= 0:
            var v = x[unsafe_offset=Int(label) * LANES] if label < F_ else nan[F32]()
            loss += lse - v
            count += 1
            if label == top[1]:
                right += 1
    _write_stats[K](of_shard(stats), loss, count, right)


@always_inline
def _write_stats[K: Int](stats: Ptr, loss: Float32, count: Int32, right: Int32):
    """Adds the lanes and groups of the threads with part 0."""
    comptime ROOM = MOST_THREADS // K
    var losses = unsafe_stack_allocation[ROOM, Float32, address_space=AddressSpace.SHARED]()
    var counts = unsafe_stack_allocation[ROOM, Int32, address_space=AddressSpace.SHARED]()
    var rights = unsafe_stack_allocation[ROOM, Int32, address_space=AddressSpace.SHARED]()
    var t = thread_idx.x
    var lane = t % LANES
    var part = t // LANES % K
    var i = t // (LANES * K) * LANES + lane
    if part == 0:
        losses[unsafe_offset=i] = loss
        counts[unsafe_offset=i] = count
        rights[unsafe_offset=i] = right
    barrier()
    comptime for round in range(4):
        comptime half = LANES >> (round + 1)
        if part == 0 and lane < half:
            losses[unsafe_offset=i] += losses[unsafe_offset=i + half]
            counts[unsafe_offset=i] += counts[unsafe_offset=i + half]
            rights[unsafe_offset=i] += rights[unsafe_offset=i + half]
        barrier()
    if t == 0:
        var sum = losses[unsafe_offset=0]
        var samples = counts[unsafe_offset=0]
        var correct = rights[unsafe_offset=0]
        for g in range(1, block_dim.x // (LANES * K)):
            sum += losses[unsafe_offset=g * LANES]
            samples += counts[unsafe_offset=g * LANES]
            correct += rights[unsafe_offset=g * LANES]
        stats[unsafe_offset=0] = sum
        stats[unsafe_offset=1] = Float32(samples)
        stats[unsafe_offset=2] = Float32(correct)
        stats[unsafe_offset=3] = 0


@always_inline
def _launch_loss[
    kind: Int
](
    q: Queue,
    shards: Int,
    stats: Operand,
    y: Operand,
    x: Operand,
    labels: Operand,
    G: Int,
    F: Int,
    scaled: Bool,
    ctx: StepContextPtr,
) raises:
    @always_inline
    def launch[K: Int]() raises {imm}:
        q.enqueue_function[_loss[K, kind]](
            stats,
            y,
            x,
            labels,
            Int32(G),
            Int32(F),
            Int32(scaled),
            ctx,
            grid_dim=(1, shards),
            block_dim=min(MOST_THREADS, G * LANES * K),
        )

    if F <= FEW:
        launch[4]()
    else:
        launch[16]()


def cross_entropy_forward(
    q: Queue,
    shards: Int,
    stats: Operand,  # (4)
    p: Operand,  # (G, F, L): softmax(x), saved for backward
    x: Operand,  # (G, F, L)
    labels: Operand,  # (G * L), int32
    G: Int,
    F: Int,
) raises:
    """Writes stats (sum of losses, samples, correct predictions, 0) of each shard; the loss of a sample is
    log sum exp(x) - x[label].
    """
    _launch_loss[CROSS_ENTROPY](
        q,
        shards,
        stats,
        p,
        x,
        labels,
        G,
        F,
        False,
        StepContextPtr(unsafe_from_address=stats.address),
    )


def cross_entropy(
    q: Queue,
    shards: Int,
    stats: Operand,  # (4)
    dx: Operand,  # (G, F, L)
    x: Operand,  # (G, F, L)
    labels: Operand,  # (G * L), int32
    G: Int,
    F: Int,
    scaled: Bool,
    ctx: StepContextPtr,
) raises:
    """Writes stats of each shard, and the gradient of its loss times the step's loss scale if `scaled`: the bits of
    cross_entropy_forward and cross_entropy_backward.
    """
    _launch_loss[GRADIENT](q, shards, stats, dx, x, labels, G, F, scaled, ctx)


def nll_forward(
    q: Queue,
    shards: Int,
    stats: Operand,
    x: Operand,
    labels: Operand,
    G: Int,
    F: Int,
) raises:
    """Writes stats; the loss of a sample is -x[label], x being log-probabilities (G, F, L)."""
    _launch_loss[NLL](
        q,
        shards,
        stats,
        x,
        x,
        labels,
        G,
        F,
        False,
        StepContextPtr(unsafe_from_address=stats.address),
    )


def _loss_backward[
    kind: Int
](dx: Operand, dloss: Operand, p: Operand, labels: Operand, n: UInt32, F: UInt32, by_F: UInt64,):
    var i = small_index()
    if i >= n:
        return
    var d = of_shard(dloss)[]
    var vector = i // UInt32(QUADS)
    var g = divide(vector, by_F)
    var f = Int32(vector - g * F)
    var lanes = Int(g) * LANES + Int(i % UInt32(QUADS)) * 4
    var v = Four(0)
    comptime if kind != NLL:
        v = load4(of_shard(p), 4 * Int(i))
    var out = Four(0)
    comptime for j in range(4):
        var label = labels.ints_at(block_idx.y)[unsafe_offset=lanes + j]
        comptime if kind == NLL:
            out[j] = -d if label == f else 0
        else:
            var one = Float32(1) if label == f else Float32(0)
            out[j] = (v[j] - one) * d if label >= 0 else 0
    store4(of_shard(dx), 4 * Int(i), out)


@always_inline
def _launch_backward[
    kind: Int
](q: Queue, shards: Int, dx: Operand, dloss: Operand, p: Operand, labels: Operand, G: Int, F: Int,) raises:
    in_lanes(dx, p)
    var n = quads(G * F)
    q.enqueue_function[_loss_backward[kind]](
        dx,
        dloss,
        p,
        labels,
        UInt32(n),
        UInt32(F),
        divisor(F),
        grid_dim=(blocks(n, THREADS), shards),
        block_dim=THREADS,
    )


def cross_entropy_backward(
    q: Queue,
    shards: Int,
    dx: Operand,
    dloss: Operand,  # (1)
    p: Operand,
    labels: Operand,
    G: Int,
    F: Int,
) raises:
    """Computes dx = (p - onehot(label)) dloss, 0 in lanes without a sample."""
    _launch_backward[CROSS_ENTROPY](q, shards, dx, dloss, p, labels, G, F)


def nll_backward(
    q: Queue,
    shards: Int,
    dx: Operand,
    dloss: Operand,  # (1)
    labels: Operand,
    G: Int,
    F: Int,
) raises:
    """Computes dx = -onehot(label) dloss."""
    _launch_backward[NLL](q, shards, dx, dloss, dx, labels, G, F)


def ops() -> List[GpuOp]:
    """The ops of this file. cross_entropy is the loss with its gradient, times the loss scale if `scaled`."""
    return [
        GpuOp("softmax_forward", call[softmax_forward]),
        GpuOp("softmax_backward", call[softmax_backward]),
        GpuOp("log_softmax_forward", call[log_softmax_forward]),
        GpuOp("log_softmax_backward", call[log_softmax_backward]),
        GpuOp("cross_entropy_forward", call[cross_entropy_forward]),
        GpuOp("cross_entropy_backward", call[cross_entropy_backward]),
        GpuOp(
            "cross_entropy",
            "stats, dx; x, labels; G, F, scaled",
            call[cross_entropy],
        ),
        GpuOp("nll_forward", call[nll_forward]),
        GpuOp("nll_backward", call[nll_backward]),
    ]
