"""The order of the samples: permutations that depend on (n, seed, epoch) only, and their split
over workers.

Every worker computes the same one for itself, so it must not depend on a library's random generator
or its version.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sized

import numpy as np

from odyssey.errors import ConfigError, check_integer

_MASK = (1 << 64) - 1
# SplitMix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """The order of epoch `epoch`: a pure function of its three arguments, the same on every
    machine and version.

    n: number of samples, at least 0. seed, epoch: integers from 0 to 2**64 - 1. Returns an int64
    array (n,) that holds 0..n-1 once each: the argsort of a SplitMix64 stream, a word a sample.
    Raises ConfigError if an argument is not an integer in its range.
    """
    n = check_integer("n", n, 0)
    seed = check_integer("seed", seed, 0, _MASK)
    epoch = check_integer("epoch", epoch, 0, _MASK)
    # The second mix keeps epoch e + 1 from being the stream of epoch e moved by one place.
    start = _mix(_mix(seed + _GAMMA) + (epoch + 1) * _GAMMA)
    # No two keys are equal, so every correct sort gives the same order. The default one is faster
    # than a stable one.
    return np.argsort(_stream(start, np.arange(n))).astype(np.int64, copy=False)


class DistributedSampler:
    """One worker's share of a shuffled data set, in the manner of PyTorch's class of that name.

    Worker r of R takes the positions r, r + R, r + 2R, ... of the epoch's permutation, so the
    shares are disjoint and together hold every sample exactly once; their lengths may differ by
    one. Iterating does not change the epoch: call `set_epoch`, or give the sampler to a
    `DataLoader`, which does.

    dataset, or dataset_size: anything with a length, or the number of samples itself. num_replicas,
    rank: number of workers and this worker's number (0..num_replicas-1); if None, those of the
    process
        group (odyssey.distributed) or of `odyssey.comm`.
    shuffle: False keeps the order 0..n-1. seed: 0 to 2**64 - 1, the same on all workers. drop_last:
    leave out the tail, so that all shares have the length n // R. pad: repeat samples from the
    start, so that all shares have the length ceil(n / R), as PyTorch does. Raises ConfigError for a
    size below 1, a rank or seed out of range, or drop_last together with pad.
    """

    def __repr__(self) -> str:
        return f"DistributedSampler(rank {self.rank} of {self.num_replicas}, {len(self)} samples)"

    def __init__(
        self,
        dataset: Sized | int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        dataset_size: int | None = None,
        pad: bool = False,
    ) -> None:
        self.dataset_size = _size_of(dataset, dataset_size)
        if num_replicas is None or rank is None:
            world_size, world_rank = _world()
            num_replicas = world_size if num_replicas is None else num_replicas
            rank = world_rank if rank is None else rank
        self.num_replicas = check_integer("num_replicas", num_replicas, 1)
        self.rank = check_integer("rank", rank, 0, self.num_replicas - 1)
        self.shuffle = bool(shuffle)
        self.seed = check_integer("seed", seed, 0, _MASK)
        if drop_last and pad:
            raise ConfigError(
                "DistributedSampler: drop_last and pad are both True; at most one may be; unset one"
            )
        self.drop_last = bool(drop_last)
        self.pad = bool(pad)
        self.epoch = 0
        self.epoch_was_set = False

    def set_epoch(self, epoch: int) -> None:
        """Use the permutation of `epoch` (0 to 2**64 - 1) from the next iteration on;
        ConfigError if out of range.
        """
        self.epoch = check_integer("epoch", epoch, 0, _MASK)
        # Lets a DataLoader tell an epoch that the caller chose from one that it advanced itself.
        self.epoch_was_set = True

    def indices(self) -> np.ndarray:
        """This worker's indices in the current epoch: int64 array (len(self),)."""
        if self.shuffle:
            order = permutation(self.dataset_size, self.seed, self.epoch)
        else:
            order = np.arange(self.dataset_size, dtype=np.int64)
        if self.drop_last:
            order = order[: self.dataset_size // self.num_replicas * self.num_replicas]
        if self.pad:
            order = np.resize(order, -(-self.dataset_size // self.num_replicas) * self.num_replicas)
        return np.ascontiguousarray(order[self.rank :: self.num_replicas])

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def __len__(self) -> int:
        share, remainder = divmod(self.dataset_size, self.num_replicas)
        return (
            share
            if self.drop_last
            else share + (remainder > 0 if self.pad else self.rank < remainder)
        )


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's mixing of each of the uint64, in place: a bijection."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    return values


def _mix(value: int) -> int:
    return int(_mixed(np.array([value & _MASK], np.uint64))[0])


def _stream(start: int, numbers: np.ndarray) -> np.ndarray:
    """Outputs (uint64) of SplitMix64 seeded with `start`, by their numbers from 0: distinct ones
    for distinct.
    """
    return _mixed((numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA) + np.uint64(start))


def mixed_words(seed: int, epoch: int, which: int, numbers: np.ndarray) -> np.ndarray:
    """Random words, uint64 (B,), each a function of the three integers and its sample's number,
    int64 (B,).
    """
    start = _mix(_mix(_mix(seed + _GAMMA) + (epoch + 1) * _GAMMA) + (which + 1) * _GAMMA)
    return _mixed(_stream(start, numbers))  # mixed twice: neighbours share nothing then


def _size_of(dataset: Sized | int | None, dataset_size: int | None) -> int:
    if (dataset is None) == (dataset_size is None):
        raise ConfigError(
            "DistributedSampler: give either a data set or dataset_size, and not both"
        )
    size = dataset_size if dataset is None else dataset
    return check_integer("dataset_size", len(size) if hasattr(size, "__len__") else size, 1)


def _world() -> tuple[int, int]:
    """(number of workers, this worker) of the initialized process group, else of `odyssey.comm`."""
    distributed = sys.modules.get("odyssey.distributed")
    if distributed is not None and distributed.is_initialized():
        return distributed.get_world_size(), distributed.get_rank()
    from odyssey.comm import world

    return world().size, world().rank
