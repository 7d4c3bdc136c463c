"""Programs as text: the records of a pass through a model, one line each, with the layer and the
source line that they come from.

Two passes with equal lines compute the same. Ranks compare lines, and checkpoints compare hashes of
them. Messages show the first line that differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ..core import native
from ..core.program import Executor, Memory, OwnMemory, Range, Record, Slot
from ..nn import Module

PACKAGE = __name__.partition(".")[0]


class Listed:
    """The records that go through an executor, and where each forward op comes from.

    Attributes:
        records: in their order.
        where: number of a forward op -> its layer, and its source line in the user's code.
    """

    def __init__(self, records: list[Record] | None = None) -> None:
        """Takes the records of a recorder, or collects new ones (`listen`).

        The records of a recorder have their scratch memory among the arguments. Collected ones have
        not.
        """
        self.records: list[Record] = records or []
        self._with_scratch = records is not None
        self.where: dict[int, str] = {}
        self._value_ids: set[int] = set()  # memory of values; other blocks are constants
        self._keep_alive: list[Memory] = []  # Python would give the id of freed memory to another

    def listen(self, executor: Executor, layers: Sequence[str] = ()) -> None:
        """Collects the records that an executor gets from now on.

        `layers` are the titles of the layers that are being computed, the innermost last. The
        caller keeps the list up to date (`watched`).
        """
        alloc = executor.alloc
        emit = executor.emit
        close = executor.close

        def note_alloc(nbytes: int) -> Memory:
            memory = alloc(nbytes)
            self._value_ids.add(id(memory))
            self._keep_alive.append(memory)
            return memory

        def note_emit(op: str, *args: Any, layout: str = "lanes", dtype: str = "fp32") -> None:
            scope = executor.scope
            tag = scope.ops if scope.tag is None else scope.tag
            self.records.append(
                Record(
                    op,
                    list(args),
                    layout,
                    scope.device.slot,
                    tag,
                    scope.phase,
                    scope.recompute,
                    dtype,
                )
            )
            emit(op, *args, layout=layout, dtype=dtype)

        def note_close(device: Any) -> int:
            number = close(device)
            layer = f" in layer {layers[-1]}" if layers else ""
            self.where.setdefault(number, layer + _find_user_line())
            return number

        # type: ignore[method-assign]
        executor.alloc = note_alloc
        executor.emit = note_emit
        executor.close = note_close

    def lines(self) -> list[str]:
        """Returns one line for each record, which are the same for equal programs.

        Lines don't contain addresses. Values are numbered in the order of their first use.
        """
        value_numbers: dict[int, int] = {}  # by id of the memory
        return [self._format_record(record, value_numbers) for record in self.records]

    def _format_record(self, record: Record, value_numbers: dict[int, int]) -> str:
        """Returns a record as a line: the op, then its arguments."""
        words = [
            record.op,
            record.layout,
            record.dtype,
            f"{record.device}.{record.tag}.{record.phase}.{record.recompute:d}",
        ]
        # The size of scratch memory depends on the processor, so it is not in the line.
        scratch = record.declared.scratch if self._with_scratch else None
        for argument in (a for i, a in enumerate(record.args) if i != scratch):
            if isinstance(argument, Range):
                words.append(f"{argument.space}:{argument.offset}")
            elif self._is_constant(argument):
                words.append(hashlib.sha256(argument.array.tobytes()).hexdigest()[:16])
            elif isinstance(argument, (OwnMemory, Slot)):
                number = value_numbers.setdefault(id(argument), len(value_numbers))
                words.append(f"value {number} {getattr(argument, 'nbytes', '')}")
            elif isinstance(argument, float):
                words.append(f"{native.float_bits(argument):x} f")
            else:
                words.append(repr(argument))
        return " ".join(words)

    def _is_constant(self, argument: Any) -> bool:
        """Returns True for memory that no executor has allocated for a value."""
        return (
            isinstance(argument, OwnMemory)
            and id(argument) not in self._value_ids
            and hasattr(argument, "array")
        )


def _find_user_line() -> str:
    """Returns the line of the user's forward() that is running, as " at FILE:LINE".

    Returns an empty string if only code of odyssey is running. The search ends at
    `Programs._run_pass`, because the code that called the trainer isn't part of forward().
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "_run_pass":
        if frame.f_globals.get("__name__", "").partition(".")[0] != PACKAGE:
            return f" at {'/'.join(frame.f_code.co_filename.split(os.sep)[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def watched(model: Module) -> Iterator[list[str]]:
    """Yields a list of the layers of a model that are being computed, the innermost last.

    Within the `with` block forward() of each layer updates the list.
    """
    active_layers: list[str] = []
    # id of a module -> the module, and the forward() that was set on the object itself, if any
    changed: dict[int, tuple[Module, Any]] = {}

    def watch(module: Module, name: str) -> None:
        if id(module) in changed:
            return
        changed[id(module)] = module, vars(module).get("forward")
        forward = module.forward
        title = f"{name} ({type(module).__name__})" if name else type(module).__name__

        def noting_forward(*args: Any, **kwargs: Any) -> Any:
            active_layers.append(title)
            try:
                return forward(*args, **kwargs)
            finally:
                active_layers.pop()

        vars(module)["forward"] = noting_forward
        for child, inner in module.named_children():
            watch(inner, f"{name}.{child}" if name else child)

    try:
        watch(model, "")
        yield active_layers
    finally:
        for module, own_forward in changed.values():
            vars(module).pop("forward")
            if own_forward is not None:
                vars(module)["forward"] = own_forward


def said(records: Sequence[Record], index: int, places: dict[int, str]) -> str:
    """Returns record number `index` in words: the op, its numbers, its layer and source line.

    `places` are the layers and lines by number of the forward op (`Listed.where`). If the program
    has no such record, the result says so.
    """
    if index >= len(records):
        return f"no op: it has {len(records)}"
    record = records[index]
    numbers = [
        f"{argument:.9g}" if isinstance(argument, float) else str(argument)
        for argument in record.args
        if isinstance(argument, (int, float))
    ]
    precision = "" if record.dtype == "fp32" else f" in {record.dtype}"
    return f"{record.op}{precision} ({', '.join(numbers)}){places.get(record.tag, '')}"


def first_difference(a: Sequence[str], b: Sequence[str]) -> int | None:
    """Returns the number of the first line that differs between a and b, or None if none does."""
    return next((i for i in range(max(len(a), len(b))) if a[i : i + 1] != b[i : i + 1]), None)
