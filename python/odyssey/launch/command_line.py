"""`python -m odyssey.launch`: `odyssey launch` with the options of other launchers, before the
script or behind it.

    python -m odyssey.launch --nproc_per_node=4 train.py --epochs 100
    python -m odyssey.launch --nproc_per_node=4 -m package.module --epochs 100
    python -m odyssey.launch train.py --nproc_per_node=4 --nnodes=1 --master_addr=localhost \\
        --backend=gloo --epochs 100

Behind the script only the options below are the launcher's, whatever the script would make of them;
all else is the script's, and after "--" everything is. One command starts the ranks of all nodes
(--hosts): it is run once, not once on each, so that --node_rank is 0 and --master_addr names this
machine.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..base import outputs
from ..errors import ConfigError, OdysseyError, printable
from .config import LaunchConfig
from .supervisor import DistributedLauncher

_BEFORE = ("max_restarts", "hosts", "run_dir")  # before the script only: the names are common
_EVERYWHERE = ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "backend")
_HERE = ("", "localhost", "127.0.0.1")


def parse(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Settings of a LaunchConfig, and the script with its arguments.

    Raises ConfigError: no script, an option of the launcher without a value or with one that is not
    allowed.
    """
    given: dict[str, str] = {}
    command: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            command += rest
            break
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if word.startswith("--") and name in (_EVERYWHERE if command else _EVERYWHERE + _BEFORE):
            if not equals:
                if not rest:
                    raise ConfigError(f"[launch] {word} has no value; write {word}=VALUE")
                value = rest.pop(0)
            given[name] = value
        elif not command and word.startswith("-") and word != "-m":
            allowed = ", ".join(f"--{n}" for n in _EVERYWHERE + _BEFORE)
            raise ConfigError(
                f"[launch] {word[:60]!r} before the script is no option; choose from {allowed}"
            )
        else:
            command.append(word)
    if not command:
        raise ConfigError(
            "[launch] there is no script; write python -m odyssey.launch --nproc_per_node=4 "
            "train.py"
        )
    return _settings(given), command


def _settings(given: dict[str, str]) -> dict[str, Any]:
    from .hosts import parse_hosts

    def number(name: str, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 8):
            raise ConfigError(f"[launch] --{name}={text[:60]!r}; a whole number is allowed")
        return int(text)

    kinds: dict[str, Callable[[str], Any]] = {
        "hosts": parse_hosts,
        "run_dir": Path,
        "backend": str,
        "master_addr": str,
    }
    out = {
        name: kinds.get(name, functools.partial(number, name))(value)
        for name, value in given.items()
    }
    port = out.get("master_port", 1)
    others = "one command starts the ranks of all nodes; run it"
    if (address := out.pop("master_addr", "")) not in _HERE:
        raise ConfigError(
            f"[launch] --master_addr={address[:60]!r}: {others} on one of them with --hosts, and "
            "leave it out"
        )
    if rank := out.pop("node_rank", 0):
        raise ConfigError(f"[launch] --node_rank={rank}: {others} once, with --hosts")
    if not 0 < port < 65536:
        raise ConfigError(f"[launch] --master_port={port}; a port from 1 to 65535 is allowed")
    return out


def main() -> NoReturn:
    outputs.open_streams()
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0)
    try:
        settings, program = parse(words)
        sys.exit(DistributedLauncher(LaunchConfig(**settings)).launch(*program))
    except OdysseyError as error:
        print(f"odyssey: error: {printable(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
