"""Where the ranks of a tensor-parallel group meet: what each owns of an axis, and the
pseudo-records of a rewritten program (tensor_parallel.py) in which they exchange it. Pure
functions and data; tensor_exchange.py carries them out.
"""

from __future__ import annotations

from typing import Any

from ..core.native import Op
from ..core.program import Record
from .mesh import PARTS
from .plan import Run, share

LANES = 16  # samples of a group, as in mojo/kernels/lanes.mojo

# A sum over more ranks than two is made by everyone from everyone's nodes up to this many bytes of
# a node; above it, each rank makes a part of it: fewer bytes, one message more.
ALL_GATHER_BYTES = 65536


def parts(rank: int, size: int) -> Run:
    """The parts of every split sum that a rank owns: a node of their tree, for all `size` of 1
    to 4.
    """
    return share(PARTS, size, rank)


def owned(n: int, rank: int, size: int) -> Run:
    """The run of an axis of n elements that a rank owns: where its parts lie."""
    a, b = parts(rank, size)
    return (n * a // PARTS, n * b // PARTS)


def by_all(ranks: int, floats: int) -> bool:
    """Returns whether everyone adds everything (one all-gather), or a range (all-to-all, then
    all-gather).
    """
    return ranks == 2 or 4 * floats <= ALL_GATHER_BYTES


def blocks(floats: int, ranks: int) -> tuple[Run, ...]:
    """The range of a sum that each rank adds, in whole vectors."""
    cuts = [floats // LANES * t // ranks * LANES for t in range(ranks)] + [floats]
    return tuple((cuts[t], cuts[t + 1]) for t in range(ranks))


class Pseudo(Record):
    """A place between native records where the ranks meet. args: [y, mine]: what it makes, from
    what each rank has.
    """

    layer = ""  # whose output or gradient it is

    @property
    def declared(self) -> Op:
        """An op of no traits, which no table has."""
        return Op(self.op, -1, ("y",), ("mine",))

    def received(self, rank: int) -> int:
        """Bytes that one rank gets from the others, for one shard that is exchanged alone."""
        raise NotImplementedError


class Gather(Pseudo):
    """y (groups, F, 16) from every rank's compact slice `mine` (groups, F_r, 16).

    `ranges[r]` are the features of rank r; together they are 0..F.
    """

    def __init__(self, args: list[Any], groups: int, ranges: tuple[Run, ...]) -> None:
        super().__init__("tp_gather", args)
        self.groups = groups
        self.ranges = ranges

    def received(self, rank: int) -> int:
        a, b = self.ranges[rank]
        return 4 * LANES * self.groups * (self.ranges[-1][1] - (b - a))


class TreeSum(Pseudo):
    """y (floats,) becomes the sum of all ranks' nodes `mine` along their tree."""

    def __init__(self, args: list[Any], floats: int, ranks: int) -> None:
        super().__init__("tp_sum", args)
        self.floats = floats
        self.ranks = ranks

    def received(self, rank: int) -> int:
        if by_all(self.ranks, self.floats):
            return 4 * self.floats * (self.ranks - 1)
        a, b = blocks(self.floats, self.ranks)[rank]
        return 4 * ((b - a) * (self.ranks - 1) + self.floats - (b - a))


class TreeSlice(Pseudo):
    """y (groups, F_r, 16) becomes features ranges[r] of that sum, on rank r.

    `mine` is a node (groups, F, 16). For a sum of which nobody needs more than his features: half
    of TreeSum's bytes.
    """

    def __init__(self, args: list[Any], groups: int, ranges: tuple[Run, ...]) -> None:
        super().__init__("tp_slice", args)
        self.groups = groups
        self.ranges = ranges

    def received(self, rank: int) -> int:
        a, b = self.ranges[rank]
        return 4 * LANES * self.groups * (b - a) * (len(self.ranges) - 1)


class Regroup(Pseudo):
    """y (groups, F_after, 16) from every rank's `mine` (groups, F_before, 16): the same
    features, shared anew.

    `before[r]` and `after[r]` are rank r's: ascending runs of the features, which lie there one
    behind the other.
    """

    def __init__(
        self,
        args: list[Any],
        groups: int,
        before: tuple[tuple[Run, ...], ...],
        after: tuple[tuple[Run, ...], ...],
    ) -> None:
        super().__init__("tp_regroup", args)
        self.groups = groups
        self.before = before
        self.after = after

    def moved(self, source: int, target: int) -> list[Run]:
        """The features that one rank gives another, or keeps."""
        cuts = (
            (max(a, c), min(b, d)) for c, d in self.after[target] for a, b in self.before[source]
        )
        return [(a, b) for a, b in cuts if b > a]

    def received(self, rank: int) -> int:
        runs = (run for t in range(len(self.before)) if t != rank for run in self.moved(t, rank))
        return 4 * LANES * self.groups * sum(b - a for a, b in runs)
