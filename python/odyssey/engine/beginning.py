"""Sums that begin with a record: the first record that adds to a parameter's gradient writes it
instead, if its kernel can do that (the trait `begins`). Then nobody must set this memory to zero
before, and the kernel doesn't read it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any

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
    """Marks the records with which sums begin, and returns the runs that must be zero before.

    Args:
        programs: the programs of one shard, which differ only in sizes.
        tables: the serialized programs. Marked records get the bit native.BEGINS.
        arena: the parameters.
        locate: the function that `serialize` got.
        floats: the floats of a gradient buffer.

    Returns:
        The runs (start, end) of a gradient buffer with which no record begins.
    """
    first, *other_beginnings = (find_beginnings(records, arena) for records in programs)
    begun_runs = []  # (start in the buffer, floats)
    for i, runs in first.items():
        if all(beginnings.get(i) == runs for beginnings in other_beginnings):
            for table in tables:
                table[i, 0] |= 1 << native.BEGINS
            begun_runs += [
                (offset if locate is None else locate(native.GRADS, offset), n)
                for offset, n in runs
            ]
    cleared_runs = []
    position = 0
    for start, n in sorted(begun_runs):
        cleared_runs.append((position, start))
        position = start + n
    cleared_runs.append((position, floats))
    return [(start, end) for start, end in cleared_runs if start < end]


def find_beginnings(records: list[Record], arena: Arena) -> dict[int, Runs]:
    """Returns the records that sums can begin with, and the gradients that they write.

    The gradients are runs (offset in the arena, floats) by number of the record. They are of whole
    parameters that no earlier record adds to.
    """
    sizes = {arena.offsets[name]: p.size for name, p in arena.named}
    starts = sorted(sizes)
    touched: set[int] = set()  # parameters whose gradients earlier records use
    runs_by_record = {}
    for i, record in enumerate(records):
        offsets = [
            a.offset // 4 for a in record.args if isinstance(a, Range) and a.space == native.GRADS
        ]
        parameters = {
            starts[bisect.bisect_right(starts, offset) - 1]
            for offset in offsets
            if offset < arena.size
        }
        outputs = begun_outputs(record)
        if outputs:
            # An output that nobody reads, such as the gradient of a missing bias, has memory that
            # no other record uses.
            unread = [a for a, _ in outputs if isinstance(a, Slot) and a.first == a.last]
            runs = [
                (a.offset // 4, n)
                for a, n in outputs
                if isinstance(a, Range) and sizes.get(a.offset // 4) == n
            ]
            covers_outputs = len(runs) + len(unread) == len(outputs)
            if covers_outputs and len(runs) == len(parameters) and not touched & parameters:
                runs_by_record[i] = runs
        touched |= parameters
    return runs_by_record


def begun_outputs(record: Record) -> list[tuple[Any, int]]:
    """Returns the outputs that sums can begin with, and the floats of each; empty without the
    trait `begins`.

    For example "begins:OI+O": the first output has O * I floats, and the second one O.
    """
    traits = (trait.split(":") for trait in record.declared.traits if ":" in trait)
    size_names = next((names for trait, names in traits if trait == "begins"), "")
    if not size_names:
        return []
    counts = [math.prod(map(record.named.get, names)) for names in size_names.split("+")]
    return list(zip(record.args, counts, strict=False))
