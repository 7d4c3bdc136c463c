"""`odyssey doctor`: the list of checks of everything that a run needs on this machine. A check
that fails names the remedy.

The rooms below do the work, and a check puts their answers into words. Nothing is changed or left
behind. `python -m odyssey.cli.doctor` is the program of the probes in `comm/probe.py`: each process
prints one line of JSON about itself and its MPI.
"""

from __future__ import annotations

import collections
import math
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..base import install_packages, launcher, mpi_programs
from ..base import limits as machine
from ..base.files import nearest
from ..base.limits import MIB
from ..base.requirements import DISTRIBUTION, REINSTALL
from ..base.versions import version, versions
from ..checkpoints.store import newest_bytes
from ..comm import probe as probes
from ..comm.cores import available_memory, core_mask, memory_limit
from ..comm.probe import Probed, mpi_of, probe
from ..errors import BuildError, ConfigError, LaunchError, OdysseyError, counted, printable
from ..train import preflight

if TYPE_CHECKING:
    from ..launch.starting import Starter

OK = "ok"
WARN = "warn"
FAIL = "fail"
GIB = 1 << 30
RANK_MEMORY = 160 * MIB  # a rank that trains LeNet-5 on MNIST takes 122, as measured
ULIMIT_OPTIONS = {"nofile": "-n", "nproc": "-u", "fsize": "-f", "as": "-v"}


class Check(NamedTuple):
    """Result of a check: its name, "ok", "warn" or "fail", the finding, and the remedy or ""."""

    name: str
    state: str
    found: str
    advice: str = ""

    def line(self) -> str:
        remedy = f"; {self.advice}" if self.advice else ""
        return f"{self.state:4}  {self.name:9} {self.found}{remedy}"


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
    from ..launch import root_user

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
            lambda: launchers(probe_answer),
            lambda: cores(plan.ranks, plan.threads),
            lambda: shared_memory(plan.ranks, machine.shared_memory(), mpi_of(probe_answer())),
            lambda: memory(plan.ranks, memory_limit(), available_memory()),
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
    installed = {name: version(name) for name in names}
    text = ", ".join(f"{name} {number}" for name, number in installed.items())
    missing = [name for name, number in installed.items() if number == "none"]
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
        number = metadata.version("odyssey")
    except metadata.PackageNotFoundError:
        return []
    text = f"odyssey {number} is installed, another project or an old name; this is {DISTRIBUTION}"
    advice = f"pip uninstall odyssey, then {REINSTALL}"
    return [Check("name", WARN, text, advice)]


def kernels() -> list[Check]:
    """Checks the compiler's run-time libraries, and the kernels for this CPU."""
    from ..compile import library as build

    try:
        runtime = build.runtime_libraries()
    except BuildError as problem:
        return [Check("compiler", FAIL, _first_line(problem), install_packages(["max"]))]
    compiler = Check("compiler", OK, f"mojo {build.compiler_version()}, {runtime[0].parent}")
    return [compiler, _cpu_kernels()]


def _cpu_kernels() -> Check:
    from ..compile import folder
    from ..compile import library as build

    name = "kernels"
    kernels_path = os.environ.get("ODYSSEY_KERNELS")
    try:
        path = build.library_path() if kernels_path else build.cached()
        if path is not None and folder.is_folder(path.parent):
            manifest = folder.read(path.parent)
            folder.verify(path.parent, manifest, manifest.files)
    except OdysseyError as problem:
        reason, _, advice = _first_line(problem).rpartition("; ")
        return Check(name, FAIL, reason or advice, advice)
    cpu = "named by ODYSSEY_KERNELS" if kernels_path else f"for {build.host_cpu()}"
    if path is None:
        return _not_compiled(cpu)
    # in another process, because a wrong library may end it
    load = "from odyssey.core import native; native.library()"
    result = probes.run([sys.executable, "-c", load], {"ODYSSEY_KERNELS": str(path)})
    if result.returncode == 0:
        return Check(name, OK, f"{cpu}, {path}")
    advice = "set ODYSSEY_CACHE_DIR to another directory: the next run compiles the kernels there"
    if kernels_path:
        advice = "set ODYSSEY_KERNELS to another folder, or unset it"
    elif build.SHIPPED in path.parents:
        advice = REINSTALL
    return Check(name, FAIL, f"{path} cannot be loaded: {probes.last_line(result)}", advice)


def _not_compiled(cpu: str) -> Check:
    if any(map(shutil.which, ("cc", "gcc", "clang"))):
        advice = "the first run does it, in up to a minute; `odyssey build` does it now"
        return Check("kernels", WARN, f"not compiled yet {cpu}", advice)
    advice = "install a C compiler (cc, gcc or clang), which Mojo's asks for, then run"
    text = f"not compiled {cpu}, and there is no C compiler"
    return Check("kernels", FAIL, text, f"{advice} `odyssey build`")


def gpus() -> Check:
    """Counts the GPUs by kind, and checks that their driver accepts the kernels."""
    from ..compile import gpus as build

    gpu_models = build.found()
    if not gpu_models:
        return Check("gpus", OK, "none: CPU workers are used")
    kinds = collections.Counter(f"{gpu.name} ({gpu.accelerator})" for gpu in gpu_models)
    text = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    driver = gpu_models[0].driver
    major = driver.partition(".")[0]
    if major.isdecimal() and int(major) < build.DRIVER:
        advice = f"install driver {build.DRIVER} or newer"
        return Check("gpus", WARN, f"{text}, driver {driver}", advice)
    return _gpu_kernels(text, gpu_models[0].accelerator)


def _gpu_kernels(text: str, accelerator: str) -> Check:
    from ..compile import library as build
    from ..compile import sources

    try:
        if os.environ.get("ODYSSEY_KERNELS"):
            return Check("gpus", OK, f"{text}, kernels {build.gpu_library_path(accelerator)}")
        if not (build.source_root() / sources.GPU_ROOT).is_file():
            text += ", which this version has no kernels for"
            return Check("gpus", WARN, text, "CPU workers are used")
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


def mpi(probed: Probed) -> Check:
    """Checks the MPI library that mpi4py uses, from a probe of one process."""
    if probed.problem or not probed.answers:
        advice = "pip install mpi4py mpich, or load your site's MPI"
        return Check("mpi", FAIL, f"cannot be loaded: {probed.problem}", advice)
    level = probed.answers[0].get("level")
    text = f"{mpi_of(probed)}, threads {level}"
    if level in ("single", "funneled"):
        return Check("mpi", WARN, text, "load an MPI that was built for several threads")
    return Check("mpi", OK, text)


def launchers(probe_one_process: Callable[[], Probed]) -> list[Check]:
    """Checks the mpirun that `odyssey launch` uses, and warns if the first one on PATH is of
    another MPI: it can't start ranks.
    """
    from ..launch import LaunchConfig
    from ..launch.starting import find_starter

    try:
        starter = find_starter(LaunchConfig(launcher="mpirun"), os.environ)
    except LaunchError as problem:
        reason, _, advice = _first_line(problem).rpartition("; ")
        return [Check("mpirun", FAIL, reason, advice)]
    checks = [launching(starter, probe_one_process)]
    on_path = shutil.which("mpirun")
    first = mpi_programs.identify(on_path) if on_path else None
    if first is not None and first.kind and first.kind != starter.kind:
        text = f"{on_path} is the first on PATH and of {first.version}, which starts no ranks here"
        advice = f"use `odyssey launch`, or {starter.path}"
        checks.append(Check("mpirun", WARN, text, advice))
    return checks


def launching(starter: Starter, probe_one_process: Callable[[], Probed]) -> Check:
    """Checks that this launcher starts ranks of the MPI library that mpi4py uses. With another
    library each rank is a world of one, or none starts. `probe_one_process` probes one process.
    """
    from ..launch import LaunchConfig
    from ..launch.starting import build_command

    count = 2
    path = starter.path
    probed = probe([*build_command(LaunchConfig(), starter, count, (), ()), sys.executable])
    sizes = [answer.get("size") for answer in probed.answers]
    if not probed.problem and sizes == [count] * count:
        return Check("mpirun", OK, f"{path}, {starter.version}: {count} ranks see each other")
    library = mpi_of(probe_one_process())
    if set(sizes) == {1}:
        finding = f"{path} starts {count} processes and each is a world of one"
    else:
        finding = f"{path} -n {count}: {probed.problem or 'not all ranks came'}"
    kind = next((name for name, kind in mpi_programs.KINDS.items() if kind == starter.kind), "")
    if kind and not library.startswith(kind):
        finding += f" (it is of {kind}, mpi4py uses {library})"
    if Path(path) == Path(sys.executable).parent / "mpirun":
        return Check("mpirun", FAIL, finding, "pip install mpi4py mpich again")
    return Check("mpirun", FAIL, finding, "load your site's MPI again, or pip install mpich")


def reach(host: str) -> Check:
    """Checks that ssh reaches a host without a question, and that this Python has the same
    packages there.
    """
    name = f"host {host}"
    if host in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return Check(name, OK, "this machine")
    try:
        result = probes.probe_host(host)
    except OSError:
        return Check(name, FAIL, "there is no ssh", "install an ssh client")
    except subprocess.TimeoutExpired:
        text = f"no answer after {probes.TIMEOUT_S:g} s"
        return Check(name, FAIL, text, f"check `ssh {host} true`")
    if result.returncode == probes.SSH_FAILED:
        advice = (
            f"`ssh {host} true` must work without a question: a key, and the host in known_hosts"
        )
        return Check(name, FAIL, f"ssh does not get there: {probes.last_line(result)}", advice)
    answers = probes.answers_in(result.stdout)
    if result.returncode or not answers:
        text = f"{sys.executable} with odyssey does not run there: {probes.last_line(result)}"
        return Check(name, FAIL, text, "install the same environment at the same place")
    for key, value in versions().items():
        remote_value = answers[-1].get(key)
        if key != "MPI" and remote_value != value:
            text = f"{key} {printable(str(remote_value), limit=40)} there, {value} here"
            return Check(name, FAIL, text, "install the same versions")
    return Check(name, OK, "the same versions")


def cores(ranks: int, threads: int | None, mask: int | None = None) -> Check:
    mask = core_mask() if mask is None else mask
    count = mask.bit_count() or os.cpu_count() or 1
    rank_threads = threads or max(1, count // ranks)
    warnings = preflight.crowded([preflight.RankPlace(0, rank_threads, mask)] * ranks)
    if warnings:
        return Check("cores", WARN, *warnings[0].split("; ", 1))
    return Check("cores", OK, f"{count} for {counted(ranks)} x {counted(rank_threads, 'thread')}")


def shared_memory(ranks: int, room: tuple[int, int] | None, mpi: str) -> Check:
    """Checks that /dev/shm has room for MPICH, and for the memory that ranks share.

    Open MPI needs no room there.
    """
    name = "/dev/shm"
    if room is None:
        return Check(name, WARN, "there is none", "ranks of one machine are connected by MPI alone")
    size, free = room
    if not size:
        return Check(name, OK, "no limit")
    need = machine.shared_need(ranks)
    need_with_shm = need + ranks * machine.WINDOW_RANK
    text = f"{free / MIB:,.0f} of {size / MIB:,.0f} MiB free"
    larger = "make it larger: docker run --shm-size=256m, or mount -o remount,size=256m /dev/shm"
    if free < need and not mpi.startswith("Open MPI"):
        text += f", MPICH needs {need / MIB:.0f} for {counted(ranks)}, or crashes"
        return Check(name, FAIL, text, larger)
    if free < need_with_shm:
        text += f", {need_with_shm / MIB:.0f} are needed for backend shm"
        return Check(name, WARN, text, larger)
    return Check(name, OK, f"{text}, {need_with_shm / MIB:.0f} needed")


def memory(ranks: int, limit: int | None, available: int) -> Check:
    """Checks the memory. `limit` is that of the control group, `available` the rest, in bytes."""
    need = ranks * RANK_MEMORY
    limit_text = f"limit {limit / GIB:,.1f} GiB" if limit else "no cgroup limit"
    text = f"{available / GIB:,.1f} GiB available, {limit_text}"
    if available < need:
        count_text = f"{ranks} ranks" if ranks > 1 else "a rank"
        text += f"; {count_text} of a small model need {need / GIB:.1f} GiB"
        advice = "start fewer ranks, or raise the limit: a rank that exceeds it is killed"
        return Check("memory", WARN, text, advice)
    return Check("memory", OK, text)


def run_directory(path: Path | None) -> Check:
    """Checks that a run's files can be written there, that nobody else can write there, and that
    two checkpoints fit.
    """
    name = "run dir"
    if path is None:
        return Check(name, OK, "none given (--run-dir)")
    place = nearest(path)
    try:
        status = os.stat(place)
    except OSError as problem:
        return Check(name, FAIL, f"{place} cannot be used: {problem.strerror}", "name another")
    if not stat.S_ISDIR(status.st_mode):
        return Check(name, FAIL, f"{place} is no directory", "name another")
    if not os.access(place, os.W_OK | os.X_OK):
        advice = "name another, or change its permissions"
        return Check(name, FAIL, f"{place} cannot be written to", advice)
    writable_by_all = bool(status.st_mode & stat.S_IWOTH)
    if writable_by_all and status.st_uid != os.geteuid() and place == Path(os.path.abspath(path)):
        text = f"{place} is another user's and all may write to it"
        return Check(name, FAIL, text, "name a directory in it")
    free = preflight.free(place)
    text = f"{place}, {free / GIB:,.1f} GiB free"
    checkpoint = newest_bytes(place / "checkpoints")
    if checkpoint is None:
        if free < GIB:
            return Check(name, WARN, text, f"{preflight.CHECKPOINTS} times a checkpoint is needed")
        return Check(name, OK, text)
    try:
        warnings = preflight.check_space(free, checkpoint, str(place))
    except OdysseyError as problem:
        return Check(name, FAIL, _first_line(problem))
    if warnings:
        return Check(name, WARN, warnings[0])
    return Check(name, OK, f"{text}, a checkpoint takes {checkpoint / MIB:,.1f} MiB")


def cache() -> Check:
    """Checks that the cache of kernels can be written to."""
    from ..compile import library as build

    directory = build.cache_dir()
    if not os.access(nearest(directory), os.W_OK | os.X_OK):
        advice = "set ODYSSEY_CACHE_DIR; else a folder in /tmp is used"
        return Check("cache", WARN, f"{directory} cannot be written to", advice)
    try:
        build.refuse_noexec(directory)
    except OSError as problem:
        advice = "set ODYSSEY_CACHE_DIR to a place where programs may run"
        return Check("cache", WARN, f"{directory}: {problem.strerror}", advice)
    return Check("cache", OK, str(directory))


def limits(ranks: int, limit_by_name: Mapping[str, float]) -> Check:
    """Checks the limits of the shell, which end a run in the middle if they are too low; infinity
    is no limit.
    """
    need = {"nofile": 64 + 16 * ranks, "nproc": 256 + 16 * ranks, "fsize": GIB, "as": 16 * GIB}
    text = ", ".join(
        f"{name} {'unlimited' if math.isinf(value) else value}"
        for name, value in limit_by_name.items()
    )
    low = [name for name, value in limit_by_name.items() if value < need[name]]
    if low:
        commands = " and ".join(f"`ulimit {ULIMIT_OPTIONS[name]}`" for name in low)
        return Check("limits", WARN, text, f"raise {commands}")
    return Check("limits", OK, text)


def user(uid: int, other_ids: Sequence[int]) -> Check:
    """Checks that root doesn't train among people who have a process here, the `other_ids`.
    `odyssey launch` does not support that.
    """
    if uid:
        return Check("user", OK, f"user {uid}")
    if other_ids:
        text = f"root, and user {other_ids[0]} works on this machine too"
        advice = "train as an ordinary user (`odyssey launch` wants --allow-root)"
        return Check("user", WARN, text, advice)
    return Check("user", OK, "root, and nobody else works here")


def _first_line(problem: BaseException) -> str:
    return printable(str(problem).split("\n", 1)[0].partition("] ")[2] or str(problem), limit=300)


if __name__ == "__main__":
    probes.main(sys.argv[1:])
