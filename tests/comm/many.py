"""Run under mpirun by test_call_checks.py: calls of many ranks, alike, different on one, and
many in flight.
"""

from __future__ import annotations

import sys

import numpy as np

from odyssey import comm
from odyssey.comm import gather_rounds
from odyssey.errors import CollectiveError

gather_rounds.DIRECT = 3  # so that few ranks gather in rounds, too
world = comm.world("mpi")
n, rank, odd = world.size, world.rank, world.size * 2 // 3


def refused(function) -> str:
    try:
        function()
    except CollectiveError as error:
        return str(error)
    raise AssertionError("calls that differ were not noticed")


requests = [world.all_reduce(np.full(3, float(rank + i)), wait=False) for i in range(4)]
again = world.all_to_all_v_init(
    np.full(n, rank, np.float32), [1] * n, into := np.zeros(n, np.float32), [1] * n
)
for _ in range(2):
    again.start().wait()
    assert into.tolist() == list(range(n))
for i, request in reversed(list(enumerate(requests))):
    assert (request.wait() == sum(range(n)) + i * n).all()
assert world.scatter(np.arange(2 * n).reshape(n, 2) if rank == 1 else None, 1).tolist() == [
    2 * rank,
    2 * rank + 1,
]
counts = [(rank + p) % 3 for p in range(n)]
received = np.zeros(sum(counts))
world.all_to_all_v(np.full(sum(counts), float(rank)), counts, received, counts)
assert received.tolist() == [float(p) for p, c in enumerate(counts) for _ in range(c)]

# An all-gather in rounds, again and again: ranges of any lengths, some of them empty, two calls
# under way at once.
aside = world.group(range(n))
lengths = [(5 * p) % 4 for p in range(n)]
ends = np.cumsum(lengths).tolist()
pieces = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
arrays = [np.zeros(ends[-1], np.float32) for _ in range(2)]
gathers = [world.all_gather_v_init(array, pieces) for array in arrays]
for turn in range(6):
    for k, array in enumerate(arrays):
        array[:] = -1
        array[slice(*pieces[rank])] = 100 * turn + 10 * k + rank
        gathers[k].start()
    if rank % 2:  # these wait elsewhere first, for ranks that wait for them to pass the data on
        assert aside.all_reduce(np.ones(1))[0] == n
    for k in (1, 0) if turn % 2 else (0, 1):
        gathers[k].wait()
        expected = np.concatenate(
            [np.full(c, 100 * turn + 10 * k + p) for p, c in enumerate(lengths)]
        )
        assert (arrays[k] == expected).all(), (turn, k, arrays[k], expected)
    if rank % 2 == 0:
        assert aside.all_reduce(np.ones(1))[0] == n

said = [refused(world.barrier if rank == odd else lambda: world.all_reduce(np.zeros(2)))]
more = [c + (rank == odd and p == 0) for p, c in enumerate(counts)]
said.append(refused(lambda: world.all_to_all_v(np.zeros(sum(more)), more, received, counts)))
piece = np.zeros(3) if rank == odd else None
said.append(refused(lambda: world.scatter(np.zeros((n, 2)) if rank == 0 else None, 0, piece)))
assert world.all_reduce(1 * np.ones(1))[0] == n  # the group goes on
if len(sys.argv) > 1:
    said.append(refused(lambda: (world.barrier if rank == odd else again.start().wait)()))
if rank in (0, odd, n - 1):
    for line in said:
        print(f"rank {rank}: {line}\n", end="", flush=True)
