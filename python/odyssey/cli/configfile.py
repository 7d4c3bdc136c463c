"""The configuration file of `odyssey train`: TOML whose keys are option names, checked before
anything uses it.

A value is a number, true or false, or a string, which is never passed to a shell or evaluated. Only
paths are expanded, as everywhere (base/paths.py). What values mean and which go together is checked
where `Settings` are made.
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

MAX_BYTES = 64 << 10  # of a file
LINE = 8 << 10  # characters of a line; a TOML parser takes quadratic time for one key of many parts
MAX_TEXT = 4096  # characters of a value, the longest path of Linux
INTEGER_BOUND = 2**63  # integers are below, and not below minus this: what the kernels can count


def read_config(path: Path, parameters: Sequence[click.Parameter]) -> dict[str, Any]:
    """Returns the values of a TOML file, by the names that click uses for its options.

    Raises:
        DataError: the file cannot be read, is too long, or not UTF-8.
        ConfigError: it is not TOML, has a key that is not an option, or a value of another type
            than its option.
    """
    try:
        with open(path, "rb") as file:  # also a pipe, as a shell's <(...) gives
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise DataError(
            f"[config] {path} cannot be read: {reason}; give --config a TOML file"
        ) from problem
    return parse_config(data, str(path), parameters)


def parse_config(data: bytes, name: str, parameters: Sequence[click.Parameter]) -> dict[str, Any]:
    """Returns the values in the bytes of a TOML file. See `read_config`.

    name: the name of the file in messages.
    """
    content = _parse_toml(data, name)
    options_by_key = _map_keys(parameters)
    values: dict[str, Any] = {}
    for key, value in content.items():
        option = key.replace("_", "-")
        if option not in options_by_key:
            suggestions = near(option, options_by_key)
            hint = (
                f"did you mean '{suggestions[0]}'?"
                if suggestions
                else f"known are {', '.join(sorted(options_by_key))}"
            )
            raise ConfigError(f"[config] {name}: unknown key '{printable(key, limit=60)}'; {hint}")
        parameter, inverted = options_by_key[option]
        if parameter.name in values:
            raise ConfigError(
                f"[config] {name}: '{key}' is given twice, in two spellings; leave one out"
            )
        values[str(parameter.name)] = _check_value(name, key, value, parameter, inverted)
    return values


def _parse_toml(data: bytes, name: str) -> dict[str, Any]:
    """Parses TOML within limits. See `read_config` for the errors."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    if len(data) > MAX_BYTES:
        raise DataError(
            f"[config] {name} cannot be read: it is longer than {MAX_BYTES} bytes; give --config a "
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
    # A syntax error raises TOMLDecodeError, which is a ValueError. An integer of more than 4,300
    # digits raises a ValueError of Python's own.
    except ValueError as problem:
        raise ConfigError(
            f"[config] {name} is not TOML: {printable(str(problem), limit=200)}"
        ) from problem


def _map_keys(parameters: Sequence[click.Parameter]) -> dict[str, tuple[click.Option, bool]]:
    """Maps each key to its option, and True if the key means the opposite, such as `no-eval`."""
    options_by_key = {}
    for option in parameters:
        if not isinstance(option, click.Option) or option.name in ("config", "help"):
            continue
        for spelling in option.opts:
            if spelling.startswith("--"):
                options_by_key[spelling[2:]] = (option, False)
        for spelling in option.secondary_opts:
            options_by_key[spelling[2:]] = (option, True)
    return options_by_key


def _check_value(name: str, key: str, value: Any, option: click.Option, inverted: bool) -> Any:
    """Returns the value for an option, negated if the key means the opposite.

    Raises ConfigError if it isn't of the option's type. click would convert 1.5 epochs to 1, and
    `true` to 1.
    """
    if option.is_flag:
        expected = "true or false"
        fits = isinstance(value, bool)
    elif isinstance(option.type, click.types.IntParamType):
        expected = "an integer"
        fits = _is_integer(value)
    elif isinstance(option.type, click.types.FloatParamType):
        expected = "a number"
        fits = _is_integer(value) or isinstance(value, float) and math.isfinite(value)
    else:
        expected = "a text in quotes"
        fits = isinstance(value, str)
        if fits and (len(value) > MAX_TEXT or "\0" in value):
            fault = "a NUL character" if len(value) <= MAX_TEXT else f"{len(value)} characters"
            raise ConfigError(
                f"[config] {name}: {key} has {fault}; a text of at most {MAX_TEXT} without NUL is "
                "allowed"
            )
    if not fits:
        raise ConfigError(
            f"[config] {name}: {key} = {_shorten_value(value)}; {expected} is allowed"
        )
    return not value if inverted else value


def _is_integer(value: Any) -> bool:
    """Tells whether a value is an integer of at most 64 bits, and not a bool."""
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and -INTEGER_BOUND <= value < INTEGER_BOUND
    )


def _shorten_value(value: Any) -> str:
    """Returns a value for messages. It is cut, because it may be a table as long as the file."""
    if isinstance(value, int) and not _is_integer(value) and not isinstance(value, bool):
        return f"an integer of {value.bit_length()} bits"  # its digits could be too many to print
    try:
        return printable(json.dumps(value, default=str), limit=80)
    except (ValueError, RecursionError):
        return "something nested deeply or very large"
