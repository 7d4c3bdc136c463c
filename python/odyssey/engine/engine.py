"""Runs the shards of a batch: one recorded program, a plan, a reduction, and a way of taking the
step.

The trainer says which batch; this file makes sure that the sums of loss, samples, correct
predictions and gradients come out, the same bits whatever the layout. There are four ways of taking
a step, chosen by the layout alone:

    DirectRunner    one native call for all shards, then one reduction        the ordinary case
    BucketedRunner  segment by segment, a reduction per bucket                several buckets, ZeRO
                                                                              2 and 3
    PipelineRunner  micro-batch by micro-batch, ranks exchanging activations  pipeline and tensor
                                                                              parallelism
    GpuRunner       a launch per op for all shards, devices exchanging sums   GPUs

An engine is used twice: for training steps (with a backward pass) and for evaluation (without).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.uncopied import Uncopied
from ..core import fingerprint, native, setting_versions
from ..core.arena import Arena
from ..core.program import Record, fuse
from ..core.tensor import layout_of
from ..data import Batch
from ..data.nested import Form
from ..errors import ConfigError, OdysseyError
from ..nn import Module
from ..optim import Optimizer, Update
from ..parallel import plan as planning
from ..parallel.mesh import Groups
from .direct import DirectRunner
from .layout import Layout
from .metrics import Metric
from .ownership import Ownership
from .programs import Programs
from .runner import MARKS, Program, Runner, RunnerInputs, Storage
from .sums import Sums

if TYPE_CHECKING:
    from .gpu.group import DeviceGroup

# batch sizes that are kept prepared; an epoch has two, batches of one's own may have any number
MAX_RUNNERS = 8


class Engine(Uncopied):
    """Sums over a global batch: of the loss, of correct predictions and, if `train`, of the
    gradients.

    Args:
        model, loss: called as loss(model(x), labels) for each shard.
        arena: the model's parameters.
        groups: this rank's communicators along the axes of the mesh.
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
        self.model = model
        self.arena = arena
        self.layout = layout
        self.train = train
        self.team = team
        self.precision = precision
        self.programs = Programs(
            model,
            arena,
            loss,
            metrics,
            train=train,
            precision=precision,
            conv_algorithm=conv_algorithm,
            scaled=scaled,
            gpu=team is not None,
            eager=layout.execution != "replay",
            like=like and like.programs,
        )
        # the one after it, where known: GPUs may bring it meanwhile
        self.upcoming: Batch | None = None
        self.groups = groups or Groups(layout.comm, layout.mesh)
        self.seed = seed
        self.shard_size = layout.shard_size
        self._like = like
        self.loss_scale = 1.0  # of the next run, if `scaled`
        self.ownership = like.ownership if like else Ownership(arena, layout, self.groups, team)
        # what ranks must have alike in a step, beside its program
        self.agreed_state: Callable[[], Any] = lambda: None
        self.alike = True  # whether they had, in the last step
        self._stamp: tuple[Any, ...] = ()  # of the last mark
        self._code = 0  # a hash of what ranks must have alike
        # of each size of a batch, whatever its program
        self._reductions: dict[tuple[Any, ...], dict[Any, Any]] = {}
        self._prepared: dict[tuple[Any, ...], Runner] = {}  # the latest last
        self.storage = Storage()
        self.memories: dict[int, dict[str, Any]] = {}  # of a strategy, by bucket
        self.bytes_sent = self.bytes_plain = self.bytes_wire = 0  # by this rank, so far (Runner)

    def run(self, batch: Batch, step: int) -> Sums:
        """The sums over all shards of all ranks; gradients are valid until the next call."""
        ready = self._ready(batch, step)
        distributed = self.layout.comm.size > 1
        traffic_before = ready.traffic() if distributed or self.team is not None else None
        if distributed:
            self._mark(ready)
        sums = ready.run()
        if ready.expected is not None:
            self.alike = sums.values[MARKS] == ready.expected
        if traffic_before is not None:
            sent, plain, wire = (
                total - was for total, was in zip(ready.traffic(), traffic_before, strict=True)
            )
            self.bytes_sent = self.bytes_sent + sent
            self.bytes_plain = self.bytes_plain + plain
            self.bytes_wire += wire
        if self.layout.execution != "replay":
            self._check_labels(batch.dataset)
        return sums

    def loss_in_shards(self, batch: Batch, size: int) -> float:
        """The mean loss of a batch in shards of another size; nothing of that is kept."""
        usual_size = self.shard_size
        previous_keys = list(self._prepared)
        memory = self.storage
        self.storage = Storage()
        self.shard_size = size
        try:
            sums = self.run(batch, 0)
            return sums.loss / sums.samples
        finally:
            self.shard_size = usual_size
            self.storage = memory
            self._drop([key for key in self._prepared if key not in previous_keys])

    def updated(self) -> None:
        """After an update: see Ownership."""
        bytes_before = self.ownership.bytes_sent
        self.ownership.updated()
        sent = self.ownership.bytes_sent - bytes_before
        self.bytes_sent = self.bytes_sent + sent
        self.bytes_plain = self.bytes_plain + sent

    def _mark(self, ready: Runner) -> None:
        """Sees to it that the exchange of this step compares what ranks must have alike."""
        stamp = (ready, setting_versions.updates.value)
        self.alike = True
        if stamp != self._stamp:
            self._code = fingerprint.hash_of((ready.fingerprint, self.agreed_state()))
            self._stamp = stamp
            if self.team is not None:  # whose sums are not the host's until the step is taken
                everyone = self.layout.comm.all_gather(np.array([self._code], np.int64))
                self.alike = bool((everyone == self._code).all())
        code = self._code
        if self.layout.zero in (1, 2) and not self.layout.split:
            # a write on one rank alone would be gone after the update, and its gradients would not
            code = (code + self._weights()) & (1 << 63) - 1
        ready.mark(code)

    @functools.cached_property
    def _weights(self) -> fingerprint.Runs:
        return fingerprint.Runs([(self.arena.address(native.PARAMS), self.arena.size, 0)])

    def measured(self, sums: Sums) -> dict[str, float]:
        """The metrics of a step: sums over its samples."""
        return {name: sums.values[index] for name, index in self.programs.metric_at.items()}

    def _ready(self, batch: Batch, step: int) -> Runner:
        """Returns what a batch needs, pointing at its samples."""
        if batch.run is not None:  # it may have been read before shards moved
            batch = batch.covering(*self.part(len(batch.indices)))
        data = batch.dataset
        ready = self.prepare(len(batch.indices), data.form)
        if ready.data is not data:
            if self.layout.execution == "replay":
                self._check_labels(data)
            ready.use(data)
        self.programs.note_run(ready.shard_size, data.form)
        ready.batch = batch
        ready.upcoming = self.upcoming
        ready.context.rows = batch.indices.ctypes.data
        ready.context.step = step
        ready.context.loss_scale = self.loss_scale
        return ready

    def prepare(self, samples: int, form: Form) -> Runner:
        """Returns what a batch size needs with the present settings; made when it is first met."""
        size = self.shard_size_of(samples)
        shape = (samples, size, *form, self.layout.counts(planning.shard_count(samples, size)))
        key = (self.programs.current(), *shape)
        runner = self._prepared.pop(key, None)
        if runner is None:
            try:
                self.programs.recording(size, form)
                # it is known now what forward() sets itself
                key = (self.programs.current(), *shape)
                runner = self._prepared.pop(key, None) or self._prepare_runner(shape, form)
            except OdysseyError as error:
                # all ranks record the same model for the same layout
                error.raised_on_all_ranks = True
                raise
        self._prepared[key] = runner
        while len(self._prepared) > MAX_RUNNERS:
            self._drop([next(iter(self._prepared))])
        return runner

    def _prepare_runner(self, shape: tuple[Any, ...], form: Form) -> Runner:
        """A runner for batches of a shape.

        Reductions are those of another program for it, if there is one: no rank talks to others
        because of a setting that it alone may have changed.
        """
        samples, size = shape[:2]
        # shards have moved
        self._drop([k for k in self._prepared if k[1:-1] == shape[:-1] and k[-1] != shape[-1]])
        known_reductions = self._reductions.get(shape)
        self.storage.fixed = known_reductions is not None
        runner = self._runner(samples, form, self._reductions.setdefault(shape, {}))
        recording = self.programs.recording(size, form)
        identity = recording.fingerprint if recording else sorted(self.programs.values().items())
        tail = [program.samples for program in runner.programs[1:]]
        runner.fingerprint = fingerprint.hash_of((identity, tail[0] if tail else None))
        # making a runner may be a collective call, so all ranks keep the same ones
        if (
            known_reductions is None
            and self.layout.comm.all_reduce(np.array([self.storage.grown], np.int32), "max")[0]
        ):
            self._drop(list(self._prepared))
            self._reductions = {shape: self._reductions[shape]}
        self.storage.grown = False
        return runner

    def _drop(self, keys: list[tuple[Any, ...]]) -> None:
        """Forgets runners, and reductions that none uses any more."""
        self._prepared = {k: r for k, r in self._prepared.items() if k not in keys}
        shapes = {k[1:] for k in self._prepared}
        for shape in {k[1:] for k in keys} - shapes:
            self._reductions.pop(shape, None)

    def _runner(self, samples: int, form: Form, reductions: dict[Any, Any]) -> Runner:
        lay = self.layout
        n = self.shard_size_of(samples)
        if lay.execution == "replay":
            self.settle(samples, form)
        tail_size = self.programs.tail(n, samples % n, form)
        programs = [self._program(n, form)]
        if tail_size != n:
            programs.append(self._program(tail_size, form, layout_of(n) == "lanes"))
        inputs = RunnerInputs(
            layout=self.layout,
            arena=self.arena,
            groups=self.groups,
            ownership=self.ownership,
            recordings=self.programs,
            storage=self.storage,
            memories=self.memories,
            team=self.team,
            train=self.train,
            seed=self.seed,
            precision=self.precision,
            programs=programs,
            samples=samples,
            form=form,
            known_reductions=reductions,
        )
        if self.team is not None:
            from .gpu.runner import GpuRunner

            return GpuRunner(inputs)
        if lay.split:
            from .pipeline import PipelineRunner

            return PipelineRunner(inputs)
        if lay.execution == "replay":
            parts = self.ownership.parts
            needs_buckets = self.train and (parts.stage > 1 or len(parts.buckets) > 1)
            if lay.offload or lay.comm.size > 1 and (parts.partitioned or needs_buckets):
                from .bucketed import BucketedRunner

                return BucketedRunner(inputs)
        return DirectRunner(inputs)

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; where it is of use, `upcoming` is the one that follows."""
        following: Batch | None = None
        try:
            while True:
                batch = next(batches, None) if following is None else following
                ahead = self.team is not None and any(
                    r.looks_ahead for r in self._prepared.values()
                )
                following = self.upcoming = next(batches, None) if ahead else None
                if batch is None:
                    return
                yield batch
        finally:
            self.upcoming = None

    def memory(self) -> tuple[int, int]:
        """Bytes on this rank (or its first GPU) of gradients and what their reduction works in,
        and of activations.
        """
        if self.team is not None:
            return self.team.workers[0].memory()
        shared = {name: a.nbytes for name, a in self.storage.arrays.items()}
        work = shared.pop("work", 0) + sum(r.work_bytes for r in self.runners if not r.shares_work)
        # programs of one shape share them
        gradients = {key[1:]: r.grad_bytes for key, r in self._prepared.items()}
        return sum(shared.values()) + sum(gradients.values()), work

    @property
    def runners(self) -> list[Runner]:
        """Returns what has been prepared so far."""
        return list(self._prepared.values())

    def _check_labels(self, data: Any) -> None:
        outputs = self.programs.outputs
        if outputs is not None and data.classes > outputs:
            raise ConfigError(
                f"[train] the data set {data.name} has {data.classes} classes and the model "
                f"{outputs} outputs; "
                "give the model an output for each class"
            )

    def settle(self, samples: int, form: Form) -> None:
        """Sees to it that it is known which parameters are whose, recording a program of this
        batch size if need be.
        """
        if not self.ownership.settled:
            n = self.shard_size_of(samples)
            self.ownership.settle((self._like or self)._fused(n, form), n)

    def placing(self, n: int, form: Form, lanes: bool = False) -> Callable[[Record], int]:
        """The position in the pipeline of each record of the program of one shard of n samples."""
        pipelined = self.layout.mesh.pp > 1
        return self.ownership.placing(self._fused(n, form, lanes) if pipelined else [])

    @property
    def parameters_address(self) -> int:
        """Where the parameters are that are trained: on the host, or on the first GPU."""
        return (
            self.arena.address(native.PARAMS)
            if self.team is None
            else self.team.parameters.addresses[0][0]
        )

    def load(
        self, read: Callable[[int, np.ndarray], None], memories: dict[int, dict[str, Any]]
    ) -> None:
        """Takes parameters from `read` (Ownership), and what a strategy keeps; all ranks call
        it.
        """
        self.ownership.load(read)
        if self.memories or memories:
            self._drop(list(self._prepared))  # they hold on to arrays of the memories
        self.memories = memories

    def agree(self, ok: bool) -> bool:
        """True if all ranks found their part in order; without communication where all have the
        same. Where ranks have parts of the model, it is also where they compare what they
        must have alike.
        """
        if not self.layout.split and not self.layout.zero:
            return ok
        lowest = self.layout.comm.all_reduce(
            np.array([ok, self._code, -self._code], np.int64), "min"
        )
        self.alike = self.alike and bool(lowest[1] == -lowest[2])
        return bool(lowest[0]) and self.alike

    def commit_step(self, optimizer: Optimizer, sums: Sums, divisor: int, lr: float) -> bool:
        """Updates the parameters if loss and gradients are finite, on all ranks; returns whether
        they were.

        divisor: address of the number (float32) that gradients are divided by.
        """
        if self.team is not None:
            return self.team.commit_step(optimizer, sums, divisor, lr)
        agree = self.agree if self.layout.split or self.layout.zero else None
        return math.isfinite(sums.loss) and optimizer.apply(
            sums.updates, divisor, lr, agree, sums.samples_address
        )

    def fingerprints(
        self, *wholes: Sequence[fingerprint.Run], after: list[Update] | None = None
    ) -> Callable[[], list[int]]:
        """A function that gives the fingerprints of several wholes, each in runs of memory where
        this engine has it.

        after: the updates of the steps after which it will be called.
        """
        if self.team is not None:
            return self.team.fingerprints(wholes, after)
        fingerprints = [fingerprint.Runs(runs) for runs in wholes]
        return lambda: [one() for one in fingerprints]

    def gradients(self, update: Update) -> np.ndarray:
        """The gradients of an update (n,) float32, copied."""
        if self.team is not None:
            return self.team.read(update.grads, np.empty(update.n, np.float32))
        return native.memory(update.grads, 4 * update.n).view(np.float32).copy()

    def shard_size_of(self, samples: int) -> int:
        """Samples per shard in a batch of so many: of `shard_size`, or of the default for such a
        batch.
        """
        return min(samples, self.shard_size or planning.default_shard_size(samples))

    def part(self, samples: int) -> tuple[int, int]:
        """Which run of a batch's samples this rank computes, (first, one past the last); one
        sample if it has none.
        """
        n = self.shard_size_of(samples)
        dp = self.groups.dp
        workers = self.layout.workers
        shards = planning.shard_count(samples, n)
        runs = planning.runs(shards, dp.size, workers, self.layout.counts(shards))[
            dp.rank * workers :
        ][:workers]
        lo = runs[0][0] * n
        hi = min(runs[-1][1] * n, samples)
        return (lo, hi) if hi > lo else (0, min(1, samples))

    # --- programs ---

    def _program(self, n: int, form: Form, lanes: bool = False) -> Program:
        """Returns what this rank runs for one shard of n samples; no records where shards are
        computed op by op.
        """
        if self.layout.execution != "replay":
            return Program(n, [], lambda record: 0, lanes)
        return Program(n, self.record(n, form, lanes), self.placing(n, form, lanes), lanes)

    def record(self, n: int, form: Form, lanes: bool = False) -> list[Record]:
        """The records of one shard of n samples as this rank runs them; a fresh list whose
        records may be changed.
        """
        records = self._fused(n, form, lanes)
        if self.layout.mesh.tp > 1:
            from ..parallel import tensor_parallel

            pieces = self.ownership.pieces
            records = tensor_parallel.rewrite(
                records, self.groups.t, self.layout.mesh.tp, pieces
            ).records
        return records

    def _fused(self, n: int, form: Form, lanes: bool = False) -> list[Record]:
        """The records of one shard of n samples on one rank."""
        return fuse(self.programs.recorded(n, form, lanes).records)

    def trace(self, batch: Batch, step: int, listen: Callable[[Any], None]) -> None:
        """Runs the model for the first shard of a batch, as `execution` says: recorded once
        more, or op by op.

        listen: called with the executor before.
        """
        if self.layout.execution == "replay":
            n = self.shard_size_of(len(batch.indices))
            recorder = self.programs.recorder(n)
            listen(recorder)
            self.programs.traced(recorder, n, batch.dataset.form)
            return
        ready = self._ready(batch, step)
        assert isinstance(ready, DirectRunner)
        ready.run_eager(0, native.aligned(ready.floats), listen)
