"""Kinds of state that few programs have: the order of sets, what a step creates and no checkpoint
keeps, methods of classes, modules of the program, exceptions, and combined flags.
"""

from __future__ import annotations

import abc
import enum
import hashlib
import io
import itertools
import random
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
from capture.test_capture import Program

from odyssey.capture import values
from odyssey.errors import ConfigError


class Holder:
    """A callback with one attribute."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


# --- sets ---


def grown_and_shrunk(seed: int) -> set:
    """Returns a set of numbers that were added and removed in a random order."""
    draw = random.Random(seed)
    numbers: set[Any] = set()
    for _ in range(draw.randint(1, 300)):
        limit = draw.choice([10, 100, 10_000])
        is_pair = seed % 4 == 0  # their hashes fall on the same places more often
        numbers.add((draw.randrange(limit), 1) if is_pair else draw.randrange(limit))
        if draw.random() < 0.4:
            numbers.pop()
    return numbers


def test_sets_keep_their_order_or_are_named():
    kept = 0
    for seed in range(100):
        holder = Holder(set())
        program = Program({"callback": holder})
        holder.value = grown_and_shrunk(seed)
        saved = program.save()
        again = Holder(set())
        Program({"callback": again}).load(saved)
        assert again.value == holder.value
        is_same = list(again.value) == list(holder.value)
        assert is_same or "the items of this set in another order" in program.lines[0], seed
        kept += is_same
    assert kept > 15  # the others had items that are gone


@pytest.mark.parametrize("first", [0, 8])
def test_a_set_that_has_other_places_for_its_items_has_changed(first):
    one, other = {first, 8 - first}, {8 - first, first}
    assert one == other
    assert list(one) != list(other)
    assert values.mark(one) != values.mark(other)


def test_the_order_of_strings_is_not_compared():
    one = {"a", "b", "c"}
    assert values.mark(one) == values.mark({"c", "b", "a"})
    assert values.keeps_order([one, {"sets": one}])


# --- what comes late ---


@pytest.mark.parametrize(
    "create",
    [
        lambda: (number for number in range(3)),
        lambda: itertools.cycle([1, 2]),
        lambda: itertools.islice([1, 2, 3], 2),
        lambda: zip([1], [2], strict=True),
        hashlib.sha256,
        io.StringIO,
        threading.Event,
        threading.Semaphore,
    ],
)
def test_what_a_callback_creates_when_fit_starts_is_named(create):
    holder = Holder()
    program = Program({"callback": holder})
    holder.value = create()
    program.capture.expect()
    program.save()
    (line,) = program.lines
    assert "checkpoints can't keep callback.value" in line
    program.save()
    assert len(program.lines) == 1


# --- methods of classes ---


class Rule:
    @property
    def rate(self) -> float:
        return 0.1

    def step(self) -> float:
        return 0.1

    def other_step(self) -> float:
        return 0.2


def other_rate(self: Any) -> float:
    return 0.3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", Rule.other_step),
        ("step", other_rate),
        ("rate", property(other_rate)),
        ("step", lambda self: 0.4),
    ],
)
def test_a_method_of_a_class_that_a_step_replaces_is_an_error(monkeypatch, name, value):
    program = Program({"callback": Holder(Rule())})
    program.capture.begin_epoch(0)
    program.capture.note_start()
    program.save()
    monkeypatch.setattr(Rule, name, value)
    with pytest.raises(ConfigError, match=rf"Rule\.{name} was set to .* since the epoch started"):
        program.save()


class Decorated:
    step = other_rate


def test_a_class_that_comes_late_may_have_decorated_methods():
    holder = Holder()
    program = Program({"callback": holder})
    program.capture.begin_epoch(0)
    program.capture.note_start()

    holder.value = Decorated
    program.save()


# --- modules ---


def module_of_the_program(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = f"/home/user/{name}.py"
    module.factor = 1.0
    module.table = {"a": [1.0]}
    sys.modules[name] = module
    return module


def reads_inside(step: int) -> float:
    import a_module_of_the_program

    return a_module_of_the_program.factor * step


def reads_from_inside(step: int) -> float:
    from a_module_of_the_program import factor, table

    return factor * table["a"][0] * step


def reads_by_string() -> float:
    return globals()["GLOBAL_FACTOR"]


GLOBAL_FACTOR = 1.0


@pytest.mark.parametrize("read", [reads_inside, reads_from_inside, "attribute"])
def test_modules_of_the_program_are_kept(monkeypatch, read):
    name = "a_module_of_the_program"
    monkeypatch.setitem(sys.modules, name, None)
    module = module_of_the_program(name)
    value = module if read == "attribute" else read
    program = Program({"callback": Holder(value)})
    module.factor = 2.0
    if read != reads_inside:
        module.table["a"][0] = 3.0
    saved = program.save()
    assert not program.lines
    again = module_of_the_program(name)
    Program({"callback": Holder(again if read == "attribute" else read)}).load(saved)
    assert (again.factor, again.table) == (module.factor, module.table)


def test_a_module_that_a_step_imports_is_named(monkeypatch):
    name = "a_module_of_the_program"
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    program = Program({"callback": Holder(reads_inside)})
    module_of_the_program(name).factor = 2.0
    program.save()
    (line,) = program.lines
    assert f"{name}:factor (in a module that a step has imported)" in line


def test_globals_that_are_read_by_a_string_are_kept(monkeypatch):
    monkeypatch.setitem(globals(), "GLOBAL_FACTOR", 1.0)
    program = Program({"callback": Holder(reads_by_string)})
    globals()["GLOBAL_FACTOR"] = 2.0
    saved = program.save()
    globals()["GLOBAL_FACTOR"] = 1.0
    Program({"callback": Holder(reads_by_string)}).load(saved)
    assert GLOBAL_FACTOR == 2.0


# --- exceptions, abstract classes, flags ---


class Failure(Exception):
    """An exception with a number."""

    def __init__(self, number: float) -> None:
        super().__init__(number)
        self.number = number


@pytest.mark.parametrize("build", [lambda: Failure(1.0), lambda: ValueError(1.0)])
def test_exceptions_are_kept(build: Callable[[], Any]):
    holder = Holder(build())
    program = Program({"callback": holder})
    holder.value.args = (2.0,)
    holder.value.number = 3.0
    saved = program.save()
    again = Holder(build())
    Program({"callback": again}).load(saved)
    assert again.value.args == (2.0,)
    assert again.value.number == 3.0


class Part(enum.Flag):
    HEAD = 1
    NORM = 2
    BODY = 4


class Abstract(abc.ABC):
    """An abstract class, which has a cache written in C."""

    def __init__(self) -> None:
        self.flags = Part.HEAD
        self.view = types.MappingProxyType({"a": 1})

    @abc.abstractmethod
    def step(self) -> float: ...


class Concrete(Abstract):
    def step(self) -> float:
        return 0.1


def test_abstract_classes_and_combined_flags_are_not_named():
    one = Concrete()
    program = Program({"callback": one})
    program.capture.announce_opaque(strict=True)
    one.flags = Part.HEAD | Part.NORM
    saved = program.save()
    assert not program.lines
    again = Concrete()
    Program({"callback": again}).load(saved)
    assert again.flags == Part.HEAD | Part.NORM
