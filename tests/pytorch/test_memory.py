"""Buffers and parameters that share memory: they go on sharing it, as in a plain PyTorch loop,
or are refused.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from odyssey.comm import mock  # noqa: E402
from odyssey.errors import ConfigError  # noqa: E402
from odyssey.torch import DistributedDataParallel, DistributedTrainer  # noqa: E402

MAKING = threading.Lock()  # ranks are threads here, and torch has one generator
G = torch.Generator().manual_seed(3)
BATCHES = [
    (torch.randn(16, 6, generator=G), torch.randint(0, 3, (16,), generator=G)) for _ in range(4)
]


@pytest.fixture(autouse=True)
def _as_a_trainer_sets_it():
    torch.set_num_threads(1)  # the bits of a plain loop depend on it


class Net(nn.Module):
    """A module whose forward() reads a buffer `extra`, or an attribute, whatever shape that has."""

    def __init__(self, share: Callable[[Net], None]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.image = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        share(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        extra = torch.sin(self.extra.float()).mean()
        return self.last(x) * (1 + extra) + self.image.weight.sum() * 0.1


def whole(net: Net) -> None:
    net.register_buffer("extra", net.first.weight.detach())


def data(net: Net) -> None:
    net.register_buffer("extra", net.first.weight.data)


def rows(net: Net) -> None:
    net.register_buffer("extra", net.first.weight.detach()[2:5])


def columns(net: Net) -> None:
    net.register_buffer("extra", net.first.weight.detach()[:, 1::2])


def transposed(net: Net) -> None:
    net.register_buffer("extra", net.last.weight.detach().t())


def channels_last(net: Net) -> None:
    net.register_buffer("extra", net.image.weight.detach())


def one_channel(net: Net) -> None:
    net.register_buffer("extra", net.image.weight.detach()[:, 1])


def not_saved(net: Net) -> None:
    net.register_buffer("extra", net.first.bias.detach(), persistent=False)


def several(net: Net) -> None:
    net.register_buffer("extra", net.first.weight.detach())
    net.last.register_buffer("copy", net.first.weight.detach()[1])


def the_parameter(net: Net) -> None:
    net.register_buffer("extra", net.first.weight)


def statistics(net: Net) -> None:
    net.register_buffer("extra", net.norm.running_mean.view(1, 8))


def one_statistic(net: Net) -> None:
    net.register_buffer("extra", net.norm.running_var[3:4])


def counter(net: Net) -> None:
    net.register_buffer("extra", net.norm.num_batches_tracked.view(1))


def attribute(net: Net) -> None:
    net.extra = net.first.weight.detach()


def differentiable(net: Net) -> None:
    net.extra = net.first.weight.t()


def frozen(net: Net) -> None:
    net.last.weight.requires_grad_(False)
    net.register_buffer("extra", net.last.weight.data)


def two_norms(net: Net) -> None:
    net.more = nn.BatchNorm1d(8)
    net.more.running_mean = net.norm.running_mean.view(8)
    net.more.running_var = net.norm.running_var
    net.norm = nn.Sequential(net.norm, net.more)
    net.register_buffer("extra", net.more.running_mean)


def disjoint(net: Net) -> None:
    """Two parameters that are parts of one tensor, and one buffer of one of them."""
    both = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    net.first.weight = nn.Parameter(both[:8])
    net.second = nn.Parameter(both[8:])
    net.register_buffer("extra", net.first.weight.detach())


def interleaved(net: Net) -> None:
    """Parameters that are columns of one tensor: their addresses overlap, their elements do not."""
    both = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    net.first.weight = nn.Parameter(both[:, ::2])
    net.second = nn.Parameter(both[:, 1::2])
    net.register_buffer("extra", torch.ones(2))


def apart(net: Net) -> None:
    """A buffer in the gaps of a parameter."""
    both = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    net.first.weight = nn.Parameter(both[:, ::2])
    net.register_buffer("extra", both[:, 1::2])


OF_PARAMETERS = [
    whole,
    data,
    rows,
    columns,
    transposed,
    channels_last,
    one_channel,
    not_saved,
    several,
    frozen,
    disjoint,
]
OTHERS = [
    the_parameter,
    statistics,
    one_statistic,
    counter,
    attribute,
    differentiable,
    two_norms,
    interleaved,
    apart,
]


def new(share: Callable[[Net], None]) -> Net:
    with MAKING:
        torch.manual_seed(0)
        return Net(share)


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1, momentum=0.9)


def values(net: nn.Module) -> dict[str, np.ndarray]:
    named = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {name: t.detach().numpy().copy() for name, t in named.items()}


def same(found: dict[str, Any], right: dict[str, Any]) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert np.array_equal(found[name], value, equal_nan=True), name


def unfreeze(net: Net) -> None:
    for p in net.parameters():
        p.requires_grad_(True)


def trained(
    comm: Any, net: Net, shard: int = 6, zero: int = 0, **fit: Any
) -> dict[str, np.ndarray]:
    trainer = DistributedTrainer(
        net,
        optimizer_of(net),
        nn.CrossEntropyLoss(),
        shard_size=shard,
        zero=zero,
        comm=comm,
        clip_norm=100.0,
    )
    trainer.fit(BATCHES, epochs=1, verbose=False, **fit)
    with trainer.gathered():
        return values(net)


def train_plainly(net: Net) -> dict[str, np.ndarray]:
    optimizer = optimizer_of(net)
    for x, y in BATCHES:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return values(net)


@pytest.mark.parametrize("share", [*OF_PARAMETERS, *OTHERS])
def test_one_shard_is_a_plain_loop(share):
    # odyssey keeps parameters in rows, and some processors' products of a weight with gaps between
    # its elements have other last bits than those of the same weight in rows.
    net = new(share)
    if not net.first.weight.is_contiguous():
        net.first.weight.data = net.first.weight.data.contiguous()
    right = train_plainly(net)
    same(trained(None, new(share), shard=16), right)

    net = new(share)
    optimizer = optimizer_of(net)
    loop = DistributedDataParallel(net, shard_size=16)
    for batch in BATCHES:
        for x, y in loop.shards(batch):
            F.cross_entropy(loop(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    same(values(net), right)


@pytest.mark.parametrize("share", [*OF_PARAMETERS, *OTHERS])
def test_any_layout_whole_and_resumed(share, tmp_path):
    (right,) = mock.run(1, lambda comm: trained(comm, new(share)))
    turn = [*OF_PARAMETERS, *OTHERS].index(share)
    layouts = [(2, 0), (3, 1), (2, 2)]
    whole, stopped, resumed = (layouts[(turn + k) % 3] for k in range(3))
    for found in mock.run(whole[0], lambda comm: trained(comm, new(share), zero=whole[1])):
        same(found, right)
    fit: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "steps": 2}
    mock.run(stopped[0], lambda comm: trained(comm, new(share), zero=stopped[1], **fit))
    del fit["steps"]
    for found in mock.run(
        resumed[0], lambda comm: trained(comm, new(share), zero=resumed[1], **fit)
    ):
        same(found, right)


def test_a_buffer_moves_with_a_parameter_that_is_unfrozen():
    """Unfreezing moves all parameters again."""
    held = []
    for alone in (True, False):
        net = new(frozen)
        optimizer = optimizer_of(net)
        if alone:
            for step, (x, y) in enumerate(BATCHES * 2):
                if step == len(BATCHES):
                    unfreeze(net)
                    optimizer.add_param_group({"params": [net.last.weight]})
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
        else:
            trainer = DistributedTrainer(net, optimizer, nn.CrossEntropyLoss(), shard_size=16)
            trainer.fit(BATCHES, epochs=1, verbose=False)
            unfreeze(net)
            optimizer.add_param_group({"params": [net.last.weight]})
            trainer.fit(BATCHES, epochs=1, verbose=False)
        assert net.extra.data_ptr() == net.last.weight.data_ptr()
        held.append(values(net))
    same(held[1], held[0])


@pytest.mark.parametrize("seed", range(20))
def test_random_views_are_those_of_a_plain_loop(seed):
    """Buffers that are random slices, transposes and strides of random parameters, and views of
    views.
    """
    r = random.Random(seed)
    choices = [r.random() for _ in range(40)]

    def share(net: Net) -> None:
        rest = iter(choices)
        made = [(name, p.detach()) for name, p in net.named_parameters()]
        for i in range(5):
            _, t = made[int(next(rest) * len(made))]
            for _ in range(int(next(rest) * 3)):
                if t.dim() and t.shape[0] > 1:
                    start = int(next(rest) * (t.shape[0] - 1))
                    t = t[start :: 1 + int(next(rest) * 2)]
                if t.dim() > 1 and next(rest) < 0.5:
                    t = t.transpose(0, t.dim() - 1)
            net.register_buffer("extra" if not i else f"extra{i}", t)
            made.append((f"extra{i}", t))

    net = new(share)
    optimizer = optimizer_of(net)
    for x, y in BATCHES:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    same(trained(None, new(share), shard=16), values(net))


def test_what_a_program_writes_into_either_counts():
    net = new(whole)
    trainer = DistributedTrainer(net, optimizer_of(net), nn.CrossEntropyLoss(), shard_size=16)
    trainer.fit(BATCHES, epochs=1, verbose=False)
    net.extra.fill_(0.25)
    assert bool((net.first.weight == 0.25).all())
    with torch.no_grad():
        net.first.weight.fill_(0.5)
    assert bool((net.extra == 0.5).all())


def test_an_older_checkpoint_in_which_they_had_separate_values():
    """Those of before hold the buffer as it was when the trainer was made; the parameter counts."""
    net = new(whole)
    trainer = DistributedTrainer(net, optimizer_of(net), nn.CrossEntropyLoss(), shard_size=16)
    trainer.fit(BATCHES, epochs=1, verbose=False)
    snapshot = trainer.state({})
    snapshot.arrays["buffers"]["extra"] = np.zeros_like(snapshot.arrays["buffers"]["extra"])
    right = net.first.weight.detach().clone()
    trainer.load(snapshot, "an older one")
    assert torch.equal(net.first.weight, right) and torch.equal(net.extra, right)


def tied(net: Net) -> None:
    net.extra = nn.Parameter(net.first.weight.detach())


def tied_transposed(net: Net) -> None:
    net.extra = nn.Parameter(net.first.weight.detach().t())


def tied_in_part(net: Net) -> None:
    net.extra = nn.Parameter(net.first.weight.detach()[6:])


def tied_frozen(net: Net) -> None:
    net.extra = nn.Parameter(net.first.weight.detach(), requires_grad=False)


def tied_by_numpy(net: Net) -> None:
    array = np.ones((8, 6), np.float32)
    net.first.weight = nn.Parameter(torch.from_numpy(array))
    net.extra = nn.Parameter(torch.from_numpy(array))


def flat(net: Net) -> None:
    both = torch.randn(16, 6)
    net.first.weight = nn.Parameter(both[:8])
    net.second = nn.Parameter(both[8:])
    net.register_buffer("extra", both)


def larger(net: Net) -> None:
    both = torch.randn(16, 6)
    net.first.weight = nn.Parameter(both[:8])
    net.register_buffer("extra", both)


def other_type(net: Net) -> None:
    net.register_buffer("extra", net.first.weight.detach().view(torch.int32))


def of_gaps(net: Net) -> None:
    both = torch.randn(8, 12)
    net.first.weight = nn.Parameter(both[:, ::2])
    net.register_buffer("extra", net.first.weight.detach()[2])


def statistics_of_a_parameter(net: Net) -> None:
    net.norm.running_mean = net.norm.bias.detach()
    net.register_buffer("extra", torch.ones(2))


REFUSED = [
    (
        tied,
        "the parameters extra and first.weight share memory|the parameters first.weight and "
        "extra share memory",
    ),
    (tied_transposed, "extra and first.weight share memory|first.weight and extra share memory"),
    (tied_in_part, "extra and first.weight share memory|first.weight and extra share memory"),
    (tied_frozen, "first.weight and extra share memory"),
    (
        tied_by_numpy,
        "share memory, and each needs a place of its own; use one nn.Parameter in both",
    ),
    (
        flat,
        "extra shares memory with the parameters (first.weight and second|second and first.weight)",
    ),
    (larger, "extra shares memory with the parameters first.weight"),
    (other_type, "extra shares memory with the parameters first.weight"),
    (of_gaps, "extra shares memory with the parameters first.weight"),
    (statistics_of_a_parameter, "norm.running_mean shares memory with a parameter"),
]


@pytest.mark.parametrize(("share", "says"), REFUSED)
def test_what_cannot_go_on_sharing_is_refused_by_name(share, says):
    net = new(share)
    before = values(net)
    with pytest.raises(ConfigError, match=says):
        trained(None, net)
    same(values(net), before)
    with pytest.raises(ConfigError, match=says):
        DistributedDataParallel(net)


@pytest.mark.parametrize("share", OF_PARAMETERS)
def test_parameters_in_parts_share_nothing(share):
    def rank(comm: Any) -> None:
        with pytest.raises(
            ConfigError,
            match="the buffer extra shares memory with a parameter, which zero=3 has in",
        ):
            trained(comm, new(share), zero=3)

    mock.run(2, rank)


@pytest.mark.parametrize("share", [statistics, counter, two_norms, interleaved])
def test_what_shares_no_memory_with_parameters_is_trained_in_parts(share):
    (right,) = mock.run(1, lambda comm: trained(comm, new(share)))
    for found in mock.run(3, lambda comm: trained(comm, new(share), zero=3)):
        same(found, right)


def test_tied_modules_are_still_one_parameter():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
            self.last.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    net = Tied()
    DistributedTrainer(net, optimizer_of(net), shard_size=16).fit(BATCHES, epochs=1, verbose=False)
    assert net.last.weight is net.first.weight
