"""Mojo programs that train: the examples, the bits of Python on any number of ranks, and what must not compile."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import odyssey
from odyssey import build, data, nn, optim
from odyssey import functional as F
from odyssey.placement import device
from odyssey.trainer import DistributedTrainer

HERE = Path(__file__).parent
ROOT = build.source_root()
REPOSITORY = HERE.parents[1]
EXAMPLES = REPOSITORY / "examples" / "mojo"
MNIST = ("--data-dir", Path(odyssey.__file__).parent / "data" / "mnist")
INCLUDE = ["-I", str(ROOT / "mojo"), "-I", str(ROOT)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all examples and zoo.mojo: links to one executable, which goes by the name that it is called by.

    It is kept by the hash of its sources: compiling takes a minute.
    """
    folder = tmp_path_factory.mktemp("examples")
    made = _compiled(folder)
    (folder / "bin").mkdir()
    for name in [*(path.stem for path in EXAMPLES.glob("*.mojo")), "zoo", "elsewhere", "refusals"]:
        (folder / "bin" / name).symlink_to(made)
    return folder / "bin"


def _compiled(folder: Path) -> Path:
    digest = hashlib.sha256(f"{build.plan(ROOT).key} {ROOT}".encode())
    sources = sorted([*EXAMPLES.glob("*.mojo"), *(HERE / f"{name}.mojo" for name in ("front_end", "refusals", "zoo"))])
    for path in sources:
        digest.update(path.read_bytes())
    kept = build.cache_dir() / "tests" / f"front_end-{digest.hexdigest()[:16]}"
    if kept.is_file():
        return kept
    for path in EXAMPLES.glob("*.mojo"):  # a library of the compiler has the name of one of them
        shutil.copy(path, folder / f"example_{path.name}")
    made = folder / "front_end"
    options = [*INCLUDE, "-I", str(folder), *build.target_options(build.host_cpu()), "-o", str(made)]
    done = build.run_mojo(["build", "--Werror", str(HERE / "front_end.mojo"), *options])
    assert done.returncode == 0, done.stderr
    kept.parent.mkdir(parents=True, exist_ok=True)
    aside = kept.with_name(f".{kept.name}.{os.getpid()}")
    shutil.copy(made, aside)
    aside.rename(kept)
    return kept


def weights(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return next(line.split()[-1] for line in done.stdout.splitlines() if line.startswith("weights "))


# --- the same bits as Python ---------------------------------------------------------------------------------------


def test_lenet_has_the_weights_of_the_python_command_on_any_number_of_ranks(launch, program):
    python = launch.result("--steps", 8, "--seed", 3, "--no-progress")
    for ranks in (0, 1, 2, 3, 4):
        done = launch(program / "lenet", "--steps", 8, "--seed", 3, *MNIST, ranks=ranks)
        assert weights(done) == python["weights_sha256"], ranks
        figures = {line.rsplit(" ", 1)[0]: float(line.split()[-1]) for line in done.stdout.splitlines()[1:3]}
        assert figures["train loss"] == python["train_loss"]
        assert done.stdout.splitlines()[1].endswith(f"accuracy {python['test_accuracy']}")


def test_accumulation_threads_and_batches_that_do_not_fit(launch, program):
    options = ("--steps", 3, "--accumulation-steps", 2)
    python = launch.result("--global-batch-size", 90, *options, "--no-progress", "--no-eval")
    for threads in (1, 2):
        done = launch(program / "lenet", "--batch-size", 90, *options, "--threads", threads, "--no-eval", *MNIST)
        assert weights(done) == python["weights_sha256"], threads


@pytest.mark.parametrize("name", ["large_model", "pipeline"])
def test_placed_models(launch, program, name):
    done = launch.python(REPOSITORY / "examples" / f"{name}.py", "--steps", 4)
    assert done.returncode == 0, done.stderr
    for ranks, how in ((0, ""), (3, "3 ranks, each has one place"), (2, "2 ranks, each has all 3 places")):
        mojo = launch(program / name, "--steps", 4, *MNIST, ranks=ranks)
        assert done.stdout.split()[-1] == weights(mojo)[:16], ranks
        assert how in mojo.stderr


class Residual(nn.Module):
    """As in own_layer.mojo."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.inner = nn.Linear(features, features)
        self.outer = nn.Linear(features, features)

    def forward(self, x):
        return x + self.outer(F.relu(self.inner(x)))


def test_a_layer_of_ones_own(launch, program):
    nn.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), Residual(64), nn.Linear(64, 10))
    trainer = DistributedTrainer(model, optim.Adam(lr=1e-3))
    trainer.fit(data.DataLoader(data.load("mnist", train=True), 128, shuffle=True), steps=4)
    for ranks in (0, 2):
        assert weights(launch(program / "own_layer", "--steps", 4, *MNIST, ranks=ranks)) == trainer.weights_sha256()
    assert len((EXAMPLES / "own_layer.mojo").read_text().splitlines()) < 60


def test_loops_of_ones_own(launch, program):
    done = launch(program / "accumulation", "--steps", 2, *MNIST)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:3] for line in lines] == [["1", "x", "128:"], ["4", "x", "32:"]] and lines[0][5:] == lines[1][5:]
    done = launch(program / "manual_multi_device", "--steps", 10, *MNIST)
    loss = next(float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step 10 "))
    assert 2 < loss < 2.3 and len(weights(done)) == 64  # it compares the copies itself
    assert launch(program / "manual_multi_device", "--steps", 1, "--devices", 3, *MNIST).returncode == 64
    done = launch(program / "elsewhere")
    assert done.returncode == 64 and "the batch is on device 0, the model on device 2; move the batch" in done.stderr


class Zoo(nn.Module):
    """As in zoo.mojo."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False)
        self.norm = nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(36, 20)
        self.gate = nn.Linear(20, 20, bias=False)
        self.tail = nn.Sequential(nn.Dropout(0.25), nn.Linear(20, 5))
        self.loss = nn.NLLLoss()

    def forward(self, x):
        a = F.tanh(self.conv(x))
        b = a + self.norm(a) * 0.5
        d = F.dropout(F.sigmoid(self.fc(F.flatten(F.avg_pool2d(b, 2)))), 0.5, self.training)
        e = d * self.gate(d) - d
        return F.log_softmax(self.tail(e)).to(device(1))


OPTIMIZERS = {
    "sgd": lambda: optim.SGD(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.01),
    "adam": lambda: optim.Adam(lr=0.01, betas=(0.8, 0.999), weight_decay=0.1),
    "adamw": lambda: optim.AdamW(lr=0.01),
}


@pytest.mark.parametrize(
    ("optimizer", "schedule", "batch", "settings"),
    [
        ("sgd", "step", 70, {}),
        ("adam", "cosine", 37, {"accumulation-steps": 3, "threads": 2}),
        ("adamw", "linear-warmup", 49, {"clip": 0.05, "seed": 2**40 + 7}),
        ("sgd", "constant", 3, {"drop-last": 1, "clip": 0.1}),  # in rows
    ],
)
def test_every_layer_and_setting_is_pythons(launch, program, optimizer, schedule, batch, settings):
    i = np.arange(150 * 242, dtype=np.int64)
    images = ((i * 7919 + i // 331) % 251).astype(np.uint8).reshape(150, 2, 11, 11)
    dataset = data.arrays(images, np.arange(150) * 7 % 5, classes=5, scale=0.0078125, shift=-1)
    seed, accumulation = settings.get("seed", 4), settings.get("accumulation-steps", 1)
    nn.manual_seed(seed)
    trainer = DistributedTrainer(
        Zoo(), OPTIMIZERS[optimizer](), shard_size=16, threads=1, seed=seed, accumulation_steps=accumulation,
        schedule=optim.schedule(schedule, 9, 2), clip_norm=settings.get("clip", 1e9),
    )  # fmt: skip
    loader = data.DataLoader(dataset, batch, shuffle=True, seed=seed, drop_last="drop-last" in settings)
    history = trainer.fit(loader, data.DataLoader(dataset, 64), epochs=3)
    options = [w for k, v in settings.items() for w in (f"--{k}", v)]
    words = ["--optimizer", optimizer, "--schedule", schedule, "--batch-size", batch, *options]
    for ranks in (0, 2, 3) if batch > 32 else (0, 2):  # on two ranks each has one of its two places
        done = launch(program / "zoo", *words, ranks=ranks)
        assert done.returncode == 0, done.stderr
        *records, last, names = done.stdout.splitlines()
        assert last.split() == [str(history.steps), trainer.weights_sha256()], ranks
        keys = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
        assert [[float(w) for w in r.split()] for r in records] == [[r[k] for k in keys] for r in history.records]
        assert [n.strip(" '\"") for n in names.strip("[]").split(",")] == [n for n, _ in trainer.arena.named]


# --- checkpoints ---


def test_checkpoints_of_either_are_gone_on_from_by_the_other(launch, program):
    """Six of twelve steps in one language, the rest in the other, on another number of ranks: one training."""
    whole = launch.result("--steps", 12, "--no-progress", "--no-eval")["weights_sha256"]
    lenet = [program / "lenet", "--steps", 12, "--no-eval", *MNIST]
    first = [*lenet, "--stop-at", 6, "--checkpoint-every", 4, "--checkpoint-dir"]
    rest = [*lenet, "--checkpoint-dir"]

    a = launch.folder / "a"
    weights(launch(*first, a, ranks=2))
    assert sorted(path.name for path in a.glob("step_*")) == ["step_00000004", "step_00000006"]
    shutil.copytree(a, launch.folder / "b")
    inspected = launch.python("-m", "odyssey", "inspect", a)
    assert inspected.returncode == 0 and "step_00000006" in inspected.stdout, inspected.stderr
    done = launch(*rest, a, ranks=3)
    assert weights(done) == whole and done.stdout.startswith("resumed from step_00000006, epoch 1"), done.stdout
    options = ["--steps", 12, "--no-progress", "--no-eval", "--checkpoint-dir"]
    assert launch.result(*options, launch.folder / "b")["weights_sha256"] == whole

    c = launch.folder / "c"
    trainer = DistributedTrainer(
        nn.models.build("lenet5"), optim.SGD(lr=0.05, momentum=0.9, weight_decay=5e-4),
        schedule=optim.schedule("cosine", 12, 2),
    )  # fmt: skip
    trainer.fit(data.DataLoader(data.load("mnist", train=True), 128, shuffle=True), steps=6, checkpoint_dir=c)
    shutil.copytree(c, launch.folder / "d")
    assert weights(launch(*rest, c, ranks=2)) == whole
    other = launch(program / "lenet", "--steps", 12, "--seed", 5, *MNIST, "--checkpoint-dir", launch.folder / "d")
    assert other.returncode == 64 and "[resume] step_00000006 was made with seed 0, this training has 5" in other.stderr
    torn = launch.folder / "d" / "step_00000006" / "optimizer.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    done = launch(*rest, launch.folder / "d")
    assert weights(done) == whole and "odyssey: [checkpoint] step_00000006 is refused: opt" in done.stderr, done.stderr
    assert not done.stdout.startswith("resumed")


def test_whole_epochs_are_gone_on_from_in_the_next(launch, program):
    """With an optimizer that has two arrays, accumulation and a short last batch; cut anywhere."""
    words = [program / "zoo", "--optimizer", "adam", "--batch-size", 37, "--accumulation-steps", 3]
    whole = launch(*words).stdout.splitlines()
    for cut in (1, 2, 3, 5):
        folder = launch.folder / str(cut)
        stopped = launch(*words, "--stop-at", cut, "--checkpoint-dir", folder)
        assert stopped.returncode == 0 and stopped.stdout.splitlines()[-2] != whole[-2], stopped.stderr
        done = launch(*words, "--checkpoint-dir", folder, ranks=cut % 4)
        assert done.stdout.splitlines()[-2] == whole[-2], done.stderr
        assert done.stdout.splitlines()[-3] == whole[-3], "the last epoch's figures"


# --- what goes wrong -----------------------------------------------------------------------------------------------


def test_settings_that_are_refused(launch, program):
    for words, ranks, message in (
        (["zoo", "--batch-size", 32, "--num-gpus", 3], 0, "[train] 3 workers but 2 shards"),
        (["zoo", "--batch-size", 32], 3, "[train] 3 workers but 2 shards"),
        (["zoo", "--schedule", "zork"], 0, "[schedule] 'zork' is unknown"),
        (["zoo", "--threads", "two"], 0, "[usage] --threads is two; give a whole number"),
        (["zoo", "--threads", "1_0"], 0, "[usage] --threads is 1_0; give a whole number"),
        (["zoo", "--batch-size", 64, "--num-gpus", 2], 2, "[train] num_gpus is 2, but each rank has one place"),
        (["lenet", "--step", 3], 0, "[usage] --step is unknown; there are --data-dir --epochs"),
        (["own_layer", "--step", 3], 3, "[usage] --step is unknown; there are --data-dir --steps"),
        (["lenet", "3", "--steps", 3], 0, "[usage] 3 is no option; there are --data-dir --epochs"),
        (["own_layer", "--steps", 3, "-x"], 2, "[usage] -x is no option; there are --data-dir --steps"),
        (["pipeline", "steps"], 0, "[usage] steps is no option; there are --data-dir --steps"),
        (["lenet", "--no-eval", "--steps"], 0, "[usage] --steps has no value"),
        (["lenet", "--accumulation-steps", 0], 0, "[usage] --accumulation-steps is 0; it must be at least 1"),
        (["lenet", "--accumulation-steps", 3], 0, "[usage] --batch-size is 128; it must divide"),
        (["lenet", "--seed", -1], 0, "[usage] --seed is -1; it must be at least 0"),
        (["manual_multi_device", "--devices", 0], 0, "[usage] --devices is 0; it must be at least 1"),
        (["lenet", "--data-dir", "nowhere"], 3, "[data] mnist: train-images-idx3-ubyte not found in nowhere"),
        (["lenet", "--data-dir", "nowhere"], 0, "[data] mnist: train-images-idx3-ubyte not found in nowhere"),
    ):
        done = launch(program / words[0], *words[1:], ranks=ranks)
        assert done.returncode in (64, 65) and message in done.stderr, done.stderr
        assert done.stderr.count("odyssey: [") == 1, done.stderr


def test_what_a_program_gets_wrong_is_an_error(launch, program):
    """The checks themselves are in refusals.mojo."""
    for ranks in (0, 2):
        done = launch(program / "refusals", ranks=ranks)
        assert done.returncode == 0 and done.stdout == max(1, ranks) * "16 refused\n", done.stderr


LAYER = """
from shared.training import Conv2d, Flatten, Linear, Module, ReLU, Sequential, Tensor, flatten, relu

struct Net(Module):
    comptime Input = Tensor[1, 28, 28]
    comptime Output = Tensor[10, device=1]
    var first: Linear[784, 20]
    var second: Linear[20, 10, device=1]

    def __init__(out self):
        self.first = {}
        self.second = {}

    def forward(self, x: Self.Input) raises -> Self.Output:
        return self.second.forward(BODY)

def main() raises:
    print(Net().first.weight.size())
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("relu(self.first.forward(flatten(x))).to[1]()", None),
        ("relu(self.first.forward(flatten(x)))", "the input is on another device than the layer; move it with .to["),
        ("relu(self.first.forward(flatten(x))).to[2]()", "the input is on another device than the layer; move it"),
        ("relu(self.first.forward(x)).to[1]()", "cannot be converted from 'Tensor[Int(1), Int(28), Int(28)]'"),
        ("flatten(x).to[1]()", "cannot be converted from 'Tensor[Int(784), device=Int(1)]' to 'Tensor[Int(20), device"),
    ],
)
def test_a_mistake_in_sizes_or_places_does_not_compile(tmp_path, body, message):
    path = tmp_path / "net.mojo"
    path.write_text(LAYER.replace("BODY", body))
    done = build.run_mojo(["build", "--emit", "asm", str(path), *INCLUDE, "-o", str(tmp_path / "net.s")])
    if message is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0 and message in done.stderr, done.stderr


ROW = """
from shared.training import Conv2d, Engine, Flatten, Linear, PipelineParallel, ReLU, Sequential, Stage, Tensor

def main() raises:
    print(Engine(MODEL).trace(32, 1, True).samples)
"""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "Sequential[In=Tensor[1, 28, 28], Out=Tensor[10], ...](Linear[784, 10]())",
            "a layer of a Sequential does not fit what comes before it",
        ),
        (
            "Sequential[In=Tensor[784], Out=Tensor[10], ...]("
            "Sequential[In=Tensor[784], Out=Tensor[10], ...](Linear[784, 20](), Linear[30, 10]()))",
            "a layer of a Sequential does not fit what comes before it",
        ),
        (
            "Sequential[In=Tensor[784], Out=Tensor[10], ...](Linear[784, 20](), ReLU())",
            "the last layer of a Sequential does not give its Out",
        ),
        (
            "PipelineParallel[In=Tensor[784], Out=Tensor[10, device=1], ...]("
            "Stage[device=0, ...](Linear[784, 20]()), Stage[device=1, ...](Linear[20, 10]()))",
            "a stage does not fit what comes before it",
        ),
    ],
)
def test_a_row_of_layers_that_does_not_fit_does_not_compile(tmp_path, model, message):
    path = tmp_path / "row.mojo"
    path.write_text(ROW.replace("MODEL", model))
    done = build.run_mojo(["build", "--emit", "asm", str(path), *INCLUDE, "-o", str(tmp_path / "row.s")])
    assert done.returncode != 0 and message in done.stderr, done.stderr


# --- documentation -------------------------------------------------------------------------------------------------


def test_every_public_name_is_documented(tmp_path):
    """In every file of the package, with what it takes, gives and raises; names that begin with _ are nobody else's."""
    out = tmp_path / "doc.json"
    source = ROOT / "shared" / "training"
    done = build.run_mojo(
        ["doc", "--diagnose-missing-doc-strings", "--Werror", str(source), "-I", str(ROOT / "mojo"), "-o", str(out)]
    )
    problems = re.findall(r"training/(\w+\.mojo:\d+):\d+: error: (.*)", done.stderr)
    assert problems == [] and done.returncode == 0, done.stderr[-3000:]
    documented = {module["name"] for module in json.loads(out.read_text())["decl"]["modules"]}
    assert documented >= {path.stem for path in source.glob("*.mojo")} - {"__init__"}


def test_the_page_shows_the_examples():
    page = (REPOSITORY / "docs" / "mojo.md").read_text()
    assert (EXAMPLES / "own_layer.mojo").read_text().split('"""', 2)[2].strip() in page
    for path in EXAMPLES.glob("*.mojo"):
        assert f"examples/mojo/{path.name}" in page, path.name
