"""64-bit fingerprints of float32 numbers by their bits: of all weights, or of all gradients,
after each step.

A fingerprint is a sum over the numbers of a whole, modulo 2^64, in which the 32 bits of number i
are multiplied with an odd key that depends on i alone (mojo/kernels/fingerprint.mojo). So it does
not depend on the layout: ranks `add` those of what they have, each number counted once, and zeros,
such as padding, count nothing. Any change of one number changes it: an odd number times d is not 0
modulo 2^64 for 0 < |d| < 2^32. Changes of several numbers cancel with a probability of about 2^-32
in the worst case (only signs change) and 2^-63 in the best, if the keys are taken as random. -0 and
0 differ, and so do NaNs of different bits. It is not cryptographic: files are protected by SHA-256
(checkpoints).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import ShapeError
from . import native

BITS = 64
MASK = (1 << BITS) - 1
CHUNK = 1 << 20  # bytes that are copied at once where memory does not lie on words

Run = tuple[int, int, int]  # address of float32 numbers, how many, number of the first in the whole


class Runs:
    """Runs of memory whose fingerprint is taken again and again.

    Calling it gives the fingerprint, 0 to 2^64 - 1.

    runs: (address, floats, start) each; `start` is the index of the first float in the whole, in
        floats. The memory is somebody else's and must stay where it is.

    LeNet-5's 61,706 floats take 4 us on one core with AVX-512 (benchmarks/steplog.py).
    """

    __slots__ = ("_call", "_count", "_table", "_table_address")

    def __init__(self, runs: Sequence[Run]) -> None:
        for run in runs:
            address, floats, start = run
            if floats < 0 or start < 0 or (floats and address <= 0):
                raise ShapeError(
                    f"[fingerprint] {run} is no run of memory; give address, floats and index of "
                    "the first"
                )
        self._table = np.array(list(runs), np.int64).reshape(-1, 3)
        self._table_address = self._table.ctypes.data
        self._count = len(self._table)
        self._call = native.library().fingerprint

    def __call__(self) -> int:
        return self._call(self._table_address, self._count)


def of(values: np.ndarray, start: int = 0) -> int:
    """The fingerprint of a float32 array of any shape, in the order of its memory; `start` is
    the index of its first. Raises ShapeError: the array is not float32, or not C-contiguous.
    """
    if values.dtype != np.float32 or not values.flags.c_contiguous:
        raise ShapeError(
            "[fingerprint] an array of "
            f"{values.dtype}{'' if values.flags.c_contiguous else ' with strides'}; "
            "C-contiguous float32 is allowed; make it so with numpy.ascontiguousarray"
        )
    return Runs([(values.ctypes.data, values.size, start)])() if values.size else 0


def of_bytes(array: np.ndarray, start: int = 0) -> int:
    """The fingerprint of an array's bytes, in C order, as words of 4 bytes.

    The first word is number `start`. One changed byte changes it, for certain. Bytes of zero count
    nothing, so compare shapes as well.
    """
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    flat = array.reshape(-1).view(np.uint8)
    whole = flat.size // 4 * 4
    is_aligned = flat.ctypes.data % 4 == 0  # not so for a column of bytes out of a file
    rest = np.zeros(4, np.uint8)
    rest[: flat.size - whole] = flat[whole:]
    parts = [of(rest.view(np.float32), start + whole // 4)]
    step = max(whole, 4) if is_aligned else CHUNK
    for at in range(0, whole, step):
        piece = flat[at : min(at + step, whole)]
        words = (piece if is_aligned else piece.copy()).view(np.float32)
        parts.append(of(words, start + at // 4))
    return add(parts)


def add(parts: Iterable[int]) -> int:
    """The fingerprint of a whole from those of its parts."""
    return sum(parts) & MASK


def signed(value: int) -> int:
    """The same 64 bits as an int64 number, as an all-reduce of sums takes it."""
    return value - (1 << BITS) if value >> (BITS - 1) else value


def unsigned(value: int) -> int:
    """The inverse of `signed`."""
    return int(value) & MASK


def hash_of(value: Any) -> int:
    """63 bits of a SHA-256 over a value's repr."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 1
