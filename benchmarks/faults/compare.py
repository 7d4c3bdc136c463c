"""The same faults for odyssey and for what else there is, on this machine, in one run: prints
tables.

    python benchmarks/faults/compare.py --open-mpi PATH/bin/python --json faults.json

PyTorch, orbax and JAX are compared where they are installed. Faults, how the end of one is measured
and what counts as lost are in processes.py, calls.py and checkpoints.py; the programs of the others
in anchors/. Minutes: a run with `--count 5` takes about 25 on two cores. What it is not: a test;
nothing here knows what should come out.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import calls  # noqa: E402
import checkpoints  # noqa: E402
import common  # noqa: E402
import processes  # noqa: E402
import tables  # noqa: E402
from harness import System, systems  # noqa: E402

PACKAGES = ("torch", "safetensors", "orbax-checkpoint", "jax", "mpi4py", "mpich")


def _restart(system: System, folder: Path, count: int, dice: random.Random) -> Any:
    hashes = [processes.undisturbed(system, folder / f"undisturbed-{i}") for i in range(2)]
    runs = [processes.restart(system, folder / str(i), hashes[0], dice) for i in range(count)]
    return {"undisturbed_twice_same": hashes[0] == hashes[1], "runs": runs}


def _launcher(system: System, folder: Path, count: int, dice: random.Random) -> Any:
    return [processes.launcher_killed(system, folder / str(i)) for i in range(min(count, 3))]


def _fails(fault: str) -> Callable[..., Any]:
    def measure(system: System, folder: Path, count: int, dice: random.Random) -> Any:
        return [processes.fails(system, folder / str(i), fault) for i in range(min(count, 3))]

    return measure


def _stop(system: System, folder: Path, count: int, dice: random.Random) -> Any:
    return [processes.stopped(system, folder / str(i)) for i in range(min(count, 3))]


def _calls(system: System, folder: Path, count: int, dice: random.Random) -> Any:
    return {kind: calls.mismatch(system, folder / kind, kind) for kind in calls.KINDS}


def _replicas(system: System, folder: Path, count: int, dice: random.Random) -> Any:
    return processes.flipped_weight(system, folder)


def _resume(system: System, folder: Path, count: int, dice: random.Random) -> Any:
    return processes.resumed(system, folder)


#: topic -> what measures it for a system, and the kinds of systems that it is asked of
TOPICS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "restart": (_restart, ("odyssey", "torch")),
    "launcher": (_launcher, ("odyssey", "torch")),
    "exception": (_fails("raises"), ("odyssey", "torch", "mpi4py")),
    "exit": (_fails("exits"), ("odyssey", "torch", "mpi4py")),
    "stop": (_stop, ("odyssey", "torch")),
    "calls": (_calls, ("odyssey", "torch", "mpi4py")),
    "replicas": (_replicas, ("odyssey", "torch")),
    "resume": (_resume, ("odyssey", "torch")),
}
CHECKPOINTS = ("kills", "damage")


def asked(topic: str, system: System) -> bool:
    """Whether a system is measured: a variant of another only where it differs."""
    if system.kind not in TOPICS[topic][1]:
        return False
    if "own store" in system.name:  # what is after a restart
        return topic == "restart"
    if "DETAIL" in system.name:  # DistributedDataParallel does not start under it
        return topic == "calls"
    if system.words:  # python -m mpi4py
        return topic in ("exception", "exit")
    return True


def measure(
    wanted: list[str], count: int, seed: int, open_mpi: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Topic -> system or format -> what was measured; and what could not be measured."""
    results: dict[str, Any] = {topic: {} for topic in wanted}
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        for topic in wanted:
            for number, (title, call) in enumerate(_parts(topic, open_mpi)):
                try:
                    found = call(Path(name, topic, str(number)), count, random.Random(seed))
                except (AssertionError, LookupError, OSError, SystemExit) as problem:
                    failures.append(
                        f"{topic}: {title}: could not be measured: {type(problem).__name__}: "
                        f"{problem}"
                    )
                    print(failures[-1], file=sys.stderr)
                    continue
                results[topic][title] = found
                print(f"{topic}: {title}: {json.dumps(found)[:150]}", file=sys.stderr)
    return results, failures


def _parts(
    topic: str, open_mpi: str | None
) -> Iterator[tuple[str, Callable[[Path, int, random.Random], Any]]]:
    if topic not in CHECKPOINTS:
        for system in systems(open_mpi):
            if asked(topic, system):
                yield system.name, functools.partial(TOPICS[topic][0], system)
        return
    for title, kind in checkpoints.EACH.items():
        if kind.available():
            yield title, functools.partial(_saves, topic, kind)
        else:
            print(f"{topic}: {title}: not installed, left out", file=sys.stderr)


def _saves(topic: str, kind: Any, folder: Path, count: int, dice: random.Random) -> Any:
    if topic == "kills":
        return checkpoints.kills(kind, folder, 4 * count, dice)
    return checkpoints.damage(kind, folder, 6 * count, 3 * count, dice)


def versions(open_mpi: str | None) -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if open_mpi:
        mpirun = str(Path(open_mpi).parent / "mpirun")
        said = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=30
        ).stdout
        found["openmpi"] = said.splitlines()[0].split()[-1] if said else "?"
    return found


def main() -> None:
    every = [*TOPICS, *CHECKPOINTS]
    parser = common.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--only", nargs="+", choices=every, default=every, metavar="NAME", help=", ".join(every)
    )
    parser.add_argument(
        "--count", type=int, default=5, help="restarts of each system; 4 times as many kills (5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of moments and places (0)")
    parser.add_argument(
        "--open-mpi",
        metavar="PYTHON",
        help="interpreter of an environment with odyssey and Open MPI",
    )
    parser.add_argument(
        "--tables",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="print the tables of these JSON files",
    )
    wanted = parser.parse_args()
    if wanted.tables:
        results: dict[str, Any] = {}
        for path in wanted.tables:
            results |= json.loads(path.read_text())["results"]
        print(tables.everything(results))
        return
    if wanted.count < 1:
        parser.error("--count is 1 or more")
    open_mpi = os.path.abspath(wanted.open_mpi) if wanted.open_mpi else None
    packages = ", ".join(f"{n} {v}" for n, v in versions(open_mpi).items())
    machine = common.print_machine(packages=packages)
    results, failures = measure(wanted.only, wanted.count, wanted.seed, open_mpi)
    print(tables.everything(results))
    common.write_json(
        wanted.json, "faults", machine, count=wanted.count, results=results, failures=failures
    )
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
