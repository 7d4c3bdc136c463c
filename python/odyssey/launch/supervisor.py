"""The launcher of a run: attempt after attempt until the run is complete, stopped or given up.

    DistributedLauncher(LaunchConfig(nproc_per_node=4, max_restarts=3)).launch("train.py",
    "--epochs", "100")

It holds the run's lock, gives each attempt its number before it starts (so that one of before can
no longer write a checkpoint), cleans up after it, and does what restart_policy.py says. It imports
neither NumPy nor MPI.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import platform
import re
import secrets
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import __version__
from ..base import limits, runs
from ..base.files import (
    DIRECTORY_MODE,
    NO_DIRECTORY,
    current_directory,
    private_directory,
    read_json,
    write_json,
)
from ..base.launcher import launched, leave_job_of_parent
from ..base.paths import expand_path
from ..base.variables import DECIDE_BITS, is_named
from ..errors import ConfigError, DataError, OutputError, counted, printable
from . import leftovers, root_user, starting
from .attempt import Attempt, newest_step
from .config import LaunchConfig
from .hosts import Host, capacity, place
from .lock import RunLock
from .rank_ends import signal_name
from .restart_policy import Outcome, Verdict, decide, in_doubt, taken_back

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PROBE = 30.0  # seconds that a host has to start a process, when it is asked whether it is there
RETURN = 5.0  # seconds that a host has which did not answer before: the others wait for it
PROBE_VARIABLE = "ODYSSEY_HOST_PROBE"  # other seconds
# share of /dev/shm below which a killed attempt's memory is removed before the next one starts
ROOM = 0.25
FORMAT = 1  # of run.json


class DistributedLauncher:
    """Starts ranks of a script and keeps the run going; see LaunchConfig.
    config: how. say: prints a line of the launcher; default to standard error.
    """

    def __init__(
        self, config: LaunchConfig | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self.config = LaunchConfig() if config is None else config
        self._say = _to_stderr if say is None else say
        self._signals: list[int] = []

    def launch(self, script: str, *arguments: str) -> int:
        """Runs `python script arguments...` as ranks; returns when the run is over.

        script: a Python script; "train", odyssey's own training; "-m", with a module behind it; or
        a program. Returns the exit code: 0 complete; 75 stopped on request, to be gone on with by
        the same call; 69 given up; 128 + the signal if ranks did not stop in time; 73 if all is
        complete, but standard output did not take what ranks printed; else that of the rank that
        failed first. Raises ConfigError: something is not allowed, the script is not there, or the
        run directory belongs to another command or a complete run. LaunchError: nothing can be
        started, or another launcher is at work. OutputError: the run directory cannot be written.
        """
        script = os.fspath(script)
        if script.startswith("~") or "$" in script:
            script = str(expand_path(script))
        words = starting.normalize_command([script, *map(str, arguments)])
        _check(words)
        root_user.check(self.config.allow_root)
        probe_seconds()  # a wrong value is refused now, not when a host is lost
        starter = starting.find_starter(self.config, os.environ)
        if self.config.nnodes > 1 and not self.config.hosts and starter.kind != "srun":
            raise ConfigError(
                f"[launch] {self.config.nnodes} nodes, but no hosts; give --hosts or --hostfile"
            )
        path = self.config.run_dir or default_run_dir(words[words[0] == "-m"])
        run = runs.Run(private_directory(Path(os.path.abspath(expand_path(path)))))
        renewed = _modified(run.lock)
        lock = RunLock(run.lock)
        try:
            number = self._open(run, words, starter, renewed)
            ranks = counted(self.config.ranks)
            self._say(
                f"run {_show_path(run.path)}: attempt {number} on {ranks} ({starter.version})"
            )
            with self._hearing():
                return self._attempts(run, number, words, starter, lock)
        finally:
            lock.close()

    def _open(
        self, run: runs.Run, words: list[str], starter: starting.Starter, renewed: float
    ) -> int:
        """Checks that the directory is this command's, clears up behind a launcher that was
        killed; next attempt.
        """
        advice = "use another --run-dir"
        if run.done.exists():
            raise ConfigError(f"[launch] {_show_path(run.path)} is complete (DONE.json); {advice}")
        try:
            if run.description.exists():
                description = read_json(run.description)
                argv = description.get("command") if isinstance(description, dict) else None
                if argv != words:
                    mismatch = (
                        f"{_show_path(run.path)} is a run of {_line(argv)}, not of {_line(words)}"
                    )
                    raise ConfigError(f"[launch] {mismatch}; {advice}")
            else:
                write_json(run.description, _description(self.config, words, starter))
            attempt_record = (
                read_json(run.attempt_file) if run.attempt_file.exists() else {"attempt": 0}
            )
        except OSError as problem:
            raise _unwritable(run.path, problem) from problem
        except DataError as problem:
            raise _damaged(run, str(problem)) from problem
        last = attempt_record if isinstance(attempt_record, dict) else {"attempt": None}
        number = last.get("attempt")
        token = last.get("token")
        if type(number) is not int or number < 0:
            raise _damaged(run, f"{_show_path(run.attempt_file)} is damaged (no attempt number)")
        if (
            isinstance(token, str)
            and re.fullmatch(r"[0-9a-f]{16}", token)
            and not last.get("cleaned")
        ):
            leftover_pids = leftovers.processes(f"{starting.TOKEN}={token}")
            leftovers.kill(f"{starting.TOKEN}={token}")
            ended = time.time() if leftover_pids else renewed + 6
            leftovers.clean(last.get("before"), ended, os.environ.get("TMPDIR"))
        return number + 1

    def _prepare(
        self, run: runs.Run, ranks: int, hosts: tuple[Host, ...], token: str
    ) -> dict[str, Any]:
        """Writes the attempt's number where everybody checks it, and makes room for what its
        ranks write.
        """
        for folder in (run.ranks, run.ends):
            with contextlib.suppress(FileNotFoundError):
                for name in os.listdir(folder):
                    os.unlink(folder / name)
            folder.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        for file in (run.control, run.heartbeat):
            file.unlink(missing_ok=True)
        record = {
            "attempt": run.attempt,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "ranks": ranks,
            "hosts": [list(pair) for pair in place(hosts, ranks)] if hosts else [],
            "elastic": list(self.config.elastic) if self.config.elastic else None,
            "room": capacity(hosts),
            "token": token,
            "before": leftovers.snapshot(os.environ.get("TMPDIR")),
        }
        write_json(run.attempt_file, record)
        return record

    def _attempts(
        self, run: runs.Run, number: int, words: list[str], starter: starting.Starter, lock: RunLock
    ) -> int:
        config = self.config
        action = Verdict("", None, config.ranks, config.hosts)
        former: int | None = None
        usual_ranks = config.ranks
        chores: list[Callable[[], object]] = []
        unwritten = False
        while True:
            if self._signals:  # it came while nothing ran
                self._say(
                    f"attempt {number}: {signal_name(self._signals[0])} came before it was started"
                )
                code = 128 + self._signals[0]
                break
            run = runs.Run(run.path, number)
            layout = place(action.hosts, action.ranks) if action.hosts else ()
            token = secrets.token_hex(8)
            try:
                record = self._prepare(run, action.ranks, action.hosts, token)
            except OSError as problem:
                raise _unwritable(run.path, problem) from problem
            environment = starting.build_environment(
                config, os.environ, starter, run, action.ranks, token, layout
            )
            command = starting.build_command(
                config, starter, action.ranks, layout, _exported(environment, config)
            )
            command += starting.wrap_rank(starting.resolve_program(words))
            attempt = Attempt(
                *(
                    config,
                    run,
                    starting.tie_to_parent(command, os.getpid()),
                    environment,
                    action.ranks,
                    layout,
                ),
                *(self._signals, self._say),
                scancel=str(Path(starter.path).with_name("scancel"))
                if starter.kind == "srun"
                else None,
                idle=lambda: self._idle(lock, chores),
                meets=words[0] == "train",
            )
            outcome = dataclasses.replace(attempt(), promised=words[0] == "train", former=former)
            unwritten = unwritten or attempt.unwritten
            chores.append(functools.partial(_clean, run, record, time.time()))
            outcome = self._asked_hosts(outcome, starter, environment, lock.renew)
            action = decide(outcome, action.past, config, action.hosts)
            scaled = action.code is None and outcome.scale == action.ranks != outcome.ranks
            if scaled or former is not None and action.ranks == former:
                usual_ranks = action.ranks
            former = outcome.ranks if scaled else None
            missing = [
                host.name
                for host in config.hosts
                if host not in action.hosts and host.name not in outcome.lost
            ]
            if action.code is None and missing and not self._signals:
                lost_hosts = probe(config, starter, missing, environment, lock.renew, RETURN)
                back = tuple(name for name in missing if name not in lost_hosts)
                if back and action.ranks >= outcome.ranks:  # else a rank was just left out
                    action = taken_back(action, back, config, usual_ranks)
                    self._say(
                        f"{', '.join(back)} answers again: going on with {counted(action.ranks)}"
                    )
            if (
                action.code != 0
                or number > 1
                or outcome.ended
                and not all(e.good for e in outcome.ended.values())
            ):
                self._say(action.line)
            if action.code is not None:
                code = action.code
                break
            if _full():
                self._idle(lock, chores)
            self._pause(action.delay, lock)
            number += 1
        self._idle(lock, chores)
        return OutputError.exit_code if unwritten and code == 0 else code

    def _asked_hosts(
        self,
        outcome: Outcome,
        starter: starting.Starter,
        environment: dict[str, str],
        idle: Callable[[], None],
    ) -> Outcome:
        """After a failure on several hosts: which of them are not there any more."""
        if starter.kind == "srun" or not in_doubt(outcome):
            return outcome
        lost = probe(self.config, starter, [name for name, _ in outcome.layout], environment, idle)
        if len(lost) == len(outcome.layout):
            self._say(
                f"attempt {outcome.attempt}: no host answers: check their names, and the network "
                f"between here and them (`ssh {outcome.layout[0][0]} true`)"
            )
            return dataclasses.replace(outcome, unsure=True)
        return dataclasses.replace(outcome, lost=lost)

    def _idle(self, lock: RunLock, chores: list[Callable[[], object]]) -> None:
        """Does what can wait until ranks run again."""
        lock.renew()
        while chores:
            chores.pop()()

    def _pause(self, seconds: float, lock: RunLock) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._signals:
            lock.renew()
            time.sleep(min(0.05, max(0.0, until - time.monotonic())))

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        """Signals are noted instead of ending this process; only in the main thread, where
        Python allows it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous_handlers = {}
        # else the kernel keeps no exit codes for this process
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            previous_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                previous_handlers[number] = signal.signal(
                    number, lambda number, frame: self._signals.append(number)
                )
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)


def _clean(run: runs.Run, record: dict[str, Any], ended: float) -> None:
    """Removes what an attempt left, and notes that it was done."""
    leftovers.clean(record["before"], ended, os.environ.get("TMPDIR"))
    with contextlib.suppress(OSError, DataError):
        if read_json(run.attempt_file).get("attempt") == run.attempt:
            write_json(run.attempt_file, {**record, "before": None, "cleaned": True})


def probe(
    config: LaunchConfig,
    starter: starting.Starter,
    hosts: list[str],
    environment: dict[str, str],
    idle: Callable[[], None] = lambda: None,
    seconds: float | None = None,
) -> tuple[str, ...]:
    """The hosts on which no process can be started within PROBE seconds, those of
    ODYSSEY_HOST_PROBE, or `seconds`.
    """
    nothing = [sys.executable, "-I", "-S", "-c", ""]
    running = {}
    for host in hosts:
        words = starting.build_command(config, starter, 1, ((host, 1),), ()) + nothing
        silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        tied = starting.tie_to_parent(words, os.getpid())
        running[host] = subprocess.Popen(tied, **silent, env=environment, start_new_session=True)
    until = time.monotonic() + (probe_seconds() if seconds is None else seconds)
    lost = []
    for host, process in running.items():
        while process.poll() is None and time.monotonic() < until:
            idle()
            time.sleep(0.02)
        if process.returncode != 0:  # or None: no answer
            lost.append(host)
    leftovers.kill(f"{starting.TOKEN}={environment[starting.TOKEN]}")
    for process in running.values():
        process.wait()
    return tuple(lost)


def probe_seconds() -> float:
    """How long a host has to answer.

    Raises ConfigError: the variable is no number of seconds from 1 to 3600.
    """
    return limits.seconds("launch", PROBE_VARIABLE, PROBE, 1, 3600)


def launch_distributed_training(script: str, *arguments: str, **settings: Any) -> int:
    """`DistributedLauncher(LaunchConfig(**settings)).launch(script, *arguments)`, which see for
    exit code and errors.

    launch_distributed_training("train.py", "--model", "mlp", nproc_per_node=4, nnodes=1,
    backend="gloo") Raises ConfigError if a setting is unknown or not allowed.
    """
    names = [field.name for field in dataclasses.fields(LaunchConfig)]
    unknown = sorted(set(settings) - set(names))
    if unknown:
        raise ConfigError(
            f"[launch] {unknown[0]!r} is no setting of LaunchConfig; choose from {', '.join(names)}"
        )
    return DistributedLauncher(LaunchConfig(**settings)).launch(script, *arguments)


def default_run_dir(script: str, now: datetime.datetime | None = None) -> Path:
    """./runs/20261121-093000-train for "train" or "train.py"; with a number behind it if that is
    there.
    """
    now = datetime.datetime.now() if now is None else now
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(script).stem)[:64] or "run"
    base = Path("runs") / f"{now:%Y%m%d-%H%M%S}-{name}"
    path = base
    number = 2
    while path.exists():
        path = base.with_name(f"{base.name}-{number}")
        number = number + 1
    return path


def _check(words: list[str]) -> None:
    if not current_directory():
        raise ConfigError(f"[launch] {NO_DIRECTORY}")
    for word in words:
        if "\0" in word:
            raise ConfigError(
                f"[launch] {ascii(word[:60])} has a NUL character, which no argument can have"
            )
    starting.resolve_program(words)  # it can be started
    leave_job_of_parent()
    rank = any(os.environ.get(name) for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"))
    started = launched()
    single = started is not None and started.size == 1  # an interactive shell, as `srun --pty bash`
    if rank and not single or os.environ.get("SLURM_STEP_NUM_TASKS", "1") not in ("", "1"):
        raise ConfigError(
            "[launch] it starts the ranks itself; run it once, without mpirun or srun"
        )


def _description(
    config: LaunchConfig, words: list[str], starter: starting.Starter
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "command": words,
        "directory": os.getcwd(),
        "ranks": config.ranks,
        "hosts": [str(host) for host in config.hosts],
        "elastic": list(config.elastic) if config.elastic else None,
        "versions": {
            "odyssey": __version__,
            "python": platform.python_version(),
            "mpi": starter.version,
        },
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _exported(environment: dict[str, str], config: LaunchConfig) -> list[str]:
    names = (
        "ODYSSEY_",
        "MODULAR_",
        "OMP_",
        "PYTHON",
        "LD_LIBRARY_PATH",
        "MASTER_",
        "WORLD_SIZE",
        "FI_",
        "UCX_",
    )
    return sorted(
        name
        for name in environment
        if name.startswith(names) or name in config.env or is_named(name, DECIDE_BITS)
    )


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _full() -> bool:
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(leftovers.MEMORY)
        return usage.free < ROOM * usage.total
    return False


def _show_path(path: object) -> str:
    text = str(path)
    with contextlib.suppress(ValueError):
        near = os.path.relpath(text)
        text = near if not near.startswith("..") else text
    return printable(text)


def _damaged(run: runs.Run, problem: str) -> ConfigError:
    """The error for a file of a run that cannot be used.

    It says where the checkpoints are, because they still can.
    """
    if newest_step(run.checkpoints) is None:
        return ConfigError(f"[launch] {problem}; use another --run-dir")
    folder = _show_path(run.checkpoints)
    return ConfigError(
        f"[launch] {problem}. Checkpoints are in {folder}; resume in another --run-dir with "
        f"--resume {shlex.quote(folder)}, or in a script with fit(resume=...)"
    )


def _unwritable(path: Path, problem: OSError) -> OutputError:
    return OutputError(f"[launch] {_show_path(path)} cannot be written: {problem.strerror}")


def _line(words: object) -> str:
    return (
        printable(" ".join(map(str, words)))[:300] if isinstance(words, list) else "something else"
    )


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is None or not select.select([], [sys.stderr], [], 1.0)[1]:
            return  # a stopped terminal: the ranks are not left alone for it
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"odyssey: {line}\n")
        sys.stderr.flush()
