"""Values: what a checkpoint can hold, as JSON and arrays, and how two of them are compared.

A value is a number, a string, an array, a random number generator, or a container of values. A
container is a list, tuple, dict, set, deque or one of their relatives in the standard library, with
values of any kind as keys.

    encode(value, arrays, path)   JSON, with arrays put aside
    decode(node, arrays)          the value again, without pickle
    mark(value)                   a string that is equal for equal values, in every process

Other rooms add kinds of arrays and numbers (`register`), so nothing here imports their packages.
"""

from __future__ import annotations

import array as array_module
import collections
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import json
import math
import operator
import pathlib
import random
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core import fingerprint

JSON_DIGITS = 15  # decimal digits of integers that every reader of JSON keeps
LONG_MARK = 200  # characters of a mark; longer ones are hashed
MOST_BITS = 10_000  # of an integer in a mark; Python prints no much longer ones in decimal
_TABLE_SIZES = (0, 16, 64, 256, 1024, 4096)  # of sets: additional items that they had
DEPTH = 40  # containers inside one another that are followed

_DTYPE = re.compile(r"[<>|=][A-Za-z]\d+(\[\d*[A-Za-z]+\])?")
PLAIN = frozenset({bool, int, float, str, type(None)})
_ODD = "surrogatepass"  # encodes and decodes strings with surrogates
_TAG = "\0"  # starts the only key of a JSON object that stands for something else


class NotAValue(TypeError):
    """Raised by `encode`: something is no value, and so not kept by checkpoints."""


class Kind(NamedTuple):
    """A kind of value that JSON does not have.

    Attributes:
        name: in checkpoints.
        types: whose objects are of the kind, exactly.
        parts: a function of the value that returns simpler values: numbers, strings, arrays,
            lists.
        build: the inverse function.
        put: a function of (object, value) that writes a value into an object of the kind, and
            returns False if it can't. None: objects of the kind can't be written into.
        mark: a function of the value that returns a string, instead of that of the parts. It must
            be equal for equal values.
        fits: a function of an object of these types that returns False if it is no value all the
            same. None: all are values.
        is_opaque_else: True if an object that doesn't fit has content that nothing can look at.
    """

    name: str
    types: tuple[type, ...]
    parts: Callable[[Any], Any]
    build: Callable[[Any], Any]
    put: Callable[[Any, Any], bool] | None = None
    mark: Callable[[Any], str] | None = None
    fits: Callable[[Any], bool] | None = None
    is_opaque_else: bool = False


_kinds: dict[type, Kind] = {}
_by_name: dict[str, Kind] = {}


def register(kind: Kind) -> None:
    """Adds a kind of value."""
    _by_name[kind.name] = kind
    for one in kind.types:
        _kinds[one] = kind


_tracked: dict[type, Callable[[Any], bool]] = {}


def register_tracked(kind: type, is_tracked: Callable[[Any], bool]) -> None:
    """Sets which values of a class other objects may hold, such as an optimizer its parameters.

    In a list, tuple or dict they are written one by one, each into the object that is there.
    """
    _tracked[kind] = is_tracked


def is_tracked(value: Any) -> bool:
    """Tells whether other objects may hold a value, so that no new one may take its place."""
    test = _tracked.get(type(value))
    return test is not None and test(value)


_remarks: dict[type, Callable[[Any], str]] = {}


def register_remark(kind: type, remark: Callable[[Any], str]) -> None:
    """Sets what is special about objects of a class that are no values, for messages."""
    _remarks[kind] = remark


def remark_on(one: Any) -> str:
    """Returns what is special about an object that is no value, in brackets; "" for nothing."""
    remark = _remarks[type(one)](one) if type(one) in _remarks else ""
    return f" ({remark})" if remark else ""


def kind_of(value: Any) -> Kind | None:
    """Returns the kind of a value; None for numbers and strings of JSON, and for other objects."""
    kind = _kinds.get(type(value))
    if kind is None and isinstance(value, np.generic):
        kind = _by_name["number"]
    if kind is None and isinstance(value, np.dtype):
        kind = _by_name["dtype"]
    if kind is not None and kind.fits is not None and not kind.fits(value):
        return None
    return kind


def is_opaque(value: Any) -> bool:
    """Tells whether an object is of a registered type, and has content that no kind can read."""
    kind = _kinds.get(type(value))
    if kind is None or kind.fits is None or not kind.is_opaque_else:
        return False
    return not kind.fits(value)


# --- is it a value? -------------------------------------------------------------------------


def is_value(value: Any) -> bool:
    """Tells whether `encode` takes a value.

    For example, True for {"rate": 0.1, 3: np.zeros(2)}. False for a list of modules, and for a list
    that contains itself.
    """
    return _is_value(value, 0, {})


def _is_value(value: Any, depth: int, looked_into: dict[int, bool]) -> bool:
    """Tells whether `encode` takes a value inside others.

    looked_into: the result by id of each container, and False while its items are looked at. So
    a container that leads back to itself is no value.
    """
    kind = type(value)
    if kind in PLAIN:
        return True
    if kind in _CONTAINERS or is_named_tuple(value):
        identity = id(value)
        if identity not in looked_into:
            looked_into[identity] = False
            looked_into[identity] = depth < DEPTH and _has_values(value, depth, looked_into)
        return looked_into[identity]
    if kind is np.ndarray:
        return _is_known_dtype(value.dtype)
    if isinstance(value, enum.Enum):
        return True
    return kind_of(value) is not None


def _has_values(container: Any, depth: int, looked_into: dict[int, bool]) -> bool:
    """Tells whether a container holds nothing but values."""
    kind = _CONTAINERS.get(type(container))
    if kind is not None and kind.fits is not None and not kind.fits(container):
        return False
    if isinstance(container, dict) and not all(map(is_immutable, container)):
        return False  # a tensor as a key stands for itself, not for its numbers
    items = _items_of(container)
    # the types of a long list of numbers are found without a loop in Python
    types = set(map(type, items))
    return types <= PLAIN or all(_is_value(item, depth + 1, looked_into) for item in items)


def is_container(value: Any) -> bool:
    """Tells whether a value is a container whose items `is_value` looks at."""
    return type(value) in _CONTAINERS or is_named_tuple(value)


def is_named_tuple(value: Any) -> bool:
    """Tells whether a value is a named tuple of a class that `decode` can look up."""
    kind = type(value)
    if not isinstance(value, tuple) or kind is tuple or not hasattr(kind, "_fields"):
        return False
    return not hasattr(value, "__dict__") and class_called(qualified_name(kind)) is kind


def is_immutable(value: Any) -> bool:
    """Tells whether a value can't change, so that several owners of it share nothing."""
    if isinstance(value, (*PLAIN, tuple, frozenset, enum.Enum)):
        return True
    kind = kind_of(value)
    return kind is not None and kind.put is None


def _items_of(container: Any) -> Iterable[Any]:
    """Returns the items of a container; for a dict its keys and its values."""
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return container


# --- as JSON ----------------------------------------------------------------------------------


def encode(value: Any, arrays: dict[str, np.ndarray], path: str) -> Any:
    """Returns a value as JSON has it, and puts its arrays into `arrays`.

    Args:
        arrays: receives arrays under names that start with `path`.
        path: where the value is, for these names and for messages.

    Raises:
        NotAValue: It can't be encoded.
    """
    kind = type(value)
    if kind in PLAIN:
        return _encode_plain(value)
    if kind is list:
        return [encode(item, arrays, f"{path}[{i}]") for i, item in enumerate(value)]
    if kind is dict and all(map(_is_json_key, value)):
        return {key: encode(item, arrays, f"{path}.{key}") for key, item in value.items()}
    if kind is np.ndarray and _is_known_dtype(value.dtype):
        return _encode_array(value, arrays, path)
    if isinstance(value, enum.Flag):
        return {f"{_TAG}flag": [qualified_name(kind), value.value]}
    if isinstance(value, enum.Enum):
        return {f"{_TAG}enum": [qualified_name(kind), value.name]}
    if is_named_tuple(value):
        items = [encode(item, arrays, f"{path}[{i}]") for i, item in enumerate(value)]
        return {f"{_TAG}named tuple": [qualified_name(kind), items]}
    container = _CONTAINERS.get(kind)
    if container is not None:
        return {f"{_TAG}{container.name}": encode(container.parts(value), arrays, path)}
    other = kind_of(value)
    if other is None:
        raise NotAValue(f"{path} is a {qualified_name(kind)}")
    return {f"{_TAG}{other.name}": encode(other.parts(value), arrays, path)}


def _encode_plain(value: bool | int | float | str | None) -> Any:
    if type(value) is str and not is_text(value):
        return {f"{_TAG}str": value.encode("utf-8", _ODD).hex()}
    if type(value) is int and abs(value) >= 10**JSON_DIGITS:
        return {f"{_TAG}int": hex(value)}
    if type(value) is float and not math.isfinite(value):
        return {f"{_TAG}float": repr(value)}
    return value


def _is_json_key(key: Any) -> bool:
    return type(key) is str and key[:1] != _TAG and is_text(key)


def is_text(text: str) -> bool:
    """Tells whether UTF-8 can hold a string. It has no surrogates, which Python puts into the names
    of files whose bytes are no UTF-8.
    """
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_array(array: np.ndarray, arrays: dict[str, np.ndarray], path: str) -> dict[str, Any]:
    name = _array_name(path, arrays)
    is_plain = array.dtype.kind in "fiub" and array.dtype.isnative and array.dtype.itemsize <= 8
    if is_plain and array.size:
        arrays[name] = np.asarray(array, order="C")
    else:
        arrays[name] = np.frombuffer(array.tobytes(), np.uint8)
    return {f"{_TAG}array": [name, _form_of(array.dtype), list(array.shape)]}


def array_name_in(node: Mapping[str, Any]) -> str | None:
    """Returns the name of the array that a JSON object stands for; None if it is another object."""
    reference = node.get(f"{_TAG}array")
    return None if reference is None else reference[0]


def _form_of(dtype: np.dtype) -> Any:
    """Returns a dtype as JSON has it: a string, or the fields of a structured dtype."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_form_of(base), list(shape)]
    if dtype.fields is None:
        return dtype.str
    fields = [dtype.fields[name] for name in dtype.names or ()]
    return {
        "names": list(dtype.names or ()),
        "formats": [_form_of(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
    }


def _dtype_of(form: Any) -> np.dtype:
    """Returns the dtype that `_form_of` was given.

    Raises TypeError, ValueError: it is nothing that `_form_of` returns, or holds objects.
    """
    if isinstance(form, list):
        base, shape = form
        return np.dtype((_dtype_of(base), tuple(shape)))
    if isinstance(form, dict):
        form = {**form, "formats": [_dtype_of(one) for one in form["formats"]]}
    elif not _DTYPE.fullmatch(form):  # NumPy evaluates other strings
        raise ValueError(f"{form} is not a dtype")
    dtype = np.dtype(form)
    if dtype.hasobject:
        raise ValueError(f"the dtype {dtype} holds objects")
    return dtype


@functools.lru_cache(maxsize=256)
def _is_known_dtype(dtype: np.dtype) -> bool:
    """Tells whether the bytes of an array and the dtype's form are all of its numbers."""
    return not dtype.hasobject and _dtype_of(_form_of(dtype)) == dtype


def _array_name(path: str, arrays: dict[str, np.ndarray]) -> str:
    """Returns a name for an array that a checkpoint allows and that is not used yet."""
    if len(path) > 200:
        path = f"{path[:160]}...{hashlib.sha256(path.encode()).hexdigest()[:16]}"
    name = path
    number = 1
    while name in arrays:
        number += 1
        name = f"{path}#{number}"
    return name


def decode(node: Any, arrays: Mapping[str, Any]) -> Any:
    """Returns the value that `encode` was given.

    Args:
        node: what `encode` returned, or what came back from JSON.
        arrays: by name, as `encode` has filled them.

    Raises:
        KeyError, TypeError, ValueError: It is nothing that `encode` returns.
    """
    try:
        return _decode(node, arrays)
    except (KeyError, TypeError, ValueError):
        raise
    except Exception as problem:  # what builds a value has errors of its own
        raise ValueError(f"{to_text(node)}: {type(problem).__name__}: {problem}") from problem


def _decode(node: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_decode(item, arrays) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) != 1 or not next(iter(node)).startswith(_TAG):
        return {key: _decode(item, arrays) for key, item in node.items()}
    ((tag, inner),) = node.items()
    name = tag[len(_TAG) :]
    if name == "int":
        return int(inner, 16)
    if name == "float":
        return float(inner)
    if name == "str":
        return bytes.fromhex(inner).decode("utf-8", _ODD)
    if name == "array":
        return _decode_array(inner, arrays)
    if name == "enum":
        class_name, member = inner
        return _enum_called(class_name)[member]
    if name == "flag":
        class_name, number = inner
        return _flag_of(_enum_called(class_name), number)
    if name == "named tuple":
        class_name, items = inner
        return build_named_tuple(class_name, [_decode(item, arrays) for item in items])
    parts = _decode(inner, arrays)
    if name in _containers_by_name:
        return _containers_by_name[name].build(parts)
    return _by_name[name].build(parts)


def class_called(name: str) -> Any:
    """Returns what the program has under a qualified name; None if there is nothing."""
    home = name
    while home not in sys.modules and "." in home:
        home = home.rpartition(".")[0]
    one: Any = sys.modules.get(home)
    for part in name[len(home) + 1 :].split("."):
        one = vars(one).get(part) if hasattr(one, "__dict__") else None
    return one


def _enum_called(name: str) -> type[enum.Enum]:
    """Returns an enum that the program has already, by its qualified name.

    Raises ValueError: there is none.
    """
    one = class_called(name)
    if not (isinstance(one, type) and issubclass(one, enum.Enum)):
        raise ValueError(f"the program has no enum {name}")
    return one


def _flag_of(kind: type[enum.Enum], number: Any) -> enum.Enum:
    if not issubclass(kind, enum.Flag) or type(number) is not int:
        raise ValueError(f"{kind.__qualname__} has no flag {number!r}")
    return kind(number)


def build_named_tuple(name: str, items: list[Any]) -> tuple:
    """Returns a named tuple of a class that the program has already, without calling the class.

    Raises ValueError: there is no such class, or it has other fields.
    """
    one = class_called(name)
    is_class = isinstance(one, type) and issubclass(one, tuple)
    if not is_class or len(getattr(one, "_fields", ())) != len(items) or not items:
        raise ValueError(f"the program has no named tuple {name} of {len(items)} fields")
    return tuple.__new__(one, items)


def _decode_array(inner: Any, arrays: Mapping[str, Any]) -> np.ndarray:
    name, form, shape = inner
    stored = np.asarray(arrays[name])
    array = np.empty(shape, _dtype_of(form))
    if array.nbytes != stored.nbytes:
        raise ValueError(f"{name} has {stored.nbytes} bytes instead of {array.nbytes}")
    if array.nbytes:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(stored.tobytes(), np.uint8)
    return array


# --- compared ---------------------------------------------------------------------------------


def mark(value: Any) -> str:
    """Returns a string that is equal for equal values, whatever the process or rank.

    Its length is limited: long marks are hashed, and arrays are marked by their fingerprint
    (core/fingerprint.py). For example, 0.1 and np.float64(0.1) have two marks, because a type
    belongs to its value.
    """
    text = _mark(value)
    if len(text) > LONG_MARK:
        return f"{text[:40]}...{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:24]}"
    return text


def _mark(value: Any) -> str:
    kind = type(value)
    if kind is int and value.bit_length() > MOST_BITS:
        return hex(value)
    if kind in PLAIN:
        return repr(value)
    if kind in _CONTAINERS:
        return _mark_container(value)
    if kind is np.ndarray:
        return mark_array(value)
    if isinstance(value, enum.Flag):
        return f"{qualified_name(kind)}({value.value})"
    if isinstance(value, enum.Enum):
        return f"{qualified_name(kind)}.{value.name}"
    if is_named_tuple(value):
        return f"{qualified_name(kind)}({', '.join(map(_mark, value))})"
    other = kind_of(value)
    if other is None:
        return f"<{qualified_name(kind)}>"
    if other.mark is not None:
        return other.mark(value)
    return f"{other.name}({_mark(other.parts(value))})"


def _mark_container(container: Any) -> str:
    kind = type(container)
    if kind in (list, dict, tuple) and set(map(type, _items_of(container))) <= PLAIN:
        try:
            return repr(container)
        except ValueError:  # Python does not print an integer in it
            pass
    items = container.items() if isinstance(container, dict) else container
    parts = list(map(_mark, _items_of_set(items) if kind in (set, frozenset) else items))
    if kind is collections.deque:
        parts.append(f"maxlen {container.maxlen}")
    if kind is collections.defaultdict:
        parts.append(f"new {qualified_name(container.default_factory)}")
    return f"{_CONTAINERS[kind].name}({', '.join(parts)})"


def mark_array(array: np.ndarray) -> str:
    """Returns the mark of an array: dtype, shape, and a fingerprint of its bytes."""
    dtype = array.dtype
    if dtype.fields is not None:  # the bytes between fields are no numbers
        names = dtype.names or ()
        fields = ", ".join(mark_array(np.asarray(array[name])) for name in names)
        return f"array({json.dumps(_form_of(dtype))}, {array.shape}, {fields})"
    if dtype.char in "gG" and dtype.itemsize > 8:  # so are some bytes of these
        digits = " ".join(map(repr, array.reshape(-1)))
        return f"array({dtype.str}, {array.shape}, {hashlib.sha256(digits.encode()).hexdigest()})"
    # an array of strings of no characters has no bytes to look at
    bits = fingerprint.of_bytes(array) if array.nbytes else 0
    return f"array({dtype.str}, {array.shape}, {bits:016x})"


# --- written into what is there ------------------------------------------------------------------


def put_into(target: Any, value: Any) -> bool:
    """Writes a value into the object that is there, so that others who hold it see it too.

    Returns False if the object can't take it: numbers and strings, and objects of other types.
    """
    if type(target) is not type(value):
        return False
    container = _CONTAINERS.get(type(target))
    if container is not None:
        return container.put is not None and container.put(target, value)
    if isinstance(target, np.ndarray):
        same_form = target.shape == value.shape and target.dtype == value.dtype
        if same_form and target.flags.writeable:
            target[...] = value
        return same_form and target.flags.writeable
    kind = kind_of(target)
    return kind is not None and kind.put is not None and kind.put(target, value)


def qualified_name(one: Any) -> str:
    """Returns the module and name of a class or function, for example "torch.nn.Linear"."""
    module = getattr(one, "__module__", None) or ""
    name = getattr(one, "__qualname__", None) or getattr(one, "__name__", type(one).__name__)
    return f"{module}.{name}" if module and module != "builtins" else str(name)


# --- containers ---------------------------------------------------------------------------------


def _put_list(target: list, value: list) -> bool:
    target[:] = value
    return True


def _put_dict(target: dict, value: dict) -> bool:
    target.clear()
    target.update(value)
    return True


def fill_set(target: set, items: Iterable[Any]) -> None:
    """Makes a set hold these items, and return them in this order if that is possible.

    The order of a set depends on its table. The table grows with the items that a set holds, and
    stays large when they are gone. So several sizes are tried.
    """
    ordered_items = list(items)
    can_be_ordered = all(map(_has_fixed_hash, ordered_items))
    for size in _TABLE_SIZES if can_be_ordered else _TABLE_SIZES[:1]:
        set.clear(target)
        set.update(target, ordered_items)  # one by one, because it is a list
        placeholders = [_Placeholder(number) for number in range(size)]
        set.update(target, placeholders)
        set.difference_update(target, placeholders)
        if _are_same(set.__iter__(target), ordered_items):
            return


class _Placeholder:
    """An item that a set holds for a moment. It is put at the end of the set's table."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return -2 - self.number


def keeps_order(value: Any) -> bool:
    """Tells whether the sets in a value return their items in the same order after `decode`.

    True for sets whose order is another one in each process, as for strings.
    """
    if type(value) in (set, frozenset):
        is_ordered = len(value) > 1 and all(map(_has_fixed_hash, value))
        return not is_ordered or _are_same(copy_of_set(value), value)
    if isinstance(value, dict):
        return all(map(keeps_order, value.values()))
    return not isinstance(value, (list, tuple)) or all(map(keeps_order, value))


def _are_same(first: Iterable[Any], second: Iterable[Any]) -> bool:
    """Tells whether two collections of equal length return the same objects in the same order."""
    return all(map(operator.is_, first, second))


def _has_fixed_hash(item: Any) -> bool:
    """Tells whether the hash of an item is the same in each process."""
    if isinstance(item, tuple):
        return all(map(_has_fixed_hash, item))
    # NaN has the hash of its address
    return isinstance(item, (bool, int, float, complex, np.number, np.bool_)) and item == item


def _items_of_set(value: Iterable[Any]) -> list[Any]:
    """Returns the items of a set in its own order, or sorted if that differs in each process."""
    items = list(value)
    return items if all(map(_has_fixed_hash, items)) else sorted(items, key=_mark)


def copy_of_set(items: Iterable[Any]) -> set:
    """Returns a set with these items, in this order if that is possible."""
    value: set[Any] = set()
    fill_set(value, items)
    return value


def _put_set(target: set, value: set) -> bool:
    fill_set(target, value)
    return True


def _put_deque(target: collections.deque, value: collections.deque) -> bool:
    if target.maxlen != value.maxlen:
        return False
    target.clear()
    target.extend(value)
    return True


def _put_default_dict(target: collections.defaultdict, value: collections.defaultdict) -> bool:
    if target.default_factory is not value.default_factory:
        return False
    return _put_dict(target, value)


def _build_default_dict(parts: list[Any]) -> collections.defaultdict:
    factory, pairs = parts
    return collections.defaultdict(_FACTORIES[factory], map(tuple, pairs))


def _put_array(target: array_module.array, value: array_module.array) -> bool:
    if target.typecode != value.typecode:
        return False
    target[:] = value
    return True


def _put_bytes(target: bytearray, value: bytearray) -> bool:
    target[:] = value
    return True


def _pairs(value: dict) -> list[list[Any]]:
    return [[key, item] for key, item in value.items()]


# Functions that create new items of a defaultdict, by name.
_FACTORIES: dict[str, Any] = {
    "None": None,
    **{one.__name__: one for one in (bool, int, float, str, list, dict, set, tuple)},
    **{one.__name__: one for one in (collections.deque, collections.Counter)},
}


def _name_of_factory(value: collections.defaultdict) -> str:
    return next(name for name, one in _FACTORIES.items() if one is value.default_factory)


_CONTAINERS: dict[type, Kind] = {
    kind.types[0]: kind
    for kind in (
        Kind("list", (list,), list, list, _put_list),
        Kind("tuple", (tuple,), list, tuple),
        Kind("dict", (dict,), _pairs, lambda pairs: dict(map(tuple, pairs)), _put_dict),
        Kind("set", (set,), _items_of_set, copy_of_set, _put_set),
        Kind("frozenset", (frozenset,), _items_of_set, lambda items: frozenset(copy_of_set(items))),
        Kind(
            "deque",
            (collections.deque,),
            lambda value: [value.maxlen, list(value)],
            lambda parts: collections.deque(parts[1], parts[0]),
            _put_deque,
        ),
        Kind(
            "Counter",
            (collections.Counter,),
            _pairs,
            lambda pairs: collections.Counter(dict(map(tuple, pairs))),
            _put_dict,
        ),
        Kind(
            "OrderedDict",
            (collections.OrderedDict,),
            _pairs,
            lambda pairs: collections.OrderedDict(map(tuple, pairs)),
            _put_dict,
        ),
        # With another function for new items it is looked into, item by item.
        Kind(
            "defaultdict",
            (collections.defaultdict,),
            lambda value: [_name_of_factory(value), _pairs(value)],
            _build_default_dict,
            _put_default_dict,
            fits=lambda value: value.default_factory in _FACTORIES.values(),
        ),
    )
}
_containers_by_name = {kind.name: kind for kind in _CONTAINERS.values()}


# --- other values of the standard library and NumPy -----------------------------------------------


def _bytes_of(value: Any) -> np.ndarray:
    return np.frombuffer(bytes(value), np.uint8)


def _parts_of_number(number: np.generic) -> list[Any]:
    return [json.dumps(_form_of(number.dtype)), np.frombuffer(number.tobytes(), np.uint8)]


def _build_number(parts: list[Any]) -> Any:
    text, data = parts
    return _decode_array(["number", json.loads(text), [1]], {"number": data})[0]


def _mark_number(number: np.generic) -> str:
    if isinstance(number, np.void):
        return f"number {mark_array(np.asarray(number))}"
    return f"{number.dtype.str} {number!r}"


_PATHS = {
    **{one.__name__: one for one in (pathlib.PurePosixPath, pathlib.PureWindowsPath)},
    "Path": type(pathlib.Path()),
}


def _parts_of_path(path: pathlib.PurePath) -> list[str]:
    return [next(name for name, one in _PATHS.items() if one is type(path)), str(path)]


def _build_path(parts: list[str]) -> pathlib.PurePath:
    name, text = parts
    return _PATHS[name](text)


def _parts_of_random(generator: random.Random) -> list[Any]:
    version, numbers, gauss = generator.getstate()
    return [version, np.array(numbers, np.int64), gauss]


def _build_random(parts: list[Any]) -> random.Random:
    generator = random.Random()
    version, numbers, gauss = parts
    generator.setstate((version, tuple(numbers.tolist()), gauss))
    return generator


def _put_random(target: random.Random, value: random.Random) -> bool:
    target.setstate(value.getstate())
    return True


def _bit_generator_of(name: str) -> Any:
    """Returns a new bit generator of NumPy by the name of its class."""
    bit_generator = getattr(np.random, name)
    if not issubclass(bit_generator, np.random.BitGenerator):
        raise ValueError(f"{name} is no bit generator of NumPy")
    return bit_generator(0)


def _parts_of_seeds(seeds: np.random.SeedSequence) -> list[Any]:
    key = list(map(int, seeds.spawn_key))
    entropy = seeds.entropy
    if entropy is not None and not isinstance(entropy, int):
        entropy = [int(number) for number in entropy]
    return [entropy, key, seeds.pool_size, seeds.n_children_spawned]


def _build_seeds(parts: list[Any]) -> np.random.SeedSequence:
    entropy, key, pool_size, children = parts
    return np.random.SeedSequence(
        entropy, spawn_key=tuple(key), pool_size=pool_size, n_children_spawned=children
    )


def _put_seeds(target: np.random.SeedSequence, value: np.random.SeedSequence) -> bool:
    """Counts up the children of a seed sequence, which nothing can count down."""
    *origin, children = _parts_of_seeds(target)
    *saved_origin, saved_children = _parts_of_seeds(value)
    if origin != saved_origin or children > saved_children:
        return False
    if children < saved_children:
        target.spawn(saved_children - children)
    return True


def _seeds_of(generator: np.random.Generator) -> np.random.SeedSequence | None:
    """Returns what a generator was seeded with, from which `spawn()` makes others."""
    bit_generator = generator.bit_generator
    seeds = getattr(bit_generator, "seed_seq", getattr(bit_generator, "_seed_seq", None))
    return seeds if isinstance(seeds, np.random.SeedSequence) else None


def _parts_of_generator(generator: np.random.Generator) -> Any:
    seeds = _seeds_of(generator)
    parts = None if seeds is None else _parts_of_seeds(seeds)
    return {**generator.bit_generator.state, "seed sequence": parts}


def _build_generator(state: dict[str, Any]) -> np.random.Generator:
    bit_generator = _bit_generator_of(state["bit_generator"])
    if state.get("seed sequence") is not None:
        bit_generator = type(bit_generator)(_build_seeds(state["seed sequence"]))
    bit_generator.state = {key: part for key, part in state.items() if key != "seed sequence"}
    return np.random.Generator(bit_generator)


def _put_generator(target: np.random.Generator, value: np.random.Generator) -> bool:
    if type(target.bit_generator) is not type(value.bit_generator):
        return False
    seeds = _seeds_of(target)
    saved_seeds = _seeds_of(value)
    if seeds is not None and saved_seeds is not None:
        has_children = saved_seeds.n_children_spawned or seeds.n_children_spawned
        if has_children and not _put_seeds(seeds, saved_seeds):
            return False
    target.bit_generator.state = value.bit_generator.state
    return True


def _build_random_state(state: dict[str, Any]) -> np.random.RandomState:
    generator = np.random.RandomState(_bit_generator_of(state["bit_generator"]))
    generator.set_state(state)
    return generator


def _put_random_state(target: np.random.RandomState, value: np.random.RandomState) -> bool:
    target.set_state(value.get_state(legacy=False))
    return True


def _build_timedelta(parts: list[int]) -> datetime.timedelta:
    days, seconds, microseconds = parts
    return datetime.timedelta(days, seconds, microseconds)


for _kind in (
    Kind(
        "bytes",
        (bytes,),
        _bytes_of,
        lambda array: array.tobytes(),
    ),
    Kind(
        "bytearray", (bytearray,), _bytes_of, lambda array: bytearray(array.tobytes()), _put_bytes
    ),
    Kind(
        "array.array",
        (array_module.array,),
        lambda array: [array.typecode, _bytes_of(array.tobytes())],
        lambda parts: array_module.array(parts[0], parts[1].tobytes()),
        _put_array,
    ),
    Kind("complex", (complex,), lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    Kind(
        "number",
        (),
        _parts_of_number,
        _build_number,
        mark=_mark_number,
        fits=lambda number: _is_known_dtype(number.dtype),
    ),
    Kind(
        "dtype",
        (),
        lambda dtype: json.dumps(_form_of(dtype)),
        lambda text: _dtype_of(json.loads(text)),
        fits=_is_known_dtype,
    ),
    Kind("range", (range,), lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    Kind("slice", (slice,), lambda s: [s.start, s.stop, s.step], lambda parts: slice(*parts)),
    Kind("path", tuple(_PATHS.values()), _parts_of_path, _build_path),
    Kind("decimal", (decimal.Decimal,), str, decimal.Decimal),
    Kind("fraction", (fractions.Fraction,), str, fractions.Fraction),
    Kind("uuid", (uuid.UUID,), str, uuid.UUID),
    Kind("ellipsis", (type(...),), lambda value: 0, lambda part: ...),
    Kind("date", (datetime.date,), datetime.date.isoformat, datetime.date.fromisoformat),
    Kind("time", (datetime.time,), datetime.time.isoformat, datetime.time.fromisoformat),
    Kind(
        "datetime",
        (datetime.datetime,),
        datetime.datetime.isoformat,
        datetime.datetime.fromisoformat,
    ),
    Kind(
        "timedelta",
        (datetime.timedelta,),
        lambda delta: [delta.days, delta.seconds, delta.microseconds],
        _build_timedelta,
    ),
    Kind("random", (random.Random,), _parts_of_random, _build_random, _put_random),
    Kind(
        "generator", (np.random.Generator,), _parts_of_generator, _build_generator, _put_generator
    ),
    Kind(
        "seed sequence",
        (np.random.SeedSequence,),
        _parts_of_seeds,
        _build_seeds,
        _put_seeds,
    ),
    Kind(
        "random state",
        (np.random.RandomState,),
        lambda generator: generator.get_state(legacy=False),
        _build_random_state,
        _put_random_state,
    ),
):
    register(_kind)


def to_text(node: Any) -> str:
    """Returns encoded JSON as text, for messages: at most 60 characters."""
    text = json.dumps(node, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
