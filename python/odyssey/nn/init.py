"""Initial values of parameters, in place, by PyTorch's names.

They are functions of (seed, number of the draw since `manual_seed`, element), so they are the same
on any machine; each function gives its parameter back.
"""

from __future__ import annotations

import math

import numpy as np

from ..core.tensor import Parameter
from ..errors import ConfigError
from .module import normal, uniform

GAINS = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "relu": math.sqrt(2), "selu": 0.75}


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """By what weights are to be larger so that a nonlinearity keeps the variance; param: the
    slope of leaky_relu.
    """
    if nonlinearity == "leaky_relu":
        return math.sqrt(2 / (1 + (0.01 if param is None else param) ** 2))
    if nonlinearity not in GAINS:
        raise ConfigError(
            f"[init] nonlinearity {nonlinearity!r}; choose from leaky_relu, {', '.join(GAINS)}"
        )
    return GAINS[nonlinearity]


def constant_(p: Parameter, value: float) -> Parameter:
    """All `value`."""
    p.data[...] = value
    return p


def zeros_(p: Parameter) -> Parameter:
    """All 0."""
    return constant_(p, 0.0)


def ones_(p: Parameter) -> Parameter:
    """All 1."""
    return constant_(p, 1.0)


def uniform_(p: Parameter, a: float = 0.0, b: float = 1.0) -> Parameter:
    """Uniform in [a, b)."""
    p.data[...] = uniform(p.shape, (b - a) / 2).data + np.float32((a + b) / 2)
    return p


def normal_(p: Parameter, mean: float = 0.0, std: float = 1.0) -> Parameter:
    """Normal, as the sum of twelve uniform numbers: none is further than six deviations from the
    mean.
    """
    p.data[...] = normal(p.shape).data * np.float32(std) + np.float32(mean)
    return p


def trunc_normal_(
    p: Parameter, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> Parameter:
    """Normal, with the numbers outside of [a, b] drawn again.

    Raises ConfigError: hardly any number is inside.
    """
    if not (a < b and std > 0 and mean + 4 * std > a and mean - 4 * std < b):
        raise ConfigError(
            f"[init] [{a}, {b}] of mean {mean} and deviation {std}; it must be nearer to the mean"
        )
    normal_(p, mean, std)
    while (outside := (p.data < a) | (p.data > b)).any():
        p.data[outside] = (normal(p.shape).data * np.float32(std) + np.float32(mean))[outside]
    return p


def fans(p: Parameter) -> tuple[int, int]:
    """Numbers that one output is made of, and that one input goes into: of (outputs, inputs,
    ...).
    """
    if p.ndim < 2:
        raise ConfigError(
            f"[init] a parameter {p.shape}; fan-in and fan-out need two axes at least"
        )
    area = math.prod(p.shape[2:])
    return p.shape[1] * area, p.shape[0] * area


def xavier_uniform_(p: Parameter, gain: float = 1.0) -> Parameter:
    """Uniform with the variance gain^2 2 / (fan-in + fan-out) (Glorot, Bengio 2010)."""
    bound = gain * math.sqrt(6 / sum(fans(p)))
    return uniform_(p, -bound, bound)


def xavier_normal_(p: Parameter, gain: float = 1.0) -> Parameter:
    """Normal with that variance."""
    return normal_(p, 0.0, gain * math.sqrt(2 / sum(fans(p))))


def kaiming_uniform_(
    p: Parameter, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Parameter:
    """Uniform with the variance gain^2 / fan (He et al. 2015); a: the slope of leaky_relu."""
    bound = math.sqrt(3) * _deviation(p, a, mode, nonlinearity)
    return uniform_(p, -bound, bound)


def kaiming_normal_(
    p: Parameter, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Parameter:
    """Normal with that variance."""
    return normal_(p, 0.0, _deviation(p, a, mode, nonlinearity))


def _deviation(p: Parameter, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ConfigError(f"[init] mode {mode!r}; it must be 'fan_in' or 'fan_out'")
    return calculate_gain(nonlinearity, a) / math.sqrt(fans(p)[mode == "fan_out"])
