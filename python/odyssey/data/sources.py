"""Data sets out of a user's files: folders of pictures, tables, arrays, text; rows of tables of other libraries.

Files are read strictly: what is wrong is named with its file and place. Nothing is downloaded or unpickled.
"""

from __future__ import annotations

import csv as tables
import dataclasses
import gzip
import hashlib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from odyssey.data.datasets import DATASETS, ArrayDataset, Described, Gathered, arrays, load
from odyssey.data.sampler import permutation
from odyssey.data.trees import mapped
from odyssey.data.vocabulary import Vocabulary
from odyssey.errors import ConfigError, DataError, check_integer

PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
LITTER = ("Thumbs.db", "desktop.ini")  # what a Windows desktop leaves in folders of pictures
_SHAKESPEARE = Path(__file__).parent / "shakespeare" / "shakespeare.txt.gz"
_SHAKESPEARE_SHA256 = "b821e946a8a5f8b5f04eed56abd8562fd42856bbcb83c71435b54ca1b8377e7f"


class ImageFolder(Described):
    """Pictures in a folder per class, root/class/picture.jpg: uint8 (3, H, W), read when asked for. Needs Pillow.

    size: pixels, one number or (height, width), to which pictures are scaled and cut around their middle; None: all
        have the size of the first. mean, std: a pixel p stands for (p / 255 - mean) / std, one number or per channel.
    classes: names of the folders, sorted; a class is its place among them. files: (path, class), sorted.
    Raises DataError for a folder without pictures or a file that is none; ConfigError if Pillow is missing.
    """

    def __init__(self, root: str | Path, size: Any = None, *, mean: Any = 0.5, std: Any = 0.5) -> None:
        try:
            import PIL.Image  # noqa: F401
        except ImportError:
            raise ConfigError("[data] ImageFolder needs Pillow; install odyssey[image]") from None
        if not (root := Path(root)).is_dir():
            raise DataError(f"{root} is not a folder; give one that is there")
        self.classes = sorted(d.name for d in root.iterdir() if d.is_dir() and d.name[0] != ".")
        self.files: list[tuple[str, int]] = []
        for number, name in enumerate(self.classes):
            found = sorted(p for p in (root / name).iterdir() if p.name[0] != "." and p.name not in LITTER)
            wrong = next((p for p in found if p.suffix.lower() not in PICTURES), None)
            if wrong or not found:
                raise DataError(f"{wrong or root / name} {'is no picture' if wrong else 'is empty'}; move it elsewhere")
            self.files += [(str(p), number) for p in found]
        if not self.files:
            raise DataError(f"{root} has no folders with pictures; a folder per class is expected")
        self.scale, self.shift = 1 / (255 * np.asarray(std, np.float64)), -np.asarray(mean) / np.asarray(std)
        self._size: tuple[int, int] | None = None  # width, height
        if size is not None:
            height, width = (check_integer("[data] size", s, 1) for s in ((size, size) if np.ndim(size) == 0 else size))
            self._size = (width, height)
        self._cut = size is not None
        self._size = self._size or self._read(self.files[0][0]).shape[:0:-1]

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """(3, H, W)."""
        return (3, self._size[1], self._size[0])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        path, number = self.files[i]
        pixels = self._read(path)
        if pixels.shape != self.sample_shape:
            raise DataError(
                f"{path} has {pixels.shape[2]} x {pixels.shape[1]} pixels, the first picture {self._size[0]} x "
                f"{self._size[1]}; give ImageFolder a size"
            )
        return pixels, number

    def _read(self, path: str) -> np.ndarray:
        from PIL import Image, ImageOps

        try:
            with Image.open(path) as image:
                if self._cut:
                    image.draft("RGB", self._size)  # a JPEG is decoded at the next larger size that is cheap
                made = image if image.mode == "RGB" else image.convert("RGB")  # which would copy
                if self._cut:
                    made = ImageOps.fit(made, self._size, Image.Resampling.BILINEAR)
                return np.ascontiguousarray(np.asarray(made).transpose(2, 0, 1))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
            raise DataError(f"{path} cannot be read as a picture ({problem}); replace or remove it") from None


def table(file: TextIO) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The names of columns, and the numbered lines that are not empty. Raises csv.Error for a quote that stays open."""
    rows = file.readlines() or [""]
    delimiter = max(",;\t", key=re.sub('"[^"]*"', "", rows[0]).count)
    reader = tables.reader(rows, strict=True, delimiter=delimiter)
    return [name.strip() for name in next(reader)], [(reader.line_num, line) for line in reader if line]


def csv(
    path: str | Path, target: str | Sequence[str] | None = None, *, classes: bool = True, words: bool = True
) -> ArrayDataset:
    """A table of numbers with a header: samples (N, F) float32 of all columns but the targets.

    Fields are separated by what the header has most of: commas, semicolons or tabs.
    target: name of a column, or names; default the last one. One column of whole numbers from 0, or of words, is
        classes (words in sorted order); anything else becomes float32, (N, T) for T names.
    classes: False: whole numbers are no classes, such as prices. words: False: words are none, as another file may have
        other ones.
    Raises DataError for a missing column, a line of another length, a field that is no finite number.
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, lines = table(file)
    except (OSError, UnicodeDecodeError, tables.Error) as problem:
        why = getattr(problem, "strerror", None) or problem
        raise DataError(f"{path} cannot be read as a table ({why}); give a CSV file in UTF-8") from None
    if not lines:
        raise DataError(f"{path} has no lines of numbers below a line with the names of columns")
    if header != [str(i) for i in range(len(header))] and all(_number(name) is not None for name in header):
        raise DataError(f"{path} begins with numbers ({', '.join(header[:4])}); put a line with names of columns first")
    if twice := next((name for name in header if header.count(name) > 1), None):
        raise DataError(f"{path} has two columns {twice!r}; rename one")
    wanted = [header[-1]] if target is None else [target] if isinstance(target, str) else list(target)
    if missing := [name for name in wanted if name not in header]:
        raise DataError(f"{path} has no column {missing[0]!r}; its columns are {', '.join(header)}")
    if wrong := next((number for number, line in lines if len(line) != len(header)), None):
        raise DataError(f"{path}, line {wrong}: {len(header)} fields expected, as in the header")

    def column(name: str) -> np.ndarray:
        at = header.index(name)
        values = np.array([_number(line[at]) for _, line in lines], np.float64)  # None: NaN
        if (wrong := np.flatnonzero(~np.isfinite(values))).size:
            empty = (i for i in wrong if not lines[i][1][at].strip())
            number, line = lines[next(empty, wrong[0])]
            fault = f"{path}, line {number}, column {name}: {line[at]!r} is no finite number"
            advice = "write it as a number" if line[at].strip() else "fill it"
            raise DataError(f"{fault}; {advice}, or leave the line or the column out")
        return values.astype(np.float32)

    x = np.stack([column(name) for name in header if name not in wanted], 1) if len(header) > len(wanted) else None
    columns = tuple(name for name in header if name not in wanted)
    if x is None:
        raise DataError(f"{path} has no column besides the target; samples need one")
    fields = [line[header.index(wanted[0])].strip() for _, line in lines]
    names: Any = ()
    if len(wanted) > 1:
        made = arrays(x, np.stack([column(name) for name in wanted], 1), name=path.name)
    elif classes and all(field.isdecimal() for field in fields):
        made = arrays(x, np.array([int(field) for field in fields]), name=path.name)
    elif classes and words and all(field and _number(field) is None for field in fields):
        names, labels = np.unique(fields, return_inverse=True)
        made = arrays(x, labels, classes=len(names), name=path.name)
    else:
        made = arrays(x, column(wanted[0])[:, None], name=path.name)
    return dataclasses.replace(made, columns=columns, class_names=tuple(map(str, names)))


def _number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:
        return None


def npz(path: str | Path, inputs: Any = "x", targets: Any = "y") -> ArrayDataset:
    """Arrays of an .npz file; inputs, targets: a name, or a tuple or dict of names. DataError as `arrays`."""
    import zipfile

    try:
        with zipfile.ZipFile(path) as file:
            names = [name.removesuffix(".npy") for name in file.namelist()]

            def array(name: str) -> np.ndarray:
                if name not in names:
                    raise DataError(f"{path} has no array {name!r}; it has {', '.join(names)}")
                with file.open(f"{name}.npy") as part:
                    return np.lib.format.read_array(part, allow_pickle=False)

            return arrays(mapped(array, inputs), mapped(array, targets), name=Path(path).name)
    except (OSError, ValueError, zipfile.BadZipFile) as problem:
        raise DataError(f"{path} cannot be read as .npz ({problem}); write it with numpy.savez") from None


class Rows:
    """An array (N, ...) in a file, .npy or plain numbers, of which only the rows that are asked for are read.

    dtype: of plain numbers, little-endian.
    """

    def __init__(self, path: str | Path, dtype: Any = np.uint16) -> None:
        self.path, self.offset, self.row, self._file = os.path.abspath(path), 0, (), None
        try:
            with open(path, "rb") as file:
                if self.path.endswith(".npy"):
                    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                    (count, *self.row), fortran, dtype = read[np.lib.format.read_magic(file)](file)
                    self.offset = file.tell()
                    if fortran or dtype.hasobject:
                        raise ValueError("rows must be one behind the other, of numbers")
                size = os.fstat(file.fileno()).st_size - self.offset
        except (OSError, ValueError, KeyError) as problem:
            raise DataError(f"{path} cannot be read as an array ({problem}); write it with numpy.save") from None
        self.dtype = np.dtype(dtype)
        self._bytes = self.dtype.itemsize * int(np.prod(self.row, dtype=np.int64))
        self._count = size // self._bytes if not self.path.endswith(".npy") else count
        if self._count * self._bytes != size or not size:
            raise DataError(f"{path} holds {size} bytes of numbers, which are no {self.dtype} rows {self.row}")

    def __len__(self) -> int:
        return self._count

    def read(self, first: int, n: int) -> np.ndarray:
        """Rows first to first + n - 1, (n, ...)."""
        if self._file is None:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - open as long as this is used
        found = os.pread(self._file.fileno(), n * self._bytes, self.offset + first * self._bytes)
        if len(found) != n * self._bytes:
            raise DataError(f"{self.path} has become shorter while it was in use; leave it unchanged")
        return np.frombuffer(found, self.dtype).reshape(n, *self.row)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None}


class npy(Gathered):  # noqa: N801 - called like the functions here
    """Samples and targets in two .npy files (N, ...), larger than memory if need be: rows are read when asked for."""

    def __init__(self, inputs: str | Path, targets: str | Path, classes: int | None = None) -> None:
        self._parts = Rows(inputs), Rows(targets)
        self.classes, self.sample_shape = classes, tuple(self._parts[0].row)
        if len(self._parts[0]) != len(self._parts[1]):
            raise DataError(f"{inputs} has {len(self._parts[0])} rows, {targets} has {len(self._parts[1])}")

    def __len__(self) -> int:
        return len(self._parts[0])

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows `indices` (B,) of both."""
        x, y = (np.concatenate([part.read(int(i), 1) for i in indices]) for part in self._parts)
        return x, y


class Tokens(Gathered):
    """Stretches of a long list of token ids: sample i is ids[i T : i T + T], its target the ids that follow each.

    ids: what `read(first, n)` gives (n,), such as Rows, or an array. length: T.
    classes: how many different ids there may be. vocabulary: what each id stands for, if it is known.
    characters: of a token, on average.
    """

    def __init__(
        self, ids: Any, length: int, classes: int, vocabulary: Vocabulary | None = None, characters: float = 1.0
    ) -> None:
        self.length, self.classes, self.vocabulary = check_integer("[data] length", length, 1), classes, vocabulary
        self.characters = characters
        self._ids = ids
        if isinstance(ids, Rows) and (ids.dtype.kind not in "iu" or ids.row):
            raise DataError(f"{ids.path} holds {ids.dtype} rows {tuple(ids.row)}; token ids (N,), integers, expected")
        if len(ids) <= length:
            raise DataError(f"[data] {len(ids)} tokens are too few for one sample of {length} and the one that follows")

    @property
    def sample_shape(self) -> tuple[int]:
        """(T,)."""
        return (self.length,)

    def bits(self, loss: float) -> dict[str, float]:
        """A mean cross-entropy of tokens, in nats, as "bits_per_character"; "bits_per_token" where no text is known."""
        per_token = loss / math.log(2)
        if self.vocabulary is None:
            return {"bits_per_token": per_token}
        return {"bits_per_character": per_token / self.characters}

    def __len__(self) -> int:
        return (len(self._ids) - 1) // self.length

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and the ids that follow them, int32 (B, T) each. DataError for an id that is not in 0..classes-1."""
        t, ids = self.length, self._ids
        pieces = [
            ids.read(i * t, t + 1) if isinstance(ids, Rows) else ids[i * t : i * t + t + 1] for i in indices.tolist()
        ]
        rows = np.array(pieces).reshape(-1, t + 1)
        if rows.size and (rows.min() < 0 or rows.max() >= self.classes):
            at = np.flatnonzero((rows < 0).any(1) | (rows >= self.classes).any(1))[0]
            raise DataError(
                f"[data] sample {indices[at]} has the token {rows[at].max()}; 0 to {self.classes - 1} are allowed"
            )
        return rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)


def tokens(path: str | Path, *, length: int, classes: int, dtype: Any = np.uint16) -> Tokens:
    """Token ids in a file, .npy (N,) or plain numbers of `dtype` (.bin), larger than memory if need be."""
    return Tokens(Rows(path, dtype), length, classes)


def text(
    path: str | Path, *, length: int = 64, tokenizer: str | Path | None = None, train: bool | None = None
) -> Tokens:
    """A text file in UTF-8 as ids of its characters, in the order of their code points, or of a tokenizer.

    tokenizer: a tokenizer.json of the package tokenizers. train: True: the first nine tenths of the text, False: the
        rest, None: all; the vocabulary is that of all.
    """
    written = _read(path)
    if Path(path) == _SHAKESPEARE and hashlib.sha256(written.encode()).hexdigest() != _SHAKESPEARE_SHA256:
        raise DataError(f"{path} was altered; install odyssey again")
    if tokenizer is None:
        vocabulary = Vocabulary(sorted(set(written)))
    else:
        vocabulary = Vocabulary((), _read(tokenizer), str(tokenizer))
    ids = vocabulary.encode(written)
    edge, characters = len(ids) * 9 // 10, len(written) / max(len(ids), 1)
    ids = ids if train is None else ids[:edge] if train else ids[edge:]
    return Tokens(ids, length, len(vocabulary), vocabulary, characters)


def _read(path: str | Path) -> str:
    try:
        content = Path(path).read_bytes()
        return (gzip.decompress(content) if str(path).endswith(".gz") else content).decode()
    except (OSError, EOFError, UnicodeDecodeError) as problem:
        raise DataError(f"{path} cannot be read as text ({problem}); give a file in UTF-8") from None


def shakespeare(*, length: int = 64, train: bool | None = None) -> Tokens:
    """Eight plays of Shakespeare, 1,036,004 characters, 76 different ones; they come with the package. See `text`."""
    return text(_SHAKESPEARE, length=length, train=train)


class columns(Described):  # noqa: N801
    """A data set whose rows are dicts, as those of Hugging Face, as one of (sample, target).

    inputs, targets: the name of a column, or a tuple or dict of names.
    scale, shift: a uint8 pixel p stands for p * scale + shift, one number or per channel.
    """

    def __init__(self, rows: Any, inputs: Any, targets: Any, *, scale: Any = 1.0, shift: Any = 0.0) -> None:
        self.rows, self.inputs, self.targets, self.scale, self.shift = rows, inputs, targets, scale, shift

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        row = self.rows[i]

        def part(name: str) -> Any:
            if name not in row:
                raise DataError(f"[data] row {i} has no column {name!r}; it has {', '.join(map(repr, row))}")
            return row[name]

        return mapped(part, self.inputs), mapped(part, self.targets)


class Subset(Described):
    """Some samples of a data set, by their numbers (N,)."""

    def __init__(self, dataset: Any, numbers: np.ndarray) -> None:
        self.dataset, self.numbers = dataset, numbers
        for name in ("classes", "sample_shape", "scale", "shift", "vocabulary"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))
        if hasattr(dataset, "gather"):
            self.gather = self._gather
        if hasattr(dataset, "set_epoch"):
            self.set_epoch = dataset.set_epoch

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> Any:
        return self.dataset[int(self.numbers[i])]

    def _gather(self, indices: np.ndarray) -> Any:
        return self.dataset.gather(self.numbers[indices])


def split(dataset: Any, fraction: float = 0.1, seed: int = 0) -> tuple[Any, Any]:
    """(training part, test part) of a data set: a random `fraction` of the samples, at least one, is for the test."""
    count = max(1, round(len(dataset) * fraction))
    if not 0 < fraction < 1 or count >= len(dataset):
        raise ConfigError(f"[data] split: {count} of {len(dataset)} samples for the test; leave some for training")
    order = permutation(len(dataset), seed, 0)
    parts = np.sort(order[count:]), np.sort(order[:count])
    if not isinstance(dataset, ArrayDataset):
        return Subset(dataset, parts[0]), Subset(dataset, parts[1])
    rows = [dataset.rows(part) for part in parts]
    return tuple(dataclasses.replace(dataset, images=x, labels=y) for x, y in rows)


def opened(
    name: str, path: Path | None, *, train: bool, size: int = 32, target: str | None = None, length: int = 64
) -> Any:
    """One part of what `odyssey train --dataset NAME --data-dir PATH` names.

    PATH is a file, of which a tenth is for the test, or a folder with `train` and `test` (train.csv and so on); a text
    is one file. size: of pictures. target: of a table. length: of stretches of text.
    """
    if name in DATASETS:
        return load(name, train=train, data_dir=path)
    if name == "shakespeare":
        return shakespeare(length=length, train=train)
    if path is None:
        raise ConfigError(f"[data] --dataset {name} is a data set of your own; say where it is with --data-dir")
    if name == "text":
        return text(path, length=length, train=train)
    ending = "" if name == "image-folder" else f".{name}"
    parts = path / f"train{ending}", path / f"test{ending}"
    whole = not parts[0].exists()
    here = path if whole else parts[0 if train else 1]
    if name == "csv":
        found: Any = csv(here, target, words=whole)
    else:
        found = npz(here) if name == "npz" else ImageFolder(here, size)
        if name == "npz" and not found.classes and np.ndim(found.labels) == 1:  # numbers (N,), for an output (N, 1)
            found = dataclasses.replace(found, labels=found.labels[:, None])
        if name == "npz" and found.normalised and found.images.dtype == np.uint8:  # bytes are pixels, as a folder's are
            scale = np.full_like(found.scale, 1 / 127.5)
            found = dataclasses.replace(found, scale=scale, shift=np.full_like(scale, -1))
    if whole:
        return split(found)[0 if train else 1]
    if name == "image-folder" and not train and found.classes != ImageFolder(parts[0], size).classes:
        raise DataError(f"{here} has other folders than {parts[0]}; the classes must be the same")
    return found
