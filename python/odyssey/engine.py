"""Runs the shards of a batch: one recorded program, a workspace per thread, a plan, and a reduction.

The trainer says which batch; this file makes sure that the sums of loss, samples, correct predictions and gradients
come out, the same bits whatever the layout. It is used twice: for training steps (with a backward pass) and for
evaluation (without).
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np

from . import native
from .arena import Arena
from .comm import Communicator
from .data import ArrayDataset, Batch
from .errors import ConfigError
from .nn import Module
from .parallel import plan as planning
from .parallel.reduction import REDUCTIONS, Reduction
from .placement import FIRST
from .program import Block, Program, Recorder, ShardEager, using
from .tensor import Tensor, empty, layout_of, make, no_grad

EXECUTIONS = ("replay", "eager")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the shards of a step are computed: everything that must not change the result."""

    comm: Communicator
    workers: int  # of this process
    threads: int  # of this process
    shard_size: int
    reduction: str
    execution: str

    def __post_init__(self) -> None:
        for name in ("workers", "threads", "shard_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"[train] {name} is {value!r}; it must be an integer of at least 1")
        if self.reduction not in REDUCTIONS:
            raise ConfigError(f"[train] reduction is {self.reduction!r}; choose from {', '.join(REDUCTIONS)}")
        if self.execution not in EXECUTIONS:
            raise ConfigError(f"[train] execution is {self.execution!r}; choose from {', '.join(EXECUTIONS)}")


def effective_shard_size(samples: int, shard_size: int) -> int:
    """The shard size of a batch; one smaller than a shard gets no more groups of lanes than it fills."""
    if samples >= shard_size:
        return shard_size
    lanes = native.library().lanes
    return samples if layout_of(samples) == "rows" else min(shard_size, -(-samples // lanes) * lanes)


@dataclasses.dataclass
class _Prepared:
    """What a batch size needs: its plan as numbers, its buffers, its reduction."""

    plan: planning.Plan
    buffers: np.ndarray  # (plan.buffers, floats)
    reduce: Reduction
    work: np.ndarray  # (threads, bytes)
    step: native.Step
    keep: list[Any]
    data: ArrayDataset | None = None  # whose arrays the step points at


class Engine:
    """Sums over a global batch: gradients (if `train`), then STATS floats (loss, samples, correct predictions).

    Args:
        model, loss: called as loss(model(x), labels) for each shard.
        arena: the model's parameters.
        train: whether to run a backward pass.
        precision: of the products (precision.py).
        scaled: whether gradients come out multiplied by `loss_scale`.
    """

    def __init__(
        self,
        model: Module,
        loss: Any,
        arena: Arena,
        layout: Layout,
        *,
        train: bool,
        seed: int,
        precision: str = "fp32",
        scaled: bool = False,
    ) -> None:
        self.model, self.loss, self.arena, self.layout, self.train = model, loss, arena, layout, train
        self.seed = seed
        self.precision, self.scaled = precision, scaled
        self.loss_scale = 1.0  # of the next run, if `scaled`
        lib = native.library()
        self.floats = (arena.size if train else 0) + lib.stats
        self.stats_at = self.floats - lib.stats
        self._outputs: int | None = None  # of the model, as the loss saw them
        self._programs: dict[tuple[int, ...], Program] = {}
        self._prepared: dict[tuple[Any, ...], _Prepared] = {}

    def run(self, batch: Batch, step: int) -> np.ndarray:
        """The sums over all shards of all ranks (floats,) float32; valid until the next call."""
        data = batch.dataset
        samples = len(batch.indices)
        key = (samples, *data.sample_shape)
        ready = self._prepared.get(key)
        if ready is None:
            ready = self._prepared[key] = self._prepare(samples, data.sample_shape)
        s = ready.step
        if ready.data is not data:
            self._use(ready, data)
        s.rows = batch.indices.ctypes.data
        s.context.step, s.context.loss_scale = step, self.loss_scale
        if self.layout.execution == "replay":
            native.library().step(s)
        else:
            self._run_eager(ready, s, data.sample_shape)
            self._check_labels(data)
        return ready.reduce()

    def _use(self, ready: _Prepared, data: ArrayDataset) -> None:
        """Points a step at the arrays of a data set."""
        if self.layout.execution == "replay":
            self._check_labels(data)
        c = ready.step.context
        c.images, c.bytes = data.images.ctypes.data, int(data.images.dtype == np.uint8)
        c.labels, c.scale, c.shift = data.labels.ctypes.data, data.scale.ctypes.data, data.shift.ctypes.data
        ready.data = data

    def _check_labels(self, data: ArrayDataset) -> None:
        if self._outputs is not None and data.classes > self._outputs:
            raise ConfigError(
                f"[train] the data set {data.name} has {data.classes} classes and the model {self._outputs} outputs; "
                "give the model an output for each class"
            )

    # --- recording ---

    def _pass(self, executor: Recorder | ShardEager, n: int, sample_shape: tuple[int, ...]) -> None:
        """Forward and backward of one shard of n samples, through whatever executor is current."""
        layout = layout_of(n)
        x = empty((n, *sample_shape), layout)
        channels = sample_shape[0] if len(sample_shape) > 1 else 1
        executor.emit("input", x.memory, x.groups, x.features, channels, layout=layout)
        executor.close(x.device)
        y = self.model(x)
        labels = make(executor.alloc(4 * x.groups * native.library().lanes), (n,), layout, np.int32)
        labels.device = next((t.device for t in (y if isinstance(y, tuple) else (y,)) if isinstance(t, Tensor)), FIRST)
        executor.emit("labels", labels.memory, x.groups, layout=layout)  # fetched where the loss is computed
        executor.close(labels.device)
        loss = self.loss(y, labels)
        if loss.shape != ():
            raise ConfigError(
                f"[train] the loss has shape {loss.shape}; it must be one number, a sum or mean over samples"
            )
        stats = executor.first_stats or loss.memory
        executor.emit("stats", executor.stats, loss.memory, stats)
        executor.close(loss.device)
        if self.train:
            executor.scaled = self.scaled
            loss.backward()

    def _record(self, n: int, sample_shape: tuple[int, ...]) -> Program:
        key = (n, *sample_shape)
        if key not in self._programs:
            recorder = Recorder(self.arena, 4 * self.stats_at, n, self.precision)
            self._traced(recorder, n, sample_shape)
            self._programs[key] = recorder.finish()
        return self._programs[key]

    def _traced(self, executor: Recorder | ShardEager, n: int, sample_shape: tuple[int, ...]) -> None:
        before = [(m, m.training) for m in self.model.modules()]
        self.model.train(self.train)
        try:
            with using(executor), contextlib.nullcontext() if self.train else no_grad():
                self._pass(executor, n, sample_shape)
        finally:
            for m, training in before:
                m.training = training
        self._outputs = executor.outputs

    # --- plans as numbers ---

    def _prepare(self, samples: int, sample_shape: tuple[int, ...]) -> _Prepared:
        lay = self.layout
        shard_size = effective_shard_size(samples, lay.shard_size)
        shards = planning.shard_count(samples, shard_size)
        ranks = lay.comm.size
        p = planning.make(shards, lay.comm.rank, ranks, lay.workers, lay.threads)
        buffers = native.aligned((p.buffers, self.floats))
        lists = [self._numbers(a) for a in (*p.threads, p.final)]
        starts = np.array([a.ctypes.data for a in lists], np.int64)
        counts = np.array([len(a) for a in lists], np.int64)
        keep: list[Any] = [lists, starts, counts]
        step = native.Step(
            threads=len(p.threads),
            actions=starts.ctypes.data,
            counts=counts.ctypes.data,
            params=self.arena.address(native.PARAMS),
            buffers=buffers.ctypes.data,
            buffer_floats=self.floats,
            shard_size=shard_size,
            samples=samples,
        )
        step.context.seed = self.seed
        work = np.zeros(0, np.uint8)
        if lay.execution == "replay":
            program = self._record(shard_size, sample_shape)
            work = native.aligned((len(p.threads), program.work_bytes), np.uint8)
            step.program, step.records = program.records.ctypes.data, len(program.records)
            step.work, step.work_bytes = work.ctypes.data, program.work_bytes
            keep.append(program)
        reduce = Reduction(lay.reduction, lay.comm, p, buffers, lay.workers)
        return _Prepared(p, buffers, reduce, work, step, keep)

    @staticmethod
    def _numbers(actions: tuple[planning.Action, ...]) -> np.ndarray:
        return np.array([(0 if a.kind == "run" else 1, a.a, a.b) for a in actions], np.int64).reshape(-1, 3)

    # --- op by op ---

    def _run_eager(self, ready: _Prepared, s: native.Step, sample_shape: tuple[int, ...]) -> None:
        """The same plan, each shard through Python, one after the other."""
        for actions in (*ready.plan.threads, ready.plan.final):
            for a in actions:
                if a.kind == "add":
                    executor = ShardEager(s.context, 0, 0, 0)
                    rows = [Block(ready.buffers[i]) for i in (a.a, a.b)]
                    executor.emit("add", rows[0], rows[0], rows[1], self.floats)
                    continue
                buffer = ready.buffers[a.b]
                buffer[:] = 0
                c = native.Context.from_buffer_copy(s.context)
                c.first = a.a * s.shard_size
                c.valid = min(s.shard_size, s.samples - c.first)
                c.rows = s.rows + 8 * c.first
                executor = ShardEager(c, buffer.ctypes.data, 4 * self.stats_at, s.shard_size, self.precision)
                self._traced(executor, s.shard_size, sample_shape)
