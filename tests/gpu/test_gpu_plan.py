"""The plans of GPUs, without one: whatever the pieces, the folds and the workers, the sum is
that of the one tree.
"""

from __future__ import annotations

import itertools

import pytest

from odyssey.engine.gpu import plan as pieces
from odyssey.engine.gpu.group import devices
from odyssey.errors import DeviceError
from odyssey.parallel import plan as planning


def tree(first, n):
    """The sum over n shards as the one tree adds it, symbolically."""
    if n == 1:
        return first
    left = planning.split(n)
    return (tree(first, left), tree(first + left, n - left))


def folded(first, n, fold):
    """What the kernels make of a piece: sums over runs of `fold` shards, then the tree over
    these.
    """

    def over(lo, count):
        if count == 1:
            return tree(first + lo * fold, min(fold, n - lo * fold))
        left = planning.split(count)
        return (over(lo, left), over(lo + left, count - left))

    return over(0, -(-n // fold))


def run(plan):
    sums = [None] * plan.sums
    for a in plan.actions:
        if isinstance(a, pieces.ComputeNode):
            assert a.shards <= plan.shards and -(-a.shards // a.fold) <= plan.pieces
            sums[a.to] = folded(a.first, a.shards, a.fold)
        else:
            sums[a.a] = (sums[a.a], sums[a.b])
    return sums[: len(plan.nodes)]


@pytest.mark.parametrize("fold", [1, 2, 4, 8])
def test_folding_changes_no_sum(fold):
    for n in range(1, 70):
        assert folded(0, n, fold) == tree(0, n)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 64, 1000])
def test_a_worker_computes_the_nodes_of_its_shards(limit):
    for shards in (1, 2, 3, 5, 8, 13, 64, 67, 300):
        for workers in (1, 2, 3, 4):
            for w in range(workers):
                own = planning.share(shards, workers, w)
                plan = pieces.worker(own, shards, limit)
                assert list(plan.nodes) == planning.nodes(own, shards)
                assert run(plan) == [tree(*node) for node in plan.nodes]
                assert plan.shards <= limit


def test_large_pieces_fold():
    assert [pieces.fold_of(n) for n in (1, 63, 64, 127, 128, 255, 256, 10000)] == [
        1,
        1,
        2,
        2,
        4,
        4,
        8,
        8,
    ]
    assert pieces.fold_of(10000, max_fold=1) == 1


def test_the_sums_of_workers_meet_in_the_tree():
    for shards, ranks, workers in itertools.product(
        (1, 2, 3, 6, 8, 13, 64), (1, 2, 3), (1, 2, 3, 4)
    ):
        for rank in range(ranks):
            runs = [
                planning.share(shards, ranks * workers, rank * workers + w) for w in range(workers)
            ]
            own = (runs[0][0], runs[-1][1])
            nodes = [planning.nodes(r, shards) for r in runs]
            meeting = pieces.meeting(nodes, shards)
            sums = [tree(*node) for mine in nodes for node in mine]
            for add in meeting.adds:
                sums[add.a] = (sums[add.a], sums[add.b])
            assert [sums[i] for i in meeting.places] == [tree(*node) for node in meeting.nodes]
            assert list(meeting.nodes) == planning.nodes(own, shards)
            if ranks == 1:
                assert meeting.places == (0,)


def test_devices_go_round_by_rank():
    assert devices(4, 4, 0, 1, False) == [0, 1, 2, 3]
    assert devices(4, 2, 1, 2, False) == [2, 3]
    assert devices(1, 4, 0, 1, True) == [0, 0, 0, 0]
    assert devices(2, 1, 3, 4, True) == [1]
    with pytest.raises(
        DeviceError, match=r"4 GPUs were asked for and this machine has 1; use --num-gpus 1, "
    ):
        devices(1, 4, 0, 1, False)
    with pytest.raises(
        DeviceError, match=r"4 ranks x 1 = 4 GPUs were asked for and this machine has 2; use -n 2, "
    ):
        devices(2, 1, 0, 4, False)
