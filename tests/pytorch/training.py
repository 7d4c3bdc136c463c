"""A training of a torch module, as a user writes it: training.py [STEPS] [--zero] [--bug]."""

import sys

import numpy as np
import torch
from torch import nn

from odyssey import data
from odyssey.torch import DistributedTrainer

if __name__ == "__main__":
    torch.manual_seed(0)
    steps = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 6
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(144, 3),
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    trainer = DistributedTrainer(module, optimizer, shard_size=4, zero=int("--zero" in sys.argv))
    if "--bug" in sys.argv and trainer.comm.rank == 1:
        trainer.shards.seed = 7  # other masks on one rank
    g = np.random.default_rng(0)
    x, y = g.standard_normal((60, 1, 8, 8), np.float32), g.integers(0, 3, 60)
    loader = data.DataLoader(data.arrays(x, y), batch_size=20, shuffle=True)
    trainer.fit(
        loader,
        epochs=10**6,
        steps=steps,
        **({"checkpoint_every": 5} if "--every" in sys.argv else {}),
    )
    sha = trainer.weights_sha256()
    if trainer.comm.rank == 0:
        print("sha256", sha)
