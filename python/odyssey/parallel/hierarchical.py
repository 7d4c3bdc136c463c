"""`hierarchical`: sums within a node first, then between nodes, then back to all ranks of the node.

Between nodes each rank talks only to its counterparts, and only about its share of the floats: a node of L ranks sends
what one rank of `tree` would, instead of L times that. Nodes may have different numbers of ranks; as many ranks of each
take part between nodes as the smallest node has.

All of the promise is kept: the additions are those of the tree of plan.py, whatever the placement. A node completes as
much of the tree as its ranks' shards allow and hands on the rest as it is: with neighbouring ranks on a node (how
mpirun places them) about one partial sum, with ranks dealt round-robin all of them, which saves nothing.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np

from ..base import hooks
from ..comm import Communicator, Request
from .plan import Run, combine, ranges
from .reduction import Phased, adder, pack, rows

Machines = tuple[tuple[int, ...], ...]  # ranks of each machine


def machines(comm: Communicator, ranks_per_node: int | None) -> Machines:
    """Which ranks share a machine; a collective call. ranks_per_node: count instead of looking."""
    if ranks_per_node is not None:
        here = comm.rank // ranks_per_node
    else:
        here = hooks.machine()
    found: dict[int, list[int]] = {}
    for rank, where in enumerate(comm.all_gather(np.array([here], np.int64)).ravel().tolist()):
        found.setdefault(where, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


class Places(NamedTuple):
    """This rank among its neighbours: two communicators of each kind, one per phase that uses it (see Lanes).

    between is None where this rank has no counterpart on the smallest node.
    """

    machines: Machines
    machine: int  # this rank's
    place: int  # this rank's in it
    within: tuple[Communicator, Communicator]
    between: tuple[Communicator, Communicator] | None

    _of = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, comm: Communicator, ranks_per_node: int | None) -> Places:
        """Those of a communicator's ranks; a collective call the first time."""
        known = cls._of.setdefault(comm, {})
        if ranks_per_node not in known:
            found = machines(comm, ranks_per_node)
            machine = next(m for m, ranks in enumerate(found) if comm.rank in ranks)
            place = found[machine].index(comm.rank)
            wide = min(map(len, found))
            within = [comm.split(machine, comm.rank) for _ in range(2)]
            between = [comm.split(place if place < wide else None, comm.rank) for _ in range(2)]
            known[ranks_per_node] = cls(found, machine, place, tuple(within), tuple(between) if place < wide else None)
        return known[ranks_per_node]


class HierarchicalReduction(Phased):
    """The tree, completed in four phases: to ranks of this node, to their counterparts, and the two ways back.

    The ranks of a node share the floats out (`shares`), and each share is cut again between the nodes (`parts`).
    """

    def _prepare(self) -> None:
        super()._prepare()
        self.places = p = Places.of(self.comm, self.strategy.ranks_per_node if self.strategy else None)
        wide = min(map(len, p.machines))
        here = p.machines[p.machine]
        self.shares: tuple[Run, ...] = ranges(self.floats, wide) + ((self.floats, self.floats),) * (len(here) - wide)
        lo, hi = self.shares[p.place]
        mine = len(self.plan.partial)
        # first phase
        self._send = self._take(mine * self.floats)
        self._send_counts = [mine * (b - a) for a, b in self.shares]
        given = tuple(tuple(node for r in ranks for node in self.exchange.nodes[r]) for ranks in p.machines)
        merged = [combine(nodes, self.plan.shards) for nodes in given]
        self._came_counts = [len(self.exchange.nodes[r]) * (hi - lo) for r in here]
        self._came = self._take(sum(self._came_counts))
        pieces = rows(self._came, len(given[p.machine]), hi - lo)
        adds, kept = merged[p.machine]
        self._within = adder(pieces, adds)
        self._kept = [pieces[i] for _, i in kept] if pieces else []
        self.phases = (self._to_node, self._gather_in_node)
        # second phase
        if p.between is not None:
            self._parts = ranges(hi - lo, len(p.machines))
            a, b = self._parts[p.machine]
            self._out = self._take(len(self._kept) * (hi - lo))
            self._out_counts = [len(self._kept) * (d - c) for c, d in self._parts]
            self._in_counts = [len(k) * (b - a) for _, k in merged]
            self._in = self._take(sum(self._in_counts))
            nodes = tuple(node for _, k in merged for node, _ in k)
            adds, root = combine(nodes, self.plan.shards)
            assert not nodes or len(root) == 1
            pieces = rows(self._in, len(nodes), b - a)
            self._across = adder(pieces, adds)
            self._root = pieces[root[0][1]] if pieces else self._in[:0]
            self.phases = (self._to_node, self._to_counterparts, self._from_counterparts, self._gather_in_node)
        else:
            self.phases = (self._to_node, self._nothing, self._nothing, self._gather_in_node)

    def _to_node(self) -> Request:
        pack(self._send, [self.buffers[b] for _, b in self.plan.partial], self.shares)
        self.bytes_sent += 4 * (self._send.size - self._send_counts[self.places.place])
        comm = self.places.within[0]
        return comm.all_to_all_v(self._send, self._send_counts, self._came, self._came_counts, wait=False)

    def _to_counterparts(self) -> Request:
        self._within.run()
        pack(self._out, self._kept, self._parts)
        self.bytes_sent += 4 * (self._out.size - self._out_counts[self.places.machine])
        comm = self.places.between[0]
        return comm.all_to_all_v(self._out, self._out_counts, self._in, self._in_counts, wait=False)

    def _from_counterparts(self) -> Request:
        self._across.run()
        lo, hi = self.shares[self.places.place]
        share = self.result[lo:hi]
        a, b = self._parts[self.places.machine]
        share[a:b] = self._root
        self.bytes_sent += 4 * (b - a) * (len(self._parts) - 1)
        return self.places.between[1].all_gather_v(share, self._parts, wait=False)

    def _nothing(self) -> None:
        """This rank has no part in this phase."""

    def _gather_in_node(self) -> Request:
        lo, hi = self.shares[self.places.place]
        self.bytes_sent += 4 * (hi - lo) * (len(self.shares) - 1)
        return self.places.within[1].all_gather_v(self.result, self.shares, wait=False)
