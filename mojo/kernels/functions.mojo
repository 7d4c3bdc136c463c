"""exp, log, tanh, erf and other functions of vectors that several kernels have in common, for every device.

What a device's library computes differs; which form is taken is decided at compile time. On the CPU the library's are
taken, with NaN kept: they turn it into a number, and a training that left the numbers must show it. On a GPU they are
the hardware's approximations: tanh to 11 bits, log to 22 bits after the point, exp with an error that grows with |x|,
square roots that take small numbers for 0. There the functions here are right to the last bit or two of a float32.
"""

from std.math import exp as _exp
from std.math import log as _log
from std.math import tanh as _tanh
from std.memory import bitcast
from std.sys import is_gpu, is_nvidia_gpu, llvm_intrinsic
from std.utils.numerics import inf, isnan, nan

from .lanes import F32, madd

comptime I32 = DType.int32


@always_inline
def exp[w: SIMDLength, //](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """e^x, to the ends of float32: infinity from 88.73 on, 0 below the normal numbers; NaN stays NaN.

    The library's has other bits in vectors than of single floats at both ends, and its vectors stay at e^88.376. A
    number above 88 is taken as e^(x - 0.6875) e^0.6875, of which the difference is exact.
    """
    comptime if is_nvidia_gpu():
        return exp_of_vectors(x)
    else:
        var large = x.gt(88)
        var y = _exp(large.select(x - Float32(0.6875), x))
        y = large.select(y * Float32(1.9887374695822918), y)
        y = x.lt(-87.33654).select(SIMD[F32, w](0), y)
        return isnan(x).select(x, y)


@always_inline
def exp_of_vectors[w: SIMDLength, //](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """e^x for kernels whose numbers stand in whole vectors and are at most 88, as in softmax; NaN stays NaN.

    NVIDIA's hardware has 2^y. y = x / ln 2 is rounded; what that loses, at most 2^-17, is multiplied in.
    """
    comptime if is_nvidia_gpu():
        comptime PER_LN2 = Float32(1.4426950408889634)
        comptime REST = Float32(1.9259629911266174e-8)  # of 1 / ln 2
        var y = x * PER_LN2
        var lost = x.fma(SIMD[F32, w](REST), x.fma(SIMD[F32, w](PER_LN2), -y))
        var power = _power_of_two(y)
        power = power.fma(lost * Float32(0.6931471805599453), power)
        # -inf and numbers beyond the range: there `lost` is no number
        return abs(x).gt(200).select(_power_of_two(y), power)
    else:
        return isnan(x).select(x, _exp(x))


@always_inline
def _power_of_two[w: SIMDLength, //](y: SIMD[F32, w]) -> SIMD[F32, w]:
    var z = SIMD[F32, w]()
    comptime for i in range(Int(w)):
        z[i] = llvm_intrinsic["llvm.nvvm.ex2.approx.ftz.f", Float32, has_side_effect=False](y[i])
    return z


@always_inline
def log[w: SIMDLength, //](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """Natural logarithm; on a GPU of x = 2^e m, m in [sqrt(1/2), sqrt(2)): e ln 2 + log m, the latter a polynomial
    (Moshier: Cephes, logf). Negative x and NaN give NaN, 0 minus infinity; numbers below 2^-126 count as 0.
    """
    comptime if is_gpu():
        var bits = bitcast[I32, Int(w)](x)
        # The exponent is counted from sqrt(1/2) = 0x3F3504F3 on, so that m lies around 1.
        var e = (bits - 0x3F3504F3) >> 23
        var m = bitcast[F32, Int(w)](bits - (e << 23)) - 1
        var p = SIMD[F32, w](7.0376836292e-2)
        p = p.fma(m, SIMD[F32, w](-1.1514610310e-1))
        p = p.fma(m, SIMD[F32, w](1.1676998740e-1))
        p = p.fma(m, SIMD[F32, w](-1.2420140846e-1))
        p = p.fma(m, SIMD[F32, w](1.4249322787e-1))
        p = p.fma(m, SIMD[F32, w](-1.6668057665e-1))
        p = p.fma(m, SIMD[F32, w](2.0000714765e-1))
        p = p.fma(m, SIMD[F32, w](-2.4999993993e-1))
        p = p.fma(m, SIMD[F32, w](3.3333331174e-1))
        var square = m * m
        var whole = e.cast[F32]()
        var y = p * (m * square)
        y = whole.fma(SIMD[F32, w](-2.12194440e-4), y)
        y = square.fma(SIMD[F32, w](-0.5), y)
        y = whole.fma(SIMD[F32, w](0.693359375), m + y)
        y = x.lt(Float32(1.1754943508222875e-38)).select(-inf[F32](), y)
        y = x.lt(0).select(nan[F32](), y)
        return (x - x).eq(0).select(y, x.gt(0).select(x, nan[F32]()))
    else:
        return _log(x)


@always_inline
def clamp[w: SIMDLength, //](x: SIMD[F32, w], limit: Float32) -> SIMD[F32, w]:
    """The nearest number from -limit to limit; NaN stays NaN."""
    var low = x.lt(-limit).select(SIMD[F32, w](-limit), x)
    return x.gt(limit).select(SIMD[F32, w](limit), low)


@always_inline
def tanh[w: SIMDLength, //](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """Hyperbolic tangent; NaN stays NaN.

    On a GPU an odd rational function of degree 13 over 6, fitted on [-7.9, 7.9] (Eigen's).
    """
    comptime if is_gpu():
        var v = clamp(x, 7.90531110763549805)
        var s = v * v
        var p = SIMD[F32, w](-2.76076847742355e-16)
        p = p.fma(s, SIMD[F32, w](2.00018790482477e-13))
        p = p.fma(s, SIMD[F32, w](-8.60467152213735e-11))
        p = p.fma(s, SIMD[F32, w](5.12229709037114e-08))
        p = p.fma(s, SIMD[F32, w](1.48572235717979e-05))
        p = p.fma(s, SIMD[F32, w](6.37261928875436e-04))
        p = p.fma(s, SIMD[F32, w](4.89352455891786e-03))
        var q = SIMD[F32, w](1.19825839466702e-06)
        q = q.fma(s, SIMD[F32, w](1.18534705686654e-04))
        q = q.fma(s, SIMD[F32, w](2.26843463243900e-03))
        q = q.fma(s, SIMD[F32, w](4.89352518554385e-03))
        var y = abs(x).lt(0.0004).select(x, v * p / q)
        # From 9.02 on the nearest float32 is 1, as on the CPU; the function stays 2e-7 below.
        return abs(x).gt(9.02).select(v / 7.90531110763549805, y)
    else:
        return isnan(x).select(x, _tanh(x))


@always_inline
def erf[w: SIMDLength, //](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """The error function: an odd rational function of degree 13 over 8 on [-4, 4] (Eigen's); NaN stays NaN."""
    var v = clamp(x, 4)
    var s = v * v
    var p = SIMD[F32, w](-2.72614225801306e-10)
    p = madd(p, s, SIMD[F32, w](2.77068142495902e-08))
    p = madd(p, s, SIMD[F32, w](-2.10102402082508e-06))
    p = madd(p, s, SIMD[F32, w](-5.69250639462346e-05))
    p = madd(p, s, SIMD[F32, w](-7.34990630326855e-04))
    p = madd(p, s, SIMD[F32, w](-2.95459980854025e-03))
    p = madd(p, s, SIMD[F32, w](-1.60960333262415e-02))
    var q = SIMD[F32, w](-1.45660718464996e-05)
    q = madd(q, s, SIMD[F32, w](-2.13374055278905e-04))
    q = madd(q, s, SIMD[F32, w](-1.68282697438203e-03))
    q = madd(q, s, SIMD[F32, w](-7.37332916720468e-03))
    q = madd(q, s, SIMD[F32, w](-1.42647390514189e-02))
    return v * p / q


@always_inline
def relu[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """Zero for negative x; NaN stays NaN."""
    return x.lt(0).select(SIMD[F32, w](0), x)


@always_inline
def relu_gradient[w: Int](dy: SIMD[F32, w], y: SIMD[F32, w]) -> SIMD[F32, w]:
    """Passes dy where y > 0."""
    return y.gt(0).select(dy, SIMD[F32, w](0))


@always_inline
def rounded[w: SIMDLength, //](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """The product x, rounded before something is added to it.

    A compiler that fuses the two multiplies and adds without rounding in between; it does not see that this is x.
    """
    return x.eq(x).select(x, nan[F32]())
