"""Arithmetic of tensors that are broadcast, comparisons, functions of one number, means and
extremes over axes.

Names are PyTorch's, but that comparisons are functions with float32 results, 1 or 0, and `max`
returns values alone. Shapes and the way that tensors lie in memory are those of shapes.py.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DeviceError, ShapeError
from .placement import different_places, elsewhere, place_of_op
from .program import ONNX, Slot, current
from .shapes import (
    AXES,
    Dims,
    adjoint,
    as_lanes,
    axes_of,
    axis_of,
    getitem,
    memory_shape,
    merged,
    reduced,
    reshape,
    squeeze,
    strides_of,
    sum,
    sum_to,
    transpose,
    unsqueeze,
    without,
)
from .tape import Shape, Tensor, attach, empty, make, new_like, to_lanes, to_rows

__all__ = [
    "add",
    "argmax",
    "clamp",
    "divide",
    "embedding",
    "eq",
    "exp",
    "ge",
    "gt",
    "le",
    "log",
    "lt",
    "masked_fill",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "multiply",
    "ne",
    "normalize",
    "one_hot",
    "power",
    "scale",
    "sqrt",
    "take",
    "to_float",
    "to_int",
    "var",
    "where",
]
Number = float | int
ONNX |= {
    "add": "Add",
    "add_strided": "Add",
    "multiply": "Mul",
    "multiply_strided": "Mul",
    "scale": "Mul",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
}


def to_float(x: Tensor) -> Tensor:
    """Integers, such as a batch's targets, as numbers to compute with; x itself if it has these."""
    if x.dtype != np.int32:
        return x.detach() if x.mask else x
    y = empty(x.shape, x.layout)
    current().emit("floats", y.memory, x.memory, y.floats)
    bits = make(x.memory, x.shape, x.layout)
    bits.device = x.device
    return attach(y, (bits,), lambda dy: (None,))


# --- pairs of numbers -----------------------------------------------------------------------------


def _number(value: float, like: Tensor) -> Tensor:
    t = empty(())
    t.device = like.device
    current().emit("fill", t.memory, float(value), 1)
    return t


def _array(values: Any, like: Any) -> Tensor:
    t = Tensor(values)
    t.device = getattr(like, "device", t.device)
    return t


def _saved(y: Tensor, x: Tensor) -> Tensor:
    """The result of an op of x, for its gradient: not y itself, whose node would hold it, and it
    its node.
    """
    saved = new_like(y, y.memory)
    saved.device = x.device
    return saved


def _operands(name: str, a: Any, b: Any) -> tuple[Tensor, Tensor, Shape]:
    """The two as tensors that an op can read side by side, and the shape of the result."""
    for t in (a, b):
        if isinstance(t, (tuple, list)) and any(isinstance(part, Tensor) for part in t):
            raise ShapeError(
                f"[{name}] one operand is a {type(t).__name__} of {len(t)}; give one of them, "
                "such as y[0]"
            )
    if not isinstance(a, Tensor):
        a = _number(a, b) if np.ndim(a) == 0 else _array(a, b)
    if not isinstance(b, Tensor):
        b = _number(b, a) if np.ndim(b) == 0 else _array(b, a)
    try:
        shape = np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        raise ShapeError(
            f"[{name}] shapes {a.shape} and {b.shape} do not fit; from the last axis on, sizes "
            "must be equal or 1"
        ) from None
    if "tokens" in (a.layout, b.layout):
        wide = [(1,) * (len(shape) - t.ndim) + t.shape for t in (a, b)]
        if all(
            w == shape or (w[:2] == (1, 1) and t.layout == "rows")
            for w, t in zip(wide, (a, b), strict=True)
        ):
            a, b = (
                to_lanes(t, "tokens") if w == shape else t
                for w, t in zip(wide, (a, b), strict=True)
            )
        else:
            a = to_rows(a)
            b = to_rows(b)
    if "lanes" in (a.layout, b.layout):
        full_batch = [t.ndim == len(shape) and t.shape[0] == shape[0] for t in (a, b)]
        if all(
            w if t.layout == "lanes" else w or t.ndim < len(shape) or t.shape[0] == 1
            for t, w in zip((a, b), full_batch, strict=True)
        ):
            a, b = (to_lanes(t) if w else t for t, w in zip((a, b), full_batch, strict=True))
        else:
            a = to_rows(a)
            b = to_rows(b)
    return a, b, shape


def _pair(op: str, a: Any, b: Any) -> Tensor:
    """One of the ops of two numbers, without a gradient."""
    a, b, shape = _operands(op, a, b)
    if "tokens" in (a.layout, b.layout):
        flat = [t.detach() if t.layout == "rows" else as_lanes(t.detach(), True) for t in (a, b)]
        flat = [
            reshape(t, *t.shape[builtins.max(t.ndim - len(shape) + 2, 0) :])
            if t.layout == "rows"
            else t
            for t in flat
        ]
        y = _pair(op, *flat)
        y.device = place_of_op((a, b))  # the reshape closes the op
        return reshape(y, shape)
    layout = "lanes" if "lanes" in (a.layout, b.layout) else "rows"
    y = empty(shape, layout)
    dims = memory_shape(shape, layout)
    strides = []
    for t in (a, b):
        wide = (1,) * (len(shape) - t.ndim) + t.shape
        memory = (
            (*wide, 1) if layout == "lanes" and t.layout == "rows" else memory_shape(wide, t.layout)
        )
        strides.append(
            [0 if n == 1 else s for n, s in zip(memory, strides_of(memory), strict=True)]
        )
    sizes = merged(op, AXES, dims, *strides)
    current().emit(op, y.memory, a.memory, b.memory, *(n for column in sizes for n in column))
    return y


def _attached(
    name: str,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    da: Callable[[Tensor], Tensor],
    db: Callable[[Tensor], Tensor],
) -> Tensor:
    """Completes an op of two tensors, with the derivatives by each of them in the shape of y."""

    def backward(dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return (
            sum_to(da(dy), a.shape) if a.requires_grad else None,
            sum_to(db(dy), b.shape) if b.requires_grad else None,
        )

    return attach(y, (a, b), backward, name=name)


def _plain(a: Tensor, b: Any) -> bool:
    return isinstance(b, Tensor) and a.shape == b.shape and a.layout == b.layout


def add(a: Tensor, b: Tensor | Number) -> Tensor:
    """a + b, broadcast."""
    if not _plain(a, b):
        a, b, _ = _operands("add", a, b)
    if _plain(a, b):
        y = empty(a.shape, a.layout)
        current().emit("add", y.memory, a.memory, b.memory, y.floats)
    else:
        y = _pair("add_strided", a, b)
    return _attached("add", y, a, b, lambda dy: dy, lambda dy: dy)


def multiply(a: Tensor, b: Tensor | Number) -> Tensor:
    """a * b, broadcast."""
    if isinstance(b, (int, float)):
        return scale(a, float(b))
    if not _plain(a, b):
        a, b, _ = _operands("multiply", a, b)
    if _plain(a, b):
        y = empty(a.shape, a.layout)
        current().emit("multiply", y.memory, a.memory, b.memory, y.floats)
    else:
        y = _pair("multiply_strided", a, b)
    return _attached("multiply", y, a, b, lambda dy: multiply(dy, b), lambda dy: multiply(dy, a))


def scale(x: Tensor, factor: float) -> Tensor:
    """x * factor."""
    y = empty(x.shape, x.layout)
    current().emit("scale", y.memory, x.memory, float(factor), y.floats)
    return attach(y, (x,), lambda dy: (scale(dy, factor),))


def _full(x: Any) -> Any:
    """The tensor without unused lanes: those hold 0, of which a logarithm or a quotient is no
    number.
    """
    lanes = isinstance(x, Tensor) and x.layout != "rows" and x.floats != x.size
    return to_rows(x) if lanes else x


def divide(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a / b, broadcast; by a number: times 1 / b."""
    if not isinstance(b, Tensor) and np.ndim(b) == 0:
        return scale(a, 1.0 / b)  # type: ignore[arg-type]
    a, b, _ = _operands("divide", _full(a), _full(b))
    y = _pair("divide", a, b)
    saved = _saved(y, a)
    return _attached(
        "divide",
        y,
        a,
        b,
        lambda dy: divide(dy, b),
        lambda dy: scale(divide(multiply(dy, saved), b), -1.0),
    )


def power(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a ** b, broadcast.

    Whole exponents to 64 are products, others e^(b log a), which is NaN for a below 0.
    """
    if isinstance(a, Tensor) and isinstance(b, (int, float)):
        if b < 0 and b == int(b):
            return divide(1.0, power(a, -b))
        if b == 1:
            return a
        if b in range(2, 65):
            half = power(a, b // 2)
            return multiply(multiply(half, half), a) if b % 2 else multiply(half, half)
        if b == 0.5:
            return sqrt(a)
    a, b, _ = _operands("power", _full(a), _full(b))
    y = _pair("power", a, b)
    saved = _saved(y, a)

    def by_exponent(dy: Tensor) -> Tensor:
        return multiply(multiply(dy, saved), log(a))

    return _attached(
        "power", y, a, b, lambda dy: multiply(dy, multiply(power(a, add(b, -1.0)), b)), by_exponent
    )


def _extreme(name: str, a: Any, b: Any, sign: int) -> Tensor:
    a, b, _ = _operands(name, a, b)
    parts = [
        lambda dy: multiply(dy, _pair("share", a, b)),
        lambda dy: multiply(dy, _pair("share", b, a)),
    ]
    return _attached(name, _pair(name, a, b), a, b, *parts[::sign])


def maximum(a: Tensor, b: Tensor | Number) -> Tensor:
    """The larger of a and b, broadcast; where they are equal, each has half of the gradient."""
    return _extreme("maximum", a, b, 1)


def minimum(a: Tensor, b: Tensor | Number) -> Tensor:
    """The smaller of a and b, broadcast; where they are equal, each has half of the gradient."""
    return _extreme("minimum", a, b, -1)


def _comparison(
    name: str, op: str, sign: str, swapped: bool = False
) -> Callable[[Any, Any], Tensor]:
    """The function that gives 1 where a `sign` b, else 0, by a kernel's op of (a, b), or
    `swapped` of (b, a).
    """

    def compare(a: Tensor, b: Tensor | Number) -> Tensor:
        a, b = (
            to_float(t) if isinstance(t, Tensor) else t for t in ((b, a) if swapped else (a, b))
        )
        a, b, _ = _operands(op, a, b)
        return attach(
            _mask(_pair(op, a, b)), (a.detach(), b.detach()), lambda dy: (None, None), name=op
        )

    compare.__name__ = name
    compare.__qualname__ = name
    compare.__doc__ = f"1 where a {sign} b, else 0."
    return compare


lt = _comparison("lt", "less", "<")
le = _comparison("le", "less_equal", "<=")
gt = _comparison("gt", "less", ">", swapped=True)
ge = _comparison("ge", "less_equal", ">=", swapped=True)
eq = _comparison("eq", "equal", "=")


def ne(a: Tensor, b: Tensor | Number) -> Tensor:
    """0 where a = b, else 1."""
    return _not(eq(a, b))


def _mask(y: Tensor) -> Tensor:
    y.mask = True
    return y


def _not(x: Tensor) -> Tensor:
    if not x.mask:
        raise ShapeError(
            "[~] of a tensor that is no comparison's result; compare first, such as x == 0"
        )
    return _mask(add(scale(x, -1.0), 1.0))


def where(condition: Tensor, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a where the condition is not 0, b elsewhere; broadcast."""
    if not isinstance(condition, Tensor):
        condition = _array(condition, a if isinstance(a, Tensor) else b)
    condition = to_float(condition)

    def part(op: str, x: Any) -> Tensor:
        c, v, _ = _operands("where", condition, x)
        return _attached(
            "where", _pair(op, c, v), c.detach(), v, lambda dy: dy, lambda dy: _pair(op, c, dy)
        )

    return add(part("where", a), part("where_not", b))


def masked_fill(x: Tensor, mask: Tensor, value: Number) -> Tensor:
    """`value` where the mask is not 0, x elsewhere."""
    return where(mask, value, x)


def clamp(x: Tensor, min: Number | None = None, max: Number | None = None) -> Tensor:
    """The nearest number from min to max; the gradient goes through where x is one."""
    y = x.detach()
    if min is not None:
        y = _pair("maximum", y, min)
    if max is not None:
        y = _pair("minimum", y, max)

    def backward(dy: Tensor) -> tuple[Tensor]:
        dy = dy if min is None else _pair("where", ge(x, min), dy)
        return (dy if max is None else _pair("where", le(x, max), dy),)

    return attach(y, (x,), backward)


# --- functions of one number ----------------------------------------------------------------------


def _map(op: str, x: Tensor, derivative: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """An op of one number; derivative(dy, x, y) is its gradient."""
    y = empty(x.shape, x.layout)
    current().emit(op, y.memory, x.memory, y.floats)
    saved = _saved(y, x)
    return attach(y, (x,), lambda dy: (derivative(dy, x, saved),), name=op)


def exp(x: Tensor) -> Tensor:
    """e^x."""
    return _map("exp", x, lambda dy, x, y: multiply(dy, y))


def log(x: Tensor) -> Tensor:
    """Natural logarithm."""
    return _map("log", _full(x), lambda dy, x, y: divide(dy, x))


def sqrt(x: Tensor) -> Tensor:
    """Square root; of a number in an optimizer's rule it is taken on the host."""
    return (
        x.root()
        if hasattr(x, "root")
        else _map("sqrt", _full(x), lambda dy, x, y: scale(divide(dy, y), 0.5))
    )


# --- over axes ------------------------------------------------------------------------------------


def mean(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The mean of all elements, of shape (), or over some axes."""
    if dim is None:
        return mean_over_samples(
            scale(sum(x), 1.0 / builtins.max(math.prod(x.shape[1:]), 1)), x.shape[0]
        )
    return scale(sum(x, dim, keepdim), 1.0 / math.prod(x.shape[d] for d in axes_of("mean", x, dim)))


def var(x: Tensor, dim: Dims = None, correction: int = 1, keepdim: bool = False) -> Tensor:
    """The mean square of what is left without the mean, of n numbers divided by n - correction."""
    dims = axes_of("var", x, dim)
    d = add(x, scale(mean(x, dims, True), -1.0))
    n = math.prod(x.shape[i] for i in dims)
    return scale(
        sum(multiply(d, d), dims, keepdim),
        1.0 / builtins.max(n - correction, 0) if n > correction else math.nan,
    )


def max(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The largest element, or over some axes; those that are equal share its gradient."""
    dims = axes_of("max", x, dim)
    y = reduced("reduce_max", x, dims)
    saved = _saved(y, x)

    def backward(dy: Tensor) -> tuple[Tensor]:
        mask = _pair("equal", x, saved)
        return (multiply(mask, divide(dy, reduced("reduce_sum", mask, dims))),)

    attach(y, (x,), backward, name="max")
    return without(y, dims, keepdim)


def min(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The smallest element, as `max`."""
    return scale(max(scale(x, -1.0), dim, keepdim), -1.0)


def argmax(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """The place of the first of the largest elements along an axis, int32. No gradient."""
    axis = axis_of("argmax", dim, x.ndim)
    x = to_rows(x.detach())
    y = empty((*x.shape[:axis], 1, *x.shape[axis + 1 :]), dtype=np.int32)
    sizes = math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])
    current().emit("argmax", y.memory, x.memory, *sizes)
    return without(attach(y, (x,), lambda dy: (None,)), (axis,), keepdim)


def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """x divided by its Euclidean norm along an axis, or by eps where that is larger."""
    if p != 2:
        raise ShapeError(f"[normalize] p is {p}; 2 is supported: for 1, x / x.abs().sum(dim, True)")
    return divide(x, sqrt(maximum(sum(multiply(x, x), dim, True), eps * eps)))


# --- products and tables --------------------------------------------------------------------------


def _product(a: Tensor, b: Tensor, turn_a: bool = False, turn_b: bool = False) -> Tensor:
    """The product of the last two axes, one of which may be transposed, for all others; in rows,
    without a gradient.
    """
    a = to_rows(a)
    b = to_rows(b)
    (m, k), (k_of_b, n) = (
        t.shape[-2:][::-1] if turn else t.shape[-2:] for t, turn in ((a, turn_a), (b, turn_b))
    )
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        batch = None
    if batch is None or k != k_of_b:
        raise ShapeError(
            f"[matmul] shapes {a.shape} and {b.shape}; they must be (..., M, K) and (..., K, N) "
            "with the same K, and axes before that are equal or 1"
        )
    c = empty((*batch, m, n))
    strides = []
    for t in (a, b):
        wide = (1,) * (len(batch) - t.ndim + 2) + t.shape
        strides.append(
            [0 if d == 1 else s for d, s in zip(wide, strides_of(wide), strict=True)][:-2]
        )
    sizes, by_a, by_b = merged("matmul", 2, batch, *strides)
    at_a = (1, a.shape[-1]) if turn_a else (a.shape[-1], 1)
    at_b = (1, b.shape[-1]) if turn_b else (b.shape[-1], 1)
    current().emit(
        "matmul", c.memory, a.memory, b.memory, *sizes, m, n, k, *by_a, *at_a, *by_b, *at_b
    )
    return c


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b: (..., M, K) by (..., K, N), the axes before broadcast; a vector is a row (a) or a
    column (b).

    Each number is one chain of multiply-adds in float32, in the order of K.
    """
    if not isinstance(b, Tensor):
        b = _array(b, a)
    if 1 in (a.ndim, b.ndim):
        rows = a.ndim == 1
        columns = b.ndim == 1
        y = matmul(unsqueeze(a, 0) if rows else a, unsqueeze(b, 1) if columns else b)
        y = squeeze(y, -1) if columns else y
        return squeeze(y, -1 if columns else -2) if rows else y
    if a.ndim < 2 or b.ndim < 2:
        raise ShapeError(
            f"[matmul] shapes {a.shape} and {b.shape}; each must have at least one axis"
        )
    if a.ndim > 2 and b.ndim == 2:  # one product, and one sum for the gradient of b
        return reshape(matmul(reshape(a, -1, a.shape[-1]), b), *a.shape[:-1], b.shape[1])
    a = to_rows(a)
    b = to_rows(b)
    return _attached(
        "matmul",
        _product(a, b),
        a,
        b,
        lambda dy: _product(dy, b, turn_b=True),
        lambda dy: _product(a, dy, turn_a=True),
    )


def to_int(x: Tensor) -> Tensor:
    """Floats as int32, what is behind the point cut off; x itself if it is that."""
    if x.dtype == np.int32:
        return x
    x = to_rows(x.detach())
    y = empty(x.shape, dtype=np.int32)
    y.device = x.device
    current().emit("to_int32", y.memory, x.memory, x.floats)
    return y


def _places(name: str, index: Any, n: int) -> Tensor:
    """An index into n rows as the kernels read it, int32 in rows.

    Raises ShapeError for one that is out of range.
    """
    if not isinstance(index, Tensor):
        a = np.asarray(index)
        if a.dtype.kind not in "iu":
            raise ShapeError(f"[{name}] an index of dtype {a.dtype}; give whole numbers")
        index = Tensor(np.where(a < 0, a + n, a) if a.size and -n <= a.min() else a, dtype=np.int32)
    index = to_int(index)
    if (
        not isinstance(index.memory, Slot)
        and index.size
        and not 0 <= index.data.min() <= index.data.max() < n
    ):
        bad = index.data.min() if index.data.min() < 0 else index.data.max()
        raise ShapeError(f"[{name}] index {bad} of {n} rows; give 0 to {n - 1}")
    return to_rows(index.detach())


def take(x: Tensor, index: Any) -> Tensor:
    """x[index]: the rows of x (V, ...) that an index of whole numbers names, in any shape.

    Also of floats, as data sets hand them out. In a recorded step a number out of range gives NaN.

    Its gradient adds rows in the order of the index.
    """
    x = to_rows(x)
    rows = _places("index", index, x.shape[0])
    if not isinstance(index, Tensor):
        rows.device = x.device
    elif elsewhere(x, rows.device):
        raise DeviceError(different_places("index", rows, x))
    y = empty((*rows.shape, *x.shape[1:]), dtype=x.dtype)
    sizes = rows.size, x.shape[0], math.prod(x.shape[1:])
    current().emit("take", y.memory, x.memory, rows.memory, *sizes)
    return attach(y, (x,), adjoint("take_backward", x, rows.memory, *sizes), rows.device, "take")


def embedding(index: Any, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """The rows of weight (V, D) that an index names: (...) to (..., D).

    That of `padding_idx` gets no gradient.
    """
    y = take(weight, index)
    if padding_idx is None:
        return y
    if not isinstance(index, Tensor):
        index = _array(index, y)
    return where(unsqueeze(eq(index, padding_idx % len(weight)), -1), y.detach(), y)


def one_hot(index: Any, num_classes: int) -> Tensor:
    """1 at the class that an index (...) names and 0 elsewhere, float32 (..., num_classes)."""
    index = index if isinstance(index, Tensor) else Tensor(index)
    return to_float(eq(unsqueeze(to_float(index), -1), np.arange(num_classes)))


def _equal(a: Tensor, b: Any) -> Any:
    """`==`: of numbers and arrays element by element; nothing else is equal to a tensor."""
    return (
        eq(a, b) if isinstance(b, (Tensor, int, float, np.generic, np.ndarray)) else NotImplemented
    )


def _different(a: Tensor, b: Any) -> Any:
    return NotImplemented if (equal := _equal(a, b)) is NotImplemented else _not(equal)


def _truth(x: Tensor) -> bool:
    """Truth of a tensor of one number.

    A recorded step has no values, and reading one is refused.
    """
    if x.size != 1:
        raise ShapeError(
            f"[tensor] a tensor of shape {x.shape} is neither true nor false; compare one "
            "number, such as (x > 0).max()"
        )
    return x.item() != 0


def _indexed(x: Tensor, key: Any) -> Tensor:
    if getattr(key, "mask", False):
        raise ShapeError(
            f"[index] the result of a comparison, {key.shape}, is 1 and 0 and no index; use "
            "where(condition, a, b), or multiply with it"
        )
    return take(x, key) if isinstance(key, (Tensor, np.ndarray, list)) else getitem(x, key)


def mean_over_samples(total: Tensor, samples: float) -> Tensor:
    """A sum over samples as a mean.

    The one rule about means: inside a trainer this is the sum itself. Shard gradients are sums over
    samples, and the whole is divided once, by the samples of the global batch.
    """
    return total if current().shard else scale(total, 1.0 / samples)


# --- of a tensor ----------------------------------------------------------------------------------


_OPERATORS = {
    "__add__": add,
    "__radd__": add,
    "__mul__": multiply,
    "__rmul__": multiply,
    "__truediv__": divide,
}
_OPERATORS |= {"__neg__": lambda x: x * -1.0, "__sub__": lambda x, other: x + (-other)}
_OPERATORS |= {
    "__rsub__": lambda x, other: (-x) + other,
    "__rtruediv__": lambda x, other: divide(other, x),
}
_OPERATORS |= {
    "__pow__": power,
    "__rpow__": lambda x, other: power(other, x),
    "__lt__": lt,
    "__le__": le,
    "__gt__": gt,
}
_OPERATORS |= {"__float__": Tensor.item, "__int__": lambda x: int(x.item())}
# f"{loss:.4f}"
_OPERATORS |= {"__format__": lambda x, form: format(x.item(), form) if form else repr(x)}
_OPERATORS |= {
    "__ge__": ge,
    "__eq__": _equal,
    "__ne__": _different,
    "__hash__": object.__hash__,
    "__bool__": _truth,
    # so that NumPy leaves `array * tensor` to the tensor, which keeps its tape
    "__array_priority__": 1000,
    "__getitem__": _indexed,
    "__matmul__": matmul,
    "__iter__": lambda x: (getitem(x, i) for i in range(len(x))),
    "__invert__": _not,
    "__and__": lambda a, b: _mask(multiply(a, b)),
    "__or__": lambda a, b: _mask(maximum(a, b)),
    "T": property(lambda x: transpose(x, 0, 1)),
}
for _name, _op in _OPERATORS.items():
    setattr(Tensor, _name, _op)
