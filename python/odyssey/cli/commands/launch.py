"""`odyssey launch`: options become a LaunchConfig; the rest is odyssey.launch."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import click

from ...base.paths import expand_path, variables_in
from ...errors import ConfigError, near, printable
from . import FILE, HELP, machines

#: Of commands that take a script and its words, whose options come first.
BEFORE_SCRIPT = {**HELP, "ignore_unknown_options": True, "allow_interspersed_args": False}
SHORT = "Start ranks, and start them again when something fails."


class Launcher(click.Choice[str]):
    """A name, or the path of an mpirun."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(expand_path(value)) if os.sep in value else super().convert(value, param, ctx)

    # click before 8.2 gives no context
    def get_metavar(self, param: click.Parameter, ctx: Any = None) -> str:
        return f"[{'|'.join(self.choices)}|PATH]"


@click.command("launch", short_help=SHORT, context_settings=BEFORE_SCRIPT)
@click.option(
    "-n", "-np", "--ranks", type=click.IntRange(1), default=1, help="Ranks altogether. (default: 1)"
)
@click.option(
    "--run-dir",
    type=FILE,
    metavar="RUN",
    help="The run's directory. (default: runs/DATE-TIME-NAME)",
)
@click.option(
    "--hosts",
    metavar="H1,H2:N",
    help="Machines, and how many ranks each takes. (default: this one)",
)
@click.option("--hostfile", type=FILE, metavar="FILE", help="The same from a file, one a line.")
@click.option(
    "--launcher",
    type=Launcher(["auto", "mpirun", "srun"]),
    default="auto",
    help="What starts ranks; PATH is an mpirun. (default: auto: srun in a SLURM allocation, else "
    "the mpirun of the MPI that mpi4py loads)",
)
@click.option(
    "--elastic", metavar="MIN:MAX", help="Ranks the run may go on with. (default: always as many)"
)
@click.option(
    "--max-restarts", type=int, default=3, help="Restarts without progress in between. (default: 3)"
)
@click.option(
    "--backoff",
    type=float,
    default=1.0,
    help="Seconds before the second, then doubled. (default: 1)",
)
@click.option(
    "--grace",
    type=float,
    default=30.0,
    help="Seconds that ranks have to stop on request. (default: 30)",
)
@click.option(
    "--watchdog",
    type=float,
    help="Seconds without progress that mean a hung rank. (default: ranks' own)",
)
@click.option(
    "--env", multiple=True, metavar="NAME", help="A variable that ranks get too; may be repeated."
)
@click.option("--bind-if", metavar="IF", help="Network interface for MPI. (default: MPI's choice)")
@click.option(
    "--allow-root", is_flag=True, help="Start as root although others work on this machine."
)
@click.option(
    "--other-arithmetic",
    is_flag=True,
    help="Train although processors, libraries or their variables compute different results from "
    "the same numbers.",
)
@click.argument("script", metavar="SCRIPT.py|-m MODULE|PROGRAM|train")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context,
    ranks: int,
    hosts: str | None,
    hostfile: Path | None,
    elastic: str | None,
    script: str,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Start ranks of a script and keep the run going: restart after a failure, stop on request
    with a checkpoint.

    `odyssey launch -n 4 train --epochs 8` trains with four ranks; `odyssey launch -n 4 script.py`,
    `-m package.module`, `python script.py` and `./program` start others, with or without "--"
    before them. The same command with the same
    --run-dir goes on with a run that was stopped. Exit codes: 0 complete, 75 stopped on request, 69
    given up, else that of the rank that failed.
    """
    from odyssey.launch import DistributedLauncher, LaunchConfig
    from odyssey.launch.config import parse_elastic
    from odyssey.launch.starting import normalize_command

    no_option(script, context)
    script, *words = normalize_command([script, *arguments])
    if script == "train":
        values = _read_configuration(tuple(words))
        # Ranks expand the same paths.
        options["env"] = (*options["env"], *variables_in([*words, *values]))
    parsed_hosts = machines("launch", hosts, hostfile)
    bounds = None if elastic is None else parse_elastic(elastic)
    if script != "train":
        _hint_at_options(context, script, words)
    config = LaunchConfig(nproc_per_node=ranks, hosts=parsed_hosts, elastic=bounds, **options)
    sys.exit(DistributedLauncher(config).launch(script, *words))


def _hint_at_options(context: click.Context, script: str, words: list[str]) -> None:
    """Prints one line if an option of the launcher is behind the script, which gets it.

    Options that the launcher has as well are the script's on purpose.
    """
    options = {"--nproc_per_node": "-n"}
    for parameter in context.command.params:
        if context.get_parameter_source(str(parameter.name)) == click.core.ParameterSource.DEFAULT:
            options.update(dict.fromkeys(parameter.opts, parameter.opts[0]))
    if options.get("-n") is None:
        options.pop("--nproc_per_node")
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, _, value = word.partition("=")
        if word == "--":
            return
        if name in options:
            value = printable(value or following, limit=60)
            line = f"{name} {value} behind the script is the script's; for the launcher, write"
            usage = f"odyssey launch {options[name]} {value} {printable(script, limit=60)}"
            click.echo(f"odyssey: {line}: {usage}", err=True)
            return


def no_option(script: str, context: click.Context) -> None:
    """Raises NoSuchOption if the script is an option that the command doesn't have.

    The command passes unknown options on to the script. So a mistyped one arrives as the script.
    """
    if script.startswith("-") and script != "-m":
        option_names = [
            name
            for option in context.command.params
            for name in option.opts
            if name.startswith("--")
        ]
        raise click.NoSuchOption(
            script, possibilities=near(script.partition("=")[0], option_names), ctx=context
        )


def _read_configuration(words: tuple[str, ...]) -> list[str]:
    """Returns the values in the configuration files of a command line of `train`, as strings.

    Raises ConfigError if a file sets an option of the launcher. The ranks would read the file only
    after they are started.
    """
    from ..configfile import read_config
    from . import train

    files = [following for word, following in itertools.pairwise(words) if word == "--config"]
    files += [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    values: list[str] = []
    for path in files:
        config = read_config(expand_path(path), train.command.params)
        values += map(str, config.values())
        for name, option in (("ranks", "-n"), ("run_dir", "--run-dir")):
            if name in config:
                raise ConfigError(
                    f"[launch] {path} has {name.replace('_', '-')}, which is too late for ranks "
                    "that are started; give "
                    f"`odyssey launch {option}` and take it out, or use `odyssey train --config`"
                )
    return values
