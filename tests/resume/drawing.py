"""A data set and a sampler for test_draws.py. Worker processes import them from here."""

from __future__ import annotations

import numpy as np


class ByEpoch:
    """Samples that depend on the epoch that was set last."""

    classes = 3
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return np.full(4, (i + 1) * (1 + self.epoch) / 50, np.float32), i % 3


class Drawn:
    """A sampler with a generator that it holds."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __len__(self) -> int:
        return 24

    def __iter__(self):
        return iter(self.generator.permutation(24).tolist())
