"""Backend "odyssey" of torch.distributed beside Gloo: all-reduces and steps of DDP and FSDP2, in
turns in one run.

    mpirun -n 2 python benchmarks/c10d.py [--rounds 7]
    python benchmarks/c10d.py --rate 1e9   # each rank on a host of its own, with wires of so many
                                           # bits a second

One thread per rank. A ratio is the median of the rounds' ratios: the two are timed one after the
other, so that what else the machine does meets both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import common
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import odyssey.torch  # noqa: F401  registers the backend


def lenet() -> torch.nn.Module:
    """LeNet-5: 61,706 parameters."""
    torch.manual_seed(0)
    nn = torch.nn
    features = [
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
    ]
    classes = [
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    ]
    return nn.Sequential(*features, *classes, nn.Linear(84, 10))


def mlp() -> torch.nn.Module:
    """Six layers, five of 832 x 832: 3.5 million parameters, 64 samples a rank."""
    torch.manual_seed(0)
    layers = [part for _ in range(5) for part in (torch.nn.Linear(832, 832), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(832, 10))


def transformer() -> torch.nn.Module:
    """Four encoder layers of width 256: 3.2 million parameters, of 4 x 64 tokens a rank."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True
    )
    return torch.nn.Sequential(
        torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.nn.Linear(256, 10)
    )


def compare(name: str, runs: dict[str, Callable[[], None]], calls: int, rounds: int) -> None:
    """Times both in turns and prints the medians, also of the processor time of rank 0."""
    taken: dict[str, list[tuple[float, float]]] = {backend: [] for backend in runs}
    for k in range(rounds + 1):
        for backend, run in runs.items():
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(calls):
                run()
            if k:  # the first warms up
                spent = time.perf_counter() - start, time.process_time() - busy
                taken[backend].append((spent[0] / calls * 1e6, spent[1] / calls * 1e6))
    ratios = [
        statistics.median(a[i] / b[i] for a, b in zip(*taken.values(), strict=True)) for i in (0, 1)
    ]
    if dist.get_rank() == 0:
        medians = {
            b: [statistics.median(column) for column in zip(*values, strict=True)]
            for b, values in taken.items()
        }
        said = [
            f"{backend} {wall:9.1f} us (cpu {cpu:9.1f})" for backend, (wall, cpu) in medians.items()
        ]
        print(
            f"{name:28s} {'   '.join(said)}   ratio {ratios[0]:.3f} (cpu {ratios[1]:.3f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns that count")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="measure what has this in its name"
    )
    parser.add_argument(
        "--rate", type=float, help="bits per second of wires between two hosts made here (root)"
    )
    parser.add_argument("--round-trip", type=float, default=2e-4, help="seconds, with --rate")
    arguments = parser.parse_args()
    if "RANK" not in os.environ and arguments.rate:
        command = [
            sys.executable,
            __file__,
            "--rounds",
            str(arguments.rounds),
            "--only",
            arguments.only,
        ]
        print(common.on_hosts(2, command, arguments.rate, arguments.round_trip))
        return
    if "RANK" not in os.environ:
        parser.error("it compares ranks; start it as `mpirun -n 2 python benchmarks/c10d.py`")
    common.print_machine()
    torch.set_num_threads(1)
    dist.init_process_group("odyssey")
    gloo = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    groups = {"odyssey": None, "gloo": gloo}
    for floats, calls in ((1, 300), (1024, 300), (61_706, 60), (1_000_000, 12)):
        name, t = f"all_reduce of {floats:,} floats", torch.zeros(floats)
        if arguments.only not in name:
            continue
        runs = {
            backend: lambda t=t, group=group: dist.all_reduce(t, group=group)
            for backend, group in groups.items()
        }
        compare(name, runs, calls, arguments.rounds)

    def stepper(
        model: torch.nn.Module, x: torch.Tensor, group: dist.ProcessGroup, sharded: bool
    ) -> Callable[[], None]:
        if sharded:
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in (
                model[0].layers if isinstance(model[0], torch.nn.TransformerEncoder) else model
            ):
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            model = DistributedDataParallel(model, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            out = model(x).flatten(0, -2)
            torch.nn.functional.cross_entropy(out, torch.arange(len(out)) % 10).backward()
            optimizer.step()

        return step

    cases = (
        ("LeNet-5", lenet, (64, 1, 28, 28), 20),
        ("MLP", mlp, (64, 832), 6),
        ("transformer", transformer, (4, 64, 256), 4),
    )
    for way in ("DDP", "FSDP2"):
        for name, make, shape, calls in cases:
            if arguments.only not in f"{way} step, {name}":
                continue
            x = torch.randn(shape)
            runs = {
                b: stepper(make(), x, g or dist.group.WORLD, way == "FSDP2")
                for b, g in groups.items()
            }
            compare(f"{way} step, {name}", runs, calls, arguments.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
