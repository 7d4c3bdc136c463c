"""Data sets from a user's files: folders of images, tables, arrays, text, and rows of tables of
other libraries.

Files are read strictly: an error message has the file and the place of the fault. Nothing is
downloaded or unpickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from odyssey.base import install_extra
from odyssey.base.paths import expand_path
from odyssey.base.requirements import REINSTALL
from odyssey.data.datasets import (
    DATASETS,
    ArrayDataset,
    Described,
    Gathered,
    arrays,
    digest,
    load,
    outside,
)
from odyssey.data.nested import leaves, mapped
from odyssey.data.sampler import permutation
from odyssey.data.tables import Columns, Table, csv
from odyssey.data.vocabulary import Vocabulary
from odyssey.errors import ConfigError, DataError, check_integer, printable

PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
LITTER = ("Thumbs.db", "desktop.ini")  # files that Windows writes into folders of images
_SHAKESPEARE = Path(__file__).parent / "shakespeare" / "shakespeare.txt.gz"
_SHAKESPEARE_SHA256 = "b821e946a8a5f8b5f04eed56abd8562fd42856bbcb83c71435b54ca1b8377e7f"


class ImageFolder(Described):
    """Images in a folder per class, root/class/image.jpg, as uint8 (3, H, W).

    An image is read each time its sample is. Needs Pillow. Pixels are those that an image viewer
    shows: 16 bits become 8, transparent pixels are white, and photos are turned as their EXIF data
    say. docs/data.md has the table of all kinds of pixels.

    Args:
        root: the folder that holds a folder for each class.
        size: the size in pixels, one number or (height, width). Images are scaled to cover it, and
            their excess is cut off at both ends. None requires that all have the size of the first.
        mean: a pixel p stands for (p / 255 - mean) / std. One number, or one per channel.
        std: see `mean`.
        skip: paths of files to leave out, such as those that `unreadable()` returned.

    Attributes:
        classes: the names of the folders, sorted. A class is its index in them.
        files: (path, class) of each image, sorted.

    Raises:
        DataError: a folder without images, a file that isn't an image, or pixels whose black and
            white aren't known, such as floats. Files are read, and reported, with their samples.
        ConfigError: Pillow is missing.
    """

    def __init__(
        self,
        root: str | Path,
        size: Any = None,
        *,
        mean: Any = 0.5,
        std: Any = 0.5,
        skip: Collection[str] = (),
    ) -> None:
        try:
            import PIL.Image  # noqa: F401
        except ImportError:
            raise ConfigError(
                f"[data] ImageFolder needs Pillow; {install_extra('image')}"
            ) from None
        root = expand_path(root)
        if not root.is_dir():
            raise DataError(f"{root} is not a folder; give one that is there")
        self.classes = sorted(
            folder.name for folder in root.iterdir() if folder.is_dir() and folder.name[0] != "."
        )
        self.files: list[tuple[str, int]] = []
        skipped = set(skip)
        non_images = []
        for class_number, name in enumerate(self.classes):
            paths = sorted(
                path
                for path in (root / name).iterdir()
                if path.name[0] != "." and path.name not in LITTER and str(path) not in skipped
            )
            non_images += [str(path) for path in paths if path.suffix.lower() not in PICTURES]
            if not paths:
                raise DataError(f"{root / name} is empty; move it elsewhere")
            self.files += [(str(path), class_number) for path in paths]
        if non_images:
            are = "is no picture; move it" if len(non_images) == 1 else "are no pictures; move them"
            raise DataError(f"{list_paths(non_images)} {are} elsewhere, or use skip=")
        if not self.files:
            raise DataError(f"{root} has no folders with pictures; a folder per class is expected")
        self.scale = 1 / (255 * np.asarray(std, np.float64))
        self.shift = -np.asarray(mean) / np.asarray(std)
        self._resize = size is not None
        self._size: tuple[int, int]  # (width, height), the order of Pillow
        if size is None:
            first_path, _ = self.files[0]
            _, height, width = self._read_image(first_path).shape
        else:
            height, width = (
                check_integer("[data] size", pixels, 1)
                for pixels in ((size, size) if np.ndim(size) == 0 else size)
            )
        self._size = (width, height)

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """The shape of a sample, (3, H, W)."""
        width, height = self._size
        return (3, height, width)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        path, class_number = self.files[i]
        pixels = self._read_image(path)
        if pixels.shape != self.sample_shape:
            _, height, width = pixels.shape
            expected_width, expected_height = self._size
            raise DataError(
                f"{path} has {width} x {height} pixels, the first picture "
                f"{expected_width} x {expected_height}; give ImageFolder a size"
            )
        return pixels, class_number

    @property
    def labels(self) -> np.ndarray:
        """The classes of all images, (N,) int32."""
        return np.array([class_number for _, class_number in self.files], np.int32)

    def unreadable(self, thorough: bool = False) -> dict[str, str]:
        """Returns the files that cannot be used, with the reasons, by their paths.

        It looks at the header and the end of each file, about 10,000 files per second.

        Args:
            thorough: read all pixels of each file. That takes as long as an epoch, and also finds
                files that are damaged in the middle.

        For example, ImageFolder(root, 64, skip=ImageFolder(root, 64).unreadable()).
        """
        from odyssey.data.images import fault_of_image

        faults = ((path, fault_of_image(path, thorough)) for path, _ in self.files)
        return {path: reason for path, reason in faults if reason is not None}

    def fingerprint(self) -> str:
        """Returns 16 hexadecimal digits that identify names, classes and sizes of the files.

        Only 10,000 files at even distances are asked for their size, because that takes time.
        """
        sized_count = min(len(self), 10_000)
        sized_indices = np.linspace(0, len(self) - 1, sized_count).astype(np.int64)
        sized_paths = {self.files[i][0] for i in sized_indices}
        try:
            lines = [
                f"{self.classes[class_number]}/{os.path.basename(path)} "
                f"{os.path.getsize(path) if path in sized_paths else ''}"
                for path, class_number in self.files
            ]
        except OSError as problem:
            raise DataError(
                f"{problem.filename} was removed ({problem.strerror}); put it back"
            ) from None
        return digest(f"{self._size} {self._resize}", *lines)

    def _read_image(self, path: str) -> np.ndarray:
        """Reads an image file as uint8 (3, H, W), scaled and cut to the size if there is one."""
        from odyssey.data.images import read_image

        return read_image(path, self._size if self._resize else None)


def list_paths(paths: Sequence[str]) -> str:
    """Returns paths for a message, at most ten of them."""
    first_paths = ", ".join(printable(path) for path in paths[:10])
    return first_paths + (f" and {len(paths) - 10:,} more files" if len(paths) > 10 else "")


def unreadable_images(path: Path, thorough: bool) -> dict[str, str]:
    """Returns the files of `--dataset image-folder --data-dir PATH` that cannot be used, with the
    reasons, by their paths. It looks at the training part and the test part.

    thorough: see `ImageFolder.unreadable`.
    """
    path = expand_path(path)
    roots = [path / "train", path / "test"] if (path / "train").exists() else [path]
    faults: dict[str, str] = {}
    for root in roots:
        non_images = [
            str(file)
            for file in sorted(root.glob("[!.]*/[!.]*"))
            if file.suffix.lower() not in PICTURES and file.name not in LITTER
        ]
        faults |= {file: f"{printable(file)} is no picture" for file in non_images}
        faults |= ImageFolder(root, 1, skip=non_images).unreadable(thorough)
    return faults


def refuse_images(faults: dict[str, str]) -> None:
    """Raises DataError, which lists the files of `unreadable_images`, if there are any."""
    if len(faults) == 1:
        [reason] = faults.values()
        raise DataError(f"{reason}; or leave it out (--skip-unreadable)")
    if faults:
        raise DataError(
            f"{len(faults):,} files cannot be read as images: {list_paths([*faults])}; replace "
            "them, move them elsewhere, or leave them out (--skip-unreadable)"
        )


def npz(path: str | Path, inputs: Any = "x", targets: Any = "y") -> ArrayDataset:
    """Reads arrays of an .npz file as a data set in memory.

    Args:
        path: the file, as `numpy.savez` writes it.
        inputs: the name of the array of samples, or a tuple or dict of names.
        targets: the same for the targets.

    Raises:
        DataError: the file cannot be read or lacks an array, or `arrays` refuses one.
    """
    import zipfile

    expanded_path = expand_path(path)
    try:
        with zipfile.ZipFile(expanded_path) as file:
            names = [name.removesuffix(".npy") for name in file.namelist()]

            def read_array(name: str) -> np.ndarray:
                if name not in names:
                    raise DataError(f"{path} has no array {name!r}; it has {', '.join(names)}")
                with file.open(f"{name}.npy") as member:
                    return np.lib.format.read_array(member, allow_pickle=False)

            return arrays(
                mapped(read_array, inputs), mapped(read_array, targets), name=Path(path).name
            )
    except DataError:
        raise
    except (OSError, ValueError, zipfile.BadZipFile) as problem:
        raise DataError(
            f"{path} cannot be read as .npz ({problem}); write it with numpy.savez"
        ) from None


class RowFile:
    """An array (N, ...) in a file, which reads only the rows that are asked for.

    Args:
        path: a .npy file, or a file of plain numbers.
        dtype: the dtype of plain numbers. A .npy file holds its dtype, so None is allowed there.

    Attributes:
        path: the absolute path of the file.
        offset: the position of the first row in the file, in bytes.
        row: the shape of one row.
        dtype: the dtype of the numbers.

    Raises:
        ConfigError: the dtype of plain numbers is missing, or it is not a dtype of numbers.
        DataError: the file cannot be read, its length doesn't fit its rows, or a .npy file has
            another dtype than `dtype`.
    """

    def __init__(self, path: str | Path, dtype: Any = None) -> None:
        self.path = os.path.abspath(expand_path(path))
        self.offset = 0
        self.row = ()
        self._file = None  # opened by the first read
        is_npy = self.path.endswith(".npy")
        expected_dtype = None if dtype is None else _parse_dtype(dtype)
        if expected_dtype is None and not is_npy:
            raise ConfigError(
                f"[data] {path} holds plain numbers, and their width isn't known; pass the dtype "
                "that they were written with, such as dtype=np.uint16, or write a .npy file with "
                "numpy.save"
            )
        try:
            with open(self.path, "rb") as file:
                if is_npy:
                    read_header = {
                        (1, 0): np.lib.format.read_array_header_1_0,
                        (2, 0): np.lib.format.read_array_header_2_0,
                    }[np.lib.format.read_magic(file)]
                    (count, *self.row), is_fortran_order, dtype = read_header(file)
                    self.offset = file.tell()
                    if is_fortran_order or dtype.hasobject:
                        raise ValueError("rows must be one behind the other, of numbers")
                size = os.fstat(file.fileno()).st_size - self.offset
        except (OSError, ValueError, KeyError) as problem:
            raise DataError(
                f"{path} cannot be read as an array ({problem}); write it with numpy.save"
            ) from None
        self.dtype = np.dtype(dtype)
        if expected_dtype not in (None, self.dtype):
            raise DataError(
                f"{path} holds {self.dtype}, and dtype is {expected_dtype}; pass no dtype for "
                ".npy files"
            )
        self._row_bytes = self.dtype.itemsize * int(np.prod(self.row, dtype=np.int64))
        self._count = count if is_npy else size // self._row_bytes
        if self._count * self._row_bytes != size or not size:
            raise DataError(
                f"{path} holds {size} bytes of numbers, which are no {self.dtype} rows {self.row}"
            )

    def __len__(self) -> int:
        return self._count

    def read(self, first: int, n: int) -> np.ndarray:
        """Returns n rows from row `first` on, (n, ...).

        Raises DataError if the file has become shorter.
        """
        if self._file is None:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - open as long as this is used
        byte_count = n * self._row_bytes
        # Unlike seek and read, pread is safe on several threads.
        content = os.pread(self._file.fileno(), byte_count, self.offset + first * self._row_bytes)
        if len(content) != byte_count:
            raise DataError(
                f"{self.path} has become shorter while it was in use; leave it unchanged"
            )
        return np.frombuffer(content, self.dtype).reshape(n, *self.row)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickle. An open file cannot be sent to another process."""
        return {**vars(self), "_file": None}


def _parse_dtype(dtype: Any) -> np.dtype[Any]:
    """Returns a dtype of integers or floats. Raises ConfigError if it is none."""
    try:
        parsed = np.dtype(dtype)
    except TypeError:
        parsed = np.dtype(object)
    if parsed.kind not in "iuf":
        raise ConfigError(
            f"[data] dtype is {dtype!r}; a dtype of integers or floats expected, such as np.uint16"
        )
    return parsed


# Bytes of a file of ids that are checked before the training. 100 MB take 0.1 s from the page
# cache; a file of many GB on a shared file system would take minutes on each rank.
CHECKED_BYTES = 1 << 30


def _check_ids(ids: RowFile, classes: int) -> None:
    """Raises DataError unless all ids (N,) of a file are in 0..classes-1.

    Files of more than CHECKED_BYTES aren't checked here, but when their samples are read.
    """
    limits = np.iinfo(ids.dtype)
    fits_always = limits.min >= 0 and limits.max < classes
    if fits_always or len(ids) * ids.dtype.itemsize > CHECKED_BYTES:
        return
    count = (1 << 20) // ids.dtype.itemsize
    for first in range(0, len(ids), count):
        piece = ids.read(first, min(count, len(ids) - first))
        if (wrong := outside(piece, classes)) is not None:
            raise _wrong_id(ids.path, piece[wrong], first + wrong, classes)


def _wrong_id(path: str, value: Any, position: int, classes: int) -> DataError:
    """Returns the error for an id of a file that is not in 0..classes-1."""
    return DataError(
        f"{path} holds {value} at position {position}; values from 0 to {classes - 1} expected; "
        "correct the file, the number of classes, or its dtype"
    )


class npy(Gathered):  # noqa: N801 - called like the functions here
    """Samples and targets in two .npy files (N, ...), which may be larger than memory.

    Rows are read when they are asked for.

    Args:
        inputs: the file of the samples.
        targets: the file of the targets.
        classes: the number of classes, if the targets are classes (N,).

    Raises:
        DataError: a file cannot be read, the two have different numbers of rows, or a class is
            not in 0..classes-1.
    """

    def __init__(self, inputs: str | Path, targets: str | Path, classes: int | None = None) -> None:
        for path in (inputs, targets):
            if not str(path).endswith(".npy"):
                raise DataError(f"{path} is not a .npy file; write it with numpy.save")
        self._inputs = RowFile(inputs)
        self._targets = RowFile(targets)
        self.classes = classes
        self.sample_shape = tuple(self._inputs.row)
        if len(self._inputs) != len(self._targets):
            raise DataError(
                f"{inputs} has {len(self._inputs)} rows, {targets} has {len(self._targets)}"
            )
        if classes and self._targets.dtype.kind in "iu" and not self._targets.row:
            _check_ids(self._targets, classes)

    def __len__(self) -> int:
        return len(self._inputs)

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the samples and the targets at `indices` (B,)."""
        inputs = np.concatenate([self._inputs.read(int(i), 1) for i in indices])
        targets = np.concatenate([self._targets.read(int(i), 1) for i in indices])
        return inputs, targets


class Tokens(Gathered):
    """Stretches of a long list of token ids, for language models.

    Sample i is ids[i T : i T + T]. Its target is the id that follows each of them.

    Args:
        ids: the token ids (N,), a RowFile or an array.
        length: the number T of tokens in a sample.
        classes: the number of different ids that are allowed.
        vocabulary: the text of each id, if it is known.
        characters: the mean number of characters in a token.

    Raises:
        DataError: the ids aren't integers (N,), are too few for one sample, or one is not in
            0..classes-1. A file of more than 1 GiB is checked when its samples are read.
    """

    def __init__(
        self,
        ids: Any,
        length: int,
        classes: int,
        vocabulary: Vocabulary | None = None,
        characters: float = 1.0,
    ) -> None:
        self.length = check_integer("[data] length", length, 1)
        self.classes = check_integer("[data] classes", classes, 1, 2**31)
        self.vocabulary = vocabulary
        self.characters = characters
        self._ids = ids
        if isinstance(ids, RowFile) and (ids.dtype.kind not in "iu" or ids.row):
            raise DataError(
                f"{ids.path} holds {ids.dtype} rows {tuple(ids.row)}; token ids (N,), integers, "
                "expected"
            )
        if len(ids) <= length:
            raise DataError(
                f"[data] {len(ids)} tokens are too few for one sample of {length} and the one "
                "that follows"
            )
        if isinstance(ids, RowFile):
            _check_ids(ids, self.classes)

    @property
    def sample_shape(self) -> tuple[int]:
        """The shape of a sample, (T,)."""
        return (self.length,)

    def bits(self, loss: float) -> dict[str, float]:
        """Converts a mean cross-entropy per token, in nats, to bits.

        Returns {"bits_per_character": bits}, or {"bits_per_token": bits} if the text of the tokens
        is unknown.
        """
        per_token = loss / math.log(2)
        if self.vocabulary is None:
            return {"bits_per_token": per_token}
        return {"bits_per_character": per_token / self.characters}

    def __len__(self) -> int:
        return (len(self._ids) - 1) // self.length

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns samples and targets, int32 (B, T) each. The targets are the following ids.

        Raises DataError for an id that is not in 0..classes-1.
        """
        length = self.length
        # A row holds one id more than a sample: the target of its last id.
        rows = np.array([self._read_ids(i * length, length + 1) for i in indices.tolist()])
        rows = rows.reshape(-1, length + 1)
        if (wrong := outside(rows.reshape(-1), self.classes)) is not None:
            row, column = divmod(wrong, length + 1)
            position = int(indices[row]) * length + column
            name = self._ids.path if isinstance(self._ids, RowFile) else "[data] the list of tokens"
            raise _wrong_id(name, rows[row, column], position, self.classes)
        return rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)

    def _read_ids(self, first: int, count: int) -> np.ndarray:
        """Returns `count` ids from number `first` on."""
        if isinstance(self._ids, RowFile):
            return self._ids.read(first, count)
        return self._ids[first : first + count]


def tokens(path: str | Path, *, length: int, classes: int, dtype: Any = None) -> Tokens:
    """Opens a file of token ids, which may be larger than memory.

    Sample i is ids[i T : i T + T], int32 (T,). Its target is the id that follows each of them.
    Every id is checked before the training. In a file of more than 1 GiB it is checked when its
    sample is read, before the step that uses it.

    Args:
        path: a .npy file (N,), or a file of plain numbers (.bin).
        length: the number T of tokens in a sample.
        classes: the number of different ids that are allowed, 0 to classes - 1.
        dtype: the dtype of plain numbers, such as np.uint16 for the files of nanoGPT, or "<u4".
            A .npy file holds its dtype.

    Raises:
        ConfigError: `dtype` is missing for a file of plain numbers.
        DataError: the file cannot be read, doesn't hold integers (N,), or an id is not allowed.

    Example:
        >>> np.arange(100, dtype=np.uint32).tofile("ids.bin")
        >>> tokens("ids.bin", length=10, classes=100, dtype=np.uint32)
        Tokens(9 samples of (10,), classes=100)
    """
    return Tokens(RowFile(path, dtype), length, classes)


def text(
    path: str | Path,
    *,
    length: int = 64,
    tokenizer: str | Path | None = None,
    train: bool | None = None,
) -> Tokens:
    """Reads a text file in UTF-8 as token ids.

    Args:
        path: the file, or its gzip copy with the suffix .gz.
        length: the number of tokens in a sample.
        tokenizer: a tokenizer.json of the package tokenizers. None makes each character of the
            text a token, in the order of their code points.
        train: True for the first nine tenths of the text, False for the rest, None for all of it.
            The vocabulary always is the one of the whole text.

    Raises:
        DataError: a file cannot be read, the shipped file was altered, or the text is too short.
        ConfigError: a tokenizer is given, and the package tokenizers is missing.
    """
    content = _read_text(path)
    if (
        expand_path(path) == _SHAKESPEARE
        and hashlib.sha256(content.encode()).hexdigest() != _SHAKESPEARE_SHA256
    ):
        raise DataError(f"{path} was altered; {REINSTALL}")
    if tokenizer is None:
        vocabulary = Vocabulary(sorted(set(content)))
    else:
        vocabulary = Vocabulary((), _read_text(tokenizer), str(tokenizer))
    ids = vocabulary.encode(content)
    characters_per_token = len(content) / max(len(ids), 1)
    test_start = len(ids) * 9 // 10
    if train is not None:
        ids = ids[:test_start] if train else ids[test_start:]
    return Tokens(ids, length, len(vocabulary), vocabulary, characters_per_token)


def _read_text(path: str | Path) -> str:
    """Reads a file in UTF-8, plain or with the suffix .gz.

    Raises DataError if it cannot be read.
    """
    expanded_path = expand_path(path)
    try:
        content = expanded_path.read_bytes()
        if str(path).endswith(".gz"):
            import gzip

            content = gzip.decompress(content)
        return content.decode()
    except (OSError, EOFError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise DataError(f"{path} cannot be read as text ({reason}); give a file in UTF-8") from None


def shakespeare(*, length: int = 64, train: bool | None = None) -> Tokens:
    """Reads eight plays of Shakespeare, which come with the package.

    They have 1,036,004 characters, 76 different ones. See `text` for the arguments.
    """
    return text(_SHAKESPEARE, length=length, train=train)


class columns(Described):  # noqa: N801
    """A data set of (sample, target) from rows that are dicts, for example of Hugging Face.

    Args:
        rows: an object with a length, whose items are dicts.
        inputs: the column of the samples: a name, or a tuple or dict of names.
        targets: the same for the targets.
        scale: a uint8 pixel p stands for p * scale + shift. One number, or one per channel.
        shift: see `scale`.
    """

    def __init__(
        self, rows: Any, inputs: Any, targets: Any, *, scale: Any = 1.0, shift: Any = 0.0
    ) -> None:
        self.rows = rows
        self.inputs = inputs
        self.targets = targets
        self.scale = scale
        self.shift = shift

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        row = self.rows[i]

        def read_column(name: str) -> Any:
            if name not in row:
                raise DataError(
                    f"[data] row {i} has no column {name!r}; it has {', '.join(map(repr, row))}"
                )
            return row[name]

        return mapped(read_column, self.inputs), mapped(read_column, self.targets)

    def fingerprint(self) -> str:
        """Returns a string that identifies the rows.

        For a list or tuple it is 16 hexadecimal digits from 100 rows at even distances. Otherwise
        it is the fingerprint that Hugging Face computed, or "" if there is none.
        """
        if not isinstance(self.rows, (list, tuple)):
            return str(getattr(self.rows, "_fingerprint", ""))
        row_numbers = np.linspace(0, len(self) - 1, min(len(self), 100)).astype(np.int64).tolist()
        return digest(*(np.asarray(leaf) for i in row_numbers for leaf in leaves(self[i])))


class Subset(Described):
    """Some samples of a data set, by their numbers (N,).

    It has the methods `gather` and `set_epoch` only if the data set has them, because loaders look
    for these methods.
    """

    def __init__(self, dataset: Any, numbers: np.ndarray) -> None:
        self.dataset = dataset
        self.numbers = numbers
        for name in ("classes", "sample_shape", "scale", "shift", "vocabulary"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))
        if isinstance(dataset, ImageFolder):
            self.labels = dataset.labels[numbers]
        if hasattr(dataset, "gather"):
            self.gather = self._gather_numbers
        if hasattr(dataset, "set_epoch"):
            self.set_epoch = dataset.set_epoch

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> Any:
        return self.dataset[int(self.numbers[i])]

    def _gather_numbers(self, indices: np.ndarray) -> Any:
        """Returns the samples and targets at `indices` (B,) of this subset."""
        return self.dataset.gather(self.numbers[indices])

    def fingerprint(self) -> str:
        """Returns 16 hexadecimal digits that identify the data set and the numbers."""
        return digest(fingerprint(self.dataset) or "", self.numbers)


def fingerprint(dataset: Any) -> str | None:
    """Returns the string by which a data set identifies its samples.

    None if it has no method `fingerprint`, or the method returns an empty string.
    """
    method = getattr(dataset, "fingerprint", None)
    return str(method()) or None if callable(method) else None


def _split_numbers(
    samples: int, fraction: float = 0.1, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the training samples and of the test samples, each ascending.

    Raises ConfigError unless both parts have a sample.
    """
    test_count = max(1, round(samples * fraction))
    if not 0 < fraction < 1 or test_count >= samples:
        raise ConfigError(
            f"[data] split: {test_count} of {samples} samples for the test; leave some for training"
        )
    order = permutation(samples, seed, epoch=0)
    return np.sort(order[test_count:]), np.sort(order[:test_count])


def split(dataset: Any, fraction: float = 0.1, seed: int = 0) -> tuple[Any, Any]:
    """Splits a data set into a training part and a test part.

    A random `fraction` of the samples, at least one, is for the test. Raises ConfigError unless
    both parts have a sample.
    """
    training_numbers, test_numbers = _split_numbers(len(dataset), fraction, seed)
    return _select_samples(dataset, training_numbers), _select_samples(dataset, test_numbers)


def _select_samples(dataset: Any, numbers: np.ndarray) -> Any:
    """Returns some samples of a data set: a copy of those in memory, otherwise a `Subset`."""
    if not isinstance(dataset, ArrayDataset):
        return Subset(dataset, numbers)
    images, labels = dataset.rows(numbers)
    return dataclasses.replace(dataset, images=images, labels=labels)


def opened(
    name: str,
    path: Path | None,
    *,
    train: bool,
    size: int = 32,
    target: str | None = None,
    length: int = 64,
    normalize: bool = False,
    drop_columns: str | None = None,
    fill: str | None = None,
    like: Columns | None = None,
    numbers: bool = False,
    skip: Collection[str] = (),
) -> Any:
    """Opens one part of the data set of `odyssey train --dataset NAME --data-dir PATH`.

    Args:
        name: the name of a known data set, or the format of the user's own: "text", "csv", "npz"
            or "image-folder".
        path: a file, of which a tenth is for the test, or a folder with `train` and `test`
            (train.csv and test.csv, for example). A text is one file.
        train: True for the training part, False for the test part.
        size: the size of images in pixels.
        target: the name of the target column of a table. None is the last column.
        length: the number of tokens in a sample of text.
        normalize: normalize the columns of a table. Its training part decides the numbers.
        drop_columns: names of columns of a table to leave out, separated by commas.
        fill: see `csv`.
        like: the columns of the training table, instead of `normalize`, `drop_columns` and `fill`.
        numbers: targets that are whole numbers are numbers, and no classes.
        skip: paths of images to leave out.

    Raises:
        ConfigError: a setting is wrong, or the path is missing.
        DataError: a file cannot be read or doesn't fit.
    """
    if name in DATASETS:
        return load(name, train=train, data_dir=path)
    if name == "shakespeare":
        return shakespeare(length=length, train=train)
    path = None if path is None else expand_path(path)
    if path is None:
        raise ConfigError(
            f"[data] --dataset {name} is a data set of your own; say where it is with --data-dir"
        )
    if name == "text":
        return text(path, length=length, train=train)
    suffix = "" if name == "image-folder" else f".{name}"
    train_path = path / f"train{suffix}"
    test_path = path / f"test{suffix}"
    needs_split = not train_path.exists()
    if needs_split:
        part_path = path
    else:
        part_path = train_path if train else test_path
    dataset: Any
    if name == "csv":
        dropped = [] if drop_columns is None else [c.strip() for c in drop_columns.split(",")]
        options = {
            "normalize": normalize,
            "drop_columns": dropped,
            "fill": fill,
            "classes": not numbers,
        }
        learn_from = None if needs_split or train else train_path
        dataset = _open_table(part_path, needs_split, learn_from, target, like, options)
    elif name == "npz":
        dataset = _adapt_npz(npz(part_path), numbers)
    else:
        dataset = ImageFolder(part_path, size, skip=skip)
    if needs_split:
        training_part, test_part = split(dataset)
        return training_part if train else test_part
    if (
        name == "image-folder"
        and not train
        and dataset.classes != ImageFolder(train_path, size, skip=skip).classes
    ):
        raise DataError(
            f"{part_path} has other folders than {train_path}; the classes must be the same"
        )
    return dataset


def _open_table(
    path: Path,
    needs_split: bool,
    learn_from: Path | None,
    target: str | None,
    like: Columns | None,
    options: dict[str, Any],
) -> ArrayDataset:
    """Opens a table for `odyssey train`.

    Args:
        path: the table.
        needs_split: the table holds both parts, which the caller separates afterwards.
        learn_from: the table of the training part, if `path` is only the test part.
        target: the name of the target column.
        like: the columns of the training part, if they are known.
        options: the arguments of `csv` for the training part.
    """
    if learn_from is not None and like is None:
        like = csv(learn_from, target, **options).columns
    if like is not None:
        options = {"like": like, "classes": options["classes"]}
    table = Table(path)
    # Means and fill values depend on the training rows only.
    training_rows: Any = slice(None)
    if needs_split:
        training_rows, _ = _split_numbers(len(table.lines))
    return csv(table, target, training=training_rows, **options)


def _adapt_npz(dataset: ArrayDataset, numbers: bool) -> ArrayDataset:
    """Adapts the arrays of an .npz file to the models of `odyssey train`.

    numbers: classes that are whole numbers become numbers.
    """
    if numbers and dataset.classes:
        targets = np.asarray(dataset.labels, np.float32)
        dataset = dataclasses.replace(dataset, labels=targets, classes=0)
    # Targets (N,) that are numbers become (N, 1), the shape of a model's output.
    if not dataset.classes and np.ndim(dataset.labels) == 1:
        dataset = dataclasses.replace(dataset, labels=dataset.labels[:, None])
    # Bytes are pixels: 0..255 becomes -1..1, as in an ImageFolder.
    if dataset.normalised and dataset.images.dtype == np.uint8:
        scale = np.full_like(dataset.scale, 1 / 127.5)
        dataset = dataclasses.replace(dataset, scale=scale, shift=np.full_like(scale, -1))
    return dataset
