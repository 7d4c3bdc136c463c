"""Elementwise ops, once for all devices: activations with their gradients, sums, products. n may be any number of
floats.

An activation is one function of a vector and one of (dy, saved) for its gradient, where `saved` is x or y.
"""

from std.memory import bitcast

from .arithmetic import times
from .buffers import plus
from .functions import clamp, erf, exp, log, relu, relu_gradient, tanh
from .lanes import F32
from .op import Device, OpOf


# --- activations and their gradients ----------------------------------------------------------------------------------


@always_inline
def tanh_gradient[w: Int](dy: SIMD[F32, w], y: SIMD[F32, w]) -> SIMD[F32, w]:
    """Of y = tanh(x)."""
    return dy * (1 - y * y)


@always_inline
def sigmoid[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """One over one plus e to the minus |x|, mirrored for negative x, so that nothing overflows."""
    var e = exp(-abs(x))
    return x.lt(0).select(e, SIMD[F32, w](1)) / (1 + e)


@always_inline
def sigmoid_gradient[w: Int](dy: SIMD[F32, w], y: SIMD[F32, w]) -> SIMD[F32, w]:
    """Of y = sigmoid(x)."""
    return dy * y * (1 - y)


@always_inline
def gelu[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """x times the share of a normal distribution that lies below x."""
    return x * (0.5 + 0.5 * erf(x * Float32(0.7071067811865476)))


@always_inline
def gelu_gradient[w: Int](dy: SIMD[F32, w], x: SIMD[F32, w]) -> SIMD[F32, w]:
    # From 16 on the density is 0; infinity times it would be no number.
    var v = clamp(x, 16)
    var density = exp(-0.5 * v * v) * Float32(0.3989422804014327)
    return dy * (0.5 + 0.5 * erf(x * Float32(0.7071067811865476)) + v * density)


@always_inline
def gelu_tanh[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """The approximation of Hendrycks, Gimpel 2016 that GPT-2 has."""
    return x * (0.5 + 0.5 * tanh(_bent(x)))


@always_inline
def _bent[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    return Float32(0.7978845608028654) * (x + Float32(0.044715) * x * x * x)


@always_inline
def gelu_tanh_gradient[w: Int](dy: SIMD[F32, w], x: SIMD[F32, w]) -> SIMD[F32, w]:
    # From 16 on tanh is 1; infinity times 0 would be no number.
    var v = clamp(x, 16)
    var t = tanh(_bent(v))
    var slope = Float32(0.7978845608028654) * (1 + Float32(0.134145) * v * v)
    return dy * (0.5 + 0.5 * t + 0.5 * v * (1 - t * t) * slope)


@always_inline
def silu[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """x sigmoid(x); 0 for minus infinity."""
    return x.lt(-88).select(SIMD[F32, w](-88), x) * sigmoid(x)


@always_inline
def silu_gradient[w: Int](dy: SIMD[F32, w], x: SIMD[F32, w]) -> SIMD[F32, w]:
    var s = sigmoid(x)
    return dy * s * (1 + clamp(x, 80) * (1 - s))


# --- for losses and metrics -------------------------------------------------------------------------------------------


@always_inline
def _abs[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    return abs(x)


@always_inline
def _sign[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    return x.gt(0).cast[F32]() - x.lt(0).cast[F32]()


@always_inline
def abs_gradient[w: Int](dy: SIMD[F32, w], x: SIMD[F32, w]) -> SIMD[F32, w]:
    """The sign of dy where x > 0, its opposite where x < 0, 0 for 0."""
    return dy * _sign(x)


@always_inline
def softplus[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """Log(1 + e^x) as max(x, 0) + log(1 + e), e = exp(-|x|).

    What 1 + e rounds away is made up for (Kahan): small values keep their digits.
    """
    var e = exp(-abs(x))
    var u = 1 + e
    var tail = u.eq(1).select(e, log(u) * e / u.eq(1).select(u, u - 1))
    return relu(x) + tail


@always_inline
def softplus_gradient[w: Int](dy: SIMD[F32, w], x: SIMD[F32, w]) -> SIMD[F32, w]:
    return dy * sigmoid(x)


@always_inline
def _clamp[w: Int](x: SIMD[F32, w], limit: Float32) -> SIMD[F32, w]:
    return clamp(x, limit)


@always_inline
def _leaky_slope[w: Int](x: SIMD[F32, w], slope: Float32) -> SIMD[F32, w]:
    return x.gt(0).select(SIMD[F32, w](1), SIMD[F32, w](slope))


@always_inline
def _leaky_relu[w: Int](x: SIMD[F32, w], slope: Float32) -> SIMD[F32, w]:
    return x * _leaky_slope(x, slope)


@always_inline
def _floats[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    return bitcast[DType.int32, w](x).cast[F32]()


# --- arithmetic -------------------------------------------------------------------------------------------------------


@always_inline
def _tanh[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    return tanh(x)


@always_inline
def _scale[w: Int](x: SIMD[F32, w], a: Float32) -> SIMD[F32, w]:
    return x * a


def maps[D: Device]() -> List[OpOf[D.Run]]:
    """The ops that are one function of vectors."""
    return [
        OpOf("relu_forward", "y; x; n", D.map[relu](), "features relu"),
        OpOf("relu_backward", "dx; dy, y; n", D.map[relu_gradient](), "features relu"),
        OpOf("tanh_forward", "y; x; n", D.map[_tanh](), "features"),
        OpOf("tanh_backward", "dx; dy, y; n", D.map[tanh_gradient](), "features"),
        OpOf("sigmoid_forward", "y; x; n", D.map[sigmoid](), "features"),
        OpOf("sigmoid_backward", "dx; dy, y; n", D.map[sigmoid_gradient](), "features"),
        OpOf("gelu_forward", "y; x; n", D.map[gelu](), "features"),
        OpOf("gelu_backward", "dx; dy, x; n", D.map[gelu_gradient](), "features"),
        OpOf("gelu_tanh_forward", "y; x; n", D.map[gelu_tanh](), "features"),
        OpOf("gelu_tanh_backward", "dx; dy, x; n", D.map[gelu_tanh_gradient](), "features"),
        OpOf("silu_forward", "y; x; n", D.map[silu](), "features"),
        OpOf("silu_backward", "dx; dy, x; n", D.map[silu_gradient](), "features"),
        OpOf("abs_forward", "y; x; n", D.map[_abs](), "features"),
        OpOf("abs_backward", "dx; dy, x; n", D.map[abs_gradient](), "features"),
        OpOf("sign", "y; x; n", D.map[_sign](), "features"),
        OpOf("softplus_forward", "y; x; n", D.map[softplus](), "features"),
        OpOf("softplus_backward", "dx; dy, x; n", D.map[softplus_gradient](), "features"),
        OpOf("clamp", "y; x; limit, n", D.map[_clamp]()),
        OpOf("leaky_relu", "y; x; slope, n", D.map[_leaky_relu](), "features"),
        OpOf("leaky_slope", "y; x; slope, n", D.map[_leaky_slope](), "features"),
        OpOf("floats", "y; x; n", D.map[_floats]()),
        OpOf("add", "y; a, b; n", D.map[plus]()),
        OpOf("multiply", "y; a, b; n", D.map[times]()),
        OpOf("scale", "y; x; a, n", D.map[_scale]()),
    ]
