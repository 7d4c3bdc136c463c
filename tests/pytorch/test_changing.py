"""What callbacks change of a torch module while it is trained: applied, kept in checkpoints, the
same on any ranks.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import random
import time

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed (extra [torch])", allow_module_level=True)

import torch
from torch import nn

from odyssey import callbacks
from odyssey.comm import mock
from odyssey.errors import ConfigError
from odyssey.torch import DistributedTrainer

torch.manual_seed(1)
BATCHES = [(torch.randn(12, 6), torch.randint(0, 3, (12,))) for _ in range(3)]


class Net(nn.Module):
    """With a number that a callback changes, and things that forward() leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.1)
        self.last = nn.Linear(5, 3)
        self.gain, self.scales, self.seen = 1.0, {"first": 1.0}, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.first(x))) * self.scales["first"]
        self.seen, self.length, self.mean = x.detach(), len(x), float(x.detach().mean())
        return self.last(x) * self.gain


class Changes(callbacks.Callback):
    """Calls a function of (trainer, steps) after each step."""

    def __init__(self, after) -> None:
        self.after = after

    def on_step_end(self, context: callbacks.Context) -> None:
        self.after(context.trainer, context.steps)


def made(
    frozen: tuple[str, ...] = (), parameters=lambda m: m.parameters(), **settings
) -> DistributedTrainer:
    torch.manual_seed(0)
    module = Net()
    for name, p in module.named_parameters():
        p.requires_grad_(name not in frozen)
    return DistributedTrainer(
        module, torch.optim.SGD(parameters(module), 0.1, momentum=0.9), shard_size=4, **settings
    )


def fitted(
    after, stop: int | None = None, frozen: tuple[str, ...] = (), more=None, **fit
) -> DistributedTrainer:
    trainer = made(frozen, **(more or {}))
    trainer.fit(BATCHES, epochs=3, steps=stop, callbacks=[Changes(after)], verbose=False, **fit)
    return trainer


def at(step: int, change):
    """A function of (trainer, steps) that does something after one step."""
    return lambda trainer, steps: change(trainer, trainer.module) if steps == step else None


def set_drop(trainer, module) -> None:
    module.drop.p = 0.6


def set_momentum(trainer, module) -> None:
    module.norm.momentum = 0.9


def set_gain(trainer, module) -> None:
    module.gain *= 2.0


def set_scales(trainer, module) -> None:
    module.scales["first"] = 3.0


def evaluate_norm(trainer, module) -> None:
    module.norm.eval()


def freeze(trainer, module) -> None:
    module.first.weight.requires_grad_(False)


def unfreeze(trainer, module) -> None:
    module.first.weight.requires_grad_(True)


def set_rate(trainer, module) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.5
        group["momentum"] = 0.5


def clip(trainer, module) -> None:
    trainer.clip_norm = 0.01


def set_rate_of_numpy(trainer, module) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] = np.float32(0.05 * np.cos(0.5))
        group["momentum"] = np.array(0.5)
        group["weight_decay"] = np.float64(0.01)


def set_rate_to_a_tensor(trainer, module) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] = torch.tensor(0.03)


CHANGES = [
    set_rate_of_numpy,
    set_rate_to_a_tensor,
    set_drop,
    set_momentum,
    set_gain,
    set_scales,
    evaluate_norm,
    freeze,
    unfreeze,
    set_rate,
    clip,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_applied_and_survives_a_restart(tmp_path, change):
    """Made after step 4; stopped after it in the same epoch, and an epoch later."""
    frozen = ("first.weight",) if change is unfreeze else ()
    plain = fitted(at(99, change), frozen=frozen).weights_sha256()
    whole = fitted(at(4, change), frozen=frozen)
    assert whole.weights_sha256() != plain
    for stop in (5, 7):
        saving = {"checkpoint_dir": tmp_path / str(stop), "checkpoint_every": 1}
        fitted(at(4, change), stop, frozen, **saving)
        after = fitted(at(4, change), None, frozen, **saving)
        assert after.weights_sha256() == whole.weights_sha256()
        assert after.module.norm.training == (change is not evaluate_norm)


def test_a_second_fit_begins_with_what_the_first_left(tmp_path):
    """A checkpoint's settings are compared with those at the beginning of its own fit()."""

    def both(folder: str, stop: int | None) -> str:
        trainer = fitted(at(4, set_gain), checkpoint_dir=tmp_path / folder / "1")
        second = [Changes(at(12, set_drop))]
        saving = {"checkpoint_dir": tmp_path / folder / "2", "checkpoint_every": 1}
        trainer.fit(BATCHES, epochs=3, steps=stop, callbacks=second, verbose=False, **saving)
        assert trainer.module.gain == 2.0
        return trainer.weights_sha256()

    whole = both("whole", None)
    both("stopped", 5)
    assert both("stopped", None) == whole


def test_a_group_that_is_added_goes_on(tmp_path):
    """As in gradual unfreezing: the optimizer is given what it did not have."""

    def add(trainer, module) -> None:
        module.first.weight.requires_grad_(True)
        trainer.optimizer.add_param_group({"params": [module.first.weight], "lr": 0.3})

    more = {"parameters": lambda m: [p for n, p in m.named_parameters() if n != "first.weight"]}
    whole = fitted(at(4, add), None, ("first.weight",), more)
    assert len(whole.optimizer.param_groups) == 2
    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    fitted(at(4, add), 5, ("first.weight",), more, **saving)
    assert (
        fitted(at(4, add), None, ("first.weight",), more, **saving).weights_sha256()
        == whole.weights_sha256()
    )


def test_what_forward_leaves_behind_is_no_setting(tmp_path):
    trainer = fitted(at(99, set_gain), checkpoint_dir=tmp_path)
    set_by_forward = {"model.seen", "model.length", "model.mean"}
    assert set_by_forward <= trainer.capture.by_forward
    assert not set_by_forward & set(trainer.capture.compared())
    assert not set_by_forward & set(trainer.state({}).values["captured"]["values"])


def test_a_forward_that_counts_its_calls_is_refused():
    class Counting(Net):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    module = Counting()
    trainer = DistributedTrainer(module, torch.optim.SGD(module.parameters(), 0.1), shard_size=4)
    with pytest.raises(ConfigError, match=r"forward\(\) counts in model.calls \(\d+, then \d+\)"):
        trainer.fit(BATCHES, epochs=3, verbose=False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, m: setattr(m, "more", nn.Linear(2, 2)), "the submodule more is new since"),
        (
            lambda t, m: setattr(m, "last", nn.Linear(5, 3)),
            "the submodule last is another one since",
        ),
        (
            lambda t, m: m.register_parameter("bias", nn.Parameter(torch.zeros(3))),
            "the parameter bias is new since",
        ),
        (
            lambda t, m: setattr(m.last, "bias", nn.Parameter(torch.zeros(3))),
            "the parameter last.bias is another one",
        ),
    ],
)
def test_another_structure_is_refused_by_name(change, says):
    with pytest.raises(ConfigError, match=says):
        fitted(at(2, change))


def test_an_older_checkpoint_leaves_settings_as_they_are(tmp_path):
    trainer = fitted(at(4, set_gain))
    snapshot = trainer.state({})
    for newer in ("changed", "captured"):
        del snapshot.values[newer]
    del snapshot.values["optimizer"]["names"], snapshot.values["optimizer"]["typed"]
    other = made()
    other.module.gain = 7.0
    other.load(snapshot, "an older one")
    assert other.module.gain == 7.0 and other.steps == 9


class CosineOfNumpy(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler as users write it: its rates are np.float64, and so is a number of its own."""

    def __init__(self, optimizer) -> None:
        self.scale = np.float64(1.0)
        super().__init__(optimizer)

    def get_lr(self):
        self.scale = self.scale * np.float64(0.9)
        return [base * self.scale * np.cos(self.last_epoch / 8) for base in self.base_lrs]


def test_a_scheduler_with_numbers_of_numpy_goes_on(tmp_path):
    def scheduled(steps=None, folder=None):
        torch.manual_seed(0)
        module = Net()
        optimizer = torch.optim.AdamW(module.parameters(), 0.1)
        trainer = DistributedTrainer(
            module, optimizer, scheduler=CosineOfNumpy(optimizer), shard_size=4
        )
        trainer.fit(BATCHES, epochs=3, steps=steps, checkpoint_dir=folder, verbose=False)
        return trainer.weights_sha256()

    whole = scheduled()
    scheduled(4, tmp_path)
    assert scheduled(None, tmp_path) == whole


def test_a_rate_of_numpy_is_compared_between_ranks():
    def work(comm):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(BATCHES[0][0][0].numel(), 5))
        trainer = DistributedTrainer(
            module, torch.optim.SGD(module.parameters(), 0.1), shard_size=4, comm=comm
        )
        trainer.optimizer.param_groups[0]["lr"] = np.float64(0.1 + 0.1 * comm.rank)
        trainer.check_alike()

    with pytest.raises(ConfigError, match="group 0 of the optimizer is"):
        mock.run(2, work)


# --- draws from generators without a seed ---------------------------------------------------------

UNSEEDED = {
    "numpy": lambda: float(np.random.default_rng().normal()),
    "os": lambda: int.from_bytes(os.urandom(6), "big") / 2**48,
    "random": lambda: random.SystemRandom().random(),
    "time": lambda: time.perf_counter() % 1,
}


class Noisy(nn.Module):
    """Multiplies by a number that is drawn."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.seen = 0.0
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = float(x.detach().mean())  # it is not read
        return self.layer(x) * (1 + self.draw())


def train(comm, draw=float, in_loss=False, **settings) -> str:
    torch.manual_seed(0)
    module = Noisy(float if in_loss else draw)
    loss = nn.CrossEntropyLoss()
    trainer = DistributedTrainer(
        module,
        torch.optim.SGD(module.parameters(), 0.1),
        (lambda out, y: loss(out, y) * (1 + draw())) if in_loss else loss,
        shard_size=4,
        comm=comm,
        **settings,
    )
    trainer.fit(BATCHES, verbose=False)
    return trainer.weights_sha256()


@pytest.mark.parametrize(
    ("kind", "ranks"), [*((kind, 1) for kind in UNSEEDED), ("numpy", 2), ("os", 3)]
)
@pytest.mark.parametrize("in_loss", [False, True])
def test_draws_without_a_seed_are_named(kind, in_loss, ranks, capsys):
    def run(comm=None) -> str:
        return train(comm, UNSEEDED[kind], in_loss)

    with pytest.raises(ConfigError, match="other results when it computes the same samples again"):
        run() if ranks == 1 else mock.run(ranks, run)
    assert "no mean over samples" not in capsys.readouterr().err


@pytest.mark.parametrize("draw", [float, lambda: torch.rand(()).item(), np.random.rand])
@pytest.mark.parametrize("in_loss", [False, True])
def test_seeded_draws_are_allowed(draw, in_loss, capsys):
    assert train(None, draw, in_loss) == train(None, draw, in_loss)
    assert "no mean over samples" not in capsys.readouterr().err


def test_other_results_are_allowed_without_determinism():
    train(None, UNSEEDED["numpy"], deterministic="warn")


def noisy_metric(draw):
    def noisy(out: torch.Tensor, y: torch.Tensor):
        return (out.argmax(1) == y).float().mean() * float(draw())

    return {"noisy": noisy}


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), np.random.rand])
def test_a_metric_may_draw_from_the_process(draw):
    train(None, metrics=noisy_metric(draw))


@pytest.mark.parametrize("kind", UNSEEDED)
def test_a_metric_that_draws_without_a_seed_is_an_error(kind):
    with pytest.raises(ConfigError, match="the metric noisy has another value when it is called"):
        train(None, metrics=noisy_metric(UNSEEDED[kind]))
    train(None, metrics=noisy_metric(UNSEEDED[kind]), deterministic="warn")


class Recording(nn.Module):
    """Adds a hook in its first forward(), and notes that it has, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "_is_hooked", False):
            self.first.register_forward_hook(lambda layer, inputs, out: out * 0.5)
            self._is_hooked = True
        return self.last(self.first(x))


def test_hooks_that_forward_adds_are_added_once():
    original = Recording()

    def train(comm):
        module = copy.deepcopy(original)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        trainer = DistributedTrainer(module, optimizer, shard_size=4, comm=comm)
        trainer.fit(BATCHES, verbose=False)
        return len(module.first._forward_hooks), trainer.weights_sha256()

    ((hooks, expected),) = mock.run(1, train)
    assert hooks == 1
    for ranks in (2, 3):
        assert mock.run(ranks, train) == [(1, expected)] * ranks


# --- what backward() changes ----------------------------------------------------------------------


class Reverse(torch.autograd.Function):
    """Scales a gradient by a number of its class."""

    factor = 1.0
    rises = False

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if Reverse.rises:
            Reverse.factor += 0.5
        return gradient * Reverse.factor


class Reversed(nn.Module):
    """A net with such a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Reverse.apply(self.first(x)))


class Scaler:
    """A hook that scales by the norm of earlier gradients, or notes it only."""

    def __init__(self, reads: bool) -> None:
        self.mean = 1.0
        self.reads = reads

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * float(gradient.norm())
        return gradient / self.mean if self.reads else gradient


def counting_hook(reads: bool):
    """Returns a hook of a module with a number in its closure."""
    calls = 0.5

    def hook(module, inputs, outputs):
        nonlocal calls
        calls *= 1.5
        return tuple(g if g is None or not reads else g * calls for g in inputs)

    return hook


def with_gradient_hook(module: Reversed, reads: bool) -> None:
    module.last.weight.register_hook(Scaler(reads))


def with_late_hook(module: Reversed, reads: bool) -> None:
    scaler = Scaler(reads)

    def hook(parameter: nn.Parameter) -> None:
        parameter.grad.copy_(scaler(parameter.grad))

    module.first.weight.register_post_accumulate_grad_hook(hook)


def with_module_hook(module: Reversed, reads: bool) -> None:
    module.last.register_full_backward_hook(counting_hook(reads))


def with_function(module: Reversed, reads: bool) -> None:
    Reverse.rises = reads


@pytest.mark.parametrize(
    "add", [with_gradient_hook, with_late_hook, with_module_hook, with_function]
)
@pytest.mark.parametrize("reads", [True, False])
def test_what_backward_changes_and_reads_is_an_error(add, reads, monkeypatch):
    monkeypatch.setattr(Reverse, "factor", 1.0)
    monkeypatch.setattr(Reverse, "rises", False)
    original = Reversed()

    def train(comm) -> str:
        module = copy.deepcopy(original)
        add(module, reads)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        trainer = DistributedTrainer(module, optimizer, shard_size=4, comm=comm)
        trainer.fit(BATCHES, epochs=1, verbose=False)
        return trainer.weights_sha256()

    if reads:
        with pytest.raises(ConfigError, match="changes .* and reads it: how often that runs"):
            mock.run(1, train)
    else:
        assert len(set(mock.run(3, train) + mock.run(1, train))) == 1


# --- with ZeRO ------------------------------------------------------------------------------------


class CountingLoss:
    """A loss that uses how often it was called, or notes it only."""

    def __init__(self, reads: bool) -> None:
        self.weight = 1.0
        self.reads = reads

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.weight *= 0.9
        loss = nn.functional.cross_entropy(output, target)
        return loss * self.weight if self.reads else loss


class CountingNet(Reversed):
    """A net that uses how often forward() was called, or notes it only."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.weights = {"first": 1.0}
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weights["first"] *= 0.9
        output = super().forward(x)
        return output * self.weights["first"] if self.reads else output


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4])  # of 4 ranks, one has no shard
@pytest.mark.parametrize("place", ["loss", "forward", "hook"])
@pytest.mark.parametrize("reads", [True, False])
def test_zero_finds_state_that_a_shard_uses(zero, ranks, place, reads):
    original = Reversed()

    def train(comm) -> str:
        module = CountingNet(reads and place == "forward")
        module.load_state_dict(original.state_dict())
        if place == "hook":
            module.last.weight.register_hook(Scaler(reads))
        loss = CountingLoss(reads and place == "loss")
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        trainer = DistributedTrainer(module, optimizer, loss, shard_size=4, comm=comm, zero=zero)
        trainer.fit(BATCHES, verbose=False)
        return trainer.weights_sha256()

    if reads:
        with pytest.raises(ConfigError, match="changes .* and reads it: how often that runs"):
            mock.run(ranks, train)
    else:
        assert len({*mock.run(ranks, train), *mock.run(1, train)}) == 1
