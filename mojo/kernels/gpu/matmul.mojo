"""kernels/matmul.mojo on a GPU: a thread computes one number of C, along the CPU's chain of additions. The obvious form, of
which nothing is fast.
"""

from ..lanes import Ptr
from ..matmul import sizes
from .launch import GpuOp, Launch, Queue, blocks
from .quads import THREADS, index, of_shard


def _matmul(
    c_: Ptr,
    cs: Int64,
    a_: Ptr,
    a_s: Int64,
    b_: Ptr,
    b_s: Int64,
    n: Int64,
    inner: Int32,
    M: Int32,
    N: Int32,
    K: Int32,
    a_outer: Int64,
    a_inner: Int64,
    a_m: Int64,
    a_k: Int64,
    b_outer: Int64,
    b_inner: Int64,
    b_k: Int64,
    b_n: Int64,
):
    var at = index()
    if at >= Int(n):
        return
    var col = at % Int(N)
    var rest = at // Int(N)
    var row = rest % Int(M)
    rest //= Int(M)
    var j = rest % Int(inner)
    var i = rest // Int(inner)
    var a = of_shard(a_, a_s).unsafe_offset(
        i * Int(a_outer) + j * Int(a_inner) + row * Int(a_m)
    )
    var b = of_shard(b_, b_s).unsafe_offset(
        i * Int(b_outer) + j * Int(b_inner) + col * Int(b_n)
    )
    var s = Float32(0)
    for k in range(Int(K)):
        s = a[unsafe_offset=k * Int(a_k)].fma(b[unsafe_offset=k * Int(b_k)], s)
    of_shard(c_, cs)[unsafe_offset=at] = s


def _enqueue(q: Queue, r: Launch) raises:
    @always_inline
    def get(i: Int) {imm r} -> Int:
        return r.int(5 + i)

    var s = sizes(get)
    var n = s.outer * s.inner * s.M * s.N
    q.enqueue_function[_matmul](
        r.op(1).ptr(),
        r.op(1).step(),
        r.op(2).ptr(),
        r.op(2).step(),
        r.op(3).ptr(),
        r.op(3).step(),
        Int64(n),
        Int32(s.inner),
        Int32(s.M),
        Int32(s.N),
        Int32(s.K),
        Int64(s.a_outer),
        Int64(s.a_inner),
        Int64(s.a_m),
        Int64(s.a_k),
        Int64(s.b_outer),
        Int64(s.b_inner),
        Int64(s.b_k),
        Int64(s.b_n),
        grid_dim=(blocks(n, THREADS), r.shards),
        block_dim=THREADS,
    )


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [GpuOp("matmul", _enqueue)]
