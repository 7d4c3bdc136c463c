"""Attention and softmax."""

from kernels import attention, softmax
from kernels.op import Cpu, OpsPtr


@export
def odyssey_text(all: OpsPtr) abi("C"):
    """Adds the ops of this family."""
    all[].extend(attention.ops())
    all[].extend(softmax.ops[Cpu]())
