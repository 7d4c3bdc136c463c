"""The op table: the lists of all kernel files, one after the other. An op's place in it is its code."""

from kernels import (
    arithmetic,
    attention,
    batch_norm,
    conv2d_general,
    dropout,
    elementwise,
    gather,
    layout,
    matmul,
    optimizer,
    pool,
    products,
    random,
    reduce,
    reduce_axes,
    rows,
    softmax,
    strided,
    winograd,
)
from kernels.op import Cpu, Op
from kernels.record import Record
from kernels.strided import CpuStrided


def _unknown(r: Record):
    r.context[].stopped = 1


def ops() -> List[Op]:
    """All ops of the CPU. The last one is what codes stand for that are no op's: it ends the program."""
    var all = elementwise.maps[Cpu]()
    all.extend(rows.ops[Cpu]())
    all.extend(elementwise.ops())
    all.extend(layout.ops())
    all.extend(products.ops())
    all.extend(winograd.ops())
    all.extend(conv2d_general.ops())
    all.extend(pool.ops())
    all.extend(dropout.ops())
    all.extend(softmax.ops())
    all.extend(attention.ops())
    all.extend(reduce.ops())
    all.extend(random.ops())
    all.extend(optimizer.ops())
    all.extend(arithmetic.maps[Cpu]())
    all.extend(arithmetic.pairs[CpuStrided]())
    all.extend(strided.ops())
    all.extend(reduce_axes.ops())
    all.extend(matmul.ops())
    all.extend(gather.maps[Cpu]())
    all.extend(gather.ops())
    all.extend(batch_norm.ops())
    all.append(Op("unknown", "", _unknown))
    return all^
