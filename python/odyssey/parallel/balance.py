"""Moves shards from slow replicas of the model to fast ones, between steps: `rebalance`.

Shards are logical and added along one tree (plan.py), so who computes which changes no bit. Every
INTERVAL steps ranks tell each other how long they were busy, without waiting for others, and all
decide the same from the same numbers. A replica is a rank, or those of a pipeline or of shared
layers, which is as slow as the slowest of them.
"""

from __future__ import annotations

import functools

import numpy as np

from ..base import slot
from ..comm import Communicator
from .plan import runs

INTERVAL = 8  # steps from one comparison to the next
MIN_BUSY_S = 0.25  # that the busiest rank was busy, at least: shorter times are noise
MIN_SPEEDUP = 1.1  # how many times as fast steps must become, as estimated, for shards to move

# of each replica: seconds of a round, and shards of one, which threads share out
Costs = tuple[tuple[float, int], ...]


@functools.lru_cache(maxsize=64)
def counts(shards: int, costs: Costs) -> tuple[int, ...]:
    """How many shards each replica computes so that the last one is done as early as possible;
    pure.

    Each has one, if there are so many, for else nobody would see it become fast again. No costs:
    (), equal shares.
    """
    shard_counts = [int(shards >= len(costs))] * len(costs)
    for _ in range(shards - sum(shard_counts) if costs else 0):
        rank = min(
            range(len(costs)), key=lambda r: -(-(shard_counts[r] + 1) // costs[r][1]) * costs[r][0]
        )
        shard_counts[rank] += 1
    return tuple(shard_counts)


def span(shard_counts: tuple[int, ...], costs: Costs) -> float:
    """Seconds that the last replica takes."""
    return max(
        -(-n // threads) * seconds
        for n, (seconds, threads) in zip(shard_counts, costs, strict=True)
    )


class Balance:
    """How many shards each replica of `members` ranks computes, the same on all ranks.

    `threads`: of this rank.
    """

    def __init__(self, comm: Communicator, threads: int, members: int = 1) -> None:
        self.comm = comm
        self.threads = threads
        self.members = members
        self.costs: Costs = ()
        self._begin()

    def _begin(self) -> None:
        self._steps = -1
        self._rounds = 0
        self._since = 0

    def counts(self, shards: int) -> tuple[int, ...]:
        """Returns the shards of a step of so many, by replica; empty: equal shares."""
        return counts(shards, self.costs)

    def _shards_per_replica(self, shards: int) -> tuple[int, ...]:
        return self.counts(shards) or tuple(
            b - a for a, b in runs(shards, self.comm.size // self.members, 1)
        )

    def before_step(self, shards: int) -> str:
        """A step of so many shards begins: a collective call now and then.

        A line where shards move, else "".
        """
        message = ""
        if self._steps == 0:  # the step before recorded programs, or made room: it is not counted
            self._since = slot.busy_nanoseconds()
        elif self._steps > 0 and self._steps % INTERVAL == 0:
            message = self._compare(shards)
        self._steps += 1
        if self._steps > 0:
            self._rounds += -(
                -self._shards_per_replica(shards)[self.comm.rank // self.members] // self.threads
            )
        return message

    def _compare(self, shards: int) -> str:
        local_timing = (slot.busy_nanoseconds() - self._since) / 1e9, self._rounds, self.threads
        ranks = self.comm.all_gather(np.array(local_timing, np.float64)).tolist()
        everyone = [max(ranks[r : r + self.members]) for r in range(0, len(ranks), self.members)]
        if max(seconds for seconds, *_ in everyone) < MIN_BUSY_S:
            return ""
        measured = [max(seconds, 1e-9) / rounds for seconds, rounds, _ in everyone if rounds]
        if not measured:
            return ""
        previous_times = [seconds for seconds, _ in self.costs] or [
            sum(measured) / len(measured)
        ] * len(everyone)
        costs = tuple(
            (max(seconds, 1e-9) / rounds if rounds else previous_time, int(threads))
            for (seconds, rounds, threads), previous_time in zip(
                everyone, previous_times, strict=True
            )
        )
        old = self._shards_per_replica(shards)
        new = counts(shards, costs)
        self._begin()
        if span(new, costs) * MIN_SPEEDUP > span(old, costs):
            self._since = slot.busy_nanoseconds()
            self._steps = 0
            return ""
        self.costs = costs
        moved = [
            f"{self._name(r)} {b} instead of {a}"
            for r, (a, b) in enumerate(zip(old, new, strict=True))
            if a != b
        ]
        slow = max(range(len(costs)), key=lambda r: costs[r][0] / costs[r][1])
        times = (
            costs[slow][0] / costs[slow][1] / min(seconds / threads for seconds, threads in costs)
        )
        replica = self.comm.rank // self.members
        if old[replica] != new[replica]:
            slot.note(f"{new[replica]} shards instead of {old[replica]}")
        suffix = f", and {len(moved) - 8} more" * (len(moved) > 8)
        return (
            f"[rebalance] a shard takes {self._name(slow)} {times:.1f}x as long as the fastest: "
            f"shards of a step from now on: {', '.join(moved[:8])}{suffix}"
        )

    def _name(self, replica: int) -> str:
        first = replica * self.members
        return f"rank {first}" if self.members == 1 else f"ranks {first}-{first + self.members - 1}"
