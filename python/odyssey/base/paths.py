"""Paths as a user writes them: `~` and variables are expanded here, and nowhere else.

A shell expands them on a command line. In a TOML file, a Python argument or an environment variable
nobody else does, and a folder called "~" would appear.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import ConfigError, printable

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(rf"\$(?:\{{([^{{}}]+)\}}|({_NAME.pattern}))")


def expand_path(path: str | os.PathLike[str]) -> Path:
    """Returns a path with `~`, `~user`, `$NAME` and `${NAME}` expanded.

    A variable that isn't set, and a user who doesn't exist, stay as they are if there is a file or
    folder of that literal name. The string "./~" is a folder called "~".

    Raises:
        ConfigError: a variable isn't set, a home directory isn't known, or this is not a path.

    Example:
        >>> expand_path("~/runs/$USER")
        PosixPath('/home/ada/runs/ada')
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise ConfigError(
            f"[files] {path!r} is not a path; a string or a pathlib.Path expected"
        ) from None
    expanded_path = Path(_expand_home(_expand_variables(text)))
    if str(expanded_path).startswith("~"):
        # Path("./~") is Path("~"), which would be the home directory if it was expanded again.
        return Path.cwd() / expanded_path
    return expanded_path


def variables_in(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of the variables in some paths that are set, in alphabetical order.

    A launcher passes them to ranks, which expand the same paths.
    """
    names = {match[1] or match[2] for text in texts for match in _VARIABLE.finditer(text)}
    return tuple(sorted(name for name in names if name in os.environ and _NAME.fullmatch(name)))


def _expand_variables(text: str) -> str:
    """Returns a path with the values of its variables.

    Raises ConfigError if one isn't set.
    """
    expanded = ""
    position = 0
    for match in _VARIABLE.finditer(text):
        name = match[1] or match[2]
        expanded += text[position : match.start()]
        position = match.end()
        if name in os.environ:
            expanded += os.environ[name]
            continue
        rest_of_name, _, _ = text[match.start() :].partition("/")
        if not os.path.lexists(_home(expanded + rest_of_name)):
            raise ConfigError(
                f"[files] {_shorten(text)}: the variable {printable(name, limit=60)} isn't set; "
                "set it, or write the path without it (odyssey launch passes variables to ranks "
                "with --env)"
            )
        expanded += match[0]
    return expanded + text[position:]


def _expand_home(text: str) -> str:
    """Returns a path with a home directory in the place of `~` or `~user` at its start.

    Raises ConfigError if the directory isn't known.
    """
    if not text.startswith("~"):
        return text
    first_name, _, _ = text.partition("/")
    # An empty HOME would make "/runs" of "~/runs".
    is_home_empty = first_name == "~" and os.environ.get("HOME") == ""
    expanded = _home(text)
    if expanded != text and not is_home_empty:
        return expanded
    if first_name == "~":
        raise ConfigError(
            f"[files] {_shorten(text)}: the home directory isn't known; set HOME, or write the "
            "path without ~"
        )
    if not os.path.lexists(first_name):
        user = printable(first_name[1:], limit=60)
        raise ConfigError(
            f"[files] {_shorten(text)}: there is no user {user}; write ./{printable(first_name)} "
            "for a file of that name"
        )
    return text


def _home(path: str) -> str:
    """Returns a path with the home directory of a known user, and others as they are."""
    try:
        return os.path.expanduser(path)
    except ValueError:  # a NUL in the name of a user
        return path


def _shorten(path: str) -> str:
    """Returns a path for messages."""
    return printable(path, limit=200)
