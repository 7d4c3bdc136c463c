"""A ring all-reduce written by hand over isend and irecv, checked against the library's and
timed beside it.

    mpirun -n 4 python examples/custom_ring_allreduce.py

Each of the n ranks sends 2 (n - 1) / n times its data, whatever n is (Patarasuk and Yuan 2009,
"Bandwidth optimal all-reduce algorithms for clusters of workstations"). What it is not: what
odyssey trains with. A ring adds in an order that depends on the number of ranks, so its bits do
too; the tree's do not.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from odyssey import distributed as dist


def ring_allreduce(array: np.ndarray) -> np.ndarray:
    """The sum of the arrays of all ranks, as a new array.

    Any size: the pieces differ by at most one element.

    Step by step everybody sends a piece to the next rank and receives one from the previous rank;
    both are under way at the same time, so nobody waits for a neighbour that waits as well.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    out = array.copy()
    if n == 1:
        return out
    flat = out.reshape(-1)
    cuts = [flat.size * i // n for i in range(n + 1)]
    pieces = [flat[cuts[i] : cuts[i + 1]] for i in range(n)]
    after, before = (rank + 1) % n, (rank - 1) % n

    for step in range(n - 1):  # reduce-scatter: a piece grows while it goes around
        give, take = pieces[(rank - step) % n], pieces[(rank - step - 1) % n]
        sent = dist.isend(give, after)
        take += dist.recv(np.empty_like(take), before)
        sent.wait()
    for step in range(n - 1):  # all-gather: the finished pieces go around
        give, take = pieces[(rank + 1 - step) % n], pieces[(rank - step) % n]
        sent = dist.isend(give, after)
        dist.recv(take, before)
        sent.wait()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--floats", type=int, default=1_000_003)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="1003 floats, two repeats")
    args = parser.parse_args()
    floats, repeats = (1003, 2) if args.quick else (args.floats, args.repeats)
    dist.init_process_group()
    mine = np.random.default_rng(dist.get_rank()).normal(size=floats).astype(np.float32)

    difference = np.abs(ring_allreduce(mine) - dist.all_reduce(mine.copy())).max()
    times = {}
    for name, function in (("ring", ring_allreduce), ("all_reduce", dist.all_reduce)):
        seconds = []
        for _ in range(repeats + 1):
            dist.barrier()
            start = time.perf_counter()
            function(mine)  # all_reduce overwrites it, the next time with larger numbers
            seconds.append(dist.all_reduce(time.perf_counter() - start, "max"))  # the slowest rank
        times[name] = np.median(seconds[1:])
    assert difference < 1e-4, difference
    if dist.get_rank() == 0:
        print(
            f"{floats:,} floats on {dist.get_world_size()} ranks: largest difference "
            f"{difference:.1e}"
        )
        for name, seconds in times.items():
            print(f"  {name}: {1e6 * seconds:.0f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
