"""Progress of a training run.

Not where numbers are made: the trainer calls these on rank 0 with its own.

The calls, in order: `begin` once, then per epoch several `step` (the trainer sends at most about
ten a second) and one `epoch` with the epoch's record, then `end`.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from ..callbacks import Callback, Context
from ..checkpoints.trainable import SENT

if TYPE_CHECKING:
    from logging import Logger


class Progress(Protocol):
    """Whatever wants to see a run go on."""

    def begin(self, epochs: int, steps_per_epoch: int, batch: int) -> None:
        """The run starts: so many epochs of so many steps of `batch` samples."""

    def step(self, epoch: int, step_in_epoch: int, loss: float, samples_per_second: float) -> None:
        """A step is done.

        Epochs count from 0 here (from 1 in records); `step_in_epoch` steps of it are done.
        """

    def epoch(self, record: dict[str, Any]) -> None:
        """An epoch is done: its record as in the history."""

    def say(self, line: str) -> None:
        """Something happened that the user should know.

        May be missing: the trainer then prints the line.
        """

    def end(self) -> None:
        """The run is over, finished or not."""


class Shown(Callback):
    """Tells a Progress object of a training."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._since = self._shown_at = 0.0  # when the epoch went on, and when a step was shown last
        self._samples_before = 0  # samples of the epoch before it went on

    def on_fit_start(self, context: Context) -> None:
        self.progress.begin(context.epochs, context.steps_per_epoch, context.batch_size)

    def on_epoch_start(self, context: Context) -> None:
        self._since = self._shown_at = time.perf_counter()
        self._samples_before = context.tally.samples

    def on_step_end(self, context: Context) -> None:
        now = time.perf_counter()
        if now - self._shown_at > 0.1:
            self._shown_at = now
            tally = context.tally
            rate = (tally.samples - self._samples_before) / (now - self._since)
            self.progress.step(context.cursor.epoch, tally.steps, context.loss, rate)

    on_server_update = on_step_end

    def on_epoch_end(self, context: Context) -> None:
        self.progress.epoch(context.record)

    def on_fit_end(self, context: Context) -> None:
        self.progress.end()


def find_logger() -> Logger | None:
    """Returns the logger "odyssey" of Python's logging, if the program wants lines from it: it has
    a handler that takes INFO. Lines then go there and not to standard error.

    A program that has not imported logging has no handler.
    """
    if (logging := sys.modules.get("logging")) is None:
        return None
    logger = logging.getLogger("odyssey")
    return logger if logger.isEnabledFor(logging.INFO) and logger.hasHandlers() else None


def tell(say: Callable[[str], None] | None, line: str) -> None:
    """One line to the user: by logging, by `say`, or on standard error."""
    if (logger := find_logger()) is not None:
        logger.info(line)
    elif say is not None:
        say(line)
    else:
        print(f"odyssey: {line}", file=sys.stderr)


def make(no_progress: bool, stream: TextIO) -> Progress | None:
    """A live line on a terminal, a plain line per epoch elsewhere, nothing when none is wanted."""
    if no_progress:
        return None
    return (
        PlainProgress(None)
        if find_logger() is not None
        else RichProgress(stream)
        if stream.isatty()
        else PlainProgress(stream)
    )


def format_figure(value: float) -> str:
    """Returns a loss or metric as text: four decimals, or five digits of a number for which these
    are too many or too few.
    """
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.5g}"


def epoch_line(record: dict[str, Any], epochs: int) -> str:
    """One line about one epoch; `epochs` 0 when unknown."""
    number = int(record["epoch"])
    parts = [f"epoch {number}/{epochs}" if epochs else f"epoch {number}"]
    for key, value in record.items():
        part, _, name = key.partition("_")
        if part in ("train", "test") and value is not None:
            share = name == "accuracy" or re.fullmatch(r"top\d+", name)
            parts.append(
                f"{part} {name} " + (f"{100 * value:.2f} %" if share else format_figure(value))
            )
    if record.get("samples_per_second") is not None:
        parts.append(f"{record['samples_per_second']:,.0f} samples/s")
    if record.get("seconds") is not None:
        parts.append(f"{record['seconds']:.1f} s")
    return "  ".join(parts + traffic(*map(record.get, SENT)))


def traffic(sent: float | None, uncompressed: float | None, wire: float | None = None) -> list[str]:
    """Returns what a rank sends in a step, if some of it goes to other machines, or compression
    makes it less.
    """
    if not sent or not uncompressed:
        return []
    details = [f"{wire / 1e3:,.1f} to other machines"] if wire else []
    details += [f"uncompressed {uncompressed / 1e3:,.1f}"] if sent != uncompressed else []
    return [f"{sent / 1e3:,.1f} KB/step sent ({', '.join(details)})"] if details else []


class PlainProgress(Progress):
    """One line per epoch, no control characters: for pipes, files and batch systems; without a
    stream to the logger.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._epochs = 0

    def begin(self, epochs: int, steps_per_epoch: int, batch: int) -> None:
        self._epochs = epochs

    def epoch(self, record: dict[str, Any]) -> None:
        line = epoch_line(record, self._epochs)
        if self._stream is not None:
            print(line, file=self._stream, flush=True)
        elif (logger := find_logger()) is not None:
            logger.info(line)

    def say(self, line: str) -> None:
        print(f"odyssey: {line}", file=self._stream, flush=True)


class RichProgress(Progress):
    """One live line: epoch, bar, loss, samples per second, time left; each finished epoch stays
    above it.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        self._console = Console(file=stream)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("loss {task.fields[loss]}  {task.fields[rate]} samples/s"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),  # so only the bar shrinks
            console=self._console,
            transient=True,
        )
        self._task: Any = None
        self._epochs = 0
        self._steps = 0

    def begin(self, epochs: int, steps_per_epoch: int, batch: int) -> None:
        self._epochs = epochs
        self._steps = steps_per_epoch
        self._task = self._bar.add_task(
            f"epoch 1/{epochs}", total=epochs * steps_per_epoch, loss="-", rate="-"
        )
        self._bar.start()

    def step(self, epoch: int, step_in_epoch: int, loss: float, samples_per_second: float) -> None:
        self._bar.update(
            self._task,
            completed=epoch * self._steps + step_in_epoch,
            description=f"epoch {epoch + 1}/{self._epochs}",
            loss=format_figure(loss),
            rate=f"{samples_per_second:,.0f}",
        )

    def epoch(self, record: dict[str, Any]) -> None:
        self._console.print(
            epoch_line(record, self._epochs), highlight=False, markup=False, soft_wrap=True
        )

    def say(self, line: str) -> None:
        self._console.print(f"odyssey: {line}", highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        self._bar.stop()
