"""`ring`: reduce-scatter and all-gather around a ring of ranks (Patarasuk and Yuan 2009).

The additions of a float go around the ring from the rank after its owner. So the results depend on
the number of ranks. docs/strategies.md compares `ring` with the other reductions.
"""

from __future__ import annotations

import numpy as np

from ..comm import Request
from .reduction import Phased

# Numbers of tags that reductions use in turn. Every MPI has more tags than that.
TAGS = 16000


class RingReduction(Phased):
    """A reduce-scatter, then an all-gather (which `scatter` omits), over any number of ranks.

    Chunk p is the range of rank p. It starts at rank p + 1, each rank on the way adds its floats,
    and it is complete at rank p.
    """

    def _prepare(self) -> None:
        super()._prepare()
        hops = self.comm.size - 1
        self._arriving = self._take(max(end - start for start, end in self.ranges))
        self._tag = next(self.lanes.tags) % TAGS
        self._sum = self.result
        self.phases = (
            *(lambda hop=hop: self._reduce_chunk(hop) for hop in range(hops)),
            *(
                lambda hop=hop: self._gather_chunk(hop)
                for hop in range(0 if self.scatter else hops)
            ),
            self._end_scatter,
        )

    def _chunk(self, p: int) -> np.ndarray:
        """Returns the floats of chunk p, where p counts modulo the number of ranks."""
        start, end = self.ranges[p % self.comm.size]
        return self._sum[start:end]

    def _reduce_chunk(self, hop: int) -> Request:
        """Adds this rank's floats to the chunk that has arrived, and passes it on.

        Chunks with this rank's floats are in `_sum`. The next chunk arrives in `_arriving`.
        """
        rank = self.comm.rank
        if hop == 0:
            self._add_up(self._sum)
        else:
            self._add_arrived(rank - 1 - hop)
        outgoing = self._chunk(rank - 1 - hop)
        incoming = self._arriving[: self._chunk(rank - 2 - hop).size]
        return self._exchange_chunks(outgoing, incoming)

    def _add_arrived(self, p: int) -> None:
        """Adds the chunk that has arrived to this rank's floats of chunk p."""
        chunk = self._chunk(p)
        chunk += self._arriving[: chunk.size]

    def _gather_chunk(self, hop: int) -> Request:
        """Passes on a complete chunk, and receives another one."""
        rank = self.comm.rank
        if hop == 0:
            self._add_arrived(rank)
        return self._exchange_chunks(self._chunk(rank - hop), self._chunk(rank - hop - 1))

    def _end_scatter(self) -> None:
        """Completes this rank's chunk, unless the all-gather has done that."""
        if self.scatter:
            self._add_arrived(self.comm.rank)

    def _exchange_chunks(self, outgoing: np.ndarray, incoming: np.ndarray) -> Request:
        """Starts to send to the next rank and to receive from the previous one.

        Empty chunks aren't sent. Sender and receiver both know their sizes.
        """
        comm = self.comm
        previous_rank = (comm.rank - 1) % comm.size
        next_rank = (comm.rank + 1) % comm.size
        requests = []
        if incoming.size:
            requests.append(comm.recv(incoming, previous_rank, self._tag, wait=False))
        if outgoing.size:
            self.bytes_sent += outgoing.nbytes
            requests.append(comm.send(outgoing, next_rank, self._tag, wait=False))
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
