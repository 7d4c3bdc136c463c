"""Seeds for workers that a loader of torch keeps from epoch to epoch (persistent_workers=True).

torch seeds a worker when it starts. New workers of each epoch draw what they would draw after a
resume, because each epoch starts with a seed. Kept workers would draw other numbers after a resume.
So they are seeded at each epoch as torch would seed new ones, or they are replaced by new ones.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data

from .generators import KINDS

_DEPTH = 4  # objects inside one another that are searched for generators


class _WorkerSeed:
    """The seed of an epoch's workers. A worker that receives it seeds its generators."""

    def __init__(self, base_seed: int) -> None:
        self.base_seed = base_seed

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return _seed_worker, (self.base_seed,)


def _seed_worker(base_seed: int) -> int:
    """Seeds the generators of this worker as torch does when it starts one. Returns `base_seed`."""
    from torch.utils.data._utils.worker import _generate_state

    worker = torch.utils.data.get_worker_info()
    if worker is None:
        return base_seed
    seed = base_seed + worker.id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(_generate_state(base_seed, worker.id))
    with contextlib.suppress(AttributeError):
        object.__setattr__(worker, "seed", seed)
    return base_seed


def keeps_workers(loader: Any) -> bool:
    """Returns whether a loader of torch keeps its workers from epoch to epoch."""
    return (
        isinstance(loader, torch.utils.data.DataLoader)
        and loader.num_workers > 0
        and loader.persistent_workers
    )


def seed_kept_workers(loader: Any) -> None:
    """Seeds the workers that a loader has kept from the last epoch; call it before each epoch.

    The loader starts new workers instead, if seeds would not repeat what the data set returns.
    """
    iterator = getattr(loader, "_iterator", None)
    if not keeps_workers(loader) or type(iterator) is not _KEPT:
        return
    if _must_start_new(loader):
        loader._iterator = None
        return
    # as torch does for new workers, so the sampler draws the same numbers after it
    seed = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    # torch sends it to each worker with the message that an epoch starts
    iterator._shared_seed = _WorkerSeed(int(seed))


_KEPT = getattr(torch.utils.data.dataloader, "_MultiProcessingDataLoaderIter", None)


def _must_start_new(loader: Any) -> bool:
    """Returns whether only new workers repeat what a data set returns.

    These are loaders with a worker_init_fn, which may seed as well, streams, which have a position
    in each worker, and data sets that hold generators.
    """
    return (
        loader.worker_init_fn is not None
        or isinstance(loader.dataset, torch.utils.data.IterableDataset)
        or not hasattr(loader._iterator, "_shared_seed")
        or any(generators_in(loader.dataset))
        or any(generators_in(loader.collate_fn))
    )


def generators_in(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yields the random number generators that an object holds, at most `depth` objects deep."""
    if isinstance(value, KINDS):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for item in value[:100]:
            yield from generators_in(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in list(value.values())[:100]:
            yield from generators_in(item, depth - 1)
    elif depth and not isinstance(value, (type, torch.Tensor, np.ndarray)):
        attributes = getattr(value, "__dict__", {})
        for item in list(attributes.values()):
            yield from generators_in(item, depth - 1)
