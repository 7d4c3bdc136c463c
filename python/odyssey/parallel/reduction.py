"""Reductions between processes: they make one sum of the partial sums of the shards, on every rank
or on the owner of a part.

A reduction is created once for a plan and a range of parameters, and used once in each step. The
engine fills `buffers` and calls `start()` when its shards are computed. Then it may compute
something else and call `poll()` now and then. `finish()` returns the sum. This file has the base
class and the simplest kinds. strategy.py lists all kinds, and docs/strategies.md compares them.
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
from .plan import VECTOR, Action, Plan, Run, exchange, ranges

if TYPE_CHECKING:
    from .strategy import Content, Strategy


class Reduction:
    """Completes the sums of one plan over `floats` floats.

    This class is for one process: there is nothing to add. It is also the base of the other kinds.

    Args:
        comm: the processes whose sums are added.
        plan: what this process computes.
        floats: the floats of each buffer.
        workers: the workers of each process.
        scatter: True: each rank gets only its range of the sum.
        storage: float32 memory to work in, of at least `floats_needed`. None: it is allocated.
        strategy: the settings, for kinds that have some.
        content: a description of the floats, for kinds that need it.

    Attributes:
        buffers: (plan.buffers, floats) float32, to which the engine writes the sums of shards.
        result: (floats,), the sum over all shards, after `finish()` and until `buffers` change.
        own: the range of `result` that is valid: all of it, or this rank's range if `scatter`.
        ranges: the ranges of all ranks.
        bytes_sent: the bytes that this rank has sent so far.
        bytes_wire: the part of `bytes_sent` that went to other machines, if the kind counts it.
        bytes_plain: the bytes that the reduction "tree" would have sent.
        floats_needed: the floats of memory that the reduction works in.
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
        """Returns the memory of `buffers`."""
        return self._take(self.plan.buffers * self.floats).reshape(self.plan.buffers, self.floats)

    def _take(self, floats: int) -> np.ndarray:
        """Returns the next `floats` floats of the storage, or new memory if there is no storage.

        The memory starts on a vector boundary.
        """
        start = self.floats_needed
        self.floats_needed += -(-floats // VECTOR) * VECTOR
        if self._storage is None:
            return native.aligned(floats)
        return self._storage[start : start + floats]

    @property
    def bytes_plain(self) -> int:
        """The bytes that the reduction "tree" would have sent."""
        return self.bytes_sent

    def _prepare(self) -> None:
        """Allocates memory and plans transfers. The constructor calls it."""
        _, buffer = self.plan.partial[0]
        self.result = self.buffers[buffer]

    def start(self) -> None:
        """Starts to send this rank's partial sums. Don't write to `buffers` before `finish()`."""

    def poll(self) -> bool:
        """Advances the transfer without waiting. Returns True if the reduction is complete."""
        return True

    def finish(self) -> np.ndarray:
        """Waits until the reduction is complete, and returns `result`."""
        return self.result

    def _add_up(self, out: np.ndarray) -> np.ndarray:
        """Writes the sum of this rank's partial sums to `out`, and returns it.

        If `out` is shorter than a buffer, it gets the first floats. The additions are in order, not
        along the tree. So this is only for kinds whose results differ from the tree's.
        """
        out[:] = 0
        for _, buffer in self.plan.partial:
            out += self.buffers[buffer, : out.size]
        return out


class PhaseCommunicators:
    """Resources that the reductions over one communicator share.

    Each phase of a reduction has a separate communicator of the same ranks (`lane`). All ranks must
    make the calls on a communicator in the same order, but the end of a phase depends on timing. On
    the communicator of one phase, reductions keep the order in which they were started.

    Attributes:
        under_way: the reductions that were started and aren't complete, in order.
        tags: numbers for messages from rank to rank.
        turns: numbers of reductions in the order of their starts.
    """

    _of: weakref.WeakKeyDictionary[Communicator, PhaseCommunicators] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.under_way: deque[Phased] = deque()
        self.tags = itertools.count()
        self.turns = itertools.count()
        self._extra_lanes: list[Communicator] = []

    @classmethod
    def of(cls, comm: Communicator) -> PhaseCommunicators:
        """Returns the resources of a communicator, and creates them on the first call."""
        return cls._of.setdefault(comm, cls())

    def lane(self, comm: Communicator, phase: int) -> Communicator:
        """Returns the communicator of a phase. The first phase (0) has `comm`.

        A call that needs a new communicator is collective.
        """
        while len(self._extra_lanes) < phase:
            part = comm.group(range(comm.size))
            assert part is not None
            self._extra_lanes.append(part)
        return self._extra_lanes[phase - 1] if phase else comm


class Phased(Reduction):
    """A reduction in phases. Each phase starts one transfer after the previous transfer has ended.

    A subclass sets `phases`: functions that start a transfer and return its request, or None if
    there is nothing to wait for. Phase p of a reduction starts after phase p of all reductions that
    were started earlier.
    """

    phases: Sequence[Callable[[], Request | None]] = ()
    in_place = False  # True: the result is written over the first partial sum, once that was sent

    def _prepare(self) -> None:
        first_buffer = self.plan.partial[0][1] if self.plan.partial else 0
        self.result = self.buffers[first_buffer] if self.in_place else self._take(self.floats)
        self.lanes = PhaseCommunicators.of(self.comm)
        self._phase = -1  # the last phase that was started
        self._request: Request | None = None  # of this phase
        self._running = False
        self._turn = -1
        # Start in nanoseconds and bytes sent before, if a timeline is recorded.
        self._timeline_start: tuple[int, int] | None = None

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
        # Reductions that were started earlier are finished as well, even if polls have completed
        # this one. Another rank may be waiting for their next transfer. Otherwise this rank might
        # not start it before it waits for the other rank in another call.
        under_way = self.lanes.under_way
        while under_way and under_way[0]._turn <= self._turn:
            under_way[0]._advance(wait=True)
        return self.result

    def _advance(self, *, wait: bool) -> None:
        """Starts further phases until a transfer isn't complete, or, if `wait`, until the end.

        A phase doesn't start before the same phase of reductions that were started earlier.
        """
        while self._running:
            if self._request is not None:
                if not wait and not self._request.test():
                    return
                self._request.wait()  # raises the error of a failed transfer
            following = self._phase + 1
            if following == len(self.phases):
                self._running = False
                self._request = None
                if slot.listener is not None and self._timeline_start is not None:
                    start_ns, bytes_before = self._timeline_start
                    slot.listener.span(
                        "wire",
                        f"sum of {self.floats:,} floats",
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
    """Calls of one kernel, which run one after the other.

    The arguments of a call are blocks of memory (or addresses) of the host, then sizes.
    """

    def __init__(self, op: str, calls: Sequence[Sequence[Any]]) -> None:
        lib = native.library()
        self._calls = calls  # They keep the memory alive.
        self._records = np.zeros((len(calls), lib.record), np.int64)
        for row, arguments in zip(self._records, calls, strict=True):
            row[: 1 + len(arguments)] = encode(lib, op, arguments, lambda m: m.address)
        self._context = native.Context(what="sum")

    def run(self) -> None:
        """Runs the calls."""
        if len(self._records):
            native.library().run(self._records.ctypes.data, len(self._records), self._context)


def adder(pieces: Sequence[np.ndarray], actions: Sequence[Action]) -> Kernels:
    """Returns the kernel calls for the additions of a plan over arrays.

    An action adds array `b` to array `a`.
    """
    blocks = [OwnMemory(piece) for piece in pieces]
    calls = []
    for action in actions if pieces else ():
        total = blocks[action.a]
        addend = blocks[action.b]
        calls.append((total, total, addend, pieces[action.a].size))
    return Kernels("add", calls)


class RunningTreeSum:
    """The sum along the tree of plan.py of arrays that come one after the other.

    It works like a binary counter. `nodes` are the complete nodes as (number of arrays, sum), the
    large ones first. Two nodes of the same size become one.
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[int, np.ndarray]] = []
        self._free: list[np.ndarray] = []  # memory of nodes that were merged or dropped

    def push(self, array: np.ndarray) -> None:
        """Adds a copy of one more array."""
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
        """Drops all arrays."""
        self._free += [node for _, node in self.nodes]
        self.nodes = []

    def add_to(self, array: np.ndarray, lo: int, hi: int) -> None:
        """Adds the floats [lo, hi) of all nodes to `array`, the smallest node first.

        `array` holds the newest array, which isn't a node yet, or zeros.
        """
        for _, node in reversed(self.nodes):
            np.add(node[lo:hi], array, out=array)


def rows(flat: np.ndarray, count: int, floats: int) -> list[np.ndarray]:
    """Returns `count` consecutive pieces of `floats` floats, or none if they would be empty."""
    return [flat[i * floats : (i + 1) * floats] for i in range(count if floats else 0)]


class TreeReduction(Phased):
    """Adds the sums of the ranks along the tree of plan.py.

    All ranks send range p of their floats to rank p (an all-to-all). Rank p adds them in the tree's
    order with a kernel. Then all ranks get all ranges (an all-gather, which `scatter` omits).
    """

    in_place = True

    def _prepare(self) -> None:
        super()._prepare()
        exchange_plan = self.exchange
        lo, hi = self.ranges[self.comm.rank]
        range_floats = hi - lo
        partial_sums = len(self.plan.partial)
        if partial_sums == 1:
            # A single sum is sent from its buffer. Its ranges are already in the order of ranks.
            self._send = self.result
        else:
            self._send = self._take(partial_sums * self.floats)
        self._send_counts = [partial_sums * (end - start) for start, end in self.ranges]
        self._receive_counts = [len(nodes) * range_floats for nodes in exchange_plan.nodes]
        self._receive = self._take(sum(self._receive_counts))
        all_nodes = sum(map(len, exchange_plan.nodes))
        received_rows = rows(self._receive, all_nodes, range_floats)
        self._adder = adder(received_rows, exchange_plan.adds)
        self._all_to_all = self.comm.all_to_all_v_init(
            self._send, self._send_counts, self._receive, self._receive_counts
        )
        self.phases = (self._send_ranges, self._add_range if self.scatter else self._gather_sums)
        if not self.scatter:
            second_lane = self.lanes.lane(self.comm, phase=1)
            self._all_gather = second_lane.all_gather_v_init(self.result, self.ranges)

    def _send_ranges(self) -> Request:
        """Starts to send each rank its range of this rank's partial sums."""
        if len(self.plan.partial) > 1:
            views = [
                self.buffers[buffer, start:end]
                for start, end in self.ranges
                for _, buffer in self.plan.partial
            ]
            np.concatenate(views, out=self._send)
        self.bytes_sent += 4 * (len(self._send) - self._send_counts[self.comm.rank])
        return self._all_to_all.start()

    def _add_range(self) -> None:
        """Adds the received sums, and writes this rank's range of the result."""
        self._adder.run()
        lo, hi = self.ranges[self.comm.rank]
        # The sum is in node 0, which is the first row.
        self.result[lo:hi] = self._receive[: hi - lo]

    def _gather_sums(self) -> Request:
        """Adds this rank's range, and starts to exchange the ranges of the result."""
        self._add_range()
        lo, hi = self.ranges[self.comm.rank]
        self.bytes_sent += 4 * (hi - lo) * (self.comm.size - 1)
        return self._all_gather.start()


class LibraryReduction(Phased):
    """Adds the sums of the ranks with the all-reduce of the communicator's library.

    The library determines the order of additions, so results differ between numbers of ranks.
    """

    def _prepare(self) -> None:
        super()._prepare()
        self.phases = (self._start_all_reduce,)

    def _start_all_reduce(self) -> Request:
        """Adds up this rank's partial sums, and starts the all-reduce."""
        self._add_up(self.result)
        # The bytes are the ones of a ring. The library may send another number.
        self.bytes_sent += 8 * self.floats * (self.comm.size - 1) // self.comm.size
        return self.comm.all_reduce(self.result, out=self.result, wait=False)


class ServerReduction(TreeReduction):
    """`parameter_server`, synchronous: the first ranks each add a range of all gradients, and send
    the sum to all ranks.

    With one server all traffic goes through rank 0. With as many servers as ranks this is `tree`.
    The results are always the same as with `tree`.
    """

    def _prepare(self) -> None:
        servers = self.strategy.servers if self.strategy else 1
        empty_range = (self.floats, self.floats)
        other_ranks = self.comm.size - servers
        self.ranges = ranges(self.floats, servers) + (empty_range,) * other_ranks
        super()._prepare()
