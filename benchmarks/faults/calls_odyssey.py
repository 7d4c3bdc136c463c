"""Two ranks of odyssey.comm call a collective that does not match; what each gets is printed."""

from __future__ import annotations

import sys
import time

import numpy as np

from odyssey import comm
from odyssey.errors import OdysseyError


def call(kind: str, world: comm.Communicator) -> np.ndarray:
    """The collective of this rank: rank 1 differs in `kind`. Every number is 1 + rank."""
    other = world.rank == 1
    count = 1023 if kind == "count" and other else 1024
    mine = np.full(count, 1 + world.rank, np.int64 if kind == "dtype" and other else np.float64)
    if kind == "op" and other:
        return world.broadcast(mine, 0)
    if kind == "root":
        return world.broadcast(mine, world.rank)
    return world.all_reduce(mine)


def main() -> None:
    world = comm.world()
    world.barrier()
    sys.stdout.write(f"rank {world.rank} calls {time.monotonic():.4f}\n")
    sys.stdout.flush()
    try:
        got = call(sys.argv[1], world)
    except OdysseyError as problem:
        sys.stdout.write(f"rank {world.rank} raised {type(problem).__name__}: {problem}\n")
    else:
        sys.stdout.write(f"rank {world.rank} got {got[0]} {got[-1]}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
