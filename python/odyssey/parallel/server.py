"""`parameter_server`, synchronous: ranks 0 to k - 1 each add a range of the gradients of all ranks and send it back.

The servers compute shards as well. They add along the tree of plan.py, so the bits are those of `tree`, on any world.
A server receives all ranks' partial sums of its range, n - 1 of them: with one server all traffic goes through one
rank, with as many servers as ranks this is `tree`. For a cluster where a few hosts have much faster links than the
rest, and to compare. The asynchronous form is in asynchronous.py.
"""

from __future__ import annotations

from .plan import Run, ranges
from .reduction import TreeReduction


class ServerReduction(TreeReduction):
    """The tree, added by `strategy.servers` ranks."""

    def _cut(self) -> tuple[Run, ...]:
        servers = self.strategy.servers if self.strategy else 1
        return ranges(self.floats, servers) + ((self.floats, self.floats),) * (self.comm.size - servers)
