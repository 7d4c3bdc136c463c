"""odyssey.torch.horovod: Horovod's calls, its own examples with the import changed, a job that
is started anew.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from pytorch.published import RUN, changed, mnist

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed (extra [torch])"
)
needs_torchvision = pytest.mark.skipif(
    not all(
        importlib.util.find_spec(name) for name in ("torchvision", "PIL", "filelock", "packaging")
    ),
    reason="torchvision, pillow, filelock or packaging is not installed",
)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_names_do_what_horovods_do(launch, ranks):
    done = launch.python("-W", "ignore", HERE / "hvd_names.py", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same"] * ranks


def example(launch, name: str) -> Path:
    """Horovod's program with the import changed, and a small MNIST beside it."""
    mnist(launch.folder / "data")
    changes = [("import horovod.torch as hvd", "import odyssey.horovod.torch as hvd")]
    if name == "pytorch_mnist.py":
        changes.append(("import horovod\n", "import odyssey.horovod as horovod\n"))
    return changed(launch, f"horovod/{name}", *changes)


@needs_torchvision
@pytest.mark.long
@pytest.mark.parametrize("name", ["pytorch_mnist.py", "pytorch_mnist_elastic.py"])
def test_horovods_mnist_examples(launch, name):
    program = example(launch, name)
    done = launch.python(
        "-W",
        "ignore",
        RUN,
        program,
        "--epochs",
        2,
        "--batch-size",
        16,
        "--lr",
        0.05,
        "--data-dir",
        "data",
        ranks=2,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Test set: Average loss") == (2 if name == "pytorch_mnist.py" else 1)
    assert "Train Epoch: 2 [" in done.stdout


@pytest.mark.long
@needs_torchvision
def test_horovods_synthetic_benchmark(launch):
    program = example(launch, "pytorch_synthetic_benchmark.py")
    few = (
        "--num-warmup-batches",
        1,
        "--num-batches-per-iter",
        1,
        "--num-iters",
        1,
        "--fp16-allreduce",
    )
    done = launch.python(
        "-W", "ignore", RUN, program, "--model", "resnet18", "--batch-size", 1, *few, ranks=2
    )
    assert done.returncode == 0, done.stderr
    assert "Total img/sec on 2 CPU(s)" in done.stdout


ELASTIC = """
import os, torch
import odyssey.torch.horovod as hvd
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
@hvd.elastic.run
def train(state):
    begun = state.step
    while state.step < 6:
        state.optimizer.zero_grad()
        state.model(torch.ones(1, 2) * hvd.rank()).sum().backward()
        state.optimizer.step()
        state.step += 1
        state.commit()
        if state.step == 4 and begun == 0 and hvd.rank() == 1:
            os.kill(os.getpid(), 9)
    print(f"rank {hvd.rank()} went from {begun} to {state.step}", flush=True)
train(hvd.elastic.TorchState(model, optimizer, step=0))
"""


def test_a_job_that_lost_a_rank_goes_on_from_its_last_commit(launch):
    (launch.folder / "elastic.py").write_text(ELASTIC)
    done = launch.python("-m", "odyssey", "launch", "-n", 2, "--run-dir", "run", "elastic.py")
    assert done.returncode == 0, done.stderr
    assert "went from 4 to 6" in done.stdout or "went from 3 to 6" in done.stdout, (
        done.stdout,
        done.stderr,
    )
