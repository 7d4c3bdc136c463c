"""All-reduce of float32: this project's shared-memory backend against MPI_Allreduce and Gloo,
from 1 KB to 64 MB.

The ranks of one launch hold all three at once: odyssey's `world("shm").all_reduce(x, out=y)`, with
the comparison of headers that every call has; `MPI.COMM_WORLD.Allreduce(x, y)` of mpi4py, the
library's own algorithm; and `torch.distributed.all_reduce` over Gloo on the loopback interface, in
place. For each size they take turns: a round is a number of calls one after the other, some 20 ms
of them, its figure the median call of the rank where that is slowest (so a call during which
another program had the core does not count). Figures are medians over the rounds, ratios medians
over the ratios of each round. Before, every result is compared: odyssey's to the last bit with the
sum along the fixed tree, the others' within rounding.

Without PyTorch the column of Gloo is empty; without matplotlib there is no picture.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np

LENET5 = 61_706
# floats: 1 KB to 64 MB
SIZES = (256, 1024, 4096, 16_384, LENET5, 131_072, 262_144, 1 << 20, 1 << 22, 1 << 24)
KINDS = {"shm": "odyssey shm", "mpi": "MPI_Allreduce", "gloo": "Gloo"}
COLOURS = {"shm": "#d9480f", "mpi": "#495057", "gloo": "#868e96"}
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "collectives.png"


# --- on the ranks ---------------------------------------------------------------------------------


def values(floats: int, rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(floats, np.float32)


def tree(arrays: list[np.ndarray]) -> np.ndarray:
    """The sum as docs/determinism.md has it."""
    if len(arrays) == 1:
        return arrays[0]
    half = 1 << (len(arrays) - 1).bit_length() - 1
    return tree(arrays[:half]) + tree(arrays[half:])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What one rank does; the same result on all."""
    from mpi4py import MPI

    from odyssey import comm

    ours, theirs = comm.world("shm"), MPI.COMM_WORLD
    kinds = ["shm", "mpi"]
    distributed = torch = None
    if options.gloo:
        import torch
        import torch.distributed as distributed

        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{options.port}",
            rank=ours.rank,
            world_size=ours.size,
        )
        kinds.append("gloo")

    def slowest(seconds: float) -> float:
        return float(ours.all_reduce(np.array([seconds]), "max")[0])

    rows = []
    for floats in options.floats:
        x, y = values(floats, ours.rank), np.empty(floats, np.float32)
        wanted = tree([values(floats, rank) for rank in range(ours.size)])
        calls: dict[str, Callable[[], Any]] = {
            "shm": lambda x=x, y=y: ours.all_reduce(x, out=y),
            "mpi": lambda x=x, y=y: theirs.Allreduce(x, y),
        }
        for kind in ("shm", "mpi"):
            y[:] = 0
            calls[kind]()
            same = (
                np.array_equal(y, wanted) if kind == "shm" else np.allclose(y, wanted, 1e-4, 1e-5)
            )
            if not same:
                raise SystemExit(
                    f"rank {ours.rank}: {KINDS[kind]} of {floats} floats gave a wrong sum"
                )
        if distributed is not None:
            tensor = torch.from_numpy(x.copy())
            distributed.all_reduce(tensor)
            if not np.allclose(tensor.numpy(), wanted, 1e-4, 1e-5):
                raise SystemExit(f"rank {ours.rank}: Gloo of {floats} floats gave a wrong sum")
            tensor.zero_()  # added to itself again and again, other numbers would not stay finite
            calls["gloo"] = lambda tensor=tensor: distributed.all_reduce(tensor)
        del wanted

        def batch(kind: str, n: int, calls: dict[str, Callable[[], Any]] = calls) -> float:
            """Seconds of the median of n calls in a row."""
            call, times = calls[kind], []
            theirs.Barrier()
            for _ in range(n):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            return slowest(common.median(times))

        n = {kind: int(min(500, max(3, 0.02 / batch(kind, 9)))) for kind in kinds}
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            for kind in kinds:
                found[kind].append(batch(kind, n[kind]))
        row: dict[str, Any] = {
            "ranks": ours.size,
            "floats": floats,
            "bytes": 4 * floats,
            "calls": n,
        }
        for kind in kinds:
            row[kind] = {"seconds": common.spread(found[kind])}
            if kind != "shm":
                row[kind]["ratio"] = common.spread(
                    [a / b for a, b in zip(found[kind], found["shm"], strict=True)]
                )
        rows.append(row)
    if distributed is not None:
        distributed.destroy_process_group()
    library = MPI.Get_library_version().replace("\0", "").splitlines()[0]
    # MPICH's has a tab in the middle
    return {"rows": rows, "mpi": " ".join(library.replace("Version:", "").split())}


# --- the launch -----------------------------------------------------------------------------------


def launch(ranks: int, options: argparse.Namespace, gloo: bool, folder: Path) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = folder / "rank0.json"
    command = [
        *common.mpirun(ranks),
        sys.executable,
        __file__,
        "--rounds",
        str(options.rounds),
        "--floats",
    ]
    command += [
        *map(str, options.floats),
        "--port",
        str(port),
        "--result",
        str(file),
        *["--gloo"] * gloo,
    ]
    common.child(command, OMP_NUM_THREADS="1")
    return json.loads(file.read_text())


def size_name(count: int) -> str:
    for unit, scale in (("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.0f} {unit}"
    return f"{count} B"


def lines(rows: list[dict[str, Any]]) -> list[list[str | None]]:
    made = []
    for row in rows:
        cells: list[str | None] = [f"{size_name(row['bytes'])} ({row['floats']:,} floats)"]
        for kind in KINDS:
            cells.append(
                common.number(row[kind]["seconds"]["median"] * 1e6, 1) if kind in row else None
            )
        for kind in ("mpi", "gloo"):
            cells.append(common.number(row[kind]["ratio"]["median"], 2) if kind in row else None)
        made.append(cells)
    return made


def draw(results: list[list[dict[str, Any]]], note: str, output: Path) -> bool:
    """Time over size, one panel per number of ranks; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed; pip install -e '.[bench]'", file=sys.stderr)
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = plt.subplots(
        1,
        len(results),
        figsize=(10, 4.3),
        dpi=160,
        facecolor="white",
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for axes, rows in zip(panels[0], results, strict=True):
        for kind, label in KINDS.items():
            have = [row for row in rows if kind in row]
            x = [row["bytes"] for row in have]
            if not x:
                continue
            at = {
                q: [row[kind]["seconds"][q] * 1e6 for row in have] for q in ("median", "p10", "p90")
            }
            axes.plot(x, at["median"], "o-", color=COLOURS[kind], lw=1.8, ms=4, label=label)
            axes.fill_between(x, at["p10"], at["p90"], color=COLOURS[kind], alpha=0.15, lw=0)
        for row in rows:
            if row["floats"] in (LENET5, 1 << 24):
                place = (row["bytes"], row["shm"]["seconds"]["median"] * 1e6)
                text = f"{row['mpi']['ratio']['median']:.1f} x"
                axes.annotate(
                    text,
                    place,
                    (2, -14),
                    textcoords="offset points",
                    fontsize=9,
                    color=COLOURS["shm"],
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = [1 << 10, 1 << 14, 4 * LENET5, 1 << 20, 1 << 23, 1 << 26]
        axes.set_xticks(
            ticks, ["LeNet-5" if t == 4 * LENET5 else size_name(t) for t in ticks], fontsize=9
        )
        axes.minorticks_off()
        axes.set_title(
            f"All-reduce of float32, {rows[0]['ranks']} ranks, us per call", fontsize=11, loc="left"
        )
        axes.legend(frameon=False, loc="upper left")
    figure.supxlabel(note, fontsize=8, color="#868e96", x=0.01, ha="left")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, metadata={"Software": None})
    return True


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--floats", type=int, nargs="+", default=list(SIZES), help="sizes")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each")
    parser.add_argument(
        "--picture", type=Path, default=None, metavar="FILE", help=f"draw it, e.g. {PICTURE.name}"
    )
    for name in ("--port", "--result", "--gloo"):  # between this program and its ranks
        parser.add_argument(
            name, help=argparse.SUPPRESS, **({"action": "store_true"} if name == "--gloo" else {})
        )
    options = parser.parse_args()
    if options.result:
        content = measure(options)
        if int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))) == 0:
            Path(options.result).write_text(json.dumps(content))
        return 0
    facts, gloo = common.print_machine(), common.have_torch()
    results = []
    with common.scratch() as folder:
        for ranks in options.ranks:
            found = launch(ranks, options, gloo, folder)
            results.append(found["rows"])
            facts["mpi"] = found["mpi"]
            print(
                f"\nall-reduce, {ranks} ranks, us per call (median of {options.rounds} rounds); "
                f"{found['mpi']}"
            )
            headers = ["", *KINDS.values(), "MPI / odyssey", "Gloo / odyssey"]
            print(common.table(headers, lines(found["rows"])), flush=True)
    settings = {"ranks": options.ranks, "rounds": options.rounds}
    common.write_json(
        options.json,
        "collectives",
        facts,
        options=settings,
        rows=[r for rows in results for r in rows],
    )
    if options.picture:
        note = (
            f"{facts['cpu']}, {facts['cores']} cores, shared; {facts['mpi']}, torch "
            f"{facts['torch']}; "
        )
        draw(
            results,
            note + f"{facts['date'][:10]}; numbers: times faster than MPI_Allreduce",
            options.picture,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
