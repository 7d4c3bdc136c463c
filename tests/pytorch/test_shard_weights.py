"""Weights of shards of PyTorch modules: a full shard has weight 1, a smaller last one its share of
a full one. So one shard of any size is a plain PyTorch loop, to the last bit.
"""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from odyssey.comm import mock  # noqa: E402
from odyssey.torch import DistributedDataParallel, DistributedTrainer  # noqa: E402

MAKING = threading.Lock()  # ranks are threads in some tests, and torch has one generator
FEATURES = 6
CLASSES = 3


@pytest.fixture(autouse=True)
def _use_one_thread():
    torch.set_num_threads(1)  # the bits of a plain loop depend on it


def make_net(seed: int, norm: bool = False, hook: Any = None) -> nn.Module:
    between = [nn.BatchNorm1d(8)] if norm else []
    with MAKING:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(FEATURES, 8), *between, nn.Tanh(), nn.Linear(8, CLASSES))
    if hook is not None:
        for parameter in net.parameters():
            parameter.register_hook(hook)
    return net


def make_batch(seed: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=draw)
    return x, torch.randint(0, CLASSES, (samples,), generator=draw)


def values(net: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in net.state_dict().items()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


def draw_optimizer(r: random.Random, net: nn.Module) -> torch.optim.Optimizer:
    name, options = r.choice(
        [("SGD", {"momentum": 0.9}), ("SGD", {}), ("AdamW", {}), ("RMSprop", {}), ("Adagrad", {})]
    )
    return getattr(torch.optim, name)(net.parameters(), lr=0.05, **options)


def draw_hook(r: random.Random) -> Any:
    """Returns a hook on gradients whose result depends on their size, or None."""
    return r.choice(
        [None, lambda g: g.clamp(-0.02, 0.02), lambda g: g / (g.norm() + 1), lambda g: g + 0.01]
    )


@pytest.mark.parametrize("number", range(16))
def test_one_shard_of_any_size_is_a_plain_loop(number):
    r = random.Random(number)
    norm = r.random() < 0.5
    hook = draw_hook(r)
    bf16 = r.random() < 0.3
    sizes = [r.randint(2, 70) for _ in range(3)]  # of batches
    shard_size = max(sizes) + r.choice([0, 1, 17])
    batches = [make_batch(number + i, n) for i, n in enumerate(sizes * 2)]
    plain = make_net(number, norm, hook)
    optimizer = draw_optimizer(random.Random(number), plain)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    net = make_net(number, norm, hook)
    trainer = DistributedTrainer(
        net,
        draw_optimizer(random.Random(number), net),
        shard_size=shard_size,
        precision="bf16" if bf16 else "fp32",
        zero=r.choice([0, 1, 2, 3]),
    )
    trainer.fit(batches, epochs=1, verbose=False)
    assert_same(values(net), values(plain))
    assert np.float32(trainer.last.loss / sizes[-1]) == np.float32(losses[-1])

    module = make_net(number, norm, hook)
    own = DistributedDataParallel(module, shard_size=shard_size)
    optimizer = draw_optimizer(random.Random(number), module)
    for batch in batches:
        optimizer.zero_grad()
        for x, y in own.shards(batch):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = F.cross_entropy(own(x), y)
            loss.backward()
        optimizer.step()
    assert_same(values(module), values(plain))


def test_a_gradient_hook_is_called_with_the_mean_in_every_shard():
    """In shards of 4, 4 and 2 samples; of a loss that is a sum as well."""
    batch = make_batch(1, 10)
    for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")):
        seen: list[torch.Tensor] = []
        net = make_net(0)
        net[-1].weight.register_hook(lambda g, seen=seen: seen.append(g.clone()))
        trainer = DistributedTrainer(
            net, torch.optim.SGD(net.parameters(), 0.0), loss, shard_size=4
        )
        trainer.fit([batch], epochs=1, verbose=False)
        seen_by_trainer = seen[-3:]  # after those of the check of the loss
        for k, gradient in enumerate(seen_by_trainer):
            x, y = (t[4 * k : 4 * k + 4] for t in batch)
            plain = make_net(0)
            F.cross_entropy(plain(x), y).backward()
            torch.testing.assert_close(gradient, plain[-1].weight.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("samples", [4, 8, 10, 11, 13])
def test_the_gradient_is_the_mean_over_the_samples(samples, reduction):
    x, y = make_batch(samples, samples)
    plain = make_net(2)
    loss = F.cross_entropy(plain(x), y)
    loss.backward()
    net = make_net(2)
    trainer = DistributedTrainer(
        net,
        torch.optim.SGD(net.parameters(), 0.0),
        nn.CrossEntropyLoss(reduction=reduction),
        shard_size=4,
    )
    trainer.fit([(x, y)], epochs=1, verbose=False)
    for name, parameter in plain.named_parameters():
        found = torch.from_numpy(trainer.last_gradients()[name])
        torch.testing.assert_close(found, parameter.grad, rtol=2e-6, atol=1e-8)
    assert trainer.last.loss / samples == pytest.approx(loss.item(), rel=1e-6)
    assert trainer.evaluate([(x, y)]).loss == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("samples", [8, 11, 14])
def test_statistics_are_the_mean_over_the_samples_of_the_shards(samples):
    x, y = make_batch(samples, samples)
    net = make_net(3, norm=True)
    expected = torch.zeros(8)
    for lo in range(0, samples, 4):
        shard = copy.deepcopy(net)
        shard(x[lo : lo + 4])
        expected += shard[1].running_var * len(x[lo : lo + 4]) / samples
    trainer = DistributedTrainer(net, torch.optim.SGD(net.parameters(), 0.0), shard_size=4)
    trainer.fit([(x, y)], epochs=1, verbose=False)
    torch.testing.assert_close(net[1].running_var, expected, rtol=2e-6, atol=1e-8)
    assert int(net[1].num_batches_tracked) == 1


def train_on_ranks(comm: Any, number: int, zero: int) -> tuple[str, float]:
    """Returns the hash of the weights, and the loss, after batches with smaller last shards."""
    r = random.Random(number)
    net = make_net(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    trainer = DistributedTrainer(
        net,
        optimizer,
        comm=comm,
        zero=zero,
        shard_size=r.choice([3, 4, 5]),
        clip_norm=r.choice([None, 0.3]),
    )
    batches = [make_batch(number + i, r.randint(2, 31)) for i in range(5)]
    history = trainer.fit(batches, epochs=1, verbose=False)
    return trainer.weights_sha256(), history.train_loss


@pytest.mark.parametrize("number", range(4))
def test_smaller_last_shards_have_the_same_bits_on_any_ranks(number):
    results = set()
    for ranks, zero in ((1, 0), (2, 1), (3, 2), (5, 3), (3, 3), (2, 2)):
        results.update(mock.run(ranks, train_on_ranks, number, zero))
    assert len(results) == 1


def train_as_own_loop(shard_size: int, batches: list[Any], scale: float = 1.0) -> nn.Module:
    module = make_net(5, norm=True)
    net = DistributedDataParallel(module, shard_size=shard_size)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        for x, y in net.shards(batch):
            (F.cross_entropy(net(x), y) * scale).backward()
        for parameter in net.parameters():
            parameter.grad /= scale
        optimizer.step()
    return module


def test_an_own_loop_is_the_trainer():
    """Also with a loss that is scaled by a power of two, as GradScaler does it."""
    batches = [make_batch(i, n) for i, n in enumerate([12, 11, 6, 3, 14])]
    net = make_net(5, norm=True)
    trainer = DistributedTrainer(
        net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), shard_size=4
    )
    trainer.fit(batches, epochs=1, verbose=False)
    for scale in (1.0, 2.0**16):
        assert_same(values(train_as_own_loop(4, batches, scale)), values(net))


def test_accumulation_is_one_larger_batch():
    """Two loops over shards before a step add up, each with the weights of its own shards."""
    halves = [make_batch(1, 7), make_batch(2, 7)]
    net = DistributedDataParallel(make_net(4), shard_size=4)
    for half in halves:
        for x, y in net.shards(half):
            F.cross_entropy(net(x), y).backward()
    plain = make_net(4)
    for x, y in halves:
        F.cross_entropy(plain(x), y).backward()
    for found, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=2e-6, atol=1e-8)
