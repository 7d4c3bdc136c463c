"""`tree` where all ranks see the same memory (backend "shm"): buffers and result lie in it, and
nothing is sent.

Rank p adds range p of the floats straight out of everyone's buffers, between two barriers. The
additions are those of plan.py, as in TreeReduction, so the bits are the same.
"""

from __future__ import annotations

import numpy as np

from ..comm import Request
from ..core import native
from ..core.program import OwnMemory
from .reduction import Kernels, Phased

# Floats that are added at once where several additions follow each other: what is in between stays
# in the first cache.
BLOCK = 4096


class SharedReduction(Phased):
    """The tree of plan.py in shared memory: a barrier, additions, a barrier.

    After the first barrier all buffers are complete; after the second nobody reads another's
    buffers any more, and the result is complete. It is one array that all ranks see: it must not be
    written, and a range of it changes only when all ranks have arrived at the first barrier of the
    next time.
    """

    def _take_buffers(self) -> np.ndarray:
        nodes = self.exchange.nodes
        # how many buffers; which of them hold the partial sums
        local_layout = np.full(1 + max(len(ns) for ns in nodes), -1)
        local_layout[0] = self.plan.buffers
        local_layout[1 : 1 + len(nodes[self.comm.rank])] = [b for _, b in self.plan.partial]
        self._layouts = self.comm.all_gather(local_layout)
        max_buffers = int(self._layouts[:, 0].max())
        memory = self.comm.shared(4 * max_buffers * self.floats)
        self._everyone = [a.view(np.float32).reshape(max_buffers, self.floats) for a in memory]
        self.floats_needed += self.plan.buffers * self.floats
        return self._everyone[self.comm.rank][: self.plan.buffers]

    def _prepare(self) -> None:
        super()._prepare()
        if not self.scatter:
            self.result = self.comm.shared(4 * self.floats)[0].view(np.float32)
        lo, hi = self.ranges[self.comm.rank]
        x = self.exchange
        nodes = [
            self._everyone[r][self._layouts[r, 1 + i]]
            for r, rank_nodes in enumerate(x.nodes)
            for i in range(len(rank_nodes))
        ]
        self._only = None if x.adds else nodes[0]
        self._additions = self._of_blocks(nodes, lo, hi)
        self.phases = (self._complete, self._add)
        self._end = self.lanes.lane(self.comm, 1)

    def _of_blocks(self, nodes: list[np.ndarray], lo: int, hi: int) -> Kernels:
        """Returns what adds range [lo, hi) of all nodes into the result, block by block; the
        others are not written.
        """
        adds = self.exchange.adds
        self._between = native.aligned((max(len(adds) - 1, 1), BLOCK))
        calls = []
        for a in range(lo, hi, BLOCK) if adds else ():
            n = min(BLOCK, hi - a)
            operands = [OwnMemory(node[a : a + n]) for node in nodes]
            for k, action in enumerate(adds):
                to = OwnMemory(
                    self.result[a : a + n] if k == len(adds) - 1 else self._between[k, :n]
                )
                calls.append((to, operands[action.a], operands[action.b], n))
                operands[action.a] = to
        return Kernels("add", calls)

    def _complete(self) -> Request:
        lo, hi = self.ranges[self.comm.rank]
        # by the others, out of this rank's buffers
        read = len(self.plan.partial) * (self.floats - (hi - lo))
        self.bytes_sent += 4 * (read + (0 if self.scatter else (hi - lo) * (self.comm.size - 1)))
        return self.comm.barrier(wait=False)

    def _add(self) -> Request:
        lo, hi = self.ranges[self.comm.rank]
        self._additions.run()
        if self._only is not None:
            self.result[lo:hi] = self._only[lo:hi]
        return self._end.barrier(wait=False)
