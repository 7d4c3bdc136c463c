"""A training whose second half of ranks reads its samples slowly: slow_rank.py
ours|pipeline|torch [rebalance].
"""

import sys
import time

import numpy as np

from odyssey import comm, data
from odyssey.parallel.mesh import Mesh


def slowly(x, rng):
    """Takes some milliseconds for a sample on the second half of the ranks."""
    time.sleep(0.006 * (2 * world.rank // world.size))
    return x + rng.standard_normal(x.shape, np.float32)


world = comm.world()
kind, moving = sys.argv[1], "rebalance" in sys.argv
rng = np.random.default_rng(5)
samples = data.arrays(
    rng.standard_normal((320, 1, 4, 4)).astype(np.float32), np.arange(320, dtype=np.int64) % 7
)
loader = data.DataLoader(samples, batch_size=64, shuffle=True, transform=slowly)
settings = {"comm": world, "shard_size": 8, "rebalance": moving}
if kind in ("ours", "pipeline"):
    from odyssey import DistributedTrainer, nn, optim

    nn.manual_seed(0)
    second = [nn.Linear(7, 7)] if kind == "pipeline" else []
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 7), *second)
    settings["mesh"] = Mesh(pp=2 if second and world.size > 1 else 1)
    trainer = DistributedTrainer(model, optim.Adam(), threads=1, **settings)
else:
    import torch

    from odyssey.torch import DistributedTrainer

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 7))
    trainer = DistributedTrainer(model, torch.optim.Adam(model.parameters()), **settings)
trainer.fit(loader, epochs=8)
weights = trainer.weights_sha256()
if world.rank == 0:
    print(weights, trainer.layout.counts(8))
