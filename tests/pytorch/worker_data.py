"""A data set that a worker_init_fn changes, for test_seeded.py. Worker processes import it."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils import data


class Scaled(data.Dataset):
    """Samples that are multiplied by a number of the worker, and by one of its generator."""

    factor = 1.0
    random: np.random.Generator | None = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        assert data.get_worker_info() is None or data.get_worker_info().dataset is self
        drawn = 1.0 if self.random is None else self.random.random()
        return torch.full((2,), i * self.factor * drawn), i


def set_factor(worker: int) -> None:
    data.get_worker_info().dataset.factor = 3.0


def set_generator(worker: int) -> None:
    data.get_worker_info().dataset.random = np.random.default_rng(worker)
