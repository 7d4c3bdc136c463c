"""Augmentation whose random numbers are a function of (seed, epoch, sample): the same on any
layout, after any resume.

A transform of one's own is a function of (sample, rng); those here work on all samples of a batch
at once, and give each the numbers that it would have alone. Images are (C, H, W), as the model gets
them; crops, flips and cutouts make (1, H, W) of (H, W).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from odyssey.data.sampler import mixed_words
from odyssey.errors import ConfigError, DataError, check_integer

Tree = Any  # an array, or a tuple or dict of trees


class Draw:
    """Random numbers of samples: each a function of (seed, epoch, number of the sample, place of
    the transform). numbers: int64 (B,). place: of the transform, among those of a loader.
    """

    def __init__(self, seed: int, epoch: int, numbers: np.ndarray, place: int) -> None:
        self.seed = seed
        self.epoch = epoch
        self.numbers = numbers
        self.place = place

    def uniform(self, which: int) -> np.ndarray:
        """Number `which` of each sample, float64 (B,) in [0, 1)."""
        words = mixed_words(self.seed, self.epoch, (self.place << 32) + which, self.numbers)
        return (words >> np.uint64(11)) * 2.0**-53

    def below(self, which: int, n: int) -> np.ndarray:
        """Number `which` of each sample, int64 (B,) in 0..n-1."""
        return (self.uniform(which) * n).astype(np.int64)

    def generator(self, at: int) -> np.random.Generator:
        """A generator for sample `at` alone: Philox4x64, its key (seed, epoch), counting from
        (0, 0, number, place). Two of them never give the same stretch, as each has 2**128
        numbers of its own.
        """
        key = np.array([self.seed, self.epoch], np.uint64)
        counter = np.array([0, 0, self.numbers[at], self.place], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))


class _SampleDraw(Draw):
    """The numbers of one sample, out of a generator that somebody else has made."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(0, 0, np.zeros(1, np.int64), 0)
        self._rng = rng

    def uniform(self, which: int) -> np.ndarray:
        return self._rng.random(1)


class Vectorized:
    """Base of the transforms of images here."""

    def batch(self, images: np.ndarray, draw: Draw) -> np.ndarray:
        """All images of a batch (B, C, H, W), transformed: a new array."""
        raise NotImplementedError

    def __call__(self, sample: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One image (C, H, W); for use within a transform of one's own."""
        return self.batch(np.asarray(sample)[None], _SampleDraw(rng))[0]


def _images(images: Tree, transform_name: str) -> np.ndarray:
    if isinstance(images, np.ndarray) and images.ndim == 3:
        images = images[:, None]
    if not isinstance(images, np.ndarray) or images.ndim != 4:
        shape = getattr(images, "shape", (0,))[1:]
        kind = (
            f"an array {shape}" if isinstance(images, np.ndarray) else f"a {type(images).__name__}"
        )
        raise DataError(
            f"[data] {transform_name}: a sample is {kind}; images (C, H, W) and (H, W) are allowed"
        )
    return images


class RandomCrop(Vectorized):
    """A window of `size` at a random place of the image, which is padded on all sides before (He
    et al. 2016).

    size: pixels, one number or (height, width); None: of the image. padding: pixels. fill: value of
    the padding.
    """

    def __init__(
        self, size: int | tuple[int, int] | None = None, *, padding: int = 0, fill: float = 0.0
    ) -> None:
        self.padding = check_integer("[data] RandomCrop: padding", padding, 0)
        sizes = (size, size) if size is None or np.ndim(size) == 0 else size
        self.size = tuple(
            None if s is None else check_integer("[data] RandomCrop: size", s, 1) for s in sizes
        )
        self.fill = fill

    def batch(self, images: np.ndarray, draw: Draw) -> np.ndarray:
        images = _images(images, "RandomCrop")
        n, channels, h, w = images.shape
        p = self.padding
        height = self.size[0] or h
        width = self.size[1] or w
        if height > h + 2 * p or width > w + 2 * p:
            raise DataError(
                f"[data] RandomCrop: {height} x {width} is too large for {h} x {w} padded by {p}"
            )
        padded = np.full((n, channels, h + 2 * p, w + 2 * p), self.fill, images.dtype)
        padded[:, :, p : p + h, p : p + w] = images
        top_rows = draw.below(0, h + 2 * p - height + 1)
        left_columns = draw.below(1, w + 2 * p - width + 1)
        out = np.empty((n, channels, height, width), images.dtype)
        for i, (y, x) in enumerate(zip(top_rows.tolist(), left_columns.tolist(), strict=True)):
            out[i] = padded[i, :, y : y + height, x : x + width]
        return out


class HorizontalFlip(Vectorized):
    """Left and right exchanged, with probability p."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = _probability("HorizontalFlip", p)

    def batch(self, images: np.ndarray, draw: Draw) -> np.ndarray:
        images = _images(images, "HorizontalFlip")
        flip = draw.uniform(0) < self.p
        out = images.copy()
        out[flip] = images[flip, :, :, ::-1]
        return out


class Cutout(Vectorized):
    """A square of `size` pixels around a random pixel, within the image, becomes `fill` (DeVries
    and Taylor 2017).
    """

    def __init__(self, size: int, *, fill: float = 0.0, p: float = 1.0) -> None:
        self.size = check_integer("[data] Cutout: size", size, 1)
        self.fill = fill
        self.p = _probability("Cutout", p)

    def batch(self, images: np.ndarray, draw: Draw) -> np.ndarray:
        images = _images(images, "Cutout")
        out = images.copy()
        inside = draw.uniform(2)[:, None, None] < self.p
        for number, axis in ((0, 2), (1, 3)):
            length = images.shape[axis]
            first = draw.below(number, length)[:, None] - self.size // 2
            near = (np.arange(length) >= first) & (np.arange(length) < first + self.size)
            inside = inside & (near[:, :, None] if axis == 2 else near[:, None, :])
        np.copyto(out, np.asarray(self.fill, out.dtype), where=inside[:, None])
        return out


class Normalize(Vectorized):
    """(x - mean) / std as float32; one number each, or one per channel."""

    def __init__(self, mean: float | list[float], std: float | list[float]) -> None:
        self.mean = np.asarray(mean, np.float32)
        self.std = np.asarray(std, np.float32)
        if not (
            np.isfinite(self.mean).all() and np.isfinite(self.std).all() and (self.std > 0).all()
        ):
            raise ConfigError(
                f"[data] Normalize: mean {mean}, std {std}; finite numbers and std above 0 are "
                "allowed"
            )

    def batch(self, images: np.ndarray, draw: Draw) -> np.ndarray:
        shape = (-1,) + (1,) * (images.ndim - 2)
        return (images.astype(np.float32) - self.mean.reshape(shape)) / self.std.reshape(shape)


class Paired:
    """A transform of one's own that is given, and gives, (sample, target): for masks, boxes and
    the like.
    """

    def __init__(
        self, function: Callable[[tuple[Tree, Tree], np.random.Generator], tuple[Tree, Tree]]
    ) -> None:
        self.function = function

    def __call__(self, pair: tuple[Tree, Tree], rng: np.random.Generator) -> tuple[Tree, Tree]:
        return self.function(pair, rng)


class Mixup:
    """Each sample becomes m x + (1 - m) x', its target m y + (1 - m) y', with m from Beta(alpha,
    alpha).

    x' is any sample of the data set, drawn like m from (seed, epoch, number of x), not one of the
    batch: so nothing depends on how samples are shared out, and every sample is read twice. Labels
    become float32 (classes,), which the loss must take. Zhang et al., "mixup: Beyond Empirical Risk
    Minimization", ICLR 2018.
    """

    def __init__(self, alpha: float = 0.2) -> None:
        if not alpha > 0:
            raise ConfigError(f"[data] Mixup: alpha is {alpha}; a number above 0 is allowed")
        self.alpha = alpha

    def partners(self, draw: Draw, count: int) -> np.ndarray:
        """The number of the other sample, for each: int64 (B,)."""
        return draw.below(0, count)

    def mixed(
        self, both: Any, others: Any, classes: int | None, draw: Draw
    ) -> tuple[np.ndarray, np.ndarray]:
        """Samples and targets (B, ...) as float32, mixed with the others'."""
        m = np.array(
            [
                draw.generator(position).beta(self.alpha, self.alpha)
                for position in range(len(draw.numbers))
            ],
            np.float32,
        )

        def part(values: Tree, theirs: Tree, classes: int | None = None) -> np.ndarray:
            a = self._values(values, classes)
            b = self._values(theirs, classes)
            k = m.reshape(-1, *(1,) * (a.ndim - 1))
            return k * a + (1 - k) * b

        return part(both[0], others[0]), part(both[1], others[1], classes)

    def _values(self, values: Tree, classes: int | None) -> np.ndarray:
        if isinstance(values, tuple | dict):
            raise DataError(
                f"[data] Mixup: samples or targets are a {type(values).__name__}; arrays are "
                "allowed"
            )
        if values.dtype.kind not in "iu" or values.ndim > 1:
            return values.astype(np.float32, copy=False)
        if classes is None:
            raise DataError(
                "[data] Mixup: the number of classes is not known; give the data set an "
                "attribute classes"
            )
        return np.eye(classes, dtype=np.float32)[values]


def _probability(transform_name: str, p: float) -> float:
    if not 0 <= p <= 1:
        raise ConfigError(
            f"[data] {transform_name}: p is {p}; a probability from 0 to 1 is allowed"
        )
    return p


def as_list(transform: Any) -> list[Any]:
    """Returns what `transform=` of a loader was given, as a list of transforms; ConfigError for
    what is none.
    """
    transforms = (
        []
        if transform is None
        else list(transform)
        if isinstance(transform, list | tuple)
        else [transform]
    )
    for one in transforms:
        if not (callable(one) or isinstance(one, Mixup)) or isinstance(one, type):
            raise ConfigError(
                f"[data] transform {one!r} is no transform; a function of (sample, rng), one of "
                "data.transforms, or a "
                "list of them is allowed"
            )
    return transforms
