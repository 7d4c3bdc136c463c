"""Worker processes: the same batches with any number of them, and what happens when things go wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_random_loaders import drawn, expected, loader_of, same  # noqa: E402


@pytest.mark.parametrize("number", range(8))
def test_any_number_of_workers_gives_the_same(number):
    case = drawn(100 + number)
    workers = int(case["draw"].integers(1, 4))
    loader = loader_of(case, num_workers=workers)
    if loader is None:
        return
    for epoch in range(2):
        want = expected(case, epoch)
        if number % 2:  # abandoned: the next iteration is whole all the same
            next(iter(loader))
            loader.set_epoch(epoch)
        got = list(loader.steps(pieces=case["pieces"], join=case["join"], part=lambda n: (0, n)))
        for batch, (numbers, samples) in zip(got, want, strict=True):
            if len(numbers):
                same(batch, numbers, samples)
