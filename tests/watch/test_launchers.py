"""What launchers do to ranks: Ctrl-C, and their own sudden end.

Nothing is left, and nobody says a word too many.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_ends import processes  # noqa: E402

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the watcher reads /proc"
)

JOB = """
import sys, time
import numpy as np
from odyssey import comm
world = comm.world()
world.all_reduce(np.ones(1))
if world.rank == 0:
    print("begun", flush=True)
while True:
    time.sleep(0.02)
    world.all_reduce(np.ones(8, np.float32))
"""


@pytest.fixture
def job(launch):
    """A job of three ranks that is under way; (its mpirun, its token)."""
    token = f"odyssey-test-{os.getpid()}-{time.monotonic_ns()}"
    folder = launch.folder / "tmp"
    folder.mkdir()
    words = [
        launch.mpirun,
        *(["--oversubscribe"] if launch.open_mpi else []),
        "-n",
        "3",
        sys.executable,
        "-c",
        JOB,
    ]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=(launch.folder / "said").open("w"),
        text=True,
        env={**launch.environment, "TEST_TOKEN": token, "TMPDIR": str(folder)},
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n", (launch.folder / "said").read_text()
    time.sleep(0.5)
    yield process, token
    for line in processes({token}):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGKILL)
    process.wait(20)


def left(token: str, seconds: float = 20) -> list[str]:
    until = time.monotonic() + seconds
    while (found := processes({token})) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def test_ctrl_c(job, launch):
    process, token = job
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == (130 if not launch.open_mpi else process.returncode) != 0
    said = (launch.folder / "said").read_text()
    assert "Segmentation" not in said and "Traceback" not in said, said
    assert said.count("odyssey: interrupted") <= 1 and (
        launch.open_mpi or "odyssey: interrupted" in said
    )
    assert left(token) == []


def test_a_launcher_that_is_killed(job):
    process, token = job
    process.kill()
    assert left(token) == []


def test_a_daemon_that_is_killed(job, launch):
    process, token = job
    daemons = [line for line in processes({token}) if "hydra_pmi_proxy" in line]
    if not daemons:
        pytest.skip("Open MPI's mpirun is its own daemon on one machine")
    for line in daemons:
        os.kill(int(line.split()[0]), signal.SIGKILL)
    assert process.wait(20) != 0
    assert left(token) == []
    assert [path for path in (launch.folder / "tmp").rglob("*") if path.is_file()] == []


def test_one_process_ends_in_order(launch):
    """A run of one process has a watcher, which must not take its end for a death."""
    launch.environment["ODYSSEY_RUN_DIR"] = str(launch.folder / "run")
    # the watcher holds stderr until it is done
    done = launch.python("-c", "from odyssey import comm; comm.world()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (launch.folder / "run" / "ends").exists()
    done = launch.python("-c", "import os; from odyssey import comm; comm.world(); os._exit(0)")
    assert "odyssey: [watch] rank 0" in done.stderr and "os._exit" in done.stderr
