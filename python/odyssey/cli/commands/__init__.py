"""The commands of `odyssey`, each a file with the click command `command`; and what they have in
common.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from ...base.paths import expand_path
from ...base.registry import provided
from ...errors import ConfigError, OdysseyError, printable
from ...settings.recipes import OWN_CLASS

OWN = (
    "train launch predict evaluate export verify plan generate inspect diff replay scale "
    "doctor build completion"
)
#: Names of commands, as `odyssey --help` lists them, with their modules: those of this package,
#: then others'.
COMMANDS: dict[str, str] = {name: f"{__name__}.{name}" for name in OWN.split()} | provided(
    "commands"
)

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
# bytes of a file's name and of a path, as Linux and macOS have them
NAME_LIMIT = 255
PATH_LIMIT = 4095


class FilePath(click.Path):
    """A path that a file can have, with `~` and variables expanded.

    Asking for a path that is too long would be an OSError wherever it is looked at.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            expanded_path = expand_path(value)
        except ConfigError as problem:
            self.fail(str(problem).removeprefix("[files] "), param, ctx)
        path = super().convert(expanded_path, param, ctx)
        if len(os.fsencode(path)) > PATH_LIMIT or any(
            len(os.fsencode(p)) > NAME_LIMIT for p in Path(path).parts
        ):
            self.fail(f"{printable(str(path), limit=60)!r}: file name too long", param, ctx)
        return path


class DataSet(click.Choice[str]):
    """A name, or NAME:PATH, which is short for NAME with --data-dir PATH."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        name, colon, path = value.partition(":")
        return super().convert(name, param, ctx) + colon + path

    @staticmethod
    def parted(
        room: str, dataset: str | None, data_dir: Path | None
    ) -> tuple[str | None, Path | None]:
        """The name and the path of --dataset and --data-dir.

        Raises ConfigError: two paths, or none after a colon.
        """
        name, colon, path = (dataset or "").partition(":")
        if not colon:
            return dataset, data_dir
        if data_dir is not None or not path:
            fault = "and --data-dir are both given" if path else "names no file"
            raise ConfigError(
                f"[{room}] --dataset {name}: {fault}; write --dataset {name}:PATH, or use "
                "--data-dir"
            )
        return name, expand_path(path)


class OrOwn(click.Choice[str]):
    """A name, or FILE.py:CLASS of the user's own code."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if ".py" not in value and value not in self.choices:
            self.fail(
                f"{value!r} is not one of {', '.join(self.choices)}, and not {OWN_CLASS}",
                param,
                ctx,
            )
        return value

    # click before 8.2 gives no context
    def get_metavar(self, param: click.Parameter, ctx: Any = None) -> str:
        return f"[{'|'.join(self.choices)}|{OWN_CLASS}]"


FILE = FilePath(path_type=Path)
# exit codes
DIFFERENT = 1
REFUSED = 65
UNAVAILABLE = 69

# Options of several commands.
OWN_MODEL = click.option(
    "--model",
    "own_model",
    metavar="FILE.py:NAME",
    help="Your own class, or a function that builds the model. (default: what the checkpoint says)",
)
NEWEST = click.option(
    "--newest",
    is_flag=True,
    help="Take the newest checkpoint of a run. (default: the best, if one is marked, such as by "
    "--early-stopping)",
)
JSON = click.option(
    "--json",
    "json_file",
    type=FILE,
    metavar="FILE",
    help="Write the result. (default: not written)",
)
LAUNCHER = click.option(
    "--launcher",
    metavar="WORDS",
    help="What starts ranks. (default: 'mpirun -n {ranks}', of mpi4py's MPI)",
)


def machines(room: str, hosts: str | None, hostfile: Path | None) -> Any:
    """The hosts that --hosts or --hostfile of a command names. Raises ConfigError."""
    from ...launch.hosts import parse_hostfile, parse_hosts

    if hosts is not None and hostfile is not None:
        raise ConfigError(f"[{room}] --hosts and --hostfile are both given; give one")
    return (
        parse_hosts(hosts)
        if hosts is not None
        else parse_hostfile(hostfile)
        if hostfile is not None
        else ()
    )


def without(words: Sequence[str], options: dict[str, int]) -> list[str]:
    """Removes options, with the number of values that each takes, from a command line.

    It finds "--option value", "--option=value", and "-n4" for the option "-n".
    """
    short = tuple(name for name in options if not name.startswith("--"))
    remaining: list[str] = []
    values_to_skip = 0
    for word in words:
        if values_to_skip:
            values_to_skip -= 1
        elif word in options:
            values_to_skip = options[word]
        elif word.split("=")[0] not in options and not word.startswith(short):
            remaining.append(word)
    return remaining


@contextlib.contextmanager
def on_all_ranks(kind: type[OdysseyError] = OdysseyError) -> Iterator[None]:
    """Marks errors of this kind that every rank raises, so that only one rank prints them.

    It works around a block, and as a decorator of a function.
    """
    try:
        yield
    except kind as error:
        error.raised_on_all_ranks = True
        raise
