"""Memory per rank with ZeRO 0 to 3: parameters, gradients and optimizer of a network of equal
layers with Adam.

Two measurements of the same run: what the trainer says it holds (`DistributedTrainer.memory()`),
and how much the resident set of each process has grown since it had a trainer of a tiny network
that had taken a step (of memory that n ranks share, each counts an nth). Gradients are counted with
everything their reduction works in. Activations are a column of their own; the resident set holds
them as well. After three steps all stages must have the same weights: exit code 1 if not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import common

PARTS = ("parameters", "gradients", "optimizer")


def resident() -> int:
    """Bytes in memory for this process: its own, and its share of what several ranks see; files
    are left out.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    fields = {
        name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)
    }
    return 1024 * (fields["Pss_Anon"] + fields["Pss_Shmem"])


def rank(options: Any) -> None:
    """One rank of a run; rank 0 writes what all found."""
    import gc

    import numpy as np

    from odyssey import DistributedTrainer, comm, data, nn, optim

    world = comm.world()
    shard = 8
    x = np.zeros((shard * world.size, options.width), np.float32)
    x[:, ::7] = 1
    batches = data.DataLoader(data.arrays(x, np.arange(len(x)) % 10, classes=10), batch_size=len(x))

    def train(layers: int, width: int, zero: int, steps: int) -> DistributedTrainer:
        nn.manual_seed(0)
        sizes = [(options.width, width), *[(width, width)] * (layers - 2), (width, 10)]
        model = nn.Sequential(*(nn.Linear(*size) for size in sizes))
        trainer = DistributedTrainer(
            model, optim.Adam(lr=1e-4), comm=world, threads=1, shard_size=shard, zero=zero,
            bucket_size_mb=options.bucket_size_mb,
        )  # fmt: skip
        trainer.fit(batches, epochs=steps)
        return trainer

    small = train(2, 16, options.zero, 1)
    gc.collect()
    before = resident()
    trainer = train(options.layers, options.width, options.zero, 3)
    gc.collect()
    world.barrier()
    grown = resident() - before
    world.barrier()
    found = trainer.memory()
    row = np.array([*(found[name] for name in PARTS), found["activations"], grown], np.int64)
    everyone = world.all_gather(row)
    weights = trainer.weights_sha256()
    if world.rank == 0:
        parameters = sum(p.size for p in trainer.model.parameters())
        content = {"ranks": everyone.tolist(), "weights_sha256": weights, "parameters": parameters}
        options.rank.write_text(json.dumps(content))
    del small


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel ranks")
    parser.add_argument("--layers", type=int, default=32, help="linear layers")
    parser.add_argument("--width", type=int, default=1024, help="features of a layer")
    parser.add_argument("--bucket-size-mb", type=float, help="default: that of the trainer")
    parser.add_argument("--zero", type=int, default=0, help=common.INTERNAL)
    parser.add_argument("--rank", type=Path, help=common.INTERNAL)
    options = parser.parse_args()
    if options.rank:
        rank(options)
        return 0
    facts = common.print_machine()
    rows: list[dict[str, Any]] = []
    with common.scratch() as folder:
        for zero in range(4):
            out = folder / f"zero{zero}.json"
            settings = [
                "--layers",
                options.layers,
                "--width",
                options.width,
                "--zero",
                zero,
                "--rank",
                out,
            ]
            if options.bucket_size_mb:
                settings += ["--bucket-size-mb", options.bucket_size_mb]
            common.child(
                [*common.mpirun(options.ranks), sys.executable, __file__, *map(str, settings)]
            )
            rows.append({"zero": zero, **json.loads(out.read_text())})
    mib = 2**20
    lines = []
    for row in rows:
        largest = [max(column) for column in zip(*row["ranks"], strict=True)]  # of the ranks
        row["parts"] = dict(zip((*PARTS, "activations", "resident"), largest, strict=True))
        row["total"] = max(sum(r[:3]) for r in row["ranks"])
        row["share"] = row["total"] / rows[0]["total"]
        row["resident_share"] = largest[4] / rows[0]["parts"]["resident"]
        cells = [common.number(v / mib, 1) for v in (*largest[:3], row["total"])]
        shares = [f"{100 * row[k]:.1f} %" for k in ("share", "resident_share")]
        lines.append([f"zero={row['zero']}", *cells, shares[0], common.number(largest[3] / mib, 1)])
        lines[-1] += [common.number(largest[4] / mib, 1), shares[1]]
    size = rows[0]["parameters"]
    print(
        f"\n{options.layers} x Linear({options.width}, {options.width}), Adam, {options.ranks} "
        "ranks; MiB per rank"
    )
    headers = ["", *PARTS, "sum", "of zero=0", "activations", "resident set", "of zero=0"]
    print(common.table(headers, lines))
    print(
        f"parameters alone: {4 * size / mib:.1f} MiB; with one gradient and Adam's two: "
        f"{16 * size / mib:.1f} MiB"
    )
    settings = {k: getattr(options, k) for k in ("ranks", "layers", "width", "bucket_size_mb")}
    common.write_json(options.json, "zero_memory", facts, options=settings, rows=rows)
    if len({row["weights_sha256"] for row in rows}) > 1:
        print("FAILED: the stages end with different weights", file=sys.stderr)
        return 1
    print("all four end with the same weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
