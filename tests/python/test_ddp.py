"""DistributedDataParallel (ddp.py) over ranks that are threads: gradients inside backward, and
their bits.

What is the same with processes is in tests/mpi/test_distributed.py.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np
import pytest

import odyssey
from odyssey import Tensor, checkpoint, data, nn, optim
from odyssey import distributed as dist
from odyssey import functional as F
from odyssey.core.arena import Arena
from odyssey.distributed.ddp import DDP
from odyssey.errors import ConfigError
from odyssey.parallel.buckets import from_the_end
from odyssey.parallel.reduction import RunningTreeSum
from odyssey.parallel.strategy import Strategy
from odyssey.train.trainer import DistributedTrainer

sys.path.insert(0, str(Path(__file__).parent))
from thread_ranks import RNG, X, Y, on, one_pass  # noqa: E402

# --- gradients ------------------------------------------------------------------------------------


def test_module_is_the_model_called_or_not(tmp_path):
    """`ddp.module()` is a method elsewhere, and what is saved."""
    dist.init_process_group()
    try:
        ddp = dist.DDP(nn.Linear(3, 2))
        assert ddp.module() is ddp.module
        odyssey.save_checkpoint(ddp.module(), tmp_path / "c")
        assert np.array_equal(
            odyssey.load_checkpoint(tmp_path / "c").weight.numpy(), ddp.module.weight.numpy()
        )
        with pytest.raises(ConfigError, match="Linear is called without inputs"):
            nn.Linear(3, 2)()
    finally:
        dist.destroy_process_group()


def test_buckets_are_cut_from_the_end():
    def cut(floats, limit):
        arena = Arena(
            [(f"p{i}", nn.Parameter(np.zeros(n, np.float32))) for i, n in enumerate(floats)]
        )
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
        partial = RunningTreeSum()
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
    """SHA-256 of the weights after some steps over X: each rank takes `micro` passes of `size`
    samples per step.
    """
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
    """Those that keep the tree have its bits; a ring and a library have those of their own, the
    same on all ranks.
    """

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
    for settings, share in (
        ({"compression": "bf16"}, 0.51),
        ({"compression": "topk", "compression_ratio": 0.05}, 0.2),
    ):
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
    assert (
        one == set(on(2, train, 2, 8, "ranks", 0.05, nn.LeNet5, 3, 0.05)) != set(on(1, train, 4, 8))
    )


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
        F.cross_entropy(
            net(Tensor(X[8 * r : 8 * r + 8, 0, 0, :6])), Y[8 * r : 8 * r + 8] % 3
        ).backward()
        return {name: p.grad.data.copy() for name, p in net.named_parameters()}

    parts = [alone(r) for r in range(3)]
    for got in on(3, work):
        for name, g in got.items():
            np.testing.assert_allclose(
                g, np.mean([p[name] for p in parts], axis=0), rtol=1e-6, atol=1e-8
            )


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


@pytest.mark.parametrize(
    "kind", ["plain", "shared", "checkpoint", "shared with a checkpoint", "checkpoint of all"]
)
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
            seen.append(
                (net._sync._started, float(np.abs(net.module.conv1.weight.grad.data).max()))
            )
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
        np.testing.assert_allclose(
            p.grad.data, net_before + dist.all_reduce_mean(last), rtol=1e-5, atol=1e-7
        )
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
    """Ranks have 8 samples per batch and other numbers of batches; a rank without data takes
    part with none.
    """
    counts = (*samples, 11)[:ranks]
    starts = np.cumsum([0, *counts])

    def work():
        r = dist.get_rank()
        nn.manual_seed(1)
        net = DDP(nn.LeNet5(), average="samples", bucket_size_mb=0.05)
        opt = optim.SGD(net.parameters(), lr=0.05)
        mine = [
            (X[a : min(a + 8, starts[r + 1])], Y[a : min(a + 8, starts[r + 1])])
            for a in range(*starts[r : r + 2], 8)
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
        rows = [
            i
            for r, c in enumerate(counts)
            for i in range(starts[r] + 8 * step, starts[r] + min(8 * step + 8, c))
        ]
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

        for more, message in (
            (1, "said 2 batches and gave 1"),
            (-1, "said 1 batches and gives more"),
        ):
            with pytest.raises(ConfigError, match=message):
                list(net.join(Wrong([(X[:1], Y[:1])] * (1 + (more < 0)))))
            assert net.active

    on(2, wrong)
