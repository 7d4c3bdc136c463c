"""Values of checkpoints: each comes back as it was, and damaged ones raise an error and nothing
else.
"""

from __future__ import annotations

import collections
import copy
import enum
import json
import math
import random
import sys
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
from capture import random_values
from capture.random_values import random_value, same

from odyssey.capture import NotAValue, decode, encode, mark, put_into, values


class Point(NamedTuple):
    x: int
    y: Any = None


Pair = collections.namedtuple("Pair", "first second")


def through_json(value: Any) -> Any:
    """Returns a value after it was encoded, written as JSON and decoded."""
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(encode(value, arrays, "path"))
    for array in arrays.values():
        assert array.dtype.kind in "fiub"
        assert array.dtype.isnative
        assert array.dtype.itemsize <= 8
    return decode(json.loads(text), arrays)


@pytest.mark.parametrize("block", range(10))
def test_random_values_come_back_and_have_marks_that_differ(block):
    seen: dict[str, Any] = {}
    for seed in range(block * 400, block * 400 + 400):
        rng = random.Random(seed)
        value = random_value(rng, 0 if seed % 2 else 3)
        assert values.is_value(value), seed
        again = through_json(value)
        assert same(value, again), seed
        assert mark(value) == mark(again), seed
        other = seen.setdefault(mark(value), value)
        assert same(value, other), (seed, mark(value))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, True),
        (1, 1.0),
        (1.0, np.float64(1.0)),
        (0.0, -0.0),
        ("1", 1),
        ([1], (1,)),
        ({}, collections.OrderedDict()),
        ({1: 2}, {"1": 2}),
        ({1: 2, 3: 4}, {3: 4, 1: 2}),
        (collections.deque([1], 2), collections.deque([1], 3)),
        (collections.defaultdict(int), collections.defaultdict(float)),
        (collections.defaultdict(int), {}),
        (b"a", bytearray(b"a")),
        (np.zeros(3, "<f4"), np.zeros(3, ">f4")),
        (np.zeros(3, "i4"), np.zeros(3, "u4")),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(2, [("a", "f4")]), np.zeros(2, [("b", "f4")])),
        (np.array(1.0), np.float64(1.0)),
        (Point(1, 2), (1, 2)),
        (Point(1, 2), Pair(1, 2)),
        (random_values.Right.READ, random_values.Right.WRITE),
        (random_values.Color.RED, random_values.Color.BLUE),
        ([10**5000], [10**5000 + 1]),
        ("tuple(1)", (1,)),
        ([1, [2]], [1, 2]),
        ([[1], 2], [[1, 2]]),
        ({"a": [1]}, {"a": (1,)}),
        ("a" * 300, "a" * 299 + "b"),
        ("\ud800", "\udfff"),
    ],
)
def test_values_that_look_alike_have_two_marks(one, two):
    assert mark(one) != mark(two)


def test_equal_sets_have_the_same_mark_in_any_order():
    words = [f"word {number}" for number in range(50)]
    assert mark(set(words)) == mark(set(reversed(words)))
    assert json.dumps(encode(set(words), {}, "")) == json.dumps(encode(set(words[::-1]), {}, ""))


def test_bytes_between_fields_do_not_change_a_mark():
    form = {"names": ["a"], "formats": ["u1"], "offsets": [3], "itemsize": 8}
    one = np.zeros(8, np.uint8).view(form)
    two = np.full(8, 7, np.uint8).view(form)
    two["a"] = 0
    assert mark(one) == mark(two)


def test_named_tuples_come_back_as_their_class():
    value = {"best": Point(1, [Pair(2, np.ones(2))])}
    again = through_json(value)
    assert type(again["best"]) is Point
    assert type(again["best"].y[0]) is Pair
    assert mark(again) == mark(value)


def test_a_defaultdict_creates_items_as_before():
    again = through_json(collections.defaultdict(list, {"a": [1]}))
    again["b"].append(2)
    assert again == {"a": [1], "b": [2]}
    assert not values.is_value(collections.defaultdict(lambda: 3))


def test_containers_that_contain_themselves_are_no_values():
    node: dict[str, Any] = {"children": []}
    for _ in range(30):
        node["children"].append({"parent": node, "children": []})
        node["children"].append({"parent": node["children"][0], "up": node})
    assert not values.is_value(node)
    shared: list[Any] = [1]
    for _ in range(35):
        shared = [shared, shared]
    assert values.is_value(shared)  # it takes no time either


def test_what_can_not_be_decoded_is_no_value():
    class Local(NamedTuple):
        x: int

    no_values = [
        object(),
        threading.Lock(),
        open,
        len,
        lambda: 0,
        iter([1]),
        (x for x in ()),
        np.array([object()]),
        np.array([[1], None], object),
        memoryview(b"a"),
        Local(1),
        {object(): 1},
        {"a": [1, {"b": object()}]},
        type,
        sys,
    ]
    for value in no_values:
        assert not values.is_value(value), value
        if not isinstance(value, (dict, tuple)):
            with pytest.raises(NotAValue, match="here"):
                encode([value], {}, "here")
    assert "<object>" in mark([object()])


def test_a_value_names_the_place_of_what_is_none():
    with pytest.raises(NotAValue, match=r"loss\.a\[1\] is a _thread\.lock"):
        encode({"a": [1, threading.Lock()]}, {}, "loss")


def test_local_enums_are_refused_by_name():
    class Mode(enum.Enum):
        FAST = 1

    node = encode(Mode.FAST, {}, "")
    with pytest.raises(ValueError, match=r"no enum .*Mode"):
        decode(node, {})


def test_arrays_that_share_a_path_have_two_names():
    arrays: dict[str, np.ndarray] = {}
    value = {"a": {"b": np.zeros(1)}, "a.b": np.ones(2), "x" * 500: np.ones(3)}
    again = decode(encode(value, arrays, "p"), arrays)
    assert len(arrays) == 3
    assert same(value, again)
    assert max(map(len, arrays)) <= 200


def test_decoded_arrays_can_be_written_and_share_nothing():
    array = np.arange(6.0)
    arrays: dict[str, np.ndarray] = {}
    node = encode([array, array], arrays, "p")
    one, two = decode(node, arrays)
    one[0] = 9
    assert array[0] == two[0] == 0


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        {"b": 1, "a": 2},
        {1, 2},
        collections.deque([1], 3),
        bytearray(b"ab"),
        np.arange(4.0),
        random.Random(1),
        np.random.default_rng(1),
        np.random.RandomState(1),
        collections.Counter("aab"),
        collections.OrderedDict(a=1),
        collections.defaultdict(int, a=1),
    ],
)
def test_values_are_written_into_objects_of_their_type(value):
    again = through_json(value)
    target = copy.deepcopy(value)
    if isinstance(target, np.ndarray):
        target[:] = 7
    elif hasattr(target, "clear"):
        target.clear()
    else:
        target.random()
    assert mark(target) != mark(value)
    assert put_into(target, again)
    assert same(target, value)
    assert not put_into(target, 3)


def test_objects_that_do_not_fit_are_not_written_into():
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    generator = np.random.Generator(np.random.MT19937(1))
    assert not put_into(fixed, np.ones(2))
    assert not put_into(np.zeros(2), np.ones(3))
    assert not put_into(np.zeros(2), np.ones(2, "f4"))
    assert not put_into(collections.deque([], 2), collections.deque([], 3))
    assert not put_into(generator, np.random.default_rng(1))
    assert not put_into((1,), (2,))
    assert not put_into(1, 2)
    assert not put_into(collections.defaultdict(int), collections.defaultdict(str))
    assert fixed.tolist() == [0, 0]


# --- damaged and malicious nodes ----------------------------------------------------------------

ATTACKS: list[Any] = [
    {"\0enum": ["os", "system"]},
    {"\0enum": ["os.system", "x"]},
    {"\0enum": ["builtins.eval", "x"]},
    {"\0enum": ["capture.random_values.Color", "__class__"]},
    {"\0enum": ["capture.random_values.Color", "mro"]},
    {"\0enum": ["", ""]},
    {"\0enum": "os"},
    {"\0enum": 3},
    {"\0enum": [["os"], "x"]},
    {"\0flag": ["capture.random_values.Right", "READ"]},
    {"\0flag": ["capture.random_values.Right", 10**9]},
    {"\0flag": ["capture.random_values.Color", 1]},
    {"\0named tuple": ["builtins.tuple", [1]]},
    {"\0named tuple": ["os.stat_result", [1]]},
    {"\0named tuple": ["subprocess.Popen", ["ls"]]},
    {"\0named tuple": [f"{__name__}.Point", [1, 2, 3]]},
    {"\0named tuple": [f"{__name__}.Point", []]},
    {"\0array": ["a", "O", [1]]},
    {"\0array": ["a", "|O8", [1]]},
    {"\0array": ["a", {"names": ["x"], "formats": ["O"], "offsets": [0], "itemsize": 8}, [1]]},
    {"\0array": ["a", ["O", [1]], [1]]},
    {"\0array": ["a", "<f8", [2]]},
    {"\0array": ["a", "<f8", [-1]]},
    {"\0array": ["a", "<f8", [10**30]]},
    {"\0array": ["a", "<f8", [10**12, 0, 10**12]]},
    {"\0array": ["b", "<f8", [1]]},
    {"\0array": ["a", "nothing", [1]]},
    {"\0array": "abc"},
    {"\0number": ['"|O"', {"\0array": ["a", "<f8", [1]]}]},
    {"\0number": ['"<f8"', "text"]},
    {"\0number": ["import os", {"\0array": ["a", "<f8", [1]]}]},
    {"\0dtype": '"O"'},
    {"\0dtype": "O"},
    {"\0dtype": 3},
    {"\0generator": {"bit_generator": "test"}},
    {"\0generator": {"bit_generator": "BitGenerator"}},
    {"\0generator": {"bit_generator": "__builtins__"}},
    {"\0generator": {"bit_generator": "PCG64", "state": 3}},
    {"\0random state": {"bit_generator": "Generator"}},
    {"\0random": [3, {"\0array": ["a", "<f8", [1]]}, None]},
    {"\0random": [3, [1], None]},
    {"\0decimal": "no number"},
    {"\0fraction": "1/0"},
    {"\0uuid": "zz"},
    {"\0datetime": "2020-13-45"},
    {"\0timedelta": [10**20, 0, 0]},
    {"\0complex": ["a"]},
    {"\0complex": [1, 2, 3]},
    {"\0bytes": [1, 2]},
    {"\0range": [0, 1, 0]},
    {"\0range": 3},
    {"\0slice": []},
    {"\0path": ["PosixPath", "/"]},
    {"\0path": ["system", "ls"]},
    {"\0set": [[1]]},
    {"\0set": 3},
    {"\0dict": [[1]]},
    {"\0dict": [[[1], 2]]},
    {"\0defaultdict": ["eval", []]},
    {"\0defaultdict": ["Popen", [["a", 1]]]},
    {"\0deque": [-1, []]},
    {"\0deque": ["a", []]},
    {"\0int": "12z"},
    {"\0int": 12},
    {"\0float": "1e"},
    {"\0float": []},
    {"\0os.system": "ls"},
    {"\0eval": "1"},
    {"\0": 1},
]


class _Events:
    """Counts what Python's audit reports while it listens."""

    def __init__(self) -> None:
        self.listens = False
        self.events: list[tuple] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple) -> None:
        runs = ("import", "exec", "compile", "open", "os.system", "subprocess.Popen")
        if self.listens and (event in runs or event.startswith("pickle.")):
            self.events.append((event, arguments))


_EVENTS = _Events()


def decode_alone(node: Any, arrays: dict[str, Any]) -> None:
    """Decodes a node, and fails if that runs or reads anything."""
    _EVENTS.events.clear()
    _EVENTS.listens = True
    try:
        decode(node, arrays)
    finally:
        _EVENTS.listens = False
        assert not _EVENTS.events


@pytest.mark.parametrize("node", ATTACKS, ids=lambda node: json.dumps(node)[:60])
def test_attacks_raise_an_error_of_values(node):
    for wrapped in (node, [node], {"x": node}, {"\0tuple": [node]}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            decode_alone(wrapped, {"a": np.zeros(1)})


def test_the_audit_hears_code_that_runs():
    """Shows that the tests here can fail."""
    _EVENTS.events.clear()
    _EVENTS.listens = True
    compile("1 + 1", "here", "eval")
    _EVENTS.listens = False
    assert _EVENTS.events


JUNK = (
    *(
        "os",
        "builtins.eval",
        "O",
        "<f8",
        "9" * 15,
        "NaN",
        "capture.random_values.Color",
        "PCG64",
        "test",
    ),
    *(None, True, -1, 2**70, 1.5, [], {}, [[]], {"a": 1}, math.inf),
)
TAGS = (
    *("dtype", "decimal", "range", "fraction", "complex", "bytes", "set", "generator", "random"),
    *("random state", "timedelta", "uuid", "path", "slice", "dict", "deque", "defaultdict"),
    *("Counter", "number", "datetime", "named tuple", "flag", "enum", "array", "int", "float"),
)


def _steps_in(node: Any, steps: tuple = ()) -> list[tuple]:
    inner = node.keys() if isinstance(node, dict) else range(len(node))
    result = [(*steps, step) for step in inner]
    for step in inner:
        if isinstance(node[step], (dict, list)):
            result += _steps_in(node[step], (*steps, step))
    return result


def _damaged(rng: random.Random, node: Any) -> Any:
    whole = [node]
    *steps, last = rng.choice(_steps_in(whole))
    holder: Any = whole
    for step in steps:
        holder = holder[step]
    kind = rng.randrange(4)
    if kind == 0 and isinstance(holder, list):
        holder.append(rng.choice(JUNK))
    elif kind == 1 and isinstance(holder, list) and steps:
        holder.pop(last)
    elif kind == 2 and isinstance(holder, dict):
        holder["\0" + rng.choice(TAGS)] = holder.pop(last)
    else:
        holder[last] = copy.deepcopy(rng.choice(JUNK))
    return whole[0] if whole else None


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("block", range(4))
def test_random_damage_raises_an_error_of_values_or_none(block):
    refused = 0
    for seed in range(block * 500, block * 500 + 500):
        rng = random.Random(seed)
        arrays: dict[str, Any] = {}
        node = json.loads(json.dumps(encode(random_value(rng, 2), arrays, "p")))
        node = _damaged(rng, node)
        if arrays and rng.random() < 0.3:
            name = rng.choice(sorted(arrays))
            arrays[name] = arrays[name].reshape(-1)[1:]
        try:
            decode_alone(node, arrays)
        except (KeyError, TypeError, ValueError):
            refused += 1
    assert refused > 50
