"""What the step log and loggers cost: microseconds of a fingerprint, of a record, of callbacks
per step.

    python benchmarks/steplog.py

Medians of rounds of one process on one core, each part alone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import common
import numpy as np

from odyssey import loggers
from odyssey.audit.steplog import StepLog, StepRecord
from odyssey.callbacks import Context, LearningRateMonitor
from odyssey.checkpoints.trainable import Step
from odyssey.comm import Communicator
from odyssey.core import fingerprint, native
from odyssey.errors import ConfigError

ROUNDS = 21
LENET5 = 61_706  # floats


def microseconds(call: Callable[[], object], count: int) -> float:
    """The median over rounds of the mean time of `count` calls."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            call()
        rounds.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(rounds)


def main() -> None:
    common.print_machine()
    for floats in (LENET5, 16 * LENET5, 1 << 24):
        values = native.aligned(floats)
        values[:] = np.random.default_rng(0).standard_normal(floats, np.float32)
        taken = microseconds(
            fingerprint.Runs([(values.ctypes.data, floats, 0)]), max(3, 20_000_000 // floats // 10)
        )
        print(
            f"fingerprint of {floats:>10,} floats  {taken:9.2f} us  "
            f"{4 * floats / taken / 1e3:5.1f} GB/s"
        )
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(StepLog(Path(folder) / "steps.log", 1)) as log,
    ):
        steps = iter(range(1, 1 << 40))

        def append() -> None:
            log.append(StepRecord(next(steps), 3, 100, 64, 2.3, 1 << 63, 1 << 62, 0.1, True, 1))

        print(f"record                            {microseconds(append, 5000):9.2f} us")
        loggers_and_callbacks(Path(folder))


def loggers_and_callbacks(folder: Path) -> None:
    """Per step: the events of a step, and a row of each logger that is installed, flushed as at
    every hundredth.
    """
    trainer = SimpleNamespace(
        steps=0, comm=Communicator(), say=print, configuration=dict, gradient_norm=lambda: None
    )
    context = Context(trainer)
    context.step = Step(2.3, 1.0, 0.1, True, None, {})
    for name in ("csv", "jsonl", "tensorboard"):
        try:
            (logger,) = loggers.named(name, folder / name, 1)
        except ConfigError as problem:
            print(f"{name}: {problem}")
            continue
        context.callbacks = context.given = (LearningRateMonitor(), logger)
        context.emit("on_fit_start")
        context.emit("on_epoch_start")

        def step(context: Context = context) -> None:
            trainer.steps += 1
            context.emit("on_step_end")

        print(f"a row of {name:<12}             {microseconds(step, 500):9.2f} us")
        logger.log_every_n_steps = 10
        print(f"with log_every_n_steps=10         {microseconds(step, 500):9.2f} us")
        context.emit("on_fit_end")


if __name__ == "__main__":
    main()
