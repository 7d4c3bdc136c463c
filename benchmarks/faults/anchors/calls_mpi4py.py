"""Two ranks of mpi4py call a collective that does not match; what each gets is printed.

Plain mpi4py, no odyssey.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from mpi4py import MPI


def call(kind: str, rank: int) -> np.ndarray:
    """The collective of this rank: rank 1 differs in `kind`. Every number is 1 + rank."""
    comm, other = MPI.COMM_WORLD, rank == 1
    count = 1023 if kind == "count" and other else 1024
    mine = np.full(count, 1 + rank, np.int64 if kind == "dtype" and other else np.float64)
    if kind == "op" and other:
        comm.Bcast(mine, 0)
        return mine
    if kind == "root":
        comm.Bcast(mine, rank)
        return mine
    total = np.zeros_like(mine)
    comm.Allreduce(mine, total)
    return total


def main() -> None:
    rank = MPI.COMM_WORLD.Get_rank()
    MPI.COMM_WORLD.Barrier()
    sys.stdout.write(f"rank {rank} calls {time.monotonic():.4f}\n")
    sys.stdout.flush()
    try:
        got = call(sys.argv[1], rank)
    except MPI.Exception as problem:
        sys.stdout.write(f"rank {rank} raised {type(problem).__name__}: {problem}\n")
    else:
        sys.stdout.write(f"rank {rank} got {got[0]} {got[-1]}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
