"""`odyssey slurm`: a script for sbatch that starts ranks, stops them in time and queues the job
again.
"""

from __future__ import annotations

import os
from typing import Any

import click

from ..cli.commands import launch as starter


@click.command(
    "slurm", short_help="Write a job script for SLURM.", context_settings=starter.BEFORE_SCRIPT
)
@click.option("-N", "--nodes", type=int, default=1, help="Machines. (default: 1)")
@click.option("--ntasks-per-node", type=int, default=1, help="Ranks of each. (default: 1)")
@click.option("--time", metavar="H:MM:SS", help="The time limit. (default: the partition's)")
@click.option(
    "--array",
    metavar="0-9%2",
    help='A job for each number; "{task}" in a word of SCRIPT\'s is the number.',
)
@click.option(
    "--sbatch",
    multiple=True,
    metavar="OPTION",
    help="One more of sbatch's, as --partition=long; repeatable.",
)
@click.option(
    "--warn",
    type=click.IntRange(1),
    default=120,
    help="Seconds before the limit to stop. (default: 120)",
)
@click.option(
    "--scratch",
    metavar="DIR",
    help="A directory of each node for temporary files. (default: TMPDIR)",
)
@click.option(
    "--cache", metavar="DIR", help="Where compiled kernels are kept. (default: ~/.cache/odyssey)"
)
@click.option(
    "--setup",
    multiple=True,
    metavar="LINE",
    help='Shell before the start, as "module load x"; repeatable.',
)
@click.option("--name", help="Of the job. (default: the script's)")
@click.option(
    "--run-dir",
    metavar="RUN",
    help="The run's directory, shared by all nodes. (default: runs/NAME-JOB)",
)
@click.option(
    "--launch", multiple=True, metavar="OPTION", help="One more of odyssey launch's; repeatable."
)
@click.argument("script", metavar="SCRIPT.py|-m MODULE|PROGRAM|train")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context,
    sbatch: tuple[str, ...],
    launch: tuple[str, ...],
    script: str,
    arguments: tuple[str, ...],
    name: str | None,
    **settings: Any,
) -> None:
    """Write a job script: odyssey slurm -N 4 --ntasks-per-node 4 train.py > job.sh; sbatch job.sh

    The job starts `odyssey launch` in its allocation. Before its time limit it stops with a
    checkpoint and is queued again; the ranks are started by srun, with the PMI of their MPI, and
    again where they never meet.
    """
    from . import batch

    starter.no_option(script, context)
    with starter.command.make_context(
        "launch", [*launch, "train"], parent=context.parent
    ) as launch_context:
        starter.no_option(launch_context.params["script"], launch_context)
    words = [script, *arguments]
    if script.endswith(".py") and not os.path.exists(os.path.expanduser(script)):
        click.echo(
            f"odyssey: [batch] {script} is not here; the job looks for it in the directory where "
            "you call sbatch",
            err=True,
        )
    click.echo(
        batch.slurm(
            words, name=name or batch.name_of(words), options=sbatch, launch=launch, **settings
        ),
        nl=False,
    )
