"""Attention whose heads are shared by ranks: random GPTs have the bits of one process on every
layout, also where they go on from another's checkpoint. One shard's program is in
test_tensor_parallel.py.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from odyssey import data, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.core.arena import Arena
from odyssey.core.program import Recorder, using
from odyssey.core.tensor import empty
from odyssey.parallel import tensor_parallel as tp
from odyssey.parallel.mesh import Mesh
from odyssey.train.trainer import DistributedTrainer

LAYOUTS = [
    (2, {"mesh": Mesh(tp=2)}),
    (4, {"mesh": Mesh(dp=2, tp=2), "zero": 1, "rebalance": True}),
    (4, {"mesh": Mesh(tp=4)}),
    (3, {"mesh": Mesh(tp=3), "threads": 2}),
    (4, {"mesh": Mesh(pp=2, tp=2)}),
]


def drawn(seed):
    """A GPT that can be made again, and its samples."""
    rng = random.Random(f"heads {seed}")
    heads, context, vocabulary = rng.choice([2, 4, 4, 8]), rng.randint(2, 20), rng.randint(3, 40)
    settings = {"layers": rng.randint(1, 2), "heads": heads, "width": heads * rng.randint(2, 7)}
    settings |= {
        "dropout": rng.choice([0.0, 0.2]),
        "bias": rng.random() < 0.5,
        "tied": rng.random() < 0.5,
    }
    ids = np.random.default_rng(seed).integers(0, vocabulary, (23, context + 1)).astype(np.int32)
    return lambda: nn.GPT(vocabulary, context, **settings), data.arrays(ids[:, :-1], ids[:, 1:])


def trained(comm, seed, settings, folder=None, steps=None):
    """What a rank holds after three steps, or after so many."""
    build, samples = drawn(seed)
    nn.manual_seed(seed)
    settings = {"threads": 1, "shard_size": 5, "clip_norm": 0.5, **settings}
    trainer = DistributedTrainer(build(), optim.AdamW(lr=0.01), comm=comm, device="cpu", **settings)
    loader = data.DataLoader(samples, batch_size=8, shuffle=True)
    losses = trainer.fit(
        loader, epochs=1, steps=steps, checkpoint_dir=folder, checkpoint_every=1 if folder else None
    )
    evaluation = trainer.evaluate(samples)
    state = {
        k: v.tobytes()
        for k, v in trainer.training_state.optimizer_state().items()
        if isinstance(v, np.ndarray)
    }
    return trainer.weights_sha256(), state, losses.train_loss, evaluation.loss, trainer.grad_norm


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))]
)
def test_the_bits_of_one_process(seed, tmp_path):
    (one,) = mock.run(1, trained, seed, {})
    for number, (ranks, settings) in enumerate(LAYOUTS):
        assert mock.run(ranks, trained, seed, settings) == [one] * ranks, settings
        # goes on from two other layouts, one of which may be a process alone
        (first, a), (second, b) = ([*LAYOUTS, (1, {})][(number + seed + i) % 6] for i in (1, 3))
        folder = tmp_path / str(number)
        mock.run(first, trained, seed, a, folder, 1)
        mock.run(second, trained, seed, b, folder, 2)
        found = mock.run(ranks, trained, seed, settings, folder)
        assert {(f[0], *f[3:]) for f in found} == {(one[0], *one[3:])} and found[0][1] == one[1]


def shared(size, heads, fused, width=24, tokens=4):
    """Of attention between linear layers, over 16 sequences: each rank's exchanges, and its
    heads (number, first).
    """
    layers = nn.ModuleList(
        nn.Linear(width, 3 * width if fused else width) for _ in range(1 if fused else 3)
    )
    model = nn.ModuleList([layers, nn.Linear(width, width)])
    arena = Arena.of(model.named_parameters())
    recorder = Recorder(arena, 4 * arena.size, 16)
    with using(recorder):
        x = empty((16 * tokens, width), "lanes")
        recorder.close(x.device)
        given = [layer(F.reshape(x, 16, tokens, width)) for layer in layers]
        F.mean(model[1](F.attention(*given, *[None] * (3 - len(given)), heads, 0))).backward()
    found = []
    for rank in range(size):
        records = tp.rewrite(recorder.records, rank, size).records
        meetings = [(r.op, r.phase, r.received(rank)) for r in records if isinstance(r, tp.Pseudo)]
        (attention,) = (r for r in records if r.op == "attention_forward")
        sizes = dict(
            zip(
                attention.declared.sizes,
                attention.args[-len(attention.declared.sizes) :],
                strict=True,
            )
        )
        found.append((meetings, (sizes["H"], sizes["head"])))
    return found


VALUE = 4 * 64 * 24  # bytes of q, of k, of v, of y


def test_heads_are_shared_where_they_divide():
    """Of q, k, v from one layer a rank gets what others have made of its heads: half a value, of
    two and of four.
    """
    for size, heads, mine in ((2, 6, [(3, 0), (3, 3)]), (4, 8, [(2, 0), (2, 2), (2, 4), (2, 6)])):
        for (meetings, own), wanted in zip(shared(size, heads, fused=True), mine, strict=True):
            assert own == wanted
            assert meetings == [
                ("tp_regroup", "forward", VALUE // 2),
                ("tp_sum", "forward", VALUE * (size - 1)),  # of the projection
                ("tp_regroup", "backward", VALUE // 2),
            ]
    for meetings, own in shared(3, 4, fused=False):  # q, k and v of a rank are its heads'
        assert own in ((1, 0), (1, 1), (2, 2)) and [m[:2] for m in meetings] == [
            ("tp_sum", "forward")
        ]
    # 6 q, k, v of 4 features: a rank's 6 would be a head and a half
    for size, heads in ((4, 6), (2, 3), (3, 2)):
        for meetings, own in shared(size, heads, fused=True):
            assert own == (heads, 0) and "tp_regroup" not in [m[0] for m in meetings]
