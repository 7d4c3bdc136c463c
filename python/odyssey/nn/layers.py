"""Layers: a thin module over each op of functional.py that has parameters or settings.

Initial weights and biases are uniform in [-b, b), b = 1 / sqrt(fan-in), as PyTorch's layers have them (He et al. 2015
with a = sqrt(5)).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..core import functional as F
from ..core.tensor import Parameter, Tensor
from ..errors import ConfigError
from .module import Module, uniform


def _at_least_one(layer: str, **sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"[{layer}] {name} is {value!r}; it must be an integer of at least 1")


class Linear(Module):
    """y = x W^T + b for x (N, in_features), W (out_features, in_features)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        _at_least_one("Linear", in_features=in_features, out_features=out_features)
        bound = 1 / math.sqrt(in_features)
        self.weight = uniform((out_features, in_features), bound)
        self.bias = uniform((out_features,), bound) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        o, i = self.weight.shape
        return f"{i}, {o}"


class Conv2d(Module):
    """Cross-correlation of x (N, in_channels, H, W) with square or (R, T) kernels; see functional.conv2d."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        r, t = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        _at_least_one(
            "Conv2d", in_channels=in_channels, out_channels=out_channels, kernel_height=r, kernel_width=t, stride=stride
        )
        bound = 1 / math.sqrt(in_channels * r * t)
        self.weight = uniform((out_channels, in_channels, r, t), bound)
        self.bias = uniform((out_channels,), bound) if bias else None
        self.stride, self.padding = stride, padding

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding)

    def extra_repr(self) -> str:
        k, c, r, t = self.weight.shape
        return f"{c}, {k}, ({r}, {t}), stride={self.stride}, padding={self.padding}"


class MaxPool2d(Module):
    """Largest value of each window; see functional.max_pool2d."""

    def __init__(self, kernel_size: int | tuple[int, int], stride: int | None = None) -> None:
        super().__init__()
        self.kernel_size, self.stride = kernel_size, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, self.kernel_size, self.stride)

    def extra_repr(self) -> str:
        return f"{self.kernel_size}"


class AvgPool2d(MaxPool2d):
    """Mean of each window; see functional.avg_pool2d."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, self.kernel_size, self.stride)


class Activation(Module):
    """A function of one tensor that keeps its shape; a class for each of functional.ACTIVATIONS (nn.__getattr__)."""

    function: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return type(self).function(x)


def activation(name: str, doc: str, function: Callable[[Tensor], Tensor]) -> type[Activation]:
    """The layer of an activation."""
    body = {"__doc__": doc, "__module__": __name__, "function": staticmethod(function)}
    return type(name, (Activation,), body)


class LayerNorm(Module):
    """Each sample of (N, features) with mean 0 and variance 1, times weight plus bias; see functional.layer_norm."""

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__()
        _at_least_one("LayerNorm", features=features)
        self.weight, self.bias = Parameter(np.ones(features, np.float32)), Parameter(np.zeros(features, np.float32))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.size}, eps={self.eps}"


class Flatten(Module):
    """(N, ...) to (N, F)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.flatten(x)


class Identity(Module):
    """Gives what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Dropout(Module):
    """Zeroes elements with probability p while training; see functional.dropout."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError(f"[Dropout] p is {p}; it must be at least 0 and below 1")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"{self.p}"
