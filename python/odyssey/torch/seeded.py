"""Samples of a data set that may draw random numbers: those of a sample are f(seed, epoch, index).

torch's, NumPy's and Python's generators are saved once per shard. A data set that has not drawn in
its first shard is read without seeding and the generators are compared after each: a shard in which
a sample did draw is read once more, seeded, as all are from then on. Not for generators that a data
set has of its own (a loader's: generators.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.data

from ..core import native
from .shards import generator, seed_of

Key = tuple[int, int]  # of a sample: epoch, index


class Seeded(torch.utils.data.Dataset):
    """A data set by (epoch, index), a shard at a time; the generators are afterwards what they
    were before.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self._draws: bool | None = None  # whether it is known to draw; None: nothing has been read

    def __getitems__(self, wanted: Sequence[Key]) -> list[Any]:
        """The samples of one shard."""
        before = states()
        same = False
        try:
            if self._draws is False:
                made = [self.dataset[index] for _, index in wanted]
                same = keys(states()) == keys(before)
                if same:
                    return made
            made = [self._seeded(*key) for key in wanted]
            self._draws = bool(self._draws)
            return made
        finally:
            if not same:
                put_back(before)

    def _seeded(self, epoch: int, index: int) -> Any:
        number = seed_of(self.seed, epoch, index)
        generator.manual_seed(number)
        np.random.seed(number & 0xFFFFFFFF)
        random.seed(number)
        if self._draws:
            return self.dataset[index]
        seeded = keys(states())
        sample = self.dataset[index]
        self._draws = True if keys(states()) != seeded else self._draws
        return sample


class TensorRows:
    """A TensorDataset, or subset of one: the rows of a shard at once, as torch would stack them
    one by one.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __call__(self, wanted: Sequence[Key]) -> list[torch.Tensor]:
        """The tensors of one shard."""
        dataset = self.dataset
        indices = [index for _, index in wanted]
        while isinstance(dataset, torch.utils.data.Subset):
            indices = [dataset.indices[i] for i in indices]
            dataset = dataset.dataset
        at = torch.tensor(indices)
        return [t.index_select(0, at) for t in dataset.tensors]

    @staticmethod
    def fit(dataset: Any, options: dict[str, Any]) -> bool:
        """Returns whether they are what torch's loader with these options would give."""
        while type(dataset) is torch.utils.data.Subset:
            dataset = dataset.dataset
        return type(dataset) is torch.utils.data.TensorDataset and not any(options.values())


def states() -> list[tuple[Any, Any, Any]]:
    """Returns, of torch's, NumPy's and Python's generator, what tells two states apart, the
    state, what sets it.
    """
    own = generator.get_state()
    python = random.getstate()
    # of which each draw moves the last, a place in the others; all are new after 624 draws
    numbers = python[1]
    return [
        (own.numpy().tobytes(), own, generator.set_state),
        (*_numpy_state(), np.random.set_state),
        ((numbers[-1], numbers[:8], python[2]), python, random.setstate),
    ]


def keys(of: list[tuple[Any, Any, Any]]) -> list[Any]:
    return [key for key, _, _ in of]


def put_back(before: list[tuple[Any, Any, Any]]) -> None:
    """Sets the generators to what `states` gave."""
    for _, state, put in before:
        put(state)


_seen: tuple[Any, Any] = b"", None  # the latest state of NumPy's generator that was read


def _numpy_state() -> tuple[Any, Any]:
    """Returns what tells its state apart, and the state, which takes 60 us to read: anew where
    its memory changed.
    """
    global _seen
    bits = np.random.get_bit_generator()
    if type(bits) is not np.random.MT19937:
        state = np.random.get_state(legacy=False)
        return repr(state), state
    # a Mersenne twister has 624, and its place in them
    words = native.copied(bits.ctypes.state_address, 4 * 625)
    # with half of a pair of normal numbers left, drawing may leave its memory as it is
    if _seen[0] != (words, 0, 0.0):
        state = np.random.get_state()
        _seen = (words, *state[3:]), state
    return _seen
