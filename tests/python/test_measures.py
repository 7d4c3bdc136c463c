"""Holds the size of the parts, the lists of what users can name, and how plain the code is.

`scripts/measure-code` counts. What it counted is in measures.json, and what users can name is in
surface.json. Raising a number of tokens, or adding a name, takes a sentence in the commit's message
that says what a user gets. The other counts may only fall.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import pkgutil
import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

import odyssey
from odyssey.cli import group
from odyssey.cli.commands import COMMANDS
from odyssey.compile import library

from .test_layers import SATELLITES

ROOT = library.source_root()
HERE = Path(__file__).parent
SURFACE = json.loads((HERE / "surface.json").read_text())


def load_script(name: str) -> ModuleType:
    """Returns a script of the repository as a module."""
    loader = SourceFileLoader(name.replace("-", "_"), str(ROOT / "scripts" / name))
    script = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = script  # dataclasses look their module up
    loader.exec_module(script)
    return script


measure_code = load_script("measure-code")
RECORDED = json.loads(measure_code.RECORD.read_text())


@functools.cache
def rooms() -> dict[str, Any]:
    """Returns what the measures count, by room.

    It takes seconds, and every worker of pytest imports this file, so only a test calls it.
    """
    return measure_code.measure()


@functools.cache
def tokens() -> dict[str, int]:
    """Returns the tokens of each part."""
    return measure_code.tokens_of_parts(rooms())


def test_parts_and_rooms_are_recorded():
    assert set(measure_code.PARTS) == {"kernels", "training", *SATELLITES}
    assert set(tokens()) == set(RECORDED["tokens"])
    assert set(rooms()) == set(RECORDED["rooms"])


@pytest.mark.parametrize("part", sorted(RECORDED["tokens"]))
def test_a_part_has_no_more_tokens_than_recorded(part):
    assert tokens()[part] <= RECORDED["tokens"][part], (
        f"{part} has {tokens()[part]} tokens; say in the commit's message what users get for more, "
        "and run scripts/measure-code --record"
    )


@pytest.mark.parametrize("measure", measure_code.FileMeasures.NAMES)
def test_the_code_gets_no_less_plain(measure):
    for name, room in rooms().items():
        count = room.counts[measure]
        limit = RECORDED["rooms"][name].get(measure, 0)
        places = "\n".join(f"{p.path}:{p.line}: {p.text}" for p in room.places[measure])
        assert count <= limit, f"{name} has {count} {measure}, at most {limit} before:\n{places}"


PLAIN = '"""Doc\nmore."""\n\nx = 1  # why\ndef f(n):\n    """Doc."""\n    return n + 1\n'
PACKED = """
def f(found, b):
    a, b = 1, found
    a, b = b, a
    rows = [[x for x in range(n)] for n in range(3)]
    return a  # a comment that is long enough for its line to have more than a hundred columns in all
"""


def test_what_the_measures_count():
    plain = measure_code.FileMeasures("plain.py", PLAIN)
    assert plain.tokens == len("x = 1 def f ( n ) : return n + 1".split())
    assert [len(getattr(plain, name)) for name in plain.NAMES] == [0, 0, 0, 0]
    packed = measure_code.FileMeasures("packed.py", PACKED)
    assert [place.text for place in packed.weak_names] == ["found"]
    assert [place.line for place in packed.tuples] == [3]  # line 4 is a swap
    assert [place.line for place in packed.nested_comprehensions] == [5]
    assert [place.line for place in packed.long_comments] == [6]


def test_mojo_is_counted_without_comments_and_docstrings():
    assert measure_code.mojo_tokens('"""Doc\nmore.\n"""\n\nvar x = 1\n# why\n') == 4


# --- what users can name ------------------------------------------------------------------------


def compare(kind: str, names: set[str]) -> None:
    """Fails with what is new and what is gone."""
    listed = set(SURFACE[kind])
    added = sorted(names - listed)
    gone = sorted(listed - names)
    assert not added and not gone, (
        f"{kind} that surface.json does not list: {added}; that are gone: {gone}; "
        "edit the list, and say in the commit's message what users get"
    )


def public_names() -> set[str]:
    """Returns the names in `__all__` of the package and of its rooms."""
    names = {f"odyssey.{name}" for name in odyssey.__all__}
    for module in pkgutil.iter_modules(odyssey.__path__, "odyssey."):
        if module.name in ("odyssey.__main__", "odyssey.ray"):  # the second one needs Ray
            continue
        imported = importlib.import_module(module.name)
        if imported.__name__ != module.name:  # another name of a module in a room
            continue
        exported = getattr(imported, "__all__", ())
        names |= {f"{module.name}.{name}" for name in exported}
    return names


def test_public_names_are_listed():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    compare("public names", public_names())


def commands() -> dict[str, click.Command]:
    """Returns the commands of the command line by name."""
    context = click.Context(group)
    return {name: group.get_command(context, name) for name in COMMANDS}


def test_commands_are_listed():
    compare("commands", set(commands()))


def test_options_are_listed():
    options = {
        f"{name} {max(parameter.opts, key=len)}"
        for name, command in commands().items()
        for parameter in command.params
        if isinstance(parameter, click.Option)
    }
    compare("options", options)


def test_environment_variables_are_listed():
    variables: set[str] = set()
    for path, text in measure_code.read_files(None):  # noqa: B007
        variables |= set(re.findall(r"\bODYSSEY_[A-Z][A-Z_]*[A-Z]\b", text))
    compare("environment variables", variables)


def test_rooms_are_listed():
    compare("rooms", set(rooms()))
