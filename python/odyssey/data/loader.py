"""Cuts the order of an epoch into global batches, and prepares batches ahead of their use.

A batch of a data set in memory is only its indices: the consumer gathers the samples, all of them
or one worker's part. Samples of other data sets are read and transformed here, ahead of the
consumer. A process reads only its run of the samples of each batch (see `part` of `steps`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from odyssey.data.datasets import ArrayDataset, described, outside
from odyssey.data.reader import Batch, Reader, SampleTrial
from odyssey.data.sampler import DistributedSampler, permutation
from odyssey.errors import ConfigError, check_integer

if TYPE_CHECKING:
    from odyssey.data import workers

# Yields for each batch its number in the epoch, and the indices of its samples.
Pieces = Iterator[tuple[int, np.ndarray]]
# Maps the number of samples in a batch to the run that this process reads: (first, one past last).
Part = Callable[[int], tuple[int, int]]


def _refuse_import() -> None:
    """Raises ConfigError if a program trains while a worker imports it for its classes."""
    # Only a worker, or a process with workers, has imported this module.
    if (module := sys.modules.get("odyssey.data.workers")) is not None:
        module.refuse_import()


class DataLoader:
    """Yields the batches of an epoch each time it is iterated.

    Epochs count up from 0 with each iteration. `set_epoch` on the loader, or on its
    DistributedSampler, sets the next one, and counting continues from there.

    Args:
        dataset: a data set of `arrays`, `load` or another function of odyssey.data, or any object
            with `__len__` and `__getitem__(i)` that returns (sample, target), such as PyTorch's
            data sets. Each is an array or number, a Pillow image, or a tuple or dict of them, of
            the same shape and dtype for all samples. An image, (C, H, W), (H, W) or (F,), with an
            integer is a classification. The attribute `classes`, if there is one, bounds the
            integers. The method `set_epoch`, if there is one, receives the epoch before each
            iteration. `dataset[i]` must be the same on all ranks, and each time within an epoch. It
            may draw from the generators of torch, numpy and random, which are seeded for each
            sample.
        batch_size: the GLOBAL batch size: the samples of one optimizer step over all workers,
            however many there are.
        shuffle: a new order each epoch, from `permutation(len(dataset), seed, epoch)`.
        seed: 0 to 2**64 - 1.
        sampler: an iterable of indices, with a length, that replaces `shuffle`. It is cut into
            pieces of batch_size. Its `set_epoch`, if it has one, receives the epoch before each
            iteration.
        drop_last: skip a last batch with fewer than batch_size samples.
        prefetch: how many batches a thread prepares ahead of the consumer. 0 uses no thread, and
            neither do samples that draw, because the thread would share the generators.
        transform: a function of (sample, rng) that returns the sample to train with, one of
            `odyssey.data.transforms`, or a list of them, applied in order. `rng` is a
            numpy.random.Generator that depends only on (seed, epoch, number of the sample), so the
            augmented sample is the same on any number of ranks and workers, and after a resume. The
            function receives the sample as a batch would hold it: images as float32, normalised if
            the data set has a scale and shift.
        num_workers: how many processes read and transform samples ahead, `prefetch` batches and one
            for each. With 0, a thread of this process does it. The processes import the program, so
            it must train only under `if __name__ == "__main__":`, and its data set and transforms
            must be defined at the top of a module. Samples don't depend on this number.
        pin_memory: has no effect. Training reads batches where they are, and copies to a GPU use
            pinned memory anyway.

    Attributes:
        dataset, batch_size, drop_last: as given.
        in_memory: batches are indices of a data set in memory, so nothing is read or transformed.
        next_epoch: the epoch of the next iteration.
        shares_samples: batches hold only the samples of this rank. True in `odyssey.torch`.

    Raises:
        ConfigError: a setting is out of range, the data set is unsuitable or empty, no batch would
            be left, or (while iterating) the sampler returns an index that isn't in the data set.
        DataError: samples are unsuitable (while iterating). Errors of the data set itself are
            raised unchanged.
    """

    # A checkpoint holds the position; data set, sampler and transforms are captured separately.
    _not_state = (
        "_first_batch",
        "_orders_ahead",
        "_prefetch",
        "_reader",
        "_worker_count",
        "_workers",
        "batch_size",
        "drop_last",
        "in_memory",
        "next_epoch",
        "seed",
        "shuffle",
    )

    shares_samples = False

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
        _refuse_import()
        _check_dataset(dataset)
        self.dataset = dataset
        self.batch_size = check_integer("[data] batch_size", batch_size, 1)
        self.seed = check_integer("[data] seed", seed, 0, (1 << 64) - 1)
        self._prefetch = check_integer("[data] prefetch", prefetch, 0)
        self._reader = Reader(dataset, _class_count(dataset), transform, self.seed)
        self.in_memory = isinstance(dataset, ArrayDataset) and not self._reader.transforms
        self._worker_count = check_integer("[data] num_workers", num_workers, 0)
        # The worker processes of the last iteration, which the next one uses again. None while an
        # iteration uses them.
        self._workers: workers.Workers | None = None
        if sampler is not None and shuffle:
            raise ConfigError(
                "DataLoader: shuffle is True and a sampler is given; one is allowed; leave the "
                "other out"
            )
        self.shuffle = bool(shuffle)
        self.sampler = sampler
        self.drop_last = bool(drop_last)
        self.next_epoch = int(getattr(sampler, "epoch", 0))
        self._first_batch = 0  # where the next iteration starts
        # Functions that return the order of an epoch, which a thread computes ahead.
        self._orders_ahead: dict[tuple[int, int], Callable[[], np.ndarray]] = {}
        if sampler is None and len(self) == 0:
            raise ConfigError(
                f"[data] batch_size is {self.batch_size} with drop_last, but the data set has "
                f"{len(dataset)} samples; no batch would be left; make batch_size smaller"
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
        """Returns `DataLoader(dataset, batch_size, sampler=sampler)`."""
        return cls(dataset, batch_size, sampler=sampler, **options)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch (0 to 2**64 - 1) of the next iteration.

        Raises ConfigError if it is out of range.
        """
        self.next_epoch = check_integer("epoch", epoch, 0, (1 << 64) - 1)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.next_epoch)
        # the length of a data set may go by the epoch
        self._reader.begin_epoch(self.next_epoch)

    def read_again(
        self, epoch: int, batch: int, join: int = 1, begin: Callable[[], None] | None = None
    ) -> Batch:
        """Returns batch number `batch` (from 0) of `epoch`, joined with the `join` - 1 after it.

        The next iteration starts where it would have started without this call. Raises ConfigError
        if there is no such batch.

        begin: is called before the sampler receives the epoch and is iterated.
        """
        previous_epoch = self.next_epoch
        previous_first_batch = self._first_batch
        try:
            self.start_at(epoch, batch)
            if begin is not None:
                begin()
            self._begin_epoch()
            batches = itertools.islice(self._cut_batches(self._order_samples(epoch), batch), join)
            joined = _join_batches(enumerate(batches, batch), join)
            joined_batch = next(self._read_batches(joined, epoch, None, _never), None)
            if joined_batch is None:
                raise ConfigError(
                    f"[data] there is no batch {batch} in epoch {epoch}; {len(self)} are there"
                )
            return joined_batch
        finally:
            self.start_at(previous_epoch, previous_first_batch)

    def start_at(self, epoch: int, batch: int) -> None:
        """Makes the next iteration start at batch number `batch` (from 0) of `epoch`.

        Raises ConfigError if one of them is out of range.
        """
        self.set_epoch(epoch)
        self._first_batch = check_integer("batch", batch, 0, len(self))

    @contextlib.contextmanager
    def at_epoch(self, epoch: int) -> Iterator[None]:
        """Makes an iteration in the block start at the first batch of an epoch.

        After the block the next iteration starts where it would have started without it. So an
        evaluation in the middle of an epoch leaves the training's order as it was.
        """
        previous_epoch = self.next_epoch
        previous_first_batch = self._first_batch
        self.next_epoch = epoch
        self._first_batch = 0
        try:
            yield
        finally:
            self.next_epoch = previous_epoch
            self._first_batch = previous_first_batch

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        samples = len(self.dataset if self.sampler is None else self.sampler)  # type: ignore[arg-type]
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self.steps()

    @property
    def transforms(self) -> list[Any]:
        """The transforms of samples, in the order in which they are applied."""
        return list(self._reader.transforms)

    @property
    def reads_ahead(self) -> bool:
        """True if samples are read and transformed before the consumer asks for them."""
        is_ahead = self._worker_count or (self._prefetch and not self.draws)
        return not self.in_memory and bool(is_ahead)

    @property
    def draws(self) -> bool | None:
        """Whether samples draw from the generators of the process; None if it isn't known yet.

        Such samples are read in the loop or in worker processes. A thread that reads ahead would
        share the generators with the program.
        """
        return self._reader.scopes.draws

    @draws.setter
    def draws(self, draws: bool) -> None:
        self._reader.scopes.draws = draws

    @property
    def reads_natively(self) -> bool:
        """True if only code of odyssey reads and transforms samples."""
        return self._reader.draws_nothing

    def trial(self) -> SampleTrial:
        """Returns what reads single samples, for a check before an iteration."""
        return SampleTrial(self._reader)

    def steps(self, *, pieces: int = 1, join: int = 1, part: Part | None = None) -> Iterator[Batch]:
        """Yields the batches of the next epoch as a trainer needs them.

        Args:
            pieces: cut each batch into so many pieces, each a batch.
            join: join so many of these batches into one.
            part: returns for a batch of n samples the run that this process reads, as (first, one
                past the last). The other samples are read when somebody asks for the whole batch.
                None reads all samples. It has no effect on a data set in memory.
        """
        _refuse_import()
        epoch = self._begin_epoch()
        order = self._order_samples(epoch)
        first_batch = self._first_batch
        self._first_batch = 0
        batches = enumerate(self._cut_batches(order, first_batch), first_batch)
        cut = _join_batches(_cut_pieces(batches, pieces), join)
        if not self.reads_ahead:
            return self._read_batches(cut, epoch, part, _never)
        if not self._worker_count:
            return self._read_ahead(cut, epoch, part)
        # The thread has no reference to the iterator that is returned here. So the garbage
        # collector closes an iterator that nobody uses any more, and the thread ends.
        return _prefetch_batches(
            lambda stopped: self._read_by_workers(cut, epoch, part, stopped), max(self._prefetch, 1)
        )

    def _read_ahead(self, cut: Pieces, epoch: int, part: Part | None) -> Iterator[Batch]:
        """Yields batches that a thread reads ahead, or each when it is asked for if samples draw.

        The first batch of an epoch shows whether they draw. The consumer would wait for it anyway.
        """
        first: list[Batch] = []
        if not self.reads_natively:
            first = list(self._read_batches(itertools.islice(cut, 1), epoch, part, _never))
        if self.draws:
            yield from first
            yield from self._read_batches(cut, epoch, part, _never)
        else:
            read = functools.partial(self._read_batches, cut, epoch, part, seeds=False)
            yield from _prefetch_batches(read, self._prefetch, first)

    def _read_batches(
        self,
        cut: Pieces,
        epoch: int,
        part: Part | None,
        stopped: Callable[[], bool],
        seeds: bool = True,
    ) -> Iterator[Batch]:
        """Yields batches, each read when it is asked for.

        It ends early, between two samples, when `stopped()` returns True. seeds: see Reader.read.
        """
        for index, numbers in cut:
            if self.in_memory:
                yield Batch(self.dataset, numbers, epoch, index)
                continue
            run = (0, len(numbers)) if part is None else part(len(numbers))
            first, end = run
            both = self._reader.read(numbers[first:end], epoch, stopped, seeds=seeds)
            if both is None:
                return
            yield self._reader.batch(both, numbers, epoch, index, run)

    def _read_by_workers(
        self, cut: Pieces, epoch: int, part: Part | None, stopped: Callable[[], bool]
    ) -> Iterator[Batch]:
        """Yields batches that worker processes read.

        Each process has at most two requests that wait. Answers are fetched in the order of the
        requests, so the order of batches doesn't depend on the speed of a process.
        """
        # While this iteration uses the processes, another one must start its own.
        from odyssey.data import workers

        team = self._workers or workers.Workers(self._reader, self._worker_count)
        self._workers = None
        pending: collections.deque[Any] = collections.deque()
        try:
            for count in itertools.count():
                while len(pending) < 2 * len(team) and (piece := next(cut, None)) is not None:
                    index, numbers = piece
                    run = (0, len(numbers)) if part is None else part(len(numbers))
                    first, end = run
                    team.ask(count + len(pending), epoch, numbers[first:end])
                    pending.append((numbers, epoch, index, run))
                if not pending or stopped():
                    return
                yield self._reader.batch(team.get(count), *pending.popleft())
        finally:
            # If an answer is outstanding, the next iteration would take it for its own batch.
            if team.idle:
                self._workers = team
            else:
                team.close()

    def _begin_epoch(self) -> int:
        """Starts the next epoch: informs the sampler and the data set, and returns its number."""
        sampler = self.sampler
        # An epoch that the caller set on the sampler goes before the count of the loader.
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

    def _order_samples(self, epoch: int) -> np.ndarray:
        """Returns the indices of the epoch, int64. They are read-only, as batches are views."""
        count = len(self.dataset)
        if self.sampler is not None:
            order = _list_indices(self.sampler, count)
        elif self.shuffle:
            orders_ahead = self._orders_ahead
            self._orders_ahead = {}
            # An order that was computed ahead is of no use if the data set has grown since.
            wait_for_order = orders_ahead.get((epoch, count))
            if wait_for_order is not None:
                order = wait_for_order()
            else:
                order = permutation(count, self.seed, epoch)
            if self._prefetch:
                # A thread computes the next order while this epoch is in use.
                following = epoch + 1
                self._orders_ahead = {
                    (following, count): _start_permutation(count, self.seed, following)
                }
        else:
            order = np.arange(count, dtype=np.int64)
        order.flags.writeable = False
        return order

    def _cut_batches(self, order: np.ndarray, first_batch: int) -> Iterator[np.ndarray]:
        """Yields the indices of each batch, from batch number `first_batch` on."""
        size = self.batch_size
        stop = len(order) // size * size if self.drop_last else len(order)
        return (order[start : start + size] for start in range(first_batch * size, stop, size))


def _never() -> bool:
    """Returns False. Reading that nobody stops asks it."""
    return False


def _start_permutation(count: int, seed: int, epoch: int) -> Callable[[], np.ndarray]:
    """Starts a thread that computes the permutation of an epoch.

    Returns a function that waits for the thread and returns the permutation.
    """
    results: list[np.ndarray] = []

    def compute() -> None:
        results.append(permutation(count, seed, epoch))

    thread = threading.Thread(target=compute, name="odyssey-order", daemon=True)
    thread.start()

    def wait() -> np.ndarray:
        thread.join()
        return results[0]

    return wait


def _cut_pieces(batches: Pieces, k: int) -> Pieces:
    """Cuts each batch into k pieces of almost equal size. Each piece becomes a batch."""
    for index, numbers in batches:
        n = len(numbers)
        for i in range(k):
            yield index * k + i, numbers[n * i // k : n * (i + 1) // k]


def _join_batches(batches: Pieces, k: int) -> Pieces:
    """Joins every k batches into one. The last group may have fewer."""
    while group := list(itertools.islice(batches, k)):
        first_index, first_numbers = group[0]
        if k == 1:
            yield first_index, first_numbers
        else:
            yield first_index // k, np.concatenate([numbers for _, numbers in group])


def _prefetch_batches(
    make_batches: Callable[[Callable[[], bool]], Iterator[Batch]],
    prefetch: int,
    first: Iterable[Batch] = (),
) -> Iterator[Batch]:
    """Yields the batches of an iterator that a thread runs at most `prefetch` batches ahead.

    Args:
        make_batches: returns the iterator. It receives a function that returns True when no more
            batches are needed, so that the iterator can end early.
        prefetch: how many batches may wait.
        first: batches that come before those of the iterator.

    Errors of the iterator are raised here.
    """
    # The thread acquires a slot for each batch before it reads it. The consumer releases the slot
    # when it takes the batch. The queue holds (batch, error). (None, None) is the end.
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
        # Any error, even SystemExit: the consumer would wait forever without it.
        except BaseException as problem:
            ready.put((None, problem))

    threading.Thread(target=produce, name="odyssey-prefetch", daemon=True).start()
    error = None
    try:
        yield from first
        while True:
            batch, error = ready.get()
            if error is not None:
                raise error
            if batch is None:
                return
            slots.release()
            yield batch
    finally:
        # The error's traceback has this frame, so the error would keep itself alive. A sys.exit of
        # the data set counts only when its error is freed.
        del error
        stop.set()
        slots.release()  # wakes a thread that waits for a slot, so that it can end


def _list_indices(sampler: Iterable[int], count: int) -> np.ndarray:
    """Returns the indices of a sampler for one epoch, int64.

    Raises ConfigError for an index that is not in a data set of `count` samples.
    """
    if isinstance(sampler, DistributedSampler):
        order = np.array(sampler.indices(), np.int64)
    else:
        order = np.array(list(sampler), np.int64)
    if (wrong := outside(order, count)) is not None:
        raise ConfigError(
            f"DataLoader: the sampler gave the index {order[wrong]}; 0 to {count - 1} are allowed; "
            "make the sampler for this data set"
        )
    return order


def _check_dataset(dataset: Any) -> None:
    """Raises ConfigError unless the data set has a length above 0 and a way to read samples."""
    if not (
        hasattr(dataset, "__len__")
        and (hasattr(dataset, "gather") or hasattr(dataset, "__getitem__"))
    ):
        raise ConfigError(
            f"DataLoader: the data set is a {type(dataset).__name__}; an ArrayDataset, or an "
            "object with __len__ and __getitem__, is allowed; make one with odyssey.data.arrays, "
            "or give what yields batches (x, y) to fit()"
        )
    if len(dataset) < 1:
        raise ConfigError(
            f"DataLoader: the data set ({type(dataset).__name__}) is empty; give it at least one "
            "sample"
        )


def _class_count(dataset: Any) -> int | None:
    """Returns the number of classes by the attribute `classes`, a number or a list of names.

    None if the data set has no such attribute, or is an ArrayDataset without classes. Raises
    ConfigError for another value.
    """
    classes = getattr(dataset, "classes", None)
    if classes is None or (isinstance(dataset, ArrayDataset) and classes == 0):
        return None
    name = f"DataLoader: the attribute classes of {type(dataset).__name__}"
    least = 0 if isinstance(dataset, ArrayDataset) else 1
    count = len(classes) if isinstance(classes, (list, tuple)) else classes
    return check_integer(name, count, least)
