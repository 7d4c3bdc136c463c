"""Modes of torch that decide bits: each shard runs with the same ones on all ranks.

A library, a callback or a program may change these modes of a process at any time. For example, a
library that was built with -ffast-math makes the thread that loads it flush subnormal numbers to
zero. So they are set before a shard or an update runs, and put back after it.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from ..errors import ConfigError
from .device import DeviceSettings, read_settings, write_settings

# numbers below it would be computed by one thread of torch, even if there are more
_PARALLEL_NUMBERS = 1 << 16
_SMALLEST = 1  # the bits of the smallest subnormal number of float32
# The smallest subnormal number of float64. Processors flush both sizes or neither.
_TINY = 5e-324


#: threads, products, default dtype, deterministic or not, warn_only, flushes subnormals or not,
#: settings of the device. A tuple, because it is read and compared several times in each step.
_State = tuple[int, str, torch.dtype, bool, bool, bool, DeviceSettings]


def _read(wanted: _State) -> _State:
    """Returns the modes of this thread, as they are; of a device those that are wanted of it."""
    of_device = wanted[6]
    return (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        flushes_subnormals(),
        read_settings() if of_device else of_device,
    )


def _set(state: _State, current: _State) -> None:
    """Sets the modes that differ from the current ones."""
    threads, matmul_precision, default_dtype, is_deterministic, warn_only, flushes, _ = state
    if current[0] != threads:
        torch.set_num_threads(threads)
    if current[1] != matmul_precision:
        torch.set_float32_matmul_precision(matmul_precision)
    if current[2] != default_dtype:
        torch.set_default_dtype(default_dtype)
    if current[3:5] != state[3:5]:
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warn_only)
    if current[5] != flushes:
        torch.set_flush_denormal(flushes)
    if current[6] != state[6]:
        write_settings(state[6])


class _Held:
    """A context in which modes are set. Afterwards those are set that were set before."""

    __slots__ = ("_previous", "_wanted")

    def __init__(self, wanted: _State) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        self._previous = _read(self._wanted)
        if self._previous != self._wanted:
            try:
                _set(self._wanted, self._previous)
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *problem: object) -> None:
        current = _read(self._wanted)
        if current != self._previous:
            _set(self._previous, current)


class Modes(NamedTuple):
    """The modes in which shards run. Subnormal numbers are kept, as IEEE 754 says.

    threads: of torch.
    matmul_precision: of products of float32, as torch.get_float32_matmul_precision() returns it.
    default_dtype: of new tensors.
    warn_only: True if an operation without a deterministic form is reported instead of raised.
    of_device: the settings of the module's device; empty for the CPU.
    """

    threads: int
    matmul_precision: str
    default_dtype: torch.dtype
    warn_only: bool
    of_device: DeviceSettings

    @classmethod
    def current(cls, threads: int, warn_only: bool, of_device: DeviceSettings = ()) -> Modes:
        """Returns the modes of this process, with so many threads."""
        return cls(
            threads,
            torch.get_float32_matmul_precision(),
            torch.get_default_dtype(),
            warn_only,
            of_device,
        )

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context with these modes, which puts those back that were set before."""
        return _Held(self._wanted())

    def set(self) -> None:
        """Sets these modes again in a block of `held`, if a program has changed them in it."""
        wanted = self._wanted()
        current = _read(wanted)
        if current != wanted:
            _set(wanted, current)

    def _wanted(self) -> _State:
        return self[0], self[1], self[2], True, self[3], False, self[4]

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
    return not _TINY * 1.0 > 0.0


def _subnormals(count: int) -> torch.Tensor:
    # as integers, because a conversion would flush them
    return torch.full((count,), _SMALLEST, dtype=torch.int32).view(torch.float32)
