"""Data sets and a sampler whose length goes by the epoch. Worker processes import them from here."""

from __future__ import annotations

import numpy as np

LENGTHS = (20, 33, 9, 48)


class Growing:
    """A data set that has LENGTHS[epoch] samples."""

    classes = 3

    def __init__(self):
        generator = np.random.default_rng(0)
        self.x = generator.standard_normal((max(LENGTHS), 6)).astype(np.float32)
        self.y = generator.integers(0, 3, max(LENGTHS))
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return LENGTHS[self.epoch % len(LENGTHS)]

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])


class GrowingSampler:
    """An order that is longer in some epochs."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return LENGTHS[self.epoch % len(LENGTHS)]

    def __iter__(self):
        return iter(
            np.random.default_rng(self.epoch).permutation(max(LENGTHS))[: len(self)].tolist()
        )


class Everything(Growing):
    def __len__(self):
        return max(LENGTHS)
