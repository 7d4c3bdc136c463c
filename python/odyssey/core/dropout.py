"""Dropout, of activations (mojo/kernels/dropout.mojo) and, in attention.py, of probabilities."""

from __future__ import annotations

from ..errors import ShapeError
from . import native
from .program import current
from .shapes import adjoint, batched
from .tape import Tensor, attach, empty, to_lanes


def drawn(op: str, p: float, training: bool = True) -> tuple[float, int]:
    """Returns what a record of dropout has: p, and its number in the model.

    Of none both are 0, and it is not counted.

    Raises ShapeError: p is not in [0, 1).
    """
    if not 0 <= p < 1:
        raise ShapeError(f"[{op}] p is {p}; it must be at least 0 and below 1")
    return (float(p), current().next_layer()) if p and training else (0.0, 0)


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zeroes each element with probability p in [0, 1) and divides the others by 1 - p; x itself
    unless `training`.

    The mask is a function of (seed, step, position of the sample in the global batch, number of the
    dropout in the model, element): the same on any number of workers. Kept for the backward pass is
    a bit per element.
    """
    p, layer = drawn("dropout", p, training)
    if p == 0:
        return x
    x = to_lanes(x, "tokens") if x.ndim == 3 else batched(x)
    sizes = (x.groups, x.features, p)
    y = empty(x.shape, x.layout)
    mask_bits = current().alloc(
        x.groups * -(-x.features // 8) * (1 if x.layout == "rows" else native.library().lanes)
    )
    current().emit(
        "dropout_forward",
        y.memory,
        mask_bits,
        x.memory,
        *sizes,
        layer,
        x.lanes // x.shape[0],
        layout=x.layout,
    )
    return attach(
        y, (x,), adjoint("dropout_backward", x, mask_bits, *sizes, layout=x.layout), name="dropout"
    )
