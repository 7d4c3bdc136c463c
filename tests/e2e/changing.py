"""A training that a callback changes: changing.py CHANGE [MARK]; prints a hash of its weights.

CHANGE: none, gain (forward() reads it; by epoch), lr (lowered at epoch 2), unfreeze (a layer, at
epoch 2). MARK: rank 1 kills itself once at step 8, where there is no such file yet, and makes it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from odyssey import DistributedTrainer, callbacks, comm, data, nn, optim

EPOCHS, STEPS = 4, 3  # of an epoch
CHANGES = ("none", "gain", "lr", "unfreeze")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.gain = nn.Linear(8, 32), nn.Linear(32, 3), 1.0

    def forward(self, x):
        return self.last(nn.ReLU()(self.first(x)) * self.gain)


class Change(callbacks.Callback):
    """Changes the training when epochs begin; stops it, or kills this rank, after a step."""

    def __init__(self, change: str, stop: int | None = None, mark: Path | None = None) -> None:
        self.change, self.stop, self.mark = change, stop, mark

    def on_epoch_start(self, context: callbacks.Context) -> None:
        trainer = context.trainer
        if self.change == "gain":
            trainer.model.gain = 1 / context.epoch
        if self.change == "lr" and context.epoch == 2:
            trainer.optimizer.lr *= 0.1
        if self.change == "unfreeze" and context.epoch == 2:
            trainer.model.first.requires_grad_(True)

    def on_step_end(self, context: callbacks.Context) -> None:
        if context.steps == self.stop:
            context.stop = "as the test wants it"
        if (
            self.mark
            and context.steps == 8
            and context.trainer.comm.rank == 1
            and not self.mark.exists()
        ):
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def made(change: str, **settings: Any) -> tuple[DistributedTrainer, data.DataLoader]:
    """A trainer at its first step, and its data."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32 * STEPS, 8)).astype(np.float32), rng.integers(0, 3, 32 * STEPS)
    nn.manual_seed(0)
    net = Net()
    net.first.requires_grad_(change != "unfreeze")
    trainer = DistributedTrainer(net, optim.SGD(lr=0.05), shard_size=8, threads=1, **settings)
    return trainer, data.DataLoader(data.arrays(x, y, classes=3), batch_size=32)


if __name__ == "__main__":
    trainer, loader = made(sys.argv[1])
    change = Change(sys.argv[1], mark=Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    trainer.fit(loader, epochs=EPOCHS, callbacks=[change], checkpoint_every=2, verbose=False)
    found = trainer.weights_sha256()
    if comm.world().rank == 0:
        print("hash", found)
