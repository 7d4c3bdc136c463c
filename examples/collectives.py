"""The collectives, one after the other, with what they give: all_reduce, all_gather, broadcast
and the others.

    mpirun -n 4 python examples/collectives.py
    python examples/collectives.py                  # a world of one

What it is not: a measurement; `--profile` prints one, of `profile_communication`.
"""

from __future__ import annotations

import argparse

import numpy as np

from odyssey import Tensor
from odyssey import distributed as dist


def allreduce_example() -> Tensor:
    """The sum over ranks, in place."""
    tensor = Tensor(np.arange(3) + dist.get_rank())
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def allgather_example() -> list[Tensor]:
    """The tensors of all ranks, in their order."""
    gathered = [Tensor(np.zeros(1)) for _ in range(dist.get_world_size())]
    # without the list it returns a new one
    dist.all_gather(gathered, Tensor([float(dist.get_rank())]))
    return gathered


def broadcast_example() -> Tensor:
    """Rank 0's tensor on all ranks, in place."""
    tensor = Tensor([3.0, 1.0, 4.0]) if dist.get_rank() == 0 else Tensor(np.zeros(3))
    dist.broadcast(tensor, src=0)
    return tensor


def groups_example() -> float:
    """The sum over the even, or the odd, ranks. All ranks make both groups and use their own."""
    n = dist.get_world_size()
    even = dist.ProcessGroup(range(0, n, 2))
    odd = dist.ProcessGroup(range(1, n, 2)) if n > 1 else even
    return dist.all_reduce_sum_group(dist.get_rank(), even if even.is_member else odd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--profile", action="store_true", help="measure all_reduce at four sizes as well"
    )
    parser.add_argument("--quick", action="store_true", help="with --profile: two small sizes")
    args = parser.parse_args()
    dist.init_process_group()
    rank, n = dist.get_rank(), dist.get_world_size()

    lines = {
        "all_reduce": allreduce_example().tolist(),
        "all_gather": [t.item() for t in allgather_example()],
        "broadcast": broadcast_example().tolist(),
        "reduce_scatter": dist.reduce_scatter(np.arange(2.0 * n)).tolist(),
        "scatter": dist.scatter(
            [np.full(2, 10.0 * r) for r in range(n)] if rank == 0 else None
        ).tolist(),
        "all_to_all": dist.all_to_all(np.arange(n) + 10 * rank).tolist(),
        "sum of my group": groups_example(),
    }
    gathered = dist.gather(np.array([rank, rank**2]), dst=0)
    # goes on while this rank does something else
    work = dist.all_reduce(np.ones(1000), async_op=True)
    lines["maximum of all ranks"] = dist.all_reduce(rank, "max")
    assert work.wait()[0] == n
    if rank == 0:
        print(f"rank 0 of {n}, {dist.get_backend()}:")
        for name, value in lines.items():
            print(f"  {name}: {value}")
        print(f"  gather: {[a.tolist() for a in gathered]}")
    if args.profile:
        dist.profile_communication(*([(1000, 10000)] if args.quick else []))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
