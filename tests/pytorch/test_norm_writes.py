"""Statistics of normalisations that a program writes between steps: they count, as in a plain
PyTorch loop.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from odyssey import callbacks  # noqa: E402
from odyssey.comm import mock  # noqa: E402
from odyssey.errors import ConfigError  # noqa: E402
from odyssey.torch import DistributedDataParallel, DistributedTrainer  # noqa: E402

MAKING = threading.Lock()  # ranks are threads here, and torch has one generator
G = torch.Generator().manual_seed(3)
BATCHES = [
    (torch.randn(16, 4, 6, generator=G), torch.randint(0, 3, (16,), generator=G)) for _ in range(6)
]
OTHERS = torch.randn(20, 4, 6, generator=G) * 3 + 1
WRITTEN_AFTER = 2


@pytest.fixture(autouse=True)
def _as_a_trainer_sets_it():
    torch.set_num_threads(1)  # the bits of a plain loop depend on it


class Net(nn.Module):
    """A module with every kind of normalization that keeps running statistics.

    If `frozen`, its layers normalize with the running statistics.
    """

    def __init__(self, momentum: float | None = 0.1, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(4, 5, 1), nn.BatchNorm1d(5, momentum=momentum)
        self.instance = nn.InstanceNorm1d(
            5, momentum=momentum or 0.2, affine=True, track_running_stats=True
        )
        self.plain, self.last = (
            nn.BatchNorm1d(30, affine=False, momentum=momentum),
            nn.Linear(30, 3),
        )
        self.frozen = frozen
        self.train()

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        if self.frozen:
            self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.instance(torch.tanh(self.norm(self.first(x))))
        return self.last(self.plain(x.flatten(1)))


def new(momentum: float | None = 0.1, frozen: bool = False) -> Net:
    with MAKING:
        torch.manual_seed(0)
        return Net(momentum, frozen)


def donor() -> Net:
    """A module with other weights and statistics."""
    with MAKING:
        torch.manual_seed(1)
        net = Net()
    with torch.no_grad():
        for _ in range(7):
            net(OTHERS)
    return net


def load(net: Net) -> None:
    net.load_state_dict(donor().state_dict())


def load_statistics(net: Net) -> None:
    net.load_state_dict(
        {k: v for k, v in donor().state_dict().items() if "running" in k}, strict=False
    )


def update_bn(net: Net) -> None:
    training = net.training
    torch.optim.swa_utils.update_bn([OTHERS, OTHERS[:9]], net)
    net.train(training)


def reset(net: Net) -> None:
    for part in net.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            part.reset_running_stats()


def write(net: Net) -> None:
    net.norm.running_mean.add_(0.5)
    net.plain.running_var[3:] = 2.0
    net.instance.num_batches_tracked.fill_(11)


def not_a_number(net: Net) -> None:
    net.plain.running_var[0] = float("nan")


def run_forward(net: Net) -> None:
    with torch.no_grad():
        net(OTHERS)


def assign(net: Net) -> None:
    net.norm.running_mean = torch.linspace(-1, 1, 5)
    net.plain.num_batches_tracked = torch.tensor(5)


def assign_from_a_dict(net: Net) -> None:
    buffers = {
        name: b
        for name, b in donor().state_dict().items()
        if "running" in name or "tracked" in name
    }
    net.load_state_dict(buffers, strict=False, assign=True)


def set_data(net: Net) -> None:
    net.norm.running_var.data = torch.linspace(1, 2, 5)
    net.norm.num_batches_tracked.data = torch.tensor(3)


WAYS = [
    load,
    load_statistics,
    update_bn,
    reset,
    write,
    not_a_number,
    run_forward,
    assign,
    assign_from_a_dict,
    set_data,
]


class Writes(callbacks.Callback):
    """Does something to the module after one step."""

    def __init__(self, way: Callable[[Net], None]) -> None:
        self.way = way

    def on_step_end(self, context: callbacks.Context) -> None:
        if context.steps == WRITTEN_AFTER:
            with context.trainer.gathered() as net:
                self.way(net)


def same(found: dict[str, Any], right: dict[str, Any]) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert np.array_equal(np.asarray(found[name]), np.asarray(value), equal_nan=True), name


def plain_loop(way: Callable[[Net], None], net: Net) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step, (x, y) in enumerate(BATCHES, 1):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        if step == WRITTEN_AFTER:
            way(net)
    return net.state_dict()


def trained(
    comm: Any, way: Callable[[Net], None], net: Net, shard: int = 6, zero: int = 0, **fit: Any
) -> dict[str, np.ndarray]:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    trainer = DistributedTrainer(
        net, optimizer, nn.CrossEntropyLoss(), shard_size=shard, zero=zero, comm=comm
    )
    trainer.fit(BATCHES, epochs=1, callbacks=[Writes(way)], verbose=False, **fit)
    return trainer.state_dict()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_one_shard_is_a_plain_loop(way, frozen, momentum):
    right = plain_loop(way, new(momentum, frozen))
    same(trained(None, way, new(momentum, frozen), shard=16), right)

    net = new(momentum, frozen)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loop = DistributedDataParallel(net, shard_size=16)
    for step, batch in enumerate(BATCHES, 1):
        for x, y in loop.shards(batch):
            F.cross_entropy(loop(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == WRITTEN_AFTER:
            way(net)
    same(net.state_dict(), right)


LAYOUTS = [(2, 0), (3, 1), (2, 2), (3, 3), (4, 0)]  # ranks and ZeRO


@pytest.mark.parametrize(
    "turn", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 5))]
)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("way", WAYS)
def test_any_layout_whole_and_resumed(way, momentum, turn, tmp_path):
    """Shards of 6, 6 and 4; whole on one layout, stopped at the step after which it is written
    on the next one, and resumed on the one after that.
    """
    turn += WAYS.index(way) + (0 if momentum else 2)
    whole, stopped, resumed = (LAYOUTS[(turn + k) % 5] for k in range(3))
    (right,) = mock.run(1, lambda comm: trained(comm, way, new(momentum, True)))
    unwritten = trained(None, lambda net: None, new(momentum, True))
    assert any(not np.array_equal(right[name], value) for name, value in unwritten.items())
    for found in mock.run(
        whole[0], lambda comm: trained(comm, way, new(momentum, True), zero=whole[1])
    ):
        same(found, right)
    fit: dict[str, Any] = {
        "checkpoint_dir": tmp_path,
        "checkpoint_every": 1,
        "steps": WRITTEN_AFTER,
    }
    mock.run(
        stopped[0], lambda comm: trained(comm, way, new(momentum, True), zero=stopped[1], **fit)
    )
    del fit["steps"]
    for found in mock.run(
        resumed[0], lambda comm: trained(comm, way, new(momentum, True), zero=resumed[1], **fit)
    ):
        same(found, right)


def print_loops() -> None:
    """Loops of one's own, run by the test below; prints a digest of all buffers and parameters."""
    for way in WAYS:
        net = new(frozen=True)
        loop = DistributedDataParallel(net, shard_size=6)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step, batch in enumerate(BATCHES, 1):
            for x, y in loop.shards(batch):
                F.cross_entropy(loop(x), y).backward()
            optimizer.step()
            if step == WRITTEN_AFTER:
                way(net)
        values = b"".join(t.numpy().tobytes() for t in net.state_dict().values())
        print(way.__name__, hashlib.sha256(values).hexdigest(), flush=True)
        del loop


def test_a_loop_of_ones_own_on_any_ranks(launch):
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import "
        f"{Path(__file__).stem} as t"
    )
    lines = []
    for ranks in (0, 3):
        done = launch.python("-W", "ignore", "-c", f"{code}; t.print_loops()", ranks=ranks)
        assert done.returncode == 0, done.stderr
        lines.append({line for line in done.stdout.splitlines() if line})
    assert lines[0] == lines[1] and len(lines[0]) == len(WAYS)
    assert len({line.split()[1] for line in lines[0]}) == len(WAYS)


def test_before_the_first_step(tmp_path):
    """Pretrained weights that are loaded once the trainer was made."""

    def rank(comm: Any, first: bool, zero: int) -> dict[str, np.ndarray]:
        net = new(frozen=True)
        if first:
            load(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        trainer = DistributedTrainer(
            net, optimizer, nn.CrossEntropyLoss(), shard_size=6, zero=zero, comm=comm
        )
        if not first:
            with trainer.gathered():
                load(net)
        trainer.fit(BATCHES, epochs=1, verbose=False)
        return trainer.state_dict()

    (right,) = mock.run(1, rank, True, 0)
    for ranks, zero in ((1, 0), (2, 0), (2, 3)):
        for found in mock.run(ranks, rank, False, zero):
            same(found, right)


@pytest.mark.parametrize(
    ("way", "says"),
    [
        (write, "values written into instance.num_batches_tracked between steps"),
        (run_forward, "values written into instance.running_mean between steps"),
        (assign, "values written into norm.running_mean between steps"),
        (
            lambda net: net.plain.num_batches_tracked.zero_(),
            "written into plain.num_batches_tracked between steps",
        ),
    ],
)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_that_write_other_values_are_refused_by_name(way, says, zero):
    """The next step merges what they wrote, so that all have the same again: no comparison of
    values would find it.
    """

    def rank(comm: Any) -> None:
        trained(comm, lambda net: way(net) if comm.rank == 1 else None, new(), zero=zero)

    with pytest.raises(ConfigError, match=says):
        mock.run(2, rank)

    def factor(comm: Any) -> None:
        trained(comm, lambda net: net.norm.running_var.mul_(2 + comm.rank), new(), zero=zero)

    with pytest.raises(ConfigError, match="written into norm.running_var between steps"):
        mock.run(2, factor)


class Breaks(nn.Module):
    """Raises an error behind the normalisation, at one call."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.net, self.error, self.at = new(), error, -1
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        self.calls.append(1)
        if len(self.calls) == self.at:
            raise self.error
        return out


@pytest.mark.parametrize("error", [ValueError("no output"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["forward", "optimizer"])
def test_a_step_that_fails_leaves_the_statistics_of_before_it(where, error):
    held = []
    for fails in (False, True):
        module = Breaks(error)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        trainer = DistributedTrainer(module, optimizer, nn.CrossEntropyLoss(), shard_size=6)
        trainer.fit(BATCHES[:2], epochs=1, verbose=False)
        before = {name: b.clone() for name, b in module.named_buffers()}
        if fails:
            hook = None
            if where == "forward":
                module.at = len(module.calls) + 2  # the second of three shards
            else:

                def stop(*_: Any) -> None:
                    raise error

                hook = optimizer.register_step_pre_hook(stop)
            with pytest.raises(type(error)):
                trainer.fit(BATCHES[2:], epochs=1, verbose=False)
            same(dict(module.named_buffers()), before)
            module.at = -1
            if hook is not None:
                hook.remove()
        trainer.fit(BATCHES[2:], epochs=1, verbose=False)
        held.append(trainer.weights_sha256())
    assert held[0] == held[1]


def test_a_loop_of_ones_own_that_is_left_leaves_the_statistics_of_before_it():
    net = new()
    loop = DistributedDataParallel(net, shard_size=6)
    before = {name: b.clone() for name, b in net.named_buffers()}
    with pytest.raises(ValueError, match="left"):
        for x, y in loop.shards(BATCHES[0]):
            F.cross_entropy(loop(x), y).backward()
            raise ValueError("left")
    same(dict(net.named_buffers()), before)


def test_a_step_without_effect_keeps_what_was_written():
    """A batch with NaN is skipped; the values written before it stay."""
    net = new()
    trainer = DistributedTrainer(
        net, torch.optim.SGD(net.parameters(), 0.1), shard_size=6, nonfinite="skip"
    )
    trainer.fit(BATCHES[:1], epochs=1, verbose=False)
    write(net)
    written = {name: b.clone() for name, b in net.named_buffers()}
    x, y = BATCHES[1]
    trainer.fit([(x * float("nan"), y)], epochs=1, verbose=False)
    same(dict(net.named_buffers()), written)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda net: setattr(net.norm, "running_mean", None),
            "the buffer norm.running_mean is gone",
        ),
        (
            lambda net: setattr(net.norm, "running_mean", torch.zeros(7)),
            r"norm.running_mean has shape \(7,\)",
        ),
        (
            lambda net: setattr(net.norm, "running_mean", torch.zeros(5).long()),
            "norm.running_mean is int64",
        ),
    ],
)
def test_a_buffer_that_cannot_be_merged_any_more_is_refused_by_name(change, says):
    with pytest.raises(ConfigError, match=says):
        trained(None, change, new())
    with pytest.raises(ConfigError, match=says):  # on both ranks, although only one has changed it
        mock.run(
            2,
            lambda comm: trained(comm, lambda net: change(net) if comm.rank == 1 else None, new()),
        )
    net = new()
    loop = DistributedDataParallel(net, shard_size=6)
    change(net)
    with pytest.raises(ConfigError, match=says):
        next(loop.shards(BATCHES[0]))


def test_other_buffers_may_be_replaced_between_steps():
    """A buffer that forward() only reads."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = new()
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) * self.scale

    def replace(net: nn.Module) -> None:
        net.scale = torch.tensor([1.0, 2.0, 3.0])

    same(trained(None, replace, Scaled(), shard=16), plain_loop(replace, Scaled()))


def test_the_advice_for_a_replaced_parameter_works():
    """changing.py: change values in place, by load_state_dict or p.copy_, or make a new trainer."""

    def replace(net: Net) -> None:
        net.last.bias = nn.Parameter(torch.zeros(3))

    with pytest.raises(ConfigError, match="load_state_dict, p.copy_"):
        trained(None, replace, new())

    def copied(net: Net) -> None:
        source = donor()
        with torch.no_grad():
            for own, other in zip(net.parameters(), source.parameters(), strict=True):
                own.copy_(other)
        load_statistics(net)

    for way in (load, copied):
        same(trained(None, way, new(), shard=16), plain_loop(way, new()))


def test_the_repro_of_pretrained_statistics_in_both_orders():
    """A frozen BatchNorm normalises with the loaded statistics, whichever came first, the
    trainer or the load.
    """
    source = donor()
    assert float(source.norm.running_mean.abs().max()) > 0.1
    hashes = []
    for late in (False, True):
        net = new(frozen=True)
        if not late:
            net.load_state_dict(copy.deepcopy(source.state_dict()))
        trainer = DistributedTrainer(net, torch.optim.SGD(net.parameters(), 0.1), shard_size=6)
        if late:
            net.load_state_dict(copy.deepcopy(source.state_dict()))
        trainer.fit(BATCHES, epochs=2, verbose=False)
        assert torch.equal(net.norm.running_mean, source.norm.running_mean)
        hashes.append(trainer.weights_sha256())
    assert hashes[0] == hashes[1]
