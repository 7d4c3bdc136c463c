"""A step taken micro-batch by micro-batch by ranks that share the model: pipeline stages,
tensor-parallel layers.

A micro-batch is a shard. Each rank runs its parts of the program (stages.py) in the order of a
schedule (schedule.py) and exchanges activations and their gradients in between. The gradients of
its own parameters are added over its shards and over the replicas along the same tree as
everywhere, so pipeline and tensor parallelism change no bit.
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
from .runner import Program, Runner, RunnerInputs
from .sums import Sums


class Native(NamedTuple):
    """Records that run without a stop: address and number."""

    address: int
    records: int


class PipelineProgram(NamedTuple):
    """A program on this rank: its parts, of which some are this rank's, and where its workspace
    has the statistics.
    """

    parts: list[StageWork]
    local_stages: list[StageWork]
    work_bytes: int
    stats_at: int


class Move(NamedTuple):
    """A transfer whose value has its place in the workspace: bytes [at, at + size)."""

    number: int
    source: int
    target: int
    at: int
    size: int


class PipelineRunner(Runner):
    """One batch size on one rank of a mesh with pp or tp above 1."""

    shares_work = False

    def __init__(self, inputs: RunnerInputs) -> None:
        super().__init__(inputs)
        lay = self.layout
        lib = native.library()
        comm = self.groups.dp
        place = self.groups.p
        self.plan = planning.make(
            self.shards, comm.rank, comm.size, lay.workers, 1, lay.counts(self.shards)
        )
        prepared = [self._prepared(program) for program in self.programs]
        # of a tail they are as many, of the same places
        parts = prepared[0].parts
        local_stages = prepared[0].local_stages
        self.loss_place = next(p.place for p in parts for r in p.records if r.op == "stats")
        work_bytes = max(one.work_bytes for one in prepared)
        self._stats_at = [one.stats_at for one in prepared]
        self.micro = self.plan.run[1] - self.plan.run[0]
        stages = 1 + max(p.stage for p in parts)
        used = sorted({p.place for p in parts})  # an evaluation may have nothing to do for some
        places = [used.index(next(p.place for p in parts if p.stage == s)) for s in range(stages)]
        self.schedule = schedules.make(
            self._kind(places), stages, self.micro, places, edges=edges(parts), backward=self.train
        )
        computes = self.schedule.compute[used.index(place)] if local_stages else ()
        phase = {schedules.Forward: "forward", schedules.Backward: "backward"}
        self._actions = [(phase[type(a)], a.stage, a.micro) for a in computes]
        self._window = self._in_flight()
        self._work = native.aligned((self._window, work_bytes), np.uint8, zero=False)
        self.work_bytes = self._work.nbytes
        self._keep: list[Any] = []
        self._code = [
            {(p.phase, p.stage): self._steps(p) for p in one.local_stages} for one in prepared
        ]
        self._plan_sums()
        scatter = self.parts.stage > 0 and comm.size > 1
        floats = self.parts.buckets[0].floats if self.train else 0
        self._sum = self._get_or_make(
            ("sum", self._late),
            lambda: self._reduction(floats, scatter=scatter, content=self.content()),
        )
        self._stats = self._get_or_make(
            ("statistics", self._late), lambda: self._reduction(lib.stats)
        )
        self.reductions = (self._sum, self._stats)
        self.grad_bytes = 4 * self._sum.floats_needed
        self._bases = np.zeros(4, np.int64)
        self._transfers = 1 + max((t.number for p in parts for t in p.sends), default=0)
        self.updates = (
            self.parts.updates(0, lambda p: self._sum.result.ctypes.data + 4 * p.at)
            if self.train
            else []
        )
        self._counted = self._share_of_norm() if self.train else []
        self.result = np.zeros(lib.stats, np.float32)

    # --- preparation ---

    def _prepared(self, program: Program) -> PipelineProgram:
        """Cuts a program into parts and gives those of this rank their places in a workspace."""
        # `stats` adds to it; it lives as long as its micro-batch
        slot = Slot(4 * native.library().stats)
        for r in program.records:
            if r.op == "stats":
                r.args[0] = slot
        parts = partition(program.records, program.place_of)
        local_stages = [p for p in parts if p.place == self.groups.p]
        items = [item for p in local_stages for item in (*p.receives, *p.records, *p.sends)]
        marker = Record("stats", [slot])
        work_bytes = plan_memory([marker, *items, marker])
        return PipelineProgram(parts, local_stages, work_bytes, slot.offset)

    def _kind(self, places: list[int]) -> str:
        """The schedule's kind: of a last, small batch an automatic cut may have other stages
        than it was made for.
        """
        kind = self.layout.schedule if self.train else "gpipe"
        if self.ownership.cut_by is not None:
            try:
                check_places(kind, places)
            except ConfigError:
                return "gpipe"
        return kind

    def _in_flight(self) -> int:
        """How many micro-batches, counted on from the oldest, need a workspace at the same time."""
        last = {m: i for i, (_, _, m) in enumerate(self._actions)}
        width = 1
        oldest = 0
        for i, (_, _, m) in enumerate(self._actions):
            while last.get(oldest, i) < i:
                oldest += 1
            width = max(width, m - oldest + 1)
        return width

    def _steps(self, part: StageWork) -> list[Any]:
        """A part as things to do one after the other: transfers, native runs, tensor-parallel
        exchanges.
        """

        def moves(transfers: list[Transfer]) -> list[Move]:
            return [
                Move(t.number, t.source, t.target, t.slot.offset, t.slot.nbytes) for t in transfers
            ]

        steps: list[Any] = list(moves(part.receives))
        run: list[Record] = []

        def flush() -> None:
            if run:
                table = serialize(run, self.arena, self._keep, self._locate)
                self._keep.append(table)
                steps.append(Native(table.ctypes.data, len(table)))
                run.clear()

        for r in part.records:
            if isinstance(r, tensor_parallel.Pseudo):
                flush()
                steps.append([TensorExchange(self.groups.tp, r, [work]) for work in self._work])
            else:
                run.append(r)
        flush()
        return steps + moves(part.sends)

    def _locate(self, space: int, offset: int) -> int:
        return self.parts.buckets[0].locate(offset) if space == native.GRADS else offset

    def _plan_sums(self) -> None:
        """When a shard's gradients are complete: what is added to what.

        Buffers are reused if shards end in order.
        """
        ends: dict[int, int] = {}
        begins: dict[int, int] = {}
        for i, (phase, _, m) in enumerate(self._actions):
            if phase == "backward" or not self.train:
                begins.setdefault(m, i)
                ends[m] = i
        in_turn = all(
            begins[m] > ends[m - 1] for m in range(1, self.micro) if m in begins and m - 1 in ends
        )
        if not in_turn:
            self.plan = planning.unshared(self.plan)
        self._adds: dict[int, list[tuple[int, int]]] = {}
        self._buffer: dict[int, int] = {}
        shard = self.plan.run[0]
        for a in (*self.plan.threads[0], *self.plan.final) if self.micro else ():
            if a.kind == "run":
                shard = a.a
                self._buffer[shard - self.plan.run[0]] = a.b
            else:
                self._adds.setdefault(shard - self.plan.run[0], []).append((a.a, a.b))
        self._begins = {i: m for m, i in begins.items()}
        self._ends = {i: m for m, i in ends.items()}
        self._late = not in_turn

    def _share_of_norm(self) -> list[tuple[int, int]]:
        a, b = self.parts.own[0]
        grads = self._sum.result.ctypes.data
        out = []
        for lo, n in self.ownership.counted:
            start = self.parts.buckets[0].locate(lo)
            first = max(start, a)
            last = min(start + n, b)
            if first < last:
                out.append((grads + 4 * first, last - first))
        return out

    # --- a step ---

    def run(self) -> Sums:  # noqa: C901, PLR0915
        lib = native.library()
        run = self.plan.run[0]
        stats_bytes = 4 * native.library().stats
        bases = self._bases
        bases_address = self._bases.ctypes.data
        bases[native.PARAMS] = self.arena.address(native.PARAMS)
        work = self._work.ctypes.data
        stride = self._work.strides[0]
        c = native.Context.from_buffer_copy(self.context)
        grads = self._sum.buffers
        stats = self._stats.buffers
        pending: deque[Any] = deque()
        started: set[int] = set()
        # no op of this program is here: parameters that others used have gradients of 0
        if not self._begins:
            grads[:] = 0
        for i, (phase, stage, m) in enumerate(self._actions):
            slot = m % self._window
            base = work + slot * stride
            bases[native.WORK] = base
            c.first = (run + m) * self.shard_size
            c.valid = min(self.shard_size, self.samples - c.first)
            c.rows = self.context.rows + 8 * c.first
            # of the programs
            workspace = self._work[slot]
            program_index = -1 if c.valid < self.shard_size else 0
            stats_at = self._stats_at[program_index]
            if m not in started:
                started.add(m)
                workspace[stats_at : stats_at + stats_bytes] = 0
            if i in self._begins:
                grads[self._buffer[m]] = 0  # (of an evaluation: no floats)
            bases[native.GRADS] = grads[self._buffer[m]].ctypes.data
            for step in self._code[program_index][phase, stage]:
                if isinstance(step, Native):
                    lib.run(step.address, step.records, c, bases_address)
                elif isinstance(step, Move):
                    self._move(step, m, workspace, pending)
                else:
                    step[slot]()
                    self.bytes_moved += step[slot].sent
            if i in self._ends:
                stats[self._buffer[m]] = workspace[stats_at : stats_at + stats_bytes].view(
                    np.float32
                )
                if not self._late:
                    self._add(m)
        if self._late:
            for m in range(self.micro):
                self._add(m)
        for request in pending:
            request.wait()
        if self.train:
            self._sum.start()
        self._stats.start()
        self.result[:] = self._stats.finish()
        if self.train:
            self._sum.finish()
        self.groups.pp.broadcast(self.result, self.loss_place)
        r = self.result
        return Sums(r.tolist(), r[1:2].ctypes.data, self.updates, self._counted)

    def _move(self, t: Move, m: int, workspace: np.ndarray, pending: deque[Any]) -> None:
        tag = (m * self._transfers + t.number) % (MAX_TAG + 1)
        value = workspace[t.at : t.at + t.size]
        if t.source == self.groups.p:
            # what has arrived need not be kept to the end of the step
            while pending and pending[0].test():
                pending.popleft().wait()
            pending.append(self.groups.pp.send(value.copy(), t.target, tag, wait=False))
            self.bytes_moved += t.size
        else:
            self.groups.pp.recv(value, t.source, tag)

    def _add(self, m: int) -> None:
        # whether a sum is finite is looked at where the step is taken
        with np.errstate(all="ignore"):
            for a, b in self._adds.get(m, ()):
                self._sum.buffers[a] += self._sum.buffers[b]
                self._stats.buffers[a] += self._stats.buffers[b]
