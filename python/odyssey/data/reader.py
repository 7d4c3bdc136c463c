"""Batches, and how samples that a data set makes one by one become one: read, transformed,
stacked, checked.

What a sample becomes is a function of (data set, transform, seed, epoch, number of the sample): who
reads it, in which batch and how often makes no difference.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from odyssey.data import transforms
from odyssey.data.datasets import ArrayDataset, arrays, outside
from odyssey.data.nested import leaves, mapped, places
from odyssey.errors import DataError

Tree = Any  # an array, or a tuple or dict of trees


@dataclass(eq=False, slots=True, repr=False)
class Batch:
    """The samples of one global batch; gathers them when iterated, so `images, labels = batch`
    works.

    dataset: holds the samples. indices: int64 (B,), their places in it. epoch: number of the epoch.
    index: number of the batch within the epoch, from 0. numbers: int64 (B,), which samples of the
    loader's data set these are, where `dataset` holds only copies of them. run: (first, one past
    the last) of the B samples that `dataset` holds, where this process reads no others; the
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
        """B, the number of samples (not of the two things that iterating gives)."""
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        """Gives two trees of arrays (B, ...): samples, of images float32 and normalised, and
        targets.
        """
        batch = self.whole()
        return iter(batch.dataset.gather(batch.indices))

    @property
    def inputs(self) -> Tree:
        """The samples, a tree of arrays (B, ...)."""
        return next(iter(self))

    @property
    def targets(self) -> Tree:
        """Returns what the model should make of them, a tree of arrays (B, ...)."""
        return list(self)[1]

    def covering(self, lo: int, hi: int) -> Batch:
        """A batch that has samples [lo, hi): this one, or the whole."""
        return (
            self if self.run is None or (self.run[0] <= lo and hi <= self.run[1]) else self.whole()
        )

    def whole(self) -> Batch:
        """The same batch with all of its samples: those that another process was to read are
        read now.
        """
        return self if self._complete is None else self._complete(self)


class Reader:
    """Makes batches of samples of a data set, on any thread or process. dataset: has
    `gather(indices)`, which gives trees of arrays (B, ...), or `__getitem__(i)`, which gives
    (sample, target). classes: number of classes, None if it has none. transform: see
    DataLoader. seed: of its random numbers.
    """

    def __init__(self, dataset: Any, classes: int | None, transform: Any, seed: int) -> None:
        self.dataset = dataset
        self.classes = classes
        self.seed = seed
        self.transforms = transforms.as_list(transform)
        self.name = type(dataset).__name__
        self._lock = threading.Lock()  # of the data set

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def begin_epoch(self, epoch: int) -> None:
        """Tells the data set the epoch, if it wants to know."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def read(
        self,
        numbers: np.ndarray,
        epoch: int,
        stopped: Callable[[], bool] = lambda: False,
        count: int | None = None,
    ) -> tuple[Tree, Tree] | None:
        """Samples and targets, trees of arrays (B, ...), after the first `count` transforms or
        all; None once `stopped()`, which is asked between two samples.
        """
        count = len(self.transforms) if count is None else count
        if not count:
            if hasattr(self.dataset, "gather"):
                with self._lock:
                    return self.dataset.gather(numbers)
            error_note = f"when sample {{}} of {self.name} was read, epoch {epoch}"
            both = self._stack_samples(self._sample, numbers, self.name, error_note, stopped)
            return self._as_seen(both) if self.transforms and both is not None else both
        draw = transforms.Draw(self.seed, epoch, numbers, count - 1)
        transform = self.transforms[count - 1]
        both = self.read(numbers, epoch, stopped, count - 1)
        if both is None:
            return None
        if isinstance(transform, transforms.Mixup):
            partner_samples = self.read(
                transform.partners(draw, len(self.dataset)), epoch, stopped, count - 1
            )
            return (
                None
                if partner_samples is None
                else transform.mixed(both, partner_samples, self.classes, draw)
            )
        if isinstance(transform, transforms.Vectorized):
            return transform.batch(both[0], draw), both[1]

        def transform_sample(position: int, number: int) -> Any:
            x, y = (mapped(lambda a: a[position], t) for t in both)
            rng = draw.generator(position)
            return (
                transform((x, y), rng)
                if isinstance(transform, transforms.Paired)
                else (transform(x, rng), y)
            )

        error_note = f"in the transform of sample {{}} of {self.name}, epoch {epoch}"
        return self._stack_samples(
            transform_sample, numbers, f"{self.name} after its transform", error_note, stopped
        )

    def _sample(self, position: int, number: int) -> Any:
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
        """What make(position, number) gives for each of the samples, stacked; `error_note` is
        added to its errors.
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

    def _as_seen(self, both: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        """Samples as a model gets them: images of bytes as float32, normalised if the data set
        says how.
        """
        inputs, labels = both
        if isinstance(inputs, np.ndarray) and inputs.dtype == np.uint8:
            every = np.arange(len(inputs))
            inputs = arrays(inputs, every, **self._scaling, name=self.name).gather(every)[0]
        return inputs, labels

    @property
    def _scaling(self) -> dict[str, Any]:
        return {
            key: getattr(self.dataset, key)
            for key in ("scale", "shift")
            if hasattr(self.dataset, key)
        }

    def dataset_of(
        self, both: tuple[Tree, Tree], numbers: np.ndarray, subject: str
    ) -> ArrayDataset:
        """A checked data set of samples that were read; `subject` says which batch they are."""
        name = f"{self.name}, {subject}"
        (inputs, labels) = both
        scaling = {}
        classified = (
            isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu"
        )
        if classified:
            max_label = np.iinfo(np.int32).max - 1 if self.classes is None else self.classes - 1
            if (wrong := outside(labels, max_label + 1)) is not None:
                raise DataError(
                    f"{name}: label {labels[wrong]} of sample {numbers[wrong]}; 0 to {max_label} "
                    "are "
                    "allowed; correct it"
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
            for subject, tree in zip(_PARTS, both, strict=True):
                for place, leaf in places(tree):
                    if wrong := [
                        n
                        for n, a in zip(numbers.tolist(), leaf, strict=True)
                        if not np.isfinite(a).all()
                    ]:
                        raise DataError(
                            f"{self.name}: {subject} {wrong[0]}{place} holds NaN or infinity"
                            f"{' after its transform' * bool(self.transforms)}; clean it, or "
                            "leave the sample out"
                        ) from None
            raise

    def batch(
        self,
        both: tuple[Tree, Tree],
        numbers: np.ndarray,
        epoch: int,
        index: int,
        run: tuple[int, int],
    ) -> Batch:
        """The batch of the samples `numbers`, of which those of `run` were read."""
        lo, hi = run
        data = self.dataset_of(both, numbers[lo:hi], f"batch {index} of epoch {epoch}")
        if hi - lo == len(numbers):
            return Batch(data, np.arange(hi, dtype=np.int64), epoch, index, numbers)
        indices = np.zeros(len(numbers), np.int64)
        indices[lo:hi] = np.arange(hi - lo)
        return Batch(
            data, indices, epoch, index, numbers, run, functools.partial(self.complete, both)
        )

    def complete(self, both: tuple[Tree, Tree], batch: Batch) -> Batch:
        """A batch with all its samples, of which those that it has, `both`, are not read again."""
        numbers = batch.numbers
        (lo, hi) = batch.run
        head, tail = (
            self.read(part, batch.epoch) if len(part) else None
            for part in (numbers[:lo], numbers[hi:])
        )
        parts = [tuple(part) for part in (head, both, tail) if part is not None]
        all_samples = mapped(lambda *arrays: np.concatenate(arrays), *parts)
        return self.batch(all_samples, numbers, batch.epoch, batch.index, (0, len(numbers)))


def array(leaf: Any, what: str) -> np.ndarray:
    """Part of a sample as an array: of Python's integers int64, of floats float32, of a picture
    uint8 (C, H, W). Raises DataError: it is no array of numbers.
    """
    try:
        values = np.asarray(leaf)
        if hasattr(leaf, "getbands"):  # a picture of Pillow
            values = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
        if values.dtype.kind not in "biuf":
            raise TypeError(f"of {values.dtype}")
    # PyTorch's own: a tensor that has a gradient
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DataError(
            f"{what} has a part that is a {type(leaf).__name__} ({problem}); arrays of numbers, "
            "numbers, and tuples or "
            "dicts of them are allowed"
        ) from None
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):  # infinity, which is reported as such
            return values.astype(np.float32, copy=False)
    return values.astype(np.int64) if values.ndim == 0 and values.dtype.kind in "iu" else values


class Stack:
    """Samples, checked against the first and put one behind the other. name: what messages call
    their data set. both: trees of arrays (B, ...): samples and targets.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.both = None
        self._form: Any = None
        self._to: list[np.ndarray] = []
        self._count = 0

    def add(self, number: int, sample: Any, room: int) -> None:
        """Puts sample `number` behind the others; `room`: how many there will be."""
        pair = (
            sample
            if isinstance(sample, Sequence) and not isinstance(sample, str) and len(sample) == 2
            else None
        )
        if pair is None:
            raise DataError(
                f"{self.name}: sample {number} is {_describe_sample(sample)}; {_EXPECTED}"
            )
        pair_arrays = tuple(
            mapped(
                lambda leaf, part_name=part_name: array(leaf, f"{self.name}: {part_name} {number}"),
                part,
            )
            for part_name, part in zip(_PARTS, pair, strict=True)
        )
        form = mapped(lambda leaf: (leaf.shape, leaf.dtype), pair_arrays)
        if self.both is None:
            self._form = form
            self.both = mapped(lambda a: np.empty((room, *a.shape), a.dtype), pair_arrays)
            self._to = leaves(self.both)
        elif form != self._form:
            for part_name, one, first in zip(_PARTS, pair_arrays, self.both, strict=True):
                actual = _describe_tree(one)
                expected = _describe_tree(mapped(lambda a: a[0], first))
                if actual != expected:
                    raise DataError(
                        f"{self.name}: {part_name} {number} is {actual}, an earlier one is "
                        f"{expected}; "
                        "all samples must have the same shape and dtype"
                    )
        for target_array, leaf in zip(self._to, leaves(pair_arrays), strict=True):
            target_array[self._count] = leaf
        self._count += 1


_PARTS = ("sample", "the target of sample")
_EXPECTED = (
    "(sample, target) expected: two arrays or numbers, or tuples or dicts of them; rows of a "
    "table become such pairs "
    "with data.columns"
)


def _describe_tree(tree: Tree) -> str:
    return ", ".join(f"{place} {a.dtype} {a.shape}".lstrip() for place, a in places(tree))


def _describe_sample(sample: Any) -> str:
    if isinstance(sample, dict):
        return f"a dict with {', '.join(map(repr, sample))}"
    parts = (
        ", ".join(type(part).__name__ for part in sample)
        if isinstance(sample, list | tuple)
        else ""
    )
    return f"{type(sample).__name__} ({parts})" if parts else type(sample).__name__
