"""odyssey.torch.DistributedTrainer: the same bits on every number of ranks, across restarts, and
what is refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

if (
    not hasattr(importlib.util.find_spec("torch"), "origin")
    or importlib.util.find_spec("torch").origin is None
):
    pytest.skip("torch is not installed (extra [torch])", allow_module_level=True)

import safetensors.torch
import torch
from safetensors.numpy import load_file
from torch import nn

import odyssey
from odyssey import data
from odyssey.errors import ConfigError, NumericsError
from odyssey.torch import (
    DistributedTrainer,
    HorovodTrainer,
    PyTorchDDPTrainer,
    load_torch,
    to_torch,
)
from odyssey.torch import horovod as hvd

HERE = Path(__file__).parent
TRAINING, RANDOM = HERE / "training.py", HERE.parents[1] / "scripts" / "random-layouts"


class Named(nn.Module):
    """Takes named inputs, and returns its own loss, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x=None, labels=None):
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}


@pytest.mark.parametrize("kind", ["tuple", "list", "arrays", "dict"])
def test_a_step_takes_a_pair_or_a_dict(kind):
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    item = {
        "tuple": (x, y),
        "list": [x, y],
        "arrays": (x.numpy(), y.numpy()),
        "dict": {"x": x, "labels": y},
    }[kind]

    def made() -> DistributedTrainer:
        torch.manual_seed(0)
        module = Named() if kind == "dict" else nn.Linear(4, 3)
        return DistributedTrainer(module, torch.optim.SGD(module.parameters(), lr=0.1))

    stepped, fitted = made(), made()
    loss, _ = stepped.train_step(item)
    fitted.fit([item], verbose=False)
    assert loss > 0
    assert stepped.weights_sha256() == fitted.weights_sha256()
    with pytest.raises(ConfigError, match=r"train_step\(\) expected .* got a Tensor"):
        made().train_step(x)


@pytest.mark.parametrize("seed", [1, pytest.param(2026, marks=pytest.mark.long)])
def test_random_modules_have_the_same_bits_on_any_ranks(launch, seed):
    """Whole on one layout; stopped, and gone on with on others."""
    done = launch.python(RANDOM, "--torch", "--count", 8, "--seed", seed, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 same (" in done.stdout and "0 refused, 0 differ, 0 crashed" in done.stdout, (
        done.stdout
    )


@pytest.mark.long
def test_a_killed_rank_costs_time_only(launch):
    """kill -9 of a rank under odyssey launch: the bytes of a training on one rank that was never
    disturbed.
    """
    plain = launch.python(TRAINING, 120)
    assert plain.returncode == 0, plain.stderr
    run = launch.folder / "run"
    words = [
        sys.executable,
        "-m",
        "odyssey",
        "launch",
        "-n",
        "2",
        "--run-dir",
        str(run),
        str(TRAINING),
        "120",
        "--every",
    ]
    job = subprocess.Popen(
        words, env=launch.environment, cwd=launch.folder, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 120
    while not list((run / "checkpoints").glob("step_*")):
        assert time.monotonic() < until and job.poll() is None
        time.sleep(0.01)
    os.kill(json.loads((run / "ranks" / "1.json").read_text())["pid"], signal.SIGKILL)
    _, said = job.communicate(timeout=180)
    assert job.returncode == 0, said
    done = json.loads((run / "DONE.json").read_text())
    assert done["attempt"] == 2 and done["steps"] == 120 and "SIGKILL" in said
    assert f"sha256 {done['weights_sha256']}" in plain.stdout
    replayed = launch.python("-m", "odyssey", "replay", run, "--step", 118, "--layout", "dp=2")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.long
def test_verify_compares_and_names_a_fault(launch):
    verify = ("-m", "odyssey", "verify", "--script", TRAINING, "--layouts")
    done = launch.python(*verify, "dp=3,zero=1")
    assert done.returncode == 0 and done.stdout.count("same bits") == 1, done.stdout + done.stderr
    done = launch.python(*verify, "dp=2", "--bug")
    assert done.returncode != 0 and "DIFFERS" in done.stdout and "step 1" in done.stdout, (
        done.stdout + done.stderr
    )


def test_the_example_has_the_same_bits_on_two_ranks(launch):
    example = Path(odyssey.__file__).parents[2] / "examples" / "pytorch.py"
    said = [launch.python(example, "--steps", 3, ranks=ranks).stdout for ranks in (0, 2)]
    assert [line.partition(" ")[0] for line in said] == ["1", "2"]
    assert said[0].partition(":")[2] == said[1].partition(":")[2] != ""


CALLED = """
import sys
import torch
from torch import nn
from odyssey import callbacks, loggers
from odyssey.torch import DistributedTrainer
from odyssey.errors import Stopped

class Wish(callbacks.Callback):
    def on_step_end(self, context):
        if context.steps == int(sys.argv[2]) and context.trainer.comm.rank == context.trainer.comm.size - 1:
            context.stop = "a wish"
        elif context.steps == 13 and context.trainer.comm.rank == 0:
            context.finish("a wish")

torch.manual_seed(0)
module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3))
trainer = DistributedTrainer(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), shard_size=4)
x, y = torch.randn(40, 6), torch.arange(40) % 3
batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 40, 16)]
best = callbacks.ModelCheckpoint("test_loss", save_top_k=2)
given = [Wish(), callbacks.ReduceLROnPlateau(patience=1, min_delta=1.0), callbacks.LearningRateMonitor(), best]
logger = loggers.CSVLogger(sys.argv[1], 2)
try:
    history = trainer.fit(batches, batches[:1], epochs=9, checkpoint_dir=sys.argv[1], callbacks=[*given, logger])
except Stopped as end:
    sys.exit(end.exit_code)
sha = trainer.weights_sha256()
if trainer.comm.rank == 0:
    rows = [line.split(",")[:3] for line in logger.path.read_text().splitlines()]
    print(trainer.steps, sha, best.top, [record["lr"] for record in history.records], rows)
"""


def test_callbacks_and_loggers_have_the_same_bits_on_any_ranks_and_after_a_stop(launch):
    program = launch.folder / "called.py"
    program.write_text(CALLED)
    alone = launch.python(program, "a", 0)
    assert alone.stdout.startswith("13 ") and "0.1, 0.010000000000000002, 0.001" in alone.stdout, (
        alone.stderr
    )
    assert launch.python(program, "b", 7, ranks=3).returncode == 75
    assert launch.python(program, "b", 0, ranks=2).stdout == alone.stdout
    module = nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3)
    )
    with pytest.raises(
        ConfigError, match="of a PyTorch module, Sequential; build it and give odyssey.load"
    ):
        odyssey.load(launch.folder / "a" / "last")
    weights = load_file(launch.folder / "a" / "last" / "parameters.safetensors")
    odyssey.load(launch.folder / "a" / "last", module)
    assert all(
        np.array_equal(p.detach().numpy(), weights[name]) for name, p in module.named_parameters()
    )


# --- in one process -------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def made(module: nn.Module, **settings) -> DistributedTrainer:
    return DistributedTrainer(
        module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), **settings
    )


X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3


def test_one_shard_has_the_bits_of_torch_alone():
    torch.set_num_threads(1)
    theirs = net()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        for at in (0, 16):
            optimizer.zero_grad()
            nn.functional.cross_entropy(theirs(X[at : at + 16]), Y[at : at + 16]).backward()
            optimizer.step()
            scheduler.step()
    ours = net()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    trainer = DistributedTrainer(
        ours, optimizer, shard_size=16, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2)
    )
    trainer.fit([(X[:16], Y[:16]), (X[16:32], Y[16:32])], epochs=3)
    assert all(
        torch.equal(a, b)
        for a, b in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True)
    )
    assert trainer.rate == scheduler.get_last_lr()[0]


def test_evaluate_and_predict():
    module = net()
    trainer = made(module, shard_size=7)
    batches = [(X[:24], Y[:24]), (X[24:], Y[24:])]
    trainer.fit(batches)
    found, out = trainer.evaluate(batches), trainer.predict(batches)
    assert module.training
    module.eval()
    with torch.no_grad():
        assert torch.allclose(out, module(X), atol=1e-6)
        assert found.loss == pytest.approx(
            float(nn.functional.cross_entropy(module(X), Y)), rel=1e-5
        )
        assert found.accuracy == pytest.approx(float((module(X).argmax(1) == Y).float().mean()))


def test_inputs_are_left_as_they_are_and_bits_do_not_depend_on_where_they_lie():
    """A forward pass may write into its inputs; and memory need not begin on a cache line."""
    hashes = set()
    for floats in range(8):
        x = torch.zeros(40 * 6 + floats)[floats:].view(40, 6).copy_(X)
        module = nn.Sequential(nn.ReLU(inplace=True), *net())
        trainer = made(module, shard_size=7)
        trainer.fit([(x[:21], Y[:21]), (x[21:], Y[21:])], epochs=2)
        hashes.add(
            (
                trainer.weights_sha256(),
                hashlib.sha256(trainer.predict(x).numpy().tobytes()).hexdigest(),
            )
        )
        assert torch.equal(x, X)
    assert len(hashes) == 1


def test_what_no_shard_reaches_has_no_gradient():
    module = net()
    module.extra = nn.Linear(2, 2)
    module.forward = lambda x: nn.Sequential(*list(module)[:4])(x)
    before = module.extra.weight.detach().clone()
    trainer = DistributedTrainer(module, torch.optim.AdamW(module.parameters(), weight_decay=0.5))
    trainer.fit([(X, Y)])
    assert module.extra.weight.grad is None and torch.equal(module.extra.weight, before)
    assert module[0].weight.grad is not None


def test_a_batch_with_nan_changes_nothing(capsys):
    module = net()
    trainer = made(module, nonfinite="skip")
    bad = X.clone()
    bad[3, 2] = torch.nan
    before = trainer.weights_sha256()
    trainer.fit([(bad, Y)])
    assert trainer.weights_sha256() == before and "skipped" in capsys.readouterr().err
    with pytest.raises(NumericsError, match="not finite at step 1"):
        made(net()).fit([(bad, Y)])


class Sum(nn.Module):
    """A buffer that no rule merges."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().sum(0)
        return self.line(x)


def test_a_buffer_that_nothing_merges_is_refused_or_told(capsys):
    with pytest.raises(ConfigError, match="changes the buffer seen"):
        made(Sum()).fit([(X, Y)])
    made(Sum(), deterministic="warn").fit([(X, Y)])
    assert "changes the buffer seen" in capsys.readouterr().err


def test_a_parameter_that_forward_changes_is_refused():
    module = nn.Sequential(nn.Embedding(9, 3, max_norm=0.1), nn.Flatten(), nn.Linear(6, 3))
    with pytest.raises(ConfigError, match="forward.. changes the parameter 0.weight"):
        made(module).fit([(torch.arange(16).view(8, 2) % 9, Y[:8])])
    module = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))
    with pytest.raises(
        ConfigError, match="forward.. changes the buffer 0.parametrizations.weight.0._u"
    ):
        made(module).fit([(X, Y)])


def test_a_parameter_that_is_unfrozen_is_trained():
    module = net()
    module[0].weight.requires_grad_(False)
    trainer, before = made(module), module[0].weight.detach().clone()
    trainer.fit([(X, Y)])
    assert torch.equal(module[0].weight, before)
    module[0].weight.requires_grad_(True)
    trainer.fit([(X, Y)])
    assert not torch.equal(module[0].weight, before)


def test_a_scheduler_of_figures_is_refused():
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with pytest.raises(ConfigError, match="odyssey.callbacks.ReduceLROnPlateau"):
        DistributedTrainer(
            module, optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        )


class Put(nn.Linear):
    """An operation without a deterministic form."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clone().put_(torch.tensor([0]), torch.zeros(1))


def test_an_operation_without_a_deterministic_form_is_refused_or_told():
    with pytest.raises(
        ConfigError, match="put_ does not have a deterministic implementation; use another"
    ) as found:
        made(Put(6, 3)).fit([(X, Y)])
    assert "\n" not in str(found.value)
    with pytest.warns(UserWarning, match="put_ does not have"):
        made(Put(6, 3), deterministic="warn").fit([(X, Y)])


@pytest.mark.parametrize(
    ("module", "optimizer", "settings", "says"),
    [
        (lambda: nn.Linear(6, 3).double(), torch.optim.SGD, {}, "weight is float64 on cpu"),
        (lambda: nn.Linear(6, 3).half(), torch.optim.SGD, {}, "weight is float16 on cpu"),
        (
            lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)),
            torch.optim.SGD,
            {},
            "0 .Embedding. has sparse",
        ),
        (
            lambda: nn.Sequential(nn.SyncBatchNorm(3)),
            torch.optim.SGD,
            {},
            "0 .SyncBatchNorm. talks to other ranks",
        ),
        (
            lambda: nn.Linear(6, 3).bfloat16(),
            torch.optim.SGD,
            {},
            "weight is bfloat16 on cpu; float32 is allowed",
        ),
        (
            nn.ReLU,
            lambda *_, **__: torch.optim.SGD([torch.zeros(1)]),
            {},
            "parameters that are not the module's",
        ),
        (lambda: nn.LazyLinear(3), torch.optim.SGD, {}, "weight has no shape yet"),
        (net, torch.optim.LBFGS, {}, "LBFGS runs the model several times"),
        (net, torch.optim.SparseAdam, {}, "SparseAdam needs sparse gradients"),
        (net, lambda p, lr: torch.optim.SGD(p, torch.tensor(lr)), {}, "SGD's lr is a tensor"),
        (net, type("Own", (torch.optim.SGD,), {}), {"zero": 1}, "zero=1 with Own"),
        (net, type("Own", (torch.optim.SGD,), {}), {"zero": 3}, "zero=3 with Own"),
        (
            net,
            torch.optim.SGD,
            {"zero": 2, "reduction": "ring"},
            "zero=2 has sums of its own along the tree",
        ),
        (
            net,
            torch.optim.SGD,
            {"zero": 3, "compression": "bf16"},
            "zero=3 has sums of its own along the tree",
        ),
        (net, torch.optim.SGD, {"zero": 2, "rebalance": True}, "zero=2 takes shards in rounds"),
        (
            lambda: torch.compile(net()),
            torch.optim.SGD,
            {"zero": 3},
            "zero=3 looks at each operation",
        ),
        (net, torch.optim.SGD, {"num_gpus": 2}, "num_gpus=2 is a setting of our own models"),
        (net, torch.optim.SGD, {"reduction": "local_sgd"}, "ranks take every step together"),
        (net, torch.optim.SGD, {"deterministic": "no"}, "choose from error, warn"),
        (net, torch.optim.SGD, {"precision": "tf32"}, "precision is 'tf32'"),
        (
            net,
            torch.optim.SGD,
            {"loss": "mse"},
            "loss is 'mse'; give a function of .output, target. or an object",
        ),
        (net, torch.optim.SGD, {"loss": nn.MSELoss}, "loss is <class .*MSELoss'>; give a function"),
        (net, torch.optim.SGD, {"shard_sise": 2}, "did you mean 'shard_size'"),
    ],
)
def test_what_cannot_be_held_is_refused_in_a_line(module, optimizer, settings, says):
    module = module()
    with pytest.raises(ConfigError, match=says) as found:
        DistributedTrainer(module, optimizer(module.parameters(), lr=0.1), **settings)
    assert "\n" not in str(found.value)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    made(net(), shard_size=8).fit([(X, Y)], checkpoint_dir=tmp_path)
    for settings, says in (
        ({"shard_size": 4}, "shard size 8"),
        ({"shard_size": 8, "threads": 2}, "torch threads 1"),
    ):
        with pytest.raises(ConfigError, match=says):
            made(net(), **settings).fit([(X, Y)], epochs=2, checkpoint_dir=tmp_path)


def test_what_torch_is_told_is_of_the_configuration(tmp_path, monkeypatch, capsys):
    """oneDNN, the precision of products, channels-last and torch.compile change bits: a
    checkpoint knows them.
    """
    made(net(), shard_size=8).fit([(X, Y)], checkpoint_dir=tmp_path)
    with torch.backends.mkldnn.flags(enabled=False), pytest.raises(ConfigError, match="oneDNN"):
        made(net(), shard_size=8).fit([(X, Y)], epochs=2, checkpoint_dir=tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
        with pytest.raises(ConfigError, match="float32 products"):
            made(net(), shard_size=8).fit([(X, Y)], epochs=2, checkpoint_dir=tmp_path)
    compiled = net()
    compiled.compile(backend="eager")  # needs no C++ compiler
    made(compiled, shard_size=8).fit([(X, Y)], epochs=2, checkpoint_dir=tmp_path)
    assert "was made without torch.compile, this module is compiled" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="deterministic algorithms"):
        made(net(), shard_size=8, deterministic="warn").fit(
            [(X, Y)], epochs=2, checkpoint_dir=tmp_path
        )


def test_ranks_with_other_settings_of_torch_are_refused(launch):
    code = (
        "import torch\nfrom odyssey import comm\nfrom odyssey.torch import DistributedTrainer\n"
        "m = torch.nn.Linear(2, 2)\no = torch.optim.SGD(m.parameters(), 0.1)\n"
        "DistributedTrainer(m, o, threads=1 + comm.world().rank)\n"
    )
    done = launch.python("-c", code, ranks=2)
    assert done.returncode == 64 and "threads" in done.stderr, done.stderr


def test_batch_norm_of_a_shard_of_one_sample_is_refused_in_a_line():
    with pytest.raises(
        ConfigError,
        match="BatchNorm has one sample, as the last shard of a batch has one; use another",
    ):
        made(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), shard_size=16).fit(
            [(X[:33], Y[:33])]
        )


def test_other_platforms_names(capsys, tmp_path):
    """The constructors of the platforms that docs/pytorch.md names, with their arguments."""
    pairs = torch.utils.data.TensorDataset(X, Y)
    loader = torch.utils.data.DataLoader(pairs, 20, shuffle=True)
    trainer = PyTorchDDPTrainer(
        model=net(), num_gpus=4, batch_size=20, epochs=2, learning_rate=0.01, mixed_precision=True,
        scaler_init_scale=2**16, scaler_growth_interval=2000,
    )  # fmt: skip
    history = trainer.fit(loader, pairs, checkpoint_dir=tmp_path / "checkpoints", max_steps=3)
    assert history.steps == 3 and history.best_accuracy > 0 and history.total_time > 0
    assert "odyssey launch -n 4" in capsys.readouterr().err
    assert (
        type(trainer.optimizer) is torch.optim.Adam
        and trainer.rate == 0.01
        and trainer.precision == "bf16"
    )
    settings = {
        "checkpoint_frequency": 2,
        "checkpoint_dir": tmp_path / "all",
        "gradient_clipping": 1e-3,
    }
    settings |= {"gradient_accumulation_steps": 2, "find_unused_parameters": False}
    found = [PyTorchDDPTrainer(net(), epochs=n, **settings).fit(loader, pairs) for n in (2, 4)]
    assert [h.steps for h in found] == [2, 4], "resumed"
    assert sorted(p.name for p in (tmp_path / "all").glob("step_*"))[-1].endswith("4")
    assert PyTorchDDPTrainer(net(), num_gpus=4, zero_stage=3).zero == 3
    capsys.readouterr()
    quiet = HorovodTrainer(net(), loss_fn=nn.CrossEntropyLoss(), compression="fp16", verbose=False)
    record = quiet.fit(pairs, epochs=1).records[-1]
    norm = torch.cat([p.grad.flatten() for p in quiet.module.parameters()]).norm()
    assert record["grad_norm"] == pytest.approx(float(norm))
    assert quiet.metric_average(0.5, name="accuracy") == 0.5 and capsys.readouterr().err == ""
    assert (
        HorovodTrainer(model=net(), compression=hvd.Compression.fp16).strategy.compression == "fp16"
    )


LENET = {"conv1": "0", "conv2": "3", "fc1": "7", "fc2": "9", "fc3": "11"}


def lenet() -> nn.Module:
    first = [
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    last = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*first, nn.Flatten(), *last)


def test_weights_both_ways(tmp_path):
    theirs, ours = lenet(), odyssey.nn.LeNet5()
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "lenet.safetensors")
    odyssey.load_torch(ours, safetensors.torch.load_file(tmp_path / "lenet.safetensors"), LENET)
    x = np.random.default_rng(0).standard_normal((4, 1, 28, 28), np.float32)
    with odyssey.no_grad():
        out = np.asarray(ours(odyssey.Tensor(x)).numpy())
    assert np.allclose(out, theirs(torch.from_numpy(x)).detach().numpy(), atol=1e-5)
    again = lenet()
    to_torch(ours, again, LENET)
    assert all(
        torch.equal(a, b) for a, b in zip(theirs.parameters(), again.parameters(), strict=True)
    )


def test_one_model_trains_on_either_engine():
    """The same weights, data and settings: losses that agree to float32's precision, and not bit
    for bit.
    """
    theirs, ours = lenet(), odyssey.nn.LeNet5()
    load_torch(ours, theirs, LENET)
    some = data.load("mnist", train=True).take(96)
    batches = list(data.DataLoader(some, batch_size=32))
    trainers = [
        DistributedTrainer(theirs, torch.optim.SGD(theirs.parameters(), lr=0.05)),
        odyssey.DistributedTrainer(ours, odyssey.optim.SGD(lr=0.05)),
    ]
    losses = [trainer.fit(batches, epochs=2).train_loss for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    again = lenet()
    to_torch(ours, again, LENET)
    assert all(
        torch.allclose(a, b, atol=1e-4)
        for a, b in zip(theirs.parameters(), again.parameters(), strict=True)
    )


@pytest.mark.long
def test_metrics_are_sums_over_samples_with_the_same_bits_on_any_ranks(launch):
    program = """
import torch
from torch import nn
from odyssey.torch import DataLoader, DistributedTrainer
torch.manual_seed(0)
x, y = torch.randn(50, 6), torch.arange(50) % 7
module = nn.Linear(6, 7)
margin = lambda out, y: out.amax(1) - out.gather(1, y[:, None])[:, 0]
metrics = {"accuracy": "accuracy", "top3": "top3", "margin": margin}
trainer = DistributedTrainer(module, torch.optim.SGD(module.parameters(), lr=0.1), metrics=metrics, shard_size=4)
record = trainer.fit([(x[:30], y[:30]), (x[30:], y[30:])], [(x, y)], epochs=2).records[-1]
names = [f"{part}_{name}" for part in ("train", "test") for name in ("accuracy", "top3", "margin")]
found, out = trainer.evaluate([(x, y)]).metrics, module(x)
assert found["accuracy"] == record["test_accuracy"] == (out.argmax(1) == y).double().mean()
assert found["top3"] == (out.topk(3).indices == y[:, None]).any(1).double().mean()
assert abs(found["margin"] - margin(out, y).mean()) < 1e-6
if trainer.comm.rank == 0:
    print([record[name].hex() for name in names])
"""
    (launch.folder / "program.py").write_text(program)
    said = [launch.python("program.py", ranks=ranks) for ranks in (0, 3)]
    assert len({done.stdout for done in said}) == 1 and said[0].stdout.count("0x") == 6, [
        done.stderr for done in said
    ]


def test_metrics_that_cannot_be_summed_are_refused():
    with pytest.raises(
        ConfigError, match="accuracy and top5 are of targets that are class numbers"
    ):
        made(net(), loss=nn.MSELoss(), metrics=["top5"]).fit([(X, X[:, :3])])
    with pytest.raises(ConfigError, match="must give a value of each sample"):
        made(net(), metrics={"wrong": lambda out, y: out[:3]}).fit([(X, Y)])
    with pytest.raises(ConfigError, match="one of accuracy, mae, mse, top5"):
        made(net(), metrics=["f3"])


def test_a_regression_has_no_accuracy():
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 1)
    trainer = DistributedTrainer(
        module, torch.optim.SGD(module.parameters(), lr=0.1), loss=torch.nn.MSELoss()
    )
    batches = [(torch.ones(4, 3), torch.zeros(4, 1))]
    (record,) = trainer.fit(batches, batches, verbose=False).records
    assert {"train_loss", "test_loss"} == {
        name for name in record if name.startswith(("train_", "test_"))
    }
    assert trainer.evaluate(batches).accuracy is None
