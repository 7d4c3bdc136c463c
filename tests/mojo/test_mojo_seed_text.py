"""The text of the plan that odyssey started from compiles as it was written, and has the weights
of Python.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim
from odyssey import functional as F
from odyssey.compile import library as build
from odyssey.core.placement import device

HERE = Path(__file__).parent
SOURCE = HERE / "seed_text.mojo"
ROOT = build.source_root()
INCLUDE = ["-I", str(ROOT / "mojo"), "-I", str(ROOT)]

#: What the plan says, line by line.
LITERAL = """
    var model = LeNet5()
    var optimizer = SGD(lr=0.01)
    # Automatic multi-GPU distribution
    var trainer = DistributedTrainer(
        model=model,
        optimizer=optimizer,
        num_gpus=4,
    trainer.train(train_loader, epochs=100)
        var x = self.layer1.forward(
        x.to(device=1)  # Transfer to GPU 1
        return self.layer3.forward(
    var pipeline = PipelineParallel
        stages=[
            Stage(layers=[conv1, conv2], device=0),
            Stage(layers=[conv3, conv4], device=1),
        micro_batch_size=8,
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled text, kept by the hash of its sources."""
    digest = hashlib.sha256(f"{build.compiler_version()} {build.host_cpu()} {ROOT}".encode())
    for path in (SOURCE, *sorted((ROOT / "shared").rglob("*.mojo"))):
        digest.update(path.read_bytes())
    kept = build.cache_dir() / "tests" / f"seed_text-{digest.hexdigest()[:16]}"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        aside = kept.with_name(f".{kept.name}.{os.getpid()}")
        done = build.run_mojo(["build", str(SOURCE), *INCLUDE, "-o", str(aside)])
        assert done.returncode == 0, done.stderr
        aside.rename(kept)
    return kept


class LargeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(784, 64)
        self.layer2 = nn.Linear(64, 64).to(device(1))
        self.layer3 = nn.Linear(64, 10).to(device(2))

    def forward(self, x):
        y = self.layer2(self.layer1(F.flatten(x)).to(device(1)))
        return self.layer3(y.to(device(2)))


def pipeline() -> nn.Module:
    stages = [
        nn.Stage(layers=[nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, stride=2)], device=0),
        nn.Stage(layers=[nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3, stride=2)], device=1),
        nn.Stage(layers=[nn.Flatten(), nn.Linear(256, 64), nn.Linear(64, 10)], device=2),
    ]
    return nn.PipelineParallel(stages=stages, micro_batch_size=8)


@pytest.fixture(scope="module")
def python() -> dict[str, str]:
    """The weights of the same three models in Python."""
    i = np.arange(96 * 784, dtype=np.int64)
    images = ((i * 7919 + i // 331) % 251).astype(np.uint8).reshape(96, 1, 28, 28)
    dataset = data.arrays(images, np.arange(96) * 7 % 10, classes=10, scale=1 / 255)
    # one for the three, as there: it counts epochs
    loader = data.DataLoader(dataset, 48, shuffle=True)
    weights = {}
    for name, make, epochs in (
        ("data", lambda: nn.models.build("lenet5"), 100),
        ("model", LargeModel, 10),
        ("pipeline", pipeline, 10),
    ):
        nn.manual_seed(0)
        trainer = DistributedTrainer(make(), optim.SGD(lr=0.01), threads=1)
        trainer.fit(loader, epochs=epochs)
        weights[name] = trainer.weights_sha256()
    return weights


def test_it_is_the_text_of_the_plan() -> None:
    lines = [line.strip() for line in SOURCE.read_text().splitlines()]
    for line in LITERAL.split("\n"):
        assert any(line.strip() in written for written in lines), line


@pytest.mark.parametrize("ranks", [0, 3])
def test_it_trains_with_the_weights_of_python(launch, program, python, ranks) -> None:
    done = launch(program, ranks=ranks)
    assert done.returncode == 0, done.stderr
    weights = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
    assert weights == python


BEGIN = """
from shared.training import Conv2d, DistributedTrainer, Engine, Flatten, LeNet5, Linear, Module
from shared.training import PipelineParallel, ReLU, SGD, Stage, Tensor, flatten
"""
PIPELINE = BEGIN + """
def main() raises:
    comptime last = 1
    var fc1 = Linear[784, 20]()
    var fc2 = Linear[20, 10, device=1]()
    var small = Linear[30, 10, device=1]()
    var elsewhere = Linear[20, 10]()
    var first = Stage(layers=[Flatten(), fc1, ReLU()], device=0)
    var second = STAGE
    print(Engine(PipelineParallel[In=Tensor[1, 28, 28], Out=Tensor[10, device=1], ...](
        stages=[first^, second^], micro_batch_size=8)).parameters.size)
"""  # fmt: skip
MODULE = BEGIN + """
struct Net(Module):
    comptime Input = Tensor[1, 28, 28]
    comptime Output = Tensor[10, device=1]
    var first: Linear[784, 20]
    var second: Linear[20, 10, device=1]

    def __init__(out self):
        self.first = {}
        self.second = {}

    def forward(self, input: Self.Input) raises -> Self.Output:
        comptime last = 1
        var x = self.first.forward(flatten(input))
        var y = BODY
        return self.second.forward(y)

def main() raises:
    print(Engine(Net()).parameters.size)
"""  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PIPELINE.replace("STAGE", "Stage(layers=[fc2], device=1)"), None),
        (PIPELINE.replace("STAGE", "Stage[place=last, ...](layers=[fc2])"), None),
        (
            PIPELINE.replace("STAGE", "Stage(layers=[small], device=1)"),
            "a stage does not fit what comes before it",
        ),
        (
            PIPELINE.replace("STAGE", "Stage(layers=[elsewhere], device=1)"),
            "names another device than its stage",
        ),
        (
            PIPELINE.replace("STAGE", "Stage(layers=[fc2, ReLU(), fc2], device=1)"),
            "a stage does not fit what comes",
        ),
        (
            PIPELINE.replace("STAGE", "Stage(layers=[ReLU()], device=1)"),
            "the last stage does not give the pipeline's Out",
        ),
        (MODULE.replace("BODY", "x.to[last]()"), None),
    ],
)
def test_sizes_and_places_that_do_not_fit_do_not_compile(
    tmp_path: Path, text: str, message: str | None
) -> None:
    path = tmp_path / "text.mojo"
    path.write_text(text)
    done = build.run_mojo(
        ["build", "--emit", "asm", str(path), *INCLUDE, "-o", str(tmp_path / "text.s")]
    )
    if message is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert message in done.stderr, done.stderr
