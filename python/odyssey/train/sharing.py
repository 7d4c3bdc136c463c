"""How a global batch is cut into shards that workers share, and what the user is told of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..checkpoints.trainable import Mode
from ..data.nested import Form
from ..errors import ConfigError
from ..parallel.plan import busy, default_shard_size, idle, shard_count

MANY_WORKERS = 64  # of a process; with few shards more of them are a slip rather than a wish


class BatchSharing:
    """Decides the shards of a batch and tells, once each, where workers are idle and where other
    places of ranks would send less.

    Args:
        runner: what runs the shards; has their size as `shard_size`.
        mode: how ranks take steps; says which workers share a batch.
        layout: where shards are computed; has the balance of `rebalance=True`.
        rows: rows that a sample of a form takes in kernels, alike on all ranks; None: the form is
            not known yet.
        say: tells the user a line.
        default_size: returns the samples per shard from (samples of the global batch, rows).
    """

    def __init__(
        self,
        runner: Any,
        mode: Mode,
        layout: Any,
        rows: Callable[[Form | None], int | None],
        say: Callable[[str], None],
        default_size: Callable[[int, int], int] = default_shard_size,
    ) -> None:
        self.runner = runner
        self.mode = mode
        self.layout = layout
        self.rows = rows
        self.say = say
        self.default_size = default_size
        self._idle_counted = False
        self._route_checked = False

    @property
    def shard_size(self) -> int | None:
        """Samples per shard; None as long as neither it nor the global batch is known."""
        return self.runner.shard_size

    @shard_size.setter
    def shard_size(self, size: int | None) -> None:
        self.runner.shard_size = size

    def share_out(self, samples: int, batch_size: int, form: Form | None = None) -> None:
        """Decides the shards once the global batch is known, and tells if there are too few for
        all workers.

        Args:
            samples: of this batch.
            batch_size: of the loader; 0 if it is not known.
            form: of a sample.

        Raises ConfigError: there are far more workers than shards.
        """
        if self.shard_size is None:
            rows = self.rows(form)
            if rows is None:
                return  # the first batch says it
            self.shard_size = self.default_size(batch_size or samples, rows)
        if not self._idle_counted:
            self._idle_counted = True
            self._count_idle(samples)

    @contextlib.contextmanager
    def for_evaluation(self) -> Iterator[None]:
        """Leaves the shard size to the first training batch, if an evaluation comes before it.

        The evaluation in the block then has the default for its own batches.
        """
        is_decided = self.shard_size is not None
        idle_counted = self._idle_counted
        try:
            yield
        finally:
            if not is_decided:
                self.shard_size = None
                self._idle_counted = idle_counted

    def _count_idle(self, samples: int) -> None:
        workers, parts = self.mode.shared_out(samples)
        size = self.shard_size
        without = sum(idle(workers, part, size) for part in parts)
        if not without:
            return
        shards = sum(shard_count(part, size) for part in parts)
        if workers > max(MANY_WORKERS, 4 * shards):
            raise ConfigError(
                f"[train] num_gpus is {workers}, and a batch of {samples} samples has {shards} "
                f"shards of at most {size}: more workers have no work; give at most {shards}, or a "
                "smaller shard_size"
            ).on_all_ranks()
        all_workers = workers * len(parts)
        self.say(
            f"{all_workers} workers but {shards} shard{'s' * (shards > 1)} (global batch "
            f"{samples}, shard size {size}): {without} {'is' if without == 1 else 'are'} idle; "
            + busy(all_workers, workers, min(parts))
        )

    def check_route(self, reductions: Sequence[Any], samples: int) -> None:
        """Tells, after the first step, if other shards or places of ranks would send much less
        between machines.
        """
        if self._route_checked:
            return
        self._route_checked = True
        size = self.mode.comm.size
        reduction = next(
            (r for r in reductions if r.comm.size == size and hasattr(r, "advice")), None
        )
        line = None if reduction is None else reduction.advice(samples, self.shard_size)
        if line:
            self.say(line)

    def move_shards(self, samples: int, step: int) -> None:
        """Moves shards to other ranks where `rebalance=True` finds it worth it.

        Args:
            samples: of the step that begins.
            step: its number, from 1.
        """
        balance = self.layout.balance
        if balance is None:
            return
        line = balance.before_step(shard_count(samples, self.shard_size))
        if line:
            self.say(f"{line} (step {step})")

    def moved(self, samples: int) -> tuple[int, ...]:
        """Returns how many shards of a step each rank computes, once some have moved; else none."""
        balance = self.layout.balance
        if not balance or not samples:
            return ()
        return balance.counts(shard_count(samples, self.shard_size))
