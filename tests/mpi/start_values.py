"""Run under mpirun by test_comm.py: ranks that start with different weights train rank 0's."""

from __future__ import annotations

from odyssey import nn, optim
from odyssey.comm import world
from odyssey.train.trainer import DistributedTrainer

nn.manual_seed(world().rank)
trainer = DistributedTrainer(nn.Linear(4, 3), optim.SGD())
print(trainer.weights_sha256(), flush=True)
