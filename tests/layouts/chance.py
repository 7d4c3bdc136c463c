"""Random numbers of cases, and the lists of draws: functions with a weight, added by
`@draw(kind, weight)`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Random:
    """Numbers for one kind of draws of one case."""

    def __init__(self, seed: int, index: int, kind: str) -> None:
        self._generator = np.random.default_rng([seed, index, zlib.crc32(kind.encode())])

    def integer(self, low: int, high: int) -> int:
        """From low to high, both possible."""
        return int(self._generator.integers(low, high + 1))

    def size(self, high: int = 100) -> int:
        """From 1 to high: half of them up to 20, as small layers are where pieces are odd."""
        return self.integer(1, min(20, high)) if self.chance(0.5) else self.integer(1, high)

    def chance(self, share: float) -> bool:
        return bool(self._generator.random() < share)

    def one(self, values: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
        total = None if weights is None else np.array(weights) / sum(weights)
        return values[int(self._generator.choice(len(values), p=total))]

    def number(self, low: float, high: float) -> float:
        """A number of three digits, its logarithm uniform."""
        return float(f"{math.exp(self._generator.uniform(math.log(low), math.log(high))):.3g}")


DRAWS: dict[str, list[tuple[float, Callable[..., Any]]]] = {}


def draw(kind: str, weight: float = 1.0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: adds a function (random, ...) to the draws of a kind, chosen in proportion to
    its weight.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        DRAWS.setdefault(kind, []).append((weight, function))
        return function

    return add


def drawn(kind: str, random: Random, *given: Any) -> Any:
    """What one of the draws of a kind gives."""
    weights, functions = zip(*DRAWS[kind], strict=True)
    return random.one(functions, weights)(random, *given)
