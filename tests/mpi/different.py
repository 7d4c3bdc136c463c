"""Run under mpirun by test_comm.py: rank 1 starts with another setting than the others, named in the argument."""

from __future__ import annotations

import sys

from odyssey import comm, nn, optim
from odyssey.errors import ConfigError
from odyssey.trainer import DistributedTrainer

world = comm.world()
which = sys.argv[1] if world.rank == 1 else ""
settings = {
    "workers": {"num_gpus": 2, "device": "cpu"},
    "shard": {"shard_size": 16},
    "reduction": {"reduction": "mpi"},
    "seed": {"seed": 1},
}
try:
    DistributedTrainer(nn.Linear(4, 3 if which == "model" else 2), optim.SGD(), **settings.get(which, {}))
except ConfigError as error:
    print(f"rank {world.rank}: {error}", flush=True)
