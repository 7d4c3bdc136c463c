"""kernels/strided.mojo on a GPU: a thread computes one number of the result, shards lie side by side."""

from std.math import ceildiv
from std.utils import StaticTuple

from max.gpu import block_idx

from ..lanes import F32
from ..strided import AXES, Strided
from ..views import Of2
from .launch import Enqueue, GpuOp, Launch, Operand, Queue, blocks
from .quads import MOST, THREADS, divide, divisor, index, of_shard, small_index
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


comptime Axes = StaticTuple[Int64, AXES]


def _pairs[
    f: Of2
](
    y_: Operand,
    a_: Operand,
    b_: Operand,
    n: UInt32,
    sizes: Axes,
    by: StaticTuple[UInt64, AXES],
    y: Axes,
    a: Axes,
    b: Axes,
):
    """Number i of n: y[.] = f(a[.], b[.]); of each its strides. by: divisors of the sizes."""
    var rest = small_index()
    if rest >= n:
        return
    var at = Int64(0)
    var u = Int64(0)
    var v = Int64(0)
    comptime for j in range(AXES):
        comptime axis = AXES - 1 - j
        var k = Int64(rest)
        comptime if axis > 0:
            var outer = divide(rest, by[axis])
            k = Int64(rest - outer * UInt32(sizes[axis]))
            rest = outer
        at += k * y[axis]
        u += k * a[axis]
        v += k * b[axis]
    of_shard(y_)[unsafe_offset=Int(at)] = f[1](of_shard(a_)[unsafe_offset=Int(u)], of_shard(b_)[unsafe_offset=Int(v)])


@always_inline
def _launch[
    f: Of2
](q: Queue, r: Launch, y: Operand, a: Operand, b: Operand, sizes: Axes, ys: Axes, at_a: Int, at_b: Int) raises:
    """`at_a`, `at_b`: which arguments the strides of a and b begin with."""
    var n = 1
    var by = StaticTuple[UInt64, AXES](fill=0)
    for i in range(AXES):
        n *= Int(sizes[i])
        by[i] = divisor(max(Int(sizes[i]), 1))
    if n >= MOST:
        raise Error(t"[gpu] a tensor of {n} floats per shard is too large for one launch; make shard_size smaller")
    q.enqueue_function[_pairs[f]](
        y,
        a,
        b,
        UInt32(n),
        sizes,
        by,
        ys,
        r.ints[AXES](at_a),
        r.ints[AXES](at_b),
        grid_dim=(blocks(n, THREADS), r.shards),
        block_dim=THREADS,
    )


def _enqueue_pairs[f: Of2](q: Queue, r: Launch) raises:
    var sizes = r.ints[AXES](4)
    var gapless = Axes(fill=1)
    for i in range(AXES - 1):
        gapless[AXES - 2 - i] = gapless[AXES - 1 - i] * sizes[AXES - 1 - i]
    _launch[f](q, r, r.op(1), r.op(2), r.op(3), sizes, gapless, 4 + AXES, 4 + 2 * AXES)


def _copy(q: Queue, r: Launch) raises:
    var y = r.op(1)
    var x = r.op(2)
    y.address += 4 * r.int(3)
    x.address += 4 * r.int(4)
    var at_x = 5 + 2 * AXES
    _launch[_second](q, r, y, x, x, r.ints[AXES](5), r.ints[AXES](5 + AXES), at_x, at_x)


# --- gradients of parameters ----------------------------------------------------------------------------------------------


def _accumulate(y_: Operand, x: Operand, n: Int64, shards: Int32, fold: Int32, accumulate: Int32):
    var i = index()
    if i >= Int(n):
        return
    var first = block_idx.y * Int(fold)

    @always_inline
    def leaf(j: Int) {imm} -> SIMD[F32, 1]:
        return x.at(first + j)[unsafe_offset=i]

    var s = tree[1](leaf, min(Int(fold), Int(shards) - first))
    var y = of_shard(y_)
    if accumulate != 0:
        s += y[unsafe_offset=i]
    y[unsafe_offset=i] = s[0]


def _enqueue_accumulate(q: Queue, r: Launch) raises:
    var y = r.op(1)
    var x = r.op(2)
    q.enqueue_function[_accumulate](
        y,
        x,
        Int64(r.int(3)),
        Int32(r.shards),
        Int32(r.fold),
        Int32(r.accumulate),
        grid_dim=(blocks(r.int(3), THREADS), ceildiv(r.shards, r.fold)),
        block_dim=THREADS,
    )


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [GpuOp("copy_strided", _copy), GpuOp("accumulate", _enqueue_accumulate)]
