"""Output files of commands: checked before the work, whole or not there after it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError, OutputError
from .files import encode_json, write_whole


class ReaderGone(Exception):
    """Nobody reads standard output any more. No OSError: click makes exit code 1 of that."""


def say(line: str) -> None:
    """Prints a line on standard output, at once.

    Raises ReaderGone, OutputError: it does not get there.
    """
    try:
        print(line, flush=True)
    except BrokenPipeError as problem:
        drop()
        raise ReaderGone from problem
    except OSError as problem:
        drop()
        raise OutputError(
            f"[output] standard output cannot be written: {problem.strerror or problem}"
        ) from problem


def open_streams() -> None:
    """Opens those of standard input, output and error that are closed, on nothing: what is
    opened next would take their numbers, and get what was meant for a user.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:  # never with a lower one closed: those are open by now
                os.dup2(opened, number, inheritable=True)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115


def drop() -> None:
    """Gives up what standard output has not taken, or the flush at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check(path: Path, option: str) -> None:
    """OutputError now if the file that `option` names could not be written after hours of
    training.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise OutputError(f"[output] {option} {path} is a directory; name a file in it")
        if not target.parent.is_dir():
            raise OutputError(
                f"[output] {option} {path}: {target.parent} is not a directory; create it first"
            )
        if target.exists() and not os.access(target, os.W_OK):
            raise OutputError(
                f"[output] {option} {path} is there and write-protected; name another file"
            )
        if target.exists() and not target.is_file():
            return  # a pipe or a device: written in place
        aside = target.with_name(f".odyssey-{os.getpid()}.tmp")
        with open(aside, "xb"):
            pass
        aside.unlink()
    except OSError as problem:
        raise OutputError(
            f"[output] {option} {path} cannot be written: {problem.strerror}"
        ) from problem


def write(path: Path, option: str, make: Callable[[BinaryIO], Any]) -> None:
    """Lets `make` fill the file, which is there whole or not at all; a pipe or a device is
    written in place.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            with open(target, "wb") as file:
                make(file)
        else:
            write_whole(target, make, mode=0o666)
    except OSError as problem:
        raise OutputError(
            f"[output] {option} {path} cannot be written: {problem.strerror or problem}"
        ) from problem


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
    data = encode_json(finite(value))
    write(path, option, lambda file: file.write(data))


def write_weights(
    file: BinaryIO, state: dict[str, Any], about: dict[str, str] | None = None
) -> None:
    """Writes arrays by name, and texts about them, in the safetensors format."""
    from safetensors.numpy import save

    file.write(save(state, about))


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """(arrays by name, texts about them) of such a file. Raises CheckpointError: it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"[load] {path} is no safetensors file: {problem}") from problem
