"""The references themselves: every gradient against central differences of its formula, in
float64; Philox against the published vectors.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference as R

rng = np.random.default_rng(7)


def normal(*shape):
    return rng.standard_normal(shape)


def distinct(*shape):
    """Values at least 0.01 apart and from 0, so that no difference crosses a kink."""
    n = int(np.prod(shape))
    return (rng.permutation(n) - n / 2 + 0.25).reshape(shape) * 0.03


def with_labels(f):
    return lambda x: f(x, np.array([2, 0, 1]))


# name: formula of the differentiable arguments, its gradients, the arguments
CASES = {
    "pad2d": (
        lambda x: R.pad2d(x, (1, 2)),
        lambda x, dy: R.pad2d_backward(x, (1, 2), dy),
        [normal(2, 2, 3, 2)],
    ),
    "conv2d": (
        lambda *a: R.conv2d(*a, 2, (1, 0)),
        lambda *a: R.conv2d_backward(*a[:3], 2, (1, 0), a[3]),
        [normal(2, 2, 5, 6), normal(3, 2, 3, 2), normal(3)],
    ),
    "linear": (R.linear, R.linear_backward, [normal(3, 4), normal(2, 4), normal(2)]),
    "max_pool2d": (
        lambda x: R.max_pool2d(x, (3, 2), 2),
        lambda x, dy: R.max_pool2d_backward(x, (3, 2), 2, dy),
        [distinct(2, 2, 6, 5)],
    ),
    "avg_pool2d": (
        lambda x: R.avg_pool2d(x, 3, 2),
        lambda x, dy: R.avg_pool2d_backward(x, 3, 2, dy),
        [normal(2, 2, 6, 5)],
    ),
    "relu": (R.relu, R.relu_backward, [distinct(3, 5)]),
    "tanh": (R.tanh, R.tanh_backward, [normal(3, 5)]),
    "sigmoid": (R.sigmoid, R.sigmoid_backward, [normal(3, 5)]),
    "softmax": (R.softmax, R.softmax_backward, [normal(3, 5)]),
    "log_softmax": (R.log_softmax, R.log_softmax_backward, [normal(3, 5)]),
    "nll": (
        with_labels(R.nll),
        lambda x, dy: R.nll_backward(x, np.array([2, 0, 1]), dy),
        [normal(3, 4)],
    ),
    "cross_entropy": (
        with_labels(R.cross_entropy),
        lambda x, dy: R.cross_entropy_backward(x, np.array([2, 0, 1]), dy),
        [normal(3, 4)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_the_slope(name):
    formula, backward, arguments = CASES[name]
    dy = normal(*np.shape(formula(*arguments)))
    given = backward(*arguments, dy)
    for argument, gradient in zip(
        arguments, given if isinstance(given, tuple) else (given,), strict=True
    ):
        slopes = np.zeros_like(argument)
        for at in np.ndindex(argument.shape):
            kept, h = argument[at], 1e-5
            argument[at] = kept + h
            above = formula(*arguments)
            argument[at] = kept - h
            slopes[at] = ((above - formula(*arguments)) * dy).sum() / (2 * h)
            argument[at] = kept
        np.testing.assert_allclose(gradient, slopes, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    k0, k1 = (int(k, 16) for k in key.split())
    got = R.philox(*(int(c, 16) for c in counter.split()), k1 << 32 | k0)
    assert " ".join(f"{int(w):08x}" for w in got) == words
