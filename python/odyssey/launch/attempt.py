"""One attempt: starts mpirun or srun, passes on what ranks print, watches them, and ends all of it.

What ends an attempt: its launcher ends; a rank's wrapper writes down a failure; the heartbeat that
the ranks' watcher writes stops coming; ranks do not start; somebody asks for an end and the ranks
do not follow in time. In every case no process of the attempt is left on this machine when `run`
returns, and what happened is an `Outcome`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..base import runs
from ..base.files import FILE_MODE, private_directory, read_json, write_json
from ..errors import DataError, LaunchError
from ..watch import diagnosis
from . import leftovers, rank_ends
from .config import LaunchConfig, allowed
from .hosts import capacity
from .output import LiveLine, Pump, WithoutHydra
from .restart_policy import Outcome
from .starting import TOKEN

SILENT = 10.0  # seconds without a heartbeat, after there was one, that mean a lost host
ENDING = 5.0  # seconds that the launcher has to end by itself after its ranks have
# seconds after which it is worth a word that ranks have not met; or the watchdog's, if it was given
MEETING = 60.0
# What SLURM's daemon (22.05) says when it has read a request of MPICH's PMI in part, and seconds
# from then on in which ranks may meet after all: as a rule they wait in MPI_Init for ever.
SPOILED = b"mpi/pmi2: invalid client request"
LOST = 3.0
LONGER = 4  # times the grace that ranks have while one of them writes a checkpoint
UNREAD = 2.0  # seconds after which ranks that read no request are sent a signal
REDRAW = 0.5  # seconds between two times that the live line is written
UNKNOWN = 10.0  # seconds after the start in which a trainer may not have shown itself yet
# Seconds of silence after which nothing more is said about a failure: about a rank that was killed
# only the watcher has something to say, and says it at once. And seconds that this may take.
SILENCE = {True: 0.05, False: 0.12}
LAST_WORDS = 1.5
CHORES = 2.0  # seconds after the start, from which on other work does not delay it
HEARTBEAT_LIMIT = 1 << 22  # bytes
_STEP = re.compile(r"step_([0-9]{1,18})", re.ASCII)


class Attempt:
    """One start of all ranks.

    words, environment: what is started (starting.py). layout: hosts and their ranks. signals:
    numbers of those that the launcher got, in order; others append to it. say: prints a line of the
    launcher's own. scancel: SLURM's, if srun starts the ranks. idle: called now and then while the
    ranks run, for chores that can wait. meets: the ranks are known to meet, as odyssey's own
    training does.
    """

    def __init__(
        self,
        config: LaunchConfig,
        run: runs.Run,
        words: Sequence[str],
        environment: Mapping[str, str],
        ranks: int,
        layout: tuple[tuple[str, int], ...],
        signals: list[int],
        say: Callable[[str], None],
        scancel: str | None = None,
        idle: Callable[[], None] = lambda: None,
        meets: bool = False,
    ) -> None:
        self.config = config
        self.run = run
        self.words = list(words)
        self.environment = dict(environment)
        self.ranks = ranks
        self.layout = layout
        self.signals = signals
        self._print = say
        self.scancel = scancel
        self.idle = idle
        self.meets = meets
        self.token = f"{TOKEN}={self.environment[TOKEN]}"
        self._begun = time.monotonic()
        self._handled = 0
        # 0: nothing is said about it
        self._meeting = MEETING if config.watchdog is None else config.watchdog
        self._stop_at = self._seldom = self._looked = self._said_at = 0.0
        self._forced = self._ranks_met = False
        self._told = self._told_late = False  # ranks were sent a SIGTERM, or were said to be late
        self._stop: int | None = None
        self._scale: int | None = None
        # the heartbeat: what it says, when it came, which file it was
        self._beats: dict[str, Any] = {}
        self._beat_at: float | None = None
        self._beat: tuple[int, int] | None = None
        self._control: tuple[int, int] | None = None
        self._live_line = LiveLine(sys.stderr)
        self._drawn_at = 0.0
        # when a heartbeat brought another step, and that step
        self._first_beat: tuple[float, int] | None = None
        self.unwritten = False  # standard output did not take what ranks printed

    # -- from start to end ------------------------------------------------------------------------

    def __call__(self) -> Outcome:
        """Runs the attempt until nothing of it is left.

        Raises LaunchError: it cannot be started.
        """
        private_directory(self.run.logs)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(
                open(self.run.logs / "output.log", "ab", opener=_without_links)
            )
            try:
                pipes = {
                    "stdin": subprocess.DEVNULL,
                    "stdout": subprocess.PIPE,
                    "stderr": subprocess.PIPE,
                }
                process = subprocess.Popen(
                    self.words, **pipes, env=self.environment, start_new_session=True
                )
            except OSError as problem:
                raise LaunchError(
                    f"[launch] {self.words[0]} cannot be started: {problem.strerror}"
                ) from problem
            try:
                pumps = _pumps(process, log, b"" if self.scancel is None else SPOILED)
                end_fields = self._watch(process, pumps, _handle(process, stack))
            finally:
                self._live_line.clear()
                surviving_pids = self._end(process)
            until = time.monotonic() + 0.5
            while not all(pump.done for pump in pumps) and time.monotonic() < until:
                if not any([pump() for pump in pumps]):
                    time.sleep(0.005)
            process.stdout.close()
            process.stderr.close()
            for pump in pumps:
                pump.close()
            self._tell_what_is_not_written(pumps[0])
            missed = sum(pump.unshown for pump in pumps)
            if missed:
                self._say(f"{missed} bytes of output not shown, see {log.name}")
        if surviving_pids:
            self._say(
                f"processes {', '.join(map(str, surviving_pids))} do not end, even when killed"
            )
        return self._outcome(end_fields, process.returncode)

    def _watch(  # noqa: C901
        self, process: subprocess.Popen[bytes], pumps: list[Pump], handle: int | None
    ) -> dict[str, Any]:  # noqa: C901
        """Looks again and again until the attempt is over; what it ended by, as fields of an
        Outcome. `handle`: a descriptor that can be read from when the process has ended.
        """
        start_time = looked = self._begun = time.monotonic()
        failed = quiet = 0.0
        wait = self.config.monitor_interval
        over: float | None = None
        started = False
        while True:
            ready_pumps = self._ready(pumps, handle, wait)
            if ready_pumps:
                self._live_line.clear()
            printed = any([pump() for pump in ready_pumps])
            now_s = time.monotonic()
            if not any(pump.inside_line for pump in pumps):
                self._draw(now_s)
            wait = self.config.monitor_interval
            if now_s - looked > 2 and self._beat_at is not None:
                self._beat_at += now_s - looked  # this process was stopped, not the others
            looked = now_s
            if process.poll() is not None:
                return {"code": process.returncode}
            if printed:
                quiet = now_s
            self._tell_what_is_not_written(pumps[0])
            started = started or self._all_started() or self._beat_at is not None
            if now_s - start_time > CHORES:
                self.idle()
            self._tell_who_is_late(now_s - start_time)
            if self._asked(now_s):
                return {}
            bad, all_over = self._ended()
            # others may still do what they do on SIGTERM
            if bad is not None and not (self._told and not all_over):
                failed = failed or now_s
                until = min(
                    max(failed, quiet) + SILENCE[bad.signal is not None], failed + LAST_WORDS
                )
                if now_s >= until:
                    return {}
                wait = min(wait, until - now_s)
            elif all_over:
                over = over or now_s
                if now_s - over > ENDING:
                    return {}
            elif not started and now_s - start_time > self.config.start_timeout:
                return {"late": True}
            elif self._spoiled(now_s, pumps[1].heard):
                return {"unmet": True}
            elif (silent := self._silence(now_s)) > SILENT:
                return {"silent": silent}

    def _ready(self, pumps: list[Pump], handle: int | None, seconds: float) -> list[Pump]:
        """Sleeps until ranks print, their launcher has ended, or for so long; those that have
        something to pass on.
        """
        descriptors = [pump.source for pump in pumps if pump.reading] + (
            [] if handle is None else [handle]
        )
        sources, targets, _ = select.select(
            descriptors, [pump.target for pump in pumps if pump.full], [], seconds
        )
        return [pump for pump in pumps if pump.source in sources or pump.target in targets]

    def _end(self, process: subprocess.Popen[bytes]) -> list[int]:
        """Kills what is left; the processes that do not go away."""
        if process.poll() is None:
            if self.scancel is not None:
                self._end_step(process)
            process.kill()
        surviving_pids = leftovers.kill(self.token)
        process.wait()
        return surviving_pids

    def _end_step(self, process: subprocess.Popen[bytes]) -> None:
        """Has SLURM kill the ranks on all nodes: the death of srun alone would not, and its
        SIGTERM takes KillWait.
        """
        steps = {rank.slurm for rank in self._started.values()} - {None}
        quiet = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": ENDING}
        for step in steps:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([self.scancel, "--signal=KILL", step], env=self.environment, **quiet)
        if not steps:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING)

    def _outcome(self, end_fields: dict[str, Any], code: int) -> Outcome:
        self._requests()  # one may have been followed faster than it was seen
        fields = {"code": None, **end_fields}
        if "code" not in end_fields and code is not None and code > 0:
            fields["code"] = code
        steps_by_rank = {
            rank["rank"]: rank["step"] for rank in self._beating() if type(rank.get("step")) is int
        }
        checkpoint = newest_step(self.run.checkpoints)
        ended = rank_ends.ended(self.run.ends, self.run.attempt)
        steps = [
            *steps_by_rank.values(),
            *(end.step for end in ended.values() if end.step is not None),
        ]
        steps += [] if checkpoint is None else [checkpoint]
        return Outcome(
            *(self.run.attempt, self.ranks, self.layout, self._started, ended),
            done=self.run.done.exists(),
            stop=self._stop,
            forced=self._forced,
            scale=self._scale,
            step=max(steps, default=None),
            checkpoint=checkpoint,
            seen=steps_by_rank,
            **fields,
        )

    def _draw(self, now_s: float) -> None:
        """Writes the live line, a few times a second."""
        if now_s - self._drawn_at < REDRAW:
            return
        self._drawn_at = now_s
        beats = self._beating()
        steps = [step for rank in beats if type(step := rank.get("step")) is int]
        step = min(steps, default=0)
        beat_at = self._beat_at or now_s
        if step and self._first_beat is None:
            self._first_beat = beat_at, step
        phases = [str(rank.get("phase")) for rank in beats]
        parts = [f"{self.ranks} rank{'s' * (self.ranks > 1)}"]
        if step:
            parts.append(f"step {step:,}")
        if self._first_beat is not None and step > self._first_beat[1]:
            first_at, first_step = self._first_beat
            parts.append(f"{(step - first_step) / (beat_at - first_at):.3g} steps/s")
        parts.append(max(phases, key=phases.count) if phases else "starting")
        parts.append(str(datetime.timedelta(seconds=int(now_s - self._begun))))
        self._live_line.show(f"odyssey: {', '.join(parts)}")

    def _say(self, line: str) -> None:
        self._live_line.clear()
        self._print(f"attempt {self.run.attempt}: {line}")

    # -- what there is to see ---------------------------------------------------------------------

    @property
    def _started(self) -> dict[int, rank_ends.Started]:
        """The ranks that a wrapper has started."""
        return rank_ends.started(self.run.ranks, self.run.attempt)

    def _beating(self) -> list[dict[str, Any]]:
        """Returns what the heartbeat says of each rank."""
        ranks = self._beats.get("ranks")
        entries = ranks if isinstance(ranks, list) else []
        return [
            rank for rank in entries if isinstance(rank, dict) and type(rank.get("rank")) is int
        ]

    def _all_started(self) -> bool:
        return len(_numbers(self.run.ranks)) >= self.ranks

    def _tell_who_is_late(self, seconds: float) -> None:
        """Says once that ranks take long to start, or to meet: nothing else watches them before
        they have met.
        """
        limit = self._meeting
        self._ranks_met = self._ranks_met or self._beat_at is not None
        if self._told_late or self._ranks_met or not limit or seconds < limit:
            return
        self._told_late = True
        started_ranks = {int(record.partition(".")[0]) for record in _numbers(self.run.ranks)}
        absent = [rank for rank in range(self.ranks) if rank not in started_ranks]
        if absent:
            message = (
                f"{diagnosis.name(absent)} {'has' if len(absent) == 1 else 'have'} not been started"
            )
        else:
            message = (
                "the ranks have not met: they are in MPI_Init or before, or the program does "
                "not use odyssey"
            )
        self._say(f"after {seconds:.0f} s {message}")

    def _spoiled(self, now_s: float, request_lost: bool) -> bool:
        """Returns whether ranks below srun will never meet: SLURM's PMI daemon has said that
        it lost one of their requests, or they are known to meet and do not. Under mpirun they
        wait for one that is late; that is told.
        """
        if self.scancel is None or self._ranks_met:
            return False
        self._said_at = self._said_at or (now_s if request_lost else 0.0)
        late = (
            self.meets
            and self._meeting
            and now_s - self._begun > self._meeting
            and self._all_started()
        )
        return bool(late) or (request_lost and now_s - self._said_at > LOST)

    def _tell_what_is_not_written(self, pump: Pump) -> None:
        """Says once that standard output is full, or the like."""
        if pump.problem and not self.unwritten:
            self.unwritten = True
            log = self.run.logs / "output.log"
            self._live_line.clear()
            self._print(
                f"[output] standard output cannot be written: {pump.problem}; what ranks print "
                f"is in {log}"
            )

    def _ended(self) -> tuple[rank_ends.End | None, bool]:
        """The failure that came first, and whether all ranks have ended."""
        if not _numbers(self.run.ends):
            return None, False
        ended = rank_ends.ended(self.run.ends, self.run.attempt)
        return rank_ends.first(ended), len(ended) >= self.ranks

    def _silence(self, now_s: float) -> float:
        """Seconds since the heartbeat changed; 0 before the first, and once rank 0 has ended.

        Also 0 where that would say nothing about a host: all ranks are on this machine, whose
        wrappers tell how they end; the file is gone, so that nobody is watched; or nothing can be
        written where it lies.
        """
        if now_s - self._looked < 0.25:
            return 0.0
        self._looked = now_s
        with contextlib.suppress(OSError, DataError):
            try:
                state = os.stat(self.run.heartbeat)
            except FileNotFoundError:
                self._beat = self._beat_at = None
                return 0.0
            if (state.st_ino, state.st_mtime_ns) != self._beat:
                self._beat = state.st_ino, state.st_mtime_ns
                heartbeat = read_json(self.run.heartbeat, HEARTBEAT_LIMIT)
                if isinstance(heartbeat, dict) and heartbeat.get("attempt") == self.run.attempt:
                    self._beats = heartbeat
                    self._beat_at = now_s
        if self._beat_at is None or (self.run.ends / "0.json").exists():
            return 0.0
        silent = now_s - self._beat_at
        if silent > SILENT:
            hosts = {rank.host for rank in self._started.values()}
            if not elsewhere(self.layout, hosts, os.uname().nodename) or not _writable(
                self.run.path
            ):
                self._beat_at = now_s
                return 0.0
        return silent

    # -- what is asked for ------------------------------------------------------------------------

    def _asked(self, now_s: float) -> bool:
        """Hears signals and requests; whether the attempt must be killed for one."""
        if now_s - self._seldom > 0.1:
            self._seldom = now_s
            self._requests()
        while self._handled < len(self.signals):
            number = self.signals[self._handled]
            self._handled += 1
            name = rank_ends.signal_name(number)
            if self._stop is not None:
                if (
                    number != signal.SIGINT
                    or signal.SIGINT not in self.signals[: self._handled - 1]
                ):
                    continue  # a service manager may send several; a person presses Ctrl-C twice
                self._forced = True
                self._say(f"{name} again: all ranks are killed")
                return True
            self._stop = number
            self._stop_at = now_s
            if not _numbers(self.run.ranks) and self._beat_at is None:
                self._forced = True
                return True
            limit = f"at most {self.config.grace:g} s"
            self._say(f"{name}: the ranks stop after this step and write a checkpoint ({limit})")
            try:
                write_json(self.run.control, {"stop": name, "attempt": self.run.attempt})
            except OSError as problem:
                self._say(f"control.json cannot be written ({problem.strerror}): ended at once")
                self._forced = True
                return True
        if self._stop is None:
            return False
        since_stop = now_s - self._stop_at
        phases = self._phases()
        if (
            not self._told
            and since_stop > UNREAD
            and now_s - self._begun > UNKNOWN
            and unread(phases)
        ):
            self._told = True
            self._tell()
        self._forced = since_stop > self.config.grace * (
            LONGER if "checkpoint" in phases.values() else 1
        )
        return self._forced

    def _phases(self) -> dict[int, str]:
        """Returns what each rank did when the heartbeat was written, with "" for a rank that has
        done a step.
        """
        phases = {}
        for rank in self._beating() if self._beat_at is not None else ():
            if type(phase := rank.get("phase")) is str:
                phases[rank["rank"]] = "" if rank.get("step") and phase != "checkpoint" else phase
        return phases

    def _tell(self) -> None:
        """Sends SIGTERM to the ranks of this machine: no trainer is there that would read the
        request.
        """
        hostname = os.uname().nodename
        local_pids = {rank.pid for rank in self._started.values() if rank.host == hostname}
        for pid in local_pids.intersection(leftovers.processes(self.token)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)

    def _requests(self) -> None:
        """Reads the control file when it has changed: `odyssey scale` writes it."""
        try:
            status = os.stat(self.run.control)
        except OSError:
            return
        if (status.st_ino, status.st_mtime_ns) == self._control:
            return
        self._control = status.st_ino, status.st_mtime_ns
        with contextlib.suppress(DataError):
            request = read_json(self.run.control, 1 << 16)
            if (
                isinstance(request, dict)
                and request.get("attempt") == self.run.attempt
                and request.get("stop") == "scale"
            ):
                ranks = request.get("ranks")
                wrong = type(ranks) is not int or allowed(
                    ranks, self.config.elastic, capacity(self.config.hosts)
                )
                if not wrong and ranks != self._scale:
                    self._scale = ranks
                    self._say(f"asked to go on with {ranks} rank{'s' * (ranks != 1)}")


def unread(phases: dict[int, str]) -> bool:
    """Returns whether no rank has read a request to stop, by what they do (`_phases`): none has
    a trainer at work.
    """
    return not {"", "checkpoint", "compile"}.intersection(phases.values())


def elsewhere(layout: tuple[tuple[str, int], ...], hosts: set[str], this_host: str) -> bool:
    """Returns whether ranks may be on other machines than this: by what was asked for, or what
    wrappers wrote.
    """
    return len(layout) > 1 or bool(hosts - {this_host})


def _writable(folder: Path) -> bool:
    """Returns whether a file can be written there now: on a full disk nobody can show that it
    lives.
    """
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b" " * 4096)
        file.flush()
        os.fsync(file.fileno())
        return True
    return False


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint in a folder, by its name: the ranks check whether it is
    whole.
    """
    steps = []
    with contextlib.suppress(OSError):
        steps = [int(match[1]) for name in os.listdir(folder) if (match := _STEP.fullmatch(name))]
    return max(steps, default=None)


def _numbers(folder: Path) -> list[str]:
    """Names of the records in a folder, without those that are being written."""
    with contextlib.suppress(OSError):
        return [name for name in os.listdir(folder) if name[:1].isdigit()]
    return []


def _pumps(process: subprocess.Popen[bytes], log: BinaryIO, words: bytes) -> list[Pump]:
    assert process.stdout is not None and process.stderr is not None
    targets = []
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
            targets.append(stream.fileno())
        # a stand-in without a descriptor, as in notebooks
        except (AttributeError, OSError, ValueError):
            targets.append(number)
    return [
        Pump(process.stdout.fileno(), targets[0], log, without=WithoutHydra()),
        Pump(process.stderr.fileno(), targets[1], log, words, WithoutHydra()),
    ]


def _handle(process: subprocess.Popen[bytes], stack: contextlib.ExitStack) -> int | None:
    """A descriptor that can be read from when a process has ended; None where the system has
    none (not Linux).
    """
    try:
        handle = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        return None
    stack.callback(os.close, handle)
    return handle


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, FILE_MODE)
