"""Optimizers that are rules (optim/rule.py): against NumPy, cut anywhere, while settings change;
what is refused.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from odyssey import functional as F
from odyssey import nn, optim
from odyssey.core import native
from odyssey.errors import ConfigError, NumericsError
from odyssey.nn import Parameter
from odyssey.optim import Update
from odyssey.optim.rule import RuleProgram

sys.path.insert(0, str(Path(__file__).parents[1] / "layouts"))
from draws import AdamRule, MadeUp


class Lion(optim.Optimizer):
    states = ("m",)

    def __init__(self, params=None, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)

    def rule(self, p, g, m):
        c = self.betas[0] * m + (1 - self.betas[0]) * g
        return p - self.lr * (F.sign(c) + self.weight_decay * p), self.betas[1] * m + (
            1 - self.betas[1]
        ) * g


# --- the formulas in NumPy, float64: (o, p, g, states) to the new p and states --------------------


def lion(o, p, g, m):
    c = o.betas[0] * m + (1 - o.betas[0]) * g
    return p - o.lr * (np.sign(c) + o.weight_decay * p), o.betas[1] * m + (1 - o.betas[1]) * g


def adam(o, p, g, m, v):
    g = g + o.weight_decay * p
    m, v = o.betas[0] * m + (1 - o.betas[0]) * g, o.betas[1] * v + (1 - o.betas[1]) * g * g
    m_hat, v_hat = m / (1 - o.betas[0] ** o.steps), v / (1 - o.betas[1] ** o.steps)
    return p - o.lr * m_hat / (np.sqrt(v_hat) + o.eps), m, v


def adagrad(o, p, g, v):
    d = g + o.weight_decay * p
    v = v + d * d
    return p - o.lr / (1 + (o.steps - 1) * o.lr_decay) * d / (np.sqrt(v) + o.eps), v


def made_up(o, p, g, fast, slow, before):
    fast = o.betas[0] * fast + (1 - o.betas[0]) * g
    slow = np.maximum(o.betas[1] * slow, np.abs(g) ** 1.5)
    turn = fast / (1 - o.betas[0] ** o.steps) / (slow**0.5 + 1e-3) + 0.1 * np.tanh(g - before)
    turn = np.clip(turn, -1.5, 1.5) if o.bounded else turn
    turn = 0.5 * turn if o.steps < o.late else turn + o.weight_decay * np.exp(-np.abs(p)) * p
    return p - o.lr / math.sqrt(o.steps) * turn, fast, slow, g


RULES = [
    (Lion, lion),
    (optim.Lion, lion),
    (AdamRule, adam),
    (optim.Adagrad, adagrad),
    (MadeUp, made_up),
]
named = pytest.mark.parametrize(
    ("kind", "formula"), RULES, ids=lambda v: getattr(v, "__name__", "")
)


@named
@pytest.mark.parametrize("n", [3, 960, 2003])
def test_a_rule_computes_its_formula_while_settings_change(kind, formula, n):
    rng = np.random.default_rng(n)
    one, two = Parameter(rng.standard_normal(n)), Parameter(rng.standard_normal((5, 3)))
    o = kind([("one", one), ("two", two)], lr=0.02, weight_decay=0.3)
    o.undecayed = lambda name, p: name == "two"
    wanted = [p.numpy().astype(np.float64) for p in (one, two)]
    states = [[np.zeros_like(w) for _ in o.states] for w in wanted]
    for step in range(1, 7):
        if step == 4:
            o.lr, o.weight_decay = 0.005, 0.1
            if hasattr(o, "betas"):
                o.betas = (0.5, 0.8)
        if step == 5 and kind is MadeUp:
            o.bounded = False
        for i, p in enumerate((one, two)):
            g = rng.standard_normal(p.shape).astype(np.float32)
            p.grad.numpy()[...] = g
            o.steps, decay, o.weight_decay = step, o.weight_decay, 0.0 if i else o.weight_decay
            wanted[i], *states[i] = formula(o, wanted[i], g.astype(np.float64), *states[i])
            o.steps, o.weight_decay = step - 1, decay
        o.step()
        for p, w, have in zip((one, two), wanted, states, strict=True):
            np.testing.assert_allclose(p.numpy(), w, rtol=2e-6, atol=2e-6)
            at = o.arena.offsets[p.name]
            for name, values in zip(o.states, have, strict=True):
                mine = o.state[name][at : at + p.size].reshape(p.shape)
                np.testing.assert_allclose(mine, values, rtol=5e-6, atol=1e-6, err_msg=name)


@named
def test_where_a_run_is_cut_changes_no_bit_and_nothing_outside_of_it(kind, formula):
    rng = np.random.default_rng(5)
    o = kind(lr=0.1, weight_decay=0.1)
    start = rng.standard_normal((2 + len(o.states), 4000)).astype(np.float32)
    start[2:] = np.abs(start[2:])
    divisor = np.full(1, 3, np.float32)

    def updated(cuts):
        arrays = [native.aligned(4000) for _ in start]
        for array, values in zip(arrays, start, strict=True):
            array[:] = values
        w, g, *states = (a.ctypes.data for a in arrays)
        runs = [Update(w + 4 * a, g + 4 * a, a, b - a, a, tuple(states)) for a, b in cuts]
        o._context, o.steps = native.Context(), 0
        assert o.apply(runs, divisor.ctypes.data, 0.1)
        return np.stack(arrays)

    whole = updated([(3, 3900)])
    assert np.array_equal(whole[:, :3], start[:, :3]) and np.array_equal(
        whole[:, 3900:], start[:, 3900:]
    )
    for _ in range(20):
        places = sorted({3, 3900, *rng.integers(4, 3900, rng.integers(1, 9)).tolist()})
        assert updated(list(zip(places, places[1:], strict=False))).tobytes() == whole.tobytes()


class Sums(optim.Optimizer):
    """Sums, products and quotients in the forms that are joined, and in some that are not."""

    states = ("a", "b")

    def rule(self, p, g, a, b):
        c, d, e = a * b + 0.5 * p, a * a + b * b, 2.0 * (self.k * p) - g
        q = 3.0 * c / (F.sqrt(self.k * (d * d)) + self.eps) - self.lr / (
            F.sqrt(F.abs(b)) + self.eps
        )
        return (
            p - self.lr * (q - e) + (-(0.25 * a)),
            self.k * a + (1 - self.k) * g * p,
            p + p - (b + d * d),
        )


@pytest.mark.parametrize("kind", [kind for kind, _ in RULES] + [Sums])
def test_joined_ops_have_the_bits_of_their_ops(kind, monkeypatch):
    """Also of zeros with a sign, of subnormal numbers, and of what overflows or is no number."""
    special = np.array(
        [0, -0.0, 1e-45, -1e-39, 1e-20, 3e38, -3e38, np.inf, -np.inf, np.nan, 1, -1], np.float32
    )

    def updated():
        rng = np.random.default_rng(8)
        o = kind(lr=0.1, **({"k": 0.3, "eps": 1e-8} if kind is Sums else {"weight_decay": 0.1}))
        arrays = [native.aligned(3000) for _ in range(2 + len(o.states))]
        for array in arrays:
            array[:] = rng.standard_normal(3000) * np.exp2(rng.uniform(-140, 20, 3000))
            array[::3] = rng.choice(special, 1000)
        arrays[1][~np.isfinite(arrays[1])] = 1
        w, g, *states = (a.ctypes.data for a in arrays)
        o._context, divisor = native.Context(), np.full(1, 3, np.float32)
        for lr in (0.1, 0.2, 0.2):
            assert o.apply([Update(w, g, 0, 3000, 0, tuple(states))], divisor.ctypes.data, lr)
        (program,) = o._recorded._programs.values()
        codes = program.of(960)[0][:, 0]
        joined = sum(
            np.count_nonzero(codes == native.library().codes[op])
            for op in ("scaled_sum", "root_quotient")
        )
        return joined, [np.where(np.isnan(a), np.float32(7), a).tobytes() for a in arrays]

    joined, found = updated()
    monkeypatch.setattr(RuleProgram, "_joined", lambda self, records, found: records)
    assert joined > 0 and updated() == (0, found)


def test_space_between_parameters_stays_zero():
    """A rule may make something else of zeros."""

    class Drifts(optim.Optimizer):
        states = ("m",)

        def rule(self, p, g, m):
            return F.exp(p) + g, m + 1

    parameters = [Parameter(np.ones(3)), Parameter(np.ones(17)), Parameter(np.ones((16, 2)))]
    o = Drifts(parameters, lr=0.1)
    for _ in range(2):
        o.step()
    assert np.count_nonzero(o.arena.params) == np.count_nonzero(o.state["m"]) == 3 + 17 + 32


def test_frozen_parameters_are_left_out_and_gradients_that_are_not_finite_change_nothing():
    parameters = [
        Parameter(np.arange(1, 20)),
        Parameter(np.arange(1, 5)),
        Parameter(np.arange(1, 30)),
    ]
    o = Lion(parameters, lr=0.1)
    parameters[1].requires_grad = False
    for p in parameters:
        p.grad.numpy()[...] = 1
    o.step()
    changed = [bool((p.numpy() != np.arange(1, 1 + p.size)).all()) for p in parameters]
    assert changed == [True, False, True]
    before = o.arena.params.copy(), o.state["m"].copy()
    parameters[2].grad.numpy()[3] = np.nan
    with pytest.raises(NumericsError, match="nothing was changed"):
        o.step()
    assert o.steps == 1 and np.array_equal(before, (o.arena.params, o.state["m"]))


@pytest.mark.parametrize("weight_decay", [0.0, 0.0625])
def test_the_kernel_of_adam_is_its_rule_within_2_ulp_a_step(weight_decay):
    """With betas whose 1 - beta is exact in float32: the kernel takes it there, a rule in
    float64.
    """
    n, settings = 3008, {"lr": 1e-3, "betas": (0.875, 0.9990234375), "weight_decay": weight_decay}
    _compare(optim.Adam, AdamRule, n, settings)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_kernel_of_sgd_is_its_rule_within_2_ulp_a_step(nesterov):
    class Rule(optim.SGD):
        def rule(self, p, g, v):
            g = g + self.weight_decay * p
            v = self.momentum * v + g
            return p - self.lr * (g + self.momentum * v if self.nesterov else v), v

    settings = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    _compare(optim.SGD, Rule, 3008, settings)


def _compare(kernel, rule, n, settings):
    rng = np.random.default_rng(1)
    values = rng.uniform(1, 2, n) * rng.choice([-1, 1], n)
    one, two = Parameter(values), Parameter(values)
    a, b = kernel([one], **settings), rule([two], **settings)
    assert a._records.__func__ is not b._records.__func__
    for _ in range(8):
        g = rng.standard_normal(n).astype(np.float32)
        one.grad.numpy()[...] = two.grad.numpy()[...] = g
        # terms may cancel: ulp of the larger one
        scale = {name: np.abs(v) for name, v in a.state.items()}
        a.step()
        b.step()
        assert (np.abs(one.numpy() - two.numpy()) <= 2 * np.spacing(np.abs(one.numpy()))).all()
        for name in a.states:
            size = np.maximum.reduce([scale[name], np.abs(a.state[name]), np.abs(g)])
            assert (np.abs(a.state[name] - b.state[name]) <= 2 * np.spacing(size)).all(), name
            b.state[name][:] = a.state[name]
        two.numpy()[...] = one.numpy()


# --- what is refused ------------------------------------------------------------------------------


def made(rule, states=("m",), **settings):
    return type("Zork", (optim.Optimizer,), {"states": states, "rule": rule})(
        [Parameter(np.ones(40))], lr=0.1, **settings
    )


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda self, p, g, m: (p if self.lr > 0 else g, m), "asks for the value of lr"),
        (lambda self, p, g, m: (p * math.sqrt(self.steps), m), "asks for the value of steps"),
        (lambda self, p, g, m: (p if g.max() > 0 else m, m), "looks at values"),
        (lambda self, p, g, m: (p - g.sum() * g, m), "which is not elementwise"),
        (lambda self, p, g, m: (p - F.softmax(g.reshape(-1, 4)).reshape(-1), m), "not elementwise"),
        (lambda self, p, g, m: (p - g[:1], m), "uses copy_strided, which is not elementwise"),
        (lambda self, p, g, m: (p - F.exp(self.lr) * g, m), "uses exp of settings alone"),
        (lambda self, p, g, m: (p + np.float32([1]), m), "a tensor or array of its own"),
        (lambda self, p, g, m: p - g, "it must return the new p, m"),
        (lambda self, p, g, m: (p - g, 1.0), "it must return the new p, m"),
        (
            lambda self, p, g, m: (p / (self.steps - 1), m),
            "steps = 1 cannot be computed: .*division by zero",
        ),
        (lambda self, p, g, m: (setattr(self, "lr", 1.0), (p, m))[1], "sets self.lr"),
    ],
)
def test_rules_that_are_refused_by_name(rule, says):
    o = made(rule)
    before = o.arena.params.copy()
    with pytest.raises(ConfigError, match=rf"\[Zork\] rule\(\).*{says}") as caught:
        o.step()
    assert "\n" not in str(caught.value)
    assert np.array_equal(o.arena.params, before)


def test_a_subclass_without_a_rule_says_what_to_write():
    class Zork(optim.Optimizer):
        states = ("m", "v")

    with pytest.raises(
        ConfigError, match=r"^\[Zork\] has no rule; write `def rule\(self, p, g, m, v\)`"
    ):
        Zork(lr=0.1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"betas": (0.9, 1.0)}, "beta2 is 1.0"),
        ({"k": math.nan}, "k is nan"),
        ({"k": [1, None]}, "k2 is None"),
    ],
)
def test_settings_of_a_rule_are_checked(settings, says):
    with pytest.raises(ConfigError, match=rf"\[Zork\] {says}"):
        made(lambda self, p, g, m: (p, m), **settings)


def test_what_a_rule_returns_may_be_what_it_was_given():
    o = made(lambda self, p, g, m, v: (m, p, g), ("m", "v"))
    o.state["m"][:], o.arena.grads[:40] = 7, 3
    o.step()
    assert [a[0] for a in (o.arena.params, o.state["m"], o.state["v"])] == [7, 1, 3]
    twice = made(lambda self, p, g, m: (p - g,) * 2)
    twice.arena.grads[:40] = 3
    twice.step()
    assert twice.arena.params[0] == twice.state["m"][0] == -2


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, int, np.int64])
def test_a_setting_may_become_a_number_of_numpy(kind):
    o = made(lambda self, p, g, m: (p - self.k * g, m), k=2)
    o.arena.grads[:40] = 1
    for k in (kind(3), 5, kind(2)):
        before = o.arena.params[:40].copy()
        o.k = k
        o.step()
        assert np.array_equal(before - o.arena.params[:40], np.full(40, k, np.float32))


def test_settings_are_kept_listed_and_restored():
    o = MadeUp(nn.Linear(3, 2).parameters())
    assert o.settings == {
        "betas": (0.9, 0.5),
        "weight_decay": 0.0,
        "late": 3.0,
        "bounded": True,
        "lr": 0.01,
    }
    o.param_groups[0]["betas"] = (0.1, 0.2)
    other = MadeUp(nn.Linear(3, 2).parameters())
    other.restore(o.settings, o.undecayed_names)
    assert other.settings == o.settings
