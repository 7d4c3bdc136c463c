"""`odyssey trace`: the timeline of a run as a file for Perfetto."""

from __future__ import annotations

from pathlib import Path

import click

from ...cli.commands import FILE, HELP


@click.command(
    "trace",
    short_help="Write the timeline of a run, for Perfetto and Chrome.",
    context_settings=HELP,
)
@click.option(
    "-o", "--output", type=FILE, required=True, metavar="FILE.json", help="Where to write it."
)
@click.argument("run", type=FILE)
def command(run: Path, output: Path) -> None:
    """Write the timeline of RUN, a run directory, which may be under way or have been killed.

    On it are attempts, checkpoints and epochs; of what was trained with --trace, what each rank and
    thread did. Open it at ui.perfetto.dev or chrome://tracing.
    """
    from ...base import Run, outputs
    from .. import trace

    outputs.check(output, "--output")
    count = trace.write(output, Run(run).timeline, run)
    click.echo(f"{count:,} events in {output}")
