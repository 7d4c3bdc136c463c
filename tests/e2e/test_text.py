"""GPT from the command line: trained, gone on with on other ranks, and asked for text."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim
from odyssey.comm import mock
from odyssey.parallel.mesh import Mesh

TRAIN = "--model gpt-mini --global-batch-size 6 --steps 3 --no-eval -q".split()


def weights(done):
    assert done.returncode == 0, done.stderr
    return re.search(r"weights ([0-9a-f]{16})", done.stdout)[1]


def test_a_training_and_its_text(launch, tmp_path):
    alone = launch.python(
        "-m",
        "odyssey",
        "train",
        *TRAIN,
        "--run-dir",
        tmp_path / "run",
        "--json",
        tmp_path / "r.json",
    )
    two = launch.python("-m", "odyssey", "train", *TRAIN, ranks=2)
    assert weights(alone) == weights(two)
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["dataset"], report["sequence_length"], report["shard_size"]) == (
        "shakespeare",
        64,
        3,
    )
    words = "--prompt", "HAM", "--tokens", 9, "--seed", 3
    said = [launch.python("-m", "odyssey", "generate", tmp_path / "run", *words) for _ in range(2)]
    assert said[0].returncode == 0, said[0].stderr
    assert (
        said[0].stdout == said[1].stdout
        and said[0].stdout.startswith("HAM")
        and len(said[0].stdout) == 13
    )
    refused = launch.python("-m", "odyssey", "generate", tmp_path, "--prompt", "HAM")
    assert (
        refused.returncode != 0
        and "no valid checkpoint" in refused.stderr
        and "Traceback" not in refused.stderr
    )


def trained(comm=None, steps=4, folder=None, **settings):
    ids = np.random.default_rng(0).integers(0, 11, (20, 10)).astype(np.int32)
    loader = data.DataLoader(data.arrays(ids[:, :-1], ids[:, 1:]), batch_size=10, shuffle=True)
    model = nn.models.build(
        "gpt", vocab_size=11, context=9, layers=2, heads=2, width=16, dropout=0.1
    )
    trainer = DistributedTrainer(
        model, optim.AdamW(lr=1e-2), shard_size=2, **({"comm": comm} if comm else {}), **settings
    )
    if folder is not None:
        settings = {"checkpoint_dir": folder, "checkpoint_every": 2}
        trainer.fit(loader, steps=steps, **settings)
    else:
        trainer.fit(loader, steps=steps)
    return trainer.weights_sha256()


@pytest.mark.parametrize(
    "mesh", [(3, 1, 1), (1, 2, 1), (1, 3, 1), (2, 2, 1), (1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 1, 2)]
)
def test_the_same_bits_on_every_mesh(mesh):
    wanted = trained(backend="local")
    assert set(
        mock.run(mesh[0] * mesh[1] * mesh[2], lambda comm: trained(comm, mesh=Mesh(*mesh)))
    ) == {wanted}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_same_bits_after_a_resume_on_another_layout(zero, tmp_path):
    wanted = trained(backend="local")
    mock.run(2, lambda comm: trained(comm, 2, tmp_path, zero=zero))
    assert trained(folder=tmp_path, backend="local") == wanted
