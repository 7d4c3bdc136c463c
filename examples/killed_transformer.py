"""A transformer in PyTorch is killed in the middle of its training, goes on with another number
of ranks, and ends with the weights of a training that nothing happened to.

    odyssey launch -n 2 --run-dir whole examples/killed_transformer.py
    KILL_AT=7 odyssey launch -n 2 --env KILL_AT --run-dir hurt --max-restarts 0
        examples/killed_transformer.py
    odyssey launch -n 3 --run-dir hurt examples/killed_transformer.py

Needs PyTorch: `pip install -e '.[torch]'` in a checkout.
"""

import os
import signal

import torch
from torch import nn

from odyssey.callbacks import Context, LambdaCallback
from odyssey.torch import DistributedTrainer

torch.manual_seed(0)
text = torch.randint(0, 50, (256, 16))  # copies of a text that is shifted by one
samples = torch.utils.data.TensorDataset(text[:, :-1], text[:, 1:])
loader = torch.utils.data.DataLoader(samples, batch_size=16, shuffle=True)
layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
module = nn.Sequential(nn.Embedding(50, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 50))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def kill(context: Context) -> None:
    if context.steps == int(os.environ.get("KILL_AT", 0)) and context.trainer.comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


trainer = DistributedTrainer(
    module, torch.optim.AdamW(module.parameters(), 1e-3), loss=loss, shard_size=4
)
trainer.fit(loader, steps=12, checkpoint_every=5, callbacks=[LambdaCallback(on_step_end=kill)])
weights = trainer.weights_sha256()  # on all ranks
if trainer.comm.rank == 0:
    print(f"step {trainer.steps} on {trainer.comm.size} ranks: weights {weights[:16]}")
