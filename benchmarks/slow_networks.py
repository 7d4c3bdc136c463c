"""Steps over slow networks: every reduction, DDP over Gloo and MPI's own all-reduce, on hosts of
namespaces here.

Two hosts with two ranks each (tests/beds/netns.py; root), joined by wires that a program here makes
(tests/beds/wire.c: a rate, a delay, loss). An MLP of about a million parameters, batch 64, SGD with
momentum, one thread per rank; DDP trains the same network. A figure is the median time of a step on
rank 0 after three (of local SGD the mean, as each eighth of its steps sends); MB is what left its
host, both ranks, as its network device counts it, headers and acknowledgements included. Times hold
computing too: see the column of a fast network. "calls" is one MPI_Allreduce of as many floats and
nothing else. Exit code 1 if the tree's weights are not the same everywhere.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

ROOT = Path(__file__).resolve().parents[1]
NETWORKS = {  # bits per second, seconds of a round trip, share of packets that is lost
    "10 Gbit/s": (10e9, 0.0, 0.0),
    "1 Gbit/s, 0.2 ms": (1e9, 0.0002, 0.0),
    "100 Mbit/s, 5 ms": (100e6, 0.005, 0.0),
    "1 Gbit/s, 0.2 ms, 0.1 % loss": (1e9, 0.0002, 0.001),
    "100 Mbit/s, 5 ms, 0.1 % loss": (100e6, 0.005, 0.001),
}
KINDS: dict[str, dict[str, Any]] = {
    "tree (in rounds)": {},
    "hierarchical": {"reduction": "hierarchical"},
    "ring": {"reduction": "ring"},
    "mpi": {"reduction": "mpi"},
    "tree, bf16": {"compression": "bf16"},
    "local SGD, 8 steps": {"reduction": "local_sgd", "local_steps": 8},
    "DDP over Gloo": {},
    "calls: MPI_Allreduce": {},
}
SIZES, BATCH = (784, 1000, 200, 10), 64


def sent() -> int:
    """Bytes that left this host."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


class Watch:
    """Times of steps, and what the host sent from the fourth to the last."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._bytes: list[int] = []

    def step(self) -> None:
        self.times.append(time.perf_counter())
        self._bytes.append(sent())

    def found(self, weights: str = "") -> dict[str, Any]:
        taken = [b - a for a, b in zip(self.times[2:], self.times[3:], strict=False)]
        return {
            "ms": 1e3 * common.median(taken),
            "mean": 1e3 * sum(taken) / len(taken),
            "mb": (self._bytes[-1] - self._bytes[2]) / len(taken) / 1e6,
            "weights": weights,
        }


def samples(steps: int) -> Any:
    import numpy as np

    rng = np.random.default_rng(0)
    return rng.standard_normal((BATCH * steps, SIZES[0]), np.float32), rng.integers(
        0, SIZES[-1], BATCH * steps
    )


def odyssey_rank(kind: str, steps: int) -> dict[str, Any] | None:
    from odyssey import DistributedTrainer, data, nn, optim

    nn.manual_seed(0)
    layers: list[Any] = []
    for i, o in zip(SIZES, SIZES[1:], strict=False):
        layers += [nn.Linear(i, o), nn.ReLU()]
    settings = {"threads": 1, "backend": "mpi", "shard_size": 16, **KINDS[kind]}
    trainer = DistributedTrainer(
        nn.Sequential(*layers[:-1]), optim.SGD(lr=0.01, momentum=0.9), **settings
    )
    watch, take = Watch(), trainer.train_step

    def train_step(batch: Any) -> Any:
        done = take(batch)
        watch.step()
        return done

    trainer.train_step = train_step  # type: ignore[method-assign]
    x, y = samples(steps)
    trainer.fit(data.DataLoader(data.arrays(x, y, classes=SIZES[-1]), batch_size=BATCH), epochs=1)
    weights = trainer.weights_sha256()
    return watch.found(weights[:16]) if trainer.comm.rank == 0 else None


def ddp_rank(steps: int) -> dict[str, Any] | None:
    import torch
    import torch.distributed as dist

    rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=4)
    torch.manual_seed(0)
    layers: list[Any] = []
    for i, o in zip(SIZES, SIZES[1:], strict=False):
        layers += [torch.nn.Linear(i, o), torch.nn.ReLU()]
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers[:-1]))
    rule, watch = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), Watch()
    x, y = (torch.from_numpy(a) for a in samples(steps))
    for k in range(steps):
        part = slice(BATCH * k + BATCH // 4 * rank, BATCH * k + BATCH // 4 * (rank + 1))
        rule.zero_grad()
        torch.nn.functional.cross_entropy(net(x[part]), y[part]).backward()
        rule.step()
        watch.step()
    dist.barrier()
    dist.destroy_process_group()
    return watch.found() if rank == 0 else None


def calls_rank(steps: int) -> dict[str, Any] | None:
    import numpy as np
    from mpi4py import MPI

    floats, watch = (
        np.ones(sum(i * o + o for i, o in zip(SIZES, SIZES[1:], strict=False)), np.float32),
        Watch(),
    )
    for _ in range(steps):
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, floats)
        watch.step()
    return watch.found() if MPI.COMM_WORLD.rank == 0 else None


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--steps", type=int, default=13, help="of each run, three of them not counted"
    )
    parser.add_argument("--networks", default="", help="only those whose name contains this")
    parser.add_argument("--kinds", default="", help="only those whose name contains this")
    parser.add_argument("--kind", help=common.INTERNAL)
    options = parser.parse_args()
    if options.kind:
        run = {"DDP over Gloo": ddp_rank, "calls: MPI_Allreduce": calls_rank}.get(options.kind)
        found = run(options.steps) if run else odyssey_rank(options.kind, options.steps)
        if found:
            print("found", json.dumps(found), flush=True)
        return 0

    sys.path.insert(0, str(ROOT / "tests"))
    from beds import netns

    if why := netns.why_not():
        raise SystemExit(why)
    facts, rows = common.print_machine(), []
    kinds = [
        k for k in KINDS if options.kinds in k and (k != "DDP over Gloo" or common.have_torch())
    ]
    environment = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    with (
        tempfile.TemporaryDirectory(prefix="slow-networks-") as folder,
        netns.Hosts(2, Path(folder)) as hosts,
    ):
        for network, (rate, round_trip, loss) in NETWORKS.items():
            if options.networks not in network:
                continue
            hosts.shape(rate, round_trip, loss)
            for kind in kinds:
                # 3, then whole rounds of eight
                steps = options.steps + 3 if "local" in kind else options.steps
                steps += -(steps - 3) % 8 if "local" in kind else 0
                words = [sys.executable, __file__, "--kind", kind, "--steps", steps]
                environ = {"OMP_NUM_THREADS": "1", **environment}
                job = hosts.job(
                    hosts.mpirun(2, ["env", *(f"{k}={v}" for k, v in environ.items()), *words])
                )
                code = job.wait(300)
                line = next((line for _, line in job.lines if line.startswith("found ")), None)
                if code or line is None:
                    print(f"FAILED: {kind} over {network}: {job.output[-2000:]}", file=sys.stderr)
                    return 1
                rows.append(
                    {"network": network, "kind": kind, **json.loads(line.removeprefix("found "))}
                )
                print(
                    f"  {network}: {kind}: {rows[-1]['ms']:.0f} ms, {rows[-1]['mb']:.2f} MB",
                    flush=True,
                )
    networks = list(dict.fromkeys(row["network"] for row in rows))
    cells = []
    for kind in kinds:
        of = {row["network"]: row for row in rows if row["kind"] == kind}
        which = "mean" if "local" in kind else "ms"  # every eighth of its steps sends
        cells.append(
            [
                kind,
                *(common.number(of[n][which], 0) for n in networks),
                common.number(of[networks[0]]["mb"], 2),
            ]
        )
    parameters = sum(i * o + o for i, o in zip(SIZES, SIZES[1:], strict=False))
    print(
        f"\nms of a step; {parameters:,} parameters ({4e-6 * parameters:.2f} MB), 2 hosts x 2 "
        "ranks; MB sent by a host"
    )
    print(common.table(["", *networks, "MB"], cells))
    common.write_json(
        options.json, "slow_networks", facts, options={"steps": options.steps}, rows=rows
    )
    exact = {row["weights"] for row in rows if row["kind"] in ("tree (in rounds)", "hierarchical")}
    if len(exact) > 1:
        print(f"FAILED: the tree's weights differ: {exact}", file=sys.stderr)
    return int(len(exact) > 1)


if __name__ == "__main__":
    sys.exit(main())
