"""The default shard of a PyTorch module: a function of the first global batch, the same on any number
of ranks, which checkpoints keep and evaluations leave alone.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from odyssey import data  # noqa: E402
from odyssey.comm import mock  # noqa: E402
from odyssey.errors import ConfigError  # noqa: E402
from odyssey.torch import DataLoader, DistributedDataParallel, DistributedTrainer  # noqa: E402
from odyssey.torch.device import default_shard_size  # noqa: E402

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(600, 6, generator=GENERATOR)
Y = torch.randint(0, 3, (600,), generator=GENERATOR)
SAMPLES = torch.utils.data.TensorDataset(X, Y)
NET = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def make(comm: Any = None, **settings: Any) -> DistributedTrainer:
    net = copy.deepcopy(NET)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    return DistributedTrainer(net, optimizer, comm=comm, backend="local", **settings)


def describe(trainer: DistributedTrainer) -> tuple[int | None, str]:
    return trainer.shard_size, trainer.weights_sha256()


def cut(size: int, samples: int = len(X)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, samples, size)]


def with_a_list(comm: Any, batch: int, **settings: Any) -> tuple[int | None, str]:
    trainer = make(comm, **settings)
    trainer.fit(cut(batch), steps=2, verbose=False)
    return describe(trainer)


def with_our_loader(comm: Any, batch: int, **settings: Any) -> tuple[int | None, str]:
    trainer = make(comm, **settings)
    loader = data.DataLoader(data.arrays(X.numpy(), Y.numpy()), batch)
    trainer.fit(loader, steps=2, verbose=False)
    return describe(trainer)


def with_the_loader_of_torch(comm: Any, batch: int, **settings: Any) -> tuple[int | None, str]:
    trainer = make(comm, **settings)
    trainer.fit(torch.utils.data.DataLoader(SAMPLES, batch), steps=2, verbose=False)
    return describe(trainer)


def with_shared_batches(comm: Any, batch: int, **settings: Any) -> tuple[int | None, str]:
    trainer = make(comm, **settings)
    trainer.fit(DataLoader(SAMPLES, batch, comm=comm), steps=2, verbose=False)
    return describe(trainer)


def in_train_steps(comm: Any, batch: int, **settings: Any) -> tuple[int | None, str]:
    trainer = make(comm, **settings)
    for number, one in enumerate(DataLoader(SAMPLES, batch, comm=comm)):
        if number < 2:
            trainer.train_step(one)
    return describe(trainer)


def test_rule():
    samples = [1, 31, 64, 256, 257, 300, 1000, 4096]
    assert [default_shard_size(n) for n in samples] == [32, 32, 32, 32, 33, 38, 125, 512]
    on_gpus = [default_shard_size(n, is_host=False) for n in samples]
    assert on_gpus == [2, 4, 8, 32, 33, 38, 125, 512]


@pytest.mark.parametrize("batch", [20, 64, 300])
def test_it_is_the_same_on_any_number_of_ranks_and_for_any_loader(batch):
    one = mock.run(1, with_a_list, batch)[0]
    assert one[0] == {20: 32, 64: 32, 300: 38}[batch]
    explicit = mock.run(1, lambda comm: with_a_list(comm, batch, shard_size=one[0]))[0]
    assert explicit == one
    for ranks, train in (
        (3, with_a_list),
        (2, with_our_loader),
        (2, with_the_loader_of_torch),
        (3, with_shared_batches),
        (3, in_train_steps),
    ):
        assert mock.run(ranks, train, batch) == [one] * ranks, train.__name__
    for zero in (1, 2, 3):
        assert mock.run(2, lambda comm, z=zero: with_a_list(comm, batch, zero=z)) == [one] * 2


def test_joined_batches_have_the_default_of_the_step():
    one = mock.run(1, with_our_loader, 300)[0]
    joined = mock.run(3, lambda comm: with_our_loader(comm, 150, accumulation_steps=2))
    assert joined == [one] * 3


@pytest.mark.parametrize("train", [with_shared_batches, in_train_steps])
def test_a_data_set_smaller_than_a_batch_has_the_default_of_the_loader(train):
    found = mock.run(2, train, 1000)
    assert found[0] == found[1] and found[0][0] == 125


def test_a_smaller_last_batch_keeps_it():
    def train(comm: Any) -> tuple[int | None, str]:
        trainer = make(comm)
        trainer.fit(cut(400), verbose=False)  # the last batch has 200 samples
        return describe(trainer)

    one = mock.run(1, train)[0]
    assert one[0] == 50 and mock.run(3, train) == [one] * 3


@pytest.mark.parametrize("samples", [64, 400])
def test_loops_of_ones_own_have_it(samples):
    def loop(comm: Any) -> tuple[int | None, Any]:
        net = DistributedDataParallel(copy.deepcopy(NET), comm=comm)
        sizes = []
        for x, y in net.shards((X[:samples], Y[:samples])):
            torch.nn.functional.cross_entropy(net(x), y).backward()
            sizes.append(len(x))
        gradients = b"".join(p.grad.numpy().tobytes() for p in net.parameters())
        return net.shard_size, gradients

    one = mock.run(1, loop)[0]
    assert one[0] == {64: 32, 400: 50}[samples]
    assert mock.run(3, loop) == [one] * 3


@pytest.mark.parametrize("evaluate", ["evaluate", "predict"])
@pytest.mark.parametrize("loader", [cut(600), DataLoader(SAMPLES, 600), SAMPLES])
def test_an_evaluation_before_the_first_batch_leaves_it_to_that(evaluate, loader):
    trainer = make()
    getattr(trainer, evaluate)(loader)
    assert trainer.shard_size is None
    trainer.fit(cut(64), steps=2, verbose=False)
    assert describe(trainer) == mock.run(1, with_a_list, 64)[0]
    getattr(trainer, evaluate)(loader)
    assert trainer.shard_size == 32


def test_an_evaluation_keeps_the_shard_size_that_its_loader_was_given():
    trainer = make()
    trainer.evaluate(DataLoader(SAMPLES, 600, shard_size=20))
    assert trainer.shard_size == 20


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_keeps_the_shard_size_of_an_earlier_run(tmp_path, ranks):
    def train(comm: Any, size: int | None, steps: int, **options: Any) -> tuple[int | None, str]:
        trainer = make(comm, shard_size=size)
        trainer.fit(cut(64), steps=steps, verbose=False, **options)
        return describe(trainer)

    whole = mock.run(1, lambda comm: train(comm, 16, 4))[0]
    mock.run(1, lambda comm: train(comm, 16, 2, checkpoint_dir=tmp_path))  # the earlier default
    resumed = mock.run(ranks, lambda comm: train(comm, None, 4, checkpoint_dir=tmp_path))
    assert resumed == [whole] * ranks
    with pytest.raises(ConfigError, match="shard size"):
        mock.run(1, lambda comm: train(comm, 32, 5, checkpoint_dir=tmp_path))


def test_a_loop_that_resumes_keeps_the_shard_size_of_its_state():
    saved = DistributedDataParallel(copy.deepcopy(NET), shard_size=16)
    for x, y in saved.shards((X[:64], Y[:64])):
        torch.nn.functional.cross_entropy(saved(x), y).backward()
    torch.optim.SGD(saved.parameters(), 0.1).step()
    net = DistributedDataParallel(copy.deepcopy(NET))
    net.load_state_dict(saved.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sizes = []
        for x, y in net.shards(next(iter(DataLoader(SAMPLES, 64)))):
            torch.nn.functional.cross_entropy(net(x), y).backward()
            sizes.append(len(x))
    assert sizes == [16] * 4
