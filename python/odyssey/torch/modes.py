"""Modes of torch that decide bits: each shard runs with the same ones on all ranks.

A library, a callback or a program may change these modes of a process at any time. For example, a
library that was built with -ffast-math makes the thread that loads it flush subnormal numbers to
zero. So they are set before a shard or an update runs, and put back after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..errors import ConfigError

# numbers below it would be computed by one thread of torch, even if there are more
_PARALLEL_NUMBERS = 1 << 16
_SMALLEST = 1  # the bits of the smallest subnormal number of float32


class Modes(NamedTuple):
    """The modes in which shards run.

    threads: of torch.
    matmul_precision: of products of float32, as torch.get_float32_matmul_precision() returns it.
    default_dtype: of new tensors.
    warn_only: True if an operation without a deterministic form is reported instead of raised.
    """

    threads: int
    matmul_precision: str
    default_dtype: torch.dtype
    warn_only: bool

    @classmethod
    def current(cls, threads: int, warn_only: bool) -> Modes:
        """Returns the modes of this process, with so many threads."""
        return cls(
            threads, torch.get_float32_matmul_precision(), torch.get_default_dtype(), warn_only
        )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Sets the modes in the block, and puts those back that were set before.

        Subnormal numbers are kept, as IEEE 754 says.
        """
        previous = Modes.current(
            torch.get_num_threads(), torch.is_deterministic_algorithms_warn_only_enabled()
        )
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        flushes = flushes_subnormals()
        try:
            self._set(deterministic=True)
            torch.set_flush_denormal(False)
            yield
        finally:
            previous._set(is_deterministic)
            torch.set_flush_denormal(flushes)

    def _set(self, deterministic: bool) -> None:
        """Sets the modes that are not set yet."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if torch.get_float32_matmul_precision() != self.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        if torch.get_default_dtype() != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        if (
            torch.are_deterministic_algorithms_enabled() != deterministic
            or torch.is_deterministic_algorithms_warn_only_enabled() != self.warn_only
        ):
            torch.use_deterministic_algorithms(deterministic, warn_only=self.warn_only)

    def check_threads(self) -> None:
        """Raises ConfigError: other threads of torch flush subnormal numbers, which only they could
        change.
        """
        if self.threads == 1:
            return
        with self.held():
            numbers = _subnormals(_PARALLEL_NUMBERS * self.threads)
            is_kept = bool((numbers * 1.0).view(torch.int32).all())
        if not is_kept:
            raise ConfigError(
                f"[torch] {self.threads} threads of torch must keep subnormal numbers, but some "
                "flush them to zero, as a library that was built with -ffast-math makes them; use "
                "threads=1, or import this library after the first operation of torch"
            )


def flushes_subnormals() -> bool:
    """Returns whether this thread flushes subnormal numbers to zero."""
    return not int((_subnormals(1) * 1.0).view(torch.int32))


def _subnormals(count: int) -> torch.Tensor:
    # as integers, because a conversion would flush them
    return torch.full((count,), _SMALLEST, dtype=torch.int32).view(torch.float32)
