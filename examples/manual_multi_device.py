"""Data parallelism by hand, without a wrapper: copies of a model, a batch cut into pieces,
gradients averaged, steps.

    python examples/manual_multi_device.py --devices 4
    mpirun -n 2 python examples/manual_multi_device.py --devices 2

`--devices` copies in this process, placed on device(0), device(1), ...; under mpirun as many on
every rank. All copies start from the same weights and must end with the same weights. What it is
not: parallel in one process (one copy computes after the other), or what to use: DDP does this
between ranks, a DistributedTrainer between workers as well.
"""

from __future__ import annotations

import argparse

import numpy as np

from odyssey import Tensor, data, device, nn, optim
from odyssey import distributed as dist
from odyssey import functional as F


def split_batch(x: np.ndarray, y: np.ndarray, parts: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The batch as `parts` consecutive pieces, which must be of one size: only then is a mean of
    means the mean.
    """
    if len(y) % parts:
        raise SystemExit(
            f"a batch of {len(y)} samples does not divide by {parts} devices; change --batch-size"
        )
    return list(zip(np.split(x, parts), np.split(y, parts), strict=True))


def tree_sum(arrays: list[np.ndarray]) -> np.ndarray:
    """(a + b) + (c + d), as a reduction over ranks adds them: then four copies here give the
    bits of two here and two on another rank, and so for all powers of two. ((a + b) + c) + d
    is rounded otherwise, and a training shows it.
    """
    if len(arrays) == 1:
        return arrays[0]
    half = 1 << (len(arrays) - 1).bit_length() - 1  # the largest power of two below their number
    return tree_sum(arrays[:half]) + tree_sum(arrays[half:])


def average_gradients(models: list[nn.Module]) -> None:
    """Gives all copies, of all ranks, the mean of their gradients."""
    for parameters in zip(*(m.parameters() for m in models), strict=True):
        local = tree_sum([p.grad.data for p in parameters])
        mean = dist.all_reduce_sum(local) / np.float32(len(models) * dist.get_world_size())
        for p in parameters:
            p.grad.data[...] = mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--devices", type=int, default=4, help="copies of the model in this process"
    )
    parser.add_argument(
        "--batch-size", type=int, default=128, help="samples of all copies of all ranks"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="three steps")
    args = parser.parse_args()
    steps = 3 if args.quick else args.steps

    dist.init_process_group()
    rank, n = dist.get_rank(), dist.get_world_size()
    models = []
    for k in range(args.devices):
        nn.manual_seed(0)  # all copies start alike
        models.append(nn.LeNet5().to(device(k)))
    optimizers = [optim.SGD(m.parameters(), lr=0.1) for m in models]
    loader = data.DataLoader(
        data.load("mnist", train=True), args.batch_size, shuffle=True, drop_last=True
    )
    for step, (x, y) in zip(range(1, steps + 1), loader, strict=False):
        # all ranks have the same batch
        mine = split_batch(x, y, n * args.devices)[rank * args.devices :]
        losses = []
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(Tensor(mine[k][0]).to(device(k))), mine[k][1])
            loss.backward()
            losses.append(loss.item())
        average_gradients(models)
        for optimizer in optimizers:
            optimizer.step()
        mean = dist.all_reduce_sum(sum(losses)) / (n * args.devices)
        if rank == 0 and (step % 10 == 0 or step == steps):
            print(f"step {step}: loss {mean:.4f} on {n * args.devices} devices")
    hashes = {optimizer.arena.sha256() for optimizer in optimizers}
    digest = int(min(hashes)[:12], 16)
    assert len(hashes) == 1 and dist.all_reduce(digest, "min") == dist.all_reduce(digest, "max")
    if rank == 0:
        print(f"weights {digest:012x}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
