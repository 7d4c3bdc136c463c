"""Convolutions with groups of channels or dilation, in lanes and in rows (see lanes.mojo for the letters).

Channels are cut in `groups` equal runs, each of which is a convolution of its own: output channel k reads the C /
groups channels of its run, so w is (K, C / groups, R, T). With dilation D the taps are D pixels apart. The kernels of
conv2d.mojo are faster for layers without either; these are one form for both layouts, and each sum has the same order
in both.
"""

from .conv2d import Conv, KB, QB, TB
from .lanes import F32, LANES, Ptr, in_tiles_and_ones, load, madd, store
from .lowp import bias_gradient
from .op import Op, by_layout, call


@fieldwise_init
struct General(TrivialRegisterPassable):
    """The sizes of a convolution."""

    var G: Int
    var C: Int
    var H: Int
    var W: Int
    var K: Int
    var R: Int
    var T: Int
    var S: Int
    var D: Int
    var groups: Int

    @implicit
    def __init__(out self, s: Conv):
        """One group, whose taps are neighbours."""
        self = Self(s.G, s.C, s.H, s.W, s.K, s.R, s.T, s.S, 1, 1)

    @always_inline
    def P(self) -> Int:
        """Rows of y."""
        return (self.H - self.D * (self.R - 1) - 1) // self.S + 1

    @always_inline
    def Q(self) -> Int:
        """Columns of y."""
        return (self.W - self.D * (self.T - 1) - 1) // self.S + 1

    @always_inline
    def inputs(self) -> Int:
        """Channels of x that a channel of y reads."""
        return self.C // self.groups

    @always_inline
    def outputs(self) -> Int:
        """Channels of y that read a channel of x."""
        return self.K // self.groups

    @always_inline
    def tap(self, i: Int) -> Int:
        """Where tap i of an output channel reads, in numbers of a sample."""
        var r = i // self.T % self.R
        var row = i // (self.R * self.T) * self.H + r * self.D
        return row * self.W + i % self.T * self.D


@always_inline
def _forward_tile[L: Int, kb: Int, qb: Int](y: Ptr, x: Ptr, w: Ptr, b: Ptr, s: General):
    """Neighbouring pixels of kb channels."""
    var acc = Array[SIMD[F32, L], kb * qb](fill=SIMD[F32, L](0))
    comptime for k in range(kb):
        comptime for q in range(qb):
            acc[k * qb + q] = SIMD[F32, L](b[unsafe_offset=k])
    var taps = s.inputs() * s.R * s.T
    var i = 0
    for c in range(s.inputs()):
        for r in range(s.R):
            var row = x.unsafe_offset((c * s.H + r * s.D) * s.W * L)
            for t in range(s.T):
                var v = Array[SIMD[F32, L], qb](fill=SIMD[F32, L](0))
                comptime for q in range(qb):
                    v[q] = load[L](row, (q * s.S + t * s.D) * L)
                comptime for k in range(kb):
                    var wk = SIMD[F32, L](w[unsafe_offset=k * taps + i])
                    comptime for q in range(qb):
                        acc[k * qb + q] = madd(v[q], wk, acc[k * qb + q])
                i += 1
    comptime for k in range(kb):
        comptime for q in range(qb):
            store[L](y, (k * s.P() * s.Q() + q) * L, acc[k * qb + q])


def forward[L: Int](y: Ptr, x: Ptr, w: Ptr, b: Ptr, s: General):
    """Computes y (G, K, P, Q, L) = x (G, C, H, W, L) * w (K, C / groups, R, T) + b (K)."""
    var P = s.P()
    var Q = s.Q()
    var taps = s.inputs() * s.R * s.T
    for g in range(s.G):
        for j in range(s.groups):
            var first = j * s.outputs()
            var xj = x.unsafe_offset((g * s.C + j * s.inputs()) * s.H * s.W * L)
            for p in range(P):

                @always_inline
                def channels[kb: Int](k: Int) {imm}:
                    @always_inline
                    def pixels[qb: Int](q: Int) {imm}:
                        var o = first + k
                        _forward_tile[L, kb, qb](
                            y.unsafe_offset((((g * s.K + o) * P + p) * Q + q) * L),
                            xj.unsafe_offset((p * s.W + q) * s.S * L),
                            w.unsafe_offset(o * taps),
                            b.unsafe_offset(o),
                            s,
                        )

                    in_tiles_and_ones[QB](Q, pixels)

                in_tiles_and_ones[KB](s.outputs(), channels)


@always_inline
def _weight_tile[L: Int, kb: Int, tb: Int](dw: Ptr, dy: Ptr, x: Ptr, tap: Int, s: General):
    """The sums of tb taps of kb channels over all pixels and samples."""
    var P = s.P()
    var Q = s.Q()
    var taps = s.inputs() * s.R * s.T
    var offset = Array[Int, tb](fill=0)
    comptime for i in range(tb):
        offset[i] = s.tap(tap + i) * L
    var acc = Array[SIMD[F32, L], kb * tb](fill=SIMD[F32, L](0))
    for g in range(s.G):
        for p in range(P):
            var d = dy.unsafe_offset((g * s.K * P + p) * Q * L)
            var xp = x.unsafe_offset((g * s.C * s.H + p * s.S) * s.W * L)
            for q in range(Q):
                var v = Array[SIMD[F32, L], kb](fill=SIMD[F32, L](0))
                comptime for k in range(kb):
                    v[k] = load[L](d, (k * P * Q + q) * L)
                comptime for i in range(tb):
                    var u = load[L](xp, q * s.S * L + offset[i])
                    comptime for k in range(kb):
                        acc[k * tb + i] = madd(u, v[k], acc[k * tb + i])
    comptime for k in range(kb):
        comptime for i in range(tb):
            dw[unsafe_offset=k * taps + tap + i] += acc[k * tb + i].reduce_add()


def backward_weight[L: Int](dw: Ptr, dy: Ptr, x: Ptr, s: General):
    """Adds the gradient of the weights."""
    var plane = s.P() * s.Q()
    var taps = s.inputs() * s.R * s.T
    for j in range(s.groups):
        var first = j * s.outputs()
        var xj = x.unsafe_offset(j * s.inputs() * s.H * s.W * L)

        @always_inline
        def channels[kb: Int](k: Int) {imm}:
            var dwk = dw.unsafe_offset((first + k) * taps)
            var dyk = dy.unsafe_offset((first + k) * plane * L)

            @always_inline
            def tile[tb: Int](tap: Int) {imm}:
                _weight_tile[L, kb, tb](dwk, dyk, xj, tap, s)

            in_tiles_and_ones[TB](taps, tile)

        in_tiles_and_ones[KB](s.outputs(), channels)


def _weight[L: Int](dw: Ptr, db: Ptr, dy: Ptr, x: Ptr, s: General):
    """Adds the gradients of weights and bias, summed over samples and pixels; db is (K), the others as in `forward`."""
    backward_weight[L](dw, dy, x, s)
    bias_gradient[L](db, dy, s.G, s.K, s.P() * s.Q())


@always_inline
def _input_tile[L: Int, cb: Int](dx: Ptr, dy: Ptr, w: Ptr, h: Int, i: Int, s: General):
    """Pixel (h, i) of cb channels, from all output channels that read them."""
    var P = s.P()
    var Q = s.Q()
    var acc = Array[SIMD[F32, L], cb](fill=SIMD[F32, L](0))
    for r in range(s.R):
        var p = (h - r * s.D) // s.S
        if h < r * s.D or p >= P or p * s.S != h - r * s.D:
            continue
        for t in range(s.T):
            var q = (i - t * s.D) // s.S
            if i < t * s.D or q >= Q or q * s.S != i - t * s.D:
                continue
            for k in range(s.outputs()):
                var d = load[L](dy, ((k * P + p) * Q + q) * L)
                var wk = w.unsafe_offset((k * s.inputs() * s.R + r) * s.T + t)
                comptime for c in range(cb):
                    var v = SIMD[F32, L](wk[unsafe_offset=c * s.R * s.T])
                    acc[c] = madd(d, v, acc[c])
    comptime for c in range(cb):
        store[L](dx, ((c * s.H + h) * s.W + i) * L, acc[c])


def _input[L: Int](dx: Ptr, dy: Ptr, w: Ptr, s: General):
    """Writes the gradient of the (padded) input."""
    var taps = s.inputs() * s.R * s.T
    for g in range(s.G):
        for j in range(s.groups):
            var first = j * s.outputs()
            var dyj = dy.unsafe_offset((g * s.K + first) * s.P() * s.Q() * L)

            @always_inline
            def channels[cb: Int](c: Int) {imm}:
                var at = (g * s.C + j * s.inputs() + c) * s.H * s.W
                for h in range(s.H):
                    for i in range(s.W):
                        _input_tile[L, cb](
                            dx.unsafe_offset(at * L), dyj, w.unsafe_offset(first * taps + c * s.R * s.T), h, i, s
                        )

            in_tiles_and_ones[KB](s.inputs(), channels)


def ops() -> List[Op]:
    """The ops of this file. D: from one tap to the next."""
    return [
        Op(
            "conv2d_general_forward",
            "y; x, w, b; G, C, H, W, K, R, T, S, D, groups",
            by_layout[call[forward[LANES]], call[forward[1]]],
        ),
        Op(
            "conv2d_general_backward_weight",
            "+dw, +db; dy, x; G, C, H, W, K, R, T, S, D, groups",
            by_layout[call[_weight[LANES]], call[_weight[1]]],
            "sums",
        ),
        Op(
            "conv2d_general_backward_input",
            "dx; dy, w; G, C, H, W, K, R, T, S, D, groups",
            by_layout[call[_input[LANES]], call[_input[1]]],
        ),
    ]
