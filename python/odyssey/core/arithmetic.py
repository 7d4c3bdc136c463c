"""Samples of the kernels' arithmetic: operations with fixed inputs, whose hashes ranks compare.

The kernels choose nothing at run time, so their bits depend on what they were compiled for and by.
The samples find kernels that differ, however they came to a machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import numpy as np

from . import fingerprint, native
from . import functional as F
from .program import Eager, using
from .tape import Tensor

_NUMBERS = 8191  # different inputs; a prime, so rows of matrices differ
_SMALLEST = 1 << 20  # the bits of a subnormal number


def sample() -> dict[str, str]:
    """Returns the hash of each kind of operation by its name, such as "fp32 products".

    A process computes it once.
    """
    return dict(_sample())


def libraries() -> dict[str, str]:
    """Returns the version of the kernels, to name the cause of a difference."""
    return {"kernels": str(native.KERNELS)}


@functools.cache
def _sample() -> tuple[tuple[str, str], ...]:
    kinds: dict[str, Callable[[], Iterable[Tensor]]] = {
        "products": _compute_products,
        "convolutions": _compute_convolutions,
    }
    hashes = [
        (f"{precision} {kind}", _hash(compute, precision))
        for precision in ("fp32", "bf16")
        for kind, compute in kinds.items()
    ]
    hashes += [
        ("exponentials", _hash(_compute_exponentials)),
        ("reductions", _hash(_compute_reductions)),
        ("subnormal numbers", _hash(_compute_subnormals)),
    ]
    return tuple(hashes)


def _hash(compute: Callable[[], Iterable[Tensor]], precision: str = "fp32") -> str:
    with using(Eager(precision)):
        results = [fingerprint.of_bytes(np.ascontiguousarray(y.numpy())) for y in compute()]
    return f"{fingerprint.hash_of(results):016x}"


def _fill(*shape: int, start: int = 0) -> Tensor:
    """Returns numbers from -4 to 4 in a fixed order, some of them 1,000 times as small as others.

    Sums of numbers of one size would be exact, in any order.
    """
    index = np.arange(start, start + int(np.prod(shape)), dtype=np.int64) % _NUMBERS
    numerators = (index * 2654435761) % _NUMBERS - _NUMBERS // 2
    return Tensor(np.ldexp(numerators.astype(np.float32), -(10 + index % 11)).reshape(shape))


def _compute_products() -> Iterable[Tensor]:
    for rows, inputs, outputs in ((2, 33, 17), (32, 256, 48)):
        weight = _fill(outputs, inputs, start=1)
        yield F.linear(_fill(rows, inputs), weight, _fill(outputs, start=2))


def _compute_convolutions() -> Iterable[Tensor]:
    for samples, channels, outputs, size, kernel in ((2, 3, 8, 9, 3), (16, 4, 16, 8, 3)):
        x = _fill(samples, channels, size, size)
        yield F.conv2d(x, _fill(outputs, channels, kernel, kernel, start=1))


def _compute_exponentials() -> Iterable[Tensor]:
    x = _fill(32, 30)
    for function in (F.tanh, F.sigmoid, F.gelu, F.silu, F.softplus):
        yield function(x)


def _compute_reductions() -> Iterable[Tensor]:
    x = _fill(32, 61)
    yield F.softmax(x)
    yield F.log_softmax(x)
    yield F.layer_norm(x)


def _compute_subnormals() -> Iterable[Tensor]:
    tiny = np.full((32, 8), _SMALLEST, np.int32).view(np.float32)
    yield Tensor(tiny) + Tensor(tiny)
    yield F.leaky_relu(Tensor(-tiny), 0.75)
