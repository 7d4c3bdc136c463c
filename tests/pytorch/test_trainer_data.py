"""odyssey.torch.DistributedTrainer: what it takes batches from, and which samples a rank reads."""

from __future__ import annotations

import collections
import hashlib
import importlib.util
from typing import Any

import pytest

if (
    not hasattr(importlib.util.find_spec("torch"), "origin")
    or importlib.util.find_spec("torch").origin is None
):
    pytest.skip("torch is not installed (extra [torch])", allow_module_level=True)

import torch
from torch import nn

from odyssey import data
from odyssey.errors import ConfigError
from odyssey.torch import DataLoader, DistributedDataParallel, DistributedTrainer


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def made(module: nn.Module, **settings) -> DistributedTrainer:
    return DistributedTrainer(
        module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), **settings
    )


X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3


class Counted(torch.utils.data.Dataset):
    """Samples made one by one, which counts them; on some numbers it is asked for more than
    once.
    """

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int):
        self.read.append(i)
        return X[i].numpy(), int(Y[i])


def test_what_is_no_loader_of_pairs_is_refused_in_a_line():
    pairs = torch.utils.data.TensorDataset(X, Y)
    sampler = torch.utils.data.DistributedSampler(pairs, num_replicas=2, rank=0)
    for loader, says in (
        (
            torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), 20),
            "the loader gave a list of 1; give",
        ),
        (
            DataLoader(torch.utils.data.TensorDataset(X, Y, Y), 20),
            "the loader gave a list of 3; give batches of",
        ),
        (
            torch.utils.data.DataLoader(pairs, 20, sampler=sampler),
            "DistributedSampler gives each rank other samples",
        ),
        (pairs, "give data.DataLoader.your TensorDataset"),
    ):
        with pytest.raises(ConfigError, match=says):
            made(net()).fit(loader)
    with pytest.raises(
        ConfigError, match="resume is True; give 'auto', 'never', 'weights' or the path"
    ):
        made(net()).fit([(X, Y)], resume=True)


def test_data_sets_inputs_alone_and_streams():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(X, Y, strict=True))

    sets = torch.utils.data
    trainer = made(net(), shard_size=7)
    trainer.fit(sets.DataLoader(Stream(), 20), sets.TensorDataset(X, Y))
    whole = trainer.predict([(X, Y)])
    for given in (
        X,
        sets.TensorDataset(X),
        sets.TensorDataset(X, Y),
        [X],
        DataLoader(X, 40, shard_size=7),
    ):
        assert torch.equal(trainer.predict(given), whole)
    assert trainer.evaluate(sets.TensorDataset(X, Y)) == trainer.evaluate([(X, Y)])


def test_a_rank_reads_its_shards_only(monkeypatch):
    """Of our own loaders; rank 1 of 2 as the loader sees it."""
    samples = Counted()
    trainer = made(net(), shard_size=5)
    monkeypatch.setattr(trainer.shards, "share", lambda n, train: (10, 20))
    loader = data.DataLoader(samples, batch_size=20, prefetch=0)
    batch = next(loader.steps(part=trainer.feed.part(training=True)))
    assert samples.read == list(range(10, 20)) and batch.run == (10, 20)


def test_samples_that_are_drawn_are_the_same_in_each_evaluation():
    class Noisy(Counted):
        def __getitem__(self, i: int):
            return X[i] + torch.randn(6), int(Y[i])

    trainer = made(net(), shard_size=5)
    noisy = DataLoader(Noisy(), 20, shard_size=5)
    assert trainer.evaluate(noisy) == trainer.evaluate(noisy) != trainer.evaluate([(X, Y)])
    first, second = (
        torch.cat([b.dataset.shards[s][0] for b in noisy for s in range(4)]) for _ in range(2)
    )
    assert not torch.equal(first, second), "epochs have other noise"


class Drawn(torch.utils.data.Sampler):
    """Draws from the generator of the process, which each epoch seeds."""

    def __iter__(self):
        return iter(torch.randperm(len(X)).tolist())

    def __len__(self) -> int:
        return len(X)


class Remembers(Drawn):
    """Begins where the epoch before has ended."""

    def __init__(self) -> None:
        self.begin = 0

    def __iter__(self):
        self.begin = (self.begin + 7) % len(X)
        return iter([(self.begin + i) % len(X) for i in range(len(X))])


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return zip(X, Y, strict=True)


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "drawn", "remembers", "streamed"])
def test_samplers_that_come_back_are_not_reported(kind, tmp_path, capsys):
    pairs = torch.utils.data.TensorDataset(X, Y)
    options = {
        "shuffled": {"shuffle": True},
        "own generator": {"shuffle": True, "generator": torch.Generator()},
        "drawn": {"sampler": Drawn()},
        "remembers": {"sampler": Remembers()},
        "streamed": {},
    }[kind]
    data = Streamed() if kind == "streamed" else pairs
    loader = torch.utils.data.DataLoader(data, 20, **options)
    made(net()).fit(loader, checkpoint_dir=tmp_path)
    assert "[checkpoint]" not in capsys.readouterr().err


def test_a_sampler_whose_memory_is_lost_is_reported(tmp_path, capsys):
    sampler = Remembers()
    sampler.order = (i for i in range(3))
    pairs = torch.utils.data.TensorDataset(X, Y)
    made(net()).fit(
        torch.utils.data.DataLoader(pairs, 20, sampler=sampler), checkpoint_dir=tmp_path
    )
    assert "can't keep sampler.order (generator)" in capsys.readouterr().err


def test_batches_of_which_a_rank_has_its_shards(tmp_path):
    """As whole batches, also joined and gone on with within an epoch; a loader of other shards
    is refused.
    """

    def loader(size: int = 20) -> DataLoader:
        return DataLoader(
            torch.utils.data.TensorDataset(X, Y), size, shuffle=True, seed=3, shard_size=5
        )

    order = data.sampler.permutation(40, 3, 0).tolist()
    whole = [(X[order[at : at + 20]], Y[order[at : at + 20]]) for at in (0, 20)]
    hashes = []
    for given, settings in ((loader(), {}), (whole, {}), (loader(10), {"accumulation_steps": 2})):
        trainer = made(net(), shard_size=5, **settings)
        trainer.fit(given)
        hashes.append(trainer.weights_sha256())
    made(net(), shard_size=5).fit(loader(), steps=1, checkpoint_dir=tmp_path)
    trainer = made(net(), shard_size=5)
    trainer.fit(loader(), checkpoint_dir=tmp_path)
    assert trainer.steps == 2 and {*hashes, trainer.weights_sha256()} == {hashes[0]}
    with pytest.raises(ConfigError, match="the DataLoader's shard_size is 5, and .* is 10"):
        made(net(), shard_size=10).fit(loader())


class Mapped(collections.UserDict):
    """What a tokenizer gives: a mapping that is no dict."""


class Two(nn.Module):
    """Of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.line(a) * b.mean()


@pytest.mark.parametrize("kind", [tuple, dict, Mapped])
def test_inputs_of_several_tensors_from_every_loader(kind):
    """torch's collate function makes lists of tuples; a shard has its own samples of each."""

    def inputs(at: Any) -> Any:
        return (X[at], X[at, :2]) if kind is tuple else kind(a=X[at], b=X[at, :2])

    pairs = [(inputs(i), Y[i]) for i in range(40)]
    whole = [(inputs(slice(at, at + 20)), Y[at : at + 20]) for at in (0, 20)]
    hashes = set()
    for loader in (
        whole,
        torch.utils.data.DataLoader(pairs, 20),
        DataLoader(pairs, 20, shard_size=8),
    ):
        torch.manual_seed(1)
        trainer = made(Two(), shard_size=8)
        trainer.fit(loader)
        assert trainer.predict(loader).shape == (40, 3)
        hashes.add(trainer.weights_sha256())
        torch.manual_seed(1)
        module = Two()
        net, optimizer = (
            DistributedDataParallel(module, 8),
            torch.optim.SGD(module.parameters(), 0.1, 0.9),
        )
        for batch in loader:
            for x, y in net.shards(batch):
                nn.functional.cross_entropy(
                    net(*x) if isinstance(x, (tuple, list)) else net(**x), y
                ).backward()
            optimizer.step()
        hashes.add(
            hashlib.sha256(
                b"".join(
                    p.detach().numpy().tobytes() for p in (module.line.bias, module.line.weight)
                )
            ).hexdigest()
        )
    assert len(hashes) == 1


def test_our_loader_and_torchs():
    module = net()
    trainer = made(module)
    history = trainer.fit(
        data.DataLoader(data.arrays(X.numpy(), Y.numpy()), batch_size=10, shuffle=True)
    )
    assert history.steps == 4 and history.train_loss > 0
