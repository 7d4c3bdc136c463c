"""kernels/strided.mojo on a GPU: a thread computes one number of the result, shards lie side by side."""

from std.math import ceildiv

from max.gpu import block_idx

from ..lanes import F32, Ptr
from ..op import Of2
from ..strided import AXES, Strided
from .launch import Enqueue, GpuOp, Launch, Queue, blocks
from .quads import THREADS, index, of_shard
from .reduce import tree


struct GpuStrided(Strided):
    """The loop of a GPU."""

    comptime Run = Enqueue

    @staticmethod
    def pairs[f: Of2]() -> Self.Run:
        return _enqueue_pairs[f]


@always_inline
def _second[w: Int](a: SIMD[F32, w], b: SIMD[F32, w]) -> SIMD[F32, w]:
    return b


def _pairs[
    f: Of2
](
    y_: Ptr,
    ys: Int64,
    a_: Ptr,
    a_s: Int64,
    b_: Ptr,
    b_s: Int64,
    n: Int64,
    d1: Int32,
    d2: Int32,
    d3: Int32,
    d4: Int32,
    y0: Int64,
    y1: Int64,
    y2: Int64,
    y3: Int64,
    y4: Int64,
    a0: Int64,
    a1: Int64,
    a2: Int64,
    a3: Int64,
    a4: Int64,
    b0: Int64,
    b1: Int64,
    b2: Int64,
    b3: Int64,
    b4: Int64,
):
    """Number i of n: y[.] = f(a[.], b[.])."""
    var i = index()
    if i >= Int(n):
        return
    var rest = UInt32(i)
    var i4 = Int64(rest % UInt32(d4))
    rest //= UInt32(d4)
    var i3 = Int64(rest % UInt32(d3))
    rest //= UInt32(d3)
    var i2 = Int64(rest % UInt32(d2))
    rest //= UInt32(d2)
    var i1 = Int64(rest % UInt32(d1))
    var i0 = Int64(rest // UInt32(d1))
    var at = Int(i0 * y0 + i1 * y1 + i2 * y2 + i3 * y3 + i4 * y4)
    var u = Int(i0 * a0 + i1 * a1 + i2 * a2 + i3 * a3 + i4 * a4)
    var v = Int(i0 * b0 + i1 * b1 + i2 * b2 + i3 * b3 + i4 * b4)
    of_shard(y_, ys)[unsafe_offset=at] = f[1](
        of_shard(a_, a_s)[unsafe_offset=u], of_shard(b_, b_s)[unsafe_offset=v]
    )


@always_inline
def _launch[
    f: Of2
](
    q: Queue,
    r: Launch,
    y: Ptr,
    y_: Int,
    a: Ptr,
    a_: Int,
    b: Ptr,
    b_: Int,
    sizes: Int,
    ys: Array[Int, AXES],
    at_a: Int,
    at_b: Int,
) raises:
    """`sizes`, at_a, at_b: which arguments the sizes and the strides of a and b begin with; y_, a_, b_: floats from one shard
    to the next.
    """
    var n = 1
    for i in range(AXES):
        n *= r.int(sizes + i)
    if n >= 1 << 31:
        raise Error(
            t"[gpu] a tensor of {n} floats per shard is too large for one"
            t" launch; make shard_size smaller"
        )
    q.enqueue_function[_pairs[f]](
        y,
        Int64(y_),
        a,
        Int64(a_),
        b,
        Int64(b_),
        Int64(n),
        Int32(r.int(sizes + 1)),
        Int32(r.int(sizes + 2)),
        Int32(r.int(sizes + 3)),
        Int32(r.int(sizes + 4)),
        Int64(ys[0]),
        Int64(ys[1]),
        Int64(ys[2]),
        Int64(ys[3]),
        Int64(ys[4]),
        Int64(r.int(at_a)),
        Int64(r.int(at_a + 1)),
        Int64(r.int(at_a + 2)),
        Int64(r.int(at_a + 3)),
        Int64(r.int(at_a + 4)),
        Int64(r.int(at_b)),
        Int64(r.int(at_b + 1)),
        Int64(r.int(at_b + 2)),
        Int64(r.int(at_b + 3)),
        Int64(r.int(at_b + 4)),
        grid_dim=(blocks(n, THREADS), r.shards),
        block_dim=THREADS,
    )


def _enqueue_pairs[f: Of2](q: Queue, r: Launch) raises:
    var gapless = Array[Int, AXES](fill=1)
    for i in range(AXES - 1):
        gapless[AXES - 2 - i] = gapless[AXES - 1 - i] * r.int(8 - i)
    var y = r.op(1)
    var a = r.op(2)
    var b = r.op(3)
    _launch[f](
        q,
        r,
        y.ptr(),
        y.stride,
        a.ptr(),
        a.stride,
        b.ptr(),
        b.stride,
        4,
        gapless,
        4 + AXES,
        4 + 2 * AXES,
    )


def _copy(q: Queue, r: Launch) raises:
    var strides = Array[Int, AXES](fill=0)
    for i in range(AXES):
        strides[i] = r.int(5 + AXES + i)
    var x = r.op(2).ptr().unsafe_offset(r.int(4))
    _launch[_second](
        q,
        r,
        r.op(1).ptr().unsafe_offset(r.int(3)),
        r.op(1).stride,
        x,
        r.op(2).stride,
        x,
        r.op(2).stride,
        5,
        strides,
        5 + 2 * AXES,
        5 + 2 * AXES,
    )


# --- gradients of parameters ----------------------------------------------------------------------------------------------


def _accumulate(
    y_: Ptr,
    ys: Int64,
    x: Ptr,
    xs: Int64,
    n: Int64,
    shards: Int32,
    fold: Int32,
    accumulate: Int32,
):
    var i = index()
    if i >= Int(n):
        return
    var first = block_idx.y * Int(fold)

    @always_inline
    def leaf(j: Int) {imm} -> SIMD[F32, 1]:
        return x[unsafe_offset=(first + j) * Int(xs) + i]

    var s = tree[1](leaf, min(Int(fold), Int(shards) - first))
    var y = of_shard(y_, ys)
    if accumulate != 0:
        s += y[unsafe_offset=i]
    y[unsafe_offset=i] = s[0]


def _enqueue_accumulate(q: Queue, r: Launch) raises:
    var y = r.op(1)
    var x = r.op(2)
    q.enqueue_function[_accumulate](
        y.ptr(),
        y.step(),
        x.ptr(),
        x.step(),
        Int64(r.int(3)),
        Int32(r.shards),
        Int32(r.fold),
        Int32(r.accumulate),
        grid_dim=(blocks(r.int(3), THREADS), ceildiv(r.shards, r.fold)),
        block_dim=THREADS,
    )


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [
        GpuOp("copy_strided", _copy),
        GpuOp("accumulate", _enqueue_accumulate),
    ]
