"""Batch normalisation and its running statistics (Ioffe, Szegedy 2015).

Inside a trainer the statistics are those of a shard (ghost batch norm: Hoffer, Hubara, Soudry
2017), so they do not know on how many ranks the batch is computed; what shards add to the running
ones is summed as gradients are (arena.Buffer).
"""

from __future__ import annotations

import numpy as np

from ..errors import ShapeError
from . import native
from .program import ONNX, Memory, OwnMemory, current
from .shapes import batched
from .tape import Tensor, attach, empty


class OneNumberError(ShapeError):
    """Batch norm has one number per channel, which has no variance."""


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    steps: Tensor | None = None,
) -> Tensor:
    """Each channel of x (N, C, ...) moved and scaled to mean 0 and variance 1, times weight (C),
    plus bias (C).

    Args:
        running_mean, running_var: (C), used unless `training`; then they go by `momentum` towards
            the mean and the unbiased variance of the batch, in a trainer, as arena.Buffer, towards
            the mean over samples of those of the shards.
        steps: counts these moves.

    Raises ShapeError: a shape does not fit, or a channel has one number to normalise by.
    """
    c = x.shape[1] if x.ndim > 1 else 0
    for name, t in (
        ("weight", weight),
        ("bias", bias),
        ("mean", running_mean),
        ("variance", running_var),
    ):
        if c == 0 or (t is not None and t.shape != (c,)):
            shape_text = f", {name} {t.shape}" if t is not None else ""
            raise ShapeError(
                f"[batch_norm] input {x.shape}{shape_text}; they must be (N, C, ...) and (C)"
            )
    if training and x.size == c:
        raise OneNumberError(
            f"[batch_norm] input {x.shape}: one number per channel has no variance; use larger "
            "shards, and where the last batch is one sample, drop_last=True or another batch size"
        )
    if not training and (running_mean is None or running_var is None):
        raise ShapeError(
            "[batch_norm] no running mean and variance to evaluate with; give both, or "
            "training=True"
        )
    x = batched(x)
    executor = current()
    samples = -1 if executor.shard else x.shape[0]  # -1: those that the shard really has
    size = x.groups, c, x.features // c, samples
    ones, zeros = (OwnMemory(np.full(c, value, np.float32)) for value in (1, 0))
    w = ones if weight is None else weight.memory
    b = zeros if bias is None else bias.memory
    mean = zeros if running_mean is None else running_mean.memory
    variance = ones if running_var is None else running_var.memory
    y = empty(x.shape, x.layout)
    stats = executor.alloc(12 * c)
    inputs = x.memory, w, b, mean, variance
    executor.emit(
        "batch_norm_forward",
        y.memory,
        stats,
        *inputs,
        *size,
        float(eps),
        int(training),
        0,
        0,
        layout=x.layout,
    )
    running = [t for t in (running_mean, running_var, steps) if t is not None] if training else []
    if running and not executor.shard:
        if not executor.scope.recompute:
            for t, d in zip(running, _moves(running, stats, c, samples, momentum), strict=True):
                t.data -= d.data / np.float32(samples)
        running = []

    def backward(dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = empty(x.shape, x.layout)
        dw = empty((c,))
        db = empty((c,))
        out = dx.memory, dw.memory, db.memory
        saved = dy.memory, x.memory, stats, w, b
        current().emit(
            "batch_norm_backward", *out, *saved, *size, int(training), 0, layout=x.layout
        )
        affine_grads = [g for t, g in ((weight, dw), (bias, db)) if t is not None]
        return (
            dx,
            *affine_grads,
            *(_moves(running, stats, c, samples, momentum) if running else ()),
        )

    return attach(y, (x, *(t for t in (weight, bias) if t is not None), *running), backward)


ONNX["batch_norm_forward"] = "BatchNormalization"


def _moves(
    running: list[Tensor], stats: Memory, c: int, samples: int, momentum: float
) -> list[Tensor]:
    """Returns what the samples take away from the running statistics: sums over them."""
    moves = [empty(t.shape) for t in running]
    ds = moves[2].memory if len(moves) > 2 else current().alloc(16)
    memory = [t.memory for t in running]
    if len(memory) < 3:
        memory.append(OwnMemory(native.aligned(1)))
    operands = moves[0].memory, moves[1].memory, ds, stats, *memory
    current().emit("batch_norm_running", *operands, c, samples, float(momentum))
    return moves
