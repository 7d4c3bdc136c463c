"""The ops: for each a shape rule, the record of its forward kernel, and the records of its
backward.

Letters as in mojo/kernels/lanes.mojo: G groups of samples, C, H, W input channels, height, width, K
output channels, R, T kernel, S stride, I, O features of a linear layer, F features of anything.

Gradients of parameters are added to the parameter's `grad` by the kernels; gradients of activations
are new tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DeviceError, ShapeError
from . import native
from .attention import *  # noqa: F403
from .batch_norm import batch_norm as batch_norm
from .dropout import dropout as dropout
from .operators import *  # noqa: F403
from .operators import mean, mean_over_samples, multiply, scale, sum
from .placement import Device, different_places
from .placement import device as place_of
from .products import bias_memory, grad_memory, one, pair
from .products import conv1d as conv1d
from .products import conv2d as conv2d
from .products import linear as linear
from .products import pad2d as pad2d
from .program import ONNX, Memory, OwnMemory, Recorder, ShardEager, current
from .shapes import *  # noqa: F403
from .shapes import adjoint, as_tensor, axis_of, batched, pad, reshape, tokens, transpose
from .tape import Tensor, attach, empty, in_checkpoint, make
from .tape import to_lanes as to_lanes
from .tape import to_rows as to_rows


def to(x: Tensor, device: int | str | Device) -> Tensor:
    """The same values on another place (placement.device); x itself if it is there.

    The gradient goes the way back.
    """
    place = place_of(device)
    if place == x.device:
        return x
    if in_checkpoint():
        raise DeviceError(
            f"[to] a checkpoint goes from {x.device} to {place}; it must stay on one place: end "
            f"it before .to({place})"
        )

    def moved(v: Tensor) -> Tensor:
        y = make(empty(v.shape, v.layout).memory, v.shape, v.layout, v.dtype)
        current().emit("copy", y.memory, v.memory, v.floats)
        return y

    return attach(moved(x), (x,), lambda dy: (moved(dy),), place)


# --- layers -----------------------------------------------------------------------------------


def _pooled(name: str, x: Tensor, kernel: Any, stride: Any) -> tuple[Tensor, tuple[int, ...]]:
    """Returns memory for a pooling of x and the sizes of its record. Raises ShapeError."""
    r, t = pair(kernel)
    s = r if stride is None else one(name, "stride", stride)
    if r < 1 or t < 1 or s < 1:
        raise ShapeError(f"[{name}] a window of {r} x {t} at stride {s}; all must be at least 1")
    if x.ndim != 4 or r > x.shape[2] or t > x.shape[3]:
        raise ShapeError(
            f"[{name}] a window of {r} x {t} does not fit an input of shape {x.shape}, (N, C, H, W)"
        )
    if stride is None and r != t:
        raise ShapeError(f"[{name}] a window of {r} x {t} needs a stride; give one")
    n, c, h, w = x.shape
    y = empty((n, c, (h - r) // s + 1, (w - t) // s + 1), x.layout)
    return y, (x.groups * c, h, w, r, t, s)


def max_pool2d(
    x: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | None = None,
    padding: int | tuple[int, int] = 0,
) -> Tensor:
    """Largest value of each window of x (N, C, H, W), of at most 256 places; stride =
    kernel_size unless given.

    A frame of `padding`, at most half a window, is part of windows and never the largest value.
    """
    ph, pw = pair(padding)
    if ph < 0 or pw < 0 or any(2 * p > k for p, k in zip((ph, pw), pair(kernel_size), strict=True)):
        raise ShapeError(
            f"[max_pool2d] padding {padding} of windows {kernel_size}; give 0 to half a window"
        )
    x = batched(x)
    if ph or pw:
        x = pad(x, (pw, pw, ph, ph), value=-math.inf)
    y, sizes = _pooled("max_pool2d", x, kernel_size, stride)
    r, t = sizes[3:5]
    if r * t > 256:
        raise ShapeError(
            f"[max_pool2d] a window of {r} x {t} has {r * t} places; at most 256 are supported"
        )
    argmax = current().alloc(y.floats)
    current().emit("maxpool_forward", y.memory, argmax, x.memory, *sizes, layout=x.layout)
    backward = adjoint("maxpool_backward", x, argmax, y.memory, *sizes, 0, layout=x.layout)
    return attach(y, (x,), backward, name="max_pool2d")


def avg_pool2d(x: Tensor, kernel_size: int | tuple[int, int], stride: int | None = None) -> Tensor:
    """Mean of each window of x (N, C, H, W); stride = kernel_size unless given."""
    x = batched(x)
    y, sizes = _pooled("avg_pool2d", x, kernel_size, stride)
    current().emit("avgpool_forward", y.memory, x.memory, *sizes, layout=x.layout)
    backward = adjoint("avgpool_backward", x, *sizes, layout=x.layout)
    return attach(y, (x,), backward, name="avg_pool2d")


ONNX |= {"maxpool_forward": "MaxPool", "avgpool_forward": "AveragePool"}

# --- activations --------------------------------------------------------------------------------


# name of the layer in nn: what it is, the function
ACTIVATIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {}


def unary(
    name: str, doc: str = "", *, saves: str = "y", layer: str = "", onnx: str = ""
) -> Callable[[Tensor], Tensor]:
    """An elementwise op from its two kernels, `name`_forward (y; x; n) and `name`_backward (dx;
    dy, saved; n).

    saves: what its gradient needs: "x", or "y".
    layer: its name in nn, if it is an activation.
    onnx: the node of ONNX that computes the same, if there is one.
    `inplace` of what is made is PyTorch's and changes nothing.
    """

    def op(x: Tensor, inplace: bool = False) -> Tensor:  # x itself is never changed
        x = as_tensor(x)
        y = empty(x.shape, x.layout)
        # not y: its node would hold it, and it its node
        saved = (x if saves == "x" else y).memory
        n = y.floats
        current().emit(f"{name}_forward", y.memory, x.memory, n)
        return attach(y, (x,), adjoint(f"{name}_backward", x, saved, n), name=name)

    op.__name__ = name
    op.__qualname__ = name
    op.__doc__ = doc
    if layer:
        ACTIVATIONS[layer] = doc, op
    if onnx:
        ONNX[f"{name}_forward"] = onnx
    return op


relu = unary("relu", "max(x, 0).", layer="ReLU", onnx="Relu")
tanh = unary("tanh", "Hyperbolic tangent.", layer="Tanh", onnx="Tanh")
sigmoid = unary("sigmoid", "1 / (1 + exp(-x)).", layer="Sigmoid", onnx="Sigmoid")
_gelu_tanh = unary("gelu_tanh", saves="x")
_gelu = unary("gelu", saves="x", onnx="Gelu")


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x times the share of a normal distribution that lies below x, or "tanh": GPT-2's
    approximation of it.
    """
    if approximate not in ("none", "tanh"):
        raise ShapeError(f"[gelu] approximate is {approximate!r}; it must be 'none' or 'tanh'")
    return _gelu(x) if approximate == "none" else _gelu_tanh(x)


ACTIVATIONS["GELU"] = "x times the share of a normal distribution that lies below x.", gelu
silu = unary("silu", "x sigmoid(x).", saves="x", layer="SiLU", onnx="Swish")
softplus = unary("softplus", "log(1 + exp(x)).", saves="x", layer="Softplus", onnx="Softplus")
abs = unary("abs", "|x|; its gradient is 0 for 0.", saves="x", onnx="Abs")


def sign(x: Tensor) -> Tensor:
    """1 above 0, -1 below, 0 for 0. No gradient."""
    y = empty(x.shape, x.layout)
    current().emit("sign", y.memory, x.memory, y.floats)
    return attach(y, (x.detach(),), lambda dy: (None,))


def leaky_relu(x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """x above 0, negative_slope x elsewhere (Maas, Hannun, Ng 2013)."""

    def apply(op: str) -> Tensor:
        y = empty(x.shape, x.layout)
        current().emit(op, y.memory, x.memory, float(negative_slope), y.floats)
        return y

    return attach(apply("leaky_relu"), (x,), lambda dy: (multiply(dy, apply("leaky_slope")),))


ACTIVATIONS["LeakyReLU"] = "x above 0, negative_slope x elsewhere.", leaky_relu
ONNX |= {"leaky_relu": "LeakyRelu", "sign": "Sign"}


def _over_classes(name: str, doc: str, layer: str) -> Callable[[Tensor], Tensor]:
    """An op along an axis of x (N, ...), with kernels for (N, classes) as those of `unary` but
    for the sizes G, F.
    """

    def op(x: Tensor, dim: int = -1) -> Tensor:
        if x.ndim < 2:
            raise ShapeError(f"[{name}] input of shape {x.shape}; it must be (N, ..., classes)")
        if axis_of(name, dim, x.ndim) != x.ndim - 1:
            return transpose(op(transpose(x, dim, -1)), dim, -1)
        if x.ndim > 2:
            return reshape(op(tokens(x)), x.shape)
        x = batched(x)
        y = empty(x.shape, x.layout)
        saved = y.memory
        size = (x.groups, x.features)
        current().emit(f"{name}_forward", saved, x.memory, *size, layout=x.layout)
        return attach(
            y, (x,), adjoint(f"{name}_backward", x, saved, *size, layout=x.layout), name=name
        )

    op.__name__ = name
    op.__qualname__ = name
    op.__doc__ = doc
    ACTIVATIONS[layer] = (doc, op)
    ONNX[f"{name}_forward"] = layer
    return op


softmax = _over_classes(
    "softmax", "exp(x) / sum exp(x) along an axis of x, the last one unless given.", "Softmax"
)
log_softmax = _over_classes(
    "log_softmax", "x - log sum exp(x) along an axis of x, the last one unless given.", "LogSoftmax"
)


def layer_norm(
    x: Tensor,
    normalized_shape: Any = None,
    weight: Any = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Each row of x (..., F) moved and scaled to mean 0 and variance 1, times weight (F), plus
    bias (F) if given.

    Ba, Kiros, Hinton 2016. The variance is that of the F numbers, plus eps. normalized_shape:
    PyTorch's (F,), which may be left out: layer_norm(x, weight, bias). Raises ShapeError.
    """
    if isinstance(normalized_shape, Tensor):
        bias = weight
        weight = normalized_shape
    elif normalized_shape not in (None, x.shape[-1], x.shape[-1:], [x.shape[-1]]):
        raise ShapeError(
            f"[layer_norm] normalized_shape {normalized_shape} of {x.shape}; give the last axis, "
            f"({x.shape[-1]},): for several make them one by reshape"
        )
    if weight is None:
        weight = Tensor(np.ones(x.shape[-1], np.float32))
        weight.device = x.device
    if x.ndim > 2:
        return reshape(layer_norm(tokens(x), weight, bias, eps=eps), x.shape)
    if x.ndim != 2 or any(p is not None and p.shape != x.shape[1:] for p in (weight, bias)):
        shapes = f"weight {weight.shape}, bias {None if bias is None else bias.shape}"
        raise ShapeError(f"[layer_norm] input {x.shape}, {shapes}; they must be (..., F), (F), (F)")
    x = batched(x)
    y = empty(x.shape, x.layout)
    size = (x.groups, x.features)
    stats = current().alloc(8 * (x.floats // x.features))  # mean and 1 / deviation of each sample
    operands = y.memory, stats, x.memory, weight.memory, bias_memory(bias, x.features)
    current().emit("layer_norm_forward", *operands, *size, float(eps), layout=x.layout)

    def backward(dy: Tensor) -> tuple[Tensor | None, ...]:
        for kind, p, saved in (("weight", weight, (x.memory, stats)), ("bias", bias, ())):
            if p is not None and p.requires_grad:
                to = grad_memory("layer_norm", p)
                current().emit(
                    f"layer_norm_backward_{kind}", to, dy.memory, *saved, *size, layout=x.layout
                )
        if not x.requires_grad:
            return (None, None, None)
        dx = empty(x.shape, x.layout)
        operands = dx.memory, dy.memory, x.memory, stats, weight.memory
        current().emit("layer_norm_backward_input", *operands, *size, layout=x.layout)
        return (dx, None, None)

    return attach(y, (x, weight, weight if bias is None else bias), backward)


ONNX["layer_norm_forward"] = "LayerNormalization"

# --- losses ---------------------------------------------------------------------------------------


def labels_of(target: Any, samples: int, classes: int, layout: str, ignored: int = -1) -> Memory:
    """Labels as the kernels read them: int32, below 0 where nothing is learnt, which is so in
    lanes without a sample.

    Raises ShapeError for a bad label.
    """
    if isinstance(target, (tuple, dict)):
        kind = "dict" if isinstance(target, dict) else "tuple"
        raise ShapeError(
            f"[loss] the targets are a {kind}; give loss=, a function of (output, target)"
        )
    if isinstance(target, Tensor):
        if target.ndim > 1:
            target = reshape(target, -1)
        if (
            target.dtype == np.int32
            and target.shape == (samples,)
            and layout in (target.layout, "rows")
        ):
            return target.memory
        if current().shard:
            raise ShapeError(
                f"[loss] a target of {np.dtype(target.dtype)} {target.shape}; it must be integers "
                f"({samples},), the class of each sample, or (N, T), of each token; numbers as "
                "targets need nn.MSELoss() or another loss of numbers, and metrics such as 'mae'"
            )
        target = target.data
    labels = np.asarray(target)
    a = labels.reshape(-1) if labels.ndim > 1 else labels
    if a.shape != (samples,):
        raise ShapeError(
            f"[loss] labels of shape {labels.shape} for {samples} samples; give one class index "
            "per sample"
        )
    indices = a.astype(np.int32)
    wrong = (indices != a) | (indices < 0) & (indices != ignored) | (indices >= classes)
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        raise ShapeError(
            f"[loss] label {bad} is {a[bad]}; it must be a class index from 0 to {classes - 1}"
        )
    lanes = native.library().lanes
    padded = native.aligned(-(-samples // lanes) * lanes, np.int32)
    padded[:] = -1
    padded[:samples] = np.where(indices == ignored, -1, indices)
    return OwnMemory(padded)


def _loss(
    name: str,
    x: Tensor,
    target: Any,
    reduction: str,
    ignored: int,
    of_classes: np.ndarray | None = None,
) -> Tensor:
    """of_classes: what the targets of each class count in a mean; x is then not what predictions
    are taken from.
    """
    if x.ndim < 2:
        raise ShapeError(
            f"[{name}] input of shape {x.shape}; it must be (N, classes) or (N, T, classes)"
        )
    if reduction not in ("mean", "sum"):
        raise ShapeError(f"[{name}] reduction {reduction!r}; it must be 'mean' or 'sum'")
    if ignored >= 0:
        raise ShapeError(f"[{name}] ignore_index is {ignored}; it must be below 0")
    executor = current()
    x = tokens(x) if x.ndim > 2 else batched(x)
    if isinstance(target, Tensor) and target.device != x.device:
        raise DeviceError(different_places(name, target, x))
    labels = labels_of(target, x.shape[0], x.features, x.layout, ignored)
    size = (x.groups, x.features)
    total = empty(())
    saved: tuple[Memory, ...] = ()
    if name == "cross_entropy":
        saved = (current().alloc(4 * x.floats),)
    current().emit(
        f"{name}_forward", total.memory, *saved, x.memory, labels, *size, layout=x.layout
    )
    per = 1  # tokens of a sample
    if isinstance(executor, (Recorder, ShardEager)):
        per = x.shape[0] // executor.samples
        executor.outputs = executor.outputs or x.features
        if executor.first_stats is None and per == 1 and of_classes is None:
            executor.first_stats = total.memory
    attach(
        total,
        (x,),
        adjoint(f"{name}_backward", x, *saved, labels, *size, layout=x.layout),
        name="loss",
    )
    if reduction == "sum":
        return total
    total = scale(total, 1.0 / per) if per > 1 else total
    if executor.shard or not isinstance(labels, OwnMemory):
        return mean_over_samples(total, x.shape[0])
    counted = labels.array.view(np.int32)
    counted = counted[counted >= 0]
    divisor = len(counted) if of_classes is None else float(of_classes[counted].sum())
    return mean_over_samples(total, divisor or 1)  # 0 where nothing has a loss


def cross_entropy(
    x: Tensor,
    target: Any,
    weight: Any = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """log sum exp(x) - x[target] of logits x (N, classes) and class indices target (N), mean or
    sum over samples.

    Or of (N, T, classes) and (N, T): over all tokens; in a trainer the mean over samples of the
    means over their T tokens. Targets of `ignore_index` (in a trainer: all below 0) have no loss; a
    trainer counts them as 0 in the mean.

    weight: what each class counts, (classes,). label_smoothing: how much of a target is spread over
    all classes (Szegedy et al. 2016). As in PyTorch, but that the mean in a trainer is over
    samples, whatever their class counts.
    """
    if not isinstance(x, Tensor):
        raise ShapeError(
            f"[cross_entropy] the input is a {type(x).__name__}; give loss=, a function of "
            "(output, target)"
        )
    if weight is None and label_smoothing == 0:
        return _loss("cross_entropy", x, target, reduction, ignore_index)
    if not 0 <= label_smoothing <= 1:
        raise ShapeError(
            f"[cross_entropy] label_smoothing is {label_smoothing}; it must be from 0 to 1"
        )
    classes = x.shape[-1] if x.ndim else 0
    w = _class_weights("cross_entropy", weight, classes)
    p = log_softmax(x)
    weighted = p if weight is None else p * w
    y = weighted * (1.0 - label_smoothing)
    if label_smoothing:  # the same for all classes, so that it is there whatever the target
        y = y + weighted.sum(-1, True) * (label_smoothing / classes)
    return _loss("nll", y, target, reduction, ignore_index, w)


def nll_loss(
    x: Tensor,
    target: Any,
    weight: Any = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """-x[target] of log-probabilities x and class indices target, of shapes, weights and means as
    in cross_entropy.
    """
    if weight is None:
        return _loss("nll", x, target, reduction, ignore_index)
    w = _class_weights("nll_loss", weight, x.shape[-1] if x.ndim else 0)
    return _loss("nll", x * w, target, reduction, ignore_index, w)


def _class_weights(name: str, weight: Any, classes: int) -> np.ndarray:
    """Returns what each class counts, (classes,), 1 without weights.

    Raises ShapeError: the weights are no numbers, or not one for each class.
    """
    if weight is None:
        return np.ones(classes, np.float32)
    weights = check_weights(name, weight)
    if weights.shape != (classes,):
        raise ShapeError(
            f"[{name}] weight has shape {weights.shape}; it must be ({classes},), a number for "
            "each class"
        )
    return weights


def check_weights(name: str, weight: Any) -> np.ndarray:
    """Returns the weights of a loss as float32. Raises ShapeError: they are no numbers."""
    try:
        return np.asarray(weight.data if isinstance(weight, Tensor) else weight, np.float32)
    except (TypeError, ValueError):
        hint = "" if not isinstance(weight, str) else f"; use reduction={weight!r}"
        raise ShapeError(f"[{name}] weight is {weight!r}; it must be numbers{hint}") from None


def _difference(name: str, x: Tensor, target: Any) -> tuple[Tensor, Tensor]:
    """Both, of one shape. Raises ShapeError."""
    t = target if isinstance(target, Tensor) else Tensor(target)
    if t.shape != x.shape:
        raise ShapeError(
            f"[{name}] output {x.shape} and target {t.shape}; they must be of the same shape "
            "(nothing is broadcast): "
            + (
                "give targets (N, 1), such as y[:, None]"
                if x.shape == (*t.shape, 1)
                else "reshape one of them"
            )
            + (
                "; these are classes: give numbers as floats (data.csv: classes=False)"
                if t.dtype == np.int32
                else ""
            )
        )
    if t.dtype == np.int32:
        raise ShapeError(
            f"[{name}] the target is integers {t.shape}, the output numbers; give target.float(), "
            "or a data set whose targets are floats, y.astype('float32')"
        )
    return x, t


def _reduced(name: str, losses: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ShapeError(f"[{name}] reduction {reduction!r}; it must be 'mean', 'sum' or 'none'")
    return losses if reduction == "none" else mean(losses) if reduction == "mean" else sum(losses)


def mse_loss(x: Tensor, target: Any, *, reduction: str = "mean") -> Tensor:
    """(x - target)^2 of equal shapes (N, ...): the mean or sum over all numbers, or each
    ("none").
    """
    x, t = _difference("mse_loss", x, target)
    d = x - t
    return _reduced("mse_loss", d * d, reduction)


def l1_loss(x: Tensor, target: Any, *, reduction: str = "mean") -> Tensor:
    """|x - target| of equal shapes (N, ...): the mean or sum over all numbers, or each ("none")."""
    x, t = _difference("l1_loss", x, target)
    return _reduced("l1_loss", abs(x - t), reduction)


def smooth_l1_loss(x: Tensor, target: Any, *, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """d^2 / (2 beta) where |d| < beta, else |d| - beta / 2, of d = x - target of equal shapes
    (N, ...).

    Girshick 2015 (beta 1). The mean or sum over all numbers, or each ("none"). beta 0 is l1_loss.
    """
    if not 0 <= beta < math.inf:
        raise ShapeError(f"[smooth_l1_loss] beta is {beta}; it must be at least 0")
    if beta == 0:
        return l1_loss(x, target, reduction=reduction)
    x, t = _difference("smooth_l1_loss", x, target)
    d = x - t
    # the nearest numbers from -beta to beta; a constant, without a gradient
    c = empty(d.shape, d.layout)
    current().emit("clamp", c.memory, d.memory, float(beta), c.floats)
    attach(c, (d.detach(),), lambda dy: (None,))
    # c (d - c / 2) / beta; its derivative is c / beta, as if c were a constant: d = c, or c does
    # not change
    return _reduced("smooth_l1_loss", c * (d - c * 0.5) * (1 / beta), reduction)


def binary_cross_entropy_with_logits(
    x: Tensor,
    target: Any,
    weight: Any = None,
    *,
    reduction: str = "mean",
    pos_weight: Any = None,
) -> Tensor:
    """-w (p t log s + (1 - t) log(1 - s)), s = sigmoid(x), of logits x and targets t in [0, 1].

    x and t have equal shapes (N, ...).

    weight w, pos_weight p: constants that are broadcast to x, such as one number per output, (F,)
    of (N, F); default 1. Computed as p t log(1 + exp(-x)) + (1 - t) log(1 + exp(x)). The mean or
    sum over all numbers, or each ("none").
    """
    x, t = _difference("binary_cross_entropy_with_logits", x, target)
    name = "binary_cross_entropy_with_logits"
    w, p = (None if c is None else check_weights(name, c) for c in (weight, pos_weight))
    losses = (t if p is None else t * p) * softplus(-x) + (1.0 - t) * softplus(x)
    return _reduced(name, losses if w is None else losses * w, reduction)


def top_k(x: Tensor, target: Any, k: int = 1) -> Tensor:
    """1 for each sample whose class target (N) is among the k largest entries of x (N, classes),
    else 0; shape (N,).

    Or for each token: (N, T, classes), (N, T), (N, T). Of equal entries the first counts as larger.
    No gradient.
    """
    if x.ndim < 2 or k < 1:
        raise ShapeError(
            f"[top_k] input of shape {x.shape}, k {k}; it must be (N, classes), and k at least 1"
        )
    shape = x.shape[:-1]
    x = tokens(x) if x.ndim > 2 else batched(x)
    labels = labels_of(target, x.shape[0], x.features, x.layout)
    y = empty((x.shape[0],), x.layout)
    current().emit(
        "top_k", y.memory, x.memory, labels, x.groups, x.features, float(k), layout=x.layout
    )
    return reshape(attach(y, (x.detach(),), lambda dy: (None,)), shape)


def accuracy(x: Tensor, target: Any) -> float:
    """The share of samples whose largest entry of x (N, classes) is at the target."""
    return float(np.mean(np.argmax(x.data, axis=1) == np.asarray(target)))


# --- of a tensor ----------------------------------------------------------------------------------


def _missing(x: Tensor, name: str) -> Any:
    message = f"{type(x).__name__} has no {name}"
    if name in globals():
        message += f"; use functional.{name}(x)"
    elif name.endswith("_") and name[:1] != "_":
        message += f"; nothing is changed in place: x = x.{name[:-1]}(...)"
    raise AttributeError(message)


# Nothing is changed in place, so a copy is x itself.
_METHODS = dict.fromkeys(("clone", "contiguous", "cpu"), lambda x: x) | {
    "view": reshape,
    "__abs__": abs,
}
_METHODS |= {
    "mul": multiply,
    "div": divide,  # noqa: F405
    "pow": power,  # noqa: F405
    "sub": lambda x, y: x - y,
    "t": lambda x: transpose(x, 0, 1),
}  # noqa: F405
_METHODS |= {"dim": lambda x: x.ndim, "numel": lambda x: int(x.size), "bool": lambda x: ne(x, 0.0)}  # noqa: F405
_METHODS |= {"float": to_float, "int": to_int, "long": to_int, "__getattr__": _missing}  # noqa: F405
for _name in (
    "abs add argmax chunk clamp eq exp expand flatten ge gelu gt le log log_softmax lt masked_fill "
    "matmul max mean min sign ne normalize permute relu reshape sigmoid silu softmax split sqrt "
    "squeeze sum tanh to transpose unbind unsqueeze var"
).split():
    _METHODS[_name] = globals()[_name]
for _name, _op in _METHODS.items():
    setattr(Tensor, _name, _op)
