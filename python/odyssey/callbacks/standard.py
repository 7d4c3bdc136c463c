"""The callbacks that come with odyssey: stopping early, keeping the best checkpoint, the
learning rate, time.

What they decide by is rank 0's, so all ranks decide alike; what they remember is in checkpoints, so
a training that goes on decides as one that was never stopped.
"""

from __future__ import annotations

import datetime
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, check_integer
from ..settings.declarations import did_you_mean
from .base import Callback, Context

MODES = ("auto", "min", "max")


def _check(owner: Any, name: str, value: Any, ok: bool, allowed: str) -> Any:
    if not ok:
        raise ConfigError(f"[{type(owner).__name__}] {name} is {value!r}; {allowed}")
    return value


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class Monitor(Callback):
    """Looks at a figure of an epoch's record, such as "test_loss", "test_accuracy" or "train_loss".

    mode: "min" if less is better, "max", or "auto": "max" for what ends in accuracy or top5 (any
    number), else "min". min_delta: by how much it must be better than the best to count as better.
    Raises ConfigError: a setting is not allowed; an epoch has no such figure: before the first step
    where it can be known then (Context.figures), else at the end of the first epoch.
    """

    def __init__(
        self, monitor: str = "test_loss", mode: str = "auto", min_delta: float = 0.0
    ) -> None:
        self.monitor = _check(
            self, "monitor", monitor, isinstance(monitor, str), "give the name of a figure"
        )
        self.mode = _check(self, "mode", mode, mode in MODES, f"choose from {', '.join(MODES)}")
        if mode == "auto":
            self.mode = "max" if re.search(r"(accuracy|top\d+)$", monitor) else "min"
        ok = _number(min_delta) and min_delta >= 0
        self.min_delta = _check(
            self, "min_delta", min_delta, ok, "it must be a number of at least 0"
        )
        self.best: float | None = None

    def on_fit_start(self, context: Context) -> None:
        """Nothing is known yet, but which figures there will be."""
        self.best = None
        if context.figures is not None:
            self.check(context.figures)

    def check(self, figures: Sequence[str]) -> None:
        """Raises ConfigError, on all ranks: `monitor` is none of the figures that an epoch has."""
        if self.monitor not in figures:
            part, _, figure = self.monitor.partition("_")
            hint = ""
            tests = ("test", "val", "valid", "validation", "eval")
            if part in tests[1:] and f"test_{figure}" in figures:
                hint = f"write 'test_{figure}', or "
            elif part in tests and not any(name.startswith("test_") for name in figures):
                hint = "give fit() a validation set, whose figures are test_loss, ..., or "
            raise ConfigError(
                f"[{type(self).__name__}] an epoch has no figure {self.monitor!r}; {hint}choose "
                f"from {', '.join(figures)}"
            ).on_all_ranks()

    def value(self, context: Context) -> float | None:
        """Rank 0's figure of this epoch, on all ranks; None where verify or replay leaves
        validation out.
        """
        record = context.record
        figures = [
            name for name, v in record.items() if isinstance(v, (int, float)) and name != "epoch"
        ]
        if self.monitor not in figures and not context.validate:
            return None
        self.check(figures)
        return float(
            context.trainer.comm.broadcast(np.array([record[self.monitor]], np.float64))[0]
        )

    def better(self, value: float, than: float | None) -> bool:
        """Returns whether a figure is better than another; NaN never is."""
        if math.isnan(value) or than is None:
            return not math.isnan(value)
        return (
            value < than - self.min_delta if self.mode == "min" else value > than + self.min_delta
        )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


class Patience(Monitor):
    """Counts epochs since the figure was better for the last time: `waited`."""

    def __init__(
        self,
        monitor: str = "test_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str = "auto",
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.patience = check_integer(f"[{type(self).__name__}] patience", patience, 0)
        self.waited = 0

    def on_fit_start(self, context: Context) -> None:
        super().on_fit_start(context)
        self.waited = 0

    def too_long(self, context: Context) -> bool:
        """Counts this epoch; whether there were `patience` without a better figure."""
        value = self.value(context)
        if value is None:
            return False
        if self.better(value, self.best):
            self.best = value
            self.waited = 0
        else:
            self.waited += 1
        return self.waited >= max(self.patience, 1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.waited = int(state["waited"])


class EarlyStopping(Patience):
    """Finishes the training after `patience` epochs in which the figure was not better by more
    than `min_delta`.
    """

    def on_epoch_end(self, context: Context) -> None:
        if self.too_long(context):
            by = f" by {self.min_delta:g}" if self.min_delta else ""
            goal = "a number" if self.best is None else f"better than {self.best:.6g}{by}"
            epochs = "an epoch" if self.waited == 1 else f"{self.waited} epochs"
            context.finish(f"{self.monitor} was not {goal} in {epochs}")

    def still_finished(self, context: Context) -> bool:
        return self.waited >= max(self.patience, 1)

    @classmethod
    def parse(cls, text: str, figures: Sequence[str]) -> EarlyStopping:
        """That of `odyssey train --early-stopping FIGURE[:PATIENCE[:MIN_DELTA]]`.

        Raises ConfigError: it is no such text, or names none of these figures.
        """
        monitor, *numbers = (part.strip() for part in text.split(":"))
        if monitor not in figures:
            raise ConfigError(
                f"[train] --early-stopping names {monitor!r}; choose from {', '.join(figures)}"
            )
        try:
            return cls(
                monitor, *(kind(n) for kind, n in zip((int, float, None), numbers, strict=False))
            )
        except ConfigError:
            raise
        except (TypeError, ValueError):
            raise ConfigError(
                f"[train] --early-stopping is {text!r}; give FIGURE[:PATIENCE[:MIN_DELTA]], such "
                f"as {monitor}:3:0.01"
            ) from None


class ReduceLROnPlateau(Patience):
    """Multiplies the learning rate with `factor` after `patience` epochs in which the figure was
    not better, and waits anew; not below `min_lr`. A schedule goes on as a factor on it.
    """

    def __init__(
        self,
        monitor: str = "test_loss",
        factor: float = 0.1,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str = "auto",
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(monitor, patience, min_delta, mode)
        self.factor = _check(
            self, "factor", factor, _number(factor) and 0 < factor < 1, "it must be between 0 and 1"
        )
        self.min_lr = _check(
            self, "min_lr", min_lr, _number(min_lr) and min_lr >= 0, "it must be at least 0"
        )

    def on_epoch_end(self, context: Context) -> None:
        if not self.too_long(context):
            return
        self.waited = 0
        rate = context.trainer.base_rate
        if rate > self.min_lr:
            context.trainer.scale_rate(max(self.factor, self.min_lr / rate))
            context.trainer.say(
                f"learning rate {rate:g} -> {context.trainer.base_rate:g}: {self.monitor} is no "
                "better"
            )


class ModelCheckpoint(Monitor):
    """Keeps the checkpoints of the `save_top_k` best epochs beside the most recent ones, and
    gives two of them names: `best` (or `name`) and `last` in the directory of checkpoints
    lead to them, for fit(resume=), load_checkpoint() and odyssey.load(). `best_value` and
    `best_path` are those of the best so far.

    Raises ConfigError: fit() makes no checkpoints.
    """

    def __init__(
        self,
        monitor: str = "test_loss",
        mode: str = "auto",
        save_top_k: int = 1,
        *,
        name: str = "best",
    ) -> None:
        super().__init__(monitor, mode)
        self.save_top_k = check_integer("[ModelCheckpoint] save_top_k", save_top_k, 1)
        ok = (
            isinstance(name, str)
            and re.fullmatch(r"(?!step_|last$)[A-Za-z][A-Za-z0-9_-]{0,63}", name) is not None
        )
        self.name = _check(
            self,
            "name",
            name,
            ok,
            "give letters, digits, - and _; not 'last', nor what begins step_",
        )
        self.top: list[tuple[float, int]] = []  # (figure, step), the best first
        self._folder: Path | None = None

    @property
    def best_value(self) -> float | None:
        """The figure of the best epoch."""
        return self.top[0][0] if self.top else None

    @property
    def best_path(self) -> Path | None:
        """Its checkpoint."""
        return self._folder / self.name if self.top and self._folder is not None else None

    def on_fit_start(self, context: Context) -> None:
        super().on_fit_start(context)
        self.top = []
        self._folder = context.folder
        if context.folder is None and not context.saving.off:
            raise ConfigError(
                "[ModelCheckpoint] fit() makes no checkpoints; give it a checkpoint_dir"
            ).on_all_ranks()

    def on_epoch_end(self, context: Context) -> None:
        value = self.value(context)
        if value is None or math.isnan(value):
            return
        sign = 1 if self.mode == "min" else -1
        # an epoch may end twice: before a restart, after
        other_epochs = [one for one in self.top if one[1] != context.steps]
        self.top = sorted([*other_epochs, (value, context.steps)], key=lambda one: sign * one[0])[
            : self.save_top_k
        ]
        context.due = context.due or any(step == context.steps for _, step in self.top)

    def on_checkpoint(self, context: Context) -> None:
        context.kept |= {step for _, step in self.top}
        context.marks |= {"last"} | (
            {self.name} if self.top and self.top[0][1] == context.steps else set()
        )

    def state_dict(self) -> dict[str, Any]:
        return {"top": self.top}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.top = [(float(value), int(step)) for value, step in state["top"]]


class LearningRateMonitor(Callback):
    """Gives loggers the learning rate of each step, as "lr", and the record of an epoch that of
    its last.
    """

    exact = False

    def on_step_end(self, context: Context) -> None:
        context.log("lr", context.step.rate)
        context.tally.extra["lr"] = context.step.rate


class Timer(Callback):
    """Finishes the training after a time: seconds, a datetime.timedelta, or "HH:MM:SS" (days as
    "DD:HH:MM:SS").

    What was trained before a restart counts. The first rank whose time is over ends it for all,
    about a tenth of a second later.
    """

    exact = False

    def __init__(self, duration: float | str | datetime.timedelta) -> None:
        self.duration = self._parse_duration(duration)
        self._started_at = 0.0
        self._seconds_before = 0.0

    def _parse_duration(self, duration: Any) -> float:
        seconds = duration.total_seconds() if isinstance(duration, datetime.timedelta) else duration
        if isinstance(duration, str):
            parts = duration.split(":")
            ok = 3 <= len(parts) <= 4 and all(part.isdecimal() for part in parts)
            seconds = (
                sum(int(p) * n for p, n in zip(parts[::-1], (1, 60, 3600, 86400), strict=False))
                if ok
                else None
            )
        ok = _number(seconds) and seconds > 0
        _check(self, "duration", duration, ok, "give seconds above 0, a timedelta, or 'HH:MM:SS'")
        return float(seconds)

    @property
    def elapsed(self) -> float:
        """Seconds of training so far."""
        return (
            self._seconds_before + time.monotonic() - self._started_at
            if self._started_at
            else self._seconds_before
        )

    def on_fit_start(self, context: Context) -> None:
        self._started_at = time.monotonic()
        self._seconds_before = 0.0

    def on_step_end(self, context: Context) -> None:
        if self.elapsed >= self.duration:
            context.finish(f"{self.duration:g} seconds are over")

    on_epoch_end = on_step_end

    def on_fit_end(self, context: Context) -> None:
        self._seconds_before = self.elapsed
        self._started_at = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.elapsed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seconds_before = float(state["seconds"])

    def still_finished(self, context: Context) -> bool:
        return self.elapsed >= self.duration


class LambdaCallback(Callback):
    """Functions of a Context by the names of events: LambdaCallback(on_epoch_end=lambda c:
    print(c.record)). Raises ConfigError: there is no such event.
    """

    own_code = True

    def __init__(self, **functions: Callable[[Context], Any]) -> None:
        events = [name for name in vars(Callback) if name.startswith("on_")]
        for name, function in functions.items():
            if name not in events:
                raise ConfigError(
                    f"[LambdaCallback] {name!r} is no event{did_you_mean(name, events)}"
                )
            setattr(
                self,
                name,
                _check(self, name, function, callable(function), "give a function of a Context"),
            )

    def __repr__(self) -> str:
        return f"LambdaCallback({', '.join(vars(self))})"
