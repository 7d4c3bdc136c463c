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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odyssey.data.idx import read_idx, read_unpacked
from odyssey.data.nested import Form, Leaf, leaves, mapped
from odyssey.errors import ConfigError, DataError, check_integer, printable

from ..base.requirements import REINSTALL
from ..build.library import cache_dir

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
    """16 hexadecimal digits of the SHA-256 of arrays and texts."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(
            part.encode() + b"\0" if isinstance(part, str) else np.ascontiguousarray(part).tobytes()
        )
    return hasher.hexdigest()[:16]


def outside(numbers: np.ndarray, count: int) -> int | None:
    """The place of the first of some integers that is not in 0..count-1; None if all are."""
    if not numbers.size or (numbers.min() >= 0 and numbers.max() < count):
        return None
    return int(np.flatnonzero((numbers < 0) | (numbers >= count))[0])


def described(dataset: Any) -> str:
    """Any data set as one line."""
    shape = getattr(dataset, "sample_shape", None)
    classes = getattr(dataset, "classes", None)
    parts = [f"{len(dataset)} samples"] + [f"of {shape}"] * (shape is not None)
    classes_text = f", classes={reprlib.repr(classes)}" if classes else ""
    name = f"{dataset.name}, " if isinstance(getattr(dataset, "name", None), str) else ""
    return f"{type(dataset).__name__}({name}{' '.join(parts)}{classes_text})"


class Described:
    """A data set that says what it holds."""

    __repr__ = described


class Gathered(Described):
    """A data set whose samples are read many at a time, by `gather`; one is such a read too."""

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        """(sample, target) number i, as a model and a loss are given them; negative numbers
        count from the end.
        """
        both = self.gather(np.array([range(len(self))[i]]))
        return tuple(mapped(lambda a: a[0], tree) for tree in both)

    def fingerprint(self) -> str:
        """16 hexadecimal digits that stand for the samples; of many, those at even distances,
        FINGERPRINT_BYTES.
        """
        size = sum(leaf.nbytes for leaf in leaves(self.gather(np.zeros(1, np.int64))))
        count = min(len(self), 10_000, max(3, FINGERPRINT_BYTES // size))
        return digest(*leaves(self.gather(np.linspace(0, len(self) - 1, count).astype(np.int64))))


@dataclass(frozen=True, eq=False, repr=False)
class ArrayDataset(Gathered):
    """Samples and targets in memory.

    Made by `arrays` or `load`; whatever makes it, its parts fit each other.

    images: (N, C, H, W) or (N, F), uint8 or float32, C-contiguous, N >= 1; or any tree (nested.py)
        of C-contiguous float32 or int32 arrays (N, ...).
    labels: (N,) int32, 0 <= label < classes; or, if `classes` is 0, any tree of float32 or int32
    arrays (N, ...). classes: number of classes; 0: the targets are no classes. scale, shift: (C,)
    float32, (1,) for (N, F); a pixel p of channel c stands for the value p * scale[c] + shift[c].
        Trees are taken as they are.
    name: what error messages call it. columns, class_names: of (N, F) that come from a table
    (tables.Columns), and what classes are called, where that is
        known.
    Raises DataError where one of these does not hold.
    """

    images: Any
    labels: Any
    classes: int
    scale: np.ndarray
    shift: np.ndarray
    name: str
    columns: Any = None
    class_names: tuple[str, ...] = ()

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
                    f"float32 of {len(self)} "
                    "samples expected; use arrays()"
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
        """Returns whether samples are one array that goes through `scale` and `shift`."""
        x = self.images
        return isinstance(x, np.ndarray) and x.dtype in (np.uint8, np.float32) and x.ndim in (2, 4)

    @property
    def _channels(self) -> int:
        return self.images.shape[1] if self.normalised and self.images.ndim == 4 else 1

    @property
    def sample_shape(self) -> Any:
        """Shape of one sample: (C, H, W) or (F,), or a tree of shapes."""
        return mapped(lambda a: a.shape[1:], self.images)

    @functools.cached_property
    def form(self) -> Form:
        """Form of a sample and its target, as a model and a loss are given them."""

        def leaf(a: np.ndarray) -> Leaf:
            return Leaf(a.shape[1:], a.dtype.name)

        inputs = (
            Leaf(self.sample_shape, "float32", True)
            if self.normalised
            else mapped(leaf, self.images)
        )
        return Form(inputs, mapped(leaf, self.labels), self.classes > 0)

    @functools.cached_property
    def gathered(self) -> list[np.ndarray]:
        """The arrays that are taken by rows as they are: those of the targets, behind those of a
        tree of samples.
        """
        return ([] if self.normalised else leaves(self.images)) + leaves(self.labels)

    @property
    def all_arrays(self) -> list[np.ndarray]:
        """Returns those arrays behind the one that is normalised."""
        return ([self.images] if self.normalised else []) + self.gathered

    def __len__(self) -> int:
        return len(leaves(self.images)[0])

    def gather(self, indices: np.ndarray) -> tuple[Any, Any]:
        """The samples at `indices` (B,), in that order: images float32 (B, *sample_shape),
        normalised, and labels int32 (B,); trees stay trees. All arrays are new. Raises
        DataError for an index outside 0..N-1 (a negative one does not count from the end).
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
        """Samples and targets as they are held, by their numbers or a slice."""
        return mapped(lambda a: a[which], self.images), mapped(lambda a: a[which], self.labels)

    def take(self, n: int) -> ArrayDataset:
        """The first n samples as a data set that shares this one's memory; ConfigError unless 1
        <= n <= N.
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
    """Make a checked data set of your own arrays: of images or rows of numbers and their
    classes, or of any others.

    images: (N, C, H, W), (N, H, W) which becomes (N, 1, H, W), or (N, F). uint8 stays uint8;
        float16 and float64 become float32. A C-contiguous uint8 or float32 array is not copied:
        leave it unchanged while the data set is in use. Or a tuple or dict of arrays (N, ...), or
        integers (N, ...): floats become float32, integers int32. A model is called as
        model(*inputs) with a tuple, as model(inputs) with a dict.
    labels: classes (N,) of any integer type, copied to int32. Or any other targets, which a loss is
        given as they are:
        numbers (N, ...), integers (N, T), a tuple or dict of arrays.
    classes: number of classes; the largest label plus one if None. 0: integers (N,) are no classes.
    scale, shift: one number, or one per channel; a pixel p stands for the value p * scale + shift.
    To have
        (p / 255 - mean) / std of uint8 images, give 1 / (255 * std) and -mean / std.
    Returns an ArrayDataset whose arrays are read-only views. Raises DataError for another dtype or
    shape, different lengths, no sample, NaN or infinity in floats, integers beyond int32, a label
    below 0 or not below `classes`; ConfigError for a wrong `classes`, `scale` or `shift`.
    """
    if classes is not None:
        classes = check_integer(f"{name}: classes", classes, 0, 2**31 - 1)
    images, labels = (
        t if isinstance(t, (tuple, dict)) else np.asarray(t) for t in (images, labels)
    )
    if isinstance(images, np.ndarray) and (
        images.dtype == np.uint8 or images.dtype.kind not in "iub"
    ):
        images = _as_images(images, name)
        _check_images(images, name)
        channels = images.shape[1] if images.ndim == 4 else 1
    else:
        images = _as_tree(images, None, "inputs", name)
        channels = 1
    count = len(leaves(images)[0])
    integers = isinstance(labels, np.ndarray) and labels.dtype.kind in "iu" and labels.ndim < 2
    if classes or (classes is None and integers):
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
        labels = _as_tree(labels, count, "targets", name)
        classes = 0
    images, labels = (mapped(_read_only, tree) for tree in (images, labels))
    both = (
        _per_channel(v, channels, field, name) for field, v in (("scale", scale), ("shift", shift))
    )
    return ArrayDataset(images, labels, classes, *both, name)


@dataclass(frozen=True)
class DatasetInfo:
    """Facts about a data set that are known before its files are read."""

    shape: tuple[int, int, int]  # (C, H, W) of one sample
    classes: int
    mean: tuple[float, ...]  # per channel, of pixels divided by 255
    std: tuple[float, ...]
    train_files: tuple[str, ...]  # for IDX the images, then the labels, each also allowed with .gz
    test_files: tuple[str, ...]
    # where under a data folder the files may be, the most telling place first
    folders: tuple[str, ...]


_IDX_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
_IDX_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

DATASETS: dict[str, DatasetInfo] = {
    "mnist": DatasetInfo(
        (1, 28, 28), 10, (0.1307,), (0.3081,), _IDX_TRAIN, _IDX_TEST, ("mnist", "MNIST/raw", ".")
    ),
    "fashion-mnist": DatasetInfo(
        (1, 28, 28),
        10,
        (0.2860,),
        (0.3530,),
        _IDX_TRAIN,
        _IDX_TEST,
        ("fashion-mnist", "FashionMNIST/raw", "."),
    ),
    "cifar10": DatasetInfo(
        (3, 32, 32),
        10,
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        ("test_batch.bin",),
        ("cifar10/cifar-10-batches-bin", "cifar10", "cifar-10-batches-bin", "."),
    ),
}


def load(name: str, *, train: bool, data_dir: Path | None = None) -> ArrayDataset:
    """Read the training or the test part of a known data set.

    name: "mnist", "fashion-mnist" or "cifar10" (the keys of DATASETS). train: True for the training
    part, False for the test part. data_dir: folder with the original files, or with a subfolder
    that has them. None reads the MNIST that comes with
        the package, whose content is verified by SHA-256; your own folder may hold other data in
        the same format.
    Returns uint8 images (N, C, H, W) with the scale and shift that give (pixel / 255 - mean) / std.
    Raises ConfigError for an unknown name; DataError for missing, damaged, altered or mismatched
    files.
    """
    if name not in DATASETS:
        raise ConfigError(f"[data] dataset is {name!r}; allowed are {', '.join(DATASETS)}")
    info = DATASETS[name]
    files = _find(name, train, data_dir)
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


def _find(name: str, train: bool, data_dir: Path | None) -> list[Path]:
    """The files of one part, all in one folder; DataError that names the missing ones if no
    folder has them all.
    """
    info = DATASETS[name]
    file_names = info.train_files if train else info.test_files
    if data_dir is None and name != "mnist":
        raise DataError(
            f"{name} does not come with odyssey; get "
            f"{', '.join(info.train_files + info.test_files)} "
            "and give their folder with --data-dir"
        )
    root = _SHIPPED if data_dir is None else Path(data_dir)
    if not os.path.isdir(root):  # False as well for a name that no file can have
        raise DataError(
            f"--data-dir {printable(str(root), limit=200)} is not a folder; give that of "
            f"{name}'s files"
        )
    tried = [[_in_folder(root / folder, file) for file in file_names] for folder in info.folders]
    best = min(tried, key=lambda paths: paths.count(None))  # the first of the most telling
    if None not in best:
        return best
    missing = ", ".join(file for file, path in zip(file_names, best, strict=True) if path is None)
    if data_dir is None:
        raise DataError(
            f"{missing} is missing from the installation; {REINSTALL}, or use --data-dir"
        )
    hint = "the binary version of CIFAR-10" if name == "cifar10" else "plain or .gz"
    raise DataError(
        f"{name}: {missing} not found in {root} nor in its folders "
        f"{', '.join(folder for folder in info.folders if folder != '.')}; put the files there "
        f"({hint}) "
        "or give another --data-dir"
    )


def _in_folder(folder: Path, file: str) -> Path | None:
    return next(
        (path for path in (folder / file, folder / f"{file}.gz") if os.path.isfile(path)), None
    )


def _read_idx_pair(name: str, files: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    shipped = name == "mnist" and all(path.parent.resolve() == _SHIPPED.resolve() for path in files)
    pins = [_MNIST_SHA256[path.name.removesuffix(".gz")] if shipped else None for path in files]
    if shipped and files[0].suffix == ".gz":
        images = read_unpacked(files[0], cache_dir() / "data", ndim=3, sha256=pins[0])
    else:
        images = read_idx(files[0], ndim=3, sha256=pins[0])
    labels = read_idx(files[1], ndim=1, sha256=pins[1])
    shape = DATASETS[name].shape[1:]
    if images.shape[1:] != shape:
        raise DataError(
            f"{files[0]} has images of {images.shape[1]} x {images.shape[2]}; {name} has "
            f"{shape[0]} x {shape[1]}; "
            "check that it is the right file"
        )
    if len(images) != len(labels):
        raise DataError(
            f"{files[0]} has {len(images)} images but {files[1]} has {len(labels)} labels; they "
            "must belong together"
        )
    _check_labels(labels, len(images), DATASETS[name].classes, str(files[1]), _FILE_ADVICE)
    if name == "fashion-mnist":
        _refuse_mnist(files[1], labels)
    return images, labels


def _refuse_mnist(path: Path, labels: np.ndarray) -> None:
    """The two data sets have the same file names; a swapped folder would train and look right."""
    header = b"\x00\x00\x08\x01" + len(labels).to_bytes(4, "big")
    if hashlib.sha256(header + labels.tobytes()).hexdigest() in _MNIST_SHA256.values():
        raise DataError(
            f"{path} is of MNIST, not of fashion-mnist; give another --data-dir or use mnist"
        )


def _read_cifar(files: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    records = np.concatenate([_read_records(path) for path in files])
    return np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32), np.ascontiguousarray(
        records[:, 0]
    )


def _read_records(path: Path) -> np.ndarray:
    """One CIFAR-10 binary file as uint8 (records, 3073): the label, then 1024 bytes each of red,
    green and blue.
    """
    try:
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            if not file_size or file_size % _CIFAR_RECORD:  # before anything is allocated
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


def _as_tree(tree: Any, count: int | None, role: str, name: str) -> Any:
    """A tree of C-contiguous float32 and int32 arrays of `count` samples (None: of as many as
    the first has).
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
                f"({count or 'samples'}, ...) expected, "
                "with at least one number per sample"
            )
        if array.dtype.kind == "f":
            array = _as_floats(array, name, role)
        elif array.dtype.kind in "iub":
            limits = np.iinfo(np.int32)
            if (
                array.dtype.kind != "b"
                and not limits.min <= array.min() <= array.max() <= limits.max
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


def _as_images(images: np.ndarray, name: str) -> np.ndarray:
    if images.ndim == 3:
        images = images[:, None]
    if images.dtype.kind == "f":
        images = _as_floats(images, name, "images")
    elif images.dtype != np.uint8:
        raise DataError(
            f"{name}: images are {images.dtype}; uint8, other integers and floats are allowed"
        )
    return np.ascontiguousarray(images)


def _as_floats(array: np.ndarray, name: str, role: str) -> np.ndarray:
    """An array as float32.

    Raises DataError: NaN, infinity, or a double that is too large for float32.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        array = array.astype(np.float32, copy=False)
        # The sum is NaN or infinite exactly if a value is (float64 has the range), and needs no
        # array of flags.
        if np.isfinite(array.sum(dtype=np.float64)):
            return array
    index = tuple(int(axis) for axis in np.argwhere(~np.isfinite(array))[0])
    raise DataError(
        f"{name}: sample {index[0]} of the {role} holds {array[index]} at index {index}; finite "
        "float32 "
        "expected; clean it "
        "with np.nan_to_num, or leave the sample out"
    )


def _check_images(images: np.ndarray, name: str) -> None:
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
            "float32 expected; "
            "use odyssey.data.arrays, which converts"
        )


_FILE_ADVICE = "check that it is the right file"


def _check_labels(
    labels: np.ndarray,
    count: int,
    classes: int,
    name: str,
    advice: str = "correct the labels or the number of classes",
) -> None:
    if labels.shape != (count,):
        raise DataError(
            f"{name}: {count} samples but labels of the shape {labels.shape}; ({count},) "
            "expected of classes; leave "
            "out classes= for other targets"
        )
    if (wrong := outside(labels, classes)) is not None:
        raise DataError(
            f"{name}: label {labels[wrong]} at index {wrong}; 0 to {classes - 1} are allowed; "
            f"{advice}"
        )


def _per_channel(value: float | np.ndarray, channels: int, field: str, name: str) -> np.ndarray:
    numbers = np.full((), np.nan, np.float32)
    with np.errstate(over="ignore"), contextlib.suppress(TypeError, ValueError):
        numbers = np.asarray(value, np.float64).astype(np.float32)
    if numbers.ndim == 0:
        numbers = np.full(channels, numbers)
    if numbers.shape != (channels,) or not np.isfinite(numbers).all():
        raise ConfigError(
            f"{name}: {field} is {value!r}; give a finite number, or one per channel ({channels})"
        )
    return _read_only(numbers)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view
