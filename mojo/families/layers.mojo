"""The other layers, sums over samples, what moves data, and optimizers."""

from kernels import (
    batch_norm,
    buffers,
    conv2d_general,
    dropout,
    gather,
    layout,
    matmul,
    optimizer,
    pool,
    random,
    reduce,
    winograd,
)
from kernels.op import Cpu, OpsPtr


@export
def odyssey_layers(all: OpsPtr) abi("C"):
    """Adds the ops of this family."""
    all[].extend(buffers.ops())
    all[].extend(layout.ops())
    all[].extend(winograd.ops())
    all[].extend(conv2d_general.ops())
    all[].extend(pool.ops[Cpu]())
    all[].extend(dropout.ops[Cpu]())
    all[].extend(reduce.ops())
    all[].extend(random.ops())
    all[].extend(optimizer.ops[Cpu]())
    all[].extend(matmul.ops())
    all[].extend(gather.maps[Cpu]())
    all[].extend(gather.ops())
    all[].extend(batch_norm.ops[Cpu]())
