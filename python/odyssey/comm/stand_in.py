"""One rank of a world whose other ranks are absent: what `odyssey plan` rehearses a step with.

All that a rank asks for, it gets at once: of numbers that all ranks bring, its own for everybody's;
of what one rank would send, zeros, or what that rank said when it was rehearsed itself. So plans,
memory and bytes are those of the real code on any number of ranks, without them. What it is not: a
way to compute anything right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..core import native
from .base import Communicator
from .call_checks import WORD, distances
from .calls import Call, Header
from .requests import Request

Said = dict[str, np.ndarray]
SAID_BYTES = 1 << 16  # larger broadcasts are weights, which are the same for the same seed


class Traffic:
    """Counts what a rank starts and sends. calls: collective ones. near, far: messages and bytes
    to ranks of the same machine, and to others.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.near = [0, 0]
        self.far = [0, 0]

    def numbers(self) -> list[int]:
        """Returns all of them: calls, messages and bytes near, messages and bytes far."""
        return [self.calls, *self.near, *self.far]


class StandIn(Communicator):
    """See the head of this file.

    rank, size: place in the world, and its ranks. per_node: ranks of a machine, neighbours in
    number; where all share one, they see the same memory (shm.py). broadcasts: the small ones, by
    group and number of the call: of ranks that were rehearsed before, and of this one.
    """

    name = "stand-in"

    def __init__(
        self,
        rank: int,
        size: int,
        per_node: int,
        broadcasts: Said,
        of: StandIn | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.ranks = tuple(ranks) or tuple(range(size))
        self.rank = rank
        self.size = size
        self.traffic = of.traffic if of else Traffic()
        self.per_node = per_node
        self.broadcasts = broadcasts
        self.machines = [p // per_node for p in self.ranks]  # of each rank
        local_ranks = [
            p for p, machine in enumerate(self.machines) if machine == self.machines[rank]
        ]
        self.local_rank = local_ranks.index(rank)
        self.local_size = len(local_ranks)
        self.why = f"stand-in: rank {self.ranks[rank]} alone"
        if size > 1 and (hasattr(of, "shared") if of else per_node >= size):
            self.shared = self._shared

    def _shared(self, nbytes: int) -> list[np.ndarray]:
        """Memory that all ranks see: one array is everybody's."""
        self._started()
        return [native.aligned(nbytes, np.uint8)] * self.size

    def subgroup(self, members: Sequence[int]) -> Communicator | None:
        return self._make_group(tuple(members)) if members else None

    def _create_subgroup(self, members: tuple[int, ...]) -> Communicator:
        ranks = [self.ranks[p] for p in members]
        return StandIn(
            members.index(self.rank), len(members), self.per_node, self.broadcasts, self, ranks
        )

    def _count(self, peer: int, nbytes: int, messages: int = 1) -> None:
        near = self.machines[peer] == self.machines[self.rank]
        way = self.traffic.near if near else self.traffic.far
        way[0] = way[0] + messages
        way[1] = way[1] + nbytes

    def _started(self) -> None:
        self.traffic.calls += 1
        if not hasattr(self, "shared"):
            for distance in (
                d for round_distances in distances(self.size) for d in round_distances
            ):
                self._count((self.rank + distance) % self.size, WORD)

    def _begin(self, call: Call) -> Request:
        self._started()
        send = call.send
        out = call.out
        rank = self.rank
        size = self.size
        if call.kind == "broadcast":
            key = f"{self._mark[0]}/{call.header.sequence}"
            if rank != call.root:
                out[...] = self.broadcasts.get(key, out)
            elif out.nbytes <= SAID_BYTES:
                self.broadcasts[key] = out.copy()
        if call.op is not None:
            for k in range(math.ceil(math.log2(size))):
                self._count((rank + (1 << k)) % size, send.nbytes)
            if out is not None and out is not send:
                out.reshape(-1)[...] = send.reshape(-1)[: out.size]
        elif call.kind not in ("barrier", "group"):
            gives, takes = call.routes(rank, size)
            bulk = out if send is None else send
            for p, (a, b) in enumerate(gives):
                if b > a and p != rank:
                    self._count(p, (b - a) * bulk.itemsize)
            if call.kind in ("all_gather", "gather") and out is not None:
                out.reshape(size, -1)[...] = send.reshape(-1)
            elif (
                send is not None
                and out is not None
                and out is not send
                and gives[rank][1] > gives[rank][0]
            ):
                out.reshape(-1)[slice(*takes[rank])] = send.reshape(-1)[slice(*gives[rank])]
        return Request(call.result())

    def _send(self, array: np.ndarray, dest: int, tag: int, envelope: Header) -> Request:
        self._count(dest, array.nbytes, 2)  # and its envelope
        return Request()

    def _recv(self, out: np.ndarray, source: int, tag: int, envelope: Header) -> Request:
        out[...] = 0
        return Request(out)
