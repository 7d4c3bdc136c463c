"""The errors a user can meet, and the exit code each one ends a command with.

An error says who, what was given, what is allowed and what to do next, in one line. The command
line prints that line and exits with the code; the library raises it. Anything that is not an
`OdysseyError` is a defect with a traceback. Most are also the built-in error that PyTorch raises in
such a place, so that a program written for it catches them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Error = TypeVar("Error", bound="OdysseyError")
LINE = 4000  # characters of an error's line


class OdysseyError(Exception):
    """Base of every error that is about the user's input or machine, not about a defect.

    `exit_code` is what a command ends with (sysexits-like: 64 usage, 65 data, 69 unavailable, 70
    internal, 73 output, 75 stopped and can go on, 76 protocol). `lines`: its message has several
    lines; elsewhere a line break is part of somebody's name and shown as such.
    `raised_on_all_ranks`: every rank raises it, so rank 0 alone needs to say it.
    """

    exit_code = 64
    lines = False
    raised_on_all_ranks = False

    def on_all_ranks(self: Error) -> Error:
        """Itself, marked as raised on all ranks."""
        self.raised_on_all_ranks = True
        return self


class ConfigError(OdysseyError, ValueError):
    """A setting has a value that is not allowed, alone or together with another."""


class ShapeError(OdysseyError, ValueError, RuntimeError):
    """Tensors whose shapes, dtypes or layouts do not fit the operation."""


class DataError(OdysseyError, ValueError):
    """A data file is missing, truncated, altered or not what its name says."""

    exit_code = 65


class CheckpointError(DataError):
    """A checkpoint is torn, altered, not signed as it must be, or no checkpoint: it is not used."""


class NumericsError(OdysseyError, ArithmeticError):
    """The training left the numbers (NaN or infinity); the step that did it was not applied."""

    exit_code = 65


class BuildError(OdysseyError, RuntimeError):
    """The kernels could not be compiled or loaded."""

    exit_code = 69
    lines = True  # the compiler's


class DeviceError(OdysseyError, RuntimeError):
    """A device was asked for that this machine does not have."""

    exit_code = 69


class LaunchError(OdysseyError, RuntimeError):
    """Ranks cannot be started here, or a run was given up."""

    exit_code = 69


class OutputError(OdysseyError):
    """A file that was asked for cannot be written."""

    exit_code = 73


class Stopped(OdysseyError):
    """Somebody asked a training to stop; it did, after a checkpoint from which it can go on."""

    exit_code = 75


class CollectiveError(OdysseyError, RuntimeError):
    """The ranks did not do the same: a collective call, or a message, that differs between them,
    or a rank that did not come. No wrong number was used.
    """

    exit_code = 76


def printable(text: str, *, keep: str = "", limit: int | None = None) -> str:
    """The text without characters that act on a terminal or hide: each becomes its escape, such
    as \\x1b or \\u202e.

    Text from files, file names and other processes goes through here before it is shown. `keep`
    names characters that stay (a newline, where lines are expected). What goes beyond `limit`
    characters is left out and counted.
    """
    excess = 0
    if limit is not None and len(text) > limit:
        excess = len(text) - limit
        text = text[:limit]
    if not text.isprintable():
        text = "".join(
            c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii")
            for c in text
        )
    return f"{text}... ({excess} more characters)" if excess else text


def counted(count: Any, noun: str = "rank") -> str:
    """Returns a number with its noun: "1 rank", "2 ranks"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def near(word: str, known: Iterable[str], alike: float = 0.6) -> list[str]:
    """Returns close matches for a misspelled word, at most three; `alike`: from 0 to 1, how
    close they must be.
    """
    import difflib

    return difflib.get_close_matches(word[:60], list(known), 3, alike)


def check_kind(
    who: str, what: str, given: Any, kind: type, of: str, *, by_name: Mapping[str, str] = {}
) -> None:
    """ConfigError for what is no object of a class.

    Args:
        of: what is to be given instead, before the class's name.
        by_name: calls that create such objects, by the names that a text may have.
    """
    if not isinstance(given, kind):
        name = (
            f"the class {given.__name__}"
            if isinstance(given, type)
            else f"of type {type(given).__name__}"
        )
        instead = f"give an object of {of}{kind.__name__}"
        if isinstance(given, type) and issubclass(given, kind):
            instead = f"give an object of it, such as {given.__name__}(...)"
        elif isinstance(given, str):
            name = repr(given)
            instead = f"use {by_name[given.lower()]}" if given.lower() in by_name else instead
        is_torch = any(base.__module__.partition(".")[0] == "torch" for base in type(given).__mro__)
        if is_torch and kind.__module__.startswith("odyssey."):
            name = f"PyTorch's ({name})"
            instead = "odyssey.torch.DistributedTrainer trains PyTorch's modules"
        raise ConfigError(f"[{who}] {what} is {name}; {instead}")


def check_integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as a Python int if it is an integer from `low` to `high` (both allowed), else
    ConfigError naming it.
    """
    bound = f"at least {low}" if high is None else f"from {low} to {high}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name} is {value!r}; it must be an integer {bound}") from None
    if number < low or (high is not None and number > high):
        raise ConfigError(f"{name} is {number}; it must be {bound}")
    return number


def check_number(
    name: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False
) -> float:
    """`value` as a float if it is at least `low` (`open_low`: above it) and below `high`, else
    ConfigError.
    """
    allowed = (
        hasattr(value, "__float__") and (low < value if open_low else low <= value) and value < high
    )
    if not allowed:
        above = "above" if open_low else "at least"
        below = "finite" if high == math.inf else f"below {high:g}"
        kind = "" if hasattr(value, "__float__") else "a number "
        raise ConfigError(f"{name} is {value!r}; it must be {kind}{above} {low:g} and {below}")
    return float(value)
