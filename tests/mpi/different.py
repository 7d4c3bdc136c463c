"""Run under mpirun by test_comm.py: rank 1 starts with another setting than the others, with
each that is named.
"""

from __future__ import annotations

import sys

import numpy as np

from odyssey import comm, data, nn, optim
from odyssey.errors import ConfigError
from odyssey.train.trainer import DistributedTrainer

world = comm.world()
settings = {
    "workers": {"num_gpus": 2, "device": "cpu"},
    "shard": {"shard_size": 16},
    "reduction": {"reduction": "mpi"},
    "seed": {"seed": 1},
}
for name in sys.argv[1:]:
    which = name if world.rank == 1 else ""
    model = nn.Linear(4, 3 if which == "model" else 2)
    optimizer = optim.SGD(lr=0.02 if which == "rate" else 0.01)
    schedule = optim.cosine(5) if which == "schedule" else None
    loader = data.DataLoader(
        data.arrays(np.zeros((256, 4), np.float32), np.arange(256) % 2),
        batch_size=192 if which == "batch" else 128,
        shuffle=True,
        seed=1 if which == "order" else 0,
    )
    try:
        trainer = DistributedTrainer(model, optimizer, schedule=schedule, **settings.get(which, {}))
        trainer.fit(loader, epochs=2 if which == "length" else 1)
    except ConfigError as error:
        print(f"{name}: rank {world.rank}: {error}", flush=True)
