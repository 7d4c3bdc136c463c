"""Data sets as people write them, for test_ordinary_data.py.

`CASES` holds functions of a folder that return a loader, by name. Each builds all objects anew, as
a program does that is started again. `write` puts the files into the folder once.

    python ordinary_data.py FOLDER STEPS

trains with every case until a number of steps (0: until the end), and prints a line of JSON for
each: its name and the hash of its weights.
"""

from __future__ import annotations

import csv
import functools
import gc
import gzip
import importlib
import io
import json
import logging
import mmap
import os
import random
import sqlite3
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import data

from odyssey.errors import Stopped
from odyssey.torch import DistributedTrainer

SAMPLES, WIDTH, CLASSES = 24, 4, 3
BATCH, EPOCHS = 6, 2
STEPS = SAMPLES // BATCH * EPOCHS
X = np.random.default_rng(0).standard_normal((SAMPLES, WIDTH)).astype(np.float32)
Y = np.arange(SAMPLES) % CLASSES
log = logging.getLogger("ordinary data")

CASES: dict[str, Callable[[Path], Any]] = {}
PACKAGES: dict[str, str] = {}  # that a case needs


def case(package: str | None = None) -> Callable[[Any], Any]:
    """Adds a function of a folder, or a class whose objects are data sets, to the cases."""

    def add(make: Any) -> Any:
        name = make.__name__
        if package is not None:
            PACKAGES[name] = package
        CASES[name] = functools.partial(_loader_of, make) if isinstance(make, type) else make
        return make

    return add


def _loader_of(make: type, folder: Path) -> data.DataLoader:
    return data.DataLoader(make(folder), BATCH, shuffle=True, generator=_seeded())


def _seeded() -> torch.Generator:
    """Returns a generator of this loader; ranks are threads, which share the one of the process."""
    return torch.Generator().manual_seed(7)


def is_available(name: str) -> bool:
    """Tells whether the package that a case needs can be imported."""
    package = PACKAGES.get(name)
    if package is None:
        return True
    if package == "torchvision":
        package = "pytorch.vision"  # which imports one that was built for GPUs, too
    try:
        importlib.import_module(package)
    except Exception:  # one package fails with an error of PyTorch's
        return False
    return True


def write(folder: Path) -> None:
    """Writes the samples as files of many formats."""
    np.save(folder / "x.npy", X)
    X.tofile(folder / "x.bin")
    np.savez(folder / "x.npz", x=X)
    (folder / "samples").mkdir()
    with (
        tarfile.open(folder / "x.tar", "w") as tar,
        zipfile.ZipFile(folder / "x.zip", "w") as archive,
    ):
        for i, row in enumerate(X):
            name = f"samples/{i}.bin"
            (folder / name).write_bytes(row.tobytes())
            tar.add(folder / name, name)
            archive.write(folder / name, name)
    lines = "".join(json.dumps({"x": row.tolist()}) + "\n" for row in X)
    (folder / "x.jsonl").write_text(lines)
    with gzip.open(folder / "x.jsonl.gz", "wt") as file:
        file.write(lines)
    with open(folder / "x.csv", "w", newline="") as file:
        csv.writer(file).writerows(X.tolist())
    with sqlite3.connect(folder / "x.db") as database:
        database.execute("create table samples (number integer primary key, x blob)")
        rows = [(i, row.tobytes()) for i, row in enumerate(X)]
        database.executemany("insert into samples values (?, ?)", rows)
    database.close()
    sentences = [" ".join(f"word{(7 * i + j) % 90}" for j in range(WIDTH)) for i in range(SAMPLES)]
    (folder / "text.txt").write_text("\n".join(sentences))
    if importlib.util.find_spec("h5py"):
        import h5py

        with h5py.File(folder / "x.h5", "w") as file:
            file["x"] = X
    if importlib.util.find_spec("lmdb"):
        import lmdb

        with lmdb.open(str(folder / "x.lmdb")) as environment, environment.begin(write=True) as txn:
            for i, row in enumerate(X):
                txn.put(str(i).encode(), row.tobytes())
    if importlib.util.find_spec("PIL"):
        from PIL import Image

        for i in range(SAMPLES):
            pixels = np.random.default_rng(i).integers(0, 255, (2, 2), np.uint8)
            Image.fromarray(pixels).save(folder / f"samples/{i}.png")


class Base(data.Dataset):
    """A data set of the samples; subclasses say how one is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return SAMPLES

    def read(self, i: int) -> np.ndarray:
        return X[i]

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(np.array(self.read(i), np.float32)), int(Y[i])


# --- files that are opened late -------------------------------------------------------------------


@case("h5py")
class Hdf5(Base):
    file: Any = None

    def read(self, i):
        import h5py

        if self.file is None:
            self.file = h5py.File(self.folder / "x.h5")
            self.rows = self.file["x"]
        return self.rows[i]


@case("lmdb")
class Lmdb(Base):
    def __init__(self, folder):
        super().__init__(folder)
        self.environment = None
        self.transaction = None

    def read(self, i):
        import lmdb

        if self.environment is None:
            self.environment = lmdb.open(str(self.folder / "x.lmdb"), readonly=True, lock=False)
            self.transaction = self.environment.begin()
        return np.frombuffer(self.transaction.get(str(i).encode()), np.float32)


@case()
class Tar(Base):
    """Opens the archive in the first step, and keeps its members by name."""

    tar = None

    def read(self, i):
        if self.tar is None:
            self.tar = tarfile.open(self.folder / "x.tar")
            self.members = {member.name: member for member in self.tar.getmembers()}
        return np.frombuffer(self.tar.extractfile(self.members[f"samples/{i}.bin"]).read(), "f4")


@case()
class Zip(Base):
    def __init__(self, folder):
        super().__init__(folder)
        self.archive = zipfile.ZipFile(folder / "x.zip")
        self.names = self.archive.namelist()

    def read(self, i):
        return np.frombuffer(self.archive.read(self.names[i]), np.float32)


@case("PIL")
class Images(Base):
    """Keeps the images that were read."""

    def __init__(self, folder):
        super().__init__(folder)
        self.images = {}

    def read(self, i):
        from PIL import Image

        if i not in self.images:
            self.images[i] = Image.open(self.folder / f"samples/{i}.png").convert("L")
        return np.asarray(self.images[i]).reshape(-1)


@case()
class Mapped(Base):
    """Maps the file in the first step."""

    rows = None

    def read(self, i):
        if self.rows is None:
            self.rows = np.load(self.folder / "x.npy", mmap_mode="r", allow_pickle=False)
        return self.rows[i]


@case()
class MemoryMap(Base):
    def __init__(self, folder):
        super().__init__(folder)
        self.rows = np.memmap(folder / "x.bin", np.float32, "r", shape=(SAMPLES, WIDTH))
        self.tensor = torch.from_numpy(np.memmap(folder / "x.bin", np.float32, "c"))

    def read(self, i):
        return self.rows[i] + self.tensor[i].item()


@case()
class Npz(Base):
    def __init__(self, folder):
        super().__init__(folder)
        self.archive = np.load(folder / "x.npz", allow_pickle=False)

    def read(self, i):
        return self.archive["x"][i]


@case()
class Database(Base):
    connection = None
    cursor = None

    def read(self, i):
        if self.connection is None:
            self.connection = sqlite3.connect(self.folder / "x.db", check_same_thread=False)
            self.cursor = self.connection.cursor()
        (x,) = self.cursor.execute("select x from samples where number = ?", (i,)).fetchone()
        return np.frombuffer(x, np.float32)


@case()
class Mmap(Base):
    def __init__(self, folder):
        super().__init__(folder)
        self.file = open(folder / "x.bin", "rb")  # noqa: SIM115
        self.map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        self.view = memoryview(self.map)

    def read(self, i):
        return np.frombuffer(self.view[16 * i : 16 * i + 16], np.float32)


@case()
class LinesByOffset(Base):
    """Finds where lines start in the first step, and keeps the open file."""

    file = None
    offsets: list[int] | None = None

    def read(self, i):
        if self.offsets is None:
            self.file = open(self.folder / "x.jsonl", "rb")  # noqa: SIM115
            self.offsets = [0]
            while self.file.readline():
                self.offsets.append(self.file.tell())
        self.file.seek(self.offsets[i])
        return json.loads(self.file.readline())["x"]


@case()
class Gzip(Base):
    """Reads all lines in the first step."""

    def read(self, i):
        if not hasattr(self, "lines"):
            with gzip.open(self.folder / "x.jsonl.gz", "rt") as file:
                self.lines = [json.loads(line) for line in file]
        return self.lines[i]["x"]


@case()
def csv_stream(folder):
    class Csv(data.IterableDataset):
        def __init__(self):
            self.rows_read = 0
            self.reader = None

        def __iter__(self):
            self.file = open(folder / "x.csv", newline="")  # noqa: SIM115
            self.reader = csv.reader(self.file)
            for i, row in enumerate(self.reader):
                self.rows_read += 1
                yield torch.tensor(list(map(float, row))), int(Y[i])

    return data.DataLoader(Csv(), BATCH)


@case()
def handles_by_worker(folder):
    """Each worker opens its own file, by its process id."""

    class Handles(Base):
        def __init__(self):
            super().__init__(folder)
            self.handles = {}

        def read(self, i):
            key = os.getpid()
            if key not in self.handles:
                self.handles[key] = open(folder / "x.bin", "rb")  # noqa: SIM115
            self.handles[key].seek(16 * i)
            return np.frombuffer(self.handles[key].read(16), np.float32)

    def start(number):
        info = data.get_worker_info()
        info.dataset.handles = {}
        log.debug("worker %d", number)

    return data.DataLoader(
        Handles(), BATCH, shuffle=True, num_workers=1, worker_init_fn=start, persistent_workers=True
    )


@case()
class HandlesHere(Base):
    """Opens a file for each process and thread."""

    def __init__(self, folder):
        super().__init__(folder)
        self.handles = {}
        self.local = threading.local()

    def read(self, i):
        key = os.getpid(), threading.get_ident()
        if key not in self.handles:
            self.handles[key] = io.BytesIO((self.folder / "x.bin").read_bytes())
        if not hasattr(self.local, "rows"):
            self.local.rows = np.fromfile(self.folder / "x.bin", np.float32).reshape(-1, WIDTH)
        self.handles[key].seek(16 * i)
        return np.frombuffer(self.handles[key].read(16), np.float32) + self.local.rows[i]


# --- caches ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def read_cached(path: Path, i: int) -> np.ndarray:
    return np.fromfile(path, np.float32, WIDTH, offset=16 * i)


@functools.cache
def offset_of_class(label: int) -> float:
    return label / 10


_in_memory: dict[int, np.ndarray] = {}
_last_index = -1


@case()
class CachedFunctions(Base):
    def read(self, i):
        return read_cached(self.folder / "x.bin", i) + offset_of_class(int(Y[i]))


@case()
class CachedMethods(Base):
    """Has a cached method and a cached property."""

    @functools.cache  # noqa: B019
    def row(self, i):
        return np.fromfile(self.folder / "x.bin", np.float32, WIDTH, offset=16 * i)

    @functools.cached_property
    def mean(self):
        return np.load(self.folder / "x.npy", allow_pickle=False).mean(0)

    def read(self, i):
        return self.row(i) - self.mean


@case()
class CachedInAnInstance(Base):
    """Makes a cached function of its own."""

    def __init__(self, folder):
        super().__init__(folder)
        self.cached = functools.lru_cache(maxsize=8)(self.from_file)
        self.mean = None

    def from_file(self, i):
        return np.fromfile(self.folder / "x.bin", np.float32, WIDTH, offset=16 * i)

    def read(self, i):
        if self.mean is None:
            self.mean = np.load(self.folder / "x.npy", allow_pickle=False).mean(0)
        return self.cached(i) - self.mean


class Record:
    """One sample that a cache keeps."""

    def __init__(self, x, label):
        self.x = x
        self.label = label
        self.reads = 0


@case()
class CachedSamples(Base):
    """Keeps samples in dicts, as tensors, objects and bytes, and in a global."""

    def __init__(self, folder):
        super().__init__(folder)
        self.tensors = {}
        self.records = {}
        self.bytes = {}

    def __getitem__(self, i):
        global _last_index
        _last_index = i
        if i not in self.tensors:
            self.tensors[i] = torch.from_numpy(X[i].copy())
            self.records[i] = Record(X[i], int(Y[i]))
            self.bytes[i] = X[i].tobytes()
            _in_memory[i] = X[i]
        self.records[i].reads += 1
        return self.tensors[i], self.records[i].label


@case()
class Preallocated(Base):
    """Fills arrays of samples lazily: small ones, and one of 4 MB."""

    def __init__(self, folder):
        super().__init__(folder)
        self.rows = torch.zeros(SAMPLES, WIDTH)
        self.large = np.zeros((SAMPLES, 1 << 15), np.float32)
        self.is_read = np.zeros(SAMPLES, bool)
        self.list = [None] * SAMPLES

    def read(self, i):
        if not self.is_read[i]:
            self.rows[i] = torch.from_numpy(X[i])
            self.large[i] = i + 1
            self.list[i] = X[i].tolist()
            self.is_read[i] = True
        return self.rows[i].numpy() + self.large[i, 0] + self.list[i][0]


@case()
class Uninitialised(Base):
    """Fills memory lazily that was allocated without a value, of 4 MB."""

    def __init__(self, folder):
        super().__init__(folder)
        self.large = torch.empty(SAMPLES, 1 << 15)
        self.large.fill_(-1)
        self.numbers = np.full((SAMPLES, 1 << 15), -1.0)
        self.is_read = [False] * SAMPLES

    def read(self, i):
        if not self.is_read[i]:
            self.large[i] = float(i)
            self.numbers[i] = i
            self.is_read[i] = True
        return X[i] + self.large[i, 0].item() + self.numbers[i, 5]


# --- text -----------------------------------------------------------------------------------------


@case()
class Vocabulary(Base):
    """Has words as dicts and lists of 50,000, and counts the ones that are read."""

    def __init__(self, folder):
        super().__init__(folder)
        self.word_of = [f"word{n}" for n in range(50_000)]
        self.number_of = {word: n for n, word in enumerate(self.word_of)}
        self.pairs = {(f"a{n}", f"b{n}"): n for n in range(20_000)}
        self.seen = {}
        self.text = (folder / "text.txt").read_text().split("\n")

    def read(self, i):
        words = self.text[i].split()
        for word in words:
            self.seen[word] = self.seen.get(word, 0) + 1
        return [self.number_of[word] / 50 for word in words]


def _tokenizer(folder: Path) -> Any:
    import tokenizers

    words = sorted(set((folder / "text.txt").read_text().split()))
    model = tokenizers.models.WordLevel({w: n for n, w in enumerate(["[UNK]", *words])}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


@case("tokenizers")
class Tokenized(Base):
    """Is built with a tokenizer, and sets its padding in the first step."""

    def __init__(self, folder):
        super().__init__(folder)
        self.tokenizer = _tokenizer(folder)
        self.text = (folder / "text.txt").read_text().split("\n")

    def read(self, i):
        if i == 0:
            self.tokenizer.enable_truncation(WIDTH)
        return np.array(self.tokenizer.encode(self.text[i]).ids) / 40


@case("transformers")
def tokenized_in_collate(folder):
    """A fast tokenizer of transformers in a collate function."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(folder), unk_token="[UNK]", pad_token="[UNK]"
    )
    lines = (folder / "text.txt").read_text().split("\n")

    def collate(rows):
        encoded = tokenizer([text for text, _ in rows], padding=True, return_tensors="pt")
        return encoded["input_ids"][:, :WIDTH] / 40, torch.tensor([label for _, label in rows])

    pairs = list(zip(lines, Y.tolist(), strict=True))
    return data.DataLoader(pairs, BATCH, shuffle=True, generator=_seeded(), collate_fn=collate)


@case("tokenizers")
class LateTokenizer(Base):
    """Makes its tokenizer in the first step."""

    tokenizer = None

    def read(self, i):
        if self.tokenizer is None:
            self.tokenizer = _tokenizer(self.folder)
            self.text = (self.folder / "text.txt").read_text().split("\n")
        return np.array(self.tokenizer.encode(self.text[i]).ids) / 40


# --- locks, loggers, bars -------------------------------------------------------------------------


@case()
class LocksAndLoggers(Base):
    def __init__(self, folder):
        super().__init__(folder)
        self.lock = threading.Lock()
        self.condition = threading.Condition()
        self.log = logging.getLogger("samples")
        self.started = time.time()
        self.last_read = None
        self.thread = None
        self.ready = threading.Event()

    def read(self, i):
        if self.thread is None:
            self.thread = threading.Thread(target=self.ready.set, daemon=True)
            self.thread.start()
        self.ready.wait()
        with self.lock, self.condition:
            self.last_read = time.time()
            self.log.debug("sample %d", i)
        return X[i]


@case("tqdm")
class Bars(Base):
    def __init__(self, folder):
        super().__init__(folder)
        import tqdm

        self.bar = tqdm.tqdm(total=SAMPLES, file=io.StringIO())
        self.late = None

    def read(self, i):
        import tqdm

        if self.late is None:
            self.late = tqdm.tqdm(total=SAMPLES, file=io.StringIO())
        self.bar.update()
        self.late.update()
        return X[i]


# --- what torch has -------------------------------------------------------------------------------


def _pairs() -> data.TensorDataset:
    return data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


@case()
def tensors(folder):
    return data.DataLoader(_pairs(), BATCH, shuffle=True)


@case()
def parts_of_data_sets(folder):
    train, _ = data.random_split(
        data.ConcatDataset([_pairs(), _pairs()]),
        [SAMPLES, SAMPLES],
        torch.Generator().manual_seed(3),
    )
    return data.DataLoader(
        data.Subset(train, list(range(SAMPLES))), BATCH, shuffle=True, generator=_seeded()
    )


@case()
def fractions_of_data_sets(folder):
    train, _ = data.random_split(data.ConcatDataset([_pairs(), _pairs()]), [0.5, 0.5])
    return data.DataLoader(train, BATCH, shuffle=True)


@case()
def weighted(folder):
    sampler = data.WeightedRandomSampler(
        [1.0 + i for i in range(SAMPLES)], SAMPLES, generator=torch.Generator().manual_seed(2)
    )
    return data.DataLoader(_pairs(), BATCH, sampler=sampler)


@case()
def batch_sampler(folder):
    order = data.RandomSampler(_pairs(), generator=torch.Generator().manual_seed(2))
    return data.DataLoader(_pairs(), batch_sampler=data.BatchSampler(order, BATCH, True))


class Balanced(data.Sampler):
    """Draws from its own generators, and remembers what it drew."""

    def __init__(self, labels: np.ndarray, seed: int) -> None:
        self.labels = labels
        self.generator = np.random.default_rng(seed)
        self.torch_generator = torch.Generator().manual_seed(seed)
        self.epoch = 0
        self.last = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = self.generator.permutation(SAMPLES)
        self.last = order[torch.randperm(SAMPLES, generator=self.torch_generator).numpy()]
        return iter(self.last.tolist())


@case()
def own_sampler(folder):
    return data.DataLoader(_pairs(), BATCH, sampler=Balanced(Y, 5))


@case()
def buckets(folder):
    """A batch sampler of batches of similar length, which are shuffled each epoch."""

    class Buckets:
        def __init__(self):
            self.random = random.Random(4)
            self.order = sorted(range(SAMPLES), key=lambda i: float(X[i, 0]))

        def __len__(self):
            return SAMPLES // BATCH

        def __iter__(self):
            batches = [self.order[at : at + BATCH] for at in range(0, SAMPLES, BATCH)]
            self.random.shuffle(batches)
            yield from batches

    return data.DataLoader(_pairs(), batch_sampler=Buckets())


@case()
def shuffled_stream(folder):
    class Stream(data.IterableDataset):
        def __init__(self):
            self.epoch = 0
            self.buffer = []
            self.random = None

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            self.random = random.Random(self.epoch)
            self.buffer = list(range(SAMPLES))
            while self.buffer:
                i = self.buffer.pop(self.random.randrange(len(self.buffer)))
                yield torch.from_numpy(X[i]), int(Y[i])

    return data.DataLoader(Stream(), BATCH)


@case()
def generator_of_batches(folder):
    """A stream that keeps its open generator."""

    class Stream(data.IterableDataset):
        rows = None

        def __iter__(self):
            self.rows = ((torch.from_numpy(x), int(y)) for x, y in zip(X, Y, strict=True))
            self.zipped = zip(X, Y, strict=True)
            return self.rows

    return data.DataLoader(Stream(), BATCH)


# --- collate functions, workers, transforms -------------------------------------------------------


def collate_scaled(rows: list[Any], scale: float, seen: list[int]) -> Any:
    seen.append(len(rows))
    return torch.stack([x for x, _ in rows]) * scale, torch.tensor([int(y) for _, y in rows])


@case()
def collate_partial(folder):
    collate = functools.partial(collate_scaled, scale=0.5, seen=[])
    return data.DataLoader(_pairs(), BATCH, shuffle=True, generator=_seeded(), collate_fn=collate)


@case()
def collate_object(folder):
    class Collate:
        def __init__(self):
            self.calls = 0
            self.log = logging.getLogger("collate")
            self.longest = None

        def __call__(self, rows):
            self.calls += 1
            self.longest = max(rows, key=lambda row: float(row[0].norm()))[0]
            return collate_scaled(rows, 2.0, [])

    return data.DataLoader(_pairs(), BATCH, shuffle=True, generator=_seeded(), collate_fn=Collate())


@case()
def collate_closure(folder):
    calls = 0
    generator = torch.Generator().manual_seed(0)

    def collate(rows):
        nonlocal calls
        calls += 1
        x, y = collate_scaled(rows, 1.0, [])
        return x + torch.randn(x.shape, generator=generator), y

    return data.DataLoader(_pairs(), BATCH, shuffle=True, generator=_seeded(), collate_fn=collate)


def start_worker(number: int, seed: int) -> None:
    random.seed(seed + number)
    np.random.seed(seed + number)


@case()
def workers(folder):
    return data.DataLoader(
        CachedSamples(folder),
        BATCH,
        shuffle=True,
        num_workers=1,
        worker_init_fn=functools.partial(start_worker, seed=3),
        generator=torch.Generator().manual_seed(3),
    )


class Jitter:
    """A transform with parameters and its own random numbers."""

    def __init__(self, amount: float, seed: int) -> None:
        self.amount = amount
        self.random = random.Random(seed)
        self.last_amount = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.last_amount = self.random.uniform(-self.amount, self.amount)
        return x + self.last_amount


@case()
def transforms(folder):
    class Transformed(Base):
        def __init__(self):
            super().__init__(folder)
            self.transform = [Jitter(0.5, 1), lambda x: x * 2, torch.abs]

        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            for transform in self.transform:
                x = transform(x)
            return x, y

    return data.DataLoader(Transformed(), BATCH, shuffle=True, generator=_seeded())


@case("torchvision")
def vision_transforms(folder):
    from torchvision.transforms import v2

    class Pictures(Base):
        transform = v2.Compose(
            [
                v2.RandomHorizontalFlip(),
                v2.Normalize([0.5], [0.2]),
                v2.RandomChoice([v2.Identity(), v2.RandomVerticalFlip()]),
            ]
        )

        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return self.transform(x.reshape(1, 2, 2)).reshape(-1), y

    return data.DataLoader(Pictures(folder), BATCH, shuffle=True, generator=_seeded())


# --- tables ---------------------------------------------------------------------------------------


@case("pandas")
class Table(Base):
    """Has a table of pandas, adds a column in the first step, and keeps a view of rows."""

    def __init__(self, folder):
        super().__init__(folder)
        import pandas

        self.frame = pandas.DataFrame(X, columns=list("abcd"))
        self.frame["name"] = [f"sample {i}" for i in range(SAMPLES)]
        self.frame["class"] = pandas.Categorical([str(label) for label in Y])
        self.groups = None
        self.last_row = None

    def read(self, i):
        if self.groups is None:
            self.frame["sum"] = self.frame[list("abcd")].sum(axis=1)
            self.groups = self.frame.groupby("class", observed=True)["sum"].mean()
        self.last_row = self.frame.iloc[i]
        mean = self.groups[self.last_row["class"]]
        return np.array(self.last_row[list("abcd")], np.float32) - mean


class Columns:
    """Columns in memory maps that are opened when they are first read."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder = folder
        self._maps = dict.fromkeys(names)
        self._indices = np.arange(SAMPLES)
        self._format = None
        self._fingerprint = "0123"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> np.ndarray:
        if self._maps[name] is None:
            self._maps[name] = np.memmap(self._folder / f"{name}.bin", np.float32, "r")
            self._format = "numpy"
        return self._maps[name]


@case()
class ColumnsOfMaps(Base):
    def __init__(self, folder):
        super().__init__(folder)
        self.columns = Columns(folder, ["x"])

    def read(self, i):
        return self.columns.x[WIDTH * i : WIDTH * i + WIDTH]


@case("datasets")
def hugging_face(folder):
    import datasets

    rows = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("torch")

    def collate(items):
        return torch.stack([one["x"] for one in items]), torch.stack([one["y"] for one in items])

    return data.DataLoader(rows, BATCH, shuffle=True, generator=_seeded(), collate_fn=collate)


# --- training -------------------------------------------------------------------------------------


def train(
    comm: Any, name: str, folder: Path, steps: int | None = None, **fit: Any
) -> tuple[str, list[str]]:
    """Trains with a case, and returns the hash of the weights and what was printed."""
    gc.collect()  # LMDB opens a file once in a process
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    loader = CASES[name](folder)
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    with torch.no_grad():  # ranks are threads, which share the generator
        for p in module.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
    trainer = DistributedTrainer(
        module,
        torch.optim.Adam(module.parameters(), 0.05),
        shard_size=BATCH // 2,
        comm=comm,
    )
    lines: list[str] = []
    say = trainer.say
    trainer.capture._say = lambda text: (lines.append(text), say(text))
    try:
        trainer.fit(loader, epochs=EPOCHS, steps=steps, verbose=False, **fit)
    except Stopped:
        pass
    return trainer.weights_sha256(), lines


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    for name in CASES:
        if is_available(name):
            sha, _ = train(None, name, folder, steps or None, checkpoint_dir=folder / "runs" / name)
            print(json.dumps([name, sha]), flush=True)


if __name__ == "__main__":
    main()
