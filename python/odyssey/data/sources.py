"""Data sets out of a user's files: folders of pictures, tables, arrays, text; rows of tables of
other libraries.

Files are read strictly: what is wrong is named with its file and place. Nothing is downloaded or
unpickled.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from odyssey.base import install_extra
from odyssey.base.requirements import REINSTALL
from odyssey.data.datasets import DATASETS, ArrayDataset, Described, Gathered, arrays, digest, load
from odyssey.data.nested import leaves, mapped
from odyssey.data.sampler import permutation
from odyssey.data.tables import Columns, Table, csv
from odyssey.data.vocabulary import Vocabulary
from odyssey.errors import ConfigError, DataError, check_integer

PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
LITTER = ("Thumbs.db", "desktop.ini")  # what a Windows desktop leaves in folders of pictures
_SHAKESPEARE = Path(__file__).parent / "shakespeare" / "shakespeare.txt.gz"
_SHAKESPEARE_SHA256 = "b821e946a8a5f8b5f04eed56abd8562fd42856bbcb83c71435b54ca1b8377e7f"


class ImageFolder(Described):
    """Pictures in a folder per class, root/class/picture.jpg: uint8 (3, H, W), read when asked for.

    Needs Pillow.

    size: pixels, one number or (height, width), to which pictures are scaled and cut around their
        middle; None: all have the size of the first. mean, std: a pixel p stands for (p / 255 -
        mean) / std, one number or per channel.
    classes: names of the folders, sorted; a class is its place among them. files: (path, class),
    sorted. Raises DataError for a folder without pictures or a file that is none; ConfigError if
    Pillow is missing.
    """

    def __init__(
        self, root: str | Path, size: Any = None, *, mean: Any = 0.5, std: Any = 0.5
    ) -> None:
        try:
            import PIL.Image  # noqa: F401
        except ImportError:
            raise ConfigError(
                f"[data] ImageFolder needs Pillow; {install_extra('image')}"
            ) from None
        if not (root := Path(root)).is_dir():
            raise DataError(f"{root} is not a folder; give one that is there")
        self.classes = sorted(d.name for d in root.iterdir() if d.is_dir() and d.name[0] != ".")
        self.files: list[tuple[str, int]] = []
        for number, name in enumerate(self.classes):
            paths = sorted(
                p for p in (root / name).iterdir() if p.name[0] != "." and p.name not in LITTER
            )
            wrong = next((p for p in paths if p.suffix.lower() not in PICTURES), None)
            if wrong or not paths:
                raise DataError(
                    f"{wrong or root / name} {'is no picture' if wrong else 'is empty'}; move it "
                    "elsewhere"
                )
            self.files += [(str(p), number) for p in paths]
        if not self.files:
            raise DataError(f"{root} has no folders with pictures; a folder per class is expected")
        self.scale = 1 / (255 * np.asarray(std, np.float64))
        self.shift = -np.asarray(mean) / np.asarray(std)
        self._size: tuple[int, int] | None = None  # width, height
        if size is not None:
            height, width = (
                check_integer("[data] size", s, 1)
                for s in ((size, size) if np.ndim(size) == 0 else size)
            )
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
                f"{path} has {pixels.shape[2]} x {pixels.shape[1]} pixels, the first picture "
                f"{self._size[0]} x "
                f"{self._size[1]}; give ImageFolder a size"
            )
        return pixels, number

    def fingerprint(self) -> str:
        """16 hexadecimal digits that stand for names, classes and sizes of the files; sizes of
        at most 10,000.
        """
        sampled_paths = {
            self.files[i][0]
            for i in np.linspace(0, len(self) - 1, min(len(self), 10_000)).astype(np.int64)
        }
        try:
            lines = [
                f"{self.classes[k]}/{os.path.basename(path)} "
                f"{os.path.getsize(path) if path in sampled_paths else ''}"
                for path, k in self.files
            ]
        except OSError as problem:
            raise DataError(
                f"{problem.filename} was removed ({problem.strerror}); put it back"
            ) from None
        return digest(f"{self._size} {self._cut}", *lines)

    def _read(self, path: str) -> np.ndarray:
        from PIL import Image, ImageOps

        try:
            with Image.open(path) as image:
                if self._cut:
                    # a JPEG is decoded at the next larger size that is cheap
                    image.draft("RGB", self._size)
                rgb_image = (
                    image if image.mode == "RGB" else image.convert("RGB")
                )  # which would copy
                if self._cut:
                    rgb_image = ImageOps.fit(rgb_image, self._size, Image.Resampling.BILINEAR)
                return np.ascontiguousarray(np.asarray(rgb_image).transpose(2, 0, 1))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
            raise DataError(
                f"{path} cannot be read as an image ({problem}); replace it, or move it elsewhere"
            ) from None


def npz(path: str | Path, inputs: Any = "x", targets: Any = "y") -> ArrayDataset:
    """Arrays of an .npz file; inputs, targets: a name, or a tuple or dict of names.

    DataError as `arrays`.
    """
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
    except DataError:
        raise
    except (OSError, ValueError, zipfile.BadZipFile) as problem:
        raise DataError(
            f"{path} cannot be read as .npz ({problem}); write it with numpy.savez"
        ) from None


class RowFile:
    """An array (N, ...) in a file, .npy or plain numbers (little-endian, of `dtype`), read by
    the rows that are asked for.
    """

    def __init__(self, path: str | Path, dtype: Any = np.uint16) -> None:
        self.path = os.path.abspath(path)
        self.offset = 0
        self.row = ()
        self._file = None
        try:
            with open(path, "rb") as file:
                if self.path.endswith(".npy"):
                    read = {
                        (1, 0): np.lib.format.read_array_header_1_0,
                        (2, 0): np.lib.format.read_array_header_2_0,
                    }
                    (count, *self.row), fortran, dtype = read[np.lib.format.read_magic(file)](file)
                    self.offset = file.tell()
                    if fortran or dtype.hasobject:
                        raise ValueError("rows must be one behind the other, of numbers")
                size = os.fstat(file.fileno()).st_size - self.offset
        except (OSError, ValueError, KeyError) as problem:
            raise DataError(
                f"{path} cannot be read as an array ({problem}); write it with numpy.save"
            ) from None
        self.dtype = np.dtype(dtype)
        self._bytes = self.dtype.itemsize * int(np.prod(self.row, dtype=np.int64))
        self._count = size // self._bytes if not self.path.endswith(".npy") else count
        if self._count * self._bytes != size or not size:
            raise DataError(
                f"{path} holds {size} bytes of numbers, which are no {self.dtype} rows {self.row}"
            )

    def __len__(self) -> int:
        return self._count

    def read(self, first: int, n: int) -> np.ndarray:
        """Rows first to first + n - 1, (n, ...)."""
        if self._file is None:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - open as long as this is used
        content = os.pread(self._file.fileno(), n * self._bytes, self.offset + first * self._bytes)
        if len(content) != n * self._bytes:
            raise DataError(
                f"{self.path} has become shorter while it was in use; leave it unchanged"
            )
        return np.frombuffer(content, self.dtype).reshape(n, *self.row)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None}


class npy(Gathered):  # noqa: N801 - called like the functions here
    """Samples and targets in two .npy files (N, ...), larger than memory if need be: rows are
    read when asked for.
    """

    def __init__(self, inputs: str | Path, targets: str | Path, classes: int | None = None) -> None:
        self._parts = RowFile(inputs), RowFile(targets)
        self.classes = classes
        self.sample_shape = tuple(self._parts[0].row)
        if len(self._parts[0]) != len(self._parts[1]):
            raise DataError(
                f"{inputs} has {len(self._parts[0])} rows, {targets} has {len(self._parts[1])}"
            )

    def __len__(self) -> int:
        return len(self._parts[0])

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows `indices` (B,) of both."""
        x, y = (np.concatenate([part.read(int(i), 1) for i in indices]) for part in self._parts)
        return x, y


class Tokens(Gathered):
    """Stretches of a long list of token ids: sample i is ids[i T : i T + T], its target the ids
    that follow each. ids: a RowFile or an array. length: T. classes: how many different ids
    there may be. vocabulary: what each id stands for, if it is known. characters: of a token,
    on average.
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
        self.classes = classes
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

    @property
    def sample_shape(self) -> tuple[int]:
        """(T,)."""
        return (self.length,)

    def bits(self, loss: float) -> dict[str, float]:
        """A mean cross-entropy of tokens, in nats, as "bits_per_character"; "bits_per_token"
        where no text is known.
        """
        per_token = loss / math.log(2)
        if self.vocabulary is None:
            return {"bits_per_token": per_token}
        return {"bits_per_character": per_token / self.characters}

    def __len__(self) -> int:
        return (len(self._ids) - 1) // self.length

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and the ids that follow them, int32 (B, T) each.

        DataError for an id that is not in 0..classes-1.
        """
        t = self.length
        ids = self._ids
        pieces = [
            ids.read(i * t, t + 1) if isinstance(ids, RowFile) else ids[i * t : i * t + t + 1]
            for i in indices.tolist()
        ]
        rows = np.array(pieces).reshape(-1, t + 1)
        if rows.size and (rows.min() < 0 or rows.max() >= self.classes):
            row = np.flatnonzero((rows < 0).any(1) | (rows >= self.classes).any(1))[0]
            raise DataError(
                f"[data] sample {indices[row]} has the token {rows[row].max()}; 0 to "
                f"{self.classes - 1} are allowed"
            )
        return rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)


def tokens(path: str | Path, *, length: int, classes: int, dtype: Any = np.uint16) -> Tokens:
    """Token ids in a file, .npy (N,) or plain numbers of `dtype` (.bin), larger than memory if
    need be.
    """
    return Tokens(RowFile(path, dtype), length, classes)


def text(
    path: str | Path,
    *,
    length: int = 64,
    tokenizer: str | Path | None = None,
    train: bool | None = None,
) -> Tokens:
    """A text file in UTF-8 as ids of its characters, in the order of their code points, or of a
    tokenizer.

    tokenizer: a tokenizer.json of the package tokenizers. train: True: the first nine tenths of the
        text, False: the rest, None: all; the vocabulary is that of all.
    """
    content = _read(path)
    if (
        Path(path) == _SHAKESPEARE
        and hashlib.sha256(content.encode()).hexdigest() != _SHAKESPEARE_SHA256
    ):
        raise DataError(f"{path} was altered; {REINSTALL}")
    if tokenizer is None:
        vocabulary = Vocabulary(sorted(set(content)))
    else:
        vocabulary = Vocabulary((), _read(tokenizer), str(tokenizer))
    ids = vocabulary.encode(content)
    edge = len(ids) * 9 // 10
    characters = len(content) / max(len(ids), 1)
    ids = ids if train is None else ids[:edge] if train else ids[edge:]
    return Tokens(ids, length, len(vocabulary), vocabulary, characters)


def _read(path: str | Path) -> str:
    try:
        content = Path(path).read_bytes()
        return (gzip.decompress(content) if str(path).endswith(".gz") else content).decode()
    except (OSError, EOFError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise DataError(f"{path} cannot be read as text ({reason}); give a file in UTF-8") from None


def shakespeare(*, length: int = 64, train: bool | None = None) -> Tokens:
    """Eight plays of Shakespeare, 1,036,004 characters, 76 different ones; they come with the
    package. See `text`.
    """
    return text(_SHAKESPEARE, length=length, train=train)


class columns(Described):  # noqa: N801
    """A data set whose rows are dicts, as those of Hugging Face, as one of (sample, target).

    inputs, targets: the name of a column, or a tuple or dict of names.
    scale, shift: a uint8 pixel p stands for p * scale + shift, one number or per channel.
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

        def part(name: str) -> Any:
            if name not in row:
                raise DataError(
                    f"[data] row {i} has no column {name!r}; it has {', '.join(map(repr, row))}"
                )
            return row[name]

        return mapped(part, self.inputs), mapped(part, self.targets)

    def fingerprint(self) -> str:
        """Returns what stands for the rows: Hugging Face's own fingerprint; of a list 16 digits
        (hex) of a few.
        """
        if not isinstance(self.rows, (list, tuple)):
            return str(getattr(self.rows, "_fingerprint", ""))
        row_numbers = np.linspace(0, len(self) - 1, min(len(self), 100)).astype(np.int64).tolist()
        return digest(*(np.asarray(leaf) for i in row_numbers for leaf in leaves(self[i])))


class Subset(Described):
    """Some samples of a data set, by their numbers (N,)."""

    def __init__(self, dataset: Any, numbers: np.ndarray) -> None:
        self.dataset = dataset
        self.numbers = numbers
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

    def fingerprint(self) -> str:
        """16 hexadecimal digits that stand for the data set and the numbers."""
        return digest(fingerprint(self.dataset) or "", self.numbers)


def fingerprint(dataset: Any) -> str | None:
    """Returns what stands for the samples of a data set, by its own method `fingerprint`; None:
    it has none.
    """
    method = getattr(dataset, "fingerprint", None)
    return str(method()) or None if callable(method) else None


def _parts(samples: int, fraction: float = 0.1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the samples of a training and a test part."""
    count = max(1, round(samples * fraction))
    if not 0 < fraction < 1 or count >= samples:
        raise ConfigError(
            f"[data] split: {count} of {samples} samples for the test; leave some for training"
        )
    order = permutation(samples, seed, 0)
    return np.sort(order[count:]), np.sort(order[:count])


def split(dataset: Any, fraction: float = 0.1, seed: int = 0) -> tuple[Any, Any]:
    """(training part, test part) of a data set: a random `fraction` of the samples, at least
    one, is for the test.
    """
    parts = _parts(len(dataset), fraction, seed)
    if not isinstance(dataset, ArrayDataset):
        return Subset(dataset, parts[0]), Subset(dataset, parts[1])
    rows = [dataset.rows(part) for part in parts]
    return tuple(dataclasses.replace(dataset, images=x, labels=y) for x, y in rows)


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
) -> Any:
    """One part of what `odyssey train --dataset NAME --data-dir PATH` names.

    PATH is a file, of which a tenth is for the test, or a folder with `train` and `test` (train.csv
    and so on); a text is one file. size: of pictures. target, normalize, drop_columns (with
    commas), fill: of a table, whose training part decides; like: of a table of that, which goes
    before them. length: of stretches of text.
    """
    if name in DATASETS:
        return load(name, train=train, data_dir=path)
    if name == "shakespeare":
        return shakespeare(length=length, train=train)
    if path is None:
        raise ConfigError(
            f"[data] --dataset {name} is a data set of your own; say where it is with --data-dir"
        )
    if name == "text":
        return text(path, length=length, train=train)
    ending = "" if name == "image-folder" else f".{name}"
    parts = path / f"train{ending}", path / f"test{ending}"
    needs_split = not parts[0].exists()
    part_path = path if needs_split else parts[0 if train else 1]
    if name == "csv":
        dropped = [] if drop_columns is None else [name.strip() for name in drop_columns.split(",")]
        options = {"normalize": normalize, "drop_columns": dropped, "fill": fill}
        if not needs_split and not train and like is None:
            like = csv(parts[0], target, words=False, **options).columns
        if like is not None:
            options = {"like": like}
        table = Table(part_path)
        training = _parts(len(table.lines))[0] if needs_split else slice(None)
        dataset: Any = csv(table, target, words=needs_split, training=training, **options)
    else:
        dataset = npz(part_path) if name == "npz" else ImageFolder(part_path, size)
        # numbers (N,), for an output (N, 1)
        if name == "npz" and not dataset.classes and np.ndim(dataset.labels) == 1:
            dataset = dataclasses.replace(dataset, labels=dataset.labels[:, None])
        # bytes are pixels, as a folder's are
        if name == "npz" and dataset.normalised and dataset.images.dtype == np.uint8:
            scale = np.full_like(dataset.scale, 1 / 127.5)
            dataset = dataclasses.replace(dataset, scale=scale, shift=np.full_like(scale, -1))
    if needs_split:
        return split(dataset)[0 if train else 1]
    if (
        name == "image-folder"
        and not train
        and dataset.classes != ImageFolder(parts[0], size).classes
    ):
        raise DataError(
            f"{part_path} has other folders than {parts[0]}; the classes must be the same"
        )
    return dataset
