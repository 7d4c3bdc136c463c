"""Commands of `odyssey` that have a file of their own here, each as the click command `command`; see cli.py.

A command's file turns options into calls of the library; anything heavy is imported inside the command.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ..errors import printable

COMMANDS: tuple[str, ...] = (  # names of modules in this package
    "build",
    "diff",
    "doctor",
    "inspect",
    "launch",
    "replay",
    "scale",
    "top",
)

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
NAME_LIMIT, PATH_LIMIT = 255, 4095  # bytes of a file's name and of a path, as Linux and macOS have them


class File(click.Path):
    """A path that a file can have: asking for one that is too long would be an OSError wherever it is looked at."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if len(os.fsencode(path)) > PATH_LIMIT or any(len(os.fsencode(p)) > NAME_LIMIT for p in Path(path).parts):
            self.fail(f"{printable(str(path), limit=60)!r}: file name too long", param, ctx)
        return path


FILE = File(path_type=Path)
