"""Settings of a model: attributes of its modules that JSON has, their modes, which parameters
are trained.

A recorded program depends on these values and a checkpoint holds those that a training has changed,
so a callback may change them while it runs. Modules may be torch's. Not among them: tensors, and
whatever else is no value of JSON.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

# in JSON: what it has no form for
_TUPLE = "\0tuple"
_FLOAT = "\0float"
OURS = ("arguments",)  # of a module: what it was made with


def is_value(value: Any) -> bool:
    """True for numbers, texts, None, and lists, tuples and dicts of such."""
    if isinstance(value, (list, tuple)):
        return all(map(is_value, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(is_value, value.values()))
    return value is None or isinstance(value, (bool, int, float, str, np.number, np.bool_))


def attributes(model: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """(key, module, name, value) of all attributes of all modules that are no parameters or
    modules; "layer.p" is the key of attribute p of module layer.
    """
    for path, module in model.named_modules():
        native = hasattr(module, "named_children") and not hasattr(module, "_parameters")
        for name, value in {"training": module.training, **vars(module)}.items():
            if name not in OURS and (native or name[0] != "_"):
                yield f"{path}.{name}" if path else name, module, name, value


def values(model: Any) -> dict[str, Any]:
    """The values of a model's attributes by their keys, of parameters PATH.requires_grad; lists,
    dicts are copies.
    """
    values_by_key = {
        key: copy.deepcopy(value) for key, _, _, value in attributes(model) if is_value(value)
    }
    values_by_key.update(
        (f"{name}.requires_grad", bool(p.requires_grad)) for name, p in model.named_parameters()
    )
    return values_by_key


def changed(current: Mapping[str, Any], previous: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what of `current` is not in `previous`, or another value there, as JSON has
    them.
    """
    return {
        k: encoded(v)
        for k, v in current.items()
        if k not in previous or encoded(previous[k]) != encoded(v)
    }


def encoded(value: Any) -> Any:
    """A value as JSON has it; `decoded` is the inverse. NumPy's numbers become Python's."""
    if isinstance(value, (np.number, np.bool_)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    if isinstance(value, tuple):
        return {_TUPLE: [encoded(v) for v in value]}
    if isinstance(value, list):
        return [encoded(v) for v in value]
    return {k: encoded(v) for k, v in value.items()} if isinstance(value, dict) else value


def decoded(value: Any) -> Any:
    """Returns what `encoded` was given. Raises ValueError: it gave no such thing."""
    if isinstance(value, list):
        return [decoded(v) for v in value]
    if isinstance(value, dict):
        if value.keys() == {_FLOAT}:
            return float(value[_FLOAT])
        if value.keys() == {_TUPLE}:
            return tuple(decoded(v) for v in value[_TUPLE])
        return {k: decoded(v) for k, v in value.items()}
    return value


def restore(model: Any, saved: Mapping[str, Any]) -> None:
    """Sets a model to values by their keys, as `values` gave them; what is that value already
    stays untouched. Raises KeyError: there is no such module or parameter; nothing was
    changed.
    """
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    targets = []
    for key, value in saved.items():
        path, _, name = key.rpartition(".")
        frozen = name == "requires_grad" and path in parameters
        targets.append((parameters[path] if frozen else modules[path], name, copy.deepcopy(value)))
    for owner, name, value in targets:
        current = getattr(owner, name, None)
        names = {"requires_grad", *getattr(owner, "__dict__", ())}  # a parameter has slots
        if is_value(current) and encoded(current) == encoded(value) and name in names:
            continue
        if type(current) is type(value) is list:  # others may hold the list itself
            current[:] = value
        elif type(current) is type(value) is dict:
            current.clear()
            current.update(value)
        else:
            setattr(owner, name, value)
