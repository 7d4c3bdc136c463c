"""Reductions between processes: how partial sums of the shards become one sum on every rank.

`tree` completes the tree of plan.py: range p of the arena goes to rank p from everyone (one all-to-all), is added there
in the tree's order by a kernel, and comes back to everyone (one all-gather). With a power of two of shards and ranks
that is the volume of a reduce-scatter and an all-gather: 2 (n - 1) / n times the arena for n ranks.
Same bits on any world.

`mpi` adds a process's own nodes and calls the library's all-reduce. Its order of additions depends on the library and
on the number of ranks, so the bits do too.
"""

from __future__ import annotations

import numpy as np

from .. import native
from ..comm import Communicator
from ..program import Block, encode
from .plan import Plan, exchange

REDUCTIONS = ("tree", "mpi")


class Reduction:
    """Completes the sums of one plan; made once per plan, called once per step.

    Args:
        kind: "tree" or "mpi".
        plan: what this process computes.
        buffers: (plan.buffers, floats) float32, where its partial sums are.
        workers: workers of each process.
    """

    def __init__(self, kind: str, comm: Communicator, plan: Plan, buffers: np.ndarray, workers: int) -> None:
        self.comm, self.plan, self.buffers = comm, plan, buffers
        self._alone = comm.size == 1
        self._tree = kind == "tree"
        if self._alone:
            self.result = buffers[plan.partial[0][1]]
            return
        self.result = native.aligned(buffers.shape[1])
        if not self._tree:
            return
        x = exchange(plan.shards, comm.size, workers, buffers.shape[1])
        self._ranges = x.ranges
        lo, hi = x.ranges[comm.rank]
        mine = len(plan.partial)
        self._send = native.aligned(mine * buffers.shape[1])
        self._send_counts = [mine * (b - a) for a, b in x.ranges]
        self._receive_counts = [len(ns) * (hi - lo) for ns in x.nodes]
        self._receive = native.aligned(int(np.sum(self._receive_counts)))
        lib = native.library()
        pieces = (
            [Block(self._receive[i * (hi - lo) :]) for i in range(sum(len(ns) for ns in x.nodes))] if hi > lo else []
        )
        self._adds = np.zeros((len(x.adds) if pieces else 0, lib.record), np.int64)
        for row, action in zip(self._adds, x.adds, strict=False):
            a, b = pieces[action.a], pieces[action.b]
            row[:5] = encode(lib, "add", (a, a, b, hi - lo), lambda m: m.address)
        self._context = native.Context()

    def __call__(self) -> np.ndarray:
        """Returns the sum over all shards (floats,), the same on every rank. Valid until the next call."""
        if self._alone:
            return self.result
        if not self._tree:
            self.result[:] = 0
            for _, b in self.plan.partial:
                self.result += self.buffers[b]
            return self.comm.all_reduce(self.result, out=self.result)
        at = 0
        for a, b in self._ranges:
            for _, buffer in self.plan.partial:
                self._send[at : at + b - a] = self.buffers[buffer, a:b]
                at += b - a
        self.comm.all_to_all_v(self._send, self._send_counts, self._receive, self._receive_counts)
        if len(self._adds):
            native.library().run(self._adds.ctypes.data, len(self._adds), self._context)
        a, b = self._ranges[self.comm.rank]
        self.result[a:b] = self._receive[: b - a]
        self.comm.all_gather_v(self.result, self._ranges)
        return self.result
