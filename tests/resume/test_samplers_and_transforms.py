"""Samplers and loaders that remember or draw, and a transform that callbacks change, survive stops
anywhere.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import DistributedTrainer, callbacks, data, nn, optim
from odyssey.errors import Stopped

random = np.random.default_rng(0)
X = random.normal(size=(24, 6)).astype(np.float32)
Y = (np.arange(24) % 3).astype(np.int64)
EPOCHS, STEPS_PER_EPOCH = 3, 3


class Remembers:
    """A sampler whose order depends on all epochs before."""

    def __init__(self) -> None:
        self.epochs = 0
        self.random = np.random.default_rng(7)

    def __len__(self) -> int:
        return len(X)

    def __iter__(self):
        self.epochs += 1
        return iter(np.roll(self.random.permutation(len(X)), self.epochs).tolist())


class Draws:
    """A sampler that draws each order from a generator of the process."""

    def __len__(self) -> int:
        return len(X)

    def __iter__(self):
        return iter(np.random.permutation(len(X)).tolist())


class DrawsInSetEpoch(Draws):
    """A sampler that draws an order when it receives an epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.order = np.random.permutation(len(X)).tolist()

    def __iter__(self):
        return iter(self.order)


class Batches:
    """An iterable that draws its batches from a generator that it holds."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(3)

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def __iter__(self):
        for _ in range(STEPS_PER_EPOCH):
            chosen = self.random.integers(0, len(X), 8)
            yield X[chosen], Y[chosen]


SAMPLERS = {"sampler": Remembers, "draws": Draws, "draws in set_epoch": DrawsInSetEpoch}


class Scale:
    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, sample, rng):
        return sample * np.float32(self.factor)


class Change(callbacks.Callback):
    """Changes the transform at one event, and stops after a step."""

    def __init__(self, transform: Scale, event: str, stop: int | None) -> None:
        self.transform = transform
        self.event = event
        self.stop = stop

    def on_step_end(self, context) -> None:
        if self.event == "step":
            self.transform.factor *= 0.9
        if context.steps == self.stop:
            context.stop = "the test"

    def on_epoch_end(self, context) -> None:
        if self.event == "epoch":
            self.transform.factor *= 0.7


def train_native(loader, hooks, fit) -> str:
    nn.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3))
    trainer = DistributedTrainer(model, optim.SGD(model.parameters(), 0.1))
    trainer.fit(loader, callbacks=hooks, epochs=EPOCHS, verbose=False, **fit)
    return trainer.weights_sha256()


def train_torch(loader, hooks, fit) -> str:
    torch = pytest.importorskip("torch")
    from odyssey.torch import DistributedTrainer

    torch.manual_seed(0)
    module = torch.nn.Linear(6, 3)
    trainer = DistributedTrainer(
        module,
        torch.optim.SGD(module.parameters(), 0.1),
        torch.nn.CrossEntropyLoss(),
        shard_size=4,
    )
    trainer.fit(loader, callbacks=hooks, epochs=EPOCHS, verbose=False, **fit)
    return trainer.weights_sha256()


def train(train_with, kind: str, stop: int | None = None, **fit) -> str | None:
    transform = Scale()
    sampler = SAMPLERS[kind]() if kind in SAMPLERS else None
    loader = data.DataLoader(
        data.arrays(X, Y),
        len(X) // STEPS_PER_EPOCH,
        shuffle=sampler is None,
        sampler=sampler,
        transform=None if sampler is not None else transform,
        prefetch=0 if kind == "step" else 2,
    )
    if kind == "batches":
        loader = Batches()
    try:
        return train_with(loader, [Change(transform, kind, stop)], fit)
    except Stopped:
        return None


@pytest.mark.parametrize("train_with", [train_native, train_torch])
@pytest.mark.parametrize("kind", [*SAMPLERS, "batches", "epoch", "step"])
@pytest.mark.parametrize("every", [1, None])
def test_a_stopped_run_continues_with_the_same_weights(every, kind, train_with, tmp_path):
    whole = train(train_with, kind)
    for stop in range(1, EPOCHS * STEPS_PER_EPOCH):
        saving = {"checkpoint_dir": tmp_path / str(stop), "checkpoint_every": every}
        train(train_with, kind, stop, **saving)
        assert train(train_with, kind, **saving) == whole, stop
