"""Sums between processes whose workers are GPUs: how the tree of docs/determinism.md is
completed across ranks.

Each worker has complete nodes of the tree for its range of the floats (`GpuRange`). Two ways lead
to the whole sum:

    StagedExchange   through pinned host memory and a reduction of parallel/: every kind of
                     reduction, every transport
    DirectExchange   from device to device (comm/device.py), added up on the devices: reduction
                     "tree" alone

Both add along the same tree, so the bits are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...comm import Communicator
from ...comm import device as devices
from ...core.gpu_native import COMPUTE, COPY, Event
from ...errors import CollectiveError
from ...parallel import plan as planning
from ...parallel import strategy

if TYPE_CHECKING:
    from .group import DeviceGroup
    from .runner import GpuRunner

PIECE_FLOATS = 1 << 20  # floats that go from device to host, over the network and back at a time


class GpuRange(NamedTuple):
    """Where a worker has floats lo .. hi-1 of the sums of this process's nodes.

    Float x of node i is at address + 4 (stride rows[i] + x - lo) in device memory.
    """

    address: int
    stride: int
    rows: tuple[int, ...]
    lo: int
    hi: int

    def address_of(self, i: int, x: int) -> int:
        """Address of float x of node i."""
        return self.address + 4 * (self.stride * self.rows[i] + x - self.lo)


class GpuExchange:
    """Completes the sums of a runner; made by all ranks at the same time, used once per step."""

    reductions: Sequence[Any]  # what counts the bytes that it sends

    def __init__(self, runner: GpuRunner, comm: Communicator) -> None:
        self.runner = runner
        self.comm = comm
        self.workers = runner.group.workers

    def run(self) -> list[int]:
        """Sees to it that the whole sum is, or arrives in the COMPUTE queue, at these addresses,
        one per worker.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Waits until nothing that the devices still do waits for another rank.

        Raises CollectiveError.
        """

    def _result(self, w: int) -> int:
        return self.workers[w].area(
            f"result {self.runner.floats}", 4 * self.runner.floats, clear=True
        )


def make(runner: GpuRunner, comm: Communicator, run: planning.Run) -> GpuExchange:
    """The exchange of a runner between the ranks of `comm`; a collective call.

    run: shards of this process.
    """
    chosen = runner.layout.reduction
    plain = chosen.reduction == "tree" and chosen.compression is None
    if devices.is_requested(comm):
        if plain:
            links = _links(runner, comm)
            if links:
                return DirectExchange(runner, comm, links)
        elif runner.train:
            setting = (
                f"compression={chosen.compression!r}"
                if chosen.compression
                else f"reduction={chosen.reduction!r}"
            )
            _warn(
                runner,
                f"{setting} goes through the host: only reduction='tree' goes from GPU to GPU",
            )
    return StagedExchange(runner, comm, run)


_Links = Sequence[devices.DeviceTransport]
_links_by_group: weakref.WeakKeyDictionary[DeviceGroup, dict[Communicator, _Links]] = (
    weakref.WeakKeyDictionary()
)


def _links(runner: GpuRunner, comm: Communicator) -> _Links:
    """A transport per worker, made when it is first asked for; none if sums are to go through
    the host.
    """
    links_by_comm = _links_by_group.setdefault(runner.group, {})
    if comm not in links_by_comm:
        links, problem = devices.connect(comm, runner.group.gpus)
        if problem:
            _warn(runner, problem)
        links_by_comm[comm] = links
    return links_by_comm[comm]


def _warn(runner: GpuRunner, text: str) -> None:
    if text not in runner.ownership.warnings:
        runner.ownership.warnings.append(text)


class StagedExchange(GpuExchange):
    """From the devices through pinned memory into a reduction, and back to every device.

    The floats are cut into pieces: while one is sent, the next comes from the device and the one
    before goes back. What comes takes the COPY queue, what goes back COMPUTE, so a device does both
    at once. The host waits for every piece that comes, so a step ends with nothing left in the COPY
    queue, and the next may overwrite the sums.
    """

    def __init__(self, runner: GpuRunner, comm: Communicator, run: planning.Run) -> None:
        super().__init__(runner, comm)
        lay = runner.layout
        nodes = runner.meeting.nodes
        self.nodes = len(nodes)
        content = runner.content(whole_arena=True)
        compressed = lay.reduction.compression is not None  # it looks at all gradients at once
        size = runner.floats if compressed else PIECE_FLOATS
        self.pieces = [(lo, min(lo + size, runner.floats)) for lo in range(0, runner.floats, size)]
        plan = planning.Plan(
            runner.shards,
            run,
            ((),),
            (),
            tuple((node, i) for i, node in enumerate(nodes)),
            max(self.nodes, 1),
        )
        self.reductions = [
            strategy.make(
                lay.reduction,
                comm,
                plan,
                hi - lo,
                lay.workers,
                content=content if compressed else None,
            )
            for lo, hi in self.pieces
        ]
        self._computed = [w.gpu.event() for w in self.workers]
        self._came: list[list[Event]] = [[w.gpu.event() for w in self.workers] for _ in self.pieces]

    def run(self) -> list[int]:
        runner = self.runner
        workers = self.workers
        rows = max(self.nodes, 1)
        # pinned memory of one device is that of all; the step before has ended, so nothing reads or
        # writes it
        out = (
            workers[0]
            .pinned("out", 4 * runner.floats * rows)
            .view(np.float32)
            .reshape(rows, runner.floats)
        )
        back = workers[0].pinned("in", 4 * runner.floats).view(np.float32)
        parts = runner.gathered()
        for event in self._computed:
            event.record(COMPUTE)
            event.hold(COPY)
        for (lo, hi), events in zip(self.pieces, self._came, strict=True):
            for worker, part, event in zip(workers, parts, events, strict=True):
                a = max(lo, part.lo)
                b = min(hi, part.hi)
                for i in range(len(part.rows) if b > a else 0):
                    worker.gpu.download(out[i, a:b], part.address_of(i, a), COPY)
                event.record(COPY)
        results = [self._result(w) for w in range(len(workers))]
        sent = 0  # pieces that are on their way back
        for k, (lo, hi) in enumerate(self.pieces):
            for event in self._came[k]:
                event.wait()
            reduction = self.reductions[k]
            for i in range(self.nodes):
                reduction.buffers[i] = out[i, lo:hi]
            reduction.start()
            while sent < k and self.reductions[sent].poll():
                self._send_back(sent, back, results)
                sent += 1
        for k in range(sent, len(self.pieces)):
            self._send_back(k, back, results)
        return results

    def _send_back(self, k: int, back: np.ndarray, results: Sequence[int]) -> None:
        lo, hi = self.pieces[k]
        back[lo:hi] = self.reductions[k].finish()
        for worker, result in zip(self.workers, results, strict=True):
            worker.gpu.upload(result + 4 * lo, back[lo:hi], COMPUTE)


class DirectExchange(GpuExchange):
    """The tree completed from device to device: an all-to-all, additions and an all-gather, all
    in COMPUTE queues.

    Worker w of every rank has range w of the floats (runner.py); these are cut again between the
    ranks, and rank p adds piece p of every worker's range. Nothing here waits if the transport does
    not.

    links: of each worker to those of the same number in the other ranks.
    """

    def __init__(self, runner: GpuRunner, comm: Communicator, links: _Links) -> None:
        super().__init__(runner, comm)
        self.links = links
        x = planning.exchange(runner.shards, comm.size, runner.layout.workers, runner.floats)
        assert x.nodes[comm.rank] == runner.meeting.nodes
        # number of each rank's first node
        self._first = [sum(map(len, x.nodes[:p])) for p in range(comm.size + 1)]
        self._adds = [(add.a, add.b) for add in x.adds]
        total = self._first[-1]
        self._at_once = self._adds == tree_adds(total)
        self.reductions = (self,)
        self.bytes_sent = self.bytes_plain = 0
        self._exchanged: devices.Exchanged | None = None

    def run(self) -> list[int]:
        parts = self.runner.gathered()
        results = [self._result(w) for w in range(len(self.workers))]
        self._exchanged = devices.Exchanged(
            self.comm, self.links, f"exchange of {self.runner.floats} float32 on GPUs"
        )
        try:
            self._run(parts, results)
        except CollectiveError as error:
            self._exchanged.broke(error)
            raise
        self._exchanged.mark()
        return results

    def _run(self, parts: Sequence[GpuRange], results: Sequence[int]) -> None:
        cuts = []
        for w, part in enumerate(parts):
            cut = [
                (part.lo + a, part.lo + b)
                for a, b in planning.ranges(part.hi - part.lo, self.comm.size)
            ]
            cuts.append(cut)
            self._hand_out(w, part, cut, results[w])
        for w, cut in enumerate(cuts):
            self._all_gather(w, cut, results[w])
        for q, worker in enumerate(self.workers):
            for p, part in enumerate(parts):
                if p != q and part.hi > part.lo:
                    offset = 4 * part.lo
                    worker.gpu.take(
                        self.workers[p].gpu,
                        results[q] + offset,
                        results[p] + offset,
                        4 * (part.hi - part.lo),
                    )

    def _hand_out(self, w: int, part: GpuRange, cut: Sequence[planning.Run], result: int) -> None:
        """Piece p of all nodes goes to rank p, which adds them up into its result."""
        rank = self.comm.rank
        worker = self.workers[w]
        a, b = cut[rank]
        n = b - a
        total = self._first[-1]
        area = worker.area("exchange", max(4 * n * total, 16))
        local_nodes = range(len(part.rows))
        sends = [
            (p, part.address_of(i, c), 4 * (d - c))
            for p, (c, d) in enumerate(cut)
            if p != rank
            for i in local_nodes
            if d > c
        ]
        receives = [
            (p, area + 4 * n * j, 4 * n)
            for p in range(self.comm.size)
            if p != rank
            for j in range(self._first[p], self._first[p + 1])
            if n
        ]
        for i in local_nodes:
            if n:
                worker.gpu.move(
                    area + 4 * n * (self._first[rank] + i), part.address_of(i, a), 4 * n
                )
        self._exchange(w, sends, receives)
        if not n:
            return
        to = result + 4 * a
        if total == 1:
            worker.gpu.move(to, area, 4 * n)
        elif self._at_once:
            worker.gpu.tree_sum(to, area, n, total, n)
        else:
            for k, (i, j) in enumerate(self._adds):
                address = area + 4 * n * i
                worker.gpu.tree_sum(
                    to if k == len(self._adds) - 1 else address, address, n * (j - i), 2, n
                )

    def _all_gather(self, w: int, cut: Sequence[planning.Run], result: int) -> None:
        """Sends what each rank has added to all others."""
        rank = self.comm.rank
        a, b = cut[rank]
        peers = [p for p in range(self.comm.size) if p != rank]
        sends = [(p, result + 4 * a, 4 * (b - a)) for p in peers if b > a]
        receives = [
            (p, result + 4 * c, 4 * (d - c)) for p, (c, d) in enumerate(cut) if p != rank and d > c
        ]
        self._exchange(w, sends, receives)

    def _exchange(
        self, w: int, sends: list[devices.Message], receives: list[devices.Message]
    ) -> None:
        self.bytes_sent += sum(size for _, _, size in sends)
        self.bytes_plain = self.bytes_sent
        self.links[w].exchange(sends, receives)

    def wait(self) -> None:
        if self._exchanged is not None:
            exchanged = self._exchanged
            self._exchanged = None
            exchanged.wait()


def tree_adds(n: int) -> list[tuple[int, int]]:
    """The additions, (to, from), of a tree over n leaves that lie side by side, as kernels'
    `tree_sum` makes them.
    """
    adds, _ = planning.combine(tuple((i, 1) for i in range(n)), n)
    return [(add.a, add.b) for add in adds]
