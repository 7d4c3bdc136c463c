"""kernels/strided.mojo on a GPU: a thread computes one number of the result, shards lie side by side."""

from std.math import ceildiv
from std.utils import StaticTuple

from max.gpu import block_idx

from ..lanes import F32
from ..strided import AXES, Strided
from ..views import Of2
from .launch import Enqueue, GpuOp, Launch, Operand, Queue, SOME, Sent, blocks, of_several
from .quads import THREADS, divide, divisor, index, of_shard, small, small_index
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
    q.enqueue_function[_pairs[f]](
        y,
        a,
        b,
        small(n),
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


# --- gradients of parameters ------------------------------------------------------------------------------------------


@fieldwise_init
struct _Sum(TrivialRegisterPassable):
    """One gradient: what it is added to, of each shard what it is, and its floats."""

    var y: Operand
    var x: Operand
    var n: Int


def _accumulate(sums: Sent[StaticTuple[_Sum, SOME]], shards: Int32, fold: Int32, accumulate: Int32):
    var sum = of_several(sums, block_idx.z)
    var i = index()
    if i >= sum.n:
        return
    var first = block_idx.y * Int(fold)

    @always_inline
    def leaf(j: Int) {imm} -> SIMD[F32, 1]:
        return sum.x.at(first + j)[unsafe_offset=i]

    var s = tree[1](leaf, min(Int(fold), Int(shards) - first))
    var y = of_shard(sum.y)
    if accumulate != 0:
        s += y[unsafe_offset=i]
    y[unsafe_offset=i] = s[0]


def _sum_of(r: Launch) -> _Sum:
    return _Sum(r.op(1), r.op(2), r.int(3))


def _enqueue_accumulate(q: Queue, r: Launch) raises:
    """Also of the gradients that follow, unless one may be added to twice: those of a normalisation are small."""
    var sums = StaticTuple[_Sum, SOME](fill=_sum_of(r))
    var many = 1
    if not r.accumulate:
        sums, many = r.several[_sum_of]()
    var most = 0
    for k in range(many):
        most = max(most, sums[k].n)
    q.enqueue_function[_accumulate](
        Sent(sums),
        Int32(r.shards),
        Int32(r.fold),
        Int32(r.accumulate),
        grid_dim=(blocks(most, THREADS), ceildiv(r.shards, r.fold), many),
        block_dim=THREADS,
    )


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [GpuOp("copy_strided", _copy), GpuOp("accumulate", _enqueue_accumulate)]
