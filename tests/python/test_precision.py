"""Loss scaling and the precision of a training: what is decided, without a launcher."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import odyssey
from odyssey import DistributedTrainer, GradScaler, data, nn, optim
from odyssey import functional as F
from odyssey.core import precision
from odyssey.data.nested import Form
from odyssey.errors import ConfigError, NumericsError


def loader(samples=64, batch=32):
    return data.DataLoader(data.load("mnist", train=True).take(samples), batch_size=batch)


def trainer(precision, model="mlp", **settings):
    settings = {"optimizer": optim.SGD(lr=0.05), "threads": 1, **settings}
    return DistributedTrainer(
        nn.models.build(model, seed=1), precision=precision, backend="local", **settings
    )


# --- the scale ------------------------------------------------------------------------------------


def test_the_scale_halves_at_an_overflow_and_doubles_after_the_interval():
    scaler = GradScaler(init_scale=1024, growth_interval=3)
    assert [scaler.update(ok) for ok in (True, True, False, True, True)] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert (scaler.value, scaler.skipped, scaler.good_steps) == (512, 1, 2)
    scaler.update(True)
    assert (scaler.value, scaler.good_steps) == (1024, 0)


def test_the_scale_does_not_fall_below_one():
    scaler = GradScaler(init_scale=2)
    assert scaler.update(False) is False and scaler.value == 1
    with pytest.raises(
        NumericsError, match=r"\[precision\] .* loss scale 1, .*Lower the learning rate"
    ):
        scaler.update(False)


def test_a_scaler_that_is_off_does_nothing():
    scaler = GradScaler(enabled=False)
    assert scaler.value == 1 and scaler.update(True) and not scaler.update(False)
    assert (scaler.value, scaler.skipped) == (1, 0)


def test_the_state_goes_on_where_it_was():
    a, b = GradScaler(growth_interval=2), GradScaler(growth_interval=2)
    for ok in (False, True):
        a.update(ok)
    b.load_state_dict(a.state_dict())
    a.update(True), b.update(True)
    assert a.state_dict() == b.state_dict() == {"scale": 65536, "good_steps": 0, "skipped": 1}
    with pytest.raises(ConfigError, match="has no good_steps and no skipped"):
        b.load_state_dict({"scale": 1})


@pytest.mark.parametrize(
    "settings",
    [
        {"init_scale": 1000},
        {"init_scale": 0.5},
        {"init_scale": float("inf")},
        {"init_scale": float("nan")},
        {"growth_factor": 1},
        {"growth_factor": 3},
        {"backoff_factor": 1},
        {"growth_interval": 0},
        {"growth_interval": 2.5},
    ],
)
def test_settings_that_would_round_or_never_move(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        GradScaler(**settings)


# --- a loop of one's own --------------------------------------------------------------------------


def own_loop(scaler, precision, steps=5):
    model = nn.models.build("mlp", seed=1)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    taken = []
    for images, labels in list(loader(steps * 32)):
        with odyssey.autocast(precision):
            loss = F.cross_entropy(model(odyssey.Tensor(images)), labels)
        scaler.scale(loss).backward()
        taken.append(scaler.step(optimizer))
        optimizer.zero_grad()
    return taken, {k: v.copy() for k, v in model.state_dict().items()}


def test_scaling_changes_no_bit_where_nothing_overflows():
    """bf16 has the range of float32, so a scale moves exponents only."""
    _, plain = own_loop(GradScaler(enabled=False), "bf16")
    taken, scaled = own_loop(GradScaler(init_scale=2.0**10), "bf16")
    assert taken == [True] * 5
    assert all(np.array_equal(plain[k], scaled[k]) for k in plain)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_checkpoint_repeats_in_the_precision_of_its_first_time(precision):
    images, labels = next(iter(loader()))

    def gradients(wrap):
        model = nn.models.build("lenet5", seed=1)
        with odyssey.autocast(precision):
            loss = F.cross_entropy(wrap(model)(odyssey.Tensor(images)), labels)
        loss.backward()
        return [p.grad.numpy().copy() for p in model.parameters()]

    kept, repeated = gradients(lambda model: model), gradients(odyssey.checkpoint)
    assert all(np.array_equal(a, b) for a, b in zip(kept, repeated, strict=True))


def test_an_overflow_in_a_loop_of_ones_own():
    scaler = GradScaler(init_scale=2.0**30)
    before = nn.models.build("mlp", seed=1).state_dict()
    taken, after = own_loop(scaler, "fp16", steps=2)
    assert taken == [False, False] and scaler.value == 2.0**28
    assert all(np.array_equal(before[k], after[k]) for k in before)


# --- in a trainer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["replay", "eager"])
def test_an_overflow_changes_nothing_and_is_shown_once(capfd, execution):
    t = trainer("fp16", scaler_init_scale=2.0**26, execution=execution)
    before, hash_before = t.optimizer.steps, t.weights_sha256()
    t.train_step(next(iter(loader())))
    assert t.weights_sha256() == hash_before and t.optimizer.steps == before
    assert (t.steps, t.scaler.skipped, t.scaler.value) == (1, 1, 2.0**25)
    line = (
        "odyssey: [precision] step 1 skipped: gradients overflowed at loss scale 67108864; "
        "scale is now 33554432\n"
    )
    assert capfd.readouterr().err == line


def test_the_scale_comes_down_until_steps_are_taken(capfd):
    t = trainer("fp16", scaler_init_scale=2.0**26, scaler_growth_interval=100)
    start = t.weights_sha256()
    history = t.fit(loader(640), epochs=1)
    assert 0 < t.scaler.skipped < 20 == history.steps
    assert t.optimizer.steps == 20 - t.scaler.skipped
    assert t.weights_sha256() != start
    assert np.isfinite(history.train_loss)
    assert capfd.readouterr().err.count("skipped") == t.scaler.skipped


def test_the_scale_grows(capfd):
    t = trainer("fp16", scaler_init_scale=2.0**4, scaler_growth_interval=4)
    t.fit(loader(320), epochs=1, verbose=False)
    assert t.scaler.value == 2.0**6
    assert capfd.readouterr().err == ""


def test_what_no_scale_helps_against_is_an_error():
    """The weights themselves are too large for fp16."""
    t = trainer("fp16", scaler_init_scale=2.0)
    t.arena.params[:] = 1e6
    batch = next(iter(loader()))
    t.train_step(batch)
    with pytest.raises(NumericsError, match="not the scale that overflows") as caught:
        t.train_step(batch)
    assert caught.value.raised_on_all_ranks


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_scaling_a_gradient_that_is_not_finite_is_an_error(precision):
    t = trainer(precision)
    t.arena.params[0] = np.nan
    with pytest.raises(NumericsError, match="not finite at step 1"):
        t.train_step(next(iter(loader())))
    assert not t.scaler.enabled and t.steps == 0


@pytest.mark.parametrize("model", ["mlp", "lenet5"])
def test_all_precisions_train_to_nearly_the_same(model):
    losses = {
        p: trainer(p, model).fit(loader(640), epochs=1).train_loss for p in ("fp32", "bf16", "fp16")
    }
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=2e-3)
    assert len(set(losses.values())) == 3


def test_fp16_rounds_the_same_gradients_whatever_the_scale():
    """Where nothing is too small or too large, the scale leaves no trace."""
    hashes = set()
    for scale in (2.0**10, 2.0**11):
        t = trainer("fp16", scaler_init_scale=scale)
        t.fit(loader(64), epochs=1)
        hashes.add(t.weights_sha256())
    small = trainer("fp16", scaler_init_scale=1.0)
    small.fit(loader(64), epochs=1)
    assert small.weights_sha256() not in hashes  # at scale 1 small gradients were lost


def test_a_layer_can_be_taken_out_in_forward():
    """autocast inside a model that a trainer records."""

    class Model(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.a, self.b, self.inner = nn.Linear(784, 32), nn.Linear(32, 10), inner

        def forward(self, x):
            x = F.relu(self.a(F.flatten(x)))
            with odyssey.autocast(self.inner):
                return self.b(x)

    def program(outer, inner):
        t = DistributedTrainer(
            Model(inner), optim.SGD(), precision=outer, backend="local", threads=1
        )
        t.train_step(next(iter(loader())))
        return [
            (r.op, r.dtype)
            for r in t.stepper.engine.record(32, Form.of_classes(1, 28, 28))
            if r.op.startswith("linear")
        ]

    assert program("bf16", "fp32") == [
        ("linear_forward", "bf16"),
        ("linear_forward", "fp32"),
        ("linear_backward_weight", "fp32"),
        ("linear_backward_input", "fp32"),
        ("linear_backward_weight", "bf16"),
    ]
    assert program("fp32", "fp16")[1] == ("linear_forward", "fp16")


def test_relu_is_fused_into_rounded_products():
    t = trainer("bf16", "lenet5")
    ops = [(r.op, r.dtype) for r in t.stepper.engine.record(32, Form.of_classes(1, 28, 28))]
    assert ("relu_forward", "fp32") not in ops
    assert ops.count(("linear_forward", "bf16")) == 3 and ops.count(("conv2d_forward", "bf16")) == 1


def test_an_unknown_precision():
    with pytest.raises(
        ConfigError, match=r"precision is 'fp8'; choose from fp32, tf32, bf16, fp16"
    ):
        trainer("fp8")


def test_tf32_is_for_gpus():
    with pytest.raises(ConfigError, match="precision is 'tf32', which only GPUs have"):
        trainer("tf32")
    x, w = odyssey.Tensor(np.ones((8, 3))), odyssey.Tensor(np.ones((4, 3)))
    with precision.autocast("tf32"), pytest.raises(ConfigError, match="tf32 products are a GPU's"):
        F.linear(x, w)


def test_what_the_page_shows_runs():
    text = (Path(__file__).parents[2] / "docs" / "precision.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) == 2
    for body in blocks:
        exec(compile(body, "precision.md", "exec"), {})
