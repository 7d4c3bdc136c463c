"""Some cases of scripts/random-layouts: random trainings have the bits of one process on random
layouts.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "random-layouts"


def more(*options: str, count: int) -> object:
    return pytest.param(options, count, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (("--transport", "mock"), 20),
        (("--transport", "auto", "--data", "--resume"), 3),
        (("--transport", "mock", "--changes", "--resume", "--ranks", "8"), 8),
        (("--transport", "mock", "--stateful", "--ranks", "5"), 10),
        more("--transport", "mock", count=60),
        more("--transport", "auto", count=50),
        more("--transport", "mpi", count=20),
        more("--transport", "mock", "--resume", count=16),
        more("--transport", "auto", "--resume", count=8),
        more("--transport", "mock", "--data", count=20),
        more("--transport", "auto", "--data", "--resume", count=8),
        more("--transport", "mock", "--ranks", "8", count=20),
        more("--transport", "mock", "--changes", count=40),
        more("--transport", "auto", "--changes", "--resume", count=12),
    ],
)
def test_the_bits_of_one_process(launch, options, count):
    done = launch.python(SCRIPT, "--count", count, "--seed", 2026, *options, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    same, split, refused = map(
        int,
        re.search(
            r"(\d+) same \((\d+) with tp, pp or ZeRO\), (\d+) refused, "
            r"(?:\d+ refused by need, )?0 differ, 0 crashed",
            done.stdout,
        ).groups(),
    )
    needed = re.search(r"(\d+) refused by need", done.stdout)
    assert same + refused + (int(needed[1]) if needed else 0) == count
    changing = "--changes" in options  # of which some are to be refused
    assert split >= count // (3 if changing else 2) and refused <= count // (2 if changing else 10)
    assert refused == sum(map(int, re.findall(r"^refused (\d+): \S", done.stdout, re.M)))


def test_a_case_is_a_function_of_seed_and_number(launch):
    lines = [
        launch.python(SCRIPT, "--seed", 5, "--only", 7, "--transport", "mock").stdout.splitlines()
        for _ in "ab"
    ]
    assert lines[0][:2] == lines[1][:2] and lines[0][0].startswith("7: same")
