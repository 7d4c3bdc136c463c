"""A training whose parameters and optimizer state are several times the memory that it may use,
with `offload`.

The same training runs twice in processes of their own: in memory without a limit, and in files
within a limit. The limit is a control group's (v1 or v2; then the whole process has no more memory
than that, pages of files included), else RLIMIT_DATA, for what is no file. The weights must be the
same: exit code 1 if not.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

GROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def group(limit: int) -> Iterator[Path | None]:
    """A control group of at most `limit` bytes; None where there can be none."""
    v1 = GROUPS / "memory"
    folder = (v1 if v1.is_dir() else GROUPS) / f"odyssey-offload-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")).write_text(str(limit))
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        yield None
        return
    try:
        yield folder
    finally:
        for _ in range(50):  # its pages go away
            if not folder.exists():
                break
            with contextlib.suppress(OSError):
                folder.rmdir()
            time.sleep(0.1)


def train(options: Any) -> None:
    """One of the two trainings; writes what it found."""
    if options.group:
        (options.group / "cgroup.procs").write_text(str(os.getpid()))
    elif options.data:
        resource.setrlimit(resource.RLIMIT_DATA, (options.data, options.data))
    import numpy as np

    import odyssey
    from odyssey import data, nn, optim

    rng = np.random.default_rng(0)
    x = rng.standard_normal((options.batch, options.width)).astype(np.float32)
    batch = data.Batch(data.arrays(x, np.arange(len(x)) % 10, classes=10), np.arange(len(x)), 0, 0)
    nn.manual_seed(0)
    with odyssey.offload(options.folder):
        layers = [nn.Linear(options.width, options.width) for _ in range(options.layers)]
        model = nn.Sequential(*layers, nn.Linear(options.width, 10))
    settings = {
        "threads": 1,
        "shard_size": options.batch // options.shards,
        "offload": options.folder,
    }
    settings["bucket_size_mb"] = 4
    trainer = odyssey.DistributedTrainer(model, optim.SGD(lr=1e-4, momentum=0.9), **settings)
    trainer.train_step(batch)
    start = time.perf_counter()
    for _ in range(options.steps - 1):
        trainer.train_step(batch)
    seconds = (time.perf_counter() - start) / (options.steps - 1)
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak = None
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if options.group and (options.group / name).exists():
            peak = int((options.group / name).read_text())
    found = {
        "seconds": seconds,
        "kept": 2 * trainer.arena.size * 4,
        "rss": used.ru_maxrss * 1024,
        "group": peak,
        "loss": trainer.last.loss / options.batch,
        "weights": trainer.weights_sha256(),
    }
    print(json.dumps(found), flush=True)


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--limit-mb", type=int, default=96, help="memory of the training in files")
    parser.add_argument("--width", type=int, default=1024, help="of the linear layers")
    parser.add_argument("--layers", type=int, default=50, help="linear layers")
    parser.add_argument("--batch", type=int, default=32, help="samples of a step")
    parser.add_argument("--shards", type=int, default=2, help="shards of a step")
    parser.add_argument("--steps", type=int, default=100, help="steps of each training")
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary one")
    parser.add_argument("--train", action="store_true", help="this is a training")
    parser.add_argument("--group", type=Path, help="its control group")
    parser.add_argument("--data", type=int, help="its RLIMIT_DATA")
    options = parser.parse_args()
    if options.train:
        train(options)
        return 0
    facts = common.print_machine()
    command = [sys.executable, __file__, "--train"]
    command += [
        f"--{name}={getattr(options, name)}"
        for name in ("width", "layers", "batch", "shards", "steps")
    ]

    def run(*more: str) -> dict[str, Any]:
        done = subprocess.run([*command, *more], stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    limit = options.limit_mb << 20
    with common.scratch() as made, group(limit) as inside:
        within = f"--group={inside}" if inside else f"--data={limit}"
        found = {
            "in memory, no limit": run(),
            f"in files, {options.limit_mb} MiB "
            f"({'control group' if inside else 'RLIMIT_DATA'})": run(
                within, f"--folder={options.folder or made}"
            ),
        }
    rows = [
        [
            name,
            common.number(one["kept"] / 2**20),
            common.number((one["group"] or one["rss"]) / 2**20),
            common.number(1e3 * one["seconds"]),
            common.number(options.batch / one["seconds"], 1),
            one["weights"][:16],
        ]
        for name, one in found.items()
    ]
    headers = ["", "parameters and state, MiB", "peak, MiB", "ms a step", "samples/s", "weights"]
    print(common.table([f"{options.steps} steps", *headers[1:]], rows))
    common.write_json(options.json, "offload", facts, runs=found)
    return 0 if len({one["weights"] for one in found.values()}) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
