"""Loaders with a state, and loaders that keep their workers, continue where they were."""

from __future__ import annotations

import importlib.util
import random
import shutil

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed (extra [torch])", allow_module_level=True)

import torch
from resume.stateful import SHAPES, Drawing, Skipping, Stream
from torch import nn
from torch.utils import data

from odyssey import callbacks
from odyssey.comm import mock
from odyssey.data import Batch, arrays
from odyssey.errors import Stopped
from odyssey.torch import DistributedTrainer

EPOCHS = 3


class DrawingTorch(Stream):
    """Draws its samples from the generator of torch."""

    def read(self):
        x, y = super().read()
        return torch.from_numpy(x) + torch.randn(()), torch.from_numpy(y)


class SkippingTorch(Skipping):
    """Shuffles with the generator of torch."""

    def draw(self):
        return torch.randperm(self.length).tolist()


class Workers(data.DataLoader):
    """A loader of torch that counts its batches, and skips those that were used."""

    def __init__(self, length):
        self.used = 0
        generator = torch.Generator().manual_seed(3)
        rows = data.TensorDataset(torch.randn(8 * length, 4), torch.randint(0, 3, (8 * length,)))
        super().__init__(rows, 8, shuffle=True, generator=generator, num_workers=1)

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number >= self.used:
                self.used += 1
                yield batch
        self.used = 0

    def state_dict(self):
        return {"used": torch.tensor(self.used), "epoch": None}

    def load_state_dict(self, state):
        self.used = int(state["used"])


def in_batches(make):
    """Returns loaders whose batches can be joined."""

    class Batches(make):
        def __iter__(self):
            return _Batches(super().__iter__())

    return Batches


class _Batches:
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return self

    def __next__(self):
        samples = arrays(*map(np.asarray, next(self.items)))
        return Batch(samples, np.arange(len(samples)), 0, 0)


def train(comm, make, length, accumulation=1, stop=None, **fit):
    """Returns the hash of the weights, or None if the run was stopped after `stop` steps."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    module = nn.Linear(4, 3)
    with torch.no_grad():  # ranks are threads, which share the generator
        module.weight.copy_(torch.linspace(-1, 1, 12).reshape(3, 4))
        module.bias.zero_()
    trainer = DistributedTrainer(
        module,
        torch.optim.Adam(module.parameters(), 0.1),
        shard_size=4,
        comm=comm,
        accumulation_steps=accumulation,
    )

    def stop_here(context):
        if stop is not None and trainer.steps == stop:
            context.stop = "the test"

    hook = callbacks.LambdaCallback(on_step_end=stop_here)
    try:
        trainer.fit(make(length), epochs=EPOCHS, callbacks=[hook], verbose=False, **fit)
    except Stopped:
        return None
    return trainer.weights_sha256()


@pytest.mark.parametrize("case", range(30))
def test_random_stops_change_nothing(tmp_path, case):
    draw = random.Random(case)
    # threads share the generators of the process
    on_one_rank = (Drawing, DrawingTorch, Skipping, SkippingTorch)
    make = draw.choice((*SHAPES, *on_one_rank))
    ranks_of = [1] if make in on_one_rank else [1, 2, 3]
    length = draw.randint(1, 7)
    accumulation = draw.randint(1, 3)
    if accumulation > 1 and draw.random() < 0.5:
        make = in_batches(make)
    (whole,) = mock.run(1, train, make, length, accumulation)
    total = EPOCHS * -(-length // accumulation)
    every = draw.choice([None, 1, 2, 3])
    stops = sorted(draw.sample(range(1, total + 1), min(total, draw.randint(1, 3))))
    for stop in [*stops, None]:

        def run(comm, stop=stop):
            options = {"checkpoint_dir": tmp_path, "checkpoint_every": every}
            return train(comm, make, length, accumulation, stop, **options)

        shas = mock.run(draw.choice(ranks_of), run)
        # a stop at the last step is no stop
        expected = [None] if stop not in (None, total) else [None, whole]
        assert all(sha in expected for sha in shas), (make, length, accumulation, stops)
    assert set(shas) == {whole}


@pytest.mark.parametrize("stop", [1, 3, 4, 8])
def test_a_loader_with_workers_continues(tmp_path, stop):
    (whole,) = mock.run(1, train, Workers, 4)
    first = tmp_path / "first"
    mock.run(1, lambda comm: train(comm, Workers, 4, stop=stop, checkpoint_dir=first))
    # workers that were forked hold the lock of their directory
    copy = shutil.copytree(first, tmp_path / "copy")
    assert mock.run(1, lambda comm: train(comm, Workers, 4, checkpoint_dir=copy)) == [whole]


# --- persistent workers ---


class Noisy(data.Dataset):
    """Draws from all generators of its process."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        noise = torch.randn(4) + np.float32(np.random.normal()) + random.random()
        return torch.full((4,), float(i % 7)) + noise, i % 3


class Holding(Noisy):
    """Draws from a generator of its own."""

    def __init__(self):
        self.transforms = [{"rng": np.random.default_rng(1)}]

    def __getitem__(self, i):
        return torch.from_numpy(self.transforms[0]["rng"].normal(size=4)).float(), i % 3


class Pieces(data.IterableDataset):
    """A stream with a position in each worker."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        worker = data.get_worker_info().id
        for _ in range(20):
            self.at += 1
            yield torch.full((4,), float(self.at + worker)) + torch.randn(4), self.at % 3


def seed_numpy(worker):
    np.random.seed(torch.initial_seed() % 2**32)


LOADERS = {
    "noisy": lambda **kept: data.DataLoader(Noisy(), 8, shuffle=True, num_workers=2, **kept),
    "generator": lambda **kept: data.DataLoader(
        Noisy(),
        8,
        shuffle=True,
        num_workers=2,
        generator=torch.Generator().manual_seed(5),
        **kept,
    ),
    "seeded": lambda **kept: data.DataLoader(
        Noisy(), 8, num_workers=2, worker_init_fn=seed_numpy, **kept
    ),
    "holding": lambda **kept: data.DataLoader(Holding(), 8, num_workers=2, **kept),
    "stream": lambda **kept: data.DataLoader(Pieces(), 8, num_workers=2, **kept),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_kept_workers_draw_as_new_ones(tmp_path, kind):
    """And so a resumed run continues."""

    def run(persistent, stop=None, **fit):
        return mock.run(
            1,
            lambda comm: train(
                comm,
                lambda _: LOADERS[kind](persistent_workers=persistent),
                0,
                stop=stop,
                **fit,
            ),
        )

    whole = run(False)
    assert run(True) == whole
    folder = tmp_path / "0"
    for stop in (2, 8):
        assert run(True, stop, checkpoint_dir=folder) == [None]
        # workers that were forked hold the lock of their directory
        folder = shutil.copytree(folder, tmp_path / str(stop))
    assert run(True, checkpoint_dir=folder) == whole


def test_workers_that_only_draw_from_the_process_are_kept():
    seen = []
    loader = LOADERS["noisy"](persistent_workers=True)

    def note(context):
        seen.append([worker.pid for worker in loader._iterator._workers])

    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    trainer = DistributedTrainer(module, torch.optim.SGD(module.parameters(), 0.1), shard_size=4)
    hook = callbacks.LambdaCallback(on_epoch_end=note)
    trainer.fit(loader, epochs=3, callbacks=[hook], verbose=False)
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]
