"""Random trainings of random torch modules on however many ranks there are: what they hold at the end, as a hash.

    cases.py FIRST LAST FOLDER whole|half|rest      trains cases FIRST to LAST - 1; prints what each holds on rank 0

Case 0 is a CNN with BatchNorm and dropout, case 1 a GPT of 4 layers with dropout and tied weights; the others are drawn
from their number alone: odd shapes, BatchNorm, embeddings, tied, unused and frozen weights, an optimizer, a loader.
half: stops in the middle, with a checkpoint in FOLDER/CASE; rest: goes on from there.
"""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from odyssey import comm, data
from odyssey.torch import DistributedTrainer

STEPS = 6


class Images(nn.Module):
    def __init__(self, r: random.Random) -> None:
        super().__init__()
        c, self.classes = r.choice([3, 5, 8]), 4
        self.conv = nn.Conv2d(1, c, r.choice([1, 3]), padding=1, bias=r.random() < 0.5)
        self.norm = r.choice([nn.BatchNorm2d(c), nn.BatchNorm2d(c, momentum=None), nn.InstanceNorm2d(c), nn.Identity()])
        self.drop, self.pool = nn.Dropout(r.choice([0.0, 0.3])), nn.AdaptiveAvgPool2d(r.choice([1, 2, 3]))
        self.head = nn.LazyLinear(self.classes)
        if r.random() < 0.4:
            self.unused = nn.Linear(3, 7)
        if r.random() < 0.3:
            self.conv.weight.requires_grad_(False)
        self(torch.zeros(2, 1, 9, 7))
        if r.random() < 0.3:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.pool(torch.relu(self.norm(self.conv(x)))).flatten(1)))


class Tokens(nn.Module):
    def __init__(self, r: random.Random) -> None:
        super().__init__()
        d = r.choice([5, 12, 17])
        self.embed, self.norm, self.drop = nn.Embedding(11, d), nn.LayerNorm(d), nn.Dropout(0.2)
        self.mix = nn.GRU(d, d, batch_first=True) if r.random() < 0.4 else nn.Linear(d, d)
        self.out = nn.Linear(d, 11, bias=False)
        if r.random() < 0.6:
            self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.embed(x))
        y = self.mix(y)[0] if isinstance(self.mix, nn.GRU) else self.mix(y)
        return self.out(self.norm(y)).transpose(1, 2)


class Rows(nn.Module):
    def __init__(self, r: random.Random) -> None:
        super().__init__()
        width = r.choice([1, 6, 33])
        self.net = nn.Sequential(
            nn.Linear(7, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 3)
        )
        self.part = r.random() < 0.5
        self.sometimes = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.net(x)
        return self.sometimes(y) if self.part and float(x[0, 0]) > 0.5 else y


class CNN(nn.Sequential):
    def __init__(self, _: random.Random) -> None:
        convs = [nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
        super().__init__(
            *convs, nn.ReLU(), nn.Flatten(), nn.Dropout(0.4), nn.Linear(120, 16), nn.ReLU(), nn.Linear(16, 4)
        )


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.drop = nn.LayerNorm(d), nn.LayerNorm(d), nn.Dropout(0.1)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (s.view(b, t, 2, d // 2).transpose(1, 2) for s in self.qkv(self.norm1(x)).split(d, 2))
        p = 0.1 if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, d)))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, _: random.Random) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 16), nn.Parameter(torch.randn(5, 16) * 0.02)
        self.blocks, self.norm = nn.Sequential(*(Block(16) for _ in range(4))), nn.LayerNorm(16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.place))).transpose(1, 2)


def optimizer(r: random.Random, module: nn.Module) -> torch.optim.Optimizer:
    p = [q for q in module.parameters() if q.requires_grad]
    return r.choice(
        [
            lambda: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
            lambda: torch.optim.SGD(p, lr=0.1),
            lambda: torch.optim.AdamW(p, lr=1e-2, fused=r.random() < 0.3),
            lambda: torch.optim.Adam([{"params": p[:1], "lr": 1e-3}, {"params": p[1:]}], lr=1e-2, amsgrad=True),
            lambda: torch.optim.RMSprop(p, lr=1e-3),
        ]
    )()


def loader(r: random.Random, kind: type, batch: int, samples: int):
    g = np.random.default_rng(r.randrange(1 << 30))
    if kind in (Images, CNN):
        x, y = g.standard_normal((samples, 1, 9, 7), np.float32), g.integers(0, 4, samples)
        return data.DataLoader(data.arrays(x, y), batch_size=batch, shuffle=True, seed=3)
    if kind in (Tokens, GPT):
        ids = torch.from_numpy(g.integers(0, 11, (samples, 6)))
        return [(ids[i : i + batch, :-1], ids[i : i + batch, 1:]) for i in range(0, samples, batch)]
    x, y = torch.from_numpy(g.standard_normal((samples, 7), np.float32)), torch.from_numpy(g.random((samples, 3)))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=batch, shuffle=True)


def trainer_of(case: int, ranks: int) -> tuple[DistributedTrainer, object]:
    """A case; of what changes no bits something that depends on the ranks as well."""
    r = random.Random(case)
    torch.manual_seed(case)
    kind = [CNN, GPT][case] if case < 2 else r.choice([Images, Tokens, Rows])
    shard = r.choice([3, 4, 5])
    batch = r.choice([shard, 3 * shard, 4 * shard, 7 * shard - 1])
    module = kind(r)
    opt = optimizer(r, module)
    scheduler = r.choice(
        [
            None,
            torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5),
            torch.optim.lr_scheduler.MultiStepLR(opt, [2, 4]),
            torch.optim.lr_scheduler.SequentialLR(
                opt,
                [torch.optim.lr_scheduler.LinearLR(opt, 0.1), torch.optim.lr_scheduler.MultiStepLR(opt, [1])],
                [2],
            ),
        ]
    )
    settings = {
        "scheduler": scheduler,
        "scheduler_interval": r.choice(["step", "epoch"]),
        "shard_size": shard,
        "seed": r.randrange(100),
        "clip_norm": r.choice([None, 0.5]),
        "precision": r.choice(["fp32", "fp32", "bf16"]),
        "loss": nn.MSELoss() if kind is Rows else nn.CrossEntropyLoss(reduction=r.choice(["mean", "sum"])),
        "check_every": 2,
    }
    layout = random.Random(case * 8 + ranks)
    settings["zero"] = layout.choice([0, 1])
    settings["reduction"] = "tree" if settings["zero"] else layout.choice(["tree", "hierarchical", "parameter_server"])
    last = batch // 2 + 1
    last += last % shard == 1  # BatchNorm needs two samples
    batches = loader(r, kind, batch, 2 * batch + last)
    return DistributedTrainer(module, opt, **settings), batches


def digest(trainer: DistributedTrainer) -> str:
    found = hashlib.sha256()
    for name, value in sorted(trainer.named_state().items()):
        found.update(name.encode() + np.ascontiguousarray(value).tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    first, last, folder, mode = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    world = comm.world()
    for case in range(first, last):
        trainer, batches = trainer_of(case, world.size)
        steps = random.Random(case).randrange(1, STEPS) if mode == "half" else STEPS
        where = {} if mode == "whole" else {"checkpoint_dir": folder / str(case)}
        history = trainer.fit(batches, epochs=4, steps=steps, **where)
        said, loss = digest(trainer), trainer.evaluate(batches).loss if mode != "half" else history.train_loss
        rows = hashlib.sha256(trainer.predict(batches).numpy().tobytes()).hexdigest()[:8]
        if world.rank == 0:
            print(case, said, loss.hex(), rows, flush=True)


if __name__ == "__main__":
    main()
