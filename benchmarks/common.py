"""What the benchmarks share: facts about the machine, medians, tables, JSON files, the FMA peak,
child processes.

Nothing here measures a training step, imports PyTorch or loads the kernels: `--help` of every
benchmark answers at once, and without the optional packages.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# of facts about the machine; all others are printed as they are
_PRINTED = frozenset(
    "date cpu cores threads_per_core level load system python numpy torch odyssey mojo commit "
    "peak_of_one_core peak_of_all_cores".split()
)
INTERNAL = argparse.SUPPRESS  # options that a benchmark gives to its own processes
MISSING_TORCH = (
    "PyTorch is not installed: rows without it. For the comparison: pip install -e '.[bench]'"
)


# --- command line ---------------------------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures here as well")
    return made


def have_torch() -> bool:
    """Whether PyTorch is installed; says so on stderr if it is not."""
    if importlib.util.find_spec("torch") is not None:
        return True
    print(MISSING_TORCH, file=sys.stderr)
    return False


# --- the machine ----------------------------------------------------------------------------------


def cores() -> list[int]:
    """The cores this process may use; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pin(core: int | None = None) -> int | None:
    """Binds this process, and the threads it will start, to one core (the last one unless
    given).
    """
    allowed = cores()
    if not allowed:
        return None
    chosen = allowed[-1] if core is None else core
    os.sched_setaffinity(0, {chosen})
    return chosen


def print_machine(**more: Any) -> dict[str, Any]:
    """Prints the facts about the machine that a figure means nothing without, and returns them.

    Every benchmark calls it once, before it measures, and before it pins itself to a core. If its
    processes are ranks, only rank 0 does that, and the others get an empty dict.

    Args:
        more: further facts, such as the name of a GPU.
    """
    from odyssey.base import launcher

    if launcher.rank():
        return {}
    facts = {**machine(), **more}
    print(machine_lines(facts), flush=True)
    return facts


def machine() -> dict[str, Any]:
    """Facts about the machine, the versions of programs, and the FMA peak."""
    import odyssey
    from odyssey.compile import library as build

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads_per_core": threads_per_core(),
        "level": build.host_cpu(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "odyssey": odyssey.__version__,
        "mojo": build.compiler_version(),
        "commit": _commit(),
        # The one core is the last one, which `pin` chooses.
        "peak_of_one_core": peak(1),
        "peak_of_all_cores": peak(len(cores()) or 1),
    }


def machine_lines(facts: Mapping[str, Any]) -> str:
    """The facts in three lines: processor, peaks, versions."""
    one, all_cores = facts["peak_of_one_core"], facts["peak_of_all_cores"]
    peaks = [
        f"{precision} {one[precision]:.0f} on one core, {all_cores[precision]:.0f} on "
        f"{all_cores['cores']} at once"
        for precision in ("fp32", "bf16")
        if one[precision]
    ]
    more = (f"; {name} {value}" for name, value in facts.items() if name not in _PRINTED)
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['threads_per_core'] or 'unknown'} "
        f"thread{'s' * (facts['threads_per_core'] != 1)} per core, {facts['level']}, load "
        f"{facts['load']}\n"
        f"FMA peak, GFLOP/s: {'; '.join(peaks)}\n"
        f"odyssey {facts['odyssey']} ({facts['commit'] or 'no commit'}), mojo {facts['mojo']}, "
        f"python {facts['python']}, numpy {facts['numpy']}, torch "
        f"{facts['torch'] or 'not installed'}{''.join(more)}"
    )


def threads_per_core() -> int | None:
    """Hardware threads that share a core, of the cores that this process may use; None if the
    system does not say.
    """
    shared = []
    for core in cores():
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        if not path.is_file():
            return None
        ranges = [part.split("-") for part in path.read_text(encoding="ascii").split(",")]
        shared.append(sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges))
    return max(shared, default=None)


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(
        (key.strip(), value.strip())
        for key, _, value in (line.partition(":") for line in text.splitlines())
        if value
    )
    name = fields.get("model name", platform.machine())
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return name


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout, with + if tracked files outside benchmarks/ and docs/ differ
    from it.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(HERE), "rev-parse", "--short=9", "HEAD"],
            capture_output=True,
            text=True,
        )
        changed = subprocess.run(
            [
                "git",
                "-C",
                str(HERE.parent),
                "diff",
                "--quiet",
                "HEAD",
                "--",
                "python",
                "mojo",
                "shared",
            ]
        )
    except OSError:
        return None
    return done.stdout.strip() + "+" * (changed.returncode == 1) if done.returncode == 0 else None


# --- numbers --------------------------------------------------------------------------------------


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 to 1), linear between neighbours."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return quantile(values, 0.5)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, tenth and ninetieth percentile and the number of values."""
    return {
        "median": median(values),
        "p10": quantile(values, 0.1),
        "p90": quantile(values, 0.9),
        "n": len(values),
    }


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns: the first to the left, the others to the right; None is a dash."""
    cells = [list(headers), *(["-" if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = []
    for row in cells:
        padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        padded[0] = row[0].ljust(widths[0])
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def number(value: float | None, digits: int = 0, unit: str = "") -> str | None:
    """With thousands separators; None stays None."""
    return None if value is None else f"{value:,.{digits}f}{unit}"


def write_json(path: Path | None, benchmark: str, facts: Mapping[str, Any], **content: Any) -> None:
    """Writes the result whole or not at all; nothing if there is no path."""
    if path is None:
        return
    text = (
        json.dumps({"benchmark": benchmark, "machine": facts, **content}, indent=1, allow_nan=False)
        + "\n"
    )
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


# --- the peak -------------------------------------------------------------------------------------


def program(name: str, kernels: Path | None = None) -> Path:
    """A Mojo program of this folder, compiled for this machine into the cache of the kernels,
    which it imports from `kernels`, a folder `mojo`. Raises odyssey's BuildError.
    """
    from odyssey.compile import library as build
    from odyssey.errors import BuildError

    source = HERE / f"{name}.mojo"
    read = [source, *sorted(kernels.rglob("*.mojo") if kernels else ())]
    parts = [file.read_bytes() for file in read]
    # whose run-time library it links
    where = f"{build.host_cpu()} {build.compiler_version()} {sys.prefix}"
    key = hashlib.sha256(b"\0".join(parts) + where.encode()).hexdigest()
    target = build.cache_dir() / "benchmarks" / f"{name}-{key[:16]}"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    include = ["-I", str(kernels)] if kernels else []
    options = [*build.target_options(build.host_cpu()), *include]
    done = build.run_mojo(["build", *options, str(source), "-o", str(aside)])
    if done.returncode:
        raise BuildError(f"[build] {source} did not compile:\n{done.stderr.strip()}")
    os.replace(aside, target)
    return target


def peak(threads: int) -> dict[str, float]:
    """GFLOP/s of independent FMAs on `threads` cores at once, now: the sum of each core's median.

    Shares of the peak are of these. Two hardware threads of one core have hardly more together than
    one has alone, and a processor may be slower if all of its cores are busy. The time is the
    processor time of each core, so other programs don't count.

    Args:
        threads: the number of cores, the last ones that this process may use. If there are fewer
            cores, they get the peak of all cores.

    Returns:
        GFLOP/s by precision ("fp32", and "bf16" of products of bf16 pairs, 0 without them), and
        "cores".
    """
    chosen: list[int | None] = [*cores()[-threads:]] or [None]
    command = [str(program("peak"))]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=_pinned(core))
        for core in chosen
    ]
    medians = {"fp32": 0.0, "bf16": 0.0}
    for process in running:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"exit code {process.returncode} of {command[0]}")
        fp32, bf16 = (float(word) for word in output.split())
        medians["fp32"] += fp32
        medians["bf16"] += bf16
    return {**medians, "cores": len(chosen)}


def peak_of_products(measured: Sequence[Mapping[str, float]], precision: str) -> float:
    """The largest of several peaks (`peak`) of products in a precision.

    Products of bf16 that the processor has no instruction for are computed in fp32. Tiles of AMX
    can be faster than the peak of bf16 pairs.
    """
    narrow = precision == "bf16" and measured[0]["bf16"] > 0
    return max(one["bf16" if narrow else "fp32"] for one in measured)


def _pinned(core: int | None) -> Any:
    return None if core is None or not cores() else lambda: os.sched_setaffinity(0, {core})


# --- child processes ------------------------------------------------------------------------------


def mpirun(ranks: int) -> list[str]:
    """The launcher of this Python environment, else the one on PATH; SystemExit if there is
    none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.is_file() else shutil.which("mpirun")
    if found is None:
        raise SystemExit("mpirun is not installed; pip install mpich, or load your site's MPI")
    return [found, "-n", str(ranks)]


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory that goes away again."""
    with tempfile.TemporaryDirectory(prefix="odyssey-bench-") as name:
        yield Path(name)


def child(
    command: Sequence[str], core: int | None = None, cwd: Path | None = None, **environment: str
) -> dict[str, float]:
    """Runs a command to its end; seconds of wall time, of processor time, and MiB of the largest
    resident set of its processes.

    Raises SystemExit with what it said when it fails.
    """
    with tempfile.TemporaryFile() as said:
        start = time.perf_counter()
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            preexec_fn=_pinned(core),
            cwd=cwd,
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            text = said.read().decode(errors="replace").strip()
            raise SystemExit(f"exit code {process.returncode} of: {' '.join(command)}\n{text}")
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return {
        "seconds": seconds,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "mib": usage.ru_maxrss / scale,
    }


def on_hosts(
    ranks: int, command: Sequence[str], rate: float, round_trip: float, seconds: float = 3600
) -> str:
    """Runs a command under mpirun, each rank on a host of its own in namespaces here
    (tests/beds/netns.py; root), with wires of so many bits a second and seconds of a round
    trip; returns what it said. SystemExit where it fails.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from beds import netns

    if why := netns.why_not():
        raise SystemExit(why)
    # hosts do not see folders in /tmp with names that odyssey gives
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as folder,
        netns.Hosts(ranks, Path(folder)) as hosts,
    ):
        hosts.shape(rate, round_trip)
        job = hosts.job(
            hosts.mpirun(1, ["env", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1", *command])
        )
        if code := job.wait(seconds):
            raise SystemExit(f"exit code {code} of: {' '.join(command)}\n{job.output[-2000:]}")
        return job.output


def train_command(*options: str, ranks: int = 0, json_file: Path | None = None) -> list[str]:
    """`python -m odyssey.train` with these options, under mpirun if ranks are given."""
    launcher = mpirun(ranks) if ranks else []
    written = ["--json", str(json_file)] if json_file else []
    return [*launcher, sys.executable, "-m", "odyssey.train", "--no-progress", *options, *written]
