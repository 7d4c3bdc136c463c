"""`odyssey launch` and `odyssey train` together: what a user sees when a rank dies, and when a
run is stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEPS = 400
TRAIN = (
    "--model",
    "mlp",
    "--global-batch-size",
    "96",
    "--shard-size",
    "16",
    "--no-eval",
    "--seed",
    "3",
)
TRAIN += ("--steps", str(STEPS), "--checkpoint-every", "50")


@pytest.fixture(scope="module")
def undisturbed(launch_once):
    return launch_once.result(*(w for w in TRAIN if w not in ("--checkpoint-every", "50")))[
        "weights_sha256"
    ]


def start(launch, run: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "odyssey", *words, "--run-dir", str(run)]
    command += ["train"] if words[0] == "launch" else []
    return subprocess.Popen(
        [*command, *TRAIN],
        env=launch.environment,
        cwd=launch.folder,
        stderr=subprocess.PIPE,
        text=True,
    )


def step_of(run: Path) -> int:
    try:
        return max(
            rank["step"] for rank in json.loads((run / "heartbeat.json").read_text())["ranks"]
        )
    except (OSError, ValueError, KeyError):
        return -1


def wait_for(condition, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_killed_rank_costs_time_only(launch, undisturbed, victim):
    run = launch.folder / "run"
    job = start(launch, run, "launch", "-n", "3")
    wait_for(lambda: list((run / "checkpoints").glob("step_*")))
    os.kill(json.loads((run / "ranks" / f"{victim}.json").read_text())["pid"], signal.SIGKILL)
    _, said = job.communicate(timeout=90)
    assert job.returncode == 0, said
    record = {"attempt": 2, "steps": STEPS, "weights_sha256": undisturbed}
    assert json.loads((run / "DONE.json").read_text()) == record
    assert f"rank {victim}" in said and "SIGKILL" in said and "restarting from step" in said


def test_stopped_by_a_signal_and_gone_on_with_on_other_ranks(launch, undisturbed):
    run = launch.folder / "run"
    job = start(launch, run, "launch", "-n", "3")
    wait_for(lambda: list((run / "checkpoints").glob("step_*")))
    job.send_signal(signal.SIGTERM)
    _, said = job.communicate(timeout=40)
    assert job.returncode == 75, said
    assert "stopped by SIGTERM after step" in said
    assert not (run / "DONE.json").exists()
    job = start(launch, run, "launch", "-n", "1")
    _, said = job.communicate(timeout=90)
    assert job.returncode == 0, said
    assert json.loads((run / "DONE.json").read_text())["weights_sha256"] == undisturbed


def test_train_starts_its_ranks_itself(launch, undisturbed):
    run = launch.folder / "run"
    job = start(launch, run, "train", "--ranks", "2")
    _, said = job.communicate(timeout=90)
    assert job.returncode == 0, said
    assert json.loads((run / "DONE.json").read_text())["weights_sha256"] == undisturbed


def test_killed_and_resumed_on_other_numbers_of_ranks_and_meshes(launch, undisturbed):
    """Without a launcher that restarts: four ranks are killed, then three, then one; four in a
    pipeline end it.
    """
    folder = launch.folder / "checkpoints"
    options = [w for w in TRAIN if w not in ("--checkpoint-every", "50")]
    options += ["--checkpoint-dir", str(folder), "--checkpoint-every", "10", "--no-progress"]
    mpirun = [launch.mpirun, *(["--oversubscribe"] if launch.open_mpi else [])]

    def newest() -> int:
        return max((int(p.name[5:]) for p in folder.glob("step_*")), default=0)

    for ranks, layout in ((4, []), (3, ["--zero", "3"]), (1, ["--num-gpus", "2"])):
        before = newest()
        job = subprocess.Popen(
            [*mpirun, "-n", str(ranks), sys.executable, "-m", "odyssey.train", *options, *layout],
            env={**launch.environment, "ODYSSEY_TEST_RANKS": str(folder)},
            cwd=launch.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(lambda before=before: newest() >= before + 20)
        pids = ranks_with(f"ODYSSEY_TEST_RANKS={folder}")
        os.kill(pids[-1], signal.SIGKILL)
        assert job.wait(timeout=30) != 0
    assert 0 < newest() < STEPS
    done = launch.train(*options, "--pp", 2, ranks=4)
    assert done.returncode == 0, done.stderr
    assert f"weights {undisturbed[:16]}" in done.stdout


def ranks_with(token: str) -> list[int]:
    """Processes of odyssey.train whose environment has a word, the youngest last."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (entry / "environ").read_bytes() and b"odyssey.train" in (
                (entry / "cmdline").read_bytes()
            ):
                if (
                    b"mpirun" not in (entry / "cmdline").read_bytes()
                    and b"proxy" not in (entry / "cmdline").read_bytes()
                ):
                    found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)
