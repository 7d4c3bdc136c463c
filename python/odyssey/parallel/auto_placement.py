"""Automatic placement: where to cut a model into stages, from measured costs.

It measures nothing itself.

The slowest stage sets the pace of a pipeline, so the cuts are those that make it fastest; among
these, those that send the fewest bytes. Both by dynamic programming over all contiguous cuts, so
there is no better answer: O(k n^2) for n ops and k stages. A pure function: ranks that are given
the same numbers make the same cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import ConfigError


class OpCost(NamedTuple):
    """One step of the model in forward order: a layer, or an op.

    Args:
        name: for the table.
        seconds: forward and backward together, of any number of samples, the same for all ops.
        parameter_bytes: of its parameters alone, without gradients.
        activation_bytes: per sample, kept from its forward to its backward.
        crossing_bytes: per sample, what goes to the next device in the forward pass if the model is
            cut after this op:
            every value made before that is used after. The gradients that come back are as many.
    """

    name: str
    seconds: float
    parameter_bytes: int = 0
    activation_bytes: int = 0
    crossing_bytes: int = 0


class StageCost(NamedTuple):
    """One stage of a plan: ops `first` to `last` - 1.

    Bytes as in `OpCost`; `memory_bytes` is what its device needs.
    """

    first: int
    last: int
    names: tuple[str, ...]
    seconds: float
    parameter_bytes: int
    memory_bytes: int
    sends: int  # bytes per sample; 0 for the last stage


class StageCuts(NamedTuple):
    """Where a model is cut: `cuts` are the first ops of stages 1, 2, ..."""

    parts: tuple[StageCost, ...]

    @property
    def cuts(self) -> tuple[int, ...]:
        """First op of each stage but the first."""
        return tuple(p.first for p in self.parts[1:])

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage: the pace of the pipeline."""
        return max(p.seconds for p in self.parts)

    def __str__(self) -> str:
        """A line for each stage: what is in it, its share of the time, its bytes."""
        total = sum(p.seconds for p in self.parts) or 1.0
        lines = []
        for s, p in enumerate(self.parts):
            names = (
                p.names
                if len(p.names) <= 6
                else (*p.names[:3], f"{len(p.names) - 5} more", *p.names[-2:])
            )
            line = f"stage {s}: {', '.join(names)}  {100 * p.seconds / total:.0f} % of the time, "
            line += f"{size(p.parameter_bytes)} parameters"
            if s + 1 < len(self.parts):
                line += f", sends {size(p.sends)} per sample"
            lines.append(line)
        return "\n".join(lines)


def cut(
    ops: Sequence[OpCost],
    stages: int,
    *,
    memory_limit: int | None = None,
    copies: float = 3,
    samples: int | Sequence[int] = 1,
) -> StageCuts:
    """The cuts that make the slowest stage fastest, among them those with the fewest bytes
    crossing, then the first.

    Args:
        ops: the model in forward order.
        stages: k, from 1 to the number of ops.
        memory_limit: bytes that a device has; None for any number.
        copies: numbers kept per parameter: 3 are parameter, gradient and momentum; 4 with Adam.
        samples: samples whose activations a stage keeps at a time (micro-batch size x micro-batches
            under way, see schedule.peak): one number, or one for each stage.

    Raises:
        ConfigError: the numbers do not fit, or no cut stays within the limit; the smallest limit
            that works is named.
    """
    n = len(ops)
    if not isinstance(stages, int) or not 1 <= stages <= n:
        raise ConfigError(f"[placement] {n} ops cannot be cut into {stages} stages; give 1 to {n}")
    counts = [samples] * stages if isinstance(samples, int) else list(samples)
    if len(counts) != stages:
        raise ConfigError(
            f"[placement] {len(counts)} numbers of samples for {stages} stages; give one, or one "
            "per stage"
        )
    for op in ops:
        if not op.seconds >= 0:
            raise ConfigError(
                f"[placement] {op.name} takes {op.seconds} s; a cost is a number of at least 0"
            )
    seconds, parameters, activations = (
        list(itertools.accumulate((getattr(op, name) for op in ops), initial=0))
        for name in ("seconds", "parameter_bytes", "activation_bytes")
    )

    def time(i: int, j: int, s: int) -> float:
        return seconds[j] - seconds[i]

    def memory(i: int, j: int, s: int) -> int:
        return round(
            copies * (parameters[j] - parameters[i]) + counts[s] * (activations[j] - activations[i])
        )

    def crossing(i: int, j: int, s: int) -> int:
        return ops[i - 1].crossing_bytes if i else 0

    def fits(i: int, j: int, s: int) -> bool:
        return memory_limit is None or memory(i, j, s) <= memory_limit

    best = _best(n, stages, time, max, fits)
    if best is None:
        least = _best(n, stages, memory, max, lambda i, j, s: True)
        need = max(memory(i, j, s) for s, (i, j) in enumerate(least or ()))
        raise ConfigError(
            f"[placement] no cut into {stages} stages stays within {memory_limit:,} bytes per "
            "device; it takes "
            f"{need:,}: give more stages, a smaller micro-batch, or checkpoint() some layers"
        )
    pace = max(time(i, j, s) for s, (i, j) in enumerate(best))
    best = _best(
        n,
        stages,
        crossing,
        lambda a, b: a + b,
        lambda i, j, s: fits(i, j, s) and time(i, j, s) <= pace,
    )
    parts = []
    for s, (i, j) in enumerate(best or ()):
        names = tuple(op.name for op in ops[i:j])
        sends = ops[j - 1].crossing_bytes if j < n else 0
        parts.append(
            StageCost(
                i, j, names, time(i, j, s), parameters[j] - parameters[i], memory(i, j, s), sends
            )
        )
    return StageCuts(tuple(parts))


def _best(
    n: int,
    k: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
    allowed: Callable[[int, int, int], bool],
) -> list[tuple[int, int]] | None:
    """The k spans of 0..n with the least cost: join (max or sum) over the stages of cost(first,
    last, stage).

    `join` must not decrease, so the best way to op j in s stages goes on with the best way to some
    op i in s - 1.
    """
    rows: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0, ())}]
    for s in range(k):
        row: dict[int, tuple[float, tuple[int, ...]]] = {}
        for j in range(s + 1, n - (k - s - 1) + 1):
            ways = (
                (join(total, cost(i, j, s)), (*cuts, i) if i else cuts)
                for i, (total, cuts) in rows[s].items()
                if i < j and allowed(i, j, s)
            )
            best = min(ways, default=None)
            if best is not None:
                row[j] = best
        rows.append(row)
    return list(itertools.pairwise((0, *rows[k][n][1], n))) if n in rows[k] else None


def size(n: float | None) -> str:
    """A number of bytes for people, in powers of 1000."""
    n = float(n or 0)
    for unit in ("B", "KB", "MB", "GB"):
        if n < 999.5 or unit == "GB":
            break
        n /= 1000
    return f"{n:.0f} {unit}" if unit == "B" or n >= 99.95 else f"{n:.1f} {unit}"
