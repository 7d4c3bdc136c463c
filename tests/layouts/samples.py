"""Random data sets in memory, or of a sample at a time, and the losses and metrics that go with
them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from chance import Random, draw
from networks import Shape

from odyssey import data, nn
from odyssey import functional as F
from odyssey.core.tensor import Tensor
from odyssey.data.nested import leaves

# --- data -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set, the same whenever it is made, and how it is cut into batches."""

    text: str
    samples: int
    batch: int
    build: Callable[[], Any]
    shuffle: bool = False
    prefetch: int = 0
    transform: Any = None
    sampler: Callable[[int], Any] | None = None  # of so many samples

    @property
    def order(self) -> str:
        """In words."""
        return f", {self.sampler.__name__}" if self.sampler else ", shuffled" * self.shuffle

    def loader(
        self, kind: type[data.DataLoader] = data.DataLoader, workers: int = 0
    ) -> data.DataLoader:
        """A new one."""
        how = {
            "shuffle": self.shuffle,
            "seed": self.samples,
            "prefetch": self.prefetch,
            "transform": self.transform,
        }
        if self.sampler is not None:
            how["sampler"] = self.sampler(self.samples)
        return kind(self.build(), batch_size=self.batch, num_workers=workers, **how)


@draw("data", 3)
def numbers(
    random: Random, shape: Shape, classes: int, samples: int
) -> tuple[str, Callable[[], Any]]:
    """Normal floats."""
    return "floats", functools.partial(_numbers, shape, classes, samples)


def _numbers(shape: Shape, classes: int, samples: int) -> Any:
    generator = np.random.default_rng(samples)
    x = generator.standard_normal((samples, *shape)).astype(np.float32)
    return data.arrays(x, generator.integers(0, classes, samples), classes=classes)


@draw("data", 1)
def bytes_with_a_scale(
    random: Random, shape: Shape, classes: int, samples: int
) -> tuple[str, Callable[[], Any]]:
    """uint8, scaled and shifted where they are read."""
    return "bytes", functools.partial(_bytes, shape, classes, samples)


def _bytes(shape: Shape, classes: int, samples: int) -> Any:
    generator = np.random.default_rng(samples)
    x = generator.integers(0, 256, (samples, *shape), np.uint8)
    return data.arrays(
        x, generator.integers(0, classes, samples), classes=classes, scale=1 / 128, shift=-1.0
    )


@draw("data", 1)
def mostly_zeros(
    random: Random, shape: Shape, classes: int, samples: int
) -> tuple[str, Callable[[], Any]]:
    """Floats of which one in ten is not 0, some of them -0: sums whose terms vanish."""
    return "mostly zeros", functools.partial(_zeros, shape, classes, samples)


def _zeros(shape: Shape, classes: int, samples: int) -> Any:
    generator = np.random.default_rng(samples)
    x = generator.standard_normal((samples, *shape)).astype(np.float32)
    x *= generator.random(x.shape) < 0.1
    return data.arrays(x, generator.integers(0, classes, samples), classes=classes)


@draw("data", 0.7)
def overflowing(
    random: Random, shape: Shape, classes: int, samples: int
) -> tuple[str, Callable[[], Any]]:
    """A few samples are so large that gradients, or the loss, are not finite."""
    return "floats, some huge", functools.partial(_huge, shape, classes, samples)


def _huge(shape: Shape, classes: int, samples: int) -> Any:
    generator = np.random.default_rng(samples)
    x = generator.standard_normal((samples, *shape)).astype(np.float32)
    x[generator.random(samples) < 1 / 30] *= np.float32(1e38)
    x = np.clip(x, -3e38, 3e38)
    return data.arrays(x, generator.integers(0, classes, samples), classes=classes)


@draw("data", 1)
def one_by_one(
    random: Random, shape: Shape, classes: int, samples: int
) -> tuple[str, Callable[[], Any]]:
    """A data set of one's own that gives a sample at a time."""
    return "a sample at a time", functools.partial(_Samples, shape, classes, samples)


class _Samples:
    def __init__(self, shape: Shape, classes: int, samples: int) -> None:
        self.classes = classes
        self._all = _numbers(shape, classes, samples)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return self._all.images[i], int(self._all.labels[i])


# --- losses, optimizers, schedules ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss and what a network needs behind its last layer for it."""

    text: str
    build: Callable[[], Any]


@draw("loss", 4)
def cross_entropy(random: Random) -> Loss:
    return Loss("cross entropy", nn.CrossEntropyLoss)


@draw("loss", 1)
def smoothed(random: Random) -> Loss:
    return Loss("smoothed cross entropy", lambda: nn.CrossEntropyLoss(label_smoothing=0.1))


@draw("loss", 1)
def weighted(random: Random) -> Loss:
    smoothing = random.one([0.0, 0.2])
    return Loss(
        f"cross entropy of weighted classes, {smoothing}",
        lambda: (
            lambda y, target: F.cross_entropy(
                y, target, weight=np.linspace(0.2, 2, y.shape[-1]), label_smoothing=smoothing
            )
        ),
    )


@draw("loss", 1)
def likelihood(random: Random) -> Loss:
    return Loss("log-likelihood", lambda: lambda y, labels: nn.NLLLoss()(F.log_softmax(y), labels))


# --- other tasks: targets that are no classes, inputs that are several arrays ---------------------


def token_ids(length: int, vocabulary: int, classes: int, samples: int, each: bool) -> Any:
    """Ids (T,), and a class of each or of all; some of them without a loss."""
    generator = np.random.default_rng(samples)
    ids = generator.integers(0, vocabulary, (samples, length)).astype(np.int32)
    if not each:
        return data.arrays(ids, generator.integers(0, classes, samples), classes=classes)
    wanted = generator.integers(0, classes, (samples, length)).astype(np.int32)
    wanted[generator.random(wanted.shape) < 0.05] = -100
    return data.arrays(ids, wanted)


class Joined(nn.Module):
    """A model on the sum of its inputs, given one by one or in a dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Any) -> Tensor:
        a, b = (given[0]["a"], given[0]["b"]) if len(given) == 1 else given
        return self.model(a + b.float())


def targets(shape: Shape, outputs: int, samples: int, inputs: str, mixed: bool) -> Any:
    generator = np.random.default_rng(samples)
    x = generator.standard_normal((samples, *shape)).astype(np.float32)
    y: Any = generator.random((samples, outputs))
    b = generator.integers(-2, 3, (samples, *shape))
    given = {"one": x, "two": (x, b), "dict": {"b": b, "a": x}}[inputs]
    return data.arrays(given, (y, generator.integers(0, outputs, samples)) if mixed else y)


def mixed_loss(y: Tensor, target: Any) -> Tensor:
    """Of numbers and classes."""
    return F.mse_loss(y, target[0]) * 0.5 + F.cross_entropy(y, target[1])


class Parted(nn.Module):
    """A model of two outputs in a dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Any) -> dict[str, Tensor]:
        y = self.model(*given)
        return {"mean": y, "spread": F.softplus(y)}


def parted_loss(y: dict[str, Tensor], target: Any) -> Tensor:
    """Of both outputs, as a variational autoencoder's."""
    return (
        F.mse_loss(y["mean"], target)
        + (0.1 * (y["spread"] - F.log(y["spread"] + 1e-3))).sum(1).mean()
    )


def weigh_positive(y: Any, target: Any) -> Tensor:
    """Returns weights of samples: more for those whose target is above 0."""
    first = leaves(target)[0]
    return (first > 0) + 0.25


def of_one_s_own(y: Tensor, target: Any) -> Tensor:
    """A loss written with ops."""
    d = F.tanh(y) - target
    return F.mean(d * d * d * d)


@draw("task", 2)
def numbers_as_targets(
    random: Random,
) -> tuple[Loss, bool, tuple[str, ...] | dict[str, Any] | None]:
    kinds = [nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.BCEWithLogitsLoss]
    settings = [("SmoothL1Loss(beta=0.3)", lambda: nn.SmoothL1Loss(beta=0.3))]
    settings += [
        ("weighted BCE", lambda: nn.BCEWithLogitsLoss(pos_weight=1.7)),
        ("own", lambda: of_one_s_own),
    ]
    made = random.one([Loss(k.__name__, k) for k in kinds] + [Loss(*one) for one in settings])
    return made, False, random.one([None, ("mae",), {"mse": "mse", "own": of_one_s_own}])


@draw("task", 0.5)
def two_outputs(random: Random) -> tuple[Loss, bool, tuple[str, ...] | dict[str, Any] | None]:
    return (
        Loss("squares and spreads of two outputs", lambda: parted_loss),
        False,
        {"both": parted_loss},
    )


@draw("task", 1)
def numbers_and_classes(
    random: Random,
) -> tuple[Loss, bool, tuple[str, ...] | dict[str, Any] | None]:
    return (
        Loss("squares and classes", lambda: mixed_loss),
        True,
        random.one([None, {"both": mixed_loss}]),
    )
