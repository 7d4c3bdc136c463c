"""A SLURM of four nodes: the bed itself, and trainings under srun."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from beds import faults, outside

MPI = "--mpi=pmix" if outside.open_mpi() else "--mpi=pmi2"
UNDER_SRUN = pytest.mark.skipif(
    MPI == "--mpi=pmix" and not list(Path("/usr/lib").glob("**/libpmix.so")),
    reason="needs libpmix.so (libpmix-dev)",
)


SPOILED = "mpi/pmi2: invalid client request"


def under_srun(slurm, *command):
    """A job under srun whose ranks have taken a step.

    SLURM's daemon reads a request of MPICH's PMI with one `read`, whole or not, and takes the rest
    for the next one (src/plugins/mpi/pmi2/pmi1.c: "TODO: read until newline"). It says so, the
    ranks wait in MPI_Init for ever, and nothing of odyssey has run yet: only then, and only after
    these words, the job is started again.
    """
    for _ in range(3):
        one = slurm.job(["srun", *command])
        one.wait_until(lambda one=one: one.steps() or SPOILED in one.output, 60, "first step")
        if SPOILED not in one.output:
            return one
        one.end()
        slurm.restore()
    raise AssertionError(one.output)


@UNDER_SRUN
def test_same_bits_under_srun_and_alone(slurm, job):
    options = [sys.executable, outside.JOB, "--steps", 6]
    alone = job(options)
    four = under_srun(slurm, "-N4", "-n4", MPI, *options)
    assert [alone.wait(), four.wait()] == [0, 0], four.output
    assert len(four.steps()) == 6
    assert [sha for _, sha, _ in four.steps()] == [sha for _, sha, _ in alone.steps()]
    assert four.left() == []


@pytest.mark.skipif(not outside.SLOW, reason=outside.WHY_SLOW)
def test_mpirun_in_an_allocation(slurm, job):
    options = [
        sys.executable,
        "-m",
        "odyssey.train",
        "--steps",
        3,
        "--global-batch-size",
        96,
        "--no-eval",
    ]
    options.append("--no-progress")
    alone = job(options)
    three = slurm.job(["salloc", "-N3", *slurm.hosts.mpirun(1, options, hosts=["h1", "h2", "h3"])])
    assert [alone.wait(), three.wait()] == [0, 0], three.output
    word = alone.output.split()[-1]
    assert len(word) == 16 and f"weights {word}" in three.output


@UNDER_SRUN
def test_srun_ends_a_step_when_a_rank_is_killed(slurm):
    options = [sys.executable, outside.JOB, "--steps", 10000, "--step-ms", 20]
    one = under_srun(slurm, "-N4", "-n4", MPI, "--kill-on-bad-exit=1", *options)
    one.wait_for_step(3)
    assert set(one.outside.ranks()) == {0, 1, 2, 3}
    one.outside.kill(rank=2)
    assert one.wait(30) != 0
    assert one.weights is None


# Longer than its srun: that may end before SLURM misses a node, and a job that has ended is not
# requeued.
COUNTS = """
echo run ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST
srun sh -c 'trap "echo $SLURM_PROCID was asked to end; exit 1" TERM; sleep 1000 & wait'
sleep 1000
"""


@pytest.mark.skipif(not outside.SLOW, reason=outside.WHY_SLOW)
def test_a_job_is_requeued(slurm):
    number, _ = slurm.submit(COUNTS, "-N4", "-n4", "--requeue")
    slurm.wait_for(lambda: "run 0 on h[1-4]" in slurm.output(number), 20, "first run")
    slurm.wait_for(lambda: slurm.state(number) == "RUNNING", 20, "RUNNING")
    slurm.ask("scontrol", "requeue", str(number))
    slurm.wait_for(lambda: "run 1 on h[1-4]" in slurm.output(number), 60, "second run")
    assert "was asked to end" in slurm.output(number)


@pytest.mark.skipif(not outside.SLOW, reason=outside.WHY_SLOW)
def test_a_node_dies(slurm):
    number, _ = slurm.submit(COUNTS, "-N3", "-n3", "--requeue")
    slurm.wait_for(lambda: "run 0 on h[1-3]" in slurm.output(number), 20, "first run")
    slurm.hosts.kill_host(2)
    slurm.wait_for(lambda: slurm.nodes()["h2"].startswith("down"), 40, "node that is down")
    slurm.wait_for(lambda: "run 1 on h[1,3-4]" in slurm.output(number), 60, "second run")


# --- odyssey launch in a job: the ranks of an attempt are a step of srun ---


def submitted(slurm, run, nodes, steps, what=faults.none, ms=100):
    """(number of the job, the run's directory) of `odyssey launch` in a batch script that SLURM
    may start again.
    """
    options = ["--steps", steps, "--step-ms", ms, "--checkpoint-every", 5]
    script = "exec " + shlex.join(outside.launch_command(nodes, run, *options))
    return slurm.submit(
        script, f"-N{nodes}", f"-n{nodes}", "--requeue", environment=what.environment()
    )[0]


def ended(slurm, number, run, timeout):
    """Waits for the job to be over and gives the hash of the weights and what was printed."""
    over = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
    slurm.wait_for(
        lambda: slurm.state(number) in over, timeout, f"end of {number}: {slurm.output(number)}"
    )
    said = slurm.output(number)
    assert slurm.state(number) == "COMPLETED", said
    return json.loads((run / "DONE.json").read_text())["weights_sha256"], said


def clean(job, steps):
    one = job([sys.executable, outside.JOB, "--steps", steps, "--quiet"])
    assert one.wait() == 0
    return one.weights


@UNDER_SRUN
@pytest.mark.skipif(not outside.SLOW, reason=outside.WHY_SLOW)
def test_launch_restarts_after_a_rank_was_killed(slurm, job, tmp_path):
    number = submitted(slurm, tmp_path / "run", 4, 20, faults.kill(rank=2, at_step=8), ms=20)
    weights, said = ended(slurm, number, tmp_path / "run", 150)
    assert (
        "rank 2 on host h3 was killed by SIGKILL" in said
        and "restarting from step 5 on 4 ranks" in said
    )
    assert weights == clean(job, 20)


@UNDER_SRUN
@pytest.mark.skipif(not outside.SLOW, reason=outside.WHY_SLOW)
def test_launch_is_requeued(slurm, job, tmp_path):
    number = submitted(slurm, tmp_path / "run", 4, 40)
    slurm.wait_for(lambda: "step 12 " in slurm.output(number), 40, "step 12")
    slurm.ask("scontrol", "requeue", str(number))
    weights, said = ended(slurm, number, tmp_path / "run", 90)
    stopped = said.index("stopped by SIGTERM at step ")
    assert "resumed from step_" in said[stopped:] and "attempt 2: complete" in said
    assert weights == clean(job, 40)


@UNDER_SRUN
@pytest.mark.skipif(not outside.SLOW, reason=outside.WHY_SLOW)
def test_launch_survives_the_death_of_a_node(slurm, job, tmp_path):
    number = submitted(slurm, tmp_path / "run", 3, 40)
    slurm.wait_for(lambda: "step 12 " in slurm.output(number), 40, "step 12")
    slurm.hosts.kill_host(2)
    weights, said = ended(slurm, number, tmp_path / "run", 150)
    assert "no sign of life from h2" in said
    assert weights == clean(job, 40)


# --- odyssey slurm: scripts that it writes ---


@UNDER_SRUN
def test_a_written_script_is_requeued_at_its_time_limit(slurm, job, tmp_path):
    """Two at once, tasks of an array, with a limit of a minute for a training of more than that."""
    script = tmp_path / "job.sh"
    words = [
        "slurm",
        "-N2",
        "--time=1",
        "--warn=10",
        "--array=0-1",
        "--name=two",
        f"--scratch={tmp_path}/scratch",
    ]
    words += [outside.JOB, "--steps", 130, "--step-ms", 500, "--checkpoint-every", 10]
    made = job([sys.executable, "-m", "odyssey", *words])
    assert made.wait() == 0, made.output
    script.write_text(made.output)
    (tmp_path / "scratch").mkdir()
    said = slurm.job(["sbatch", "--parsable", f"--chdir={tmp_path}", script])
    assert said.wait(20) == 0, said.output
    number = said.output.split()[-1]
    slurm.wait_for(
        lambda: slurm.ask("squeue", "-h", "-t", "RUNNING", "-o", "%A").count("\n") == 1,
        60,
        "two jobs at once",
    )
    over = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")

    def states():
        words = slurm.ask("scontrol", "show", "job", number).split()
        return [word.partition("=")[2] for word in words if word.startswith("JobState=")]

    slurm.wait_for(
        lambda: len(states()) == 2 and all(state in over for state in states()), 420, "end of both"
    )
    outputs = [(tmp_path / f"two-{number}-{task}.out").read_text() for task in (0, 1)]
    assert states() == ["COMPLETED"] * 2, outputs
    expected = clean(job, 130)
    for task, output in enumerate(outputs):
        assert re.search(r"stopped by SIGTERM at step \d+(?s:.*)resumed from step_", output), output
        done = json.loads((tmp_path / "runs" / f"two-{number}-{task}" / "DONE.json").read_text())
        assert done["weights_sha256"] == expected
    assert list((tmp_path / "scratch").iterdir()) == []


@UNDER_SRUN
@pytest.mark.skipif(not outside.SLOW, reason=outside.WHY_SLOW)
def test_a_written_script_that_is_cancelled_stays_so(slurm, job, tmp_path):
    made = job(
        [
            sys.executable,
            "-m",
            "odyssey",
            "slurm",
            "-N2",
            "--name=one",
            outside.JOB,
            "--steps",
            9000,
            "--step-ms",
            20,
        ]
    )
    assert made.wait() == 0
    (tmp_path / "job.sh").write_text(made.output)
    said = slurm.job(["sbatch", "--parsable", f"--chdir={tmp_path}", tmp_path / "job.sh"])
    assert said.wait(20) == 0, said.output
    number = int(said.output.split()[-1])
    output = tmp_path / f"one-{number}.out"
    slurm.wait_for(lambda: output.exists() and "step 12 " in output.read_text(), 60, "step 12")
    slurm.ask("scancel", str(number))
    slurm.wait_for(lambda: slurm.state(number) == "CANCELLED", 60, "CANCELLED")
    slurm.wait_for(lambda: not slurm.ask("squeue", "-h"), 60, "empty queue")
    assert "attempt 2" not in output.read_text()
