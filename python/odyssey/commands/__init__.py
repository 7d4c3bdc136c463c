"""Commands of `odyssey` that have a file of their own here, each as the click command `command`; see cli.py.

A command's file turns options into calls of the library; anything heavy is imported inside the command.
"""

from __future__ import annotations

from pathlib import Path

import click

COMMANDS: tuple[str, ...] = (  # names of modules in this package
    "diff",
    "doctor",
    "inspect",
    "launch",
    "replay",
    "scale",
    "top",
)

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
FILE = click.Path(path_type=Path)
