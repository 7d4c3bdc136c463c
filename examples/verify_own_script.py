"""A script of one's own that `odyssey verify` can run on other layouts: nothing in it is about
that.

    python examples/verify_own_script.py
    odyssey verify --script examples/verify_own_script.py --layouts dp=2 pp=2 tp=2 dp=2,zero=3
        --steps 3

verify starts the script once alone and once per layout. Its DistributedTrainer then takes the
layout from verify, stops after so many steps, and all weights, optimizer numbers and losses are
compared. docs/verify.md explains it.
"""

from __future__ import annotations

import argparse

from odyssey import DistributedTrainer, Tensor, data, nn, optim
from odyssey import functional as F


class Net(nn.Module):
    """A small network with a skip connection and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5)
        self.fc1, self.fc2, self.fc3 = (
            nn.Linear(8 * 12 * 12, 96),
            nn.Linear(96, 96),
            nn.Linear(96, 10),
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.flatten(F.max_pool2d(F.relu(self.conv(x)), 2))
        x = F.tanh(self.fc1(x))
        return self.fc3(self.dropout(x + F.relu(self.fc2(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    nn.manual_seed(0)
    trainer = DistributedTrainer(Net(), optim.AdamW(lr=1e-3), seed=1)
    loader = data.DataLoader(data.load("mnist", train=True), batch_size=128, shuffle=True)
    history = trainer.fit(loader, epochs=100, steps=args.steps)
    weights = trainer.weights_sha256()
    if trainer.comm.rank == 0:
        print(f"train loss {history.train_loss:.4f}  {history.steps} steps  weights {weights[:16]}")


if __name__ == "__main__":
    main()
