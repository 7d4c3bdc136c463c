"""kernels/matmul.mojo on a GPU: a thread computes one number of C, along the CPU's chain of additions.

The obvious form, of which nothing is fast.
"""

from ..matmul import Product, sizes
from .launch import GpuOp, Launch, Operand, Queue, Sent, blocks
from .quads import THREADS, index, of_shard


def _matmul(c_: Operand, a_: Operand, b_: Operand, n: Int64, sent: Sent[Product]):
    var s = sent.sizes
    var at = index()
    if at >= Int(n):
        return
    var col = at % s.N
    var rest = at // s.N
    var row = rest % s.M
    rest //= s.M
    var j = rest % s.inner
    var i = rest // s.inner
    var a = of_shard(a_).unsafe_offset(i * s.a_outer + j * s.a_inner + row * s.a_m)
    var b = of_shard(b_).unsafe_offset(i * s.b_outer + j * s.b_inner + col * s.b_n)
    var sum = Float32(0)
    for k in range(s.K):
        sum = a[unsafe_offset=k * s.a_k].fma(b[unsafe_offset=k * s.b_k], sum)
    of_shard(c_)[unsafe_offset=at] = sum


def _enqueue(q: Queue, r: Launch) raises:
    @always_inline
    def get(i: Int) {imm r} -> Int:
        return r.int(5 + i)

    var s = sizes(get)
    var n = s.outer * s.inner * s.M * s.N
    q.enqueue_function[_matmul](
        r.op(1), r.op(2), r.op(3), Int64(n), Sent(s), grid_dim=(blocks(n, THREADS), r.shards), block_dim=THREADS
    )


def ops() -> List[GpuOp]:
    """The ops of this file."""
    return [GpuOp("matmul", _enqueue)]
