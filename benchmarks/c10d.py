"""Backend "odyssey" of torch.distributed beside Gloo: all-reduces and steps of DDP, in turns in one run.

    mpirun -n 2 python benchmarks/c10d.py [--rounds 7]

One thread per rank. A ratio is the median of the rounds' ratios: the two are timed one after the other, so that what
else the machine does meets both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import odyssey.torch  # noqa: F401  registers the backend


def lenet() -> torch.nn.Module:
    """LeNet-5: 61,706 parameters."""
    torch.manual_seed(0)
    nn = torch.nn
    features = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()]
    classes = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
    return nn.Sequential(*features, *classes, nn.Linear(84, 10))


def compare(name: str, runs: dict[str, Callable[[], None]], calls: int, rounds: int) -> None:
    """Times both in turns and prints the medians."""
    taken: dict[str, list[float]] = {backend: [] for backend in runs}
    for k in range(rounds + 1):
        for backend, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            if k:  # the first warms up
                taken[backend].append((time.perf_counter() - start) / calls * 1e6)
    ratio = statistics.median(a / b for a, b in zip(taken["odyssey"], taken["gloo"], strict=True))
    if dist.get_rank() == 0:
        us = {backend: statistics.median(values) for backend, values in taken.items()}
        print(f"{name:28s} odyssey {us['odyssey']:9.1f} us   gloo {us['gloo']:9.1f} us   ratio {ratio:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns that count")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("it compares ranks; start it as `mpirun -n 2 python benchmarks/c10d.py`")
    torch.set_num_threads(1)
    dist.init_process_group("odyssey")
    gloo = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    groups = {"odyssey": None, "gloo": gloo}
    for floats, calls in ((1, 300), (1024, 300), (61_706, 60), (1_000_000, 12)):
        t = torch.zeros(floats)
        runs = {backend: lambda t=t, group=group: dist.all_reduce(t, group=group) for backend, group in groups.items()}
        compare(f"all_reduce of {floats:,} floats", runs, calls, arguments.rounds)
    x, y = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))

    def stepper(group: dist.ProcessGroup | None) -> Callable[[], None]:
        model = DistributedDataParallel(lenet(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        return step

    compare("DDP step, LeNet-5, 64 each", {b: stepper(g) for b, g in groups.items()}, 20, arguments.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
