"""Optimizers that are rules, in whole trainings: under a schedule, clipping and a callback that
changes their betas they are right against NumPy, and have the bits of one process on every
layout, also where they go on on another.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import data, nn, optim
from odyssey.callbacks import Callback
from odyssey.comm import mock
from odyssey.core import offload
from odyssey.parallel.mesh import Mesh
from odyssey.train.trainer import DistributedTrainer

from .test_rules import AdamRule, Lion, MadeUp, adam, lion, made_up

SAMPLES, BATCH, EPOCHS, CLIP = 160, 40, 3, 0.05
RNG = np.random.default_rng(11)
X, Y = RNG.standard_normal((SAMPLES, 6), np.float32), RNG.standard_normal((SAMPLES, 4), np.float32)
STEPS = EPOCHS * SAMPLES // BATCH
RULES = {"Lion": (Lion, lion), "Adam": (AdamRule, adam), "made up": (MadeUp, made_up)}
LAYOUTS = {
    "alone": (1, {}),
    "alone, eager": (1, {"execution": "eager"}),
    "dp 3": (3, {"bucket_size_mb": 0.001}),
    "ZeRO 1": (3, {"zero": 1}),
    "ZeRO 2": (2, {"zero": 2}),
    "ZeRO 3": (4, {"zero": 3}),
    "offload": (2, {"offload": True}),
    "ZeRO 3, offload": (2, {"zero": 3, "offload": True}),
    "dp 8": (8, {}),  # more ranks than a batch has shards
    "ZeRO 2 on 5": (5, {"zero": 2}),
    "ZeRO 3 on 8": (8, {"zero": 3}),
    "ZeRO 1, offload": (6, {"zero": 1, "offload": True}),
    "tp 2": (2, {"mesh": Mesh(tp=2)}),
    "tp 2, ZeRO 1": (4, {"mesh": Mesh(dp=2, tp=2), "zero": 1}),
    "tp 2, dp 3": (6, {"mesh": Mesh(dp=3, tp=2)}),
    "tp 2, ZeRO 1 on 8": (8, {"mesh": Mesh(dp=4, tp=2), "zero": 1}),
    "pp 2": (2, {"mesh": Mesh(pp=2)}),
}


def schedule(step: int) -> float:
    return optim.schedule("cosine", STEPS, 3)(step)


class OtherBetas(Callback):
    """From the middle of the second epoch on."""

    def on_step_end(self, context):
        if context.trainer.steps == STEPS // 2:
            context.trainer.optimizer.betas = (0.6, 0.8)


def network():
    nn.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))


def optimizer(kind):
    made = kind(lr=0.01, weight_decay=0.1)
    made.undecayed = optim.vectors
    return made


def trained(comm, kind, layout, folder, epochs=EPOCHS):
    """What a rank has after the epochs: weights, states, settings.

    Checkpoints are in `folder`, where it goes on.
    """
    layout = {
        **layout,
        **({"offload": str(folder / f"rank{comm.rank}")} if "offload" in layout else {}),
    }
    settings = {"shard_size": 8, "clip_norm": CLIP, "schedule": schedule, "threads": 1, **layout}
    trainer = DistributedTrainer(
        network(), optimizer(kind), comm=comm, device="cpu", loss=nn.MSELoss(), **settings
    )
    loader = data.DataLoader(data.arrays(X, Y), batch_size=BATCH)
    trainer.fit(
        loader,
        epochs=epochs,
        callbacks=[OtherBetas()],
        checkpoint_dir=folder / "kept",
        checkpoint_every=6,
        verbose=False,
    )
    assert trainer.optimizer.betas == (0.6, 0.8) and trainer.steps == epochs * SAMPLES // BATCH
    return {
        **trainer.state_dict(),
        **{k: np.asarray(v) for k, v in trainer.training_state.optimizer_state().items()},
    }


def in_numpy(kind, formula):
    """The same training in float64."""
    o = optimizer(kind)
    weights = {name: p.numpy().astype(np.float64) for name, p in network().named_parameters()}
    states = {name: [np.zeros_like(w) for _ in o.states] for name, w in weights.items()}
    for step in range(STEPS):
        if step == STEPS // 2:
            o.betas = (0.6, 0.8)
        rows = np.arange(BATCH) + step * BATCH % SAMPLES
        w1, b1, w2, b2 = weights.values()
        x, h = X[rows].astype(np.float64), np.tanh(X[rows] @ w1.T + b1)
        dy = 2 * (h @ w2.T + b2 - Y[rows]) / (BATCH * 4)
        dh = dy @ w2 * (1 - h * h)
        gradients = dict(zip(weights, (dh.T @ x, dh.sum(0), dy.T @ h, dy.sum(0)), strict=True))
        norm = np.sqrt(sum((g * g).sum() for g in gradients.values()))
        assert norm > CLIP
        for name, w in weights.items():
            o.lr, o.steps, o.weight_decay = 0.01 * schedule(step), step + 1, 0.1 * (w.ndim > 1)
            weights[name], *states[name] = formula(
                o, w, gradients[name] * CLIP / norm, *states[name]
            )
    return weights


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(offload, "SMALL", 64)  # small networks are in files too


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_right_and_has_the_same_bits_on_every_layout(rule, tmp_path, small_files):
    kind, formula = RULES[rule]
    wanted, found = in_numpy(kind, formula), {}
    for name, (ranks, layout) in LAYOUTS.items():
        found[name] = mock.run(ranks, trained, kind, layout, tmp_path / name)
    for name, w in wanted.items():
        np.testing.assert_allclose(found["alone"][0][name], w, rtol=1e-4, atol=2e-5, err_msg=name)
    first = found["alone"][0]
    assert set(first) == {*wanted, *kind.states, "steps", "lr"}
    for layout, ranks in found.items():
        for values in ranks:
            assert all(values[name].tobytes() == first[name].tobytes() for name in first), layout


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_goes_on_on_other_layouts(rule, tmp_path, small_files):
    kind, _ = RULES[rule]
    (first,) = mock.run(1, trained, kind, {}, tmp_path / "whole")
    for before, after in (
        ("ZeRO 3", "tp 2"),
        ("tp 2, ZeRO 1", "ZeRO 2"),
        ("offload", "alone"),
        ("alone", "pp 2"),
        ("dp 8", "ZeRO 3 on 8"),
    ):
        folder = tmp_path / f"{before} {after}"
        mock.run(LAYOUTS[before][0], trained, kind, LAYOUTS[before][1], folder, 2)
        for values in mock.run(LAYOUTS[after][0], trained, kind, LAYOUTS[after][1], folder):
            assert all(values[name].tobytes() == first[name].tobytes() for name in first), (
                before,
                after,
            )
