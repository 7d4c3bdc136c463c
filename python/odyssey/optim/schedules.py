"""Learning-rate schedules: functions from the step to a factor on the rate.

`odyssey.optim` has them.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ConfigError, check_number
from ..settings.recipes import LR_SCALINGS, SCHEDULES, check_listed

__all__ = [
    "Schedule",
    "constant",
    "cosine",
    "linear",
    "linear_warmup",
    "lr_factor",
    "per_epoch",
    "schedule",
    "sequential",
    "step_decay",
]

Schedule = Callable[[int], float]


def _shown(make: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """Decorates what makes a schedule: that shows itself as the call that made it, and is
    pickled as this call.
    """

    class Made:
        # The text of arguments has the addresses of functions, which differ between processes.
        _not_state = ("_call",)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.factor = make(*args, **kwargs)
            self._again = functools.partial(made, *args, **kwargs)
            self._call = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])

        def __call__(self, step: int) -> float:
            return self.factor(step)

        def __repr__(self) -> str:
            return f"{make.__name__}({self._call})"

        def __reduce__(self) -> Any:
            return self._again, ()

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Schedule:
        return Made(*args, **kwargs)

    return made


@_shown
def constant() -> Schedule:
    """Always 1."""
    return lambda step: 1.0


@_shown
def step_decay(every: int, gamma: float = 0.1) -> Schedule:
    """gamma to the power of (step // every). Raises ConfigError if `every` is below 1."""
    if every < 1:
        raise ConfigError(f"[schedule] step_decay every {every} steps; at least 1 is allowed")
    return lambda step: gamma ** (step // every)


@_shown
def cosine(total_steps: int, floor: float = 0.0) -> Schedule:
    """Half a cosine from 1 to `floor` over total_steps (Loshchilov and Hutter 2017, without
    restarts).
    """

    def factor(step: int) -> float:
        return floor + (1 - floor) * 0.5 * (
            1 + math.cos(math.pi * min(step / max(total_steps, 1), 1.0))
        )

    return factor


@_shown
def linear_warmup(warmup_steps: int, after: Schedule | None = None) -> Schedule:
    """A straight line from 1 / warmup_steps to 1, then `after` (counted from the end of the
    warm-up), else 1.

    Raises ConfigError if `warmup_steps` is negative.
    """
    if warmup_steps < 0:
        raise ConfigError(f"[schedule] a warm-up of {warmup_steps} steps; 0 or more are allowed")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return after(step - warmup_steps) if after else 1.0

    return factor


@_shown
def linear(start_factor: float, total: int, end_factor: float = 1.0) -> Schedule:
    """A straight line from start_factor to end_factor over `total` steps, then end_factor
    (PyTorch's LinearLR).
    """
    check_number("[linear] start_factor", start_factor, 0)
    return lambda step: start_factor + (end_factor - start_factor) * min(step / max(total, 1), 1.0)


@_shown
def sequential(schedules: Sequence[Schedule], milestones: Sequence[int]) -> Schedule:
    """One schedule after the other: number k from milestone k - 1 on, counting from there
    (PyTorch's SequentialLR).

    Raises ConfigError: there is not one milestone between each two schedules, or they do not
    increase.
    """
    schedules = list(schedules)
    milestones = list(milestones)
    if len(milestones) != len(schedules) - 1 or any(
        b <= a for a, b in zip([0, *milestones], milestones, strict=False)
    ):
        raise ConfigError(
            f"[schedule] {len(schedules)} schedules with milestones {milestones}; "
            f"give {max(len(schedules) - 1, 0)} milestones that increase, from 1 on"
        )

    def factor(step: int) -> float:
        k = bisect.bisect_right(milestones, step)
        return schedules[k](step - (milestones[k - 1] if k else 0))

    return factor


@_shown
def per_epoch(by_epoch: Schedule, steps_per_epoch: int) -> Schedule:
    """A schedule over epochs as one over steps: the factor changes once per epoch."""
    if steps_per_epoch < 1:
        raise ConfigError(f"[schedule] steps_per_epoch is {steps_per_epoch}; it must be at least 1")
    return lambda step: by_epoch(step // steps_per_epoch)


def lr_factor(scaling: str, batch_size: int, base_batch_size: int) -> float:
    """Returns the factor on the learning rate for batches of base_batch_size that batches of
    batch_size need.

    "linear": the ratio (Goyal et al. 2017); "sqrt": its root (Krizhevsky 2014); "none": 1. Raises
    ConfigError: there is no such rule.
    """
    if scaling not in LR_SCALINGS:
        raise ConfigError(
            f"[train] lr_scaling is {scaling!r}; choose from {', '.join(LR_SCALINGS)}"
        )
    ratio = batch_size / base_batch_size
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[scaling]


#: What the names of `--schedule` mean for so many steps.
_SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "constant": lambda steps: constant(),
    "step": lambda steps: step_decay(max(-(-steps // 3), 1)),
    "cosine": cosine,
    "linear-warmup": lambda steps: linear_warmup(max(steps // 10, 1)),
}
check_listed("schedules", _SCHEDULES, SCHEDULES)


def schedule(name: str, total_steps: int, warmup_steps: int = 0) -> Schedule:
    """Returns the schedule of a name: a factor on the learning rate as a function of the step,
    after `warmup_steps`.

    "step" divides by 10 at one and two thirds of the way; "linear-warmup" is a constant after its
    warm-up (a tenth of the way unless given). Raises ConfigError: there is no such name.
    """
    if name not in _SCHEDULES:
        raise ConfigError(f"[schedule] {name!r} is unknown; choose from {', '.join(SCHEDULES)}")
    factory = _SCHEDULES[name]
    if not warmup_steps:
        return factory(max(total_steps, 1))
    if name == "linear-warmup":
        return linear_warmup(warmup_steps)
    return linear_warmup(warmup_steps, factory(max(total_steps - warmup_steps, 1)))
