"""`odyssey top`: what the ranks of a running job do, live. The table is made in view/top.py."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from ...cli.commands import FILE, HELP


@click.command(
    "top", short_help="Show what each rank of a running job does.", context_settings=HELP
)
@click.argument("job", required=False, type=FILE, metavar="[RUN|PID]")
@click.option("--once", is_flag=True, help="Show it once and end.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object per look, one a line.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    metavar="SECONDS",
    help="Between two looks. (default: 1)",
)
def command(job: Path | None, once: bool, as_json: bool, interval: float) -> None:
    """Show what every rank of a running job does: step, phase, what it waits for, samples/s,
    memory, and where its time goes.

    Without an argument: the newest job of this user on this machine. RUN is a run directory, PID a
    process of the job: a rank, or its mpirun.
    """
    from ...errors import LaunchError
    from .. import top as view

    if job is None:
        pids = view.pids()
        if not pids:
            raise LaunchError(
                "[top] no job of this user runs on this machine with more than one rank, or in a "
                "run"
            )
        if len(pids) > 1:
            other_pids = ", ".join(map(str, pids[1:9]))
            click.echo(
                f"the newest of {len(pids)} jobs; the others: odyssey top {other_pids}", err=True
            )
        connected = view.local(pids[0])
    elif str(job).isascii() and str(job).isdigit() and not job.is_dir():
        connected = view.of_process(int(str(job)))
    else:
        connected = view.of_run(job)
    try:
        _show(connected, once, as_json, interval)
    except KeyboardInterrupt:
        pass
    finally:
        connected.close()


def _show(job: Any, once: bool, as_json: bool, interval: float) -> None:
    from .. import top as view

    live = None
    if not once and not as_json and sys.stdout.isatty():
        from rich.live import Live

        live = Live(auto_refresh=False)
        live.start()
    try:
        while (snapshot := job.look()) is not None:
            if as_json:
                ranks = [{**s._asdict(), "times": list(s.times)} for s in snapshot["ranks"]]
                slow = {str(rank): list(slowness) for rank, slowness in snapshot["slow"].items()}
                click.echo(json.dumps({**snapshot, "ranks": ranks, "slow": slow}))
            elif live is not None:
                live.update(_table(snapshot), refresh=True)
            else:
                click.echo(view.plain(snapshot))
            if once:
                return
            time.sleep(interval)
    finally:
        if live is not None:
            live.stop()
    if not as_json:
        click.echo("the job has ended")


def _table(snapshot: dict[str, Any]) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from .. import top as view

    table = Table(box=None, pad_edge=False)
    for name in view.COLUMNS:
        table.add_column(
            name, justify="left" if name in ("host", "now") else "right", no_wrap=name != "now"
        )
    for row, status in zip(view.rows(snapshot), snapshot["ranks"], strict=True):
        style = (
            "red"
            if status.state in ("T", "t", "gone")
            else "yellow"
            if status.rank in snapshot["slow"]
            else ""
        )
        table.add_row(*(Text(cell) for cell in row), style=style)
    return Group(Text(view.title(snapshot)), table)  # a table's title is no wider than its rows
