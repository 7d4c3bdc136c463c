"""Run by test_ddp.py alone and under mpirun: loops of one's own; prints a hash of all weights
and buffers per loop.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from odyssey.torch import DataLoader, DistributedDataParallel


class Noisy(torch.utils.data.Dataset):
    """50 images, with noise of the generators that transforms draw from."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(50, 1, 8, 8, generator=generator)
        self.y = torch.randint(0, 5, (50,), generator=generator)
        self.read: list[int] = []

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int):
        self.read.append(i)
        return self.x[i] + 0.1 * torch.randn(1, 8, 8) + float(np.random.rand()), self.y[i]


def cnn() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(144, 5),
    )


def digest(module: nn.Module) -> str:
    values = (t.detach().contiguous().numpy().tobytes() for t in module.state_dict().values())
    return hashlib.sha256(b"".join(values)).hexdigest()[:12]


def loop(
    workers: int, *, accumulate: int = 1, channels_last: bool = False, autocast: bool = False
) -> str:
    data, module = Noisy(), cnn()
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
    net = DistributedDataParallel(module, seed=5)
    loader = DataLoader(
        data, batch_size=20, shuffle=True, seed=1, shard_size=4, num_workers=workers
    )
    optimizers = [
        torch.optim.AdamW(module[0].parameters(), 1e-2),
        torch.optim.SGD(module[1:].parameters(), 0.1, 0.9),
    ]
    steps = 0
    for _ in range(2):
        for k, batch in enumerate(loader, 1):
            for x, y in net.shards(batch):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    F.cross_entropy(net(x), y).backward()
            if k % accumulate == 0:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            steps += 1
    assert steps == 6 and int(module[1].num_batches_tracked) == 6
    if not workers:
        assert len(data.read) == 100 if net.comm.size == 1 else len(data.read) < 100
    return digest(net)


def whole_batches() -> str:
    """A batch that all ranks have, a default shard size, no zero_grad: a step uses a gradient
    up.
    """
    module = cnn()
    net = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(3):
        x, y = Noisy().x[:37].clone(), Noisy().y[:37]
        for given in net.shards({"x": x, "y": [y]}):
            F.cross_entropy(net(given["x"]), given["y"][0]).backward()
        optimizer.step()
    return digest(net)


def is_the_mean() -> None:
    """Without dropout and BatchNorm: the gradient of the whole batch's mean, to rounding."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    net, data = DistributedDataParallel(module, shard_size=7), Noisy()
    for x, y in net.shards((data.x, data.y)):
        F.cross_entropy(net(x), y).backward()
    mean = [p.grad.clone() for p in module.parameters()]
    for x, y in net.shards((data.x, data.y)):
        F.cross_entropy(net(x), y).backward()
    whole = torch.autograd.grad(F.cross_entropy(module(data.x), data.y), list(module.parameters()))
    for once, twice, right in zip(mean, module.parameters(), whole, strict=True):
        torch.testing.assert_close(once, right)
        torch.testing.assert_close(twice.grad, 2 * right)


is_the_mean()
found = [
    loop(0),
    loop(2),
    loop(0, accumulate=3),
    loop(0, channels_last=True),
    loop(0, autocast=True),
    whole_batches(),
]
assert found[0] == found[1]
print(*found, flush=True)
