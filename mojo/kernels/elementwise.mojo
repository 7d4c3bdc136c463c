"""Elementwise ops: activations, sums, products. n counts floats and may be any number.

Each activation is one function of a vector and one for its gradient in terms of y, so that nothing but y is saved.
"""

from std.math import exp as _exp
from std.math import tanh as _tanh
from std.utils.numerics import isnan

from .lanes import F32, LANES, Ptr, Vec, load, store, madd

# --- the functions ---------------------------------------------------------------


@always_inline
def exp[w: SIMDLength, //](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """The library's exp, which turns NaN into a number, with NaN kept: a training that left the numbers must show it.
    """
    return isnan(x).select(x, _exp(x))


@always_inline
def tanh[w: SIMDLength, //](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """The library's tanh with NaN kept, as for exp."""
    return isnan(x).select(x, _tanh(x))


@always_inline
def relu[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """Zero for negative x; NaN stays NaN."""
    return x.lt(0).select(SIMD[F32, w](0), x)


@always_inline
def sigmoid[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """One over one plus e to the minus |x|, mirrored for negative x, so that nothing overflows.
    """
    var e = exp(-abs(x))
    return x.lt(0).select(e, SIMD[F32, w](1)) / (1 + e)


# --- one loop for all ---------------------------------------------------------------


@always_inline
def _map[
    F: def[w: Int](SIMD[F32, w]) -> SIMD[F32, w], //
](f: F, y: Ptr, x: Ptr, n: Int):
    var i = 0
    while i + LANES <= n:
        store(y, i, f[LANES](load(x, i)))
        i += LANES
    while i < n:
        y[unsafe_offset=i] = f[1](SIMD[F32, 1](x[unsafe_offset=i]))
        i += 1


@always_inline
def _map2[
    F: def[w: Int](SIMD[F32, w], SIMD[F32, w]) -> SIMD[F32, w], //
](f: F, y: Ptr, a: Ptr, b: Ptr, n: Int):
    var i = 0
    while i + LANES <= n:
        store(y, i, f[LANES](load(a, i), load(b, i)))
        i += LANES
    while i < n:
        y[unsafe_offset=i] = f[1](
            SIMD[F32, 1](a[unsafe_offset=i]), SIMD[F32, 1](b[unsafe_offset=i])
        )
        i += 1


# --- activations -----------------------------------------------------------------------


def relu_forward(y: Ptr, x: Ptr, n: Int):
    """Computes y = max(x, 0)."""

    def f[w: Int](v: SIMD[F32, w]) {} -> SIMD[F32, w]:
        return relu[w](v)

    _map(f, y, x, n)


def relu_backward(dx: Ptr, dy: Ptr, y: Ptr, n: Int):
    """Passes dy where y > 0."""

    def f[w: Int](d: SIMD[F32, w], v: SIMD[F32, w]) {} -> SIMD[F32, w]:
        return v.gt(0).select(d, SIMD[F32, w](0))

    _map2(f, dx, dy, y, n)


def tanh_forward(y: Ptr, x: Ptr, n: Int):
    """Computes y = tanh(x)."""

    def f[w: Int](v: SIMD[F32, w]) {} -> SIMD[F32, w]:
        return tanh(v)

    _map(f, y, x, n)


def tanh_backward(dx: Ptr, dy: Ptr, y: Ptr, n: Int):
    """Computes dx = dy (1 - y^2)."""

    def f[w: Int](d: SIMD[F32, w], v: SIMD[F32, w]) {} -> SIMD[F32, w]:
        return d * (1 - v * v)

    _map2(f, dx, dy, y, n)


def sigmoid_forward(y: Ptr, x: Ptr, n: Int):
    """Computes y = 1 / (1 + exp(-x))."""

    def f[w: Int](v: SIMD[F32, w]) {} -> SIMD[F32, w]:
        return sigmoid[w](v)

    _map(f, y, x, n)


def sigmoid_backward(dx: Ptr, dy: Ptr, y: Ptr, n: Int):
    """Computes dx = dy y (1 - y)."""

    def f[w: Int](d: SIMD[F32, w], v: SIMD[F32, w]) {} -> SIMD[F32, w]:
        return d * v * (1 - v)

    _map2(f, dx, dy, y, n)


# --- arithmetic ---------------------------------------------------------------------------


def add(y: Ptr, a: Ptr, b: Ptr, n: Int):
    """Computes y = a + b. y may be a or b."""

    def f[w: Int](u: SIMD[F32, w], v: SIMD[F32, w]) {} -> SIMD[F32, w]:
        return u + v

    _map2(f, y, a, b, n)


def multiply(y: Ptr, a: Ptr, b: Ptr, n: Int):
    """Computes y = a b. y may be a or b."""

    def f[w: Int](u: SIMD[F32, w], v: SIMD[F32, w]) {} -> SIMD[F32, w]:
        return u * v

    _map2(f, y, a, b, n)


def axpy(y: Ptr, x: Ptr, a: Float32, n: Int):
    """Computes y += a x."""

    def f[w: Int](u: SIMD[F32, w], v: SIMD[F32, w]) {imm a} -> SIMD[F32, w]:
        return madd(v, SIMD[F32, w](a), u)

    _map2(f, y, y, x, n)


def scale(y: Ptr, x: Ptr, a: Float32, n: Int):
    """Computes y = a x. y may be x."""

    def f[w: Int](v: SIMD[F32, w]) {imm a} -> SIMD[F32, w]:
        return v * a

    _map(f, y, x, n)


def fill(y: Ptr, a: Float32, n: Int):
    """Sets n floats to a."""
    var i = 0
    while i + LANES <= n:
        store(y, i, Vec(a))
        i += LANES
    while i < n:
        y[unsafe_offset=i] = a
        i += 1
