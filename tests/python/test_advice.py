"""No message and no page advises to delete what may hold results.

The directory of a run holds its checkpoints, and a folder that a user named may hold anything. The
way on is another directory, a setting, or a file that is moved.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import odyssey

PACKAGE = Path(odyssey.__file__).parent
ROOT = PACKAGE.parents[1]

#: The imperative of a verb that destroys. "is removed" and "removes" tell what odyssey does itself.
ADVICE = re.compile(
    r"\b(?:delete|remove|erase|discard|wipe|purge|unlink|rmdir|throw away|get rid of|clear "
    r"out|clean up)\b"
    r"|\brm +[-/\w$]"
    r"|\bempty (?:it|them|the)\b|\boverwrite (?:it|them|the)\b",
    re.I,
)

#: (a part of the text, why it may stay)
ALLOWED = [
    ("applies only to", "a setting of the command, not a file"),
    ("--nesterov needs momentum", "a setting of the command, not a file"),
    ("add it there, or remove it", "a name in a table of the sources, seen by developers"),
    (
        'rm -rf "$TMPDIR"',
        "a line of a job's script: the folder that the same script has made for temporary files",
    ),
    ("Collectives overwrite what they are given", "arrays in memory"),
    ("docker run --rm", "an option of docker"),
    ("handle.remove()", "a hook of a module, as in PyTorch"),
]


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each string of a program that is not a docstring.

    Values in it are {}.
    """
    tree = ast.parse(source)
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(node.value)
        # its own parts only: strings within {} are messages as well
        if isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            ]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.lineno, node.value


@functools.cache
def messages() -> list[tuple[str, str]]:
    """Returns (place, text) of each string of the programs."""
    texts = []
    for folder in (PACKAGE, ROOT / "benchmarks", ROOT / "examples"):
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            texts += [(f"{name}:{line}", text) for line, text in strings(path.read_text())]
    for path in sorted((ROOT / "mojo").rglob("*.mojo")):
        texts += [
            (path.relative_to(ROOT).as_posix(), text)
            for text in re.findall(r'"([^"\n]+)"', path.read_text())
        ]
    return texts


@functools.cache
def pages() -> list[tuple[str, str]]:
    """Returns (place, paragraph) of each page, and of programs and files that users start from."""
    files = [
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("docs/**/*.ipynb"),
        ROOT / "README.md",
        ROOT / "SECURITY.md",
    ]
    files += [
        path
        for folder in ("examples", "containers")
        for path in (ROOT / folder).glob("*")
        if path.is_file()
    ]
    texts = []
    for path in sorted(files):
        if path.name != "log.md":  # history
            name = path.relative_to(ROOT).as_posix()
            texts += [
                (name, " ".join(paragraph.split()))
                for paragraph in re.split(r"\n\s*\n", path.read_text())
            ]
    return texts


def advice(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Returns the texts that advise to delete something, but for what is allowed."""
    found = []
    for place, text in texts:
        for match in ADVICE.finditer(text):
            around = text[max(0, match.start() - 150) : match.end() + 150]
            if " " in text.strip() and not any(part in around for part, _ in ALLOWED):
                found.append(f"{place}: {around}")
    return found


@pytest.mark.parametrize(
    "text",
    [
        "[launch] RUN/attempt.json has no attempt's number; delete the directory",
        "choose another --output, or empty it",
        "name another directory, or remove the old one",
        "Run `rm -r run` first.",
        "$ rm run/attempt.json",
        "Delete the cache by hand.",
    ],
)
def test_advice_to_delete_is_found(text):
    assert advice([("here", text)])


@pytest.mark.parametrize(
    "text",
    [
        "an older one cannot be removed: disk full",
        "the data set is empty; give at least one sample",
        "odyssey removes what the attempt left",
        "The index rm_1 of a term",
        "remove",  # a name
    ],
)
def test_what_odyssey_does_itself_is_not(text):
    assert not advice([("here", text)])


def test_strings_within_a_string_are_read():
    source = (
        "def f():\n    'delete a docstring'\n    return f\"{'' if x else 'delete it, or '}set {y}\""
    )
    assert [text for _, text in strings(source)] == ["{}set {}", "", "delete it, or "]


@pytest.mark.parametrize("texts", [messages, pages])
def test_nothing_advises_to_delete_what_may_hold_results(texts):
    found = advice(texts())
    assert not found, "say which other directory or setting to use:\n" + "\n".join(found)


def test_every_exception_is_needed():
    texts = [text for _, text in [*messages(), *pages()]]
    assert [part for part, _ in ALLOWED if not any(part in text for text in texts)] == []
