"""Tensors with all their ops, for everything above: the class is in tape.py, ops and operators in functional.py."""

from . import functional  # noqa: F401 - gives Tensor its operators and methods
from .tape import (
    SMALL_BATCH,
    BackwardWatcher,
    Parameter,
    Shape,
    Tensor,
    attach,
    checkpointed,
    empty,
    from_dlpack,
    layout_of,
    make,
    no_grad,
    to_lanes,
    to_rows,
)

__all__ = [
    "SMALL_BATCH", "Parameter", "Shape", "Tensor", "BackwardWatcher", "attach", "checkpointed", "empty", "from_dlpack",
    "layout_of", "make", "no_grad", "to_lanes", "to_rows",
]  # fmt: skip
