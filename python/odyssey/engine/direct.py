"""A step in one native call for all shards, then one reduction.

This is the ordinary case. It is also the runner of `execution="eager"`, where Python computes the
shards op by op.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core import native
from ..core.program import OwnMemory, ShardEager, least_memory, plan_memory, serialize
from ..optim import Update
from ..parallel import plan as planning
from ..parallel.failures import StepOutcome
from . import shard_runs
from .beginning import begin
from .recompute import recompute
from .runner import INDEX_BYTES, Runner, RunnerInputs
from .sums import Sums


class DirectRunner(Runner):
    """Runs all shards of this process in one native call, then one reduction.

    Each thread computes its shards one after the other.
    """

    def __init__(self, inputs: RunnerInputs) -> None:
        super().__init__(inputs)
        layout = self.layout
        statistics = native.library().stats
        arena = self.arena
        comm = self.groups.dp
        self.floats = (arena.size if self.train else 0) + statistics
        self.stats_at = self.floats - statistics
        # Empty if shards are computed op by op.
        self._records = [recompute(program.records) for program in self.programs]
        # The buffers of the reduction depend on it, so all programs for a batch size use the same.
        self.run_length = self._get_or_make("length of runs", self._choose_run_length)
        self.plan = self._make_plan(self.run_length)
        content = self.content(whole_arena=True)
        self._reducer = self._get_or_make(
            "sums", lambda: self._reduction(self.floats, content=content)
        )
        self.reductions = (self._reducer,)
        self.marked = self._reducer if comm.size > 1 else None
        plan_tables = np.array(self.plan.tables(), np.int64)
        # Arrays whose addresses native code uses. Python must not free them.
        self._kept_alive: list[Any] = [plan_tables]
        self.step = native.Step(
            threads=len(self.plan.threads),
            tables=plan_tables.ctypes.data,
            params=arena.address(native.PARAMS),
            zero=1,
            buffers=self._reducer.buffers.ctypes.data,
            buffer_floats=self.floats,
            shard_size=self.shard_size,
            samples=self.samples,
        )
        if layout.execution == "replay":
            self._set_programs()
        # (floats,): the gradients, if this runner trains, then the statistics
        self.result = self._reducer.result
        self.stats = self.result[self.stats_at :]
        self.samples_address = self.stats[1:].ctypes.data
        self.updates = self._make_updates() if self.train else []
        self.grad_bytes = 4 * self._reducer.floats_needed

    def _choose_run_length(self) -> int:
        """Returns how many shards a thread computes together, see `shard_runs.length`."""
        if not self.train or self.layout.execution != "replay":
            return 0
        # The workspace is planned once, when it is known which records need memory for runs.
        work_bytes = least_memory(self._records[0])
        return shard_runs.length(self._records[0], self.floats, work_bytes, self._make_plan)

    def _make_plan(self, run_length: int) -> planning.Plan:
        """Returns this rank's plan; a last shard with fewer samples always runs alone."""
        layout = self.layout
        comm = self.groups.dp
        return planning.make(
            self.shards,
            comm.rank,
            comm.size,
            layout.workers,
            layout.threads,
            layout.counts(self.shards),
            length=max(run_length, 1),
            lone=self.shards - 1 if self.samples % self.shard_size else None,
        )

    def _set_programs(self) -> None:
        """Serializes the recorded programs into the native step and allocates its workspaces.

        Each thread has one workspace, or one for each shard of a run. They are as large as the
        larger program needs.
        """
        step = self.step
        programs = self._records
        work_sizes = []  # bytes of the workspace that each program needs for a shard
        if self.run_length:
            work_sizes.append(self._set_runs())
            programs = programs[1:]  # a last shard with fewer samples may have a program of its own
        work_sizes += [plan_memory(records) for records in programs]
        tables = [
            serialize(records, self.arena, self._kept_alive, self._locate_floats)
            for records in programs
        ]
        if programs:
            cleared = begin(programs, tables, self.arena, self._locate_floats, self.floats)
            if self.run_length:
                step.take_tail(tables[0], cleared)
            else:
                step.take(tables, cleared)
        work_bytes = max(work_sizes)
        workspaces = len(self.plan.threads) * max(self.run_length, 1)
        work = self.storage("work", workspaces * work_bytes)
        step.work = work.ctypes.data
        step.work_bytes = work_bytes
        self.work_bytes = work.nbytes
        self._kept_alive.append(work)

    def _set_runs(self) -> int:
        """Serializes the program of full shards for runs of shards, and allocates the buffers for
        the gradients that its joined records don't write.

        Returns:
            The bytes of the workspace that the program needs for a shard.
        """
        step = self.step
        arena = self.arena
        records, joined = shard_runs.join(self._records[0], arena, self.floats, self.run_length)
        work_bytes = plan_memory(records)
        self.plan_lines = [shard_runs.describe(self.run_length, joined)]
        table = serialize(records, arena, self._kept_alive, joined.locate)
        joined.mark(table)
        cleared = begin([records], [table], arena, None, self.floats)
        step.take(
            [table],
            [
                (joined.locate(native.GRADS, start), joined.locate(native.GRADS, end - 1) + 1)
                for start, end in cleared
            ],
        )
        pieces = np.array(joined.pieces, np.int64).reshape(-1, 3)
        buffers = len(self.plan.threads) * self.run_length
        own_gradients = self.storage("gradients of shards", 4 * buffers * joined.floats)
        step.together = self.run_length
        step.own = own_gradients.ctypes.data
        step.own_floats = joined.floats
        step.pieces = pieces.ctypes.data
        step.piece_count = len(pieces)
        self._kept_alive += [pieces, own_gradients]
        return work_bytes

    def _make_updates(self) -> list[Update]:
        """Returns the updates of the parameters that this rank owns, from the reduced gradients."""
        grads_address = self.result.ctypes.data
        if self.layout.zero == 0:
            params_address = self.arena.address(native.PARAMS)
            return [Update(params_address, grads_address, state=0, n=self.arena.size, at=0)]
        parts = self.parts
        return [
            update
            for bucket in range(len(parts.buckets))
            for update in parts.updates(bucket, lambda piece: grads_address + 4 * piece.lo)
        ]

    def run(self) -> Sums:
        """Takes the step, see `Runner.run`.

        If computing fails on one rank, all ranks still take part in the reduction and then raise
        the error together. Otherwise the other ranks would wait for this one.
        """
        step = self.step
        step.context = self.context
        step.rows = self.context.rows
        if self.arena.mirror is not None:
            # Another trainer may have newer parameters on GPUs. `address` copies them back.
            step.params = self.arena.address(native.PARAMS)
        if self.marked is None:
            self._compute_shards()
        else:
            outcome = StepOutcome(self._reducer, self.stats_at + 1)
            with outcome.tried():
                self._compute_shards()
            # The error and the mark are statistics, so they go in before the sums are exchanged.
            outcome.tell()
            self._add_mark()
            self._reducer.start()
            self._reducer.finish()
            outcome.end(self.stats[1])
        return Sums(self.stats.tolist(), self.samples_address, self.updates)

    def _compute_shards(self) -> None:
        """Fills the buffers of the reduction with the sums over this rank's shards.

        Recorded programs run in one native call on all threads. Without them, Python follows the
        same plan one action after the other, so the additions and their order are the same.
        """
        step = self.step
        buffers = self._reducer.buffers
        if self.layout.execution == "replay":
            native.library().step(step)
            return
        for action in itertools.chain(*self.plan.threads, self.plan.final):
            if action.kind == "run":
                self.run_eager(shard=action.a, buffer=buffers[action.b])
                continue
            total = OwnMemory(buffers[action.a])
            addend = OwnMemory(buffers[action.b])
            # An addition doesn't belong to a shard: it has no samples, gradients or statistics.
            executor = ShardEager(step.context, grads_address=0, stats_offset=0, samples=0)
            executor.emit("add", total, total, addend, self.floats)

    def run_eager(
        self, shard: int, buffer: np.ndarray, listen: Callable[[Any], None] | None = None
    ) -> None:
        """Computes one shard op by op.

        Args:
            shard: the number of the shard in the global batch.
            buffer: (floats,), receives the shard's gradients and statistics.
            listen: is called with the executor before the model runs.
        """
        step = self.step
        context = native.Context.from_buffer_copy(self.context)
        buffer[:] = 0
        context.first = shard * step.shard_size
        context.valid = min(step.shard_size, step.samples - context.first)
        context.rows += INDEX_BYTES * context.first
        # A last shard with fewer samples may have a program of its own, the last one.
        program = self.programs[0 if context.valid == step.shard_size else -1]
        executor = ShardEager(
            context,
            grads_address=buffer.ctypes.data,
            stats_offset=4 * self.stats_at,
            samples=program.samples,
            precision=self.precision,
        )
        executor.in_lanes = program.lanes
        if listen is not None:
            listen(executor)
        self.recordings.traced(executor, program.samples, self.form)
