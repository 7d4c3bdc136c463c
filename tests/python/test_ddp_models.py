"""DistributedDataParallel as a wrapper, over ranks that are threads: names, buffers, what is
refused.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from odyssey import Tensor, data, nn, optim
from odyssey import distributed as dist
from odyssey import functional as F
from odyssey.distributed.ddp import DDP
from odyssey.errors import ConfigError
from odyssey.train.trainer import DistributedTrainer

sys.path.insert(0, str(Path(__file__).parent))
from thread_ranks import X, Y, on, one_pass  # noqa: E402


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
            self.used, self.first_only, self.never = (
                nn.Linear(4, 2),
                nn.Linear(4, 2),
                nn.Linear(4, 2),
            )

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
    assert (
        capfd.readouterr().err
        == "odyssey: no gradient reaches never.weight, never.bias: counted as zero\n"
    )
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
        with pytest.raises(
            ConfigError, match="a Linear|a int was given|DistributedDataParallel was given"
        ):
            DDP(DDP(nn.Linear(2, 2)))

    on(1, work)


def test_ranks_with_other_models_are_refused():
    def work(which):
        r = dist.get_rank()
        DDP(
            nn.Linear(2, 2 + r * (which == "model")),
            average="samples" if r and which == "average" else "ranks",
        )

    for which in ("model", "average"):
        with pytest.raises(
            ConfigError, match=f"the {which}.* of rank 1 differs from that of rank 0"
        ):
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
        with pytest.raises(
            ConfigError, match="no forward pass of the wrapped model is behind this loss"
        ):
            one_pass(net.module)
        net.zero_grad()
        net.module.fc3.bias.grad.data[...] = 1
        with pytest.raises(ConfigError, match="call zero_grad"):
            one_pass(net)

    on(1, work)
