"""Time of a step of a PyTorch module: odyssey.torch.DistributedTrainer against DDP over Gloo, in
turns in one run.

    mpirun -n 2 python benchmarks/torch_step.py [--batch 128] [--shards 1 2 4] [--steps 30]
    [--rounds 8]

First whole loops, loaders and all, of an MLP of 64-64-64-10 and of LeNet-5, 64 samples a rank,
everything at its defaults: odyssey.torch's loop and trainer, then DDP with PyTorch's loader over
our backend and over Gloo. "cpu" is the processor time of a rank. Then single steps: equal global
batch, one thread per rank. "1 shard" is one per rank, as DDP computes it; "own engine" is LeNet-5
of odyssey.nn, by our own kernels. Printed is the median of odyssey's time divided by DDP's, over
rounds; then how far the two engines are apart after SGD steps from the same weights.
"""

import argparse
import socket
import statistics
import time
from collections.abc import Callable

import common
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import odyssey
from odyssey import comm, data, optim
from odyssey.torch import (
    DataLoader,
    DistributedDataParallel,
    DistributedTrainer,
    load_torch,
    to_torch,
)

# of our LeNet5 in lenet()
NAMES = {"conv1": "0", "conv2": "3", "fc1": "7", "fc2": "9", "fc3": "11"}


def lenet() -> nn.Module:
    torch.manual_seed(0)
    first = [
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(
        *first,
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def loops(
    name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], steps: int, rounds: int
) -> None:
    """Epochs of a table of samples, each form in turn; prints the medians of a step on rank 0."""
    world, loss = comm.world(), nn.CrossEntropyLoss()
    g = torch.Generator().manual_seed(0)
    n = 64 * world.size * steps
    table = torch.utils.data.TensorDataset(
        torch.randn(n, *shape, generator=g), torch.arange(n) % 10
    )

    def own() -> Callable[[], None]:
        module = make()
        net, optimizer = (
            DistributedDataParallel(module),
            torch.optim.SGD(module.parameters(), lr=0.01),
        )
        loader = DataLoader(table, 64 * world.size, shuffle=True)

        def epoch() -> None:
            for batch in loader:
                for x, y in net.shards(batch):
                    loss(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

        return epoch

    def trainer() -> Callable[[], None]:
        module = make()
        made = DistributedTrainer(
            module, torch.optim.SGD(module.parameters(), lr=0.01), check_every=0
        )
        loader = DataLoader(table, 64 * world.size, shuffle=True)

        def epoch() -> None:
            for batch in loader:
                made.train_step(batch)

        return epoch

    def theirs(backend: str) -> Callable[[], None]:
        module = make()
        net = nn.parallel.DistributedDataParallel(
            module, process_group=dist.new_group(backend=backend)
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        sampler = torch.utils.data.DistributedSampler(table, world.size, world.rank)
        loader = torch.utils.data.DataLoader(table, 64, sampler=sampler)

        def epoch() -> None:
            for x, y in loader:
                loss(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

        return epoch

    runs = {"odyssey.torch's loop": own(), "DistributedTrainer": trainer()}
    runs |= {"DDP over odyssey": theirs("odyssey"), "DDP over Gloo": theirs("gloo")}
    times: dict[str, list[tuple[float, float]]] = {form: [] for form in runs}
    for _ in range(rounds + 1):
        for form, epoch in runs.items():
            world.barrier()
            begun = time.perf_counter(), time.process_time()
            epoch()
            ended = time.perf_counter(), time.process_time()
            times[form].append(((ended[0] - begun[0]) / steps, (ended[1] - begun[1]) / steps))
    for form, found in times.items():
        wall, cpu = (statistics.median(t) * 1e3 for t in zip(*found[1:], strict=True))
        if world.rank == 0:
            print(f"{name} {form:20s} {wall:8.2f} ms   cpu {cpu:.2f} ms", flush=True)


def engines_apart(whole: data.Batch, steps: int) -> str:
    """The same SGD steps on both engines: their losses, and the largest difference of weights."""
    module, model, again = lenet(), odyssey.nn.LeNet5(), lenet()
    load_torch(model, module, NAMES)
    both = (
        DistributedTrainer(module, torch.optim.SGD(module.parameters(), lr=0.05), check_every=0),
        odyssey.DistributedTrainer(model, optim.SGD(lr=0.05), check_every=0),
    )
    losses = [
        [trainer.train_step(whole)[0] for _ in range(steps)][-1] / len(whole.indices)
        for trainer in both
    ]
    to_torch(model, again, NAMES)
    pairs = [
        (a.detach(), b.detach())
        for a, b in zip(module.parameters(), again.parameters(), strict=True)
    ]
    far = max(float((a - b).abs().max()) for a, b in pairs)
    same = sum(int((a == b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)
    return (
        f"after {steps} steps: loss {losses[0]:.7f} (torch), {losses[1]:.7f} (ours); weights "
        f"differ by up to {far:.1e}, {100 * same:.1f} % have the same bits"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("--batch", 128), ("--steps", 30), ("--rounds", 8)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    common.print_machine()
    world, n = comm.world(), options.batch
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(world.broadcast(np.array([s.getsockname()[1]], np.int64))[0])
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.size
    )
    torch.set_num_threads(1)
    loops("MLP    ", mlp, (64,), options.steps, options.rounds)
    loops("LeNet-5", lenet, (1, 28, 28), options.steps, options.rounds)
    g = np.random.default_rng(0)
    x, y = g.standard_normal((n, 1, 28, 28), np.float32), g.integers(0, 10, n)
    whole = next(iter(data.DataLoader(data.arrays(x, y), batch_size=n)))
    module = lenet()
    theirs, optimizer = (
        nn.parallel.DistributedDataParallel(module),
        torch.optim.AdamW(module.parameters()),
    )
    own = slice(n * world.rank // world.size, n * (world.rank + 1) // world.size)
    mine, targets = torch.from_numpy(x[own]), torch.from_numpy(y[own])

    def ddp() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(mine), targets).backward()
        optimizer.step()

    runs = {"DDP over Gloo": ddp}
    for k in options.shards:
        m = lenet()
        trainer = DistributedTrainer(
            m,
            torch.optim.AdamW(m.parameters()),
            shard_size=-(-n // (k * world.size)),
            check_every=0,
        )
        runs[f"{k} shard{'s' * (k > 1)} a rank"] = lambda t=trainer: t.train_step(whole)
    engine = odyssey.DistributedTrainer(odyssey.nn.LeNet5(), optim.AdamW(), check_every=0)
    runs["own engine"] = lambda: engine.train_step(whole)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds + 1):
        for name, run in runs.items():
            world.barrier()
            begun = time.perf_counter()
            for _ in range(options.steps):
                run()
            times[name].append((time.perf_counter() - begun) / options.steps)
    if world.rank == 0:
        base = times["DDP over Gloo"][1:]
        for name, found in times.items():
            ratio = statistics.median(a / b for a, b in zip(found[1:], base, strict=True))
            print(f"{name:16s} {statistics.median(found[1:]) * 1e3:8.2f} ms   {ratio:.2f}")
    apart = engines_apart(whole, options.steps)
    if world.rank == 0:
        print(apart)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
