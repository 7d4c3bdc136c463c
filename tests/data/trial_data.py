"""Data sets that draw, count, cache or open files, for the tests of train/first_samples.py.

Worker processes import them from here.
"""

from __future__ import annotations

import functools
import random
import sys

import numpy as np

SAMPLES = 24

#: Kinds whose samples are the same on any ranks.
REPEATABLE = (
    "plain",
    "counter",
    "cache",
    "large cache",
    "lazy file",
    "numpy",
    "python",
    "all three",
    "seeded items",
    "drawn by set_epoch",
    "held, seeded for each sample",
    "drawn in the first epoch",
    "drawn in later epochs",
    "cached by epoch",
)
#: Kinds that are refused, and what the message names.
REFUSED = {
    "held": "draws from dataset.generator",
    "held, of python": "draws from dataset.generator",
    "held by set_epoch": "draws from dataset.generator",
    "unseeded": "a generator without a seed",
    "counted": "depend on dataset.reads",
    "cached after a draw": "dataset.cache keeps samples",
    "large cache after a draw": "keeps samples",
    "partly cached after a draw": "depend on dataset.cache or dataset.reads",
    "cached by functools after a draw": "the data set keeps samples",
    "cached after a held draw": "draws from dataset.generator",
    "cached without a seed": "a generator without a seed",
}


def draw(library: str) -> float:
    """Returns a random number from 0 to 1 from a generator of the process."""
    if library == "python":
        return random.random()
    if library == "torch":
        return float(sys.modules["torch"].rand(()))
    return float(np.random.rand())


@functools.lru_cache
def remembered(i: int) -> float:
    """Returns a number that is drawn once."""
    return draw("numpy")


class Samples:
    """Pairs (x, class) of one kind."""

    classes = 3
    reads = 0
    file = None
    epoch = 0

    def __init__(self, kind: str, rank: int = 0) -> None:
        self.kind = kind
        self.rank = rank
        self.x = np.random.default_rng(5).normal(size=(SAMPLES, 4)).astype(np.float32)
        self.generator = random.Random(0) if "python" in kind else np.random.default_rng(0)
        self.cache = [None] * 5000 if "large" in kind else {}
        if "epoch" in kind:
            self.set_epoch = self.begin_epoch

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.cache = {}
        if self.kind == "held by set_epoch":
            self.noise = self.generator.normal(size=SAMPLES).astype(np.float32)
        if self.kind == "drawn by set_epoch":
            self.noise = np.random.normal(size=SAMPLES).astype(np.float32)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        self.reads += 1
        return self.x[i] + np.float32(self.added(i)), i % 3

    def added(self, i: int) -> float:
        """Returns what is added to a sample."""
        kind = self.kind
        if kind in ("numpy", "python", "torch"):
            return draw(kind)
        if kind == "all three":
            return sum(map(draw, ("numpy", "python", "numpy")))
        if kind in ("held", "held, of python"):
            return self.generator.random()
        if kind == "unseeded":
            return np.random.default_rng().random()
        if kind == "counted":
            return self.reads / 10
        if kind == "seeded items":
            return np.random.default_rng([3, i]).random()
        if kind == "held, seeded for each sample":
            self.generator = np.random.default_rng(i)
            return self.generator.random()
        if "by set_epoch" in kind:
            return self.noise[i]
        if kind == "drawn in the first epoch":
            return draw("numpy") if self.epoch == 0 else 0
        if kind == "drawn in later epochs":
            return draw("numpy") if self.epoch > 0 else 0
        if kind == "lazy file":
            if self.file is None:
                self.file = open(__file__, "rb")  # noqa: SIM115
            self.file.seek(i)
            return self.file.read(1)[0] / 100
        if kind == "rank":
            return self.rank / 10
        if "functools" in kind:
            return remembered(i)
        if "cache" in kind:
            if i not in self.cache if isinstance(self.cache, dict) else self.cache[i] is None:
                self.cache[i] = self.computed()
            return self.cache[i] + (draw("numpy") if "partly" in kind else 0)
        return 0

    def computed(self) -> float:
        """Returns what is cached."""
        if self.kind == "cached after a held draw":
            return self.generator.random()
        if self.kind == "cached without a seed":
            return np.random.default_rng().random()
        drawn = "after a draw" in self.kind or self.kind == "cached by epoch"
        return draw("numpy") if drawn else 0.5


def noisy(sample: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A transform that draws from the generator that it gets, and from one of the process."""
    return sample + np.float32(rng.random() + np.random.rand())


class Held:
    """A transform with a generator."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self, sample: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return sample + np.float32(self.generator.random())
