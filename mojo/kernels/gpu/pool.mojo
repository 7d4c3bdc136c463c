"""Max- and average-pooling on a GPU (kernels/pool.mojo): the bits of the CPU.

A thread takes four lanes of one output pixel. Backwards it takes four lanes of one input pixel and adds what the windows
over it hand down, in the CPU's order: window rows first, then columns. So nothing is added to in memory.
"""

from max.gpu import block_idx
from std.utils.numerics import isnan

from ..lanes import LANES, BytePtr, Ptr
from ..functions import rounded
from ..pool import Windows
from .launch import blocks, call, GpuOp, Operand, Queue
from .quads import (
    QUADS,
    THREADS,
    Four,
    bytes_of_shard,
    divide,
    divisor,
    in_lanes,
    load4,
    of_shard,
    quads,
    small_index,
    store4,
)

comptime Places = SIMD[DType.uint8, 4]


def _maxpool_forward[
    known: Int  # window and stride if they are equal and known at compile time, else 0
](
    y: Operand,
    argmax: Operand,
    x: Operand,
    n: UInt32,  # threads
    H: Int32,
    W_: Int32,
    R_: Int32,
    T_: Int32,
    S_: Int32,
    P: UInt32,
    Q: UInt32,
    by_P: UInt64,
    by_Q: UInt64,
):
    var i = small_index()
    if i >= n:
        return
    var R = known if known else Int(R_)
    var T = known if known else Int(T_)
    var S = known if known else Int(S_)
    var W = Int(W_)
    var out = i // UInt32(QUADS)
    var row = divide(out, by_Q)
    var q = Int(out - row * Q)
    var plane = divide(row, by_P)
    var p = Int(row - plane * P)
    var lane = Int(i % UInt32(QUADS)) * 4
    var window = of_shard(x).unsafe_offset(((Int(plane) * Int(H) + p * S) * W + q * S) * LANES + lane)
    var best = load4(window, 0)
    var at = SIMD[DType.int32, 4](0)

    @always_inline
    def look(r: Int, t: Int) {mut best, mut at, imm}:
        var v = load4(window, (r * W + t) * LANES)
        var better = v.gt(best) | isnan(v)
        best = better.select(v, best)
        at = better.select(SIMD[DType.int32, 4](Int32(r * T + t)), at)

    comptime if known:
        comptime for j in range(1, known * known):
            look(j // known, j % known)
    else:
        for t in range(1, T):
            look(0, t)
        for r in range(1, R):
            for t in range(T):
                look(r, t)
    store4(of_shard(y), 4 * Int(i), best)
    bytes_of_shard(argmax).unsafe_offset(4 * Int(i)).unsafe_store[alignment=4](0, at.cast[DType.uint8]())


def maxpool_forward(
    q: Queue,
    shards: Int,
    y: Operand,  # (planes, P, Q, L)
    argmax: Operand,  # (planes, P, Q, L) bytes; shard s is 4 s stride bytes further
    x: Operand,  # (planes, H, W, L)
    s: Windows,
) raises:
    """Largest value of each window; the first one of equals; NaN wins, so that it is not hidden.

    R * T must be at most 256.
    """
    in_lanes(y, x)
    if argmax.address & 3 != 0:
        raise Error("[gpu] the places of a max-pool are not at a multiple of 4")
    var n = quads(s.planes * s.P() * s.Q())
    _ = quads(s.planes * s.H * s.W)

    @always_inline
    def launch[known: Int]() raises {imm}:
        q.enqueue_function[_maxpool_forward[known]](
            y,
            argmax,
            x,
            UInt32(n),
            Int32(s.H),
            Int32(s.W),
            Int32(s.R),
            Int32(s.T),
            Int32(s.S),
            UInt32(s.P()),
            UInt32(s.Q()),
            divisor(s.P()),
            divisor(s.Q()),
            grid_dim=(blocks(n, THREADS), shards),
            block_dim=THREADS,
        )

    if s.are(2):
        launch[2]()
    else:
        launch[0]()


@always_inline
def _passing[relu: Bool](dy: Ptr, y: Ptr, i: Int) -> Four:
    comptime if relu:
        return load4(y, i).gt(0).select(load4(dy, i), Four(0))
    else:
        return load4(dy, i)


@always_inline
def _places(argmax: BytePtr, i: Int) -> Places:
    return argmax.unsafe_offset(i).unsafe_load[width=4, alignment=4]()


def _maxpool_backward[
    relu: Bool
](
    dx: Operand,
    dy_: Operand,
    argmax_: Operand,
    y_: Operand,
    n: UInt32,
    H: UInt32,
    W: UInt32,
    R: Int32,
    T: Int32,
    S: Int32,
    P: Int32,
    Q: Int32,
    by_H: UInt64,
    by_W: UInt64,
    by_S: UInt64,
):
    """Input pixel (h, w) is in the windows p with p S <= h < p S + R, q likewise."""
    var i = small_index()
    if i >= n:
        return
    var at = i // UInt32(QUADS)
    var row = divide(at, by_W)
    var w = at - row * W
    var plane = divide(row, by_H)
    var h = row - plane * H
    var lane = Int(i % UInt32(QUADS)) * 4
    var dy = of_shard(dy_)
    var y = of_shard(y_)
    var argmax = bytes_of_shard(argmax_)
    var d = Four(0)
    var last_p = min(Int32(divide(h, by_S)), P - 1)
    var last_q = min(Int32(divide(w, by_S)), Q - 1)
    var p = _first_window(h, R, by_S)
    while p <= last_p:
        var q = _first_window(w, T, by_S)
        while q <= last_q:
            var place = (Int32(h) - p * S) * T + Int32(w) - q * S
            var j = Int((Int32(plane) * P + p) * Q + q) * LANES + lane
            var won = _places(argmax, j).eq(UInt8(place))
            d += won.select(_passing[relu](dy, y, j), Four(0))
            q += 1
        p += 1
    store4(of_shard(dx), 4 * Int(i), d)


@always_inline
def _first_window(h: UInt32, R: Int32, by_S: UInt64) -> Int32:
    """The first p with h < p S + R: floor((h - R) / S) + 1, 0 for h < R."""
    if Int32(h) < R:
        return 0
    return Int32(divide(h - UInt32(R), by_S)) + 1


def _maxpool_backward_2x2[
    relu: Bool
](dx_: Operand, dy_: Operand, argmax_: Operand, y_: Operand, n: UInt32, Q: UInt32, by_Q: UInt64,):
    """Windows that tile the plane: a thread writes the four pixels of one window."""
    var i = small_index()
    if i >= n:
        return
    var out = i // UInt32(QUADS)
    var row = divide(out, by_Q)  # of windows, over all planes
    var q = out - row * Q
    var d = _passing[relu](of_shard(dy_), of_shard(y_), 4 * Int(i))
    var at = _places(bytes_of_shard(argmax_), 4 * Int(i))
    var W = 2 * Int(Q)
    var top = of_shard(dx_).unsafe_offset((2 * Int(row) * W + 2 * Int(q)) * LANES + Int(i % UInt32(QUADS)) * 4)
    comptime for j in range(4):
        store4(
            top,
            ((j // 2) * W + j % 2) * LANES,
            at.eq(UInt8(j)).select(d, Four(0)),
        )


def maxpool_backward(
    q: Queue,
    shards: Int,
    dx: Operand,  # (planes, H, W, L)
    dy: Operand,  # (planes, P, Q, L)
    argmax: Operand,  # (planes, P, Q, L) bytes, saved by forward
    y: Operand,  # (planes, P, Q, L), read only if `relu`
    s: Windows,
    relu: Bool,
) raises:
    """Hands each gradient to the place that won. With `relu`, x is the output of a ReLU and its backward is done in the
    same pass: where the winner is 0 nothing passes.
    """
    if relu:
        _launch_maxpool_backward[True](q, shards, dx, dy, argmax, y, s)
    else:
        _launch_maxpool_backward[False](q, shards, dx, dy, argmax, y, s)


def _launch_maxpool_backward[
    relu: Bool
](q: Queue, shards: Int, dx: Operand, dy: Operand, argmax: Operand, y: Operand, s: Windows,) raises:
    in_lanes(dx, dy)
    if argmax.address & 3 != 0:
        raise Error("[gpu] the places of a max-pool are not at a multiple of 4")
    comptime if relu:
        in_lanes(y)
    var n = quads(s.planes * s.H * s.W)
    if s.are(2) and s.H % 2 == 0 and s.W % 2 == 0:
        q.enqueue_function[_maxpool_backward_2x2[relu]](
            dx,
            dy,
            argmax,
            y,
            UInt32(n // 4),
            UInt32(s.Q()),
            divisor(s.Q()),
            grid_dim=(blocks(n // 4, THREADS), shards),
            block_dim=THREADS,
        )
        return
    q.enqueue_function[_maxpool_backward[relu]](
        dx,
        dy,
        argmax,
        y,
        UInt32(n),
        UInt32(s.H),
        UInt32(s.W),
        Int32(s.R),
        Int32(s.T),
        Int32(s.S),
        Int32(s.P()),
        Int32(s.Q()),
        divisor(s.H),
        divisor(s.W),
        divisor(s.S),
        grid_dim=(blocks(n, THREADS), shards),
        block_dim=THREADS,
    )


def _avgpool_forward(
    y: Operand,
    x: Operand,
    n: UInt32,
    H: Int32,
    W_: Int32,
    R: Int32,
    T: Int32,
    S: Int32,
    P: UInt32,
    Q: UInt32,
    by_P: UInt64,
    by_Q: UInt64,
):
    var i = small_index()
    if i >= n:
        return
    var W = Int(W_)
    var out = i // UInt32(QUADS)
    var row = divide(out, by_Q)
    var q = Int(out - row * Q)
    var plane = divide(row, by_P)
    var p = Int(row - plane * P)
    var lane = Int(i % UInt32(QUADS)) * 4
    var window = of_shard(x).unsafe_offset(((Int(plane) * Int(H) + p * Int(S)) * W + q * Int(S)) * LANES + lane)
    var s = Four(0)
    for r in range(Int(R)):
        for t in range(Int(T)):
            s += load4(window, (r * W + t) * LANES)
    var scale = Float32(1) / Float32(R * T)
    store4(of_shard(y), 4 * Int(i), s * scale)


def avgpool_forward(
    q: Queue,
    shards: Int,
    y: Operand,
    x: Operand,
    s: Windows,
) raises:
    """Mean of each window. Shapes as for maxpool_forward."""
    in_lanes(y, x)
    var n = quads(s.planes * s.P() * s.Q())
    _ = quads(s.planes * s.H * s.W)
    q.enqueue_function[_avgpool_forward](
        y,
        x,
        UInt32(n),
        Int32(s.H),
        Int32(s.W),
        Int32(s.R),
        Int32(s.T),
        Int32(s.S),
        UInt32(s.P()),
        UInt32(s.Q()),
        divisor(s.P()),
        divisor(s.Q()),
        grid_dim=(blocks(n, THREADS), shards),
        block_dim=THREADS,
    )


def _avgpool_backward(
    dx: Operand,
    dy_: Operand,
    n: UInt32,
    H: UInt32,
    W: UInt32,
    R: Int32,
    T: Int32,
    P: Int32,
    Q: Int32,
    by_H: UInt64,
    by_W: UInt64,
    by_S: UInt64,
):
    var i = small_index()
    if i >= n:
        return
    var at = i // UInt32(QUADS)
    var row = divide(at, by_W)
    var w = at - row * W
    var plane = divide(row, by_H)
    var h = row - plane * H
    var lane = Int(i % UInt32(QUADS)) * 4
    var dy = of_shard(dy_)
    var scale = Float32(1) / Float32(R * T)
    var d = Four(0)
    var last_p = min(Int32(divide(h, by_S)), P - 1)
    var last_q = min(Int32(divide(w, by_S)), Q - 1)
    var p = _first_window(h, R, by_S)
    while p <= last_p:
        var q = _first_window(w, T, by_S)
        while q <= last_q:
            var j = Int((Int32(plane) * P + p) * Q + q) * LANES + lane
            d += rounded(load4(dy, j) * scale)
            q += 1
        p += 1
    store4(of_shard(dx), 4 * Int(i), d)


def avgpool_backward(
    q: Queue,
    shards: Int,
    dx: Operand,
    dy: Operand,
    s: Windows,
) raises:
    """Spreads each gradient evenly over its window. Shapes as for maxpool_backward."""
    in_lanes(dx, dy)
    var n = quads(s.planes * s.H * s.W)
    q.enqueue_function[_avgpool_backward](
        dx,
        dy,
        UInt32(n),
        UInt32(s.H),
        UInt32(s.W),
        Int32(s.R),
        Int32(s.T),
        Int32(s.P()),
        Int32(s.Q()),
        divisor(s.H),
        divisor(s.W),
        divisor(s.S),
        grid_dim=(blocks(n, THREADS), shards),
        block_dim=THREADS,
    )


# --- ops ----------------------------------------------------------------------------------


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [
        GpuOp("maxpool_forward", call[maxpool_forward]),
        GpuOp("maxpool_backward", call[maxpool_backward]),
        GpuOp("avgpool_forward", call[avgpool_forward]),
        GpuOp("avgpool_backward", call[avgpool_backward]),
    ]
