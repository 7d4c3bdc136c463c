"""A small training for the test beds: a net, data made here, a DistributedTrainer, and the
faults it is told of.

Rank 0 prints `step N HASH TIME` after each step (the start of the weights' SHA-256;
time.monotonic()) and at the end `weights SHA256`. Started by mpirun, by `odyssey launch` or alone:
the same numbers. Not an example; examples/ has some.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from beds import faults  # noqa: E402
from odyssey import DistributedTrainer, data, manual_seed, nn, optim  # noqa: E402
from odyssey import functional as F  # noqa: E402
from odyssey.parallel.mesh import Mesh  # noqa: E402


class Net(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(24, hidden)
        self.fc2 = nn.Linear(hidden, 5)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--hidden", type=int, default=32, help="size of the net, so of a checkpoint"
    )
    parser.add_argument(
        "--step-ms", type=float, default=0, help="every rank waits so long after each step"
    )
    parser.add_argument("--quiet", action="store_true", help="no line per step")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--reduction", default="tree")
    parser.add_argument("--ranks-per-node", type=int)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--checkpoint-dir", type=Path)
    parser.add_argument("--checkpoint-every", type=int, default=5)
    parser.add_argument("--keep", type=int)
    parser.add_argument("--resume")
    return parser.parse_args()


def main() -> None:
    o = options()
    manual_seed(3)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((o.samples, 24), np.float32)
    y = (x @ rng.standard_normal((24, 5), np.float32)).argmax(1).astype(np.int32)
    loader = data.DataLoader(data.arrays(x, y, classes=5), batch_size=o.batch, shuffle=True, seed=1)
    trainer = DistributedTrainer(
        Net(o.hidden),
        optim.Adam(lr=0.01),
        backend=o.backend,
        shard_size=8,
        threads=1,
        reduction=o.reduction,
        ranks_per_node=o.ranks_per_node,
        zero=o.zero,
        mesh=Mesh(pp=o.pp) if o.pp > 1 else None,
    )
    take = trainer.train_step

    def train_step(batch):
        sums = take(batch)
        if not o.quiet:
            sha = trainer.weights_sha256()
            if trainer.comm.rank == 0:
                # one write, or the lines of several ranks mix
                sys.stdout.write(f"step {trainer.steps} {sha[:16]} {time.monotonic():.4f}\n")
                sys.stdout.flush()
        if o.step_ms:
            time.sleep(o.step_ms / 1000)
        return sums

    trainer.train_step = train_step
    faults.install(trainer)
    settings = {}
    if o.checkpoint_dir or "ODYSSEY_RUN_DIR" in os.environ:
        settings = {"checkpoint_dir": o.checkpoint_dir, "checkpoint_every": o.checkpoint_every}
        settings |= {"keep": o.keep, "resume": o.resume}
    accepted = inspect.signature(trainer.fit).parameters
    settings = {k: v for k, v in settings.items() if v is not None and k in accepted}
    epochs = -(-o.steps * o.batch // o.samples)
    trainer.fit(loader, epochs=epochs, steps=o.steps, **settings)
    sha = trainer.weights_sha256()
    if trainer.comm.rank == 0:
        sys.stdout.write(f"weights {sha}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except faults.LeavesEarly:
        pass
