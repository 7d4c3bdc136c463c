"""The code blocks of the documents that odyssey was asked to follow run, with as many changed
lines as we say.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

import odyssey
from odyssey.errors import CheckpointError, ConfigError

HERE = Path(__file__).parent
needs = pytest.mark.skipif(
    not all(
        importlib.util.find_spec(name)
        for name in ("torch", "ray", "mlflow", "tensorboardX", "sqlalchemy")
    ),
    reason="torch, ray, mlflow, sqlalchemy or tensorboardX is not installed",
)


@needs
@pytest.mark.long
@pytest.mark.parametrize("ranks", [0, 2])
def test_the_blocks_of_the_documents_run(launch, ranks):
    launch.environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{launch.folder}/mlflow.db"
    done = launch.python("-W", "ignore", HERE / "run.py", ranks=ranks, timeout=600)
    assert done.returncode == 0, done.stderr
    said = {
        name: lines
        for name, lines in map(json.loads, re.findall(r'^\["\d+:.*$', done.stdout, re.M))
    }
    page = (HERE / "README.md").read_text()
    for document, blocks in re.findall(r"^\| (\d{3}) \| ([\d: ,]+) \|", page, re.M):
        told = {
            f"{document}:{number}": int(lines)
            for number, lines in re.findall(r"(\d+): (\d+)", blocks)
        }
        own = {name: lines for name, lines in said.items() if name.startswith(document)}
        assert own.items() <= told.items() and (ranks or own == told), (own, told)
    assert len(said) >= 35


def test_names_of_other_platforms(tmp_path, capsys):
    """Document 004's, and what names a replacement."""
    import numpy as np

    from odyssey import DDP, Tensor, data, nn, optim
    from odyssey import distributed as dist

    world = dist.World()
    assert world.clone() is world and dist.Backend.Mock is dist.Backend.MOCK
    even, odd = (dist.ProcessGroup(range(first, world.world_size(), 2)) for first in (0, 1))
    assert even.is_member and not odd.is_member and odd.size() == 0
    assert dist.all_reduce_sum_group(np.ones(2), even).tolist() == [1, 1]
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    ddp = DDP(model, device_ids=[0])
    sampler = dist.DistributedSampler(8, 1, 0)
    loader = data.DataLoader.with_sampler(
        data.arrays(np.zeros((8, 4), np.float32), np.zeros(8, int)), 4, sampler
    )
    assert len(list(loader)) == 2
    odyssey.save_model(ddp.module, tmp_path / "checkpoint.pt")
    again = odyssey.load_model(tmp_path / "checkpoint.pt")
    assert type(again) is nn.Sequential and np.array_equal(
        again[0].weight.numpy(), model[0].weight.numpy()
    )
    x = Tensor(np.ones((2, 4), np.float32))
    assert np.array_equal(DDP(again)(x).numpy(), ddp(x).numpy())
    with pytest.raises(
        ConfigError, match="device_ids is .0, 1., and a process has one replica; start more ranks"
    ):
        DDP(nn.Linear(2, 2), device_ids=[0, 1])
    assert ddp.module() is model
    dist.destroy_process_group()

    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for group in optimizer.param_groups:
        group["lr"] *= 2
    assert optimizer.lr == 0.2 and optimizer.param_groups[0]["momentum"] == 0.9
    assert [p.shape for p in optimizer.param_groups[0]["params"]] == [
        p.shape for p in model.parameters()
    ]
    with pytest.raises(KeyError, match="learning_rate; momentum, .*, lr can be set"):
        optimizer.param_groups[0]["learning_rate"] = 1
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        (tmp_path / "no").write_bytes(b"no")
        odyssey.load_model(tmp_path / "no")
    with pytest.raises(ConfigError, match="steps is 2 and max_steps 3, which mean one"):
        odyssey.DistributedTrainer(model, optim.SGD(), device="cpu").fit(
            loader, steps=2, max_steps=3
        )
    with pytest.raises(
        ConfigError, match="tf.distribute; a Keras model trains with KERAS_BACKEND=torch"
    ):
        _ = odyssey.TensorFlowDistributedTrainer
