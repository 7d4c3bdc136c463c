"""The order of the samples: permutations, and their split over workers.

A permutation depends only on (n, seed, epoch). Each worker computes it separately, so it must not
depend on the random generator of a library or on its version.
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
# Words that are computed at once: they stay in the first cache.
_PIECE = 1 << 14


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of the samples in an epoch.

    It is a pure function of its arguments, the same on every machine and version: the argsort of a
    SplitMix64 stream with a word for each sample.

    Args:
        n: the number of samples, at least 0.
        seed: 0 to 2**64 - 1.
        epoch: 0 to 2**64 - 1.

    Returns:
        An int64 array (n,) that holds each of 0..n-1 once.

    Raises:
        ConfigError: an argument is not an integer in its range.
    """
    n = check_integer("n", n, 0)
    seed = check_integer("seed", seed, 0, _MASK)
    epoch = check_integer("epoch", epoch, 0, _MASK)
    # Without the second mix, the stream of epoch e + 1 would be the one of epoch e, shifted by one.
    start = _mix_word(_mix_word(seed + _GAMMA) + (epoch + 1) * _GAMMA)
    # No two keys are equal, and a key's number can be computed from it. So the keys are sorted in
    # place and become numbers. An argsort takes four times as long for 10 million samples, as it
    # reads keys all over the memory.
    keys = np.arange(n, dtype=np.uint64)
    for first in range(0, n, _PIECE):
        piece = keys[first : first + _PIECE]
        piece[:] = _stream(start, piece)
    keys.sort()
    for first in range(0, n, _PIECE):
        _unstream(start, keys[first : first + _PIECE])
    return keys.view(np.int64)


class DistributedSampler:
    """The share of one worker in a shuffled data set, like PyTorch's class of the same name.

    Worker r of R gets the positions r, r + R, r + 2R, ... of the epoch's permutation. So the shares
    are disjoint, and together hold every sample exactly once. Their lengths may differ by one.
    Iterating does not change the epoch: call `set_epoch`, or pass the sampler to a `DataLoader`,
    which calls it.

    Args:
        dataset: an object with a length, or the number of samples.
        num_replicas: the number R of workers. None is the size of the process group
            (odyssey.distributed), or of `odyssey.comm`.
        rank: the number r of this worker, 0..num_replicas-1. None is its rank there.
        shuffle: False keeps the order 0..n-1.
        seed: 0 to 2**64 - 1, the same on all workers.
        drop_last: skip the tail, so that all shares have the length n // R.
        dataset_size: the number of samples, instead of `dataset`.
        pad: repeat samples from the start, so that all shares have the length ceil(n / R), as in
            PyTorch.

    Raises:
        ConfigError: a size below 1, a rank or seed out of range, or drop_last together with pad.
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
        self.dataset_size = _count_samples(dataset, dataset_size)
        if num_replicas is None or rank is None:
            world_size, world_rank = _find_world()
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
        """Uses the permutation of `epoch` (0 to 2**64 - 1) from the next iteration on.

        Raises ConfigError if it is out of range.
        """
        self.epoch = check_integer("epoch", epoch, 0, _MASK)
        # A DataLoader continues from an epoch that the caller set. It clears this flag after its
        # own calls.
        self.epoch_was_set = True

    def indices(self) -> np.ndarray:
        """Returns the indices of this worker in the current epoch, int64 (len(self),)."""
        if self.shuffle:
            order = permutation(self.dataset_size, self.seed, self.epoch)
        else:
            order = np.arange(self.dataset_size, dtype=np.int64)
        if self.drop_last:
            share = self.dataset_size // self.num_replicas
            order = order[: share * self.num_replicas]
        if self.pad:
            share = -(-self.dataset_size // self.num_replicas)  # rounded up
            order = np.resize(order, share * self.num_replicas)  # repeats from the start
        return np.ascontiguousarray(order[self.rank :: self.num_replicas])

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def __len__(self) -> int:
        share, remainder = divmod(self.dataset_size, self.num_replicas)
        if self.drop_last:
            return share
        has_one_more = remainder > 0 if self.pad else self.rank < remainder
        return share + has_one_more


def _mix_words(values: np.ndarray) -> np.ndarray:
    """Mixes the bits of each uint64 in place, as SplitMix64 does. It is a bijection."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    return values


def _mix_word(value: int) -> int:
    """Mixes the lowest 64 bits of an integer. See `_mix_words`."""
    return int(_mix_words(np.array([value & _MASK], np.uint64))[0])


def _stream(start: int, numbers: np.ndarray) -> np.ndarray:
    """Returns outputs (uint64) of SplitMix64 with the seed `start`, by their numbers from 0.

    Different numbers have different outputs.
    """
    return _mix_words(
        (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA) + np.uint64(start)
    )


def _unstream(start: int, outputs: np.ndarray) -> None:
    """Replaces outputs of `_stream` (uint64) by their numbers, in place."""
    for shift, factor in ((31, 1), (27, _MIX_2), (30, _MIX_1)):
        outputs *= np.uint64(pow(factor, -1, _MASK + 1))
        # Undoes `values ^= values >> shift`.
        outputs ^= outputs >> np.uint64(shift)
        outputs ^= outputs >> np.uint64(2 * shift)
    outputs -= np.uint64(start)
    outputs *= np.uint64(pow(_GAMMA, -1, _MASK + 1))
    outputs -= np.uint64(1)


def mixed_words(seed: int, epoch: int, stream: int, numbers: np.ndarray) -> np.ndarray:
    """Returns a random word for each sample, uint64 (B,).

    A word is a function of the three integers and of the number of its sample, int64 (B,).
    """
    epoch_start = _mix_word(_mix_word(seed + _GAMMA) + (epoch + 1) * _GAMMA)
    start = _mix_word(epoch_start + (stream + 1) * _GAMMA)
    # The second mix makes the words of neighbouring samples and streams independent.
    return _mix_words(_stream(start, numbers))


def _count_samples(dataset: Sized | int | None, dataset_size: int | None) -> int:
    """Returns the number of samples. Raises ConfigError unless exactly one argument has it."""
    if (dataset is None) == (dataset_size is None):
        raise ConfigError(
            "DistributedSampler: give either a data set or dataset_size, and not both"
        )
    size = dataset_size if dataset is None else dataset
    return check_integer("dataset_size", len(size) if hasattr(size, "__len__") else size, 1)


def _find_world() -> tuple[int, int]:
    """Returns the number of workers and the number of this one.

    They are those of the process group if it is initialized, else those of `odyssey.comm`.
    """
    distributed = sys.modules.get("odyssey.distributed")
    if distributed is not None and distributed.is_initialized():
        return distributed.get_world_size(), distributed.get_rank()
    from odyssey.comm import world

    return world().size, world().rank
