"""Samples of a data set, and batches of a collate function, that may draw random numbers.

What a sample draws depends on (seed, epoch, index). What a collate function draws for a shard
depends on (seed, epoch, index of the shard's first sample). So it does not depend on which rank or
worker reads the shard.

data/sample_scopes.py says how generators are seeded. This is not for generators that a data set
holds (generators.py has those of a loader, and train/first_samples.py refuses the others).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.data

from ..core import random_scopes
from ..data import SampleScopes
from ..errors import DataError
from .worker_seeds import generators_in

Key = tuple[int, int]  # of a sample: epoch, index
COLLATE = 1 << 60  # seeds a collate function, in addition to epoch and index
GENERATOR_OF_WORKER = (
    "[data] worker_init_fn gives the data set a random number generator of each worker, so a "
    "sample would depend on the worker that reads it; draw from the global generators of torch, "
    "numpy or random in the data set instead, which odyssey seeds for each sample"
)


class SamplesOfShard(list):  # type: ignore[type-arg]
    """The samples of a shard.

    key: of the first of them.
    """

    key: Key = (0, 0)


class Seeded(torch.utils.data.Dataset):
    """A data set by (epoch, index), a shard at a time. Afterwards generators are as before."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.scopes = SampleScopes(seed)

    def __getitems__(self, wanted: Sequence[Key]) -> list[Any]:
        """Returns the samples of one shard."""

        def read_all(begin: Callable[[int], None]) -> list[Any]:
            samples = []
            for position, (_, index) in enumerate(wanted):
                begin(position)
                samples.append(self.dataset[index])
            return samples

        samples = SamplesOfShard(self.scopes.read(wanted, read_all))
        if wanted:
            samples.key = wanted[0]
        return samples


class WorkerStart:
    """Starts a worker process of a `Seeded` data set: get_worker_info() has the user's data set.

    Args:
        function: the worker_init_fn of the user, or None.

    Raises:
        DataError: The function gives the data set a generator. Samples would depend on the worker.
    """

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self.function = function

    def __call__(self, number: int) -> None:
        worker: Any = torch.utils.data.get_worker_info()
        dataset = worker.dataset.dataset
        object.__setattr__(worker, "dataset", dataset)  # torch lets nobody set it
        if self.function is None:
            return
        known = list(generators_in(dataset))
        self.function(number)
        if not all(any(one is other for other in known) for one in generators_in(dataset)):
            raise DataError(GENERATOR_OF_WORKER)


class SeededCollate:
    """A collate function that may draw random numbers, for the shards of a `Seeded` data set.

    For example, MixUp draws the weights of two samples for each shard.
    """

    def __init__(self, function: Callable[[list[Any]], Any], seed: int) -> None:
        self.function = function
        self.seed = seed

    def __call__(self, samples: SamplesOfShard) -> Any:
        """Returns what the function makes of the samples. Afterwards generators are as before."""
        with random_scopes.restored():
            random_scopes.seed_all(random_scopes.seed_of(self.seed, COLLATE, *samples.key))
            return self.function(list(samples))


class TensorRows:
    """A TensorDataset, or subset of one: the rows of a shard at once, as torch would stack them
    one by one.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __call__(self, wanted: Sequence[Key]) -> list[torch.Tensor]:
        """The tensors of one shard."""
        dataset = self.dataset
        indices = [index for _, index in wanted]
        while isinstance(dataset, torch.utils.data.Subset):
            indices = [dataset.indices[i] for i in indices]
            dataset = dataset.dataset
        at = torch.tensor(indices)
        return [t.index_select(0, at) for t in dataset.tensors]

    @staticmethod
    def fit(dataset: Any, options: dict[str, Any]) -> bool:
        """Returns whether they are what torch's loader with these options would give."""
        while type(dataset) is torch.utils.data.Subset:
            dataset = dataset.dataset
        return type(dataset) is torch.utils.data.TensorDataset and not any(options.values())
