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
    for name, (value_a, value_b) in settings.items():
        click.echo(
            f"setting {name}: {_format_setting(value_a)} in A, {_format_setting(value_b)} in B"
        )
    for run, has_description in zip((run_a, run_b), described, strict=True):
        if not has_description:
            click.echo(f"odyssey: {run} has no run.json; settings are not compared", err=True)
    for name in comparison.unknown:
        click.echo(
            f"odyssey: no step has a fingerprint of its {name} in both runs; they are not compared",
            err=True,
        )
    if comparison.first is None:
        all_steps_are_common = all(len(log) == comparison.common for log in logs)
        details = "" if all_steps_are_common else f" ({', '.join(spans)})"
        click.echo(f"same for all {comparison.common:,} common steps{details}")
    else:
        record_a, record_b = comparison.first
        text_a = shown(record_a, comparison.what)
        text_b = shown(record_b, comparison.what)
        click.echo(
            f"the runs part at step {record_a.step:,} of {comparison.last:,} (epoch "
            f"{record_a.epoch + 1}, batch {record_a.batch + 1}), in the {comparison.what}: "
            f"{text_a} in A, {text_b} in B"
        )
    if json_file is not None:
        first_step = None
        first_texts = None
        if comparison.first is not None:
            record_a, record_b = comparison.first
            first_step = record_a.step
            first_texts = [shown(record, comparison.what) for record in (record_a, record_b)]
        result = {
            "same": comparison.same,
            "common_steps": comparison.common,
            "step": first_step,
            "what": comparison.what,
            "values": first_texts,
            "steps": [[int(log["step"][0]), int(log["step"][-1])] for log in logs],
            "not_compared": list(comparison.unknown),
            "settings": {name: list(pair) for name, pair in settings.items()},
        }
        outputs.write_json(json_file, "--json", result)
    if not comparison.same:
        sys.exit(DIFFERENT)


def _format_setting(value: str | None) -> str:
    """Returns the value of a setting for a line of output, cut to 100 characters."""
    if value is None:
        return "not given"
    return value if len(value) <= 100 else value[:97] + "..."
