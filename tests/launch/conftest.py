"""A launcher under test: started in the background, watched from outside, and nothing of it left
behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COUNTING = Path(__file__).parent / "counting.py"


class Job:
    """`odyssey launch` of this environment on a run directory, and what can be seen of it."""

    def __init__(
        self, launch, run: Path, *words: object, environment: dict[str, str] | None = None
    ) -> None:
        self.run, self.environment = run, {**launch.environment, **(environment or {})}
        command = [sys.executable, "-m", "odyssey", "launch", "--run-dir", run, *words]
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=launch.folder,
        )
        self.out = self.err = ""

    def attempt(self) -> dict:
        return json.loads((self.run / "attempt.json").read_text())

    def pid(self, rank: int) -> int:
        """Of a rank's program, once it is started in the newest attempt."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError):
                record = json.loads((self.run / "ranks" / f"{rank}.json").read_text())
                if record["attempt"] == self.attempt()["attempt"]:
                    return record["pid"]
            time.sleep(0.01)
        raise AssertionError(f"rank {rank} was not started")

    def parent(self, pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def reach(self, step: int | str, attempt: int = 1) -> None:
        """Waits until the counting script is at a step, or has printed a text."""
        line, until = f"step {step} of" if isinstance(step, int) else step, time.monotonic() + 30
        log = self.run / "logs" / f"attempt-{attempt}" / "output.log"
        while time.monotonic() < until:
            if log.exists() and line in log.read_text():
                return
            assert self.process.poll() is None, self.end()
            time.sleep(0.01)
        raise AssertionError(f"step {step} was not reached")

    def end(self, timeout: float = 60) -> int:
        """Waits for the launcher's end; its exit code. `out` and `err` are then what it printed."""
        self.out, self.err = self.process.communicate(timeout=timeout)
        return self.process.returncode

    def maps(self) -> set[str]:
        """Shared memory that ranks have mapped; and the session directory of this run's Open
        MPI, if it is that.
        """
        found = set()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                found |= {line.split(None, 5)[5] for line in lines if "/dev/shm/" in line}
            if Path(f"/tmp/ompi.{pid}").exists():
                found.add(f"/tmp/ompi.{pid}")
        assert found
        return {name.removesuffix(" (deleted)") for name in found}

    def processes(self) -> list[int]:
        """What lives of this run."""
        token = f"ODYSSEY_RUN_DIR={self.run}".encode()
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and token in Path(f"/proc/{name}/environ").read_bytes().split(
                        b"\0"
                    ):
                        found.append(int(name))
        return found

    def gone(self, seconds: float = 3.0) -> bool:
        until = time.monotonic() + seconds
        while self.processes():
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True


@pytest.fixture
def job(launch, tmp_path):
    """Starts `odyssey launch --run-dir RUN words...`; at the end of the test all of it is gone."""
    jobs = []

    def start(
        *words: object, run: Path | None = None, environment: dict[str, str] | None = None
    ) -> Job:
        jobs.append(Job(launch, run or tmp_path / "run", *words, environment=environment))
        return jobs[-1]

    yield start
    for one in jobs:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()
        for pid in one.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
