"""Lines about ranks that don't meet, and processes that are no ranks though they look like one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from odyssey.base import launcher
from odyssey.base.launcher import Launched
from odyssey.comm import meeting
from odyssey.comm.meeting import Process

MPI = Launched("PMI", 0, 4, 0, 4, True)
VARIABLES = {"PMI_RANK": "0", "PMI_SIZE": "4"}


def line(job: Launched = MPI, **local: Process) -> str:
    ranks = {int(name[1:]): process for name, process in local.items()}
    return meeting.describe(job, "in MPI_Init", ranks, VARIABLES)


def test_the_line_says_who_is_late_and_which_variables_announce_them():
    said = line(r1=Process(7, True, True), r2=Process(8, False, False))
    assert said == (
        "rank 0 of 4 waits in MPI_Init for the other ranks to meet: rank 1 (pid 7) is "
        "stopped (SIGSTOP, or a debugger); rank 2 on this machine has not come yet; rank 3 has no "
        "process on this machine (PMI_RANK=0, PMI_SIZE=4); if no launcher set these, unset them"
    )
    there = {f"r{rank}": Process(7, False, True) for rank in (1, 2, 3)}
    assert "all ranks of this machine do the same" in line(**there) and "unset" not in line(**there)
    assert "ranks 1-3 have no process" in line()


def test_one_rank_of_a_machine_speaks():
    later = MPI._replace(rank=2)
    assert line(later, r0=Process(7, False, True), r1=Process(8, False, False)) == ""
    assert line(later, r0=Process(7, True, True), r1=Process(8, False, False)).startswith("rank 2")


def test_ranks_of_this_machine_are_found_by_their_variables(monkeypatch):
    """A rank that is stopped before it starts MPI, and one of another job."""
    for name in launcher.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**VARIABLES, "SLURM_JOB_ID": f"test-{os.getpid()}"}.items():
        monkeypatch.setenv(name, value)
    started = []
    for rank, size in ((1, 4), (2, 4), (3, 5)):
        environment = {**os.environ, "PMI_RANK": str(rank), "PMI_SIZE": str(size)}
        words = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(300)"]
        started.append(subprocess.Popen(words, env=environment))
    try:
        started[0].send_signal(signal.SIGSTOP)
        until = time.monotonic() + 30
        while not meeting.local_ranks(MPI).get(1, Process(0, False, False)).stopped:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert meeting.local_ranks(MPI) == {
            1: Process(started[0].pid, True, False),
            2: Process(started[1].pid, False, False),
        }
    finally:
        for process in started:
            process.kill()
            process.wait()


STALE = "import odyssey.comm.meeting as m; m.AFTER_S = 0.5; from odyssey import comm; comm.world()"


def test_variables_that_an_earlier_job_left_are_named(launch):
    """Gloo waits for a rank that nobody started."""
    pytest.importorskip("torch")
    launch.environment |= {"RANK": "0", "WORLD_SIZE": "2", "ODYSSEY_TIMEOUT": "4"}
    launch.environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launcher.free_port())}
    done = launch.python("-c", STALE)
    assert done.returncode == 64
    assert "rank 0 of 2 waits at 127.0.0.1:" in done.stderr
    assert "rank 1 has no process on this machine (RANK=0, WORLD_SIZE=2, MASTER_ADDR=" in (
        done.stderr
    )


@pytest.mark.parametrize(
    "variables",
    [
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "2"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
    ],
)
def test_variables_of_a_launcher_that_started_nothing_end_in_one_line(launch, variables):
    for name in launcher.VARIABLES:
        launch.environment.pop(name, None)
    launch.environment |= variables
    done = launch.python("-m", "odyssey", "train", "--steps", "1", "--no-eval", "-q")
    assert done.returncode == 64 and done.stderr.count("\n") == 1, done.stderr
    assert any(f"{name}={value}" in done.stderr for name, value in variables.items())


DRIVER = """
import subprocess, sys
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    train = [sys.executable, "-m", "odyssey", "train", "--steps", "2", "--no-eval", "-q"]
    for more in ([], ["--ranks", "2", "--run-dir", "run"]):
        done = subprocess.run([*train, *more], capture_output=True, text=True)
        print(done.returncode, done.stdout.splitlines()[-1:], done.stderr, flush=True)
    script = "from odyssey import comm; print('alone', comm.world().size)"
    for close in (True, False):  # whether the child has the connection to the launcher
        words = [sys.executable, "-c", script]
        done = subprocess.run(words, capture_output=True, text=True, close_fds=close)
        print(done.stdout, done.stderr, flush=True)
MPI.COMM_WORLD.Barrier()
"""


def test_a_process_that_a_rank_starts_is_no_rank(launch):
    """It trains alone, or with ranks of its own, and its parents go on."""
    done = launch.python("-c", DRIVER, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("0 ['weights ")]
    assert len(lines) == 2 and lines[0].split("'")[1] == lines[1].split("'")[1], done.stdout
    assert done.stdout.count("this process is not a rank, because rank 1 of a job") == 4
    assert done.stdout.count("alone 1") == 2
