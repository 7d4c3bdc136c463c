"""Model parallelism by hand: each layer on a place of its own, activations moved between them.

    python examples/large_model.py
    mpirun -n 3 python examples/large_model.py

On three ranks each has one layer; alone, or on a number of ranks that three does not divide, every
rank has the whole model. The weights are the same bits. docs/model-parallel.md explains it; a row
of stages is easier, see pipeline.py.
"""

from __future__ import annotations

import argparse

from odyssey import DistributedTrainer, Tensor, data, device, nn, optim
from odyssey import functional as F


class LargeModel(nn.Module):
    """Three linear layers on three places."""

    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        self.layer1 = nn.Linear(784, hidden) @ device(0)
        self.layer2 = nn.Linear(hidden, hidden) @ device(1)
        self.layer3 = nn.Linear(hidden, 10) @ device(2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.layer1(F.flatten(x)))
        x = x.to(device(1))  # its gradient will come back the same way
        x = F.relu(self.layer2(x))
        x = x.to(device(2))
        return self.layer3(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    nn.manual_seed(0)
    trainer = DistributedTrainer(LargeModel(), optim.SGD(lr=0.05, momentum=0.9))
    loader = data.DataLoader(data.load("mnist", train=True), batch_size=128, shuffle=True)
    history = trainer.fit(loader, epochs=100, steps=args.steps)

    weights = trainer.weights_sha256()
    if trainer.comm.rank == 0:
        print(
            f"{trainer.mesh}: train loss {history.train_loss:.4f}  {history.steps} steps  "
            f"weights {weights[:16]}"
        )


if __name__ == "__main__":
    main()
