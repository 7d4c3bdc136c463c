"""kernels/attention.mojo on a GPU, in the plainest form: a thread has a query, or a key, of a head, and walks over what it
sees. Nothing is kept but sums, which are added in the CPU's order.
"""

from std.utils.numerics import inf

from ..attention import Attention
from ..functions import exp, log
from ..lanes import F32, LANES, Ptr
from ..record import sizes_of
from .launch import GpuOp, Launch, Queue, blocks
from .quads import THREADS, index, of_shard


@always_inline
def _at(of: Int, feature: Int, token: Int) -> Int:
    """Where a feature of a token lies in (G, of, L)."""
    return (token // LANES * of + feature) * LANES + token % LANES


@always_inline
def _dot(a: Ptr, b: Ptr, D: Int) -> Float32:
    var s = Float32(0)
    for d in range(D):
        s = a[unsafe_offset=d * LANES].fma(b[unsafe_offset=d * LANES], s)
    return s


@always_inline
def _add(y: Ptr, a: Float32, x: Ptr, D: Int):
    for d in range(D):
        var i = d * LANES
        y[unsafe_offset=i] = a.fma(x[unsafe_offset=i], y[unsafe_offset=i])


@always_inline
def _fill(y: Ptr, D: Int):
    for d in range(D):
        y[unsafe_offset=d * LANES] = 0


@always_inline
def _whose(tokens: Int, H: Int) -> Tuple[Int, Int, Bool]:
    """This thread's token and head, and whether there is such a lane at all."""
    var i = index()
    var token = i // (LANES * H) * LANES + i % LANES
    return token, i // LANES % H, token < (tokens + LANES - 1) // LANES * LANES


def _forward(
    y_: Ptr,
    ys: Int64,
    lse_: Ptr,
    ls: Int64,
    q_: Ptr,
    qs: Int64,
    k_: Ptr,
    ks: Int64,
    v_: Ptr,
    vs: Int64,
    N: Int32,
    T_: Int32,
    S: Int32,
    H_: Int32,
    D_: Int32,
    past: Int32,
    fused: Int32,
    scale: Float32,
):
    var T = Int(T_)
    var H = Int(H_)
    var D = Int(D_)
    var tokens = Int(N) * T
    var whose = _whose(tokens, H)
    var token = whose[0]
    var h = whose[1]
    if not whose[2]:
        return
    var y = of_shard(y_, ys).unsafe_offset(_at(H * D, h * D, token))
    var lse = of_shard(lse_, ls).unsafe_offset(_at(H, h, token))
    _fill(y, D)
    lse[] = 0
    if token >= tokens:
        return
    var third = H * D if fused != 0 else 0
    var of = H * D + 2 * third
    var first = token // T * Int(S)
    var keys = min(Int(S), token % T + Int(past) + 1)
    var q = of_shard(q_, qs).unsafe_offset(_at(of, h * D, token))
    var k = of_shard(k_, ks)
    var v = of_shard(v_, vs)
    var most = -inf[F32]()
    for j in range(first, first + keys):
        var kj = k.unsafe_offset(_at(of, third + h * D, j))
        most = max(most, _dot(q, kj, D) * scale)
    var total = Float32(0)
    for j in range(first, first + keys):
        var kj = k.unsafe_offset(_at(of, third + h * D, j))
        var p = exp(_dot(q, kj, D) * scale - most)
        total += p
        _add(y, p, v.unsafe_offset(_at(of, 2 * third + h * D, j)), D)
    lse[] = most + log(total)
    for d in range(D):
        y[unsafe_offset=d * LANES] *= 1 / total


def _backward[
    keys: Bool
](
    dq_: Ptr,
    dqs: Int64,
    dk_: Ptr,
    dks: Int64,
    dv_: Ptr,
    dvs: Int64,
    dy_: Ptr,
    dys: Int64,
    y_: Ptr,
    ys: Int64,
    lse_: Ptr,
    ls: Int64,
    q_: Ptr,
    qs: Int64,
    k_: Ptr,
    ks: Int64,
    v_: Ptr,
    vs: Int64,
    N: Int32,
    T_: Int32,
    S_: Int32,
    H_: Int32,
    D_: Int32,
    past: Int32,
    fused: Int32,
    scale: Float32,
):
    """The gradient of a query, or with `keys` of a key and its value."""
    var T = Int(T_)
    var S = Int(S_)
    var H = Int(H_)
    var D = Int(D_)
    var mine = S if keys else T
    var whose = _whose(Int(N) * mine, H)
    var token = whose[0]
    var h = whose[1]
    if not whose[2]:
        return
    var third = H * D if fused != 0 else 0
    var of = H * D + 2 * third
    var dq = of_shard(dq_, dqs).unsafe_offset(_at(of, h * D, token))
    var dk = of_shard(dk_, dks).unsafe_offset(_at(of, third + h * D, token))
    var dv = of_shard(dv_, dvs).unsafe_offset(_at(of, 2 * third + h * D, token))
    comptime if keys:
        _fill(dk, D)
        _fill(dv, D)
    else:
        _fill(dq, D)
    if token >= Int(N) * mine:
        return
    var n = token // mine
    var own = token % mine
    # the queries that see this key, or the keys that this query sees
    var start = 0
    var end = min(S, own + Int(past) + 1)
    comptime if keys:
        start = max(0, own - Int(past))
        end = T
    for other in range(start, end):
        var i = n * T + (other if keys else own)
        var j = n * S + (own if keys else other)
        var dy = of_shard(dy_, dys).unsafe_offset(_at(H * D, h * D, i))
        var y = of_shard(y_, ys).unsafe_offset(_at(H * D, h * D, i))
        var lse = of_shard(lse_, ls)[unsafe_offset=_at(H, h, i)]
        var q = of_shard(q_, qs).unsafe_offset(_at(of, h * D, i))
        var k = of_shard(k_, ks).unsafe_offset(_at(of, third + h * D, j))
        var v = of_shard(v_, vs).unsafe_offset(_at(of, 2 * third + h * D, j))
        var p = exp(_dot(q, k, D) * scale - lse)
        var ds = (_dot(dy, v, D) - _dot(dy, y, D)) * p * scale
        comptime if keys:
            _add(dk, ds, q, D)
            _add(dv, p, dy, D)
        else:
            _add(dq, ds, k, D)


def attention_forward(queue: Queue, r: Launch) raises:
    """Arguments as the CPU's."""
    var s = sizes_of[Attention](r, 7)
    var y = r.op(1)
    var lse = r.op(2)
    var q = r.op(3)
    var k = r.op(4)
    var v = r.op(5)
    var lanes = (s.N * s.T + LANES - 1) // LANES * LANES
    queue.enqueue_function[_forward](
        y.ptr(),
        y.step(),
        lse.ptr(),
        lse.step(),
        q.ptr(),
        q.step(),
        k.ptr(),
        k.step(),
        v.ptr(),
        v.step(),
        Int32(s.N),
        Int32(s.T),
        Int32(s.S),
        Int32(s.H),
        Int32(s.D),
        Int32(s.past),
        Int32(s.fused),
        s.scale,
        grid_dim=(blocks(lanes * s.H, THREADS), r.shards),
        block_dim=THREADS,
    )


@always_inline
def _enqueue[keys: Bool](queue: Queue, r: Launch, s: Attention) raises:
    var dq = r.op(1)
    var dk = r.op(2)
    var dv = r.op(3)
    var dy = r.op(4)
    var y = r.op(5)
    var lse = r.op(6)
    var q = r.op(7)
    var k = r.op(8)
    var v = r.op(9)
    var mine = s.S if keys else s.T
    var lanes = (s.N * mine + LANES - 1) // LANES * LANES
    queue.enqueue_function[_backward[keys]](
        dq.ptr(),
        dq.step(),
        dk.ptr(),
        dk.step(),
        dv.ptr(),
        dv.step(),
        dy.ptr(),
        dy.step(),
        y.ptr(),
        y.step(),
        lse.ptr(),
        lse.step(),
        q.ptr(),
        q.step(),
        k.ptr(),
        k.step(),
        v.ptr(),
        v.step(),
        Int32(s.N),
        Int32(s.T),
        Int32(s.S),
        Int32(s.H),
        Int32(s.D),
        Int32(s.past),
        Int32(s.fused),
        s.scale,
        grid_dim=(blocks(lanes * s.H, THREADS), r.shards),
        block_dim=THREADS,
    )


def attention_backward(queue: Queue, r: Launch) raises:
    """Arguments as the CPU's."""
    var s = sizes_of[Attention](r, 11)
    _enqueue[False](queue, r, s)
    _enqueue[True](queue, r, s)


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [
        GpuOp("attention_forward", attention_forward),
        GpuOp("attention_backward", attention_backward),
    ]
