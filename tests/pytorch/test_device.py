"""PyTorch modules on a device that isn't the CPU: it has the CPU's bits on any number of ranks, and
checkpoints move between devices. The device is a pretended one (pretend.py).
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pytorch import pretend  # noqa: E402
from torch import nn  # noqa: E402

from odyssey import callbacks  # noqa: E402
from odyssey.comm import mock  # noqa: E402
from odyssey.errors import ConfigError  # noqa: E402
from odyssey.torch import DistributedDataParallel, DistributedTrainer  # noqa: E402

MAKING = threading.Lock()  # ranks are threads, and torch has one generator
FEATURES = 6
CLASSES = 3
SAMPLES = 34


@pytest.fixture(autouse=True)
def _use_one_thread():
    torch.set_num_threads(1)


def draw_net(r: random.Random) -> nn.Module:
    """Returns a net of rows: normalisations, gates, frozen and shared layers."""
    with MAKING:
        torch.manual_seed(r.randrange(1 << 30))
        width = r.choice([1, 5, 16])
        layers: list[nn.Module] = [nn.Linear(FEATURES, width)]
        for _ in range(r.randint(1, 3)):
            layers.append(
                r.choice(
                    [nn.BatchNorm1d(width), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()]
                )
            )
        layers += [nn.Tanh(), nn.Linear(width, CLASSES)]
        net = nn.Sequential(*layers)
    if r.random() < 0.3:
        net[0].bias.requires_grad_(False)
    return net


def draw_optimizer(r: random.Random, net: nn.Module) -> torch.optim.Optimizer:
    name, options = r.choice(
        [
            ("SGD", {"momentum": 0.9}),
            ("AdamW", {}),
            ("Adam", {"foreach": True}),
            ("RMSprop", {}),
            ("Adagrad", {}),
        ]
    )
    parameters = [p for p in net.parameters() if p.requires_grad]
    return getattr(torch.optim, name)(parameters, lr=0.05, **options)


def make_batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(SAMPLES, FEATURES, generator=draw)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
    return [(x[:16], y[:16]), (x[16:32], y[16:32])]


def train(
    comm: Any,
    number: int,
    device: str,
    folder: Path | None = None,
    stop: int | None = None,
    other_arithmetic: bool = False,
) -> dict[str, Any]:
    """Trains a random net on a device, and returns everything that a user may look at."""
    r = random.Random(number)
    net = draw_net(r).to(device)
    optimizer = draw_optimizer(r, net)
    class_weights = torch.tensor([0.5, 1.0, 1.5]).to(device)
    loss = r.choice([nn.CrossEntropyLoss(), nn.CrossEntropyLoss(class_weights)])
    trainer = DistributedTrainer(
        net,
        optimizer,
        loss,
        shard_size=r.choice([4, 6, 8]),
        metrics=["accuracy", "f1"],
        clip_norm=r.choice([None, 0.1]),
        zero=r.choice([0, 1]),
        comm=comm,
        seed=number,
        other_arithmetic=other_arithmetic,
    )
    batches = make_batches(number)
    saving = {"checkpoint_dir": folder} if folder else {}
    history = trainer.fit(
        batches,
        epochs=2,
        steps=stop,
        callbacks=[callbacks.EMA(0.9)] if r.random() < 0.5 else [],
        verbose=False,
        **saving,
    )
    evaluation = trainer.evaluate(batches)
    return {
        **trainer.named_state(),
        "losses": [record["train_loss"] for record in history.records],
        "evaluation": [evaluation.loss, evaluation.accuracy],
        "prediction": trainer.predict([x for x, _ in batches]).numpy(),
        "fingerprints": trainer.fingerprints(),
        "norm": trainer.gradient_norm(),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


@pytest.mark.parametrize("number", range(6))
def test_device_has_the_bits_of_the_cpu_on_any_ranks(number):
    (expected,) = mock.run(1, train, number, "cpu")
    for ranks in (1, 2, 3):
        for found in mock.run(ranks, train, number, pretend.NAME):
            assert_same(found, expected)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("devices", [("cpu", pretend.NAME), (pretend.NAME, "cpu")])
def test_checkpoints_move_between_devices_if_other_results_are_allowed(tmp_path, number, devices):
    (expected,) = mock.run(1, train, number, "cpu")
    mock.run(2, train, number, devices[0], tmp_path, 3)
    with pytest.raises(ConfigError, match="computes different results|has other"):
        mock.run(1, train, number, devices[1], tmp_path)
    for found in mock.run(3, train, number, devices[1], tmp_path, None, True):
        assert_same(found, {**expected, "losses": found["losses"]})


def run_own_loop(comm: Any, number: int, device: str) -> dict[str, np.ndarray]:
    r = random.Random(number)
    net = DistributedDataParallel(draw_net(r).to(device), shard_size=4, comm=comm)
    comm.barrier()  # a loop looks at all nets of the process, and those of ranks are among them
    optimizer = draw_optimizer(r, net)
    for x, y in make_batches(number):
        for inputs, targets in net.shards((x.to(device), y.to(device))):
            nn.functional.cross_entropy(net(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu().numpy() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("number", range(4))
def test_own_loop_has_the_bits_of_the_cpu_on_any_ranks(number):
    (expected,) = mock.run(1, run_own_loop, number, "cpu")
    for ranks in (1, 2, 3):
        for found in mock.run(ranks, run_own_loop, number, pretend.NAME):
            assert_same(found, expected)


def test_module_on_two_devices_is_refused_by_name():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(pretend.NAME))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"0\.weight is on cpu, and 1\.weight on pretend:0"):
        DistributedTrainer(net, optimizer)
