"""The configuration file of `odyssey train`: TOML whose keys are option names, checked before
anything uses it.

A value is a number, true or false, or a text, which is never given to a shell, expanded or
evaluated. What values mean and which go together is checked where `Settings` are made.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from odyssey.errors import ConfigError, DataError, near, printable

LIMIT = 64 << 10  # bytes of a file
LINE = 8 << 10  # characters of a line; a TOML parser takes quadratic time for one key of many parts
TEXT = 4096  # characters of a text value, the longest path of Linux
INTEGER = 2**63  # integers are below, and not below minus this: what the kernels can count


def read_config(path: Path, parameters: Sequence[click.Parameter]) -> dict[str, Any]:
    """The values of a TOML file, by the names that click uses for its options.

    Raises DataError: the file cannot be read, is longer than LIMIT, or not UTF-8. ConfigError: it
    is not TOML, has a key that is no option, or a value of another type than its option's.
    """
    try:
        with open(path, "rb") as file:  # also a pipe, as a shell's <(...) gives
            data = file.read(LIMIT + 1)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise DataError(
            f"[config] {path} cannot be read: {reason}; give --config a TOML file"
        ) from problem
    return parse_config(data, str(path), parameters)


def parse_config(data: bytes, name: str, parameters: Sequence[click.Parameter]) -> dict[str, Any]:
    """The values in the bytes of a TOML file; `name` says in messages which.

    Errors as `read_config`.
    """
    content = _toml(data, name)
    known = _keys(parameters)
    values: dict[str, Any] = {}
    for key, value in content.items():
        option = key.replace("_", "-")
        if option not in known:
            meant = near(option, known)
            hint = (
                f"did you mean '{meant[0]}'?" if meant else f"known are {', '.join(sorted(known))}"
            )
            raise ConfigError(f"[config] {name}: unknown key '{printable(key, limit=60)}'; {hint}")
        parameter, inverted = known[option]
        if parameter.name in values:
            raise ConfigError(
                f"[config] {name}: '{key}' is given twice, in two spellings; leave one out"
            )
        values[str(parameter.name)] = _value(name, key, value, parameter, inverted)
    return values


def _toml(data: bytes, name: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    if len(data) > LIMIT:
        raise DataError(
            f"[config] {name} cannot be read: it is longer than {LIMIT} bytes; give --config a "
            "TOML file"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise DataError(
            f"[config] {name} cannot be read: it is not UTF-8 text; give --config a TOML file"
        ) from None
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > LINE:
            raise ConfigError(
                f"[config] {name}: line {number} has {len(line)} characters; at most {LINE} are "
                "allowed"
            )
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(
            f"[config] {name} is not TOML that is read here: it is nested too deeply"
        ) from None
    # TOMLDecodeError is one; so is what an integer of 5000 digits gives
    except ValueError as problem:
        raise ConfigError(
            f"[config] {name} is not TOML: {printable(str(problem), limit=200)}"
        ) from problem


def _keys(parameters: Sequence[click.Parameter]) -> dict[str, tuple[click.Option, bool]]:
    """Key -> its option, and whether the key means the opposite (`no-eval`)."""
    known = {}
    for option in parameters:
        if not isinstance(option, click.Option) or option.name in ("config", "help"):
            continue
        for spelled in option.opts:
            if spelled.startswith("--"):
                known[spelled[2:]] = (option, False)
        for spelled in option.secondary_opts:
            known[spelled[2:]] = (option, True)
    return known


def _value(name: str, key: str, value: Any, option: click.Option, inverted: bool) -> Any:
    """The value with the type of its option; click would turn 1.5 epochs into 1 and `true` into
    1.
    """
    if option.is_flag:
        wanted = "true or false"
        fits = isinstance(value, bool)
    elif isinstance(option.type, click.types.IntParamType):
        wanted = "an integer"
        fits = _integer(value)
    elif isinstance(option.type, click.types.FloatParamType):
        wanted = "a number"
        fits = _integer(value) or isinstance(value, float) and math.isfinite(value)
    else:
        wanted = "a text in quotes"
        fits = isinstance(value, str)
        if fits and (len(value) > TEXT or "\0" in value):
            what = "a NUL character" if len(value) <= TEXT else f"{len(value)} characters"
            raise ConfigError(
                f"[config] {name}: {key} has {what}; a text of at most {TEXT} without NUL is "
                "allowed"
            )
    if not fits:
        raise ConfigError(f"[config] {name}: {key} = {_shown(value)}; {wanted} is allowed")
    return not value if inverted else value


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -INTEGER <= value < INTEGER


def _shown(value: Any) -> str:
    """The value, shortened: it may be a table as long as the file."""
    if isinstance(value, int) and not _integer(value) and not isinstance(value, bool):
        return f"an integer of {value.bit_length()} bits"  # its digits could be too many to print
    try:
        return printable(json.dumps(value, default=str), limit=80)
    except (ValueError, RecursionError):
        return "something nested deeply or very large"
