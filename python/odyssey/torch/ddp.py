"""`DistributedDataParallel` for a loop of one's own: fixed shards by torch, their sums along odyssey's tree.

    net = odyssey.torch.DistributedDataParallel(module, shard_size=16)
    for batch in loader:
        for x, y in net.shards(batch):
            loss(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

When the inner loop ends, `p.grad` is the mean over the global batch, the same bits on any number of ranks: a shard's
gradient lands in the reduction's own buffer (`p.grad` is a view of it), buffers are added along the tree of
parallel/plan.py, BatchNorm's statistics behind the gradients. What it is not: torch's class, whose sums depend on the
number of ranks; that works over `init_process_group("odyssey")`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import optimizer as optimizers
from torch.utils import _pytree as pytree

from .. import comm as communication
from ..comm import Communicator
from ..data.sampler import check_integer
from ..errors import ConfigError, OdysseyError
from ..parallel import plan as planning
from ..parallel import strategy as strategies
from ..train import agreement
from . import c10d
from .data import ShardedBatch, seed_of

_ALIGN = 16  # floats, to which each tensor's place is rounded up


class LoopError(OdysseyError):
    """A training loop calls things in an order that cannot give the promised gradient."""


class _Places:
    """Where tensors lie one after the other in a flat float32 buffer."""

    def __init__(self, tensors: list[torch.Tensor], start: int = 0) -> None:
        self.tensors, self.at, end = tensors, [], start
        for t in tensors:
            self.at.append(end)
            end += -(-t.numel() // _ALIGN) * _ALIGN
        self.end = end

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors' places in `flat`, in their shapes and memory formats."""
        found = []
        for t, at in zip(self.tensors, self.at, strict=True):
            dense = torch.empty_like(t, device="meta").stride()  # without gaps, in the tensor's own order of axes
            found.append(flat[at : at + t.numel()].as_strided(t.shape, dense))
        return found


class _Sums(NamedTuple):
    """What a global batch of one size needs: the plan, the reduction, and its buffers as torch sees them."""

    plan: planning.Plan
    reduction: Any
    buffers: list[torch.Tensor]
    gradients: list[list[torch.Tensor]]  # of each buffer
    statistics: list[list[torch.Tensor]]
    result: torch.Tensor


class DistributedDataParallel(torch.nn.Module):
    """A module trained by a loop of one's own, with the same bits on any number of ranks.

    The loss must be a mean over the samples that `shards` gave. Gradients add up over several `shards(...)` loops until
    an optimizer steps, or zero_grad(): accumulation is leaving the step out. Parameters that no shard reaches have
    gradient 0. Bits depend on shard_size, seed, threads, torch's version and the processor, not on the ranks.

    Args:
        module: on the CPU, parameters of float32; rank 0's values are sent to all.
        shard_size: samples per shard; None: the loader's, or the default for the first batch's size.
        seed: of torch's generator, which is seeded anew for each shard.
        threads: torch's threads; not more, where a rank has more cores, as sums depend on it.

    Raises:
        ConfigError: a parameter that cannot be held; ranks whose modules or settings differ.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        shard_size: int | None = None,
        seed: int = 0,
        *,
        threads: int = 1,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.comm = communication.world() if comm is None else comm
        self.shard_size = None if shard_size is None else check_integer("shard_size", shard_size, 1)
        self.seed = check_integer("seed", seed, 0, 2**63 - 1)
        torch.set_num_threads(check_integer("threads", threads, 1))
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise ConfigError("[torch] DistributedDataParallel of a module without parameters that require gradients")
        for name, p in named:
            if p.dtype is not torch.float32 or p.device.type != "cpu":
                raise ConfigError(
                    f"[torch] parameter {name} is {p.dtype} on {p.device}; DistributedDataParallel trains float32 "
                    "parameters on the CPU (torch.autocast computes in bfloat16)"
                )
        self._parameters_ = [p for _, p in named]
        self._floating = [b for b in module.buffers() if b.is_floating_point()]
        self._counters = [b for b in module.buffers() if not b.is_floating_point()]
        self._at = _Places(self._parameters_)
        self._at_buffers = _Places(self._floating, self._at.end)
        self._agree(named)
        self._mean = torch.zeros(self._at.end)
        self._means = self._at.views(self._mean)
        self._sums: dict[tuple[int, int], _Sums] = {}
        self.steps = 0  # loops over shards that have ended
        self._open = False  # a loop over shards has begun and not ended
        self._stepped: set[int] = set()  # ids of parameters whose gradient an optimizer has used
        self._target: torch.Tensor | None = None  # the buffer of the shard that is under way
        self._seen = -1  # its version after the last backward pass
        for p in self._parameters_:
            p.register_post_accumulate_grad_hook(self._accumulated)
        _nets.add(self)

    def _agree(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """Compares what must be alike on all ranks, and sends rank 0's values; a collective call."""
        settings = {
            "PyTorch version": torch.__version__,
            "instruction set of PyTorch": torch.backends.cpu.get_cpu_capability(),
            "number of PyTorch threads": torch.get_num_threads(),
            "module": [(n, tuple(p.shape), p.stride()) for n, p in named],
            "buffers of the module": [(n, str(b.dtype), tuple(b.shape)) for n, b in self.module.named_buffers()],
            "shard_size": self.shard_size,
            "seed": self.seed,
        }
        agreement.compare(self.comm, settings)
        for t in (*self.module.parameters(), *self.module.buffers()):
            values = c10d.host(t)
            self.comm.broadcast(c10d.array(values))
            c10d.put(values, t)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's own."""
        return self.module(*inputs, **named)

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        """The module's own: names have no `module.` in front."""
        return self.module.state_dict(*arguments, **named)

    def load_state_dict(self, *arguments: Any, **named: Any) -> Any:
        """The module's own; all ranks must load the same."""
        return self.module.load_state_dict(*arguments, **named)

    # --- a global batch ---

    def shards(self, batch: Any) -> Iterator[Any]:
        """This rank's shards of a global batch, to run forward and backward on; to be used up.

        Args:
            batch: what an `odyssey.torch.DataLoader` yields, or the whole global batch, alike on all ranks: tensors
                (samples, ...) in tuples, lists or dictionaries.

        Raises:
            LoopError: zero_grad(), clipping or a step inside the loop, a shard without backward(), or one loop inside
                another.
            ConfigError: no tensor in the batch, or a loader with another shard_size.
        """
        if self._open and self._target is not None:
            raise LoopError("[torch] shards() inside a loop over shards(); end that one first")
        samples, size, pieces = self._pieces(batch)
        sums = self._sums_of(samples, size)
        kept = [None if self._open or id(p) in self._stepped else p.grad for p in self._parameters_]
        kept = [None if g is None else g.clone() for g in kept]
        generator, before = torch.get_rng_state(), [b.clone() for b in (*self._floating, *self._counters)]
        self._open = True
        try:
            for action in (*sums.plan.threads[0], *sums.plan.final):
                if action.kind == "add":
                    sums.buffers[action.a].add_(sums.buffers[action.b])
                    continue
                yield from self._shard(sums, action, pieces(action.a), min(size, samples - action.a * size), before)
        finally:
            self._target = None
            torch.set_rng_state(generator)
        self._finish(sums, samples, kept, before)

    def _shard(self, sums: _Sums, action: planning.Action, data: Any, count: int, before: list[Any]) -> Iterator[Any]:
        """One shard: its gradients, times its samples, and its buffers into their place."""
        buffer, views = sums.buffers[action.b], sums.gradients[action.b]
        buffer.zero_()
        for p, view in zip(self._parameters_, views, strict=True):
            p.grad = view
        own = (*self._floating, *self._counters)
        with torch.no_grad():
            for b, value in zip(own, before, strict=True):
                b.copy_(value)
        torch.default_generator.manual_seed(seed_of(self.seed, self.steps, action.a))
        self._target, self._seen = buffer, -1
        yield data
        if self._seen < 0:
            raise LoopError("[torch] a shard without backward(); call loss.backward() for each of shards()")
        replaced = any(p.grad is not v for p, v in zip(self._parameters_, views, strict=True))
        if replaced or buffer._version != self._seen:
            raise LoopError(
                "[torch] gradients were changed inside the loop over shards(): call zero_grad() before it, clip and "
                "step after it"
            )
        self._target = None
        buffer[: self._at.end] *= count
        with torch.no_grad():
            for b, place in zip(self._floating, sums.statistics[action.b], strict=True):
                torch.mul(b, count, out=place)
            tail = buffer[self._at_buffers.end :]
            changed = [not torch.equal(b, value) for b, value in zip(own, before, strict=True)]
            tail[: len(own)] = count * torch.tensor(changed, dtype=torch.float32)
            first = len(self._floating)
            for k, (b, value) in enumerate(zip(self._counters, before[first:], strict=True)):
                if changed[first + k]:
                    tail[len(own) + k] = count * float((b.long() - value.long()).max())

    def _finish(self, sums: _Sums, samples: int, kept: list[torch.Tensor | None], before: list[Any]) -> None:
        """Completes the sums and puts the mean into p.grad; merges buffers."""
        sums.reduction.start()
        sums.reduction.finish()
        torch.div(sums.result[: self._at.end], samples, out=self._mean)
        for p, mean, old in zip(self._parameters_, self._means, kept, strict=True):
            p.grad = mean if old is None else old.add_(mean)
        own = (*self._floating, *self._counters)
        tail = sums.result[self._at_buffers.end :]
        changed = (tail[: len(own)] > 0).tolist()
        with torch.no_grad():
            for b, value in zip(own, before, strict=True):
                b.copy_(value)
            for k, b in enumerate(self._floating):
                if changed[k]:
                    at = self._at_buffers.at[k]
                    b.copy_((sums.result[at : at + b.numel()] / samples).view(b.shape))
            for k, b in enumerate(self._counters):
                if changed[len(self._floating) + k]:
                    b += round(float(tail[len(own) + k]) / samples)
        self._stepped.clear()
        self._open = False
        self.steps += 1

    def _pieces(self, batch: Any) -> tuple[int, int, Any]:
        """(samples, shard size, function from a shard's number to its data)."""
        if isinstance(batch, ShardedBatch):
            if self.shard_size not in (None, batch.shard_size):
                raise ConfigError(
                    f"[torch] shard_size is {self.shard_size}, the DataLoader's {batch.shard_size}; give both the same"
                )
            return batch.samples, batch.shard_size, batch.shards.__getitem__
        tensors = [t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()]
        if not tensors or not len(tensors[0]):
            raise ConfigError("[torch] shards() of a batch without samples; give tensors (samples, ...)")
        samples = len(tensors[0])
        if self.shard_size is None:
            self.shard_size = planning.default_shard_size(samples)
        size = self.shard_size

        def piece(s: int) -> Any:
            def cut(t: Any) -> Any:
                whole = isinstance(t, torch.Tensor) and t.dim() and len(t) == samples
                return t[s * size : (s + 1) * size] if whole else t

            return pytree.tree_map(cut, batch)

        return samples, size, piece

    def _sums_of(self, samples: int, size: int) -> _Sums:
        key = samples, size
        if key not in self._sums:
            count = planning.shard_count(samples, size)
            plan = planning.make(count, self.comm.rank, self.comm.size, 1, 1)
            floats = self._at_buffers.end + len(self._floating) + 2 * len(self._counters)
            reduction = strategies.make(strategies.Strategy("tree"), self.comm, plan, -(-floats // _ALIGN) * _ALIGN, 1)
            buffers = [torch.from_numpy(reduction.buffers[i]) for i in range(plan.buffers)]
            self._sums[key] = _Sums(
                plan,
                reduction,
                buffers,
                [self._at.views(b) for b in buffers],
                [self._at_buffers.views(b) for b in buffers],
                torch.from_numpy(np.asarray(reduction.result)),
            )
        return self._sums[key]

    # --- wrong use ---

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """After a backward pass has added to a parameter's gradient."""
        if self._target is None:
            raise LoopError(
                "[torch] backward() outside of shards(); write `for x, y in net.shards(batch): "
                "loss(net(x), y).backward()`"
            )
        self._seen = self._target._version

    def _before_step(self, ids: set[int]) -> None:
        if self._open and any(id(p) in ids for p in self._parameters_):
            raise LoopError("[torch] optimizer.step() before the loop over shards() has ended; step after it")


_nets: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _before(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
    for net in _nets:
        if net._open:
            net._before_step(_ids(optimizer))


def _after(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
    for net in _nets:
        net._stepped |= _ids(optimizer)


optimizers.register_optimizer_step_pre_hook(_before)
optimizers.register_optimizer_step_post_hook(_after)
