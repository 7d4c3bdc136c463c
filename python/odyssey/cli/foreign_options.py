"""`odyssey train --script train.py --num-nodes 4`: the words of other platforms' command lines.

They start what can be started with what they say, and name the command that can where they do not
say enough.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from ..errors import ConfigError

OPTIONS = ("--script", "--num-nodes", "--gpus-per-node", "--address", "--backend")
BACKENDS = {"auto": "auto", "mpi": "auto", "horovod": "auto", "gloo": "gloo", "pytorch-ddp": "gloo"}
NUMBER = click.IntRange(1, 1 << 20)


def has_foreign_option(words: list[str]) -> bool:
    """Returns whether there is one of these options among the words of `odyssey train`."""
    return any(word.partition("=")[0] in OPTIONS for word in words)


@click.command("train", context_settings={"ignore_unknown_options": True})
@click.option("--script", default="train")
@click.option("--num-gpus", type=NUMBER, default=1)
@click.option("--num-nodes", type=NUMBER, default=1)
@click.option("--gpus-per-node", type=NUMBER)
@click.option("--backend", default="auto")
@click.option("--address")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    script: str,
    num_gpus: int,
    num_nodes: int,
    gpus_per_node: int | None,
    backend: str,
    address: str | None,
    arguments: tuple[str, ...],
) -> NoReturn:
    """Start the ranks of a script."""
    from ..distributed.config import FRAMEWORKS
    from ..launch import DistributedLauncher, LaunchConfig

    if backend not in (*BACKENDS, "ray"):
        reason = (
            f"is another framework; {FRAMEWORKS[backend]}"
            if backend in FRAMEWORKS
            else "is unknown"
        )
        raise ConfigError(
            f"[train] --backend {backend} {reason}; choose from {', '.join((*BACKENDS, 'ray'))}"
        )
    slots = gpus_per_node or num_gpus
    launch = f"`odyssey launch -n {num_nodes * slots} --hosts h1:{slots},h2:{slots} {script}`"
    if address is not None or backend == "ray":
        raise ConfigError(
            "[train] Ray starts ranks from a Python program: ray.init(address=...) and "
            f"odyssey.ray.RayTrainer; without Ray, {launch} does, over ssh"
        )
    if num_nodes > 1 and "SLURM_JOB_ID" not in os.environ:
        raise ConfigError(
            f"[train] --num-nodes {num_nodes} does not say which machines; name them: {launch}, "
            "or have SLURM "
            f"find some: `odyssey slurm -N {num_nodes} --ntasks-per-node {slots} {script} > job.sh`"
        )
    config = LaunchConfig(
        nproc_per_node=slots, nnodes=num_nodes, backend=BACKENDS[backend], max_restarts=3
    )
    sys.exit(DistributedLauncher(config).launch(script, *arguments))
