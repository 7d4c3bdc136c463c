"""Batch normalisation (Ioffe, Szegedy 2015) of x (G, C, P, L), once for all devices: each channel moved and scaled
by the mean and variance of its P numbers of all samples of the shard; and what a shard adds to running
statistics.

stats (3, C): of each channel the mean, 1 / standard deviation, and the variance with numbers - 1 as divisor, which the
running one is made of. N (views.OfChannels) is -1 for the samples that the shard really has.
"""

from std.math import sqrt

from .functions import relu, relu_gradient
from .lanes import F32, Ptr, madd
from .op import Device, OpOf
from .views import Channel, Channels, OfChannels, Two


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
        var y = madd(x - self.mean, SIMD[F32, w](self.inverse * self.weight), SIMD[F32, w](self.bias))
        return relu[w](y) if self.relu else y


@fieldwise_init
struct Gradient(TrivialRegisterPassable):
    """The gradient by an input, from that by the output: by the sums over the channel of dy (`s`) and dy (x - mean)
    (`t`), both divided by the channel's numbers.
    """

    var mean: Float32
    var inverse: Float32
    var weight: Float32
    var s: Float32
    var t: Float32

    @always_inline
    def at[w: Int](self, dy: SIMD[F32, w], x: SIMD[F32, w]) -> SIMD[F32, w]:
        """The gradient by x."""
        var d = madd(x - self.mean, SIMD[F32, w](-self.inverse * self.inverse * self.t), dy - self.s)
        return d * (self.inverse * self.weight)


@fieldwise_init
struct Forward(Channels):
    """The arguments of `batch_norm_forward`: by the statistics of the shard if `train`, else by the mean and
    variance given; if `again`, by `stats` as they are.
    """

    var y: Ptr
    var stats: Ptr
    var x: Ptr
    var w: Ptr
    var b: Ptr
    var mean: Ptr
    var variance: Ptr
    var z: OfChannels
    var eps: Float32
    var train: Bool
    var again: Bool
    var relu: Bool

    @always_inline
    def sizes(self) -> OfChannels:
        return self.z


def _forward[T: Channel](of: T, a: Forward):
    var c = of.number()
    var C = a.z.C
    var count = Float32(max(of.samples() * a.z.P, 1))  # numbers of the channel that count
    var m = a.mean[unsafe_offset=c]
    var inverse: Float32
    if a.again:
        m = a.stats[unsafe_offset=c]
        inverse = a.stats[unsafe_offset=C + c]
    else:
        var v = a.variance[unsafe_offset=c]
        var all = Float32(0)
        if a.train:

            @always_inline
            def add[whole: Bool](i: Int, own: Int, sums: Two[T.L]) {imm a} -> Two[T.L]:
                return Two(sums.s + T.load[whole](a.x, i, own), sums.t)

            m = of.fold[False](add).s[0] / count

            @always_inline
            def square[whole: Bool](i: Int, own: Int, sums: Two[T.L]) {imm a, imm m} -> Two[T.L]:
                var d = T.own[whole](T.load[whole](a.x, i, own) - m, own)
                return Two(madd(d, d, sums.s), sums.t)

            all = of.fold[False](square).s[0]
            v = all / count
        inverse = 1 / sqrt(v + a.eps)
        if of.leads():
            a.stats[unsafe_offset=c] = m
            a.stats[unsafe_offset=C + c] = inverse
            if a.train:
                a.stats[unsafe_offset=2 * C + c] = all / max(count - 1, 1)
    var norm = Norm(m, inverse, a.w[unsafe_offset=c], a.b[unsafe_offset=c], a.relu)

    @always_inline
    def put[whole: Bool](i: Int, own: Int, there: Int) {imm a, imm norm}:
        T.store[whole](a.y, i, norm.at[T.L](T.load[whole](a.x, i, own)), there)

    of.each(put)


@fieldwise_init
struct Backward(Channels):
    """The arguments of `batch_norm_backward`.

    With `relu`, dy is the gradient of max(y, 0): where y > 0 is computed again, so that y need not be kept.
    """

    var dx: Ptr
    var dw: Ptr
    var db: Ptr
    var dy: Ptr
    var x: Ptr
    var stats: Ptr
    var w: Ptr
    var b: Ptr
    var z: OfChannels
    var train: Bool
    var relu: Bool

    @always_inline
    def sizes(self) -> OfChannels:
        return self.z


def _backward[T: Channel](of: T, a: Backward):
    var c = of.number()
    var m = a.stats[unsafe_offset=c]
    var inverse = a.stats[unsafe_offset=a.z.C + c]
    var weight = a.w[unsafe_offset=c]
    var norm = Norm(m, inverse, weight, a.b[unsafe_offset=c], False)

    @always_inline
    def passed[whole: Bool](i: Int, own: Int, v: SIMD[F32, T.L]) {imm a, imm norm} -> SIMD[F32, T.L]:
        var d = T.load[whole](a.dy, i, own)
        return relu_gradient[T.L](d, norm.at[T.L](v)) if a.relu else d

    @always_inline
    def add[whole: Bool](i: Int, own: Int, sums: Two[T.L]) {imm a, imm m, imm passed} -> Two[T.L]:
        var v = T.load[whole](a.x, i, own)
        var d = passed[whole](i, own, v)
        return Two(sums.s + d, madd(d, v - m, sums.t))

    var sums = of.fold[True](add)
    if of.leads():
        a.db[unsafe_offset=c] = sums.s[0]
        a.dw[unsafe_offset=c] = sums.t[0] * inverse
    var part = 1 / Float32(max(of.samples() * a.z.P, 1)) if a.train else Float32(0)
    var by = Gradient(m, inverse, weight, sums.s[0] * part, sums.t[0] * part)

    @always_inline
    def put[whole: Bool](i: Int, own: Int, there: Int) {imm a, imm by, imm passed}:
        var v = T.load[whole](a.x, i, own)
        T.store[whole](a.dx, i, T.own[whole](by.at[T.L](passed[whole](i, own, v), v), own), there)

    of.each(put)


@fieldwise_init
struct Running(Channels):
    """The arguments of `batch_norm_running`: what the samples take away from the running statistics and from the
    number of steps; divided by the samples of the global batch, it moves them by one step
    (python/odyssey/core/arena.py, Buffer).
    """

    var dmean: Ptr
    var dvariance: Ptr
    var dsteps: Ptr
    var stats: Ptr
    var mean: Ptr
    var variance: Ptr
    var steps: Ptr
    var C: Int
    var N: Int
    var momentum: Float32

    @always_inline
    def sizes(self) -> OfChannels:
        return OfChannels(0, self.C, 0, self.N)


@always_inline
def moved(n: Float32, momentum: Float32, before: Float32, now: Float32) -> Float32:
    """What n samples take away from a running statistic, so that it goes by `momentum` towards theirs."""
    return n * momentum * (before - now)


def _running[T: Channel](of: T, a: Running):
    if not of.leads():
        return
    var c = of.number()
    var n = Float32(of.samples())
    a.dmean[unsafe_offset=c] = moved(n, a.momentum, a.mean[unsafe_offset=c], a.stats[unsafe_offset=c])
    a.dvariance[unsafe_offset=c] = moved(n, a.momentum, a.variance[unsafe_offset=c], a.stats[unsafe_offset=2 * a.C + c])
    if c == 0:
        a.dsteps[] = -n


def ops[D: Device]() -> List[OpOf[D.Run]]:
    """The ops of this file."""
    return [
        OpOf(
            "batch_norm_forward",
            "y, stats; x, w, b, mean, variance; G, C, P, N, eps, train, again, relu",
            D.channels[Forward, _forward](),
            "again",
        ),
        OpOf(
            "batch_norm_backward",
            "dx, dw, db; dy, x, stats, w, b; G, C, P, N, train, relu",
            D.channels[Backward, _backward](),
        ),
        OpOf(
            "batch_norm_running",
            "dmean, dvariance, dsteps; stats, mean, variance, steps; C, N, momentum",
            D.channels[Running, _running](),
        ),
    ]
