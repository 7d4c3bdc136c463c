"""Mojo programs that train: the examples, the bits of Python on any number of ranks, everything
that Python's trainer has, and what must not compile.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gpu import emulated

import odyssey
from odyssey import data, nn, optim
from odyssey import functional as F
from odyssey.compile import library as build
from odyssey.core.placement import device
from odyssey.train.trainer import DistributedTrainer

HERE = Path(__file__).parent
ROOT = build.source_root()
REPOSITORY = HERE.parents[1]
EXAMPLES = REPOSITORY / "examples" / "mojo"
MNIST = ("--data-dir", Path(odyssey.__file__).parent / "data" / "mnist")
INCLUDE = ["-I", str(ROOT / "mojo"), "-I", str(ROOT)]
PARTS = ("elsewhere", "ends", "refusals", "settings", "uncaught", "zoo")
# of the engine in Mojo that was there before, on AVX-512
GOLDEN = json.loads((HERE / "golden.json").read_text())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all examples and PARTS: links to one executable, which goes by the name that
    it is called by.

    It is kept by the hash of its sources.
    """
    folder = tmp_path_factory.mktemp("examples")
    made = _compiled(folder)
    (folder / "bin").mkdir()
    for name in [*(path.stem for path in EXAMPLES.glob("*.mojo")), *PARTS]:
        (folder / "bin" / name).symlink_to(made)
    return folder / "bin"


def _compiled(folder: Path) -> Path:
    digest = hashlib.sha256(f"{build.compiler_version()} {build.host_cpu()} {ROOT}".encode())
    own = [HERE / f"{name}.mojo" for name in ("front_end", "refusals", "settings", "zoo")]
    for path in sorted([*EXAMPLES.glob("*.mojo"), *own, *(ROOT / "shared").rglob("*.mojo")]):
        digest.update(path.read_bytes())
    kept = build.cache_dir() / "tests" / f"front_end-{digest.hexdigest()[:16]}"
    if kept.is_file():
        return kept
    for path in EXAMPLES.glob("*.mojo"):  # a library of the compiler has the name of one of them
        shutil.copy(path, folder / f"example_{path.name}")
    made = folder / "front_end"
    done = build.run_mojo(
        [
            "build",
            "--Werror",
            str(HERE / "front_end.mojo"),
            *INCLUDE,
            "-I",
            str(folder),
            "-o",
            str(made),
        ]
    )
    assert done.returncode == 0, done.stderr
    kept.parent.mkdir(parents=True, exist_ok=True)
    aside = kept.with_name(f".{kept.name}.{os.getpid()}")
    shutil.copy(made, aside)
    aside.rename(kept)
    return kept


def weights(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return re.findall(r"\b[0-9a-f]{64}\b", done.stdout)[-1]


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", GOLDEN)
def test_the_weights_that_programs_always_had(launch, program, command):
    name, *options = command.split()
    expected = GOLDEN[command]["weights"] if build.host_cpu().startswith("x86-64-v4") else None
    for ranks in GOLDEN[command]["ranks"]:
        done = launch(program / name, *options, *(() if name == "zoo" else MNIST), ranks=ranks)
        expected = expected or weights(done)
        assert weights(done) == expected, ranks
        assert "odyssey: " not in done.stderr.replace("odyssey: no GPU found", ""), (
            "it ends without a word"
        )


def test_lenet_has_the_figures_of_the_python_command(launch, program):
    python = launch.result("--steps", 8, "--seed", 3, "--no-progress")
    for ranks in (0, 3):
        done = launch(program / "lenet", "--steps", 8, "--seed", 3, *MNIST, ranks=ranks)
        assert weights(done) == python["weights_sha256"], ranks
        figures = {
            line.rsplit(" ", 1)[0]: float(line.split()[-1])
            for line in done.stdout.splitlines()[1:3]
        }
        assert figures["train loss"] == python["train_loss"]
        assert done.stdout.splitlines()[1].endswith(f"accuracy {python['test_accuracy']}")


@pytest.mark.parametrize("name", ["large_model", "pipeline"])
def test_placed_models(launch, program, name):
    done = launch.python(REPOSITORY / "examples" / f"{name}.py", "--steps", 4)
    assert done.returncode == 0, done.stderr
    for ranks in (0, 3):
        assert (
            done.stdout.split()[-1]
            == weights(launch(program / name, "--steps", 4, *MNIST, ranks=ranks))[:16]
        ), ranks


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
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), Residual(64), nn.Linear(64, 10)
    )
    trainer = DistributedTrainer(model, optim.Adam(lr=1e-3))
    trainer.fit(data.DataLoader(data.load("mnist", train=True), 128, shuffle=True), steps=4)
    for ranks in (0, 2):
        assert (
            weights(launch(program / "own_layer", "--steps", 4, *MNIST, ranks=ranks))
            == trainer.weights_sha256()
        )
    assert len((EXAMPLES / "own_layer.mojo").read_text().splitlines()) < 60


def test_an_op_of_ones_own(launch, program):
    ops = REPOSITORY / "examples" / "own_ops.mojo"
    code = (
        "from odyssey import DistributedTrainer, data, functional as F, load_ops, nn, optim\n"
        f"load_ops({str(ops)!r}); F.unary('mish', saves='x', layer='Mish'); nn.manual_seed(0)\n"
        "model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.Mish(), nn.Linear(64, 10))\n"
        "trainer = DistributedTrainer(model, optim.Adam(lr=1e-3))\n"
        "trainer.fit(data.DataLoader(data.load('mnist', train=True), 128, shuffle=True), steps=4)\n"
        "print(trainer.weights_sha256())"
    )
    expected = weights(launch.python("-c", code))
    for ranks in (0, 2):
        assert (
            weights(launch(program / "own_op", "--steps", 4, "--ops", ops, *MNIST, ranks=ranks))
            == expected
        )
    done = launch(program / "own_op", "--ops", "none.mojo", *MNIST)
    assert done.returncode == 64 and "there is no file none.mojo" in done.stderr


def test_a_gpt_has_the_weights_of_the_python_example(launch, program):
    """Ids, tokens, attention, blocks in a row, tied weights, vectors without decay."""
    spec = importlib.util.spec_from_file_location("gpt_example", REPOSITORY / "examples" / "gpt.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    nn.manual_seed(0)
    optimizer = optim.AdamW(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    optimizer.undecayed = optim.vectors
    trainer = DistributedTrainer(
        example.GPT(76, 64), optimizer, loss=nn.CrossEntropyLoss(), shard_size=3, clip_norm=1.0,
        schedule=optim.schedule("cosine", 3, 0),
    )  # fmt: skip
    trainer.fit(data.DataLoader(data.shakespeare(length=64, train=True), 12, shuffle=True), steps=3)
    for ranks in (0, 2):
        done = launch(program / "gpt", "--steps", 3, "--no-eval", ranks=ranks)
        assert weights(done) == trainer.weights_sha256(), ranks
    assert len((EXAMPLES / "gpt.mojo").read_text().splitlines()) < 110


def test_loops_of_ones_own(launch, program):
    done = launch(program / "manual_multi_device", "--steps", 10, *MNIST)
    loss = next(
        float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step 10 ")
    )
    assert 2 < loss < 2.3 and len(weights(done)) == 64  # it compares the copies itself
    assert (
        launch(program / "manual_multi_device", "--steps", 1, "--devices", 3, *MNIST).returncode
        == 64
    )
    done = launch(program / "elsewhere")
    assert (
        done.returncode == 64
        and "the batch is on device 0, the model on device 2; move the batch" in done.stderr
    )


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
    "rmsprop": lambda: optim.RMSprop(lr=0.01, alpha=0.9),
}


@pytest.mark.parametrize(
    ("optimizer", "schedule", "batch", "settings"),
    [
        ("sgd", "step", 70, {}),
        ("adam", "cosine", 37, {"accumulation-steps": 3, "threads": 2}),
        ("adamw", "linear-warmup", 49, {"clip": 0.05, "seed": 2**40 + 7}),
        ("sgd", "constant", 3, {"drop-last": 1, "clip": 0.1}),  # in rows
        ("rmsprop", "step", 64, {}),
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
    loader = data.DataLoader(
        dataset, batch, shuffle=True, seed=seed, drop_last="drop-last" in settings
    )
    history = trainer.fit(loader, data.DataLoader(dataset, 64), epochs=3)
    options = [w for k, v in settings.items() for w in (f"--{k}", v)]
    words = ["--optimizer", optimizer, "--schedule", schedule, "--batch-size", batch, *options]
    for ranks in (0, 2) if batch > 32 else (0,):
        done = launch(program / "zoo", *words, ranks=ranks)
        assert done.returncode == 0, done.stderr
        *records, last, names = done.stdout.splitlines()
        assert last.split() == [str(history.steps), trainer.weights_sha256()], ranks
        keys = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
        assert [[float(w) for w in r.split()] for r in records] == [
            [r[k] for k in keys] for r in history.records
        ]
        assert names.split() == [n for n, _ in trainer.arena.named]


# --- everything that Python's trainer has ---------------------------------------------------------


@pytest.mark.parametrize(("options", "ranks"), [
    ("--backend mpi", 2), ("--backend shm --zero 3", 2), ("--reduction " "ring", 3), ("--precision " "bf16", 0),
    ("--tp 2", 2), ("--pp 2 --pipeline-schedule 1f1b", 2),
])  # fmt: skip
def test_settings_of_the_trainer(launch, program, options, ranks):
    done = launch(program / "settings", *options.split(), *MNIST, ranks=ranks)
    name, backend, *others = options.split()
    if name == "--backend":
        assert done.stdout.splitlines()[-1].startswith(f"{backend}: {ranks} ranks"), done.stderr
        launch.environment["ODYSSEY_BACKEND"] = backend
    python = launch.result(
        "--steps",
        3,
        "--no-progress",
        "--no-eval",
        *(others if name == "--backend" else options.split()),
        ranks=ranks,
    )
    assert weights(done) == python["weights_sha256"], done.stderr


def test_a_data_set_is_validated_as_a_loader_is(launch, program):
    done = launch(program / "settings", "--validate", 1, *MNIST, ranks=2)
    *_, words, epoch, evaluation = done.stdout.splitlines()[-1].split()
    assert words == "loss" and epoch == evaluation and float(epoch) > 0, done.stderr


@pytest.mark.skipif(emulated.compiler() is None, reason="no C compiler for the emulated GPU")
def test_four_gpus_in_one_process_over_nccl(launch, program):
    """In both languages: DistributedTrainer(model, optimizer, num_gpus=4, backend="nccl")."""
    words = [program / "settings", "--num-gpus", 4, *MNIST, "--backend"]
    without = launch(*words, "nccl")
    assert without.returncode == 69 and without.stderr.count("\n") == 1, without.stderr
    assert "no GPU was found on this machine; use backend='auto'" in without.stderr
    launch.environment = emulated.environment(4, base=launch.environment)
    # the kernels for GPUs may have to be compiled first
    auto = weights(launch(*words, "auto", timeout=900))
    assert weights(launch(*words, "nccl")) == auto
    script = (
        "from odyssey import DistributedTrainer, data, nn, optim\n"
        "t = DistributedTrainer(model=nn.models.build('lenet5'), num_gpus=4, backend='nccl',\n"
        "    optimizer=optim.SGD(lr=0.05, momentum=0.9, weight_decay=5e-4), "
        "schedule=optim.schedule('cosine', 3))\n"
        "t.train(data.DataLoader(data.load('mnist', train=True), 128, shuffle=True), steps=3)\n"
        "assert t.device == 'gpu'\nprint(t.weights_sha256())"
    )
    assert weights(launch.python("-c", script)) == auto


def test_launched_as_a_run(launch, program):
    """By `odyssey launch`, which has its checkpoints, and goes on from them after a rank has
    been killed.
    """
    words = [program / "lenet", "--steps", 6, "--no-eval", *MNIST]
    whole = weights(launch(*words))
    started = ["-m", "odyssey", "launch", "--allow-root", "-n", 2, "--run-dir"]
    done = launch.python(*started, launch.folder / "run", *words, "--checkpoint-every", 2)
    assert weights(done) == whole, done.stderr
    assert (launch.folder / "run" / "DONE.json").exists()
    done = launch.python(
        *started, launch.folder / "gone", "--max-restarts", 0, program / "ends", "killed"
    )
    assert "SIGKILL" in done.stderr and done.returncode == 137, done.stderr


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("front_end", ["mojo", "python"])
def test_checkpoints_from_before_resume(launch, program, front_end):
    """Written by the Mojo engine that was there before, and by Python at that time: step 3 of 6,
    in 1 process.
    """
    words = [program / "zoo", "--optimizer", "adam", "--batch-size", 37, "--accumulation-steps", 3]
    whole = launch(*words).stdout.splitlines()[-2]
    for ranks in (0, 2):
        folder = launch.folder / f"{front_end}{ranks}"
        shutil.copytree(HERE / "checkpoints" / front_end, folder / "step_00000003")
        done = launch(*words, "--checkpoint-dir", folder, ranks=ranks)
        assert done.stdout.splitlines()[-2] == whole and whole.startswith("6 "), done.stderr
        assert len(done.stdout.splitlines()) == 5, "three epochs, the totals and the names"


def test_checkpoints_resume_across_front_ends(launch, program):
    whole = launch.result("--steps", 12, "--no-progress", "--no-eval")["weights_sha256"]
    lenet = [program / "lenet", "--steps", 12, "--no-eval", *MNIST]
    a = launch.folder / "a"
    weights(launch(*lenet, "--stop-at", 6, "--checkpoint-every", 4, "--checkpoint-dir", a, ranks=2))
    assert sorted(path.name for path in a.glob("step_*")) == ["step_00000004", "step_00000006"]
    shutil.copytree(a, launch.folder / "b")
    done = launch(*lenet, "--checkpoint-dir", a, ranks=3)
    assert (
        weights(done) == whole and "resumed from step_00000006: step 6, epoch 1" in done.stdout
    ), done.stdout
    options = ["--steps", 12, "--no-progress", "--no-eval", "--checkpoint-dir"]
    assert launch.result(*options, launch.folder / "b")["weights_sha256"] == whole

    trainer = DistributedTrainer(
        nn.models.build("lenet5"), optim.SGD(lr=0.05, momentum=0.9, weight_decay=5e-4),
        schedule=optim.schedule("cosine", 12, 2),
    )  # fmt: skip
    loader = data.DataLoader(data.load("mnist", train=True), 128, shuffle=True)
    trainer.fit(loader, steps=6, checkpoint_dir=launch.folder / "c")
    shutil.copytree(launch.folder / "c", launch.folder / "d")
    assert weights(launch(*lenet, "--checkpoint-dir", launch.folder / "c", ranks=2)) == whole
    other = launch(
        program / "lenet",
        "--steps",
        12,
        "--seed",
        5,
        *MNIST,
        "--checkpoint-dir",
        launch.folder / "d",
    )
    assert (
        other.returncode == 64
        and "[resume] step_00000006 was made with seed 0, this training has 5" in other.stderr
    )


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "ranks", "code", "message"), [
    ("zoo --schedule zork", 0, 64, "[schedule] 'zork' is unknown"),
    ("settings --zero 7", 0, 64, "[train] zero is 7; it must be an integer from 0 to 3"),
    ("settings --backend zork", 2, 64, "[train] backend is 'zork'; choose from auto, "),
    ("zoo --threads 1_0", 0, 64, "[usage] --threads is 1_0; give a whole number"),
    ("own_layer --step 3", 3, 64, "[usage] --step is unknown; there are --data-dir --steps"),
    ("pipeline steps", 0, 64, "[usage] steps is no option; there are --data-dir --steps"),
    ("lenet --no-eval --steps", 0, 64, "[usage] --steps has no value"),
    ("lenet --accumulation-steps 0", 0, 64, "[usage] --accumulation-steps is 0; it " "must be at " "least 1"),
    ("lenet --data-dir nowhere", 0, 65, "--data-dir nowhere is not a folder"),
    ("lenet --data-dir nowhere", 3, 65, "--data-dir nowhere is not a folder"),
])  # fmt: skip
def test_what_is_refused_is_one_line(launch, program, words, ranks, code, message):
    name, *options = words.split()
    done = launch(program / name, *options, ranks=ranks)
    assert done.returncode == code and message in done.stderr, done.stderr
    assert done.stderr.count("odyssey: ") == 1 and "Traceback" not in done.stderr, done.stderr


def test_what_a_program_gets_wrong_is_an_error(launch, program):
    """The checks themselves are in refusals.mojo."""
    done = launch(program / "refusals")
    assert done.returncode == 0 and done.stdout == "18 refused\n", done.stderr


@pytest.mark.parametrize(("word", "code", "says"), [
    ("well", 0, ""), ("caught", 65, "odyssey: [rank 1] error: [data] rank 1 found nothing\n"),
    ("early", 65, "odyssey: [rank 1] error: [data] it found " "nothing\n"), ("exit", 3, "odyssey: [rank 1] exit code " "3"),
    ("alike", 65, "error: [data] it found nothing\n"),
])  # fmt: skip
def test_the_end_of_one_rank_is_the_end_of_all(launch, program, word, code, says):
    done = launch(program / "ends", word, ranks=3, timeout=120)
    assert done.returncode == code and says in done.stderr, done.stderr
    assert "not reached" not in done.stdout and done.stderr.count("odyssey:") == bool(says), (
        done.stderr
    )
    assert word != "well" or done.stdout == 3 * "3 2 0 3\n"


def test_an_error_that_main_lets_go_ends_all(launch, program):
    done = launch(program / "uncaught", ranks=2, timeout=120)
    assert done.returncode == 1 and "rank 1 found nothing" in done.stdout + done.stderr, done.stderr
    assert "odyssey: [rank 1] exit code 1" in done.stderr and "not reached" not in done.stdout


@pytest.mark.parametrize(("environment", "says"), [
    ({"PATH": "/nowhere"}, "there is no python3 in PATH; activate the environment"),
    ({"MOJO_PYTHON": "/nowhere/python"}, "MOJO_PYTHON is /nowhere/python, which is not there"),
    ({"MOJO_PYTHON_LIBRARY": "libc.so.6"}, "MOJO_PYTHON_LIBRARY is libc.so.6, " "which is no " "library of Python"),
    ({"MOJO_PYTHON": "bare"}, "cannot import odyssey (No module named 'odyssey'); activate the " "environment"),
])  # fmt: skip
def test_without_a_python_that_has_odyssey(launch, program, environment, says):
    del launch.environment["PYTHONPATH"]
    if environment.get("MOJO_PYTHON") == "bare":
        bare = launch.folder / "bare"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
        environment = {"MOJO_PYTHON": str(bare / "bin" / "python3")}
    launch.environment.update(environment)
    done = launch(program / "lenet", "--steps", 1)
    assert done.returncode == 69 and says in done.stderr and done.stderr.count("\n") == 1, (
        done.stderr
    )


LAYER = """
from shared.training import Engine, Linear, Module, Tensor, flatten, relu

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
    print(Engine(Net()).parameters.size)
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("relu(self.first.forward(flatten(x))).to(device=1)", None),
        (
            "relu(self.first.forward(flatten(x)))",
            "the input is on another device than the layer; move it with .to(",
        ),
        (
            "relu(self.first.forward(flatten(x))).to(device=2)",
            "the input is on another device than the layer; move it",
        ),
        (
            "relu(self.first.forward(x)).to(device=1)",
            "cannot be converted from 'PlacedTensor[Int(1), Int(28), Int(28)]'",
        ),
        (
            "flatten(x).to(device=1)",
            "cannot be converted from 'PlacedTensor[Int(784), place=Int(1)]' to "
            "'PlacedTensor[Int(20), place",
        ),
    ],
)
def test_a_mistake_in_sizes_or_places_does_not_compile(tmp_path, body, message):
    path = tmp_path / "net.mojo"
    path.write_text(LAYER.replace("BODY", body))
    done = build.run_mojo(
        ["build", "--emit", "asm", str(path), *INCLUDE, "-o", str(tmp_path / "net.s")]
    )
    if message is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0 and message in done.stderr, done.stderr


ROW = """
from shared.training import Conv2d, Engine, Flatten, Linear, PipelineParallel, ReLU, Sequential, Stage, Tensor

def main() raises:
    print(Engine(MODEL).parameters.size)
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
            "stages=[Stage(layers=[Linear[784, 20]()], device=0), Stage(layers=[Linear[20, "
            "10]()], device=1)])",
            "a stage does not fit what comes before it",
        ),
    ],
)
def test_a_row_of_layers_that_does_not_fit_does_not_compile(tmp_path, model, message):
    path = tmp_path / "row.mojo"
    path.write_text(ROW.replace("MODEL", model))
    done = build.run_mojo(
        ["build", "--emit", "asm", str(path), *INCLUDE, "-o", str(tmp_path / "row.s")]
    )
    assert done.returncode != 0 and message in done.stderr, done.stderr


# --- documentation --------------------------------------------------------------------------------


def undocumented(declaration: dict, name: str, traits: dict[str, set[str]]) -> list[str]:
    """Names without a word about them, here and below; those that begin with _ are nobody
    else's, and what a trait of the package asks for is documented there.
    """
    asked = {n for t in declaration.get("parentTraits", ()) for n in traits.get(t["name"], ())}
    inner = [
        d
        for kind in (
            "modules",
            "packages",
            "aliases",
            "structs",
            "traits",
            "functions",
            "fields",
            "overloads",
        )
        for d in declaration.get(kind, ())
        if isinstance(d, dict) and not d.get("name", "").startswith("_")
    ]
    found = [
        u
        for d in inner
        if d["name"] not in asked
        for u in undocumented(d, f"{name}.{d['name']}", traits)
    ]
    missing = not declaration.get("summary") and not declaration.get("overloads")
    return [name, *found] if missing else found


def test_every_public_name_is_documented(tmp_path):
    out = tmp_path / "doc.json"
    source = ROOT / "shared" / "training"
    done = build.run_mojo(["doc", str(source), "-I", str(ROOT / "mojo"), "-o", str(out)])
    assert done.returncode == 0, done.stderr[-3000:]
    page = json.loads(out.read_text())["decl"]
    traits = {
        t["name"]: {d["name"] for kind in ("aliases", "functions") for d in t[kind]} - {"__init__"}
        for m in page["modules"]
        for t in m["traits"]
    }
    assert {"Layer", "Parametric", "AnyTensor"} <= traits.keys() and "apply" in traits["Layer"]
    assert undocumented(page, "training", traits) == []
    assert {m["name"] for m in page["modules"]} >= {p.stem for p in source.glob("*.mojo")} - {
        "__init__"
    }


def test_the_page_shows_the_examples():
    page = (REPOSITORY / "docs" / "mojo.md").read_text()
    assert (EXAMPLES / "own_layer.mojo").read_text().split('"""', 2)[2].strip() in page
    for path in EXAMPLES.glob("*.mojo"):
        assert f"examples/mojo/{path.name}" in page, path.name
