"""Exchanges of tensor parallelism: carries out tensor_collectives.py's records, for one or several shards at once.

Who has what and who needs what stands in the record.
"""

from __future__ import annotations

import functools
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
        works: per shard, the workspace (bytes,) uint8 in which the record's slots are. All ranks give as many.

    sent: bytes that this rank gives to others in a call.
    """

    def __init__(self, comm: Communicator, record: Pseudo, works: Sequence[np.ndarray]) -> None:
        self._comm = comm
        y, mine = record.args
        self._y = [_view(work, y) for work in works]
        self._mine = [_view(work, mine) for work in works]
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
        self._run()

    def _prepare_gather(self, record: Gather, shards: int) -> None:
        G, features = record.groups, record.ranges[-1][1]
        self._flat = native.aligned(shards * G * features * LANES)
        self._ranges = [(a * shards * G * LANES, b * shards * G * LANES) for a, b in record.ranges]
        pieces = [self._flat[a:b].reshape(shards, G, -1, LANES) for a, b in self._ranges]
        a, b = record.ranges[self._comm.rank]
        self._pack = [
            (pieces[self._comm.rank][s], m[: G * (b - a) * LANES].reshape(G, -1, LANES))
            for s, m in enumerate(self._mine)
        ]
        whole = [y[: G * features * LANES].reshape(G, features, LANES) for y in self._y]
        self._unpack = [
            (whole[s][:, a:b], pieces[t][s]) for t, (a, b) in enumerate(record.ranges) for s in range(shards)
        ]
        self._move = functools.partial(self._comm.all_gather_v, self._flat, self._ranges)
        self._run = self._packed
        a, b = self._ranges[self._comm.rank]
        self.sent = 4 * (b - a) * (self._comm.size - 1)

    def _packed(self) -> None:
        for to, value in self._pack:
            to[...] = value
        self._move()
        for to, value in self._unpack:
            to[...] = value

    def _prepare_regroup(self, record: Regroup) -> None:
        rank, everyone = self._comm.rank, range(self._comm.size)
        gives = [record.moved(rank, t) for t in everyone]
        comes = [record.moved(t, rank) for t in everyone]
        send, counts, self._pack = self._cut(self._mine, record.groups, record.before[rank], gives)
        flat, came, pairs = self._cut(self._y, record.groups, record.after[rank], comes)
        self._unpack = [(value, piece) for piece, value in pairs]
        self._move = functools.partial(self._comm.all_to_all_v, send, counts, flat, came)
        self._run = self._packed
        self.sent = 4 * (sum(counts) - counts[rank])

    @staticmethod
    def _cut(
        values: Sequence[np.ndarray], G: int, held: Sequence[Run], pieces: Sequence[Sequence[Run]]
    ) -> tuple[np.ndarray, list[int], list[tuple[np.ndarray, np.ndarray]]]:
        """A buffer of the runs of features for each rank, of all shards; how long each rank's piece is; and views of it
        beside those of the values, in which the runs `held` lie one behind the other."""
        counts = [sum(b - a for a, b in runs) * G * LANES * len(values) for runs in pieces]
        flat, at, pairs = native.aligned(sum(counts)), 0, []
        features = np.concatenate([np.arange(a, b) for a, b in held])
        for a, b in (run for runs in pieces for run in runs):
            start, n = int(np.searchsorted(features, a)), (b - a) * G * LANES
            for value in values:
                there = value[: len(features) * G * LANES].reshape(G, -1, LANES)[:, start : start + b - a]
                pairs.append((flat[at : at + n].reshape(there.shape), there))
                at += n
        return flat, counts, pairs

    def _prepare_sum(self, floats: int, shards: int) -> None:
        ranks, rank = self._comm.size, self._comm.rank
        self._y = [y[:floats] for y in self._y]
        self._mine = [m[:floats] for m in self._mine]
        n = floats * shards
        self._send = self._mine[0] if shards == 1 else native.aligned(n)
        self._pack = [] if shards == 1 else list(zip(np.split(self._send, shards), self._mine, strict=True))
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
            self._results = np.split(self._flat, shards)
            results = [(self._flat.ctypes.data + 4 * a, 0, b - a)] if b > a else []
            self._run = self._sum_by_ranges
            self.sent = 4 * (n - (b - a) + (b - a) * (ranks - 1))
        self._plan_adds(results, ranks)

    def _prepare_slice(self, record: TreeSlice, shards: int) -> None:
        ranks, G, features = self._comm.size, record.groups, record.ranges[-1][1]
        self._counts = [shards * G * LANES * (b - a) for a, b in record.ranges]
        self._send = native.aligned(shards * G * LANES * features)
        ends = np.cumsum(self._counts)
        pieces = [p.reshape(shards, G, -1, LANES) for p in np.split(self._send, ends[:-1])]
        nodes = [m[: G * features * LANES].reshape(G, features, LANES) for m in self._mine]
        self._pack = [
            (pieces[t][s], node[:, a:b]) for t, (a, b) in enumerate(record.ranges) for s, node in enumerate(nodes)
        ]
        n = self._counts[self._comm.rank] // shards
        self._received = native.aligned((ranks, n * shards))
        self._plan_adds([(y.ctypes.data, s * n, n) for s, y in enumerate(self._y)], ranks)
        self._run = functools.partial(self._swap, self._pack)
        self.sent = 4 * (sum(self._counts) - self._counts[self._comm.rank])

    def _swap(self, values: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Copies (to, value) into what is sent, gives each rank its count of it, and adds what came."""
        for to, value in values:
            to[...] = value
        flat = self._received.reshape(-1)
        self._comm.all_to_all_v(self._send, self._counts, flat, [self._received.shape[1]] * self._comm.size)
        self._adds.run()

    def _plan_adds(self, results: list[tuple[int, int, int]], ranks: int) -> None:
        """Returns what adds `length` floats from `start` of every rank's row of what was received, to an address."""
        self._addresses = [np.array([p[start:].ctypes.data for p in self._received]) for _, start, _ in results]
        sums = zip(results, self._addresses, strict=True)
        self._adds = Kernels("tree_sum", [(to, at.ctypes.data, ranks, n) for (to, _, n), at in sums])

    def _sum_by_all(self) -> None:
        for to, value in self._pack:
            to[...] = value
        self._comm.all_gather(self._send, out=self._received)
        self._adds.run()

    def _sum_by_ranges(self) -> None:
        self._swap(self._pack)
        self._comm.all_gather_v(self._flat, self._ranges)
        for y, value in zip(self._y, self._results, strict=True):
            y[...] = value
