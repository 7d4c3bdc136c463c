"""Which floats of the arena a rank of a mesh stands for, as runs (start, length), under tensor parallelism as well."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..parallel import tensor


def overlaps(run: tuple[int, int], runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of a run (start, length) that are in one of several runs that do not overlap."""
    lo, n = run
    cut = ((max(lo, a), min(lo + n, a + k)) for a, k in runs)
    return [(a, b - a) for a, b in cut if b > a]


def without(run: tuple[int, int], runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of a run (start, length) that are in none of several runs."""
    left = [run]
    for a, k in runs:
        left = [
            piece
            for lo, n in left
            for piece in ((lo, min(n, a - lo)), (max(lo, a + k), lo + n - max(lo, a + k)))
            if piece[1] > 0
        ]
    return left


class Owned(NamedTuple):
    """What a rank has to do with a parameter; runs of the arena are (start, floats).

    whole: the run that it updates. valid: the runs of it that come out right, and that other ranks take from it.
    counted: whether its gradients are this rank's share of the global norm.
    """

    whole: tuple[int, int]
    valid: list[tuple[int, int]]
    counted: bool


def owned(offset: int, shape: tuple[int, ...], piece: tensor.Piece | None, t: int) -> Owned:
    """The share of rank t of a tensor-parallel group in a parameter; without a piece it is everybody's."""
    floats = -(-math.prod(shape) // 16) * 16
    if piece is None or piece.axis is None:
        return Owned((offset, floats), [(offset, floats)], t == 0)
    lo, hi = piece.ranges[t]
    row = math.prod(shape[1:])
    if piece.axis == 0:
        run = (offset + lo * row, (hi - lo) * row)
        return Owned(run, [run], True)
    # columns: gradients of the others' are zero, and what becomes of their parameters here is never used
    return Owned((offset, floats), [(offset + r * row + lo, hi - lo) for r in range(shape[0])], True)
