"""`odyssey diff RUN_A RUN_B`: the first step in which two runs part, and in what; see
odyssey/audit/replay.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from . import DIFFERENT, FILE, HELP, JSON


@click.command("diff", short_help="Find the step where two runs part.", context_settings=HELP)
@click.argument("run_a", type=FILE)
@click.argument("run_b", type=FILE)
@JSON
def command(run_a: Path, run_b: Path, json_file: Path | None) -> None:
    """Compare two runs step by step, by their step logs: cursor, rate, loss, gradients and
    weights, all bits.

    Names the settings that differ, too. Ends with 0 if all steps that both have are the same, with
    1 if not.
    """
    from ...audit.replay import compare, log_of, settings_that_differ
    from ...audit.steplog import shown
    from ...base import outputs
    from ...base.runs import Run
    from ...errors import DataError

    if json_file is not None:
        outputs.check(json_file, "--json")
    logs = [log_of(run) for run in (run_a, run_b)]
    comparison = compare(*logs)
    spans = [
        f"{name} has steps {log['step'][0]} to {log['step'][-1]}"
        for name, log in zip("AB", logs, strict=True)
    ]
    if not comparison.common:
        raise DataError(f"[diff] the runs have no step in common: {', '.join(spans)}")
    described = [Run(run).description.exists() for run in (run_a, run_b)]
    settings = settings_that_differ(run_a, run_b) if all(described) else {}
    for name, (a, b) in settings.items():
        click.echo(f"setting {name}: {_format_setting(a)} in A, {_format_setting(b)} in B")
    for run, has_description in zip((run_a, run_b), described, strict=True):
        if not has_description:
            click.echo(f"odyssey: {run} has no run.json; settings are not compared", err=True)
    for name in comparison.unknown:
        click.echo(
            f"odyssey: no step has a fingerprint of its {name} in both runs; they are not compared",
            err=True,
        )
    if comparison.first is None:
        ends = {len(log) for log in logs} == {comparison.common}
        details = "" if ends else f" ({', '.join(spans)})"
        click.echo(f"same for all {comparison.common:,} common steps{details}")
    else:
        a, b = comparison.first
        step = a.step
        values = [shown(r, comparison.what) for r in (a, b)]
        click.echo(
            f"the runs part at step {step:,} of {comparison.last:,} (epoch {a.epoch + 1}, batch "
            f"{a.batch + 1}), "
            f"in the {comparison.what}: {values[0]} in A, {values[1]} in B"
        )
    if json_file is not None:
        result = {
            "same": comparison.same,
            "common_steps": comparison.common,
            "step": comparison.first and comparison.first[0].step,
            "what": comparison.what,
            "values": comparison.first and [shown(r, comparison.what) for r in comparison.first],
            "steps": [[int(log["step"][0]), int(log["step"][-1])] for log in logs],
            "not_compared": list(comparison.unknown),
            "settings": {name: list(pair) for name, pair in settings.items()},
        }
        outputs.write_json(json_file, "--json", result)
    if not comparison.same:
        sys.exit(DIFFERENT)


def _format_setting(value: str | None) -> str:
    return "not given" if value is None else value if len(value) <= 100 else value[:97] + "..."
