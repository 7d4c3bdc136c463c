"""Batch norm and ResNet in trainings: the same bits on any layout, checkpoints, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.core.tensor import Tensor
from odyssey.errors import ConfigError
from odyssey.parallel.mesh import Mesh

RNG = np.random.default_rng(0)
DATA = data.arrays(
    RNG.standard_normal((72, 3, 6, 6)).astype(np.float32), RNG.integers(0, 5, 72), classes=5
)


class Block(nn.Module):
    """As a user writes it: layers as attributes, one that may be None, a function of the input
    added.
    """

    def __init__(self, i: int, o: int, stride: int = 1) -> None:
        super().__init__()
        self.c1, self.b1 = (
            nn.Conv2d(i, o, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(o),
        )
        self.c2, self.b2 = nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o)
        plain = stride == 1 and i == o
        self.down = (
            None
            if plain
            else nn.Sequential(nn.Conv2d(i, o, 1, stride=stride, bias=False), nn.BatchNorm2d(o))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.b2(self.c2(F.relu(self.b1(self.c1(x)))))
        return F.relu(y + (self.down(x) if self.down is not None else x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(3, 6, 2), Block(6, 6))
        self.fc1, self.norm, self.fc2 = nn.Linear(54, 12), nn.BatchNorm1d(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.norm(self.fc1(F.flatten(self.body(x))))))


def trainer(comm=None, net=Net, **settings) -> DistributedTrainer:
    nn.manual_seed(3)
    how = {"shard_size": 16, "threads": 1, "device": "cpu", "backend": "local", **settings}
    if comm is not None:
        how["comm"] = comm
    return DistributedTrainer(net(), optim.SGD(lr=0.05, momentum=0.9, weight_decay=0.01), **how)


def train(comm=None, **settings) -> tuple[str, float]:
    """Steps of 48 and 24 samples, the last shard being half full.

    Running statistics are among the weights.
    """
    made = trainer(comm, **settings)
    for batch in data.DataLoader(DATA, 48, shuffle=True, seed=1):
        made.train_step(batch)
    return made.weights_sha256(), made.evaluate(DATA).loss


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {"execution": "eager"}),
        (1, {"threads": 2, "num_gpus": 3}),
        *((n, {}) for n in (2, 3, 4)),
        *((3, {"zero": z, "bucket_size_mb": 0.002}) for z in (1, 2, 3)),
        (3, {"zero": 2, "clip_norm": 0.3}),
        (2, {"mesh": Mesh(pp=2)}),
        (4, {"mesh": Mesh(pp=2, dp=2), "zero": 1, "clip_norm": 0.3}),
        (2, {"mesh": Mesh(tp=2)}),
        (4, {"mesh": Mesh(tp=2, pp=2), "clip_norm": 0.3}),
        (3, {"shard_size": 3}),
        (2, {"precision": "fp16"}),
        (4, {"reduction": "hierarchical"}),
    ],
    ids=str,
)
def test_the_same_bits(ranks, settings):
    of_bits = {k: v for k, v in settings.items() if k in ("clip_norm", "shard_size", "precision")}
    found = (
        mock.run(ranks, lambda comm: train(comm, **settings)) if ranks > 1 else [train(**settings)]
    )
    assert set(found) == {train(**of_bits)}


def test_running_statistics_are_the_mean_over_samples_of_the_shards():
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.BatchNorm2d(3, momentum=0.25), nn.Linear(108, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(F.flatten(self.norm(x)))

    made = trainer(net=Norm)
    (batch,) = data.DataLoader(DATA.take(40), 40)
    made.train_step(batch)
    x, state = DATA.images[:40], made.state_dict()
    shards = [x[:16], x[16:32], x[32:]]
    mean = sum(len(s) * s.mean((0, 2, 3), dtype=np.float64) for s in shards) / 40
    var = sum(len(s) * s.var((0, 2, 3), dtype=np.float64, ddof=1) for s in shards) / 40
    np.testing.assert_allclose(state["norm.running_mean"], 0.25 * mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state["norm.running_var"], 0.75 + 0.25 * var, rtol=1e-5)
    assert state["norm.num_batches_tracked"] == 1
    assert (
        "norm.running_mean" not in made.last_gradients() and "norm.weight" in made.last_gradients()
    )


def test_stopped_and_resumed_on_other_ranks(tmp_path):
    def fit(comm, epochs: int, **settings) -> str:
        made = trainer(comm, **settings)
        made.fit(
            data.DataLoader(DATA, 48, shuffle=True, seed=1), epochs=epochs, checkpoint_dir=tmp_path
        )
        return made.weights_sha256()

    whole = trainer()
    whole.fit(data.DataLoader(DATA, 48, shuffle=True, seed=1), epochs=3)
    mock.run(3, lambda comm: fit(comm, 1, zero=2))
    assert set(mock.run(2, lambda comm: fit(comm, 3, mesh=Mesh(pp=2)))) == {whole.weights_sha256()}


def test_an_optimizer_that_was_made_first_takes_the_buffers_in():
    nn.manual_seed(3)
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    made = DistributedTrainer(
        model, optimizer, shard_size=16, threads=1, device="cpu", backend="local"
    )
    other = trainer()
    for t in (made, other):
        for batch in data.DataLoader(DATA, 48, shuffle=True, seed=1):
            t.train_step(batch)
    assert made.weights_sha256() == other.weights_sha256()


@pytest.mark.parametrize(
    "settings", [{"compression": "topk"}, {"reduction": "async_parameter_server"}], ids=str
)
def test_what_cannot_keep_running_statistics_is_refused(settings):
    def refused(comm) -> str:
        with pytest.raises(ConfigError, match="running statistics"):
            trainer(comm, **settings)

    mock.run(2, refused)


def test_resnet18_takes_a_step():
    images = RNG.standard_normal((6, 3, 8, 8)).astype(np.float32)
    model = nn.models.build("resnet18", sample_shape=(3, 8, 8), classes=4)
    made = DistributedTrainer(
        model, optim.SGD(lr=0.1), shard_size=6, threads=1, device="cpu", backend="local"
    )
    (batch,) = data.DataLoader(data.arrays(images, [0, 1, 2, 3, 0, 1], classes=4), 6)
    loss, _ = made.train_step(batch)
    assert 0.5 < loss / 6 < 5 and made.state_dict()["layer4.1.bn2.num_batches_tracked"] == 1


class Normed(nn.Module):
    """Norms that are made of ops, whose parameters have ops in the backward pass alone, where a
    cut might fall.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.conv2, self.norm2 = nn.Conv2d(6, 4, 3), nn.GroupNorm(1, 4)
        self.fc1, self.norm3, self.fc2 = nn.Linear(64, 9), nn.RMSNorm(9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.tanh(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return self.fc2(F.relu(self.norm3(self.fc1(F.flatten(x)))))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_norms_made_of_ops_in_stages(pp, schedule):
    settings = {"mesh": Mesh(pp=pp), "pipeline_schedule": schedule}
    assert set(mock.run(pp, lambda comm: train(comm, net=Normed, **settings))) == {
        train(net=Normed)
    }
