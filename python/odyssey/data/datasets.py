"""Data sets that fit in memory: the checked array pair, and MNIST, Fashion-MNIST and CIFAR-10
read from their files.

Images keep the dtype of the file (uint8); two numbers per channel normalise them when a batch is
gathered.

MNIST comes with the package: Yann LeCun, Corinna Cortes, Christopher Burges; licence CC BY-SA 3.0
(mnist/LICENSE.txt).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from odyssey.data.idx import read_idx, read_unpacked
from odyssey.data.nested import Form, Leaf, leaves, mapped
from odyssey.errors import ConfigError, DataError, check_integer, printable

from ..base.paths import expand_path
from ..base.requirements import REINSTALL
from ..compile.library import cache_dir

if TYPE_CHECKING:
    from .reader import Batch

_SHIPPED = Path(__file__).parent / "mnist"

# SHA-256 of the uncompressed files as Yann LeCun published them.
_MNIST_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
_CIFAR_RECORD = 1 + 3 * 32 * 32
FINGERPRINT_BYTES = 1 << 22  # that a fingerprint is of, about 10 ms


def digest(*parts: np.ndarray | str) -> str:
    """Returns the first 16 hexadecimal digits of the SHA-256 of arrays and strings."""
    hasher = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            # The end mark keeps ("ab", "c") apart from ("a", "bc").
            hasher.update(part.encode() + b"\0")
        else:
            hasher.update(np.ascontiguousarray(part).tobytes())
    return hasher.hexdigest()[:16]


def outside(numbers: np.ndarray, count: int) -> int | None:
    """Returns the index of the first integer that is not in 0..count-1, or None if all are."""
    if not numbers.size or (numbers.min() >= 0 and numbers.max() < count):
        return None
    return int(np.flatnonzero((numbers < 0) | (numbers >= count))[0])


def described(dataset: Any) -> str:
    """Returns a description of any data set in one line, as for `repr`."""
    name = getattr(dataset, "name", None)
    shape = getattr(dataset, "sample_shape", None)
    classes = getattr(dataset, "classes", None)
    name_text = f"{name}, " if isinstance(name, str) else ""
    shape_text = "" if shape is None else f" of {shape}"
    classes_text = f", classes={reprlib.repr(classes)}" if classes else ""
    return f"{type(dataset).__name__}({name_text}{len(dataset)} samples{shape_text}{classes_text})"


def _concatenate(trees: Sequence[Any], name: str) -> Any:
    """Returns trees of arrays with samples in rows as one tree.

    Raises DataError: they are no trees of one form, or their samples have different shapes.
    """
    try:
        return mapped(lambda *arrays: np.concatenate(arrays), *trees)
    except (ValueError, TypeError, KeyError):
        shapes = [[leaf.shape[1:] for leaf in leaves(tree)] for tree in trees]
        pairs = [pair for s in shapes for pair in zip(shapes[0], s, strict=False)]
        first, other = next((p for p in pairs if p[0] != p[1]), (shapes[0], shapes[-1]))
        raise DataError(
            f"{name}: accumulation_steps joins batches, but their samples have the shapes "
            f"{first} and {other}; use samples of one shape, for example padded to one length"
        ) from None


class Described:
    """Base of data sets: its `repr` describes the samples."""

    __repr__ = described


class Gathered(Described):
    """Base of data sets whose `gather(indices)` reads many samples at a time.

    Reading one sample uses `gather` too.
    """

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        """Returns sample i and its target, as a model and a loss receive them.

        Negative numbers count from the end. Raises IndexError if there is no such sample.
        """
        index = range(len(self))[i]  # checks the number, and resolves a negative one
        sample, target = self.gather(np.array([index]))
        return mapped(lambda a: a[0], sample), mapped(lambda a: a[0], target)

    def fingerprint(self) -> str:
        """Returns 16 hexadecimal digits that identify the samples.

        They depend on about FINGERPRINT_BYTES of the samples, taken at even distances.
        """
        first_sample = self.gather(np.zeros(1, np.int64))
        sample_bytes = sum(leaf.nbytes for leaf in leaves(first_sample))
        count = min(len(self), 10_000, max(3, FINGERPRINT_BYTES // sample_bytes))
        indices = np.linspace(0, len(self) - 1, count).astype(np.int64)
        return digest(*leaves(self.gather(indices)))


@dataclass(frozen=True, eq=False, repr=False)
class ArrayDataset(Gathered):
    """Samples and targets in memory. `arrays` and `load` build it.

    The constructor checks that its parts fit each other, and raises DataError if they don't.

    Args:
        images: the samples: (N, C, H, W) or (N, F), uint8 or float32, C-contiguous, N >= 1. Or any
            tree (nested.py) of C-contiguous float32 or int32 arrays (N, ...).
        labels: the targets: (N,) int32 with 0 <= label < classes. Or, if `classes` is 0, any tree
            of float32 or int32 arrays (N, ...).
        classes: the number of classes. 0 means that the targets are no classes.
        scale: (C,) float32, or (1,) for samples (N, F). A pixel p of channel c stands for the value
            p * scale[c] + shift[c]. Trees don't use it.
        shift: see `scale`.
        name: the name in error messages.
        columns: the `tables.Columns` of samples that come from a table.
        class_names: the names of the classes, if they are known.
    """

    images: Any
    labels: Any
    classes: int
    scale: np.ndarray
    shift: np.ndarray
    name: str
    columns: Any = None
    class_names: tuple[str, ...] = ()

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> ArrayDataset:
        """Returns the samples of several batches, one after the other.

        Raises DataError: samples of the batches have different shapes.
        """
        first = batches[0].dataset
        scaling = [{"scale": b.dataset.scale, "shift": b.dataset.shift} for b in batches]
        # then bytes stay bytes
        alike = all(np.array_equal(s[k], scaling[0][k]) for s in scaling for k in s)
        parts = [
            b.dataset.rows(b.indices) if alike else b.dataset.gather(b.indices) for b in batches
        ]
        x, y = _concatenate(parts, first.name)
        about = {"classes": max(b.dataset.classes for b in batches), "name": first.name}
        return cls._built(x, y, **about, **(scaling[0] if alike else {}))

    @classmethod
    def _built(cls, x: Any, y: Any, **about: Any) -> ArrayDataset:
        """Returns a data set of this kind; `about`: see `arrays`."""
        return arrays(x, y, **about)

    def __post_init__(self) -> None:
        if self.normalised:
            _check_images(self.images, self.name)
        for leaf in leaves(self.labels) + ([] if self.normalised else leaves(self.images)):
            if (
                leaf.dtype not in (np.int32, np.float32)
                or not leaf.flags.c_contiguous
                or len(leaf) != len(self)
            ):
                raise DataError(
                    f"{self.name}: an array is {leaf.dtype} {leaf.shape}; C-contiguous int32 or "
                    f"float32 of {len(self)} samples expected; use arrays()"
                )
        if self.classes:
            _check_labels(self.labels, len(self), self.classes, self.name)
        for field, values in (("scale", self.scale), ("shift", self.shift)):
            if values.dtype != np.float32 or values.shape != (self._channels,):
                actual = f"{values.dtype} {values.shape}"
                expected = f"float32 ({self._channels},)"
                raise DataError(f"{self.name}: {field} is {actual}; {expected} expected")

    @functools.cached_property
    def normalised(self) -> bool:
        """Tells whether the samples are one array that `scale` and `shift` apply to."""
        images = self.images
        return (
            isinstance(images, np.ndarray)
            and images.dtype in (np.uint8, np.float32)
            and images.ndim in (2, 4)
        )

    @property
    def _channels(self) -> int:
        """The length of `scale` and `shift`."""
        return self.images.shape[1] if self.normalised and self.images.ndim == 4 else 1

    @property
    def sample_shape(self) -> Any:
        """The shape of one sample: (C, H, W) or (F,), or a tree of shapes."""
        return mapped(lambda a: a.shape[1:], self.images)

    @functools.cached_property
    def form(self) -> Form:
        """The form of a sample and its target, as a model and a loss receive them."""

        def describe_leaf(array: np.ndarray) -> Leaf:
            return Leaf(array.shape[1:], array.dtype.name)

        if self.normalised:
            inputs = Leaf(self.sample_shape, "float32", normalised=True)
        else:
            inputs = mapped(describe_leaf, self.images)
        return Form(inputs, mapped(describe_leaf, self.labels), classes=self.classes > 0)

    @functools.cached_property
    def gathered(self) -> list[np.ndarray]:
        """The arrays that batches take rows of without changing the values.

        These are the arrays of a tree of samples, then the arrays of the targets.
        """
        return ([] if self.normalised else leaves(self.images)) + leaves(self.labels)

    @property
    def all_arrays(self) -> list[np.ndarray]:
        """All arrays: the one that is normalised, if there is one, then `gathered`."""
        return ([self.images] if self.normalised else []) + self.gathered

    def __len__(self) -> int:
        return len(leaves(self.images)[0])

    def gather(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Returns the samples and targets at `indices` (B,), in that order.

        Images become float32 (B, *sample_shape), normalised. Labels are int32 (B,). Trees stay
        trees. All arrays are new. Raises DataError for an index outside 0..N-1: a negative index
        does not count from the end.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if (wrong := outside(indices, len(self))) is not None:
            raise DataError(
                f"{self.name}: index {indices[wrong]} is not a sample; 0 to {len(self) - 1} are "
                "allowed"
            )
        images, targets = self.rows(indices)
        if self.normalised:
            per_channel = (-1,) + (1,) * (self.images.ndim - 2)
            images = images * self.scale.reshape(per_channel)
            images += self.shift.reshape(per_channel)
        return images, targets

    def rows(self, which: Any) -> tuple[Any, Any]:
        """Returns samples and targets as they are in memory, without normalising them.

        which: indices (B,), a mask (N,) or a slice.
        """
        return mapped(lambda a: a[which], self.images), mapped(lambda a: a[which], self.labels)

    def take(self, n: int) -> ArrayDataset:
        """Returns the first n samples as a data set that shares the memory of this one.

        Raises ConfigError unless 1 <= n <= N.
        """
        n = check_integer(f"the number of samples to take from {self.name}", n, 1, len(self))
        images, labels = self.rows(slice(n))
        return dataclasses.replace(self, images=images, labels=labels)


def arrays(
    images: Any,
    labels: Any,
    *,
    classes: int | None = None,
    scale: float | np.ndarray = 1.0,
    shift: float | np.ndarray = 0.0,
    name: str = "arrays",
) -> ArrayDataset:
    """Builds a checked data set from your own arrays, for example images and their classes.

    Args:
        images: (N, C, H, W), (N, H W) which becomes (N, 1, H, W), or (N, F). uint8 stays uint8.
            float16 and float64 become float32. A C-contiguous uint8 or float32 array is not copied,
            so leave it unchanged while the data set is in use. Or a tuple or dict of arrays
            (N, ...), or integers (N, ...): floats become float32, integers int32. A model is called
            as model(*inputs) with a tuple, as model(inputs) with a dict.
        labels: classes (N,) of any integer type, copied to int32. Or any other targets, which a
            loss receives as they are: numbers (N, ...), integers (N, T), a tuple or dict of arrays.
        classes: the number of classes. None means the largest label plus one. 0 means that integers
            (N,) are no classes.
        scale: one number, or one per channel. A pixel p stands for the value p * scale + shift. For
            (p / 255 - mean) / std of uint8 images, pass scale=1 / (255 * std), shift=-mean / std.
        shift: see `scale`.
        name: the name of the data set in error messages.

    Returns:
        An ArrayDataset whose arrays are read-only views.

    Raises:
        DataError: another dtype or shape, different lengths, no sample, NaN or infinity in floats,
            integers beyond int32, a label below 0 or not below `classes`.
        ConfigError: a wrong `classes`, `scale` or `shift`.
    """
    if classes is not None:
        classes = check_integer(f"{name}: classes", classes, 0, 2**31 - 1)
    if not isinstance(images, (tuple, dict)):
        images = np.asarray(images)
    if not isinstance(labels, (tuple, dict)):
        labels = np.asarray(labels)
    # Integers other than bytes are tokens or categories, not pixels: they are not normalised.
    if isinstance(images, np.ndarray) and (
        images.dtype == np.uint8 or images.dtype.kind not in "iub"
    ):
        images = _convert_images(images, name)
        _check_images(images, name)
        channels = images.shape[1] if images.ndim == 4 else 1
    else:
        images = _convert_tree(images, None, "inputs", name)
        channels = 1
    count = len(leaves(images)[0])
    labels_look_like_classes = (
        isinstance(labels, np.ndarray) and labels.dtype.kind in "iu" and labels.ndim < 2
    )
    if classes or (classes is None and labels_look_like_classes):
        if labels.dtype.kind not in "iu":
            raise DataError(
                f"{name}: labels are {labels.dtype}; classes are integers; for others leave out "
                "classes="
            )
        if classes is None:
            classes = min(max(int(labels.max(initial=0)), 0) + 1, 2**31 - 1)
        advice = (
            "correct the labels or the number of classes; give classes=0 if the loss is to "
            "ignore some"
        )
        _check_labels(labels, count, classes, name, advice)
        labels = labels.astype(np.int32)
    else:
        labels = _convert_tree(labels, count, "targets", name)
        classes = 0
    return ArrayDataset(
        images=mapped(_make_read_only, images),
        labels=mapped(_make_read_only, labels),
        classes=classes,
        scale=_expand_per_channel(scale, channels, "scale", name),
        shift=_expand_per_channel(shift, channels, "shift", name),
        name=name,
    )


@dataclass(frozen=True)
class DatasetInfo:
    """Facts about a data set that are known before its files are read."""

    shape: tuple[int, int, int]  # (C, H, W) of one sample
    classes: int
    mean: tuple[float, ...]  # per channel, of pixels divided by 255
    std: tuple[float, ...]
    train_files: tuple[str, ...]  # for IDX the images, then the labels, each also allowed with .gz
    test_files: tuple[str, ...]
    # The folders below --data-dir that may hold the files. The most specific one comes first.
    folders: tuple[str, ...]


_IDX_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
_IDX_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

DATASETS: dict[str, DatasetInfo] = {
    "mnist": DatasetInfo(
        shape=(1, 28, 28),
        classes=10,
        mean=(0.1307,),
        std=(0.3081,),
        train_files=_IDX_TRAIN,
        test_files=_IDX_TEST,
        folders=("mnist", "MNIST/raw", "."),
    ),
    "fashion-mnist": DatasetInfo(
        shape=(1, 28, 28),
        classes=10,
        mean=(0.2860,),
        std=(0.3530,),
        train_files=_IDX_TRAIN,
        test_files=_IDX_TEST,
        folders=("fashion-mnist", "FashionMNIST/raw", "."),
    ),
    "cifar10": DatasetInfo(
        shape=(3, 32, 32),
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        train_files=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test_files=("test_batch.bin",),
        folders=("cifar10/cifar-10-batches-bin", "cifar10", "cifar-10-batches-bin", "."),
    ),
}


def load(name: str, *, train: bool, data_dir: Path | None = None) -> ArrayDataset:
    """Reads the training or the test part of a known data set.

    Args:
        name: "mnist", "fashion-mnist" or "cifar10" (the keys of DATASETS).
        train: True for the training part, False for the test part.
        data_dir: the folder with the original files, or with a subfolder that has them. It may hold
            other data in the same format. None reads the MNIST that comes with the package, and
            verifies its content by SHA-256.

    Returns:
        uint8 images (N, C, H, W), with the scale and shift for (pixel / 255 - mean) / std.

    Raises:
        ConfigError: an unknown name.
        DataError: missing, damaged, altered or mismatched files.
    """
    if name not in DATASETS:
        raise ConfigError(f"[data] dataset is {name!r}; allowed are {', '.join(DATASETS)}")
    info = DATASETS[name]
    files = _find_files(name, train, data_dir)
    images, labels = _read_cifar(files) if name == "cifar10" else _read_idx_pair(name, files)
    mean = np.array(info.mean, np.float64)
    std = np.array(info.std, np.float64)
    return arrays(
        images,
        labels,
        classes=info.classes,
        scale=1.0 / (255.0 * std),
        shift=-mean / std,
        name=name,
    )


def _find_files(name: str, train: bool, data_dir: Path | None) -> list[Path]:
    """Returns the files of one part of a known data set. All are in the same folder.

    Raises DataError with the names of the missing files if no folder has them all.
    """
    info = DATASETS[name]
    file_names = info.train_files if train else info.test_files
    if data_dir is None and name != "mnist":
        raise DataError(
            f"{name} does not come with odyssey; get "
            f"{', '.join(info.train_files + info.test_files)} and give their folder with --data-dir"
        )
    root = _SHIPPED if data_dir is None else expand_path(data_dir)
    if not os.path.isdir(root):  # also False for a path that is too long or malformed
        raise DataError(
            f"--data-dir {printable(str(root), limit=200)} is not a folder; give that of "
            f"{name}'s files"
        )
    paths_per_folder = [
        [_find_plain_or_gz(root / folder, file) for file in file_names] for folder in info.folders
    ]
    # The folder that lacks the fewest files. `min` returns the first one of several.
    best_paths = min(paths_per_folder, key=lambda paths: paths.count(None))
    if None not in best_paths:
        return best_paths
    missing = ", ".join(
        file for file, path in zip(file_names, best_paths, strict=True) if path is None
    )
    if data_dir is None:
        raise DataError(
            f"{missing} is missing from the installation; {REINSTALL}, or use --data-dir"
        )
    hint = "the binary version of CIFAR-10" if name == "cifar10" else "plain or .gz"
    raise DataError(
        f"{name}: {missing} not found in {root} nor in its folders "
        f"{', '.join(folder for folder in info.folders if folder != '.')}; put the files there "
        f"({hint}) or give another --data-dir"
    )


def _find_plain_or_gz(folder: Path, file: str) -> Path | None:
    """Returns the path of a file, or of its gzip copy, or None if the folder has neither."""
    candidates = (folder / file, folder / f"{file}.gz")
    return next((path for path in candidates if os.path.isfile(path)), None)


def _read_idx_pair(name: str, files: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Reads MNIST or Fashion-MNIST.

    Args:
        name: the key of the data set in DATASETS.
        files: the file of the images and the file of the labels.

    Returns:
        The images (N, H, W) and the labels (N,), both uint8.

    Raises:
        DataError: a file is damaged or altered, or the two don't belong together.
    """
    images_path, labels_path = files
    is_shipped = name == "mnist" and all(
        path.parent.resolve() == _SHIPPED.resolve() for path in files
    )
    # Only the files of the package must have the known content.
    images_sha256, labels_sha256 = (
        _MNIST_SHA256[path.name.removesuffix(".gz")] if is_shipped else None for path in files
    )
    if is_shipped and images_path.suffix == ".gz":
        images = read_unpacked(images_path, cache_dir() / "data", ndim=3, sha256=images_sha256)
    else:
        images = read_idx(images_path, ndim=3, sha256=images_sha256)
    labels = read_idx(labels_path, ndim=1, sha256=labels_sha256)
    _, expected_height, expected_width = DATASETS[name].shape
    count, height, width = images.shape
    if (height, width) != (expected_height, expected_width):
        raise DataError(
            f"{images_path} has images of {height} x {width}; {name} has "
            f"{expected_height} x {expected_width}; check that it is the right file"
        )
    if count != len(labels):
        raise DataError(
            f"{images_path} has {count} images but {labels_path} has {len(labels)} labels; they "
            "must belong together"
        )
    _check_labels(labels, count, DATASETS[name].classes, str(labels_path), _FILE_ADVICE)
    if name == "fashion-mnist":
        _refuse_mnist(labels_path, labels)
    return images, labels


def _refuse_mnist(path: Path, labels: np.ndarray) -> None:
    """Raises DataError if the labels of Fashion-MNIST are the ones of MNIST.

    Both data sets have the same file names. With a swapped folder, training would look right.
    """
    # The header of an IDX file of bytes with one dimension. The digests include it.
    header = b"\x00\x00\x08\x01" + len(labels).to_bytes(4, "big")
    if hashlib.sha256(header + labels.tobytes()).hexdigest() in _MNIST_SHA256.values():
        raise DataError(
            f"{path} is of MNIST, not of fashion-mnist; give another --data-dir or use mnist"
        )


def _read_cifar(files: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Reads files of CIFAR-10 as images (N, 3, 32, 32) and labels (N,), both uint8."""
    records = np.concatenate([_read_cifar_records(path) for path in files])
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
    labels = np.ascontiguousarray(records[:, 0])
    return images, labels


def _read_cifar_records(path: Path) -> np.ndarray:
    """Reads one CIFAR-10 binary file as uint8 (records, 3073).

    A record is the label, then 1024 bytes each of red, green and blue. Raises DataError for a file
    that cannot be read, has another length, or holds a wrong label.
    """
    try:
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            # Checked first, because a wrong file may be too large for memory.
            if not file_size or file_size % _CIFAR_RECORD:
                raise DataError(
                    f"{path} holds {file_size} bytes; a non-zero multiple of {_CIFAR_RECORD} "
                    "expected; get the file again"
                )
            content = file.read(file_size)
            if len(content) != file_size:
                raise DataError(f"{path} has become shorter while it was read; get the file again")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the path") from None
    except MemoryError:
        raise DataError(
            f"{path} ({file_size} bytes) does not fit into memory; use a machine with more"
        ) from None
    records = np.frombuffer(content, np.uint8).reshape(-1, _CIFAR_RECORD)
    _check_labels(records[:, 0], len(records), DATASETS["cifar10"].classes, str(path), _FILE_ADVICE)
    return records


def _convert_tree(tree: Any, count: int | None, role: str, name: str) -> Any:
    """Converts a tree of array-likes to C-contiguous float32 and int32 arrays.

    Args:
        tree: array-likes (N, ...) of floats, integers or booleans.
        count: the number of samples that each must have. None means that of the first array.
        role: the name of the tree in messages: "inputs" or "targets".
        name: the name of the data set in messages.

    Raises:
        DataError: an array has another dtype or number of samples, or values that don't fit.
    """
    if not leaves(tree):
        raise DataError(
            f"{name}: the {role} are an empty {type(tree).__name__}; give at least one array"
        )

    def convert_leaf(leaf: Any) -> np.ndarray:
        nonlocal count
        array = np.asarray(leaf)
        count = len(array) if count is None and array.ndim else count
        if array.ndim < 1 or len(array) != count or array.size == 0:
            raise DataError(
                f"{name}: an array of the {role} has the shape {array.shape}; "
                f"({count or 'samples'}, ...) expected, with at least one number per sample"
            )
        if array.dtype.kind == "f":
            array = _convert_floats(array, name, role)
        elif array.dtype.kind in "iub":
            int32_range = np.iinfo(np.int32)
            if (
                array.dtype.kind != "b"
                and not int32_range.min <= array.min() <= array.max() <= int32_range.max
            ):
                raise DataError(
                    f"{name}: the {role} hold integers from {array.min()} to {array.max()}; "
                    "those of int32 are allowed"
                )
            array = array.astype(np.int32, copy=False)
        else:
            raise DataError(
                f"{name}: the {role} are {array.dtype}; floats, integers and booleans are allowed"
            )
        return np.ascontiguousarray(array)

    return mapped(convert_leaf, tree)


def _convert_images(images: np.ndarray, name: str) -> np.ndarray:
    """Converts images or rows to a C-contiguous uint8 or float32 array.

    (N, H, W) becomes (N, 1, H, W). Raises DataError for another dtype, or numbers that don't fit
    float32.
    """
    if images.ndim == 3:
        images = images[:, None]
    if images.dtype.kind == "f":
        images = _convert_floats(images, name, "images")
    elif images.dtype != np.uint8:
        raise DataError(
            f"{name}: images are {images.dtype}; uint8, other integers and floats are allowed"
        )
    return np.ascontiguousarray(images)


def _convert_floats(array: np.ndarray, name: str, role: str) -> np.ndarray:
    """Converts an array of floats to float32.

    Raises DataError for NaN, infinity, or a double that is too large for float32.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        array = array.astype(np.float32, copy=False)
        # The sum is NaN or infinite exactly if a value is, because float64 has the range. Unlike
        # isfinite() of all values, it needs no second array.
        if np.isfinite(array.sum(dtype=np.float64)):
            return array
    index = tuple(int(axis) for axis in np.argwhere(~np.isfinite(array))[0])
    raise DataError(
        f"{name}: sample {index[0]} of the {role} holds {array[index]} at index {index}; finite "
        "float32 expected; clean it with np.nan_to_num, or leave the sample out"
    )


def _check_images(images: np.ndarray, name: str) -> None:
    """Raises DataError unless images are C-contiguous uint8 or float32 of a known shape."""
    if images.ndim not in (2, 4):
        raise DataError(
            f"{name}: images have the shape {images.shape}; (N, C, H, W), (N, H, W) or (N, F) "
            "are allowed"
        )
    if 0 in images.shape:
        raise DataError(
            f"{name}: images have the shape {images.shape}; at least one sample of one pixel is "
            "needed"
        )
    if images.dtype not in (np.uint8, np.float32) or not images.flags.c_contiguous:
        raise DataError(
            f"{name}: images are {images.dtype}, strides {images.strides}; C-contiguous uint8 or "
            "float32 expected; use odyssey.data.arrays, which converts"
        )


_FILE_ADVICE = "check that it is the right file"


def _check_labels(
    labels: np.ndarray,
    count: int,
    classes: int,
    name: str,
    advice: str = "correct the labels or the number of classes",
) -> None:
    """Raises DataError unless there are `count` labels, each in 0..classes-1.

    name: the name of the data set or file in messages. advice: how to correct a wrong label.
    """
    if labels.shape != (count,):
        raise DataError(
            f"{name}: {count} samples but labels of the shape {labels.shape}; ({count},) expected "
            "of classes; leave out classes= for other targets"
        )
    if (wrong := outside(labels, classes)) is not None:
        raise DataError(
            f"{name}: label {labels[wrong]} at index {wrong}; 0 to {classes - 1} are allowed; "
            f"{advice}"
        )


def _expand_per_channel(
    value: float | np.ndarray, channels: int, field: str, name: str
) -> np.ndarray:
    """Returns one float32 per channel, read-only, from one number or one per channel.

    field: "scale" or "shift", for messages. Raises ConfigError for anything else.
    """
    # A value that isn't a number stays NaN, so it is reported like NaN.
    numbers = np.full((), np.nan, np.float32)
    with np.errstate(over="ignore"), contextlib.suppress(TypeError, ValueError):
        numbers = np.asarray(value, np.float64).astype(np.float32)
    if numbers.ndim == 0:
        numbers = np.full(channels, numbers)
    if numbers.shape != (channels,) or not np.isfinite(numbers).all():
        raise ConfigError(
            f"{name}: {field} is {value!r}; give a finite number, or one per channel ({channels})"
        )
    return _make_read_only(numbers)


def _make_read_only(array: np.ndarray) -> np.ndarray:
    """Returns a read-only view. The array itself stays writeable."""
    view = array.view()
    view.flags.writeable = False
    return view
