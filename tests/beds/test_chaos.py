"""A short soak; `scripts/chaos` runs longer ones."""

from __future__ import annotations

import pytest

from beds import chaos, outside


@pytest.mark.skipif(not outside.SLOW, reason=outside.WHY_SLOW)
def test_one_run_under_three_kinds_of_faults(capfd):
    kinds = ["rank: SIGKILL", "rank: exception", "launcher: SIGTERM"]
    words = [
        "--runs",
        "1",
        "--every",
        "2",
        "--faults",
        "3",
        "--steps",
        "60",
        "--ranks",
        "3",
        "--only",
        *kinds,
    ]
    code = chaos.soak(words)
    said = capfd.readouterr().out
    assert code == 0, said
    assert "run 1: same weights" in said and "1 of 1 runs ended" in said
    assert any(f"  {kind}\n" in said for kind in kinds)
