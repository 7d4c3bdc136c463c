"""One flat buffer for all parameters and one of the same layout for their gradients (python/odyssey/arena.py)."""

from std.memory import Layout, alloc, unsafe_memset_zero
from std.memory.alloc import Alignment

from kernels.lanes import LANES, Ptr


def aligned_zeros(floats: Int) -> Ptr:
    """Memory for so many floats, on a vector boundary, set to 0. The caller frees it.
    """
    var p = alloc(
        Layout[Float32, alignment=Alignment.of_bytes[64]()](count=floats)
    ).unsafe_leak()
    unsafe_memset_zero(p, floats)
    return p


struct Arena(Movable):
    """Parameters of the given sizes, in order, each on a vector boundary."""

    var params: Ptr
    var offsets: List[Int]  # in floats
    var size: Int  # in floats, a multiple of LANES

    def __init__(out self, sizes: List[Int]):
        """Makes room for parameters of `sizes` floats, all 0."""
        self.offsets = List[Int]()
        self.size = 0
        for n in sizes:
            self.offsets.append(self.size)
            self.size += (n + LANES - 1) // LANES * LANES
        self.params = aligned_zeros(self.size)

    def __deinit__(deinit self):
        self.params.unsafe_free()

    def param(self, i: Int) -> Ptr:
        """Parameter i."""
        return self.params.unsafe_offset(self.offsets[i])
