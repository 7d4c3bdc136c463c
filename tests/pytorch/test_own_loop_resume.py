"""Loops of one's own with `odyssey.torch.DistributedDataParallel`: a saved loop that resumes ends
with the results of one that never stopped, or a line reports why it can't.
"""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from odyssey.errors import ConfigError  # noqa: E402
from odyssey.torch import DataLoader, DistributedDataParallel  # noqa: E402

HERE = Path(__file__).parent
CASES = HERE / "own_loop_cases.py"
BATCH = (torch.arange(32.0).view(8, 4),)


def run_cases(launch, count: int, *options: str) -> list[list[str]]:
    done = launch.python("-W", "ignore", CASES, count, *options, ranks=3)
    assert done.returncode == 0, done.stderr
    return [line.split()[:4] for line in done.stdout.splitlines() if line]


def test_random_loops_resume_on_other_ranks(launch):
    cases = run_cases(launch, 48)
    assert len(cases) == 48
    wrong = [number for number, _, whole, resumed in cases if whole != resumed]
    assert not wrong, f"python tests/pytorch/own_loop_cases.py: cases {wrong}"


def test_random_loops_that_lose_their_steps_differ(launch):
    """Shows that the test above can fail: a rebuilt state dict has no number of steps."""
    cases = run_cases(launch, 12, "--lose")
    differs = [whole != resumed for _, kind, whole, resumed in cases if kind == "draws"]
    assert sum(differs) >= len(differs) - 1 > 4
    assert all(whole == resumed for _, kind, whole, resumed in cases if kind == "fixed")


def test_the_documented_loop_resumes_on_other_ranks(launch, tmp_path):
    text = (HERE.parents[1] / "docs" / "pytorch.md").read_text()
    (code,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if "net.load_state_dict(" in block
    )
    functions, _, _ = code.partition("\ntrain(2, ")

    def printed(call: str, ranks: int) -> set[str]:
        done = launch.python("-c", f"{functions}\nprint(repr({call}))", ranks=ranks)
        assert done.returncode == 0 and not done.stderr, done.stderr
        return set(done.stdout.split())

    whole = printed(f"train(3, {str(tmp_path / 'whole.pt')!r})", 0)
    path = str(tmp_path / "resumed.pt")
    printed(f"train(1, {path!r})", 3)
    assert printed(f"train(3, {path!r})", 2) == whole and len(whole) == 1


def make_net(dropout: float = 0.5, **options: Any) -> DistributedDataParallel:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(dropout))
    return DistributedDataParallel(module, **{"shard_size": 4, **options})


def take_steps(net: DistributedDataParallel, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        for (x,) in net.shards(BATCH):
            net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def list_warnings(act: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in caught]


def test_names_are_those_of_the_module():
    net = make_net()
    take_steps(net, torch.optim.SGD(net.parameters(), 0.1))
    state = net.state_dict()
    assert list(state) == list(net.module.state_dict())
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    plain = copy.deepcopy(net.module)
    plain.load_state_dict(through_a_file(state))  # strict
    plain.load_state_dict({name.removeprefix("module."): t for name, t in state.items()})
    assert net.state_dict(prefix="net.").keys() == {f"net.{name}" for name in state}
    assert list(net.state_dict(destination=OrderedDict(), prefix="a.")._metadata) == ["a"]
    assert net.state_dict(keep_vars=True)["0.weight"] is net.module[0].weight


@pytest.mark.parametrize("way", [lambda s: s, copy.deepcopy, through_a_file])
def test_steps_go_through(way):
    net = make_net()
    take_steps(net, torch.optim.SGD(net.parameters(), 0.1), 3)
    again = make_net()
    again.load_state_dict(way(net.state_dict()))
    assert again.steps == 3


def test_a_state_without_steps_loads_and_leaves_them():
    net = make_net()
    net.steps = 7
    for state in (net.module.state_dict(), dict(net.state_dict())):
        assert net.load_state_dict(state, strict=True).missing_keys == []
    assert net.steps == 7


@pytest.mark.parametrize(
    "saved", [{}, {"steps": -1}, {"steps": "2"}, {"steps": 1, "batch": [1]}, 3, [1]]
)
def test_a_damaged_state_is_an_error(saved):
    net = make_net()
    state = net.state_dict()
    form = state._metadata[""]["odyssey"]
    state._metadata[""]["odyssey"] = {**form, **saved} if saved and type(saved) is dict else saved
    before = net.module[0].weight.clone()
    with pytest.raises(ConfigError, match="progress is damaged.*net.state_dict"):
        make_net().load_state_dict(state)
    assert torch.equal(net.module[0].weight, before) and net.steps == 0


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_loop_at_step_0_is_reported_once(kind):
    """The user saves the module and the optimizer, but not the net."""
    net = make_net()
    optimizer = OPTIMIZERS[kind](net.parameters())
    assert not list_warnings(lambda: take_steps(net, optimizer, 3))
    saved = through_a_file((net.module.state_dict(), optimizer.state_dict()))

    def resume(dropout: float = 0.5, steps: int = 0) -> list[str]:
        again = make_net(dropout)
        again.module.load_state_dict(saved[0])
        again.steps = steps
        optimizer = OPTIMIZERS[kind](again.parameters())
        optimizer.load_state_dict(saved[1])
        return list_warnings(lambda: take_steps(again, optimizer, 3))

    (line,) = resume()
    assert "began at step 0, but its optimizer has taken steps" in line
    assert "net.load_state_dict()" in line and "set net.steps" in line
    assert not resume(steps=3)
    assert not resume(dropout=0.0)  # no random numbers, so nothing differs


EPOCHS = """
import sys, torch, odyssey.torch
net = odyssey.torch.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)))
data = torch.utils.data.TensorDataset(torch.randn(8, 4))
loader = odyssey.torch.DataLoader(data, 4)
for epoch in range(int(sys.argv[1]), 4):
    loader.set_epoch(epoch)
    for batch in loader:
        for (x,) in net.shards(batch):
            net(x).sum().backward()
"""


@pytest.mark.parametrize(("first", "lines"), [(0, 0), (2, 1)])
def test_a_loop_that_starts_in_a_later_epoch_at_step_0_is_reported(launch, first, lines):
    """SGD without momentum has no state, so only the epoch shows that the run was resumed."""
    done = launch.python("-c", EPOCHS, first, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("began at step 0, but its first batch is number 0 of epoch 2") == lines


def test_settings_that_differ_from_the_saved_net_are_reported():
    net = make_net(seed=3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    take_steps(net, optimizer)
    state = through_a_file(net.state_dict())
    again = make_net(seed=4, shard_size=8)
    assert not list_warnings(lambda: again.load_state_dict(state))  # an evaluation needs no line
    optimizer = torch.optim.SGD(again.parameters(), 0.1)
    size, seed = list_warnings(lambda: take_steps(again, optimizer, 2))
    assert "shard_size was 4 and is 8; use shard_size=4" in size
    assert "seed was 3 and is 4; use seed=3" in seed


def test_whole_batches_keep_the_default_shard_size_of_the_first_batch_before_the_stop():
    net = make_net(shard_size=2)
    take_steps(net, torch.optim.SGD(net.parameters(), 0.1))
    again = make_net(shard_size=None)
    again.load_state_dict(net.state_dict())
    lines = list_warnings(lambda: take_steps(again, torch.optim.SGD(again.parameters(), 0.1)))
    assert again.shard_size == 2 and not lines


def test_gradients_that_wait_for_a_step_are_reported():
    net = make_net()
    for (x,) in net.shards(BATCH):
        net(x).square().mean().backward()
    state = net.state_dict()
    again = make_net()
    again.load_state_dict(state)
    optimizer = torch.optim.SGD(again.parameters(), 0.1)
    (line,) = list_warnings(lambda: take_steps(again, optimizer))
    assert "saved between shards() and optimizer.step()" in line


def test_batches_that_are_read_again_are_reported():
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))

    def loop(net: DistributedDataParallel, epochs: range, is_set: bool = True) -> None:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        loader = DataLoader(data, 4, shuffle=True, shard_size=4)
        for epoch in epochs:
            if is_set:
                loader.set_epoch(epoch)
            for batch in loader:
                for (x,) in net.shards(batch):
                    net(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    net = make_net()
    loop(net, range(2))
    for epochs, is_set, lines in ((range(2, 3), True, 0), (range(2, 4), False, 1)):
        again = make_net()
        again.load_state_dict(net.state_dict())
        told = list_warnings(lambda again=again, e=epochs, s=is_set: loop(again, e, s))
        assert len(told) == lines
    assert "last batch was number 1 of epoch 1, and the next one is number 0 of epoch 0" in told[0]
    assert "loader.set_epoch(epoch)" in told[0]


# --- modules that no net holds -------------------------------------------------------------------


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def count_hooks() -> int:
    return len(nn.modules.module._global_forward_pre_hooks)


def distill(net: DistributedDataParallel, teacher: nn.Module, batch: Any = BATCH) -> None:
    for (x,) in net.shards(batch):
        (net(x) - teacher(x)).square().mean().backward()


@pytest.fixture
def nothing_compiled():
    """Resets torch.compile: after a call of it, odyssey doesn't check modules outside of nets."""
    torch._dynamo.reset()


def test_a_teacher_whose_statistics_move_is_named(nothing_compiled):
    net = make_net()
    teacher = Teacher().requires_grad_(False)
    with pytest.raises(
        Exception,
        match=r"\[torch\] body.1 \(BatchNorm1d\) of a Teacher is called inside the loop over "
        r"shards\(\).*no net holds it.*eval\(\) on it, or make one DistributedDataParallel",
    ):
        distill(net, teacher)
    with pytest.raises(Exception, match=r"\] a BatchNorm1d is called inside"):
        distill(make_net(), nn.BatchNorm1d(4))
    assert not count_hooks()
    distill(net, teacher.eval())
    distill(net, nn.BatchNorm1d(4, track_running_stats=False))
    lax = make_net(deterministic="warn")
    lines = list_warnings(lambda: distill(lax, Teacher()))
    make_net()  # ends with the default of torch's setting
    assert len(lines) == 1 and "no net holds it" in lines[0]


def test_a_teacher_of_a_later_epoch_is_named_and_other_steps_have_no_hook(nothing_compiled):
    net = make_net()
    loader = DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), 4, shard_size=4)
    hooks = []
    for _ in range(2):
        for batch in loader:
            for (x,) in net.shards(batch):
                hooks.append(count_hooks())
                net(x).sum().backward()
    assert hooks == [1, 0, 1, 0]
    with pytest.raises(Exception, match=r"body.1 \(BatchNorm1d\) of a Teacher is called"):
        distill(net, Teacher(), next(iter(loader)))
    loop = net.shards(BATCH)
    next(loop)
    del loop  # a loop that is left before its end
    assert not count_hooks()


TOGETHER = """
import copy, hashlib, torch
from torch import nn
from odyssey.torch import DataLoader, DistributedDataParallel
torch.manual_seed(0)
student = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
teacher = copy.deepcopy(student).requires_grad_(False)
net = DistributedDataParallel(
    nn.ModuleDict({"student": student, "teacher": teacher}), shard_size=4)
optimizer = torch.optim.SGD(student.parameters(), 0.1)
for batch in DataLoader(torch.utils.data.TensorDataset(torch.randn(60, 8)), 20, shard_size=4):
    for (x,) in net.shards(batch):
        (student(x) - teacher(x) - x[:, :3]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for slow, p in zip(teacher.parameters(), student.parameters()):
            slow.lerp_(p, 0.1)
state = b"".join(t.numpy().tobytes() for t in net.state_dict().values())
print(hashlib.sha256(state).hexdigest())
"""


def test_a_teacher_in_the_net_has_the_same_statistics_on_any_number_of_ranks(launch):
    hashes = set()
    for ranks in (0, 3):
        done = launch.python("-c", TOGETHER, ranks=ranks)
        assert done.returncode == 0, done.stderr
        hashes |= set(done.stdout.split())
    assert len(hashes) == 1
