"""Data sets of all kinds for random trainings: in memory, in files, a sample at a time; their
transforms and losses.

What is drawn here is drawn with `scripts/random-layouts --data` only, so the cases without it stay
what they are. Worker processes import this module, for the data sets and transforms in it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from chance import DRAWS, Random, drawn
from networks import Network, Shape
from samples import Joined, Loss, numbers_and_classes, numbers_as_targets, targets

from odyssey import data, nn
from odyssey import functional as F
from odyssey.core.tensor import Tensor
from odyssey.data import transforms
from odyssey.data.sources import Subset


@dataclasses.dataclass(frozen=True)
class Kind:
    """A data set, and what its samples and targets are.

    inputs: "one" array, "two", a "dict" of two, or "ids". targets: "classes", "numbers", "both", or
    "ids".
    """

    text: str
    build: Callable[[], Any]
    inputs: str = "one"
    targets: str = "classes"
    transform: Any = None


Make = Callable[[Random, Shape, int, int], Kind]
KINDS: dict[str, tuple[float, Callable[[Network], bool], Make]] = {}


def kind(weight: float, fits: Callable[[Network], bool] = lambda n: True) -> Callable[[Make], Make]:
    """Decorator: adds a function (random, shape, outputs, samples) to the kinds, for networks
    that fit.
    """

    def add(function: Make) -> Make:
        KINDS[function.__name__] = weight, fits, function
        return function

    return add


def is_row(network: Network) -> bool:
    return len(network.shape) == 1


def can_be_wrapped(network: Network) -> bool:
    """Not one whose layers a pipeline places."""
    return network.micro is None and network.places == 1


# --- files ----------------------------------------------------------------------------------------

_MADE: dict[Any, tempfile.TemporaryDirectory[str]] = {}
_LOCK = threading.Lock()  # ranks may be threads


def file(write: Callable[..., None], name: str, *given: Any) -> Path:
    """A file or folder that write(path, *given) makes, once per process."""
    with _LOCK:
        key = (write, *given)
        if key not in _MADE:
            _MADE[key] = tempfile.TemporaryDirectory(prefix="odyssey-kinds-")
            write(Path(_MADE[key].name) / name, *given)
        return Path(_MADE[key].name) / name


def _values(shape: Shape, outputs: int, samples: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Floats, classes and numbers in [0, 1)."""
    generator = np.random.default_rng(samples)
    x = generator.standard_normal((samples, *shape)).astype(np.float32)
    return x, generator.integers(0, outputs, samples), generator.random((samples, outputs))


def _write_pictures(root: Path, shape: Shape, classes: int, samples: int) -> None:
    from PIL import Image

    generator = np.random.default_rng(samples)
    for i in range(max(samples, classes)):  # at least one of each class
        path = root / f"{i % classes:02}" / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (*shape[1:], 3), np.uint8)).save(path)


@kind(3, lambda n: len(n.shape) == 3 and n.shape[0] == 3)
def image_folder(random: Random, shape: Shape, classes: int, samples: int) -> Kind:
    return Kind("a folder of pictures", functools.partial(_folder, shape, classes, samples))


def _folder(shape: Shape, classes: int, samples: int) -> Any:
    made = data.ImageFolder(file(_write_pictures, "pictures", shape, classes, samples), shape[1:])
    return made if len(made) == samples else Subset(made, np.arange(samples))


@kind(2, is_row)
def table(random: Random, shape: Shape, outputs: int, samples: int) -> Kind:
    wanted = random.one(["classes", "numbers"])
    return Kind(
        "a table", functools.partial(_table, shape, outputs, samples, wanted), "one", wanted
    )


def _table(shape: Shape, outputs: int, samples: int, wanted: str) -> Any:
    path = file(_write_table, "table.csv", shape, outputs, samples, wanted)
    made = data.csv(path, "class" if wanted == "classes" else [f"y{i}" for i in range(outputs)])
    if wanted == "classes" and made.classes != outputs:  # the highest were not drawn
        made = dataclasses.replace(made, classes=outputs)
    return made


def _write_table(path: Path, shape: Shape, outputs: int, samples: int, wanted: str) -> None:
    x, classes, numbers = _values(shape, outputs, samples)
    y = classes[:, None] if wanted == "classes" else numbers
    names = ["class"] if wanted == "classes" else [f"y{i}" for i in range(outputs)]
    lines = [",".join([*(f"x{i}" for i in range(shape[0])), *names])]
    lines += [",".join(map(repr, [*a.tolist(), *b.tolist()])) for a, b in zip(x, y, strict=True)]
    path.write_text("\n".join(lines))


@kind(1)
def numpy_file(random: Random, shape: Shape, outputs: int, samples: int) -> Kind:
    wanted, rows = random.one(["classes", "numbers"]), random.chance(0.6)
    return Kind(
        ".npy" if rows else ".npz",
        functools.partial(_numpy, shape, outputs, samples, wanted, rows),
        "one",
        wanted,
    )


def _numpy(shape: Shape, outputs: int, samples: int, wanted: str, rows: bool) -> Any:
    path = file(_write_numpy, "", shape, outputs, samples)
    if rows:
        return data.npy(
            path / "x.npy", path / f"{wanted}.npy", outputs if wanted == "classes" else None
        )
    made = data.npz(path / "all.npz", "x", wanted)
    return dataclasses.replace(made, classes=outputs) if wanted == "classes" else made


def _write_numpy(folder: Path, shape: Shape, outputs: int, samples: int) -> None:
    named = dict(zip(("x", "classes", "numbers"), _values(shape, outputs, samples), strict=True))
    for name, array in named.items():
        np.save(folder / f"{name}.npy", array)
    np.savez(folder / "all.npz", **named)


@kind(1.5, lambda n: is_row(n) and can_be_wrapped(n))
def tokens(random: Random, shape: Shape, outputs: int, samples: int) -> Kind:
    how = random.one(["tokens", "text", "text with a transform"])
    build = functools.partial(_tokens, shape[0], samples, how == "tokens")
    return Kind(how, build, "ids", "ids", rolled if "transform" in how else None)


def _tokens(length: int, samples: int, numbers: bool) -> Any:
    if numbers:
        path = file(_write_ids, "ids.bin", length, samples)
        return data.tokens(path, length=length, classes=50, dtype=np.uint16)
    return data.text(file(_write_text, "some.txt", length, samples), length=length)


def _write_ids(path: Path, length: int, samples: int) -> None:
    np.random.default_rng(samples).integers(0, 50, samples * length + 1).astype(np.uint16).tofile(
        path
    )


def _write_text(path: Path, length: int, samples: int) -> None:
    letters = np.random.default_rng(samples).choice(list("abcdefgh ä€\n"), samples * length + 1)
    path.write_bytes("".join(letters).encode())


# --- in memory, and a sample at a time ------------------------------------------------------------


@kind(2)
def in_memory(random: Random, shape: Shape, classes: int, samples: int) -> Kind:
    some = [
        function
        for _, function in DRAWS["data"]
        if function.__name__ not in ("overflowing", "one_by_one")
    ]
    return Kind(*random.one(some)(random, shape, classes, samples))


@kind(2, can_be_wrapped)
def trees_in_memory(random: Random, shape: Shape, outputs: int, samples: int) -> Kind:
    inputs, mixed = random.one(["one", "two", "dict"]), random.chance(0.4)
    build = functools.partial(targets, shape, outputs, samples, inputs, mixed)
    return Kind(f"arrays, {inputs}", build, inputs, "both" if mixed else "numbers")


@kind(4, can_be_wrapped)
def objects(random: Random, shape: Shape, outputs: int, samples: int) -> Kind:
    """A data set of one's own: one array, or trees of several dtypes; perhaps a part of it,
    perhaps of the epoch.
    """
    inputs, wanted = (
        random.one(["one", "bytes", "two", "dict"]),
        random.one(["classes", "numbers", "both"]),
    )
    how = random.one(["", "part", "columns", "epoch"], [4, 1, 1, 1])
    if len(shape) == 3 and shape[0] == 1 and inputs in ("one", "bytes"):
        how = "planes"  # (H, W), which a model gets as (1, H, W)
    build = functools.partial(_objects, shape, outputs, samples, inputs, wanted, how)
    return Kind(
        f"objects {how} {inputs}, {wanted}", build, "one" if inputs == "bytes" else inputs, wanted
    )


class Own:
    """Samples made one by one."""

    def __init__(
        self, shape: Shape, outputs: int, samples: int, inputs: str, wanted: str, how: str
    ) -> None:
        self.inputs, self.wanted, self.how, self.epoch = inputs, wanted, how, 0
        self.all = _values(shape, outputs, samples)
        if wanted == "classes":
            self.classes = [f"class {i}" for i in range(outputs)]
        if inputs == "bytes":
            self.scale, self.shift = 1 / 64, -0.5

    def __len__(self) -> int:
        return len(self.all[0])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch if self.how == "epoch" else 0

    def __getitem__(self, i: int) -> Any:
        x, c, y = (a[i] for a in self.all)
        x = x + np.float32(self.epoch)
        x = x[0] if self.how == "planes" else x
        b = (np.abs(x) * 40).astype(np.uint8)
        given = {"one": x, "bytes": b, "two": (x.astype(np.float64), b), "dict": {"b": b, "a": x}}[
            self.inputs
        ]
        if self.how == "columns":
            return {"given": given, "c": int(c), "y": y}
        return given, {"classes": int(c), "numbers": y, "both": (y, int(c))}[self.wanted]


class Columns(data.columns):
    """With the attributes of its rows."""

    def __init__(self, rows: Own, wanted: str) -> None:
        super().__init__(
            rows, "given", {"classes": "c", "numbers": "y", "both": ("y", "c")}[wanted]
        )
        vars(self).update(
            {k: v for k, v in vars(rows).items() if k in ("classes", "scale", "shift")}
        )


def _objects(shape: Shape, outputs: int, samples: int, inputs: str, wanted: str, how: str) -> Any:
    made = Own(shape, outputs, samples + 5 * (how == "part"), inputs, wanted, how)
    if how == "columns":
        return Columns(made, wanted)
    return Subset(made, np.arange(samples) + 3) if how == "part" else made


# --- transforms -----------------------------------------------------------------------------------


def noise(sample: Any, rng: np.random.Generator) -> Any:
    """Something added to all floats of a sample."""
    if isinstance(sample, tuple):
        return tuple(noise(part, rng) for part in sample)
    if isinstance(sample, dict):
        return {name: noise(sample[name], rng) for name in sorted(sample)}
    return sample + rng.normal(size=sample.shape) * 0.1 if sample.dtype.kind == "f" else sample


def rolled(sample: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Turned by a random number of places."""
    return np.roll(sample, rng.integers(len(sample)))


def dimmed(pair: tuple[Any, np.ndarray], rng: np.random.Generator) -> tuple[Any, np.ndarray]:
    """Sample and target times one random number."""
    x, y = pair
    k = rng.uniform(0.5, 1)
    return x * k, y * k


def transformed(random: Random, kind: Kind, shape: Shape) -> Kind:
    """The kind, perhaps with transforms."""
    if kind.inputs == "ids" or random.chance(0.4):
        return kind
    chosen: list[Any] = [noise] if random.chance(0.5) else []
    if kind.inputs == "one" and len(shape) == 3:
        built_in = [
            transforms.RandomCrop(padding=random.integer(1, 3)),
            transforms.HorizontalFlip(random.one([0.5, 1.0])),
            transforms.Cutout(random.integer(1, 4), p=random.one([0.5, 1.0])),
            transforms.Normalize(0.1, 0.5),
        ]
        chosen += [t for t in built_in if random.chance(0.5)]
    if kind.inputs == "one" and kind.targets == "numbers" and random.chance(0.3):
        chosen.append(transforms.Paired(dimmed))
    if kind.inputs == "one" and kind.targets in ("classes", "numbers") and random.chance(0.25):
        chosen.append(transforms.Mixup(random.one([0.2, 1.0])))
        if kind.targets == "classes":
            kind = dataclasses.replace(kind, targets="shares of classes")
    words = " ".join(getattr(t, "__name__", type(t).__name__) for t in chosen)
    text = f"{kind.text}, {words}" if chosen else kind.text
    return dataclasses.replace(kind, text=text, transform=chosen or None)


# --- losses and networks for them -----------------------------------------------------------------


class OfIds(nn.Module):
    """A model on numbers made of ids, and a number for each id that follows."""

    def __init__(self, model: nn.Module, outputs: int, length: int) -> None:
        super().__init__()
        self.model, self.last = model, nn.Linear(outputs, length)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.model(ids.float() * (1 / 32)))


def of_ids(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target.float() * (1 / 32))


def of_shares(y: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy with a share of each class."""
    return F.mean(F.log_softmax(y) * target) * -1.0


def loss_of(random: Random, targets: str, outputs: int) -> tuple[Loss, Any]:
    """A loss and metrics for so many outputs."""
    if targets == "classes":
        return drawn("loss", random), random.one([None, ("accuracy", "top5"), {"second": "top2"}])
    if targets == "numbers":
        loss, _, metrics = numbers_as_targets(random)
        if random.chance(0.2):
            weights = {"weight": np.linspace(0.5, 2, outputs), "pos_weight": 1.5}
            loss = Loss("weighted BCEWithLogitsLoss", lambda: nn.BCEWithLogitsLoss(**weights))
        return loss, metrics
    if targets == "both":
        loss, _, metrics = numbers_and_classes(random)
        return loss, metrics
    own = {"ids": of_ids, "shares of classes": of_shares}[targets]
    return Loss(f"a loss of {targets}", lambda: own), random.one([None, {"again": own}])


def fitted(network: Network, kind: Kind) -> Network:
    """The network, for such samples."""
    if kind.inputs == "one":
        return network
    whole, outputs, length = network.build, network.classes, math.prod(network.shape)
    if kind.inputs == "ids":
        return dataclasses.replace(network, build=lambda: OfIds(whole(), outputs, length))
    return dataclasses.replace(network, build=lambda: Joined(whole()))
