"""Loops over floats in memory, for kernels and the executor: sums, copies, one number everywhere. On the CPU alone."""

from std.math import sqrt
from std.memory import unsafe_memcpy
from std.sys import llvm_intrinsic

from .lanes import F32, LANES, Ptr, in_tiles_and_ones, load, madd, store
from .op import Op, call, map2
from .record import Record


@always_inline
def plus[w: Int](a: SIMD[F32, w], b: SIMD[F32, w]) -> SIMD[F32, w]:
    """The sum of two numbers."""
    return a + b


def add(y: Ptr, a: Ptr, b: Ptr, n: Int):
    """Computes y = a + b. y may be a or b."""
    map2[plus](y, a, b, n)


comptime TERMS = 4  # that are added at once


def add_up[n: Int](y: Ptr, terms: Array[Ptr, TERMS], count: Int):
    """Computes y = the sum of the first n terms, one after the other. y may be any of them."""

    @always_inline
    def some[w: Int](i: Int) {imm}:
        var v = load[w](terms[0], i)
        comptime for k in range(1, n):
            v += load[w](terms[k], i)
        store[w](y, i, v)

    in_tiles_and_ones[LANES](count, some)


def add_neighbours(x: Ptr, apart: Int, terms: Int, count: Int):
    """Adds `terms` buffers, `apart` floats from one to the next, along the tree of docs/determinism.md, into the first.

    The others are changed too.
    """
    var step = 1
    while step < terms:
        for k in range(0, terms - step, 2 * step):
            var to = x.unsafe_offset(k * apart)
            add(to, to, x.unsafe_offset((k + step) * apart), count)
        step *= 2


def axpy(y: Ptr, x: Ptr, a: Float32, n: Int):
    """Computes y += a x."""

    @always_inline
    def some[w: Int](i: Int) {imm}:
        store[w](y, i, madd(load[w](x, i), SIMD[F32, w](a), load[w](y, i)))

    in_tiles_and_ones[LANES](n, some)


def fill(y: Ptr, a: Float32, n: Int):
    """Sets n floats to a."""

    @always_inline
    def some[w: Int](i: Int) {imm}:
        store[w](y, i, SIMD[F32, w](a))

    in_tiles_and_ones[LANES](n, some)


@always_inline
def _rounded[w: Int](x: SIMD[F32, w]) -> SIMD[F32, w]:
    """A product, behind a fence: what is added to it makes no fused multiply-add of it."""
    return llvm_intrinsic["llvm.arithmetic.fence", SIMD[F32, w], has_side_effect=False](x)


def _scaled_sum(y: Ptr, a: Ptr, s: Ptr, b: Ptr, c: Ptr, step: Int, n: Int):
    """Computes y = a s + b c as three ops would, s a number; so is c if `step` is 0."""
    var f = s[]
    var h = c[]

    @always_inline
    def some[w: Int](i: Int) {imm}:
        var by = SIMD[F32, w](h) if step == 0 else load[w](c, i)
        store[w](y, i, _rounded(load[w](a, i) * f) + _rounded(load[w](b, i) * by))

    in_tiles_and_ones[LANES](n, some)


def _root_quotient(y: Ptr, a: Ptr, s: Ptr, b: Ptr, t: Ptr, e: Ptr, n: Int):
    """Computes y = a s / (sqrt(b t) + e) as five ops would; s, t and e are numbers."""
    var f = s[]
    var h = t[]
    var more = e[]

    @always_inline
    def some[w: Int](i: Int) {imm}:
        store[w](y, i, load[w](a, i) * f / (sqrt(load[w](b, i) * h) + more))

    in_tiles_and_ones[LANES](n, some)


def _copy(y: Ptr, x: Ptr, n: Int):
    unsafe_memcpy(dest=y, src=x, count=n)


def _loss_scale(y: Ptr, r: Record):
    y[] = Float32(r.context[].loss_scale)


def ops() -> List[Op]:
    """The ops of these loops."""
    return [
        Op("axpy", "+y; x; a, n", call[axpy]),
        Op("scaled_sum", "y; a, s, b, c; step, n", call[_scaled_sum]),
        Op("root_quotient", "y; a, s, b, t, e; n", call[_root_quotient]),
        Op("copy", "y; x; n", call[_copy]),
        Op("fill", "y; ; a, n", call[fill]),
        Op("loss_scale", "scale", call[_loss_scale]),
    ]
