"""What a callback changes of a loader's parts survives stops in an epoch and between two."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from odyssey import callbacks
from odyssey.errors import Stopped
from odyssey.torch import DistributedTrainer

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
Y = torch.arange(32) % 3


class Collate:
    """A collate function with a setting."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, samples: list) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = zip(*samples, strict=True)
        return torch.stack(inputs) * self.factor, torch.stack(targets)


class Grow(callbacks.Callback):
    """Raises the factor when an epoch starts, and stops the run after a step."""

    def __init__(self, collate: Collate, stop: int | None) -> None:
        self.collate = collate
        self.stop = stop
        self.rises = iter([0.1, 0.2, 0.3, 0.4])

    def on_epoch_start(self, context) -> None:
        self.collate.factor *= 1 + next(self.rises)

    def on_step_end(self, context) -> None:
        if context.steps == self.stop:
            context.stop = "the test"


def train(folder, stop: int | None = None, steps: int | None = None) -> tuple[str, float] | None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
    collate = Collate()
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    trainer = DistributedTrainer(net, optimizer, nn.CrossEntropyLoss(), shard_size=4)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X, Y),
        8,
        shuffle=True,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(3),
    )
    grow = Grow(collate, stop)
    try:
        trainer.fit(
            loader, epochs=3, steps=steps, callbacks=[grow], checkpoint_dir=folder, verbose=False
        )
    except Stopped:
        return None
    return trainer.weights_sha256(), collate.factor


@pytest.mark.parametrize(
    ("stop", "steps"), [(1, 4), (5, 8), (None, 4), (None, 3), (1, 5), (6, None), (8, None)]
)
def test_a_collate_function_keeps_what_epochs_set(stop, steps, tmp_path):
    whole = train(tmp_path / "whole")
    parts = tmp_path / "parts"
    if stop is not None:
        train(parts, stop=stop)
    if steps is not None:
        train(parts, steps=steps)
    assert train(parts) == whole
