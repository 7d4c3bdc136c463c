"""A step on the GPUs of this process: launches for all shards, then sums between devices and
between processes.

run() only enqueues: what the step needs from the host goes in one copy, every op is one launch for
all shards of a piece, gradients are added along the tree on the device, devices exchange ranges of
their sums, and processes exchange through pinned memory in pieces, so that copying, sending and
adding overlap. The host waits once, when it is asked for the sums.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from ...compile import gpus
from ...core import native as host
from ...core.gpu_native import COMPUTE, COPY, Gpu, GpuStep, StepBlock, library
from ...core.program import plan_memory, serialize
from ...data import ArrayDataset, Batch
from ...errors import DeviceError, NumericsError
from ...optim import Update
from ...parallel import plan as planning
from ..runner import EXACT, Runner, RunnerInputs
from ..sums import Sums
from . import plan as pieces
from . import reduction, rewrite
from .graph import Graph
from .group import DeviceGroup, Placed, Worker

# Of the memory that is free before the data set is placed (which takes at most group.DATA_SHARE of
# it) what the shards of a piece may take.
MEMORY_SHARE = 0.4
# of a launch; that are added in one
MAX_SHARDS = 65535
MAX_SUMS = 8191


class GpuSums(Sums):
    """The same, but the numbers are on their way: reading one waits for the step."""

    def __init__(self, runner: GpuRunner, results: list[int], updates: list[Update]) -> None:
        self._runner = runner
        self.results = results
        self.updates = updates
        self.samples_address = results[0] + 4 * (runner.stats_at + 1)
        self._values: np.ndarray | None = None

    def fetch(self) -> bool:
        """Waits for the step; whether all numbers that were checked are finite."""
        self._values, ok = self._runner.fetch(self.results[0])
        return ok

    @property
    def values(self) -> list[float]:  # type: ignore[override]
        """Returns them as Sums has them."""
        if self._values is None:
            self.fetch()
        assert self._values is not None
        return self._values.tolist()

    @property
    def samples(self) -> float:
        """How many there are; known before the step has ended, but where float32 cannot count
        them.
        """
        n = self._runner.samples
        return float(n) if n <= EXACT else self.values[1]


class GpuRunner(Runner):
    """All shards of this process on its GPUs, for batches of one size."""

    group: DeviceGroup

    def __init__(self, inputs: RunnerInputs) -> None:
        super().__init__(inputs)
        assert inputs.team is not None
        self.group = inputs.team
        lay = self.layout
        lib = host.library()
        arena = self.arena
        comm = self.groups.dp
        self.floats = (arena.size if self.train else 0) + lib.stats
        self.stats_at = self.floats - lib.stats
        records = rewrite.fuse(self.programs[0].records)
        rewrite.check(records)
        self.work_floats = plan_memory(records) // 4
        self.once = rewrite.written_once(records, arena)
        # by id; memory, and its copies by worker
        self._constants: dict[int, tuple[Any, list[int]]] = {}
        self._tables = [
            serialize(
                records,
                arena,
                [],
                self._locate_floats,
                library(),
                lambda memory, w=w: self._constant(memory, w),
            )
            for w in range(len(self.group.workers))
        ]
        self.runs = [
            planning.share(self.shards, comm.size * lay.workers, comm.rank * lay.workers + w)
            for w in range(lay.workers)
        ]
        process_run = (self.runs[0][0], self.runs[-1][1])
        max_fold = pieces.FOLD if self.once else 1
        limit = self._limit(max_fold)
        self.plans = [pieces.worker(run, self.shards, limit, max_fold) for run in self.runs]
        self.meeting = pieces.meeting([p.nodes for p in self.plans], self.shards)
        self.ranges = planning.ranges(self.floats, lay.workers)
        self._updates: list[Update] = []
        self._results: list[int] = []
        self._exchange = reduction.make(self, comm, process_run) if comm.size > 1 else None
        self.reductions = () if self._exchange is None else self._exchange.reductions
        self._batches = [
            _Batches(worker, run, self.shard_size, self.samples)
            for worker, run in zip(self.group.workers, self.runs, strict=True)
        ]
        self._placed: list[Placed | None] = []
        self._prepared: list[_Prepared | None] = [None] * lay.workers

    def _constant(self, memory: Any, w: int) -> int:
        """A copy on worker w's device of what a program names by address, such as the zeros of a
        missing bias.
        """
        if id(memory) not in self._constants:
            addresses = [worker.gpu.allocate(memory.array.nbytes) for worker in self.group.workers]
            for worker, address in zip(self.group.workers, addresses, strict=True):
                worker.gpu.upload(address, memory.array)
                worker.gpu.synchronize()
            self._constants[id(memory)] = memory, addresses
        return self._constants[id(memory)][1][w]

    def _limit(self, max_fold: int) -> int:
        """Shards that fit into a device at a time, and into a launch; the same on all workers of
        this process.
        """
        per_shard = 4 * (self.work_floats + self.floats)
        limit = min(self.shards, MAX_SHARDS, MAX_SUMS * max_fold)
        lay = self.layout
        for worker in self.group.workers:
            on_same_gpu = sum(peer.gpu.number == worker.gpu.number for peer in self.group.workers)
            sharing = on_same_gpu * -(-lay.comm.local_size * lay.workers // max(gpus.count(), 1))
            free = worker.gpu.memory()[0] + worker.nbytes
            limit = min(limit, max(int(MEMORY_SHARE * free / sharing / per_shard), 1))
        return limit

    def use(self, data: ArrayDataset) -> None:
        """Brings the data set to the devices, or gets ready to bring its batches."""
        self._placed = self.group.place(data, self.samples)
        self.data = data

    @property
    def looks_ahead(self) -> bool:
        """Returns whether it helps to name the next batch (`upcoming`)."""
        return None in self._placed

    def run(self) -> Any:
        """Enqueues the step; see GpuSums."""
        if self.group.pending is not None:
            self.group.pending.fetch()  # its block and rows are still being read
        self.group.write()
        self._results = []
        for w, (worker, plan) in enumerate(zip(self.group.workers, self.plans, strict=True)):
            self._compute(w, worker, plan, self._batches[w].bring(self.batch, self._placed[w]))
        if len(self.group.workers) > 1:
            self._meet()
        else:
            self._results = [self._sums(0)]
        if self._exchange is not None:
            self._results = self._exchange.run()
        self._look_ahead()
        updates = [self.group.update(0, self._results[0])] if self.train else []
        if self._updates and updates == self._updates:
            # the same list: who has prepared something for it finds it again
            updates = self._updates
        self._updates = updates
        self.group.pending = sums = GpuSums(self, self._results, updates)
        return sums

    def _look_ahead(self) -> None:
        """Brings the next batch, if it is one for this runner, where its data set is not on the
        device.
        """
        following = self.upcoming
        if following is None or len(following.indices) != self.samples:
            return
        same_dataset = following.dataset is self.data
        if not same_dataset and (
            len(following.dataset) > self.samples or following.dataset.form != self.form
        ):
            return
        for batches, placed in zip(self._batches, self._placed, strict=True):
            if placed is None or not same_dataset:
                batches.prefetch(following)

    def _sums(self, w: int) -> int:
        """Address of the sums of worker w's nodes.

        Areas that hold gradients go by their layout: what no kernel writes there is zero from the
        start and stays so.
        """
        return self.group.workers[w].area(
            f"sums {self.floats}", 4 * self.floats * max(self.plans[w].sums, 1), clear=True
        )

    def _compute(
        self, w: int, worker: Worker, plan: pieces.WorkerPlan, addresses: tuple[int, ...]
    ) -> None:
        """Enqueues worker w's shards. `addresses`: see _Batches.bring."""
        gpu = worker.gpu
        params = worker.host_params
        params.flag = 1
        params.divisor = self.samples * self.context.loss_scale  # of gradients that are not clipped
        # a last batch may have fewer shards than there are workers; it takes the others' step
        if not plan.nodes:
            gpu.upload(
                worker.divisor,
                worker.host_block[StepBlock.divisor.offset : StepBlock.unused.offset],
            )
            return
        prepared = self._prepared[w]
        if prepared is None or prepared.generation != worker.generation:
            prepared = self._prepared[w] = self._prepare(w, worker, plan)
        for k, piece in enumerate(prepared.pieces):
            if isinstance(piece, tuple):  # two sums
                gpu.tree_sum(*piece)
                continue
            if k:
                gpu.synchronize()  # the block is being read
            if worker.written_for != (self, k, addresses):
                worker.written_for = (self, k, addresses)
                context = params.context
                action = piece.action
                first = action.first * self.shard_size
                context.seed = self.context.seed
                context.first = first
                context.samples = self.samples
                context.shard_size = self.shard_size
                images, arrays, rows, context.scale, context.shift, context.bytes = addresses
                context.images = images
                context.arrays = arrays
                context.rows = rows + 8 * (first - self._batches[w].first)
            params.context.step = self.context.step
            params.context.loss_scale = self.context.loss_scale
            gpu.upload(worker.block, worker.host_block)
            piece.enqueue(self.group)

    def _prepare(self, w: int, worker: Worker, plan: pieces.WorkerPlan) -> _Prepared:
        """Sets what does not change from step to step, while the worker's areas stay where they
        are.
        """
        size = 4 * self.floats
        sums = self._sums(w)
        grads = worker.area(f"gradients {self.floats}", size * plan.pieces, clear=True)
        work = worker.area("work", 4 * self.work_floats * plan.shards)
        table = self._tables[w]
        prepared: list[_Piece | tuple[int, ...]] = []
        scratch_bytes = 0
        for action in plan.actions:
            if isinstance(action, planning.Action):
                address = sums + size * action.a
                prepared.append(
                    (address, address, self.floats * (action.b - action.a), 2, self.floats)
                )
                continue
            to = sums + size * action.to
            buffers = -(-action.shards // action.fold)
            step = GpuStep(
                program=table.ctypes.data,
                records=len(table),
                params=self.group.parameters.addresses[w][0],
                grads=to if buffers == 1 else grads,
                grad_floats=self.floats,
                work=work,
                work_floats=self.work_floats,
                context=worker.block,
                flag=worker.flag,
                shards=action.shards,
                fold=action.fold,
                accumulate=int(not self.once),
            )
            scratch_bytes = max(scratch_bytes, 4 * worker.gpu.scratch(step))
            prepared.append(_Piece(worker.gpu, action, step, to, buffers))
        scratch = worker.area("scratch", scratch_bytes) if scratch_bytes else 0
        for piece in prepared:
            if isinstance(piece, _Piece):
                piece.step.scratch = scratch
        return _Prepared(worker.generation, prepared)

    def _meet(self) -> None:
        """Worker p adds range p of the sums of all; a process alone hands the whole back to
        everyone.
        """
        workers = self.group.workers
        meeting = self.meeting
        places = [
            (q, self._sums(q) + 4 * self.floats * i)
            for q, p in enumerate(self.plans)
            for i in range(len(p.nodes))
        ]
        self._results = [
            w.area(f"result {self.floats}", 4 * self.floats, clear=True) for w in workers
        ]
        # by worker: address of its ranges of all sums, floats of one
        self._range_areas: list[tuple[int, int]] = []
        for p, (lo, hi) in enumerate(self.ranges):
            n = hi - lo
            area = workers[p].area("met", max(4 * n * len(places), 16))
            self._range_areas.append((area, n))
            if not n:
                continue
            for i, (q, address) in enumerate(places):
                workers[p].copy(workers[q], area + 4 * n * i, address + 4 * lo, 4 * n)
            for add in meeting.adds:
                a = area + 4 * n * add.a
                workers[p].gpu.tree_sum(a, a, n * (add.b - add.a), 2, n)
        if self._exchange is not None:
            return
        root = meeting.places[0]
        for q, worker in enumerate(workers):
            for p, (lo, hi) in enumerate(self.ranges):
                if hi > lo:
                    area, n = self._range_areas[p]
                    worker.copy(workers[p], self._results[q] + 4 * lo, area + 4 * n * root, 4 * n)

    def gathered(self) -> list[reduction.GpuRange]:
        """Where each worker has its range of the sums of this process's nodes, once they have
        met.
        """
        if len(self.group.workers) == 1:
            nodes = tuple(range(len(self.meeting.nodes)))
            return [reduction.GpuRange(self._sums(0), self.floats, nodes, 0, self.floats)]
        return [
            reduction.GpuRange(address, n, self.meeting.places, lo, hi)
            for (address, n), (lo, hi) in zip(self._range_areas, self.ranges, strict=True)
        ]

    def fetch(self, result: int) -> tuple[np.ndarray, bool]:
        """Waits for the step; its statistics, and whether the numbers checked are finite, on the
        first worker.
        """
        lib = host.library()
        self.group.pending = None
        for w, worker in enumerate(self.group.workers):
            back = worker.pinned("back", 4 * lib.stats + 4)
            if w == 0:
                worker.gpu.download(back[: 4 * lib.stats], result + 4 * self.stats_at)
            worker.gpu.download(back[4 * lib.stats :], worker.flag)
        if self._exchange is not None:
            self._exchange.wait()
        for worker in self.group.workers:
            worker.gpu.synchronize()
        backs = [worker.pinned("back", 4 * lib.stats + 4) for worker in self.group.workers]
        flags = {bool(back[4 * lib.stats :].view(np.int32)[0]) for back in backs}
        if len(flags) > 1:
            raise NumericsError(
                "[gpu] workers disagree whether a step is finite: a memory or hardware error"
            )
        back = backs[0]
        finite = flags.pop()
        return back[: 4 * lib.stats].view(np.float32).copy(), finite


class _Prepared(NamedTuple):
    """Work that a worker enqueues per step: pieces, and (arguments of tree_sum) additions of two
    sums.
    """

    generation: int  # of the worker's areas
    pieces: list[Any]


class _Piece:
    """The launches of one piece: launch by launch at first, which loads the kernels, then as a
    graph.
    """

    def __init__(
        self, gpu: Gpu, action: pieces.ComputeNode, step: GpuStep, to: int, buffers: int
    ) -> None:
        self._gpu = gpu
        self.action = action
        self.step = step
        self._to = to
        self._buffers = buffers
        self._graph: Graph | None = None
        self._runs = 0

    def enqueue(self, group: DeviceGroup) -> None:
        if self._graph is not None:
            self._graph.launch()
            return
        self._runs += 1
        if self._runs > 1 and group.graphs:
            try:
                self._graph = Graph(self._gpu, self._launches)
            except DeviceError as problem:
                group.graphs = False
                group.notes.append(f"{problem}; kernels are launched one by one")
            else:
                self._graph.launch()
                return
        self._launches()

    def _launches(self) -> None:
        s = self.step
        if s.accumulate:
            self._gpu.clear(s.grads, 4 * s.grad_floats * self._buffers)
        self._gpu.run(s)
        if self._buffers > 1:
            self._gpu.tree_sum(self._to, s.grads, s.grad_floats, self._buffers, s.grad_floats)


class _Batches:
    """Brings what a worker needs of a batch to its device: numbers of its samples, and these if
    they are not there.
    """

    def __init__(self, worker: Worker, run: tuple[int, int], shard_size: int, samples: int) -> None:
        self.worker = worker
        self.first = min(run[0] * shard_size, samples)
        self.count = min(run[1] * shard_size, samples) - self.first

    def bring(self, batch: Batch, placed: Placed | None) -> tuple[int, ...]:
        """For this batch: addresses on the device of images, arrays, rows, scale and shift;
        `bytes` (Context).
        """
        if placed is not None:
            pinned = self.worker.pinned("rows", 8 * self.count)
            pinned.view(np.int64)[:] = batch.indices[self.first : self.first + self.count]
            rows = self.worker.area("rows", 8 * self.count)
            self.worker.gpu.upload(rows, pinned)
            return (placed.images, placed.arrays, rows, placed.scale, placed.shift, placed.bytes)
        prefetched = self.worker.prefetched
        if prefetched is None or prefetched[0] is not self or prefetched[1] is not batch:
            self.prefetch(batch)
        addresses: tuple[int, ...] = self.worker.prefetched[2]
        self.worker.prefetched = None
        self.worker.events[self.worker.turn].hold(COMPUTE)
        return addresses

    def prefetch(self, batch: Batch) -> None:
        """Gathers a batch in pinned memory and sends it on the copy queue, while the step before
        is computed.
        """
        worker = self.worker
        data = batch.dataset
        n = self.count
        turn = worker.turn = 1 - worker.turn
        indices = batch.indices[self.first : self.first + n]
        sized_arrays = [
            (a, math.prod((n, *a.shape[1:])) * a.dtype.itemsize) for a in data.all_arrays
        ]
        # all goes in one copy: numbers of samples, scale and shift of the channels, addresses of
        # the arrays, the arrays
        sizes = [
            8 * n,
            data.scale.nbytes,
            data.shift.nbytes,
            8 * len(sized_arrays),
            *(size for _, size in sized_arrays),
        ]
        rows, scale, shift, table, *places = itertools.accumulate(
            (-(-s // 16) * 16 for s in sizes), initial=0
        )
        area = worker.area(f"batch {turn}", places[-1])
        words = worker.pinned(f"batch {turn}", places[-1])
        worker.events[turn].wait()  # the last copy from this pinned memory is done
        words[: 8 * n].view(np.int64)[:] = np.arange(n)
        words[scale:][: data.scale.nbytes].view(np.float32)[:] = data.scale
        words[shift:][: data.shift.nbytes].view(np.float32)[:] = data.shift
        words[table:][: 8 * len(sized_arrays)].view(np.int64)[:] = [
            area + offset for offset in places[:-1]
        ]
        for (a, size), offset in zip(sized_arrays, places, strict=False):
            np.take(
                a,
                indices,
                axis=0,
                out=words[offset : offset + size].view(a.dtype).reshape(n, *a.shape[1:]),
            )
        worker.gpu.upload(area, words, COPY)
        worker.events[turn].record(COPY)
        arrays = area + table + 8 * data.normalised  # the first is no array that is gathered
        first = area + places[0]
        addresses = (
            first,
            arrays,
            area + rows,
            area + scale,
            area + shift,
            int(sized_arrays[0][0].dtype.itemsize == 1),
        )
        worker.prefetched = (self, batch, addresses)
