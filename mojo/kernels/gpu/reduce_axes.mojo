"""kernels/reduce_axes.mojo on a GPU: a thread computes one number of the result, in the order of the CPU."""

from ..arithmetic import maximum, plus
from ..lanes import Ptr
from ..op import Of2
from ..reduce_axes import LOWEST, argmax, fold
from .launch import GpuOp, IntPtr, Launch, Queue, blocks
from .quads import THREADS, index, of_shard


def _reduce[
    f: Of2, start: Float32
](
    y_: Ptr,
    ys: Int64,
    x_: Ptr,
    xs: Int64,
    k0: Int32,
    k1: Int32,
    k2: Int32,
    r0: Int32,
    r1: Int32,
    r2: Int32,
    sk0: Int64,
    sk1: Int64,
    sk2: Int64,
    sr0: Int64,
    sr1: Int64,
    sr2: Int64,
):
    var i = index()
    if i >= Int(k0) * Int(k1) * Int(k2):
        return
    var k = i % Int(k2)
    var j = i // Int(k2)
    var at = (j // Int(k1)) * Int(sk0) + (j % Int(k1)) * Int(sk1) + k * Int(sk2)
    var v = fold[f, start, 1](
        of_shard(x_, xs).unsafe_offset(at),
        Int(r0),
        Int(r1),
        Int(r2),
        Int(sr0),
        Int(sr1),
        Int(sr2),
    )
    of_shard(y_, ys)[unsafe_offset=i] = v[0]


def _enqueue[f: Of2, start: Float32](q: Queue, r: Launch) raises:
    var y = r.op(1)
    var x = r.op(2)
    q.enqueue_function[_reduce[f, start]](
        y.ptr(),
        y.step(),
        x.ptr(),
        x.step(),
        Int32(r.int(3)),
        Int32(r.int(4)),
        Int32(r.int(5)),
        Int32(r.int(6)),
        Int32(r.int(7)),
        Int32(r.int(8)),
        Int64(r.int(9)),
        Int64(r.int(10)),
        Int64(r.int(11)),
        Int64(r.int(12)),
        Int64(r.int(13)),
        Int64(r.int(14)),
        grid_dim=(
            blocks(r.int(3) * r.int(4) * r.int(5), THREADS),
            r.shards,
        ),
        block_dim=THREADS,
    )


def _argmax(
    y_: Ptr,
    ys: Int64,
    x_: Ptr,
    xs: Int64,
    before: Int64,
    n: Int64,
    behind: Int64,
):
    var i = index()
    if i >= Int(before) * Int(behind):
        return
    var at = (i // Int(behind)) * Int(n) * Int(behind) + i % Int(behind)
    var x = of_shard(x_, xs).unsafe_offset(at)
    var y = IntPtr(unsafe_from_address=Int(of_shard(y_, ys)))
    y[unsafe_offset=i] = argmax(x, Int(n), Int(behind))


def _enqueue_argmax(q: Queue, r: Launch) raises:
    var y = r.op(1)
    var x = r.op(2)
    q.enqueue_function[_argmax](
        y.ptr(),
        y.step(),
        x.ptr(),
        x.step(),
        Int64(r.int(3)),
        Int64(r.int(4)),
        Int64(r.int(5)),
        grid_dim=(blocks(r.int(3) * r.int(5), THREADS), r.shards),
        block_dim=THREADS,
    )


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [
        GpuOp("reduce_sum", _enqueue[plus, 0]),
        GpuOp("reduce_max", _enqueue[maximum, LOWEST]),
        GpuOp("argmax", _enqueue_argmax),
    ]
