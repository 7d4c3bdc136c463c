"""What a command leaves where the user said. A file: looked at before the work, and there whole or not at all after it.

What it is not: the files of a run or a checkpoint, which have names and owners of their own (runs.py, files.py).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import OutputError


class ReaderGone(Exception):
    """Nobody reads standard output any more. No OSError: click makes exit code 1 of that."""


def say(line: str) -> None:
    """Prints a line on standard output, at once.

    Raises:
        ReaderGone, OutputError: it does not get there.
    """
    try:
        print(line, flush=True)
    except BrokenPipeError as problem:
        drop()
        raise ReaderGone from problem
    except OSError as problem:
        drop()
        raise OutputError(f"[output] standard output cannot be written: {problem.strerror or problem}") from problem


def drop() -> None:
    """Gives up what standard output has not taken, or the flush at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check(path: Path, option: str) -> None:
    """OutputError now if the file that `option` names could not be written after hours of training."""
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise OutputError(f"[output] {option} {path} is a directory; name a file in it")
        if not target.parent.is_dir():
            raise OutputError(f"[output] {option} {path}: {target.parent} is not a directory; create it first")
        if target.exists() and not os.access(target, os.W_OK):
            raise OutputError(f"[output] {option} {path} is there and write-protected; name another file")
        if target.exists() and not target.is_file():
            return  # a pipe or a device: written in place
        aside = _aside(target)
        with open(aside, "xb"):
            pass
        aside.unlink()
    except OSError as problem:
        raise OutputError(f"[output] {option} {path} cannot be written: {problem.strerror}") from problem


def write(path: Path, option: str, make: Callable[[Path], None]) -> None:
    """Let `make` make the file aside, then rename it: the file is there whole or not at all."""
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            make(target)
            return
        aside = _aside(target)
        try:
            make(aside)
            with open(aside, "rb") as file:
                os.fsync(file.fileno())
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as problem:
        raise OutputError(f"[output] {option} {path} cannot be written: {problem.strerror or problem}") from problem


def _aside(target: Path) -> Path:
    return target.with_name(f".odyssey-{os.getpid()}{target.suffix[:20]}")


def finite(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, option: str, value: Any) -> None:
    """Writes a value as JSON; null for a number that JSON has none for."""
    text = json.dumps(finite(value), indent=1, allow_nan=False) + "\n"

    def make(aside: Path) -> None:
        aside.write_text(text, encoding="utf-8")

    write(path, option, make)
