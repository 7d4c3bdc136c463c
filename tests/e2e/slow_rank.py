"""A training of two ranks, of which the second reads its samples slowly: slow_rank.py ours|torch [rebalance]."""

import sys
import time

import numpy as np

from odyssey import comm, data


def slowly(x, rng):
    """Takes two milliseconds for a sample on rank 1."""
    time.sleep(0.002 * world.rank)
    return x + rng.standard_normal(x.shape, np.float32)


world = comm.world()
kind, moving = sys.argv[1], "rebalance" in sys.argv
rng = np.random.default_rng(5)
samples = data.arrays(rng.standard_normal((320, 1, 4, 4)).astype(np.float32), np.arange(320, dtype=np.int64) % 7)
loader = data.DataLoader(samples, batch_size=64, shuffle=True, transform=slowly)
settings = {"comm": world, "shard_size": 8, "rebalance": moving}
if kind == "ours":
    from odyssey import DistributedTrainer, nn, optim

    nn.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 7))
    trainer = DistributedTrainer(model, optim.Adam(), threads=1, **settings)
else:
    import torch

    from odyssey.torch import DistributedTrainer

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 7))
    trainer = DistributedTrainer(model, torch.optim.Adam(model.parameters()), **settings)
trainer.fit(loader, epochs=8)
if world.rank == 0:
    print(trainer.weights_sha256(), trainer.layout.counts(8))
