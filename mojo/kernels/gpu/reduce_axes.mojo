"""kernels/reduce_axes.mojo on a GPU: a thread computes one number of the result, in the order of the CPU."""

from std.utils import StaticTuple

from max.gpu import block_idx

from ..arithmetic import maximum
from ..buffers import plus
from ..reduce_axes import LOWEST, argmax, fold
from ..views import Of2
from .launch import GpuOp, Launch, Operand, Queue, blocks
from .quads import THREADS, index, of_shard


def _reduce[
    f: Of2, start: Float32
](
    y_: Operand,
    x_: Operand,
    sizes: StaticTuple[Int64, 6],  # of the axes that are kept, and of the others
    strides: StaticTuple[Int64, 6],
):
    var i = index()
    if i >= Int(sizes[0] * sizes[1] * sizes[2]):
        return
    var j = Int64(i) // sizes[2]
    var at = j // sizes[1] * strides[0] + j % sizes[1] * strides[1] + Int64(i) % sizes[2] * strides[2]
    var v = fold[f, start, 1](
        of_shard(x_).unsafe_offset(Int(at)),
        Int(sizes[3]),
        Int(sizes[4]),
        Int(sizes[5]),
        Int(strides[3]),
        Int(strides[4]),
        Int(strides[5]),
    )
    of_shard(y_)[unsafe_offset=i] = v[0]


def _enqueue[f: Of2, start: Float32](q: Queue, r: Launch) raises:
    var grid = blocks(r.int(3) * r.int(4) * r.int(5), THREADS)
    q.enqueue_function[_reduce[f, start]](
        r.op(1), r.op(2), r.ints[6](3), r.ints[6](9), grid_dim=(grid, r.shards), block_dim=THREADS
    )


def _argmax(y_: Operand, x_: Operand, sizes: StaticTuple[Int64, 3]):
    var before, n, behind = Int(sizes[0]), Int(sizes[1]), Int(sizes[2])
    var i = index()
    if i >= before * behind:
        return
    var x = of_shard(x_).unsafe_offset(i // behind * n * behind + i % behind)
    y_.ints_at(block_idx.y)[unsafe_offset=i] = argmax(x, n, behind)


def _enqueue_argmax(q: Queue, r: Launch) raises:
    var grid = blocks(r.int(3) * r.int(5), THREADS)
    q.enqueue_function[_argmax](r.op(1), r.op(2), r.ints[3](3), grid_dim=(grid, r.shards), block_dim=THREADS)


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [
        GpuOp("reduce_sum", _enqueue[plus, 0]),
        GpuOp("reduce_max", _enqueue[maximum, LOWEST]),
        GpuOp("argmax", _enqueue_argmax),
    ]
