"""One row per op: the op, its formula in NumPy on float64 arrays, shapes to try it with.
odyssey.testing.check_op makes all tests of it (tests/kernels/test_samples.py; on an emulated
GPU tests/gpu/test_gpu_samples.py).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from kernels import reference as R

from odyssey import functional as F

erf = np.vectorize(math.erf)


class Sample(NamedTuple):
    """Arguments of check_op. shapes: of the tensors, without the batch axis; parameters: of
    those behind them.
    """

    op: Any
    formula: Any
    shapes: tuple[tuple[int, ...], ...]
    parameters: tuple[tuple[int, ...], ...] = ()
    training: bool = True


def of_each(op: Any, formula: Any) -> list[Sample]:
    """An elementwise op, on vectors and on images."""
    return [
        Sample(op, formula, ((16,),)),
        Sample(op, formula, ((3, 5, 4),)),
        Sample(op, formula, ((1,),), (), False),
    ]


def over_classes(op: Any, formula: Any) -> list[Sample]:
    """An op over the classes of (N, classes)."""
    return [Sample(op, formula, ((classes,),), (), classes == 12) for classes in (1, 2, 12, 37)]


def losses(op: Any, formula: Any) -> list[Sample]:
    """A loss of each number of two tensors: each, and their mean."""
    each = Sample(lambda x, t: op(x, t, reduction="none"), formula, ((2, 5), (2, 5)))
    return [each, Sample(op, lambda x, t: formula(x, t).mean(), ((7,), (7,)), (), False)]


def smooth_l1(x, t):
    d = np.abs(x - t)
    return np.where(d < 1, d * d / 2, d - 0.5)


def attention(q, k, v, heads, past, mask=0.0):
    """q (N, T, F), k and v (N, S, F); query i sees the keys up to i + past, of those that the
    mask names.
    """
    n, t, f = q.shape
    q, k, v = (a.reshape(n, a.shape[1], heads, f // heads).transpose(0, 2, 1, 3) for a in (q, k, v))
    s = q @ k.transpose(0, 1, 3, 2) / math.sqrt(f // heads)
    s = s + (np.where(mask, 0.0, -np.inf) if np.asarray(mask).dtype == bool else mask)
    s = np.where(np.arange(s.shape[3]) <= np.arange(t)[:, None] + past, s, -np.inf)
    p = np.exp(s - np.maximum(s.max(axis=-1, keepdims=True), -1e30))
    return (
        (p / np.maximum(p.sum(axis=-1, keepdims=True), 1e-30) @ v)
        .transpose(0, 2, 1, 3)
        .reshape(n, t, f)
    )


ALIBI = np.where(
    np.arange(19) % 5 < 3, -0.1 * np.abs(np.arange(19) - np.arange(18)[:, None]), -np.inf
)
MASKS = [  # of q and k; T, S, features, heads, past; with the first two a model is trained as well
    (lambda q, k: (k[:, :, 0] > 0.3)[:, None, None], 7, 7, 6, 2, 0),
    (
        lambda q, k: q[:, :, 0][:, None, :, None] + k[:, :, 1][:, None, None] > np.float32(0.3),
        5,
        17,
        8,
        2,
        17,
    ),
    (
        lambda q, k: k[:, :, 0][:, None, None] > np.linspace(-1, 1, 102).reshape(3, 34, 1),
        34,
        21,
        9,
        3,
        21,
    ),
    (lambda q, k: np.arange(40) % 3 > np.arange(33)[:, None] % 4, 33, 40, 4, 1, 12),
    (lambda q, k: ALIBI.astype(np.float32), 18, 19, 6, 3, 19),
]


def fused_attention(x):
    return attention(*np.split(x, 3, axis=2), 2, 0)


def layer_norm(x, w, b):
    d = x - x.mean(axis=1, keepdims=True)
    return d / np.sqrt((d * d).mean(axis=1, keepdims=True) + 1e-5) * w + b


def batch_norm(x, w, b):
    axes = tuple(i for i in range(x.ndim) if i != 1)
    d, each = x - x.mean(axes, keepdims=True), (-1, *[1] * (x.ndim - 2))
    return d / np.sqrt((d * d).mean(axes, keepdims=True) + 1e-5) * w.reshape(each) + b.reshape(each)


def normed(x, w, b):
    return F.batch_norm(x, None, None, w, b, training=True)


# C, H, W, K, R, T, stride, padding; with the first two a model is trained as well
CONVOLUTIONS = [
    (3, 7, 8, 5, 3, 3, 1, 1),
    (2, 8, 9, 4, 3, 3, 2, 0),
    (1, 1, 1, 1, 1, 1, 1, 0),
    (1, 28, 28, 6, 5, 5, 1, 2),  # LeNet-5
    (6, 14, 14, 16, 5, 5, 1, 0),
    (4, 7, 7, 3, 1, 1, 1, 0),
    (2, 9, 10, 3, 1, 1, 3, 0),
    (3, 6, 13, 2, 2, 5, 1, (1, 2)),
    (2, 10, 6, 9, 5, 2, 2, (0, 3)),
    (5, 5, 5, 4, 5, 5, 1, 0),
    (1, 12, 12, 1, 7, 7, 1, 3),
    (1, 9, 9, 2, 4, 3, 3, 2),
    (2, 4, 29, 3, 3, 3, 1, 1),
]
# C, H, W, K, R, T, stride, padding, dilation, groups
GENERAL = [
    (6, 7, 9, 9, 3, 2, 1, 1, 1, 3),
    (4, 6, 5, 4, 3, 3, 1, 1, 1, 4),
    (4, 12, 9, 10, 2, 3, 2, (0, 3), 3, 2),
    (3, 7, 8, 5, 3, 3, 1, 2, 2, 1),
]
LINEAR = [
    (13, 9),
    (1, 1),
    (400, 120),
    (120, 84),
    (84, 10),
    (17, 33),
    (16, 12),
    (15, 5),
    (3, 64),
    (130, 23),
]
# H, W, window, stride; with the first two a model is trained as well
POOLS = [
    (5, 7, 2, None),  # a row and a column left over
    (7, 7, 3, 2),  # overlapping
    (2, 2, 2, None),
    (28, 28, 2, None),
    (8, 6, 3, 1),
    (9, 9, 2, 3),  # gaps
    (6, 5, (3, 2), 2),
    (4, 9, (1, 4), 1),
    (16, 17, 16, 1),  # 256 places
    (3, 3, 1, None),
]


def grouped(x, w, b, stride, padding, dilation, groups):
    taps = np.zeros((*w.shape[:2], *(dilation * (n - 1) + 1 for n in w.shape[2:])), w.dtype)
    taps[:, :, ::dilation, ::dilation] = w
    runs = zip(*(np.split(a, groups, axis) for a, axis in ((x, 1), (taps, 0), (b, 0))), strict=True)
    return np.concatenate([R.conv2d(*run, stride, padding) for run in runs], axis=1)


def sign(x):
    """The op has no gradient; its product with x is |x|, which has one."""
    return F.sign(x) * x


def signals(x, w, b, stride, padding, dilation, groups):
    return grouped(x[:, :, None], w[:, :, None], b, stride, (0, padding), dilation, groups)[:, :, 0]


def pools(op: Any, formula: Any) -> list[Sample]:
    return [
        Sample(
            lambda x, k=k, s=s: op(x, k, s),
            lambda x, k=k, s=s: formula(x, k, s or k),
            ((4, h, w),),
            (),
            i < 2,
        )
        for i, (h, w, k, s) in enumerate(POOLS)
    ]


SAMPLES = [
    *of_each(F.relu, lambda x: np.maximum(x, 0)),
    *of_each(F.tanh, np.tanh),
    *of_each(F.sigmoid, R.sigmoid),
    *of_each(F.gelu, lambda x: x * (1 + erf(x / math.sqrt(2))) / 2),
    *of_each(F.silu, lambda x: x * R.sigmoid(x)),
    *of_each(F.softplus, lambda x: np.logaddexp(0, x)),
    *of_each(F.abs, np.abs),
    Sample(sign, np.abs, ((3, 5),), (), False),
    *losses(F.mse_loss, lambda x, t: (x - t) ** 2),
    *losses(F.l1_loss, lambda x, t: np.abs(x - t)),
    *losses(F.smooth_l1_loss, smooth_l1),
    *losses(F.binary_cross_entropy_with_logits, lambda x, t: np.logaddexp(0, x) - t * x),
    *over_classes(F.softmax, R.softmax),
    *over_classes(F.log_softmax, R.log_softmax),
    Sample(F.layer_norm, layer_norm, ((24,),), ((24,), (24,))),
    *of_each(
        lambda x: F.gelu(x, "tanh"),
        lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    *(
        Sample(
            lambda q, k, v, h=h, past=past: F.attention(q, k, v, h, past),
            lambda q, k, v, h=h, past=past: attention(q, k, v, h, past),
            ((t, f), (s, f), (s, f)),
            (),
            t == 7,
        )
        for t, s, f, h, past in (
            (7, 7, 6, 2, 0),
            (1, 19, 5, 1, 18),
            (33, 40, 27, 3, 100),
            (5, 17, 8, 8, 12),
        )
    ),
    *(
        Sample(
            lambda q, k, v, m=m, h=h, past=past: F.attention(q, k, v, h, past, mask=m(q, k)),
            lambda q, k, v, m=m, h=h, past=past: attention(q, k, v, h, past, m(q, k)),
            ((t, f), (s, f), (s, f)),
            (),
            i < 2,
        )
        for i, (m, t, s, f, h, past) in enumerate(MASKS)
    ),
    Sample(lambda x: F.attention(x, None, None, 2, 0), fused_attention, ((18, 24),), (), False),
    Sample(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: (
            attention(*(a.transpose(0, 2, 1, 3).reshape(len(a), 5, 6) for a in (q, k, v)), 2, 0)
            .reshape(len(q), 5, 2, 3)
            .transpose(0, 2, 1, 3)
        ),
        ((2, 5, 3), (2, 5, 3), (2, 5, 3)),
        (),
        False,
    ),
    Sample(F.layer_norm, layer_norm, ((1,),), ((1,), (1,)), False),
    Sample(normed, batch_norm, ((3, 4, 5),), ((3,), (3,))),
    Sample(normed, batch_norm, ((2, 37),), ((2,), (2,)), False),
    Sample(lambda x: F.leaky_relu(x, 0.2), lambda x: np.where(x > 0, x, 0.2 * x), ((3, 5),)),
    Sample(
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: R.max_pool2d(
            np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf), 3, 2
        ),
        ((2, 5, 6),),
    ),
    Sample(F.add, lambda a, b: a + b, ((8,), (8,))),
    Sample(F.multiply, lambda a, b: a * b, ((2, 3, 3), (2, 3, 3))),
    Sample(lambda x: F.scale(x, -2.5), lambda x: -2.5 * x, ((9,),)),
    Sample(lambda a, b: (a - b) * 3 - a / 2, lambda a, b: 2.5 * a - 3 * b, ((2, 3), (2, 3))),
    Sample(lambda x: F.pad2d(x, (1, 2)), lambda x: R.pad2d(x, (1, 2)), ((2, 3, 4),)),
    *(
        Sample(lambda x, p=p: F.pad2d(x, p), lambda x, p=p: R.pad2d(x, p), ((2, 3, 5),), (), False)
        for p in (1, (2, 0), (0, 3), (3, 1))
    ),
    *pools(F.max_pool2d, R.max_pool2d),
    *pools(F.avg_pool2d, R.avg_pool2d),
    *(Sample(F.linear, R.linear, ((i,),), ((o, i), (o,)), (i, o) == LINEAR[0]) for i, o in LINEAR),
    Sample(lambda x, w: F.linear(x, w), lambda x, w: R.linear(x, w, 0), ((7,),), ((4, 7),)),
    *(
        Sample(
            lambda x, w, b, s=s, p=p: F.conv2d(x, w, b, s, p),
            lambda x, w, b, s=s, p=p: R.conv2d(x, w, b, s, p),
            ((c, h, w),),
            ((k, c, r, t), (k,)),
            i < 2,
        )
        for i, (c, h, w, k, r, t, s, p) in enumerate(CONVOLUTIONS)
    ),
    *(
        Sample(
            lambda x, w, b, how=how: F.conv2d(x, w, b, *how),
            lambda x, w, b, how=how: grouped(x, w, b, *how),
            ((c, h, w),),
            ((k, c // how[3], r, t), (k,)),
        )
        for c, h, w, k, r, t, *how in GENERAL
    ),
    *(
        Sample(
            lambda x, w, b, how=how: F.conv1d(x, w, b, *how),
            lambda x, w, b, how=how: signals(x, w, b, *how),
            ((c, 20),),
            ((6, c // how[3], 3), (6,)),
        )
        for c, *how in ((3, 1, 1, 1, 1), (4, 2, 3, 3, 2))
    ),
    Sample(
        lambda x, w: F.conv2d(x, w),
        lambda x, w: R.conv2d(x, w, np.zeros(4), 1, 0),
        ((2, 5, 6),),
        ((4, 2, 3, 3),),
    ),
]


def looked_up(x, w):
    return F.embedding(F.where(x > 0, 1, 3), w) + x[..., None]


def _softplus(x):
    return np.log(1 + np.exp(x))


# Ops of tensors of any shape (operators.py, shapes.py): arguments are checked as they come, and
# through the batch.
SAMPLES += [
    # slices, permutations, joins
    Sample(lambda x: x[:, 1:4], lambda x: x[:, 1:4], ((5,),)),
    Sample(lambda x: x[:, ::2, 1], lambda x: x[:, ::2, 1], ((5, 3),)),
    Sample(lambda x: x[..., None, -1], lambda x: x[..., None, -1], ((2, 3),), (), False),
    Sample(
        lambda x: x[:, 0] * x[:, 1, None, 2],
        lambda x: x[:, 0] * x[:, 1, None, 2],
        ((2, 3),),
        (),
        False,
    ),
    Sample(lambda x: x.permute(0, 3, 1, 2), lambda x: x.transpose(0, 3, 1, 2), ((2, 3, 5),)),
    Sample(lambda x: x.transpose(1, 2), lambda x: x.transpose(0, 2, 1), ((3, 7),)),
    Sample(lambda x: x.transpose(0, 1)[1:].transpose(0, 1), lambda x: x[:, 1:], ((4, 3),)),
    Sample(lambda x: x.reshape(-1, 3).reshape(-1, 2, 6), lambda x: x.reshape(-1, 2, 6), ((3, 4),)),
    Sample(
        lambda x, y: F.cat([x, y, x], 1),
        lambda x, y: np.concatenate([x, y, x], 1),
        ((3, 2), (1, 2)),
    ),
    Sample(
        lambda x, y: F.cat([x, y], -1),
        lambda x, y: np.concatenate([x, y], -1),
        ((3, 2), (3, 5)),
        (),
        False,
    ),
    Sample(lambda x, y: F.stack([x, y], 2), lambda x, y: np.stack([x, y], 2), ((4,), (4,))),
    Sample(
        lambda x: F.cat(x.split(3, 1)[::-1], 1),
        lambda x: np.concatenate([x[:, 6:], x[:, 3:6], x[:, :3]], 1),
        ((8,),),
        (),
        False,
    ),
    Sample(lambda x: x.expand(-1, 4, 3), lambda x: np.broadcast_to(x, (len(x), 4, 3)), ((1, 3),)),
    # broadcasting
    Sample(lambda x, w: x + w, lambda x, w: x + w, ((2, 3),), ((3,),)),
    Sample(lambda x, w: w - x, lambda x, w: w - x, ((2, 3),), ((2, 1),), False),
    Sample(lambda x, w: x * w * 0.5 + 1, lambda x, w: x * w * 0.5 + 1, ((2, 3, 2),), ((1, 3, 1),)),
    Sample(lambda x, y: x * y, lambda x, y: x * y, ((3, 1), (1, 4))),
    Sample(lambda x, y: x / (y * y + 1), lambda x, y: x / (y * y + 1), ((3, 5), (1, 5))),
    Sample(
        lambda x, w: 2 / (x * x + w * w + 1), lambda x, w: 2 / (x * x + w * w + 1), ((7,),), ((7,),)
    ),
    Sample(lambda x: x**3 - x**2, lambda x: x**3 - x**2, ((3, 4),)),
    Sample(lambda x: (x * x + 1) ** 1.7, lambda x: (x * x + 1) ** 1.7, ((3, 4),)),
    Sample(
        lambda x: 2**x + (x * x + 1) ** -2, lambda x: 2**x + (x * x + 1) ** -2, ((5,),), (), False
    ),
    Sample(lambda x, y: (x * x + 1) ** y, lambda x, y: (x * x + 1) ** y, ((5,), (5,))),
    Sample(lambda x: F.log(1 + F.exp(x)), _softplus, ((3, 5),)),
    Sample(lambda x: F.sqrt(x * x + 1), lambda x: np.sqrt(x * x + 1), ((3, 5),)),
    Sample(lambda x: abs(x), np.abs, ((3, 5),)),
    Sample(F.maximum, np.maximum, ((3, 5), (3, 5))),
    Sample(lambda x, w: F.minimum(x, w), np.minimum, ((3, 5),), ((5,),)),
    Sample(lambda x: x.clamp(-0.5, 0.75), lambda x: x.clip(-0.5, 0.75), ((9,),)),
    Sample(lambda x: x.clamp(min=0.1), lambda x: x.clip(0.1), ((9,),), (), False),
    Sample(
        lambda x, y: F.where(x > y, x, 2 * y), lambda x, y: np.where(x > y, x, 2 * y), ((6,), (6,))
    ),
    Sample(
        lambda x: F.where(x <= 0.3, -1, x), lambda x: np.where(x <= 0.3, -1, x), ((6,),), (), False
    ),
    # products and tables
    Sample(lambda x, w: x @ w, lambda x, w: x @ w, ((3, 7),), ((7, 5),)),
    Sample(lambda x, w: w @ x, lambda x, w: w @ x, ((3, 7),), ((4, 3),)),
    Sample(
        lambda x, y: x @ y.transpose(2, 3),
        lambda x, y: x @ y.swapaxes(2, 3),
        ((2, 3, 17), (2, 50, 17)),
    ),
    Sample(lambda x, w: x @ w, lambda x, w: x @ w, ((9,),), ((9,),), False),
    Sample(
        lambda x, w: x * w[[2, 0, 2]].sum(0),
        lambda x, w: x * w[[2, 0, 2]].sum(0),
        ((6,),),
        ((3, 6),),
    ),
    Sample(looked_up, lambda x, w: w[np.where(x > 0, 1, 3)] + x[..., None], ((2,),), ((4, 3),)),
    # layers over the last of several axes
    Sample(F.linear, lambda x, w, b: x @ w.T + b, ((5, 7),), ((3, 7), (3,))),
    Sample(F.softmax, lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True), ((3, 5),)),
    Sample(
        lambda x: F.log_softmax(x, 1),
        lambda x: x - np.log(np.exp(x).sum(1, keepdims=True)),
        ((3, 5),),
        (),
        False,
    ),
    Sample(
        F.layer_norm,
        lambda x, w, b: layer_norm(x.reshape(-1, 6), w, b).reshape(x.shape),
        ((4, 6),),
        ((6,), (6,)),
    ),
    # over axes
    Sample(lambda x: x.sum(1), lambda x: x.sum(1), ((37,),)),
    Sample(lambda x: x.sum((1, 3), True), lambda x: x.sum((1, 3), keepdims=True), ((2, 3, 5),)),
    Sample(lambda x: x - x.mean(0), lambda x: x - x.mean(0), ((6,),)),
    Sample(lambda x: x.mean((-1, -2)), lambda x: x.mean((-1, -2)), ((3, 4, 5),)),
    Sample(lambda x: x.var(1), lambda x: x.var(1, ddof=1), ((9,),)),
    Sample(
        lambda x: x.var((1, 2), 0, True) * x,
        lambda x: x.var((1, 2), keepdims=True) * x,
        ((3, 4),),
        (),
        False,
    ),
    Sample(lambda x: x.max(2), lambda x: x.max(2), ((3, 21),)),
    Sample(
        lambda x: x.min((1, 2)) + x.max(-1).sum(1),
        lambda x: x.min((1, 2)) + x.max(-1).sum(1),
        ((3, 4),),
        (),
        False,
    ),
]


def name_of(sample: Sample) -> str:
    """For pytest."""
    shapes = " ".join("x".join(map(str, shape)) for shape in (*sample.shapes, *sample.parameters))
    name = sample.op.__name__
    return f"{'op' if name == '<lambda>' else name} {shapes}"
