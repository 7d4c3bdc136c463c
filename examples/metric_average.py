"""Metrics over all ranks: each evaluates its own samples, the mean weights them, rank 0 prints.

    mpirun -n 3 python examples/metric_average.py
    python examples/metric_average.py

The figures do not depend on the number of ranks, although the ranks have different numbers of
samples. What it is not: needed with a DistributedTrainer, whose evaluate() counts over all ranks.
"""

from __future__ import annotations

import argparse

import numpy as np

from odyssey import Tensor, data, nn, no_grad
from odyssey import distributed as dist
from odyssey import functional as F


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--samples", type=int, default=2003)
    parser.add_argument("--quick", action="store_true", help="101 samples")
    args = parser.parse_args()
    samples = 101 if args.quick else args.samples

    dist.init_process_group()
    nn.manual_seed(0)
    model = nn.LeNet5().eval()
    test_set = data.load("mnist", train=False).take(samples)
    # rank r: samples r, r + n, r + 2 n, ...
    sampler = dist.DistributedSampler(test_set, shuffle=False)
    losses, right = [], []
    with no_grad():
        for x, y in data.DataLoader(test_set, batch_size=64, sampler=sampler):
            output = model(Tensor(x))
            losses.append(F.cross_entropy(output, y, reduction="sum").item())
            right.append(float(np.sum(np.argmax(output.numpy(), axis=1) == y)))
    count = len(sampler)
    loss = dist.metric_average(sum(losses) / max(count, 1), "loss", weight=count)
    accuracy = dist.metric_average(sum(right) / max(count, 1), "accuracy", weight=count)
    slowest = dist.all_reduce(count, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f}, accuracy {100 * accuracy:.2f} % of {samples} samples")
        print(f"at most {slowest} samples on each of {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
