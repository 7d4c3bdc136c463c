"""`odyssey scale`: the call of odyssey.launch.scale, with what happens printed."""

from __future__ import annotations

from pathlib import Path

import click

from . import FILE, HELP


@click.command("scale", short_help="Go on with another number of ranks.", context_settings=HELP)
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=60.0,
    help="Seconds for the change to happen. (default: 60)",
)
@click.argument("run", type=FILE)
@click.argument("ranks", type=click.IntRange(1))
def command(run: Path, ranks: int, wait: float) -> None:
    """Go on with RANKS ranks in a run that `odyssey launch` runs: an agreed checkpoint, then a
    new attempt.
    """
    from odyssey.launch.scale import scale

    scale(run, ranks, wait, lambda line: click.echo(f"odyssey: {line}", err=True))
