"""Capture: random programs are changed, saved and built again, and then nobody can tell them from
the changed ones.
"""

from __future__ import annotations

import collections
import copy
import ctypes
import enum
import functools
import io
import itertools
import json
import math
import mmap
import multiprocessing
import queue
import random
import re
import sqlite3
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from capture import graphs

from odyssey import functional
from odyssey.capture import Capture
from odyssey.errors import CheckpointError, ConfigError


class Program:
    """A program that has started, and its capture."""

    def __init__(self, roots: dict[str, Any], forward: set[tuple[int, str]] | None = None) -> None:
        self.roots = roots
        self.lines: list[str] = []
        known = forward or set()
        self.capture = Capture(lambda: self.roots, set, self.lines.append, lambda: known)
        self.capture.begin()
        self.capture.expect()

    def save(self) -> tuple[str, dict[str, np.ndarray]]:
        """Returns what a checkpoint would hold."""
        arrays: dict[str, np.ndarray] = {}
        text = json.dumps(self.capture.state(arrays))
        return text, {name: array.copy() for name, array in arrays.items()}

    def load(self, saved: tuple[str, dict[str, np.ndarray]]) -> None:
        """Restores a checkpoint, as a resumed run does."""
        for final in (False, True):
            self.capture.restore(json.loads(saved[0]), saved[1], "step 3", final)
        self.capture.finish_restore()

    def marks(self) -> dict[str, str]:
        """Returns what the capture sees."""
        return self.capture.look().marks()


def random_program(seed: int) -> tuple[graphs.Graph, Program]:
    graph = graphs.build(seed)
    return graph, Program(graph.roots)


def check_random_program(seed: int, times: int) -> bool:
    """Checks that a changed program comes back. Returns False if a change is not supported."""
    graph, program = random_program(seed)
    log = graphs.change(graph, seed, times)
    changed = graphs.description(graph)
    marks = program.marks()
    try:
        saved = program.save()
    except ConfigError as problem:
        assert "[capture] " in str(problem)
        return False
    assert graphs.description(graph) == changed, (seed, log)
    again, resumed = random_program(seed)
    try:
        resumed.load(saved)
    except CheckpointError as problem:
        assert "[resume] step 3: " in str(problem)
        return False
    assert graphs.description(again) == changed, (seed, log)
    assert resumed.marks() == marks, (seed, log)
    resumed.load(saved)
    assert graphs.description(again) == changed, (seed, log)
    return True


@pytest.mark.parametrize("block", range(8))
def test_random_changes_come_back(block):
    kept = [check_random_program(seed, 6) for seed in range(block * 25, block * 25 + 25)]
    assert sum(kept) > 18


@pytest.mark.parametrize("seed", range(20))
def test_a_program_that_has_not_changed_saves_nothing(seed):
    _, program = random_program(seed)
    saved = json.loads(program.save()[0])
    assert saved["values"] == saved["aliases"] == {}
    assert saved["removed"] == []


def test_random_programs_go_back_to_a_checkpoint():
    compared = 0
    for seed in range(120):
        graph, program = random_program(seed)
        graphs.change(graph, seed, 3, objects=False)
        changed = graphs.description(graph)
        saved = program.save()
        log = graphs.change(graph, seed + 10**6, 5, objects=False)
        program.load(saved)
        assert graphs.description(graph) == changed, (seed, log)
        compared += 1
    assert compared == 120


# --- single changes -----------------------------------------------------------------------------


def both(build: Any, change: Any) -> tuple[Any, Any]:
    """Returns an object after a change, and one that a resumed run has built and restored."""
    first = build()
    program = Program({"model": first})
    change(first)
    saved = program.save()
    second = build()
    resumed = Program({"model": second})
    resumed.load(saved)
    assert program.marks() == resumed.marks()
    return first, second


def holder(**attributes: Any) -> graphs.Node:
    node = graphs.Node()
    vars(node).update(attributes)
    return node


def test_private_names_are_kept():
    _, again = both(lambda: holder(_count=1), lambda node: setattr(node, "_count", 5))
    assert again._count == 5


def test_slots_are_kept():
    _, again = both(graphs.Slotted, lambda node: node.hide(np.arange(3)))
    assert again._Slotted__hidden.tolist() == [0, 1, 2]


def test_closures_are_kept():
    _, again = both(lambda: holder(count=graphs.counter(1)), lambda node: node.count(4))
    assert again.count() == 6


def test_numbers_of_numpy_are_kept():
    first, again = both(
        lambda: holder(rate=np.float32(1)), lambda node: setattr(node, "rate", np.float32(0.1))
    )
    assert type(again.rate) is np.float32
    assert again.rate == first.rate


def test_keys_of_dicts_keep_their_types():
    _, again = both(
        lambda: holder(by={}, node={"other": graphs.Node()}),
        lambda node: (node.by.update({1: 2, (1, "a"): 3}), node.node.update({7: 1})),
    )
    assert again.by == {1: 2, (1, "a"): 3}
    assert again.node[7] == 1


def test_class_attributes_are_kept():
    graphs.reset_program()
    node = holder()
    program = Program({"model": node})
    graphs.Node.step_size = 9
    saved = program.save()
    graphs.reset_program()
    Program({"model": holder()}).load(saved)
    assert graphs.Node.step_size == 9
    graphs.reset_program()


def test_globals_are_kept():
    graphs.reset_program()
    program = Program({"loss": graphs.reads_globals})
    graphs.RATE = 0.125
    graphs.SETTINGS["depth"] = 8
    saved = program.save()
    graphs.reset_program()
    settings = graphs.SETTINGS
    Program({"loss": graphs.reads_globals}).load(saved)
    assert graphs.reads_globals(1.0) == 0.125 * 2 * 8
    assert graphs.SETTINGS is settings
    graphs.reset_program()


class Ordered:
    """An object whose `load_state_dict` needs the values that were put into its attributes."""

    def __init__(self) -> None:
        self.scale = 1
        self.total = 0

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total * self.scale}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total = state["total"] // self.scale


class Hidden:
    """An object that holds its state where a walk does not look."""

    _not_state = ("hidden",)

    def __init__(self) -> None:
        self.hidden = 0

    def state_dict(self) -> dict[str, int]:
        return {"hidden": self.hidden}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.hidden = state["hidden"]


def test_a_state_dict_is_kept():
    _, again = both(Hidden, lambda one: setattr(one, "hidden", 4))
    assert again.hidden == 4


def test_a_state_dict_is_loaded_after_attributes():
    def change(one: Ordered) -> None:
        one.scale = 5
        one.total = 3

    _, again = both(Ordered, change)
    assert (again.scale, again.total) == (5, 3)


@pytest.mark.parametrize(
    "value", [[1], {"a": 1}, {1}, bytearray(b"a"), np.ones(2), np.random.default_rng(1)]
)
def test_objects_that_share_a_value_still_share_it(value):
    def build() -> graphs.Node:
        import copy

        shared = copy.deepcopy(value)
        return holder(first=shared, second=holder(third=shared))

    def change(node: graphs.Node) -> None:
        if isinstance(node.first, np.random.Generator):
            node.first.random()
        elif isinstance(node.first, np.ndarray):
            node.first += 1
        elif isinstance(node.first, list):
            node.first.append(3)
        else:
            node.first.clear()

    _, again = both(build, change)
    assert again.first is again.second.third


def test_new_places_of_objects_are_kept():
    def change(node: graphs.Node) -> None:
        node.best = node.now
        node.second = node.first
        node.mine = node.mine[1:] + [4]

    _, again = both(lambda: holder(now=holder(x=1), first=[1], second=[2], mine=[1, 2]), change)
    assert again.best is again.now
    assert again.second is again.first
    assert again.mine == [2, 4]


def test_removed_values_and_objects_are_gone():
    def change(node: graphs.Node) -> None:
        del node.a
        del node.b
        del node.items[1:]
        node.c = None

    first, again = both(
        lambda: holder(a=1, b=holder(x=1), c=holder(x=1), items=[holder(), 1, holder()]), change
    )
    assert sorted(vars(again)) == ["c", "items"]
    assert again.c is None
    assert len(again.items) == 1


def test_lists_of_objects_grow_by_values():
    _, again = both(lambda: holder(items=[holder()]), lambda node: node.items.extend([1, "a", [2]]))
    assert again.items[1:] == [1, "a", [2]]


def test_frozen_dataclasses_and_named_tuples_are_kept():
    def change(node: graphs.Node) -> None:
        node.frozen = graphs.Frozen(0.5, node.frozen.items)
        node.stats = graphs.Stats(2.0, 3)

    _, again = both(
        lambda: holder(frozen=graphs.Frozen(0.1, holder()), stats=graphs.Stats(1.0, 1)), change
    )
    assert again.frozen.lr == 0.5
    assert again.stats == graphs.Stats(2.0, 3)
    assert type(again.stats) is graphs.Stats


def test_contents_of_subclasses_are_kept():
    def change(node: graphs.Node) -> None:
        node.set.add(5)
        node.array += 1
        node.random.random()

    first, again = both(
        lambda: holder(
            set=graphs.MySet([1]),
            array=np.zeros(2).view(graphs.MyArray),
            random=graphs.MyRandom(1),
        ),
        change,
    )
    assert again.set == {1, 5}
    assert type(again.set) is graphs.MySet
    assert again.array.tolist() == [1, 1]
    assert again.random.random() == first.random.random()


def test_iterators_of_itertools_are_kept():
    _, again = both(lambda: holder(ids=itertools.count(3)), lambda node: next(node.ids))
    assert next(again.ids) == 4


class Warm:
    """An object that becomes one of another class."""

    rate = 1.0

    def __init__(self) -> None:
        self.count = 1

    def become_cool(self) -> None:
        self.__class__ = Cool


class Cool(Warm):
    """What it becomes."""

    rate = 0.5


def test_objects_of_another_class_are_kept():
    def change(one: Any) -> None:
        one.count = 5
        one.become_cool()

    first, again = both(Warm, change)
    assert type(again) is Cool
    assert (again.count, again.rate) == (5, 0.5)

    program = Program({"model": Warm()})  # which goes back to its checkpoint
    saved = program.save()
    program.roots["model"].become_cool()
    program.load(saved)
    assert type(program.roots["model"]) is Warm


def test_a_class_that_no_module_has_is_refused():
    class Local(Warm):
        pass

    program = Program({"model": Warm()})
    program.roots["model"].__class__ = Local
    with pytest.raises(ConfigError, match=r"\[capture\] model is a .*Local now and was a .*Warm"):
        program.save()


@pytest.mark.parametrize("name", ["odyssey", "torch", "functional", "in C", "math"])
def test_functions_of_libraries_are_kept(name):
    torch = pytest.importorskip("torch") if name in ("torch", "functional", "in C") else None
    before, after = {
        "odyssey": lambda: (functional.tanh, functional.relu),
        "torch": lambda: (torch.tanh, torch.relu),
        "functional": lambda: (torch.nn.functional.relu, torch.nn.functional.silu),
        "in C": lambda: (torch.nn.functional.relu, torch.nn.functional.gelu),
        "math": lambda: (math.sin, math.cos),
    }[name]()
    _, again = both(lambda: holder(act=before), lambda node: setattr(node, "act", after))
    assert again.act is after
    _, again = both(lambda: holder(act=None), lambda node: setattr(node, "act", after))
    assert again.act is after


@pytest.mark.parametrize("name", ["os:system", "numpy:load", "builtins:eval", "odyssey.data:load"])
def test_a_checkpoint_can_not_put_other_functions(name):
    program = Program({"model": holder(act=math.sin)})
    program.roots["model"].act = math.cos
    text, arrays = program.save()
    assert '"math.cos"' in text
    again = Program({"model": holder(act=math.sin)})
    with pytest.raises(CheckpointError, match="it was the function"):
        again.load((text.replace("math.cos", name.replace(":", ".")), arrays))
    assert again.roots["model"].act is math.sin


def test_a_lambda_where_nothing_was_is_named():
    program = Program({"model": holder(f=None)})
    program.roots["model"].f = lambda x: x
    program.roots["model"].new = functools.partial(graphs.small_value)
    program.save()
    assert len(program.lines) == 1
    assert "model.f (" in program.lines[0]
    assert "model.new (" in program.lines[0]


class Generator(np.random.Generator):
    """A generator with a method more."""

    def coin(self) -> bool:
        return self.random() < 0.5


class State(np.random.RandomState):
    """An old generator with a method more."""


class Chance(enum.Enum):
    """A generator that is the value of a member."""

    NOISE = np.random.default_rng(3)
    BOX = [1]  # noqa: RUF012 (the value of a member)

    def __init__(self, _: Any) -> None:
        self.visits = 0


@pytest.mark.parametrize("build", [lambda: Generator(np.random.PCG64(1)), lambda: State(1)])
def test_generators_of_own_classes_are_kept(build):
    def change(node: graphs.Node) -> None:
        node.draw.standard_normal(3)

    first, again = both(lambda: holder(draw=build()), change)
    assert first.draw.standard_normal() == again.draw.standard_normal()
    assert first.draw.standard_normal() != build().standard_normal()


def test_values_of_enum_members_are_kept():
    program = Program({"model": holder(chance=Chance.NOISE)})
    Chance.NOISE.value.random()
    Chance.BOX.value.append(4)
    Chance.BOX.visits += 3
    saved = program.save()
    expected = Chance.NOISE.value.random()
    Chance.BOX.value.clear()
    Chance.BOX.visits = 9
    program.load(saved)
    assert Chance.BOX.visits == 3
    assert Chance.NOISE.value.random() == expected
    assert Chance.BOX.value == [1, 4]


def test_weak_references_lead_to_the_same_objects():
    def build() -> graphs.Node:
        node = holder(first=holder(x=1), second=holder(x=2), gone=None)
        node.number, node.strong = weakref.ref(node.first), weakref.ref(node.first)
        node.now = weakref.ref(node.first)
        node.others = [weakref.ref(node.second), weakref.ref(node.first)]
        return node

    def change(node: graphs.Node) -> None:
        node.now = weakref.ref(node.second)
        node.others[0] = weakref.ref(node.first)
        node.others[1] = weakref.ref(holder())
        node.gone = weakref.ref(node.second)
        node.number, node.strong = 5, node.second

    first, again = both(build, change)
    assert first.others[1]() is None
    assert again.now() is again.second
    assert again.others[0]() is again.first
    assert again.others[1]() is None
    assert again.gone() is again.second
    assert again.number == 5
    assert again.strong is again.second


# --- what is refused ----------------------------------------------------------------------------


def _become(name: str, value: Any) -> Any:
    return lambda node: setattr(node, name, value)


@pytest.mark.parametrize(
    ("build", "change", "message"),
    [
        (
            lambda: holder(x=1),
            lambda node: setattr(node, "x", (i for i in ())),
            r"model\.x was 1 .* a generator now",
        ),
        (
            lambda: holder(x=1),
            lambda node: setattr(node, "x", holder(y=1)),
            r"model\.x is a .*Node",
        ),
        (lambda: holder(), lambda node: setattr(node, "x", holder(y=1)), r"model\.x is a .*Node"),
        (
            lambda: holder(x=holder(y=1)),
            lambda node: setattr(node, "x", graphs.Config()),
            r"model\.x is a .*Config",
        ),
        (
            lambda: holder(x=graphs.MyInt(3)),
            lambda node: setattr(node, "x", graphs.MyInt(4)),
            r"model\.x\.<contents> has changed .* from 3 to 4",
        ),
        (
            lambda: holder(x=holder(), ages={}),
            lambda node: node.ages.update({id(node.x): 3}),
            r"model\.ages has ids of objects as keys",
        ),
        (
            lambda: holder(x=holder(), seen={"a": set()}),
            lambda node: node.seen["a"].add(id(node.x)),
            r"model\.seen has ids of objects as keys",
        ),
        (
            lambda: holder(x=((1, holder()), 1)),
            lambda node: setattr(node, "x", ((2, node.x[0][1]), 1)),
            r"model\.x\[0\] holds other objects",
        ),
    ],
)
def test_changes_that_can_not_be_kept_are_named(build, change, message):
    node = build()
    program = Program({"model": node})
    change(node)
    with pytest.raises(ConfigError, match=message):
        program.save()


def test_a_value_that_became_a_lock_is_restored_by_the_program():
    """A lock is nothing that a checkpoint holds, so the value stays what the program built."""
    node = holder(x=None)
    program = Program({"model": node})
    node.x = threading.Lock()
    saved = program.save()
    again = holder(x=None)
    Program({"model": again}).load(saved)
    assert again.x is None


def saved_with(**attributes: Any) -> tuple[str, dict[str, np.ndarray]]:
    """Returns the state of a program with an object `x` whose attributes were changed."""
    node = holder(x=holder(**dict.fromkeys(attributes, 0)), f=graphs.counter, y=1)
    program = Program({"metrics": node})
    vars(node.x).update(attributes)
    node.y = 2
    return program.save()


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (lambda: holder(y=1, f=graphs.counter), r"metrics\.x\.a can't be put back"),
        (
            lambda: holder(y=1, x=graphs.Config(), f=graphs.counter),
            r"metrics\.x can't .*Node.*Config",
        ),
        (lambda: holder(y=1, x=3, f=graphs.counter), r"metrics\.x"),
    ],
)
def test_programs_that_lack_an_object_are_named(node, message):
    saved = saved_with(a=1)
    with pytest.raises(CheckpointError, match=message):
        Program({"metrics": node()}).load(saved)


def test_a_function_of_the_program_is_put_back():
    node = holder(f=graphs.counter, g=holder())
    program = Program({"metrics": node})
    node.f = graphs.reads_globals
    node.h = node.g.method
    saved = program.save()
    again = holder(f=graphs.counter, g=holder(), h=graphs.counter)
    Program({"metrics": again}).load(saved)
    assert again.f is graphs.reads_globals
    assert again.h == again.g.method


@pytest.mark.parametrize("value", [lambda: 1, dict, functools.partial(graphs.counter, 2)])
def test_a_function_that_no_module_has_is_named(value):
    node = holder(f=graphs.counter)
    program = Program({"metrics": node})
    node.f = value
    with pytest.raises(ConfigError, match=r"metrics\.f holds .* where .*counter was when fit"):
        program.save()
    program.capture.note_start()  # as if it was set in on_epoch_start
    saved = program.save()
    with pytest.raises(CheckpointError, match=r"metrics\.f"):
        Program({"metrics": holder(f=graphs.counter)}).load(saved)
    program.capture.end_epoch()
    program.capture.note_start()  # which has not set it again
    with pytest.raises(ConfigError, match=r"metrics\.f holds"):
        program.save()


def test_lambdas_of_one_name_are_told_apart():
    first, second = (lambda: 1), (lambda: 2)
    node = holder(f=first)
    program = Program({"metrics": node})
    node.f = second
    with pytest.raises(ConfigError, match=r"metrics\.f holds .*<lambda> where .*<lambda> was"):
        program.save()


def test_other_settings_of_a_compared_root_are_named():
    saved = Program({"loss": holder(weight=1.0)}).save()
    with pytest.raises(ConfigError, match=r"loss has other settings .* weight = 2\.0"):
        Program({"loss": holder(weight=2.0)}).load(saved)


@pytest.mark.parametrize("damage", ["missing", "short", "node"])
def test_damaged_values_are_named(damage):
    saved = saved_with(a=np.arange(3), b=np.arange(4))
    state = json.loads(saved[0])
    if damage == "missing":
        del saved[1]["metrics.x.b"]
    elif damage == "short":
        saved[1]["metrics.x.b"] = np.arange(2)
    else:
        state["values"]["metrics.x.b"][1] = {"\0enum": ["os", "system"]}
    program = Program({"metrics": holder(x=holder(a=0, b=0), f=graphs.counter, y=1)})
    with pytest.raises(CheckpointError, match=r"metrics\.x\.b can't be put back"):
        program.load((json.dumps(state), saved[1]))


def test_opaque_objects_are_announced_once_or_refused():
    program = Program({"model": holder(x=(i for i in ()))})
    with pytest.raises(ConfigError, match=r"model\.x \(generator\)"):
        program.capture.announce_opaque(strict=True)
    program.capture.announce_opaque(strict=False)
    program.capture.announce_opaque(strict=False)
    assert len(program.lines) == 1


def test_what_forward_sets_is_neither_kept_nor_compared():
    node = holder(calls=0, kept=0)
    program = Program({"model": node}, {(id(node), "calls")})
    node.calls = 7
    node.kept = 3
    saved = json.loads(program.save()[0])
    assert list(saved["values"]) == ["model.kept"]
    assert "model.calls" not in program.capture.compared()
    assert "model.kept" in program.capture.compared()


# --- ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_equal_programs_compare_equal(seed):
    graph = graphs.build(seed, order=1)
    first = Program(graph.roots).capture.compared()
    other = graphs.build(seed, order=2)
    assert first == Program(other.roots).capture.compared()


def test_the_comparison_names_the_path_that_differs():
    programs = [Program({"loss": holder(x=holder(weight=w, rank=w))}) for w in (1.0, 2.0)]
    one, two = (program.capture.compared() for program in programs)
    assert [path for path in one if one[path] != two[path]] == ["loss.x.weight"]


def test_callbacks_are_not_compared():
    program = Program({"callbacks.one": holder(x=1), "loss": holder(y=2)})
    compared = program.capture.compared()
    assert "loss.y" in compared
    assert not [path for path in compared if path.startswith("callbacks")]


class Stepped:
    def step(self) -> int:
        return 1


def test_a_method_that_is_replaced_in_an_epoch_is_named():
    owner = Stepped()
    capture = Capture(lambda: {"callbacks.one": owner}, set, print)
    capture.begin()
    capture.expect()
    capture.note_start()
    capture.state({})
    owner.step = len
    with pytest.raises(ConfigError, match=r"callbacks\.one\.step was set to len since the epoch"):
        capture.state({})
    del owner.step
    assert not capture.state({})["patches"]
    owner.step = max  # in on_epoch_start
    capture.note_start()
    assert capture.state({})["patches"] == {"callbacks.one.step": "max"}
    del owner.step
    with pytest.raises(ConfigError, match=r"callbacks\.one\.step \(max\) was taken out since"):
        capture.state({})
    capture.end_epoch()  # as an epoch's end may do
    assert not capture.state({})["patches"]


def holders():
    shared = multiprocessing.get_context("spawn").Value("d", 1.0)
    local = threading.local()
    local.count = 1
    numbers = (ctypes.c_double * 2)()
    return [queue.Queue(), queue.PriorityQueue(), queue.SimpleQueue(), io.BytesIO(b"a"), local] + [
        shared,
        numbers,
        weakref.WeakKeyDictionary(),
        weakref.WeakValueDictionary(),
        weakref.WeakSet(),
        sqlite3.connect(":memory:"),
        mmap.mmap(-1, 8),
        functools.lru_cache(graphs.small_value),
    ]


def test_data_in_files_are_not_named(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(8))
    owner = Stepped()
    owner.database = sqlite3.connect(tmp_path / "data")
    owner.closed = mmap.mmap(-1, 8)
    owner.closed.close()
    owner.array = np.memmap(path, mode="r+")
    owner.cached = functools.lru_cache(len)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8) as owner.map:
        capture = Capture(lambda: {"callbacks.one": owner}, set, pytest.fail)
        capture.begin()
        capture.announce_opaque(strict=True)


@pytest.mark.parametrize("number", range(len(holders())))
def test_a_resource_that_holds_data_is_named(number):
    owner = Stepped()
    owner.held = holders()[number]
    lines = []
    capture = Capture(lambda: {"callbacks.one": owner}, set, lines.append)
    capture.begin()
    with pytest.raises(ConfigError, match="callbacks.one.held .* state is 'strict'"):
        capture.announce_opaque(strict=True)
    for _ in range(2):
        capture.announce_opaque(strict=False)
    assert len(lines) == 1 and lines[0].startswith("[capture] checkpoints can't keep callbacks.one")
    owner.later = holders()[number]  # in a step
    for _ in range(2):
        capture.state({})
    assert len(lines) == 2 and "callbacks.one.later" in lines[1]


class Thing:
    def __init__(self, name: str) -> None:
        self.name = name


class Lists:
    """Containers of objects that are also elsewhere."""

    def __init__(self) -> None:
        self.all = [Thing("a"), Thing("b"), Thing("c")]
        self.left = list(self.all)
        self.by_name = {thing.name: thing for thing in self.all}

    def names(self) -> tuple[object, ...]:
        return [thing.name for thing in self.left], sorted(self.by_name)


def pop_first(lists: Lists) -> None:
    lists.left.pop(0)


def pop_all(lists: Lists) -> None:
    lists.left.clear()


def replace_list(lists: Lists) -> None:
    lists.left = [lists.all[0], lists.all[2]]


def delete_key(lists: Lists) -> None:
    del lists.by_name["a"]


@pytest.mark.parametrize("change", [pop_first, pop_all, replace_list, delete_key])
def test_places_of_objects_that_are_also_elsewhere_are_removed(change):
    lists = Lists()
    program = Program({"callbacks.C": lists})
    change(lists)
    saved = program.save()
    resumed = Lists()
    again = Program({"callbacks.C": resumed})
    again.load(saved)
    assert resumed.names() == lists.names() != Lists().names()
    assert resumed.all[2] in resumed.left or not resumed.left
    again.load(saved)
    assert resumed.names() == lists.names()


# --- objects that exist, in other places --------------------------------------------------------


class Switching(graphs.Node):
    """An object whose attributes are some of the nodes of a pool, or containers of these."""

    NAMES = "aeimquy"  # "pool" is met between them

    def __init__(self, draw: random.Random) -> None:
        self.pool = [graphs.Node() for _ in range(4)]
        for number, node in enumerate(self.pool):
            node.total = number
        for name in self.NAMES:
            setattr(self, name, draw.choice([*self.pool, None, [], [1.5], {}, {"n": 2}]))
            if isinstance(getattr(self, name), (list, dict)):  # no two attributes share one
                setattr(self, name, copy.copy(getattr(self, name)))
        self.start = draw.choice(self.pool)
        self.own = [graphs.Node(), graphs.Node()]  # which are nowhere else
        for number, node in enumerate(self.own):
            node.total = 50 + number
        self.table = {f"node {number}": node for number, node in enumerate(self.pool)}
        self.pair = (self.pool[0], 1)

    def change(self, draw: random.Random) -> None:
        """Changes a node, or which nodes are where."""
        name = draw.choice(self.NAMES)
        held = getattr(self, name)
        node, other = draw.choices(self.pool, k=2)
        if draw.random() < 0.3:
            setattr(self, name, self.new_container(draw, node, other))
        elif draw.random() < 0.3:
            draw.choice(self.own[:2]).total += 1
            self.own.append(draw.choice([node, draw.random()]))
            self.pair = draw.choice([(other, node), (node, 2)])
            key = draw.choice(list(self.table))
            self.table[key] = self.table.pop(key)
        elif isinstance(held, list):
            held.append(draw.choice([node, draw.random(), "text"]))
        elif isinstance(held, dict):
            held[draw.choice(["k", 3, "n"])] = draw.choice([node, draw.random()])
        elif draw.random() < 0.6:
            setattr(self, name, node)
        else:
            node.total += draw.choice([1, 10])

    def new_container(self, draw: random.Random, node: graphs.Node, other: graphs.Node) -> Any:
        """Returns a new list, dict or tuple of nodes and values."""
        return draw.choice(
            [
                [node, draw.choice([other, 2.5]), "x"],
                {"k": node, 2: other},
                (node, draw.random(), other),
                [[node, [other]], {"a": [node]}, (node, 3)],
                [],
                {},
            ]
        )

    def describe(self) -> list[Any]:
        nodes = [*self.pool, *self.own[:2]]
        numbers = {id(node): f"node {number}" for number, node in enumerate(nodes)}

        def plain(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value).__name__, [plain(item) for item in value]
            if isinstance(value, dict):
                return [(key, plain(item)) for key, item in value.items()]
            return numbers.get(id(value), value)

        names = (*self.NAMES, "start", "own", "table", "pair")
        return [[node.total for node in nodes], *[plain(getattr(self, name)) for name in names]]


class Swapping(graphs.Node):
    """Two nodes and two lists that are swapped, and are put into new containers."""

    def __init__(self, draw: random.Random) -> None:
        self.first, self.second = graphs.Node(), graphs.Node()
        self.first.total, self.second.total = 1, 2
        self.pair: tuple[graphs.Node, graphs.Node] = (self.first, self.second)
        self.held: Any = None
        self.lists: list[list[Any]] = [[self.first], [self.second, 4]]
        self.chosen = self.lists[0]

    def change(self, draw: random.Random) -> None:
        some = [self.first, self.second, *self.pair]
        which = draw.randrange(6)
        if which == 0:
            self.first, self.second = self.second, self.first
        elif which == 1:
            self.pair = (draw.choice(some), draw.choice(some))
        elif which == 2:
            self.held = draw.choice([[draw.choice(some), 1], (self.first,), None, self.first])
        elif which == 3:
            self.lists.reverse()
        elif which == 4:
            self.chosen = draw.choice([*self.lists, [self.first, 5]])
        else:
            self.lists[0].append(self.second)
        self.first.total += 1
        self.pair[0].total += draw.randrange(3)

    def describe(self) -> list[Any]:
        numbers: dict[int, int] = {}

        def plain(value: Any) -> Any:
            if isinstance(value, graphs.Node):
                return numbers.setdefault(id(value), len(numbers)), value.total
            if isinstance(value, list):
                return numbers.setdefault(id(value), len(numbers)), [plain(i) for i in value]
            return [plain(item) for item in value] if isinstance(value, tuple) else value

        names = ("first", "second", "pair", "held", "lists", "chosen")
        return [plain(getattr(self, name)) for name in names]


@pytest.mark.parametrize("kind", [Switching, Swapping])
@pytest.mark.parametrize("seed", range(60))
def test_objects_that_exist_come_back_at_other_places(seed, kind):
    def build() -> tuple[Any, Program]:
        switching = kind(random.Random(seed))
        return switching, Program({"callbacks.Switching": switching})

    draw = random.Random(seed + 1000)
    switching, program = build()
    for _ in range(3):  # each turn stops the run and resumes it
        for _ in range(draw.randrange(1, 8)):
            switching.change(draw)
        described = switching.describe()
        saved = program.save()
        switching, program = build()
        program.capture.restore(json.loads(saved[0]), saved[1], "step 3", False)
        program.capture.expect()  # as fit() does after on_fit_start
        program.load(saved)
        assert switching.describe() == described
        program.load(saved)
        assert switching.describe() == described


@pytest.mark.parametrize("kind", [Switching, Swapping])
def test_objects_that_exist_come_back_in_a_run_that_goes_back(kind):
    for seed in range(60):
        draw = random.Random(seed)
        switching = kind(draw)
        program = Program({"callbacks.Switching": switching})
        for _ in range(3):
            switching.change(draw)
        described = switching.describe()
        saved = program.save()
        for _ in range(3):
            switching.change(draw)
        program.load(saved)
        assert switching.describe() == described, seed


APPENDED: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "an object without values": (
        [],
        lambda v: v.append(graphs.Slotted.__new__(graphs.Slotted)),
        "v[0] is a",
    ),
    "an object with values": ([], lambda v: v.append(graphs.Config()), "v[0] is a"),
    "a function": ([1], lambda v: v.append(len), "v[1] is a len"),
    "a class": ([], lambda v: v.append(graphs.Slotted), "v[0] is a"),
    "an object in a tuple": ([], lambda v: v.append((1, graphs.Node())), "v[0] is a tuple"),
    "an object in a dict": ({}, lambda v: v.update(k=graphs.Node()), "v['k'] is a"),
    "an object after others": ([graphs.Node()], lambda v: v.append(graphs.Node()), "v[1] is a"),
    "an object in a set": (set(), lambda v: v.add(graphs.Node()), "v was set() when"),
    "an object in a deque": (collections.deque(), lambda v: v.append(graphs.Node()), "v was deque"),
    "an object in an object": (
        graphs.Node(),
        lambda v: setattr(v, "x", graphs.Config()),
        "v.x is a",
    ),
    "a new key": ({}, lambda v: v.update({graphs.Node(): 1}), "v has keys that are objects"),
    "another key": (
        {graphs.Node(): 1},
        lambda v: v.update({len: 1}),
        "v has keys that are objects",
    ),
    "a key that is gone": (
        {graphs.Node(): 1, len: 2},
        lambda v: v.pop(next(iter(v))),
        "v has keys that are objects",
    ),
    "a name with surrogates": (graphs.Node(), lambda v: setattr(v, "\udc80", 1), "surrogates"),
}


@pytest.mark.parametrize("what", APPENDED)
def test_new_objects_are_refused_before_a_checkpoint(what):
    value, change, message = APPENDED[what]
    root = graphs.Node()
    root.v = copy.deepcopy(value)
    program = Program({"callbacks.Root": root})
    program.save()
    change(root.v)
    with pytest.raises(ConfigError, match=re.escape(message)):
        program.save()


def test_strings_that_utf_8_can_not_hold_come_back():
    texts: dict[str, Any] = {"a": "b\udcff", "\udc80": ["\ud800", ("x\udfff",)], "c": "\u00e9"}

    def build() -> tuple[graphs.Node, Program]:
        root = graphs.Node()
        root.v = {}
        return root, Program({"callbacks.Root": root})

    root, program = build()
    root.v.update(texts)
    saved = program.save()
    saved[0].encode()
    root, program = build()
    program.load(saved)
    assert root.v == texts
