"""Containers of objects: lists, dicts and tuples that hold more than values.

A step may put objects that the program has built into a new list, dict or tuple, or into another
order. A checkpoint holds the paths of the objects, so a resumed run can build the container from
its own ones.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import values
from .edges import register_walkable
from .walk import OPAQUE, REFERENCE, RESOURCE, VALUE, Entry, Picture, built_path

_EMPTY: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
}


class Unfilled:
    """An item of a container that was created, until an object or value is put there."""


register_walkable(Unfilled)


def is_list_or_dict(entry: Entry) -> bool:
    """Tells whether an entry is a list or dict of objects, of no class that inherits from it."""
    return entry.sort == REFERENCE and type(entry.value) in _EMPTY.values()


def is_tuple(entry: Entry) -> bool:
    """Tells whether an entry is a tuple of objects."""
    kind = type(entry.value)
    return entry.sort == REFERENCE and (kind is tuple or values.is_named_tuple(entry.value))


def keys_of(container: Any) -> list[Any] | None:
    """Returns the keys of a list or dict as JSON has them; None if one can't be written."""
    if isinstance(container, list):
        return list(range(len(container)))
    arrays: dict[str, np.ndarray] = {}
    if not all(map(values.is_value, container)):
        return None
    keys = [values.encode(key, arrays, "key") for key in container]
    return None if arrays else keys


def build(kind: str, keys: list[Any]) -> Any:
    """Returns a list or dict whose items are unfilled."""
    if kind == "list":
        return [Unfilled() for _ in keys]
    container = _EMPTY[kind]()
    for key in keys:
        container[values.decode(key, {})] = Unfilled()
    return container


def paths_of_items(picture: Picture, entry: Entry) -> list[str]:
    """Returns the path by which each item of a tuple was met first."""
    paths = [f"{entry.path}[{number}]" for number in range(len(entry.value))]
    return [picture.aliases.get(path) or path for path in paths]


def signature(picture: Picture, entry: Entry) -> list[str]:
    """Returns what tells whether a tuple holds other objects or values than another one."""
    parts = []
    for path in paths_of_items(picture, entry):
        item = picture.entries.get(path)
        is_fixed = item is not None and item.sort == VALUE and values.is_immutable(item.value)
        place = built_path(path)
        parts.append(f"{place} {item.mark}" if item is not None and is_fixed else place)
    return parts


def parts_of(
    picture: Picture,
    entry: Entry,
    is_expected: Callable[[Entry], bool],
    arrays: dict[str, np.ndarray],
) -> list[Any] | None:
    """Returns the items of a tuple as JSON has them: paths of objects, or values. None if one is
    an object that a resumed run does not have.
    """
    parts: list[Any] = []
    for number, path in enumerate(paths_of_items(picture, entry)):
        item = picture.entries.get(path)
        own_path = f"{entry.path}[{number}]"
        if item is None:
            if path not in picture.hosts:
                return None
            parts.append(["path", path])
        elif values.is_tracked(item.value) and is_expected(item):
            parts.append(["path", path])
        elif path == own_path and item.sort == VALUE:
            parts.append(["value", values.encode(item.value, arrays, own_path)])
        elif item.sort in (RESOURCE, OPAQUE) or (path == own_path and not is_expected(item)):
            return None
        else:
            parts.append(["path", path])
    return parts


def build_tuple(
    kind: str, parts: list[Any], object_at: Callable[[str], Any], arrays: Mapping[str, Any]
) -> tuple | None:
    """Returns the tuple that `parts_of` was given; None if an object is missing.

    object_at: returns the object at a path; None if it is missing.
    """
    items = []
    for sort, part in parts:
        items.append(values.decode(part, arrays) if sort == "value" else object_at(part))
        if sort != "value" and items[-1] is None:
            return None
    if not kind:
        return tuple(items)
    return values.build_named_tuple(kind, items)


def name_of_tuple(value: tuple) -> str:
    """Returns the qualified name of the class of a named tuple; "" for other tuples."""
    return "" if type(value) is tuple else values.qualified_name(type(value))


def has_items(value: Any, items: tuple) -> bool:
    """Tells whether a tuple holds the same objects and equal values as another one."""
    if type(value) is not type(items) or len(value) != len(items):
        return False
    pairs = zip(value, items, strict=True)
    return all(
        a is b or (values.is_value(a) and values.is_value(b) and values.mark(a) == values.mark(b))
        for a, b in pairs
    )


def put_in_order(container: dict, keys: list[Any]) -> None:
    """Gives the items of a dict an order, if it has the same keys."""
    decoded = [values.decode(key, {}) for key in keys]
    if list(dict.keys(container)) == decoded or set(decoded) != set(dict.keys(container)):
        return
    for key in decoded:
        item = dict.__getitem__(container, key)
        if isinstance(container, collections.OrderedDict):
            container.move_to_end(key)
        else:
            dict.__delitem__(container, key)
            dict.__setitem__(container, key, item)
