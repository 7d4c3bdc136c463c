"""Peak memory of a GPT's training, from its making to its digest: one process, and a rank of
several with ZeRO 3.

Each trains three steps of four sequences with Adam, shards of one sequence. The peak is the
kernel's own (VmHWM): that of the initial values, of moving them and of recording too, not only of
steps. Exit code 1 if the weights differ, if a rank's peak is more than `--margin` MB above what
`DistributedTrainer.memory()` says, or above `--share` of one process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import common


def peak() -> int:
    """Bytes of the largest resident set that this process has had."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmHWM"].split()[0])


def rank(options: Any) -> None:
    """One rank of a run; rank 0 writes what all found."""
    import numpy as np

    from odyssey import DistributedTrainer, comm, data, nn, optim

    world = comm.world()
    nn.manual_seed(0)
    model = nn.GPT(
        options.vocabulary, options.tokens, options.layers, options.width // 64, options.width
    )
    parameters = sum(p.size for p in model.parameters())
    ids = (
        np.random.default_rng(0)
        .integers(0, options.vocabulary, (12, options.tokens))
        .astype(np.int32)
    )
    batches = data.DataLoader(data.arrays(ids, np.roll(ids, -1, 1).astype(np.int64)), batch_size=4)
    zero = 3 if world.size > 1 else 0
    trainer = DistributedTrainer(
        model, optim.Adam(lr=1e-4), comm=world, threads=1, shard_size=1, zero=zero
    )
    trainer.fit(batches, epochs=1)
    weights = trainer.weights_sha256()
    everyone = world.all_gather(np.array([sum(trainer.memory().values()), peak()], np.int64))
    if world.rank == 0:
        found = {"parameters": parameters, "ranks": everyone.tolist(), "weights_sha256": weights}
        options.rank.write_text(json.dumps(found))


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--ranks", type=int, default=4, help="data-parallel ranks beside one process"
    )
    parser.add_argument("--layers", type=int, default=8, help="blocks")
    parser.add_argument("--width", type=int, default=512, help="features, a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens there are")
    parser.add_argument("--tokens", type=int, default=32, help="of a sequence")
    parser.add_argument(
        "--margin", type=float, default=150, help="MB that a rank's peak may be above memory()"
    )
    parser.add_argument(
        "--share", type=float, default=1.0, help="of one process' peak that a rank's may be"
    )
    parser.add_argument("--rank", type=Path, help=common.INTERNAL)
    options = parser.parse_args()
    if options.rank:
        rank(options)
        return 0
    facts, rows = common.print_machine(), []
    names = ("layers", "width", "vocabulary", "tokens")
    with common.scratch() as folder:
        for ranks in (1, options.ranks):
            out = folder / f"{ranks}.json"
            words = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
            start = common.mpirun(ranks) if ranks > 1 else []
            common.child([*start, sys.executable, __file__, *words, "--rank", str(out)])
            found = json.loads(out.read_text())
            said, largest = max(found["ranks"], key=lambda r: r[1] - r[0])
            same = {name: found[name] for name in ("parameters", "weights_sha256")}
            rows.append({"ranks": ranks, "memory": said, "peak": largest, **same})
    one, several = rows
    cells = []
    for row, name in ((one, "one process"), (several, f"{options.ranks} ranks, ZeRO 3")):
        sizes = [common.number(row[k] / 2**20, 0) for k in ("memory", "peak")]
        cells.append(
            [name, *sizes, f"{100 * row['peak'] / one['peak']:.1f} %", row["weights_sha256"][:16]]
        )
    print(
        f"\nGPT of {one['parameters'] / 1e6:.1f} M parameters, Adam; MiB of a rank, of all ranks "
        "the worst"
    )
    print(common.table(["", "memory()", "peak", "of one process", "weights"], cells))
    common.write_json(
        options.json, "zero_peak", facts, options={k: getattr(options, k) for k in names}, rows=rows
    )
    wrong = []
    if one["weights_sha256"] != several["weights_sha256"]:
        wrong.append("the weights differ")
    if several["peak"] > several["memory"] + options.margin * 1e6:
        wrong.append(f"a rank's peak is more than {options.margin} MB above memory()")
    if several["peak"] > options.share * one["peak"]:
        wrong.append(f"a rank's peak is more than {options.share} of one process'")
    for what in wrong:
        print(f"FAILED: {what}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
