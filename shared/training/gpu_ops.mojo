"""The op table of a GPU: the lists of kernels/gpu, one after the other. A record is the one that the CPU runs for one shard,
with this table's code; ops that share a layer between ranks have no form here.
"""

from kernels import rows
from kernels.elementwise import maps
from kernels.gpu import (
    dropout,
    elementwise,
    layout,
    optimizer,
    pool,
    products,
    reduce,
    softmax,
)
from kernels.gpu.elementwise import OnGpu
from kernels.gpu.launch import GpuOp


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
    all.extend(reduce.ops())
    all.extend(optimizer.ops())
    return all^
