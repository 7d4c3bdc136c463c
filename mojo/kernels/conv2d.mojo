"""Two-dimensional convolution over lanes (see lanes.mojo for the layout and the letters).

Forward, gradient of the weights and gradient of the input. The input comes padded (`pad_forward` in layout.mojo), so
no kernel here knows about borders. tests/mojo/definitions.mojo has what they are checked against.

In the gradient of the input the sum over K is cut in parts (parts.mojo), so that several processes can compute it
together. No other sum here is ever shared between processes.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import prefetch

from .buffers import fill
from .lanes import F32, LANES, REGISTERS, Ptr, Vec, in_tiles, load, madd, splat, store, totals
from .lowp import bias_gradient
from .parts import PARTS, cut, fold


@fieldwise_init
struct Conv(TrivialRegisterPassable):
    """The sizes of a convolution."""

    var G: Int
    var C: Int
    var H: Int
    var W: Int
    var K: Int
    var R: Int
    var T: Int
    var S: Int

    @always_inline
    def P(self) -> Int:
        """Rows of y."""
        return (self.H - self.R) // self.S + 1

    @always_inline
    def Q(self) -> Int:
        """Columns of y."""
        return (self.W - self.T) // self.S + 1

    @always_inline
    def taps(self) -> Int:
        """Weights of one output channel."""
        return self.C * self.R * self.T

    @always_inline
    def x(self) -> Int:
        """Numbers of one sample of x."""
        return self.C * self.H * self.W

    @always_inline
    def y(self) -> Int:
        """Numbers of one sample of y."""
        return self.K * self.P() * self.Q()


# --- register tiles -----------------------------------------------------------
# A tile keeps KB x QB sums in registers and needs QB loads and KB broadcasts for KB * QB FMAs.
# 4 x 6 (24 sums + 6 + 1 = 31 of 32 registers): 24 FMAs take 12 cycles, 10 loads take 5.
# AVX2 holds 8 vectors: 2 x 2. With 2 x 3 the sums spill and LeNet-5 runs at half the speed (23,000 against 46,000
# samples/s).
comptime KB = 4 if REGISTERS == 32 else 2
comptime QB = 6 if REGISTERS == 32 else (2 if REGISTERS == 8 else 1)


@always_inline
def _forward_tile[kb: Int, qb: Int, relu: Bool](y: Ptr, x: Ptr, w: Ptr, b: Ptr, size: Conv):
    """One row piece: kb output channels, qb neighbouring pixels."""
    var plane = size.P() * size.Q()
    var acc = Array[Vec, kb * qb](fill=Vec(0))
    comptime for k in range(kb):
        var bias = splat(b, k)
        comptime for q in range(qb):
            acc[k * qb + q] = bias
    var taps = size.taps()
    var wi = 0
    for c in range(size.C):
        for r in range(size.R):
            var xp = x.unsafe_offset((c * size.H + r) * size.W * LANES)
            for _ in range(size.T):
                var v = Array[Vec, qb](fill=Vec(0))
                comptime for q in range(qb):
                    v[q] = load(xp, q * size.S * LANES)
                comptime for k in range(kb):
                    var wk = splat(w, k * taps + wi)
                    comptime for q in range(qb):
                        acc[k * qb + q] = madd(v[q], wk, acc[k * qb + q])
                wi += 1
                xp = xp.unsafe_offset(LANES)
    comptime for k in range(kb):
        comptime for q in range(qb):
            var s = acc[k * qb + q]
            comptime if relu:
                s = s.lt(0).select(Vec(0), s)
            store(y, (k * plane + q) * LANES, s)


def conv2d_forward[relu: Bool](y: Ptr, x: Ptr, w: Ptr, b: Ptr, size: Conv):
    """Computes y = x * w + b (cross-correlation), then max(y, 0) if `relu`.

    Shapes: y (G, K, P, Q, L), x (G, C, H, W, L), w (K, C, R, T), b (K).
    """
    var P = size.P()
    var Q = size.Q()
    var taps = size.taps()
    for g in range(size.G):
        for p in range(P):
            var xr = x.unsafe_offset(((g * size.C) * size.H + p * size.S) * size.W * LANES)

            @always_inline
            def row[kb: Int](k: Int) {imm}:
                var yr = y.unsafe_offset(((g * size.K + k) * P + p) * Q * LANES)

                @always_inline
                def piece[qb: Int](q: Int) {imm}:
                    _forward_tile[kb, qb, relu](
                        yr.unsafe_offset(q * LANES),
                        xr.unsafe_offset(q * size.S * LANES),
                        w.unsafe_offset(k * taps),
                        b.unsafe_offset(k),
                        size,
                    )

                in_tiles[QB](Q, piece)

            in_tiles[KB](size.K, row)


# --- gradient of the weights ---------------------------------------------------
# A tap is one (c, r, t). A tile sums WB channels x TB taps over all pixels and samples: 3 x 9 sums + 3 + 1 registers,
# 12 loads for 27 FMAs. A kernel of 3 x 3 then reads dy, which is in the second level of the cache, once per channel of
# x. Lanes are added up once, at the end of a tile. A tile is given all sizes: a division takes as long as a pixel.
comptime WB = 3 if REGISTERS == 32 else 2
comptime TB = 9 if REGISTERS == 32 else (2 if REGISTERS == 8 else 1)


@always_inline
def tap_offsets[n: Int](tap: Int, size: Conv) -> Array[Int, n]:
    """Where in x, in vectors, n taps begin. Divisions would take as long as the products of a small image."""
    var offset = Array[Int, n](fill=0)
    var c, rest = divmod(tap, size.R * size.T)
    var r, t = divmod(rest, size.T)
    comptime for j in range(n):
        offset[j] = (c * size.H + r) * size.W + t
        t += 1
        if t == size.T:
            t = 0
            r += 1
        if r == size.R:
            r = 0
            c += 1
    return offset^


@no_inline
def _weight_tile[
    kb: Int, tb: Int
](dw: Ptr, dy: Ptr, x: Ptr, offset: Array[Int, tb], P: Int, Q: Int, size: Conv, begins: Bool):
    var taps = size.taps()
    # far apart and in no cache: as far away as the products of a small image are long
    comptime for k in range(kb):
        prefetch(dw.unsafe_offset(k * taps))
        prefetch(dw.unsafe_offset(k * taps + tb - 1))
    var acc = Array[Vec, kb * tb](fill=Vec(0))
    for g in range(size.G):
        for p in range(P):
            var dyp = dy.unsafe_offset((g * size.K * P + p) * Q * LANES)
            var xp = x.unsafe_offset((g * size.C * size.H + p * size.S) * size.W * LANES)
            for _ in range(Q):
                var d = Array[Vec, kb](fill=Vec(0))
                comptime for k in range(kb):
                    d[k] = load(dyp, k * P * Q * LANES)
                comptime for j in range(tb):
                    var v = load(xp, offset[j] * LANES)
                    comptime for k in range(kb):
                        acc[k * tb + j] = madd(v, d[k], acc[k * tb + j])
                dyp = dyp.unsafe_offset(LANES)
                xp = xp.unsafe_offset(size.S * LANES)
    var sums = unsafe_stack_allocation[kb * tb + LANES, F32, alignment=64]()
    totals(acc, sums)
    comptime for k in range(kb):
        comptime for j in range(tb):
            var before = Float32(0) if begins else dw[unsafe_offset=k * taps + j]
            dw[unsafe_offset=k * taps + j] = before + sums[unsafe_offset=k * tb + j]


def conv2d_backward_weight(
    dw: Ptr,  # (K, C, R, T), added to
    db: Ptr,  # (K), added to
    dy: Ptr,  # (G, K, P, Q, L)
    x: Ptr,  # (G, C, H, W, L)
    size: Conv,
    begins: Bool = False,
):
    """Adds the gradients of weights and bias, summed over samples and pixels; to zeros if it `begins`."""
    var P = size.P()
    var Q = size.Q()
    var taps = size.taps()

    # Taps of x meet all channels of dy that a quarter of the second level of the cache holds. Pieces are of nearly one
    # length: a short one has too few sums to hide how long an addition takes.
    var held = ceildiv(CACHED // 4, size.G * P * Q * LANES * WB) * WB
    var tap_pieces = ceildiv(taps, TB)
    for first in range(0, size.K, held):
        var n = min(held, size.K - first)
        var pieces = ceildiv(n, WB)
        var short, longer = divmod(n, pieces)
        for i in range(tap_pieces):
            var tap = taps * i // tap_pieces
            comptime for tb in range(1, TB + 1):
                if taps * (i + 1) // tap_pieces - tap == tb:
                    var offset = tap_offsets[tb](tap, size)
                    var k = first
                    for j in range(pieces):
                        var long = short + Int(j < longer)
                        comptime for kb in range(1, WB + 1):
                            if long == kb:
                                _weight_tile[kb, tb](
                                    dw.unsafe_offset(k * taps + tap),
                                    dy.unsafe_offset(k * P * Q * LANES),
                                    x,
                                    offset,
                                    P,
                                    Q,
                                    size,
                                    begins,
                                )
                        k += long

    if begins:
        fill(db, 0, size.K)
    bias_gradient[LANES](db, dy, size.G, size.K, P * Q)


# --- gradient of the input -----------------------------------------------------
# Stride 1, T known at compile time: a piece of qb pixels of one row of dy is spread over qb + T - 1 pixels of dx, held
# in registers over all k and r, so no multiplication meets a border zero (padding dy instead costs up to twice the
# work for LeNet's second layer). qb + T - 1 sums of cb input channels + qb pixels + 1 weight must fit the registers.
# The first qb pixels are complete then; the others belong to the next piece too, so each part of the sum over k hands
# its T - 1 on, and adds to them there.
comptime PIECES: List[Int] = [12, 10, 8, 6, 4, 2, 1]
comptime CACHED = 1 << 18  # floats of dy that stay in the second level of the cache


def _fits(T: Int, cb: Int, qb: Int) -> Bool:
    """Whether the registers hold a piece of qb pixels of cb channels."""
    return cb * (qb + T - 1) + qb + 1 < REGISTERS or qb == 1


@always_inline
def _spread_piece[
    T: Int, cb: Int, qb: Int
](dx: Ptr, dy: Ptr, w: Ptr, carry: Ptr, size: Conv, P: Int, Q: Int, part: Int, parts: Int, r0: Int, r1: Int):
    """Spreads rows r0..r1 of the kernel for cb input channels; dy points at the row that meets r = 0, dy and w at the
    first k of `part`.

    `carry` (parts, cb, T - 1, L) comes from the piece on the left and goes to the one on the right.
    """
    comptime n = qb + T - 1
    var saved = unsafe_stack_allocation[2 * cb * qb * LANES, F32, alignment=64]()
    var start = cut(size.K, part)
    var dx_channel = size.H * size.W * LANES

    @always_inline
    def chain(p: Int, parts: Int) {imm}:
        var old = carry.unsafe_offset(p * cb * (T - 1) * LANES)
        var acc = Array[Vec, cb * n](fill=Vec(0))
        comptime for c in range(cb):
            comptime for i in range(T - 1):
                acc[c * n + i] = load(old, (c * (T - 1) + i) * LANES)
        for k in range(cut(size.K, part + p) - start, cut(size.K, part + p + 1) - start):
            for r in range(r0, r1):
                var d = dy.unsafe_offset((k * P - r) * Q * LANES)
                var wr = w.unsafe_offset((k * size.C * size.R + r) * T)
                var v = Array[Vec, qb](fill=Vec(0))
                comptime for q in range(qb):
                    v[q] = load(d, q * LANES)
                comptime for c in range(cb):
                    comptime for t in range(T):
                        var wt = splat(wr, c * size.R * T + t)
                        comptime for q in range(qb):
                            acc[c * n + q + t] = madd(v[q], wt, acc[c * n + q + t])
        comptime for c in range(cb):
            comptime for i in range(T - 1):
                store(old, (c * (T - 1) + i) * LANES, acc[c * n + qb + i])
        var done = Array[Vec, cb * qb](fill=Vec(0))
        comptime for c in range(cb):
            comptime for q in range(qb):
                done[c * qb + q] = acc[c * n + q]
        fold(done, saved, p, parts)
        if p + 1 == parts:
            comptime for c in range(cb):
                comptime for q in range(qb):
                    store(dx, c * dx_channel + q * LANES, done[c * qb + q])

    # Unrolled, because then the registers need no shuffling between parts: 62 us became 63, not 68 (LeNet's second).
    comptime if cb == 1:
        if parts == PARTS:
            comptime for p in range(PARTS):
                chain(p, PARTS)
            return
    for p in range(parts):
        chain(p, parts)


@always_inline
def _spread_row[T: Int, cb: Int](dx: Ptr, dy: Ptr, w: Ptr, size: Conv, part: Int, parts: Int, r0: Int, r1: Int):
    """One row of cb input channels, in pieces from left to right."""
    var P = size.P()
    var Q = size.Q()
    # one vector more than needed, so that there is one for T = 1
    var carry = unsafe_stack_allocation[(PARTS * cb * (T - 1) + 1) * LANES, F32, alignment=64]()
    var saved = unsafe_stack_allocation[2 * LANES, F32, alignment=64]()
    var channel = size.H * size.W * LANES
    for i in range(parts * cb * (T - 1)):
        store(carry, i * LANES, Vec(0))
    var q = 0
    comptime for i in range(len(PIECES)):
        comptime qb = materialize[PIECES]()[i]
        comptime if _fits(T, cb, qb):
            while q + qb <= Q:
                var at = q * LANES
                _spread_piece[T, cb, qb](
                    dx.unsafe_offset(at), dy.unsafe_offset(at), w, carry, size, P, Q, part, parts, r0, r1
                )
                q += qb
    for c in range(cb):
        for i in range(T - 1):
            var sum = Array[Vec, 1](fill=Vec(0))
            for p in range(parts):
                sum[0] = load(carry, ((p * cb + c) * (T - 1) + i) * LANES)
                fold(sum, saved, p, parts)
            store(dx, c * channel + (Q + i) * LANES, sum[0])


def _backward_input_spread[T: Int](dx: Ptr, dy: Ptr, w: Ptr, size: Conv, part: Int, parts: Int):
    var P = size.P()
    var Q = size.Q()
    var start = cut(size.K, part)
    var held = cut(size.K, part + parts) - start
    # Rows of dx share the weights of a channel, which lie K rows of w apart, if the dy of a group stays in the cache.
    var block = size.H if size.y() * LANES <= CACHED else 1
    for g in range(size.G):
        for h0 in range(0, size.H, block):

            @always_inline
            def channels[cb: Int](c: Int) {imm}:
                for h in range(h0, min(h0 + block, size.H)):
                    _spread_row[T, cb](
                        dx.unsafe_offset(((g * size.C + c) * size.H + h) * size.W * LANES),
                        dy.unsafe_offset((g * held * P + h) * Q * LANES),
                        w.unsafe_offset((start * size.C + c) * size.R * T),
                        size,
                        part,
                        parts,
                        max(0, h - P + 1),
                        min(size.R, h + 1),
                    )

            # Short pieces of one channel have too few sums to hide how long an addition takes (512 -> 512 at 4 x 4:
            # half the speed); several channels share their loads of dy, too.
            var c = 0
            comptime if REGISTERS == 32 and T < 5:
                if Q < 8:
                    while c + 3 <= size.C:
                        channels[3](c)
                        c += 3
                while c + 2 <= size.C:
                    channels[2](c)
                    c += 2
            while c < size.C:
                channels[1](c)
                c += 1


# Any stride and kernel: a pixel of dx gathers the taps that used it. Pixels a stride apart have the same taps, but for
# those near a border, so a tile is some of them, of some channels; it takes its weights once.


trait Gather(TrivialRegisterPassable):
    """How a tile of dx is computed."""

    def tile[cb: Int, qb: Int](self, c: Int, h: Int, i: Int):
        """Pixels i, i + S ... of row h of channels c, c + 1 ..., which all have the taps of the first."""
        ...


@always_inline
def gather_rows[T: Gather, //](of: T, size: Conv, c: Int, h0: Int, h1: Int):
    """Rows h0 to h1 of the channels from c on: KB of them, or those that are left."""
    var Q = size.Q()

    @always_inline
    def row[cb: Int](h: Int) {imm}:
        for phase in range(min(size.S, size.W)):
            var taps = (size.T - phase + size.S - 1) // size.S
            var n = (size.W - phase + size.S - 1) // size.S
            var first = min(max(taps - 1, 0), n)  # pixels left of it miss taps
            var last = max(min(n, Q), first) if taps > 0 else n  # from it on
            for j in range(first):
                of.tile[cb, 1](c, h, phase + j * size.S)
            var pieces = (last - first + QB - 1) // QB
            for p in range(pieces):
                var q = (last - first) * p // pieces
                var long = (last - first) * (p + 1) // pieces - q
                comptime for qb in range(1, QB + 1):
                    if long == qb:
                        of.tile[cb, qb](c, h, phase + (first + q) * size.S)
            for j in range(last, n):
                of.tile[cb, 1](c, h, phase + j * size.S)

    comptime for cb in range(1, KB + 1):
        if min(size.C - c, KB) == cb:
            for h in range(h0, h1):
                row[cb](h)


@fieldwise_init
struct _Gather[L: Int](Gather):
    """One group in float32, the sum over K in parts."""

    var dx: Ptr
    var dy: Ptr
    var w: Ptr
    var size: Conv
    var part: Int
    var parts: Int

    @no_inline
    def tile[cb: Int, qb: Int](self, c: Int, h: Int, i: Int):
        var size = self.size
        var P = size.P()
        var Q = size.Q()
        var start = cut(size.K, self.part)
        var saved = unsafe_stack_allocation[2 * cb * qb * Self.L, F32, alignment=64]()
        var acc = Array[SIMD[F32, Self.L], cb * qb](fill=SIMD[F32, Self.L](0))
        var used = h % size.S < size.R and i % size.S < size.T  # by any tap
        for part in range(self.parts if used else 0):
            var k0 = cut(size.K, self.part + part)
            var k1 = cut(size.K, self.part + part + 1)
            comptime for n in range(cb * qb):
                acc[n] = SIMD[F32, Self.L](0)
            for r in range(h % size.S, size.R, size.S):
                var p = (h - r) // size.S
                if h < r or p >= P:
                    continue
                for t in range(i % size.S, size.T, size.S):
                    var q = (i - t) // size.S
                    if i < t or q >= Q:
                        continue
                    var d = self.dy.unsafe_offset((((k0 - start) * P + p) * Q + q) * Self.L)
                    var w = self.w.unsafe_offset(((k0 * size.C + c) * size.R + r) * size.T + t)
                    for _ in range(k0, k1):
                        var v = Array[SIMD[F32, Self.L], qb](fill=SIMD[F32, Self.L](0))
                        comptime for n in range(qb):
                            v[n] = load[Self.L](d, n * Self.L)
                        comptime for m in range(cb):
                            var wm = SIMD[F32, Self.L](w[unsafe_offset=m * size.R * size.T])
                            comptime for n in range(qb):
                                acc[m * qb + n] = madd(v[n], wm, acc[m * qb + n])
                        d = d.unsafe_offset(P * Q * Self.L)
                        w = w.unsafe_offset(size.taps())
            fold(acc, saved, part, self.parts)
        comptime for m in range(cb):
            comptime for n in range(qb):
                store[Self.L](self.dx, (((c + m) * size.H + h) * size.W + i + n * size.S) * Self.L, acc[m * qb + n])


def conv2d_backward_input_any[L: Int](dx: Ptr, dy: Ptr, w: Ptr, size: Conv, part: Int = 0, parts: Int = PARTS):
    """Any stride and kernel."""
    var held = cut(size.K, part + parts) - cut(size.K, part)
    # As for stride 1, all rows share the weights of some channels, or two strides of rows do.
    var block = size.H if size.y() * L <= CACHED else 2 * size.S
    for g in range(size.G):
        var dyg = dy.unsafe_offset(g * held * size.P() * size.Q() * L)
        var of = _Gather[L](dx.unsafe_offset(g * size.x() * L), dyg, w, size, part, parts)
        for h in range(0, size.H, block):
            for c in range(0, size.C, KB):
                gather_rows(of, size, c, h, min(h + block, size.H))


def conv2d_backward_input(
    dx: Ptr,  # (G, C, H, W, L)
    dy: Ptr,  # (G, K, P, Q, L), or of the output channels of the parts only
    w: Ptr,  # (K, C, R, T), all of it
    size: Conv,
    part: Int = 0,
    parts: Int = PARTS,
):
    """Writes the gradient of the (padded) input.

    The sum over K in parts.

    With `parts` of 1 or 2 it writes their node of the sum only, for tensor parallelism.
    """
    comptime for T in range(1, 6, 2):
        if size.S == 1 and size.T == T:
            return _backward_input_spread[T](dx, dy, w, size, part, parts)
    conv2d_backward_input_any[LANES](dx, dy, w, size, part, parts)
