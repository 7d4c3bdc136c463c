"""Weights written by rank 0, a barrier, and read by all ranks: the simple form of a checkpoint.

    mpirun -n 2 python examples/save_and_load.py net.safetensors
    python examples/save_and_load.py net.safetensors

safetensors holds arrays by name and nothing that could be executed. You can't resume a training
run from this file, because it has no optimizer, step and place in the data. For that, use
`ddp.save_checkpoint()` and `ddp.load_checkpoint()`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from odyssey import Tensor, data, nn, optim
from odyssey import distributed as dist
from odyssey import functional as F


def save_model(model: nn.Module, path: Path) -> None:
    """Writes the weights, whole or not at all: aside first, then under their name.

    Rank 0 writes, all ranks call.
    """
    if dist.get_rank() == 0:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        save_file(model.state_dict(), aside)
        os.replace(aside, path)
    dist.barrier()  # nobody reads before it is there


def load_model(path: Path) -> nn.Module:
    """A LeNet-5 with the weights of a file; every rank reads it."""
    model = nn.LeNet5()
    model.load_state_dict(load_file(path))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("path", type=Path, nargs="?", default=Path("net.safetensors"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="two steps")
    args = parser.parse_args()
    steps = 2 if args.quick else args.steps

    dist.init_process_group()
    nn.manual_seed(0)
    ddp = dist.DDP(nn.LeNet5(), average="samples")
    optimizer = optim.SGD(ddp.parameters(), lr=0.1)
    dataset = data.load("mnist", train=True)
    loader = data.DataLoader(dataset, 32, sampler=dist.DistributedSampler(dataset))
    for _, (x, y) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        F.cross_entropy(ddp(Tensor(x)), y).backward()
        optimizer.step()

    save_model(ddp.module, args.path)
    again = dist.DDP(load_model(args.path))
    x = Tensor(dataset.gather(np.arange(8))[0])
    assert np.array_equal(ddp.eval()(x).data, again.eval()(x).data)
    if dist.get_rank() == 0:
        print(
            f"{args.path}: {len(again.state_dict())} arrays, read by {dist.get_world_size()} "
            "ranks, the same outputs"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
