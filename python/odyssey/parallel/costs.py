"""Costs of a model's ops here: measures a recorded program record by record, for auto_placement.py.

Rank 0 measures and tells the others, so all make the same cuts. Times differ between runs: where
the cut changes bits (a compression, additions in an order of the layout's), bytes are counted
instead.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable

import numpy as np

from ..comm import Communicator
from ..core import native
from ..core.arena import Arena
from ..core.program import Record, Slot, plan_memory, serialize
from .auto_placement import OpCost, StageCuts, cut
from .buckets import touched
from .stages import together

REPEATS = 5  # the fastest counts


def seconds(records: list[Record], arena: Arena, samples: int) -> np.ndarray:
    """Seconds of each record on `samples` zeros, float64 (len(records),)."""
    lib = native.library()
    keep: list[object] = []
    work = native.aligned(plan_memory(records), np.uint8)
    table = serialize(records, arena, keep)
    grads = native.aligned(arena.size + lib.stats)
    gathered = [r for r in records if r.op in ("input", "array")]  # y; G, F, and tokens of a sample
    features = max(
        (int(r.args[2]) * (int(r.args[3]) if r.op == "array" else 1) for r in gathered), default=1
    )
    data = np.zeros((1, features), np.float32)
    arrays = np.full(len(gathered), data.ctypes.data, np.int64)
    rows = np.zeros(samples, np.int64)
    scale = np.ones(features, np.float32)
    shift = np.zeros(features, np.float32)
    memory = {"images": data, "arrays": arrays, "rows": rows, "scale": scale, "shift": shift}
    c = native.Context(
        valid=samples, loss_scale=1.0, **{name: a.ctypes.data for name, a in memory.items()}
    )
    bases = np.array(
        [0, arena.address(native.PARAMS), grads.ctypes.data, work.ctypes.data], np.int64
    )
    best = np.full(len(records), np.inf)
    for _ in range(REPEATS):
        for i in range(len(records)):
            started = time.perf_counter()
            lib.run(table.ctypes.data + i * table.strides[0], 1, c, bases.ctypes.data)
            best[i] = min(best[i], time.perf_counter() - started)
    return best


def ops(
    records: list[Record], arena: Arena, samples: int, costs: np.ndarray
) -> tuple[list[int], list[OpCost]]:
    """The forward ops of a program with their costs: the first tag of each, and what `cut` wants
    to know.

    Backward records count for the op they belong to; what fusion has taken away, for the op before
    it. A parameter of several ops counts for the first, and is sent between them as a value is: as
    its gradient, for each shard.
    """
    forward = [r for r in records if r.phase == "forward" and r.op not in ("array", "stats")]
    tags = sorted({r.tag for r in forward} - together(records))
    op_index = {id(r): max(bisect.bisect_right(tags, r.tag) - 1, 0) for r in records}
    n = len(tags)
    time_of = np.zeros(n)
    weights = [0] * n
    activation_bytes = np.zeros(n)
    crossing = np.zeros(n)
    names: list[str] = [""] * n
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    # of parameters; and of slots
    nbytes = {arena.offsets[name]: 4 * p.size for name, p in arena.named}
    saved: set[int] = set()  # forward values that the backward pass reads
    name_of = {o: name.rsplit(".", 1)[0] for name, o in arena.offsets.items()}
    for r, cost in zip(records, costs, strict=True):
        i = op_index[id(r)]
        time_of[i] += cost
        offsets = touched(r, arena, native.PARAMS)
        if r.phase == "forward" and not names[i] and r.op not in ("array", "stats"):
            names[i] = name_of[offsets[0]] if offsets else r.op.removesuffix("_forward")
        slots = {} if r.op == "array" else {id(a): a.nbytes for a in r.args if isinstance(a, Slot)}
        nbytes |= slots
        for a in (*slots, *offsets):
            if r.phase == "forward" or a in offsets:
                first.setdefault(a, i)
                last[a] = max(last.get(a, i), i)
            elif a in first:
                saved.update({a} & slots.keys())
                last[a] = max(last[a], i)
    for a, i in first.items():
        activation_bytes[i] += nbytes[a] / samples if a in saved else 0
        weights[i] += nbytes[a] if a in name_of else 0
        for j in range(i, last[a]):
            crossing[j] += nbytes[a] / samples
    names = [name or f"op {tag}" for name, tag in zip(names, tags, strict=True)]
    return tags, [
        OpCost(names[i], time_of[i], weights[i], round(activation_bytes[i]), round(crossing[i]))
        for i in range(n)
    ]


def stages(
    records: list[Record],
    arena: Arena,
    samples: int,
    count: int,
    comm: Communicator,
    *,
    measured: bool,
) -> tuple[Callable[[Record], int], StageCuts]:
    """Cuts a program into `count` stages by cost; a function from records to stages, and the plan.

    measured: by time on this machine; else by bytes that are touched, which are the same in every
    run.

    Raises ConfigError: there are fewer ops than stages.
    """
    if measured:
        costs = seconds(records, arena, samples) if comm.rank == 0 else np.zeros(len(records))
        comm.broadcast(costs, 0)
    else:
        size_of = {arena.offsets[name]: 4 * p.size for name, p in arena.named}

        def nbytes(r: Record) -> float:
            slots = sum(a.nbytes for a in r.args if isinstance(a, Slot))
            return slots + samples * sum(size_of[o] for o in touched(r, arena, native.PARAMS))

        costs = np.array([nbytes(r) for r in records], float)
    tags, op_costs = ops(records, arena, samples, costs)
    plan = cut(op_costs, count)
    firsts = [tags[c] for c in plan.cuts]
    return (lambda r: bisect.bisect_right(firsts, r.tag)), plan
