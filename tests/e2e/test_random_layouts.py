"""Some cases of scripts/random-layouts: random trainings have the bits of one process on random layouts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "random-layouts"


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (("--transport", "mock"), 60),
        (("--transport", "auto"), 40),
        (("--transport", "mpi"), 20),
        (("--transport", "mock", "--resume"), 16),
        (("--transport", "auto", "--resume"), 8),
        (("--transport", "mock", "--data"), 20),
        (("--transport", "auto", "--data", "--resume"), 8),
    ],
    ids=["threads", "processes", "mpi", "resume, threads", "resume, processes", "data", "data, resume, processes"],
)
def test_the_bits_of_one_process(launch, options, count):
    done = launch.python(SCRIPT, "--count", count, "--seed", 2026, *options, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    same, split, refused = map(
        int,
        re.search(
            r"(\d+) same \((\d+) with tp, pp or ZeRO\), (\d+) refused, 0 differ, 0 crashed", done.stdout
        ).groups(),
    )
    assert same + refused == count
    assert split >= count // 2 and refused <= count // 10


def test_a_case_is_a_function_of_seed_and_number(launch):
    lines = [launch.python(SCRIPT, "--seed", 5, "--only", 7, "--transport", "mock").stdout.splitlines() for _ in "ab"]
    assert lines[0][:2] == lines[1][:2] and lines[0][0].startswith("7: same")
