"""Loops around `train_step()`, which save with `save_checkpoint()` and resume with
`load_checkpoint()`.

The callbacks of a program act when the loop calls them. They draw from the number of the step,
because a loop owns the state of its callbacks and saves none here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


class ByStep:
    """A state that is a function of the number of the step."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.step = 0

    def next(self) -> float:
        return float(np.random.default_rng([self.start, self.step]).random())


class StoppedLoop(Exception):
    """The loop stops without a checkpoint of its last step."""


def run(
    trainer: Any,
    batches_from: Callable[[int, int], Iterable[Any]],
    per_epoch: int,
    callbacks: Iterable[Any],
    *,
    epochs: int,
    steps: int | None = None,
    checkpoint_dir: Path | None = None,
    checkpoint_every: int | None = None,
) -> None:
    """Trains from the newest checkpoint to the last step, or to step `steps`.

    Args:
        batches_from: returns the batches of an epoch, from a number on.
        callbacks: those with a state of `ByStep` act every so many steps. One with a `step` and
            `how` stops the loop after that step.

    Raises:
        StoppedLoop: the loop has stopped before it saved its last steps.
    """
    step = 0
    if checkpoint_dir is not None and any(checkpoint_dir.glob("step_*")):
        step = trainer.load_checkpoint(checkpoint_dir)
    acting = [one for one in callbacks if isinstance(getattr(one, "state", None), ByStep)]
    raising = [one for one in callbacks if getattr(one, "how", "")]
    for one in acting:
        one.state.step = step
    last = epochs * per_epoch if steps is None else min(steps, epochs * per_epoch)
    while step < last:
        epoch, number = divmod(step, per_epoch)
        for batch in batches_from(epoch, number):
            trainer.train_step(batch)
            step += 1
            for one in acting:
                one.state.step = step
                if step % one.every == 0:
                    one.act(SimpleNamespace(trainer=trainer))
            if any(one.step == step for one in raising):
                raise StoppedLoop
            is_due = checkpoint_every is not None and step % checkpoint_every == 0
            if checkpoint_dir is not None and (is_due or step == steps):
                trainer.save_checkpoint(checkpoint_dir)
            if step == last:
                return
