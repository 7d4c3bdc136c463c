"""The shapes of tensors, slices and joins, and sums over axes, which are the gradient of what is
repeated.

Every op here works on memory: `memory_shape` says how a tensor lies there, samples in lanes being
its first axis, of groups, and its last, of 16; the kernels take sizes and strides
(mojo/kernels/strided.mojo, reduce_axes.mojo). What keeps the samples stays in lanes; what moves or
adds up samples goes to rows.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError, ShapeError
from . import native
from .program import ONNX, Memory, Recorder, ShardEager, current
from .tape import (
    Backward,
    Shape,
    Tensor,
    attach,
    empty,
    empty_like,
    layout_of,
    make,
    to_lanes,
    to_rows,
)

__all__ = [
    "cat",
    "chunk",
    "expand",
    "flatten",
    "getitem",
    "pad",
    "permute",
    "reshape",
    "split",
    "squeeze",
    "stack",
    "sum",
    "transpose",
    "unbind",
    "unsqueeze",
]
AXES = 5  # of a strided op, as in mojo/kernels/strided.mojo
Dims = int | Sequence[int] | None

# --- how tensors lie in memory --------------------------------------------------------------------


def as_tensor(x: Any) -> Tensor:
    """A tensor as it is, an array as one. ShapeError: it is neither."""
    if isinstance(x, np.ndarray):
        return Tensor(x)
    if not isinstance(x, Tensor):
        name = f"{type(x).__module__}.{type(x).__name__}".removeprefix("builtins.")
        raise ShapeError(
            f"[tensor] a layer is called with a {name}; give an array, or an odyssey.Tensor: "
            "Tensor(x)"
        )
    return x


def batched(x: Any) -> Tensor:
    """The same samples in the layout that a batch of this size is computed in.

    ShapeError: none, or no tensor.
    """
    x = as_tensor(x)
    if x.size == 0:
        raise ShapeError(
            f"[tensor] shape {x.shape} has no samples; the first axis is the batch and must not "
            "be empty"
        )
    if x.layout == "tokens":
        x = to_rows(x)
    return to_lanes(x) if x.ndim < 1 or layout_of(x.shape[0]) == "lanes" else x


def tokens(x: Tensor) -> Tensor:
    """(..., F) as (rows, F) in lanes, a row in each; without a copy for tokens (N, T, F)."""
    return to_lanes(reshape(x, -1, x.shape[-1]))


def as_lanes(x: Tensor, axes: bool) -> Tensor:
    """Tokens (N, T, ...) as lanes (N T, ...) if the op leaves these `axes`, else in rows; others
    as they are.
    """
    if x.layout != "tokens":
        return x
    return reshape(x, x.shape[0] * x.shape[1], *x.shape[2:]) if axes else to_rows(x)


def memory_shape(shape: Shape, layout: str) -> Shape:
    lanes = native.library().lanes
    return shape if layout == "rows" else (-(-shape[0] // lanes), *shape[1:], lanes)


def strides_of(dims: Shape) -> list[int]:
    """Returns the strides of memory without gaps."""
    return [math.prod(dims[i + 1 :]) for i in range(len(dims))]


def merged(
    name: str, max_axes: int, dims: Sequence[int], *strides: Sequence[int]
) -> list[list[int]]:
    """Sizes and strides with axes that lie one behind the other made one, filled up to `max_axes`
    axes with axes of one.
    """
    axes: list[list[int]] = []
    for size, *steps in zip(dims, *strides, strict=True):
        if size == 1:
            continue
        if axes and all(
            outer_stride == step * size
            for outer_stride, step in zip(axes[-1][1:], steps, strict=True)
        ):
            axes[-1] = [axes[-1][0] * size, *steps]
        else:
            axes.append([size, *steps])
    if len(axes) > max_axes:
        raise ShapeError(
            f"[{name}] {len(axes)} axes that cannot be made one; at most {max_axes} are supported: "
            "reshape first"
        )
    axes = [[1] + [0] * len(strides)] * (max_axes - len(axes)) + axes
    return [list(column) for column in zip(*axes, strict=True)]


def _copy(
    name: str,
    y: Memory,
    x: Memory,
    dims: Sequence[int],
    ys: Sequence[int],
    xs: Sequence[int],
    y0: int = 0,
    x0: int = 0,
) -> None:
    """Copies dims numbers from x, from number x0 on at strides xs, to y."""
    sizes = merged(name, AXES, dims, ys, xs)
    current().emit("copy_strided", y, x, y0, x0, *(n for column in sizes for n in column))


def adjoint(op: str, x: Tensor, *args: Any, layout: str = "lanes") -> Backward:
    """The backward of an op of one input: a record of `op` that makes dx, in the shape of x, of
    dy and `args`.
    """
    shape = x.shape
    input_layout = x.layout

    def backward(dy: Tensor) -> tuple[Tensor]:
        dx = empty(shape, input_layout)
        current().emit(op, dx.memory, dy.memory, *args, layout=layout)
        return (dx,)

    return backward


class Size(int):
    """How many numbers a tensor has; called as PyTorch's size(dim=None), its shape or the size
    of an axis.
    """

    shape: Shape

    def __call__(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


def _size(x: Tensor) -> Size:
    n = Size(math.prod(x.shape))
    n.shape = x.shape
    return n


Tensor.size = property(_size)  # type: ignore[attr-defined]

# --- shapes ---------------------------------------------------------------------------------------


def _unpack_sizes(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes


def as_image(shape: Shape) -> str:
    """Returns what to tell about an input that may have become an image in a data set; "" where
    it has not.
    """
    if len(shape) != 4 or shape[1] != 1:
        return ""
    return (
        "; a data set makes (1, H, W) of samples (H, W): to have them as they are, give "
        "arrays((x,), y), or (x,) as x"
    )


def axis_of(name: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ShapeError(
            f"[{name}] axis {dim} of a tensor of {ndim} axes; give {-ndim} to {ndim - 1}"
        )
    return dim % ndim


def reshape(x: Tensor, *shape: int) -> Tensor:
    """The same numbers in another shape. One size may be -1."""
    x = as_tensor(x)
    target = _unpack_sizes(shape)
    fixed_size = math.prod(s for s in target if s != -1)
    new = tuple(x.size // builtins.max(fixed_size, 1) if s == -1 else s for s in target)
    if builtins.min(new, default=1) < 0 or target.count(-1) > 1 or math.prod(new) != x.size:
        raise ShapeError(f"[reshape] {x.shape} cannot become {target}")
    if x.layout != "rows" and all(math.prod(new[:n]) != x.lanes for n in (1, 2)):
        x = to_rows(x)
    layout = "rows" if x.layout == "rows" else "lanes" if new[:1] == (x.lanes,) else "tokens"
    y = make(x.memory, new, layout, x.dtype)
    old_shape = x.shape
    y.mask = x.mask
    return attach(y, (x,), lambda dy: (reshape(dy, old_shape),))


def flatten(x: Tensor, start_dim: int = 1, end_dim: int = -1) -> Tensor:
    """(N, ...) to (N, F), or the axes from start_dim to end_dim as one. No copy."""
    first, last = (axis_of("flatten", d, x.ndim) for d in (start_dim, end_dim))
    return reshape(x, *x.shape[:first], -1, *x.shape[last + 1 :])


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """With an axis of one more."""
    axis = axis_of("unsqueeze", dim, x.ndim + 1)
    return reshape(x, *x.shape[:axis], 1, *x.shape[axis:])


def squeeze(x: Tensor, dim: Dims = None) -> Tensor:
    """Without an axis of one, or all such axes."""
    axes = axes_of("squeeze", x, dim)
    return reshape(x, tuple(n for i, n in enumerate(x.shape) if n != 1 or i not in axes))


def permute(x: Tensor, *dims: int) -> Tensor:
    """The axes in another order."""
    order = tuple(axis_of("permute", d, x.ndim) for d in _unpack_sizes(dims))
    if sorted(order) != list(range(x.ndim)):
        raise ShapeError(
            f"[permute] axes {_unpack_sizes(dims)} of shape {x.shape}; name each axis once"
        )
    x = x if order[:1] == (0,) and x.layout != "tokens" else to_rows(x)
    y = empty_like(x, tuple(x.shape[d] for d in order), x.layout)
    strides = strides_of(memory_shape(x.shape, x.layout))
    dims_of_y = memory_shape(y.shape, x.layout)
    along = [strides[d] for d in order] + strides[x.ndim :]
    _copy("permute", y.memory, x.memory, dims_of_y, strides_of(dims_of_y), along)
    back = tuple(order.index(i) for i in range(x.ndim))
    return attach(y, (x,), lambda dy: (permute(dy, back),))


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """Two axes exchanged."""
    order = list(range(x.ndim))
    a = axis_of("transpose", dim0, x.ndim)
    b = axis_of("transpose", dim1, x.ndim)
    order[a] = b
    order[b] = a
    return permute(x, order)


def expand(x: Tensor, *sizes: int) -> Tensor:
    """Axes of one repeated to the sizes given; -1 leaves a size. Axes may be added in front."""
    target = _unpack_sizes(sizes)
    old = (1,) * (len(target) - x.ndim) + x.shape
    new = tuple(o if g == -1 else g for o, g in zip(old, target, strict=False))
    if len(target) < x.ndim or any(o not in (1, n) for o, n in zip(old, new, strict=True)):
        raise ShapeError(
            f"[expand] {x.shape} cannot become {target}; only axes of size 1 are repeated"
        )
    if x.layout == "tokens" or (
        x.layout == "lanes" and (len(new) != x.ndim or new[0] != x.shape[0])
    ):
        x = to_rows(x)
    y = empty_like(x, new, x.layout)
    memory = memory_shape(old, x.layout)
    dims = memory_shape(new, x.layout)
    strides = [0 if n == 1 else s for n, s in zip(memory, strides_of(memory), strict=True)]
    _copy("expand", y.memory, x.memory, dims, strides_of(dims), strides)
    old_shape = x.shape
    return attach(y, (x,), lambda dy: (sum_to(dy, old_shape),))


def _cut(x: Tensor, starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> Tensor:
    """sizes[i] numbers along each axis i, from starts[i] on, steps[i] apart."""
    if x.layout == "tokens":
        n = x.lanes
        keeps_tokens = (tuple(sizes[:2]), tuple(steps[:2])) == (x.shape[:2], (1, 1))
        if keeps_tokens:
            return reshape(
                _cut(as_lanes(x, True), [0, *starts[2:]], [n, *sizes[2:]], [1, *steps[2:]]), *sizes
            )
        x = to_rows(x)
    if x.layout == "lanes" and (sizes[0], steps[0]) != (x.shape[0], 1):
        x = to_rows(x)
    y = empty_like(x, tuple(sizes), x.layout)
    memory = strides_of(memory_shape(x.shape, x.layout))
    offset = builtins.sum(s * n for s, n in zip(starts, memory, strict=False))
    along = [s * n for s, n in zip(steps, memory, strict=False)] + memory[x.ndim :]
    dims = memory_shape(y.shape, x.layout)
    packed = strides_of(dims)
    _copy("slice", y.memory, x.memory, dims, packed, along, 0, offset)
    old_shape = x.shape
    layout = x.layout

    def backward(dy: Tensor) -> tuple[Tensor]:
        dx = empty(old_shape, layout)
        current().emit("fill", dx.memory, 0.0, dx.floats)
        _copy("slice", dx.memory, dy.memory, dims, along, packed, offset, 0)
        return (dx,)

    return attach(y, (x,), backward, name="slice")


def getitem(x: Tensor, key: Any) -> Tensor:
    """x[key]: integers, slices of a positive step, ... and None, as in NumPy.

    The numbers are copied.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    for k in keys:
        if not (
            k is None or k is Ellipsis or isinstance(k, (int, np.integer, slice))
        ) or isinstance(k, bool):
            raise ShapeError(
                f"[index] an index of type {type(k).__name__}; give integers, slices, ... or None, "
                "or one index of whole numbers alone, for rows: of another axis x.transpose(0, "
                "axis)[index].transpose(0, axis)"
            )
    indexed_axes = len([k for k in keys if k is not None and k is not Ellipsis])
    if keys.count(Ellipsis) > 1 or indexed_axes > x.ndim:
        raise ShapeError(
            f"[index] {len(keys)} indices for shape {x.shape}; give at most one for each axis"
        )
    position = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
    keys[position : position + 1] = [slice(None)] * (x.ndim - indexed_axes)
    starts = []
    sizes = []
    steps = []
    shape = []
    for k in keys:
        if k is None:
            shape.append(1)
            continue
        n = x.shape[len(starts)]
        if isinstance(k, slice):
            start, stop, step = k.indices(n)
            if step < 1:
                raise ShapeError(f"[index] a slice of step {step}; it must be at least 1")
            sizes.append(len(range(start, stop, step)))
            shape.append(sizes[-1])
        else:
            if not -n <= k < n:
                raise ShapeError(
                    f"[index] {k} of axis {len(starts)}, of size {n}; give {-n} to {n - 1}"
                )
            start = int(k) % n
            step = 1
            sizes.append(1)
        starts.append(start)
        steps.append(step)
    if 0 in sizes:
        raise ShapeError(f"[index] {key} leaves nothing of shape {x.shape}")
    y = x if tuple(sizes) == x.shape else _cut(x, starts, sizes, steps)
    return y if tuple(shape) == y.shape else reshape(y, tuple(shape))


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors joined along an axis, along which alone they may differ."""
    if not tensors:
        raise ShapeError("[cat] no tensors; give at least one")
    axis = axis_of("cat", dim, tensors[0].ndim)
    other_sizes = [(*t.shape[:axis], *t.shape[axis + 1 :]) for t in tensors]
    if len(set(other_sizes)) > 1:
        raise ShapeError(
            f"[cat] shapes {[t.shape for t in tensors]}; they may differ along axis {axis} alone"
        )
    if axis > 1 and any(t.layout == "tokens" for t in tensors):
        y = cat([as_lanes(to_lanes(t, "tokens"), True) for t in tensors], axis - 1)
        return reshape(y, *tensors[0].shape[:2], *y.shape[1:])
    lanes = axis > 0 and any(t.layout == "lanes" for t in tensors)
    parts = tuple(to_lanes(t) if lanes else to_rows(t) for t in tensors)
    x = parts[0]
    ends = np.cumsum([t.shape[axis] for t in parts]).tolist()
    y = empty_like(x, (*x.shape[:axis], ends[-1], *x.shape[axis + 1 :]), x.layout)
    strides = strides_of(memory_shape(y.shape, y.layout))
    for t, end in zip(parts, ends, strict=True):
        dims = memory_shape(t.shape, t.layout)
        _copy(
            "cat",
            y.memory,
            t.memory,
            dims,
            strides,
            strides_of(dims),
            (end - t.shape[axis]) * strides[axis],
        )
    return attach(y, parts, lambda dy: split(dy, [t.shape[axis] for t in parts], axis))


def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    """x with `value` before and after its last axis, pad[0] and pad[1] times, the one before it,
    pad[2], pad[3], ...
    """
    padded_axes = len(pad) // 2
    if (
        mode != "constant"
        or len(pad) % 2
        or padded_axes > x.ndim
        or builtins.min(pad, default=0) < 0
    ):
        raise ShapeError(
            f"[pad] pad {tuple(pad)}, mode {mode!r} of shape {x.shape}; give two sizes from 0 on "
            "for each axis, the "
            "last one first, and mode='constant': others are F.cat of slices, less is a slice"
        )
    x = to_rows(x) if x.layout == "tokens" or padded_axes == x.ndim else x
    ends = [(0, 0)] * (x.ndim - padded_axes) + [
        (pad[2 * i], pad[2 * i + 1]) for i in reversed(range(padded_axes))
    ]
    y = empty(tuple(a + n + b for (a, b), n in zip(ends, x.shape, strict=True)), x.layout)
    current().emit("fill", y.memory, float(value), y.floats)
    dims = memory_shape(x.shape, x.layout)
    strides = strides_of(memory_shape(y.shape, y.layout))
    offset = builtins.sum(a * step for (a, _), step in zip(ends, strides, strict=False))
    _copy("pad", y.memory, x.memory, dims, strides, strides_of(dims), offset)
    inside = tuple(slice(a, a + n) for (a, _), n in zip(ends, x.shape, strict=True))
    return attach(y, (x,), lambda dy: (getitem(dy, inside),))


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape side by side along a new axis."""
    return cat([unsqueeze(t, dim) for t in tensors], dim)


def split(x: Tensor, split_size: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces along an axis: of one size, the last one being what is left, or of the sizes given."""
    axis = axis_of("split", dim, x.ndim)
    n = x.shape[axis]
    if isinstance(split_size, int):
        if split_size < 1:
            raise ShapeError(f"[split] pieces of {split_size}; they must be at least 1 long")
        split_size = [builtins.min(split_size, n - i) for i in range(0, n, split_size)]
    if builtins.sum(split_size) != n:
        raise ShapeError(
            f"[split] pieces of {list(split_size)} of axis {axis}, of size {n}; their sum must be "
            f"{n}"
        )
    ends = np.cumsum(split_size).tolist()
    full_slices = (slice(None),) * axis
    return tuple(
        getitem(x, (*full_slices, slice(end - size, end)))
        for size, end in zip(split_size, ends, strict=True)
    )


def chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """`chunks` equal pieces along an axis, the last one being what is left."""
    return split(x, -(-x.shape[axis_of("chunk", dim, x.ndim)] // chunks), dim)


def unbind(x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """The parts along an axis, without it."""
    return tuple(squeeze(part, dim) for part in split(x, 1, dim))


# --- over axes ------------------------------------------------------------------------------------


def axes_of(name: str, x: Tensor, dim: Dims) -> tuple[int, ...]:
    """The axes as numbers from 0 on, each once, in order."""
    axes = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    return tuple(sorted({axis_of(name, d, x.ndim) for d in axes}))


def reduced(op: str, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """One number for all along the axes, which stay with the size 1; without a gradient."""
    if x.layout == "tokens" and builtins.min(dims, default=2) > 1:
        y = reduced(op, as_lanes(x.detach(), True), tuple(d - 1 for d in dims))
        return reshape(y, *x.shape[:2], *y.shape[1:])
    x = to_rows(x) if 0 in dims or x.layout == "tokens" else x
    y = empty(tuple(1 if i in dims else n for i, n in enumerate(x.shape)), x.layout)
    y.device = x.device  # a reshape of it may close the op
    memory = memory_shape(x.shape, x.layout)
    axes = [
        (i in dims, n, s) for i, (n, s) in enumerate(zip(memory, strides_of(memory), strict=True))
    ]
    sizes = [
        merged(
            op, 3, [n for r, n, _ in axes if r == reduced], [s for r, _, s in axes if r == reduced]
        )
        for reduced in (False, True)
    ]
    (kept_sizes, kept_strides), (reduced_sizes, strides) = sizes
    current().emit(op, y.memory, x.memory, *kept_sizes, *reduced_sizes, *kept_strides, *strides)
    return y


def without(y: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    return y if keepdim else reshape(y, tuple(n for i, n in enumerate(y.shape) if i not in dims))


def sum_to(dy: Tensor, shape: Shape) -> Tensor:
    """The gradient of a tensor of that shape that was broadcast."""
    if dy.shape == shape:
        return dy
    extra_axes = dy.ndim - len(shape)
    dims = [
        i
        for i in range(dy.ndim)
        if i < extra_axes or (shape[i - extra_axes] == 1 and dy.shape[i] != 1)
    ]
    return reshape(sum(dy, dims, True), *shape)


def _sum_of_samples(x: Tensor) -> Tensor:
    executor = current()
    if isinstance(executor, (Recorder, ShardEager)) and (
        x.ndim < 1 or x.shape[0] != executor.samples
    ):
        raise ConfigError(
            "[sum] in a trainer only values of samples can be summed, of shape "
            f"({executor.samples}, ...), "
            f"not {x.shape}; for a penalty on weights use the optimizer's weight_decay"
        )
    x = batched(x)
    n = -1 if executor.shard else x.shape[0]  # -1: the samples that the shard really has
    y = empty(())
    current().emit("sum_lanes", y.memory, x.memory, n, x.groups, x.features, layout=x.layout)
    return attach(
        y,
        (x,),
        adjoint("sum_lanes_backward", x, n, x.groups, x.features, layout=x.layout),
        name="sum",
    )


def sum(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The sum of all elements, of shape (), or over some axes."""
    if dim is None:
        return _sum_of_samples(x)
    dims = axes_of("sum", x, dim)
    y = reduced("reduce_sum", x, dims)
    old_shape = x.shape
    attach(y, (x,), lambda dy: (expand(dy, old_shape),), name="sum")
    return without(y, dims, keepdim)


# a pad is a copy into what was filled
ONNX |= {"fill": "Constant", "copy_strided": "Pad", "reduce_sum": "ReduceSum"}
