"""Validation data that differ between ranks, or from those of a checkpoint."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from odyssey import DistributedTrainer, callbacks, data, nn, optim
from odyssey.comm import mock
from odyssey.errors import ConfigError, Stopped

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(40, 6)).astype(np.float32)
Y = (np.arange(40) % 3).astype(np.int64)
LINE = "the validation data aren't those"


class Stop(callbacks.Callback):
    """Stops after a step, and counts the data set's strength up, which is no other data set."""

    def __init__(self, stop: int | None, shared: Any) -> None:
        self.stop = stop
        self.shared = shared

    def on_epoch_start(self, context) -> None:
        if hasattr(self.shared, "strength"):
            self.shared.strength += 1.0

    def on_step_end(self, context) -> None:
        if context.steps == self.stop:
            context.stop = "the test"


class Rows:
    """A data set of the user's own."""

    classes = 3
    strength = 1.0

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int):
        return X[self.numbers[i]] * np.float32(self.strength), int(Y[self.numbers[i]])


def torchs(numbers: np.ndarray, kind: str) -> Any:
    torch = pytest.importorskip("torch")
    from odyssey.torch import DataLoader

    whole = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    if kind == "torch, subset":
        return torch.utils.data.DataLoader(torch.utils.data.Subset(whole, numbers.tolist()), 10)
    rows = torch.utils.data.TensorDataset(
        torch.from_numpy(X[numbers]), torch.from_numpy(Y[numbers])
    )
    if kind == "torch, tensors":
        return torch.utils.data.DataLoader(rows, 10)
    return DataLoader(rows, 10)


LOADERS = {
    "arrays": lambda n: data.DataLoader(data.arrays(X[n], Y[n], classes=3), 10),
    "data set": Rows,
    "loader of a data set": lambda n: data.DataLoader(Rows(n), 10),
    "batches": lambda n: [(X[part], Y[part]) for part in np.array_split(n, 2)],
    "torch, subset": lambda n: torchs(n, "torch, subset"),
    "torch, tensors": lambda n: torchs(n, "torch, tensors"),
    "torch, odyssey": lambda n: torchs(n, "torch, odyssey"),
}


def trainer_for(kind: str, **options: Any) -> Any:
    if not kind.startswith("torch"):
        nn.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 3))
        return DistributedTrainer(model, optim.SGD(lr=0.1), shard_size=4, **options)
    torch = pytest.importorskip("torch")
    from odyssey.torch import DistributedTrainer as ModuleTrainer

    torch.manual_seed(0)
    module = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    return ModuleTrainer(module, optimizer, torch.nn.CrossEntropyLoss(), shard_size=4, **options)


def fit(kind: str, numbers: np.ndarray, stop: int | None = None, **options: Any) -> None:
    validation = LOADERS[kind](numbers)
    shared = getattr(validation, "dataset", validation)
    trainer = trainer_for(kind)
    loader = data.DataLoader(data.arrays(X, Y, classes=3), 20, shuffle=True)
    with contextlib.suppress(Stopped):
        trainer.fit(loader, validation, epochs=2, callbacks=[Stop(stop, shared)], **options)


@pytest.mark.parametrize("kind", LOADERS)
def test_other_validation_data_at_a_resume_are_reported(kind, tmp_path, capfd):
    first = np.arange(20)
    for name, numbers, told in (
        ("same", first, None),
        ("others", first + 20, "other samples of the same number"),
        ("fewer", first[:15], "20 samples before, 15 now"),
    ):
        folder = tmp_path / name
        fit(kind, first, stop=3, checkpoint_dir=folder)
        capfd.readouterr()
        fit(kind, numbers, checkpoint_dir=folder)
        printed = "".join(capfd.readouterr())
        assert "resumed from" in printed
        assert (told or LINE) in printed if told else LINE not in printed


@pytest.mark.parametrize("kind", ["arrays", "data set", "batches", "torch, subset"])
def test_validation_data_of_another_length_on_a_rank_raise_an_error(kind):
    if kind.startswith("torch"):
        pytest.importorskip("torch")

    def train(comm) -> None:
        trainer = trainer_for(kind, comm=comm)
        loader = data.DataLoader(data.arrays(X, Y, classes=3), 20)
        trainer.fit(loader, LOADERS[kind](np.arange(40 - comm.rank)), epochs=1, verbose=False)

    with pytest.raises(ConfigError, match="number of samples of the validation set of rank 1"):
        mock.run(2, train)
