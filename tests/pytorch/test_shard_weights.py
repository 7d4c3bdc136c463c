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
from odyssey.errors import ConfigError  # noqa: E402
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
        torch.testing.assert_close(found, parameter.grad, rtol=2e-6, atol=1e-7)
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


IGNORED = -100
WORDS = 11


def make_text(seed: int, samples: int, empty: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns texts of random lengths, with labels that are IGNORED after their end.

    empty: True if some texts have no label.
    """
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (samples, 9), generator=draw)
    lengths = torch.randint(0 if empty else 1, 10, (samples,), generator=draw)
    lengths[0] = 9
    return ids, ids.flip(1).masked_fill(torch.arange(9) >= lengths[:, None], IGNORED)


def make_text_net(seed: int) -> nn.Module:
    with MAKING:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS)
        )


def token_loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=IGNORED)


def masked_loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the same as token_loss; its gradient is NaN if no label counts."""
    mask = y != IGNORED
    losses = F.cross_entropy(out.flatten(0, 1), y.clamp(min=0).flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def count_tokens(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (y != IGNORED).sum()


@pytest.mark.parametrize("loss", [token_loss, masked_loss])
@pytest.mark.parametrize("shard_size", [1, 2, 3, 8])
@pytest.mark.parametrize("number", range(3))
def test_a_token_mean_is_that_of_the_batch(number, shard_size, loss):
    batch = make_text(number, 13)
    plain = make_text_net(number)
    whole_loss = loss(plain(batch[0]), batch[1])
    whole_loss.backward()
    net = make_text_net(number)
    trainer = DistributedTrainer(
        net,
        torch.optim.SGD(net.parameters(), 0.0),
        loss,
        metrics={},
        shard_size=shard_size,
        weight=count_tokens,
    )
    trainer.fit([batch], epochs=1, verbose=False)
    for name, parameter in plain.named_parameters():
        found = torch.from_numpy(trainer.last_gradients()[name])
        torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-8)
    assert trainer.last.loss / 13 == pytest.approx(whole_loss.item(), rel=1e-6)
    assert trainer.evaluate([batch]).loss == pytest.approx(whole_loss.item(), rel=1e-6)


def train_text_on_ranks(comm: Any, number: int, zero: int) -> tuple[str, float, float]:
    r = random.Random(number)
    net = make_text_net(0)
    trainer = DistributedTrainer(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        r.choice([token_loss, masked_loss]),
        metrics={},
        comm=comm,
        zero=zero,
        shard_size=r.choice([1, 2, 3]),
        clip_norm=r.choice([None, 0.3]),
        weight=count_tokens,
    )
    batches = [make_text(number + i, r.randint(2, 15)) for i in range(5)]
    history = trainer.fit(batches, epochs=1, verbose=False)
    return trainer.weights_sha256(), history.train_loss, trainer.evaluate(batches).loss


@pytest.mark.parametrize("number", range(4))
def test_token_means_have_the_same_bits_on_any_ranks(number):
    """Some shards have no label that counts."""
    results = set()
    for ranks, zero in ((1, 0), (2, 1), (3, 2), (5, 3), (2, 3)):
        results.update(mock.run(ranks, train_text_on_ranks, number, zero))
    assert len(results) == 1


def test_the_number_of_samples_as_weight_changes_no_bit():
    batches = [make_batch(i, n) for i, n in enumerate([12, 11, 6, 3, 14])]
    hashes = set()
    for weight in (None, lambda out, y: len(y)):
        net = make_net(5, norm=True)
        trainer = DistributedTrainer(
            net, torch.optim.Adam(net.parameters()), shard_size=4, weight=weight
        )
        trainer.fit(batches, epochs=1, verbose=False)
        hashes.add(trainer.weights_sha256())
    assert len(hashes) == 1


def test_a_batch_without_a_weight_is_not_finite():
    ids, labels = make_text(1, 6)
    net = make_text_net(1)
    trainer = DistributedTrainer(
        net,
        torch.optim.SGD(net.parameters(), 0.1),
        token_loss,
        metrics={},
        shard_size=2,
        weight=count_tokens,
        nonfinite="skip",
    )
    before = trainer.weights_sha256()
    trainer.fit([(ids, torch.full_like(labels, IGNORED))], epochs=1, verbose=False)
    assert trainer.weights_sha256() == before
    trainer.fit([(ids, labels)], epochs=1, verbose=False)
    assert trainer.weights_sha256() != before


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda out, y: y != IGNORED, r"returns a tensor of shape \(2, 9\); return one number"),
        (lambda out, y: None, "returns a NoneType; return one number"),
        (lambda out, y: -1, "returns -1.0 for a shard; return a finite number from 0"),
        (lambda out, y: float("nan"), "returns nan for a shard"),
    ],
)
def test_a_weight_that_is_no_number_is_an_error(weight, message):
    net = make_text_net(1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    trainer = DistributedTrainer(
        net, optimizer, token_loss, metrics={}, shard_size=2, weight=weight
    )
    with pytest.raises(ConfigError, match=message):
        trainer.fit([make_text(1, 6)], epochs=1, verbose=False)


def test_what_has_no_use_for_a_weight_is_an_error():
    net = make_text_net(1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for settings, message in (
        ({"weight": 3}, "weight is 3; use a function"),
        ({"weight": count_tokens, "gather": True}, "can't be combined with gather=True"),
        (
            {"weight": count_tokens, "loss": nn.CrossEntropyLoss(reduction="sum")},
            "use reduction='mean'",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            DistributedTrainer(net, optimizer, **settings)


class Config:
    """The part of a Hugging Face configuration that says what a model is."""

    model_type = "small"
    is_encoder_decoder = False


class TextModel(nn.Module):
    """A model that holds its loss, as those of Hugging Face do."""

    first = 1  # label of a text that counts: each token predicts the next

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.net = make_text_net(7)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(ids)
        used = labels[:, self.first :]
        return {"loss": token_loss(logits[:, : used.shape[1]], used), "logits": logits}


class SmallForCausalLM(TextModel):
    pass


class SmallForMaskedLM(TextModel):
    first = 0


@pytest.mark.parametrize("kind", [SmallForCausalLM, SmallForMaskedLM, TextModel])
def test_a_model_with_a_loss_counts_its_labels_by_itself(capsys, kind):
    """A class that isn't known is weighted by its samples, and odyssey prints a line."""
    ids, labels = make_text(3, 14)
    whole_loss = kind()(ids, labels)["loss"].item()
    module = kind()
    optimizer = torch.optim.SGD(module.parameters(), 0.0)
    trainer = DistributedTrainer(module, optimizer, metrics={}, shard_size=4)
    trainer.fit([{"ids": ids, "labels": labels}], epochs=1, verbose=False)
    error = abs(trainer.last.loss / 14 - whole_loss)
    line = "the loss is a weighted mean" in capsys.readouterr().err
    assert line == (kind is TextModel)
    assert error > 1e-3 if kind is TextModel else error < 1e-6


def run_own_text_loop(comm: Any, shard_size: int, loss: Any) -> tuple[bytes, float]:
    """Returns the weights after two steps over texts, and the last loss."""
    net = DistributedDataParallel(make_text_net(4), shard_size=shard_size, comm=comm)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(2):
        losses = []
        for x, y in net.shards(make_text(number, 13), lambda shard: count_tokens(None, shard[1])):
            value = loss(net(x), y)
            value.backward()
            losses.append((value, (y != IGNORED).sum()))
        optimizer.step()
        optimizer.zero_grad()
        mean = net.mean(losses)
    return b"".join(value.tobytes() for value in values(net.module).values()), mean


@pytest.mark.parametrize("loss", [token_loss, masked_loss])
@pytest.mark.parametrize("shard_size", [1, 3])
def test_an_own_loop_with_weights_is_the_trainer(shard_size, loss):
    """On one rank; with shards without a label, whose gradients are NaN or 0."""
    net = make_text_net(4)
    trainer = DistributedTrainer(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        loss,
        metrics={},
        shard_size=shard_size,
        weight=count_tokens,
    )
    trainer.fit([make_text(number, 13) for number in range(2)], epochs=1, verbose=False)
    ((found, mean),) = mock.run(1, run_own_text_loop, shard_size, loss)
    assert found == b"".join(value.tobytes() for value in values(net).values())
    assert mean == pytest.approx(trainer.last.loss / 13, rel=1e-6)


def test_a_weight_of_an_own_loop_that_is_no_number_is_an_error():
    net = DistributedDataParallel(make_text_net(1), shard_size=2)
    with pytest.raises(ConfigError, match="weight= returns a tensor of shape"):
        for _ in net.shards(make_text(1, 6), lambda shard: shard[1] != IGNORED):
            pass
