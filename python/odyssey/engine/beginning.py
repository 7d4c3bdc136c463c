"""Sums that begin with a record: the first to add to a parameter's gradient writes it instead,
where its kernel can (the trait `begins`), so that nobody sets that memory to zero before and
the kernel does not read it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

import numpy as np

from ..core import native
from ..core.arena import Arena
from ..core.program import Range, Record, Slot

Runs = list[tuple[int, int]]  # floats [begin, end)


def begin(
    programs: Sequence[list[Record]],
    tables: Sequence[np.ndarray],
    arena: Arena,
    locate: Callable[[int, int], int] | None,
    floats: int,
) -> Runs:
    """Marks records in the tables made from programs of one shard, the same but for sizes;
    returns the other runs of a gradient buffer (floats,), which are to be zero before.
    locate: as `serialize` was given it.
    """
    first, *other_beginnings = (_beginnings(records, arena) for records in programs)
    begun_runs = []
    for i, runs in first.items():
        if all(beginnings.get(i) == runs for beginnings in other_beginnings):
            for table in tables:
                table[i, 0] |= 1 << native.BEGINS
            begun_runs += [
                (offset if locate is None else locate(native.GRADS, offset), n)
                for offset, n in runs
            ]
    ends = [0, *(x for offset, n in sorted(begun_runs) for x in (offset, offset + n)), floats]
    return [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]


def _beginnings(records: list[Record], arena: Arena) -> dict[int, Runs]:
    """By the place of a record whose sums can begin with it: the gradients it adds to (offset in
    the arena and floats), whole parameters that no record before has touched.
    """
    sizes = {arena.offsets[name]: p.size for name, p in arena.named}
    starts = sorted(sizes)
    touched: set[int] = set()
    runs_by_record = {}
    for i, r in enumerate(records):
        offsets = [
            a.offset // 4 for a in r.args if isinstance(a, Range) and a.space == native.GRADS
        ]
        of = [starts[bisect.bisect_right(starts, a) - 1] for a in offsets if a < arena.size]
        if letters := next(
            (t.split(":")[1] for t in r.declared.traits if t.startswith("begins:")), ""
        ):
            counts = [math.prod(map(r.named.get, word)) for word in letters.split("+")]
            added = list(zip(r.args, counts, strict=False))
            # What nobody wants, as the gradient of no bias, is in memory that no other record uses.
            unread = [a for a, _ in added if isinstance(a, Slot) and a.first == a.last]
            runs = [
                (a.offset // 4, n)
                for a, n in added
                if isinstance(a, Range) and sizes.get(a.offset // 4) == n
            ]
            if (
                len(runs) + len(unread) == len(added)
                and len(runs) == len(set(of))
                and not touched & set(of)
            ):
                runs_by_record[i] = runs
        touched.update(of)
    return runs_by_record
