"""Run under mpirun by test_shm.py: what the shared-memory backend does beyond the contract.

Argument: the case.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import clock
import numpy as np

from odyssey import comm
from odyssey.comm import shm
from odyssey.comm.calls import ReduceOp, tree_reduce
from odyssey.core import native
from odyssey.errors import CollectiveError, ConfigError

COUNTS = (
    1,
    15,
    16,
    17,
    1000,
    shm.DIRECT // 4,
    shm.DIRECT // 4 + 1,
    61_706,
    shm.SLOT // 4,
    3 * shm.SLOT // 4 + 1_001,
)


def values(count: int, rank: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng([rank, count]).standard_normal(count).astype(dtype)


def bits(world: comm.Communicator) -> None:
    """Sums are those of the fixed tree, to the last bit, whichever way they are made."""
    for count in COUNTS:
        x = values(count, world.rank)
        wanted = tree_reduce([values(count, p) for p in range(world.size)], ReduceOp.SUM)
        y = np.empty_like(x)
        z = x.copy()
        for result in (
            world.all_reduce(x),
            world.all_reduce(x, out=y),
            world.all_reduce(z, out=z),
            world.all_reduce(x, wait=False).wait(),
        ):
            assert result.tobytes() == wanted.tobytes(), count
        room = np.zeros(count + 5, np.float32)  # the result may overlap what is given
        room[:count] = x
        assert (
            world.all_reduce(room[:count], out=room[3 : count + 3]).tobytes() == wanted.tobytes()
        ), count
        root = world.reduce(x, root=world.size - 1)
        assert root is None if world.rank < world.size - 1 else root.tobytes() == wanted.tobytes()
        rows = np.stack([values(count, world.rank + 10 * p) for p in range(world.size)])
        mine = tree_reduce(
            [values(count, p + 10 * world.rank) for p in range(world.size)], ReduceOp.SUM
        )
        assert world.reduce_scatter(rows)[0].tobytes() == mine.tobytes(), count
    for dtype in ("float64", "int16"):
        x = values(300_000, world.rank, dtype)
        wanted = tree_reduce([values(300_000, p, dtype) for p in range(world.size)], ReduceOp.SUM)
        assert world.all_reduce(x).tobytes() == wanted.tobytes()
    for op in ("max", "min"):
        x = np.full(20, world.rank, np.float32)
        x[3] = np.nan if world.rank == 0 else 1
        x[17] = np.nan if world.rank == world.size - 1 else 1
        assert np.isnan(world.all_reduce(x, op)).nonzero()[0].tolist() == [3, 17]


def long(world: comm.Communicator) -> None:
    """Messages longer than a slot, and of lengths that differ between ranks."""
    count = shm.SLOT + 12_345
    x = (np.arange(count) + world.rank) % 251
    x = x.astype(np.uint8)
    everyone = [((np.arange(count) + p) % 251).astype(np.uint8) for p in range(world.size)]
    assert np.array_equal(world.all_gather(x), everyone)
    assert np.array_equal(world.broadcast(x.copy(), world.size - 1), everyone[-1])
    gathered = world.gather(x, 0)
    assert gathered is None if world.rank else np.array_equal(gathered, everyone)
    assert np.array_equal(world.scatter(gathered, 0), x)
    rows = np.stack([np.roll(x, p) for p in range(world.size)])
    assert np.array_equal(world.all_to_all(rows), [np.roll(e, world.rank) for e in everyone])
    counts = [count // (1 + world.rank + p) for p in range(world.size)]
    received = np.zeros(sum(counts), np.uint8)
    world.all_to_all_v(np.concatenate([x[:n] for n in counts]), counts, received, counts)
    assert np.array_equal(
        received, np.concatenate([e[:n] for e, n in zip(everyone, counts, strict=True)])
    )
    ends = np.cumsum([0, *(count // (1 + p) for p in range(world.size))])
    ranges = list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
    whole = np.zeros(ends[-1], np.uint8)
    lo, hi = ranges[world.rank]
    whole[lo:hi] = x[: hi - lo]
    world.all_gather_v(whole, ranges)
    assert np.array_equal(
        whole, np.concatenate([e[: b - a] for e, (a, b) in zip(everyone, ranges, strict=True)])
    )


def memory(world: comm.Communicator) -> None:
    """Shared arrays are seen by all, and two of them do not overlap."""
    first, second = world.shared(1000), world.shared(64)
    assert [a.shape for a in first] == [(1000,)] * world.size
    assert all(a.ctypes.data % 64 == 0 for a in first + second)
    first[world.rank][:] = world.rank + 1
    second[world.rank][:] = 100 + world.rank
    world.barrier()
    for p in range(world.size):
        assert (first[p] == p + 1).all() and (second[p] == 100 + p).all()
    floats = first[0][:400].view(np.float32)  # and a sum may be taken of them where they are
    world.barrier()
    if world.rank == 0:
        floats[:] = 2
    world.barrier()
    assert (world.all_reduce(floats) == 2 * world.size).all()
    try:
        world.shared(10 + world.rank)
    except CollectiveError as error:
        assert "shared 10 bytes" in str(error) and "shared 11 bytes" in str(error)
    else:
        raise AssertionError("different sizes are accepted")
    try:
        world.shared(1 << 50)
    except ConfigError as error:
        assert "MiB of shared memory" in str(error) and "backend 'mpi'" in str(error)
    else:
        raise AssertionError("more than there is")
    part = world.split(world.rank % 2)
    if part.size > 1:
        assert len(part.shared(8)) == part.size
        part.close()
    world.barrier()


def window(world: comm.Communicator) -> None:
    """Shared memory where files without a name do not work on one of the ranks."""
    if world.rank == 0:
        del os.memfd_create
    before = len(world._windows)
    memory(world)
    assert len(world._windows) == before + 2


def short_and_long_way(world: comm.Communicator) -> None:
    """One rank waits at once, the other starts and waits later: the same call.

    And a wait longer than a slice.
    """
    x = np.ones(100, np.float32)
    for _ in range(20):
        result = world.all_reduce(x) if world.rank else world.all_reduce(x, wait=False).wait()
        assert (result == world.size).all()
    for floats in (100, 300_000):
        if world.rank == 0:
            time.sleep(3 * shm.SLICE_NS / 1e9)
        assert (world.all_reduce(np.ones(floats, np.float32)) == world.size).all()
    part = world.split(0)
    one = world.all_reduce(x, wait=False)
    assert (part.all_reduce(x) == world.size).all()  # while a call of another group is under way
    assert (one.wait() == world.size).all()
    try:
        world.all_reduce(np.ones(5 if world.rank else 6, np.float32))
    except CollectiveError as error:
        assert str(error).count("shm_ranks.py:") == 2
    else:
        raise AssertionError("another shape")
    assert (world.all_reduce(x) == world.size).all()


def ring(world: comm.Communicator) -> None:
    """A message that is larger than what MPI keeps for later, sent by all before anybody waits
    for theirs.
    """
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    received = world.recv(np.empty(300_000), before, wait=False)
    world.send(np.full(300_000, float(world.rank)), after)
    assert (received.wait() == before).all()
    sent = world.send(np.full(300_000, 1.0), after, wait=False)
    summed = world.all_reduce(np.ones(4), wait=False)
    assert (world.recv(np.empty(300_000), before) == 1).all()
    sent.wait()
    assert (summed.wait() == world.size).all()


def missing(world: comm.Communicator) -> None:
    """The last rank does not come: the others say so."""
    if world.rank == world.size - 1:
        clock.wait_for(range(world.size - 1))
        sys.stdout.flush()
        os._exit(0)
    os.environ["ODYSSEY_TIMEOUT"] = "1"  # only now: a busy machine starts the ranks seconds apart
    watch = clock.Stopwatch()
    try:
        world.all_reduce(np.ones(100, np.float32))
    except CollectiveError as error:
        print(f"after {watch}: {error}", flush=True)
    try:
        world.barrier()
    except CollectiveError as error:
        print(f"again: {error}", flush=True)
    clock.done(world.rank)
    time.sleep(20)  # ended with the last one


def ended(world: comm.Communicator) -> None:
    """The process of the last rank is gone, as its number tells."""
    if world.rank == world.size - 1:
        clock.wait_for(range(world.size - 1))
        os._exit(0)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    world._processes[-1, 0] = gone.pid
    watch = clock.Stopwatch()
    try:
        world.barrier()
    except CollectiveError as error:
        print(f"after {watch}: {error}", flush=True)
    clock.done(world.rank)
    time.sleep(20)  # ended with the last one


def killed(world: comm.Communicator) -> None:
    """A rank is killed while the others wait for it."""
    world.all_reduce(np.ones(300_000, np.float32))
    world.shared(1 << 20)[world.rank][:] = 1
    world.split(0).shared(100)
    with open("/proc/self/maps") as maps:
        shared = {
            line.split(maxsplit=5)[5].strip()
            for line in maps
            if "/dev/shm/" in line or "/memfd:odyssey" in line
        }
    text = "".join(f"named {name}\n" for name in shared if not name.endswith("(deleted)"))
    sys.stdout.write(f"maps {len(shared)}\n{text}")
    sys.stdout.flush()
    world.barrier()
    if world.rank == world.size - 1:
        os.kill(os.getpid(), 9)
    world.barrier()


def slow_way(world: comm.Communicator) -> None:
    """The same bits where NumPy's objects are not as expected."""
    native.DATA = 0
    bits(world)


if __name__ == "__main__":
    name = sys.argv[1]
    found = comm.world("shm")
    assert found.name == "shm"
    globals()[name](found)
    print(f"rank {found.rank}: {name} as expected", flush=True)
