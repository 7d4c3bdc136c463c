"""Edges: what an object holds, and where it holds it.

An object is looked into without running any of its code: properties are never evaluated. What is
followed:

    objects      attributes in `__dict__` and `__slots__`, without those that the class lists in
                 `_not_state`
    containers   items
    functions    cells of closures, defaults, attributes, parts of `functools.partial`, the object
                 of a bound method
    own code     functions and classes in the user's own files, neither of the standard library nor
                 of installed packages: also the globals that they name, and attributes of classes

Rooms add how classes of their packages are looked into (`register_edges`), and which of their own
classes may be looked into at all (`register_walkable`).
"""

from __future__ import annotations

import collections
import dataclasses
import dis
import enum
import functools
import os
import random
import re
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..base.registry import PACKAGE
from . import values

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_FUNCTIONS += (types.MethodWrapperType, type(str.join), type(object.__init__))
_FUNCTIONS += (functools._lru_cache_wrapper,)
CACHED = "<cached>"  # in the paths of what a `functools.cached_property` has computed
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")  # the name of a variable of the environment
_LOADS = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"})


class Place(NamedTuple):
    """Where an object holds a value.

    Attributes:
        kind: "attribute", "item", "global", "cell", "variable" (of the environment), "state" (what
            `load_state_dict` takes), "contents" (of an object whose class inherits from one in C),
            "setting" (an attribute that must not change while a checkpoint is to be written),
            "hook" (a function that is called around others) or "fixed". The last two can't be set.
        holder: the object, dict, list or cell.
        key: the name of an attribute, or the key of an item.
        is_weak: a weak reference to the value is there.
    """

    kind: str
    holder: Any
    key: Any
    is_weak: bool = False

    def set(self, value: Any) -> bool:
        """Puts another value there. Returns False if that isn't possible."""
        if self.is_weak:
            value = weakref.ref(_Gone() if value is None else value)
        if self.kind in ("attribute", "setting"):
            _set_attribute(self.holder, self.key, value)
        elif self.kind == "item" and isinstance(self.holder, list):
            self.holder[self.key : self.key + 1] = [value]
        elif self.kind in ("item", "global"):
            self.holder[self.key] = value
        elif self.kind == "variable" and value is None:
            self.holder.pop(self.key, None)
        elif self.kind == "variable":
            self.holder[self.key] = str(value)
        elif self.kind == "state":
            self.holder.load_state_dict(value)
        elif self.kind == "cell":
            self.holder.cell_contents = value
        elif self.kind == "contents" and self.key in _WRITERS:
            _WRITERS[self.key](self.holder, value)
        else:
            return False
        return True

    def can_be_set(self) -> bool:
        """Tells whether another value can be put there."""
        if self.kind == "contents":
            return self.key in _WRITERS
        return self.kind not in ("fixed", "hook")

    def overrides(self) -> bool:
        """Tells whether an object has an attribute of its own in place of its class's."""
        if self.kind != "attribute" or isinstance(self.holder, type):
            return False
        return any(self.key in vars(base) for base in type(self.holder).__mro__)

    def remove(self) -> bool:
        """Removes the value. Returns False if that isn't possible."""
        if self.kind == "attribute":
            delattr(self.holder, self.key)
        elif self.kind == "item" and isinstance(self.holder, list):
            del self.holder[self.key :]  # what comes after it is gone as well
        elif self.kind in ("item", "global") and isinstance(self.holder, dict):
            self.holder.pop(self.key, None)
        elif self.kind == "cell":
            del self.holder.cell_contents
        else:
            return False
        return True


class _Gone:
    """An object that goes at once, so that a weak reference to it leads nowhere."""


def _set_attribute(holder: Any, name: str, value: Any) -> None:
    """Sets an attribute as it was read: without the `__setattr__` of a user's own class, which may
    do more than that.
    """
    if not isinstance(holder, type):
        attributes = attributes_of(holder)
        if attributes is not None and name in attributes:
            attributes[name] = value
            return
        assign = type(holder).__setattr__
        code = getattr(assign, "__code__", None)
        if name in slots_of(type(holder)) and code is not None and is_own_file(code.co_filename):
            object.__setattr__(holder, name, value)
            return
    try:
        setattr(holder, name, value)
    except dataclasses.FrozenInstanceError:
        object.__setattr__(holder, name, value)


class Edge(NamedTuple):
    """One value that an object holds.

    Attributes:
        path: of the value.
        value: the value itself.
        place: where it is held.
    """

    path: str
    value: Any
    place: Place


Edges = Callable[[Any, str], Iterable[Edge]]
_edges_of_class: dict[type, Edges] = {}
_extra_edges: dict[type, Edges] = {}  # of values that may have attributes, by class
_walkable: list[type] = []


def register_edges(base: type, edges: Edges) -> None:
    """Sets how objects of a class and its subclasses are looked into: a function of (object, path)
    that returns edges.
    """
    _edges_of_class[base] = edges


def register_value_host(kind: type, extra: Edges) -> None:
    """Lets attributes of values of a class be looked into, which are no part of the value.

    extra: a function of (value, path) that returns further edges.
    """
    _extra_edges[kind] = extra


def is_value_host(kind: type) -> bool:
    """Tells whether values of a class may have attributes that are looked into."""
    return kind in _extra_edges


def register_walkable(*classes: type) -> None:
    """Lets objects of classes of odyssey be looked into; all others of odyssey are resources."""
    _walkable.extend(classes)


def is_walkable(kind: type) -> bool:
    """Tells whether a class of odyssey may be looked into."""
    return issubclass(kind, tuple(_walkable))


def is_function(value: Any) -> bool:
    """Tells whether a value is a function, a method, or what functools has made of one."""
    return isinstance(value, _FUNCTIONS)


def is_bound(value: Any) -> bool:
    """Tells whether a value is a method of an object or class."""
    owner = getattr(value, "__self__", None) if is_function(value) else None
    return owner is not None and not isinstance(owner, types.ModuleType)


# --- whose code it is -------------------------------------------------------------------------


@functools.cache
def is_own_file(filename: str) -> bool:
    """Tells whether code of a file is the user's own: not of the standard library, an installed
    package or odyssey. Code of notebooks and of `python -c` has names like "<stdin>", and is.
    """
    if filename.startswith("<frozen"):
        return False
    places = sysconfig.get_paths()
    foreign = {places[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    is_installed = "site-packages" in filename or "dist-packages" in filename
    return not is_installed and not filename.startswith((*foreign, str(PACKAGE)))


@functools.cache
def is_own_class(kind: type) -> bool:
    """Tells whether a class is the user's own code."""
    module = sys.modules.get(kind.__module__)
    if module is None:
        return True
    filename = getattr(module, "__file__", None)
    if filename is None:
        return kind.__module__ not in sys.builtin_module_names
    return is_own_file(filename)


# --- edges ---------------------------------------------------------------------------------------


def edges_of(value: Any, path: str) -> Iterable[Edge]:
    """Returns what an object, a container, a function or a class holds, in sorted order."""
    for base in type(value).__mro__:
        if base in _edges_of_class:
            return _edges_of_class[base](value, path)
    if isinstance(value, type):
        return _edges_of_type(value, path)
    if is_function(value):
        return _edges_of_function(value, path)
    if isinstance(value, (list, tuple, dict)):
        return [*edges_of_items(value, path), *edges_of_object(value, path)]
    for base, contents in _CONTENTS.items():
        if isinstance(value, base):
            place = Place("contents", value, base)
            edge = Edge(f"{path}.<contents>", contents(value), place)
            return [edge, *edges_of_object(value, path)]
    return edges_of_object(value, path)


# What objects hold whose classes inherit from these, as a value; methods of a subclass don't run.
_CONTENTS: dict[type, Callable[[Any], Any]] = {
    int: int.__index__,
    float: float.__float__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    set: lambda value: values.copy_of_set(set.__iter__(value)),
    frozenset: lambda value: frozenset(values.copy_of_set(frozenset.__iter__(value))),
    collections.deque: lambda value: collections.deque(collections.deque.__iter__(value)),
    np.ndarray: lambda value: np.ndarray.view(value, np.ndarray),
    random.Random: lambda value: _contents_of_random(value),
    np.random.Generator: lambda value: np.random.Generator(value.bit_generator),
    np.random.RandomState: lambda value: _contents_of_random_state(value),
}


def register_contents(
    base: type, read: Callable[[Any], Any], write: Callable[[Any, Any], None]
) -> None:
    """Sets what objects hold whose classes inherit from `base`: a value that `read` returns, and
    that `write` writes into an object.
    """
    _CONTENTS[base] = read
    _WRITERS[base] = write


def _contents_of_random(value: random.Random) -> random.Random | None:
    if isinstance(value, random.SystemRandom):
        return None
    contents = random.Random()
    contents.setstate(random.Random.getstate(value))
    return contents


def _contents_of_random_state(value: np.random.RandomState) -> np.random.RandomState:
    state = value.get_state(legacy=False)
    contents = np.random.RandomState(getattr(np.random, state["bit_generator"])(0))
    contents.set_state(state)
    return contents


def _write_generator(target: np.random.Generator, value: np.random.Generator) -> None:
    values.put_into(np.random.Generator(target.bit_generator), value)


def _write_deque(target: collections.deque, value: collections.deque) -> None:
    collections.deque.clear(target)
    collections.deque.extend(target, value)


def _write_array(target: np.ndarray, value: np.ndarray) -> None:
    np.ndarray.view(target, np.ndarray)[...] = value


# How contents are written into objects of these classes; those of the other classes never change.
_WRITERS: dict[type, Callable[[Any, Any], None]] = {
    set: values.fill_set,
    collections.deque: _write_deque,
    np.ndarray: _write_array,
    random.Random: lambda target, value: random.Random.setstate(target, value.getstate()),
    np.random.Generator: _write_generator,
    np.random.RandomState: lambda target, value: target.set_state(value.get_state(legacy=False)),
}


def edges_of_items(container: Any, path: str) -> Iterator[Edge]:
    """Yields the items of a list, tuple or dict."""
    if isinstance(container, dict):
        for number, (key, item) in enumerate(dict.items(container)):
            is_plain = values.is_value(key)
            step = f"[{values.mark(key)}]" if is_plain else f"[key {number}]"
            yield Edge(path + step, item, Place("item", container, key))
        return
    is_list = isinstance(container, list)
    items = list.__iter__(container) if is_list else tuple.__iter__(container)
    for number, item in enumerate(items):
        place = Place("item" if is_list else "fixed", container, number)
        yield Edge(f"{path}[{number}]", item, place)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the `__dict__` of an object, without running its code; None if it has none."""
    descriptor = _dict_descriptor(type(value))
    return None if descriptor is None else descriptor.__get__(value)


@functools.cache
def _dict_descriptor(kind: type) -> Any:
    for base in kind.__mro__:
        descriptor = vars(base).get("__dict__")
        if isinstance(descriptor, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            return descriptor
    return None


def edges_of_object(value: Any, path: str, skip: Iterable[str] = ()) -> list[Edge]:
    """Returns the attributes of an object, and its class if that is the user's own.

    skip: names that are not followed, in addition to those that its class lists in `_not_state`.
    """
    kind = type(value)
    skipped = {*not_state(kind), *skip}
    attributes = dict(attributes_of(value) or ())
    for name in slots_of(kind):
        member = getattr(kind, name, None)
        # a member descriptor reads memory, and runs nobody's code
        if isinstance(member, types.MemberDescriptorType):
            try:
                attributes[name] = member.__get__(value, kind)
            except AttributeError:
                continue
    edges = []
    for name in sorted(attributes, key=str):
        if name in skipped:
            continue
        step = name
        if is_cached_property(kind, name):
            if not values.is_value(attributes[name]):
                continue  # it is computed again from what it was computed from
            step = f"{CACHED}.{name}"
        edges.append(Edge(f"{path}.{step}", attributes[name], Place("attribute", value, name)))
    if is_own_class(kind):
        edges.append(Edge(class_path(kind), kind, Place("fixed", value, "__class__")))
    return edges


def edges_of_host(host: Any, path: str) -> list[Edge]:
    """Returns the attributes that the user's code has set on an object that isn't looked into.

    For example, a counter in a subclass of a thread, or a mask on a parameter.
    """
    kind = type(host)
    extra: Iterable[Edge] = _extra_edges[kind](host, path) if kind in _extra_edges else ()
    if isinstance(host, BaseException) and values.is_value(host.args):
        extra = [Edge(f"{path}.args", host.args, Place("attribute", host, "args"))]
    if not attributes_of(host) and not is_own_class(kind):
        return [*extra]
    return [*extra, *edges_of_object(host, path, names_set_by(kind))]


@functools.cache
def names_set_by(kind: type) -> frozenset[str]:
    """Returns the names of the attributes that the code of a class and its bases sets on its
    objects, without what the user's own classes among them set.
    """
    names: set[str] = set()
    for base in kind.__mro__:
        if is_own_class(base):
            continue
        names.update(_HOST_NAMES.get(f"{base.__module__}.{base.__qualname__}", ()))
        names.update(vars(base).get("__annotations__", ()))
        names.update(_slots_in(base))
        for value in vars(base).values():
            for function in (_code_of(value), getattr(value, "fset", None)):
                inner = getattr(function, "__wrapped__", function)  # of a decorated method
                code = getattr(inner, "__code__", None)
                if isinstance(code, types.CodeType):
                    names.update(_names_stored_in(code))
    return frozenset(names)


# Names that no code of Python sets, by class.
_HOST_NAMES = {
    "enum.Enum": ("_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_"),
    "torch.nn.parameter.Parameter": ("persistent", "_is_buffer"),
    "torch.Tensor": ("persistent", "_is_buffer"),
}


def _names_stored_in(code: types.CodeType) -> set[str]:
    """Returns the attributes that code and the functions inside it set."""
    stores = (one.argval for one in dis.get_instructions(code) if one.opname == "STORE_ATTR")
    names = set(stores)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names |= _names_stored_in(inner)
    return names


@functools.cache
def is_cached_property(kind: type, name: str) -> bool:
    """Tells whether an attribute of a class is computed from others when it is first read."""
    return any(isinstance(vars(base).get(name), functools.cached_property) for base in kind.__mro__)


@functools.cache
def not_state(kind: type) -> frozenset[str]:
    """Returns the attributes that a class and its bases list as no state."""
    names: set[str] = set()
    for base in kind.__mro__:
        names.update(vars(base).get("_not_state", ()))
        names.update(_NO_STATE_OF.get(base.__name__, ()))
    return frozenset(names)


# Attributes of classes in other packages that are not state, by class. This one is a hash() of
# strings, which differs in each Python process.
_NO_STATE_OF = {"GenerationConfig": ("_original_object_hash",)}


@functools.cache
def slots_of(kind: type) -> tuple[str, ...]:
    """Returns the names in `__slots__` of a class and its bases, as attributes are called."""
    names = [name for base in kind.__mro__ for name in _slots_in(base)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _slots_in(kind: type) -> Iterator[str]:
    """Yields the names in `__slots__` of one class, as attributes are called."""
    slots = vars(kind).get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        is_private = name.startswith("__") and not name.endswith("__")
        yield f"_{kind.__name__.lstrip('_')}{name}" if is_private else name


def class_path(kind: type) -> str:
    """Returns the path of a class: it is the same wherever the class is met."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _edges_of_type(kind: type, path: str) -> Iterator[Edge]:
    """Yields the attributes of a user's own class, and its bases that are the user's own.

    Functions among them are followed to the globals that they name.
    """
    if not is_own_class(kind) or issubclass(kind, enum.Enum):
        return
    skipped = not_state(kind)
    meta = type(kind)
    if is_own_class(meta):
        yield Edge(class_path(meta), meta, Place("fixed", kind, "__class__"))
    for name, value in sorted(vars(kind).items()):
        if name in _NOT_FOLLOWED_IN_CLASSES:
            continue
        if name == "__repr__":  # a dataclass remembers in it which objects are being shown
            continue
        if name.startswith("__") and not callable(value):
            continue
        if isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            continue
        if name not in skipped:
            value = _code_of(value)
            yield Edge(f"{path}.{name}", value, Place("attribute", kind, name))
    for base in kind.__bases__:
        if is_own_class(base):
            yield Edge(class_path(base), base, Place("fixed", kind, "__bases__"))


_NOT_FOLLOWED_IN_CLASSES = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__slots__", "_not_state", "_abc_impl"}
)


def _code_of(value: Any) -> Any:
    """Returns the function behind a static method, class method or property."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return value


def _edges_of_function(function: Any, path: str) -> Iterator[Edge]:
    if isinstance(function, functools.partial):
        yield Edge(f"{path}.func", function.func, Place("fixed", function, "func"))
        yield from edges_of_items(function.args, f"{path}.args")
        for name, value in function.keywords.items():
            yield Edge(f"{path}.keywords[{name!r}]", value, Place("item", function.keywords, name))
        return
    if isinstance(function, functools._lru_cache_wrapper):
        inner = function.__wrapped__
        yield Edge(f"{path}.__wrapped__", inner, Place("fixed", function, "__wrapped__"))
        return
    if is_bound(function):
        yield Edge(f"{path}.__self__", function.__self__, Place("fixed", function, "__self__"))
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # it is empty
            continue
        yield Edge(f"{path}.<closure>.{name}", value, Place("cell", cell, name))
    yield from edges_of_items(function.__defaults__ or (), f"{path}.<defaults>")
    yield from edges_of_items(function.__kwdefaults__ or {}, f"{path}.<defaults>")
    if is_own_file(function.__code__.co_filename):
        for name, value in sorted(vars(function).items()):
            yield Edge(f"{path}.{name}", value, Place("attribute", function, name))
        yield from _edges_of_globals(function)
        yield from _edges_of_environment(function)


def _edges_of_environment(function: types.FunctionType) -> Iterator[Edge]:
    """Yields the variables of the environment that a user's own function names, if it uses the
    environment at all; None stands for one that is not set.
    """
    names, attributes_read, _ = names_in(function.__code__)
    if "environ" not in names and "environ" not in attributes_read:
        return
    globals_read = (function.__globals__.get(name) for name in names)
    texts = {*_texts_in(function.__code__), *(one for one in globals_read if type(one) is str)}
    for name in sorted(filter(_VARIABLE.fullmatch, texts)):
        place = Place("variable", os.environ, name)
        yield Edge(f"os:environ[{name!r}]", os.environ.get(name), place)


def _texts_in(code: types.CodeType) -> set[str]:
    """Returns the strings in code and in the functions inside it."""
    texts = {one for one in code.co_consts if type(one) is str}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            texts |= _texts_in(inner)
    return texts


def _edges_of_globals(function: types.FunctionType) -> Iterator[Edge]:
    """Yields the globals that a user's own function names, and those of the user's own modules
    that it reads as attributes. If it reads globals by a string, as in `globals()["rate"]`, it may
    mean each number, string, array or container of its module.
    """
    names, attributes, imports = names_in(function.__code__)
    space = function.__globals__
    home = space.get("__name__", "?")
    modules = {}
    for name in names:
        if name not in space:
            continue
        value = space[name]
        if isinstance(value, types.ModuleType):
            modules[value.__name__] = value
        else:
            yield Edge(f"{home}:{name}", value, Place("global", space, name))
    package = space.get("__package__") or ""
    for name in imports:
        for full_name in (name, f"{package}.{name}"):
            if full_name in sys.modules:
                modules[full_name] = sys.modules[full_name]
    for _, module in sorted(modules.items()):
        for attribute in attributes if is_own_module(module) else ():
            if attribute in vars(module):
                inner = vars(module)[attribute]
                place = Place("global", vars(module), attribute)
                yield Edge(f"{module.__name__}:{attribute}", inner, place)
    reads_by_string = "globals" in names or "modules" in attributes
    if reads_by_string:
        yield from _edges_of_values_in(space, home)


def is_own_module(module: types.ModuleType) -> bool:
    """Tells whether a module is a file of the user's own."""
    return is_own_file(getattr(module, "__file__", None) or "<frozen")


def _edges_of_module(module: types.ModuleType, path: str) -> Iterator[Edge]:
    """Yields the globals of a module that are values."""
    return _edges_of_values_in(vars(module), module.__name__)


def _edges_of_values_in(space: dict[str, Any], home: str) -> Iterator[Edge]:
    for name, value in sorted(space.items()):
        if not name.startswith("__") and values.is_value(value):
            yield Edge(f"{home}:{name}", value, Place("global", space, name))


register_edges(types.ModuleType, _edges_of_module)


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Returns the globals that code and the functions inside it name, the attributes that they
    read, and the modules that they import, sorted.
    """
    names: set[str] = set()
    attributes: set[str] = set()
    imports: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOADS:
            names.add(instruction.argval)
        elif instruction.opname in _ATTRIBUTES:
            attributes.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            imports.add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            inner_names, inner_attributes, inner_imports = names_in(inner)
            names.update(inner_names)
            attributes.update(inner_attributes)
            imports.update(inner_imports)
    return tuple(sorted(names)), tuple(sorted(attributes)), tuple(sorted(imports))
