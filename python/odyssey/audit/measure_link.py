"""The link between two ranks, measured: mpirun -n 2 python -m odyssey.audit.measure_link FILE
(planner.py).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from .. import comm
from ..base.outputs import write_json

FLOATS = 1 << 20


def main(file: str) -> None:
    """Writes seconds of a call, bytes per second, and whether the two ranks share a machine."""
    world = comm.world()

    def fastest(floats: int, times: int) -> float:
        array = np.zeros(2 * floats, np.float32)
        ranges = [(0, floats), (floats, 2 * floats)]
        best = float("inf")
        for _ in range(times):
            world.barrier()
            start = time.perf_counter()
            world.all_gather_v(array, ranges)
            best = min(best, time.perf_counter() - start)
        return float(world.all_reduce(np.array([best]), "max")[0])

    latency = fastest(1, 200)
    large = fastest(FLOATS, 20)
    if world.rank == 0:
        link = {
            "latency": latency,
            "bandwidth": 4 * FLOATS / max(large - latency, 1e-9),
            "near": world.local_size > 1,
        }
        write_json(Path(file), "plan", link)


if __name__ == "__main__":
    main(sys.argv[1])
