"""The fault objects themselves: each does what it says, where it says it, and what a job leaves
is seen.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from beds import faults, outside

OWN_FOLDERS = pytest.mark.skipif(
    not outside.can_have_own_folders(),
    reason="mount namespaces need root and unshare; leaks are told by name only",
)


def test_they_add_up_and_travel(monkeypatch):
    both = faults.kill(rank=1, at_step=7).slow(rank=2, ms=50) & faults.raises(
        rank=0, at_step=9, attempt=None
    )
    assert [f.kind for f in both.each] == ["signal", "slow", "raises"]
    for name, value in both.environment().items():
        monkeypatch.setenv(name, value)
    assert faults.Faults.carried() == both
    kill, slow, _ = both.each
    assert [kill.happens(s) for s in (6, 7, 8)] == [False, True, False]
    assert slow.happens(1) and slow.happens(10**6)
    with pytest.raises(ValueError, match="'colour'"):
        faults.differs(0, "colour")


def run(job, ranks, what=None, steps=6, **settings):
    return job(faults.rank_command(ranks, "--steps", steps), faults=what, **settings)


def hashes(one):
    return {step: sha for step, sha, _ in one.steps()}


def test_without_faults_any_number_of_ranks_gives_the_same_steps(job):
    ran = [run(job, ranks) for ranks in (1, 3)]
    assert [one.wait() for one in ran] == [0, 0]
    assert len(hashes(ran[0])) == 6 and hashes(ran[0]) == hashes(ran[1])
    assert ran[0].weights == ran[1].weights and ran[0].weights is not None


@pytest.mark.parametrize("what", ["raises", "_exit", "kill", "skips_collective"])
def test_a_rank_does_not_take_the_step(job, what):
    one = run(job, 2, getattr(faults, what)(rank=1, at_step=4))
    code = one.wait(30)
    assert code != 0 or what == "_exit"  # mpirun alone takes that for success
    assert set(hashes(one)) == {1, 2, 3}
    assert one.weights is None
    if what == "raises":
        assert "a defect of rank 1 at step 4" in one.output


@pytest.mark.parametrize("what", ["count", "root"])
def test_calls_that_differ_end_the_job(job, what):
    one = run(job, 2, faults.differs(rank=1, what=what, at_step=3))
    assert one.wait(30) != 0
    assert set(hashes(one)) == {1, 2}


def test_a_stopped_rank_and_one_in_a_loop(job):
    stopped = run(job, 2, faults.stop(rank=1, at_step=3))
    looping = run(job, 2, faults.loop(rank=0, at_step=3, holding_gil=True))
    for one in (stopped, looping):
        one.wait_for_step(2)
    stopped.wait_until(lambda: stopped.outside.ranks()[1].state in "Tt", what="a stopped rank")
    time.sleep(0.5)
    rank = looping.outside.ranks()[0]
    with open(f"/proc/{rank.pid}/stat") as file:
        used = file.read().rpartition(")")[2].split()[11]
    time.sleep(0.5)
    with open(f"/proc/{rank.pid}/stat") as file:
        assert int(file.read().rpartition(")")[2].split()[11]) > int(used)
    stopped.outside.go_on(rank=1)
    assert stopped.wait() == 0
    assert set(hashes(looping)) == {1, 2}


def test_a_weight_is_flipped_on_one_rank_only(job):
    clean, flipped = run(job, 2), run(job, 2, faults.flips_weight(rank=0, at_step=4))
    assert [clean.wait(), flipped.wait()] in ([0, 0], [0, 65])  # 65: where replicas are compared
    a, b = hashes(clean), hashes(flipped)
    assert [s for s in b if a[s] != b[s]] == [s for s in b if s >= 4]


def test_a_gradient_of_one_rank_is_not_finite(job):
    one = run(job, 2, faults.nan_gradient(rank=1, at_step=4))
    assert one.wait() != 0
    assert set(hashes(one)) == {1, 2, 3}
    assert "the gradient is not finite at step 4" in one.output


def test_a_slow_rank(job):
    one = run(
        job, 2, faults.slow(rank=1, ms=100, at_step=3, until=4).slow_data(rank=1, ms=150, at_step=5)
    )
    assert one.wait() == 0
    times = [at for *_, at in one.steps()]
    assert times[3] - times[1] > 0.19
    assert times[5] - times[3] > 0.14  # the batch of step 5 may have been made earlier


def test_faults_of_another_attempt_do_not_happen(job):
    one = run(job, 2, faults.kill(rank=1, at_step=4), environment={"ODYSSEY_ATTEMPT": "2"})
    assert one.wait() == 0


def test_from_outside(job):
    one = job(faults.rank_command(3, "--steps", 10000, "--step-ms", 20))
    one.wait_for_step(3)
    assert set(one.outside.ranks()) == {0, 1, 2}
    assert len(one.outside.of("mpirun")) == 1
    assert one.outside.of("mpirun")[0].pid == one.pid
    pid = one.outside.kill(rank=2)
    assert one.wait(30) != 0
    assert pid not in {p.pid for p in one.outside.processes()}
    assert not [line for line in one.left() if line.startswith("process")]
    with pytest.raises(LookupError, match="no rank 2"):
        one.outside.stop(rank=2)


LEAVES = """
import subprocess, sys, tempfile
open("/dev/shm/mpich_shm_of_a_test", "w")
open("/tmp/hydra_hwloc_xmlfile_of_a_test", "w")
listen = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", listen])
"""


@OWN_FOLDERS
def test_what_is_left_is_seen_and_ended(job):
    one = job([sys.executable, "-c", LEAVES])
    assert one.wait() == 0
    one.wait_until(one.outside.listening, what="a port")
    left = one.left(within=0.2)
    for word in (
        "process Process(",
        "mpich_shm_of_a_test",
        "hydra_hwloc_xmlfile_of_a_test",
        "listens on 0100007F:",
    ):
        assert any(word in line for line in left), left
    assert len(left) == 4
    assert not os.path.exists("/dev/shm/mpich_shm_of_a_test")
    one.end()
    assert one.outside.processes() == []


@OWN_FOLDERS
def test_memory_that_a_rank_takes_has_an_end(job):
    one = run(job, 2, faults.eats_memory(rank=1, at_step=3), memory_mb=600)
    assert one.wait(40) not in (0, -signal.SIGTERM)
    assert set(hashes(one)) == {1, 2}


def test_a_request_that_comes_twice_is_one(job, tmp_path):
    """SLURM signals all processes of a step; what is around a rank hands on its own."""
    options = ["--steps", 10000, "--step-ms", 20, "--checkpoint-dir", tmp_path / "checkpoints"]
    one = job(faults.rank_command(2, *options))
    one.wait_for_step(3)
    rank = one.outside.ranks()[1].pid
    for _ in range(3):
        os.kill(rank, signal.SIGTERM)
        time.sleep(0.005)
    assert one.wait(20) == 75, one.output
    assert "stopped by SIGTERM" in one.output and list((tmp_path / "checkpoints").glob("step_*"))
