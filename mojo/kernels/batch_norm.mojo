"""Batch normalisation (Ioffe, Szegedy 2015) of x (G, C, P, L): each channel moved and scaled by the mean and variance of its
P numbers of all samples of the shard; and what a shard adds to running statistics.

stats (3, C): of each channel the mean, 1 / standard deviation, and the variance with numbers - 1 as divisor, which the running
one is made of. N is -1 for the samples that the shard really has.
"""

from std.math import sqrt

from .elementwise import relu, relu_gradient
from .lanes import (
    F32,
    LANES,
    Ptr,
    Vec,
    first,
    load,
    load_first,
    madd,
    store,
    store_first,
)
from .op import Op, call
from .record import Record


@fieldwise_init
struct Sizes(TrivialRegisterPassable):
    """Of x, and how many samples count."""

    var G: Int
    var C: Int
    var P: Int
    var N: Int

    @always_inline
    def samples(self, valid: Int) -> Int:
        """How many samples count, of a shard that really has `valid`."""
        return self.N if self.N >= 0 else valid

    @always_inline
    def numbers(self, valid: Int) -> Float32:
        """Numbers of a channel."""
        return Float32(max(self.samples(valid) * self.P, 1))


@fieldwise_init
struct Norm(TrivialRegisterPassable):
    """How numbers of a channel are normalised."""

    var mean: Float32
    var inverse: Float32
    var weight: Float32
    var bias: Float32
    var relu: Bool

    @always_inline
    def at[w: Int](self, x: SIMD[F32, w]) -> SIMD[F32, w]:
        """The output for an input."""
        var y = madd(
            x - self.mean,
            SIMD[F32, w](self.inverse * self.weight),
            SIMD[F32, w](self.bias),
        )
        return relu[w](y) if self.relu else y


@fieldwise_init
struct Gradient(TrivialRegisterPassable):
    """The gradient by an input, from that by the output: by the sums over the channel of dy (`s`) and dy (x - mean) (`t`),
    both divided by the channel's numbers.
    """

    var mean: Float32
    var inverse: Float32
    var weight: Float32
    var s: Float32
    var t: Float32

    @always_inline
    def at[w: Int](self, dy: SIMD[F32, w], x: SIMD[F32, w]) -> SIMD[F32, w]:
        """The gradient by x."""
        var d = madd(
            x - self.mean,
            SIMD[F32, w](-self.inverse * self.inverse * self.t),
            dy - self.s,
        )
        return d * (self.inverse * self.weight)


@always_inline
def _walk[B: def[whole: Bool, j: Int](Int, Int, Int) -> None, //](body: B, z: Sizes, L: Int, live: Int, channel: Int):
    """Calls body[whole, j](at, live, there) for each vector of a channel, j being 0, 1, 2, 3 in turn: where it begins, how
    many of its floats are a sample's, how many are in memory; all 16 if it is whole.
    """
    var n = z.P * L
    for g in range(z.G):
        var at = (g * z.C + channel) * n
        var left = live - g * L
        var i = 0
        if left >= L:
            while i + 4 * LANES <= n:
                comptime for j in range(4):
                    body[True, j](at + i + j * LANES, LANES, LANES)
                i += 4 * LANES
            while i + LANES <= n:
                body[True, 0](at + i, LANES, LANES)
                i += LANES
        while i < n:
            var there = min(n - i, LANES)
            var own = there if left >= L else (0 if L == 1 else max(left, 0))
            body[False, 0](at + i, own, there)
            i += LANES


comptime _Parts = Array[Vec, 4]


@always_inline
def _total(parts: _Parts) -> Float32:
    return ((parts[0] + parts[1]) + (parts[2] + parts[3])).reduce_add()


@always_inline
def _load[whole: Bool](p: Ptr, i: Int, n: Int) -> Vec:
    comptime if whole:
        return load(p, i)
    else:
        return load_first(p, i, n)


@always_inline
def _store[whole: Bool](p: Ptr, i: Int, v: Vec, n: Int):
    comptime if whole:
        store(p, i, v)
    else:
        store_first(p, i, v, n)


def _forward(
    y: Ptr,
    stats: Ptr,
    x: Ptr,
    w: Ptr,
    b: Ptr,
    mean: Ptr,
    variance: Ptr,
    z: Sizes,
    eps: Float32,
    train: Bool,
    again: Bool,
    relu: Bool,
    r: Record,
):
    """By the statistics of the shard if `train`, else by the mean and variance given; if `again`, by `stats` as they are.
    """
    var L = r.lanes()
    var live = z.samples(Int(r.context[].valid))
    var count = z.numbers(Int(r.context[].valid))
    for c in range(z.C):
        var m = mean[unsafe_offset=c]
        var v = variance[unsafe_offset=c]
        if train and not again:
            var sums = _Parts(fill=Vec(0))

            @always_inline
            def add[whole: Bool, j: Int](i: Int, own: Int, there: Int) {mut sums, imm x}:
                sums[j] += _load[whole](x, i, own)

            _walk(add, z, L, live, c)
            m = _total(sums) / count
            var squares = _Parts(fill=Vec(0))

            @always_inline
            def square[whole: Bool, j: Int](i: Int, own: Int, there: Int) {mut squares, imm x, imm m}:
                var d = _load[whole](x, i, own) - m
                comptime if not whole:
                    d = first(own).select(d, Vec(0))
                squares[j] = madd(d, d, squares[j])

            _walk(square, z, L, live, c)
            var all = _total(squares)
            v = all / count
            stats[unsafe_offset=2 * z.C + c] = all / max(count - 1, 1)
        if not again:
            stats[unsafe_offset=c] = m
            stats[unsafe_offset=z.C + c] = 1 / sqrt(v + eps)
        var norm = Norm(
            stats[unsafe_offset=c],
            stats[unsafe_offset=z.C + c],
            w[unsafe_offset=c],
            b[unsafe_offset=c],
            relu,
        )

        @always_inline
        def put[whole: Bool, j: Int](i: Int, own: Int, there: Int) {imm x, imm y, imm norm}:
            _store[whole](y, i, norm.at[LANES](_load[whole](x, i, own)), there)

        _walk(put, z, L, live, c)


def _backward[
    relu: Bool
](dx: Ptr, dw: Ptr, db: Ptr, dy: Ptr, x: Ptr, stats: Ptr, w: Ptr, b: Ptr, z: Sizes, train: Bool, r: Record,):
    var L = r.lanes()
    var live = z.samples(Int(r.context[].valid))
    var count = z.numbers(Int(r.context[].valid))
    for c in range(z.C):
        var m = stats[unsafe_offset=c]
        var inverse = stats[unsafe_offset=z.C + c]
        var norm = Norm(m, inverse, w[unsafe_offset=c], b[unsafe_offset=c], False)

        @always_inline
        def passed[whole: Bool](i: Int, own: Int, v: Vec) {imm dy, imm norm} -> Vec:
            var d = _load[whole](dy, i, own)
            comptime if relu:
                d = relu_gradient[LANES](d, norm.at[LANES](v))
            return d

        var sums = _Parts(fill=Vec(0))
        var products = _Parts(fill=Vec(0))

        @always_inline
        def add[whole: Bool, j: Int](i: Int, own: Int, there: Int) {mut sums, mut products, imm x, imm m, imm passed}:
            var v = _load[whole](x, i, own)
            var d = passed[whole](i, own, v)
            sums[j] += d
            products[j] = madd(d, v - m, products[j])

        _walk(add, z, L, live, c)
        var s = _total(sums)
        var t = _total(products)
        db[unsafe_offset=c] = s
        dw[unsafe_offset=c] = t * inverse
        var part = 1 / count if train else Float32(0)
        var by = Gradient(m, inverse, w[unsafe_offset=c], s * part, t * part)

        @always_inline
        def put[whole: Bool, j: Int](i: Int, own: Int, there: Int) {imm x, imm dx, imm by, imm passed}:
            var v = _load[whole](x, i, own)
            v = by.at[LANES](passed[whole](i, own, v), v)
            comptime if not whole:
                v = first(own).select(v, Vec(0))
            _store[whole](dx, i, v, there)

        _walk(put, z, L, live, c)


def _backward_op(
    dx: Ptr,
    dw: Ptr,
    db: Ptr,
    dy: Ptr,
    x: Ptr,
    stats: Ptr,
    w: Ptr,
    b: Ptr,
    z: Sizes,
    train: Bool,
    relu: Bool,
    r: Record,
):
    """With `relu`, dy is the gradient of max(y, 0): where y > 0 is computed again, so that y need not be kept."""
    if relu:
        _backward[True](dx, dw, db, dy, x, stats, w, b, z, train, r)
    else:
        _backward[False](dx, dw, db, dy, x, stats, w, b, z, train, r)


@always_inline
def moved(n: Float32, momentum: Float32, before: Float32, now: Float32) -> Float32:
    """What n samples take away from a running statistic, so that it goes by `momentum` towards theirs."""
    return n * momentum * (before - now)


def _running(
    dmean: Ptr,
    dvariance: Ptr,
    dsteps: Ptr,
    stats: Ptr,
    mean: Ptr,
    variance: Ptr,
    steps: Ptr,
    C: Int,
    N: Int,
    momentum: Float32,
    r: Record,
):
    var n = Float32(N if N >= 0 else Int(r.context[].valid))
    for c in range(C):
        dmean[unsafe_offset=c] = moved(n, momentum, mean[unsafe_offset=c], stats[unsafe_offset=c])
        dvariance[unsafe_offset=c] = moved(
            n,
            momentum,
            variance[unsafe_offset=c],
            stats[unsafe_offset=2 * C + c],
        )
    dsteps[] = -n


def ops() -> List[Op]:
    """The ops of this file. `batch_norm_running`: what the samples take away from the running statistics and from the number
    of steps; divided by the samples of the global batch, it moves them by one step (python/odyssey/core/arena.py, Buffer).
    """
    return [
        Op(
            "batch_norm_forward",
            "y, stats; x, w, b, mean, variance; G, C, P, N, eps, train, again, relu",
            call[_forward],
            "again",
        ),
        Op(
            "batch_norm_backward",
            "dx, dw, db; dy, x, stats, w, b; G, C, P, N, train, relu",
            call[_backward_op],
        ),
        Op(
            "batch_norm_running",
            "dmean, dvariance, dsteps; stats, mean, variance, steps; C, N, momentum",
            call[_running],
        ),
    ]
