"""`tree` for ranks that see the same memory (backend "shm"). Buffers and result are in shared
memory, and nothing is sent.

Rank p adds range p of the floats of all ranks' buffers, between two barriers. The additions are the
ones of plan.py, as in TreeReduction, so the results are the same.
"""

from __future__ import annotations

import numpy as np

from ..comm import Request
from ..core import native
from ..core.program import OwnMemory
from .reduction import Kernels, Phased

# Floats of a block. All additions of one block follow each other, so that the intermediate sums
# stay in the first cache.
BLOCK = 4096


class SharedReduction(Phased):
    """The tree of plan.py in shared memory: a barrier, additions, a barrier.

    After the first barrier all buffers are complete. After the second one no rank reads the buffers
    of another rank any more, and the result is complete. The result is one array that all ranks
    see, so nobody may write to it. A range of it changes only when all ranks have arrived at the
    first barrier of the next reduction.
    """

    def _take_buffers(self) -> np.ndarray:
        """Allocates the buffers of all ranks in shared memory, and returns this rank's. Collective.

        The ranks first tell each other how many buffers they need, and which of them will hold
        their partial sums.
        """
        nodes = self.exchange.nodes
        local_layout = np.full(1 + max(len(rank_nodes) for rank_nodes in nodes), -1)
        local_layout[0] = self.plan.buffers
        partial_buffers = [buffer for _, buffer in self.plan.partial]
        local_layout[1 : 1 + len(nodes[self.comm.rank])] = partial_buffers
        # (ranks, 1 + nodes): the number of buffers, then the buffer of each node
        self._layouts = self.comm.all_gather(local_layout)
        max_buffers = int(self._layouts[:, 0].max())
        memory = self.comm.shared(4 * max_buffers * self.floats)
        self._all_buffers = [
            rank_memory.view(np.float32).reshape(max_buffers, self.floats) for rank_memory in memory
        ]
        self.floats_needed += self.plan.buffers * self.floats
        return self._all_buffers[self.comm.rank][: self.plan.buffers]

    def _prepare(self) -> None:
        super()._prepare()
        if not self.scatter:
            self.result = self.comm.shared(4 * self.floats)[0].view(np.float32)
        lo, hi = self.ranges[self.comm.rank]
        nodes = [
            self._all_buffers[r][self._layouts[r, 1 + i]]
            for r, rank_nodes in enumerate(self.exchange.nodes)
            for i in range(len(rank_nodes))
        ]
        # The node to copy, if all shards are in one node, so that there is nothing to add.
        self._single_node = None if self.exchange.adds else nodes[0]
        self._additions = self._plan_additions(nodes, lo, hi)
        self.phases = (self._await_buffers, self._add_range)
        self._second_lane = self.lanes.lane(self.comm, phase=1)

    def _plan_additions(self, nodes: list[np.ndarray], lo: int, hi: int) -> Kernels:
        """Returns the kernel calls that add the floats [lo, hi) of all nodes to the result.

        The calls go block by block. They write only intermediate sums and the result, because other
        ranks read the nodes.
        """
        adds = self.exchange.adds
        last_add = len(adds) - 1
        self._intermediate_sums = native.aligned((max(last_add, 1), BLOCK))
        calls = []
        for start in range(lo, hi, BLOCK) if adds else ():
            n = min(BLOCK, hi - start)
            operands = [OwnMemory(node[start : start + n]) for node in nodes]
            for i, action in enumerate(adds):
                if i == last_add:
                    total = OwnMemory(self.result[start : start + n])
                else:
                    total = OwnMemory(self._intermediate_sums[i, :n])
                calls.append((total, operands[action.a], operands[action.b], n))
                operands[action.a] = total
        return Kernels("add", calls)

    def _await_buffers(self) -> Request:
        """Starts the barrier after which the buffers of all ranks are complete.

        It counts the bytes that other ranks will read from this rank's memory as sent.
        """
        lo, hi = self.ranges[self.comm.rank]
        read_from_buffers = len(self.plan.partial) * (self.floats - (hi - lo))
        read_from_result = 0 if self.scatter else (hi - lo) * (self.comm.size - 1)
        self.bytes_sent += 4 * (read_from_buffers + read_from_result)
        return self.comm.barrier(wait=False)

    def _add_range(self) -> Request:
        """Adds this rank's range, and starts the barrier after which the result is complete."""
        lo, hi = self.ranges[self.comm.rank]
        self._additions.run()
        if self._single_node is not None:
            self.result[lo:hi] = self._single_node[lo:hi]
        return self._second_lane.barrier(wait=False)
