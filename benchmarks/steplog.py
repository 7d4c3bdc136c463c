"""What the step log costs: microseconds of a fingerprint and of a record.

    python benchmarks/steplog.py

Medians of rounds of one process on one core, each part alone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from odyssey.audit.steplog import Record, StepLog
from odyssey.core import fingerprint, native

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
    for floats in (LENET5, 16 * LENET5, 1 << 24):
        values = native.aligned(floats)
        values[:] = np.random.default_rng(0).standard_normal(floats, np.float32)
        taken = microseconds(fingerprint.Runs([(values.ctypes.data, floats, 0)]), max(3, 20_000_000 // floats // 10))
        print(f"fingerprint of {floats:>10,} floats  {taken:9.2f} us  {4 * floats / taken / 1e3:5.1f} GB/s")
    with tempfile.TemporaryDirectory() as folder, StepLog(Path(folder) / "steps.log", 1) as log:
        steps = iter(range(1, 1 << 40))

        def append() -> None:
            log.append(Record(next(steps), 3, 100, 64, 2.3, 1 << 63, 1 << 62, 0.1, True, 1))

        print(f"record                            {microseconds(append, 5000):9.2f} us")


if __name__ == "__main__":
    main()
