"""Idle time of pipelines, predicted and measured: gpipe, 1f1b and interleaved, for several
numbers of micro-batches.

Ranks of one thread each train equal linear layers, cut by measured cost. Predicted is
`schedule.bubble` with the seconds that each stage's forward and backward records take alone (the
fastest of five); measured is the share of a step that a rank does not spend in kernels, the mean
over ranks: waiting, messages, Python, the sum of gradients. All trainers are in the same processes
and take turns; a low quantile of the turns counts. The weights of the three schedules must be the
same for each number of micro-batches: exit code 1 if not.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import common

KINDS = ("gpipe", "1f1b", "interleaved")


def rank(options: Any) -> None:
    """One rank of the run; rank 0 writes what was measured."""
    import numpy as np

    from odyssey import DistributedTrainer, comm, data, nn, optim
    from odyssey.data.nested import Form
    from odyssey.parallel import costs, schedule
    from odyssey.parallel.mesh import Mesh
    from odyssey.parallel.stages import partition

    world = comm.world()
    rng = np.random.default_rng(0)
    found = []
    for micro in options.micro_batches:
        n = micro * options.shard_size
        x = rng.standard_normal((n, options.width)).astype(np.float32)
        batch = data.Batch(data.arrays(x, np.arange(n) % 10, classes=10), np.arange(n), 0, 0)
        runs = {}
        for kind in KINDS:
            nn.manual_seed(0)
            layers = [nn.Linear(options.width, options.width) for _ in range(options.layers - 1)]
            trainer = DistributedTrainer(
                nn.Sequential(*layers, nn.Linear(options.width, 10)),
                optim.SGD(lr=1e-3),
                comm=world,
                threads=1,
                shard_size=options.shard_size,
                mesh=Mesh(pp=world.size),
                pipeline_schedule=kind,
            )
            engine = trainer.stepper.engine
            runner = engine.prepare(n, Form.of_classes(options.width))
            records = engine.record(options.shard_size, Form.of_classes(options.width))
            seconds = dict(
                zip(
                    map(id, records),
                    costs.seconds(records, trainer.arena, options.shard_size),
                    strict=True,
                )
            )
            parts = partition(
                records, engine.placing(options.shard_size, Form.of_classes(options.width))
            )
            cost = np.zeros((2, runner.schedule.stages))
            for part in parts:
                cost[int(part.phase == "backward"), part.stage] = sum(
                    seconds[id(r)] for r in part.records
                )
            world.broadcast(cost)
            predicted = schedule.bubble(runner.schedule, cost[0].tolist(), cost[1].tolist())
            runs[kind] = (trainer, runner, predicted, [])
        for turn in range(options.rounds + 1):
            for kind in KINDS[turn % 3 :] + KINDS[: turn % 3]:
                trainer, runner, _, turns = runs[kind]
                before = runner.computed
                world.barrier()
                start = time.perf_counter()
                trainer.train_step(batch)
                took = time.perf_counter() - start
                both = world.all_gather(np.array([took, runner.computed - before]))
                if turn:  # the first is not counted
                    step = float(both[:, 0].max())
                    turns.append((step, float(1 - both[:, 1].mean() / step)))
        for kind, (trainer, runner, predicted, turns) in runs.items():
            weights = trainer.weights_sha256()
            found.append(
                {
                    "micro_batches": micro,
                    "kind": kind,
                    "stages": runner.schedule.stages,
                    "predicted": predicted,
                }
                | {
                    "seconds": [t for t, _ in turns],
                    "idle": [i for _, i in turns],
                    "weights_sha256": weights,
                }
            )
    if world.rank == 0:
        options.rank.write_text(json.dumps(found))


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="pipeline stages")
    parser.add_argument("--layers", type=int, default=8, help="linear layers")
    parser.add_argument("--width", type=int, default=1024, help="features of a layer")
    parser.add_argument("--shard-size", type=int, default=32, help="samples of a micro-batch")
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[2, 4, 8, 16], help="of a step"
    )
    parser.add_argument("--rounds", type=int, default=25, help="turns of each")
    parser.add_argument("--quantile", type=float, default=0.1, help="of the turns")
    parser.add_argument("--rank", type=Path, help=common.INTERNAL)
    options = parser.parse_args()
    if options.rank:
        rank(options)
        return 0
    facts = common.print_machine()
    keys = ("layers", "width", "shard_size", "rounds")
    with common.scratch() as folder:
        out = folder / "pipeline.json"
        settings: list[Any] = ["--rank", out, "--micro-batches", *options.micro_batches]
        for key in keys:
            settings += [f"--{key.replace('_', '-')}", getattr(options, key)]
        common.child([*common.mpirun(options.ranks), sys.executable, __file__, *map(str, settings)])
        rows = json.loads(out.read_text())
    lines = []
    for row in rows:
        row["step"] = common.quantile(row["seconds"], options.quantile)
        row["measured"] = common.quantile(row["idle"], options.quantile)
        shares = [f"{100 * row[k]:.1f} %" for k in ("predicted", "measured")]
        lines.append(
            [
                row["kind"],
                row["stages"],
                row["micro_batches"],
                common.number(1e3 * row["step"], 1),
                *shares,
            ]
        )
    print(
        f"\n{options.layers} linear layers of {options.width}, {options.ranks} ranks, "
        f"micro-batches of {options.shard_size}"
    )
    print(
        common.table(
            ["", "stages", "micro-batches", "ms per step", "idle, predicted", "idle, measured"],
            lines,
        )
    )
    settings_of = {key: getattr(options, key) for key in ("ranks", *keys, "quantile")}
    common.write_json(options.json, "pipeline", facts, options=settings_of, rows=rows)
    for micro in options.micro_batches:
        if len({row["weights_sha256"] for row in rows if row["micro_batches"] == micro}) > 1:
            print(f"FAILED: the weights differ at {micro} micro-batches", file=sys.stderr)
            return 1
    print("the schedules end with the same weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
