"""A training whose sampler has a generator of its own: sampled.py [MARK].

Rank 1 is killed once, at its sixth step.
"""

import os
import signal
import sys

import torch
from torch import nn

from odyssey import callbacks, comm
from odyssey.torch import DistributedTrainer


class Dies(callbacks.Callback):
    """Kills rank 1 while the file MARK is not there."""

    def on_step_end(self, context: callbacks.Context) -> None:
        mark = sys.argv[1] if sys.argv[1:] else ""
        if mark and context.steps == 6 and comm.world().rank == 1 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.manual_seed(0)
    samples = torch.utils.data.TensorDataset(torch.randn(40, 5), torch.randint(0, 3, (40,)))
    module = nn.Linear(5, 3)
    trainer = DistributedTrainer(module, torch.optim.SGD(module.parameters(), 0.1), shard_size=4)
    sampler = torch.utils.data.WeightedRandomSampler(
        torch.linspace(0.1, 1, 40), 40, generator=torch.Generator().manual_seed(7)
    )
    loader = torch.utils.data.DataLoader(samples, 8, sampler=sampler)
    trainer.fit(loader, epochs=3, checkpoint_every=2, callbacks=[Dies()], verbose=False)
    sha = trainer.weights_sha256()
    if trainer.comm.rank == 0:
        print("sha256", sha)
