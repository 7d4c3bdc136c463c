"""A step taken micro-batch by micro-batch by ranks that share the model: pipeline stages,
tensor-parallel layers.

A micro-batch is a shard. Each rank runs its parts of the program (stages.py) in the order of a
schedule (schedule.py). Between them it exchanges activations and their gradients with other ranks.
The gradients of its parameters are added over its shards and over the replicas, along the same tree
as in the other layouts. So pipeline and tensor parallelism don't change the results.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from ..comm.base import MAX_TAG
from ..core import native
from ..core.placement import check_places
from ..core.program import Record, Slot, plan_memory, serialize
from ..errors import ConfigError
from ..parallel import plan as planning
from ..parallel import schedule as schedules
from ..parallel import tensor_parallel
from ..parallel.stages import StageWork, Transfer, edges, partition
from ..parallel.tensor_exchange import TensorExchange
from .runner import INDEX_BYTES, Program, Runner, RunnerInputs
from .sums import Sums


class Native(NamedTuple):
    """Records that run in one native call: the address of the first, and how many they are."""

    address: int
    records: int


class PipelineProgram(NamedTuple):
    """A program that is cut into parts, some of which this rank runs."""

    parts: list[StageWork]  # of all ranks
    local_stages: list[StageWork]  # the ones of this rank
    work_bytes: int  # size of the workspace of one micro-batch
    stats_at: int  # byte of the workspace at which the statistics start


class Move(NamedTuple):
    """A transfer between two ranks of the pipeline, of bytes [at, at + size) of a workspace."""

    number: int
    source: int
    target: int
    at: int
    size: int


def plan_moves(transfers: list[Transfer]) -> list[Move]:
    """Returns the transfers as moves. Their slots have their places in the workspace already."""
    return [Move(t.number, t.source, t.target, t.slot.offset, t.slot.nbytes) for t in transfers]


class PipelineRunner(Runner):
    """Runs one rank's part of the program, on a mesh with pp or tp above 1.

    Other ranks of the same replica run the other parts.
    """

    shares_work = False

    def __init__(self, inputs: RunnerInputs) -> None:
        super().__init__(inputs)
        layout = self.layout
        statistics = native.library().stats
        comm = self.groups.dp
        self.plan = planning.make(
            self.shards,
            comm.rank,
            comm.size,
            layout.workers,
            threads=1,
            counts=layout.counts(self.shards),
        )
        cut_programs = [self._cut_program(program) for program in self.programs]
        # The program of a smaller last shard has as many parts, and they have the same places.
        parts = cut_programs[0].parts
        self.loss_place = next(
            part.place for part in parts for record in part.records if record.op == "stats"
        )
        self._stats_at = [program.stats_at for program in cut_programs]
        first_shard, end_shard = self.plan.run
        self.micro = end_shard - first_shard
        self._plan_actions(parts)
        self._workspaces = self._count_workspaces()
        work_bytes = max(program.work_bytes for program in cut_programs)
        self._work = native.aligned((self._workspaces, work_bytes), np.uint8, zero=False)
        self.work_bytes = self._work.nbytes
        # Arrays whose addresses native code uses. Python must not free them.
        self._kept_alive: list[Any] = []
        # The steps of each part of this rank by phase and stage, for each program.
        self._steps_of = [
            {(part.phase, part.stage): self._plan_steps(part) for part in program.local_stages}
            for program in cut_programs
        ]
        self._plan_sums()
        scatter = self.parts.stage > 0 and comm.size > 1
        floats = self.parts.buckets[0].floats if self.train else 0
        self._sum = self._get_or_make(
            ("sum", self._adds_at_end),
            lambda: self._reduction(floats, scatter=scatter, content=self.content()),
        )
        self._stats = self._get_or_make(
            ("statistics", self._adds_at_end), lambda: self._reduction(statistics)
        )
        self.reductions = (self._sum, self._stats)
        self.grad_bytes = 4 * self._sum.floats_needed
        self._bases = np.zeros(4, np.int64)  # base address of each space of operands
        # One more than the largest transfer number, so that tags of micro-batches differ.
        self._transfers = 1 + max(
            (transfer.number for part in parts for transfer in part.sends), default=0
        )
        self.updates = []
        self._counted = []
        if self.train:
            grads_address = self._sum.result.ctypes.data
            self.updates = self.parts.updates(0, lambda piece: grads_address + 4 * piece.at)
            self._counted = self._list_counted_runs()
        self.result = np.zeros(statistics, np.float32)

    # --- preparation ---

    def _cut_program(self, program: Program) -> PipelineProgram:
        """Cuts a program into parts and plans the workspace for the parts of this rank."""
        # Gradients of a shard go to a buffer, but its statistics are added up in the workspace.
        statistics = Slot(4 * native.library().stats)
        for record in program.records:
            if record.op == "stats":
                record.args[0] = statistics
        parts = partition(program.records, program.place_of)
        local_stages = [part for part in parts if part.place == self.groups.p]
        items = [
            item for part in local_stages for item in (*part.receives, *part.records, *part.sends)
        ]
        # A use before the first and after the last record keeps the statistics' memory for the
        # whole micro-batch.
        use = Record("stats", [statistics])
        work_bytes = plan_memory([use, *items, use])
        return PipelineProgram(parts, local_stages, work_bytes, statistics.offset)

    def _plan_actions(self, parts: list[StageWork]) -> None:
        """Sets the schedule, and this rank's actions in it as (phase, stage, micro-batch)."""
        stages = 1 + max(part.stage for part in parts)
        # In an evaluation some places may have nothing to do. A schedule numbers the others.
        used = sorted({part.place for part in parts})
        place_of = [next(part.place for part in parts if part.stage == s) for s in range(stages)]
        devices = [used.index(place) for place in place_of]
        self.schedule = schedules.make(
            self._choose_kind(devices),
            stages,
            self.micro,
            devices,
            edges=edges(parts),
            backward=self.train,
        )
        place = self.groups.p
        computes = self.schedule.compute[used.index(place)] if place in used else ()
        phase = {schedules.Forward: "forward", schedules.Backward: "backward"}
        self._actions = [(phase[type(a)], a.stage, a.micro) for a in computes]

    def _choose_kind(self, devices: list[int]) -> str:
        """Returns the kind of the schedule for stages on these devices.

        An automatic cut was made for full batches. The stages of a small last batch may be on
        devices that the user's schedule doesn't support, so "gpipe" replaces it.
        """
        kind = self.layout.schedule if self.train else "gpipe"
        if self.ownership.cut_by is not None:
            try:
                check_places(kind, devices)
            except ConfigError:
                return "gpipe"
        return kind

    def _count_workspaces(self) -> int:
        """Returns how many micro-batches need a workspace at the same time.

        Micro-batch m uses workspace m modulo this number. So the unfinished micro-batches between
        the oldest and the newest one all count, even those that haven't started.
        """
        last_action = {m: i for i, (_, _, m) in enumerate(self._actions)}
        workspaces = 1
        oldest = 0
        for i, (_, _, m) in enumerate(self._actions):
            while last_action.get(oldest, i) < i:
                oldest += 1
            workspaces = max(workspaces, m - oldest + 1)
        return workspaces

    def _plan_steps(self, part: StageWork) -> list[Any]:
        """Returns the steps of a part in order: moves, native runs and tensor-parallel exchanges.

        An exchange is a list with one TensorExchange for each workspace.
        """
        steps: list[Any] = list(plan_moves(part.receives))
        waiting: list[Record] = []  # records for the next native run

        def end_run() -> None:
            if waiting:
                table = serialize(waiting, self.arena, self._kept_alive, self._locate_floats)
                self._kept_alive.append(table)
                steps.append(Native(table.ctypes.data, len(table)))
                waiting.clear()

        for record in part.records:
            if isinstance(record, tensor_parallel.Pseudo):
                end_run()
                steps.append(
                    [TensorExchange(self.groups.tp, record, [work]) for work in self._work]
                )
            else:
                waiting.append(record)
        end_run()
        return steps + plan_moves(part.sends)

    def _locate_floats(self, space: int, offset: int) -> int:
        """Returns where an offset of the arena (in floats) is within its space.

        Gradients are in the layout of the only bucket, which has this rank's parameters.
        """
        return self.parts.buckets[0].locate(offset) if space == native.GRADS else offset

    def _plan_sums(self) -> None:
        """Plans which buffer the sums of each shard go to, and which buffers are added after it.

        If the shards are completed one after the other, a buffer is free again as soon as it was
        added to another one (`_adds_at_end` is False). Otherwise each shard has its own buffer, and
        the buffers are added after the last action.
        """
        first_action: dict[int, int] = {}  # of each micro-batch, that writes gradients
        last_action: dict[int, int] = {}
        for i, (phase, _, m) in enumerate(self._actions):
            if phase == "backward" or not self.train:
                first_action.setdefault(m, i)
                last_action[m] = i
        in_turn = all(
            first_action[m] > last_action[m - 1]
            for m in range(1, self.micro)
            if m in first_action and m - 1 in last_action
        )
        if not in_turn:
            self.plan = planning.unshared(self.plan)
        self._adds: dict[int, list[tuple[int, int]]] = {}  # micro-batch -> (total, addend) buffers
        self._buffer: dict[int, int] = {}  # micro-batch -> buffer
        first_shard = self.plan.run[0]
        m = 0
        for action in (*self.plan.threads[0], *self.plan.final) if self.micro else ():
            if action.kind == "run":
                m = action.a - first_shard
                self._buffer[m] = action.b
            else:
                self._adds.setdefault(m, []).append((action.a, action.b))
        # The actions at which the gradients of a micro-batch start and are complete.
        self._begins = {i: m for m, i in first_action.items()}
        self._ends = {i: m for m, i in last_action.items()}
        self._adds_at_end = not in_turn

    def _list_counted_runs(self) -> list[tuple[int, int]]:
        """Returns the runs of gradients (address, floats) that this rank adds to the global norm.

        They are the part of the reduced bucket that this rank has, without parameters that another
        rank counts.
        """
        own_start, own_end = self.parts.own[0]
        grads_address = self._sum.result.ctypes.data
        counted_runs = []
        for arena_start, n in self.ownership.counted:
            start = self.parts.buckets[0].locate(arena_start)
            lo = max(start, own_start)
            hi = min(start + n, own_end)
            if lo < hi:
                counted_runs.append((grads_address + 4 * lo, hi - lo))
        return counted_runs

    # --- a step ---

    def run(self) -> Sums:  # noqa: C901, PLR0915
        """Takes the step, see `Runner.run`."""
        lib = native.library()
        first_shard = self.plan.run[0]
        stats_bytes = 4 * lib.stats
        bases = self._bases
        bases_address = self._bases.ctypes.data
        bases[native.PARAMS] = self.arena.address(native.PARAMS)
        work_address = self._work.ctypes.data
        workspace_bytes = self._work.strides[0]
        context = native.Context.from_buffer_copy(self.context)
        grads = self._sum.buffers
        stats = self._stats.buffers
        pending: deque[Any] = deque()  # requests of sends, oldest first
        started: set[int] = set()  # micro-batches
        if not self._begins:
            # No op of this program runs here. Parameters of other programs have gradients of 0.
            grads[:] = 0
        for i, (phase, stage, m) in enumerate(self._actions):
            slot = m % self._workspaces
            workspace = self._work[slot]
            bases[native.WORK] = work_address + slot * workspace_bytes
            context.first = (first_shard + m) * self.shard_size
            context.valid = min(self.shard_size, self.samples - context.first)
            context.rows = self.context.rows + INDEX_BYTES * context.first
            # A last shard with fewer samples may have a program of its own, the last one.
            program_index = -1 if context.valid < self.shard_size else 0
            stats_at = self._stats_at[program_index]
            if m not in started:
                started.add(m)
                workspace[stats_at : stats_at + stats_bytes] = 0
            buffer = self._buffer[m]
            if i in self._begins:
                grads[buffer] = 0  # in an evaluation, `grads` has no floats
            bases[native.GRADS] = grads[buffer].ctypes.data
            for step in self._steps_of[program_index][phase, stage]:
                if isinstance(step, Native):
                    lib.run(step.address, step.records, context, bases_address)
                elif isinstance(step, Move):
                    self._move_value(step, m, workspace, pending)
                else:
                    exchange = step[slot]
                    exchange()
                    self.bytes_moved += exchange.sent
            if i in self._ends:
                stats[buffer] = workspace[stats_at : stats_at + stats_bytes].view(np.float32)
                if not self._adds_at_end:
                    self._add_buffers(m)
        if self._adds_at_end:
            for m in range(self.micro):
                self._add_buffers(m)
        for request in pending:
            request.wait()
        if self.train:
            self._sum.start()
        self._stats.start()
        self.result[:] = self._stats.finish()
        if self.train:
            self._sum.finish()
        # Only the rank that computes the loss has its statistics.
        self.groups.pp.broadcast(self.result, self.loss_place)
        result = self.result
        return Sums(result.tolist(), result[1:2].ctypes.data, self.updates, self._counted)

    def _move_value(self, move: Move, m: int, workspace: np.ndarray, pending: deque[Any]) -> None:
        """Sends or receives a value of micro-batch m, and appends the request of a send to
        `pending`.
        """
        tag = (m * self._transfers + move.number) % (MAX_TAG + 1)
        value = workspace[move.at : move.at + move.size]
        if move.source == self.groups.p:
            # Requests hold copies of values. Completed ones are dropped to free this memory.
            while pending and pending[0].test():
                pending.popleft().wait()
            pending.append(self.groups.pp.send(value.copy(), move.target, tag, wait=False))
            self.bytes_moved += move.size
        else:
            self.groups.pp.recv(value, move.source, tag)

    def _add_buffers(self, m: int) -> None:
        """Does the additions of the tree that are possible when micro-batch m is complete."""
        # The update checks later that the sums are finite, so NumPy's warnings are not necessary.
        with np.errstate(all="ignore"):
            for total, addend in self._adds.get(m, ()):
                self._sum.buffers[total] += self._sum.buffers[addend]
                self._stats.buffers[total] += self._stats.buffers[addend]
