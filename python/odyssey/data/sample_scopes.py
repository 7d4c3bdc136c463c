"""Scopes of random numbers for samples: a sample that draws gets the same numbers on any rank.

A data set, a transform or a collate function may draw from the generators of the process: those of
`random`, NumPy and torch. These are seeded by (seed, epoch, number of the sample) before each
sample, and have afterwards the states that they had before. So it doesn't matter which rank or
process reads a sample, or how often.

A data set that has not drawn in its first samples is read without seeding, and the generators are
compared afterwards. If a sample did draw, all of these samples are read again, seeded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from odyssey.core import random_scopes

Result = TypeVar("Result")
Key = tuple[int, ...]  # of a sample: epoch, number, and what else its numbers depend on


class SampleScopes:
    """The scopes of the samples of one loader.

    Args:
        seed: the seed of the loader.

    Attributes:
        draws: whether samples draw random numbers; None if nothing has been read yet.
    """

    def __init__(self, seed: int, draws: bool | None = None) -> None:
        self.seed = seed
        self.draws = draws

    def begin_epoch(self, dataset: Any, epoch: int) -> None:
        """Calls `set_epoch` of a data set, which may draw, if it has this method."""
        if hasattr(dataset, "set_epoch"):
            with random_scopes.reading():
                random_scopes.seed_all(random_scopes.number_of(self.seed, "epoch", epoch))
                dataset.set_epoch(epoch)

    def read(self, keys: Sequence[Key], read: Callable[[Callable[[int], None]], Result]) -> Result:
        """Returns what `read` returns.

        Args:
            keys: of the samples.
            read: reads all samples. It receives a function that it calls before each sample, with
                the position of the sample's key.
        """
        with random_scopes.reading():
            if self.draws is False:
                marks = random_scopes.marks()
                result = read(begin_nothing)
                if random_scopes.marks() == marks:
                    return result
            marks_of_sample: Any = None

            def compare() -> None:
                if not self.draws and random_scopes.marks() != marks_of_sample:
                    self.draws = True

            def begin(position: int) -> None:
                nonlocal marks_of_sample
                if marks_of_sample is not None:
                    compare()
                random_scopes.seed_all(random_scopes.seed_of(self.seed, *keys[position]))
                marks_of_sample = True if self.draws else random_scopes.marks()

            result = read(begin)
            if marks_of_sample is not None:
                compare()
                self.draws = bool(self.draws)
            return result


def begin_nothing(position: int) -> None:
    """Does nothing before a sample of a data set that doesn't draw."""
