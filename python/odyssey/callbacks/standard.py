"""The callbacks that come with odyssey: stopping early, keeping the best checkpoint, the
learning rate, time.

They decide by the metrics of rank 0, so all ranks decide alike. Their state is in checkpoints, so a
run that resumes decides like one that was never stopped.
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
from ..metrics import direction_of
from ..settings.declarations import did_you_mean
from .base import Callback, Context

MODES = ("auto", "min", "max")


def _check_setting(owner: Any, name: str, value: Any, ok: bool, allowed: str) -> Any:
    """Returns the value of a setting. Raises ConfigError with the advice `allowed` unless `ok`."""
    if not ok:
        raise ConfigError(f"[{type(owner).__name__}] {name} is {value!r}; {allowed}")
    return value


def _is_finite_number(value: Any) -> bool:
    """Tells whether a value is a finite int or float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class Monitor(Callback):
    """Base of callbacks that compare a metric of each epoch with the best one.

    Args:
        monitor: the metric, such as "test_loss", "test_accuracy" or "train_loss".
        mode: "min" if less is better, "max" if more is better. "auto" asks
            `odyssey.metrics.direction_of`, which knows the names of common metrics.
        min_delta: the difference from the best by which a value must be better to count as better.

    Raises:
        ConfigError: a setting is not allowed, `mode` is "auto" and the name of the metric doesn't
            say which values are better, or an epoch has no such metric. The last is raised before
            the first step if the metrics are known then (Context.figures), else at the end of the
            first epoch.
    """

    def __init__(
        self, monitor: str = "test_loss", mode: str = "auto", min_delta: float = 0.0
    ) -> None:
        self.monitor = _check_setting(
            self, "monitor", monitor, isinstance(monitor, str), "give the name of a figure"
        )
        self.mode = _check_setting(
            self, "mode", mode, mode in MODES, f"choose from {', '.join(MODES)}"
        )
        if mode == "auto":
            self.mode = self._mode_of(monitor)
        ok = _is_finite_number(min_delta) and min_delta >= 0
        self.min_delta = _check_setting(
            self, "min_delta", min_delta, ok, "it must be a number of at least 0"
        )
        self.best: float | None = None

    def _mode_of(self, monitor: str) -> str:
        """Returns "min" or "max" by the name of a metric. Raises ConfigError if it doesn't say."""
        direction = direction_of(monitor)
        if direction is None:
            raise ConfigError(
                f"[{type(self).__name__}] less or more of {monitor!r} may be better; give "
                "mode='min' or mode='max'"
            )
        return "min" if direction == "minimize" else "max"

    def on_fit_start(self, context: Context) -> None:
        """Resets the best value, and checks `monitor` if the metrics are known already."""
        self.best = None
        if context.figures is not None:
            self.check(context.figures)

    def check(self, figures: Sequence[str]) -> None:
        """Raises ConfigError, on all ranks, if `monitor` is not one of the metrics of an epoch."""
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
        """Returns the metric of this epoch on rank 0, on all ranks. Collective.

        None if the metric is missing because verify or replay skips validation.
        """
        record = context.record
        figures = [
            name
            for name, number in record.items()
            if isinstance(number, (int, float)) and name != "epoch"
        ]
        if self.monitor not in figures and not context.validate:
            return None
        self.check(figures)
        local_value = np.array([record[self.monitor]], np.float64)
        [value] = context.trainer.comm.broadcast(local_value)
        return float(value)

    def better(self, value: float, than: float | None) -> bool:
        """Tells whether a value is better than the best one. Any number is better than None.

        NaN is never better.
        """
        if math.isnan(value):
            return False
        if than is None:
            return True
        if self.mode == "min":
            return value < than - self.min_delta
        return value > than + self.min_delta

    def best_record(self, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Returns the record of the best epoch: the first one with the best value of the metric.

        None if no epoch has a value.
        """
        best_record = None
        for record in records:
            value = record.get(self.monitor)
            if not isinstance(value, (int, float)) or math.isnan(value):
                continue
            best = None if best_record is None else best_record[self.monitor]
            if best is None or (value < best if self.mode == "min" else value > best):
                best_record = record
        return best_record

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


class Patience(Monitor):
    """Base of callbacks that count the epochs since the metric was last better, in `waited`."""

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
        """Counts this epoch, and tells whether `patience` epochs had no better value."""
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
    """Finishes training after `patience` epochs without a metric that is better by `min_delta`."""

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
        """Builds the callback of `odyssey train --early-stopping FIGURE[:PATIENCE[:MIN_DELTA]]`.

        figures: the metrics that are allowed. Raises ConfigError for another text or metric.
        """
        monitor, *numbers = (part.strip() for part in text.split(":"))
        if monitor not in figures:
            raise ConfigError(
                f"[train] --early-stopping names {monitor!r}; choose from {', '.join(figures)}"
            )
        # The types of PATIENCE and MIN_DELTA. None is not callable, so a third number is an error.
        types = (int, float, None)
        try:
            return cls(
                monitor,
                *(convert(number) for convert, number in zip(types, numbers, strict=False)),
            )
        except ConfigError:
            raise
        except (TypeError, ValueError):
            raise ConfigError(
                f"[train] --early-stopping is {text!r}; give FIGURE[:PATIENCE[:MIN_DELTA]], such "
                f"as {monitor}:3:0.01"
            ) from None


class ReduceLROnPlateau(Patience):
    """Multiplies the learning rate by `factor` after `patience` epochs without a better metric.

    Then it starts to count again. The rate never falls below `min_lr`. The factor of a schedule
    still applies.
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
        self.factor = _check_setting(
            self,
            "factor",
            factor,
            _is_finite_number(factor) and 0 < factor < 1,
            "it must be between 0 and 1",
        )
        self.min_lr = _check_setting(
            self,
            "min_lr",
            min_lr,
            _is_finite_number(min_lr) and min_lr >= 0,
            "it must be at least 0",
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
    """Keeps the checkpoints of the `save_top_k` best epochs, in addition to the most recent ones.

    Two links in the directory of checkpoints lead to the best and the newest one: `best` (or
    `name`) and `last`. You can pass them to fit(resume=), load_checkpoint() and odyssey.load().
    `best_value` and `best_path` are those of the best epoch so far. Raises ConfigError if fit()
    writes no checkpoints.
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
        self.name = _check_setting(
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
        """The metric of the best epoch, or None before there is one."""
        if not self.top:
            return None
        value, _ = self.top[0]
        return value

    @property
    def best_path(self) -> Path | None:
        """The link to the checkpoint of the best epoch, or None before there is one."""
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
        # An epoch can end twice: before and after a restart. So its entry is replaced.
        epochs = [(metric, step) for metric, step in self.top if step != context.steps]
        epochs.append((value, context.steps))
        sign = 1 if self.mode == "min" else -1
        epochs.sort(key=lambda epoch: sign * epoch[0])
        self.top = epochs[: self.save_top_k]
        # Asks for a checkpoint now if this epoch is one of the best.
        context.due = context.due or any(step == context.steps for _, step in self.top)

    def on_checkpoint(self, context: Context) -> None:
        context.kept |= {step for _, step in self.top}
        context.marks |= {"last"}
        if self.top:
            _, best_step = self.top[0]
            if best_step == context.steps:
                context.marks |= {self.name}

    def state_dict(self) -> dict[str, Any]:
        return {"top": self.top}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.top = [(float(value), int(step)) for value, step in state["top"]]


class LearningRateMonitor(Callback):
    """Logs the learning rate of each step as "lr".

    The record of an epoch gets the rate of its last step.
    """

    exact = False

    def on_step_end(self, context: Context) -> None:
        context.log("lr", context.step.rate)
        context.tally.extra["lr"] = context.step.rate


class Timer(Callback):
    """Finishes training after a time.

    The time of training before a restart counts. The first rank whose time is over ends training on
    all ranks, about a tenth of a second later.

    duration: seconds, a datetime.timedelta, or "HH:MM:SS" (with days "DD:HH:MM:SS").
    """

    exact = False

    def __init__(self, duration: float | str | datetime.timedelta) -> None:
        self.duration = self._parse_duration(duration)
        self._started_at = 0.0
        self._seconds_before = 0.0

    def _parse_duration(self, duration: Any) -> float:
        """Returns a duration in seconds. Raises ConfigError if it isn't one."""
        seconds = duration
        if isinstance(duration, datetime.timedelta):
            seconds = duration.total_seconds()
        elif isinstance(duration, str):
            seconds = None
            parts = duration.split(":")
            if 3 <= len(parts) <= 4 and all(part.isdecimal() for part in parts):
                unit_seconds = (1, 60, 3600, 86400)  # of a second, minute, hour and day
                pairs = zip(reversed(parts), unit_seconds, strict=False)
                seconds = sum(int(part) * unit for part, unit in pairs)
        ok = _is_finite_number(seconds) and seconds > 0
        _check_setting(
            self, "duration", duration, ok, "give seconds above 0, a timedelta, or 'HH:MM:SS'"
        )
        return float(seconds)

    @property
    def elapsed(self) -> float:
        """The seconds of training so far."""
        if not self._started_at:  # fit() is not running
            return self._seconds_before
        return self._seconds_before + time.monotonic() - self._started_at

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
    """A callback of functions, by the names of events.

    For example, LambdaCallback(on_epoch_end=lambda context: print(context.record)). Raises
    ConfigError for an unknown event.
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
                _check_setting(
                    self, name, function, callable(function), "give a function of a Context"
                ),
            )

    def __repr__(self) -> str:
        return f"LambdaCallback({', '.join(vars(self))})"
