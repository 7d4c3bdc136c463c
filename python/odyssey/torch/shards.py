"""Runs the shards of a global batch with torch, one after the other, and adds up their results.

A shard is a fixed number of samples of a global batch. The results of all shards are added along
the tree of parallel/plan.py, so that the sum has the same bits on any number of ranks.

A shard sees nothing of the others. Its random numbers are seeded by (seed, step, shard). Running
statistics start with their values before the step. Its gradients are written directly into a buffer
of the reduction, which may be shared memory.

backward() is called on the mean of a shard's losses. A full shard has weight 1, and a smaller last
one its samples / the samples of a full shard, unless `weigh` sets another weight. Gradients and
losses are added with these weights, and the sum is divided by the sum of weights. So with one shard
nothing is scaled, and the bits are those of a plain loop. The other results of a shard follow the
gradients in the buffer (`SumsLayout` has their offsets):

    statistics      the running statistics after shard s, times its samples / those of a full shard
    changed         for each of these floats 1 if the shard changed it, else 0
    15 sums         loss times weight, samples, weight, metrics
    reached         for each parameter 1 if the shard reached it, else 0: a parameter that no shard
                    reaches has no gradient, as in plain torch
    counters        by how much the shard raised the integer buffers of normalisations
    drawn           1 for each of Python's and NumPy's generators that the shard drew from, else 0
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ..comm import Communicator
from ..core import random_scopes
from ..errors import ConfigError, OdysseyError
from ..parallel import Reduction, StepOutcome
from ..parallel import plan as planning
from ..parallel import strategy as strategies
from ..train import Arithmetic
from . import arithmetic
from . import links as linking
from .arena import ModuleArena, plain_name
from .device import Device, device_of
from .links import Links
from .memory import ALIGN
from .modes import Modes
from .part_moves import HostMoves, LinkedMoves
from .rank_sums import DeviceSums
from .shard_draws import SELDOM_USED, ShardDraws, runs_own_code

SUMS = 15  # loss, samples, weight, metrics
ALL_SHARDS = 1 << 61  # seeds random numbers that belong to all shards, instead of a shard's number


def machine(device: Device) -> dict[str, Any]:
    """Returns the properties of libraries, of the processor and of the device on which torch's
    results depend.
    """
    return {
        "device": device.describe(),
        "torch version": torch.__version__,
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": [torch.backends.mkldnn.is_available(), torch._C._get_mkldnn_enabled()],
    }


def environment(modes: Modes, device: Device) -> dict[str, Any]:
    """Returns the settings of this process, besides the model, on which torch's results depend."""
    return {
        **machine(device),
        "torch threads": modes.threads,
        "float32 products": modes.matmul_precision,
        "default dtype": str(modes.default_dtype),
    }


def described(arena: ModuleArena) -> dict[str, Any]:
    """Returns the properties of a module that must be equal on all ranks and after a resume."""
    modules = [
        (plain_name(f"{name}."), m)
        for name, m in arena.module.named_modules()
        if type(m).__name__ != "OptimizedModule"
    ]
    return {
        "parameters": [[name, list(p.shape), p.requires_grad] for name, p in arena.named],
        "layers": [[name.strip("."), type(m).__name__, m.extra_repr()] for name, m in modules],
        "channels-last parameters": [
            n for n, p in arena.named if p.dim() in (4, 5) and not p.is_contiguous()
        ],
        "torch.compile": is_compiled(arena.module),
    }


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns whether torch.compile is used for the module, or for a module in it."""
    return any(
        type(m).__name__ == "OptimizedModule" or bool(m._compiled_call_impl)
        for m in module.modules()
    )


class LoopError(OdysseyError):
    """A training loop calls things in an order that cannot give the promised gradient."""


class SumsLayout(NamedTuple):
    """The offsets, in floats, of the sections of a shard's results. Gradients start at 0."""

    statistics: int  # where gradients end
    changed: int
    sums: int
    reached: int
    counters: int
    drawn: int
    end: int


def lay_out_sums(gradient_floats: int, arena: ModuleArena) -> SumsLayout:
    """Returns the layout of the results of a shard whose gradients have so many floats."""
    norms = arena.norms
    section_floats = [
        gradient_floats,
        norms.floats,
        norms.floats,
        SUMS,
        arena.trained,
        len(norms.counters),
        len(SELDOM_USED),
    ]
    return SumsLayout(*np.cumsum(section_floats).tolist())


@dataclasses.dataclass
class Prepared:
    """The preparation of batches of one size: a plan, a reduction, and views of its buffers."""

    plan: planning.Plan
    reduction: Reduction | DeviceSums
    buffers: list[torch.Tensor]  # on the module's device
    gradients: list[list[torch.Tensor]]  # for each buffer, the gradient of each parameter in it


class OpenBatch(NamedTuple):
    """A batch that `Shards.begin` has started and `Shards.sums` completes."""

    prepared: Prepared
    train: bool
    outcome: StepOutcome


@dataclasses.dataclass
class BatchSums:
    """The sums over the samples of a global batch, equal on every rank.

    loss: the weighted mean of the losses of the shards, times the samples.
    reached: for each trained parameter, True if a shard reached it.
    drawn: for each generator of `SELDOM_USED`, True if a shard drew from it.
    """

    loss: float
    samples: float
    metrics: list[float]
    reached: list[bool] = dataclasses.field(default_factory=list)
    drawn: list[bool] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Share:
    """A function from the samples of a batch to those of this rank's shards (see `Shards.share`).

    Loaders read the shard size from its `shards`.
    """

    shards: Shards
    train: bool

    def __call__(self, samples: int) -> tuple[int, int]:
        return self.shards.share(samples, self.train)


def read_weight(weight: Any) -> float:
    """Returns the weight of a shard that a user's function has returned, as a number.

    Raises ConfigError: it is none, or below 0.
    """
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else None
        kind = f"a tensor of shape {shape}" if shape else f"a {type(weight).__name__}"
        raise ConfigError(
            f"[torch] weight= returns {kind}; return one number for each shard, for example "
            "(target != -100).sum()"
        ) from None
    if not 0 <= number < math.inf:
        raise ConfigError(
            f"[torch] weight= returns {number} for a shard; return a finite number from 0, for "
            "example (target != -100).sum()"
        )
    return number


def weight_of(weight: Any, device: Device) -> float | torch.Tensor:
    """Returns the weight of a shard in the form that `Shards.weigh` takes.

    A number on a GPU stays there, so that the host doesn't wait for it. If it is negative or not
    finite, it becomes NaN, and odyssey raises the error after the last shard.

    Args:
        weight: the result of the user's function.
        device: the device of the module.

    Raises:
        ConfigError: The weight isn't one number, or it is on the CPU and negative or not finite.
    """
    is_number = isinstance(weight, torch.Tensor) and weight.numel() == 1
    if device.is_host or not is_number or weight.device.type == "cpu":
        return read_weight(weight)
    number = weight.detach().double().reshape(())
    return number.masked_fill(~((number >= 0) & (number < math.inf)), math.nan)


def _count_traffic(reduction: Reduction | DeviceSums) -> np.ndarray:
    """Returns the bytes that a reduction has sent: in all, uncompressed, to other machines."""
    return np.array([reduction.bytes_sent, reduction.bytes_plain, reduction.bytes_wire])


class Shards:
    """Runs the shards of batches, as described at the head of this file.

    It sets, for this process, the settings on which torch's results depend.

    A step is `for first, stop in shards(samples, step)`, with forward, backward and `count` in the
    loop, then `sums`, an update of the parameters, and `settle`.

    Args:
        module: on one device, with float32 parameters, which move into `arena`.
        comm: all ranks.
        strategy: how ranks add up their sums.
        shard_size: samples per shard; may be set until the first batch.
        seed: of torch's generator, together with step and shard.
        threads: of torch.
        deterministic: "error" or "warn": a change that breaks the same bits raises an error, or is
            reported by `tell`.
        tell: reports a line to the user.
        other_arithmetic: True if ranks may compute different results from the same numbers.
        custom_loop: True if a loop of the user runs the shards, which can't repeat a step.

    Attributes:
        modes: the modes of torch in which shards run.
        arithmetic: compares what ranks compute.
        gradient: the weighted mean over the shards of the last batch; `arena.gradients` are views
            of it.

    Raises:
        ConfigError: A parameter, module or setting is not supported.
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
        other_arithmetic: bool = False,
        custom_loop: bool = False,
    ) -> None:
        if deterministic not in ("error", "warn"):
            raise ConfigError(
                f"[torch] deterministic is {deterministic!r}; choose from error, warn"
            )
        torch.set_num_threads(threads)
        if not torch.are_deterministic_algorithms_enabled():
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
        device = device_of(module)
        self.modes = Modes.current(threads, deterministic == "warn", device.settings())
        self.modes.check_threads()
        self.arithmetic = Arithmetic(
            comm,
            lambda: arithmetic.sample(self.modes, self.arena.device.torch_device),
            arithmetic.libraries(),
            allowed=other_arithmetic,
            say=tell,
        )
        self.arena = arena = ModuleArena(module, device)
        self.comm = comm
        self.strategy = strategy
        self.shard_size = shard_size
        # The numbers of samples of later steps, until the first step has checked them.
        self.coming_sizes: set[int] = set()
        self.seed = seed
        self.strict = deterministic == "error"
        self.tell = tell
        # from the shards of a batch to those of each rank; empty: ranks have equal shares
        self.counts: Callable[[int], tuple[int, ...]] = lambda shards: ()
        self.memory: dict[str, Any] = {}  # of a compression
        self._prepared: dict[tuple[Any, ...], Prepared] = {}
        # the three numbers of `traffic` that no reduction in `_prepared` counts
        self._uncounted_traffic = np.zeros(3, np.int64)
        self._links: Links | None = None
        self._has_looked_for_links = False
        self._warned_names: set[str] = set()
        self._shard_count = 0  # shards of the open batch
        self._full_samples = 1  # of a full shard of the open batch
        self._share = 1.0  # samples of the shard that is being run / samples of a full shard
        self._weight: float | torch.Tensor = 1.0  # of its gradients and its loss
        self._reaches = True  # it has reached parameters, also if its weight is 0
        # The version of each gradient after the last backward(), by the parameter's id, if a loop
        # of the user runs the shards. Its hooks fill it, and each shard starts without entries.
        self.backward_versions: dict[int, int] | None = None
        self._lay_out_memory()
        self.draws = ShardDraws(arena.device, comm.in_threads, repeats=not custom_loop)
        self.norms = arena.norms

    def _lay_out_memory(self) -> None:
        """Makes memory for the mean gradient, and the layout of a shard's results."""
        arena = self.arena
        arena.hold(range(arena.trained))
        self.gradient = arena.grads
        self._layout = lay_out_sums(arena.size, arena)

    def arrange(self, trained: Collection[str]) -> None:
        """Makes memory for the gradients of the parameters with these names.

        What was prepared for batches so far is dropped. So the next batch of each size is a
        collective call.

        Raises:
            ConfigError: A compression keeps state for the old layout.
        """
        if self.memory:
            raise ConfigError(
                f"[torch] compression={self.strategy.compression!r} with parameters that are "
                "unfrozen while it runs, as it keeps what was not sent of the others; use "
                "compression='none', or make a new trainer"
            )
        self._uncounted_traffic[:] = self.traffic()
        self._prepared.clear()
        self.arena.arrange(trained)
        self._lay_out_memory()

    def agree(self, description: dict[str, Any]) -> None:
        """Compares module, settings of torch and `description` between ranks, and sends rank 0's
        values of the module to all ranks.

        A collective call. Raises ConfigError: ranks differ.
        """
        libraries = machine(self.arena.device)
        settings = {
            **environment(self.modes, self.arena.device),
            **described(self.arena),
            **description,
        }
        self.arithmetic.compare(
            {name: value for name, value in settings.items() if name not in libraries}, libraries
        )
        self.arena.send(self.comm)

    def prepared(self, samples: int, train: bool = True) -> Prepared:
        """Returns the plan and buffers for batches of so many samples.

        The first call for a size is a collective call.
        """
        assert self.shard_size is not None
        shards = planning.shard_count(samples, self.shard_size)
        counts = self.counts(shards) if train else ()
        kind = (samples, self.shard_size, train)
        key = (*kind, counts)
        if key not in self._prepared:
            # the counts of this kind of batch have changed: shards have moved to other ranks
            for outdated in [other for other in self._prepared if other[:-1] == kind]:
                self._uncounted_traffic += _count_traffic(self._prepared.pop(outdated).reduction)
            self._prepared[key] = self._prepare(samples, shards, counts, train)
        return self._prepared[key]

    def _prepare(self, samples: int, shards: int, counts: tuple[int, ...], train: bool) -> Prepared:
        """Makes the plan and the reduction for batches of so many samples; a collective call.

        counts: the shards of each rank; empty: equal shares. train: False without gradients.
        """
        arena = self.arena
        plan = planning.make(
            shards, self.comm.rank, self.comm.size, workers=1, threads=1, counts=counts
        )
        floats = ALIGN
        content = None
        if train:
            floats = -(-self._layout.end // ALIGN) * ALIGN
            shapes = tuple(
                (offset, tuple(gradient.shape))
                for gradient, offset in zip(arena.gradients, arena.at, strict=False)
            )
            content = strategies.Content(arena.size, shapes, samples, self.memory)
        links = self._find_links() if train else None
        if links is not None:
            reduction = DeviceSums(self.comm, plan, floats, arena.device, links)
            buffers = reduction.buffers
        else:
            reduction = strategies.make(
                self.strategy, self.comm, plan, floats, workers=1, content=content
            )
            buffers = self._make_buffers(reduction)
        return Prepared(
            plan=plan,
            reduction=reduction,
            buffers=buffers,
            gradients=[arena.views(buffer) for buffer in buffers] if train else [],
        )

    def _make_buffers(self, reduction: Reduction) -> list[torch.Tensor]:
        """Returns the memory for sums of shards, on the device.

        On other devices than the CPU it is copied to the buffers of the reduction.
        """
        device = self.arena.device
        buffers = [torch.from_numpy(memory) for memory in reduction.buffers]
        if device.is_host:
            return buffers
        if self.comm.size > 1:
            device.pin(reduction.buffers)
        return [device.zeros(reduction.floats) for _ in buffers]

    def _find_links(self) -> Links | None:
        """Returns the way between the devices of ranks, or None if sums go through the host.

        The first call is a collective call, and reports why if sums go through the host.
        """
        device = self.arena.device
        if device.is_host or self.comm.size == 1 or self._has_looked_for_links:
            return self._links
        self._has_looked_for_links = True
        if self.strategy.reduction != "tree":
            problem = f"reduction={self.strategy.reduction!r} runs there"
        elif self.strategy.compression:
            problem = f"compression={self.strategy.compression!r} runs there"
        else:
            self._links, problem = linking.connect(self.comm, device)
        if problem:
            self.tell(f"[torch] sums of ranks go through the memory of the host: {problem}")
        return self._links

    @functools.cached_property
    def moves(self) -> HostMoves:
        """How parts of the module move between ranks; the first use is a collective call."""
        links = self._find_links()
        if links is None:
            return HostMoves(self.comm, self.arena.device)
        return LinkedMoves(self.comm, self.arena.device, links)

    def traffic(self) -> tuple[int, int, int]:
        """Returns the bytes that this rank has sent so far: in all, how many they would be without
        compression, and how many went to other machines.
        """
        sent, plain, wire = sum(
            (_count_traffic(p.reduction) for p in self._prepared.values()), self._uncounted_traffic
        ).tolist()
        return sent, plain, wire

    def kept_parameters(self) -> list[tuple[torch.Tensor, int]]:
        """Returns the parameters that this rank adds to a fingerprint of all, as flat tensors with
        their offsets in floats.
        """
        return [(self.arena.params, 0)]

    @property
    def nbytes(self) -> tuple[int, int]:
        """The bytes of parameters, and of gradients with their reduction, on this rank."""
        reduction_floats = sum(p.reduction.floats_needed for p in self._prepared.values())
        return self.arena.params.nbytes, self.arena.grads.nbytes + 4 * reduction_floats

    def local_shards(self, samples: int, train: bool = True) -> range:
        """Returns the numbers of the shards that this rank runs of a batch."""
        assert self.shard_size is not None
        shards = planning.shard_count(samples, self.shard_size)
        counts = self.counts(shards) if train else ()
        first, stop = planning.runs(shards, self.comm.size, 1, counts)[self.comm.rank]
        return range(first, stop)

    def owner_of_first(self, samples: int) -> int:
        """Returns the rank that runs the first shard of a batch that is trained on."""
        assert self.shard_size is not None
        shards = planning.shard_count(samples, self.shard_size)
        runs = planning.runs(shards, self.comm.size, 1, self.counts(shards))
        return next(rank for rank, (first, stop) in enumerate(runs) if first < stop)

    def share(self, samples: int, train: bool = True) -> tuple[int, int]:
        """Returns the samples of this rank's shards, as (first, one past the last).

        A rank without a shard gets the first sample, because readers need at least one.
        """
        shards = self.local_shards(samples, train)
        if not shards:
            return 0, min(1, samples)
        size = self.shard_size or 1
        return shards[0] * size, min((shards[-1] + 1) * size, samples)

    def phase(self, run: bool = False) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which parameters may be used; with ZeRO 3 a collective call.

        run: True if the shards of a step run in it.
        """
        return contextlib.nullcontext()

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which this rank has all parameters; collective with ZeRO 3."""
        return contextlib.nullcontext()

    def holding(self) -> contextlib.AbstractContextManager[set[int] | None]:
        """Returns a context in which this rank has the parameters that it keeps.

        The context gives their ids, or None if the rank keeps all parameters.
        """
        return contextlib.nullcontext()

    def __call__(self, samples: int, step: int, train: bool = True) -> Iterator[tuple[int, int]]:
        """Yields this rank's shards of a batch, as (first sample, one past the last).

        After each of them the caller runs that shard: it calls backward() of the mean of the
        losses, and `count`. When the shards are used up, all ranks call `sums`.
        """
        outcome = self.begin(samples, train)
        if outcome.error is not None:
            raise outcome.error
        with contextlib.closing(self.run(samples, step)) as shards:
            yield from shards

    def begin(self, samples: int, train: bool = True) -> StepOutcome:
        """Opens a batch, and returns the outcome of this rank's part of it.

        The outcome may have an error already. The first batch of a size is a collective call.
        """
        prepared = self.prepared(samples, train)
        sums_at = self._layout.sums if train else 0
        outcome = StepOutcome(prepared.reduction, samples_at=sums_at + 1)  # after the loss
        self._open_batch = OpenBatch(prepared, train, outcome)
        self._shard_count = prepared.plan.shards
        if train:
            with outcome.tried():
                self.norms.take_over()
        return outcome

    def run(self, samples: int, step: int) -> Iterator[tuple[int, int]]:
        """Yields the shards of the open batch, as `__call__` does, and adds up their results."""
        prepared, train, _ = self._open_batch
        buffers = prepared.buffers
        with self.modes.held(), self._forbid_other_changes(train):
            for action in (*prepared.plan.threads[0], *prepared.plan.final):
                if action.kind == "add":
                    buffers[action.a].add_(buffers[action.b])
                    continue
                shard = action.a
                target = action.b
                gradients = prepared.gradients[target] if train else []
                yield from self._run_shard(shard, samples, step, buffers[target], gradients)

    @contextlib.contextmanager
    def _forbid_other_changes(self, train: bool) -> Iterator[None]:
        """Restores generators, statistics and counters after the block, also if a shard failed.
        Checks that nothing else of the module was changed.

        Parameters, and buffers that no rule merges, must be as before the block: ranks run other
        shards, so they would get other values.

        Raises:
            ConfigError: One of these was changed, and changes are errors ("error", not "warn"). Or
                a parameter that was frozen requires a gradient.
        """
        arena = self.arena
        if train:
            arena.check()
        fixed = [
            (name, tensor, tensor._version)
            for name, tensor in (*self.norms.fixed_buffers, *arena.named)
        ]
        for name, parameter in arena.named[arena.trained :]:
            if train and parameter.requires_grad:
                raise ConfigError(
                    f"[torch] {name} was frozen and is not any more; make a new trainer of the "
                    "module"
                )
        try:
            with self.draws.watched():
                yield
        finally:
            if train:
                self.norms.put_back()
        current_buffers = dict(arena.buffers) if self.norms.fixed_buffers else {}
        for name, tensor, version in fixed:
            kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
            unchanged = tensor._version == version and (
                kind == "parameter" or current_buffers.get(name) is tensor
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

    def _run_shard(
        self, shard: int, samples: int, step: int, flat: torch.Tensor, gradients: list[torch.Tensor]
    ) -> Iterator[tuple[int, int]]:
        """Yields a shard, as (first sample, one past the last), and stores its results afterwards.

        flat: the buffer for the results. gradients: the views of `flat` that become the gradients
        of parameters.
        """
        _, train, _ = self._open_batch
        size = self.shard_size or samples
        lo = shard * size
        hi = min((shard + 1) * size, samples)
        flat.zero_()
        self._sums = [0.0] * (SUMS - 2)
        self._full_samples = min(size, samples)
        self._share = (hi - lo) / self._full_samples
        self._weight = self._share
        self._reaches = True
        versions = self._prepare_shard(gradients) if train else []
        self.seed_shard(shard, step, train)
        yield lo, hi  # the caller runs the shard here
        self.modes.set()  # the shard may have changed them
        loss, *metrics = self._sums
        tail = [self._weighted(loss), float(hi - lo), self._weight, *metrics]
        if train:
            tail += self._find_reached(gradients, versions)
            self._scale_gradients(flat[: self._layout.statistics])
            tail += self._store_buffers(flat)
            tail += self.draws.flags()
        offset = self._layout.sums if train else 0
        self.arena.device.write(flat, offset, tail)
        if train and not self._reaches and isinstance(self._weight, torch.Tensor):
            flat[self._layout.reached : self._layout.counters].mul_(self._weight != 0)

    def preview(self, samples: int, step: int) -> Iterator[tuple[int, int]]:
        """Yields the shards of the open batch, for a pass before the one that `run` is for.

        Both passes draw the same random numbers. This one leaves statistics and counters as they
        were.
        """
        _, train, _ = self._open_batch
        with self.modes.held(), self.drawing(step, train):
            for shard in self.local_shards(samples, train):
                self.seed_shard(shard, step, train)
                try:
                    yield shard * self.shard_size, min((shard + 1) * self.shard_size, samples)
                    self.modes.set()
                finally:
                    if train:
                        self.norms.put_back()

    def seed_shard(
        self, shard: int, step: int, train: bool = True, everything: bool = False
    ) -> None:
        """Seeds the generators for a shard.

        everything: True if also those that no shard has drawn from are seeded in training.
        """
        number = random_scopes.seed_of(self.seed, step, shard, train)
        self.draws.seed(number, everything=everything or not train)

    @contextlib.contextmanager
    def drawing(self, step: int, train: bool) -> Iterator[None]:
        """Seeds the generators for a computation that is the same on all ranks, and restores them
        after the block.
        """
        with self.draws.watched():
            self.draws.seed(
                random_scopes.seed_of(self.seed, step, ALL_SHARDS, train), everything=True
            )
            yield

    def scope(self, part: Any, *key: int | str) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which an optimizer or scheduler draws numbers that depend on `key`.

        part: the optimizer or scheduler.
        """
        number = random_scopes.number_of(self.seed, *key)
        return self.draws.scope(number, everything=runs_own_code(part))

    def count(self, loss: float | torch.Tensor, *metrics: float | torch.Tensor) -> None:
        """Sets the results of the shard that is being run.

        loss: the mean over its samples, as `Device.read` returns it. metrics: sums over its
        samples.
        """
        self._sums[: 1 + len(metrics)] = loss, *metrics

    def weigh(self, samples: float | torch.Tensor, reaches: bool = True) -> None:
        """Sets the weight of the shard that is being run, before its backward().

        A shard of weight 0 needs no backward(), and its loss isn't used. A batch of one shard is
        not scaled, so its shard needs no weight.

        Args:
            samples: the weight, as `weight_of` returns it. A full shard with a weight of its number
                of samples counts as 1.
            reaches: False if a shard of weight 0 counts as one without backward(), although the
                host can't know the weight and calls it.
        """
        if self._shard_count > 1:
            self._reaches = reaches
            full: float | torch.Tensor = self._full_samples
            if isinstance(samples, torch.Tensor):
                full = self.arena.device.number(self._full_samples, torch.float64)
            self._weight = samples / full

    def _weighted(self, loss: float | torch.Tensor) -> float | torch.Tensor:
        """Returns the loss of the shard that was run times its weight; 0 without a weight."""
        weight = self._weight
        if isinstance(weight, torch.Tensor):
            return (loss * weight).masked_fill(weight == 0, 0.0)
        return loss * weight if weight else 0.0

    def _scale_gradients(self, gradients: torch.Tensor) -> None:
        """Multiplies the gradients of the shard that was run by its weight.

        Without a weight they become 0, even if they are NaN, as those of a mean of nothing are.
        """
        weight = self._weight
        if isinstance(weight, torch.Tensor):
            gradients.mul_(weight.float()).masked_fill_(weight == 0, 0.0)
        elif not weight:
            gradients.zero_()
        elif weight != 1:
            gradients.mul_(weight)

    def _prepare_shard(self, gradients: list[torch.Tensor]) -> list[int]:
        """Sets the gradients of parameters to these views, and statistics to their values before
        the step.

        Returns the versions of the views, which torch raises with each write into them.
        """
        versions = []
        for (_, parameter), gradient in zip(self.arena.named, gradients, strict=False):
            parameter.grad = gradient
            versions.append(gradient._version)
        self.norms.put_back()
        if self.backward_versions:
            self.backward_versions.clear()
        return versions

    def _find_reached(self, gradients: list[torch.Tensor], versions: list[int]) -> list[float]:
        """Returns 1 for each parameter that the shard just run reached, else 0.

        Raises LoopError: the loop replaced a gradient, or wrote into one without backward().
        """
        backward_versions = self.backward_versions
        reached = []
        for (name, parameter), gradient, first_version in zip(
            self.arena.named, gradients, versions, strict=False
        ):
            version = gradient._version
            is_reached = version != first_version
            is_changed = parameter.grad is not gradient
            if is_reached and backward_versions is not None:
                is_changed |= backward_versions.get(id(parameter)) != version
            if is_changed:
                raise LoopError(
                    f"[torch] the gradient of {name} was changed while a shard was run: call "
                    "zero_grad() before the loop over shards, clip and step after it"
                )
            reached.append(float(is_reached))
        return reached

    def _store_buffers(self, flat: torch.Tensor) -> list[float | torch.Tensor]:
        """Writes the statistics after a shard behind its gradients in `flat`.

        Returns by how much the shard raised each counter, as `Device.read` returns numbers.
        """
        norms = self.norms
        layout = self._layout
        if norms.floats:
            weighted = flat[layout.statistics : layout.changed]
            torch.mul(norms.running, self._share, out=weighted)
            flat[layout.changed : layout.sums] = (norms.running != norms.kept).float()
        return [
            self.arena.device.read(counter) - count
            for (_, counter), count in zip(norms.counters, norms.counts, strict=True)
        ]

    def sums(self) -> BatchSums:
        """Completes the sums over all ranks and the mean gradient; a collective call.

        Afterwards the caller updates the parameters and calls `settle`. If a rank's part failed,
        all ranks raise its error, and nothing was changed.
        """
        with self.modes.held():
            return self._sum_up()

    def _sum_up(self) -> BatchSums:
        """Completes the sums, in the modes of shards; see `sums`."""
        _, train, outcome = self._open_batch
        result = self._complete_sums()
        sums_at = self._layout.sums if train else 0
        numbers = result[sums_at:].tolist()  # the host waits for the device here
        loss, samples, weight, *metrics = numbers[:SUMS]
        # the number of samples is NaN if a rank failed
        if train and (outcome.error is not None or math.isnan(samples)):
            self.settle(step_taken=False)
        outcome.end(samples)
        if math.isnan(weight):
            self.settle(step_taken=False)
            raise ConfigError(
                "[torch] weight= returns a number below 0, infinity or NaN for a shard; return a "
                "finite number from 0, for example (target != -100).sum()"
            ).on_all_ranks()
        loss = loss / weight * samples if weight else math.nan
        if not train:
            return BatchSums(loss, samples, metrics)
        layout = self._layout
        self._merge_buffers(
            result, samples, raised=numbers[layout.counters - sums_at : layout.drawn - sums_at]
        )
        self._store_mean(result, weight)
        reached_by = numbers[layout.reached - sums_at : layout.counters - sums_at]  # so many shards
        drawn_by = numbers[layout.drawn - sums_at : layout.end - sums_at]
        return BatchSums(
            loss,
            samples,
            metrics,
            reached=[shards > 0 for shards in reached_by],
            drawn=[shards > 0 for shards in drawn_by],
        )

    def _merge_buffers(self, result: torch.Tensor, samples: float, raised: list[float]) -> None:
        """Computes the values of statistics and counters after the step, for `settle`.

        Statistics become the mean over the shards, weighted by their samples. They stay as they are
        if no shard changed them.
        Counters rise by the mean over the shards, rounded up.

        raised: by how much all shards have raised each counter.
        """
        norms = self.norms
        layout = self._layout
        if norms.floats:
            shares = samples / min(self.shard_size or samples, samples)
            mean = result[layout.statistics : layout.changed] / shares
            changed = result[layout.changed : layout.sums] > 0
            self.merged = torch.where(changed, mean, norms.kept)
        self._counts_after = [
            count + math.ceil(total / self._shard_count)
            for count, total in zip(norms.counts, raised, strict=True)
        ]

    def _complete_sums(self) -> torch.Tensor:
        """Returns the sums of the results of all shards (see `SumsLayout`), on the device; a
        collective call.
        """
        prepared, _, outcome = self._open_batch
        reduction = prepared.reduction
        device = self.arena.device
        if isinstance(reduction, DeviceSums):
            outcome.tell()
            return reduction.run()
        if not device.is_host and outcome.error is None and self.comm.size > 1:
            for _, buffer in prepared.plan.partial:
                torch.from_numpy(reduction.buffers[buffer]).copy_(prepared.buffers[buffer])
        outcome.tell()  # before the exchange: the sums of a rank that failed say so
        reduction.start()
        reduction.finish()
        if device.is_host or self.comm.size > 1:
            return device.put(torch.from_numpy(reduction.result))
        _, root = prepared.plan.partial[0]
        return prepared.buffers[root]

    def _store_mean(self, result: torch.Tensor, weight: float) -> None:
        """Divides the sum of the gradients by the sum of weights, into `gradient`."""
        divisor = self.arena.device.number(weight)
        torch.div(result[: self._layout.statistics], divisor, out=self.gradient)

    def settle(self, step_taken: bool = True) -> None:
        """Sets the buffers of normalisations to their values after the step.

        step_taken: False gives them their values before the step.
        """
        if not step_taken:
            self.norms.put_back()
        elif self.norms.floats or self._counts_after:
            self.norms.settle(self.merged if self.norms.floats else None, self._counts_after)
