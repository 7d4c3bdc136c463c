"""Reductions between processes: how partial sums of the shards become one sum, on every rank or
on the owner of a part.

A reduction is made once per plan and range of parameters, and used once per step: the engine fills
`buffers`, calls `start()` when its shards are done, may go on computing and `poll()` now and then,
and takes the sum from `finish()`. Here are the contract and the plainest ones; strategy.py has all,
docs/strategies.md compares them.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import slot
from ..comm import Communicator, Request
from ..core import native
from ..core.program import OwnMemory, encode
from .plan import Action, Plan, Run, exchange, ranges

if TYPE_CHECKING:
    from .strategy import Content, Strategy


class Reduction:
    """Completes the sums of one plan over `floats` floats.

    This one is for a world of one: nothing is left to add.

    buffers: (plan.buffers, floats) float32, where the engine puts the sums of shards. result:
    (floats,), the sum over all shards once `finish()` has returned it, valid until `buffers` are
    written again. own: the range of `result` that is valid then: all of it, or this rank's part if
    `scatter`. ranges: the parts of all ranks. bytes_sent: by this rank, so far; bytes_wire: of them
    to other machines, as far as it is counted; bytes_plain: what the tree would have sent.
    floats_needed: of memory that it uses.

    Args:
        plan: what this process computes. workers: workers of each process.
        scatter: leave each rank with its own range of the sum.
        storage: float32 memory to work in, of at least `floats_needed`; its own if None.
        strategy: settings of the kinds that have some. content: what the floats are, where that
            matters.
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
        strategy: Strategy | None = None,
        content: Content | None = None,
    ) -> None:
        self.comm = comm
        self.plan = plan
        self.floats = floats
        self.workers = workers
        self.scatter = scatter
        self.strategy = strategy
        self.content = content
        self.exchange = exchange(plan.shards, comm.size, workers, floats, counts=plan.counts)
        self.ranges: tuple[Run, ...] = self.exchange.ranges
        self.own: Run = self.ranges[comm.rank] if scatter else (0, floats)
        self.bytes_sent = self.bytes_wire = 0
        self._storage = storage
        self.floats_needed = 0
        self.buffers = self._take_buffers()
        self._prepare()

    def _take_buffers(self) -> np.ndarray:
        return self._take(self.plan.buffers * self.floats).reshape(self.plan.buffers, self.floats)

    def _take(self, floats: int) -> np.ndarray:
        """Floats of the storage, from a vector boundary."""
        start = self.floats_needed
        self.floats_needed += -(-floats // 16) * 16
        if self._storage is None:
            return native.aligned(floats)
        return self._storage[start : start + floats]

    @property
    def bytes_plain(self) -> int:
        """Bytes that the tree would have sent."""
        return self.bytes_sent

    def _prepare(self) -> None:
        """Allocates and plans; once."""
        self.result = self.buffers[self.plan.partial[0][1]]

    def start(self) -> None:
        """Sends this rank's partial sums on their way; `buffers` must not be written until
        `finish()`.
        """

    def poll(self) -> bool:
        """Helps the transfer along without waiting; whether it is over."""
        return True

    def finish(self) -> np.ndarray:
        """Waits; returns `result`."""
        return self.result

    def _add_up(self, out: np.ndarray) -> np.ndarray:
        """This rank's partial sums of the first floats, added in order into `out`; for kinds
        that leave the tree.
        """
        out[:] = 0
        for _, b in self.plan.partial:
            out += self.buffers[b, : out.size]
        return out


class PhaseCommunicators:
    """Resources that the reductions over one communicator share.

    under_way: those started and not finished, in order. lane(p): a communicator of the same ranks
    for phase p. When a phase ends depends on timing, which differs between ranks, but the calls on
    a communicator must not: so each phase has one of its own, and there reductions keep the order
    in which they were started.
    """

    _of: weakref.WeakKeyDictionary[Communicator, PhaseCommunicators] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.under_way: deque[Phased] = deque()
        self.tags = itertools.count()  # of messages from rank to rank
        self.turns = itertools.count()  # of reductions, as they are started
        self._extra_lanes: list[Communicator] = []

    @classmethod
    def of(cls, comm: Communicator) -> PhaseCommunicators:
        """Returns those of a communicator, made when first asked for."""
        return cls._of.setdefault(comm, cls())

    def lane(self, comm: Communicator, phase: int) -> Communicator:
        """The communicator of a phase, `comm` itself for the first; a collective call when it is
        a new one.
        """
        while len(self._extra_lanes) < phase:
            part = comm.group(range(comm.size))
            assert part is not None
            self._extra_lanes.append(part)
        return self._extra_lanes[phase - 1] if phase else comm


class Phased(Reduction):
    """A reduction in phases, each of which starts one transfer when that of the phase before is
    over.

    A subclass sets `phases`, functions that start a transfer and return its request, or None where
    there is nothing to wait for. Phase p of a reduction starts after phase p of those started
    earlier.
    """

    phases: Sequence[Callable[[], Request | None]] = ()
    in_place = False  # the result takes the place of a sum that this rank has handed on

    def _prepare(self) -> None:
        first = self.plan.partial[0][1] if self.plan.partial else 0
        self.result = self.buffers[first] if self.in_place else self._take(self.floats)
        self.lanes = PhaseCommunicators.of(self.comm)
        self._phase = -1
        self._request: Request | None = None
        self._running = False
        self._turn = -1
        self._timeline_start: tuple[int, int] | None = None  # nanoseconds, and bytes sent before

    def start(self) -> None:
        self._running = True
        self._phase = -1
        self._request = None
        if slot.listener is not None:
            self._timeline_start = time.monotonic_ns(), self.bytes_sent
        self._turn = next(self.lanes.turns)
        self.lanes.under_way.append(self)
        self._advance(wait=False)

    def poll(self) -> bool:
        for reduction in list(self.lanes.under_way):
            reduction._advance(wait=False)
            if reduction is self:
                break
        return not self._running

    def finish(self) -> np.ndarray:
        # Those started before it as well, also where polls have completed it: another rank may be
        # waiting for their next transfer here, and this one may not look at them before it has
        # waited for that rank in another call.
        under_way = self.lanes.under_way
        while under_way and under_way[0]._turn <= self._turn:
            under_way[0]._advance(wait=True)
        return self.result

    def _advance(self, *, wait: bool) -> None:
        """Goes on through the phases as far as it can, or to the end."""
        while self._running:
            if self._request is not None:
                if not wait and not self._request.test():
                    return
                self._request.wait()  # raises what went wrong, whoever asked
            following = self._phase + 1
            if following == len(self.phases):
                self._running = False
                self._request = None
                if slot.listener is not None and self._timeline_start is not None:
                    name = f"sum of {self.floats:,} floats"
                    (start_ns, bytes_before) = self._timeline_start
                    slot.listener.span(
                        "wire",
                        name,
                        start_ns,
                        time.monotonic_ns(),
                        bytes=self.bytes_sent - bytes_before,
                    )
                self.lanes.under_way.remove(self)
                return
            for earlier in self.lanes.under_way:
                if earlier is self:
                    break
                if earlier._phase < min(following, len(earlier.phases) - 1):
                    return
            self._phase = following
            self._request = self.phases[following]()


class Kernels:
    """Calls of a kernel, one after the other; arguments are blocks of the host's memory, or
    addresses, and sizes.
    """

    def __init__(self, op: str, calls: Sequence[Sequence[Any]]) -> None:
        lib = native.library()
        self._calls = calls  # which hold the memory
        self._records = np.zeros((len(calls), lib.record), np.int64)
        for row, arguments in zip(self._records, calls, strict=True):
            row[: 1 + len(arguments)] = encode(lib, op, arguments, lambda m: m.address)
        self._context = native.Context(what="sum")

    def run(self) -> None:
        """Calls them."""
        if len(self._records):
            native.library().run(self._records.ctypes.data, len(self._records), self._context)


def adder(pieces: Sequence[np.ndarray], actions: Sequence[Action]) -> Kernels:
    """Additions of a plan over arrays: array a += array b, one after the other."""
    blocks = [OwnMemory(p) for p in pieces]
    calls = [(blocks[x.a], blocks[x.a], blocks[x.b], pieces[x.a].size) for x in actions if pieces]
    return Kernels("add", calls)


class RunningTreeSum:
    """The sum of arrays that come one after the other, along the tree of plan.py like a binary
    counter: the nodes (number of arrays, sum) that are complete, large ones first.
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[int, np.ndarray]] = []
        self._free: list[np.ndarray] = []  # memory of nodes that were merged or forgotten

    def push(self, array: np.ndarray) -> None:
        """Adds one more array, copied."""
        leaf = self._free.pop() if self._free else np.empty_like(array)
        leaf[:] = array
        size = 1
        while self.nodes and self.nodes[-1][0] == size:
            _, sibling = self.nodes.pop()
            np.add(sibling, leaf, out=leaf)
            self._free.append(sibling)
            size *= 2
        self.nodes.append((size, leaf))

    def clear(self) -> None:
        """Forgets all arrays."""
        self._free += [node for _, node in self.nodes]
        self.nodes = []

    def add_to(self, array: np.ndarray, lo: int, hi: int) -> None:
        """Adds [lo, hi) of all nodes to `array`, which holds the newest one or nothing, the
        smallest node first.
        """
        for _, node in reversed(self.nodes):
            np.add(node[lo:hi], array, out=array)


def rows(flat: np.ndarray, count: int, floats: int) -> list[np.ndarray]:
    """Consecutive pieces of `floats` floats; none if they are empty."""
    return [flat[i * floats : (i + 1) * floats] for i in range(count if floats else 0)]


class TreeReduction(Phased):
    """The tree of plan.py: range p of the floats goes to rank p from everyone (one all-to-all),
    is added there in the tree's order by a kernel, and comes back to everyone (one
    all-gather; left out if `scatter`).
    """

    in_place = True

    def _prepare(self) -> None:
        super()._prepare()
        x = self.exchange
        rank = self.comm.rank
        lo, hi = self.ranges[rank]
        partial_count = len(self.plan.partial)
        # one sum is sent from where it is: its ranges are already in the order of the ranks
        self._send = self.result if partial_count == 1 else self._take(partial_count * self.floats)
        self._send_counts = [partial_count * (b - a) for a, b in self.ranges]
        self._receive_counts = [len(ns) * (hi - lo) for ns in x.nodes]
        self._receive = self._take(sum(self._receive_counts))
        self._adder = adder(rows(self._receive, sum(map(len, x.nodes)), hi - lo), x.adds)
        self._out = self.comm.all_to_all_v_init(
            self._send, self._send_counts, self._receive, self._receive_counts
        )
        self.phases = (self._hand_out, self._add if self.scatter else self._gather)
        if not self.scatter:
            self._back = self.lanes.lane(self.comm, 1).all_gather_v_init(self.result, self.ranges)

    def _hand_out(self) -> Request:
        if len(self.plan.partial) > 1:
            views = [
                self.buffers[buffer, a:b] for a, b in self.ranges for _, buffer in self.plan.partial
            ]
            np.concatenate(views, out=self._send)
        self.bytes_sent += 4 * (len(self._send) - self._send_counts[self.comm.rank])
        return self._out.start()

    def _add(self) -> None:
        self._adder.run()
        a, b = self.ranges[self.comm.rank]
        self.result[a:b] = self._receive[: b - a]

    def _gather(self) -> Request:
        self._add()
        a, b = self.ranges[self.comm.rank]
        self.bytes_sent += 4 * (b - a) * (self.comm.size - 1)
        return self._back.start()


class LibraryReduction(Phased):
    """The library's own all-reduce over the sums of the ranks: the order of additions, so the
    bits, are its own.
    """

    def _prepare(self) -> None:
        super()._prepare()
        self.phases = (self._reduce,)

    def _reduce(self) -> Request:
        self._add_up(self.result)
        # of a ring; the library may differ
        self.bytes_sent += 8 * self.floats * (self.comm.size - 1) // self.comm.size
        return self.comm.all_reduce(self.result, out=self.result, wait=False)


class ServerReduction(TreeReduction):
    """`parameter_server`, synchronous: ranks 0 to k - 1 each add a range of everyone's gradients
    and send it back.

    With one server all traffic goes through one rank, with as many as ranks this is `tree`. Same
    bits as `tree`.
    """

    def _prepare(self) -> None:
        servers = self.strategy.servers if self.strategy else 1
        self.ranges = ranges(self.floats, servers) + ((self.floats, self.floats),) * (
            self.comm.size - servers
        )
        super()._prepare()
