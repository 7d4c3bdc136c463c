"""Memory for parameters, gradients and optimizer state: flat buffers of one layout (parameter.mojo has the layout)."""

from std.memory import Layout, alloc, unsafe_memset_zero
from std.memory.alloc import Alignment

from kernels.lanes import Ptr


def aligned_zeros(floats: Int) -> Ptr:
    """Memory for so many floats, on a vector boundary, set to 0. The caller frees it.

    Args:
        floats: How many.

    Returns:
        The memory.
    """
    var p = alloc(
        Layout[Float32, alignment=Alignment.of_bytes[64]()](count=floats)
    ).unsafe_leak()
    unsafe_memset_zero(p, floats)
    return p
