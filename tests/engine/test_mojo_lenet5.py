"""The engine's own LeNet-5 in Mojo (shared/training/lenet5.mojo) trains to the same bits as the Python package's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from odyssey import build, data, nn, optim
from odyssey.trainer import DistributedTrainer

HERE = Path(__file__).parent
SAMPLES, BATCH, STEPS = 200, 50, 4


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Mojo program, built for the CPU that the Python package builds its kernels for."""
    root = build.source_root()
    out = tmp_path_factory.mktemp("mojo") / "train_lenet5"
    source = [str(HERE / "train_lenet5.mojo"), "-I", str(root / "mojo"), "-I", str(root)]
    done = build.run_mojo(["build", *source, *build.target_options(build.host_cpu()), "-o", str(out)])
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_same_bits(program: Path, name: str) -> None:
    done = subprocess.run(
        [str(program)], capture_output=True, text=True, env={**os.environ, "OPTIMIZER": name}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split()
    losses = [float(lines[2 * i + 1]) for i in range(STEPS)]
    weights = np.array([int(w, 16) for w in lines[2 * STEPS :]], np.uint32).view(np.float32)

    i = np.arange(SAMPLES * 784, dtype=np.int64)
    images = ((i * 7919 + i // 331) % 251).astype(np.uint8).reshape(SAMPLES, 1, 28, 28)
    labels = np.arange(SAMPLES) * 7 % 10
    dataset = data.arrays(images, labels, classes=10, scale=0.00390625, shift=-0.5)
    optimizer = optim.SGD(lr=0.05, momentum=0.9, weight_decay=5e-4) if name == "sgd" else optim.Adam(lr=1e-3)
    trainer = DistributedTrainer(nn.models.build("lenet5", seed=3), optimizer, threads=1)
    ours = [trainer.train_step(batch)[0] / BATCH for batch in data.DataLoader(dataset, batch_size=BATCH)]

    assert np.array_equal(trainer.arena.params.view(np.uint32), weights.view(np.uint32))
    assert np.allclose(ours, losses, rtol=1e-6)
    assert ours[-1] != ours[0]
