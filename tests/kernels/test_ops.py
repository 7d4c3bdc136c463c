"""Ops of core/functional.py against float64 references (reference.py), where ops_samples.py does
not say all: losses, sums, ties, NaN, large numbers, chains. Forward and backward.

Batches on both sides of where small ones end (4) and of whole vectors of lanes (16). An error is
the largest difference over the largest value of the tensor; `pytest -s` prints the worst of each
op.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference as R

from odyssey import functional as F
from odyssey.core.tensor import Tensor
from odyssey.nn import Parameter

BATCHES = (1, 2, 4, 5, 16, 17, 33)
TOLERANCE = 1e-5
worst: dict[str, float] = {}


@pytest.fixture(scope="module", autouse=True)
def report():
    yield
    for name, error in worst.items():
        print(f"\n{name}: {error:.1e}", end="")


def agree(name: str, got: np.ndarray, wanted: np.ndarray) -> None:
    assert got.shape == np.shape(wanted)
    assert got.dtype == np.float32
    scale = np.abs(wanted).max()
    error = np.abs(got - wanted).max() / (scale if scale else 1)
    worst[name] = max(worst.get(name, 0), error)
    assert error < TOLERANCE, f"{name} is off by {error:.1e}"


def normal(*shape, seed=0, spread=1.0):
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * spread).astype(
        np.float32
    )


def check(name, op, formula, backward, *arrays, parameters=0):
    """Compares op(*tensors) and its gradients; the last `parameters` arrays are parameters."""
    plain = len(arrays) - parameters
    tensors = [
        Tensor(a, requires_grad=True) if i < plain else Parameter(a) for i, a in enumerate(arrays)
    ]
    wide = [a.astype(np.float64) for a in arrays]
    y = op(*tensors)
    wanted = formula(*wide)
    agree(name, y.numpy(), wanted)
    dy = normal(*wanted.shape, seed=1)
    y.backward(dy)
    gradients = backward(*wide, dy.astype(np.float64))
    for i, (t, g) in enumerate(
        zip(tensors, gradients if isinstance(gradients, tuple) else (gradients,), strict=True)
    ):
        agree(f"{name}, gradient {i}", t.grad.numpy(), g)
    for t, a in zip(tensors, arrays, strict=True):
        assert np.array_equal(t.numpy(), a), "an input was changed"


@pytest.mark.parametrize(("window", "stride"), [(2, 2), (3, 2)])
def test_max_pool_hands_the_gradient_to_the_first_of_equals(window, stride):
    x = np.ones((3, 2, 6, 6), np.float32)
    check(
        "max_pool2d",
        lambda x: F.max_pool2d(x, window, stride),
        lambda x: R.max_pool2d(x, window, stride),
        lambda x, dy: R.max_pool2d_backward(x, window, stride, dy),
        x,
    )


@pytest.mark.parametrize("kind", ["relu", "tanh", "sigmoid"])
def test_activation_of_activations(kind):
    """The same in the layout that ops hand to each other."""
    forward, backward = getattr(R, kind), getattr(R, f"{kind}_backward")
    check(
        kind,
        lambda x: getattr(F, kind)(F.pad2d(x, 1)),
        lambda x: forward(R.pad2d(x, 1)),
        lambda x, dy: R.pad2d_backward(x, 1, backward(R.pad2d(x, 1), dy)),
        normal(5, 2, 3, 3),
    )


@pytest.mark.parametrize("kind", ["tanh", "sigmoid", "softmax", "log_softmax"])
def test_large_inputs_overflow_nowhere(kind):
    x = np.array([[-1e4, -200, -90, 0, 90, 200, 1e4]], np.float32)
    with np.errstate(over="ignore"):  # the reference of the gradient of tanh
        forward, backward = getattr(R, kind), getattr(R, f"{kind}_backward")
        check(kind, getattr(F, kind), forward, backward, x)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("n", BATCHES)
@pytest.mark.parametrize("classes", [1, 2, 10, 37])
@pytest.mark.parametrize("kind", ["cross_entropy", "nll"])
def test_loss(kind, n, classes, reduction):
    labels = np.random.default_rng(n).integers(0, classes, n)
    factor = 1 / n if reduction == "mean" else 1
    op = F.cross_entropy if kind == "cross_entropy" else F.nll_loss
    forward, backward = getattr(R, kind), getattr(R, f"{kind}_backward")
    check(
        kind,
        lambda x: op(x, labels, reduction=reduction),
        lambda x: factor * forward(x, labels),
        lambda x, dy: factor * backward(x, labels, dy),
        normal(n, classes, spread=3),
    )


@pytest.mark.parametrize("n", BATCHES)
def test_accuracy_counts_the_largest(n):
    x, labels = normal(n, 10), np.arange(n) % 10
    assert F.accuracy(Tensor(x), labels) == pytest.approx((x.argmax(1) == labels).mean())


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (16, 5), (17, 2, 3), (33, 1, 2, 2)])
def test_arithmetic(shape):
    a = normal(*shape)
    check("add", lambda x: F.add(x, 3), lambda x: x + 3, lambda x, dy: dy, a)
    check("sum", F.sum, np.sum, lambda x, dy: np.full_like(x, dy), a)
    check("mean", F.mean, np.mean, lambda x, dy: np.full_like(x, dy / x.size), a)


def test_add_of_what_ops_made_and_what_came_in():
    """The two operands are in different layouts."""
    check(
        "add",
        lambda a, b: F.add(F.pad2d(a, 1), b),
        lambda a, b: R.pad2d(a, 1) + b,
        lambda a, b, dy: (R.pad2d_backward(a, 1, dy), dy),
        normal(3, 2, 2, 3),
        normal(3, 2, 4, 5),
    )


@pytest.mark.parametrize("n", BATCHES)
def test_sum_leaves_out_lanes_without_a_sample(n):
    """x + 1 is 1 there, too."""
    check(
        "sum",
        lambda x: F.sum(F.add(F.pad2d(x, 1), 1)),
        lambda x: (R.pad2d(x, 1) + 1).sum(),
        lambda x, dy: np.full_like(x, dy),
        normal(n, 1, 2, 2),
    )


@pytest.mark.parametrize("n", (1, 2, 17))
def test_a_chain_of_all_layers(n):
    """Conv, ReLU, overlapping max-pool, flatten, linear, cross-entropy, as one backward pass."""
    x, w, b = normal(n, 2, 9, 8), normal(4, 2, 3, 3), normal(4)
    v, c = normal(5, 4 * 3 * 2, spread=0.2), normal(5)
    labels = np.arange(n) % 5

    def forward(x, w, b, v, c):
        a = R.conv2d(x, w, b, 1, 0)
        p = R.max_pool2d(R.relu(a), 3, 2)
        return a, p, R.linear(p.reshape(n, -1), v, c)

    def backward(x, w, b, v, c, dy):
        a, p, z = forward(x, w, b, v, c)
        dp, dv, dc = R.linear_backward(
            p.reshape(n, -1), v, c, R.cross_entropy_backward(z, labels, dy / n)
        )
        da = R.relu_backward(a, R.max_pool2d_backward(R.relu(a), 3, 2, dp.reshape(p.shape)))
        return (*R.conv2d_backward(x, w, b, 1, 0, da), dv, dc)

    check(
        "chain",
        lambda x, w, b, v, c: F.cross_entropy(
            F.linear(F.flatten(F.max_pool2d(F.relu(F.conv2d(x, w, b)), 3, 2)), v, c), labels
        ),
        lambda *a: R.cross_entropy(forward(*a)[2], labels) / n,
        backward,
        x,
        w,
        b,
        v,
        c,
        parameters=4,
    )


@pytest.mark.parametrize("n", (1, 2, 17))
@pytest.mark.parametrize(
    "op",
    [
        F.relu,
        F.tanh,
        F.sigmoid,
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.max_pool2d(x, 3, 1),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.conv2d(x, Parameter(np.ones((1, 1, 2, 2)))),
        lambda x: F.relu(F.conv2d(x, Parameter(np.ones((1, 1, 2, 2))))),
    ],
)
@pytest.mark.parametrize("at", [(0, 0), (1, 2), (3, 3)])
def test_nan_is_not_hidden(op, n, at):
    x = normal(n, 1, 4, 4)
    x[n - 1, 0, at[0], at[1]] = np.nan
    y = op(Tensor(x)).numpy()
    assert np.isnan(y[n - 1]).any()
    assert np.isfinite(y[: n - 1]).all(), "NaN of one sample got into another"


def test_nan_reaches_the_loss():
    x = normal(3, 5)
    x[1, 2] = np.nan
    for op in (F.cross_entropy, lambda x, y: F.nll_loss(F.log_softmax(x), y)):
        assert np.isnan(op(Tensor(x), [0, 1, 2]).item())
