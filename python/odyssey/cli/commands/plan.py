"""`odyssey plan`: memory, time and bytes of a training's layouts, before it is run."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import click

from odyssey.errors import ConfigError, check_integer

from ...base import expand_path, outputs
from ...settings.recipes import RECIPES
from . import HELP, JSON, LAUNCHER, without
from .verify import layouts_among


@click.command(
    "plan",
    short_help="Predict memory, time and bytes of layouts.",
    context_settings={**HELP, "ignore_unknown_options": True},
)
@click.argument("program", metavar="MODEL|SCRIPT")
@click.option("-n", "--ranks", type=int, required=True, help="How many ranks there will be.")
@click.option("--per-node", type=int, help="How many of them share a machine. (default: all)")
@click.option(
    "--layouts",
    "-l",
    multiple=True,
    metavar="LAYOUT",
    help="Which, e.g. dp=4,zero=1. (default: all)",
)
@click.option(
    "--memory",
    type=float,
    metavar="MB",
    help="What a rank may have. (default: its share of this machine's)",
)
@click.option(
    "--bandwidth", type=float, default=10, metavar="GBIT/S", help="Between machines. (default: 10)"
)
@click.option(
    "--latency",
    type=float,
    default=50,
    metavar="US",
    help="Of a message between machines. (default: 50)",
)
@click.option(
    "--measure",
    is_flag=True,
    help="Start two ranks, and measure their link instead of assuming one.",
)
@LAUNCHER
@JSON
@click.argument(
    "arguments", nargs=-1, metavar="[OPTIONS OF TRAIN OR OF THE SCRIPT]...", type=click.UNPROCESSED
)
def command(  # noqa: C901
    program: str,
    ranks: int,
    per_node: int | None,
    layouts: tuple[str, ...],
    memory: float | None,
    bandwidth: float,
    latency: float,
    measure: bool,
    launcher: str | None,
    json_file: Path | None,
    arguments: tuple[str, ...],
) -> None:
    """Predict what a training takes on RANKS ranks of machines like this one, and name its best
    layouts.

    One rank of each layout is rehearsed here, without the others: memory and bytes are those of the
    trainer, the time is measured, and that of transfers is added. Options that are not listed here
    are those of `odyssey train`, or the script's, which must train with fit().
    """
    from ...audit import planner
    from ...audit.verify import parse
    from ...audit.verify import ranks as ranks_of
    from ...parallel.auto_placement import size

    layouts, arguments = layouts_among(layouts, arguments)
    check_integer("[plan] --ranks", ranks, 1)
    per_node = check_integer("[plan] --per-node", ranks if per_node is None else per_node, 1)
    for name, value in (("--memory", memory), ("--bandwidth", bandwidth), ("--latency", latency)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"[plan] {name} is {value:g}; give a number above 0")
    if program not in RECIPES:
        program = str(expand_path(program))
    if program not in RECIPES and not os.path.isfile(program):
        raise ConfigError(
            f"[plan] {program!r} is no file and no model; give a script, or one of "
            f"{', '.join(RECIPES)}"
        )
    for text in layouts:
        if (count := ranks_of(parse(text))) != ranks:
            raise ConfigError(
                f"[plan] layout {text} has {count} ranks, and --ranks is {ranks}; give layouts of "
                f"{ranks}"
            )
    if json_file is not None:
        outputs.check(json_file, "--json")
    limit = (
        planner.machine_memory() // min(per_node, ranks) if memory is None else round(memory * 1e6)
    )
    near = planner.NEAR
    far = planner.Link(latency * 1e-6, bandwidth * 1e9 / 8)
    if measure:
        link, shared = planner.measured(launcher)
        near, far = (link, far) if shared else (near, link)
        link_kind = "within a machine" if shared else "between machines"
        click.echo(
            f"measured {link_kind}: {1e6 * link.latency:.0f} us, {8e-9 * link.bandwidth:.1f} Gbit/s"
        )
    model = ("-m", "odyssey.train", "--no-progress", "--model") if program in RECIPES else ()
    words = [sys.executable, *model, program, *without(arguments, {"--run-dir": 1, "--layout": 1})]
    plan_layouts = planner.Planner(words, per_node, limit, near, far)
    candidates = layouts or tuple(planner.layouts(ranks))
    width = max(map(len, candidates))

    def print_plan(plan: planner.Planned) -> None:
        if plan.why is not None:
            return click.echo(f"{plan.layout:{width}}  no: {plan.why}")
        times = f"{1e3 * plan.seconds:8.1f} ms a step ({1e3 * plan.computes:.1f} computing)"
        wire = f", {size(plan.wire)} to other machines" if ranks > per_node else ""
        click.echo(
            f"{plan.layout:{width}}  {size(plan.memory):>8} a rank  {times}  sends "
            f"{size(plan.sent)}{wire}"
        )

    plans = plan_layouts(candidates, print_plan)
    best_plans = planner.best(plans)
    for place, plan in enumerate(best_plans, 1):
        click.echo(f"{place}. {plan.layout}")
    if not best_plans:
        click.echo(f"no layout fits into {size(limit)} a rank")
    if plan_layouts.sharing is not None:
        click.echo(planner.shards(plan_layouts.sharing, ranks, min(per_node, ranks)))
    if json_file is not None:
        best = [plan.layout for plan in best_plans]
        rows = [dataclasses.asdict(plan) for plan in plans]
        outputs.write_json(
            json_file,
            "--json",
            {"ranks": ranks, "per_node": per_node, "best": best, "layouts": rows},
        )
