"""Runs of shards: how many shards a thread computes together, and which records of a program are
joined, which means that one call computes them for all of these shards (docs/kernels.md).

Neither changes a bit. Pure functions, except for the memory that `join` gives to records.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..core import native
from ..core.arena import Arena
from ..core.program import Range, Record, Slot
from ..parallel import plan as planning
from .beginning import Runs, begun_outputs, find_beginnings

#: Groups of samples in the shards of a run, at most: 256 rows. Their operands stay in the caches.
MAX_GROUPS = 16
#: The length of all runs, for tests. None: the function `length` decides.
forced_length: int | None = None


class Piece(NamedTuple):
    """Floats [start, end) of a whole gradient buffer, at float `place` of a shard's buffer."""

    start: int
    end: int
    place: int


class Joined(NamedTuple):
    """The joined records of a program, and the gradients that all other records add to.

    The gradients of other records are in a buffer of each shard, which has no other gradients.
    """

    records: tuple[int, ...]  # numbers of the joined records
    pieces: tuple[Piece, ...]  # of a shard's buffer, in order
    floats: int  # of a shard's buffer
    # Names of the parameters that several records add gradients to, so that these aren't joined.
    several_writers: tuple[str, ...]

    def locate(self, space: int, offset: int) -> int:
        """Returns where a float of the parameters or gradients is for the program's records.

        Args:
            space: the space of the operand.
            offset: the float, counted in a whole gradient buffer.
        """
        if space != native.GRADS:
            return offset
        i = bisect.bisect_right(self.pieces, (offset, math.inf)) - 1
        if i < 0 or offset >= self.pieces[i].end:
            return offset  # a gradient of joined records, which write to whole buffers
        return offset - self.pieces[i].start + self.pieces[i].place

    def mark(self, table: np.ndarray) -> None:
        """Sets the bit native.JOINED in the headers of a serialized program."""
        table[list(self.records), 0] |= 1 << native.JOINED


def can_join(record: Record, shards: int) -> bool:
    """Returns True if one call can compute a record for `shards` shards."""
    dtypes = next((t[7:] for t in record.declared.traits if t.startswith("joined:")), "")
    return (
        record.layout == "lanes"
        and record.dtype in dtypes.split("+")
        and record.named["G"] * shards <= MAX_GROUPS
    )


def length(
    records: Sequence[Record],
    floats: int,
    work_bytes: int,
    make_plan: Callable[[int], planning.Plan],
) -> int:
    """Returns how many shards a thread computes together at most; 0: shards run one by one.

    Runs pay if it takes longer to read the weights than the activations: if the weights of the
    records that can be joined are larger than the workspace of a shard. A run has at most so many
    shards that all of these records can be joined, that no thread has more to do than without runs,
    and that the workspaces need no more memory than is saved on gradient buffers. For example, with
    shards of 32 samples it has 8 shards, and 4 if two threads share 8.

    Args:
        records: the program of a shard.
        floats: the floats of a gradient buffer.
        work_bytes: the workspace of a shard.
        make_plan: returns this rank's plan for runs of a length.
    """
    if forced_length is not None:
        return forced_length
    plan = make_plan(1)
    first, end = plan.run
    writers = [r for r in records if r.declared.added and can_join(r, 1)]
    weights = sum(floats for r in writers for _, floats in begun_outputs(r))
    if end - first < 2 or 4 * weights <= work_bytes:
        return 0
    longest = min(MAX_GROUPS // max(r.named["G"] for r in writers), end - first)
    for n in (1 << i for i in reversed(range(1, longest.bit_length()))):
        longer = make_plan(n)
        added = (n * len(longer.threads) - len(plan.threads)) * work_bytes
        saved = (plan.buffers - longer.buffers) * 4 * floats
        if added <= saved and _longest(longer) <= _longest(plan):
            return n
    return 1


def describe(run_length: int, joined: Joined) -> str:
    """Returns a line about a program whose shards run together."""
    line = f"threads compute up to {run_length} shards together"
    if joined.several_writers:
        names = ", ".join(joined.several_writers)
        line += f", but add up these gradients shard by shard, as several layers use them: {names}"
    return line


def _longest(plan: planning.Plan) -> int:
    """Returns the shards of the thread that has most of them."""
    return max(sum(a.n for a in actions if a.kind == "run") for actions in plan.threads)


def join(
    records: list[Record], arena: Arena, floats: int, shards: int
) -> tuple[list[Record], Joined]:
    """Finds the records of a program that can be joined for runs of `shards` shards.

    A record that adds to gradients is joined if it is the only one that touches these parameters'
    gradients, and writes all of them. A weight that two layers share, or a layer that is called
    twice, has several writers, so each shard adds up its gradients first.

    Args:
        records: the program of a shard.
        arena: the parameters.
        floats: the floats of a whole gradient buffer.
        shards: the shards of a run, at most.

    Returns:
        The program, with scratch memory for runs in its joined records, and which these are.
    """
    beginnings = find_beginnings(records, arena)
    # (first float, number of the record) of the gradients that records touch, in order
    touched = sorted(
        (a.offset // 4, i)
        for i, r in enumerate(records)
        for a in r.args
        if isinstance(a, Range) and a.space == native.GRADS
    )
    joined = []
    summed: Runs = []  # (first float, floats) of the gradients that joined records write
    out = list(records)
    for i, record in enumerate(records):
        if not can_join(record, shards):
            continue
        if record.declared.added:
            runs = beginnings.get(i, [])
            # The gradient of a frozen weight is in the shard's workspace, and nobody reads it.
            is_frozen = not isinstance(record.args[0], Range)
            if is_frozen or not runs:
                continue
            if any(_others_touch(touched, i, start, start + n) for start, n in runs):
                continue
            summed += runs
        elif shards == 1:
            continue  # there are no other shards to read the weights for
        joined.append(i)
        out[i] = _with_scratch(record, shards)
    pieces = []
    position = 0  # in a shard's buffer. Each float has the same place in a vector as in a whole one
    ends = [0, *(x for start, n in sorted(summed) for x in (start, start + n)), floats]
    for start, end in zip(ends[::2], ends[1::2], strict=True):
        if start < end:
            position += (start - position) % planning.VECTOR
            pieces.append(Piece(start, end, position))
            position += end - start
    own_floats = position + -position % planning.VECTOR
    several_writers = tuple(
        name
        for name, p in arena.named
        if _has_several_writers(records, touched, arena.offsets[name], p.size)
    )
    return out, Joined(tuple(joined), tuple(pieces), own_floats, several_writers)


def _others_touch(touched: list[tuple[int, int]], record: int, start: int, end: int) -> bool:
    """Returns True if other records than `record` touch the gradients [start, end)."""
    first = bisect.bisect_left(touched, (start, 0))
    last = bisect.bisect_left(touched, (end, 0))
    return any(i != record for _, i in touched[first:last])


def _has_several_writers(
    records: list[Record], touched: list[tuple[int, int]], start: int, size: int
) -> bool:
    """Returns True if several records add to a gradient, and one of them could be joined alone."""
    first = bisect.bisect_left(touched, (start, 0))
    last = bisect.bisect_left(touched, (start + size, 0))
    writers = {i for _, i in touched[first:last]}
    return len(writers) > 1 and any(can_join(records[i], 1) for i in writers)


def _with_scratch(record: Record, shards: int) -> Record:
    """Returns a joined record with the scratch memory that it needs for `shards` shards."""
    op = record.declared
    assert op.scratch is not None
    sizes = record.args[len(op.outputs) + len(op.inputs) :]
    nbytes = native.library().scratch(op, sizes, record.layout, record.dtype, shards)
    args = [*record.args]
    args[op.scratch] = Slot(nbytes) if nbytes else None
    return record.changed(args=args)
