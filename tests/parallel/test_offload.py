"""Parameters, gradients and the optimizer's state in files: the bits of a training in memory, on
any layout.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

import odyssey
from odyssey import data, nn, optim
from odyssey.comm import mock
from odyssey.core import offload
from odyssey.errors import ConfigError, OutputError
from odyssey.parallel.mesh import Mesh
from odyssey.train.trainer import DistributedTrainer

MNIST = data.load("mnist", train=True)


@pytest.fixture(autouse=True)
def everything_in_files(monkeypatch):
    monkeypatch.setattr(offload, "SMALL", 64)


class Net(nn.Module):
    """A layer used twice, one that is not used, running statistics, a frozen one."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Linear(784, 24),
            nn.Linear(24, 24),
            nn.Linear(24, 24),
            nn.Linear(24, 10),
        )
        self.norm, self.unused = nn.BatchNorm1d(24), nn.Linear(5, 3)
        self.c.weight.requires_grad = False

    def forward(self, x):
        x = self.norm(self.a(odyssey.functional.flatten(x)))
        x = odyssey.functional.relu(self.b(odyssey.functional.relu(self.b(x))))
        return self.d(odyssey.functional.dropout(self.c(x), 0.2, self.training))


def trained(comm, settings, saving=None, steps=None, within=None, optimizer=optim.Adam):
    nn.manual_seed(1)
    with offload.offload(within):
        model = Net()
        made = optimizer(model.named_parameters()) if within else optimizer()
    trainer = DistributedTrainer(
        model, made, comm=comm, **{"threads": 1, "shard_size": 8, "device": "cpu", **settings}
    )
    loader = data.DataLoader(MNIST.take(140), batch_size=64, shuffle=True)
    history = trainer.fit(
        loader,
        MNIST.take(70),
        epochs=2,
        steps=steps,
        checkpoint_dir=saving,
        checkpoint_every=2 if saving else None,
    )
    weights = {k: v.tobytes() for k, v in trainer.state_dict().items()}
    state = {
        k: np.asarray(v).tobytes() for k, v in trainer.training_state.optimizer_state().items()
    }
    losses = [(r["train_loss"], r["test_loss"]) for r in history.records]
    return (weights, state, losses, trainer.weights_sha256()), trainer


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {}),
        (1, {"zero": 3, "clip_norm": 0.3, "threads": 3, "num_gpus": 2}),
        (1, {"precision": "fp16", "accumulation_steps": 2, "bucket_size_mb": 1e-4}),
        (2, {"bucket_size_mb": 1e-4, "rebalance": True}),
        (3, {"zero": 1, "overlap": False}),
        (2, {"zero": 2, "bucket_size_mb": 1e-3}),
        (3, {"zero": 3, "clip_norm": 0.3}),
        (2, {"reduction": "parameter_server", "servers": 2}),
    ],
    ids=str,
)
def test_the_bits_of_memory_also_over_resumes(tmp_path, ranks, settings):
    decides = {
        k: v for k, v in settings.items() if k in ("clip_norm", "precision", "accumulation_steps")
    }
    one = mock.run(1, trained, decides)[0][0]
    there = {**settings, "offload": tmp_path / "files"}
    for got, trainer in mock.run(ranks, trained, there):
        assert got == one
        kept = [trainer.arena.grads, *trainer.optimizer.state.values()]
        kept += [
            a
            for name, a in trainer.stepper.engine.storage.arrays.items()
            if name.startswith("gradients")
        ]
        assert all(in_a_file(a) for a in kept)
    assert not os.listdir(tmp_path / "files")  # nothing is left behind, and nothing has a name
    mock.run(ranks, trained, there, tmp_path / "a", 3)
    assert mock.run(2, trained, decides, tmp_path / "a")[0][0] == one
    mock.run(1, trained, decides, tmp_path / "b", 3)
    assert mock.run(ranks, trained, there, tmp_path / "b")[0][0] == one


def in_a_file(array):
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    array = array.obj if isinstance(array, memoryview) else array
    return type(array).__name__ == "mmap"


def test_models_and_optimizers_are_made_in_files(tmp_path):
    one = mock.run(1, trained, {})[0][0]
    got, trainer = mock.run(1, trained, {"offload": tmp_path}, None, None, tmp_path / "made")[0]
    assert got == one and trainer.arena.make.folder == tmp_path / "made"
    made = nn.Linear(64, 64)
    assert not in_a_file(made.weight.memory.array)
    gradients = trainer.last_gradients()
    assert gradients["a.weight"].shape == (24, 784) and np.abs(gradients["a.weight"]).max() > 0


def test_a_folder_that_cannot_be_used_is_named_in_a_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"\[offload\] .*/file cannot be used") as error:
        trained(mock.run(1, lambda comm: comm)[0], {"offload": tmp_path / "file"})
    assert "\n" not in str(error.value)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutputError, match="has no room for 1,024 MiB more") as error:
        offload.Files(tmp_path)(2**28)
    assert error.value.exit_code == 73 and not [p for p in os.listdir(tmp_path) if "offload" in p]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mesh": Mesh(pp=2)}, r"does not go with dp\(1\) x pp\(2\)"),
        ({"execution": "eager"}, "does not go with execution='eager'"),
        ({"reduction": "local_sgd"}, "does not go with reduction='local_sgd'"),
        ({"offload": "cpu"}, r"offload='cpu' .* where CPU workers have it; use --device gpu"),
    ],
)
def test_what_it_does_not_go_with_is_refused_in_a_line(tmp_path, settings, says):
    with pytest.raises(ConfigError, match=says) as error:
        mock.run(2, trained, {"offload": tmp_path, **settings})
    assert "\n" not in str(error.value)
