"""Sums of several ranks that are added on their devices, along the tree of parallel/plan.py.

Each rank has sums of its shards, which are nodes of the tree. The floats are cut into as many
ranges as there are ranks. Rank p gets range p of all nodes, adds them in the tree's order, and
sends the sum to all ranks. The bits are those of the reduction "tree" of the host, because a
float32 addition has the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm import Communicator, Exchanged
from ..errors import CollectiveError
from ..parallel import plan as planning
from .device import Device
from .links import Links

#: Floats that are exchanged at a time, so that the memory for them is bounded.
PIECE_FLOATS = 1 << 24


class _Piece:
    """The exchange of a run of the floats.

    Args:
        run: (first, one past the last) of the floats of this piece.
        nodes: the number of nodes of each rank.
    """

    def __init__(self, sums: DeviceSums, run: planning.Run, nodes: Sequence[int]) -> None:
        self._sums = sums
        self._lo, self._hi = run
        rank = sums.comm.rank
        self._ranges = planning.ranges(self._hi - self._lo, sums.comm.size)
        start, stop = self._ranges[rank]
        self.local_floats = stop - start
        self._send_counts = [nodes[rank] * (b - a) for a, b in self._ranges]
        self._receive_counts = [count * self.local_floats for count in nodes]
        self._plan = sums.links.prepare(self._send_counts, self._ranges)

    @property
    def received_floats(self) -> int:
        return sum(self._receive_counts)

    def run(self, received: torch.Tensor) -> int:
        """Completes the piece in `sums.result`, and returns the bytes that this rank sends."""
        sums = self._sums
        result = sums.result[self._lo : self._hi]
        start, stop = self._ranges[sums.comm.rank]
        sums.links.all_to_all(
            self._plan, self._gather_sent(), self._send_counts, received, self._receive_counts
        )
        if self.local_floats:
            rows = received[: self.received_floats].view(-1, self.local_floats)
            for action in sums.adds:
                rows[action.a].add_(rows[action.b])
            result[start:stop].copy_(rows[0])
        sums.links.all_gather(self._plan, result, self._ranges)
        sent = sum(self._send_counts) - self._send_counts[sums.comm.rank]
        return 4 * (sent + self.local_floats * (sums.comm.size - 1))

    def _gather_sent(self) -> torch.Tensor:
        """Returns the floats of this rank's nodes, in the order of the ranks that get them."""
        nodes = [self._sums.buffers[b][self._lo : self._hi] for _, b in self._sums.plan.partial]
        if len(nodes) == 1:
            return nodes[0]
        if not nodes:
            return self._sums.result[:0]
        return torch.cat([node[a:b] for a, b in self._ranges for node in nodes])


class DeviceSums:
    """Completes the sums of a plan over all ranks, on their devices; a collective call.

    It has the attributes of a `Reduction` of parallel/ that a step uses.

    Args:
        comm: all ranks.
        plan: what this rank computes.
        floats: the floats of each buffer.
        device: the device of this rank.
        links: the way between the devices of the ranks.

    Attributes:
        buffers: the memory for sums of shards, on the device.
        result: the sum over all shards, after `run` and until `buffers` change.
        bytes_sent, bytes_plain, bytes_wire: as those of `Reduction`.
        floats_needed: the floats of memory that it works in.
    """

    def __init__(
        self, comm: Communicator, plan: planning.Plan, floats: int, device: Device, links: Links
    ) -> None:
        self.comm = comm
        self.plan = plan
        self.links = links
        self.buffers = [device.zeros(floats) for _ in range(plan.buffers)]
        first = plan.partial[0][1] if plan.partial else 0
        self.result = self.buffers[first]
        self.bytes_sent = self.bytes_plain = self.bytes_wire = 0
        exchange = planning.exchange(plan.shards, comm.size, 1, floats, counts=plan.counts)
        self.adds = exchange.adds
        nodes = [len(of_rank) for of_rank in exchange.nodes]
        self._device = device
        starts = range(0, floats, PIECE_FLOATS)
        with device.entered():
            self._pieces = [
                _Piece(self, (start, min(start + PIECE_FLOATS, floats)), nodes) for start in starts
            ]
        self._received = device.zeros(max(piece.received_floats for piece in self._pieces))
        self.floats_needed = plan.buffers * floats + self._received.numel()
        self._text = f"exchange of {floats} float32 on devices"

    def run(self) -> torch.Tensor:
        """Returns the sum of the shards of all ranks; a collective call.

        Raises CollectiveError: a rank has ended, or did not come before the deadline.
        """
        exchanged = Exchanged(self.comm, [self.links], self._text)
        with self._device.entered():
            try:
                for piece in self._pieces:
                    self.bytes_sent += piece.run(self._received)
            except CollectiveError as error:
                exchanged.broke(error)
                raise
            self.bytes_plain = self.bytes_sent
            exchanged.mark()
            exchanged.wait()
        return self.result
