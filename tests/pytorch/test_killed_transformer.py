"""The README's demonstration: a transformer is killed, goes on with another number of ranks, and
has the same bits.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "killed_transformer.py"


def test_a_killed_transformer(launch):
    def train(ranks: int, run: str, *words: object) -> str:
        base = (
            "-m",
            "odyssey",
            "launch",
            "--allow-root",
            "-n",
            ranks,
            "--run-dir",
            launch.folder / run,
        )
        done = launch.python(*base, *words, EXAMPLE)
        return done.stdout + done.stderr

    whole = train(2, "whole")
    launch.environment["KILL_AT"] = "7"
    assert "rank 1 on host" in train(2, "hurt", "--env", "KILL_AT", "--max-restarts", 0)
    del launch.environment["KILL_AT"]
    hurt = train(3, "hurt")
    weights = [re.search(r"step 12 on \d ranks: weights (\w{16})", said) for said in (whole, hurt)]
    assert all(weights) and weights[0][1] == weights[1][1], whole + hurt
