"""The walk: it meets each object once, by the same path in every process, and runs no code of what
it meets.
"""

from __future__ import annotations

import collections
import functools
import gc
import random
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from capture import graphs

from odyssey.capture import Picture, walk


def marks_of(picture: Picture) -> list[tuple[str, str, str]]:
    return [(path, entry.sort, entry.mark) for path, entry in picture.entries.items()]


def paths(value: Any) -> dict[str, str]:
    """Returns the sorts of what is below a root called `it`, by path without that name."""
    entries = walk({"it": value}).entries
    return {path.removeprefix("it"): entry.sort for path, entry in entries.items()}


@pytest.mark.parametrize("block", range(6))
def test_random_graphs_are_walked_without_running_their_code(block):
    for seed in range(block * 50, block * 50 + 50):
        graph = graphs.build(seed, 12, strange=True)
        graphs.TOUCHED.clear()
        picture = walk(graph.roots)
        assert not graphs.TOUCHED, seed
        held = [id(entry.value) for entry in picture.entries.values() if entry.sort == "reference"]
        assert len(held) == len(set(held)), seed


def test_graphs_touch_when_their_code_runs():
    """Shows that the test above can fail."""
    graphs.TOUCHED.clear()
    for run in (len, repr, hash, bool, iter, lambda shy: shy.size, lambda shy: shy.described):
        with pytest.raises(graphs.Touched):
            run(graphs.Shy())
    assert len(graphs.TOUCHED) == 7


class Owner:
    pass


def test_an_object_that_raises_when_it_is_looked_at_hides_no_others():
    owner = Owner()
    owner.before, owner.gone, owner.later = 1, weakref.proxy(Owner()), 2
    gc.collect()
    found = paths(owner)
    assert (found[".before"], found[".gone"], found[".later"]) == ("value", "opaque", "value")


@pytest.mark.parametrize("seed", range(40))
def test_the_order_of_creation_changes_nothing(seed):
    pictures = []
    for order in range(3):
        graph = graphs.build(seed, 12, order, strange=True)
        graphs.TOUCHED.clear()
        pictures.append(marks_of(walk(graph.roots)))
    assert pictures[0] == pictures[1] == pictures[2]


def test_edges_of_an_object():
    node = graphs.Node()
    node.b = 1
    node._a = graphs.SlottedChild()
    node._a.c = [graphs.Slim()]
    assert paths(node) == {
        "": "reference",
        "._a": "reference",
        ".b": "value",
        "capture.graphs:Node": "reference",
        "._a._Slotted__hidden": "value",
        "._a.a": "value",
        "._a.c": "reference",
        "capture.graphs:SlottedChild": "reference",
        "capture.graphs:Node.method": "reference",
        "capture.graphs:Node.shared": "value",
        "capture.graphs:Node.step_size": "value",
        "._a.c[0]": "reference",
        "capture.graphs:Slotted": "reference",
        "capture.graphs:RATE": "value",
        "capture.graphs:SETTINGS": "value",
        **{
            path: sort
            for path, sort in paths(node).items()
            if path.startswith(("._a.c[0].", "capture.graphs:Slim", "capture.graphs:Slotted."))
            or path.startswith("capture.graphs:SlottedChild.")
        },
    }
    assert paths(node)["._a.c[0].lr"] == "value"


def test_edges_of_functions():
    advance = graphs.counter(3)
    assert paths(advance) == {
        "": "reference",
        ".<closure>.count": "value",
        ".<closure>.seen": "value",
        ".<defaults>[0]": "value",
    }
    bound = functools.partial(graphs.Node().method, 3, key=np.ones(2))
    inside = paths(bound)
    assert inside[".args[0]"] == inside[".keywords['key']"] == "value"
    assert inside[".func.__self__"] == "reference"
    assert inside["capture.graphs:RATE"] == "value"


def test_a_global_that_two_functions_read_is_met_once():
    inside = walk({"it": [graphs.reads_globals, graphs.Node.method]}).entries
    assert [path for path in inside if "RATE" in path] == ["capture.graphs:RATE"]


def test_two_classes_of_one_name_are_both_looked_into():
    classes = [graphs._local_class(number) for number in (4, 5)]
    entries = walk({"it": classes}).entries
    assert {entry.mark for path, entry in entries.items() if ".size" in path} == {"4", "5"}


def test_a_second_place_of_an_object_is_an_alias():
    shared = [1, 2]
    first = graphs.Config(items=shared)
    second = graphs.Config(items=shared)
    second.other = first
    picture = walk({"one": first, "two": second})
    assert picture.aliases["two.items"] == "one.items"
    assert picture.aliases["two.other"] == "one"
    assert "two.items" not in picture.entries
    assert list(picture.alias_places) == ["two.items", "two.other"]


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (graphs.MyInt(3), graphs.MyInt(4)),
        (graphs.MySet([2, 1]), graphs.MySet([2])),
        (np.zeros(2).view(graphs.MyArray), np.ones(2).view(graphs.MyArray)),
        (graphs.MyRandom(3), graphs.MyRandom(4)),
    ],
)
def test_contents_of_subclasses_count(value, other):
    entry = walk({"it": value}).entries["it.<contents>"]
    assert walk({"it": other}).entries["it.<contents>"].mark != entry.mark


def test_resources_are_not_looked_into(tmp_path):
    with (tmp_path / "file").open("w") as file:
        held = [file, threading.Lock(), threading.Thread(), sys, ValueError("a")]
        resources = {f"[{n}]": "resource" for n in range(5)}
        assert paths(held) == {"": "reference", **resources, "[4].args": "value"}


def test_not_state_is_not_looked_into():
    class Cached:
        _not_state = ("cache",)

        def __init__(self) -> None:
            self.cache = [1]
            self.kept = 2

    assert ".kept" in paths(Cached())
    assert ".cache" not in paths(Cached())


def test_kept_objects_are_not_looked_into():
    array = np.ones(3)
    node = graphs.Config(items=array)
    assert "it.items" in walk({"it": node}).entries
    assert "it.items" not in walk({"it": node}, {id(array)}).entries


def test_large_values_of_data_sets_are_sampled():
    data = graphs.Config(items=np.ones((1000, 500)))
    entry = walk({"dataset": data}).entries["dataset.items"]
    assert entry.sort == "sampled"
    assert walk({"model": data}).entries["model.items"].sort == "value"


def test_a_hundred_thousand_objects_are_walked_in_time():
    rng = random.Random(1)
    nodes = [graphs.Node() for _ in range(100_000)]
    for number, node in enumerate(nodes):
        node.next = nodes[(number + 1) % len(nodes)]
        node.other = rng.choice(nodes)
        node.number = number
    started = time.perf_counter()
    picture = walk({"model": nodes})
    assert time.perf_counter() - started < 60
    sorts = collections.Counter(entry.sort for entry in picture.entries.values())
    assert sorts["value"] >= 100_000


def test_a_long_chain_of_objects_ends():
    node: Any = None
    for _ in range(20_000):
        node = graphs.Config(items=node)
    assert (
        sum(entry.sort == "reference" for entry in walk({"model": node}).entries.values()) > 20_000
    )


def test_a_hash_that_each_process_computes_otherwise_is_no_state():
    class GenerationConfig:  # as that of transformers
        def __init__(self) -> None:
            self.temperature = 0.5
            self._original_object_hash = hash("a")

    entries = walk({"model": GenerationConfig()}).entries
    assert "model.temperature" in entries
    assert "model._original_object_hash" not in entries
