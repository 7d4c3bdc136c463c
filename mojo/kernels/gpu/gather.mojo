"""kernels/gather.mojo on a GPU: a thread has one number of the result; gradients are added in the CPU's order."""

from std.utils.numerics import nan

from max.gpu import block_idx

from ..lanes import F32
from .launch import GpuOp, Launch, Operand, Queue, blocks
from .quads import THREADS, index, of_shard


def _rows[backward: Bool](y_: Operand, x_: Operand, rows_: Operand, n_: Int64, V: Int64, F_: Int64):
    """Number i of the result: of row i // F of what was taken, or of the table's gradient."""
    var n = Int(n_)
    var F = Int(F_)
    var i = index()
    if i >= (Int(V) if backward else n) * F:
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
        if 0 <= row < Int(V):
            s = x[unsafe_offset=row * F + i % F]
    of_shard(y_)[unsafe_offset=i] = s


def _enqueue[backward: Bool](q: Queue, r: Launch) raises:
    var y = r.op(1)
    var x = r.op(2)
    var rows = r.op(3)
    var of_result = r.int(5) if backward else r.int(4)
    q.enqueue_function[_rows[backward]](
        y,
        x,
        rows,
        Int64(r.int(4)),
        Int64(r.int(5)),
        Int64(r.int(6)),
        grid_dim=(blocks(of_result * r.int(6), THREADS), r.shards),
        block_dim=THREADS,
    )


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [GpuOp("take", _enqueue[False]), GpuOp("take_backward", _enqueue[True])]
