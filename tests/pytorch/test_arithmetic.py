"""Ranks that compute different results from the same numbers, and modes of torch that decide bits."""

from __future__ import annotations

import importlib.util
import json
import random
import threading

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed (extra [torch])", allow_module_level=True)

import torch
from torch import nn
from torch.utils.data import TensorDataset

from odyssey import callbacks
from odyssey.comm import mock
from odyssey.errors import ConfigError
from odyssey.torch import (
    DataLoader,
    DistributedDataParallel,
    DistributedTrainer,
    arithmetic,
    first_shard,
)
from odyssey.torch.modes import Modes, flushes_subnormals

torch.manual_seed(2)
BATCHES = [(torch.randn(24, 6), torch.randint(0, 3, (24,))) for _ in range(3)]
CPU = torch.device("cpu")
_building = threading.Lock()
MODES = (False, 1, "highest", torch.float32, True)  # of shards, as _read_modes() returns them
CAUSE = "they have the same variables, libraries and processor"

PROGRAM = """
import os, torch
from torch import nn
from odyssey.torch import DistributedTrainer
torch.manual_seed(0)
x, y = torch.randn(16, 3, 10, 10), torch.arange(16) % 3
net = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(512, 3)
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
trainer = DistributedTrainer(net, optimizer, shard_size=4)
trainer.fit([(x, y)] * 2, verbose=False)
sha = trainer.weights_sha256()
if trainer.comm.rank == 0:
    print("sha", sha, len(trainer.arithmetic.notes))
"""


class Net(nn.Module):
    """With running statistics and an attribute that forward() sets.

    It draws no random numbers, because ranks that are threads share torch's generator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.seen = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.detach()
        return self.last(torch.relu(self.norm(self.first(x))))


def built(net=Net):
    with _building:
        torch.manual_seed(0)
        return net()


def trained(comm, *, batches=BATCHES, net=Net, listeners=(), options=None, **settings):
    module = built(net)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    trainer = DistributedTrainer(module, optimizer, comm=comm, shard_size=4, **settings)
    trainer.fit(batches, verbose=False, callbacks=list(listeners), **(options or {}))
    return trainer


def sha_of(comm, **settings):
    return trained(comm, **settings).weights_sha256()


# --- samples ---


def test_samples_are_the_same_again_and_draw_nothing():
    modes = Modes.current(1, warn_only=False)
    before = torch.random.get_rng_state()
    first = arithmetic.sample(modes, CPU)
    arithmetic._sample.cache_clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert arithmetic.sample(modes, CPU) == first
    assert torch.equal(before, torch.random.get_rng_state())
    assert len(first) == 10 and len(set(first.values())) == 10


def test_samples_depend_on_what_the_process_is_set_to():
    modes = Modes.current(1, warn_only=False)
    with torch.backends.mkldnn.flags(enabled=False):
        without = arithmetic.sample(modes, CPU)
    first = arithmetic.sample(modes, CPU)
    assert {name for name in first if first[name] != without[name]} >= {"fp32 convolutions"}


def _sample_of_rank_1(monkeypatch, names):
    """Makes the samples of rank 1 differ in these operations."""
    make = DistributedTrainer._make_shards

    def changed(self):
        shards = make(self)
        own = dict(shards.arithmetic.samples)
        if self.comm.rank == 1:
            own.update(dict.fromkeys(names, "0" * 16))
        shards.arithmetic.samples = own
        return shards

    monkeypatch.setattr(DistributedTrainer, "_make_shards", changed)


def test_ranks_whose_samples_differ_are_refused_before_the_first_step(monkeypatch):
    _sample_of_rank_1(monkeypatch, ["bf16 products", "fp32 reductions"])
    with pytest.raises(ConfigError) as found:
        mock.run(2, lambda comm: trained(comm))
    message = str(found.value)
    assert "rank 1 and rank 0 compute different results" in message
    assert "(fp32 reductions, bf16 products)" in message and CAUSE in message
    assert "other_arithmetic=True (--other-arithmetic)" in message and "\n" not in message


def test_other_arithmetic_is_noted_in_checkpoints_and_after_them(monkeypatch, tmp_path, capsys):
    _sample_of_rank_1(monkeypatch, ["bf16 products"])

    def work(comm, steps):
        options = {"checkpoint_dir": tmp_path, "steps": steps, "epochs": 2}
        return trained(comm, other_arithmetic=True, options=options).arithmetic.notes

    notes, _ = mock.run(2, lambda comm: work(comm, 2))
    assert [note["step"] for note in notes] == [0] and "bf16 products" in notes[0]["text"]
    said = capsys.readouterr().err
    assert said.count("Training continues, because other arithmetic is allowed") == 1
    manifest = json.loads((tmp_path / "step_00000002" / "manifest.json").read_text())
    saved = manifest["values"]["arithmetic"]
    assert saved["notes"] == notes and set(saved) >= {"samples", "variables", "processor"}
    # another machine, alone: what was noted stays
    monkeypatch.undo()
    trainer = trained(None, options={"checkpoint_dir": tmp_path, "epochs": 2})
    assert trainer.arithmetic.notes == notes


def test_the_variable_allows_other_arithmetic_as_the_keyword_does(monkeypatch):
    _sample_of_rank_1(monkeypatch, ["fp32 products"])
    monkeypatch.setenv("ODYSSEY_OTHER_ARITHMETIC", "1")
    first, second = mock.run(2, sha_of)
    assert first == second == sha_of(None)


def test_a_permission_that_one_rank_lacks_is_refused():
    with pytest.raises(ConfigError, match="other_arithmetic of rank 1 differs"):
        mock.run(2, lambda comm: trained(comm, other_arithmetic=comm.rank == 0))


# --- resume ---


def test_a_resume_with_other_arithmetic_is_refused_or_noted(monkeypatch, tmp_path, capsys):
    options = {"checkpoint_dir": tmp_path, "epochs": 2}
    monkeypatch.setenv("MKL_CBWR", "AVX2")  # MKL has read it long before: only named as a cause
    trained(None, options={**options, "steps": 2})
    monkeypatch.delenv("MKL_CBWR")
    sampled = arithmetic.sample(Modes.current(1, warn_only=False), CPU)
    changed = {**sampled, "fp32 convolutions": "1" * 16}
    monkeypatch.setattr(arithmetic, "sample", lambda modes, device: changed)
    with pytest.raises(ConfigError) as found:
        trained(None, options=options)
    message = str(found.value)
    assert "step_00000002 (fp32 convolutions)" in message
    assert "MKL_CBWR is not set now and AVX2 in step_00000002" in message
    trainer = trained(None, other_arithmetic=True, options=options)
    assert [note["step"] for note in trainer.arithmetic.notes] == [2]
    assert "Training continues" in capsys.readouterr().err


def test_a_resume_with_another_version_of_torch_can_be_allowed(monkeypatch, tmp_path):
    options = {"checkpoint_dir": tmp_path, "epochs": 2}
    trained(None, options={**options, "steps": 2})
    monkeypatch.setattr(torch, "__version__", "9.9")
    with pytest.raises(ConfigError, match=r"torch version 9\.9 instead of .*torch is 9\.9 now and"):
        trained(None, options=options)
    assert trained(None, other_arithmetic=True, options=options).steps == 6


def test_a_checkpoint_without_samples_is_resumed(monkeypatch, tmp_path):
    from odyssey.torch import state

    monkeypatch.setattr(state, "ARITHMETIC", "something else")
    trained(None, options={"checkpoint_dir": tmp_path, "epochs": 2, "steps": 2})
    monkeypatch.undo()
    assert trained(None, options={"checkpoint_dir": tmp_path, "epochs": 2}).steps == 6


# --- the first shard ---


@pytest.fixture
def prints(monkeypatch):
    """The fingerprints that ranks compare, by rank."""
    found: dict[int, list[int | None]] = {}
    compute = first_shard.FirstShard._compute

    def noted(self, value, step):
        result = compute(self, value, step)
        found.setdefault(self.comm.rank, []).append(result)
        return result

    monkeypatch.setattr(first_shard.FirstShard, "_compute", noted)
    return found


@pytest.mark.parametrize(
    "settings", [{}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"precision": "bf16"}]
)
@pytest.mark.parametrize("ranks", [2, 7])  # 7: one has no shard
def test_the_first_shard_is_the_same_on_all_ranks_and_changes_nothing(ranks, settings, prints):
    alone = sha_of(None, precision=settings.get("precision", "fp32"), deterministic="error")
    assert set(mock.run(ranks, lambda comm: sha_of(comm, **settings))) == {alone}
    assert set(prints) == set(range(ranks))
    (value,) = {value for values in prints.values() for value in values}
    assert value is not None and all(len(values) == 1 for values in prints.values())


def test_the_first_shard_leaves_no_trace_in_the_module(prints):
    """One of seven ranks has no shard, and computes the first one only to compare it."""

    def work(comm):
        return trained(comm, batches=BATCHES[:1]).module

    modules = mock.run(7, work)
    assert len(prints) == 7
    assert sum(module.seen is None for module in modules) == 1
    counters = {int(module.norm.num_batches_tracked) for module in modules}
    assert counters == {1}


def test_gradients_are_what_they_were(prints):
    def work(comm):
        module = built()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        trainer = DistributedTrainer(module, optimizer, comm=comm, shard_size=4)
        states = []

        class Compares(callbacks.Callback):
            def on_step_end(self, context):
                gradients = [p.grad for p in module.parameters()]
                states.append([gradient.clone() for gradient in gradients])

        trainer.fit(BATCHES[:1], verbose=False, callbacks=[Compares()])
        (gradients,) = states
        return [gradient.tolist() for gradient in gradients]

    one = mock.run(1, work)
    assert not prints
    assert mock.run(2, work) == 2 * one and len(prints) == 2


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_rank_whose_gradients_differ_is_refused_before_the_first_update(monkeypatch, zero):
    weights = {}

    def work(comm):
        module = built(lambda: nn.Linear(6, 3))
        before = module.weight.detach().clone()

        def loss(output, target):
            # as a product whose last bit differs on one machine
            scale = 1 + 2e-7 * (comm.rank == 1)
            return nn.functional.cross_entropy(output * scale, target)

        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        trainer = DistributedTrainer(module, optimizer, loss, comm=comm, shard_size=4, zero=zero)
        try:
            trainer.fit(BATCHES, verbose=False)
        finally:
            with trainer.gathered():
                weights[comm.rank] = before, module.weight.detach().clone()

    with pytest.raises(ConfigError, match=r"rank 1 and rank 0 .*\(gradients of the first shard\)"):
        mock.run(2, work)
    assert len(weights) == 2
    for before, after in weights.values():
        assert torch.equal(before, after)


def test_each_fit_compares_the_first_shard(prints):
    def work(comm):
        trainer = trained(comm)
        trainer.fit(BATCHES, verbose=False)

    mock.run(2, work)
    assert [len(values) for values in prints.values()] == [2, 2]


def test_what_may_differ_each_time_is_not_compared(prints):
    mock.run(2, lambda comm: sha_of(comm, deterministic="warn"))
    assert not prints


class Pairs(nn.Module):
    """Of inputs in a tuple or a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, scale, labels=None, note=None):
        return {"logits": self.layer(x) * scale, "loss": self.layer(x).square().mean()}


def _logits(output, target):
    return nn.functional.cross_entropy(output["logits"], target)


@pytest.mark.parametrize("kind", ["tuple", "dict", "shared"])
def test_batches_of_any_form_are_sent(kind, prints):
    def work(comm):
        module = built(Net if kind == "shared" else Pairs)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loss = {"tuple": _logits, "dict": None, "shared": None}[kind]
        trainer = DistributedTrainer(module, optimizer, loss, comm=comm, shard_size=4)
        x, y = BATCHES[0]
        scale = torch.ones(24, 1, dtype=torch.bfloat16)
        loader = {
            "tuple": [((x, scale), y)],
            "dict": [{"x": x, "scale": scale, "labels": y}],
            "shared": DataLoader(TensorDataset(x, y), 24, shuffle=True, shard_size=4, comm=comm),
        }[kind]
        trainer.fit(loader, verbose=False)
        return trainer.weights_sha256()

    one = mock.run(1, work)
    assert mock.run(3, work) == 3 * one and len(prints) == 3
    (value,) = {value for values in prints.values() for value in values}
    assert value is not None


class Drawing(Net):
    """Draws from a generator that nobody seeds alike."""

    def forward(self, x):
        random.random()
        return super().forward(x)


def test_numbers_of_other_generators_are_not_taken_for_arithmetic(prints):
    mock.run(2, lambda comm: sha_of(comm, net=Drawing))
    assert {value for values in prints.values() for value in values} == {None}


def test_reentrant_checkpoints_are_compared(prints):
    class Checkpointed(Net):
        def forward(self, x):
            x = x.requires_grad_()
            part = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=True)
            return self.last(torch.relu(part))

    first, second = mock.run(2, lambda comm: sha_of(comm, net=Checkpointed))
    assert first == second
    (value,) = {value for values in prints.values() for value in values}
    assert value is not None


# --- modes ---


def _set_modes() -> None:
    torch.set_flush_denormal(True)
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(False)


def _read_modes():
    return (
        flushes_subnormals(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


@pytest.fixture
def own_modes():
    """Puts the modes of this process back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1 << 18).mul_(2.0)  # starts threads, which would inherit the modes of a test
    torch.set_num_threads(threads)
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


class Modal(Net):
    """Computes with new tensors, and with subnormal numbers."""

    def forward(self, x):
        with torch.no_grad():
            tiny = x.mean() * 1e-30 * 1e-9
        x = super().forward(x)
        self.read = _read_modes()
        return x * torch.ones(3).to(x) + torch.full((), 0.1).float() + tiny * 1e30 * 1e9


class Changes(callbacks.Callback):
    """Changes the modes between steps, as a library that is loaded does."""

    def on_step_end(self, context):
        _set_modes()


def test_modes_that_a_callback_changes_are_set_for_steps_and_put_back(own_modes):
    alone = sha_of(None, net=Modal)
    trainer = trained(None, net=Modal, listeners=[Changes()])
    assert trainer.module.read == MODES
    assert _read_modes() == (True, 2, "medium", torch.float64, False)
    assert trainer.weights_sha256() == alone
    trainer.evaluate(BATCHES)
    assert trainer.module.read == MODES
    trainer.predict(BATCHES[0][0])
    assert trainer.module.read == MODES
    assert _read_modes() == (True, 2, "medium", torch.float64, False)


def test_modes_that_forward_changes_are_those_of_its_shard_alone(own_modes):
    class Rude(Modal):
        def forward(self, x):
            out = super().forward(x)
            assert self.read == MODES
            _set_modes()
            return out

    trainer = trained(None, net=Rude)
    trainer.evaluate(BATCHES)
    assert _read_modes() == MODES


def test_a_loop_of_ones_own_runs_shards_in_the_modes(own_modes):
    torch.manual_seed(0)
    net = DistributedDataParallel(Modal(), shard_size=4)
    _set_modes()
    read = []
    for x, y in net.shards(BATCHES[0]):
        nn.functional.cross_entropy(net(x), y).backward()
        read.append(_read_modes())
    assert set(read) == {MODES}
    assert _read_modes() == (True, 2, "medium", torch.float64, False)


def test_a_loop_whose_rank_flushes_subnormal_numbers_is_refused(own_modes):
    def work(comm):
        torch.set_flush_denormal(comm.rank == 1)  # of this thread
        DistributedDataParallel(built(), shard_size=4, comm=comm)

    with pytest.raises(ConfigError, match="treatment of subnormal numbers .* of rank 1 differs"):
        mock.run(2, work)


def test_an_error_in_a_shard_puts_the_modes_back(own_modes):
    class Fails(Net):
        def forward(self, x):
            raise ValueError("no")

    class Before(callbacks.Callback):
        def on_epoch_start(self, context):
            _set_modes()

    with pytest.raises(ValueError, match="no"):
        trained(None, net=Fails, listeners=[Before()])
    assert _read_modes() == (True, 2, "medium", torch.float64, False)


def test_threads_that_flush_subnormal_numbers_are_refused(monkeypatch, own_modes):
    from odyssey.torch import modes

    Modes.current(2, warn_only=False).check_threads()
    monkeypatch.setattr(modes, "_subnormals", lambda count: torch.zeros(count))
    Modes.current(1, warn_only=False).check_threads()
    with pytest.raises(ConfigError, match="2 threads of torch must keep subnormal numbers"):
        Modes.current(2, warn_only=False).check_threads()


# --- real processes ---


def test_a_variable_on_one_rank_is_refused_with_its_name(launch, tmp_path):
    """ONEDNN_MAX_CPU_ISA on one of two ranks, as a machine without AVX would compute."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nrank = int(os.environ['PMI_RANK'])\n"
        "if rank == 1:\n    os.environ['ONEDNN_MAX_CPU_ISA'] = 'SSE41'\n" + PROGRAM
    )
    done = launch.python(program, ranks=2)
    assert done.returncode == 64, done.stderr
    assert "ONEDNN_MAX_CPU_ISA is SSE41 on rank 1 and not set on rank 0" in done.stderr
    assert "fp32 convolutions" in done.stderr
    launch.environment["ODYSSEY_OTHER_ARITHMETIC"] = "1"
    done = launch.python(program, ranks=2)
    assert done.returncode == 0 and done.stdout.split()[2] == "2", done.stdout + done.stderr
    assert "Training continues" in done.stderr


def test_ranks_alike_have_the_bits_of_one(launch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    alone, several = (launch.python(program, ranks=ranks) for ranks in (1, 5))
    assert alone.returncode == several.returncode == 0, alone.stderr + several.stderr
    assert alone.stdout == several.stdout and alone.stdout.split()[2] == "0"
