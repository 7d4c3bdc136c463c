"""`DataLoader`: global batches of a torch data set, of which each rank reads its own fixed shards.

The order is that of odyssey's own loaders: a permutation of (samples, seed, epoch). A sample is made with torch's,
NumPy's and Python's generators seeded by (seed, epoch, index), so that random transforms (torchvision's v2 among them)
draw the same for it on whatever rank and worker. Each shard is collated alone: padding does not depend on the ranks.
What it is not: a DistributedSampler; `shards` of ddp.py takes what it yields.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data

from .. import comm as communication
from ..comm import Communicator
from ..data.sampler import check_integer, permutation
from ..errors import ConfigError
from ..parallel import plan
from .shards import seed_of


@dataclasses.dataclass(frozen=True)
class ShardedBatch:
    """A global batch of which this rank has its shards.

    samples: of the global batch. shard_size: samples per shard, the last may have fewer. shards: by number, this
    rank's, as the loader's collate function made them.
    """

    samples: int
    shard_size: int
    shards: dict[int, Any]

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[Any]:
        raise ConfigError("[torch] this is a global batch, shared out over ranks: `for x, y in net.shards(batch)`")


class _Seeded(torch.utils.data.Dataset):
    """A data set by (epoch, index), with the generators seeded for each sample and put back afterwards."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        before = torch.get_rng_state(), np.random.get_state(), random.getstate()
        number = seed_of(self.seed, epoch, index)
        torch.default_generator.manual_seed(number)
        np.random.seed(number & 0xFFFFFFFF)
        random.seed(number)
        try:
            return self.dataset[index]
        finally:
            torch.set_rng_state(before[0])
            np.random.set_state(before[1])
            random.setstate(before[2])


class DataLoader:
    """Global batches of a map-style data set, the same on any number of ranks; a rank reads its shards alone.

    Args:
        dataset: with `len` and `[index]`.
        batch_size: samples of a global batch, over all ranks.
        shuffle: a new order each epoch; False keeps 0, 1, ...
        seed: of the order and of the samples' generators, 0 to 2**63 - 1.
        shard_size: samples per shard; None: that of a `DistributedTrainer` for this batch size.
        drop_last: leave out a last batch that is smaller.
        num_workers: processes of this rank that read; 0 reads in the loop.
        collate_fn, options: as torch.utils.data.DataLoader has them (pin_memory, timeout, prefetch_factor, ...).

    Raises:
        ConfigError: an argument is out of range, or belongs to the ranks' sharing (sampler, batch_sampler).
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
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        comm: Communicator | None = None,
        **options: Any,
    ) -> None:
        for name in ("sampler", "batch_sampler"):
            if options.get(name) is not None:
                raise ConfigError(
                    f"[torch] DataLoader({name}=...): the loader shares batches out by itself; leave it out"
                )
        if isinstance(dataset, torch.utils.data.IterableDataset):
            raise ConfigError("[torch] DataLoader of an IterableDataset; give one with len() and [index]")
        self.dataset, self.shuffle, self.drop_last = dataset, bool(shuffle), bool(drop_last)
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.seed = check_integer("seed", seed, 0, 2**63 - 1)
        default = plan.default_shard_size(self.batch_size)
        self.shard_size = check_integer("shard_size", default if shard_size is None else shard_size, 1)
        self.comm = communication.world() if comm is None else comm
        self.epoch = -1
        self._next: int | None = None
        self._shards = _Shards(self)
        self._loader = torch.utils.data.DataLoader(
            _Seeded(dataset, self.seed),
            batch_sampler=self._shards,
            num_workers=num_workers,
            collate_fn=collate_fn,
            generator=torch.Generator(),  # or its base seed would be drawn from the global one, at every epoch
            **options,
        )

    def __len__(self) -> int:
        """Global batches of an epoch."""
        n = len(self.dataset)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """The order of `epoch` from the next iteration on; without it each iteration is the next epoch, from 0."""
        self._next = check_integer("epoch", epoch, 0)

    def batches(self) -> Iterator[tuple[int, list[int]]]:
        """(samples, this rank's shards by number) of each global batch."""
        for i in range(len(self)):
            samples = min(self.batch_size, len(self.dataset) - i * self.batch_size)
            shards = plan.shard_count(samples, self.shard_size)
            yield samples, list(range(*plan.share(shards, self.comm.size, self.comm.rank)))

    def __iter__(self) -> Iterator[ShardedBatch]:
        self.epoch = self.epoch + 1 if self._next is None else self._next
        self._next = None
        read = iter(self._loader)
        for samples, own in self.batches():
            yield ShardedBatch(samples, self.shard_size, {s: next(read) for s in own})


class _Shards:
    """What torch's loader reads: the (epoch, index) of each sample, shard by shard."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        it = self.loader
        n = len(it.dataset)
        order = permutation(n, it.seed, it.epoch) if it.shuffle else np.arange(n)
        for i, (samples, own) in enumerate(it.batches()):
            for s in own:
                lo = i * it.batch_size + s * it.shard_size
                hi = min(lo + it.shard_size, i * it.batch_size + samples)
                yield [(it.epoch, int(k)) for k in order[lo:hi]]

    def __len__(self) -> int:
        return sum(len(own) for _, own in self.loader.batches())
