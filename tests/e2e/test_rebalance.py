"""A rank that is slow hands shards on while it trains, with the same bits
(parallel/test_balance.py: any moves).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("slow_rank.py")


@pytest.mark.parametrize("kind", ["ours", "pipeline", "torch"])
def test_a_slow_rank_hands_on_shards_and_no_bit_changes(launch, kind):
    if kind == "torch":
        pytest.importorskip("torch")
    ranks, slow = (4, "ranks 2-3") if kind == "pipeline" else (2, "rank 1")
    moved, equal = (
        launch.python(PROGRAM, kind, *more, ranks=n)
        for n, more in ((ranks, ["rebalance"]), (1, []))
    )
    assert moved.returncode == 0 == equal.returncode, moved.stderr + equal.stderr
    (weights, counts), (alone, none) = (done.stdout.split(maxsplit=1) for done in (moved, equal))
    assert weights == alone
    first, second = ast.literal_eval(counts)
    assert first > second > 0 and first + second == 8 and ast.literal_eval(none) == ()
    assert re.search(
        rf"\[rebalance\] a shard takes {slow} \d+\.\dx as long as the fastest: .* instead of 4",
        moved.stderr,
    )


def test_a_loader_that_reads_equal_shares_is_refused(launch, tmp_path):
    pytest.importorskip("torch")
    program = tmp_path / "refused.py"
    program.write_text(
        "import torch\n"
        "from odyssey.torch import DataLoader, DistributedTrainer\n"
        "model = torch.nn.Linear(3, 2)\n"
        "samples = [(torch.ones(3), i % 2) for i in range(64)]\n"
        "trainer = DistributedTrainer(model, torch.optim.SGD(model.parameters(), 0.1), "
        "rebalance=True)\n"
        "trainer.fit(DataLoader(samples, 32))\n"
    )
    done = launch.python(program, ranks=2)
    assert done.returncode == 64
    assert (
        "rebalance=True with odyssey.torch.DataLoader" in done.stderr
        and "Traceback" not in done.stderr
    )
