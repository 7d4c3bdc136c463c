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
PROBE_TIMEOUT_S = 60.0
ULIMIT_OPTIONS = {"nofile": "-n", "nproc": "-u", "fsize": "-f", "as": "-v"}
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
        probe_answer = pool.submit(probe, [sys.executable]).result  # first: others wait for it
        checks: list[Callable[[], Check | list[Check]]] = [
            python,
            packages,
            distributions,
            kernels,
            lambda: mpi(probe_answer()),
            lambda: launching(shutil.which("mpirun"), probe_answer),
            lambda: cores(plan.ranks, plan.threads),
            lambda: shared_memory(plan.ranks, machine.shared_memory(), library(probe_answer())),
            lambda: memory(plan.ranks, memory_limit(), _available()),
            lambda: run_directory(plan.run_dir),
            cache,
            gpus,
            lambda: limits(
                plan.ranks, {name: machine.limit(name.upper()) for name in ULIMIT_OPTIONS}
            ),
            lambda: user(os.geteuid(), root_user.working()),
            *[lambda host=host: reach(host) for host in plan.hosts],
        ]
        results = [one.result() for one in [pool.submit(check) for check in checks]]
    return [check for one in results for check in (one if isinstance(one, list) else [one])]


def python() -> Check:
    return Check("python", OK, f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")


def packages(names: Sequence[str] = ("odyssey", "numpy", "mpi4py", "safetensors", "max")) -> Check:
    versions = {name: preflight.version(name) for name in names}
    text = ", ".join(f"{name} {number}" for name, number in versions.items())
    missing = [name for name, number in versions.items() if number == "none"]
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
        version = metadata.version("odyssey")
    except metadata.PackageNotFoundError:
        return []
    text = f"odyssey {version} is installed, another project or an old name; this is {DISTRIBUTION}"
    advice = f"pip uninstall odyssey, then {REINSTALL}"
    return [Check("name", WARN, text, advice)]


def kernels() -> list[Check]:
    """The compiler's run-time libraries, and the kernels for this CPU."""
    from ..build import folder
    from ..build import library as build

    try:
        runtime = build.runtime_libraries()
    except BuildError as problem:
        return [Check("compiler", FAIL, _first_line(problem), install_packages(["max"]))]
    compiler = Check("compiler", OK, f"mojo {build.compiler_version()}, {runtime[0].parent}")
    kernels_path = os.environ.get("ODYSSEY_KERNELS")
    try:
        path = build.library_path() if kernels_path else build.cached()
        if path is not None and folder.is_folder(path.parent):
            manifest = folder.read(path.parent)
            folder.verify(path.parent, manifest, manifest.files)
    except OdysseyError as problem:
        reason, _, advice = _first_line(problem).rpartition("; ")
        return [compiler, Check("kernels", FAIL, reason or advice, advice)]
    cpu = "named by ODYSSEY_KERNELS" if kernels_path else f"for {build.host_cpu()}"
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
    result = _run([sys.executable, "-c", load], {"ODYSSEY_KERNELS": str(path)})
    if result.returncode:
        if kernels_path:
            advice = "set ODYSSEY_KERNELS to another folder, or unset it"
        elif build.SHIPPED in path.parents:
            advice = REINSTALL
        else:
            advice = (
                "set ODYSSEY_CACHE_DIR to another directory: the next run compiles the "
                "kernels there"
            )
        return [
            compiler,
            Check("kernels", FAIL, f"{path} cannot be loaded: {_last_line(result)}", advice),
        ]
    return [compiler, Check("kernels", OK, f"{cpu}, {path}")]


def gpus() -> Check:
    """The GPUs, by kind, and whether their driver is one that takes the kernels."""
    from ..build import gpus as of_machine

    gpu_models = of_machine.found()
    if not gpu_models:
        return Check("gpus", OK, "none: CPU workers are used")
    kinds = collections.Counter(f"{gpu.name} ({gpu.accelerator})" for gpu in gpu_models)
    text = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    driver = gpu_models[0].driver
    if driver.partition(".")[0].isdecimal() and int(driver.partition(".")[0]) < of_machine.DRIVER:
        return Check(
            "gpus", WARN, f"{text}, driver {driver}", f"install driver {of_machine.DRIVER} or newer"
        )
    return _gpu_kernels(text, gpu_models[0].accelerator)


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
        return Check("gpus", WARN, f"{text}; {_first_line(problem)}", "else CPU workers are used")
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
        result = _run([*words, "-m", "odyssey.cli.doctor"])
    except OSError as problem:
        return Probed([], f"{words[0]} cannot be started: {problem.strerror}")
    except subprocess.TimeoutExpired:
        return Probed([], f"no answer after {PROBE_TIMEOUT_S:g} s")
    answers = _answers(result.stdout)
    return (
        Probed(answers)
        if answers and result.returncode == 0
        else Probed(answers, _last_line(result))
    )


def library(probed: Probed) -> str:
    """The MPI library of mpi4py, from a probe of one process; "no MPI" where there is none."""
    return str(probed.said[0].get("MPI")) if probed.said else "no MPI"


def mpi(probed: Probed) -> Check:
    """Returns what mpi4py uses, from a probe of one process."""
    if probed.problem or not probed.said:
        advice = "pip install mpi4py mpich, or load your site's MPI"
        return Check("mpi", FAIL, f"cannot be loaded: {probed.problem}", advice)
    level = probed.said[0].get("level")
    weak = level in THREAD_LEVELS[:2]
    advice = "load an MPI that was built for several threads" if weak else ""
    return Check("mpi", WARN if weak else OK, f"{library(probed)}, threads {level}", advice)


def launching(mpirun: str | None, probe_one_process: Callable[[], Probed]) -> Check:
    """Returns whether that launcher starts ranks of the MPI library that mpi4py uses: else each
    is a world of its own, or none starts. `probe_one_process`: probes one process.
    """
    beside = Path(sys.executable).parent / "mpirun"
    instead = f"use {beside}" if beside.exists() else "pip install mpich, or load your site's MPI"
    if mpirun is None:
        return Check("mpirun", FAIL, "there is none on the PATH", instead)
    count = 2
    probed = probe([mpirun, "-n", str(count), sys.executable])
    sizes = [one.get("size") for one in probed.said]
    if not probed.problem and sizes == [count] * count:
        return Check("mpirun", OK, f"{mpirun}: {count} ranks see each other")
    kind = maker(mpirun)
    ours = library(probe_one_process())
    if set(sizes) == {1}:
        finding = f"{mpirun} starts {count} processes and each is a world of one"
    else:
        finding = f"{mpirun} -n {count}: {probed.problem or 'not all ranks came'}"
    if kind and not ours.startswith(kind):
        finding += f" (it is of {kind}, mpi4py uses {ours})"
    return Check(
        "mpirun",
        FAIL,
        finding,
        instead if str(beside) != mpirun else "pip install mpi4py mpich again",
    )


def maker(mpirun: str) -> str:
    """ "MPICH" or "Open MPI", whose launcher it is; "" where it does not say."""
    output = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        output = _run([mpirun, "--version"]).stdout
    makers = {"Open MPI": "Open MPI", "OpenRTE": "Open MPI", "HYDRA": "MPICH"}
    return next((name for word, name in makers.items() if word in output), "")


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
        result = _run(["ssh", *options, "--", host, remote])
    except OSError:
        return Check(name, FAIL, "there is no ssh", "install an ssh client")
    except subprocess.TimeoutExpired:
        return Check(
            name, FAIL, f"no answer after {PROBE_TIMEOUT_S:g} s", f"check `ssh {host} true`"
        )
    answers = _answers(result.stdout)
    if result.returncode == 255:
        advice = (
            f"`ssh {host} true` must work without a question: a key, and the host in known_hosts"
        )
        return Check(name, FAIL, f"ssh does not get there: {_last_line(result)}", advice)
    if result.returncode or not answers:
        text = f"{sys.executable} with odyssey does not run there: {_last_line(result)}"
        return Check(name, FAIL, text, "install the same environment at the same place")
    local_versions = {key: value for key, value in preflight.versions().items() if key != "MPI"}
    for key, value in local_versions.items():
        if answers[-1].get(key) != value:
            theirs = printable(str(answers[-1].get(key)), limit=40)
            return Check(
                name, FAIL, f"{key} {theirs} there, {value} here", "install the same versions"
            )
    return Check(name, OK, "the same versions")


def cores(ranks: int, threads: int | None, mask: int | None = None) -> Check:
    mask = preflight._mask() if mask is None else mask
    count = mask.bit_count() or os.cpu_count() or 1
    rank_threads = threads or max(1, count // ranks)
    warnings = preflight.crowded([preflight.RankPlace(0, rank_threads, mask)] * ranks)
    if warnings:
        return Check("cores", WARN, *warnings[0].split("; ", 1))
    return Check(
        "cores", OK, f"{count} for {ranks} ranks x {rank_threads} thread{'s' * (rank_threads > 1)}"
    )


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
        info = os.stat(place)
        if not stat.S_ISDIR(info.st_mode):
            return Check(name, FAIL, f"{place} is no directory", "name another")
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    except OSError as problem:
        return Check(name, FAIL, f"{place} cannot be used: {problem.strerror}", "name another")
    if not os.access(place, os.W_OK | os.X_OK):
        return Check(
            name, FAIL, f"{place} cannot be written to", "name another, or change its permissions"
        )
    foreign = info.st_uid != os.geteuid() and info.st_mode & stat.S_IWOTH
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
        return Check(name, FAIL, _first_line(problem))
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

    directory = place = build.cache_dir()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        advice = "set ODYSSEY_CACHE_DIR; else a folder in /tmp is used"
        return Check("cache", WARN, f"{directory} cannot be written to", advice)
    return Check("cache", OK, str(directory))


def limits(ranks: int, limit_by_name: Mapping[str, float]) -> Check:
    """Limits of the shell (infinite: none): too low ones end a run in the middle."""
    need = {"nofile": 64 + 16 * ranks, "nproc": 256 + 16 * ranks, "fsize": GIB, "as": 16 * GIB}
    text = ", ".join(
        f"{name} {'unlimited' if math.isinf(value) else value}"
        for name, value in limit_by_name.items()
    )
    low = [name for name, value in limit_by_name.items() if value < need[name]]
    if low:
        return Check(
            "limits",
            WARN,
            text,
            "raise " + " and ".join(f"`ulimit {ULIMIT_OPTIONS[name]}`" for name in low),
        )
    return Check("limits", OK, text)


def user(uid: int, other_ids: Sequence[int]) -> Check:
    """`other_ids`: of people who have a process here.

    Root among them is refused by `odyssey launch`.
    """
    if uid:
        return Check("user", OK, f"user {uid}")
    if other_ids:
        advice = "train as an ordinary user (`odyssey launch` wants --allow-root)"
        return Check(
            "user", WARN, f"root, and user {other_ids[0]} works on this machine too", advice
        )
    return Check("user", OK, "root, and nobody else works here")


def _run(
    words: Sequence[str], extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    # of an outer job
    foreign = ("PMI_", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_", "OMPI_COMM_WORLD_", "HYDI_")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(foreign)
    }
    options = {
        "stdin": subprocess.DEVNULL,
        "capture_output": True,
        "text": True,
        "errors": "replace",
        "timeout": PROBE_TIMEOUT_S,
    }
    return subprocess.run(
        list(words), env={**environment, **launcher.OPEN_MPI, **(extra or {})}, **options
    )


def _answers(text: str) -> list[dict[str, Any]]:
    """The lines of JSON among what processes printed."""
    answers = []
    for line in text.splitlines():
        if line.startswith('{"'):
            with contextlib.suppress(ValueError, RecursionError):
                answers.append(json.loads(line))
    return answers


def _last_line(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip(" =-")]
    return printable(lines[-1].strip(), limit=200) if lines else f"exit code {result.returncode}"


def _first_line(problem: BaseException) -> str:
    return printable(str(problem).split("\n", 1)[0].partition("] ")[2] or str(problem), limit=300)


def _answer(arguments: Sequence[str]) -> None:
    """Returns what the probe prints: one line, in one write."""
    answer: dict[str, Any] = {"host": socket.gethostname()}
    if "--versions" not in arguments:
        from ..comm import mpi as backend

        world = backend.MPI.COMM_WORLD
        level = backend.MPI.Query_thread()
        levels = (
            backend.MPI.THREAD_SINGLE,
            backend.MPI.THREAD_FUNNELED,
            backend.MPI.THREAD_SERIALIZED,
        )
        answer["level"] = THREAD_LEVELS[levels.index(level) if level in levels else 3]
        answer["size"] = world.Get_size()
        answer["rank"] = world.Get_rank()
    answer.update(preflight.versions())
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _answer(sys.argv[1:])
