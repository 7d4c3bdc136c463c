"""Step time with reductions started inside the backward pass, after it, and without any: what overlap hides.

Ranks train a network of equal linear layers (40 MB of parameters unless told otherwise). For each bucket size one
trainer reduces during the backward pass and one after it; a third kind trains the same share of the batch on its own,
without any communication. All are in the same processes and take turns, a step or a few between two barriers; a turn's
time is that of the slowest rank. The table has a low quantile of the turns: other work on the machine only adds time.
Hidden is the part of communication that overlap takes away: (after - during) / (after - none). Where ranks share cores
with their transport a copy that runs while another rank computes takes that rank's core or memory bandwidth, so not
all of it can be hidden. The weights of all reducing trainers must be the same: exit code 1 if not.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import common


def rank(options: Any) -> None:
    """One rank of the run; rank 0 writes what was measured."""
    import numpy as np

    from odyssey import DistributedTrainer, comm, data, nn, optim

    world = comm.world(options.backend)
    own = options.shards * options.shard_size
    rng = np.random.default_rng(0)
    x = rng.standard_normal((own * world.size, options.width)).astype(np.float32)
    samples = data.arrays(x, np.arange(len(x)) % 10, classes=10)
    batch = data.Batch(samples, np.arange(len(x)), 0, 0)
    half = data.Batch(samples, np.arange(own), 0, 0)

    def trainer(**settings: Any) -> DistributedTrainer:
        nn.manual_seed(0)
        layers = [nn.Linear(options.width, options.width) for _ in range(options.layers - 1)]
        model = nn.Sequential(*layers, nn.Linear(options.width, 10))
        return DistributedTrainer(
            model, optim.SGD(lr=1e-3, momentum=0.9), threads=1, shard_size=options.shard_size, **settings
        )

    runs: dict[str, tuple[DistributedTrainer, data.Batch]] = {"none": (trainer(comm=comm.Communicator()), half)}
    for size in options.bucket_size_mb:
        for overlap in (True, False):
            name = f"{size:g} {'during' if overlap else 'after'}"
            runs[name] = trainer(comm=world, bucket_size_mb=size, overlap=overlap), batch
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    waited: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(options.rounds + 1):  # the first is not counted
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            made, samples_of = runs[name]
            runner = made._train.prepare(len(samples_of.indices), samples_of.dataset.form)
            before = getattr(runner, "waited", 0.0)
            world.barrier()
            start = time.perf_counter()
            for _ in range(options.steps):
                made.train_step(samples_of)
            took = world.all_reduce(np.array([time.perf_counter() - start]), "max")
            if turn:
                seconds[name].append(float(took[0]) / options.steps)
                waited[name].append((getattr(runner, "waited", 0.0) - before) / options.steps)
    weights = {name: made.weights_sha256() for name, (made, _) in runs.items() if name != "none"}
    if world.rank == 0:
        parts = {name: len(made._train.ownership.parts.buckets) for name, (made, _) in runs.items()}
        content = {"seconds": seconds, "waited": waited, "buckets": parts, "weights": weights, "backend": world.name}
        options.rank.write_text(json.dumps(content))


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks, of one thread each")
    parser.add_argument("--backend", default="auto", choices=("auto", "mpi", "shm"), help="transport")
    parser.add_argument("--layers", type=int, default=11, help="linear layers")
    parser.add_argument("--width", type=int, default=1024, help="features of a layer")
    parser.add_argument("--shards", type=int, default=2, help="shards of each rank in a step")
    parser.add_argument("--shard-size", type=int, default=32, help="samples of a shard")
    parser.add_argument("--bucket-size-mb", type=float, nargs="+", default=[4.0, 10.0, 25.0], help="to compare")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each")
    parser.add_argument("--steps", type=int, default=1, help="of each turn")
    parser.add_argument("--quantile", type=float, default=0.1, help="of the turns")
    parser.add_argument("--rank", type=Path, help=common.INTERNAL)
    options = parser.parse_args()
    if options.rank:
        rank(options)
        return 0
    facts = common.machine()
    print(common.machine_line(facts))
    with common.scratch() as folder:
        out = folder / "overlap.json"
        settings: list[Any] = ["--rank", out, "--backend", options.backend, "--bucket-size-mb", *options.bucket_size_mb]
        for key in ("layers", "width", "shards", "shard_size", "rounds", "steps"):
            settings += [f"--{key.replace('_', '-')}", getattr(options, key)]
        common.child([*common.mpirun(options.ranks), sys.executable, __file__, *map(str, settings)])
        found = json.loads(out.read_text())
    seconds = found["seconds"]
    alone = common.quantile(seconds["none"], options.quantile)
    rows, lines = [], [["no communication", None, common.number(1e3 * alone, 1), None, None, None, None]]
    for size in options.bucket_size_mb:
        during, after = (seconds[f"{size:g} {when}"] for when in ("during", "after"))
        low = {"during": common.quantile(during, options.quantile), "after": common.quantile(after, options.quantile)}
        cost = low["after"] - alone
        hidden = (low["after"] - low["during"]) / cost if cost > 0 else None
        row = {
            "bucket_size_mb": size,
            "buckets": found["buckets"][f"{size:g} during"],
            "during": common.spread(during),
            "after": common.spread(after),
            "waited": common.quantile(found["waited"][f"{size:g} during"], options.quantile),
            "low": low,
            "communication": cost,
            "hidden": hidden,
        }
        rows.append(row)
        cells = [common.number(1e3 * low[k], 1) for k in ("after", "during")]
        times = [common.number(1e3 * row[k], 1) for k in ("communication", "waited")]
        share = None if hidden is None else f"{100 * hidden:.0f} %"
        lines.append([f"{size:g} MB", row["buckets"], *cells, *times, share])
    floats = options.width * options.width * (options.layers - 1)
    samples = options.ranks * options.shards * options.shard_size
    print(
        f"\n{options.layers} linear layers of {options.width}, {4 * floats / 2**20:.0f} MB of parameters; "
        f"{options.ranks} ranks over {found['backend']}, global batch {samples}; ms per step"
    )
    headers = ["buckets of", "number", "after", "during", "communication", "waited at the end", "hidden"]
    print(common.table(headers, lines))
    names = ("ranks", "layers", "width", "shards", "shard_size", "rounds", "steps", "quantile")
    settings = {key: getattr(options, key) for key in names}
    common.write_json(
        options.json,
        "overlap",
        facts,
        options={**settings, "backend": found["backend"]},
        none=common.spread(seconds["none"]),
        rows=rows,
    )
    if len(set(found["weights"].values())) > 1:
        print("FAILED: the weights differ", file=sys.stderr)
        return 1
    print("the same weights with all of them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
