"""Ops that compute each sample's row, once for all devices (views.Row)."""

from std.math import sqrt
from std.memory import bitcast

from .lanes import F32
from .op import Device, OpOf
from .views import Row, Team


# --- layer norm: Ba, Kiros, Hinton 2016. stats are (mean, 1 / standard deviation) of each sample ----------------------


def _layer_norm[T: Team](team: T, r: Row[T.L]):
    """Arguments y, stats; x, w, b; G, F, eps."""
    var mean = SIMD[F32, T.L](0)
    for f in range(team.part(), r.F, T.K):
        mean += r.get(r.c, f, r.F)
    mean = team.sum(mean) / Float32(r.F)
    var square = SIMD[F32, T.L](0)
    for f in range(team.part(), r.F, T.K):
        var d = r.get(r.c, f, r.F) - mean
        square += d * d
    var inverse = 1 / sqrt(team.sum(square) / Float32(r.F) + r.number)
    if team.leads(r):
        r.put(r.b, 0, 2, mean)
        r.put(r.b, 1, 2, inverse)
    for f in range(team.part(), r.F, T.K):
        var v = (r.get(r.c, f, r.F) - mean) * inverse
        r.put(r.a, f, r.F, v * r.at(r.d, f) + r.at(r.e, f))


def _layer_norm_input[T: Team](team: T, r: Row[T.L]):
    """Arguments dx; dy, x, stats, w; G, F."""
    var mean = r.get(r.d, 0, 2)
    var inverse = r.get(r.d, 1, 2)
    var s = SIMD[F32, T.L](0)
    var t = SIMD[F32, T.L](0)
    for f in range(team.part(), r.F, T.K):
        var g = r.get(r.b, f, r.F) * r.at(r.e, f)
        s += g
        t += g * ((r.get(r.c, f, r.F) - mean) * inverse)
    s = team.sum(s) / Float32(r.F)
    t = team.sum(t) / Float32(r.F)
    for f in range(team.part(), r.F, T.K):
        var g = r.get(r.b, f, r.F) * r.at(r.e, f)
        var v = g - s - (r.get(r.c, f, r.F) - mean) * inverse * t
        r.put(r.a, f, r.F, v * inverse)


@always_inline
def _layer_norm_weight[L: Int](r: Row[L], f: Int) -> SIMD[F32, L]:
    """Arguments +dw; dy, x, stats; G, F."""
    return r.get(r.b, f, r.F) * ((r.get(r.c, f, r.F) - r.get(r.d, 0, 2)) * r.get(r.d, 1, 2))


@always_inline
def _layer_norm_bias[L: Int](r: Row[L], f: Int) -> SIMD[F32, L]:
    """Arguments +db; dy; G, F."""
    return r.get(r.b, f, r.F)


def _top_k[T: Team](team: T, r: Row[T.L]):
    """Arguments y; x, labels; G, F, k. Of equal numbers the first counts as larger, as in the loss ops."""
    var label = bitcast[DType.int32, T.L](r.get(r.c, 0, 1))
    var mine = r.pick(r.b, label)
    var larger = SIMD[F32, T.L](0)
    for f in range(team.part(), r.F, T.K):
        var v = r.get(r.b, f, r.F)
        var before = label.gt(Int32(f)) & v.eq(mine)
        larger += (v.gt(mine) | before).cast[F32]()
    larger = team.sum(larger)
    if team.leads(r):
        r.put(r.a, 0, 1, larger.lt(r.number).cast[F32]())


def ops[D: Device]() -> List[OpOf[D.Run]]:
    """The ops of this file. `top_k`: 1 for samples whose label is among the k largest of their F numbers, else 0."""
    return [
        OpOf("top_k", "y; x, labels; G, F, k", D.rows[_top_k, 3]()),
        OpOf("layer_norm_forward", "y, stats; x, w, b; G, F, eps", D.rows[_layer_norm, 5]()),
        OpOf("layer_norm_backward_input", "dx; dy, x, stats, w; G, F", D.rows[_layer_norm_input, 5]()),
        OpOf("layer_norm_backward_weight", "+dw; dy, x, stats; G, F", D.columns[_layer_norm_weight, 4](), "sums"),
        OpOf("layer_norm_backward_bias", "+db; dy; G, F", D.columns[_layer_norm_bias, 2](), "sums"),
    ]
