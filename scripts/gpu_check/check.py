"""The commands of gpu-check's parts: each in a session of its own, with a time limit, all their
output in one log.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .results import ROOT, Results

ENDING = 10.0  # seconds that a killed command may take to go away
EMULATED_SECONDS = 7200.0  # of a part on the emulated GPU


class Skip(Exception):
    """A part that cannot be run here, and why."""


class Started:
    """A command that was started, and the file that it writes its output to."""

    def __init__(self, process: subprocess.Popen[bytes], file: Path) -> None:
        self.process = process
        self.file = file
        self.copied = 0  # bytes of its output that are in the log


class Check:
    """Runs commands, keeps their output, and stops those that take too long.

    Args:
        options: those of main.py.

    Attributes:
        facts: what other parts may need to know, such as where the driver's libraries are.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started = time.monotonic()
        self.until = self.started  # when the time of the present part is over
        self.output: Path = options.output.resolve()
        self.output.mkdir(parents=True, exist_ok=True)
        self.log = self.output / "gpu-check.log"
        if not options.resume:
            self.log.write_bytes(b"")
        self.scratch = Path(tempfile.mkdtemp(prefix="gpu-check-"))
        self.results = Results(self.output, options.resume)
        self.facts: dict[str, Any] = {}
        self._commands: list[Started] = []  # that may still run
        self._starting = False
        self._signal = 0  # that came while a command was being started
        self._part = ""
        self._key: dict[str, str] = {}
        self._items: dict[str, Any] = {}  # of the present part, so far
        self.environment = self._environment()

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        paths = [str(ROOT / "python"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        environment["PYTHONUNBUFFERED"] = "1"
        if self.options.kernels is not None:
            environment["ODYSSEY_KERNELS"] = str(self.options.kernels.resolve())
        if hasattr(os, "geteuid") and os.geteuid() == 0:  # Open MPI refuses root without these
            environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        for name, value in {
            "MODULAR_CRASH_REPORTING_ENABLED": "false",
            "MODULAR_TELEMETRY_ENABLED": "false",
            "PYTHONFAULTHANDLER": "1",
            # If the home folder cannot be written, every process would compile everything again.
            "CUDA_CACHE_PATH": str(self.scratch / "cuda"),
            "CUDA_CACHE_MAXSIZE": str(4 << 30),
            "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "inductor"),
            "TRITON_CACHE_DIR": str(self.scratch / "triton"),
        }.items():
            environment.setdefault(name, value)
        sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests")]
        if self.options.emulated:
            from gpu import emulated

            environment = emulated.environment(1, "4G", base=environment)
        return environment

    def close(self) -> None:
        """Ends all commands that still run and removes the temporary files."""
        with contextlib.suppress(RuntimeError):
            self.finish(list(self._commands), 0)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def end_by_signal(self, number: int) -> None:
        """Ends this program and its commands.

        It waits until a command that is being started is known.
        """
        if self._starting:
            self._signal = number
            return
        raise SystemExit(128 + number)

    # --- the present part ---

    def begin(self, name: str, key: dict[str, str], seconds: float) -> None:
        """Starts a part that has so many seconds.

        `key` says for which sources, kernels and GPU its results hold.
        """
        self._part = name
        self._key = key
        self._items = self.results.items(name, key)
        self.until = time.monotonic() + seconds
        self.write_log(f"\n===== {name}, {seconds:.0f} s =====\n")

    def end(self, record: dict[str, Any]) -> None:
        """Writes the record of the present part.

        If it did not pass, results within it are kept for the next visit.
        """
        if self._items and record.get("passed") is not True:
            record = {**record, "so far": self._items}
        self.results.keep(self._part, self._key, record)

    def once(self, item: str, do: Callable[[], Any]) -> Any:
        """A result within the present part: the one of an earlier visit, or that of `do`, which
        is written at once.
        """
        if item in self._items:
            self.write_log(f"\n{item}: from an earlier visit\n")
            return self._items[item]
        value = do()
        self.keep(item, value)
        return value

    def keep(self, item: str, value: Any) -> None:
        """Writes a result within the present part, so that a visit that is cut short does not
        lose it.
        """
        self._items[item] = value
        record = {"not run": "the visit ended within this part", "so far": self._items}
        self.results.keep(self._part, self._key, record)

    def kept(self, item: str) -> Any:
        """The result within the present part that an earlier visit has kept, or None."""
        return self._items.get(item)

    @property
    def left(self) -> float:
        """Seconds that the present part has left."""
        return self.until - time.monotonic()

    # --- commands ---

    def write_log(self, text: str) -> None:
        """Appends text to the log."""
        with self.log.open("a") as log:
            log.write(text)

    def run(
        self, *command: object, limit: float = 3600, codes: tuple[int, ...] = (0,), **more: Any
    ) -> str:
        """The output of a command on both streams.

        `more` goes into its environment.

        Raises:
            RuntimeError: it failed or took too long.
            Skip: no time is left for it.
        """
        code, output = self.attempt(*command, limit=limit, **more)
        if code not in codes:
            raise RuntimeError(f"exit code {code}: {output[-900:]}")
        return output

    def attempt(self, *command: object, limit: float = 3600, **more: str) -> tuple[int, str]:
        """The exit code and the output of a command.

        Raises the errors of `run`, except for the exit code's.
        """
        if self.left < 5:
            raise Skip("no time is left")
        return self.finish([self.start(*command, **more)], min(limit, self.left))[0]

    def start(self, *command: object, **more: str) -> Started:
        """Starts a command in a session of its own, which writes to a file."""
        words = list(map(str, command))
        self.write_log(f"\n[{time.monotonic() - self.started:.0f} s] $ {' '.join(words)}\n")
        number, name = tempfile.mkstemp(dir=self.scratch, suffix=".output")
        self._starting = True
        try:
            with os.fdopen(number, "wb") as output:
                process = subprocess.Popen(
                    words,
                    cwd=ROOT,
                    env={**self.environment, **more},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            started = Started(process, Path(name))
            self._commands.append(started)
        finally:
            self._starting = False
        if self._signal:
            raise SystemExit(128 + self._signal)
        return started

    def finish(self, commands: Sequence[Started], limit: float) -> list[tuple[int, str]]:
        """Waits for commands and copies their output to the log.

        In the end all processes that they started are killed.

        Raises RuntimeError: they took too long.
        """
        until = time.monotonic() + limit
        late = False
        try:
            while True:
                running = [one for one in commands if one.process.poll() is None]
                for one in commands:
                    self._copy(one)
                if not running:
                    break
                if time.monotonic() > until:
                    late = True
                    break
                time.sleep(0.05)
        finally:
            for one in commands:  # also ranks and compilers that outlive their parent
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(one.process.pid, signal.SIGKILL)
            for one in commands:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.process.wait(ENDING)
                with contextlib.suppress(ValueError):
                    self._commands.remove(one)
        outputs = [one.file.read_bytes().decode(errors="replace") for one in commands]
        if late:
            raise RuntimeError(f"took more than {limit:.0f} s: {outputs[0][-600:]}")
        return [
            (one.process.returncode, output) for one, output in zip(commands, outputs, strict=True)
        ]

    def _copy(self, one: Started) -> None:
        with one.file.open("rb") as output, self.log.open("ab") as log:
            output.seek(one.copied)
            one.copied += log.write(output.read())

    def python(self, *command: object, **more: Any) -> str:
        """The output of a Python program."""
        return self.run(sys.executable, *command, **more)

    def train(self, *options: object, **more: Any) -> str:
        """The output of a training run."""
        return self.python("-m", "odyssey.train", "--no-progress", *options, **more)

    def short(self) -> list[object]:
        """Options of a short training run."""
        return [
            "--steps",
            3 if self.options.emulated else 60,
            "--global-batch-size",
            256,
            "--no-eval",
        ]

    # --- two ranks ---

    def mpirun(self) -> str:
        """The path of a launcher whose two processes find each other.

        Raises Skip if there is none.
        """
        beside = Path(sys.executable).parent / "mpirun"
        launcher = str(beside) if beside.is_file() else shutil.which("mpirun")
        if launcher is None:
            raise Skip("no mpirun on this machine")
        program = (
            "import os; from mpi4py import MPI; os.write(1, b'size %d\\n' % MPI.COMM_WORLD.size)"
        )
        code, output = self.attempt(launcher, "-n", 2, sys.executable, "-c", program, limit=30)
        if code or output.count("size 2") != 2:
            raise Skip(f"{launcher} and mpi4py do not go together: {output.strip()[-300:]}")
        return launcher

    def two_ranks(self, *command: object, **more: str) -> tuple[str, str]:
        """The way in which two ranks of a Python program found each other, and the output of
        rank 0 (mpirun: of both).

        mpirun comes first. Otherwise PyTorch's Gloo is used, by the variables of env://.

        Raises:
            RuntimeError: the program failed.
            Skip: this machine has neither.
        """
        try:
            launcher = self.mpirun()
        except Skip as problem:
            if self.attempt(sys.executable, "-c", "import torch.distributed", limit=60)[0]:
                raise Skip(f"{problem}, and no PyTorch for Gloo") from None
            return f"Gloo, because of: {problem}", self._over_gloo(command, more)
        return "mpirun", self.run(launcher, "-n", 2, sys.executable, *command, **more)

    def _over_gloo(self, command: Sequence[object], more: dict[str, str]) -> str:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        where = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            **more,
        }
        pair = [
            self.start(sys.executable, *command, **where, RANK=str(r), LOCAL_RANK=str(r))
            for r in range(2)
        ]
        ended = self.finish(pair, self.left)
        codes = [code for code, _ in ended]
        if any(codes):
            raise RuntimeError(f"exit codes {codes}: {ended[0][1][-400:]} {ended[1][1][-400:]}")
        return ended[0][1]


def last_json(output: str) -> Any:
    """The last line that is a JSON object. Raises RuntimeError if there is none."""
    for line in reversed(output.strip().splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    raise RuntimeError(f"it printed no result: {output[-600:]}")


def weights_hash(output: str) -> str:
    """The hash of the weights that a training run printed."""
    match = re.search(r"weights ([0-9a-f]{16})", output)
    if match is None:
        raise RuntimeError(f"no hash of the weights in {output[-300:]}")
    return match[1]
