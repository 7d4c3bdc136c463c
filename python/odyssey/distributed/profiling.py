"""How long things take: named timers, a monitored training, and what communication costs at
which size.

Times are of this process's clock; where ranks differ, the slowest counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import ConfigError, check_integer, counted
from ..train.batches import batches_of
from ..train.trainer_base import Trainer
from .groups import ProcessGroup, get_rank, is_initialized, joined

# What one of n ranks has to send, at least, per byte of the whole (the reduced array, or all pieces
# together): the time is compared with that (the "bus bandwidth" of nccl-tests).
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0 if n > 1 else 0.0,
}


class PerformanceMonitor:
    """Timers by name, of one process. show: print a line when a timer ends.

    Attributes:
        timings: seconds of every time that a timer ran, by name.
    """

    def __init__(self, show: bool = False) -> None:
        self.show = show
        self.timings: dict[str, list[float]] = {}
        self._running: dict[str, float] = {}

    def start_timer(self, name: str) -> None:
        """Starts a timer. Raises ConfigError if one of this name is running."""
        if name in self._running:
            raise ConfigError(
                f"[monitor] the timer {name!r} is running already; end it first, or give another "
                "name"
            )
        self._running[name] = time.perf_counter()

    def end_timer(self, name: str) -> float:
        """Ends a timer; returns its seconds, 0.0 if none of this name is running."""
        end = time.perf_counter()
        if name not in self._running:
            return 0.0
        seconds = end - self._running.pop(name)
        self.timings.setdefault(name, []).append(seconds)
        if self.show:
            print(f"{name}: {seconds:.4f} s", flush=True)
        return seconds

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """`with monitor.timer("epoch"):` starts it and ends it, whatever happens inside."""
        self.start_timer(name)
        try:
            yield
        finally:
            self.end_timer(name)

    def summary(self) -> dict[str, dict[str, float]]:
        """For each name: count, and total, mean, median, smallest and largest in seconds."""
        figures: dict[str, Callable[[list[float]], float]] = {
            "count": len,
            "total": sum,
            "mean": statistics.fmean,
        }
        figures |= {"median": statistics.median, "min": min, "max": max}
        return {
            name: {key: of(times) for key, of in figures.items()}
            for name, times in self.timings.items()
        }

    def monitor_training(
        self, trainer: Any, data_loader: Any, num_steps: int = 100, every: int = 10
    ) -> dict[str, Any]:
        """Takes steps and times them, apart from the waiting for data; rank 0 prints a line now
        and then.

        Args:
            trainer: a DistributedTrainer, or an object with train_step(*item) for what the loader
                gives.
            data_loader: gone through again until there are enough steps.
            num_steps: to take. every: steps per line printed.

        Returns steps, samples (of the items, by the length of their first part), seconds,
        samples_per_second, step_seconds and data_seconds (medians). The timers "total_training",
        "data" and "train_step" have the rest.
        """
        check_integer("[monitor] num_steps", num_steps, 1)
        check_integer("[monitor] every", every, 1)
        ours = isinstance(trainer, Trainer)
        rank = trainer.comm.rank if ours else get_rank() if is_initialized() else 0
        samples = since = 0
        first = len(self.timings.get("train_step", ()))
        interval_start = time.perf_counter()
        items = _repeat_items(lambda: batches_of(data_loader) if ours else data_loader)
        with self.timer("total_training"):
            for step in range(1, num_steps + 1):
                with self.timer("data"):
                    item = next(items)
                with self.timer("train_step"):
                    trainer.train_step(item) if ours else trainer.train_step(*item)
                n = len(item) if ours else len(item[0])
                samples = samples + n
                since = since + n
                if step % every == 0 or step == num_steps:
                    interval_end = time.perf_counter()
                    if rank == 0:
                        print(
                            f"step {step}/{num_steps}  "
                            f"{since / (interval_end - interval_start):,.0f} samples/s",
                            flush=True,
                        )
                    interval_start = interval_end
                    since = 0
        seconds = self.timings["total_training"][-1]
        return {
            "steps": num_steps,
            "samples": samples,
            "seconds": seconds,
            "samples_per_second": samples / seconds,
            "step_seconds": statistics.median(self.timings["train_step"][first:]),
            "data_seconds": statistics.median(self.timings["data"][-num_steps:]),
        }


def _repeat_items(make: Callable[[], Any]) -> Iterator[Any]:
    """The items of a loader, again and again."""
    while True:
        empty = True
        for item in make():
            empty = False
            yield item
        if empty:
            raise ConfigError("[monitor] the loader gives no batch; give it data")


def profile_communication(
    sizes: Sequence[int] = (1024, 10240, 102400, 1024000),
    operation: str = "all_reduce",
    repeats: int = 20,
    warm_up: int = 3,
    group: ProcessGroup | None = None,
    show: bool = True,
) -> list[dict[str, Any]]:
    """Times a collective of float32 at several sizes; all ranks of the group call it.

    Each repeat starts after a barrier and counts as long as the slowest rank took; the median of
    the repeats is given.

    Args:
        sizes: numbers of float32: of the reduced array, or of all pieces together (rounded up to
            one per rank).
        operation: one of FACTORS.
        repeats, warm_up: times that count, and times before that do not.
        show: rank 0 prints a table.

    Returns a dict per size: operation, ranks, backend, floats, bytes, seconds (median), best
    (seconds), bytes_per_second (bytes / seconds), bus_bytes_per_second (that times what a rank has
    to send per byte: 2 (n - 1) / n for an all-reduce over n ranks; 0 for one rank, which sends
    nothing).
    """
    g = joined(group)
    comm = g._member("profile_communication")
    if operation not in FACTORS:
        raise ConfigError(
            f"[profile] operation {operation!r} is unknown; choose from {', '.join(FACTORS)}"
        )
    check_integer("[profile] repeats", repeats, 1)
    check_integer("[profile] warm_up", warm_up, 0)
    rows = []
    for size in sizes:
        n, run = _prepared(comm, operation, check_integer("[profile] size", size, 1))
        times = np.zeros(warm_up + repeats)
        for i in range(len(times)):
            comm.barrier()
            start = time.perf_counter()
            run()
            times[i] = time.perf_counter() - start
        counted = comm.all_reduce(times, "max")[warm_up:]
        seconds = float(np.median(counted))
        rows.append(
            {
                "operation": operation,
                "ranks": comm.size,
                "backend": comm.name,
                "floats": n,
                "bytes": 4 * n,
                "seconds": seconds,
                "best": float(counted.min()),
                "bytes_per_second": 4 * n / seconds,
                "bus_bytes_per_second": 4 * n * FACTORS[operation](comm.size) / seconds,
            }
        )
    if show and comm.rank == 0:
        print(table(rows), flush=True)
    return rows


def _prepared(comm: Any, operation: str, size: int) -> tuple[int, Callable[[], Any]]:
    """(floats of the whole, a call of the operation)."""
    piece_size = -(-size // comm.size)
    flat, pieces, output = (
        np.ones(size, np.float32),
        *np.ones((2, comm.size, piece_size), np.float32),
    )
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(flat, out=output.reshape(-1)[:size]),
        "broadcast": lambda: comm.broadcast(flat),
        "all_gather": lambda: comm.all_gather(pieces[0], out=output),
        "all_to_all": lambda: comm.all_to_all(pieces, out=output),
        "reduce_scatter": lambda: comm.reduce_scatter(pieces.reshape(-1), out=output[0]),
    }
    return size if operation in ("all_reduce", "broadcast") else pieces.size, calls[operation]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of profile_communication() as text."""
    head = ""
    if rows:
        first = rows[0]
        head = f"{first['operation']} on {counted(first['ranks'])}, {first['backend']}"
    lines = [head, f"{'floats':>12} {'MB':>10} {'median us':>12} {'MB/s':>10} {'bus MB/s':>10}"]
    for r in rows:
        lines.append(
            f"{r['floats']:>12,} {r['bytes'] / 1e6:>10.3f} {1e6 * r['seconds']:>12.1f} "
            f"{r['bytes_per_second'] / 1e6:>10.1f} {r['bus_bytes_per_second'] / 1e6:>10.1f}"
        )
    return "\n".join(lines)
