"""Programs as text: the records of a pass through a model, one line each, and which layer and
source line made them.

Passes of the same lines compute the same. Ranks compare lines, checkpoints hashes of them, messages
name the first.
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
        where: number of a forward op -> its layer and, where it is not odyssey's, its source line.
    """

    def __init__(self, records: list[Record] | None = None) -> None:
        """records: those of a recorder, which have their scratch memory among the arguments."""
        self.records: list[Record] = records or []
        self._with_scratch = records is not None
        self.where: dict[int, str] = {}
        self._value_ids: set[int] = set()  # memory of values; other blocks are constants
        self._keep_alive: list[Memory] = []  # so that no two have one id

    def listen(self, executor: Executor, layers: Sequence[str] = ()) -> None:
        """Writes down what an executor is given from now on; `layers`: those being computed, the
        innermost last.
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
            self.where.setdefault(number, (f" in layer {layers[-1]}" if layers else "") + _site())
            return number

        # type: ignore[method-assign]
        executor.alloc = note_alloc
        executor.emit = note_emit
        executor.close = note_close

    def lines(self) -> list[str]:
        """A line per record: the op, its numbers as they are, its memory by its use; the same
        for equal programs.
        """
        order: dict[int, int] = {}
        return [self._line(r, order) for r in self.records]

    def _line(self, r: Record, order: dict[int, int]) -> str:
        words = [r.op, r.layout, r.dtype, f"{r.device}.{r.tag}.{r.phase}.{r.recompute:d}"]
        scratch = r.declared.scratch if self._with_scratch else None  # its size is the processor's
        for a in (a for i, a in enumerate(r.args) if i != scratch):
            if isinstance(a, Range):
                words.append(f"{a.space}:{a.offset}")
            elif isinstance(a, OwnMemory) and id(a) not in self._value_ids and hasattr(a, "array"):
                words.append(hashlib.sha256(a.array.tobytes()).hexdigest()[:16])
            elif isinstance(a, (OwnMemory, Slot)):
                words.append(
                    f"value {order.setdefault(id(a), len(order))} {getattr(a, 'nbytes', '')}"
                )
            else:
                words.append(f"{native.float_bits(a):x} f" if isinstance(a, float) else repr(a))
        return " ".join(words)


def _site() -> str:
    """The line of the user's forward() that is running; nothing where only odyssey's own code
    is.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "_pass":
        if frame.f_globals.get("__name__", "").partition(".")[0] != PACKAGE:
            return f" at {'/'.join(frame.f_code.co_filename.split(os.sep)[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def watched(model: Module) -> Iterator[list[str]]:
    """While it lasts, the list holds the layers of a model that are being computed, the
    innermost last.
    """
    active_layers: list[str] = []
    # with the forward() that is the object's own, if it has one
    changed: dict[int, tuple[Module, Any]] = {}

    def watch(module: Module, name: str) -> None:
        if id(module) in changed:
            return
        changed[id(module)] = module, vars(module).get("forward")
        forward = module.forward
        title = f"{name} ({type(module).__name__})" if name else type(module).__name__

        def noted(*args: Any, **kwargs: Any) -> Any:
            active_layers.append(title)
            try:
                return forward(*args, **kwargs)
            finally:
                active_layers.pop()

        vars(module)["forward"] = noted
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
    """Record number `index` in words: the op, its numbers, its layer and line; or that there is
    none.
    """
    if index >= len(records):
        return f"no op: it has {len(records)}"
    r = records[index]
    numbers = [
        f"{a:.9g}" if isinstance(a, float) else str(a)
        for a in r.args
        if isinstance(a, (int, float))
    ]
    rounded = "" if r.dtype == "fp32" else f" in {r.dtype}"
    return f"{r.op}{rounded} ({', '.join(numbers)}){places.get(r.tag, '')}"


def first_difference(a: Sequence[str], b: Sequence[str]) -> int | None:
    """The number of the first line that is not the same in both; None: all are."""
    return next((i for i in range(max(len(a), len(b))) if a[i : i + 1] != b[i : i + 1]), None)
