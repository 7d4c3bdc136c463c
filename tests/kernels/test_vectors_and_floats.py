"""A number's function does not depend on where the number stands: in a vector or among the
floats behind the last one.

A layout moves numbers (a part of tensor parallelism or ZeRO begins elsewhere), so either place must
have the same bits, for every float32 there is: tiny, huge, infinite, NaN.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import Tensor
from odyssey import functional as F

pytestmark = pytest.mark.unit

UNARY = {
    "exp": F.exp,
    "log": F.log,
    "sqrt": F.sqrt,
    "abs": F.abs,
    "sign": F.sign,
    "tanh": F.tanh,
    "sigmoid": F.sigmoid,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "softplus": F.softplus,
    "leaky_relu": F.leaky_relu,
    "clamp": lambda x: F.clamp(x, -2.5, 2.5),
}
PAIRS = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "power": lambda a, b: a**b,
    "maximum": F.maximum,
    "minimum": F.minimum,
    "less": lambda a, b: a < b,
    "where": lambda a, b: F.where(a < b, a, b),
}
REST = 15  # fewer than a vector of any CPU has


def numbers(seed: int, count: int) -> np.ndarray:
    """Floats of all sizes: any bits, those where exponentials end, and usual ones."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    edges = np.concatenate([sign * np.linspace(85, 105, count // 4) for sign in (1, -1)]).astype(
        np.float32
    )
    usual = random.normal(0, 5, count // 2).astype(np.float32)
    special = np.array(
        [0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4028235e38, -3.4028235e38], np.float32
    )
    found = np.concatenate([bits, edges, usual, special])
    return found[: len(found) // REST * REST]


def both(function, *given: np.ndarray) -> None:
    """Compares a function's values, and its gradients, in vectors with those of pieces too short
    for one.
    """

    def play(*some: np.ndarray) -> list[np.ndarray]:
        tensors = [Tensor(one, requires_grad=True) for one in some]
        y = function(*tensors)
        if y.requires_grad:
            y.backward(np.ones(y.shape, np.float32))
        return [y.numpy(), *(x.grad.numpy() for x in tensors if x.grad is not None)]

    whole = play(*given)
    pieces = [play(*(one[i : i + REST] for one in given)) for i in range(0, len(given[0]), REST)]
    for i, one in enumerate(whole):
        found = np.concatenate([piece[i] for piece in pieces])
        same = (one.view(np.uint32) == found.view(np.uint32)) | (np.isnan(one) & np.isnan(found))
        at = np.flatnonzero(~same)[:5]
        assert same.all(), [
            (*(x[k] for x in given), one[k], found[k], "gradient" * (i > 0)) for k in at
        ]


@pytest.mark.parametrize("name", UNARY)
@np.errstate(all="ignore")
def test_functions_of_one_number(name):
    both(UNARY[name], numbers(1, 6000))


@pytest.mark.parametrize("name", PAIRS)
@np.errstate(all="ignore")
def test_functions_of_two_numbers(name):
    a, b = numbers(2, 6000), np.random.default_rng(3).permutation(numbers(4, 6000))
    both(PAIRS[name], a, b)
    if name == "power":
        both(
            lambda a, b: a**b,
            np.abs(a),
            np.random.default_rng(5).uniform(-4, 4, len(a)).astype(np.float32),
        )


@np.errstate(all="ignore")
def test_exponentials_to_the_end_of_their_range():
    """Against float64: to 8 units in the last place from e^-87.3 to e^88.7, then infinity."""
    x = np.linspace(-87.3, 88.72, 4096, dtype=np.float32)
    right = np.exp(x.astype(np.float64))
    assert (
        np.abs(F.exp(Tensor(x)).numpy() - right) <= 8 * np.spacing(right.astype(np.float32))
    ).all()
    assert np.isinf(
        F.exp(Tensor(np.array([88.73, 89, 100, 1e4, np.inf] * 7, np.float32))).numpy()
    ).all()
