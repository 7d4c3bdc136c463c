"""The op table of a GPU: the lists of kernels/gpu, one after the other.

A record is the one that the CPU runs for one shard, with this table's code; ops that share a layer between ranks have
no form here.
"""

from kernels import arithmetic, batch_norm, dropout, optimizer, pool, rows, softmax
from kernels import gather as shared_gather
from kernels.elementwise import maps
from kernels.gpu import attention, elementwise, gather, layout, matmul, products, reduce, reduce_axes, strided
from kernels.gpu.elementwise import OnGpu
from kernels.gpu.launch import GpuOp
from kernels.gpu.strided import GpuStrided


def gpu_ops() -> List[GpuOp]:
    """All ops of a GPU."""
    var all = maps[OnGpu]()
    all.extend(rows.ops[OnGpu]())
    all.extend(elementwise.ops())
    all.extend(layout.ops())
    all.extend(products.ops())
    all.extend(pool.ops[OnGpu]())
    all.extend(dropout.ops[OnGpu]())
    all.extend(softmax.ops[OnGpu]())
    all.extend(softmax.fused[OnGpu]())
    all.extend(attention.ops())
    all.extend(reduce.ops())
    all.extend(optimizer.ops[OnGpu]())
    all.extend(arithmetic.maps[OnGpu]())
    all.extend(arithmetic.pairs[GpuStrided]())
    all.extend(strided.ops())
    all.extend(reduce_axes.ops())
    all.extend(matmul.ops())
    all.extend(shared_gather.maps[OnGpu]())
    all.extend(gather.ops())
    all.extend(batch_norm.ops[OnGpu]())
    return all^
