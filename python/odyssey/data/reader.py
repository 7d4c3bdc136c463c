"""Batches, and the reader that builds them: it reads, transforms, stacks and checks samples.

A transformed sample is a function of (data set, transform, seed, epoch, number of the sample). It
doesn't depend on the process that reads it, on the batch, or on how often it is read. If it draws
from the generators of the process, these are seeded for it (sample_scopes.py).
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from odyssey.data import transforms
from odyssey.data.datasets import ArrayDataset, arrays, outside
from odyssey.data.nested import leaves, mapped, places
from odyssey.data.sample_scopes import SampleScopes, begin_nothing
from odyssey.data.sources import ImageFolder, Subset, Tokens, npy
from odyssey.errors import DataError

Tree = Any  # an array, or a tuple or dict of trees
_NATIVE = (ArrayDataset, ImageFolder, Tokens, npy)  # data sets whose reading draws no numbers
_TRANSFORM = 1 << 59  # seeds a transform, in addition to its place, epoch and number


def draws_nothing(dataset: Any, transforms_of_samples: Sequence[Any]) -> bool:
    """Returns whether only code of odyssey reads and transforms samples, so they can't draw from
    the generators of the process.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in _NATIVE and all(
        type(one).__module__ == transforms.__name__ and not isinstance(one, transforms.Paired)
        for one in transforms_of_samples
    )


@dataclass(eq=False, slots=True, repr=False)
class Batch:
    """The samples of one global batch.

    Iterating gathers them, so `images, labels = batch` works.

    Attributes:
        dataset: the data set in memory that holds the samples.
        indices: int64 (B,), the indices of the samples in `dataset`.
        epoch: the number of the epoch.
        index: the number of the batch within the epoch, from 0.
        numbers: int64 (B,), the numbers of the samples in the loader's data set, if `dataset` holds
            only copies of them.
        run: (first, one past the last) of the B samples, if this process has read only these. The
            indices of the others are 0.
    """

    dataset: ArrayDataset
    indices: np.ndarray
    epoch: int
    index: int
    numbers: np.ndarray | None = None
    run: tuple[int, int] | None = None
    _complete: Callable[[Batch], Batch] | None = None

    def __repr__(self) -> str:
        return f"Batch({len(self)} samples, epoch={self.epoch}, index={self.index})"

    def __len__(self) -> int:
        """Returns the number B of samples, although iterating yields two objects."""
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        """Yields two trees of arrays (B, ...): the samples, then the targets.

        Images are float32 and normalised.
        """
        batch = self.whole()
        return iter(batch.dataset.gather(batch.indices))

    @property
    def inputs(self) -> Tree:
        """The samples, a tree of arrays (B, ...)."""
        return next(iter(self))

    @property
    def targets(self) -> Tree:
        """The targets, a tree of arrays (B, ...)."""
        _, targets = self
        return targets

    def covering(self, lo: int, hi: int) -> Batch:
        """Returns a batch that has samples [lo, hi): this one if it has them, or the whole."""
        if self.run is None:
            return self
        first, end = self.run
        return self if first <= lo and hi <= end else self.whole()

    def whole(self) -> Batch:
        """Returns the same batch with all of its samples.

        It reads the samples now that were left to other processes.
        """
        return self if self._complete is None else self._complete(self)


class Reader:
    """Builds batches from samples of a data set, on any thread or process.

    Args:
        dataset: an object with `gather(indices)`, which returns trees of arrays (B, ...), or with
            `__getitem__(i)`, which returns (sample, target).
        classes: the number of classes, or None if there are none.
        transform: see `DataLoader`.
        seed: the seed of the random numbers of the transforms.

    Attributes:
        scopes: what seeds the generators of the process for each sample.
    """

    def __init__(self, dataset: Any, classes: int | None, transform: Any, seed: int) -> None:
        self.dataset = dataset
        self.classes = classes
        self.seed = seed
        self.transforms = transforms.as_list(transform)
        self.name = type(dataset).__name__
        self.draws_nothing = draws_nothing(dataset, self.transforms)
        self.scopes = SampleScopes(seed, draws=False if self.draws_nothing else None)
        # Data sets need not be safe on several threads.
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickle, without the lock, which cannot be sent to a process."""
        return {key: value for key, value in vars(self).items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def begin_epoch(self, epoch: int) -> None:
        """Calls `set_epoch` of the data set, if it has this method."""
        self.scopes.begin_epoch(self.dataset, epoch)

    def read(
        self,
        numbers: np.ndarray,
        epoch: int,
        stopped: Callable[[], bool] = lambda: False,
        count: int | None = None,
        *,
        seeds: bool = True,
    ) -> tuple[Tree, Tree] | None:
        """Reads and transforms samples.

        The transforms are applied recursively: the last one gets the result of `read` with one
        transform less. Mixup reads its second samples in the same way.

        Args:
            numbers: int64 (B,), the numbers of the samples.
            epoch: the number of the epoch, for the random numbers.
            stopped: returns True if nobody needs the samples any more. It is called before each
                sample.
            count: how many of the transforms are applied. None means all.
            seeds: seed the generators of the process for samples that draw. False if samples don't
                draw, and the main thread may draw at the same time.

        Returns:
            Samples and targets, trees of arrays (B, ...), or None if `stopped()` returned True.
        """
        count = len(self.transforms) if count is None else count
        if not count:
            return self._read_untransformed(numbers, epoch, stopped, seeds)
        place = count - 1  # of the last transform that is applied
        transform = self.transforms[place]
        draw = transforms.Draw(self.seed, epoch, numbers, place)
        both = self.read(numbers, epoch, stopped, place, seeds=seeds)
        if both is None:
            return None
        if isinstance(transform, transforms.Mixup):
            partner_numbers = transform.partners(draw, len(self.dataset))
            partner_samples = self.read(partner_numbers, epoch, stopped, place, seeds=seeds)
            if partner_samples is None:
                return None
            return transform.mixed(both, partner_samples, self.classes, draw)
        inputs, targets = both
        if isinstance(transform, transforms.Vectorized):
            return transform.batch(inputs, draw), targets

        def transform_sample(position: int, number: int) -> Any:
            sample = mapped(lambda a: a[position], inputs)
            target = mapped(lambda a: a[position], targets)
            rng = draw.generator(position)
            if isinstance(transform, transforms.Paired):
                return transform((sample, target), rng)
            return transform(sample, rng), target

        error_note = f"in the transform of sample {{}} of {self.name}, epoch {epoch}"
        return self._read_seeded(
            [(_TRANSFORM + place, epoch, number) for number in numbers.tolist()],
            lambda begin: self._stack_samples(
                _after(begin, transform_sample),
                numbers,
                f"{self.name} after its transform",
                error_note,
                stopped,
            ),
            seeds,
        )

    def _read_seeded(
        self,
        keys: Sequence[tuple[int, ...]],
        read: Callable[[Callable[[int], None]], tuple[Tree, Tree] | None],
        seeds: bool,
    ) -> tuple[Tree, Tree] | None:
        """Returns what `read` returns, with a seeded generator for each sample if it draws."""
        if self.draws_nothing or not seeds:
            return read(begin_nothing)
        return self.scopes.read(keys, read)

    def _read_untransformed(
        self, numbers: np.ndarray, epoch: int, stopped: Callable[[], bool], seeds: bool
    ) -> tuple[Tree, Tree] | None:
        """Reads samples from the data set, by `gather` if it has it, else one by one.

        Returns samples and targets, or None if `stopped()` returned True.
        """
        keys = [(epoch, number) for number in numbers.tolist()]
        if hasattr(self.dataset, "gather"):
            return self._read_seeded(keys, lambda begin: self._gather(numbers, begin), seeds)
        error_note = f"when sample {{}} of {self.name} was read, epoch {epoch}"
        both = self._read_seeded(
            keys,
            lambda begin: self._stack_samples(
                _after(begin, self._read_sample), numbers, self.name, error_note, stopped
            ),
            seeds,
        )
        if both is None or not self.transforms:
            return both
        return self._normalise_bytes(both)

    def _gather(self, numbers: np.ndarray, begin: Callable[[int], None]) -> tuple[Tree, Tree]:
        """Gathers samples. If they are seeded, each is gathered separately."""
        with self._lock:
            if begin is begin_nothing or not len(numbers):
                return self.dataset.gather(numbers)
            parts = []
            for position in range(len(numbers)):
                begin(position)
                parts.append(tuple(self.dataset.gather(numbers[position : position + 1])))
        return mapped(lambda *arrays: np.concatenate(arrays), *parts)

    def _read_sample(self, position: int, number: int) -> Any:
        """Reads sample `number`. Its position in the batch makes no difference."""
        with self._lock:
            return self.dataset[number]

    @staticmethod
    def _stack_samples(
        make: Callable[[int, int], Any],
        numbers: np.ndarray,
        name: str,
        error_note: str,
        stopped: Callable[[], bool],
    ) -> tuple[Tree, Tree] | None:
        """Stacks the results of make(position, number) for the samples `numbers`.

        Args:
            make: returns (sample, target) for the position in the batch and the sample's number.
            numbers: int64 (B,).
            name: the name of the data set in messages.
            error_note: added to errors of `make`, with "{}" replaced by the sample's number.
            stopped: see `read`.

        Returns:
            Samples and targets, trees of arrays (B, ...), or None if `stopped()` returned True.
        """
        stack = Stack(name)
        for position, number in enumerate(numbers.tolist()):
            if stopped():
                return None
            try:
                sample = make(position, number)
            except Exception as error:
                if hasattr(error, "add_note"):  # since Python 3.11
                    error.add_note(f"({error_note.format(number)})")
                raise
            stack.add(number, sample, len(numbers))
        return stack.both

    def _normalise_bytes(self, both: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        """Converts uint8 images to float32, so that transforms get them as a model does.

        They are normalised if the data set has a `scale` and `shift`.
        """
        inputs, labels = both
        if isinstance(inputs, np.ndarray) and inputs.dtype == np.uint8:
            indices = np.arange(len(inputs))
            # A data set in memory does the arithmetic. It needs some labels, which aren't used.
            dataset = arrays(inputs, labels=indices, **self._scaling, name=self.name)
            inputs, _ = dataset.gather(indices)
        return inputs, labels

    @property
    def _scaling(self) -> dict[str, Any]:
        """The attributes `scale` and `shift` of the data set, as far as it has them."""
        return {
            key: getattr(self.dataset, key)
            for key in ("scale", "shift")
            if hasattr(self.dataset, key)
        }

    def dataset_of(
        self, both: tuple[Tree, Tree], numbers: np.ndarray, subject: str
    ) -> ArrayDataset:
        """Builds a checked data set in memory from samples that were read.

        Args:
            both: samples and targets, trees of arrays (B, ...).
            numbers: int64 (B,), the numbers of the samples, for messages.
            subject: the batch, for messages, such as "batch 3 of epoch 0".

        Raises:
            DataError: a label is out of range, or an array is not supported or not finite.
        """
        name = f"{self.name}, {subject}"
        inputs, labels = both
        scaling = {}
        classified = (
            isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu"
        )
        if classified:
            max_label = np.iinfo(np.int32).max - 1 if self.classes is None else self.classes - 1
            if (wrong := outside(labels, max_label + 1)) is not None:
                raise DataError(
                    f"{name}: label {labels[wrong]} of sample {numbers[wrong]}; 0 to {max_label} "
                    "are allowed; correct it"
                )
        if (
            not isinstance(inputs, tuple | dict)
            and inputs.dtype == np.uint8
            and not self.transforms
        ):
            scaling = self._scaling
        classes = self.classes if classified else None
        try:
            return arrays(inputs, labels, classes=classes, name=name, **scaling)
        except DataError:
            # For NaN and infinity, the number of the sample is more useful than its place in the
            # batch.
            self._check_finite(both, numbers)
            raise

    def _check_finite(self, both: tuple[Tree, Tree], numbers: np.ndarray) -> None:
        """Raises DataError with the number of the first sample that holds NaN or infinity."""
        for part_name, tree in zip(_PARTS, both, strict=True):
            for place, leaf in places(tree):
                for number, array in zip(numbers.tolist(), leaf, strict=True):
                    if not np.isfinite(array).all():
                        raise DataError(
                            f"{self.name}: {part_name} {number}{place} holds NaN or infinity"
                            f"{' after its transform' * bool(self.transforms)}; clean it, or "
                            "leave the sample out"
                        ) from None

    def batch(
        self,
        both: tuple[Tree, Tree],
        numbers: np.ndarray,
        epoch: int,
        index: int,
        run: tuple[int, int],
    ) -> Batch:
        """Builds a batch from samples and targets that were read.

        Args:
            both: samples and targets of the run, trees of arrays.
            numbers: int64 (B,), the numbers of all samples of the batch.
            epoch: the number of the epoch.
            index: the number of the batch in the epoch.
            run: (first, one past the last) of the B samples that were read.
        """
        first, end = run
        data = self.dataset_of(both, numbers[first:end], f"batch {index} of epoch {epoch}")
        if end - first == len(numbers):
            return Batch(data, np.arange(end, dtype=np.int64), epoch, index, numbers)
        indices = np.zeros(len(numbers), np.int64)
        indices[first:end] = np.arange(end - first)
        complete = functools.partial(self.complete, both)
        return Batch(data, indices, epoch, index, numbers, run, complete)

    def complete(self, both: tuple[Tree, Tree], batch: Batch) -> Batch:
        """Returns a batch with all of its samples.

        It reads the samples before and after the run. Those of the run, `both`, are not read again.
        """
        numbers = batch.numbers
        first, end = batch.run
        parts = []
        if first > 0:
            parts.append(tuple(self.read(numbers[:first], batch.epoch)))
        parts.append(tuple(both))
        if end < len(numbers):
            parts.append(tuple(self.read(numbers[end:], batch.epoch)))
        all_samples = mapped(lambda *arrays: np.concatenate(arrays), *parts)
        return self.batch(all_samples, numbers, batch.epoch, batch.index, (0, len(numbers)))


class SampleTrial:
    """Reads single samples as an iteration does, for a check before it.

    Args:
        reader: the loader's, which stays as it is.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = copy.copy(reader)
        self._reader.scopes = SampleScopes(reader.seed)

    @property
    def draws(self) -> bool:
        """True if reading a sample has drawn random numbers from the generators of the process."""
        return bool(self._reader.scopes.draws)

    def begin_epoch(self, epoch: int) -> None:
        """Calls `set_epoch` of the data set, if it has this method."""
        self._reader.begin_epoch(epoch)

    def read(self, epoch: int, number: int) -> Any:
        """Returns a sample, in the generators' states that belong to it."""
        return self._reader.read(np.array([number], np.int64), epoch)

    def collate(self, samples: list[Any], epoch: int, number: int) -> Any:
        """Returns None, because odyssey stacks samples itself."""
        return None


def _after(
    begin: Callable[[int], None], make: Callable[[int, int], Any]
) -> Callable[[int, int], Any]:
    """Returns a function of (position, number) that calls `begin` before `make`."""

    def make_seeded(position: int, number: int) -> Any:
        begin(position)
        return make(position, number)

    return make if begin is begin_nothing else make_seeded


def array(leaf: Any, owner: str, is_target: bool = False) -> np.ndarray:
    """Converts a part of a sample to an array.

    Integers of Python become int64, floats float32, and an image of Pillow uint8 (C, H, W). Other
    arrays of integers keep their dtype.

    Args:
        leaf: the part.
        owner: the sample or target in messages.
        is_target: it belongs to a target. The target of a segmentation may be an image with a
            palette, whose numbers are the classes.

    Raises:
        DataError: it is not an array of numbers, or an image of a sample has a palette.
    """
    mode = getattr(leaf, "mode", None) if hasattr(leaf, "getbands") else None
    if mode in ("P", "PA") and not is_target:
        raise DataError(
            f"{owner} is an image with a palette, so its pixels are numbers of colours; convert it "
            "with image.convert('RGB')"
        )
    if mode == "1" and not is_target:
        leaf = leaf.convert("L")  # black is 0, white is 255
    try:
        values = np.asarray(leaf)
        if hasattr(leaf, "getbands"):  # an image of Pillow
            values = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
        if values.dtype.kind not in "biuf":
            raise TypeError(f"of {values.dtype}")
    # PyTorch raises RuntimeError for a tensor that requires a gradient.
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DataError(
            f"{owner} has a part that is a {type(leaf).__name__} ({problem}); arrays of numbers, "
            "numbers, and tuples or dicts of them are allowed"
        ) from None
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):  # becomes infinity, which the data set reports
            return values.astype(np.float32, copy=False)
    return values.astype(np.int64) if values.ndim == 0 and values.dtype.kind in "iu" else values


class Stack:
    """A stack of samples: `add` checks each against the first, and copies it into the arrays.

    Attributes:
        name: the name of the data set in messages.
        both: samples and targets, trees of arrays (B, ...). None before the first sample.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.both = None
        self._form: Any = None
        self._leaves: list[np.ndarray] = []  # the arrays of `both`
        self._count = 0

    def add(self, number: int, sample: Any, room: int) -> None:
        """Adds a sample after the others.

        Args:
            number: the number of the sample, for messages.
            sample: the pair (sample, target) that the data set returned.
            room: how many samples there will be. The first call allocates the arrays.

        Raises:
            DataError: it is not such a pair, or has another shape or dtype than the first.
        """
        is_pair = isinstance(sample, Sequence) and not isinstance(sample, str) and len(sample) == 2
        if not is_pair:
            raise DataError(
                f"{self.name}: sample {number} is {_describe_sample(sample)}; {_EXPECTED}"
            )
        pair_arrays = tuple(
            mapped(
                lambda leaf, part_name=part_name: array(
                    leaf, f"{self.name}: {part_name} {number}", part_name == _TARGET
                ),
                part,
            )
            for part_name, part in zip(_PARTS, sample, strict=True)
        )
        form = mapped(lambda leaf: (leaf.shape, leaf.dtype), pair_arrays)
        if self.both is None:
            self._form = form
            self.both = mapped(lambda a: np.empty((room, *a.shape), a.dtype), pair_arrays)
            self._leaves = leaves(self.both)
        elif form != self._form:
            for part_name, part, stacked in zip(_PARTS, pair_arrays, self.both, strict=True):
                actual = _describe_tree(part)
                expected = _describe_tree(mapped(lambda a: a[0], stacked))
                if actual != expected:
                    raise DataError(
                        f"{self.name}: {part_name} {number} is {actual}, an earlier one is "
                        f"{expected}; all samples must have the same shape and dtype"
                    )
        for stacked_leaf, leaf in zip(self._leaves, leaves(pair_arrays), strict=True):
            stacked_leaf[self._count] = leaf
        self._count += 1


_TARGET = "the target of sample"
_PARTS = ("sample", _TARGET)
_EXPECTED = (
    "(sample, target) expected: two arrays or numbers, or tuples or dicts of them; rows of a table "
    "become such pairs with data.columns"
)


def _describe_tree(tree: Tree) -> str:
    """Returns dtypes and shapes of a tree of arrays, for messages."""
    return ", ".join(f"{place} {a.dtype} {a.shape}".lstrip() for place, a in places(tree))


def _describe_sample(sample: Any) -> str:
    """Returns the type of what a data set returned, and the types of its parts, for messages."""
    if isinstance(sample, dict):
        return f"a dict with {', '.join(map(repr, sample))}"
    parts = (
        ", ".join(type(part).__name__ for part in sample)
        if isinstance(sample, list | tuple)
        else ""
    )
    return f"{type(sample).__name__} ({parts})" if parts else type(sample).__name__
