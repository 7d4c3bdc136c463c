"""Runs the shards of a batch: one recorded program, a plan, a reduction, and a way of taking the step.

The trainer says which batch; this file makes sure that the sums of loss, samples, correct predictions and gradients
come out, the same bits whatever the layout. There are four ways of taking a step, chosen by the layout alone:

    Direct      one native call for all shards, then one reduction        the ordinary case (here)
    Layerwise   segment by segment, a reduction per bucket                several buckets, ZeRO 2 and 3
    Waves       micro-batch by micro-batch, ranks exchanging activations  pipeline and tensor parallelism
    GpuRunner   a launch per op for all shards, devices exchanging sums   GPUs

An engine is used twice: for training steps (with a backward pass) and for evaluation (without).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from . import fingerprint, native
from .arena import Arena
from .comm import Communicator
from .data import Batch
from .errors import ConfigError, OdysseyError
from .nn import Module
from .norm import global_norm
from .optim import Optimizer, Update
from .parallel import buckets as bucketing
from .parallel import plan as planning
from .parallel import strategy, tensor
from .parallel.mesh import Groups, Mesh
from .parallel.runner import Runner, Sums
from .parallel.strategy import Content, Strategy
from .parallel.zero import STAGES, Parts
from .placement import FIRST, SCHEDULES
from .program import Block, Record, Recorder, ShardEager, encoded, fused, place, using
from .tensor import Tensor, empty, layout_of, make, no_grad

if TYPE_CHECKING:
    from .gpu.team import Team

EXECUTIONS = ("replay", "eager")
BUCKET_MB = 25.0
RUNNERS = 8  # batch sizes that are kept prepared; an epoch has two, batches of one's own may have any number


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the shards of a step are computed: everything that must not change the result."""

    comm: Communicator
    workers: int  # of this process
    threads: int  # of this process
    shard_size: int
    reduction: Strategy | str  # a Strategy once made
    execution: str
    mesh: Mesh = Mesh(1, 1, 1)  # fitted to the world
    zero: int = 0
    bucket_size_mb: float | None = None  # None: see `bucket_floats`
    overlap: bool = True
    schedule: str = "1f1b"
    gpus: tuple[int, ...] = ()  # the device of each worker of this process; none: they compute on the CPU

    def __post_init__(self) -> None:
        object.__setattr__(self, "reduction", Strategy.of(self.reduction))
        for name in ("workers", "threads", "shard_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"[train] {name} is {value!r}; it must be an integer of at least 1")
        for name, allowed in (
            ("execution", EXECUTIONS),
            ("zero", STAGES),
            ("schedule", SCHEDULES),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"[train] {name} is {value!r}; choose from {', '.join(map(str, allowed))}")
        size = self.bucket_size_mb
        if size is not None and not (isinstance(size, Real) and 0 < size < math.inf):
            raise ConfigError(f"[train] bucket_size_mb is {size!r}; it must be a number above 0 and finite")
        if self.execution == "eager" and (self.split or self.zero):
            raise ConfigError(
                f"[mesh] {self.mesh} with zero={self.zero} runs recorded programs; use execution='replay'"
            )
        if self.split and self.zero > 1:
            raise ConfigError(
                f"[mesh] {self.mesh} with zero={self.zero}: gradients and parameters can be spread over replicas only "
                "where each has the whole model; use --zero 1, or --pp 1 --tp 1"
            )

        self.reduction.check(self.mesh, self.zero)
        if self.gpus:
            self._check_gpus()

    def _check_gpus(self) -> None:
        """Raises ConfigError for what GPUs cannot do yet."""
        wrong = next(
            (
                text
                for text, found in (
                    (f"{self.mesh}", self.split),
                    (f"zero={self.zero}", self.zero),
                    ("execution='eager'", self.execution != "replay"),
                    (f"reduction={self.reduction.reduction!r}", self.reduction.reduction in strategy.MODES),
                    (f"bucket_size_mb={self.bucket_size_mb}", self.bucket_size_mb is not None),
                    ("overlap=False", not self.overlap),
                )
                if found
            ),
            None,
        )
        if wrong:
            raise ConfigError(
                f"[gpu] {wrong} is not there for GPUs: they replicate the whole model, take steps together and sum "
                "gradients in pieces of their own; leave it out, or use --device cpu"
            )

    def bucket_floats(self, size: int) -> int:
        """Floats of a bucket of a model of `size` floats: as given, or 25 MB.

        With ZeRO 2 and 3 a rank has four buckets on top of its parts (two gathered, two being reduced), so by default
        they are at most a 32nd of the model.
        """
        if self.bucket_size_mb is not None:
            return int(self.bucket_size_mb * bucketing.FLOATS_PER_MB)
        floats = int(BUCKET_MB * bucketing.FLOATS_PER_MB)
        return min(floats, size // 32) if self.zero > 1 else floats

    @property
    def split(self) -> bool:
        """Whether several ranks make up one replica of the model."""
        return self.mesh.pp * self.mesh.tp > 1


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
        scaled: whether gradients come out multiplied by `loss_scale`.
        like: the training engine, whose parts and places an engine for evaluation shares.
        team: the GPUs of this process, if the layout names some.
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
        scaled: bool = False,
        team: Team | None = None,
    ) -> None:
        self.model, self.loss, self.arena, self.layout, self.train = model, loss, arena, layout, train
        self.team = team
        self.batch: Batch | None = None  # that is being run
        self.upcoming: Batch | None = None  # the one after it, where known: GPUs may bring it meanwhile
        self.groups, self.seed = groups or Groups(layout.comm, layout.mesh), seed
        self._like = like
        self.precision, self.scaled = precision, scaled
        self.loss_scale = 1.0  # of the next run, if `scaled`
        self._parts: Parts | None = None
        self._ownership: dict[str, tensor.Piece] = {}  # of tensor parallelism: what this rank trains
        self._places: Any = None  # record -> position in the pipeline
        self._cut_by: tuple[Any, ...] | None = None  # the program that was cut automatically
        self._owner: dict[int, int] = {}  # parameter (offset) -> position in the pipeline
        self._outputs: int | None = None  # of the model, as the loss saw them
        self._records: dict[tuple[int, ...], list[Record]] = {}
        self._prepared: dict[tuple[Any, ...], Runner] = {}  # the latest last
        self._storage: dict[str, np.ndarray] = {}
        self._grown = False
        self.memories: dict[int, dict[str, Any]] = {}  # of a strategy, by bucket
        self.bytes_sent = self.bytes_plain = 0  # by this rank, so far (Runner)
        self.warnings: list[str] = []  # once a program is recorded: what the user should know,
        self.plans: list[str] = []  # and how the model was cut

    def run(self, batch: Batch, step: int) -> Sums:
        """The sums over all shards of all ranks; gradients are valid until the next call."""
        data, self.batch = batch.dataset, batch
        ready = self.prepare(len(batch.indices), data.sample_shape)
        replay = self.layout.execution == "replay"
        if ready.data is not data:
            if replay:
                self._check_labels(data)
            ready.use(data)
        ready.context.rows = batch.indices.ctypes.data
        ready.context.step, ready.context.loss_scale = step, self.loss_scale
        sent, plain = ready.bytes_sent, ready.bytes_plain
        sums = ready.run()
        self.bytes_sent += ready.bytes_sent - sent
        self.bytes_plain += ready.bytes_plain - plain
        if not replay:
            self._check_labels(data)
        return sums

    def prepare(self, samples: int, sample_shape: tuple[int, ...]) -> Runner:
        """What a batch size needs; made when it is first met."""
        key = (samples, *sample_shape)
        runner = self._prepared.pop(key, None)
        if runner is None:
            try:
                runner = self._runner(samples, sample_shape)
            except OdysseyError as error:
                error.everywhere = True  # all ranks record the same model for the same layout
                raise
            # making a runner may be a collective call, so all ranks keep the same ones
            if self.layout.comm.all_reduce(np.array([self._grown], np.int32), "max")[0]:
                self._prepared.clear()
            self._grown = False
        self._prepared[key] = runner
        while len(self._prepared) > RUNNERS:
            del self._prepared[next(iter(self._prepared))]
        return runner

    def storage(self, name: str, nbytes: int) -> np.ndarray:
        """Memory (nbytes,) uint8 that all runners use for the same thing, as one runs at a time.

        Where one needs more than the others, on any rank, they are made anew when they are needed again.
        """
        if len(self._storage.get(name, ())) < nbytes:
            self._grown = True
            self._storage[name] = native.aligned(nbytes, np.uint8, zero=False)
        return self._storage[name][:nbytes]

    def _runner(self, samples: int, sample_shape: tuple[int, ...]) -> Runner:
        lay = self.layout
        if lay.execution == "replay":
            parts = self.parts_for(samples, sample_shape)
        if self.team is not None:
            from .gpu.runner import GpuRunner

            return GpuRunner(self, samples, sample_shape)
        if lay.split:
            from .parallel.waves import Waves

            return Waves(self, samples, sample_shape)
        if lay.execution == "replay":
            several = self.train and (parts.stage > 1 or len(parts.buckets) > 1)
            if lay.comm.size > 1 and (parts.spread or several):
                from .parallel.layerwise import Layerwise

                return Layerwise(self, samples, sample_shape)
        return Direct(self, samples, sample_shape)

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
        shared = {name: a.nbytes for name, a in self._storage.items()}
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

    def parts_for(self, samples: int, sample_shape: tuple[int, ...]) -> Parts:
        """The same, recording a program of this batch size if there is none yet."""
        if self._like is not None:
            return self._like.parts_for(samples, sample_shape)
        if self._parts is None:
            lay = self.layout
            records = self._fused(self.shard_size_of(samples), sample_shape)
            unused = bucketing.unused(records, self.arena)
            if unused:
                self.warnings.append(f"no gradient reaches {', '.join(unused)}: counted as zero")
            if lay.split:
                buckets = [self._share(records, self.shard_size_of(samples), sample_shape)]
            else:
                limit = lay.bucket_floats(self.arena.size) if lay.comm.size > 1 else self.arena.size
                buckets = bucketing.cut(records, self.arena, limit, by_params=lay.zero == 3)
            self._parts = Parts(lay.zero, buckets, self.groups.dp, self.arena)
        return self._parts

    def content(self, samples: int, b: int = 0, whole: bool = False) -> Content | None:
        """What a reduction for batches of so many samples holds: bucket b, or the `whole` arena; None if no gradients.

        What a strategy keeps from step to step is kept here, so batches of all sizes share it.
        """
        if not self.train:
            return None
        bucket = bucketing.of_ranges([(0, self.arena.size)], ()) if whole else self.parts.buckets[b]
        shapes = [
            (piece.at + self.arena.offsets[name] - piece.lo, tuple(p.shape))
            for name, p in self.arena.named
            for piece in bucket.pieces
            if piece.lo <= self.arena.offsets[name] and self.arena.offsets[name] + p.size <= piece.lo + piece.n
        ]
        return Content(bucket.floats, tuple(shapes), samples, self.memories.setdefault(b, {}))

    def placing(self, records: list[Record], n: int, sample_shape: tuple[int, ...]) -> Callable[[Record], int]:
        """The position in the pipeline of each record of the program of one shard of n samples.

        An automatic cut was made by the numbers of the ops of one program. In others, of an evaluation without dropout
        or of another layout, ops have other numbers: there an op with parameters is where these are, and what follows
        it as well.
        """
        source = self._like or self
        if self.layout.mesh.pp == 1:
            return lambda r: 0
        if source._cut_by in (None, (self.train, n, *sample_shape)):
            return source._places
        owner, of_tag = source._owner, {}
        # not `records`: tensor parallelism may have moved on from the first row of a parameter
        forward = [r for r in self._fused(n, sample_shape) if r.phase == "forward"]
        used = {id(r): bucketing.touched(r, self.arena, native.PARAMS) for r in forward}
        here = next((owner[o[0]] for r in forward if (o := used[id(r)])), 0)
        for r in forward:
            if used[id(r)]:
                here = owner[used[id(r)][0]]
            of_tag[r.tag] = here
        return lambda r: of_tag[r.tag]

    @property
    def cut_automatically(self) -> bool:
        """Whether the stages were cut by measured cost, not by the model's own placement."""
        return (self._like or self)._cut_by is not None

    def _first_placing(self, records: list[Record], n: int, sample_shape: tuple[int, ...]) -> Callable[[Record], int]:
        """From records to positions in the pipeline: by the model's own placement, or an automatic one.

        Raises:
            ConfigError: the model is placed on a number of devices that does not fit.
        """
        pp, interleaved = self.layout.mesh.pp, self.layout.schedule == "interleaved"
        devices = sorted({r.device for r in records})
        placed = len(devices)
        if placed == 1:
            from .parallel import costs

            self._cut_by = (self.train, n, *sample_shape)
            stage_of, plan = costs.stages(records, self.arena, n, 2 * pp if interleaved else pp, self.layout.comm)
            self.plans.append(f"the model is cut into {len(plan.parts)} stages by measured cost:\n{plan}")
            return lambda r: stage_of(r) % pp
        if placed < pp or (interleaved and placed % pp):
            raise ConfigError(
                f"[pipeline] the model is placed on {placed} devices and pp is {pp}; "
                f"use --pp {placed}, or place it on {'a multiple of ' if interleaved else ''}{pp}"
            )
        index = {d: i for i, d in enumerate(devices)}
        return lambda r: index[r.device] % pp if interleaved else index[r.device] * pp // placed

    def _share(self, records: list[Record], n: int, sample_shape: tuple[int, ...]) -> bucketing.Bucket:
        """The parameters of this rank's part of the model, as one bucket."""
        if self.layout.mesh.pp > 1:
            self._places = self._first_placing(records, n, sample_shape)
        place_of = self.placing(records, n, sample_shape)
        names = {o: n for n, o in self.arena.offsets.items()}
        users: dict[str, set[int]] = {}
        for r in records:
            for o in bucketing.touched(r, self.arena, native.PARAMS):
                users.setdefault(names[o], set()).add(place_of(r))
        for name, where in users.items():
            if len(where) > 1:
                raise ConfigError(
                    f"[pipeline] the parameter {name} is used by stages {min(where)} and {max(where)}; a parameter has "
                    "one place: put the layers that share it on one device"
                )
        self._owner = {self.arena.offsets[name]: min(where) for name, where in users.items()}
        here = [n for n in self.arena.offsets if users.get(n, {self.groups.p}) == {self.groups.p}]
        ownership: dict[str, tensor.Piece] = {}
        if self.layout.mesh.tp > 1:
            split = tensor.rewrite(records, self.groups.t, self.layout.mesh.tp)
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
        self.counted = [r.whole for r in runs if r.counted]
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
        """The Euclidean norm of all gradients, the same bits whoever has which of them (norm.py)."""
        groups, comm = self.groups, self.layout.comm

        def largest(a: np.ndarray) -> np.ndarray:
            return comm.all_reduce(a, "max") if self.layout.split or self.layout.zero else a

        def total(a: np.ndarray) -> np.ndarray:
            if self.layout.zero and groups.dp.size > 1:
                a = groups.dp.all_reduce(a, "sum")
            return groups.model.all_reduce(a, "sum") if self.layout.split else a

        runs = [(u.grads, u.n) for u in sums.updates] if sums.counted is None else sums.counted
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
        everyone = groups.model.all_gather(np.array([len(self._valid)], np.int64))[:, 0]
        table = np.zeros((int(everyone.sum()), 2), np.int64)
        starts = np.concatenate([[0], np.cumsum(everyone)])
        me = groups.model.rank
        table[starts[me] : starts[me + 1]] = np.array(self._valid, np.int64).reshape(-1, 2)
        ranges = [(2 * int(a), 2 * int(b)) for a, b in zip(starts, starts[1:], strict=False)]
        groups.model.all_gather_v(table.reshape(-1), ranges)
        earlier = [(int(lo), int(n)) for lo, n in table[: starts[me]]]
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
        counts = comm.all_gather(np.array([len(mine), mine[:, 1].sum()], np.int64))
        rows, floats = np.cumsum(counts[:, 0]), np.cumsum(counts[:, 1])
        table = np.zeros((rows[-1], 2), np.int64)
        table[rows[comm.rank] - len(mine) : rows[comm.rank]] = mine
        rows_of = [(2 * int(b - a), 2 * int(b)) for a, b in zip(counts[:, 0], rows, strict=True)]
        comm.all_gather_v(table.reshape(-1), rows_of)
        values = np.zeros(floats[-1], np.float32)
        if len(mine):
            values[floats[comm.rank] - mine[:, 1].sum() : floats[comm.rank]] = np.concatenate(
                [flat[lo : lo + n] for lo, n in mine]
            )
        comm.all_gather_v(values, [(int(b - a), int(b)) for a, b in zip(counts[:, 1], floats, strict=True)])
        at = 0
        for lo, n in table:
            flat[lo : lo + n] = values[at : at + n]
            at += n
        return flat

    def agree(self, ok: bool) -> bool:
        """Whether all ranks found their part in order; without communication where all have the same."""
        if not self.layout.split and not self.layout.zero:
            return ok
        return bool(self.layout.comm.all_reduce(np.array([ok], np.int32), "min")[0])

    def take(self, optimizer: Optimizer, sums: Sums, divisor: int, lr: float) -> bool:
        """Updates the parameters if loss and gradients are finite, on all ranks; returns whether they were.

        Args:
            divisor: address of the number (float32) that gradients are divided by.
        """
        if self.team is not None:
            return self.team.take(optimizer, sums, divisor, lr)
        agree = self.agree if self.layout.split or self.layout.zero else None
        return math.isfinite(sums.loss) and optimizer.apply(sums.updates, divisor, lr, agree)

    def fingerprints(
        self, *wholes: Sequence[fingerprint.Run], after: list[Update] | None = None
    ) -> Callable[[], list[int]]:
        """A function that gives the fingerprints of several wholes, each in runs of memory where this engine has it.

        Args:
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

    def shard_size_of(self, samples: int) -> int:
        """Samples per shard in a batch of so many."""
        return effective_shard_size(samples, self.layout.shard_size, self.team is not None)

    # --- recording ---

    def _pass(self, executor: Recorder | ShardEager, n: int, sample_shape: tuple[int, ...]) -> None:
        """Forward and backward of one shard of n samples, through whatever executor is current."""
        layout = layout_of(n)  # `executor` is the current one
        x = empty((n, *sample_shape), layout)
        channels = sample_shape[0] if len(sample_shape) > 1 else 1
        executor.emit("input", x.memory, x.groups, x.features, channels, layout=layout)
        executor.close(x.device)
        y = self.model(x)
        if y is None:
            raise ConfigError(f"[train] forward() of {type(self.model).__name__} returned None; return its result")
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

    def record(self, n: int, sample_shape: tuple[int, ...]) -> list[Record]:
        """The records of one shard of n samples as this rank runs them; a fresh list whose records may be changed."""
        records = self._fused(n, sample_shape)
        if self.layout.mesh.tp > 1:
            like = (self._like or self)._ownership
            records = tensor.rewrite(records, self.groups.t, self.layout.mesh.tp, like).records
        return records

    def _fused(self, n: int, sample_shape: tuple[int, ...]) -> list[Record]:
        """The records of one shard of n samples on one rank."""
        key = (n, *sample_shape)
        if key not in self._records:
            recorder = Recorder(self.arena, 4 * self.arena.size, n, self.precision)
            recorder.gpu = self.team is not None
            self._traced(recorder, n, sample_shape)
            self._records[key] = recorder.records
        return fused(self._records[key])

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


def overlaps(run: tuple[int, int], runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of a run (start, length) that are in one of several runs that do not overlap."""
    lo, n = run
    cut = ((max(lo, a), min(lo + n, a + k)) for a, k in runs)
    return [(a, b - a) for a, b in cut if b > a]


def without(run: tuple[int, int], runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of a run (start, length) that are in none of several runs."""
    left = [run]
    for a, k in runs:
        left = [
            piece
            for lo, n in left
            for piece in ((lo, min(n, a - lo)), (max(lo, a + k), lo + n - max(lo, a + k)))
            if piece[1] > 0
        ]
    return left


@dataclasses.dataclass(frozen=True)
class Owned:
    """What a rank has to do with a parameter; runs of the arena are (start, floats).

    whole: the run that it updates. valid: the runs of it that come out right, and that other ranks take from it.
    counted: whether its gradients are this rank's share of the global norm.
    """

    whole: tuple[int, int]
    valid: list[tuple[int, int]]
    counted: bool


def owned(offset: int, shape: tuple[int, ...], piece: tensor.Piece | None, t: int) -> Owned:
    """The share of rank t of a tensor-parallel group in a parameter; without a piece it is everybody's."""
    floats = -(-math.prod(shape) // 16) * 16
    if piece is None or piece.axis is None:
        return Owned((offset, floats), [(offset, floats)], t == 0)
    lo, hi = piece.ranges[t]
    row = math.prod(shape[1:])
    if piece.axis == 0:
        run = (offset + lo * row, (hi - lo) * row)
        return Owned(run, [run], True)
    # columns: gradients of the others' are zero, and what becomes of their parameters here is never used
    return Owned((offset, floats), [(offset + r * row + lo, hi - lo) for r in range(shape[0])], True)


class Direct(Runner):
    """All shards of this process in one native call, one after the other on each thread, then one reduction."""

    def __init__(self, engine: Engine, samples: int, sample_shape: tuple[int, ...]) -> None:
        super().__init__(engine, samples)
        self.engine, self.sample_shape = engine, sample_shape
        lay, lib, arena = engine.layout, native.library(), engine.arena
        comm = engine.groups.dp
        self.floats = (arena.size if engine.train else 0) + lib.stats
        self.stats_at = self.floats - lib.stats
        self.plan = planning.make(self.shards, comm.rank, comm.size, lay.workers, lay.threads)
        content = engine.content(samples, whole=True)
        self._reduce = strategy.make(lay.reduction, comm, self.plan, self.floats, lay.workers, content=content)
        lists = [numbers(a) for a in (*self.plan.threads, self.plan.final)]
        starts = np.array([a.ctypes.data for a in lists], np.int64)
        counts = np.array([len(a) for a in lists], np.int64)
        self._keep: list[Any] = [lists, starts, counts]
        self.step = native.Step(
            threads=len(self.plan.threads),
            actions=starts.ctypes.data,
            counts=counts.ctypes.data,
            params=arena.address(native.PARAMS),
            zero=1,
            buffers=self._reduce.buffers.ctypes.data,
            buffer_floats=self.floats,
            shard_size=self.shard_size,
            samples=samples,
        )
        if lay.execution == "replay":
            records = engine.record(self.shard_size, sample_shape)
            work_bytes = place(records)
            threads = len(self.plan.threads)
            work = engine.storage("work", threads * work_bytes).reshape(threads, work_bytes)
            table = encoded(records, arena, self._keep, None if engine.train else self._without_gradients)
            self.step.program, self.step.records = table.ctypes.data, len(table)
            self.step.work, self.step.work_bytes = work.ctypes.data, work_bytes
            self.work_bytes = work.nbytes
            self._keep += [table, work]
        self.result = result = self._reduce.result  # (floats,): gradients if it trains, then the statistics
        self.stats = result[self.stats_at :]
        self.samples_address = self.stats[1:].ctypes.data
        self.updates = self._updates(result) if engine.train else []
        self.grad_bytes = 4 * self._reduce.floats_needed

    def _updates(self, result: np.ndarray) -> list[Update]:
        engine, at = self.engine, result.ctypes.data
        if engine.layout.zero == 0:
            return [Update(engine.arena.address(native.PARAMS), at, 0, engine.arena.size, 0)]
        parts = engine.parts
        return [
            Update(parts.param_address(b, p), at + 4 * p.lo, parts.state_at(b, p), p.n, p.lo)
            for b in range(len(parts.buckets))
            for p in parts.pieces(b)
        ]

    def _without_gradients(self, space: int, offset: int) -> int:
        return offset - self.engine.arena.size if space == native.GRADS else offset

    def run(self) -> Sums:
        s = self.step
        s.context = self.context
        s.rows = self.context.rows
        if self.engine.arena.mirror is not None:  # another trainer's GPUs may be ahead
            s.params = self.engine.arena.address(native.PARAMS)
        if self.engine.layout.execution == "replay":
            native.library().step(s)
        else:
            self._run_eager()
        self._reduce.start()
        self._reduce.finish()
        loss, samples, correct = self.stats[:3].tolist()
        return Sums(loss, samples, correct, self.samples_address, self.updates)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank's reductions have sent so far."""
        return self._reduce.bytes_sent

    @property
    def bytes_plain(self) -> int:
        return self._reduce.bytes_plain

    def _run_eager(self) -> None:
        """The same plan, each shard through Python, one after the other."""
        s, buffers = self.step, self._reduce.buffers
        for actions in (*self.plan.threads, self.plan.final):
            for a in actions:
                if a.kind == "add":
                    executor = ShardEager(s.context, 0, 0, 0)
                    rows = [Block(buffers[i]) for i in (a.a, a.b)]
                    executor.emit("add", rows[0], rows[0], rows[1], self.floats)
                    continue
                buffer = buffers[a.b]
                buffer[:] = 0
                c = native.Context.from_buffer_copy(s.context)
                c.first = a.a * s.shard_size
                c.valid = min(s.shard_size, s.samples - c.first)
                c.rows = s.rows + 8 * c.first
                executor = ShardEager(c, buffer.ctypes.data, 4 * self.stats_at, s.shard_size, self.engine.precision)
                self.engine._traced(executor, s.shard_size, self.sample_shape)


def numbers(actions: tuple[planning.Action, ...]) -> np.ndarray:
    """A plan's actions as the executor reads them, (n, 3) int64."""
    return np.array([(0 if a.kind == "run" else 1, a.a, a.b) for a in actions], np.int64).reshape(-1, 3)
