"""The engine on many layouts with models of odd sizes, ranks being threads: what others found."""

from __future__ import annotations

import math

import numpy as np
import pytest

from odyssey import data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.errors import ConfigError, NumericsError
from odyssey.parallel.mesh import Mesh
from odyssey.train.trainer import DistributedTrainer

MNIST = data.load("mnist", train=True)


def odd(comm, model, optimizer, inputs, classes, batch, steps, settings):
    """Bytes of weights and of the optimizer's values after some steps on random numbers."""
    nn.manual_seed(1)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((batch * steps, inputs)).astype(np.float32)
    loader = data.DataLoader(
        data.arrays(x, rng.integers(0, classes, batch * steps), classes=classes), batch_size=batch
    )
    trainer = DistributedTrainer(model(), optimizer(), comm=comm, threads=1, **settings)
    trainer.fit(loader)
    state = trainer.training_state.optimizer_state()
    return trainer.weights_sha256(), {
        k: v.tobytes() for k, v in state.items() if isinstance(v, np.ndarray)
    }


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "optimizer",
    [lambda: optim.AdamW(lr=0.01), lambda: optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.1)],
)
def test_a_piece_of_a_shared_layer_ends_within_a_vector(optimizer, tp):
    """A rank's rows of one layer lie beside what it trains of the next: no update may run over
    (6 outputs: 3 and 3).
    """

    def model():
        return nn.Sequential(nn.Linear(50, 6), nn.Tanh(), nn.Linear(6, 10))

    given = model, optimizer, 50, 10, 64, 10
    (one,) = mock.run(1, odd, *given, {})
    assert mock.run(tp, odd, *given, {"mesh": Mesh(tp=tp)}) == [one] * tp


@pytest.mark.parametrize(
    "optimizer", [lambda: optim.SGD(lr=0.1, momentum=0.9), lambda: optim.Adam()]
)
def test_pieces_that_are_as_long_as_the_arena_with_their_padding(optimizer):
    """32 floats for a rank's 10 of 15 weights and 2 of 3 biases, as for all: but not at the same
    places.
    """
    given = (lambda: nn.Sequential(nn.Linear(5, 3))), optimizer, 5, 3, 22, 2
    (one,) = mock.run(1, odd, *given, {})
    assert mock.run(2, odd, *given, {"mesh": Mesh(tp=2)}) == [one] * 2


@pytest.mark.parametrize("zero", [2, 3])
def test_a_rank_that_owns_nothing_of_a_bucket(zero):
    def model():
        return nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 3))

    given = model, optim.Adam, 4, 3, 48, 2
    (one,) = mock.run(1, odd, *given, {"shard_size": 4})
    assert mock.run(3, odd, *given, {"shard_size": 4, "zero": zero}) == [one] * 3


def test_a_weight_with_two_biases_is_shared_by_ranks():
    class Biases(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.c(
                F.dropout(
                    self.b(F.dropout(F.tanh(self.a(x)), 0.2, self.training)), 0.2, self.training
                )
            )

    given = Biases, (lambda: optim.AdamW(lr=0.01)), 16, 5, 64, 2
    (one,) = mock.run(1, odd, *given, {})
    for tp in (2, 3):
        assert mock.run(tp, odd, *given, {"mesh": Mesh(tp=tp)}) == [one] * tp


@pytest.mark.parametrize("ranks,settings", [(1, {"execution": "eager"}), (2, {"mesh": Mesh(pp=2)})])
def test_gradients_of_subnormal_numbers(ranks, settings):
    """Where a probability is subnormal and a sample huge, both count: on every thread."""
    if F.exp(nn.Parameter(np.full(32, -88.0, np.float32))).data[0] == 0:
        pytest.skip("exp() of this instruction set has no subnormal results")

    def found(comm, settings):
        nn.manual_seed(1)
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2))
        for p, value in zip(model.parameters(), ([1.0], [0, 0], [0, -88.0]), strict=True):
            p.data[...] = np.reshape(np.float32(value), p.shape)
        x = np.full((8, 1), 1e37, np.float32)
        trainer = DistributedTrainer(
            model, optim.SGD(lr=0.5), comm=comm, shard_size=8, **{"threads": 1, **settings}
        )
        trainer.fit(data.DataLoader(data.arrays(x, np.zeros(8, int), classes=2), batch_size=8))
        return trainer.state_dict()["1.weight"].tobytes()

    (one,) = mock.run(1, found, {})
    moved = np.frombuffer(one, np.float32)
    assert moved[1] == pytest.approx(-0.5 * 1e37 * math.exp(-88), rel=0.01)  # exp(-88) is 6e-39
    assert mock.run(ranks, found, settings) == [one] * ranks


def test_a_last_step_that_cannot_be_shared_is_refused_before_the_first():
    def fit(comm, samples, steps=None, **more):
        trainer = DistributedTrainer(
            nn.LeNet5(), optim.SGD(), comm=comm, threads=1, shard_size=8, mesh=Mesh(tp=2)
        )
        loader = data.DataLoader(MNIST.take(samples), batch_size=16, **more)
        try:
            trainer.fit(loader, steps=steps)
        except ConfigError as error:
            return str(error), trainer.steps
        return trainer.steps

    (text, steps), _ = mock.run(2, fit, 35)
    assert (
        text.startswith("[tp] 35 samples in steps of 16 leave 3 for an epoch's last step")
        and steps == 0
    )
    assert mock.run(2, lambda comm: fit(comm, 35, drop_last=True)) == [2, 2]
    assert mock.run(2, fit, 35, 2) == [2, 2]
    assert mock.run(2, fit, 37) == [3, 3]


def test_a_last_checkpoint_that_cannot_be_written_ends_all_ranks(tmp_path):
    """A weight has overflowed in the last step: rank 0 alone finds it when it saves, and no rank
    waits for it.
    """

    def fit(comm):
        nn.manual_seed(0)
        trainer = DistributedTrainer(
            nn.Sequential(nn.Linear(2, 2)), optim.SGD(lr=3e38), comm=comm, threads=1
        )
        x = np.full((64, 2), 1e3, np.float32)
        loader = data.DataLoader(data.arrays(x, np.arange(64) % 2), batch_size=64)
        with pytest.raises(NumericsError, match="is not saved"):
            trainer.fit(loader, epochs=3, steps=1, checkpoint_dir=tmp_path, checkpoint_every=100)
        return True

    assert mock.run(2, fit) == [True, True]
