"""Run by test_rendezvous.py: the ways in which processes of torch.distributed meet, without a
launcher of MPI.

    rendezvous.py meet|late RANKS FOLDER    started by torch.multiprocessing
    rendezvous.py launched FOLDER [RANK]    by torchrun; RANK ends at its first attempt, after a collective

Each rank trains PyTorch's tutorial model with DDP, and says how its group is connected.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from odyssey import comm
from odyssey.base.launcher import free_port


def train(rank: int, size: int, again: bool = False) -> None:
    """As PyTorch's "Getting Started with Distributed Data Parallel"; equal weights on all ranks
    after it.
    """
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
        optimizer.step()
    mine = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    rows = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(rows, mine)
    assert all(torch.equal(row, mine) for row in rows)
    ring = torch.full((3,), -1.0)
    work = dist.irecv(ring, (rank - 1) % size)
    dist.send(torch.full((3,), float(rank)), (rank + 1) % size)
    work.wait()
    assert ring.tolist() == [(rank - 1) % size] * 3
    # the same ranks, each apart from the others
    for group in [dist.new_group(list(range(size))) for _ in range(3)]:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == size
    part = dist.new_group([0, size - 1])
    total = torch.ones(1)
    if rank in (0, size - 1):
        dist.all_reduce(total, group=part)
        assert total.item() == 2
    world = comm.world()
    assert (world.rank, world.size) == (rank, size)  # what odyssey's own trainers take
    print(f"rank {rank} of {size} over {world.name}; {world.why}\n", end="", flush=True)


def meet(rank: int, size: int, folder: str, ports: list[int]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(ports[0])}
    ways = {
        "tutorial": lambda: {},
        "tcp": lambda: {"init_method": f"tcp://localhost:{ports[1]}"},
        "file": lambda: {"init_method": f"file://{folder}/meet"},
        "store": lambda: {"store": dist.TCPStore("localhost", ports[2], size, rank == 0)},
    }
    for way in ways.values():
        dist.init_process_group("odyssey", rank=rank, world_size=size, **way())
        train(rank, size)
        dist.destroy_process_group()


def late(rank: int, size: int, folder: str, ports: list[int]) -> None:
    """The last rank comes to the store, and not to the group."""
    store = dist.TCPStore("localhost", ports[0], size, rank == 0)
    if rank == size - 1:
        return
    begun, limit = time.monotonic(), datetime.timedelta(seconds=3)
    try:
        dist.init_process_group("odyssey", store=store, timeout=limit, rank=rank, world_size=size)
    except RuntimeError as e:
        print(f"after {time.monotonic() - begun:.1f} s: {e}\n", end="", flush=True)
    store.set(f"done {rank}", "")
    if rank == 0:
        store.wait([f"done {p}" for p in range(size - 1)])


def launched(folder: str, ends: int = -1) -> None:
    dist.init_process_group("odyssey")
    rank, size = dist.get_rank(), dist.get_world_size()
    train(rank, size)
    mark = Path(folder, f"attempt of {rank}")
    if not mark.exists() and ends >= 0:
        mark.touch()
        if rank == ends:
            os.kill(os.getpid(), 9)
        dist.barrier()
        raise AssertionError("a barrier without all ranks")
    print(f"ended in order {rank}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "launched":
        launched(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        ranks = int(sys.argv[2])
        work = {"meet": meet, "late": late}[sys.argv[1]]
        mp.spawn(work, args=(ranks, sys.argv[3], [free_port() for _ in range(3)]), nprocs=ranks)
