"""The op table of a GPU: the lists of kernels/gpu, one after the other. A record is the one that the CPU runs for one shard,
with this table's code; ops that share a layer between ranks have no form here.
"""

from kernels import arithmetic, rows
from kernels import gather as shared_gather
from kernels.elementwise import maps
from kernels.gpu import (
    attention,
    batch_norm,
    dropout,
    elementwise,
    gather,
    layout,
    matmul,
    optimizer,
    pool,
    products,
    reduce,
    reduce_axes,
    softmax,
    strided,
)
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
    all.extend(pool.ops())
    all.extend(dropout.ops())
    all.extend(softmax.ops())
    all.extend(attention.ops())
    all.extend(reduce.ops())
    all.extend(optimizer.ops())
    all.extend(arithmetic.maps[OnGpu]())
    all.extend(arithmetic.pairs[GpuStrided]())
    all.extend(strided.ops())
    all.extend(reduce_axes.ops())
    all.extend(matmul.ops())
    all.extend(shared_gather.maps[OnGpu]())
    all.extend(gather.ops())
    all.extend(batch_norm.ops())
    return all^
