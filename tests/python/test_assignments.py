"""A value that is assigned to a trainer takes effect and is checked as the constructor's, or it is
refused.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import DistributedTrainer, callbacks, data, nn, optim
from odyssey.errors import ConfigError, Stopped

X = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 40)


def native(**settings):
    nn.manual_seed(0)
    return DistributedTrainer(
        nn.Linear(6, 3), optim.SGD(lr=0.5), shard_size=8, threads=1, **settings
    )


def torch_trainer(**settings):
    torch = pytest.importorskip("torch")
    import odyssey.torch

    torch.manual_seed(0)
    module = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    return odyssey.torch.DistributedTrainer(module, optimizer, shard_size=8, **settings)


def weights_after(trainer, change):
    """The weights of a training in whose middle something is assigned."""
    loader = data.DataLoader(data.arrays(X, Y), 20, shuffle=True)
    trainer.fit(loader, epochs=1, verbose=False)
    change(trainer)
    trainer.fit(loader, epochs=1, verbose=False)
    return trainer.weights_sha256()


@pytest.mark.parametrize("make", [native, torch_trainer])
@pytest.mark.parametrize("norm", [-0.01, 0, 0.0, float("nan"), float("inf"), "0.1", True, [0.1]])
def test_a_norm_that_the_constructor_refuses_cannot_be_assigned(make, norm):
    trainer = make(clip_norm=1.0)
    with pytest.raises(ConfigError, match="clip_norm is .*a number above 0") as refused:
        trainer.clip_norm = norm
    assert trainer.clip_norm == 1.0
    with pytest.raises(ConfigError) as refused_at_construction:
        make(clip_norm=norm)
    assert str(refused.value) == str(refused_at_construction.value)


@pytest.mark.parametrize("make", [native, torch_trainer])
@pytest.mark.parametrize("norm", [np.float32(0.25), np.float64(0.25), np.array(0.25), 0.25])
def test_a_norm_takes_effect_whatever_kind_of_number_it_is(make, norm):
    def assign(trainer):
        trainer.clip_norm = norm

    after = weights_after(make(clip_norm=1e9), assign)
    assert after != weights_after(make(clip_norm=1e9), lambda trainer: None)

    def assign_float(trainer):
        trainer.clip_norm = 0.25

    assert after == weights_after(make(clip_norm=1e9), assign_float)


def test_a_checkpoint_holds_a_norm_of_numpy(tmp_path):
    trainer = native(clip_norm=1.0)
    trainer.clip_norm = np.float32(0.5)
    trainer.save_checkpoint(tmp_path)
    other = native(clip_norm=1.0)
    other.load_checkpoint(tmp_path)
    assert other.clip_norm == 0.5


FIXED = {
    "native": "seed precision accumulation_steps check_every comm layout loss lr_scaling "
    "base_batch_size mesh metrics mode model optimizer replicas scaler schedule settings "
    "threads workers arena device",
    "torch": "seed precision accumulation_steps check_every comm deterministic gather layout loss "
    "mesh metrics mode module optimizer replicas scaler scheduler settings shards strategy threads "
    "workers zero arena",
}


@pytest.mark.parametrize(
    ("make", "name"),
    [(native, name) for name in FIXED["native"].split()]
    + [(torch_trainer, name) for name in FIXED["torch"].split()],
)
def test_an_attribute_that_parts_were_built_with_is_fixed(make, name):
    trainer = make()
    before = getattr(trainer, name)
    with pytest.raises(ConfigError, match=f"the trainer's {name} is fixed .*create another"):
        setattr(trainer, name, before)
    assert getattr(trainer, name) is before


@pytest.mark.parametrize("make", [native, torch_trainer])
def test_the_list_of_fixed_attributes_has_no_other_names(make):
    kind = "native" if make is native else "torch"
    fixed = {name for name in make().fixed if name in vars(make())}
    assert fixed == set(FIXED[kind].split())


@pytest.mark.parametrize("make", [native, torch_trainer])
def test_an_attribute_of_the_user_s_own_can_be_set(make):
    trainer = make()
    trainer.note = "mine"
    assert trainer.note == "mine"


# --- an optimizer's numbers ---


class Scaled(optim.Optimizer):
    """A rule that reads a number of its own."""

    def __init__(self):
        super().__init__(None, lr=0.05)
        self._scale = 1.0

    def rule(self, p, g):
        return p - self.lr * self._scale * g


class Assigns(callbacks.Callback):
    """Assigns a number to the optimizer after each step, and stops the training at one."""

    def __init__(self, name, make, stop=None):
        self.name = name
        self.make = make
        self.stop = stop

    def on_step_end(self, context):
        optimizer = context.trainer.optimizer
        value = self.make(0.9 - 0.1 * context.steps)
        if self.name == "group":
            for group in optimizer.param_groups:
                group["lr"] = value
        else:
            setattr(optimizer, self.name, value)
        if context.steps == self.stop:
            context.stop = "a test"


KINDS = [float, np.float32, np.float64, np.float16, np.array]


def trained_with(name, make, folder=None, stop=None):
    optimizer = {"betas": optim.AdamW, "_scale": Scaled}.get(name, optim.SGD)()
    nn.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    trainer = DistributedTrainer(net, optimizer, shard_size=8, threads=1)
    loader = data.DataLoader(data.arrays(X, Y), 10)
    listeners = [Assigns(name, make, stop)]
    trainer.fit(loader, epochs=2, callbacks=listeners, checkpoint_dir=folder, verbose=False)
    return trainer.weights_sha256()


@pytest.mark.parametrize(
    ("name", "make"),
    [(name, kind) for name in ("lr", "group", "momentum", "_scale") for kind in KINDS]
    + [("betas", lambda v: [0.5, v]), ("betas", lambda v: (np.float32(0.5), np.float64(v)))]
    + [("betas", lambda v: np.array([0.5, v]))],
)
def test_an_assigned_number_is_in_checkpoints(name, make, tmp_path):
    whole = trained_with(name, make)
    assert whole != trained_with(name, lambda value: make(0.5))
    with pytest.raises(Stopped):
        trained_with(name, make, tmp_path, stop=5)
    assert trained_with(name, make, tmp_path) == whole


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", v) for v in (float("nan"), -0.1, float("inf"), "0.1", None, [0.1])]
    + [("momentum", 1.5), ("momentum", "0.9"), ("weight_decay", -1), ("weight_decay", np.nan)],
)
def test_a_number_that_the_constructor_refuses_cannot_be_assigned(name, value):
    optimizer = optim.SGD(lr=0.5)
    before = getattr(optimizer, name)
    with pytest.raises(ConfigError, match=rf"\[SGD\] {name}"):
        setattr(optimizer, name, value)
    assert getattr(optimizer, name) == before
    with pytest.raises(ConfigError, match=rf"\[SGD\] {name}"):
        optim.SGD(**{name: value})


def test_a_group_lists_the_numbers_that_can_be_set():
    assert list(optim.SGD().param_groups[0]) == [
        "params",
        "momentum",
        "weight_decay",
        "nesterov",
        "lr",
    ]
