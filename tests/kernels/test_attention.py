"""Attention: what one token gets does not depend on what is computed beside it, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import reference as R

from odyssey import Tensor, nn
from odyssey import functional as F
from odyssey.core.program import Eager, using
from odyssey.errors import ConfigError, ShapeError


def arrays(n, t, s, f, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, length, f)).astype(np.float32) for length in (t, s, s, t)]


def computed(q, k, v, dy, heads, past, dropout=0.0, seed=0, step=0, first=0, layer=0):
    """The result and the gradients of q, k and v; of sequences from number `first` of the global
    batch on.
    """
    executor = Eager()
    executor.context.seed, executor.context.step, executor.context.first = seed, step, first
    executor.layer = layer
    with using(executor):
        given = [Tensor(a, requires_grad=True) for a in (q, k, v)]
        y = F.attention(*given, heads, past, dropout=dropout)
        y.backward(dy)
        return [y.numpy(), *(t.grad.numpy() for t in given)]


def by_pytorch(q, k, v, dy, heads, past, kept, p):
    """The same in float64; kept: which weights (N, T, heads, S) stay."""
    torch = pytest.importorskip("torch")
    given = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (q, k, v)]
    n, t, f = q.shape
    a, b, c = (x.reshape(n, x.shape[1], heads, -1).transpose(1, 2) for x in given)
    scores = a @ b.transpose(2, 3) * (f // heads) ** -0.5
    seen = torch.arange(scores.shape[3]) <= torch.arange(t)[:, None] + (
        scores.shape[3] if past is None else past
    )
    weights = (
        scores.masked_fill(~seen, -torch.inf).softmax(3)
        * torch.tensor(kept).transpose(1, 2)
        / (1 - p)
    )
    y = (weights @ c).transpose(1, 2).reshape(n, t, f)
    y.backward(torch.tensor(dy, dtype=torch.float64))
    return [y.detach().numpy(), *(x.grad.numpy() for x in given)]


def masked(case):
    """A random mask, of the shapes, kinds and densities that there are, and what it adds to
    scores.
    """
    rng = np.random.default_rng(case)
    n, t, s, heads = (int(rng.integers(1, top)) for top in (5, 50, 50, 4))
    shapes = (
        (s,),
        (t, s),
        (n, 1, 1, s),
        (n, 1, t, s),
        (1, heads, t, s),
        (n, heads, t, s),
        (n, heads, 1, s),
    )
    shape, p = shapes[case % len(shapes)], [0.1, 0.6, 1.0][case % 3]
    seen = rng.random(shape) < p
    bias = np.where(seen, rng.standard_normal(shape), -np.inf).astype(np.float32)
    mask = (seen, bias, Tensor(seen, dtype=np.int32), Tensor(seen) > 0)[case % 4]
    return (n, t, s, heads), mask, bias if case % 4 == 1 else np.where(seen, 0, -np.inf)


@pytest.mark.parametrize("case", range(60))
def test_masks_have_the_gradients_of_pytorch(case):
    torch = pytest.importorskip("torch")
    (n, t, s, heads), mask, bias = masked(case)
    q, k, v, dy = arrays(n, t, s, heads * (1 + case % 9), case)
    by_head = [a.reshape(n, a.shape[1], heads, -1).transpose(0, 2, 1, 3) for a in (q, k, v, dy)]
    ours = [Tensor(a, requires_grad=True) for a in by_head[:3]]
    y = F.scaled_dot_product_attention(*ours, mask, is_causal=case % 5 == 0)
    y.backward(by_head[3])
    theirs = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in by_head[:3]]
    scores = theirs[0] @ theirs[1].transpose(2, 3) * q.shape[2] ** -0.5 * heads**0.5 + torch.tensor(
        bias
    )
    if case % 5 == 0:
        scores = scores.masked_fill(torch.arange(s) > torch.arange(t)[:, None], -torch.inf)
    nothing = torch.isinf(scores).all(-1, keepdim=True)
    # a query that sees no key gives 0
    wanted = scores.masked_fill(nothing, 0).softmax(-1) * ~nothing @ theirs[2]
    wanted.backward(torch.tensor(by_head[3].copy(), dtype=torch.float64))
    found, right = ([y, *(a.grad for a in ours)], [wanted.detach(), *(a.grad for a in theirs)])
    for a, b in zip(found, right, strict=True):
        assert np.abs(a.numpy() - b.numpy()).max() <= 2e-5 * max(1, np.abs(b.numpy()).max())


@pytest.mark.parametrize("case", range(30))
def test_padding_changes_no_bit(case):
    """A sequence with padding in front, in between and behind has the bits that it has alone,
    gradients as well.
    """
    rng = np.random.default_rng(case)
    heads, s = int(rng.integers(1, 4)), int(rng.integers(1, 60))
    q, k, v, dy = arrays(3, s, s, heads * int(rng.integers(1, 12)), case)
    seen = rng.random((3, s)) < 0.7
    # a sequence of padding alone, and one that has a token at least
    seen[1], seen[2, 0] = False, True
    past = None if case % 2 else 0
    given = [Tensor(a, requires_grad=True) for a in (q, k, v)]
    y = F.attention(*given, heads, past, mask=seen[:, None, None])
    y.backward(dy * seen[..., None])  # the loss does not look at padding
    for i, mine in enumerate(seen):
        found = [y.numpy()[i], *(x.grad.numpy()[i] for x in given)]
        if not mine.any():
            assert not any(a.any() for a in found)
            continue
        alone = computed(*(a[i : i + 1, mine] for a in (q, k, v, dy)), heads, past)
        for a, b in zip(found, alone, strict=True):
            assert np.array_equal(a[mine], b[0])
        assert not any(a[~mine].any() for a in found[2:])


@pytest.mark.parametrize("case", range(6))
def test_a_batch_with_padding_trains_as_pytorchs(case):
    """nn.MultiheadAttention, with masks in PyTorch's conventions."""
    torch = pytest.importorskip("torch")
    rng, (x, other, *_) = np.random.default_rng(case), arrays(3, 5, 9, 12, case)
    ours, theirs = (
        nn.MultiheadAttention(12, 3, batch_first=True),
        torch.nn.MultiheadAttention(12, 3, batch_first=True),
    )
    ours.load_state_dict({name: p.detach().numpy() for name, p in theirs.state_dict().items()})
    keys = x if case % 2 else other
    s = keys.shape[1]
    padding = np.arange(s) >= rng.integers(1, s + 1, (3, 1))
    mask = (None, rng.random((5, s)) < 0.3, rng.standard_normal((9, 5, s)).astype(np.float32))[
        case % 3
    ]
    if mask is not None and case % 3 == 1:
        mask[:, 0] = False  # every query sees something
    to = [lambda a: None if a is None else torch.tensor(a), lambda a: a]
    wanted, _ = theirs(
        *map(torch.tensor, (x, keys, keys)),
        to[0](padding),
        need_weights=False,
        attn_mask=to[0](mask),
    )
    inputs = [Tensor(x), Tensor(keys), Tensor(keys)] if case % 2 == 0 else [Tensor(x)] * 3
    y, nothing = ours(
        *inputs, key_padding_mask=Tensor(padding) > 0, need_weights=False, attn_mask=mask
    )
    assert nothing is None and np.abs(y.numpy() - wanted.detach().numpy()).max() < 1e-6
    y.sum().backward()
    wanted.sum().backward()
    for name, p in theirs.named_parameters():
        assert (
            np.abs(dict(ours.named_parameters())[name].grad.numpy() - p.grad.numpy()).max() < 2e-5
        )


def test_masks_that_do_not_fit():
    x = Tensor(np.zeros((2, 3, 4)))
    for shape in ((2,), (2, 3), (2, 2, 2, 3), (1, 1, 1, 1, 3)):
        with pytest.raises(ShapeError, match=r"scores \(2, 2, 3, 3\); give \(T, S\)"):
            F.attention(x, x, x, 2, mask=np.ones(shape, bool))
    with pytest.raises(
        ShapeError, match="with a gradient, .* one that is learnt is added to q @ k"
    ):
        F.attention(x, x, x, 2, mask=Tensor(np.zeros((3, 3)), requires_grad=True))
    with pytest.raises(ConfigError, match="weights are not kept"):
        nn.MultiheadAttention(4, 2)(x, x, x, need_weights=True)


def kept(n, t, s, heads, p, seed, step, first, layer):
    """Which weights stay: those of dropout over tokens with heads times S features, S rounded up
    to a multiple of 4.
    """
    wide = -(-s // 4) * 4
    return R.dropout_kept((n * t, heads * wide), p, seed, step, first * t, layer).reshape(
        n, t, heads, wide
    )[..., :s]


@pytest.mark.parametrize("case", range(40))
def test_dropout_has_the_gradients_of_pytorch_with_the_same_mask(case):
    rng = np.random.default_rng(case)
    n, t, heads = (int(rng.integers(1, top)) for top in (6, 70, 4))
    fused, p = case % 2 == 0, float(rng.choice([0.1, 0.5, 0.9]))
    s = t if fused else int(rng.integers(1, 70))
    f, past = heads * int(rng.integers(1, 20)), [0, None, int(rng.integers(0, 70))][case % 3]
    counters = {
        "seed": int(rng.integers(0, 2**62)),
        "step": case,
        "first": int(rng.integers(0, 1000)),
        "layer": case,
    }
    q, k, v, dy = arrays(n, t, s, f, case)
    wanted = by_pytorch(q, k, v, dy, heads, past, kept(n, t, s, heads, p, **counters), p)
    found = computed(q, k, v, dy, heads, past, p, **counters)
    for a, b in zip(found, wanted, strict=True):
        assert np.abs(a - b).max() <= 2e-5 * max(1, np.abs(b).max())
    if fused:
        executor = Eager()
        executor.context.seed, executor.context.step = counters["seed"], counters["step"]
        executor.context.first, executor.layer = counters["first"], counters["layer"]
        with using(executor):
            x = Tensor(np.concatenate((q, k, v), 2), requires_grad=True)
            y = F.attention(x, None, None, heads, past, dropout=p)
            y.backward(dy)
            assert np.array_equal(y.numpy(), found[0])
            assert np.array_equal(x.grad.numpy(), np.concatenate(found[1:], 2))


def test_what_dropout_keeps_has_the_mean_of_all():
    ones = np.ones((8, 64, 12), np.float32)
    y = F.attention(*map(Tensor, np.random.default_rng(0).standard_normal((2, 8, 64, 12)).astype(np.float32)),
                    Tensor(ones), 3, dropout=0.4).numpy()  # fmt: skip
    assert y.mean() == pytest.approx(1, abs=0.01)
    assert y.std() > 0.05
    # of a head all features get the same weights
    assert np.ptp(y.reshape(8, 64, 3, 4), axis=3).max() < 1e-5


def test_every_weight_is_dropped_by_itself():
    """Of equal keys whose values are unit vectors a result shows what stayed: other keys for
    each head and query.
    """
    n, t, heads = 4, 32, 2
    q = np.zeros((n, t, heads * t), np.float32)
    y = F.attention(
        Tensor(q),
        Tensor(q),
        Tensor(np.tile(np.eye(t, dtype=np.float32), (n, 1, heads))),
        heads,
        dropout=0.5,
    )
    found = y.numpy().reshape(n * t * heads, t) > 0
    assert found.mean() == pytest.approx(0.5, abs=0.02)
    assert len({row.tobytes() for row in found}) == n * t * heads
    assert np.abs(found.mean(axis=0) - 0.5).max() < 0.12


@pytest.mark.parametrize(
    ("n", "t", "s", "past"), [(4, 7, 7, 0), (3, 33, 50, 17), (5, 1, 13, 12), (2, 64, 64, 0)]
)
def test_a_sequence_has_the_same_dropout_in_any_shard(n, t, s, past):
    given = arrays(n, t, s, 12)
    together = computed(*given, 2, past, 0.3, seed=3, first=5)
    for i in range(n):
        alone = computed(*(a[i : i + 1] for a in given), 2, past, 0.3, seed=3, first=5 + i)
        assert all(np.array_equal(a[0], b[i]) for a, b in zip(alone, together, strict=True))


def test_without_dropout_nothing_is_counted():
    executor, given = Eager(), arrays(2, 5, 5, 6)
    with using(executor):
        plain = F.attention(*map(Tensor, given[:3]), 2).numpy()
        assert np.array_equal(F.attention(*map(Tensor, given[:3]), 2, dropout=0.0).numpy(), plain)
        layer = nn.MultiheadAttention(6, 2, dropout=0.5).eval()
        layer(Tensor(given[0]))
        assert executor.layer == 0
        layer.train()(Tensor(given[0]))
        F.scaled_dot_product_attention(*(Tensor(a[:, None]) for a in given[:3]), dropout_p=0.1)
        assert executor.layer == 2


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_a_dropout_that_is_no_probability(p):
    x = Tensor(np.zeros((1, 1, 3, 4)))
    with pytest.raises(ShapeError, match=f"p is {p}; it must be at least 0 and below 1"):
        F.scaled_dot_product_attention(x, x, x, dropout_p=p)
    with pytest.raises(ConfigError, match=f"p is {p}; it must be at least 0 and below 1"):
        nn.MultiheadAttention(4, 2, dropout=p)


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


def stays_in_its_sequence(computed, q, k, v, dy):
    """Of three sequences the middle one becomes not a number, and it alone. computed: as above,
    of two heads.
    """
    before = computed(q, k, v, dy, 2, 0)
    for a in (q, k, v, dy):
        a[1] = np.nan
    after = computed(q, k, v, dy, 2, 0)
    assert all(np.array_equal(a[[0, 2]], b[[0, 2]]) for a, b in zip(before, after, strict=True))
    assert np.isnan(after[0][1]).all()


def test_what_is_not_a_number_stays_in_its_sequence():
    stays_in_its_sequence(computed, *arrays(3, 7, 7, 6))


def test_a_query_has_the_same_bits_with_the_keys_of_an_earlier_call():
    q, k, v, _ = arrays(2, 40, 40, 12)
    whole = F.attention(Tensor(q), Tensor(k), Tensor(v), 3, 0).numpy()
    for i in (0, 15, 16, 39):
        one = F.attention(
            Tensor(q[:, i : i + 1]), Tensor(k[:, : i + 1]), Tensor(v[:, : i + 1]), 3, i
        ).numpy()
        assert np.array_equal(one[:, 0], whole[:, i])


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, 4), (2, 3, 6), (2, 3, 6)),
        ((2, 3, 4), (1, 3, 4), (2, 3, 4)),
        ((2, 4), (2, 4), (2, 4)),
        ((1, 2, 5),) * 3,
    ],
)
def test_shapes_that_do_not_fit(shapes):
    with pytest.raises(ShapeError, match="and 2 heads"):
        F.attention(*(Tensor(np.zeros(s)) for s in shapes), 2)


def test_a_bias_where_the_dropout_is():
    with pytest.raises(ConfigError, match="dropout is False, which is no number; say bias=False"):
        nn.MultiheadAttention(4, 2, False)


def test_multihead_attention_is_pytorchs():
    torch = pytest.importorskip("torch")
    ours, theirs = (
        nn.MultiheadAttention(12, 3),
        torch.nn.MultiheadAttention(12, 3, batch_first=True),
    )
    ours.load_state_dict({name: p.detach().numpy() for name, p in theirs.state_dict().items()})
    x, other, *_ = arrays(3, 5, 9, 12)
    for given in ((x,), (x, other), (x, other, other[:, ::-1].copy())):
        key, value = (*given, *given[-1:], *given[-1:])[1:3]
        wanted, _ = theirs(*map(torch.tensor, (x, key, value)))
        found = ours(*map(Tensor, given))
        found = found[0] if len(given) == 3 else found
        assert np.abs(found.numpy() - wanted.detach().numpy()).max() < 1e-6
