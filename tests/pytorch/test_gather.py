"""Losses that look across the batch: found on the first batch, and computed over the outputs of
all shards.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if (
    not hasattr(importlib.util.find_spec("torch"), "origin")
    or importlib.util.find_spec("torch").origin is None
):
    pytest.skip("torch is not installed (extra [torch])", allow_module_level=True)

import torch
from pytorch.published import RUN
from torch import nn
from torch.nn import functional as F

from odyssey.errors import ConfigError
from odyssey.torch import DataLoader, DistributedTrainer, separable

G = torch.Generator().manual_seed(0)
PAIRS = torch.randn(32, 2, 8, generator=G)
X, Y = torch.randn(32, 10, generator=G), torch.arange(32) % 3
GROWING = X * torch.arange(32)[:, None]


def info_nce(out: torch.Tensor, y: Any) -> torch.Tensor:
    a, b = (F.normalize(t) for t in out.unbind(1))
    return F.cross_entropy(a @ b.T / 0.05, torch.arange(len(a)))


def barlow(out: torch.Tensor, y: Any) -> torch.Tensor:
    a, b = ((t - t.mean(0)) / t.std(0) for t in out.chunk(2, 1))
    return (a.T @ b / len(a) - torch.eye(a.shape[1])).square().sum()


def ranking(out: torch.Tensor, y: Any) -> torch.Tensor:
    s = out[:, 0]
    return F.softplus(s[None] - s[:, None])[y[:, None] > y[None]].mean()


def triplet(out: torch.Tensor, y: Any) -> torch.Tensor:
    d, same = torch.cdist(out, out), y[:, None] == y[None]
    return F.relu((d * same).max(1)[0] - (d + 1e9 * same).min(1)[0] + 1).mean()


def dice(out: torch.Tensor, y: Any) -> torch.Tensor:
    p = out.softmax(1)[:, 1]
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


class Experts(nn.Module):
    """A mixture of experts with a loss of their balance, which it keeps as an attribute."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.balance = factor, torch.zeros(())
        self.router, self.experts, self.head = nn.Linear(10, 4), nn.Linear(10, 40), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.router(x).softmax(-1)
        chosen = F.one_hot(p.argmax(-1), 4).float()
        self.balance = self.factor * 4 * (chosen.mean(0) * p.mean(0)).sum()
        return self.head(((p * chosen)[..., None] * self.experts(x).view(-1, 4, 10)).sum(1))


class Drawn(nn.Module):
    """Draws in eval mode as well, as a variational autoencoder may."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(10, 8), nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log = self.encode(x).chunk(2, 1)
        return self.decode(mean + torch.randn_like(mean) * torch.exp(log / 2)), mean, log


def evidence(out: Any, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out[0], y) - 0.5 * (1 + out[2] - out[1] ** 2 - out[2].exp()).mean()


class Speech(nn.Module):
    """Its outputs have the time first, as CTC has it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0]).log_softmax(-1).transpose(0, 1)


def ctc(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.ctc_loss(out, y, [len(out)] * out.shape[1], [3] * len(y))


class Inside(nn.Module):
    """Has autocast in its forward()."""

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = net, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype):
            out = self.net(x)
        return out.float()


class Casts(nn.Module):
    """Rounds in forward(), by a buffer of bfloat16 too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.linspace(0.5, 2, 8).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.bfloat16().float()).to(torch.bfloat16) * self.scale
        return self.last(torch.tanh(x).float())


class Frozen(nn.Module):
    """Its encoder takes torch's fused path in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


def rows(*between: nn.Module, out: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 8), *between, nn.ReLU(), nn.Linear(8, out))


ignoring = torch.where(torch.arange(32) % 5 < 3, -1, Y)
MEANS = {
    "cross entropy": (rows(nn.BatchNorm1d(8), nn.Dropout(0.5)), X, Y, nn.CrossEntropyLoss()),
    "smoothed": (rows(), X, Y, nn.CrossEntropyLoss(label_smoothing=0.1)),
    "few that count": (rows(), X, torch.where(torch.arange(32) % 8 == 1, 1, -1), nn.CrossEntropyLoss(ignore_index=-1)),
    "a divided sum": (rows(out=10), X, X, lambda o, y: (o - y).square().sum() / len(o)),
    "batchmean": (rows(), X, torch.rand(32, 3), lambda o, y: F.kl_div(o.log_softmax(1), y, reduction="batchmean")),
    "with a penalty": ((m := rows()), X, Y, lambda o, y: F.cross_entropy(o, y) + sum(p.norm() for p in m.parameters())),
    "a batch normalisation without statistics": (
        rows(nn.BatchNorm1d(8, track_running_stats=False)), X, Y, nn.CrossEntropyLoss(),
    ),
    "that draws": (Drawn(), X, X, evidence),
    "CTC": (Speech(), torch.randn(32, 9, 6), torch.randint(1, 5, (32, 3)), ctc),
    "CTC, as long as the shard": (Speech(), torch.randn(32, 16, 6), torch.randint(1, 5, (32, 3)), ctc),
    "nothing to learn": (rows(), X, Y, lambda o, y: (o * 0).sum()),
    "experts without balance": (Experts(0.0), X, Y, nn.CrossEntropyLoss()),
    "one weight": (nn.Linear(1, 1, bias=False), X[:, :1], X[:, 1:2] + 0.5, nn.MSELoss()),
    "autocast in forward()": (Inside(rows(), torch.bfloat16), X, Y, nn.CrossEntropyLoss()),
    "autocast to float16 in forward()": (Inside(rows(), torch.float16), X, Y, nn.CrossEntropyLoss()),
    "casts in forward()": (Casts(), X, Y, lambda o, y: F.cross_entropy(o.bfloat16(), y)),
    "in float64": (rows(), X, Y, lambda o, y: F.cross_entropy(o.double(), y)),
    "an encoder that is frozen": (Frozen(), torch.randn(32, 5, 8), Y, nn.CrossEntropyLoss()),
}  # fmt: skip
LOOKING = {
    "contrastive": (nn.Linear(8, 4), PAIRS, Y, info_nce),
    "decorrelation": (rows(), X, Y, lambda o, y: barlow(torch.cat([o, o * 2 + 1], 1), y)),
    "ranking": (rows(), X, torch.randn(32), ranking),
    "hard triplets": (rows(), X, Y, triplet),
    "dice of the batch": (rows(), X, Y == 1, dice),
    "logarithm of the mean": (rows(out=10), X, GROWING, lambda o, y: (o - y).square().mean().log()),
    "exponential of the mean": (
        rows(out=10),
        X,
        GROWING / 32,
        lambda o, y: (o - y).square().mean().exp(),
    ),
    "deviation over the batch": (
        rows(),
        X,
        Y,
        lambda o, y: F.cross_entropy(o, y) + F.relu(1 - o.std(0)).mean(),
    ),
    "autocast in forward(), contrastive": (
        Inside(nn.Linear(8, 4), torch.bfloat16),
        PAIRS,
        Y,
        info_nce,
    ),
    "root of the mean": (rows(out=10), X, GROWING, lambda o, y: (o - y).square().mean().sqrt()),
    "contrastive, with batch norm and dropout": (
        rows(nn.BatchNorm1d(8), nn.Dropout(), out=4),
        X,
        Y,
        triplet,
    ),
}


class_weights = torch.tensor([0.2, 1, 5])
WEIGHTED = {
    "class weights": (
        (rows(), X, Y, nn.CrossEntropyLoss(weight=class_weights)),
        lambda o, y: class_weights[y].sum(),
    ),
    "ignore_index": (
        (rows(), X, ignoring, nn.CrossEntropyLoss(ignore_index=-1)),
        lambda o, y: (y != -1).sum(),
    ),
    "a mask": (
        (rows(), X, Y, lambda o, y: (F.cross_entropy(o, y, reduction="none") * (y == 1)).sum() / (y == 1).sum()),
        lambda o, y: int((y == 1).sum()),
    ),
    "classes of pixels": (
        (nn.Conv1d(1, 3, 1), X[:, None], (X > X[:, :1]) * 101 - 100, nn.CrossEntropyLoss()),
        lambda o, y: (y != -100).sum(),
    ),
}  # fmt: skip


def lines(capsys, module: nn.Module, x: Any, y: Any, loss: Any, **settings: Any) -> list[str]:
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.0)
    settings = {"shard_size": 16, **settings}
    trainer = DistributedTrainer(module, optimizer, loss, metrics={}, **settings)
    trainer.fit([(x, y)], epochs=1, verbose=False)
    return [line for line in capsys.readouterr().err.splitlines() if "the loss is" in line]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_of_samples_is_let_be(capsys, kind, precision):
    assert lines(capsys, *MEANS[kind], precision=precision) == []
    if kind != "few that count":  # none does in one shard of 7, whose loss is NaN
        assert lines(capsys, *MEANS[kind], precision=precision, shard_size=7) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", WEIGHTED)
def test_a_mean_with_other_weights_than_the_samples_is_told(capsys, kind, precision):
    given, weight = WEIGHTED[kind]
    (line,) = lines(capsys, *given, precision=precision)
    assert "the loss is a weighted mean" in line
    assert "shards are weighted by their samples. In shards of 16 it is another loss" in line
    assert "use weight=" in line and "or shard_size=32" in line
    assert lines(capsys, *given, precision=precision, shard_size=32) == []
    for size in (4, 7, 16):
        assert lines(capsys, *given, precision=precision, shard_size=size, weight=weight) == []
    (line,) = lines(capsys, *given, precision=precision, weight=lambda o, y: o.square().sum())
    assert "shards are weighted by what weight= returns" in line


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", LOOKING)
def test_a_loss_that_looks_across_the_batch_is_told(capsys, kind, precision):
    (line,) = lines(capsys, *LOOKING[kind], precision=precision)
    assert (
        "In shards of 16 it is another loss than that of the batch of 32: give shard_size=32"
        in line
    )
    assert "or gather=True" in line
    assert lines(capsys, *LOOKING[kind], shard_size=32) == []  # that is the batch
    assert lines(capsys, *LOOKING[kind], gather=True) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("factor", [0.1, 0.01, 0.001])
def test_a_balance_of_experts_is_told(capsys, factor, precision):
    torch.manual_seed(3)
    module = Experts(factor)
    loss = lambda o, y: F.cross_entropy(o, y) + module.balance  # noqa: E731
    (line,) = lines(capsys, module, X, Y, loss, precision=precision)
    assert "is no mean over samples" in line


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sum_that_does_not_say_so_is_told(capsys, precision):
    (line,) = lines(
        capsys, rows(out=10), X, X, lambda o, y: (o - y).square().sum(), precision=precision
    )
    assert "the loss is a sum over samples" in line and "set its `reduction`" in line
    assert lines(capsys, rows(out=10), X, X, nn.MSELoss(reduction="sum"), precision=precision) == []


class Keeper(nn.Module):
    """Has everything that a look at the loss could change: drops, draws, statistics, buffers,
    attributes, lists.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.calls, self.seen, self.gain = 0, [], 1.0
        self.register_buffer("number", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.number[0] += 1  # nothing merges it: deterministic="warn"
        self.gain *= 1.01
        x = F.dropout(x, 0.3) + random.random() * float(np.random.rand())
        return self.last(F.dropout(self.norm(self.first(x)), 0.2, self.training)) * self.gain


def test_looking_changes_nothing(monkeypatch):
    held = []
    for look in (True, False):
        if not look:
            monkeypatch.setattr(separable, "looked_at", lambda *_: ("unknown", []))
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        np.random.standard_normal(), random.gauss(0, 1)
        module = Keeper()
        trainer = DistributedTrainer(
            module,
            torch.optim.Adam(module.parameters()),
            shard_size=5,
            metrics={},
            deterministic="warn",
        )
        trainer.fit([(X, Y)] * 2, epochs=2, verbose=False)
        drawn = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
        held.append((trainer.weights_sha256(), module.calls, module.seen, module.gain, drawn))
    assert held[0] == held[1]


def test_precisions_are_afterwards_what_they_were():
    """Also where the loss fails, and of products that may be rounded."""
    module = rows()

    def fails(both: Any) -> torch.Tensor:
        raise ValueError("no loss")

    for precision in ("medium", "highest"):
        torch.set_float32_matmul_precision(precision)
        for loss in (fails, lambda both: F.cross_entropy(module(both[0]), both[1])):
            kind, _ = separable.looked_at([module], loss, (X, Y))
            assert kind == ("unknown" if loss is fails else "mean")
            assert torch.get_float32_matmul_precision() == precision
            with torch.autocast("cpu", torch.bfloat16):
                assert module(X).dtype == torch.bfloat16
            assert X.bfloat16().dtype == torch.bfloat16


class Towers(nn.Module):
    """Two towers and a temperature, of tensors in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = rows(nn.BatchNorm1d(8), nn.Dropout(0.0)), rows()
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        a, b = F.normalize(self.a[:1](x)), F.normalize(self.b[:1](x))
        return {"a": a, "b": b, "scale": self.scale.exp(), "none": None}


def clip(out: dict[str, Any], y: torch.Tensor) -> torch.Tensor:
    logits = out["scale"] * out["a"] @ out["b"].T + (y[:, None] == y[None]).float()
    i = torch.arange(len(logits))
    return (F.cross_entropy(logits, i) + F.cross_entropy(logits.T, i)) / 2


@pytest.mark.parametrize("shard", [1, 3, 8, 11, 16])
@pytest.mark.parametrize(
    "kind", ["contrastive", "ranking", "hard triplets", "dice of the batch", "towers", "summed"]
)
def test_gathered_it_is_the_loss_of_the_whole_batch(kind, shard):
    module, x, y, loss = {
        **LOOKING,
        "towers": (Towers(), X, Y, clip),
        "summed": (rows(out=10), X, X, nn.MSELoss(reduction="sum")),
    }[kind]
    module.zero_grad()
    (value := loss(module(x), y)).backward()
    n = len(x) if kind == "summed" else 1
    expected = {name: p.grad / n for name, p in module.named_parameters() if p.grad is not None}
    for given in ([(x, y)], DataLoader(torch.utils.data.TensorDataset(x, y), 32, shard_size=shard)):
        trainer = DistributedTrainer(
            module,
            torch.optim.SGD(module.parameters(), 0.0),
            loss,
            metrics={},
            shard_size=shard,
            gather=True,
        )
        trainer.fit(given, epochs=1, verbose=False)
        assert trainer.last.loss / 32 * n == pytest.approx(
            float(value.detach()) / (32 / n if n > 1 else 1), rel=1e-5
        )
        found = trainer.last_gradients()
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        for name, gradient in expected.items():
            assert np.abs(found[name] - gradient.numpy()).max() <= 1e-5 * largest, name
        assert trainer.evaluate(given).loss == pytest.approx(
            float(loss(module.eval()(x), y).detach()) / n, rel=1e-5
        )
        module.train()


def test_what_cannot_be_gathered_is_refused_by_name():
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(10, 3)
            self.generator = random.Random(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.generator.random()

    cases = [
        (
            Speech(),
            torch.randn(32, 9, 6),
            torch.randint(1, 5, (32, 3)),
            ctc,
            "joins outputs and targets along",
        ),
        (Other(), X, Y, triplet, "gives other outputs when it runs again"),
        (
            rows(),
            X,
            Y,
            lambda o, y: torch.ones((), requires_grad=True) * 2,
            "does not depend on the outputs",
        ),
        (rows(), X, Y, lambda o, y: o[:, 0], "the loss of a shard is"),
    ]
    for module, x, y, loss, says in cases:
        with pytest.raises(ConfigError, match=says):
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            DistributedTrainer(module, optimizer, loss, metrics={}, shard_size=8, gather=True).fit(
                [(x, y)]
            )


PROGRAM = """
import torch, torch.nn as nn, torch.nn.functional as F
from odyssey import data
from odyssey.torch import DataLoader, DistributedTrainer

g = torch.Generator().manual_seed(0)
X = torch.randn(70, 16, generator=g)

def loss(o, y):
    a, b = (F.normalize(t) for t in o.chunk(2, 1))
    z = a @ b.T / 0.05
    return F.cross_entropy(z + y[:, None] * 0.1, torch.arange(len(z)))

for zero in (0, 1):
    for loader in ("torch", "odyssey.torch", "ours"):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 8))
        settings = dict(shard_size=6, metrics={}, gather=True, zero=zero)
        t = DistributedTrainer(m, torch.optim.AdamW(m.parameters()), loss, **settings)
        samples = torch.utils.data.TensorDataset(X, torch.arange(70.0))
        if loader == "ours":
            batches = data.DataLoader(data.arrays(X.numpy(), torch.arange(70.0).numpy()), 32)
        else:
            batches = (DataLoader if loader == "odyssey.torch" else torch.utils.data.DataLoader)(samples, 32)
        t.fit(batches, samples, epochs=2, verbose=False)
        sha, value = t.weights_sha256(), t.evaluate(samples).loss
        if t.comm.rank == 0:
            print(sha, t.last.loss, value)
"""


def test_gathered_bits_on_1_to_4_ranks(launch):
    (launch.folder / "program.py").write_text(PROGRAM)
    printed = []
    for ranks in (0, 2, 3, 4):
        done = launch.python("-W", "ignore", "program.py", ranks=ranks)
        assert done.returncode == 0, done.stderr
        assert "the loss is no mean" not in done.stderr
        printed.append(done.stdout)
    assert (
        len(set(printed)) == 1 and len(set(printed[0].splitlines())) == 1 and len(printed[0]) > 100
    )


FAILS = """
import torch, torch.nn as nn
from odyssey import comm
from odyssey.torch import DistributedTrainer

class Net(nn.Linear):
    fails = True

    def forward(self, x):
        if self.fails and comm.world().rank == 1:
            raise ValueError("a sample of rank 1")
        return super().forward(x)

torch.manual_seed(0)
m = Net(4, 2)
t = DistributedTrainer(m, torch.optim.SGD(m.parameters(), 0.1), lambda o, y: (o @ o.T).square().mean(), shard_size=4,
                       metrics={}, gather=True)
batch = (torch.randn(16, 4), torch.zeros(16))
before = t.weights_sha256()
try:
    t.fit([batch], epochs=1, verbose=False)
except Exception as e:
    print(comm.world().rank, type(e).__name__, str(e).splitlines()[0], before == t.weights_sha256(), flush=True)
Net.fails = False
t.fit([batch], epochs=1, verbose=False)
"""


def test_an_error_in_the_first_pass_ends_the_step_on_all_ranks(launch):
    (launch.folder / "program.py").write_text(FAILS)
    done = launch.python("-W", "ignore", "program.py", ranks=2)
    assert done.returncode == 0, done.stderr
    said = sorted(done.stdout.splitlines())
    assert said == [
        "0 CollectiveError [train] rank 1 failed in its part: ValueError: a sample of rank 1 True",
        "1 ValueError a sample of rank 1 True",
    ]


@pytest.mark.long
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torchvision", "timm", "transformers")),
    reason="torchvision, timm or transformers is not installed (extra [published])",
)
def test_no_false_alarm_on_published_models(launch):
    launch.environment.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    done = launch.python("-W", "ignore", RUN, Path(__file__).with_name("looked_at.py"), timeout=600)
    assert done.returncode == 0, done.stderr
    kinds = [line.split()[0] for line in done.stdout.splitlines()]
    assert len(kinds) == 48 and sorted(kinds) == ["mean"] * 44 + ["neither"] * 4, done.stdout
