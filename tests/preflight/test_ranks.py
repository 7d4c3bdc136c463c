"""Ranks that do not belong together, as they really are started: the first line says which and
why.
"""

from __future__ import annotations

import sys

from odyssey.errors import ConfigError

TRAIN = [
    sys.executable,
    "-m",
    "odyssey.train",
    "--steps",
    "2",
    "--no-eval",
    "--no-progress",
    "--model",
    "mlp",
]


def test_ranks_with_other_options(launch):
    more = ["--oversubscribe"] if launch.open_mpi else []
    words = [
        launch.mpirun,
        *more,
        "-n",
        "1",
        *TRAIN,
        "--lr",
        "0.1",
        ":",
        "-n",
        "1",
        *TRAIN,
        "--lr",
        "0.2",
    ]
    done = launch(*words)
    assert done.returncode == ConfigError.exit_code
    assert (
        done.stderr.count(
            "rank 1 has lr = 0.2, and rank 0 lr = 0.1; start all ranks with the same options"
        )
        == 1
    )
    assert "weights" not in done.stdout


def test_a_world_that_is_not_what_was_started(launch):
    """Also the silent world of one, which a launcher of another MPI makes."""
    launch.environment["ODYSSEY_RANKS"] = "4"
    for ranks in (0, 2):
        done = launch(*TRAIN, ranks=ranks)
        assert done.returncode == ConfigError.exit_code
        assert done.stderr.count(f"4 ranks were started, but this world has {ranks or 1};") == 1
