"""Random object graphs as training programs hold them, changes of them, and a description of a
graph that does not use the walk.

A graph is built from a seed, so a second process can build the same one.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import logging
import random
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from capture.random_values import Color

from odyssey.capture import mark, values

RATE = 0.5
SETTINGS: dict[str, Any] = {"depth": 3, "names": ["a", "b"]}
CALLS = itertools.count()


class Node:
    """An object with attributes of all kinds."""

    step_size = 1
    shared: list[int] = [1, 2]

    def method(self) -> float:
        return RATE * SETTINGS["depth"]


class Slotted:
    """An object with slots, private ones among them."""

    __slots__ = ("__hidden", "a", "b")

    def __init__(self) -> None:
        self.a: Any = 1
        self.__hidden: Any = 2

    def hide(self, value: Any) -> None:
        """Sets the private slot."""
        self.__hidden = value


class SlottedChild(Slotted):
    __slots__ = ("__dict__", "c")


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    items: Any = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    lr: float = 0.1
    items: Any = None


@dataclasses.dataclass(slots=True)
class Slim:
    lr: float = 0.1
    items: Any = None


class MyList(list):
    pass


class MyDict(dict):
    pass


class MySet(set):
    pass


class MyInt(int):
    pass


class MyArray(np.ndarray):
    pass


class MyRandom(random.Random):
    pass


class Stats(NamedTuple):
    mean: float
    count: int


class Mean:
    """A running mean with `state_dict()`."""

    def __init__(self) -> None:
        self._totals = {"sum": 0.0, "count": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._totals)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._totals = dict(state)


class Touched(Exception):
    """Raised by code that a walk must not run."""


TOUCHED: list[str] = []


def _touch(name: str) -> None:
    TOUCHED.append(name)
    raise Touched(name)


class Descriptor:
    def __get__(self, holder: Any, kind: Any = None) -> Any:
        if holder is not None:
            _touch("__get__")
        return self


class Shy:
    """An object whose code must not run."""

    described = Descriptor()

    def __init__(self) -> None:
        self.count = 1

    @property
    def size(self) -> int:
        _touch("property")

    def __getattr__(self, name: str) -> Any:
        _touch(f"__getattr__ {name}")

    def __eq__(self, other: object) -> bool:
        _touch("__eq__")

    def __hash__(self) -> int:
        _touch("__hash__")

    def __repr__(self) -> str:
        _touch("__repr__")

    def __len__(self) -> int:
        _touch("__len__")

    def __bool__(self) -> bool:
        _touch("__bool__")

    def __iter__(self) -> Iterator[int]:
        _touch("__iter__")

    def __call__(self) -> None:
        _touch("__call__")


class ShySlots:
    """An object without `__dict__` whose code must not run."""

    __slots__ = ("x",)

    def __getattr__(self, name: str) -> Any:
        _touch(f"__getattr__ {name}")


class ShyList(list):
    def __iter__(self) -> Iterator[Any]:
        _touch("list.__iter__")

    def __len__(self) -> int:
        _touch("list.__len__")

    def __getitem__(self, index: Any) -> Any:
        _touch("list.__getitem__")


class ShyDict(dict):
    def items(self) -> Any:
        _touch("dict.items")

    def keys(self) -> Any:
        _touch("dict.keys")

    def __iter__(self) -> Iterator[Any]:
        _touch("dict.__iter__")

    def __len__(self) -> int:
        _touch("dict.__len__")


class Pretender:
    """An object that says it is a list."""

    @property
    def __class__(self) -> type:  # noqa: PLW3201
        raise Touched("__class__")


def counter(start: int) -> Callable[[], int]:
    """Returns a function that counts in a closure."""
    count = start
    seen: list[int] = []

    def advance(by: int = 1) -> int:
        nonlocal count
        count += by
        seen.append(count)
        return count

    return advance


def reads_globals(x: float, scale: float = 2.0) -> float:
    """Returns a number that depends on globals."""
    return x * RATE * scale * SETTINGS["depth"]


def small_value(rng: random.Random) -> Any:
    """Returns a value as training programs have them."""
    choices: list[Callable[[], Any]] = [
        lambda: rng.randrange(10),
        lambda: rng.random(),
        lambda: rng.choice(["a", "b", None, True]),
        lambda: [rng.randrange(10) for _ in range(rng.randrange(4))],
        lambda: {rng.choice("abc"): rng.randrange(10), rng.randrange(5): [rng.randrange(3)]},
        lambda: np.array([rng.random() for _ in range(3)]),
        lambda: collections.deque([rng.randrange(4)], 5),
        lambda: {rng.randrange(10), "x"},
        lambda: np.float32(rng.random()),
        lambda: (rng.randrange(4), [rng.randrange(4)]),
        lambda: np.random.default_rng(rng.randrange(100)),
        lambda: random.Random(rng.randrange(100)),
        lambda: collections.defaultdict(int, {rng.choice("ab"): 1}),
        lambda: Stats(rng.random(), rng.randrange(5)),
        lambda: rng.choice(list(Color)),
        lambda: {"nested": {"deep": [np.arange(rng.randrange(1, 4))]}},
        lambda: 10 ** rng.randrange(30),
    ]
    return rng.choice(choices)()


def _new_object(kind: int, rng: random.Random) -> Any:
    classes = (Node, Slotted, SlottedChild, Config, Slim, MyList, MyDict, Mean, Node)
    return classes[kind % len(classes)]()


@dataclasses.dataclass
class Graph:
    """A random graph.

    Attributes:
        roots: objects by name, to walk from.
        nodes: all objects of the user's classes, in the order of the seed.
    """

    roots: dict[str, Any]
    nodes: list[Any]


def reset_program() -> None:
    """Sets globals and attributes of classes to what they are when the program starts."""
    global RATE
    RATE = 0.5
    SETTINGS.clear()
    SETTINGS.update({"depth": 3, "names": ["a", "b"]})
    Node.step_size = 1
    Node.shared = [1, 2]
    for name in [name for name in vars(Node) if name.startswith("extra")]:
        delattr(Node, name)


def build(seed: int, size: int = 8, order: int = 0, strange: bool = False) -> Graph:
    """Returns the graph of a seed.

    order: another order in which objects are created, which changes nothing but their ids.
    strange: with resources, and with objects whose code must not run.
    """
    reset_program()
    kinds = [random.Random(f"{seed} {number}").randrange(100) for number in range(size)]
    numbers = list(range(size))
    random.Random(order).shuffle(numbers)
    created = {n: _new_object(kinds[n], random.Random(f"{seed} {n}")) for n in numbers}
    nodes = [created[number] for number in range(size)]
    for number, node in enumerate(nodes):
        rng = random.Random(f"{seed} links {number}")
        for position in range(rng.randrange(1, 6)):
            _attach(node, f"f{position}", _content(rng, nodes, strange), rng)
    rng = random.Random(f"{seed} roots")
    roots = {"model": nodes[0], "loss": rng.choice(nodes), "optimizer": None}
    roots["metrics"] = [reads_globals, Node(), rng.choice([*nodes, counter(2), Frozen()])]
    roots["callbacks.one"] = nodes[-1]
    return Graph(roots, nodes)


def _attach(node: Any, name: str, value: Any, rng: random.Random) -> None:
    if isinstance(node, MyList):
        node.append(value)
    elif isinstance(node, MyDict):
        node[rng.choice([name, rng.randrange(9), (name, 1)])] = value
    elif type(node) is Slotted:
        setattr(node, rng.choice("ab"), value)
        node.hide(rng.randrange(9))
    elif isinstance(node, Slim):
        node.items = value
    else:
        setattr(node, rng.choice([name, f"_{name}"]), value)


def _content(rng: random.Random, nodes: list[Any], strange: bool) -> Any:
    if strange and rng.random() < 0.35:
        return _strange(rng, nodes)
    other = rng.choice(nodes)
    choices: list[Callable[[], Any]] = [
        lambda: small_value(rng),
        lambda: small_value(rng),
        lambda: other,
        lambda: [other, small_value(rng)],
        lambda: {"node": other, 3: small_value(rng)},
        lambda: (small_value(rng), other),
        lambda: counter(rng.randrange(9)),
        lambda: functools.partial(reads_globals, scale=rng.random()),
        lambda: functools.partial(counter, rng.randrange(9)),
        lambda: Frozen(rng.random(), other),
        lambda: Frozen(rng.random(), [rng.random()]),
        lambda: reads_globals,
        lambda: other.method if isinstance(other, Node) else other,
        lambda: Node,
        lambda: collections.OrderedDict(a=other, b=1),
        lambda: itertools.count(rng.randrange(5)),
    ]
    return rng.choice(choices)()


def _local_class(number: int) -> type:
    class Local:
        size = number

    return Local


def _strange(rng: random.Random, nodes: list[Any]) -> Any:
    weak = Node()
    choices: list[Callable[[], Any]] = [
        Shy,
        ShySlots,
        Pretender,
        lambda: ShyList([1, Node(), Shy()]),
        lambda: ShyDict(a=1, b=Shy()),
        lambda: {(1, Color.RED): Shy(), Color.BLUE: Node()},
        threading.Lock,
        threading.Thread,
        lambda: weakref.ref(weak),
        lambda: weakref.proxy(weak),  # of an object that is gone
        lambda: tempfile.TemporaryFile(),
        lambda: (number for number in [1, 2]),
        lambda: iter([1, 2]),
        lambda: iter({"a": 1}),
        lambda: zip([1], [2], strict=True),
        lambda: logging.getLogger("graphs"),
        lambda: sys,
        lambda: types.SimpleNamespace(a=Shy(), b=1),
        lambda: MySet([1, 2]),
        lambda: MyInt(3),
        lambda: np.arange(3.0).view(MyArray),
        lambda: np.array([1, "a", None], object),
        lambda: np.ma.masked_array([1, 2], [True, False]),
        lambda: MyRandom(3),
        lambda: memoryview(b"abc"),
        lambda: types.MappingProxyType({"a": 1}),
        lambda: _local_class(rng.randrange(9))(),
        lambda: ValueError("x"),
        lambda: print,
        lambda: len.__call__,
        lambda: Node.__dict__["method"],
        lambda: functools.lru_cache(maxsize=2)(reads_globals),
        lambda: NotImplemented,
        lambda: object(),
        lambda: type,
        lambda: Slim,
        lambda: logging.NullHandler(),
        lambda: {Node: Node()},
        lambda: staticmethod(reads_globals),
        lambda: property(reads_globals),
    ]
    return rng.choice(choices)()


# --- changes ------------------------------------------------------------------------------------


def change(graph: Graph, seed: int, times: int = 6, objects: bool = True) -> list[str]:
    """Changes a graph at random places, as a training run may; returns what was changed.

    objects: also put objects and shared values to other places.
    """
    rng = random.Random(f"change {seed}")
    log = []
    for _ in range(times):
        node = rng.choice(graph.nodes)
        log.append(_change_node(node, graph, rng, objects))
    return log


def _change_node(node: Any, graph: Graph, rng: random.Random, objects: bool) -> str:
    global RATE
    choice = rng.randrange(9 if objects else 6)
    name = type(node).__name__
    if choice == 0:
        RATE = rng.random()
        return "RATE"
    if choice == 1:
        SETTINGS[rng.choice(["depth", "more"])] = small_value(rng)
        return "SETTINGS"
    if choice == 2:
        setattr(Node, rng.choice(["step_size", "shared", "extra"]), small_value(rng))
        return "Node"
    if isinstance(node, Mean):
        node.load_state_dict({"sum": rng.random(), "count": rng.randrange(5)})
        return "Mean"
    places = list(_places_of(node))
    if choice == 3 and not isinstance(node, (MyList, Slim, Slotted)):
        _attach(node, f"new{rng.randrange(3)}", small_value(rng), rng)
        return f"new value in {name}"
    if not places:
        return "nothing"
    key, value = rng.choice(places)
    if choice == 4 and not isinstance(node, (MyList, Slim)) and values.is_value(value):
        _delete(node, key)
        return f"{name} {key!r} removed"
    if choice == 5 and values.is_value(value):
        _assign(node, key, small_value(rng))
        return f"{name} {key!r} set"
    is_code = isinstance(value, (type, types.FunctionType, functools.partial, types.MethodType))
    if choice == 6 and not is_code:
        other = rng.choice([one for one in graph.nodes if not isinstance(one, Mean)])
        _assign(node, key, rng.choice([other, None]))
        return f"{name} {key!r} is another object or None"
    if choice == 7:
        inner = [item for _, item in _places_of(rng.choice(graph.nodes)) if _is_shared(item)]
        if inner and not is_code:
            _assign(node, key, rng.choice(inner))
            return f"{name} {key!r} shares a value"
    return f"{name} {key!r}: {_change_inside(value, rng)}"


def _is_shared(value: Any) -> bool:
    return values.is_value(value) and not values.is_immutable(value)


def _places_of(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, list):
        yield from enumerate(node)
    elif isinstance(node, dict):
        yield from node.items()
    for name, value in getattr(node, "__dict__", {}).items():
        yield name, value
    for base in type(node).__mro__:
        for name in vars(base).get("__slots__", ()):
            mangled = f"_{base.__name__}{name}" if name == "__hidden" else name
            if name != "__dict__" and hasattr(node, mangled):
                yield mangled, getattr(node, mangled)


def _assign(node: Any, key: Any, value: Any) -> None:
    if isinstance(node, (list, dict)):
        node[key] = value
    else:
        setattr(node, key, value)


def _delete(node: Any, key: Any) -> None:
    if isinstance(node, dict):
        del node[key]
    else:
        delattr(node, key)


def _change_inside(value: Any, rng: random.Random) -> str:
    if isinstance(value, types.FunctionType) and value.__name__ == "advance":
        value(rng.randrange(5))
    elif isinstance(value, functools.partial) and value.func is reads_globals:
        value.keywords["scale"] = rng.random()
    elif isinstance(value, (random.Random, np.random.Generator)):
        value.random()
    elif isinstance(value, np.ndarray) and value.dtype != object:
        value += 1
    elif isinstance(value, (list, collections.deque)) and all(map(values.is_value, value)):
        value.append(rng.randrange(9))
    elif isinstance(value, list) and value:
        value[-1] = small_value(rng) if values.is_value(value[-1]) else value[-1]
    elif isinstance(value, dict):
        value[rng.choice("xyz")] = small_value(rng)
    elif isinstance(value, set):
        value.add(rng.randrange(99))
    elif isinstance(value, itertools.count):
        next(value)
    elif isinstance(value, Frozen) and isinstance(value.items, list):
        value.items.append(rng.random())
    else:
        return "nothing"
    return "changed inside"


# --- a description that does not use the walk ---------------------------------------------------


def description(graph: Graph) -> str:
    """Returns text that is equal for graphs that no program can tell apart, shared objects
    included. Entries of dicts that hold objects may have any order.
    """
    numbers: dict[int, int] = {}
    program = {"RATE": RATE, "SETTINGS": SETTINGS, "Node": dict(_class_attributes(Node))}
    return json.dumps([_describe(graph.roots, numbers), _describe(program, numbers)], indent=1)


def _class_attributes(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(kind).items():
        if not name.startswith("__") and not callable(value):
            yield name, value


def _describe(value: Any, numbers: dict[int, int]) -> Any:
    if values.is_value(value) and not isinstance(value, (list, dict)):
        if values.is_immutable(value):
            return mark(value)
    if isinstance(value, type) or value is reads_globals or value is counter:
        return value.__qualname__
    if id(value) in numbers:
        return f"the object {numbers[id(value)]}"
    if not isinstance(value, (tuple, types.MethodType)):
        numbers[id(value)] = len(numbers)
    name = type(value).__name__
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, types.MethodType):
        return [name, _describe(value.__self__, numbers)]
    if isinstance(value, functools.partial):
        return [
            name,
            *(_describe(one, numbers) for one in (value.func, value.args, value.keywords)),
        ]
    if isinstance(value, types.FunctionType):
        cells = [_describe(cell.cell_contents, numbers) for cell in value.__closure__ or ()]
        return [value.__qualname__, cells]
    parts: list[Any] = [name]
    if isinstance(value, dict):
        items = dict.items(value)
        parts.append(
            sorted([mark(k), _describe(v, numbers)] for k, v in sorted(items, key=_by_key))
        )
    elif isinstance(value, (list, tuple)):
        parts.append([_describe(item, numbers) for item in value])
    elif values.is_value(value):
        return mark(value)
    attributes = {k: v for k, v in _places_of(value) if isinstance(k, str)}
    if not isinstance(value, dict):
        parts += [[k, _describe(attributes[k], numbers)] for k in sorted(attributes)]
    return parts


def _by_key(item: tuple[Any, Any]) -> str:
    return mark(item[0])
