"""`odyssey k8s`: a manifest for Kubernetes."""

from __future__ import annotations

from typing import Any

import click

from ..cli.commands import launch


@click.command(
    "k8s", short_help="Write a manifest for Kubernetes.", context_settings=launch.BEFORE_SCRIPT
)
@click.option(
    "--image", required=True, help="An image with odyssey in it, as the Dockerfile makes one."
)
@click.option("-n", "--ranks", type=int, default=1, help="Ranks altogether. (default: 1)")
@click.option(
    "--form",
    type=click.Choice(["mpijob", "job", "elastic"]),
    default="mpijob",
    help="Of the MPI operator, in several pods; or all ranks in one pod, with fewer of them too. "
    "(default: mpijob)",
)
@click.option("--slots", type=int, help="Ranks of a worker of an MPIJob. (default: 1)")
@click.option("--least", type=int, help="Ranks that an elastic run goes on with. (default: 1)")
@click.option("--name", help="Of the job. (default: the script's)")
@click.option("--queue", help="Kueue's, for which it waits. (default: none)")
@click.option(
    "--claim",
    help="A claim of a shared volume for run directories. (default: runs; a Job's end with it)",
)
@click.option("--gpus", type=click.IntRange(0), default=0, help="Of each rank. (default: 0)")
@click.option("--cpu", default="1", help="Of each rank. (default: 1)")
@click.option("--memory", default="2Gi", help="Of each rank. (default: 2Gi)")
@click.option(
    "--shm", default="1Gi", help="Of /dev/shm of a pod, which counts as its memory. (default: 1Gi)"
)
@click.argument("script", metavar="SCRIPT.py|-m MODULE|PROGRAM|train")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context,
    script: str,
    arguments: tuple[str, ...],
    name: str | None,
    **options: Any,
) -> None:
    """Write a manifest: odyssey k8s --image I -n 16 --slots 4 train.py > job.yaml; kubectl apply
    -f job.yaml
    """
    from . import batch

    launch.no_option(script, context)
    words = [script, *arguments]
    manifest = batch.kubernetes(words, name=name or batch.name_of(words), **options)
    click.echo(f"# Written by `odyssey k8s`.\n{batch.text(manifest)}")
