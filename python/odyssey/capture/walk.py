"""The walk: everything that some objects hold, by path.

    walk(roots, kept=ids)   a Picture of what is there now

The walk starts at the roots of a training run (model, loss, optimizer, callbacks and others), in
their order, and follows edges (edges.py). Each object is looked into once: a value has the path by
which it is met first, and the nearest values of a root are met first. What it meets is of one of
these sorts:

    value       a number, string, array, generator, or container of these (values.py)
    state       what the `state_dict()` of an object returns; its attributes are walked as well
    reference   a function, class or other object: its qualified name, and then its edges
    reduced     an object of a class written in C, as `__reduce_ex__` takes it apart
    resource    a file, lock, process or logger (resources.py): only that one is there
    opaque      the rest: only that it is still the same object counts

Parameters, enum members and resources of the user's own classes are hosts: they are not looked
into, but attributes that the user's code has set on them are walked.

Below the data set, a large array or container is sampled: reading all of it at each checkpoint
would take longer than writing the checkpoint.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import inspect
import types
import warnings
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from . import values
from .edges import (
    Edge,
    Edges,
    Place,
    attributes_of,
    class_path,
    edges_of,
    edges_of_host,
    is_bound,
    is_function,
    is_own_class,
    is_value_host,
    not_state,
)
from .resources import is_holder, is_resource

# The roots below which large values are sampled, and what is large there.
SAMPLED_ROOTS = frozenset({"dataset", "loader"})
# The roots that read batches. Reading an epoch again from its start builds again what they cache.
LOADER_ROOTS = SAMPLED_ROOTS | {"sampler", "batch sampler", "transform", "collate"}
LARGE_BYTES = 1 << 20
LARGE_LENGTH = 4096
SAMPLES = 64
MOST_OBJECTS = 200_000  # that one walk looks into

VALUE = "value"
STATE = "state"
REDUCED = "reduced"
REFERENCE = "reference"
SAMPLED = "sampled"
OPAQUE = "opaque"
RESOURCE = "resource"


MOVED = "<moved>"  # in the paths of objects that are not where the program has built them


def built_path(path: str) -> str:
    """Returns the path at which the program has built what is at a path now."""
    return path.replace(MOVED, "")


@dataclasses.dataclass(slots=True)
class Entry:
    """One thing that a walk has met.

    Attributes:
        path: where it was met first.
        root: the name of the root that led to it.
        sort: VALUE, STATE, REDUCED, REFERENCE, SAMPLED, OPAQUE or RESOURCE.
        value: the live object; for STATE what its `state_dict()` returned, and None for RESOURCE,
            so that a file closes when the program drops it.
        place: where it is held; for STATE the object itself is the holder.
        parent: the path of the object or container that holds it.
        mark: equal for equal values; for a reference the name of its class or function.
    """

    path: str
    root: str
    sort: str
    value: Any
    place: Place
    parent: str
    mark: str


@dataclasses.dataclass
class Picture:
    """What a walk has met, by path, in the order of the walk.

    Attributes:
        entries: by path.
        aliases: the path by which an object was met first, by its other paths. It is "" for
            objects that checkpoints hold in another way.
        alias_places: the other places of objects, and the paths of what holds them there, by path.
            Functions in classes are not among them.
        patches: the names of functions that are hooks, that an object has in place of a method of
            its class, or that a class has under another name, by path.
        holders: class names of what holds data, such as queues and other trainers, by path. Those
            of loaders are not among them.
        hosts: objects by path that are not looked into, and may have attributes that are.
    """

    entries: dict[str, Entry] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    alias_places: dict[str, tuple[Place, str]] = dataclasses.field(default_factory=dict)
    patches: dict[str, str] = dataclasses.field(default_factory=dict)
    holders: dict[str, str] = dataclasses.field(default_factory=dict)
    hosts: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    kept_alive: list[Any] = dataclasses.field(default_factory=list, repr=False)

    def marks(self) -> dict[str, str]:
        """Returns the marks of all values by path."""
        return {
            path: entry.mark
            for path, entry in self.entries.items()
            if entry.sort in (VALUE, STATE, REDUCED)
        }

    def owner_of(self, path: str) -> str:
        """Returns the path of the object of a bound method; "" if no such method is at a path."""
        first_path = self.aliases.get(path) or path
        entry = self.entries.get(first_path)
        if entry is None or entry.sort != REFERENCE or not is_bound(entry.value):
            return ""
        owner = f"{first_path}.__self__"
        return self.aliases.get(owner) or owner

    def opaque(self) -> dict[str, str]:
        """Returns the class names of opaque objects by path."""
        return {p: entry.mark for p, entry in self.entries.items() if entry.sort == OPAQUE}


def walk(
    roots: Mapping[str, Any],
    kept: Container[int] = (),
    known: Mapping[int, str] = types.MappingProxyType({}),
) -> Picture:
    """Returns a picture of everything that the roots hold now.

    Args:
        roots: objects by name; None is skipped.
        kept: ids of objects that checkpoints hold in another way, such as parameters. They are
            not looked into.
        known: paths by id of objects that an earlier walk has met. An object keeps its path while
            it is still held there, even if another place is met first now. If it is only held
            elsewhere, it has that path with MOVED.
    """
    walker = _Walker(kept, known, frozenset(map(id, roots.values())))
    for name, root in roots.items():
        if root is not None:
            walker.follow(name, root)
    walker.follow_moved()
    picture = walker.picture
    for path, name in picture.patches.items():
        if owner := picture.owner_of(path):
            picture.patches[path] = f"{name} of {built_path(owner)}"
    return picture


class _Walker:
    """One walk."""

    def __init__(
        self, kept: Container[int], known: Mapping[int, str], roots: Container[int]
    ) -> None:
        self.kept = kept
        self.known = known
        self.roots = roots  # their ids
        # known objects at other paths, with the names of their roots
        self.moved: list[tuple[Edge, str, str]] = []
        self.picture = Picture()
        self.seen: dict[int, str] = {}  # the first path of an object, by its id
        self.root = ""
        # what is to be looked into next: its path, what it is, and the function that does it
        self.waiting: collections.deque[tuple[str, Any, Edges]] = collections.deque()

    def follow(self, name: str, root: Any) -> None:
        """Walks from one root, nearest objects first."""
        self.root = name
        self.meet(Edge(name, root, Place("fixed", None, name)), "")
        self.look_into_waiting()

    def follow_moved(self) -> None:
        """Walks from known objects that are at other paths only."""
        while self.moved:  # which leads to others
            edge, parent, self.root = self.moved.pop(0)
            identity = id(edge.value)
            if identity not in self.seen:
                keeps_path = not (is_code(edge.value) or isinstance(edge.value, tuple))
                path = edge.path
                if keeps_path and self.root not in LOADER_ROOTS:
                    path = self.known[identity] + MOVED
                self.seen[identity] = path
                self.sort_out(edge._replace(path=path), parent)
            if self.seen[identity] != edge.path:
                self.note_alias(edge, parent, self.seen[identity])
            self.look_into_waiting()

    def look_into_waiting(self) -> None:
        while self.waiting:
            path, value, look_into = self.waiting.popleft()
            try:
                for edge in look_into(value, path):
                    self.meet(edge, path)
            except RuntimeError as problem:
                if "during iteration" in str(problem):
                    raise  # another thread has changed it
            except Exception:  # a class that pretends to be another, without its attributes
                continue

    def meet(self, edge: Edge, parent: str) -> None:
        """Notes one value, and has it looked into if there is more behind it."""
        try:
            self.look_at(edge, parent)
        except RuntimeError as problem:
            if "during iteration" in str(problem):
                raise
            self.note(edge, parent, OPAQUE, values.qualified_name(type(edge.value)))
        except Exception:  # for example a weak proxy of an object that is gone
            self.note(edge, parent, OPAQUE, values.qualified_name(type(edge.value)))

    def look_at(self, edge: Edge, parent: str) -> None:
        """Notes one value, or raises what code of its class raises."""
        value = edge.value
        kind = type(value)
        if kind is weakref.ref:  # only what it leads to counts
            value = value()
            kind = type(value)
            edge = Edge(edge.path, value, edge.place._replace(is_weak=True))
        if kind in _IMMUTABLE:
            self.note(edge, parent, VALUE, values.mark(value))
            return
        is_patch = edge.place.kind == "hook" or (
            is_function(value) and (edge.place.overrides() or _is_put_into_class(edge))
        )
        if is_patch and self.root not in LOADER_ROOTS and not is_resource(value):
            self.picture.patches[edge.path] = _describe_patch(value)
        identity = id(value)
        if identity in self.seen:
            self.note_alias(edge, parent, self.seen[identity])
            return
        if identity in self.kept:
            self.seen[identity] = edge.path
            self.note_alias(edge, parent, "")
            self.add_host(edge.path, value)
            return
        path_here = built_path(edge.path)
        if self.known.get(identity, path_here) != path_here and own_path_of(value) is None:
            self.moved.append((edge, parent, self.root))
            return
        path_of_class = own_path_of(value)
        if path_of_class is not None and edge.path != path_of_class:
            # it has one path, whether objects, functions or attributes lead to it
            self.meet(Edge(path_of_class, value, Place("fixed", None, path_of_class)), "")
            self.note_alias(edge, parent, path_of_class)
            return
        if not values.is_immutable(value):
            self.seen[identity] = edge.path
        self.sort_out(edge, parent)

    def sort_out(self, edge: Edge, parent: str) -> None:
        """Notes an object that is met for the first time, by its sort."""
        value = edge.value
        if len(self.seen) > MOST_OBJECTS:
            self.note(edge, parent, OPAQUE, "more objects than one walk looks into")
            return
        if self.root in SAMPLED_ROOTS and _is_large(value):
            self.note(edge, parent, SAMPLED, sample(value))
        elif values.is_value(value) and not self.holds_tracked(value):
            self.note(edge, parent, VALUE, values.mark(value))
            self.add_members([value])
            if is_value_host(type(value)):
                self.add_host(edge.path, value)
        elif is_resource(value):
            place = edge.place
            self.note(Edge(edge.path, None, place), parent, RESOURCE, describe(value))
            if is_own_class(type(value)) or isinstance(value, BaseException):
                self.add_host(edge.path, value)
            self.note_holder(edge)
        elif values.is_opaque(value):
            self.note(edge, parent, OPAQUE, describe(value))
        elif _is_object_with_edges(value):
            self.note(edge, parent, REFERENCE, describe(value))
            self.waiting.append((edge.path, value, edges_of))
            self.note_holder(edge)
            if isinstance(value, type) and issubclass(value, enum.Enum):
                self.add_members(value.__members__.values())
            self.meet_state_dict(edge)
        else:
            self.meet_reduced(edge, parent)

    def note_holder(self, edge: Edge) -> None:
        """Notes what holds data that checkpoints don't have, such as a queue, the cache of a
        function, or another trainer.
        """
        if self.root in LOADER_ROOTS or id(edge.value) in self.roots or not is_holder(edge.value):
            return
        is_trainer = hasattr(type(edge.value), "save_checkpoint")
        remark = "; save it with its own save_checkpoint()" if is_trainer else ""
        self.picture.holders[edge.path] = describe(edge.value) + remark

    def add_members(self, members: Iterable[Any]) -> None:
        """Has members of the user's own enums looked into: their attributes, and their values if
        these can change.
        """
        for member in members:
            if isinstance(member, enum.Flag) and member.name not in type(member).__members__:
                continue  # Python builds combinations of flags whenever they are needed
            if isinstance(member, enum.Enum) and is_own_class(type(member)):
                path = f"{class_path(type(member))}.{member.name}"
                self.add_host(path, member)
                if not values.is_immutable(member._value_):
                    place = Place("fixed", member, "_value_")
                    self.meet(Edge(f"{path}.value", member._value_, place), path)

    def add_host(self, path: str, value: Any) -> None:
        """Has the attributes looked into that the user's code has set on an object."""
        if path not in self.picture.hosts:
            self.picture.hosts[path] = value
            if attributes_of(value) is not None:
                self.waiting.append((path, value, edges_of_host))

    def note_alias(self, edge: Edge, parent: str, first_path: str) -> None:
        """Notes another path of an object, and where it is held there."""
        self.picture.aliases.setdefault(edge.path, first_path)
        can_be_set = edge.place.kind not in ("fixed", "hook", "contents")
        # a class may hold a wrapper of a function
        is_of_class = isinstance(edge.place.holder, type) and is_code(edge.value)
        if first_path and can_be_set and not is_of_class:
            self.picture.alias_places.setdefault(edge.path, (edge.place, parent))

    def holds_tracked(self, value: Any) -> bool:
        """Tells whether a container holds what checkpoints have in another way, or what other
        objects hold as well.

        For example, recurrent layers of PyTorch have a list of their parameters, and an optimizer
        may have been created from a list of tensors.
        """
        if not isinstance(value, (list, tuple, dict)):
            return False
        items = value.values() if isinstance(value, dict) else value
        if set(map(type, items)) <= _IMMUTABLE:
            return False
        return any(
            id(item) in self.kept or values.is_tracked(item) or self.holds_tracked(item)
            for item in items
        )

    def note(self, edge: Edge, parent: str, sort: str, mark: str) -> None:
        path = edge.path
        if sort == OPAQUE:
            mark += values.remark_on(edge.value)
        if path in self.picture.entries and sort == REFERENCE:
            return  # a compiled module has the path of the module inside
        number = 1
        while path in self.picture.entries:  # such as in two local classes of one name
            place = self.picture.entries[path].place
            if place.holder is edge.place.holder and place.key == edge.place.key:
                return  # several functions lead to the same global
            number += 1
            path = f"{edge.path}#{number}"
        self.picture.entries[path] = Entry(
            path, self.root, sort, edge.value, edge.place, parent, mark
        )

    def meet_state_dict(self, edge: Edge) -> None:
        """Notes what an object's own `state_dict()` returns, if it has one and its inverse."""
        value = edge.value
        if not has_state_dict(value):
            return
        attributes = attributes_of(value) or {}
        if any(id(attributes[name]) in self.kept for name in _STATES if name in attributes):
            return  # an optimizer whose state the trainer keeps
        try:
            state = value.state_dict()
        except Exception:  # the object can't tell now; its attributes are walked all the same
            return
        if not values.is_value(state):
            return
        self.picture.kept_alive.append(state)
        place = Place("state", value, None)
        self.note(
            Edge(f"{edge.path}.state_dict()", state, place), edge.path, STATE, values.mark(state)
        )

    def meet_reduced(self, edge: Edge, parent: str) -> None:
        """Notes an object that has no attributes, as `__reduce_ex__` takes it apart."""
        parts = reduced(edge.value)
        if parts is None:
            self.note(edge, parent, OPAQUE, describe(edge.value))
            return
        self.picture.kept_alive.append(parts)
        if values.is_value(parts):
            self.note(edge, parent, REDUCED, values.mark(parts))
        else:
            self.note(edge, parent, OPAQUE, describe(edge.value))


_LIST_ITERATORS = (type(iter([])), type(iter(())))
_SEQUENCE_ITERATORS = (*_LIST_ITERATORS, type(reversed([])), reversed)
_BEHIND_THE_END = 1 << 60  # a position
_STATES = ("state", "arrays")  # where optimizers have their state
_IMMUTABLE = frozenset({bool, int, float, str, type(None)})


def describe(value: Any) -> str:
    """Returns the qualified name of a function or class, or of an object's class."""
    if isinstance(value, type):
        return values.qualified_name(value)
    if is_function(value):
        inner = getattr(value, "func", value) if type(value).__name__ == "partial" else value
        return values.qualified_name(inner)
    if isinstance(value, (list, tuple)):
        base = list if isinstance(value, list) else tuple
        return f"{type(value).__name__} of {base.__len__(value)}"
    return values.qualified_name(type(value))


def _describe_patch(function: Any) -> str:
    """Returns the name of a function, with its line if other functions may have the same name."""
    name = describe(function)
    code = getattr(function, "__code__", None)
    return f"{name} of line {code.co_firstlineno}" if "<" in name and code is not None else name


def _is_put_into_class(edge: Edge) -> bool:
    """Tells whether a class has a function that was defined elsewhere or under another name."""
    kind = edge.place.holder
    if not isinstance(kind, type) or edge.place.kind != "attribute":
        return False
    return describe(edge.value) != f"{values.qualified_name(kind)}.{edge.place.key}"


def own_path_of(value: Any) -> str | None:
    """Returns the path of a user's own class that its module has under its name; None if it is
    another value.
    """
    if not isinstance(value, type) or not is_own_class(value):
        return None
    name = values.qualified_name(value)
    return class_path(value) if values.class_called(name) is value else None


def is_code(value: Any) -> bool:
    """Tells whether a value is a function or a class."""
    return isinstance(value, type) or is_function(value)


def has_state_dict(value: Any) -> bool:
    """Tells whether an object has `state_dict()` and `load_state_dict(state)` of its own.

    Modules of neural networks have them for parameters, which are kept in another way: their
    attributes are walked instead.
    """
    kind = type(value)
    if isinstance(value, type) or hasattr(kind, "named_parameters"):
        return False
    if not (callable(getattr(kind, "state_dict", None)) and hasattr(kind, "load_state_dict")):
        return False
    if "state_dict()" in not_state(kind):
        return False
    try:
        parameters = list(inspect.signature(kind.state_dict).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not p.empty or p.kind in optional for p in parameters)


def _is_object_with_edges(value: Any) -> bool:
    """Tells whether an object is a function, class, container, or has attributes."""
    if isinstance(value, (type, list, tuple, dict)) or is_function(value):
        return True
    if isinstance(value, types.GeneratorType) or type(value) in (set, frozenset):
        return False
    kind = type(value)
    if attributes_of(value) is not None:
        return True
    return any("__slots__" in vars(base) for base in kind.__mro__[:-1])


def reduced(value: Any) -> list[Any] | None:
    """Returns an object as [class, arguments, state, items], taken apart by `__reduce_ex__`.

    None if it can't be taken apart, as is the case for generators of Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # itertools warns that it will lose this
        try:
            result = value.__reduce_ex__(2)
        except Exception:
            return None
    if not isinstance(result, tuple) or len(result) < 2:
        return None
    function, arguments, *rest = result
    state = rest[0] if rest else None
    items = list(rest[1]) if len(rest) > 1 and rest[1] is not None else None
    arguments = [a for a in arguments if not isinstance(a, type)]
    if type(value) in _LIST_ITERATORS and state is None:
        state = _BEHIND_THE_END  # it has returned all items, and holds its list no longer
        arguments = []
    if type(value) in _SEQUENCE_ITERATORS and not values.is_value(arguments):
        arguments = []  # of an iterator over objects, only the position counts
    return [values.qualified_name(function), list(arguments), state, items]


# --- large values of data sets -----------------------------------------------------------------


def _is_large(value: Any) -> bool:
    """Tells whether a value below the data set is sampled instead of read."""
    if isinstance(value, np.ndarray):
        return value.nbytes > LARGE_BYTES
    if values.is_container(value):
        return len(value) > LARGE_LENGTH or _bytes_in(value, LARGE_BYTES) > LARGE_BYTES
    kind = values.kind_of(value)
    return kind is not None and getattr(value, "nbytes", 0) > LARGE_BYTES


def _bytes_in(container: Any, limit: int) -> int:
    """Returns the bytes of arrays in a container; it stops counting above the limit."""
    total = 0
    items = container.values() if isinstance(container, dict) else container
    for item in items:
        if values.is_container(item):
            total += _bytes_in(item, limit)
        else:
            total += getattr(item, "nbytes", 0)
        if total > limit:
            break
    return total


def sample(value: Any) -> str:
    """Returns length, dtype and the marks of 64 entries of a large value, as one string.

    Entries are joined by new lines after the first line. An entry of None or zeros has the mark
    "": a cache fills it later.
    """
    if isinstance(value, dict):
        return f"dict {len(value)}"
    if isinstance(value, (set, frozenset)):
        return f"set {len(value)}"
    is_scalar = getattr(value, "ndim", 1) == 0
    length = 1 if is_scalar else len(value)
    head = f"{type(value).__name__} {length} {getattr(value, 'dtype', '')}"
    if not length:
        return head
    chosen = sorted({int(i) for i in np.linspace(0, length - 1, min(SAMPLES, length))})
    return "\n".join([head, *_marks_of_samples(value, chosen)])


def _marks_of_samples(value: Any, chosen: list[int]) -> Iterator[str]:
    for index in chosen:
        item = value[index] if hasattr(value, "__getitem__") else None
        is_empty = item is None
        if not is_empty and hasattr(item, "any"):
            is_empty = not bool(item.any())
        yield "" if is_empty or not values.is_value(item) else values.mark(item)


def changed_in_place(before: str, after: str) -> bool:
    """Tells whether samples of a large value differ where there was something before."""
    first, *old = before.split("\n")
    second, *new = after.split("\n")
    if first != second or may_fill_up(before):
        return False
    return any(a and a != b for a, b in zip(old, new, strict=False))


def may_fill_up(mark: str) -> bool:
    """Tells whether a large value may be a cache that is filled while samples are read.

    It may if all samples of it are equal, as in an array of zeros or of -1.
    """
    _, *marks = mark.split("\n")
    return len(marks) > 1 and len(set(marks)) == 1
