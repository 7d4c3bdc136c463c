"""A program that catches an error of one rank's forward() and goes on: step_fails.py eager|torch
FAILING [CLASS].

Three ranks, two shards, so one has none. Each rank prints what it caught, then a fingerprint of the
weights after two more steps.
"""

import os
import sys

import numpy as np

from odyssey import comm, data, errors, nn, optim
from odyssey.trainer import DistributedTrainer

kind, failing, how = sys.argv[1], int(sys.argv[2]), sys.argv[3] if sys.argv[3:] else "ValueError"
world = comm.world()
g = np.random.default_rng(0)
x, y = g.standard_normal((8, 5), np.float32), g.integers(0, 3, 8)
now = {"fails": False}


def fail() -> None:
    if now["fails"] and world.rank == failing:
        raise (
            errors.ShapeError("[ops] too wide")
            if how == "ShapeError"
            else ValueError("no such sample")
        )


def say(text: str) -> None:
    """A line in one piece, as three ranks write."""
    os.write(1, f"rank {world.rank} {text}\n".encode())


def trainer() -> DistributedTrainer:
    """A trainer of odyssey's own model, whose forward() runs in each step."""

    class Model(nn.Module):
        def __init__(self) -> None:
            self.line = nn.Linear(5, 3)

        def forward(self, x):
            fail()
            return self.line(x)

    nn.manual_seed(0)
    return DistributedTrainer(
        Model(), optim.SGD(lr=0.1), shard_size=4, threads=1, execution="eager"
    )


def torch_trainer():
    """A trainer of a torch module with running statistics."""
    import torch

    from odyssey.torch import DistributedTrainer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.norm = torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)

        def forward(self, x):
            y = self.norm(self.line(x))
            fail()
            return y

    torch.manual_seed(0)
    model = Model()
    return DistributedTrainer(
        model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), shard_size=4
    )


if __name__ == "__main__":
    made = torch_trainer() if kind == "torch" else trainer()
    batch = next(iter(data.DataLoader(data.arrays(x, y), batch_size=8)))
    for step in range(4):
        now["fails"] = step == 1
        try:
            made.train_step(batch)
        except Exception as error:
            say(f"caught {type(error).__name__}: {error}")
    say(f"has taken {made.steps} steps, weights {made.weights_sha256()[:12]}")
