"""Tests of the kernels in mojo/kernels/gpu but convolutions and linear layers, against those for the CPU in the same program.

test_gpu_ops.py builds it for a GPU and runs it on an emulated one. Bits are equal where no tolerance is given.
"""

from std.testing import TestSuite

import ops_losses
import ops_planes
import ops_sums
import ops_walks


def main() raises:
    """All tests. There is no discovery over several files: each lists its own."""
    var suite = TestSuite()
    ops_walks.add_tests(suite)
    ops_planes.add_tests(suite)
    ops_losses.add_tests(suite)
    ops_sums.add_tests(suite)
    suite^.run()
