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
from odyssey.errors import ConfigError, NumericsError  # noqa: E402
from odyssey.torch import (  # noqa: E402
    DistributedDataParallel,
    DistributedTrainer,
    device_sums,
)
from odyssey.torch.device import Device  # noqa: E402

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


def pull_apart(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns a loss that is small if the outputs of different samples differ."""
    z = nn.functional.normalize(out, dim=1)
    return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z), device=z.device))


class Named(nn.Module):
    """A net of named inputs, as batches that are dicts have them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.net(x)
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


def train_with(comm: Any, kind: str, device: str) -> dict[str, Any]:
    """Trains with batches that are dicts, or with a loss across the batch."""
    net = draw_net(random.Random(3))
    batches: list[Any] = make_batches(3)
    options: dict[str, Any] = {"loss": pull_apart, "gather": True}
    if kind == "dicts":
        net = Named(net)
        batches = [{"x": x, "labels": y} for x, y in batches]
        options = {}
    net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = DistributedTrainer(net, optimizer, shard_size=4, comm=comm, **options)
    trainer.fit(batches, epochs=2, verbose=False)
    return {**trainer.named_state(), "loss": trainer.evaluate(batches).loss}


@pytest.mark.parametrize("kind", ["dicts", "gather"])
def test_dicts_and_losses_across_the_batch_have_the_bits_of_the_cpu(kind):
    (expected,) = mock.run(1, train_with, kind, "cpu")
    for ranks in (1, 2, 3):
        for found in mock.run(ranks, train_with, kind, pretend.NAME):
            assert_same(found, expected)


@pytest.mark.parametrize("size", [0, 1, 31, 33, 1000, (1 << 16) + 5])
def test_fingerprint_and_norm_have_the_bits_of_the_cpu(size, monkeypatch):
    monkeypatch.setattr(device_sums, "PIECE", 700)
    draw = torch.Generator().manual_seed(size)
    numbers = torch.randn(size, generator=draw) * 10.0 ** torch.randint(-44, 30, (size,))
    host, other = (Device(torch.device(name)) for name in ("cpu", pretend.NAME))
    copy = numbers.to(pretend.NAME)

    def alone(op: str) -> Any:
        return lambda array: array

    for start in (0, 5, 64):
        tensors = [(numbers, start), (numbers[: size // 2], start + size)]
        copied = [(tensor.to(pretend.NAME), at) for tensor, at in tensors]
        assert other.fingerprint(copied) == host.fingerprint(tensors)
    assert other.norm(copy, alone) == host.norm(numbers, alone)
    if size:
        copy[size // 2] = float("nan")
        assert np.isnan(other.norm(copy, alone))


def count_copies(shard_size: int, clip_norm: float | None, use_statistics: bool) -> list[list[int]]:
    """Returns for each step the elements of each copy to the host."""
    norm = nn.BatchNorm1d(5) if use_statistics else nn.LayerNorm(5)
    net = nn.Sequential(nn.Linear(FEATURES, 5), norm, nn.Linear(5, CLASSES)).to(pretend.NAME)
    trainer = DistributedTrainer(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.01),
        shard_size=shard_size,
        clip_norm=clip_norm,
        metrics=["accuracy"],
    )
    found: list[list[int]] = []

    class Count(callbacks.Callback):
        def on_step_end(self, context: Any) -> None:
            found.append(list(pretend.copies.sizes))
            pretend.copies.sizes.clear()

    batches = make_batches(1)
    trainer.fit(batches, epochs=3, callbacks=[Count()], verbose=False)
    return found[2:]  # the first steps look at the loss and at what forward() changes


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("use_statistics", [False, True])
def test_host_waits_as_often_for_many_shards_as_for_one(clip_norm, use_statistics):
    one, many = (count_copies(size, clip_norm, use_statistics) for size in (16, 2))
    assert one == many
    sums, extremes, largest, squares = 32, 2, 1, 2  # of losses and gradients, and for the norm
    counters, equal = 1, 1  # of batches that BatchNorm has seen, and whether nobody wrote to it
    before = [counters, equal] if use_statistics else []
    clipping = [largest, squares] if clip_norm else []
    after = [counters] if use_statistics else []
    assert many == [[*before, sums, extremes, *clipping, *after]] * 4


@pytest.mark.parametrize(
    ("samples", "size"), [(1, 2), (8, 2), (16, 2), (17, 3), (256, 32), (1000, 125)]
)
def test_default_shard_is_an_eighth_of_the_batch(samples, size):
    assert Device(torch.device(pretend.NAME)).default_shard_size(samples) == size


def test_default_shard_is_of_the_first_batch_and_kept_in_checkpoints(tmp_path):
    net = draw_net(random.Random(1)).to(pretend.NAME)
    trainer = DistributedTrainer(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batches = make_batches(1)  # of 16 samples
    trainer.fit(batches, verbose=False, checkpoint_dir=tmp_path)
    assert trainer.shard_size == 2
    # a trainer on the CPU would use one shard of 16 samples, but the checkpoint has shards of 2
    net = draw_net(random.Random(1))
    trainer = DistributedTrainer(
        net, torch.optim.SGD(net.parameters(), lr=0.1), other_arithmetic=True
    )
    trainer.fit(batches, epochs=2, verbose=False, checkpoint_dir=tmp_path)
    assert trainer.shard_size == 2

    loop = DistributedDataParallel(draw_net(random.Random(1)).to(pretend.NAME))
    x, y = batches[0]
    shards = loop.shards((x.to(pretend.NAME), y.to(pretend.NAME)))
    assert len(next(iter(shards))[0]) == 2


def train_in_fp16(
    comm: Any, gather: bool, device: str, folder: Path | None = None, stop: int | None = None
) -> dict[str, Any]:
    """Trains in fp16 with a first loss scale that overflows, and a scale that grows again."""
    net = draw_net(random.Random(5)).to(device)
    trainer = DistributedTrainer(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.01),
        pull_apart if gather else None,
        gather=gather,
        shard_size=4,
        precision="fp16",
        scaler_init_scale=2.0**24,
        scaler_growth_interval=3,
        clip_norm=0.5,
        comm=comm,
        seed=1,
    )
    scales: list[tuple[float, bool]] = []

    class Note(callbacks.Callback):
        def on_step_end(self, context: Any) -> None:
            scales.append((trainer.scaler.value, context.step.taken))

    saving = {"checkpoint_dir": folder} if folder else {}
    trainer.fit(make_batches(2), epochs=16, steps=stop, callbacks=[Note()], verbose=False, **saving)
    return {
        **trainer.named_state(),
        "scaler": list(trainer.scaler.state_dict().values()),
        "scales": scales[-16:],
        "norm": trainer.gradient_norm(),
        "prediction": trainer.predict([x for x, _ in make_batches(2)]).numpy(),
    }


@pytest.mark.parametrize("device", ["cpu", pretend.NAME])
@pytest.mark.parametrize("gather", [False, True])
def test_fp16_has_the_same_bits_and_scales_on_any_ranks_and_after_a_resume(
    tmp_path, device, gather
):
    (expected,) = mock.run(1, train_in_fp16, gather, device)
    was_taken = [taken for _, taken in expected["scales"]]
    *_, skipped = expected["scaler"]
    assert 0 < skipped < 32 and any(was_taken)
    assert expected["prediction"].dtype == np.float32
    for ranks in (2, 3):
        for found in mock.run(ranks, train_in_fp16, gather, device):
            assert_same(found, expected)
    mock.run(3, train_in_fp16, gather, device, tmp_path, 15)
    for found in mock.run(2, train_in_fp16, gather, device, tmp_path):
        assert_same(found, expected)


def test_fp16_ends_if_no_smaller_scale_is_left():
    net = draw_net(random.Random(5)).to(pretend.NAME)
    trainer = DistributedTrainer(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        lambda out, y: nn.functional.cross_entropy(out, y) * float("nan"),
        precision="fp16",
        scaler_init_scale=4.0,
        shard_size=4,
    )
    with pytest.raises(NumericsError, match="not finite at loss scale 1"):
        trainer.fit(make_batches(1), epochs=3, verbose=False)
    assert trainer.scaler.skipped == 3


def test_fp16_refuses_compression_that_keeps_what_it_did_not_send():
    net = draw_net(random.Random(5))
    with pytest.raises(ConfigError, match="precision='fp16' changes the scale"):
        DistributedTrainer(
            net, torch.optim.SGD(net.parameters(), lr=0.1), precision="fp16", compression="topk"
        )


ZERO = """
import sys
sys.path.insert(0, sys.argv[1])
import pretend, torch
from torch import nn
from odyssey.torch import DistributedTrainer

for zero, precision in ((0, "fp32"), (2, "fp32"), (3, "fp32"), (0, "fp16"), (2, "fp16")):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))
    net.to(pretend.NAME)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    trainer = DistributedTrainer(
        net, optimizer, shard_size=2, zero=zero, precision=precision, clip_norm=0.1
    )
    # the third rank has no shard in the second round
    trainer.fit([(torch.randn(8, 6), torch.arange(8) % 3)] * 3, verbose=False)
    sha = trainer.weights_sha256()
    if trainer.comm.rank == 0:
        print(precision, sha)
"""


def test_zero_has_the_bits_of_one_process(launch):
    (launch.folder / "program.py").write_text(ZERO)
    found = set()
    for ranks in (0, 3):
        done = launch.python("-W", "ignore", "program.py", Path(__file__).parent, ranks=ranks)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 5
        found.update(done.stdout.splitlines())
    assert len(found) == 2  # one for each precision
