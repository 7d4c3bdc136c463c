"""distributed/ and ddp.py over ranks that are threads: groups, collectives, gradients inside
backward, their bits.

What is the same with processes is in tests/mpi/test_distributed.py.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from odyssey import Tensor
from odyssey import distributed as dist
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.distributed.ddp import DistributedDataParallel
from odyssey.errors import CollectiveError, ConfigError, ShapeError

sys.path.insert(0, str(Path(__file__).parent))
from thread_ranks import on  # noqa: E402


@pytest.fixture
def alone(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    dist.destroy_process_group()


# --- the world ------------------------------------------------------------------------------------


def test_names_of_the_issue_are_there():
    for name in dist.__all__:
        assert getattr(dist, name) is not None
    assert dist.DDP is dist.DistributedDataParallel is DistributedDataParallel
    with pytest.raises(AttributeError, match="all_reduced"):
        dist.all_reduced  # noqa: B018


def test_one_process_is_a_world_of_one(alone):
    assert not dist.is_initialized()
    before = dist.get_distributed_info()
    assert (
        before["world_size"] is before["rank"] is before["backend"] is None and before["available"]
    )
    for call in (
        dist.get_rank,
        dist.get_world_size,
        dist.get_backend,
        dist.barrier,
        lambda: dist.all_reduce(1.0),
    ):
        with pytest.raises(ConfigError, match="init_process_group"):
            call()
    world = dist.init_process_group()
    assert dist.World() is world and world.rank() == 0 and world.world_size() == world.size() == 1
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "local")
    info = dist.get_distributed_info()
    assert (info["initialized"], info["world_size"], info["rank"], info["backend"]) == (
        True,
        1,
        0,
        "local",
    )
    assert (
        info["local_rank"] == 0
        and info["local_world_size"] == 1
        and info["why"].startswith("local")
    )
    with pytest.raises(ConfigError, match="destroy_process_group"):
        dist.init_process_group()
    assert (
        dist.all_reduce(2.5) == 2.5
        and dist.all_gather(3) == [3]
        and dist.broadcast("a" == "a") == 1
    )
    dist.destroy_process_group()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    assert dist.World().size() == 1  # as the seeds' World::new(): makes one


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 4}, "world_size=4 was given, but 1 rank is running.*mpirun -n 4"),
        ({"rank": 1}, "rank=1 was given, but this process is rank 0 of 1"),
        (
            {"world_size": 4, "rank": 2, "backend": "local"},
            "world_size=4 was given, but 1 rank is running",
        ),
        ({"world_size": 0}, "world_size is 0; it must be at least 1"),
        ({"rank": -1}, "rank is -1; it must be at least 0"),
        ({"backend": "tcp"}, "'tcp' is unknown; choose from auto, mpi, shm, gloo, nccl, local"),
        ({"backend": "nccl"}, "backend nccl connects several ranks, and this one is alone"),
        ({"backend": dist.Backend.MOCK}, "comm.mock.run"),
        ({"timeout": 0}, "timeout in seconds is 0"),
        ({"init_method": "file:///tmp/x"}, "must be 'env://' or 'tcp://HOST:PORT'"),
        ({"init_method": "tcp://host"}, "must be 'env://' or 'tcp://HOST:PORT', as tcp://node1"),
        ({"init_method": "tcp://host:1"}, "goes with backend='gloo', world_size= and rank="),
    ],
)
def test_a_world_that_does_not_fit_is_refused(alone, settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        dist.init_process_group(**settings)
    assert "\n" not in str(error.value)
    assert not dist.is_initialized()


def test_variables_that_do_not_fit_are_refused(alone, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="WORLD_SIZE=4 in the environment, but 1 rank is running"):
        dist.init_process_group()
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(
        ConfigError, match="MASTER_PORT is 29500 in the environment, but 29501 was given"
    ):
        dist.init_process_group("gloo", "tcp://localhost:29501", world_size=4, rank=0)


def test_a_world_of_one_with_gloo_needs_no_torch(alone):
    dist.init_process_group(backend="gloo", world_size=1, rank=0)
    assert dist.get_backend() == "local"


def test_the_timeout_holds_until_the_group_is_destroyed(alone, monkeypatch):
    monkeypatch.setenv("ODYSSEY_TIMEOUT", "77")
    dist.init_process_group(timeout=datetime.timedelta(minutes=2))
    assert dist.get_distributed_info()["timeout"] == 120
    dist.destroy_process_group()
    assert os.environ["ODYSSEY_TIMEOUT"] == "77"


def test_groups_of_ranks():
    def work():
        rank = dist.get_rank()
        even, odd = dist.ProcessGroup(range(0, 4, 2)), dist.new_group([3, 1])
        mine, other = (odd, even) if rank % 2 else (even, odd)
        assert mine.is_member and not other.is_member and other.rank() == -1 and other.size() == 2
        assert dist.get_rank(mine) == mine.ranks.index(rank) and dist.get_world_size(mine) == 2
        with pytest.raises(
            ConfigError, match=rf"all_reduce in the group of ranks .*rank {rank} is not in it"
        ):
            dist.all_reduce(1.0, group=other)
        with pytest.raises(ConfigError, match=r"must be one of the group's ranks"):
            dist.broadcast(np.zeros(1), src=other.ranks[0], group=mine)
        # ranks are those of the world
        got = dist.broadcast(float(rank), src=mine.ranks[0], group=mine)
        assert got == mine.ranks[0]
        total = dist.all_reduce_sum_group(rank, mine)
        dist.destroy_process_group(mine)
        assert dist.is_initialized() and not mine.is_member
        return total

    assert on(4, work) == [2, 4, 2, 4]


def test_groups_are_closed_in_the_order_in_which_they_were_made(monkeypatch):
    """Closing is a collective call: another order on another rank, or a group less, and they
    wait for each other.
    """
    closed = []
    monkeypatch.setattr(
        mock.MockCommunicator, "close", lambda comm: closed.append((comm.rank, comm))
    )

    def work():
        made = [dist.new_group().comm for _ in range(12)]  # nobody keeps the groups
        dist.destroy_process_group()
        return [comm for rank, comm in closed if rank == made[0].rank] == made

    assert on(2, work) == [True, True]


# --- collectives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", [np.asarray, Tensor])
def test_collectives_give_values_of_the_same_kind(ranks, kind):
    def work():
        r, n = dist.get_rank(), dist.get_world_size()
        base = np.arange(n * 2, dtype=np.float32)
        mine = kind(base + r)

        def copy():
            return kind(base + r)

        def check(got, wanted):
            assert type(got) is type(mine), type(got)
            np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted, np.float32))

        ranks_sum = n * (n - 1) / 2
        check(dist.all_reduce(copy()), base * n + ranks_sum)
        check(dist.all_reduce(copy(), dist.ReduceOp.AVERAGE), base + ranks_sum / n)
        check(dist.all_reduce(copy(), "max"), base + n - 1)
        check(dist.all_reduce_sum(mine), base * n + ranks_sum)  # of what is left as it was
        check(dist.all_reduce_mean(mine), base + ranks_sum / n)
        check(mine, base + r)
        reduced = dist.reduce(copy(), dst=n - 1, op="min")
        if r == n - 1:
            check(reduced, base)
        else:
            assert reduced is None
        check(dist.broadcast(copy(), src=n - 1), base + n - 1)
        for p, got in enumerate(dist.all_gather(mine)):
            check(got, base + p)
        gathered = dist.gather(mine, dst=0)
        if r:
            assert gathered is None
        else:
            for p, got in enumerate(gathered):
                check(got, base + p)
        pieces = [kind(np.full(3, 10.0 * p, np.float32)) for p in range(n)] if r == 0 else None
        check(dist.scatter(pieces, src=0), [10.0 * r] * 3)
        check(dist.reduce_scatter(mine), (base * n + ranks_sum)[2 * r : 2 * r + 2])
        check(dist.reduce_scatter([mine] * n), base * n + ranks_sum)
        for p, got in enumerate(
            dist.all_to_all([kind(np.full(2, 10.0 * r + p, np.float32)) for p in range(n)])
        ):
            check(got, [10.0 * p + r] * 2)
        check(mine, base + r)  # what is only read was not changed
        dist.barrier()

    on(ranks, work)


def test_out_is_written_in_place():
    def work():
        r = dist.get_rank()
        for kind in (np.asarray, Tensor):
            t = kind(np.full(2, r + 1.0, np.float32))
            assert dist.all_reduce(t, out=t) is t
            np.testing.assert_array_equal(np.asarray(t), [6, 6])
            t = kind(np.full(2, r + 1.0, np.float32))
            assert dist.broadcast(t, src=1, out=t) is t
            np.testing.assert_array_equal(np.asarray(t), [2, 2])
            outs = [kind(np.zeros(2, np.float32)) for _ in range(3)]
            assert dist.all_gather(kind(np.full(2, float(r), np.float32)), out=outs) is outs
            np.testing.assert_array_equal(np.asarray(outs), [[0, 0], [1, 1], [2, 2]])
            piece = kind(np.zeros(1, np.float32))
            assert dist.reduce_scatter(kind(np.arange(3, dtype=np.float32)), out=piece) is piece
            np.testing.assert_array_equal(np.asarray(piece), [3 * r])
        # the result of an op, whose memory is not in rows
        lanes = F.softmax(Tensor(np.ones((8, 2))))
        assert dist.all_reduce(Tensor(np.full((8, 2), r)), out=lanes) is lanes
        np.testing.assert_array_equal(lanes.numpy(), np.full((8, 2), 3))
        with pytest.raises(
            ShapeError, match="into a list of 1, but the group has 3 ranks; give one each"
        ):
            dist.all_gather(np.ones(2), out=[np.ones(2)])

    on(3, work)


def test_numbers_and_dtypes_stay_what_they_are():
    def work():
        r = dist.get_rank()
        assert dist.all_reduce(r + 0.5) == 2.0 and isinstance(dist.all_reduce(1.5), float)
        assert dist.all_reduce(r) == 1 and isinstance(dist.all_reduce(r), int)
        assert dist.all_reduce(np.float32(r)).dtype == np.float32
        assert dist.all_gather(np.int16(r)) == [0, 1]
        big = np.array([2**62, -1])
        np.testing.assert_array_equal(dist.all_reduce(big, "max"), big)
        with pytest.raises(ConfigError, match="mean of int64"):
            dist.all_reduce_mean(np.arange(3))
        with pytest.raises(ShapeError, match="all_reduce of a str; give a Tensor"):
            dist.all_reduce("1")
        with pytest.raises(ShapeError, match="write all_gather.list, tensor."):
            dist.all_gather([np.ones(1)])

    on(2, work)


def test_requests_are_waited_for():
    def work():
        r = dist.get_rank()
        first = dist.all_reduce(np.ones(2), async_op=True)
        second = dist.all_gather(Tensor(np.full(1, float(r))), async_op=True)
        third = dist.scatter([np.ones(1), np.zeros(1)] if r == 0 else None, async_op=True)
        assert [float(t.item()) for t in second.wait()] == [0, 1]
        np.testing.assert_array_equal(first.wait(), [2, 2])
        assert first.wait() is first.wait() and first.is_completed()
        assert third.wait().item() == 1 - r
        assert dist.barrier(async_op=True).wait() is None

    on(2, work)


def test_messages_go_around():
    def work():
        r, n = dist.get_rank(), dist.get_world_size()
        given = dist.isend(Tensor([float(r)]), (r + 1) % n)
        got = dist.recv(np.zeros(1, np.float32), (r - 1) % n)
        given.wait()
        assert got == (r - 1) % n
        if r == 0:
            dist.send(np.arange(3), 1, tag=5)
        elif r == 1:
            t = np.zeros(3, np.int64)
            assert dist.recv(t, 0, tag=5) is t and t.tolist() == [0, 1, 2]

    on(3, work)


def test_metrics_are_averaged_by_weight():
    def work():
        r = dist.get_rank()
        assert dist.metric_average(Tensor([r + 1.0]).sum(), "loss") == 2.0
        weights = (3, 1, 0)
        value = (1.0, 5.0, float("nan"))[r]  # a rank without samples has no value
        assert dist.metric_average(value, weight=weights[r]) == 2.0
        assert np.isnan(dist.metric_average(1.0, weight=0))
        assert dist.metric_average((1e16, 1.0, -1e16)[r], weight=1) == 1 / 3  # exactly added
        assert np.isinf(dist.metric_average((1.0, np.inf, 1.0)[r]))
        with pytest.raises(ShapeError, match="one number"):
            dist.metric_average(np.ones(2))
        with pytest.raises(ConfigError, match="weight"):
            dist.metric_average(1.0, weight=-1)
        with pytest.raises(CollectiveError, match="different metrics"):
            dist.metric_average(1.0, "loss" if r else "accuracy")

    on(3, work)


def test_ranks_that_call_something_else_get_an_error():
    def work():
        dist.all_reduce(np.ones(2 + dist.get_rank()))

    with pytest.raises(CollectiveError, match="all_reduce float64"):
        on(2, work)
