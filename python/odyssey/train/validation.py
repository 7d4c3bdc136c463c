"""The validation data of a fit(): their size, which ranks compare before the first step, and what
identifies them, which a resumed run compares with its checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..data.sources import fingerprint
from . import first_samples
from .batches import count_samples, in_batches

_UNKNOWN = (AttributeError, TypeError, NotImplementedError)  # what a stream without length raises
_DEEPEST = 8  # data sets inside one another that are looked into


def sizes_of(data: Any) -> tuple[int | None, int | None]:
    """Returns the numbers of samples and of batches; None if one isn't known.

    data: a loader, data set or list of batches.
    """
    loader = in_batches(data)
    samples = batches = None
    with contextlib.suppress(*_UNKNOWN):
        batches = len(loader)
    if isinstance(loader, Sequence):
        return sum(map(count_samples, loader)), batches
    sampler = getattr(loader, "sampler", None)
    with contextlib.suppress(*_UNKNOWN):
        samples = len(loader.dataset if sampler is None else sampler)
    return samples, batches


def describe(loader: Any) -> dict[str, Any]:
    """Returns what identifies the samples of a loader or list of batches, for a checkpoint.

    It reads at most four samples. Of loaders of PyTorch it reads none: only the indices of their
    subsets and some rows of their tensors are described.
    """
    samples, _ = sizes_of(loader)
    description: dict[str, Any] = {"samples": samples}
    if isinstance(loader, Sequence):
        if len(loader):
            ends = first_samples.hash_of_sample([loader[0], loader[-1]])
            description["first and last batch"] = f"{ends:016x}"
        return description
    dataset = getattr(loader, "dataset", None)
    if first_samples.is_checked(loader):
        numbers = first_samples.numbers_of(len(dataset))
        description["first samples"] = first_samples.hashes_of(loader, numbers, loader.next_epoch)
    else:
        with contextlib.suppress(Exception):  # a file is missing, which its reader reports
            description["fingerprint"] = fingerprint(dataset)
    description["subsets"] = _describe_subsets(dataset)
    return {key: value for key, value in description.items() if value is not None}


def _describe_subsets(dataset: Any) -> str | None:
    """Returns a hash of the indices of the subsets inside one another that a data set of PyTorch
    is, and of rows of the tensors in the last one; None if it has neither.
    """
    parts: list[Any] = []
    for _ in range(_DEEPEST):
        attributes = getattr(dataset, "__dict__", {})
        try:
            if "indices" in attributes:
                parts.append(np.asarray(attributes["indices"]))
            elif "tensors" in attributes:
                rows = first_samples.numbers_of(len(dataset))
                parts += [np.asarray(tensor[rows]) for tensor in attributes["tensors"]]
        except Exception:  # other objects have attributes of these names
            return None
        dataset = attributes.get("dataset")
    return f"{first_samples.hash_of_sample(parts):016x}" if parts else None


def difference(saved: Any, current: dict[str, Any]) -> str:
    """Returns how validation data differ from those of a checkpoint, for a message; "" if they
    don't, or if the checkpoint doesn't describe them.
    """
    if not isinstance(saved, dict):
        return ""
    changed = [key for key, value in current.items() if saved.get(key, value) != value]
    if "samples" in changed:
        return f"{saved['samples']} samples before, {current['samples']} now"
    return "other samples of the same number" if changed else ""
