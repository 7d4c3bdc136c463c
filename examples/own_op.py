"""An op of one's own: own_ops.mojo is compiled on first use, checked, and trained with like any
other.

    python examples/own_op.py
    mpirun -n 2 python examples/own_op.py

--quick leaves the check out and takes three steps.
"""

import sys
from pathlib import Path

import numpy as np

import odyssey
from odyssey import DistributedTrainer, comm, data, nn, optim
from odyssey import functional as F
from odyssey.testing import check_op

odyssey.load_ops(Path(__file__).with_name("own_ops.mojo"))
mish = F.unary("mish", "x tanh(log(1 + e^x)).", saves="x", layer="Mish")
if "--quick" not in sys.argv:
    check_op(mish, lambda x: x * np.tanh(np.log1p(np.exp(x))), (24,))
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.Mish(), nn.Linear(64, 10))
trainer = DistributedTrainer(model, optim.SGD(lr=0.1))
loader = data.DataLoader(data.load("mnist", train=True).take(2000), batch_size=100)
for batch in list(loader)[: 3 if "--quick" in sys.argv else 20]:
    loss, _ = trainer.train_step(batch)
if comm.world().rank == 0:
    print(f"loss {loss / 100:.4f} with mish, on {trainer.comm.size} ranks")
