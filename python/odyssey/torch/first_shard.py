"""The first shard of a batch, which every rank computes before the first update of a fit().

Ranks compare the hash of its gradients. So a processor or library whose results differ is found by
the model's own operations, which the samples of arithmetic.py may lack. The rank that owns the
shard sends its inputs and targets, and torch's generator has the seed of the shard. Nothing that
the shard changes stays: generators, running statistics, gradients, and what forward() sets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .. import data as datasets
from ..base import without_prints
from ..capture import decode, encode
from ..core import fingerprint
from ..train import spread
from .arena import ModuleArena
from .changing import ForwardCheck
from .data import part
from .shard_draws import seldom_used_marks
from .shards import Shards


class FirstShard:
    """Compares the gradients of a batch's first shard between ranks, once for each fit().

    With deterministic="warn" nothing is compared, because operations may have other results each
    time.

    Args:
        shards: runs the shards of a batch.
        forward_check: puts back what forward() changes.
        run: runs forward and backward of a shard: run(inputs, targets, samples).

    Attributes:
        is_due: True before the first step of a fit().
    """

    def __init__(
        self,
        shards: Shards,
        forward_check: ForwardCheck,
        *,
        run: Callable[[Any, Any, int], None],
    ) -> None:
        self.shards = shards
        self.comm = shards.comm
        self.forward_check = forward_check
        self.run = run
        self.is_due = True

    def compare(self, batch: datasets.Batch, step: int) -> None:
        """Compares the gradients, if that is due; a collective call.

        Raises ConfigError, on all ranks: they differ, and other arithmetic isn't allowed.
        """
        is_due = self.is_due
        self.is_due = False
        if not is_due or self.comm.size == 1 or not self.shards.strict:
            return
        value = self._send_samples(batch)

        def compute() -> int | None:
            # an error of the model is raised by the step
            with self.shards.phase(), contextlib.suppress(Exception):
                return None if value is None else self._compute(value, step)
            return None

        self.shards.arithmetic.compare_first_shard(compute(), step, compute)

    def _send_samples(self, batch: datasets.Batch) -> tuple[Any, Any] | None:
        """Returns inputs and targets of the first shard on all ranks; a collective call.

        None if they can't be sent, for example objects of a user's own class.
        """
        samples = len(batch.indices)
        owner = self.shards.owner_of_first(samples)
        value: list[Any] | None = None
        if self.comm.rank == owner:
            # the step raises an error of the data; what can't be encoded is not compared
            with contextlib.suppress(Exception):
                batch = batch.covering(*self.shards.share(samples))
                stop = min(self.shards.shard_size or samples, samples)
                pair = tuple(map(_plain, part(batch, 0, stop)))
                arrays: dict[str, Any] = {}
                value = [encode(pair, arrays, "shard"), arrays, stop]
        value = spread(self.comm, value, owner)
        if value is None:
            return None
        node, arrays, self._samples = value
        # a class of the user's own may not be found by its name
        with contextlib.suppress(Exception):
            # a copy of each tensor: bits of a product may depend on where in memory it starts
            return self.shards.arena.device.put(tree_map(_copy, decode(node, arrays)))
        return None

    def _compute(self, value: tuple[Any, Any], step: int) -> int | None:
        """Returns the fingerprint of the gradients.

        None if ranks are threads, and the shard has drawn from a generator that they share.
        """
        x, y = value
        marks = seldom_used_marks()
        with (
            self.shards.modes.held(),
            self.shards.norms.unchanged(),
            self.forward_check.undone(),
            gathered_prints(self.shards.arena) as prints,
            self.shards.draws.watched(),
            without_prints(lambda error: False),
        ):
            self.shards.seed_shard(0, step, everything=True)
            self.run(x, y, self._samples)
            has_drawn = seldom_used_marks() != marks
        return None if has_drawn and self.comm.in_threads else fingerprint.add(prints)


@contextlib.contextmanager
def gathered_prints(arena: ModuleArena) -> Iterator[list[int]]:
    """Yields a list of fingerprints of the gradients that backward() computes in the block.

    A gradient is freed as soon as its fingerprint is taken. Earlier gradients are put back.
    """
    trained = [p for _, p in arena.named[: arena.trained]]
    previous = [p.grad for p in trained]
    prints: list[int] = []

    def take(parameter: torch.Tensor, start: int) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:
            flat = gradient.detach().contiguous().reshape(-1)
            prints.append(arena.device.fingerprint([(flat, start)]))

    with contextlib.ExitStack() as hooks:
        for parameter, start in zip(trained, arena.at, strict=False):
            parameter.grad = None
            if parameter.requires_grad:

                def hook(parameter: torch.Tensor, start: int = start) -> None:
                    take(parameter, start)

                handle = parameter.register_post_accumulate_grad_hook(hook)
                hooks.callback(handle.remove)
        try:
            yield prints
        finally:
            for parameter, gradient in zip(trained, previous, strict=True):
                parameter.grad = gradient


def _plain(tree: Any) -> Any:
    """Returns a tree of tensors with plain dicts, which can be encoded."""
    if isinstance(tree, dict):
        return {name: _plain(child) for name, child in tree.items()}
    return tuple(map(_plain, tree)) if isinstance(tree, tuple) else tree


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
