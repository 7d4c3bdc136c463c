"""Functions of numbers one by one, of rows, and of tensors with strides."""

from kernels import arithmetic, elementwise, reduce_axes, rows, strided
from kernels.op import Cpu, OpsPtr
from kernels.strided import CpuStrided


@export
def odyssey_elementwise(all: OpsPtr) abi("C"):
    """Adds the ops of this family."""
    all[].extend(elementwise.maps[Cpu]())
    all[].extend(rows.ops[Cpu]())
    all[].extend(arithmetic.maps[Cpu]())
    all[].extend(arithmetic.pairs[CpuStrided]())
    all[].extend(strided.ops())
    all[].extend(reduce_axes.ops())
