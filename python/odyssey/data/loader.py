"""Cuts the order of an epoch into global batches and, for samples that are read or transformed,
runs ahead.

A batch of a data set in memory is only its indices: whoever consumes it gathers the samples, all of
them or one worker's part. Of other data sets a process reads the run of samples of each batch that
it is told (`steps`).
"""

from __future__ import annotations

import collections
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from odyssey.data import workers
from odyssey.data.datasets import ArrayDataset, described, outside
from odyssey.data.reader import Batch, Reader
from odyssey.data.sampler import DistributedSampler, permutation
from odyssey.errors import ConfigError, check_integer

# number of a batch in its epoch, and the indices of its samples
Pieces = Iterator[tuple[int, np.ndarray]]
# of a batch of so many samples: first that is read, one past the last
Part = Callable[[int], tuple[int, int]]


class DataLoader:
    """Gives the batches of an epoch each time it is iterated.

    dataset: a data set of `arrays`, `load` or another function of odyssey.data, or any object with
        `__len__` and `__getitem__(i)` that gives (sample, target), such as PyTorch's data sets:
        each an array or number, a picture of Pillow, or a tuple or dict of them, of the same shape
        and dtype for all samples. With an image, (C, H, W), (H, W) or (F,), and an integer it is a
        classification; its attribute `classes`, if it has one, bounds the integers. Its
        `set_epoch`, if it has one, is told the epoch before each iteration. `ds[i]` must be the
        same on all ranks, and the same whenever it is asked for within an epoch.
    batch_size: the GLOBAL batch size: the samples of one optimizer step over all workers, however
    many there are. shuffle: a new order each epoch, from `permutation(len(dataset), seed, epoch)`.
    seed: 0 to 2**64 - 1. sampler: an iterable of indices, with a length, that replaces `shuffle`;
    it is cut into pieces of batch_size. If it
        has `set_epoch`, it is told the epoch before each iteration.
    drop_last: leave out a last batch with fewer than batch_size samples. prefetch: how many batches
    a thread prepares ahead of the consumer; 0 uses no thread. transform: a function of (sample,
    rng) that gives the sample to train with, one of `odyssey.data.transforms`, or a
        list of them, applied in order. `rng` is a numpy.random.Generator that depends on (seed,
        epoch, number of the sample) alone, so the same augmented sample comes on any number of
        ranks and workers, and after a resume. It is given what a batch would hold without it:
        images as float32, normalised if the data set says how.
    num_workers: processes that read and transform samples ahead, `prefetch` batches and one for
        each; 0: a thread of this one does. They import the program anew, so it must train under `if
        __name__ == "__main__":` only, and its data set and transforms must be defined at the top of
        a module. What they give does not depend on their number.
    pin_memory: either; a training reads batches where they lie, and a GPU's copies go through
    pinned memory anyway.

    Epochs count up from 0 with each iteration; `set_epoch` on the loader, or on a
    DistributedSampler that it has, fixes the next one, and counting goes on from there.

    Attributes, to be read: dataset, batch_size, drop_last; in_memory: whether batches are places in
    a data set in memory, so that nothing is read or transformed; next_epoch: the epoch of the next
    iteration. Raises ConfigError for a setting out of range, an unsuitable or empty data set, or
    when no batch would be left. While iterating: DataError for unsuitable samples, ConfigError for
    a sampler's index that is not in the data set; what the data set itself raises comes through
    unchanged.
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
        transform: Any = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        workers.refuse_import()
        _check_dataset(dataset)
        self.dataset = dataset
        self.batch_size = check_integer("[data] batch_size", batch_size, 1)
        self.seed = check_integer("[data] seed", seed, 0, (1 << 64) - 1)
        self._prefetch = check_integer("[data] prefetch", prefetch, 0)
        self._reader = Reader(dataset, _class_count(dataset), transform, self.seed)
        self.in_memory = isinstance(dataset, ArrayDataset) and not self._reader.transforms
        self._worker_count = check_integer("[data] num_workers", num_workers, 0)
        self._workers: workers.Workers | None = None  # that are at rest
        if sampler is not None and shuffle:
            raise ConfigError(
                "DataLoader: shuffle is True and a sampler is given; one is allowed; leave the "
                "other out"
            )
        self.shuffle = bool(shuffle)
        self.sampler = sampler
        self.drop_last = bool(drop_last)
        self.next_epoch = int(getattr(sampler, "epoch", 0))
        self._first = 0  # batch of the next iteration
        self._ahead: dict[int, Callable[[], np.ndarray]] = {}  # the order of an epoch
        if sampler is None and len(self) == 0:
            raise ConfigError(
                f"[data] batch_size is {self.batch_size} with drop_last, but the data set has "
                f"{len(dataset)} samples; "
                "no batch would be left; make batch_size smaller"
            )

    def __repr__(self) -> str:
        order = (
            f"sampler={type(self.sampler).__name__}"
            if self.sampler is not None
            else f"shuffle={self.shuffle}"
        )
        return (
            f"DataLoader({described(self.dataset)}, batch_size={self.batch_size}, {order}, "
            f"{len(self)} batches)"
        )

    @classmethod
    def with_sampler(
        cls, dataset: Any, batch_size: int, sampler: Iterable[int], **options: Any
    ) -> DataLoader:
        """`DataLoader(dataset, batch_size, sampler=sampler)`."""
        return cls(dataset, batch_size, sampler=sampler, **options)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` (0 to 2**64 - 1) the epoch of the next iteration; ConfigError if it is
        out of range.
        """
        self.next_epoch = check_integer("epoch", epoch, 0, (1 << 64) - 1)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.next_epoch)

    def read_again(self, epoch: int, batch: int, join: int = 1) -> Batch:
        """Batch number `batch` (from 0) of `epoch`, with the `join` - 1 that follow, made now;
        nothing else changes. Raises ConfigError: there is no such batch.
        """
        previous_epoch = self.next_epoch
        first = self._first
        try:
            self.start_at(epoch, batch)
            self._begin_epoch()
            pieces = itertools.islice(self._cut(self._order(epoch), batch), join)
            joined_batch = next(
                self._batches(_joined(enumerate(pieces, batch), join), epoch, None, lambda: False),
                None,
            )
            if joined_batch is None:
                raise ConfigError(
                    f"[data] there is no batch {batch} in epoch {epoch}; {len(self)} are there"
                )
            return joined_batch
        finally:
            self.start_at(previous_epoch, first)

    def start_at(self, epoch: int, batch: int) -> None:
        """Make the next iteration begin at batch number `batch` (from 0) of `epoch`; ConfigError
        if out of range.
        """
        self.set_epoch(epoch)
        self._first = check_integer("batch", batch, 0, len(self))

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        samples = len(self.dataset if self.sampler is None else self.sampler)  # type: ignore[arg-type]
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self.steps()

    def steps(self, *, pieces: int = 1, join: int = 1, part: Part | None = None) -> Iterator[Batch]:
        """The batches of the next epoch as a trainer takes them: each cut into so many `pieces`,
        and so many of these made one (`join`). part: of a batch of n samples part(n) is the
        run that this process reads, (first, one past the last); the others are read when
        somebody asks for the whole batch. All are read without it, or in memory.
        """
        workers.refuse_import()
        epoch = self._begin_epoch()
        order = self._order(epoch)
        first = self._first
        self._first = 0
        cut = _joined(_pieces(enumerate(self._cut(order, first), first), pieces), join)
        if self.in_memory or (self._prefetch == 0 and not self._worker_count):
            return self._batches(cut, epoch, part, lambda: False)
        make = self._by_workers if self._worker_count else self._batches
        # The thread refers to nothing of the iteration, so an abandoned one is closed by the
        # garbage collector.
        return _prefetched(lambda stopped: make(cut, epoch, part, stopped), max(self._prefetch, 1))

    def _batches(
        self, cut: Pieces, epoch: int, part: Part | None, stopped: Callable[[], bool]
    ) -> Iterator[Batch]:
        """Batches; ends early, between two samples, once `stopped()`."""
        for index, numbers in cut:
            if self.in_memory:
                yield Batch(self.dataset, numbers, epoch, index)
                continue
            lo, hi = run = (0, len(numbers)) if part is None else part(len(numbers))
            both = self._reader.read(numbers[lo:hi], epoch, stopped)
            if both is None:
                return
            yield self._reader.batch(both, numbers, epoch, index, run)

    def _by_workers(
        self, cut: Pieces, epoch: int, part: Part | None, stopped: Callable[[], bool]
    ) -> Iterator[Batch]:
        """The same, prepared by processes, each of which has at most two batches before it."""
        team = self._workers or workers.Workers(self._reader, self._worker_count)
        self._workers = None
        pending: collections.deque[Any] = collections.deque()
        try:
            for count in itertools.count():
                while len(pending) < 2 * len(team) and (following := next(cut, None)) is not None:
                    index, numbers = following
                    lo, hi = run = (0, len(numbers)) if part is None else part(len(numbers))
                    team.ask(count + len(pending), epoch, numbers[lo:hi])
                    pending.append((numbers, epoch, index, run))
                if not pending or stopped():
                    return
                yield self._reader.batch(team.get(count), *pending.popleft())
        finally:
            if team.idle:
                self._workers = team
            else:
                team.close()

    def _begin_epoch(self) -> int:
        sampler = self.sampler
        if getattr(sampler, "epoch_was_set", False):
            self.next_epoch = int(sampler.epoch)  # type: ignore[union-attr]
        epoch = self.next_epoch
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
            if hasattr(sampler, "epoch_was_set"):
                sampler.epoch_was_set = False
        self._reader.begin_epoch(epoch)
        self.next_epoch = epoch + 1
        return epoch

    def _order(self, epoch: int) -> np.ndarray:
        """The indices of the epoch, int64, read-only: batches are views of it."""
        count = len(self.dataset)
        if self.sampler is not None:
            order = _sampled(self.sampler, count)
        elif self.shuffle:
            ahead = self._ahead
            self._ahead = {}
            order = ahead[epoch]() if epoch in ahead else permutation(count, self.seed, epoch)
            if self._prefetch:  # while this epoch is in use
                self._ahead = {epoch + 1: _permuted(count, self.seed, epoch + 1)}
        else:
            order = np.arange(count, dtype=np.int64)
        order.flags.writeable = False
        return order

    def _cut(self, order: np.ndarray, first: int) -> Iterator[np.ndarray]:
        """Pieces of batch_size from number `first` on, made when asked for."""
        size = self.batch_size
        stop = len(order) // size * size if self.drop_last else len(order)
        return (order[start : start + size] for start in range(first * size, stop, size))


def _permuted(count: int, seed: int, epoch: int) -> Callable[[], np.ndarray]:
    """Begins to compute an epoch's permutation on a thread; what it returns gives it."""
    results: list[np.ndarray] = []
    compute = lambda: results.append(permutation(count, seed, epoch))  # noqa: E731
    thread = threading.Thread(target=compute, name="odyssey-order", daemon=True)
    thread.start()

    def wait() -> np.ndarray:
        thread.join()
        return results[0]

    return wait


def _pieces(cut: Pieces, k: int) -> Pieces:
    """Each batch in k pieces, each a batch."""
    for index, numbers in cut:
        n = len(numbers)
        yield from ((index * k + i, numbers[n * i // k : n * (i + 1) // k]) for i in range(k))


def _joined(cut: Pieces, k: int) -> Pieces:
    """Every k batches as one; the last may be of fewer."""
    while group := list(itertools.islice(cut, k)):
        yield (
            group[0][0] // k,
            group[0][1] if k == 1 else np.concatenate([numbers for _, numbers in group]),
        )


def _prefetched(
    make_batches: Callable[[Callable[[], bool]], Iterator[Batch]], prefetch: int
) -> Iterator[Batch]:
    """The batches of `make_batches`, which is told how to know that nobody wants more, at most
    `prefetch` ahead.
    """
    ready: queue.SimpleQueue[tuple[Batch | None, BaseException | None]] = queue.SimpleQueue()
    slots = threading.Semaphore(prefetch)
    stop = threading.Event()
    batches = make_batches(stop.is_set)

    def produce() -> None:
        try:
            while True:
                slots.acquire()
                batch = None if stop.is_set() else next(batches, None)
                ready.put((batch, None))
                if batch is None:
                    return
        # whatever it is, the consumer would wait for ever if it were not told
        except BaseException as problem:
            ready.put((None, problem))

    threading.Thread(target=produce, name="odyssey-prefetch", daemon=True).start()
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
        # it would hold itself, by this frame: a sys.exit of the data set counts when it is gone
        del error
        stop.set()
        slots.release()


def _sampled(sampler: Iterable[int], count: int) -> np.ndarray:
    order = np.array(
        sampler.indices() if isinstance(sampler, DistributedSampler) else list(sampler), np.int64
    )
    if (wrong := outside(order, count)) is not None:
        raise ConfigError(
            f"DataLoader: the sampler gave the index {order[wrong]}; 0 to {count - 1} are allowed; "
            "make the sampler for this data set"
        )
    return order


def _check_dataset(dataset: Any) -> None:
    if not (
        hasattr(dataset, "__len__")
        and (hasattr(dataset, "gather") or hasattr(dataset, "__getitem__"))
    ):
        raise ConfigError(
            f"DataLoader: the data set is a {type(dataset).__name__}; an ArrayDataset, or an "
            "object with __len__ and "
            "__getitem__, is allowed; make one with odyssey.data.arrays, or give what yields "
            "batches (x, y) to fit()"
        )
    if len(dataset) < 1:
        raise ConfigError(
            f"DataLoader: the data set ({type(dataset).__name__}) is empty; give it at least one "
            "sample"
        )


def _class_count(dataset: Any) -> int | None:
    """The data set's attribute `classes`, a number or a list of names; None if it has none, or
    targets are none.
    """
    classes = getattr(dataset, "classes", None)
    if classes is None or (isinstance(dataset, ArrayDataset) and classes == 0):
        return None
    name = f"DataLoader: the attribute classes of {type(dataset).__name__}"
    least = 0 if isinstance(dataset, ArrayDataset) else 1
    return check_integer(
        name, len(classes) if isinstance(classes, (list, tuple)) else classes, least
    )
