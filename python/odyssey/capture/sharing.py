"""Sharing: values that are the same object at several places, and arrays that share memory.

A checkpoint holds each value once for each place, so a restored list or slice would be a copy. For
example, `self.row = self.table[2]` is a window on `self.table`, and a program that changes the
table in place reads the change in the row. A place inside a value is written as the path of the
value and the positions of the items that lead there.

Windows may also share memory although the program no longer holds the whole array. For example, it
may hold two halves only. Then a resumed run creates a block of memory for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from . import values
from .walk import Entry, Picture

Spot = tuple[str, tuple[int, ...]]  # the path of a value, and positions inside it
BLOCK = "<block>"  # starts the path of a block, which is that of the first value on it


class Memory(NamedTuple):
    """How arrays of a class share memory.

    Attributes:
        base: the class of arrays that can share memory with one another.
        bounds: a function of an array that returns the first address of its memory, the one after
            the last, and whether a restored array has its entries in the same order there; None if
            it has no memory to look at.
        form: a function of (array, first address, owner) that returns how the array lies in the
            memory of its owner, as JSON has it; None if that can't be told.
        window: a function of (owner, form, array) that returns an array which lies there, or the
            array itself after it was moved there.
        block: a function of (array, form) pairs that returns a new owner with the entries of all
            arrays at their places; None if two arrays have different values for one place.
        owned: a function of an owner that returns its array; None if it has none now.
    """

    base: type
    bounds: Callable[[Any], tuple[int, int, bool] | None]
    form: Callable[[Any, int, Any], Any]
    window: Callable[[Any, Any, Any], Any]
    block: Callable[[list[tuple[Any, Any]]], Any]
    owned: Callable[[Any], Any] = lambda owner: owner


_memories: dict[type, Memory] = {}


def register_memory(kind: type, memory: Memory) -> None:
    """Sets how arrays of a class share memory."""
    _memories[kind] = memory


class Sharing(NamedTuple):
    """What the values of a picture share.

    Attributes:
        groups: the spots of each object that has several.
        windows: how an array lies in the memory of another one, or on a block: the spot of that,
            and a form, by spot.
    """

    groups: list[list[Spot]]
    windows: dict[Spot, tuple[Spot, Any]]

    def to_json(self) -> dict[str, Any]:
        """Returns it as a checkpoint holds it."""
        windows = [[*spot, *owner, form] for spot, (owner, form) in self.windows.items()]
        return {"groups": [list(group) for group in self.groups], "windows": windows}

    @staticmethod
    def from_json(node: Mapping[str, Any]) -> Sharing:
        """Returns what `to_json` was called on."""
        groups = [list(map(_spot_of, group)) for group in node["groups"]]
        windows = {
            (path, tuple(steps)): ((owner, tuple(owner_steps)), form)
            for path, steps, owner, owner_steps, form in node["windows"]
        }
        return Sharing(groups, windows)


def _spot_of(node: Iterable[Any]) -> Spot:
    path, steps = node
    return path, tuple(steps)


def find_shared(picture: Picture, entries: Iterable[Entry]) -> Sharing:
    """Returns what values share with one another and with the hosts of a picture."""
    spots: dict[int, list[Spot]] = {}
    objects: dict[int, Any] = {}
    for entry in entries:
        if entry.place.kind == "contents":
            continue  # it is a copy
        for steps, part in _parts_of(entry.value, (), set()):
            spots.setdefault(id(part), []).append((entry.path, steps))
            objects[id(part)] = part
    for places in spots.values():
        places.sort(key=lambda spot: bool(spot[1]))  # the object that other paths lead to first
    groups = [places for places in spots.values() if len(places) > 1]
    arrays = [(spots[i][0], array) for i, array in objects.items() if type(array) in _memories]
    return Sharing(groups, _windows_of(arrays, picture) if arrays else {})


def _parts_of(
    value: Any, steps: tuple[int, ...], visited: set[int]
) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yields a value and the values inside it that can change, with their positions."""
    if not values.is_container(value):
        if not values.is_immutable(value):
            yield steps, value
        return
    if not values.is_immutable(value):
        yield steps, value
    if id(value) in visited or isinstance(value, (set, frozenset)):
        return
    visited.add(id(value))
    for number, item in enumerate(value.values() if isinstance(value, dict) else value):
        if type(item) not in values.PLAIN:
            yield from _parts_of(item, (*steps, number), visited)


class _Span(NamedTuple):
    """The memory of an array.

    Attributes:
        array: a value, or what a host owns.
        spot: where it is.
        first: its first address.
        end: the address after its last.
        is_host: it belongs to a host.
        is_in_order: a restored array has its entries in the same order.
    """

    array: Any
    spot: Spot
    first: int
    end: int
    is_host: bool
    is_in_order: bool

    def holds(self, part: _Span) -> bool:
        """Tells whether the memory of another array is a part of this array's."""
        return self.is_in_order and self.first <= part.first and part.end <= self.end


def _spans_of(arrays: Iterable[tuple[Spot, Any]], are_hosts: bool) -> Iterator[_Span]:
    for spot, array in arrays:
        memory = _memories[type(array)]
        owned = memory.owned(array)
        bounds = None if owned is None else memory.bounds(owned)
        if bounds is not None:
            first, end, is_in_order = bounds
            yield _Span(owned, spot, first, end, are_hosts, is_in_order)


def _windows_of(
    arrays: Iterable[tuple[Spot, Any]], picture: Picture
) -> dict[Spot, tuple[Spot, Any]]:
    """Returns which arrays lie inside the memory of another array, of a host, or of a block."""
    arrays = list(arrays)
    ids = {id(array) for _, array in arrays}
    hosts = [
        ((path, ()), host)
        for path, host in picture.hosts.items()
        if type(host) in _memories and id(host) not in ids
    ]
    spans = [*_spans_of(hosts, True), *_spans_of(arrays, False)]
    spans.sort(key=lambda span: (span.first, -span.end, not span.is_host, span.spot))
    windows: dict[Spot, tuple[Spot, Any]] = {}
    overlapping: list[_Span] = []
    end = 0
    for span in spans:
        if span.first >= end:
            windows.update(_windows_among(overlapping))
            overlapping = []
        overlapping.append(span)
        end = max(end, span.end)
    windows.update(_windows_among(overlapping))
    return windows


def _windows_among(spans: list[_Span]) -> dict[Spot, tuple[Spot, Any]]:
    """Returns which of some overlapping arrays lie in the memory of another one, or on a block."""
    if len(spans) < 2:
        return {}
    covering = [span for span in spans if all(map(span.holds, spans))]
    owners = sorted(
        covering or [span for span in spans if span.is_host], key=lambda s: not s.is_host
    )
    windows: dict[Spot, tuple[Spot, Any]] = {}
    if not owners:
        block = BLOCK + spans[0].spot[0], spans[0].spot[1]
        for span in spans:
            form = _form_of(span, spans[0].first, spans[0].array)
            if form is not None:
                windows[span.spot] = block, form
        return windows
    for span in spans:
        owner = next((one for one in owners if one.holds(span)), None)
        if owner is None or span.is_host or span.array is owner.array:
            continue
        form = _form_of(span, owner.first, owner.array)
        if form is not None:
            windows[span.spot] = owner.spot, form
    return windows


def _form_of(span: _Span, first: int, owner: Any) -> Any:
    memory = _memories[type(span.array)]
    return memory.form(span.array, first, owner) if isinstance(owner, memory.base) else None


# --- put back ------------------------------------------------------------------------------------


def separate(picture: Picture, entries: Iterable[Entry], saved: Sharing) -> bool:
    """Gives values of their own to places that share one now, and shared none at the checkpoint.

    Returns whether it has changed something.
    """
    sharing = find_shared(picture, entries)
    number_of = {spot: number for number, group in enumerate(saved.groups) for spot in group}
    changed = False
    for group in sharing.groups:
        numbers = {number_of.get(spot) for spot in group}
        if len(numbers) == 1 and None not in numbers:
            continue
        for spot in group[1:]:
            _set_at(picture, spot, _copy_of(_object_at(picture, spot)))
            changed = True
    for spot, window in sharing.windows.items():
        one = _object_at(picture, spot)
        if saved.windows.get(spot) != window and one is not None:
            _set_at(picture, spot, _copy_of(one))
            changed = True
    return changed


def share(picture: Picture, saved: Sharing) -> None:
    """Lets values share again what they shared at the checkpoint."""
    on_blocks: dict[Spot, dict[Spot, Any]] = {}
    for spot, (owner_spot, form) in saved.windows.items():
        if owner_spot[0].startswith(BLOCK):
            on_blocks.setdefault(owner_spot, {})[spot] = form
            continue
        owner = _object_at(picture, owner_spot)
        one = _object_at(picture, spot)
        if owner is None or type(one) not in _memories or type(owner) not in _memories:
            continue
        memory = _memories[type(one)]
        owner = _memories[type(owner)].owned(owner)
        if not isinstance(owner, memory.base):
            continue
        bounds = memory.bounds(owner)
        if bounds is None or memory.form(one, bounds[0], owner) == form:
            continue
        window = memory.window(owner, form, one)
        if window is not None and values.mark(window) == values.mark(one):
            _set_at(picture, spot, window)
    for forms in on_blocks.values():
        _put_on_block(picture, forms)
    for group in saved.groups:
        first = _object_at(picture, group[0])
        for spot in group[1:]:
            part = _object_at(picture, spot)
            if first is None or part is None or part is first:
                continue
            if values.mark(part) == values.mark(first):
                _set_at(picture, spot, first)


def _put_on_block(picture: Picture, forms: Mapping[Spot, Any]) -> None:
    """Lets arrays lie on one new block of memory."""
    arrays = {spot: _object_at(picture, spot) for spot in forms}
    memories = [_memories.get(type(array)) for array in arrays.values()]
    if None in memories or len({memory.base for memory in memories if memory}) != 1:
        return
    memory = memories[0]
    assert memory is not None
    owner = memory.block([(array, forms[spot]) for spot, array in arrays.items()])
    if owner is None:
        return
    for spot, array in arrays.items():
        window = memory.window(owner, forms[spot], array)
        if window is not None:
            _set_at(picture, spot, window)


def _copy_of(value: Any) -> Any:
    arrays: dict[str, np.ndarray] = {}
    node = values.encode(value, arrays, "copy")
    return values.decode(node, arrays)


def _object_at(picture: Picture, spot: Spot) -> Any:
    """Returns the object at a spot; None if nothing is there."""
    path, steps = spot
    entry = picture.entries.get(path)
    if entry is None or entry.sort != "value":
        return picture.hosts.get(path)
    one = entry.value
    for step in steps:
        if not values.is_container(one) or isinstance(one, (set, frozenset)) or step >= len(one):
            return None
        one = list(one.values() if isinstance(one, dict) else one)[step]
    return one


def _set_at(picture: Picture, spot: Spot, value: Any) -> None:
    """Puts an object to a spot."""
    path, steps = spot
    entry = picture.entries[path]
    changed = _with_part(entry.value, steps, value)
    if changed is entry.value or not entry.place.set(changed):
        return
    for alias, first_path in picture.aliases.items():
        if first_path == path and alias in picture.alias_places:
            picture.alias_places[alias][0].set(changed)
    entry.value = changed


def _with_part(container: Any, steps: tuple[int, ...], value: Any) -> Any:
    """Returns a container with another object at some positions inside; a new one if it can't
    change.
    """
    if not steps:
        return value
    number = steps[0]
    key = list(container)[number] if isinstance(container, dict) else number
    item = container[key]
    changed = _with_part(item, steps[1:], value)
    if changed is item:
        return container
    if isinstance(container, tuple):
        items = [*container[:number], changed, *container[number + 1 :]]
        return tuple.__new__(type(container), items)
    container[key] = changed
    return container


# --- arrays of NumPy ------------------------------------------------------------------------------


def _bounds_of_array(array: np.ndarray) -> tuple[int, int, bool] | None:
    if not array.size or not array.flags.writeable:
        return None
    spans = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    first = array.ctypes.data + sum(span for span in spans if span < 0)
    end = array.ctypes.data + sum(span for span in spans if span > 0) + array.itemsize
    return first, end, array.flags.c_contiguous


def _form_of_array(array: np.ndarray, first: int, owner: np.ndarray) -> list[Any]:
    return [array.ctypes.data - first, list(array.shape), list(array.strides)]


def _window_of_array(owner: np.ndarray, form: list[Any], array: np.ndarray) -> Any:
    offset, shape, strides = form
    if not owner.flags.c_contiguous or not owner.flags.writeable:
        return None
    return np.ndarray(tuple(shape), array.dtype, owner, offset, tuple(strides))


def _block_of_arrays(arrays: list[tuple[np.ndarray, list[Any]]]) -> np.ndarray | None:
    ends = []
    for array, (offset, shape, strides) in arrays:
        spans = [(n - 1) * step for n, step in zip(shape, strides, strict=True) if step > 0]
        ends.append(offset + sum(spans) + array.itemsize)
    block = np.zeros(max(ends), np.uint8)
    windows = [(array, _window_of_array(block, form, array)) for array, form in arrays]
    for array, window in windows:
        window[...] = array
    return block if all(w.tobytes() == a.tobytes() for a, w in windows) else None


ARRAYS = Memory(np.ndarray, _bounds_of_array, _form_of_array, _window_of_array, _block_of_arrays)
register_memory(np.ndarray, ARRAYS)
