"""Batches of tensors as the session takes them: whatever a loader gives, a shard of it, and what ranks compare.

What it is not: a loader; data.py has one, odyssey.data another, and PyTorch's own works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ..data import ArrayDataset, Batch
from ..errors import ConfigError, DataError
from .shards import generator, seed_of

ORDER = 1 << 62  # apart from the numbers of steps, where loaders' seeds are made


def over(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree (tuples, lists, dicts) of what a function makes of its leaves."""
    if isinstance(tree, dict):
        return {key: over(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(over(function, value) for value in tree)
    return function(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a tree, in order."""
    if isinstance(tree, (dict, tuple, list)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(value)
    else:
        yield tree


def tensor(leaf: Any) -> torch.Tensor:
    """An array or tensor as a tensor, float64 as float32; TypeError for anything else."""
    made = leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(np.array(leaf))
    return made.float() if made.dtype == torch.float64 else made


class Samples:
    """The samples of one batch, trees of tensors (B, ...): as much of a data set as the session asks for."""

    classes = None

    def __init__(self, inputs: Any, targets: Any, name: str) -> None:
        try:
            self.inputs, self.targets = over(tensor, inputs), over(tensor, targets)
        except TypeError as problem:
            raise DataError(f"{name}: {problem}; tensors or arrays, or tuples or dicts of them, are allowed") from None
        self.name = name
        found = [t.shape[0] if t.dim() else 0 for t in leaves((self.inputs, self.targets))]
        if not found or found[0] < 1 or len(set(found)) > 1:
            raise DataError(f"{name}: its tensors have {found} samples; the same number, at least one, is needed")
        self._length = found[0]

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Inputs and targets at `indices` (B,), which follow each other: a part of the batch."""
        lo, hi = int(indices[0]), int(indices[-1]) + 1
        part = slice(lo, hi) if hi - lo == len(indices) else torch.from_numpy(indices)
        return over(lambda t: t[part], self.inputs), over(lambda t: t[part], self.targets)

    # what agreement.py looks at: bytes, and what they are

    def about(self) -> tuple[Any, ...]:
        """Shape and dtype of a sample's tensors."""
        return tuple((str(t.dtype), tuple(t.shape[1:])) for t in leaves((self.inputs, self.targets)))

    form = sample_shape = property(lambda self: self.about())

    @property
    def images(self) -> np.ndarray:
        """All bytes of each sample, uint8 (B, bytes)."""
        whole = [t.detach().contiguous().view(len(self), -1) for t in leaves((self.inputs, self.targets))]
        rows = [t.view(torch.uint8).numpy() for t in whole]
        return np.concatenate(rows, axis=1)

    all_arrays = property(lambda self: [self.images])
    scale = shift = np.empty(0, np.float32)
    normalised = True


class Sharded(Samples):
    """A batch of odyssey.torch.DataLoader, of which this rank has its own shards: ranks compare its length alone."""

    def __init__(self, batch: Any, name: str) -> None:
        self.batch, self.name, self._length = batch, name, batch.samples

    def shard(self, lo: int, hi: int) -> tuple[Any, Any]:
        """Samples lo to hi - 1, which are a shard; ConfigError if they are none of the loader's."""
        size = self.batch.shard_size
        if lo % size or hi - lo != min(size, len(self) - lo):
            raise ConfigError(f"[torch] the loader's shard_size is {size}, the trainer's {hi - lo}; give both the same")
        return self.batch.shards[lo // size]

    def about(self) -> tuple[Any, ...]:
        """Nothing is known of all samples."""
        return ()

    images = property(lambda self: np.zeros((len(self), 1), np.uint8))


def batches(loader: Any, epoch: int, seed: int, steps: int) -> Iterator[Batch]:
    """The batches of an epoch of any loader; those of pairs of tensors or arrays become batches of their own.

    torch's generator is seeded by the epoch first, so that a loader that shuffles with it gives all ranks the same
    order, and gives it again when a training goes on within the epoch.

    Args:
        steps: batches that make one step; those of tensors cannot be joined.
    """
    if not isinstance(loader, Iterable) or isinstance(loader, (tuple, torch.Tensor)):
        raise ConfigError(
            f"[train] {type(loader).__name__} is no loader; give odyssey.torch.DataLoader or torch's, or a list of "
            "(x, y) batches"
        )
    generator.manual_seed(seed_of(seed, ORDER, epoch))
    for told in () if hasattr(loader, "start_at") else (loader, getattr(loader, "sampler", None)):
        if hasattr(told, "set_epoch"):
            told.set_epoch(epoch)
    for index, item in enumerate(loader):
        if isinstance(item, Batch):
            yield item
            continue
        if hasattr(item, "shards"):
            own: Any = Sharded(item, f"batch {index} of epoch {epoch}")
            yield Batch(own, np.arange(len(own)), epoch, index)
            continue
        try:
            x, y = item
        except (TypeError, ValueError):
            raise ConfigError(
                f"[train] the loader gave a {type(item).__name__}; give batches of (x, y), samples and targets"
            ) from None
        if steps > 1:
            raise ConfigError(
                f"[torch] accumulation_steps is {steps}, and batches of tensors are not joined; use a larger batch"
            )
        data: Any = Samples(x, y, f"batch {index} of epoch {epoch}")
        yield Batch(data, np.arange(len(data)), epoch, index)


def part(batch: Batch, lo: int, hi: int) -> tuple[Any, Any]:
    """Samples lo to hi - 1 of a batch as tensors; class numbers as int64."""
    if isinstance(batch.dataset, Sharded):
        return batch.dataset.shard(lo, hi)
    x, y = batch.dataset.gather(batch.indices[lo:hi])
    if isinstance(batch.dataset, ArrayDataset) and isinstance(y, np.ndarray) and y.dtype == np.int32:
        y = y.astype(np.int64)
    return over(tensor, x), over(tensor, y)
