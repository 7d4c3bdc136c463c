"""Batches out of what a user gives: loaders, iterables of arrays, data sets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .. import data as datasets
from ..data.nested import leaves, mapped
from ..errors import ConfigError


def check_sampler(loader: Any) -> None:
    """ConfigError for a loader that gives each rank a part of the data."""
    if getattr(getattr(loader, "sampler", None), "num_replicas", 1) > 1:
        raise ConfigError(
            "[train] the loader's DistributedSampler gives each rank other samples, but the "
            "trainer shares every global batch out itself; leave the sampler out, and give "
            "shuffle=True and the batch_size of all ranks"
        )


def own_steps(loader: Any) -> bool:
    """Returns whether a loader can give each rank its samples of a step: a DataLoader with its
    own iteration.
    """
    return (
        isinstance(loader, datasets.DataLoader)
        and type(loader).__iter__ is datasets.DataLoader.__iter__
    )


def shares_samples(loader: Any) -> bool:
    """Returns whether batches of a loader hold only the samples of this rank."""
    return isinstance(loader, datasets.DataLoader) and loader.shares_samples


def check_batches(loader: Any, label: str = "data") -> None:
    """Raises ConfigError for what gives no batches."""
    arrays = isinstance(loader, tuple) or hasattr(loader, "__array__")
    if arrays or not isinstance(loader, Iterable):
        name = type(loader).__name__
        argument = "data.arrays(x, y)" if arrays else f"your {name}"
        advice = (
            f"; give data.DataLoader({argument}, batch_size=...)"
            if arrays or is_data_set(loader)
            else ""
        )
        raise ConfigError(
            f"[train] expected a data.DataLoader or list of (x, y) batches as {label}, got "
            f"{name}{advice}"
        )


def is_data_set(data: Any) -> bool:
    """Returns whether `data` has samples by their numbers, and is not to be iterated over for
    batches.
    """
    if hasattr(data, "__array__"):  # an array, or a tensor of PyTorch
        return False
    by_number = hasattr(data, "gather") or (
        hasattr(data, "__getitem__") and not isinstance(data, Iterable)
    )
    return by_number and hasattr(data, "__len__")


def batches_of(loader: Any) -> Iterable[datasets.Batch]:
    """The loader's batches; pairs of arrays become batches of their own."""
    check_batches(loader)
    for item in loader:
        if isinstance(item, datasets.Batch):
            yield item
        else:
            try:
                x, y = item
            except (TypeError, ValueError):
                raise ConfigError(
                    f"[train] the loader gave a {type(item).__name__}; give batches of (x, y), "
                    "samples and labels"
                ) from None
            # a copy: a loader may fill the same memory again
            data = datasets.arrays(mapped(np.array, x), y)
            yield datasets.Batch(data, np.arange(len(data)), 0, 0)


def batch_of(item: Any, kinds: tuple[type, ...] = (tuple, list)) -> Any:
    """Returns an item that train_step() got as the only one of a list of batches.

    kinds: types of items that are batches.

    Raises ConfigError: it is no batch.
    """
    if not isinstance(item, kinds) or (not isinstance(item, dict) and len(item) != 2):
        kind = f"a {type(item).__name__}"
        if isinstance(item, (tuple, list)):
            kind += f" of {len(item)}"
        raise ConfigError(
            "[train] train_step() expected a batch of a DataLoader, or a pair (inputs, targets), "
            f"got {kind}; use train_step((x, y)), or fit() for a loader"
        )
    return [item]


def joined(batches: Iterable[datasets.Batch], k: int) -> Iterable[datasets.Batch]:
    """Every k batches as one; the last may be of fewer.

    A step then divides once, by all their samples.
    """
    if k == 1:
        yield from batches
        return
    batches = iter(batches)
    while group := list(itertools.islice(batches, k)):
        data = group[0].dataset
        numbers = None
        if all(b.dataset is data for b in group):
            indices = np.concatenate([b.indices for b in group])
        else:
            data = type(data).joined(group)
            indices = np.arange(len(data))
            if all(b.numbers is not None for b in group):
                numbers = np.concatenate([b.numbers for b in group])
        yield datasets.Batch(data, indices, group[0].epoch, group[0].index // k, numbers)


def in_batches(data: Any) -> Any:
    """Returns what is evaluated: a data set gets a DataLoader, larger batches if it is in
    memory; a loader stays.
    """
    if not is_data_set(data):
        return data
    return datasets.DataLoader(
        data, batch_size=8192 if isinstance(data, datasets.ArrayDataset) else 1024
    )


def evaluated(
    loader: Any, part: Callable[[int], tuple[int, int]] | None
) -> Iterable[datasets.Batch]:
    """A loader's batches for evaluation; `part`: of which samples this rank needs so many."""
    return loader.steps(part=part) if own_steps(loader) else batches_of(loader)


def step_sizes(loader: Any, step: int, join: int, limit: int | None) -> set[int]:
    """Returns the numbers of samples of an epoch's steps, as far as they are known before it.

    They are known for loaders of batches of one size, and for lists of batches.

    Args:
        loader: of the training.
        step: samples of a step of a loader with a batch size.
        join: batches of the loader that make one step.
        limit: steps that will be taken; None: all of the epoch.
    """
    if isinstance(loader, Sequence):
        counts = [count_samples(item) for item in loader[: limit and limit * join]]
        sums = [counts[first : first + join] for first in range(0, len(counts), join)]
        return {sum(group) for group in sums if 0 not in group}
    last = last_step_samples(loader, step, limit)
    return {step, last} if last else {step} if step else set()


def last_step_samples(loader: Any, step: int, limit: int | None) -> int:
    """Returns the samples of an epoch's last step if it has fewer than the others; see step_sizes.

    It is 0 if the last step is like the others, isn't taken, or isn't known.
    """
    size = getattr(loader, "batch_size", None)
    sampler = getattr(loader, "sampler", None)
    try:
        samples = len(loader.dataset if sampler is None else sampler)
        batches = len(loader)
    except (AttributeError, TypeError):  # a stream, or no loader
        return 0
    if not size or not step:
        return 0
    full, last = divmod(batches * size if loader.drop_last else samples, step)
    return last if limit is None or limit > full else 0


def count_samples(item: Any) -> int:
    """Returns the number of samples of a batch in a list; 0 if it isn't known."""
    try:
        inputs = item if isinstance(item, (datasets.Batch, Mapping)) else item[0]
        return len(inputs if isinstance(inputs, datasets.Batch) else leaves(inputs)[0])
    except (TypeError, IndexError, KeyError):
        return 0


def cut(batches: Iterable[datasets.Batch], k: int) -> Iterator[datasets.Batch]:
    """Each batch in k pieces."""
    if k == 1:
        yield from batches
        return
    for b in batches:
        n = len(b.indices)
        for i in range(k):
            yield datasets.Batch(
                b.dataset, b.indices[n * i // k : n * (i + 1) // k], b.epoch, b.index * k + i
            )
