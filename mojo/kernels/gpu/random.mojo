"""Uniform random numbers on a GPU: the numbers of kernels/random.mojo, to the last bit."""

from ..lanes import Ptr
from ..random import philox, unit
from .launch import Operand, Queue, blocks
from .quads import THREADS, Four, aligned, index, store4

comptime INIT = UInt32(0x74696E69)  # "init"


def _uniform(
    y: Ptr,
    n_: Int64,
    seed: UInt64,
    stream: UInt32,
    low: Float32,
    span: Float32,
):
    var n = Int(n_)
    var i = 4 * index()
    if i >= n:
        return
    var r = philox[1](UInt32(i // 4), 0, stream, INIT, seed)
    var v = Four()
    comptime for j in range(4):
        v[j] = unit[1](r[j])
    v = v * span + low
    if i + 4 <= n and aligned(y):
        store4(y, i, v)
    else:
        comptime for j in range(4):
            if i + j < n:
                y[unsafe_offset=i + j] = v[j]


def uniform(
    q: Queue,
    y: Operand,  # there is one; its stride does not matter
    n: Int,
    seed: UInt64,
    stream: UInt32,
    low: Float32,
    high: Float32,
) raises:
    """Fills y with numbers from [low, high): element i is word i % 4 of counter (i / 4, 0, stream, "init").

    n must be below 2^34.
    """
    q.enqueue_function[_uniform](
        y.ptr(),
        Int64(n),
        seed,
        stream,
        low,
        high - low,
        grid_dim=blocks(n, 4 * THREADS),
        block_dim=THREADS,
    )
