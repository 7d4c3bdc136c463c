"""A later step with one sample, which BatchNorm can't normalise, raises its error before step 1."""

from __future__ import annotations

import random

import numpy as np
import pytest

import odyssey
from odyssey import comm, data, nn, optim
from odyssey.errors import OdysseyError

torch = pytest.importorskip("torch")

import odyssey.torch as ot  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 8)).astype(np.float32)
Y = np.arange(200) % 3


def native(shard_size, **options):
    odyssey.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    return odyssey.DistributedTrainer(net, optim.SGD(lr=0.1), shard_size=shard_size, **options)


def of_torch(shard_size, **options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 3)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return ot.DistributedTrainer(net, optimizer, shard_size=shard_size, **options)


def torch_loader(samples, batch, drop_last):
    both = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    chosen = torch.utils.data.Subset(both, range(samples))
    return torch.utils.data.DataLoader(chosen, batch, drop_last=drop_last)


def shared_loader(samples, batch, drop_last):
    both = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    chosen = torch.utils.data.Subset(both, range(samples))
    return ot.DataLoader(chosen, batch, drop_last=drop_last)


def own_loader(samples, batch, drop_last):
    return data.DataLoader(
        data.arrays(X[:samples], Y[:samples], classes=3), batch, drop_last=drop_last
    )


def list_of_batches(samples, batch, drop_last):
    stop = samples // batch * batch if drop_last else samples
    return [
        (X[first : min(first + batch, stop)], Y[first : min(first + batch, stop)])
        for first in range(0, stop, batch)
    ]


KINDS = [
    (native, own_loader),
    (native, list_of_batches),
    (of_torch, torch_loader),
    (of_torch, shared_loader),
    (of_torch, own_loader),
    (of_torch, list_of_batches),
]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("make", "loader"), KINDS)
def test_an_error_comes_before_the_first_step_or_never(make, loader, seed):
    rng = random.Random(f"{make.__name__} {loader.__name__} {seed}")
    batch = rng.randint(2, 9)
    samples = rng.randint(2, 4) * batch + rng.choice([0, 1, 1, 1, 2])
    drop_last = rng.random() < 0.2
    options = {}
    if make is native and loader is own_loader:
        options["accumulation_steps"] = rng.choice([1, 1, 2])
    shard_size = rng.choice([None, 2, 3, batch])
    trainer = make(shard_size, **options)
    steps = rng.choice([None, None, 1, samples // batch, samples // batch + 1])
    batches = loader(samples, batch, drop_last)
    try:
        trainer.fit(batches, epochs=1, steps=steps, verbose=False)
    except OdysseyError as error:
        assert "one number per channel" in str(error) or "BatchNorm has one sample" in str(error)
        assert trainer.steps == 0
    else:
        assert trainer.steps > 0
        if make is native and shard_size and options.get("accumulation_steps", 1) == 1:
            sizes = [len(x) for x, _ in batches][:steps]
            assert all(min(n, shard_size) > 1 and n % shard_size != 1 for n in sizes)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("execution", ["replay", "eager"])
@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize(("samples", "batch"), [(17, 17), (33, 16), (25, 24)])
def test_a_last_shard_of_one_sample_is_named(ranks, execution, own_loop, samples, batch):
    def run(world):
        trainer = native(8, comm=world, execution=execution)
        loader = own_loader(samples, batch, False)
        if own_loop:
            for one in loader:
                trainer.train_step(one)
        else:
            trainer.fit(loader, verbose=False)
        return trainer.steps

    message = "has a shard of one sample.*shard_size, or drop_last=True"
    if own_loop and samples > batch:  # a loop can't be looked at ahead
        message += "|one number per channel"
    with pytest.raises(OdysseyError, match=message):
        comm.mock.run(ranks, run)


def test_a_shard_of_one_image_is_allowed():
    x = RNG.normal(size=(17, 3, 4, 4)).astype(np.float32)
    odyssey.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    trainer = odyssey.DistributedTrainer(net, optim.SGD(lr=0.1), shard_size=8)
    pairs = data.arrays(x, np.arange(17) % 3, classes=3)
    trainer.fit(data.DataLoader(pairs, 17), verbose=False)
    assert trainer.steps == 1


@pytest.mark.parametrize("make", [native, of_torch])
def test_every_fit_is_checked(make):
    trainer = make(None)
    trainer.fit(own_loader(24, 8, False), verbose=False)
    with pytest.raises(OdysseyError, match=r"drop_last=True"):
        trainer.fit(own_loader(25, 8, False), verbose=False)
    assert trainer.steps == 3
    trainer.fit(own_loader(24, 8, False), verbose=False)
    assert trainer.steps == 6


@pytest.mark.parametrize("make", [native, of_torch])
@pytest.mark.parametrize(
    ("steps", "drop_last", "is_refused"),
    [(None, False, True), (4, False, True), (3, False, False), (None, True, False)],
)
def test_only_steps_that_are_taken_count(make, steps, drop_last, is_refused):
    trainer = make(None)
    loader = own_loader(25, 8, drop_last)
    if is_refused:
        with pytest.raises(OdysseyError, match=r"drop_last=True"):
            trainer.fit(loader, steps=steps, verbose=False)
    else:
        trainer.fit(loader, steps=steps, verbose=False)
    assert trainer.steps == (0 if is_refused else 3)


def test_images_have_many_values_per_channel(tmp_path):
    """One image is enough for BatchNorm2d, and a frozen layer needs no variance."""
    x = RNG.normal(size=(9, 3, 4, 4)).astype(np.float32)
    y = np.arange(9) % 3
    odyssey.manual_seed(0)
    own = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    trainer = odyssey.DistributedTrainer(own, optim.SGD(lr=0.1))
    trainer.fit(data.DataLoader(data.arrays(x, y, classes=3), 4), epochs=2, verbose=False)
    assert trainer.steps == 6
    for frozen in (False, True):
        convolution = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten()
        )
        last_layer = torch.nn.BatchNorm1d(4) if frozen else torch.nn.Identity()
        net = torch.nn.Sequential(convolution, torch.nn.Linear(16, 4), last_layer)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), 4
        )
        torch_trainer = ot.DistributedTrainer(net, optimizer)
        last_layer.eval()
        torch_trainer.fit(
            loader, epochs=2, verbose=False, state="strict", checkpoint_dir=tmp_path / str(frozen)
        )
        assert torch_trainer.steps == 6
        assert not any(module._forward_pre_hooks for module in net.modules())
