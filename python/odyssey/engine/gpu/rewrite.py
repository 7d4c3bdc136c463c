"""A recorded program as GPUs run it: pairs of launches made one, and operands that a device can reach.

The records are those of the CPU (program.py). What is fused here pays on a GPU, where a launch costs as much as a small
op: a convolution with its ReLU and max-pool, and a loss with its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core import native as host
from ...core.arena import Arena
from ...core.gpu_native import library
from ...core.program import Range, Record, Slot, encode
from ...errors import ConfigError


def fuse(records: list[Record]) -> list[Record]:
    """The same program with fewer launches."""
    return _with_pool(_with_gradient(records))


def _users(records: Sequence[Record]) -> dict[int, list[int]]:
    users: dict[int, list[int]] = {}
    for i, r in enumerate(records):
        for a in r.args:
            if isinstance(a, Slot):
                users.setdefault(id(a), []).append(i)
    return users


def _with_pool(records: list[Record]) -> list[Record]:
    """A convolution with ReLU and the max-pool that alone reads it: one launch; the large output is never written."""
    users = _users(records)
    out: list[Record | None] = list(records)
    for i, r in enumerate(records):
        if r.op != "conv2d_forward" or r.dtype != "fp32" or r.args[-1] != 1:
            continue
        y = r.args[0]
        used = users.get(id(y), [])
        if len(used) != 2 or records[used[1]].op != "maxpool_forward" or records[used[1]].args[2] is not y:
            continue
        pool = records[used[1]]
        pooled, argmax, _, _, _, _, *window = pool.args
        _, x, w, b, _, *sizes, _ = r.args
        out[used[1]] = pool.changed(op="conv2d_relu_maxpool_forward", args=[pooled, argmax, x, w, b, *sizes, *window])
        out[i] = None
    return [r for r in out if r is not None]


def _with_gradient(records: list[Record]) -> list[Record]:
    """A cross-entropy whose sum is what is differentiated: loss and gradient in one launch."""
    users = _users(records)
    out: list[Record | None] = list(records)
    for i, r in enumerate(records):
        if r.op != "cross_entropy_forward":
            continue
        total, p, x, labels, *sizes = r.args
        backward = [k for k in users.get(id(p), []) if k != i]
        if len(backward) != 1 or records[backward[0]].op != "cross_entropy_backward":
            continue
        dx, seed, *_ = records[backward[0]].args
        seeded = [k for k in users.get(id(seed), []) if k != backward[0]] if isinstance(seed, Slot) else []
        if len(seeded) != 1:
            continue
        first = records[seeded[0]]
        scaled = first.op == "loss_scale"
        if not scaled and not (first.op == "fill" and first.args[1] == 1.0 and first.args[2] == 1):
            continue
        out[i] = r.changed(op="cross_entropy", args=[total, dx, x, labels, *sizes, int(scaled)])
        out[backward[0]] = out[seeded[0]] = None
    return [r for r in out if r is not None]


def check(records: Sequence[Record]) -> None:
    """Raises ConfigError for what no GPU can run."""
    for r in records:
        if r.layout == "rows" or r.op not in library().codes:
            raise ConfigError(f"[gpu] {r.op} ({r.layout}) has no form for GPUs; use --device cpu")


def written_once(records: Sequence[Record], arena: Arena) -> bool:
    """Whether every gradient comes from one op that adds up over shards, so that buffers need not be cleared."""
    seen: set[int] = set()
    for r in records:
        written = [a for a in r.args if isinstance(a, Range) and a.arena is arena and a.space == host.GRADS]
        if not written:
            continue
        if "sums" not in library().ops[r.op].traits:
            return False
        for a in written:
            at = a.offset + (4 * r.args[3] if r.op == "stats" else 0)
            if at in seen:
                return False
            seen.add(at)
    return True


def serialize(
    records: Sequence[Record], arena: Arena, constant: Callable[[Any], int], without_gradients: bool
) -> np.ndarray:
    """The numbers of placed records, (n, RECORD) int64.

    constant: the address on the device of memory that is neither the program's nor the arena's.
    without_gradients: gradient buffers hold only the statistics behind them.
    """
    lib = library()

    def operand(memory: Any) -> int:
        if isinstance(memory, Slot):
            return host.WORK << 56 | memory.offset
        if isinstance(memory, Range) and memory.arena is arena:
            shift = 4 * arena.size if without_gradients and memory.space == host.GRADS else 0
            return memory.space << 56 | memory.offset - shift
        return constant(memory)

    table = np.zeros((len(records), host.library().record), np.int64)
    for row, r in zip(table, records, strict=True):
        row[: len(r.args) + 1] = encode(lib, r.op, r.args, operand, r.layout, r.dtype)
    return table
