"""`odyssey replay RUN --step N`: a logged step of a run taken again, alone; see
odyssey/audit/replay.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from . import DIFFERENT, FILE, HELP, JSON, LAUNCHER


@click.command(
    "replay", short_help="Take a step of a run again and compare its bits.", context_settings=HELP
)
@click.argument("run", type=FILE)
@click.option(
    "--step",
    type=int,
    required=True,
    help="Which step, counted from 1, as the step log counts them.",
)
@click.option(
    "-n", "--ranks", type=int, help="On how many ranks, each with the whole model. (default: 1)"
)
@click.option(
    "--layout", metavar="LAYOUT", help='On another layout, e.g. "pp=2,dp=2"; as in odyssey verify.'
)
@click.option(
    "--save",
    type=FILE,
    metavar="FILE.safetensors",
    help="Write its gradients and the weights after it.",
)
@LAUNCHER
@JSON
def command(
    run: Path,
    step: int,
    ranks: int | None,
    layout: str | None,
    save: Path | None,
    launcher: str | None,
    json_file: Path | None,
) -> None:
    """Take a step of a run again, from the newest checkpoint before it, and compare all bits
    with the run's log.

    It runs the command that stands in RUN/run.json: replay only runs that you trust. Nothing is
    written in RUN. Ends with 0 if loss, gradients and weights have the same bits, with 1 if not.
    """
    from ...audit.replay import replay
    from ...audit.steplog import COMPARED, UNKNOWN, shown
    from ...base import outputs
    from ...errors import ConfigError, check_integer

    check_integer("[replay] --step", step, 1)
    if ranks is not None and layout is not None:
        raise ConfigError("[replay] --ranks and --layout are given; give one")
    if ranks is not None:
        check_integer("[replay] --ranks", ranks, 1)
    for path, option in ((save, "--save"), (json_file, "--json")):
        if path is not None:
            outputs.check(path, option)
    options = {"tell": lambda line: click.echo(f"odyssey: {line}", err=True)}
    result = replay(
        run, step, layout or f"dp={ranks or 1}", save=save, launcher=launcher, **options
    )
    rows = [
        (quantity, shown(result.logged, quantity), shown(result.replayed, quantity))
        for quantity in COMPARED
    ]
    for quantity, logged, replayed in rows:
        if UNKNOWN in (logged, replayed):
            verdict = f"{UNKNOWN} in the {'log' if logged == UNKNOWN else 'replay'}: not compared"
        else:
            verdict = (
                f"{logged}  same"
                if logged == replayed
                else f"{logged} in the log, {replayed} now  DIFFERS"
            )
        click.echo(f"{quantity:10}{verdict}")
    first_different_step = None
    if result.comparison.first is not None:
        logged_record, _ = result.comparison.first
        first_different_step = logged_record.step
    start = result.checkpoint or "the beginning"
    count = result.comparison.common
    click.echo(_format_verdict(step, first_different_step, count, start))
    if json_file is not None:
        report = {
            "run": str(run),
            "step": step,
            "same": result.same,
            "differing": list(result.differing),
            "values": {
                quantity: {"logged": logged, "replayed": replayed}
                for quantity, logged, replayed in rows
            },
            "first_different_step": first_different_step,
            "steps": count,
            "checkpoint": result.checkpoint,
            "ranks": result.ranks,
        }
        outputs.write_json(json_file, "--json", report)
    if not result.same:
        sys.exit(DIFFERENT)


def _format_verdict(step: int, first_different_step: int | None, count: int, start: str) -> str:
    """Returns the line of the verdict on a replay.

    Args:
        step: the step that is replayed.
        first_different_step: the first step that differs, or None.
        count: how many steps were compared, from `start` to the step.
        start: the checkpoint that the replay started from.
    """
    if first_different_step is None:
        plural = "s" if count > 1 else ""
        return f"step {step}: same bits, in all {count} step{plural} from {start}"
    if first_different_step < step:
        return (
            f"step {step}: DIFFERS, as does step {first_different_step}, the first that differs "
            f"from {start} on"
        )
    earlier_steps = ""
    if count > 1:
        earlier_steps = f"; the {count - 1} before it, from {start} on, are the same"
    return f"step {step}: DIFFERS{earlier_steps}"
