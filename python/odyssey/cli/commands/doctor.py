"""`odyssey doctor`: one line for each thing a run needs, ok, warn or fail, and what to do about
it.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from . import FILE, HELP, UNAVAILABLE, machines


@click.command(
    "doctor", short_help="Look whether this machine has what a run needs.", context_settings=HELP
)
@click.option(
    "--ranks",
    "-n",
    type=click.IntRange(1, 4096),
    default=2,
    help="Ranks on this machine. (default: 2)",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 4096),
    help="Threads of each. (default: the cores, divided by them)",
)
@click.option(
    "--run-dir",
    type=FILE,
    metavar="DIR",
    help="Where the run's files will be. (default: not looked at)",
)
@click.option("--hosts", metavar="HOST,HOST", help="Machines that ssh must reach. (default: none)")
@click.option(
    "--hostfile",
    type=FILE,
    metavar="FILE",
    help="The same, from a file: one a line. (default: none)",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the checks as JSON. (default: as lines)"
)
@click.pass_context
def command(
    context: click.Context,
    ranks: int,
    threads: int | None,
    run_dir: Path | None,
    hosts: str | None,
    hostfile: Path | None,
    as_json: bool,
) -> None:
    """Look at this machine: is everything there that a run needs?

    Ends with 0 if a run can start, warnings allowed, and with 69 if one of the checks fails.
    """
    from ...errors import printable
    from ..doctor import FAIL, OK, WARN, RunPlan, examine

    checks = examine(
        RunPlan(
            ranks, threads, run_dir, [host.name for host in machines("doctor", hosts, hostfile)]
        )
    )
    count = {state: sum(check.state == state for check in checks) for state in (OK, WARN, FAIL)}
    if as_json:
        click.echo(json.dumps({"checks": [check._asdict() for check in checks], **count}, indent=1))
    else:
        for check in checks:
            click.echo(printable(check.line()))
        click.echo(f"{count[OK]} ok, {count[WARN]} to look at, {count[FAIL]} that stop a run")
    if count[FAIL]:
        context.exit(UNAVAILABLE)
