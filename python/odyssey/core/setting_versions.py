"""Two numbers that rise when a setting changes: of a model, and of what an update reads.

What was made from settings compares a number before it is used, so nothing is looked at in a step
in which nothing has changed.

A value that is set to what it is changes nothing. Attributes that forward() sets are noted for who
runs it (`Pass`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

_MISSING = object()
_PLAIN = (bool, int, float, str, type(None))
_numbers = itertools.count(1)  # never the same one twice, also where threads are ranks


class Number:
    """A number that rises with each change, in this process."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def rise(self) -> None:
        """Says that a setting has another value now."""
        self.value = next(_numbers)


models = Number()  # attributes of modules, which parameters are trained
updates = Number()  # an optimizer's settings, clipping


class Pass(threading.local):
    """The forward() that this thread runs, if it does: `written` has the attributes that it has
    set, (module, name).
    """

    written: list[tuple[Any, str]] | None = None


running = Pass()


@contextlib.contextmanager
def unnoticed() -> Iterator[list[tuple[Any, str]]]:
    """Within it, this thread's changes of modules raise no number; gives the list of what was
    set.
    """
    outer_written = running.written
    running.written = []
    try:
        yield running.written
    finally:
        running.written = outer_written


def is_unchanged(old: Any, new: Any) -> bool:
    """True if setting an attribute that is `old` to `new` changes nothing that a program
    could depend on.
    """
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, _PLAIN):
        return old == new or (old != old and new != new)
    if isinstance(old, tuple) and len(old) == len(new):
        return all(is_unchanged(a, b) for a, b in zip(old, new, strict=True))
    return False


def noted(owner: Any, name: str, after: Any = _MISSING) -> None:
    """Notes that an attribute of a module is about to be set, or deleted: call it before."""
    previous = vars(owner).get(name, getattr(type(owner), name, _MISSING))
    if is_unchanged(previous, after):
        return
    if running.written is not None:
        running.written.append((owner, name))
    else:
        models.rise()
