"""State in places that are easy to overlook: a stopped run continues with the same weights, or the
place is named before a checkpoint is written.
"""

from __future__ import annotations

import random

import pytest
from resume import places

from odyssey.errors import ConfigError

KEPT = set(places.KINDS)


def check(seed, kinds, folder):
    """Checks a program with some kinds of state. Returns False if a checkpoint was refused."""
    whole = places.train(seed, kinds)
    rng = random.Random(seed)
    for stop in sorted(rng.sample(range(1, places.STEPS), 2)):
        path = folder / f"stop {stop}"
        try:
            places.train(seed, kinds, path, stop)
        except ConfigError as problem:
            assert str(problem).startswith("[capture] ")
            return False
        assert places.train(seed, kinds, path) == whole, (seed, kinds, stop)
    return True


@pytest.mark.parametrize("kind", places.KINDS, ids=lambda kind: kind.__name__)
def test_a_stopped_run_continues_with_the_same_state(kind, tmp_path):
    kept = [check(seed, [kind], tmp_path / str(seed)) for seed in range(4)]
    assert all(kept) or kind not in KEPT


@pytest.mark.parametrize("seed", range(10, 16))
def test_random_programs_continue_with_the_same_state(seed, tmp_path):
    kinds = random.Random(seed).sample(places.KINDS, 4)
    assert check(seed, kinds, tmp_path)
