"""Gradient sums in the memory that ranks of one machine share are those that are sent, to the
last bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)]
)
def test_sums_in_shared_memory(launch, ranks):
    done = launch.python(Path(__file__).parent / "shared_sums.py", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("144 sums as sent") == ranks
