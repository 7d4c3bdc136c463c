"""A loss that compares samples with each other is told of at the first step, in every layout; no
other one is.
"""

from __future__ import annotations

import numpy as np
import pytest
from parallel.test_zero_memory import IMAGES, ROWS, TEXTS, batch_of

from odyssey import DistributedTrainer, Mesh, data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.nn import PipelineParallel, Stage
from odyssey.train.stepper import EngineStepper

X = np.random.default_rng(0).standard_normal((24, 6), np.float32)
Y = np.random.default_rng(1).integers(0, 4, 24)


def similar(z, y):
    return ((z @ z.T) ** 2).mean()


def info_nce(z, y):
    """Each sample's own similarity against those to all of the shard."""
    s = z @ z.T * 0.5
    return (F.log(F.exp(s).sum(1)) - (z * z).sum(1) * 0.5).mean()


def spread(z, y):
    return ((z - z.mean(0)) ** 2).mean()


def root(z, y):
    return F.sqrt(F.mse_loss(z, z.detach() * 0.5))


ACROSS = (similar, info_nce, spread, root)
MEANS = (
    lambda z, y: F.cross_entropy(z, y),
    lambda z, y: F.cross_entropy(z, y) + 0.1 * (z * z).mean(),
    lambda z, y: (z * z).sum(),
    lambda z, y: F.log_softmax(z)[:, 0].mean(),
    lambda z, y: (z * 1e4).mean(),
    lambda z, y: z.mean() * 1e-6,
    lambda z, y: (z - z.mean(1, True)).abs().mean(),
)


class Net(nn.Module):
    """With statistics and dropout, which the look must leave as they are."""

    def __init__(self, loss) -> None:
        self.a, self.norm, self.dropout, self.b = (
            nn.Linear(6, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.3),
            nn.Linear(16, 4),
        )
        self.of_a_batch = loss

    def forward(self, x):
        return self.b(self.dropout(F.relu(self.norm(self.a(x)))))


def trained(comm, loss, **settings):
    """(weights, lines that were said) after three steps."""
    nn.manual_seed(3)
    settings = {"shard_size": 4, "threads": 1, "device": "cpu", **settings}
    trainer = DistributedTrainer(Net(None), optim.Adam(lr=0.01), loss=loss, comm=comm, **settings)
    lines = []
    trainer.reporter.say = lines.append
    for k in range(3):
        order = np.random.default_rng(k).permutation(24)
        trainer.train_step(
            next(iter(data.DataLoader(data.arrays(X, Y), batch_size=24, sampler=order.tolist())))
        )
    state = trainer.state_dict()  # on all ranks
    return b"".join(np.ascontiguousarray(a).tobytes() for _, a in sorted(state.items())), lines


def told(lines):
    return [line for line in lines if "no mean over samples" in line]


LAYOUTS = [
    {},
    {"zero": 1},
    {"zero": 3},
    {"execution": "eager"},
    {"precision": "bf16"},
    {"num_gpus": 4},
    {"mesh": Mesh(tp=2), "shard_size": 8},
]


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
@pytest.mark.parametrize("loss", ACROSS, ids=lambda f: f.__name__)
def test_a_loss_across_the_batch_is_told(loss, settings, monkeypatch):
    found = mock.run(2, lambda comm: trained(comm, loss, **settings))
    assert len(told(found[0][1])) == 1 and "Give shard_size=24" in told(found[0][1])[0]
    monkeypatch.setattr(EngineStepper, "check_loss", lambda *_: None)
    unlooked = mock.run(2, lambda comm: trained(comm, loss, **settings))
    assert not told(unlooked[0][1])
    assert [weights for weights, _ in found] == [weights for weights, _ in unlooked]


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_a_mean_is_not(settings):
    for loss in MEANS:
        for _, lines in mock.run(2, lambda comm, loss=loss: trained(comm, loss, **settings)):
            assert not told(lines)


def test_on_a_pipeline(monkeypatch):
    def run(comm, loss):
        nn.manual_seed(0)
        first, second = Stage([nn.Linear(6, 8), F.tanh]), Stage([nn.Linear(8, 4)])
        model = PipelineParallel([first, second], micro_batch_size=8)
        trainer = DistributedTrainer(
            model, optim.SGD(), loss=loss, comm=comm, threads=1, mesh=Mesh(pp=2)
        )
        lines = []
        trainer.reporter.say = lines.append
        trainer.train_step(next(iter(data.DataLoader(data.arrays(X, Y), batch_size=24))))
        return lines

    assert told(mock.run(2, lambda comm: run(comm, similar))[0])
    assert not told(mock.run(2, lambda comm: run(comm, MEANS[0]))[0])


def test_one_shard_is_the_batch():
    assert not told(mock.run(1, lambda comm: trained(comm, similar, shard_size=24))[0][1])


@pytest.mark.parametrize("name", [*IMAGES, *TEXTS, *ROWS])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_built_in_model_is_told(name, precision):
    nn.manual_seed(0)
    model = {**TEXTS, **ROWS}.get(name, lambda: nn.models.build(name, IMAGES[name]))()
    loss = getattr(model, "loss", None) or nn.CrossEntropyLoss()
    looked, settings = [], {"shard_size": 4, "threads": 1, "device": "cpu", "precision": precision}
    trainer = DistributedTrainer(
        model, optim.SGD(lr=0.01), loss=lambda y, t: loss(y, t), **settings
    )
    trainer.reporter.say = looked.append
    trainer.train_step(batch_of(name, 10))
    assert not told(looked)
    # it was looked at, and nothing is kept
    assert (
        not trainer.stepper.evaluation_engine.runners
        and not trainer.stepper.evaluation_engine.storage.arrays
    )
