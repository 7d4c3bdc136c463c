"""Step time with reductions started inside the backward pass, after it, and without any: what
overlap hides.

Ranks train a network of equal linear layers (40 MB of parameters unless told otherwise). For each
bucket size one trainer reduces during the backward pass and one after it; a third kind trains the
same share of the batch on its own, without any communication. All are in the same processes and
take turns, a step or a few between two barriers; a turn's time is that of the slowest rank. The
table has a low quantile of the turns: other work on the machine only adds time. Hidden is the part
of communication that overlap takes away: (after - during) / (after - none). Where ranks share cores
with their transport a copy that runs while another rank computes takes that rank's core or memory
bandwidth, so not all of it can be hidden. The weights of all reducing trainers must be the same:
exit code 1 if not.

--rate: each rank on a host of its own, in namespaces here (tests/beds/netns.py; root), with wires
of so many bits a second. Then "moved" is the share of the bytes that could have come while kernels
ran: of buckets that were ready by then, as far as the wire is fast enough. What came is counted by
the network device of rank 0's host.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import models


class Trace:
    """What came over the wire in one step of a runner, until its last kernel had run; once.

    rate: of the wire, bits per second.
    """

    def __init__(self, runner: Any, rate: float) -> None:
        self._rate, self._ready, self._first = rate / 8, [], 0
        self._arrived = self._ended = 0.0
        for reduction in runner.reductions:
            reduction.start = functools.partial(self._start, reduction)
        finish = type(runner)._finish_reduction

        def ended(bucket: int) -> None:
            if not self._ended:
                self._arrived, self._ended = received(), time.perf_counter()
            finish(runner, bucket)

        runner._finish_reduction = ended
        self._runner = runner

    def _start(self, reduction: Any) -> None:
        self._first = self._first or received()
        self._ready.append((time.perf_counter(), 4 * reduction.floats))
        type(reduction).start(reduction)

    def moved(self) -> float:
        """Share of the bytes that could have come by then: a queue that the wire takes from, and
        buckets join.
        """
        for reduction in self._runner.reductions:
            del reduction.start
        del self._runner._finish_reduction
        queue, could = 0.0, 0.0
        times = [at for at, _ in self._ready if at < self._ended] + [self._ended]
        for (at, size), until in zip(self._ready, times[1:], strict=False):
            queue += size
            passed = min(queue, self._rate * (until - at))
            queue, could = queue - passed, could + passed
        return (self._arrived - self._first) / could if could else 1.0


def received() -> int:
    """Bytes that came to this host."""
    return int(Path("/sys/class/net/eth0/statistics/rx_bytes").read_text())


def rank(options: Any) -> None:
    """One rank of the run; rank 0 writes what was measured."""
    import numpy as np

    from odyssey import DistributedTrainer, comm, data, nn, optim

    world = comm.world(options.backend)
    own, rng = options.batch, np.random.default_rng(0)
    if options.model == "linear":
        x = rng.standard_normal((own * world.size, options.width)).astype(np.float32)
        samples = data.arrays(x, np.arange(len(x)) % 10, classes=10)
    else:
        x, y = models.samples(options.model, -(-own * world.size // 4))
        samples = data.arrays(x, y, **({} if options.model == "gpt" else {"classes": 10}))
    batch = data.Batch(samples, np.arange(own * world.size), 0, 0)
    half = data.Batch(samples, np.arange(own), 0, 0)

    def trainer(**settings: Any) -> DistributedTrainer:
        nn.manual_seed(0)
        if options.model == "linear":
            layers = [nn.Linear(options.width, options.width) for _ in range(options.layers - 1)]
            model: Any = nn.Sequential(*layers, nn.Linear(options.width, 10))
        else:
            model = models.our_model(options.model)
        return DistributedTrainer(
            model,
            optim.SGD(lr=1e-3, momentum=0.9),
            threads=1,
            shard_size=options.shard_size,
            **settings,
        )

    runs: dict[str, tuple[DistributedTrainer, data.Batch]] = {
        "none": (trainer(comm=comm.Communicator()), half)
    }
    for size in options.bucket_size_mb:
        for overlap in (True, False):
            name = f"{size:g} {'during' if overlap else 'after'}"
            runs[name] = trainer(comm=world, bucket_size_mb=size, overlap=overlap), batch
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    waited: dict[str, list[float]] = {name: [] for name in runs}
    moved: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(options.rounds + 1):  # the first is not counted
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            made, samples_of = runs[name]
            runner = made.stepper.engine.prepare(len(samples_of.indices), samples_of.dataset.form)
            before = getattr(runner, "waited", 0.0)
            trace = Trace(runner, options.rate) if options.rate and "during" in name else None
            world.barrier()
            start = time.perf_counter()
            for _ in range(options.steps):
                made.train_step(samples_of)
            took = world.all_reduce(np.array([time.perf_counter() - start]), "max")
            if turn:
                seconds[name].append(float(took[0]) / options.steps)
                waited[name].append((getattr(runner, "waited", 0.0) - before) / options.steps)
                moved[name] += [trace.moved()] if trace else []
    weights = {name: made.weights_sha256() for name, (made, _) in runs.items() if name != "none"}
    if world.rank == 0:
        parts = {
            name: len(made.stepper.engine.ownership.parts.buckets)
            for name, (made, _) in runs.items()
        }
        content = {
            "seconds": seconds,
            "waited": waited,
            "moved": moved,
            "buckets": parts,
            "weights": weights,
        }
        content |= {"backend": world.name, "floats": runs["none"][0].arena.size}
        options.rank.write_text(json.dumps(content))


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--ranks", type=int, default=2, help="data-parallel ranks, of one thread each"
    )
    parser.add_argument(
        "--backend", default="auto", choices=("auto", "mpi", "shm"), help="transport"
    )
    parser.add_argument(
        "--model", default="linear", choices=("linear", "gpt", "resnet18"), help="as in models.py"
    )
    parser.add_argument(
        "--rate", type=float, help="bits per second of the wires between hosts of one rank each"
    )
    parser.add_argument("--round-trip", type=float, default=2e-4, help="seconds, with --rate")
    parser.add_argument("--layers", type=int, default=11, help="linear layers")
    parser.add_argument("--width", type=int, default=1024, help="features of a layer")
    parser.add_argument("--batch", type=int, default=64, help="samples of each rank in a step")
    parser.add_argument("--shard-size", type=int, help="samples of a shard, instead of the default")
    parser.add_argument(
        "--bucket-size-mb", type=float, nargs="+", default=[4.0, 10.0, 25.0], help="to compare"
    )
    parser.add_argument("--rounds", type=int, default=40, help="turns of each")
    parser.add_argument("--steps", type=int, default=1, help="of each turn")
    parser.add_argument("--quantile", type=float, default=0.1, help="of the turns")
    parser.add_argument("--rank", type=Path, help=common.INTERNAL)
    options = parser.parse_args()
    if options.rank:
        rank(options)
        return 0
    facts = common.print_machine()
    # hosts do not see folders of odyssey's own names
    with tempfile.TemporaryDirectory(prefix="overlap-") as name:
        folder = Path(name)
        out = folder / "overlap.json"
        settings: list[Any] = [
            "--rank",
            out,
            "--backend",
            options.backend,
            "--bucket-size-mb",
            *options.bucket_size_mb,
        ]
        for key in ("model", "rate", "layers", "width", "batch", "shard_size", "rounds", "steps"):
            settings += (
                []
                if getattr(options, key) is None
                else [f"--{key.replace('_', '-')}", getattr(options, key)]
            )
        command = [sys.executable, __file__, *map(str, settings)]
        if options.rate:
            common.on_hosts(options.ranks, command, options.rate, options.round_trip)
        else:
            common.child([*common.mpirun(options.ranks), *command])
        found = json.loads(out.read_text())
    seconds = found["seconds"]
    alone = common.quantile(seconds["none"], options.quantile)
    rows, lines = [], [["no communication", None, common.number(1e3 * alone, 1), *[None] * 5]]
    for size in options.bucket_size_mb:
        during, after = (seconds[f"{size:g} {when}"] for when in ("during", "after"))
        low = {
            "during": common.quantile(during, options.quantile),
            "after": common.quantile(after, options.quantile),
        }
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
            "moved": common.median(found["moved"][f"{size:g} during"]) if options.rate else None,
        }
        rows.append(row)
        cells = [common.number(1e3 * low[k], 1) for k in ("after", "during")]
        times = [common.number(1e3 * row[k], 1) for k in ("communication", "waited")]
        share = None if hidden is None else f"{100 * hidden:.0f} %"
        came = None if row["moved"] is None else f"{100 * row['moved']:.0f} %"
        lines.append([f"{size:g} MB", row["buckets"], *cells, *times, share, came])
    what = (
        f"{options.layers} linear layers of {options.width}"
        if options.model == "linear"
        else options.model
    )
    link = (
        f" at {options.rate / 1e6:g} Mbit/s, {1e3 * options.round_trip:g} ms"
        if options.rate
        else ""
    )
    print(
        f"\n{what}, {4 * found['floats'] / 1e6:.1f} MB of parameters; {options.ranks} ranks over "
        f"{found['backend']}"
        f"{link}, global batch {options.ranks * options.batch}; ms per step"
    )
    headers = [
        "buckets of",
        "number",
        "after",
        "during",
        "communication",
        "waited at the end",
        "hidden",
        "moved",
    ]
    print(common.table(headers, lines))
    names = (
        "ranks",
        "model",
        "rate",
        "layers",
        "width",
        "batch",
        "shard_size",
        "rounds",
        "steps",
        "quantile",
    )
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
