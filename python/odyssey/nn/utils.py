"""The Euclidean norm of gradients that lie in several runs of memory, the same bits however they
are cut and ordered.

Squares are added as integers of a common unit, an exact sum that has no order. The unit follows
from the largest gradient; with n gradients the sum is right to n 2^-62 of its square. Who has which
gradients is not known here: the caller says how ranks combine the two numbers that are needed
(engine.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..core import native
from ..core.tensor import Tensor
from ..errors import ConfigError, NumericsError

__all__ = ["clip_grad_norm_", "global_norm"]
Run = tuple[int, int]  # address of float32 numbers, how many


def global_norm(
    runs: Sequence[Run],
    largest: Callable[[np.ndarray], np.ndarray] = lambda a: a,
    total: Callable[[np.ndarray], np.ndarray] = lambda a: a,
    machine: Any = None,
) -> float:
    """The norm of all runs together; infinite or NaN if a number is.

    Args:
        runs: those of this rank.
        largest: makes the maximum over ranks of a float32 array (1,).
        total: makes the sum over ranks of an int64 array (2,); each number counted once.
        machine: whose memory the runs are in: has `largest` and `squares` like Host; default this
            process's.
    """
    machine = machine or HostNorm()
    top = float(largest(np.array([machine.largest(runs)], np.float32))[0])
    if top == 0 or not math.isfinite(top):
        return top
    exponent = math.frexp(top)[1]
    unit = math.ldexp(1.0, -exponent)
    if unit > 2.0**126:  # squares of what is below 2^-126 would be lost; nothing is clipped to that
        return 0.0
    squares = total(machine.squares(runs, unit))
    square = (int(squares[0]) * 2**31 + int(squares[1])) / 2**62
    return math.sqrt(square) * math.ldexp(1.0, exponent)


class HostNorm:
    """Returns the terms of a norm, computed by the CPU."""

    def largest(self, runs: Sequence[Run]) -> float:
        """The largest absolute value; NaN if there is one."""
        return float(self._run_op(runs, "largest", np.float32)[:, 0].max())

    def squares(self, runs: Sequence[Run], unit: float) -> np.ndarray:
        """The sum of squares of the numbers times `unit`, int64 (2,), as kernels/reduce.mojo
        counts it.
        """
        return self._run_op(runs, "fixed_squares", np.int64, native.float_bits(unit)).sum(axis=0)

    def _run_op(self, runs: Sequence[Run], op: str, dtype: Any, *operands: int) -> np.ndarray:
        lib = native.library()
        out = np.zeros((max(len(runs), 1), 2), dtype)
        records = np.zeros((len(runs), lib.record), np.int64)
        for row, (address, n), y in zip(records, runs, out, strict=False):
            row[: 4 + len(operands)] = (lib.codes[op], y.ctypes.data, address, n, *operands)
        lib.run(records.ctypes.data, len(records), native.Context(what="norm"))
        return out


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> float:
    """Scales the gradients down, in place, to a Euclidean norm of `max_norm` over all of them,
    if theirs is larger.

    After a synchronized backward pass all ranks have the same gradients, so the same norm; nothing
    is communicated.

    Args:
        parameters: `model.parameters()`; those without a gradient do not count.
        max_norm: above 0.
        error_if_nonfinite: raise instead of leaving gradients that are not finite as they are.

    Returns the norm before.

    Raises ConfigError: max_norm is not allowed. NumericsError: the norm is NaN or infinite, if so
    asked for.
    """
    if not 0 < max_norm < math.inf:
        raise ConfigError(f"[clip] max_norm is {max_norm!r}; it must be above 0 and finite")
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    runs = [(p.grad.memory.address, p.grad.floats) for p in tensors if p.grad is not None]
    norm = global_norm(runs)
    if not math.isfinite(norm):
        if error_if_nonfinite:
            raise NumericsError(
                f"[clip] the norm of the gradients is {norm}; lower the rate, or warm up"
            )
        return norm
    if norm > max_norm:
        lib = native.library()
        records = np.zeros((len(runs), lib.record), np.int64)
        for row, (address, n) in zip(records, runs, strict=True):
            row[:5] = (lib.codes["scale"], address, address, native.float_bits(max_norm / norm), n)
        lib.run(records.ctypes.data, len(records), native.Context(what="norm"))
    return norm
