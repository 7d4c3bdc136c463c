"""Elementwise ops on a GPU (kernels/elementwise.mojo): one launch each, four floats per thread, shards side by side.

n counts the floats of one shard and may be any number. All but tanh and sigmoid give the bits of the CPU.
"""

from ..elementwise import relu
from ..lanes import F32, Ptr
from .functions import sigmoid, tanh
from .launch import Operand, Queue, StepContextPtr, blocks
from .quads import THREADS, Four, aligned, index, load4, of_shard, store4

# A function of a vector and a number that is the same everywhere, and one of two vectors.
comptime Of1 = def[w: Int](SIMD[F32, w], Float32) thin -> SIMD[F32, w]
comptime Of2 = def[w: Int](SIMD[F32, w], SIMD[F32, w]) thin -> SIMD[F32, w]


# --- one kernel for all -----------------------------------------------------------------


def _map[f: Of1](y_: Ptr, ys: Int64, x_: Ptr, xs: Int64, a: Float32, n_: Int64):
    var n = Int(n_)
    var y = of_shard(y_, ys)
    var x = of_shard(x_, xs)
    var i = 4 * index()
    var end = min(i + 4, n)
    if i + 4 <= n and aligned(y) and aligned(x):
        store4(y, i, f[4](load4(x, i), a))
        return
    while i < end:
        y[unsafe_offset=i] = f[1](x[unsafe_offset=i], a)
        i += 1


def _map2[
    f: Of2
](y_: Ptr, ys: Int64, u_: Ptr, us: Int64, v_: Ptr, vs: Int64, n_: Int64,):
    var n = Int(n_)
    var y = of_shard(y_, ys)
    var u = of_shard(u_, us)
    var v = of_shard(v_, vs)
    var i = 4 * index()
    var end = min(i + 4, n)
    if i + 4 <= n and aligned(y) and aligned(u) and aligned(v):
        store4(y, i, f[4](load4(u, i), load4(v, i)))
        return
    while i < end:
        y[unsafe_offset=i] = f[1](u[unsafe_offset=i], v[unsafe_offset=i])
        i += 1


@always_inline
def _launch[
    f: Of1
](q: Queue, shards: Int, y: Operand, x: Operand, a: Float32, n: Int) raises:
    q.enqueue_function[_map[f]](
        y.ptr(),
        y.step(),
        x.ptr(),
        x.step(),
        a,
        Int64(n),
        grid_dim=(blocks(n, 4 * THREADS), shards),
        block_dim=THREADS,
    )


@always_inline
def _launch2[
    f: Of2
](q: Queue, shards: Int, y: Operand, u: Operand, v: Operand, n: Int,) raises:
    q.enqueue_function[_map2[f]](
        y.ptr(),
        y.step(),
        u.ptr(),
        u.step(),
        v.ptr(),
        v.step(),
        Int64(n),
        grid_dim=(blocks(n, 4 * THREADS), shards),
        block_dim=THREADS,
    )


# --- the functions ------------------------------------------------------------------------


@always_inline
def _relu[w: Int](x: SIMD[F32, w], a: Float32) -> SIMD[F32, w]:
    return relu[w](x)


@always_inline
def _relu_gradient[w: Int](d: SIMD[F32, w], y: SIMD[F32, w]) -> SIMD[F32, w]:
    return y.gt(0).select(d, SIMD[F32, w](0))


@always_inline
def _tanh[w: Int](x: SIMD[F32, w], a: Float32) -> SIMD[F32, w]:
    return tanh(x)


@always_inline
def _tanh_gradient[w: Int](d: SIMD[F32, w], y: SIMD[F32, w]) -> SIMD[F32, w]:
    return d * (1 - y * y)


@always_inline
def _sigmoid[w: Int](x: SIMD[F32, w], a: Float32) -> SIMD[F32, w]:
    return sigmoid[w](x)


@always_inline
def _sigmoid_gradient[w: Int](d: SIMD[F32, w], y: SIMD[F32, w]) -> SIMD[F32, w]:
    return d * y * (1 - y)


@always_inline
def _add[w: Int](u: SIMD[F32, w], v: SIMD[F32, w]) -> SIMD[F32, w]:
    return u + v


@always_inline
def _multiply[w: Int](u: SIMD[F32, w], v: SIMD[F32, w]) -> SIMD[F32, w]:
    return u * v


@always_inline
def _scale[w: Int](x: SIMD[F32, w], a: Float32) -> SIMD[F32, w]:
    return x * a


@always_inline
def _same[w: Int](x: SIMD[F32, w], a: Float32) -> SIMD[F32, w]:
    return x


# --- activations --------------------------------------------------------------------------


def relu_forward(q: Queue, shards: Int, y: Operand, x: Operand, n: Int) raises:
    """Computes y = max(x, 0)."""
    _launch[_relu](q, shards, y, x, 0, n)


def relu_backward(
    q: Queue, shards: Int, dx: Operand, dy: Operand, y: Operand, n: Int
) raises:
    """Passes dy where y > 0."""
    _launch2[_relu_gradient](q, shards, dx, dy, y, n)


def tanh_forward(q: Queue, shards: Int, y: Operand, x: Operand, n: Int) raises:
    """Computes y = tanh(x)."""
    _launch[_tanh](q, shards, y, x, 0, n)


def tanh_backward(
    q: Queue, shards: Int, dx: Operand, dy: Operand, y: Operand, n: Int
) raises:
    """Computes dx = dy (1 - y^2)."""
    _launch2[_tanh_gradient](q, shards, dx, dy, y, n)


def sigmoid_forward(
    q: Queue, shards: Int, y: Operand, x: Operand, n: Int
) raises:
    """Computes y = 1 / (1 + exp(-x))."""
    _launch[_sigmoid](q, shards, y, x, 0, n)


def sigmoid_backward(
    q: Queue, shards: Int, dx: Operand, dy: Operand, y: Operand, n: Int
) raises:
    """Computes dx = dy y (1 - y)."""
    _launch2[_sigmoid_gradient](q, shards, dx, dy, y, n)


# --- arithmetic -----------------------------------------------------------------------------


def add(
    q: Queue, shards: Int, y: Operand, a: Operand, b: Operand, n: Int
) raises:
    """Computes y = a + b. y may be a or b."""
    _launch2[_add](q, shards, y, a, b, n)


def multiply(
    q: Queue, shards: Int, y: Operand, a: Operand, b: Operand, n: Int
) raises:
    """Computes y = a b. y may be a or b."""
    _launch2[_multiply](q, shards, y, a, b, n)


def scale(
    q: Queue, shards: Int, y: Operand, x: Operand, a: Float32, n: Int
) raises:
    """Computes y = a x. y may be x."""
    _launch[_scale](q, shards, y, x, a, n)


def copy(q: Queue, shards: Int, y: Operand, x: Operand, n: Int) raises:
    """Copies n floats of each shard."""
    _launch[_same](q, shards, y, x, 0, n)


def _fill(y_: Ptr, ys: Int64, a: Float32, n_: Int64):
    var n = Int(n_)
    var y = of_shard(y_, ys)
    var i = 4 * index()
    var end = min(i + 4, n)
    if i + 4 <= n and aligned(y):
        store4(y, i, Four(a))
        return
    while i < end:
        y[unsafe_offset=i] = a
        i += 1


def fill(q: Queue, shards: Int, y: Operand, a: Float32, n: Int) raises:
    """Sets n floats of each shard to a."""
    q.enqueue_function[_fill](
        y.ptr(),
        y.step(),
        a,
        Int64(n),
        grid_dim=(blocks(n, 4 * THREADS), shards),
        block_dim=THREADS,
    )


def _loss_scale(y: Ptr, ys: Int64, shards: Int32, ctx: StepContextPtr):
    var s = index()
    if s < Int(shards):
        y[unsafe_offset=s * Int(ys)] = ctx[].loss_scale


def loss_scale(q: Queue, shards: Int, y: Operand, ctx: StepContextPtr) raises:
    """Writes the step's loss scale, one float per shard."""
    q.enqueue_function[_loss_scale](
        y.ptr(),
        y.step(),
        Int32(shards),
        ctx,
        grid_dim=blocks(shards, THREADS),
        block_dim=THREADS,
    )
