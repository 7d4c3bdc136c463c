"""Global batches for torch: `DataLoader`, of which each rank reads its own fixed shards, and
what any loader gives.

The order is that of odyssey's own loaders. Random transforms (torchvision's v2 among them) draw the
same for a sample on whatever rank and worker (seeded.py). Each shard is collated alone: padding
does not depend on the ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.data

from .. import comm as communication
from .. import data as own
from ..comm import Communicator
from ..data import ArrayDataset, Batch, Part, Pieces, leaves, mapped
from ..errors import ConfigError, DataError, check_integer
from ..parallel import plan
from ..train import check_batches, check_sampler
from .seeded import Seeded, TensorRows
from .shards import Share, generator, seed_of

ORDER = 1 << 62  # apart from the numbers of steps, where loaders' seeds are made
_NONE = np.empty(0, np.float32)


def tree_of(value: Any) -> Any:
    """Returns what a collate function makes as a tree (data/nested.py): lists as tuples, any
    mappings as dicts.
    """
    if isinstance(value, Mapping):
        return {name: tree_of(part) for name, part in value.items()}
    return tuple(map(tree_of, value)) if isinstance(value, (tuple, list)) else value


def _array(leaf: Any) -> np.ndarray:
    """The memory of a tensor, or of what becomes one; bfloat16, which NumPy has not, as float32."""
    tensor = leaf.detach() if isinstance(leaf, torch.Tensor) else torch.from_numpy(np.array(leaf))
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


class Samples(ArrayDataset):
    """The samples of one batch of tensors, of any dtype that NumPy has."""

    normalised = False

    def __init__(self, inputs: Any, targets: Any, name: str) -> None:
        try:
            x, y = (mapped(_array, tree_of(tree)) for tree in (inputs, targets))
        except TypeError as problem:
            raise DataError(
                f"{name}: {problem}; tensors or arrays, or tuples or dicts of them, are allowed"
            ) from None
        counts = [len(a) if a.ndim else 0 for a in (*leaves(x), *leaves(y))]
        if not counts or counts[0] < 1 or len(set(counts)) > 1:
            raise DataError(
                f"{name}: its tensors have {counts} samples; the same number, at least one, is "
                "needed"
            )
        super().__init__(x, y, 0, _NONE, _NONE, name)

    def __post_init__(self) -> None:
        """Skips the checks of an ArrayDataset, which need not hold for what PyTorch is given."""

    def gather(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Inputs and targets at `indices` (B,), which follow each other; not copies."""
        lo = int(indices[0])
        hi = int(indices[-1]) + 1
        return tuple(mapped(lambda a: a[lo:hi], tree) for tree in (self.images, self.labels))  # type: ignore[return-value]


class Shared(Samples):
    """The samples of a global batch of which this rank has its shards: ranks compare its length
    alone. shard_size: samples per shard, the last may have fewer. shards: by number, as the
    collate function made them.
    """

    def __init__(self, samples: int, shard_size: int, shards: dict[int, Any], name: str) -> None:
        ArrayDataset.__init__(self, np.zeros((samples, 1), np.uint8), (), 0, _NONE, _NONE, name)
        self.__dict__.update(shard_size=shard_size, shards=shards)

    def shard(self, lo: int, hi: int) -> Any:
        """Samples lo to hi - 1, which are a shard; ConfigError if they are none of the loader's."""
        size = self.shard_size
        if lo % size or hi - lo != min(size, len(self) - lo):
            raise _other_size(size, hi - lo)
        return self.shards[lo // size]

    def gather(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Refused: other ranks have the other samples."""
        raise ConfigError(
            "[torch] this is a global batch, shared out over ranks: `for x, y in net.shards(batch)`"
        )


def _other_size(loaders: int, trainers: int) -> ConfigError:
    return ConfigError(
        f"[torch] the loader's shard_size is {loaders}, the trainer's {trainers}; give both the "
        "same, or only one"
    )


class _Order:
    """Sampler of what torch's loader reads next, shard by shard: the (epoch, index) of each
    sample.
    """

    next_shards: Iterator[list[tuple[int, int]]] = iter(())

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.next_shards


class DataLoader(own.DataLoader):
    """Global batches of a map-style data set, the same on any number of ranks; a rank reads its
    shards alone.

    Args:
        dataset: with `len` and `[index]`.
        batch_size: samples of a global batch, over all ranks.
        shuffle: a new order each epoch; False keeps 0, 1, ...
        seed: of the order and of the samples' generators.
        shard_size: samples per shard; None: that of the trainer it is given to, else the default of
            a `DistributedTrainer` for this batch size.
        drop_last: leave out a last batch that is smaller.
        num_workers: processes of this rank that read; 0 reads in the loop.
        collate_fn, options: as torch.utils.data.DataLoader has them (pin_memory, timeout,
        prefetch_factor, ...).

    Raises ConfigError: an argument is out of range, or belongs to the ranks' sharing (sampler,
    batch_sampler).
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        *,
        shard_size: int | None = None,
        drop_last: bool = False,
        comm: Communicator | None = None,
        **options: Any,
    ) -> None:
        for name in ("sampler", "batch_sampler"):
            if options.get(name) is not None:
                raise ConfigError(
                    f"[torch] DataLoader({name}=...): the loader shares batches out; leave it out"
                )
        super().__init__(dataset, batch_size, shuffle, seed=seed, drop_last=drop_last, prefetch=0)
        default = plan.default_shard_size(self.batch_size)
        self.fixed_size = shard_size is not None
        self.shard_size = check_integer(
            "shard_size", default if shard_size is None else shard_size, 1
        )
        self.comm = communication.world() if comm is None else comm
        self._read = _Order()
        self._table = TensorRows(dataset) if TensorRows.fit(dataset, options) else None
        # With a generator of its own: its base seed would be drawn from the global one, at every
        # epoch.
        options = {"generator": torch.Generator(), **options}
        samples: Any = Seeded(dataset, self.seed)
        self._loader = torch.utils.data.DataLoader(samples, batch_sampler=self._read, **options)  # type: ignore[arg-type]

    def follow(self, shard_size: int) -> None:
        """Takes the shard size of a trainer.

        Raises ConfigError: this loader was given another one.
        """
        if self.fixed_size and shard_size != self.shard_size:
            raise _other_size(self.shard_size, shard_size)
        self.shard_size = shard_size

    def _local_shards(self, part: Part | None, samples: int) -> range:
        """The shards of a batch that this rank reads."""
        if isinstance(part, Share):
            return part.shards.local_shards(samples, part.train)
        return range(
            *plan.share(plan.shard_count(samples, self.shard_size), self.comm.size, self.comm.rank)
        )

    def _batches(
        self, cut: Pieces, epoch: int, part: Part | None, stopped: Callable[[], bool]
    ) -> Iterator[Batch]:
        """Batches with this rank's shards; torch reads those of an epoch in one go, so that its
        workers are ahead.
        """
        if isinstance(part, Share) and part.shards.shard_size is not None:
            self.follow(part.shards.shard_size)
        pieces = list(cut)
        size = self.shard_size
        runs = [self._local_shards(part, len(n)) for _, n in pieces]
        shards = (
            n[s * size : (s + 1) * size]
            for (_, n), run in zip(pieces, runs, strict=True)
            for s in run
        )
        self._read.next_shards = ([(epoch, k) for k in numbers.tolist()] for numbers in shards)
        read: Iterator[Any] = (
            iter(self._loader) if self._table is None else map(self._table, self._read.next_shards)
        )
        for (index, numbers), run in zip(pieces, runs, strict=True):
            n = len(numbers)
            data = Shared(n, size, {s: next(read) for s in run}, f"batch {index} of epoch {epoch}")
            yield Batch(data, np.arange(n), epoch, index, numbers)


def batches(
    loader: Any, epoch: int, seed: int, steps: int, targets: bool = True
) -> Iterator[Batch]:
    """The batches of an epoch of any loader; those of pairs of tensors or arrays become batches
    of their own. torch's generator is seeded by the epoch first, so that a loader that
    shuffles with it gives all ranks the same order, and gives it again when a training goes
    on within the epoch. steps: batches that make one step; those of tensors cannot be joined.
    targets: whether they are needed; without, batches may be inputs alone.
    """
    check_batches(loader)
    check_sampler(loader)
    generator.manual_seed(seed_of(seed, ORDER, epoch))
    for source in () if hasattr(loader, "start_at") else (loader, getattr(loader, "sampler", None)):
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
    for index, item in enumerate(_look_ahead(loader)):
        if isinstance(item, Batch):
            yield item
            continue
        data = Samples(*_split_batch(item, targets), f"batch {index} of epoch {epoch}")
        if steps > 1:
            raise ConfigError(
                f"[torch] accumulation_steps is {steps}, and batches of tensors are not joined; "
                "use a larger batch"
            )
        yield Batch(data, np.arange(len(data)), epoch, index)


def _look_ahead(loader: Any) -> Iterator[Any]:
    """Iterates over a loader; before the last item is given the loader has come to its end,
    where samplers such as RandomSampler draw once more: a checkpoint of that step holds the
    generators that the next epoch begins with.
    """
    items = iter(loader)
    last = 0
    with contextlib.suppress(TypeError, NotImplementedError):  # a stream has no length
        last = len(loader)
    for number in itertools.count(1):
        try:
            item = next(items)
        except StopIteration:
            return
        ahead = [next(items, items)] if number == last else []  # `items`: the end
        yield item
        yield from (following for following in ahead if following is not items)


def _split_batch(item: Any, targets: bool) -> tuple[Any, Any]:
    """Inputs and targets of a batch (x, y).

    Of a dict, which holds both, all are inputs and the targets are (); where targets are not
    needed, so are (x,) and x.
    """
    if isinstance(item, Mapping):
        return item, ()
    is_sequence = isinstance(item, (tuple, list))
    if not targets:
        return (item[0] if is_sequence and len(item) in (1, 2) else item), ()
    if not is_sequence or len(item) != 2:
        kind = f"{type(item).__name__} of {len(item)}" if is_sequence else type(item).__name__
        raise ConfigError(
            f"[train] the loader gave a {kind}; give batches of (x, y) or dicts for module(**batch)"
        )
    return item[0], item[1]


def part(batch: Batch, lo: int, hi: int, targets: bool = True) -> tuple[Any, Any]:
    """Samples lo to hi - 1 of a batch as tensors; of our own data sets, integer targets as int64.

    Copies: a forward pass may write into its inputs, and products of matrices that do not begin on
    a cache line may have other last bits.
    """

    def copy(leaf: Any) -> Any:
        tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf
        return tensor.clone() if isinstance(tensor, torch.Tensor) else tensor

    if isinstance(batch.dataset, Shared):
        return mapped(copy, tree_of(_split_batch(batch.dataset.shard(lo, hi), targets)))
    x, y = batch.dataset.gather(batch.indices[lo:hi])
    if not isinstance(batch.dataset, Samples):
        y = mapped(lambda a: a.astype(np.int64) if a.dtype == np.int32 else a, y)
    return mapped(copy, (x, y))
