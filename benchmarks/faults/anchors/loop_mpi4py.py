"""Ranks of plain mpi4py that add numbers again and again, until rank 1 raises, exits or is
stopped from outside.

What MPI alone does about a rank that fails. Rank 0 prints `step N 0... TIME` after each step.
`python -m mpi4py` before this file is mpi4py's own way to end all ranks when one raises.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
from mpi4py import MPI


def main() -> None:
    fault, comm = sys.argv[1], MPI.COMM_WORLD
    rank = comm.Get_rank()
    sys.stdout.write(f"rank {rank} pid {os.getpid()}\n")
    sys.stdout.flush()
    total, step = np.zeros(1024), 0
    while True:
        if rank == 1 and step == 7:
            if fault == "raises":
                raise RuntimeError("a defect of rank 1 at step 8")
            if fault == "exits":
                sys.exit(3)
        comm.Allreduce(np.ones(1024), total)
        step += 1
        if rank == 0:
            sys.stdout.write(f"step {step} {'0' * 16} {time.monotonic():.4f}\n")
            sys.stdout.flush()
        time.sleep(0.03)


if __name__ == "__main__":
    main()
