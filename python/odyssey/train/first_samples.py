"""The check of a data set before training: the same samples on all ranks, and whenever it is read.

Each rank reads a few samples in its main thread, as training will read them, and puts the data set
back afterwards. It finds data sets that differ between ranks, that draw from generators without a
seed or from generators that they hold, and caches of samples that were drawn. Otherwise each rank
and each run would train with different samples, because a rank reads only its own shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..capture import Change, Undo, is_value, mark
from ..comm import Communicator
from ..core import random_scopes
from ..core.fingerprint import hash_of
from ..errors import DataError
from . import agreement, resume
from .batches import own_steps
from .captured import parts_of_samples

COUNT = 4  # samples that are read
_DEEPEST = 8  # objects inside one another that are looked into
_DRAW = (
    "draw from the global generators of torch, numpy or random instead, which odyssey seeds for "
    "each sample, or from the rng that transform= of odyssey.data.DataLoader gets"
)


@dataclasses.dataclass
class _Reading:
    """The hashes of some samples and of their batch, and whether reading them drew numbers."""

    hashes: list[int]
    batch: int
    draws: bool


@dataclasses.dataclass
class _Examination:
    """The samples that a rank has read, and what is wrong with them.

    Attributes:
        numbers: those of the samples.
        first: the samples; None if they couldn't be read. Training reports why.
        problem: why the data set isn't repeatable; "" if it is.
    """

    numbers: list[int]
    first: _Reading | None = None
    problem: str = ""


def is_checked(loader: Any) -> bool:
    """Returns whether a loader reads samples with code that isn't part of odyssey."""
    return own_steps(loader) and not (loader.in_memory or loader.reads_natively)


def check(
    comm: Communicator,
    loader: Any,
    name: str,
    epoch: int,
    *,
    together: bool = True,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Checks the first samples of a loader; a collective call.

    Args:
        name: of the data in messages, such as "training".
        epoch: for the random numbers.
        together: all ranks have the same data, so they are compared.
        tell: reports a problem to the user, and nothing is raised; None raises it.

    Raises:
        DataError: Samples differ between ranks or between two readings.
    """
    if not is_checked(loader):
        return
    if comm.in_threads:
        comm.barrier()  # no other rank may draw at the same time
    with random_scopes.reading():
        examination = _examine(loader, name, epoch)
    if examination.first is not None:
        loader.draws = loader.draws or examination.first.draws
    try:
        with resume.on_all_ranks(comm, together):
            if examination.problem:
                raise DataError(examination.problem)
        if together:
            _compare(comm, examination, name)
    except DataError as problem:
        if tell is None:
            raise
        tell(f"{problem}; training continues, but its results can't be repeated")


def numbers_of(count: int) -> list[int]:
    """Returns the numbers of the samples that are read of a data set of `count` samples."""
    return sorted({count * i // COUNT for i in range(COUNT)} if count else ())


def hashes_of(loader: Any, numbers: list[int], epoch: int) -> list[str] | None:
    """Returns hashes of samples of a loader as it reads them in an epoch.

    The data set is as before afterwards. None if a sample can't be read.
    """
    with random_scopes.reading():
        undo = Undo(parts_of_samples(loader))
        try:
            hashes = _read(loader, epoch, numbers).hashes
            return [f"{one:016x}" for one in hashes]
        except Exception:
            return None
        finally:
            undo.put_back()


# --- on one rank ----------------------------------------------------------------------------------


def _examine(loader: Any, name: str, epoch: int) -> _Examination:
    """Reads the first samples on trial, several times."""
    undo = Undo(parts_of_samples(loader))
    examination = _Examination([])
    try:
        examination.numbers = numbers_of(len(loader.dataset))
        examination.first = _read(loader, epoch, examination.numbers)
    except Exception:
        undo.put_back()
        return examination
    try:
        examination.problem = _find_problem(loader, name, epoch, examination, undo)
    except Exception:  # such as a file that can be read once
        examination.problem = ""
    finally:
        undo.put_back()
    return examination


def _find_problem(loader: Any, name: str, epoch: int, examination: _Examination, undo: Undo) -> str:
    """Returns why a data set isn't repeatable; "" if it is.

    undo: what the data set held before the first reading.
    """
    numbers = examination.numbers
    first = examination.first
    filled = undo.changed()
    second = Undo(parts_of_samples(loader))
    difference = _difference(first, _read(loader, epoch, numbers), name, numbers)
    moved = second.changed()
    if not any(change.kind == "generator" for change in moved):
        # A cache that the first reading has filled may be the reason.
        moved = [change for change in filled if change.kind == "other"] + moved
    if not difference and filled:
        # A cache may hide that samples are drawn from a generator.
        undo.put_back(generators=False)
        difference = _difference(first, _read(loader, epoch, numbers), name, numbers)
        moved = filled
    if difference:
        undo.put_back()
        if _difference(first, _read(loader, epoch, numbers), name, numbers):
            moved = []  # What has changed isn't the reason.
        return _describe_moved(difference, moved)
    if first.draws and _keeps_drawn(loader, epoch, numbers, undo, bool(filled)):
        caches = (change.path for change in filled if change.kind == "other")
        cache = next(caches, "the data set")
        return (
            f"[data] {cache} keeps samples of the {name} data that were drawn at random, so they "
            "depend on the rank and the run that read them first; keep samples before the random "
            "part, or draw again each time"
        )
    return ""


def _difference(first: _Reading, second: _Reading, name: str, numbers: list[int]) -> str:
    """Returns what differs between two readings, for a message; "" if nothing does."""
    for number, one, another in zip(numbers, first.hashes, second.hashes, strict=True):
        if one != another:
            return f"sample {number} of the {name} data has other values when it is read again"
    if first.batch != second.batch:
        return (
            f"the collate function of the {name} data returns other values when it gets the same "
            "samples again"
        )
    return ""


def _keeps_drawn(loader: Any, epoch: int, numbers: list[int], undo: Undo, has_filled: bool) -> bool:
    """Returns whether samples of the next epoch depend on what was drawn in this one.

    has_filled: reading has changed something that may be a cache.
    """
    later = _read(loader, epoch + 1, numbers)
    if later.draws and not has_filled:
        return False
    undo.put_back()
    fresh = _read(loader, epoch + 1, numbers)
    if fresh.hashes != later.hashes:
        return True
    if fresh.draws:
        return False
    # Either the data set draws in this epoch only, or a cache can't be put back.
    undo.put_back()
    return not _read(loader, epoch, numbers).draws


def _describe_moved(statement: str, moved: list[Change]) -> str:
    """Returns the message for samples that differ between two readings.

    moved: what the first reading has changed.
    """
    if moved and moved[0].kind != "generator":
        paths = " or ".join(list(dict.fromkeys(change.path for change in moved))[:3])
        return (
            f"[data] {statement}: it seems to depend on {paths}, which each reading changes; make "
            "a sample depend on its number and the epoch only"
        )
    cause = "it seems to use a generator without a seed, such as np.random.default_rng()"
    if moved:
        cause = f"it draws from {moved[0].path}, which moves on each time it is used"
    return f"[data] {statement}: {cause}; {_DRAW}"


def _read(loader: Any, epoch: int, numbers: list[int]) -> _Reading:
    """Begins an epoch and reads samples of it."""
    trial = loader.trial()
    trial.begin_epoch(epoch)
    samples = []
    hashes = []
    for number in numbers:
        sample = trial.read(epoch, number)
        hashes.append(hash_of_sample(sample))  # now, because a collate function may change it
        samples.append(sample)
    draws = trial.draws
    batch = 0
    try:
        batch = hash_of_sample(trial.collate(samples, epoch, numbers[0]))
    except Exception:  # samples of several shapes, which training puts into different batches
        batch = 0
    return _Reading(hashes, batch, draws)


def hash_of_sample(value: Any) -> int:
    """Returns a hash of the arrays, numbers, strings and objects of a sample."""
    return hash_of(_describe(value, 0))


def _describe(value: Any, depth: int) -> Any:
    """Returns a description of a value that is equal for equal bytes."""
    if is_value(value):
        return mark(value)
    kind = type(value).__qualname__
    if depth == _DEEPEST:
        return kind
    if isinstance(value, Mapping):
        return [kind, [[str(key), _describe(one, depth + 1)] for key, one in value.items()]]
    if isinstance(value, (list, tuple)):
        return [kind, [_describe(one, depth + 1) for one in value]]
    if hasattr(value, "__array_interface__"):  # such as an image of Pillow
        return [kind, mark(np.asarray(value))]
    attributes = getattr(value, "__dict__", None)
    return [kind, None if attributes is None else _describe(dict(attributes), depth + 1)]


# --- between ranks --------------------------------------------------------------------------------


def _compare(comm: Communicator, examination: _Examination, name: str) -> None:
    """Raises DataError, on all ranks, if a rank has read other samples than rank 0."""
    if comm.size == 1:
        return
    hashes = [0] * (COUNT + 1)
    if examination.first is not None:
        hashes[: len(examination.numbers)] = examination.first.hashes
        hashes[-1] = examination.first.batch
    row = [examination.first is not None, hash_of(examination.numbers), *hashes]
    different_rank, everyone = agreement.first_other(comm, row)
    # Training reports a sample that can't be read, and another length.
    if (
        different_rank is None
        or not everyone[:, 0].all()
        or (everyone[:, 1] != everyone[0, 1]).any()
    ):
        return
    position = int(np.flatnonzero(everyone[different_rank, 2:] != everyone[0, 2:])[0])
    part = "the collate function"
    if position < COUNT:
        part = f"sample {examination.numbers[position]}"
    raise DataError(
        f"[data] {part} of the {name} data has other values on rank {different_rank} than on rank "
        "0, but all ranks need the same data set: compare its files on both machines, pass "
        "random_split a generator with a seed, and don't use the rank's number or an unseeded "
        "generator in the data set"
    ).on_all_ranks()
