"""Samplers with generators of their own: a training that goes on has the order of one that was
never stopped.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed (extra [torch])", allow_module_level=True)

import torch
from torch import nn
from torch.utils import data

from odyssey.errors import CheckpointError, DataError
from odyssey.torch import DistributedTrainer
from odyssey.torch.generators import Orders, generators, set_state, state_of

PROGRAM = Path(__file__).with_name("sampled.py")


def sha(launch, run: str, *mark: object) -> str:
    words = [
        sys.executable,
        "-m",
        "odyssey",
        "launch",
        "-n",
        2,
        "--run-dir",
        launch.folder / run,
        PROGRAM,
        *mark,
    ]
    done = launch(*words, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("restarting from step" in done.stderr) == bool(mark), done.stderr
    return done.stdout


def test_a_killed_rank_changes_no_order(launch):
    assert sha(launch, "killed", launch.folder / "mark") == sha(launch, "undisturbed")


class Own(data.Sampler):
    """A sampler of a user's own, which draws from whatever it was given."""

    def __init__(self, draw, rng) -> None:
        self.draw, self.rng = draw, rng

    def __iter__(self):
        return iter(self.draw(self.rng))

    def __len__(self) -> int:
        return 40


def shuffled(rng: random.Random) -> list[int]:
    order = list(range(40))
    rng.shuffle(order)
    return order


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


WEIGHTS = torch.linspace(0.1, 1, 40)
LOADERS = {
    "weighted": lambda d: data.DataLoader(
        d, 8, sampler=data.WeightedRandomSampler(WEIGHTS, 40, generator=seeded())
    ),
    "replacement": lambda d: data.DataLoader(
        d, 8, sampler=data.RandomSampler(d, True, 50, generator=seeded())
    ),
    "subset": lambda d: data.DataLoader(
        d, 8, sampler=data.SubsetRandomSampler(range(5, 37), generator=seeded())
    ),
    "loader": lambda d: data.DataLoader(d, 8, shuffle=True, generator=seeded()),
    "batches": lambda d: data.DataLoader(
        d, batch_sampler=data.BatchSampler(data.RandomSampler(d, generator=seeded()), 8, True)
    ),
    "workers": lambda d: data.DataLoader(d, 8, shuffle=True, generator=seeded(), num_workers=1),
    "numpy": lambda d: data.DataLoader(
        d, 8, sampler=Own(lambda g: g.permutation(40), np.random.default_rng(7))
    ),
    "state": lambda d: data.DataLoader(
        d, 8, sampler=Own(lambda g: g.permutation(40), np.random.RandomState(7))
    ),
    "python": lambda d: data.DataLoader(d, 8, sampler=Own(shuffled, random.Random(7))),
}


def trained(make, val=None, **fit) -> str:
    """The hash after a training; two fits, the second of one epoch."""
    torch.manual_seed(0)
    samples = data.TensorDataset(torch.randn(40, 5), torch.randint(0, 3, (40,)))
    module = nn.Linear(5, 3)
    trainer = DistributedTrainer(module, torch.optim.SGD(module.parameters(), 0.1), shard_size=4)
    loader = make(samples)
    history = trainer.fit(loader, val and val(samples, loader), verbose=False, **fit)
    return f"{trainer.weights_sha256()} {history.test_loss if val else ''}"


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("stop", [3, 5, 7])
def test_a_training_that_goes_on_draws_what_it_would_have_drawn(tmp_path, kind, stop):
    """Stopped in an epoch, or at the end of one."""
    whole = trained(LOADERS[kind], epochs=3)
    saving = {"epochs": 3, "checkpoint_dir": tmp_path, "checkpoint_every": 1}
    trained(LOADERS[kind], steps=stop, **saving)
    assert trained(LOADERS[kind], **saving) == whole


def test_a_sampler_without_a_state_trains_and_does_not_resume(tmp_path):
    def make(samples) -> data.DataLoader:
        return data.DataLoader(samples, 8, sampler=Own(shuffled, random.SystemRandom()))

    saving = {"epochs": 3, "checkpoint_dir": tmp_path, "checkpoint_every": 1}
    trained(make, steps=3, **saving)
    with pytest.raises(DataError, match="read again, is another"):
        trained(make, **saving)


@pytest.mark.parametrize("size", [40, 20])
def test_a_sampler_that_draws_once_more_at_its_end_goes_on(tmp_path, size):
    """RandomSampler does; stopped at the end of an epoch, of one batch or of two."""
    whole = trained(
        lambda d: data.DataLoader(d, size, sampler=data.RandomSampler(d, generator=seeded())),
        epochs=3,
    )
    saving = {"epochs": 3, "checkpoint_dir": tmp_path, "checkpoint_every": 1}
    for stop in (40 // size, 80 // size, None):
        found = trained(
            lambda d: data.DataLoader(d, size, sampler=data.RandomSampler(d, generator=seeded())),
            steps=stop,
            **saving,
        )
    assert found == whole


def test_validation_that_draws_goes_on_as_well(tmp_path):
    """From a generator of its own, and from that of the training."""
    for val in (
        lambda d, train: data.DataLoader(d, 7, shuffle=True, generator=seeded()),
        lambda d, train: data.DataLoader(d, 7, shuffle=True, generator=train.generator),
    ):
        whole = trained(LOADERS["loader"], val, epochs=3)
        folder = tmp_path / str(id(val))
        trained(LOADERS["loader"], val, epochs=3, steps=7, checkpoint_dir=folder)
        assert trained(LOADERS["loader"], val, epochs=3, checkpoint_dir=folder) == whole


def test_a_state_of_another_generator_is_refused():
    loader = LOADERS["numpy"](list(range(40)))
    assert [at for at, _ in generators(loader)] == ["sampler.rng"]
    orders = Orders(loader)
    orders.begin(0)
    saved = orders.state()
    assert set(saved) == {"now/train.sampler.rng", "begun/train.sampler.rng", "epoch"}
    with pytest.raises(CheckpointError, match=r"the state of train.sampler.rng is not taken"):
        Orders(LOADERS["python"](list(range(40)))).load(saved, "step_00000001")
    Orders(loader).load({}, "an old checkpoint")  # says nothing of generators


def test_states_that_a_file_still_holds_are_read():
    """Those of a checkpoint in parts are tensors that are read when they are asked for."""

    class Stored:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __array__(self, dtype=None, copy=None) -> np.ndarray:
            return self.array

    for make in LOADERS.values():
        orders = Orders(make(list(range(40))))
        orders.begin(3)
        saved = orders.state()
        other = Orders(make(list(range(40))))
        other.load({key: Stored(state) for key, state in saved.items()}, "step_00000001")
        found = other.state()
        assert found.keys() == saved.keys() and all(
            np.array_equal(found[key], saved[key]) for key in saved
        )


def test_states_are_put_back():
    for generator in (
        seeded(),
        np.random.default_rng(1),
        np.random.RandomState(1),
        random.Random(1),
    ):

        def draw(g=generator):
            return (
                torch.rand(3, generator=g).tolist()
                if isinstance(g, torch.Generator)
                else g.random()
            )

        state = state_of(generator)
        first = draw()
        set_state(generator, state)
        assert draw() == first != draw()
