"""Trainings on GPUs, here on emulated ones: the same bits on any number of workers and ranks,
and what is refused.

The checks themselves are in records.py and trainings.py, which scripts/gpu-check runs on a real
GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import emulated

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    emulated.compiler() is None, reason="no C compiler for the emulated GPU"
)

TRAIN = ["--steps", "3", "--global-batch-size", "112", "--no-eval", "--no-progress"]


def run(
    *command: object, gpus: int = 1, code: int = 0, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Runs a program on emulated GPUs; its exit code must be `code`."""
    done = subprocess.run(
        list(map(str, command)),
        env=emulated.environment(gpus, **settings),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def weights(*options: object, ranks: int = 0, gpus: int = 1, **settings: object) -> str:
    """The hash of the weights after a short training with these options of `odyssey train`."""
    launcher = ["mpirun", "-n", ranks] if ranks else []
    done = run(
        *launcher, sys.executable, "-m", "odyssey.train", *TRAIN, *options, gpus=gpus, **settings
    )
    return done.stdout.split("weights ")[1].split()[0]


@pytest.fixture(scope="module")
def one() -> str:
    return weights("--num-gpus", 1)


def test_every_op_agrees_with_the_cpu() -> None:
    said = run(sys.executable, HERE / "records.py", "--shards", "1,3,8").stdout
    assert " 0 failed" in said and int(said.split()[0]) > 500


@pytest.mark.parametrize(
    "settings", [{"gpus": 2}, {"gpus": 1, "late": 1, "order": 7}], ids=["two", "one, late"]
)
def test_trainings(settings: dict[str, int]) -> None:
    names = (
        ["workers", "data_that_does_not_fit", "checkpoints", "touched", "copied", "offloaded"]
        if "late" in settings
        else []
    )
    results = json.loads(
        run(sys.executable, HERE / "trainings.py", *names, **settings).stdout.splitlines()[-1]
    )
    assert len(results) == len(names or results) >= 4
    assert {name: r for name, r in results.items() if not r["ok"]} == {}


def test_what_a_step_asks_the_driver_for() -> None:
    """The host waits once, and once more for the norm; batches and a step log add copies and no
    wait for the device.

    Waiting for the copy of two batches before, which has ended, counts as one.
    """
    said = run(sys.executable, HERE / "counts.py").stdout
    results = json.loads(said.splitlines()[-1])
    expected = {
        "plain": {"launches": 2, "up": 2, "down": 2, "waits": 1},
        "offloaded": {"launches": 2, "up": 2, "down": 2, "waits": 1},
        "step_log": {"launches": 6, "up": 2, "down": 3, "waits": 1},
        "fp16": {"launches": 2, "up": 2, "down": 2, "waits": 1},
        "clipped": {"launches": 6, "up": 3, "down": 3, "waits": 2},
        "fp16_clipped": {"launches": 6, "up": 3, "down": 3, "waits": 2},
        "brought": {"launches": 2, "up": 2, "down": 2, "waits": 2},
        "of_arrays": {"launches": 2, "up": 2, "down": 2, "waits": 2},
        "evaluation": {"launches": 0, "up": 2, "down": 2, "waits": 2},
    }
    none = {"within": 0, "sets": 0, "allocations": 0, "frees": 0, "graphs": 1}
    assert results == {name: [{**none, **each}] * 3 for name, each in expected.items()}


def test_too_few_gpus() -> None:
    said = run(sys.executable, "-m", "odyssey.train", *TRAIN, "--num-gpus", 4, code=69).stderr
    assert said.strip() == (
        "odyssey: error: [gpu] 4 GPUs were asked for and this machine has 1; "
        "use --num-gpus 1, --oversubscribe to share them, or --device cpu"
    )


def test_workers_and_ranks_give_one_hash(one: str) -> None:
    hashes = {
        "4 workers share a GPU": weights("--num-gpus", 4, "--oversubscribe"),
        "4 workers, 4 GPUs": weights("--num-gpus", 4, gpus=4, late=1),
        "2 ranks share a GPU": weights("--device", "gpu", "--oversubscribe", ranks=2),
        "3 ranks, 3 GPUs": weights("--device", "gpu", ranks=3, gpus=3, late=1),
        "2 ranks, 2 GPUs each": weights("--num-gpus", 2, ranks=2, gpus=4),
    }
    assert set(hashes.values()) == {one}, hashes


def test_an_optimizer_that_is_a_rule_has_one_hash_on_workers_and_ranks() -> None:
    lion = "--optimizer", "lion", "--lr", 0.001, "--model", "mlp"
    hashes = [
        weights("--num-gpus", 1, *lion),
        weights("--num-gpus", 3, *lion, gpus=3, late=1, order=7),
        weights("--device", "gpu", *lion, ranks=2, gpus=2, late=1),
    ]
    assert len(set(hashes)) == 1, hashes


def test_a_machine_without_gpus_says_so(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "odyssey.train", *TRAIN, "--num-gpus", 2, gpus=0)
    assert "odyssey: no GPU found: 2 CPU workers are used" in done.stderr
    said = run(
        sys.executable, "-m", "odyssey.train", *TRAIN, "--device", "gpu", gpus=0, code=69
    ).stderr
    assert "device is 'gpu' but this machine has none" in said
