"""Data-parallel training in a custom training loop: DistributedSampler, DDP, an optimizer, a
mean loss per epoch.

    python examples/ddp_loop.py
    mpirun -n 2 python examples/ddp_loop.py

Every rank computes other samples; gradients are averaged inside loss.backward(). What it is not:
the shortest way (that is a DistributedTrainer), or an example of evaluation (mnist_distributed.py).
"""

from __future__ import annotations

import argparse

from odyssey import Tensor, data, nn, optim
from odyssey import distributed as dist
from odyssey import functional as F


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--samples", type=int, default=12800, help="of MNIST's training set")
    parser.add_argument("--quick", action="store_true", help="256 samples, one epoch")
    args = parser.parse_args()
    epochs, samples = (1, 256) if args.quick else (args.epochs, args.samples)

    world = dist.init_process_group()
    nn.manual_seed(0)
    train_set = data.load("mnist", train=True).take(samples)
    sampler = dist.DistributedSampler(train_set, world.size(), world.rank())
    loader = data.DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    model = (
        dist.DDP.builder(nn.LeNet5())
        .world(world)
        .bucket_size_mb(25.0)
        .broadcast_buffers(True)
        .build()
    )
    optimizer = optim.Adam(model.parameters(), lr=0.001)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total, count = 0.0, 0
        for x, y in model.join(loader):  # as many steps on every rank, whatever it has
            loss = F.cross_entropy(model(Tensor(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if model.active:
                total, count = total + loss.item() * len(y), count + len(y)
        mean = dist.metric_average(total / max(count, 1), "loss", weight=count)
        if world.rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean:.4f} on {world.size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
