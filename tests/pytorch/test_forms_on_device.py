"""Forms of training on a device that isn't the CPU: channels-last, accumulation, clipping and
torch.compile. A random module has the CPU's bits on 1, 2 and 3 ranks.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pytorch import pretend  # noqa: E402
from torch import nn  # noqa: E402

from odyssey.comm import mock  # noqa: E402
from odyssey.torch import DataLoader, DistributedDataParallel, DistributedTrainer  # noqa: E402

MAKING = threading.Lock()  # ranks are threads, and torch has one generator
CHANNELS = 4
CLASSES = 3


@pytest.fixture(autouse=True)
def _use_one_thread():
    torch.set_num_threads(1)


def draw_images(number: int, count: int) -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(count, CHANNELS, 6, 6, generator=draw)
    return torch.utils.data.TensorDataset(x, torch.arange(count) % CLASSES)


def draw_net(r: random.Random, channels_last: bool) -> nn.Module:
    with MAKING:
        torch.manual_seed(r.randrange(1 << 30))
        width = r.choice([2, 8])
        # in channels-last, PyTorch computes its gradients in another way than on the CPU
        other_norm = nn.GroupNorm(2, width)
        net = nn.Sequential(
            nn.Conv2d(CHANNELS, width, 3, bias=r.random() < 0.5),
            r.choice([nn.BatchNorm2d(width), nn.Identity() if channels_last else other_norm]),
            r.choice([nn.ReLU(), nn.GELU(), nn.SiLU()]),
            r.choice([nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Identity()]),
            nn.Flatten(),
            nn.LazyLinear(CLASSES),
        )
        net(torch.zeros(2, CHANNELS, 6, 6))
    form = torch.channels_last if channels_last else torch.contiguous_format
    return net.to(memory_format=form)


def train(comm: Any, number: int, device: str) -> dict[str, Any]:
    """Trains a random net in a random form, and returns what a user may look at."""
    r = random.Random(number)
    channels_last = number % 2 == 0
    net = draw_net(r, channels_last).to(device)
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last) or not channels_last
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    trainer = DistributedTrainer(
        net,
        optimizer,
        shard_size=r.choice([2, 4]),
        accumulation_steps=r.choice([1, 2, 3]),
        clip_norm=r.choice([None, 0.05, 1.0]),
        zero=r.choice([0, 1]),
        comm=comm,
    )
    loader = DataLoader(draw_images(number, 32), batch_size=8, comm=comm, shuffle=True)
    history = trainer.fit(loader, epochs=2, verbose=False)
    assert not channels_last or net[0].weight.is_contiguous(memory_format=torch.channels_last)
    return {
        **trainer.named_state(),
        "losses": [record["train_loss"] for record in history.records],
        "fingerprints": trainer.fingerprints(),
        "evaluation": trainer.evaluate(loader).loss,
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


@pytest.mark.parametrize("number", range(8))
def test_forms_have_the_bits_of_the_cpu_on_any_ranks(number):
    (expected,) = mock.run(1, train, number, "cpu")
    for ranks in (1, 2, 3):
        for found in mock.run(ranks, train, number, pretend.NAME):
            assert_same(found, expected)


def accumulate(comm: Any, number: int, device: str) -> dict[str, np.ndarray]:
    """A loop of one's own, in which several batches make a step."""
    r = random.Random(number)
    with MAKING:
        torch.manual_seed(number)
        net = nn.Sequential(nn.Conv2d(CHANNELS, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))
    net = net.to(memory_format=torch.channels_last).to(device)
    ddp = DistributedDataParallel(net, shard_size=3, comm=comm)
    comm.barrier()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    steps = r.choice([2, 3])
    images = torch.utils.data.DataLoader(draw_images(number, 48), batch_size=8)
    for count, (x, y) in enumerate(images, 1):
        for inputs, targets in ddp.shards((x.to(device), y.to(device))):
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
        if count % steps == 0:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.cpu().numpy() for name, value in ddp.state_dict().items()}


@pytest.mark.parametrize("number", range(2))
def test_accumulation_in_an_own_loop_has_the_bits_of_the_cpu(number):
    (expected,) = mock.run(1, accumulate, number, "cpu")
    for ranks in (1, 3):
        for found in mock.run(ranks, accumulate, number, pretend.NAME):
            assert_same(found, expected)


def test_a_module_is_compiled_once_for_all_shards_and_steps():
    """On the CPU: torch.compile can't look into a device that is written in Python."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def run(compiled: bool) -> str:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * 36, 8), nn.Tanh(), nn.Linear(8, 3))
        module = torch.compile(net, backend=backend, dynamic=False) if compiled else net
        trainer = DistributedTrainer(
            module, torch.optim.AdamW(net.parameters(), lr=0.01), shard_size=2, clip_norm=0.1
        )
        loader = torch.utils.data.DataLoader(draw_images(1, 32), batch_size=8)
        trainer.fit(loader, epochs=3, verbose=False)
        return trainer.weights_sha256()

    torch._dynamo.reset()
    assert run(compiled=True) == run(compiled=False)
    assert len(graphs) == 1
