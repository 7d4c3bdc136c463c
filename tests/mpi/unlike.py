"""Run under mpirun by test_comm.py: rank 1 trains another model or is given other samples, as
the argument says.
"""

from __future__ import annotations

import sys

import numpy as np

from odyssey import DistributedTrainer, comm, data, nn, optim

which, second = sys.argv[1], comm.world().rank == 1
x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
hidden = 7 if which == "size" and second else 6
activation = nn.Tanh() if which == "activation" and second else nn.ReLU()
if second and which in ("data", "scale"):
    x = x + 1e-3 if which == "data" else x * 1e30


class Augmented:
    """Samples with noise that every process draws for itself."""

    draw = np.random.default_rng()

    def __len__(self) -> int:
        return len(x)

    def __getitem__(self, i: int):
        return x[i] + self.draw.normal(size=8).astype(np.float32), i % 3


samples = Augmented() if which == "augmented" else data.arrays(x, np.arange(64) % 3)
model = nn.Sequential(nn.Linear(8, hidden), activation, nn.Linear(hidden, 3))
trainer = DistributedTrainer(model, optim.Adam(), shard_size=4, threads=1)
trainer.fit(data.DataLoader(samples, batch_size=16), steps=4)
print("trained on rank", trainer.comm.rank)
