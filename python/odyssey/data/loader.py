"""Batches: cuts the order of an epoch into global batches and, for data sets that make samples one by one, runs ahead.

A batch of an `ArrayDataset` is only its indices: whoever consumes it gathers the samples, all of them or one worker's
part. Nothing here splits a batch over workers, copies to a device or augments.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from odyssey.data.datasets import ArrayDataset, arrays
from odyssey.data.sampler import DistributedSampler, check_integer, permutation
from odyssey.errors import ConfigError, DataError

Pieces = Iterator[tuple[int, np.ndarray]]  # number of a batch in its epoch, and the indices of its samples


class Batch:
    """The samples of one global batch; gathers them when iterated, so `images, labels = batch` works.

    dataset: the ArrayDataset that holds the samples.
    indices: int64 (B,), their places in it.
    epoch: number of the epoch. index: number of the batch within the epoch, from 0.
    numbers: int64 (B,), which samples of the loader's data set these are, where `dataset` holds only copies of them.
    """

    __slots__ = ("dataset", "epoch", "index", "indices", "numbers")

    def __init__(
        self, dataset: ArrayDataset, indices: np.ndarray, epoch: int, index: int, numbers: np.ndarray | None = None
    ) -> None:
        self.dataset = dataset
        self.indices = indices
        self.epoch = epoch
        self.index = index
        self.numbers = numbers

    def __len__(self) -> int:
        """B, the number of samples (not of the two things that iterating gives)."""
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        """Gives two things: images float32 (B, *sample_shape), normalised, then labels int32 (B,); or trees."""
        return iter(self.dataset.gather(self.indices))

    @property
    def inputs(self) -> Any:
        """An array (B, ...), or a tree of them."""
        return self.dataset.gather(self.indices)[0]

    @property
    def targets(self) -> Any:
        """An array (B, ...), or a tree of them."""
        return self.dataset.gather(self.indices)[1]


class DataLoader:
    """Gives the batches of an epoch each time it is iterated.

    dataset: an ArrayDataset, or any object with `__len__` and `__getitem__(i)` that gives (image, label) with an
        array-like image of (C, H, W), (H, W) or (F,), uint8 or floating point, and an integer label; its attribute
        `classes`, if it has one, bounds the labels. Such samples are taken as they are, without scale or shift. Its
        `set_epoch`, if it has one, is told the epoch before each iteration. `ds[i]` must be the same on all ranks, and
        the same whenever it is asked for within an epoch.
    batch_size: the GLOBAL batch size: the samples of one optimizer step over all workers, however many there are.
    shuffle: a new order each epoch, from `permutation(len(dataset), seed, epoch)`.
    seed: 0 to 2**64 - 1.
    sampler: an iterable of indices, with a length, that replaces `shuffle`; it is cut into pieces of batch_size. If it
        has `set_epoch`, it is told the epoch before each iteration.
    drop_last: leave out a last batch with fewer than batch_size samples.
    prefetch: how many batches a thread prepares ahead of the consumer; 0 uses no thread.

    Epochs count up from 0 with each iteration; `set_epoch` on the loader, or on a DistributedSampler that it has, fixes
    the next one, and counting goes on from there.
    Raises ConfigError for a setting out of range, an unsuitable or empty data set, or when no batch would be left.
    While iterating: DataError for unsuitable samples, ConfigError for a sampler's index that is not in the data set;
    what the data set itself raises comes through unchanged.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 64,
        shuffle: bool = False,
        *,
        seed: int = 0,
        sampler: Iterable[int] | None = None,
        drop_last: bool = False,
        prefetch: int = 2,
    ) -> None:
        _check_dataset(dataset)
        self._dataset = dataset
        self._classes = _class_count(dataset)
        self._batch_size = check_integer("[data] batch_size", batch_size, 1)
        self.seed = check_integer("[data] seed", seed, 0, (1 << 64) - 1)
        self._prefetch = check_integer("[data] prefetch", prefetch, 0)
        if sampler is not None and shuffle:
            raise ConfigError("DataLoader: shuffle is True and a sampler is given; one is allowed; leave the other out")
        self.shuffle = bool(shuffle)
        self.sampler = sampler
        self._drop_last = bool(drop_last)
        self._next_epoch = int(getattr(sampler, "epoch", 0))
        self._first = 0  # batch of the next iteration
        self._ahead: _OrderAhead | None = None
        if sampler is None and len(self) == 0:
            raise ConfigError(
                f"[data] batch_size is {self._batch_size} with drop_last, but the data set has {len(dataset)} samples; "
                "no batch would be left; make batch_size smaller"
            )

    @property
    def dataset(self) -> Any:
        """The data set that was given."""
        return self._dataset

    @property
    def batch_size(self) -> int:
        """Samples of one optimizer step over all workers."""
        return self._batch_size

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` (0 to 2**64 - 1) the epoch of the next iteration; ConfigError if it is out of range."""
        self._next_epoch = check_integer("epoch", epoch, 0, (1 << 64) - 1)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self._next_epoch)

    def read_again(self, epoch: int, batch: int) -> Batch:
        """Batch number `batch` (from 0) of `epoch`, made now; what the next iteration gives stays as it was.

        Raises:
            ConfigError: there is no such batch.
        """
        before, first = self._next_epoch, self._first
        try:
            self.start_at(epoch, batch)
            self._begin_epoch()
            piece = next(self._cut(self._order(epoch), batch), None)
            if piece is None:
                raise ConfigError(f"[data] there is no batch {batch} in epoch {epoch}; {len(self)} are there")
            if isinstance(self._dataset, ArrayDataset):
                return Batch(self._dataset, piece, epoch, batch)
            return next(_collated(self._dataset, self._classes, iter([(batch, piece)]), epoch, lambda: False))
        finally:
            self.start_at(before, first)

    def start_at(self, epoch: int, batch: int) -> None:
        """Make the next iteration begin at batch number `batch` (from 0) of `epoch`; ConfigError if out of range."""
        self.set_epoch(epoch)
        self._first = check_integer("batch", batch, 0, len(self))

    @property
    def drop_last(self) -> bool:
        """Whether a last batch with fewer samples is left out."""
        return self._drop_last

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._next_epoch

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        samples = len(self._dataset if self.sampler is None else self.sampler)  # type: ignore[arg-type]
        return samples // self._batch_size if self._drop_last else -(-samples // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self._begin_epoch()
        order = self._order(epoch)
        first, self._first = self._first, 0
        pieces = enumerate(self._cut(order, first), first)
        if isinstance(self._dataset, ArrayDataset):
            return _slices(self._dataset, pieces, epoch)
        if self._prefetch == 0:
            return _collated(self._dataset, self._classes, pieces, epoch, lambda: False)
        return _prefetched(self._dataset, self._classes, pieces, epoch, self._prefetch)

    def _begin_epoch(self) -> int:
        sampler = self.sampler
        if getattr(sampler, "epoch_was_set", False):
            self._next_epoch = int(sampler.epoch)  # type: ignore[union-attr]
        epoch = self._next_epoch
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
            if hasattr(sampler, "epoch_was_set"):
                sampler.epoch_was_set = False
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        self._next_epoch = epoch + 1
        return epoch

    def _order(self, epoch: int) -> np.ndarray:
        """The indices of the epoch, int64, read-only: batches are views of it."""
        count = len(self._dataset)
        if self.sampler is not None:
            order = _sampled(self.sampler, count)
        elif self.shuffle:
            order = self._shuffled(count, epoch)
        else:
            order = np.arange(count, dtype=np.int64)
        order.flags.writeable = False
        return order

    def _shuffled(self, count: int, epoch: int) -> np.ndarray:
        ahead, self._ahead = self._ahead, None
        order = ahead.take(epoch) if ahead is not None else None
        if order is None:
            order = permutation(count, self.seed, epoch)
        if self._prefetch:
            self._ahead = _OrderAhead(count, self.seed, epoch + 1)
        return order

    def _cut(self, order: np.ndarray, first: int) -> Iterator[np.ndarray]:
        """Pieces of batch_size from number `first` on, made when asked for."""
        size = self._batch_size
        stop = len(order) // size * size if self._drop_last else len(order)
        return (order[at : at + size] for at in range(first * size, stop, size))


class _OrderAhead:
    """Computes the permutation of an epoch on a thread while the epoch before it is in use."""

    def __init__(self, count: int, seed: int, epoch: int) -> None:
        self._arguments = (count, seed, epoch)
        self._order: np.ndarray | None = None
        self._thread = threading.Thread(target=self._compute, name="odyssey-order", daemon=True)
        self._thread.start()

    def _compute(self) -> None:
        try:
            self._order = permutation(*self._arguments)
        except Exception:
            # The consumer computes it again and meets the same error where it can be seen.
            self._order = None

    def take(self, epoch: int) -> np.ndarray | None:
        """The permutation if it is of `epoch`, else None."""
        if epoch != self._arguments[2]:
            return None
        self._thread.join()
        return self._order


def _slices(dataset: ArrayDataset, pieces: Pieces, epoch: int) -> Iterator[Batch]:
    for index, piece in pieces:
        yield Batch(dataset, piece, epoch, index)


def _collated(
    dataset: Any, classes: int | None, pieces: Pieces, epoch: int, stopped: Callable[[], bool]
) -> Iterator[Batch]:
    """Batches that hold their own samples; ends early, between two samples, once `stopped()`."""
    for index, piece in pieces:
        samples = []
        for at in piece.tolist():
            if stopped():
                return
            samples.append(dataset[at])
        yield _collate(dataset, classes, piece, samples, epoch, index)


def _prefetched(dataset: Any, classes: int | None, pieces: Pieces, epoch: int, prefetch: int) -> Iterator[Batch]:
    """What `_collated` gives, made on a thread at most `prefetch` batches ahead.

    The thread refers to nothing of this generator, so an abandoned iteration is closed by the garbage collector.
    """
    ready: queue.SimpleQueue[tuple[Batch | None, BaseException | None]] = queue.SimpleQueue()
    slots = threading.Semaphore(prefetch)
    stop = threading.Event()
    thread = threading.Thread(
        target=_produce,
        args=(_collated(dataset, classes, pieces, epoch, stop.is_set), ready, slots, stop),
        name="odyssey-prefetch",
        daemon=True,
    )
    thread.start()
    error = None
    try:
        while True:
            batch, error = ready.get()
            if error is not None:
                raise error
            if batch is None:
                return
            slots.release()
            yield batch
    finally:
        del error  # it would hold itself, by this frame: a sys.exit of the data set counts when it is gone
        stop.set()
        slots.release()


def _produce(
    batches: Iterator[Batch],
    ready: queue.SimpleQueue[tuple[Batch | None, BaseException | None]],
    slots: threading.Semaphore,
    stop: threading.Event,
) -> None:
    try:
        while True:
            slots.acquire()
            batch = None if stop.is_set() else next(batches, None)
            ready.put((batch, None))
            if batch is None:
                return
    except BaseException as error:  # whatever it is, the consumer would wait for ever if it were not told
        ready.put((None, error))


def _collate(dataset: Any, classes: int | None, piece: np.ndarray, samples: list[Any], epoch: int, index: int) -> Batch:
    name = f"{type(dataset).__name__}, batch {index} of epoch {epoch}"
    images: list[np.ndarray] = []
    labels: list[int] = []
    for at, sample in zip(piece.tolist(), samples, strict=True):
        image, label = _check_sample(sample, at, images, classes, name)
        images.append(image)
        labels.append(label)
    own = arrays(np.stack(images), np.array(labels, np.int64), classes=classes, name=name)
    return Batch(own, np.arange(len(samples), dtype=np.int64), epoch, index, piece)


def _check_sample(
    sample: Any, at: int, earlier: list[np.ndarray], classes: int | None, name: str
) -> tuple[np.ndarray, int]:
    """The image and label of sample `at`; checked here where its index in the data set is still known."""
    try:
        image, label = sample
        image = np.asarray(image)
        number = label.__index__()
    except (TypeError, ValueError, AttributeError):
        raise DataError(f"{name}: sample {at} is {_brief(sample)}; (array, integer label) expected") from None
    if number < 0 or number >= (2**31 - 1 if classes is None else classes):
        allowed = "0 and more" if classes is None else f"0 to {classes - 1}"
        raise DataError(f"{name}: label {number} of sample {at}; {allowed} are allowed; correct the data set")
    if earlier and (image.shape != earlier[0].shape or image.dtype != earlier[0].dtype):
        raise DataError(
            f"{name}: sample {at} is {image.dtype} {image.shape}, an earlier one is {earlier[0].dtype} "
            f"{earlier[0].shape}; all samples must have the same shape and dtype"
        )
    return image, number


def _brief(sample: Any) -> str:
    parts = ", ".join(type(part).__name__ for part in sample) if isinstance(sample, list | tuple) else ""
    return f"{type(sample).__name__} ({parts})" if parts else type(sample).__name__


def _sampled(sampler: Iterable[int], count: int) -> np.ndarray:
    given = sampler.indices() if isinstance(sampler, DistributedSampler) else list(sampler)
    order = np.array(given, dtype=np.int64)
    if order.size and not (order.min() >= 0 and order.max() < count):
        wrong = order[(order < 0) | (order >= count)][0]
        raise ConfigError(
            f"DataLoader: the sampler gave the index {wrong}; 0 to {count - 1} are allowed; "
            "make the sampler for this data set"
        )
    return order


def _check_dataset(dataset: Any) -> None:
    if not (hasattr(dataset, "__len__") and (isinstance(dataset, ArrayDataset) or hasattr(dataset, "__getitem__"))):
        raise ConfigError(
            f"DataLoader: the data set is a {type(dataset).__name__}; an ArrayDataset, or an object with __len__ and "
            "__getitem__, is allowed; make one with odyssey.data.arrays"
        )
    if len(dataset) < 1:
        raise ConfigError(f"DataLoader: the data set ({type(dataset).__name__}) is empty; give it at least one sample")


def _class_count(dataset: Any) -> int | None:
    """The data set's attribute `classes`, a number or a list of names; None if it has none."""
    classes = getattr(dataset, "classes", None)
    if classes is None:
        return None
    name = f"DataLoader: the attribute classes of {type(dataset).__name__}"
    least = 0 if isinstance(dataset, ArrayDataset) else 1
    return check_integer(name, len(classes) if isinstance(classes, (list, tuple)) else classes, least)
