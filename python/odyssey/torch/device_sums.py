"""Norms and fingerprints of tensors on a device, with the CPU's bits.

Both are sums of integers, which have no order. So a device may add them in its order, and the host
reads a number instead of the tensor. Tensors are read in pieces, because the integers need four
times their memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..core import fingerprint

PIECE = 1 << 22  # floats

# The constants of mojo/kernels/fingerprint.mojo, where the formula is.
ROW = 32
GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB
ROWS_SEED = 0x6F64797373657900
COLUMNS_SEED = 0x66696E6765727072


def _pieces(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields a flat tensor in pieces, as (number of its first float, piece)."""
    for first in range(0, flat.numel(), PIECE):
        yield first, flat[first : first + PIECE]


class DeviceNorm:
    """Returns the terms of a norm, computed on a device (nn/utils.py has the formula).

    Runs are flat float32 tensors. Each call copies one or two numbers to the host.
    """

    def largest(self, runs: Sequence[torch.Tensor]) -> float:
        """The largest absolute value; NaN if there is one."""
        tops = [run.abs().max() for run in runs if run.numel()]
        return float(torch.stack(tops).max()) if tops else 0.0

    def squares(self, runs: Sequence[torch.Tensor], unit: float) -> np.ndarray:
        """The sum of squares of the numbers times `unit`, int64 (2,), as kernels/reduce.mojo
        counts it.
        """
        sums = [self._squares_of(piece, unit) for run in runs for _, piece in _pieces(run)]
        if not sums:
            return np.zeros(2, np.int64)
        return torch.stack(sums).sum(0).cpu().numpy()

    @staticmethod
    def _squares_of(piece: torch.Tensor, unit: float) -> torch.Tensor:
        # products with a power of two, squares in float64 and differences from the whole part are
        # exact
        small = (piece * unit).double()
        scaled = small * small * 2.0**31
        high = scaled.long()
        low = ((scaled - high.double()) * 2.0**31).long()
        return torch.stack([high.sum(), low.sum()])


def fingerprint_of(tensors: Sequence[tuple[torch.Tensor, int]]) -> int:
    """Returns the fingerprint of flat tensors of 4-byte numbers (core/fingerprint.py), given with
    the number of their first one in the whole. One number is copied to the host.
    """
    sums = [
        _fingerprint_of_piece(piece, start + first)
        for flat, start in tensors
        for first, piece in _pieces(flat)
    ]
    return int(torch.stack(sums).sum()) & fingerprint.MASK if sums else 0


def _fingerprint_of_piece(piece: torch.Tensor, start: int) -> torch.Tensor:
    count = piece.numel()
    first_row = start // ROW
    rows = torch.arange(first_row, (start + count - 1) // ROW + 1, device=piece.device)
    columns = torch.arange(ROW, device=piece.device)
    keys = _odd_keys(ROWS_SEED, rows)[:, None] * _odd_keys(COLUMNS_SEED, columns)
    offset = start - first_row * ROW
    words = piece.view(torch.int32).long() & 0xFFFFFFFF
    return (keys.reshape(-1)[offset : offset + count] * words).sum()


def _odd_keys(seed: int, numbers: torch.Tensor) -> torch.Tensor:
    """Returns these numbers of the SplitMix64 generator that starts at `seed`, made odd.

    int64 tensors have the bits of unsigned integers modulo 2^64.
    """
    z = numbers * _signed(GOLDEN) + _signed(seed + GOLDEN)
    z = (z ^ _shift_right(z, 30)) * _signed(FIRST_FACTOR)
    z = (z ^ _shift_right(z, 27)) * _signed(SECOND_FACTOR)
    return (z ^ _shift_right(z, 31)) | 1


def _shift_right(z: torch.Tensor, places: int) -> torch.Tensor:
    """Returns unsigned integers shifted right; PyTorch would fill in their sign."""
    return (z >> places) & ((1 << (64 - places)) - 1)


def _signed(number: int) -> int:
    """Returns the integer of int64 with the bits of a number modulo 2^64."""
    number &= fingerprint.MASK
    return number - (1 << 64) if number >> 63 else number
