"""Tensors and buffers of unusual forms in callbacks and modules: a run that is stopped and resumed
has the weights of one that never stopped.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from odyssey import callbacks, errors  # noqa: E402
from odyssey.comm import Communicator, mock  # noqa: E402
from odyssey.torch import DistributedTrainer  # noqa: E402


class Sub(torch.Tensor):
    """A tensor of a class of the user's."""


class SubParameter(nn.Parameter):
    """A parameter of a class of the user's."""


class Keeper(callbacks.Callback):
    """Keeps a tensor that changes in each step, and sets the learning rate by it."""

    def __init__(self, tensor: Any, change: Any, in_place: bool) -> None:
        self.tensor = tensor
        self.change = change
        self.in_place = in_place

    def on_step_end(self, context):
        changed = self.change(self.tensor)
        if self.in_place:
            with torch.no_grad():
                self.tensor.copy_(changed)
        else:
            self.tensor = changed
        tensor = self.tensor.detach()
        dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        for group in context.trainer.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + float(dense.sum().abs()))


class Stop(callbacks.Callback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, context):
        if context.steps == self.at:
            context.stop = "the test"


def train(folder, build, stop):
    torch.manual_seed(5)
    net, extra = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    trainer = DistributedTrainer(net, optimizer, shard_size=4, comm=Communicator())
    x = torch.linspace(-1, 1, 24 * 6).reshape(24, 6)
    y = torch.arange(24) % 3
    batches = [(x[:12], y[:12]), (x[12:], y[12:])]
    try:
        trainer.fit(
            batches,
            epochs=3,
            callbacks=[*extra, Stop(stop)],
            checkpoint_dir=folder,
            verbose=False,
        )
    except errors.Stopped:
        pass
    return trainer.weights_sha256(), trainer.steps


def plain_net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


KEPT = {
    "coo": (lambda: torch.eye(3).to_sparse(), lambda t: (t * 0.9).coalesce(), False),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), lambda t: t * 0.9, False),
    "coo in place": (lambda: torch.eye(3).to_sparse(), lambda t: t * 0.9, True),
    "subclass": (lambda: torch.ones(3).as_subclass(Sub), lambda t: t * 0.9, False),
    "subclass in place": (lambda: torch.ones(3).as_subclass(Sub), lambda t: t * 0.9, True),
    "parameter": (lambda: SubParameter(torch.ones(3)), lambda t: t.detach() * 0.9, True),
    "transposed": (lambda: torch.ones(5, 7).t(), lambda t: t * 0.9 + torch.rand(5, 7).t(), False),
}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("stop", [2, 3])
def test_tensor_of_a_callback_is_kept(tmp_path, kind, stop):
    make, change, in_place = KEPT[kind]

    def build():
        return plain_net(), [Keeper(make(), change, in_place)]

    whole = train(tmp_path / "whole", build, None)
    train(tmp_path / "parts", build, stop)
    assert train(tmp_path / "parts", build, None) == whole


class WithBuffers(nn.Module):
    """Has a buffer that is None at first, and one that grows in each step."""

    def __init__(self):
        super().__init__()
        self.layers = plain_net()
        self.register_buffer("late", None)
        self.register_buffer("bank", torch.zeros(0, 6))
        self.register_buffer("early", torch.full((3,), 0.3))

    def forward(self, x):
        y = self.layers(x)
        if self.late is not None:
            y = y * self.late
        if self.early is not None:
            y = y + self.early
        return y + self.bank.sum()


class Grow(callbacks.Callback):
    def on_step_end(self, context):
        module = context.trainer.module
        module.bank = torch.cat([module.bank, torch.full((1, 6), 0.01 * context.steps)])
        if context.steps == 2:
            module.late = torch.ones(3) * 0.7
        if context.steps == 3:
            module.early = None


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_buffers_that_are_late_or_grow_are_kept(tmp_path, stop):
    def build():
        return WithBuffers(), [Grow()]

    whole = train(tmp_path / "whole", build, None)
    train(tmp_path / "parts", build, stop)
    assert train(tmp_path / "parts", build, None) == whole


class ReadState(callbacks.Callback):
    """Sets the rate by the first entry of the optimizer's state, and by its defaults."""

    def on_step_end(self, context):
        optimizer = context.trainer.optimizer
        optimizer.defaults["eps"] *= 2
        first = next(iter(optimizer.state.values()))["exp_avg"]
        scale = 1 + float(first.abs().sum()) + 1e6 * optimizer.defaults["eps"]
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / scale


@pytest.mark.parametrize("stop", [2, 3])
def test_order_of_the_state_and_the_defaults_of_an_optimizer_are_kept(tmp_path, stop):
    def build():
        return plain_net(), [ReadState()]

    whole = train(tmp_path / "whole", build, None)
    train(tmp_path / "parts", build, stop)
    assert train(tmp_path / "parts", build, None) == whole


def test_quantized_tensor_is_named(tmp_path, capsys):
    class Holder(callbacks.Callback):
        def __init__(self):
            self.codes = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)

    with np.errstate(all="ignore"), pytest.raises(errors.ConfigError, match="codes"):
        torch.manual_seed(0)
        net = plain_net()
        trainer = DistributedTrainer(net, torch.optim.SGD(net.parameters(), lr=0.1))
        trainer.fit(
            [(torch.ones(4, 6), torch.zeros(4, dtype=torch.long))],
            epochs=1,
            callbacks=[Holder()],
            state="strict",
            verbose=False,
        )


# --- buffers of other kinds -----------------------------------------------------------------------


class OddBuffers(nn.Module):
    """A net with complex numbers, and with buffers whose numbers have gaps or share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("turn", torch.full((4,), 0.5 + 0.5j), persistent=False)
        self.register_buffer("gaps", torch.ones(6)[::2])
        self.register_buffer("shared", torch.ones(1).expand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.turn.abs()) * self.gaps * self.shared


class Turns(callbacks.Callback):
    """Changes the buffers after each step."""

    def on_step_end(self, context: callbacks.Context) -> None:
        module = context.trainer.module
        module.turn *= 0.9 + 0.1j
        module.gaps *= 1.1


def test_complex_and_expanded_buffers_are_kept(tmp_path):
    torch.manual_seed(0)
    original = OddBuffers()
    batches = [(torch.randn(12, 4), torch.arange(12) % 3) for _ in range(4)]

    def train(comm, steps=None, folder=None):
        module = copy.deepcopy(original)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        trainer = DistributedTrainer(module, optimizer, comm=comm, shard_size=4)
        saving = {} if folder is None else {"checkpoint_dir": folder, "resume": "auto"}
        trainer.fit(batches, steps=steps, verbose=False, callbacks=[Turns()], **saving)
        return trainer.weights_sha256()

    (expected,) = mock.run(1, train)
    assert mock.run(3, train) == [expected] * 3
    mock.run(2, lambda comm: train(comm, 2, tmp_path))
    assert mock.run(3, lambda comm: train(comm, None, tmp_path)) == [expected] * 3


def test_a_sparse_buffer_is_named():
    module = OddBuffers()
    module.register_buffer("edges", torch.eye(3).to_sparse())
    with pytest.raises(errors.ConfigError, match="the buffer edges is sparse"):
        DistributedTrainer(module, torch.optim.SGD(module.parameters(), lr=0.1))
