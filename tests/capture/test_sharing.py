"""Sharing: values that are one object at several places, and arrays that share memory, are so
again after a resume, and values that were separate are separate.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from capture.test_capture import Program


class Holder:
    """An object with values, some of them in containers.

    array: returns an array or tensor of the entries of an array of NumPy.
    """

    def __init__(self, array: Callable[[np.ndarray], Any]) -> None:
        self.own = {name: array(np.arange(12.0).reshape(3, 4) + ord(name)) for name in "abc"}
        self.lists = {name: [[1.0, 2.0], {"x": [3]}, ord(name)] for name in "abc"}
        self.array_in_list = [array(np.zeros(4)), array(np.ones(6))]
        self.row = array(np.zeros(4))
        self.first = [1, 2]
        self.second = [1, 2]


def places_of(holder: Holder) -> dict[str, tuple[Any, Any]]:
    """Returns the container and key of each place of a value that can change."""
    places = {f"own.{name}": (holder.own, name) for name in "abc"}
    places |= {f"lists.{name}[0]": (holder.lists[name], 0) for name in "abc"}
    places |= {f"array_in_list[{i}]": (holder.array_in_list, i) for i in range(2)}
    places |= {name: (vars(holder), name) for name in ("row", "first", "second")}
    return places


def library(name: str) -> Callable[[np.ndarray], Any]:
    if name == "numpy":
        return np.array
    return pytest.importorskip("torch").tensor


def is_array(value: Any) -> bool:
    return not isinstance(value, list)


def window(array: Any, draw: random.Random) -> Any:
    """Returns an array in the memory of another one."""
    kinds = [lambda x: x[1:], lambda x: x[::2], lambda x: x.T, lambda x: x.reshape(-1)[2:]]
    return draw.choice(kinds)(array)


def change(holder: Holder, draw: random.Random) -> str:
    """Lets a place share its value with another one, or gives it a value of its own."""
    places = places_of(holder)
    name, other = draw.sample(sorted(places), 2)
    container, key = places[name]
    value = places[other][0][places[other][1]]
    action = draw.choice(["share", "window", "copy", "write"])
    if is_array(value) != is_array(container[key]):
        return ""
    if action == "share":
        container[key] = value
    elif action == "window" and is_array(value) and len(value) > 2 and value.ndim == 2:
        container[key] = window(value, draw)
    elif action == "copy":
        container[key] = copy.deepcopy(value)
    elif is_array(value):
        value += 1.0
    return f"{action} {name} {other}"


def effects(holder: Holder) -> list[str]:
    """Returns for each place at which places a program sees what is written there."""
    places = places_of(holder)

    def seen() -> dict[str, str]:
        return {name: repr(container[key]) for name, (container, key) in sorted(places.items())}

    lines = []
    for name, (container, key) in sorted(places.items()):
        before = seen()
        value = container[key]
        if is_array(value):
            kept = copy.deepcopy(value)
            value *= 3.0
        else:
            value.append("written")
        after = seen()
        lines += [
            f"{name} -> {other}: {after[other]}" for other in after if after[other] != before[other]
        ]
        if is_array(value):
            value[...] = kept
        else:
            value.pop()
    return lines


@pytest.mark.parametrize("at_start", [False, True], ids=["new", "also at the start"])
@pytest.mark.parametrize("array", ["numpy", "torch"])
@pytest.mark.parametrize("block", range(2))
def test_what_values_share_is_shared_again(block, array, at_start):
    array = library(array)
    shared = 0
    for seed in range(block * 25, block * 25 + 25):

        def build(seed: int = seed) -> Holder:
            holder = Holder(array)
            draw = random.Random(1000 + seed)
            for _ in range(5 * at_start):
                change(holder, draw)
            return holder

        changed, again = build(), build()
        program = Program({"root": changed})
        resumed = Program({"root": again})
        draw = random.Random(seed)
        log = [change(changed, draw) for _ in range(8)]
        resumed.load(program.save())
        expected = effects(changed)
        assert effects(again) == expected, (seed, log)
        shared += len(expected) > len(places_of(changed))
    assert shared > 5
