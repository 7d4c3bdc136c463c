"""Attention over sequences, with a token per lane (mojo/kernels/attention.mojo)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ShapeError
from .dropout import drawn
from .operators import to_float, where
from .products import product_precision
from .program import current
from .shapes import as_image, permute, reshape, tokens
from .tape import Tensor, attach, empty, to_rows

__all__ = ["attention", "scaled_dot_product_attention"]


def added(mask: Any, like: Tensor, visible: bool = True) -> Tensor:
    """A mask as what is added to scores: floats as they are; of truths (comparisons, integers,
    NumPy's bools) 0 where a key is `visible`, else -inf. like: a tensor on the place of the
    scores.
    """
    if not isinstance(mask, Tensor):
        array = np.asarray(mask)
        mask = Tensor(
            array if array.dtype.kind == "f" else np.where((array != 0) == visible, 0.0, -np.inf)
        )
        mask.device = like.device
    elif mask.mask or mask.dtype == np.int32:
        mask = where(to_float(mask), *((0.0, -np.inf) if visible else (-np.inf, 0.0)))
    return mask


def _laid(m: Tensor, scores: tuple[int, ...]) -> tuple[Tensor, int]:
    """A mask of `scores` (N, H, T, S) as the kernel reads it, (N, H, S, T) but for axes of one,
    and which those are.
    """
    shape = (1,) * (4 - m.ndim) + m.shape
    fits = (
        len(shape) == 4
        and shape[3] == scores[3]
        and all(a in (1, b) for a, b in zip(shape, scores, strict=True))
    )
    if not fits or m.requires_grad:
        raise ShapeError(
            f"[attention] a mask {m.shape}{', with a gradient,' * m.requires_grad} of scores "
            f"{scores}; give (T, S), (N, 1, 1, S) or others of these axes or 1; one that is learnt "
            "is added to q @ k^T before F.softmax"
        )
    m = to_rows(reshape(m.detach(), shape))
    m = reshape(m, *shape[:2], -1, 1) if shape[2] == 1 else to_rows(permute(m, 0, 1, 3, 2))
    return m, 1 + sum(2 << i for i in range(3) if shape[i] > 1)


def attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    heads: int,
    past: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    mask: Any = None,
) -> Tensor:
    """softmax(q k^T scale) v of each head: q (N, T, F), k and v (N, S, F), F in `heads` equal
    parts; result (N, T, F).

    Scores take no memory that grows with T S (mojo/kernels/attention.mojo).

    Args:
        k, v: None if q is all three side by side, (N, T, 3 F).
        past: query i sees the keys up to i + past; all if None.
        scale: 1 / sqrt(F / heads) unless given.
        dropout: softmax's results are zeroed with this probability, the others divided by 1 -
            dropout: as `dropout` of a token with heads times S features, S rounded up to a multiple
            of 4.
        mask: (N, heads, T, S), broadcast: True where a key is seen, or float32 that is added to
            scores (`added`); a key with -inf is not seen and changes no bit of what the others
            give. A query that sees none gets 0.

    Raises ShapeError: shapes that do not fit, a dropout that is not in [0, 1).
    """
    inputs = (q,) if k is None or v is None else (q, k, v)
    fused = len(inputs) == 1
    keys = inputs[-1].shape[1:2]
    f = q.shape[-1] // (3 if fused else 1)
    if (
        any(t.ndim != 3 or t.shape[0] != q.shape[0] for t in inputs)
        or any(t.shape != (q.shape[0], *keys, f) for t in inputs[1:])
        or heads < 1
        or f % heads
        or (fused and q.shape[-1] % 3)
    ):
        raise ShapeError(
            f"[attention] shapes {', '.join(str(t.shape) for t in inputs)} and {heads} heads; they "
            "must be (N, T, F), (N, S, F), (N, S, F) with F a multiple of the heads, or (N, T, 3 "
            f"F) alone{as_image(q.shape)}"
        )
    s = keys[0]
    d = f // heads
    (n, t) = q.shape[:2]
    if past is not None and past < 0:
        raise ShapeError(f"[attention] past is {past}; it must be at least 0")
    scale = float(d**-0.5 if scale is None else scale)
    m, masks = (q, 0) if mask is None else _laid(added(mask, q), (n, heads, t, s))
    sizes = (
        n,
        t,
        s,
        heads,
        d,
        s if past is None else past,
        int(fused),
        scale,
        *drawn("attention", dropout),
        0,
        masks,
    )
    parts = tuple(tokens(x) for x in inputs)
    dtype = product_precision()
    memories = [*[x.memory for x in parts] * (3 if fused else 1), (m if masks else parts[0]).memory]
    y = empty((n * t, f), "lanes")
    lse = current().alloc(4 * y.floats // d)
    saved = y.memory
    current().emit("attention_forward", saved, lse, *memories, *sizes, dtype=dtype)

    def backward(dy: Tensor) -> tuple[Tensor | None, ...]:
        gradients = tuple(empty(x.shape, "lanes") for x in parts)
        to = [g.memory for g in gradients] * (3 if fused else 1)
        current().emit(
            "attention_backward", *to, dy.memory, saved, lse, *memories, *sizes, dtype=dtype
        )
        return (*gradients, None)

    return reshape(attach(y, (*parts, m.detach()), backward), n, t, f)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(query key^T scale) value of (N, H, T, D), (N, H, S, D) and (N, H, S, D): (N, H, T,
    D).

    attn_mask: the mask of `attention`. is_causal: query i sees the keys up to i. dropout_p: of
    softmax's results, in evaluation as well: give 0 there. `attention` is the same without moving
    the heads.
    """
    if any(t.ndim != 4 or t.shape[1] != query.shape[1] for t in (query, key, value)):
        raise ShapeError(
            f"[scaled_dot_product_attention] shapes {query.shape}, {key.shape}, {value.shape}; "
            "they must be (N, H, T, D), (N, H, S, D) and (N, H, S, D)"
        )
    q, k, v = (
        reshape(permute(t, 0, 2, 1, 3), t.shape[0], t.shape[2], -1) for t in (query, key, value)
    )
    y = attention(q, k, v, query.shape[1], 0 if is_causal else None, scale, dropout_p, attn_mask)
    return permute(reshape(y, *y.shape[:2], query.shape[1], -1), 0, 2, 1, 3)
