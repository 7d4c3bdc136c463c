"""How time and memory grow with the layers of a network, the shards of a batch and the samples of
a data set.

Each row is a process of its own, and each figure the least of `--rounds` of them: its processor
time, so that other programs don't count, and its largest resident set. "exponent" is the slope of
the figure in a log-log plot between the two largest sizes. The constant start, which is the figure
of the smallest size, is subtracted before: 1 is as much more as there is more to do, 2 is the
square. Exit code 1 if a slope is above LIMIT.

    python benchmarks/growth.py [--probes layers] [--rounds 3] [--factor 0.1]

Layers are pairs of Linear(32, 32) and ReLU, with a batch of 64 samples, so that shards run together
with any number of them. Shards have 16 samples of 4 x 4 pixels, and the network is an MLP. "train"
is a whole `odyssey train --steps 1` on files of such samples.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import common

LIMIT = 1.1
#: Sizes of each probe.
SIZES = {
    "layers": (10, 100, 300, 1000),
    "shards": (8, 128, 512, 2048),
    "samples": (10_000, 1_000_000, 3_000_000, 10_000_000),
    "train: shards": (8, 128, 512, 2048),
    "train: samples": (10_000, 1_000_000, 3_000_000, 10_000_000),
}
FIGURES = {"first": "ms until the first step", "step": "us per step", "mib": "MiB"}
SHARD_SIZE = 16
STEPS = 20


def images(samples: int) -> tuple[Any, Any]:
    """Samples of 4 x 4 pixels, and their classes."""
    import numpy as np

    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (samples, 1, 4, 4), dtype=np.uint8)
    return pixels, rng.integers(0, 10, samples).astype(np.uint8)


def steps(probe: str, size: int) -> dict[str, float]:
    """The figures of a training of this process: the first step, and the mean of later ones."""
    from odyssey import DistributedTrainer, data, nn, optim

    layers = [nn.Flatten(), nn.Linear(16, 32)]
    samples = batch = 4 * SHARD_SIZE
    if probe == "layers":
        layers += [layer for _ in range(size) for layer in (nn.Linear(32, 32), nn.ReLU())]
    elif probe == "shards":
        samples = batch = SHARD_SIZE * size
    else:
        samples = size
    x, y = images(samples)
    begun = time.process_time()
    optimizer = optim.AdamW(lr=1e-3)
    optimizer.undecayed = optim.vectors
    trainer = DistributedTrainer(
        nn.Sequential(*layers, nn.Linear(32, 10)),
        optimizer,
        threads=1,
        shard_size=SHARD_SIZE,
        backend="local",
    )
    loader = data.DataLoader(data.arrays(x, y, classes=10), batch_size=batch, shuffle=True)
    trainer.train_step(next(iter(loader)))  # also orders the epoch
    first = time.process_time() - begun
    batches = (b for _ in range(STEPS) for b in loader)
    given = [next(batches) for _ in range(STEPS)]
    begun = time.process_time()
    for b in given:
        trainer.train_step(b)
    return {"first": 1e3 * first, "step": 1e6 * (time.process_time() - begun) / STEPS}


def run(probe: str, size: int, folder: Path) -> dict[str, float]:
    """The figures of one process."""
    output = folder / "figures.json"
    if not probe.startswith("train"):
        command = [sys.executable, __file__, "--probe", probe, "--size", str(size)]
        used = common.child([*command, "--output", str(output)])
        return {**json.loads(output.read_text()), "mib": used["mib"]}
    shards = size if "shards" in probe else 4
    samples = size if "samples" in probe else SHARD_SIZE * shards
    file = folder / f"{samples}.npz"
    if not file.exists():
        # In another process: the system counts the memory of this one as its children's.
        words = ["--probe", "file", "--size", str(samples), "--output", str(file)]
        common.child([sys.executable, __file__, *words])
    words = ("--model", "mlp", "--dataset", "npz", "--data-dir", str(file), "--no-eval")
    sizes = ("--shard-size", str(SHARD_SIZE), "--global-batch-size", str(SHARD_SIZE * shards))
    used = common.child(
        common.train_command(*words, *sizes, "--steps", "1", "--threads", "1"), cwd=folder
    )
    return {"first": 1e3 * used["processor_seconds"], "mib": used["mib"]}


def exponent(sizes: tuple[int, ...], values: list[float]) -> float | None:
    """The slope between the two largest sizes without the value of the smallest size.

    None if it isn't larger there: what doesn't grow has no slope.
    """
    grown = [value - values[0] for value in values[-2:]]
    if min(grown) <= 0.02 * values[0]:
        return None
    more = [size - sizes[0] for size in sizes[-2:]]
    return math.log(grown[1] / grown[0]) / math.log(more[1] / more[0])


def measure(probe: str, sizes: tuple[int, ...], rounds: int, folder: Path) -> dict[str, Any]:
    """Returns the smallest time and memory of all rounds for each size, and how fast they grow."""
    found: list[dict[str, float]] = []
    for size in sizes:
        runs = [run(probe, size, folder) for _ in range(rounds)]
        found.append({key: min(one[key] for one in runs) for key in runs[0]})
    exponents = {key: exponent(sizes, [row[key] for row in found]) for key in found[0]}
    return {"probe": probe, "sizes": sizes, "figures": found, "exponents": exponents}


def show(row: dict[str, Any]) -> str:
    """The table of a probe."""
    keys = [key for key in FIGURES if key in row["exponents"]]
    lines = [
        [f"{size:,}", *(common.number(figures[key]) for key in keys)]
        for size, figures in zip(row["sizes"], row["figures"], strict=True)
    ]
    lines.append(["exponent", *(common.number(row["exponents"][key], 2) for key in keys)])
    return common.table([row["probe"], *(FIGURES[key] for key in keys)], lines)


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--probes", nargs="+", choices=SIZES, default=list(SIZES), help="some")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each size")
    parser.add_argument("--factor", type=float, default=1.0, help="of all sizes")
    parser.add_argument("--probe", help=common.INTERNAL)
    parser.add_argument("--size", type=int, help=common.INTERNAL)
    parser.add_argument("--output", type=Path, help=common.INTERNAL)
    options = parser.parse_args()
    if options.probe == "file":
        import numpy as np

        x, y = images(options.size)
        np.savez(options.output, x=x, y=y)
        return 0
    if options.probe:
        options.output.write_text(json.dumps(steps(options.probe, options.size)))
        return 0
    facts = common.print_machine()
    rows = []
    with common.scratch() as folder:
        for probe in options.probes:
            sizes = tuple(max(1, round(options.factor * size)) for size in SIZES[probe])
            rows.append(measure(probe, sizes, options.rounds, folder))
            print(f"\n{show(rows[-1])}", flush=True)
    asked = {key: getattr(options, key) for key in ("rounds", "factor")}
    common.write_json(options.json, "growth", facts, options=asked, rows=rows)
    above = [
        f"{row['probe']}: {FIGURES[key]}, exponent {value:.2f}"
        for row in rows
        for key, value in row["exponents"].items()
        if value is not None and value > LIMIT
    ]
    print("\n".join([f"above {LIMIT}:", *above]) if above else f"no exponent is above {LIMIT}")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
