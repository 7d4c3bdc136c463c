"""Run under mpirun by test_comm.py: every method of the communicator against values that each
rank knows by itself.
"""

from __future__ import annotations

import numpy as np

from odyssey import comm
from odyssey.errors import ConfigError

world = comm.world()
rank, size = world.rank, world.size
everyone = np.arange(size)

assert world.name == "shm" and world is comm.world()  # all on one machine
assert size > 1 and 0 <= rank < size and world.local_size == size
world.barrier()

for root in range(size):
    a = np.arange(5, dtype=np.float32) + 10 * rank
    assert world.broadcast(a, root) is a
    assert np.array_equal(a, np.arange(5) + 10 * root)

for dtype in (np.float32, np.float64, np.int64):
    for op, wanted in (("sum", np.sum), ("max", np.max), ("min", np.min), ("prod", np.prod)):
        a = np.array([[rank + 1, -rank]], dtype)
        assert world.all_reduce(a, op, out=a) is a
        assert np.array_equal(a, [[wanted(everyone + 1), wanted(-everyone)]]), op
assert np.array_equal(world.all_reduce(np.full(3, rank)), np.full(3, everyone.sum()))
try:
    world.all_reduce(np.zeros(1), "median")
except ConfigError as error:
    assert "'median'" in str(error)
else:
    raise AssertionError("median is no operation")

gathered = world.all_gather(np.array([[rank, rank * rank]]))
assert np.array_equal(gathered, np.stack([everyone, everyone**2], 1)[:, None])
assert np.array_equal(
    world.all_gather(np.arange(6).reshape(2, 3).T + rank)[rank], np.arange(6).reshape(2, 3).T + rank
)

# rank r sends r + p + 1 numbers "100 r + p" to rank p, but nothing to itself
counts = [0 if p == rank else rank + p + 1 for p in range(size)]
send = np.concatenate([np.full(n, 100 * rank + p, np.float32) for p, n in enumerate(counts)])
receive = np.full(sum(counts), -1, np.float32)
world.all_to_all_v(send, counts, receive, counts)
wanted = [np.full(0 if p == rank else rank + p + 1, 100 * p + rank) for p in range(size)]
assert np.array_equal(receive, np.concatenate(wanted))

# pieces of different lengths, one of them empty
bounds = np.cumsum([0, *(3 * p for p in range(size))])
ranges = [(int(a), int(b)) for a, b in zip(bounds, bounds[1:], strict=False)]
a = np.full(bounds[-1], -1, np.float32)
a[slice(*ranges[rank])] = rank + 0.5
world.all_gather_v(a, ranges)
assert np.array_equal(a, np.repeat(everyone + 0.5, 3 * everyone))

local = comm.world("local")
assert (local.rank, local.size, local.name) == (0, 1, "local")
world.barrier()
print(f"rank {rank} of {size}: all as expected", flush=True)
