"""`odyssey plan`: a rank that is rehearsed alone has the memory and sends the bytes of one among
others.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim
from odyssey.audit import planner, verify
from odyssey.audit.planner import Link, Planned, Rehearsed
from odyssey.comm import mock, stand_in
from odyssey.comm.stand_in import StandIn
from odyssey.parallel import costs
from odyssey.parallel.mesh import Mesh

SAMPLES = 48


def trainer_of(comm, seed, settings):
    """A trainer of a random network, and a batch for it."""
    draw = random.Random(seed)
    nn.manual_seed(1)
    sizes = [draw.choice((8, 24, 40, 72)) for _ in range(draw.randint(3, 5))]
    layers = [
        layer
        for a, b in zip([6, *sizes], [*sizes, 3], strict=True)
        for layer in (nn.Linear(a, b), nn.ReLU())
    ]
    x = np.random.default_rng(seed).standard_normal((SAMPLES, 6)).astype(np.float32)
    batch = next(iter(data.DataLoader(data.arrays(x, np.arange(SAMPLES) % 3), batch_size=SAMPLES)))
    settings = {
        "shard_size": draw.choice((4, 8, 16)),
        "device": "cpu",
        "threads": draw.choice((1, 2)),
        **settings,
    }
    return DistributedTrainer(
        nn.Sequential(*layers[:-1]), optim.Adam(), comm=comm, **settings
    ), batch


def trained(comm, seed, settings):
    """Memory and bytes of a step of one rank of a world that is there."""
    trainer, batch = trainer_of(comm, seed, settings)
    trainer.train_step(batch)
    before = trainer.traffic()[0]
    trainer.train_step(batch)
    return trainer.memory(), trainer.traffic()[0] - before


def rehearsed(rank, ranks, per_node, seed, settings, said):
    """The same of a rank that is alone."""
    trainer, batch = trainer_of(StandIn(rank, ranks, per_node, said), seed, settings)
    trainer.rehearse(batch, prepare=True)
    prepared = trainer.memory()
    trainer.rehearse(batch)
    # known before anything is computed
    assert sum(prepared.values()) == sum(trainer.memory().values())
    before = trainer.traffic()[0]
    trainer.rehearse(batch)
    return trainer.memory(), trainer.traffic()[0] - before


def drawn(seed):
    """A layout and how many ranks share a machine: (settings, ranks, per_node)."""
    draw = random.Random(seed)
    dp, pp, tp = draw.choice(
        ((2, 1, 1), (4, 1, 1), (6, 1, 1), (3, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2))
    )
    zero = draw.choice((0, 1, 2, 3) if pp * tp == 1 else (0, 1) if dp > 1 else (0,))
    ranks = dp * pp * tp
    per_node = draw.choice([n for n in range(1, ranks) if ranks % n == 0]) if pp * tp == 1 else 1
    settings = {
        "mesh": Mesh(dp, pp, tp),
        "zero": zero,
        "reduction": "hierarchical",
        "ranks_per_node": per_node,
    }
    return {**settings, **({"shard_size": 16} if tp > 1 else {})}, ranks, per_node


@pytest.mark.parametrize("seed", range(24))
def test_a_rank_alone_has_the_memory_and_the_bytes_of_one_in_a_world(seed, monkeypatch):
    settings, ranks, per_node = drawn(seed)
    # the same cut
    monkeypatch.setattr(costs, "seconds", lambda records, *_: np.arange(len(records)) % 7 + 1.0)
    world, said = mock.run(ranks, trained, seed, settings), {}
    for rank in range(ranks):
        assert rehearsed(rank, ranks, per_node, seed, settings, said) == world[rank], (
            f"{settings}, rank {rank}"
        )


@pytest.mark.parametrize("seed", range(24, 48))
def test_what_a_rank_says_that_it_sends_is_what_it_hands_to_its_calls(seed, monkeypatch):
    """Random layouts: the data of gradients, of parameters that ZeRO brings back, and of
    exchanges in a model.

    Statistics, votes and envelopes, which are small, are not counted.
    """
    monkeypatch.setattr(costs, "seconds", lambda records, *_: np.arange(len(records)) % 7 + 1.0)
    monkeypatch.setattr(stand_in, "distances", lambda size: [])  # words of calls
    settings, ranks, _ = drawn(seed)
    said: dict = {}
    for rank in range(ranks):
        comm = StandIn(rank, ranks, 1, said)
        trainer, batch = trainer_of(comm, seed, {**settings, "ranks_per_node": 1})
        trainer.rehearse(batch)
        before, sent = comm.traffic.numbers(), trainer.traffic()[0]
        trainer.rehearse(batch)
        after, sent = comm.traffic.numbers(), trainer.traffic()[0] - sent
        handed = after[2] + after[4] - before[2] - before[4]
        assert 0 <= handed - sent <= 2048, (
            f"{settings}, rank {rank}: {handed} handed, {sent} counted"
        )


def test_what_a_rank_sends_is_counted_by_link():
    """Of an all-gather and of a message: to the neighbour on its machine, and to the others."""
    comm = StandIn(1, 4, 2, {})
    assert (comm.local_rank, comm.local_size, comm.machines) == (1, 2, [0, 0, 1, 1])
    comm.all_gather_v(np.zeros(40, np.float32), [(0, 10), (10, 30), (30, 35), (35, 40)])
    calls, near, near_bytes, far, far_bytes = comm.traffic.numbers()
    assert (
        (calls, near_bytes % 32, far_bytes % 32) == (1, 80 % 32, 160 % 32)
        and near_bytes >= 80
        and far_bytes >= 160
    )
    comm.send(np.zeros(8, np.uint8), 0)
    comm.send(np.zeros(8, np.uint8), 3)
    assert comm.traffic.numbers() == [1, near + 2, near_bytes + 8, far + 2, far_bytes + 8]
    pair = comm.subgroup([1, 3])
    assert (pair.ranks, pair.rank, pair.local_size) == ((1, 3), 0, 1)
    assert comm.all_gather(np.array([7])).ravel().tolist() == [7] * 4
    assert comm.recv(np.ones(3), 2).tolist() == [0] * 3


def test_small_broadcasts_are_those_of_the_rank_that_was_rehearsed_before():
    said = {}
    StandIn(0, 2, 1, said).broadcast(np.array([1.0, 2.0]))
    assert StandIn(1, 2, 1, said).broadcast(np.zeros(2)).tolist() == [1, 2]


def test_the_layouts_that_are_looked_at():
    assert list(planner.layouts(1)) == ["dp=1"]
    assert list(planner.layouts(2)) == [
        "dp=2",
        "dp=2,zero=1",
        "dp=2,zero=2",
        "dp=2,zero=3",
        "pp=2",
        "tp=2",
    ]
    for ranks in (3, 4, 12, 64, 1000):
        found = list(planner.layouts(ranks))
        assert len(set(found)) == len(found) and {
            verify.ranks(verify.parse(text)) for text in found
        } == {ranks}


def test_the_shard_size_that_a_world_wants():
    found = Rehearsed({}, 8, 64, 8, 1)
    assert (
        planner.shards(found, 8, 4)
        == "a batch of 64 samples is 8 shards of 8, which suits 8 replicas"
    )
    assert "so of 16 replicas 8 are idle: each has one with a shard size of 4" in planner.shards(
        found, 16, 4
    )
    odd = planner.shards(Rehearsed({}, 8, 96, 12, 3), 4, 1)
    assert (
        odd.startswith(
            "a batch of 96 samples is 12 shards of 8: the sum of 12 shards takes 1.33 times"
        )
        and "size" in odd
    )


def measured(seconds, shards=4, traffic=(0, 0, 0, 0, 0)):
    return Rehearsed({}, 1, 4, 4, shards, traffic=traffic, seconds=seconds)


def test_seconds_of_a_step():
    near, far = Link(1.0, 10.0), Link(2.0, 5.0)
    assert planner.seconds([measured(8)], near, far) == 8
    # the first has all four shards
    assert planner.seconds([measured(8), measured(4)], near, far) == 2 + 1 + 3 * 2
    assert planner.seconds([measured(8, traffic=(3, 2, 20, 4, 10))], near, far) == 8 + 3 + 2 + 8 + 2


def test_the_best_layouts():
    plans = [
        Planned("a", 10, 1.0),
        Planned("b", 5, 1.005),
        Planned("c", 1, 0.1, why="no"),
        Planned("d", 7, 3.0),
    ]
    assert [p.layout for p in planner.best(plans)] == ["b", "a", "d"]
    assert planner.best([plans[2]]) == []
