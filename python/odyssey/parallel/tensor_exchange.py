"""Exchanges of tensor parallelism: carries out tensor_collectives.py's records, for one or
several shards at once.

Who has what and who needs what stands in the record.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..core import native
from ..core.program import Slot
from .plan import Run
from .reduction import Kernels
from .tensor_collectives import LANES, Gather, Pseudo, Regroup, TreeSlice, blocks, by_all

if TYPE_CHECKING:
    from ..comm import Communicator


def _view(work: np.ndarray, slot: Slot) -> np.ndarray:
    return work[slot.offset : slot.offset + slot.nbytes].view(np.float32)


class TensorExchange:
    """Carries out one pseudo-record for some shards at once; made once, called once per step.

    Args:
        comm: the tensor-parallel group; its rank is that of the rewritten program.
        record: after `program.plan_memory`.
        works: per shard, the workspace (bytes,) uint8 in which the record's slots are. All ranks
            give as many.

    sent: bytes that this rank gives to others in a call.
    """

    def __init__(self, comm: Communicator, record: Pseudo, works: Sequence[np.ndarray]) -> None:
        self._comm = comm
        self._unpack: list[tuple[np.ndarray, np.ndarray]] = []
        y, local_slot = record.args
        self._y = [_view(work, y) for work in works]
        self._local_views = [_view(work, local_slot) for work in works]
        if isinstance(record, Gather):
            self._prepare_gather(record, len(works))
        elif isinstance(record, TreeSlice):
            self._prepare_slice(record, len(works))
        elif isinstance(record, Regroup):
            self._prepare_regroup(record)
        else:
            self._prepare_sum(record.floats, len(works))

    def __call__(self) -> None:
        """Meets the other ranks. Raises CollectiveError."""
        for to, value in self._pack:
            to[...] = value
        self._run()
        for to, value in self._unpack:
            to[...] = value

    def _prepare_gather(self, record: Gather, shards: int) -> None:
        rank = self._comm.rank
        everything = ((0, record.ranges[-1][1]),)
        flat, counts, pairs = self._cut(
            self._y, record.groups, everything, [(run,) for run in record.ranges]
        )
        self._unpack = [(value, piece) for piece, value in pairs]
        local_pieces = (piece for piece, _ in pairs[rank * shards : (rank + 1) * shards])
        self._pack = [
            (piece, m[: piece.size].reshape(piece.shape))
            for piece, m in zip(local_pieces, self._local_views, strict=True)
        ]
        ranges = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
        self._run = functools.partial(self._comm.all_gather_v, flat, ranges)
        self.sent = 4 * counts[rank] * (self._comm.size - 1)

    def _prepare_regroup(self, record: Regroup) -> None:
        rank = self._comm.rank
        everyone = range(self._comm.size)
        gives = [record.moved(rank, t) for t in everyone]
        comes = [record.moved(t, rank) for t in everyone]
        send, counts, self._pack = self._cut(
            self._local_views, record.groups, record.before[rank], gives
        )
        flat, came, pairs = self._cut(self._y, record.groups, record.after[rank], comes)
        self._unpack = [(value, piece) for piece, value in pairs]
        self._run = functools.partial(self._comm.all_to_all_v, send, counts, flat, came)
        self.sent = 4 * (sum(counts) - counts[rank])

    @staticmethod
    def _cut(
        values: Sequence[np.ndarray], G: int, held: Sequence[Run], pieces: Sequence[Sequence[Run]]
    ) -> tuple[np.ndarray, list[int], list[tuple[np.ndarray, np.ndarray]]]:
        """A buffer of the runs of features for each rank, of all shards; how long each rank's
        piece is; and views of it beside those of the values, in which the runs `held` lie one
        behind the other.
        """
        counts = [sum(b - a for a, b in runs) * G * LANES * len(values) for runs in pieces]
        flat = native.aligned(sum(counts))
        offset = 0
        pairs = []
        features = np.concatenate([np.arange(a, b) for a, b in held])
        for a, b in (run for runs in pieces for run in runs):
            start = int(np.searchsorted(features, a))
            n = (b - a) * G * LANES
            for value in values:
                view = value[: len(features) * G * LANES].reshape(G, -1, LANES)[
                    :, start : start + b - a
                ]
                pairs.append((flat[offset : offset + n].reshape(view.shape), view))
                offset += n
        return flat, counts, pairs

    def _prepare_sum(self, floats: int, shards: int) -> None:
        ranks = self._comm.size
        rank = self._comm.rank
        self._y = [y[:floats] for y in self._y]
        self._local_views = [m[:floats] for m in self._local_views]
        n = floats * shards
        self._send = self._local_views[0] if shards == 1 else native.aligned(n)
        self._pack = (
            []
            if shards == 1
            else list(zip(np.split(self._send, shards), self._local_views, strict=True))
        )
        if by_all(ranks, n):
            self._received = native.aligned((ranks, n))
            results = [(y.ctypes.data, s * floats, floats) for s, y in enumerate(self._y)]
            self._run = self._sum_by_all
            self.sent = 4 * n * (ranks - 1)
        else:
            self._ranges = blocks(n, ranks)
            a, b = self._ranges[rank]
            self._counts = [hi - lo for lo, hi in self._ranges]
            self._received = native.aligned((ranks, b - a))
            self._flat = native.aligned(n)
            self._unpack = list(zip(self._y, np.split(self._flat, shards), strict=True))
            results = [(self._flat.ctypes.data + 4 * a, 0, b - a)] if b > a else []
            self._run = self._sum_by_ranges
            self.sent = 4 * (n - (b - a) + (b - a) * (ranks - 1))
        self._plan_adds(results, ranks)

    def _prepare_slice(self, record: TreeSlice, shards: int) -> None:
        ranks = self._comm.size
        everything = ((0, record.ranges[-1][1]),)
        rank_runs = [(run,) for run in record.ranges]
        self._send, self._counts, self._pack = self._cut(
            self._local_views, record.groups, everything, rank_runs
        )
        n = self._counts[self._comm.rank] // shards
        self._received = native.aligned((ranks, n * shards))
        self._plan_adds([(y.ctypes.data, s * n, n) for s, y in enumerate(self._y)], ranks)
        self._run = self._swap
        self.sent = 4 * (sum(self._counts) - self._counts[self._comm.rank])

    def _swap(self) -> None:
        """Gives each rank its count of what is sent, and adds what came."""
        flat = self._received.reshape(-1)
        self._comm.all_to_all_v(
            self._send, self._counts, flat, [self._received.shape[1]] * self._comm.size
        )
        self._adds.run()

    def _plan_adds(self, results: list[tuple[int, int, int]], ranks: int) -> None:
        """Prepares sums of (address, start, length): floats from `start` of every rank's row of
        what was received.
        """
        self._addresses = [
            np.array([p[start:].ctypes.data for p in self._received]) for _, start, _ in results
        ]
        sums = zip(results, self._addresses, strict=True)
        self._adds = Kernels(
            "tree_sum", [(to, addresses.ctypes.data, ranks, n) for (to, _, n), addresses in sums]
        )

    def _sum_by_all(self) -> None:
        self._comm.all_gather(self._send, out=self._received)
        self._adds.run()

    def _sum_by_ranges(self) -> None:
        self._swap()
        self._comm.all_gather_v(self._flat, self._ranges)
