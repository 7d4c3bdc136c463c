"""Gradient accumulation: several passes for one step, reduced once, the same step as with one
batch of them all.

    python examples/accumulation.py
    mpirun -n 2 python examples/accumulation.py

Passes under no_sync() do not communicate; the last one of a step reduces their sum.
average="samples" divides by the samples of the step, so nothing has to be divided by the number of
passes, and the last step of an epoch, of fewer passes or samples, is right as well. What it is not:
`DistributedTrainer(accumulation_steps=4)`, which is one argument.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable

from odyssey import Tensor, data, nn, optim
from odyssey import distributed as dist
from odyssey import functional as F


def train_with_accumulation(
    model: dist.DDP, optimizer: optim.Optimizer, train_loader: Iterable, accumulation_steps: int = 4
) -> tuple[int, float]:
    """One epoch; returns (optimizer steps, mean loss over this rank's samples)."""
    steps, total, count = 0, 0.0, 0
    batches = model.join(train_loader)
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches, 1):
        # of the step; the epoch's last may have fewer passes
        last = i % accumulation_steps == 0 or i == len(batches)
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(Tensor(x)), y)
            loss.backward()
        if model.active:
            total, count = total + loss.item() * len(y), count + len(y)
        if last:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps, total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--accumulation-steps", type=int, default=4)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="samples of all ranks in one pass"
    )
    parser.add_argument("--samples", type=int, default=6400)
    parser.add_argument("--quick", action="store_true", help="640 samples")
    args = parser.parse_args()
    samples = 640 if args.quick else args.samples

    dist.init_process_group()
    rank, n = dist.get_rank(), dist.get_world_size()
    if args.batch_size % n:
        parser.error(f"--batch-size {args.batch_size} is not a multiple of {n} ranks")
    train_set = data.load("mnist", train=True).take(samples)
    sampler = dist.DistributedSampler(train_set, shuffle=False)
    loader = list(data.DataLoader(train_set, args.batch_size // n, sampler=sampler))
    nn.manual_seed(0)
    model = dist.DDP(nn.LeNet5(), average="samples")
    optimizer = optim.Adam(model.parameters(), lr=0.003)
    steps, loss = train_with_accumulation(model, optimizer, loader, args.accumulation_steps)
    assert model.reductions == steps  # one per step, not one per pass
    loss = dist.metric_average(loss, "loss", weight=len(sampler))
    if rank == 0:
        passes = -(-samples // args.batch_size)
        print(
            f"{passes} passes, {steps} steps, {model.reductions} reductions: loss {loss:.4f} on "
            f"{n} ranks"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
