"""Attention: what one token gets does not depend on what is computed beside it, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from odyssey import Tensor, nn
from odyssey import functional as F
from odyssey.errors import ShapeError


def arrays(n, t, s, f, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, length, f)).astype(np.float32) for length in (t, s, s, t)]


def computed(q, k, v, dy, heads, past):
    """The result and the gradients of q, k and v."""
    given = [Tensor(a, requires_grad=True) for a in (q, k, v)]
    y = F.attention(*given, heads, past)
    y.backward(dy)
    return [y.numpy(), *(t.grad.numpy() for t in given)]


@pytest.mark.parametrize(
    ("n", "t", "s", "f", "heads", "past"),
    [(4, 7, 7, 6, 2, 0), (3, 33, 50, 20, 2, 17), (5, 1, 13, 8, 1, 12), (2, 64, 64, 32, 2, 0)],
)
def test_a_sequence_has_the_same_bits_beside_any_others(n, t, s, f, heads, past):
    given = arrays(n, t, s, f)
    together = computed(*given, heads, past)
    for i in range(n):
        alone = computed(*(a[i : i + 1] for a in given), heads, past)
        assert all(np.array_equal(a[0], b[i]) for a, b in zip(alone, together, strict=True))


def test_what_is_not_a_number_stays_in_its_sequence():
    q, k, v, dy = arrays(3, 7, 7, 6)
    before = computed(q, k, v, dy, 2, 0)
    for a in (q, k, v, dy):
        a[1] = np.nan
    after = computed(q, k, v, dy, 2, 0)
    assert all(np.array_equal(a[[0, 2]], b[[0, 2]]) for a, b in zip(before, after, strict=True))
    assert np.isnan(after[0][1]).all()


def test_a_query_has_the_same_bits_with_the_keys_of_an_earlier_call():
    q, k, v, _ = arrays(2, 40, 40, 12)
    whole = F.attention(Tensor(q), Tensor(k), Tensor(v), 3, 0).numpy()
    for i in (0, 15, 16, 39):
        one = F.attention(Tensor(q[:, i : i + 1]), Tensor(k[:, : i + 1]), Tensor(v[:, : i + 1]), 3, i).numpy()
        assert np.array_equal(one[:, 0], whole[:, i])


@pytest.mark.parametrize(
    "shapes",
    [((2, 3, 4), (2, 3, 6), (2, 3, 6)), ((2, 3, 4), (1, 3, 4), (2, 3, 4)), ((2, 4), (2, 4), (2, 4)), ((1, 2, 5),) * 3],
)
def test_shapes_that_do_not_fit(shapes):
    with pytest.raises(ShapeError, match="and 2 heads"):
        F.attention(*(Tensor(np.zeros(s)) for s in shapes), 2)


def test_multihead_attention_is_pytorchs():
    torch = pytest.importorskip("torch")
    ours, theirs = nn.MultiheadAttention(12, 3), torch.nn.MultiheadAttention(12, 3, batch_first=True)
    ours.load_state_dict({name: p.detach().numpy() for name, p in theirs.state_dict().items()})
    x, other, *_ = arrays(3, 5, 9, 12)
    for given in ((x,), (x, other), (x, other, other[:, ::-1].copy())):
        key, value = (*given, *given[-1:], *given[-1:])[1:3]
        wanted, _ = theirs(*map(torch.tensor, (x, key, value)))
        assert np.abs(ours(*map(Tensor, given)).numpy() - wanted.detach().numpy()).max() < 1e-6
