"""Run by test_zero.py on 4 ranks: live bytes of a rank with ZeRO 0 to 3, of an untied
transformer of 4 layers.

Counted at every meeting of the ranks: the memory of all tensors that there are in the process, each
once, and NumPy's arrays of sums that no tensor sees. What autograd keeps has no Python object, so
activations are not among them.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings

import torch
from torch import nn

from odyssey.torch import DistributedTrainer
from odyssey.torch.zero import Spread

WIDTH, WORDS, LENGTH = 64, 200, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(4)
        )
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        for layer in self.layers:
            y = layer(y)
        return self.out(y).transpose(1, 2)


def tensors() -> int:
    """Bytes of all tensors of this process."""
    found = {}
    for t in gc.get_objects():
        if issubclass(type(t), torch.Tensor) and t.layout == torch.strided:
            storage = t.untyped_storage()
            found[storage._cdata] = (storage.data_ptr(), storage.nbytes())
    return sum(dict(found.values()).values())


peak = 0


def watched(exchange_votes):
    def wrapped(spread: Spread, vote: int) -> bool:
        global peak
        done = exchange_votes(spread, vote)
        peak = max(peak, tensors())
        return done

    return wrapped


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    zero = int(sys.argv[1])
    x = torch.randint(0, WORDS, (8, LENGTH))
    gc.collect()
    # what was imported is not looked through at every meeting: 39 s of processor time otherwise
    gc.freeze()
    before = tensors()
    model = Model()
    size = sum(p.numel() for p in model.parameters())
    trainer = DistributedTrainer(
        model, torch.optim.Adam(model.parameters(), lr=1e-3), zero=zero, shard_size=2
    )
    # at the first step rank 0 looks at the loss, with gradients of its own
    trainer.fit([(x, x)], verbose=False)
    Spread._exchange_votes = watched(Spread._exchange_votes)
    trainer.fit([(x, x)] * 2, verbose=False)
    trainer.optimizer.zero_grad()
    at_rest = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    kept = (
        {b.flat.data_ptr(): b.flat.untyped_storage().nbytes() for b in trainer.shards.buckets}
        if zero == 3
        else {}
    )
    found = {
        "parameters": size,
        "largest": max(p.numel() for p in model.parameters()),
        "rest": sum({**at_rest, **kept}.values()),
        "peak": max(peak, tensors()) - before,
        "memory": trainer.memory(),
        "sha256": trainer.weights_sha256(),
    }
    for rank in range(trainer.comm.size):
        trainer.comm.barrier()
        if rank == trainer.comm.rank:
            print(json.dumps(found), flush=True)
