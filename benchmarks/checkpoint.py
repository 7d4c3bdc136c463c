"""What a checkpoint costs: save, the part of it that training waits for, load with every
checksum compared.

Two sizes: LeNet-5 with momentum (2 x 61,706 floats in 20 tensors) and 100 MB (2 x 50 MB in 20
tensors). Beside it, in turns, safetensors' own `save_file` and `np.savez` of the same arrays to one
file: these write in place, compute no SHA-256 and do not flush to the disk, so `np.savez, flushed`
and `save_file, flushed` have the fsync of file and directory added. Not measured: other frameworks'
checkpoints.

Then what checkpoints in parts take of each of four ranks: MB above what a rank had in its steps, of
81 MB of parameters and Adam's 162 MB (tests/resume/memory_ranks.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import common
import numpy as np

# floats of the parameters; as many of the optimizer
SIZES = {"LeNet-5": 61_706, "100 MB": 12_500_000}
LENET = (150, 6, 2400, 16, 48_000, 120, 10_080, 84, 840, 10)


def snapshot(floats: int):
    """Parameters and momentum of ten tensors each, with the proportions of LeNet-5."""
    from odyssey.checkpoints import Snapshot

    scale = floats / sum(LENET)
    numbers = np.random.default_rng(0)
    sizes = [max(1, round(size * scale)) for size in LENET]
    parameters = {
        f"layer{i}.weight": numbers.standard_normal(size, dtype=np.float32)
        for i, size in enumerate(sizes)
    }
    optimizer = {f"momentum/{name}": array * 0.1 for name, array in parameters.items()}
    values = {
        "cursor": 12_800,
        "seed": 0,
        "configuration": {"model": "lenet5", "lr": 0.05, "momentum": 0.9},
    }
    return Snapshot(1, {"parameters": parameters, "optimizer": optimizer}, values)


def flushed(path: Path) -> None:
    """Flushes a file and its directory to the disk."""
    for one, flags in ((path, os.O_RDONLY), (path.parent, os.O_RDONLY | os.O_DIRECTORY)):
        descriptor = os.open(one, flags)
        os.fsync(descriptor)
        os.close(descriptor)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(folder: Path, floats: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of each way, in turns."""
    from safetensors import numpy as library

    from odyssey.checkpoints import Store
    from odyssey.checkpoints import reader as reading

    given = snapshot(floats)
    flat = {
        f"{stem}/{name}": one for stem, some in given.arrays.items() for name, one in some.items()
    }
    seconds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    single, zipped = folder / "one.safetensors", folder / "one.npz"
    with Store(folder / "checkpoints") as store:
        # the first one makes buffers and files, and is not counted
        for number in range(rounds + 1):
            if number == 1:
                seconds.clear()
            given.step += 1
            note("save", timed(lambda: store.save(given)))
            given.step += 1
            note("save_later, until it returns", timed(lambda: store.save_later(given)))
            note("save_later, rest on its thread", timed(store.wait))
            path = store.path_of(given.step)
            note("load, verified", timed(lambda path=path: store.load(path)))
            note("verify only", timed(lambda path=path: reading.verify(path)))
            for name, file, write in (
                ("safetensors.save_file", single, lambda: library.save_file(flat, single)),
                ("np.savez", zipped, lambda: np.savez(zipped, **flat)),
            ):
                took = timed(write)
                note(name, took)
                note(f"{name}, flushed", took + timed(lambda file=file: flushed(file)))
            note("safetensors.load_file", timed(lambda: library.load_file(single)))
            note("np.load", timed(lambda: _load(zipped)))
    return {name: common.spread(values) for name, values in seconds.items()}


def peaks(layout: dict[str, int], floats: int = 20_250_000) -> dict[str, list[float]]:
    """MB of four ranks by what is done."""
    script = Path(__file__).parents[1] / "tests" / "resume" / "memory_ranks.py"
    with common.scratch() as folder:
        words = [
            *common.mpirun(4),
            sys.executable,
            script,
            folder / "c",
            floats,
            json.dumps(layout),
        ]
        done = subprocess.run(
            [str(word) for word in words], capture_output=True, text=True, check=True
        )
    return json.loads(done.stdout)


def _load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of each way")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where to write; the disk matters (default: the temporary directory)",
    )
    options = parser.parse_args()
    facts = common.print_machine()
    content = []
    for name, floats in SIZES.items():
        if options.folder is None:
            with common.scratch() as folder:
                found = measure(folder, floats, options.rounds)
        else:
            found = measure(options.folder, floats, options.rounds)
        content.append({"size": name, "bytes": 8 * floats, "seconds": found})
        print(f"\n{name}: {8 * floats:,} bytes, ms, {options.rounds} rounds")
        rows = [
            [way, *(common.number(1e3 * one[key], 2) for key in ("median", "p10", "p90"))]
            for way, one in found.items()
        ]
        print(common.table(["", "median", "p10", "p90"], rows))
    rows = [
        (zero, what, " ".join(map(str, mb)))
        for zero in (1, 3)
        for what, mb in peaks({"zero": zero}).items()
    ]
    print(
        f"\n4 ranks, MB above what each had in steps\n{common.table(['zero', 'what', 'MB'], rows)}"
    )
    content.append({"peaks": rows})
    common.write_json(
        options.json, "checkpoint", facts, options={"rounds": options.rounds}, rows=content
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
