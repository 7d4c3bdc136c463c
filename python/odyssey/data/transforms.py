"""Augmentation whose random numbers are a function of (seed, epoch, sample).

So they are the same on any layout and after any resume. A transform of the user is a function of
(sample, rng). The transforms here work on all samples of a batch at once, and each sample gets the
numbers that it would get alone. Images are (C, H, W), as the model receives them. Crops, flips and
cutouts convert (H, W) to (1, H, W).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from odyssey.data.sampler import mixed_words
from odyssey.errors import ConfigError, DataError, check_integer

Tree = Any  # an array, or a tuple or dict of trees


class Draw:
    """The random numbers of one transform for the samples of a batch.

    Each is a function of (seed, epoch, number of the sample, place of the transform).

    Args:
        seed: the seed of the loader.
        epoch: the number of the epoch.
        numbers: int64 (B,), the numbers of the samples.
        place: the index of the transform in the list of the loader.
    """

    def __init__(self, seed: int, epoch: int, numbers: np.ndarray, place: int) -> None:
        self.seed = seed
        self.epoch = epoch
        self.numbers = numbers
        self.place = place

    def uniform(self, index: int) -> np.ndarray:
        """Returns random number `index` of each sample, float64 (B,) in [0, 1)."""
        stream = (self.place << 32) + index
        words = mixed_words(self.seed, self.epoch, stream, self.numbers)
        # The upper 53 bits of a word fill the mantissa of a float64.
        return (words >> np.uint64(11)) * 2.0**-53

    def below(self, index: int, n: int) -> np.ndarray:
        """Returns random number `index` of each sample, int64 (B,) in 0..n-1."""
        return (self.uniform(index) * n).astype(np.int64)

    def generator(self, sample: int) -> np.random.Generator:
        """Returns a random generator for the sample at position `sample` of the batch.

        It is Philox4x64 with the key (seed, epoch), and counts from (0, 0, number, place). Two
        generators never return the same stretch, because each has 2**128 separate numbers.
        """
        key = np.array([self.seed, self.epoch], np.uint64)
        counter = np.array([0, 0, self.numbers[sample], self.place], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))


class _SampleDraw(Draw):
    """The random numbers of one sample, from a generator that the caller has built."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(0, 0, np.zeros(1, np.int64), 0)
        self._rng = rng

    def uniform(self, index: int) -> np.ndarray:
        return self._rng.random(1)


class Vectorized:
    """Base of the transforms here, which transform all images of a batch at once."""

    def batch(self, images: np.ndarray, draw: Draw) -> np.ndarray:
        """Returns all images of a batch (B, C, H, W), transformed, as a new array.

        Random numbers come from `draw`.
        """
        raise NotImplementedError

    def __call__(self, sample: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Transforms one image (C, H, W). You can call it in a transform of your own."""
        return self.batch(np.asarray(sample)[None], _SampleDraw(rng))[0]


def _check_images(images: Tree, transform_name: str) -> np.ndarray:
    """Returns a batch of images as (B, C, H, W). (B, H, W) becomes (B, 1, H, W).

    Raises DataError for samples of another shape.
    """
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
    """Pads images on all sides, and cuts out a window at a random place (He et al. 2016).

    Args:
        size: the size of the window in pixels, one number or (height, width). None is the size of
            the image before padding.
        padding: the pixels that are added at each side.
        fill: the value of the padding.
    """

    def __init__(
        self, size: int | tuple[int, int] | None = None, *, padding: int = 0, fill: float = 0.0
    ) -> None:
        self.padding = check_integer("[data] RandomCrop: padding", padding, 0)
        sizes = (size, size) if size is None or np.ndim(size) == 0 else size
        self.size = tuple(
            None if pixels is None else check_integer("[data] RandomCrop: size", pixels, 1)
            for pixels in sizes
        )
        self.fill = fill

    def batch(self, images: np.ndarray, draw: Draw) -> np.ndarray:
        images = _check_images(images, "RandomCrop")
        count, channels, image_height, image_width = images.shape
        padding = self.padding
        window_height, window_width = self.size
        height = window_height or image_height
        width = window_width or image_width
        padded_height = image_height + 2 * padding
        padded_width = image_width + 2 * padding
        if height > padded_height or width > padded_width:
            raise DataError(
                f"[data] RandomCrop: {height} x {width} is too large for {image_height} x "
                f"{image_width} padded by {padding}"
            )
        padded = np.full((count, channels, padded_height, padded_width), self.fill, images.dtype)
        padded[:, :, padding : padding + image_height, padding : padding + image_width] = images
        tops = draw.below(0, padded_height - height + 1)
        lefts = draw.below(1, padded_width - width + 1)
        out = np.empty((count, channels, height, width), images.dtype)
        for i, (row, column) in enumerate(zip(tops.tolist(), lefts.tolist(), strict=True)):
            out[i] = padded[i, :, row : row + height, column : column + width]
        return out


class HorizontalFlip(Vectorized):
    """Exchanges left and right of an image with probability p."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = _check_probability("HorizontalFlip", p)

    def batch(self, images: np.ndarray, draw: Draw) -> np.ndarray:
        images = _check_images(images, "HorizontalFlip")
        flip = draw.uniform(0) < self.p
        out = images.copy()
        out[flip] = images[flip, :, :, ::-1]
        return out


class Cutout(Vectorized):
    """Sets a square of `size` pixels around a random pixel to `fill` (DeVries and Taylor 2017).

    The part of the square outside the image is cut off. p: the probability for an image.
    """

    def __init__(self, size: int, *, fill: float = 0.0, p: float = 1.0) -> None:
        self.size = check_integer("[data] Cutout: size", size, 1)
        self.fill = fill
        self.p = _check_probability("Cutout", p)

    def batch(self, images: np.ndarray, draw: Draw) -> np.ndarray:
        images = _check_images(images, "Cutout")
        out = images.copy()
        _, _, height, width = images.shape
        # The order of the draws matters for one image, because its numbers come from a generator.
        is_cut = draw.uniform(2) < self.p  # (B,)
        rows = self._select_stretch(draw, 0, height)  # (B, H)
        columns = self._select_stretch(draw, 1, width)  # (B, W)
        square = is_cut[:, None, None] & rows[:, :, None] & columns[:, None, :]
        np.copyto(out, np.asarray(self.fill, out.dtype), where=square[:, None])
        return out

    def _select_stretch(self, draw: Draw, index: int, length: int) -> np.ndarray:
        """Returns a mask (B, length) of `size` pixels around a random one, along one axis.

        index: the number of the random number in `draw`.
        """
        first = draw.below(index, length)[:, None] - self.size // 2
        positions = np.arange(length)
        return (positions >= first) & (positions < first + self.size)


class Normalize(Vectorized):
    """Computes (x - mean) / std as float32.

    mean and std are one number each, or one per channel.
    """

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
        per_channel = (-1,) + (1,) * (images.ndim - 2)
        mean = self.mean.reshape(per_channel)
        std = self.std.reshape(per_channel)
        return (images.astype(np.float32) - mean) / std


class Paired:
    """A transform of the user that receives and returns (sample, target).

    It is for targets that change with the sample, such as masks and boxes.
    """

    def __init__(
        self, function: Callable[[tuple[Tree, Tree], np.random.Generator], tuple[Tree, Tree]]
    ) -> None:
        self.function = function

    def __call__(self, pair: tuple[Tree, Tree], rng: np.random.Generator) -> tuple[Tree, Tree]:
        return self.function(pair, rng)


class Mixup:
    """Mixes each sample with another: m x + (1 - m) x', with the target m y + (1 - m) y'.

    m is drawn from Beta(alpha, alpha). x' is any sample of the data set, not one of the batch. Both
    depend only on (seed, epoch, number of x), so the layout makes no difference. Two samples are
    read for each one. Labels become float32 (classes,), which the loss must support. Zhang et al.,
    "mixup: Beyond Empirical Risk Minimization", ICLR 2018.
    """

    def __init__(self, alpha: float = 0.2) -> None:
        if not alpha > 0:
            raise ConfigError(f"[data] Mixup: alpha is {alpha}; a number above 0 is allowed")
        self.alpha = alpha

    def partners(self, draw: Draw, count: int) -> np.ndarray:
        """Returns the number of the second sample for each sample: int64 (B,)."""
        return draw.below(0, count)

    def mixed(
        self, both: Any, others: Any, classes: int | None, draw: Draw
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns samples and targets (B, ...) as float32, mixed with those of the others.

        Args:
            both: samples and targets.
            others: samples and targets of the second samples.
            classes: the number of classes, or None if there are none.
            draw: the random numbers.

        Raises:
            DataError: samples or targets aren't arrays, or labels have no number of classes.
        """
        m = np.array(
            [
                draw.generator(position).beta(self.alpha, self.alpha)
                for position in range(len(draw.numbers))
            ],
            np.float32,
        )

        def mix(first: Tree, second: Tree, classes: int | None = None) -> np.ndarray:
            a = self._convert_values(first, classes)
            b = self._convert_values(second, classes)
            k = m.reshape(-1, *(1,) * (a.ndim - 1))
            return k * a + (1 - k) * b

        samples, targets = both
        other_samples, other_targets = others
        return mix(samples, other_samples), mix(targets, other_targets, classes)

    def _convert_values(self, values: Tree, classes: int | None) -> np.ndarray:
        """Converts an array to float32. Integers (B,) are labels, and become one-hot."""
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


def _check_probability(transform_name: str, p: float) -> float:
    """Returns p. Raises ConfigError unless it is in 0..1."""
    if not 0 <= p <= 1:
        raise ConfigError(
            f"[data] {transform_name}: p is {p}; a probability from 0 to 1 is allowed"
        )
    return p


def as_list(transform: Any) -> list[Any]:
    """Returns the value of `transform=` of a loader as a list of transforms.

    Raises ConfigError for an object that is not a transform, for example a class.
    """
    if transform is None:
        transforms = []
    elif isinstance(transform, list | tuple):
        transforms = list(transform)
    else:
        transforms = [transform]
    for item in transforms:
        if not (callable(item) or isinstance(item, Mixup)) or isinstance(item, type):
            raise ConfigError(
                f"[data] transform {item!r} is no transform; a function of (sample, rng), one of "
                "data.transforms, or a list of them is allowed"
            )
    return transforms
