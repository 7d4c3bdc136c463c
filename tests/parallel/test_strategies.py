"""Reductions between ranks that are threads: what they add, which bits they keep, and several
under way at once.
"""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim
from odyssey.base.registry import provided
from odyssey.comm import mock
from odyssey.errors import CollectiveError, ConfigError
from odyssey.parallel import plan as planning
from odyssey.parallel import strategy as strategies
from odyssey.parallel.mesh import Mesh
from odyssey.parallel.plan import combine
from odyssey.parallel.strategy import MODES, REDUCTIONS, Strategy
from odyssey.settings import recipes

KEEP_THE_TREE = [
    Strategy("tree"),
    Strategy("parameter_server"),
    Strategy("parameter_server", servers=2),
    Strategy("hierarchical"),
    Strategy("hierarchical", ranks_per_node=1),
    Strategy("hierarchical", ranks_per_node=2),
    Strategy("hierarchical", ranks_per_node=3),
]


def gradients(shards: int, floats: int) -> np.ndarray:
    """A gradient per shard, of numbers whose sum depends on the order."""
    rng = np.random.default_rng(shards * 1000 + floats)
    return (
        rng.standard_normal((shards, floats)) * 10.0 ** rng.integers(-4, 4, (shards, floats))
    ).astype(np.float32)


def node_sum(g: np.ndarray, lo: int, n: int) -> np.ndarray:
    """The tree of docs/determinism.md, by its definition."""
    if n == 1:
        return g[lo].copy()
    left = 1 << (n - 1).bit_length() - 1
    return node_sum(g, lo, left) + node_sum(g, lo + left, n - left)


def reduce(
    comm, strategy, g: np.ndarray, workers: int = 1, steps: int = 2, **options
) -> list[np.ndarray]:
    """What a rank gets, step by step; the gradients of step k are scaled by k + 1."""
    shards, floats = g.shape
    plan = planning.make(shards, comm.rank, comm.size, workers, 1)
    made = strategies.make(strategy, comm, plan, floats, workers, **options)
    results = []
    for step in range(steps):
        for node, buffer in plan.partial:
            made.buffers[buffer] = node_sum(g * np.float32(step + 1), *node)
        made.start()
        results.append(made.finish().copy())
    return results, made


@pytest.mark.parametrize("strategy", KEEP_THE_TREE, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_the_bits_of_the_tree(strategy, ranks):
    for shards, floats, workers in (
        (8, 100, 1),
        (5, 33, 1),
        (11, 1000, 2),
        (16, 8, 1),
        (2, 64, 1),
        (7, 16 * ranks, 1),
    ):
        g = gradients(shards, floats)
        done = mock.run(ranks, reduce, strategy, g, workers)
        assert sum(made.bytes_sent for _, made in done) > 0
        for results, _ in done:
            for step, result in enumerate(results):
                assert result.tobytes() == node_sum(g * np.float32(step + 1), 0, shards).tobytes()


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("kind", ["ring", "mpi"])
def test_other_orders_give_the_same_sum_on_all_ranks(kind, ranks):
    for floats in (1, 5, 100, 1000):
        g = gradients(8, floats)
        first = mock.run(ranks, reduce, Strategy(kind), g)
        for results, _ in first:
            for step, result in enumerate(results):
                assert result.tobytes() == first[0][0][step].tobytes()
                exact = g.astype(np.float64).sum(axis=0) * (step + 1)
                scale = np.abs(g).sum(axis=0) * (step + 1)
                assert np.all(np.abs(result - exact) <= 1e-6 * scale)
        again = mock.run(ranks, reduce, Strategy(kind), g)
        assert again[0][0][0].tobytes() == first[0][0][0].tobytes()


def test_a_ring_sends_each_float_as_often_as_it_must():
    """2 (n - 1) / n times the floats, per rank."""
    for results, made in mock.run(4, reduce, Strategy("ring"), gradients(4, 640)):
        assert len(results) == 2
        assert made.bytes_sent == 2 * 4 * 2 * 3 * 160


@pytest.mark.parametrize("kind", [k for k in REDUCTIONS if k != "parameter_server"])
def test_who_has_finished_a_reduction_has_finished_those_before_it(kind):
    """Else a rank that then waits in another call would not look at what the others wait for: a
    ring that goes around and a shorter one behind it, which polls had completed, made ranks
    wait for each other for ever.
    """

    def rounds(comm, seed: int):
        rng = random.Random(1000 * seed + comm.rank)
        plan = planning.make(6, comm.rank, comm.size, 1, 1)
        long = strategies.make(Strategy(kind), comm, plan, 40, 1, shared=False)
        short = strategies.make(Strategy(kind), comm, plan, 40, 1, shared=False, scatter=True)
        for _ in range(4):
            for one in (long, short):
                one.buffers[:] = 1
                one.start()
            for _ in range(rng.randrange(1, 60)):
                if short.poll():
                    break
            short.finish()
            assert not long.lanes.under_way
            comm.barrier()
            long.finish()

    for seed in range(12):
        mock.run(3, rounds, seed)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("kind", [k for k in REDUCTIONS if k != "parameter_server"])
def test_scatter_leaves_each_rank_its_range(kind, ranks):
    g = gradients(6, 200)
    whole = mock.run(ranks, reduce, Strategy(kind), g)
    for rank, (results, made) in enumerate(
        mock.run(ranks, lambda c: reduce(c, Strategy(kind), g, scatter=True))
    ):
        a, b = made.own
        assert made.ranges[rank] == (a, b)
        for step, result in enumerate(results):
            assert result[a:b].tobytes() == whole[0][0][step][a:b].tobytes()


@pytest.mark.parametrize("kind", list(REDUCTIONS))
def test_several_under_way_while_ranks_run_at_their_own_speed(kind):
    """Phases end at other moments on other ranks; their transfers must meet all the same."""
    sizes = (300, 40, 1000, 8)
    inputs = [gradients(8, n) for n in sizes]
    expected = [reduce_alone(kind, g) for g in inputs]

    def rank(comm):
        pause = random.Random(comm.rank)
        plan = planning.make(8, comm.rank, comm.size, 1, 1)
        made = [strategies.make(Strategy(kind), comm, plan, n, 1) for n in sizes]
        for _ in range(5):
            for i, r in enumerate(made):
                for node, buffer in plan.partial:
                    r.buffers[buffer] = node_sum(inputs[i], *node)
                time.sleep(pause.random() * 2e-3)
                r.start()
                for other in made[: i + 1]:
                    other.poll()
            for r, want in zip(made, expected, strict=True):
                assert r.finish().tobytes() == want
                assert r.poll()

    mock.run(3, rank)


def test_polling_hides_no_error():
    """Whoever only looks whether a transfer is over learns as well that the ranks did not call
    the same.
    """

    def rank(comm):
        plan = planning.make(comm.size, comm.rank, comm.size, 1, 1)
        made = strategies.make(Strategy("mpi"), comm, plan, 64, 1)
        made.buffers[:] = 1
        with pytest.raises(
            CollectiveError, match="rank 0 calls all_reduce float32 .* but rank 1 calls barrier"
        ):
            if comm.rank:
                comm.barrier()
            else:
                made.start()
                while not made.poll():
                    time.sleep(1e-3)

    mock.run(2, rank)


def reduce_alone(kind: str, g: np.ndarray) -> bytes:
    return mock.run(3, reduce, Strategy(kind), g)[0][0][0].tobytes()


def test_combine_completes_what_it_can():
    adds, kept = combine(((0, 1), (1, 1), (4, 2), (6, 1)), 7)
    assert [str(a) for a in adds] == ["b0 += b1", "b2 += b3"]
    assert kept == (((0, 2), 0), ((4, 3), 2))
    assert combine(((0, 4), (4, 3)), 7)[1] == (((0, 7), 0),)
    assert combine((), 7) == ((), ())


def test_a_node_hands_on_one_partial_sum():
    """Four ranks of two nodes: between nodes a rank sends half of its node's share, and the sum
    of the other half.
    """
    for _, made in mock.run(
        4, reduce, Strategy("hierarchical", ranks_per_node=2), gradients(8, 640)
    ):
        within, between = 4 * 320 * 2, 4 * 160 * 2
        assert made.bytes_sent == 2 * (within + between)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"reduction": "star"}, "choose from tree, mpi, ring"),
        (
            {"servers": 2},
            "servers applies only to reduction='parameter_server' or 'async_parameter_server', "
            "not tree; remove",
        ),
        ({"reduction": "parameter_server", "servers": 0}, "an integer of at least 1"),
        (
            {"reduction": "ring", "ranks_per_node": 2},
            "applies only to reduction='hierarchical', not ring",
        ),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Strategy(**settings)


def test_the_command_line_knows_the_same_names():
    """recipes.py is plain data that imports nothing."""
    assert (*REDUCTIONS, *MODES) == tuple(recipes.REDUCTIONS)
    assert tuple(provided("compressions")) == recipes.COMPRESSIONS


def test_what_does_not_combine_is_refused():
    with pytest.raises(ConfigError, match="3 servers but 2 ranks"):
        Strategy("parameter_server", servers=3).check(Mesh(2, 1, 1), 0)
    with pytest.raises(ConfigError, match="use reduction='tree'"):
        Strategy("parameter_server").check(Mesh(2, 1, 1), 1)


# --- trainings ---


def trained(comm, **settings) -> str:
    """The weights after a few steps of LeNet-5, several buckets, a last batch of three shards."""
    model = nn.models.build("lenet5", seed=1)
    loader = data.DataLoader(data.load("mnist", train=True).take(300), batch_size=128, shuffle=True)
    trainer = DistributedTrainer(
        model,
        optim.SGD(lr=0.05, momentum=0.9),
        shard_size=16,
        device="cpu",
        threads=1,
        comm=comm,
        bucket_size_mb=settings.pop("bucket_size_mb", 0.05),
        **settings,
    )
    trainer.fit(loader, data.load("mnist", train=False).take(100), epochs=1)
    assert trainer.bytes_per_step > 0 or comm.size == 1
    return trainer.weights_sha256()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reduction": "parameter_server"},
        {"reduction": "parameter_server", "servers": 2, "bucket_size_mb": 25},
        {"reduction": "hierarchical", "ranks_per_node": 2},
        {"reduction": "hierarchical", "ranks_per_node": 2, "zero": 1},
        {"reduction": "hierarchical", "ranks_per_node": 2, "zero": 2},
        {"reduction": "parameter_server", "execution": "eager", "bucket_size_mb": 25},
    ],
    ids=str,
)
def test_trainings_with_the_same_bits(settings):
    alone = mock.run(1, trained)[0]
    for ranks in (2, 3):
        assert set(mock.run(ranks, lambda c: trained(c, **settings))) == {alone}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_ring_trains(zero):
    """Its bits are those of its number of ranks."""
    hashes = {
        h for _ in range(2) for h in mock.run(3, lambda c: trained(c, reduction="ring", zero=zero))
    }
    assert len(hashes) == 1
