"""Sums in fixed parts: how a sum is cut so that several processes can compute it together and get the bits of one.

A sum over an axis of n elements is PARTS sums, each over a run of the axis and each one chain that starts at 0:

    part i is the run  n i // PARTS  to  n (i + 1) // PARTS        (parallel/plan.py: share(n, PARTS, i))
    the sum is  (part 0 + part 1) + (part 2 + part 3)              (the tree of reduce.mojo)

The cut depends on n alone. A run may be empty; its part is 0. Cut like this are the sums over which tensor parallelism
splits a layer: the inputs of a linear layer (forward), its outputs and the output channels of a convolution (gradient
of the input). A process that owns the parts of one node of the tree computes that node, and the nodes add up to the
bits of the whole.
"""

from .lanes import F32, Ptr

comptime PARTS = 4


@always_inline
def cut(n: Int, i: Int) -> Int:
    """Where part i of an axis of n elements begins; i = PARTS is the end."""
    return n * i // PARTS


@always_inline
def fold[L: SIMDLength, n: Int, //](mut acc: Array[SIMD[F32, L], n], saved: Ptr, i: Int, parts: Int):
    """Takes n sums of the i-th of `parts` parts (1, 2 or 4); after the last, acc is the sum of the node.

    `saved` has room for 2 n vectors: a part and a pair that wait for their neighbours. They wait in memory because the
    registers are full of the next part.
    """
    comptime w = Int(L)
    if i % 2 == 0:
        if i + 1 < parts:
            comptime for j in range(n):
                saved.unsafe_store(j * w, acc[j])
        return
    comptime for j in range(n):
        acc[j] = saved.unsafe_offset(j * w).unsafe_load[width=L]() + acc[j]
    if i == 3:
        comptime for j in range(n):
            acc[j] = saved.unsafe_offset((n + j) * w).unsafe_load[width=L]() + acc[j]
    elif parts == 4:
        comptime for j in range(n):
            saved.unsafe_store((n + j) * w, acc[j])
