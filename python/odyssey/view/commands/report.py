"""`odyssey report`: runs as one page to look at."""

from __future__ import annotations

from pathlib import Path

import click

from ...cli.commands import FILE, HELP


@click.command("report", short_help="Runs as one HTML page.", context_settings=HELP)
@click.option(
    "-o",
    "--output",
    type=FILE,
    default=Path("report.html"),
    metavar="FILE.html",
    help="Where to write it. (default: report.html)",
)
@click.argument("runs", type=FILE, nargs=-1, required=True, metavar="RUN [RUN2 ...]")
def command(runs: tuple[Path, ...], output: Path) -> None:
    """Write what the run directories say as one page: curves, restarts, the layout, the
    environment, what was verified.

    Several runs have their curves in the same pictures. The page is one file and loads nothing.
    """
    from ...base import outputs
    from .. import report

    outputs.check(output, "--output")
    content = report.page(runs).encode()
    outputs.write(output, "--output", lambda file: file.write(content))
    click.echo(f"{output}: {len(content):,} bytes")
