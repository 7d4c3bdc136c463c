"""Timeline of this process: spans of its phases, waits and transfers, and every record of a
program as it ran.

A `Timeline` that is open hears of phases and waits from the status slot (base/slot.py), of
transfers from reductions, and has the library time its records (executor.mojo, `Times`). While none
is open, nothing of this is called. It writes two files: PATH.jsonl, a header and lists of rows
[track, name, start, end, about], and PATH.ops, int64: [program, thread, count] and so many of
[first sample << 24 | record, start, end]. Times are ns of this process's monotonic clock;
view/trace.py makes one picture of those of all ranks.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..base import slot
from ..core import native

# records that are written; later ones are left out (a page of them is slow to look at)
MAX_RECORDS = 500_000
FLUSH_NS = 500_000_000
BITS = 24
SUM = (1 << BITS) - 1  # in the place of a record: additions of gradients
HEAD = 2  # numbers before the entries of a thread

#: What products multiply and add, by the sizes of their records; `G` counts groups of samples.
PRODUCTS: dict[str, Callable[[dict[str, int]], int]] = {
    "conv2d": lambda s: (
        s["G"]
        * s["C"]
        * s["K"]
        * s["R"]
        * s["T"]
        * _places(s["H"], "R", s)
        * _places(s["W"], "T", s)
    ),
    "linear": lambda s: s["G"] * s.get("I", s.get("columns", 0)) * s["O"],
    "matmul": lambda s: s["outer"] * s["inner"] * s["M"] * s["N"] * s["K"],
    "attention": lambda s: 2 * s["N"] * s["H"] * s["T"] * s["S"] * s["D"],
}


def _places(size: int, kernel: str, s: dict[str, int]) -> int:
    """Where a kernel is put in one direction."""
    return (size - s[kernel]) // s["S"] + 1


class OpSummary(NamedTuple):
    """A record of a program, as people know it. bytes: of what it reads and writes, without
    scratch memory and data.
    """

    name: str
    layer: str
    flops: float
    bytes: int
    backward: bool


class Timeline:
    """See the head of this file.

    Args:
        path: without the ends of the files; None writes nothing.
        about: for the header. names: layers by where their parameters begin in the arena, in
            floats.
        totals: whether to add up what each op took (`ops`).
    """

    def __init__(
        self,
        path: Path | None,
        about: dict[str, Any],
        names: dict[int, str] | None = None,
        totals: bool = False,
    ) -> None:
        self.path = path
        self._names = names or {}
        self._starts = np.array(sorted(self._names), np.int64)
        self._rows: list[Sequence[Any]] = []
        self._chunks: list[tuple[int, int, np.ndarray]] = []
        self._programs: dict[tuple[int, int], list[tuple[bytes, int]]] = {}
        self._described: list[list[OpSummary]] = []
        self._count = 0
        self._thread = threading.get_ident()
        self._phase = slot.read_current().phase, time.monotonic_ns()
        self._flushed = self._phase[1]
        # by threads and entries
        self._rooms: dict[tuple[int, int], tuple[list[np.ndarray], int]] = {}
        self.totals: dict[OpSummary, list[int]] | None = {} if totals else None  # calls, ns
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".jsonl").write_text(json.dumps(about) + "\n")
            path.with_suffix(".ops").write_bytes(b"")

    def open(self) -> None:
        """From here on it hears of everything. One is open at a time."""
        slot.listener = self
        native.library().timeline = self

    def close(self) -> None:
        """The end, with what is under way."""
        if slot.listener is self:
            slot.listener = native.library().timeline = None
            self.phase("", time.monotonic_ns())
            self.flush()

    # --- what is heard ---

    def span(self, track: str, name: str, start_ns: int, end_ns: int, **about: Any) -> None:
        """Something on a track: "steps", "main", "wire", or a thread's name."""
        if self.path is not None:
            self._rows.append((track, name, start_ns, end_ns, about))

    def phase(self, name: str, time_ns: int) -> None:
        previous, start = self._phase
        self._phase = name, time_ns
        self.span("main", previous, start, time_ns)

    def waited(self, text: str, start_ns: int, end_ns: int) -> None:
        if self._on_own_thread():
            self.span("main", "wait", start_ns, end_ns, **{"for": text})

    def _on_own_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def step(self, lib: native.Library, step: native.Step) -> int:
        """Runs a step of the library with its records timed."""
        shards = -(-step.samples // step.shard_size)  # or fewer, on one of several ranks
        step.context.times = self._room(step.threads, shards * (step.records + 1))
        try:
            return lib.run_step(step)
        finally:
            step.context.times = 0
            self._collect(self._program(lib, step.program, step.records))

    def run(
        self, lib: native.Library, program: int, records: int, context: native.Context, bases: int
    ) -> int:
        """Runs records of the library: timed, or under the name that their context has."""
        start = time.monotonic_ns()
        if context.what is not None or not self._on_own_thread():
            stopped = lib.run_records(program, records, context, bases)
            thread = "main" if self._on_own_thread() else threading.current_thread().name
            self.span(thread, context.what or "ops", start, time.monotonic_ns())
            return stopped
        context.times = self._room(1, records)
        try:
            return lib.run_records(program, records, context, bases)
        finally:
            context.times = 0
            self._collect(self._program(lib, program, records))

    def _room(self, threads: int, entries: int) -> int:
        if (threads, entries) not in self._rooms:  # the system gives memory that is written to
            areas = np.zeros((threads, HEAD + 3 * entries), np.int64)
            areas[:, 1] = entries
            self._rooms[threads, entries] = list(areas), areas.ctypes.data
        self._areas, address = self._rooms[threads, entries]
        for area in self._areas:
            area[0] = 0
        return address

    def _collect(self, program: int) -> None:
        for thread, area in enumerate(self._areas):
            n = int(area[0])
            if n and (self._count < MAX_RECORDS or self.totals is not None):
                self._count += n
                self._chunks.append((program, thread, area[HEAD : HEAD + 3 * n].copy()))

    def _program(self, lib: native.Library, address: int, records: int) -> int:
        """The number of a program: of those at its address, the one with these very records."""
        content = native.memory(address, 8 * lib.record * records).tobytes()
        programs = self._programs.setdefault((address, records), [])
        for other_content, number in programs:
            if other_content == content:
                return number
        table = np.frombuffer(content, np.int64).reshape(records, lib.record)
        described = [self._op(lib, row.tolist()) for row in table]
        number = len(self._described)
        programs.append((content, number))
        self._described.append(described)
        self._rows.append(("program", str(number), 0, 0, {"ops": [list(op) for op in described]}))
        return number

    def _op(self, lib: native.Library, row: list[int]) -> OpSummary:
        op = lib.named[row[0] & 0xFFFF]
        operands = row[1 : 1 + len(op.outputs) + len(op.inputs)]
        s = dict(zip(op.sizes, row[1 + len(operands) :], strict=False))
        group = 1 if row[0] >> native.ROWS & 1 else lib.lanes
        kind = op.name.partition("_")[0]
        products = PRODUCTS[kind](s) if kind in PRODUCTS and "bias" not in op.name else 0
        flops = (
            2.0
            * products
            * (group if "G" in s else 1)
            * (2.5 if op.name.endswith("_backward") else 1)
        )
        layer = ""
        for place in operands:
            if place >> 56 in (native.PARAMS, native.GRADS) and len(self._starts):
                index = (
                    int(np.searchsorted(self._starts, (place & (1 << 56) - 1) // 4, "right")) - 1
                )
                layer = layer or self._names[int(self._starts[max(index, 0)])]
        return OpSummary(op.name, layer, flops, row[-1] >> 1, bool(row[-1] & 1))

    def due(self) -> None:
        """Between two steps: writes what has gathered, now and then."""
        if time.monotonic_ns() - self._flushed > FLUSH_NS:
            self.flush()

    def flush(self) -> None:
        """Writes what has gathered, and adds it up."""
        self._flushed = time.monotonic_ns()
        rows = self._rows
        self._rows = []
        chunks = self._chunks
        self._chunks = []
        if self.totals is not None:
            self._add_up(chunks)
        if self.path is None:
            return
        with open(self.path.with_suffix(".jsonl"), "a") as file:
            file.write(json.dumps(rows) + "\n" if rows else "")
        with open(self.path.with_suffix(".ops"), "ab") as ops:
            size = ops.tell()
            parts = []
            for program, thread, entries in chunks:
                if size < 24 * MAX_RECORDS:
                    parts.append(
                        struct.pack("=3q", program, thread, len(entries) // 3) + entries.tobytes()
                    )
                    size += len(parts[-1])
            ops.write(b"".join(parts))

    def _add_up(self, chunks: list[tuple[int, int, np.ndarray]]) -> None:
        assert self.totals is not None
        of: dict[int, list[np.ndarray]] = {}
        for program, _, entries in chunks:
            of.setdefault(program, []).append(entries.reshape(-1, 3))
        for program, parts in of.items():
            entries = np.concatenate(parts)
            ops = self._described[program]
            record = np.minimum(entries[:, 0] & SUM, len(ops))
            calls = np.bincount(record, minlength=len(ops) + 1)
            spent = np.bincount(record, entries[:, 2] - entries[:, 1], len(ops) + 1)
            for op, n, ns in zip(
                [*ops, OpSummary("sum of gradients", "", 0.0, 0, True)], calls, spent, strict=True
            ):
                if n:
                    total = self.totals.setdefault(op, [0, 0])
                    total[0] = total[0] + int(n)
                    total[1] = total[1] + int(ns)

    def table(self, limit: int = 12) -> str:
        """The most expensive ops: their share of the threads' time, calls, us, GFLOP/s and GB/s."""
        self.flush()
        totals = sorted((self.totals or {}).items(), key=lambda item: -item[1][1])
        total_ns = sum(ns for _, (_, ns) in totals) or 1
        lines = [
            f"{'op':<28} {'layer':<20} {'share':>7} {'calls':>8} {'us':>10} {'GFLOP/s':>9} "
            f"{'MB':>9} {'GB/s':>7}"
        ]
        for op, (n, ns) in totals[:limit]:
            rate = f"{op.flops * n / ns:>9.1f}" if op.flops else f"{'':>9}"
            moved = f"{op.bytes / 1e6:>9.3f} {op.bytes * n / ns:>7.1f}" if op.bytes else f"{'':>17}"
            name = f"{op.name[:28]:<28} {op.layer[:20]:<20}"
            lines.append(
                f"{name} {ns / total_ns:>7.1%} {n:>8,} {ns / n / 1e3:>10.1f} {rate} {moved}"
            )
        return "\n".join(line.rstrip() for line in lines)
