"""`ring`: reduce-scatter and all-gather around a ring of ranks (Patarasuk and Yuan 2009).

A float's additions go around the ring from the rank after its owner, so the bits depend on the
number of ranks. docs/strategies.md compares it with the others.
"""

from __future__ import annotations

import numpy as np

from ..comm import Request
from .reduction import Phased


class RingReduction(Phased):
    """Reduce-scatter, then all-gather (left out if `scatter`), over any number of floats and ranks.

    Chunk p is rank p's range. It starts at rank p + 1, is added to by each rank on the way, and is
    complete at p.
    """

    def _prepare(self) -> None:
        super()._prepare()
        n = self.comm.size
        self._arriving = self._take(max(b - a for a, b in self.ranges))
        self._tag = next(self.lanes.tags) % 16000
        self._sum = self.result
        self.phases = (
            *(lambda s=s: self._reduce(s) for s in range(n - 1)),
            *(lambda s=s: self._gather(s) for s in range(0 if self.scatter else n - 1)),
            self._end,
        )

    def _chunk(self, p: int) -> np.ndarray:
        a, b = self.ranges[p % self.comm.size]
        return self._sum[a:b]

    def _reduce(self, s: int) -> Request:
        rank = self.comm.rank
        if s == 0:
            self._add_up(self._sum)
        else:
            self._take_in(rank - 1 - s)
        return self._pass_on(
            self._chunk(rank - 1 - s), self._arriving[: self._chunk(rank - 2 - s).size]
        )

    def _take_in(self, p: int) -> None:
        """Adds the chunk that came."""
        chunk = self._chunk(p)
        chunk += self._arriving[: chunk.size]

    def _gather(self, s: int) -> Request:
        rank = self.comm.rank
        if s == 0:
            self._take_in(rank)
        return self._pass_on(self._chunk(rank - s), self._chunk(rank - s - 1))

    def _end(self) -> None:
        if self.scatter:
            self._take_in(self.comm.rank)

    def _pass_on(self, outgoing: np.ndarray, incoming: np.ndarray) -> Request:
        """Sends to the next rank and receives from the one before; empty chunks stay away."""
        comm = self.comm
        requests = []
        if incoming.size:
            requests.append(comm.recv(incoming, (comm.rank - 1) % comm.size, self._tag, wait=False))
        if outgoing.size:
            self.bytes_sent += outgoing.nbytes
            requests.append(comm.send(outgoing, (comm.rank + 1) % comm.size, self._tag, wait=False))
        return Both(requests)


class Both(Request):
    """Several requests as one."""

    __slots__ = ("_requests",)

    def __init__(self, requests: list[Request]) -> None:
        super().__init__()
        self._requests = requests

    def test(self) -> bool:
        return all([r.test() for r in self._requests])

    def wait(self) -> None:
        for r in self._requests:
            r.wait()
