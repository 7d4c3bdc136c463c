"""kernels/gather.mojo on a GPU: a thread has one number of the result; gradients are added in the CPU's order."""

from std.utils import StaticTuple
from std.utils.numerics import nan

from max.gpu import block_idx

from ..lanes import F32
from .launch import GpuOp, Launch, Operand, Queue, blocks
from .quads import THREADS, index, of_shard


def _rows[backward: Bool](y_: Operand, x_: Operand, rows_: Operand, sizes: StaticTuple[Int64, 3]):
    """Number i of the result: of row i // F of what was taken, or of the table's gradient. sizes: n, V, F."""
    var n, V, F = Int(sizes[0]), Int(sizes[1]), Int(sizes[2])
    var i = index()
    if i >= (V if backward else n) * F:
        return
    var x = of_shard(x_)
    var rows = rows_.ints_at(block_idx.y)
    var s = Float32(0)
    comptime if backward:
        for j in range(n):
            if Int(rows[unsafe_offset=j]) == i // F:
                s += x[unsafe_offset=j * F + i % F]
    else:
        var row = Int(rows[unsafe_offset=i // F])
        s = nan[F32]()
        if 0 <= row < V:
            s = x[unsafe_offset=row * F + i % F]
    of_shard(y_)[unsafe_offset=i] = s


def _enqueue[backward: Bool](q: Queue, r: Launch) raises:
    var n = (r.int(5) if backward else r.int(4)) * r.int(6)
    q.enqueue_function[_rows[backward]](
        r.op(1), r.op(2), r.op(3), r.ints[3](4), grid_dim=(blocks(n, THREADS), r.shards), block_dim=THREADS
    )


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [GpuOp("take", _enqueue[False]), GpuOp("take_backward", _enqueue[True])]
