"""A residual network with batch norm, written with `nn`: the same bits on any number of ranks.

    python examples/resnet.py
    mpirun -n 3 python examples/resnet.py

Mean and variance are those of a shard (`shard_size`), so they do not know how many ranks there are;
the running ones are summed along the tree as gradients are. `nn.models.build("resnet18")` is the
large one, with torchvision's names.
"""

from __future__ import annotations

import argparse

from odyssey import DistributedTrainer, Tensor, data, nn, optim
from odyssey import functional as F


class Block(nn.Module):
    """Two convolutions with batch norm; the input is added to their result (He et al. 2016)."""

    def __init__(self, channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != out_channels:
            conv = nn.Conv2d(channels, out_channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class Net(nn.Module):
    """Three blocks of 8, 16 and 32 channels, their mean over the image, ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.blocks = nn.Sequential(Block(8, 8), Block(8, 16, 2), Block(16, 32, 2))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.flatten(self.pool(self.blocks(self.stem(x)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="two steps")
    args = parser.parse_args()
    nn.manual_seed(0)
    trainer = DistributedTrainer(Net(), optim.SGD(lr=0.02, momentum=0.9), shard_size=32)
    loader = data.DataLoader(data.load("mnist", train=True), 128, shuffle=True, seed=0)
    trainer.fit(loader, steps=2 if args.quick else args.steps, verbose=False)
    weights = trainer.weights_sha256()
    result = trainer.evaluate(data.load("mnist", train=False).take(200 if args.quick else 2000))
    if trainer.comm.rank == 0:
        ranks = trainer.comm.size
        print(
            f"test accuracy {100 * result.accuracy:.1f} %, weights {weights[:12]} on {ranks} ranks"
        )


if __name__ == "__main__":
    main()
