"""What a type checker finds in a user's program: the package says of which types its names are
(py.typed).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import odyssey

PROGRAM = """
import numpy as np

from odyssey import DistributedTrainer, Tensor, callbacks, data, functional as F, load, nn, optim
from odyssey.functional import relu


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(784, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(x))


model = Net()
train = data.load("mnist", train=True)
trainer = DistributedTrainer(model, optim.SGD(lr=0.1), shard_size=16)
history = trainer.fit(data.DataLoader(train, batch_size=32), epochs=1)
reveal_type(model(Tensor(np.zeros((2, 784), np.float32))))  # Tensor
reveal_type(F.relu(Tensor([1.0])) + 1)  # Tensor
reveal_type(relu(Tensor([1.0])))  # Tensor
reveal_type(history.records)  # list[dict[str, Any]]
reveal_type(trainer.predict(train))  # Any
reveal_type(load("runs/1"))  # Module
nn.Linear("a", 10)  # wrong
optim.SGD(lr="fast")  # wrong
data.DataLoader(train, batch=32)  # wrong
trainer.fit(train, epoch=3)  # wrong
trainer.fit(train, epochs="3")  # wrong
callbacks.EarlyStopping("test_loss", patient=3)  # wrong
"""


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_wrong_arguments_are_found_and_results_have_types(checker, tmp_path):
    pytest.importorskip(checker)
    (tmp_path / "user.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text("[mypy]\n")
    root = Path(odyssey.__file__).parents[1]
    words = (
        ["--no-incremental", "--config-file", "mypy.ini"]
        if checker == "mypy"
        else ["--pythonpath", sys.executable]
    )
    environment = {**os.environ, "MYPYPATH": str(root)}
    if checker == "pyright":
        (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{root}"]}}')
    done = subprocess.run(
        [sys.executable, "-m", checker, *words, "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
    )
    for number, line in enumerate(PROGRAM.splitlines(), 1):
        told = "\n".join(
            t for t in done.stdout.splitlines() if re.search(rf"user\.py:{number}\b", t)
        )
        code, _, meant = line.partition("  # ")
        if meant == "wrong":
            assert "error" in told, (line, done.stdout, done.stderr)
        else:
            assert "error" not in told, (line, told)
            assert not meant or meant in told, (line, told)
