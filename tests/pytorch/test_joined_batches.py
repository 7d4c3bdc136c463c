"""Steps of several batches of PyTorch's loader and of lists, and the shard size of loops of one's
own.
"""

from __future__ import annotations

import copy
import random

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from odyssey.comm import mock  # noqa: E402
from odyssey.errors import ConfigError, DataError  # noqa: E402
from odyssey.torch import DataLoader, DistributedDataParallel, DistributedTrainer  # noqa: E402

torch.manual_seed(0)
X, Y = torch.randn(70, 6), torch.randint(0, 3, (70,))
SAMPLES = torch.utils.data.TensorDataset(X, Y)
ORIGINAL = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class Named(nn.Module):
    """Takes dicts, as models of Hugging Face do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


def plain(batch_size: int):
    return torch.utils.data.DataLoader(SAMPLES, batch_size=batch_size)


def pairs(batch_size: int):
    return list(plain(batch_size))


class Refilled:
    """A loader that fills the same memory again."""

    def __init__(self, batch_size: int) -> None:
        self.size = batch_size
        self.memory = torch.empty(batch_size, 6), torch.empty(batch_size, dtype=torch.int64)

    def __len__(self):
        return -(-len(X) // self.size)

    def __iter__(self):
        x, y = self.memory
        for lo in range(0, len(X), self.size):
            n = len(X[lo : lo + self.size])
            x[:n] = X[lo : lo + self.size]
            y[:n] = Y[lo : lo + self.size]
            yield x[:n], y[:n]


def named(batch_size: int):
    return [{"x": x, "labels": y} for x, y in plain(batch_size)]


def train(comm, data, accumulation: int, shard_size: int | None, is_named: bool = False, **fit):
    net = copy.deepcopy(ORIGINAL)
    net = Named(net) if is_named else net
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    trainer = DistributedTrainer(
        net,
        optimizer,
        shard_size=shard_size,
        accumulation_steps=accumulation,
        comm=comm,
        **({} if is_named else {"metrics": {}}),
    )
    trainer.fit(data, epochs=2, verbose=False, **fit)
    return trainer.weights_sha256(), trainer.steps


@pytest.mark.parametrize("case", range(12))
def test_random_accumulation_is_one_larger_batch(case, tmp_path):
    draw = random.Random(case)
    size, count = draw.randint(2, 20), draw.randint(2, 5)
    shard_size = draw.choice([None, 3, 8])
    make = draw.choice([plain, pairs, Refilled, named])
    ranks = draw.choice([1, 2, 3]) if make is not plain else 1  # threads share its generator
    is_named = make is named
    whole = named if is_named else pairs
    (expected,) = mock.run(1, lambda c: train(c, whole(size * count), 1, shard_size, is_named))
    results = mock.run(ranks, lambda c: train(c, make(size), count, shard_size, is_named))
    assert set(results) == {expected}, (make, size, count, shard_size, ranks)
    middle = expected[1] // 2
    if not is_named and middle:
        folder = {"checkpoint_dir": tmp_path}
        mock.run(1, lambda c: train(c, make(size), count, shard_size, steps=middle, **folder))
        resumed = mock.run(ranks, lambda c: train(c, make(size), count, shard_size, **folder))
        assert set(resumed) == {expected}


def test_batches_that_cannot_be_joined_are_named():
    texts = [(torch.zeros(4, n), torch.zeros(4, dtype=torch.int64)) for n in (6, 5)]
    with pytest.raises(DataError, match=r"the shapes \(6,\) and \(5,\); use samples of one shape"):
        mock.run(1, lambda comm: train(comm, texts, 2, None))


def loop(comm, size, loader_size, workers=0, state=None, batch_size=24):
    net = DistributedDataParallel(copy.deepcopy(ORIGINAL), shard_size=size, comm=comm)
    if state is not None:
        net.load_state_dict(state)
    options = {"shard_size": loader_size, "num_workers": workers, "comm": comm}
    loader = DataLoader(SAMPLES, batch_size=batch_size, shuffle=True, **options)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            for x, y in net.shards(batch):
                nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    return weights, net.shard_size, loader.shard_size, copy.deepcopy(net.state_dict())


def test_a_loop_of_ones_own_uses_the_shard_size_that_was_set():
    results = [
        mock.run(1, lambda comm, sizes=sizes: loop(comm, *sizes))[0][:3]
        for sizes in ((8, None), (None, 8), (8, 8))
    ]
    assert results == results[:1] * 3


PROGRAM = """
import hashlib, torch
from odyssey.torch import DataLoader, DistributedDataParallel
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(70, 6), torch.randint(0, 3, (70,)))
layers = [torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3)]
net = DistributedDataParallel(torch.nn.Sequential(*layers), shard_size=8)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for batch in DataLoader(data, batch_size=24, shuffle=True):
    for x, y in net.shards(batch):
        torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
print(hashlib.sha256(weights).hexdigest())
"""


def test_such_a_loop_has_the_same_bits_on_any_number_of_ranks(launch):
    (launch.folder / "program.py").write_text(PROGRAM)
    done = [launch.python("program.py", ranks=ranks) for ranks in (0, 3)]
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    hashes = [hash for one in done for hash in one.stdout.split()]
    assert len(hashes) == 4 and len(set(hashes)) == 1


def test_workers_read_the_rest_of_the_epoch_in_the_size_of_the_net():
    (alone,) = mock.run(1, lambda comm: loop(comm, 8, 8))
    (workers,) = mock.run(1, lambda comm: loop(comm, 8, None, workers=1))
    assert workers[:3] == alone[:3]


def test_a_state_that_was_loaded_keeps_its_shard_size():
    (first,) = mock.run(1, lambda comm: loop(comm, 5, None))
    (resumed,) = mock.run(1, lambda comm: loop(comm, None, None, state=first[3]))
    assert resumed[1:3] == (5, 5)


def test_another_loader_with_another_default_follows():
    net = DistributedDataParallel(copy.deepcopy(ORIGINAL))
    for batch_size, loader_size in ((24, None), (70, None), (24, 6)):
        for batch in DataLoader(SAMPLES, batch_size, shard_size=loader_size):
            for x, y in net.shards(batch):
                nn.functional.cross_entropy(net(x), y).backward()
            net.zero_grad()
    assert net.shard_size == 6  # the only one that was set


def test_two_sizes_that_were_set_are_an_error():
    with pytest.raises(ConfigError, match="DataLoader's shard_size is 4, and .* is 8; set both"):
        mock.run(1, lambda comm: loop(comm, 8, 4))
