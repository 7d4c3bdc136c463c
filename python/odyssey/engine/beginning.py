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
    first, *others = (_beginnings(records, arena) for records in programs)
    begun = []
    for i, runs in first.items():
        if all(other.get(i) == runs for other in others):
            for table in tables:
                table[i, 0] |= 1 << native.BEGINS
            begun += [(at if locate is None else locate(native.GRADS, at), n) for at, n in runs]
    ends = [0, *(x for at, n in sorted(begun) for x in (at, at + n)), floats]
    return [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]


def _beginnings(records: list[Record], arena: Arena) -> dict[int, Runs]:
    """By the place of a record whose sums can begin with it: the gradients it adds to (offset in
    the arena and floats), whole parameters that no record before has touched.
    """
    sizes = {arena.offsets[name]: p.size for name, p in arena.named}
    starts = sorted(sizes)
    touched: set[int] = set()
    found = {}
    for i, r in enumerate(records):
        at = [a.offset // 4 for a in r.args if isinstance(a, Range) and a.space == native.GRADS]
        of = [starts[bisect.bisect_right(starts, a) - 1] for a in at if a < arena.size]
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
                found[i] = runs
        touched.update(of)
    return found
