"""Loaders with `state_dict()` and `load_state_dict()` of several shapes; see test_loader_states.py
and tests/pytorch/test_stateful_loaders.py.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np

SAMPLES = 8  # of a batch


def batch_of(*numbers: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a batch that is a function of some numbers."""
    draw = np.random.default_rng(numbers)
    return draw.normal(size=(SAMPLES, 4)).astype(np.float32), draw.integers(0, 3, SAMPLES)


class Stream:
    """Continues where it was, in all epochs. Its position is a number."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.at = 0

    def __iter__(self) -> Any:
        is_last = False
        while not is_last:
            self.at += 1
            is_last = self.at % self.length == 0
            yield self.read()

    def read(self) -> Any:
        return batch_of(self.at)

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


class Within(Stream):
    """Its position is within an epoch, which loading continues and the end of an epoch ends."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.epoch = 0

    def __iter__(self) -> Any:
        while self.at < self.length:
            self.at += 1
            yield batch_of(self.epoch, self.at)
        self.epoch += 1
        self.at = 0

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> Any:
        return vars(self)  # the live dict: who keeps it without a copy keeps nothing

    def load_state_dict(self, state: Any) -> None:
        vars(self).update(state)


class Iterated:
    """The iterator has the position, as that of torchdata's StatefulDataLoader has: state_dict()
    creates it, a loaded state waits for the next iterator, and generators draw the order.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.rng = np.random.default_rng(3)
        self.iterator: Any = None
        self.is_initial = False
        self.waiting: Any = None

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        if self.is_initial:
            self.is_initial = False
        else:
            self.iterator = _Iterator(self)
        if self.iterator.is_finished:
            self.iterator = _Iterator(self)
        return self.iterator

    def state_dict(self) -> Any:
        if self.iterator is None:
            self.iterator = _Iterator(self)
            self.is_initial = True
        return self.iterator.state()

    def load_state_dict(self, state: Any) -> None:
        self.iterator = None
        self.is_initial = False
        self.waiting = state


class _Iterator:
    def __init__(self, loader: Iterated) -> None:
        self.loader = loader
        self.at = 0
        self.is_finished = False
        state = loader.waiting
        loader.waiting = None
        if state is not None:
            loader.rng.bit_generator.state = state["sampler"][0]["generator"]
        self.generator = copy.deepcopy(loader.rng.bit_generator.state)
        self.order = loader.rng.permutation(loader.length)
        if state is not None:
            self.at = state["sampler"][0]["yielded"]
            self.is_finished = state["finished"] == b"yes"

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.order):
            self.is_finished = True
            raise StopIteration
        self.at += 1
        return batch_of(7, int(self.order[self.at - 1]))

    def state(self) -> Any:
        sampler = {"generator": self.generator, "yielded": self.at}
        return {
            "sampler": (sampler, None),
            "finished": b"yes" if self.is_finished else b"no",
            "numbers": {3: np.arange(self.at), (1, 2): 2**70},
            "empty": np.zeros((0, 2), np.float32),
        }


class Stale:
    """Ignores a state of an epoch that this process has begun already, as loaders of MosaicML do.

    It gives None as long as it is not iterated, and has no position at the end of an epoch.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.next_epoch = 0
        self.at = 0
        self.loaded: Any = None

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        epoch, self.at = self.next_epoch, 0
        if self.loaded is not None and self.loaded["epoch"] >= epoch:
            epoch, self.at = self.loaded["epoch"], self.loaded["at"]
        self.next_epoch = epoch + 1
        while self.at < self.length:
            self.at += 1
            yield batch_of(11, epoch, self.at)

    def state_dict(self) -> Any:
        if self.at == self.length:
            return {"epoch": self.next_epoch, "at": 0}
        return {"epoch": max(self.next_epoch - 1, 0), "at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = dict(state)


class Drawing(Stream):
    """Draws its samples, now and then, from the generators of the process."""

    def read(self) -> Any:
        x, y = batch_of(self.at)
        if self.at % 3:
            x = x + np.float32(np.random.normal()) + np.float32(random.random())
        return x, y


class Skipping(Within):
    """Reads an epoch from its start, and skips what was used: the order is drawn at its start."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rng = random.Random(5)

    def __iter__(self) -> Any:
        order = self.draw()
        for number in order[self.at :]:
            self.at += 1
            yield batch_of(13, number)
        self.at = 0

    def draw(self) -> list[int]:
        return random.Random(self.epoch).sample(range(self.length), self.length)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.at = 0

    def state_dict(self) -> Any:
        return {"at": self.at, "epoch": self.epoch}


SHAPES = (Stream, Within, Iterated, Stale)
