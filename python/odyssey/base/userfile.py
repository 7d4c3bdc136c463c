"""Objects that a file of the user's own code defines, as a command line names it: FILE.py:NAME."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from .paths import expand_path


def named(option: str, place: str, example: str) -> Callable[..., Any]:
    """The class or function that "FILE.py:NAME" names; the file is run as an import would run it.

    option: with who asks, for messages: "[load] --model". Raises ConfigError: there is no such
    file, or nothing of that name in it.
    """
    file, _, name = place.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{option} {place!r}; write FILE.py:NAME, as in {example}")
    path = expand_path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError:
        raise ConfigError(f"{option} {place}: there is no file {file}") from None
    target = getattr(module, name, None)
    if not callable(target):
        classes = [
            n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == spec.name
        ]
        raise ConfigError(
            f"{option} {place}: {file} has no class {name}, but {', '.join(classes) or 'none'}"
        )
    return target
