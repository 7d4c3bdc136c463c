"""kernels/attention.mojo on a GPU, in the plainest form: a thread has a query, or a key, of a head, and walks over what it
sees. Nothing is kept but sums, which are added in the CPU's order; dropout draws the CPU's numbers.
"""

from max.gpu import block_idx
from std.utils.numerics import inf

from ..attention_tiles import Attention, HIDDEN, QUERIES
from ..dropout import stays
from ..functions import exp_of_vectors as exp, log
from ..lanes import F32, LANES, Ptr
from ..record import sizes_of
from .launch import GpuOp, Launch, Operand, Queue, Sent, StepContextPtr, blocks
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


@always_inline
def _factor(s: Attention, ctx: StepContextPtr, token: Int, h: Int, key: Int) -> Float32:
    """What the probability of a key is multiplied with by dropout, for a token of this shard."""
    if s.p == 0:
        return 1
    var shard = UInt32(ctx[].first) + UInt32(block_idx.y) * UInt32(ctx[].shard_size)
    var stay = stays[1](
        s.draws(h) + key // 4, shard * UInt32(s.T) + UInt32(token), s.layer, s.p, ctx[].step, ctx[].seed
    )
    return Float32(1) / (1 - s.p) if stay[key % 4] else 0


@always_inline
def _score(s: Attention, q: Ptr, k: Ptr, mask_: Operand, n: Int, h: Int, t: Int, key: Int) -> Float32:
    """HIDDEN if the mask hides the key."""
    var score = _dot(q, k, s.D) * s.scale
    if s.masks == 0:
        return score
    var at = key * s.T + t if s.masks & QUERIES else key
    return score + of_shard(mask_)[unsafe_offset=s.mask(n, h) + at]


@fieldwise_init
struct _Forward(TrivialRegisterPassable):
    """The arguments of `attention_forward`, in the order of the record."""

    var y: Operand
    var lse: Operand
    var q: Operand
    var k: Operand
    var v: Operand
    var mask: Operand
    var scratch: Operand  # the CPU's
    var s: Attention


def _forward(sent: Sent[_Forward], ctx: StepContextPtr):
    var a = sent.sizes
    var s = a.s
    var H = s.H
    var D = s.D
    var tokens = s.N * s.T
    var whose = _whose(tokens, H)
    var token = whose[0]
    var h = whose[1]
    if not whose[2]:
        return
    var y = of_shard(a.y).unsafe_offset(_at(H * D, h * D, token))
    var lse = of_shard(a.lse).unsafe_offset(_at(H, h, token))
    _fill(y, D)
    lse[] = 0
    if token >= tokens:
        return
    var third = H * D if s.fused != 0 else 0
    var of = H * D + 2 * third
    var n = token // s.T
    var t = token % s.T
    var first = n * s.S
    var keys = min(s.S, t + s.past + 1)
    var q = of_shard(a.q).unsafe_offset(_at(of, h * D, token))
    var k = of_shard(a.k)
    var v = of_shard(a.v)
    var most = -inf[F32]()
    for j in range(first, first + keys):
        var kj = k.unsafe_offset(_at(of, third + h * D, j))
        most = max(most, _score(s, q, kj, a.mask, n, h, t, j - first))
    var total = Float32(0)
    for j in range(first, first + keys):
        var kj = k.unsafe_offset(_at(of, third + h * D, j))
        var score = _score(s, q, kj, a.mask, n, h, t, j - first)
        if s.masks != 0 and score == HIDDEN:
            continue
        var p = exp(score - most)
        total += p
        p *= _factor(s, ctx, token, h, j - first)
        _add(y, p, v.unsafe_offset(_at(of, 2 * third + h * D, j)), D)
    if s.masks != 0 and total == 0:
        return
    lse[] = most + log(total)
    for d in range(D):
        y[unsafe_offset=d * LANES] *= 1 / total


@fieldwise_init
struct _Backward(TrivialRegisterPassable):
    """The arguments of `attention_backward`."""

    var dq: Operand
    var dk: Operand
    var dv: Operand
    var dy: Operand
    var y: Operand
    var lse: Operand
    var q: Operand
    var k: Operand
    var v: Operand
    var mask: Operand
    var scratch: Operand
    var s: Attention


def _backward[keys: Bool](sent: Sent[_Backward], ctx: StepContextPtr):
    """The gradient of a query, or with `keys` of a key and its value."""
    var a = sent.sizes
    var s = a.s
    var H = s.H
    var D = s.D
    var mine = s.S if keys else s.T
    var whose = _whose(s.N * mine, H)
    var token = whose[0]
    var h = whose[1]
    if not whose[2]:
        return
    var third = H * D if s.fused != 0 else 0
    var of = H * D + 2 * third
    var dq = of_shard(a.dq).unsafe_offset(_at(of, h * D, token))
    var dk = of_shard(a.dk).unsafe_offset(_at(of, third + h * D, token))
    var dv = of_shard(a.dv).unsafe_offset(_at(of, 2 * third + h * D, token))
    comptime if keys:
        _fill(dk, D)
        _fill(dv, D)
    else:
        _fill(dq, D)
    if token >= s.N * mine:
        return
    var n = token // mine
    var own = token % mine
    # the queries that see this key, or the keys that this query sees
    var start = 0
    var end = min(s.S, own + s.past + 1)
    comptime if keys:
        start = max(0, own - s.past)
        end = s.T
    for other in range(start, end):
        var i = n * s.T + (other if keys else own)
        var j = n * s.S + (own if keys else other)
        var dy = of_shard(a.dy).unsafe_offset(_at(H * D, h * D, i))
        var y = of_shard(a.y).unsafe_offset(_at(H * D, h * D, i))
        var lse = of_shard(a.lse)[unsafe_offset=_at(H, h, i)]
        var q = of_shard(a.q).unsafe_offset(_at(of, h * D, i))
        var k = of_shard(a.k).unsafe_offset(_at(of, third + h * D, j))
        var v = of_shard(a.v).unsafe_offset(_at(of, 2 * third + h * D, j))
        var score = _score(s, q, k, a.mask, n, h, i - n * s.T, j - n * s.S)
        if s.masks != 0 and score == HIDDEN:
            continue
        var p = exp(score - lse)
        var factor = _factor(s, ctx, i, h, j - n * s.S)
        var ds = (_dot(dy, v, D) * factor - _dot(dy, y, D)) * (p * s.scale)
        comptime if keys:
            _add(dk, ds, q, D)
            _add(dv, p * factor, dy, D)
        else:
            _add(dq, ds, k, D)


def _enqueue[
    T: TrivialRegisterPassable, kernel: def(Sent[T], StepContextPtr) thin
](q: Queue, r: Launch, lanes: Int) raises:
    """A thread for each of `lanes`."""
    q.enqueue_function[kernel](
        Sent(sizes_of[T](r, 1)), r.context, grid_dim=(blocks(lanes, THREADS), r.shards), block_dim=THREADS
    )


@always_inline
def _lanes(tokens: Int, H: Int) -> Int:
    return (tokens + LANES - 1) // LANES * LANES * H


def attention_forward(q: Queue, r: Launch) raises:
    """Arguments as the CPU's."""
    var s = sizes_of[Attention](r, 8)
    _enqueue[_Forward, _forward](q, r, _lanes(s.N * s.T, s.H))


def attention_backward(q: Queue, r: Launch) raises:
    """Arguments as the CPU's."""
    var s = sizes_of[Attention](r, 12)
    _enqueue[_Backward, _backward[False]](q, r, _lanes(s.N * s.T, s.H))
    _enqueue[_Backward, _backward[True]](q, r, _lanes(s.N * s.S, s.H))


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [GpuOp("attention_forward", attention_forward), GpuOp("attention_backward", attention_backward)]
