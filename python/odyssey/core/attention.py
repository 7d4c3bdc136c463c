"""Attention over sequences, with a token per lane (mojo/kernels/attention.mojo)."""

from __future__ import annotations

from ..errors import ShapeError
from .dropout import drawn
from .program import current
from .shapes import as_image, permute, reshape, tokens
from .tensor import Tensor, attach, empty

__all__ = ["attention", "scaled_dot_product_attention"]


def attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    heads: int,
    past: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q k^T scale) v of each head: q (N, T, F), k and v (N, S, F), F in `heads` equal parts; result (N, T, F).

    Scores take no memory that grows with T S (mojo/kernels/attention.mojo).

    Args:
        k, v: None if q is all three side by side, (N, T, 3 F).
        past: query i sees the keys up to i + past; all if None.
        scale: 1 / sqrt(F / heads) unless given.
        dropout: softmax's results are zeroed with this probability, the others divided by 1 - dropout: as `dropout` of
            a token with heads times S features, S rounded up to a multiple of 4.

    Raises ShapeError: shapes that do not fit, a dropout that is not in [0, 1).
    """
    given = (q,) if k is None or v is None else (q, k, v)
    fused = len(given) == 1
    keys, f = given[-1].shape[1:2], q.shape[-1] // (3 if fused else 1)
    if (
        any(t.ndim != 3 or t.shape[0] != q.shape[0] for t in given)
        or any(t.shape != (q.shape[0], *keys, f) for t in given[1:])
        or heads < 1
        or f % heads
        or (fused and q.shape[-1] % 3)
    ):
        raise ShapeError(
            f"[attention] shapes {', '.join(str(t.shape) for t in given)} and {heads} heads; they must be (N, T, F), "
            f"(N, S, F), (N, S, F) with F a multiple of the heads, or (N, T, 3 F) alone{as_image(q.shape)}"
        )
    (n, t), s, d = q.shape[:2], keys[0], f // heads
    if past is not None and past < 0:
        raise ShapeError(f"[attention] past is {past}; it must be at least 0")
    scale = float(d**-0.5 if scale is None else scale)
    sizes = (n, t, s, heads, d, s if past is None else past, int(fused), scale, *drawn("attention", dropout), 0)
    parts = tuple(tokens(x) for x in given)
    memories = [x.memory for x in parts] * (3 if fused else 1)
    y = empty((n * t, f), "lanes")
    lse, saved = current().alloc(4 * y.floats // d), y.memory
    current().emit("attention_forward", saved, lse, *memories, *sizes)

    def backward(dy: Tensor) -> tuple[Tensor, ...]:
        gradients = tuple(empty(x.shape, "lanes") for x in parts)
        to = [g.memory for g in gradients] * (3 if fused else 1)
        current().emit("attention_backward", *to, dy.memory, saved, lse, *memories, *sizes)
        return gradients

    return reshape(attach(y, parts, backward), n, t, f)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(query key^T scale) value of (N, H, T, D), (N, H, S, D) and (N, H, S, D): (N, H, T, D).

    is_causal: query i sees the keys up to i. dropout_p: that of softmax's results, in evaluation as well: give 0 there.
    `attention` is the same without moving the heads.
    """
    if any(t.ndim != 4 or t.shape[1] != query.shape[1] for t in (query, key, value)):
        raise ShapeError(
            f"[scaled_dot_product_attention] shapes {query.shape}, {key.shape}, {value.shape}; they must be "
            "(N, H, T, D), (N, H, S, D) and (N, H, S, D)"
        )
    q, k, v = (reshape(permute(t, 0, 2, 1, 3), t.shape[0], t.shape[2], -1) for t in (query, key, value))
    y = attention(q, k, v, query.shape[1], 0 if is_causal else None, scale, dropout_p)
    return permute(reshape(y, *y.shape[:2], query.shape[1], -1), 0, 2, 1, 3)
