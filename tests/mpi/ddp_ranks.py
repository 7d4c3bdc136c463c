"""Run under mpirun by test_distributed.py: collectives, then loops with DDP; prints what all
ranks agree on.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys

import numpy as np

from odyssey import Tensor, nn, optim
from odyssey import distributed as dist
from odyssey import functional as F
from odyssey.distributed.ddp import DDP
from odyssey.errors import ConfigError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 1, 28, 28)).astype(np.float32)
Y = RNG.integers(0, 10, 64)


def train(micro: int, size: int, bucket: float) -> str:
    """The weights after two steps, each of `micro` passes of `size` samples per rank."""
    r = dist.get_rank()
    nn.manual_seed(5 + r)
    net = DDP(nn.LeNet5(), bucket_size_mb=bucket, average="samples")
    opt = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        opt.zero_grad()
        for k in range(micro):
            at = (r * micro + k) * size
            with net.no_sync() if k < micro - 1 else contextlib.nullcontext():
                F.cross_entropy(net(Tensor(X[at : at + size])), Y[at : at + size]).backward()
        opt.step()
    return opt.arena.sha256()[:16]


def uneven() -> str:
    """The weights after two epochs of join, where rank r has 3 + 2 r samples and the last rank
    none.
    """
    r, n = dist.get_rank(), dist.get_world_size()
    nn.manual_seed(1)
    net = DDP(nn.LeNet5(), average="samples")
    opt = optim.SGD(net.parameters(), lr=0.1)
    mine = 0 if r == n - 1 and n > 1 else 3 + 2 * r
    loader = [(X[a : min(a + 2, mine)], Y[a : min(a + 2, mine)]) for a in range(0, mine, 2)]
    for _ in range(2):
        for x, y in net.join(loader):
            opt.zero_grad()
            F.cross_entropy(net(Tensor(x)), y).backward()
            opt.step()
    return opt.arena.sha256()[:16]


def main() -> None:
    expected, backend = int(sys.argv[1]), sys.argv[2]
    try:
        dist.init_process_group(backend, world_size=expected + 1)
    except ConfigError as error:
        assert f"world_size={expected + 1} was given, but {expected} rank" in str(error)
    world = dist.init_process_group(backend, world_size=expected)
    r, n = world.rank(), world.size()
    assert dist.get_backend() == backend
    t = Tensor(np.full(3, r + 1.0))
    assert dist.all_reduce(t) is t and t.tolist() == [n * (n + 1) / 2] * 3
    assert [v.item() for v in dist.all_gather(Tensor([float(r)]))] == list(range(n))
    assert dist.scatter([Tensor([p]) for p in range(n)] if r == 0 else None).item() == r
    assert dist.broadcast(np.array([r, r]), src=n - 1).tolist() == [n - 1] * 2
    assert dist.metric_average(float(r), "rank", weight=r == n - 1) == n - 1
    if n > 1:
        request = dist.isend(np.full(100_000, float(r)), (r + 1) % n)
        assert dist.recv(np.zeros(100_000), (r - 1) % n)[-1] == (r - 1) % n
        request.wait()
    rows = dist.profile_communication(sizes=(1000, 5), repeats=3, show=False)
    assert [row["floats"] for row in rows] == [1000, 5] and all(row["seconds"] > 0 for row in rows)
    passes = {1: 8, 2: 4, 3: 2, 4: 2}[n]
    results = [train(passes, 8, 25.0), train(passes, 8, 0.01), uneven()]
    digest = int.from_bytes(hashlib.sha256(repr(results).encode()).digest()[:6], "little")
    assert dist.all_reduce(digest, "min") == dist.all_reduce(digest, "max")
    if r == 0:
        print(*results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
