"""odyssey.ray on a local Ray: ranks as actors, a rank that fails, RayTrainer with the bits of
one process.
"""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("ray", "torch")),
    reason="ray is not installed (extra [ray])",
)

PROGRAM = """
import copy, os, pathlib, time
import numpy as np, ray, torch
import odyssey.ray
from odyssey.errors import ConfigError, LaunchError


def work(add, fail=None):
    from odyssey import comm
    world = comm.world()
    if world.rank == 1 and fail == "raise":
        raise ValueError("bad luck")
    if world.rank == 1 and fail == "die":
        os._exit(3)
    return world.rank, world.size, world.all_reduce(np.ones(2) * add).tolist(), os.getpid()


def ended(pid):
    until = time.monotonic() + 60
    while pathlib.Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
found = odyssey.ray.launch(work, 3, num_workers=2)
assert [row[:3] for row in found] == [(0, 2, [6.0, 6.0]), (1, 2, [6.0, 6.0])], found
for *_, pid in found:
    ended(pid)
for fail, says in (("raise", "[ray] rank 1 failed: ValueError: bad luck"), ("die", "[ray] rank 1 failed: ActorDied")):
    try:
        odyssey.ray.launch(work, 3, fail=fail, num_workers=2)
        raise AssertionError(fail)
    except LaunchError as e:
        assert says in str(e), e
try:
    odyssey.ray.launch(work, 3, num_workers=5)
except ConfigError as e:
    assert "5 workers of 1 cores are asked for, and Ray has 2" in str(e), e

torch.manual_seed(0)
pairs = torch.utils.data.TensorDataset(torch.randn(80, 6), torch.arange(80) % 3)
model = torch.nn.Linear(6, 3)
alone = copy.deepcopy(model)
trainer = odyssey.ray.RayTrainer(model, {"lr": 0.01, "batch_size": 20, "epochs": 2, "hidden": 6, "num_workers": 2})
history = trainer.fit(pairs, pairs)
assert history.steps == 4 and trainer.best_accuracy == history.best_accuracy > 0
one = odyssey.ray.RayTrainer(alone, {"lr": 0.01, "batch_size": 40, "epochs": 2})
assert one.fit(pairs, pairs).train_loss == history.train_loss
assert torch.equal(model.weight, alone.weight)
ray.shutdown()
print("done")
"""


def test_ranks_are_actors(launch):
    (launch.folder / "program.py").write_text(PROGRAM)
    done = launch.python("-W", "ignore", "program.py")
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr
