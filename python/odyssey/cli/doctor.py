"""`odyssey doctor`: looks at everything a run needs on this machine and says what to do where
something is missing.

Nothing is changed or left behind. `python -m odyssey.cli.doctor` is the probe that it starts: each
process prints one line of JSON about itself and its MPI.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ..base import install_packages, launcher
from ..base import limits as machine
from ..base.requirements import DISTRIBUTION, REINSTALL
from ..comm.cores import memory_limit
from ..errors import BuildError, ConfigError, OdysseyError, printable
from ..train import preflight

OK = "ok"
WARN = "warn"
FAIL = "fail"
MIB = 1 << 20
GIB = 1 << 30
RANK_MEMORY = 160 * MIB  # of a rank that trains LeNet-5 on MNIST: measured 122
SECONDS = 60.0  # that a probe may take
LIMITS = {"nofile": "-n", "nproc": "-u", "fsize": "-f", "as": "-v"}  # of ulimit
THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")


class Check(NamedTuple):
    """Result of a check: what was looked at, "ok", "warn" or "fail", what was found, what to do
    (or "").
    """

    name: str
    state: str
    found: str
    advice: str = ""

    def line(self) -> str:
        return f"{self.state:4}  {self.name:9} {self.found}" + (
            f"; {self.advice}" if self.advice else ""
        )


class RunPlan(NamedTuple):
    """Plan of a run: ranks on this machine, threads of each, where its files go, its hosts."""

    ranks: int = 2
    threads: int | None = None
    run_dir: Path | None = None
    hosts: Sequence[str] = ()


def examine(plan: RunPlan) -> list[Check]:
    """All checks, the most important first; takes seconds.

    Raises ConfigError: this process is a rank of a job.
    """
    from ..run import root_user

    started = launcher.launched()
    # one process: an interactive shell, as `srun --pty bash`
    if started is not None and started.size > 1:
        raise ConfigError("[doctor] it starts ranks itself; run it without mpirun or srun")
    with ThreadPoolExecutor(16) as pool:
        alone = pool.submit(probe, [sys.executable]).result  # first: others wait for it
        checks: list[Callable[[], Check | list[Check]]] = [
            python,
            packages,
            distributions,
            kernels,
            lambda: mpi(alone()),
            lambda: launching(shutil.which("mpirun"), alone),
            lambda: cores(plan.ranks, plan.threads),
            lambda: shared_memory(plan.ranks, machine.shared_memory(), library(alone())),
            lambda: memory(plan.ranks, memory_limit(), _available()),
            lambda: run_directory(plan.run_dir),
            cache,
            gpus,
            lambda: limits(plan.ranks, {name: machine.limit(name.upper()) for name in LIMITS}),
            lambda: user(os.geteuid(), root_user.working()),
            *[lambda host=host: reach(host) for host in plan.hosts],
        ]
        found = [one.result() for one in [pool.submit(check) for check in checks]]
    return [check for one in found for check in (one if isinstance(one, list) else [one])]


def python() -> Check:
    return Check("python", OK, f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")


def packages(names: Sequence[str] = ("odyssey", "numpy", "mpi4py", "safetensors", "max")) -> Check:
    found = {name: preflight.version(name) for name in names}
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    missing = [name for name, number in found.items() if number == "none"]
    if missing == ["max"] and os.environ.get("ODYSSEY_KERNELS"):
        missing = []  # kernels that were compiled elsewhere need no compiler
    if missing:
        return Check("packages", FAIL, text, install_packages(missing))
    return Check("packages", OK, text)


def distributions() -> list[Check]:
    """A warning if something is installed under the name `odyssey`: another project's package,
    or this one before it was called `ml-odyssey`. Both install files in the same folder, so
    whoever removes one breaks the other.
    """
    from importlib import metadata

    try:
        other = metadata.version("odyssey")
    except metadata.PackageNotFoundError:
        return []
    text = f"odyssey {other} is installed, another project or an old name; this is {DISTRIBUTION}"
    advice = f"pip uninstall odyssey, then {REINSTALL}"
    return [Check("name", WARN, text, advice)]


def kernels() -> list[Check]:
    """The compiler's run-time libraries, and the kernels for this CPU."""
    from ..build import folder
    from ..build import library as build

    try:
        runtime = build.runtime_libraries()
    except BuildError as problem:
        return [Check("compiler", FAIL, _first(problem), install_packages(["max"]))]
    compiler = Check("compiler", OK, f"mojo {build.compiler_version()}, {runtime[0].parent}")
    named = os.environ.get("ODYSSEY_KERNELS")
    try:
        path = build.library_path() if named else build.cached()
        if path is not None and folder.is_folder(path.parent):
            whole = folder.read(path.parent)
            folder.verify(path.parent, whole, whole.files)
    except OdysseyError as problem:
        said, _, advice = _first(problem).rpartition("; ")
        return [compiler, Check("kernels", FAIL, said or advice, advice)]
    cpu = "named by ODYSSEY_KERNELS" if named else f"for {build.host_cpu()}"
    if path is None:
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            advice = (
                "install a C compiler (cc, gcc or clang), which Mojo's asks for, then run "
                "`odyssey build`"
            )
            return [
                compiler,
                Check("kernels", FAIL, f"not compiled {cpu}, and there is no C compiler", advice),
            ]
        advice = "the first run does it, in up to a minute; `odyssey build` does it now"
        return [compiler, Check("kernels", WARN, f"not compiled yet {cpu}", advice)]
    # in another process: a wrong library may end it
    load = "from odyssey.core import native; native.library()"
    done = _run([sys.executable, "-c", load], {"ODYSSEY_KERNELS": str(path)})
    if done.returncode:
        if named:
            advice = "set ODYSSEY_KERNELS to another folder, or unset it"
        elif build.SHIPPED in path.parents:
            advice = REINSTALL
        else:
            advice = (
                "set ODYSSEY_CACHE_DIR to another directory: the next run compiles the "
                "kernels there"
            )
        return [compiler, Check("kernels", FAIL, f"{path} cannot be loaded: {_last(done)}", advice)]
    return [compiler, Check("kernels", OK, f"{cpu}, {path}")]


def gpus() -> Check:
    """The GPUs, by kind, and whether their driver is one that takes the kernels."""
    from ..build import gpus as of_machine

    found = of_machine.found()
    if not found:
        return Check("gpus", OK, "none: CPU workers are used")
    kinds = collections.Counter(f"{gpu.name} ({gpu.accelerator})" for gpu in found)
    text = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    driver = found[0].driver
    if driver.partition(".")[0].isdecimal() and int(driver.partition(".")[0]) < of_machine.DRIVER:
        return Check(
            "gpus", WARN, f"{text}, driver {driver}", f"install driver {of_machine.DRIVER} or newer"
        )
    return _gpu_kernels(text, found[0].accelerator)


def _gpu_kernels(text: str, accelerator: str) -> Check:
    from ..build import library as build
    from ..build import sources

    try:
        if os.environ.get("ODYSSEY_KERNELS"):
            return Check("gpus", OK, f"{text}, kernels {build.gpu_library_path(accelerator)}")
        if not (build.source_root() / sources.GPU_ROOT).is_file():
            return Check(
                "gpus",
                WARN,
                f"{text}, which this version has no kernels for",
                "CPU workers are used",
            )
        path = build.cached(accelerator)
    except OdysseyError as problem:
        return Check("gpus", WARN, f"{text}; {_first(problem)}", "else CPU workers are used")
    if path is None:
        advice = (
            f"the first run that uses one does it; `odyssey build --target {accelerator}` "
            "does it now"
        )
        return Check("gpus", WARN, f"{text}, kernels not compiled yet", advice)
    return Check("gpus", OK, f"{text}, kernels {path}")


class Probed(NamedTuple):
    """Answers of a probe's processes about themselves, or why there are none."""

    said: list[dict[str, Any]]
    problem: str = ""


def probe(words: Sequence[str]) -> Probed:
    """Starts `words -m odyssey.cli.doctor` and reads what each process says."""
    try:
        done = _run([*words, "-m", "odyssey.cli.doctor"])
    except OSError as problem:
        return Probed([], f"{words[0]} cannot be started: {problem.strerror}")
    except subprocess.TimeoutExpired:
        return Probed([], f"no answer after {SECONDS:g} s")
    said = _answers(done.stdout)
    return Probed(said) if said and done.returncode == 0 else Probed(said, _last(done))


def library(found: Probed) -> str:
    """The MPI library of mpi4py, from a probe of one process; "no MPI" where there is none."""
    return str(found.said[0].get("MPI")) if found.said else "no MPI"


def mpi(found: Probed) -> Check:
    """Returns what mpi4py uses, from a probe of one process."""
    if found.problem or not found.said:
        advice = "pip install mpi4py mpich, or load your site's MPI"
        return Check("mpi", FAIL, f"cannot be loaded: {found.problem}", advice)
    level = found.said[0].get("level")
    weak = level in THREAD_LEVELS[:2]
    advice = "load an MPI that was built for several threads" if weak else ""
    return Check("mpi", WARN if weak else OK, f"{library(found)}, threads {level}", advice)


def launching(mpirun: str | None, alone: Callable[[], Probed]) -> Check:
    """Returns whether that launcher starts ranks of the MPI library that mpi4py uses: else each
    is a world of its own, or none starts. `alone`: the probe of one process.
    """
    beside = Path(sys.executable).parent / "mpirun"
    instead = f"use {beside}" if beside.exists() else "pip install mpich, or load your site's MPI"
    if mpirun is None:
        return Check("mpirun", FAIL, "there is none on the PATH", instead)
    count = 2
    found = probe([mpirun, "-n", str(count), sys.executable])
    sizes = [one.get("size") for one in found.said]
    if not found.problem and sizes == [count] * count:
        return Check("mpirun", OK, f"{mpirun}: {count} ranks see each other")
    kind = maker(mpirun)
    ours = library(alone())
    if set(sizes) == {1}:
        what = f"{mpirun} starts {count} processes and each is a world of one"
    else:
        what = f"{mpirun} -n {count}: {found.problem or 'not all ranks came'}"
    if kind and not ours.startswith(kind):
        what += f" (it is of {kind}, mpi4py uses {ours})"
    return Check(
        "mpirun", FAIL, what, instead if str(beside) != mpirun else "pip install mpi4py mpich again"
    )


def maker(mpirun: str) -> str:
    """ "MPICH" or "Open MPI", whose launcher it is; "" where it does not say."""
    said = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        said = _run([mpirun, "--version"]).stdout
    makers = {"Open MPI": "Open MPI", "OpenRTE": "Open MPI", "HYDRA": "MPICH"}
    return next((name for word, name in makers.items() if word in said), "")


def reach(host: str) -> Check:
    """Returns whether ssh reaches a host without asking, and whether this Python has the same
    packages there.
    """
    name = f"host {host}"
    if host in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return Check(name, OK, "this machine")
    remote = shlex.join([sys.executable, "-m", "odyssey.cli.doctor", "--versions"])
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "StrictHostKeyChecking=yes"]
    try:
        done = _run(["ssh", *options, "--", host, remote])
    except OSError:
        return Check(name, FAIL, "there is no ssh", "install an ssh client")
    except subprocess.TimeoutExpired:
        return Check(name, FAIL, f"no answer after {SECONDS:g} s", f"check `ssh {host} true`")
    said = _answers(done.stdout)
    if done.returncode == 255:
        advice = (
            f"`ssh {host} true` must work without a question: a key, and the host in known_hosts"
        )
        return Check(name, FAIL, f"ssh does not get there: {_last(done)}", advice)
    if done.returncode or not said:
        text = f"{sys.executable} with odyssey does not run there: {_last(done)}"
        return Check(name, FAIL, text, "install the same environment at the same place")
    here = {key: value for key, value in preflight.versions().items() if key != "MPI"}
    for key, value in here.items():
        if said[-1].get(key) != value:
            theirs = printable(str(said[-1].get(key)), limit=40)
            return Check(
                name, FAIL, f"{key} {theirs} there, {value} here", "install the same versions"
            )
    return Check(name, OK, "the same versions")


def cores(ranks: int, threads: int | None, mask: int | None = None) -> Check:
    mask = preflight._mask() if mask is None else mask
    count = mask.bit_count() or os.cpu_count() or 1
    each = threads or max(1, count // ranks)
    said = preflight.crowded([preflight.RankPlace(0, each, mask)] * ranks)
    if said:
        return Check("cores", WARN, *said[0].split("; ", 1))
    return Check("cores", OK, f"{count} for {ranks} ranks x {each} thread{'s' * (each > 1)}")


def shared_memory(ranks: int, room: tuple[int, int] | None, mpi: str) -> Check:
    """Returns whether MPICH, and shared memory between ranks, have their room in /dev/shm.

    Open MPI does without.
    """
    if room is None:
        return Check(
            "/dev/shm", WARN, "there is none", "ranks of one machine are connected by MPI alone"
        )
    size, free = room
    need = machine.shared_need(ranks)
    windows = ranks * 4 * MIB  # comm/shm.py: two slots and two results of a rank
    text = f"{free / MIB:,.0f} of {size / MIB:,.0f} MiB free"
    larger = "make it larger: docker run --shm-size=256m, or mount -o remount,size=256m /dev/shm"
    if not size:
        return Check("/dev/shm", OK, "no limit")
    if free < need and not mpi.startswith("Open MPI"):
        return Check(
            "/dev/shm",
            FAIL,
            f"{text}, MPICH needs {need / MIB:.0f} for {ranks} ranks, or crashes",
            larger,
        )
    if free < need + windows:
        return Check(
            "/dev/shm",
            WARN,
            f"{text}, {(need + windows) / MIB:.0f} are needed for backend shm",
            larger,
        )
    return Check("/dev/shm", OK, f"{text}, {(need + windows) / MIB:.0f} needed")


def memory(ranks: int, limit: int | None, available: int) -> Check:
    """`limit`: of the cgroup; `available`: what this process could still get, both in bytes."""
    need = ranks * RANK_MEMORY
    limited = f"limit {limit / GIB:,.1f} GiB" if limit else "no cgroup limit"
    text = f"{available / GIB:,.1f} GiB available, {limited}"
    if available < need:
        advice = "start fewer ranks, or raise the limit: a rank that exceeds it is killed"
        return Check(
            "memory",
            WARN,
            f"{text}; {ranks} ranks of a small model take {need / GIB:.1f} GiB",
            advice,
        )
    return Check("memory", OK, text)


def _available() -> int:
    """Bytes of memory that can still be had; many where that is not known.

    The limit of a control group included.
    """
    free = 1 << 60
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    return min(free, memory_limit() or free)


def run_directory(path: Path | None) -> Check:
    """Returns whether a run's files can be written there, by whom, and whether two checkpoints
    fit.
    """
    name = "run dir"
    if path is None:
        return Check(name, OK, "none given (--run-dir)")
    place = Path(os.path.abspath(path))
    while not os.path.lexists(place):
        place = place.parent
    try:
        found = os.stat(place)
        if not stat.S_ISDIR(found.st_mode):
            return Check(name, FAIL, f"{place} is no directory", "name another")
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    except OSError as problem:
        return Check(name, FAIL, f"{place} cannot be used: {problem.strerror}", "name another")
    if not os.access(place, os.W_OK | os.X_OK):
        return Check(
            name, FAIL, f"{place} cannot be written to", "name another, or change its permissions"
        )
    foreign = found.st_uid != os.geteuid() and found.st_mode & stat.S_IWOTH
    if foreign and place == Path(os.path.abspath(path)):
        return Check(
            name,
            FAIL,
            f"{place} is another user's and all may write to it",
            "name a directory in it",
        )
    largest = _newest_checkpoint(place)
    text = f"{place}, {free / GIB:,.1f} GiB free"
    if largest is None:
        if free < GIB:
            return Check(name, WARN, text, f"{preflight.CHECKPOINTS} times a checkpoint is needed")
        return Check(name, OK, text)
    try:
        warnings = preflight.check_space(free, largest, str(place))
    except OdysseyError as problem:
        return Check(name, FAIL, _first(problem))
    if warnings:
        return Check(name, WARN, warnings[0])
    return Check(name, OK, f"{text}, a checkpoint takes {largest / MIB:,.1f} MiB")


def _newest_checkpoint(run: Path) -> int | None:
    """Bytes of the newest checkpoint of a run, None without one."""
    try:
        steps = sorted(
            p for p in (run / "checkpoints").iterdir() if p.name.startswith("step_") and p.is_dir()
        )
        return sum(p.lstat().st_size for p in steps[-1].iterdir()) if steps else None
    except OSError:
        return None


def cache() -> Check:
    """Returns whether the kernels' cache can be written to."""
    from ..build import library as build

    where = place = build.cache_dir()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        advice = "set ODYSSEY_CACHE_DIR; else a folder in /tmp is used"
        return Check("cache", WARN, f"{where} cannot be written to", advice)
    return Check("cache", OK, str(where))


def limits(ranks: int, found: Mapping[str, float]) -> Check:
    """Limits of the shell (infinite: none): too low ones end a run in the middle."""
    need = {"nofile": 64 + 16 * ranks, "nproc": 256 + 16 * ranks, "fsize": GIB, "as": 16 * GIB}
    text = ", ".join(
        f"{name} {'unlimited' if math.isinf(value) else value}" for name, value in found.items()
    )
    low = [name for name, value in found.items() if value < need[name]]
    if low:
        return Check(
            "limits",
            WARN,
            text,
            "raise " + " and ".join(f"`ulimit {LIMITS[name]}`" for name in low),
        )
    return Check("limits", OK, text)


def user(uid: int, others: Sequence[int]) -> Check:
    """`others`: ids of people who have a process here.

    Root among them is refused by `odyssey launch`.
    """
    if uid:
        return Check("user", OK, f"user {uid}")
    if others:
        advice = "train as an ordinary user (`odyssey launch` wants --allow-root)"
        return Check("user", WARN, f"root, and user {others[0]} works on this machine too", advice)
    return Check("user", OK, "root, and nobody else works here")


def _run(
    words: Sequence[str], more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    # of an outer job
    foreign = ("PMI_", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_", "OMPI_COMM_WORLD_", "HYDI_")
    own = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    how = {
        "stdin": subprocess.DEVNULL,
        "capture_output": True,
        "text": True,
        "errors": "replace",
        "timeout": SECONDS,
    }
    return subprocess.run(list(words), env={**own, **launcher.OPEN_MPI, **(more or {})}, **how)


def _answers(text: str) -> list[dict[str, Any]]:
    """The lines of JSON among what processes printed."""
    found = []
    for line in text.splitlines():
        if line.startswith('{"'):
            with contextlib.suppress(ValueError, RecursionError):
                found.append(json.loads(line))
    return found


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip(" =-")]
    return printable(lines[-1].strip(), limit=200) if lines else f"exit code {done.returncode}"


def _first(problem: BaseException) -> str:
    return printable(str(problem).split("\n", 1)[0].partition("] ")[2] or str(problem), limit=300)


def _answer(arguments: Sequence[str]) -> None:
    """Returns what the probe prints: one line, in one write."""
    said: dict[str, Any] = {"host": socket.gethostname()}
    if "--versions" not in arguments:
        from ..comm import mpi as backend

        world = backend.MPI.COMM_WORLD
        level = backend.MPI.Query_thread()
        levels = (
            backend.MPI.THREAD_SINGLE,
            backend.MPI.THREAD_FUNNELED,
            backend.MPI.THREAD_SERIALIZED,
        )
        said["level"] = THREAD_LEVELS[levels.index(level) if level in levels else 3]
        said["size"] = world.Get_size()
        said["rank"] = world.Get_rank()
    said.update(preflight.versions())
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _answer(sys.argv[1:])
