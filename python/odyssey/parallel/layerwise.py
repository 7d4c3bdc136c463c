"""A step taken layer by layer: every segment of the program for all of this rank's shards before the next one.

Used when more than one bucket is reduced: a bucket's reduction starts when its segment has run and goes on while the
backward pass does (overlap), and with ZeRO 2 and 3 its gradients and parameters need to exist only then. The
activations of all shards are kept for it; a step in one bucket (engine.Direct) needs those of one shard per thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import native
from ..optim import Update
from ..program import encoded, place
from . import plan as planning
from . import reduction, strategy
from .buckets import STATS, Segment, segments
from .runner import Runner, Sums

if TYPE_CHECKING:
    from ..engine import Engine


class Layerwise(Runner):
    """One batch size: native steps per segment, a reduction per bucket.

    waited: seconds spent waiting for reductions after the last segment, and computed: in all segments.
    """

    def __init__(self, engine: Engine, samples: int, sample_shape: tuple[int, ...]) -> None:
        super().__init__(engine, samples)
        lay, comm = engine.layout, engine.groups.dp
        self.plan = planning.make(self.shards, comm.rank, comm.size, lay.workers, lay.threads)
        self.parts = parts = engine.parts
        records = engine.record(self.shard_size, sample_shape)
        self.segments = segments(records, engine.arena, parts.buckets, by_params=parts.spread)
        own = self.plan.run[1] - self.plan.run[0]
        work_bytes = place(records)
        self._work = engine.storage("work", max(own, 1) * work_bytes).reshape(max(own, 1), work_bytes)
        self.work_bytes = self._work.nbytes
        self._reductions: dict[int, reduction.Reduction] = {}
        self._own_grads: dict[int, np.ndarray] = {}
        self._make_reductions(engine)
        self._keep: list[Any] = []
        self._steps = [self._step(engine, records, s) for s in self.segments]
        self._next_need = self._needs()
        self.updates = self._updates() if engine.train else []
        self.waited = self.computed = 0.0

    # --- preparation ---

    def _make_reductions(self, engine: Engine) -> None:
        lay, comm, parts, lib = engine.layout, engine.groups.dp, self.parts, native.library()
        pooled = parts.stage >= 2 and comm.size > 1
        options: dict[str, Any] = {"scatter": parts.stage > 0 and comm.size > 1, "shared": not pooled}
        written = [s.grads for s in self.segments if s.grads not in (None, STATS)]
        self._pool: list[np.ndarray] = []
        if pooled and written:
            # what a reduction of the largest bucket needs is known by making one
            b = max(written, key=lambda b: parts.buckets[b].floats)
            probe = strategy.make(
                lay.reduction,
                comm,
                self.plan,
                parts.buckets[b].floats,
                lay.workers,
                content=engine.content(self.samples, b),
                **options,
            ).floats_needed
            names = [f"pool {i}" for i in range(min(2, len(written)))]
            self._pool = [engine.storage(name, 4 * probe).view(np.float32) for name in names]
        for i, b in enumerate(written):
            storage = self._pool[i % len(self._pool)] if pooled else None
            self._reductions[b] = strategy.make(
                lay.reduction,
                comm,
                self.plan,
                parts.buckets[b].floats,
                lay.workers,
                storage=storage,
                content=engine.content(self.samples, b),
                **options,
            )
            if pooled:
                a, z = parts.own[b]
                self._own_grads[b] = engine.storage(f"gradients {b}", 4 * (z - a)).view(np.float32)
        self._pooled = pooled
        self._stats = strategy.make(lay.reduction, comm, self.plan, lib.stats, lay.workers)

    def _step(self, engine: Engine, records: list[Any], s: Segment) -> native.Step:
        buffers = self._stats if s.grads in (None, STATS) else self._reductions[s.grads]
        table = encoded(records[s.start : s.stop], engine.arena, self._keep, self._locate(s))
        threads = [self._numbers(t, adds=s.grads is not None) for t in self.plan.threads]
        final = self._numbers(self.plan.final if s.grads is not None else (), adds=True)
        starts = np.array([a.ctypes.data for a in (*threads, final)], np.int64)
        counts = np.array([len(a) for a in (*threads, final)], np.int64)
        self._keep += [table, threads, final, starts, counts]
        return native.Step(
            program=table.ctypes.data,
            records=len(table),
            threads=len(threads),
            actions=starts.ctypes.data,
            counts=counts.ctypes.data,
            params=0 if self.parts.spread else engine.arena.address(native.PARAMS),
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

    def _locate(self, s: Segment) -> Any:
        """Where an offset of the arena (in floats) is for the records of a segment."""
        buckets, size = self.parts.buckets, self.arena_size

        def locate(space: int, offset: int) -> int:
            if space == native.GRADS:
                return offset - size if offset >= size else buckets[s.grads].locate(offset)
            return buckets[s.params].locate(offset) if self.parts.spread else offset

        return locate

    @staticmethod
    def _numbers(actions: tuple[planning.Action, ...], *, adds: bool) -> np.ndarray:
        rows = [(0 if a.kind == "run" else 1, a.a, a.b) for a in actions if adds or a.kind == "run"]
        return np.array(rows, np.int64).reshape(-1, 3)

    def _needs(self) -> list[int | None]:
        """For each segment the next bucket of parameters that a later one needs."""
        out: list[int | None] = []
        for i, s in enumerate(self.segments):
            later = (t.params for t in self.segments[i + 1 :] if t.params not in (None, s.params))
            out.append(next(later, None))
        return out

    def _updates(self) -> list[Update]:
        updates = []
        for b in range(len(self.parts.buckets)):
            lo = self.parts.own[b][0]
            if b in self._own_grads:
                grads, origin = self._own_grads[b].ctypes.data, lo
            elif b in self._reductions:
                grads, origin = self._reductions[b].result.ctypes.data, 0
            else:  # no parameter of this bucket has a gradient
                zeros = native.aligned(self.parts.buckets[b].floats)
                self._keep.append(zeros)
                grads, origin = zeros.ctypes.data, 0
            for p in self.parts.pieces(b):
                at = self.parts.state_at(b, p)
                updates.append(Update(self.parts.param_address(b, p), grads + 4 * (p.at - origin), at, p.n, p.lo))
        return updates

    # --- a step ---

    def run(self) -> Sums:
        lib, parts, pending = native.library(), self.parts, []
        started = time.perf_counter()
        done = 0
        for s, step, need in zip(self.segments, self._steps, self._next_need, strict=True):
            if parts.spread:
                if s.params is not None:
                    step.params = parts.use(s.params)
                if need is not None:
                    parts.prefetch(need)
            reducing = s.grads is not None and s.grads != STATS
            if reducing and self._pooled and len(pending) - done >= len(self._pool):
                self._finish(pending[done])
                done += 1
            step.context = self.context
            step.rows = self.context.rows
            lib.step(step)
            if s.grads == STATS:
                self._stats.start()
            elif reducing:
                pending.append(s.grads)
                if self.overlap:
                    self._reductions[s.grads].start()
            if self.overlap:
                for b in pending[done:]:
                    self._reductions[b].poll()
        computed = time.perf_counter()
        for b in pending[done:]:
            self._finish(b)
        stats = self._stats.finish()
        self.computed += computed - started
        self.waited += time.perf_counter() - computed
        return Sums(float(stats[0]), float(stats[1]), float(stats[2]), stats[1:2].ctypes.data, self.updates)

    def _finish(self, b: int) -> None:
        if not self.overlap:
            self._reductions[b].start()
        result = self._reductions[b].finish()
        if self._pooled:
            lo, hi = self.parts.own[b]
            self._own_grads[b][:] = result[lo:hi]

    @property
    def grad_bytes(self) -> int:
        """Bytes of gradients and of what their reduction works in, without what the engine's runners share."""
        return 0 if self._pooled else sum(4 * r.floats_needed for r in self._reductions.values())

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank's reductions have sent so far."""
        return sum(r.bytes_sent for r in (*self._reductions.values(), self._stats))

    @property
    def bytes_plain(self) -> int:
        return sum(r.bytes_plain for r in (*self._reductions.values(), self._stats))
