"""kernels/attention.mojo on a GPU: softmax's blocks in shared memory and registers (Dao 2023, FlashAttention-2).

A block of threads has SIDE queries of a head of a sequence and walks over the keys they see, SIDE at a time. Scores are
sums in registers; of each query there are the maximum and the sum of exponentials so far, and results are rescaled when
the maximum grows. The backward pass computes probabilities again from the saved log of the sum. A block of its first
kernel has queries as well, and gives dq and sum dy y of each query; a block of its second has SIDE keys, walks over the
queries that see them, and gives dk and dv. No two blocks add to one number.

    tile   SIDE tokens of SIDE features in shared memory: row d has feature d of all tokens, as in memory
    part   SIDE features of a head, the last filled up with zeros. Sums over features walk over all parts; of results
           a block has one part, grid z
    own, other  the block's tokens, and those it walks over

A thread has 8 x 4 numbers of own x other tokens, or of own tokens x features. Two products make all of it: `_outer`
adds over the features of two tiles, `_inner` over the other tokens, of weights (probabilities, or their gradients),
which lie in shared memory row by own token, and a tile. Tiles begin at multiples of SIDE of a sequence, so the order of
all sums depends on the sizes alone. Dropout draws the CPU's numbers. Float32 in every precision.
"""

from std.math import ceildiv, iota
from std.utils import StaticTuple

from max.gpu import AddressSpace, barrier, block_idx, thread_idx
from max.gpu.globals import MAX_THREADS_PER_BLOCK_METADATA
from max.gpu.host import FuncAttribute
from max.gpu.memory import async_copy, async_copy_wait_all, external_memory
from max.gpu.primitives.warp import shuffle_xor

from ..attention_tiles import Attention, HIDDEN, QUERIES
from ..dropout import stays
from ..functions import exp_of_vectors as exp, log
from ..lanes import F32, LANES, Ptr
from ..record import Record, sizes_of
from .gemm_tiles import NVIDIA, Quad, SMALL, Shared, meet
from .launch import GpuOp, Launch, Operand, Queue, Sent, StepContextPtr
from .quads import of_shard, store4

comptime I = Int32  # indices within a shard: those of 64 bits would take twice the registers
comptime SIDE = I(64)
comptime ROW = SIDE + I(4 if NVIDIA else 0)  # of shared memory; AMD has 64 KB
comptime TILE = Int(SIDE * ROW)
comptime TEAM = I(128)  # threads of a block; a kernel that allows three times as many leaves registers for three blocks
comptime Global = Pointer[Float32, MutUntrackedOrigin, address_space=AddressSpace.GLOBAL]
comptime ROWS = 8  # of a thread: own tokens
comptime Sums = Array[Quad, ROWS]
comptime Numbers = Array[Float32, ROWS]


# --- tiles ------------------------------------------------------------------------------


@always_inline
def _at(of: I, feature: I, token: I) -> Int:
    """Where a feature of a token lies in (G, of, L)."""
    return (Int(token // LANES) * Int(of) + Int(feature)) * LANES + Int(token % LANES)


@always_inline
def _thread(count: I) -> I:
    """This thread, in a loop over tiles.

    The term is 0, which the compiler cannot know: what it computes from the number is computed again for each tile;
    kept in registers it would take a third of them.
    """
    return I(thread_idx.x) + min(count, 0)


@always_inline
def _row(t: I) -> I:
    """The first own token of thread t. A warp has 16; a thread four neighbours and the four 8 further on."""
    return t // 32 * 16 + t // 16 % 2 * 4


@always_inline
def _row_of(i: I) -> I:
    """The distance of a thread's i-th own token from `_row`."""
    return i % 4 + i // 4 * 8


@always_inline
def _column(t: I) -> I:
    """A thread has four neighbours of 64 other tokens from 4 _column on, or every 16th feature from _column on."""
    return t % 16


@always_inline
def _quad(p: Shared, i: I) -> Quad:
    return p.unsafe_offset(Int(i)).unsafe_load[width=4, alignment=16]()


@always_inline
def _put_quad(p: Shared, i: I, v: Quad):
    p.unsafe_offset(Int(i)).unsafe_store[alignment=16](0, v)


@always_inline
def _own_quad(p: Shared, t: I, i: I) -> Quad:
    """The numbers of a thread's i-th own token in a tile, row by own token."""
    return _quad(p, (_row(t) + _row_of(i)) * ROW + 4 * _column(t))


@always_inline
def _copy[n: Int](to: Shared, x: Ptr, there: Bool):
    """Copies n floats if they are there, else zeros; on NVIDIA without a detour through registers, until `_arrive`."""
    comptime if NVIDIA:
        async_copy[4 * n, fill=Float32(0)](Global(unsafe_from_address=Int(x)), to, Int32(4 * n if there else 0))
    else:
        var v = SIMD[F32, n](0)
        if there:
            v = x.unsafe_load[width=n, alignment=4 * n]()
        to.unsafe_store[alignment=4 * n](0, v)


@always_inline
def _arrive():
    """Waits until the copies of all threads are there for all of them."""
    comptime if NVIDIA:
        async_copy_wait_all()
    barrier()


@fieldwise_init
struct _Head(TrivialRegisterPassable):
    """A head of sequence n of a tensor (G, of, L), with T tokens of each: its first feature, in group 0."""

    var p: Ptr
    var of: I
    var n: I
    var T: I
    var D: I

    @always_inline
    def token(self, t: I) -> I:
        """A token of the sequence, counted over all."""
        return self.n * self.T + t

    @always_inline
    def fill(self, to: Shared, part: I, start: I, count: I, t: I):
        """Fills a tile with `count` tokens from `start` on, and zeros. t: the thread."""
        var x = self.p.unsafe_offset(Int(part * SIDE * LANES))
        var width = self.D - part * SIDE
        var first = self.token(start)
        if (first | count) % 4 == 0:  # neighbouring threads read neighbours; of eight no two meet in a bank
            var feature = t // 4 % 2 * 4 + t // 8 % 4 + t // 32 * 8
            var column = t % 4 * 4
            x = x.unsafe_offset(_at(self.of, feature, first + column))
            comptime for u in range(8):
                var d, other = I(u % 2 * 32), I(u // 2 * 16)
                var at = to.unsafe_offset(Int((feature + d) * ROW + column + other))
                _copy[4](at, x.unsafe_offset(u % 2 * 32 * LANES), feature + d < width and column + other < count)
                comptime if u % 2 == 1:
                    x = x.unsafe_offset(Int(self.of) * LANES)
        else:
            for u in range(t, SIDE * SIDE, TEAM):
                var d, column = u // SIDE, u % SIDE
                var from_ = x.unsafe_offset(_at(self.of, d, first + column))
                _copy[1](to.unsafe_offset(Int(d * ROW + column)), from_, d < width and column < count)


@always_inline
def _outer(mut sums: Sums, a: Shared, b: Shared, features: I, t: I):
    """Adds the products of own tokens, in a, and other tokens, in b."""
    var pa = a.unsafe_offset(Int(_row(t)))
    var pb = b.unsafe_offset(Int(4 * _column(t)))
    for _ in range(I(0), features, 4):
        comptime for d in range(4):
            var vb = _quad(pb, I(d * Int(ROW)))
            comptime for half in range(2):
                var va = _quad(pa, I(d * Int(ROW) + 8 * half))
                comptime for e in range(4):
                    sums[4 * half + e] = vb.fma(Quad(va[e]), sums[4 * half + e])
        pa = pa.unsafe_offset(Int(4 * ROW))
        pb = pb.unsafe_offset(Int(4 * ROW))


@always_inline
def _inner(mut sums: Sums, weights: Shared, b: Shared, count: I, t: I):
    """Adds, for own tokens x features, the `count` other tokens of b times their weights, a row of them per own
    token.
    """
    var pa = weights.unsafe_offset(Int(_row(t) * ROW))
    var pb = b.unsafe_offset(Int(_column(t) * ROW))
    for _ in range(I(0), count, 4):
        var vb = Array[Quad, 4](fill=Quad(0))
        comptime for j in range(4):
            vb[j] = _quad(pb, I(16 * j) * ROW)
        comptime for i in range(ROWS):
            var va = _quad(pa, _row_of(I(i)) * ROW)
            comptime for e in range(4):
                comptime for j in range(4):
                    sums[i][j] = va[e].fma(vb[j][e], sums[i][j])
        pa = pa.unsafe_offset(4)
        pb = pb.unsafe_offset(4)


@always_inline
def _stage(to: Shared, weights: Sums, t: I):
    """Writes weights of own tokens x other tokens, row by own token. A warp reads only the rows that it has written."""
    comptime for i in range(ROWS):
        _put_quad(to, (_row(t) + _row_of(I(i))) * ROW + 4 * _column(t), weights[i])
    meet[SMALL]()


# --- a block ----------------------------------------------------------------------------


struct _Block[keys: Bool, plain: Bool](TrivialRegisterPassable):
    """The tokens of a block, queries or `keys` of a head of a sequence. plain: heads are of one part, and there is
    neither a mask nor dropout, so that on an H100 registers are enough for three blocks at once.
    """

    var s: Attention
    var n: I
    var h: I
    var part: I
    var parts: I
    var start: I  # its first token in the sequence
    var count: I
    var clears: Bool  # whether it is the one that writes to lanes behind the last token

    @always_inline
    def __init__(out self, s: Attention):
        var mine = I(s.S if Self.keys else s.T)
        var head, tile = I(block_idx.x) % I(s.N * s.H), I(block_idx.x) // I(s.N * s.H)
        comptime if not Self.keys:  # those that see most begin first
            tile = (mine - 1) // SIDE - tile
        self.s = s
        self.n = head // I(s.H)
        self.h = head % I(s.H)
        self.part = 0 if Self.plain else I(block_idx.z)
        self.parts = 1 if Self.plain else (I(s.D) + SIDE - 1) // SIDE
        self.start = tile * SIDE
        self.count = min(SIDE, mine - self.start)
        self.clears = tile == 0 and self.n == I(s.N) - 1

    @always_inline
    def head[third: Int](self, x: Operand) -> _Head:
        """This block's head of q (third 0), k (1) or v (2), or one of their gradients."""
        var p = of_shard(x).unsafe_offset(self.s.at(third, Int(self.h)) * LANES)
        return _Head(p, I(self.s.features()), self.n, I(self.s.T if third == 0 else self.s.S), I(self.s.D))

    @always_inline
    def result(self, y: Operand, D: Int) -> _Head:
        """This block's head of y or its gradient, or with D = 1 of lse."""
        return _Head(of_shard(y).unsafe_offset(Int(self.h) * D * LANES), I(self.s.H * D), self.n, I(self.s.T), I(D))

    @always_inline
    def put(self, y: _Head, sums: Sums):
        """Stores own tokens x features; zeros in the lanes behind the last token."""
        var p = y.p.unsafe_offset(Int(self.part * SIDE * LANES))
        var width = y.D - self.part * SIDE
        var t = I(thread_idx.x)
        comptime for j in range(4):
            comptime for half in range(2):
                var d, row = _column(t) + I(16 * j), _row(t) + I(8 * half)
                var v = Quad(0)
                comptime for e in range(4):
                    v[e] = sums[4 * half + e][j]
                if d < width and (y.token(self.start) | self.count) % 4 == 0 and row < self.count:
                    store4(p, _at(y.of, d, y.token(self.start + row)), v)
                elif d < width:
                    comptime for e in range(4):
                        if row + I(e) < self.count:
                            p[unsafe_offset=_at(y.of, d, y.token(self.start + row) + I(e))] = v[e]
        if self.clears:
            var end = I(self.s.N) * y.T
            var rest = -end % LANES
            for i in range(t, rest * min(SIDE, width), TEAM):
                p[unsafe_offset=_at(y.of, i // rest, end + i % rest)] = 0

    @always_inline
    def work(self, n: I, t: I) -> I:
        """The length of a sum for a warp: 0 if it has no own token."""
        return n if t // 32 * 16 < self.count else 0

    @always_inline
    def hide(self, mut scores: Sums, mask_: Operand, other: I, room: Shared, thread: I):
        """Scales the products with the other tokens from `other` on and adds the mask; HIDDEN where no key is seen.
        room: a tile of which a thread uses its places. Queries beyond the last may see what they like: they are zeros.
        """
        var s = self.s
        var own = self.start + _row(thread)
        var column = other + 4 * _column(thread)
        comptime for i in range(ROWS):
            # the last key that a query sees, counted from the first of this thread
            comptime if Self.keys:
                var last = min(iota[DType.int32, 4]() + (column + I(min(s.past, s.S)) - own), I(s.S) - 1 - own)
                scores[i] = last.ge(_row_of(I(i))).select(scores[i] * s.scale, Quad(HIDDEN))
            else:
                var last = min(own + I(min(s.past, s.S)) - column + _row_of(I(i)), I(s.S) - 1 - column)
                scores[i] = iota[DType.int32, 4]().le(last).select(scores[i] * s.scale, Quad(HIDDEN))
        if Self.plain or s.masks == 0:
            return
        var mask = of_shard(mask_).unsafe_offset(s.mask(Int(self.n), Int(self.h)))
        for i in range(I(ROWS)):
            var row = _row(thread) + _row_of(i)
            var v = Quad(0)
            comptime for j in range(4):
                var t = self.start + row
                var key = column + I(j)
                comptime if Self.keys:
                    swap(key, t)
                if t < I(s.T) and key < I(s.S):
                    v[j] = mask[unsafe_offset=Int(key) * s.T + Int(t) if s.masks & QUERIES else Int(key)]
            _put_quad(room, row * ROW + 4 * _column(thread), v)
        comptime for i in range(ROWS):
            scores[i] += _own_quad(room, thread, I(i))

    @always_inline
    def draw(self, ctx: StepContextPtr, other: I, room: Shared, thread: I):
        """Writes what dropout multiplies probabilities with, 1 / (1 - p) or 0, to a thread's places of a tile."""
        var s = self.s
        var keep = Float32(1) / (1 - s.p)
        var token = (UInt32(ctx[].first) + UInt32(block_idx.y) * UInt32(ctx[].shard_size)) * UInt32(s.T)
        token += UInt32(self.n * I(s.T))
        for i in range(I(ROWS)):  # four keys of a query at a time
            var row = _row(thread) + (i // 4 * 8 if Self.keys else _row_of(i))
            var column = 4 * _column(thread) + (i % 4 if Self.keys else 0)
            var t = self.start + row
            var key = other + column
            comptime if Self.keys:
                swap(key, t)
            var block = s.draws(Int(self.h)) + Int(key // 4)
            var stay = stays[1](block, token + UInt32(t), s.layer, s.p, ctx[].step, ctx[].seed)
            comptime for e in range(4):
                var at = row * ROW + column + I(e) * (ROW if Self.keys else 1)
                room[unsafe_offset=Int(at)] = keep if stay[e] else 0


# --- forward ----------------------------------------------------------------------------


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


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](3 * TEAM))
def _forward[plain: Bool](sent: Sent[_Forward], ctx: StepContextPtr, scratch: Ptr):
    var a = sent.sizes
    var s = a.s
    var own = _Block[False, plain](s)
    var queries = external_memory[Float32, address_space=AddressSpace.SHARED, alignment=16]()
    var keys = queries.unsafe_offset(TILE)  # and probabilities
    var values = queries.unsafe_offset(2 * TILE)
    var q = own.head[0](a.q)
    var k = own.head[1](a.k)
    var v = own.head[2](a.v)
    var most = Numbers(fill=HIDDEN)
    var total = Numbers(fill=0)
    var sums = Sums(fill=Quad(0))
    for other in range(I(0), min(I(s.S), own.start + own.count + I(min(s.past, s.S))), SIDE):
        var count = min(SIDE, I(s.S) - other)
        var t = _thread(count)
        var scores = Sums(fill=Quad(0))
        for part in range(own.parts):
            barrier()
            if other == 0 or own.parts > 1:
                q.fill(queries, part, own.start, own.count, t)
            k.fill(keys, part, other, count, t)
            if part == 0:
                v.fill(values, own.part, other, count, t)
            _arrive()
            _outer(scores, queries, keys, own.work(min(SIDE, q.D - part * SIDE), t), t)
        barrier()
        own.hide(scores, a.mask, other, keys, t)
        comptime for i in range(ROWS):
            var top = max(most[i], scores[i].reduce_max())
            comptime for level in range(4):
                top = max(top, shuffle_xor(top, UInt32(1 << level)))
            var base = top if top != HIDDEN else 0  # nothing seen so far
            var shrink = exp(most[i] - base)
            most[i] = top
            scores[i] = exp(scores[i] - base)
            total[i] = total[i] * shrink + scores[i].reduce_add()
            sums[i] *= shrink
        if not plain and s.p > 0:
            own.draw(ctx, other, keys, t)
            comptime for i in range(ROWS):
                scores[i] *= _own_quad(keys, t, I(i))
        _stage(keys, scores, t)
        _inner(sums, keys, values, own.work(count, t), t)
    var lse = own.result(a.lse, 1)
    var t = I(thread_idx.x)
    comptime for i in range(ROWS):
        comptime for level in range(4):
            total[i] += shuffle_xor(total[i], UInt32(1 << level))
        var log_sum = most[i] + log(total[i])
        var inverse = 1 / total[i]
        if s.masks != 0 and total[i] == 0:  # a query that sees no key
            log_sum = 0
            inverse = 0
        sums[i] *= inverse
        var row = _row(t) + _row_of(I(i))
        if row < own.count and _column(t) == 0 and own.part == 0:
            lse.p[unsafe_offset=_at(lse.of, 0, lse.token(own.start + row))] = log_sum
    own.put(own.result(a.y, s.D), sums)


# --- backward ---------------------------------------------------------------------------


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


@always_inline
def _put_delta(deltas: Ptr, own: _Block, dy: _Head, y: _Head, a: Shared, b: Shared):
    """The sum over features of dy y, for own queries: a thread has a query. a and b: tiles, free again behind a
    barrier.
    """
    var t = I(thread_idx.x)
    var sum = Float32(0)
    for part in range(own.parts):
        barrier()
        dy.fill(a, part, own.start, own.count, t)
        y.fill(b, part, own.start, own.count, t)
        _arrive()
        if t < own.count:
            for i in range(t, min(SIDE, y.D - part * SIDE) * ROW, ROW):
                sum = a[unsafe_offset=Int(i)].fma(b[unsafe_offset=Int(i)], sum)
    if t < own.count:
        deltas[unsafe_offset=Int(own.start + t)] = sum


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](I(3 if plain or not keys else 2) * TEAM))
def _backward[keys: Bool, plain: Bool](sent: Sent[_Backward], ctx: StepContextPtr, scratch: Ptr):
    """The gradients of queries, or with `keys` of keys and their values; scratch (shards, H, N T): delta of each
    query.
    """
    var a = sent.sizes
    var s = a.s
    var own = _Block[keys, plain](s)
    var a1 = external_memory[Float32, address_space=AddressSpace.SHARED, alignment=16]()
    var a2 = a1.unsafe_offset(TILE)
    var b1 = a1.unsafe_offset(2 * TILE)
    var b2 = a1.unsafe_offset(3 * TILE)
    var weights = a2 if keys else b2  # in the place of v
    var q = own.head[0](a.q)
    var k = own.head[1](a.k)
    var v = own.head[2](a.v)
    var dy = own.result(a.dy, s.D)
    var lse = own.result(a.lse, 1)
    var of_own = k if keys else q
    var of_other = q if keys else k
    var slope_own = v if keys else dy
    var slope_other = dy if keys else v
    var deltas = scratch.unsafe_offset(((block_idx.y * s.H + Int(own.h)) * s.N + Int(own.n)) * s.T)
    var first = I(0)
    var end = min(I(s.S), own.start + own.count + I(min(s.past, s.S)))
    comptime if keys:
        first = max(I(0), own.start - I(min(s.past, s.S))) // SIDE * SIDE
        end = I(s.T)
    else:
        _put_delta(deltas, own, dy, own.result(a.y, s.D), a2, b2)
    var sums = Sums(fill=Quad(0))
    var value_sums = Sums(fill=Quad(0))
    for other in range(first, end, SIDE):
        var count = min(SIDE, I(s.T if keys else s.S) - other)
        var t = _thread(count)
        var p = Sums(fill=Quad(0))
        var slopes = Sums(fill=Quad(0))
        for part in range(own.parts):
            barrier()
            if other == first or own.parts > 1:
                of_own.fill(a1, part, own.start, own.count, t)
            if keys or other == first or own.parts > 1:
                slope_own.fill(a2, part, own.start, own.count, t)
            of_other.fill(b1, part, other, count, t)
            slope_other.fill(b2, part, other, count, t)
            _arrive()
            _outer(p, a1, b1, own.work(min(SIDE, q.D - part * SIDE), t), t)
            _outer(slopes, a2, b2, own.work(min(SIDE, q.D - part * SIDE), t), t)
        barrier()
        if own.parts > 1:
            of_other.fill(b1, own.part, other, count, t)
            comptime if keys:
                slope_other.fill(b2, own.part, other, count, t)
            _arrive()
        own.hide(p, a.mask, other, weights, t)
        var log_sums = Quad(0)
        var delta = Quad(0)

        @always_inline
        def find(j: Int, query: I) {mut log_sums, mut delta, imm}:
            if query < I(s.T):
                log_sums[j] = lse.p[unsafe_offset=_at(lse.of, 0, lse.token(query))]
                delta[j] = deltas[unsafe_offset=Int(query)]

        comptime if keys:
            comptime for j in range(4):
                find(j, other + 4 * _column(t) + I(j))
        if not plain and s.p > 0:
            own.draw(ctx, other, weights, t)
            comptime for i in range(ROWS):
                slopes[i] *= _own_quad(weights, t, I(i))
        comptime for i in range(ROWS):
            comptime if not keys:
                find(0, own.start + _row(t) + _row_of(I(i)))
                log_sums = Quad(log_sums[0])
                delta = Quad(delta[0])
            p[i] = exp(p[i] - log_sums)
            slopes[i] = (slopes[i] - delta) * (p[i] * s.scale)
        comptime if keys:
            if not plain and s.p > 0:
                comptime for i in range(ROWS):
                    p[i] *= _own_quad(weights, t, I(i))
            _stage(weights, p, t)
            _inner(value_sums, weights, b2, own.work(count, t), t)
            meet[SMALL]()
        _stage(weights, slopes, t)
        _inner(sums, weights, b1, own.work(count, t), t)
    comptime if keys:
        own.put(own.head[1](a.dk), sums)
        own.put(own.head[2](a.dv), value_sums)
    else:
        own.put(own.head[0](a.dq), sums)


# --- the ops ----------------------------------------------------------------------------


def _enqueue[
    T: TrivialRegisterPassable, kernel: def(Sent[T], StepContextPtr, Ptr) thin, tiles: Int
](q: Queue, r: Launch, s: Attention, tokens: Int) raises:
    """A block for each tile of `tokens` of a head and, if it has several, each of its parts."""
    comptime SHARED = 4 * tiles * TILE
    q.enqueue_function[kernel](
        Sent(sizes_of[T](r, 1)),
        r.context,
        r.scratch,
        grid_dim=(ceildiv(tokens, Int(SIDE)) * s.N * s.H, r.shards, ceildiv(s.D, Int(SIDE))),
        block_dim=Int(TEAM),
        shared_mem_bytes=SHARED,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(SHARED)),
    )


def _plain(s: Attention) -> Bool:
    return s.D <= Int(SIDE) and s.masks == 0 and s.p == 0


def attention_forward(q: Queue, r: Launch) raises:
    """Arguments as the CPU's."""
    var s = sizes_of[Attention](r, 8)
    if _plain(s):
        _enqueue[_Forward, _forward[True], 3](q, r, s, s.T)
    else:
        _enqueue[_Forward, _forward[False], 3](q, r, s, s.T)


def attention_backward(q: Queue, r: Launch) raises:
    """Arguments as the CPU's."""
    var s = sizes_of[Attention](r, 12)
    if _plain(s):
        _enqueue[_Backward, _backward[False, True], 4](q, r, s, s.T)
        _enqueue[_Backward, _backward[True, True], 4](q, r, s, s.S)
    else:
        _enqueue[_Backward, _backward[False, False], 4](q, r, s, s.T)
        _enqueue[_Backward, _backward[True, False], 4](q, r, s, s.S)


def _backward_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var s = sizes_of[Attention](r, 12)
    return 4 * shards * s.H * s.N * s.T


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [
        GpuOp("attention_forward", attention_forward),
        GpuOp("attention_backward", attention_backward, _backward_scratch),
    ]
