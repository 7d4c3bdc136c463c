"""`DistributedDataParallel` for a loop of one's own: fixed shards by torch, their sums along
odyssey's tree.

    net = odyssey.torch.DistributedDataParallel(module, shard_size=16)
    for batch in loader:
        for x, y in net.shards(batch):
            loss(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

When the inner loop ends, `p.grad` is the mean over the global batch, the same bits on any number of
ranks. What it is not: torch's class, whose sums depend on that number; it works over
`init_process_group("odyssey")`.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim import optimizer as optimizers
from torch.utils import _pytree as pytree

from .. import comm as communication
from ..comm import Communicator
from ..data import Batch
from ..errors import ConfigError, check_integer
from ..parallel import Strategy, default_shard_size
from .data import Shared, tree_of
from .shards import LoopError, Shards

ADVICE_ONE_NET = "make one DistributedDataParallel of nn.ModuleDict({name: module, ...})"
_LEAVES = (torch.Tensor, int, float, str, bytes, type(None))  # of a batch


class DistributedDataParallel(torch.nn.Module):
    """A module trained by a loop of one's own, with the same bits on any number of ranks.

    The loss must be a mean over the samples that `shards` gave. Gradients add up over several
    `shards(...)` loops until an optimizer steps, or zero_grad(): accumulation is leaving the step
    out. Bits depend on shard_size, seed, threads, torch's version and the processor, not on the
    ranks.

    Args:
        module: on the CPU, parameters of float32; rank 0's values are sent to all.
        shard_size: samples per shard; None: the loader's, or the default for the first batch's
            size.
        seed: of torch's generator, which is seeded anew for each shard.
        threads: torch's threads; not more, where a rank has more cores, as sums depend on it.
        deterministic: "error": an operation without a deterministic form, or a buffer that nothing
            merges, ends the training; "warn": it is told, and bits are not promised.

    Raises ConfigError: a parameter or module that cannot be held; ranks whose modules or settings
    differ.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        shard_size: int | None = None,
        seed: int = 0,
        *,
        threads: int = 1,
        deterministic: str = "error",
        comm: Communicator | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.comm = communication.world() if comm is None else comm
        self._shards = Shards(
            module,
            self.comm,
            Strategy("tree"),
            shard_size=None if shard_size is None else check_integer("shard_size", shard_size, 1),
            seed=check_integer("seed", seed, 0, 2**63 - 1),
            threads=check_integer("threads", threads, 1),
            deterministic=deterministic,
            mean=True,
            tell=lambda line: warnings.warn(line, stacklevel=2),
        )
        self._shards.agree({"shard_size": shard_size, "seed": seed, "deterministic": deterministic})
        self._arena = self._shards.arena
        self._trained = [p for _, p in self._arena.named[: self._arena.trained]]
        self.steps = 0  # loops over shards that have ended
        self._open = False  # a loop over shards has begun and not ended
        self._stepped: set[int] = set()  # ids of parameters whose gradient an optimizer has used
        # of the gradients, by parameter, while a shard is under way
        self._versions: dict[int, int] = {}
        for p in self._trained:
            p.register_post_accumulate_grad_hook(self._accumulated)
        _nets.add(self)

    @property
    def shard_size(self) -> int | None:
        """Samples per shard; None as long as neither it nor a batch is known."""
        return self._shards.shard_size

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.module(*inputs, **keywords)

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """The module's own: names have no `module.` in front."""
        return self.module.state_dict(*arguments, **keywords)

    def load_state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """The module's own; all ranks must load the same."""
        return self.module.load_state_dict(*arguments, **keywords)

    def shards(self, batch: Any) -> Iterator[Any]:
        """This rank's shards of a global batch, to run forward and backward on; to be used up.

        batch: what an `odyssey.torch.DataLoader` yields, or the whole global batch, alike on all
            ranks: tensors (samples, ...) in tuples, lists or dictionaries.
        Raises LoopError: zero_grad(), clipping or a step inside the loop, a shard without
        backward(), one loop inside another, or another net's running statistics or gradients moved
        by it. ConfigError: no tensor in the batch, or a loader with another shard_size.
        """
        if self._versions:
            raise LoopError("[torch] shards() inside a loop over shards(); end that one first")
        samples, piece = self._pieces(batch)
        other_nets = [(net, net._norms()) for net in _nets if net is not self]
        old_gradients = [
            None if self._open or id(p) in self._stepped else p.grad for p in self._trained
        ]
        old_gradients = [None if g is None else g.clone() for g in old_gradients]
        self._open = True
        shards = self._shards(samples, self.steps)
        try:
            for lo, hi in shards:
                places = [p.grad for p in self._trained]
                versions = {id(p): g._version for p, g in zip(self._trained, places, strict=True)}
                self._versions = dict(versions)
                yield piece(lo, hi)
                self._check_shard(places, versions)
        finally:
            shards.close()
            self._versions = {}
        if any(net._norms() != norms for net, norms in other_nets):
            raise LoopError(
                "[torch] the shards of one net move the running statistics of another, and ranks "
                "would go apart: "
                f"eval() that one, or {ADVICE_ONE_NET}"
            )
        sums = self._shards.sums()
        for p, mean, old, reached in zip(
            self._trained, self._arena.gradients, old_gradients, sums.reached, strict=True
        ):
            p.grad = old if not reached else mean if old is None else old.add_(mean)
        self._shards.settle()
        self._stepped.clear()
        self._open = False
        self.steps += 1

    def mean(self, values: Iterable[tuple[Any, float]]) -> float:
        """The mean of (number, weight) pairs of all ranks, such as the loss and the samples of
        each shard: the same on all ranks, on any number of them. Collective; a rank without
        shards gives none. NaN: nobody gave any.
        """
        local_pairs = np.array(
            [(v.item() if isinstance(v, torch.Tensor) else v, n) for v, n in values], float
        ).reshape(-1, 2)
        max_pairs = int(self.comm.all_reduce(np.array([len(local_pairs)], np.int64), "max")[0])
        padded = np.zeros((max_pairs, 2))
        padded[: len(local_pairs)] = local_pairs
        numbers, weights = self.comm.all_gather(padded).reshape(-1, 2).T
        return math.fsum(numbers * weights) / total if (total := math.fsum(weights)) else math.nan

    def _pieces(self, batch: Any) -> tuple[int, Callable[[int, int], Any]]:
        """(samples, function from a shard's first and last to its data); the shard size is known
        from here on.
        """
        shards = self._shards
        if isinstance(batch, Batch) and isinstance(shared_batch := batch.dataset, Shared):
            if shards.shard_size not in (None, shared_batch.shard_size):
                sizes = f"{shards.shard_size}, the DataLoader's {shared_batch.shard_size}"
                raise ConfigError(f"[torch] shard_size is {sizes}; give both the same")
            shards.shard_size = shared_batch.shard_size
            return len(shared_batch), shared_batch.shard
        batch = pytree.tree_map(lambda t: tree_of(t) if isinstance(t, Mapping) else t, batch)
        leaves = pytree.tree_leaves(batch)
        tensors = [t for t in leaves if isinstance(t, torch.Tensor) and t.dim()]
        strange = next((t for t in leaves if not isinstance(t, _LEAVES)), None)
        if strange is not None:
            name = type(strange).__name__
            raise ConfigError(
                f"[torch] shards() of a batch with a {name}, which is not cut; give tensors (n, "
                "...)"
            )
        if not tensors or not len(tensors[0]):
            raise ConfigError(
                "[torch] shards() of a batch without samples; give tensors (samples, ...)"
            )
        samples = len(tensors[0])
        shards.shard_size = shards.shard_size or default_shard_size(samples)

        def piece(lo: int, hi: int) -> Any:
            def cut(t: Any) -> Any:
                uncut = not isinstance(t, torch.Tensor) or not t.dim() or len(t) != samples
                return t if uncut else t[lo:hi].clone()  # as data.part() does

            return pytree.tree_map(cut, batch)

        return samples, piece

    def _norms(self) -> tuple[bytes, list[int]]:
        """Running statistics and counters of the normalisations, as they are now."""
        norms = self._arena.norms
        return norms.running.tobytes(), [int(b) for _, b in norms.counters]

    def _check_shard(self, places: list[torch.Tensor], versions: dict[int, int]) -> None:
        """Raises LoopError unless backward(), and nothing else, has written into `places` since
        `versions` were read.
        """
        for p, place in zip(self._trained, places, strict=True):
            if p.grad is not place or place._version != self._versions[id(p)]:
                raise LoopError(
                    "[torch] gradients were changed inside the loop over shards(): call "
                    "zero_grad() before it, clip "
                    "and step after it"
                )
        if self._versions == versions:
            raise LoopError(
                "[torch] a shard without backward(); call loss.backward() for each of shards()"
            )

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """After a backward pass has added to a parameter's gradient."""
        if not self._versions and any(net._versions for net in _nets):
            raise LoopError(
                "[torch] backward() inside of one net's shards() reaches the parameters of "
                "another: set "
                f"requires_grad_(False) on them meanwhile, or {ADVICE_ONE_NET}"
            )
        if not self._versions:
            raise LoopError(
                "[torch] backward() outside of shards(): `for x, y in net.shards(batch): "
                "loss(net(x), y).backward()`"
            )
        assert parameter.grad is not None
        self._versions[id(parameter)] = parameter.grad._version


_nets: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _check_no_open_loop(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
    for net in _nets:
        if net._open and _parameter_ids(optimizer) & {id(p) for p in net._trained}:
            raise LoopError(
                "[torch] optimizer.step() before the loop over shards() has ended; step after it"
            )


def _note_stepped(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
    for net in _nets:
        net._stepped |= _parameter_ids(optimizer)


optimizers.register_optimizer_step_pre_hook(_check_no_open_loop)
optimizers.register_optimizer_step_post_hook(_note_stepped)
