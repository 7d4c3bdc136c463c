"""Sums and maxima over the threads that share a lane: what softmax and losses put together, in a fixed order.

Thread t of a block has lane t % L, part t // L % K of its classes, and group t // (L K) of the block. Each function has
shared memory of its own and one barrier. Two of them that take turns may stand in a loop: before a thread writes again,
all have passed the barrier of the other.
"""

from std.memory import unsafe_stack_allocation

from max.gpu import AddressSpace, barrier, thread_idx

from ..lanes import LANES

comptime MOST_THREADS = 512  # of a block


@always_inline
def first_part[K: Int]() -> Int:
    """The thread that has part 0 of this thread's lane."""
    var t = thread_idx.x
    return t // (LANES * K) * (LANES * K) + t % LANES


@always_inline
def _tree[K: Int](mut v: Array[Float32, K]) -> Float32:
    comptime half = K // 2
    comptime for i in range(half):
        v[i] += v[i + half]
    comptime if half > 1:
        var rest = Array[Float32, half](fill=0)
        comptime for i in range(half):
            rest[i] = v[i]
        return _tree[half](rest)
    else:
        return v[0]


@always_inline
def sum_parts[K: Int](value: Float32) -> Float32:
    """The sum over the parts of a lane, in all its threads."""
    var shared = unsafe_stack_allocation[MOST_THREADS, Float32, address_space=AddressSpace.SHARED]()
    shared[unsafe_offset=thread_idx.x] = value
    barrier()
    var v = Array[Float32, K](fill=0)
    comptime for k in range(K):
        v[k] = shared[unsafe_offset=first_part[K]() + k * LANES]
    return _tree[K](v)


@always_inline
def best_part[K: Int](value: Float32, place: Int32) -> Tuple[Float32, Int32]:
    """The largest value over the parts of a lane and its place, the smallest of equals."""
    var values = unsafe_stack_allocation[MOST_THREADS, Float32, address_space=AddressSpace.SHARED]()
    var places = unsafe_stack_allocation[MOST_THREADS, Int32, address_space=AddressSpace.SHARED]()
    values[unsafe_offset=thread_idx.x] = value
    places[unsafe_offset=thread_idx.x] = place
    barrier()
    var best = values[unsafe_offset=first_part[K]()]
    var at = places[unsafe_offset=first_part[K]()]
    comptime for k in range(1, K):
        var v = values[unsafe_offset=first_part[K]() + k * LANES]
        var p = places[unsafe_offset=first_part[K]() + k * LANES]
        if v > best or (v == best and p < at):
            best = v
            at = p
    return (best, at)
