"""The whole program: MNIST, a convolutional network with dropout, Adam, NLL loss, evaluation;
one process or several.

    python examples/mnist_distributed.py
    mpirun -n 2 python examples/mnist_distributed.py

What it is not: the shortest way to this result; `odyssey train --model convnet` is that, and
faster, since it records the step.
"""

from __future__ import annotations

import argparse

import numpy as np

from odyssey import Tensor, data, nn, no_grad, optim
from odyssey import distributed as dist
from odyssey import functional as F


class ConvNet(nn.Module):
    """Two convolutions of 3 x 3, max-pool, and two linear layers; log-probabilities of 10
    classes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.flatten(self.dropout1(F.max_pool2d(x, 2)))
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))))


def create_dataloader(train: bool, samples: int, batch_size: int) -> data.DataLoader:
    """This rank's share of the first `samples` of MNIST."""
    dataset = data.load("mnist", train=train)
    dataset = dataset.take(min(samples, len(dataset)))
    return data.DataLoader(
        dataset, batch_size, sampler=dist.DistributedSampler(dataset, shuffle=train)
    )


def evaluate(model: nn.Module, loader: data.DataLoader) -> tuple[float, float]:
    """(loss, accuracy) over the samples of all ranks. No rank waits for another before the end."""
    model.eval()
    loss = right = count = 0.0
    with no_grad():
        for x, y in loader:
            output = model(Tensor(x))
            loss += F.nll_loss(output, y, reduction="sum").item()
            right += float(np.sum(np.argmax(output.numpy(), axis=1) == y))
            count += len(y)
    model.train()
    loss, right, count = dist.all_reduce(np.array([loss, right, count]))
    return loss / count, right / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--samples", type=int, default=6400)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--log-interval", type=int, default=50, help="steps between two lines")
    parser.add_argument("--quick", action="store_true", help="one epoch over 192 samples")
    args = parser.parse_args()
    epochs, samples = (1, 192) if args.quick else (args.epochs, args.samples)

    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_loader = create_dataloader(True, samples, args.batch_size)
    test_loader = create_dataloader(False, samples, 256)
    nn.manual_seed(0)
    model = dist.DistributedDataParallel(ConvNet())
    criterion = nn.NLLLoss()
    optimizer = optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(epochs):
        train_loader.sampler.set_epoch(epoch)
        running, since = 0.0, 0
        for step, (x, y) in enumerate(model.join(train_loader), 1):
            optimizer.zero_grad()
            loss = criterion(model(Tensor(x)), y)
            loss.backward()
            optimizer.step()
            running, since = running + loss.item(), since + 1
            if step % args.log_interval == 0:
                # of all ranks, since the last line
                mean = dist.metric_average(running / since, "loss")
                running, since = 0.0, 0
                if rank == 0:
                    print(f"epoch {epoch + 1}, step {step}: loss {mean:.4f}")
        loss_, accuracy = evaluate(model, test_loader)
        if rank == 0:
            print(
                f"epoch {epoch + 1}: test loss {loss_:.4f}, accuracy {100 * accuracy:.2f} % "
                f"({world_size} ranks)"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
