"""Sums that begin with a record (record.mojo, BEGINS; engine/beginning.py): whatever is in
memory before, the bits are those of a sum that is added to zeros.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.core import native
from odyssey.core.program import OwnMemory, encode
from odyssey.engine import bucketed, direct

RNG = np.random.default_rng(7)


def summed(
    op: str,
    sizes: list[int],
    inputs: list[np.ndarray],
    counts: list[int],
    how: tuple[str, str],
    begins: bool,
):
    """What an op adds to its outputs: to garbage if it `begins`, else to zeros."""
    lib, context = native.library(), native.Context()
    declared = lib.ops[op]
    outputs = [OwnMemory(native.aligned(n)) for n in counts]
    for made in outputs:
        made.array[:] = np.nan if begins else 0
    memory = [*outputs, *(OwnMemory(a) for a in inputs)]
    scratch = OwnMemory(native.aligned(max(lib.scratch(declared, tuple(sizes), *how), 1), np.uint8))
    memory.insert(declared.scratch, scratch)
    record = np.zeros(lib.record, np.int64)
    args = [*memory, *sizes]
    record[: len(args) + 1] = encode(lib, op, args, lambda m: m.address, *how)
    record[0] |= int(begins) << native.BEGINS
    lib.run(record.ctypes.data, 1, context)
    return b"".join(made.array.tobytes() for made in outputs)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["lanes", "rows"])
@pytest.mark.parametrize("case", range(6))
def test_kernels_begin_at_zero(layout, dtype, case):
    rng = np.random.default_rng(case)
    lanes = 16 if layout == "lanes" else 1
    G, inputs, outputs = (int(rng.integers(1, n)) for n in (20, 120, 40))
    C, K, R, S = (int(rng.integers(1, n)) for n in (20, 40, 4, 3))
    H = W = R + S * int(rng.integers(0, 8))
    P = (H - R) // S + 1

    def numbers(n: int) -> np.ndarray:
        made = native.aligned(n * lanes)
        made[:] = rng.standard_normal(n * lanes)
        return made

    linear = (
        [G, inputs, outputs],
        [numbers(G * outputs), numbers(G * inputs)],
        [outputs * inputs, outputs],
    )
    conv = (
        [G, C, H, W, K, R, R, S],
        [numbers(G * K * P * P), numbers(G * C * H * W)],
        [K * C * R * R, K],
    )
    for op, given in (("linear_backward_weight", linear), ("conv2d_backward_weight", conv)):
        found = [summed(op, *given, (layout, dtype), begins) for begins in (False, True)]
        assert found[0] == found[1], (op, given[0])
        assert not np.isnan(np.frombuffer(found[1], np.float32)).any()


class Odd(nn.Module):
    """A weight that two layers share, a frozen bias, layers without one, one that is not used."""

    def __init__(self) -> None:
        self.conv = nn.Conv2d(1, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.first, self.again = nn.Linear(32, 32), nn.Linear(32, 32)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(32, 16)
        self.frozen.bias.requires_grad = False
        self.whole = nn.Linear(16, 16, bias=False)
        self.unused = nn.Linear(5, 7)
        self.out = nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 3)
        x = F.relu(self.again(F.relu(self.first(x.reshape(x.shape[0], -1)))))
        return self.out(self.whole(F.relu(self.frozen(x))))


def trained(comm, settings):
    nn.manual_seed(3)
    made = data.arrays(RNG_X, RNG_Y, classes=10)
    trainer = DistributedTrainer(
        Odd(), optim.SGD(lr=0.1, momentum=0.9), comm=comm, threads=1, shard_size=16, **settings
    )
    for batch in data.DataLoader(made, batch_size=44):
        trainer.train_step(batch)
    return trainer.weights_sha256()


RNG_X = RNG.standard_normal((44 * 3, 1, 8, 8)).astype(np.float32)
RNG_Y = RNG.integers(0, 10, 44 * 3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "ranks, settings", [(1, {}), (1, {"bucket_size_mb": 1e-3}), (2, {"zero": 2})]
)
def test_a_training_does_not_see_what_was_in_its_gradients(ranks, settings, precision, monkeypatch):
    settings = {**settings, "precision": precision}
    alone = mock.run(1, trained, {"precision": precision})[0]
    before = direct.DirectRunner.run, bucketed.BucketedRunner.run

    def spoiled(kind, run):
        def spoil(runner):
            for reduction in runner.reductions:
                reduction.buffers.view(np.float32)[:] = np.nan
            return run(runner)

        monkeypatch.setattr(kind, "run", spoil)

    spoiled(direct.DirectRunner, before[0])
    spoiled(bucketed.BucketedRunner, before[1])
    assert set(mock.run(ranks, trained, settings)) == {alone}


def test_most_of_a_network_begins(monkeypatch):
    took: list[list[tuple[int, int]]] = []
    take = native.Step.take
    monkeypatch.setattr(
        native.Step,
        "take",
        lambda step, tables, runs: (took.append(runs), take(step, tables, runs)),
    )
    trainer = DistributedTrainer(nn.MLP((1, 8, 8)), optim.SGD(lr=0.1), backend="local")
    trainer.train_step(
        next(iter(data.DataLoader(data.arrays(RNG_X, RNG_Y, classes=10), batch_size=32)))
    )
    left = sum(b - a for a, b in took[0])
    assert left < 0.01 * trainer.arena.size, (
        "gradients of all weights and biases are written by their layers' records"
    )
