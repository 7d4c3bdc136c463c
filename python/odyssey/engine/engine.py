"""Runs the shards of a batch: one recorded program, a plan, a reduction, and a way of taking the step.

The trainer says which batch; this file makes sure that the sums of loss, samples, correct predictions and gradients
come out, the same bits whatever the layout. There are four ways of taking a step, chosen by the layout alone and made
from what was recorded (runner.Recorded):

    DirectRunner    one native call for all shards, then one reduction        the ordinary case
    BucketedRunner  segment by segment, a reduction per bucket                several buckets, ZeRO 2 and 3
    PipelineRunner  micro-batch by micro-batch, ranks exchanging activations  pipeline and tensor parallelism
    GpuRunner       a launch per op for all shards, devices exchanging sums   GPUs

An engine is used twice: for training steps (with a backward pass) and for evaluation (without).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import fingerprint, native
from ..core.arena import Arena
from ..core.placement import FIRST, Device
from ..core.program import Record, Recorder, ShardEager, fuse, using
from ..core.tensor import Tensor, empty, layout_of, no_grad
from ..data import Batch
from ..data.trees import Form, Leaf, leaves, mapped
from ..errors import ConfigError, OdysseyError
from ..nn import Module
from ..nn.module import in_mode
from ..nn.utils import global_norm
from ..optim import Optimizer, Update
from ..parallel import buckets as bucketing
from ..parallel import plan as planning
from ..parallel.mesh import Groups
from ..parallel.zero import Parts
from .direct import DirectRunner
from .layout import Layout
from .metrics import Metric
from .metrics import record as record_metrics
from .owned import overlaps, owned, without
from .runner import Recorded, Runner, Storage, Sums

if TYPE_CHECKING:
    from ..parallel import tensor
    from .gpu.group import DeviceGroup

RUNNERS = 8  # batch sizes that are kept prepared; an epoch has two, batches of one's own may have any number


def effective_shard_size(samples: int, shard_size: int, gpu: bool = False) -> int:
    """The shard size of a batch; one smaller than a shard gets no more groups of lanes than it fills."""
    if samples >= shard_size:
        return shard_size
    lanes = native.library().lanes
    return samples if layout_of(samples) == "rows" and not gpu else min(shard_size, -(-samples // lanes) * lanes)


class Engine:
    """Sums over a global batch: of the loss, of correct predictions and, if `train`, of the gradients.

    Args:
        model, loss: called as loss(model(x), labels) for each shard.
        arena: the model's parameters.
        groups: this rank's communicators along the axes of the mesh.
        train: whether to run a backward pass.
        precision: of the products (precision.py).
        conv_algorithm: of the convolutions (products.py).
        scaled: whether gradients come out multiplied by `loss_scale`.
        like: the training engine, whose parts and places an engine for evaluation shares.
        team: the GPUs of this process, if the layout names some.
        metrics: see metrics.record.
    """

    def __init__(
        self,
        model: Module,
        loss: Any,
        arena: Arena,
        layout: Layout,
        groups: Groups | None = None,
        *,
        train: bool,
        seed: int,
        like: Engine | None = None,
        precision: str = "fp32",
        conv_algorithm: str = "auto",
        scaled: bool = False,
        team: DeviceGroup | None = None,
        metrics: dict[str, Metric] | None = None,
    ) -> None:
        self.model, self.loss, self.arena, self.layout, self.train = model, loss, arena, layout, train
        self.team, self.metrics = team, metrics
        self.metric_at: dict[str, int] = {}  # places among the statistics, once a program is recorded
        self.upcoming: Batch | None = None  # the one after it, where known: GPUs may bring it meanwhile
        self.groups, self.seed = groups or Groups(layout.comm, layout.mesh), seed
        self.shard_size = layout.shard_size
        self._like = like
        self.precision, self.conv_algorithm, self.scaled = precision, conv_algorithm, scaled
        self.loss_scale = 1.0  # of the next run, if `scaled`
        self._parts: Parts | None = None
        self._ownership: dict[str, tensor.Piece] = {}  # of tensor parallelism: what this rank trains
        self._places: Any = lambda r: 0  # record -> position in the pipeline
        self._cut_by: tuple[Any, ...] | None = None  # the program that was cut automatically
        self._used: dict[int, list[int]] = {}  # parameter (offset) -> positions in the pipeline of the ops that read it
        self._several: dict[str, int] = {}  # parameters of several positions, and the one that updates them
        self._outputs: int | None = None  # of the model, as the loss saw them
        self._records: dict[tuple[int, ...], list[Record]] = {}
        self._prepared: dict[tuple[Any, ...], Runner] = {}  # the latest last
        self._storage = Storage()
        self.counted: list[tuple[int, int]] = []  # runs that are this rank's share of the global norm
        self.memories: dict[int, dict[str, Any]] = {}  # of a strategy, by bucket
        self.bytes_sent = self.bytes_plain = 0  # by this rank, so far (Runner)
        self.warnings: list[str] = []  # once a program is recorded: what the user should know,
        self.plans: list[str] = []  # and how the model was cut

    def run(self, batch: Batch, step: int) -> Sums:
        """The sums over all shards of all ranks; gradients are valid until the next call."""
        ready = self._ready(batch, step)
        sent, plain = ready.bytes_sent, ready.bytes_plain
        sums = ready.run()
        self.bytes_sent += ready.bytes_sent - sent
        self.bytes_plain += ready.bytes_plain - plain
        if self.layout.execution != "replay":
            self._check_labels(batch.dataset)
        return sums

    def measured(self, sums: Sums) -> dict[str, float]:
        """The metrics of a step: sums over its samples."""
        return {name: sums.values[at] for name, at in self.metric_at.items()}

    def _ready(self, batch: Batch, step: int) -> Runner:
        """What a batch needs, pointing at its samples."""
        if batch.run is not None:  # it may have been read before shards moved
            batch = batch.covering(*self.part(len(batch.indices)))
        data = batch.dataset
        ready = self.prepare(len(batch.indices), data.form)
        if ready.data is not data:
            if self.layout.execution == "replay":
                self._check_labels(data)
            ready.use(data)
        ready.batch, ready.upcoming = batch, self.upcoming
        ready.context.rows = batch.indices.ctypes.data
        ready.context.step, ready.context.loss_scale = step, self.loss_scale
        return ready

    def prepare(self, samples: int, form: Form) -> Runner:
        """What a batch size needs; made when it is first met."""
        size = self.shard_size_of(samples)
        key = (samples, size, *form, self.layout.counts(planning.shard_count(samples, size)))
        runner = self._prepared.pop(key, None)
        if runner is None:
            self._prepared = {k: r for k, r in self._prepared.items() if k[:-1] != key[:-1]}  # shards have moved
            try:
                runner = self._runner(samples, form)
            except OdysseyError as error:
                error.raised_on_all_ranks = True  # all ranks record the same model for the same layout
                raise
            # making a runner may be a collective call, so all ranks keep the same ones
            if self.layout.comm.all_reduce(np.array([self._storage.grown], np.int32), "max")[0]:
                self._prepared.clear()
            self._storage.grown = False
        self._prepared[key] = runner
        while len(self._prepared) > RUNNERS:
            del self._prepared[next(iter(self._prepared))]
        return runner

    def _runner(self, samples: int, form: Form) -> Runner:
        lay, n, parts, records = self.layout, self.shard_size_of(samples), None, []
        if lay.execution == "replay":
            parts = self.parts_for(samples, form)
            records = self.record(n, form)
        recorded = Recorded(
            records,
            lambda executor: self._traced(executor, n, form),
            self.arena,
            lay,
            self.groups,
            self.train,
            self.seed,
            self.precision,
            samples,
            n,
            form,
            parts,
            self.placing(records, n, form),
            (self._like or self)._cut_by is not None,
            self.counted,
            self._storage,
            self.memories,
            self.warnings,
        )
        if self.team is not None:
            from .gpu.runner import GpuRunner

            return GpuRunner(recorded, self.team)
        if lay.split:
            from .pipeline import PipelineRunner

            return PipelineRunner(recorded)
        several = parts is not None and self.train and (parts.stage > 1 or len(parts.buckets) > 1)
        if parts is not None and (lay.offload or lay.comm.size > 1 and (parts.partitioned or several)):
            from .bucketed import BucketedRunner

            return BucketedRunner(recorded)
        return DirectRunner(recorded)

    @property
    def looks_ahead(self) -> bool:
        """Whether it is of use to know the batch after the one that is run (`upcoming`)."""
        return self.team is not None and any(r.looks_ahead for r in self._prepared.values())

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; where it is of use, `upcoming` is the one that follows."""
        following: Batch | None = None
        try:
            while True:
                batch = next(batches, None) if following is None else following
                following = self.upcoming = next(batches, None) if self.looks_ahead else None
                if batch is None:
                    return
                yield batch
        finally:
            self.upcoming = None

    def memory(self) -> tuple[int, int]:
        """Bytes on this rank (or its first GPU) of gradients and what their reduction works in, and of activations."""
        if self.team is not None:
            return self.team.workers[0].memory()
        shared = {name: a.nbytes for name, a in self._storage.arrays.items()}
        work = shared.pop("work", 0) + sum(r.work_bytes for r in self.runners if not r.shares_work)
        return sum(shared.values()) + sum(r.grad_bytes for r in self.runners), work

    @property
    def runners(self) -> list[Runner]:
        """What has been prepared so far."""
        return list(self._prepared.values())

    def _check_labels(self, data: Any) -> None:
        if self._outputs is not None and data.classes > self._outputs:
            raise ConfigError(
                f"[train] the data set {data.name} has {data.classes} classes and the model {self._outputs} outputs; "
                "give the model an output for each class"
            )

    # --- parts ---

    @property
    def parts(self) -> Parts:
        """Which parameters this rank computes with and updates; known once a program is recorded."""
        source = self._like or self
        assert source._parts is not None
        return source._parts

    def parts_for(self, samples: int, form: Form) -> Parts:
        """The same, recording a program of this batch size if there is none yet."""
        if self._like is not None:
            return self._like.parts_for(samples, form)
        if self._parts is None:
            lay = self.layout
            records = self._fused(self.shard_size_of(samples), form)
            constant = [name for name, b in self.arena.buffers if not b.requires_grad]
            unused = [name for name in bucketing.unused(records, self.arena) if name not in constant]
            if unused:
                self.warnings.append(f"no gradient reaches {', '.join(unused)}: counted as zero")
            if lay.split:
                buckets = [self._share(records, self.shard_size_of(samples), form)]
            else:
                cuts = lay.comm.size > 1 or lay.offload
                limit = lay.bucket_floats(self.arena.size) if cuts else self.arena.size
                buckets = bucketing.cut(records, self.arena, limit, by_params=lay.zero == 3 or bool(lay.offload))
            self._parts = Parts(lay.zero, buckets, self.groups.dp, self.arena)
        return self._parts

    def placing(self, records: list[Record], n: int, form: Form) -> Callable[[Record], int]:
        """The position in the pipeline of each record of the program of one shard of n samples.

        An automatic cut was made by the numbers of the ops of one program. In others, of an evaluation without dropout
        or of another layout, ops have other numbers.
        """
        source = self._like or self
        if source._cut_by in (None, (self.train, n, *form)):
            return source._places
        from ..parallel.stages import placed_like

        # not `records`: tensor parallelism may have moved on from the first row of a parameter
        return placed_like(self._fused(n, form), self.arena, source._used)

    def _first_placing(self, records: list[Record], n: int, form: Form) -> Callable[[Record], int]:
        """From records to positions in the pipeline: by the model's own placement, or an automatic one. Raises
        ConfigError: the model is placed on a number of devices that does not fit."""
        pp, interleaved = self.layout.mesh.pp, self.layout.schedule == "interleaved"
        devices = sorted({r.device for r in records})
        placed = len(devices)
        if placed == 1:
            from ..parallel import costs

            self._cut_by = (self.train, n, *form)
            count, measured = 2 * pp if interleaved else pp, self.layout.reduction.same_bits
            stage_of, plan = costs.stages(records, self.arena, n, count, self.layout.comm, measured=measured)
            by = "measured cost" if measured else "bytes touched"
            self.plans.append(f"the model is cut into {len(plan.parts)} stages by {by}:\n{plan}")
            return lambda r: stage_of(r) % pp
        if placed < pp or (interleaved and placed % pp):
            raise ConfigError(
                f"[pipeline] the model is placed on {placed} devices and pp is {pp}; "
                f"use --pp {placed}, or place it on {'a multiple of ' if interleaved else ''}{pp}"
            )
        index = {d: i for i, d in enumerate(devices)}
        return lambda r: index[r.device] % pp if interleaved else index[r.device] * pp // placed

    def _share(self, records: list[Record], n: int, form: Form) -> bucketing.Bucket:
        """The parameters of this rank's part of the model, as one bucket."""
        if self.layout.mesh.pp > 1:
            self._places = self._first_placing(records, n, form)
        place_of = self.placing(records, n, form)
        users: dict[int, dict[int, int]] = {}
        for r in sorted(records, key=lambda r: r.tag):
            for o in bucketing.touched(r, self.arena, native.PARAMS):
                users.setdefault(o, {}).setdefault(r.tag, place_of(r))
        self._used = {o: list(by_op.values()) for o, by_op in users.items()}
        where = {n: self._used.get(o, [self.groups.p]) for n, o in self.arena.offsets.items()}
        self._several = {n: places[0] for n, places in where.items() if len(set(places)) > 1}
        here = [n for n, places in where.items() if places[0] == self.groups.p]
        ownership: dict[str, tensor.Piece] = {}
        if self.layout.mesh.tp > 1:
            from ..parallel import tensor

            whole = dict.fromkeys(self._several, tensor.Piece())
            split = tensor.rewrite(records, self.groups.t, self.layout.mesh.tp, whole)
            ownership = self._ownership = split.ownership
            self.plans.append(
                f"each layer is shared by {self.layout.mesh.tp} ranks; received per shard by the first of them:\n"
                f"{split.describe()}"
            )
        runs = []
        for name, p in self.arena.named:
            if name in here:
                runs.append(owned(self.arena.offsets[name], p.shape, ownership.get(name), self.groups.t))
        self._valid = [run for r in runs for run in r.valid]
        self.counted = [r.whole for r in runs if r.counted and r.whole[0] < self.arena.trained]
        return bucketing.of_ranges([r.whole for r in runs], tuple(here))

    def own_state(self, flat: np.ndarray) -> np.ndarray:
        """This rank's part of an array of the arena's layout, as the optimizer keeps it."""
        return flat if self._parts is None else self._parts.cut_state(flat)

    @property
    def parameters_address(self) -> int:
        """Where the parameters are that are trained: on the host, or on the first GPU."""
        return self.arena.address(native.PARAMS) if self.team is None else self.team.parameters.addresses[0][0]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters on this rank."""
        return self.arena.params.nbytes if self._parts is None else self._parts.nbytes

    def norm(self, sums: Sums) -> float:
        """The Euclidean norm of all gradients, the same bits whoever has which of them."""
        groups, comm = self.groups, self.layout.comm

        def largest(a: np.ndarray) -> np.ndarray:
            return comm.all_reduce(a, "max") if self.layout.split or self.layout.zero else a

        def total(a: np.ndarray) -> np.ndarray:
            if self.layout.zero and groups.dp.size > 1:
                a = groups.dp.all_reduce(a, "sum")
            return groups.model.all_reduce(a, "sum") if self.layout.split else a

        runs = sums.counted
        if runs is None:  # without buffers, which lie behind all parameters
            cut = ((u.grads, min(self.arena.trained - u.at, u.n)) for u in sums.updates)
            runs = [(at, n) for at, n in cut if n > 0]
        return global_norm(runs, largest, total, self.team)

    # --- what of all parameters this rank stands for ---

    def replicated(self) -> list[tuple[int, int]]:
        """Runs of the arena whose parameters are the same on all ranks of the data-parallel group, on this rank."""
        if self.layout.zero == 3 and self.layout.comm.size > 1:
            return []
        return self._valid if self.layout.split else [(0, self.arena.size)]

    def counted_updates(self, updates: list[Update]) -> list[Update]:
        """Of these updates what this rank counts, so that all ranks together count each parameter once; collective."""
        lay, groups = self.layout, self.groups
        if not lay.split:
            return updates if lay.zero or lay.comm.rank == 0 else []
        taken: list[tuple[int, int]] = []
        if lay.zero or groups.dp.rank == 0:
            taken = self._valid
        everyone = groups.model.all_gather_each(np.array(self._valid, np.int64).reshape(-1, 2))
        earlier = [run for own in everyone[: groups.model.rank] for run in own.tolist()]
        counted = []
        for u in updates:
            for lo, n in overlaps((u.at, u.n), taken):
                for a, b in without((lo, n), earlier):
                    shift = a - u.at
                    counted.append(Update(u.params + 4 * shift, u.grads + 4 * shift, 0, b, a))
        return counted

    # --- everything on every rank ---

    def parameters(self) -> np.ndarray:
        """All parameters, in the arena's layout, on every rank; collective if they are spread over ranks."""
        if self._parts is None:
            return self.arena.params
        return self._whole(self._parts.parameters())

    def load(self, flat: np.ndarray, memories: dict[int, dict[str, Any]]) -> None:
        """Takes all parameters from an array of the arena's layout, and what a strategy keeps; all ranks call it."""
        if self._parts is None:
            self.arena.params[:] = flat
        else:
            self._parts.load(flat)
        if self.memories or memories:
            self._prepared.clear()  # they hold on to arrays of the memories
        self.memories = memories

    def state(self, own: np.ndarray) -> np.ndarray:
        """An array of the optimizer's state of this rank, as one of the arena's layout on every rank; collective."""
        if self._parts is None:
            return own
        return self._whole(self._parts.state(own))

    def _whole(self, flat: np.ndarray) -> np.ndarray:
        """Completes an array of which this rank has the floats of its share of the model."""
        comm = self.groups.model
        if comm.size == 1:
            return flat
        mine = np.array((self._like or self)._valid, np.int64).reshape(-1, 2)
        runs = np.concatenate(comm.all_gather_each(mine)).tolist()
        values = np.concatenate(comm.all_gather_each(np.concatenate([flat[:0], *(flat[a : a + n] for a, n in mine)])))
        at = 0
        for lo, n in runs:
            flat[lo : lo + n] = values[at : at + n]
            at += n
        return flat

    def agree(self, ok: bool) -> bool:
        """Whether all ranks found their part in order; without communication where all have the same."""
        if not self.layout.split and not self.layout.zero:
            return ok
        return bool(self.layout.comm.all_reduce(np.array([ok], np.int32), "min")[0])

    def commit_step(self, optimizer: Optimizer, sums: Sums, divisor: int, lr: float) -> bool:
        """Updates the parameters if loss and gradients are finite, on all ranks; returns whether they were.

        divisor: address of the number (float32) that gradients are divided by.
        """
        if self.team is not None:
            return self.team.commit_step(optimizer, sums, divisor, lr)
        agree = self.agree if self.layout.split or self.layout.zero else None
        return math.isfinite(sums.loss) and optimizer.apply(sums.updates, divisor, lr, agree, sums.samples_address)

    def fingerprints(
        self, *wholes: Sequence[fingerprint.Run], after: list[Update] | None = None
    ) -> Callable[[], list[int]]:
        """A function that gives the fingerprints of several wholes, each in runs of memory where this engine has it.

        after: the updates of the steps after which it will be called.
        """
        if self.team is not None:
            return self.team.fingerprints(wholes, after)
        made = [fingerprint.Runs(runs) for runs in wholes]
        return lambda: [one() for one in made]

    def gradients(self, update: Update) -> np.ndarray:
        """The gradients of an update (n,) float32, copied."""
        if self.team is not None:
            return self.team.read(update.grads, np.empty(update.n, np.float32))
        return native.memory(update.grads, 4 * update.n).view(np.float32).copy()

    def updated(self) -> None:
        """After an update: brings parameters to the ranks that compute with them."""
        if self._parts is not None:
            self._parts.changed()
        for name, place in self._several.items():
            self.groups.pp.broadcast(self.arena.view(self.arena.params, name), place)

    def shard_size_of(self, samples: int) -> int:
        """Samples per shard in a batch of so many: of `shard_size`, or of the default for such a batch."""
        size = self.shard_size or planning.default_shard_size(samples)
        return effective_shard_size(samples, size, self.team is not None)

    def part(self, samples: int) -> tuple[int, int]:
        """Which run of a batch's samples this rank computes, (first, one past the last); one sample if it has none."""
        n, dp, workers = self.shard_size_of(samples), self.groups.dp, self.layout.workers
        shards = planning.shard_count(samples, n)
        runs = planning.runs(shards, dp.size, workers, self.layout.counts(shards))[dp.rank * workers :][:workers]
        lo, hi = runs[0][0] * n, min(runs[-1][1] * n, samples)
        return (lo, hi) if hi > lo else (0, min(1, samples))

    # --- recording ---

    def _pass(self, executor: Recorder | ShardEager, n: int, form: Form) -> None:
        """Forward and backward of one shard of n samples, through whatever executor is current."""
        layout = layout_of(n)  # `executor` is the current one
        number = itertools.count()  # of the array that is gathered

        def gathered(leaf: Leaf, device: Device = FIRST, target: bool = False) -> Tensor:
            sequence = leaf.dtype == "int32" and len(leaf.shape) == 1
            t = empty((n, *leaf.shape), "tokens" if sequence else layout)
            t.dtype, t.device = np.dtype(leaf.dtype).type, device
            if leaf.normalised:
                channels = leaf.shape[0] if len(leaf.shape) > 1 else 1
                executor.emit("input", t.memory, t.groups, t.features, channels, layout=layout)
            else:  # lanes without a sample: labels of -1, zeros
                rest = -int(target and leaf.dtype == "int32")
                sizes = t.groups, t.features, t.lanes // n, next(number), rest
                executor.emit("array", t.memory, *sizes, layout=t.layout)
            executor.close(device)
            return t

        x = mapped(gathered, form.inputs)
        y = self.model(*x) if isinstance(x, tuple) else self.model(x)
        if y is None:
            raise ConfigError(f"[train] forward() of {type(self.model).__name__} returned None; return its result")
        place = next((t.device for t in leaves(y) if isinstance(t, Tensor)), FIRST)
        target = mapped(lambda leaf: gathered(leaf, place, True), form.targets)  # where the loss is computed
        loss = self.loss(y, target)
        if not isinstance(loss, Tensor) or loss.shape != ():
            said = f"has shape {loss.shape}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
            raise ConfigError(f"[train] the loss {said}; it must be one number, a sum or mean over samples")
        stats = executor.first_stats
        with executor.within(executor.scope.ops - 1, loss.device):
            if stats is None:  # nobody counted correct predictions
                stats = executor.alloc(16)
                executor.emit("fill", stats, 0.0, 4)
            self.metric_at = record_metrics(executor, self.metrics, form, y, target)
        executor.emit("stats", executor.stats, loss.memory, stats, 0)
        executor.close(loss.device)
        if self.train:
            executor.scaled = self.scaled
            loss.backward()

    def record(self, n: int, form: Form) -> list[Record]:
        """The records of one shard of n samples as this rank runs them; a fresh list whose records may be changed."""
        records = self._fused(n, form)
        if self.layout.mesh.tp > 1:
            from ..parallel import tensor

            like = (self._like or self)._ownership
            records = tensor.rewrite(records, self.groups.t, self.layout.mesh.tp, like).records
        return records

    def _fused(self, n: int, form: Form) -> list[Record]:
        """The records of one shard of n samples on one rank."""
        return fuse(self.recorded(n, form))

    def recorded(self, n: int, form: Form) -> list[Record]:
        """The records of one shard of n samples as the model makes them, the same on all ranks; not to be changed."""
        key = (n, *form)
        if key not in self._records:
            self._records[key] = self._record(n, form, lambda recorder: None)
        return self._records[key]

    def _record(self, n: int, form: Form, listen: Callable[[Any], None]) -> list[Record]:
        recorder = Recorder(self.arena, 4 * self.arena.size, n, self.precision)
        recorder.gpu = self.team is not None
        listen(recorder)
        self._traced(recorder, n, form)
        return recorder.records

    def trace(self, batch: Batch, step: int, listen: Callable[[Any], None]) -> None:
        """Runs the model for the first shard of a batch, as `execution` says: recorded once more, or op by op.

        listen: called with the executor before.
        """
        if self.layout.execution == "replay":
            self._record(self.shard_size_of(len(batch.indices)), batch.dataset.form, listen)
            return
        ready = self._ready(batch, step)
        assert isinstance(ready, DirectRunner)
        ready.run_eager(0, native.aligned(ready.floats), listen)

    def _traced(self, executor: Recorder | ShardEager, n: int, form: Form) -> None:
        executor.conv_algorithm = self.conv_algorithm
        with in_mode(self.model, self.train), using(executor), contextlib.nullcontext() if self.train else no_grad():
            self._pass(executor, n, form)
        self._outputs = executor.outputs
