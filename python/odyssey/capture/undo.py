"""Puts objects back to what they held, after their code ran on trial.

A checkpoint holds values only. In the same process more can be put back: also files, objects and
caches that the code has opened or created since.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from . import values
from .capture import (
    COPIED_BYTES,
    GENERATORS,
    KEPT_SORTS,
    parts_of,
    put_reduced,
    size_of,
    walk_patiently,
)
from .walk import REDUCED, RESOURCE, SAMPLED, STATE, Entry, Picture

_COPIED_LENGTH = 1 << 20  # a container of at most so many items is copied
_COPIED_IN_ALL = 1 << 26  # bytes of values that are copied


_KINDS = _GENERATOR, _OTHER, _NUMBER = "generator", "other", "number"


class Change(NamedTuple):
    """The path of something that has changed, and its kind: "generator", "other" or "number"."""

    path: str
    kind: str


class Undo:
    """What some objects hold when it is created.

    Args:
        roots: the objects by name; None is skipped.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = roots
        self._original = walk_patiently(roots, (), {})
        # encoded values and their arrays by path, and the items of large containers
        self._copies: dict[str, tuple[Any, dict[str, np.ndarray]]] = {}
        self._items: dict[str, Any] = {}
        copied = 0
        for path, entry in self._original.entries.items():
            size = size_of(entry.value) if entry.sort in KEPT_SORTS else 0
            if entry.sort in KEPT_SORTS and size <= min(COPIED_BYTES, _COPIED_IN_ALL - copied):
                copied += size
                arrays: dict[str, np.ndarray] = {}
                node = values.encode(parts_of(entry), arrays, path)
                self._copies[path] = node, {name: np.array(one) for name, one in arrays.items()}
            elif entry.sort == SAMPLED and isinstance(entry.value, (list, dict, set)):
                if len(entry.value) <= _COPIED_LENGTH:
                    self._items[path] = type(entry.value).copy(entry.value)

    def changed(self) -> list[Change]:
        """Returns what has changed since: generators first, and numbers, such as counters, last."""
        current = self._look()
        original = self._original
        changes = [
            Change(path, _kind_of(entry))
            for path, entry in current.entries.items()
            if path not in original.entries or _differs(original.entries[path], entry)
        ]
        changes += [
            Change(path, _kind_of(entry))
            for path, entry in original.entries.items()
            if path not in current.entries and path not in current.aliases
        ]
        return sorted(changes, key=lambda change: _KINDS.index(change.kind))

    def put_back(self, generators: bool = True) -> None:
        """Puts everything back that has changed. What can't be put back stays as it is.

        generators: False leaves random number generators as they are.
        """
        current = self._look()
        original = self._original
        for path, entry in original.entries.items():
            latest = current.entries.get(path)
            is_same = latest is not None and not _differs(entry, latest)
            if (is_same and path not in self._items) or not (
                generators or _kind_of(entry) != _GENERATOR
            ):
                continue
            with contextlib.suppress(Exception):  # such as a class that refuses attributes
                self._restore(path, entry, latest)
        for path, entry in reversed(current.entries.items()):
            is_new = path not in original.entries and path not in original.aliases
            if is_new and entry.parent in original.entries:
                with contextlib.suppress(Exception):
                    entry.place.remove()

    def _restore(self, path: str, entry: Entry, current: Entry | None) -> None:
        """Puts one value or object back."""
        if path in self._items:
            _put_items(entry.value, self._items[path])
        elif path in self._copies:
            value = values.decode(*self._copies[path])
            if entry.sort == STATE:
                entry.place.set(value)
                return
            if entry.sort == REDUCED:
                put_reduced(entry, value)
            elif entry.place.kind == "contents":
                entry.place.set(value)
                return
            elif not values.is_immutable(entry.value):
                values.put_into(entry.value, value)
        if entry.sort != RESOURCE and (current is None or current.value is not entry.value):
            entry.place.set(entry.value)

    def _look(self) -> Picture:
        paths_by_id = {
            id(entry.value): path
            for path, entry in self._original.entries.items()
            if entry.sort not in KEPT_SORTS and not isinstance(entry.value, (type, type(None)))
        }
        return walk_patiently(self._roots, (), paths_by_id)


def _differs(original: Entry, current: Entry) -> bool:
    """Returns whether a value has changed, or another object is there."""
    if original.sort != current.sort or original.mark != current.mark:
        return True
    is_object = original.sort not in KEPT_SORTS and original.sort != RESOURCE
    return is_object and original.value is not current.value


def _kind_of(entry: Entry) -> str:
    """Returns the kind of a `Change`."""
    kind = values.kind_of(entry.value)
    if kind is not None and kind.name in GENERATORS:
        return _GENERATOR
    return _NUMBER if isinstance(entry.value, (int, float)) else _OTHER


def _put_items(container: Any, items: Any) -> None:
    """Gives a large container the items that it had."""
    if isinstance(container, list):
        container[:] = items
    else:
        container.clear()
        container.update(items)
