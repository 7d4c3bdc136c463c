"""distributed/ and ddp.py over ranks that are threads: groups, collectives, gradients inside backward, their bits.

What is the same with processes is in tests/mpi/test_distributed.py.
"""

from __future__ import annotations

import contextlib
import datetime
import os

import numpy as np
import pytest

from odyssey import Tensor, checkpoint, data, nn, optim
from odyssey import distributed as dist
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.core.arena import Arena
from odyssey.distributed.ddp import DDP, DistributedDataParallel
from odyssey.errors import CollectiveError, ConfigError, ShapeError
from odyssey.parallel.buckets import from_the_end
from odyssey.parallel.reduction import TreeSum
from odyssey.parallel.strategy import Strategy
from odyssey.train.trainer import DistributedTrainer

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 1, 28, 28)).astype(np.float32)
Y = RNG.integers(0, 10, 96)


def on(ranks, function, *arguments):
    """Results of function(*arguments) on ranks that have initialized the world."""

    def work(_):
        dist.init_process_group()
        try:
            return function(*arguments)
        finally:
            dist.destroy_process_group()

    return mock.run(ranks, work)


@pytest.fixture
def alone(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    dist.destroy_process_group()


# --- the world -------------------------------------------------------------------------------------------------------


def test_names_of_the_issue_are_there():
    for name in dist.__all__:
        assert getattr(dist, name) is not None
    assert dist.DDP is dist.DistributedDataParallel is DistributedDataParallel
    with pytest.raises(AttributeError, match="all_reduced"):
        dist.all_reduced  # noqa: B018


def test_one_process_is_a_world_of_one(alone):
    assert not dist.is_initialized()
    before = dist.get_distributed_info()
    assert before["world_size"] is before["rank"] is before["backend"] is None and before["available"]
    for call in (dist.get_rank, dist.get_world_size, dist.get_backend, dist.barrier, lambda: dist.all_reduce(1.0)):
        with pytest.raises(ConfigError, match="init_process_group"):
            call()
    world = dist.init_process_group()
    assert dist.World() is world and world.rank() == 0 and world.world_size() == world.size() == 1
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "local")
    info = dist.get_distributed_info()
    assert (info["initialized"], info["world_size"], info["rank"], info["backend"]) == (True, 1, 0, "local")
    assert info["local_rank"] == 0 and info["local_world_size"] == 1 and info["why"].startswith("local")
    with pytest.raises(ConfigError, match="destroy_process_group"):
        dist.init_process_group()
    assert dist.all_reduce(2.5) == 2.5 and dist.all_gather(3) == [3] and dist.broadcast("a" == "a") == 1
    dist.destroy_process_group()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    assert dist.World().size() == 1  # as the seeds' World::new(): makes one


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 4}, "world_size=4 was given, but 1 rank is running.*mpirun -n 4"),
        ({"rank": 1}, "rank=1 was given, but this process is rank 0 of 1"),
        ({"world_size": 4, "rank": 2, "backend": "local"}, "world_size=4 was given, but 1 rank is running"),
        ({"world_size": 0}, "world_size is 0; it must be an integer of at least 1"),
        ({"rank": -1}, "rank is -1; it must be an integer of at least 0"),
        ({"backend": "tcp"}, "'tcp' is unknown; choose from auto, mpi, shm, gloo, nccl, local"),
        ({"backend": "nccl"}, "backend nccl connects several ranks, and this one is alone"),
        ({"backend": dist.Backend.MOCK}, "comm.mock.run"),
        ({"timeout": 0}, "timeout is 0"),
        ({"init_method": "file:///tmp/x"}, "must be 'env://' or 'tcp://HOST:PORT'"),
        ({"init_method": "tcp://host"}, "must be 'tcp://HOST:PORT'"),
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
    with pytest.raises(ConfigError, match="MASTER_PORT is 29500 in the environment, but 29501 was given"):
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
        with pytest.raises(ConfigError, match=rf"all_reduce in the group of ranks .*rank {rank} is not in it"):
            dist.all_reduce(1.0, group=other)
        with pytest.raises(ConfigError, match=r"must be one of the group's ranks"):
            dist.broadcast(np.zeros(1), src=other.ranks[0], group=mine)
        got = dist.broadcast(float(rank), src=mine.ranks[0], group=mine)  # ranks are those of the world
        assert got == mine.ranks[0]
        total = dist.all_reduce_sum_group(rank, mine)
        dist.destroy_process_group(mine)
        assert dist.is_initialized() and not mine.is_member
        return total

    assert on(4, work) == [2, 4, 2, 4]


def test_groups_are_closed_in_the_order_in_which_they_were_made(monkeypatch):
    """Closing is a collective call: another order on another rank, or a group less, and they wait for each other."""
    closed = []
    monkeypatch.setattr(mock.MockCommunicator, "close", lambda comm: closed.append((comm.rank, comm)))

    def work():
        made = [dist.new_group().comm for _ in range(12)]  # nobody keeps the groups
        dist.destroy_process_group()
        return [comm for rank, comm in closed if rank == made[0].rank] == made

    assert on(2, work) == [True, True]


# --- collectives -----------------------------------------------------------------------------------------------------


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
        check(dist.all_reduce_sum(copy()), base * n + ranks_sum)
        check(dist.all_reduce_mean(copy()), base + ranks_sum / n)
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
        for p, got in enumerate(dist.all_to_all([kind(np.full(2, 10.0 * r + p, np.float32)) for p in range(n)])):
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
        lanes = F.softmax(Tensor(np.ones((8, 2))))  # the result of an op, whose memory is not in rows
        assert dist.all_reduce(Tensor(np.full((8, 2), r)), out=lanes) is lanes
        np.testing.assert_array_equal(lanes.numpy(), np.full((8, 2), 3))
        with pytest.raises(ShapeError, match="into a list of 1, but the group has 3 ranks; give one each"):
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


# --- gradients -------------------------------------------------------------------------------------------------------


def test_buckets_are_cut_from_the_end():
    def cut(floats, limit):
        arena = Arena([(f"p{i}", nn.Parameter(np.zeros(n, np.float32))) for i, n in enumerate(floats)])
        return [[(p.lo, p.lo + p.n) for p in b.pieces] for b in from_the_end(arena, limit)]

    assert cut([16, 32, 10, 64], 48) == [[(64, 128)], [(16, 64)], [(0, 16)]]
    assert cut([16, 32], 1000) == [[(0, 48)]]
    assert cut([16], 1) == [[(0, 16)]]


def test_passes_are_added_along_the_tree():
    def tree(leaves):
        if len(leaves) == 1:
            return leaves[0]
        half = 1 << (len(leaves) - 1).bit_length() - 1
        return tree(leaves[:half]) + tree(leaves[half:])

    leaves = RNG.normal(size=(13, 100)).astype(np.float32)
    for n in range(1, 14):
        partial = TreeSum()
        for leaf in leaves[: n - 1]:
            partial.push(leaf)
        last = leaves[n - 1].copy()
        partial.add_to(last, 0, 100)
        np.testing.assert_array_equal(last, tree(leaves[:n]))
        partial.push(leaves[n - 1])
        total = np.zeros(100, np.float32)
        partial.add_to(total, 0, 100)
        np.testing.assert_array_equal(total, tree(leaves[:n]))
        assert len(partial.nodes) == bin(n).count("1")
        partial.clear()
        assert not partial.nodes


def train(micro, size, average="ranks", bucket=25.0, model=nn.LeNet5, steps=3, clip=None):
    """SHA-256 of the weights after some steps over X: each rank takes `micro` passes of `size` samples per step."""
    r, n = dist.get_rank(), dist.get_world_size()
    nn.manual_seed(5 + r)  # rank 0's count
    net = DDP(model(), bucket_size_mb=bucket, average=average)
    opt = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        opt.zero_grad()
        for k in range(micro):
            at = (r * micro + k) * size
            with net.no_sync() if k < micro - 1 else contextlib.nullcontext():
                loss = F.cross_entropy(net(Tensor(X[at : at + size])), Y[at : at + size])
                (loss / micro if average == "ranks" else loss).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step()
    assert net.reductions == steps
    everyone = dist.all_gather(np.frombuffer(opt.arena.params.tobytes(), np.int32))
    assert all(np.array_equal(everyone[0], other) for other in everyone) and n == len(everyone)
    return opt.arena.sha256()


@pytest.mark.parametrize("average", ["ranks", "samples"])
@pytest.mark.parametrize("bucket", [25.0, 0.05, 1e-6])
def test_eight_passes_on_one_rank_are_two_ranks_with_four(average, bucket):
    wanted = set(on(1, train, 8, 8, average))
    for ranks, micro in ((1, 8), (2, 4), (4, 2), (8, 1)):
        assert set(on(ranks, train, micro, 8, average, bucket)) == wanted


@pytest.mark.parametrize("reduction", ["hierarchical", "parameter_server", "ring", "mpi"])
def test_other_ways_of_reducing(reduction):
    """Those that keep the tree have its bits; a ring and a library have those of their own, the same on all ranks."""

    def work(reduction):
        nn.manual_seed(1)
        net = DDP(nn.LeNet5(), bucket_size_mb=0.01, average="samples", reduction=reduction)
        for k in range(2):
            one_pass(net, dist.get_rank() + k)
        return net.module.conv1.weight.grad.data.copy()

    wanted, *got = on(4, work, "tree")[0], *on(4, work, reduction)
    for g in got:
        np.testing.assert_allclose(g, wanted, rtol=1e-4, atol=1e-7)
        assert np.array_equal(g, wanted if reduction not in ("ring", "mpi") else got[0])


def test_gradients_are_compressed_if_asked_for():
    def work(**settings):
        nn.manual_seed(1)
        net = DDP(nn.LeNet5(), bucket_size_mb=0.1, reduction=Strategy(**settings))
        opt = optim.SGD(net.parameters(), lr=0.05)
        r = dist.get_rank()
        losses = []
        for _ in range(30):
            opt.zero_grad()
            loss = F.cross_entropy(net(Tensor(X[32 * r : 32 * r + 32])), Y[32 * r : 32 * r + 32])
            loss.backward()
            losses.append(loss.item())
            opt.step()
        return losses, net.bytes_sent, opt.arena.sha256()

    plain = on(2, lambda: work())[0]
    for settings, share in (({"compression": "bf16"}, 0.51), ({"compression": "topk", "compression_ratio": 0.05}, 0.2)):
        results = on(2, lambda settings=settings: work(**settings))
        assert results[0][2] == results[1][2]
        losses, sent, _ = results[0]
        assert sent < share * plain[1] and losses[-1] < losses[0]

    def refused():
        with pytest.raises(ConfigError, match="use average='ranks', or compression='bf16'"):
            DDP(nn.LeNet5(), average="samples", reduction=Strategy(compression="topk"))

    on(1, refused)


def test_the_mean_over_samples_has_the_same_bits_on_any_number_of_ranks():
    assert set(on(1, train, 6, 8, "samples")) == set(on(3, train, 2, 8, "samples", 0.05))
    assert set(on(1, train, 6, 8, "samples")) == set(on(6, train, 1, 8, "samples", 0.05))


def test_clipping_by_the_global_norm_keeps_the_bits():
    one = set(on(1, train, 4, 8, "ranks", 25.0, nn.LeNet5, 3, 0.05))
    assert one == set(on(2, train, 2, 8, "ranks", 0.05, nn.LeNet5, 3, 0.05)) != set(on(1, train, 4, 8))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_loop_with_ddp_is_a_distributed_trainer(ranks):
    """To the bit, if a pass is a shard and batch sizes are powers of two."""
    nn.manual_seed(5)
    trainer = DistributedTrainer(nn.LeNet5(), optim.SGD(lr=0.1, momentum=0.9), shard_size=16)
    batch = data.Batch(data.arrays(X[:64], Y[:64]), np.arange(64), 0, 0)
    for _ in range(3):
        trainer.train_step(batch)
    assert set(on(ranks, train, 4 // ranks, 16, "samples", 0.05)) == {trainer.weights_sha256()}


def test_gradients_are_the_mean_when_backward_returns():
    def work():
        r = dist.get_rank()
        nn.manual_seed(1)
        net = DDP(nn.Linear(6, 3), bucket_size_mb=1e-6)
        x = X[8 * r : 8 * r + 8, 0, 0, :6]
        F.cross_entropy(net(Tensor(x)), Y[8 * r : 8 * r + 8] % 3).backward()
        return {name: p.grad.data.copy() for name, p in net.named_parameters()}

    def alone(r):
        nn.manual_seed(1)
        net = nn.Linear(6, 3)
        F.cross_entropy(net(Tensor(X[8 * r : 8 * r + 8, 0, 0, :6])), Y[8 * r : 8 * r + 8] % 3).backward()
        return {name: p.grad.data.copy() for name, p in net.named_parameters()}

    parts = [alone(r) for r in range(3)]
    for got in on(3, work):
        for name, g in got.items():
            np.testing.assert_allclose(g, np.mean([p[name] for p in parts], axis=0), rtol=1e-6, atol=1e-8)


def one_pass(net, r=0):
    loss = F.cross_entropy(net(Tensor(X[8 * r : 8 * r + 8])), Y[8 * r : 8 * r + 8])
    loss.backward()


class Counted(nn.Module):
    """A model whose parameters are used in a way that a backward pass must count right."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.a, self.b, self.c = nn.Linear(784, 20), nn.Linear(20, 20), nn.Linear(20, 10)

    def forward(self, x):
        x = F.relu(self.a(F.flatten(x)))
        if self.kind == "shared":
            x = F.relu(self.b(F.relu(self.b(x))))
        elif self.kind == "checkpoint":
            x = F.relu(checkpoint(lambda v: F.relu(self.b(v)), x))
        elif self.kind == "shared with a checkpoint":
            x = F.relu(self.b(checkpoint(lambda v: F.relu(self.b(v)), x)))
        elif self.kind == "checkpoint of all":
            return checkpoint(lambda v: self.c(F.relu(self.b(v))), x)
        return self.c(x)


@pytest.mark.parametrize("kind", ["plain", "shared", "checkpoint", "shared with a checkpoint", "checkpoint of all"])
def test_every_use_of_a_parameter_is_in_its_gradient(kind):
    wanted = set(on(1, train, 2, 8, "ranks", 25.0, lambda: Counted(kind)))
    assert set(on(2, train, 1, 8, "ranks", 1e-6, lambda: Counted(kind))) == wanted


def test_a_penalty_on_the_weights_is_in_the_gradient():
    def work():
        nn.manual_seed(1)
        net = DDP(nn.Linear(4, 2), bucket_size_mb=1e-6)
        w = net.module.weight
        loss = F.cross_entropy(net(Tensor(np.ones((8, 4)))), np.zeros(8, int)) + (w * w).sum()
        loss.backward()
        return w.grad.data.copy(), w.data.copy()

    nn.manual_seed(1)
    bare = nn.Linear(4, 2)
    F.cross_entropy(bare(Tensor(np.ones((8, 4)))), np.zeros(8, int)).backward()
    for g, w in on(2, work):
        np.testing.assert_allclose(g, bare.weight.grad.data + 2 * w, rtol=1e-6)


def test_reductions_start_inside_the_backward_pass():
    """Before the first layer's gradient is computed, the last layer's bucket is on its way."""

    def work():
        nn.manual_seed(1)
        net = DDP(nn.LeNet5(), bucket_size_mb=1e-6)
        seen = []
        begin = net._sync._start

        def start():
            seen.append((net._sync._started, float(np.abs(net.module.conv1.weight.grad.data).max())))
            begin()

        net._sync._start = start
        one_pass(net, dist.get_rank())
        return seen

    for seen in on(2, work):
        assert [b for b, _ in seen] == list(range(10))  # in order
        assert seen[0][1] == seen[5][1] == 0 and seen[-1][1] > 0


def test_no_sync_really_does_not_communicate():
    def work():
        r = dist.get_rank()
        nn.manual_seed(1)
        net = DDP(nn.LeNet5())
        calls = net._comm._sequence, net._sync.comm._sequence
        with net.no_sync():
            if r == 0:  # the other rank takes no part in it
                one_pass(net)
                one_pass(net)
        with dist.no_sync():
            one_pass(net, r)
        assert (net._comm._sequence, net._sync.comm._sequence) == calls and net.reductions == 0
        local = net.module.fc3.bias.grad.data.copy()
        others = dist.all_gather(local)
        assert not np.array_equal(*others)
        net.sync_gradients()
        assert net.reductions == 1
        np.testing.assert_array_equal(net.module.fc3.bias.grad.data, (others[0] + others[1]) / 2)
        before = net.module.fc3.bias.grad.data.copy()
        net.sync_gradients()  # nothing new: nothing happens
        assert net.reductions == 1
        np.testing.assert_array_equal(net.module.fc3.bias.grad.data, before)
        with pytest.raises(ConfigError, match="no_sync of a Linear"), dist.no_sync(nn.Linear(2, 2)):
            pass

    on(2, work)


def test_a_second_synchronized_pass_adds_to_the_mean_of_the_first():
    def work():
        r = dist.get_rank()
        nn.manual_seed(1)
        net = DDP(nn.LeNet5())
        p = net.module.fc3.weight
        one_pass(net, r)
        first = p.grad.data.copy()
        net.zero_grad()
        one_pass(net, r + 2)
        second = p.grad.data.copy()
        net.zero_grad()
        one_pass(net, r)
        one_pass(net, r + 2)
        np.testing.assert_array_equal(p.grad.data, second + first)
        with net.no_sync():
            one_pass(net, r)
        net.sync_gradients()
        np.testing.assert_allclose(p.grad.data, second + first + first, rtol=1e-5, atol=1e-7)
        assert net.reductions == 5

    on(2, work)


def test_what_the_user_does_to_gradients_between_passes_counts():
    def work():
        r = dist.get_rank()
        nn.manual_seed(1)
        net = DDP(nn.LeNet5())
        p, grads = net.module.fc3.weight, net._arena.grads
        with net.no_sync():
            for k in range(3):
                one_pass(net, r + k)
        grads *= 0.5
        halved = p.grad.data.copy()
        with net.no_sync():
            net_before = dist.all_reduce_mean(halved)
            one_pass(net, r)
        last = p.grad.data - halved
        net.sync_gradients()
        np.testing.assert_allclose(p.grad.data, net_before + dist.all_reduce_mean(last), rtol=1e-5, atol=1e-7)
        with net.no_sync():
            one_pass(net, r)
        net.zero_grad()  # and so does forgetting them
        one_pass(net, 0)
        expected = p.grad.data.copy()
        net.zero_grad()
        one_pass(net, 0)
        np.testing.assert_array_equal(p.grad.data, expected)

    on(2, work)


def test_ranks_with_batches_of_other_sizes():
    """average="samples": the mean over all samples; "ranks": that of the ranks' means."""
    sizes = (24, 8)
    starts = (0, 24)

    def work(average):
        r = dist.get_rank()
        nn.manual_seed(1)
        net = DDP(nn.LeNet5(), average=average)
        at = starts[r]
        F.cross_entropy(net(Tensor(X[at : at + sizes[r]])), Y[at : at + sizes[r]]).backward()
        return net.module.fc1.weight.grad.data.copy()

    def alone(at, n):
        nn.manual_seed(1)
        net = nn.LeNet5()
        F.cross_entropy(net(Tensor(X[at : at + n])), Y[at : at + n]).backward()
        return net.fc1.weight.grad.data.copy()

    for got in on(2, work, "samples"):
        np.testing.assert_allclose(got, alone(0, 32), rtol=1e-4, atol=1e-7)
    for got in on(2, work, "ranks"):
        np.testing.assert_allclose(got, (alone(0, 24) + alone(24, 8)) / 2, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("samples", [(40, 3), (5, 40), (0, 20)])
def test_uneven_data_never_hangs_and_is_averaged_over_the_samples(ranks, samples):
    """Ranks have 8 samples per batch and other numbers of batches; a rank without data takes part with none."""
    counts = (*samples, 11)[:ranks]
    starts = np.cumsum([0, *counts])

    def work():
        r = dist.get_rank()
        nn.manual_seed(1)
        net = DDP(nn.LeNet5(), average="samples", bucket_size_mb=0.05)
        opt = optim.SGD(net.parameters(), lr=0.05)
        mine = [
            (X[a : min(a + 8, starts[r + 1])], Y[a : min(a + 8, starts[r + 1])]) for a in range(*starts[r : r + 2], 8)
        ]
        met = 0
        for x, y in net.join(mine):
            opt.zero_grad()
            F.cross_entropy(net(Tensor(x)), y).backward()
            opt.step()
            met += net.active * len(y)
        assert met == counts[r] and net.active
        assert net.reductions == max(-(-c // 8) for c in counts)
        return opt.arena.sha256(), net.module.fc3.weight.data.copy()

    results = on(ranks, work)
    assert len({sha for sha, _ in results}) == 1

    nn.manual_seed(1)
    net = nn.LeNet5()
    opt = optim.SGD(net.parameters(), lr=0.05)
    for step in range(max(-(-c // 8) for c in counts)):
        rows = [i for r, c in enumerate(counts) for i in range(starts[r] + 8 * step, starts[r] + min(8 * step + 8, c))]
        opt.zero_grad()
        F.cross_entropy(net(Tensor(X[rows])), Y[rows]).backward()
        opt.step()
    np.testing.assert_allclose(results[0][1], net.fc3.weight.data, rtol=1e-4, atol=1e-6)


def test_a_sampler_knows_the_world_that_was_initialized():
    def work():
        r, n = dist.get_rank(), dist.get_world_size()
        by_size = dist.DistributedSampler(dataset_size=10, num_replicas=n, rank=r, shuffle=True)
        by_data = dist.DistributedSampler(range(10), n, r)
        known = dist.DistributedSampler(range(10))
        for s in (by_size, by_data, known):
            s.set_epoch(2)
        assert list(by_size) == list(by_data) == list(known)
        return list(known)

    assert sorted(sum(on(3, work), [])) == list(range(10))


def test_join_of_loaders_over_a_distributed_sampler():
    def work():
        train_set = data.arrays(X[:50], Y[:50], classes=10)
        sampler = dist.DistributedSampler(train_set)
        loader = data.DataLoader(train_set, batch_size=5, sampler=sampler)
        net = DDP(nn.LeNet5(), average="samples")
        steps = 0
        for x, y in net.join(loader):
            F.cross_entropy(net(Tensor(x)), y).backward()
            net.zero_grad()
            steps += 1
        return steps, len(loader)

    assert [s for s, _ in on(3, work)] == [4] * 3  # 17, 17 and 16 samples

    def wrong():
        net = DDP(nn.LeNet5())
        with pytest.raises(ConfigError, match="no rank has a batch"):
            net.join([])
        with pytest.raises(ConfigError, match="which has no length"):
            net.join(iter([1]))

        class Wrong(list):
            def __len__(self):
                return super().__len__() + more

        for more, message in ((1, "said 2 batches and gave 1"), (-1, "said 1 batches and gives more")):
            with pytest.raises(ConfigError, match=message):
                list(net.join(Wrong([(X[:1], Y[:1])] * (1 + (more < 0)))))
            assert net.active

    on(2, wrong)


def test_ranks_draw_other_dropout_masks():
    def work():
        nn.manual_seed(1)
        net = DDP(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 2)))
        x = Tensor(np.ones((8, 784)))
        x.requires_grad = True
        with net.no_sync():
            net(x).sum().backward()
        return x.grad.data == 0  # backward draws the forward's mask again

    a, b = on(2, work)
    assert 0.4 < a.mean() < 0.6 and 0.4 < (a == b).mean() < 0.6
    assert np.array_equal(a, on(1, work)[0])


def test_unused_parameters_are_zero_and_named_once(capfd):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.first_only, self.never = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            y = self.used(x)
            return y + self.first_only(x) if dist.get_rank() == 0 else y

    def work(find):
        nn.manual_seed(1)
        net = DDP(Part(), find_unused_parameters=find, bucket_size_mb=1e-6)
        for _ in range(2):
            net.zero_grad()
            F.cross_entropy(net(Tensor(np.ones((8, 4)))), np.zeros(8, int)).backward()
        assert not net.module.never.weight.grad.data.any()
        both = dist.all_gather(net.module.first_only.weight.grad)
        np.testing.assert_array_equal(both[0].data, both[1].data)
        assert both[0].data.any()

    on(2, work, True)
    assert capfd.readouterr().err == "odyssey: no gradient reaches never.weight, never.bias: counted as zero\n"
    on(2, work, False)
    assert capfd.readouterr().err == ""


def test_buffers_are_those_of_rank_0():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)
            self.mean = Tensor(np.full(2, float(dist.get_rank())))
            self.count = np.full(1, 7.0 * dist.get_rank())

        def forward(self, x):
            self.count += 1 + dist.get_rank()
            return self.fc(x)

    def work(on_):
        net = DDP(Running(), broadcast_buffers=on_)
        seen = [(net.module.mean.data[0].item(), net.module.count[0].item())]
        for mode in (True, True, False):
            net.train(mode)
            net(Tensor(np.ones((8, 4))))
            seen.append(net.module.count[0].item())
        with net.no_sync():
            net.train()
            net(Tensor(np.ones((8, 4))))
        return [*seen, net.module.count[0].item()]

    assert on(2, work, True) == [[(0, 0), 1, 2, 3, 4], [(0, 0), 2, 3, 5, 7]]
    assert on(2, work, False) == [[(0, 0), 1, 2, 3, 4], [(1, 7), 9, 11, 13, 15]]


def test_the_wrapper_is_a_module_with_the_names_of_its_model():
    def work():
        nn.manual_seed(1)
        inner = nn.LeNet5()
        world = dist.World()
        net = DDP.builder(inner).world(world).bucket_size_mb(0.05).broadcast_buffers(True).build()
        assert net.module is inner and [n for n, _ in net.named_parameters()] == [
            n for n, _ in inner.named_parameters()
        ]
        assert list(net.parameters()) == list(inner.parameters())
        state = net.state_dict()
        net.load_state_dict({k: v + 1 for k, v in state.items()})
        np.testing.assert_array_equal(inner.fc3.bias.data, state["fc3.bias"] + 1)
        assert not net.eval().module.training
        np.testing.assert_array_equal(net.forward(Tensor(X[:4])).data, inner(Tensor(X[:4])).data)
        optim.Adam(net.parameters(), 0.001)  # the parameters stay in one arena
        with pytest.raises(ConfigError, match="DistributedTrainer synchronizes by itself"):
            trainer = DistributedTrainer(net, optim.SGD(), threads=1)
            trainer.train_step(data.Batch(data.arrays(X[:64], Y[:64]), np.arange(64), 0, 0))
        again = DDP(inner)
        with pytest.raises(ConfigError, match="wrapped again"):
            net(Tensor(X[:4]))
        one_pass(again, dist.get_rank())
        assert (again.reductions, net.reductions) == (1, 0)

    on(2, work)


def test_a_wrapper_that_is_gone_leaves_a_model_of_its_own():
    import gc

    def work():
        nn.manual_seed(1)
        inner = nn.LeNet5()
        net = DDP(inner)
        calls = net._comm._sequence
        comm = net._comm
        del net
        gc.collect()
        if dist.get_rank() == 0:
            one_pass(inner)
            assert inner.fc3.weight.grad.data.any() and comm._sequence == calls

    on(2, work)


def test_a_part_of_the_ranks_trains_together():
    def work():
        group = dist.new_group([0, 2])
        rank = dist.get_rank()
        if not group.is_member:
            with pytest.raises(ConfigError, match="rank 1 is not in it"):
                DDP(nn.LeNet5(), group)
            return None
        nn.manual_seed(rank)
        net = DDP(nn.LeNet5(), group)
        one_pass(net, rank)
        return net.module.fc3.weight.grad.data.copy()

    a, none, b = on(3, work)
    assert none is None
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket_size_mb": 0}, "bucket_size_mb is 0"),
        ({"average": "batches"}, "choose from ranks, samples"),
        ({"reduction": "star"}, "choose from tree, mpi"),
    ],
)
def test_settings_that_are_not_allowed(settings, message):
    def work():
        with pytest.raises(ConfigError, match=message):
            DDP(nn.Linear(2, 2), **settings)
        with pytest.raises(ConfigError, match="a Linear|a int was given|DistributedDataParallel was given"):
            DDP(DDP(nn.Linear(2, 2)))

    on(1, work)


def test_ranks_with_other_models_are_refused():
    def work(which):
        r = dist.get_rank()
        DDP(nn.Linear(2, 2 + r * (which == "model")), average="samples" if r and which == "average" else "ranks")

    for which in ("model", "average"):
        with pytest.raises(ConfigError, match=f"the {which}.* of rank 1 differs from that of rank 0"):
            on(2, work, which)


def test_samples_are_those_of_the_forward_passes_behind_the_loss():
    """Not those of a pass that is only looked at; and of all, if there are several."""

    def work():
        r = dist.get_rank()
        nn.manual_seed(1)
        net = DDP(nn.LeNet5(), average="samples")
        n, at = (8, 24)[r], (0, 8)[r]
        net(Tensor(X[: 40 * (r + 1)]))  # no backward
        net.eval()(Tensor(X[:5]))
        net.train()
        x, y = X[at : at + n], Y[at : at + n]
        F.cross_entropy(net(Tensor(x)), y).backward()
        one = net.module.fc1.weight.grad.data.copy()
        net.zero_grad()
        (F.cross_entropy(net(Tensor(x)), y) + F.cross_entropy(net(Tensor(x)), y)).backward()
        np.testing.assert_allclose(net.module.fc1.weight.grad.data, 2 * one, rtol=1e-5, atol=1e-7)
        return one

    nn.manual_seed(1)
    net = nn.LeNet5()
    F.cross_entropy(net(Tensor(X[:32])), Y[:32]).backward()
    for one in on(2, work):
        np.testing.assert_allclose(one, net.fc1.weight.grad.data, rtol=1e-4, atol=1e-7)


def test_means_over_samples_need_to_know_the_samples():
    def work():
        net = DDP(nn.LeNet5(), average="samples")
        with pytest.raises(ConfigError, match="no forward pass of the wrapped model is behind this loss"):
            one_pass(net.module)
        net.zero_grad()
        net.module.fc3.bias.grad.data[...] = 1
        with pytest.raises(ConfigError, match="call zero_grad"):
            one_pass(net)

    on(1, work)
