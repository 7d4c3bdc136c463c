"""A step taken segment by segment: one segment of the program runs for all shards of this rank
before the next segment starts.

This way is used if there is more than one bucket of gradients. The reduction of a bucket starts
when its segment has run, and continues during the rest of the backward pass (overlap). With ZeRO 2
and 3 the gradients and parameters of a bucket exist only around its segment. In return, the
activations of all shards of this rank are in memory. A step in one bucket (direct.py) needs the
activations of one shard per thread.
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
    """Runs a native step for each segment of the program, and a reduction for each bucket."""

    def __init__(self, inputs: RunnerInputs) -> None:
        super().__init__(inputs)
        layout = self.layout
        comm = self.groups.dp
        arena = self.arena
        parts = self.parts
        self.plan = planning.make(
            self.shards,
            comm.rank,
            comm.size,
            layout.workers,
            layout.threads,
            layout.counts(self.shards),
        )
        # True: segments are cut so that each reads few buckets of parameters, because these are
        # brought to memory for the segment.
        by_params = parts.partitioned or bool(layout.offload)
        programs: list[list[Record]] = []
        # The programs differ only in sizes, so all of them have the same segments.
        for program in self.programs:
            # Recomputation would bring parameters to memory a second time.
            records = program.records if by_params else recompute(program.records)
            records, self.segments = segments(records, arena, parts.buckets, by_params=by_params)
            programs.append(records)
        # The bucket of each parameter, by the parameter's offset in the arena.
        self._bucket_of = {
            arena.offsets[name]: number
            for number, bucket in enumerate(parts.buckets)
            for name in bucket.names
        }
        buckets_read = [segment.params for segment in self.segments]
        self._gatherings = parts.places(buckets_read) if parts.partitioned else []
        first_shard, end_shard = self.plan.run
        workspaces = max(end_shard - first_shard, 1)
        work_bytes = max(plan_memory(records) for records in programs)
        self._work = self.storage("work", workspaces * work_bytes).reshape(workspaces, work_bytes)
        self.work_bytes = self._work.nbytes
        self._reductions: dict[int, reduction.Reduction] = {}
        self._own_grads: dict[int, np.ndarray] = {}
        self._make_reductions()
        # Arrays whose addresses native code uses. Python must not free them.
        self._kept_alive: list[Any] = []
        # The segments share the tables, because one of them runs at a time.
        self._plan_tables = np.array(self.plan.tables(), np.int64)
        self._steps = [self._make_step(i, programs) for i in range(len(self.segments))]
        self.updates = self._make_updates() if self.train else []
        self.waited = 0.0  # seconds of waiting for reductions after the last segment

    def _make_reductions(self) -> None:
        """Creates a reduction for each bucket with gradients, and one for the statistics.

        With ZeRO 2 and 3, and with offload, the reductions are `pooled`: they work in memory that
        all of them share, and this rank's part of the result is copied out of it.
        """
        parts = self.parts
        replicated = self.groups.dp.size > 1
        self._pooled = (parts.stage >= 2 and replicated) or bool(self.layout.offload)
        grad_buckets = [
            segment.grads for segment in self.segments if segment.grads not in (None, STATS)
        ]
        # The memory that the reduction of each bucket works in, if it is pooled.
        self._pools: dict[int, np.ndarray] = {}
        if self._pooled and grad_buckets:
            self._make_pools()
        for b in grad_buckets:
            self._reductions[b] = self._get_or_make(
                ("bucket", b), lambda b=b: self._make_bucket_reduction(b, self._pools.get(b))
            )
            if self._pooled:
                lo, hi = parts.own[b]
                gradients = self.storage(f"gradients {b}", 4 * (hi - lo), self.arena.make)
                self._own_grads[b] = gradients.view(np.float32)
        self.grad_bytes = (
            0 if self._pooled else sum(4 * r.floats_needed for r in self._reductions.values())
        )
        statistics = native.library().stats
        self._stats = self._get_or_make("statistics", lambda: self._reduction(statistics))
        self.marked = self._stats if replicated else None
        self.reductions = (*self._reductions.values(), self._stats)

    def _make_bucket_reduction(self, b: int, storage: np.ndarray | None) -> reduction.Reduction:
        """Creates the reduction of bucket b, which works in `storage` if that isn't None."""
        return self._reduction(
            self.parts.buckets[b].floats,
            scatter=self.parts.stage > 0 and self.groups.dp.size > 1,
            shared=not self._pooled,
            storage=storage,
            content=self.content(b),
        )

    def _make_pools(self) -> None:
        """Allocates two pools, which the reductions of even and odd buckets work in.

        So a bucket is reduced while the gradients of the next one are computed. All buckets count
        for the size of a pool, because another program may write gradients of other buckets.
        """
        buckets = self.parts.buckets
        # A reduction's memory depends on the bucket's size. So one bucket of each size is enough.
        # The largest bucket doesn't always need most: with some numbers of ranks this rank's range
        # of a smaller bucket is longer.
        bucket_of_size = {bucket.floats: b for b, bucket in reversed(list(enumerate(buckets)))}
        floats_needed = self._get_or_make(
            "needed",
            lambda: {
                size: self._make_bucket_reduction(b, None).floats_needed
                for size, b in sorted(bucket_of_size.items())
            },
        )
        for parity in (0, 1):
            sharing = range(parity, len(buckets), 2)
            if sharing:
                max_floats = max(floats_needed[buckets[b].floats] for b in sharing)
                pool = self.storage(f"pool {parity}", 4 * max_floats).view(np.float32)
                self._pools.update(dict.fromkeys(sharing, pool))

    def _make_step(self, i: int, programs: list[list[Record]]) -> native.Step:
        """Returns the native step of segment i; `programs` are the records of whole programs."""
        segment = self.segments[i]
        has_reduction = segment.grads not in (None, STATS)
        sums = self._reductions[segment.grads] if has_reduction else self._stats
        step = native.Step(
            threads=len(self.plan.threads),
            tables=self._plan_tables.ctypes.data,
            params=0 if self.parts.partitioned else self.arena.address(native.PARAMS),
            work=self._work.ctypes.data,
            work_bytes=self._work.strides[0],
            slots=len(self._work),
            base=self.plan.run[0],
            zero=int(segment.grads is not None),
            buffers=sums.buffers.ctypes.data,
            buffer_floats=sums.floats,
            shard_size=self.shard_size,
            samples=self.samples,
        )
        arena = self.arena
        locate = self._make_locator(i)
        segment_programs = [records[segment.start : segment.stop] for records in programs]
        tables = [
            serialize(records, arena, self._kept_alive, locate) for records in segment_programs
        ]
        cleared = begin(segment_programs, tables, arena, locate, sums.floats)
        step.take(tables, cleared)
        return step

    def _make_locator(self, i: int) -> Callable[[int, int], int]:
        """Returns the function that maps an offset of the arena (in floats) for segment i.

        The result is in floats from the base address of the offset's space. With ZeRO 3 the
        parameters are gathered into slots, and the base address of their space is 0.
        """
        parts = self.parts
        segment = self.segments[i]
        size = self.arena.size

        def locate(space: int, offset: int) -> int:
            if space == native.GRADS:
                if offset >= size:  # a statistic
                    return offset - size
                return parts.buckets[segment.grads].locate(offset)
            if not parts.partitioned:
                return offset
            b = self._bucket_of[offset]
            slot = self._gatherings[i].at[b]
            return parts.address(slot) // 4 + parts.buckets[b].locate(offset)

        return locate

    def _make_updates(self) -> list[Update]:
        """Returns the updates of this rank's part of each bucket."""
        own_ranges = self.parts.own
        lengths_without = [
            hi - lo for b, (lo, hi) in enumerate(own_ranges) if b not in self._reductions
        ]
        # Gradients of buckets that the program has no gradients for.
        zeros = self.storage("no gradients", 4 * max(lengths_without, default=0), self.arena.make)
        zeros[:] = 0
        self._kept_alive.append(zeros)
        updates = []
        for b, (lo, _) in enumerate(own_ranges):
            if b in self._reductions and b not in self._own_grads:
                bucket_address = self._reductions[b].result.ctypes.data
            else:
                # These arrays start with this rank's part of the bucket, at float `lo`.
                part = self._own_grads[b] if b in self._own_grads else zeros
                bucket_address = part.ctypes.data - 4 * lo
            updates += self.parts.updates(
                b, lambda piece, address=bucket_address: address + 4 * piece.at
            )
        return updates

    def run(self) -> Sums:
        """Takes the step, see `Runner.run`.

        If the library of the communicator moves data only during its calls, a thread polls the
        reductions while this thread computes.
        """
        pending: list[int] = []  # buckets whose reductions were started, in order
        if not (self.layout.overlap and self.groups.dp.moved_by_calls):
            return self._run_segments(pending, nullcontext)

        def poll() -> None:
            if pending:
                # This also polls all reductions that were started before.
                self._reductions[pending[-1]].poll()

        with Progress(poll) as progress:
            return self._run_segments(pending, progress.computing)

    def _run_segments(
        self, pending: list[int], computing: Callable[[], AbstractContextManager[None]]
    ) -> Sums:
        """Runs all segments, starts and finishes the reductions, and returns the sums.

        Args:
            pending: an empty list. It receives the buckets in the order of their reductions.
            computing: returns a context manager in which the native steps run.
        """
        lib = native.library()
        parts = self.parts
        finished = 0  # buckets of `pending` whose reductions are finished, the first ones
        for i, (segment, step) in enumerate(zip(self.segments, self._steps, strict=True)):
            if parts.partitioned:
                for b, slot in self._gatherings[i].at.items():
                    parts.use(b, slot)
                for b, slot in self._gatherings[i].ahead:
                    parts.prefetch(b, slot)
            reducing = segment.grads is not None and segment.grads != STATS
            pool = self._pools.get(segment.grads) if reducing else None
            # The segment writes to the pool, so reductions that still work in it must finish.
            while pool is not None and any(self._pools[b] is pool for b in pending[finished:]):
                self._finish_reduction(pending[finished])
                finished += 1
            step.context = self.context
            step.rows = self.context.rows
            with computing():
                lib.step(step)
            if segment.grads == STATS:
                self._add_mark()
                self._stats.start()
            elif reducing:
                pending.append(segment.grads)
                if self.layout.overlap:
                    self._reductions[segment.grads].start()
            if self.layout.overlap:
                for b in pending[finished:]:
                    self._reductions[b].poll()
        computing_ended = time.perf_counter()
        for b in pending[finished:]:
            self._finish_reduction(b)
        stats = self._stats.finish()
        self.waited += time.perf_counter() - computing_ended
        return Sums(stats.tolist(), stats[1:2].ctypes.data, self.updates)

    def _finish_reduction(self, b: int) -> None:
        """Waits for the sum of bucket b and copies this rank's part if its memory is pooled."""
        if not self.layout.overlap:
            self._reductions[b].start()
        result = self._reductions[b].finish()
        if self._pooled:
            lo, hi = self.parts.own[b]
            self._own_grads[b][:] = result[lo:hi]
