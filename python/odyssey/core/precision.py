"""Mixed precision: which products round their operands, and the loss scale that keeps fp16
gradients in range.

What it is: `autocast` (the precision of the ops of this thread) and `GradScaler` (dynamic loss
scaling). What it is not: the rounding itself (mojo/kernels/lowp.mojo). Tensors, parameters and
gradients are float32 in every precision; docs/precision.md says what is rounded where.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import ConfigError, NumericsError, check_integer
from ..settings.recipes import PRECISIONS
from . import native
from .program import current
from .tape import Tensor

LARGEST_SCALE = 2.0**64  # times 2^24 samples it is a float32, and so is what one is divided by it


def check(precision: str, owner: str = "train") -> str:
    """The precision itself. Raises ConfigError for an unknown one."""
    if precision not in PRECISIONS:
        raise ConfigError(
            f"[{owner}] precision is {precision!r}; choose from {', '.join(PRECISIONS)}"
        )
    return precision


@contextmanager
def autocast(precision: str = "bf16") -> Iterator[None]:
    """Convolutions and linear layers called inside round their operands to `precision`, and so
    will their gradients; attention too, to bf16 on a CPU with AMX.

    "fp32" inside takes single layers out. Works in a custom training loop, and in the forward() of
    a model that a trainer trains. Raises ConfigError for an unknown precision.
    """
    executor = current()
    previous_precision = executor.precision
    executor.precision = check(precision, "autocast")
    try:
        yield
    finally:
        executor.precision = previous_precision


# --- loss scaling ---------------------------------------------------------------------------------


def scale_text(value: float) -> str:
    """A loss scale for people: 65536, or 2^120."""
    return f"{value:.0f}" if value < 1e9 else f"2^{round(math.log2(value))}"


class GradScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018): gradients are computed of the loss times
    `scale`, so that rounding them to fp16 loses no small ones, and divided by it again before
    the optimizer.

    The scale is a power of two, so neither changes a digit. When a gradient is not finite the step
    is skipped and the scale multiplied by `backoff_factor`; after `growth_interval` steps without
    that it is multiplied by `growth_factor`. A trainer with precision="fp16" does all of it. In a
    custom training loop:

        scaler.scale(loss).backward()
        scaler.step(optimizer)          # False if the step was skipped
        optimizer.zero_grad()

    Args:
        init_scale, growth_factor, backoff_factor: powers of two; growth_factor above 1,
            backoff_factor below.
        growth_interval: steps.
        enabled: False makes it do nothing: scale 1, no step skipped.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        for name, value, low, high in (
            ("init_scale", init_scale, 1, LARGEST_SCALE),
            ("growth_factor", growth_factor, 2, 2.0**16),
            ("backoff_factor", backoff_factor, 2.0**-16, 0.5),
        ):
            if not (low <= value <= high) or math.frexp(value)[0] != 0.5:
                raise ConfigError(
                    f"[precision] {name} is {value:g}; a power of two from {low:g} to {high:g} "
                    "is allowed"
                )
        self.enabled = enabled
        self.value = float(init_scale) if enabled else 1.0
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = check_integer("[precision] growth_interval", growth_interval, 1)
        self.good_steps = 0  # since the scale last changed
        self.skipped = 0  # steps altogether

    def update(self, finite: bool) -> bool:
        """Counts one step and sets the scale for the next.

        Returns whether the step may be taken. Raises NumericsError: a step was not finite and the
        scale cannot be lowered: it would be below 1, so it is not what overflows.
        """
        if not self.enabled:
            return finite
        if finite:
            self.good_steps += 1
            if self.good_steps >= self.growth_interval:
                self.value = min(self.value * self.growth_factor, LARGEST_SCALE)
                self.good_steps = 0
            return True
        self.skipped += 1
        self.good_steps = 0
        if self.value * self.backoff_factor < 1:
            raise NumericsError(
                f"[precision] gradients are not finite at loss scale {scale_text(self.value)}, "
                "and none below 1 is "
                "allowed: it is not the scale that overflows. Lower the learning rate, or use bf16"
            )
        self.value *= self.backoff_factor
        return False

    def scale(self, loss: Tensor) -> Tensor:
        """loss * scale; call backward() on the result."""
        return loss * self.value if self.enabled else loss

    def unscale_(self, array: np.ndarray) -> None:
        """Divides float32 gradients by the scale, in place."""
        if self.value == 1:
            return
        lib = native.library()
        record = np.zeros(lib.record, np.int64)
        address = array.ctypes.data
        record[:5] = (
            lib.codes["scale"],
            address,
            address,
            native.float_bits(1 / self.value),
            array.size,
        )
        lib.run(record.ctypes.data, 1, native.Context(what="rounding"))

    def step(self, optimizer: Any) -> bool:
        """Divides the gradients by the scale and updates the parameters, or skips the step; then
        sets the next scale.

        optimizer: an optim.Optimizer.

        Returns whether the step was taken.

        Raises NumericsError: see update(); or, when not enabled, a gradient is not finite.
        """
        if not self.enabled:
            optimizer.step()
            return True
        self.unscale_(optimizer._bound().grads)
        try:
            optimizer.step()
        except NumericsError:
            return self.update(False)
        return self.update(True)

    def state_dict(self) -> dict[str, Any]:
        """Scale, steps since it changed, steps skipped."""
        return {"scale": self.value, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what state_dict() gave. Raises ConfigError if something is missing."""
        missing = sorted({"scale", "good_steps", "skipped"} - state.keys())
        if missing:
            raise ConfigError(
                f"[precision] the state of the loss scale has no {' and no '.join(missing)}"
            )
        self.value = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.skipped = int(state["skipped"])
