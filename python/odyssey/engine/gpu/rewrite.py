"""A recorded program as GPUs run it: pairs of launches made one, and operands that a device can
reach.

The records are those of the CPU (program.py). What is fused here pays on a GPU, where a launch
costs as much as a small op: a convolution with its ReLU and max-pool, a padded input's gradient
without its frame, a loss with its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core import native as host
from ...core.arena import Arena
from ...core.gpu_native import library
from ...core.program import Range, Record, Slot, slot_users
from ...errors import ConfigError


def fuse(records: list[Record]) -> list[Record]:
    """The same program with fewer launches, by the ops of GPUs that stand for two (`of:` in
    mojo/kernels/op.mojo).
    """
    fused = {op.of: op for op in library().ops.values() if op.of}
    return _with_reader(_with_gradient(records, fused), fused)


def _with_reader(records: list[Record], fused: Mapping[tuple[str, ...], host.Op]) -> list[Record]:
    """An op and what alone reads it: a convolution with its ReLU and a max-pool, whose large
    output is not written; the gradient of a convolution's padded input and what cuts the
    frame off, which then is not computed.
    """
    users = slot_users(records)
    out: list[Record | None] = list(records)
    for i, r in enumerate(records):
        used = users.get(id(r.args[0]), [])
        op = fused.get((r.op, records[used[1]].op)) if len(used) == 2 and used[0] == i else None
        if op is None or ("relu" in r.named and (r.dtype != "fp32" or r.named["relu"] != 1)):
            continue
        reader = records[used[1]]
        operands = r.named | {f"{name} of y": value for name, value in reader.named.items()}
        operands |= zip(reader.declared.outputs, reader.args, strict=False)
        out[used[1]] = reader.changed(
            op=op.name, args=[operands[name] for name in op.arguments], dtype=r.dtype
        )
        out[i] = None
    return [r for r in out if r is not None]


def _with_gradient(records: list[Record], fused: Mapping[tuple[str, ...], host.Op]) -> list[Record]:
    """A loss whose sum is what is differentiated: loss and gradient in one launch."""
    users = slot_users(records)
    out: list[Record | None] = list(records)
    for i, r in enumerate(records):
        readers = (
            [k for k in users.get(id(r.args[1]), []) if k != i]
            if len(r.declared.outputs) > 1
            else []
        )
        op = fused.get((r.op, records[readers[0]].op)) if len(readers) == 1 else None
        if op is None or "scaled" not in op.sizes:
            continue
        gradient = records[readers[0]].named
        seed = gradient["dloss"]
        seeded = (
            [k for k in users.get(id(seed), []) if k != readers[0]]
            if isinstance(seed, Slot)
            else []
        )
        if len(seeded) != 1:
            continue
        first = records[seeded[0]]
        scaled = first.declared.outputs == ("scale",)
        if not scaled and not (
            first.declared.arguments == ("y", "a", "n") and first.args[1:] == [1.0, 1]
        ):
            continue
        operands = gradient | r.named | {"scaled": int(scaled)}
        out[i] = r.changed(op=op.name, args=[operands[name] for name in op.arguments])
        out[readers[0]] = out[seeded[0]] = None
    return [r for r in out if r is not None]


def check(records: Sequence[Record]) -> None:
    """Raises ConfigError for what no GPU can run."""
    for r in records:
        if r.layout == "rows" or r.op not in library().codes:
            raise ConfigError(f"[gpu] {r.op} ({r.layout}) has no form for GPUs; use --device cpu")


def written_once(records: Sequence[Record], arena: Arena) -> bool:
    """Returns whether every gradient comes from one op that adds up over shards: buffers need
    not be cleared.
    """
    seen_offsets: set[int] = set()
    for r in records:
        gradients = [
            a for a in r.args if isinstance(a, Range) and a.arena is arena and a.space == host.GRADS
        ]
        if not gradients:
            continue
        if "sums" not in library().ops[r.op].traits:
            return False
        for a in gradients:
            offset = a.offset + (4 * r.args[3] if r.op == "stats" else 0)
            if offset in seen_offsets:
                return False
            seen_offsets.add(offset)
    return True
