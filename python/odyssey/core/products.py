"""Products of an input and the weights of a layer: convolutions and linear layers, and which
kernels compute them.

Letters as in functional.py. A record's dtype says how its operands are rounded (precision.py). On
CPUs, large convolutions of 3 x 3 with stride 1 are computed by Winograd's algorithm
(mojo/kernels/winograd.mojo) unless `conv_algorithm` is "direct". The shape of the whole layer and
that setting alone decide, so the results don't depend on cores, ranks or the speed of a machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..errors import ConfigError, ShapeError
from ..settings.recipes import CONV_ALGORITHMS
from . import native
from .program import ONNX, Memory, OwnMemory, current
from .shapes import adjoint, as_image, as_tensor, batched, reshape, tokens
from .tape import Tensor, attach, empty, make, tape_is_on, to_lanes, to_rows

# Winograd's algorithm is slower for smaller convolutions; docs/kernels.md has the measurements.
WINOGRAD_CHANNELS = 32  # the least of x and of y
WINOGRAD_PIXELS = 7  # the least height and width of y
TILE = 4  # height and width of a tile of y, as in mojo/kernels/winograd.mojo


def grad_memory(name: str, p: Tensor | None, size: int = 0) -> Memory:
    """Where the kernel adds the gradient of a weight or bias; scratch memory if nobody wants it."""
    if p is None or not p.requires_grad:
        return current().alloc(4 * (size if p is None else p.size))
    if p.node is not None:
        raise ShapeError(f"[{name}] the weight is the result of another op; it must be a parameter")
    if p.grad is None:
        p.grad = make(OwnMemory(native.aligned(p.shape)), p.shape)
    return p.grad.memory


def _check_bias(name: str, b: Tensor | None, weight: Tensor) -> None:
    if b is not None and b.shape != weight.shape[:1]:
        raise ShapeError(
            f"[{name}] bias of shape {b.shape} for weight {weight.shape}; it must be "
            f"{weight.shape[:1]}"
        )


def bias_memory(b: Tensor | None, size: int) -> Memory:
    return OwnMemory(native.aligned(size)) if b is None else b.memory


def product_precision() -> str:
    """Returns what the products called now round their operands to."""
    executor = current()
    if executor.precision == "tf32" and not executor.gpu:
        raise ConfigError(
            "[precision] tf32 products are a GPU's; use fp32 or bf16, or train on a GPU"
        )
    return executor.precision


def pair(v: int | tuple[int, int]) -> tuple[int, int]:
    return (v, v) if isinstance(v, int) else (v[0], v[1])


def one(layer: str, name: str, value: Any) -> Any:
    """A size that is the same along all axes, also as a tuple. Raises ConfigError."""
    if isinstance(value, (tuple, list)) and len(set(value)) == 1:
        return value[0]
    if isinstance(value, (tuple, list)):
        raise ConfigError(
            f"[{layer}] {name} is {tuple(value)}; give one number for all axes, and as strides "
            "slices of the result of stride 1, such as y[:, :, ::2]"
        )
    return value


def pad2d(x: Tensor, padding: int | tuple[int, int]) -> Tensor:
    """(N, C, H, W) in a frame of zeros, `padding` high and wide."""
    ph, pw = pair(padding)
    if ph < 0 or pw < 0 or x.ndim != 4:
        raise ShapeError(
            f"[pad2d] padding {padding} of shape {x.shape}; give 0 or more, and a tensor of (N, "
            "C, H, W)"
        )
    if ph == pw == 0:
        return x
    x = batched(x)
    n, c, h, w = x.shape
    y = empty((n, c, h + 2 * ph, w + 2 * pw), x.layout)
    sizes = (x.groups * c, h, w, ph, pw)
    current().emit("pad_forward", y.memory, x.memory, *sizes, layout=x.layout)
    return attach(y, (x,), adjoint("pad_backward", x, *sizes, layout=x.layout), name="pad2d")


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    *,
    algorithm: str | None = None,
) -> Tensor:
    """Cross-correlation of x (N, C, H, W) with weight (K, C / groups, R, T), plus bias (K).

    Args:
        dilation: pixels from one tap of a kernel to the next.
        groups: runs of channels of x, each of which a run of channels of y reads. With these two,
            products are float32 in every precision.
        algorithm: "auto", "direct" or "winograd", which is for 3 x 3 with stride 1, at least 32
            channels of x and y, y of at least 7 x 7 and float32 products, and leaves others direct.
            "auto" is "winograd" on CPUs and "direct" on GPUs. None: the trainer's conv_algorithm.

    Returns (N, K, P, Q) with P = (H + 2 padding - dilation (R - 1) - 1) / stride + 1.

    Raises ShapeError: the channels differ or are no multiples of groups, or the kernel is larger
    than the padded input. ConfigError: another algorithm, or Winograd's on a GPU.
    """
    x = as_tensor(x)
    if x.ndim != 4 or weight.ndim != 4:
        raise ShapeError(
            f"[conv2d] input {x.shape} and weight {weight.shape}; they must be (N, C, H, W) and "
            "(K, C, R, T)"
        )
    frame = pair(padding)
    stride = one("conv2d", "stride", stride)
    dilation = one("conv2d", "dilation", dilation)
    height, width = (n + 2 * p - 2 for n, p in zip(x.shape[2:], frame, strict=True))
    if (
        _chosen_algorithm(algorithm) == "winograd"
        and fits_winograd(weight.shape)
        and min(height, width) >= WINOGRAD_PIXELS
        and stride == dilation == groups == 1
        and x.shape[1] == weight.shape[1]
        and min(frame) >= 0
        and product_precision() == "fp32"
    ):
        _check_bias("conv2d", bias, weight)
        return _winograd(x, weight, bias, *frame)
    return _direct("conv2d", x, weight, weight.shape, bias, stride, padding, dilation, groups)


def _direct(
    op: str,
    x: Tensor,
    weight: Tensor,
    kernel: tuple[int, ...],
    bias: Tensor | None,
    stride: int,
    padding: int | tuple[int, int],
    dilation: int,
    groups: int,
) -> Tensor:
    """conv2d of a weight with the numbers of `kernel` (K, C / groups, R, T); `op` is its name in
    messages.
    """
    k, c, r, t = kernel
    for name, value in (("stride", stride), ("dilation", dilation), ("groups", groups)):
        if value < 1:
            raise ShapeError(f"[{op}] {name} is {value}; it must be at least 1")
    if x.shape[1] != c * groups:
        per = f" with {groups} groups" * (groups > 1)
        raise ShapeError(
            f"[{op}] input {x.shape} and weight {weight.shape}{per}; the input must have "
            f"{c * groups} channels"
        )
    if k % groups:
        raise ShapeError(f"[{op}] {k} channels in {groups} groups; the groups must be equal")
    _check_bias(op, bias, weight)
    x = batched(pad2d(x, padding))
    n, c, h, w = x.shape
    high = dilation * (r - 1) + 1
    wide = dilation * (t - 1) + 1
    if high > h or wide > w:
        raise ShapeError(
            f"[{op}] a kernel of {high} x {wide} does not fit an input of {h} x {w}; add padding"
        )
    y = empty((n, k, (h - high) // stride + 1, (w - wide) // stride + 1), x.layout)
    plain = dilation == groups == 1
    kind = "conv2d"
    sizes = (x.groups, c, h, w, k, r, t, stride)
    relu = (0,)
    if not plain:
        kind = "conv2d_general"
        sizes = (*sizes, dilation, groups)
        relu = ()
    # One channel fills half of a pair; packing would cost what is left to gain (docs/precision.md).
    options = {"layout": x.layout, "dtype": product_precision() if c > 1 and plain else "fp32"}
    current().emit(
        f"{kind}_forward",
        y.memory,
        x.memory,
        weight.memory,
        bias_memory(bias, k),
        *sizes,
        *relu,
        **options,
    )

    def backward(dy: Tensor) -> tuple[Tensor | None, ...]:
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            db = grad_memory(op, bias, k)
            dw = grad_memory(op, weight)
            current().emit(
                f"{kind}_backward_weight", dw, db, dy.memory, x.memory, *sizes, **options
            )
        if not x.requires_grad:
            return (None, None, None)
        dx = empty(x.shape, x.layout)
        current().emit(
            f"{kind}_backward_input", dx.memory, dy.memory, weight.memory, *sizes, **options
        )
        return (dx, None, None)

    return attach(y, (x, weight, weight if bias is None else bias), backward, name=op)


def fits_winograd(weight: tuple[int, ...]) -> bool:
    """Returns whether a weight of this shape is one for Winograd's algorithm, if y is large
    enough.
    """
    return len(weight) == 4 and weight[2:] == (3, 3) and min(weight[:2]) >= WINOGRAD_CHANNELS


def count_convolutions(ops: Iterable[str]) -> tuple[int, int]:
    """Returns how many of the ops are convolutions by Winograd's algorithm, and how many are
    convolutions at all, in the forward pass.
    """
    counts = Counter(ops)
    tiled = counts["winograd_forward"]
    return tiled, tiled + counts["conv2d_forward"] + counts["conv2d_general_forward"]


def _chosen_algorithm(algorithm: str | None) -> str:
    """Returns "direct" or "winograd" for an argument of conv2d.

    Raises ConfigError: it is another algorithm, or Winograd's on a GPU.
    """
    executor = current()
    chosen = executor.conv_algorithm if algorithm is None else algorithm
    if chosen not in CONV_ALGORITHMS:
        raise ConfigError(
            f"[conv2d] algorithm is {chosen!r}; choose from {', '.join(CONV_ALGORITHMS)}"
        )
    if chosen == "auto":
        return "direct" if executor.gpu else "winograd"
    if chosen == "winograd" and executor.gpu:
        raise ConfigError(
            "[conv2d] algorithm is 'winograd', which CPUs have; use 'direct' or 'auto' on a GPU"
        )
    return chosen


def _winograd(x: Tensor, weight: Tensor, bias: Tensor | None, ph: int, pw: int) -> Tensor:
    """conv2d of 3 x 3 and stride 1.

    If a few samples want gradients, they are computed in lanes as well, for the same bits.
    """
    x = batched(x)
    rows = x.layout == "rows"
    if rows and tape_is_on((x, weight, bias)):
        x = to_lanes(x)
    k = weight.shape[0]
    g = x.groups
    (n, c, h, w) = x.shape
    y = empty((n, k, h + 2 * ph - 2, w + 2 * pw - 2), x.layout)
    sizes = (g, c, h + 2 * ph, w + 2 * pw, k, 3, 3, 1)
    frame = (ph, pw)
    memory = y.memory, x.memory, weight.memory, bias_memory(bias, k)
    current().emit("winograd_forward", *memory, *sizes, *frame, 0, layout=x.layout)

    def backward(dy: Tensor) -> tuple[Tensor | None, ...]:
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            db = grad_memory("conv2d", bias, k)
            dw = grad_memory("conv2d", weight)
            padded = pad2d(x.detach(), (ph, pw))
            current().emit("conv2d_backward_weight", dw, db, dy.memory, padded.memory, *sizes)
        if not x.requires_grad:
            return (None, None, None)
        dx = empty(x.shape, x.layout)
        current().emit(
            "winograd_backward_input", dx.memory, dy.memory, weight.memory, *sizes, *frame
        )
        return (dx, None, None)

    y = attach(y, (x, weight, weight if bias is None else bias), backward, name="conv2d")
    return to_rows(y) if rows else y


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> Tensor:
    """Cross-correlation of x (N, C, W) with weight (K, C / groups, T), plus bias (K): conv2d of
    one row of pixels.
    """
    if x.ndim != 3 or weight.ndim != 3:
        raise ShapeError(
            f"[conv1d] input {x.shape} and weight {weight.shape}; they must be (N, C, W) and (K, "
            f"C, T){as_image(x.shape)}"
        )
    (n, c, w) = x.shape
    (k, per, t) = weight.shape
    y = _direct(
        "conv1d",
        reshape(x, n, c, 1, w),
        weight,
        (k, per, 1, t),
        bias,
        stride,
        (0, padding),
        dilation,
        groups,
    )
    return reshape(y, n, k, y.shape[3])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., I) times weight (O, I) transposed, plus bias (O): (..., O)."""
    if isinstance(x, Tensor) and x.ndim > 2 and weight.ndim == 2 and x.shape[-1] == weight.shape[1]:
        return reshape(linear(tokens(x), weight, bias), *x.shape[:-1], weight.shape[0])
    if isinstance(x, Tensor) and (x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]):
        raise ShapeError(
            f"[linear] input {x.shape} and weight {weight.shape}; they must be (..., I) and (O, "
            "I) with the same I"
        )
    _check_bias("linear", bias, weight)
    x = batched(x)
    g = x.groups
    (o, i) = weight.shape
    y = empty((x.shape[0], o), x.layout)
    options = {"layout": x.layout, "dtype": product_precision()}
    current().emit(
        "linear_forward",
        y.memory,
        x.memory,
        weight.memory,
        bias_memory(bias, o),
        g,
        i,
        o,
        0,
        **options,
    )

    def backward(dy: Tensor) -> tuple[Tensor | None, ...]:
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            db = grad_memory("linear", bias, o)
            dw = grad_memory("linear", weight)
            current().emit(
                "linear_backward_weight", dw, db, dy.memory, x.memory, g, i, o, **options
            )
        if not x.requires_grad:
            return (None, None, None)
        dx = empty(x.shape, x.layout)
        current().emit(
            "linear_backward_input", dx.memory, dy.memory, weight.memory, g, i, o, **options
        )
        return (dx, None, None)

    return attach(y, (x, weight, weight if bias is None else bias), backward)


ONNX |= {"pad_forward": "Pad", "linear_forward": "Gemm"}
ONNX |= dict.fromkeys(("conv2d_forward", "conv2d_general_forward"), "Conv")
