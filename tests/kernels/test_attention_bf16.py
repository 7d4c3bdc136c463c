"""Attention in bf16: against float64 of the rounded operands, and the same bits whatever is
computed beside a token.

With AMX products are of rounded operands (mojo/kernels/attention_amx.mojo), everywhere else they
stay float32.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_attention import arrays, kept, stays_in_its_sequence
from test_precision import bf16

from odyssey import DistributedTrainer, Tensor, autocast, data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.compile import library as build
from odyssey.core.program import Eager, using

TILES = "amx" in build.plan(build.source_root()).cpu


def exact(x):
    return np.asarray(x, np.float64)


def rounded(x):
    return bf16(np.asarray(x, np.float32)).astype(np.float64)


def reference(q, k, v, dy, heads, seen, added, factors, cast):
    """The result and the gradients of q, k and v in float64; the operands of products are what
    `cast` makes of them.

    seen (N, H, T, S); added, to scores, and factors, of dropout: broadcast to that.
    """
    q, k, v, dy = (np.moveaxis(a.reshape(*a.shape[:2], heads, -1), 2, 1) for a in (q, k, v, dy))
    scale = q.shape[3] ** -0.5
    scores = np.where(
        seen, cast(q) @ cast(k).swapaxes(2, 3) * scale + np.where(seen, added, 0), -np.inf
    )
    most = scores.max(3, keepdims=True)
    most = np.where(np.isfinite(most), most, 0)
    e = np.exp(scores - most)
    total = e.sum(3, keepdims=True)
    total[total == 0] = 1
    y = cast(e * factors) @ cast(v) / total
    p = e / total
    ds = (
        p
        * ((cast(dy) @ cast(v).swapaxes(2, 3)) * factors - (cast(dy) * y).sum(3, keepdims=True))
        * scale
    )
    dv = cast(p * factors).swapaxes(2, 3) @ cast(dy)
    found = y, cast(ds) @ cast(k), cast(ds).swapaxes(2, 3) @ cast(q), dv
    return [np.moveaxis(a, 1, 2).reshape(a.shape[0], a.shape[2], -1) for a in found]


def computed(
    q,
    k,
    v,
    dy,
    heads,
    past=None,
    dropout=0.0,
    mask=None,
    fused=False,
    seed=0,
    step=0,
    first=0,
    layer=0,
):
    executor = Eager("bf16")
    executor.context.seed, executor.context.step, executor.context.first = seed, step, first
    executor.layer = layer
    with using(executor):
        given = [Tensor(np.concatenate((q, k, v), 2))] if fused else [Tensor(a) for a in (q, k, v)]
        for t in given:
            t.requires_grad = True
        y = F.attention(
            *(given if not fused else (*given, None, None)), heads, past, dropout=dropout, mask=mask
        )
        y.backward(dy)
        gradients = (
            np.split(given[0].grad.numpy(), 3, 2) if fused else [t.grad.numpy() for t in given]
        )
        return [y.numpy(), *gradients]


def off(found, wanted):
    return max(
        np.abs(a - b).max() / max(np.abs(b).max(), 1) for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("case", range(80))
def test_random_cases(case):
    rng = np.random.default_rng(case)
    n, heads = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    t, s = (int(rng.choice([rng.integers(1, 20), rng.integers(20, 300)])) for _ in range(2))
    fused, d = case % 3 == 0, int(rng.choice([1, 7, 16, 24, 32, 33, 64, 80]))
    s = t if fused else s
    past = (0, None, int(rng.integers(0, 40)))[case % 4 % 3]
    p = (0.0, 0.3)[case % 5 == 0]
    q, k, v, dy = arrays(n, t, s, heads * d, case)
    seen = np.arange(s) <= np.arange(t)[:, None] + (s if past is None else past)
    added, mask = np.zeros((1, 1, 1, s), np.float32), None
    if case % 7 in (1, 4):
        shape = ((n, 1, 1, s), (1, heads, t, s))[case % 2]
        mask = added = np.where(
            rng.random(shape) < 0.7, rng.standard_normal(shape), -np.inf
        ).astype(np.float32)
    counters = {
        "seed": int(rng.integers(0, 2**62)),
        "step": case,
        "first": int(rng.integers(0, 1000)),
        "layer": case,
    }
    factors = np.moveaxis(kept(n, t, s, heads, p, **counters), 2, 1) / (1 - p) if p else np.ones(1)
    found = computed(q, k, v, dy, heads, past, p, mask, fused, **counters)
    seen = seen & np.isfinite(added)
    given = q, k, v, dy, heads, np.broadcast_to(seen, (n, heads, t, s)), added, factors
    assert off(found, reference(*given, rounded if TILES else exact)) < (4e-3 if TILES else 3e-5)
    assert off(found, reference(*given, exact)) < 2.0**-5


@pytest.mark.parametrize(
    ("n", "t", "s", "f", "heads", "past"),
    [
        (4, 7, 7, 6, 2, 0),
        (3, 33, 50, 20, 2, 17),
        (5, 1, 13, 8, 1, 12),
        (2, 64, 64, 128, 2, 0),
        (3, 49, 81, 66, 2, 32),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_sequence_has_the_same_bits_beside_any_others(n, t, s, f, heads, past, dropout):
    given = arrays(n, t, s, f)
    together = computed(*given, heads, past, dropout, first=5)
    for i in range(n):
        alone = computed(*(a[i : i + 1] for a in given), heads, past, dropout, first=5 + i)
        assert all(np.array_equal(a[0], b[i]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("t", [40, 100])
def test_a_query_has_the_same_bits_with_the_keys_of_an_earlier_call(t):
    q, k, v, _ = arrays(2, t, t, 3 * 36)
    with autocast("bf16"):
        whole = F.attention(Tensor(q), Tensor(k), Tensor(v), 3, 0).numpy()
        for i in (0, 15, 16, 31, 32, t - 1):
            for first in {i, max(0, i - 5), i // 2}:
                some = F.attention(
                    Tensor(q[:, first : i + 1]),
                    Tensor(k[:, : i + 1]),
                    Tensor(v[:, : i + 1]),
                    3,
                    first,
                )
                assert np.array_equal(some.numpy(), whole[:, first : i + 1])


@pytest.mark.parametrize("case", range(12))
def test_padding_behind_a_sequence_changes_no_bit(case):
    rng = np.random.default_rng(case)
    heads, s = int(rng.integers(1, 4)), int(rng.integers(2, 90))
    q, k, v, dy = arrays(2, s, s, heads * int(rng.integers(1, 40)), case)
    own = int(rng.integers(1, s))
    seen = np.arange(s) < own
    found = computed(q, k, v, dy * seen[:, None], heads, mask=seen)
    alone = computed(*(a[:, :own] for a in (q, k, v, dy)), heads)
    for a, b in zip(found, alone, strict=True):
        assert np.array_equal(a[:, :own], b)
    assert not any(a[:, own:].any() for a in found[2:])


def test_what_is_not_a_number_stays_in_its_sequence():
    stays_in_its_sequence(computed, *arrays(3, 23, 23, 66))


def test_only_bf16_rounds():
    given = arrays(2, 33, 33, 64)
    with autocast("fp32"):
        plain = F.attention(*map(Tensor, given[:3]), 2).numpy()
    with autocast("fp16"):
        assert np.array_equal(F.attention(*map(Tensor, given[:3]), 2).numpy(), plain)
    with autocast("bf16"):
        assert np.array_equal(F.attention(*map(Tensor, given[:3]), 2).numpy(), plain) == (not TILES)


def trained(**settings):
    """The hash of the weights of a GPT after three steps."""
    sizes = {"vocab_size": 29, "context": 45, "layers": 2, "heads": 3, "width": 48, "dropout": 0.2}
    trainer = DistributedTrainer(
        nn.models.build("gpt", seed=3, **sizes),
        optim.AdamW(lr=2e-3),
        precision="bf16",
        shard_size=2,
        seed=5,
        **{"backend": "local", "threads": 1, **settings},
    )
    ids = np.random.default_rng(7).integers(0, 29, (21, 46)).astype(np.int32)
    for batch in data.DataLoader(data.arrays(ids[:, :-1].copy(), ids[:, 1:].copy()), batch_size=7):
        trainer.train_step(batch)
    return trainer.weights_sha256()


@pytest.mark.parametrize("ranks", [0, 2, 3])
def test_a_gpt_has_the_same_weights_on_any_number_of_threads_and_ranks(ranks):
    alone = trained()
    if not ranks:
        assert trained(threads=2) == alone == trained(execution="eager")
        return
    assert set(mock.run(ranks, lambda c: trained(comm=c))) == {alone}
