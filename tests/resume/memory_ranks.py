"""Ranks whose memory is measured while a checkpoint is written, read and digested; see
test_checkpoint_parts.py.

`python memory_ranks.py FOLDER FLOATS LAYOUT` prints JSON: by what is done, MB of each rank's peak
above what it had in steps (VmHWM, which Linux sets back when it is asked to).
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import numpy as np

from odyssey import DistributedTrainer, comm, data, nn, optim


def resident(what: str) -> float:
    """MB of this process: "VmRSS" now, "VmHWM" at most since `reset`."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)
    )
    return int(line.split()[1]) / 1024


def main() -> None:
    folder, floats, layout = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    world = comm.world()
    width = int((floats / 10) ** 0.5)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((8, width), np.float32), rng.integers(0, width, 8)
    batch = next(iter(data.DataLoader(data.arrays(x, y), batch_size=8)))

    def made() -> DistributedTrainer:
        nn.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(10)))
        return DistributedTrainer(
            model,
            optim.Adam(),
            comm=world,
            shard_size=1,
            threads=1,
            check_every=0,
            bucket_size_mb=1,
            **layout,
        )

    trainer = made()
    for _ in range(2):
        trainer.train_step(batch)
    gc.collect()
    found = {}

    def measured(what, act):
        world.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
        before = resident("VmRSS")
        result = act()
        found[what] = resident("VmHWM") - before
        return result

    measured("save", lambda: trainer.save_checkpoint(folder))
    digest = measured("digest", trainer.weights_sha256)
    measured("load", lambda: trainer.load_checkpoint(folder))
    assert trainer.weights_sha256() == digest
    del trainer
    gc.collect()
    trainer = made()
    measured("load into a new one", lambda: trainer.load_checkpoint(folder))
    trainer.train_step(batch)
    rows = world.all_gather(np.array(list(found.values())))
    if world.rank == 0:
        print(
            json.dumps(
                {name: [round(v, 1) for v in rows[:, i].tolist()] for i, name in enumerate(found)}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
