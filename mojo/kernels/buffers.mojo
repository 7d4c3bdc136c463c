"""Loops over floats in memory, for kernels and the executor: sums, copies, one number everywhere. On the CPU alone."""

from std.memory import unsafe_memcpy

from .lanes import F32, LANES, Ptr, in_tiles_and_ones, load, madd, store
from .op import Op, call, map2
from .record import Record


@always_inline
def _sum[w: Int](a: SIMD[F32, w], b: SIMD[F32, w]) -> SIMD[F32, w]:
    return a + b


def add(y: Ptr, a: Ptr, b: Ptr, n: Int):
    """Computes y = a + b. y may be a or b."""
    map2[_sum](y, a, b, n)


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


def _copy(y: Ptr, x: Ptr, n: Int):
    unsafe_memcpy(dest=y, src=x, count=n)


def _loss_scale(y: Ptr, r: Record):
    y[] = Float32(r.context[].loss_scale)


def ops() -> List[Op]:
    """The ops of these loops."""
    return [
        Op("axpy", "+y; x; a, n", call[axpy]),
        Op("copy", "y; x; n", call[_copy]),
        Op("fill", "y; ; a, n", call[fill]),
        Op("loss_scale", "scale", call[_loss_scale]),
    ]
