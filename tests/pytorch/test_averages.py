"""EMA and SWA of PyTorch modules: random modules with ZeRO 0 to 3, compared with a plain
recomputation from the weights of each step, and with torch.optim.swa_utils; evaluations, resumed
runs.
"""

from __future__ import annotations

import collections
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import odyssey
from odyssey import data
from odyssey.base.outputs import read_weights
from odyssey.callbacks import EMA, SWA, Callback, Context, averages
from odyssey.comm import mock
from odyssey.errors import Stopped

torch = pytest.importorskip("torch")

from pytorch import pretend  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import swa_utils  # noqa: E402

import odyssey.torch as ot  # noqa: E402
from odyssey.torch import device_averages  # noqa: E402

Weights = dict[str, np.ndarray]
MAKING = threading.Lock()  # of initial weights: ranks are threads, and torch has one generator
WIDTH, CLASSES, BATCH = 6, 3, 16
SHARES = 3  # the seed of modules with a buffer in the memory of a parameter
# (ranks, zero)
LAYOUTS = [(1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (2, 2), (3, 2), (1, 3), (2, 3), (3, 3)]
# ranks that are threads can't share out gradients on a device
DEVICE_LAYOUTS = [(1, 0), (2, 0), (3, 1), (1, 3)]
# (ranks, zero, device)
LAYOUTS_ON_DEVICES = [
    *((ranks, zero, "cpu") for ranks, zero in LAYOUTS),
    *((ranks, zero, pretend.NAME) for ranks, zero in DEVICE_LAYOUTS),
]


class Module(nn.Module):
    """Random layers, and buffers of several types that don't change: a mask of infinities."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        r = random.Random(seed)
        width = r.randint(4, 10)
        self.conv = nn.Conv1d(1, 2, 3, bias=r.random() < 0.5)
        self.first = nn.Linear(2 * (WIDTH - 2), width)
        self.norm = nn.BatchNorm1d(width)
        layers: list[nn.Module] = []
        for _ in range(r.randint(1, 3)):
            # No dropout: ranks are threads, and torch has one generator.
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.hidden = nn.Sequential(*layers)
        self.last = nn.Linear(width, width)
        if r.random() < 0.5:
            self.last.weight = self.hidden[0].weight  # tied
        self.head = nn.Linear(width, CLASSES)
        self.scale = nn.Parameter(torch.tensor(0.7))
        if r.random() < 0.5:
            self.first.bias.requires_grad_(False)
        mask = torch.zeros(width)
        mask[0] = -torch.inf
        self.register_buffer("mask", mask)
        self.register_buffer("table", torch.linspace(0, 1, width, dtype=torch.float64))
        self.register_buffer("index", torch.arange(width))
        if seed == SHARES:
            self.register_buffer("row", self.head.weight.detach()[0])  # shares memory

    def forward(self, x):
        x = torch.relu(self.conv(x[:, None]).flatten(1))
        x = self.hidden(self.norm(self.first(x)))
        x = self.last(x) * self.scale + self.table.float()
        return self.head(x * torch.exp(self.mask))


class Recorder(Callback):
    """Records the weights at the start, after each step, and at each epoch's end."""

    def __init__(self) -> None:
        self.steps: list[Weights] = []
        self.epochs: list[Weights] = []

    def on_fit_start(self, context: Context) -> None:
        self.start = context.trainer.state_dict()

    def on_step_end(self, context: Context) -> None:
        if context.step.taken:
            self.steps.append(context.trainer.state_dict())

    def on_epoch_end(self, context: Context) -> None:
        self.epochs.append(context.trainer.state_dict())


def samples(seed: int, count: int = 60) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, WIDTH)).astype(np.float32)
    return data.arrays(x, rng.integers(0, CLASSES, count))


def loader(seed: int) -> data.DataLoader:
    return data.DataLoader(samples(seed), batch_size=BATCH, shuffle=True, seed=seed)


def make_trainer(
    comm: Any, seed: int, zero: int, device: str = "cpu", **options: Any
) -> ot.DistributedTrainer:
    with MAKING:
        torch.manual_seed(seed)
        module = Module(seed).to(device)
    parameters = [p for p in module.parameters() if p.requires_grad]
    kind = [torch.optim.SGD, torch.optim.AdamW][seed % 2]
    optimizer = kind(parameters, lr=0.05)
    return ot.DistributedTrainer(module, optimizer, comm=comm, shard_size=4, zero=zero, **options)


def moved(average: np.ndarray, weights: np.ndarray, rate: float) -> np.ndarray:
    if not np.issubdtype(average.dtype, np.floating):
        return weights
    with np.errstate(invalid="ignore"):
        result = average + average.dtype.type(rate) * (weights - average)
    return np.where(weights == average, average, result)


def plain_ema(start: Weights, steps: Sequence[Weights], decay: float) -> Weights:
    average = start
    for n, weights in enumerate(steps):
        now = min(decay, (1 + n) / (10 + n))
        average = {name: moved(average[name], weights[name], 1 - now) for name in average}
    return average


def plain_swa(epochs: Sequence[Weights]) -> Weights:
    average = epochs[0]
    for n, weights in enumerate(epochs[1:], 1):
        average = {name: moved(average[name], weights[name], 1 / (1 + n)) for name in average}
    return average


def assert_same(found: Weights, expected: Weights) -> None:
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("ranks, zero, device", LAYOUTS_ON_DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_averages_are_those_of_the_recorded_weights(ranks, zero, device, seed):
    """And an evaluation of the average leaves no trace."""
    if seed == SHARES and zero == 3:
        pytest.skip("the trainer doesn't support such buffers with zero=3")
    if seed == SHARES and device != "cpu":
        pytest.skip("module.to() gives such buffers separate memory")
    validation = samples(99, 20)

    def train(comm, zero, evaluate, device="cpu"):
        ema = EMA(decay=0.9, evaluate=evaluate and seed % 2 == 0)
        swa = SWA(2, evaluate=evaluate and seed % 2 == 1)
        recorder = Recorder()
        trainer = make_trainer(comm, seed, zero, device)
        trainer.fit(
            loader(seed), validation, epochs=4, callbacks=[ema, swa, recorder], verbose=False
        )
        return ema.average, swa.average, recorder, trainer.weights_sha256()

    [(ema, swa, recorder, sha)] = mock.run(1, train, 0, False)
    assert len(recorder.steps) == 16
    expected_ema = plain_ema(recorder.start, recorder.steps, 0.9)
    expected_swa = plain_swa(recorder.epochs[1:])
    assert np.isneginf(expected_ema["mask"][0])
    assert_same(ema, expected_ema)
    assert_same(swa, expected_swa)
    for rank_ema, rank_swa, rank_recorder, rank_sha in mock.run(ranks, train, zero, True, device):
        assert_same(rank_ema, expected_ema)
        assert_same(rank_swa, expected_swa)
        for rank_weights, weights in zip(rank_recorder.steps, recorder.steps, strict=True):
            assert_same(rank_weights, weights)
        assert rank_sha == sha


@pytest.mark.parametrize("ranks, zero, device", LAYOUTS_ON_DEVICES)
def test_the_record_is_that_of_the_average(ranks, zero, device):
    validation = samples(99, 20)

    def train(comm, zero, device="cpu"):
        trainer = make_trainer(comm, 1, zero, device)
        ema = EMA(decay=0.9)
        history = trainer.fit(loader(1), validation, epochs=3, callbacks=[ema], verbose=False)
        before = trainer.weights_sha256()
        weights_loss = trainer.evaluate(validation).loss
        with pytest.raises(KeyError), ema.applied(trainer):
            assert_same(trainer.state_dict(), ema.average)
            assert trainer.evaluate(validation).loss == history.records[-1]["test_loss"]
            raise KeyError
        assert trainer.weights_sha256() == before
        assert trainer.evaluate(validation).loss == weights_loss
        ema.apply(trainer)
        assert_same(trainer.state_dict(), ema.average)
        trainer.fit(loader(1), epochs=1, verbose=False)
        losses = [record["test_loss"] for record in history.records]
        return losses, weights_loss, trainer.weights_sha256()

    [(losses, weights_loss, sha)] = mock.run(1, train, 0)
    assert losses[-1] != weights_loss
    for result in mock.run(ranks, train, zero, device):
        assert result == (losses, weights_loss, sha)


def test_the_averages_are_about_those_of_torch():
    """AveragedModel with buffers, updated in a plain loop over the same weights."""
    seed = 0
    trainer = make_trainer(None, seed, 0)
    source = make_trainer(None, seed, 0).module
    ema = EMA(decay=0.9, warmup=False, evaluate=False)
    swa = SWA(1, evaluate=False)
    recorder = Recorder()
    trainer.fit(loader(seed), epochs=3, callbacks=[ema, swa, recorder], verbose=False)

    def averaged(start: Any, states: Sequence[Weights], average: Callable[..., Any]) -> Weights:
        model = swa_utils.AveragedModel(source, multi_avg_fn=average, use_buffers=False)
        for state in (start, *states):
            source.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in state.items()}, False)
            model.update_parameters(source)
        return {name: p.detach().numpy() for name, p in model.module.named_parameters()}

    states = averaged(recorder.start, recorder.steps, swa_utils.get_ema_multi_avg_fn(0.9))
    for name, array in states.items():
        np.testing.assert_allclose(ema.average[name], array, rtol=1e-5, atol=1e-6)
    first, *others = recorder.epochs
    states = averaged(first, others, swa_utils.get_swa_multi_avg_fn())
    for name, array in states.items():
        np.testing.assert_allclose(swa.average[name], array, rtol=1e-5, atol=1e-6)


def test_update_bn_of_torch_after_apply():
    """The documented way to compute the running statistics again, with parts on 2 ranks."""
    x, _ = samples(5).gather(np.arange(60))
    batches = [torch.from_numpy(x[i : i + BATCH]) for i in range(0, 60, BATCH)]

    def train(comm, zero):
        trainer = make_trainer(comm, 1, zero)
        swa = SWA(1)
        trainer.fit(loader(1), epochs=2, callbacks=[swa], verbose=False)
        swa.apply(trainer)
        with trainer.gathered() as module:
            swa_utils.update_bn(batches, module)
        state = trainer.state_dict()
        for name, array in swa.average.items():
            if not name.startswith("norm.") or name in ("norm.weight", "norm.bias"):
                assert state[name].tobytes() == array.tobytes()
        assert state["norm.running_var"].tobytes() != swa.average["norm.running_var"].tobytes()
        return state

    [expected] = mock.run(1, train, 0)
    for state in mock.run(2, train, 3):
        assert_same(state, expected)


@pytest.mark.parametrize("device", ["cpu", pretend.NAME])
def test_export_within_applied_writes_the_average(tmp_path, device):
    trainer = make_trainer(None, 1, 0, device)
    ema = EMA()
    trainer.fit(loader(1), epochs=1, callbacks=[ema], verbose=False)
    with ema.applied(trainer):
        odyssey.export(trainer, tmp_path / "averaged.safetensors")
    saved, _ = read_weights(tmp_path / "averaged.safetensors")
    assert_same(saved, ema.average)
    other = make_trainer(None, 1, 0)
    other.module.load_state_dict({k: torch.from_numpy(v) for k, v in saved.items()}, False)
    assert_same(other.state_dict(), ema.average)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, context: Context) -> None:
        if context.steps == self.step:
            context.stop = "the test"


@pytest.mark.parametrize(
    "first, second",
    [
        ((1, 0, "cpu"), (3, 3, "cpu")),
        ((2, 1, "cpu"), (2, 0, "cpu")),
        ((3, 3, "cpu"), (2, 2, "cpu")),
        ((2, 0, pretend.NAME), (3, 1, pretend.NAME)),
        ((1, 3, pretend.NAME), (3, 2, "cpu")),
        ((3, 3, "cpu"), (2, 0, pretend.NAME)),
    ],
)
@pytest.mark.parametrize("stop", [3, 8])
def test_a_resumed_run_has_the_same_averages(first, second, stop, tmp_path):
    """Needs the capture of callbacks' attributes in checkpoints."""

    def train(comm, zero, device, callbacks, **fit):
        ema, swa = EMA(decay=0.9, evaluate=False), SWA(1)
        trainer = make_trainer(comm, 2, zero, device, other_arithmetic=True)
        try:
            history = trainer.fit(
                loader(2),
                samples(99, 20),
                epochs=4,
                callbacks=[ema, swa, *callbacks],
                verbose=False,
                **fit,
            )
        except Stopped:
            return None
        losses = [record["test_loss"] for record in history.records]
        return ema.average, swa.average, [losses, ema.steps, swa.updates, trainer.weights_sha256()]

    def checkpointed(comm, zero, device, step):
        fit = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
        return train(comm, zero, device, [StopAt(step)], **fit)

    [(expected_ema, expected_swa, others)] = mock.run(1, train, 0, "cpu", [])
    ranks, zero, device = first
    assert mock.run(ranks, checkpointed, zero, device, stop) == [None] * ranks
    ranks, zero, device = second
    for ema, swa, rank_others in mock.run(ranks, checkpointed, zero, device, 0):
        assert rank_others == others
        assert_same(ema, expected_ema)
        assert_same(swa, expected_swa)


def test_an_average_on_a_device_copies_nothing_to_the_host():
    def count(callbacks: list[Any]) -> list[list[int]]:
        """Returns for each step the elements of each copy to the host."""
        sizes: list[list[int]] = []

        class Count(Callback):
            after = 1  # after the averages

            def on_step_end(self, context: Context) -> None:
                sizes.append(list(pretend.copies.sizes))
                pretend.copies.sizes.clear()

        trainer = make_trainer(None, 0, 0, pretend.NAME)
        trainer.fit(loader(0), epochs=3, callbacks=[*callbacks, Count()], verbose=False)
        return sizes[8:]  # the first epochs look at more

    first, *others = count([EMA(decay=0.9), SWA(1, evaluate=False)])
    first_without, *others_without = count([])
    assert others == others_without
    # when an epoch starts, the device computes fingerprints of the averages
    more = collections.Counter(first) - collections.Counter(first_without)
    assert set(more) == {1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("rate", [1.0, 0.9, 0.1, 1e-4, 1 / 3])
def test_device_moves_random_numbers_as_numpy_does(dtype, rate, monkeypatch):
    monkeypatch.setattr(device_averages, "GROUP_ELEMENTS", 40)
    draw = torch.Generator().manual_seed(3)
    shapes = [(5, 7), (), (0,), (33,), (4, 3, 2, 2)]
    old, new = (
        [(torch.randn(shape, generator=draw) * 100).to(dtype) for shape in shapes] for _ in range(2)
    )
    new[0][2] = old[0][2]
    if dtype.is_floating_point:
        old[0][2, 3] = new[0][2, 3] = float("-inf")
        old[0][2, 4] = new[0][2, 4] = -0.0
    for is_buffer in (False, True):
        expected = []
        for average, weight in zip(old, new, strict=True):
            array = average.numpy().copy()
            if rate == 1 or not dtype.is_floating_point:
                array[...] = weight.numpy()
            else:
                with np.errstate(invalid="ignore"):
                    averages._move_towards(
                        array, weight.numpy(), rate, np.empty_like(array), is_buffer
                    )
            expected.append(array)
        found = [average.to(pretend.NAME) for average in old]
        targets = [weight.to(pretend.NAME) for weight in new]
        device_averages.move_averages(found, targets, rate, is_buffer)
        for moved_average, array in zip(found, expected, strict=True):
            assert moved_average.cpu().numpy().tobytes() == array.tobytes()
