"""Numbers that are wrong: what a training does when they are not finite, and how ranks find that
their weights differ.

Both decide only, by what all ranks know alike; taking a step back, leaving a batch out and ending
are the trainer's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..comm import Communicator
from ..core.fingerprint import signed
from ..errors import ConfigError, NumericsError

# in a row, to the same checkpoint; one more ends the training
MAX_SKIPS = 10
MAX_ROLLBACKS = 3


class NonFinite:
    """Policy for a loss or gradient that is NaN or infinite.

    The step was not applied in any case.

    policy, one of settings.recipes.NONFINITE:
        "stop": it ends. "skip": the step changes nothing and counts as one; more than MAX_SKIPS of
        them in a row end the training. "rollback": it goes back to its last checkpoint and leaves
        out the batch that did it; after more than MAX_ROLLBACKS
            times to the same checkpoint it ends.
    """

    def __init__(self, policy: str = "stop") -> None:
        self.policy = policy
        self._row = 0  # skipped steps since the last that was taken
        self._gone_back: Counter[int] = Counter()  # step of a checkpoint -> how often
        self._left_out: set[tuple[int, int]] = set()

    def handle_nonfinite(
        self,
        step: int,
        epoch: int,
        batch: int,
        checkpoint: int | None,
        quantity: str = "gradient",
        rate: float = 0.0,
    ) -> str:
        """Returns what the user is told of step `step` (from 1) on batch `batch` of `epoch`
        (from 0), whose `quantity` is not finite, where the training goes on as `policy` says.
        checkpoint: the step of the newest, None if there is none. Raises NumericsError: the
        training ends.
        """
        message = (
            f"[train] the {quantity} is not finite at step {step} (epoch {epoch + 1}, batch "
            f"{batch + 1}, rate {rate:g})"
        )
        cure = "lower --lr, or warm up"
        if quantity == "loss":
            cure += "; a label or index out of range also causes this"
        if self.policy == "stop":
            raise NumericsError(f"{message}; the step was not taken. {cure[0].upper()}{cure[1:]}")
        if self.policy == "skip":
            if self._row >= MAX_SKIPS:
                message += f", and the {self._row} steps before it were skipped for the same reason"
                raise NumericsError(f"{message}; {cure}")
            self._row += 1
            return f"{message}; the step is skipped ({self._row} of at most {MAX_SKIPS} in a row)"
        if checkpoint is None:
            raise NumericsError(
                f"{message} and there is no checkpoint to go back to; {cure}, or give "
                "--checkpoint-every"
            )
        if self._gone_back[checkpoint] >= MAX_ROLLBACKS:
            raise NumericsError(
                f"{message}; it went back to step {checkpoint} {MAX_ROLLBACKS} times already; "
                f"{cure}"
            )
        self._gone_back[checkpoint] += 1
        self._left_out.add((epoch, batch))
        times = f"{self._gone_back[checkpoint]} of at most {MAX_ROLLBACKS} times"
        return f"{message}; going back to step {checkpoint} and leaving this batch out ({times})"

    def fine(self) -> None:
        """A step was taken."""
        self._row = 0

    def leaves_out(self, epoch: int, batch: int) -> bool:
        """Returns whether this batch is not to be used, as it led to a rollback."""
        return (epoch, batch) in self._left_out

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it, as JSON values."""
        return {
            "row": self._row,
            "gone_back": sorted([step, count] for step, count in self._gone_back.items()),
            "left_out": sorted(list(cursor) for cursor in self._left_out),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse, for a training that is resumed.

        Not after a rollback: the batch would come back. Raises ConfigError: the state is none of
        this class; nothing was changed.
        """
        try:
            row = int(state["row"])
            gone_back = Counter({int(step): int(count) for step, count in state["gone_back"]})
            left_out = {(int(epoch), int(batch)) for epoch, batch in state["left_out"]}
        except (KeyError, TypeError, ValueError) as problem:
            raise ConfigError(
                f"[train] {state!r:.80} is no state of a policy for non-finite numbers"
            ) from problem
        self._row = row
        self._gone_back = gone_back
        self._left_out = left_out


def check_replicas(
    comm: Communicator, step: int, fingerprints: Mapping[str, int], group: int = 0
) -> None:
    """Compares what must be the same on all ranks of a group after step `step`; a collective
    call of `comm`. comm: the world, so that all ranks learn of it. fingerprints: what it is
    ("weights") -> its 64 bits on this rank. group: ranks with the same number are compared,
    which hold the same (with pipeline and tensor parallelism the replicas of one share of the
    model). Raises NumericsError: on all ranks, naming those that differ.
    """
    local_row = np.array([group, *(signed(value) for value in fingerprints.values())], np.int64)
    everyone = local_row[None] if comm.size == 1 else comm.all_gather(local_row)
    message = replicas_differ(step, list(fingerprints), everyone)
    if message:
        raise NumericsError(message).on_all_ranks()


def replicas_differ(step: int, names: Sequence[str], table: np.ndarray) -> str | None:
    """Returns a message about the first fingerprint that differs within a group, or None.

    table: int64 (ranks, 1 + names): the group of each rank, then its fingerprints.
    """
    if (table == table[0]).all():
        return None  # the usual case, which this comparison finds quickly
    for column, name in enumerate(names, 1):
        for group in np.unique(table[:, 0]):
            ranks = np.flatnonzero(table[:, 0] == group)
            values, counts = np.unique(table[ranks, column], return_counts=True)
            if len(values) == 1:
                continue
            # the ranks of each value, those of the most frequent value first
            sets = [ranks[table[ranks, column] == value].tolist() for value in values]
            sets.sort(key=lambda members: (-len(members), members))
            largest, *smaller_sets = sets
            other_ranks = sorted(sum(smaller_sets, []))
            if len(smaller_sets[0]) < len(largest):
                odd_ones = _describe_ranks(other_ranks)
                usual_ones = _describe_ranks(largest)
                difference = f"the {name} of {odd_ones} differ from those of {usual_ones}"
            elif len(largest) > 1:
                difference = (
                    f"the {name} of {' differ from those of '.join(map(_describe_ranks, sets))}"
                )
            else:
                difference = (
                    f"the {name} of {_describe_ranks(sorted(sum(sets, [])), ' and ')} differ"
                )
            return (
                f"[check] step {step}: {difference}; they must be equal: a memory or hardware "
                "error, or a write into parameters outside the optimizer. Go on from the last "
                "checkpoint (--resume auto)"
            )
    return None


def _describe_ranks(ranks: Sequence[int], last: str = ", ") -> str:
    """Returns ranks in words for a message, at most eight of them by number."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:8]))}, ...)"
    return f"ranks {', '.join(map(str, ranks[:-1]))}{last}{ranks[-1]}"
