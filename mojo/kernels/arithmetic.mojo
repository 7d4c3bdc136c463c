"""Arithmetic, once for all devices: functions of one number, and of two tensors that are broadcast against each other.

A comparison is 1 where it holds and 0 elsewhere. Gradients are made of these ops (python/odyssey/core/operators.py).
"""

from std.math import sqrt

from .buffers import plus
from .functions import exp, log
from .lanes import F32
from .op import Device, OpOf
from .strided import Strided


@always_inline
def _exp[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    return exp(x)


@always_inline
def _log[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    return log(x)


@always_inline
def _sqrt[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    return sqrt(x)


@always_inline
def times[w: Int](a: SIMD[F32, w], b: SIMD[F32, w]) -> SIMD[F32, w]:
    """The product of two numbers."""
    return a * b


@always_inline
def _divide[w: Int](a: SIMD[F32, w], b: SIMD[F32, w]) -> SIMD[F32, w]:
    return a / b


@always_inline
def _power[w: Int](a: SIMD[F32, w], b: SIMD[F32, w]) -> SIMD[F32, w]:
    """e^(b log a): its error grows with b log a. 1 for b = 0, NaN for a < 0."""
    return b.eq(0).select(SIMD[F32, w](1), exp(b * log(a)))


@always_inline
def maximum[w: Int](a: SIMD[F32, w], b: SIMD[F32, w]) -> SIMD[F32, w]:
    """The larger number; NaN if one is."""
    return a.eq(a).select(a.gt(b).select(a, b), a)


@always_inline
def _minimum[w: Int](a: SIMD[F32, w], b: SIMD[F32, w]) -> SIMD[F32, w]:
    return a.eq(a).select(a.lt(b).select(a, b), a)


@always_inline
def _less[w: Int](a: SIMD[F32, w], b: SIMD[F32, w]) -> SIMD[F32, w]:
    return a.lt(b).select(SIMD[F32, w](1), SIMD[F32, w](0))


@always_inline
def _less_equal[w: Int](a: SIMD[F32, w], b: SIMD[F32, w]) -> SIMD[F32, w]:
    return a.le(b).select(SIMD[F32, w](1), SIMD[F32, w](0))


@always_inline
def _equal[w: Int](a: SIMD[F32, w], b: SIMD[F32, w]) -> SIMD[F32, w]:
    return a.eq(b).select(SIMD[F32, w](1), SIMD[F32, w](0))


@always_inline
def _share[w: Int](a: SIMD[F32, w], b: SIMD[F32, w]) -> SIMD[F32, w]:
    """The derivative of max(a, b) by a: 1, 0, or half each where they are equal."""
    var ties = a.eq(b).select(SIMD[F32, w](0.5), SIMD[F32, w](0))
    return a.gt(b).select(SIMD[F32, w](1), ties)


@always_inline
def _where[w: Int](c: SIMD[F32, w], a: SIMD[F32, w]) -> SIMD[F32, w]:
    """Number a where c holds, else 0."""
    return c.eq(0).select(SIMD[F32, w](0), a)


@always_inline
def _where_not[w: Int](c: SIMD[F32, w], a: SIMD[F32, w]) -> SIMD[F32, w]:
    return c.eq(0).select(a, SIMD[F32, w](0))


def maps[D: Device]() -> List[OpOf[D.Run]]:
    """The functions of one number."""
    return [
        OpOf("exp", "y; x; n", D.map[_exp](), "features"),
        OpOf("log", "y; x; n", D.map[_log](), "features"),
        OpOf("sqrt", "y; x; n", D.map[_sqrt](), "features"),
    ]


comptime PAIR = "y; a, b; d0, d1, d2, d3, d4, a0, a1, a2, a3, a4, b0, b1, b2, b3, b4"


def pairs[S: Strided]() -> List[OpOf[S.Run]]:
    """The functions of two numbers."""
    return [
        OpOf("add_strided", PAIR, S.pairs[plus]()),
        OpOf("multiply_strided", PAIR, S.pairs[times]()),
        OpOf("divide", PAIR, S.pairs[_divide]()),
        OpOf("power", PAIR, S.pairs[_power]()),
        OpOf("maximum", PAIR, S.pairs[maximum]()),
        OpOf("minimum", PAIR, S.pairs[_minimum]()),
        OpOf("less", PAIR, S.pairs[_less]()),
        OpOf("less_equal", PAIR, S.pairs[_less_equal]()),
        OpOf("equal", PAIR, S.pairs[_equal]()),
        OpOf("share", PAIR, S.pairs[_share]()),
        OpOf("where", PAIR, S.pairs[_where]()),
        OpOf("where_not", PAIR, S.pairs[_where_not]()),
    ]
