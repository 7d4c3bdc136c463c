"""Five steps of every optimizer against the formulas of PyTorch's documentation in float64
(reference.py).
"""

from __future__ import annotations

import numpy as np
import pytest
import reference as R

from odyssey import optim
from odyssey.core import native
from odyssey.errors import NumericsError
from odyssey.nn import Parameter
from odyssey.optim import Update

SETTINGS = [
    (optim.SGD, R.sgd, {"lr": 0.1}),
    (optim.SGD, R.sgd, {"lr": 0.1, "weight_decay": 0.05}),
    (optim.SGD, R.sgd, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, R.sgd, {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1}),
    (optim.SGD, R.sgd, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    (optim.Adam, R.adam, {"lr": 0.01}),
    (optim.Adam, R.adam, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    (optim.AdamW, R.adam, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.AdamW, R.adam, {"lr": 0.02, "weight_decay": 0.3, "betas": (0.7, 0.9)}),
    (optim.RMSprop, R.rmsprop, {"lr": 0.01}),
    (optim.RMSprop, R.rmsprop, {"lr": 0.02, "alpha": 0.8, "eps": 1e-3, "weight_decay": 0.1}),
]


def gradients(step):
    rng = np.random.default_rng(step)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 5), (7,))]


@pytest.mark.parametrize(("kind", "formula", "settings"), SETTINGS)
def test_five_steps(kind, formula, settings):
    parameters = [Parameter(g) for g in gradients(100)]
    wanted = [p.numpy().astype(np.float64) for p in parameters]
    states = [{}, {}]
    decoupled = {"decoupled": True} if kind is optim.AdamW else {}
    optimizer = kind(parameters, **settings)
    worst = 0.0
    for step in range(1, 6):
        optimizer.zero_grad()
        for i, (p, g) in enumerate(zip(parameters, gradients(step), strict=True)):
            p.grad.numpy()[...] = g
            wanted[i] = formula(
                wanted[i], states[i], g.astype(np.float64), step, **settings, **decoupled
            )
        optimizer.step()
        for p, w in zip(parameters, wanted, strict=True):
            worst = max(worst, np.abs(p.numpy() - w).max() / np.abs(w).max())
    print(f"{kind.__name__} {settings}: {worst:.1e}")
    assert worst < 2e-6
    assert optimizer.steps == 5


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 14, 15, 16, 21])
def test_a_gradient_that_is_not_finite_changes_nothing(kind, bad, at):
    parameter = Parameter(np.arange(22))
    settings = {"momentum": 0.9} if kind is optim.SGD else {}
    optimizer = kind([parameter], lr=0.1, **settings)
    parameter.grad.numpy()[...] = 1
    optimizer.step()
    before = {k: np.copy(v) for k, v in optimizer.state_dict().items()}
    values = parameter.numpy().copy()
    parameter.grad.numpy()[at] = bad
    with pytest.raises(NumericsError, match="nothing was changed"):
        optimizer.step()
    assert np.array_equal(parameter.numpy(), values)
    for name, value in optimizer.state_dict().items():
        assert np.array_equal(value, before[name]), name


def test_space_between_parameters_stays_zero():
    """Parameters start on a vector; what lies between them is updated with the rest and must not
    drift.
    """
    parameters = [Parameter(np.ones(3)), Parameter(np.ones(5))]
    optimizer = optim.AdamW(parameters, lr=0.1, weight_decay=0.1)
    for p in parameters:
        p.grad.numpy()[...] = 1
    for _ in range(3):
        optimizer.step()
    used = sum(p.size for p in parameters)
    assert np.count_nonzero(optimizer.arena.params) == used


@pytest.mark.parametrize(
    "optimizer", [optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.1), optim.AdamW(lr=0.1)]
)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 100])
def test_an_update_touches_nothing_outside_of_its_run(optimizer, n):
    """What lies behind a run is another parameter of the rank; a run in pieces gives the bits of
    the whole.
    """
    rng = np.random.default_rng(n)
    start = np.abs(rng.standard_normal((4, 128))).astype(np.float32)
    divisor = np.ones(1, np.float32)
    optimizer.steps = 0

    def updated(cuts):
        arrays = [native.aligned(128) for _ in start]
        for array, values in zip(arrays, start, strict=True):
            array[:] = values
        w, g, *states = (a.ctypes.data for a in arrays)
        states = states[: len(optimizer.states)]
        runs = [Update(w + 4 * a, g + 4 * a, a, b - a, a, tuple(states)) for a, b in cuts]
        optimizer._context, optimizer.steps = native.Context(), 0
        assert optimizer.apply(runs, divisor.ctypes.data, 0.1)
        return np.stack(arrays)

    whole = updated([(3, 3 + n)])
    assert np.array_equal(whole[:, :3], start[:, :3]) and np.array_equal(
        whole[:, 3 + n :], start[:, 3 + n :]
    )
    assert not np.any(whole[0, 3 : 3 + n] == start[0, 3 : 3 + n])
    assert whole.tobytes() == updated([(3, 3 + n // 3), (3 + n // 3, 3 + n)]).tobytes()


@pytest.mark.parametrize("floats", [1, 15, 33])
def test_a_tree_sum_writes_no_more_than_it_was_asked_for(floats):
    values = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    out = np.full(64, 7, np.float32)
    addresses = np.array([row.ctypes.data for row in values], np.int64)
    lib = native.library()
    record = np.zeros((1, lib.record), np.int64)
    record[0, :5] = (lib.codes["tree_sum"], out.ctypes.data, addresses.ctypes.data, 3, floats)
    lib.run(record.ctypes.data, 1, native.Context())
    assert np.array_equal(out[:floats], (values[0] + values[1] + values[2])[:floats])
    assert (out[floats:] == 7).all()
