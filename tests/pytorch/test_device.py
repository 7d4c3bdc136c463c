"""PyTorch modules on a device that isn't the CPU: it has the CPU's bits on any number of ranks, and
checkpoints move between devices. The device is a pretended one (pretend.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pytorch import pretend  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

from odyssey import callbacks  # noqa: E402
from odyssey.capture import mark  # noqa: E402
from odyssey.comm import mock  # noqa: E402
from odyssey.errors import ConfigError, NumericsError  # noqa: E402
from odyssey.torch import (  # noqa: E402
    DistributedDataParallel,
    DistributedTrainer,
    device_sums,
)
from odyssey.torch.device import Device, default_shard_size  # noqa: E402

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
    where: str = "cpu",
) -> dict[str, Any]:
    """Trains a random net on a device, and returns everything that a user may look at.

    where: the device of the batches.
    """
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
    batches = [(x.to(where), y.to(where)) for x, y in make_batches(number)]
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


@pytest.mark.parametrize(("number", "device"), [(6, pretend.NAME), (7, pretend.NAME), (8, "cpu")])
def test_batches_on_a_device_have_the_bits_of_batches_of_the_host(tmp_path, number, device):
    train_on_device = functools.partial(train, where=pretend.NAME)
    (expected,) = mock.run(1, train, number, device)
    for ranks in (1, 3):
        arguments = (number, device, tmp_path / str(ranks), 3)
        mock.run(ranks, train_on_device, *arguments)
        # the resumed run compares the fingerprint of the last batch with that of the host's
        for found in mock.run(4 - ranks, train, *arguments[:3]):
            assert_same(found, {**expected, "losses": found["losses"]})
    for found in mock.run(2, train_on_device, number, device):
        assert_same(found, expected)


class KeepsTensors(callbacks.Callback):
    """Has tensors of both devices that the steps create."""

    def __init__(self) -> None:
        self.norms: list[torch.Tensor] = []
        self.mean: torch.Tensor | None = None

    def on_step_end(self, context: Any) -> None:
        weight = next(context.trainer.module.parameters()).detach()
        self.norms.append(weight.norm())
        self.mean = torch.stack(self.norms).mean()  # all must be on one device
        self.on_host = self.mean.cpu()


OPTIMIZERS = {
    "Adafactor": {},
    "NAdam": {},
    "ASGD": {},
    "Rprop": {},
    "Adamax": {"foreach": True},
    "RAdam": {},
    "AdamW": {"amsgrad": True},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first", ["cpu", pretend.NAME])
def test_state_is_where_it_was_after_a_resume(tmp_path, name, first):
    def train(
        device: str, stop: int | None = None, **saving: Any
    ) -> tuple[dict[str, np.ndarray], KeepsTensors]:
        with MAKING:
            torch.manual_seed(1)
            net = nn.Sequential(nn.Linear(FEATURES, 5), nn.GELU(), nn.Linear(5, CLASSES))
            net.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
        net.to(device)
        optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.02, **OPTIMIZERS[name])
        trainer = DistributedTrainer(net, optimizer, shard_size=4, other_arithmetic=True)
        keeps = KeepsTensors()
        # a callback's tensors of a CPU can't be on a device after a resume
        kept = [keeps] if first != "cpu" or device == "cpu" and not saving else []
        trainer.fit(make_batches(5), epochs=3, steps=stop, callbacks=kept, verbose=False, **saving)
        return trainer.named_state(), keeps

    expected, _ = train("cpu")
    train(first, 3, checkpoint_dir=tmp_path)
    found, keeps = train(pretend.NAME, checkpoint_dir=tmp_path)
    assert_same(found, expected)
    if keeps.norms:
        assert len(keeps.norms) == 6
        assert {tensor.device.type for tensor in (*keeps.norms, keeps.mean)} == {pretend.NAME}
        assert keeps.on_host.device.type == "cpu"


def test_state_of_a_parameter_that_left_its_group_is_resumed(tmp_path):
    class TakeOut(callbacks.Callback):
        def on_step_end(self, context: Any) -> None:
            if context.steps == 2:
                context.trainer.optimizer.param_groups[0]["params"].pop()

    def train(device: str, stop: int | None = None, **saving: Any) -> dict[str, np.ndarray]:
        net = draw_net(random.Random(3)).to(device)
        trainer = DistributedTrainer(net, torch.optim.AdamW(net.parameters()), shard_size=4)
        trainer.fit(
            make_batches(5), epochs=3, steps=stop, callbacks=[TakeOut()], verbose=False, **saving
        )
        return trainer.named_state()

    expected = train("cpu")
    train(pretend.NAME, 3, checkpoint_dir=tmp_path)
    assert_same(train(pretend.NAME, checkpoint_dir=tmp_path), expected)


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


@dataclasses.dataclass
class Masked:
    """A mean over the targets that aren't 0, in shards of which some have none."""

    own_loop: bool
    zero: int = 0
    shard_size: int = 4
    bad: float | None = None  # the weight of the third batch's shards

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out, y, ignore_index=0)

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        batches = make_batches(7)
        batches[1][1][:9] = 0
        return batches

    def train(self, comm: Any, device: str) -> dict[str, Any]:
        net = draw_net(random.Random(11)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        train = self.train_loop if self.own_loop else self.fit
        losses = train(comm, net, optimizer, device)
        return {**{k: v.cpu().numpy() for k, v in net.state_dict().items()}, "losses": losses}

    def weight(self, y: torch.Tensor) -> torch.Tensor:
        counted = (y != 0).sum()
        return counted if self.bad is None else counted * self.bad

    def fit(self, comm: Any, net: nn.Module, optimizer: Any, device: str) -> list[float]:
        trainer = DistributedTrainer(
            net,
            optimizer,
            self.loss,
            weight=lambda out, y: self.weight(y),
            metrics=["accuracy"],
            shard_size=self.shard_size,
            zero=self.zero,
            clip_norm=0.3,
            comm=comm,
        )
        history = trainer.fit(self.batches(), epochs=3, verbose=False)
        evaluation = trainer.evaluate(self.batches())
        return [*(one["train_loss"] for one in history.records), evaluation.loss]

    def train_loop(self, comm: Any, net: nn.Module, optimizer: Any, device: str) -> list[float]:
        ddp = DistributedDataParallel(net, shard_size=self.shard_size, comm=comm)
        comm.barrier()
        means = []
        for x, y in self.batches() * 3:
            losses = []
            batch = x.to(device), y.to(device)
            for inputs, targets in ddp.shards(batch, weight=lambda shard: self.weight(shard[1])):
                loss = self.loss(ddp(inputs), targets)
                loss.backward()
                losses.append((loss, self.weight(targets)))
            optimizer.step()
            optimizer.zero_grad()
            means.append(ddp.mean(losses))
        return means


@pytest.mark.parametrize(
    "masked", [Masked(False), Masked(False, zero=1), Masked(False, shard_size=3), Masked(True)]
)
def test_weights_of_shards_have_the_bits_of_the_cpu(masked):
    (expected,) = mock.run(1, masked.train, "cpu")
    assert np.isfinite(expected["losses"]).all()
    for ranks in (1, 2, 3):
        for found in mock.run(ranks, masked.train, pretend.NAME):
            assert_same(found, expected)


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
def test_a_weight_that_is_not_allowed_ends_the_step_on_all_ranks(own_loop, bad):
    masked = Masked(own_loop, bad=bad)

    def train(comm: Any) -> str:
        with pytest.raises(ConfigError, match="weight= returns a number below 0, inf") as problem:
            masked.train(comm, pretend.NAME)
        return str(problem.value)

    assert len({*mock.run(2, train)}) == 1


def test_outputs_that_differ_in_the_second_pass_are_found_on_the_device():
    class Drifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)
            self.calls = itertools.count()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + next(self.calls)

    net = Drifting().to(pretend.NAME)
    trainer = DistributedTrainer(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        pull_apart,
        gather=True,
        shard_size=4,
        metrics={},
        deterministic="warn",
    )
    with pytest.raises(ConfigError, match="gives other outputs when it runs again"):
        trainer.fit(make_batches(1), verbose=False)


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


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.float16, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (4, 8), (3, 5), (2, 3, 4, 4)])
def test_marks_of_tensors_are_those_of_the_cpu(dtype, shape):
    tensor = (torch.randn(shape) * 9).to(dtype)
    tensor.view(-1)[-1:] = 1
    copy = tensor.to(pretend.NAME)
    assert mark(copy) == mark(tensor)
    assert mark(copy.transpose(0, -1) if shape else copy) == mark(
        tensor.transpose(0, -1) if shape else tensor
    )
    if tensor.numel():
        copy.view(-1)[-1] = 0
        assert mark(copy) != mark(tensor)


def count_copies(
    shard_size: int,
    clip_norm: float | None,
    use_statistics: bool,
    where: str = "cpu",
    **options: Any,
) -> list[list[int]]:
    """Returns for each step the elements of each copy to the host."""
    norm = nn.BatchNorm1d(5) if use_statistics else nn.LayerNorm(5)
    net = nn.Sequential(nn.Linear(FEATURES, 5), norm, nn.Linear(5, CLASSES)).to(pretend.NAME)
    trainer = DistributedTrainer(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.01),
        shard_size=shard_size,
        clip_norm=clip_norm,
        **{"metrics": ["accuracy"], **options},
    )
    found: list[list[int]] = []

    class Count(callbacks.Callback):
        def on_step_end(self, context: Any) -> None:
            found.append(list(pretend.copies.sizes))
            pretend.copies.sizes.clear()

    batches = [(x.to(where), y.to(where)) for x, y in make_batches(1)]
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


@pytest.mark.parametrize("metrics", [["accuracy"], ["f1"]])
def test_host_copies_nothing_of_later_batches_that_are_on_the_device(metrics):
    ways = [count_copies(4, None, False, where, metrics=metrics) for where in ("cpu", pretend.NAME)]
    # The host looks at the numbers of each epoch's first batch, for its checks and its fingerprint.
    assert ways[0][1::2] == ways[1][1::2]


def test_host_does_not_wait_for_the_weight_of_a_shard():
    plain = count_copies(2, None, False)
    weighted = count_copies(2, None, False, weight=lambda out, y: (y != 0).sum())
    assert weighted == plain


def test_host_waits_once_for_a_loss_across_the_batch():
    sums, extremes, are_same = 32, 2, 8  # the last: outputs of shards that ran twice
    found = count_copies(2, None, False, loss=pull_apart, gather=True)
    assert found == [[are_same, sums, extremes]] * 4


@pytest.mark.parametrize("shard_size", [4, 2])
def test_host_waits_once_for_metrics_of_the_whole_set(shard_size):
    sums, extremes, outputs, targets = 32, 2, 16 * CLASSES, 16
    for sizes in count_copies(shard_size, None, False, metrics=["f1"]):
        *first, last, found_extremes = sizes
        assert (sorted(first), last, found_extremes) == ([targets, outputs], sums, extremes)


@pytest.mark.parametrize("device", ["cpu", pretend.NAME])
def test_forward_may_write_into_its_inputs(device):
    class Clamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.clamp_(0))

    net = Clamps().to(device)
    for where in ("cpu", device):
        batches = [(x.to(where), y.to(where)) for x, y in make_batches(1)]
        before = [x.cpu().clone() for x, _ in batches]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        DistributedTrainer(net, optimizer, shard_size=4).fit(batches, epochs=2, verbose=False)
        for (x, _), values in zip(batches, before, strict=True):
            assert torch.equal(x.cpu(), values)


@pytest.mark.parametrize(
    ("samples", "size"), [(1, 2), (8, 2), (16, 2), (17, 3), (256, 32), (1000, 125)]
)
def test_default_shard_is_an_eighth_of_the_batch(samples, size):
    assert default_shard_size(samples, is_host=False) == size


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


def loop_in_fp16(
    comm: Any, device: str, saved: dict[str, Any] | None = None, stop: int = 16
) -> dict[str, Any]:
    """Trains in a loop of one's own with PyTorch's scaler, whose first scale overflows."""
    with MAKING:
        torch.manual_seed(5)
        # without running statistics: nets of ranks that are threads would see each other's
        module = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES))
    net = DistributedDataParallel(module.to(device), shard_size=4, comm=comm)
    comm.barrier()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**24, growth_interval=3)
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
    scales = []
    means = []
    while net.steps < stop:
        x, y = make_batches(2)[net.steps % 2]
        losses = []
        for inputs, targets in net.shards((x.to(device), y.to(device))):
            with torch.autocast(device, torch.float16):
                loss = nn.functional.cross_entropy(net(inputs), targets)
            scaler.scale(loss).backward()
            losses.append((loss, len(inputs)))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        means.append(net.mean(losses))
    state = net.state_dict()
    for name, value in state.items():
        state[name] = value.cpu().clone()
    return {
        "net": state,
        "optimizer": tree_map_only(torch.Tensor, lambda t: t.cpu(), optimizer.state_dict()),
        "scaler": scaler.state_dict(),
        "scales": scales,
        "means": means,
    }


@pytest.mark.parametrize("device", ["cpu", pretend.NAME])
def test_fp16_in_an_own_loop_skips_the_same_steps_on_any_ranks_and_after_a_resume(device):
    def weights(found: dict[str, Any]) -> list[bytes]:
        return [value.cpu().numpy().tobytes() for value in found["net"].values()]

    (expected,) = mock.run(1, loop_in_fp16, device)
    changes = {b / a for a, b in itertools.pairwise(expected["scales"])}
    assert changes == {0.5, 1.0, 2.0}  # steps were skipped, and scales have grown
    for ranks in (2, 3):
        first = mock.run(ranks, loop_in_fp16, device, None, 7)
        for found in mock.run(5 - ranks, loop_in_fp16, device, first[0]):
            assert weights(found) == weights(expected)
            assert first[0]["scales"] + found["scales"] == expected["scales"]
            assert first[0]["means"] + found["means"] == expected["means"]


ZERO = """
import sys
sys.path.insert(0, sys.argv[1])
import pretend, torch
from torch import nn
from odyssey.callbacks import EMA
from odyssey.capture import mark
from odyssey.torch import DistributedTrainer

CASES = [(zero, kind) for zero in (0, 2, 3) for kind in ("fp32", "fp16", "weight")]
for zero, kind in CASES:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))
    net.to(pretend.NAME)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    options, steps = {}, 3
    if kind == "fp16":  # the first scale overflows
        options = {"precision": kind, "scaler_init_scale": 2.0**24, "scaler_growth_interval": 3}
        steps = 14
    if kind == "weight":
        options = {
            "loss": nn.CrossEntropyLoss(ignore_index=0),
            "weight": lambda out, y: (y != 0).sum(),
        }
    trainer = DistributedTrainer(
        net, optimizer, shard_size=2, zero=zero, clip_norm=0.1, **options
    )
    # the third rank has no shard in the second round, and the third shard has no weight
    batch = torch.randn(8, 6), torch.tensor([0, 1, 2, 0, 0, 0, 1, 2])
    ema = EMA(decay=0.9)
    trainer.fit([batch] * steps, [batch], callbacks=[ema], verbose=False)
    average = mark(ema.average)
    sha = trainer.weights_sha256()
    with ema.applied(trainer):
        applied = trainer.weights_sha256()
    assert trainer.weights_sha256() == sha != applied
    if trainer.comm.rank == 0:
        print(kind, sha, trainer.scaler.skipped, trainer.scaler.value, applied, average)
"""


def test_zero_has_the_bits_and_the_skipped_steps_of_one_process(launch):
    (launch.folder / "program.py").write_text(ZERO)
    found = set()
    for ranks in (0, 2, 3):
        done = launch.python("-W", "ignore", "program.py", Path(__file__).parent, ranks=ranks)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 9
        found.update(done.stdout.splitlines())
    assert sorted(line.split()[0] for line in found) == ["fp16", "fp32", "weight"]
    (skipped,) = (int(line.split()[2]) for line in found if line.startswith("fp16"))
    assert 0 < skipped < 14
