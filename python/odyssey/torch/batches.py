"""Batches of tensors as the session takes them: whatever a loader gives, and a shard of it.

What it is not: a loader; data.py has one, odyssey.data another, and PyTorch's own works.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..data import ArrayDataset, Batch
from ..data.trees import leaves, mapped
from ..errors import ConfigError, DataError
from ..train.fit import check_sampler
from .shards import generator, seed_of

ORDER = 1 << 62  # apart from the numbers of steps, where loaders' seeds are made
_NONE = np.empty(0, np.float32)


def tree_of(given: Any) -> Any:
    """What a collate function makes as a tree (data/trees.py): lists as tuples, mappings of any kind as dicts."""
    if isinstance(given, Mapping):
        return {name: tree_of(part) for name, part in given.items()}
    return tuple(map(tree_of, given)) if isinstance(given, (tuple, list)) else given


def arrays_of(given: Any) -> Any:
    """A tree of arrays, which share the memory of a tree of tensors; float64 and bfloat16 as float32.

    Raises:
        TypeError: something else is in it.
    """

    def array(leaf: Any) -> Any:
        made = leaf.detach() if isinstance(leaf, torch.Tensor) else torch.from_numpy(np.array(leaf))
        return (made.float() if made.dtype in (torch.float64, torch.bfloat16) else made).numpy()

    return mapped(array, tree_of(given))


class Samples(ArrayDataset):
    """The samples of one batch of tensors, of any dtype that NumPy has."""

    normalised = False

    def __init__(self, inputs: Any, targets: Any, name: str) -> None:
        try:
            x, y = arrays_of(inputs), arrays_of(targets)
        except TypeError as problem:
            raise DataError(f"{name}: {problem}; tensors or arrays, or tuples or dicts of them, are allowed") from None
        found = [len(a) if a.ndim else 0 for a in (*leaves(x), *leaves(y))]
        if not found or found[0] < 1 or len(set(found)) > 1:
            raise DataError(f"{name}: its tensors have {found} samples; the same number, at least one, is needed")
        super().__init__(x, y, 0, _NONE, _NONE, name)

    def __post_init__(self) -> None:
        """What an ArrayDataset must be need not hold for what PyTorch is given."""

    def gather(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Inputs and targets at `indices` (B,), which follow each other; not copies."""
        lo, hi = int(indices[0]), int(indices[-1]) + 1
        return tuple(mapped(lambda a: a[lo:hi], tree) for tree in (self.images, self.labels))  # type: ignore[return-value]


class Sharded(Samples):
    """A batch of odyssey.torch.DataLoader, of which this rank has its own shards: ranks compare its length alone."""

    def __init__(self, batch: Any, name: str) -> None:
        super().__init__(np.zeros((batch.samples, 1), np.uint8), (), name)
        self.__dict__["batch"] = batch

    def shard(self, lo: int, hi: int) -> Any:
        """Samples lo to hi - 1, which are a shard; ConfigError if they are none of the loader's."""
        size = self.batch.shard_size
        if lo % size or hi - lo != min(size, len(self) - lo):
            raise ConfigError(f"[torch] the loader's shard_size is {size}, the trainer's {hi - lo}; give both the same")
        return self.batch.shards[lo // size]


def batches(loader: Any, epoch: int, seed: int, steps: int, targets: bool = True) -> Iterator[Batch]:
    """The batches of an epoch of any loader; those of pairs of tensors or arrays become batches of their own.

    torch's generator is seeded by the epoch first, so that a loader that shuffles with it gives all ranks the same
    order, and gives it again when a training goes on within the epoch.

    Args:
        steps: batches that make one step; those of tensors cannot be joined.
        targets: whether they are needed; without, batches may be inputs alone.
    """
    if not isinstance(loader, Iterable) or isinstance(loader, (tuple, torch.Tensor)):
        raise ConfigError(
            f"[train] {type(loader).__name__} is no loader; give odyssey.torch.DataLoader or torch's, or a list of "
            "(x, y) batches"
        )
    check_sampler(loader)
    generator.manual_seed(seed_of(seed, ORDER, epoch))
    for told in () if hasattr(loader, "start_at") else (loader, getattr(loader, "sampler", None)):
        if hasattr(told, "set_epoch"):
            told.set_epoch(epoch)
    for index, item in enumerate(loader):
        if isinstance(item, Batch):
            yield item
            continue
        name = f"batch {index} of epoch {epoch}"
        if hasattr(item, "shards"):
            data: Samples = Sharded(item, name)
        else:
            data = Samples(*(_pair(item) if targets else (_inputs(item), ())), name)
        if steps > 1:
            raise ConfigError(
                f"[torch] accumulation_steps is {steps}, and batches of tensors are not joined; use a larger batch"
            )
        yield Batch(data, np.arange(len(data)), epoch, index)


def _pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        what = f"{type(item).__name__} of {len(item)}" if isinstance(item, (tuple, list)) else type(item).__name__
        raise ConfigError(f"[train] the loader gave a {what}; give batches of (x, y), samples and targets")
    return item[0], item[1]


def _inputs(item: Any) -> Any:
    """The inputs of a batch: (x, y), (x,) or x."""
    return item[0] if isinstance(item, (tuple, list)) and len(item) in (1, 2) else item


def part(batch: Batch, lo: int, hi: int, targets: bool = True) -> tuple[Any, Any]:
    """Samples lo to hi - 1 of a batch as tensors; of our own data sets, integer targets as int64.

    They are copies: a forward pass may write into its inputs, and products of matrices that do not begin on a cache
    line may have other last bits.
    """

    def own(leaf: Any) -> Any:
        made = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf
        return made.clone() if isinstance(made, torch.Tensor) else made

    if isinstance(batch.dataset, Sharded):
        found = batch.dataset.shard(lo, hi)
        return mapped(own, tree_of(_pair(found) if targets else (_inputs(found), ())))
    x, y = batch.dataset.gather(batch.indices[lo:hi])
    if not isinstance(batch.dataset, Samples):
        y = mapped(lambda a: a.astype(np.int64) if a.dtype == np.int32 else a, y)
    return mapped(own, (x, y))
