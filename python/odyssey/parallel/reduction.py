"""Reductions between processes: how partial sums of the shards become one sum, on every rank or on the owner of a part.

A reduction is made once per plan and range of parameters, and used once per step: the engine fills `buffers`, calls
`start()` when its shards are done, may go on computing and `poll()` now and then, and takes the sum from `finish()`.

`tree` completes the tree of plan.py: range p of the floats goes to rank p from everyone (one all-to-all), is added
there in the tree's order by a kernel, and comes back to everyone (one all-gather; left out if `scatter`). With a power
of two of shards and ranks that is the volume of a reduce-scatter and an all-gather: 2 (n - 1) / n times the floats for
n ranks. Same bits on any world.

`mpi` adds a process's own nodes and calls the library's all-reduce. Its order of additions depends on the library and
on the number of ranks, so the bits do too.
"""

from __future__ import annotations

import numpy as np

from .. import native
from ..comm import Communicator, Request
from ..program import Block, encode
from .plan import Plan, Run, exchange


class Reduction:
    """Completes the sums of one plan over `floats` floats. This one is for a world of one: nothing is left to add.

    buffers: (plan.buffers, floats) float32, where the engine puts the sums of shards. result: (floats,), the sum over
    all shards once `finish()` has returned it, valid until the next `start()`. own: the range of `result` that is
    valid then: all of it, or this rank's part if `scatter`. ranges: the parts of all ranks.

    Args:
        plan: what this process computes. workers: workers of each process.
        scatter: leave each rank with its own range of the sum.
        storage: float32 memory to work in, of at least `floats_needed()`; its own if None.
    """

    def __init__(
        self,
        comm: Communicator,
        plan: Plan,
        floats: int,
        workers: int,
        *,
        scatter: bool = False,
        storage: np.ndarray | None = None,
    ) -> None:
        self.comm, self.plan, self.floats, self.workers, self.scatter = comm, plan, floats, workers, scatter
        self.exchange = exchange(plan.shards, comm.size, workers, floats)
        self.ranges: tuple[Run, ...] = self.exchange.ranges
        self.own: Run = self.ranges[comm.rank] if scatter else (0, floats)
        self.bytes_sent = 0  # by this rank, so far
        self._storage = storage
        self._taken = 0
        self.buffers = self._take(plan.buffers * floats).reshape(plan.buffers, floats)
        self._prepare()

    def _take(self, floats: int) -> np.ndarray:
        """Floats of the storage, from a vector boundary."""
        at = self._taken
        self._taken += -(-floats // 16) * 16
        if self._storage is None:
            return native.aligned(floats)
        return self._storage[at : at + floats]

    @property
    def floats_needed(self) -> int:
        """Floats of memory that this reduction uses."""
        return self._taken

    def _prepare(self) -> None:
        """Allocates and plans; once."""
        self.result = self.buffers[self.plan.partial[0][1]]

    def start(self) -> None:
        """Sends this rank's partial sums on their way; `buffers` must not be written until `finish()`."""

    def poll(self) -> bool:
        """Helps the transfer along without waiting; whether it is over."""
        return True

    def finish(self) -> np.ndarray:
        """Waits; returns `result`."""
        return self.result


class TreeReduction(Reduction):
    """The tree of plan.py, completed by an all-to-all, additions and an all-gather."""

    def _prepare(self) -> None:
        x, rank = self.exchange, self.comm.rank
        lo, hi = self.ranges[rank]
        mine = len(self.plan.partial)
        self.result = self._take(self.floats)
        self._send = self._take(mine * self.floats)
        self._send_counts = [mine * (b - a) for a, b in self.ranges]
        self._receive_counts = [len(ns) * (hi - lo) for ns in x.nodes]
        self._receive = self._take(sum(self._receive_counts))
        self._request: Request | None = None
        self._phase = 0
        lib = native.library()
        count = sum(len(ns) for ns in x.nodes) if hi > lo else 0
        pieces = [Block(self._receive[i * (hi - lo) : (i + 1) * (hi - lo)]) for i in range(count)]
        self._adds = np.zeros((len(x.adds) if pieces else 0, lib.record), np.int64)
        for row, action in zip(self._adds, x.adds, strict=False):
            a, b = pieces[action.a], pieces[action.b]
            row[:5] = encode(lib, "add", (a, a, b, hi - lo), lambda m: m.address)
        self._context = native.Context()

    def start(self) -> None:
        at = 0
        for a, b in self.ranges:
            for _, buffer in self.plan.partial:
                self._send[at : at + b - a] = self.buffers[buffer, a:b]
                at += b - a
        self._request = self.comm.all_to_all_v_start(self._send, self._send_counts, self._receive, self._receive_counts)
        self.bytes_sent += 4 * (len(self._send) - self._send_counts[self.comm.rank])
        self._phase = 1

    def poll(self) -> bool:
        while self._phase and self._request.test():
            self._next()
        return not self._phase

    def finish(self) -> np.ndarray:
        while self._phase:
            self._request.wait()
            self._next()
        return self.result

    def _next(self) -> None:
        """What follows when the transfer of the current phase is over."""
        if self._phase == 2:
            self._phase = 0
            return
        if len(self._adds):
            native.library().run(self._adds.ctypes.data, len(self._adds), self._context)
        a, b = self.ranges[self.comm.rank]
        self.result[a:b] = self._receive[: b - a]
        if self.scatter:
            self._phase = 0
        else:
            self._request = self.comm.all_gather_v_start(self.result, self.ranges)
            self.bytes_sent += 4 * (b - a) * (self.comm.size - 1)
            self._phase = 2


class LibraryReduction(Reduction):
    """The library's own all-reduce over the sums of the ranks."""

    def _prepare(self) -> None:
        self.result = self._take(self.floats)
        self._request: Request | None = None

    def start(self) -> None:
        self.result[:] = 0
        for _, b in self.plan.partial:
            self.result += self.buffers[b]
        self._request = self.comm.all_reduce_start(self.result, out=self.result)
        self.bytes_sent += 8 * self.floats * (self.comm.size - 1) // self.comm.size  # of a ring; the library may differ

    def poll(self) -> bool:
        return self._request.test()

    def finish(self) -> np.ndarray:
        self._request.wait()
        return self.result


REDUCTIONS: dict[str, type[Reduction]] = {"tree": TreeReduction, "mpi": LibraryReduction}


def make(kind: str, comm: Communicator, plan: Plan, floats: int, workers: int, **options: object) -> Reduction:
    """The reduction of a kind (REDUCTIONS), or none for a world of one."""
    return (Reduction if comm.size == 1 else REDUCTIONS[kind])(comm, plan, floats, workers, **options)
