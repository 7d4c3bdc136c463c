"""Softmax, log-softmax and the losses on them, once for all devices: of each sample's F classes, which the threads
of a team share (views.Team).

A loss is a sum and a count, never a mean: means are taken once, over the whole global batch. A label of -1 marks a lane
without a sample; it counts nowhere and its gradient is 0.
"""

from std.memory import bitcast
from std.utils.numerics import inf, isnan, nan

from .functions import exp_of_vectors as exp, log, rounded
from .lanes import F32, Ptr, madd
from .op import Device, OpOf
from .record import Source
from .views import Cell, Cells, Loss, Row, Team

comptime I32 = DType.int32


# --- softmax and log-softmax ------------------------------------------------------------------------------------------


@always_inline
def _sum_exp[T: Team, kept: Bool](team: T, r: Row[T.L], y: Ptr, x: Ptr, m: SIMD[F32, T.L]) -> SIMD[F32, T.L]:
    """Sum of exp(x - m); who is alone and wants them again, `kept`, finds them in y."""
    var s = SIMD[F32, T.L](0)
    for f in range(team.part(), r.F, T.K):
        var e = exp(r.get(x, f, r.F) - m)
        comptime if kept and T.K == 1:
            r.put(y, f, r.F, e)
        s += e
    return team.sum(s)


@always_inline
def _exp[T: Team](r: Row[T.L], y: Ptr, x: Ptr, m: SIMD[F32, T.L], f: Int) -> SIMD[F32, T.L]:
    """What `_sum_exp` summed: computed again, but by who is alone."""
    comptime if T.K == 1:
        return r.get(y, f, r.F)
    else:
        return exp(r.get(x, f, r.F) - m)


@always_inline
def _softmax_of[T: Team, logarithm: Bool](team: T, r: Row[T.L]):
    var m = SIMD[F32, T.L](-inf[F32]())
    for f in range(team.part(), r.F, T.K):
        m = max(m, r.get(r.b, f, r.F))
    m = team.best(m, SIMD[I32, T.L](0))[0]
    var s = _sum_exp[T, not logarithm](team, r, r.a, r.b, m)
    comptime if logarithm:
        m += log(s)
        for f in range(team.part(), r.F, T.K):
            r.put(r.a, f, r.F, r.get(r.b, f, r.F) - m)
    else:
        var inverse = 1 / s
        for f in range(team.part(), r.F, T.K):
            r.put(r.a, f, r.F, _exp[T](r, r.a, r.b, m, f) * inverse)


def _softmax[T: Team](team: T, r: Row[T.L]):
    """Arguments y; x: y = exp(x - max x) / sum exp(x - max x)."""
    _softmax_of[T, False](team, r)


def _log_softmax[T: Team](team: T, r: Row[T.L]):
    """Arguments y; x: y = x - log sum exp(x)."""
    _softmax_of[T, True](team, r)


def _softmax_backward[T: Team](team: T, r: Row[T.L]):
    """Arguments dx; dy, y: dx = y (dy - sum dy y)."""
    var s = SIMD[F32, T.L](0)
    for f in range(team.part(), r.F, T.K):
        s = madd(r.get(r.b, f, r.F), r.get(r.c, f, r.F), s)
    s = team.sum(s)
    for f in range(team.part(), r.F, T.K):
        r.put(r.a, f, r.F, r.get(r.c, f, r.F) * (r.get(r.b, f, r.F) - s))


def _log_softmax_backward[T: Team](team: T, r: Row[T.L]):
    """Arguments dx; dy, y: dx = dy - exp(y) sum dy."""
    var s = SIMD[F32, T.L](0)
    for f in range(team.part(), r.F, T.K):
        s += r.get(r.b, f, r.F)
    s = team.sum(s)
    for f in range(team.part(), r.F, T.K):
        r.put(r.a, f, r.F, r.get(r.b, f, r.F) - exp(r.get(r.c, f, r.F)) * s)


# --- losses -----------------------------------------------------------------------------------------------------------


comptime CROSS_ENTROPY = 0  # writes the softmax
comptime GRADIENT = 1  # the same loss, and writes its gradient instead
comptime NLL = 2  # writes nothing


@always_inline
def _at_label[L: Int](r: Row[L], x: Ptr, label: SIMD[I32, L]) -> SIMD[F32, L]:
    """x[label] of each lane, 0 for lanes without a sample.

    NaN, which the check of a step finds, where there is no such class.
    """
    return label.ge(Int32(r.F)).select(SIMD[F32, L](nan[F32]()), r.pick(x, label))


@always_inline
def _gradient[L: Int](p: SIMD[F32, L], label: SIMD[I32, L], f: Int, d: Float32) -> SIMD[F32, L]:
    """By x[f], of d times the cross-entropy: (p - onehot(label)) d, 0 in lanes without a sample."""
    return label.ge(0).select((p - label.eq(Int32(f)).cast[F32]()) * d, SIMD[F32, L](0))


@always_inline
def _loss[T: Team, kind: Int](team: T, r: Row[T.L], y: Ptr, x: Ptr, labels: Ptr) -> Loss[T.L]:
    """Loss and prediction, the first largest of x: a NaN is never larger, and nothing is larger than a NaN in front."""
    var label = bitcast[I32, T.L](r.get(labels, 0, 1))
    var best = SIMD[F32, T.L](-inf[F32]())
    var place = SIMD[I32, T.L](Int32(r.F if team.part() > 0 else 0))
    for f in range(team.part(), r.F, T.K):
        var v = r.get(x, f, r.F)
        v = isnan(v).select(SIMD[F32, T.L](inf[F32]() if f == 0 else -inf[F32]()), v)
        var better = v.gt(best)
        best = better.select(v, best)
        place = better.select(SIMD[I32, T.L](Int32(f)), place)
    var top = team.best(best, place)
    var all = SIMD[F32, T.L](0)
    comptime if kind != NLL:
        var m = top[0]
        var s = _sum_exp[T, True](team, r, y, x, m)
        all = m + log(s)
        var inverse = 1 / s
        for f in range(team.part(), r.F, T.K):
            var p = _exp[T](r, y, x, m, f) * inverse
            comptime if kind == GRADIENT:
                p = _gradient(rounded(p), label, f, r.number)
            r.put(y, f, r.F, p)
    return Loss[T.L](label.ge(0).select(all - _at_label(r, x, label), SIMD[F32, T.L](0)), label.ge(0), label.eq(top[1]))


def _cross_entropy[T: Team](team: T, r: Row[T.L]) -> Loss[T.L]:
    """Arguments stats, p (softmax(x), saved for backward); x, labels. A sample's loss is log sum exp(x) - x[label]."""
    return _loss[T, CROSS_ENTROPY](team, r, r.b, r.c, r.d)


def _cross_entropy_gradient[T: Team](team: T, r: Row[T.L]) -> Loss[T.L]:
    """Arguments stats, dx; x, labels: the gradient times the row's number, to the bit what the two ops give."""
    return _loss[T, GRADIENT](team, r, r.b, r.c, r.d)


def _nll[T: Team](team: T, r: Row[T.L]) -> Loss[T.L]:
    """Arguments stats; x, labels. The loss of a sample is -x[label], x being log-probabilities."""
    return _loss[T, NLL](team, r, r.b, r.b, r.c)


@fieldwise_init
struct Classes(Cells):
    """Sizes of the classes of all samples."""

    var G: Int
    var F: Int

    @staticmethod
    @always_inline
    def read[S: Source](r: S, mut i: Int) -> Self:
        i += 2
        return Self(r.int(i - 2), r.int(i - 1))

    @always_inline
    def shape(self) -> Tuple[Int, Int, Int]:
        return self.G, 1, self.F


@always_inline
def _cross_entropy_backward[L: Int](c: Cell[L], z: Classes):
    """Arguments dx; dloss, p, labels."""
    var label = bitcast[I32, L](c.get(c.d, c.plane))
    c.put(c.a, c.at, _gradient(c.get(c.c, c.at), label, c.column, c.b[]))


@always_inline
def _nll_backward[L: Int](c: Cell[L], z: Classes):
    """Arguments dx; dloss, labels: dx = -onehot(label) dloss."""
    var label = bitcast[I32, L](c.get(c.c, c.plane))
    c.put(c.a, c.at, label.eq(Int32(c.column)).select(SIMD[F32, L](-c.b[]), SIMD[F32, L](0)))


def ops[D: Device]() -> List[OpOf[D.Run]]:
    """The ops of this file."""
    return [
        OpOf("softmax_forward", "y; x; G, F", D.rows[_softmax, 2]()),
        OpOf("softmax_backward", "dx; dy, y; G, F", D.rows[_softmax_backward, 3]()),
        OpOf("log_softmax_forward", "y; x; G, F", D.rows[_log_softmax, 2]()),
        OpOf("log_softmax_backward", "dx; dy, y; G, F", D.rows[_log_softmax_backward, 3]()),
        D.losses[_cross_entropy, 4]("cross_entropy_forward", "stats, p; x, labels; G, F"),
        OpOf("cross_entropy_backward", "dx; dloss, p, labels; G, F", D.cells[Classes, _cross_entropy_backward, 4]()),
        D.losses[_nll, 3]("nll_forward", "stats; x, labels; G, F"),
        OpOf("nll_backward", "dx; dloss, labels; G, F", D.cells[Classes, _nll_backward, 3]()),
    ]


def fused[D: Device]() -> List[OpOf[D.Run]]:
    """The loss with its gradient, times the step's loss scale if `scaled`; for devices on which a launch takes time."""
    return [
        D.losses[_cross_entropy_gradient, 4](
            "cross_entropy",
            "stats, dx; x, labels; G, F, scaled",
            "of:cross_entropy_forward+cross_entropy_backward",
        )
    ]
