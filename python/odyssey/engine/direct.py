"""A step in one native call for all shards, then one reduction: the ordinary case, and shards
computed op by op.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core import native
from ..core.program import OwnMemory, ShardEager, plan_memory, serialize
from ..optim import Update
from ..parallel import plan as planning
from ..parallel.failures import StepOutcome
from .beginning import begin
from .recompute import recompute
from .runner import Runner, RunnerInputs
from .sums import Sums


class DirectRunner(Runner):
    """All shards of this process in one native call, one after the other on each thread, then
    one reduction.
    """

    def __init__(self, inputs: RunnerInputs) -> None:
        super().__init__(inputs)
        lay = self.layout
        lib = native.library()
        arena = self.arena
        comm = self.groups.dp
        self.floats = (arena.size if self.train else 0) + lib.stats
        self.stats_at = self.floats - lib.stats
        self.plan = planning.make(
            self.shards, comm.rank, comm.size, lay.workers, lay.threads, lay.counts(self.shards)
        )
        content = self.content(whole_arena=True)
        self._reduce = self._get_or_make(
            "sums", lambda: self._reduction(self.floats, content=content)
        )
        self.reductions = (self._reduce,)
        self.marked = self._reduce if comm.size > 1 else None
        tables = np.array(self.plan.tables(), np.int64)
        self._keep: list[Any] = [tables]
        self.step = native.Step(
            threads=len(self.plan.threads),
            tables=tables.ctypes.data,
            params=arena.address(native.PARAMS),
            zero=1,
            buffers=self._reduce.buffers.ctypes.data,
            buffer_floats=self.floats,
            shard_size=self.shard_size,
            samples=self.samples,
        )
        if lay.execution == "replay":
            programs = [recompute(program.records) for program in self.programs]
            work_bytes = max(plan_memory(records) for records in programs)
            threads = len(self.plan.threads)
            work = self.storage("work", threads * work_bytes).reshape(threads, work_bytes)
            tables = [serialize(records, arena, self._keep, self._locate) for records in programs]
            self.step.take(tables, begin(programs, tables, arena, self._locate, self.floats))
            self.step.work = work.ctypes.data
            self.step.work_bytes = work_bytes
            self.work_bytes = work.nbytes
            self._keep.append(work)
        # (floats,): gradients if it trains, then the statistics
        self.result = result = self._reduce.result
        self.stats = result[self.stats_at :]
        self.samples_address = self.stats[1:].ctypes.data
        self.updates = self._updates(result) if self.train else []
        self.grad_bytes = 4 * self._reduce.floats_needed

    def _updates(self, result: np.ndarray) -> list[Update]:
        arena = self.arena
        parts = self.parts
        grads = result.ctypes.data
        if self.layout.zero == 0:
            return [Update(arena.address(native.PARAMS), grads, 0, arena.size, 0)]
        return [
            u
            for b in range(len(parts.buckets))
            for u in parts.updates(b, lambda p: grads + 4 * p.lo)
        ]

    def run(self) -> Sums:
        s = self.step
        s.context = self.context
        s.rows = self.context.rows
        if self.arena.mirror is not None:  # another trainer's GPUs may be ahead
            s.params = self.arena.address(native.PARAMS)
        if self.marked is None:
            self._compute()
        else:
            part = StepOutcome(self._reduce, self.stats_at + 1)
            with part.tried():
                self._compute()
            part.tell()
            self._add_mark()
            self._reduce.start()
            self._reduce.finish()
            part.end(self.stats[1])
        return Sums(self.stats.tolist(), self.samples_address, self.updates)

    def _compute(self) -> None:
        """Computes this rank's shards: at once, or the same plan through Python, one shard after
        the other.
        """
        s = self.step
        buffers = self._reduce.buffers
        if self.layout.execution == "replay":
            native.library().step(s)
            return
        for a in itertools.chain(*self.plan.threads, self.plan.final):
            if a.kind == "add":
                to, addend = (OwnMemory(buffers[i]) for i in (a.a, a.b))
                ShardEager(s.context, 0, 0, 0).emit("add", to, to, addend, self.floats)
            else:
                self.run_eager(a.a, buffers[a.b])

    def run_eager(
        self, shard: int, buffer: np.ndarray, listen: Callable[[Any], None] | None = None
    ) -> None:
        """Computes one shard op by op into a buffer (floats,); `listen` is called with the
        executor before.
        """
        s = self.step
        c = native.Context.from_buffer_copy(self.context)
        buffer[:] = 0
        c.first = shard * s.shard_size
        c.valid = min(s.shard_size, s.samples - c.first)
        c.rows += 8 * c.first
        program = self.programs[0 if c.valid == s.shard_size else -1]
        executor = ShardEager(
            c, buffer.ctypes.data, 4 * self.stats_at, program.samples, self.precision
        )
        executor.in_lanes = program.lanes
        if listen is not None:
            listen(executor)
        self.recordings.traced(executor, program.samples, self.form)
