"""The shards of a global batch, run by torch one after the other; their sums along the tree of
parallel/plan.py.

A shard sees nothing of the others: its random numbers are seeded by (seed, step, shard), running
statistics begin with their values before the step, and its gradients go straight into a buffer of
the reduction, for shared memory into that. Behind the gradients travel:

    statistics      n_s times the running statistics of shard s, and whether it changed them
    14 sums         loss, samples, metrics
    parameters      whether the shard reached them: what no shard reaches has no gradient, as in
                    torch alone
    counters        by how much it raised the integer buffers of normalisations
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import struct
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch

from ..comm import Communicator
from ..core import fingerprint
from ..errors import ConfigError, OdysseyError
from ..parallel import Reduction, StepOutcome
from ..parallel import plan as planning
from ..parallel import strategy as strategies
from ..train import agreement
from .arena import ModuleArena
from .memory import ALIGN

SUMS = 14  # loss, samples, metrics
ALL_SHARDS = 1 << 61  # in the place of a shard's number: of all of them
generator = torch.random.default_generator


def seed_of(*numbers: int) -> int:
    """A seed of torch's generator from numbers of 64 bits: the same for the same, unrelated for
    others.
    """
    data = struct.pack(f"<{len(numbers)}Q", *(n & (1 << 64) - 1 for n in numbers))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def environment() -> dict[str, Any]:
    """Returns what torch's bits depend on beside the model, as it is in this process."""
    return {
        "torch version": torch.__version__,
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "torch threads": torch.get_num_threads(),
        "oneDNN": [torch.backends.mkldnn.is_available(), torch._C._get_mkldnn_enabled()],
        "float32 products": torch.get_float32_matmul_precision(),
    }


def described(arena: ModuleArena) -> dict[str, Any]:
    """A module, as far as it must be alike on all ranks, and when a training goes on."""
    modules = list(arena.module.named_modules())
    return {
        "parameters": [[name, list(p.shape), p.requires_grad] for name, p in arena.named],
        "layers": [[name, type(m).__name__, m.extra_repr()] for name, m in modules],
        "channels-last parameters": [
            n for n, p in arena.named if p.dim() in (4, 5) and not p.is_contiguous()
        ],
        "torch.compile": any(
            type(m).__name__ == "OptimizedModule" or m._compiled_call_impl for _, m in modules
        ),
    }


class LoopError(OdysseyError):
    """A training loop calls things in an order that cannot give the promised gradient."""


@dataclasses.dataclass
class Prepared:
    """Preparation of batches of one size: a plan, a reduction, and the places in its buffers."""

    plan: planning.Plan
    reduction: Reduction
    flat: list[torch.Tensor]  # each buffer
    gradients: list[list[torch.Tensor]]  # of each buffer by parameter
    result: torch.Tensor


@dataclasses.dataclass
class BatchSums:
    """Over the samples of a global batch, on every rank. reached: by trained parameter, whether
    a shard did.
    """

    loss: float
    samples: float
    metrics: list[float]
    reached: list[bool] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Share:
    """The samples of a batch that this rank's shards have, as `Shards.share` says; loaders read
    the shard size here.
    """

    shards: Shards
    train: bool

    def __call__(self, samples: int) -> tuple[int, int]:
        return self.shards.share(samples, self.train)


def _traffic(reduction: Reduction) -> np.ndarray:
    return np.array([reduction.bytes_sent, reduction.bytes_plain, reduction.bytes_wire])


class Shards:
    """See the head of this file.

    For this process, it sets what torch's bits depend on.

    module: on the CPU, parameters of float32, which move into `arena`. shard_size: samples per
    shard; may be set until the first batch. threads: of torch. deterministic: "error", or "warn":
    what cannot be held is told by `tell`, with a line. mean: backward() is of a shard's mean, not
    of its sum. gradient: the mean over the samples of the last batch; `arena.gradients` are its
    parts. Raises ConfigError: a parameter, module or setting that cannot be held.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        comm: Communicator,
        strategy: strategies.Strategy,
        *,
        shard_size: int | None,
        seed: int,
        threads: int,
        deterministic: str,
        tell: Callable[[str], None],
        mean: bool = False,
    ) -> None:
        if deterministic not in ("error", "warn"):
            raise ConfigError(
                f"[torch] deterministic is {deterministic!r}; choose from error, warn"
            )
        torch.set_num_threads(threads)
        if not torch.are_deterministic_algorithms_enabled():
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
        self.arena = arena = ModuleArena(module)
        self.comm = comm
        self.strategy = strategy
        self.shard_size = shard_size
        self.seed = seed
        self.mean = mean
        self.strict = deterministic == "error"
        self.tell = tell
        # of each rank; empty: equal shares
        self.counts: Callable[[int], tuple[int, ...]] = lambda shards: ()
        self.memory: dict[str, Any] = {}  # of a compression
        self._prepared: dict[tuple[Any, ...], Prepared] = {}
        # as `traffic` says, beside what those of `_prepared` have
        self._sent = np.zeros(3, np.int64)
        self._warned_names: set[str] = set()
        self._count = 0  # shards of the batch that has begun
        self._lay_out()
        self.norms = arena.norms
        self.running = torch.from_numpy(self.norms.running)
        self.kept = torch.from_numpy(self.norms.kept)

    def _lay_out(self) -> None:
        arena = self.arena
        norms = arena.norms
        arena.hold(range(arena.trained))
        self.gradient = torch.from_numpy(arena.grads)
        # gradients | statistics | whether changed | SUMS | reached | raised
        sizes = [arena.size, norms.floats, norms.floats, SUMS, arena.trained, len(norms.counters)]
        self._places = np.cumsum(sizes).tolist()

    def arrange(self, trained: Collection[str]) -> None:
        """Makes places for the gradients of the parameters of these names; those of other
        batches are forgotten, so the next one is a collective call. Raises ConfigError: a
        compression keeps what has no place any more.
        """
        if self.memory:
            raise ConfigError(
                f"[torch] compression={self.strategy.compression!r} with parameters that are "
                "unfrozen while it runs, "
                "as it keeps what was not sent of the others; use compression='none', or make a "
                "new trainer"
            )
        self._sent[:] = self.traffic()
        self._prepared.clear()
        self.arena.arrange(trained)
        self._lay_out()

    def agree(self, description: dict[str, Any]) -> None:
        """Compares the module, what torch is told and `description` between ranks, and
        gives all of them rank 0's values.
        """
        agreement.compare(self.comm, {**environment(), **described(self.arena), **description})
        self.arena.send(self.comm)

    def prepared(self, samples: int, train: bool = True) -> Prepared:
        """For batches of so many samples; a collective call the first time."""
        assert self.shard_size is not None
        shards = planning.shard_count(samples, self.shard_size)
        counts = self.counts(shards) if train else ()
        key = samples, self.shard_size, train, counts
        if key not in self._prepared:
            arena = self.arena
            for outdated in [k for k in self._prepared if k[:3] == key[:3]]:  # shards have moved
                self._sent += _traffic(self._prepared.pop(outdated).reduction)
            plan = planning.make(shards, self.comm.rank, self.comm.size, 1, 1, counts)
            floats = -(-self._places[-1] // ALIGN) * ALIGN if train else ALIGN
            shapes = tuple(
                (offset, tuple(g.shape))
                for g, offset in zip(arena.gradients, arena.at, strict=False)
            )
            content = (
                strategies.Content(arena.size, shapes, samples, self.memory) if train else None
            )
            reduction = strategies.make(self.strategy, self.comm, plan, floats, 1, content=content)
            buffers = [reduction.buffers[i] for i in range(plan.buffers)]
            self._prepared[key] = Prepared(
                plan,
                reduction,
                [torch.from_numpy(b) for b in buffers],
                [arena.views(b) for b in buffers] if train else [],
                torch.from_numpy(reduction.result),
            )
        return self._prepared[key]

    def traffic(self) -> tuple[int, int, int]:
        """Bytes that this rank has sent so far, what that were without compression, and what
        went to other machines.
        """
        sent, plain, wire = sum(
            (_traffic(p.reduction) for p in self._prepared.values()), self._sent
        ).tolist()
        return sent, plain, wire

    def kept_parameters(self) -> list[fingerprint.Run]:
        """The parameters that this rank counts for a fingerprint of all."""
        return [(self.arena.params.ctypes.data, self.arena.extent, 0)]

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of parameters, and of gradients with their reduction, on this rank."""
        reduction_floats = sum(p.reduction.floats_needed for p in self._prepared.values())
        return self.arena.params.nbytes, self.arena.grads.nbytes + 4 * reduction_floats

    def local_shards(self, samples: int, train: bool = True) -> range:
        """The shards of a batch that this rank runs."""
        assert self.shard_size is not None
        shards = planning.shard_count(samples, self.shard_size)
        return range(
            *planning.runs(shards, self.comm.size, 1, self.counts(shards) if train else ())[
                self.comm.rank
            ]
        )

    def share(self, samples: int, train: bool = True) -> tuple[int, int]:
        """The samples from this rank's first shard to its last, (first, one past the last); one
        if it has no shard.
        """
        shards = self.local_shards(samples, train)
        if not shards:
            return 0, min(1, samples)
        size = self.shard_size or 1
        return shards[0] * size, min((shards[-1] + 1) * size, samples)

    def phase(self, run: bool = False) -> contextlib.AbstractContextManager[None]:
        """Parameters may be used in the block, with ZeRO 3 a collective call. run: it has the
        shards of a step.
        """
        return contextlib.nullcontext()

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """All parameters are there in the block; with ZeRO 3 a collective call."""
        return contextlib.nullcontext()

    def holding(self) -> contextlib.AbstractContextManager[set[int] | None]:
        """The parameters that this rank keeps are there in the block; their ids, or None: it has
        all.
        """
        return contextlib.nullcontext()

    def __call__(self, samples: int, step: int, train: bool = True) -> Iterator[tuple[int, int]]:
        """This rank's shards of a batch, as (first sample, one past the last).

        Between two of them a caller runs one: backward() of the sum of its losses, and `count`.
        Then `sums`, on all ranks.
        """
        part = self.begin(samples, train)
        if part.error is not None:
            raise part.error
        with contextlib.closing(self.run(samples, step)) as shards:
            yield from shards

    def begin(self, samples: int, train: bool = True) -> StepOutcome:
        """Begins a batch: what is made for it, and this rank's part, which may have failed already.

        A collective call the first time.
        """
        prepared = self.prepared(samples, train)
        part = StepOutcome(prepared.reduction, (self._places[2] if train else 0) + 1)
        self._batch = prepared, train, part
        self._count = prepared.plan.shards
        if train:
            with part.tried():
                self.norms.take_over()
        return part

    def run(self, samples: int, step: int) -> Iterator[tuple[int, int]]:
        """The shards of a batch that has begun, as calling this object gives them."""
        prepared, train, _ = self._batch
        with self._forbid_other_changes(train):
            for action in (*prepared.plan.threads[0], *prepared.plan.final):
                if action.kind == "add":
                    prepared.flat[action.a].add_(prepared.flat[action.b])
                    continue
                gradients = prepared.gradients[action.b] if train else []
                yield from self._shard(action.a, samples, step, prepared.flat[action.b], gradients)

    @contextlib.contextmanager
    def _forbid_other_changes(self, train: bool) -> Iterator[None]:
        """The generator, statistics and counters are afterwards what they were, also if a shard
        failed or was left; so must parameters be, and buffers that nothing merges.
        """
        arena = self.arena
        if train:
            arena.check()
        fixed = [(name, t, t._version) for name, t in (*self.norms.fixed_buffers, *arena.named)]
        for name, p in arena.named[arena.trained :]:
            if train and p.requires_grad:
                raise ConfigError(
                    f"[torch] {name} was frozen and is not any more; make a new trainer of the "
                    "module"
                )
        drawn = generator.get_state()
        try:
            yield
        finally:
            generator.set_state(drawn)
            if train:
                self.norms.put_back()
        current_buffers = dict(arena.buffers) if self.norms.fixed_buffers else {}
        for name, t, version in fixed:
            kind = "parameter" if isinstance(t, torch.nn.Parameter) else "buffer"
            unchanged = t._version == version and (
                kind == "parameter" or current_buffers.get(name) is t
            )
            if unchanged or name in self._warned_names:
                continue
            text = (
                f"[torch] forward() changes the {kind} {name}, which no rule merges: ranks "
                "would go apart"
            )
            if self.strict:
                raise ConfigError(
                    f"{text}; compute it from parameters, or use deterministic='warn'"
                )
            self._warned_names.add(name)
            self.tell(f"{text}; its bits will not come again")

    def _shard(
        self, shard: int, samples: int, step: int, flat: torch.Tensor, gradients: list[torch.Tensor]
    ) -> Iterator[tuple[int, int]]:
        """One shard, whose sums go into `flat`. gradients: places among them."""
        _, train, _ = self._batch
        size = self.shard_size or samples
        lo = shard * size
        hi = min((shard + 1) * size, samples)
        flat.zero_()
        self._sums = [0.0] * (SUMS - 1)
        versions = self._enter(gradients) if train else []
        generator.manual_seed(seed_of(self.seed, step, shard, train))
        yield lo, hi
        tail = [self._sums[0], float(hi - lo), *self._sums[1:]]
        if train:
            tail += self._reached(gradients, versions)
            tail += self._leave(flat, hi - lo)
        offset = self._places[2] if train else 0
        flat.numpy()[offset : offset + len(tail)] = tail

    def preview(self, samples: int, step: int) -> Iterator[tuple[int, int]]:
        """The shards of a batch that has begun, for a pass before theirs that draws the same and
        leaves nothing.
        """
        _, train, _ = self._batch
        with self.drawing(step, train):
            for shard in self.local_shards(samples, train):
                generator.manual_seed(seed_of(self.seed, step, shard, train))
                try:
                    yield shard * self.shard_size, min((shard + 1) * self.shard_size, samples)
                finally:
                    if train:
                        self.norms.put_back()

    @contextlib.contextmanager
    def drawing(self, step: int, train: bool) -> Iterator[None]:
        """Has torch's generator seeded for what all ranks do alike; afterwards it is what it
        was.
        """
        drawn = generator.get_state()
        generator.manual_seed(seed_of(self.seed, step, ALL_SHARDS, train))
        try:
            yield
        finally:
            generator.set_state(drawn)

    def count(self, loss: float, *metrics: float) -> None:
        """BatchSums over the samples of the shard that is being run."""
        self._sums[: 1 + len(metrics)] = loss, *metrics

    def _enter(self, gradients: list[torch.Tensor]) -> list[int]:
        for (_, p), place in zip(self.arena.named, gradients, strict=False):
            p.grad = place
        self.norms.put_back()
        return [g._version for g in gradients]

    def _reached(self, gradients: list[torch.Tensor], versions: list[int]) -> list[float]:
        """By parameter, whether the shard that has run reached it."""
        reach = []
        for (name, p), place, version in zip(self.arena.named, gradients, versions, strict=False):
            if p.grad is not place:
                raise LoopError(
                    f"[torch] the gradient of {name} was replaced while a shard was run: call "
                    "zero_grad() before the "
                    "shards, clip and step after them"
                )
            reach.append(float(place._version != version))
        return reach

    def _leave(self, flat: torch.Tensor, n: int) -> list[float]:
        """The statistics that a shard made go behind its gradients; by how much it raised the
        counters.
        """
        norms = self.norms
        (statistics, changed) = self._places[:2]
        if self.mean:
            flat[:statistics].mul_(n)
        if norms.floats:
            torch.mul(self.running, float(n), out=flat[statistics : statistics + norms.floats])
            flat[changed : changed + norms.floats] = (self.running != self.kept).float()
        return [
            float(int(b) - count)
            for (_, b), count in zip(norms.counters, norms.counts, strict=True)
        ]

    def sums(self) -> BatchSums:
        """Completes the sums over all ranks, and the mean gradient; `settle` is for after them.

        A collective call. Raises what a rank's part failed with: on all ranks; nothing was changed.
        """
        _, train, part = self._batch
        result = self._complete()
        arena = self.arena
        norms = self.norms
        statistics, changed, sums = self._places[:3] if train else (0, 0, 0)
        if train and (part.error is not None or math.isnan(result[sums + 1])):
            self.settle(False)
        part.end(float(result[sums + 1]))
        loss, samples, *metrics = result[sums : sums + SUMS].tolist()
        if not train:
            return BatchSums(loss, samples, metrics)
        flags = result[sums + SUMS : self._places[-1]].tolist()
        if norms.floats:
            n = norms.floats
            mean = result[statistics : statistics + n] / samples
            self.merged = torch.where(result[changed : changed + n] > 0, mean, self.kept)
        raised = [math.ceil(total / self._count) for total in flags[arena.trained :]]
        self._counts = [count + by for count, by in zip(norms.counts, raised, strict=True)]
        self._divide(result, samples)
        return BatchSums(loss, samples, metrics, [f > 0 for f in flags[: arena.trained]])

    def _complete(self) -> torch.Tensor:
        """The sums over all shards: gradients, and what goes behind them."""
        prepared, _, part = self._batch
        part.tell()
        prepared.reduction.start()
        prepared.reduction.finish()
        return prepared.result

    def _divide(self, result: torch.Tensor, samples: float) -> None:
        """Makes the mean gradient of the sum."""
        torch.div(result[: self._places[0]], samples, out=self.gradient)

    def settle(self, step_taken: bool = True) -> None:
        """The buffers of normalisations become those after the step, or those before it where it
        was not taken.
        """
        if not step_taken:
            self.norms.put_back()
        elif self.norms.floats or self._counts:
            self.norms.settle(self.merged if self.norms.floats else None, self._counts)
