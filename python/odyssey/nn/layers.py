"""Layers: a thin module over each op of functional.py that has parameters or settings.

Initial weights and biases are uniform in [-b, b), b = 1 / sqrt(fan-in), as PyTorch's layers have
them (He et al. 2015 with a = sqrt(5)).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core import functional as F
from ..core.arena import Buffer
from ..core.attention import added
from ..core.products import one
from ..core.tensor import Parameter, Tensor
from ..errors import ConfigError, ShapeError
from .module import Module, normal, uniform

__all__ = [
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "Conv1d",
    "Conv2d",
    "Dropout",
    "Dropout2d",
    "Embedding",
    "Flatten",
    "GroupNorm",
    "Identity",
    "LayerNorm",
    "Linear",
    "MaxPool2d",
    "MultiheadAttention",
    "RMSNorm",
]


def _at_least_one(layer: str, **sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"[{layer}] {name} is {value!r}; it must be an integer of at least 1")


class Linear(Module):
    """y = x W^T + b for x (..., in_features), W (out_features, in_features)."""

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
    """Cross-correlation of x (N, in_channels, H, W) with square or (R, T) kernels; see
    functional.conv2d.
    """

    function = staticmethod(F.conv2d)
    sizes = ("height", "width")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | str | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
    ) -> None:
        super().__init__()
        name = type(self).__name__
        stride = one(name, "stride", stride)
        dilation = one(name, "dilation", dilation)
        if padding_mode != "zeros":
            raise ConfigError(
                f"[{name}] padding_mode is {padding_mode!r}; 'zeros' is supported: for others "
                "F.cat slices"
            )
        kernel = (kernel_size,) * len(self.sizes) if isinstance(kernel_size, int) else kernel_size
        kernel_sizes = {f"kernel_{size}": n for size, n in zip(self.sizes, kernel, strict=True)}
        _at_least_one(
            name,
            in_channels=in_channels,
            out_channels=out_channels,
            **kernel_sizes,
            stride=stride,
            dilation=dilation,
            groups=groups,
        )
        if in_channels % groups or out_channels % groups:
            raise ConfigError(
                f"[{name}] {in_channels} to {out_channels} channels in {groups} groups; they "
                "must be equal"
            )
        if isinstance(padding, str):
            odd = stride == 1 and all(k % 2 for k in kernel)
            if padding != "valid" and not (padding == "same" and odd):
                raise ConfigError(
                    f"[{name}] padding is {padding!r}, kernel_size {kernel_size}, stride {stride}; "
                    "give numbers, 'valid', or 'same' for odd kernels of stride 1"
                )
            padding = tuple(dilation * (k // 2) if padding == "same" else 0 for k in kernel)
        padding = padding[0] if isinstance(padding, tuple) and len(padding) == 1 else padding
        bound = 1 / math.sqrt(in_channels // groups * math.prod(kernel))
        self.weight = uniform((out_channels, in_channels // groups, *kernel), bound)
        self.bias = uniform((out_channels,), bound) if bias else None
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return self.function(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )

    def extra_repr(self) -> str:
        k, c, *kernel = self.weight.shape
        size = kernel[0] if len(set(kernel)) == 1 else tuple(kernel)
        usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        unusual = "".join(
            f", {n}={getattr(self, n)}" for n, value in usual.items() if getattr(self, n) != value
        )
        return f"{c * self.groups}, {k}, {size}{unusual}"


class Conv1d(Conv2d):
    """The same of x (N, in_channels, W); see functional.conv1d."""

    function = staticmethod(F.conv1d)
    sizes = ("width",)


class MaxPool2d(Module):
    """Largest value of each window; see functional.max_pool2d."""

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.stride = one(type(self).__name__, "stride", stride)
        self.kernel_size = kernel_size
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, self.kernel_size, self.stride, self.padding)

    def extra_repr(self) -> str:
        return f"{self.kernel_size}"


class AvgPool2d(MaxPool2d):
    """Mean of each window; see functional.avg_pool2d."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(F.pad2d(x, self.padding), self.kernel_size, self.stride)


class Activation(Module):
    """A function of one tensor that keeps its shape; a class for each of functional.ACTIVATIONS
    (nn.__getattr__), whose arguments are those of the function behind x.
    """

    function: Callable[..., Tensor]
    settings: tuple[str, ...]  # names of its arguments

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        try:
            bound = inspect.signature(type(self).function).bind(None, *args, **kwargs).arguments
        except TypeError as problem:
            raise ConfigError(
                f"[{type(self).__name__}] {problem}; give what functional's has behind x"
            ) from None
        self.arguments = {
            name: value for i, (name, value) in enumerate(bound.items()) if i and name != "inplace"
        }
        vars(self).update(self.arguments)  # which a resume compares

    def forward(self, x: Tensor) -> Tensor:
        return type(self).function(x, **{name: getattr(self, name) for name in self.settings})


def __getattr__(name: str) -> type[Activation]:
    """The layers of activations: ReLU, Tanh, ..., and those that programs add (functional.unary).

    Pickle asks here.
    """
    if name not in F.ACTIVATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kind = globals()[name] = activation(name, *F.ACTIVATIONS[name])
    return kind


def activation(name: str, doc: str, function: Callable[..., Tensor]) -> type[Activation]:
    behind_x = list(inspect.signature(function).parameters.values())[1:]
    body = {p.name: p.default for p in behind_x if p.name != "inplace"}
    body |= {
        "__doc__": doc,
        "__module__": __name__,
        "function": staticmethod(function),
        "settings": tuple(body),
    }
    return type(name, (Activation,), body)


class LayerNorm(Module):
    """Each row of (..., normalized_shape) with mean 0 and variance 1, times weight plus bias; see
    functional.layer_norm.
    """

    def __init__(
        self,
        normalized_shape: int | tuple[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self._features = features = _last_axis("LayerNorm", normalized_shape)
        self.eps = eps
        self.weight = Parameter(np.ones(features, np.float32)) if elementwise_affine else None
        self.bias = (
            Parameter(np.zeros(features, np.float32)) if bias and elementwise_affine else None
        )

    @property
    def normalized_shape(self) -> tuple[int]:
        return (self._features,)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self._features}, eps={self.eps}"


def _last_axis(layer: str, features: Any) -> int:
    """Returns what is normalised, as a number or a tuple of one. Raises ConfigError."""
    if isinstance(features, (tuple, list)):
        if len(features) != 1:
            raise ConfigError(
                f"[{layer}] shape {tuple(features)}; give one number, and x with these axes made "
                "one, reshaped"
            )
        features = features[0]
    _at_least_one(layer, features=features)
    return features


class RMSNorm(Module):
    """Each row of (..., normalized_shape) divided by the root of its mean square, times weight
    (Zhang, Sennrich 2019).
    """

    def __init__(self, normalized_shape: int | tuple[int], eps: float | None = 1e-6) -> None:
        super().__init__()
        features = _last_axis("RMSNorm", normalized_shape)
        eps = 2.0**-23 if eps is None else eps
        self.weight = Parameter(np.ones(features, np.float32))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x / F.sqrt((x * x).mean(-1, True) + self.eps) * self.weight


class GroupNorm(Module):
    """Channels (N, C, ...) in groups, each group of a sample with mean 0 and variance 1, times
    weight plus bias (C) (Wu, He 2018).
    """

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        _at_least_one("GroupNorm", num_groups=num_groups, num_channels=num_channels)
        if num_channels % num_groups:
            raise ConfigError(
                f"[GroupNorm] {num_channels} channels in {num_groups} groups; the groups must be "
                "equal"
            )
        self.weight = Parameter(np.ones(num_channels, np.float32))
        self.bias = Parameter(np.zeros(num_channels, np.float32))
        self.num_groups = num_groups
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.reshape(x.shape[0], self.num_groups, -1)
        d = y - y.mean(2, True)
        y = (d / F.sqrt((d * d).mean(2, True) + self.eps)).reshape(x.shape)
        per_channel = (-1, *[1] * (x.ndim - 2))
        return y * self.weight.reshape(*per_channel) + self.bias.reshape(*per_channel)


class BatchNorm1d(Module):
    """Each channel of (N, C) or (N, C, L) with mean 0, variance 1, times weight plus bias; see
    functional.batch_norm.

    In a trainer mean and variance are those of a shard, whose size is `shard_size`. In evaluation
    mode the running ones are used: after each step running = (1 - momentum) running + momentum
    (mean over samples of the shards' statistics).
    """

    axes: tuple[int, ...] = (2, 3)  # that an input may have
    configured = ("eps", "momentum")

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        sync: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        _at_least_one(name, num_features=num_features)
        if momentum is None or not 0 <= momentum <= 1:
            raise ConfigError(f"[{name}] momentum is {momentum}; it must be from 0 to 1")
        if sync:
            raise ConfigError(
                f"[{name}] sync=True is not supported: statistics are a shard's; raise shard_size"
            )
        self.weight = Parameter(np.ones(num_features, np.float32)) if affine else None
        self.bias = Parameter(np.zeros(num_features, np.float32)) if affine else None
        self.running_mean = (
            Buffer(np.zeros(num_features, np.float32), moves=True) if track_running_stats else None
        )
        self.running_var = (
            Buffer(np.ones(num_features, np.float32), moves=True) if track_running_stats else None
        )
        self.num_batches_tracked = (
            Buffer(np.zeros((), np.float32), moves=True) if track_running_stats else None
        )
        self.num_features = num_features
        self.eps = float(eps)
        self.momentum = float(momentum)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in self.axes:
            raise ShapeError(
                f"[{type(self).__name__}] input {x.shape}; it must have "
                f"{' or '.join(map(str, self.axes))} axes, (N, C, ...)"
            )
        running = self.running_mean, self.running_var
        training = self.training or self.running_mean is None
        return F.batch_norm(
            x,
            *running,
            self.weight,
            self.bias,
            training,
            self.momentum,
            self.eps,
            self.num_batches_tracked,
        )

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"


class BatchNorm2d(BatchNorm1d):
    """The same of images (N, C, H, W)."""

    axes = (4,)


class AdaptiveAvgPool2d(Module):
    """Means of (N, C, H, W) over windows that leave (N, C, *output_size); window i of p along an
    axis of n is i n // p to ceil((i + 1) n / p), so windows overlap where p does not divide
    n.
    """

    def __init__(self, output_size: int | tuple[int, int]) -> None:
        super().__init__()
        self.output_size = (
            (output_size, output_size) if isinstance(output_size, int) else tuple(output_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        (n, c, h, w) = x.shape
        (p, q) = self.output_size
        if min(p, q) < 1 or h < p or w < q:
            raise ShapeError(
                f"[AdaptiveAvgPool2d] {h} x {w} to {p} x {q}; give 1 to the size of the input"
            )
        if h % p == w % q == 0:
            return x.reshape(n, c * p, h // p, q, w // q).mean((2, 4)).reshape(n, c, p, q)
        rows = F.cat(
            [x[:, :, i * h // p : -(-(i + 1) * h // p)].mean(2, True) for i in range(p)], 2
        )
        return F.cat(
            [rows[..., i * w // q : -(-(i + 1) * w // q)].mean(3, True) for i in range(q)], 3
        )


class Embedding(Module):
    """The rows of weight (num_embeddings, embedding_dim), normal with variance 1 at first, that
    an index names.
    """

    padding_idx: int | None = None

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        _at_least_one("Embedding", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.weight = normal((num_embeddings, embedding_dim))
        if padding_idx is not None:
            self.padding_idx = padding_idx
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ConfigError(
                    f"[Embedding] padding_idx is {padding_idx} of {num_embeddings} rows; give "
                    "one of them"
                )
            self.weight.data[padding_idx] = 0

    def forward(self, index: Any) -> Tensor:
        return F.embedding(index, self.weight, self.padding_idx)


class MultiheadAttention(Module):
    """Attention of query (N, T, embed_dim) over key and value (N, S, embed_dim), (query, query)
    unless given: (N, T, embed_dim). Vaswani et al. 2017. Names and first weights are
    PyTorch's, the batch is the first axis. `dropout`: that of probabilities while training.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        _at_least_one("MultiheadAttention", embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise ConfigError(
                f"[MultiheadAttention] {embed_dim} features in {num_heads} heads; they must be "
                "equal"
            )
        if not batch_first:
            raise ConfigError(
                "[MultiheadAttention] batch_first=False; the batch is the first axis: "
                "x.transpose(0, 1)"
            )
        if isinstance(dropout, bool):
            raise ConfigError(
                f"[MultiheadAttention] dropout is {dropout}, which is no number; say bias={dropout}"
            )
        self.dropout = Dropout(dropout)
        self.num_heads = num_heads
        # Glorot, Bengio 2010
        self.in_proj_weight = uniform((3 * embed_dim, embed_dim), math.sqrt(6 / (4 * embed_dim)))
        self.in_proj_bias = Parameter(np.zeros(3 * embed_dim, np.float32)) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias)
        if bias:
            self.out_proj.bias.data[...] = 0

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Any = None,
        need_weights: bool | None = None,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        """The result; with `value`, or need_weights=False, (the result, None): what PyTorch
        gives without weights.

        key_padding_mask: (N, S), True at keys that nobody sees, or floats that are added to scores.
        attn_mask: (T, S) or (N heads, T, S) likewise. is_causal: query i sees the keys up to i,
        whatever the masks say.
        """
        if need_weights:
            raise ConfigError(
                "[MultiheadAttention] need_weights=True; weights are not kept, say "
                "need_weights=False"
            )
        past = 0 if is_causal else None
        dropout = self.dropout.p if self.training else 0.0
        mask = None if attn_mask is None else added(attn_mask, query, False)
        if mask is not None and mask.ndim == 3:
            mask = mask.reshape(-1, self.num_heads, *mask.shape[1:])
        if key_padding_mask is not None:
            padding = added(key_padding_mask, query, False)
            padding = padding.reshape(padding.shape[0], 1, 1, -1)
            mask = padding if mask is None else mask + padding
        f = self.in_proj_weight.shape[1]
        # one product for all three
        if key is None or (key is query and (value is None or value is query)):
            parts: Any = (F.linear(query, self.in_proj_weight, self.in_proj_bias), None, None)
        else:
            inputs = (query, key, key if value is None else value)
            projections = (F.linear(x, self.in_proj_weight, self.in_proj_bias) for x in inputs)
            parts = [y[:, :, i * f : (i + 1) * f] for i, y in enumerate(projections)]
        y = self.out_proj(F.attention(*parts, self.num_heads, past, dropout=dropout, mask=mask))
        return y if value is None and need_weights is None else (y, None)


class Flatten(Module):
    """(N, ...) to (N, F), or the axes from start_dim to end_dim as one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self._axes = start_dim, end_dim

    def forward(self, x: Tensor) -> Tensor:
        return F.flatten(x, *self._axes)


class Identity(Module):
    """Gives what it is given; its arguments mean nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.arguments = {}

    def forward(self, x: Tensor) -> Tensor:
        return x


class Dropout(Module):
    """Zeroes elements with probability p while training; see functional.dropout."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError(
                f"[{type(self).__name__}] p is {p}; it must be at least 0 and below 1"
            )
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"{self.p}"


class Dropout2d(Dropout):
    """Zeroes whole channels of (N, C, ...) with probability p while training."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        one = Tensor(np.ones(x.shape[1:2], np.float32)).expand(*x.shape[:2])
        return x * F.dropout(one, self.p).reshape(*x.shape[:2], *[1] * (x.ndim - 2))
