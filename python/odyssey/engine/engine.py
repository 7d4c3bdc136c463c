"""Runs the shards of a batch: one recorded program, a plan, a reduction, and a way of taking the
step.

The trainer passes a batch. The engine returns the sums of loss, samples, correct predictions and
gradients, which have the same bits in every layout. There are four ways of taking a step. Only the
layout determines which one is used:

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

from ..base.quiet import without_prints
from ..base.uncopied import uncopied
from ..core import fingerprint, native, setting_versions
from ..core.arena import Arena
from ..core.batch_norm import OneNumberError
from ..core.program import Record, fuse
from ..core.tensor import layout_of
from ..data import Batch
from ..data.nested import Form
from ..errors import ConfigError, OdysseyError
from ..nn import Module, forward_hooks
from ..optim import Optimizer, Update
from ..parallel import plan as planning
from ..parallel.mesh import Groups
from .direct import DirectRunner
from .keeping import Keeper
from .layout import Layout
from .metrics import WEIGHT, Metric
from .ownership import Ownership
from .programs import Programs
from .runner import MARKS, Program, Runner, RunnerInputs, Storage
from .sums import Sums

if TYPE_CHECKING:
    from .gpu.group import DeviceGroup

# Batch sizes for which runners are kept. An epoch has two sizes. A custom loop may use any number.
MAX_RUNNERS = 8


@uncopied()
class Engine:
    """Computes sums over a global batch: of the loss, of correct predictions and, if `train`, of
    the gradients.

    Args:
        model, loss: called as loss(model(x), labels) for each shard.
        arena: the model's parameters.
        groups: this rank's communicators along the axes of the mesh.
        scaled: True: the gradients are multiplied by `loss_scale`.
        like: the training engine, if this is the engine for its evaluations. Both have the same
            `ownership`.
        team: the GPUs of this process, if the layout has some.
        metrics: see metrics.record.
        keeps: True if outputs and targets are kept for metrics of the whole set (`local_samples`).
        weight: a function of (output, target) that gives the weights of samples, in the form of a
            metric. Sums are divided by the sum of weights; None: by the number of samples.
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
        keeps: bool = False,
        weight: Metric | None = None,
    ) -> None:
        self.model = model
        self.arena = arena
        self.layout = layout
        self.train = train
        self.team = team
        self.precision = precision
        self.keeper = Keeper() if keeps else None
        self.programs = Programs(
            model,
            arena,
            loss,
            metrics,
            weight,
            train=train,
            precision=precision,
            conv_algorithm=conv_algorithm,
            scaled=scaled,
            gpu=team is not None,
            eager=layout.execution != "replay",
            like=like and like.programs,
            keeper=self.keeper,
        )
        # The samples of later steps, until the first step. If a shard of theirs will have a single
        # sample, its program is recorded before the first step, so that layers that need more
        # samples raise their error then.
        self.coming_sizes: set[int] = set()
        # The batch after the current one, if it is known. GPUs copy it during the step.
        self.upcoming: Batch | None = None
        self.groups = groups or Groups(layout.comm, layout.mesh)
        self.seed = seed
        self.shard_size = layout.shard_size
        self._like = like
        self.loss_scale = 1.0  # of the next step, if `scaled`
        self.ownership = like.ownership if like else Ownership(arena, layout, self.groups, team)
        # Returns the state that must be the same on all ranks in a step, like the program.
        self.agreed_state: Callable[[], Any] = lambda: None
        self.alike = True  # False if programs or states differed between ranks in the last step
        # The runner and the version of settings that `_code` was computed for.
        self._stamp: tuple[Any, ...] = ()
        self._code = 0  # a hash of the program and the state that must be the same on all ranks
        # Reductions by the shape of a batch. All programs for it use the same ones.
        self._reductions: dict[tuple[Any, ...], dict[Any, Any]] = {}
        # Runners by (number of the settings, shape of a batch). The last used one is the last.
        self._runners: dict[tuple[Any, ...], Runner] = {}
        self.storage = Storage()
        self.memories: dict[int, dict[str, Any]] = {}  # of a strategy, by bucket
        # Bytes of this rank so far, see Runner.traffic.
        self.bytes_sent = self.bytes_plain = self.bytes_wire = 0

    def run(self, batch: Batch, step: int) -> Sums:
        """Runs a batch and returns the sums over all shards of all ranks. Collective.

        The gradients that the sums refer to are valid until the next call.

        Args:
            batch: the global batch.
            step: the number of the step. The masks of dropout depend on it.
        """
        runner = self._prepare_batch(batch, step)
        distributed = self.layout.comm.size > 1
        traffic_before = runner.traffic() if distributed or self.team is not None else None
        if distributed:
            self._mark_step(runner)
        sums = runner.run()
        if runner.expected is not None:
            self.alike = sums.values[MARKS] == runner.expected
        if traffic_before is not None:
            sent, plain, wire = (
                total - earlier
                for total, earlier in zip(runner.traffic(), traffic_before, strict=True)
            )
            self.bytes_sent = self.bytes_sent + sent
            self.bytes_plain = self.bytes_plain + plain
            self.bytes_wire += wire
        if self.layout.execution != "replay":
            self._check_labels(batch.dataset)
        return sums

    def loss_in_shards(self, batch: Batch, size: int) -> float:
        """Returns the mean loss of a batch, computed in shards of another size.

        Runners and memory for this size are dropped afterwards.
        """
        usual_size = self.shard_size
        previous_keys = list(self._runners)
        usual_storage = self.storage
        self.storage = Storage()
        self.shard_size = size
        try:
            sums = self.run(batch, step=0)
            return self.summed_loss(sums) / sums.samples
        finally:
            self.shard_size = usual_size
            self.storage = usual_storage
            self._drop_runners([key for key in self._runners if key not in previous_keys])

    def weight(self, sums: Sums) -> float:
        """Returns the number that sums are divided by: their samples, or the sum of weights."""
        return sums.samples if self.programs.weight is None else sums.values[WEIGHT]

    def summed_loss(self, sums: Sums) -> float:
        """Returns the mean loss of a batch, times its samples; NaN if no sample has a weight."""
        if self.programs.weight is None:
            return sums.loss
        weight = self.weight(sums)
        return sums.loss / weight * sums.samples if weight > 0 else math.nan

    def updated(self) -> None:
        """Brings parameters to the ranks that compute with them. Call it after an update."""
        bytes_before = self.ownership.bytes_sent
        self.ownership.updated()
        sent = self.ownership.bytes_sent - bytes_before
        self.bytes_sent = self.bytes_sent + sent
        self.bytes_plain = self.bytes_plain + sent

    def _mark_step(self, runner: Runner) -> None:
        """Makes this step compare a code between the ranks, see `Runner.mark`.

        The code is a hash of the program and of `agreed_state`. It is computed only if the runner
        or a setting has changed since the last step.
        """
        stamp = (runner, setting_versions.updates.value)
        self.alike = True
        if stamp != self._stamp:
            self._code = fingerprint.hash_of((runner.fingerprint, self.agreed_state()))
            self._stamp = stamp
            if self.team is not None:
                # The sums of GPUs reach the host too late, so this step compares at once.
                codes = self.layout.comm.all_gather(np.array([self._code], np.int64))
                self.alike = bool((codes == self._code).all())
        code = self._code
        if self.layout.zero in (1, 2) and not self.layout.split:
            # If one rank has written to parameters, the update replaces them with the values of
            # their owners. The gradients computed from them would stay, so the code covers them.
            code = (code + self._weights()) & (1 << 63) - 1
        runner.mark(code)

    @functools.cached_property
    def _weights(self) -> fingerprint.Runs:
        """Computes a fingerprint of all parameters when it is called."""
        return fingerprint.Runs([(self.arena.address(native.PARAMS), self.arena.size, 0)])

    def measured(self, sums: Sums) -> dict[str, float]:
        """Returns the metrics of a step by name. They are sums over its samples."""
        return {name: sums.values[index] for name, index in self.programs.metric_at.items()}

    def local_samples(self, batch: Batch) -> tuple[int, Any, Any] | None:
        """Returns what was kept of the last batch: the first sample, outputs and targets of this
        rank's samples.

        Returns None if this rank has no shard, or another rank of its replica returns them.
        """
        samples = len(batch.indices)
        first, end = self._own_samples(samples)
        runner = self.runners[-1]
        has_outputs = getattr(runner, "loss_place", self.groups.p) == self.groups.p
        if self.keeper is None or first == end or self.groups.t or not has_outputs:
            return None
        output, target = self.keeper.take(batch.dataset.form, first, end)
        return first, output, target

    def _prepare_batch(self, batch: Batch, step: int) -> Runner:
        """Returns the runner for a batch, with its inputs set to the batch's samples."""
        if batch.run is not None:
            # Shards may have moved between ranks after this rank read its part of the batch.
            batch = batch.covering(*self.part(len(batch.indices)))
        data = batch.dataset
        runner = self.prepare(len(batch.indices), data.form)
        if runner.data is not data:
            if self.layout.execution == "replay":
                self._check_labels(data)
            runner.use(data)
        self.programs.note_run(runner.shard_size, data.form)
        runner.batch = batch
        runner.upcoming = self.upcoming
        runner.context.rows = batch.indices.ctypes.data
        runner.context.step = step
        runner.context.loss_scale = self.loss_scale
        if self.keeper is not None:
            runner.context.outputs = self.keeper.open(len(batch.indices), data.form)
        return runner

    def prepare(self, samples: int, form: Form) -> Runner:
        """Returns the runner for a batch size with the current settings of the model.

        The first call for a size and settings creates the runner, which is collective.

        Args:
            samples: the size of the global batch.
            form: the arrays of one sample.

        Raises:
            OdysseyError: The model can't be recorded, or doesn't fit the layout.
        """
        size = self.shard_size_of(samples)
        shape = (samples, size, *form, self.layout.counts(planning.shard_count(samples, size)))
        key = (self.programs.current(), *shape)
        coming_sizes = self.coming_sizes
        self.coming_sizes = set()
        runner = None if coming_sizes else self._runners.pop(key, None)
        if runner is None:
            try:
                self.programs.recording(size, form)
                for coming in sorted({samples, *coming_sizes}):
                    self._check_one_sample(coming, form)
                # Attributes that forward() sets aren't settings. They are known after a recording,
                # so the number of the settings may be another one now.
                key = (self.programs.current(), *shape)
                runner = self._runners.pop(key, None) or self._prepare_runner(shape, form)
            except OdysseyError as error:
                # All ranks record the same model for the same layout.
                error.raised_on_all_ranks = True
                raise
        self._runners[key] = runner  # as the last one
        while len(self._runners) > MAX_RUNNERS:
            self._drop_runners([next(iter(self._runners))])
        return runner

    def _check_one_sample(self, samples: int, form: Form) -> None:
        """Records the program of a shard of one sample, if a batch of `samples` has one.

        Raises:
            ConfigError: Batch norm has one number per channel in it.
        """
        size = self.shard_size_of(samples)
        is_whole = size == 1  # all of its shards, or the only one
        if not self.programs.train or not (is_whole or samples % size == 1):
            return
        try:
            self.programs.recording(1, form)
        except OneNumberError as problem:
            raise ConfigError(
                f"[train] a batch of {samples} in shards of {size} has a shard of one sample, and "
                "batch norm of one number per channel has no variance; use another batch size or "
                "shard_size, or drop_last=True in the loader"
            ) from problem
        except OdysseyError:
            if is_whole:
                raise
            # The last shard uses the program of full shards, see `Programs.tail`.

    def _prepare_runner(self, shape: tuple[Any, ...], form: Form) -> Runner:
        """Creates a runner for batches of a shape, which is the key of `_runners` without the
        number of the settings.

        The first runner for a shape creates its reductions, which is collective. Later runners for
        the shape use them and don't communicate, because a setting may have changed on one rank
        only.
        """
        samples, size, *_ = shape
        # The last part of a shape tells how shards are shared between the ranks. Drop the runners
        # that are for the same batches and for another share.
        self._drop_runners(
            [key for key in self._runners if key[1:-1] == shape[:-1] and key[-1] != shape[-1]]
        )
        known_reductions = self._reductions.get(shape)
        self.storage.fixed = known_reductions is not None
        runner = self._make_runner(samples, form, self._reductions.setdefault(shape, {}))
        recording = self.programs.recording(size, form)
        identity = recording.fingerprint if recording else sorted(self.programs.values().items())
        tail_sizes = [program.samples for program in runner.programs[1:]]
        runner.fingerprint = fingerprint.hash_of((identity, tail_sizes[0] if tail_sizes else None))
        # Shared memory has grown on one rank or several, so the other runners use old memory. All
        # ranks drop theirs, because preparing them again is collective.
        if (
            known_reductions is None
            and self.layout.comm.all_reduce(np.array([self.storage.grown], np.int32), "max")[0]
        ):
            self._drop_runners(list(self._runners))
            self._reductions = {shape: self._reductions[shape]}
        self.storage.grown = False
        return runner

    def _drop_runners(self, keys: list[tuple[Any, ...]]) -> None:
        """Drops the runners with these keys, and reductions that no other runner uses."""
        self._runners = {key: runner for key, runner in self._runners.items() if key not in keys}
        used_shapes = {key[1:] for key in self._runners}
        for shape in {key[1:] for key in keys} - used_shapes:
            self._reductions.pop(shape, None)

    def _make_runner(self, samples: int, form: Form, reductions: dict[Any, Any]) -> Runner:
        """Creates the runner that the layout requires.

        Args:
            samples: the size of the global batch.
            form: the arrays of one sample.
            reductions: receives the runner's reductions, or has them already.
        """
        layout = self.layout
        size = self.shard_size_of(samples)
        if layout.execution == "replay":
            self.settle(samples, form)
        tail_size = self.programs.tail(size, samples % size, form)
        programs = [self._make_program(size, form)]
        if tail_size != size:
            programs.append(self._make_program(tail_size, form, lanes=layout_of(size) == "lanes"))
        inputs = RunnerInputs(
            layout=layout,
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
        if layout.split:
            from .pipeline import PipelineRunner

            return PipelineRunner(inputs)
        if layout.execution == "replay":
            parts = self.ownership.parts
            needs_buckets = self.train and (parts.stage > 1 or len(parts.buckets) > 1)
            if layout.offload or layout.comm.size > 1 and (parts.partitioned or needs_buckets):
                from .bucketed import BucketedRunner

                return BucketedRunner(inputs)
        return DirectRunner(inputs)

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields the batches, and sets `upcoming` to the following one if a runner uses it."""
        following: Batch | None = None
        try:
            while True:
                batch = next(batches, None) if following is None else following
                looks_ahead = self.team is not None and any(
                    runner.looks_ahead for runner in self._runners.values()
                )
                following = next(batches, None) if looks_ahead else None
                self.upcoming = following
                if batch is None:
                    return
                yield batch
        finally:
            self.upcoming = None

    def memory(self) -> tuple[int, int]:
        """Returns two numbers of bytes on this rank or its first GPU (gradients, activations).

        The first one includes the memory of reductions.
        """
        if self.team is not None:
            return self.team.workers[0].memory()
        shared = {name: array.nbytes for name, array in self.storage.arrays.items()}
        activations = shared.pop("work", 0)
        activations += sum(r.work_bytes for r in self.runners if not r.shares_work)
        # Runners for one shape share their reductions, so each shape counts once.
        by_shape = {key[1:]: runner.grad_bytes for key, runner in self._runners.items()}
        return sum(shared.values()) + sum(by_shape.values()), activations

    @property
    def runners(self) -> list[Runner]:
        """The runners that were prepared so far."""
        return list(self._runners.values())

    def _check_labels(self, data: Any) -> None:
        """Raises ConfigError if the data set has more classes than the model has outputs."""
        outputs = self.programs.outputs
        if outputs is not None and data.classes > outputs:
            raise ConfigError(
                f"[train] the data set {data.name} has {data.classes} classes and the model "
                f"{outputs} outputs; give the model an output for each class"
            )

    def settle(self, samples: int, form: Form) -> None:
        """Settles which rank owns which parameters, unless that is done.

        A program for this batch size is recorded for it. If this engine is for evaluation, the
        program is the one of the training engine.
        """
        if not self.ownership.settled:
            size = self.shard_size_of(samples)
            training_engine = self._like or self
            self.ownership.settle(training_engine._record_fused(size, form), size)

    def placing(self, samples: int, form: Form, lanes: bool = False) -> Callable[[Record], int]:
        """Returns a function from records of a shard's program to positions in the pipeline."""
        pipelined = self.layout.mesh.pp > 1
        return self.ownership.placing(self._record_fused(samples, form, lanes) if pipelined else [])

    @property
    def parameters_address(self) -> int:
        """The address of the parameters, on the host or on the first GPU."""
        if self.team is None:
            return self.arena.address(native.PARAMS)
        return self.team.parameters.addresses[0][0]

    def load(
        self, read: Callable[[int, np.ndarray], None], memories: dict[int, dict[str, Any]]
    ) -> None:
        """Loads this rank's parameters, and the values that a strategy keeps. Collective.

        Args:
            read: fills an array with parameters, see Ownership.load.
            memories: the strategy's values by bucket.
        """
        self.ownership.load(read)
        if self.memories or memories:
            # Runners refer to the arrays of the old memories.
            self._drop_runners(list(self._runners))
        self.memories = memories

    def agree(self, ok: bool) -> bool:
        """Returns True if `ok` is True on all ranks.

        If all ranks have the same sums, they have the same `ok`, so they don't communicate. If
        ranks have parts of the model, the call is collective. It then also compares the code of the
        step (`_mark_step`), and returns False if ranks have different codes.
        """
        if not self.layout.split and not self.layout.zero:
            return ok
        # The codes are equal if the smallest one is the largest one, minus the smallest of -code.
        all_ok, smallest_code, smallest_negative = self.layout.comm.all_reduce(
            np.array([ok, self._code, -self._code], np.int64), "min"
        )
        self.alike = self.alike and bool(smallest_code == -smallest_negative)
        return bool(all_ok) and self.alike

    def commit_step(self, optimizer: Optimizer, sums: Sums, divisor: int, lr: float) -> bool:
        """Updates the parameters, if the loss and the gradients of all ranks are finite.

        Args:
            optimizer: computes the updates.
            sums: the result of `run`.
            divisor: the address of the number (float32) that gradients are divided by.
            lr: the learning rate of this step.

        Returns:
            True if the parameters were updated.
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
        """Returns a function that computes the fingerprints of several arrays.

        Args:
            wholes: each array as runs of memory, on the host or on GPUs as this engine has it.
            after: the updates of the steps after which the function will be called.
        """
        if self.team is not None:
            return self.team.fingerprints(wholes, after)
        functions = [fingerprint.Runs(runs) for runs in wholes]
        return lambda: [compute() for compute in functions]

    def gradients(self, update: Update) -> np.ndarray:
        """Returns a copy of the gradients of an update, (n,) float32."""
        if self.team is not None:
            return self.team.read(update.grads, np.empty(update.n, np.float32))
        return native.memory(update.grads, 4 * update.n).view(np.float32).copy()

    def shard_size_of(self, samples: int) -> int:
        """Returns the samples per shard in a batch of `samples` samples.

        That is `shard_size`, or the default for the batch if `shard_size` is None. A small batch is
        one shard.
        """
        return min(samples, self.shard_size or planning.default_shard_size(samples))

    def part(self, samples: int) -> tuple[int, int]:
        """Returns the run of a batch's samples that this rank computes (first, one past the last).

        If the rank has no shard, the run is the first sample.
        """
        first, end = self._own_samples(samples)
        return (first, end) if end > first else (0, min(1, samples))

    def _own_samples(self, samples: int) -> tuple[int, int]:
        """Returns the run of a batch's samples that this rank computes; empty without a shard."""
        size = self.shard_size_of(samples)
        dp = self.groups.dp
        workers = self.layout.workers
        shards = planning.shard_count(samples, size)
        worker_runs = planning.runs(shards, dp.size, workers, self.layout.counts(shards))
        first_shard, _ = worker_runs[dp.rank * workers]
        _, end_shard = worker_runs[(dp.rank + 1) * workers - 1]
        first = first_shard * size
        end = min(end_shard * size, samples)
        return first, max(first, end)

    # --- programs ---

    def _make_program(self, samples: int, form: Form, lanes: bool = False) -> Program:
        """Returns the program that this rank runs for one shard of `samples` samples.

        It has no records if shards are computed op by op.
        """
        if self.layout.execution != "replay":
            return Program(samples, records=[], place_of=lambda record: 0, lanes=lanes)
        records = self.record(samples, form, lanes)
        return Program(samples, records, self.placing(samples, form, lanes), lanes)

    def record(self, samples: int, form: Form, lanes: bool = False) -> list[Record]:
        """Returns the records of one shard as this rank runs them.

        With tensor parallelism they are the records of this rank's share of each layer. The list
        and its records are new, so the caller may change them.
        """
        records = self._record_fused(samples, form, lanes)
        if self.layout.mesh.tp > 1:
            from ..parallel import tensor_parallel

            pieces = self.ownership.pieces
            records = tensor_parallel.rewrite(
                records, self.groups.t, self.layout.mesh.tp, pieces
            ).records
        return records

    def _record_fused(self, samples: int, form: Form, lanes: bool = False) -> list[Record]:
        """Returns the records of one shard as one rank without others would run them."""
        return fuse(self.programs.recorded(samples, form, lanes).records)

    def trace(self, batch: Batch, step: int, listen: Callable[[Any], None]) -> None:
        """Runs the model once for the first shard of a batch.

        The model is recorded again, or with `execution="eager"` computed op by op.

        Args:
            batch: the global batch.
            step: the number of the step.
            listen: is called with the executor before the model runs.
        """
        if self.layout.execution == "replay":
            size = self.shard_size_of(len(batch.indices))
            recorder = self.programs.recorder(size)
            listen(recorder)
            self.programs.traced(recorder, size, batch.dataset.form)
            return
        runner = self._prepare_batch(batch, step)
        assert isinstance(runner, DirectRunner)
        scratch = native.aligned(runner.floats)
        run = functools.partial(runner.run_eager, shard=0, buffer=scratch, listen=listen)
        with without_prints():
            forward_hooks.run_check(self.model, run)
