"""Models that people use: rows of the table of scripts/verify-torch, and a fault on one rank
that names it.
"""

from __future__ import annotations

import pytest
from beds import torch_models

pytest.importorskip("torch")


@pytest.mark.long
@pytest.mark.parametrize(("model", "precision"), [("cnn", "bf16"), ("gpt", "fp32")])
def test_a_model_has_the_same_bits_everywhere(model, precision, tmp_path):
    row = torch_models.row(model, precision, tmp_path)
    assert row[:2] == [model, precision] and row[-1].startswith("step 3: weight")


@pytest.mark.long
def test_ranks_that_hold_other_weights_are_told_which(launch):
    done = launch.python(torch_models.PROGRAM[1], "--bug", "--check", 1, ranks=3)
    assert done.returncode != 0
    assert "rank 1" in done.stderr and "weights" in done.stderr and "step 2" in done.stderr, (
        done.stderr
    )


SLEEPS = """
import time, torch
from torch import nn
from odyssey.torch import DistributedTrainer
module = nn.Linear(3, 2)
trainer = DistributedTrainer(module, torch.optim.SGD(module.parameters(), 0.1), shard_size=2)
def batches():
    yield torch.ones(8, 3), torch.zeros(8, dtype=torch.long)
    if trainer.comm.rank == 1:
        time.sleep(600)
    yield torch.ones(8, 3), torch.zeros(8, dtype=torch.long)
trainer.fit(batches())
"""


@pytest.mark.long
def test_a_sleeping_rank_is_named_with_its_own_line(launch):
    script = launch.folder / "sleeps.py"
    script.write_text(SLEEPS)
    number = SLEEPS.splitlines().index("        time.sleep(600)") + 1
    words = ("-m", "odyssey", "launch", "-n", 2, "--watchdog", 4, "--max-restarts", 0, "--run-dir")
    done = launch.python(*words, launch.folder / "run", script)
    assert done.returncode != 0
    assert "rank 1 did not come to call" in done.stderr
    assert f"in data at {script.parent.name}/sleeps.py:{number} in batches" in done.stderr, (
        done.stderr
    )
