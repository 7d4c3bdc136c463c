"""A step taken layer by layer: every segment of the program for all of this rank's shards before
the next one.

Used when more than one bucket is reduced: a bucket's reduction starts when its segment has run and
goes on while the backward pass does (overlap), and with ZeRO 2 and 3 its gradients and parameters
need to exist only then. The activations of all shards are kept for it; a step in one bucket
(direct.py) needs those of one shard per thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..core import native
from ..core.program import Record, plan_memory, serialize
from ..optim import Update
from ..parallel import plan as planning
from ..parallel import reduction
from ..parallel.buckets import STATS, segments
from .beginning import begin
from .progress import Progress
from .recompute import recompute
from .runner import Runner, RunnerInputs
from .sums import Sums


class BucketedRunner(Runner):
    """One batch size: native steps per segment, a reduction per bucket."""

    def __init__(self, inputs: RunnerInputs) -> None:
        super().__init__(inputs)
        lay = self.layout
        comm = self.groups.dp
        arena = self.arena
        parts = self.parts
        self.plan = planning.make(
            self.shards, comm.rank, comm.size, lay.workers, lay.threads, lay.counts(self.shards)
        )
        by_params = parts.partitioned or bool(lay.offload)
        programs: list[list[Record]] = []
        for program in self.programs:  # the same segments, as they differ in sizes alone
            # parameters would be brought twice
            records = program.records if by_params else recompute(program.records)
            records, self.segments = segments(records, arena, parts.buckets, by_params=by_params)
            programs.append(records)
        self._bucket_of = {
            arena.offsets[name]: i for i, b in enumerate(parts.buckets) for name in b.names
        }
        self._places = parts.places([s.params for s in self.segments]) if parts.partitioned else []
        local_shards = self.plan.run[1] - self.plan.run[0]
        work_bytes = max(plan_memory(records) for records in programs)
        self._work = self.storage("work", max(local_shards, 1) * work_bytes).reshape(
            max(local_shards, 1), work_bytes
        )
        self.work_bytes = self._work.nbytes
        self._reductions: dict[int, reduction.Reduction] = {}
        self._own_grads: dict[int, np.ndarray] = {}
        self._make_reductions()
        self._keep: list[Any] = []
        self._tables = np.array(self.plan.tables(), np.int64)  # of all segments: one runs at a time
        self._steps = [self._step(i, programs) for i in range(len(self.segments))]
        self.updates = self._updates() if self.train else []
        self.waited = 0.0  # seconds, for reductions after the last segment

    def _make_reductions(self) -> None:
        lib = native.library()
        parts = self.parts
        replicated = self.groups.dp.size > 1
        pooled = (parts.stage >= 2 and replicated) or bool(self.layout.offload)
        scatter = parts.stage > 0 and replicated

        def make(b: int, storage: np.ndarray | None = None) -> reduction.Reduction:
            options = {
                "scatter": scatter,
                "shared": not pooled,
                "storage": storage,
                "content": self.content(b),
            }
            return self._reduction(parts.buckets[b].floats, **options)

        grad_buckets = [s.grads for s in self.segments if s.grads not in (None, STATS)]
        # bucket -> what its reduction works in: buckets take turns with two
        self._pools: dict[int, np.ndarray] = {}
        if pooled and grad_buckets:
            # Of all buckets, as another program may write others. The largest does not always need
            # most: with some numbers of ranks this rank's range of a smaller one is longer.
            first = {bucket.floats: b for b, bucket in reversed(list(enumerate(parts.buckets)))}
            floats_needed = self._get_or_make(
                "needed", lambda: {n: make(b).floats_needed for n, b in sorted(first.items())}
            )
            for turn in (0, 1):
                taking = range(turn, len(parts.buckets), 2)
                if taking:
                    max_floats = max(floats_needed[parts.buckets[b].floats] for b in taking)
                    pool = self.storage(f"pool {turn}", 4 * max_floats).view(np.float32)
                    self._pools.update(dict.fromkeys(taking, pool))
        for b in grad_buckets:
            self._reductions[b] = self._get_or_make(
                ("bucket", b), lambda b=b: make(b, self._pools.get(b))
            )
            if pooled:
                a, z = parts.own[b]
                gradients = self.storage(f"gradients {b}", 4 * (z - a), self.arena.make)
                self._own_grads[b] = gradients.view(np.float32)
        self._pooled = pooled
        self.grad_bytes = (
            0 if pooled else sum(4 * r.floats_needed for r in self._reductions.values())
        )
        self._stats = self._get_or_make("statistics", lambda: self._reduction(lib.stats))
        self.marked = self._stats if replicated else None
        self.reductions = (*self._reductions.values(), self._stats)

    def _step(self, i: int, programs: list[list[Record]]) -> native.Step:
        s = self.segments[i]
        buffers = self._stats if s.grads in (None, STATS) else self._reductions[s.grads]
        step = native.Step(
            threads=len(self.plan.threads),
            tables=self._tables.ctypes.data,
            params=0 if self.parts.partitioned else self.arena.address(native.PARAMS),
            work=self._work.ctypes.data,
            work_bytes=self._work.strides[0],
            slots=len(self._work),
            base=self.plan.run[0],
            zero=int(s.grads is not None),
            buffers=buffers.buffers.ctypes.data,
            buffer_floats=buffers.floats,
            shard_size=self.shard_size,
            samples=self.samples,
        )
        arena = self.arena
        locate = self._locate(i)
        parts = [records[s.start : s.stop] for records in programs]
        tables = [serialize(records, arena, self._keep, locate) for records in parts]
        step.take(tables, begin(parts, tables, arena, locate, buffers.floats))
        return step

    def _locate(self, i: int) -> Any:
        """Where an offset of the arena (in floats) is for the records of segment i, from the
        base of its space: that of parameters which come and go is address 0.
        """
        parts = self.parts
        s = self.segments[i]
        size = self.arena.size

        def locate(space: int, offset: int) -> int:
            if space == native.GRADS:
                return offset - size if offset >= size else parts.buckets[s.grads].locate(offset)
            if not parts.partitioned:
                return offset
            b = self._bucket_of[offset]
            return parts.address(self._places[i].at[b]) // 4 + parts.buckets[b].locate(offset)

        return locate

    def _updates(self) -> list[Update]:
        updates = []
        missing = [
            hi - lo for b, (lo, hi) in enumerate(self.parts.own) if b not in self._reductions
        ]
        zeros = self.storage("no gradients", 4 * max(missing, default=0), self.arena.make)
        zeros[:] = 0
        self._keep.append(zeros)
        for b in range(len(self.parts.buckets)):
            lo = self.parts.own[b][0]
            if b in self._own_grads:
                grads = self._own_grads[b].ctypes.data
                origin = lo
            elif b in self._reductions:
                grads = self._reductions[b].result.ctypes.data
                origin = 0
            else:  # no parameter of this bucket has a gradient
                grads = zeros.ctypes.data
                origin = lo
            updates += self.parts.updates(b, lambda p, base=grads - 4 * origin: base + 4 * p.at)
        return updates

    def run(self) -> Sums:
        pending: list[int] = []  # buckets whose reductions were started, in order
        if not (self.layout.overlap and self.groups.dp.moved_by_calls):
            return self._run(pending, nullcontext)

        def poll() -> None:
            if pending:
                self._reductions[pending[-1]].poll()  # and those before it

        with Progress(poll) as progress:
            return self._run(pending, progress.computing)

    def _run(
        self, pending: list[int], computing: Callable[[], AbstractContextManager[None]]
    ) -> Sums:
        lib = native.library()
        parts = self.parts
        finished = 0
        for i, (s, step) in enumerate(zip(self.segments, self._steps, strict=True)):
            if parts.partitioned:
                for b, slot in self._places[i].at.items():
                    parts.use(b, slot)
                for b, slot in self._places[i].ahead:
                    parts.prefetch(b, slot)
            reducing = s.grads is not None and s.grads != STATS
            pool = self._pools.get(s.grads) if reducing else None
            while pool is not None and any(self._pools[b] is pool for b in pending[finished:]):
                self._finish(pending[finished])
                finished += 1
            step.context = self.context
            step.rows = self.context.rows
            with computing():
                lib.step(step)
            if s.grads == STATS:
                self._add_mark()
                self._stats.start()
            elif reducing:
                pending.append(s.grads)
                if self.layout.overlap:
                    self._reductions[s.grads].start()
            if self.layout.overlap:
                for b in pending[finished:]:
                    self._reductions[b].poll()
        computed = time.perf_counter()
        for b in pending[finished:]:
            self._finish(b)
        stats = self._stats.finish()
        self.waited += time.perf_counter() - computed
        return Sums(stats.tolist(), stats[1:2].ctypes.data, self.updates)

    def _finish(self, b: int) -> None:
        if not self.layout.overlap:
            self._reductions[b].start()
        result = self._reductions[b].finish()
        if self._pooled:
            lo, hi = self.parts.own[b]
            self._own_grads[b][:] = result[lo:hi]
